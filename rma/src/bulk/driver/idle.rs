//! Connections that nobody needs any more.

use tokio::time::Instant;
use verbs_bootstrap::InstanceId;
use verbs_transport::fabric::bulk::BulkFabric;

use super::{
    Driver,
    live::{ASK_IDLE, BUSY, Live},
};
use crate::{
    bulk::{RegionOf, config::BulkConfig, error::BulkEnd, op::Op},
    proto::transfer::TransferId,
};

impl<F: BulkFabric> Driver<F> {
    /// Asks the peers of connections that are of no use to this side whether they are to theirs.
    pub(super) fn find_idle(&mut self, now: Instant) {
        let config = &self.shared.config;
        let due = |live: &Live<F>| live.idle.due(config).is_some_and(|at| at <= now);
        let found: Vec<_> =
            self.live.iter().filter(|(_, live)| due(live)).map(|(peer, live)| (*peer, live.tag)).collect();
        for (peer, tag) in found {
            let unused = self.is_unused(peer);
            let Some(live) = self.live_of(peer, tag) else { continue };
            if live.idle.asked.is_some() {
                // No answer: nothing of this side's is lost with it.
                let after = self.shared.config.idle_close;
                self.shared.end_epoch(&self.shared.conn(peer), tag, BulkEnd::Idle { after });
            } else if unused {
                live.idle.asked = Some(now);
                live.idle.to_say |= ASK_IDLE;
            } else {
                live.idle.since = now;
            }
        }
        self.take_news();
    }

    /// The peer does not need the connection: it is closed, unless this side does, or did a short while ago.
    pub(super) fn on_asked_idle(&mut self, peer: InstanceId, tag: u32) {
        let after = self.shared.config.idle_close;
        let quiet = |live: &Live<F>| !after.is_zero() && live.idle.since.elapsed() >= after / 2;
        if self.live.get(&peer).is_some_and(quiet) && self.is_unused(peer) {
            self.shared.end_epoch(&self.shared.conn(peer), tag, BulkEnd::Idle { after });
        } else if let Some(live) = self.live_of(peer, tag) {
            live.idle.to_say |= BUSY;
        }
    }

    /// Whether nothing is under way on the connection, and this side could dial it again.
    fn is_unused(&self, peer: InstanceId) -> bool {
        let Some(live) = self.live.get(&peer) else { return false };
        let idle = live.ops.is_empty() && live.idle.untaken == 0 && live.proven && !self.windows.any_on(live.tag);
        let facts = || self.shared.worker.upgrade().and_then(|worker| worker.peer_facts(peer));
        idle && facts().is_some_and(|facts| facts.address.is_some())
    }
}

/// What is known of a connection that nobody may need any more.
///
/// A responder sees nothing of a peer's READs, so neither side can tell alone: one asks, and starts nothing on the
/// connection until the other has closed it or answered that it is busy.
pub(super) struct Idle<F: BulkFabric> {
    /// Nothing of this side's has moved since.
    pub(super) since: Instant,
    /// When the peer was asked.
    pub(super) asked: Option<Instant>,
    /// Flags of the next control message.
    pub(super) to_say: u32,
    /// Transfers that began after the question: they go over the next connection, or this one if it stays.
    pub(super) parked: Vec<Op<RegionOf<F>>>,
    /// Notifications that the application has not taken.
    pub(super) untaken: u32,
}

impl<F: BulkFabric> Idle<F> {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, asked: None, to_say: 0, parked: Vec::new(), untaken: 0 }
    }

    pub(super) fn take_parked(&mut self, id: TransferId) -> Option<Op<RegionOf<F>>> {
        let at = self.parked.iter().position(|op| op.id == id)?;
        Some(self.parked.remove(at))
    }

    /// When to ask, or to go without an answer.
    pub(super) fn due(&self, config: &BulkConfig) -> Option<Instant> {
        match self.asked {
            _ if config.idle_close.is_zero() => None,
            None => Some(self.since + config.idle_close),
            Some(asked) => Some(asked + config.stall_deadline),
        }
    }
}

impl<F: BulkFabric> Live<F> {
    /// The peer needs the connection.
    pub(super) fn stays_open(&mut self) {
        self.idle.asked = None;
        self.idle.since = Instant::now();
        for op in std::mem::take(&mut self.idle.parked) {
            self.begin(op);
        }
    }
}
