//! Pairs of QPs of the requester that wait for the next operation with the same life of the same peer, each with the
//! control connection that it was made over; those of an operation over several pairs wait together.
//!
//! One is kept only after READY, when neither side owes anything. When a peer's epoch is seen to have changed, all of
//! the old one are given up.

use std::{
    net::{SocketAddr, TcpStream},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use verbs_transport::fabric::bulk::BulkFabric;

use super::{identity::Incarnation, link::Link};
use crate::{Epoch, tcp::is_quiet};

/// Which life of which engine.
pub(crate) type Peer = (SocketAddr, Epoch);

/// One pair, or several, and their control connection.
pub(crate) struct Kept<F: BulkFabric> {
    pub(crate) stream: TcpStream,
    /// At least one; several in the order of their plan.
    pub(crate) links: Vec<Link<F>>,
    /// What several are known by together.
    pub(crate) set: Option<SetNames>,
}

/// The names of several pairs together, and the last grant of all of them.
#[derive(Clone, Copy)]
pub(crate) struct SetNames {
    pub(crate) source_link: Incarnation,
    pub(crate) requester_link: Incarnation,
    pub(crate) last_generation: u64,
}

pub(crate) struct Cache<F: BulkFabric> {
    max_kept: usize,
    idle: Duration,
    state: Mutex<State<F>>,
}

struct State<F: BulkFabric> {
    closed: bool,
    /// The longest idle one first.
    kept: Vec<Entry<F>>,
}

struct Entry<F: BulkFabric> {
    peer: Peer,
    since: Instant,
    kept: Kept<F>,
}

impl<F: BulkFabric> Cache<F> {
    pub(crate) fn new(max_kept: usize, idle: Duration) -> Self {
        Self { max_kept, idle, state: Mutex::new(State { closed: false, kept: Vec::new() }) }
    }

    /// The one used last between exactly these protection domains, ours and the peer's, if it is still good.
    pub(crate) fn take(&self, peer: Peer, pds: &[(Incarnation, Incarnation)]) -> Option<Kept<F>> {
        // What is given up is dropped without the lock.
        let mut useless = self
            .forget(|entry, idle| entry.since.elapsed() >= idle || (entry.peer.0 == peer.0 && entry.peer.1 != peer.1));
        let mut state = self.lock();
        let mut found = None;
        let is_it = |entry: &Entry<F>| {
            let own = entry.kept.links.iter().map(|link| (link.names.requester_pd, link.names.source_pd));
            entry.peer == peer && own.eq(pds.iter().copied())
        };
        while let Some(at) = state.kept.iter().rposition(is_it) {
            let entry = state.kept.remove(at);
            if is_quiet(&entry.kept.stream) && entry.kept.links.iter().all(Link::is_usable) {
                found = Some(entry.kept);
                break;
            }
            useless.push(entry);
        }
        drop(state);
        drop(useless);
        found
    }

    pub(crate) fn put(&self, peer: Peer, mut kept: Kept<F>) {
        kept.links.iter_mut().for_each(Link::park);
        let entry = Entry { peer, since: Instant::now(), kept };
        let mut state = self.lock();
        if self.max_kept == 0 || state.closed {
            drop(state);
            drop(entry);
            return;
        }
        let oldest = (state.kept.len() == self.max_kept).then(|| state.kept.remove(0));
        state.kept.push(entry);
        drop(state);
        drop(oldest);
    }

    /// Of those on this protection domain of ours gives up the one that has been idle longest; whether there was one.
    pub(crate) fn evict(&self, pd: Incarnation) -> bool {
        let mut state = self.lock();
        let at = state.kept.iter().position(|entry| entry.kept.links.iter().any(|link| link.names.requester_pd == pd));
        let oldest = at.map(|at| state.kept.remove(at));
        drop(state);
        oldest.is_some()
    }

    /// The peer turned out to live in another epoch.
    pub(crate) fn forget_peer(&self, endpoint: SocketAddr) {
        drop(self.forget(|entry, _| entry.peer.0 == endpoint));
    }

    /// Gives up all, and keeps none from now on.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        drop(self.forget(|_, _| true));
    }

    pub(crate) fn kept(&self) -> usize {
        self.lock().kept.len()
    }

    fn forget(&self, which: impl Fn(&Entry<F>, Duration) -> bool) -> Vec<Entry<F>> {
        let mut state = self.lock();
        let (out, stay) = std::mem::take(&mut state.kept).into_iter().partition(|entry| which(entry, self.idle));
        state.kept = stay;
        out
    }

    fn lock(&self) -> MutexGuard<'_, State<F>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
