//! The simulated device behind the traits of [`fabric`](crate::fabric).

use std::{
    net::IpAddr,
    sync::Arc,
    task::{Context, Poll},
};

use verbs_bootstrap::{PortIdentity, Qpn};

use super::{
    config::HostConfig,
    hca::{HostKey, QpKey},
    net::SimNet,
    qp::State,
    stats::{HostLife, HostReport},
    trouble::Cause,
    world::Shared,
};
use crate::fabric::{
    AsyncEvent, ConnectQpError, CreateQpError, DeviceLimits, Fabric, FabricError, FabricQp, HwCounters, PostError,
    QpCaps, QpPath, RecvSlab, SendSlab, SendWr, SlabSizes, Wc,
};

/// One simulated host's device: [`SimWorld::host`](super::SimWorld::host) makes it. Its device closes when it and all
/// its QPs are dropped.
#[derive(Debug)]
pub struct SimFabric {
    device: Arc<Device>,
    net: SimNet,
}

/// One simulated RC QP.
#[derive(Debug)]
pub struct SimQp {
    device: Arc<Device>,
    key: QpKey,
    qpn: Qpn,
    caps: QpCaps,
}

/// An opened device; closes on drop.
#[derive(Debug)]
struct Device {
    world: Arc<Shared>,
    host: HostKey,
    limits: DeviceLimits,
    slabs: SlabSizes,
    port: PortIdentity,
}

impl SimFabric {
    pub(super) fn new(world: Arc<Shared>, host: HostKey, addr: IpAddr, config: &HostConfig) -> Self {
        let limits = DeviceLimits {
            qp_wrs: config.qp_wrs,
            srq_wrs: 32_767,
            cqes: 32_767,
            cq_depth: config.cq_depth,
            qps: config.max_qps,
            message_bytes: config.message_bytes,
            rd_atomic: config.rd_atomic,
        };
        let port = world.with(|hca| hca.host(host).port);
        let device = Device { world: Arc::clone(&world), host, limits, slabs: config.slabs, port };
        Self { device: Arc::new(device), net: SimNet::new(world, addr) }
    }

    /// What is where on this host.
    pub fn report(&self) -> HostReport {
        let host = self.device.host.0;
        self.device.world.touch(|hca| hca.report().swap_remove(host))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.world.touch(|hca| hca.host_mut(self.host).end(HostLife::Closed));
    }
}

impl Fabric for SimFabric {
    type Qp = SimQp;
    type Net = SimNet;

    fn net(&self) -> &SimNet {
        &self.net
    }

    fn limits(&self) -> DeviceLimits {
        self.device.limits
    }

    fn slabs(&self) -> SlabSizes {
        self.device.slabs
    }

    fn port(&self) -> PortIdentity {
        self.device.port
    }

    fn path_reason(&self) -> String {
        format!("sim{} port 1 gid {}: the only one of this simulated host", self.device.host.0, self.device.port.gid)
    }

    fn hw_counters(&self) -> HwCounters {
        let sent = self.report().stats.rnr_naks;
        HwCounters { rnr_naks_sent: Some(sent), ..HwCounters::default() }
    }

    fn take_slabs(&self) -> (Vec<RecvSlab>, Vec<SendSlab>) {
        let host = self.device.host;
        let before = self.device.world.touch(|hca| std::mem::replace(&mut hca.host_mut(host).slabs_taken, true));
        assert!(!before, "sim: the slabs of a fabric are taken once");
        let slabs = self.device.slabs;
        ((0..slabs.receive_slabs).map(RecvSlab::mint).collect(), (0..slabs.send_slabs).map(SendSlab::mint).collect())
    }

    fn write_slab(&self, slab: &mut SendSlab, offset: usize, bytes: &[u8]) {
        let slot = slot(slab.index(), self.device.slabs.send_bytes, offset, bytes.len());
        self.device.world.touch(|hca| {
            let host = hca.host_mut(self.device.host);
            let busy = host.send_busy[slab.index() as usize];
            assert!(!busy, "sim: send slab {} rewritten before a WC covered its WR", slab.index());
            if host.life == HostLife::Open {
                host.send_memory[slot].copy_from_slice(bytes);
            }
        });
    }

    fn read_slab(&self, slab: &RecvSlab, offset: usize, out: &mut [u8]) {
        let slot = slot(slab.index(), self.device.slabs.receive_bytes, offset, out.len());
        self.device.world.touch(|hca| {
            let host = hca.host(self.device.host);
            host.srq.assert_with_caller(slab.index());
            if host.life == HostLife::Open {
                out.copy_from_slice(&host.receive_memory[slot]);
            }
        });
    }

