//! What happens to the two hosts, and when: all of it follows from a seed.

use std::{fmt, ops::RangeInclusive, time::Duration};

use fastrand::Rng;

use crate::network::Side;

/// One thing that is done to the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Blow {
    /// Nothing but the weather.
    Calm,
    /// Nothing arrives, either way.
    Cut,
    /// Nothing leaves the first host.
    SilentHere,
    /// Nothing leaves the second host.
    SilentThere,
    /// The first host's link is down.
    LinkDownHere,
    /// The second host's link is down.
    LinkDownThere,
    /// kill -9 of the peer, which comes back on its port under its name.
    Kill,
    /// The peer shuts down in the middle of the traffic, and comes back likewise.
    Restart,
    /// SIGSTOP of the peer, then SIGCONT.
    Stop,
}

impl Blow {
    const ALL: [Self; 9] = [
        Self::Calm,
        Self::Cut,
        Self::SilentHere,
        Self::SilentThere,
        Self::LinkDownHere,
        Self::LinkDownThere,
        Self::Kill,
        Self::Restart,
        Self::Stop,
    ];

    /// How long it may last, in milliseconds. A path may be cut for longer than any retry or deadline lasts.
    const fn millis(self) -> RangeInclusive<u64> {
        match self {
            Self::Calm => 1000..=6000,
            Self::Cut => 1000..=12_000,
            Self::SilentHere | Self::SilentThere => 500..=10_000,
            Self::LinkDownHere | Self::LinkDownThere | Self::Stop => 300..=8000,
            Self::Kill | Self::Restart => 0..=3000,
        }
    }
}

/// One step of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The weather meanwhile, for `tc netem`, and over whom.
    pub weather: Option<(&'static [Side], String)>,
    /// What happens.
    pub blow: Blow,
    /// For how long.
    pub lasts: Duration,
    /// Before the next step.
    pub pause: Duration,
    /// Of a restarted peer: whether discovery tells the first host of it at once. If not, its hello does.
    pub told: bool,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} for {:?}", self.blow, self.lasts)?;
        if matches!(self.blow, Blow::Kill | Blow::Restart) {
            write!(f, " ({})", if self.told { "told of" } else { "not told of" })?;
        }
        if let Some((sides, netem)) = &self.weather {
            write!(f, " under {netem} over {sides:?}")?;
        }
        write!(f, ", then {:?}", self.pause)
    }
}

/// Steps without end.
#[derive(Debug)]
pub struct Plan {
    rng: Rng,
    /// Blows that were not dealt yet: each kind comes once before any comes again.
    deck: Vec<Blow>,
    longest: Duration,
}

impl Plan {
    /// The plan of a seed; no blow lasts longer than `longest`.
    pub fn new(seed: u64, longest: Duration) -> Self {
        Self { rng: Rng::with_seed(seed), deck: Vec::new(), longest }
    }

    /// How many kinds of blows there are.
    pub const KINDS: usize = Blow::ALL.len();

    fn millis(&mut self, range: RangeInclusive<u64>) -> Duration {
        Duration::from_millis(self.rng.u64(range))
    }

    fn weather(&mut self) -> (&'static [Side], String) {
        const OVER: [&[Side]; 4] = [Side::BOTH, Side::BOTH, &[Side::Here], &[Side::There]];
        let over = OVER[self.rng.usize(..OVER.len())];
        let (delay, jitter) = (self.rng.u32(1..=20), self.rng.u32(0..=3));
        let (loss, duplicate, reorder) = (self.rng.u32(0..=5), self.rng.u32(0..=10), self.rng.u32(0..=25));
        let netem = format!(
            "delay {delay}ms {}ms loss {loss}% duplicate {duplicate}% reorder {reorder}% 25%",
            jitter.min(delay)
        );
        (over, netem)
    }
}

impl Iterator for Plan {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if self.deck.is_empty() {
            self.deck = Blow::ALL.to_vec();
            self.rng.shuffle(&mut self.deck);
        }
        let blow = self.deck.pop()?;
        let weather = match blow {
            Blow::Calm => Some(self.weather()),
            Blow::Kill | Blow::Restart | Blow::Stop if self.rng.bool() => Some(self.weather()),
            // The others are a weather.
            _ => None,
        };
        let lasts = self.millis(blow.millis()).min(self.longest);
        Some(Step { weather, blow, lasts, pause: self.millis(100..=2000), told: self.rng.bool() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_plan_and_another_seed_another() {
        let plan = |seed| Plan::new(seed, Duration::from_secs(12)).take(50).collect::<Vec<_>>();
        assert_eq!(plan(1), plan(1));
        assert_ne!(plan(1), plan(2));
    }

    #[test]
    fn each_kind_comes_before_any_comes_again() {
        let steps: Vec<Step> = Plan::new(3, Duration::from_secs(3)).take(2 * Plan::KINDS).collect();
        for round in steps.chunks(Plan::KINDS) {
            let mut kinds: Vec<Blow> = round.iter().map(|step| step.blow).collect();
            kinds.sort_unstable();
            assert_eq!(kinds, Blow::ALL);
        }
        assert!(steps.iter().all(|step| step.lasts <= Duration::from_secs(3)));
    }
}
