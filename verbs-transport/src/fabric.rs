//! The seam between the transport and what moves its bytes.
//!
//! A [`Fabric`] is one opened port of one device with everything that a worker shares between its peers: one CQ with
//! its channel, one SRQ, the receive slabs and the send slabs. `verbs` implements it over a device, `sim` in memory.
//! It is chosen by a type parameter, so the per-message path has no virtual call.
//!
//! Slabs are tokens that cannot be copied: whoever holds one may use that slot of memory, and posting hands the slot
//! to the device until the token comes back in a [`Wc`]. The memory itself lives as long as the fabric.

pub mod bulk;
mod window;
pub(crate) mod window_book;

pub(crate) use self::window::give_up_unless_bound;

use std::{
    fmt,
    future::Future,
    io,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use verbs_bootstrap::{Mtu, Net, PortIdentity, Psn, QpEndpoint, Qpn, RdAtomic};

/// Most completions that one [`Fabric::poll`] gives.
pub const POLL_BATCH: usize = 64;

/// Most WRs in one call of [`FabricQp::post`] or [`Fabric::post_receives`].
pub const POST_BATCH: usize = 16;

/// One receive slab: a fixed-size slot of the receive MR.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a dropped slab is lost to the SRQ for good"]
pub struct RecvSlab {
    pool: u32,
    index: u32,
}

/// One send slab: a fixed-size slot of the send MR.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a dropped slab is lost to the pool for good"]
pub struct SendSlab {
    pool: u32,
    index: u32,
}

impl RecvSlab {
    /// For a fabric only: mints the token of slot `index`, for a fabric whose memory needs no telling apart. At most
    /// one may exist at a time.
    pub(crate) const fn mint(index: u32) -> Self {
        Self::mint_in(0, index)
    }

    /// For a fabric only: mints the token of slot `index` of the pool of that number. At most one may exist at a time.
    pub(crate) const fn mint_in(pool: u32, index: u32) -> Self {
        Self { pool, index }
    }

    /// Which slot.
    pub(crate) const fn index(&self) -> u32 {
        self.index
    }

    /// Which pool: the token of another fabric gives no right to this one's memory.
    pub(crate) const fn pool(&self) -> u32 {
        self.pool
    }
}

impl SendSlab {
    /// For a fabric only: mints the token of slot `index`, for a fabric whose memory needs no telling apart. At most
    /// one may exist at a time.
    pub(crate) const fn mint(index: u32) -> Self {
        Self::mint_in(0, index)
    }

    /// For a fabric only: mints the token of slot `index` of the pool of that number. At most one may exist at a time.
    pub(crate) const fn mint_in(pool: u32, index: u32) -> Self {
        Self { pool, index }
    }

    /// Which slot.
    pub(crate) const fn index(&self) -> u32 {
        self.index
    }

    /// Which pool: the token of another fabric gives no right to this one's memory.
    pub(crate) const fn pool(&self) -> u32 {
        self.pool
    }
}

/// Position of a WR in its QP's send queue, from 0, counting every WR ever posted there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WrSeq(pub u64);

/// One SEND to post.
#[derive(Debug)]
pub struct SendWr<'a> {
    /// Comes back in the [`Wc`].
    pub seq: WrSeq,
    /// Ask for a completion on success. A failed WR completes in any case.
    pub signaled: bool,
    /// The bytes.
    pub data: SendData<'a>,
}

/// Where the bytes of a SEND are.
#[derive(Debug)]
pub enum SendData<'a> {
    /// Copied into the WQE during the post; at most [`QpCaps::inline_bytes`].
    Inline(&'a [u8]),
    /// The first `len` bytes of a send slab, which the caller keeps until a [`Wc`] covers the WR.
    Slab {
        /// The slab.
        slab: &'a SendSlab,
        /// Bytes to send, from the slab's start.
        len: u32,
    },
}

