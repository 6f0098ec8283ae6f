//! Registered memory, cut into slabs of one size.

use std::{
    ffi::c_int,
    io,
    mem::ManuallyDrop,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use bytes::Bytes;
use ibverbs_sys as ffi;

use super::{
    check,
    memory::{Memory, PageKind},
    pd::Pd,
};
use crate::fabric::{RecvSlab, SendSlab};

/// Memory of this process that the device may read and, with local write, receive into: `slabs` slots of
/// `slab_bytes` each. The device may be writing, so bytes go in and out by bounds-checked raw copies. The one exception
/// is a receive slab that is lent to the application ([`lend`]): its token is held for as long as anyone can look.
///
/// Who may touch a slot is settled by the slab tokens of [`crate::fabric`]: there is one for each slot, it names this
/// pool, and posting a receive takes it until the completion.
pub(crate) struct SlabMr {
    raw: NonNull<ffi::ibv_mr>,
    /// No two pools of a process share it.
    pool: u32,
    memory: ManuallyDrop<Memory>,
    lkey: u32,
    slab_bytes: u32,
    /// Distance between two slabs.
    stride: usize,
    slabs: u32,
    _pd: Arc<Pd>,
}

// SAFETY: the memory is owned, not bound to a thread, and reached through raw copies alone; the MR is a handle that
// is constant after the registration.
unsafe impl Send for SlabMr {}
// SAFETY: a slot's bytes are written by who holds its one token mutably (`write`) or by the device while the token is
// posted, and read by who holds the token (`read`, `append`). `at` refuses tokens of other pools. So no two threads
// write to one slot at a time, nor does one read what another or the device writes.
unsafe impl Sync for SlabMr {}

impl SlabMr {
    /// Maps and registers `slabs` slots. With local write alone no peer can reach them by key.
    ///
    /// # Errors
    ///
    /// The kernel's or the device's: `ENOMEM` when the locked-memory limit or the memory is spent, `EPERM` when that
    /// limit is 0.
    pub(super) fn new(pd: &Arc<Pd>, slabs: u32, slab_bytes: u32, access: ffi::ibv_access_flags) -> io::Result<Self> {
        let (bytes, stride) =
            pool_bytes(slabs, slab_bytes).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let huge = Memory::huge(bytes).and_then(|memory| Self::register(pd, memory, access).ok());
        let (memory, raw) = match huge {
            Some(done) => done,
            None => Self::register(pd, Memory::ordinary(bytes)?, access)?,
        };
        // SAFETY: `raw` is the live MR that ibv_reg_mr just gave; the field is constant.
        let lkey = unsafe { (*raw.as_ptr()).lkey };
        let memory = ManuallyDrop::new(memory);
        let pool = NEXT_POOL.fetch_add(1, Ordering::Relaxed);
        Ok(Self { raw, pool, memory, lkey, slab_bytes, stride, slabs, _pd: Arc::clone(pd) })
    }

    fn register(pd: &Pd, memory: Memory, access: ffi::ibv_access_flags) -> io::Result<(Memory, NonNull<ffi::ibv_mr>)> {
        let access = c_int::try_from(access.0).unwrap_or(c_int::MAX);
        // SAFETY: the PD is live (and `new` keeps an `Arc` of it in the owner). `start..start + len` is a mapping of
        // ours that outlives the MR: `Drop` deregisters before it unmaps, and leaks the mapping when that fails.
        let raw = unsafe { ffi::ibv_reg_mr(pd.as_ptr(), memory.start().as_ptr().cast(), memory.len(), access) };
        match NonNull::new(raw) {
            Some(raw) => Ok((memory, raw)),
            None => Err(io::Error::last_os_error()),
        }
    }

    /// Tokens of these slots carry it.
    pub(super) fn pool(&self) -> u32 {
        self.pool
    }

    /// Whether that token is for a slot of this pool.
    pub(super) fn owns(&self, slot: Slot) -> bool {
        slot.pool == self.pool && slot.index < self.slabs
    }

    /// How many slots.
    pub(super) fn slabs(&self) -> u32 {
        self.slabs
    }

    /// Bytes in each.
    pub(super) fn slab_bytes(&self) -> u32 {
        self.slab_bytes
    }

    /// What the memory lies in.
    pub(super) fn page_kind(&self) -> PageKind {
        self.memory.kind()
    }

    /// Address and key of the first slot, for a peer's WRs.
    pub(super) fn remote(&self) -> (u64, u32) {
        // SAFETY: `raw` is live until `Drop`; the field is constant.
        let rkey = unsafe { (*self.raw.as_ptr()).rkey };
        (self.memory.start().as_ptr().expose_provenance() as u64, rkey)
    }

    /// The first `len` bytes of a slot as the device wants to hear of them.
    ///
    /// # Panics
    ///
    /// When the slot is not of this pool, or the length out of range: a bug of ours.
    pub(super) fn sge(&self, slot: Slot, len: u32) -> ffi::ibv_sge {
        let start = self.at(slot, 0, len as usize);
        ffi::ibv_sge { addr: start.as_ptr().expose_provenance() as u64, length: len, lkey: self.lkey }
    }

    /// Copies `bytes` into a slot.
    ///
    /// # Panics
    ///
    /// When they do not fit there.
    pub(super) fn write(&self, slab: &mut SendSlab, offset: usize, bytes: &[u8]) {
        let to = self.at((&*slab).into(), offset, bytes.len());
        // SAFETY: `at` checked that `to..to + len` lies in that slot of the live mapping, which no safe slice
        // overlaps (`Memory` gives out pointers only). The slot's only token is borrowed mutably, so no other thread
        // touches it.
        unsafe { bytes.as_ptr().copy_to_nonoverlapping(to.as_ptr(), bytes.len()) };
    }

    /// Copies out of a slot.
    ///
    /// # Panics
    ///
    /// When `out` reaches beyond the slot.
    pub(super) fn read(&self, slab: &RecvSlab, offset: usize, out: &mut [u8]) {
        let from = self.at(slab.into(), offset, out.len());
        // SAFETY: `at` checked the source range; `out` is a slice of other memory (see `write`). The mapping is
        // zeroed at first, so each byte is initialised, and the token says that the device is done with the slot.
        unsafe { from.as_ptr().copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
    }

    /// Appends a part of a slot to `out`, without zeroing the room first.
    ///
    /// # Panics
    ///
    /// When the part reaches beyond the slot.
    pub(super) fn append(&self, slab: &RecvSlab, offset: usize, len: usize, out: &mut Vec<u8>) {
        let from = self.at(slab.into(), offset, len);
        out.reserve(len);
        let room = &mut out.spare_capacity_mut()[..len];
        // SAFETY: the source as in `read`; the target is `len` bytes of the vector's own spare room, by the slice.
        unsafe { from.as_ptr().copy_to_nonoverlapping(room.as_mut_ptr().cast(), len) };
        let filled = out.len() + len;
        // SAFETY: `reserve` made the capacity at least `filled`, and the copy has just initialised the last `len`.
        unsafe { out.set_len(filled) };
    }

    /// A part of a slot as it lies there, for as long as the token is not posted.
    ///
    /// # Panics
    ///
    /// When the part reaches beyond the slot.
    fn borrow<'a>(&'a self, slab: &'a RecvSlab, offset: usize, len: usize) -> &'a [u8] {
        let from = self.at(slab.into(), offset, len);
        // SAFETY: `at` checked that `from..from + len` lies in that slot of the live mapping, which `self` keeps for
        // 'a, and whose bytes were zeroed at first, hence are initialised. Nobody writes there for 'a: the slot's only
        // token is borrowed, so it is not posted and the device has no receive there; the MR is local-write, so no peer
        // reaches it by key; and of this process `write` takes send slabs, whose tokens are of another pool.
        unsafe { std::slice::from_raw_parts(from.as_ptr(), len) }
    }

    fn at(&self, slot: Slot, offset: usize, len: usize) -> NonNull<u8> {
        assert!(self.owns(slot), "{slot:?} in pool {} of {} slabs", self.pool, self.slabs);
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.slab_bytes as usize),
            "{len} bytes at {offset} in a slab of {}",
            self.slab_bytes
        );
        // SAFETY: the slot's index < slabs and offset + len <= slab_bytes <= stride, so the sum is at most slabs * stride, the
        // mapping's length, which `pool_bytes` checked to fit `isize`.
        unsafe { self.memory.start().add(slot.index as usize * self.stride + offset) }
    }
}

