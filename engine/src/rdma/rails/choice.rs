//! Which NIC, and which path from it, takes the next bytes.
//!
//! score = (bytes in flight + bytes to come) / estimated bandwidth × penalty of the distance; the lowest wins, and among
//! equals chance. Every 100th choice takes the NICs in turn, so that one which was slow once is seen again. What is in
//! flight is counted for each NIC of ours, over all peers: that is what they share.
//!
//! Invariant: the bytes in flight of a NIC are the sum of its [`Charged`]s that are not released.

use std::time::Duration;

use super::super::config::RailChoice as Mode;

/// How far a path leads: from the memory to our NIC, and from it to the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Distance {
    /// Our NIC is on the engine's NUMA node, as far as is known, and the peer's is its partner.
    Near,
    /// One of the two is not so.
    Far,
    /// Neither.
    Farthest,
}

/// A path that could be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Which NIC of ours.
    pub(crate) nic: usize,
    pub(crate) distance: Distance,
}

/// Bytes in flight over a NIC. Given back once: neither `Copy` nor `Clone`.
#[must_use = "bytes in flight that are never released drive a NIC out of use"]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Charged {
    nic: usize,
    bytes: u64,
}

/// What is known of a NIC.
#[derive(Clone, Copy, Debug, Default)]
struct Nic {
    in_flight: u64,
    speed: Option<Speed>,
}

/// In bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Speed {
    /// No port tells it here, so it is the first that was seen.
    nominal: u64,
    estimate: u64,
}

/// All NICs of an engine.
pub(crate) struct Chooser {
    nics: Vec<Nic>,
    mode: Mode,
    choices: u64,
    turn: usize,
}

impl Distance {
    /// Across NUMA nodes of ours, and across from one side of the network to the other.
    pub(crate) const fn of(remote: bool, across: bool) -> Self {
        match (remote, across) {
            (false, false) => Self::Near,
            (true, true) => Self::Farthest,
            _ => Self::Far,
        }
    }

    /// What a score is multiplied with.
    const fn penalty(self) -> u128 {
        match self {
            Self::Near => 1,
            Self::Far => 5,
            Self::Farthest => 10,
        }
    }
}

/// Of so many choices one is made in turn.
const TURN_EVERY: u64 = 100;

/// Of a NIC of which nothing is known, beside others of which nothing is: any number will do.
const ASSUMED_BYTES_PER_SECOND: u64 = 1 << 30;

/// Fewer bytes tell of latency, not of bandwidth.
const TELLING_BYTES: u64 = 64 << 10;

/// Scores are in picoseconds.
const PER_SECOND: u128 = 1_000_000_000_000;

impl Chooser {
    pub(crate) fn new(nics: usize, mode: Mode) -> Self {
        Self { nics: vec![Nic::default(); nics], mode, choices: 0, turn: 0 }
    }

    /// One of `candidates`, by its place, with `bytes` in flight over its NIC from now on; `None` of none. `chance` decides
    /// among equals.
    pub(crate) fn choose(&mut self, candidates: &[Candidate], bytes: u64, chance: u64) -> Option<(usize, Charged)> {
        self.choices += 1;
        let at = match self.mode {
            Mode::RoundRobin => self.in_turn(candidates),
            Mode::Score if self.choices % TURN_EVERY == 0 => self.in_turn(candidates),
            Mode::Score => self.lowest(candidates, bytes, chance),
        }?;
        Some((at, self.charge(candidates[at].nic, bytes)))
    }

    /// So many bytes are in flight over a NIC from now on.
    pub(crate) fn charge(&mut self, nic: usize, bytes: u64) -> Charged {
        self.nics[nic].in_flight = self.nics[nic].in_flight.saturating_add(bytes);
        Charged { nic, bytes }
    }

    /// They are not in flight any more.
    #[allow(clippy::needless_pass_by_value, reason = "so that it is given back once")]
    pub(crate) fn release(&mut self, charged: Charged) {
        let Charged { nic, bytes } = charged;
        self.nics[nic].in_flight = self.nics[nic].in_flight.saturating_sub(bytes);
    }

    /// So many bytes took so long. The estimate takes a tenth of what was seen, within 0.1 to 10 times the nominal.
    pub(crate) fn observe(&mut self, nic: usize, bytes: u64, took: Duration) {
        if bytes < TELLING_BYTES {
            return;
        }
        let nanos = took.as_nanos().max(1);
        let seen = u64::try_from(u128::from(bytes) * 1_000_000_000 / nanos).unwrap_or(u64::MAX).max(1);
        let speed = &mut self.nics[nic].speed;
        *speed = Some(match *speed {
            None => Speed { nominal: seen, estimate: seen },
            Some(Speed { nominal, estimate }) => {
                let mixed = (u128::from(seen) + 9 * u128::from(estimate)) / 10;
                let mixed = u64::try_from(mixed).unwrap_or(u64::MAX);
                let estimate = mixed.clamp((nominal / 10).max(1), nominal.saturating_mul(10));
                Speed { nominal, estimate }
            }
        });
    }

