//! Messages between hosts over plain RDMA verbs.
#![deny(unsafe_code)]

pub mod fabric;
pub mod select;
pub mod verbs;
