//! The send queue of one QP: which WRs are in flight, who gets a signal, and what each of them holds.
//!
//! Whatever an operation owns (its frame, its slab) stays in this table until a completion covers it. A good
//! completion covers every WR up to its own; a failed one means that the QP is in ERR and all that follow fail too.

use std::collections::VecDeque;

use crate::fabric::WrSeq;

/// How the WR to be posted is to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posting {
    /// Its position.
    pub seq: WrSeq,
    /// Whether it asks for a completion.
    pub signaled: bool,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The peer's device has it.
    Done,
    /// Not known to have arrived.
    Failed,
}

/// In-flight table of one QP. Invariant: `in_flight.len() <= capacity`.
#[derive(Debug)]
pub struct SendQueue<T> {
    in_flight: VecDeque<T>,
    /// Position of the front of `in_flight`.
    head: u64,
    capacity: u32,
    signal_every: u32,
    /// WRs in flight behind the last signaled one.
    unsignaled: u32,
    failed: bool,
}

impl<T> SendQueue<T> {
    /// For a QP of `capacity` WRs, with a signal at least every `signal_every` of them and at least twice a queue.
    pub fn new(capacity: u32, signal_every: u32) -> Self {
        let signal_every = signal_every.min(capacity / 2).max(1);
        Self { in_flight: VecDeque::new(), head: 0, capacity, signal_every, unsignaled: 0, failed: false }
    }

    /// WRs that may be posted now.
    #[inline]
    pub fn free(&self) -> u32 {
        self.capacity - self.len()
    }

