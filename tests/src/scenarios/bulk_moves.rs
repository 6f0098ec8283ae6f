//! GET, PUT and notifications that go well: RT-13, RT-14, RT-27, B18, B20.

use std::{sync::Arc, time::Duration};

use verbs_rma::{BulkConfig, TransferError};
use verbs_transport::{
    MessageType,
    fabric::bulk::{Access, BulkFabric},
};

use crate::{
    bulk::{BulkNode, asked_rounds, bulk_pair, bulk_pair_with, numbered, until, within},
    lab::Lab,
};

async fn stop<F: BulkFabric>(a: BulkNode<F>, b: BulkNode<F>) {
    a.stop().await;
    b.stop().await;
}

///
pub async fn a_get_brings_every_byte_whatever_its_size<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair(&*lab).await;
    let chunk = 512 << 10;
    let whole = numbered(3 * chunk + 17);
    let source = b.map(whole.clone(), Access::SOURCE).await;
    let into = a.map_filled(whole.len() + 5, 0xee, Access::DESTINATION).await;
    for len in [0, 1, 63, 4095, 4096, chunk - 1, chunk, chunk + 1, whole.len()] {
        let from = source.remote(0..len as u64).expect("within");
        a.bulk.write_region(into.id, 0, &vec![0xee; whole.len() + 5]).expect("within");
        within(a.bulk.get(b.id(), from, into.id, 3)).await.expect("a GET");
        let got = a.bytes(into.id, whole.len() + 5);
        assert!(got[3..3 + len] == whole[..len], "{len} bytes");
        assert!(got[..3].iter().chain(&got[3 + len..]).all(|byte| *byte == 0xee), "{len} bytes, and none beside them");
    }
    let stats = a.bulk.stats();
    assert_eq!((stats.gets, stats.done, stats.epochs_begun), (8, 9, 1), "the empty one posts nothing: {stats:?}");
    assert_eq!(a.worker.stats().connections, 0, "no message was sent for it");
    stop(a, b).await;
}

/// B20: a READ above `max_msg_sz` is several, whatever chunk is configured. (2 GiB and 4 GiB + 1 are counted through in
/// `proto::transfer`.)
pub async fn b20_sizes_around_the_longest_message<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let config = BulkConfig { chunk_bytes: 1 << 30, in_flight_max_bytes: 1 << 40, ..BulkConfig::default() };
    let (a, b) = bulk_pair_with(&*lab, &config).await;
    let longest = usize::try_from(a.bulk.limits().message_bytes).expect("it fits");
    let sizes = [longest - 1, longest, longest + 1];
    let whole = numbered(longest + 1);
    let source = b.map(whole.clone(), Access::SOURCE.and(Access::PUT_TARGET)).await;
    let into = a.map_filled(longest + 1, 0, Access::DESTINATION).await;
    let mut chunks = 0;
    for (len, more) in sizes.into_iter().zip([1, 1, 2]) {
        let there = source.remote(0..len as u64).expect("within");
        within(a.bulk.get(b.id(), there, into.id, 0)).await.expect("a GET");
        chunks += more;
        assert_eq!(a.bulk.stats().chunks, chunks, "READs for {len} bytes");
        within(a.bulk.put(b.id(), into.id, 0, there)).await.expect("a PUT");
        chunks += more;
        assert_eq!(a.bulk.stats().chunks, chunks, "WRITEs for {len} bytes");
    }
    assert!(a.bytes(into.id, whole.len()) == whole && b.bytes(source.id, whole.len()) == whole);
    assert_eq!(a.bulk.stats().epochs_begun, 1, "one connection served them all");
    stop(a, b).await;
}

/// RT-13: with 64 chunks, exactly the window is posted at once; with a window of 1 it works, too.
pub async fn rt_13_the_window_is_used_and_never_exceeded<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    for window in [1, 4, 16] {
        let config = BulkConfig { chunk_bytes: 8 << 10, rd_atomic_max: window, ..BulkConfig::default() };
        let (a, b) = bulk_pair_with(&*lab, &config).await;
        let whole = numbered(64 * (8 << 10));
        let source = b.map(whole.clone(), Access::SOURCE).await;
        let into = a.map_filled(whole.len(), 0, Access::DESTINATION).await;
        within(a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0)).await.expect("a GET");
        assert!(a.bytes(into.id, whole.len()) == whole);
        let stats = a.bulk.stats();
        // As posted and not yet polled: Soft-RoCE moves the bytes of a READ within its post.
        assert_eq!(stats.reads_at_once, u64::from(window), "window {window}: {stats:?}");
        assert_eq!(stats.chunks, 64);
        stop(a, b).await;
    }
}

