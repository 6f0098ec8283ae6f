//! Arenas cut in power-of-two slices: which bytes of which arena are whose. The memory itself is elsewhere.
//!
//! A buddy allocator. A slice is aligned to its own size, so to pages at least: registering one for a peer pins no page
//! that belongs to another.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// Smallest slice: a page.
pub const SLICE_MIN_BYTES: u64 = 4096;

/// Ceilings of a set of arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaLimits {
    /// Bytes of a new arena; one for a larger slice is as large as that. A power of two.
    pub arena_bytes: u64,
    /// Bytes of all arenas.
    pub bytes_max: u64,
    /// How many arenas.
    pub arenas_max: usize,
    /// How long an empty arena is kept. The last one is kept for ever.
    pub idle: Duration,
}

/// Names an arena. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArenaKey(u64);

/// Bytes of an arena that are one owner's alone. Not `Clone`: freeing it twice does not compile.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a slice that is dropped is lost to its arena"]
pub struct Slice {
    arena: ArenaKey,
    offset: u64,
    order: u32,
}

impl Slice {
    /// Where it lies.
    pub const fn arena(&self) -> ArenaKey {
        self.arena
    }

    /// Its first byte there.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Its bytes: a power of two, at least what was asked for.
    pub const fn len(&self) -> u64 {
        SLICE_MIN_BYTES << self.order
    }

    /// Never.
    pub const fn is_empty(&self) -> bool {
        false
    }
}

/// Why there is no slice now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSlice {
    /// An arena of so many bytes would help, and the ceilings allow it: make the memory, then [`Arenas::add`].
    Grow {
        /// A power of two.
        arena_bytes: u64,
    },
    /// The ceilings do not allow another arena that is large enough.
    Ceiling,
}

#[derive(Debug)]
struct Arena {
    bytes: u64,
    /// Offsets of free slices by order.
    free: Vec<BTreeSet<u64>>,
    used: u64,
    empty_since: Option<Instant>,
}

/// Sums over all arenas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaGauges {
    /// How many.
    pub arenas: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes in slices.
    pub used: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Arenas {
    limits: ArenaLimits,
    made: BTreeMap<ArenaKey, Arena>,
    next: u64,
    /// Bytes of those that are being made.
    growing_bytes: u64,
    growing: usize,
}

impl Arenas {
    /// Without any arena.
    pub const fn new(limits: ArenaLimits) -> Self {
        Self { limits, made: BTreeMap::new(), next: 0, growing_bytes: 0, growing: 0 }
    }

    /// A slice of at least `bytes`.
    ///
    /// # Errors
    ///
    /// [`NoSlice`]. After [`NoSlice::Grow`] the bytes count against the ceiling until [`Arenas::add`] or
    /// [`Arenas::grow_failed`].
    pub fn allocate(&mut self, bytes: u64) -> Result<Slice, NoSlice> {
        let order = order_of(bytes).ok_or(NoSlice::Ceiling)?;
        for (key, arena) in &mut self.made {
            if let Some(offset) = arena.take(order) {
                return Ok(Slice { arena: *key, offset, order });
            }
        }
        let arena_bytes = self.limits.arena_bytes.max(SLICE_MIN_BYTES << order);
        let sum = self.gauges().bytes.saturating_add(self.growing_bytes).saturating_add(arena_bytes);
        if sum > self.limits.bytes_max || self.made.len() + self.growing >= self.limits.arenas_max {
            return Err(NoSlice::Ceiling);
        }
        self.growing_bytes += arena_bytes;
        self.growing += 1;
        Err(NoSlice::Grow { arena_bytes })
    }

    /// An arena was made, as [`NoSlice::Grow`] said.
    ///
    /// # Panics
    ///
    /// When it is of another size than that.
    pub fn add(&mut self, now: Instant, bytes: u64) -> ArenaKey {
        self.grow_failed(bytes);
        let key = ArenaKey(self.next);
        self.next += 1;
        let top = order_of(bytes).expect("as Grow said");
        assert_eq!(bytes, SLICE_MIN_BYTES << top, "arenas are a power of two");
        let mut free = vec![BTreeSet::new(); top as usize + 1];
        free[top as usize].insert(0);
        self.made.insert(key, Arena { bytes, free, used: 0, empty_since: Some(now) });
        key
    }

