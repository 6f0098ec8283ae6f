//! An in-memory HCA in fake time, with seeded faults.

mod config;
mod cq;
mod fabric;
mod fault;
mod hca;
mod net;
mod qp;
mod srq;
mod stats;
#[cfg(test)]
mod tests;
mod wire;
mod world;

pub use config::{HostConfig, SimConfig};
pub use fabric::{SimFabric, SimQp};
pub use fault::{Faults, NetFaults};
pub use net::{SimListener, SimNet, SimStream};
pub use stats::{FaultCounts, HostReport, ReceiveSlabCount, Report, Stats};
pub use world::SimWorld;
