//! The direct profile: the bytes are right, it is asked for and allowed or nothing happens, reports say so, and nothing is
//! staged.

mod common;

use std::{
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::{Duration, Instant},
};

use common::{LONG, Pair, assert_idle, bytes_of, engine, memory, over, pattern, serving_direct, times};
use verbs_engine::{
    BatchReport, Config, Direction, Mode, Permission, Profile, RemoteEffect, ServeDirect, Status, TransferError,
    TransferRequest,
};

const BOTH: [Direction; 2] = [Direction::Read, Direction::Write];

fn run(pair: &Pair, mode: impl Into<Mode>, offset: u64, length: u64) -> BatchReport {
    pair.requester.submit_and_wait(&pair.peer, mode, &[pair.request(offset, length)], LONG).expect("sound")
}

#[test]
fn bytes_arrive_whatever_their_number_and_nothing_is_staged() {
    let pair = Pair::direct(8 << 20);
    let mut moved = 0;
    for length in [0_usize, 1, 2, 51, 4095, 4097, 65_536, 262_145, 1 << 20, 8 << 20] {
        let sent = pattern(length, u8::try_from(length % 199).expect("small"));
        for (offset, from, to, direction) in
            [(0, &pair.local, &pair.served, Direction::Write), (0, &pair.served, &pair.local, Direction::Read)]
        {
            from.write(0, &sent).expect("in range");
            to.update(0, 8 << 20, |bytes| bytes.fill(0xee)).expect("in range");
            let report = run(&pair, direction.direct(), offset, length as u64);
            assert!(report.is_complete() && report.completed_bytes == length as u64, "{report:?}");
            assert_eq!((report.profile, report.transport), (Profile::Direct, (length > 0).then_some(over())));
            let now = bytes_of(to);
            assert!(now[..length] == sent && now[length..].iter().all(|byte| *byte == 0xee), "{length}");
            moved += u64::from(length > 0);
        }
    }
    let (here, there) = (pair.requester.stats(), pair.source.stats());
    assert_eq!((here.direct_completed, here.requests_completed, here.effects_unknown), (moved, moved, 0));
    assert_eq!((here.kept_staging_bytes, there.kept_staging_bytes), (0, 0), "there was none");
    assert!(run(&pair, Direction::Read, 0, 4096).is_complete());
    assert_eq!(pair.requester.stats().direct_completed, moved, "staged is what one gets without asking");
    assert_idle(&pair.requester, 1);
    assert_idle(&pair.source, 1);
}

#[test]
fn places_within_a_range_and_nothing_beside_them() {
    let pair = Pair::direct(10_000);
    for direction in BOTH {
        let (from, to) = match direction {
            Direction::Read => (&pair.served, &pair.local),
            Direction::Write => (&pair.local, &pair.served),
        };
        from.write(0, &pattern(10_000, 9)).expect("in range");
        for (offset, length) in [(0, 1), (1, 4095), (4097, 5000), (9999, 1)] {
            to.write(0, &[0xee; 10_000]).expect("in range");
            let mut expected = vec![0xee; 10_000];
            let (start, count) = (usize::try_from(offset).expect("small"), usize::try_from(length).expect("small"));
            expected[start..start + count].copy_from_slice(&bytes_of(from)[start..start + count]);
            assert!(run(&pair, direction.direct(), offset, length).is_complete());
            assert!(bytes_of(to) == expected, "{direction:?} {offset} {length}");
        }
    }
}

#[test]
fn a_source_that_does_not_serve_it_refuses_and_nothing_happens() {
    for (serves, allowed) in
        [(ServeDirect::Never, [false, false]), (ServeDirect::Reads, [true, false]), (ServeDirect::All, [true, true])]
    {
        let pair = Pair::with(4096, Config { serve_direct: serves, ..Config::default() }, Config::default());
        for (direction, allowed) in BOTH.into_iter().zip(allowed) {
            let (here, there) = (pattern(4096, 1), pattern(4096, 50));
            pair.local.write(0, &here).expect("in range");
            pair.served.write(0, &there).expect("in range");
            let report = run(&pair, direction.direct(), 0, 4096);
            assert_eq!((report.is_complete(), report.profile), (allowed, Profile::Direct), "{serves:?} {report:?}");
            if let Some(failure) = report.failure {
                let refused = matches!(failure.error, TransferError::Refused { status: Status::DirectRefused });
                assert!(refused, "{failure}");
                assert_eq!((failure.effect, failure.local_changed), (RemoteEffect::None, false));
                assert!(bytes_of(&pair.local) == here && bytes_of(&pair.served) == there);
            }
            let report = run(&pair, direction, 0, 4096);
            assert!(
                report.is_complete() && report.profile == Profile::Staged,
                "it is not taken in its place: {report:?}"
            );
        }
        assert_idle(&pair.requester, 1);
        assert_idle(&pair.source, 1);
    }
}

