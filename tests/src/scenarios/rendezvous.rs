//! RT-1 to RT-10 and RT-22 of the contract of remote memory, whichever way the bytes go, and bad input.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use verbs_rma::{
    AskError, Handle, PathReason, PullError, RefusalCode, RendezvousConfig,
    proto::wire::{Call, Request},
    rendezvous::{Destination, Source, StageOptions},
};
use verbs_transport::{
    Lane, MessageType, SendError,
    fabric::{Fabric, bulk::BulkFabric},
};

use crate::{
    lab::Lab,
    node::{Node, pattern},
    party::{Party, next_message, slot_pattern},
};

/// For one transfer, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(30);

fn config() -> RendezvousConfig {
    // Arenas that are quick to touch under emulation.
    RendezvousConfig { arena_bytes: 4 << 20, ..RendezvousConfig::default() }
}

/// Owner and consumer, who knows the owner.
async fn pair<L: Lab<F: BulkFabric>>(lab: &L) -> (Party<L::F>, Party<L::F>) {
    let (owner, consumer) = (Party::start(lab, 1, config()).await, Party::start(lab, 2, config()).await);
    consumer.register(&owner);
    (owner, consumer)
}

async fn stop<F: Fabric>(owner: Party<F>, consumer: Party<F>) {
    owner.assert_empty(PATIENCE).await;
    consumer.assert_empty(PATIENCE).await;
    owner.errors.assert_none();
    consumer.errors.assert_none();
    consumer.stop().await;
    owner.stop().await;
}

fn refusal<T: std::fmt::Debug>(asked: Result<T, AskError>) -> RefusalCode {
    match asked {
        Err(AskError::Refused { code, .. }) => code,
        other => panic!("not refused: {other:?}"),
    }
}

/// RT-1.
pub async fn rt_01_one_kibibyte<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    round_trip(&*lab, vec![0xab; 1024].into()).await;
}

/// RT-2.
pub async fn rt_02_one_mebibyte<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    round_trip(&*lab, pattern(1 << 20)).await;
}

/// nothing to transfer is no special case for the caller.
pub async fn an_empty_payload<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    round_trip(&*lab, Bytes::new()).await;
}

async fn round_trip<L: Lab<F: BulkFabric>>(lab: &L, payload: Bytes) {
    let (owner, consumer) = pair(lab).await;
    for pinned in [false, true] {
        let options = StageOptions { pinned, ..StageOptions::default() };
        let handle = owner.rendezvous.stage_with(payload.clone(), options).await.expect("small");
        let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("it is there");
        assert!(bytes == payload, "other bytes");
        assert_eq!(owner.rendezvous.stats().book.leases, 1);
        consumer.rendezvous.release(lease);
    }
    let paths = consumer.rendezvous.stats().pulled;
    // Of an empty payload there is nothing to READ.
    assert_eq!((paths.rdma, paths.chunked_total()), if payload.is_empty() { (0, 2) } else { (1, 1) });
    stop(owner, consumer).await;
}

/// RT-3.
pub async fn rt_03_metadata<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab).await;
    let handle = owner.rendezvous.stage(pattern(4096)).expect("small");
    let told = consumer.rendezvous.metadata(handle).await.expect("it is there");
    assert_eq!((told.total_bytes, told.refcount, told.pinned), (4096, 1, false));
    assert_eq!(owner.rendezvous.stats().book.leases, 0);
    owner.rendezvous.withdraw(handle);
    assert_eq!(refusal(consumer.rendezvous.metadata(handle).await), RefusalCode::UnknownHandle);
    stop(owner, consumer).await;
}

