//! What is decided: no I/O, no clock, no lock.

pub mod book;
pub mod handle;
pub mod lease;
pub mod region;
pub mod slice;
pub mod slot;
pub mod tenure;
pub mod transfer;
pub mod wire;
