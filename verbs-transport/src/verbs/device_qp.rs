//! [`DeviceQp`]: the typestate of `qp.rs` behind the shared handle that the transport holds.
#![deny(unsafe_code)]

use std::{
    io,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use tokio::runtime::Handle;
use verbs_bootstrap::{LinkLayer, Qpn, RdAtomic};

use super::{
    fabric::Shared,
    qp::{Init, Qp, QpHandle, Route, Rtr, Rts},
};
use crate::fabric::{ConnectQpError, FabricError, FabricQp, PostError, QpCaps, QpPath, SendWr};

/// One RC QP of a [`DeviceFabric`](super::DeviceFabric). Keeps the device, the CQ, the SRQ and all slabs alive.
pub struct DeviceQp {
    handle: Arc<QpHandle>,
    /// Set once; from then on sends may be posted without a lock of ours.
    ready: OnceLock<Qp<Rts>>,
    stage: Mutex<Stage>,
    shared: Arc<Shared>,
}

/// How far the way to RTS is gone.
enum Stage {
    Init(Qp<Init>),
    Rtr(Qp<Rtr>, QpPath),
    Rts(QpPath),
    /// A state was consumed and not put back; only a panic in between does that.
    Lost,
}

/// Where a failed step left the QP, and why.
struct NotReached {
    stage: Stage,
    error: ConnectQpError,
}

impl NotReached {
    fn boxed(stage: Stage, error: ConnectQpError) -> Box<Self> {
        Box::new(Self { stage, error })
    }
}

impl DeviceQp {
    pub(super) fn new(shared: Arc<Shared>, qp: Qp<Init>) -> Self {
        let handle = Arc::clone(qp.handle());
        Self { handle, ready: OnceLock::new(), stage: Mutex::new(Stage::Init(qp)), shared }
    }

    /// The QP, once it is in RTS.
    pub(super) fn rts(&self) -> Option<&Qp<Rts>> {
        self.ready.get()
    }

    /// What may be done in any state.
    pub(super) fn handle(&self) -> &QpHandle {
        &self.handle
    }

    /// Destroys the QP.
    ///
    /// # Errors
    ///
    /// What is left, which posts nothing any more, and the device's errno.
    pub(super) fn destroy(self) -> Result<(), Box<(Self, io::Error)>> {
        let Self { handle, ready, stage, shared } = self;
        drop((ready, stage));
        let failed = |handle, error| {
            Box::new((Self { handle, ready: OnceLock::new(), stage: Mutex::new(Stage::Lost), shared }, error))
        };
        match Arc::try_unwrap(handle) {
            Ok(handle) => handle.destroy().map_err(|(handle, error)| failed(Arc::new(handle), error)),
            Err(handle) => Err(failed(handle, io::Error::from(io::ErrorKind::WouldBlock))),
        }
    }

    /// Drives the QP to RTS; blocks for as long as the kernel resolves the peer's address.
    fn connect_blocking(&self, path: &QpPath) -> Result<(), ConnectQpError> {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let next = match std::mem::replace(&mut *stage, Stage::Lost) {
                Stage::Init(qp) => self.receive(qp, path),
                Stage::Rtr(qp, known) if known == *path => self.send(qp, path),
                Stage::Rts(known) if known == *path => {
                    *stage = Stage::Rts(known);
                    return Ok(());
                }
                other => {
                    *stage = other;
                    let source = io::Error::new(io::ErrorKind::AlreadyExists, "connected to another peer before");
                    return Err(self.device_error("RTR", source));
                }
            };
            match next {
                Ok(next) => *stage = next,
                Err(not_reached) => {
                    *stage = not_reached.stage;
                    return Err(not_reached.error);
                }
            }
        }
    }

    fn receive(&self, qp: Qp<Init>, path: &QpPath) -> Result<Stage, Box<NotReached>> {
        let Some(port) = self.shared.current_port() else {
            let error = self.gid_gone(io::Error::new(io::ErrorKind::NotFound, "not in the port's GID table"));
            return Err(NotReached::boxed(Stage::Init(qp), error));
        };
        let ethernet = port.link_layer == LinkLayer::Ethernet;
        if ethernet && port.gid.family() != path.remote_port.gid.family() {
            let why = "the two GIDs are of different address families";
            let error = self.no_route(path, io::Error::new(io::ErrorKind::AddrNotAvailable, why));
            return Err(NotReached::boxed(Stage::Init(qp), error));
        }
        let route = Route {
            link_layer: port.link_layer,
            gid_index: port.gid_index,
            remote_gid: path.remote_port.gid,
            remote_lid: path.remote_port.lid,
        };
        let mut path_here = *path;
        path_here.rd_atomic = self.within_limits(path.rd_atomic);
        match qp.into_rtr(&path_here, &route) {
            Ok(qp) => Ok(Stage::Rtr(qp, *path)),
            Err((qp, source)) => Err(NotReached::boxed(Stage::Init(qp), self.explain(path, "RTR", source))),
        }
    }

    fn send(&self, qp: Qp<Rtr>, path: &QpPath) -> Result<Stage, Box<NotReached>> {
        match qp.into_rts(path.local_psn, path.timers, self.within_limits(path.rd_atomic)) {
            Ok(qp) => {
                // The stage lock is held and this stage is reached once, so the cell is empty.
                let _ = self.ready.set(qp);
                Ok(Stage::Rts(*path))
            }
            Err((qp, source)) => Err(NotReached::boxed(Stage::Rtr(qp, *path), self.device_error("RTS", source))),
        }
    }

    /// What was agreed, and never more than the device takes: it would refuse RTS, or fail the ninth READ.
    fn within_limits(&self, agreed: RdAtomic) -> RdAtomic {
        let limits = self.shared.limits().rd_atomic;
        RdAtomic {
            initiator: agreed.initiator.min(limits.initiator),
            responder: agreed.responder.min(limits.responder),
        }
    }

    fn explain(&self, path: &QpPath, state: &'static str, source: io::Error) -> ConnectQpError {
        use rustix::io::Errno;
        let errno = source.raw_os_error().map(Errno::from_raw_os_error);
        match errno {
            Some(Errno::TIMEDOUT | Errno::NETUNREACH | Errno::HOSTUNREACH) => self.no_route(path, source),
            Some(Errno::NODATA) => self.gid_gone(source),
            Some(Errno::INVAL) if !self.shared.gid_is_current() => self.gid_gone(source),
            _ => self.device_error(state, source),
        }
    }

    fn no_route(&self, path: &QpPath, source: io::Error) -> ConnectQpError {
        let port = self.shared.port();
        ConnectQpError::NoRoute {
            qpn: self.handle.qpn(),
            local_gid: port.gid,
            gid_index: port.gid_index,
            remote_gid: path.remote_port.gid,
            source,
        }
    }

    fn gid_gone(&self, source: io::Error) -> ConnectQpError {
        let port = self.shared.port();
        ConnectQpError::GidGone { local_gid: port.gid, gid_index: port.gid_index, source }
    }

    fn device_error(&self, state: &'static str, source: io::Error) -> ConnectQpError {
        ConnectQpError::Device { qpn: self.handle.qpn(), state, source }
    }
}

