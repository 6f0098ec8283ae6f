//! The simulated bulk port behind the traits of [`fabric::bulk`](crate::fabric::bulk).

use std::{
    io,
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use verbs_bootstrap::Qpn;

use super::{BulkKey, PortKey, qp::State};
use crate::{
    fabric::{
        ConnectQpError, CreateQpError, FabricError, PostError, QpPath,
        bulk::{
            Access, AllocWindowError, BulkCaps, BulkFabric, BulkLimits, BulkOp, BulkPort, BulkQp, BulkRegion, BulkWc,
            BulkWindow, BulkWr, DestroyQpError, MemoryOwner, OpenBulkError, RegisterRegionError, Rkey, Span,
        },
        give_up_unless_bound,
        window_book::{BindKeys, WindowBook, WindowId},
    },
    sim::{
        SimFabric,
        fabric::Device,
        hca::{EINVAL, ENODEV, HostKey, errno},
    },
};

/// One simulated bulk port.
#[derive(Debug)]
pub struct SimBulkPort {
    shared: Arc<Port>,
}

#[derive(Debug)]
struct Port {
    device: Arc<Device>,
    key: PortKey,
    cq_depth: u32,
    /// Which windows are bound, as far as polled completions tell, and what stays for them.
    windows: WindowBook<Hold>,
}

type Hold = (Arc<LiveQp>, Arc<Mr>);

impl Drop for Port {
    fn drop(&mut self) {
        self.device.world.with(|hca| hca.close_port(self.key));
    }
}

/// One simulated bulk QP.
#[derive(Debug)]
pub struct SimBulkQp {
    // Windows that are bound on it hold it, too.
    qp: Arc<LiveQp>,
    port: Arc<Port>,
}

#[derive(Debug)]
struct LiveQp {
    device: Arc<Device>,
    key: BulkKey,
    qpn: Qpn,
    caps: BulkCaps,
    kept: AtomicBool,
}

/// One simulated region.
#[derive(Debug)]
pub struct SimRegion {
    // Windows that are bound to it hold it, too.
    mr: Arc<Mr>,
}

#[derive(Debug)]
struct Mr {
    device: Arc<Device>,
    key: u32,
    span: Span,
    access: Access,
    registered: bool,
}

/// One simulated memory window.
#[derive(Debug)]
pub struct SimWindow {
    port: Arc<Port>,
    id: WindowId,
    /// The device's window, by its first key.
    made: Mutex<u32>,
}

impl BulkFabric for SimFabric {
    type Bulk = SimBulkPort;

    fn open_bulk(&self, cq_depth: u32) -> Result<SimBulkPort, OpenBulkError> {
        let device = self.device().clone();
        let limit = device.limits.cqes;
        if cq_depth == 0 || cq_depth > limit {
            return Err(OpenBulkError::CqTooLarge { asked: cq_depth, limit });
        }
        let rd_atomic = device.limits.rd_atomic;
        if rd_atomic.initiator == 0 || rd_atomic.responder == 0 {
            return Err(OpenBulkError::NoReads(rd_atomic));
        }
        let key = device.world.with(|hca| hca.open_port(device.host, cq_depth));
        let key = key.map_err(|lost| OpenBulkError::Device { what: "opening the port", source: lost.source })?;
        Ok(SimBulkPort { shared: Arc::new(Port { device, key, cq_depth, windows: WindowBook::new() }) })
    }
}

// Not inlined, for the same reason as in `sim/fabric.rs`.
impl BulkPort for SimBulkPort {
    type Qp = SimBulkQp;
    type Region = SimRegion;

    fn limits(&self) -> BulkLimits {
        let limits = self.shared.device.limits;
        BulkLimits {
            region_bytes: REGION_BYTES,
            regions: self.shared.device.max_regions,
            message_bytes: limits.message_bytes,
            rd_atomic: limits.rd_atomic,
            qp_wrs: limits.qp_wrs,
            cq_depth: self.shared.cq_depth,
            locked_bytes: None,
            windows: self.shared.device.windows,
        }
    }

    fn register(
        &self,
        memory: Arc<dyn MemoryOwner>,
        range: Range<usize>,
        access: Access,
    ) -> Result<SimRegion, RegisterRegionError> {
        let (start, end, len) = (range.start, range.end, memory.len());
        let span = Span::new(memory, &range).ok_or(RegisterRegionError::Range { start, end, len })?;
        if !span.allows(access) {
            return Err(RegisterRegionError::ReadOnly { bytes: span.len(), access });
        }
        let device = &self.shared.device;
        let key = device.world.with(|hca| hca.register(device.host, span.clone(), access))?;
        Ok(SimRegion { mr: Arc::new(Mr { device: device.clone(), key, span, access, registered: true }) })
    }

    fn alloc_window(&self) -> Result<SimWindow, AllocWindowError> {
        let support = self.shared.device.windows;
        if !support.usable() {
            return Err(AllocWindowError::NotUsable(support));
        }
        let key = self.shared.alloc_window().map_err(AllocWindowError::Device)?;
        Ok(SimWindow { port: self.shared.clone(), id: self.shared.windows.add(key), made: Mutex::new(key) })
    }

    fn create_qp(&self, caps: BulkCaps) -> Result<SimBulkQp, CreateQpError> {
        let device = self.shared.device.clone();
        let (key, qpn) = device.world.with(|hca| hca.create_bulk_qp(self.shared.key, caps))?;
        let qp = Arc::new(LiveQp { device, key, qpn, caps, kept: AtomicBool::new(false) });
        Ok(SimBulkQp { qp, port: self.shared.clone() })
    }

    #[inline(never)]
    fn poll(&self, into: &mut Vec<BulkWc>) -> Result<usize, FabricError> {
        let before = into.len();
        let polled = self.shared.device.world.with(|hca| hca.poll_port(self.shared.key, into))?;
        into[before..].iter().for_each(|wc| self.shared.windows.on_wc(wc));
        Ok(polled)
    }

    #[inline(never)]
    fn arm(&self) -> Result<(), FabricError> {
        self.shared.device.world.with(|hca| {
            hca.port_alive(self.shared.key, "arming the bulk CQ")?;
            hca.bulk.ports[self.shared.key.0].cq.arm();
            Ok(())
        })
    }

    #[inline(never)]
    fn poll_wake(&self, cx: &mut Context<'_>) -> Poll<Result<(), FabricError>> {
        self.shared.device.world.with(|hca| {
            hca.port_alive(self.shared.key, "waiting for bulk completions")?;
            let cq = &mut hca.bulk.ports[self.shared.key.0].cq;
            if cq.take_events() {
                return Poll::Ready(Ok(()));
            }
            cq.register(cx.waker());
            Poll::Pending
        })
    }
}

impl BulkQp for SimBulkQp {
    type Region = SimRegion;

    fn qpn(&self) -> Qpn {
        self.qp.qpn
    }

    fn caps(&self) -> BulkCaps {
        self.qp.caps
    }

    async fn connect(qp: Arc<Self>, path: QpPath) -> Result<(), ConnectQpError> {
        let (initiator, responder) = (path.rd_atomic.initiator, path.rd_atomic.responder);
        if initiator == 0 || responder == 0 {
            return Err(ConnectQpError::NoReads { qpn: qp.qp.qpn, initiator, responder });
        }
        let device = &qp.qp.device;
        let (delay, verdict) = device.world.with(|hca| hca.route_from(device.host, qp.qp.qpn, &path));
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        verdict?;
        device.world.with(|hca| {
            let failed = |code| Err(ConnectQpError::Device { qpn: qp.qp.qpn, state: "RTR", source: errno(code) });
            let Some(found) = hca.bulk.qp_mut(qp.qp.key) else { return failed(ENODEV) };
            if found.state != State::Init {
                return failed(EINVAL);
            }
            found.state = State::Rts;
            found.path = Some(path);
            Ok(())
        })
    }

    #[inline(never)]
    fn post(&self, wrs: &[BulkWr<'_, SimRegion>]) -> Result<(), PostError> {
        let mut binds = Vec::new();
        if wrs.iter().any(|wr| wr.op.is_local()) {
            let refused = |source| PostError { posted: 0, asked: wrs.len(), source };
            for (position, wr) in wrs.iter().enumerate() {
                let reserved = self.reserve(wr, &mut binds);
                reserved.map_err(refused).inspect_err(|_| self.undo(&wrs[..position]))?;
            }
        }
        let posted = self.qp.device.world.with(|hca| hca.post_bulk(self.qp.key, wrs, &binds));
        posted.inspect_err(|error| self.undo(&wrs[error.posted..]))
    }

    fn post_receives(&self, receives: u32) -> Result<(), PostError> {
        self.qp.device.world.with(|hca| hca.post_bulk_receives(self.qp.key, receives))
    }

    fn to_error(&self) -> Result<(), FabricError> {
        self.qp.device.world.with(|hca| {
            hca.port_alive(self.port.key, "modify_qp to ERR")?;
            hca.bulk_error(self.qp.key, None);
            Ok(())
        })
    }

    fn is_rts(&self) -> Result<bool, FabricError> {
        self.qp.device.world.with(|hca| {
            hca.port_alive(self.port.key, "query_qp")?;
            Ok(hca.bulk.qp(self.qp.key).is_some_and(|qp| qp.state == State::Rts))
        })
    }

    fn destroy(qp: Arc<Self>) -> Result<(), (Arc<Self>, DestroyQpError)> {
        let qpn = qp.qp.qpn;
        match qp.port.windows.bound_on(qpn.get()) {
            0 => {}
            windows => return Err((qp, DestroyQpError::WindowsBound { qpn, windows })),
        }
        if Arc::strong_count(&qp) > 1 || Arc::strong_count(&qp.qp) > 1 {
            return Err((qp, DestroyQpError::InUse));
        }
        let device = &qp.qp.device;
        if device.world.with(|hca| hca.host(device.host).refuse_destroy) {
            qp.qp.kept.store(true, Ordering::Relaxed);
            return Err((qp, DestroyQpError::Device(errno(EINVAL))));
        }
        // An earlier attempt may have been refused.
        qp.qp.kept.store(false, Ordering::Relaxed);
        Ok(())
    }
}

impl SimBulkQp {
    /// Says in the book what `wr` is about to do to windows.
    fn reserve(&self, wr: &BulkWr<'_, SimRegion>, binds: &mut Vec<BindKeys>) -> io::Result<()> {
        let invalid = |why: &'static str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        let at = (self.qp.qpn.get(), wr.id);
        match &wr.op {
            BulkOp::Bind { .. } | BulkOp::LocalInvalidate { .. } if !wr.signaled => {
                invalid("a bind or invalidation of a window must be signaled")
            }
            BulkOp::Bind { window, .. } if !Arc::ptr_eq(&window.port, &self.port) => {
                invalid("a window of another port")
            }
            BulkOp::Bind { window, region, .. } => {
                window.renew_if_spent()?;
                match self.port.windows.bind(window.id, at, (self.qp.clone(), region.mr.clone())) {
                    Some(keys) => binds.push(keys),
                    None => return invalid("a window that is bound, or an id that another bind or invalidation has"),
                }
                Ok(())
            }
            BulkOp::LocalInvalidate { rkey } => {
                self.port.windows.invalidate(rkey.0, at);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn undo(&self, wrs: &[BulkWr<'_, SimRegion>]) {
        let local = wrs.iter().filter(|wr| wr.op.is_local());
        local.for_each(|wr| self.port.windows.undo((self.qp.qpn.get(), wr.id)));
    }
}

impl Drop for LiveQp {
    fn drop(&mut self) {
        // One that the device would not destroy stays in it.
        if !self.kept.load(Ordering::Relaxed) {
            self.device.world.with(|hca| hca.destroy_bulk_qp(self.key));
        }
    }
}

impl SimRegion {
    pub(super) fn key(&self) -> u32 {
        self.mr.key
    }

    pub(super) fn host(&self) -> HostKey {
        self.mr.device.host
    }
}

impl Mr {
    fn give_up(&mut self) -> io::Result<()> {
        self.device.world.with(|hca| hca.deregister(self.device.host, self.key))?;
        self.registered = false;
        Ok(())
    }
}

impl BulkRegion for SimRegion {
    type Window = SimWindow;

    fn span(&self) -> &Span {
        &self.mr.span
    }

    fn access(&self) -> Access {
        self.mr.access
    }

    fn rkey(&self) -> Option<Rkey> {
        self.mr.access.is_remote().then_some(Rkey(self.mr.key))
    }

    fn deregister(mut self) -> Result<(), (Self, io::Error)> {
        give_up_unless_bound(&mut self.mr, Mr::give_up).map_err(|error| (self, error))
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if !self.registered {
            return;
        }
        if let Err(error) = self.give_up() {
            tracing::error!(%error, region = ?self.span, "deregistration failed; the memory stays");
        }
    }
}

impl Port {
    fn alloc_window(&self) -> io::Result<u32> {
        self.device.world.with(|hca| hca.alloc_window(self.device.host))
    }

    fn free_window(&self, key: u32) {
        self.device.world.with(|hca| hca.free_window(self.device.host, key));
    }
}

impl SimWindow {
    /// As on a device: a window whose keys are used up is replaced.
    fn renew_if_spent(&self) -> io::Result<()> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if self.port.windows.is_spent(self.id) {
            let key = self.port.alloc_window()?;
            self.port.free_window(std::mem::replace(&mut *made, key));
            self.port.windows.renew(self.id, key);
        }
        Ok(())
    }
}

impl BulkWindow for SimWindow {
    fn rkey(&self) -> Option<Rkey> {
        self.port.windows.key(self.id).map(Rkey)
    }

    fn is_bound(&self) -> bool {
        self.port.windows.is_held(self.id)
    }

    fn free(self) -> Result<(), (Self, io::Error)> {
        drop(self);
        Ok(())
    }
}

impl Drop for SimWindow {
    fn drop(&mut self) {
        self.port.free_window(*self.made.get_mut().unwrap_or_else(PoisonError::into_inner));
        drop(self.port.windows.remove(self.id));
    }
}

/// The largest region.
const REGION_BYTES: u64 = 1 << 40;
