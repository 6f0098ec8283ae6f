//! What an RDMA device grants and how it behaves, measured: as a table, or with `--json` as JSON.
//!
//! ```text
//! cargo run --example probe -- [--json] [--device NAME] [--touch-link]
//! ```
//!
//! It sends between QPs of the same port, so no second host is needed. `--touch-link` also takes the port's network
//! device down and up again, to see which events come: not on a machine that needs that link.

mod environment;
mod facts;
mod measure;

use std::{error::Error, process::ExitCode};

use facts::Facts;
use verbs_bootstrap::{TcpConfig, TcpNet};
use verbs_transport::{
    fabric::{Fabric, SlabSizes},
    verbs::{DeviceConfig, DeviceFabric},
};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("probe: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .init();
    let mut json = false;
    let mut touch_link = false;
    let mut device = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = true,
            "--touch-link" => touch_link = true,
            "--device" => device = Some(arguments.next().ok_or("--device needs a name")?),
            other => {
                return Err(format!("unknown argument {other:?}; there are --json, --device NAME, --touch-link").into());
            }
        }
    }

    let config = DeviceConfig {
        device,
        slabs: SlabSizes { receive_slabs: 64, receive_bytes: 4096, send_slabs: 1, send_bytes: 4096 },
        cq_depth: 1000,
        ..DeviceConfig::default()
    };
    let open = || DeviceFabric::open(&config, TcpNet::new(&TcpConfig::default()));
    let fabric = open()?;
    let mut facts = Facts::default();
    environment::read(&mut facts);
    device_facts(&mut facts, &fabric)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    drop(fabric);
    // One fabric for each measurement: what one leaves in the SRQ or CQ does not reach the next.
    measure::queues(&mut facts, &open()?);
    runtime.block_on(async {
        measure::srq_limit(&mut facts, &open()?).await?;
        measure::write_with_imm(&mut facts, &open()?)?;
        measure::no_receive(&mut facts, &open()?).await?;
        measure::dead_peer(&mut facts, open).await?;
        if touch_link {
            measure::link_events(&mut facts, &open()?).await?;
        }
        Ok::<(), Box<dyn Error>>(())
    })?;

    if json {
        println!("{}", serde_json::to_string_pretty(&facts.json())?);
    } else {
        println!("{}", facts.table());
    }
    Ok(())
}

fn device_facts(facts: &mut Facts, fabric: &DeviceFabric<TcpNet>) -> Result<(), Box<dyn Error>> {
    let probe = fabric.probe();
    let (name, firmware) = probe.device()?;
    facts.add("device", "name", name);
    facts.add("device", "fw_ver", firmware);
    facts.add("device", "node_guid", format!("{:#018x}", fabric.port().device_guid));
    facts.add("device", "chosen", fabric.path_reason());
    facts.add("device", "slabs_lie_in", fabric.page_kind().to_string());
    for (name, value) in probe.limits()? {
        facts.add("limits", name, value);
    }
    for (index, gid, gid_type) in probe.gids()? {
        facts.add("gids", &index.to_string(), format!("{gid} {gid_type:?}"));
    }
    facts.add("features", "memory_window_types", probe.memory_windows()?.join(", "));
    facts.add("features", "memory_windows", probe.window_support().to_string());
    match probe.on_demand_paging() {
        Ok(paging) => facts.add("features", "on_demand_paging", paging),
        Err(error) => facts.add("features", "on_demand_paging", format!("unknown: {error}")),
    }
    match probe.extended_qp() {
        Ok(()) => facts.add("features", "extended_qp", true),
        Err(error) => facts.add("features", "extended_qp", format!("no: {error}")),
    }
    Ok(())
}
