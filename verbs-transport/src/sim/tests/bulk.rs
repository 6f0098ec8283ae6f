//! Bulk ports by the rules of verbs, and as Soft-RoCE breaks them.

use std::{sync::Arc, time::Duration};

use verbs_bootstrap::{Psn, QpEndpoint, RdAtomic};

use super::pair::{A, B, TIMERS};
use crate::{
    fabric::{
        ConnectQpError, Fabric, QpPath, WcStatus,
        bulk::{
            Access, BulkCaps, BulkFabric, BulkOp, BulkPort, BulkQp, BulkRegion, BulkWc, BulkWr, Local, OpenBulkError,
            OwnedBytes, RegisterRegionError, Remote, Rkey,
        },
    },
    sim::{HostConfig, SimBulkPort, SimBulkQp, SimConfig, SimFabric, SimRegion, SimWorld},
};

const CAPS: BulkCaps = BulkCaps { send_wrs: 16, recv_wrs: 4 };

pub(super) struct End {
    pub(super) fabric: SimFabric,
    pub(super) port: SimBulkPort,
    pub(super) qp: Arc<SimBulkQp>,
}

impl End {
    pub(super) fn new(world: &SimWorld, addr: [u8; 4]) -> Self {
        let fabric = world.host(addr, HostConfig::default());
        let port = fabric.open_bulk(256).unwrap();
        let qp = Arc::new(port.create_qp(CAPS).unwrap());
        Self { fabric, port, qp }
    }

    pub(super) fn path_to(&self, other: &Self, rd_atomic: RdAtomic) -> QpPath {
        let psn = |end: &Self| Psn::from_random(end.qp.qpn().get());
        QpPath {
            remote: QpEndpoint { qpn: other.qp.qpn(), psn: psn(other) },
            remote_port: other.fabric.port(),
            local_psn: psn(self),
            mtu: self.fabric.port().mtu,
            rd_atomic,
            timers: TIMERS,
        }
    }

    pub(super) fn map(&self, bytes: Vec<u8>, access: Access) -> SimRegion {
        let len = bytes.len();
        self.port.register(OwnedBytes::new(bytes), 0..len, access).unwrap()
    }

    pub(super) fn poll(&self) -> Vec<BulkWc> {
        let mut wcs = Vec::new();
        self.port.poll(&mut wcs).unwrap();
        wcs
    }

    pub(super) async fn next(&self) -> BulkWc {
        loop {
            self.port.arm().unwrap();
            let mut wcs = self.poll();
            assert!(wcs.len() < 2, "one at a time: {wcs:?}");
            if let Some(wc) = wcs.pop() {
                return wc;
            }
            std::future::poll_fn(|cx| self.port.poll_wake(cx)).await.unwrap();
        }
    }

    pub(super) fn post(&self, id: u64, op: BulkOp<'_, SimRegion>) {
        self.qp.post(&[BulkWr { id, signaled: true, fence: false, op }]).unwrap();
    }

    pub(super) fn done(&self, id: u64) -> BulkWc {
        BulkWc::Done { qpn: self.qp.qpn().get(), id }
    }

    pub(super) fn failed(&self, id: u64, status: WcStatus) -> BulkWc {
        BulkWc::Failed { qpn: self.qp.qpn().get(), id, status, vendor_err: 0 }
    }
}

pub(super) const FOUR: RdAtomic = RdAtomic { initiator: 4, responder: 4 };

pub(super) async fn pair(config: SimConfig, rd_atomic: RdAtomic) -> (SimWorld, End, End) {
    let world = SimWorld::new(config);
    let (a, b) = (End::new(&world, A), End::new(&world, B));
    let back = RdAtomic { initiator: rd_atomic.responder, responder: rd_atomic.initiator };
    SimBulkQp::connect(a.qp.clone(), a.path_to(&b, rd_atomic)).await.unwrap();
    SimBulkQp::connect(b.qp.clone(), b.path_to(&a, back)).await.unwrap();
    (world, a, b)
}

pub(super) fn at(region: &SimRegion, offset: u64) -> Remote {
    Remote { addr: region.addr() + offset, rkey: region.rkey().unwrap_or(Rkey(0)) }
}

pub(super) fn all(region: &SimRegion) -> Local<'_, SimRegion> {
    Local { region, offset: 0, len: u32::try_from(region.len()).unwrap() }
}

pub(super) fn bytes(region: &SimRegion) -> Vec<u8> {
    let mut out = vec![0; region.len()];
    region.read(0, &mut out).unwrap();
    out
}

