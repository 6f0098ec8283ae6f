//! One worker with bulk memory, and regions with known bytes.

use std::{future::Future, sync::Arc, time::Duration};

use verbs_bootstrap::InstanceId;
use verbs_rma::{Bulk, BulkConfig, Region, RegionId, bulk::Notifications};
use verbs_transport::{
    Config, Inbound, Worker,
    fabric::bulk::{Access, BulkFabric, OwnedBytes},
};

use crate::{lab::Lab, node::Errors};

/// How long a scenario waits for something of bulk memory that must come. A megabyte takes 40 to 200 ms on an emulated
/// device, and a dead peer is noticed in 2 to 4 s.
pub const BULK_PATIENCE: Duration = Duration::from_secs(60);

/// A started worker with bulk memory.
pub struct BulkNode<F: BulkFabric> {
    /// The worker.
    pub worker: Worker<F>,
    /// Its streams.
    pub inbound: Inbound,
    /// Its bulk memory.
    pub bulk: Bulk<F>,
    /// What peers tell.
    pub notifications: Notifications<F>,
    /// Frames that came back to it.
    pub errors: Arc<Errors>,
}

impl<F: BulkFabric> BulkNode<F> {
    /// On host `n`.
    pub async fn start<L: Lab<F = F>>(lab: &L, n: u32) -> Self {
        Self::start_with(lab.fabric(n), lab.config(n), BulkConfig::default()).await
    }

    /// On host `n`, with another configuration of bulk memory.
    pub async fn start_bulk<L: Lab<F = F>>(lab: &L, n: u32, config: BulkConfig) -> Self {
        Self::start_with(lab.fabric(n), lab.config(n), config).await
    }

    /// On that fabric.
    pub async fn start_with(fabric: F, config: Config, bulk: BulkConfig) -> Self {
        let worker = Worker::new(config, fabric).expect("a valid configuration");
        let (bulk, notifications) = Bulk::attach(&worker, bulk).expect("the device has bulk memory");
        let inbound = worker.start().await.expect("the worker starts");
        Self { worker, inbound, bulk, notifications, errors: Arc::default() }
    }

    /// Its name.
    pub fn id(&self) -> InstanceId {
        self.worker.instance()
    }

    /// Learns the other's address.
    pub fn register(&self, other: &Self) {
        let id = self.worker.register(&other.worker.address()).expect("the address is good");
        assert_eq!(id, other.id());
    }

    /// Maps bytes of its own.
    pub async fn map(&self, bytes: Vec<u8>, access: Access) -> Region {
        within(self.bulk.map_all(OwnedBytes::new(bytes), access)).await.expect("it is mapped")
    }

    /// Maps `len` bytes of `fill` for READs by peers or for whatever else.
    pub async fn map_filled(&self, len: usize, fill: u8, access: Access) -> Region {
        self.map(vec![fill; len], access).await
    }

    /// The bytes of a region.
    pub fn bytes(&self, id: RegionId, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.bulk.read_region(id, 0, &mut out).expect("they are within");
        out
    }

    /// Unmaps a region.
    pub async fn unmap(&self, region: Region) {
        within(self.bulk.unmap(region.id)).await.expect("it is unmapped");
    }

    /// Ends it: bulk memory first.
    pub async fn stop(self) {
        within(self.bulk.shutdown()).await;
        self.worker.shutdown().await;
        let stats = self.bulk.stats();
        assert_eq!((stats.regions, stats.qps, stats.in_flight), (0, 0, 0), "left behind: {stats:?}");
    }
}

/// A and B, started, each knowing the other.
pub async fn bulk_pair<L: Lab<F: BulkFabric>>(lab: &L) -> (BulkNode<L::F>, BulkNode<L::F>) {
    bulk_pair_with(lab, &BulkConfig::default()).await
}

/// The same with another configuration.
pub async fn bulk_pair_with<L: Lab<F: BulkFabric>>(lab: &L, config: &BulkConfig) -> (BulkNode<L::F>, BulkNode<L::F>) {
    let a = BulkNode::start_bulk(lab, 1, config.clone()).await;
    let b = BulkNode::start_bulk(lab, 2, config.clone()).await;
    a.register(&b);
    b.register(&a);
    (a, b)
}

/// Byte i is i mod 251: shifted or swapped chunks show.
pub fn numbered(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at % 251).unwrap_or_default()).collect()
}

/// What must come in time.
pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(BULK_PATIENCE, future).await.expect("it ends in time")
}

/// Waits until that is so.
pub async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + BULK_PATIENCE;
    while !so() {
        assert!(tokio::time::Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// `VERBS_BULK_ROUNDS`: how often the scenarios of bulk memory that repeat themselves do so.
///
/// # Panics
///
/// When it is no number.
pub fn asked_rounds() -> Option<u32> {
    let text = std::env::var("VERBS_BULK_ROUNDS").ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("VERBS_BULK_ROUNDS is no number: {text}")))
}
