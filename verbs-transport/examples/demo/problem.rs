//! Everything that ends the demo early.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::Notify;
use verbs_transport::{
    AdmissionError, ConfigError, ConnectError, RegisterError, SendError, SendErrorHandler, StartError, verbs::OpenError,
};

/// Longest silence that is waited out at any one point. Every wait is bounded by this or by less.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Why the demo failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Problem {
    #[error("{0}")]
    Open(Arc<OpenError>),
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("the worker did not start: {0}")]
    Start(Arc<StartError>),
    #[error("the secret cannot be used: {0}")]
    Secret(String),
    #[error("the second process cannot be started: {0}")]
    Spawn(String),
    #[error("the second process {0}")]
    Second(String),
    #[error("the address is of no use: {0}")]
    Address(String),
    #[error("the address was refused: {0}")]
    Register(#[from] RegisterError),
    #[error("no connection: {0}")]
    Connect(#[from] ConnectError),
    #[error("a message was not delivered: {0}")]
    Send(#[from] SendError),
    #[error("a message never left its queue: {0}")]
    Admission(#[from] AdmissionError),
    #[error("nothing came for {} s while waiting for {waiting_for}", after.as_secs())]
    Silence { after: Duration, waiting_for: String },
    #[error("message {expected} was due, but message {got} came: one was lost, doubled or out of order")]
    Order { expected: u64, got: u64 },
    #[error("message {seq} of {bytes} bytes has CRC-32 {got:08x}, not {expected:08x} as its header says")]
    Checksum { seq: u64, bytes: usize, expected: u32, got: u32 },
    #[error("the other process broke the demo's own protocol: {0}")]
    Protocol(String),
    #[error("{0}")]
    Finding(String),
}

impl From<OpenError> for Problem {
    fn from(error: OpenError) -> Self {
        Self::Open(Arc::new(error))
    }
}

impl From<StartError> for Problem {
    fn from(error: StartError) -> Self {
        Self::Start(Arc::new(error))
    }
}

impl Problem {
    /// What may help where there is no hardware.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Open(error) if matches!(**error, OpenError::NoDevices { .. }) => {
                Some("or try `cargo softroce demo`, which makes a software device by itself")
            }
            _ => None,
        }
    }
}

/// The first thing that went wrong outside the caller's own steps: a frame that came back, or the other's death.
#[derive(Default)]
pub(crate) struct Trouble {
    first: OnceLock<Problem>,
    told: Notify,
}

impl fmt::Debug for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Trouble").field(&self.first.get()).finish()
    }
}

impl Trouble {
    /// Keeps the first.
    pub(crate) fn report(&self, problem: Problem) {
        let _ = self.first.set(problem);
        self.told.notify_waiters();
    }

    /// Waits for it, for ever if all is well.
    pub(crate) async fn first(&self) -> Problem {
        loop {
            let told = self.told.notified();
            if let Some(problem) = self.first.get() {
                return problem.clone();
            }
            told.await;
        }
    }
}

impl SendErrorHandler for Trouble {
    fn on_error(&self, _header: Bytes, _payload: Bytes, error: SendError) {
        self.report(error.into());
    }
}
