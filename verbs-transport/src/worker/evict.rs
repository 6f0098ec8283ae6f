//! Closes connections that nobody uses, when the application wants that.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use verbs_bootstrap::{Generation, InstanceId};

use super::{
    error::EpochEnd,
    peer::{Epoch, Peer},
    shared::Shared,
};
use crate::{fabric::Fabric, proto::link::LinkMark};

/// What a connection looked like, and since when.
struct Seen {
    generation: Generation,
    mark: LinkMark,
    received: u64,
    since: Instant,
}

/// Runs until the worker is gone.
pub(super) async fn run<F: Fabric>(worker: Weak<Shared<F>>, after: Duration) {
    let mut seen = HashMap::new();
    loop {
        tokio::time::sleep(after / 4).await;
        let Some(shared) = worker.upgrade().filter(|shared| !shared.is_stopping()) else { return };
        let peers = shared.all_peers();
        seen.retain(|id, _| peers.iter().any(|peer| peer.id == *id));
        for peer in peers {
            if let Some(generation) = idle_epoch(&shared, &peer, &mut seen, after) {
                shared.end_epoch_of(&peer, generation, EpochEnd::Idle { after });
            }
        }
    }
}

/// The epoch of a peer, if nothing has moved on it for `after` and nothing is owed or waits.
fn idle_epoch<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    seen: &mut HashMap<InstanceId, Seen>,
    after: Duration,
) -> Option<Generation> {
    let state = peer.lock();
    let Some(Epoch { generation, link: Some(link), proof_told: true, .. }) = &state.epoch else {
        seen.remove(&peer.id);
        return None;
    };
    let (mark, received, now) = (link.mark(), link.counts().received, shared.now());
    let fresh = || Seen { generation: *generation, mark, received, since: now };
    let last = seen.entry(peer.id).or_insert_with(fresh);
    if last.generation != *generation || last.mark != mark || last.received != received {
        *last = fresh();
    }
    let idle = link.is_settled() && !state.has_waiting() && now.saturating_duration_since(last.since) >= after;
    idle.then_some(*generation)
}
