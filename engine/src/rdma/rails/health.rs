//! Pairs of NICs that fail. Three errors within 10 s let a pair rest for 30 s; a pair that fails again so rests twice as
//! long each time, up to 300 s. The end of a rest forgets the errors; a success forgets the rests as well.
//!
//! Pairs without a fault take no room: what is kept is bounded by [`KEPT_MAX`].

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

/// Errors that make a pair rest, if they come within [`ERROR_SPAN`].
const ERRORS: usize = 3;
/// How long an error counts.
const ERROR_SPAN: Duration = Duration::from_secs(10);
/// The first rest.
const FIRST_REST: Duration = Duration::from_secs(30);
/// The longest.
const LONGEST_REST: Duration = Duration::from_secs(300);
/// Pairs with faults that are remembered at once.
const KEPT_MAX: usize = 1024;

/// What is known of all pairs.
pub(crate) struct Health<K> {
    faulty: HashMap<K, Faults>,
}

/// One pair's faults.
struct Faults {
    /// The latest ones, oldest first.
    errors: [Option<Instant>; ERRORS],
    resting_until: Option<Instant>,
    next_rest: Duration,
}

impl<K> Default for Health<K> {
    fn default() -> Self {
        Self { faulty: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash> Health<K> {
    /// Until when a pair rests; `None` if it does not.
    pub(crate) fn resting_until(&self, pair: K, now: Instant) -> Option<Instant> {
        self.faulty.get(&pair)?.resting_until.filter(|until| *until > now)
    }

    /// How many rest.
    pub(crate) fn resting(&self, now: Instant) -> usize {
        self.faulty.values().filter(|faults| faults.resting_until.is_some_and(|until| until > now)).count()
    }

    /// Something has gone over it.
    pub(crate) fn succeeded(&mut self, pair: K) {
        self.faulty.remove(&pair);
    }

    /// Something has failed on it. The rest that begins with it, if one does.
    pub(crate) fn failed(&mut self, pair: K, now: Instant) -> Option<Duration> {
        if self.faulty.len() >= KEPT_MAX && !self.faulty.contains_key(&pair) {
            self.forget(now);
        }
        self.faulty.entry(pair).or_default().failed(now)
    }

    /// Makes room: all that do not rest, and if that is not enough, all.
    fn forget(&mut self, now: Instant) {
        self.faulty.retain(|_, faults| faults.resting_until.is_some_and(|until| until > now));
        if self.faulty.len() >= KEPT_MAX {
            self.faulty.clear();
        }
    }
}

impl Default for Faults {
    fn default() -> Self {
        Self { errors: [None; ERRORS], resting_until: None, next_rest: FIRST_REST }
    }
}

impl Faults {
    fn failed(&mut self, now: Instant) -> Option<Duration> {
        match self.resting_until {
            // What was under way when the rest began, or was tried for want of any other pair.
            Some(until) if until > now => return None,
            Some(_) => {
                self.resting_until = None;
                self.errors = [None; ERRORS];
            }
            None => {}
        }
        self.errors.rotate_left(1);
        self.errors[ERRORS - 1] = Some(now);
        let oldest = self.errors[0]?;
        if now.saturating_duration_since(oldest) > ERROR_SPAN {
            return None;
        }
        let rest = self.next_rest;
        self.resting_until = Some(now + rest);
        self.next_rest = (rest * 2).min(LONGEST_REST);
        Some(rest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    /// Fails until a rest begins; its length.
    fn fail(health: &mut Health<u8>, now: Instant) -> Duration {
        assert_eq!((health.failed(1, now), health.failed(1, now)), (None, None));
        health.failed(1, now).expect("the third")
    }

    #[test]
    fn three_errors_in_ten_seconds_and_not_two_and_not_three_in_eleven() {
        let start = Instant::now();
        for (times, rests) in [(&[0, 5, 10][..], true), (&[0, 5, 11], false), (&[0, 5], false), (&[0, 8, 16, 18], true)]
        {
            let mut health = Health::default();
            let last = times.iter().fold(None, |_, at| health.failed(1, start + secs(*at)));
            assert_eq!(last.is_some(), rests, "{times:?}");
            assert_eq!(health.resting_until(2, start), None, "another pair is not concerned");
        }
    }

    #[test]
    fn rests_double_up_to_five_minutes_and_end_by_themselves() {
        let (mut health, mut now) = (Health::default(), Instant::now());
        for expected in [30, 60, 120, 240, 300, 300] {
            let rest = fail(&mut health, now);
            assert_eq!(rest, secs(expected));
            assert_eq!((health.failed(1, now), health.resting(now)), (None, 1), "not longer for one more");
            now += rest;
            assert_eq!(health.resting_until(1, now.checked_sub(secs(1)).expect("later")), Some(now));
            assert_eq!((health.resting_until(1, now), health.resting(now)), (None, 0));
        }
    }

    #[test]
    fn success_forgets_everything() {
        let (mut health, now) = (Health::default(), Instant::now());
        fail(&mut health, now);
        health.succeeded(1);
        assert_eq!(health.resting_until(1, now), None);
        assert_eq!(fail(&mut health, now), FIRST_REST, "as if for the first time");
    }

    #[test]
    fn the_faults_of_many_pairs_are_bounded() {
        let (mut health, now) = (Health::default(), Instant::now());
        for pair in 0..10 * KEPT_MAX {
            for _ in 0..ERRORS {
                health.failed(pair, now);
            }
            assert!(health.faulty.len() <= KEPT_MAX);
        }
        assert!(health.resting_until(10 * KEPT_MAX - 1, now).is_some(), "the latest is known");
    }

    proptest! {
        /// Against the rule in plain words, over a list of everything that has happened.
        #[test]
        fn it_is_the_rule(steps in proptest::collection::vec((0_u64..400, 0_u8..8), 1..80)) {
            let (mut health, start, mut at) = (Health::default(), Instant::now(), 0);
            let (mut errors, mut until, mut next) = (Vec::<u64>::new(), 0, 30);
            for (step, what) in steps {
                // Mostly short steps, as errors come.
                at += if step < 300 { step / 100 } else { step - 300 };
                if until != 0 && at >= until {
                    (errors, until) = (Vec::new(), 0);
                }
                if what == 0 {
                    health.succeeded(1);
                    (errors, until, next) = (Vec::new(), 0, 30);
                } else {
                    let began = health.failed(1, start + secs(at));
                    let mut expected = None;
                    if until == 0 {
                        errors.push(at);
                        if errors.iter().filter(|error| **error + 10 >= at).count() >= 3 {
                            (expected, until) = (Some(secs(next)), at + next);
                            next = (2 * next).min(300);
                        }
                    }
                    prop_assert_eq!(began, expected);
                }
                let resting = health.resting_until(1, start + secs(at)).is_some();
                prop_assert_eq!(resting, until > at);
            }
        }
    }
}
