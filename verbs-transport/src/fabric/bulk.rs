//! The seam for bulk memory: one port more on an opened device, with RC QPs of its own for RDMA READ and WRITE.
//!
//! A [`BulkPort`] shares the device and the protection domain with the [`Fabric`] that it came from, and nothing
//! else: its CQ, channel and QPs are its own, so that bulk operations neither stand before frames nor take them down.
//! `verbs` implements it over a device, `sim` in memory.
//!
//! Memory is registered by an owner ([`MemoryOwner`]) that keeps it in place; a [`BulkRegion`] holds the owner. Work
//! requests borrow a region for the post alone, so whoever posts keeps the region until the [`BulkWc`]: the in-flight
//! table of the caller. Should it be dropped earlier all the same, its deregistration takes the device's right away
//! before the memory can go, and the work request fails.

use std::{fmt, future::Future, io, ops::Range, sync::Arc, task::Context, task::Poll};

use verbs_bootstrap::{Qpn, RdAtomic};

pub use super::window::{AllocWindowError, BulkWindow, DestroyQpError, WindowPolicy, WindowSupport};
use super::{ConnectQpError, CreateQpError, Fabric, FabricError, PostError, QpPath, WcStatus};
pub use crate::verbs::{Arena, MemoryOwner, OutOfBounds, OwnedBytes, Span};

/// Ids of work requests are below this: the highest bit is the port's own.
pub const BULK_ID_END: u64 = 1 << 63;

/// What crosses the wire and lets a peer into a region. The key of the own device (`lkey`) is another thing and never
/// leaves the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rkey(pub u32);

impl fmt::Debug for Rkey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rkey {:#010x}", self.0)
    }
}

/// Who may do what with a region beside reading it as a local source. Least authority: each use has its own constant,
/// and no use of this library needs remote atomics.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Access(u8);

impl Access {
    /// The device may read it to send it: the local side of a PUT. No key for peers.
    pub const LOCAL_READ: Self = Self(0);
    /// The device may write it: the local side of a GET. No key for peers.
    pub const DESTINATION: Self = Self(1);
    /// Peers may READ it.
    pub const SOURCE: Self = Self(2);
    /// Peers may WRITE it. Verbs demand local write with it.
    pub const PUT_TARGET: Self = Self(1 | 4);
    /// Memory windows may be bound to it; peers reach it by their keys. No key of its own. A window for WRITEs needs
    /// [`Access::DESTINATION`] with it.
    pub const WINDOWS: Self = Self(8);

    /// Both of them.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The own device may write.
    pub const fn local_write(self) -> bool {
        self.0 & 1 != 0
    }

    /// Peers may READ.
    pub const fn remote_read(self) -> bool {
        self.0 & 2 != 0
    }

    /// Peers may WRITE.
    pub const fn remote_write(self) -> bool {
        self.0 & 4 != 0
    }

    /// Windows may be bound.
    pub const fn windows(self) -> bool {
        self.0 & 8 != 0
    }

    /// Peers may do anything by the region's own key, so that there is an [`Rkey`].
    pub const fn is_remote(self) -> bool {
        self.remote_read() || self.remote_write()
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.local_write(), "local write"),
            (self.remote_read(), "remote read"),
            (self.remote_write(), "remote write"),
            (self.windows(), "windows"),
        ];
        let mut first = true;
        for (_, name) in names.into_iter().filter(|(has, _)| *has) {
            if !std::mem::take(&mut first) {
                f.write_str(" + ")?;
            }
            f.write_str(name)?;
        }
        if first { f.write_str("local read") } else { Ok(()) }
    }
}

/// What the device allows for bulk memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BulkLimits {
    /// Bytes of the largest region.
    pub region_bytes: u64,
    /// Most regions of the device.
    pub regions: u32,
    /// The port's longest READ or WRITE, in bytes.
    pub message_bytes: u64,
    /// READs at once.
    pub rd_atomic: RdAtomic,
    /// Most WRs in a send queue.
    pub qp_wrs: u32,
    /// Completions that this port's CQ holds.
    pub cq_depth: u32,
    /// Bytes that this process may lock (`RLIMIT_MEMLOCK`), unless it is privileged; `None`: no limit.
    pub locked_bytes: Option<u64>,
    /// Whether there are memory windows, and why not. Without them a right that ends by itself takes a registration.
    pub windows: WindowSupport,
}

/// What a bulk QP is asked for, and what it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BulkCaps {
    /// Send WRs.
    pub send_wrs: u32,
    /// Receive WRs: each takes one WRITE or SEND with immediate data, and no bytes.
    pub recv_wrs: u32,
}

