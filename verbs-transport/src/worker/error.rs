//! What can go wrong, one enum per operation.

use std::{sync::Arc, time::Duration};

use verbs_bootstrap::{DialError, Gid, InstanceId, PortIdentity, Refusal};

use super::config::ConfigError;
use crate::{
    fabric::{ConnectQpError, CreateQpError, FabricError, PostError, WcStatus},
    proto::{frame::Lane, link::LinkError, receive_share::SharesExhausted},
};

/// Why a frame is not known to have been delivered.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// [`Worker::start`](crate::Worker::start) was not called yet.
    #[error("transport not started")]
    NotStarted,
    /// Nobody registered this peer here: register its address first.
    #[error("peer not registered: {peer}")]
    PeerNotRegistered {
        /// Who.
        peer: InstanceId,
    },
    /// Header + payload exceed what both sides take. Split the frame.
    #[error("frame of {bytes} bytes is above the limit of {max} (`eager_max_bytes`, the smaller of both sides)")]
    TooLarge {
        /// What was given.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The connection ended. The frame may have arrived if it had been posted; the next send opens a new connection.
    #[error("connection to {peer} ended: {cause}")]
    ConnectionLost {
        /// Who.
        peer: InstanceId,
        /// Why it ended.
        cause: Arc<EpochEnd>,
    },
    /// The frame is for a layer above the messages, and the peer has none attached.
    #[error("{peer} has no layer for {} frames: nothing is attached to its worker", .lane.name())]
    NoSuchLane {
        /// Who.
        peer: InstanceId,
        /// Of the frame.
        lane: Lane,
    },
    /// The payload was staged for the peer to pull, and it has not done so. It was not delivered.
    #[error("the payload of {bytes} bytes was staged for {peer}, which {why}")]
    NotPulled {
        /// Who.
        peer: InstanceId,
        /// Bytes of the payload.
        bytes: u64,
        /// What it did instead.
        why: &'static str,
    },
    /// This worker is shutting down.
    #[error("shutting down")]
    ShuttingDown,
}

/// Why a connection, or the attempt at one, ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EpochEnd {
    /// The bootstrap came to nothing.
    #[error("bootstrap failed: {}", with_source(.0))]
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
    /// The SRQ has no window left for this peer.
    #[error(transparent)]
    Exhausted(SharesExhausted),
    /// The CQ could not hold every completion of one more QP.
    #[error(
        "the CQ's {cq_depth} completions are spoken for: {receive_slabs} receives and {qps} QPs of {send_wrs} sends; \
         raise `cq_depth`, or lower `send_wrs` or `receive_slabs`"
    )]
    CqFull {
        /// Completions that the CQ holds.
        cq_depth: u32,
        /// Receives of the SRQ, each of which may complete.
        receive_slabs: u32,
        /// QPs that exist.
        qps: usize,
        /// Sends of each, each of which may complete or be flushed.
        send_wrs: u32,
    },
    /// No PING came back over the new QP. The QPs were exchanged over TCP, but RDMA packets do not flow.
    #[error(
        "no answer over the new QP within {after:?}, from gid {local} (index {gid_index}) to gid {remote}: check that \
         both GIDs are on one network (and in this network namespace), that no firewall drops UDP port 4791, and that \
         the path carries packets of {mtu_bytes} bytes"
    )]
    NotProven {
        /// The limit.
        after: Duration,
        /// Our address.
        local: Gid,
        /// Its index.
        gid_index: u8,
        /// The peer's address.
        remote: Gid,
        /// The path MTU that was agreed.
        mtu_bytes: u32,
    },
    /// A work request failed: the QP is in ERR.
    #[error("a SEND failed with {status} (vendor code {vendor_err:#x})")]
    WorkRequest {
        /// The device's word.
        status: WcStatus,
        /// The vendor's.
        vendor_err: u32,
    },
    /// A receive of this QP failed.
    #[error("a receive failed with {status}")]
    Receive {
        /// The device's word.
        status: WcStatus,
    },
    /// The device refused a post that fitted.
    #[error("post refused: {0}")]
    Post(#[source] PostError),
    /// The peer broke the protocol.
    #[error("protocol: {0}")]
    Protocol(#[source] LinkError),
    /// Something was owed, and neither it nor the answer to a PING came in time: dead peer, cut path, or a QP that
    /// hangs.
    #[error(
        "the connection stood still for {after:?} (`health_deadline`) and no PING was answered, with {in_flight} work \
         requests in flight"
    )]
    Unresponsive {
        /// The limit.
        after: Duration,
        /// WRs without a completion.
        in_flight: u32,
    },
    /// The peer closed its bootstrap socket: its process ended, or it closed the connection.
    #[error("the peer closed the connection, or its process ended")]
    PeerClosed,
    /// The peer came back as a new process.
    #[error("the peer restarted")]
    PeerRestarted,
    /// The peer gave up its end and connected anew.
    #[error("the peer opened a new connection in place of this one")]
    Replaced,
    /// An async event said that the QP is in ERR.
    #[error("the device reports a fatal error of the QP")]
    QpFatal,
    /// The device or its CQ is broken.
    #[error("the device is lost: {0}")]
    DeviceLost(#[source] Arc<FabricError>),
    /// Nothing was sent or received for `idle_evict_after`.
    #[error("idle for {after:?} (`idle_evict_after`)")]
    Idle {
        /// The limit.
        after: Duration,
    },
    /// [`Worker::unregister`](crate::Worker::unregister) was called.
    #[error("the peer was unregistered")]
    Unregistered,
    /// This worker is shutting down.
    #[error("shutting down")]
    ShuttingDown,
}

