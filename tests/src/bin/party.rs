//! One worker with a rendezvous in a process of its own, for tests that kill and stop it.
//!
//! `party [KEY=VALUE]...`: `instance` (decimal), `lease`, `grace`, `margin`, `chunk` (milliseconds, bytes), `reads=0`
//! (everything by chunks).
//!
//! It says `up ID PID ADDRESS`, then answers each line of input with one line; it ends when the input does, or with `exit`.
//! Payload `N` is `slot_pattern(N, bytes)`: each payload that comes is checked against it.
//!
//! | command | does |
//! |---|---|
//! | `register HEX` | makes a worker's address known |
//! | `connect ID` | connects |
//! | `stage N BYTES pinned\|memory` | stages a payload; tells its handle |
//! | `withdraw HANDLE` | ends it |
//! | `metadata HANDLE` | asks its owner |
//! | `get HANDLE N` | pulls it and keeps the lease |
//! | `release` | releases all leases that are kept |
//! | `pull HANDLE N` | pulls it in the background; `pulls` tells what became of all of them |
//! | `stall HANDLE BYTES` | pulls it until so many bytes are there, then stands still |
//! | `send ID N BYTES` | sends it as a message |
//! | `stats` | tells the counts |

use std::{
    collections::BTreeMap,
    error::Error,
    io::BufRead as _,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use serde_json::json;
use tokio::sync::mpsc;
use verbs_bootstrap::{InstanceId, TcpNet};
use verbs_rma::{
    Handle, Rendezvous, RendezvousConfig,
    rendezvous::{Lease, StageOptions},
};
use verbs_tests::{
    lab::SMALL_SLABS,
    party::slot_pattern,
    process::{from_hex, to_hex},
};
use verbs_transport::{
    Config, MessageType, Worker, WorkerAddress,
    verbs::{DeviceConfig, DeviceFabric},
};

type Device = DeviceFabric<TcpNet>;
type Failed = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failed> {
    let args: BTreeMap<String, String> = std::env::args()
        .skip(1)
        .map(|arg| arg.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).ok_or(arg))
        .collect::<Result<_, _>>()?;
    tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build()?.block_on(serve(&args))
}

/// What the commands share.
struct Process {
    rendezvous: Rendezvous<Device>,
    leases: Mutex<Vec<Lease>>,
    pulls: Arc<Mutex<Vec<String>>>,
    lost: Arc<Mutex<Vec<String>>>,
}

async fn serve(args: &BTreeMap<String, String>) -> Result<(), Failed> {
    let mut config = Config::default();
    if let Some(instance) = args.get("instance") {
        config.instance = InstanceId(instance.parse()?);
    }
    let mut times = RendezvousConfig { arena_bytes: 4 << 20, ..RendezvousConfig::default() };
    let millis = |key: &str, default: Duration| -> Result<Duration, Failed> {
        args.get(key).map_or(Ok(default), |text| Ok(Duration::from_millis(text.parse()?)))
    };
    times.lease = millis("lease", times.lease)?;
    times.lease_grace = millis("grace", times.lease_grace)?;
    times.lease_margin = millis("margin", times.lease_margin)?;
    times.reads = args.get("reads").is_none_or(|reads| reads != "0");
    if let Some(chunk) = args.get("chunk") {
        times.chunk_bytes = chunk.parse()?;
    }
    let device = DeviceConfig { slabs: SMALL_SLABS, ..DeviceConfig::default() };
    let worker = Worker::new(config, Device::open(&device, TcpNet::default())?)?;
    let rendezvous = Rendezvous::attach(worker, times)?;
    let mut inbound = rendezvous.start().await?;
    let worker = rendezvous.worker();
    println!("up {} {} {}", worker.instance(), std::process::id(), to_hex(worker.address().as_bytes()));
    tokio::spawn(async move { while inbound.message.recv().await.is_some() {} });

    let process = Process { rendezvous, leases: Mutex::default(), pulls: Arc::default(), lost: Arc::default() };
    let mut commands = read_commands();
    while let Some(line) = commands.recv().await {
        if line == "exit" {
            break;
        }
        match answer(&process, &line).await {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("error {error}"),
        }
    }
    process.leases.lock().expect("no panic").clear();
    process.rendezvous.shutdown().await;
    Ok(())
}

