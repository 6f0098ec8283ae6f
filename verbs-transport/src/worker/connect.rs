//! How an epoch comes to be: the dialing half, the accepting half, and the QP that both share.

use std::{
    future::Future,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use tokio::{sync::watch, time::sleep_until};
use verbs_bootstrap::{
    AcceptError, Acceptor, DialError, DialFailed, DialStart, Dialed, Generation, HelloVerdict, LifeSocket, Net, Offer,
    QpEndpoint, RdAtomic, Refusal, ReplyVerdict, Status,
};

use super::{
    error::{EpochEnd, SendError, cannot_meet},
    peer::{Effects, Epoch, Peer, PeerState},
    shared::Shared,
};
use crate::{
    fabric::{CreateQpError, Fabric, FabricQp, QpCaps, QpPath},
    proto::link::{Link, LinkLimits},
};

type StreamOf<F> = <<F as Fabric>::Net as Net>::Stream;

/// Inline sizes asked for, one after the other, until the device grants one.
const INLINE_STEPS: [u32; 7] = [828, 512, 256, 220, 128, 60, 0];

/// Smallest receive slab that a peer may offer: a header and something to carry.
const SLAB_MIN_BYTES: u32 = 64;

/// What the dialing task does next.
enum Step {
    Dial(Box<Offer>, Vec<std::net::SocketAddr>),
    Wait(Instant),
    Done,
}

impl<F: Fabric> Shared<F> {
    /// Starts the dialing task of a peer whose state says that it has one.
    pub(crate) fn spawn_dialer(self: &Arc<Self>, peer: &Arc<Peer<F>>) {
        let (shared, peer) = (self.clone(), peer.clone());
        self.spawn(async move { dial_until_done(&shared, &peer).await });
    }

    /// The QP of epoch `generation`, made if it is not there.
    fn ensure_qp(&self, peer: &Arc<Peer<F>>, state: &mut PeerState<F>, generation: Generation) -> Result<(), EpochEnd> {
        if state.epoch.as_ref().is_some_and(|epoch| epoch.generation == generation) {
            return Ok(());
        }
        let rx_window = self.shares().grant(self.config.window_slabs).map_err(EpochEnd::Exhausted)?;
        let qp = match self.create_qp() {
            Ok(qp) => Arc::new(qp),
            Err(error) => {
                self.shares().release(rx_window);
                return Err(EpochEnd::CreateQp(error));
            }
        };
        self.counters.epochs_begun.add(1);
        self.add_route(qp.qpn().get(), peer);
        state.epoch = Some(Epoch {
            generation,
            psn: self.random_psn(),
            qp,
            rx_window,
            link: None,
            remote: None,
            up: watch::Sender::new(false),
            lives: Vec::new(),
            lives_open: 0,
            proof_told: false,
            tail_seen: None,
        });
        Ok(())
    }

    /// A QP with the most inline that the device grants; what worked once is asked for first the next time.
    fn create_qp(&self) -> Result<F::Qp, CreateQpError> {
        let mut inline_bytes = self.inline_request();
        loop {
            match self.fabric.create_qp(QpCaps { send_wrs: self.config.send_wrs, inline_bytes }) {
                Ok(qp) => {
                    self.set_inline_request(inline_bytes);
                    return Ok(qp);
                }
                Err(error @ CreateQpError::Unsupported { .. }) => {
                    let Some(step) = INLINE_STEPS.into_iter().find(|&step| step < inline_bytes) else {
                        return Err(error);
                    };
                    tracing::debug!(asked = inline_bytes, next = step, "the device refused so much inline");
                    inline_bytes = step;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What this side says to the peer about its epoch.
    fn offer(&self, epoch: &Epoch<F>, to: &Addressee) -> Offer {
        Offer {
            from: self.me.instance,
            from_incarnation: self.me.incarnation,
            to: to.instance,
            to_incarnation: to.incarnation,
            generation: epoch.generation,
            echoed_generation: to.generation,
            port: self.fabric.port(),
            messaging: QpEndpoint { qpn: epoch.qp.qpn(), psn: epoch.psn },
            bulk: None,
            rd_atomic: self.fabric.limits().rd_atomic,
            slab_bytes: self.fabric.slabs().receive_bytes,
            window_slabs: epoch.rx_window,
            eager_max_bytes: self.config.eager_max_bytes,
            features: 0,
        }
    }
}

struct Addressee {
    instance: verbs_bootstrap::InstanceId,
    incarnation: verbs_bootstrap::Incarnation,
    generation: Generation,
}

/// An offer that no connection can be made of.
fn check_offer(offer: &Offer) -> Result<(), Refusal> {
    let bad = |detail| Err(Refusal { status: Status::BadOffer, detail });
    if offer.slab_bytes < SLAB_MIN_BYTES {
        return bad(format!("receive slabs of {} bytes, at least {SLAB_MIN_BYTES} are needed", offer.slab_bytes));
    }
    if offer.window_slabs == 0 {
        return bad("a window of 0 slabs: nothing could ever be sent".to_owned());
    }
    Ok(())
}

async fn dial_until_done<F: Fabric>(shared: &Arc<Shared<F>>, peer: &Arc<Peer<F>>) {
    loop {
        // Registered before the state is read, so that no change in between is missed.
        let changed = peer.changed.notified();
        match next_step(shared, peer) {
            Step::Done => return,
            Step::Wait(until) => {
                tokio::select! {
                    () = sleep_until(until.into()) => {}
                    () = changed => {}
                }
            }
            Step::Dial(hello, addrs) => dial_once(shared, peer, &hello, &addrs).await,
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
        }
        step
    };
    effects.run(shared);
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
    state.exchange.begin_epoch();
    match state.exchange.start_dial(shared.now()) {
        DialStart::Go { generation, echoed, target } => {
            if let Err(cause) = shared.ensure_qp(peer, state, generation) {
                state.exchange.on_dial_failed(shared.now());
                peer.end_unbound(state, shared, Arc::new(cause), effects);
                return Step::Done;
            }
            let to = Addressee { instance: peer.id, incarnation: target, generation: echoed };
            match &state.epoch {
                Some(epoch) => Step::Dial(Box::new(shared.offer(epoch, &to)), addrs),
                None => Step::Done,
            }
        }
        DialStart::Wait { until } => Step::Wait(until),
        // The accepting half is at it, or an older dial has not ended yet: a change will be told.
        DialStart::InFlight | DialStart::Up => Step::Wait(shared.now() + Duration::from_millis(100)),
        DialStart::Idle | DialStart::Unknown => Step::Done,
    }
}

async fn dial_once<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    hello: &Offer,
    addrs: &[std::net::SocketAddr],
) {
    shared.counters.dials.add(1);
    match dial_any(shared, hello, addrs).await {
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

/// The first address that takes the connection.
async fn dial_any<F: Fabric>(
    shared: &Arc<Shared<F>>,
    hello: &Offer,
    addrs: &[std::net::SocketAddr],
) -> Result<Dialed<StreamOf<F>>, DialError> {
    let mut rest = addrs.iter();
    loop {
        // An endpoint has at least one address; the placeholder is refused like any other dead one.
        let addr = rest.next().copied().unwrap_or_else(|| std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
        match verbs_bootstrap::dial(shared.fabric.net(), addr, hello, &shared.config.bootstrap).await {
            Err(DialError::Connect { .. }) if rest.len() > 0 => {}
            other => return other,
        }
    }
}

fn check_reply(hello: &Offer, reply: &Offer) -> Result<(), Refusal> {
    check_offer(reply)?;
    match cannot_meet(&hello.port, &reply.port) {
        Some(detail) => Err(Refusal { status: Status::NoRoute, detail }),
        None => Ok(()),
    }
}

fn dial_failed<F: Fabric>(shared: &Arc<Shared<F>>, peer: &Arc<Peer<F>>, cause: EpochEnd) {
    shared.counters.dial_failures.add(1);
    let mut effects = Effects::default();
    {
        let mut state = peer.lock();
        match state.exchange.on_dial_failed(shared.now()) {
            DialFailed::EpochOver { .. } => peer.end_unbound(&mut state, shared, Arc::new(cause), &mut effects),
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
            peer.end_unbound(&mut peer.lock(), shared, Arc::new(EpochEnd::Replaced), &mut effects);
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

/// INIT to RTS, then the link. Called by the one half that the exchange told to.
async fn bring_up<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    generation: Generation,
    remote: &Offer,
    dialed: bool,
) -> Result<(), EpochEnd> {
    let (qp, path) = {
        let state = peer.lock();
        let epoch = of_generation(&state, generation).ok_or(EpochEnd::Replaced)?;
        (epoch.qp.clone(), shared.path(epoch, remote))
    };
    F::Qp::connect(qp, path).await.map_err(EpochEnd::ConnectQp)?;
    let mut effects = Effects::default();
    {
        let mut state = peer.lock();
        if of_generation(&state, generation).is_none() || !state.exchange.on_connected(generation) {
            return Err(EpochEnd::Replaced);
        }
        drop_oversized(shared, &mut state, remote, &mut effects);
        if let Some(epoch) = &mut state.epoch {
            let limits = shared.link_limits(epoch, remote);
            epoch.link = Some(Link::new(limits, dialed));
            epoch.remote = Some(remote.clone());
            epoch.up.send_replace(true);
            epoch.lives.push(spawn_proof_timer(shared, peer, generation, &path));
        }
        peer.pump(&mut state, shared, &mut effects);
    }
    peer.changed.notify_waiters();
    effects.run(shared);
    Ok(())
}

impl<F: Fabric> Shared<F> {
    fn path(&self, epoch: &Epoch<F>, remote: &Offer) -> QpPath {
        let (port, limits) = (self.fabric.port(), self.fabric.limits());
        QpPath {
            remote: remote.messaging,
            remote_port: remote.port,
            local_psn: epoch.psn,
            mtu: port.mtu.min(remote.port.mtu),
            rd_atomic: RdAtomic {
                initiator: limits.rd_atomic.initiator.min(remote.rd_atomic.responder),
                responder: limits.rd_atomic.responder.min(remote.rd_atomic.initiator),
            },
            timers: self.config.timers,
        }
    }

    fn link_limits(&self, epoch: &Epoch<F>, remote: &Offer) -> LinkLimits {
        let granted = epoch.qp.caps();
        LinkLimits {
            tx_window: remote.window_slabs,
            rx_window: epoch.rx_window,
            send_bytes: remote.slab_bytes.min(self.fabric.slabs().send_bytes),
            inline_bytes: granted.inline_bytes.min(self.config.inline_threshold_bytes),
            receive_max_bytes: self.config.eager_max_bytes,
            send_wrs: granted.send_wrs.min(self.config.send_wrs),
            signal_every: self.config.signal_every,
        }
    }
}

/// Frames that were queued before the peer's ceiling was known, and exceed it.
fn drop_oversized<F: Fabric>(shared: &Shared<F>, state: &mut PeerState<F>, remote: &Offer, effects: &mut Effects) {
    let max = shared.config.eager_max_bytes.min(remote.eager_max_bytes) as usize;
    let mut at = 0;
    while at < state.queue.len() {
        if state.queue[at].body_bytes() > max {
            if let Some(frame) = state.queue.remove(at) {
                let bytes = frame.body_bytes();
                effects.failed(frame, SendError::TooLarge { bytes, max });
            }
        } else {
            at += 1;
        }
    }
    state.fail_oversized_in_gate(max, effects);
}

/// Ends an epoch over whose QP no PING came back in time.
fn spawn_proof_timer<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    generation: Generation,
    path: &QpPath,
) -> tokio::task::AbortHandle {
    let after = shared.config.proof_deadline;
    let port = shared.fabric.port();
    let (remote, mtu_bytes) = (path.remote_port.gid, path.mtu.bytes());
    let (weak, peer) = (Arc::downgrade(shared), peer.clone());
    shared.spawn(async move {
        tokio::time::sleep(after).await;
        let Some(shared) = weak.upgrade() else { return };
        let proven = {
            let state = peer.lock();
            let epoch = of_generation(&state, generation);
            epoch.is_none_or(|epoch| epoch.link.as_ref().is_some_and(Link::is_proven))
        };
        if !proven {
            let cause = EpochEnd::NotProven { after, local: port.gid, gid_index: port.gid_index, remote, mtu_bytes };
            shared.end_epoch_of(&peer, generation, cause);
        }
    })
}

/// Waits until the other half has brought this epoch up; `false` when it ended.
async fn wait_up<F: Fabric>(peer: &Arc<Peer<F>>, generation: Generation) -> bool {
    let up = of_generation(&peer.lock(), generation).map(|epoch| epoch.up.subscribe());
    match up {
        Some(mut up) => up.wait_for(|up| *up).await.is_ok(),
        None => false,
    }
}

fn of_generation<F: Fabric>(state: &PeerState<F>, generation: Generation) -> Option<&Epoch<F>> {
    state.epoch.as_ref().filter(|epoch| epoch.generation == generation)
}

/// The peer's QP is in RTS: what was held back may go.
fn peer_ready<F: Fabric>(shared: &Arc<Shared<F>>, peer: &Arc<Peer<F>>, generation: Generation) {
    let mut effects = Effects::default();
    {
        let mut state = peer.lock();
        let epoch = state.epoch.as_mut().filter(|epoch| epoch.generation == generation);
        if let Some(link) = epoch.and_then(|epoch| epoch.link.as_mut()) {
            link.on_peer_ready();
            peer.pump(&mut state, shared, &mut effects);
        }
    }
    effects.run(shared);
}

/// Keeps the bootstrap socket for the epoch's life. When its last one closes, the peer is gone.
fn attach_life<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    generation: Generation,
    mut life: LifeSocket<StreamOf<F>>,
) {
    let mut state = peer.lock();
    let Some(epoch) = state.epoch.as_mut().filter(|epoch| epoch.generation == generation) else { return };
    epoch.lives_open += 1;
    let (weak, watched) = (Arc::downgrade(shared), peer.clone());
    let watch = shared.spawn(async move {
        let end = life.closed().await;
        tracing::debug!(peer = %watched.id, ?end, "bootstrap socket closed");
        let Some(shared) = weak.upgrade() else { return };
        let last = {
            let mut state = watched.lock();
            let epoch = state.epoch.as_mut().filter(|epoch| epoch.generation == generation);
            epoch.is_some_and(|epoch| {
                epoch.lives_open -= 1;
                epoch.lives_open == 0
            })
        };
        if last {
            shared.end_epoch_of(&watched, generation, EpochEnd::PeerClosed);
        }
    });
    epoch.lives.push(watch);
}

/// The accepting half.
pub(crate) struct Accept<F: Fabric>(pub(crate) Weak<Shared<F>>);

impl<F: Fabric> Accept<F> {
    fn decide(&self, hello: &Offer) -> Result<(Arc<Shared<F>>, Arc<Peer<F>>, Answer), Refusal> {
        let shared = self.0.upgrade().filter(|shared| !shared.is_stopping());
        let Some(shared) = shared else { return Err(Refusal::new(Status::ShuttingDown, "this worker is stopping")) };
        if hello.to != shared.me.instance {
            let detail = format!("this is {}, not {}", shared.me.instance, hello.to);
            return Err(Refusal::new(Status::WrongInstance, detail));
        }
        check_offer(hello)?;
        if let Some(detail) = cannot_meet(&shared.fabric.port(), &hello.port) {
            return Err(Refusal { status: Status::NoRoute, detail });
        }
        let peer = shared.peer_or_new(hello.from);
        let mut effects = Effects::default();
        let answer = {
            let mut state = peer.lock();
            decide_hello(&shared, &peer, &mut state, hello, &mut effects)
        };
        effects.run(&shared);
        answer.map(|answer| (shared, peer, answer))
    }
}

/// What the accepting half has to do under no lock.
enum Answer {
    BringUp(Generation),
    Repeat(Generation),
}

fn decide_hello<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    state: &mut PeerState<F>,
    hello: &Offer,
    effects: &mut Effects,
) -> Result<Answer, Refusal> {
    let former = state.exchange.remote().map(|(incarnation, _)| incarnation).or(state.exchange.target());
    let generation = match state.exchange.on_hello(hello) {
        HelloVerdict::Refuse(refusal) => return Err(refusal),
        HelloVerdict::Repeat { generation } => return Ok(Answer::Repeat(generation)),
        HelloVerdict::Join { generation, .. } => generation,
        HelloVerdict::Replace { generation, .. } => {
            let restarted = former.is_some_and(|former| former != hello.from_incarnation);
            let cause = if restarted { EpochEnd::PeerRestarted } else { EpochEnd::Replaced };
            peer.end_unbound(state, shared, Arc::new(cause), effects);
            generation
        }
    };
    if let Err(cause) = shared.ensure_qp(peer, state, generation) {
        let refusal = refuse(&cause);
        peer.end_epoch(state, shared, generation, Arc::new(cause), effects);
        return Err(refusal);
    }
    Ok(Answer::BringUp(generation))
}

/// What the dialer is told of a failure on this side.
fn refuse(cause: &EpochEnd) -> Refusal {
    let status = match cause {
        EpochEnd::Exhausted(_) | EpochEnd::CreateQp(_) => Status::Exhausted,
        EpochEnd::ConnectQp(_) => Status::NoRoute,
        EpochEnd::ShuttingDown => Status::ShuttingDown,
        _ => Status::Internal,
    };
    Refusal::new(status, cause.to_string())
}

impl<F: Fabric> Acceptor for Accept<F> {
    type Stream = StreamOf<F>;

    fn must_prove_alive(&self, hello: &Offer) -> bool {
        let Some(shared) = self.0.upgrade() else { return false };
        shared.find_peer(hello.from).is_some_and(|peer| peer.lock().exchange.would_replace(hello))
    }

    fn on_hello(&self, hello: Offer) -> impl Future<Output = Result<Offer, Refusal>> + Send {
        let decided = self.decide(&hello);
        if decided.is_err() {
            if let Some(shared) = self.0.upgrade() {
                shared.counters.hellos_refused.add(1);
            }
        }
        async move {
            let (shared, peer, answer) = decided?;
            let generation = match answer {
                Answer::BringUp(generation) => {
                    if let Err(cause) = bring_up(&shared, &peer, generation, &hello, false).await {
                        let refusal = refuse(&cause);
                        shared.end_epoch_of(&peer, generation, cause);
                        return Err(refusal);
                    }
                    generation
                }
                Answer::Repeat(generation) => {
                    if !wait_up(&peer, generation).await {
                        return Err(Refusal::new(Status::Internal, "the epoch ended while its QP was brought up"));
                    }
                    generation
                }
            };
            let state = peer.lock();
            let Some(epoch) = of_generation(&state, generation) else {
                return Err(Refusal::new(Status::Internal, "the epoch ended before the reply"));
            };
            let to =
                Addressee { instance: hello.from, incarnation: hello.from_incarnation, generation: hello.generation };
            Ok(shared.offer(epoch, &to))
        }
    }

    fn on_ready(&self, hello: Offer, reply: Offer, life: LifeSocket<Self::Stream>) {
        let Some(shared) = self.0.upgrade() else { return };
        let Some(peer) = shared.find_peer(hello.from) else { return };
        attach_life(&shared, &peer, reply.generation, life);
        peer_ready(&shared, &peer, reply.generation);
    }

    fn on_abandoned(&self, hello: Offer, reply: Offer, why: AcceptError) {
        let Some(shared) = self.0.upgrade() else { return };
        let Some(peer) = shared.find_peer(hello.from) else { return };
        let alone = {
            let state = peer.lock();
            of_generation(&state, reply.generation).is_some_and(|epoch| epoch.lives_open == 0) && !state.dialer
        };
        tracing::debug!(peer = %peer.id, %why, alone, "an exchange was abandoned before READY");
        if alone {
            shared.end_epoch_of(&peer, reply.generation, EpochEnd::PeerClosed);
        }
    }
}
