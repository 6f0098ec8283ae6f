//! How bulk memory comes up, goes down, and comes back: RT-23, RT-24, RT-25.

use std::{sync::Arc, time::Duration};

use verbs_rma::{
    BulkConfig, TransferError,
    bulk::{MapError, UnmapError},
};
use verbs_transport::{
    Config, MessageType,
    fabric::bulk::{Access, BulkFabric, OwnedBytes},
};

use crate::{
    bulk::{BulkNode, bulk_pair, bulk_pair_with, numbered, until, within},
    lab::Lab,
};

/// RT-23, R-19, R-50: running, parked, queued; each is answered once, and nothing is left.
pub async fn rt_23_teardown_answers_everybody_once<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    for round in 0..lab.rounds(50, 5) {
        let config = BulkConfig { chunk_bytes: 64 << 10, rd_atomic_max: 2, transfers_max: 6, ..BulkConfig::default() };
        let (a, b) = bulk_pair_with(&*lab, &config).await;
        let len = 2 << 20;
        let source = b.map(numbered(len), Access::SOURCE).await;
        let from = source.whole().expect("remote");
        let into = a.map_filled(len, 0, Access::DESTINATION).await;
        let idle = a.map_filled(4096, 0, Access::SOURCE).await;
        // More than may be under way: some wait in their futures.
        let gets: Vec<_> = (0..10).map(|_| tokio::spawn(a.bulk.get(b.id(), from, into.id, 0))).collect();
        if round % 2 == 0 {
            until("they are under way", || a.bulk.stats().chunks > 2).await;
        } else {
            tokio::task::yield_now().await;
        }
        let (parked, joined) = (a.bulk.unmap(into.id), a.bulk.unmap(into.id));
        let mapping = a.bulk.map_all(OwnedBytes::new(vec![0; 4096]), Access::SOURCE);
        within(a.bulk.shutdown()).await;
        for get in gets {
            let end = within(get).await.expect("no panic");
            let known = matches!(
                end,
                Ok(())
                    | Err(TransferError::ShuttingDown
                        | TransferError::Region(_)
                        | TransferError::ConnectionReset { .. })
            );
            assert!(known, "{end:?}");
        }
        within(parked).await.expect("the memory is free");
        // Of a region that nothing used yet, the first unmap may have been over before the second was asked for.
        let joined = within(joined).await;
        assert!(matches!(joined, Ok(()) | Err(UnmapError::Unknown { .. })), "{joined:?}");
        let mapped = within(mapping).await;
        assert!(mapped.is_ok() || matches!(mapped, Err(MapError::ShuttingDown)), "{mapped:?}");
        let after = within(a.bulk.get(b.id(), from, idle.id, 0)).await;
        assert!(matches!(after, Err(TransferError::ShuttingDown)), "{after:?}");
        let after = within(a.bulk.map_all(OwnedBytes::new(vec![0; 9]), Access::SOURCE)).await;
        assert!(matches!(after, Err(MapError::ShuttingDown)), "{after:?}");
        let after = within(a.bulk.unmap(idle.id)).await;
        assert!(matches!(after, Err(UnmapError::Unknown { .. })), "{after:?}");
        a.stop().await;
        b.stop().await;
    }
}

/// RT-24.
pub async fn rt_24_the_owner_shuts_down_while_a_peer_reads<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair(&*lab).await;
    let len = 8 << 20;
    let source = b.map_filled(len, 1, Access::SOURCE).await;
    let into = a.map_filled(len, 0, Access::DESTINATION).await;
    let from = source.whole().expect("remote");
    let get = a.bulk.get(b.id(), from, into.id, 0);
    let watch = get.handle();
    let get = tokio::spawn(get);
    until("it is under way", || watch.moved() > 0).await;
    let peer = b.id();
    b.stop().await;
    let end = within(get).await.expect("no panic");
    assert!(matches!(end, Err(TransferError::Failed { .. } | TransferError::ConnectionReset { .. })), "{end:?}");
    let end = within(a.bulk.get(peer, from, into.id, 0)).await;
    assert!(matches!(end, Err(TransferError::Connect { .. })), "nobody is there: {end:?}");
    a.stop().await;
}

/// RT-25, R-29: one connection comes of both.
pub async fn rt_25_first_gets_from_both_sides_at_once<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    for _ in 0..lab.rounds(100, 8) {
        let (a, b) = bulk_pair(&*lab).await;
        let len = 5000;
        let (of_a, of_b) = (a.map_filled(len, 1, Access::SOURCE).await, b.map_filled(len, 2, Access::SOURCE).await);
        let to_a = a.map_filled(len, 0, Access::DESTINATION).await;
        let to_b = b.map_filled(len, 0, Access::DESTINATION).await;
        let gets = async {
            tokio::join!(
                a.bulk.get(b.id(), of_b.whole().expect("remote"), to_a.id, 0),
                b.bulk.get(a.id(), of_a.whole().expect("remote"), to_b.id, 0),
            )
        };
        let (one, two) = within(gets).await;
        one.expect("A's");
        two.expect("B's");
        assert_eq!((a.bytes(to_a.id, len), b.bytes(to_b.id, len)), (vec![2; len], vec![1; len]));
        until("one QP on each side", || a.bulk.stats().qps == 1 && b.bulk.stats().qps == 1).await;
        a.stop().await;
        b.stop().await;
    }
}

