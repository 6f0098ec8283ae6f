//! [`DeviceFabric`]: one opened port as the transport sees it.
#![deny(unsafe_code)]

use std::{
    fmt, io,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context as TaskContext, Poll, ready},
};

use bytes::Bytes;
use ibverbs_sys::ibv_access_flags;
use verbs_bootstrap::{Gid, Mtu, Net, PortIdentity};

use super::{
    context::Context,
    cq::{Channel, Cq},
    device_qp::DeviceQp,
    memory::PageKind,
    mr::{self, SlabMr},
    open::{DeviceConfig, OpenError},
    pd::Pd,
    qp::{Qp, QpParts, Receives},
    reactor::InReactor,
    srq::Srq,
    sysfs, wc,
};
use crate::fabric::{
    AsyncEvent, CreateQpError, DeviceLimits, Fabric, FabricError, HwCounters, Nic, PostError, QpCaps, RecvSlab,
    SendSlab, SlabSizes, Wc, bulk::WindowSupport,
};

/// A device's port with one PD, one CQ and its channel, one SRQ, and one MR each for receive and send slabs.
///
/// Opening it needs no runtime. [`Fabric::poll_wake`] and [`Fabric::poll_async_event`] tie their fds to the tokio
/// runtime that first polls them; each has room for one waiting task.
///
/// Not for use in a forked child: it shares the parent's queues, and what it posts goes out as the parent's.
pub struct DeviceFabric<N> {
    // The fds leave the reactor before what owns them goes.
    wake: InReactor<Channel>,
    events: InReactor<Context>,
    pub(super) shared: Arc<Shared>,
    slabs_taken: AtomicBool,
    net: N,
}

impl<N: Net> DeviceFabric<N> {
    /// Opens the device, port and GID that `config` asks for, or the best ones there are, and makes what all QPs
    /// share. The choice and its reason are logged.
    ///
    /// # Errors
    ///
    /// See [`OpenError`]: each variant says what to do about it.
    pub fn open(config: &DeviceConfig, net: N) -> Result<Self, OpenError> {
        let shared = Arc::new(Shared::open(config)?);
        tracing::info!(
            path = %shared.reason,
            slabs = ?shared.slabs(),
            pages = %shared.receive.page_kind(),
            cq_depth = shared.cq.depth(),
            "device opened"
        );
        Ok(Self {
            wake: InReactor::new(Arc::clone(&shared.channel)),
            events: InReactor::new(Arc::clone(&shared.context)),
            shared,
            slabs_taken: AtomicBool::new(false),
            net,
        })
    }
}

impl<N> DeviceFabric<N> {
    /// The device's name, as `rdma link` prints it.
    pub fn device_name(&self) -> &str {
        self.shared.context.name()
    }

    /// What pages the receive slabs lie in.
    pub fn page_kind(&self) -> PageKind {
        self.shared.receive.page_kind()
    }
}

/// What the fabric and each of its QPs keep alive.
pub(super) struct Shared {
    pub(super) srq: Arc<Srq>,
    pub(super) cq: Arc<Cq>,
    pub(super) channel: Arc<Channel>,
    pub(super) receive: Arc<SlabMr>,
    pub(super) send: Arc<SlabMr>,
    pub(super) pd: Arc<Pd>,
    pub(super) context: Arc<Context>,
    pub(super) limits: DeviceLimits,
    /// As last read from the device.
    pub(super) port: RwLock<PortIdentity>,
    pub(super) mtu_cap: Option<Mtu>,
    pub(super) windows: WindowSupport,
    /// Why this port and GID, as things were at the open.
    pub(super) reason: String,
    /// Where the GID was then.
    pub(super) chosen_index: u8,
}

