//! The consumer's call, as an application writes it.

use std::{fmt, sync::Arc, time::Duration};

use tokio::io::AsyncWrite;
use verbs_transport::fabric::Fabric;

use super::{
    Rendezvous,
    inner::Inner,
    puller::{self, Came},
    sink::Sink,
};
use crate::{
    error::PullError,
    proto::{book::Ending, handle::Handle, wire::PathReason},
};

/// Where a pulled payload goes.
pub struct Destination<'a>(Sink<'a>);

impl<'a> Destination<'a> {
    /// Written in order, some MiB at a time: for payloads that need not lie in memory as a whole. Flushed at the end.
    pub fn writer(writer: &'a mut (impl AsyncWrite + Send + Unpin)) -> Self {
        Self(Sink::Writer { writer, written: 0 })
    }

    pub(super) fn into_sink(self) -> Sink<'a> {
        self.0
    }
}

/// Cleared, then grown to the payload's length.
impl<'a> From<&'a mut Vec<u8>> for Destination<'a> {
    fn from(bytes: &'a mut Vec<u8>) -> Self {
        Self(Sink::Vec(bytes))
    }
}

/// Filled from its start; refuses a longer payload before any transfer.
impl<'a> From<&'a mut [u8]> for Destination<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self(Sink::Slice { bytes, filled: 0 })
    }
}

impl fmt::Debug for Destination<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Sink::Vec(_) => "Destination: a vector",
            Sink::Slice { .. } => "Destination: a slice",
            Sink::Writer { .. } => "Destination: a writer",
        })
    }
}

/// What was pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// Bytes of the payload.
    pub bytes: u64,
    /// By RDMA READ, or why not; a worker's own payload comes as [`PathReason::NotPinned`].
    pub path: Result<(), PathReason>,
}

/// A pull that is being put together; [`Pull::into`] runs it.
#[must_use = "`into` pulls"]
pub struct Pull<'a, F: Fabric> {
    inner: Arc<Inner<F>>,
    handle: Handle,
    release: bool,
    deadline: Option<Duration>,
    progress: Option<Box<dyn FnMut(u64, u64) + Send + 'a>>,
}

impl<F: Fabric> fmt::Debug for Pull<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pull").field("handle", &self.handle).finish_non_exhaustive()
    }
}

impl<F: Fabric> Rendezvous<F> {
    /// Fetches what a handle names: `rendezvous.pull(handle).into(&mut bytes).await?`.
    pub fn pull<'a>(&self, handle: Handle) -> Pull<'a, F> {
        Pull { inner: self.inner.clone(), handle, release: false, deadline: None, progress: None }
    }
}

impl<'a, F: Fabric> Pull<'a, F> {
    /// Drops one reference when all bytes are there: the owner frees the payload at the last one. Without this the
    /// payload stays, for others.
    pub fn and_release(mut self) -> Self {
        self.release = true;
        self
    }

    /// Gives up after so long. Default: never by itself; each request has its own deadline.
    pub fn within(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Calls `progress(bytes so far, bytes in all)` after each piece: a chunk, or 8 MiB of READs. For that a vector is
    /// filled piece by piece, where it would else take all of a READ's memory without a copy.
    pub fn on_progress(mut self, progress: impl FnMut(u64, u64) + Send + 'a) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Pulls. Dropping the future gives the lease back; what is under way ends by itself.
    ///
    /// # Errors
    ///
    /// [`PullError`]; the destination's bytes are unspecified then.
    pub async fn into<'d>(self, destination: impl Into<Destination<'d>>) -> Result<Pulled, PullError> {
        let Self { inner, handle, release, deadline, mut progress } = self;
        let mut sink = destination.into().into_sink();
        let progress = progress.as_mut().map(|progress| &mut **progress as &mut (dyn FnMut(u64, u64) + Send));
        let pulling = puller::pull(&inner, handle, &mut sink, progress);
        let (lease, came) = match deadline {
            None => pulling.await?,
            Some(after) => tokio::time::timeout(after, pulling).await.map_err(|_| PullError::Deadline { after })??,
        };
        lease.end(if release { Ending::Release } else { Ending::Detach });
        let path = match came {
            Came::ByRead => Ok(()),
            Came::ByChunks(reason) => Err(reason),
            Came::Locally => Err(PathReason::NotPinned),
        };
        Ok(Pulled { bytes: sink.filled(), path })
    }
}
