//! The plan of an operation over several rails: which pair of NICs carries which bytes, and the source's answer to it.
//! Frames 26 and 27 of the control wire, version 1. See `docs/engine-wire.md`.
//!
//! Invariant of a decoded plan: 2 to 16 rails, no pair of protection domains and no connection twice, whose bytes follow
//! each other without a gap or an overlap; none carries no bytes.

use std::ops::Range;

use super::super::{
    identity::{Identity, Incarnation},
    path::{PATHS_MAX, PathEnd},
    wire::{BODY_AT, HEAD_BYTES, PATH_BYTES, names, path, put_names, put_path},
};
use crate::{
    WireError,
    control::{PLAN_BYTES, array, check_head, number},
};

/// Rails of one plan, at most.
pub(crate) const RAILS_MAX: usize = PATHS_MAX;
/// And at least: one rail is operation 4 or 5.
pub(crate) const RAILS_MIN: usize = 2;

pub(crate) const PLAN_KIND: u8 = 26;
pub(crate) const PLANNED_KIND: u8 = 27;
const COUNT_BYTES: usize = 8;
const RAIL_BYTES: usize = 48 + PATH_BYTES;
const RESERVED_BYTES: usize = 24;

// Of the whole frame, however many rails there are: what is unused is 0.
const _: () = assert!(PLAN_BYTES == BODY_AT + COUNT_BYTES + RAILS_MAX * RAIL_BYTES, "as the control wire has it");
/// Of the answer.
pub(crate) const PLANNED_BYTES: usize = BODY_AT + COUNT_BYTES + RAILS_MAX * RESERVED_BYTES;

/// What the requester wants of one rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedRail {
    /// The source's end, by the protection domain that it has offered.
    pub(crate) source_pd: Incarnation,
    /// This pair of QPs, as the requester names it.
    pub(crate) requester_link: Incarnation,
    /// Which bytes of the request it carries.
    pub(crate) bytes: Range<u64>,
    /// The requester's end.
    pub(crate) end: PathEnd,
}

/// What the source has reserved for one rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReservedRail {
    /// This pair of QPs, as the source names it.
    pub(crate) source_link: Incarnation,
    /// Of its grant.
    pub(crate) generation: u64,
}

/// Frame 26.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) rails: Vec<PlannedRail>,
}

/// Frame 27: everything is reserved, for all rails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) rails: Vec<ReservedRail>,
}

impl Plan {
    /// The frame, about that operation.
    ///
    /// # Panics
    ///
    /// With more rails than a plan takes: a fault of ours.
    pub(crate) fn encode(&self, identity: &Identity) -> Vec<u8> {
        let mut bytes = blank(PLAN_BYTES, PLAN_KIND, identity, self.rails.len());
        let entries = bytes[BODY_AT + COUNT_BYTES..].chunks_exact_mut(RAIL_BYTES);
        for (rail, into) in self.rails.iter().zip(entries) {
            into[..16].copy_from_slice(&rail.source_pd.0);
            into[16..32].copy_from_slice(&rail.requester_link.0);
            into[32..40].copy_from_slice(&rail.bytes.start.to_be_bytes());
            into[40..48].copy_from_slice(&rail.bytes.end.wrapping_sub(rail.bytes.start).to_be_bytes());
            put_path(&mut into[48..], &rail.end);
        }
        bytes
    }

    /// A sound plan, and what it is about.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(Identity, Self), WireError> {
        let (identity, entries) = entries(bytes, PLAN_BYTES, PLAN_KIND, RAIL_BYTES)?;
        let mut rails: Vec<PlannedRail> = Vec::new();
        for (at, entry) in entries.enumerate() {
            let wrong = |reason| Err(WireError::Plan { rail: at, reason });
            let (start, length) = (number(entry, 32), number(entry, 40));
            let end = start.checked_add(length).ok_or(WireError::Overflow { offset: start, length })?;
            let rail = PlannedRail {
                source_pd: Incarnation(array(entry, 0)),
                requester_link: Incarnation(array(entry, 16)),
                bytes: start..end,
                end: path(&entry[48..])?,
            };
            if rail.source_pd.is_none() || rail.requester_link.is_none() {
                return wrong("has a name that is none");
            }
            if start != rails.last().map_or(0, |before| before.bytes.end) {
                return wrong("does not begin where the one before it ends");
            }
            if length == 0 {
                return wrong("carries no bytes");
            }
            let pair = |rail: &PlannedRail| (rail.source_pd, rail.end.pd);
            if rails.iter().any(|other| pair(other) == pair(&rail)) {
                return wrong("is over a pair of devices that another one has");
            }
            if rails.iter().any(|other| other.requester_link == rail.requester_link) {
                return wrong("has the connection of another one");
            }
            rails.push(rail);
        }
        Ok((identity, Self { rails }))
    }

    /// All bytes.
    pub(crate) fn length(&self) -> u64 {
        self.rails.last().map_or(0, |last| last.bytes.end)
    }
}

