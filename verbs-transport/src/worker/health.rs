//! Looks after peers that owe something: covers bare tails, probes what stands still, ends what is dead. And the
//! application's own question whether a peer is well.
//!
//! Verbs completions do not tell whether a peer lives, and a QP may hang without a word; only an answer over the QP
//! does.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::timeout;
use verbs_bootstrap::{InstanceId, Net};

use super::{
    Worker,
    error::{EpochEnd, HealthError},
    peer::{Effects, Epoch, Peer, PeerState},
    shared::{Life, Shared},
};
use crate::fabric::{Fabric, FabricQp};

impl<F: Fabric> Shared<F> {
    /// One look at every peer; the driver comes back as long as any of them owes something. `peers` is its room for them.
    pub(super) fn look_after_peers(self: &Arc<Self>, peers: &mut Vec<Arc<Peer<F>>>, effects: &mut Effects) {
        self.unsettled.take();
        let now = self.now();
        let mut again = false;
        self.append_peers(peers);
        for peer in peers.drain(..) {
            again |= self.look_after(&peer, now, effects);
        }
        if again {
            self.unsettled.note_quietly();
        }
    }

    /// Whether this peer needs another look.
    fn look_after(self: &Arc<Self>, peer: &Arc<Peer<F>>, now: Instant, effects: &mut Effects) -> bool {
        let mut state = peer.lock();
        let busy = state.trim();
        let expired = state.expire_gate(now, self.config.admission_deadline, effects);
        self.counters.admissions_expired.add(expired);
        let waiting = state.has_waiting() || busy;
        match judge(&mut state, now, self.config.health_deadline) {
            Look::Settled => return waiting,
            Look::Moving => {}
            Look::CoverTail => {
                self.counters.tail_probes.add(1);
                self.ping(peer, &mut state, effects);
            }
            Look::Probe => {
                self.counters.stall_probes.add(1);
                self.ping(peer, &mut state, effects);
            }
            Look::Ask => {
                // It may have fallen to ERR, and neither a flush nor an event has come.
                let fallen = |epoch: &Epoch<F>| epoch.qp.is_rts().is_ok_and(|rts| !rts);
                if state.epoch.as_ref().is_some_and(fallen) {
                    self.end_still(peer, &mut state, EpochEnd::QpFatal, effects);
                }
            }
            Look::Dead { in_flight } => {
                let after = self.config.health_deadline;
                self.end_still(peer, &mut state, EpochEnd::Unresponsive { after, in_flight }, effects);
            }
        }
        true
    }

    fn end_still(&self, peer: &Arc<Peer<F>>, state: &mut PeerState<F>, cause: EpochEnd, effects: &mut Effects) {
        let generation = state.epoch.as_ref().map(|epoch| epoch.generation);
        if let Some(generation) = generation {
            peer.end_epoch(state, self, generation, &Arc::new(cause), effects);
        }
    }

    fn ping(&self, peer: &Arc<Peer<F>>, state: &mut PeerState<F>, effects: &mut Effects) {
        if let Some(Epoch { link: Some(link), .. }) = &mut state.epoch {
            link.request_ping();
            peer.pump(state, self, effects);
        }
    }
}

enum Look {
    /// Nothing is owed and nothing waits.
    Settled,
    /// Something is owed, and it has moved not long ago.
    Moving,
    /// WRs are in flight that nothing signaled follows, and nothing was posted since the last look.
    CoverTail,
    /// It has stood still for another [`ASK_EVERY`]: ask the device whether the QP is still in RTS.
    Ask,
    /// It has stood still for half the deadline.
    Probe,
    /// It has stood still for the whole deadline, and a PING with it.
    Dead { in_flight: u32 },
}

/// A QP that has fallen to ERR without a word is found after so long; each look is a system call.
const ASK_EVERY: Duration = Duration::from_millis(100);

