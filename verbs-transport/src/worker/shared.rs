//! What a worker's threads and tasks share.

use std::{
    collections::HashMap,
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, TryLockError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::Instant,
};

use crossbeam_queue::{ArrayQueue, SegQueue};
use foldhash::fast::RandomState;
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    task::AbortHandle,
};
use verbs_bootstrap::{Exchange, Generation, Identity, InstanceId, Plane, Psn};

use super::{
    config::Config,
    driver::Driver,
    error::EpochEnd,
    inbound::Backlog,
    layer::Layers,
    lending::Returns,
    metrics::Published,
    peer::{Effects, Peer, PeerState, Retired},
    stats::Counters,
    unsettled::Unsettled,
};
use crate::{
    fabric::{Fabric, FabricError, SendSlab},
    proto::{
        link::{LinkCounts, SendErrorHandler},
        receive_share::ReceiveShares,
    },
};

/// The life of a worker: it only goes forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Life {
    New,
    Running,
    Stopping,
    Stopped,
}

pub(crate) struct Shared<F: Fabric> {
    pub(crate) config: Config,
    pub(crate) me: Identity,
    pub(crate) fabric: F,
    pub(crate) counters: Counters,
    pub(crate) published: Mutex<Published>,
    pub(crate) backlog: Arc<Backlog>,
    pub(crate) layers: Layers<super::connect::StreamOf<F>>,
    pub(crate) send_slabs: ArrayQueue<SendSlab>,
    /// Receive slabs that the application has given back.
    pub(crate) returns: Arc<Returns<F>>,
    /// Of these, how many the application has: for `stats`.
    pub(crate) slabs_lent: AtomicU32,
    /// Peers that wait for a send slab.
    pub(crate) starved: SegQueue<Arc<Peer<F>>>,
    /// Epochs that have ended, on their way to the driver.
    pub(crate) retired: SegQueue<Retired<F>>,
    pub(crate) driver_wake: Arc<Notify>,
    /// Told whenever no ended connection is left.
    pub(crate) all_retired: Notify,
    peers: RwLock<HashMap<InstanceId, Arc<Peer<F>>, RandomState>>,
    routes: RwLock<HashMap<u32, Arc<Peer<F>>, RandomState>>,
    /// Counts the changes of `routes`, for the driver's note of the route it used last.
    routes_version: AtomicU64,
    /// The highest generation that a forgotten peer has seen: a new count begins above it, lest that peer take our next
    /// epoch for one that is over.
    forgotten_generation: AtomicU64,
    shares: Mutex<ReceiveShares>,
    past_links: Mutex<LinkCounts>,
    driver: OnceLock<Mutex<Driver<F>>>,
    runtime: OnceLock<Handle>,
    rng: Mutex<StdRng>,
    life: AtomicU8,
    pub(crate) unsettled: Unsettled<Arc<Notify>>,
    inline_request: AtomicU32,
    driver_stop: AtomicBool,
    device_lost: AtomicBool,
    stop: watch::Sender<bool>,
    draining: AtomicBool,
    /// Who hears of echoes that fail: nobody. Made once.
    pub(crate) nobody: OnceLock<Arc<dyn SendErrorHandler>>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<F: Fabric> Shared<F> {
    pub(crate) fn new(config: Config, fabric: F, send_slabs: Vec<SendSlab>) -> Self {
        let mut rng = config.seed.map_or_else(StdRng::from_os_rng, StdRng::seed_from_u64);
        let me = Identity {
            instance: config.instance,
            incarnation: verbs_bootstrap::Incarnation(rng.random::<u64>().max(1)),
        };
        let pool = ArrayQueue::new(send_slabs.len().max(1));
        for slab in send_slabs {
            assert!(pool.push(slab).is_ok(), "the pool is as large as the slabs are many");
        }
        let driver_wake = Arc::new(Notify::new());
        Self {
            me,
            counters: Counters::default(),
            published: Mutex::default(),
            backlog: Arc::new(Backlog::new(config.inbound_max_bytes, driver_wake.clone())),
            layers: Layers::default(),
            send_slabs: pool,
            returns: Arc::new(Returns::new(driver_wake.clone())),
            slabs_lent: AtomicU32::new(0),
            starved: SegQueue::new(),
            retired: SegQueue::new(),
            unsettled: Unsettled::new(driver_wake.clone()),
            driver_wake,
            all_retired: Notify::new(),
            peers: RwLock::default(),
            routes: RwLock::default(),
            routes_version: AtomicU64::new(0),
            forgotten_generation: AtomicU64::new(0),
            shares: Mutex::new(ReceiveShares::new(fabric.slabs().receive_slabs - config.zero_copy_slabs)),
            past_links: Mutex::default(),
            driver: OnceLock::new(),
            runtime: OnceLock::new(),
            rng: Mutex::new(rng),
            life: AtomicU8::new(Life::New as u8),
            inline_request: AtomicU32::new(config.inline_request_bytes),
            driver_stop: AtomicBool::new(false),
            device_lost: AtomicBool::new(false),
            stop: watch::Sender::new(false),
            draining: AtomicBool::new(false),
            nobody: OnceLock::new(),
            config,
            fabric,
        }
    }

    pub(crate) fn life(&self) -> Life {
        match self.life.load(Ordering::Acquire) {
            0 => Life::New,
            1 => Life::Running,
            2 => Life::Stopping,
            _ => Life::Stopped,
        }
    }

    /// Moves on from `from` to `to`; `false` when it was elsewhere.
    pub(crate) fn advance(&self, from: Life, to: Life) -> bool {
        self.life.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.life() >= Life::Stopping
    }

    /// Tokio's clock, so that paused time pauses us too.
    #[expect(clippy::unused_self, reason = "the clock may become the fabric's")]
    pub(crate) fn now(&self) -> Instant {
        tokio::time::Instant::now().into_std()
    }

    pub(crate) fn set_runtime(&self, runtime: Handle) {
        // Start runs once.
        let _ = self.runtime.set(runtime);
    }

    /// Runs a task on the worker's runtime. Only after start.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let runtime = self.runtime.get().expect("tasks are made after start only");
        runtime.spawn(task).abort_handle()
    }