/// One completion.
#[derive(Debug, PartialEq, Eq)]
pub enum Wc {
    /// A message arrived in a slab.
    Receive {
        /// The receiving QP; raw, since it may be gone already.
        qpn: u32,
        /// Where it lies.
        slab: RecvSlab,
        /// Its length.
        bytes: u32,
    },
    /// A receive failed or was flushed; the slab comes home empty.
    ReceiveFailed {
        /// The QP that had taken the slab.
        qpn: u32,
        /// The slab.
        slab: RecvSlab,
        /// Why.
        status: WcStatus,
    },
    /// A signaled SEND is done, and with it every WR before it on that QP.
    Send {
        /// The QP.
        qpn: u32,
        /// The WR.
        seq: WrSeq,
    },
    /// A SEND failed or was flushed. Every WR before it that has not failed by itself is done.
    SendFailed {
        /// The QP.
        qpn: u32,
        /// The WR.
        seq: WrSeq,
        /// Why.
        status: WcStatus,
        /// The vendor's own code, for its support line.
        vendor_err: u32,
    },
}

/// Completion status other than success, as `ibv_wc_status` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WcStatus {
    /// `LOC_LEN_ERR`: a receive shorter than the message, or a SEND above `max_msg_sz`.
    LocalLength,
    /// `LOC_QP_OP_ERR`: the QP could not carry out the WR; on Soft-RoCE also "the link is down".
    LocalQpOperation,
    /// `LOC_PROT_ERR`: an SGE outside its MR.
    LocalProtection,
    /// `WR_FLUSH_ERR`: the QP went to ERR before this WR's turn.
    Flushed,
    /// `MW_BIND_ERR`: a memory window could not be bound: wrong rights, or one that is bound already.
    WindowBind,
    /// `REM_INV_REQ_ERR`: the peer's QP does not take this operation.
    RemoteInvalidRequest,
    /// `REM_ACCESS_ERR`: a bad rkey or range.
    RemoteAccess,
    /// `REM_OP_ERR`: the peer could not complete it.
    RemoteOperation,
    /// `RETRY_EXC_ERR`: no answer after all retries: dead peer, cut path, wrong GID or MTU.
    RetryExceeded,
    /// `RNR_RETRY_EXC_ERR`: the peer had no receive posted for too long.
    RnrRetryExceeded,
    /// Any other, by number.
    Other(u32),
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LocalLength => "LOC_LEN_ERR",
            Self::LocalQpOperation => "LOC_QP_OP_ERR",
            Self::LocalProtection => "LOC_PROT_ERR",
            Self::Flushed => "WR_FLUSH_ERR",
            Self::WindowBind => "MW_BIND_ERR",
            Self::RemoteInvalidRequest => "REM_INV_REQ_ERR",
            Self::RemoteAccess => "REM_ACCESS_ERR",
            Self::RemoteOperation => "REM_OP_ERR",
            Self::RetryExceeded => "RETRY_EXC_ERR (no answer from the peer)",
            Self::RnrRetryExceeded => "RNR_RETRY_EXC_ERR",
            Self::Other(raw) => return write!(f, "ibv_wc_status {raw}"),
        })
    }
}

/// News about the device that no WC carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// Fewer receives are posted than the armed limit. Fires once per arming.
    SrqLimitReached,
    /// The SRQ is broken.
    SrqError,
    /// The CQ is broken, by an overrun most likely: fatal to every QP on it.
    CqError,
    /// A QP went to ERR.
    QpFatal {
        /// Which one.
        qpn: u32,
    },
    /// No more receive completions will come from a QP in ERR.
    QpLastWqe {
        /// Which one.
        qpn: u32,
    },
    /// The port is down: QPs may fail at their next send, or hang.
    PortDown,
    /// The port is up again.
    PortUp,
    /// The GID table changed.
    GidChange,
    /// The device is gone.
    DeviceFatal,
    /// Any other, by number.
    Other(u32),
}

/// What a QP is asked for, and what it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCaps {
    /// Send WRs.
    pub send_wrs: u32,
    /// Bytes that may be sent inline.
    pub inline_bytes: u32,
}

