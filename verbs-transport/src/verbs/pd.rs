//! Protection domains.

use std::{io, ptr::NonNull, sync::Arc};

use ibverbs_sys as ffi;

use super::{context::Context, log_failed_destroy};

/// A protection domain: what MRs, SRQs and QPs must share to work together.
pub(crate) struct Pd {
    raw: NonNull<ffi::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: a PD is a handle that libibverbs never changes after its allocation; calls on it are thread-safe.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Allocates one.
    ///
    /// # Errors
    ///
    /// The device's, `ENOMEM` when it has no more.
    pub(super) fn new(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: the context is live, and the `Arc` kept below keeps it so until the PD is gone.
        let raw = unsafe { ffi::ibv_alloc_pd(context.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: `raw` came from ibv_alloc_pd and is freed here once. MRs, SRQs and QPs of it hold an `Arc` of
        // `self` and are gone.
        log_failed_destroy("ibv_dealloc_pd", unsafe { ffi::ibv_dealloc_pd(self.raw.as_ptr()) });
    }
}
