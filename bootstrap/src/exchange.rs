//! One peer's hand-shake decisions: no I/O, no clock, no lock.
//!
//! An *epoch* is one attempt to connect and the connection that comes of it, in one [`Plane`]: a peer has an exchange
//! for each plane, and they know nothing of each other. An epoch owns exactly one QP of its plane, which
//! the dialing and the accepting half share: crossed dials therefore meet on one pair of QPs. `(incarnation,
//! generation)` names an epoch, hence a QP, for ever.
//!
//! Invariant: an epoch is bound to at most one remote QP in its life, by the first verdict [`HelloVerdict::Join`],
//! [`HelloVerdict::Replace`] or [`ReplyVerdict::Connect`]. Whoever got that verdict brings the QP up.

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
mod verdict;

use std::time::{Duration, Instant};

pub use self::verdict::{DialFailed, DialStart, HelloVerdict, RegisterVerdict, ReplyVerdict};
use crate::{
    history::History,
    status::{Refusal, Status},
    types::{Generation, Incarnation, InstanceId, Offer, Plane, QpEndpoint},
};

/// Who this worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its name over restarts.
    pub instance: InstanceId,
    /// This run.
    pub incarnation: Incarnation,
}

/// The pause after a failed dial: doubles from `first` to `max`, of which a random part between half and all is
/// waited. Proof or a new registration resets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// After the first failure, default 50 ms.
    pub first: Duration,
    /// The most, default 2 s. Beyond half of [`Config::deadline`](crate::Config::deadline), frames to a dead peer wait for
    /// longer than that deadline before they come back.
    pub max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(50), max: Duration::from_secs(2) }
    }
}

/// The remote end of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Remote {
    incarnation: Incarnation,
    generation: Generation,
    qp: QpEndpoint,
}

impl Remote {
    fn of(offer: &Offer) -> Self {
        Self { incarnation: offer.from_incarnation, generation: offer.generation, qp: offer.qp }
    }
}

/// How far a bound epoch has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    /// Somebody is bringing the QP up.
    Bound,
    /// The QP is in RTS.
    Connected,
    /// A ping came back over it.
    Proven,
}

/// A handshaking epoch means to reach [`Exchange::target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Epoch {
    Idle,
    Handshaking,
    Bound { remote: Remote, progress: Progress },
}

/// The one dial in flight.
#[derive(Clone, Copy, Debug)]
struct Dialing {
    generation: Generation,
    target: Incarnation,
}

/// One peer's hand-shake. Owned by the worker's peer, under its lock; no call blocks.
#[derive(Debug)]
pub struct Exchange {
    me: Identity,
    peer: InstanceId,
    plane: Plane,
    backoff: Backoff,
    jitter: u64,
    /// The last epoch begun; names the present one unless idle.
    generation: Generation,
    epoch: Epoch,
    dialing: Option<Dialing>,
    registered: Option<Incarnation>,
    /// The run learnt last, by registration or by proof.
    target: Option<Incarnation>,
    history: History,
    failures: u32,
    not_before: Option<Instant>,
    /// The last reply was not from whom it should be: back off before the next dial.
    misled: bool,
}

impl Exchange {
    /// A peer that nothing is known of yet. `seed` spreads the back-off: a random number, or a fixed one in tests.
    pub fn new(me: Identity, peer: InstanceId, plane: Plane, backoff: Backoff, seed: u64) -> Self {
        Self {
            me,
            peer,
            plane,
            backoff,
            jitter: seed,
            generation: Generation(0),
            epoch: Epoch::Idle,
            dialing: None,
            registered: None,
            target: None,
            history: History::default(),
            failures: 0,
            not_before: None,
            misled: false,
        }
    }

    /// Begins the count of epochs above `last`: for a peer that was forgotten, whose epochs the peer still remembers.
    #[must_use]
    pub fn after(mut self, last: Generation) -> Self {
        self.generation = self.generation.max(last);
        self
    }

    /// The last epoch begun, 0 for none.
    pub fn last_generation(&self) -> Generation {
        self.generation
    }

