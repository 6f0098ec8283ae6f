//! The order of an operation's frames, and what each must name. Pure, and the same for both sides.
//!
//! ```text
//! requester                               source
//!   request, ask          ──►             admits; offers paths           (a kept pair skips to the grant)
//!   select                ──►             reserves all of it
//!                         ◄──             admit
//!   requester's QP        ──►             makes its own, posts receives, connects
//!                         ◄──             source's QP
//!   connected             ──►             binds
//!                         ◄──             grant
//!   data, marker          ══► over RDMA   receipt
//!   done                  ──►             revokes, commits
//!                         ◄──             ack
//!   ready                 ──►
//! ```
//!
//! Over several rails ([`rails::plan`](super::rails::plan)) each rail goes from the requester's QP to *done* under names
//! of its own, all rails in step; the parent has *ack* and *ready* alone, once, for all of them.

use super::{
    identity::{Identity, Incarnation},
    path::PathEnd,
    wire::{Body, Frame, Kind},
};
use crate::{Direction, RemoteEffect, WireError};

/// Whose eyes we see with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    Source,
    Requester,
}

/// One operation from its offer to its end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    side: Side,
    identity: Identity,
    /// The frames that are due, the next one first; none after the last.
    due: &'static [Kind],
    /// The next grant tells its generation, which must be above this.
    learns: Option<u64>,
    posted: bool,
}

impl Exchange {
    /// After an offer was made, or read.
    pub(crate) fn new(side: Side, identity: Identity) -> Self {
        Self { side, identity, due: &Kind::ALL, learns: None, posted: false }
    }

    /// Over a pair of QPs that is kept: the grant comes next. The requester does not know its generation yet, only the
    /// last one that this pair has had.
    pub(crate) fn again(side: Side, identity: Identity, last_generation: u64) -> Self {
        let learns = (side == Side::Requester).then_some(last_generation);
        Self { side, identity, due: &Kind::ALL[5..], learns, posted: false }
    }

    /// One rail of several, whose plan is agreed; a pair of QPs that is kept begins with its grant.
    pub(crate) fn rail(side: Side, identity: Identity, kept: bool) -> Self {
        Self { side, identity, due: &Kind::ALL[if kept { 5 } else { 2 }..7], learns: None, posted: false }
    }

    /// What is said once for all rails.
    pub(crate) fn parent(side: Side, identity: Identity) -> Self {
        Self { side, identity, due: &Kind::ALL[7..], learns: None, posted: false }
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The requester's choice of a path pins both protection domains.
    pub(crate) fn choose(&mut self, source_pd: Incarnation, requester_pd: Incarnation) {
        (self.identity.source_pd, self.identity.requester_pd) = (source_pd, requester_pd);
    }

    /// As [`Exchange::hear`], for the choice of one of the paths that were offered: its place, and the other end.
    ///
    /// # Errors
    ///
    /// Also when it is none of them.
    pub(crate) fn hear_choice(&mut self, frame: &Frame, offered: &[PathEnd]) -> Result<(usize, PathEnd), WireError> {
        let Body::Select { path, end } = frame.body else {
            return self.hear(frame).and(Err(WireError::OutOfTurn { found: frame.body.kind() as u8, due: 0 }));
        };
        let path = usize::from(path);
        let own = offered.get(path).ok_or(WireError::Foreign { field: "path" })?;
        let mut next = *self;
        next.choose(own.pd, end.pd);
        next.hear(frame)?;
        *self = next;
        Ok((path, end))
    }

    /// The frame that says `body` now.
    ///
    /// # Errors
    ///
    /// It is not its turn: a fault of ours.
    pub(crate) fn say(&mut self, body: Body) -> Result<Frame, WireError> {
        self.step(body.kind(), self.side)?;
        Ok(Frame { identity: self.identity, body })
    }

    /// Takes a frame of the peer's.
    ///
    /// # Errors
    ///
    /// It is out of its turn, came before, or speaks of something else.
    pub(crate) fn hear(&mut self, frame: &Frame) -> Result<Body, WireError> {
        let other = if self.side == Side::Source { Side::Requester } else { Side::Source };
        let mut known = self.identity;
        if let (Some(last), Kind::Grant) = (self.learns, frame.body.kind()) {
            let found = frame.identity.generation;
            if found <= last {
                return Err(WireError::Generation { found, last });
            }
            known.generation = found;
        }
        let mut next = *self;
        next.step(frame.body.kind(), other)?;
        frame.identity.check(&known)?;
        next.identity = known;
        *self = next;
        Ok(frame.body)
    }

    /// Work requests with data are about to be posted.
    pub(crate) fn posting(&mut self) {
        self.posted = true;
    }

    /// Whether a device may have begun to move the data.
    pub(crate) fn has_posted(&self) -> bool {
        self.posted
    }

    /// Whether the operation may have been carried out, seen from the requester: nothing is known between the first
    /// work request and the acknowledgement.
    pub(crate) fn effect(&self, direction: Direction) -> RemoteEffect {
        match (direction, self.due.first()) {
            (Direction::Write, Some(Kind::Ready) | None) => RemoteEffect::Committed,
            (Direction::Write, _) if self.posted => RemoteEffect::Unknown,
            _ => RemoteEffect::None,
        }
    }

    /// Whether DONE is still to be said, seen from the requester: until then a READ may begin again elsewhere.
    pub(crate) fn is_before_done(&self) -> bool {
        self.due.contains(&Kind::Done)
    }

    /// All that was due has been said: the pair may carry another operation.
    pub(crate) fn is_over(&self) -> bool {
        self.due.is_empty()
    }

    fn step(&mut self, kind: Kind, by: Side) -> Result<(), WireError> {
        match self.due.split_first() {
            Some((due, rest)) if *due == kind && speaker(kind) == by => self.due = rest,
            due => {
                let due = due.map_or(0, |(due, _)| *due as u8);
                return Err(WireError::OutOfTurn { found: kind as u8, due });
            }
        }
        Ok(())
    }
}

fn speaker(kind: Kind) -> Side {
    match kind {
        Kind::Select | Kind::RequesterQp | Kind::Connected | Kind::Done | Kind::Ready => Side::Requester,
        Kind::Admit | Kind::SourceQp | Kind::Grant | Kind::Ack => Side::Source,
    }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
