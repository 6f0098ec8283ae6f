//! The driver: polls completions, gives slabs back, hands frames on, ends what has ended.

use std::{
    collections::BTreeMap,
    iter::Peekable,
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
    vec,
};

use bytes::Bytes;
use verbs_bootstrap::{Generation, InstanceId};

use super::{
    admission::contain,
    config::Config,
    error::EpochEnd,
    inbound::{Borrowed, Received, Sink},
    lending::{Lending, Returned},
    peer::{Effects, Epoch, Peer, PeerState, Retired},
    shared::Shared,
};
use crate::{
    fabric::{AsyncEvent, Fabric, FabricError, FabricQp, POLL_BATCH, POST_BATCH, RecvSlab, Wc, WrSeq},
    proto::{
        assembly::Incoming,
        frame::{HEADER_BYTES, Lane, MessageType},
        link::{Link, LinkError},
        pack::Packed,
        send_queue::Ended,
    },
};

/// After the last flush completion, a half-received message's slab may still be on its way out of the QP: Soft-RoCE
/// loses it when the QP is destroyed at once.
pub(crate) const QUIET_BEFORE_DESTROY: Duration = Duration::from_millis(20);

/// The driver looks for returned slabs after this time, then after twice as long, and so on up to the other.
const RETURNS_AFTER_MIN: Duration = Duration::from_millis(10);
const RETURNS_AFTER_MAX: Duration = Duration::from_secs(1);

/// A caller that does not sleep sees to the clock and to the device's events at every so many polls that find nothing: both
/// cost many times as much as such a poll.
const POLLS_BETWEEN_CHORES: u32 = 16;

/// The completions of a batch that are still to be dealt with.
type Rest<'a> = Peekable<vec::Drain<'a, Wc>>;

/// A frame out of its slab, waiting for the end of the batch.
struct Delivery {
    peer: InstanceId,
    kind: MessageType,
    lane: Lane,
    header_len: usize,
    body: Body,
}

enum Body {
    /// In the driver's scratch memory: for a handler.
    Scratch(Range<usize>),
    /// Memory of its own: for a stream, or put together from fragments.
    Owned(Vec<u8>),
    /// The slab itself, lent: for a stream. Boxed, for it is the largest and the rarest.
    Lent(Box<Bytes>),
}

impl Body {
    fn len(&self) -> usize {
        match self {
            Self::Scratch(range) => range.len(),
            Self::Owned(bytes) => bytes.len(),
            Self::Lent(bytes) => bytes.len(),
        }
    }

    fn bytes<'a>(&'a self, scratch: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Scratch(range) => &scratch[range.clone()],
            Self::Owned(bytes) => bytes,
            Self::Lent(bytes) => bytes,
        }
    }
}

/// Where frames go out of their slabs.
struct Arrivals<'a> {
    sink: Option<&'a Sink>,
    into: &'a mut Vec<Delivery>,
    scratch: &'a mut Vec<u8>,
    reposts: &'a mut Vec<RecvSlab>,
}

/// One SEND that has arrived.
struct Arrived {
    slab: RecvSlab,
    head: [u8; HEADER_BYTES],
    bytes: u32,
}

/// Who may keep the slab of a frame.
struct Lender<'a, F: Fabric> {
    lending: &'a mut Lending,
    peer: &'a Arc<Peer<F>>,
    generation: Generation,
}

