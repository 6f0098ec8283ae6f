//! [`DeviceBulkPort`]: the device behind the traits of [`fabric::bulk`](crate::fabric::bulk).
#![deny(unsafe_code)]

use std::{
    fmt, io,
    ops::Range,
    sync::Arc,
    task::{Context as TaskContext, Poll, ready},
};

use ibverbs_sys::ibv_access_flags;
use rustix::process::{Resource, getrlimit};
use verbs_bootstrap::{Net, Qpn};

use super::{
    DeviceFabric,
    cq::{Channel, Cq},
    device_qp::DeviceQp,
    fabric::Shared,
    owner::{MemoryOwner, Span},
    qp::{Qp, QpParts, Receives},
    reactor::InReactor,
    region::DeviceRegion,
    sysfs, wc,
    window::{DeviceWindow, Windows},
};
use crate::fabric::{
    ConnectQpError, CreateQpError, FabricError, FabricQp, PostError, QpCaps, QpPath,
    bulk::{
        Access, AllocWindowError, BulkCaps, BulkFabric, BulkLimits, BulkPort, BulkQp, BulkWc, BulkWr, DestroyQpError,
        OpenBulkError, RegisterRegionError, WindowSupport,
    },
};

/// A bulk port of a [`DeviceFabric`]. Keeps the device open.
///
/// [`BulkPort::poll_wake`] ties its fd to the tokio runtime that first polls it, and has room for one waiting task.
pub struct DeviceBulkPort {
    // The fd leaves the reactor before what owns it goes.
    wake: InReactor<Channel>,
    cq: Arc<Cq>,
    limits: BulkLimits,
    windows: Arc<Windows>,
    shared: Arc<Shared>,
}

/// One bulk QP of a [`DeviceBulkPort`].
pub struct DeviceBulkQp {
    qp: Arc<DeviceQp>,
    windows: Arc<Windows>,
}

impl<N: Net> BulkFabric for DeviceFabric<N> {
    type Bulk = DeviceBulkPort;

    fn open_bulk(&self, cq_depth: u32) -> Result<DeviceBulkPort, OpenBulkError> {
        let shared = Arc::clone(&self.shared);
        let failed = |what| move |source| OpenBulkError::Device { what, source };
        let attributes = shared.context.attributes().map_err(failed("ibv_query_device"))?;
        let limit = attributes.cqes;
        if cq_depth == 0 || cq_depth > limit {
            return Err(OpenBulkError::CqTooLarge { asked: cq_depth, limit });
        }
        let rd_atomic = shared.limits.rd_atomic;
        if rd_atomic.initiator == 0 || rd_atomic.responder == 0 {
            return Err(OpenBulkError::NoReads(rd_atomic));
        }
        let channel = Arc::new(Channel::new(&shared.context).map_err(failed("ibv_create_comp_channel"))?);
        let cq = Cq::new(Arc::clone(&channel), cq_depth, 0).map_err(failed("ibv_create_cq"))?;
        let limits = BulkLimits {
            region_bytes: attributes.mr_bytes,
            regions: attributes.mrs,
            message_bytes: shared.limits.message_bytes,
            rd_atomic,
            qp_wrs: shared.limits.qp_wrs,
            cq_depth: cq.depth(),
            locked_bytes: getrlimit(Resource::Memlock).current,
            windows: shared.windows,
        };
        let (wake, windows) = (InReactor::new(channel), Arc::new(Windows::new()));
        Ok(DeviceBulkPort { wake, cq: Arc::new(cq), limits, windows, shared })
    }
}

impl BulkPort for DeviceBulkPort {
    type Qp = DeviceBulkQp;
    type Region = DeviceRegion;

    fn limits(&self) -> BulkLimits {
        self.limits
    }

    fn register(
        &self,
        memory: Arc<dyn MemoryOwner>,
        range: Range<usize>,
        access: Access,
    ) -> Result<DeviceRegion, RegisterRegionError> {
        let (start, end, len) = (range.start, range.end, memory.len());
        let span = Span::new(memory, &range).ok_or(RegisterRegionError::Range { start, end, len })?;
        let bytes = span.len();
        if !span.allows(access) {
            return Err(RegisterRegionError::ReadOnly { bytes, access });
        }
        let (need, limit) = (bytes as u64, self.limits.region_bytes);
        if need > limit {
            return Err(RegisterRegionError::TooLarge { bytes: need, limit });
        }
        let pinned_bytes = sysfs::pinned_bytes();
        DeviceRegion::new(&self.shared.pd, span, access).map_err(|source| {
            // ENOMEM has two meanings here: the limit, or memory. The numbers tell which.
            let refused = matches!(source.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::PermissionDenied);
            match self.limits.locked_bytes {
                Some(have_bytes) if refused && have_bytes < need.saturating_add(pinned_bytes) => {
                    RegisterRegionError::MemlockTooSmall { need_bytes: need, have_bytes, pinned_bytes, source }
                }
                _ => RegisterRegionError::Device { bytes, access, source },
            }
        })
    }

    fn alloc_window(&self) -> Result<DeviceWindow, AllocWindowError> {
        let support = self.limits.windows;
        if !support.usable() {
            return Err(AllocWindowError::NotUsable(support));
        }
        DeviceWindow::new(&self.shared.pd, &self.windows).map_err(AllocWindowError::Device)
    }

