//! Messages between hosts over plain RDMA verbs.
//!
//! A [`Worker`] opens a port of a device, listens on TCP for its peers' bootstrap, and moves messages over one RC queue
//! pair a peer: ordered, flow-controlled by credits, never dropped in silence.
//!
//! # The names that you need
//!
//! | to | use |
//! |---|---|
//! | open a device; which one, and why | [`DeviceFabric`](verbs::DeviceFabric), [`DeviceConfig`](verbs::DeviceConfig), [`OpenError`](verbs::OpenError) |
//! | run | [`Worker`], [`Config`], [`Progress`] |
//! | be found, and find | [`Worker::address`], [`WorkerAddress`], [`Worker::register`], [`InstanceId`] |
//! | send, and hear of failures | [`Worker::send`], [`MessageType`], [`SendOutcome`], [`SendErrorHandler`], [`SendError`] |
//! | receive | [`Inbound`] and its [`Stream`]s of [`Received`], or a [`Handler`] |
//! | see what goes on | [`Worker::describe`], [`Worker::stats`], [`Worker::publish_metrics`], [`Config::metrics_interval`] |
//! | carry several transports side by side | [`Transport`], the object-safe face of a worker |
//! | keep strangers out | [`Secret`] in [`Config::bootstrap`] |
//! | test without a device | [`sim`] |
//!
//! # Two workers
//!
//! Here on two simulated hosts. On a device, [`verbs::DeviceFabric::open`] takes the place of
//! [`SimWorld::host`](sim::SimWorld::host), and nothing else changes; `examples/hello.rs` is that program.
//!
//! ```
//! use std::sync::Arc;
//! use verbs_transport::{Config, MessageType, SendError, SendOutcome, Worker, sim::{HostConfig, SimConfig, SimWorld}};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let world = SimWorld::new(SimConfig::default());
//! let start = |host: u8| {
//!     let config = Config { bind: ([10, 0, 0, host], 0).into(), ..Config::default() };
//!     Worker::new(config, world.host([10, 0, 0, host], HostConfig::default()))
//! };
//! let (client, server) = (start(1)?, start(2)?);
//! let mut answers = client.start().await?.response;
//! let mut requests = server.start().await?.message;
//!
//! // An address is bytes: publish them as you like. Registering connects nothing yet.
//! let to_server = client.register(&server.address())?;
//! let to_client = server.register(&client.address())?;
//!
//! // A message that is not delivered comes back, once, with the reason.
//! let lost = Arc::new(|_header, _payload, error: SendError| eprintln!("not delivered: {error}"));
//!
//! // The first send connects. `Admitted`: there was room. `Pending`: await it to feel the peer's speed.
//! if let SendOutcome::Pending(room) =
//!     client.send(to_server, "sum".into(), vec![1, 2, 3].into(), MessageType::Message, lost.clone())
//! {
//!     room.await?;
//! }
//! let request = requests.recv().await.ok_or("the server was shut down")?;
//! assert_eq!((&request.header[..], &request.payload[..]), (&b"sum"[..], &[1, 2, 3][..]));
//!
//! let sum = request.payload.iter().sum::<u8>();
//! let _ = server.send(to_client, request.header, vec![sum].into(), MessageType::Response, lost);
//! assert_eq!(answers.recv().await.ok_or("the client was shut down")?.payload, [6_u8][..]);
//!
//! let path = client.describe(to_server).ok_or("not known")?;
//! assert!(path.proven);
//! assert_eq!(path.limits.ok_or("not connected")?.tx_window, 64);
//! tokio::join!(client.shutdown(), server.shutdown());
//! # Ok(())
//! # }
//! ```
//!
//! # The house
//!
//! ```text
//! worker   the asynchronous shell: tokio, sockets, time. Decides nothing about the protocol
//! proto    the protocol: frames, credits, one peer's link, the send queue. No I/O, no clock
//! fabric   the seam: post, poll, arm; a type parameter, so the hot path has no virtual call
//! verbs    ... on a device: owners of context, PD, MR, CQ, SRQ, QP. All of the `unsafe` is here
//! sim      ... in memory, in fake time, with seeded faults
//! select   which device, port and GID, and why
//! ```
//!
//! The crate [`verbs_bootstrap`] below holds the TCP exchange; what a program needs of it is named here, too.
#![deny(unsafe_code)]

pub mod fabric;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod proto;
pub mod select;
pub mod sim;
mod transport;
pub mod verbs;
mod worker;

pub use proto::{
    frame::{Lane, MessageType},
    link::{LinkCounts, LinkLimits, SendErrorHandler},
};
pub use transport::{BoxFuture, Transport};
pub use verbs_bootstrap::{Gid, GidType, InstanceId, Mtu, PortIdentity, Secret, TcpConfig, TcpNet, WorkerAddress};
pub use worker::{
    Admission, AdmissionError, AdmissionState, Alarm, AttachError, Borrowed, BulkAcceptor, Config, ConfigError,
    ConnectError, DrainFlag, DrainPolicy, EpochEnd, FEATURE_PACK, FEATURE_RMA, FlowStats, Handler, HealthError,
    InFlightGuard, Inbound, PeerDescription, PeerFacts, PeerObserver, PeerRun, Progress, Received, RegisterError,
    SendError, SendOutcome, ServiceHandler, StartError, Stats, Stream, WeakWorker, Worker, describe_metrics,
};

/// The README's example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
