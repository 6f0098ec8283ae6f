//! The bytes of an allocation, and every reference into them: the one place of this crate with `unsafe` code.
//!
//! No reference ever covers more than the bytes that an access asked for, and none covers bytes that are lent in a way
//! that conflicts ([`busy`](super::busy)): a direct operation, and with it a device, may be at those.

#![allow(unsafe_code)]

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
    sync::Arc,
};

use super::{
    busy::{Ledger, Use},
    host::{Blocked, HostMemory, MemoryError, Patience},
};

/// Somebody's bytes, and what keeps them allocated.
pub(super) struct RawBytes {
    start: NonNull<u8>,
    length: usize,
    ledger: Ledger,
    /// Always there until `Drop` takes it.
    owner: Option<Box<dyn Send>>,
}

// SAFETY: `start` is the only field that is not `Send`. It is dereferenced through `&mut self`, so by one thread at a
// time, and through loans, which have a proof of their own; the bytes stay allocated wherever `self` goes: `owner`, which
// is `Send`, goes with it. That they may be accessed from any thread is part of what the caller of `RawBytes::new`
// promised.
unsafe impl Send for RawBytes {}

/// A boxed slice that was taken apart, so that nothing claims all of its bytes.
struct Boxed(NonNull<[u8]>);

// SAFETY: it owns plain bytes, which are not bound to a thread.
unsafe impl Send for Boxed {}

impl Drop for Boxed {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `Box::into_raw` and is made a box again here alone. Whoever reached the bytes by
        // it is gone: `RawBytes` drops its owner last, and every loan holds the allocation.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl RawBytes {
    /// # Safety
    ///
    /// Until `owner` is dropped, `length` bytes from `start` are one allocation that is initialised, readable and
    /// writable from every thread; nobody accesses them while a slice of [`RawBytes::read`] or [`RawBytes::write`] lives,
    /// or a [`Loan`]. `length` is at most `isize::MAX` and `start + length` does not wrap.
    unsafe fn new(start: NonNull<u8>, length: usize, owner: Box<dyn Send>) -> Self {
        Self { start, length, ledger: Ledger::new(), owner: Some(owner) }
    }

    /// Takes over memory.
    pub(super) fn of_box(bytes: Box<[u8]>) -> Self {
        let length = bytes.len();
        // Not null: it comes from a box.
        let whole = NonNull::new(Box::into_raw(bytes)).expect("a box has an address");
        // SAFETY: one allocation, initialised, of this length, which a box bounds by `isize::MAX`; `Boxed` frees it and
        // nothing else knows it.
        unsafe { Self::new(whole.cast(), length, Box::new(Boxed(whole))) }
    }

    /// Whether an access may begin now.
    pub(super) fn allows(&self, range: &Range<usize>, by: Use) -> bool {
        self.ledger.allows(range, by)
    }

    /// Some of the bytes, to look at; `None` while they are lent for writing.
    ///
    /// # Panics
    ///
    /// Beyond the end: a fault of ours.
    pub(super) fn read(&mut self, range: &Range<usize>) -> Option<&[u8]> {
        let start = self.at(range, Use::Read)?;
        // SAFETY: what `slice::from_raw_parts` asks for, in its order. Non-null: `NonNull`. Aligned: `u8` needs 1. Valid
        // for reads of that length within one allocation, and initialised: `at` has checked the range, and it was promised
        // to `new` until `owner` is dropped, which only `Drop` does, and that needs `self`, which the result borrows.
        // Nobody writes for the lifetime of the result: `&mut self` excludes ours, the ledger loans for writing, the
        // promise to `new` others. At most `isize::MAX` and no wrap: promised to `new`.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), range.len()) })
    }

    /// Some of the bytes, to change; `None` while they are lent.
    ///
    /// # Panics
    ///
    /// Beyond the end: a fault of ours.
    pub(super) fn write(&mut self, range: &Range<usize>) -> Option<&mut [u8]> {
        let start = self.at(range, Use::Write)?;
        // SAFETY: as in `read`; here nobody reads either: the ledger excludes every loan of these bytes.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), range.len()) })
    }

    /// Begins to wait for bytes; the ticket is for [`RawBytes::leave`].
    pub(super) fn wait(&mut self, range: Range<usize>, by: Use) -> u64 {
        self.ledger.wait(range, by)
    }

    pub(super) fn leave(&mut self, ticket: u64) {
        self.ledger.leave(ticket);
    }

