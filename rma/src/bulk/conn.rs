//! How a bulk connection comes to be and ends: the two halves of the bootstrap's bulk plane, under one lock a peer.
//!
//! A connection's bootstrap socket lives as long as its QP. Its close is how the other half hears of an end: a responder in
//! ERR is told nothing else on Soft-RoCE.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::Ordering::{self, Relaxed},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
    time::{Instant, sleep_until},
};
use verbs_bootstrap::{
    AcceptError, DialError, DialFailed, DialStart, Dialed, Exchange, Generation, HelloVerdict, Incarnation, InstanceId,
    LifeSocket, Net, Offer, Plane, PortIdentity, Psn, QpEndpoint, RdAtomic, Refusal, RegisterVerdict, ReplyVerdict,
    Status,
};
use verbs_transport::{
    BoxFuture, BulkAcceptor, EpochEnd, FEATURE_RMA, PeerObserver,
    fabric::{
        CreateQpError, Fabric, QpPath,
        bulk::{BulkCaps, BulkFabric, BulkPort, BulkQp},
    },
};

use super::{
    BulkDescription, QpOf, RegionOf, Shared,
    config::NOTIFY_WINDOW_MAX,
    driver::{News, NoConnection},
    error::BulkEnd,
    op::Op,
    stats::bump,
};
use crate::proto::transfer::TransferId;

type StreamOf<F> = <<F as Fabric>::Net as Net>::Stream;

/// One peer's bulk connection.
pub(crate) struct Conn<F: BulkFabric> {
    pub(crate) peer: InstanceId,
    state: Mutex<ConnState<F>>,
    /// Wakes the dialer out of its back-off.
    changed: Notify,
}

pub(crate) struct ConnState<F: BulkFabric> {
    exchange: Exchange,
    epoch: Option<Epoch<F>>,
    /// Transfers that wait for a connection.
    waiting: VecDeque<Op<RegionOf<F>>>,
    /// Somebody wants one attempt at a connection, without a transfer.
    wanted: bool,
    /// A task is dialing, or waits to.
    dialer: bool,
}

/// One QP and the connection that comes of it.
struct Epoch<F: BulkFabric> {
    generation: Generation,
    /// No two QPs of a run share it.
    tag: u32,
    qp: Arc<QpOf<F>>,
    psn: Psn,
    /// The peer's offer and the READs agreed on, once the QP is in RTS.
    up: Option<(Offer, RdAtomic)>,
    /// Turns true with `up`; closed when the epoch ends.
    told: watch::Sender<bool>,
    lives: Vec<AbortHandle>,
    lives_open: usize,
}

