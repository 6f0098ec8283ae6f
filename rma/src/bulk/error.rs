//! What can go wrong with bulk memory, one enum per operation.

use std::{io, sync::Arc, time::Duration};

use verbs_bootstrap::{DialError, InstanceId, Refusal};
use verbs_transport::{
    AttachError, EpochEnd,
    fabric::{
        ConnectQpError, CreateQpError, FabricError, PostError, WcStatus,
        bulk::{OpenBulkError, RegisterRegionError, Rkey},
    },
};

use super::config::BulkConfigError;
use crate::proto::region::{RegionId, UseError};

/// Bulk memory could not be attached to a worker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachBulkError {
    /// A number out of its range.
    #[error(transparent)]
    Config(#[from] BulkConfigError),
    /// The device gives no bulk port: messages go on without.
    #[error("no bulk memory on this device: {0}")]
    Open(#[from] OpenBulkError),
    /// The worker takes it no more, or has one already.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A driver task runs on the current tokio runtime, and there is none.
    #[error("attaching bulk memory needs a tokio runtime")]
    NoRuntime,
}

/// Memory could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The device or the system refuses: the text says what to do.
    #[error(transparent)]
    Register(#[from] RegisterRegionError),
    /// It is being taken down.
    #[error("shutting down")]
    ShuttingDown,
}

/// A region could not be unmapped.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnmapError {
    /// Never mapped here, or unmapped before.
    #[error("{id} is not mapped: it never was, or it was unmapped")]
    Unknown {
        /// Which.
        id: RegionId,
    },
    /// The device did not let go of it. Its memory stays; unmapping may be tried again.
    #[error("{id} could not be deregistered: {source}; its memory stays")]
    Deregister {
        /// Which.
        id: RegionId,
        /// The device's word.
        source: Arc<io::Error>,
    },
    /// It is being taken down.
    #[error("shutting down")]
    ShuttingDown,
}

