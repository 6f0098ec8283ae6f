//! The two fds of a device in the reactor of a runtime.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, OnceLock},
};

use tokio::{
    io::{Interest, unix::AsyncFd},
    runtime::Handle,
};

use super::{context::Context, cq::Channel};

/// An owner whose `as_raw_fd` gives the same open fd for as long as it lives.
///
/// # Safety
///
/// That is the promise: [`InReactor`] relies on it.
pub(super) unsafe trait StableFd: AsRawFd {}

// SAFETY: the fd is opened before the `Context` exists, is a field that never changes, and is closed by its `Drop`.
unsafe impl StableFd for Context {}
// SAFETY: as for the context.
unsafe impl StableFd for Channel {}

/// An fd that is registered with the runtime of whoever first waits for it.
pub(super) struct InReactor<T: StableFd> {
    owner: Arc<T>,
    registered: OnceLock<AsyncFd<Held<T>>>,
}

/// Keeps the fd's owner for as long as the reactor knows the fd.
pub(super) struct Held<T>(Arc<T>);

impl<T: StableFd> AsRawFd for Held<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl<T: StableFd> InReactor<T> {
    pub(super) fn new(owner: Arc<T>) -> Self {
        Self { owner, registered: OnceLock::new() }
    }

    /// The registered fd; registers it at the first call, in the current runtime.
    ///
    /// # Errors
    ///
    /// There is no current runtime, or the reactor does not take the fd.
    ///
    /// # Panics
    ///
    /// The current runtime was built without I/O.
    pub(super) fn get(&self) -> io::Result<&AsyncFd<Held<T>>> {
        if let Some(fd) = self.registered.get() {
            return Ok(fd);
        }
        if Handle::try_current().is_err() {
            return Err(io::Error::other("waiting for a device needs a tokio runtime; without one, poll the fabric"));
        }
        let held = Held(Arc::clone(&self.owner));
        // SAFETY: `Held` owns a reference to a `StableFd`, which keeps one fd open until the last reference is gone,
        // and the `AsyncFd` owns the `Held` until it has left the reactor.
        match unsafe { AsyncFd::register_with_interest(held, Interest::READABLE) } {
            Ok(fd) => Ok(self.registered.get_or_init(|| fd)),
            // Another thread was first: the reactor takes an fd only once.
            Err(error) => self.registered.get().ok_or_else(|| error.into()),
        }
    }
}
