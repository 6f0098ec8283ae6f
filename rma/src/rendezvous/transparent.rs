//! Messages of any size: a payload above the eager ceiling stays here, a frame with its handle goes, the receiver pulls.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use bytes::Bytes;
use verbs_transport::{
    EpochEnd, FEATURE_RMA, InstanceId, Lane, MessageType, SendError, SendErrorHandler, SendOutcome, fabric::Fabric,
};

use super::{
    Rendezvous, StageOptions,
    inner::{Inner, SourceSlice},
};
use crate::proto::{
    handle::SlotId,
    slot::{Body, Fate},
    wire::{Indirect, PathReason},
};

/// A message whose payload waits in a slot: what its sender gets back if it is not delivered.
pub(super) struct Tail {
    peer: InstanceId,
    header: Bytes,
    on_error: Arc<dyn SendErrorHandler>,
}

impl<F: Fabric> Rendezvous<F> {
    /// Sends a message, as [`Worker::send`](verbs_transport::Worker::send); a payload above `eager_max_bytes` is staged,
    /// and the receiver's [`Stream`](super::Stream) pulls it before it hands the message on. Order is kept.
    ///
    /// A staged message is delivered when its receiver has pulled all of it. If that does not come to pass (the peer is
    /// gone, or gives up, or has not pulled it within `staged_ttl`), `on_error` gets it back, once. To a peer without a
    /// rendezvous everything goes in frames, up to their largest size.
    pub fn send(
        &self,
        peer: InstanceId,
        header: Bytes,
        payload: Bytes,
        kind: MessageType,
        on_error: Arc<dyn SendErrorHandler>,
    ) -> SendOutcome {
        if payload.len() <= self.inner.config.eager_max_bytes {
            return self.inner.worker.send(peer, header, payload, kind, on_error);
        }
        self.inner.send_staged(peer, header, payload, kind, on_error)
    }
}

impl<F: Fabric> Inner<F> {
    fn send_staged(
        self: &Arc<Self>,
        peer: InstanceId,
        header: Bytes,
        payload: Bytes,
        kind: MessageType,
        on_error: Arc<dyn SendErrorHandler>,
    ) -> SendOutcome {
        let run = self.worker.peer_facts(peer).and_then(|facts| facts.run);
        if run.is_some_and(|run| run.features & FEATURE_RMA == 0) {
            return self.worker.send(peer, header, payload, kind, on_error);
        }
        let total_bytes = payload.len() as u64;
        let options =
            StageOptions { ttl: Some(self.config.staged_ttl), only_for: Some(peer), ..StageOptions::default() };
        let staged = if self.check_size(total_bytes).is_ok() {
            self.stage_for_send(&payload, options)
        } else {
            let max = usize::try_from(self.config.payload_max_bytes).unwrap_or(usize::MAX);
            Err(SendError::TooLarge { bytes: payload.len(), max })
        };
        let slot = match staged {
            Ok(slot) => slot,
            Err(error) => {
                report(&*on_error, header, payload, error);
                return SendOutcome::Admitted;
            }
        };
        self.tails().insert(slot, Tail { peer, header: header.clone(), on_error });
        self.counters.messages_staged.add(1);
        if self.look(|book| book.body(slot).is_none()) {
            // The peer, or this worker, was gone before the message was known to be one.
            if let Some(tail) = self.tails().remove(&slot) {
                let cause = Arc::new(EpochEnd::PeerRestarted);
                self.fail(&*tail.on_error, tail.header, payload, SendError::ConnectionLost { peer, cause });
            }
            return SendOutcome::Admitted;
        }
        let indirect = Indirect { handle: self.handle(slot), total_bytes }.encode().into();
        let inner = Arc::downgrade(self);
        let lost = Arc::new(move |_: Bytes, _: Bytes, error: SendError| {
            if let Some(inner) = inner.upgrade() {
                inner.take_back(slot, Some(error));
            }
        });
        let sent = self.worker.send_on(Lane::Indirect, peer, header, indirect, kind, lost);
        if let SendOutcome::Pending(admission) = &sent {
            let inner = Arc::downgrade(self);
            // A frame that never left the gate: its admission's error is its one end.
            admission.on_resolved(move |admitted| {
                if let (Err(_), Some(inner)) = (admitted, inner.upgrade()) {
                    inner.take_back(slot, None);
                }
            });
        }
        sent
    }

