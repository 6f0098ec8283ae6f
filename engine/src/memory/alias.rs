//! Which allocation covers which addresses, over all engines of the process.
//!
//! Two wrappers of the same bytes would have two locks, and then no order. An entry lives as long as its registration
//! is active or held by anyone, and holds nothing that a destructor of the caller's hangs on.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::address::Span;

/// Keyed by start and a serial number; the value is the end and the allocation.
static CLAIMS: Mutex<Claims> = Mutex::new(Claims { next_serial: 0, by_start: BTreeMap::new() });

struct Claims {
    next_serial: u64,
    by_start: BTreeMap<(u64, u64), (u64, usize)>,
}

/// The addresses of one registration, claimed for its allocation until this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    key: (u64, u64),
}

/// Another allocation has part of the range.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Claimed {
    pub(super) by: Span,
}

/// Claims `span` for the allocation with this identity, unless another has part of it.
pub(super) fn claim(span: Span, allocation: usize) -> Result<Claim, Claimed> {
    let mut claims = lock();
    // What overlaps starts before our end and ends after our start.
    let before_end = claims.by_start.range(..(span.end(), 0));
    for ((start, _), (end, holder)) in before_end {
        if *end > span.start && *holder != allocation {
            return Err(Claimed { by: Span { start: *start, length: end - start } });
        }
    }
    let key = (span.start, claims.next_serial);
    claims.next_serial += 1;
    claims.by_start.insert(key, (span.end(), allocation));
    Ok(Claim { key })
}

impl Drop for Claim {
    fn drop(&mut self) {
        lock().by_start.remove(&self.key);
    }
}

fn lock() -> MutexGuard<'static, Claims> {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// High addresses that no test's real memory has.
    const BASE: u64 = 0xffff_8000_0000_0000;

    fn span(start: u64, length: u64) -> Span {
        Span { start: BASE + start, length }
    }

    #[test]
    fn one_allocation_may_overlap_itself_and_no_other() {
        let a = claim(span(100, 100), 1).expect("free");
        let inside = claim(span(120, 10), 1).expect("the same allocation");
        for (start, length) in [(100, 100), (0, 101), (199, 1), (150, 10), (0, 1000)] {
            let by = claim(span(start, length), 2).expect_err("covered").by;
            assert!(by == span(100, 100) || by == span(120, 10), "{by:?}");
        }
        let neighbours = [claim(span(0, 100), 2).expect("ends before"), claim(span(200, 1), 2).expect("starts after")];
        drop(a);
        assert_eq!(claim(span(125, 1), 3).expect_err("the smaller one is still there").by, span(120, 10));
        drop(inside);
        drop(claim(span(100, 100), 3).expect("free again"));
        drop(neighbours);
    }
}