/// What the device allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Most WRs in a send queue.
    pub qp_wrs: u32,
    /// Most receives in an SRQ.
    pub srq_wrs: u32,
    /// Most completions in a CQ.
    pub cqes: u32,
    /// Completions that this fabric's CQ holds.
    pub cq_depth: u32,
    /// Most QPs.
    pub qps: u32,
    /// The port's longest message, in bytes.
    pub message_bytes: u64,
    /// READs at once.
    pub rd_atomic: RdAtomic,
}

/// Bytes of a slab unless configured: 8 KiB of payload, the 8 bytes that each SEND begins with, and 120 bytes of user header.
/// With 8 KiB in all, a payload of just that size, which many applications have, took two SENDs.
pub const SLAB_BYTES: u32 = 8192 + 128;

/// The slabs of a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabSizes {
    /// Receive slabs: the SRQ's depth.
    pub receive_slabs: u32,
    /// Bytes in each receive slab.
    pub receive_bytes: u32,
    /// Send slabs.
    pub send_slabs: u32,
    /// Bytes in each send slab.
    pub send_bytes: u32,
}

/// A device, as others may be told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its name, as `rdma link` prints it.
    pub name: String,
    /// The NUMA node that it hangs off; `None` where the host does not say, as for Soft-RoCE.
    pub numa_node: Option<u16>,
}

/// How a QP is brought to RTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpPath {
    /// The peer's QP.
    pub remote: QpEndpoint,
    /// The peer's port.
    pub remote_port: PortIdentity,
    /// Our first PSN.
    pub local_psn: Psn,
    /// The smaller of both active MTUs.
    pub mtu: Mtu,
    /// READs at once: as initiator min(ours, theirs as responder), as responder the other way round.
    pub rd_atomic: RdAtomic,
    /// Local policy.
    pub timers: QpTimers,
}

/// Retry policy of a QP: local, never exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpTimers {
    /// Wait for an ACK: 4.096 µs × 2^code. 16 is about 268 ms, the least that `ConnectX`-5 and later honour.
    pub ack_timeout_code: u8,
    /// Retries without an answer, 0 to 6. Not 7: Soft-RoCE takes that as "for ever".
    pub retry_cnt: u8,
    /// Retries after RNR; 7 is "for ever", bounded by the health check.
    pub rnr_retry: u8,
    /// The wait that our RNR NAK asks for: 1 to 6 are 10, 20, 30, 40, 60, 80 µs. Code 0 is the longest, 655.36 ms.
    pub min_rnr_timer_code: u8,
}

/// A post that the device refused. The WRs before number `posted` are live all the same.
#[derive(Debug, thiserror::Error)]
#[error("the device took {posted} of {asked} work requests, then refused: {source}")]
pub struct PostError {
    /// Accepted WRs, from the front.
    pub posted: usize,
    /// WRs in the call.
    pub asked: usize,
    /// The device's errno.
    pub source: io::Error,
}

/// A QP could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateQpError {
    /// The device does not grant such a queue: ask for less inline or fewer WRs.
    #[error(
        "the device refused a QP with {} send WRs and {} inline bytes: {source}; ask for less",
        caps.send_wrs, caps.inline_bytes
    )]
    Unsupported {
        /// What was asked.
        caps: QpCaps,
        /// The device's errno.
        source: io::Error,
    },
    /// Out of QPs or memory: close connections.
    #[error("no QP to be had: {source}; the device allows {device_qps} QPs, see also the locked-memory limit")]
    Exhausted {
        /// The device's limit.
        device_qps: u32,
        /// The device's errno.
        source: io::Error,
    },
    /// Any other failure.
    #[error("creating or initialising a QP failed: {source}")]
    Device {
        /// The device's errno.
        source: io::Error,
    },
}

