//! Notifications between engines and within one: bounds, order, what a receipt says.

mod common;

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::Duration,
};

use common::{LONG, Pair, RawRequester, assert_idle, engine, eventually, wire};
use verbs_engine::{
    Config, Direction, Epoch, Notification, NotificationStatus, NotifyError, RemoteEffect, Status, SubmitError,
    TransferError,
};

fn note(name: &str, message: &str) -> Notification {
    Notification::new(name, message)
}

#[test]
fn every_text_arrives_as_it_was_and_as_often_as_it_was_sent() {
    let pair = Pair::new(64);
    let texts = [("", ""), ("", ""), ("a", ""), ("", "b"), ("ünï", "日本語 🦀"), ("nul\0", "\u{10ffff}"), ("x", "y")];
    for (name, message) in texts {
        pair.requester.send_notification(&pair.peer, &note(name, message), LONG).expect("room");
    }
    let expected: Vec<_> = texts.iter().map(|(name, message)| note(name, message)).collect();
    assert_eq!(pair.source.receive_notifications(), expected);
    assert_eq!(pair.source.receive_notifications(), [], "an empty inbox is an empty list");
    assert_eq!(pair.requester.receive_notifications(), [], "and it is the peer's inbox");
    assert_idle(&pair.requester, 1);
}

#[test]
fn local_and_remote_ones_share_inbox_bounds_and_order() {
    let config = Config { max_notifications: 3, max_inbox_bytes: 10, ..Config::default() };
    let pair = Pair::with(64, config, Config::default());
    let own = pair.source.open_segment(pair.source.endpoint(), pair.source.epoch(), LONG).expect("itself");
    pair.source.send_local_notification(&note("1", "234")).expect("4 of 10");
    pair.requester.send_notification(&pair.peer, &note("2", "34"), LONG).expect("7 of 10");
    let over = pair.source.send_local_notification(&note("3", "456")).expect_err("11 of 10");
    assert!(matches!(&over, NotifyError::Exhausted(e) if e.budget == "max_inbox_bytes" && e.used == 7), "{over}");
    let over = pair.requester.send_notification(&pair.peer, &note("3", "456"), LONG).expect_err("11 of 10");
    let NotifyError::Failed(failure) = over else { panic!("{over}") };
    assert!(matches!(failure.error, TransferError::Refused { status: Status::Exhausted }));
    assert_eq!(failure.effect, RemoteEffect::None);
    pair.source.send_notification(&own, &note("3", "45"), LONG).expect("10 of 10, in process");
    let full = pair.source.send_local_notification(&note("", "")).expect_err("a fourth");
    assert!(matches!(full, NotifyError::Exhausted(e) if e.budget == "max_notifications"));
    let stats = pair.source.stats();
    assert_eq!((stats.queued_notifications, stats.notifications, stats.notification_bytes), (3, 3, 10));
    let names: Vec<_> = pair.source.receive_notifications().into_iter().map(|one| one.name).collect();
    assert_eq!(names, ["1", "2", "3"], "as enqueued");
    assert_eq!(pair.source.stats().notification_bytes, 0);
    assert_eq!(pair.source.stats().connections_dialled, 0);
}

#[test]
fn one_notification_is_bounded_at_both_ends() {
    let small = Config { max_notification_bytes: 10, ..Config::default() };
    let pair = Pair::with(64, small.clone(), Config::default());
    let send = |text: &str| pair.requester.send_notification(&pair.peer, &note("", text), LONG);
    send("123456789").expect("below");
    send("1234567890").expect("at");
    let NotifyError::Failed(refused) = send("12345678901").expect_err("above the receiver's") else { panic!() };
    assert!(matches!(refused.error, TransferError::Refused { status: Status::Exhausted }));
    let local = pair.source.send_local_notification(&note("1", "1234567890")).expect_err("above");
    assert!(matches!(local, NotifyError::TooLong { bytes: 11, limit: 10 }));
    let pair = Pair::with(64, Config::default(), small);
    let error = pair.requester.send_notification(&pair.peer, &note("1", "1234567890"), LONG).expect_err("own limit");
    assert!(matches!(error, NotifyError::TooLong { bytes: 11, limit: 10 }));
    let request = [pair.request(0, 16)];
    let error = pair
        .requester
        .submit_and_notify(&pair.peer, Direction::Write, &request, &note("1", "1234567890"), LONG)
        .expect_err("before any data");
    assert!(matches!(error, SubmitError::NotificationTooLong { bytes: 11, limit: 10 }));
    assert_eq!(pair.requester.stats().requests_completed, 0);
}

#[test]
fn a_batch_notifies_after_all_of_its_data_or_not_at_all() {
    let pair = Pair::new(4096);
    for (round, direction) in [Direction::Read, Direction::Write].into_iter().enumerate() {
        let done = note("done", &round.to_string());
        let requests = [pair.request(0, 16), pair.request(100, 16)];
        let submit = |requests: &[_]| {
            pair.requester.submit_and_notify(&pair.peer, direction, requests, &done, LONG).expect("sound")
        };
        assert!(matches!(submit(&requests).notification, NotificationStatus::Delivered));
        assert_eq!(pair.source.receive_notifications(), std::slice::from_ref(&done), "once");
        let empty = submit(&[]);
        assert!(empty.is_complete() && matches!(empty.notification, NotificationStatus::Skipped));
    }
    pair.source.unregister_memory(&pair.served).expect("registered");
    let requests = [pair.request(0, 0), pair.request(0, 16)];
    let report = pair
        .requester
        .submit_and_notify(&pair.peer, Direction::Write, &requests, &note("never", ""), LONG)
        .expect("the segment still knows it");
    assert_eq!(report.completed, 1);
    assert!(matches!(report.notification, NotificationStatus::Skipped));
    assert_eq!(pair.source.receive_notifications(), []);
}

