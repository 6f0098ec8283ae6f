//! Each budget one below its limit, at it and one above; and every charge back to zero on each way out.

mod common;

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use common::{LONG, Pair, RawSource, assert_idle, engine, memory};
use verbs_engine::{
    Config, Direction, Engine, HostMemory, Notification, NotifyError, Permission, RegisterError, RemoteEffect, Status,
    SubmitError, TransferError, TransferRequest,
};

fn submit_error(result: Result<verbs_engine::BatchReport, SubmitError>) -> Option<SubmitError> {
    result.err()
}

#[test]
fn registrations_by_number_and_by_bytes() {
    let config = Config { max_registrations: 3, max_registered_bytes: 100, ..Config::default() };
    let engine = engine(config);
    let register = |bytes| engine.register_memory(vec![0; bytes].into(), Permission::RemoteRead);
    let exhausted = |bytes| match register(bytes) {
        Err(RegisterError::Exhausted(exhausted)) => exhausted.budget,
        other => panic!("{other:?}"),
    };
    let kept = (register(50).expect("below both"), register(49).expect("99 of 100"));
    assert_eq!(exhausted(2), "max_registered_bytes");
    let third = register(1).expect("at both");
    assert_eq!(exhausted(1), "max_registrations");
    drop(third);
    assert_eq!(exhausted(1), "max_registrations", "its registration is still there");
    drop((kept, engine));
}

#[test]
fn requests_of_one_call() {
    let config = Config { max_batch_requests: 4, ..Config::default() };
    let pair = Pair::with(4096, Config::default(), config);
    let submit = |count: u64| {
        let requests: Vec<_> = (0..count).map(|at| pair.request(at * 16, 16)).collect();
        submit_error(pair.requester.submit_and_wait(&pair.peer, Direction::Read, &requests, LONG))
    };
    assert!(submit(3).is_none() && submit(4).is_none());
    assert!(matches!(submit(5), Some(SubmitError::TooManyRequests { requests: 5, limit: 4 })));
    let outside = Arc::new(HostMemory::new(vec![0; 64].into()));
    let register = |count: u64| {
        let entries: Vec<_> = (0..count).map(|at| (Arc::clone(&outside), at, 1)).collect();
        pair.requester.register_host_memory_batch(&entries, Permission::LocalOnly).map(drop)
    };
    assert_eq!((register(3), register(4)), (Ok(()), Ok(())));
    assert_eq!(register(5), Err(RegisterError::TooMany { entries: 5, limit: 4 }));
}

#[test]
fn one_payload_at_either_end() {
    let small = Config { max_payload_bytes: 1000, ..Config::default() };
    let pair = Pair::with(4096, Config::default(), small.clone());
    let run = |pair: &Pair, length, direction| {
        pair.requester.submit_and_wait(&pair.peer, direction, &[pair.request(0, length)], LONG)
    };
    for direction in [Direction::Read, Direction::Write] {
        assert!(run(&pair, 999, direction).expect("below").is_complete());
        assert!(run(&pair, 1000, direction).expect("at").is_complete());
        let error = submit_error(run(&pair, 1001, direction));
        assert!(matches!(error, Some(SubmitError::PayloadTooLong { index: 0, length: 1001, limit: 1000 })));
    }
    let pair = Pair::with(4096, small, Config::default());
    for direction in [Direction::Read, Direction::Write] {
        assert!(run(&pair, 999, direction).expect("below").is_complete());
        assert!(run(&pair, 1000, direction).expect("at").is_complete());
        let failure = run(&pair, 1001, direction).expect("the requester would").failure.expect("the source would not");
        assert!(matches!(failure.error, TransferError::Refused { status: Status::Exhausted }));
        assert_eq!(failure.effect, RemoteEffect::None);
    }
    assert_idle(&pair.requester, 1);
    assert_idle(&pair.source, 1);
}

#[test]
fn bytes_in_flight_of_synchronous_calls_and_their_notifications() {
    let config = Config { max_submission_bytes: 100, ..Config::default() };
    let pair = Pair::with(4096, Config::default(), config);
    let note = Notification::new("1234", "56");
    let submit = |length| {
        let request = [pair.request(0, length)];
        submit_error(pair.requester.submit_and_notify(&pair.peer, Direction::Write, &request, &note, LONG))
    };
    assert!(submit(93).is_none() && submit(94).is_none());
    assert!(
        matches!(submit(95), Some(SubmitError::Exhausted(e)) if e.budget == "max_submission_bytes" && e.asked == 101)
    );
    let long = Notification::new("", "x".repeat(101));
    let error = pair.requester.send_notification(&pair.peer, &long, LONG).expect_err("above");
    assert!(matches!(error, NotifyError::Exhausted(e) if e.budget == "max_submission_bytes"));
    assert_idle(&pair.requester, 1);
}