#[tokio::test(start_paused = true)]
async fn read_write_and_immediates_move_bytes_in_order() {
    let (world, a, b) = pair(SimConfig::default(), FOUR).await;
    let (mine, theirs) = (a.map(vec![0; 8], Access::DESTINATION), b.map((1..=9).collect(), Access::SOURCE));
    a.post(1, BulkOp::Read { local: all(&mine), remote: at(&theirs, 1) });
    assert_eq!((a.poll(), bytes(&mine)), (vec![a.done(1)], (2..=9).collect()));

    let target = b.map(vec![0; 16], Access::PUT_TARGET);
    b.qp.post_receives(2).unwrap();
    a.post(2, BulkOp::Write { local: Local { len: 3, ..all(&mine) }, remote: at(&target, 0) });
    assert_eq!(b.poll(), [], "a WRITE is silent");
    a.post(3, BulkOp::WriteImm { local: Local { offset: 3, len: 5, region: &mine }, remote: at(&target, 11), imm: 7 });
    a.post(4, BulkOp::SendImm { imm: 8 });
    assert_eq!(a.poll(), [a.done(2), a.done(3), a.done(4)]);
    let qpn = b.qp.qpn().get();
    assert_eq!(
        b.poll(),
        [
            BulkWc::Notified { qpn, imm: 7, bytes: 5, invalidated: None },
            BulkWc::Notified { qpn, imm: 8, bytes: 0, invalidated: None }
        ]
    );
    assert_eq!(bytes(&target), [2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 5, 6, 7, 8, 9]);
    drop((mine, theirs, target, a, b));
    world.assert_quiet();
}