/// RT-4.
pub async fn rt_04_get_into<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab).await;
    let handle = owner.rendezvous.stage(pattern(2048)).expect("small");
    let mut exact = vec![0; 2048];
    let lease = consumer.rendezvous.get_into(handle, &mut exact[..]).await.expect("it fits");
    assert!(exact == pattern(2048));
    consumer.rendezvous.detach(lease);
    let mut grows = Vec::with_capacity(512);
    let lease = consumer.rendezvous.get_into(handle, &mut grows).await.expect("it grows");
    assert!(grows == pattern(2048));
    consumer.rendezvous.detach(lease);

    let served = owner.rendezvous.stats().chunks_served;
    let mut small = [7; 2047];
    match consumer.rendezvous.get_into(handle, &mut small[..]).await {
        Err(PullError::Capacity { total_bytes: 2048, capacity: 2047 }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!((small, owner.rendezvous.stats().chunks_served), ([7; 2047], served), "refused before any transfer");
    owner.until("lease given back", PATIENCE, |stats| stats.book.leases == 0).await;

    let payload: Bytes = (0..512 << 10).map(|i| u8::try_from(i % 251).unwrap_or_default()).collect();
    let large = owner.rendezvous.stage(payload.clone()).expect("small");
    let mut bytes = Vec::new();
    let lease = consumer.rendezvous.get_into(large, &mut bytes).await.expect("it grows");
    assert!(bytes == payload);
    consumer.rendezvous.release(lease);
    let mut written = std::io::Cursor::new(Vec::new());
    let lease = consumer.rendezvous.get_into(handle, Destination::writer(&mut written)).await.expect("it takes all");
    assert!(written.into_inner() == pattern(2048));
    consumer.rendezvous.release(lease);
    stop(owner, consumer).await;
}

/// RT-5.
pub async fn rt_05_detach_and_get_again<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab).await;
    let handle = owner.rendezvous.stage(pattern(100_000)).expect("small");
    let (first, lease) = consumer.rendezvous.get(handle).await.expect("it is there");
    consumer.rendezvous.detach(lease);
    let (second, lease) = consumer.rendezvous.get(handle).await.expect("it is still there");
    assert!(first == second && first == pattern(100_000));
    consumer.rendezvous.release(lease);
    stop(owner, consumer).await;
}

/// RT-6.
pub async fn rt_06_references<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab).await;
    let handle = owner.rendezvous.stage(pattern(1000)).expect("small");
    assert_eq!(consumer.rendezvous.ref_handle(handle).await.expect("it is there"), 2);
    let (_, lease) = consumer.rendezvous.get(handle).await.expect("it is there");
    consumer.rendezvous.release(lease);
    assert_eq!(consumer.rendezvous.metadata(handle).await.expect("one is left").refcount, 1);
    let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("still readable");
    assert!(bytes == pattern(1000));
    consumer.rendezvous.release(lease);
    assert_eq!(refusal(consumer.rendezvous.metadata(handle).await), RefusalCode::UnknownHandle);
    stop(owner, consumer).await;
}

/// RT-7.
pub async fn rt_07_same_worker<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab).await;
    let me = &owner.rendezvous;
    for handle in [me.stage(pattern(5000)).expect("small"), me.stage_pinned(pattern(5000)).await.expect("small")] {
        assert_eq!(me.metadata(handle).await.expect("mine").total_bytes, 5000);
        assert_eq!(me.ref_handle(handle).await.expect("mine"), 2);
        let (bytes, mut lease) = me.get(handle).await.expect("mine");
        assert!(bytes == pattern(5000));
        me.renew(&mut lease).await.expect("it lives");
        me.release(lease);
        let (_, lease) = me.get(handle).await.expect("one reference is left");
        me.release(lease);
        assert_eq!(refusal(me.metadata(handle).await), RefusalCode::UnknownHandle);
    }
    assert_eq!(me.stats().asked, 0, "no wire");
    stop(owner, consumer).await;
}

