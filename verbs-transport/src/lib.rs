//! Messages between hosts over plain RDMA verbs.
#![deny(unsafe_code)]

pub mod fabric;
pub mod proto;
pub mod select;
pub mod sim;
mod transport;
pub mod verbs;
mod worker;

pub use proto::{
    frame::MessageType,
    link::{LinkCounts, LinkLimits, SendErrorHandler},
};
pub use transport::{BoxFuture, Transport};
pub use worker::{
    Admission, AdmissionError, AdmissionState, Borrowed, Config, ConfigError, ConnectError, DrainFlag, DrainPolicy,
    EpochEnd, FlowStats, Handler, HealthError, InFlightGuard, Inbound, PeerDescription, Progress, Received,
    RegisterError, SendError, SendOutcome, StartError, Stats, Stream, Worker,
};