impl FabricQp for DeviceQp {
    fn qpn(&self) -> Qpn {
        self.handle.qpn()
    }

    fn caps(&self) -> QpCaps {
        self.handle.caps()
    }

    async fn connect(qp: Arc<Self>, path: QpPath) -> Result<(), ConnectQpError> {
        let Ok(runtime) = Handle::try_current() else {
            return Err(qp.device_error("RTR", io::Error::other("connecting needs a tokio runtime")));
        };
        let on_thread = Arc::clone(&qp);
        match runtime.spawn_blocking(move || on_thread.connect_blocking(&path)).await {
            Ok(result) => result,
            // The runtime is shutting down.
            Err(error) => Err(qp.device_error("RTR", io::Error::other(error))),
        }
    }

    fn post(&self, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        match self.ready.get() {
            Some(qp) => qp.post(wrs),
            None => {
                Err(PostError { posted: 0, asked: wrs.len(), source: io::Error::from(io::ErrorKind::NotConnected) })
            }
        }
    }

    fn to_error(&self) -> Result<(), FabricError> {
        self.handle.to_error().map_err(|source| FabricError { what: "ibv_modify_qp to ERR", source })
    }

    fn is_rts(&self) -> Result<bool, FabricError> {
        let state = self.handle.state().map_err(|source| FabricError { what: "ibv_query_qp", source })?;
        Ok(state == ibverbs_sys::ibv_qp_state::IBV_QPS_RTS)
    }
}

impl std::fmt::Debug for DeviceQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceQp")
            .field("qpn", &self.handle.qpn())
            .field("caps", &self.handle.caps())
            .finish_non_exhaustive()
    }
}
