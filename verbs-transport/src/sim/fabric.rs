//! The simulated device behind the traits of [`fabric`](crate::fabric).

use std::{
    net::IpAddr,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
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
    AsyncEvent, ConnectQpError, CreateQpError, DeviceLimits, Fabric, FabricError, FabricQp, HwCounters, Nic, PostError,
    QpCaps, QpPath, RecvSlab, SendSlab, SendWr, SlabSizes, Wc, bulk::WindowSupport,
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
pub(super) struct Device {
    pub(super) world: Arc<Shared>,
    pub(super) host: HostKey,
    pub(super) limits: DeviceLimits,
    pub(super) max_regions: u32,
    pub(super) windows: WindowSupport,
    slabs: SlabSizes,
    port: PortIdentity,
    numa_node: Option<u16>,
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
        let device = Device {
            world: Arc::clone(&world),
            host,
            limits,
            max_regions: config.max_regions,
            windows: WindowSupport::judge(config.windows, true, config.max_windows, true),
            slabs: config.slabs,
            port,
            numa_node: config.numa_node,
        };
        Self { device: Arc::new(device), net: SimNet::new(world, addr) }
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// What is where on this host.
    pub fn report(&self) -> HostReport {
        let host = self.device.host.0;
        self.device.world.touch(|hca| hca.report().swap_remove(host))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let wakers = self.world.touch(|hca| {
            let host = hca.host_mut(self.host);
            host.end(HostLife::Closed);
            host.take_wakers()
        });
        drop(wakers);
    }
}

/// A slab in the application's hands: a copy, since the simulated memory is behind a lock, that is held against the
/// slab's bytes at the end: nothing may have been received into it meanwhile.
struct Lent<H: FnOnce(RecvSlab)> {
    device: Arc<Device>,
    bytes: Vec<u8>,
    offset: usize,
    slab: Option<(RecvSlab, H)>,
}

impl<H: FnOnce(RecvSlab)> AsRef<[u8]> for Lent<H> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl<H: FnOnce(RecvSlab)> Drop for Lent<H> {
    fn drop(&mut self) {
        let Some((slab, home)) = self.slab.take() else { return };
        let slot = slot(slab.index(), self.device.slabs.receive_bytes, self.offset, self.bytes.len());
        self.device.world.touch(|hca| {
            let host = hca.host(self.device.host);
            host.srq.assert_with_caller(slab.index());
            let same = host.life != HostLife::Open || host.receive_memory[slot] == self.bytes[..];
            assert!(same, "sim: receive slab {} was written to while it was lent", slab.index());
        });
        home(slab);
    }
}

// What is called for a message is not inlined: a count of the transport's instructions must be able to leave it out.
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

    fn nic(&self) -> Nic {
        Nic { name: format!("sim{}", self.device.host.0), numa_node: self.device.numa_node }
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

    #[inline(never)]
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

    #[inline(never)]
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

    #[inline(never)]
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

    fn lend_slab(
        &self,
        slab: RecvSlab,
        offset: usize,
        len: usize,
        home: impl FnOnce(RecvSlab) + Send + 'static,
    ) -> Bytes {
        let mut bytes = Vec::with_capacity(len);
        self.append_slab(&slab, offset, len, &mut bytes);
        let device = Arc::clone(&self.device);
        Bytes::from_owner(Lent { device, bytes, offset, slab: Some((slab, home)) })
    }

    #[inline(never)]
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

    #[inline(never)]
    fn poll(&self, into: &mut Vec<Wc>) -> Result<usize, FabricError> {
        self.device.world.with(|hca| hca.poll(self.device.host, into))
    }

    #[inline(never)]
    fn arm(&self) -> Result<(), FabricError> {
        self.device.world.with(|hca| hca.arm(self.device.host))
    }

    #[inline(never)]
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

    #[inline(never)]
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

    #[inline(never)]
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
