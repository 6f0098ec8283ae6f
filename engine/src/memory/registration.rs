//! One registered range, and the handle to it.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::{
    address::Span,
    alias::Claim,
    busy::Use,
    host::{Blocked, HostMemory, Patience},
    permission::Permission,
    raw::Loan,
};
use crate::budget::Charge;

/// A range, from its registration until the last handle, operation and table let go of it.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) id: u64,
    pub(crate) span: Span,
    pub(crate) permission: Permission,
    /// Where the range lies within the allocation.
    pub(super) within: Range<usize>,
    // In the order in which they must go: the addresses are free to claim before they can be allocated anew, and the
    // budget is whole only when the memory is gone.
    pub(super) _claim: Claim,
    pub(super) memory: Arc<HostMemory>,
    pub(super) _charge: Charge,
    /// Of the engine: ranges that direct operations are at.
    pub(super) direct: Arc<AtomicU64>,
}

/// Why bytes were not accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// They are not all within the range.
    OutOfRange,
    /// A direct operation is at them.
    Blocked(Blocked),
}

/// Bytes that a direct operation is at, until this is dropped.
pub(crate) struct DirectRange {
    // In this order: the bytes are free before it is told, and the memory goes last.
    loan: Loan,
    _count: Counted,
    _registration: Arc<Registration>,
}

/// One more, while it lives.
struct Counted(Arc<AtomicU64>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl DirectRange {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.loan.bytes()
    }

    /// `None` unless it was lent for writing.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        self.loan.bytes_mut()
    }

    /// Hands the bytes over to a device: they are free again when it has let go of this.
    #[cfg(feature = "rdma")]
    pub(crate) fn in_place(self) -> Arc<dyn verbs_transport::fabric::bulk::MemoryOwner> {
        let Self { loan, _count: count, _registration: registration } = self;
        Arc::new(super::raw::InPlace::new(loan, (count, registration)))
    }
}

impl Registration {
    /// Runs `access` on `length` bytes from `offset` under the allocation's lock, to look at them.
    pub(crate) fn read<T>(
        &self,
        (offset, length): (u64, u64),
        patience: Patience<'_>,
        access: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, Denied> {
        let place = self.place(offset, length).ok_or(Denied::OutOfRange)?;
        self.memory.read(&place, patience, access).map_err(Denied::Blocked)
    }

    /// As [`Registration::read`], to change them.
    pub(crate) fn write<T>(
        &self,
        (offset, length): (u64, u64),
        patience: Patience<'_>,
        access: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, Denied> {
        let place = self.place(offset, length).ok_or(Denied::OutOfRange)?;
        self.memory.write(&place, patience, access).map_err(Denied::Blocked)
    }

    /// Lends them to a direct operation.
    pub(crate) fn lend(
        self: &Arc<Self>,
        (offset, length): (u64, u64),
        by: Use,
        patience: Patience<'_>,
    ) -> Result<DirectRange, Denied> {
        let place = self.place(offset, length).ok_or(Denied::OutOfRange)?;
        let loan = self.memory.lend(place, by, patience).map_err(Denied::Blocked)?;
        self.direct.fetch_add(1, Relaxed);
        Ok(DirectRange { loan, _count: Counted(Arc::clone(&self.direct)), _registration: Arc::clone(self) })
    }

    /// Where bytes of the range lie within the allocation.
    fn place(&self, offset: u64, length: u64) -> Option<Range<usize>> {
        let end = offset.checked_add(length).filter(|end| *end <= self.span.length)?;
        let (from, to) = (usize::try_from(offset).ok()?, usize::try_from(end).ok()?);
        Some(self.within.start + from..self.within.start + to)
    }
}

/// A handle to a registered range. Clones share it; they add no registration reference.
///
/// The memory stays usable through it after [`unregister_memory`](crate::Engine::unregister_memory) and after the end of
/// the engine; until the last handle is dropped it counts towards
/// [`max_registrations`](crate::Config::max_registrations).
#[derive(Clone, Debug)]
pub struct RegisteredMemory {
    pub(crate) registration: Arc<Registration>,
    /// Which engine gave it out.
    pub(crate) engine: u64,
}

/// Bytes that a range does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{length} bytes from offset {offset} are not within a range of {range} bytes")]
pub struct OutOfRange {
    /// The first byte, counted from the start of the range.
    pub offset: u64,
    /// How many.
    pub length: u64,
    /// What the range has.
    pub range: u64,
}

/// Why bytes of a range were not accessed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// They are not all within the range.
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    /// A direct operation is at some of them: later, or by a call that waits.
    #[error("a direct operation is at {length} bytes from offset {offset}, or at some of them")]
    Busy {
        /// The first byte that was asked for.
        offset: u64,
        /// How many were.
        length: u64,
    },
}

impl RegisteredMemory {
    /// Its number on the wire; never used twice in an engine's life.
    pub fn id(&self) -> u64 {
        self.registration.id
    }

