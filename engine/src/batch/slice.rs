//! The unit that a transport moves, and the seam between batches and transports.

use std::{net::SocketAddr, sync::Arc};

use super::{cell::Hold, report::Transport};
use crate::{Epoch, deadline::Deadline, error::Failure, memory::Registration};

/// Which way bytes go, as seen by the requester.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the peer's memory into local memory.
    Read,
    /// From local memory into the peer's.
    Write,
}

/// Local memory of one request. Whoever has it may touch the bytes, and the submission is not locally drained before it
/// and all its clones are dropped: a transport keeps it for as long as a device may use it.
#[derive(Clone)]
pub(crate) struct LocalGuard {
    // In this order: the memory is let go before that is told.
    registration: Arc<Registration>,
    _hold: Option<Arc<Hold>>,
}

impl LocalGuard {
    pub(crate) fn new(registration: Arc<Registration>, hold: Option<Arc<Hold>>) -> Self {
        Self { registration, _hold: hold }
    }

    pub(crate) fn registration(&self) -> &Registration {
        &self.registration
    }
}

/// Bytes to move, checked on this side; the source checks them again.
#[derive(Clone)]
pub(crate) struct Slice {
    pub(crate) peer: (SocketAddr, Epoch),
    pub(crate) direction: Direction,
    pub(crate) local: LocalGuard,
    pub(crate) local_offset: u64,
    pub(crate) remote_region: u64,
    pub(crate) remote_offset: u64,
    pub(crate) length: u64,
}

/// A transport, as batches see it.
pub(crate) trait DataPath: Send + Sync {
    /// Moves one slice and returns when its outcome is known, at the deadline at the latest. `post` is asked once, when
    /// nothing has left this host yet; if it says no, nothing may, and the outcome is
    /// [`Cancelled`](crate::TransferError::Cancelled).
    ///
    /// The memory need not be free by then: it is once the transport has dropped `slice.local`. What moved the bytes is
    /// told.
    fn transfer(&self, slice: Slice, deadline: Deadline, post: &dyn Fn() -> bool) -> Result<Transport, Failure>;
}
