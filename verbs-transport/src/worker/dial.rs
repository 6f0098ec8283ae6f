//! The dialing half: one task a peer, which dials until the connection is up or nobody wants it any more.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::sleep_until;
use tracing::Instrument;
use verbs_bootstrap::{DialError, DialFailed, DialStart, Dialed, Offer, Plane, Refusal, ReplyVerdict, Status};

use super::{
    connect::{Addressee, StreamOf, attach_life, bring_up, check_offer, peer_ready, wait_up},
    error::{EpochEnd, cannot_meet},
    peer::{Effects, Peer, PeerState},
    shared::Shared,
};
use crate::fabric::Fabric;

/// What the dialing task does next.
enum Step {
    /// Until that moment at the latest.
    Dial(Box<Offer>, Vec<SocketAddr>, Instant),
    Wait(Instant),
    Done,
}

impl<F: Fabric> Shared<F> {
    /// Starts the dialing task of a peer whose state says that it has one.
    pub(crate) fn spawn_dialer(self: &Arc<Self>, peer: &Arc<Peer<F>>) {
        let (shared, peer) = (self.clone(), peer.clone());
        self.spawn(async move { dial_until_done(&shared, &peer).await });
    }
}

async fn dial_until_done<F: Fabric>(shared: &Arc<Shared<F>>, peer: &Arc<Peer<F>>) {
    loop {
        // Registered before the state is read, so that no change in between is missed.
        let changed = peer.changed.notified();
        match next_step(shared, peer) {
            Step::Done => return,
            Step::Wait(until) => {
                tokio::select! {
                    biased;
                    () = sleep_until(until.into()) => {}
                    () = changed => {}
                }
            }
            Step::Dial(hello, addrs, until) => {
                let generation = hello.generation.0;
                let span = tracing::info_span!("connect", role = "dial", peer = %peer.id, generation);
                tokio::select! {
                    biased;
                    () = shared.stopping() => return,
                    () = dial_once(shared, peer, &hello, &addrs, until).instrument(span) => {}
                }
            }
        }
    }
}

fn next_step<F: Fabric>(shared: &Arc<Shared<F>>, peer: &Arc<Peer<F>>) -> Step {
    let mut effects = Effects::default();
    let step = {
        let mut state = peer.lock();
        let step = decide_step(shared, peer, &mut state, &mut effects);
        if matches!(step, Step::Done) {
            state.dialer = false;
            state.wanted_since = None;
        }
        step
    };
    effects.run(shared);
    if matches!(step, Step::Done) {
        shared.forget_stranger(peer.id);
    }
    step
}

fn decide_step<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    state: &mut PeerState<F>,
    effects: &mut Effects,
) -> Step {
    let wanted = !state.queue.is_empty() || !state.connect_waiters.is_empty();
    let up = state.epoch.as_ref().is_some_and(|epoch| epoch.link.is_some());
    if shared.is_stopping() || !wanted || up {
        return Step::Done;
    }
    let Some(address) = &state.address else { return Step::Done };
    let addrs = address.bootstrap.clone();
    let wanted_since = *state.wanted_since.get_or_insert(shared.now());
    state.exchange.begin_epoch();
    match state.exchange.start_dial(shared.now()) {
        DialStart::Go { generation, echoed, target } => {
            if let Err(cause) = shared.ensure_qp(peer, state, generation) {
                state.exchange.on_dial_failed(shared.now());
                peer.end_unbound(state, shared, &Arc::new(cause), effects);
                return Step::Done;
            }
            let to = Addressee { instance: peer.id, incarnation: target, generation: echoed };
            match &state.epoch {
                Some(epoch) => {
                    let until = dial_until(shared.now(), wanted_since, shared.config.bootstrap.deadline);
                    Step::Dial(Box::new(shared.offer(epoch, &to, shared.fabric.port())), addrs, until)
                }
                None => Step::Done,
            }
        }
        DialStart::Wait { until } => Step::Wait(until),
        // The accepting half is at it, or an older dial has not ended yet: a change will be told.
        DialStart::InFlight | DialStart::Up => Step::Wait(shared.now() + Duration::from_millis(100)),
        DialStart::Idle | DialStart::Unknown => Step::Done,
    }
}

/// The end of a dial that begins now. What its first frame has waited in the back-off counts, so that a frame to a dead
/// peer has its end after `deadline` and not after both; but the last half of it is the dial's own in any case.
fn dial_until(now: Instant, wanted_since: Instant, deadline: Duration) -> Instant {
    (wanted_since + deadline).max(now + deadline / 2)
}