    /// The arena could not be made.
    pub fn grow_failed(&mut self, bytes: u64) {
        self.growing_bytes = self.growing_bytes.saturating_sub(bytes);
        self.growing = self.growing.saturating_sub(1);
    }

    /// Gives a slice back.
    ///
    /// # Panics
    ///
    /// When the slice is of another set of arenas: our own bug.
    #[expect(clippy::needless_pass_by_value, reason = "a slice that was given back is gone")]
    pub fn free(&mut self, now: Instant, slice: Slice) {
        let arena = self.made.get_mut(&slice.arena).expect("an arena with a slice is kept");
        arena.give(slice.offset, slice.order);
        if arena.used == 0 {
            arena.empty_since = Some(now);
        }
    }

    /// Takes out arenas that have been empty for long enough; all but the last one.
    pub fn release_idle(&mut self, now: Instant) -> Vec<ArenaKey> {
        let mut gone = Vec::new();
        let idle = |arena: &Arena| {
            let since = arena.empty_since.filter(|_| arena.used == 0);
            since.is_some_and(|since| now.saturating_duration_since(since) >= self.limits.idle)
        };
        // The newest first: growth was for a peak.
        let keys: Vec<ArenaKey> =
            self.made.iter().rev().filter(|(_, arena)| idle(arena)).map(|(key, _)| *key).collect();
        for key in keys {
            if self.made.len() > 1 {
                self.made.remove(&key);
                gone.push(key);
            }
        }
        gone
    }

    /// When [`Arenas::release_idle`] may have something to do next.
    pub fn next_idle(&self) -> Option<Instant> {
        if self.made.len() < 2 {
            return None;
        }
        self.made.values().filter_map(|arena| arena.empty_since.map(|since| since + self.limits.idle)).min()
    }

    /// Sums.
    pub fn gauges(&self) -> ArenaGauges {
        self.made.values().fold(ArenaGauges::default(), |sum, arena| ArenaGauges {
            arenas: sum.arenas + 1,
            bytes: sum.bytes + arena.bytes,
            used: sum.used + arena.used,
        })
    }
}

/// The smallest order that holds so many bytes.
fn order_of(bytes: u64) -> Option<u32> {
    let pages = bytes.div_ceil(SLICE_MIN_BYTES).max(1);
    pages.checked_next_power_of_two().map(u64::trailing_zeros).filter(|order| *order < 52)
}

impl Arena {
    fn take(&mut self, order: u32) -> Option<u64> {
        let order = order as usize;
        let from = (order..self.free.len()).find(|&order| !self.free[order].is_empty())?;
        let offset = self.free[from].pop_first()?;
        // What is too large is halved; the upper halves stay free.
        for smaller in order..from {
            self.free[smaller].insert(offset + (SLICE_MIN_BYTES << smaller));
        }
        self.used += SLICE_MIN_BYTES << order;
        self.empty_since = None;
        Some(offset)
    }