impl Arrivals<'_> {
    /// One SEND of a peer; whether it was the answer to a PING. Its slab is posted again, or lent.
    fn take<F: Fabric>(
        &mut self,
        shared: &Shared<F>,
        peer: InstanceId,
        link: &mut Link,
        arrived: Arrived,
        lender: Option<Lender<'_, F>>,
    ) -> Result<bool, LinkError> {
        let Arrived { slab, head, bytes } = arrived;
        let incoming = match link.on_receive(head, bytes) {
            Ok(incoming) => incoming,
            Err(error) => {
                self.reposts.push(slab);
                return Err(error);
            }
        };
        match incoming {
            Incoming::Whole { kind, lane, header_len, body_len } => {
                let body = self.body(shared, link, slab, body_len, lane, lender);
                self.into.push(Delivery { peer, kind, lane, header_len, body });
                return Ok(false);
            }
            Incoming::Fragment { body_len, last } => {
                shared.fabric.append_slab(&slab, HEADER_BYTES, body_len, link.partial_mut());
                if let Some(whole) = if last { link.finish_fragment() } else { None } {
                    let (header_len, body) = (whole.header_len, Body::Owned(whole.body));
                    self.into.push(Delivery { peer, kind: whole.kind, lane: whole.lane, header_len, body });
                }
            }
            Incoming::Pack { frames, body_len } => {
                let unpacked = self.unpack(shared, peer, link, &slab, (frames, body_len));
                self.reposts.push(slab);
                return unpacked.map(|()| false);
            }
            Incoming::Control | Incoming::Pong { .. } => {}
        }
        self.reposts.push(slab);
        Ok(matches!(incoming, Incoming::Pong { .. }))
    }

    /// The frames of a packed SEND, each copied.
    fn unpack<F: Fabric>(
        &mut self,
        shared: &Shared<F>,
        peer: InstanceId,
        link: &mut Link,
        slab: &RecvSlab,
        (frames, body_len): (u32, usize),
    ) -> Result<(), LinkError> {
        let from = self.scratch.len();
        shared.fabric.append_slab(slab, HEADER_BYTES, body_len, self.scratch);
        let Self { sink, into, scratch, .. } = self;
        let handled = matches!(sink, Some(Sink::Handler(_)));
        let bytes = &scratch[from..];
        link.unpack(frames, bytes, |Packed { kind, lane, header_len, body }| {
            let body = if handled || lane == Lane::Service {
                Body::Scratch(from + body.start..from + body.end)
            } else {
                Body::Owned(bytes[body].to_vec())
            };
            into.push(Delivery { peer, kind, lane, header_len, body });
        })
    }

    /// The whole frame of a slab, copied or lent.
    fn body<F: Fabric>(
        &mut self,
        shared: &Shared<F>,
        link: &mut Link,
        slab: RecvSlab,
        body_len: usize,
        lane: Lane,
        lender: Option<Lender<'_, F>>,
    ) -> Body {
        let body = if lane == Lane::Service || matches!(self.sink, Some(Sink::Handler(_))) {
            let from = self.scratch.len();
            shared.fabric.append_slab(&slab, HEADER_BYTES, body_len, self.scratch);
            Body::Scratch(from..self.scratch.len())
        } else if let Some(home) = lender.and_then(|lender| lender.lend(shared, link, body_len)) {
            return Body::Lent(Box::new(shared.fabric.lend_slab(slab, HEADER_BYTES, body_len, home)));
        } else {
            let mut body = Vec::with_capacity(body_len);
            shared.fabric.append_slab(&slab, HEADER_BYTES, body_len, &mut body);
            Body::Owned(body)
        };
        self.reposts.push(slab);
        body
    }
}

impl<F: Fabric> Lender<'_, F> {
    /// The way home of a slab with a frame of so many bytes, if it may be lent.
    fn lend(
        self,
        shared: &Shared<F>,
        link: &mut Link,
        body_len: usize,
    ) -> Option<impl FnOnce(RecvSlab) + Send + 'static> {
        if !self.lending.is_worth(body_len) {
            return None;
        }
        if !self.lending.has_room() || !link.lend() {
            shared.counters.lend_refused.add(1);
            return None;
        }
        self.lending.lent();
        shared.slabs_lent.store(self.lending.out(), Ordering::Relaxed);
        shared.counters.frames_lent.add(1);
        let (returns, peer, generation) = (shared.returns.clone(), Arc::downgrade(self.peer), self.generation);
        Some(move |slab| returns.put(Returned { slab, peer, generation }))
    }
}

