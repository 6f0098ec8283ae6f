//! Memory that a device may reach: who owns it, and how bytes get in and out of it.
//!
//! No reference into such memory is ever made. A device may read and write it at any time, and so may another thread
//! through another region over it. Bytes are copied by raw pointer, piece by piece, each piece under the lock of its
//! place in memory ([`stripe`]), so that safe code on two threads never races, whichever owners and regions it uses.

use std::{
    fmt, io,
    ops::Range,
    ptr::NonNull,
    sync::{Arc, PoisonError, RwLock},
};

use super::memory::{Memory, PageKind};
use crate::fabric::bulk::Access;

/// Owns memory that is to be registered with a device.
///
/// # Safety
///
/// From the first call of [`start`](Self::start) on, and for as long as any `Arc` of the owner lives:
///
/// - `start`, `len` and `is_read_only` always give the same values, and `start..start + len` is mapped memory of this
///   process that is valid for reads and, where it is registered with local or remote write, for writes; all of it is
///   initialised;
/// - it is not unmapped, moved, truncated or handed to another use, not even by interior mutability;
/// - no Rust reference into it exists or is made, and nobody reads or writes it but through regions. (The memory may be
///   shared with another process, or be a file's: then that one's accesses are like a device's.)
/// - no other owner's memory overlaps it.
///
/// Of a read-only owner the last two ask for less, for nobody changes its bytes, the device included: shared references
/// may exist, and the memory of other read-only owners may overlap.
pub unsafe trait MemoryOwner: Send + Sync + 'static {
    /// The first byte.
    fn start(&self) -> NonNull<u8>;

    /// Bytes.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the bytes stay as they are for as long as the owner lives: then they are registered for no kind of
    /// writing, and not copied into.
    fn is_read_only(&self) -> bool {
        false
    }
}

/// A range that is not within its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes at {offset} reach beyond a region of {len}")]
pub struct OutOfBounds {
    /// From the region's start.
    pub offset: usize,
    /// How many.
    pub bytes: usize,
    /// The region's length.
    pub len: usize,
}

/// Zeroed memory of this process, in huge pages where they can be had, and already touched: registering it takes no
/// page fault any more.
pub struct Arena {
    memory: Memory,
}

// SAFETY: the mapping is owned by the arena, which is not bound to a thread; it is reached by raw copies alone.
unsafe impl Send for Arena {}
// SAFETY: as above: `&Arena` gives out a pointer and numbers.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps and touches `bytes`. Blocks for the page faults: about 40 µs a base page on a slow machine.
    ///
    /// # Errors
    ///
    /// The kernel's, `ENOMEM` as a rule; `InvalidInput` for none at all.
    pub fn new(bytes: usize) -> io::Result<Arc<Self>> {
        if bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("an arena of {bytes} bytes")));
        }
        let memory = match Memory::huge(bytes) {
            Some(memory) => memory,
            None => Memory::ordinary(bytes)?,
        };
        let arena = Self { memory };
        arena.touch();
        Ok(Arc::new(arena))
    }

    /// What the memory lies in.
    pub fn page_kind(&self) -> PageKind {
        self.memory.kind()
    }

    /// Writes one byte of each base page.
    fn touch(&self) {
        for offset in (0..self.memory.len()).step_by(BASE_PAGE_BYTES) {
            // SAFETY: offset < len, so this is in the mapping.
            let byte = unsafe { self.memory.start().add(offset) };
            // SAFETY: as above, and nobody else knows the mapping yet.
            unsafe { byte.write_volatile(0) };
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena of {} bytes in {}", self.memory.len(), self.memory.kind())
    }
}

// SAFETY: the mapping is made once and unmapped when the arena goes; anonymous memory is zeroed, private to the arena,
// readable and writable, and `Memory` gives out nothing but its pointer.
unsafe impl MemoryOwner for Arena {
    fn start(&self) -> NonNull<u8> {
        self.memory.start()
    }

    fn len(&self) -> usize {
        self.memory.len()
    }
}

/// Bytes of the application's, given by value, and given back by [`OwnedBytes::into_vec`] when nobody else has them any
/// more: after the region was unmapped.
pub struct OwnedBytes {
    /// Of a vector that was taken apart: its buffer, of `len` initialised bytes and this capacity.
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: it owns plain bytes, which are not bound to a thread.
unsafe impl Send for OwnedBytes {}
// SAFETY: as above: `&OwnedBytes` gives out a pointer and numbers.
unsafe impl Sync for OwnedBytes {}

impl OwnedBytes {
    /// Takes the bytes; they stay where they are.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Arc<Self> {
        let mut bytes = std::mem::ManuallyDrop::new(bytes.into());
        let (len, capacity) = (bytes.len(), bytes.capacity());
        let start = NonNull::new(bytes.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Arc::new(Self { start, len, capacity })
    }

