//! where leases are memory windows: what is bound, what ends it, and what goes another way.

use std::{sync::Arc, time::Duration};

use verbs_bootstrap::InstanceId;
use verbs_rma::{
    Bulk, BulkConfig, Handle, RemoteRange, Rendezvous, RendezvousConfig, TransferError,
    bulk::BulkStats,
    proto::wire::{Answer, BACKEND_VERBS, Call, Capability, Grant, Key},
};
use verbs_transport::{
    MessageType, Worker,
    fabric::bulk::{Access, BulkFabric, OwnedBytes, Rkey},
    sim::SimFabric,
};

use crate::{
    bare::Bare,
    bulk::{BULK_PATIENCE, until},
    lab::{Lab, SimLab},
    party::{Party, next_message, slot_pattern},
};

const LEN: usize = 300_000;

/// A party whose bulk memory can be looked at.
async fn party<L: Lab<F: BulkFabric>>(lab: &L, n: u32) -> (Party<L::F>, Bulk<L::F>) {
    let worker = Worker::new(lab.config(n), lab.fabric(n)).expect("a valid configuration");
    let (bulk, _notifications) = Bulk::attach(&worker, BulkConfig::default()).expect("the device has bulk memory");
    let config = RendezvousConfig { arena_bytes: 4 << 20, ..RendezvousConfig::default() };
    let rendezvous = Rendezvous::with_bulk(worker, bulk.clone(), config).expect("attached before start");
    (Party::run(rendezvous).await, bulk)
}

fn windows(stats: &BulkStats) -> (u64, u64, u64, u64) {
    (stats.windows_bound, stats.windows_invalidated, stats.windows_freed, stats.windows)
}

/// Each lease is a window, invalidated at its end; a lease whose consumer leaves ends with the connection, and the QP goes
/// at once. What is registered is the arena, once.
pub async fn leases_are_windows_and_end_with_them<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let ((owner, ours), (consumer, _)) = (party(&*lab, 1).await, party(&*lab, 2).await);
    consumer.register(&owner);
    // Else the owner cannot dial, and the first lease takes a registration.
    owner.register(&consumer);
    assert!(ours.limits().windows.usable(), "this lab has windows: {}", ours.limits().windows);
    let rounds = u64::from(lab.rounds(300, 20));
    for n in 1..=rounds {
        let handle = owner.rendezvous.stage_pinned(slot_pattern(n, LEN)).await.expect("there is room");
        let mut bytes = Vec::new();
        consumer.rendezvous.pull(handle).and_release().into(&mut bytes).await.expect("it is there");
        assert!(bytes == slot_pattern(n, LEN), "foreign bytes in round {n}");
    }
    owner.assert_empty(BULK_PATIENCE).await;
    let stats = ours.stats();
    assert_eq!(windows(&stats), (rounds, rounds, 0, 0), "{stats:#?}");
    assert_eq!((owner.rendezvous.stats().granted.rdma, stats.regions), (rounds, 1), "{stats:#?}");

    let handle = owner.rendezvous.stage_pinned(slot_pattern(0, LEN)).await.expect("there is room");
    let (_, lease) = consumer.rendezvous.get(handle).await.expect("it is there");
    assert_eq!(windows(&ours.stats()), (rounds + 1, rounds, 0, 1));
    let began = tokio::time::Instant::now();
    consumer.stop().await;
    until("the window is gone with its connection", || windows(&ours.stats()) == (rounds + 1, rounds, 1, 0)).await;
    until("its QP, too", || ours.stats().qps == 0).await;
    assert!(began.elapsed() < Duration::from_secs(20), "no QP waits for a window: {:?}", began.elapsed());
    drop(lease); // not given back while its consumer was there
    owner.rendezvous.withdraw(handle);
    owner.assert_empty(BULK_PATIENCE).await;
    owner.stop().await;
    assert_eq!((ours.stats().regions, ours.stats().leaked), (0, 0));
}

