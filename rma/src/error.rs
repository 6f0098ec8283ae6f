//! What can go wrong, one enum per operation.

use std::{io, sync::Arc, time::Duration};

use verbs_transport::{ConnectError, InstanceId, SendError};

use crate::proto::{
    handle::Handle,
    wire::{RefusalCode, WireError},
};

/// A payload could not be staged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// Above `payload_max_bytes`.
    #[error("a payload of {bytes} bytes is above the limit of {max} (`payload_max_bytes`)")]
    TooLarge {
        /// What was given.
        bytes: u64,
        /// The limit.
        max: u64,
    },
    /// A payload without a reference would be freed at once.
    #[error("a payload is staged with one reference at least")]
    NoReference,
    /// The source could not be read.
    #[error("reading the source failed: {0}")]
    Source(#[from] io::Error),
    /// The worker is shutting down.
    #[error("shutting down")]
    ShuttingDown,
}

/// A question to an owner was not answered as hoped.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// No known worker has drawn this number: register the owner's address first, or it has restarted, and what it had
    /// staged is gone.
    #[error("handle {handle} is of a worker that is not known here: register its address first")]
    UnknownOwner {
        /// The handle.
        handle: Handle,
    },
    /// There is no connection to the owner.
    #[error("no connection to the owner {peer}: {cause}")]
    Connect {
        /// Who.
        peer: InstanceId,
        /// Why.
        cause: Arc<ConnectError>,
    },
    /// The peer runs without a rendezvous.
    #[error("{peer} serves no rendezvous: nothing is attached to its worker")]
    NoService {
        /// Who.
        peer: InstanceId,
    },
    /// The connection ended before the answer came. Ask again.
    #[error("the connection to {peer} ended before its answer came: {cause}")]
    Lost {
        /// Who.
        peer: InstanceId,
        /// Why, in words.
        cause: Arc<str>,
    },
    /// No answer came in time. Ask again.
    #[error("no answer from {peer} within {after:?} (`request_deadline`)")]
    NoAnswer {
        /// Who.
        peer: InstanceId,
        /// The limit.
        after: Duration,
    },
    /// The owner says no.
    #[error("the owner {peer} refuses: {code} (detail {detail})")]
    Refused {
        /// Who.
        peer: InstanceId,
        /// Why.
        code: RefusalCode,
        /// The number beside it; see [`Refused`](crate::proto::wire::Refused).
        detail: u64,
    },
    /// The answer is no answer to this question, or cannot be read.
    #[error("{peer} answered what it was not asked: {what}")]
    BadAnswer {
        /// Who.
        peer: InstanceId,
        /// What is wrong with it.
        what: Arc<str>,
    },
    /// The worker is shutting down, or was never started.
    #[error("not running")]
    NotRunning,
}

impl AskError {
    /// Whether the same question may well succeed a little later.
    pub const fn is_retriable(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Lost { .. } | Self::NoAnswer { .. })
    }

    pub(crate) fn lost(peer: InstanceId, cause: &SendError) -> Self {
        match cause {
            SendError::NotStarted | SendError::ShuttingDown => Self::NotRunning,
            cause => Self::Lost { peer, cause: cause.to_string().into() },
        }
    }

    pub(crate) fn bad(peer: InstanceId, what: impl std::fmt::Display) -> Self {
        Self::BadAnswer { peer, what: what.to_string().into() }
    }

    pub(crate) fn unreadable(peer: InstanceId, error: &WireError) -> Self {
        Self::bad(peer, error)
    }
}

/// A payload could not be pulled. The destination's bytes are unspecified; a lease that there was has been given back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The owner did not answer as hoped.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The payload does not fit; nothing was transferred.
    #[error("the payload has {total_bytes} bytes, the destination takes {capacity}")]
    Capacity {
        /// Bytes of the payload.
        total_bytes: u64,
        /// Bytes that there is room for.
        capacity: u64,
    },
    /// Above `payload_max_bytes`; nothing was transferred.
    #[error("the payload has {total_bytes} bytes, above the limit of {max} (`payload_max_bytes`)")]
    TooLarge {
        /// Bytes of the payload.
        total_bytes: u64,
        /// The limit.
        max: u64,
    },
    /// There is no memory for it; nothing was transferred.
    #[error("no memory for a payload of {bytes} bytes")]
    NoMemory {
        /// Bytes of the payload.
        bytes: u64,
    },
    /// The lease ran out while the payload was pulled: the owner did not renew it, or this side stood still. Start again.
    #[error("the lease on {handle} ran out after {pulled} of {total_bytes} bytes")]
    LeaseOver {
        /// Of what.
        handle: Handle,
        /// Bytes that had come.
        pulled: u64,
        /// Of how many.
        total_bytes: u64,
    },
    /// The caller's deadline.
    #[error("not pulled within {after:?}")]
    Deadline {
        /// The limit.
        after: Duration,
    },
    /// The destination failed.
    #[error("writing to the destination failed: {0}")]
    Destination(#[source] io::Error),
}
