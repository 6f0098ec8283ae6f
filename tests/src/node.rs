//! One worker with its streams and a record of its errors.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use verbs_bootstrap::InstanceId;
use verbs_transport::{
    Config, Inbound, MessageType, Received, SendError, SendErrorHandler, SendOutcome, Stream, Worker, fabric::Fabric,
};

use crate::lab::Lab;

/// How long a scenario waits for something that must come.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Frames that came back, in order.
#[derive(Default)]
pub struct Errors(Mutex<Vec<(Bytes, Bytes, SendError)>>);

impl fmt::Debug for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all().iter().map(|(header, _, error)| (header.clone(), error.to_string()))).finish()
    }
}

impl Errors {
    /// All of them so far.
    ///
    /// # Panics
    ///
    /// When a recorder panicked before.
    pub fn all(&self) -> Vec<(Bytes, Bytes, SendError)> {
        self.0.lock().unwrap().clone()
    }

    /// How many.
    ///
    /// # Panics
    ///
    /// When a recorder panicked before.
    pub fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Fails the test if there is any.
    ///
    /// # Panics
    ///
    /// If there is any.
    pub fn assert_none(&self) {
        assert_eq!(self.count(), 0, "unexpected errors: {self:?}");
    }
}

impl SendErrorHandler for Errors {
    fn on_error(&self, header: Bytes, payload: Bytes, error: SendError) {
        self.0.lock().unwrap().push((header, payload, error));
    }
}

/// A started worker.
pub struct Node<F: Fabric> {
    /// The worker.
    pub worker: Worker<F>,
    /// Its streams.
    pub inbound: Inbound,
    /// Frames that came back to it.
    pub errors: Arc<Errors>,
}

impl<F: Fabric> Node<F> {
    /// A started worker on host `n`.
    pub async fn start<L: Lab<F = F>>(lab: &L, n: u32) -> Self {
        Self::start_with(lab.fabric(n), lab.config(n)).await
    }

    /// A started worker.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub async fn start_with(fabric: F, config: Config) -> Self {
        let worker = Worker::new(config, fabric).expect("a valid configuration");
        let inbound = worker.start().await.expect("the worker starts");
        Self { worker, inbound, errors: Arc::default() }
    }

    /// Its name.
    pub fn id(&self) -> InstanceId {
        self.worker.instance()
    }

    /// Learns the other's address.
    ///
    /// # Panics
    ///
    /// When the address is refused.
    pub fn register(&self, other: &Self) {
        let id = self.worker.register(&other.worker.address()).expect("the address is good");
        assert_eq!(id, other.id());
    }

    /// Sends a frame; errors are recorded.
    pub fn send(
        &self,
        to: InstanceId,
        kind: MessageType,
        header: impl Into<Bytes>,
        payload: impl Into<Bytes>,
    ) -> SendOutcome {
        self.worker.send(to, header.into(), payload.into(), kind, self.errors.clone())
    }

    /// Sends message `n`: header `header-n`, payload `payload-n`. Drops the outcome.
    pub fn send_numbered(&self, to: InstanceId, kind: MessageType, n: u32) {
        let _ = self.send(to, kind, format!("header-{n}"), format!("payload-{n}"));
    }

    /// Ends it.
    pub async fn stop(self) {
        self.worker.shutdown().await;
    }
}

/// The next frame of a stream.
///
/// # Panics
///
/// When none comes in time.
pub async fn next(stream: &mut Stream) -> Received {
    next_within(stream, PATIENCE).await
}

/// The next frame of a stream, within a given time.
///
/// # Panics
///
/// When none comes in time.
pub async fn next_within(stream: &mut Stream, patience: Duration) -> Received {
    match tokio::time::timeout(patience, stream.recv()).await {
        Ok(Some(frame)) => frame,
        Ok(None) => panic!("the stream has ended"),
        Err(_) => panic!("nothing came within {patience:?}"),
    }
}

/// Checks that this is message `n` as [`Node::send_numbered`] sends it.
///
/// # Panics
///
/// When it is not.
pub fn assert_numbered(frame: &Received, n: u32) {
    assert_eq!(frame.header, format!("header-{n}").as_bytes());
    assert_eq!(frame.payload, format!("payload-{n}").as_bytes());
}

/// Bytes i mod 256.
pub fn pattern(len: usize) -> Bytes {
    (0..len).map(|i| u8::try_from(i % 256).unwrap_or_default()).collect()
}