/// RT-25: the planes know nothing of each other. The messages' connection is idle, is given up, and comes back, while GETs
/// go on over the one bulk connection.
pub async fn rt_25_messages_reconnect_while_bulk_goes_on<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let idle = |n| Config { idle_evict_after: Some(Duration::from_secs(1)), ..lab.config(n) };
    let a = BulkNode::start_with(lab.fabric(1), idle(1), BulkConfig::default()).await;
    let mut b = BulkNode::start_with(lab.fabric(2), idle(2), BulkConfig::default()).await;
    a.register(&b);
    b.register(&a);
    let len = 1 << 20;
    let source = b.map(numbered(len), Access::SOURCE).await;
    let into = a.map_filled(len, 0, Access::DESTINATION).await;
    let from = source.whole().expect("remote");
    within(a.worker.ensure_connected(b.id())).await.expect("messages flow");
    let (bulk, peer) = (a.bulk.clone(), b.id());
    let (stop, mut stopped) = tokio::sync::watch::channel(false);
    let gets = tokio::spawn(async move {
        let mut gets = 0;
        while !*stopped.borrow_and_update() {
            within(bulk.get(peer, from, into.id, 0)).await.expect("a GET");
            gets += 1;
        }
        gets
    });
    until("the connection was idle", || a.worker.stats().ended.contains_key("idle")).await;
    until("it is gone on both sides", || a.worker.stats().connections + b.worker.stats().connections == 0).await;
    let _ = a.worker.send(b.id(), "again".into(), "".into(), MessageType::Message, a.errors.clone());
    let frame = within(b.inbound.message.recv()).await.expect("by a new connection");
    assert_eq!(&frame.header[..], b"again");
    let before = a.bulk.stats().done;
    until("another GET", || a.bulk.stats().done > before + 1).await;
    stop.send_replace(true);
    assert!(within(gets).await.expect("no panic") > 2);
    assert!(a.bytes(into.id, len) == numbered(len));
    assert_eq!((a.bulk.stats().epochs_begun, b.bulk.stats().epochs_begun), (1, 1));
    assert_eq!(a.worker.stats().connections_made, 2);
    a.stop().await;
    b.stop().await;
}

/// RT-25: the consumer's side restarts, then the owner's.
pub async fn rt_25_either_side_restarts<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (mut a, mut b) = bulk_pair(&*lab).await;
    // Another seed, or a simulated run would have the name of the one before.
    let again = |n, round: u64| Config { seed: lab.config(n).seed.map(|seed| seed ^ (round + 1)), ..lab.config(n) };
    for round in 0..4 {
        let fill = u8::try_from(round + 1).expect("few");
        let source = b.map_filled(3000, fill, Access::SOURCE).await;
        let into = a.map_filled(3000, 0, Access::DESTINATION).await;
        let from = source.whole().expect("remote");
        within(a.bulk.get(b.id(), from, into.id, 0)).await.expect("round after round");
        assert_eq!(a.bytes(into.id, 3000), vec![fill; 3000]);
        if round % 2 == 0 {
            a.stop().await;
            a = BulkNode::start_with(lab.fabric(1), again(1, round), BulkConfig::default()).await;
        } else {
            b.stop().await;
            b = BulkNode::start_with(lab.fabric(2), again(2, round), BulkConfig::default()).await;
            // An old right is worth nothing at the new run.
            let stale = a.bulk.get(b.id(), from, into.id, 0);
            a.register(&b);
            let end = within(stale).await;
            let end = end.expect_err("the old run's memory is gone");
            assert!(!matches!(end, TransferError::Deadline { .. }), "{end}");
        }
        a.register(&b);
        b.register(&a);
    }
    a.stop().await;
    b.stop().await;
}

/// Without a shutdown, too, everything is given back.
pub async fn a_dropped_bulk_takes_itself_down<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let config = BulkConfig { chunk_bytes: 64 << 10, rd_atomic_max: 1, ..BulkConfig::default() };
    let (a, b) = bulk_pair_with(&*lab, &config).await;
    let len = 16 << 20;
    let source = b.map(numbered(len), Access::SOURCE).await;
    let memory = OwnedBytes::new(vec![0; len]);
    let into = within(a.bulk.map_all(memory.clone(), Access::DESTINATION)).await.expect("it is mapped");
    let get = a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0);
    let watch = get.handle();
    let get = tokio::spawn(get);
    until("it is under way", || watch.moved() > 0).await;
    let BulkNode { worker, bulk, notifications, .. } = a;
    drop((bulk, notifications));
    let end = within(get).await.expect("no panic");
    assert!(matches!(end, Err(TransferError::ShuttingDown)), "{end:?}");
    until("the memory is given back", || Arc::strong_count(&memory) == 1).await;
    worker.shutdown().await;
    drop(worker);
    b.stop().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// messages do not need it.
pub async fn a_worker_goes_on_without_its_bulk<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, mut b) = bulk_pair(&*lab).await;
    let source = b.map_filled(100, 1, Access::SOURCE).await;
    let into = a.map_filled(100, 0, Access::DESTINATION).await;
    let from = source.whole().expect("remote");
    within(a.bulk.get(b.id(), from, into.id, 0)).await.expect("a GET");
    within(b.bulk.shutdown()).await;
    within(b.bulk.shutdown()).await;
    until("A has heard of it", || a.bulk.stats().qps == 0).await;
    let end = within(a.bulk.get(b.id(), from, into.id, 0)).await;
    assert!(matches!(end, Err(TransferError::Connect { .. })), "{end:?}");
    let _ = a.worker.send(b.id(), "still".into(), "".into(), MessageType::Message, a.errors.clone());
    assert_eq!(&within(b.inbound.message.recv()).await.expect("the frame").header[..], b"still");
    a.stop().await;
    b.stop().await;
}