    /// WRs in flight.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "at most the capacity, which is a u32")]
    pub fn len(&self) -> u32 {
        self.in_flight.len() as u32
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether [`SendQueue::push`] would ask for a completion.
    #[inline]
    pub fn will_signal(&self, force: bool) -> bool {
        force || self.unsignaled + 1 >= self.signal_every
    }

    /// Takes `op` into the table for the WR that is about to be posted.
    ///
    /// # Panics
    ///
    /// When the queue is full: ask [`SendQueue::free`] first.
    #[inline]
    pub fn push(&mut self, op: T, force_signal: bool) -> Posting {
        assert!(self.free() > 0, "a WR beyond the send queue's {} slots", self.capacity);
        let seq = WrSeq(self.head + u64::from(self.len()));
        let signaled = self.will_signal(force_signal);
        if signaled {
            self.unsignaled = 0;
        } else {
            self.unsignaled += 1;
        }
        self.in_flight.push_back(op);
        Posting { seq, signaled }
    }

    /// The operation at `seq`, if it is in flight.
    pub fn get(&self, seq: WrSeq) -> Option<&T> {
        let index = seq.0.checked_sub(self.head)?;
        self.in_flight.get(usize::try_from(index).ok()?)
    }

    /// Takes back the operations from `seq` on, which the device refused to take. Those before it are live: they end
    /// by their own completions, good or not.
    pub fn take_back(&mut self, seq: WrSeq) -> impl Iterator<Item = T> {
        let keep = usize::try_from(seq.0.saturating_sub(self.head)).unwrap_or(usize::MAX).min(self.in_flight.len());
        // The signaled ones may have been among those that go.
        self.unsignaled = u32::try_from(keep).unwrap_or(u32::MAX);
        self.in_flight.drain(keep..)
    }

    /// A good completion: gives up everything up to `seq`. An unknown or stale `seq` gives nothing.
    ///
    /// None can come after a failed one, since the device reports in order; if it does all the same, it proves nothing.
    pub fn complete(&mut self, seq: WrSeq, mut each: impl FnMut(T, Ended)) {
        let covered = self.covered(seq);
        let ended = if self.failed { Ended::Failed } else { Ended::Done };
        self.head += covered as u64;
        self.in_flight.drain(..covered).for_each(|op| each(op, ended));
        self.unsignaled = self.unsignaled.min(self.len());
    }

    /// A failed or flushed completion. The first one proves the WRs before it done; from then on everything fails.
    pub fn fail(&mut self, seq: WrSeq, mut each: impl FnMut(T, Ended)) {
        let covered = self.covered(seq);
        if covered == 0 {
            return;
        }
        let before = if self.failed { Ended::Failed } else { Ended::Done };
        self.failed = true;
        self.head += covered as u64;
        for (index, op) in self.in_flight.drain(..covered).enumerate() {
            each(op, if index + 1 == covered { Ended::Failed } else { before });
        }
    }

    /// No completion will come any more: everything still in flight fails.
    pub fn abandon(&mut self) -> impl Iterator<Item = T> {
        self.failed = true;
        self.head += u64::from(self.len());
        self.in_flight.drain(..)
    }

    /// Whether WRs are in flight that no signaled WR in flight will cover: without another post they stay for ever.
    pub fn has_bare_tail(&self) -> bool {
        self.unsignaled > 0 && !self.failed
    }

    /// Whether a signaled WR is in flight.
    pub fn awaits_completion(&self) -> bool {
        self.len() > self.unsignaled
    }

    /// Position that the next WR will get.
    #[inline]
    pub fn next_seq(&self) -> WrSeq {
        WrSeq(self.head + u64::from(self.len()))
    }

    fn covered(&self, seq: WrSeq) -> usize {
        let Some(index) = seq.0.checked_sub(self.head) else { return 0 };
        match usize::try_from(index) {
            Ok(index) if index < self.in_flight.len() => index + 1,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ended(queue: &mut SendQueue<u32>, seq: u64, good: bool) -> Vec<(u32, Ended)> {
        let mut out = Vec::new();
        if good {
            queue.complete(WrSeq(seq), |op, end| out.push((op, end)));
        } else {
            queue.fail(WrSeq(seq), |op, end| out.push((op, end)));
        }
        out
    }

    #[test]
    fn a_signal_comes_every_n_and_at_least_twice_a_queue() {
        let mut queue = SendQueue::new(63, 16);
        let signaled: Vec<u32> = (0..48).filter(|&n| queue.push(n, false).signaled).collect();
        assert_eq!(signaled, [15, 31, 47]);
        let mut small = SendQueue::new(8, 16);
        let signaled: Vec<u32> = (0..8).filter(|&n| small.push(n, false).signaled).collect();
        assert_eq!(signaled, [3, 7]);
    }

    #[test]
    fn a_good_completion_covers_all_before_it() {
        let mut queue = SendQueue::new(8, 4);
        for n in 0..4 {
            queue.push(n, false);
        }
        assert_eq!(ended(&mut queue, 3, true), [0, 1, 2, 3].map(|n| (n, Ended::Done)));
        assert_eq!(queue.free(), 8);
        assert_eq!(ended(&mut queue, 3, true), []);
    }

    #[test]
    fn the_first_failure_proves_what_was_before_and_fails_what_comes_after() {
        let mut queue = SendQueue::new(8, 8);
        for n in 0..6 {
            queue.push(n, false);
        }
        assert_eq!(ended(&mut queue, 2, false), [(0, Ended::Done), (1, Ended::Done), (2, Ended::Failed)]);
        // The flush of 3 was lost: it may not be taken for done when that of 4 comes.
        assert_eq!(ended(&mut queue, 4, false), [(3, Ended::Failed), (4, Ended::Failed)]);
        assert_eq!(queue.abandon().collect::<Vec<_>>(), [5]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_bare_tail_is_seen_until_it_is_covered() {
        let mut queue = SendQueue::new(16, 8);
        assert!(!queue.has_bare_tail());
        queue.push(0, false);
        assert!(queue.has_bare_tail());
        queue.push(1, true);
        assert!(!queue.has_bare_tail());
        queue.push(2, false);
        ended(&mut queue, 1, true);
        assert!(queue.has_bare_tail());
        queue.push(3, true);
        ended(&mut queue, 3, true);
        assert!(!queue.has_bare_tail());
    }

    #[test]
    fn a_refused_post_is_taken_back() {
        let mut queue = SendQueue::new(8, 8);
        for n in 0..5 {
            queue.push(n, false);
        }
        assert_eq!(queue.take_back(WrSeq(3)).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(queue.len(), 3);
    }

    /// What was posted before the refused WR is live: its good completion says that the peer has it.
    #[test]
    fn a_refused_post_does_not_fail_what_was_posted_before_it() {
        let mut queue = SendQueue::new(8, 2);
        for n in 0..5 {
            queue.push(n, false);
        }
        assert_eq!(queue.take_back(WrSeq(4)).collect::<Vec<_>>(), [4]);
        assert_eq!(ended(&mut queue, 1, true), [(0, Ended::Done), (1, Ended::Done)]);
        // The first flush proves 2 done, and the marker that takes the refused one's place comes last.
        assert_eq!(queue.push(5, true), Posting { seq: WrSeq(4), signaled: true });
        assert_eq!(ended(&mut queue, 3, false), [(2, Ended::Done), (3, Ended::Failed)]);
        assert_eq!(ended(&mut queue, 4, false), [(5, Ended::Failed)]);
    }

    proptest! {
        /// Every operation ends exactly once, in order, whatever completions come, known or not.
        #[test]
        fn every_operation_ends_once(steps in prop::collection::vec((any::<bool>(), any::<bool>(), 0u64..80), 0..300)) {
            let mut queue = SendQueue::new(16, 4);
            let (mut pushed, mut seen) = (0u32, 0u32);
            for (push, good, seq) in steps {
                if push && queue.free() > 0 {
                    queue.push(pushed, false);
                    pushed += 1;
                } else {
                    for (op, _) in ended(&mut queue, seq, good) {
                        prop_assert_eq!(op, seen);
                        seen += 1;
                    }
                }
                prop_assert_eq!(queue.len(), pushed - seen);
            }
            prop_assert_eq!(u32::try_from(queue.abandon().count()).unwrap(), pushed - seen);
        }
    }
}
