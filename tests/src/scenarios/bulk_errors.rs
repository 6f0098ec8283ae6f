//! What goes wrong, and what it costs: RT-15, RT-16, B25.

use std::{sync::Arc, time::Duration};

use verbs_rma::{BulkConfig, RegionId, RemoteRange, TransferError, bulk::BulkEnd, proto::region::UseError};
use verbs_transport::{
    FEATURE_RMA, MessageType, Worker,
    fabric::bulk::{Access, BulkFabric, Rkey},
};

use crate::{
    bulk::{BulkNode, bulk_pair, bulk_pair_with, numbered, until, within},
    lab::Lab,
};

async fn stop<F: BulkFabric>(a: BulkNode<F>, b: BulkNode<F>) {
    a.stop().await;
    b.stop().await;
}

/// typed, with the numbers, and nothing goes to the device.
pub async fn what_is_wrong_beforehand_posts_nothing<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair(&*lab).await;
    let source = b.map_filled(100, 1, Access::SOURCE).await;
    let into = a.map_filled(50, 0, Access::DESTINATION).await;
    let read_only = a.map_filled(50, 0, Access::LOCAL_READ).await;
    assert!(source.remote(50..101).is_none() && into.whole().is_none());
    let from = source.remote(0..50).expect("within");
    let get = |from, region, offset| within(a.bulk.get(b.id(), from, region, offset));
    for offset in [1, 50, u64::MAX] {
        let end = get(from, into.id, offset).await;
        assert!(matches!(end, Err(TransferError::OutOfRange { region_len: 50, .. })), "{offset}: {end:?}");
    }
    let end = get(RemoteRange { addr: u64::MAX - 10, ..from }, into.id, 0).await;
    assert!(matches!(end, Err(TransferError::RemoteRange { .. })), "{end:?}");
    let end = get(from, read_only.id, 0).await;
    assert!(matches!(end, Err(TransferError::ReadOnly { .. })), "{end:?}");
    let end = get(from, RegionId(77), 0).await;
    assert!(matches!(end, Err(TransferError::Region(UseError::Unknown { .. }))), "{end:?}");
    a.unmap(into).await;
    let end = get(from, into.id, 0).await;
    assert!(matches!(end, Err(TransferError::Region(UseError::Unknown { .. }))), "{end:?}");
    let stranger = verbs_bootstrap::InstanceId(99);
    let end = within(a.bulk.get(stranger, from, read_only.id, 0)).await;
    assert!(matches!(end, Err(TransferError::ReadOnly { .. })), "{end:?}");
    let end = within(a.bulk.put(stranger, read_only.id, 0, from)).await;
    assert!(matches!(end, Err(TransferError::PeerNotRegistered { peer }) if peer == stranger), "{end:?}");
    let stats = a.bulk.stats();
    assert_eq!((stats.chunks, stats.epochs_begun, stats.refused), (0, 0, 9), "{stats:?}");
    stop(a, b).await;
}

/// Sends one frame and takes it there.
async fn one_frame<F: BulkFabric>(from: &BulkNode<F>, to: &mut BulkNode<F>, n: u32) {
    let header = n.to_be_bytes().to_vec();
    let _ = from.worker.send(to.id(), header.into(), "".into(), MessageType::Message, from.errors.clone());
    let frame = within(to.inbound.message.recv()).await.expect("the frame");
    assert_eq!(frame.header, n.to_be_bytes()[..]);
}

/// RT-15: an error at the consumer, another QP, the next GET works, and messages notice nothing.
pub async fn rt_15_a_stale_key_costs_one_connection<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, mut b) = bulk_pair(&*lab).await;
    let into = a.map_filled(4096, 0, Access::DESTINATION).await;
    for round in 0..lab.rounds(20, 4) {
        let fill = u8::try_from(round + 1).expect("few");
        let source = b.map_filled(4096, fill, Access::SOURCE).await;
        let descriptor = source.whole().expect("remote");
        within(a.bulk.get(b.id(), descriptor, into.id, 0)).await.expect("a GET");
        assert_eq!(a.bytes(into.id, 4096), vec![fill; 4096]);
        one_frame(&a, &mut b, 2 * round).await;
        let before = a.bulk.describe(b.id()).expect("connected").qpn;
        b.unmap(source).await;
        let end = within(a.bulk.get(b.id(), descriptor, into.id, 0)).await;
        assert!(matches!(end, Err(TransferError::Failed { .. })), "{end:?}");
        assert_eq!(a.bytes(into.id, 4096), vec![fill; 4096], "no foreign byte");
        one_frame(&a, &mut b, 2 * round + 1).await;
        let again = b.map_filled(4096, fill ^ 0x80, Access::SOURCE).await;
        within(a.bulk.get(b.id(), again.whole().expect("remote"), into.id, 0)).await.expect("by a new connection");
        assert_eq!(a.bytes(into.id, 4096), vec![fill ^ 0x80; 4096]);
        assert_ne!(a.bulk.describe(b.id()).expect("connected").qpn, before, "QPs are never used again");
        b.unmap(again).await;
    }
    until("both halves are gone", || a.bulk.stats().qps == 1 && b.bulk.stats().qps == 1).await;
    assert_eq!((a.worker.stats().connections_made, b.worker.stats().connections_made), (1, 1));
    a.errors.assert_none();
    stop(a, b).await;
}

