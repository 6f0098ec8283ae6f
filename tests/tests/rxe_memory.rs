//! What a worker and an idle peer cost in memory. One test a process would be best; here each measures differences.

use std::{sync::Arc, time::Duration};

use verbs_bootstrap::TcpNet;
use verbs_tests::{
    lab::{DeviceLab, Lab},
    leaks::{device_turn, heap_bytes, resident_bytes},
    node::{Node, next},
};
use verbs_transport::{
    Config, MessageType, Worker,
    fabric::SlabSizes,
    verbs::{DeviceConfig, DeviceFabric},
};

const MIB: u64 = 1 << 20;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// The default slabs, and 4 MiB more, whoever allocates it: 2 MiB of them are Soft-RoCE's CQ.
#[test]
fn a_default_worker_without_peers_takes_its_slabs_and_four_mebibytes() {
    let _turn = device_turn();
    runtime().block_on(async {
        let before = resident_bytes();
        let config = DeviceConfig::default();
        let sizes = config.slabs;
        let srq = u64::from(sizes.receive_slabs) * u64::from(sizes.receive_bytes);
        let slabs = srq + u64::from(sizes.send_slabs) * u64::from(sizes.send_bytes);
        let fabric = DeviceFabric::open(&config, TcpNet::default()).expect("a device");
        let worker = Worker::new(Config::default(), fabric).expect("valid");
        let _inbound = worker.start().await.expect("started");
        tokio::time::sleep(Duration::from_millis(100)).await;
        let grown = resident_bytes().saturating_sub(before);
        eprintln!("default worker: {} KiB resident, of which {} KiB are receive slabs", grown >> 10, srq >> 10);
        assert!((31 * MIB..=32 * MIB).contains(&srq));
        assert!(grown <= slabs + 4 * MIB, "{grown} bytes for a worker without peers");
        worker.shutdown().await;
    });
}

/// DESIGN section 7: at most 24 KiB of the library's own for each idle peer; the device's QP memory beside it.
#[test]
fn an_idle_peer_takes_at_most_24_kibibytes() {
    const PEERS: u32 = 24;
    let _turn = device_turn();
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
        let (heap, resident) = (heap_bytes(), resident_bytes());
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
        let heap = heap_bytes().saturating_sub(heap);
        let resident = resident_bytes().saturating_sub(resident);
        // Both ends of each connection live in this process.
        let ends = u64::from(2 * PEERS);
        let each = heap / ends;
        let device = resident.saturating_sub(heap) / ends;
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