/// One per worker, behind a lock: whoever holds it polls.
pub(crate) struct Driver<F: Fabric> {
    /// Gone after shutdown, which ends the streams.
    sink: Option<Sink>,
    wcs: Vec<Wc>,
    /// Slabs to post again.
    reposts: Vec<RecvSlab>,
    /// Peers whose frames took them.
    owing: Vec<Arc<Peer<F>>>,
    /// Peers with news in this batch.
    touched: Vec<Arc<Peer<F>>>,
    deliveries: Vec<Delivery>,
    scratch: Vec<u8>,
    /// By QP number, so that simulation is reproducible.
    retired: BTreeMap<u32, Retired<F>>,
    /// When to look at bare tails next.
    look_due: Option<Instant>,
    /// Room for the peers of one look.
    looked_at: Vec<Arc<Peer<F>>>,
    lending: Lending,
    /// Completions come in bursts of one QP: its number, its peer, and as of which change of the routes.
    last_route: Option<(u64, u32, Arc<Peer<F>>)>,
    /// How long to wait before the next look for slabs that the application gives back.
    returns_after: Duration,
    /// Polls in a row that found nothing.
    idle_polls: u32,
}

impl<F: Fabric> Driver<F> {
    pub(crate) fn new(sink: Sink, config: &Config) -> Self {
        Self {
            sink: Some(sink),
            wcs: Vec::new(),
            reposts: Vec::new(),
            owing: Vec::new(),
            touched: Vec::new(),
            deliveries: Vec::new(),
            scratch: Vec::new(),
            retired: BTreeMap::new(),
            look_due: None,
            looked_at: Vec::new(),
            last_route: None,
            lending: Lending::new(config.zero_copy_slabs, config.zero_copy_min_bytes),
            returns_after: RETURNS_AFTER_MIN,
            idle_polls: 0,
        }
    }

    /// Polls one batch and does all that follows from it. Gives the number of completions.
    pub(crate) fn progress(&mut self, shared: &Arc<Shared<F>>) -> Result<usize, FabricError> {
        let mut effects = Effects::default();
        let polled = self.step(shared, &mut effects);
        // What has ended is told whatever else fails.
        effects.run(shared);
        polled
    }

    /// The same, and the rest of the work if that was all: nothing was left when it polled. Whether that is so.
    pub(crate) fn progress_to_the_end(&mut self, shared: &Arc<Shared<F>>) -> Result<bool, FabricError> {
        let mut effects = Effects::default();
        let mut polled = self.step(shared, &mut effects);
        let is_end = polled.as_ref().is_ok_and(|polled| *polled < POLL_BATCH);
        if is_end && !self.has_nothing_to_do(shared) {
            polled = self.work(shared, 0, &mut effects).map(|()| 0);
        }
        effects.run(shared);
        polled.map(|_| is_end)
    }

    fn step(&mut self, shared: &Arc<Shared<F>>, effects: &mut Effects) -> Result<usize, FabricError> {
        if self.lending.out() > 0 {
            self.take_returned(shared);
        }
        let polled = shared.fabric.poll(&mut self.wcs)?;
        if polled > 0 || !self.has_nothing_to_do(shared) {
            self.work(shared, polled, effects)?;
        }
        Ok(polled)
    }

    /// All that follows from the completions in hand, of which there are `polled`.
    fn work(&mut self, shared: &Arc<Shared<F>>, polled: usize, effects: &mut Effects) -> Result<(), FabricError> {
        let mut wcs = std::mem::take(&mut self.wcs);
        let mut rest = wcs.drain(..).peekable();
        while let Some(wc) = rest.next() {
            self.on_wc(shared, wc, &mut rest, effects);
        }
        drop(rest);
        self.wcs = wcs;
        // Slabs go back before frames are handed on, in chains; a short chain waits until nothing else is to be done,
        // which the next call finds out.
        let reposted = if self.reposts.len() >= POST_BATCH || polled == 0 { self.repost(shared) } else { Ok(()) };
        // Those who wait for slabs come before those whose completions brought them: else a busy peer takes its slab
        // back at once, for ever.
        shared.feed_starved(effects);
        if reposted.is_ok() {
            self.pump_touched(shared, effects);
        }
        // Also when the device is lost meanwhile: these frames have arrived.
        self.deliver(shared, effects);
        reposted?;
        if !self.retired.is_empty() || !shared.retired.is_empty() {
            self.sweep_retired(shared, effects);
        }
        // After all that may bring slabs home.
        shared.feed_starved(effects);
        let (_, changed) = shared.backlog.update();
        if changed {
            shared.pump_all(effects);
        }
        Ok(())
    }

