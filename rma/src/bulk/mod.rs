//! Bulk memory between two workers: a second QP for each pair of peers, by which GETs and PUTs go.
//!
//! It is brought up at the first transfer, through the worker's own bootstrap, and lives for itself: what goes wrong on it
//! ends this one connection, and messages do not notice. The next transfer makes a new one.
//!
//! | module | holds |
//! |---|---|
//! | `op` | one transfer: its future, its handle, what it keeps of memory |
//! | `driver` | the task that posts, polls and ends transfers. The only one that touches QPs that are up |
//! | `conn` | how a connection comes to be, for both halves of the bootstrap, and how it ends |
//! | `windows` | rights by memory windows: bound, invalidated, freed with their connection |
//! | `config`, `error`, `stats` | numbers, errors, counters |

mod config;
mod conn;
mod driver;
mod error;
mod metrics;
mod op;
mod stats;
mod windows;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, mpsc, watch},
};
use verbs_bootstrap::{Exchange, Identity, InstanceId, Plane, Psn};
use verbs_transport::{
    WeakWorker, Worker,
    fabric::bulk::{BulkFabric, BulkLimits, BulkPort},
};

pub use self::{
    config::{BulkConfig, BulkConfigError},
    driver::{Notification, Notifications},
    error::{AttachBulkError, BulkEnd, MapError, TransferError, UnmapError},
    op::{Transfer, TransferHandle},
    stats::BulkStats,
};
use self::{
    conn::{Conn, Hooks},
    driver::{Driver, News},
};
pub(crate) use self::{
    op::Request,
    stats::{Counters, bump},
    windows::WindowOf,
    windows::WindowRight,
};
use crate::region::Table;

pub(crate) type PortOf<F> = <F as BulkFabric>::Bulk;
pub(crate) type RegionOf<F> = <PortOf<F> as BulkPort>::Region;
pub(crate) type QpOf<F> = <PortOf<F> as BulkPort>::Qp;

/// The bulk memory of one worker. Cheap to clone. [`Bulk::shutdown`] takes it down; so does the worker's own shutdown, and
/// dropping the last clone, without waiting.
pub struct Bulk<F: BulkFabric> {
    owner: Arc<Owner<F>>,
}

struct Owner<F: BulkFabric> {
    shared: Arc<Shared<F>>,
}

impl<F: BulkFabric> Drop for Owner<F> {
    fn drop(&mut self) {
        self.shared.tell(News::Shutdown);
    }
}

impl<F: BulkFabric> Clone for Bulk<F> {
    fn clone(&self) -> Self {
        Self { owner: self.owner.clone() }
    }
}

