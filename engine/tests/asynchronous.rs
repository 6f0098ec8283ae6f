//! Asynchronous batches over TCP: futures on tokio, polling without it, many at once.

mod common;

use std::time::Duration;

use common::{LONG, Pair, RawSource, assert_idle, bytes_of, eventually, memory, pattern, tcp_engine, wire};
use verbs_engine::{
    BatchState, Config, Direction, Notification, NotificationStatus, Permission, RemoteEffect, TaskState,
    TransferRequest,
};

/// One thread: whatever blocked it would block the test.
#[tokio::test(flavor = "current_thread")]
async fn a_transfer_is_a_future() {
    let pair = Pair::new(1 << 20);
    let peer =
        pair.requester.open_segment_async(pair.source.endpoint(), pair.source.epoch(), LONG).await.expect("served");
    let sent = pattern(1 << 20, 3);
    pair.local.write(0, &sent).expect("in range");
    let inbox = tokio::spawn(pair.source.notifications());
    let write = [pair.request(0, 1 << 19), pair.request(1 << 19, 1 << 19)];
    let done = Notification::new("weights", "ready");
    let transfer = pair.requester.submit_async(&peer, Direction::Write, &write, Some(&done), LONG).expect("sound");
    let report = transfer.await;
    assert!(report.is_complete() && report.completed_bytes == 1 << 20);
    assert!(matches!(report.notification, NotificationStatus::Delivered));
    assert_eq!(bytes_of(&pair.served), sent);
    assert_eq!(inbox.await.expect("no panic"), [done]);
    pair.requester.send_notification_async(&peer, &Notification::new("x", ""), LONG).await.expect("room");
    pair.requester.refresh_async(&peer, LONG).await.expect("served");
    assert_idle(&pair.requester, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_transfers_at_once_move_the_right_bytes() {
    const EACH: usize = 4096;
    const COUNT: usize = 24;
    // So many workers that none of the requests is refused for want of one.
    let source = Config { source_workers: 32, ..Config::default() };
    let pair = Pair::with(EACH * COUNT, source, Config::default());
    pair.served.write(0, &pattern(EACH * COUNT, 17)).expect("in range");
    let transfers: Vec<_> = (0..COUNT)
        .map(|at| {
            let request = [pair.request((at * EACH) as u64, EACH as u64)];
            pair.requester.submit_async(&pair.peer, Direction::Read, &request, None, LONG).expect("below the limits")
        })
        .collect();
    for transfer in transfers {
        let report = transfer.await;
        assert!(report.is_complete(), "{report:?}");
    }
    assert_eq!(bytes_of(&pair.local), bytes_of(&pair.served));
    assert_idle(&pair.requester, 1);
}

#[test]
fn a_batch_can_be_polled_without_any_runtime() {
    let pair = Pair::new(1 << 16);
    pair.served.write(0, &pattern(1 << 16, 1)).expect("in range");
    let id = pair.requester.allocate_batch(16).expect("room").into_id();
    for group in 0..4 {
        let requests: Vec<_> = (0..4).map(|at| pair.request((group * 4 + at) * 4096, 4096)).collect();
        let added =
            pair.requester.submit_to_batch(id, &pair.peer, Direction::Read, &requests, LONG, None).expect("room");
        assert_eq!((added.index() as u64, added.tasks().start as u64), (group, group * 4));
    }
    eventually("it is done", || pair.requester.poll_batch(id).expect("there").state == BatchState::Completed);
    for task in 0..16 {
        let task = pair.requester.poll_task(id, task).expect("there");
        assert_eq!((task.state, task.bytes, task.effect), (TaskState::Completed, 4096, RemoteEffect::None));
    }
    eventually("drained", || pair.requester.locally_drained(id).expect("there"));
    pair.requester.free_batch(id).expect("done");
    assert_eq!(bytes_of(&pair.local), bytes_of(&pair.served));
    assert_idle(&pair.requester, 1);
}

#[test]
fn every_default_batch_and_one_more() {
    let pair = Pair::new(64);
    let batches: Vec<_> = (0..32).map(|_| pair.requester.allocate_batch(1024).expect("32 of 32")).collect();
    assert_eq!(pair.requester.allocate_batch(0).expect_err("the 33rd").budget, "max_async_batches");
    assert_eq!(pair.requester.stats().batch_slots, 32_768);
    drop(batches);
    assert_idle(&pair.requester, 1);
}

#[test]
fn a_write_that_times_out_while_its_acknowledgement_is_awaited_is_unknown() {
    let source = RawSource::start(|stream, request| {
        use std::io::{Read as _, Write as _};
        let epoch = verbs_engine::Epoch::from_bytes(request[12..28].try_into().expect("16 bytes"));
        let _ = stream.write_all(&wire::reply(wire::READY, epoch, 0));
        let _ = stream.read_exact(&mut [0; 16]);
        std::thread::sleep(LONG);
    });
    let requester = tcp_engine(Config::default());
    let local = memory(&requester, 64, Permission::LocalOnly);
    let peer = requester.open_segment(source.endpoint, source.epoch, LONG).expect("it answers that");
    let request = TransferRequest { local_address: local.address(), remote_address: RawSource::BASE, length: 16 };
    let batch = requester.allocate_batch(2).expect("room");
    let timeout = Duration::from_millis(100);
    let group = batch.submit(&peer, Direction::Write, &[request, request], timeout, None).expect("sound");
    assert!(batch.report(&group).is_none(), "not yet");
    assert!(batch.wait(LONG));
    let report = batch.report(&group).expect("final");
    let failure = report.failure.expect("no acknowledgement");
    assert_eq!((failure.index, failure.effect), (0, RemoteEffect::Unknown));
    assert!(failure.error.is_timeout());
    assert_eq!(batch.status().state, BatchState::TimedOut);
    assert_eq!(batch.task(1).expect("there").state, TaskState::NotAttempted);
    batch.free().expect("done");
    assert_idle(&requester, 1);
}

#[test]
fn batches_under_load_end_whatever_is_done_to_them() {
    let source = Config { source_workers: 8, source_queue: 64, ..Config::default() };
    let pair = Pair::with(1 << 16, source, Config::default());
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..300 {
        let Ok(batch) = pair.requester.allocate_batch(8) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let requests: Vec<_> = (0..random.u64(1..=8)).map(|at| pair.request(at * 4096, random.u64(0..4096))).collect();
        let direction = if random.bool() { Direction::Read } else { Direction::Write };
        let timeout = if random.u8(0..4) == 0 { Duration::from_micros(random.u64(0..500)) } else { LONG };
        if batch.submit(&pair.peer, direction, &requests, timeout, None).is_err() {
            continue; // exhausted
        }
        match random.u8(0..4) {
            0 => batch.cancel(),
            1 => batch.detach(),
            2 => drop(batch.finished()),
            _ => assert!(batch.wait(LONG)),
        }
    }
    assert_idle(&pair.requester, 1);
    assert_idle(&pair.source, 1);
}
