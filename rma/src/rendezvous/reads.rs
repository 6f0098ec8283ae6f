//! Rights and READs by way of [`Bulk`].

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use verbs_transport::{
    BoxFuture, InstanceId,
    fabric::bulk::{Access, Arena, BulkFabric, MemoryOwner, OwnedBytes},
};

use super::inner::now;
use crate::{
    arena::{Pool, PooledSlice},
    bulk::{Bulk, Transfer, TransferError, UnmapError},
    config::RendezvousConfig,
    proto::{region::RegionId, slice::ArenaGauges, tenure::Tenure},
    read_path::{Held, ReadError, ReadPath, RemoteBytes, Right, RightBy, SourceArena, SourceBytes},
    region::RemoteRange,
};

/// The tenure decides; this is for a clock that does not.
const TRANSFER_LIMIT: Duration = Duration::from_secs(86_400);

pub(super) struct Reads<F: BulkFabric> {
    bulk: Bulk<F>,
    /// Registered once, as a whole, for READs to land in.
    destinations: Arc<Pool<Mapped<F>>>,
    in_place_from_bytes: usize,
}

/// A registration that goes with this.
struct Mapped<F: BulkFabric> {
    bulk: Bulk<F>,
    id: RegionId,
    unmapped: bool,
}

impl<F: BulkFabric> Mapped<F> {
    const fn new(bulk: Bulk<F>, id: RegionId) -> Self {
        Self { bulk, id, unmapped: false }
    }

    /// Takes it back and waits for that.
    async fn unmap(mut self) -> Result<(), UnmapError> {
        self.unmapped = true;
        self.bulk.unmap(self.id).await
    }
}

impl<F: BulkFabric> Drop for Mapped<F> {
    fn drop(&mut self) {
        if !self.unmapped {
            // Begins now, and waits for what is under way.
            drop(self.bulk.unmap(self.id));
        }
    }
}

impl<F: BulkFabric> Reads<F> {
    pub(super) fn new(bulk: Bulk<F>, config: &RendezvousConfig) -> Self {
        let mapper = bulk.clone();
        // Called on threads for blocking work only: see `Pool::allocate`.
        let map = move |arena: &Arc<_>| {
            let owner: Arc<dyn MemoryOwner> = Arc::<Arena>::clone(arena);
            let mapped = Handle::current().block_on(mapper.map_all(owner, Access::DESTINATION));
            let region = mapped.map_err(std::io::Error::other)?;
            Ok(Mapped::new(mapper.clone(), region.id))
        };
        let destinations = Pool::new(config.arena_limits(config.destination_max_bytes), map);
        Self { bulk, destinations, in_place_from_bytes: config.in_place_from_bytes }
    }
}

impl<F: BulkFabric> ReadPath for Reads<F> {
    fn prepare_source(&self, arena: &Arc<Arena>) -> SourceArena {
        if !self.bulk.uses_windows() {
            return SourceArena::default();
        }
        let mapping = self.bulk.map_all(arena.clone(), Access::WINDOWS);
        match self.bulk.shared().runtime.block_on(mapping) {
            Ok(region) => {
                let mapped = Mapped::new(self.bulk.clone(), region.id);
                SourceArena { region: Some(region.id), _keep: Some(Box::new(mapped)) }
            }
            Err(error) => {
                tracing::warn!(%error, "an arena cannot be registered for windows: each lease registers its slice");
                SourceArena::default()
            }
        }
    }

    fn grant(
        &self,
        peer: InstanceId,
        bytes: SourceBytes,
        connect_within: Duration,
    ) -> BoxFuture<'static, Result<Right, String>> {
        let bulk = self.bulk.clone();
        Box::pin(async move {
            let SourceBytes { memory, range, region } = bytes;
            // Without a connection the consumer tries by itself, and goes on in chunks if it cannot.
            let connected = timeout(connect_within, bulk.connect(peer)).await.unwrap_or(false);
            if let Some(arena) = region.filter(|_| connected && bulk.uses_windows()) {
                match bulk.bind_window(peer, arena, range.clone()).await {
                    Ok((id, addr, rkey)) => return Ok(Right { by: RightBy::Window(id), addr, rkey }),
                    Err(error) => tracing::debug!(%peer, %error, "no window; a registration takes its place"),
                }
            }
            let region = bulk.map(memory, range, Access::SOURCE).await.map_err(|error| error.to_string())?;
            let rkey = region.rkey.ok_or("no key for a source")?;
            Ok(Right { by: RightBy::Registration(region.id), addr: region.addr, rkey })
        })
    }

    fn revoke(&self, right: Right) -> BoxFuture<'static, Result<(), String>> {
        match right.by {
            RightBy::Registration(region) => {
                let unmapping = self.bulk.unmap(region);
                Box::pin(async move {
                    match unmapping.await {
                        // Gone with everything else at a shutdown.
                        Ok(()) | Err(UnmapError::Unknown { .. }) => Ok(()),
                        Err(error) => Err(error.to_string()),
                    }
                })
            }
            RightBy::Window(id) => {
                let unbinding = self.bulk.unbind_window(id);
                Box::pin(async move { unbinding.await.map_err(|error| error.to_string()) })
            }
        }
    }

    fn is_connected(&self, peer: InstanceId) -> bool {
        self.bulk.is_connected(peer)
    }

    fn read(
        &self,
        peer: InstanceId,
        from: RemoteBytes,
        tenure: watch::Receiver<Tenure>,
        hold: Held,
    ) -> BoxFuture<'static, Result<Vec<u8>, ReadError>> {
        let job = Job { bulk: self.bulk.clone(), peer, from, tenure };
        let in_place = from.len >= self.in_place_from_bytes;
        let pool = self.destinations.clone();
        // A task of its own: it has the memory, and the lease, until the device has let go, whatever becomes of the
        // future that waits for it. When that is dropped, so is its end of the tenure, and the rest is cancelled.
        let task = tokio::spawn(async move {
            let read = match if in_place { None } else { slice(pool, from.len).await } {
                Some(slice) => job.into_slice(slice).await,
                None => job.in_place().await,
            };
            drop(hold);
            read
        });
        Box::pin(async move { task.await.unwrap_or_else(|error| Err(failed(error))) })
    }

    fn destination_arenas(&self) -> ArenaGauges {
        self.destinations.gauges()
    }

    fn release_idle(&self) -> bool {
        self.destinations.release_idle(now());
        self.destinations.has_idle()
    }

    fn shutdown(&self) -> BoxFuture<'static, ()> {
        let bulk = self.bulk.clone();
        Box::pin(async move { bulk.shutdown().await })
    }
}