/// Whatever was held is back, and the same can be done once more.
fn assert_whole(requester: &Engine, peer: &verbs_engine::RemoteSegment, what: &str) {
    assert_idle(requester, 1);
    requester.refresh(peer, LONG).unwrap_or_else(|error| panic!("after {what}: {error}"));
}

#[test]
fn every_way_out_gives_every_charge_back() {
    let silent = RawSource::start(|_, _| std::thread::sleep(Duration::from_millis(300)));
    // Room for one submission: a charge that is lost shows at once.
    let config = Config { max_submissions: 1, max_async_batches: 1, max_async_slots: 2, ..Config::default() };
    let pair = Pair::with(4096, Config::default(), config);
    let Pair { requester, local, peer, .. } = &pair;
    let to_silent = requester.open_segment(silent.endpoint, silent.epoch, LONG).expect("it answers that");
    let good = [pair.request(0, 16)];
    let stuck = [TransferRequest { local_address: local.address(), remote_address: RawSource::BASE, length: 16 }; 2];

    let report = requester.submit_and_wait(peer, Direction::Write, &good, LONG).expect("sound");
    assert!(report.is_complete());
    assert_whole(requester, peer, "success");

    let report = requester.submit_and_wait(&to_silent, Direction::Write, &stuck, LONG).expect("sound");
    assert!(report.failure.is_some());
    assert_whole(requester, peer, "failure");

    let timeout = Duration::from_millis(20);
    let report = requester.submit_and_wait(&to_silent, Direction::Read, &stuck, timeout).expect("sound");
    assert!(report.failure.is_some_and(|failure| failure.error.is_timeout()));
    assert_whole(requester, peer, "timeout");

    let bad = [TransferRequest { local_address: 1, ..good[0] }];
    requester.submit_and_wait(peer, Direction::Read, &bad, LONG).expect_err("refused");
    requester.submit_async(peer, Direction::Read, &bad, None, LONG).expect_err("refused");
    assert_whole(requester, peer, "refusal");

    let transfer = requester.submit_async(&to_silent, Direction::Read, &stuck, None, LONG).expect("sound");
    transfer.cancel();
    drop(transfer);
    assert_whole(requester, peer, "cancel and drop");

    let batch = requester.allocate_batch(2).expect("room");
    batch.submit(&to_silent, Direction::Read, &stuck, LONG, None).expect("sound");
    batch.detach();
    assert_whole(requester, peer, "detach");

    let batch = requester.allocate_batch(2).expect("room");
    batch.submit(peer, Direction::Read, &good, LONG, None).expect("sound");
    assert!(batch.wait(LONG));
    batch.free().expect("done");
    assert_whole(requester, peer, "free");

    // A panic in a closure of the caller's, under the lock that the next request needs.
    let caught = std::panic::catch_unwind(AssertUnwindSafe(|| {
        local.update(0, 16, |_| -> () { panic!("a closure of the caller's") })
    }));
    assert!(caught.is_err());
    let report = requester.submit_and_wait(peer, Direction::Read, &good, LONG).expect("sound");
    assert!(report.is_complete());
    assert_whole(requester, peer, "panic");
}

/// As a cache might have it.
struct Arena {
    _bytes: Vec<u8>,
}

impl Drop for Arena {
    fn drop(&mut self) {
        panic!("a destructor of the caller's");
    }
}

#[test]
fn an_owner_that_panics_when_a_handler_lets_it_go_harms_nobody() {
    let pair = Pair::new(64);
    let mut bytes = vec![0_u8; 64];
    let (start, length) = (bytes.as_mut_ptr(), bytes.len());
    #[allow(unsafe_code)]
    // SAFETY: the vector moves into the owner, which does not touch it.
    let outside = unsafe { HostMemory::from_raw_parts(start, length, Arena { _bytes: bytes }) };
    let outside = Arc::new(outside.expect("a vector is memory"));
    let range = pair.source.register_host_memory(&outside, 0, 64, Permission::RemoteReadWrite).expect("room");
    let mut raw = common::RawRequester::connect(pair.source.endpoint());
    raw.send(&common::wire::request(common::wire::WRITE, pair.source.epoch(), range.id(), 0, 16));
    assert_eq!(raw.reply(), Some((common::wire::READY, 0)));
    pair.source.unregister_memory(&range).expect("registered");
    drop((range, outside));
    raw.send(&[1; 16]);
    assert_eq!(raw.reply(), Some((common::wire::SUCCESS, 0)));
    assert_idle(&pair.source, 1);
    let more = memory(&pair.source, 64, Permission::LocalOnly);
    let report = pair.requester.submit_and_wait(&pair.peer, Direction::Read, &[pair.request(0, 16)], LONG);
    assert!(report.expect("sound").is_complete());
    drop(more);
}
