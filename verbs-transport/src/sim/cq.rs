//! One completion queue with its channel. Invariant: a wake-up only ever comes of an arming.

use std::{collections::VecDeque, task::Waker};

use super::hca::QpKey;
use crate::fabric::WcStatus;

/// One entry, before its slab token is minted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cqe {
    /// The QP's number, all that a real CQE has.
    pub(super) qpn: u32,
    /// The QP itself, for the send-queue slots that polling this frees.
    pub(super) qp: QpKey,
    pub(super) what: CqeWhat,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum CqeWhat {
    Receive { slab: u32, bytes: u32 },
    ReceiveFailed { slab: u32, status: WcStatus },
    Send { seq: u64 },
    SendFailed { seq: u64, status: WcStatus },
}

/// What became of a CQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    /// It is in the queue.
    Quiet,
    /// It is in the queue, and the channel has an event.
    Woke,
    /// The queue was full: it is lost, and the CQ broken.
    Overrun,
}

/// Holds entries of type `E`: messages' or bulk's.
#[derive(Debug)]
pub(super) struct Cq<E = Cqe> {
    entries: VecDeque<E>,
    depth: usize,
    armed: bool,
    /// Events in the channel.
    events: u32,
    pub(super) broken: bool,
    wakers: Vec<Waker>,
}

impl<E> Cq<E> {
    pub(super) fn new(depth: u32) -> Self {
        Self {
            entries: VecDeque::new(),
            depth: depth as usize,
            armed: false,
            events: 0,
            broken: false,
            wakers: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, cqe: E) -> Pushed {
        if self.entries.len() >= self.depth {
            self.broken = true;
            return Pushed::Overrun;
        }
        self.entries.push_back(cqe);
        if !self.armed {
            return Pushed::Quiet;
        }
        self.armed = false;
        self.events += 1;
        Pushed::Woke
    }

    pub(super) fn pop(&mut self) -> Option<E> {
        self.entries.pop_front()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Asks for one event at the next push; entries that are there raise none.
    pub(super) fn arm(&mut self) {
        self.armed = true;
    }

    /// An event that no completion caused.
    pub(super) fn spurious(&mut self) {
        self.events += 1;
    }

    /// Takes the channel's events, and says whether there were any.
    pub(super) fn take_events(&mut self) -> bool {
        std::mem::take(&mut self.events) > 0
    }

    pub(super) fn register(&mut self, waker: &Waker) {
        register(&mut self.wakers, waker);
    }

    pub(super) fn wakers(&mut self) -> &mut Vec<Waker> {
        &mut self.wakers
    }
}

/// Adds a waker unless an equal one waits already.
pub(super) fn register(wakers: &mut Vec<Waker>, waker: &Waker) {
    if !wakers.iter().any(|known| known.will_wake(waker)) {
        wakers.push(waker.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT: Cqe = Cqe { qpn: 1, qp: QpKey(0), what: CqeWhat::Send { seq: 0 } };

    #[test]
    fn one_wake_up_per_arming_however_many_completions() {
        let mut cq = Cq::new(8);
        cq.arm();
        cq.arm();
        assert_eq!(cq.push(SENT), Pushed::Woke);
        assert_eq!(cq.push(SENT), Pushed::Quiet);
        assert!(cq.take_events());
        assert!(!cq.take_events());
    }

    #[test]
    fn unarmed_cq_never_wakes() {
        let mut cq = Cq::new(8);
        assert_eq!(cq.push(SENT), Pushed::Quiet);
        assert!(!cq.take_events());
    }

    #[test]
    fn arming_does_not_fire_for_completions_that_are_there() {
        let mut cq = Cq::new(8);
        cq.push(SENT);
        cq.arm();
        assert!(!cq.take_events());
        assert_eq!(cq.push(SENT), Pushed::Woke);
    }

    #[test]
    fn overrun_loses_the_completion_and_breaks_the_cq() {
        let mut cq = Cq::new(1);
        assert_eq!(cq.push(SENT), Pushed::Quiet);
        assert_eq!(cq.push(SENT), Pushed::Overrun);
        assert!(cq.broken);
        assert_eq!(cq.len(), 1);
    }
}
