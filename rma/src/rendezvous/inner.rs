//! What all parts of a rendezvous share.

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tokio::{
    runtime::Handle as Runtime,
    sync::{Notify, Semaphore, mpsc},
    task::JoinHandle,
};
use verbs_transport::{
    InstanceId, Worker,
    fabric::{Fabric, bulk::Arena},
};

use super::{asks::Asks, service::Queued, transparent::Tail};
use crate::{
    arena::{Pool, PooledSlice},
    config::RendezvousConfig,
    proto::{
        book::{Book, Effect},
        handle::{Handle, LeaseId, SlotId},
        slot::Body,
    },
    read_path::{ReadPath, Right, SourceArena},
    stats::{Counters, RendezvousStats},
};

/// A slice of a source arena. Shared with those who are reading it this moment, so that it is given back after them.
pub(super) type SourceSlice = Arc<PooledSlice<SourceArena>>;

pub(super) struct Inner<F: Fabric> {
    pub(super) worker: Worker<F>,
    pub(super) config: RendezvousConfig,
    /// This run's number in handles.
    pub(super) me: u64,
    pub(super) reads: Option<Arc<dyn ReadPath>>,
    pub(super) sources: Arc<Pool<SourceArena>>,
    pub(super) asks: Arc<Asks>,
    pub(super) counters: Arc<Counters>,
    pub(super) requests: mpsc::Sender<Queued>,
    pub(super) published: Mutex<bool>,
    book: Mutex<Book<SourceSlice>>,
    /// Rights that exist, by lease.
    rights: Mutex<HashMap<LeaseId, Right>>,
    /// Of these, those that could not be taken back yet.
    stubborn: Mutex<Vec<LeaseId>>,
    /// Messages whose payload waits in a slot.
    tails: Mutex<HashMap<SlotId, Tail>>,
    /// Workers by their number in handles.
    owners: RwLock<HashMap<u64, InstanceId>>,
    /// Bounds the pulls at once from one owner.
    windows: Mutex<HashMap<InstanceId, Arc<Semaphore>>>,
    /// Peers whose message connection has ended, and whose bulk QP has not.
    left: Mutex<HashSet<InstanceId>>,
    runtime: OnceLock<Runtime>,
    /// Something may fall due from now on, or the rendezvous is gone.
    pub(super) reaper_wake: Arc<Notify>,
    drained: Notify,
    growing: AtomicBool,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tokio's clock, so that paused time pauses us, too.
pub(super) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl<F: Fabric> Inner<F> {
    pub(super) fn new(
        worker: Worker<F>,
        config: RendezvousConfig,
        reads: Option<Arc<dyn ReadPath>>,
        requests: mpsc::Sender<Queued>,
    ) -> Self {
        let me = worker.identity().incarnation.0;
        let owners = HashMap::from([(me, worker.instance())]);
        let reads = reads.filter(|_| config.reads);
        let path = reads.clone();
        let prepare = move |arena: &Arc<Arena>| {
            Ok(path.as_ref().map_or_else(SourceArena::default, |reads| reads.prepare_source(arena)))
        };
        Self {
            me,
            sources: Pool::new(config.arena_limits(config.source_max_bytes), prepare),
            book: Mutex::new(Book::new(config.book_limits())),
            asks: Arc::default(),
            counters: Arc::default(),
            requests,
            published: Mutex::default(),
            rights: Mutex::default(),
            stubborn: Mutex::default(),
            tails: Mutex::default(),
            owners: RwLock::new(owners),
            windows: Mutex::default(),
            left: Mutex::default(),
            runtime: OnceLock::new(),
            reaper_wake: Arc::default(),
            drained: Notify::new(),
            growing: AtomicBool::new(false),
            reads,
            worker,
            config,
        }
    }

    /// Called inside the runtime that everything runs on.
    pub(super) fn run(self: &Arc<Self>) {
        if self.runtime.set(Runtime::current()).is_ok() {
            self.spawn(super::reaper::run(Arc::downgrade(self)));
        }
    }

    /// Runs a task, if the rendezvous was started.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = self.runtime.get() {
            runtime.spawn(task);
        }
    }

    /// The same, with its result.
    pub(super) fn spawn_joined<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Option<JoinHandle<T>> {
        self.runtime.get().map(|runtime| runtime.spawn(task))
    }

    /// Runs what blocks; without a runtime, here.
    pub(super) fn spawn_blocking(&self, call: impl FnOnce() + Send + 'static) {
        match self.runtime.get() {
            Some(runtime) => drop(runtime.spawn_blocking(call)),
            None => call(),
        }
    }

    pub(super) fn handle(&self, slot: SlotId) -> Handle {
        Handle { worker: self.me, slot: slot.get() }
    }

    /// Remembers whose handles bear this number.
    pub(super) fn learn(&self, worker: u64, peer: InstanceId) {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        // One run at a time: what an earlier one had staged is gone with it.
        owners.retain(|number, known| *known != peer || *number == worker);
        owners.insert(worker, peer);
    }

    pub(super) fn owner_of(&self, handle: Handle) -> Option<InstanceId> {
        self.owners.read().unwrap_or_else(PoisonError::into_inner).get(&handle.worker).copied()
    }

    pub(super) fn window_of(&self, peer: InstanceId) -> Arc<Semaphore> {
        let mut windows = lock(&self.windows);
        windows.entry(peer).or_insert_with(|| Arc::new(Semaphore::new(self.config.pull_window))).clone()
    }

    pub(super) fn forget_window(&self, peer: InstanceId) {
        lock(&self.windows).remove(&peer);
    }

    /// Does something to the book, and then all that follows from it.
    pub(super) fn with_book<R>(self: &Arc<Self>, call: impl FnOnce(&mut Book<SourceSlice>) -> R) -> R {
        let (result, effects, empty) = {
            let mut book = lock(&self.book);
            let idle = book.next_deadline().is_none();
            let result = call(&mut book);
            if idle && book.next_deadline().is_some() {
                self.reaper_wake.notify_one();
            }
            let effects: Vec<_> = std::iter::from_fn(|| book.poll_effect()).collect();
            (result, effects, book.is_empty())
        };
        for effect in effects {
            match effect {
                Effect::Revoke(lease) => self.revoke(lease),
                Effect::Free { slot, body, fate } => {
                    self.counters.slot_ended(fate);
                    self.finish_message(slot, &body, fate);
                    if body.is_pinned() {
                        // Its arena may be empty now.
                        self.reaper_wake.notify_one();
                    }
                }
            }
        }
        if empty {
            self.drained.notify_waiters();
        }
        result
    }

    /// Looks at the book; nothing follows from that.
    pub(super) fn look<R>(&self, call: impl FnOnce(&Book<SourceSlice>) -> R) -> R {
        call(&lock(&self.book))
    }

    /// The bytes of a slot, for whoever reads them without the lock.
    pub(super) fn share(body: &Body<SourceSlice>) -> Body<SourceSlice> {
        match body {
            Body::Memory { bytes, why } => Body::Memory { bytes: bytes.clone(), why: *why },
            Body::Pinned { slice, len } => Body::Pinned { slice: slice.clone(), len: *len },
        }
    }

    pub(super) fn keep_right(&self, lease: LeaseId, right: Right) {
        lock(&self.rights).insert(lease, right);
    }

    /// Takes a right back.
    fn revoke(self: &Arc<Self>, lease: LeaseId) {
        let Some(right) = lock(&self.rights).get(&lease).copied() else {
            debug_assert!(false, "a right that was granted is kept");
            return;
        };
        let Some(reads) = &self.reads else { return };
        let (revoking, inner) = (reads.revoke(right), self.clone());
        self.spawn(async move {
            match revoking.await {
                Ok(()) => {
                    lock(&inner.rights).remove(&lease);
                    inner.counters.rights_revoked.add(1);
                    inner.with_book(|book| book.on_revoked(lease));
                }
                Err(error) => {
                    inner.counters.revocations_failed.add(1);
                    tracing::error!(%lease, ?right, %error, "a right cannot be taken back: its slice stays in quarantine");
                    lock(&inner.stubborn).push(lease);
                    inner.reaper_wake.notify_one();
                }
            }
        });
    }

    /// Tries again what could not be taken back.
    pub(super) fn revoke_again(self: &Arc<Self>) {
        let leases = std::mem::take(&mut *lock(&self.stubborn));
        for lease in leases {
            self.revoke(lease);
        }
    }

    pub(super) fn has_stubborn(&self) -> bool {
        !lock(&self.stubborn).is_empty()
    }

    pub(super) fn tails(&self) -> MutexGuard<'_, HashMap<SlotId, Tail>> {
        lock(&self.tails)
    }

    pub(super) fn left(&self) -> MutexGuard<'_, HashSet<InstanceId>> {
        lock(&self.left)
    }

    /// Whether an arena is to be made in the background: one at a time.
    pub(super) fn begin_growing(&self) -> bool {
        !self.growing.swap(true, Ordering::AcqRel)
    }

    pub(super) fn end_growing(&self) {
        self.growing.store(false, Ordering::Release);
    }

    pub(super) fn close(self: &Arc<Self>) {
        self.with_book(Book::close);
        self.asks.fail_all();
    }

    /// Until nothing is staged, leased or being revoked.
    pub(super) async fn drained(&self) {
        loop {
            let told = self.drained.notified();
            if self.look(Book::is_empty) {
                return;
            }
            told.await;
        }
    }

    pub(super) fn stats(&self) -> RendezvousStats {
        let mut stats = self.counters.snapshot();
        stats.book = self.look(Book::gauges);
        stats.source_arenas = self.sources.gauges();
        stats.destination_arenas = self.reads.as_ref().map(|reads| reads.destination_arenas()).unwrap_or_default();
        stats.asks_waiting = self.asks.waiting();
        stats
    }
}

impl<F: Fabric> Drop for Inner<F> {
    fn drop(&mut self) {
        self.reaper_wake.notify_one();
        self.asks.fail_all();
    }
}
