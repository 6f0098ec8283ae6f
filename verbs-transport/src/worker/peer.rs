//! One peer: its gate, its channel, and the epoch that carries them. Everything here runs under the peer's lock.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use arrayvec::ArrayVec;
use tokio::{
    sync::{Notify, oneshot, watch},
    task::AbortHandle,
};
use verbs_bootstrap::{Endpoint, Exchange, Generation, Incarnation, InstanceId, Offer, PortIdentity, Psn};

use super::{
    admission::{Admission, AdmissionError, CancelGate, SendOutcome, Ticket, contain},
    error::{ConnectError, EpochEnd, SendError},
    layer::{FEATURE_RMA, PeerRun},
    news::News,
    outbox::{Batch, INLINE_ARENA_BYTES},
    shared::Shared,
};
use crate::{
    fabric::{Fabric, FabricQp, PostError, SendData, SendWr, WrSeq},
    proto::{
        frame::Lane,
        link::{Filled, Frame, InFlight, Link, LinkMark},
        send_queue::{Ended, Posting},
    },
};

/// A peer, known by registration or by its hello.
pub(crate) struct Peer<F: Fabric> {
    pub(crate) id: InstanceId,
    state: Mutex<PeerState<F>>,
    /// Wakes the dialer out of its back-off: registered anew, connected, or ended.
    pub(crate) changed: Notify,
}

pub(crate) struct PeerState<F: Fabric> {
    pub(crate) address: Option<Endpoint>,
    pub(crate) exchange: Exchange,
    /// The channel: frames accepted, not posted in full.
    pub(crate) queue: VecDeque<Frame>,
    gate: VecDeque<Gated>,
    /// Looks of the driver until the memory of the last burst is given back.
    looks_to_trim: u8,
    pub(crate) epoch: Option<Epoch<F>>,
    /// A task is dialing, or waits to.
    pub(crate) dialer: bool,
    /// Since when somebody has waited for the connection that is not up: the age of the oldest frame or caller.
    pub(crate) wanted_since: Option<Instant>,
    pub(crate) connect_waiters: Vec<oneshot::Sender<Result<(), ConnectError>>>,
    /// Why the last epoch ended, until another one is proven or the peer is registered anew.
    pub(crate) last_end: Option<Arc<EpochEnd>>,
    /// No longer in the map of peers: whoever finds it looks again.
    pub(crate) forgotten: bool,
    /// In the driver's list of peers to look at.
    pub(crate) touched: bool,
    /// In the driver's list of peers that owe credits once slabs are posted again.
    pub(crate) owing: bool,
    /// In the list of peers that wait for a send slab.
    pub(crate) starved: bool,
}

/// A frame in the gate.
struct Gated {
    frame: Frame,
    ticket: Arc<Ticket>,
    since: Instant,
}

/// One QP and the connection that comes of it.
pub(crate) struct Epoch<F: Fabric> {
    pub(crate) generation: Generation,
    pub(crate) qp: Arc<F::Qp>,
    pub(crate) psn: Psn,
    pub(crate) rx_window: u16,
    /// The connection, once the QP is in RTS.
    pub(crate) link: Option<Link>,
    pub(crate) remote: Option<Offer>,
    /// Our port as it was when the QP was brought up.
    pub(crate) local: Option<PortIdentity>,
    /// Turns true with `link`; closed when the epoch ends.
    pub(crate) up: watch::Sender<bool>,
    /// The tasks that hold this epoch's bootstrap sockets.
    pub(crate) lives: Vec<AbortHandle>,
    pub(crate) lives_open: usize,
    /// The exchange and the waiters know that the connection is proven.
    pub(crate) proof_told: bool,
    /// Where the send queue stood when the driver last looked at its bare tail.
    pub(crate) tail_seen: Option<WrSeq>,
    /// How far the connection had come, since when it has stood there, and how often the device was asked since.
    pub(crate) moved: Option<(LinkMark, Instant, u32)>,
    /// PINGs answered; closed when the epoch ends.
    pub(crate) pongs: watch::Sender<u64>,
}