    /// Bytes in flight over a NIC.
    pub(crate) fn in_flight(&self, nic: usize) -> u64 {
        self.nics[nic].in_flight
    }

    /// Its estimated bandwidth in bytes a second; `None` before anything of size went over it.
    pub(crate) fn estimate(&self, nic: usize) -> Option<u64> {
        self.nics[nic].speed.map(|speed| speed.estimate)
    }

    /// How the pieces of one request are divided among candidates, on NICs of which each is there once: by the inverse of
    /// their scores, with `bytes` to come over each. Every 100th choice leaves none without a piece; in baseline mode all
    /// have as many.
    pub(crate) fn divide(&mut self, candidates: &[Candidate], bytes: u64, pieces: u32) -> Vec<u32> {
        self.choices += 1;
        let equal = || {
            let count = u32::try_from(candidates.len()).unwrap_or(u32::MAX);
            (0..count).map(|at| pieces / count + u32::from(at < pieces % count)).collect()
        };
        match self.mode {
            Mode::RoundRobin => equal(),
            Mode::Score => {
                let mut shares = self.shares(candidates, bytes, pieces);
                if self.choices % TURN_EVERY == 0 {
                    see_all(&mut shares);
                }
                shares
            }
        }
    }

    /// How `pieces` of `bytes` each are divided among candidates: by the inverse of their scores, to the last piece.
    fn shares(&self, candidates: &[Candidate], bytes: u64, pieces: u32) -> Vec<u32> {
        let weights: Vec<u128> = candidates
            .iter()
            // Scores are at least 1; the quotient keeps enough digits of any that are near each other.
            .map(|candidate| (1_u128 << 88) / self.score(*candidate, bytes).min(1 << 60))
            .collect();
        let Some(sum) = weights.iter().copied().reduce(|a, b| a + b) else { return Vec::new() };
        let exact = |weight: u128| (weight * u128::from(pieces) / sum, weight * u128::from(pieces) % sum);
        let mut shares: Vec<u32> =
            weights.iter().map(|weight| u32::try_from(exact(*weight).0).unwrap_or(pieces)).collect();
        // The rest goes to those that lost most by rounding.
        let mut by_rest: Vec<usize> = (0..weights.len()).collect();
        by_rest.sort_by_key(|at| std::cmp::Reverse(exact(weights[*at]).1));
        let left = pieces.saturating_sub(shares.iter().sum());
        by_rest.into_iter().take(usize::try_from(left).unwrap_or(usize::MAX)).for_each(|at| shares[at] += 1);
        shares
    }

    fn lowest(&self, candidates: &[Candidate], bytes: u64, chance: u64) -> Option<usize> {
        let scores: Vec<u128> = candidates.iter().map(|candidate| self.score(*candidate, bytes)).collect();
        let least = scores.iter().min()?;
        let equal: Vec<usize> = (0..scores.len()).filter(|at| scores[*at] == *least).collect();
        // Not 0, as there is a least one.
        Some(equal[usize::try_from(chance % equal.len() as u64).unwrap_or(0)])
    }

    /// The nearest candidate of the next NIC that has one; in baseline mode the next of the nearest.
    fn in_turn(&mut self, candidates: &[Candidate]) -> Option<usize> {
        let nearest = candidates.iter().map(|candidate| candidate.distance).min()?;
        let all = self.mode == Mode::Score;
        let nics = self.nics.len();
        let may = |candidate: &Candidate| all || candidate.distance == nearest;
        let found = (0..nics).map(|step| (self.turn + step) % nics).find_map(|nic| {
            let of_it = candidates.iter().enumerate().filter(|(_, of)| of.nic == nic && may(of));
            of_it.min_by_key(|(_, of)| of.distance).map(|(at, _)| (nic, at))
        });
        let (nic, at) = found?;
        self.turn = (nic + 1) % nics;
        Some(at)
    }

    fn score(&self, candidate: Candidate, bytes: u64) -> u128 {
        let load = u128::from(self.nics[candidate.nic].in_flight) + u128::from(bytes);
        let score = load * PER_SECOND / u128::from(self.speed(candidate.nic)) * candidate.distance.penalty();
        score.max(1)
    }

    /// What is not known is taken to be as good as the best: so it is tried, and known.
    fn speed(&self, nic: usize) -> u64 {
        let best = || (0..self.nics.len()).filter_map(|nic| self.estimate(nic)).max();
        self.estimate(nic).or_else(best).unwrap_or(ASSUMED_BYTES_PER_SECOND)
    }
}

/// One piece for each that has none, from the one that has most.
fn see_all(shares: &mut [u32]) {
    for at in 0..shares.len() {
        let Some(most) = (0..shares.len()).max_by_key(|at| shares[*at]) else { return };
        if shares[at] == 0 && shares[most] > 1 {
            shares[most] -= 1;
            shares[at] = 1;
        }
    }
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
