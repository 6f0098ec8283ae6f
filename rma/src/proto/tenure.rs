//! A lease as its consumer keeps it.
//!
//! The owner says how long a lease lasts, never until when: the two have no clock in common. The consumer counts from
//! *before* it sent its request, the owner from when it read it, so the consumer's lease ends first. In the last part of
//! it the consumer posts nothing more, and at its end whatever is still posted is torn down with its QP. The proof is in
//! `docs/rendezvous.md`.

use std::time::{Duration, Instant};

/// A lease, in the consumer's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenure {
    began: Instant,
    lasts: Duration,
    margin: Duration,
}

impl Tenure {
    /// A lease that was asked for at `asked` (taken before the request was sent) and lasts so long. Nothing is posted in
    /// the last `margin` of it, or in the last quarter if that is less.
    pub fn new(asked: Instant, lasts: Duration, margin: Duration) -> Self {
        Self { began: asked, lasts, margin: margin.min(lasts / 4) }
    }

    /// Until here a READ may be posted.
    pub fn post_until(&self) -> Instant {
        self.began + self.lasts.saturating_sub(self.margin)
    }

    /// From here on nothing may be in flight.
    pub fn ends_at(&self) -> Instant {
        self.began + self.lasts
    }

    /// When to ask for more time: at half of it, so that a lost request leaves time for another.
    pub fn renew_at(&self) -> Instant {
        self.began + self.lasts / 2
    }

    /// Whether a READ, or a pull, may be posted.
    pub fn may_post(&self, now: Instant) -> bool {
        now < self.post_until()
    }

    /// A renewal that was asked for at `asked` has been granted. Never shortens the lease.
    pub fn renewed(&mut self, asked: Instant, lasts: Duration) {
        if asked + lasts > self.ends_at() {
            *self = Self { began: asked, lasts, margin: self.margin };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proto::{
        handle::SlotId,
        lease::{Lease, LeaseTimes, State},
    };
    use verbs_transport::InstanceId;

    #[test]
    fn nothing_is_posted_in_the_margin() {
        let t0 = Instant::now();
        let s = Duration::from_secs;
        let tenure = Tenure::new(t0, s(30), s(5));
        assert_eq!((tenure.renew_at(), tenure.post_until(), tenure.ends_at()), (t0 + s(15), t0 + s(25), t0 + s(30)));
        assert!(tenure.may_post(t0 + s(24)) && !tenure.may_post(t0 + s(25)));
        // A short lease keeps three quarters.
        assert_eq!(Tenure::new(t0, s(4), s(5)).post_until(), t0 + s(3));
    }

    #[test]
    fn a_late_answer_to_an_early_renewal_shortens_nothing() {
        let t0 = Instant::now();
        let s = Duration::from_secs;
        let mut tenure = Tenure::new(t0, s(30), s(5));
        tenure.renewed(t0 + s(15), s(30));
        assert_eq!(tenure.ends_at(), t0 + s(45));
        tenure.renewed(t0 + s(10), s(30));
        assert_eq!(tenure.ends_at(), t0 + s(45));
    }

    proptest! {
        /// whatever the delays, and with clocks that run apart by less than grace ÷ (lease + grace), the owner ends
        /// a lease only after the consumer's end of it. Times are those of an outside observer.
        #[test]
        fn the_consumers_lease_ends_first(
            lasts_ms in 100u64..60_000,
            grace_ms in 20u64..10_000,
            delays_us in proptest::collection::vec(0u32..30_000_000, 1..6),
            renew_after in proptest::collection::vec(0.0f64..0.999, 0..5),
            owner_fast in any::<bool>(),
        ) {
            let (lasts, grace) = (Duration::from_millis(lasts_ms), Duration::from_millis(grace_ms));
            // One clock is right, the other runs apart by a little less than what is allowed.
            let apart = 0.999 * grace.as_secs_f64() / (lasts + grace).as_secs_f64();
            let (owner_rate, consumer_rate) = if owner_fast { (1.0, 1.0 - apart) } else { (1.0 / (1.0 - apart), 1.0) };
            let base = Instant::now();
            let at = |seconds: f64, rate: f64| base + Duration::from_secs_f64(seconds * rate);
            let real = |instant: Instant, rate: f64| (instant - base).as_secs_f64() / rate;
            let times = LeaseTimes { lasts, grace };

            let mut sent = 1.0;
            let mut read = sent + f64::from(delays_us[0]) / 1e6;
            let mut tenure = Tenure::new(at(sent, consumer_rate), lasts, grace);
            let slot = SlotId::new(1).unwrap();
            let mut lease = Lease::new(slot, InstanceId(1), State::Made, at(read, owner_rate), times);
            for (part, delay) in renew_after.iter().zip(delays_us.iter().skip(1)) {
                sent = real(tenure.ends_at(), consumer_rate) - (1.0 - part) * lasts.as_secs_f64() / consumer_rate;
                read = sent.max(read) + f64::from(*delay) / 1e6;
                let asked = at(sent, consumer_rate);
                if lease.renew(at(read, owner_rate), times).is_err() {
                    break;
                }
                // The answer may never come; if it does, the consumer has more time.
                if delay % 3 != 0 {
                    tenure.renewed(asked, lasts);
                }
                let (theirs, ours) = (real(tenure.ends_at(), consumer_rate), real(lease.reap_at, owner_rate));
                prop_assert!(theirs <= ours + 1e-6, "consumer until {theirs}, owner until {ours}");
            }
            let (theirs, ours) = (real(tenure.ends_at(), consumer_rate), real(lease.reap_at, owner_rate));
            prop_assert!(theirs <= ours + 1e-6, "consumer until {theirs}, owner until {ours}");
        }
    }
}