impl EpochEnd {
    /// Every name that [`EpochEnd::cause`] gives.
    pub const CAUSES: [&'static str; 20] = [
        "dial",
        "refused",
        "create_qp",
        "connect_qp",
        "exhausted",
        "cq_full",
        "not_proven",
        "work_request",
        "receive",
        "post",
        "protocol",
        "unresponsive",
        "peer_closed",
        "peer_restarted",
        "replaced",
        "qp_fatal",
        "device_lost",
        "idle",
        "unregistered",
        "shutting_down",
    ];

    /// The name of this cause in counters and logs: one of [`EpochEnd::CAUSES`].
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Dial(_) => "dial",
            Self::Refused(_) => "refused",
            Self::CreateQp(_) => "create_qp",
            Self::ConnectQp(_) => "connect_qp",
            Self::Exhausted(_) => "exhausted",
            Self::CqFull { .. } => "cq_full",
            Self::NotProven { .. } => "not_proven",
            Self::WorkRequest { .. } => "work_request",
            Self::Receive { .. } => "receive",
            Self::Post(_) => "post",
            Self::Protocol(_) => "protocol",
            Self::Unresponsive { .. } => "unresponsive",
            Self::PeerClosed => "peer_closed",
            Self::PeerRestarted => "peer_restarted",
            Self::Replaced => "replaced",
            Self::QpFatal => "qp_fatal",
            Self::DeviceLost(_) => "device_lost",
            Self::Idle { .. } => "idle",
            Self::Unregistered => "unregistered",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

/// An error and the one beneath it, in one line.
fn with_source(error: &DialError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Why two ports cannot meet, if they cannot: link layer, GID type and address family must agree.
pub(crate) fn cannot_meet(ours: &PortIdentity, theirs: &PortIdentity) -> Option<String> {
    if ours.link_layer != theirs.link_layer {
        return Some(format!("link layer {:?} here, {:?} there", ours.link_layer, theirs.link_layer));
    }
    if ours.link_layer == verbs_bootstrap::LinkLayer::InfiniBand {
        return None;
    }
    if ours.gid_type != theirs.gid_type || ours.gid.family() != theirs.gid.family() {
        return Some(format!(
            "gid {} (index {}, {:?}, {:?}) here cannot reach gid {} (index {}, {:?}, {:?}) there: choose GIDs of one \
             type and family on both sides",
            ours.gid,
            ours.gid_index,
            ours.gid_type,
            ours.gid.family(),
            theirs.gid,
            theirs.gid_index,
            theirs.gid_type,
            theirs.gid.family()
        ));
    }
    None
}

/// Why a peer could not be registered.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The address has no entry for this transport, or none that this worker's port can reach: try another transport.
    #[error("no endpoint: {reason}")]
    NoEndpoint {
        /// Why.
        reason: String,
    },
    /// There is an entry, but it cannot be used.
    #[error("invalid endpoint: {reason}")]
    InvalidEndpoint {
        /// Why.
        reason: String,
    },
    /// The address is this worker's own: loopback to oneself is not offered.
    #[error("{instance} is this worker itself")]
    Myself {
        /// This worker.
        instance: InstanceId,
    },
}

/// Why a worker did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A number out of its range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No listener.
    #[error(transparent)]
    Listen(#[from] verbs_bootstrap::ListenError),
    /// The address could not be written.
    #[error(transparent)]
    Address(#[from] verbs_bootstrap::EncodeAddressError),
    /// The SRQ could not be filled, or a thread not be made.
    #[error("{what}: {source}")]
    Device {
        /// Which step.
        what: &'static str,
        /// The system's word.
        source: std::io::Error,
    },
    /// It was started or shut down before.
    #[error("the worker was started before; make a new one")]
    NotNew,
}

/// Why a peer could not be connected or did not answer.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// [`Worker::start`](crate::Worker::start) was not called yet.
    #[error("transport not started")]
    NotStarted,
    /// Nobody registered this peer here.
    #[error("peer not registered: {peer}")]
    PeerNotRegistered {
        /// Who.
        peer: InstanceId,
    },
    /// The attempt ended.
    #[error("{0}")]
    Failed(Arc<EpochEnd>),
}

/// How a health check failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HealthError {
    /// [`Worker::start`](crate::Worker::start) was not called yet.
    #[error("transport not started")]
    TransportNotStarted,
    /// Nobody registered this peer here.
    #[error("peer not registered: {peer}")]
    PeerNotRegistered {
        /// Who.
        peer: InstanceId,
    },
    /// The peer's listener answers, but there was never a connection to it from here.
    #[error("the peer listens, but was never connected")]
    NeverConnected,
    /// The peer refuses, or the connection is dead.
    #[error("connection failed: {reason}")]
    ConnectionFailed {
        /// Why.
        reason: String,
    },
    /// No answer in time.
    #[error("no answer within {after:?}")]
    Timeout {
        /// The caller's deadline.
        after: Duration,
    },
}
