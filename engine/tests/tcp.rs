//! READ and WRITE over loopback: bytes, prefixes, checks before effects, lifetimes.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use common::{LONG, Pair, assert_idle, bytes_of, engine, eventually, external, memory, over, pattern, tcp_engine};
use verbs_engine::{
    CloseTimeout, Config, Direction, Location, NotificationStatus, OpenError, Permission, RegisterError, RemoteEffect,
    RemoteRegion, SegmentKind, Status, SubmitError, TransferError, TransferRequest, Transport,
};

#[test]
fn bytes_arrive_whatever_their_number() {
    let pair = Pair::new(8 << 20);
    for length in [0_usize, 1, 2, 51, 52, 53, 4095, 65_536, 262_143, 262_144, 262_145, 1 << 20, 8 << 20] {
        let seed = u8::try_from(length % 199).expect("small");
        let sent = pattern(length, seed);
        pair.local.write(0, &sent).expect("in range");
        let request = [pair.request(0, length as u64)];
        let report = pair.requester.submit_and_wait(&pair.peer, Direction::Write, &request, LONG).expect("sound");
        assert!(report.is_complete() && report.completed_bytes == length as u64, "{report:?}");
        assert_eq!(report.transport, (length > 0).then_some(over()));
        assert_eq!(bytes_of(&pair.served)[..length], sent);
        pair.local.write(0, &vec![0; length]).expect("in range");
        let report = pair.requester.submit_and_wait(&pair.peer, Direction::Read, &request, LONG).expect("sound");
        assert!(report.into_result().is_ok());
        assert_eq!(bytes_of(&pair.local)[..length], sent);
    }
    let stats = pair.requester.stats();
    // Payloads over RDMA have control connections of their own beside that of the description: one for each pair of
    // devices that was taken, and some engines have two devices.
    let most = if over() == Transport::Rdma { 1 + 2 * 2 } else { 1 };
    assert!(stats.connections_dialled <= most, "connections served all of it: {stats:?}");
    assert_eq!(stats.effects_unknown, 0);
    assert_eq!(stats.requests_completed, 24, "those of no bytes have no need of the wire");
    assert_idle(&pair.requester, 1);
    assert_idle(&pair.source, 1);
}

#[test]
fn one_bad_request_of_many_moves_nothing() {
    let pair = Pair::new(4096);
    let read_only = memory(&pair.source, 64, Permission::RemoteRead);
    pair.requester.refresh(&pair.peer, LONG).expect("it listens");
    pair.served.write(0, &pattern(4096, 1)).expect("in range");
    let good = pair.request(0, 100);
    let refused = |bad: TransferRequest, direction| {
        let requests = [good, good, bad, good];
        pair.requester.submit_and_wait(&pair.peer, direction, &requests, LONG).expect_err("refused")
    };
    let read = |bad| refused(bad, Direction::Read);
    let before = pair.requester.stats();
    assert!(matches!(read(TransferRequest { local_address: 1, ..good }), SubmitError::Local { index: 2, .. }));
    assert!(matches!(read(pair.request(4000, 97)), SubmitError::Local { index: 2, .. }), "one byte too long");
    let wraps = TransferRequest { local_address: u64::MAX, ..good };
    assert!(matches!(read(wraps), SubmitError::Local { index: 2, .. }));
    let long = TransferRequest { length: (8 << 20) + 1, ..good };
    assert!(matches!(read(long), SubmitError::PayloadTooLong { index: 2, limit: 8_388_608, .. }));
    let wrong = TransferRequest { remote_address: read_only.address(), length: 64, ..good };
    let denied = refused(wrong, Direction::Write);
    assert!(matches!(denied, SubmitError::Permission { index: 2, permission: Permission::RemoteRead, .. }), "{denied}");
    let after = pair.requester.stats();
    assert_eq!(
        (after.connections_dialled, after.connections_reused),
        (before.connections_dialled, before.connections_reused)
    );
    // Unknown at the peer: asked once whether it is new, and then refused.
    assert!(matches!(read(TransferRequest { remote_address: 1, ..good }), SubmitError::Remote { index: 2, .. }));
    let wraps = TransferRequest { remote_address: u64::MAX - 1, ..good };
    assert!(matches!(read(wraps), SubmitError::Remote { index: 2, .. }));
    let too_many = vec![good; 1025];
    let many = pair.requester.submit_and_wait(&pair.peer, Direction::Read, &too_many, LONG).expect_err("too many");
    assert!(matches!(many, SubmitError::TooManyRequests { requests: 1025, limit: 1024 }));
    assert_eq!(bytes_of(&pair.local), vec![0; 4096], "nothing moved");
    assert_eq!(pair.requester.stats().requests_completed, 0);
    assert_idle(&pair.requester, 1);
}