/// RT-8: 2,000 B in chunks of 1,024, and whatever else a size may be.
pub async fn rt_08_chunks<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let small = RendezvousConfig { chunk_bytes: 1024, ..config() };
    let (owner, consumer) = (Party::start(&*lab, 1, config()).await, Party::start(&*lab, 2, small).await);
    consumer.register(&owner);
    for (len, chunks) in [(1, 1), (1023, 1), (1024, 1), (1025, 2), (2000, 2), (20_480, 20), (20_481, 21)] {
        let before = owner.rendezvous.stats();
        let handle = owner.rendezvous.stage(slot_pattern(7, len)).expect("small");
        let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("it is there");
        assert!(bytes == slot_pattern(7, len), "{len} bytes");
        consumer.rendezvous.release(lease);
        let after = owner.rendezvous.stats();
        assert_eq!(after.chunks_served - before.chunks_served, chunks, "{len} bytes");
        assert_eq!(after.chunk_bytes_served - before.chunk_bytes_served, len as u64);
    }
    assert_eq!(consumer.rendezvous.stats().pulled.by(PathReason::NotPinned), 7);
    stop(owner, consumer).await;
}

/// The API of applications: a file on one side, a writer and its progress on the other.
pub async fn a_file_is_offered_and_pulled<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab).await;
    let payload = slot_pattern(1, 3_000_001);
    let path = std::env::temp_dir().join(format!("rendezvous-{:016x}", fastrand::u64(..)));
    std::fs::write(&path, &payload).expect("a temporary file");
    let handle = owner.rendezvous.offer(Source::open(&path).expect("it is there")).await.expect("it can be read");
    std::fs::remove_file(&path).expect("it is there");
    let handle: Handle = handle.to_string().parse().expect("handles are text, too");

    let (mut bytes, mut steps) = (Vec::new(), Vec::new());
    let pull = consumer.rendezvous.pull(handle).within(PATIENCE).on_progress(|done, total| steps.push((done, total)));
    let pulled = pull.into(&mut bytes).await.expect("it is there");
    assert!(bytes == payload, "other bytes");
    assert_eq!(pulled.bytes, 3_000_001);
    assert!(steps.is_sorted() && steps.last() == Some(&(3_000_001, 3_000_001)), "{steps:?}");

    let mut written = std::io::Cursor::new(Vec::new());
    consumer.rendezvous.pull(handle).into(Destination::writer(&mut written)).await.expect("it is still there");
    assert!(written.into_inner() == payload, "other bytes");
    owner.rendezvous.withdraw(handle);
    stop(owner, consumer).await;
}

/// RT-10.
pub async fn rt_10_messages_of_any_size<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (mut owner, mut consumer) = pair(&*lab).await;
    owner.register(&consumer);
    let payload: Bytes = (0..512 << 10).map(|i| u8::try_from(i % 199).unwrap_or_default()).collect();
    let there = consumer.send(owner.id(), MessageType::Message, "echo", payload.clone());
    drop(there);
    let request = next_message(&mut owner.inbound.message, PATIENCE).await;
    assert!(request.header == "echo"[..] && request.payload == payload);
    assert_eq!((request.peer, request.lane), (consumer.id(), Lane::Application));
    let _ = owner.send(consumer.id(), MessageType::Response, request.header, request.payload);
    let response = next_message(&mut consumer.inbound.response, PATIENCE).await;
    assert!(response.header == "echo"[..] && response.payload == payload);

    // Small ones stay in their frame.
    let staged = consumer.rendezvous.stats().messages_staged;
    let _ = consumer.send(owner.id(), MessageType::Message, "small", pattern(1024));
    assert!(next_message(&mut owner.inbound.message, PATIENCE).await.payload == pattern(1024));
    assert_eq!(consumer.rendezvous.stats().messages_staged, staged);

    // Above the largest frame.
    let _ = consumer.send(owner.id(), MessageType::Event, "large", slot_pattern(3, 20 << 20));
    let event = next_message(&mut owner.inbound.event, PATIENCE).await;
    assert!(event.header == "large"[..] && event.payload == slot_pattern(3, 20 << 20));
    assert_eq!(owner.rendezvous.stats().messages_pulled, 2);
    stop(owner, consumer).await;
}

