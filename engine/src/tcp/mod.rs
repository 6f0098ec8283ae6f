//! TCP as a transport: how bytes move, how connections are served and kept.

mod buffers;
mod client;
mod dial;
mod direct;
mod landing;
mod line;
mod lot;
mod pool;
mod serve;
mod staging;

pub(crate) use buffers::Buffers;
pub(crate) use client::TcpPath;
#[cfg(feature = "rdma")]
pub(crate) use dial::{broken, dial};
pub(crate) use line::{Line, LineError, Stop};
pub(crate) use pool::Pool;
#[cfg(feature = "rdma")]
pub(crate) use pool::is_quiet;
pub(crate) use serve::{Server, ServerParts};
pub(crate) use staging::StagingPool;