    /// Whoever polls without a pause does so many times for each completion: these looks are all that it costs.
    #[inline]
    fn has_nothing_to_do(&self, shared: &Shared<F>) -> bool {
        self.reposts.is_empty()
            && self.touched.is_empty()
            && self.retired.is_empty()
            && shared.retired.is_empty()
            && shared.starved.is_empty()
            && shared.backlog.is_unchanged()
    }

    /// Whether a caller that does not sleep should now look at the clock and at the device's events: when it has just run
    /// out of completions, and at every so many polls from then on.
    #[inline]
    pub(crate) fn chores_are_due(&mut self, polled: usize) -> bool {
        self.idle_polls = if polled == 0 { self.idle_polls.wrapping_add(1) } else { 0 };
        self.idle_polls % POLLS_BETWEEN_CHORES == 1
    }

    fn on_wc(&mut self, shared: &Arc<Shared<F>>, wc: Wc, rest: &mut Rest<'_>, effects: &mut Effects) {
        match wc {
            Wc::Receive { qpn, slab, bytes } => self.on_receives(shared, qpn, (slab, bytes), rest, effects),
            Wc::ReceiveFailed { qpn, slab, status } => {
                self.reposts.push(slab);
                shared.counters.receives_failed.add(1);
                // Flushed or failed, the QP is in ERR.
                shared.end_live(qpn, &Arc::new(EpochEnd::Receive { status }), effects);
            }
            Wc::Send { qpn, seq } => self.on_send(shared, qpn, seq, false, effects),
            Wc::SendFailed { qpn, seq, status, vendor_err } => {
                let cause = Arc::new(EpochEnd::WorkRequest { status, vendor_err });
                shared.end_live(qpn, &cause, effects);
                self.on_send(shared, qpn, seq, true, effects);
            }
        }
    }

    /// Whose QP this is.
    #[inline]
    fn route(&mut self, shared: &Shared<F>, qpn: u32) -> Option<Arc<Peer<F>>> {
        let version = shared.routes_version();
        match &self.last_route {
            Some((of, last, peer)) if (*of, *last) == (version, qpn) => Some(peer.clone()),
            _ => {
                let peer = shared.route(qpn)?;
                self.last_route = Some((version, qpn, peer.clone()));
                Some(peer)
            }
        }
    }

    /// A receive, and those of the same QP that follow it in `rest`: they come in runs, for which the peer is locked once.
    fn on_receives(
        &mut self,
        shared: &Arc<Shared<F>>,
        qpn: u32,
        first: (RecvSlab, u32),
        rest: &mut Rest<'_>,
        effects: &mut Effects,
    ) {
        let Some(peer) = self.route(shared, qpn) else {
            self.reposts.push(first.0);
            shared.counters.stale_completions.add(1);
            return;
        };
        let mut state = peer.lock();
        let Some(Epoch { generation, link: Some(link), pongs, .. }) = live(&mut state, qpn) else {
            drop(state);
            return self.on_late_receive(shared, qpn, arrived(shared, first));
        };
        let generation = *generation;
        let Self { sink, deliveries, scratch, reposts, lending, .. } = self;
        let mut arrivals = Arrivals { sink: sink.as_ref(), into: deliveries, scratch, reposts };
        let mut next = Some(first);
        while let Some(receive) = next {
            let lender = Lender { lending, peer: &peer, generation };
            match arrivals.take(shared, peer.id, link, arrived(shared, receive), Some(lender)) {
                Ok(false) => {}
                Ok(true) => pongs.send_modify(|pongs| *pongs += 1),
                Err(error) => {
                    shared.counters.broken(&error);
                    let qp = format_args!("{qpn:#08x}");
                    tracing::warn!(peer = %peer.id, qp, %error, "the peer broke the protocol");
                    if error.is_fatal() {
                        let cause = Arc::new(EpochEnd::Protocol(error));
                        peer.end_epoch(&mut state, shared, generation, &cause, effects);
                        return;
                    }
                }
            }
            next = match rest.next_if(|wc| matches!(wc, Wc::Receive { qpn: of, .. } if *of == qpn)) {
                Some(Wc::Receive { slab, bytes, .. }) => Some((slab, bytes)),
                _ => None,
            };
        }
        if !std::mem::replace(&mut state.owing, true) {
            self.owing.push(peer.clone());
        }
        self.touch(shared, &peer, &mut state);
    }

