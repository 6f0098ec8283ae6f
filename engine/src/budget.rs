//! Budgets: a count and a number of bytes that are taken before an effect and given back exactly once.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// A budget is spent. Nothing was done; wait for what is in flight, or raise the limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{budget} is exhausted: {asked} more asked for, {used} of {limit} in use")]
pub struct Exhausted {
    /// The field of [`Config`](crate::Config) that holds the limit.
    pub budget: &'static str,
    /// What was asked for, in the field's unit.
    pub asked: u64,
    /// What was taken already.
    pub used: u64,
    /// The limit.
    pub limit: u64,
}

/// Two limits that are taken together or not at all.
pub(crate) struct Budget {
    counts: Limit,
    bytes: Limit,
    used: Mutex<Used>,
}

struct Limit {
    name: &'static str,
    most: u64,
}

/// What is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

/// Part of a budget; given back when dropped, on whichever path that is.
#[must_use = "a charge that is dropped at once protects nothing"]
pub(crate) struct Charge {
    budget: Arc<Budget>,
    part: Used,
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.part.fmt(f)
    }
}

impl Budget {
    /// Limits under the names that errors give them.
    pub(crate) fn new(counts: (&'static str, u64), bytes: (&'static str, u64)) -> Arc<Self> {
        let limit = |(name, most)| Limit { name, most };
        Arc::new(Self { counts: limit(counts), bytes: limit(bytes), used: Mutex::default() })
    }

    /// Takes both or neither.
    pub(crate) fn take(self: &Arc<Self>, count: u64, bytes: u64) -> Result<Charge, Exhausted> {
        let mut used = self.lock();
        let next = Used { count: self.counts.add(used.count, count)?, bytes: self.bytes.add(used.bytes, bytes)? };
        *used = next;
        Ok(Charge { budget: Arc::clone(self), part: Used { count, bytes } })
    }

    pub(crate) fn used(&self) -> Used {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Limit {
    fn add(&self, used: u64, asked: u64) -> Result<u64, Exhausted> {
        let sum = used.checked_add(asked).filter(|sum| *sum <= self.most);
        sum.ok_or(Exhausted { budget: self.name, asked, used, limit: self.most })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut used = self.budget.lock();
        used.count -= self.part.count;
        used.bytes -= self.part.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget() -> Arc<Budget> {
        Budget::new(("things", 3), ("bytes", 100))
    }

    #[test]
    fn a_limit_holds_below_at_and_above() {
        let budget = budget();
        let two = budget.take(2, 99).expect("below both");
        let one = budget.take(1, 1).expect("at both");
        let used = |budget, asked, used, limit| Err(Exhausted { budget, asked, used, limit });
        assert_eq!(budget.take(1, 0).map(drop), used("things", 1, 3, 3));
        drop(one);
        assert_eq!(budget.take(1, 2).map(drop), used("bytes", 2, 99, 100));
        assert_eq!(budget.used(), Used { count: 2, bytes: 99 }, "a refusal takes nothing");
        drop(two);
        assert_eq!(budget.used(), Used::default());
    }

    #[test]
    fn sums_that_overflow_are_refused() {
        let budget = budget();
        let _one = budget.take(1, 1).expect("room");
        assert!(budget.take(u64::MAX, 0).is_err());
        assert!(budget.take(0, u64::MAX).is_err());
    }

    #[test]
    fn a_panic_gives_the_charge_back() {
        let budget = budget();
        let inner = Arc::clone(&budget);
        let thread = std::thread::spawn(move || {
            let _charge = inner.take(3, 100).expect("all");
            panic!("as a callback might");
        });
        assert!(thread.join().is_err());
        assert_eq!(budget.used(), Used::default());
    }
}