/// B18: unequal sides, and one that asks for more than its device has.
pub async fn b18_the_smaller_rd_atomic_is_used<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    for (ours, theirs) in [(1, 16), (16, 1), (255, 255)] {
        let config = |rd_atomic_max| BulkConfig { chunk_bytes: 4096, rd_atomic_max, ..BulkConfig::default() };
        let a = BulkNode::start_bulk(&*lab, 1, config(ours)).await;
        let b = BulkNode::start_bulk(&*lab, 2, config(theirs)).await;
        a.register(&b);
        b.register(&a);
        let whole = numbered(64 * 4096);
        for (reader, owner) in [(&a, &b), (&b, &a)] {
            let source = owner.map(whole.clone(), Access::SOURCE).await;
            let into = reader.map_filled(whole.len(), 0, Access::DESTINATION).await;
            within(reader.bulk.get(owner.id(), source.whole().expect("remote"), into.id, 0)).await.expect("64 READs");
            assert!(reader.bytes(into.id, whole.len()) == whole);
            let limits = (reader.bulk.limits().rd_atomic, owner.bulk.limits().rd_atomic);
            let expected = ours.min(theirs).min(limits.0.initiator).min(limits.1.responder);
            let path = reader.bulk.describe(owner.id()).expect("connected");
            assert_eq!((path.read_window, path.reads_answered), (expected, expected), "{ours} and {theirs}");
            assert!(reader.bulk.stats().reads_at_once <= u64::from(expected));
        }
        stop(a, b).await;
    }
}

/// a small one is not behind a large one.
pub async fn gets_share_the_window_fairly<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let config = BulkConfig { chunk_bytes: 16 << 10, rd_atomic_max: 4, ..BulkConfig::default() };
    let (a, b) = bulk_pair_with(&*lab, &config).await;
    let (large_len, small_len) = (4 << 20, 64 << 10);
    let source = b.map(numbered(large_len), Access::SOURCE).await;
    let into = a.map_filled(large_len, 0, Access::DESTINATION).await;
    let other = a.map_filled(small_len, 0, Access::DESTINATION).await;
    let large = a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0);
    let watch = large.handle();
    let large = tokio::spawn(large);
    until("the large one is under way", || watch.moved() > 0).await;
    let from = source.remote(0..small_len as u64).expect("within");
    within(a.bulk.get(b.id(), from, other.id, 0)).await.expect("the small one");
    assert!(watch.moved() < large_len as u64, "the large one was not waited for");
    within(large).await.expect("no panic").expect("the large one");
    assert!(a.bytes(into.id, large_len) == numbered(large_len));
    assert!(a.bytes(other.id, small_len) == numbered(small_len));
    stop(a, b).await;
}

/// RT-27: the peer sees all bytes at the signal, by each way of R-3. `VERBS_BULK_ROUNDS` says how often.
pub async fn rt_27_put_then_tell_by_each_way<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, mut b) = bulk_pair(&*lab).await;
    let len = 600 << 10; // two chunks
    let small = 1 << 10;
    let target = b.map_filled(len, 0, Access::PUT_TARGET.and(Access::SOURCE)).await;
    let from = a.map_filled(len, 0, Access::LOCAL_READ.and(Access::DESTINATION)).await;
    let whole = target.whole().expect("remote");
    let tail = target.remote(len as u64 - 1..len as u64).expect("within");
    let rounds = asked_rounds().unwrap_or_else(|| lab.rounds(100_000, 30));
    let mut rest = vec![0; len];
    for round in 0..rounds {
        let fill = u8::try_from(round % 250 + 1).expect("below 251");
        // Whole ones are slow; most rounds move the last KiB only.
        let start = if round % if rounds > 300 { 100 } else { 10 } == 0 { 0 } else { len - small };
        let to = target.remote(start as u64..len as u64).expect("within");
        a.bulk.write_region(from.id, start, &vec![fill; len - start]).expect("within");
        match round % 3 {
            0 => {
                within(a.bulk.put_and_notify(b.id(), from.id, start as u64, to, round)).await.expect("a PUT");
                let told = within(b.notifications.recv()).await.expect("a notification");
                assert_eq!((told.peer, told.value), (a.id(), round));
                assert!(told.bytes > 0);
            }
            1 => {
                within(a.bulk.put(b.id(), from.id, start as u64, to)).await.expect("a PUT");
                within(a.bulk.notify(b.id(), round)).await.expect("a notification");
                let told = within(b.notifications.recv()).await.expect("a notification");
                assert_eq!((told.value, told.bytes), (round, 0));
            }
            _ => {
                within(a.bulk.put(b.id(), from.id, start as u64, to)).await.expect("a PUT");
                within(a.bulk.get(b.id(), tail, from.id, len as u64 - 1)).await.expect("the flush");
                let _ = a.worker.send(b.id(), "placed".into(), "".into(), MessageType::Event, a.errors.clone());
                let frame = within(b.inbound.event.recv()).await.expect("the frame");
                assert_eq!(&frame.header[..], b"placed");
            }
        }
        let rest = &mut rest[start..];
        b.bulk.read_region(target.id, start, rest).expect("within");
        assert!(rest.iter().all(|byte| *byte == fill), "round {round}: the signal was there before the bytes");
    }
    assert!(whole.len == len as u64 && b.bulk.stats().notifications_dropped == 0);
    let refused = within(a.bulk.notify(b.id(), 1 << 31)).await;
    assert!(matches!(refused, Err(TransferError::NotifyValue { value: 0x8000_0000 })), "{refused:?}");
    stop(a, b).await;
}

