//! Where a scenario runs.

use std::{future::Future, net::SocketAddr, sync::Arc, time::Duration};

use verbs_bootstrap::{InstanceId, Mtu, TcpNet};
use verbs_transport::{
    Config,
    fabric::{Fabric, SlabSizes, bulk::WindowPolicy},
    sim::{Faults, HostConfig, SimConfig, SimFabric, SimWorld},
    verbs::{DeviceConfig, DeviceFabric},
};

use crate::leaks::Census;

/// Makes fabrics and the configurations of the workers on them. Hosts are numbered from 1.
pub trait Lab: Send + Sync + 'static {
    /// The fabric.
    type F: Fabric;

    /// The fabric of host `n`, with these slabs.
    fn fabric_with(&self, n: u32, slabs: SlabSizes) -> Self::F;

    /// The same with a CQ of that depth; a device may round up.
    fn fabric_cq(&self, n: u32, slabs: SlabSizes, cq_depth: u32) -> Self::F;

    /// The fabric of host `n`, with a path MTU of at most this.
    fn fabric_mtu(&self, n: u32, mtu: Mtu) -> Self::F;

    /// The configuration of a worker on host `n`.
    fn config(&self, n: u32) -> Config;

    /// Times to repeat what is repeated: fewer on a device under emulation.
    fn rounds(&self, sim: u32, device: u32) -> u32;

    /// RNR NAKs so far, over all hosts.
    fn rnr_naks(&self) -> u64;

    /// The fabric of host `n`.
    fn fabric(&self, n: u32) -> Self::F {
        self.fabric_with(n, SMALL_SLABS)
    }
}

/// Enough for a few peers, and quick to pin under emulation.
pub const SMALL_SLABS: SlabSizes =
    SlabSizes { receive_slabs: 512, receive_bytes: 8192, send_slabs: 64, send_bytes: 8192 };

/// Simulated hosts 10.0.0.n.
pub struct SimLab {
    /// The world.
    pub world: SimWorld,
    /// Whether its devices' memory windows are used.
    pub windows: WindowPolicy,
}

impl SimLab {
    /// A world with 2 to 5 µs from host to host.
    pub fn new(seed: u64, faults: Faults) -> Self {
        Self::of(Self::timed(seed, faults))
    }

    /// The same, where bulk memory moves at 100 MB a second on each connection: there is time for things to happen.
    pub fn new_bulk(seed: u64, faults: Faults) -> Self {
        let config = SimConfig { bulk_bytes_per_second: 100_000_000, ..Self::timed(seed, faults) };
        Self::of(config)
    }

    /// A world of these settings.
    pub fn of(config: SimConfig) -> Self {
        Self { world: SimWorld::new(config), windows: WindowPolicy::Auto }
    }

    /// The same with memory windows used or not.
    #[must_use]
    pub fn with_windows(self, windows: WindowPolicy) -> Self {
        Self { windows, ..self }
    }

    fn host(&self, n: u32, config: HostConfig) -> SimFabric {
        self.world.host(Self::addr(n), HostConfig { windows: self.windows, ..config })
    }

    fn timed(seed: u64, faults: Faults) -> SimConfig {
        let us = Duration::from_micros;
        SimConfig { seed, faults, latency: us(2)..=us(5), net_latency: us(20)..=us(50), ..SimConfig::default() }
    }

    /// The address of host `n`.
    pub fn addr(n: u32) -> std::net::Ipv4Addr {
        std::net::Ipv4Addr::from(0x0a00_0000 + n)
    }
}

impl Lab for SimLab {
    type F = SimFabric;

    fn fabric_with(&self, n: u32, slabs: SlabSizes) -> SimFabric {
        // Room for the send queues of as many peers as the SRQ carries.
        let cq_depth = HostConfig::default().cq_depth.max(slabs.receive_slabs.saturating_mul(4));
        self.host(n, HostConfig { slabs, cq_depth, ..HostConfig::default() })
    }

    fn fabric_cq(&self, n: u32, slabs: SlabSizes, cq_depth: u32) -> SimFabric {
        self.host(n, HostConfig { slabs, cq_depth, ..HostConfig::default() })
    }

    fn fabric_mtu(&self, n: u32, mtu: Mtu) -> SimFabric {
        self.host(n, HostConfig { slabs: SMALL_SLABS, mtu, ..HostConfig::default() })
    }

    fn config(&self, n: u32) -> Config {
        Config {
            instance: InstanceId(u128::from(n)),
            bind: SocketAddr::from((Self::addr(n), 0)),
            seed: Some(self.world.seed() ^ (u64::from(n) << 32)),
            ..Config::default()
        }
    }

    fn rounds(&self, sim: u32, _device: u32) -> u32 {
        sim
    }