/// Large and small ones of two peers, in the order in which each sent them.
pub async fn messages_keep_their_order<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let mut receiver = Party::start(&*lab, 1, config()).await;
    let senders = [Party::start(&*lab, 2, config()).await, Party::start(&*lab, 3, config()).await];
    let count = lab.rounds(60, 20);
    for sender in &senders {
        sender.register(&receiver);
        for n in 0..count {
            let len = if n % 3 == 0 { 300 << 10 } else { n as usize };
            let _ =
                sender.send(receiver.id(), MessageType::Message, n.to_be_bytes().to_vec(), slot_pattern(n.into(), len));
        }
    }
    let mut next = [0_u32; 2];
    for _ in 0..2 * count {
        let message = next_message(&mut receiver.inbound.message, PATIENCE).await;
        let which = usize::from(message.peer == senders[1].id());
        let n = next[which];
        assert_eq!(message.header, n.to_be_bytes()[..]);
        let len = if n % 3 == 0 { 300 << 10 } else { n as usize };
        assert!(message.payload == slot_pattern(n.into(), len), "other bytes in {n}");
        next[which] += 1;
    }
    for sender in senders {
        sender.assert_empty(PATIENCE).await;
        sender.errors.assert_none();
        sender.stop().await;
    }
    receiver.stop().await;
}

/// A message that is not pulled comes back once, with its bytes and the reason.
pub async fn a_message_that_is_not_pulled_comes_back<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let ttl = Duration::from_secs(1);
    let short = RendezvousConfig { staged_ttl: ttl, ..config() };
    let (sender, receiver) = (Party::start(&*lab, 1, short).await, Party::start(&*lab, 2, config()).await);
    sender.register(&receiver);
    // Nobody reads the stream.
    let _ = sender.send(receiver.id(), MessageType::Message, "late", slot_pattern(9, 300_000));
    sender.until("message back", PATIENCE, |stats| stats.messages_failed == 1).await;
    let errors = sender.errors.all();
    assert_eq!(errors.len(), 1);
    let (header, payload, error) = &errors[0];
    assert!(header == "late" && *payload == slot_pattern(9, 300_000));
    assert!(matches!(error, SendError::NotPulled { bytes: 300_000, .. }), "{error}");

    // Above the cap: never staged.
    let sized = RendezvousConfig { payload_max_bytes: 1 << 20, ..config() };
    let third = Party::start(&*lab, 3, sized).await;
    third.register(&receiver);
    let _ = third.send(receiver.id(), MessageType::Message, "huge", pattern((1 << 20) + 1));
    let errors = third.errors.all();
    assert!(matches!(errors[0].2, SendError::TooLarge { bytes: 0x10_0001, max: 0x10_0000 }), "{:?}", errors[0].2);
    assert_eq!((errors.len(), third.rendezvous.stats().messages_staged), (1, 0));

    third.stop().await;
    receiver.stop().await;
    sender.assert_empty(PATIENCE).await;
    sender.stop().await;
}

/// To a peer without a rendezvous messages go in frames as ever, and its handles cannot be asked for. Only what was sent
/// before that was known comes back: its place among the others is gone.
pub async fn a_peer_without_a_rendezvous<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let party = Party::start(&*lab, 1, config()).await;
    let mut plain = Node::start(&*lab, 2).await;
    let id = party.rendezvous.register(&plain.worker.address()).expect("good");
    let _ = party.send(id, MessageType::Message, "h", pattern(600_000));
    party.until("message back", PATIENCE, |stats| stats.messages_failed == 1).await;
    let errors = party.errors.all();
    assert!(matches!(errors[0].2, SendError::NoSuchLane { lane: Lane::Indirect, .. }), "{:?}", errors[0].2);
    assert!(errors.len() == 1 && errors[0].1 == pattern(600_000));
    party.rendezvous.worker().ensure_connected(id).await.expect("it is there");
    let _ = party.send(id, MessageType::Message, "h", pattern(600_000));
    let frame = crate::node::next_within(&mut plain.inbound.message, PATIENCE).await;
    assert!(frame.payload == pattern(600_000));
    assert_eq!((party.rendezvous.stats().messages_staged, plain.worker.stats().malformed), (1, 0));
    let handle = Handle { worker: plain.worker.identity().incarnation.0, slot: 1 };
    assert!(matches!(party.rendezvous.metadata(handle).await, Err(AskError::NoService { peer }) if peer == id));
    assert_eq!(party.errors.count(), 1);
    party.stop().await;
    plain.stop().await;
}

