//! What a worker and an idle peer cost in memory. One test a process would be best; here each measures differences.

use std::{fs, sync::Arc, time::Duration};

use verbs_bootstrap::TcpNet;
use verbs_tests::{
    lab::{DeviceLab, Lab},
    leaks::device_turn,
    node::{Node, next},
};
use verbs_transport::{
    Config, MessageType, Worker,
    fabric::SlabSizes,
    verbs::{DeviceConfig, DeviceFabric},
};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const MIB: u64 = 1 << 20;

/// Resident and pinned pages of this process, in bytes.
fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS is there");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number");
    kib << 10
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Issue's bound: the default SRQ's 32 MiB and 4 MiB more, whoever allocates it.
#[test]
fn a_default_worker_without_peers_takes_its_slabs_and_four_mebibytes() {
    let _turn = device_turn();
    runtime().block_on(async {
        let before = resident_bytes();
        let config = DeviceConfig::default();
        let srq = u64::from(config.slabs.receive_slabs) * u64::from(config.slabs.receive_bytes);
        let fabric = DeviceFabric::open(&config, TcpNet::default()).expect("a device");
        let worker = Worker::new(Config::default(), fabric).expect("valid");
        let _inbound = worker.start().await.expect("started");
        tokio::time::sleep(Duration::from_millis(100)).await;
        let grown = resident_bytes().saturating_sub(before);
        eprintln!("default worker: {} KiB resident, of which {} KiB are receive slabs", grown >> 10, srq >> 10);
        assert_eq!(srq, 32 * MIB);
        assert!(grown <= srq + 4 * MIB, "{grown} bytes for a worker without peers");
        worker.shutdown().await;
    });
}

/// DESIGN section 7: at most 24 KiB of the library's own for each idle peer; the device's QP memory beside it.
#[test]
fn an_idle_peer_takes_at_most_24_kibibytes() {
    const PEERS: u32 = 24;
    let _turn = device_turn();
    let _profiler = dhat::Profiler::builder().testing().build();
    runtime().block_on(async {
        let lab = DeviceLab::new();
        let few = SlabSizes { receive_slabs: 256, receive_bytes: 8192, send_slabs: 16, send_bytes: 8192 };
        let many = SlabSizes { receive_slabs: 2048, ..few };
        let mut a = Node::start_with(lab.fabric_with(1, many), lab.config(1)).await;
        let mut others = Vec::new();
        for n in 0..PEERS {
            others.push(Node::start_with(lab.fabric_with(n + 2, few), lab.config(n + 2)).await);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        let (heap, resident) = (dhat::HeapStats::get().curr_bytes, resident_bytes());
        for b in &mut others {
            a.register(b);
            b.register(&a);
            for n in 0..200 {
                a.send_numbered(b.id(), MessageType::Message, n);
                b.send_numbered(a.id(), MessageType::Message, n);
            }
            for _ in 0..200 {
                next(&mut b.inbound.message).await;
                next(&mut a.inbound.message).await;
            }
        }
        // Idle: tails are covered, proof timers are over.
        tokio::time::sleep(Duration::from_secs(6)).await;
        let heap = dhat::HeapStats::get().curr_bytes.saturating_sub(heap);
        let resident = resident_bytes().saturating_sub(resident);
        // Both ends of each connection live in this process.
        let ends = u64::from(2 * PEERS);
        let each = heap as u64 / ends;
        let device = resident.saturating_sub(heap as u64) / ends;
        eprintln!("idle peer: {each} bytes of the library's own, about {device} bytes of the device's library");
        assert!(each <= 24 << 10, "{each} bytes for an idle peer");
        let stats = a.worker.stats();
        assert_eq!((stats.connections, stats.send_slabs_free), (PEERS as usize, few.send_slabs as usize));
        let _keep: Vec<Arc<_>> = others.iter().map(|b| b.errors.clone()).collect();
        a.stop().await;
        for b in others {
            b.errors.assert_none();
            b.stop().await;
        }
    });
}