fn judge<F: Fabric>(state: &mut PeerState<F>, now: Instant, deadline: Duration) -> Look {
    let (waiting, starved) = (state.has_waiting(), state.starved);
    let Some(Epoch { link: Some(link), tail_seen, moved, .. }) = &mut state.epoch else { return Look::Settled };
    if !link.is_proven() {
        // The proof has a deadline of its own, which says more.
        return Look::Settled;
    }
    if link.is_settled() && !waiting {
        (*tail_seen, *moved) = (None, None);
        return Look::Settled;
    }
    if starved && !link.awaits_completion() {
        // It waits for a send slab of ours, which is no fault of the peer's.
        *moved = None;
        return Look::Moving;
    }
    let mark = link.mark();
    let (_, since, asked) = match moved {
        Some(here) if here.0 == mark => here,
        moved => moved.insert((mark, now, 0)),
    };
    let still = now.saturating_duration_since(*since);
    // The mark counts the PING that was posted, so a dead connection is found within one and a half deadlines.
    if still >= deadline && link.is_pinging() {
        return Look::Dead { in_flight: link.wrs_in_flight() };
    }
    if still >= deadline / 2 && !link.is_pinging() {
        return Look::Probe;
    }
    if still >= ASK_EVERY * (*asked + 1) {
        *asked += 1;
        return Look::Ask;
    }
    let at = link.next_seq();
    if link.has_bare_tail() && tail_seen.replace(at) == Some(at) && !link.is_pinging() {
        return Look::CoverTail;
    }
    Look::Moving
}

impl<F: Fabric> Worker<F> {
    /// Whether a peer is well. A connected one must answer a PING over the QP; of one that was never connected only
    /// the bootstrap's listener is asked, and the answer is [`HealthError::NeverConnected`]. Uses no credit, and works
    /// while either side drains. Dropping the future leaves nothing behind.
    ///
    /// # Errors
    ///
    /// [`HealthError`].
    pub async fn check_health(&self, peer: InstanceId, deadline: Duration) -> Result<(), HealthError> {
        let shared = self.shared();
        match shared.life() {
            Life::New => return Err(HealthError::TransportNotStarted),
            Life::Running => {}
            Life::Stopping | Life::Stopped => {
                return Err(HealthError::ConnectionFailed { reason: "this worker is shutting down".to_owned() });
            }
        }
        let not_registered = HealthError::PeerNotRegistered { peer };
        let peer = shared.find_peer(peer).ok_or(not_registered.clone())?;
        let mut effects = Effects::default();
        let pongs = {
            let mut state = peer.lock();
            if state.address.is_none() {
                return Err(not_registered);
            }
            let proven = state.epoch.as_ref().filter(|epoch| epoch.proof_told).map(|epoch| epoch.pongs.subscribe());
            if proven.is_some() {
                shared.ping(&peer, &mut state, &mut effects);
            }
            proven
        };
        effects.run(shared);
        let Some(mut pongs) = pongs else { return probe_listener(shared, &peer, deadline).await };
        match timeout(deadline, pongs.changed()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(HealthError::ConnectionFailed { reason: peer.last_end() }),
            Err(_) => Err(HealthError::Timeout { after: deadline }),
        }
    }
}

/// Asks the listener of a peer to which there is no proven connection.
async fn probe_listener<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    deadline: Duration,
) -> Result<(), HealthError> {
    let (addrs, failed) = {
        let state = peer.lock();
        let addrs = state.address.as_ref().map(|address| address.bootstrap.clone()).unwrap_or_default();
        (addrs, state.last_end.is_some())
    };
    let probe = async {
        let mut refused = String::from("no address to probe");
        for addr in addrs {
            match shared.fabric.net().dial(addr).await {
                // Closed at once: the listener takes such connections for what they are.
                Ok(stream) => {
                    drop(stream);
                    return Ok(());
                }
                Err(error) => refused = format!("{addr}: {error}"),
            }
        }
        Err(refused)
    };
    match timeout(deadline, probe).await {
        Ok(Err(reason)) => Err(HealthError::ConnectionFailed { reason }),
        _ if failed => Err(HealthError::ConnectionFailed { reason: peer.last_end() }),
        Ok(Ok(())) => Err(HealthError::NeverConnected),
        Err(_) => Err(HealthError::Timeout { after: deadline }),
    }
}