#[test]
fn many_senders_and_pollers_lose_none_and_see_none_twice() {
    const SENDERS: usize = 4;
    const EACH: usize = 200;
    let inbox = engine(Config { max_notifications: 16, ..Config::default() });
    let done = AtomicBool::new(false);
    let received: Vec<Vec<Notification>> = std::thread::scope(|scope| {
        let pollers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut mine = Vec::new();
                    while !done.load(SeqCst) {
                        mine.extend(inbox.wait_for_notifications(Duration::from_millis(5)));
                    }
                    mine
                })
            })
            .collect();
        let senders: Vec<_> = (0..SENDERS)
            .map(|sender| {
                let inbox = &inbox;
                scope.spawn(move || {
                    let own = engine(Config::default());
                    let peer = own.open_segment(inbox.endpoint(), inbox.epoch(), LONG).expect("it listens");
                    for number in 0..EACH {
                        let message = note(&sender.to_string(), &number.to_string());
                        // Half of them local; a full inbox, or a full queue of the source's, is no loss: it says so.
                        loop {
                            let sent = if sender % 2 == 0 {
                                inbox.send_local_notification(&message)
                            } else {
                                own.send_notification(&peer, &message, LONG)
                            };
                            match sent {
                                Ok(()) => break,
                                Err(NotifyError::Exhausted(_)) => std::thread::yield_now(),
                                Err(NotifyError::Failed(failure)) if failure.effect == RemoteEffect::None => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                    }
                })
            })
            .collect();
        for sender in senders {
            sender.join().expect("no panic");
        }
        eventually("all are read", || inbox.stats().queued_notifications == 0);
        done.store(true, SeqCst);
        pollers.into_iter().map(|poller| poller.join().expect("no panic")).collect()
    });
    let mut counts: HashMap<Notification, u32> = HashMap::new();
    for list in &received {
        let mut last: HashMap<&str, usize> = HashMap::new();
        for one in list {
            *counts.entry(one.clone()).or_default() += 1;
            let number = one.message.parse().expect("a number");
            let before = last.insert(&one.name, number);
            assert!(before.is_none_or(|before| before < number), "in order, as far as one poller sees");
        }
    }
    assert_eq!(counts.len(), SENDERS * EACH);
    assert!(counts.values().all(|count| *count == 1));
    assert_eq!(inbox.stats().notification_bytes, 0);
}

#[test]
fn a_body_on_its_way_keeps_its_room_through_drain_and_close() {
    let pair = Pair::new(64);
    let mut raw = RawRequester::connect(pair.source.endpoint());
    raw.send(&wire::request(wire::NOTIFY, pair.source.epoch(), 0, 3, 4));
    assert_eq!(raw.reply(), Some((wire::READY, 0)));
    pair.source.send_local_notification(&note("other", "")).expect("room");
    assert_eq!(pair.source.receive_notifications().len(), 1);
    let stats = pair.source.stats();
    assert_eq!((stats.queued_notifications, stats.notifications, stats.notification_bytes), (0, 1, 7));
    pair.source.close_source(Duration::ZERO).expect_err("it is inside");
    let refused = pair.source.send_local_notification(&note("", "")).expect_err("closed");
    assert!(matches!(refused, NotifyError::SourceClosed));
    let refused = pair.requester.send_notification(&pair.peer, &note("", ""), LONG).expect_err("closed");
    let NotifyError::Failed(failure) = refused else { panic!("{refused}") };
    assert!(matches!(failure.error, TransferError::Refused { status: Status::SourceClosed }));
    raw.send(b"abcdefg\0");
    assert_eq!(raw.reply(), Some((wire::SUCCESS, 0)), "what was admitted is enqueued");
    pair.source.close_source(LONG).expect("it has left");
    assert_eq!(pair.source.receive_notifications(), [note("abc", "defg")], "and stays readable");
}

#[test]
fn a_stale_epoch_reaches_nobody() {
    let pair = Pair::new(64);
    let stale = Epoch::from_bytes([9; 16]);
    let error = pair.requester.open_segment(pair.source.endpoint(), stale, LONG).expect_err("another epoch");
    let verbs_engine::OpenError::Describe { source: TransferError::EpochMismatch { expected, actual }, .. } = error
    else {
        panic!("{error:?}");
    };
    assert_eq!((expected, actual), (stale, pair.source.epoch()));
    for kind in [wire::NOTIFY, wire::READ, wire::WRITE] {
        let mut raw = RawRequester::connect(pair.source.endpoint());
        let region = if kind == wire::NOTIFY { 0 } else { pair.served.id() };
        raw.send(&wire::request(kind, stale, region, 0, 1));
        assert_eq!(raw.reply(), Some((wire::EPOCH_MISMATCH, 0)));
        assert!(raw.is_closed());
    }
    assert_eq!(pair.source.receive_notifications(), []);
}
