//! Frames that wait go several to a SEND, and come out of one again.

use std::collections::VecDeque;

use super::{Frame, InFlight, Link, LinkError, Outbox, Posted};
use crate::{
    fabric::SendSlab,
    proto::{
        frame::{FrameKind, HEADER_BYTES, Lane},
        pack::{self, Packed},
    },
};

impl Link {
    /// A slab for a packed SEND, if the first frames of the queue can go in one. Slabs that are scarce are for frames that
    /// need one each.
    #[inline]
    pub(super) fn place_pack(&self, queue: &VecDeque<Frame>, out: &mut impl Outbox) -> Option<SendSlab> {
        let (first, second) = (queue.front()?, queue.get(1)?);
        if !self.limits.packs || self.cursor > 0 {
            return None;
        }
        let both = HEADER_BYTES + pack::packed_bytes(first)? + pack::packed_bytes(second)?;
        if both > self.limits.send_bytes as usize || !out.has_room() || out.slabs_scarce() {
            return None;
        }
        out.take_slab()
    }

    /// One SEND of as many frames as the slab takes. Room, WR and credit are there.
    pub(super) fn fill_pack(&mut self, queue: &mut VecDeque<Frame>, mut slab: SendSlab, out: &mut impl Outbox) {
        let spent = self.tx.take();
        debug_assert!(spent, "a credit was there");
        let mut at = HEADER_BYTES;
        let fits = |at: usize, frame: &Frame| {
            pack::packed_bytes(frame).is_some_and(|bytes| at + bytes <= self.limits.send_bytes as usize)
        };
        let (mut first, mut more) = (None, 0);
        while queue.front().is_some_and(|frame| fits(at, frame)) {
            let Some(frame) = queue.pop_front() else { break };
            for part in [&pack::encode_entry(&frame)[..], &frame.header, &frame.payload] {
                if !part.is_empty() {
                    out.write_slab(&mut slab, at, part);
                    at += part.len();
                }
            }
            if first.is_none() {
                first = Some(frame);
            } else {
                self.packed.push_back(frame);
                more += 1;
            }
        }
        self.counts.sends_packed += 1;
        self.counts.frames_packed += u64::from(more) + 1;
        let head = self.header(FrameKind::Pack, (false, false, Lane::Application), more + 1);
        out.write_slab(&mut slab, 0, &head);
        let scarce = out.slabs_scarce();
        out.push_slab(self.sends.next_seq(), self.sends.will_signal(scarce), at);
        self.push(Some(slab), first, more, scarce);
    }

    /// The frames of a SEND that was [`Incoming::Pack`](super::Incoming::Pack): `each` gets them in order, all or none.
    ///
    /// # Errors
    ///
    /// [`LinkError`]: the peer broke the protocol.
    pub fn unpack(&mut self, frames: u32, body: &[u8], each: impl FnMut(Packed)) -> Result<(), LinkError> {
        let good = pack::check(body, frames, self.limits.receive_max_bytes);
        good.map_err(|malformed| self.malformed(malformed))?;
        pack::frames(body).for_each(each);
        Ok(())
    }

    /// Frames of packed SENDs that there is room for, in flight or not.
    pub fn packed_room(&self) -> usize {
        self.packed.capacity()
    }

    /// Keeps room for `frames` frames of packed SENDs at most, if none is in flight.
    pub fn trim(&mut self, frames: usize) {
        if self.packed.is_empty() {
            self.packed.shrink_to(frames);
        }
    }
}

impl Posted {
    /// What it held, and the frames behind its first out of `packed`.
    #[inline]
    pub(super) fn unpack(self, packed: &mut VecDeque<Frame>, mut each: impl FnMut(InFlight)) {
        each(self.op);
        if self.more > 0 {
            let more = packed.len().min(self.more as usize);
            packed.drain(..more).for_each(|frame| each(InFlight { slab: None, frame: Some(frame) }));
        }
    }

    /// The same of many.
    pub(super) fn unpack_all(
        posted: Vec<Self>,
        packed: &mut VecDeque<Frame>,
    ) -> impl Iterator<Item = InFlight> + use<> {
        let mut ops = Vec::with_capacity(posted.len());
        for posted in posted {
            posted.unpack(packed, |op| ops.push(op));
        }
        ops.into_iter()
    }
}
