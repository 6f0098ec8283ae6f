//! One batch of work requests on its way to the device.

use arrayvec::ArrayVec;
use crossbeam_queue::ArrayQueue;

use crate::{
    fabric::{Fabric, FabricQp, POST_BATCH, PostError, SendData, SendSlab, SendWr, WrSeq},
    proto::link::{Link, Outbox},
};

/// Inline bytes in one batch.
pub(crate) const INLINE_ARENA_BYTES: usize = 1024;

enum Bytes {
    Inline { from: u16, to: u16 },
    Slab { len: u32 },
}

struct Entry {
    seq: WrSeq,
    signaled: bool,
    bytes: Bytes,
}

/// Up to [`POST_BATCH`] work requests, posted as one chain.
pub(crate) struct Batch<'a, F: Fabric> {
    fabric: &'a F,
    slabs: &'a ArrayQueue<SendSlab>,
    entries: ArrayVec<Entry, POST_BATCH>,
    /// Not a plain array: zeroing it would cost each batch more than a message does.
    arena: ArrayVec<u8, INLINE_ARENA_BYTES>,
}

impl<'a, F: Fabric> Batch<'a, F> {
    pub(crate) fn new(fabric: &'a F, slabs: &'a ArrayQueue<SendSlab>) -> Self {
        Self { fabric, slabs, entries: ArrayVec::new(), arena: ArrayVec::new() }
    }

    /// Posts the batch. On an error names the first WR that the device did not take.
    pub(crate) fn post(&mut self, qp: &F::Qp, link: &Link) -> Result<(), (WrSeq, PostError)> {
        if self.entries.is_empty() {
            return Ok(());
        }
        // Filled where it is: `collect` would move all of its room, used or not.
        let mut wrs = ArrayVec::<SendWr<'_>, POST_BATCH>::new();
        for entry in &self.entries {
            let data = match entry.bytes {
                Bytes::Inline { from, to } => SendData::Inline(&self.arena[usize::from(from)..usize::from(to)]),
                Bytes::Slab { len } => {
                    let slab = link.slab(entry.seq).expect("the WR's slab is in the in-flight table");
                    SendData::Slab { slab, len }
                }
            };
            wrs.push(SendWr { seq: entry.seq, signaled: entry.signaled, data });
        }
        let result = qp.post(&wrs);
        let refused = result.map_err(|error| (wrs[error.posted.min(wrs.len() - 1)].seq, error));
        drop(wrs);
        self.entries.clear();
        self.arena.clear();
        refused
    }
}

impl<F: Fabric> Outbox for Batch<'_, F> {
    #[inline]
    fn has_room(&self) -> bool {
        !self.entries.is_full()
    }

    fn take_slab(&mut self) -> Option<SendSlab> {
        self.slabs.pop()
    }

    fn slabs_scarce(&self) -> bool {
        self.slabs.len() <= self.slabs.capacity() / 2
    }

    #[inline]
    fn reserve_inline(&mut self, bytes: usize) -> bool {
        bytes <= self.arena.remaining_capacity()
    }

    #[inline]
    fn push_inline(&mut self, seq: WrSeq, signaled: bool, parts: [&[u8]; 3]) {
        let from = self.arena.len();
        for part in parts {
            if !part.is_empty() {
                self.arena.try_extend_from_slice(part).expect("room was reserved");
            }
        }
        // The arena is 1 KiB long.
        #[expect(clippy::cast_possible_truncation, reason = "INLINE_ARENA_BYTES fits in 16 bits")]
        let bytes = Bytes::Inline { from: from as u16, to: self.arena.len() as u16 };
        self.entries.push(Entry { seq, signaled, bytes });
    }

    #[inline]
    fn write_slab(&mut self, slab: &mut SendSlab, at: usize, bytes: &[u8]) {
        self.fabric.write_slab(slab, at, bytes);
    }

    fn push_slab(&mut self, seq: WrSeq, signaled: bool, bytes: usize) {
        #[expect(clippy::cast_possible_truncation, reason = "a slab's size is a u32")]
        self.entries.push(Entry { seq, signaled, bytes: Bytes::Slab { len: bytes as u32 } });
    }
}