    fn create_qp(&self, caps: BulkCaps) -> Result<DeviceBulkQp, CreateQpError> {
        use ibv_access_flags as f;
        let shared = &self.shared;
        let parts = QpParts {
            pd: &shared.pd,
            cq: &self.cq,
            receives: Receives::Own { recv_wrs: caps.recv_wrs },
            port: shared.port().port,
            access: f::IBV_ACCESS_LOCAL_WRITE | f::IBV_ACCESS_REMOTE_READ | f::IBV_ACCESS_REMOTE_WRITE,
        };
        let asked = QpCaps { send_wrs: caps.send_wrs, inline_bytes: 0 };
        match Qp::new(&parts, asked) {
            Ok(qp) => {
                let qp = Arc::new(DeviceQp::new(Arc::clone(shared), qp));
                Ok(DeviceBulkQp { qp, windows: Arc::clone(&self.windows) })
            }
            Err(source) => Err(shared.create_qp_error(asked, source)),
        }
    }

    fn poll(&self, into: &mut Vec<BulkWc>) -> Result<usize, FabricError> {
        let before = into.len();
        // Only Soft-RoCE's windows are ever forced.
        let kernel_flags = self.limits.windows == WindowSupport::Forced;
        let polled =
            self.cq.poll(|raw| into.push(wc::read_bulk(raw, kernel_flags))).map_err(failed("ibv_poll_cq (bulk)"))?;
        into[before..].iter().for_each(|wc| self.windows.on_wc(wc));
        Ok(polled)
    }

    fn arm(&self) -> Result<(), FabricError> {
        self.cq.arm().map_err(failed("ibv_req_notify_cq (bulk)"))
    }

    fn poll_wake(&self, cx: &mut TaskContext<'_>) -> Poll<Result<(), FabricError>> {
        let fd = self.wake.get().map_err(failed("registering the bulk completion channel"))?;
        loop {
            let mut ready = ready!(fd.poll_read_ready(cx)).map_err(failed("waiting for bulk completions"))?;
            // As in the fabric's `poll_wake`: the reactor tells of edges, so take all there is.
            let taken = self.cq.take_events().map_err(failed("ibv_get_cq_event (bulk)"))?;
            ready.clear_ready();
            if taken > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl BulkQp for DeviceBulkQp {
    type Region = DeviceRegion;

    fn qpn(&self) -> Qpn {
        FabricQp::qpn(&*self.qp)
    }

    fn caps(&self) -> BulkCaps {
        BulkCaps { send_wrs: FabricQp::caps(&*self.qp).send_wrs, recv_wrs: self.qp.handle().recv_wrs }
    }

    async fn connect(qp: Arc<Self>, path: QpPath) -> Result<(), ConnectQpError> {
        let (initiator, responder) = (path.rd_atomic.initiator, path.rd_atomic.responder);
        if initiator == 0 || responder == 0 {
            return Err(ConnectQpError::NoReads { qpn: BulkQp::qpn(&*qp), initiator, responder });
        }
        let inner = Arc::clone(&qp.qp);
        drop(qp);
        DeviceQp::connect(inner, path).await
    }

    fn post(&self, wrs: &[BulkWr<'_, DeviceRegion>]) -> Result<(), PostError> {
        match self.qp.rts() {
            Some(qp) if wrs.iter().any(|wr| wr.op.is_local()) => self.windows.post(qp, wrs),
            Some(qp) => qp.post_bulk(wrs),
            None => {
                Err(PostError { posted: 0, asked: wrs.len(), source: io::Error::from(io::ErrorKind::NotConnected) })
            }
        }
    }

    fn post_receives(&self, receives: u32) -> Result<(), PostError> {
        self.qp.handle().post_empty_receives(receives)
    }

    fn to_error(&self) -> Result<(), FabricError> {
        FabricQp::to_error(&*self.qp)
    }

    fn is_rts(&self) -> Result<bool, FabricError> {
        FabricQp::is_rts(&*self.qp)
    }

    fn destroy(qp: Arc<Self>) -> Result<(), (Arc<Self>, DestroyQpError)> {
        let qpn = BulkQp::qpn(&*qp);
        // While one is bound the kernel may block for 50 s, and the QP must still be able to invalidate it.
        match qp.windows.bound_on(qpn.get()) {
            0 => {}
            windows => return Err((qp, DestroyQpError::WindowsBound { qpn, windows })),
        }
        let Self { qp, windows } = Arc::try_unwrap(qp).map_err(|qp| (qp, DestroyQpError::InUse))?;
        match Arc::try_unwrap(qp) {
            Ok(qp) => qp.destroy().map_err(|left| {
                let (qp, error) = *left;
                let error = match error.kind() {
                    io::ErrorKind::WouldBlock => DestroyQpError::InUse,
                    _ => DestroyQpError::Device(error),
                };
                (Arc::new(Self { qp: Arc::new(qp), windows }), error)
            }),
            Err(qp) => Err((Arc::new(Self { qp, windows }), DestroyQpError::InUse)),
        }
    }
}

impl fmt::Debug for DeviceBulkPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBulkPort").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl fmt::Debug for DeviceBulkQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.qp.fmt(f)
    }
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> FabricError {
    move |source| FabricError { what, source }
}