    /// The present epoch, if there is one.
    pub fn generation(&self) -> Option<Generation> {
        (self.epoch != Epoch::Idle).then_some(self.generation)
    }

    /// The QP of the present epoch is in RTS.
    pub fn is_connected(&self) -> bool {
        matches!(self.epoch, Epoch::Bound { progress: Progress::Connected | Progress::Proven, .. })
    }

    /// The remote run and epoch that the present epoch is connected, or being connected, to.
    pub fn remote(&self) -> Option<(Incarnation, Generation)> {
        self.bound().map(|(remote, _)| (remote.incarnation, remote.generation))
    }

    /// The run that a dial would ask for: the one learnt last, by registration or by proof.
    pub fn target(&self) -> Option<Incarnation> {
        self.target
    }

    /// Begins an epoch if there is none and names the present one. The caller makes one QP for a new name.
    pub fn begin_epoch(&mut self) -> Generation {
        if self.epoch == Epoch::Idle {
            self.fresh_epoch();
        }
        self.generation
    }

    /// May the present epoch dial? Marks the dial as in flight when it says [`DialStart::Go`].
    pub fn start_dial(&mut self, now: Instant) -> DialStart {
        match self.epoch {
            Epoch::Idle => return DialStart::Idle,
            Epoch::Bound { .. } => return DialStart::Up,
            Epoch::Handshaking => {}
        }
        if self.dialing.is_some() {
            return DialStart::InFlight;
        }
        let Some(target) = self.target else { return DialStart::Unknown };
        if std::mem::take(&mut self.misled) {
            self.back_off(now);
        }
        if let Some(until) = self.not_before.filter(|until| now < *until) {
            return DialStart::Wait { until };
        }
        self.dialing = Some(Dialing { generation: self.generation, target });
        DialStart::Go { generation: self.generation, echoed: self.history.highest(target), target }
    }

    /// Would this hello retire an epoch? Then its sender must first show that it still lives: see
    /// [`Acceptor::must_prove_alive`](crate::Acceptor::must_prove_alive).
    pub fn would_replace(&self, hello: &Offer) -> bool {
        matches!(self.judge(hello), Ok(Judged::Replace))
    }

    /// Decides on a complete, authenticated hello, and binds the epoch to it when it says Join or Replace.
    /// Never waits for this side's own dial.
    pub fn on_hello(&mut self, hello: &Offer) -> HelloVerdict {
        match self.judge(hello) {
            Err(refusal) => HelloVerdict::Refuse(refusal),
            Ok(Judged::Repeat) => HelloVerdict::Repeat { generation: self.generation },
            Ok(Judged::Join { fresh }) => {
                if fresh {
                    self.fresh_epoch();
                }
                self.bind(hello);
                HelloVerdict::Join { generation: self.generation, fresh }
            }
            Ok(Judged::Replace) => {
                let retired = self.generation;
                self.fresh_epoch();
                self.bind(hello);
                HelloVerdict::Replace { generation: self.generation, retired }
            }
        }
    }

    /// The dial in flight ended with a reply. Binds the epoch to it when it says Connect.
    pub fn on_reply(&mut self, reply: &Offer) -> ReplyVerdict {
        let Some(dial) = self.dialing.take() else { return ReplyVerdict::Ignore };
        let meant = reply.from == self.peer
            && reply.plane == self.plane
            && reply.to == self.me.instance
            && reply.to_incarnation == self.me.incarnation
            && reply.from_incarnation == dial.target
            && reply.generation > Generation(0)
            && reply.echoed_generation == dial.generation;
        if !meant || dial.generation != self.generation {
            self.misled = !meant;
            return ReplyVerdict::Ignore;
        }
        match self.epoch {
            Epoch::Idle => ReplyVerdict::Ignore,
            Epoch::Handshaking => {
                self.bind(reply);
                ReplyVerdict::Connect { generation: self.generation }
            }
            Epoch::Bound { remote, progress } => {
                let newer = remote.incarnation == dial.target && reply.generation > remote.generation;
                if newer && progress < Progress::Proven {
                    let retired = self.generation;
                    self.epoch = Epoch::Idle;
                    return ReplyVerdict::Retire { retired };
                }
                ReplyVerdict::AlreadyUp { generation: self.generation }
            }
        }
    }