#[test]
fn a_failure_ends_the_batch_and_the_report_is_exact() {
    for at in 0..5 {
        let pair = Pair::new(4096);
        let gone = memory(&pair.source, 64, Permission::RemoteReadWrite);
        pair.requester.refresh(&pair.peer, LONG).expect("it listens");
        // The segment still knows it; the source does not.
        pair.source.unregister_memory(&gone).expect("registered");
        pair.served.write(0, &pattern(4096, 7)).expect("in range");
        let requests: Vec<_> = (0..5)
            .map(|index| match index {
                index if index == at => TransferRequest { remote_address: gone.address(), ..pair.request(0, 64) },
                index => pair.request(index * 100, 10 + index),
            })
            .collect();
        let report = pair.requester.submit_and_wait(&pair.peer, Direction::Read, &requests, LONG).expect("sound");
        let moved: u64 = requests[..usize::try_from(at).expect("small")].iter().map(|request| request.length).sum();
        assert_eq!((report.completed as u64, report.completed_bytes, report.requests), (at, moved, 5));
        assert!(!report.is_complete());
        let failure = report.failure.expect("one");
        assert_eq!((failure.index as u64, failure.effect), (at, RemoteEffect::None));
        assert!(matches!(failure.error, TransferError::Refused { status: Status::UnknownRegion }));
        let mut expected = vec![0; 4096];
        for index in 0..usize::try_from(at).expect("small") {
            expected[index * 100..][..10 + index].copy_from_slice(&bytes_of(&pair.served)[index * 100..][..10 + index]);
        }
        assert_eq!(bytes_of(&pair.local), expected, "the prefix, and nothing behind it");
        assert_idle(&pair.requester, 1);
    }
}

#[test]
fn a_range_that_the_peer_registers_later_is_found_by_one_refresh() {
    let pair = Pair::new(4096);
    let later = memory(&pair.source, 64, Permission::RemoteRead);
    later.write(0, &[9; 64]).expect("in range");
    let request = [TransferRequest { remote_address: later.address(), ..pair.request(0, 64) }];
    let unknown = pair.requester.submit_async(&pair.peer, Direction::Read, &request, None, LONG).expect_err("no I/O");
    assert!(matches!(unknown, SubmitError::Remote { index: 0, .. }), "asynchronous calls do not ask");
    let report = pair.requester.submit_and_wait(&pair.peer, Direction::Read, &request, LONG).expect("asks once");
    assert!(report.is_complete());
    assert_eq!(bytes_of(&pair.local)[..64], [9; 64]);
    assert_eq!(pair.peer.regions().len(), 2, "all who share the segment know it now");
    assert!(pair.peer.resolve_address(later.address() + 60, 5).is_none());
    let (region, offset) = pair.peer.resolve_address(later.address() + 60, 4).expect("inside");
    assert_eq!((region.id, offset, region.permission), (later.id(), 60, Permission::RemoteRead));
}