    /// Where a range starts, if the access may begin now.
    fn at(&self, range: &Range<usize>, by: Use) -> Option<NonNull<u8>> {
        assert!(range.start <= range.end && range.end <= self.length, "{range:?} of {} bytes", self.length);
        // SAFETY: within the allocation, by the check.
        self.allows(range, by).then(|| unsafe { self.start.add(range.start) })
    }
}

/// A range of an allocation that a direct operation is at. The lock is not held for it; accesses that conflict wait until
/// this is dropped.
pub(crate) struct Loan {
    memory: Arc<HostMemory>,
    ticket: u64,
    start: NonNull<u8>,
    length: usize,
    by: Use,
}

// SAFETY: the pointer is into bytes that may be accessed from any thread (`RawBytes::new`) and that `memory` keeps.
unsafe impl Send for Loan {}
// SAFETY: as above; `&Loan` gives bytes to look at, and only `&mut Loan` such to change.
unsafe impl Sync for Loan {}

impl Loan {
    /// The bytes, to look at.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: as in `RawBytes::read`, from the same pointer; `memory` keeps the allocation. Nobody writes these bytes
        // while the loan lives: the ledger refuses accesses and loans that would, and `bytes_mut` borrows `self` alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// The bytes, to change; `None` unless they are lent for that.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        // SAFETY: as in `bytes`; while they are lent for writing the ledger refuses every other access and loan, and this
        // borrows `self` mutably.
        (self.by == Use::Write).then(|| unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) })
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        // No reference is left: each borrowed `self`.
        self.memory.bytes.lock().ledger.give_back(self.ticket);
        self.memory.returned.notify_all();
    }
}

impl HostMemory {
    /// Lends a range, once nothing that conflicts is at it.
    pub(crate) fn lend(
        self: &Arc<Self>,
        range: Range<usize>,
        by: Use,
        patience: Patience<'_>,
    ) -> Result<Loan, Blocked> {
        let lend = |bytes: &mut RawBytes, waiter| {
            let start = bytes.at(&range, by)?;
            Some((start, bytes.ledger.lend(range.clone(), by, waiter)?))
        };
        let (bytes, (start, ticket)) = self.when(&range, by, patience, lend)?;
        drop(bytes);
        Ok(Loan { memory: Arc::clone(self), ticket, start, length: range.len(), by })
    }
}

/// Bytes in the hands of a device, and what they hang on. There is no way to them but the device's.
#[cfg(feature = "rdma")]
pub(super) struct InPlace<K> {
    loan: Loan,
    _keep: K,
}

#[cfg(feature = "rdma")]
impl<K> InPlace<K> {
    pub(super) fn new(loan: Loan, keep: K) -> Self {
        Self { loan, _keep: keep }
    }
}

// SAFETY: each promise of the trait. Start and length are the loan's and never change; the bytes are mapped, initialised
// and writable until the allocation's owner goes (`RawBytes::new`), which the loan's `Arc` prevents; nothing unmaps or
// reuses them. If they are lent for writing, the ledger refuses every reference and every other loan of them, and the
// loan's own references are out of reach in here: a device, and copies through regions, are all that touches them. If they
// are lent for reading, the owner says that it is read-only, and nobody changes them: other references and other owners
// only read them, which the trait allows then.
#[cfg(feature = "rdma")]
unsafe impl<K: Send + Sync + 'static> verbs_transport::fabric::bulk::MemoryOwner for InPlace<K> {
    fn start(&self) -> NonNull<u8> {
        self.loan.start
    }

    fn len(&self) -> usize {
        self.loan.length
    }

    fn is_read_only(&self) -> bool {
        self.loan.by == Use::Read
    }
}

impl Drop for RawBytes {
    fn drop(&mut self) {
        let owner = self.owner.take();
        // A caller's destructor, on whichever thread let go last: it must not take a worker down.
        if catch_unwind(AssertUnwindSafe(|| drop(owner))).is_err() {
            tracing::error!(address = ?self.start, length = self.length, "the owner of host memory panicked when dropped");
        }
    }
}

