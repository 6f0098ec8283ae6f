//! What needs no payload of the user's: `list`, `stats`, `notify`.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Instant,
};

use serde_json::{Value, json};
use verbs_engine::{
    Config, DeviceLink, Direction, Engine, Notification, Permission, RemoteDevice, RemoteRegion, RemoteSegment,
    TransferRequest,
};

use crate::{
    Failure,
    args::{Notify, Peer},
    index::{self, INDEX_REGION, Index, STATS_REGION},
    output::Output,
    over::Over,
};

/// An engine that asks, and the source that it asks.
pub(crate) struct Session {
    pub(crate) engine: Engine,
    pub(crate) source: RemoteSegment,
    deadline: Instant,
}

impl Session {
    /// `chunk` is the largest payload that will be asked for.
    pub(crate) fn open(peer: &Peer, chunk: u64, over: &Over) -> Result<Self, Failure> {
        let deadline = Instant::now() + peer.timeout;
        // Nobody needs to reach this engine.
        let loopback = match peer.ticket.endpoint.ip() {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        let config = Config {
            bind: (loopback, 0).into(),
            source_workers: 1,
            max_payload_bytes: chunk.max(Config::default().max_payload_bytes),
            max_submission_bytes: 1 << 30,
            ..Config::default()
        };
        let engine = over.start(config)?;
        let source = engine.open_segment(peer.ticket.endpoint, peer.ticket.epoch, peer.timeout)?;
        Ok(Self { engine, source, deadline })
    }

    /// What is left of the time for everything.
    pub(crate) fn left(&self) -> std::time::Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    pub(crate) fn index(&self) -> Result<Index, Failure> {
        let index: Index = index::parse(&self.read_region(INDEX_REGION)?, "list of names")?;
        match index.verbs_engine_index {
            index::VERSION => Ok(index),
            other => Err(format!("the source's list is of version {other}, not {}", index::VERSION).into()),
        }
    }

    fn read_region(&self, id: u64) -> Result<Vec<u8>, Failure> {
        let region: RemoteRegion = *self
            .source
            .regions()
            .iter()
            .find(|region| region.id == id)
            .ok_or("the source is not `verbs-engine serve`: it has no list of names")?;
        let mut bytes = vec![0; usize::try_from(region.length)?];
        let local = self.engine.register_memory(bytes.clone().into(), Permission::LocalOnly)?;
        let request =
            TransferRequest { local_address: local.address(), remote_address: region.address, length: region.length };
        self.engine.submit_and_wait(&self.source, Direction::Read, &[request], self.left())?.into_result()?;
        local.read(0, &mut bytes)?;
        self.engine.unregister_memory(&local)?;
        Ok(bytes)
    }
}

pub(crate) fn list(peer: &Peer, output: Output) -> Result<(), Failure> {
    let session = Session::open(peer, 0, &Over::tcp())?;
    let (index, name, devices) = (session.index()?, session.source.name(), session.source.devices());
    let width = index.entries.iter().map(|entry| entry.length.to_string().len()).max().unwrap_or(0);
    let line = |entry: &index::Entry| {
        let access = if entry.writable { "rw" } else { "r-" };
        format!("{access} {:>width$} {}", entry.length, entry.name)
    };
    let title = (!name.is_empty()).then(|| format!("source {name}"));
    let lines = title.into_iter().chain(devices.iter().map(device_line)).chain(index.entries.iter().map(line));
    let lines: Vec<String> = lines.collect();
    let devices: Vec<Value> = devices.iter().map(device_json).collect();
    output.result(&json!({ "name": name, "devices": devices, "entries": index.entries }), &lines.join("\n"));
    Ok(())
}

fn link_name(device: &RemoteDevice) -> &'static str {
    match device.link {
        DeviceLink::InfiniBand => "InfiniBand",
        DeviceLink::Ethernet => "Ethernet",
        _ => "unknown",
    }
}

fn device_line(device: &RemoteDevice) -> String {
    let node = device.numa_node.map(|node| format!(", NUMA node {node}")).unwrap_or_default();
    format!("device {} port {}, {}, GID {}{node}", device.name, device.port, link_name(device), device.gid)
}

fn device_json(device: &RemoteDevice) -> Value {
    let RemoteDevice { name, port, gid, numa_node, .. } = device;
    json!({ "name": name, "port": port, "link": link_name(device), "gid": gid.to_string(), "numa_node": numa_node })
}

pub(crate) fn stats(peer: &Peer, output: Output) -> Result<(), Failure> {
    let bytes = Session::open(peer, 0, &Over::tcp())?.read_region(STATS_REGION)?;
    let stats: serde_json::Map<String, Value> = index::parse(&bytes, "counters")?;
    let lines: Vec<String> = stats.iter().map(|(name, value)| format!("{name:<22} {value}")).collect();
    output.result(&Value::Object(stats), &lines.join("\n"));
    Ok(())
}

pub(crate) fn notify(args: &Notify, output: Output) -> Result<(), Failure> {
    let session = Session::open(&args.peer, 0, &Over::tcp())?;
    session.engine.send_notification(&session.source, &Notification::new(&args.name, &args.message), session.left())?;
    output.result(&json!({ "delivered": true }), "delivered");
    Ok(())
}