/// On a device that says it has windows and binds none. Needs a lab where each bind fails.
pub async fn windows_that_fail_are_replaced_by_registrations<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let ((owner, ours), (consumer, _)) = (party(&*lab, 1).await, party(&*lab, 2).await);
    consumer.register(&owner);
    for n in 1..=10 {
        let handle = owner.rendezvous.stage_pinned(slot_pattern(n, LEN)).await.expect("there is room");
        let mut bytes = Vec::new();
        consumer.rendezvous.pull(handle).and_release().into(&mut bytes).await.expect("it comes all the same");
        assert!(bytes == slot_pattern(n, LEN), "foreign bytes in round {n}");
        // Past the back-off of a connection that a failed bind took down.
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    let stats = ours.stats();
    assert_eq!((stats.windows_failed, windows(&stats)), (3, (0, 0, 3, 0)), "{stats:#?}");
    assert_eq!(owner.rendezvous.stats().granted.rdma, 10);
    owner.assert_empty(BULK_PATIENCE).await;
    consumer.stop().await;
    owner.stop().await;
}

/// How often a peer's invalidation was the end of a bulk connection.
fn invalidated(stats: &BulkStats) -> u64 {
    stats.ended.get("invalidated").copied().unwrap_or_default()
}

/// A lease by hand: its number, and the right to the bytes.
async fn acquire(consumer: &mut Bare<SimFabric>, owner: InstanceId, handle: Handle) -> (u64, RemoteRange) {
    let capability = Some(Capability { backends: 1 << BACKEND_VERBS, room_bytes: 1 << 30 });
    consumer.ask(owner, Call::Acquire { handle, chunk_bytes: 512 << 10, capability });
    let Answer::Acquired { lease, grant: Grant::Read(descriptor), .. } = consumer.reply().await else {
        panic!("no descriptor")
    };
    let Key::Verbs { addr, rkey } = descriptor.key else { panic!("{descriptor:?}") };
    (lease, RemoteRange { addr, rkey: Rkey(rkey), len: descriptor.total_bytes })
}

/// Only the owner ends a window. A peer that invalidates one has broken the protocol: its bulk connection ends, typed, and
/// that key opens nothing. Messages go on, and the next lease gets a right of its own on the next connection.
pub async fn a_peer_that_invalidates_a_window_loses_its_connection(lab: Arc<SimLab>) {
    let (owner, ours) = party(&*lab, 1).await;
    let mut consumer = Bare::start(&*lab, 2, |_| Vec::new()).await;
    let id = consumer.worker.register(&owner.rendezvous.worker().address()).expect("good");
    let peer = owner.rendezvous.register(&consumer.worker.address()).expect("good");
    let memory = OwnedBytes::new(vec![0; LEN]);
    let into = consumer.bulk.map_all(memory, Access::DESTINATION).await.expect("it is mapped").id;
    let handle = owner.rendezvous.stage_pinned(slot_pattern(1, LEN)).await.expect("there is room");

    let (first, from) = acquire(&mut consumer, id, handle).await;
    consumer.bulk.get(id, from, into, 0).await.expect("the lease lives");
    assert_eq!(windows(&ours.stats()), (1, 0, 0, 1));
    let qpn = consumer.bulk.describe(id).expect("connected").qpn;
    assert_eq!(lab.world.invalidate_at_peer(SimLab::addr(2), qpn), Some(from.rkey.0));
    until("its connection has ended", || invalidated(&ours.stats()) == 1).await;
    until("the window is freed with it", || windows(&ours.stats()) == (1, 0, 1, 0)).await;
    until("nothing of it is left", || ours.stats().qps == 0 && consumer.bulk.stats().qps == 0).await;

    // The key is dead on the next connection, too, which that attempt costs.
    consumer.bulk.write_region(into, 0, &vec![0; LEN]).expect("within");
    let stale = loop {
        match consumer.bulk.get(id, from, into, 0).await.expect_err("the right is gone") {
            // Connections that fail in a row are not dialed at once.
            TransferError::Connect { .. } => tokio::time::sleep(Duration::from_secs(1)).await,
            error => break error,
        }
    };
    assert!(matches!(stale, TransferError::Failed { .. }), "{stale}");
    let mut bytes = vec![0; LEN];
    consumer.bulk.read_region(into, 0, &mut bytes).expect("within");
    assert!(bytes.iter().all(|byte| *byte == 0), "not a byte by a dead key");

    // Past the back-off: the same payload, by another right.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let (second, again) = acquire(&mut consumer, id, handle).await;
    assert!(second != first && again.rkey != from.rkey, "{again:?} after {from:?}");
    consumer.bulk.get(id, again, into, 0).await.expect("a new right");
    consumer.bulk.read_region(into, 0, &mut bytes).expect("within");
    assert!(bytes == slot_pattern(1, LEN));
    assert_eq!(windows(&ours.stats()), (2, 0, 1, 1));

    // The first lease is a lease still, though its right is gone: it is given back as any other.
    for lease in [first, second] {
        consumer.ask(id, Call::Detach { handle, lease });
    }
    owner.until("ends of both leases", BULK_PATIENCE, |stats| stats.book.leases == 0 && stats.book.rights == 0).await;
    assert_eq!((windows(&ours.stats()), invalidated(&ours.stats())), ((2, 1, 1, 0), 1));
    owner.rendezvous.withdraw(handle);
    owner.assert_empty(BULK_PATIENCE).await;
    let epochs = (owner.rendezvous.worker().stats().epochs_begun, consumer.worker.stats().epochs_begun);
    assert_eq!(epochs, (1, 1), "messages between {id:?} and {peer:?} noticed nothing");
    consumer.stop().await;
    owner.stop().await;
    assert_eq!((ours.stats().regions, ours.stats().leaked), (0, 0));
}

