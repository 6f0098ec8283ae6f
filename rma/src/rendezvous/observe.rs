//! News of peers: leases and questions follow.

use std::sync::{Arc, Weak};

use verbs_transport::{EpochEnd, InstanceId, PeerObserver, PeerRun, fabric::Fabric};

use super::inner::{Inner, now};

/// What is attached to the worker.
pub(super) struct Observer<F: Fabric>(pub(super) Weak<Inner<F>>);

impl<F: Fabric> PeerObserver for Observer<F> {
    fn on_connected(&self, peer: InstanceId, run: &PeerRun) {
        if let Some(inner) = self.0.upgrade() {
            inner.learn(run.incarnation.0, peer);
            inner.peer_came(peer);
        }
    }

    fn on_ended(&self, peer: InstanceId, _run: Option<verbs_bootstrap::Incarnation>, cause: &Arc<EpochEnd>) {
        let Some(inner) = self.0.upgrade() else { return };
        inner.asks.fail_of(peer, &cause.to_string());
        let for_good = matches!(**cause, EpochEnd::PeerRestarted | EpochEnd::Unregistered | EpochEnd::ShuttingDown);
        if for_good {
            inner.forget_window(peer);
        }
        inner.peer_left(peer, for_good);
    }

    fn on_shutdown(&self) {
        if let Some(inner) = self.0.upgrade() {
            inner.close();
        }
    }
}

impl<F: Fabric> Inner<F> {
    fn peer_came(&self, peer: InstanceId) {
        self.left().remove(&peer);
    }

    /// The connection to a peer has ended. What is for it alone waits a while for it to come back, unless it will not.
    fn peer_left(self: &Arc<Self>, peer: InstanceId, for_good: bool) {
        let until = (!for_good).then(|| now() + self.config.staged_ttl_after_end);
        self.with_book(|book| book.end_slots_for(peer, until));
        if for_good {
            self.end_leases_of(peer);
        } else {
            self.left().insert(peer);
            self.reaper_wake.notify_one();
            self.end_leases_of_the_gone();
        }
    }

    /// The leases of those who have left, and whose bulk QP is gone, too: they READ nothing, and hear of it by the same
    /// ends. Those who only lost their message connection keep theirs.
    pub(super) fn end_leases_of_the_gone(self: &Arc<Self>) {
        let reading = |peer: &InstanceId| self.reads.as_ref().is_some_and(|reads| reads.is_connected(*peer));
        let gone: Vec<InstanceId> = {
            let mut left = self.left();
            let gone: Vec<InstanceId> = left.iter().copied().filter(|peer| !reading(peer)).collect();
            left.retain(|peer| !gone.contains(peer));
            gone
        };
        for peer in gone {
            self.end_leases_of(peer);
        }
    }

    fn end_leases_of(self: &Arc<Self>, peer: InstanceId) {
        let leases = self.with_book(|book| book.end_leases_of(peer));
        self.counters.leases_of_gone_peers.add(leases);
    }
}
