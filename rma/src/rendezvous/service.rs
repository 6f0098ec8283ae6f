//! The owner's counter: requests come in, replies go out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, Weak},
};

use bytes::Bytes;
use tokio::sync::mpsc;
use verbs_transport::{Borrowed, InstanceId, Lane, MessageType, SendError, ServiceHandler, fabric::Fabric};

use super::{
    NOTHING,
    inner::{Inner, SourceSlice, lock, now},
};
use crate::{
    proto::{
        book::{Acquired, Ending, Granted},
        handle::{Handle, LeaseId, SlotId},
        slot::{Body, Fate},
        wire::{
            Answer, Call, Capability, Chunks, Descriptor, Grant, Key, PathReason, RefusalCode, Refused, Reply, Request,
        },
    },
    read_path::{ReadPath, SourceBytes},
};

/// Requests that may wait for the server task. Honest peers keep far below; a flood is dropped and counted.
const QUEUE: usize = 65_536;

/// No request is longer, whatever a later version appends to its capability.
const REQUEST_MAX_BYTES: usize = 300;

/// Room in a frame beside a chunk's bytes.
pub(super) const CHUNK_HEADER_BYTES: u32 = 64;

/// One request, on its way from the driver to the server task.
pub(super) struct Queued {
    peer: InstanceId,
    bytes: Vec<u8>,
}

/// What is attached to the worker.
pub(super) struct Service<F: Fabric> {
    inner: OnceLock<Weak<Inner<F>>>,
    requests: Mutex<Option<mpsc::Receiver<Queued>>>,
}

impl<F: Fabric> Service<F> {
    pub(super) fn new() -> (Self, mpsc::Sender<Queued>) {
        let (sender, requests) = mpsc::channel(QUEUE);
        (Self { inner: OnceLock::new(), requests: Mutex::new(Some(requests)) }, sender)
    }

    pub(super) fn serve(&self, inner: &Arc<Inner<F>>) {
        // Called once.
        let _ = self.inner.set(Arc::downgrade(inner));
    }
}

impl<F: Fabric> ServiceHandler for Service<F> {
    fn on_frame(&self, frame: Borrowed<'_>) {
        let Some(inner) = self.inner.get().and_then(Weak::upgrade) else { return };
        match frame.kind {
            MessageType::Message => {
                // The first request starts the server.
                if let Some(requests) = lock(&self.requests).take() {
                    inner.spawn(serve(Arc::downgrade(&inner), requests));
                }
                if frame.header.len() > REQUEST_MAX_BYTES || !frame.payload.is_empty() {
                    inner.counters.requests_malformed.add(1);
                    return;
                }
                let queued = Queued { peer: frame.peer, bytes: frame.header.to_vec() };
                if inner.requests.try_send(queued).is_err() {
                    inner.counters.requests_dropped.add(1);
                }
            }
            MessageType::Response => inner.on_reply(frame.peer, frame.header, frame.payload),
            MessageType::Ack | MessageType::Event | MessageType::ShuttingDown => {
                inner.counters.requests_malformed.add(1);
            }
        }
    }
}

async fn serve<F: Fabric>(inner: Weak<Inner<F>>, mut requests: mpsc::Receiver<Queued>) {
    let load = Load::default();
    while let Some(Queued { peer, bytes }) = requests.recv().await {
        let Some(inner) = inner.upgrade() else { return };
        inner.serve_one(peer, &bytes, &load);
    }
}

/// Chunks that are under way, by peer.
#[derive(Clone, Default)]
struct Load(Arc<Mutex<HashMap<InstanceId, usize>>>);

impl Load {
    /// One more, unless there are `max`.
    fn take(&self, peer: InstanceId, max: usize) -> Option<Loaded> {
        let mut loads = lock(&self.0);
        let load = loads.entry(peer).or_insert(0);
        if *load >= max {
            return None;
        }
        *load += 1;
        Some(Loaded { load: self.clone(), peer })
    }
}

/// One of them; over when the transport has let its bytes go.
struct Loaded {
    load: Load,
    peer: InstanceId,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let mut loads = lock(&self.load.0);
        if let Some(load) = loads.get_mut(&self.peer) {
            *load -= 1;
            if *load == 0 {
                loads.remove(&self.peer);
            }
        }
    }
}