/// One work request.
#[derive(Debug)]
pub struct BulkWr<'a, R: BulkRegion> {
    /// Comes back in the [`BulkWc`]; below [`BULK_ID_END`]. A number that the caller can check, never a pointer.
    pub id: u64,
    /// Ask for a completion on success. A failed WR completes in any case.
    pub signaled: bool,
    /// Not before the READs posted earlier on this QP are complete (`IBV_SEND_FENCE`). Without it a SEND may reach the
    /// peer while they still read its memory.
    pub fence: bool,
    /// What to do.
    pub op: BulkOp<'a, R>,
}

/// What a work request does.
#[derive(Debug)]
pub enum BulkOp<'a, R: BulkRegion> {
    /// RDMA READ: the peer's bytes into `local`, which needs [`Access::DESTINATION`].
    Read {
        /// Where the bytes go.
        local: Local<'a, R>,
        /// Where they come from.
        remote: Remote,
    },
    /// RDMA WRITE: bytes of `local` into the peer's memory. The peer hears nothing of it.
    Write {
        /// Where the bytes come from.
        local: Local<'a, R>,
        /// Where they go.
        remote: Remote,
    },
    /// The same, and the peer gets a completion with `imm` when they are placed. Takes one of its receives.
    WriteImm {
        /// Where the bytes come from.
        local: Local<'a, R>,
        /// Where they go.
        remote: Remote,
        /// For the peer's completion.
        imm: u32,
    },
    /// No bytes, only a completion with `imm` at the peer, behind everything posted before. Takes one of its receives.
    SendImm {
        /// For the peer's completion.
        imm: u32,
    },
    /// No bytes: ends the peer's window of that key, which is bound on its half of this QP, and gives it a completion
    /// that says so. Takes one of its receives. A key that is not bound there takes down the peer's half.
    SendInvalidate {
        /// As the peer gave it.
        rkey: Rkey,
    },
    /// Gives the peer of this QP, and nobody else, a right to `range` of `region`, by a new key: the window's
    /// [`rkey`](BulkWindow::rkey) once the completion is polled. Must be signaled, with an id that no other bind or
    /// invalidation on this QP has now; the region needs [`Access::WINDOWS`]; the window must not be bound.
    Bind {
        /// Of this port.
        window: &'a R::Window,
        /// Of this port.
        region: &'a R,
        /// From the region's start. Not empty.
        range: Range<usize>,
        /// What the peer may do: [`Access::SOURCE`], [`Access::PUT_TARGET`] or both.
        access: Access,
    },
    /// Ends a window of ours that is bound on this QP: when the completion is polled, its key opens nothing. Must be
    /// signaled, as a bind. One that is not bound on it any more takes down the QP, so only one may invalidate it.
    LocalInvalidate {
        /// The window's.
        rkey: Rkey,
    },
}

impl<R: BulkRegion> BulkOp<'_, R> {
    /// Changes windows of this side.
    pub(crate) const fn is_local(&self) -> bool {
        matches!(self, Self::Bind { .. } | Self::LocalInvalidate { .. })
    }
}

/// A part of a region of ours. May be empty.
#[derive(Debug)]
pub struct Local<'a, R: BulkRegion> {
    /// The region.
    pub region: &'a R,
    /// From its start.
    pub offset: usize,
    /// Bytes.
    pub len: u32,
}

/// Where in a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address in the peer's process.
    pub addr: u64,
    /// The right to it.
    pub rkey: Rkey,
}

/// One completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkWc {
    /// A signaled WR is done, and with it every WR before it on that QP.
    Done {
        /// The QP.
        qpn: u32,
        /// The WR's id.
        id: u64,
    },
    /// A WR failed or was flushed. Those before it on that QP that have not failed by themselves are done.
    Failed {
        /// The QP.
        qpn: u32,
        /// The WR's id.
        id: u64,
        /// Why. Which status a cause gives differs from device to device: nothing may depend on one.
        status: WcStatus,
        /// The vendor's own code, for its support line.
        vendor_err: u32,
    },
    /// A peer's [`BulkOp::WriteImm`], [`BulkOp::SendImm`] or [`BulkOp::SendInvalidate`] arrived; its bytes and those of
    /// all WRs before it are placed.
    Notified {
        /// The receiving QP.
        qpn: u32,
        /// As the peer gave it; 0 with an invalidated key.
        imm: u32,
        /// Bytes that came with it.
        bytes: u32,
        /// The key of the window of ours that it ended.
        invalidated: Option<Rkey>,
    },
    /// A receive failed or was flushed: the QP is in ERR.
    NotifyFailed {
        /// The QP.
        qpn: u32,
        /// Why.
        status: WcStatus,
    },
}

