//! One pull: acquire, then READs or chunks, with the lease renewed on the way.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    time::sleep_until,
};
use verbs_transport::{
    InstanceId,
    fabric::{Fabric, bulk::Rkey},
};

use super::{
    asks::Asked,
    inner::{Inner, now},
    lease::Lease,
    service::CHUNK_HEADER_BYTES,
    sink::Sink,
};
use crate::{
    error::{AskError, PullError},
    proto::{
        book::Acquired,
        handle::{Handle, SlotId},
        slot::Body,
        wire::{Answer, BACKEND_VERBS, Call, Capability, Chunks, Descriptor, Grant, Key, PathReason},
    },
    read_path::{ReadError, ReadPath, RemoteBytes},
};

/// Told after each piece: bytes so far, bytes in all.
pub(super) type Progress<'a> = Option<&'a mut (dyn FnMut(u64, u64) + Send)>;

/// Which way the bytes came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    ByRead,
    ByChunks(PathReason),
    Locally,
}

/// READs for a writer, or for somebody who wants to see progress, bring so many bytes at a time.
const PIECE_BYTES: u64 = 8 << 20;

struct Granted {
    lease: Lease,
    grant: Grant,
}

/// Pulls a payload into a sink. On success the lease is still held.
pub(super) async fn pull<F: Fabric>(
    inner: &Arc<Inner<F>>,
    handle: Handle,
    sink: &mut Sink<'_>,
    mut progress: Progress<'_>,
) -> Result<(Lease, Came), PullError> {
    let pulled = match inner.reach(handle).await {
        Ok(owner) if owner == inner.worker.instance() => pull_locally(inner, handle, sink, &mut progress).await,
        Ok(owner) => pull_remotely(inner, owner, handle, sink, &mut progress).await,
        Err(error) => Err(error.into()),
    };
    count(inner, sink, &pulled);
    pulled
}

/// The same, from a peer that has named the handle itself: it is asked, whosever the handle may be.
pub(super) async fn pull_from<F: Fabric>(
    inner: &Arc<Inner<F>>,
    owner: InstanceId,
    handle: Handle,
    sink: &mut Sink<'_>,
) -> Result<Lease, PullError> {
    let pulled = match inner.reach_peer(owner).await {
        Ok(()) => pull_remotely(inner, owner, handle, sink, &mut None).await,
        Err(error) => Err(error.into()),
    };
    count(inner, sink, &pulled);
    Ok(pulled?.0)
}

fn count<F: Fabric>(inner: &Inner<F>, sink: &Sink<'_>, pulled: &Result<(Lease, Came), PullError>) {
    match pulled {
        Ok((_, came)) => {
            inner.counters.pulled_bytes.add(sink.filled());
            match came {
                Came::ByRead => {
                    inner.counters.pulled.count(Ok(()));
                    // An arena that it landed in may be empty now.
                    inner.reaper_wake.notify_one();
                }
                Came::ByChunks(reason) => inner.counters.pulled.count(Err(*reason)),
                Came::Locally => inner.counters.pulled_locally.add(1),
            }
        }
        Err(error) => {
            inner.counters.pulls_failed.add(1);
            if matches!(error, PullError::LeaseOver { .. }) {
                inner.counters.leases_lost.add(1);
            }
        }
    }
}

async fn pull_remotely<F: Fabric>(
    inner: &Arc<Inner<F>>,
    owner: InstanceId,
    handle: Handle,
    sink: &mut Sink<'_>,
    progress: &mut Progress<'_>,
) -> Result<(Lease, Came), PullError> {
    let Granted { mut lease, grant } = inner.acquire(owner, handle, true).await?;
    let (descriptor, reads) = match (grant, &inner.reads) {
        (Grant::Chunks(chunks), _) => {
            sink.prepare(chunks.total_bytes, inner.config.payload_max_bytes)?;
            pull_chunks(inner, &mut lease, chunks, sink, progress).await?;
            return Ok((lease, Came::ByChunks(chunks.reason)));
        }
        (Grant::Read(_), None) => return Err(AskError::bad(owner, "a descriptor that was not asked for").into()),
        (Grant::Read(descriptor), Some(reads)) => (descriptor, reads.clone()),
    };
    sink.prepare(descriptor.total_bytes, inner.config.payload_max_bytes)?;
    let reason = match read(inner, &mut lease, &descriptor, &reads, sink, progress).await {
        Ok(()) => return Ok((lease, Came::ByRead)),
        Err(Stopped::Pull(error)) => return Err(error),
        Err(Stopped::Read(reason)) => reason,
    };
    // Once more, by chunks and through a new lease, from where the READs got to.
    drop(lease);
    let Granted { mut lease, grant } = inner.acquire(owner, handle, false).await?;
    let Grant::Chunks(chunks) = grant else {
        return Err(AskError::bad(owner, "a descriptor that was not asked for").into());
    };
    if chunks.total_bytes != descriptor.total_bytes {
        return Err(AskError::bad(owner, "another length for the same handle").into());
    }
    pull_chunks(inner, &mut lease, chunks, sink, progress).await?;
    Ok((lease, Came::ByChunks(reason)))
}