/// RT-22 over the wire, and every other request that does not fit.
pub async fn rt_22_what_does_not_fit_changes_nothing<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab).await;
    let other = Party::start(&*lab, 3, config()).await;
    other.register(&owner);
    let (one, two) =
        (owner.rendezvous.stage(pattern(9)).expect("small"), owner.rendezvous.stage(pattern(9)).expect("small"));
    let (_, lease) = consumer.rendezvous.get(one).await.expect("it is there");
    other.rendezvous.metadata(one).await.expect("connected");
    let tell = |from: &Party<L::F>, call| {
        let header = Request { correlation: 0, call }.encode().into();
        let errors = from.errors.clone();
        let worker = from.rendezvous.worker();
        drop(worker.send_on(Lane::Service, owner.id(), header, Bytes::new(), MessageType::Message, errors));
    };
    let id = lease.id();
    tell(&consumer, Call::Detach { handle: two, lease: id });
    tell(&consumer, Call::Release { handle: two, lease: id });
    tell(&consumer, Call::Release { handle: one, lease: id + 1 });
    tell(&consumer, Call::Release { handle: one, lease: 0 });
    tell(&other, Call::Release { handle: one, lease: id });
    tell(&other, Call::Detach { handle: one, lease: id });
    let stats = owner.until("mismatches", PATIENCE, |stats| stats.leases_mismatched == 6).await;
    assert_eq!((stats.book.leases, stats.book.slots), (1, 2));
    assert_eq!(consumer.rendezvous.metadata(one).await.expect("untouched").refcount, 1);
    // Twice: the second is without effect on the reference that is left.
    assert_eq!(consumer.rendezvous.ref_handle(one).await.expect("it is there"), 2);
    tell(&consumer, Call::Release { handle: one, lease: id });
    tell(&consumer, Call::Release { handle: one, lease: id });
    owner.until("mismatch", PATIENCE, |stats| stats.leases_mismatched == 7).await;
    assert_eq!(consumer.rendezvous.metadata(one).await.expect("one reference is left").refcount, 1);
    drop(lease);
    owner.until("mismatch", PATIENCE, |stats| stats.leases_mismatched == 8).await;

    // Handles that name nothing.
    let nobody = Handle { worker: 1, slot: 1 };
    assert!(matches!(consumer.rendezvous.metadata(nobody).await, Err(AskError::UnknownOwner { .. })));
    for slot in [0, 99, u64::MAX] {
        let handle = Handle { slot, ..one };
        assert_eq!(refusal(consumer.rendezvous.metadata(handle).await), RefusalCode::UnknownHandle);
        assert_eq!(refusal(consumer.rendezvous.ref_handle(handle).await), RefusalCode::UnknownHandle);
        assert!(matches!(
            consumer.rendezvous.get(handle).await,
            Err(PullError::Ask(AskError::Refused { code: RefusalCode::UnknownHandle, .. }))
        ));
    }
    // Bytes that are no request are counted; the connection and the owner go on.
    let malformed = owner.rendezvous.stats().requests_malformed;
    for bytes in [&b""[..], b"\x02", b"\x01\x63\x00\x00\x00\x00\x00\x00\x00\x01", &[0xff; 300]] {
        let header = Bytes::copy_from_slice(bytes);
        let (worker, errors) = (consumer.rendezvous.worker(), consumer.errors.clone());
        drop(worker.send_on(Lane::Service, owner.id(), header, Bytes::new(), MessageType::Message, errors));
    }
    owner.until("malformed requests", PATIENCE, |stats| stats.requests_malformed == malformed + 4).await;
    assert_eq!(owner.rendezvous.worker().stats().epochs_begun, 2);
    for handle in [one, two] {
        owner.rendezvous.withdraw(handle);
    }
    other.stop().await;
    stop(owner, consumer).await;
}