    /// The dial in flight ended without a usable reply.
    pub fn on_dial_failed(&mut self, now: Instant) -> DialFailed {
        let Some(dial) = self.dialing.take() else { return DialFailed::Stale };
        if dial.generation != self.generation {
            return DialFailed::Stale;
        }
        match self.epoch {
            Epoch::Idle => DialFailed::Stale,
            Epoch::Bound { .. } => DialFailed::CountsAsSuccess { generation: self.generation },
            Epoch::Handshaking => {
                self.epoch = Epoch::Idle;
                DialFailed::EpochOver { retired: self.generation, retry_at: self.back_off(now) }
            }
        }
    }

    /// The dial in flight ended with a refusal. As [`Self::on_dial_failed`], and one that says
    /// [`Status::StaleIncarnation`] turns back to the run that proved itself last: the registered address was older
    /// than what this side had learnt from the peer itself.
    pub fn on_refused(&mut self, status: Status, now: Instant) -> DialFailed {
        let failed = self.on_dial_failed(now);
        if status == Status::StaleIncarnation && matches!(failed, DialFailed::EpochOver { .. }) {
            self.target = self.history.proven().or(self.target);
        }
        failed
    }

    /// The QP of this epoch reached RTS. `false`: the epoch is over, retire the QP.
    #[must_use = "false means that the QP belongs to no epoch any more"]
    pub fn on_connected(&mut self, generation: Generation) -> bool {
        self.advance(generation, Progress::Connected)
    }

    /// A ping came back over this epoch's QP: resets the back-off, and the peer's former run is superseded for good.
    /// `false`: the epoch is over.
    pub fn on_proven(&mut self, generation: Generation) -> bool {
        let current = self.advance(generation, Progress::Proven);
        if let (true, Some((remote, _))) = (current, self.bound()) {
            self.history.prove(remote.incarnation);
            self.target = Some(remote.incarnation);
            self.failures = 0;
            self.not_before = None;
        }
        current
    }

    /// This epoch ended: QP failed, peer died, could not be brought up, never proven. One that was never proven counts
    /// as a failed dial. `false`: the epoch was over before.
    pub fn on_epoch_end(&mut self, generation: Generation, now: Instant) -> bool {
        if self.generation() != Some(generation) {
            return false;
        }
        if self.bound().is_some_and(|(_, progress)| progress < Progress::Proven) {
            self.back_off(now);
        }
        self.epoch = Epoch::Idle;
        true
    }

    /// The application registered the peer's address, which names this run.
    pub fn on_registered(&mut self, incarnation: Incarnation) -> RegisterVerdict {
        if self.history.is_superseded(incarnation) {
            return RegisterVerdict::Superseded;
        }
        self.failures = 0;
        self.not_before = None;
        let known_before = self.registered.replace(incarnation) == Some(incarnation);
        let connected_to = self.bound().map(|(remote, _)| remote.incarnation);
        match connected_to.or(self.target) {
            // The same blob as last time says nothing new about a peer that has since come from another run.
            Some(run) if run != incarnation && !(known_before && connected_to.is_some()) => {
                let retired = self.generation();
                self.epoch = Epoch::Idle;
                self.target = Some(incarnation);
                RegisterVerdict::Retire { retired }
            }
            Some(_) => RegisterVerdict::Keep,
            None => {
                self.target = Some(incarnation);
                RegisterVerdict::Keep
            }
        }
    }

