//! The object-safe face of a worker, for applications that carry several transports side by side.

use std::{future::Future, pin::Pin, sync::Arc};

use bytes::Bytes;
use verbs_bootstrap::{InstanceId, WorkerAddress};

use crate::{
    ConnectError, Inbound, MessageType, PeerDescription, RegisterError, SendErrorHandler, SendOutcome, StartError,
    Stats, Worker, fabric::Fabric,
};

/// A future in a box, as object safety needs it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Sends frames to peers that are known by their address. [`Worker`] implements it over any fabric; its methods have
/// the details of each call.
pub trait Transport: Send + Sync {
    /// This transport's key in a [`WorkerAddress`].
    fn key(&self) -> &'static str;

    /// The worker's name.
    fn instance(&self) -> InstanceId;

    /// What peers need to reach this worker; without an entry before [`Transport::start`].
    fn address(&self) -> WorkerAddress;

    /// Starts on the current tokio runtime.
    fn start(&self) -> BoxFuture<'_, Result<Inbound, StartError>>;

    /// Learns a peer's address and connects nothing.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    fn register(&self, address: &WorkerAddress) -> Result<InstanceId, RegisterError>;

    /// Sends a frame; never blocks.
    fn send(
        &self,
        peer: InstanceId,
        header: Bytes,
        payload: Bytes,
        kind: MessageType,
        on_error: Arc<dyn SendErrorHandler>,
    ) -> SendOutcome;

    /// Largest frame to this peer in bytes; `None` while its limit is unknown.
    fn max_message_size(&self, peer: InstanceId) -> Option<usize>;

    /// Connects if need be; returns when a PING has come back.
    fn ensure_connected(&self, peer: InstanceId) -> BoxFuture<'_, Result<(), ConnectError>>;

    /// The connection to a peer as it is now.
    fn describe(&self, peer: InstanceId) -> Option<PeerDescription>;

    /// Counts since the start.
    fn stats(&self) -> Stats;

    /// Publishes them through the `metrics` facade.
    fn publish_metrics(&self);

    /// Ends everything; idempotent.
    fn shutdown(&self) -> BoxFuture<'_, ()>;
}

impl<F: Fabric> Transport for Worker<F> {
    fn key(&self) -> &'static str {
        self.key()
    }

    fn instance(&self) -> InstanceId {
        self.instance()
    }

    fn address(&self) -> WorkerAddress {
        self.address()
    }

    fn start(&self) -> BoxFuture<'_, Result<Inbound, StartError>> {
        Box::pin(self.start())
    }

    fn register(&self, address: &WorkerAddress) -> Result<InstanceId, RegisterError> {
        self.register(address)
    }

    fn send(
        &self,
        peer: InstanceId,
        header: Bytes,
        payload: Bytes,
        kind: MessageType,
        on_error: Arc<dyn SendErrorHandler>,
    ) -> SendOutcome {
        self.send(peer, header, payload, kind, on_error)
    }

    fn max_message_size(&self, peer: InstanceId) -> Option<usize> {
        self.max_message_size(peer)
    }

    fn ensure_connected(&self, peer: InstanceId) -> BoxFuture<'_, Result<(), ConnectError>> {
        Box::pin(self.ensure_connected(peer))
    }

    fn describe(&self, peer: InstanceId) -> Option<PeerDescription> {
        self.describe(peer)
    }

    fn stats(&self) -> Stats {
        self.stats()
    }

    fn publish_metrics(&self) {
        Self::publish_metrics(self);
    }

    fn shutdown(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.shutdown())
    }
}