/// one error, both QPs of the pair in ERR, what is behind it flushed, and nothing else.
#[tokio::test(start_paused = true)]
async fn every_wrong_right_is_a_remote_access_error_on_both_sides() {
    type Spoil = fn(&SimRegion) -> Remote;
    let cases: [(&str, Access, Spoil); 6] = [
        ("a wrong key", Access::SOURCE, |region| Remote { rkey: Rkey(99), ..at(region, 0) }),
        ("one byte beyond", Access::SOURCE, |region| at(region, 1)),
        ("before the start", Access::SOURCE, |region| Remote { addr: region.addr() - 1, ..at(region, 0) }),
        ("a wrapping address", Access::SOURCE, |region| Remote { addr: u64::MAX - 2, ..at(region, 0) }),
        ("no remote read", Access::PUT_TARGET, |region| at(region, 0)),
        ("no key at all", Access::DESTINATION, |region| at(region, 0)),
    ];
    for (what, access, spoil) in cases {
        let (_world, a, b) = pair(SimConfig::default(), FOUR).await;
        b.qp.post_receives(1).unwrap();
        let (mine, theirs) = (a.map(vec![0; 8], Access::DESTINATION), b.map(vec![1; 8], access));
        a.post(1, BulkOp::Read { local: all(&mine), remote: spoil(&theirs) });
        a.post(2, BulkOp::Read { local: all(&mine), remote: at(&theirs, 0) });
        assert_eq!(a.poll(), [a.failed(1, WcStatus::RemoteAccess), a.failed(2, WcStatus::Flushed)], "{what}");
        assert_eq!(bytes(&mine), [0; 8], "{what}");
        let flushed = BulkWc::NotifyFailed { qpn: b.qp.qpn().get(), status: WcStatus::Flushed };
        assert_eq!((b.poll(), b.qp.is_rts().unwrap()), (vec![flushed], false), "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_dies_with_its_region_and_is_not_given_out_again() {
    let (_world, a, b) = pair(SimConfig::default(), FOUR).await;
    let (mine, theirs) = (a.map(vec![0; 8], Access::DESTINATION), b.map(vec![1; 8], Access::SOURCE));
    let stale = at(&theirs, 0);
    theirs.deregister().unwrap();
    let successor = b.map(vec![2; 8], Access::SOURCE);
    assert_ne!(successor.rkey(), Some(stale.rkey));
    a.post(1, BulkOp::Read { local: all(&mine), remote: stale });
    assert_eq!((a.poll(), bytes(&mine)), (vec![a.failed(1, WcStatus::RemoteAccess)], vec![0; 8]));
}

pub(super) fn slow() -> SimConfig {
    SimConfig { bulk_bytes_per_second: 64 << 20, ..SimConfig::default() }
}

/// As on Soft-RoCE: the owner's QP falls without a word, and the reader's retries run out.
#[tokio::test(start_paused = true)]
async fn deregistered_during_a_read_is_silence_at_the_reader() {
    let (_world, a, b) = pair(slow(), FOUR).await;
    let (mine, theirs) = (a.map(vec![0; 1 << 20], Access::DESTINATION), b.map(vec![1; 1 << 20], Access::SOURCE));
    a.post(1, BulkOp::Read { local: all(&mine), remote: at(&theirs, 0) });
    tokio::time::sleep(Duration::from_millis(5)).await;
    theirs.deregister().unwrap();
    assert_eq!(a.next().await, a.failed(1, WcStatus::RetryExceeded));
    let got = bytes(&mine);
    assert!(got[0] == 1 && got[(1 << 20) - 1] == 0, "torn, as R-8 says");
    assert_eq!((b.poll(), b.qp.is_rts().unwrap()), (vec![], false));
}

#[tokio::test(start_paused = true)]
async fn a_local_region_dropped_under_a_read_stops_it_before_its_memory_goes() {
    let (_world, a, b) = pair(slow(), FOUR).await;
    let memory = OwnedBytes::new(vec![0; 1 << 20]);
    let mine = a.port.register(memory.clone(), 0..1 << 20, Access::DESTINATION).unwrap();
    let theirs = b.map(vec![1; 1 << 20], Access::SOURCE);
    a.post(1, BulkOp::Read { local: all(&mine), remote: at(&theirs, 0) });
    tokio::time::sleep(Duration::from_millis(5)).await;
    mine.deregister().unwrap();
    let back = OwnedBytes::into_vec(memory).expect("nobody else holds it");
    assert_eq!(a.next().await, a.failed(1, WcStatus::LocalProtection));
    assert!(back[0] == 1 && back[(1 << 20) - 1] == 0);
}

/// with one READ at once, each pays the way there and back; with four, they share it.
#[tokio::test(start_paused = true)]
async fn the_initiators_limit_paces_reads() {
    let mut took = Vec::new();
    for limit in [1, 4] {
        let latency = Duration::from_millis(10);
        let config = SimConfig { latency: latency..=latency, ..SimConfig::default() };
        let (_world, a, b) = pair(config, RdAtomic { initiator: limit, responder: 1 }).await;
        let (mine, theirs) = (a.map(vec![0; 8], Access::DESTINATION), b.map(vec![1; 8], Access::SOURCE));
        let began = tokio::time::Instant::now();
        (1..=4).for_each(|id| a.post(id, BulkOp::Read { local: all(&mine), remote: at(&theirs, 0) }));
        let mut seen = 0;
        while seen < 4 {
            a.port.arm().unwrap();
            seen += a.poll().len();
            if seen < 4 {
                std::future::poll_fn(|cx| a.port.poll_wake(cx)).await.unwrap();
            }
        }
        took.push(began.elapsed());
    }
    assert!(took[1] < Duration::from_millis(25) && took[0] >= Duration::from_millis(45), "{took:?}");
}

/// B18: more than the peer answers.
#[tokio::test(start_paused = true)]
async fn more_reads_than_the_responder_takes_are_an_invalid_request() {
    let world = SimWorld::new(SimConfig {
        latency: Duration::from_millis(1)..=Duration::from_millis(1),
        ..SimConfig::default()
    });
    let (a, b) = (End::new(&world, A), End::new(&world, B));
    SimBulkQp::connect(a.qp.clone(), a.path_to(&b, FOUR)).await.unwrap();
    let stingy = RdAtomic { initiator: 4, responder: 1 };
    SimBulkQp::connect(b.qp.clone(), b.path_to(&a, stingy)).await.unwrap();
    let (mine, theirs) = (a.map(vec![0; 8], Access::DESTINATION), b.map(vec![1; 8], Access::SOURCE));
    (1..=2).for_each(|id| a.post(id, BulkOp::Read { local: all(&mine), remote: at(&theirs, 0) }));
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(a.poll(), [a.done(1), a.failed(2, WcStatus::RemoteInvalidRequest)]);
}

#[tokio::test(start_paused = true)]
async fn a_qp_without_reads_is_refused_before_it_can_hang() {
    let world = SimWorld::new(SimConfig::default());
    let (a, b) = (End::new(&world, A), End::new(&world, B));
    for (initiator, responder) in [(0, 1), (1, 0)] {
        let path = a.path_to(&b, RdAtomic { initiator, responder });
        let refused = SimBulkQp::connect(a.qp.clone(), path).await;
        assert!(matches!(refused, Err(ConnectQpError::NoReads { .. })), "{refused:?}");
    }
    let none = HostConfig { rd_atomic: RdAtomic { initiator: 16, responder: 0 }, ..HostConfig::default() };
    let refused = world.host([10, 0, 0, 3], none).open_bulk(16).map(drop);
    assert!(matches!(refused, Err(OpenBulkError::NoReads(_))), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn an_immediate_without_a_receive_waits_for_one() {
    let (world, a, b) = pair(SimConfig::default(), FOUR).await;
    a.post(1, BulkOp::SendImm { imm: 1 });
    assert_eq!(a.poll(), []);
    b.qp.post_receives(1).unwrap();
    assert_eq!(a.next().await, a.done(1));
    assert!(world.stats().rnr_naks > 0);
}

#[tokio::test(start_paused = true)]
async fn what_may_not_be_posted_is_refused_and_posts_nothing() {
    let (_world, a, b) = pair(SimConfig::default(), FOUR).await;
    let (mine, theirs) = (a.map(vec![0; 8], Access::DESTINATION), b.map(vec![1; 8], Access::SOURCE));
    let read = || BulkOp::Read { local: all(&mine), remote: at(&theirs, 0) };
    let good = || BulkWr { id: 1, signaled: true, fence: false, op: read() };
    let foreign = BulkOp::Read { local: all(&theirs), remote: at(&theirs, 0) };
    let beyond = BulkOp::Read { local: Local { offset: 1, len: 8, region: &mine }, remote: at(&theirs, 0) };
    let bad = [
        BulkWr { id: 2, op: foreign, ..good() },
        BulkWr { id: 2, op: beyond, ..good() },
        BulkWr { id: 1 << 63, ..good() },
    ];
    for wr in bad {
        let refused = a.qp.post(&[good(), wr]).unwrap_err();
        assert_eq!((refused.posted, refused.source.kind()), (0, std::io::ErrorKind::InvalidInput));
    }
    assert_eq!(a.poll(), []);
    for id in 0..16 {
        a.qp.post(&[BulkWr { id, signaled: false, ..good() }]).unwrap();
    }
    let full = a.qp.post(&[good()]).unwrap_err();
    assert_eq!(full.source.raw_os_error(), Some(12), "no slot comes back without a polled WC");
}

#[tokio::test(start_paused = true)]
async fn memory_that_the_device_keeps_is_never_freed() {
    let (world, a, b) = pair(SimConfig::default(), FOUR).await;
    let memory = OwnedBytes::new(vec![0; 8]);
    let region = a.port.register(memory.clone(), 0..8, Access::DESTINATION).unwrap();
    world.refuse_deregister(A, true);
    let (region, error) = region.deregister().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(22));
    drop(region);
    OwnedBytes::into_vec(memory).expect_err("leaked on purpose");
    world.refuse_deregister(A, false);
    world.refuse_destroy(B, true);
    let (qp, _) = SimBulkQp::destroy(b.qp).unwrap_err();
    drop(qp);
    let live = |index: usize| (world.report().hosts[index].live_regions, world.report().hosts[index].live_bulk_qps);
    assert_eq!((live(0), live(1)), ((1, 1), (0, 1)));
}

#[tokio::test(start_paused = true)]
async fn a_qp_that_was_kept_once_may_be_destroyed_later() {
    let (world, _a, b) = pair(SimConfig::default(), FOUR).await;
    world.refuse_destroy(B, true);
    let (qp, _) = SimBulkQp::destroy(b.qp).unwrap_err();
    world.refuse_destroy(B, false);
    SimBulkQp::destroy(qp).unwrap();
    assert_eq!(world.report().hosts[1].live_bulk_qps, 0);
}

#[tokio::test(start_paused = true)]
async fn a_region_is_a_part_of_its_memory() {
    let world = SimWorld::new(SimConfig::default());
    let a = End::new(&world, A);
    let register =
        |range| a.port.register(OwnedBytes::new(vec![0; 8]), range, Access::SOURCE).map(|region| region.len());
    assert_eq!(register(2..7).unwrap(), 5);
    for range in [0..0, 4..9, 8..8] {
        let refused = register(range.clone());
        assert!(matches!(refused, Err(RegisterRegionError::Range { len: 8, .. })), "{range:?}: {refused:?}");
    }
}
