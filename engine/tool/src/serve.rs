//! `serve`: memory or files, until told to end.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::json;
use verbs_engine::{Config, Notification, Permission, RegisteredMemory, ServeDirect};

use crate::{
    Failure,
    args::Serve,
    index::{self, Entry, Index},
    output::Output,
    ticket::Ticket,
};

/// Counters are published, and the end is noticed, this often.
const BEAT: Duration = Duration::from_millis(500);
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// One thing to serve.
struct Item {
    name: String,
    bytes: Vec<u8>,
    file: Option<PathBuf>,
}

/// One that is served.
struct Served {
    name: String,
    memory: RegisteredMemory,
    file: Option<PathBuf>,
}

pub(crate) fn serve(args: &Serve, output: Output) -> Result<(), Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // A second one ends the program at once, as if there were no handler.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let end = args.lasting.map(|lasting| Instant::now() + lasting);
    let items = items(args)?;
    let index_room = Index::room(items.iter().map(|item| item.name.as_str()))?;
    let total: u64 = items.iter().map(|item| item.bytes.len() as u64).sum();
    let engine = args.over.start(Config {
        bind: args.bind,
        name: args.name.clone(),
        max_registrations: 4096,
        max_registered_bytes: total + (index_room + index::STATS_BYTES) as u64,
        source_workers: args.workers.into(),
        source_queue: args.workers.into(),
        serve_direct: if args.direct { ServeDirect::All } else { ServeDirect::Never },
        ..Config::default()
    })?;
    // In this order: peers know both by their numbers.
    let list = engine.register_memory(vec![b' '; index_room].into(), Permission::RemoteRead)?;
    let counters = engine.register_memory(vec![b' '; index::STATS_BYTES].into(), Permission::RemoteRead)?;
    let permission = if args.writable { Permission::RemoteReadWrite } else { Permission::RemoteRead };
    let mut served = Vec::new();
    for Item { name, bytes, file } in items {
        served.push(Served { name, memory: engine.register_memory(bytes.into(), permission)?, file });
    }
    let entry = |one: &Served| Entry {
        name: one.name.clone(),
        address: one.memory.address(),
        length: one.memory.len(),
        writable: args.writable,
    };
    let index = Index { verbs_engine_index: index::VERSION, entries: served.iter().map(entry).collect() };
    index::publish(&list, &index)?;
    index::publish(&counters, &index::stats_json(&engine.stats()))?;

    let ticket = Ticket { endpoint: engine.endpoint(), epoch: engine.epoch() };
    output.result(
        &json!({ "event": "serving", "ticket": ticket.to_string(), "entries": index.entries }),
        &format!("serving {} ranges, {total} bytes; Ctrl-C ends it\nticket {ticket}", served.len()),
    );
    while !stop.load(Ordering::Relaxed) && end.is_none_or(|end| Instant::now() < end) {
        let left = end.map_or(BEAT, |end| end.saturating_duration_since(Instant::now()).min(BEAT));
        for Notification { name, message } in engine.wait_for_notifications(left) {
            output.result(
                &json!({ "event": "notification", "name": name, "message": message }),
                &format!("notification {name:?}: {message}"),
            );
        }
        index::publish(&counters, &index::stats_json(&engine.stats()))?;
    }

    let closed = engine.close_source(CLOSE_PATIENCE);
    let stored = if args.writable { store(&served)? } else { Vec::new() };
    let stats = index::stats_json(&engine.stats());
    let names = stored.join(", ");
    output.result(
        &json!({ "event": "stopped", "stored": stored, "stats": stats }),
        &if names.is_empty() { "stopped".to_owned() } else { format!("stopped; stored: {names}") },
    );
    closed?;
    Ok(())
}

fn items(args: &Serve) -> Result<Vec<Item>, Failure> {
    let mut items = Vec::new();
    if let Some(bytes) = args.block {
        if bytes == 0 {
            return Err("a block of 0 bytes cannot be served".into());
        }
        items.push(Item { name: "block".to_owned(), bytes: vec![0; usize::try_from(bytes)?], file: None });
    }
    if let Some(dir) = &args.dir {
        let failed = |what: &Path, error: std::io::Error| format!("cannot read {}: {error}", what.display());
        let mut paths = Vec::new();
        for entry in fs::read_dir(dir).map_err(|error| failed(dir, error))? {
            paths.push(entry.map_err(|error| failed(dir, error))?.path());
        }
        paths.sort();
        for path in paths.into_iter().filter(|path| path.is_file()) {
            let bytes = fs::read(&path).map_err(|error| failed(&path, error))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !bytes.is_empty() {
                items.push(Item { name, bytes, file: Some(path) });
            }
        }
        if items.is_empty() {
            return Err(format!("{} has no file with anything in it", dir.display()).into());
        }
    }
    Ok(items)
}

/// Puts back what peers have changed; each file is whole at every moment.
fn store(served: &[Served]) -> Result<Vec<String>, Failure> {
    let mut stored = Vec::new();
    for Served { name, memory, file } in served {
        let Some(path) = file else { continue };
        let mut bytes = vec![0; usize::try_from(memory.len())?];
        memory.read(0, &mut bytes)?;
        if fs::read(path).is_ok_and(|old| old == bytes) {
            continue;
        }
        let mut temporary = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
        temporary.write_all(&bytes)?;
        if let Ok(metadata) = fs::metadata(path) {
            temporary.as_file().set_permissions(metadata.permissions())?;
        }
        temporary.persist(path)?;
        stored.push(name.clone());
    }
    Ok(stored)
}
