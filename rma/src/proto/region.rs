//! The life of each region: mapped, in use, parked, gone. Holds no memory: whoever maps and unmaps asks here what to do.
//!
//! ```text
//! mint ─► Mapping ─ mapped ─► Live ─ unmap, idle ──────────────► Unmapping ─ unmapped ─► gone
//!            │                  │                                  ▲   │
//!            │                  └─ unmap, in use ─► Parked ─ last end   └ unmap_failed ─► Stuck
//!            └─ abandoned, or unmap ─► rolled back when mapped
//! ```
//!
//! Invariant: a region that operations use is Live or Parked, and Parked ones take no new ones.

use std::collections::BTreeMap;

/// Names a region within one run of a worker. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u64);

impl std::fmt::Display for RegionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "region {}", self.0)
    }
}

/// All regions of one bulk port. `W` is who waits for an unmap.
#[derive(Debug)]
pub struct Regions<W> {
    last: u64,
    table: BTreeMap<RegionId, State<W>>,
}

#[derive(Debug)]
enum State<W> {
    /// Being registered. `unwanted`: nobody will use it.
    Mapping { unwanted: bool, waiters: Vec<W> },
    /// Usable, by so many operations at the moment.
    Live { uses: u32 },
    /// To be unmapped when the last operation ends.
    Parked { uses: u32, waiters: Vec<W> },
    /// Being deregistered.
    Unmapping { waiters: Vec<W> },
    /// Could not be deregistered: refused to operations, may be unmapped again.
    Stuck,
}

/// What to do with a registration that has just been made.
#[derive(Debug, PartialEq, Eq)]
pub enum Mapped {
    /// Keep it.
    Keep,
    /// Nobody waits for it any more: deregister it, then say [`Regions::unmapped`].
    RollBack,
}

/// What an unmap asks of its caller.
#[derive(Debug, PartialEq, Eq)]
pub enum Unmap<W> {
    /// Deregister it now, then say [`Regions::unmapped`] or [`Regions::unmap_failed`].
    Now,
    /// The waiter is answered later.
    Waits,
    /// There is no such region; here is the waiter back.
    Unknown(W),
}

/// Why an operation may not use a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UseError {
    /// Never mapped here, or unmapped since.
    #[error("{id} is not mapped: it never was, or it was unmapped")]
    Unknown {
        /// Which.
        id: RegionId,
    },
    /// Its map has not ended yet.
    #[error("{id} is still being mapped")]
    Mapping {
        /// Which.
        id: RegionId,
    },
    /// It is being unmapped: new operations are refused from the call of unmap on.
    #[error("{id} is being unmapped")]
    Unmapping {
        /// Which.
        id: RegionId,
    },
}

impl<W> Default for Regions<W> {
    fn default() -> Self {
        Self { last: 0, table: BTreeMap::new() }
    }
}

impl<W> Regions<W> {
    /// A new id, before anything is registered for it.
    pub fn mint(&mut self) -> RegionId {
        self.last += 1;
        let id = RegionId(self.last);
        self.table.insert(id, State::Mapping { unwanted: false, waiters: Vec::new() });
        id
    }

    /// The registration is there.
    pub fn mapped(&mut self, id: RegionId) -> Mapped {
        match self.table.get_mut(&id) {
            Some(State::Mapping { unwanted: true, waiters }) => {
                let waiters = std::mem::take(waiters);
                self.table.insert(id, State::Unmapping { waiters });
                Mapped::RollBack
            }
            Some(state @ State::Mapping { .. }) => {
                *state = State::Live { uses: 0 };
                Mapped::Keep
            }
            _ => Mapped::RollBack,
        }
    }

    /// No registration came of it. Gives those who had asked to unmap it meanwhile: their wish is fulfilled.
    pub fn map_failed(&mut self, id: RegionId) -> Vec<W> {
        match self.table.remove(&id) {
            Some(State::Mapping { waiters, .. }) => waiters,
            _ => Vec::new(),
        }
    }

    /// Nobody waits for the map any more. `true`: it is mapped and idle, deregister it now, then say
    /// [`Regions::unmapped`].
    pub fn abandon(&mut self, id: RegionId) -> bool {
        match self.table.get_mut(&id) {
            Some(State::Mapping { unwanted, .. }) => *unwanted = true,
            Some(state @ State::Live { uses: 0 }) => {
                *state = State::Unmapping { waiters: Vec::new() };
                return true;
            }
            Some(state @ State::Live { .. }) => {
                let State::Live { uses } = *state else { return false };
                *state = State::Parked { uses, waiters: Vec::new() };
            }
            _ => {}
        }
        false
    }