impl Shared {
    pub(super) fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    pub(super) fn port(&self) -> PortIdentity {
        *self.port.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether our GID is where we last saw it.
    pub(super) fn gid_is_current(&self) -> bool {
        let port = self.port();
        self.holds(port.gid_index, port.gid, port)
    }

    fn holds(&self, index: u8, gid: Gid, port: PortIdentity) -> bool {
        self.context.gid_at(port.port, index).is_some_and(|slot| slot.gid == gid && slot.gid_type == port.gid_type)
    }

    /// The port, with our GID found again by value should it have moved in the table; `None` when it is gone. The rest of it
    /// is as the attempt at this connection has read it.
    pub(super) fn current_port(&self) -> Option<PortIdentity> {
        if self.gid_is_current() {
            return Some(self.port());
        }
        let port = self.refresh();
        self.holds(port.gid_index, port.gid, port).then_some(port)
    }

    /// Reads the port's MTU and LID and the place of our GID anew. What cannot be read stays as it was.
    fn refresh(&self) -> PortIdentity {
        let mut port = self.port();
        if let Ok(attributes) = self.context.port(port.port) {
            port.lid = attributes.lid;
            if let Some(mtu) = attributes.active_mtu {
                port.mtu = capped(mtu, self.mtu_cap);
            }
        }
        if !self.holds(port.gid_index, port.gid, port) {
            let slots = self.context.gids(port.port).unwrap_or_default();
            match slots.iter().find(|slot| slot.gid == port.gid && slot.gid_type == port.gid_type) {
                None => {
                    tracing::warn!(gid = %port.gid, gid_index = port.gid_index, "our GID is gone from the port's table");
                }
                Some(slot) => {
                    let (from, to) = (port.gid_index, slot.index);
                    tracing::info!(gid = %port.gid, from, to, "our GID moved to another index");
                    port.gid_index = to;
                }
            }
        }
        *self.port.write().unwrap_or_else(PoisonError::into_inner) = port;
        port
    }

    /// What its QPs are made from.
    pub(super) fn parts(&self, access: ibv_access_flags) -> QpParts<'_> {
        let receives = Receives::Shared { srq: &self.srq, send_slabs: &self.send };
        QpParts { pd: &self.pd, cq: &self.cq, receives, port: self.port().port, access }
    }

    /// What a refused QP means.
    pub(super) fn create_qp_error(&self, caps: QpCaps, source: io::Error) -> CreateQpError {
        match source.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => CreateQpError::Unsupported { caps, source },
            io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull => {
                CreateQpError::Exhausted { device_qps: self.limits.qps, source }
            }
            _ => CreateQpError::Device { source },
        }
    }

    fn slabs(&self) -> SlabSizes {
        SlabSizes {
            receive_slabs: self.receive.slabs(),
            receive_bytes: self.receive.slab_bytes(),
            send_slabs: self.send.slabs(),
            send_bytes: self.send.slab_bytes(),
        }
    }
}

/// The MTU that is used: the port's, or a smaller one that was asked for.
pub(super) fn capped(active: Mtu, cap: Option<Mtu>) -> Mtu {
    cap.map_or(active, |cap| active.min(cap))
}

impl<N: Net> Fabric for DeviceFabric<N> {
    type Qp = DeviceQp;
    type Net = N;

    fn net(&self) -> &N {
        &self.net
    }

    fn limits(&self) -> DeviceLimits {
        self.shared.limits
    }

    fn slabs(&self) -> SlabSizes {
        self.shared.slabs()
    }

    /// Read from the device each time: an MTU that changed raises no event on Soft-RoCE, and a QP with a path MTU
    /// above the link's hangs.
    fn port(&self) -> PortIdentity {
        self.shared.refresh()
    }

    fn known_port(&self) -> PortIdentity {
        self.shared.port()
    }

    fn path_reason(&self) -> String {
        let (reason, now) = (&self.shared.reason, self.shared.port().gid_index);
        if now == self.shared.chosen_index { reason.clone() } else { format!("{reason}; now at gid_index {now}") }
    }

    fn nic(&self) -> Nic {
        let name = self.device_name().to_owned();
        Nic { numa_node: sysfs::numa_node(&name), name }
    }

    fn hw_counters(&self) -> HwCounters {
        sysfs::hw_counters(self.shared.context.name(), self.shared.port().port)
    }

    fn take_slabs(&self) -> (Vec<RecvSlab>, Vec<SendSlab>) {
        if self.slabs_taken.swap(true, Ordering::Relaxed) {
            return (Vec::new(), Vec::new());
        }
        let sizes = self.shared.slabs();
        (
            (0..sizes.receive_slabs).map(|index| RecvSlab::mint_in(self.shared.receive.pool(), index)).collect(),
            (0..sizes.send_slabs).map(|index| SendSlab::mint_in(self.shared.send.pool(), index)).collect(),
        )
    }

