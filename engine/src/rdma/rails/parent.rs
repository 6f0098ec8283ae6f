//! One request over one or several rails, at its source and at its requester: what is due for all of them together. Pure.
//!
//! ```text
//! planning ─room for every rail─► admitted ─every right bound─► published ─every receipt─► settled ─committed─► done
//!     │                              │                             │                          │
//!     └─ no room: refused ───────────┴────── any loss: lost ───────┴──────────────────────────┘
//! ```
//!
//! Invariants, which `parent_tests.rs` checks for every sequence of events: the plan is admitted for all rails or none; no
//! right is told before all are bound; nothing is committed before the receipt of every rail, and nothing is acknowledged
//! twice, or without a commit; what the request covers is released once, and not before each rail that had room is gone,
//! by its receipt or by the burial of its QP; behind the loss of one rail nothing is told, committed or acknowledged.

use crate::{Direction, RemoteEffect};

/// Rails, by their places.
type Set = u16;

/// What happens to a request at its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Everything that a rail takes is reserved.
    Room(u8),
    /// It is not to be had.
    NoRoom,
    /// A rail's right is bound.
    Bound(u8),
    /// A rail's receipt came, and its right is taken away.
    Receipt(u8),
    /// The bytes of a WRITE are in the range; those of a READ have left it before.
    Committed,
    /// It will not end well: deadline, broken connection, breach of the protocol, a rail that failed.
    Lost,
    /// No device reaches anything by way of that rail, and none will.
    Gone(u8),
}

/// What is due now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing.
    Wait,
    /// Answer the plan.
    Admit,
    /// Refuse all of it.
    Refuse,
    /// Tell the peer all rights.
    Publish,
    /// All receipts are in: commit.
    Commit,
    /// Tell the peer, once.
    Acknowledge,
    /// Let range and budget go.
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    Planning,
    Admitted,
    Published,
    Settled,
    Done,
    Lost,
}

/// One request at its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Parent {
    all: Set,
    room: Set,
    bound: Set,
    receipts: Set,
    gone: Set,
    state: State,
    released: bool,
}

impl Parent {
    /// Over so many rails, 1 to 16.
    pub(crate) fn new(rails: usize) -> Self {
        let all = (0..rails.min(16)).fold(0, |set, rail| set | 1 << rail);
        Self { all, room: 0, bound: 0, receipts: 0, gone: 0, state: State::Planning, released: false }
    }

    /// Takes an event; what is due.
    pub(crate) fn on(&mut self, event: Event) -> Step {
        let bit = |rail: u8| self.all & 1_u16.checked_shl(rail.into()).unwrap_or(0);
        match event {
            Event::Room(rail) if self.state == State::Planning => {
                self.room |= bit(rail);
                self.move_on(self.room, State::Admitted, Step::Admit)
            }
            Event::NoRoom if self.state == State::Planning => {
                self.state = State::Lost;
                Step::Refuse
            }
            Event::Bound(rail) if self.state == State::Admitted && bit(rail) & self.gone == 0 => {
                self.bound |= bit(rail);
                self.move_on(self.bound, State::Published, Step::Publish)
            }
            Event::Receipt(rail) if self.state == State::Published && bit(rail) & self.gone == 0 => {
                self.receipts |= bit(rail);
                self.move_on(self.receipts, State::Settled, Step::Commit)
            }
            Event::Committed if self.state == State::Settled => {
                self.state = State::Done;
                Step::Acknowledge
            }
            Event::Lost if self.state != State::Done => {
                self.state = State::Lost;
                self.release()
            }
            Event::Gone(rail) => {
                self.gone |= bit(rail) & self.room;
                // Without its receipt it takes the others with it.
                if self.state != State::Done && self.gone != 0 {
                    self.state = State::Lost;
                }
                self.release()
            }
            _ => Step::Wait,
        }
    }

    fn move_on(&mut self, set: Set, state: State, step: Step) -> Step {
        if set != self.all {
            return Step::Wait;
        }
        self.state = state;
        step
    }

    fn release(&mut self) -> Step {
        let over = matches!(self.state, State::Done | State::Lost);
        if self.released || !over || self.gone != self.room {
            return Step::Wait;
        }
        self.released = true;
        Step::Release
    }
}

/// One request at its requester: what it may have done, and whether it may be done again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Progress {
    direction: Direction,
    posted: bool,
    done: bool,
    acknowledged: bool,
}

impl Progress {
    pub(crate) fn new(direction: Direction) -> Self {
        Self { direction, posted: false, done: false, acknowledged: false }
    }

    /// A rail is about to post data.
    pub(crate) fn posting(&mut self) {
        self.posted = true;
    }

    /// The source is about to be told that a rail is done.
    pub(crate) fn telling(&mut self) {
        self.done = true;
    }

    /// The source has told that all is.
    pub(crate) fn acknowledged(&mut self) {
        self.acknowledged = true;
    }

    /// Whatever any rail has done counts.
    pub(crate) fn effect(self) -> RemoteEffect {
        match self.direction {
            Direction::Write if self.acknowledged => RemoteEffect::Committed,
            Direction::Write if self.posted => RemoteEffect::Unknown,
            _ => RemoteEffect::None,
        }
    }

    /// A READ as long as the source was told of no rail that it is done; a WRITE as long as no rail has posted.
    pub(crate) fn may_go_again(self) -> bool {
        !self.done && !self.acknowledged && self.effect() == RemoteEffect::None
    }
}

#[cfg(test)]
#[path = "parent_tests.rs"]
mod tests;