impl Planned {
    /// As [`Plan::encode`].
    ///
    /// # Panics
    ///
    /// As [`Plan::encode`].
    pub(crate) fn encode(&self, identity: &Identity) -> Vec<u8> {
        let mut bytes = blank(PLANNED_BYTES, PLANNED_KIND, identity, self.rails.len());
        let entries = bytes[BODY_AT + COUNT_BYTES..].chunks_exact_mut(RESERVED_BYTES);
        for (rail, into) in self.rails.iter().zip(entries) {
            into[..16].copy_from_slice(&rail.source_link.0);
            into[16..].copy_from_slice(&rail.generation.to_be_bytes());
        }
        bytes
    }

    /// A sound answer, and what it is about.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(Identity, Self), WireError> {
        let (identity, entries) = entries(bytes, PLANNED_BYTES, PLANNED_KIND, RESERVED_BYTES)?;
        let mut rails: Vec<ReservedRail> = Vec::new();
        for (at, entry) in entries.enumerate() {
            let rail = ReservedRail { source_link: Incarnation(array(entry, 0)), generation: number(entry, 16) };
            if rail.source_link.is_none() {
                return Err(WireError::Plan { rail: at, reason: "has a name that is none" });
            }
            if rails.iter().any(|other| other.source_link == rail.source_link) {
                return Err(WireError::Plan { rail: at, reason: "has the connection of another one" });
            }
            // Counted by the source as it reserves: one above the other.
            let last = rails.last().map_or(0, |before| before.generation);
            if rail.generation <= last {
                return Err(WireError::Generation { found: rail.generation, last });
            }
            rails.push(rail);
        }
        Ok((identity, Self { rails }))
    }
}

fn blank(length: usize, kind: u8, identity: &Identity, count: usize) -> Vec<u8> {
    assert!(count <= RAILS_MAX, "a plan takes 16 rails at most");
    let mut bytes = vec![0; length];
    put_names(&mut bytes, kind, identity);
    bytes[BODY_AT..BODY_AT + 2].copy_from_slice(&u16::try_from(count).unwrap_or(u16::MAX).to_be_bytes());
    bytes
}

/// Checks all but what stands in the entries that are used.
fn entries(
    bytes: &[u8],
    length: usize,
    kind: u8,
    entry: usize,
) -> Result<(Identity, std::slice::ChunksExact<'_, u8>), WireError> {
    if bytes.len() >= HEAD_BYTES {
        let found = check_head(bytes)?;
        if found != kind {
            return Err(WireError::OutOfTurn { found, due: kind });
        }
    }
    if bytes.len() != length {
        return Err(WireError::Length { found: bytes.len() as u64, expected: length as u64 });
    }
    let count = usize::from(u16::from_be_bytes(array(bytes, BODY_AT)));
    if !(RAILS_MIN..=RAILS_MAX).contains(&count) {
        let found = u8::try_from(count).unwrap_or(u8::MAX);
        return Err(WireError::Unknown { field: "number of rails", found });
    }
    let (used, unused) = bytes[BODY_AT + COUNT_BYTES..].split_at(count * entry);
    if bytes[BODY_AT + 2..BODY_AT + COUNT_BYTES].iter().chain(unused).any(|byte| *byte != 0) {
        return Err(WireError::Reserved { field: "a plan" });
    }
    Ok((names(bytes), used.chunks_exact(entry)))
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
