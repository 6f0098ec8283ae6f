//! Questions to owners, and their answers.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use tokio::{sync::oneshot, time::timeout};
use verbs_transport::{FEATURE_RMA, InstanceId, Lane, MessageType, SendError, SendOutcome, fabric::Fabric};

use super::{
    NOTHING,
    inner::{Inner, lock},
};
use crate::{
    error::AskError,
    proto::{
        handle::Handle,
        wire::{Answer, Call, Reply, Request},
    },
};

/// An answer, and the frame's payload.
pub(super) type Answered = Result<(Answer, Bytes), AskError>;

/// Questions that wait for their answer, by correlation.
#[derive(Default)]
pub(super) struct Asks {
    last: AtomicU64,
    waiting: Mutex<HashMap<u64, Waiting>>,
}

struct Waiting {
    peer: InstanceId,
    /// Of an acquire.
    handle: Option<Handle>,
    /// Gone with whoever asked. An acquire is kept all the same, for its answer brings a lease that is to be given back.
    answer: Option<oneshot::Sender<Answered>>,
}

/// A question that was sent. Dropping it forgets it.
pub(super) struct Asked {
    asks: Arc<Asks>,
    correlation: u64,
    answer: oneshot::Receiver<Answered>,
}

impl Drop for Asked {
    fn drop(&mut self) {
        let mut waiting = lock(&self.asks.waiting);
        match waiting.get_mut(&self.correlation) {
            Some(Waiting { handle: Some(_), answer, .. }) => *answer = None,
            _ => drop(waiting.remove(&self.correlation)),
        }
    }
}

/// What became of an answer.
enum Settled {
    /// Somebody has it.
    Taken,
    /// Nobody waits for it.
    Late,
    /// Nor for this one, but it brought a lease.
    Orphan(Call),
}

impl Asks {
    fn open(self: &Arc<Self>, peer: InstanceId, call: Call) -> Asked {
        let correlation = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, answer) = oneshot::channel();
        let handle = if let Call::Acquire { handle, .. } = call { Some(handle) } else { None };
        lock(&self.waiting).insert(correlation, Waiting { peer, handle, answer: Some(sender) });
        Asked { asks: self.clone(), correlation, answer }
    }

    /// Answers a question of this peer.
    fn settle(&self, peer: InstanceId, correlation: u64, answer: Answered) -> Settled {
        let found = {
            let mut waiting = lock(&self.waiting);
            if waiting.get(&correlation).is_none_or(|waiting| waiting.peer != peer) {
                return Settled::Late;
            }
            waiting.remove(&correlation)
        };
        let Some(Waiting { handle, answer: sender, .. }) = found else { return Settled::Late };
        let unsent = match sender {
            Some(sender) => match sender.send(answer) {
                Ok(()) => return Settled::Taken,
                // Who asked has gone at this very moment.
                Err(answer) => answer,
            },
            None => answer,
        };
        match (handle, unsent) {
            (Some(handle), Ok((Answer::Acquired { lease, .. }, _))) => Settled::Orphan(Call::Detach { handle, lease }),
            _ => Settled::Late,
        }
    }

    /// The connection to a peer has ended: what was not answered will not be.
    pub(super) fn fail_of(&self, peer: InstanceId, cause: &str) {
        let gone: Vec<Waiting> = {
            let mut waiting = lock(&self.waiting);
            let theirs = |(id, waiting): (&u64, &Waiting)| (waiting.peer == peer).then_some(*id);
            let ids: Vec<u64> = waiting.iter().filter_map(theirs).collect();
            ids.iter().filter_map(|id| waiting.remove(id)).collect()
        };
        for sender in gone.into_iter().filter_map(|waiting| waiting.answer) {
            let _ = sender.send(Err(AskError::Lost { peer, cause: cause.into() }));
        }
    }

    pub(super) fn fail_all(&self) {
        let all = std::mem::take(&mut *lock(&self.waiting));
        for sender in all.into_values().filter_map(|waiting| waiting.answer) {
            let _ = sender.send(Err(AskError::NotRunning));
        }
    }

    pub(super) fn waiting(&self) -> usize {
        lock(&self.waiting).values().filter(|waiting| waiting.answer.is_some()).count()
    }
}