/// An epoch on its way out: the driver waits for its flush, then destroys the QP.
pub(crate) struct Retired<F: Fabric> {
    pub(crate) peer: InstanceId,
    pub(crate) qp: Arc<F::Qp>,
    pub(crate) link: Option<Link>,
    pub(crate) cause: Arc<EpochEnd>,
    pub(crate) rx_window: u16,
    pub(crate) since: Instant,
}

/// What must happen after the lock is gone: callbacks of the application never run under it.
#[derive(Default)]
pub(crate) struct Effects(Vec<Effect>);

enum Effect {
    Resolve(Arc<Ticket>, Result<(), AdmissionError>),
    Failed(Frame, SendError),
    Connected(oneshot::Sender<Result<(), ConnectError>>, Result<(), ConnectError>),
    Tell(Box<News>),
    Joined(InstanceId, Box<PeerRun>),
    Left(InstanceId, Option<Incarnation>, Arc<EpochEnd>),
}

impl Effects {
    pub(crate) fn failed(&mut self, frame: Frame, error: SendError) {
        self.0.push(Effect::Failed(frame, error));
    }

    fn resolve(&mut self, ticket: Arc<Ticket>, result: Result<(), AdmissionError>) {
        self.0.push(Effect::Resolve(ticket, result));
    }

    pub(crate) fn connected(
        &mut self,
        waiter: oneshot::Sender<Result<(), ConnectError>>,
        result: Result<(), ConnectError>,
    ) {
        self.0.push(Effect::Connected(waiter, result));
    }

    /// Goes into the log.
    pub(crate) fn tell(&mut self, news: News) {
        self.0.push(Effect::Tell(Box::new(news)));
    }

    /// Runs them. No lock of ours may be held.
    pub(crate) fn run<F: Fabric>(self, shared: &Shared<F>) {
        // Nearly always.
        if self.0.is_empty() {
            return;
        }
        self.run_some(shared);
    }

    #[cold]
    fn run_some<F: Fabric>(self, shared: &Shared<F>) {
        for effect in self.0 {
            match effect {
                Effect::Resolve(ticket, result) => {
                    shared.counters.admissions_failed.add(u64::from(result.is_err()));
                    ticket.resolve(result);
                }
                Effect::Failed(frame, error) => {
                    shared.counters.failed.add(1);
                    report(frame, error);
                }
                // A waiter that gave up is no fault.
                Effect::Connected(waiter, result) => drop(waiter.send(result)),
                Effect::Tell(news) => news.tell(),
                Effect::Joined(peer, run) => shared.layers.tell(|observer| observer.on_connected(peer, &run)),
                Effect::Left(peer, run, cause) => {
                    shared.layers.tell(|observer| observer.on_ended(peer, run, &cause));
                }
            }
        }
    }
}

/// Gives a frame back through its error handler.
fn report(frame: Frame, error: SendError) {
    let Frame { header, payload, on_error, .. } = frame;
    contain("on_error", || on_error.on_error(header, payload, error));
}

