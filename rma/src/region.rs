//! Regions: mapping and unmapping memory, and reaching its bytes.

use std::{
    collections::HashMap,
    future::Future,
    io,
    ops::Range,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use tokio::sync::oneshot;
use verbs_transport::fabric::bulk::{Access, BulkFabric, BulkPort, BulkRegion, MemoryOwner, OutOfBounds, Rkey};

use crate::{
    bulk::{Bulk, Counters, MapError, RegionOf, UnmapError, bump},
    proto::region::{Mapped, RegionId, Regions, Unmap, UseError},
};

/// Mapped memory, as its owner knows it. Plain facts: dropping them unmaps nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Region {
    /// Its name on this host, until it is unmapped and never after.
    pub id: RegionId,
    /// Address of its first byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// Who may do what with it.
    pub access: Access,
    /// The key for peers, when the access is remote.
    pub rkey: Option<Rkey>,
}

/// A part of a peer's memory: 20 bytes of fact that the peer has sent over, by whatever way. Good for as long as the peer
/// keeps the region mapped; whoever has it can read (or write) all of that region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRange {
    /// Address of the first byte in the peer's process.
    pub addr: u64,
    /// The right to it.
    pub rkey: Rkey,
    /// Bytes.
    pub len: u64,
}

impl Region {
    /// A part of it, for a peer; `None` when the access is local only, or the part not within.
    pub fn remote(&self, range: Range<u64>) -> Option<RemoteRange> {
        let rkey = self.rkey?;
        let len = range.end.checked_sub(range.start)?;
        (range.end <= self.len).then_some(RemoteRange { addr: self.addr + range.start, rkey, len })
    }

    /// All of it, for a peer; `None` when the access is local only.
    pub fn whole(&self) -> Option<RemoteRange> {
        self.remote(0..self.len)
    }
}

/// Who waits for an unmap.
type Waiter = oneshot::Sender<Result<(), UnmapError>>;

/// All regions of a port. Behind an `Arc`, since a registration may end after everything else.
pub(crate) struct Table<R> {
    inner: Mutex<Inner<R>>,
    counters: Arc<Counters>,
}

struct Inner<R> {
    book: Regions<Waiter>,
    live: HashMap<RegionId, Arc<R>>,
    closed: bool,
}