impl<F: Fabric> Inner<F> {
    /// The owner of a handle, connected, and known to serve a rendezvous.
    pub(super) async fn reach(&self, handle: Handle) -> Result<InstanceId, AskError> {
        let peer = self.owner_of(handle).ok_or(AskError::UnknownOwner { handle })?;
        if peer != self.worker.instance() {
            self.reach_peer(peer).await?;
        }
        Ok(peer)
    }

    pub(super) async fn reach_peer(&self, peer: InstanceId) -> Result<(), AskError> {
        let connect = |cause| AskError::Connect { peer, cause: Arc::new(cause) };
        self.worker.ensure_connected(peer).await.map_err(connect)?;
        // It may have ended again: then the question itself finds out.
        let run = self.worker.peer_facts(peer).and_then(|facts| facts.run);
        if run.is_some_and(|run| run.features & FEATURE_RMA == 0) {
            return Err(AskError::NoService { peer });
        }
        Ok(())
    }

    /// Sends a question.
    pub(super) fn ask(&self, peer: InstanceId, call: Call) -> Asked {
        let asked = self.asks.open(peer, call);
        self.counters.asked.add(1);
        let correlation = asked.correlation;
        let asks = self.asks.clone();
        let lost = Arc::new(move |_: Bytes, _: Bytes, error: SendError| {
            asks.settle(peer, correlation, Err(AskError::lost(peer, &error)));
        });
        let header = Request { correlation, call }.encode().into();
        let sent = self.worker.send_on(Lane::Service, peer, header, NOTHING, MessageType::Message, lost);
        if let SendOutcome::Pending(admission) = sent {
            let asks = self.asks.clone();
            admission.on_resolved(move |admitted| {
                if let Err(error) = admitted {
                    asks.settle(peer, correlation, Err(AskError::Lost { peer, cause: error.to_string().into() }));
                }
            });
        }
        asked
    }

    /// Waits for the answer. A refusal is an error.
    pub(super) async fn answer(&self, peer: InstanceId, mut asked: Asked) -> Answered {
        let after = self.config.request_deadline;
        match timeout(after, &mut asked.answer).await {
            Ok(Ok(Ok((Answer::Refused(refused), _)))) => {
                Err(AskError::Refused { peer, code: refused.code, detail: refused.detail })
            }
            Ok(Ok(answered)) => answered,
            Ok(Err(_)) => Err(AskError::NotRunning),
            Err(_) => {
                self.counters.asks_expired.add(1);
                Err(AskError::NoAnswer { peer, after })
            }
        }
    }

    pub(super) async fn ask_and_wait(&self, peer: InstanceId, call: Call) -> Answered {
        let asked = self.ask(peer, call);
        self.answer(peer, asked).await
    }

    /// Tells an owner something that it does not answer.
    pub(super) fn tell(&self, peer: InstanceId, call: Call) {
        let header = Request { correlation: 0, call }.encode().into();
        // A lost one is healed by the owner's reaper.
        let lost = Arc::new(move |_: Bytes, _: Bytes, error: SendError| {
            tracing::debug!(%peer, call = call.name(), %error, "not told");
        });
        let _ = self.worker.send_on(Lane::Service, peer, header, NOTHING, MessageType::Message, lost);
    }

    /// A reply has come, on the driver.
    pub(super) fn on_reply(&self, peer: InstanceId, header: &[u8], payload: &[u8]) {
        match Reply::decode(header) {
            Ok(Reply { correlation, answer }) => {
                let payload = Bytes::copy_from_slice(payload);
                match self.asks.settle(peer, correlation, Ok((answer, payload))) {
                    Settled::Taken => {}
                    Settled::Late => self.counters.answers_late.add(1),
                    Settled::Orphan(detach) => self.tell(peer, detach),
                }
            }
            Err(error) => {
                self.counters.answers_bad.add(1);
                tracing::warn!(%peer, %error, "a reply that cannot be read");
                if let Some(correlation) = Request::correlation_of(header) {
                    self.asks.settle(peer, correlation, Err(AskError::unreadable(peer, &error)));
                }
            }
        }
    }
}
