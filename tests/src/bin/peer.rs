//! One worker in a process of its own, for tests that kill, stop and restart it.
//!
//! `peer [KEY=VALUE]...`: `instance` (decimal), `bind` (address to listen on), `advertise`, `window`, `echo=1` (each
//! message goes back as a response), `zero_copy` (slabs that it lends), `control` (a file to read commands from in place of
//! standard input).
//!
//! It says `up ID PID ADDRESS`, then answers each line of input with one line; it ends when the input does, or with `exit`.
//!
//! | command | does |
//! |---|---|
//! | `register HEX` | makes a worker's address known |
//! | `connect ID` | connects |
//! | `send ID FRAMES BYTES` | sends numbered frames |
//! | `pour ID` | sends numbered frames of mixed sizes until `hush` |
//! | `hush` | sends no more of them |
//! | `describe ID` | tells the connection |
//! | `stats` | tells what came, what failed and what the worker counts |
//! | `mute MS` | takes nothing for so long |
//! | `bulk-map BYTES FILL` | maps memory that peers may read and write, and tells its address, key and length |
//! | `bulk-get ID ADDRESS KEY BYTES` | GETs that again and again, until one fails |
//! | `bulk-stats` | tells what bulk memory counts, and how the GETs ended |

use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    io::{BufRead as _, Read as _, Seek as _, SeekFrom},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use serde_json::json;
use tokio::sync::mpsc;
use verbs_bootstrap::{InstanceId, TcpNet};
use verbs_rma::{Bulk, BulkConfig, RemoteRange};
use verbs_tests::{
    lab::SMALL_SLABS,
    leaks::{held_bytes, hw_counter, open_descriptors},
    process::{from_hex, to_hex},
    traffic::{Keep, Pour, Run, Tally},
};
use verbs_transport::{
    Config, Inbound, MessageType, Received, Worker, WorkerAddress,
    fabric::bulk::{Access, OwnedBytes, Rkey},
    verbs::{DeviceConfig, DeviceFabric},
};

type Device = DeviceFabric<TcpNet>;
type Failed = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failed> {
    let args: BTreeMap<String, String> = std::env::args()
        .skip(1)
        .map(|arg| arg.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).ok_or(arg))
        .collect::<Result<_, _>>()?;
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(serve(&args))
}

async fn serve(args: &BTreeMap<String, String>) -> Result<(), Failed> {
    let mut config = Config::default();
    if let Some(instance) = args.get("instance") {
        config.instance = InstanceId(instance.parse()?);
    }
    if let Some(bind) = args.get("bind") {
        config.bind = bind.parse()?;
    }
    if let Some(advertise) = args.get("advertise") {
        config.advertise = vec![advertise.parse()?];
    }
    if let Some(window) = args.get("window") {
        config.window_slabs = window.parse()?;
    }
    if let Some(slabs) = args.get("zero_copy") {
        (config.zero_copy_slabs, config.zero_copy_min_bytes) = (slabs.parse()?, 100);
    }
    let device = DeviceConfig { slabs: SMALL_SLABS, ..DeviceConfig::default() };
    let worker = Worker::new(config, Device::open(&device, TcpNet::default())?)?;
    let (bulk, notifications) = Bulk::attach(&worker, BulkConfig::default())?;
    drop(notifications);
    let inbound = worker.start().await?;
    let books = Arc::new(Books::new());
    tokio::spawn(take(worker.clone(), inbound, books.clone(), args.contains_key("echo")));
    println!("up {} {} {}", worker.instance(), std::process::id(), to_hex(worker.address().as_bytes()));

    let mut commands = read_commands(args.get("control").cloned());
    while let Some(line) = commands.recv().await {
        if line == "exit" {
            break;
        }
        let answered = match line.strip_prefix("bulk-") {
            Some(line) => answer_bulk(&bulk, &books, line).await,
            None => answer(&worker, &books, &line).await,
        };
        match answered {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("error {error}"),
        }
    }
    bulk.shutdown().await;
    worker.shutdown().await;
    Ok(())
}

/// What came and what was sent.
struct Books {
    tally: Mutex<Tally>,
    runs: Mutex<Vec<Arc<Run>>>,
    pours: Mutex<Vec<Pour>>,
    muted_until: Mutex<Instant>,
    /// How the repeated GETs ended.
    gets_ended: Mutex<Option<String>>,
}

impl Books {
    fn new() -> Self {
        Self {
            tally: Mutex::default(),
            runs: Mutex::default(),
            pours: Mutex::default(),
            muted_until: Mutex::new(Instant::now()),
            gets_ended: Mutex::default(),
        }
    }
}

async fn take(worker: Worker<Device>, mut inbound: Inbound, books: Arc<Books>, echo: bool) {
    let mut keep = Keep::default();
    while let Some(frame) = keep.next(&mut inbound.message).await {
        let until = *books.muted_until.lock().expect("no panic");
        tokio::time::sleep_until(until.into()).await;
        books.tally.lock().expect("no panic").take(&frame);
        if echo {
            let Received { peer, header, payload, .. } = frame;
            // The first process counts what comes back; what does not, it misses.
            let lost = Arc::new(|_, _, _| {});
            let _ = worker.send(peer, header, payload, MessageType::Response, lost);
        }
    }
}