impl<R: BulkRegion> Table<R> {
    pub(crate) fn new(counters: Arc<Counters>) -> Self {
        let inner = Inner { book: Regions::default(), live: HashMap::new(), closed: false };
        Self { inner: Mutex::new(inner), counters }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<R>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mint(&self) -> Option<RegionId> {
        let mut inner = self.lock();
        (!inner.closed).then(|| inner.book.mint())
    }

    /// The registration is there. `None`: nobody wants it any more, and it is gone again.
    fn mapped(&self, id: RegionId, region: R) -> Option<Region> {
        let facts = facts(id, &region);
        let mut inner = self.lock();
        inner.live.insert(id, Arc::new(region));
        match inner.book.mapped(id) {
            Mapped::Keep => Some(facts),
            Mapped::RollBack => {
                drop(inner);
                bump(&self.counters.rolled_back);
                self.deregister(id);
                None
            }
        }
    }

    fn map_failed(&self, id: RegionId) {
        let waiters = self.lock().book.map_failed(id);
        answer(waiters, &Ok(()));
    }

    /// The future of a map was dropped.
    fn abandon(&self, id: RegionId) {
        if self.lock().book.abandon(id) {
            bump(&self.counters.rolled_back);
            self.deregister(id);
        }
    }

    /// Begins to use a region; each is to be ended by [`Table::end_use`], after the `Arc` is dropped.
    pub(crate) fn begin_use(&self, id: RegionId) -> Result<Arc<R>, UseError> {
        let mut inner = self.lock();
        let region = inner.live.get(&id).cloned();
        inner.book.begin_use(id)?;
        let Some(region) = region else {
            inner.book.end_use(id);
            return Err(UseError::Unknown { id });
        };
        Ok(region)
    }

    pub(crate) fn end_use(&self, id: RegionId) {
        let last = self.lock().book.end_use(id);
        if last {
            self.deregister(id);
        }
    }

    fn unmap(&self, id: RegionId, waiter: Waiter) {
        let wanted = self.lock().book.unmap(id, waiter);
        match wanted {
            Unmap::Now => self.deregister(id),
            Unmap::Waits => {}
            Unmap::Unknown(waiter) => answer([waiter], &Err(UnmapError::Unknown { id })),
        }
    }

    /// Takes the device's right away, and answers those who wait for it.
    fn deregister(&self, id: RegionId) {
        let Some(region) = self.lock().live.remove(&id) else { return };
        // Only operations hold references, and none is left; a reader of bytes counts as one.
        let gone = match Arc::try_unwrap(region) {
            Ok(region) => region.deregister().map_err(|(region, error)| (Arc::new(region), error)),
            Err(region) => Err((region, io::Error::other("still in use"))),
        };
        match gone {
            Ok(()) => {
                let waiters = self.lock().book.unmapped(id);
                answer(waiters, &Ok(()));
            }
            Err((region, error)) => {
                tracing::error!(%id, %error, "deregistration failed; the memory stays");
                let waiters = {
                    let mut inner = self.lock();
                    inner.live.insert(id, region);
                    inner.book.unmap_failed(id)
                };
                answer(waiters, &Err(UnmapError::Deregister { id, source: Arc::new(error) }));
            }
        }
    }

    /// A QP that would not be destroyed can still touch it: its memory stays for good.
    pub(crate) fn leak(&self, id: RegionId, region: Arc<R>) {
        std::mem::forget(region);
        bump(&self.counters.leaked);
        let waiters = self.lock().book.unmap_failed(id);
        let source = Arc::new(io::Error::other("a QP that the device would not destroy can still reach it"));
        answer(waiters, &Err(UnmapError::Deregister { id, source }));
    }

    /// Takes no more regions, and gives all back. No operation may be left.
    pub(crate) fn close(&self) {
        let left = {
            let mut inner = self.lock();
            inner.closed = true;
            inner.book.close()
        };
        for id in left {
            self.deregister(id);
        }
    }

    /// Takes no more regions.
    pub(crate) fn refuse(&self) {
        self.lock().closed = true;
    }

    /// How many there are, and how many are parked.
    pub(crate) fn count(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.book.len(), inner.book.parked())
    }
}

/// A device that keeps a region keeps its memory, too.
impl<R> Drop for Table<R> {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Each deregisters itself, or leaks its memory.
        inner.live.clear();
    }
}

fn facts<R: BulkRegion>(id: RegionId, region: &R) -> Region {
    Region { id, addr: region.addr(), len: region.len() as u64, access: region.access(), rkey: region.rkey() }
}

fn answer(waiters: impl IntoIterator<Item = Waiter>, result: &Result<(), UnmapError>) {
    for waiter in waiters {
        // One that gave up undoes nothing.
        let _ = waiter.send(result.clone());
    }
}

/// A map under way. Dropping it before it is ready rolls the map back, whether it has begun or ended.
#[must_use = "a dropped map is rolled back"]
pub struct Map<F: BulkFabric> {
    id: Option<RegionId>,
    table: Arc<Table<RegionOf<F>>>,
    answer: oneshot::Receiver<Result<Region, MapError>>,
}

impl<F: BulkFabric> Future for Map<F> {
    type Output = Result<Region, MapError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = std::task::ready!(Pin::new(&mut self.answer).poll(cx));
        self.id = None;
        // Without an answer the runtime that mapped is gone, or all was taken down meanwhile.
        Poll::Ready(answer.unwrap_or(Err(MapError::ShuttingDown)))
    }
}

impl<F: BulkFabric> Drop for Map<F> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.table.abandon(id);
        }
    }
}

