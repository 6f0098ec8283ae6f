//! Which transport carries a request: decided before it can have an effect.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use verbs_transport::fabric::bulk::BulkFabric;

use super::{
    cache::Peer,
    requester::{Lost, NotDone, PAUSE, RdmaRequester, Unavailable},
    routes::Rail,
    spread::Fell,
};
use crate::{
    Profile, RemoteEffect, Status, TransferError, Transport, TransportPolicy,
    batch::{DataPath, Direction, Slice},
    deadline::Deadline,
    error::Failure,
    tcp::TcpPath,
};

/// How a rail failed, and whether the next may be tried.
struct Tried {
    not_done: NotDone,
    again: bool,
}

/// Peers that are remembered at once. Beyond, all are forgotten: to ask again costs a connection.
const REMEMBERED: usize = 1024;

/// RDMA, with TCP beside it where that is allowed.
pub(crate) struct RdmaPath<F: BulkFabric> {
    policy: TransportPolicy,
    requester: Arc<RdmaRequester<F>>,
    tcp: Arc<TcpPath>,
    /// Peers that are of no use to ask, until when; `None` for their life.
    without: Mutex<HashMap<Peer, Option<Instant>>>,
}

impl<F: BulkFabric> RdmaPath<F> {
    pub(crate) fn new(policy: TransportPolicy, requester: Arc<RdmaRequester<F>>, tcp: Arc<TcpPath>) -> Self {
        Self { policy, requester, tcp, without: Mutex::default() }
    }

    fn is_without(&self, peer: Peer) -> bool {
        let mut without = self.without.lock().unwrap_or_else(PoisonError::into_inner);
        match without.get(&peer) {
            None => false,
            Some(Some(until)) if *until <= Instant::now() => {
                without.remove(&peer);
                false
            }
            Some(_) => true,
        }
    }

    fn remember(&self, peer: Peer, Unavailable { error, again_after }: &Unavailable) {
        if again_after.is_some_and(|pause| pause.is_zero()) {
            return;
        }
        tracing::info!(endpoint = %peer.0, %error, ?again_after, "requests to this peer go over TCP");
        let mut without = self.without.lock().unwrap_or_else(PoisonError::into_inner);
        if without.len() >= REMEMBERED {
            without.clear();
        }
        without.insert(peer, again_after.map(|pause| Instant::now() + pause));
    }

    fn over_rdma(&self, slice: Slice, deadline: Deadline) -> Result<Transport, Failure> {
        let counters = &self.requester.counters;
        let (length, direction, profile) = (slice.length, slice.direction, slice.profile);
        let (mut tried, mut spread) = (Vec::new(), true);
        // By any of the attempts.
        let mut local_changed = false;
        let told = |failure: Failure, local_changed: bool| Failure {
            local_changed: failure.local_changed || local_changed,
            ..failure
        };
        let outcome = loop {
            let outcome = self.try_once(&slice, deadline, &mut tried, &mut spread);
            if let Err(Tried { not_done: NotDone::Failed(failure), .. }) = &outcome {
                local_changed |= failure.local_changed;
            }
            match outcome {
                Err(Tried { again: true, .. })
                    if deadline.remaining().is_some() && self.requester.has_more(slice.peer, &tried) =>
                {
                    counters.rdma_retries.add(1);
                }
                Err(Tried { not_done: NotDone::Unavailable(why), .. }) if self.policy == TransportPolicy::Auto => {
                    self.remember(slice.peer, &why);
                    return self.over_tcp(slice, deadline).map_err(|failure| told(failure, local_changed));
                }
                Err(Tried { not_done: NotDone::Unavailable(why), .. }) => break Err(Failure::harmless(why.error)),
                Err(Tried { not_done: NotDone::Failed(failure), .. }) => break Err(failure),
                Ok(()) => break Ok(()),
            }
        };
        match &outcome {
            Ok(()) => {
                counters.completed.add(1);
                counters.rdma_completed.add(1);
                counters.direct_completed.add(u64::from(profile == Profile::Direct));
                let moved = if direction == Direction::Read { &counters.read } else { &counters.written };
                moved.add(length);
            }
            Err(failure) => {
                counters.failed.add(1);
                counters.unknown.add(u64::from(failure.effect == RemoteEffect::Unknown));
            }
        }
        outcome.map(|()| Transport::Rdma).map_err(|failure| told(failure, local_changed))
    }