/// The same in the middle of a READ, with an honest rendezvous above: that payload comes in chunks, the next by READ.
/// Needs a lab where bytes take their time.
pub async fn an_invalidation_during_a_read_costs_a_second_try(lab: Arc<SimLab>) {
    const LONG: usize = 3 << 20;
    let ((mut owner, ours), (consumer, theirs)) = (party(&*lab, 1).await, party(&*lab, 2).await);
    consumer.register(&owner);
    owner.register(&consumer);
    let handle = owner.rendezvous.stage_pinned(slot_pattern(1, LONG)).await.expect("there is room");
    let rendezvous = consumer.rendezvous.clone();
    let pulling = tokio::spawn(async move {
        let mut bytes = Vec::new();
        rendezvous.pull(handle).and_release().into(&mut bytes).await.map(|pulled| (pulled.path, bytes))
    });
    until("the READ is under way", || theirs.stats().bytes_read > 0).await;
    let qpn = theirs.describe(owner.id()).expect("connected").qpn;
    assert!(lab.world.invalidate_at_peer(SimLab::addr(2), qpn).is_some());
    drop(consumer.send(owner.id(), MessageType::Message, "meanwhile", ""));
    let (path, bytes) = pulling.await.expect("no panic").expect("by the second try");
    assert!(bytes == slot_pattern(1, LONG), "other bytes");
    assert!(path.is_err(), "in chunks: {path:?}");
    assert_eq!(invalidated(&ours.stats()), 1);
    assert_eq!(consumer.rendezvous.stats().reads_failed, 1);
    assert_eq!(next_message(&mut owner.inbound.message, BULK_PATIENCE).await.header, "meanwhile");

    // Past the back-off.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let handle = owner.rendezvous.stage_pinned(slot_pattern(2, LONG)).await.expect("there is room");
    let mut bytes = Vec::new();
    let pulled = consumer.rendezvous.pull(handle).and_release().into(&mut bytes).await.expect("nothing is wrong");
    assert!(pulled.path.is_ok() && bytes == slot_pattern(2, LONG), "{:?}", pulled.path);
    owner.assert_empty(BULK_PATIENCE).await;
    assert_eq!(windows(&ours.stats()), (2, 1, 1, 0));
    let epochs = |party: &Party<SimFabric>| party.rendezvous.worker().stats().epochs_begun;
    assert_eq!((epochs(&owner), epochs(&consumer)), (1, 1), "messages noticed nothing");
    consumer.errors.assert_none();
    consumer.stop().await;
    owner.stop().await;
}