/// An unmap under way. Dropping it does not undo the unmap.
pub struct UnmapFuture(oneshot::Receiver<Result<(), UnmapError>>);

impl Future for UnmapFuture {
    type Output = Result<(), UnmapError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = std::task::ready!(Pin::new(&mut self.0).poll(cx));
        Poll::Ready(answer.unwrap_or(Err(UnmapError::ShuttingDown)))
    }
}

impl<F: BulkFabric> Bulk<F> {
    /// Maps `range` of an owner's memory. The registration runs on a thread for blocking work, since it pins pages: about
    /// 20 µs and, in base pages that were never touched, up to 40 µs each on a slow machine.
    ///
    /// The region keeps the owner until it is unmapped. Offsets into it count from `range.start`, and nothing beyond
    /// `range.end` can be named by anyone, although whole pages are pinned.
    ///
    /// # Errors
    ///
    /// [`MapError`].
    pub fn map(&self, memory: Arc<dyn MemoryOwner>, range: Range<usize>, access: Access) -> Map<F> {
        let shared = self.shared();
        let (reply, answer) = oneshot::channel();
        let table = shared.regions.clone();
        let Some(id) = table.mint() else {
            let _ = reply.send(Err(MapError::ShuttingDown));
            return Map { id: None, table, answer };
        };
        let (port, regions) = (shared.port.clone(), table.clone());
        shared.runtime.spawn_blocking(move || {
            let mapped = match port.register(memory, range, access) {
                Ok(region) => match regions.mapped(id, region) {
                    Some(facts) => Ok(facts),
                    None => Err(MapError::ShuttingDown),
                },
                Err(error) => {
                    regions.map_failed(id);
                    Err(error.into())
                }
            };
            // Whoever has dropped the other end has said so to the table.
            let _ = reply.send(mapped);
        });
        Map { id: Some(id), table, answer }
    }

    /// Maps all of an owner's memory; see [`Bulk::map`].
    ///
    /// # Errors
    ///
    /// [`MapError`].
    pub fn map_all(&self, memory: Arc<dyn MemoryOwner>, access: Access) -> Map<F> {
        let range = 0..memory.len();
        self.map(memory, range, access)
    }

    /// Unmaps a region: at once when nothing uses it; else new transfers are refused from now on, and the unmap ends with
    /// the last one. Several unmaps of one region are one. Begins with the call, whether the future is awaited or not.
    ///
    /// When this has answered well, no device reaches the memory any more, and the owner is given back.
    ///
    /// # Errors
    ///
    /// [`UnmapError`].
    pub fn unmap(&self, id: RegionId) -> UnmapFuture {
        let (waiter, answer) = oneshot::channel();
        self.shared().regions.unmap(id, waiter);
        UnmapFuture(answer)
    }

    /// Copies bytes out of a region, from `offset` on.
    ///
    /// # Errors
    ///
    /// The region cannot be used, or the bytes reach beyond it.
    pub fn read_region(&self, id: RegionId, offset: usize, out: &mut [u8]) -> Result<(), RegionAccessError> {
        self.with_region(id, |region| region.read(offset, out))
    }

    /// Copies bytes into a region, from `offset` on.
    ///
    /// # Errors
    ///
    /// The region cannot be used, or the bytes reach beyond it.
    pub fn write_region(&self, id: RegionId, offset: usize, bytes: &[u8]) -> Result<(), RegionAccessError> {
        self.with_region(id, |region| region.write(offset, bytes))
    }

    fn with_region(
        &self,
        id: RegionId,
        access: impl FnOnce(&RegionOf<F>) -> Result<(), OutOfBounds>,
    ) -> Result<(), RegionAccessError> {
        let regions = &self.shared().regions;
        let region = regions.begin_use(id)?;
        let done = access(&region);
        drop(region);
        regions.end_use(id);
        Ok(done?)
    }
}

/// The bytes of a region could not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionAccessError {
    /// It cannot be used.
    #[error(transparent)]
    Region(#[from] UseError),
    /// The bytes are not within.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
}
