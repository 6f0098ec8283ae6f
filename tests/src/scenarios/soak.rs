//! Many cycles, many peers: what a worker must bear without a trace.

use std::{
    fmt::Write as _,
    sync::Arc,
    time::{Duration, Instant},
};

use verbs_bootstrap::InstanceId;
use verbs_transport::{Config, MessageType, fabric::SlabSizes};

use crate::{
    lab::Lab,
    leaks::{held_bytes, open_descriptors, resident_bytes},
    node::{Node, assert_numbered, next, next_within},
};

/// Enough for one peer.
const TINY_SLABS: SlabSizes = SlabSizes { receive_slabs: 96, receive_bytes: 4096, send_slabs: 16, send_bytes: 4096 };

/// Memory that a process may have gained from one fifth of the cycles to their end: buffers that grew...
const GROWTH_MAX_BYTES: u64 = 64 << 10;
/// ...and at each cycle what a simulated world remembers of the device that is gone, 1 KiB. Two QPs would be 15 KiB.
const GROWTH_MAX_CYCLE_BYTES: u64 = 1280;

/// B23: one worker stays, others come, exchange a message and go; every tenth is ended in the middle of its hand-shake.
/// Whoever runs this compares the counts of descriptors, QPs, MRs and threads. `VERBS_CYCLES` says how many, 5,000 on sim
/// and 500 on a device unless said.
pub async fn connect_and_close_cycles<L: Lab>(lab: Arc<L>) {
    let asked = std::env::var("VERBS_CYCLES").ok();
    let asked = asked.map(|text| text.parse().unwrap_or_else(|_| panic!("VERBS_CYCLES is no number: {text}")));
    let cycles = asked.unwrap_or_else(|| lab.rounds(5000, 500));
    let mut warm = (0, 0);
    let mut a = Node::start(&*lab, 1).await;
    let mut aborted = 0;
    for cycle in 0..cycles {
        if cycle == cycles / 5 {
            warm = (held_bytes(), open_descriptors());
        }
        let config = lab.config(2);
        // The same name each time, but another run.
        let seed = config.seed.map(|seed| seed ^ u64::from(cycle + 1));
        let config = Config { window_slabs: 8, instance: InstanceId(2), seed, ..config };
        let mut b = Node::start_with(lab.fabric_with(2, TINY_SLABS), config).await;
        b.register(&a);
        if cycle % 10 == 9 {
            aborted += 1;
            let worker = b.worker.clone();
            let to = a.id();
            let connecting = tokio::spawn(async move { worker.ensure_connected(to).await });
            tokio::time::sleep(Duration::from_micros(u64::from(cycle) * 37 % 5000)).await;
            b.stop().await;
            let _ = connecting.await.expect("no panic");
        } else {
            b.send_numbered(a.id(), MessageType::Message, cycle);
            let frame = next(&mut a.inbound.message).await;
            assert_numbered(&frame, cycle);
            if cycle % 3 == 0 {
                // It answers, and closes from its side with the answer under way or not.
                a.register(&b);
                a.send_numbered(b.id(), MessageType::Response, cycle);
                assert_numbered(&next(&mut b.inbound.response).await, cycle);
            }
            b.stop().await;
        }
    }
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while a.worker.stats().qps > 0 {
        assert!(tokio::time::Instant::now() < deadline, "QPs of {cycles} cycles are left: {:?}", a.worker.stats());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let stats = a.worker.stats();
    eprintln!("{cycles} cycles, {aborted} aborted: {} epochs, {} proven", stats.epochs_begun, stats.connections_made);
    assert_eq!((stats.receives_promised, stats.connections), (0, 0), "{stats:?}");
    assert!(stats.connections_made >= u64::from(cycles - aborted), "{stats:?}");
    let now = (held_bytes(), open_descriptors());
    eprintln!("held: {} KiB after {} cycles, {} KiB after all", warm.0 >> 10, cycles / 5, now.0 >> 10);
    let growth = GROWTH_MAX_BYTES + u64::from(cycles) * GROWTH_MAX_CYCLE_BYTES;
    assert!(now.0 <= warm.0 + growth, "memory grows: {} bytes after {}, {} now", warm.0, cycles / 5, now.0);
    assert!(now.1 <= warm.1, "{} descriptors after {}, {} now", warm.1, cycles / 5, now.1);
    a.stop().await;
}

/// One worker with many peers: connect all, message all both ways, close all. Prints times; a window of 8 keeps the SRQ
/// at 14 slabs a peer, so that 2,000 fit into the largest SRQ of today's NICs.
pub async fn many_peers<L: Lab>(lab: Arc<L>) {
    const WINDOW: u16 = 8;
    let peers = lab.rounds(2000, 200);
    let few = SlabSizes { receive_slabs: 96, receive_bytes: 512, send_slabs: 8, send_bytes: 512 };
    let slabs = SlabSizes { receive_slabs: 80 + peers * (u32::from(WINDOW) + 6), send_slabs: 256, ..few };
    let config = |n| Config { window_slabs: WINDOW, send_wrs: 31, ..lab.config(n) };
    let resident = resident_bytes();
    let mut report = String::new();
    let mut watch = Instant::now();
    let mut lap = |report: &mut String, what: &str| {
        let took = watch.elapsed();
        write!(report, "; {what} {took:?}").expect("a String takes all");
        watch = Instant::now();
        took
    };

    let mut a = Node::start_with(lab.fabric_with(1, slabs), config(1)).await;
    let mut others = Vec::new();
    for n in 0..peers {
        others.push(Node::start_with(lab.fabric_with(n + 2, few), config(n + 2)).await);
    }
    let workers = resident_bytes();
    lap(&mut report, "workers started");

    for b in &others {
        a.register(b);
    }
    let connecting: Vec<_> = others
        .iter()
        .map(|b| {
            let (worker, id) = (a.worker.clone(), b.id());
            tokio::spawn(async move { worker.ensure_connected(id).await })
        })
        .collect();
    for connecting in connecting {
        connecting.await.expect("no panic").expect("connected");
    }
    lap(&mut report, "connected");
    let connected = resident_bytes();
    assert_eq!(a.worker.stats().connections, peers as usize);

    for b in &others {
        a.send_numbered(b.id(), MessageType::Message, 1);
    }
    for b in &mut others {
        b.register(&a);
        assert_numbered(&next_within(&mut b.inbound.message, LONG).await, 1);
        b.send_numbered(a.id(), MessageType::Message, 2);
    }
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..peers {
        let frame = next_within(&mut a.inbound.message, LONG).await;
        assert_numbered(&frame, 2);
        assert!(seen.insert(frame.peer), "{} came twice", frame.peer);
    }
    lap(&mut report, "one message each way");
    assert_eq!(lab.rnr_naks(), 0);

    a.errors.assert_none();
    let closing = Instant::now();
    a.stop().await;
    eprintln!("the worker with {peers} connections shut down in {:?}", closing.elapsed());
    for b in others {
        b.errors.assert_none();
        b.stop().await;
    }
    lap(&mut report, "closed");
    let kib = |bytes: u64| bytes >> 10;
    eprintln!(
        "{peers} peers in one process{report}; resident: {} KiB for the workers, {} KiB for each connection's two ends",
        kib(workers.saturating_sub(resident)),
        kib(connected.saturating_sub(workers)) / u64::from(peers),
    );
}

const LONG: Duration = Duration::from_secs(60);