impl<F: Fabric> Inner<F> {
    async fn acquire(self: &Arc<Self>, owner: InstanceId, handle: Handle, reads: bool) -> Result<Granted, AskError> {
        let room = self.config.payload_max_bytes;
        let capability =
            (reads && self.reads.is_some()).then_some(Capability { backends: 1 << BACKEND_VERBS, room_bytes: room });
        let largest = self.worker.config().eager_max_bytes.saturating_sub(CHUNK_HEADER_BYTES);
        let chunk_bytes = self.config.chunk_bytes.min(largest);
        // Counted from before the question is sent: see `Tenure`.
        let asked = now();
        let (answer, _) = self.ask_and_wait(owner, Call::Acquire { handle, chunk_bytes, capability }).await?;
        let Answer::Acquired { lease, lease_ms, grant } = answer else {
            return Err(AskError::bad(owner, format_args!("{answer:?} to acquire")));
        };
        let lasts = Duration::from_millis(lease_ms.into());
        let lease = Lease::new(self, owner, handle, lease, asked, lasts);
        match &grant {
            Grant::Chunks(chunks) if chunks.chunk_bytes > chunk_bytes => {
                let theirs = chunks.chunk_bytes;
                Err(AskError::bad(owner, format_args!("chunks of {theirs} bytes where {chunk_bytes} were asked for")))
            }
            _ => Ok(Granted { lease, grant }),
        }
    }
}

/// This worker's own payload: the same leases and references, no wire.
async fn pull_locally<F: Fabric>(
    inner: &Arc<Inner<F>>,
    handle: Handle,
    sink: &mut Sink<'_>,
    progress: &mut Progress<'_>,
) -> Result<(Lease, Came), PullError> {
    let me = inner.worker.instance();
    let refused = |code, detail| AskError::Refused { peer: me, code, detail };
    let unknown = refused(crate::proto::wire::RefusalCode::UnknownHandle, 0);
    let slot = SlotId::new(handle.slot).ok_or(unknown.clone())?;
    let asked = now();
    let (id, body) = inner.with_book(|book| {
        let acquired = book.acquire(asked, slot, me, u32::MAX, Err(PathReason::NotPinned));
        let acquired = acquired.map_err(|why| refused(why.code, why.detail))?;
        let Acquired::Chunks(id, _) = acquired else { return Err(unknown.clone()) };
        Ok((id, book.body(slot).map(Inner::<F>::share).ok_or(unknown)?))
    })?;
    let lease = Lease::new(inner, me, handle, id.get(), asked, inner.config.lease);
    sink.prepare(body.len(), u64::MAX)?;
    match &body {
        Body::Memory { bytes, .. } => sink.put(bytes).await?,
        Body::Pinned { slice, len } => {
            let mut piece = vec![0; usize::try_from(*len).unwrap_or(usize::MAX)];
            let gone = |_| AskError::bad(me, "a slice shorter than its payload");
            slice.read(0, &mut piece).map_err(gone)?;
            sink.put_vec(piece).await?;
        }
    }
    sink.finish().await?;
    report(progress, sink, body.len());
    Ok((lease, Came::Locally))
}

fn report(progress: &mut Progress<'_>, sink: &Sink<'_>, total: u64) {
    if let Some(progress) = progress {
        progress(sink.filled(), total);
    }
}

/// Why READs brought no more.
enum Stopped {
    /// Chunks may.
    Read(PathReason),
    /// Nothing will.
    Pull(PullError),
}