async fn dial_once<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    hello: &Offer,
    addrs: &[SocketAddr],
    until: Instant,
) {
    shared.counters.dials.add(1);
    tracing::debug!(?addrs, "dialing");
    match dial_any(shared, hello, addrs, until).await {
        Ok(dialed) => {
            if let Err(refusal) = check_reply(hello, &dialed.reply) {
                dial_failed(shared, peer, EpochEnd::Refused(refusal));
                return;
            }
            on_dialed(shared, peer, dialed).await;
        }
        Err(error) => dial_failed(shared, peer, EpochEnd::Dial(error)),
    }
}

/// The first address that takes the connection. All of them share one deadline.
async fn dial_any<F: Fabric>(
    shared: &Arc<Shared<F>>,
    hello: &Offer,
    addrs: &[SocketAddr],
    until: Instant,
) -> Result<Dialed<StreamOf<F>>, DialError> {
    let mut rest = addrs.iter();
    loop {
        let left = until.saturating_duration_since(shared.now()).as_millis();
        // In whole hundredths of a second, as it stands in the error's text.
        let deadline = Duration::from_millis(u64::try_from(left).unwrap_or(u64::MAX).div_ceil(10).saturating_mul(10));
        let config = verbs_bootstrap::Config { deadline, ..shared.config.bootstrap.clone() };
        // An endpoint has at least one address; the placeholder is refused like any other dead one.
        let addr = rest.next().copied().unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        match verbs_bootstrap::dial(shared.fabric.net(), addr, hello, &config).await {
            Err(DialError::Connect { .. }) if rest.len() > 0 => {}
            other => return other,
        }
    }
}

fn check_reply(hello: &Offer, reply: &Offer) -> Result<(), Refusal> {
    if reply.plane != Plane::Messaging {
        let detail = format!("the answer to a messaging hello is of the {} plane", reply.plane);
        return Err(Refusal { status: Status::BadOffer, detail });
    }
    check_offer(reply)?;
    match cannot_meet(&hello.port, &reply.port) {
        Some(detail) => Err(Refusal { status: Status::NoRoute, detail }),
        None => Ok(()),
    }
}

fn dial_failed<F: Fabric>(shared: &Arc<Shared<F>>, peer: &Arc<Peer<F>>, cause: EpochEnd) {
    shared.counters.dial_failures.add(1);
    tracing::debug!(cause = cause.cause(), reason = %cause, "the dial failed");
    let mut effects = Effects::default();
    {
        let mut state = peer.lock();
        let failed = match &cause {
            EpochEnd::Dial(DialError::Refused { status, .. }) => state.exchange.on_refused(*status, shared.now()),
            _ => state.exchange.on_dial_failed(shared.now()),
        };
        match failed {
            DialFailed::EpochOver { .. } => peer.end_unbound(&mut state, shared, &Arc::new(cause), &mut effects),
            // The accepting half came up, or the epoch had ended: nothing failed.
            DialFailed::CountsAsSuccess { .. } | DialFailed::Stale => {}
        }
    }
    effects.run(shared);
}

async fn on_dialed<F: Fabric>(shared: &Arc<Shared<F>>, peer: &Arc<Peer<F>>, dialed: Dialed<StreamOf<F>>) {
    let verdict = peer.lock().exchange.on_reply(&dialed.reply);
    let generation = match verdict {
        ReplyVerdict::Connect { generation } => {
            if let Err(cause) = bring_up(shared, peer, generation, &dialed.reply, true).await {
                shared.end_epoch_of(peer, generation, cause);
                return;
            }
            generation
        }
        ReplyVerdict::AlreadyUp { generation } => {
            if !wait_up(peer, generation).await {
                return;
            }
            // The reply says that the peer's QP is in RTS.
            peer_ready(shared, peer, generation);
            generation
        }
        ReplyVerdict::Retire { .. } => {
            let mut effects = Effects::default();
            peer.end_unbound(&mut peer.lock(), shared, &Arc::new(EpochEnd::Replaced), &mut effects);
            effects.run(shared);
            return;
        }
        ReplyVerdict::Ignore => return,
    };
    match dialed.ready().await {
        Ok(life) => attach_life(shared, peer, generation, life),
        // The acceptor hears the socket close and ends its half; the proof's deadline ends this one, or another
        // socket carries the connection.
        Err(error) => tracing::debug!(peer = %peer.id, %error, "READY did not go out"),
    }
}
