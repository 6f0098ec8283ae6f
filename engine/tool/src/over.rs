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
    /// The RDMA device, as `rdma link` names it; default: the best there is
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
}

impl Over {
    /// For what needs no device.
    pub(crate) fn tcp() -> Self {
        Self { transport: Choice::Tcp, device: None }
    }

    /// An engine with a device, if there is to be one.
    pub(crate) fn start(&self, config: Config) -> Result<Engine, Failure> {
        let transport = match self.transport {
            Choice::Tcp if self.device.is_some() => {
                return Err("--device names a device, --transport tcp uses none".into());
            }
            Choice::Tcp => return Ok(Engine::new(config)?),
            Choice::Auto => TransportPolicy::Auto,
            Choice::Rdma => TransportPolicy::RdmaOnly,
        };
        let device =
            DeviceConfig { device: self.device.clone(), slabs: SLABS, cq_depth: 64, ..DeviceConfig::default() };
        match DeviceFabric::open(&device, TcpNet::default()) {
            Ok(fabric) => {
                let config = Config { transport, ..config };
                Ok(Engine::with_rdma(config, &RdmaConfig::default(), Arc::new(fabric))?)
            }
            Err(error) if self.transport == Choice::Rdma || self.device.is_some() => Err(error.into()),
            Err(OpenError::NoDevices { .. }) => Ok(Engine::new(config)?),
            Err(error) => {
                eprintln!("verbs-engine: over TCP, for the RDMA device cannot be used: {error}");
                Ok(Engine::new(config)?)
            }
        }
    }
}
