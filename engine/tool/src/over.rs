//! What the command goes over: a device if there is one, else TCP; or what it was told to.

use std::sync::Arc;

use verbs_bootstrap::TcpNet;
use verbs_engine::{Config, Engine, RdmaConfig, TransportPolicy};
use verbs_transport::{
    fabric::SlabSizes,
    verbs::{DeviceConfig, DeviceFabric, OpenError},
};

use crate::Failure;

/// They are for messages, which an engine has none of.
const SLABS: SlabSizes = SlabSizes { receive_slabs: 1, receive_bytes: 64, send_slabs: 1, send_bytes: 64 };

/// As on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Choice {
    /// RDMA where both ends have a device and a path between them, else TCP
    Auto,
    /// TCP, whatever there is
    Tcp,
    /// RDMA, or fail
    Rdma,
}

/// How bytes are to move.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Over {
    /// What bytes go over
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Choice::Auto)]
    pub(crate) transport: Choice,
    /// The RDMA devices, as `rdma link` names them, up to 16; those first, on both hosts, that are on the same side of the
    /// network. Default: the best there is
    #[arg(long = "device", value_name = "NAME,...", value_delimiter = ',', num_args = 1)]
    pub(crate) devices: Vec<String>,
    /// Each request over one pair of devices, however large it is and however many there are
    #[arg(long)]
    pub(crate) no_spread: bool,
}

impl Over {
    /// For what needs no device.
    pub(crate) fn tcp() -> Self {
        Self { transport: Choice::Tcp, devices: Vec::new(), no_spread: false }
    }

    /// An engine with a device, if there is to be one.
    pub(crate) fn start(&self, config: Config) -> Result<Engine, Failure> {
        let transport = match self.transport {
            Choice::Tcp if !self.devices.is_empty() => {
                return Err("--device names a device, --transport tcp uses none".into());
            }
            Choice::Tcp => return Ok(Engine::new(config)?),
            Choice::Auto => TransportPolicy::Auto,
            Choice::Rdma => TransportPolicy::RdmaOnly,
        };
        match self.open() {
            Ok(fabrics) => {
                let config = Config { transport, ..config };
                let rdma = RdmaConfig { spread: !self.no_spread, ..RdmaConfig::default() };
                Ok(Engine::with_rdma_devices(config, &rdma, fabrics)?)
            }
            Err(error) if self.transport == Choice::Rdma || !self.devices.is_empty() => Err(error.into()),
            Err(OpenError::NoDevices { .. }) => Ok(Engine::new(config)?),
            Err(error) => {
                eprintln!("verbs-engine: over TCP, for the RDMA device cannot be used: {error}");
                Ok(Engine::new(config)?)
            }
        }
    }

    /// The devices that are named, or the best there is.
    fn open(&self) -> Result<Vec<Arc<DeviceFabric<TcpNet>>>, OpenError> {
        let open = |device| {
            let config = DeviceConfig { device, slabs: SLABS, cq_depth: 64, ..DeviceConfig::default() };
            DeviceFabric::open(&config, TcpNet::default()).map(Arc::new)
        };
        if self.devices.is_empty() {
            return Ok(vec![open(None)?]);
        }
        self.devices.iter().map(|name| open(Some(name.clone()))).collect()
    }
}