/// A slab in the application's hands; see [`Fabric::lend_slab`](crate::fabric::Fabric::lend_slab).
struct Lent<H: FnOnce(RecvSlab)> {
    pool: Arc<SlabMr>,
    /// Until `Drop`.
    slab: Option<(RecvSlab, H)>,
    offset: usize,
    len: usize,
}

impl<H: FnOnce(RecvSlab)> AsRef<[u8]> for Lent<H> {
    fn as_ref(&self) -> &[u8] {
        self.slab.as_ref().map_or(&[], |(slab, _)| self.pool.borrow(slab, self.offset, self.len))
    }
}

impl<H: FnOnce(RecvSlab)> Drop for Lent<H> {
    fn drop(&mut self) {
        if let Some((slab, home)) = self.slab.take() {
            home(slab);
        }
    }
}

/// Gives a part of a slot out as bytes; see [`Fabric::lend_slab`](crate::fabric::Fabric::lend_slab).
pub(super) fn lend(
    pool: &Arc<SlabMr>,
    slab: RecvSlab,
    offset: usize,
    len: usize,
    home: impl FnOnce(RecvSlab) + Send + 'static,
) -> Bytes {
    // Refused here, not at the first look.
    pool.at((&slab).into(), offset, len);
    Bytes::from_owner(Lent { pool: Arc::clone(pool), slab: Some((slab, home)), offset, len })
}