impl<F: BulkFabric> Conn<F> {
    pub(super) fn new(peer: InstanceId, exchange: Exchange) -> Self {
        let state = ConnState { exchange, epoch: None, waiting: VecDeque::new(), wanted: false, dialer: false };
        Self { peer, state: Mutex::new(state), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, ConnState<F>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_up(&self) -> bool {
        self.lock().epoch.as_ref().is_some_and(|epoch| epoch.up.is_some())
    }

    pub(super) fn describe(&self) -> Option<BulkDescription> {
        let state = self.lock();
        let epoch = state.epoch.as_ref()?;
        let (remote, rd_atomic) = epoch.up.as_ref()?;
        Some(BulkDescription {
            qpn: epoch.qp.qpn().get(),
            read_window: rd_atomic.initiator,
            reads_answered: rd_atomic.responder,
            notify_window: remote.window_slabs,
        })
    }

    /// The epoch that is up.
    pub(super) fn up_tag(&self) -> Option<u32> {
        self.lock().epoch.as_ref().filter(|epoch| epoch.up.is_some()).map(|epoch| epoch.tag)
    }

    /// Takes a waiting transfer out.
    pub(super) fn take_waiting(&self, id: TransferId) -> Option<Op<RegionOf<F>>> {
        let mut state = self.lock();
        let at = state.waiting.iter().position(|op| op.id == id)?;
        state.waiting.remove(at)
    }

    /// Takes all transfers that wait for the epoch that is now up.
    pub(super) fn take_all_waiting(&self) -> VecDeque<Op<RegionOf<F>>> {
        std::mem::take(&mut self.lock().waiting)
    }

    /// Something came back over the QP of that epoch.
    pub(super) fn proven(&self, tag: u32) -> bool {
        let mut state = self.lock();
        let Some(generation) = state.of_tag(tag) else { return false };
        state.exchange.on_proven(generation)
    }
}

impl<F: BulkFabric> ConnState<F> {
    fn of_generation(&self, generation: Generation) -> Option<&Epoch<F>> {
        self.epoch.as_ref().filter(|epoch| epoch.generation == generation)
    }

    fn of_tag(&self, tag: u32) -> Option<Generation> {
        self.epoch.as_ref().filter(|epoch| epoch.tag == tag).map(|epoch| epoch.generation)
    }
}

impl<F: BulkFabric> Shared<F> {
    /// Lets a transfer wait for a connection, and sees that one is made.
    pub(super) fn wait_for_connection(self: &Arc<Self>, conn: &Arc<Conn<F>>, op: Op<RegionOf<F>>) {
        let mut state = conn.lock();
        state.waiting.push_back(op);
        self.ensure_dialer(conn, &mut state);
    }

    /// One attempt at a connection, for whoever needs it; whether there is one. Without an address of the peer, or in the
    /// back-off after a failure, there is no attempt.
    pub(super) async fn connect(self: &Arc<Self>, conn: &Arc<Conn<F>>) -> bool {
        {
            let mut state = conn.lock();
            state.wanted = true;
            self.ensure_dialer(conn, &mut state);
        }
        let mut over = self.over.subscribe();
        loop {
            let changed = conn.changed.notified();
            {
                let state = conn.lock();
                if state.epoch.as_ref().is_some_and(|epoch| epoch.up.is_some()) {
                    return true;
                }
                if !state.wanted {
                    return false;
                }
            }
            tokio::select! {
                () = changed => {}
                _ = over.wait_for(|over| *over) => return false,
            }
        }
    }

    fn ensure_dialer(self: &Arc<Self>, conn: &Arc<Conn<F>>, state: &mut ConnState<F>) {
        // One that is up has told the driver, or is about to: it takes what waits.
        let up = state.epoch.as_ref().is_some_and(|epoch| epoch.up.is_some());
        if !up && !std::mem::replace(&mut state.dialer, true) {
            let (shared, conn) = (self.clone(), conn.clone());
            self.runtime.spawn(async move { dial_until_done(&shared, &conn).await });
        }
    }

    /// Ends the epoch of that QP, once.
    pub(super) fn end_epoch(&self, conn: &Conn<F>, tag: u32, cause: BulkEnd) {
        let mut state = conn.lock();
        if let Some(generation) = state.of_tag(tag) {
            state.exchange.on_epoch_end(generation, Instant::now().into_std());
            self.end_unbound(conn, &mut state, &Arc::new(cause));
        }
    }

    fn end_generation(&self, conn: &Conn<F>, generation: Generation, cause: BulkEnd) {
        let mut state = conn.lock();
        let ours = state.of_generation(generation).is_some();
        if state.exchange.on_epoch_end(generation, Instant::now().into_std()) || ours {
            self.end_unbound(conn, &mut state, &Arc::new(cause));
        }
    }

    /// Ends whatever there is with a peer.
    pub(super) fn end_peer(&self, conn: &Conn<F>, cause: BulkEnd) {
        let mut state = conn.lock();
        if let Some(generation) = state.exchange.generation() {
            state.exchange.on_epoch_end(generation, Instant::now().into_std());
        }
        if state.epoch.is_some() || !state.waiting.is_empty() {
            self.end_unbound(conn, &mut state, &Arc::new(cause));
        }
    }

    /// The exchange has given the epoch up: the QP goes to ERR, and the driver sees to its flush.
    fn end_unbound(&self, conn: &Conn<F>, state: &mut ConnState<F>, cause: &Arc<BulkEnd>) {
        self.counters.end_epoch(cause);
        let peer = conn.peer;
        if let Some(epoch) = state.epoch.take() {
            let was_up = epoch.up.is_some();
            tracing::info!(%peer, qp = %epoch.qp.qpn(), was_up, cause = cause.cause(), reason = %cause, "bulk connection ended");
            // Closes the sockets, which tells the peer.
            epoch.lives.iter().for_each(AbortHandle::abort);
            if let Err(error) = epoch.qp.to_error() {
                tracing::warn!(%peer, %error, "the bulk QP's flush did not begin; it ends by its deadline");
            }
            self.tell(News::Ended { peer, tag: epoch.tag, qp: epoch.qp, cause: cause.clone() });
        } else {
            tracing::info!(%peer, cause = cause.cause(), reason = %cause, "no bulk connection");
        }
        state.wanted = false;
        if !state.waiting.is_empty() {
            let ops = state.waiting.drain(..).collect();
            let why = match **cause {
                BulkEnd::ShuttingDown => NoConnection::ShuttingDown,
                _ => NoConnection::Ended(cause.clone()),
            };
            self.tell(News::Refused { ops, why });
        }
        conn.changed.notify_waiters();
    }

    /// The QP of epoch `generation`, made if it is not there, with its receives posted.
    fn ensure_qp(&self, state: &mut ConnState<F>, generation: Generation) -> Result<(), BulkEnd> {
        if state.of_generation(generation).is_some() {
            return Ok(());
        }
        // The teardown raises the flag, then ends every connection under its lock: one made after that would stay.
        if self.is_closing() {
            return Err(BulkEnd::ShuttingDown);
        }
        let caps = BulkCaps { send_wrs: self.config.send_wrs, recv_wrs: self.config.recv_wrs() };
        let (cq_depth, qps, qp_wrs) = (self.limits.cq_depth, self.qps.load(Relaxed), caps.send_wrs + caps.recv_wrs);
        if (qps as u64 + 1) * u64::from(qp_wrs) > u64::from(cq_depth) {
            return Err(BulkEnd::CqFull { cq_depth, qps, qp_wrs });
        }
        let qp = self.port.create_qp(caps).map_err(BulkEnd::CreateQp)?;
        qp.post_receives(caps.recv_wrs).map_err(BulkEnd::Post)?;
        self.qps.fetch_add(1, Relaxed);
        bump(&self.counters.epochs_begun);
        bump(&self.counters.qps);
        state.epoch = Some(Epoch {
            generation,
            tag: self.next_tag.fetch_add(1, Relaxed),
            qp: Arc::new(qp),
            psn: self.random_psn(),
            up: None,
            told: watch::Sender::new(false),
            lives: Vec::new(),
            lives_open: 0,
        });
        Ok(())
    }

    /// A QP is destroyed, or given up.
    pub(super) fn forget_qp(&self) {
        self.qps.fetch_sub(1, Relaxed);
        self.counters.qps.fetch_sub(1, Ordering::Relaxed);
    }

    fn rd_atomic(&self) -> RdAtomic {
        let (limits, most) = (self.limits.rd_atomic, self.config.rd_atomic_max);
        RdAtomic { initiator: limits.initiator.min(most), responder: limits.responder.min(most) }
    }

    fn offer(&self, port: PortIdentity, epoch: &Epoch<F>, to: &Addressee) -> Offer {
        Offer {
            from: self.me.instance,
            from_incarnation: self.me.incarnation,
            to: to.instance,
            to_incarnation: to.incarnation,
            generation: epoch.generation,
            echoed_generation: to.generation,
            port,
            plane: Plane::Bulk,
            qp: QpEndpoint { qpn: epoch.qp.qpn(), psn: epoch.psn },
            rd_atomic: self.rd_atomic(),
            slab_bytes: 0,
            window_slabs: self.config.notify_window,
            eager_max_bytes: 0,
            features: FEATURE_RMA,
        }
    }

    /// INIT to RTS. Called by the one half that the exchange told to.
    async fn bring_up(
        self: &Arc<Self>,
        conn: &Arc<Conn<F>>,
        generation: Generation,
        remote: &Offer,
        dialed: bool,
    ) -> Result<(), BulkEnd> {
        let worker = self.worker.upgrade().ok_or(BulkEnd::ShuttingDown)?;
        let port = worker.fabric().known_port();
        let rd_atomic = agreed(self.rd_atomic(), remote.rd_atomic);
        let (qp, path) = {
            let state = conn.lock();
            let epoch = state.of_generation(generation).ok_or(BulkEnd::Replaced)?;
            let path = QpPath {
                remote: remote.qp,
                remote_port: remote.port,
                local_psn: epoch.psn,
                mtu: port.mtu.min(remote.port.mtu),
                rd_atomic,
                timers: worker.config().timers,
            };
            (epoch.qp.clone(), path)
        };
        drop(worker);
        QpOf::<F>::connect(qp, path).await.map_err(BulkEnd::ConnectQp)?;
        let mut state = conn.lock();
        if state.of_generation(generation).is_none() || !state.exchange.on_connected(generation) {
            return Err(BulkEnd::Replaced);
        }
        if let Some(epoch) = &mut state.epoch {
            tracing::info!(
                peer = %conn.peer, qp = %epoch.qp.qpn(), remote_qp = %remote.qp.qpn, reads = rd_atomic.initiator,
                reads_answered = rd_atomic.responder, dialed, "bulk QP in RTS"
            );
            epoch.up = Some((remote.clone(), rd_atomic));
            epoch.told.send_replace(true);
            self.tell(News::Up {
                peer: conn.peer,
                tag: epoch.tag,
                qp: epoch.qp.clone(),
                reads: rd_atomic.initiator.into(),
                credits: remote.window_slabs,
                dialed,
            });
        }
        drop(state);
        conn.changed.notify_waiters();
        Ok(())
    }

    /// Keeps the bootstrap socket for the epoch's life. When its last one closes, the peer's half is gone.
    fn attach_life(self: &Arc<Self>, conn: &Arc<Conn<F>>, generation: Generation, mut life: LifeSocket<StreamOf<F>>) {
        let mut state = conn.lock();
        let Some(epoch) = state.epoch.as_mut().filter(|epoch| epoch.generation == generation) else { return };
        epoch.lives_open += 1;
        let (weak, watched) = (Arc::downgrade(self), conn.clone());
        let watch = self.runtime.spawn(async move {
            let end = life.closed().await;
            tracing::debug!(peer = %watched.peer, ?end, "bulk bootstrap socket closed");
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
                shared.end_generation(&watched, generation, BulkEnd::PeerClosed);
            }
        });
        epoch.lives.push(watch.abort_handle());
    }

    /// The peer's QP is in RTS: what was held back may go.
    fn peer_ready(&self, conn: &Conn<F>, generation: Generation) {
        let tag = conn.lock().of_generation(generation).map(|epoch| epoch.tag);
        if let Some(tag) = tag {
            self.tell(News::PeerReady { peer: conn.peer, tag });
        }
    }
}

/// Whom an offer is for.
struct Addressee {
    instance: InstanceId,
    incarnation: Incarnation,
    generation: Generation,
}

/// READs at once: each side asks for no more than the other answers.
fn agreed(ours: RdAtomic, theirs: RdAtomic) -> RdAtomic {
    RdAtomic { initiator: ours.initiator.min(theirs.responder), responder: ours.responder.min(theirs.initiator) }
}

/// An offer that no bulk connection can be made of.
fn check_offer(offer: &Offer) -> Result<(), Refusal> {
    let bad = |detail| Err(Refusal { status: Status::BadOffer, detail });
    if offer.plane != Plane::Bulk {
        return bad(format!("the answer to a bulk hello is of the {} plane", offer.plane));
    }
    if !(1..=NOTIFY_WINDOW_MAX).contains(&offer.window_slabs) {
        return bad(format!("a window of {} notifications, 1 to {NOTIFY_WINDOW_MAX} are possible", offer.window_slabs));
    }
    let RdAtomic { initiator, responder } = offer.rd_atomic;
    if initiator == 0 || responder == 0 {
        return bad(format!("{initiator} RDMA READs at once as initiator and {responder} as responder: none at all"));
    }
    Ok(())
}

/// Waits until the other half has brought this epoch up; `false` when it ended.
async fn wait_up<F: BulkFabric>(conn: &Conn<F>, generation: Generation) -> bool {
    let told = conn.lock().of_generation(generation).map(|epoch| epoch.told.subscribe());
    match told {
        Some(mut told) => told.wait_for(|up| *up).await.is_ok(),
        None => false,
    }
}

// The dialing half.

enum Step {
    Dial(Box<Offer>, Vec<SocketAddr>),
    /// For the other half, or an older dial.
    Wait(Instant),
    /// For the end of the back-off.
    BackOff(Instant),
    Done,
}

async fn dial_until_done<F: BulkFabric>(shared: &Arc<Shared<F>>, conn: &Arc<Conn<F>>) {
    let mut over = shared.over.subscribe();
    loop {
        // Registered before the state is read, so that no change in between is missed.
        let changed = conn.changed.notified();
        match decide_step(shared, conn) {
            Step::Done => return,
            Step::Wait(until) | Step::BackOff(until) => {
                tokio::select! {
                    biased;
                    () = sleep_until(until) => {}
                    () = changed => {}
                }
            }
            Step::Dial(hello, addrs) => {
                tokio::select! {
                    biased;
                    _ = over.wait_for(|over| *over) => return,
                    () = dial_once(shared, conn, &hello, &addrs) => {}
                }
            }
        }
    }
}

fn decide_step<F: BulkFabric>(shared: &Arc<Shared<F>>, conn: &Arc<Conn<F>>) -> Step {
    let mut state = conn.lock();
    let mut step = wanted_step(shared, conn, &mut state);
    if matches!(step, Step::BackOff(_)) && state.waiting.is_empty() {
        // Whoever only wanted to have it ready does not wait for so long.
        step = Step::Done;
    }
    if matches!(step, Step::BackOff(_) | Step::Done) && std::mem::take(&mut state.wanted) {
        conn.changed.notify_waiters();
    }
    if matches!(step, Step::Done) {
        state.dialer = false;
    }
    step
}

fn wanted_step<F: BulkFabric>(shared: &Arc<Shared<F>>, conn: &Arc<Conn<F>>, state: &mut ConnState<F>) -> Step {
    let up = state.epoch.as_ref().is_some_and(|epoch| epoch.up.is_some());
    if (state.waiting.is_empty() && !state.wanted) || up {
        return Step::Done;
    }
    let refuse = |state: &mut ConnState<F>, why| {
        let ops = state.waiting.drain(..).collect();
        shared.tell(News::Refused { ops, why });
        Step::Done
    };
    let worker = shared.worker.upgrade().filter(|_| !shared.is_closing());
    let Some(worker) = worker else { return refuse(state, NoConnection::ShuttingDown) };
    let facts = worker.peer_facts(conn.peer);
    let Some((facts, address)) = facts.and_then(|facts| Some((facts.clone(), facts.address?))) else {
        return refuse(state, NoConnection::NotRegistered);
    };
    if facts.run.is_some_and(|run| run.features & FEATURE_RMA == 0) {
        return refuse(state, NoConnection::NoCapability);
    }
    if let Some(target) = facts.target {
        if state.exchange.target() != Some(target) {
            // The messages' exchange knows the run; what it learnt of it holds here, too.
            if let RegisterVerdict::Retire { retired: Some(_) } = state.exchange.on_registered(target) {
                // What waits goes by the next one.
                let waiting = std::mem::take(&mut state.waiting);
                shared.end_unbound(conn, state, &Arc::new(BulkEnd::Replaced));
                state.waiting = waiting;
            }
        }
    }
    let now = Instant::now();
    state.exchange.begin_epoch();
    match state.exchange.start_dial(now.into_std()) {
        DialStart::Go { generation, echoed, target } => {
            if let Err(cause) = shared.ensure_qp(state, generation) {
                state.exchange.on_dial_failed(now.into_std());
                shared.end_unbound(conn, state, &Arc::new(cause));
                return Step::Done;
            }
            let to = Addressee { instance: conn.peer, incarnation: target, generation: echoed };
            match &state.epoch {
                Some(epoch) => {
                    Step::Dial(Box::new(shared.offer(worker.fabric().port(), epoch, &to)), address.bootstrap)
                }
                None => Step::Done,
            }
        }
        DialStart::Wait { until } => Step::BackOff(until.into()),
        // The accepting half is at it, or an older dial has not ended yet: a change will be told.
        DialStart::InFlight | DialStart::Up => Step::Wait(now + Duration::from_millis(100)),
        DialStart::Idle | DialStart::Unknown => refuse(state, NoConnection::NotRegistered),
    }
}

async fn dial_once<F: BulkFabric>(shared: &Arc<Shared<F>>, conn: &Arc<Conn<F>>, hello: &Offer, addrs: &[SocketAddr]) {
    bump(&shared.counters.dials);
    match dial_any(shared, hello, addrs).await {
        Ok(dialed) => match check_offer(&dialed.reply) {
            Ok(()) => on_dialed(shared, conn, dialed).await,
            Err(refusal) => dial_failed(shared, conn, BulkEnd::Refused(refusal)),
        },
        Err(Some(error)) => dial_failed(shared, conn, BulkEnd::Dial(error)),
        Err(None) => dial_failed(shared, conn, BulkEnd::ShuttingDown),
    }
}

/// The first address that takes the connection; `None` when the worker is gone.
async fn dial_any<F: BulkFabric>(
    shared: &Arc<Shared<F>>,
    hello: &Offer,
    addrs: &[SocketAddr],
) -> Result<Dialed<StreamOf<F>>, Option<DialError>> {
    let mut rest = addrs.iter();
    loop {
        let worker = shared.worker.upgrade().ok_or(None)?;
        // An endpoint has at least one address; the placeholder is refused like any other dead one.
        let addr = rest.next().copied().unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        match verbs_bootstrap::dial(worker.fabric().net(), addr, hello, &worker.config().bootstrap).await {
            Err(DialError::Connect { .. }) if rest.len() > 0 => {}
            other => return other.map_err(Some),
        }
    }
}

fn dial_failed<F: BulkFabric>(shared: &Arc<Shared<F>>, conn: &Arc<Conn<F>>, cause: BulkEnd) {
    bump(&shared.counters.dial_failures);
    tracing::debug!(peer = %conn.peer, cause = cause.cause(), reason = %cause, "the bulk dial failed");
    let now = Instant::now().into_std();
    let mut state = conn.lock();
    let failed = match &cause {
        BulkEnd::Dial(DialError::Refused { status, .. }) => state.exchange.on_refused(*status, now),
        _ => state.exchange.on_dial_failed(now),
    };
    match failed {
        DialFailed::EpochOver { .. } => shared.end_unbound(conn, &mut state, &Arc::new(cause)),
        // The accepting half came up, or the epoch had ended: nothing failed.
        DialFailed::CountsAsSuccess { .. } | DialFailed::Stale => {}
    }
}

async fn on_dialed<F: BulkFabric>(shared: &Arc<Shared<F>>, conn: &Arc<Conn<F>>, dialed: Dialed<StreamOf<F>>) {
    let verdict = conn.lock().exchange.on_reply(&dialed.reply);
    let generation = match verdict {
        ReplyVerdict::Connect { generation } => {
            if let Err(cause) = shared.bring_up(conn, generation, &dialed.reply, true).await {
                return shared.end_generation(conn, generation, cause);
            }
            generation
        }
        ReplyVerdict::AlreadyUp { generation } => {
            if !wait_up(conn, generation).await {
                return;
            }
            // The reply says that the peer's QP is in RTS.
            shared.peer_ready(conn, generation);
            generation
        }
        ReplyVerdict::Retire { .. } => {
            return shared.end_unbound(conn, &mut conn.lock(), &Arc::new(BulkEnd::Replaced));
        }
        ReplyVerdict::Ignore => return,
    };
    match dialed.ready().await {
        Ok(life) => shared.attach_life(conn, generation, life),
        // The acceptor hears the socket close and ends its half, whose silence ends this one.
        Err(error) => tracing::debug!(peer = %conn.peer, %error, "READY did not go out"),
    }
}

// The accepting half, and the worker's news.

/// What is attached to the worker. Holds nothing alive.
pub(crate) struct Hooks<F: BulkFabric>(pub(super) Weak<Shared<F>>);

/// What the accepting half has to do under no lock.
enum Answer {
    BringUp(Generation),
    Repeat(Generation),
}

fn decide_hello<F: BulkFabric>(shared: &Shared<F>, conn: &Conn<F>, hello: &Offer) -> Result<Answer, Refusal> {
    let mut state = conn.lock();
    let generation = match state.exchange.on_hello(hello) {
        HelloVerdict::Refuse(refusal) => return Err(refusal),
        HelloVerdict::Repeat { generation } => return Ok(Answer::Repeat(generation)),
        HelloVerdict::Join { generation, .. } => generation,
        HelloVerdict::Replace { generation, .. } => {
            // What waits goes by the new one.
            let waiting = std::mem::take(&mut state.waiting);
            shared.end_unbound(conn, &mut state, &Arc::new(BulkEnd::Replaced));
            state.waiting = waiting;
            generation
        }
    };
    if let Err(cause) = shared.ensure_qp(&mut state, generation) {
        let refusal = refuse(&cause);
        state.exchange.on_epoch_end(generation, Instant::now().into_std());
        shared.end_unbound(conn, &mut state, &Arc::new(cause));
        return Err(refusal);
    }
    Ok(Answer::BringUp(generation))
}

/// What the dialer is told of a failure on this side.
fn refuse(cause: &BulkEnd) -> Refusal {
    let status = match cause {
        BulkEnd::CqFull { .. } | BulkEnd::CreateQp(CreateQpError::Exhausted { .. }) => Status::Exhausted,
        BulkEnd::ConnectQp(_) => Status::NoRoute,
        BulkEnd::ShuttingDown => Status::ShuttingDown,
        _ => Status::Internal,
    };
    Refusal::new(status, cause.to_string())
}

async fn answer_hello<F: BulkFabric>(shared: Arc<Shared<F>>, hello: Offer) -> Result<Offer, Refusal> {
    if shared.is_closing() {
        return Err(Refusal::new(Status::ShuttingDown, "bulk memory is being taken down"));
    }
    check_offer(&hello)?;
    let conn = shared.conn(hello.from);
    let generation = match decide_hello(&shared, &conn, &hello)? {
        Answer::BringUp(generation) => {
            if let Err(cause) = shared.bring_up(&conn, generation, &hello, false).await {
                let refusal = refuse(&cause);
                shared.end_generation(&conn, generation, cause);
                return Err(refusal);
            }
            generation
        }
        Answer::Repeat(generation) => {
            if !wait_up(&conn, generation).await {
                return Err(Refusal::new(Status::Internal, "the epoch ended while its QP was brought up"));
            }
            generation
        }
    };
    let state = conn.lock();
    let (Some(epoch), Some(worker)) = (state.of_generation(generation), shared.worker.upgrade()) else {
        return Err(Refusal::new(Status::Internal, "the epoch ended before the reply"));
    };
    let to = Addressee { instance: hello.from, incarnation: hello.from_incarnation, generation: hello.generation };
    Ok(shared.offer(worker.fabric().known_port(), epoch, &to))
}

impl<F: BulkFabric> BulkAcceptor<StreamOf<F>> for Hooks<F> {
    fn must_prove_alive(&self, hello: &Offer) -> bool {
        let conn = self.0.upgrade().and_then(|shared| shared.find_conn(hello.from));
        conn.is_some_and(|conn| conn.lock().exchange.would_replace(hello))
    }

