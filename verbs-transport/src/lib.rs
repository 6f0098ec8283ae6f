//! Messages between hosts over plain RDMA verbs.

pub mod fabric;
pub mod proto;
pub mod sim;
mod worker;

pub use proto::{
    frame::MessageType,
    link::{LinkCounts, LinkLimits, SendErrorHandler},
};
pub use worker::{
    Admission, AdmissionError, AdmissionState, Borrowed, Config, ConfigError, ConnectError, EpochEnd, FlowStats,
    Handler, Inbound, PeerDescription, Progress, Received, RegisterError, SendError, SendOutcome, StartError, Stats,
    Stream, Worker,
};