#[test]
fn a_slice_is_never_torn() {
    const LENGTH: usize = 1 << 20;
    let pair = Pair::new(LENGTH);
    let stop = AtomicBool::new(false);
    let uniform = |bytes: &[u8]| bytes.iter().all(|byte| *byte == bytes[0]);
    std::thread::scope(|scope| {
        // The source's owner writes all bytes at once, under the lock; so does a second peer.
        scope.spawn(|| {
            for value in (1..=255).cycle() {
                if stop.load(SeqCst) {
                    return;
                }
                pair.served.update(0, LENGTH as u64, |bytes| bytes.fill(value)).expect("in range");
            }
        });
        scope.spawn(|| {
            let other = engine(Config::default());
            let local = memory(&other, LENGTH, Permission::LocalOnly);
            let peer = other.open_segment(pair.source.endpoint(), pair.source.epoch(), LONG).expect("it listens");
            let request = TransferRequest {
                local_address: local.address(),
                remote_address: pair.served.address(),
                length: LENGTH as u64,
            };
            for value in (1..=255).cycle() {
                if stop.load(SeqCst) {
                    return;
                }
                local.update(0, LENGTH as u64, |bytes| bytes.fill(value)).expect("in range");
                let report = other.submit_and_wait(&peer, Direction::Write, &[request], LONG).expect("sound");
                assert!(report.into_result().is_ok());
            }
        });
        for _ in 0..150 {
            let request = [pair.request(0, LENGTH as u64)];
            let report = pair.requester.submit_and_wait(&pair.peer, Direction::Read, &request, LONG).expect("sound");
            assert!(report.into_result().is_ok());
            assert!(uniform(&bytes_of(&pair.local)), "part of one state and part of another");
            pair.served.update(0, LENGTH as u64, |bytes| assert!(uniform(bytes))).expect("in range");
        }
        stop.store(true, SeqCst);
    });
}

#[test]
fn an_engine_may_read_from_and_write_to_itself_even_within_one_allocation() {
    let engine = engine(Config::default());
    let own = memory(&engine, 1 << 20, Permission::RemoteReadWrite);
    own.write(0, &pattern(1 << 19, 3)).expect("in range");
    let peer = engine.open_segment(engine.endpoint(), engine.epoch(), LONG).expect("itself");
    assert_eq!(engine.stats().connections_dialled, 0, "its own description needs no wire");
    let request =
        TransferRequest { local_address: own.address(), remote_address: own.address() + (1 << 19), length: 1 << 19 };
    let report = engine.submit_and_wait(&peer, Direction::Write, &[request], LONG).expect("sound");
    assert!(report.into_result().is_ok());
    let bytes = bytes_of(&own);
    assert_eq!(bytes[..1 << 19], bytes[1 << 19..]);
    let back = TransferRequest { local_address: own.address() + 10, remote_address: own.address(), length: 1000 };
    let report = engine.submit_and_wait(&peer, Direction::Read, &[back], LONG).expect("sound");
    assert!(report.into_result().is_ok());
    assert_eq!(bytes_of(&own)[10..1010], bytes[..1000]);
}

/// E-15: name, kind, buffers; ranges that are local only are hidden; the own segment without the wire.
#[test]
fn a_segment_tells_name_and_ranges_and_hides_what_is_local() {
    let source = engine(Config { name: "cache 7, näher".to_owned(), ..Config::default() });
    let shown = memory(&source, 4096, Permission::RemoteRead);
    let _hidden = memory(&source, 4096, Permission::LocalOnly);
    let other = engine(Config::default());
    for opener in [&other, &source] {
        let segment = opener.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
        assert_eq!((segment.name().as_str(), segment.kind()), ("cache 7, näher", SegmentKind::Memory));
        // The suites over RDMA run this, too.
        let devices = segment.devices();
        assert!(
            devices.len() <= 1
                && devices == source.open_segment(source.endpoint(), source.epoch(), LONG).expect("itself").devices()
        );
        let [RemoteRegion { address, length, permission, location, .. }] = segment.regions()[..] else { panic!() };
        assert_eq!((address, length), (shown.address(), 4096));
        assert_eq!((permission, location), (Permission::RemoteRead, Location::Host));
    }
    assert_eq!((source.stats().connections_dialled, other.stats().connections_dialled), (0, 1));
    let segment = source.open_segment(other.endpoint(), other.epoch(), LONG).expect("it listens");
    assert!(segment.name().is_empty() && segment.regions().is_empty());
}