    fn on_hello(&self, hello: Offer) -> BoxFuture<'static, Result<Offer, Refusal>> {
        let shared = self.0.upgrade();
        Box::pin(async move {
            let Some(shared) = shared else {
                return Err(Refusal::new(Status::ShuttingDown, "bulk memory was taken down"));
            };
            let answered = answer_hello(shared.clone(), hello).await;
            if let Err(refusal) = &answered {
                bump(&shared.counters.hellos_refused);
                tracing::debug!(%refusal, "the bulk hello is refused");
            }
            answered
        })
    }

    fn on_ready(&self, hello: Offer, reply: Offer, life: LifeSocket<StreamOf<F>>) {
        let Some(shared) = self.0.upgrade() else { return };
        let Some(conn) = shared.find_conn(hello.from) else { return };
        shared.attach_life(&conn, reply.generation, life);
        shared.peer_ready(&conn, reply.generation);
    }

    fn on_abandoned(&self, hello: Offer, reply: Offer, why: AcceptError) {
        let Some(shared) = self.0.upgrade() else { return };
        let Some(conn) = shared.find_conn(hello.from) else { return };
        let alone = {
            let state = conn.lock();
            state.of_generation(reply.generation).is_some_and(|epoch| epoch.lives_open == 0) && !state.dialer
        };
        tracing::debug!(peer = %conn.peer, %why, alone, "a bulk exchange was abandoned before READY");
        if alone {
            shared.end_generation(&conn, reply.generation, BulkEnd::PeerClosed);
        }
    }
}

