//! Payloads that stay with their owner until a consumer pulls them, under a lease. See `docs/rendezvous.md`.

mod asks;
mod consumer;
mod inner;
mod lease;
mod metrics;
mod observe;
mod offer;
mod owner;
mod pull;
mod puller;
mod reads;
mod reaper;
mod service;
mod sink;
mod streams;
mod transparent;

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use verbs_transport::{
    AttachError, InstanceId, RegisterError, StartError, Worker, WorkerAddress,
    fabric::{Fabric, bulk::BulkFabric},
};

use self::{inner::Inner, observe::Observer, reads::Reads, service::Service};
pub use self::{
    lease::Lease,
    metrics::describe_metrics,
    offer::Source,
    owner::StageOptions,
    pull::{Destination, Pull, Pulled},
    streams::{Inbound, Stream},
};
use crate::{
    bulk::{AttachBulkError, Bulk, BulkConfig},
    config::{RendezvousConfig, RendezvousConfigError},
    read_path::ReadPath,
    stats::RendezvousStats,
};

/// Stages payloads for peers, and pulls theirs. One per worker; cheap to clone, all clones are one.
pub struct Rendezvous<F: Fabric> {
    inner: Arc<Inner<F>>,
}

impl<F: Fabric> Clone for Rendezvous<F> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<F: Fabric> fmt::Debug for Rendezvous<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rendezvous").field("worker", &self.inner.worker).finish_non_exhaustive()
    }
}

/// A rendezvous could not be attached to its worker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// A number of the configuration is out of its range.
    #[error(transparent)]
    Config(#[from] RendezvousConfigError),
    /// The worker runs already, or has a service of its own.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Bulk memory could not be attached; where it is only the device that has none, chunks take its place.
    #[error(transparent)]
    Bulk(#[from] AttachBulkError),
}

impl<F: Fabric> Rendezvous<F> {
    /// A rendezvous on a worker that is not started yet, without RDMA: every payload goes by chunks.
    ///
    /// # Errors
    ///
    /// [`RendezvousError`].
    pub fn chunked(worker: Worker<F>, config: RendezvousConfig) -> Result<Self, RendezvousError> {
        Self::with_path(worker, config, None)
    }

    fn with_path(
        worker: Worker<F>,
        config: RendezvousConfig,
        reads: Option<Arc<dyn ReadPath>>,
    ) -> Result<Self, RendezvousError> {
        config.validate()?;
        let (service, requests) = Service::new();
        let inner = Arc::new(Inner::new(worker, config, reads, requests));
        service.serve(&inner);
        inner.worker.attach_service(Arc::new(service))?;
        inner.worker.attach_observer(Arc::new(Observer(Arc::downgrade(&inner))))?;
        Ok(Self { inner })
    }

    /// Starts the worker, as [`Worker::start`] does, with streams on which messages arrive whole that were staged by
    /// their sender.
    ///
    /// # Errors
    ///
    /// As [`Worker::start`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn start(&self) -> Result<Inbound<F>, StartError> {
        self.inner.run();
        let inbound = self.inner.worker.start().await?;
        Ok(Inbound::new(inbound, &self.inner))
    }

    /// The worker underneath.
    pub fn worker(&self) -> &Worker<F> {
        &self.inner.worker
    }

    /// The configuration that it runs with.
    pub fn config(&self) -> &RendezvousConfig {
        &self.inner.config
    }

    /// Learns a peer's address and connects nothing, as [`Worker::register`]; from then on its handles can be pulled.
    ///
    /// # Errors
    ///
    /// As [`Worker::register`].
    pub fn register(&self, address: &WorkerAddress) -> Result<InstanceId, RegisterError> {
        let peer = self.inner.worker.register(address)?;
        if let Ok(endpoint) = address.endpoint() {
            self.inner.learn(endpoint.incarnation.0, peer);
        }
        Ok(peer)
    }

    /// Counts since the start.
    pub fn stats(&self) -> RendezvousStats {
        self.inner.stats()
    }

    /// Ends all that is staged and leased, takes every right back, then shuts the worker down. Idempotent.
    pub async fn shutdown(&self) {
        self.inner.close();
        if tokio::time::timeout(CLOSE_WITHIN, self.inner.drained()).await.is_err() {
            let left = self.inner.stats().book;
            tracing::error!(?left, "rights to READ are left; their memory is kept");
        }
        if let Some(reads) = &self.inner.reads {
            reads.shutdown().await;
        }
        self.inner.worker.shutdown().await;
    }
}

impl<F: BulkFabric> Rendezvous<F> {
    /// A rendezvous on a worker that is not started yet, with bulk memory of its own for READs, on the current tokio runtime.
    /// Where the device has none,
    /// or `reads` is off, everything goes by chunks; the reason is logged once, and counted with each payload.
    ///
    /// # Errors
    ///
    /// [`RendezvousError`].
    pub fn attach(worker: Worker<F>, config: RendezvousConfig) -> Result<Self, RendezvousError> {
        config.validate()?;
        if !config.reads {
            return Self::chunked(worker, config);
        }
        match Bulk::attach(&worker, BulkConfig::default()) {
            Ok((bulk, _notifications)) => Self::with_bulk(worker, bulk, config),
            Err(error @ AttachBulkError::Open(_)) => {
                tracing::warn!(%error, "no RDMA path: payloads go by chunks");
                Self::chunked(worker, config)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The same with bulk memory that the application has attached, and uses for itself, too. [`Rendezvous::shutdown`] takes
    /// it down.
    ///
    /// # Errors
    ///
    /// [`RendezvousError`].
    pub fn with_bulk(worker: Worker<F>, bulk: Bulk<F>, config: RendezvousConfig) -> Result<Self, RendezvousError> {
        let reads = Arc::new(Reads::new(bulk, &config));
        Self::with_path(worker, config, Some(reads))
    }
}

/// For rights that are being made or taken back at the end.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// No payload.
const NOTHING: Bytes = Bytes::new();
