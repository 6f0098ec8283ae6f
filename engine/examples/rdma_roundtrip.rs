//! As `tcp_roundtrip`, over this machine's RDMA device; where there is none, over two simulated ones.

#![allow(unreachable_pub, reason = "a test runs it as a module")]

use std::{error::Error, sync::Arc, time::Duration};

use verbs_bootstrap::TcpNet;
use verbs_engine::{Config, Direction, Engine, Permission, RdmaConfig, TransferRequest, Transport, TransportPolicy};
use verbs_transport::{
    fabric::{
        SlabSizes,
        bulk::{BulkFabric, WindowPolicy},
    },
    sim::{HostConfig, SimConfig, SimWorld},
    verbs::{DeviceConfig, DeviceFabric},
};

const LENGTH: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(10);
/// They are for messages, which an engine has none of.
const SLABS: SlabSizes = SlabSizes { receive_slabs: 1, receive_bytes: 64, send_slabs: 1, send_bytes: 64 };

fn main() -> Result<(), Box<dyn Error>> {
    println!("{}", run()?);
    println!("rdma_roundtrip: PASSED ({LENGTH} bytes, compared)");
    Ok(())
}

/// What it went over.
///
/// # Errors
///
/// Whatever went wrong.
pub fn run() -> Result<String, Box<dyn Error>> {
    let open = || {
        let config = DeviceConfig { slabs: SLABS, cq_depth: 64, ..DeviceConfig::default() };
        DeviceFabric::open(&config, TcpNet::default()).map(Arc::new)
    };
    // Both engines may have a device of the same name, opened twice.
    match open().and_then(|source| Ok((source, open()?))) {
        Ok((source, requester)) => roundtrip(source, requester).map(|how| format!("over the device: {how}")),
        Err(why) => {
            let world = SimWorld::new(SimConfig::default());
            let config = HostConfig { slabs: SLABS, windows: WindowPolicy::Auto, ..HostConfig::default() };
            let host = |n: u8| Arc::new(world.host([10, 0, 0, n], config));
            let how = roundtrip(host(1), host(2))?;
            Ok(format!("no device ({})\nover simulated devices: {how}", why.to_string().lines().next().unwrap_or("?")))
        }
    }
}

fn roundtrip<F: BulkFabric>(source: Arc<F>, requester: Arc<F>) -> Result<String, Box<dyn Error>> {
    // Not the default: here a way over TCP would hide that the device does not work.
    let config = Config { transport: TransportPolicy::RdmaOnly, ..Config::default() };
    let source = Engine::with_rdma(config.clone(), &RdmaConfig::default(), source)?;
    let served = source.register_memory(vec![0; LENGTH].into(), Permission::RemoteReadWrite)?;

    let requester = Engine::with_rdma(config, &RdmaConfig::default(), requester)?;
    let sent: Vec<u8> = (0..=250).cycle().take(LENGTH).collect();
    let outgoing = requester.register_memory(sent.clone().into(), Permission::LocalOnly)?;
    let incoming = requester.register_memory(vec![0; LENGTH].into(), Permission::LocalOnly)?;

    // From here on nothing differs from TCP.
    let peer = requester.open_segment(source.endpoint(), source.epoch(), PATIENCE)?;
    let request =
        |local_address| TransferRequest { local_address, remote_address: served.address(), length: LENGTH as u64 };
    let write = [request(outgoing.address())];
    let wrote = requester.submit_and_wait(&peer, Direction::Write, &write, PATIENCE)?.into_result()?;
    let read = [request(incoming.address())];
    let read = requester.submit_and_wait(&peer, Direction::Read, &read, PATIENCE)?.into_result()?;

    let mut received = vec![0; LENGTH];
    incoming.read(0, &mut received)?;
    if received != sent || wrote.transport != Some(Transport::Rdma) || read.transport != Some(Transport::Rdma) {
        return Err("what came back is not what was sent, or came another way".into());
    }
    let pairs = requester.stats().rdma_idle;
    Ok(format!("wrote {} bytes and read {}; {pairs} pair of QPs kept", wrote.completed_bytes, read.completed_bytes))
}