    /// A receive of a connection that has ended on this side. It was acknowledged, so the peer takes its frame for
    /// delivered: it is handed on like those before it. Not so the frames of a run that is over, or of a peer that
    /// broke the protocol.
    fn on_late_receive(&mut self, shared: &Arc<Shared<F>>, qpn: u32, arrived: Arrived) {
        self.adopt_retired(shared);
        let Self { sink, deliveries, scratch, reposts, retired, .. } = self;
        match retired.get_mut(&qpn) {
            Some(Retired { peer, link: Some(link), cause, .. })
                if !matches!(**cause, EpochEnd::PeerRestarted | EpochEnd::Protocol(_)) =>
            {
                let mut arrivals = Arrivals { sink: sink.as_ref(), into: deliveries, scratch, reposts };
                if let Err(error) = arrivals.take(shared, *peer, link, arrived, None::<Lender<'_, F>>) {
                    shared.counters.broken(&error);
                }
            }
            _ => {
                reposts.push(arrived.slab);
                shared.counters.stale_completions.add(1);
            }
        }
    }

    /// Slabs that the application has given back are posted again like those that have just arrived.
    fn take_returned(&mut self, shared: &Arc<Shared<F>>) {
        while let Some(Returned { slab, peer, generation }) = shared.returns.pop() {
            self.reposts.push(slab);
            self.lending.returned();
            shared.slabs_lent.store(self.lending.out(), Ordering::Relaxed);
            let Some(peer) = peer.upgrade() else { continue };
            let mut state = peer.lock();
            let epoch = state.epoch.as_mut().filter(|epoch| epoch.generation == generation);
            let Some(link) = epoch.and_then(|epoch| epoch.link.as_mut()) else { continue };
            link.on_returned();
            if !std::mem::replace(&mut state.owing, true) {
                self.owing.push(peer.clone());
            }
            self.touch(shared, &peer, &mut state);
        }
    }

    /// When to look for them next: soon at first, then less and less often while none comes.
    fn returns_due(&mut self, now: Instant) -> Option<Instant> {
        if self.lending.out() == 0 {
            self.returns_after = RETURNS_AFTER_MIN;
            return None;
        }
        let due = now + self.returns_after;
        self.returns_after = (self.returns_after * 2).min(RETURNS_AFTER_MAX);
        Some(due)
    }

    /// A send completion: of a live epoch, or of one that is being flushed.
    fn on_send(&mut self, shared: &Arc<Shared<F>>, qpn: u32, seq: WrSeq, failed: bool, effects: &mut Effects) {
        let Some(peer) = self.route(shared, qpn) else {
            shared.counters.stale_completions.add(1);
            return;
        };
        {
            let mut state = peer.lock();
            if let Some(Epoch { link: Some(link), .. }) = live(&mut state, qpn) {
                // A failure ends the epoch first, so this completion is good.
                link.on_send_done(seq, |op, _| shared.release_op(op));
                self.touch(shared, &peer, &mut state);
                return;
            }
        }
        self.adopt_retired(shared);
        let Some(Retired { peer: id, link: Some(link), cause, .. }) = self.retired.get_mut(&qpn) else {
            shared.counters.stale_completions.add(1);
            return;
        };
        let each = |op, ended| shared.retire_op(*id, op, ended, cause, effects);
        if failed {
            link.on_send_failed(seq, each);
        } else {
            link.on_send_done(seq, each);
        }
    }

