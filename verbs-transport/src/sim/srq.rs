//! One shared receive queue and where each receive slab is. Invariant: every slab is in exactly one place.

use std::collections::VecDeque;

/// Where a receive slab is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Its token is with the caller (or was dropped there).
    Caller,
    /// Posted, waiting for a message.
    Posted,
    /// A message is being written into it.
    Filling,
    /// A CQE names it.
    Completed,
    /// Gone with a QP that was destroyed in mid-message, or with a CQE that overran the CQ.
    Lost,
}

/// How many slabs are where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveSlabCount {
    /// With the caller, as tokens.
    pub with_caller: u32,
    /// Posted to the SRQ.
    pub posted: u32,
    /// Half full.
    pub filling: u32,
    /// In the CQ, not yet polled.
    pub completed: u32,
    /// Lost for good, as on Soft-RoCE when a QP is destroyed in mid-message.
    pub lost: u32,
}

#[derive(Debug)]
pub(super) struct Srq {
    queue: VecDeque<u32>,
    places: Vec<Place>,
    limit: Option<u32>,
    /// The world holds receives back: the SRQ looks empty.
    pub(super) held: bool,
}

impl Srq {
    pub(super) fn new(slabs: u32) -> Self {
        Self {
            queue: VecDeque::with_capacity(slabs as usize),
            places: vec![Place::Caller; slabs as usize],
            limit: None,
            held: false,
        }
    }

    /// No message comes any more: gives back the memory of the queue, but not the count of what lay in it.
    pub(super) fn forget_queue(&mut self) {
        self.queue = VecDeque::new();
    }

    /// Posts a slab whose token the caller gave up.
    ///
    /// # Panics
    ///
    /// When the slab is not with the caller: a token was made twice.
    pub(super) fn post(&mut self, slab: u32) {
        self.step(slab, Place::Caller, Place::Posted);
        self.queue.push_back(slab);
    }

    /// Takes the oldest receive, for a message that begins.
    pub(super) fn take(&mut self) -> Option<u32> {
        let slab = self.queue.pop_front()?;
        self.step(slab, Place::Posted, Place::Filling);
        Some(slab)
    }

    /// The message's CQE is in the CQ.
    pub(super) fn complete(&mut self, slab: u32) {
        self.step(slab, Place::Filling, Place::Completed);
    }

    /// The message will never end.
    pub(super) fn lose(&mut self, slab: u32) {
        self.step(slab, Place::Filling, Place::Lost);
    }

    /// The CQE was polled: the token may be minted.
    pub(super) fn return_to_caller(&mut self, slab: u32) {
        self.step(slab, Place::Completed, Place::Caller);
    }

    pub(super) fn arm_limit(&mut self, receives: u32) {
        self.limit = (receives > 0).then_some(receives);
    }

    /// After a receive was taken: whether the armed limit fires, which disarms it.
    pub(super) fn limit_reached(&mut self) -> bool {
        self.limit.take_if(|limit| self.queue.len() < *limit as usize).is_some()
    }

    pub(super) fn assert_with_caller(&self, slab: u32) {
        let place = self.places[slab as usize];
        assert!(place == Place::Caller, "sim: receive slab {slab} is read while it is {place:?}, not with the caller");
    }

    pub(super) fn count(&self) -> ReceiveSlabCount {
        let mut count = ReceiveSlabCount::default();
        for place in &self.places {
            *match place {
                Place::Caller => &mut count.with_caller,
                Place::Posted => &mut count.posted,
                Place::Filling => &mut count.filling,
                Place::Completed => &mut count.completed,
                Place::Lost => &mut count.lost,
            } += 1;
        }
        count
    }

    fn step(&mut self, slab: u32, from: Place, to: Place) {
        let place = &mut self.places[slab as usize];
        assert!(*place == from, "sim: receive slab {slab} should be {from:?} to become {to:?}, but is {place:?}");
        *place = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(slabs: u32) -> Srq {
        let mut srq = Srq::new(slabs);
        (0..slabs).for_each(|slab| srq.post(slab));
        srq
    }

    #[test]
    fn receives_are_taken_first_in_first_out() {
        let mut srq = filled(3);
        assert_eq!([srq.take(), srq.take(), srq.take(), srq.take()], [Some(0), Some(1), Some(2), None]);
    }

    #[test]
    fn limit_fires_once_when_the_count_falls_below_it() {
        let mut srq = filled(4);
        srq.arm_limit(3);
        srq.take();
        assert!(!srq.limit_reached(), "3 of 3 is not below");
        srq.take();
        assert!(srq.limit_reached());
        srq.take();
        assert!(!srq.limit_reached(), "not armed again");
    }

    #[test]
    fn limit_armed_while_already_below_fires_at_the_next_receive() {
        let mut srq = filled(2);
        srq.arm_limit(9);
        srq.take();
        assert!(srq.limit_reached());
    }

    #[test]
    #[should_panic(expected = "receive slab 1 should be Caller to become Posted, but is Posted")]
    fn slab_posted_twice_is_our_bug() {
        let mut srq = filled(2);
        srq.post(1);
    }

    #[test]
    fn every_slab_is_counted_in_one_place() {
        let mut srq = filled(5);
        let slabs: Vec<u32> = (0..4).filter_map(|_| srq.take()).collect();
        srq.complete(slabs[0]);
        srq.complete(slabs[1]);
        srq.return_to_caller(slabs[1]);
        srq.lose(slabs[2]);
        let want = ReceiveSlabCount { with_caller: 1, posted: 1, filling: 1, completed: 1, lost: 1 };
        assert_eq!(srq.count(), want);
    }
}
