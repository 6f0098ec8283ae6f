//! What can happen to an operation once it has begun.

use std::{fmt, io, net::SocketAddr, sync::Arc};

use crate::{Epoch, Status, WireError};

/// What an operation that did not succeed may have done to the peer's memory, or to its inbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RemoteEffect {
    /// Nothing, for certain. It may be tried again.
    #[default]
    None,
    /// All, part or nothing of it; nobody on this side knows. Nothing here tries it again: first make sure of the
    /// peer's state, or see to it that doing it twice does no harm.
    Unknown,
    /// The peer has acknowledged it.
    Committed,
}

impl fmt::Display for RemoteEffect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Unknown => "unknown",
            Self::Committed => "committed",
        })
    }
}

/// Where an operation was when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// The connection was being made.
    Connect,
    /// The request was on its way.
    Request,
    /// The source's first answer was awaited.
    Reply,
    /// The payload of a READ, or of a description, was coming in.
    Payload,
    /// The body of a WRITE or of a notification was going out.
    Body,
    /// The body was out, its acknowledgement awaited.
    Acknowledgement,
    /// Local bytes were awaited, which another direct operation is at.
    LocalMemory,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "connecting",
            Self::Request => "sending the request",
            Self::Reply => "waiting for the reply",
            Self::Payload => "receiving the payload",
            Self::Body => "sending the body",
            Self::Acknowledgement => "waiting for the acknowledgement",
            Self::LocalMemory => "waiting for local bytes that a direct operation is at",
        })
    }
}

/// Why an operation failed after it had begun. What it may have done is told by the [`RemoteEffect`] beside it.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// No connection. Is the engine running, the address reachable, the port open?
    #[error("cannot connect to {peer}")]
    Connect {
        /// Whom.
        peer: SocketAddr,
        /// What the system says.
        #[source]
        source: Arc<io::Error>,
    },
    /// The deadline passed.
    #[error("timed out while {phase}")]
    TimedOut {
        /// Where.
        phase: Phase,
    },
    /// The peer closed the connection: it ended, was too busy to queue the connection, or lost patience.
    #[error("the peer closed the connection while {phase}")]
    Disconnected {
        /// Where.
        phase: Phase,
    },
    /// The connection broke.
    #[error("the connection broke while {phase}")]
    Io {
        /// Where.
        phase: Phase,
        /// What the system says.
        #[source]
        source: Arc<io::Error>,
    },
    /// The source lives in another epoch: the one that was meant is gone. Ask its owner for the new epoch.
    #[error("the source is of epoch {actual}, not {expected}")]
    EpochMismatch {
        /// The epoch that was asked for.
        expected: Epoch,
        /// The epoch that answered.
        actual: Epoch,
    },
    /// The source refused.
    #[error("the source refused: {status:?}")]
    Refused {
        /// Its reason.
        status: Status,
    },
    /// The peer's bytes make no sense.
    #[error("the peer breaks the protocol: {0}")]
    Protocol(#[from] WireError),
    /// No path between an RDMA port here and one of the peer's.
    #[error("no RDMA path to the peer: {reason}")]
    NoPath {
        /// What does not fit, for the first path that the peer offers.
        reason: String,
    },
    /// A device, or what one needs, failed.
    #[error("RDMA failed while {phase}: {source}")]
    Device {
        /// Where.
        phase: Phase,
        /// How.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// It was cancelled before anything was sent.
    #[error("cancelled")]
    Cancelled,
    /// The engine ended first.
    #[error("the engine ends")]
    Stopped,
    /// A fault of this library; the log has more.
    #[error("a fault inside the engine; see the log")]
    Internal,
}

/// Error and effect, together on their way up.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) error: TransferError,
    pub(crate) effect: RemoteEffect,
    /// A direct READ may have changed local bytes.
    pub(crate) local_changed: bool,
}

impl Failure {
    /// One that certainly did nothing.
    pub(crate) fn harmless(error: TransferError) -> Self {
        Self::with(error, RemoteEffect::None)
    }

    /// One that changed nothing here.
    pub(crate) fn with(error: TransferError, effect: RemoteEffect) -> Self {
        Self { error, effect, local_changed: false }
    }
}

impl TransferError {
    /// Whether it is about time.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }
}
