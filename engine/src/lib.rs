//! Memory that one host registers and others read and write, by address, with exact reports.
//!
//! | module | holds |
//! |---|---|
//! | `memory` | allocations and their locks, registered ranges, how an address finds its range |
//! | `segment` | what a requester knows of a source's ranges |
//! | `batch` | submissions: checks, execution, reports; asynchronous batches and their states |
//! | `notification` | named messages and the inbox |
//! | `control` | the wire, and what the source decides about a request |
//! | `tcp` | connections and how payloads move over them |
//! | `rdma` | the same over devices: one-use grants over pairs of QPs (feature `rdma`, on by default) |
//! | `budget`, `stats` | what is limited, and what is counted |
//!
//! The guide, with a larger example, is `docs/engine.md`; the bytes are in `docs/engine-wire.md`.
//!
//! ```
//! use std::time::Duration;
//!
//! use verbs_engine::{Config, Direction, Engine, Permission, TransferRequest};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let patience = Duration::from_secs(5);
//! // Somewhere: memory that others may read. Publish endpoint, epoch and address as you like.
//! let source = Engine::new(Config::default())?;
//! let served = source.register_memory(vec![42; 4096].into(), Permission::RemoteRead)?;
//! let (endpoint, epoch, address) = (source.endpoint(), source.epoch(), served.address());
//!
//! // Elsewhere: memory of one's own, and what is known of the source.
//! let requester = Engine::new(Config::default())?;
//! let local = requester.register_memory(vec![0; 4096].into(), Permission::LocalOnly)?;
//! let peer = requester.open_segment(endpoint, epoch, patience)?;
//!
//! let request = TransferRequest { local_address: local.address(), remote_address: address, length: 4096 };
//! let report = requester.submit_and_wait(&peer, Direction::Read, &[request], patience)?;
//! assert!(report.is_complete());
//!
//! let mut first = [0];
//! local.read(0, &mut first)?;
//! assert_eq!(first, [42]);
//! # Ok(())
//! # }
//! ```
//!
//! Calls with a timeout block the caller's thread and need no runtime; those that give a future run on any.

#![deny(unsafe_code)]

mod batch;
mod budget;
mod config;
mod control;
mod deadline;
mod engine;
mod epoch;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod memory;
mod notification;
#[cfg(feature = "rdma")]
mod rdma;
mod segment;
mod shared;
mod stats;
mod tcp;
mod threads;
mod wake;

pub use batch::{
    Batch, BatchError, BatchFinished, BatchId, BatchReport, BatchState, BatchStatus, Direction, Group, LocallyDrained,
    Mode, Profile, SubmitError, TaskState, TaskStatus, Transfer, TransferFailure, TransferRequest, Transport,
};
pub use budget::Exhausted;
pub use config::{Config, ConfigError, ServeDirect, TransportPolicy};
pub use control::{DeviceLink, RemoteDevice, Status, WireError};
pub use engine::{CloseTimeout, Engine, NotifyError, OpenError, StartError};
pub use epoch::{Epoch, NotAnEpoch};
pub use error::{Phase, RemoteEffect, TransferError};
pub use memory::{
    AccessError, HostMemory, MemoryError, OutOfRange, Permission, RegisterError, RegisteredMemory, ResolveError,
    ResolvedAddress, UnregisterError,
};
pub use notification::{Notification, NotificationFailure, NotificationStatus};
#[cfg(feature = "rdma")]
pub use rdma::{RailChoice, RdmaConfig, StartRdmaError};
pub use segment::{Location, RemoteRegion, RemoteSegment, SegmentKind};
#[cfg(feature = "rdma")]
pub use stats::NicStats;
pub use stats::Stats;

/// The guide's examples, as tests.
#[cfg(all(doctest, feature = "rdma"))]
#[doc = include_str!("../../docs/engine.md")]
struct Guide;