/// A QP could not be brought to RTS.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectQpError {
    /// The peer's address did not resolve. On `RoCE`, check the GID index, the subnet and that the peer's port is up.
    #[error("no route from gid {local_gid} (index {gid_index}) to gid {remote_gid} for {qpn}: {source}")]
    NoRoute {
        /// Our QP.
        qpn: Qpn,
        /// Our address.
        local_gid: verbs_bootstrap::Gid,
        /// Its index.
        gid_index: u8,
        /// The peer's address.
        remote_gid: verbs_bootstrap::Gid,
        /// The device's errno.
        source: io::Error,
    },
    /// Our own GID is gone from the table: an address was removed.
    #[error("gid {local_gid} is no longer at index {gid_index} of the port; was an address removed?: {source}")]
    GidGone {
        /// Our address.
        local_gid: verbs_bootstrap::Gid,
        /// Its index.
        gid_index: u8,
        /// The device's errno.
        source: io::Error,
    },
    /// A bulk QP without READs in one of the directions: both sides must offer at least one.
    #[error(
        "{qpn} is to do {initiator} RDMA READs at once and to answer {responder}: each must be at least 1, so raise the \
         limit of the side that offers 0"
    )]
    NoReads {
        /// Our QP.
        qpn: Qpn,
        /// As agreed.
        initiator: u8,
        /// As agreed.
        responder: u8,
    },
    /// Any other failure.
    #[error("{qpn} did not go to {state}: {source}")]
    Device {
        /// Our QP.
        qpn: Qpn,
        /// The state that was wanted.
        state: &'static str,
        /// The device's errno.
        source: io::Error,
    },
}

/// The CQ, SRQ or channel failed: the whole fabric is lost.
#[derive(Debug, thiserror::Error)]
#[error("{what} failed: {source}")]
pub struct FabricError {
    /// Which call.
    pub what: &'static str,
    /// The device's errno.
    pub source: io::Error,
}

impl FabricError {
    /// The same error once more: it goes to the caller and to every connection that it ends.
    pub(crate) fn again(&self) -> Self {
        let source = match self.source.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::new(self.source.kind(), self.source.to_string()),
        };
        Self { what: self.what, source }
    }
}

/// What a port counts by itself, for all programs that use it. `None` where the device does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HwCounters {
    /// RNR NAKs sent: a peer's SEND found our SRQ empty. 0 in steady state.
    pub rnr_naks_sent: Option<u64>,
    /// RNR NAKs received: our SEND found a peer's SRQ empty. 0 in steady state.
    pub rnr_naks_received: Option<u64>,
}