/// B25, and RT-15's other ways: each is a typed error on one connection.
pub async fn b25_wrong_rights_are_typed_errors<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair(&*lab).await;
    let source = b.map(numbered(8192), Access::SOURCE).await;
    let target = b.map_filled(8192, 0x55, Access::PUT_TARGET).await;
    let mine = a.map_filled(16_384, 0xaa, Access::DESTINATION).await;
    let (read, write) = (source.whole().expect("remote"), target.whole().expect("remote"));
    let gets = [
        ("a wrong key", RemoteRange { rkey: Rkey(read.rkey.0 ^ 0x0101), ..read }),
        ("one byte too long", RemoteRange { len: 8193, ..read }),
        ("a wrong address", RemoteRange { addr: read.addr.wrapping_sub(1 << 30), ..read }),
        ("no right to read", write),
    ];
    for (what, from) in gets {
        let end = within(a.bulk.get(b.id(), from, mine.id, 0)).await;
        assert!(matches!(end, Err(TransferError::Failed { .. })), "{what}: {end:?}");
        assert!(!end.expect_err("it is one").is_retriable(), "{what}");
    }
    assert_eq!(a.bytes(mine.id, 16_384), vec![0xaa; 16_384]);
    let end = within(a.bulk.put(b.id(), mine.id, 0, read)).await;
    assert!(matches!(end, Err(TransferError::Failed { .. })), "no right to write: {end:?}");
    let end = within(a.bulk.put(b.id(), mine.id, 0, RemoteRange { len: 8193, ..write })).await;
    assert!(matches!(end, Err(TransferError::Failed { .. })), "one byte too long: {end:?}");
    assert_eq!(b.bytes(source.id, 8192), numbered(8192));
    within(a.bulk.get(b.id(), read, mine.id, 0)).await.expect("all is well again");
    // Six connections ended, each by its failed work request or by the peer's end of it, whichever is heard of first.
    let stats = a.bulk.stats();
    let ended: u64 = ["work_request", "peer_closed"].iter().filter_map(|cause| stats.ended.get(cause)).sum();
    assert_eq!((stats.failed, stats.epochs_ended, ended), (6, 6, 6), "{stats:?}");
    stop(a, b).await;
}

/// RT-16, R-31.
pub async fn rt_16_neighbours_are_reset_and_succeed_again<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let config = BulkConfig { chunk_bytes: 64 << 10, rd_atomic_max: 4, ..BulkConfig::default() };
    let (a, b) = bulk_pair_with(&*lab, &config).await;
    let len = 4 << 20;
    let source = b.map(numbered(len), Access::SOURCE).await;
    let good = source.whole().expect("remote");
    let bad = RemoteRange { rkey: Rkey(good.rkey.0 ^ 0x0101), ..good };
    let mut regions = Vec::new();
    for _ in 0..4 {
        regions.push(a.map_filled(len, 0, Access::DESTINATION).await);
    }
    let gets: Vec<_> = regions[..3].iter().map(|region| a.bulk.get(b.id(), good, region.id, 0)).collect();
    let watches: Vec<_> = gets.iter().map(verbs_rma::bulk::Transfer::handle).collect();
    let gets: Vec<_> = gets.into_iter().map(tokio::spawn).collect();
    until("all are under way", || watches.iter().all(|watch| watch.moved() > 0)).await;
    let end = within(a.bulk.get(b.id(), bad, regions[3].id, 0)).await;
    assert!(matches!(end, Err(TransferError::Failed { .. })), "the culprit: {end:?}");
    for get in gets {
        let end = within(get).await.expect("no panic").expect_err("nothing of it could go on");
        assert!(
            matches!(&end, TransferError::ConnectionReset { cause, .. } if matches!(**cause, BulkEnd::WorkRequest { .. })),
            "{end}"
        );
        assert!(end.is_retriable());
    }
    for region in &regions {
        within(a.bulk.get(b.id(), good, region.id, 0)).await.expect("again");
        assert!(a.bytes(region.id, len) == numbered(len));
    }
    assert_eq!(a.bulk.stats().epochs_ended, 1);
    stop(a, b).await;
}