    /// Something has come for a peer: it is pumped at the end of the batch, if there is anything to pump.
    #[inline]
    fn touch(&mut self, shared: &Shared<F>, peer: &Arc<Peer<F>>, state: &mut PeerState<F>) {
        if state.wants_pump(shared) && !std::mem::replace(&mut state.touched, true) {
            self.touched.push(peer.clone());
        }
    }

    /// Posts the slabs in hand; from then on their credits are owed.
    fn repost(&mut self, shared: &Arc<Shared<F>>) -> Result<(), FabricError> {
        if self.reposts.is_empty() {
            return Ok(());
        }
        shared
            .fabric
            .post_receives(&mut self.reposts)
            .map_err(|error| FabricError { what: "posting receives to the SRQ", source: error.source })?;
        let mut owing = std::mem::take(&mut self.owing);
        for peer in owing.drain(..) {
            let mut state = peer.lock();
            state.owing = false;
            if let Some(Epoch { link: Some(link), .. }) = &mut state.epoch {
                link.on_reposted();
            }
            self.touch(shared, &peer, &mut state);
        }
        self.owing = owing;
        Ok(())
    }

    fn pump_touched(&mut self, shared: &Arc<Shared<F>>, effects: &mut Effects) {
        for peer in self.touched.drain(..) {
            let mut state = peer.lock();
            state.touched = false;
            peer.pump(&mut state, shared, effects);
        }
    }

    /// Hands on what this batch brought. No lock but the driver's own is held.
    fn deliver(&mut self, shared: &Arc<Shared<F>>, effects: &mut Effects) {
        let deliveries = self.deliveries.drain(..);
        let Some(sink) = &self.sink else {
            for Delivery { body, .. } in deliveries {
                shared.counters.undelivered.add(1);
                shared.counters.undelivered_bytes.add(body.len() as u64);
            }
            self.scratch.clear();
            return;
        };
        for Delivery { peer, kind, lane, header_len, body } in deliveries {
            if lane != Lane::Application && !shared.takes_lane(peer, kind, lane, header_len, body.bytes(&self.scratch))
            {
                continue;
            }
            if shared.turns_away(kind) {
                let bytes = body.bytes(&self.scratch);
                let header = Bytes::copy_from_slice(&bytes[..header_len]);
                if let Some(peer) = shared.find_peer(peer) {
                    shared.turn_away(&peer, header, effects);
                }
                continue;
            }
            match (sink, body) {
                (Sink::Handler(handler), body) => {
                    let bytes = body.bytes(&self.scratch);
                    shared.counters.received.add(kind, bytes.len());
                    let (header, payload) = bytes.split_at(header_len);
                    contain("handler", || handler.on_frame(Borrowed { peer, kind, lane, header, payload }));
                }
                (Sink::Streams { senders, backlog }, body) => {
                    let mut header = match body {
                        Body::Owned(bytes) => Bytes::from(bytes),
                        Body::Lent(bytes) => *bytes,
                        // Scratch bodies are made for handlers only.
                        Body::Scratch(_) => continue,
                    };
                    let bytes = header.len();
                    shared.counters.received.add(kind, bytes);
                    let payload = header.split_off(header_len);
                    if !Sink::push(senders, backlog, Received { peer, kind, lane, header, payload }) {
                        shared.counters.undelivered.add(1);
                        shared.counters.undelivered_bytes.add(bytes as u64);
                    }
                }
            }
        }
        self.scratch.clear();
    }

