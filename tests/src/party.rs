//! One worker with a rendezvous, its streams and a record of its errors.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use verbs_bootstrap::InstanceId;
use verbs_rma::{
    Rendezvous, RendezvousConfig,
    rendezvous::{Inbound, Stream},
};
use verbs_transport::{
    Config, MessageType, Received, SendOutcome, Worker,
    fabric::{Fabric, bulk::BulkFabric},
};

use crate::{lab::Lab, node::Errors};

/// A started worker with a rendezvous.
pub struct Party<F: Fabric> {
    /// The rendezvous.
    pub rendezvous: Rendezvous<F>,
    /// Its streams.
    pub inbound: Inbound<F>,
    /// Frames and messages that came back to it.
    pub errors: Arc<Errors>,
}

impl<F: BulkFabric> Party<F> {
    /// On host `n`.
    pub async fn start<L: Lab<F = F>>(lab: &L, n: u32, config: RendezvousConfig) -> Self {
        Self::start_with(lab.fabric(n), lab.config(n), config).await
    }

    /// On this fabric.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub async fn start_with(fabric: F, config: Config, rendezvous: RendezvousConfig) -> Self {
        let worker = Worker::new(config, fabric).expect("a valid configuration");
        Self::run(Rendezvous::attach(worker, rendezvous).expect("attached before start")).await
    }
}

impl<F: Fabric> Party<F> {
    /// Starts it.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub async fn run(rendezvous: Rendezvous<F>) -> Self {
        let inbound = rendezvous.start().await.expect("the worker starts");
        Self { rendezvous, inbound, errors: Arc::default() }
    }

    /// Its name.
    pub fn id(&self) -> InstanceId {
        self.rendezvous.worker().instance()
    }

    /// Learns the other's address.
    ///
    /// # Panics
    ///
    /// When the address is refused.
    pub fn register(&self, other: &Self) {
        let id = self.rendezvous.register(&other.rendezvous.worker().address()).expect("the address is good");
        assert_eq!(id, other.id());
    }

    /// Sends a message; errors are recorded.
    pub fn send(
        &self,
        to: InstanceId,
        kind: MessageType,
        header: impl Into<Bytes>,
        payload: impl Into<Bytes>,
    ) -> SendOutcome {
        self.rendezvous.send(to, header.into(), payload.into(), kind, self.errors.clone())
    }

    /// Waits until this is true of its counts.
    ///
    /// # Panics
    ///
    /// When it is not within `patience`.
    pub async fn until(
        &self,
        what: &str,
        patience: Duration,
        done: impl Fn(&verbs_rma::RendezvousStats) -> bool,
    ) -> verbs_rma::RendezvousStats {
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let stats = self.rendezvous.stats();
            if done(&stats) {
                return stats;
            }
            assert!(tokio::time::Instant::now() < deadline, "no {what} within {patience:?}: {stats:#?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Nothing is staged, leased, registered, or asked any more; no slice is out.
    ///
    /// # Panics
    ///
    /// When something is.
    pub async fn assert_empty(&self, patience: Duration) {
        self.until("empty book", patience, |stats| {
            let book = &stats.book;
            let nothing = (book.slots, book.leases, book.rights, book.quarantined_slots) == (0, 0, 0, 0);
            nothing && stats.source_arenas.used == 0 && stats.destination_arenas.used == 0 && stats.asks_waiting == 0
        })
        .await;
    }

    /// Ends it.
    pub async fn stop(self) {
        self.rendezvous.shutdown().await;
    }
}

/// The next message of a stream.
///
/// # Panics
///
/// When none comes in time.
pub async fn next_message<F: Fabric>(stream: &mut Stream<F>, patience: Duration) -> Received {
    match tokio::time::timeout(patience, stream.recv()).await {
        Ok(Some(message)) => message,
        Ok(None) => panic!("the stream has ended"),
        Err(_) => panic!("nothing came within {patience:?}"),
    }
}

/// Bytes of slot `n`: a byte of another slot, or of another place of this one, is seen.
pub fn slot_pattern(n: u64, len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    for (at, piece) in bytes.chunks_mut(8).enumerate() {
        let word = (n << 40 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
        piece.copy_from_slice(&word[..piece.len()]);
    }
    bytes.into()
}
