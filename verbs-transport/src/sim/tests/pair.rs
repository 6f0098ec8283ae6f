//! Two hosts with one connected pair of QPs, driven by hand.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use verbs_bootstrap::{Mtu, Psn, QpEndpoint, RdAtomic};

use crate::{
    fabric::{
        AsyncEvent, ConnectQpError, Fabric, FabricQp, PostError, QpCaps, QpPath, QpTimers, RecvSlab, SendData,
        SendSlab, SendWr, SlabSizes, Wc, WrSeq,
    },
    sim::{HostConfig, SimConfig, SimFabric, SimQp, SimWorld},
};

pub(super) const A: [u8; 4] = [10, 0, 0, 1];
pub(super) const B: [u8; 4] = [10, 0, 0, 2];
pub(super) const CAPS: QpCaps = QpCaps { send_wrs: 16, inline_bytes: 256 };
pub(super) const TIMERS: QpTimers =
    QpTimers { ack_timeout_code: 16, retry_cnt: 6, rnr_retry: 7, min_rnr_timer_code: 12 };

/// Small slabs, so that running out of them is easy.
pub(super) fn small() -> HostConfig {
    HostConfig {
        slabs: SlabSizes { receive_slabs: 8, receive_bytes: 1024, send_slabs: 8, send_bytes: 2048 },
        ..HostConfig::default()
    }
}

/// One host's fabric with the tokens that it gave.
pub(super) struct Side {
    pub(super) fabric: SimFabric,
    pub(super) receives: Vec<RecvSlab>,
    pub(super) sends: Vec<SendSlab>,
}

impl Side {
    pub(super) fn new(world: &SimWorld, addr: [u8; 4], config: HostConfig) -> Self {
        let fabric = world.host(addr, config);
        let (receives, sends) = fabric.take_slabs();
        Self { fabric, receives, sends }
    }

    /// Posts `count` receives.
    pub(super) fn post_receives(&mut self, count: usize) {
        let mut some: Vec<_> = self.receives.drain(..count).collect();
        self.fabric.post_receives(&mut some).unwrap();
        assert!(some.is_empty());
    }

    pub(super) fn qp(&self) -> Arc<SimQp> {
        Arc::new(self.fabric.create_qp(CAPS).unwrap())
    }

    pub(super) fn poll(&self) -> Vec<Wc> {
        let mut wcs = Vec::new();
        self.fabric.poll(&mut wcs).unwrap();
        wcs
    }

    /// The bytes of every message that is there; the slabs come home.
    pub(super) fn messages(&mut self) -> Vec<Vec<u8>> {
        let take = |wc| match wc {
            Wc::Receive { slab, bytes, .. } => {
                let mut out = Vec::new();
                self.fabric.append_slab(&slab, 0, bytes as usize, &mut out);
                self.receives.push(slab);
                out
            }
            other => panic!("a message, not {other:?}"),
        };
        let mut wcs = Vec::new();
        self.fabric.poll(&mut wcs).unwrap();
        wcs.into_iter().map(take).collect()
    }

    pub(super) fn woken(&self) -> bool {
        self.fabric.poll_wake(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    pub(super) async fn wake(&self) {
        let an_hour = std::time::Duration::from_secs(3600);
        tokio::time::timeout(an_hour, poll_fn(|cx| self.fabric.poll_wake(cx))).await.expect("a wake-up").unwrap();
    }

    pub(super) fn event(&self) -> Option<AsyncEvent> {
        match self.fabric.poll_async_event(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(event) => Some(event.unwrap()),
            Poll::Pending => None,
        }
    }
}

pub(super) fn path(own: u32, remote: &SimQp, remote_psn: u32, to: &SimFabric) -> QpPath {
    QpPath {
        remote: QpEndpoint { qpn: remote.qpn(), psn: Psn::new(remote_psn).unwrap() },
        remote_port: to.port(),
        local_psn: Psn::new(own).unwrap(),
        mtu: Mtu::B1024,
        rd_atomic: RdAtomic { initiator: 1, responder: 1 },
        timers: TIMERS,
    }
}

pub(super) async fn connect(
    a: (&Side, &Arc<SimQp>),
    b: (&Side, &Arc<SimQp>),
    change: impl Fn(&mut QpPath),
) -> Result<(), ConnectQpError> {
    let mut there = path(0x00ff_fffe, b.1, 77, &b.0.fabric);
    let mut back = path(77, a.1, 0x00ff_fffe, &a.0.fabric);
    change(&mut there);
    change(&mut back);
    SimQp::connect(Arc::clone(b.1), back).await?;
    SimQp::connect(Arc::clone(a.1), there).await
}

/// Two hosts, connected; B has posted all its receives.
pub(super) struct Pair {
    pub(super) world: SimWorld,
    pub(super) a: Side,
    pub(super) b: Side,
    pub(super) qp_a: Arc<SimQp>,
    pub(super) qp_b: Arc<SimQp>,
    next: u64,
}

impl Pair {
    pub(super) async fn new() -> Self {
        Self::with(SimConfig::default(), small(), |_| {}).await
    }

    pub(super) async fn with(config: SimConfig, host: HostConfig, change: impl Fn(&mut QpPath)) -> Self {
        let world = SimWorld::new(config);
        let a = Side::new(&world, A, host);
        let mut b = Side::new(&world, B, host);
        let all = b.receives.len();
        b.post_receives(all);
        let (qp_a, qp_b) = (a.qp(), b.qp());
        connect((&a, &qp_a), (&b, &qp_b), change).await.unwrap();
        Self { world, a, b, qp_a, qp_b, next: 0 }
    }

    /// Posts one inline SEND from A.
    pub(super) fn send(&mut self, bytes: &[u8], signaled: bool) -> Result<(), PostError> {
        let wr = SendWr { seq: WrSeq(self.next), signaled, data: SendData::Inline(bytes) };
        self.qp_a.post(&[wr])?;
        self.next += 1;
        Ok(())
    }

    /// Posts `len` bytes of A's first send slab.
    pub(super) fn send_slab(&mut self, slab: &SendSlab, len: u32, signaled: bool) -> Result<(), PostError> {
        let wr = SendWr { seq: WrSeq(self.next), signaled, data: SendData::Slab { slab, len } };
        self.qp_a.post(&[wr])?;
        self.next += 1;
        Ok(())
    }
}
