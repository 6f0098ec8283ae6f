//! The accepting half: judges hellos, brings the QP up, answers. Hellos of the bulk plane go to the layer that is
//! attached for it.

use std::{
    future::Future,
    sync::{Arc, Weak},
};

use tracing::Instrument;
use verbs_bootstrap::{AcceptError, Acceptor, Generation, HelloVerdict, LifeSocket, Offer, Plane, Refusal, Status};

use super::{
    connect::{Addressee, StreamOf, attach_life, bring_up, check_offer, of_generation, peer_ready, wait_up},
    error::{EpochEnd, cannot_meet},
    layer::BulkAcceptor,
    peer::{Effects, Peer, PeerState},
    shared::Shared,
};
use crate::fabric::Fabric;

/// The accepting half.
pub(crate) struct Accept<F: Fabric>(pub(crate) Weak<Shared<F>>);

/// A hello that is not refused: whose it is, and what to do.
type Decided<F> = (Arc<Shared<F>>, Arc<Peer<F>>, Answer);

impl<F: Fabric> Accept<F> {
    /// What is the same for both planes: the worker runs, is meant, and the two ports can meet.
    fn admit(&self, hello: &Offer) -> Result<Arc<Shared<F>>, Refusal> {
        let shared = self.0.upgrade().filter(|shared| !shared.is_stopping());
        let Some(shared) = shared else { return Err(Refusal::new(Status::ShuttingDown, "this worker is stopping")) };
        if hello.to != shared.me.instance {
            let detail = format!("this is {}, not {}", shared.me.instance, hello.to);
            return Err(Refusal::new(Status::WrongInstance, detail));
        }
        if let Some(detail) = cannot_meet(&shared.fabric.port(), &hello.port) {
            return Err(Refusal { status: Status::NoRoute, detail });
        }
        Ok(shared)
    }

    /// Who answers for the bulk plane.
    fn bulk(&self, hello: &Offer) -> Result<Arc<dyn BulkAcceptor<StreamOf<F>>>, Refusal> {
        let shared = self.admit(hello)?;
        let none = "this worker serves no bulk memory: no layer for it is attached";
        shared.layers.bulk().cloned().ok_or_else(|| Refusal::new(Status::NoRoute, none))
    }

    fn decide(&self, hello: &Offer) -> Result<Decided<F>, Refusal> {
        let shared = self.admit(hello)?;
        check_offer(hello)?;
        let mut effects = Effects::default();
        let decided = shared.with_peer(hello.from, |peer, state| {
            decide_hello(&shared, peer, state, hello, &mut effects).map(|answer| (peer.clone(), answer))
        });
        effects.run(&shared);
        match decided {
            Ok((peer, answer)) => Ok((shared, peer, answer)),
            Err(refusal) => {
                shared.forget_stranger(hello.from);
                Err(refusal)
            }
        }
    }
}

/// Who answers a hello that is not refused.
enum Decision<F: Fabric> {
    Ours(Decided<F>),
    Layers(Arc<dyn BulkAcceptor<StreamOf<F>>>),
}

/// What the accepting half has to do under no lock.
enum Answer {
    BringUp(Generation),
    Repeat(Generation),
}

fn decide_hello<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    state: &mut PeerState<F>,
    hello: &Offer,
    effects: &mut Effects,
) -> Result<Answer, Refusal> {
    let former = state.exchange.remote().map(|(incarnation, _)| incarnation).or(state.exchange.target());
    let generation = match state.exchange.on_hello(hello) {
        HelloVerdict::Refuse(refusal) => return Err(refusal),
        HelloVerdict::Repeat { generation } => return Ok(Answer::Repeat(generation)),
        HelloVerdict::Join { generation, .. } => generation,
        HelloVerdict::Replace { generation, .. } => {
            let restarted = former.is_some_and(|former| former != hello.from_incarnation);
            let cause = if restarted { EpochEnd::PeerRestarted } else { EpochEnd::Replaced };
            peer.end_unbound(state, shared, &Arc::new(cause), effects);
            generation
        }
    };
    if let Err(cause) = shared.ensure_qp(peer, state, generation) {
        let refusal = refuse(&cause);
        peer.end_epoch(state, shared, generation, &Arc::new(cause), effects);
        return Err(refusal);
    }
    Ok(Answer::BringUp(generation))
}