/// A chunk's bytes with its place in the load.
struct Chunk<B> {
    bytes: B,
    _loaded: Loaded,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for Chunk<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

impl<F: Fabric> Inner<F> {
    fn serve_one(self: &Arc<Self>, peer: InstanceId, bytes: &[u8], load: &Load) {
        let Request { correlation, call } = match Request::decode(bytes) {
            Ok(request) => request,
            Err(error) => {
                self.counters.requests_malformed.add(1);
                tracing::warn!(%peer, %error, "a request that cannot be read");
                if let Some(correlation) = Request::correlation_of(bytes) {
                    self.refuse(peer, correlation, Refused { code: RefusalCode::BadRequest, detail: 0 });
                }
                return;
            }
        };
        self.counters.requests.add(1);
        let done = match call {
            Call::Metadata { handle } => self
                .mine(handle)
                .and_then(|slot| self.look(|book| book.metadata(slot, peer)).map_err(refused))
                .map(|metadata| self.reply(peer, correlation, Answer::Metadata(metadata), NOTHING)),
            Call::Acquire { handle, chunk_bytes, capability } => {
                self.mine(handle).and_then(|slot| self.serve_acquire(peer, correlation, slot, chunk_bytes, capability))
            }
            Call::Pull { transfer, index } => self.serve_pull(peer, correlation, transfer, index, load),
            Call::Ref { handle } => self
                .mine(handle)
                .and_then(|slot| self.with_book(|book| book.add_ref(slot, peer)).map_err(refused))
                .map(|refcount| self.reply(peer, correlation, Answer::Referenced { refcount }, NOTHING)),
            Call::Renew { handle, lease } => self
                .mine(handle)
                .and_then(|slot| self.with_book(|book| book.renew(now(), slot, lease, peer)).map_err(refused))
                .map(|()| {
                    self.counters.leases_renewed.add(1);
                    self.reply(peer, correlation, Answer::Renewed { lease_ms: self.lease_ms() }, NOTHING);
                }),
            Call::Detach { handle, lease } => self.serve_end(peer, handle, lease, Ending::Detach),
            Call::Release { handle, lease } => self.serve_end(peer, handle, lease, Ending::Release),
            Call::Refuse { handle } => self
                .mine(handle)
                .and_then(|slot| self.with_book(|book| book.drop_ref(slot, peer, Fate::Refused)).map_err(refused)),
        };
        if let Err(why) = done {
            self.counters.requests_refused.add(1);
            tracing::debug!(%peer, call = call.name(), code = %why.code, detail = why.detail, "refused");
            if call.is_answered() {
                self.refuse(peer, correlation, why);
            }
        }
    }

    /// The slot of a handle of this run.
    fn mine(&self, handle: Handle) -> Result<SlotId, Refused> {
        if handle.worker != self.me {
            return Err(Refused { code: RefusalCode::WrongWorker, detail: self.me });
        }
        SlotId::new(handle.slot).ok_or(refused(RefusalCode::UnknownHandle))
    }

    pub(super) fn lease_ms(&self) -> u32 {
        u32::try_from(self.config.lease.as_millis()).unwrap_or(u32::MAX)
    }

    fn serve_end(self: &Arc<Self>, peer: InstanceId, handle: Handle, lease: u64, how: Ending) -> Result<(), Refused> {
        let slot = self.mine(handle)?;
        let ended = self.with_book(|book| book.end(slot, lease, peer, how));
        match ended {
            Ok(()) => self.counters.leases_ended.add(1),
            Err(_) => self.counters.leases_mismatched.add(1),
        }
        ended.map_err(refused)
    }

    /// Whether this consumer may READ, or why not: the owner's part of the decision that the book does not know.
    fn may_read(&self, capability: Option<Capability>) -> Result<Arc<dyn ReadPath>, PathReason> {
        let reads = match &self.reads {
            Some(reads) => reads,
            None if self.config.reads => return Err(PathReason::NoCapability),
            None => return Err(PathReason::Disabled),
        };
        if !capability.is_some_and(Capability::has_verbs) {
            return Err(PathReason::NoCapability);
        }
        Ok(reads.clone())
    }

    fn serve_acquire(
        self: &Arc<Self>,
        peer: InstanceId,
        correlation: u64,
        slot: SlotId,
        chunk_bytes: u32,
        capability: Option<Capability>,
    ) -> Result<(), Refused> {
        let read = self.may_read(capability);
        // A chunk is a frame: neither side's ceiling may be below it.
        let frame = self.worker.max_message_size(peer).and_then(|bytes| u32::try_from(bytes).ok());
        let frame = frame.unwrap_or(self.worker.config().eager_max_bytes);
        let chunk_bytes = chunk_bytes.min(frame.saturating_sub(CHUNK_HEADER_BYTES));
        let (acquired, body) = self.with_book(|book| {
            let way = read.as_ref().map(drop).map_err(|reason| *reason);
            let acquired = book.acquire(now(), slot, peer, chunk_bytes, way)?;
            let body = match acquired {
                Acquired::MakeRight(_) => book.body(slot).map(Self::share),
                Acquired::Chunks(..) => None,
            };
            Ok((acquired, body))
        })?;
        match (acquired, read, body) {
            (Acquired::MakeRight(lease), Ok(reads), Some(Body::Pinned { slice, len })) => {
                let inner = self.clone();
                self.spawn(async move { inner.make_right(peer, correlation, lease, &*reads, &slice, len).await });
            }
            (Acquired::MakeRight(lease), ..) => self.on_right_failed(peer, correlation, lease),
            (Acquired::Chunks(lease, chunks), ..) => self.grant_chunks(peer, correlation, lease, chunks),
        }
        Ok(())
    }