    fn give(&mut self, mut offset: u64, order: u32) {
        let mut order = order as usize;
        self.used -= SLICE_MIN_BYTES << order;
        while order + 1 < self.free.len() {
            let buddy = offset ^ (SLICE_MIN_BYTES << order);
            if !self.free[order].remove(&buddy) {
                break;
            }
            offset = offset.min(buddy);
            order += 1;
        }
        let fresh = self.free[order].insert(offset);
        assert!(fresh, "a slice is given back once");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KIB: u64 = 1024;
    const LIMITS: ArenaLimits =
        ArenaLimits { arena_bytes: 64 * KIB, bytes_max: 256 * KIB, arenas_max: 3, idle: Duration::from_secs(60) };

    /// As the shell does it.
    fn allocate(arenas: &mut Arenas, now: Instant, bytes: u64) -> Option<Slice> {
        loop {
            match arenas.allocate(bytes) {
                Ok(slice) => return Some(slice),
                Err(NoSlice::Grow { arena_bytes }) => drop(arenas.add(now, arena_bytes)),
                Err(NoSlice::Ceiling) => return None,
            }
        }
    }

    #[test]
    fn slices_are_powers_of_two_from_a_page_on() {
        let mut arenas = Arenas::new(LIMITS);
        let now = Instant::now();
        for (asked, got) in [(0, 4), (1, 4), (4096, 4), (4097, 8), (33 * KIB, 64), (100 * KIB, 128)] {
            let slice = allocate(&mut arenas, now, asked).unwrap();
            assert_eq!(slice.len(), got * KIB, "{asked}");
            assert_eq!(slice.offset() % slice.len(), 0);
        }
        assert!(allocate(&mut arenas, now, u64::MAX).is_none());
    }

    ///
    #[test]
    fn the_ceilings_hold_while_arenas_are_being_made() {
        let mut arenas = Arenas::new(LIMITS);
        for _ in 0..3 {
            assert_eq!(arenas.allocate(1), Err(NoSlice::Grow { arena_bytes: 64 * KIB }));
        }
        assert_eq!(arenas.allocate(1), Err(NoSlice::Ceiling), "three arenas are on their way");
        arenas.grow_failed(64 * KIB);
        assert!(matches!(arenas.allocate(1), Err(NoSlice::Grow { .. })));
        let mut arenas = Arenas::new(LIMITS);
        assert_eq!(arenas.allocate(256 * KIB), Err(NoSlice::Grow { arena_bytes: 256 * KIB }));
        arenas.grow_failed(256 * KIB);
        assert_eq!(arenas.allocate(257 * KIB), Err(NoSlice::Ceiling));
    }

    ///
    #[test]
    fn empty_arenas_go_after_a_while_but_for_the_last() {
        let mut arenas = Arenas::new(LIMITS);
        let t0 = Instant::now();
        let slices: Vec<Slice> = (0..3).map(|_| allocate(&mut arenas, t0, 64 * KIB).unwrap()).collect();
        assert_eq!((arenas.gauges().arenas, arenas.next_idle()), (3, None));
        let mut slices = slices.into_iter();
        let (held, rest) = (slices.next().unwrap(), slices);
        rest.for_each(|slice| arenas.free(t0, slice));
        assert_eq!(arenas.next_idle(), Some(t0 + LIMITS.idle));
        assert_eq!(arenas.release_idle(t0 + Duration::from_secs(59)), []);
        assert_eq!(arenas.release_idle(t0 + LIMITS.idle).len(), 2);
        arenas.free(t0, held);
        assert_eq!(arenas.release_idle(t0 + 9 * LIMITS.idle), [], "the last one stays");
        assert_eq!(arenas.gauges(), ArenaGauges { arenas: 1, bytes: 64 * KIB, used: 0 });
    }

    proptest! {
        /// slices are large enough, aligned, within their arena, and never overlap; what is given back can be had
        /// again, down to the whole arena.
        #[test]
        fn slices_never_overlap(ops in proptest::collection::vec((any::<bool>(), 0u64..80 * KIB, any::<usize>()), 1..200)) {
            let mut arenas = Arenas::new(LIMITS);
            let now = Instant::now();
            let mut live: Vec<Slice> = Vec::new();
            for (give, bytes, which) in ops {
                if give && !live.is_empty() {
                    let slice = live.swap_remove(which % live.len());
                    arenas.free(now, slice);
                } else if let Some(slice) = allocate(&mut arenas, now, bytes) {
                    prop_assert!(slice.len() >= bytes && slice.offset() % slice.len() == 0);
                    prop_assert!(slice.offset() + slice.len() <= arenas.made[&slice.arena()].bytes);
                    for other in &live {
                        let apart = other.arena() != slice.arena()
                            || other.offset() + other.len() <= slice.offset()
                            || slice.offset() + slice.len() <= other.offset();
                        prop_assert!(apart, "{:?} and {:?}", other, slice);
                    }
                    live.push(slice);
                }
                let gauges = arenas.gauges();
                prop_assert_eq!(gauges.used, live.iter().map(Slice::len).sum::<u64>());
                prop_assert!(gauges.bytes <= LIMITS.bytes_max && gauges.arenas <= LIMITS.arenas_max);
            }
            for slice in live {
                arenas.free(now, slice);
            }
            for arena in arenas.made.values() {
                let free: usize = arena.free.iter().map(BTreeSet::len).sum();
                prop_assert_eq!((free, arena.free.last().map(BTreeSet::len)), (1, Some(1)), "whole again");
            }
        }
    }
}