impl<F: Fabric> Peer<F> {
    pub(crate) fn new(id: InstanceId, exchange: Exchange) -> Self {
        let state = PeerState {
            address: None,
            exchange,
            queue: VecDeque::new(),
            gate: VecDeque::new(),
            looks_to_trim: 0,
            epoch: None,
            dialer: false,
            wanted_since: None,
            connect_waiters: Vec::new(),
            last_end: None,
            forgotten: false,
            touched: false,
            owing: false,
            starved: false,
        };
        Self { id, state: Mutex::new(state), changed: Notify::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, PeerState<F>> {
        // A panic of ours under the lock is contained where it happened; the state is still the best there is.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the last epoch ended, in words.
    pub(crate) fn last_end(&self) -> String {
        let end = self.lock().last_end.clone();
        end.map_or_else(|| "the connection ended".to_owned(), |end| end.to_string())
    }

    /// One frame through the gate.
    pub(crate) fn send(self: &Arc<Self>, shared: &Arc<Shared<F>>, frame: Frame) -> SendOutcome {
        let mut effects = Effects::default();
        let mut state = self.lock();
        // Checked under the lock: whoever shuts down or unregisters empties the queues under it afterwards.
        if let Err(error) = state.takes(shared, self.id, &frame) {
            drop(state);
            return shared.reject(frame, error);
        }
        if frame.lane == Lane::Service {
            shared.counters.service_sent.add(1);
        } else {
            shared.counters.sent.add(frame.kind, frame.body_bytes());
        }
        let frame = match self.send_short(&mut state, shared, frame, &mut effects) {
            Ok(()) => {
                drop(state);
                effects.run(shared);
                return SendOutcome::Admitted;
            }
            Err(frame) => frame,
        };
        state.looks_to_trim = LOOKS_TO_TRIM;
        let behind = !state.queue.is_empty();
        let outcome = if state.gate.is_empty() && state.queue.len() < shared.config.channel_frames {
            state.queue.push_back(frame);
            SendOutcome::Admitted
        } else {
            shared.counters.pended.add(1);
            let ticket = Arc::<Ticket>::default();
            state.gate.push_back(Gated { frame, ticket: ticket.clone(), since: shared.now() });
            shared.unsettled.note();
            SendOutcome::Pending(Admission::new(ticket, Arc::new(Gate { peer: Arc::downgrade(self) })))
        };
        if state.epoch.as_ref().is_some_and(|epoch| epoch.link.is_some()) {
            // A pump ends when the first frame has to wait, and whatever that waits for (a grant, a completion, a slab, the
            // proof) pumps again: one behind it has nothing to ask.
            if behind {
                shared.unsettled.note();
            } else {
                self.pump(&mut state, shared, &mut effects);
            }
        } else if !state.dialer {
            state.dialer = true;
            shared.spawn_dialer(self);
        }
        drop(state);
        effects.run(shared);
        outcome
    }

    /// The short way of a short frame that finds nothing waiting, a WR and a credit: copied once, posted, in flight. Gives
    /// it back when it has to go the long way.
    #[inline]
    fn send_short(
        &self,
        state: &mut PeerState<F>,
        shared: &Shared<F>,
        frame: Frame,
        effects: &mut Effects,
    ) -> Result<(), Frame> {
        let PeerState { epoch, queue, gate, .. } = state;
        let Some(Epoch { link: Some(link), qp, proof_told: true, .. }) = epoch else { return Err(frame) };
        if !queue.is_empty() || !gate.is_empty() {
            return Err(frame);
        }
        link.set_withhold(shared.is_withholding());
        if !link.may_send_now(frame.body_bytes()) {
            return Err(frame);
        }
        let head = link.head_now(&frame);
        let mut bytes = ArrayVec::<u8, INLINE_ARENA_BYTES>::new();
        for part in [&head[..], &frame.header, &frame.payload] {
            if !part.is_empty() {
                bytes.try_extend_from_slice(part).expect("it is shorter than the longest inline SEND");
            }
        }
        let Posting { seq, signaled } = link.sent_now(frame);
        match qp.post(&[SendWr { seq, signaled, data: SendData::Inline(&bytes) }]) {
            Ok(()) => shared.unsettled.note(),
            Err(error) => self.on_refused(state, shared, seq, error, effects),
        }
        Ok(())
    }

    /// The device took no WR from `refused` on: those before it are live and will be flushed, the others fail now.
    #[cold]
    fn on_refused(
        &self,
        state: &mut PeerState<F>,
        shared: &Shared<F>,
        refused: WrSeq,
        error: PostError,
        effects: &mut Effects,
    ) {
        let Some(Epoch { link: Some(link), generation, .. }) = &mut state.epoch else { return };
        let (generation, cause) = (*generation, Arc::new(EpochEnd::Post(error)));
        let taken_back: Vec<InFlight> = link.take_back(refused).collect();
        for op in taken_back {
            shared.retire_op(self.id, op, Ended::Failed, &cause, effects);
        }
        self.end_epoch(state, shared, generation, &cause, effects);
    }

    /// Posts what may be posted and lets frames move up from the gate.
    pub(crate) fn pump(self: &Arc<Self>, state: &mut PeerState<F>, shared: &Shared<F>, effects: &mut Effects) {
        let PeerState { epoch, queue, gate, exchange, connect_waiters, starved, last_end, .. } = state;
        let Some(epoch) = epoch else { return };
        let Some(link) = &mut epoch.link else { return };
        if link.is_proven() && !epoch.proof_told {
            epoch.proof_told = true;
            *last_end = None;
            exchange.on_proven(epoch.generation);
            shared.counters.connections_made.add(1);
            let (local, remote) = (epoch.local, epoch.remote.as_ref());
            if let Some(remote) = epoch.remote.as_ref().filter(|_| shared.layers.is_watched()) {
                effects.0.push(Effect::Joined(self.id, Box::new(shared.run_of(remote))));
            }
            effects.tell(News::connected(self.id, epoch.generation, &*epoch.qp, epoch.psn, local, remote));
            for waiter in connect_waiters.drain(..) {
                effects.connected(waiter, Ok(()));
            }
        }
        link.set_withhold(shared.is_withholding());
        if queue.is_empty() && gate.is_empty() && !link.has_control_due() {
            if !link.is_settled() {
                shared.unsettled.note();
            }
            return;
        }
        let mut batch = Batch::new(&shared.fabric, &shared.send_slabs);
        loop {
            let filled = link.fill(|| shared.now(), queue, &mut batch);
            if let Err((refused, error)) = batch.post(&epoch.qp, link) {
                return self.on_refused(state, shared, refused, error, effects);
            }
            let mut moved = false;
            while queue.len() < shared.config.channel_frames {
                let Some(Gated { frame, ticket, .. }) = gate.pop_front() else { break };
                queue.push_back(frame);
                effects.resolve(ticket, Ok(()));
                moved = true;
            }
            match filled {
                Filled::BatchFull => {}
                Filled::Idle if moved => {}
                Filled::NoSlab => {
                    if !std::mem::replace(starved, true) {
                        shared.starve(self);
                    }
                    break;
                }
                _ => break,
            }
        }
        if !link.is_settled() || !queue.is_empty() {
            shared.unsettled.note();
        }
    }

    /// Ends the epoch `generation`, once: a later call for it does nothing. What is queued fails now, what is in
    /// flight when its flush comes.
    pub(crate) fn end_epoch(
        &self,
        state: &mut PeerState<F>,
        shared: &Shared<F>,
        generation: Generation,
        cause: &Arc<EpochEnd>,
        effects: &mut Effects,
    ) -> bool {
        let ours = state.epoch.as_ref().is_some_and(|epoch| epoch.generation == generation);
        if !state.exchange.on_epoch_end(generation, shared.now()) && !ours {
            return false;
        }
        self.end_unbound(state, shared, cause, effects);
        true
    }

    /// The same for an epoch that the exchange has already given up.
    pub(crate) fn end_unbound(
        &self,
        state: &mut PeerState<F>,
        shared: &Shared<F>,
        cause: &Arc<EpochEnd>,
        effects: &mut Effects,
    ) {
        // A worker that stops, or whose device is lost, ends all peers, also those that had nothing to end.
        let of_all = matches!(**cause, EpochEnd::ShuttingDown | EpochEnd::DeviceLost(_));
        if !of_all || state.epoch.is_some() || state.has_waiting() || !state.connect_waiters.is_empty() {
            shared.counters.end(cause);
            effects.tell(News::ended(self.id, state.epoch.as_ref(), cause.clone()));
            if shared.layers.is_watched() {
                let remote = state.epoch.as_ref().and_then(|epoch| epoch.remote.as_ref());
                let run = remote.map(|remote| remote.from_incarnation);
                effects.0.push(Effect::Left(self.id, run, cause.clone()));
            }
        }
        if let Some(epoch) = state.epoch.take() {
            let Epoch { qp, mut link, rx_window, lives, .. } = epoch;
            lives.iter().for_each(AbortHandle::abort);
            if let Some(link) = &mut link {
                link.end();
            }
            if let Err(error) = begin_flush(&*qp, link.as_mut()) {
                tracing::warn!(peer = %self.id, %error, "the QP's flush did not begin; it ends by its deadline");
            }
            let since = shared.now();
            if let Some(link) = &mut link {
                shared.past_links().add(&link.take_counts(since));
            }
            // Under the lock, so that a driver which finds the epoch gone finds it here.
            shared.retire(Retired { peer: self.id, qp, link, cause: cause.clone(), rx_window, since });
        }
        state.last_end = Some(cause.clone());
        state.wanted_since = None;
        let stopping = matches!(**cause, EpochEnd::ShuttingDown);
        for frame in state.queue.drain(..) {
            let error = if stopping {
                SendError::ShuttingDown
            } else {
                SendError::ConnectionLost { peer: self.id, cause: cause.clone() }
            };
            effects.failed(frame, error);
        }
        for Gated { ticket, .. } in state.gate.drain(..) {
            let error = if stopping {
                AdmissionError::ChannelClosed
            } else {
                AdmissionError::ConnectionReplaced(cause.to_string())
            };
            effects.resolve(ticket, Err(error));
        }
        for waiter in state.connect_waiters.drain(..) {
            effects.connected(waiter, Err(ConnectError::Failed(cause.clone())));
        }
        self.changed.notify_waiters();
    }
}

/// To ERR, and a marker behind everything that is in flight.
fn begin_flush<Q: FabricQp>(qp: &Q, link: Option<&mut Link>) -> Result<(), Box<dyn std::error::Error>> {
    qp.to_error()?;
    let Some(link) = link else { return Ok(()) };
    if let Some(seq) = link.drain_marker() {
        let posted = qp.post(&[SendWr { seq, signaled: true, data: SendData::Inline(&[]) }]);
        if let Err(error) = posted {
            // It held nothing: what it would have told, the deadline tells.
            link.take_back(seq).for_each(drop);
            return Err(error.into());
        }
    }
    Ok(())
}

impl<F: Fabric> Shared<F> {
    /// Reports a frame that never entered the gate.
    pub(crate) fn reject(&self, frame: Frame, error: SendError) -> SendOutcome {
        self.counters.reject(&error);
        report(frame, error);
        SendOutcome::Admitted
    }

    /// One operation is done: its slab goes back, its frame has arrived.
    pub(crate) fn release_op(&self, op: InFlight) {
        if let Some(slab) = op.slab {
            self.give_slab(slab);
        }
    }

    /// One operation has ended: its slab goes back, its frame is dropped or reported.
    pub(crate) fn retire_op(
        &self,
        peer: InstanceId,
        op: InFlight,
        ended: Ended,
        cause: &Arc<EpochEnd>,
        effects: &mut Effects,
    ) {
        if let Some(slab) = op.slab {
            self.give_slab(slab);
        }
        if let (Some(frame), Ended::Failed) = (op.frame, ended) {
            let error = if matches!(**cause, EpochEnd::ShuttingDown) {
                SendError::ShuttingDown
            } else {
                SendError::ConnectionLost { peer, cause: cause.clone() }
            };
            effects.failed(frame, error);
        }
    }
}

/// Frames that an idle peer's channel and gate keep room for; what a burst took beyond it is given back.
const IDLE_FRAMES: usize = 16;
/// With looks every 10 ms, a second.
const LOOKS_TO_TRIM: u8 = 100;

impl<F: Fabric> PeerState<F> {
    /// Whether a frame may enter the gate.
    fn takes(&self, shared: &Shared<F>, peer: InstanceId, frame: &Frame) -> Result<(), SendError> {
        if shared.is_stopping() {
            return Err(SendError::ShuttingDown);
        }
        let answers = frame.lane == Lane::Service && self.epoch.as_ref().is_some_and(|epoch| epoch.link.is_some());
        if self.address.is_none() && !answers {
            return Err(SendError::PeerNotRegistered { peer });
        }
        let remote = self.epoch.as_ref().and_then(|epoch| epoch.remote.as_ref());
        let theirs = remote.map_or(u32::MAX, |remote| remote.eager_max_bytes);
        let (bytes, max) = (frame.body_bytes(), theirs.min(shared.config.eager_max_bytes) as usize);
        if bytes > max {
            return Err(SendError::TooLarge { bytes, max });
        }
        if frame.lane != Lane::Application && remote.is_some_and(|remote| remote.features & FEATURE_RMA == 0) {
            return Err(SendError::NoSuchLane { peer, lane: frame.lane });
        }
        Ok(())
    }

    /// Gives back the memory of bursts when none has come for a while: not at once, or the next one would allocate it anew.
    /// Whether there is to be another look for that.
    pub(crate) fn trim(&mut self) -> bool {
        let link = self.epoch.as_mut().and_then(|epoch| epoch.link.as_mut());
        let packed = link.as_ref().map_or(0, |link| link.packed_room());
        if self.queue.capacity().max(self.gate.capacity()).max(packed) <= IDLE_FRAMES {
            return false;
        }
        if self.looks_to_trim > 0 {
            self.looks_to_trim -= 1;
            return true;
        }
        if self.queue.is_empty() && self.queue.capacity() > IDLE_FRAMES {
            self.queue.shrink_to(IDLE_FRAMES);
        }
        if self.gate.is_empty() && self.gate.capacity() > IDLE_FRAMES {
            self.gate.shrink_to(IDLE_FRAMES);
        }
        if let Some(link) = link {
            link.trim(IDLE_FRAMES);
        }
        false
    }

    /// Fails the admissions that have waited for too long. Frames wait in order, so the oldest are in front.
    pub(crate) fn expire_gate(&mut self, now: Instant, deadline: Duration, effects: &mut Effects) -> u64 {
        let mut expired = 0;
        while let Some(first) = self.gate.front() {
            if now.saturating_duration_since(first.since) < deadline {
                break;
            }
            if let Some(Gated { ticket, .. }) = self.gate.pop_front() {
                effects.resolve(ticket, Err(AdmissionError::Deadline { after: deadline }));
                expired += 1;
            }
        }
        expired
    }

    /// Puts a frame of the transport's own into the channel if there is room and nobody waits before it.
    pub(crate) fn push_within(&mut self, frame: Frame, channel_frames: usize) -> bool {
        let room = self.gate.is_empty() && self.queue.len() < channel_frames;
        if room {
            self.queue.push_back(frame);
        }
        room
    }

    /// Whether [`Peer::pump`] would do something; if not, leaves the note that it would leave.
    #[inline]
    pub(crate) fn wants_pump(&self, shared: &Shared<F>) -> bool {
        let Some(Epoch { link: Some(link), proof_told, .. }) = &self.epoch else { return false };
        let wants = self.has_waiting() || link.has_control_due() || (link.is_proven() && !proof_told);
        if !wants && !link.is_settled() {
            shared.unsettled.note();
        }
        wants
    }

    /// Whether frames wait in the channel or the gate.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.queue.is_empty() || !self.gate.is_empty()
    }

    /// Fails the admissions of frames in the gate above `max` bytes, and of those for a layer that the peer lacks.
    pub(crate) fn fail_unfit_in_gate(&mut self, max: usize, has_layer: bool, effects: &mut Effects) {
        let mut at = 0;
        while at < self.gate.len() {
            let (bytes, lane) = (self.gate[at].frame.body_bytes(), self.gate[at].frame.lane);
            let error = if bytes > max {
                AdmissionError::TooLarge { bytes, max }
            } else if lane != Lane::Application && !has_layer {
                AdmissionError::NoSuchLane { lane }
            } else {
                at += 1;
                continue;
            };
            if let Some(Gated { ticket, .. }) = self.gate.remove(at) {
                effects.resolve(ticket, Err(error));
            }
        }
    }
}

/// The way back from an admission to its gate.
struct Gate<F: Fabric> {
    peer: Weak<Peer<F>>,
}

impl<F: Fabric> fmt::Debug for Gate<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gate")
    }
}

impl<F: Fabric> CancelGate for Gate<F> {
    fn cancel(&self, ticket: &Arc<Ticket>) -> bool {
        let Some(peer) = self.peer.upgrade() else { return false };
        let removed = {
            let mut state = peer.lock();
            let place = state.gate.iter().position(|queued| Arc::ptr_eq(&queued.ticket, ticket));
            place.and_then(|place| state.gate.remove(place))
        };
        let cancelled = removed.is_some();
        if cancelled {
            ticket.resolve(Err(AdmissionError::Cancelled));
        }
        cancelled
    }
}