    /// Gives them back.
    ///
    /// # Errors
    ///
    /// Somebody else still has them: a region that is not unmapped, most likely.
    pub fn into_vec(self: Arc<Self>) -> Result<Vec<u8>, Arc<Self>> {
        let owned = Arc::try_unwrap(self)?;
        let owned = std::mem::ManuallyDrop::new(owned);
        // SAFETY: pointer, length and capacity are those of the vector that `new` took apart; `owned` is not dropped,
        // so this is their only use.
        Ok(unsafe { Vec::from_raw_parts(owned.start.as_ptr(), owned.len, owned.capacity) })
    }
}

impl Drop for OwnedBytes {
    fn drop(&mut self) {
        // SAFETY: as in `into_vec`, which forgets what it has taken.
        drop(unsafe { Vec::from_raw_parts(self.start.as_ptr(), self.len, self.capacity) });
    }
}

impl fmt::Debug for OwnedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnedBytes of {} bytes", self.len)
    }
}

// SAFETY: the buffer of the vector is kept, untouched, until the last `Arc` goes; its `len` bytes are initialised, and
// nothing here makes a reference into it before that.
unsafe impl MemoryOwner for OwnedBytes {
    fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn len(&self) -> usize {
        self.len
    }
}

/// A part of an owner's memory, which stays for as long as the span does. What a region holds, and what bytes are
/// copied through before there is a region.
#[derive(Clone)]
pub struct Span {
    owner: Arc<dyn MemoryOwner>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the pointer is into memory that the owner keeps in place and that is not bound to a thread; it is used under
// the stripes' locks alone.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// `None` when the range is empty or not within the owner's memory.
    pub fn new(owner: Arc<dyn MemoryOwner>, range: &Range<usize>) -> Option<Self> {
        let whole = owner.len();
        if range.start >= range.end || range.end > whole {
            return None;
        }
        // SAFETY: start < end <= len, all within the one mapping or allocation that the owner vouches for.
        let start = unsafe { owner.start().add(range.start) };
        Some(Self { owner, start, len: range.end - range.start })
    }

    /// Bytes, at least one.
    #[expect(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// As a device and its peers name it.
    pub fn addr(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<(), OutOfBounds> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(OutOfBounds { offset, bytes, len: self.len }),
        }
    }

    /// Copies bytes out, from `offset` on.
    ///
    /// # Errors
    ///
    /// They reach beyond the span; nothing was copied.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), OutOfBounds> {
        self.check(offset, out.len())?;
        let mut done = 0;
        for piece in pieces(self.start.addr().get() + offset, out.len()) {
            let _shared = stripe(piece.stripe).read().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: offset + done + piece.len <= self.len by `check`, so the source is in the owner's live memory.
            let from = unsafe { self.start.add(offset + done) };
            let to = &mut out[done..done + piece.len];
            // SAFETY: the source as above, initialised by the owner's promise; no Rust reference overlaps it, so `to`
            // is other memory. Writers of this process hold the stripe's lock exclusively.
            unsafe { from.as_ptr().copy_to_nonoverlapping(to.as_mut_ptr(), piece.len) };
            done += piece.len;
        }
        Ok(())
    }

    /// Whether its bytes may be registered for that.
    pub(crate) fn allows(&self, access: Access) -> bool {
        !self.owner.is_read_only() || !(access.local_write() || access.remote_write())
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    ///
    /// They reach beyond the span; nothing was copied.
    ///
    /// # Panics
    ///
    /// The owner is read-only.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        assert!(!self.owner.is_read_only(), "the memory of a read-only owner is not written");
        self.check(offset, bytes.len())?;
        let mut done = 0;
        for piece in pieces(self.start.addr().get() + offset, bytes.len()) {
            let _alone = stripe(piece.stripe).write().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: as in `read`.
            let to = unsafe { self.start.add(offset + done) };
            let from = &bytes[done..done + piece.len];
            // SAFETY: the target is in the owner's live memory, which no Rust reference overlaps, so `from` is other
            // memory. Everyone else of this process who reads or writes the piece waits for the stripe's lock.
            unsafe { from.as_ptr().copy_to_nonoverlapping(to.as_ptr(), piece.len) };
            done += piece.len;
        }
        Ok(())
    }

    /// Keeps the owner for good: a device could still reach the memory.
    pub(super) fn leak(&self) {
        std::mem::forget(Arc::clone(&self.owner));
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.len, self.addr())
    }
}

/// A copy's part within one place of memory.
struct Piece {
    stripe: usize,
    len: usize,
}

