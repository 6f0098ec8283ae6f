//! Memory windows of type 2B on the device. Soft-RoCE's do not keep a peer within their bounds, so that only a
//! configuration that insists gets them; everything else about them is as it should be.

use std::{
    cell::RefCell,
    collections::{BTreeSet, VecDeque},
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use verbs_bootstrap::{Psn, QpEndpoint, RdAtomic};
use verbs_transport::{
    fabric::{
        Fabric, QpPath,
        bulk::{
            Access, AllocWindowError, BulkCaps, BulkFabric, BulkOp, BulkPort, BulkQp, BulkRegion, BulkWc, BulkWindow,
            BulkWr, DestroyQpError, Local, OwnedBytes, Remote, Rkey, WindowPolicy, WindowSupport,
        },
    },
    verbs::{DeviceBulkPort, DeviceBulkQp, DeviceConfig, DeviceRegion},
};

use crate::rig::{Device, TIMERS, config, leaving_nothing, open};

const PATIENCE: Duration = Duration::from_secs(30);

struct End {
    port: DeviceBulkPort,
    qp: Arc<DeviceBulkQp>,
    /// Polled and not asked for.
    came: RefCell<VecDeque<BulkWc>>,
}

impl End {
    fn new(device: &Device) -> Self {
        let port = device.open_bulk(256).expect("a bulk port");
        let qp = Arc::new(port.create_qp(BulkCaps { send_wrs: 16, recv_wrs: 4 }).expect("a QP"));
        qp.post_receives(4).expect("room");
        Self { port, qp, came: RefCell::default() }
    }

    fn map(&self, bytes: Vec<u8>, access: Access) -> DeviceRegion {
        let len = bytes.len();
        self.port.register(OwnedBytes::new(bytes), 0..len, access).expect("registered")
    }

    fn post(&self, wr: BulkWr<'_, DeviceRegion>) {
        self.qp.post(&[wr]).expect("posted");
    }

    fn next(&self) -> BulkWc {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(wc) = self.came.borrow_mut().pop_front() {
                return wc;
            }
            let mut wcs = Vec::new();
            self.port.poll(&mut wcs).expect("a CQ");
            self.came.borrow_mut().extend(wcs);
            assert!(Instant::now() < deadline, "no completion");
            std::thread::yield_now();
        }
    }

    fn done(&self, id: u64) -> BulkWc {
        BulkWc::Done { qpn: self.qp.qpn().get(), id }
    }

    fn does(&self, id: u64, op: BulkOp<'_, DeviceRegion>) {
        self.post(wr(id, op));
        assert_eq!(self.next(), self.done(id));
    }
}

fn wr(id: u64, op: BulkOp<'_, DeviceRegion>) -> BulkWr<'_, DeviceRegion> {
    BulkWr { id, signaled: true, fence: false, op }
}

async fn pair(device: &Device) -> (End, End) {
    let (a, b) = (End::new(device), End::new(device));
    let psn = |end: &End| Psn::from_random(end.qp.qpn().get());
    for (from, to) in [(&a, &b), (&b, &a)] {
        let port = device.port();
        let path = QpPath {
            remote: QpEndpoint { qpn: to.qp.qpn(), psn: psn(to) },
            remote_port: port,
            local_psn: psn(from),
            mtu: port.mtu,
            rd_atomic: RdAtomic { initiator: 4, responder: 4 },
            timers: TIMERS,
        };
        DeviceBulkQp::connect(Arc::clone(&from.qp), path).await.expect("a path");
    }
    (a, b)
}

fn forced() -> Device {
    let device = DeviceConfig { windows: WindowPolicy::Always, ..config() };
    open(&device).unwrap_or_else(|error| panic!("this test needs a device: {error}"))
}

fn all(region: &DeviceRegion) -> Local<'_, DeviceRegion> {
    Local { region, offset: 0, len: u32::try_from(region.len()).expect("small") }
}

fn bytes(region: &DeviceRegion) -> Vec<u8> {
    let mut out = vec![0; region.len()];
    region.read(0, &mut out).expect("within");
    out
}

fn receipt(of: &End, key: Rkey) -> BulkWc {
    BulkWc::Notified { qpn: of.qp.qpn().get(), imm: 0, bytes: 0, invalidated: Some(key) }
}

fn bind(b: &End, window: &<DeviceRegion as BulkRegion>::Window, region: &DeviceRegion, access: Access) -> Rkey {
    b.does(900, BulkOp::Bind { window, region, range: 0..region.len(), access });
    window.rkey().expect("bound")
}

#[test]
fn soft_roce_has_no_usable_windows_and_the_reason_is_told() {
    leaving_nothing(async {
        for (windows, want) in [
            (WindowPolicy::Auto, WindowSupport::NotEnforced),
            (WindowPolicy::Never, WindowSupport::SwitchedOff),
            (WindowPolicy::Always, WindowSupport::Forced),
        ] {
            let device = open(&DeviceConfig { windows, ..config() }).expect("a device");
            let port = device.open_bulk(16).expect("a bulk port");
            assert_eq!(port.limits().windows, want);
            match port.alloc_window() {
                Ok(window) => assert!(want.usable() && !window.is_bound()),
                Err(error) => assert!(matches!(error, AllocWindowError::NotUsable(why) if why == want), "{error}"),
            }
        }
    });
}