    /// Sees to the bulk QP, makes the right of a lease, then tells the consumer.
    async fn make_right(
        self: &Arc<Self>,
        peer: InstanceId,
        correlation: u64,
        lease: LeaseId,
        reads: &dyn ReadPath,
        slice: &SourceSlice,
        len: u64,
    ) {
        let range = slice.range(usize::try_from(len).unwrap_or(usize::MAX));
        let bytes = SourceBytes { memory: slice.owner(), range, region: slice.extra().region };
        let right = match reads.grant(peer, bytes, self.config.request_deadline / 2).await {
            Ok(right) => right,
            Err(error) => {
                if self.counters.rights_failed.get() == 0 {
                    tracing::warn!(%error, bytes = len, "slices cannot be registered: payloads go by chunks (said once)");
                }
                self.counters.rights_failed.add(1);
                return self.on_right_failed(peer, correlation, lease);
            }
        };
        self.counters.rights_made.add(1);
        let key = Key::Verbs { addr: right.addr, rkey: right.rkey.0 };
        self.keep_right(lease, right);
        match self.with_book(|book| book.on_granted(lease)) {
            Granted::Tell => {
                self.counters.granted.count(Ok(()));
                let grant = Grant::Read(Descriptor { total_bytes: len, key });
                self.reply_acquired(peer, correlation, lease, grant);
            }
            Granted::Ended => self.refuse(peer, correlation, refused(RefusalCode::LeaseOver)),
        }
    }

    fn on_right_failed(self: &Arc<Self>, peer: InstanceId, correlation: u64, lease: LeaseId) {
        match self.with_book(|book| book.on_grant_failed(lease)) {
            Some(chunks) => self.grant_chunks(peer, correlation, lease, chunks),
            None => self.refuse(peer, correlation, refused(RefusalCode::LeaseOver)),
        }
    }

    fn grant_chunks(&self, peer: InstanceId, correlation: u64, lease: LeaseId, chunks: Chunks) {
        self.counters.granted.count(Err(chunks.reason));
        self.reply_acquired(peer, correlation, lease, Grant::Chunks(chunks));
    }

    fn reply_acquired(&self, peer: InstanceId, correlation: u64, lease: LeaseId, grant: Grant) {
        let answer = Answer::Acquired { lease: lease.get(), lease_ms: self.lease_ms(), grant };
        self.reply(peer, correlation, answer, NOTHING);
    }

    fn serve_pull(
        self: &Arc<Self>,
        peer: InstanceId,
        correlation: u64,
        transfer: u64,
        index: u64,
        load: &Load,
    ) -> Result<(), Refused> {
        let (body, range) =
            self.look(|book| book.pull(transfer, peer, index).map(|(body, range)| (Self::share(body), range)))?;
        let max = self.config.pulls_per_peer;
        let busy = Refused { code: RefusalCode::TooMany, detail: max as u64 };
        let loaded = load.take(peer, max).ok_or(busy)?;
        let gone = refused(RefusalCode::UnknownTransfer);
        let start = usize::try_from(range.start).map_err(|_| gone)?;
        let len = usize::try_from(range.end - range.start).map_err(|_| gone)?;
        let chunk = match body {
            Body::Memory { bytes, .. } => {
                Bytes::from_owner(Chunk { bytes: bytes.slice(start..start + len), _loaded: loaded })
            }
            Body::Pinned { slice, .. } => {
                let mut bytes = vec![0; len];
                slice.read(start, &mut bytes).map_err(|_| gone)?;
                Bytes::from_owner(Chunk { bytes, _loaded: loaded })
            }
        };
        self.counters.chunks_served.add(1);
        self.counters.chunk_bytes_served.add(len as u64);
        self.reply(peer, correlation, Answer::Chunk { index }, chunk);
        Ok(())
    }

    fn refuse(&self, peer: InstanceId, correlation: u64, why: Refused) {
        self.reply(peer, correlation, Answer::Refused(why), NOTHING);
    }

    fn reply(&self, peer: InstanceId, correlation: u64, answer: Answer, payload: Bytes) {
        let header = Reply { correlation, answer }.encode().into();
        // Who asked hears of the connection's end by itself.
        let lost = Arc::new(move |_: Bytes, _: Bytes, error: SendError| tracing::debug!(%peer, %error, "reply lost"));
        let _ = self.worker.send_on(Lane::Service, peer, header, payload, MessageType::Response, lost);
    }
}

const fn refused(code: RefusalCode) -> Refused {
    Refused { code, detail: 0 }
}