/// Flow control of notifications: none is lost, none meets an empty receive queue, order holds.
pub async fn notifications_wait_for_a_slow_taker<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let config = BulkConfig { notify_window: 4, ..BulkConfig::default() };
    let (a, mut b) = bulk_pair_with(&*lab, &config).await;
    let naks = lab.rnr_naks();
    let sends: Vec<_> = (0..40).map(|n| tokio::spawn(a.bulk.notify(b.id(), n))).collect();
    until("the window is spent", || b.bulk.stats().notified == 4).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(b.bulk.stats().notified, 4, "and not one more before something is taken");
    let mut seen = Vec::new();
    for _ in 0..40 {
        seen.push(within(b.notifications.recv()).await.expect("a notification").value);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..40).collect::<Vec<_>>());
    for send in sends {
        within(send).await.expect("no panic").expect("told");
    }
    assert_eq!(lab.rnr_naks(), naks, "the peer always had a receive");
    let BulkNode { worker, inbound, bulk, notifications, errors } = b;
    drop(notifications);
    within(a.bulk.notify(worker.instance(), 7)).await.expect("nobody takes it, and nobody waits");
    until("it is counted", || bulk.stats().notifications_dropped == 1).await;
    a.stop().await;
    bulk.shutdown().await;
    worker.shutdown().await;
    drop((inbound, errors));
}

///
pub async fn progress_is_told_and_a_cancel_stops_it<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let config = BulkConfig { chunk_bytes: 64 << 10, rd_atomic_max: 2, ..BulkConfig::default() };
    let (a, b) = bulk_pair_with(&*lab, &config).await;
    let len = 8 << 20;
    let source = b.map_filled(len, 1, Access::SOURCE).await;
    let into = a.map_filled(len, 0, Access::DESTINATION).await;
    let get = a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0);
    let handle = get.handle();
    assert_eq!((handle.moved(), handle.total()), (0, len as u64));
    let get = tokio::spawn(get);
    until("some of it has moved", || handle.moved() >= 128 << 10).await;
    handle.cancel();
    let end = within(get).await.expect("no panic");
    assert!(matches!(end, Err(TransferError::Cancelled)), "{end:?}");
    assert!(handle.moved() < len as u64, "it was stopped before its end");
    assert_eq!(a.bulk.stats().epochs_ended, 0, "what was posted has drained, and the connection goes on");
    // Before the first poll, too.
    let never = a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0);
    never.handle().cancel();
    assert!(matches!(within(never).await, Err(TransferError::Cancelled)));
    stop(a, b).await;
}

/// RT-14 in small: frames keep their order, and do not wait for the GET.
pub async fn rt_14_frames_flow_during_a_get<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    frames_flow_during(&*lab, 16 << 20).await;
}

/// RT-14 with so many bytes.
pub async fn frames_flow_during<L: Lab<F: BulkFabric>>(lab: &L, len: usize) {
    let (a, mut b) = bulk_pair(lab).await;
    let source = b.map(numbered(len), Access::SOURCE).await;
    let into = a.map_filled(len, 0, Access::DESTINATION).await;
    within(a.worker.ensure_connected(b.id())).await.expect("messages flow");
    let get = a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0).within(Duration::from_secs(3000));
    let handle = get.handle();
    let get = tokio::spawn(get);
    until("the GET is under way", || handle.moved() > 0).await;
    let mut during = 0_u32;
    while handle.moved() < len as u64 && during < 200 {
        let header = during.to_be_bytes().to_vec();
        let _ = a.worker.send(b.id(), header.into(), vec![7; 100].into(), MessageType::Message, a.errors.clone());
        let frame = within(b.inbound.message.recv()).await.expect("the frame");
        assert_eq!(frame.header, during.to_be_bytes()[..], "in order");
        during += 1;
    }
    assert!(during >= 5, "only {during} frames went through while {} of {len} bytes moved", handle.moved());
    tokio::time::timeout(Duration::from_secs(3000), get).await.expect("in time").expect("no panic").expect("the GET");
    let mut at = 0;
    while at < len {
        let mut part = vec![0; (1 << 20).min(len - at)];
        a.bulk.read_region(into.id, at, &mut part).expect("within");
        assert!(part.iter().enumerate().all(|(i, byte)| usize::from(*byte) == (at + i) % 251), "bytes from {at} on");
        at += part.len();
    }
    a.errors.assert_none();
    assert_eq!(a.worker.stats().connections_made, 1);
    stop(a, b).await;
}
