//! One registered range, and the handle to it.

use std::{ops::Range, sync::Arc};

use super::{address::Span, alias::Claim, host::HostMemory, permission::Permission};
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
}

impl Registration {
    /// Runs `access` on `length` bytes from `offset` under the allocation's lock, or `None` if they are not all within
    /// the range.
    pub(crate) fn with<T>(&self, offset: u64, length: u64, access: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        let end = offset.checked_add(length).filter(|end| *end <= self.span.length)?;
        let (from, to) = (usize::try_from(offset).ok()?, usize::try_from(end).ok()?);
        Some(self.memory.with(|bytes| access(&mut bytes[self.within.clone()][from..to])))
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

    /// Copies bytes out of the range, in one step as seen by every other copy.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`], and nothing is copied.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfRange> {
        self.update(offset, into.len() as u64, |bytes| into.copy_from_slice(bytes))
    }

    /// Copies bytes into the range, in one step as seen by every other copy.
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
    /// # Errors
    ///
    /// [`OutOfRange`], and `access` is not called.
    pub fn update<T>(&self, offset: u64, length: u64, access: impl FnOnce(&mut [u8]) -> T) -> Result<T, OutOfRange> {
        let range = self.registration.span.length;
        self.registration.with(offset, length, access).ok_or(OutOfRange { offset, length, range })
    }
}