/// A worker without bulk memory says so, by its offer when it is connected, by its refusal when not.
pub async fn a_peer_without_bulk_memory_is_told_apart<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let a = BulkNode::start(&*lab, 1).await;
    let plain = Worker::new(lab.config(2), lab.fabric(2)).expect("a valid configuration");
    let _inbound = plain.start().await.expect("it starts");
    let peer = a.worker.register(&plain.address()).expect("the address is good");
    let mine = a.map_filled(10, 0, Access::DESTINATION).await;
    let nowhere = RemoteRange { addr: 4096, rkey: Rkey(1), len: 10 };
    let end = within(a.bulk.get(peer, nowhere, mine.id, 0)).await;
    let refused =
        matches!(&end, Err(TransferError::Connect { cause, .. }) if cause.to_string().contains("no bulk memory"));
    assert!(refused, "{end:?}");
    within(a.worker.ensure_connected(peer)).await.expect("messages flow");
    let end = within(a.bulk.get(peer, nowhere, mine.id, 0)).await;
    assert!(matches!(end, Err(TransferError::NoCapability { .. })), "{end:?}");
    let run = a.worker.peer_facts(peer).expect("known").run.expect("connected");
    assert_eq!(run.features & FEATURE_RMA, 0);
    a.stop().await;
    plain.shutdown().await;
}

/// The deadline holds while a transfer waits for its connection, and while it moves.
pub async fn a_deadline_ends_a_transfer_that_cannot_go_on<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let config = BulkConfig { chunk_bytes: 64 << 10, rd_atomic_max: 1, ..BulkConfig::default() };
    let (a, b) = bulk_pair_with(&*lab, &config).await;
    let len = 16 << 20;
    let source = b.map_filled(len, 1, Access::SOURCE).await;
    let into = a.map_filled(len, 0, Access::DESTINATION).await;
    let from = source.whole().expect("remote");
    within(a.bulk.get(b.id(), source.remote(0..1).expect("within"), into.id, 0)).await.expect("connected");
    let limit = Duration::from_millis(40);
    let get = a.bulk.get(b.id(), from, into.id, 0).within(limit);
    let watch = get.handle();
    let end = within(get).await;
    assert!(matches!(end, Err(TransferError::Deadline { after }) if after == limit), "{end:?}");
    assert!(watch.moved() < len as u64);
    assert_eq!((a.bulk.stats().epochs_ended, a.bulk.stats().expired), (0, 1), "what was posted has drained");
    stop(a, b).await;
}

/// An abort is for a right that is over: the posted READs end with their QP.
pub async fn an_abort_takes_the_connection_down_and_nothing_else<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, mut b) = bulk_pair(&*lab).await;
    one_frame(&a, &mut b, 1).await;
    let len = 8 << 20;
    let source = b.map_filled(len, 1, Access::SOURCE).await;
    let into = a.map_filled(len, 0, Access::DESTINATION).await;
    let from = source.whole().expect("remote");
    let get = a.bulk.get(b.id(), from, into.id, 0);
    let handle = get.handle();
    let get = tokio::spawn(get);
    until("it is under way", || handle.moved() > 0).await;
    handle.abort();
    let end = within(get).await.expect("no panic");
    assert!(matches!(end, Err(TransferError::Cancelled)), "{end:?}");
    until("its QP is destroyed", || a.bulk.stats().qps == 0 && b.bulk.stats().qps == 0).await;
    one_frame(&a, &mut b, 2).await;
    within(a.bulk.get(b.id(), source.remote(0..9).expect("within"), into.id, 0)).await.expect("a new connection");
    assert_eq!(a.bulk.stats().ended.get("aborted"), Some(&1));
    assert_eq!(b.bulk.stats().ended.get("peer_closed"), Some(&1), "{:?}", b.bulk.stats());
    stop(a, b).await;
}