#[test]
fn reports_tell_the_profile_of_asynchronous_submissions_as_well() {
    let pair = Pair::direct(4096);
    pair.served.write(0, &pattern(4096, 3)).expect("in range");
    let requests = [pair.request(0, 1000), pair.request(1000, 0), pair.request(2000, 2096)];
    let transfer = pair.requester.submit_async(&pair.peer, Direction::Read.direct(), &requests, None, LONG);
    let transfer = transfer.expect("sound");
    let report = tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(transfer);
    assert!(report.is_complete() && report.profile == Profile::Direct, "{report:?}");
    let batch = pair.requester.allocate_batch(2).expect("room");
    let submit = |mode: Mode| batch.submit(&pair.peer, mode, &requests[..1], LONG, None).expect("sound");
    let groups = [submit(Direction::Write.direct()), submit(Direction::Read.into())];
    assert!(batch.wait(LONG));
    for (group, profile) in groups.iter().zip([Profile::Direct, Profile::Staged]) {
        assert_eq!(batch.report(group).expect("final").profile, profile);
        let task = batch.task(group.tasks().start).expect("there");
        assert_eq!((task.profile, task.local_changed, task.bytes), (profile, false, 1000));
    }
    batch.free().map_err(drop).expect("done and drained");
    let batch = pair.requester.allocate_batch(1).expect("room").into_id();
    let submitted =
        pair.requester.submit_to_batch(batch, &pair.peer, Direction::Write.direct(), &requests[..1], LONG, None);
    submitted.expect("sound");
    pair.requester.detach_batch(batch).expect("it is there");
    assert_idle(&pair.requester, 1);
    assert_idle(&pair.source, 1);
}

#[test]
fn a_failure_ends_it_and_tells_that_nothing_was_touched() {
    let pair = Pair::direct(4096);
    let gone = memory(&pair.source, 64, Permission::RemoteReadWrite);
    pair.requester.refresh(&pair.peer, LONG).expect("it listens");
    pair.source.unregister_memory(&gone).expect("registered");
    pair.served.write(0, &pattern(4096, 7)).expect("in range");
    let bad = TransferRequest { remote_address: gone.address(), ..pair.request(500, 64) };
    let requests = [pair.request(0, 100), bad, pair.request(1000, 100)];
    let report = pair.requester.submit_and_wait(&pair.peer, Direction::Read.direct(), &requests, LONG).expect("sound");
    assert_eq!((report.completed, report.completed_bytes, report.profile), (1, 100, Profile::Direct));
    let failure = report.failure.expect("one");
    assert_eq!((failure.index, failure.effect, failure.local_changed), (1, RemoteEffect::None, false));
    let mut expected = vec![0; 4096];
    expected[..100].copy_from_slice(&bytes_of(&pair.served)[..100]);
    assert!(bytes_of(&pair.local) == expected);
    assert_idle(&pair.requester, 1);
}

/// What is read is still of one moment: while it is read nobody changes it, neither its owner nor another peer.
#[test]
fn a_direct_read_is_of_one_moment() {
    const LENGTH: usize = 256 << 10;
    let pair = Pair::direct(LENGTH);
    let stop = AtomicBool::new(false);
    let uniform = |bytes: &[u8]| bytes.iter().all(|byte| *byte == bytes[0]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in (1..=255).cycle() {
                if stop.load(SeqCst) {
                    return;
                }
                pair.served.update(0, LENGTH as u64, |bytes| bytes.fill(value)).expect("in range");
            }
        });
        scope.spawn(|| {
            let other = engine(serving_direct());
            let local = memory(&other, LENGTH, Permission::LocalOnly);
            let peer = other.open_segment(pair.source.endpoint(), pair.source.epoch(), LONG).expect("it listens");
            let (local_address, remote_address) = (local.address(), pair.served.address());
            let request = TransferRequest { local_address, remote_address, length: LENGTH as u64 };
            for value in (1..=255).cycle() {
                if stop.load(SeqCst) {
                    return;
                }
                local.update(0, LENGTH as u64, |bytes| bytes.fill(value)).expect("in range");
                let mode = if value % 2 == 0 { Direction::Write.into() } else { Direction::Write.direct() };
                let report = other.submit_and_wait(&peer, mode, &[request], LONG).expect("sound");
                assert!(report.into_result().is_ok());
            }
        });
        for round in 0..times(100, 20) {
            let mode = if round % 4 == 0 { Direction::Read.into() } else { Direction::Read.direct() };
            assert!(run(&pair, mode, 0, LENGTH as u64).into_result().is_ok());
            assert!(uniform(&bytes_of(&pair.local)), "part of one state and part of another");
            pair.served.update(0, LENGTH as u64, |bytes| assert!(uniform(bytes))).expect("in range");
        }
        stop.store(true, SeqCst);
    });
    assert_idle(&pair.requester, 1);
    assert_idle(&pair.source, 1);
}

#[test]
fn within_one_allocation_it_works_or_ends_by_its_deadline() {
    let engine = engine(serving_direct());
    let own = memory(&engine, 1 << 20, Permission::RemoteReadWrite);
    own.write(0, &pattern(1 << 19, 3)).expect("in range");
    let peer = engine.open_segment(engine.endpoint(), engine.epoch(), LONG).expect("itself");
    let request =
        |to: u64, length| TransferRequest { local_address: own.address(), remote_address: own.address() + to, length };
    let apart = [request(1 << 19, 1 << 19)];
    let report = engine.submit_and_wait(&peer, Direction::Write.direct(), &apart, LONG).expect("sound");
    assert!(report.into_result().is_ok());
    let bytes = bytes_of(&own);
    assert!(bytes[..1 << 19] == bytes[1 << 19..]);
    // From and to the same bytes: each end waits for the other. Where one has what it needs first, it goes well.
    for direction in BOTH {
        let (start, timeout) = (Instant::now(), Duration::from_millis(300));
        let overlapping = [request(100, 1 << 19)];
        let report = engine.submit_and_wait(&peer, direction.direct(), &overlapping, timeout).expect("sound");
        assert!(report.is_complete() || report.failure.is_some_and(|failure| failure.error.is_timeout()));
        assert!(start.elapsed() < LONG);
    }
    assert_idle(&engine, 1);
    own.try_update(0, 1 << 20, |bytes| bytes.fill(1)).expect("nobody is at it any more");
}