    /// An operation begins to use it. Each is to be ended by [`Regions::end_use`].
    ///
    /// # Errors
    ///
    /// [`UseError`].
    pub fn begin_use(&mut self, id: RegionId) -> Result<(), UseError> {
        match self.table.get_mut(&id) {
            Some(State::Live { uses }) => {
                *uses += 1;
                Ok(())
            }
            Some(State::Mapping { .. }) => Err(UseError::Mapping { id }),
            Some(State::Parked { .. } | State::Unmapping { .. } | State::Stuck) => Err(UseError::Unmapping { id }),
            None => Err(UseError::Unknown { id }),
        }
    }

    /// An operation has ended. `true`: it was the last one of a parked region, deregister that now.
    pub fn end_use(&mut self, id: RegionId) -> bool {
        match self.table.get_mut(&id) {
            Some(State::Live { uses }) => {
                *uses = uses.saturating_sub(1);
                false
            }
            Some(State::Parked { uses, waiters }) => {
                *uses = uses.saturating_sub(1);
                if *uses > 0 {
                    return false;
                }
                let waiters = std::mem::take(waiters);
                self.table.insert(id, State::Unmapping { waiters });
                true
            }
            _ => false,
        }
    }

    /// Somebody wants it unmapped. All who ask while it is under way share one unmap.
    pub fn unmap(&mut self, id: RegionId, waiter: W) -> Unmap<W> {
        let Some(state) = self.table.get_mut(&id) else { return Unmap::Unknown(waiter) };
        match state {
            State::Mapping { unwanted, waiters } => {
                *unwanted = true;
                waiters.push(waiter);
                Unmap::Waits
            }
            State::Parked { waiters, .. } | State::Unmapping { waiters } => {
                waiters.push(waiter);
                Unmap::Waits
            }
            State::Live { uses: 0 } | State::Stuck => {
                *state = State::Unmapping { waiters: vec![waiter] };
                Unmap::Now
            }
            State::Live { uses } => {
                *state = State::Parked { uses: *uses, waiters: vec![waiter] };
                Unmap::Waits
            }
        }
    }

    /// It is deregistered. Gives those who waited for that.
    pub fn unmapped(&mut self, id: RegionId) -> Vec<W> {
        match self.table.remove(&id) {
            Some(State::Unmapping { waiters }) => waiters,
            _ => Vec::new(),
        }
    }

    /// It could not be deregistered, or must not be: it stays, for nobody's use. Gives those who waited.
    pub fn unmap_failed(&mut self, id: RegionId) -> Vec<W> {
        match self.table.insert(id, State::Stuck) {
            Some(State::Unmapping { waiters } | State::Parked { waiters, .. } | State::Mapping { waiters, .. }) => {
                waiters
            }
            _ => Vec::new(),
        }
    }

    /// For the teardown: each that is to be deregistered now. Those in use follow with their last operation, and those
    /// being mapped roll back by themselves.
    pub fn close(&mut self) -> Vec<RegionId> {
        let mut now = Vec::new();
        for (id, state) in &mut self.table {
            match state {
                State::Mapping { unwanted, .. } => *unwanted = true,
                State::Unmapping { .. } | State::Parked { .. } => {}
                State::Live { uses: 0 } | State::Stuck => {
                    *state = State::Unmapping { waiters: Vec::new() };
                    now.push(*id);
                }
                State::Live { uses } => *state = State::Parked { uses: *uses, waiters: Vec::new() },
            }
        }
        now
    }