/// A slice to read into; `None` when there is none.
async fn slice<F: BulkFabric>(pool: Arc<Pool<Mapped<F>>>, len: usize) -> Option<PooledSlice<Mapped<F>>> {
    if let Some(slice) = pool.allocate_now(len as u64) {
        return Some(slice);
    }
    let now = now();
    let made = tokio::task::spawn_blocking(move || pool.allocate(now, len as u64)).await.ok()?;
    made.inspect_err(|error| tracing::debug!(?error, "no slice to read into; memory of its own is registered")).ok()
}

/// One READ of a range, as long as its tenure lasts.
struct Job<F: BulkFabric> {
    bulk: Bulk<F>,
    peer: InstanceId,
    from: RemoteBytes,
    tenure: watch::Receiver<Tenure>,
}

impl<F: BulkFabric> Job<F> {
    /// By way of an arena, and one copy.
    async fn into_slice(self, slice: PooledSlice<Mapped<F>>) -> Result<Vec<u8>, ReadError> {
        let (region, offset, len) = (slice.extra().id, slice.range(0).start as u64, self.from.len);
        self.run(region, offset).await?;
        let mut bytes = vec![0; len];
        slice.read(0, &mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    /// Into memory of its own, registered for this.
    async fn in_place(self) -> Result<Vec<u8>, ReadError> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(self.from.len).map_err(failed)?;
        bytes.resize(self.from.len, 0);
        let memory = OwnedBytes::new(bytes);
        let region = self.bulk.map_all(memory.clone(), Access::DESTINATION).await.map_err(failed)?;
        let mapped = Mapped::new(self.bulk.clone(), region.id);
        self.run(region.id, 0).await?;
        mapped.unmap().await.map_err(failed)?;
        memory.into_vec().map_err(|_| failed("the destination is still registered"))
    }

    async fn run(mut self, into: RegionId, offset: u64) -> Result<(), ReadError> {
        let RemoteBytes { addr, rkey, len } = self.from;
        let from = RemoteRange { addr, rkey, len: len as u64 };
        let mut transfer = self.bulk.get(self.peer, from, into, offset).within(TRANSFER_LIMIT);
        end_by_tenure(&mut transfer, &mut self.tenure).await
    }
}

/// Waits for a transfer. When its tenure allows no more posts, or nobody waits for it any more, it is cancelled, and at the
/// tenure's end the QP goes down.
async fn end_by_tenure<F: BulkFabric>(
    transfer: &mut Transfer<F>,
    tenure: &mut watch::Receiver<Tenure>,
) -> Result<(), ReadError> {
    let handle = transfer.handle();
    let (mut cancelled, mut aborted, mut awaited) = (false, false, true);
    let ended = loop {
        let lasts = *tenure.borrow_and_update();
        let next = if cancelled { lasts.ends_at() } else { lasts.post_until() };
        tokio::select! {
            ended = &mut *transfer => break ended,
            changed = tenure.changed(), if awaited => {
                if changed.is_err() {
                    awaited = false;
                    handle.cancel();
                }
            }
            () = sleep_until(Instant::from_std(next)), if !aborted => {
                if cancelled {
                    aborted = true;
                    handle.abort();
                } else {
                    cancelled = true;
                    handle.cancel();
                }
            }
        }
    };
    match ended {
        Ok(()) => Ok(()),
        Err(_) if cancelled || aborted => Err(ReadError::LeaseOver),
        Err(
            error @ (TransferError::Connect { .. }
            | TransferError::NoCapability { .. }
            | TransferError::PeerNotRegistered { .. }),
        ) => Err(ReadError::NoQp(error.to_string().into())),
        Err(error) => Err(failed(error)),
    }
}

fn failed(error: impl std::fmt::Display) -> ReadError {
    ReadError::Failed(error.to_string().into())
}
