//! Memory windows of type 2: the device's, and the book that says which is bound where.

use std::{
    fmt, io,
    ops::Range,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ibverbs_sys as ffi;

use super::{
    check, missing_call,
    pd::Pd,
    qp::{Qp, QpHandle, Rts},
    region::{DeviceRegion, Mr},
};
use crate::fabric::{
    PostError,
    bulk::{Access, BulkOp, BulkRegion, BulkWc, BulkWindow, BulkWr, Rkey},
    window_book::{WindowBook, WindowId},
};

/// What a bound window keeps: neither may go before it.
type Hold = (Arc<QpHandle>, Arc<Mr>);

/// The windows of one port.
pub(super) struct Windows {
    book: WindowBook<Hold>,
}

/// A window of a [`DeviceBulkPort`](super::DeviceBulkPort). After 255 binds the device's window under it is replaced, so
/// that no key of it comes twice.
pub struct DeviceWindow {
    id: WindowId,
    mw: Mutex<Mw>,
    windows: Arc<Windows>,
    pd: Arc<Pd>,
}

/// The device's window.
struct Mw {
    /// `None`: it would not be freed, and is left to the process.
    raw: Option<NonNull<ffi::ibv_mw>>,
    /// The key that the bind under way gives it.
    next_key: u32,
}

// SAFETY: a window is a handle that is not bound to a thread; its one changing field, `rkey`, is written by `Windows::bind`
// under the lock around `Mw`, while the book has the window as free, so that no post can be reading it.
unsafe impl Send for Mw {}

impl Windows {
    pub(super) fn new() -> Self {
        Self { book: WindowBook::new() }
    }

    pub(super) fn on_wc(&self, wc: &BulkWc) {
        self.book.on_wc(wc);
    }

    /// Windows that may be bound on a QP.
    pub(super) fn bound_on(&self, qpn: u32) -> usize {
        self.book.bound_on(qpn)
    }

    /// Posts work requests among which are binds or invalidations.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_bulk`].
    pub(super) fn post(self: &Arc<Self>, qp: &Qp<Rts>, wrs: &[BulkWr<'_, DeviceRegion>]) -> Result<(), PostError> {
        let qpn = qp.handle().qpn().get();
        let undo = |wrs: &[BulkWr<'_, DeviceRegion>]| {
            wrs.iter().filter(|wr| wr.op.is_local()).for_each(|wr| self.book.undo((qpn, wr.id)));
        };
        for (position, wr) in wrs.iter().enumerate() {
            if let Err(source) = self.reserve(qp, qpn, wr) {
                undo(&wrs[..position]);
                return Err(PostError { posted: 0, asked: wrs.len(), source });
            }
        }
        qp.post_bulk(wrs).inspect_err(|error| undo(&wrs[error.posted.min(wrs.len())..]))
    }

    fn reserve(self: &Arc<Self>, qp: &Qp<Rts>, qpn: u32, wr: &BulkWr<'_, DeviceRegion>) -> io::Result<()> {
        match &wr.op {
            BulkOp::Bind { .. } | BulkOp::LocalInvalidate { .. } if !wr.signaled => {
                Err(invalid("a bind or invalidation of a window must be signaled"))
            }
            BulkOp::Bind { window, region, .. } => {
                let hold = (Arc::clone(qp.handle()), Arc::clone(region.mr()));
                if !Arc::ptr_eq(self, &window.windows) {
                    return Err(invalid("a window of another port"));
                }
                window.reserve((qpn, wr.id), hold)
            }
            BulkOp::LocalInvalidate { rkey } => {
                self.book.invalidate(rkey.0, (qpn, wr.id));
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl DeviceWindow {
    /// Allocates one.
    ///
    /// # Errors
    ///
    /// The device's.
    pub(super) fn new(pd: &Arc<Pd>, windows: &Arc<Windows>) -> io::Result<Self> {
        let (mw, key) = Mw::new(pd)?;
        let id = windows.book.add(key);
        Ok(Self { id, mw: Mutex::new(mw), windows: Arc::clone(windows), pd: Arc::clone(pd) })
    }

    /// Makes ready for a bind that is posted next.
    fn reserve(&self, wr: (u32, u64), hold: Hold) -> io::Result<()> {
        let mut mw = self.mw();
        if self.windows.book.is_spent(self.id) {
            // The new one first, so that the two are not the same.
            let (new, key) = Mw::new(&self.pd)?;
            let mut old = std::mem::replace(&mut *mw, new);
            self.windows.book.renew(self.id, key);
            if let Err(error) = old.free() {
                // Not bound, so nothing is at stake but the device's room.
                tracing::error!(%error, "ibv_dealloc_mw of a spent window failed; it stays with the process");
            }
        }
        let raw = mw.raw.ok_or_else(|| invalid("a window that could not be freed"))?;
        let keys = self.windows.book.bind(self.id, wr, hold);
        let keys =
            keys.ok_or_else(|| invalid("a window that is bound, or an id that another bind or invalidation has"))?;
        mw.next_key = keys.next;
        // SAFETY: `raw` is live until `free`, which needs the lock that is held here. Providers read the field while a
        // bind of this window is posted; none is, for the book had it as free, and gives it to this caller alone.
        unsafe { (*raw.as_ptr()).rkey = keys.now };
        Ok(())
    }

    /// What a bind names, once it is reserved; `None` for a QP of another PD.
    pub(super) fn binding(&self, pd: &Arc<Pd>) -> Option<(*mut ffi::ibv_mw, u32)> {
        let mw = self.mw();
        let raw = mw.raw?;
        Arc::ptr_eq(&self.pd, pd).then_some((raw.as_ptr(), mw.next_key))
    }

    fn mw(&self) -> MutexGuard<'_, Mw> {
        self.mw.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mw {
    /// With its first key.
    fn new(pd: &Pd) -> io::Result<(Self, u32)> {
        let alloc = pd.context().ops().alloc_mw.ok_or_else(|| missing_call("alloc_mw"))?;
        // SAFETY: the PD is live, and every owner of an `Mw` keeps an `Arc` of it; `alloc` is its provider's own.
        let raw = unsafe { alloc(pd.as_ptr(), ffi::IBV_MW_TYPE_2) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: `raw` is the live window just made, known to nobody else.
        let key = unsafe { (*raw.as_ptr()).rkey };
        Ok((Self { raw: Some(raw), next_key: key }, key))
    }

    /// Frees it; bound or not (`ibv_dealloc_mw(3)`).
    fn free(&mut self) -> io::Result<()> {
        let Some(raw) = self.raw else { return Ok(()) };
        // SAFETY: `raw` is live: it came from `alloc_mw`, and is forgotten below when this succeeds.
        let context = unsafe { (*raw.as_ptr()).context };
        // SAFETY: a window's context is that of its PD, which is live as long as the window is; the provider fills `ops`
        // once, during the open.
        let dealloc = unsafe { (*context).ops.dealloc_mw }.ok_or_else(|| missing_call("dealloc_mw"))?;
        // SAFETY: as above, and no post is reading it: a post borrows the `DeviceWindow`, whose owner calls this.
        check(unsafe { dealloc(raw.as_ptr()) })?;
        self.raw = None;
        Ok(())
    }
}

impl BulkWindow for DeviceWindow {
    fn rkey(&self) -> Option<Rkey> {
        self.windows.book.key(self.id).map(Rkey)
    }

    fn is_bound(&self) -> bool {
        self.windows.book.is_held(self.id)
    }

    fn free(self) -> Result<(), (Self, io::Error)> {
        let freed = self.mw().free();
        freed.map_err(|error| (self, error))
    }
}

impl Drop for DeviceWindow {
    fn drop(&mut self) {
        let mw = self.mw.get_mut().unwrap_or_else(PoisonError::into_inner);
        let freed = mw.free();
        let hold = self.windows.book.remove(self.id);
        if let Err(error) = freed {
            tracing::error!(%error, "ibv_dealloc_mw failed; the window stays, and what it is bound to");
            std::mem::forget(hold);
        }
    }
}

impl fmt::Debug for DeviceWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceWindow, {:?}", self.rkey())
    }
}

/// The parts of a bind that a provider need not check, but [`BulkOp::Bind`] demands.
pub(super) fn bind_info(region: &DeviceRegion, range: &Range<usize>, access: Access) -> Option<ffi::ibv_mw_bind_info> {
    use ffi::ibv_access_flags as f;
    let length = range.end.checked_sub(range.start).filter(|length| *length > 0)?;
    let fits = range.end <= region.len() && region.access().windows();
    let rights = access.is_remote() && (!access.remote_write() || region.access().local_write());
    let mut flags = f(0);
    if access.remote_read() {
        flags |= f::IBV_ACCESS_REMOTE_READ;
    }
    if access.remote_write() {
        flags |= f::IBV_ACCESS_REMOTE_WRITE;
    }
    (fits && rights).then(|| ffi::ibv_mw_bind_info {
        mr: region.mr().as_ptr(),
        addr: region.addr() + range.start as u64,
        length: length as u64,
        mw_access_flags: flags.0,
    })
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}