    fn adopt_retired(&mut self, shared: &Shared<F>) {
        while let Some(retired) = shared.retired.pop() {
            self.retired.insert(retired.qp.qpn().get(), retired);
        }
    }

    /// Destroys the QPs whose flush is over, or whose time is.
    fn sweep_retired(&mut self, shared: &Arc<Shared<F>>, effects: &mut Effects) {
        self.adopt_retired(shared);
        let now = shared.now();
        let flush_deadline = shared.config.flush_deadline;
        let over = |retired: &Retired<F>| {
            let age = now.saturating_duration_since(retired.since);
            let flushed = retired.link.as_ref().is_none_or(|link| link.wrs_in_flight() == 0);
            // A QP that never reached RTS has received nothing.
            let quiet = retired.link.is_none() || age >= QUIET_BEFORE_DESTROY;
            (flushed && quiet) || age >= flush_deadline
        };
        let ripe: Vec<u32> = self.retired.iter().filter(|(_, retired)| over(retired)).map(|(qpn, _)| *qpn).collect();
        for qpn in ripe {
            let Some(Retired { peer, qp, link, cause, rx_window, .. }) = self.retired.remove(&qpn) else { continue };
            shared.forget_route(qpn);
            // From here on the device touches nothing of this QP's: what it still held may be used again.
            // (A task that is still bringing the QP up holds another reference; its end destroys the QP then.)
            drop(qp);
            shared.shares().release(rx_window);
            shared.forget_stranger(peer);
            if let Some(mut link) = link {
                if link.wrs_in_flight() > 0 {
                    shared.counters.flushes_abandoned.add(1);
                    let wrs = link.wrs_in_flight();
                    tracing::warn!(%peer, qp = format_args!("{qpn:#08x}"), wrs, "no flush came; QP destroyed regardless");
                }
                let rest: Vec<_> = link.abandon().collect();
                for op in rest {
                    shared.retire_op(peer, op, Ended::Failed, &cause, effects);
                }
                // What came in since its end; the rest was added then.
                shared.past_links().add(&link.take_counts(now));
            }
        }
        if self.retired.is_empty() && shared.retired.is_empty() {
            shared.all_retired.notify_waiters();
        }
    }

    /// The ended connections that are left, for the worker's last breath.
    pub(crate) fn into_retired(self) -> impl Iterator<Item = Retired<F>> {
        self.retired.into_values()
    }

    /// Nothing is handed on any more: the streams end when what lies in them is taken.
    pub(crate) fn close_sink(&mut self) {
        self.sink = None;
    }

    /// Whether every ended connection is gone.
    pub(crate) fn is_quiet(&self) -> bool {
        self.retired.is_empty()
    }

    /// Does what is due by the clock, and says when to come again.
    pub(crate) fn timers(&mut self, shared: &Arc<Shared<F>>) -> Option<Instant> {
        let mut effects = Effects::default();
        if !self.retired.is_empty() || !shared.retired.is_empty() {
            self.sweep_retired(shared, &mut effects);
            shared.feed_starved(&mut effects);
        }
        let now = shared.now();
        match self.look_due {
            Some(due) if now >= due => {
                self.look_due = None;
                shared.look_after_peers(&mut self.looked_at, &mut effects);
            }
            _ => {}
        }
        if self.look_due.is_none() && shared.unsettled.is_noted() {
            self.look_due = Some(now + shared.config.tail_probe_after);
        }
        effects.run(shared);
        let sweep = (!self.retired.is_empty()).then(|| now + QUIET_BEFORE_DESTROY / 4);
        [self.look_due, sweep, self.returns_due(now)].into_iter().flatten().min()
    }