/// R-70, and slots that are for one peer only.
pub async fn a_slot_has_its_time_and_its_peer<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab).await;
    let other = Party::start(&*lab, 3, config()).await;
    other.register(&owner);
    let options =
        StageOptions { ttl: Some(Duration::from_secs(2)), only_for: Some(consumer.id()), ..StageOptions::default() };
    let handle = owner.rendezvous.stage_with(pattern(100), options).await.expect("small");
    assert_eq!(refusal(other.rendezvous.metadata(handle).await), RefusalCode::UnknownHandle);
    let (_, lease) = consumer.rendezvous.get(handle).await.expect("it is there");
    owner.until("end of the slot", PATIENCE, |stats| stats.book.slots == 1 && stats.book.leases == 1).await;
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while consumer.rendezvous.metadata(handle).await.is_ok() {
        assert!(tokio::time::Instant::now() < deadline, "it never expires");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(refusal(consumer.rendezvous.metadata(handle).await), RefusalCode::Expired, "a lease still holds it");
    consumer.rendezvous.detach(lease);
    owner.assert_empty(PATIENCE).await;
    assert_eq!(refusal(consumer.rendezvous.metadata(handle).await), RefusalCode::UnknownHandle);
    other.stop().await;
    stop(owner, consumer).await;
}

/// without a kill: a consumer that holds its lease for too long loses it, at the owner and at home.
pub async fn a_lease_that_is_not_given_back_is_reaped<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let times = RendezvousConfig {
        lease: Duration::from_secs(2),
        lease_grace: Duration::from_secs(1),
        lease_margin: Duration::from_millis(500),
        ..config()
    };
    let (owner, consumer) = (Party::start(&*lab, 1, times.clone()).await, Party::start(&*lab, 2, times).await);
    consumer.register(&owner);
    let handle = owner.rendezvous.stage(pattern(100)).expect("small");
    let (_, mut lease) = consumer.rendezvous.get(handle).await.expect("it is there");
    tokio::time::sleep(Duration::from_secs(1)).await;
    consumer.rendezvous.renew(&mut lease).await.expect("in time");
    assert!(lease.left() > Duration::from_secs(1));
    owner.until("reaped lease", PATIENCE, |stats| stats.leases_reaped == 1 && stats.book.leases == 0).await;
    assert_eq!(lease.left(), Duration::ZERO, "the consumer's ends first");
    assert_eq!(refusal(consumer.rendezvous.renew(&mut lease).await), RefusalCode::UnknownLease);
    // Too late to release: nothing happens.
    consumer.rendezvous.release(lease);
    owner.until("mismatch", PATIENCE, |stats| stats.leases_mismatched == 1).await;
    assert_eq!(consumer.rendezvous.metadata(handle).await.expect("it is still there").refcount, 1);
    owner.rendezvous.withdraw(handle);
    stop(owner, consumer).await;
}

/// RT-24 by chunks: the owner goes while its payload is pulled; a typed error, and nothing is left.
pub async fn the_owner_shuts_down_while_it_is_pulled_from<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let small = RendezvousConfig { chunk_bytes: 4096, pull_window: 1, ..config() };
    let (owner, consumer) = (Party::start(&*lab, 1, config()).await, Party::start(&*lab, 2, small).await);
    consumer.register(&owner);
    let handle = owner.rendezvous.stage(pattern(4 << 20)).expect("small");
    let (tell, mut halfway) = tokio::sync::watch::channel(0);
    let rendezvous = consumer.rendezvous.clone();
    let pulling = tokio::spawn(async move {
        let mut bytes = Vec::new();
        let pull = rendezvous.pull(handle).on_progress(|done, _| {
            let _ = tell.send(done);
        });
        pull.into(&mut bytes).await
    });
    halfway.wait_for(|done| *done > 100_000).await.expect("it begins");
    owner.stop().await;
    let pulled = tokio::time::timeout(PATIENCE, pulling).await.expect("it ends").expect("no panic");
    assert!(matches!(pulled, Err(PullError::Ask(_))), "{pulled:?}");
    consumer.assert_empty(PATIENCE).await;
    consumer.stop().await;
}