impl<F: BulkFabric> PeerObserver for Hooks<F> {
    fn on_ended(&self, peer: InstanceId, run: Option<Incarnation>, cause: &Arc<EpochEnd>) {
        let for_good = matches!(**cause, EpochEnd::PeerRestarted | EpochEnd::Unregistered | EpochEnd::DeviceLost(_));
        let Some(conn) = self.0.upgrade().filter(|_| for_good).and_then(|shared| shared.find_conn(peer)) else {
            return;
        };
        let Some(shared) = self.0.upgrade() else { return };
        // A restarted peer may have connected by its new run already.
        let same = |bound: Incarnation| run.is_none_or(|run| run == bound);
        let concerned = conn.lock().exchange.remote().is_none_or(|(bound, _)| same(bound));
        if concerned {
            shared.end_peer(&conn, BulkEnd::Peer(cause.clone()));
        }
    }

    fn on_qp_fatal(&self, qpn: u32) {
        let Some(shared) = self.0.upgrade() else { return };
        for conn in shared.all_conns() {
            let tag = conn.lock().epoch.as_ref().filter(|epoch| epoch.qp.qpn().get() == qpn).map(|epoch| epoch.tag);
            if let Some(tag) = tag {
                shared.end_epoch(&conn, tag, BulkEnd::QpFatal);
            }
        }
    }

    fn on_shutdown(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.tell(News::Shutdown);
        }
    }
}
