//! RDMA as a transport: one-use grants, decided by the source alone, over pairs of QPs that are kept.
//!
//! | module | holds |
//! |---|---|
//! | `grant` | one grant's life (pure) |
//! | `exchange` | the order of an operation's frames, and the names in them (pure) |
//! | `identity`, `path`, `wire` | those names; which ports fit; bytes (pure) |
//! | `device`, `mailbox`, `burial` | a NIC, its thread, its completions, and how QPs are given up |
//! | `link`, `cache` | one side's QP of a pair; those that wait for the next operation |
//! | `staging`, `local` | memory between device and registered ranges, or those themselves |
//! | `source`, `flight`, `guard` | an operation at its source, a grant at work, and what all of it covers |
//! | `requester`, `talk`, `carry` | the other half: the way to a grant, what is said, what follows a grant |
//! | `spread`, `spread_data`, `spread_source` | both halves of an operation over several pairs at once |
//! | `rails` | several NICs: pieces, plans, choice, rests; what is due for all of them (pure) |
//! | `routes` | the NICs that an operation goes over, and what is known of them |
//! | `policy` | which transport carries a request |

mod burial;
mod cache;
mod carry;
mod config;
mod device;
mod exchange;
mod flight;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod grant;
mod guard;
mod identity;
mod link;
mod local;
mod mailbox;
mod path;
mod policy;
mod rails;
mod requester;
mod routes;
mod source;
#[cfg(test)]
mod source_tests;
mod spread;
mod spread_data;
mod spread_source;
#[cfg(test)]
mod spread_source_tests;
mod staging;
mod talk;
mod wire;

use std::{
    io,
    sync::{Arc, OnceLock, atomic::AtomicU64},
};

use verbs_transport::fabric::bulk::{BulkFabric, OpenBulkError};

pub use self::config::{RailChoice, RdmaConfig};
use self::{
    cache::Cache,
    device::Device,
    path::PATHS_MAX,
    policy::RdmaPath,
    requester::{RdmaRequester, RequesterNic},
    routes::{Moved, Routes},
    source::RdmaSource,
    staging::Pool,
};
use crate::{
    Config, Epoch, NicStats, Stats,
    batch::DataPath,
    control::{DeviceSource, RemoteDevice},
    shared::Backend,
    tcp::{Buffers, TcpPath},
};