/// A GET, a PUT or a notification did not succeed. What a GET has written to its destination, and a PUT to the peer's
/// memory, is unspecified then.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The local region cannot be used.
    #[error(transparent)]
    Region(#[from] UseError),
    /// The local range is not within its region. Nothing was posted.
    #[error("{len} bytes at {offset} reach beyond {id} of {region_len} bytes")]
    OutOfRange {
        /// The region.
        id: RegionId,
        /// From its start.
        offset: u64,
        /// Bytes.
        len: u64,
        /// What it has.
        region_len: u64,
    },
    /// The remote range wraps around the address space: a damaged descriptor. Nothing was posted.
    #[error("{len} bytes at remote address {addr:#x} do not fit the address space")]
    RemoteRange {
        /// Where.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// The device may not write to the local region: map it as a destination. Nothing was posted.
    #[error("{id} was not mapped as a destination: the device may not write to it")]
    ReadOnly {
        /// The region.
        id: RegionId,
    },
    /// A value for the peer's notification above 31 bits.
    #[error("notification value {value:#x} is above 31 bits")]
    NotifyValue {
        /// What was given.
        value: u32,
    },
    /// Nobody registered this peer here, and it is not connected by itself.
    #[error("peer not registered: {peer}")]
    PeerNotRegistered {
        /// Who.
        peer: InstanceId,
    },
    /// The peer runs without bulk memory.
    #[error("{peer} serves no bulk memory: nothing is attached to its worker")]
    NoCapability {
        /// Who.
        peer: InstanceId,
    },
    /// No bulk connection came up.
    #[error("no bulk connection to {peer}: {cause}")]
    Connect {
        /// Who.
        peer: InstanceId,
        /// Why.
        cause: Arc<BulkEnd>,
    },
    /// One of its own work requests failed. With a stale or wrong key this is what one sees: mostly `REM_ACCESS_ERR`, but
    /// `RETRY_EXC_ERR` too when the owner took the memory away during a READ. Do not tell causes apart by the status.
    #[error("a work request to {peer} failed with {status} (vendor code {vendor_err:#x})")]
    Failed {
        /// Who.
        peer: InstanceId,
        /// The device's word.
        status: WcStatus,
        /// The vendor's.
        vendor_err: u32,
    },
    /// The connection ended for another transfer's sake. Nothing was wrong with this one: acquire a new right to the
    /// remote memory and try again.
    #[error("the bulk connection to {peer} ended: {cause}; try again")]
    ConnectionReset {
        /// Who.
        peer: InstanceId,
        /// Why.
        cause: Arc<BulkEnd>,
    },
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// It took too long. Nothing of it is under way any more.
    #[error("not done within {after:?}")]
    Deadline {
        /// The limit.
        after: Duration,
    },
    /// Bulk memory is being taken down.
    #[error("shutting down")]
    ShuttingDown,
}

impl TransferError {
    /// Whether the same may succeed when it is tried again, with a fresh right to the remote memory.
    pub const fn is_retriable(&self) -> bool {
        matches!(self, Self::ConnectionReset { .. } | Self::Connect { .. } | Self::Deadline { .. })
    }
}

/// Why a bulk connection, or the attempt at one, ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BulkEnd {
    /// The bootstrap came to nothing.
    #[error("bootstrap failed: {0}")]
    Dial(#[source] DialError),
    /// The other side's offer cannot be met by this side.
    #[error("{0}")]
    Refused(#[source] Refusal),
    /// No QP could be made.
    #[error(transparent)]
    CreateQp(CreateQpError),
    /// The QP could not be brought up.
    #[error(transparent)]
    ConnectQp(ConnectQpError),
    /// The CQ could not hold every completion of one more QP.
    #[error(
        "the bulk CQ's {cq_depth} completions are spoken for by {qps} QPs of {qp_wrs} work requests each; raise `cq_depth` \
         or lower `send_wrs`"
    )]
    CqFull {
        /// Completions that the CQ holds.
        cq_depth: u32,
        /// QPs that exist.
        qps: usize,
        /// Sends and receives of each.
        qp_wrs: u32,
    },
    /// A work request failed: the QP is in ERR.
    #[error("a work request failed with {status} (vendor code {vendor_err:#x})")]
    WorkRequest {
        /// The device's word.
        status: WcStatus,
        /// The vendor's.
        vendor_err: u32,
    },
    /// A receive of this QP failed: the peer did something wrong, and the QP is in ERR.
    #[error("a receive failed with {status}: this side's half of the QP pair is in ERR")]
    Receive {
        /// The device's word.
        status: WcStatus,
    },
    /// The device refused a post that fitted.
    #[error("post refused: {0}")]
    Post(#[source] PostError),
    /// The peer gave back more receives than it was ever sent notifications.
    #[error("the peer granted more notifications than its window of {window}")]
    ExcessGrant {
        /// Its window.
        window: u16,
    },
    /// The peer ended a memory window of ours, which no peer of this library does.
    #[error("the peer invalidated {rkey:?}, which is this side's to end")]
    Invalidated {
        /// The window's key.
        rkey: Rkey,
    },
    /// Nothing came over the new QP. The QPs were exchanged over TCP, but RDMA packets do not flow, or the peer gave up
    /// before it was ready.
    #[error(
        "nothing came over the new bulk QP within {after:?} (the worker's `proof_deadline`): the peer gave up, or RDMA \
         packets do not flow between the two ports"
    )]
    NotProven {
        /// The limit.
        after: Duration,
    },
    /// Work requests were posted and none completed: a QP that hangs.
    #[error("no completion for {after:?} (`stall_deadline`) with {posted} work requests posted")]
    Stalled {
        /// The limit.
        after: Duration,
        /// WRs without a completion.
        posted: usize,
    },
    /// Neither side had anything to do on it for long (`idle_close`). The other side sees it closed by this one.
    #[error("neither side used it for {after:?} (`idle_close`)")]
    Idle {
        /// The limit.
        after: Duration,
    },
    /// The right to the remote memory was over with READs under way.
    #[error("a transfer was aborted")]
    Aborted,
    /// The peer closed its bootstrap socket: its half is in ERR, it closed the connection, or its process ended.
    #[error("the peer ended the bulk connection, or its process ended")]
    PeerClosed,
    /// The peer gave up its end and connected anew.
    #[error("the peer opened a new bulk connection in place of this one")]
    Replaced,
    /// The message connections to this run of the peer ended for good.
    #[error("the peer is gone: {0}")]
    Peer(#[source] Arc<EpochEnd>),
    /// An async event said that the QP is in ERR.
    #[error("the device reports a fatal error of the QP")]
    QpFatal,
    /// The device or the bulk CQ is broken.
    #[error("the bulk port is lost: {0}")]
    DeviceLost(#[source] Arc<FabricError>),
    /// Bulk memory is being taken down.
    #[error("shutting down")]
    ShuttingDown,
}

impl BulkEnd {
    /// Its name in counters and logs.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Dial(_) => "dial",
            Self::Refused(_) => "refused",
            Self::CreateQp(_) => "create_qp",
            Self::ConnectQp(_) => "connect_qp",
            Self::CqFull { .. } => "cq_full",
            Self::WorkRequest { .. } => "work_request",
            Self::Receive { .. } => "receive",
            Self::Post(_) => "post",
            Self::ExcessGrant { .. } => "excess_grant",
            Self::Invalidated { .. } => "invalidated",
            Self::NotProven { .. } => "not_proven",
            Self::Stalled { .. } => "stalled",
            Self::Idle { .. } => "idle",
            Self::Aborted => "aborted",
            Self::PeerClosed => "peer_closed",
            Self::Replaced => "replaced",
            Self::Peer(_) => "peer",
            Self::QpFatal => "qp_fatal",
            Self::DeviceLost(_) => "device_lost",
            Self::ShuttingDown => "shutting_down",
        }
    }
}