    /// In an arena if there is room now: `send` does not wait for a new one.
    fn stage_for_send(self: &Arc<Self>, payload: &Bytes, options: StageOptions) -> Result<SlotId, SendError> {
        let len = payload.len() as u64;
        let slice = self.may_pin().and_then(|()| {
            let slice = self.sources.allocate_now(len).ok_or_else(|| {
                self.counters.pool_full.add(1);
                self.grow_for(len);
                PathReason::PoolFull
            })?;
            slice.write(payload).map(|()| slice).map_err(|_| PathReason::PoolFull)
        });
        let staged = match slice {
            Ok(slice) => self.stage_slice(Arc::new(slice), len, options),
            Err(reason) => self.stage_memory(payload.clone(), reason, options),
        };
        let handle = staged.map_err(|_| SendError::ShuttingDown)?;
        SlotId::new(handle.slot).ok_or(SendError::ShuttingDown)
    }

    /// Makes an arena for the next one, in the background.
    fn grow_for(self: &Arc<Self>, bytes: u64) {
        if self.begin_growing() {
            let inner = self.clone();
            self.spawn_blocking(move || {
                drop(inner.slice_for(bytes));
                inner.end_growing();
            });
        }
    }

    /// The frame with the handle did not go: nobody will pull.
    fn take_back(self: &Arc<Self>, slot: SlotId, error: Option<SendError>) {
        let Some(tail) = self.tails().remove(&slot) else { return };
        let body = self.look(|book| book.body(slot).map(Self::share));
        self.with_book(|book| book.withdraw(slot, Fate::Withdrawn));
        if let Some(error) = error {
            let payload = body.as_ref().map(bytes_of).unwrap_or_default();
            self.fail(&*tail.on_error, tail.header, payload, error);
        }
    }

    /// A slot was freed; if it was a message's, that is its end.
    pub(super) fn finish_message(&self, slot: SlotId, body: &Body<SourceSlice>, fate: Fate) {
        let Some(Tail { peer, header, on_error }) = self.tails().remove(&slot) else { return };
        let bytes = body.len();
        let error = match fate {
            Fate::Released => return,
            Fate::PeerGone => SendError::ConnectionLost { peer, cause: Arc::new(EpochEnd::PeerRestarted) },
            Fate::ShutDown => SendError::ShuttingDown,
            Fate::Refused => SendError::NotPulled { peer, bytes, why: "gave up on it" },
            Fate::Expired | Fate::Withdrawn => {
                SendError::NotPulled { peer, bytes, why: "did not pull it within `staged_ttl`" }
            }
        };
        self.fail(&*on_error, header, bytes_of(body), error);
    }

    /// Gives a staged message back, and counts it last: whoever sees it counted finds it reported.
    fn fail(&self, on_error: &dyn SendErrorHandler, header: Bytes, payload: Bytes, error: SendError) {
        report(on_error, header, payload, error);
        self.counters.messages_failed.add(1);
    }
}

/// Calls the application's handler. A panic in it is logged and goes no further: what calls here serves other peers, too.
fn report(on_error: &dyn SendErrorHandler, header: Bytes, payload: Bytes, error: SendError) {
    let called = catch_unwind(AssertUnwindSafe(|| on_error.on_error(header, payload, error)));
    if called.is_err() {
        tracing::error!("an error handler of the application panicked; the rendezvous goes on");
    }
}

/// A payload's bytes, for whoever gets them back.
fn bytes_of(body: &Body<SourceSlice>) -> Bytes {
    match body {
        Body::Memory { bytes, .. } => bytes.clone(),
        Body::Pinned { slice, len } => {
            let mut bytes = vec![0; usize::try_from(*len).unwrap_or_default()];
            match slice.read(0, &mut bytes) {
                Ok(()) => bytes.into(),
                Err(_) => Bytes::new(),
            }
        }
    }
}
