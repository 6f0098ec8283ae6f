//! Draining: requests are turned away while the work in hand is finished.
//!
//! The flag belongs to the process, not to one transport: whoever drains raises it once, for all of them. While it is
//! up, a `Message` that arrives is not delivered but answered with `ShuttingDown` and its own header; everything else
//! goes on, new connections and health checks too.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::Notify;
use tracing::Instrument;

use super::{
    Worker,
    peer::{Effects, Peer},
    shared::{Life, Shared},
};
use crate::{
    SendError,
    fabric::Fabric,
    proto::{
        frame::{Lane, MessageType},
        link::{Frame, SendErrorHandler},
    },
};

/// Shared by all transports of a process, and by whoever drains it.
#[derive(Clone, Debug, Default)]
pub struct DrainFlag(Arc<Flag>);

#[derive(Debug, Default)]
struct Flag {
    raised: AtomicBool,
    in_flight: AtomicUsize,
    idle: Notify,
}

/// One piece of work in hand. Drain waits until all are dropped.
#[derive(Debug)]
#[must_use = "the work counts for as long as the guard lives"]
pub struct InFlightGuard(Arc<Flag>);

/// How long shutdown waits for the work in hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainPolicy {
    /// Until the last guard is dropped.
    WaitForEver,
    /// So long; then shutdown goes on and the count stays as it is.
    Timeout(Duration),
}

impl DrainFlag {
    /// Turns requests away from now on. Cannot be undone: a drained process ends.
    pub fn raise(&self) {
        self.0.raised.store(true, Ordering::Release);
    }

    /// Whether requests are turned away.
    pub fn is_raised(&self) -> bool {
        self.0.raised.load(Ordering::Acquire)
    }

    /// Counts one piece of work, also after the flag was raised: work may make work.
    pub fn guard(&self) -> InFlightGuard {
        self.0.in_flight.fetch_add(1, Ordering::AcqRel);
        InFlightGuard(self.0.clone())
    }

    /// Guards that live.
    pub fn in_flight(&self) -> usize {
        self.0.in_flight.load(Ordering::Acquire)
    }

    /// Returns when no guard lives.
    pub async fn wait_idle(&self) {
        loop {
            // Registered before the count is read, or the last drop could be missed.
            let idle = self.0.idle.notified();
            tokio::pin!(idle);
            idle.as_mut().enable();
            if self.in_flight() == 0 {
                return;
            }
            idle.await;
        }
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if self.0.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

/// An echo that fails concerns nobody: the requester hears of the connection's end by itself.
struct Nobody;

impl SendErrorHandler for Nobody {
    fn on_error(&self, _header: Bytes, _payload: Bytes, _error: SendError) {}
}

impl<F: Fabric> Shared<F> {
    /// Whether a frame of this type is turned away now.
    pub(super) fn turns_away(&self, kind: MessageType) -> bool {
        kind == MessageType::Message && self.config.drain.is_raised()
    }

    /// Answers a request that is turned away, on the connection by which it came: its header, no payload. An ordinary
    /// frame; one that finds the channel full is dropped and counted.
    pub(super) fn turn_away(&self, peer: &Arc<Peer<F>>, header: Bytes, effects: &mut Effects) {
        self.counters.drain_rejected.add(1);
        let frame = Frame {
            kind: MessageType::ShuttingDown,
            lane: Lane::Application,
            header,
            payload: Bytes::new(),
            on_error: self.nobody.get_or_init(|| Arc::new(Nobody)).clone(),
        };
        let mut state = peer.lock();
        if state.epoch.is_none() || !state.push_within(frame, self.config.channel_frames) {
            self.counters.echoes_dropped.add(1);
            return;
        }
        peer.pump(&mut state, self, effects);
    }
}

impl<F: Fabric> Worker<F> {
    /// Says that this process is about to drain. Idempotent. It is [`DrainFlag::raise`] that turns requests away, for
    /// all transports at once.
    pub fn begin_drain(&self) {
        let shared = self.shared();
        if shared.life() == Life::Running && shared.note_drain() {
            tracing::info!(me = %shared.me.instance, in_flight = shared.config.drain.in_flight(), "draining");
        }
    }

    /// Waits for the work in hand as `policy` says, then shuts down.
    pub async fn drain_and_shutdown(&self, policy: DrainPolicy) {
        self.begin_drain();
        let span = tracing::info_span!("drain", me = %self.instance(), ?policy);
        self.drain(policy).instrument(span).await;
        self.shutdown().await;
    }

    async fn drain(&self, policy: DrainPolicy) {
        let idle = self.shared().config.drain.wait_idle();
        match policy {
            DrainPolicy::WaitForEver => idle.await,
            DrainPolicy::Timeout(limit) => {
                if tokio::time::timeout(limit, idle).await.is_err() {
                    let left = self.shared().config.drain.in_flight();
                    tracing::warn!(left, ?limit, "work is left in hand; shutting down all the same");
                    return;
                }
            }
        }
        tracing::info!("drained");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiting_ends_with_the_last_guard() {
        let flag = DrainFlag::default();
        flag.wait_idle().await;
        let (first, second) = (flag.guard(), flag.clone().guard());
        flag.raise();
        let late = flag.guard();
        assert_eq!((flag.in_flight(), flag.is_raised()), (3, true));
        let waiting = tokio::spawn({
            let flag = flag.clone();
            async move { flag.wait_idle().await }
        });
        drop((first, second));
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(late);
        tokio::time::timeout(Duration::from_secs(5), waiting).await.expect("woken").expect("no panic");
    }
}
