//! Completion queues and the channel that wakes for them.

use std::{
    ffi::{c_int, c_uint},
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    ptr::{self, NonNull},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use ibverbs_sys as ffi;

use super::{check, context::Context, log_failed_destroy, missing_call};
use crate::fabric::POLL_BATCH;

/// The fd that completion events come by; non-blocking.
pub(crate) struct Channel {
    raw: NonNull<ffi::ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: a channel is an fd and a count that libibverbs guards; neither is bound to a thread.
unsafe impl Send for Channel {}
// SAFETY: as above; ibv_get_cq_event is a read(2) of that fd.
unsafe impl Sync for Channel {}

impl Channel {
    /// Makes one and sets its fd non-blocking.
    ///
    /// # Errors
    ///
    /// The device's, `EMFILE` at the fd limit.
    pub(super) fn new(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: the context is live, and the `Arc` kept below keeps it so until the channel is gone.
        let raw = unsafe { ffi::ibv_create_comp_channel(context.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        let channel = Self { raw, context: Arc::clone(context) };
        rustix::fs::fcntl_setfl(channel.fd(), rustix::fs::OFlags::NONBLOCK)?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `raw` is live until `Drop`; the field is constant.
        let fd = unsafe { (*self.raw.as_ptr()).fd };
        // SAFETY: the channel owns the fd and closes it in ibv_destroy_comp_channel, which `Drop` calls, so it stays
        // open for the borrow of `self`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.fd().as_raw_fd()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: `raw` came from ibv_create_comp_channel and is destroyed here once; the CQ on it holds an `Arc` of
        // `self` and is gone.
        let rc = unsafe { ffi::ibv_destroy_comp_channel(self.raw.as_ptr()) };
        log_failed_destroy("ibv_destroy_comp_channel", rc);
    }
}

/// A completion queue, alone on its channel.
pub(crate) struct Cq {
    raw: NonNull<ffi::ibv_cq>,
    poll: PollFn,
    notify: NotifyFn,
    depth: u32,
    /// Where the provider writes completions. Kept, and zeroed once: zeroing it for each poll would cost a poll that finds
    /// nothing more than all else.
    chunk: Mutex<[MaybeUninit<ffi::ibv_wc>; CHUNK]>,
    /// Events that were taken from the channel and not yet acknowledged.
    unacked: AtomicU32,
    /// Events that may be in the channel. Were it too low, one would be left for the next look, which its edge has asked for.
    due: AtomicU32,
    channel: Arc<Channel>,
}

// SAFETY: ibv_poll_cq, ibv_req_notify_cq and the event calls are thread-safe (the provider locks the CQ), and a CQ is
// not bound to the thread that made it.
unsafe impl Send for Cq {}
// SAFETY: as above; `unacked` and `due` are atomic.
unsafe impl Sync for Cq {}

impl Cq {
    /// Makes a CQ that holds at least `depth` completions, with its interrupts on completion vector `vector`.
    ///
    /// # Errors
    ///
    /// The device's: `EINVAL` above its limit or for a vector that it does not have, `ENOMEM`.
    pub(super) fn new(channel: Arc<Channel>, depth: u32, vector: u32) -> io::Result<Self> {
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let cqe = c_int::try_from(depth).map_err(invalid)?;
        let vector = c_int::try_from(vector).map_err(invalid)?;
        let ops = channel.context.ops();
        let poll = ops.poll_cq.ok_or_else(|| missing_call("poll_cq"))?;
        let notify = ops.req_notify_cq.ok_or_else(|| missing_call("req_notify_cq"))?;
        // SAFETY: context and channel are live, and the `Arc` kept below keeps both so until the CQ is gone. The CQ's
        // own context pointer is null and never followed.
        let raw =
            unsafe { ffi::ibv_create_cq(channel.context.as_ptr(), cqe, ptr::null_mut(), channel.raw.as_ptr(), vector) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: `raw` is the live CQ just made; `cqe` changes only by a resize, which nothing here does.
        let granted = unsafe { (*raw.as_ptr()).cqe };
        let depth = u32::try_from(granted).unwrap_or(depth);
        let chunk = Mutex::new([const { MaybeUninit::zeroed() }; CHUNK]);
        Ok(Self { raw, poll, notify, depth, chunk, unacked: AtomicU32::new(0), due: AtomicU32::new(0), channel })
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }

    /// Completions that it holds.
    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    /// Takes up to [`POLL_BATCH`] completions and gives each to `each`; says how many.
    ///
    /// # Errors
    ///
    /// The CQ is broken.
    pub(super) fn poll(&self, mut each: impl FnMut(&ffi::ibv_wc)) -> io::Result<usize> {
        let room = c_int::try_from(CHUNK).unwrap_or(c_int::MAX);
        let mut chunk = self.chunk.lock().unwrap_or_else(PoisonError::into_inner);
        let mut total = 0;
        while total + CHUNK <= POLL_BATCH {
            // SAFETY: the CQ is live until `Drop` and `poll` is its provider's ibv_poll_cq. It writes at most `room`
            // entries to the front of `chunk`, which has that many.
            let found = unsafe { (self.poll)(self.raw.as_ptr(), room, chunk.as_mut_ptr().cast()) };
            let Ok(found) = usize::try_from(found) else {
                return Err(io::Error::from_raw_os_error(found.saturating_neg()));
            };
            for wc in chunk.iter().take(found) {
                // SAFETY: zeroed when the CQ was made, which is a valid value of its integers, and written only by the
                // provider since. A field that it leaves alone is a number like any other.
                each(unsafe { wc.assume_init_ref() });
            }
            total += found;
            if found < CHUNK {
                break;
            }
        }
        Ok(total)
    }

    /// Asks for one event at the next completion.
    ///
    /// # Errors
    ///
    /// The device's.
    pub(super) fn arm(&self) -> io::Result<()> {
        let any_completion = 0; // 1 would leave out failed sends on Soft-RoCE
        // Before the call: the event may be there when it returns.
        self.due.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the CQ is live until `Drop`, and `notify` is its provider's ibv_req_notify_cq.
        check(unsafe { (self.notify)(self.raw.as_ptr(), any_completion) })
    }

    /// Takes every event that waits in the channel and says how many. There are no more than were asked for, so once all of
    /// those are taken, none is looked for: each look is a system call. Acknowledges them in groups of 16, since each
    /// acknowledgement takes a mutex; `Drop` does the rest.
    ///
    /// # Errors
    ///
    /// The channel is broken.
    pub(super) fn take_events(&self) -> io::Result<u32> {
        let mut taken = 0;
        loop {
            let mut cq = ptr::null_mut();
            let mut cq_context = ptr::null_mut();
            // SAFETY: the channel is live (we hold its `Arc`), its fd does not block, and both targets are written
            // only during the call.
            let rc = unsafe { ffi::ibv_get_cq_event(self.channel.raw.as_ptr(), &raw mut cq, &raw mut cq_context) };
            if rc != 0 {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::WouldBlock => {
                        // Of several arming calls one event may come at most.
                        self.due.fetch_min(1, Ordering::Relaxed);
                        return Ok(taken);
                    }
                    io::ErrorKind::Interrupted => continue,
                    _ => return Err(error),
                }
            }
            debug_assert_eq!(cq, self.raw.as_ptr(), "one CQ on a channel");
            taken += 1;
            if self.unacked.fetch_add(1, Ordering::Relaxed) + 1 >= ACK_GROUP {
                self.acknowledge();
            }
            let due = self.due.load(Ordering::Relaxed).saturating_sub(1);
            self.due.store(due, Ordering::Relaxed);
            if due == 0 {
                return Ok(taken);
            }
        }
    }

    fn acknowledge(&self) {
        let events = self.unacked.swap(0, Ordering::Relaxed);
        if events > 0 {
            // SAFETY: the CQ is live, and these events were taken from its channel and acknowledged by no one else:
            // the swap gave them to this call alone.
            unsafe { ffi::ibv_ack_cq_events(self.raw.as_ptr(), c_uint::from(events)) };
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // ibv_destroy_cq waits until every event that was taken is acknowledged; events still in the channel are
        // dropped by the kernel and not waited for.
        self.acknowledge();
        // SAFETY: `raw` came from ibv_create_cq and is destroyed here once. The QPs on it hold an `Arc` of `self` and
        // are gone.
        log_failed_destroy("ibv_destroy_cq", unsafe { ffi::ibv_destroy_cq(self.raw.as_ptr()) });
    }
}

/// Completions taken by one call: few enough that clearing their room costs nothing beside an empty poll.
const CHUNK: usize = 16;
const _: () = assert!(POLL_BATCH % CHUNK == 0, "a poll is whole chunks");

/// Events acknowledged at a time.
const ACK_GROUP: u32 = 16;

type PollFn = unsafe extern "C" fn(*mut ffi::ibv_cq, c_int, *mut ffi::ibv_wc) -> c_int;
type NotifyFn = unsafe extern "C" fn(*mut ffi::ibv_cq, c_int) -> c_int;