/// What the driver's task, the bootstrap's halves and the callers share.
pub(crate) struct Shared<F: BulkFabric> {
    pub(crate) worker: WeakWorker<F>,
    pub(crate) me: Identity,
    pub(crate) config: BulkConfig,
    pub(crate) port: Arc<PortOf<F>>,
    pub(crate) limits: BulkLimits,
    pub(crate) runtime: Handle,
    pub(crate) regions: Arc<Table<RegionOf<F>>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) permits: Arc<Semaphore>,
    pub(crate) next_transfer: AtomicU64,
    next_tag: AtomicU32,
    next_right: AtomicU64,
    /// Not bound.
    spare_windows: Mutex<Vec<WindowOf<F>>>,
    /// Binds that failed, since one last succeeded.
    bind_failures: AtomicU32,
    /// The worker's: how long a new QP may stay silent.
    pub(crate) proof_deadline: Duration,
    /// QPs that exist.
    qps: AtomicUsize,
    inbox: mpsc::UnboundedSender<News<F>>,
    conns: Mutex<BTreeMap<InstanceId, Arc<Conn<F>>>>,
    rng: Mutex<StdRng>,
    closing: AtomicBool,
    /// The driver has ended.
    over: watch::Sender<bool>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<F: BulkFabric> Bulk<F> {
    /// Opens a bulk port on the worker's device, and attaches to the worker, which must not have been started yet. Runs on
    /// the current tokio runtime.
    ///
    /// # Errors
    ///
    /// [`AttachBulkError`]; the worker is as before, and its messages go on without bulk memory.
    pub fn attach(worker: &Worker<F>, config: BulkConfig) -> Result<(Self, Notifications<F>), AttachBulkError> {
        config.validate()?;
        let runtime = Handle::try_current().map_err(|_| AttachBulkError::NoRuntime)?;
        let port = worker.fabric().open_bulk(config.cq_depth)?;
        let counters = Arc::<Counters>::default();
        let (inbox, news) = mpsc::unbounded_channel();
        let limits = port.limits();
        // Its own numbers, but the same ones when the worker's are to be.
        let rng = worker.config().seed.map_or_else(StdRng::from_os_rng, |seed| StdRng::seed_from_u64(!seed));
        let shared = Arc::new(Shared {
            worker: worker.downgrade(),
            me: worker.identity(),
            port: Arc::new(port),
            limits,
            runtime,
            regions: Arc::new(Table::new(counters.clone())),
            counters,
            permits: Arc::new(Semaphore::new(config.transfers_max)),
            next_transfer: AtomicU64::new(1),
            next_tag: AtomicU32::new(1),
            next_right: AtomicU64::new(1),
            spare_windows: Mutex::default(),
            bind_failures: AtomicU32::new(0),
            proof_deadline: worker.config().proof_deadline,
            qps: AtomicUsize::new(0),
            inbox,
            conns: Mutex::default(),
            rng: Mutex::new(rng),
            closing: AtomicBool::new(false),
            over: watch::Sender::new(false),
            config,
        });
        let hooks = Arc::new(Hooks(Arc::downgrade(&shared)));
        worker.attach_bulk(hooks.clone())?;
        worker.attach_observer(hooks)?;
        let (driver, notifications) = Driver::new(shared.clone(), news);
        shared.runtime.spawn(driver.run());
        Ok((Self { owner: Arc::new(Owner { shared }) }, notifications))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared<F>> {
        &self.owner.shared
    }

    pub(crate) fn transfer(&self, request: Request) -> Transfer<F> {
        Transfer::new(self.shared().clone(), request)
    }

    /// What the device allows.
    pub fn limits(&self) -> BulkLimits {
        self.shared().limits
    }

    /// Whether a bulk connection to that peer is up.
    pub fn is_connected(&self, peer: InstanceId) -> bool {
        self.shared().find_conn(peer).is_some_and(|conn| conn.is_up())
    }

    /// Brings a bulk connection to that peer up if there is none; whether there is one then. Transfers do so by themselves:
    /// this is for peers whose transfers are to find it, since they know no address to dial. One attempt, none in the
    /// back-off after a failure, nor without an address.
    pub async fn connect(&self, peer: InstanceId) -> bool {
        let shared = self.shared();
        shared.connect(&shared.conn(peer)).await
    }

    /// Number of the bulk QP to that peer, and the READs that it does at once; `None` while none is up.
    pub fn describe(&self, peer: InstanceId) -> Option<BulkDescription> {
        self.shared().find_conn(peer)?.describe()
    }

    /// Counts since the start, and gauges as they are now.
    pub fn stats(&self) -> BulkStats {
        let shared = self.shared();
        let (regions, regions_parked) = shared.regions.count();
        BulkStats { regions, regions_parked, ..shared.counters.snapshot() }
    }

    /// Takes it down: no new transfers and maps; QPs to ERR; their flushes collected, within
    /// [`BulkConfig::flush_deadline`]; QPs destroyed; regions deregistered; everybody answered. Idempotent.
    pub async fn shutdown(&self) {
        let shared = self.shared();
        let mut over = shared.over.subscribe();
        shared.tell(News::Shutdown);
        // The sender lives as long as `shared`.
        let _ = over.wait_for(|over| *over).await;
    }
}

/// A bulk connection as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BulkDescription {
    /// Our QP's number.
    pub qpn: u32,
    /// READs that we do at once: the window of a GET.
    pub read_window: u8,
    /// READs that we answer at once.
    pub reads_answered: u8,
    /// Notifications that the peer takes at once.
    pub notify_window: u16,
}

impl<F: BulkFabric> fmt::Debug for Bulk<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bulk").field("me", &self.shared().me).field("limits", &self.limits()).finish_non_exhaustive()
    }
}

impl<F: BulkFabric> Shared<F> {
    /// Into the driver's unbounded queue: whoever calls may hold locks, or be the driver.
    pub(crate) fn tell(&self, news: News<F>) {
        // A driver that is gone has answered everybody; what comes later answers as it is dropped.
        let _ = self.inbox.send(news);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    fn find_conn(&self, peer: InstanceId) -> Option<Arc<Conn<F>>> {
        lock(&self.conns).get(&peer).cloned()
    }

    fn conn(&self, peer: InstanceId) -> Arc<Conn<F>> {
        let mut conns = lock(&self.conns);
        let new = || {
            let seed = lock(&self.rng).random();
            let backoff = self.worker.upgrade().map(|worker| worker.config().backoff).unwrap_or_default();
            Arc::new(Conn::new(peer, Exchange::new(self.me, peer, Plane::Bulk, backoff, seed)))
        };
        conns.entry(peer).or_insert_with(new).clone()
    }

    fn all_conns(&self) -> Vec<Arc<Conn<F>>> {
        lock(&self.conns).values().cloned().collect()
    }

    fn random_psn(&self) -> Psn {
        Psn::from_random(lock(&self.rng).random())
    }
}