async fn answer(process: &Process, line: &str) -> Result<String, Failed> {
    let rendezvous = &process.rendezvous;
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    Ok(match words[..] {
        ["register", address] => {
            let address = from_hex(address).ok_or("not hexadecimal")?;
            rendezvous.register(&WorkerAddress::from_bytes(address))?.to_string()
        }
        ["connect", id] => {
            rendezvous.worker().ensure_connected(name(id)?).await?;
            "connected".to_owned()
        }
        ["stage", n, bytes, kind] => {
            let payload = slot_pattern(n.parse()?, bytes.parse()?);
            let options = StageOptions { pinned: kind == "pinned", ..StageOptions::default() };
            rendezvous.stage_with(payload, options).await?.to_string()
        }
        ["withdraw", handle] => {
            rendezvous.withdraw(handle.parse()?);
            "withdrawn".to_owned()
        }
        ["metadata", handle] => rendezvous.metadata(handle.parse()?).await?.total_bytes.to_string(),
        ["get", handle, n] => {
            let (bytes, lease) = rendezvous.get(handle.parse()?).await?;
            let told = verdict(n.parse()?, &bytes);
            process.leases.lock().expect("no panic").push(lease);
            told
        }
        ["release"] => {
            let leases = std::mem::take(&mut *process.leases.lock().expect("no panic"));
            for lease in leases {
                rendezvous.release(lease);
            }
            "released".to_owned()
        }
        ["pull", handle, n] => {
            let (handle, n): (Handle, u64) = (handle.parse()?, n.parse()?);
            let (rendezvous, pulls) = (rendezvous.clone(), process.pulls.clone());
            tokio::spawn(async move {
                let mut bytes = Vec::new();
                let told = match rendezvous.pull(handle).into(&mut bytes).await {
                    Ok(_) => verdict(n, &bytes),
                    Err(error) => format!("failed: {error}"),
                };
                pulls.lock().expect("no panic").push(told);
            });
            "pulling".to_owned()
        }
        ["stall", handle, at] => {
            let (handle, at): (Handle, u64) = (handle.parse()?, at.parse()?);
            let rendezvous = rendezvous.clone();
            tokio::spawn(async move {
                let mut sink = tokio::io::sink();
                let stand_still = |done, _| {
                    if done >= at {
                        std::thread::sleep(Duration::from_secs(3600));
                    }
                };
                let pull = rendezvous.pull(handle).on_progress(stand_still);
                let _ = pull.into(verbs_rma::rendezvous::Destination::writer(&mut sink)).await;
            });
            "pulling".to_owned()
        }
        ["pulls"] => json!(*process.pulls.lock().expect("no panic")).to_string(),
        ["send", id, n, bytes] => {
            let lost = process.lost.clone();
            let on_error = Arc::new(move |_: Bytes, _: Bytes, error: verbs_transport::SendError| {
                lost.lock().expect("no panic").push(error.to_string());
            });
            let payload = slot_pattern(n.parse()?, bytes.parse()?);
            let header = Bytes::copy_from_slice(n.as_bytes());
            drop(rendezvous.send(name(id)?, header, payload, MessageType::Message, on_error));
            "sent".to_owned()
        }
        ["stats"] => stats(process).to_string(),
        _ => return Err(format!("{line:?} is no command").into()),
    })
}

fn name(hex: &str) -> Result<InstanceId, Failed> {
    Ok(InstanceId(u128::from_str_radix(hex, 16)?))
}

fn verdict(n: u64, bytes: &[u8]) -> String {
    if *bytes == slot_pattern(n, bytes.len()) { format!("good {}", bytes.len()) } else { "FOREIGN BYTES".to_owned() }
}

fn stats(process: &Process) -> serde_json::Value {
    let stats = process.rendezvous.stats();
    json!({
        "slots": stats.book.slots,
        "leases": stats.book.leases,
        "rights": stats.book.rights,
        "quarantined": stats.book.quarantined_slots,
        "source_used": stats.source_arenas.used,
        "asks_waiting": stats.asks_waiting,
        "chunks_served": stats.chunks_served,
        "pulled_by_read": stats.pulled.rdma,
        "pulled_by_chunks": stats.pulled.chunked_total(),
        "reads_failed": stats.reads_failed,
        "pulls_failed": stats.pulls_failed,
        "lost": *process.lost.lock().expect("no panic"),
    })
}

fn read_commands() -> mpsc::UnboundedReceiver<String> {
    let (tell, commands) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        std::io::stdin().lock().lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
    });
    commands
}