/// No bulk port could be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenBulkError {
    /// A deeper CQ than the device has.
    #[error("a bulk CQ of {asked} completions, but the device's hold 1 to {limit}: configure less")]
    CqTooLarge {
        /// As asked.
        asked: u32,
        /// `max_cqe`.
        limit: u32,
    },
    /// The device does no READs, at least not in one of the directions.
    #[error(
        "the device does {} RDMA READs at once as initiator and {} as responder: no bulk memory on it", .0.initiator,
        .0.responder
    )]
    NoReads(RdAtomic),
    /// A call failed.
    #[error("{what} failed: {source}")]
    Device {
        /// Which call.
        what: &'static str,
        /// The device's errno.
        source: io::Error,
    },
}

/// Memory could not be registered. The memory is untouched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterRegionError {
    /// The range is empty, or not within the owner's memory.
    #[error("bytes {start}..{end} of memory of {len} bytes: a region must have a byte at least and lie within it")]
    Range {
        /// First byte.
        start: usize,
        /// Behind the last.
        end: usize,
        /// What the owner has.
        len: usize,
    },
    /// The owner is [read-only](MemoryOwner::is_read_only).
    #[error("read-only memory of {bytes} bytes cannot be registered for {access:?}")]
    ReadOnly {
        /// As asked.
        bytes: usize,
        /// As asked.
        access: Access,
    },
    /// More than one registration of this device takes.
    #[error("a region of {bytes} bytes, but the device registers at most {limit} at once: map it in parts")]
    TooLarge {
        /// As asked.
        bytes: u64,
        /// `max_mr_size`.
        limit: u64,
    },
    /// The locked-memory limit: raise it or map less.
    #[error(
        "a region of {need_bytes} bytes cannot be locked: RLIMIT_MEMLOCK is {have_bytes} bytes and {pinned_bytes} are \
         pinned already ({source}); raise it (`ulimit -l`, LimitMEMLOCK= of systemd, memlock in \
         /etc/security/limits.conf) or map less"
    )]
    MemlockTooSmall {
        /// Bytes of the region.
        need_bytes: u64,
        /// The limit.
        have_bytes: u64,
        /// What this process has pinned before.
        pinned_bytes: u64,
        /// The system's errno.
        source: io::Error,
    },
    /// The device refused: out of registrations, or memory that cannot be registered (a read-only file mapping, say).
    #[error("ibv_reg_mr of {bytes} bytes for {access:?} failed: {source}")]
    Device {
        /// As asked.
        bytes: usize,
        /// As asked.
        access: Access,
        /// The device's errno.
        source: io::Error,
    },
}

/// A fabric whose device can also move bulk memory.
pub trait BulkFabric: Fabric {
    /// Its bulk ports.
    type Bulk: BulkPort;

    /// A bulk port on the same device, port and GID, with a CQ of `cq_depth` completions of its own.
    ///
    /// # Errors
    ///
    /// See [`OpenBulkError`].
    fn open_bulk(&self, cq_depth: u32) -> Result<Self::Bulk, OpenBulkError>;
}