#[test]
fn outside_memory_is_let_go_when_the_last_user_has_left() {
    let pair = Pair::new(64);
    let dropped = Arc::<AtomicU32>::default();
    let outside = external(4096, &dropped);
    let range = pair.source.register_host_memory(&outside, 0, 4096, Permission::RemoteReadWrite).expect("room");
    pair.requester.refresh(&pair.peer, LONG).expect("it listens");
    // A handler of the source's is stuck in it: the body of this WRITE does not come.
    let mut raw = common::RawRequester::connect(pair.source.endpoint());
    raw.send(&common::wire::request(common::wire::WRITE, pair.source.epoch(), range.id(), 0, 16));
    assert_eq!(raw.reply(), Some((common::wire::READY, 0)));
    assert!(pair.source.unregister_memory(&range).expect("registered"));
    drop((range, outside));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((dropped.load(SeqCst), pair.source.stats().registrations), (0, 2), "the handler has it");
    raw.send(&[5; 16]);
    assert_eq!(raw.reply(), Some((common::wire::SUCCESS, 0)), "what was admitted ends as if nothing had happened");
    eventually("the owner is let go", || dropped.load(SeqCst) == 1);
    assert_idle(&pair.source, 1);
}

#[test]
fn a_blocked_read_survives_unregistration_and_the_close_of_its_own_source() {
    let slow = common::RawSource::start(|stream, request| {
        use std::io::Write as _;
        let epoch = verbs_engine::Epoch::from_bytes(request[12..28].try_into().expect("16 bytes"));
        std::thread::sleep(Duration::from_millis(300));
        let mut reply = common::wire::reply(common::wire::SUCCESS, epoch, 16);
        reply.extend([6; 16]);
        let _ = stream.write_all(&reply);
    });
    let requester = tcp_engine(Config::default());
    let dropped = Arc::<AtomicU32>::default();
    let outside = external(64, &dropped);
    let local = requester.register_host_memory(&outside, 0, 64, Permission::LocalOnly).expect("room");
    let peer = requester.open_segment(slow.endpoint, slow.epoch, LONG).expect("it listens");
    let request =
        TransferRequest { local_address: local.address(), remote_address: common::RawSource::BASE, length: 16 };
    std::thread::scope(|scope| {
        let read = scope.spawn(|| requester.submit_and_wait(&peer, Direction::Read, &[request], LONG));
        eventually("it waits", || slow.requests.load(SeqCst) == 1);
        requester.unregister_memory(&local).expect("registered");
        drop(local);
        assert_eq!(requester.close_source(Duration::ZERO), Ok(()), "requests are no operations of peers");
        let late = requester.submit_and_wait(&peer, Direction::Read, &[request], LONG);
        assert!(matches!(late, Err(SubmitError::Local { .. })), "a later one must resolve anew");
        assert_eq!(dropped.load(SeqCst), 0);
        assert!(read.join().expect("no panic").expect("sound").is_complete());
    });
    assert_eq!((requester.stats().registrations, dropped.load(SeqCst)), (0, 0), "the test itself still holds it");
    drop(outside);
    assert_eq!(dropped.load(SeqCst), 1);
}

#[test]
fn a_closed_source_admits_nothing_and_waits_for_those_inside() {
    let pair = Pair::new(4096);
    let mut raw = common::RawRequester::connect(pair.source.endpoint());
    raw.send(&common::wire::request(common::wire::WRITE, pair.source.epoch(), pair.served.id(), 0, 4));
    assert_eq!(raw.reply(), Some((common::wire::READY, 0)));
    let start = Instant::now();
    assert_eq!(pair.source.close_source(Duration::from_millis(50)), Err(CloseTimeout { inside: 1 }));
    assert!(start.elapsed() >= Duration::from_millis(50));
    assert_eq!(pair.source.close_source(Duration::ZERO), Err(CloseTimeout { inside: 1 }), "looks once");
    let request = [pair.request(0, 16)];
    let report = pair.requester.submit_and_wait(&pair.peer, Direction::Read, &request, LONG).expect("sound");
    let failure = report.failure.expect("refused");
    assert!(matches!(failure.error, TransferError::Refused { status: Status::SourceClosed }), "although one is inside");
    let open = pair.requester.open_segment(pair.source.endpoint(), pair.source.epoch(), LONG).expect_err("closed");
    let closed = TransferError::Refused { status: Status::SourceClosed };
    assert!(matches!(&open, OpenError::Describe { source, .. } if source.to_string() == closed.to_string()));
    let register = pair.source.register_memory(vec![0; 8].into(), Permission::RemoteRead);
    assert_eq!(register.map(drop), Err(RegisterError::SourceClosed));
    raw.send(&[1, 2, 3, 4]);
    assert_eq!(raw.reply(), Some((common::wire::SUCCESS, 0)), "what was admitted is finished");
    assert_eq!(pair.source.close_source(LONG), Ok(()));
    assert_eq!(bytes_of(&pair.served)[..4], [1, 2, 3, 4]);
    // Its own requests go on.
    let back = pair.source.open_segment(pair.requester.endpoint(), pair.requester.epoch(), LONG).expect("still works");
    assert!(back.regions().is_empty(), "local ranges are not shown");
}