    /// Regions that exist, in whatever state.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Regions whose unmap waits for operations.
    pub fn parked(&self) -> usize {
        self.table.values().filter(|state| matches!(state, State::Parked { .. })).count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn live() -> (Regions<u32>, RegionId) {
        let mut regions = Regions::default();
        let id = regions.mint();
        assert_eq!(regions.mapped(id), Mapped::Keep);
        (regions, id)
    }

    #[test]
    fn unmap_of_an_idle_region_is_at_once_and_its_id_is_never_used_again() {
        let (mut regions, id) = live();
        assert_eq!(regions.unmap(id, 1), Unmap::Now);
        assert_eq!(regions.unmap(id, 2), Unmap::Waits, "the second one joins");
        assert_eq!(regions.unmapped(id), [1, 2]);
        assert_eq!(regions.unmap(id, 3), Unmap::Unknown(3));
        assert_eq!(regions.begin_use(id), Err(UseError::Unknown { id }));
        assert_ne!(regions.mint(), id);
    }

    /// R-17, R-18: while the device can touch it, it is never "no such region".
    #[test]
    fn unmap_under_operations_parks_refuses_new_ones_and_answers_all_after_the_last() {
        let (mut regions, id) = live();
        regions.begin_use(id).unwrap();
        regions.begin_use(id).unwrap();
        assert_eq!((regions.unmap(id, 1), regions.parked()), (Unmap::Waits, 1));
        assert_eq!(regions.begin_use(id), Err(UseError::Unmapping { id }));
        assert!(!regions.end_use(id));
        assert_eq!(regions.unmap(id, 2), Unmap::Waits);
        assert!(regions.end_use(id), "the last one");
        assert_eq!(regions.unmap(id, 3), Unmap::Waits);
        assert_eq!(regions.unmapped(id), [1, 2, 3]);
        assert!(regions.is_empty());
    }

    /// R-16: dropped before, during and after the registration.
    #[test]
    fn a_map_that_nobody_waits_for_is_rolled_back() {
        let mut regions = Regions::<u32>::default();
        let id = regions.mint();
        assert_eq!(regions.begin_use(id), Err(UseError::Mapping { id }));
        assert!(!regions.abandon(id));
        assert_eq!(regions.unmap(id, 1), Unmap::Waits);
        assert_eq!(regions.mapped(id), Mapped::RollBack);
        assert_eq!(regions.unmapped(id), [1]);
        let (mut regions, id) = live();
        assert!(regions.abandon(id), "mapped, but the answer was not taken");
        assert_eq!(regions.unmapped(id), []);
        assert!(regions.is_empty());
    }

    #[test]
    fn a_failed_map_fulfils_the_unmaps_that_came_meanwhile() {
        let mut regions = Regions::default();
        let id = regions.mint();
        regions.unmap(id, 7);
        assert_eq!(regions.map_failed(id), [7]);
        assert!(regions.is_empty());
    }

    #[test]
    fn what_cannot_be_deregistered_stays_and_may_be_tried_again() {
        let (mut regions, id) = live();
        assert_eq!(regions.unmap(id, 1), Unmap::Now);
        assert_eq!(regions.unmap_failed(id), [1]);
        assert_eq!(regions.begin_use(id), Err(UseError::Unmapping { id }));
        assert_eq!(regions.unmap(id, 2), Unmap::Now);
        assert_eq!(regions.unmapped(id), [2]);
    }

    proptest! {
        /// Against a plain model: each waiter is answered once, nothing is deregistered in use, nothing is left.
        #[test]
        fn every_waiter_is_answered_once_and_nothing_goes_in_use(steps in prop::collection::vec((0u8..7, 0u64..4), 0..200)) {
            let mut regions = Regions::<u32>::default();
            let (mut uses, mut busy) = ([0u32; 5], [false; 5]);
            let (mut asked, mut answered) = (0u32, 0usize);
            for (what, which) in steps {
                let (id, at) = (RegionId(which + 1), usize::try_from(which).unwrap() + 1);
                match what {
                    0 => { if regions.len() < 4 && regions.last < 4 { regions.mint(); } }
                    1 => {
                        let was = matches!(regions.table.get(&id), Some(State::Mapping { .. }));
                        if was && regions.mapped(id) == Mapped::RollBack { busy[at] = true; }
                    }
                    2 => { if regions.begin_use(id).is_ok() { uses[at] += 1; prop_assert!(!busy[at]); } }
                    3 => if uses[at] > 0 {
                        uses[at] -= 1;
                        if regions.end_use(id) { prop_assert_eq!(uses[at], 0); busy[at] = true; }
                    }
                    4 => {
                        asked += 1;
                        match regions.unmap(id, asked) {
                            Unmap::Now => { prop_assert!(uses[at] == 0 && !busy[at]); busy[at] = true; }
                            Unmap::Waits => {}
                            Unmap::Unknown(_) => answered += 1,
                        }
                    }
                    5 => { if busy[at] { busy[at] = false; answered += regions.unmapped(id).len(); } }
                    _ => { if regions.abandon(id) { prop_assert_eq!(uses[at], 0); busy[at] = true; } }
                }
            }
            for at in 1..5 {
                let id = RegionId(u64::try_from(at).unwrap());
                while uses[at] > 0 { uses[at] -= 1; busy[at] |= regions.end_use(id); }
                if matches!(regions.table.get(&id), Some(State::Mapping { .. })) {
                    busy[at] |= regions.mapped(id) == Mapped::RollBack;
                }
                if busy[at] { answered += regions.unmapped(id).len(); }
            }
            for id in regions.close() { answered += regions.unmapped(id).len(); }
            prop_assert!(regions.is_empty());
            prop_assert_eq!(answered, asked as usize);
        }
    }
}