    fn rnr_naks(&self) -> u64 {
        self.world.stats().rnr_naks
    }
}

/// The RDMA device of this machine, over loopback TCP.
pub struct DeviceLab {
    /// What workers are opened with.
    pub device: DeviceConfig,
}

impl DeviceLab {
    /// The device that is found.
    pub fn new() -> Self {
        Self { device: DeviceConfig::default() }
    }

    #[expect(clippy::unused_self, reason = "a lab opens its own device")]
    fn open(&self, config: &DeviceConfig) -> DeviceFabric<TcpNet> {
        DeviceFabric::open(config, TcpNet::default())
            .expect("a device test needs an RDMA device: `cargo softroce test`")
    }
}

impl Default for DeviceLab {
    fn default() -> Self {
        Self::new()
    }
}

impl Lab for DeviceLab {
    type F = DeviceFabric<TcpNet>;

    fn fabric_with(&self, _n: u32, slabs: SlabSizes) -> Self::F {
        self.open(&DeviceConfig { slabs, ..self.device.clone() })
    }

    fn fabric_cq(&self, _n: u32, slabs: SlabSizes, cq_depth: u32) -> Self::F {
        self.open(&DeviceConfig { slabs, cq_depth, ..self.device.clone() })
    }

    fn fabric_mtu(&self, _n: u32, mtu: Mtu) -> Self::F {
        self.open(&DeviceConfig { slabs: SMALL_SLABS, mtu_cap: Some(mtu), ..self.device.clone() })
    }

    fn config(&self, n: u32) -> Config {
        Config { instance: InstanceId(u128::from(n)), ..Config::default() }
    }

    fn rounds(&self, _sim: u32, device: u32) -> u32 {
        device
    }

    fn rnr_naks(&self) -> u64 {
        crate::leaks::hw_counter("send_rnr_err") + crate::leaks::hw_counter("rcvd_rnr_err")
    }
}

/// Runs a scenario on simulated hosts in fake time, and checks that everything has come home.
///
/// # Panics
///
/// When the scenario does, or when something is left in the devices.
pub fn on_sim<S, R>(seed: u64, faults: Faults, scenario: S)
where
    S: FnOnce(Arc<SimLab>) -> R,
    R: Future<Output = ()>,
{
    on_sim_lab(SimLab::new(seed, faults), scenario);
}

/// The same on a lab that is made already.
///
/// # Panics
///
/// As [`on_sim`].
pub fn on_sim_lab<S, R>(lab: SimLab, scenario: S)
where
    S: FnOnce(Arc<SimLab>) -> R,
    R: Future<Output = ()>,
{
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    let lab = Arc::new(lab);
    let printer = PrintSeed(lab.world.seed());
    runtime.block_on(async {
        scenario(lab.clone()).await;
        // Tasks that were told to end get their turn.
        tokio::time::sleep(Duration::from_secs(1)).await;
    });
    let report = lab.world.report();
    assert!(report.is_quiet(), "something was left behind: {report}");
    std::mem::forget(printer);
}

/// Runs a scenario on simulated hosts in real time, on so many threads, where a message takes no time.
///
/// # Panics
///
/// As [`on_sim`].
pub fn on_sim_threads<S, R>(threads: usize, scenario: S)
where
    S: FnOnce(Arc<SimLab>) -> R,
    R: Future<Output = ()>,
{
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build().expect("a runtime");
    let world = runtime.block_on(async { SimWorld::new(SimConfig::seeded(1)) });
    let lab = Arc::new(SimLab { world, windows: WindowPolicy::Auto });
    runtime.block_on(async {
        scenario(lab.clone()).await;
        // Tasks that were told to end get their turn.
        for _ in 0..500 {
            if lab.world.report().is_quiet() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let report = lab.world.report();
    assert!(report.is_quiet(), "something was left behind: {report}");
}

/// Says the seed when a scenario panics.
struct PrintSeed(u64);

impl Drop for PrintSeed {
    fn drop(&mut self) {
        eprintln!("this was seed {}", self.0);
    }
}

/// Runs a scenario on the RDMA device in real time, and checks that no descriptor, QP, MR or thread is left.
///
/// # Panics
///
/// When the scenario does, without a device, or when something is left.
pub fn on_device<S, R>(lab: DeviceLab, scenario: S)
where
    S: FnOnce(Arc<DeviceLab>) -> R,
    R: Future<Output = ()>,
{
    // One test at a time: they share the device, two processors, and the counts.
    let _turn = crate::leaks::device_turn();
    let before = Census::take();
    let lab = Arc::new(lab);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(scenario(lab));
    runtime.shutdown_timeout(Duration::from_secs(5));
    before.assert_same();
}