    /// Where it starts: what goes into [`TransferRequest`](crate::TransferRequest), here and at peers.
    pub fn address(&self) -> u64 {
        self.registration.span.start
    }

    /// Its length in bytes, never 0.
    #[allow(clippy::len_without_is_empty)] // no range is empty
    pub fn len(&self) -> u64 {
        self.registration.span.length
    }

    /// What peers may do with it.
    pub fn permission(&self) -> Permission {
        self.registration.permission
    }

    /// The allocation that it is part of.
    pub fn memory(&self) -> &Arc<HostMemory> {
        &self.registration.memory
    }

    /// Copies bytes out of the range, in one step as seen by every other copy. Bytes that a
    /// [direct](crate::Profile::Direct) operation changes are waited for.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`], and nothing is copied.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfRange> {
        let at = (offset, into.len() as u64);
        let read = self.registration.read(at, Patience::Forever, |bytes| into.copy_from_slice(bytes));
        read.map_err(|_| self.out_of_range(at))
    }

    /// Copies bytes into the range, in one step as seen by every other copy. Bytes that a
    /// [direct](crate::Profile::Direct) operation is at are waited for.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`], and nothing is copied.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), OutOfRange> {
        self.update(offset, from.len() as u64, |bytes| bytes.copy_from_slice(from))
    }

    /// Runs `access` on the bytes under the allocation's lock: peers that READ or WRITE the allocation wait for it, so
    /// keep it short. It must not access the same allocation again, which would wait for itself. A panic in it passes
    /// through, and the lock stays usable.
    ///
    /// Bytes that a [direct](crate::Profile::Direct) operation is at are waited for, as long as that takes:
    /// [`try_update`](Self::try_update) does not.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`], and `access` is not called.
    pub fn update<T>(&self, offset: u64, length: u64, access: impl FnOnce(&mut [u8]) -> T) -> Result<T, OutOfRange> {
        let at = (offset, length);
        self.registration.write(at, Patience::Forever, access).map_err(|_| self.out_of_range(at))
    }

    /// As [`read`](Self::read), but does not wait for a direct operation that changes the bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`], and nothing is copied.
    pub fn try_read(&self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        let at = (offset, into.len() as u64);
        let read = self.registration.read(at, Patience::None, |bytes| into.copy_from_slice(bytes));
        read.map_err(|denied| self.denied(at, denied))
    }

    /// As [`update`](Self::update), but does not wait for a direct operation that is at the bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`], and `access` is not called.
    pub fn try_update<T>(
        &self,
        offset: u64,
        length: u64,
        access: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, AccessError> {
        let at = (offset, length);
        self.registration.write(at, Patience::None, access).map_err(|denied| self.denied(at, denied))
    }

    fn out_of_range(&self, (offset, length): (u64, u64)) -> OutOfRange {
        OutOfRange { offset, length, range: self.registration.span.length }
    }

    fn denied(&self, (offset, length): (u64, u64), denied: Denied) -> AccessError {
        match denied {
            Denied::OutOfRange => self.out_of_range((offset, length)).into(),
            Denied::Blocked(_) => AccessError::Busy { offset, length },
        }
    }
}