#[test]
fn deadlines_hold_whoever_is_silent() {
    let silent = common::RawSource::start(|_, _| std::thread::sleep(LONG));
    let requester = tcp_engine(Config::default());
    let local = memory(&requester, 64, Permission::LocalOnly);
    let peer = requester.open_segment(silent.endpoint, silent.epoch, LONG).expect("it answers that");
    let request =
        TransferRequest { local_address: local.address(), remote_address: common::RawSource::BASE, length: 16 };
    for direction in [Direction::Read, Direction::Write] {
        let start = Instant::now();
        let timeout = Duration::from_millis(150);
        let report = requester.submit_and_wait(&peer, direction, &[request, request], timeout).expect("sound");
        let failure = report.failure.expect("it says nothing");
        assert!(failure.error.is_timeout() && failure.effect == RemoteEffect::None, "no body was sent: {failure}");
        assert_eq!(failure.index, 0);
        assert!(start.elapsed() >= timeout && start.elapsed() < timeout + Duration::from_secs(5));
    }
    let report = requester.submit_and_wait(&peer, Direction::Read, &[request], Duration::ZERO).expect("sound");
    assert!(report.failure.expect("no time").error.is_timeout());
    assert_eq!(silent.requests.load(SeqCst), 2, "without time nothing is sent");
    // Nobody there at all: port 9 of a documentation address does not answer, or there is no route.
    let start = Instant::now();
    let nowhere = "192.0.2.1:9".parse().expect("an address");
    requester.open_segment(nowhere, silent.epoch, Duration::from_millis(200)).expect_err("nobody");
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_idle(&requester, 1);
}

#[test]
fn the_end_of_an_engine_interrupts_its_peers_and_leaves_memory_alone() {
    let Pair { source, served, requester, local, peer } = Pair::new(4096);
    let mut raw = common::RawRequester::connect(source.endpoint());
    raw.send(&common::wire::request(common::wire::WRITE, source.epoch(), served.id(), 0, 16));
    assert_eq!(raw.reply(), Some((common::wire::READY, 0)));
    raw.send(&[1; 15]);
    let start = Instant::now();
    drop(source);
    assert!(start.elapsed() < Duration::from_secs(4), "it does not wait for its peers' deadlines");
    assert!(raw.is_closed());
    assert_eq!(bytes_of(&served)[..16], [0; 16], "an incomplete body is not committed");
    served.write(0, &[2; 16]).expect("memory survives its engine");
    let request = TransferRequest { local_address: local.address(), remote_address: served.address(), length: 16 };
    let report = requester.submit_and_wait(&peer, Direction::Read, &[request], LONG).expect("sound");
    let failure = report.failure.expect("nobody is there");
    assert!(matches!(failure.error, TransferError::Connect { .. }), "{failure}");
    assert_eq!(failure.effect, RemoteEffect::None);
}

#[test]
fn a_report_speaks_of_data_and_notification_apart() {
    let source = Config { max_notifications: 1, ..Config::default() };
    let pair = Pair::with(4096, source, Config::default());
    let send = |message: &str| {
        let note = verbs_engine::Notification::new("done", message);
        let request = [pair.request(0, 16)];
        pair.requester.submit_and_notify(&pair.peer, Direction::Write, &request, &note, LONG).expect("sound")
    };
    let first = send("1");
    assert!(first.is_complete() && matches!(first.notification, NotificationStatus::Delivered));
    let second = send("2");
    assert!(second.is_complete() && second.failure.is_none(), "the data is there");
    let NotificationStatus::Failed(failure) = second.notification else { panic!("the inbox is full") };
    assert_eq!(failure.effect, RemoteEffect::None);
    assert!(matches!(failure.error, TransferError::Refused { status: Status::Exhausted }));
    assert_eq!(pair.source.receive_notifications().len(), 1);
    assert!(matches!(send("3").notification, NotificationStatus::Delivered));
}