/// Cuts `len` bytes from address `addr` on at the borders of places.
fn pieces(addr: usize, len: usize) -> impl Iterator<Item = Piece> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = addr + done;
        let place = at / PLACE_BYTES;
        let piece = Piece { stripe: place % STRIPES, len: (PLACE_BYTES - at % PLACE_BYTES).min(len - done) };
        done += piece.len;
        Some(piece)
    })
}

fn stripe(index: usize) -> &'static RwLock<()> {
    static LOCKS: [RwLock<()>; STRIPES] = [const { RwLock::new(()) }; STRIPES];
    &LOCKS[index]
}

/// So many bytes are copied under one taking of a lock, about 10 µs.
const PLACE_BYTES: usize = 64 << 10;

/// So many copies run side by side at the most.
const STRIPES: usize = 64;

/// The smallest page there is.
const BASE_PAGE_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn span(bytes: usize, range: Range<usize>) -> Option<Span> {
        Span::new(OwnedBytes::new(vec![7; bytes]), &range)
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "that is the case")]
    fn a_span_has_a_byte_at_least_and_lies_within_its_owner() {
        for (range, good) in [(0..8, true), (7..8, true), (0..0, false), (8..8, false), (7..9, false), (5..4, false)] {
            assert_eq!(span(8, range.clone()).is_some(), good, "{range:?}");
        }
        assert!(span(0, 0..0).is_none() && span(8, usize::MAX - 1..usize::MAX).is_none());
    }

    #[test]
    fn copies_are_checked_at_the_border_and_against_overflow() {
        let span = span(8, 2..6).expect("within");
        assert!(span.read(0, &mut [0; 4]).is_ok() && span.read(4, &mut []).is_ok() && span.write(3, &[1]).is_ok());
        let beyond = |offset, bytes| Err(OutOfBounds { offset, bytes, len: 4 });
        assert_eq!(span.read(0, &mut [0; 5]), beyond(0, 5));
        assert_eq!(span.write(5, &[]), beyond(5, 0));
        assert_eq!(span.write(usize::MAX, &[0]), beyond(usize::MAX, 1));
    }

    #[test]
    fn read_only_memory_is_registered_for_no_writing_and_not_written() {
        struct ReadOnly(Arc<OwnedBytes>);
        // SAFETY: as `OwnedBytes`, whose only holder this is; nobody writes its bytes.
        unsafe impl MemoryOwner for ReadOnly {
            fn start(&self) -> NonNull<u8> {
                self.0.start
            }

            fn len(&self) -> usize {
                self.0.len
            }

            fn is_read_only(&self) -> bool {
                true
            }
        }
        let span = Span::new(Arc::new(ReadOnly(OwnedBytes::new(vec![7; 8]))), &(0..8)).expect("within");
        let writes = [Access::DESTINATION, Access::PUT_TARGET, Access::WINDOWS.and(Access::DESTINATION)];
        assert!(writes.into_iter().all(|access| !span.allows(access)));
        assert!([Access::LOCAL_READ, Access::SOURCE, Access::WINDOWS].into_iter().all(|access| span.allows(access)));
        let written = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| span.write(0, &[1])));
        let mut now = [0; 8];
        span.read(0, &mut now).expect("within");
        assert_eq!((written.is_err(), now), (true, [7; 8]));
    }

    #[test]
    fn a_long_copy_goes_in_and_comes_out_whole_across_places() {
        let bytes: Vec<u8> = (0..3 * PLACE_BYTES + 17).map(|at| u8::try_from(at % 251).expect("below 251")).collect();
        let owner = OwnedBytes::new(vec![0; bytes.len() + 5]);
        let span = Span::new(owner.clone(), &(5..bytes.len() + 5)).expect("within");
        span.write(0, &bytes).expect("within");
        let mut out = vec![0; bytes.len()];
        span.read(0, &mut out).expect("within");
        assert!(out == bytes);
        let owner = OwnedBytes::into_vec(owner).expect_err("the span has it, too");
        drop(span);
        let back = OwnedBytes::into_vec(owner).expect("nobody else has it any more");
        assert!(back[..5] == [0; 5] && back[5..] == bytes);
    }

    #[test]
    fn an_arena_is_zeroed_memory_of_its_size() {
        let arena = Arena::new(3 << 20).expect("3 MiB");
        let span = Span::new(arena.clone(), &(0..3 << 20)).expect("the whole");
        let mut end = [1; 16];
        span.read((3 << 20) - 16, &mut end).expect("within");
        assert_eq!((end, arena.len()), ([0; 16], 3 << 20));
        assert!(Arena::new(0).is_err());
    }
}
