//! The driver: polls completions, gives slabs back, hands frames on, ends what has ended.

use std::{
    collections::HashMap,
    future::poll_fn,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::time::sleep_until;
use verbs_bootstrap::InstanceId;

use super::{
    admission::contain,
    config::Progress,
    error::EpochEnd,
    inbound::{Borrowed, Received, Sink},
    peer::{Effects, Epoch, Peer, PeerState, Retired},
    shared::Shared,
};
use crate::{
    fabric::{AsyncEvent, Fabric, FabricError, FabricQp, POST_BATCH, RecvSlab, Wc, WcStatus, WrSeq},
    proto::{
        frame::{HEADER_BYTES, MessageType},
        link::Incoming,
        send_queue::Ended,
    },
};

/// Full poll batches in a row before the driver's task lets others run.
const BATCHES_BEFORE_YIELD: u32 = 8;

/// After the last flush completion, a half-received message's slab may still be on its way out of the QP: Soft-RoCE
/// loses it when the QP is destroyed at once.
const QUIET_BEFORE_DESTROY: Duration = Duration::from_millis(20);

/// A frame copied out of its slab, waiting for the end of the batch.
struct Delivery {
    peer: InstanceId,
    kind: MessageType,
    header_len: usize,
    body: Body,
}

enum Body {
    /// In the driver's scratch memory: for a handler.
    Scratch(Range<usize>),
    /// Memory of its own: for a stream, or put together from fragments.
    Owned(Vec<u8>),
}

/// One per worker, behind a lock: whoever holds it polls.
pub(crate) struct Driver<F: Fabric> {
    sink: Sink,
    wcs: Vec<Wc>,
    /// Slabs to post again.
    reposts: Vec<RecvSlab>,
    /// Peers whose frames took them.
    owing: Vec<Arc<Peer<F>>>,
    /// Peers with news in this batch.
    touched: Vec<Arc<Peer<F>>>,
    deliveries: Vec<Delivery>,
    scratch: Vec<u8>,
    retired: HashMap<u32, Retired<F>>,
    /// When to look at bare tails next.
    tail_check: Option<Instant>,
}

impl<F: Fabric> Driver<F> {
    pub(crate) fn new(sink: Sink) -> Self {
        Self {
            sink,
            wcs: Vec::new(),
            reposts: Vec::new(),
            owing: Vec::new(),
            touched: Vec::new(),
            deliveries: Vec::new(),
            scratch: Vec::new(),
            retired: HashMap::new(),
            tail_check: None,
        }
    }

    /// Polls one batch and does all that follows from it. Gives the number of completions.
    pub(crate) fn progress(&mut self, shared: &Arc<Shared<F>>) -> Result<usize, FabricError> {
        let mut effects = Effects::default();
        let polled = shared.fabric.poll(&mut self.wcs)?;
        let mut wcs = std::mem::take(&mut self.wcs);
        for wc in wcs.drain(..) {
            self.on_wc(shared, wc, &mut effects);
        }
        self.wcs = wcs;
        // Slabs go back before frames are handed on, in chains; a short chain waits until nothing else is to be done,
        // which the next call finds out.
        if self.reposts.len() >= POST_BATCH || polled == 0 {
            self.repost(shared)?;
        }
        self.pump_touched(shared, &mut effects);
        self.deliver(shared);
        self.feed_starved(shared, &mut effects);
        if !self.retired.is_empty() || !shared.retired.is_empty() {
            self.sweep_retired(shared, &mut effects);
        }
        let (_, changed) = shared.backlog.update();
        if changed {
            self.pump_all(shared, &mut effects);
        }
        effects.run(shared);
        Ok(polled)
    }

    fn on_wc(&mut self, shared: &Arc<Shared<F>>, wc: Wc, effects: &mut Effects) {
        match wc {
            Wc::Receive { qpn, slab, bytes } => {
                self.on_receive(shared, qpn, &slab, bytes, effects);
                self.reposts.push(slab);
            }
            Wc::ReceiveFailed { qpn, slab, status } => {
                self.reposts.push(slab);
                shared.counters.receives_failed.add(1);
                if status != WcStatus::Flushed {
                    self.end_live(shared, qpn, &Arc::new(EpochEnd::Receive { status }), effects);
                }
            }
            Wc::Send { qpn, seq } => self.on_send(shared, qpn, seq, None, effects),
            Wc::SendFailed { qpn, seq, status, vendor_err } => {
                let cause = Arc::new(EpochEnd::WorkRequest { status, vendor_err });
                self.end_live(shared, qpn, &cause, effects);
                self.on_send(shared, qpn, seq, Some(cause), effects);
            }
        }
    }

    fn on_receive(&mut self, shared: &Arc<Shared<F>>, qpn: u32, slab: &RecvSlab, bytes: u32, effects: &mut Effects) {
        let Some(peer) = shared.route(qpn) else {
            shared.counters.stale_completions.add(1);
            return;
        };
        let mut head = [0; HEADER_BYTES];
        shared.fabric.read_slab(slab, 0, &mut head[..HEADER_BYTES.min(bytes as usize)]);
        let mut state = peer.lock();
        let Some((epoch, link)) = live(&mut state, qpn) else {
            // A frame that came before its connection's end was dealt with: the peer may have been told so.
            shared.counters.stale_completions.add(1);
            return;
        };
        let generation = epoch;
        let id = peer.id;
        match link.on_receive(head, bytes) {
            Ok(Incoming::Whole { kind, header_len, body_len }) => {
                let body = if let Sink::Handler(_) = self.sink {
                    let from = self.scratch.len();
                    shared.fabric.append_slab(slab, HEADER_BYTES, body_len, &mut self.scratch);
                    Body::Scratch(from..self.scratch.len())
                } else {
                    let mut body = Vec::with_capacity(body_len);
                    shared.fabric.append_slab(slab, HEADER_BYTES, body_len, &mut body);
                    Body::Owned(body)
                };
                self.deliveries.push(Delivery { peer: id, kind, header_len, body });
            }
            Ok(Incoming::Fragment { body_len, last }) => {
                shared.fabric.append_slab(slab, HEADER_BYTES, body_len, link.partial_mut());
                if let Some(whole) = if last { link.finish_fragment() } else { None } {
                    let (kind, header_len, body) = (whole.kind, whole.header_len, Body::Owned(whole.body));
                    self.deliveries.push(Delivery { peer: id, kind, header_len, body });
                }
            }
            Ok(Incoming::Control | Incoming::Pong { .. }) => {}
            Err(error) => {
                shared.counters.malformed.add(1);
                tracing::warn!(peer = %id, %error, "the peer broke the protocol");
                if error.is_fatal() {
                    let cause = Arc::new(EpochEnd::Protocol(error));
                    peer.end_epoch(&mut state, shared, generation, cause, effects);
                    return;
                }
            }
        }
        if !std::mem::replace(&mut state.owing, true) {
            self.owing.push(peer.clone());
        }
        self.touch(&peer, &mut state);
    }

    /// A send completion: of a live epoch, or of one that is being flushed.
    fn on_send(
        &mut self,
        shared: &Arc<Shared<F>>,
        qpn: u32,
        seq: WrSeq,
        failure: Option<Arc<EpochEnd>>,
        effects: &mut Effects,
    ) {
        let Some(peer) = shared.route(qpn) else {
            shared.counters.stale_completions.add(1);
            return;
        };
        let id = peer.id;
        {
            let mut state = peer.lock();
            if let Some((_, link)) = live(&mut state, qpn) {
                // Failures end the epoch first, so this one is good.
                let cause = failure.unwrap_or_else(|| Arc::new(EpochEnd::Replaced));
                link.on_send_done(seq, |op, ended| shared.retire_op(id, op, ended, &cause, effects));
                self.touch(&peer, &mut state);
                return;
            }
        }
        self.adopt_retired(shared);
        let Some(Retired { link: Some(link), cause, .. }) = self.retired.get_mut(&qpn) else {
            shared.counters.stale_completions.add(1);
            return;
        };
        let each = |op, ended| shared.retire_op(id, op, ended, cause, effects);
        if failure.is_some() {
            link.on_send_failed(seq, each);
        } else {
            link.on_send_done(seq, each);
        }
    }

    /// Ends the epoch of this QP if it is still live.
    fn end_live(&mut self, shared: &Arc<Shared<F>>, qpn: u32, cause: &Arc<EpochEnd>, effects: &mut Effects) {
        let Some(peer) = shared.route(qpn) else { return };
        let mut state = peer.lock();
        let generation = state.epoch.as_ref().filter(|epoch| epoch.qp.qpn().get() == qpn).map(|epoch| epoch.generation);
        if let Some(generation) = generation {
            peer.end_epoch(&mut state, shared, generation, cause.clone(), effects);
        }
    }

    fn touch(&mut self, peer: &Arc<Peer<F>>, state: &mut PeerState<F>) {
        if !std::mem::replace(&mut state.touched, true) {
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
        for peer in std::mem::take(&mut self.owing) {
            let mut state = peer.lock();
            state.owing = false;
            if let Some(Epoch { link: Some(link), .. }) = &mut state.epoch {
                link.on_reposted();
            }
            self.touch(&peer, &mut state);
        }
        Ok(())
    }

    fn pump_touched(&mut self, shared: &Arc<Shared<F>>, effects: &mut Effects) {
        for peer in self.touched.drain(..) {
            let mut state = peer.lock();
            state.touched = false;
            peer.pump(&mut state, shared, effects);
        }
    }

    fn pump_all(&mut self, shared: &Arc<Shared<F>>, effects: &mut Effects) {
        if shared.is_withholding() {
            shared.counters.withheld.add(1);
        }
        for peer in shared.all_peers() {
            let mut state = peer.lock();
            peer.pump(&mut state, shared, effects);
        }
    }

    /// Peers that wait for a send slab get their turn while there are some.
    fn feed_starved(&mut self, shared: &Arc<Shared<F>>, effects: &mut Effects) {
        for _ in 0..shared.starved.len() {
            if shared.send_slabs.is_empty() {
                return;
            }
            let Some(peer) = shared.starved.pop() else { return };
            let mut state = peer.lock();
            state.starved = false;
            peer.pump(&mut state, shared, effects);
        }
    }

    /// Hands on what this batch brought. No lock but the driver's own is held.
    fn deliver(&mut self, shared: &Arc<Shared<F>>) {
        for Delivery { peer, kind, header_len, body } in self.deliveries.drain(..) {
            match (&self.sink, body) {
                (Sink::Handler(handler), body) => {
                    let bytes = match &body {
                        Body::Scratch(range) => &self.scratch[range.clone()],
                        Body::Owned(bytes) => &bytes[..],
                    };
                    shared.counters.received.add(kind, bytes.len());
                    let (header, payload) = bytes.split_at(header_len);
                    contain("handler", || handler.on_frame(Borrowed { peer, kind, header, payload }));
                }
                (Sink::Streams { senders, backlog }, Body::Owned(bytes)) => {
                    shared.counters.received.add(kind, bytes.len());
                    let mut header = Bytes::from(bytes);
                    let payload = header.split_off(header_len);
                    if !Sink::push(senders, backlog, Received { peer, kind, header, payload }) {
                        shared.counters.undelivered.add(1);
                    }
                }
                // Scratch bodies are made for handlers only.
                (Sink::Streams { .. }, Body::Scratch(_)) => {}
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
            destroy(qp);
            shared.shares().release(rx_window);
            if let Some(mut link) = link {
                if link.wrs_in_flight() > 0 {
                    shared.counters.flushes_abandoned.add(1);
                    tracing::warn!(%peer, qpn, wrs = link.wrs_in_flight(), "no flush came; QP destroyed regardless");
                }
                let rest: Vec<_> = link.abandon().collect();
                for op in rest {
                    shared.retire_op(peer, op, Ended::Failed, &cause, effects);
                }
                shared.past_links().add(&link.counts());
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

    /// Whether every ended connection is gone.
    pub(crate) fn is_quiet(&self) -> bool {
        self.retired.is_empty()
    }

    /// Covers WRs behind which nothing signaled came for a while.
    fn check_tails(&mut self, shared: &Arc<Shared<F>>, effects: &mut Effects) {
        shared.take_bare_tail_note();
        let mut again = false;
        for peer in shared.all_peers() {
            let mut state = peer.lock();
            let Some(Epoch { link: Some(link), tail_seen, .. }) = &mut state.epoch else { continue };
            if !link.has_bare_tail() {
                *tail_seen = None;
                continue;
            }
            again = true;
            let at = link.next_seq();
            if tail_seen.replace(at) == Some(at) {
                shared.counters.tail_probes.add(1);
                link.request_ping();
                peer.pump(&mut state, shared, effects);
            }
        }
        if again {
            shared.note_bare_tail_quietly();
        }
    }

    /// Does what is due by the clock, and says when to come again.
    pub(crate) fn timers(&mut self, shared: &Arc<Shared<F>>) -> Option<Instant> {
        let mut effects = Effects::default();
        if !self.retired.is_empty() || !shared.retired.is_empty() {
            self.sweep_retired(shared, &mut effects);
        }
        let now = shared.now();
        match self.tail_check {
            Some(due) if now >= due => {
                self.tail_check = None;
                self.check_tails(shared, &mut effects);
            }
            _ => {}
        }
        if self.tail_check.is_none() && shared.has_bare_tail_note() {
            self.tail_check = Some(now + shared.config.tail_probe_after);
        }
        effects.run(shared);
        let sweep = (!self.retired.is_empty()).then(|| now + QUIET_BEFORE_DESTROY / 4);
        [self.tail_check, sweep].into_iter().flatten().min()
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
            AsyncEvent::QpFatal { qpn } => {
                let mut effects = Effects::default();
                self.end_live(shared, qpn, &Arc::new(EpochEnd::QpFatal), &mut effects);
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
            other => tracing::info!(event = ?other, "async event"),
        }
        Ok(())
    }
}

/// Drops the last reference to a QP, which destroys it.
fn destroy<Q: FabricQp>(qp: Arc<Q>) {
    // A task that is still bringing it up holds another one; its end destroys the QP then.
    drop(qp);
}

/// The live epoch of a QP and its link.
fn live<F: Fabric>(
    state: &mut PeerState<F>,
    qpn: u32,
) -> Option<(verbs_bootstrap::Generation, &mut crate::proto::link::Link)> {
    let epoch = state.epoch.as_mut().filter(|epoch| epoch.qp.qpn().get() == qpn)?;
    Some((epoch.generation, epoch.link.as_mut()?))
}

/// The driver's task: arm, drain, wait. Ends after shutdown, when the last connection is gone.
pub(crate) async fn run_task<F: Fabric>(shared: Arc<Shared<F>>, spin: Duration) {
    if let Err(error) = drive(&shared, spin).await {
        shared.on_device_lost(error);
        // The device is gone, its flushes will not come; what is in flight ends by the clock.
        while !shared.driver_may_stop() {
            let due = shared.driver().timers(&shared);
            let due = due.unwrap_or_else(|| shared.now() + QUIET_BEFORE_DESTROY);
            tokio::select! {
                () = sleep_until(due.into()) => {}
                () = shared.driver_wake.notified() => {}
            }
        }
    }
}

async fn drive<F: Fabric>(shared: &Arc<Shared<F>>, spin: Duration) -> Result<(), FabricError> {
    loop {
        if !spin.is_zero() {
            spin_while_busy(shared, spin).await?;
        }
        shared.fabric.arm()?;
        drain(shared).await?;
        let due = shared.driver().timers(shared);
        if shared.driver_may_stop() {
            return Ok(());
        }
        let far = shared.now() + Duration::from_secs(3600);
        tokio::select! {
            biased;
            woken = poll_fn(|cx| shared.fabric.poll_wake(cx)) => {
                woken?;
                shared.counters.wakes.add(1);
            }
            event = poll_fn(|cx| shared.fabric.poll_async_event(cx)) => {
                shared.driver().on_async_event(shared, event?)?;
            }
            () = shared.driver_wake.notified() => {}
            () = sleep_until(due.unwrap_or(far).into()), if due.is_some() => {}
        }
    }
}

/// Polls until nothing is there.
async fn drain<F: Fabric>(shared: &Arc<Shared<F>>) -> Result<(), FabricError> {
    loop {
        for _ in 0..BATCHES_BEFORE_YIELD {
            if shared.driver().progress(shared)? == 0 {
                return Ok(());
            }
        }
        tokio::task::yield_now().await;
    }
}

/// Polls until nothing has come for `spin`.
async fn spin_while_busy<F: Fabric>(shared: &Arc<Shared<F>>, spin: Duration) -> Result<(), FabricError> {
    let mut last = Instant::now();
    loop {
        for _ in 0..BATCHES_BEFORE_YIELD {
            if shared.driver().progress(shared)? > 0 {
                last = Instant::now();
            } else if last.elapsed() >= spin {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        tokio::task::yield_now().await;
    }
}

/// The driver's thread in [`Progress::BusyPoll`].
pub(crate) fn run_thread<F: Fabric>(shared: &Arc<Shared<F>>) {
    let mut idle = 0u32;
    loop {
        let mut driver = shared.driver();
        let step = driver.progress(shared).and_then(|polled| {
            // The clock is read only now and then, and when there is nothing else to do.
            idle = if polled == 0 { idle.wrapping_add(1) } else { 0 };
            if idle % 64 == 1 || shared.is_stopping() {
                driver.timers(shared);
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                if let std::task::Poll::Ready(event) = shared.fabric.poll_async_event(&mut cx) {
                    driver.on_async_event(shared, event?)?;
                }
            }
            Ok(())
        });
        drop(driver);
        if let Err(error) = step {
            shared.on_device_lost(error);
            while !shared.driver_may_stop() {
                shared.driver().timers(shared);
                std::thread::sleep(QUIET_BEFORE_DESTROY / 4);
            }
        }
        if shared.driver_may_stop() {
            return;
        }
        std::hint::spin_loop();
    }
}

/// How the driver's task spins.
pub(crate) fn spin_of(progress: Progress) -> Duration {
    match progress {
        Progress::SpinThenPark { spin } => spin,
        _ => Duration::ZERO,
    }
}
