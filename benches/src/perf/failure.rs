//! Every way in which a measurement ends early, and the exit status of each.

use std::{io, process::ExitCode, sync::Arc, time::Duration};

use verbs_rma::{
    TransferError,
    bulk::{AttachBulkError, MapError, UnmapError},
};
use verbs_transport::{
    AdmissionError, ConfigError, ConnectError, RegisterError, SendError, StartError, fabric::FabricError,
    verbs::OpenError,
};

/// Why there is no result. Each class has its exit status: see [`Failure::exit_status`].
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    Open(Arc<OpenError>),
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("the worker did not start: {0}")]
    Start(Arc<StartError>),
    #[error("cannot listen on port {port}: {source}; choose another with -p, on both sides")]
    Listen { port: u16, source: Arc<io::Error> },
    #[error("no server at {server}: {why}; start `verbs-perf {test}` there first, and give both the same -p")]
    NoServer { server: String, why: String, test: String },
    #[error(
        "{server} speaks version {theirs} of verbs-perf's protocol and this is version {ours}: use one build on both sides"
    )]
    Version { server: String, theirs: u32, ours: u32 },
    #[error("{0}")]
    Refused(String),
    #[error("a message of {bytes} bytes is above the limit of {max} that both sides agreed on (`eager_max_bytes`)")]
    TooLarge { bytes: usize, max: usize },
    #[error("a transfer of {bytes} bytes is above the limit of {max}: both sides pin that much memory")]
    TransferTooLarge { bytes: usize, max: usize },
    #[error("bulk memory is not to be had: {0}")]
    Bulk(Arc<AttachBulkError>),
    #[error("{bytes} bytes of memory cannot be registered: {source}")]
    Map { bytes: usize, source: Arc<MapError> },
    #[error("the memory cannot be taken down: {0}")]
    Unmap(#[from] UnmapError),
    #[error("a transfer failed: {0}")]
    Transfer(#[from] TransferError),
    #[error("the {who} has ended in the middle of the test: its control connection is closed")]
    PeerEnded { who: &'static str },
    #[error("the {who} gave up: {why}")]
    PeerGaveUp { who: &'static str, why: String },
    #[error("nothing came from the {who} for {} s, while waiting for {waiting_for}", after.as_secs())]
    Silence { who: &'static str, after: Duration, waiting_for: &'static str },
    #[error("the control connection failed: {0}")]
    Control(Arc<io::Error>),
    #[error("the other side broke verbs-perf's protocol: {0}")]
    Protocol(String),
    #[error("the peer's address was refused: {0}")]
    Register(#[from] RegisterError),
    #[error("no connection: {0}")]
    Connect(#[from] ConnectError),
    #[error("a message was not delivered: {0}")]
    Send(#[from] SendError),
    #[error("a message never left its queue: {0}")]
    Admission(#[from] AdmissionError),
    #[error("the device is lost: {0}")]
    Device(Arc<FabricError>),
    #[error("{0}")]
    System(Arc<io::Error>),
    #[error("the result cannot be written: {0}")]
    Output(Arc<io::Error>),
}

impl Failure {
    /// The exit status: 2 for numbers that cannot be (as clap has it), 3 for the device, 4 for a server that is not
    /// there, 5 for one that does not fit, 6 for a peer that ended or fell silent, or a connection to it that did, 1 for
    /// all else.
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::TooLarge { .. } | Self::TransferTooLarge { .. } | Self::Config(_) => 2,
            Self::Open(_) | Self::Device(_) | Self::Bulk(_) | Self::Map { .. } => 3,
            Self::NoServer { .. } => 4,
            Self::Version { .. } | Self::Refused(_) | Self::Register(_) => 5,
            // Whether the peer's end or its connection's is noticed first is chance.
            Self::PeerEnded { .. }
            | Self::PeerGaveUp { .. }
            | Self::Silence { .. }
            // Its numbers were checked before: what fails is the other side or the way to it.
            | Self::Transfer(_)
            | Self::Send(SendError::ConnectionLost { .. })
            | Self::Admission(AdmissionError::ConnectionReplaced(_)) => 6,
            _ => 1,
        }
    }

    /// As a process ends with it.
    pub(crate) fn exit_code(&self) -> ExitCode {
        self.exit_status().into()
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        Self::Open(Arc::new(error))
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        Self::Start(Arc::new(error))
    }
}

impl From<FabricError> for Failure {
    fn from(error: FabricError) -> Self {
        Self::Device(Arc::new(error))
    }
}

#[cfg(test)]
mod tests {
    use verbs_transport::InstanceId;

    use super::*;

    #[test]
    fn each_class_has_its_exit_status() {
        let lost =
            SendError::ConnectionLost { peer: InstanceId(1), cause: Arc::new(verbs_transport::EpochEnd::PeerClosed) };
        let (server, test) = ("host:1".to_owned(), "send-lat".to_owned());
        for (failure, status) in [
            (Failure::TooLarge { bytes: 2, max: 1 }, 2),
            (OpenError::NoDevices { kernel_has: Vec::new(), source: None }.into(), 3),
            (Failure::NoServer { server: server.clone(), why: "refused".to_owned(), test }, 4),
            (Failure::Version { server, theirs: 2, ours: 1 }, 5),
            (Failure::Refused("no".to_owned()), 5),
            (Failure::PeerEnded { who: "server" }, 6),
            (Failure::Send(lost), 6),
            (Failure::Send(SendError::NotStarted), 1),
            (Failure::Protocol(String::new()), 1),
        ] {
            assert_eq!(failure.exit_status(), status, "{failure}");
        }
    }
}