/// One bulk port: a CQ with its channel, and what is made from it. Keeps the device open.
pub trait BulkPort: Send + Sync + Sized + 'static {
    /// Its QPs.
    type Qp: BulkQp<Region = Self::Region>;
    /// Its regions.
    type Region: BulkRegion;

    /// What the device allows.
    fn limits(&self) -> BulkLimits;

    /// Registers `range` of `memory` (offsets from the owner's start). Blocks while pages are pinned, about 40 µs each
    /// on a slow machine: not for a thread that must not wait.
    ///
    /// # Errors
    ///
    /// See [`RegisterRegionError`].
    fn register(
        &self,
        memory: Arc<dyn MemoryOwner>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Self::Region, RegisterRegionError>;

    /// Makes a memory window, not bound to anything. Blocks for as long as the device needs, some tens of microseconds.
    ///
    /// # Errors
    ///
    /// See [`AllocWindowError`].
    fn alloc_window(&self) -> Result<<Self::Region as BulkRegion>::Window, AllocWindowError>;

    /// Makes a QP in INIT on this port's CQ, with a receive queue of its own, that peers may READ from and WRITE to by
    /// key. One attempt with these very caps; the QP says what was granted.
    ///
    /// # Errors
    ///
    /// See [`CreateQpError`]; its caps are the send side's.
    fn create_qp(&self, caps: BulkCaps) -> Result<Self::Qp, CreateQpError>;

    /// Appends up to [`POLL_BATCH`](super::POLL_BATCH) completions to `into` and says how many.
    ///
    /// # Errors
    ///
    /// The CQ is broken.
    fn poll(&self, into: &mut Vec<BulkWc>) -> Result<usize, FabricError>;

    /// Asks for one wake-up at the next completion. Completions that are there already raise none: poll after arming.
    ///
    /// # Errors
    ///
    /// The CQ is broken.
    fn arm(&self) -> Result<(), FabricError>;

    /// Ready when an armed wake-up has come; takes and acknowledges the channel's events. For one waiting task.
    fn poll_wake(&self, cx: &mut Context<'_>) -> Poll<Result<(), FabricError>>;
}

/// One bulk QP. Dropping it destroys it; [`BulkQp::destroy`] says whether that worked.
pub trait BulkQp: Send + Sync + Sized + 'static {
    /// The regions that its work requests may name: those of its port.
    type Region: BulkRegion;

    /// Its number.
    fn qpn(&self) -> Qpn;

    /// What was granted.
    fn caps(&self) -> BulkCaps;

    /// INIT to RTR to RTS with `path.rd_atomic`, which both sides have agreed on. May take a second (neighbour
    /// resolution); never blocks the thread that polls it.
    ///
    /// # Errors
    ///
    /// See [`ConnectQpError`]; [`ConnectQpError::NoReads`] when either number of `path.rd_atomic` is 0, since a READ on
    /// such a QP never ends.
    fn connect(qp: Arc<Self>, path: QpPath) -> impl Future<Output = Result<(), ConnectQpError>> + Send;

    /// Posts work requests in order, at most [`POST_BATCH`](super::POST_BATCH), as one chain. Only after
    /// [`BulkQp::connect`].
    ///
    /// # Errors
    ///
    /// `InvalidInput` and nothing posted for a range outside its region, a region or window of another port, an id from
    /// [`BULK_ID_END`] on, or a bind or invalidation that is not as [`BulkOp`] says; else the device refused one: those
    /// before it are live.
    fn post(&self, wrs: &[BulkWr<'_, Self::Region>]) -> Result<(), PostError>;

    /// Posts `receives` receives, each for one immediate, without memory. Allowed from INIT on.
    ///
    /// # Errors
    ///
    /// The device refused one: those before it are live.
    fn post_receives(&self, receives: u32) -> Result<(), PostError>;

    /// To ERR: everything outstanding is flushed into the CQ.
    ///
    /// # Errors
    ///
    /// The device's.
    fn to_error(&self) -> Result<(), FabricError>;

    /// Whether the device has the QP in a state in which work requests flow. Costs a system call.
    ///
    /// # Errors
    ///
    /// The device's.
    fn is_rts(&self) -> Result<bool, FabricError>;

    /// Destroys the QP: from then on the device touches no memory for it.
    ///
    /// # Errors
    ///
    /// The QP as it was, and why: see [`DestroyQpError`].
    fn destroy(qp: Arc<Self>) -> Result<(), (Arc<Self>, DestroyQpError)>;
}

/// Registered memory. Holds its owner. Dropping it deregisters it, once no window is bound to it; should that fail, the
/// owner is leaked and the fault logged, for the device could still reach the memory.
pub trait BulkRegion: Send + Sync + fmt::Debug + Sized + 'static {
    /// Windows that can be bound to it: those of its port.
    type Window: BulkWindow;

    /// The memory that is registered.
    fn span(&self) -> &Span;

    /// Address of the first byte, as peers name it in their [`Remote`].
    fn addr(&self) -> u64 {
        self.span().addr()
    }

    /// Bytes.
    fn len(&self) -> usize {
        self.span().len()
    }

    /// Never: regions have a byte at least.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As it was asked for.
    fn access(&self) -> Access;

    /// The key for peers, when the access is remote.
    fn rkey(&self) -> Option<Rkey>;

    /// Copies bytes out, from `offset` on. What a device writes meanwhile may or may not be among them.
    ///
    /// # Errors
    ///
    /// They reach beyond the region; nothing was copied.
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), OutOfBounds> {
        self.span().read(offset, out)
    }

    /// Copies bytes in, from `offset` on. What a device reads meanwhile may be old or new.
    ///
    /// # Errors
    ///
    /// They reach beyond the region; nothing was copied.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.span().write(offset, bytes)
    }

    /// Deregisters it. A peer's READ or WRITE that comes later fails; one that is under way fails, too.
    ///
    /// # Errors
    ///
    /// The region, still registered, and why: `ResourceBusy` while windows are bound to it, else the device's errno. Its
    /// memory must stay.
    fn deregister(self) -> Result<(), (Self, io::Error)>;
}
