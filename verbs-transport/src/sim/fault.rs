//! What may go wrong, how often, and the dice that decide.

use std::{ops::RangeInclusive, time::Duration};

/// Faults of the device and its fabric. Each `f64` is a probability from 0 (never, the default) to 1 (each time).
#[derive(Clone, Debug)]
pub struct Faults {
    /// A message takes this much longer: chance, for each message.
    pub delay: f64,
    /// How much longer; order within the QP is kept, order between QPs is not.
    pub delay_by: RangeInclusive<Duration>,
    /// A delivered message's acknowledgement, and so the sender's WC, comes this much later: chance for each message.
    pub late_completion: f64,
    /// How much later.
    pub late_completion_by: RangeInclusive<Duration>,
    /// Sender's completions become due only at multiples of this, so that they come in heaps. 0: off.
    pub coalesce_completions: Duration,
    /// The channel wakes without a completion: chance for each arming, within a millisecond.
    pub spurious_wake: f64,
    /// From this message on the acknowledgements of the QP are lost: messages still arrive, until the sender's retries
    /// are spent and it sees `RETRY_EXC_ERR`. Chance for each message.
    pub lost_ack: f64,
    /// A QP falls to ERR: chance for each message; the sender's or the receiver's, half each.
    pub qp_error: f64,
    /// The receiver's SRQ looks empty for a while though it is not: chance for each message.
    pub rnr_storm: f64,
    /// How long.
    pub rnr_storm_for: RangeInclusive<Duration>,
    /// A message of more than one packet stops half-way, holding its slab: chance for each such message.
    pub half_received: f64,
    /// Until its rest comes.
    pub half_received_for: RangeInclusive<Duration>,
    /// The flush of a QP stops: this completion and all later ones of the QP never come. Chance for each flushed WR.
    pub lost_flush: f64,
    /// `create_qp` is out of memory: chance for each call.
    pub create_qp_exhausted: f64,
    /// A registration or a window is refused for want of memory: chance for each call.
    pub register_refused: f64,
    /// A memory window is not bound, and its QP falls to ERR: chance for each bind.
    pub bind_fails: f64,
    /// `connect` finds no route (after a second, as in the kernel): chance for each call.
    pub connect_no_route: f64,
    /// `connect` is slow: chance for each call.
    pub connect_slow: f64,
    /// How slow.
    pub connect_slow_by: RangeInclusive<Duration>,
    /// A WR is refused with ENOMEM though there is room: chance for each WR.
    pub post_refused: f64,
    /// A stray async event (GID change, port up, unknown numbers) on the sender's side: chance for each message.
    pub event_noise: f64,
    /// When the own port is down, a QP that sends hangs for ever, also after the port is up again; else its WR fails
    /// with `LOC_QP_OP_ERR`. Chance for each QP that sends while the port is down. Soft-RoCE: about one in three.
    pub port_down_hangs: f64,
    /// The bootstrap's network.
    pub net: NetFaults,
}

/// Faults of the bootstrap's network. Each connection draws its fate when it is dialed.
#[derive(Clone, Debug)]
pub struct NetFaults {
    /// The dial is refused.
    pub dial_refused: f64,
    /// The dial takes longer.
    pub slow: f64,
    /// How much longer; also added to each way of that connection.
    pub slow_by: RangeInclusive<Duration>,
    /// The connection is reset, both ways, after some bytes.
    pub reset: f64,
    /// Bytes vanish without a close after some bytes, in one direction.
    pub black_hole: f64,
    /// One direction ends (its reader sees the end, its writer sees nothing) after some bytes.
    pub half_close: f64,
    /// How many bytes pass before a reset, black hole or half-close.
    pub after_bytes: RangeInclusive<u64>,
    /// Reads give one byte at a time.
    pub dribble: f64,
}

const NONE: RangeInclusive<Duration> = Duration::ZERO..=Duration::ZERO;

impl Faults {
    /// Nothing goes wrong.
    pub const fn none() -> Self {
        Self {
            delay: 0.0,
            delay_by: NONE,
            late_completion: 0.0,
            late_completion_by: NONE,
            coalesce_completions: Duration::ZERO,
            spurious_wake: 0.0,
            lost_ack: 0.0,
            qp_error: 0.0,
            rnr_storm: 0.0,
            rnr_storm_for: NONE,
            half_received: 0.0,
            half_received_for: NONE,
            lost_flush: 0.0,
            create_qp_exhausted: 0.0,
            register_refused: 0.0,
            bind_fails: 0.0,
            connect_no_route: 0.0,
            connect_slow: 0.0,
            connect_slow_by: NONE,
            post_refused: 0.0,
            event_noise: 0.0,
            port_down_hangs: 0.0,
            net: NetFaults::none(),
        }
    }

