//! Remote memory over plain RDMA verbs.
//!
//! | to | use |
//! |---|---|
//! | offer a payload, and pull one | [`Rendezvous::offer`], [`Rendezvous::pull`], [`Handle`] |
//! | send messages of any size | [`Rendezvous::send`], and the [`Inbound`](rendezvous::Inbound) of [`Rendezvous::start`] |
//! | hold leases and references yourself | [`Rendezvous::stage_with`], [`Rendezvous::get`], [`Rendezvous::release`] |
//! | READ and WRITE memory of peers as you like | [`Bulk`], [`Region`] |
//! | see which way payloads go | [`Rendezvous::stats`], [`PathStats`], [`Rendezvous::publish_metrics`] |
//!
//! # One offers, the other pulls
//!
//! Here on two simulated hosts; `examples/file.rs` does it with a file, on a device.
//!
//! ```
//! use verbs_rma::{Rendezvous, RendezvousConfig};
//! use verbs_transport::{Config, Worker, sim::{HostConfig, SimConfig, SimWorld}};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let world = SimWorld::new(SimConfig::default());
//! let start = |host: u8| {
//!     let config = Config { bind: ([10, 0, 0, host], 0).into(), ..Config::default() };
//!     Worker::new(config, world.host([10, 0, 0, host], HostConfig::default()))
//! };
//! let small = RendezvousConfig { arena_bytes: 1 << 20, ..RendezvousConfig::default() };
//! let owner = Rendezvous::attach(start(1)?, small.clone())?;
//! let consumer = Rendezvous::attach(start(2)?, small)?;
//! // Attached first, then started: peers hear of it when they connect.
//! let (_inbound, _also) = (owner.start().await?, consumer.start().await?);
//!
//! // The payload stays with its owner. The handle is 16 bytes, or text: hand it over as you like.
//! let handle = owner.offer(vec![7; 300_000]).await?;
//!
//! consumer.register(&owner.worker().address())?;
//! let mut bytes = Vec::new();
//! let pulled = consumer.pull(handle).on_progress(|done, total| assert!(done <= total)).into(&mut bytes).await?;
//! assert_eq!((pulled.bytes, &bytes[..]), (300_000, &[7; 300_000][..]));
//! assert!(pulled.path.is_ok(), "by RDMA READ: the owner's processor had no part in it");
//!
//! owner.withdraw(handle);
//! tokio::join!(owner.shutdown(), consumer.shutdown());
//! # Ok(())
//! # }
//! ```
//!
//! # The house
//!
//! ```text
//! rendezvous   staging, leases, pulling, messages of any size (docs/rendezvous.md)
//! bulk         a second QP for each pair of peers: GET, PUT, notifications (docs/rma.md)
//! proto        what both decide. No I/O, no clock, no lock
//! arena        memory in slices
//! ```
#![deny(unsafe_code)]

mod arena;
pub mod bulk;
mod config;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod get;
pub mod proto;
mod put;
mod read_path;
mod region;
pub mod rendezvous;
mod stats;

pub use bulk::{Bulk, BulkConfig, TransferError};
pub use config::{RendezvousConfig, RendezvousConfigError};
pub use error::{AskError, PullError, StageError};
pub use proto::{
    handle::{Handle, ParseHandleError},
    region::{RegionId, UseError},
    wire::{Metadata, PathReason, RefusalCode},
};
pub use region::{Map, Region, RegionAccessError, RemoteRange, UnmapFuture};
pub use rendezvous::{Rendezvous, RendezvousError};
pub use stats::{PathStats, RendezvousStats};
