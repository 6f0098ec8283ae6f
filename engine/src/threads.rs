//! The engine's threads.

use std::{
    io,
    thread::{Builder, JoinHandle, current},
};

/// Starts a thread with a name that shows in the system's tools.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name.to_owned()).spawn(run)
}

/// Waits for all of them, except for the one that calls this: the last handle to an engine may be dropped by a
/// destructor of the caller's that one of our own threads runs.
pub(crate) fn join_all(threads: &mut Vec<JoinHandle<()>>) {
    for thread in threads.drain(..).filter(|thread| thread.thread().id() != current().id()) {
        if thread.join().is_err() {
            tracing::error!("a thread of the engine panicked");
        }
    }
}