/// Why the RDMA half of an engine did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartRdmaError {
    /// None, or more devices than peers can be told of.
    #[error("{found} RDMA devices were given: an engine takes 1 to 16")]
    Devices {
        /// How many.
        found: usize,
    },
    /// The device does no READs, or has no room for the completion queue.
    #[error(transparent)]
    Open(#[from] OpenBulkError),
    /// The device's CQ does not hold the completions of so many connections.
    #[error("max_connections is {asked}, but a CQ of the device covers {limit}: allow fewer")]
    Connections {
        /// As configured.
        asked: u32,
        /// What the device can do.
        limit: u32,
    },
    /// The system gives no random numbers.
    #[error("no entropy for the names of an RDMA device: {0}")]
    Entropy(getrandom::Error),
    /// No thread, or no descriptors for it.
    #[error("no thread for the completions of an RDMA device: {0}")]
    Thread(#[source] io::Error),
}

/// All devices with both halves over them.
pub(crate) struct Rdma<F: BulkFabric> {
    devices: Vec<Arc<Device<F>>>,
    source: Arc<RdmaSource<F>>,
    requester: OnceLock<Arc<RdmaRequester<F>>>,
    config: RdmaConfig,
}

impl<F: BulkFabric> Rdma<F> {
    pub(crate) fn start(fabrics: Vec<Arc<F>>, config: &RdmaConfig, epoch: Epoch) -> Result<Arc<Self>, StartRdmaError> {
        let found = fabrics.len();
        if !(1..=PATHS_MAX).contains(&found) {
            return Err(StartRdmaError::Devices { found });
        }
        let mut devices: Vec<Arc<Device<F>>> = Vec::new();
        for (fabric, rail) in fabrics.into_iter().zip(0_u8..) {
            match Device::start(fabric, config, rail) {
                Ok(device) => devices.push(device),
                Err(error) => {
                    for device in devices {
                        device.stop();
                    }
                    return Err(error);
                }
            }
        }
        let source = Arc::new(RdmaSource::new(&devices, config, epoch.to_bytes()));
        Ok(Arc::new(Self { devices, source, requester: OnceLock::new(), config: config.clone() }))
    }
}

impl<F: BulkFabric> Backend for Rdma<F> {
    fn source(self: Arc<Self>) -> Arc<dyn DeviceSource> {
        Arc::clone(&self.source) as Arc<dyn DeviceSource>
    }

    fn devices(&self) -> Vec<RemoteDevice> {
        self.devices.iter().map(|device| device.told()).collect()
    }

    fn path(self: Arc<Self>, config: &Config, tcp: &Arc<TcpPath>) -> Arc<dyn DataPath> {
        let requester = self.requester.get_or_init(|| {
            // What is kept is divided: each NIC's regions are its own.
            let keep = self.config.kept_staging_bytes / self.devices.len().max(1) as u64;
            let nic = |device: &Arc<Device<F>>| RequesterNic { device: Arc::clone(device), staging: Pool::new(keep) };
            Arc::new(RdmaRequester {
                nics: self.devices.iter().map(nic).collect(),
                routes: Routes::new(self.devices.len(), self.config.rail_choice),
                config: self.config.clone(),
                epoch: self.source.epoch,
                cache: Cache::new(config.max_kept_connections, config.connection_idle),
                stop: Arc::clone(&tcp.stop),
                // Nothing but frames goes over these.
                buffers: Buffers::default(),
                counters: Arc::clone(&tcp.counters),
                requests: AtomicU64::new(1),
            })
        });
        Arc::new(RdmaPath::new(config.transport, Arc::clone(requester), Arc::clone(tcp)))
    }

    fn interrupt(&self) {
        for device in &self.devices {
            device.interrupt();
        }
    }

    fn stop(&self) {
        if let Some(requester) = self.requester.get() {
            requester.cache.close();
        }
        // All are told before the first is waited for.
        self.interrupt();
        for device in &self.devices {
            device.stop();
        }
        // Behind the last QP.
        if let Some(requester) = self.requester.get() {
            for nic in &requester.nics {
                nic.staging.clear();
            }
        }
        self.source.plain.clear();
        for nic in &self.source.nics {
            nic.windowed.clear();
        }
    }

    fn add_stats(&self, stats: &mut Stats) {
        let grants = self.source.grants.used();
        if let Some(requester) = self.requester.get() {
            stats.kept_connections += requester.cache.kept() as u64;
            stats.kept_staging_bytes += requester.nics.iter().map(|nic| nic.staging.kept_bytes()).sum::<u64>();
            stats.rdma_resting = requester.routes.resting();
        }
        let windowed = self.source.nics.iter().map(|nic| nic.windowed.kept_bytes()).sum::<u64>();
        stats.kept_staging_bytes += self.source.plain.kept_bytes() + windowed;
        stats.rdma_parents = self.source.parents.get();
        stats.grants = grants.count;
        stats.grant_bytes = grants.bytes;
        for device in &self.devices {
            let gauges = &device.gauges;
            stats.rdma_connecting += gauges.connecting.get();
            stats.rdma_busy += gauges.busy.get();
            stats.rdma_idle += gauges.idle.get();
            stats.rdma_closing += gauges.closing.get();
            stats.rdma_stuck += gauges.stuck.get();
        }
    }

    fn nics(&self) -> Vec<NicStats> {
        let moved = self.requester.get().map(|requester| requester.routes.moved()).unwrap_or_default();
        let moved = moved.into_iter().chain(std::iter::repeat(Moved::default()));
        let sample = |(device, moved): (&Arc<Device<F>>, Moved)| {
            let port = device.end().port;
            NicStats {
                device_guid: port.device_guid,
                port: port.port,
                gid: port.gid.0,
                is_up: device.is_up(),
                in_flight_bytes: moved.in_flight,
                estimated_bytes_per_second: moved.estimate,
                requests_completed: moved.operations,
                bytes_completed: moved.bytes,
                sliced_bytes_completed: moved.sliced_bytes,
            }
        };
        self.devices.iter().zip(moved).map(sample).collect()
    }
}
