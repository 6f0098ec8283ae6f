//! Messages between hosts over plain RDMA verbs.

pub mod fabric;
pub mod sim;