/// E-54 to E-57: READ and WRITE by the window's key, then its end by a fenced SEND with invalidate whose receipt names it.
#[test]
fn a_window_is_read_and_written_until_the_peer_ends_it() {
    leaving_nothing(async {
        let device = forced();
        let (a, b) = pair(&device).await;
        let mine = a.map(vec![0; 1 << 20], Access::DESTINATION);
        let arena = b.map(vec![7; 1 << 20], Access::WINDOWS.and(Access::DESTINATION));
        assert_eq!(arena.rkey(), None);
        let window = b.port.alloc_window().expect("a window");
        let rkey = bind(&b, &window, &arena, Access::SOURCE.and(Access::PUT_TARGET));
        let remote = Remote { addr: arena.addr(), rkey };
        a.does(1, BulkOp::Read { local: all(&mine), remote });
        assert!(bytes(&mine).iter().all(|byte| *byte == 7));
        mine.write(0, &[8; 16]).expect("within");
        a.does(2, BulkOp::Write { local: Local { len: 16, ..all(&mine) }, remote });

        // READs and the receipt in one chain: the fence holds it until the last of them is answered.
        for id in 10..14 {
            a.post(wr(id, BulkOp::Read { local: all(&mine), remote }));
        }
        a.post(BulkWr { fence: true, ..wr(14, BulkOp::SendInvalidate { rkey }) });
        for id in 10..15 {
            assert_eq!(a.next(), a.done(id));
        }
        assert_eq!(
            (&bytes(&mine)[..16], &bytes(&arena)[..17]),
            (&[8; 16][..], &[[8; 16].as_slice(), &[7]].concat()[..])
        );
        assert_eq!((b.next(), window.is_bound()), (receipt(&b, rkey), false));

        a.post(wr(3, BulkOp::Read { local: all(&mine), remote }));
        assert!(matches!(a.next(), BulkWc::Failed { id: 3, .. }), "a dead key");
        assert!(!a.qp.is_rts().expect("a state"));
        arena.deregister().expect("no window is bound to it");
    });
}

/// Revocation by the owner: after its completion the key opens nothing, and the region and the QP can go.
#[test]
fn an_invalidated_window_is_dead_and_holds_nothing_back() {
    leaving_nothing(async {
        let device = forced();
        let (a, b) = pair(&device).await;
        let mine = a.map(vec![0; 8], Access::DESTINATION);
        let arena = b.map(vec![7; 8], Access::WINDOWS);
        let window = b.port.alloc_window().expect("a window");
        let rkey = bind(&b, &window, &arena, Access::SOURCE);
        let (arena, error) = arena.deregister().expect_err("a window is bound to it");
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        let began = Instant::now();
        let End { port, qp, came } = b;
        let (qp, error) = DeviceBulkQp::destroy(qp).expect_err("a window is bound on it");
        assert!(matches!(error, DestroyQpError::WindowsBound { windows: 1, .. }), "{error}");
        assert!(began.elapsed() < Duration::from_secs(5), "refused without the kernel");
        let b = End { port, qp, came };
        b.does(1, BulkOp::LocalInvalidate { rkey });
        assert!(!window.is_bound());
        a.post(wr(1, BulkOp::Read { local: all(&mine), remote: Remote { addr: arena.addr(), rkey } }));
        assert!(matches!(a.next(), BulkWc::Failed { id: 1, .. }));
        assert_eq!(bytes(&mine), [0; 8]);
        arena.deregister().expect("free");
        DeviceBulkQp::destroy(b.qp).expect("free");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    });
}

/// A QP in ERR can invalidate nothing. Its windows are freed, and then it goes at once; also when it was dropped first.
#[test]
fn freed_windows_let_a_broken_qp_go() {
    leaving_nothing(async {
        for dropped_first in [false, true] {
            let device = forced();
            let (_a, b) = pair(&device).await;
            let arena = b.map(vec![7; 8], Access::WINDOWS);
            let window = b.port.alloc_window().expect("a window");
            let rkey = bind(&b, &window, &arena, Access::SOURCE);
            b.qp.to_error().expect("ERR");
            b.post(wr(1, BulkOp::LocalInvalidate { rkey }));
            let deadline = Instant::now() + PATIENCE;
            let mut wcs = Vec::new();
            while !wcs.iter().any(|wc| matches!(wc, BulkWc::Failed { id: 1, .. })) {
                assert!(Instant::now() < deadline, "{wcs:?}");
                b.port.poll(&mut wcs).expect("a CQ");
            }
            assert!(window.is_bound());
            let began = Instant::now();
            if dropped_first {
                drop((b, arena));
                window.free().expect("freed");
            } else {
                window.free().expect("freed");
                DeviceBulkQp::destroy(b.qp).expect("free");
                arena.deregister().expect("free");
            }
            assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        }
    });
}

#[test]
fn three_hundred_binds_take_two_windows_and_no_key_twice() {
    leaving_nothing(async {
        let device = forced();
        let (a, b) = pair(&device).await;
        let (mine, arena) = (a.map(vec![0; 8], Access::DESTINATION), b.map(vec![7; 8], Access::WINDOWS));
        let window = b.port.alloc_window().expect("a window");
        let mut keys = BTreeSet::new();
        for round in 0..300 {
            let rkey = bind(&b, &window, &arena, Access::SOURCE);
            assert!(keys.insert(rkey.0), "round {round}: {rkey:?} came twice");
            if round % 100 == 99 {
                a.does(1, BulkOp::Read { local: all(&mine), remote: Remote { addr: arena.addr(), rkey } });
            }
            b.does(2, BulkOp::LocalInvalidate { rkey });
        }
        let windows: BTreeSet<u32> = keys.iter().map(|key| key >> 8).collect();
        assert_eq!(windows.len(), 2);
    });
}