    pub(crate) fn set_driver(&self, driver: Driver<F>) {
        // Start runs once.
        let _ = self.driver.set(Mutex::new(driver));
    }

    /// The driver, for whoever polls. Only after start.
    pub(crate) fn driver(&self) -> MutexGuard<'_, Driver<F>> {
        lock(self.driver.get().expect("the driver is made at start"))
    }

    pub(crate) fn try_driver(&self) -> Option<MutexGuard<'_, Driver<F>>> {
        self.driver.get().map(lock)
    }

    /// The driver, if nobody polls at this moment.
    pub(crate) fn idle_driver(&self) -> Option<MutexGuard<'_, Driver<F>>> {
        match self.driver.get()?.try_lock() {
            Ok(driver) => Some(driver),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(crate) fn find_peer(&self, id: InstanceId) -> Option<Arc<Peer<F>>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    pub(crate) fn peer_or_new(&self, id: InstanceId) -> Arc<Peer<F>> {
        if let Some(peer) = self.find_peer(id) {
            return peer;
        }
        let seed = lock(&self.rng).random();
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        let last = Generation(self.forgotten_generation.load(Ordering::Acquire));
        let new = || {
            Arc::new(Peer::new(id, Exchange::new(self.me, id, Plane::Messaging, self.config.backoff, seed).after(last)))
        };
        peers.entry(id).or_insert_with(new).clone()
    }

    /// Runs `f` on a peer under its lock; makes the peer if it is not known.
    pub(crate) fn with_peer<R>(&self, id: InstanceId, f: impl FnOnce(&Arc<Peer<F>>, &mut PeerState<F>) -> R) -> R {
        loop {
            let peer = self.peer_or_new(id);
            let mut state = peer.lock();
            // One that was forgotten between the look-up and the lock is on its way out of the map.
            if !state.forgotten {
                return f(&peer, &mut state);
            }
            drop(state);
            std::thread::yield_now();
        }
    }

    /// Forgets a peer that nobody registered and that has no connection: else each run of a peer with a fresh name
    /// would leave something behind.
    pub(crate) fn forget_stranger(&self, id: InstanceId) {
        let Some(peer) = self.find_peer(id) else { return };
        {
            let mut state = peer.lock();
            let idle = state.epoch.is_none() && state.exchange.generation().is_none() && !state.has_waiting();
            if state.forgotten || state.address.is_some() || state.dialer || !idle {
                return;
            }
            state.forgotten = true;
            self.forgotten_generation.fetch_max(state.exchange.last_generation().0, Ordering::AcqRel);
        }
        self.peers.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// All peers, in the order of their names, so that simulation is reproducible.
    pub(crate) fn all_peers(&self) -> Vec<Arc<Peer<F>>> {
        let mut peers = Vec::new();
        self.append_peers(&mut peers);
        peers
    }

    /// The same, into room that is there already.
    pub(crate) fn append_peers(&self, peers: &mut Vec<Arc<Peer<F>>>) {
        peers.extend(self.peers.read().unwrap_or_else(PoisonError::into_inner).values().cloned());
        peers.sort_unstable_by_key(|peer| peer.id);
    }

    pub(crate) fn add_route(&self, qpn: u32, peer: &Arc<Peer<F>>) {
        self.routes.write().unwrap_or_else(PoisonError::into_inner).insert(qpn, peer.clone());
        self.routes_version.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn forget_route(&self, qpn: u32) {
        self.routes.write().unwrap_or_else(PoisonError::into_inner).remove(&qpn);
        self.routes_version.fetch_add(1, Ordering::Release);
    }

    /// Whose QP this is.
    pub(crate) fn route(&self, qpn: u32) -> Option<Arc<Peer<F>>> {
        self.routes.read().unwrap_or_else(PoisonError::into_inner).get(&qpn).cloned()
    }

    /// Changes with every route that comes or goes.
    pub(crate) fn routes_version(&self) -> u64 {
        self.routes_version.load(Ordering::Acquire)
    }

    /// QPs that exist.
    pub(crate) fn qps(&self) -> usize {
        self.routes.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(crate) fn shares(&self) -> MutexGuard<'_, ReceiveShares> {
        lock(&self.shares)
    }

    pub(crate) fn past_links(&self) -> MutexGuard<'_, LinkCounts> {
        lock(&self.past_links)
    }

    pub(crate) fn random_psn(&self) -> Psn {
        Psn::from_random(lock(&self.rng).random())
    }

    pub(crate) fn inline_request(&self) -> u32 {
        self.inline_request.load(Ordering::Relaxed)
    }

    pub(crate) fn set_inline_request(&self, bytes: u32) {
        self.inline_request.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn give_slab(&self, slab: SendSlab) {
        assert!(self.send_slabs.push(slab).is_ok(), "the pool is as large as the slabs are many");
    }

    /// A peer found the pool empty: it gets its turn when slabs come home.
    pub(crate) fn starve(&self, peer: &Arc<Peer<F>>) {
        self.starved.push(peer.clone());
        if !self.send_slabs.is_empty() {
            // Some came home between the look and the push, and the driver may be asleep already.
            self.driver_wake.notify_one();
        }
    }

    pub(crate) fn retire(&self, retired: Retired<F>) {
        self.retired.push(retired);
        self.driver_wake.notify_one();
    }

    pub(crate) fn is_withholding(&self) -> bool {
        self.backlog.is_withholding()
    }

    /// A quarter of the SRQ gone is normal; an eighth left is not.
    pub(crate) fn arm_srq_limit(&self) -> Result<(), FabricError> {
        self.fabric.arm_srq_limit(self.fabric.slabs().receive_slabs / 8)
    }

    pub(crate) fn end_epoch_of(&self, peer: &Arc<Peer<F>>, generation: Generation, cause: EpochEnd) {
        let mut effects = Effects::default();
        peer.end_epoch(&mut peer.lock(), self, generation, &Arc::new(cause), &mut effects);
        effects.run(self);
    }

    /// Ends every connection and every attempt at one.
    pub(crate) fn end_all(&self, cause: &Arc<EpochEnd>) {
        for peer in self.all_peers() {
            let mut effects = Effects::default();
            {
                let mut state = peer.lock();
                if let Some(generation) = state.exchange.generation() {
                    state.exchange.on_epoch_end(generation, self.now());
                }
                peer.end_unbound(&mut state, self, cause, &mut effects);
            }
            effects.run(self);
        }
    }

    /// Ends every connection, at the first of what may be many failures.
    pub(crate) fn on_device_lost(&self, error: &FabricError) {
        if self.device_lost.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::error!(%error, "the device is lost");
        self.end_all(&Arc::new(EpochEnd::DeviceLost(Arc::new(error.again()))));
    }

    /// Notes that the application drains; whether that is news.
    pub(crate) fn note_drain(&self) -> bool {
        !self.draining.swap(true, Ordering::AcqRel)
    }

    /// Resolves when shutdown begins.
    pub(crate) async fn stopping(&self) {
        let mut stop = self.stop.subscribe();
        // The sender lives as long as `self`.
        let _ = stop.wait_for(|stop| *stop).await;
    }

    /// Turns true when shutdown begins; ends with the worker.
    pub(crate) fn stop_signal(&self) -> watch::Receiver<bool> {
        self.stop.subscribe()
    }

    /// Wakes everything that waits in [`Shared::stopping`].
    pub(crate) fn tell_stopping(&self) {
        self.stop.send_replace(true);
    }

    pub(crate) fn stop_driver(&self) {
        self.driver_stop.store(true, Ordering::Release);
        self.driver_wake.notify_one();
    }

    /// All has ended and the driver was told to stop.
    pub(crate) fn driver_may_stop(&self) -> bool {
        self.driver_stop.load(Ordering::Acquire) && self.retired.is_empty() && self.driver().is_quiet()
    }
}

/// The last user of a worker is gone without a shutdown, or the runtime is: every frame still ends.
impl<F: Fabric> Drop for Shared<F> {
    fn drop(&mut self) {
        let cause = Arc::new(EpochEnd::ShuttingDown);
        self.end_all(&cause);
        let mut left: Vec<Retired<F>> = std::iter::from_fn(|| self.retired.pop()).collect();
        if let Some(driver) = self.driver.take() {
            left.extend(driver.into_inner().unwrap_or_else(PoisonError::into_inner).into_retired());
        }
        let mut effects = Effects::default();
        for Retired { peer, qp, link, cause, .. } in left {
            // The QP first: after that no device reads the slabs.
            drop(qp);
            let rest: Vec<_> = link.map(|mut link| link.abandon().collect()).unwrap_or_default();
            for op in rest {
                self.retire_op(peer, op, crate::proto::send_queue::Ended::Failed, &cause, &mut effects);
            }
        }
        effects.run(self);
    }
}