    fn judge(&self, hello: &Offer) -> Result<Judged, Refusal> {
        self.addressed_right(hello)?;
        if self.history.is_superseded(hello.from_incarnation) {
            return Err(Refusal::new(
                Status::StaleIncarnation,
                format!("run {} of {} was replaced by a later one", hello.from_incarnation, hello.from),
            ));
        }
        let remote = Remote::of(hello);
        if let Epoch::Bound { remote: bound, .. } = self.epoch {
            if bound == remote {
                return Ok(Judged::Repeat);
            }
            if (bound.incarnation, bound.generation) == (remote.incarnation, remote.generation) {
                return Err(Refusal::new(
                    Status::BadOffer,
                    format!(
                        "generation {} was offered with {} before, now with {}",
                        remote.generation.0, bound.qp.qpn, remote.qp.qpn
                    ),
                ));
            }
        }
        let highest = self.history.highest(remote.incarnation);
        if remote.generation <= highest {
            return Err(Refusal::new(
                Status::StaleGeneration,
                format!("generation {} is not above {}, which was seen before", remote.generation.0, highest.0),
            ));
        }
        Ok(match self.epoch {
            Epoch::Idle => Judged::Join { fresh: true },
            Epoch::Handshaking if self.target.is_some_and(|run| run != remote.incarnation) => Judged::Replace,
            Epoch::Handshaking => Judged::Join { fresh: false },
            Epoch::Bound { .. } => Judged::Replace,
        })
    }

    fn addressed_right(&self, hello: &Offer) -> Result<(), Refusal> {
        let (status, detail) = if hello.to != self.me.instance {
            (Status::WrongInstance, format!("this is {}, not {}", self.me.instance, hello.to))
        } else if hello.to_incarnation != self.me.incarnation {
            let (mine, meant) = (self.me.incarnation, hello.to_incarnation);
            (Status::StaleIncarnation, format!("this is run {mine}, not {meant}"))
        } else if hello.from != self.peer || hello.from == self.me.instance {
            (Status::BadOffer, format!("a hello from {} is not one from {}", hello.from, self.peer))
        } else if hello.plane != self.plane {
            (
                Status::BadOffer,
                format!("a hello of the {} plane in an exchange of the {} plane", hello.plane, self.plane),
            )
        } else if hello.generation == Generation(0) {
            (Status::BadOffer, "generation 0 names no epoch".to_owned())
        } else {
            return Ok(());
        };
        Err(Refusal { status, detail })
    }

    fn fresh_epoch(&mut self) {
        self.generation = Generation(self.generation.0 + 1);
        self.epoch = Epoch::Handshaking;
    }

    fn bind(&mut self, offer: &Offer) {
        let remote = Remote::of(offer);
        self.history.saw(remote.incarnation, remote.generation);
        self.epoch = Epoch::Bound { remote, progress: Progress::Bound };
    }

    fn bound(&self) -> Option<(Remote, Progress)> {
        match self.epoch {
            Epoch::Bound { remote, progress } => Some((remote, progress)),
            Epoch::Idle | Epoch::Handshaking => None,
        }
    }

    fn advance(&mut self, generation: Generation, to: Progress) -> bool {
        match &mut self.epoch {
            Epoch::Bound { progress, .. } if self.generation == generation => {
                *progress = to.max(*progress);
                true
            }
            _ => false,
        }
    }

    /// Notes a failure; gives the end of the pause.
    fn back_off(&mut self, now: Instant) -> Instant {
        let doubled = self.backoff.first.saturating_mul(1 << self.failures.min(MOST_DOUBLINGS));
        let pause = doubled.min(self.backoff.max);
        self.failures = self.failures.saturating_add(1);
        let until = now + pause / 2 + (pause / 2).mul_f64(self.random_fraction());
        self.not_before = Some(until);
        until
    }

    /// In 0 to 1: splitmix64, good enough to spread retries.
    fn random_fraction(&mut self) -> f64 {
        self.jitter = self.jitter.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.jitter;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        f64::from((bits >> 32) as u32) / f64::from(u32::MAX)
    }
}

/// A hello that is not refused.
enum Judged {
    Join { fresh: bool },
    Replace,
    Repeat,
}

/// 50 ms doubled 20 times is over 14 hours: any `max` is reached before.
const MOST_DOUBLINGS: u32 = 20;