    /// Several rails, if the request is worth it, there are as many, and that has not failed with nobody to blame; else one.
    fn try_once(
        &self,
        slice: &Slice,
        deadline: Deadline,
        tried: &mut Vec<Rail>,
        spread: &mut bool,
    ) -> Result<(), Tried> {
        if *spread && self.requester.is_spread(slice, tried) {
            match self.requester.transfer_spread(slice, deadline, tried) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(fell) => return Err(self.fell(fell, slice.peer, tried, spread)),
            }
        }
        *spread = false;
        self.try_a_rail(slice, deadline, tried)
    }

    /// What a request over several rails did wrong is remembered of those that are to blame.
    fn fell(&self, fell: Fell, peer: Peer, tried: &mut Vec<Rail>, spread: &mut bool) -> Tried {
        let Fell { not_done, rails, may_go_again } = fell;
        let (fault, busy) = weigh(&not_done);
        if rails.is_empty() {
            *spread = false;
            if fault {
                self.requester.routes.narrow(peer, Some(PAUSE));
            }
        }
        for rail in rails {
            if fault {
                self.requester.routes.failed(rail);
            }
            tried.push(rail);
        }
        Tried { not_done, again: may_go_again && (fault || busy) }
    }

    /// One rail, none of those `tried` and one of them from now on. What it did wrong is remembered.
    fn try_a_rail(&self, slice: &Slice, deadline: Deadline, tried: &mut Vec<Rail>) -> Result<(), Tried> {
        let before = tried.len();
        let (not_done, repeatable) = match self.requester.prepare(slice, deadline, tried) {
            Ok(prepared) => match self.requester.carry(slice.clone(), prepared) {
                Ok(()) => return Ok(()),
                // A WRITE that may have had an effect is never sent again, nor is what the source may have ended well.
                Err(Lost { failure, before_done }) => {
                    let repeatable = before_done && failure.effect == RemoteEffect::None;
                    (NotDone::Failed(failure), repeatable)
                }
            },
            Err(not_done) => (not_done, true),
        };
        let (fault, busy) = weigh(&not_done);
        let Some(rail) = tried[before..].last() else { return Err(Tried { not_done, again: false }) };
        if fault {
            self.requester.routes.failed(*rail);
        }
        Err(Tried { not_done, again: repeatable && (fault || busy) })
    }

    fn over_tcp(&self, slice: Slice, deadline: Deadline) -> Result<Transport, Failure> {
        self.requester.counters.rdma_fallbacks.add(1);
        self.tcp.transfer(slice, deadline, &|| true)
    }
}

impl<F: BulkFabric> DataPath for RdmaPath<F> {
    fn transfer(&self, slice: Slice, deadline: Deadline, post: &dyn Fn() -> bool) -> Result<Transport, Failure> {
        if !post() {
            return Err(Failure::harmless(TransferError::Cancelled));
        }
        if self.policy == TransportPolicy::Auto && self.is_without(slice.peer) {
            return self.over_tcp(slice, deadline);
        }
        self.over_rdma(slice, deadline)
    }
}

/// Which fault is a rail's, and which only keeps it busy.
fn weigh(not_done: &NotDone) -> (bool, bool) {
    match not_done {
        NotDone::Failed(failure) => (is_rails(&failure.error), false),
        NotDone::Unavailable(why) => {
            let busy = why.again_after == Some(Duration::ZERO);
            (!busy && is_rails(&why.error), busy)
        }
    }
}

/// Whether another pair of NICs may do better. A deadline that passed says nothing of a rail: it may have been short.
fn is_rails(error: &TransferError) -> bool {
    matches!(error, TransferError::Device { .. } | TransferError::Refused { status: Status::BackendError })
}