    /// Nothing is lost, but nothing comes when expected: delays, late and heaped completions, spurious wake-ups, RNR
    /// storms, slow connects, dribbling sockets. No operation fails under it (with `rnr_retry` 7).
    pub const fn unpunctual() -> Self {
        Self {
            delay: 0.2,
            delay_by: Duration::from_micros(50)..=Duration::from_millis(20),
            late_completion: 0.2,
            late_completion_by: Duration::from_micros(50)..=Duration::from_millis(50),
            coalesce_completions: Duration::from_millis(2),
            spurious_wake: 0.1,
            rnr_storm: 0.005,
            rnr_storm_for: Duration::from_micros(100)..=Duration::from_millis(10),
            half_received: 0.02,
            half_received_for: Duration::from_micros(100)..=Duration::from_millis(20),
            connect_slow: 0.3,
            connect_slow_by: Duration::from_millis(1)..=Duration::from_secs(1),
            event_noise: 0.002,
            net: NetFaults {
                slow: 0.3,
                slow_by: Duration::from_micros(100)..=Duration::from_millis(200),
                dribble: 0.2,
                ..NetFaults::none()
            },
            ..Self::none()
        }
    }

    /// [`unpunctual`](Self::unpunctual), and connections die of everything that the simulation knows.
    pub const fn harsh() -> Self {
        Self {
            lost_ack: 0.0005,
            qp_error: 0.001,
            lost_flush: 0.05,
            create_qp_exhausted: 0.05,
            register_refused: 0.02,
            bind_fails: 0.01,
            connect_no_route: 0.05,
            post_refused: 0.0005,
            port_down_hangs: 0.35,
            net: NetFaults {
                dial_refused: 0.05,
                slow: 0.3,
                slow_by: Duration::from_micros(100)..=Duration::from_millis(500),
                reset: 0.05,
                black_hole: 0.03,
                half_close: 0.03,
                after_bytes: 0..=600,
                dribble: 0.2,
            },
            ..Self::unpunctual()
        }
    }
}

impl Default for Faults {
    fn default() -> Self {
        Self::none()
    }
}

impl NetFaults {
    /// Nothing goes wrong.
    pub const fn none() -> Self {
        Self {
            dial_refused: 0.0,
            slow: 0.0,
            slow_by: NONE,
            reset: 0.0,
            black_hole: 0.0,
            half_close: 0.0,
            after_bytes: 0..=0,
            dribble: 0.0,
        }
    }
}

impl Default for NetFaults {
    fn default() -> Self {
        Self::none()
    }
}

/// The only source of chance: the same seed and the same calls give the same answers.
#[derive(Debug)]
pub(super) struct Dice {
    rng: fastrand::Rng,
}

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: fastrand::Rng::with_seed(seed) }
    }

    /// True with that probability; draws nothing at 0.
    pub(super) fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.f64() < probability
    }

    /// A duration of the range, to the nanosecond; draws nothing when there is no choice.
    pub(super) fn duration(&mut self, range: &RangeInclusive<Duration>) -> Duration {
        let (from, to) = (nanos(*range.start()), nanos(*range.end()));
        if from >= to { *range.start() } else { Duration::from_nanos(self.rng.u64(from..=to)) }
    }

    /// A number of the range.
    pub(super) fn number(&mut self, range: &RangeInclusive<u64>) -> u64 {
        if range.start() >= range.end() { *range.start() } else { self.rng.u64(range.clone()) }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_repeat_with_the_seed_and_stay_in_range() {
        let range = Duration::from_micros(3)..=Duration::from_micros(9);
        let draw = |seed| {
            let mut dice = Dice::new(seed);
            (0..100).map(|_| (dice.chance(0.5), dice.duration(&range), dice.number(&(1..=6)))).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        assert!(draw(7).iter().all(|(_, time, eye)| range.contains(time) && (1..=6).contains(eye)));
    }

    #[test]
    fn a_chance_of_zero_draws_nothing() {
        let (mut idle, mut fresh) = (Dice::new(1), Dice::new(1));
        assert!(!idle.chance(0.0));
        assert_eq!(idle.duration(&NONE), Duration::ZERO);
        assert_eq!(idle.number(&(1..=1000)), fresh.number(&(1..=1000)));
    }
}
