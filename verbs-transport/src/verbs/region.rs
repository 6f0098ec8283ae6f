//! Registered memory of an owner: the region that READs and WRITEs name.

use std::{ffi::c_int, fmt, io, ptr::NonNull, sync::Arc};

use ibverbs_sys as ffi;

use super::{check, owner::Span, pd::Pd, window::DeviceWindow};
use crate::fabric::{
    bulk::{Access, BulkRegion, Rkey},
    give_up_unless_bound,
};

/// A region of a [`DeviceFabric`](super::DeviceFabric)'s device. Keeps its owner, the PD and the device.
pub struct DeviceRegion {
    // Windows that are bound to it hold it, too.
    mr: Arc<Mr>,
}

/// The registration: it ends with this.
pub(super) struct Mr {
    raw: NonNull<ffi::ibv_mr>,
    registered: bool,
    lkey: u32,
    rkey: u32,
    access: Access,
    span: Span,
    pd: Arc<Pd>,
}

// SAFETY: the MR is a handle that is constant after the registration, and its memory is reached by the span's checked
// copies alone, which may be made from any thread.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl DeviceRegion {
    /// Registers the span. Blocks while its pages are pinned.
    ///
    /// # Errors
    ///
    /// The kernel's or the device's.
    pub(super) fn new(pd: &Arc<Pd>, span: Span, access: Access) -> io::Result<Self> {
        use ffi::ibv_access_flags as f;
        let mut flags = f(0);
        if access.local_write() {
            flags |= f::IBV_ACCESS_LOCAL_WRITE;
        }
        if access.remote_read() {
            flags |= f::IBV_ACCESS_REMOTE_READ;
        }
        if access.remote_write() {
            flags |= f::IBV_ACCESS_REMOTE_WRITE;
        }
        if access.windows() {
            flags |= f::IBV_ACCESS_MW_BIND;
        }
        let flags = c_int::try_from(flags.0).unwrap_or(c_int::MAX);
        // SAFETY: the PD is live, and the `Arc` kept below keeps it so until the MR is gone. The span's owner promises
        // that the range is mapped and stays where it is while the span lives, which is until after the deregistration
        // in `deregister` or `Drop`; when that fails the owner is leaked.
        let raw = unsafe { ffi::ibv_reg_mr(pd.as_ptr(), span.as_ptr().cast(), span.len(), flags) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: `raw` is the live MR just made; the field is constant.
        let lkey = unsafe { (*raw.as_ptr()).lkey };
        // SAFETY: as above.
        let rkey = unsafe { (*raw.as_ptr()).rkey };
        Ok(Self { mr: Arc::new(Mr { raw, registered: true, lkey, rkey, access, span, pd: Arc::clone(pd) }) })
    }

    /// Whether work requests of a QP in that PD may name it.
    pub(super) fn is_of(&self, pd: &Arc<Pd>) -> bool {
        Arc::ptr_eq(&self.mr.pd, pd)
    }

    /// What a window that is bound to it holds.
    pub(super) fn mr(&self) -> &Arc<Mr> {
        &self.mr
    }

    /// A part of it as the device wants to hear of it; `None` when it is not within.
    pub(super) fn sge(&self, offset: usize, length: u32) -> Option<ffi::ibv_sge> {
        let span = &self.mr.span;
        let end = offset.checked_add(length as usize)?;
        (end <= span.len()).then(|| ffi::ibv_sge { addr: span.addr() + offset as u64, length, lkey: self.mr.lkey })
    }
}

impl Mr {
    pub(super) fn as_ptr(&self) -> *mut ffi::ibv_mr {
        self.raw.as_ptr()
    }

    /// Takes the device's right to the memory away; once.
    fn give_up(&mut self) -> io::Result<()> {
        // SAFETY: `raw` came from ibv_reg_mr and is live: `registered` says so to both callers, and turns false when
        // this succeeds. Work requests that still name the MR fail from here on; the device pins and checks it for each
        // packet, so none touches the memory after the call. No window is bound to it: each holds an `Arc` of `self`,
        // and there is no other, since `self` is borrowed mutably.
        check(unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) })?;
        self.registered = false;
        Ok(())
    }
}

impl BulkRegion for DeviceRegion {
    type Window = DeviceWindow;

    fn span(&self) -> &Span {
        &self.mr.span
    }

    fn access(&self) -> Access {
        self.mr.access
    }

    fn rkey(&self) -> Option<Rkey> {
        self.access().is_remote().then_some(Rkey(self.mr.rkey))
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
            tracing::error!(%error, region = ?self.span, "ibv_dereg_mr failed; the memory stays with the process");
            self.span.leak();
        }
    }
}

impl fmt::Debug for DeviceRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceRegion of {:?} for {:?}", self.mr.span, self.mr.access)
    }
}