impl HostMemory {
    /// Memory that is allocated already: an arena, a mapped file, pages that a driver pinned.
    ///
    /// `owner` keeps it allocated and is dropped when the last handle, registration and operation that uses it is gone,
    /// on whatever thread that happens. Nothing is pinned here, and a device pointer does not become one of the host.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped:
    ///
    /// - `length` bytes from `address` are one allocation, initialised, and readable and writable from every thread;
    /// - nobody accesses them except through this value, or while they are handed off: between the moment when the
    ///   caller knows that no operation, local call or peer uses the range (not exported, or the peers agreed) and the
    ///   next submission, call or agreement that gives it back. This goes for devices as for CPUs; the engine's own may be
    ///   at the bytes of a direct operation, which counts as one through this value;
    /// - no other `HostMemory` covers any of them. The engine refuses to register such ranges, but it cannot see
    ///   values that were never registered.
    ///
    /// # Errors
    ///
    /// [`MemoryError`] if the numbers name no memory.
    pub unsafe fn from_raw_parts<O: Send + 'static>(
        address: *mut u8,
        length: usize,
        owner: O,
    ) -> Result<Self, MemoryError> {
        let start = NonNull::new(address).ok_or(MemoryError::Null { length })?;
        let number = address.addr() as u64;
        if isize::try_from(length).is_err() || address.addr().checked_add(length).is_none() {
            return Err(MemoryError::Wraps { address: number, length });
        }
        // SAFETY: allocation, initialisation and access are what our own caller promised, in the same words; accesses
        // of ours go through the mutex and the ledger below. Length and end were checked above.
        let bytes = unsafe { RawBytes::new(start, length, Box::new(owner)) };
        Ok(Self::of_raw(number, length, bytes))
    }
}

/// Safe ways to memory of this kind, for tests.
#[cfg(test)]
pub(crate) mod testing {
    use std::sync::Arc;

    use super::HostMemory;

    /// A vector, and something that is dropped with it.
    pub(crate) fn external<O: Send + 'static>(mut bytes: Vec<u8>, owner: O) -> HostMemory {
        let (start, length) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the vector is initialised, owned, and kept, untouched, in the owner, whose moves leave its bytes where
        // they are.
        unsafe { HostMemory::from_raw_parts(start, length, (bytes, owner)) }.expect("a vector is memory")
    }

    /// Two wrappers of the same bytes, which a caller must not make: to see them refused, and for nothing else.
    pub(crate) fn wrapped_twice(mut bytes: Vec<u8>) -> [Arc<HostMemory>; 2] {
        let (start, length) = (bytes.as_mut_ptr(), bytes.len());
        let owner = Arc::new(bytes);
        [(); 2].map(|()| {
            // SAFETY: the vector lives, untouched, in `owner`, which each wrapper holds. That there are two of them is
            // against the contract; without an access through either, which the tests leave out, it has no consequence.
            let memory = unsafe { HostMemory::from_raw_parts(start, length, Arc::clone(&owner)) };
            Arc::new(memory.expect("a vector is memory"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    };

    use super::*;

    struct Owner(Arc<AtomicU32>);

    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    #[test]
    fn an_outside_owner_is_dropped_once_with_the_memory() {
        let dropped = Arc::<AtomicU32>::default();
        let memory = testing::external(vec![7; 64], Owner(Arc::clone(&dropped)));
        let whole = |memory: &HostMemory| {
            memory.write(&(0..64), Patience::None, |bytes| {
                let before = bytes.to_vec();
                bytes[63] = 9;
                before
            })
        };
        assert_eq!(whole(&memory), Ok(vec![7; 64]));
        assert_eq!(memory.read(&(63..64), Patience::None, <[u8]>::to_vec), Ok(vec![9]));
        assert_eq!(dropped.load(SeqCst), 0);
        drop(memory);
        assert_eq!(dropped.load(SeqCst), 1);
    }

    #[test]
    fn numbers_that_are_no_memory_are_refused() {
        // SAFETY: a null pointer is refused before anything is made of it.
        let null = unsafe { HostMemory::from_raw_parts(std::ptr::null_mut(), 8, ()) };
        assert_eq!(null.expect_err("null"), MemoryError::Null { length: 8 });
        let high = std::ptr::without_provenance_mut::<u8>(usize::MAX - 3);
        // SAFETY: a range that wraps is refused before anything is made of it.
        let wraps = unsafe { HostMemory::from_raw_parts(high, 5, ()) };
        assert!(matches!(wraps, Err(MemoryError::Wraps { length: 5, .. })));
        // SAFETY: as before.
        let long = unsafe { HostMemory::from_raw_parts(NonNull::dangling().as_ptr(), usize::MAX, ()) };
        assert!(matches!(long, Err(MemoryError::Wraps { length: usize::MAX, .. })));
    }

    #[test]
    fn an_owner_that_panics_is_contained() {
        struct Bad;
        impl Drop for Bad {
            fn drop(&mut self) {
                panic!("a destructor of the caller's");
            }
        }
        drop(testing::external(vec![0; 8], Bad));
    }
}