/// What the dialer is told of a failure on this side.
fn refuse(cause: &EpochEnd) -> Refusal {
    let status = match cause {
        EpochEnd::Exhausted(_) | EpochEnd::CqFull { .. } | EpochEnd::CreateQp(_) => Status::Exhausted,
        EpochEnd::ConnectQp(_) => Status::NoRoute,
        EpochEnd::ShuttingDown => Status::ShuttingDown,
        _ => Status::Internal,
    };
    Refusal::new(status, cause.to_string())
}

impl<F: Fabric> Acceptor for Accept<F> {
    type Stream = StreamOf<F>;

    fn must_prove_alive(&self, hello: &Offer) -> bool {
        let Some(shared) = self.0.upgrade() else { return false };
        if hello.plane == Plane::Bulk {
            return shared.layers.bulk().is_some_and(|bulk| bulk.must_prove_alive(hello));
        }
        shared.find_peer(hello.from).is_some_and(|peer| peer.lock().exchange.would_replace(hello))
    }

    fn on_hello(&self, hello: Offer) -> impl Future<Output = Result<Offer, Refusal>> + Send {
        let decided = match hello.plane {
            Plane::Messaging => self.decide(&hello).map(Decision::Ours),
            Plane::Bulk => self.bulk(&hello).map(Decision::Layers),
        };
        if decided.is_err() {
            if let Some(shared) = self.0.upgrade() {
                shared.counters.hellos_refused.add(1);
            }
        }
        let (peer, plane, generation) = (hello.from, hello.plane, hello.generation.0);
        let span = tracing::info_span!("connect", role = "accept", %plane, %peer, peer_generation = generation);
        let answered = async move {
            let decided = decided.inspect_err(|refusal| tracing::debug!(%refusal, "the hello is refused"))?;
            let (shared, peer, answer) = match decided {
                Decision::Ours(decided) => decided,
                Decision::Layers(bulk) => return bulk.on_hello(hello).await,
            };
            let generation = match answer {
                Answer::BringUp(generation) => {
                    if let Err(cause) = bring_up(&shared, &peer, generation, &hello, false).await {
                        let refusal = refuse(&cause);
                        shared.end_epoch_of(&peer, generation, cause);
                        return Err(refusal);
                    }
                    generation
                }
                Answer::Repeat(generation) => {
                    if !wait_up(&peer, generation).await {
                        return Err(Refusal::new(Status::Internal, "the epoch ended while its QP was brought up"));
                    }
                    generation
                }
            };
            let state = peer.lock();
            let Some(epoch) = of_generation(&state, generation) else {
                return Err(Refusal::new(Status::Internal, "the epoch ended before the reply"));
            };
            let to =
                Addressee { instance: hello.from, incarnation: hello.from_incarnation, generation: hello.generation };
            Ok(shared.offer(epoch, &to, shared.fabric.known_port()))
        };
        answered.instrument(span)
    }

    fn on_ready(&self, hello: Offer, reply: Offer, life: LifeSocket<Self::Stream>) {
        let Some(shared) = self.0.upgrade() else { return };
        if hello.plane == Plane::Bulk {
            if let Some(bulk) = shared.layers.bulk() {
                bulk.on_ready(hello, reply, life);
            }
            return;
        }
        let Some(peer) = shared.find_peer(hello.from) else { return };
        attach_life(&shared, &peer, reply.generation, life);
        peer_ready(&shared, &peer, reply.generation);
    }

    fn on_abandoned(&self, hello: Offer, reply: Offer, why: AcceptError) {
        let Some(shared) = self.0.upgrade() else { return };
        if hello.plane == Plane::Bulk {
            if let Some(bulk) = shared.layers.bulk() {
                bulk.on_abandoned(hello, reply, why);
            }
            return;
        }
        let Some(peer) = shared.find_peer(hello.from) else { return };
        let alone = {
            let state = peer.lock();
            of_generation(&state, reply.generation).is_some_and(|epoch| epoch.lives_open == 0) && !state.dialer
        };
        tracing::debug!(peer = %peer.id, %why, alone, "an exchange was abandoned before READY");
        if alone {
            shared.end_epoch_of(&peer, reply.generation, EpochEnd::PeerClosed);
        }
    }
}
