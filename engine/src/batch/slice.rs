//! The unit that a transport moves, and the seam between batches and transports.

use std::{fmt, net::SocketAddr, sync::Arc};

use super::{cell::Hold, report::Transport};
use crate::{Epoch, deadline::Deadline, error::Failure, memory::Registration};

/// Which way bytes go, as seen by the requester. Where a call takes a [`Mode`], a direction alone means the staged profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the peer's memory into local memory.
    Read,
    /// From local memory into the peer's.
    Write,
}

/// What a submission promises about bytes on their way, at both ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Profile {
    /// A slice changes in one step, when all of it has arrived, or not at all: it goes by way of memory of the engine's,
    /// and costs a copy at each end.
    #[default]
    Staged,
    /// Bytes go straight between registered memory and the socket, or the device. A READ that fails may have changed part
    /// of its local slice; a WRITE changes the peer's bytes from its first one on, and may leave part of them changed. As
    /// long as it runs its bytes are busy at both ends: conflicting accesses wait, at the peer for its
    /// [`source_timeout`](crate::Config::source_timeout) at most. The source must
    /// [allow it](crate::Config::serve_direct); it is never taken by default, and never replaced by the other.
    Direct,
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Staged => "staged",
            Self::Direct => "direct",
        })
    }
}

/// What a submission asks for: a [`Direction`], or [`Direction::direct`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mode {
    /// Which way.
    pub direction: Direction,
    /// With which promise.
    pub profile: Profile,
}

impl Direction {
    /// This direction with the [direct](Profile::Direct) profile.
    #[must_use]
    pub const fn direct(self) -> Mode {
        Mode { direction: self, profile: Profile::Direct }
    }
}

impl From<Direction> for Mode {
    fn from(direction: Direction) -> Self {
        Self { direction, profile: Profile::Staged }
    }
}

impl Mode {
    /// A request that fails on its way may leave the local slice half changed.
    pub(crate) fn may_change_local(self) -> bool {
        (self.direction, self.profile) == (Direction::Read, Profile::Direct)
    }
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

    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.registration
    }
}

/// Bytes to move, checked on this side; the source checks them again.
#[derive(Clone)]
pub(crate) struct Slice {
    pub(crate) peer: (SocketAddr, Epoch),
    pub(crate) direction: Direction,
    pub(crate) profile: Profile,
    pub(crate) local: LocalGuard,
    pub(crate) local_offset: u64,
    pub(crate) remote_region: u64,
    pub(crate) remote_offset: u64,
    pub(crate) length: u64,
}

impl Slice {
    /// Offset and length in the local range.
    pub(crate) fn local_place(&self) -> (u64, u64) {
        (self.local_offset, self.length)
    }

    /// A failure on the way may leave the local slice half changed.
    #[cfg(feature = "rdma")]
    pub(crate) fn may_change_local(&self) -> bool {
        Mode { direction: self.direction, profile: self.profile }.may_change_local()
    }
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
