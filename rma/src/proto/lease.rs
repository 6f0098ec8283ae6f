//! One consumer's right to read one slot until a deadline, as the owner keeps it.
//!
//! ```text
//!             granted              end                      revoked
//! Making ────────────▶ Made ────────────▶ Revoking ────────────────▶ (gone)
//!   │ grant failed                            ▲
//!   ├───────────▶ Chunks ──── end ──▶ (gone)  │ granted
//!   │ end                                     │
//!   └───────────▶ EndedMaking ────────────────┘
//!                      └──── grant failed ──▶ (gone)
//! ```
//!
//! *End* is detach, release, the deadline, or the peer's end: all the same here. A lease in the right half has ended for
//! everyone; what is left of it is a right (a memory window, or a registration) that must go before the slice is used again.

use std::time::{Duration, Instant};

use verbs_transport::InstanceId;

use super::{
    handle::SlotId,
    wire::{PathReason, RefusalCode},
};

/// How long leases last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    /// What consumers are told.
    pub lasts: Duration,
    /// How much later the owner ends what was not ended.
    pub grace: Duration,
}

/// Where a lease stands; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its bytes go by chunks of this size.
    Chunks {
        /// Bytes of each but the last.
        chunk_bytes: u32,
        /// Why not by READ.
        reason: PathReason,
    },
    /// Its right is being made.
    Making {
        /// For chunks, if that fails.
        chunk_bytes: u32,
    },
    /// The consumer can READ.
    Made,
    /// Ended before its right was there.
    EndedMaking,
    /// Ended; its right is being taken back.
    Revoking,
}

/// What happens to a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Its right is there.
    Granted,
    /// It could not be.
    GrantFailed,
    /// Detach, release, deadline, or the end of the peer.
    End,
    /// Its right is gone.
    Revoked,
}

/// What follows from an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It goes on in this state.
    Now(State),
    /// It has ended, and its right must be taken back.
    EndedRevoke,
    /// It has ended while its right is being made.
    EndedWait,
    /// It has ended, and had no right.
    Ended,
    /// It had ended before, and its right, which came late, must be taken back.
    Revoke,
    /// The last of it, its right, is gone.
    Gone,
    /// Nothing: the event does not belong to this state.
    Stray,
}

impl State {
    /// The whole machine.
    pub const fn on(self, event: Event) -> Step {
        match (self, event) {
            (Self::Making { .. }, Event::Granted) => Step::Now(Self::Made),
            (Self::Making { chunk_bytes }, Event::GrantFailed) => {
                Step::Now(Self::Chunks { chunk_bytes, reason: PathReason::LeaseBudget })
            }
            (Self::Making { .. }, Event::End) => Step::EndedWait,
            (Self::Made, Event::End) => Step::EndedRevoke,
            (Self::Chunks { .. }, Event::End) => Step::Ended,
            (Self::EndedMaking, Event::Granted) => Step::Revoke,
            (Self::EndedMaking, Event::GrantFailed) | (Self::Revoking, Event::Revoked) => Step::Gone,
            (Self::Chunks { .. } | Self::Made, Event::Granted | Event::GrantFailed | Event::Revoked)
            | (Self::Making { .. }, Event::Revoked)
            | (Self::EndedMaking, Event::End | Event::Revoked)
            | (Self::Revoking, Event::Granted | Event::GrantFailed | Event::End) => Step::Stray,
        }
    }

    /// Whether it still counts for its slot.
    pub const fn is_live(self) -> bool {
        matches!(self, Self::Chunks { .. } | Self::Making { .. } | Self::Made)
    }
}

/// One lease.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) slot: SlotId,
    pub(super) peer: InstanceId,
    pub(super) state: State,
    /// Until here it can be renewed, in the owner's time.
    renew_until: Instant,
    /// Here it is ended.
    pub(super) reap_at: Instant,
}

impl Lease {
    pub(super) fn new(slot: SlotId, peer: InstanceId, state: State, now: Instant, times: LeaseTimes) -> Self {
        let mut lease = Self { slot, peer, state, renew_until: now, reap_at: now };
        lease.run_from(now, times);
        lease
    }

    fn run_from(&mut self, now: Instant, times: LeaseTimes) {
        self.renew_until = now + times.lasts;
        self.reap_at = self.renew_until + times.grace;
    }

    /// Begins anew.
    pub(super) fn renew(&mut self, now: Instant, times: LeaseTimes) -> Result<(), RefusalCode> {
        if !self.state.is_live() {
            return Err(RefusalCode::UnknownLease);
        }
        if now >= self.renew_until {
            return Err(RefusalCode::LeaseOver);
        }
        self.run_from(now, times);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNKS: State = State::Chunks { chunk_bytes: 5, reason: PathReason::LeaseBudget };
    const MAKING: State = State::Making { chunk_bytes: 5 };
    const STATES: [State; 5] = [CHUNKS, MAKING, State::Made, State::EndedMaking, State::Revoking];
    const EVENTS: [Event; 4] = [Event::Granted, Event::GrantFailed, Event::End, Event::Revoked];

    /// Every pair, written out.
    #[test]
    fn every_event_in_every_state() {
        use Step::{Ended, EndedRevoke, EndedWait, Gone, Now, Revoke, Stray};
        let table = [
            // Granted            GrantFailed   End          Revoked
            [Stray, Stray, Ended, Stray],                      // Chunks
            [Now(State::Made), Now(CHUNKS), EndedWait, Stray], // Making
            [Stray, Stray, EndedRevoke, Stray],                // Made
            [Revoke, Gone, Stray, Stray],                      // EndedMaking
            [Stray, Stray, Stray, Gone],                       // Revoking
        ];
        for (state, row) in STATES.into_iter().zip(table) {
            for (event, expected) in EVENTS.into_iter().zip(row) {
                assert_eq!(state.on(event), expected, "{event:?} in {state:?}");
            }
        }
    }

    #[test]
    fn a_lease_is_renewed_until_its_end_and_not_after() {
        let t0 = Instant::now();
        let s = Duration::from_secs;
        let times = LeaseTimes { lasts: s(30), grace: s(5) };
        let new = |state| Lease::new(SlotId::new(1).unwrap(), InstanceId(1), state, t0, times);
        for state in [CHUNKS, MAKING, State::Made] {
            let mut lease = new(state);
            assert_eq!(lease.reap_at, t0 + s(35));
            assert_eq!(lease.renew(t0 + s(29), times), Ok(()));
            assert_eq!(lease.reap_at, t0 + s(64));
            assert_eq!(lease.renew(t0 + s(59), times), Err(RefusalCode::LeaseOver));
        }
        for state in [State::EndedMaking, State::Revoking] {
            assert_eq!(new(state).renew(t0, times), Err(RefusalCode::UnknownLease));
        }
    }
}
