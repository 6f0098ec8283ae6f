//! Memory that the caller owns: the one place of this crate with `unsafe` code.

#![allow(unsafe_code)]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
};

use super::host::{HostMemory, MemoryError};

/// A caller's bytes, and what keeps them allocated.
pub(super) struct RawBytes {
    start: NonNull<u8>,
    length: usize,
    /// Always there until `Drop` takes it.
    owner: Option<Box<dyn Send>>,
}

// SAFETY: `start` is the only field that is not `Send`. It is dereferenced through `&mut self` only, so by one thread at
// a time, and the bytes stay allocated wherever `self` goes: `owner`, which is `Send`, goes with it. That they may be
// accessed from any thread is part of what the caller of `RawBytes::new` promised.
unsafe impl Send for RawBytes {}

impl RawBytes {
    /// # Safety
    ///
    /// Until `owner` is dropped, `length` bytes from `start` are one allocation that is initialised, readable and
    /// writable from every thread; nobody accesses them while a slice of [`RawBytes::bytes`] lives. `length` is at most
    /// `isize::MAX` and `start + length` does not wrap.
    pub(super) unsafe fn new(start: NonNull<u8>, length: usize, owner: Box<dyn Send>) -> Self {
        Self { start, length, owner: Some(owner) }
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: what `slice::from_raw_parts_mut` asks for, in its order. Non-null: `NonNull`. Aligned: `u8` needs 1.
        // Valid for reads and writes of `length` bytes within one allocation, and initialised: promised to `new` until
        // `owner` is dropped, which only `Drop` does, and that needs `self`, which the result borrows. No other access
        // for the lifetime of the result: `&mut self` excludes ours, the promise to `new` excludes others. At most
        // `isize::MAX` and no wrap: promised to `new`, and checked by its caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
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
    ///   next submission, call or agreement that gives it back. This goes for devices as for CPUs;
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
        // of ours go through the mutex below, so at most one slice lives. Length and end were checked above.
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
        memory.with(|bytes| {
            assert_eq!(bytes, [7; 64]);
            bytes[63] = 9;
        });
        assert_eq!(memory.with(|bytes| bytes[63]), 9);
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