async fn read<F: Fabric>(
    inner: &Arc<Inner<F>>,
    lease: &mut Lease,
    descriptor: &Descriptor,
    reads: &Arc<dyn ReadPath>,
    sink: &mut Sink<'_>,
    progress: &mut Progress<'_>,
) -> Result<(), Stopped> {
    let total = descriptor.total_bytes;
    let Key::Verbs { addr, rkey } = descriptor.key else { return Err(Stopped::Read(PathReason::NoCapability)) };
    let (tell, tenure) = watch::channel(lease.tenure);
    // All at once needs no copy, but tells nothing on the way.
    let whole = sink.takes_whole() && (progress.is_none() || total <= PIECE_BYTES);
    if !whole {
        sink.reserve(total).map_err(Stopped::Pull)?;
    }
    while sink.filled() < total {
        let left = total - sink.filled();
        let len = if whole { left } else { left.min(PIECE_BYTES) };
        let too_large = PullError::NoMemory { bytes: len };
        let len = usize::try_from(len).map_err(|_| Stopped::Pull(too_large))?;
        let from = RemoteBytes { addr: addr + sink.filled(), rkey: Rkey(rkey), len };
        let mut reading = reads.read(lease.owner, from, tenure.clone(), lease.hold());
        let piece = loop {
            tokio::select! {
                piece = &mut reading => break piece,
                () = sleep_until(lease.tenure.renew_at().into()) => {
                    // A READ of the same lease goes on meanwhile; should the owner not answer, it ends by the tenure.
                    tokio::select! {
                        piece = &mut reading => break piece,
                        renewed = inner.renew_until_over(lease) => {
                            if renewed {
                                tell.send_replace(lease.tenure);
                            } else {
                                break reading.await;
                            }
                        }
                    }
                }
            }
        };
        let pulled = sink.filled();
        match piece {
            Ok(piece) if piece.len() == len && whole => sink.put_vec(piece).await.map_err(Stopped::Pull)?,
            Ok(piece) if piece.len() == len => sink.put(&piece).await.map_err(Stopped::Pull)?,
            Ok(_) => return Err(Stopped::Read(PathReason::GetFailed)),
            Err(ReadError::LeaseOver) => {
                let handle = lease.handle;
                return Err(Stopped::Pull(PullError::LeaseOver { handle, pulled, total_bytes: total }));
            }
            Err(error @ (ReadError::NoQp(_) | ReadError::Failed(_))) => {
                inner.counters.reads_failed.add(1);
                tracing::warn!(owner = %lease.owner, handle = %lease.handle, %error, "READs failed; chunks are tried");
                return Err(Stopped::Read(match error {
                    ReadError::NoQp(_) => PathReason::NoBulkQp,
                    ReadError::Failed(_) | ReadError::LeaseOver => PathReason::GetFailed,
                }));
            }
        }
        report(progress, sink, total);
    }
    sink.finish().await.map_err(Stopped::Pull)
}

impl<F: Fabric> Inner<F> {
    /// Asks for more time until there is an answer; `false` when the owner says no, or time is over.
    async fn renew_until_over(self: &Arc<Self>, lease: &mut Lease) -> bool {
        loop {
            match self.renew(lease).await {
                Ok(()) => return true,
                Err(error) if error.is_retriable() && now() < lease.tenure.ends_at() => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => {
                    tracing::warn!(?lease, %error, "the lease is not renewed");
                    return false;
                }
            }
        }
    }
}

/// One chunk that was asked for, with its place in the owner's window.
struct Pulling {
    index: u64,
    asked: Asked,
    _place: OwnedSemaphorePermit,
}

/// Asks for chunks, several at a time, and puts them in order.
async fn pull_chunks<F: Fabric>(
    inner: &Arc<Inner<F>>,
    lease: &mut Lease,
    chunks: Chunks,
    sink: &mut Sink<'_>,
    progress: &mut Progress<'_>,
) -> Result<(), PullError> {
    sink.reserve(chunks.total_bytes)?;
    let window = inner.window_of(lease.owner);
    let total_bytes = chunks.total_bytes;
    let mut pulling: VecDeque<Pulling> = VecDeque::new();
    let mut next = sink.filled() / u64::from(chunks.chunk_bytes);
    // Within the first chunk, where READs have brought a part of it.
    let mut skip = usize::try_from(sink.filled() % u64::from(chunks.chunk_bytes)).unwrap_or(0);
    while sink.filled() < total_bytes {
        if now() >= lease.tenure.renew_at() && !inner.renew_until_over(lease).await && !lease.tenure.may_post(now()) {
            return Err(PullError::LeaseOver { handle: lease.handle, pulled: sink.filled(), total_bytes });
        }
        while next < chunks.count() && lease.tenure.may_post(now()) {
            let place = if pulling.is_empty() {
                // Others of ours may have the whole window; theirs come to an end.
                window.clone().acquire_owned().await.map_err(|_| AskError::NotRunning)?
            } else {
                match window.clone().try_acquire_owned() {
                    Ok(place) => place,
                    Err(_) => break,
                }
            };
            let asked = inner.ask(lease.owner, Call::Pull { transfer: chunks.transfer, index: next });
            pulling.push_back(Pulling { index: next, asked, _place: place });
            next += 1;
        }
        let Some(Pulling { index, asked, _place }) = pulling.pop_front() else {
            return Err(PullError::LeaseOver { handle: lease.handle, pulled: sink.filled(), total_bytes });
        };
        let (answer, bytes) = inner.answer(lease.owner, asked).await?;
        let fits = chunks.len_of(index).is_some_and(|len| len as usize == bytes.len());
        if answer != (Answer::Chunk { index }) || !fits {
            inner.counters.answers_bad.add(1);
            let what = format_args!("{answer:?} with {} bytes to pull {index}", bytes.len()).to_string();
            return Err(AskError::bad(lease.owner, what).into());
        }
        sink.put(&bytes[skip.min(bytes.len())..]).await?;
        skip = 0;
        report(progress, sink, total_bytes);
    }
    sink.finish().await
}