/// One opened port with its CQ, SRQ and slabs. See the module's text.
pub trait Fabric: Send + Sync + Sized + 'static {
    /// Its RC QPs.
    type Qp: FabricQp;
    /// The network that its bootstrap runs over.
    type Net: Net;

    /// The bootstrap's network.
    fn net(&self) -> &Self::Net;

    /// What the device allows.
    fn limits(&self) -> DeviceLimits;

    /// The slabs that were made.
    fn slabs(&self) -> SlabSizes;

    /// The port and GID that new QPs use, read from the device: once for each attempt at a connection.
    fn port(&self) -> PortIdentity;

    /// The same as last read: what the rest of the attempt goes by.
    fn known_port(&self) -> PortIdentity {
        self.port()
    }

    /// Device, port and GID in words, and why they were chosen.
    fn path_reason(&self) -> String;

    /// Which device it is, and where in the host.
    fn nic(&self) -> Nic;

    /// What the port counts by itself; by default nothing. May read files: not for the path of a message.
    fn hw_counters(&self) -> HwCounters {
        HwCounters::default()
    }

    /// All slabs, once, at the start.
    fn take_slabs(&self) -> (Vec<RecvSlab>, Vec<SendSlab>);

    /// Copies `bytes` into a slab at `offset`.
    ///
    /// # Panics
    ///
    /// When `offset + bytes.len()` exceeds the slab, or the slab is another fabric's: a bug of ours.
    fn write_slab(&self, slab: &mut SendSlab, offset: usize, bytes: &[u8]);

    /// Copies out of a slab from `offset` on.
    ///
    /// # Panics
    ///
    /// When `offset + out.len()` exceeds the slab, or the slab is another fabric's: a bug of ours.
    fn read_slab(&self, slab: &RecvSlab, offset: usize, out: &mut [u8]);

    /// Appends `len` bytes of a slab, from `offset` on, to `out`.
    ///
    /// # Panics
    ///
    /// When `offset + len` exceeds the slab, or the slab is another fabric's: a bug of ours.
    fn append_slab(&self, slab: &RecvSlab, offset: usize, len: usize, out: &mut Vec<u8>);

    /// Lends out `len` bytes of a slab, from `offset` on, as they lie there, without a copy where the memory allows it.
    /// When the last clone of the bytes is dropped, on whatever thread, `home` gets the slab back; it must not block.
    /// The memory lives as long as the bytes do, also beyond the fabric.
    ///
    /// # Panics
    ///
    /// As [`Fabric::append_slab`].
    fn lend_slab(
        &self,
        slab: RecvSlab,
        offset: usize,
        len: usize,
        home: impl FnOnce(RecvSlab) + Send + 'static,
    ) -> Bytes;

    /// Posts receives to the SRQ in chains of [`POST_BATCH`]; what was posted leaves `slabs`, front first.
    ///
    /// # Errors
    ///
    /// The device refused one; that one and those behind it are still in `slabs`.
    fn post_receives(&self, slabs: &mut Vec<RecvSlab>) -> Result<(), PostError>;

    /// Asks for one [`AsyncEvent::SrqLimitReached`] when fewer than `receives` are posted.
    ///
    /// # Errors
    ///
    /// The device's.
    fn arm_srq_limit(&self, receives: u32) -> Result<(), FabricError>;

    /// Makes a QP in INIT, on this fabric's CQ and SRQ, local write only, no automatic signaling. One attempt with
    /// these very caps; the QP says what was granted.
    ///
    /// # Errors
    ///
    /// See [`CreateQpError`].
    fn create_qp(&self, caps: QpCaps) -> Result<Self::Qp, CreateQpError>;

    /// Appends up to [`POLL_BATCH`] completions to `into` and says how many.
    ///
    /// # Errors
    ///
    /// The CQ is broken.
    fn poll(&self, into: &mut Vec<Wc>) -> Result<usize, FabricError>;

    /// Asks for one wake-up at the next completion. Completions that are there already raise none: poll after arming.
    ///
    /// # Errors
    ///
    /// The CQ is broken.
    fn arm(&self) -> Result<(), FabricError>;

    /// Ready when an armed wake-up has come; takes and acknowledges the channel's events.
    fn poll_wake(&self, cx: &mut Context<'_>) -> Poll<Result<(), FabricError>>;

    /// The next async event, acknowledged.
    fn poll_async_event(&self, cx: &mut Context<'_>) -> Poll<Result<AsyncEvent, FabricError>>;
}

/// One RC QP. Dropping it destroys it; its slabs are the caller's business before that.
pub trait FabricQp: Send + Sync + Sized + 'static {
    /// Its number.
    fn qpn(&self) -> Qpn;

    /// What was granted.
    fn caps(&self) -> QpCaps;

    /// INIT to RTR to RTS. May take a second (neighbour resolution); never blocks the thread that polls it.
    fn connect(qp: Arc<Self>, path: QpPath) -> impl Future<Output = Result<(), ConnectQpError>> + Send;

    /// Posts SENDs in order, at most [`POST_BATCH`], as one chain. Only after [`FabricQp::connect`].
    ///
    /// # Errors
    ///
    /// The device refused one: those before it are live.
    fn post(&self, wrs: &[SendWr<'_>]) -> Result<(), PostError>;

    /// To ERR: everything outstanding is flushed into the CQ.
    ///
    /// # Errors
    ///
    /// The device's.
    fn to_error(&self) -> Result<(), FabricError>;

    /// Whether the device has the QP in a state in which sends flow. Costs a system call.
    ///
    /// # Errors
    ///
    /// The device's.
    fn is_rts(&self) -> Result<bool, FabricError>;
}

/// `4.096 µs × 2^code`, the verbs' scale of ACK timeouts; code 0 is "no timeout" and gives `None`.
pub fn ack_timeout(code: u8) -> Option<Duration> {
    (code != 0).then(|| Duration::from_nanos(4_096u64 << code.min(31)))
}