    fn append_slab(&self, slab: &RecvSlab, offset: usize, len: usize, out: &mut Vec<u8>) {
        let slot = slot(slab.index(), self.device.slabs.receive_bytes, offset, len);
        self.device.world.touch(|hca| {
            let host = hca.host(self.device.host);
            host.srq.assert_with_caller(slab.index());
            if host.life == HostLife::Open {
                out.extend_from_slice(&host.receive_memory[slot]);
            } else {
                out.resize(out.len() + len, 0);
            }
        });
    }

    fn post_receives(&self, slabs: &mut Vec<RecvSlab>) -> Result<(), PostError> {
        self.device.world.with(|hca| {
            let refused = |lost: FabricError| PostError { posted: 0, asked: slabs.len(), source: lost.source };
            hca.alive(self.device.host, "posting receives").map_err(refused)?;
            let srq = &mut hca.host_mut(self.device.host).srq;
            slabs.drain(..).for_each(|slab| srq.post(slab.index()));
            Ok(())
        })
    }

    fn arm_srq_limit(&self, receives: u32) -> Result<(), FabricError> {
        self.device.world.with(|hca| {
            hca.alive(self.device.host, "arming the SRQ limit")?;
            hca.host_mut(self.device.host).srq.arm_limit(receives);
            Ok(())
        })
    }

    fn create_qp(&self, caps: QpCaps) -> Result<SimQp, CreateQpError> {
        let (key, qpn) = self.device.world.with(|hca| hca.create_qp(self.device.host, caps))?;
        Ok(SimQp { device: Arc::clone(&self.device), key, qpn, caps })
    }

    fn poll(&self, into: &mut Vec<Wc>) -> Result<usize, FabricError> {
        self.device.world.with(|hca| hca.poll(self.device.host, into))
    }

    fn arm(&self) -> Result<(), FabricError> {
        self.device.world.with(|hca| hca.arm(self.device.host))
    }

    fn poll_wake(&self, cx: &mut Context<'_>) -> Poll<Result<(), FabricError>> {
        self.device.world.with(|hca| {
            hca.alive(self.device.host, "waiting for completions")?;
            let cq = &mut hca.host_mut(self.device.host).cq;
            if cq.take_events() {
                return Poll::Ready(Ok(()));
            }
            cq.register(cx.waker());
            Poll::Pending
        })
    }

    fn poll_async_event(&self, cx: &mut Context<'_>) -> Poll<Result<AsyncEvent, FabricError>> {
        let event = self.device.world.with(|hca| hca.next_async_event(self.device.host, cx.waker()));
        event.map_or(Poll::Pending, |event| Poll::Ready(Ok(event)))
    }
}

impl FabricQp for SimQp {
    fn qpn(&self) -> Qpn {
        self.qpn
    }

    fn caps(&self) -> QpCaps {
        self.caps
    }

    async fn connect(qp: Arc<Self>, path: QpPath) -> Result<(), ConnectQpError> {
        let (delay, verdict) = qp.device.world.with(|hca| hca.route(qp.key, &path));
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        verdict?;
        qp.device.world.with(|hca| hca.connected(qp.key, &path))
    }

    fn post(&self, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        self.device.world.with(|hca| hca.post(self.key, wrs))
    }

    fn to_error(&self) -> Result<(), FabricError> {
        self.device.world.with(|hca| {
            hca.alive(self.device.host, "modify_qp to ERR")?;
            hca.enter_error(self.key, Cause::Asked);
            Ok(())
        })
    }

    fn is_rts(&self) -> Result<bool, FabricError> {
        self.device.world.with(|hca| {
            hca.alive(self.device.host, "query_qp")?;
            Ok(hca.qp(self.key).is_some_and(|qp| qp.state == State::Rts))
        })
    }
}

impl Drop for SimQp {
    fn drop(&mut self) {
        self.device.world.with(|hca| hca.destroy_qp(self.key));
    }
}

/// The bytes of a slab's slot that a call means.
fn slot(index: u32, slab_bytes: u32, offset: usize, len: usize) -> std::ops::Range<usize> {
    let end = offset.checked_add(len).filter(|end| *end <= slab_bytes as usize);
    assert!(end.is_some(), "sim: {len} bytes at {offset} do not fit a slab of {slab_bytes}");
    let start = index as usize * slab_bytes as usize + offset;
    start..start + len
}
