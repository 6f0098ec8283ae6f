//! Messages between hosts over plain RDMA verbs.

pub mod fabric;
pub mod proto;

/// Placeholder until the worker's errors land.
#[derive(Debug, Clone)]
pub struct SendError;