async fn answer(worker: &Worker<Device>, books: &Books, line: &str) -> Result<String, Failed> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    Ok(match words[..] {
        ["register", address] => {
            let address = from_hex(address).ok_or("not hexadecimal")?;
            worker.register(&WorkerAddress::from_bytes(address))?.to_string()
        }
        ["connect", id] => {
            worker.ensure_connected(name(id)?).await?;
            "connected".to_owned()
        }
        ["send", id, frames, bytes] => {
            let run = Run::new(bytes.parse()?);
            run.burst(worker, name(id)?, frames.parse()?);
            books.runs.lock().expect("no panic").push(run.clone());
            run.name()
        }
        ["pour", id] => {
            let run = Run::mixed();
            books.pours.lock().expect("no panic").push(run.pour(worker, name(id)?));
            books.runs.lock().expect("no panic").push(run.clone());
            run.name()
        }
        ["hush"] => {
            let pours = std::mem::take(&mut *books.pours.lock().expect("no panic"));
            for pour in pours {
                pour.stop().await;
            }
            "hushed".to_owned()
        }
        ["describe", id] => {
            let told = worker.describe(name(id)?).ok_or("not known")?;
            json!({
                "proven": told.proven,
                "path": told.path,
                "mtu_bytes": told.mtu_bytes,
                "queued_frames": told.queued_frames,
                "wrs_in_flight": told.wrs_in_flight,
                "credits_left": told.credits_left,
                "credits_owed": told.credits_owed,
            })
            .to_string()
        }
        ["stats"] => stats(worker, books).to_string(),
        ["mute", millis] => {
            let until = Instant::now() + Duration::from_millis(millis.parse()?);
            *books.muted_until.lock().expect("no panic") = until;
            "muted".to_owned()
        }
        _ => return Err(format!("{line:?} is no command").into()),
    })
}

async fn answer_bulk(bulk: &Bulk<Device>, books: &Arc<Books>, line: &str) -> Result<String, Failed> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    Ok(match words[..] {
        ["map", bytes, fill] => {
            let memory = OwnedBytes::new(vec![fill.parse()?; bytes.parse()?]);
            let region = bulk.map_all(memory, Access::SOURCE.and(Access::PUT_TARGET)).await?;
            let RemoteRange { addr, rkey, len } = region.whole().ok_or("no key")?;
            format!("{addr} {} {len}", rkey.0)
        }
        ["get", id, addr, rkey, len] => {
            let from = RemoteRange { addr: addr.parse()?, rkey: Rkey(rkey.parse()?), len: len.parse()? };
            let (peer, bulk, books) = (name(id)?, bulk.clone(), books.clone());
            let memory = OwnedBytes::new(vec![0; usize::try_from(from.len)?]);
            let into = bulk.map_all(memory, Access::DESTINATION).await?;
            *books.gets_ended.lock().expect("no panic") = None;
            tokio::spawn(async move {
                let error = loop {
                    if let Err(error) = bulk.get(peer, from, into.id, 0).await {
                        break error;
                    }
                };
                *books.gets_ended.lock().expect("no panic") = Some(error.to_string());
            });
            "getting".to_owned()
        }
        ["stats"] => {
            let stats = bulk.stats();
            let ended = books.gets_ended.lock().expect("no panic").clone();
            json!({"done": stats.done, "chunks": stats.chunks, "qps": stats.qps, "ended": ended}).to_string()
        }
        _ => return Err(format!("bulk-{line:?} is no command").into()),
    })
}

fn name(hex: &str) -> Result<InstanceId, Failed> {
    Ok(InstanceId(u128::from_str_radix(hex, 16)?))
}

fn stats(worker: &Worker<Device>, books: &Books) -> serde_json::Value {
    let stats = worker.stats();
    let runs: serde_json::Map<_, _> = books
        .runs
        .lock()
        .expect("no panic")
        .iter()
        .map(|run| {
            let failed = run.failures();
            let told = json!({
                "sent": run.sent(), "failed": failed.len(), "failed_ranges": ranges(failed.keys()), "why": run.reasons()
            });
            (run.name(), told)
        })
        .collect();
    json!({
        "received": books.tally.lock().expect("no panic").json(),
        "sent": runs,
        "connections": stats.connections,
        "qps": stats.qps,
        "epochs_begun": stats.epochs_begun,
        "epochs_ended": stats.epochs_ended,
        "flushes_abandoned": stats.flushes_abandoned,
        "malformed": stats.malformed,
        "send_slabs_free": stats.send_slabs_free,
        "receives_promised": stats.receives_promised,
        "inbound_backlog_bytes": stats.inbound_backlog_bytes,
        "receive_slabs_lent": stats.receive_slabs_lent,
        "frames_lent": stats.frames_lent,
        "fds": open_descriptors(),
        "held_bytes": held_bytes(),
        "rnr": hw_counter("send_rnr_err") + hw_counter("rcvd_rnr_err"),
    })
}

/// Ascending numbers as ranges, from and to.
fn ranges<'a>(numbers: impl Iterator<Item = &'a u64>) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, to)) if *to == number => *to += 1,
            _ => ranges.push((number, number + 1)),
        }
    }
    ranges
}

/// Lines of standard input, or of a file that grows.
fn read_commands(control: Option<String>) -> mpsc::UnboundedReceiver<String> {
    let (tell, commands) = mpsc::unbounded_channel();
    std::thread::spawn(move || match control {
        None => std::io::stdin().lock().lines().map_while(Result::ok).try_for_each(|line| tell.send(line)),
        Some(path) => {
            let (mut text, mut at) = (String::new(), 0);
            loop {
                std::thread::sleep(Duration::from_millis(10));
                // Opened anew each time, so that no cache stands between two hosts.
                let Ok(mut file) = fs::File::open(&path) else { continue };
                if file.seek(SeekFrom::Start(at)).is_err() {
                    continue;
                }
                at += file.read_to_string(&mut text).unwrap_or(0) as u64;
                while let Some(end) = text.find('\n') {
                    tell.send(text.drain(..=end).collect::<String>().trim_end().to_owned())?;
                }
            }
        }
    });
    commands
}