    fn write_slab(&self, slab: &mut SendSlab, offset: usize, bytes: &[u8]) {
        self.shared.send.write(slab, offset, bytes);
    }

    fn read_slab(&self, slab: &RecvSlab, offset: usize, out: &mut [u8]) {
        self.shared.receive.read(slab, offset, out);
    }

    fn append_slab(&self, slab: &RecvSlab, offset: usize, len: usize, out: &mut Vec<u8>) {
        self.shared.receive.append(slab, offset, len, out);
    }

    fn lend_slab(
        &self,
        slab: RecvSlab,
        offset: usize,
        len: usize,
        home: impl FnOnce(RecvSlab) + Send + 'static,
    ) -> Bytes {
        mr::lend(&self.shared.receive, slab, offset, len, home)
    }

    fn post_receives(&self, slabs: &mut Vec<RecvSlab>) -> Result<(), PostError> {
        self.shared.srq.post(slabs)
    }

    fn arm_srq_limit(&self, receives: u32) -> Result<(), FabricError> {
        self.shared.srq.arm_limit(receives).map_err(failed("ibv_modify_srq"))
    }

    fn create_qp(&self, caps: QpCaps) -> Result<DeviceQp, CreateQpError> {
        let shared = &self.shared;
        match Qp::new(&shared.parts(ibv_access_flags::IBV_ACCESS_LOCAL_WRITE), caps) {
            Ok(qp) => Ok(DeviceQp::new(Arc::clone(shared), qp)),
            Err(source) => Err(shared.create_qp_error(caps, source)),
        }
    }

    fn poll(&self, into: &mut Vec<Wc>) -> Result<usize, FabricError> {
        let mut stranger = None;
        let found = self.shared.cq.poll(|raw| match wc::read(raw, |index| self.shared.srq.complete(index)) {
            Ok(wc) => into.push(wc),
            Err(wr_id) => stranger = Some(wr_id),
        });
        match (found, stranger) {
            (Ok(found), None) => Ok(found),
            (Err(source), _) => Err(FabricError { what: "ibv_poll_cq", source }),
            (Ok(_), Some(wr_id)) => Err(FabricError {
                what: "ibv_poll_cq",
                source: io::Error::other(format!("a completion for wr_id {wr_id:#x}, which is not posted")),
            }),
        }
    }

    fn arm(&self) -> Result<(), FabricError> {
        self.shared.cq.arm().map_err(failed("ibv_req_notify_cq"))
    }

    fn poll_wake(&self, cx: &mut TaskContext<'_>) -> Poll<Result<(), FabricError>> {
        let fd = self.wake.get().map_err(failed("registering the completion channel"))?;
        loop {
            let mut ready = ready!(fd.poll_read_ready(cx)).map_err(failed("waiting for completions"))?;
            // The reactor tells of edges: take all there is, then forget the readiness. An event that comes in
            // between is a new edge, whose readiness this guard does not clear.
            let taken = self.shared.cq.take_events().map_err(failed("ibv_get_cq_event"))?;
            ready.clear_ready();
            if taken > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }

    fn poll_async_event(&self, cx: &mut TaskContext<'_>) -> Poll<Result<AsyncEvent, FabricError>> {
        let fd = self.events.get().map_err(failed("registering the async event fd"))?;
        loop {
            let mut ready = ready!(fd.poll_read_ready(cx)).map_err(failed("waiting for async events"))?;
            // One at a time: the readiness stays until the fd is empty.
            let Some(event) = self.shared.context.next_async_event().map_err(failed("ibv_get_async_event"))? else {
                ready.clear_ready();
                continue;
            };
            if matches!(event, AsyncEvent::GidChange | AsyncEvent::PortUp | AsyncEvent::PortDown) {
                self.shared.refresh();
            }
            return Poll::Ready(Ok(event));
        }
    }
}

impl<N> fmt::Debug for DeviceFabric<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceFabric")
            .field("path", &self.shared.reason)
            .field("slabs", &self.shared.slabs())
            .finish_non_exhaustive()
    }
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> FabricError {
    move |source| FabricError { what, source }
}