impl Drop for SlabMr {
    fn drop(&mut self) {
        // SAFETY: `raw` came from ibv_reg_mr and is deregistered here once. The SRQ and the QPs whose WRs name this
        // memory hold an `Arc` of `self` and are gone.
        let rc = unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
        // SAFETY: taken once, here, and not used again.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        if let Err(error) = check(rc) {
            tracing::error!(%error, bytes = memory.len(), "ibv_dereg_mr failed; the memory stays mapped");
            memory.leak();
        }
    }
}

/// Which slot a token is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pool: u32,
    index: u32,
}

impl From<&SendSlab> for Slot {
    fn from(slab: &SendSlab) -> Self {
        Self { pool: slab.pool(), index: slab.index() }
    }
}

impl From<&RecvSlab> for Slot {
    fn from(slab: &RecvSlab) -> Self {
        Self { pool: slab.pool(), index: slab.index() }
    }
}

/// 0 is no device's pool: the simulation mints in it.
static NEXT_POOL: AtomicU32 = AtomicU32::new(1);

/// Bytes for all slabs and the distance between two: slabs begin at cache lines.
pub(super) fn pool_bytes(slabs: u32, slab_bytes: u32) -> Option<(usize, usize)> {
    if slabs == 0 || slab_bytes == 0 {
        return None;
    }
    let stride = (slab_bytes as usize).checked_next_multiple_of(CACHE_LINE)?;
    let bytes = stride.checked_mul(slabs as usize)?;
    isize::try_from(bytes).ok()?;
    Some((bytes, stride))
}

const CACHE_LINE: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_begin_at_cache_lines() {
        assert_eq!(pool_bytes(3, 100), Some((384, 128)));
        assert_eq!(pool_bytes(4096, 8192), Some((32 << 20, 8192)));
        assert_eq!(pool_bytes(0, 8192), None);
        assert_eq!(pool_bytes(8, 0), None);
    }
}