    /// An async event of the device.
    pub(crate) fn on_async_event(&mut self, shared: &Arc<Shared<F>>, event: AsyncEvent) -> Result<(), FabricError> {
        shared.counters.async_events.add(1);
        match event {
            AsyncEvent::SrqLimitReached => {
                shared.counters.srq_low.add(1);
                self.repost(shared)?;
                shared.arm_srq_limit()?;
            }
            AsyncEvent::QpFatal { qpn } if shared.route(qpn).is_none() => {
                shared.layers.tell(|observer| observer.on_qp_fatal(qpn));
            }
            AsyncEvent::QpFatal { qpn } => {
                let mut effects = Effects::default();
                shared.end_live(qpn, &Arc::new(EpochEnd::QpFatal), &mut effects);
                effects.run(shared);
            }
            AsyncEvent::CqError | AsyncEvent::SrqError | AsyncEvent::DeviceFatal => {
                let what = match event {
                    AsyncEvent::CqError => "the completion queue (overrun?)",
                    AsyncEvent::SrqError => "the shared receive queue",
                    _ => "the device",
                };
                return Err(FabricError { what, source: std::io::Error::other("reported by an async event") });
            }
            // Each QP that ends says so on a NIC.
            AsyncEvent::QpLastWqe { qpn } => {
                tracing::debug!(qp = format_args!("{qpn:#08x}"), "the last receive of the QP is in");
            }
            other => tracing::info!(event = ?other, "async event"),
        }
        Ok(())
    }
}

impl<F: Fabric> Shared<F> {
    /// Deals with a frame that is not the application's own; whether it goes on to the application all the same.
    #[cold]
    fn takes_lane(&self, peer: InstanceId, kind: MessageType, lane: Lane, header_len: usize, bytes: &[u8]) -> bool {
        match (lane, self.layers.service()) {
            (Lane::Service, Some(handler)) => {
                self.counters.service_received.add(1);
                let (header, payload) = bytes.split_at(header_len);
                contain("service handler", || handler.on_frame(Borrowed { peer, kind, lane, header, payload }));
                false
            }
            (Lane::Indirect, _) if self.layers.any() => true,
            (Lane::Application, _) => true,
            _ => {
                self.counters.lane_dropped.add(1);
                tracing::debug!(%peer, lane = lane.name(), "a frame for a layer that is not attached");
                false
            }
        }
    }

    /// Ends the epoch of this QP if it is still live.
    fn end_live(self: &Arc<Self>, qpn: u32, cause: &Arc<EpochEnd>, effects: &mut Effects) {
        let Some(peer) = self.route(qpn) else { return };
        let mut state = peer.lock();
        let generation = state.epoch.as_ref().filter(|epoch| epoch.qp.qpn().get() == qpn).map(|epoch| epoch.generation);
        if let Some(generation) = generation {
            peer.end_epoch(&mut state, self, generation, cause, effects);
        }
    }

    fn pump_all(self: &Arc<Self>, effects: &mut Effects) {
        if self.is_withholding() {
            self.counters.withheld.add(1);
        }
        for peer in self.all_peers() {
            let mut state = peer.lock();
            peer.pump(&mut state, self, effects);
        }
    }

    /// Peers that wait for a send slab get their turn while there are some.
    fn feed_starved(self: &Arc<Self>, effects: &mut Effects) {
        if self.starved.is_empty() {
            return;
        }
        for _ in 0..self.starved.len() {
            if self.send_slabs.is_empty() {
                return;
            }
            let Some(peer) = self.starved.pop() else { return };
            let mut state = peer.lock();
            state.starved = false;
            peer.pump(&mut state, self, effects);
        }
    }
}

/// The live epoch of a QP.
fn live<F: Fabric>(state: &mut PeerState<F>, qpn: u32) -> Option<&mut Epoch<F>> {
    state.epoch.as_mut().filter(|epoch| epoch.qp.qpn().get() == qpn)
}

/// A receive with its fixed header, zeros beyond its end.
fn arrived<F: Fabric>(shared: &Shared<F>, (slab, bytes): (RecvSlab, u32)) -> Arrived {
    let mut head = [0; HEADER_BYTES];
    shared.fabric.read_slab(&slab, 0, &mut head[..HEADER_BYTES.min(bytes as usize)]);
    Arrived { slab, head, bytes }
}
