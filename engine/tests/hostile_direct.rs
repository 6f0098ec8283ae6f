//! The direct profile between peers of which one is not to be trusted: what arrived before the failure is there, reports
//! say so, the bytes are busy for as long as that takes and not longer, others are not, and nothing hangs.

mod common;

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use common::{
    LONG, Pair, RawRequester, RawSource, assert_idle, bytes_of, engine, eventually, memory, pattern, serving_direct,
    tcp_engine, wire,
};
use verbs_engine::{
    AccessError, BatchReport, Config, Direction, Engine, Epoch, Permission, Profile, RegisteredMemory, RemoteEffect,
    RemoteSegment, TaskState, TransferRequest,
};

/// A requester with memory of its own, and a source that is not to be trusted.
struct Trial {
    requester: Engine,
    local: RegisteredMemory,
    peer: RemoteSegment,
    source: RawSource,
}

impl Trial {
    fn new(bytes: usize, answer: impl Fn(&mut TcpStream, &[u8]) + Send + Sync + 'static) -> Self {
        let source = RawSource::start(answer);
        let requester = tcp_engine(Config::default());
        let local = memory(&requester, bytes, Permission::LocalOnly);
        local.update(0, bytes as u64, |bytes| bytes.fill(7)).expect("in range");
        let peer = requester.open_segment(source.endpoint, source.epoch, LONG).expect("it answers that");
        Self { requester, local, peer, source }
    }

    fn request(&self, length: u64) -> TransferRequest {
        TransferRequest { local_address: self.local.address(), remote_address: RawSource::BASE, length }
    }

    fn run(&self, direction: Direction, timeout: Duration) -> BatchReport {
        self.requester.submit_and_wait(&self.peer, direction.direct(), &[self.request(16)], timeout).expect("sound")
    }
}

fn epoch_of(request: &[u8]) -> Epoch {
    Epoch::from_bytes(request[12..28].try_into().expect("16 bytes"))
}

fn is_busy<T>(result: &Result<T, AccessError>) -> bool {
    matches!(result, Err(AccessError::Busy { .. }))
}

#[test]
fn a_read_that_is_cut_off_leaves_what_had_come_and_says_so() {
    let turn = Arc::<AtomicU32>::default();
    let at = Arc::clone(&turn);
    let trial = Trial::new(64, move |stream, request| {
        assert_eq!(request[10..12], [wire::READ, wire::DIRECT], "it is asked for on the wire");
        let mut reply = wire::reply(wire::SUCCESS, epoch_of(request), 16);
        reply.extend([0xee; 16]);
        let _ = stream.write_all(&reply[..at.fetch_add(1, SeqCst) as usize]);
    });
    for cut in 0..wire::REPLY + 16 {
        trial.local.write(0, &[7; 64]).expect("in range");
        let report = trial.run(Direction::Read, LONG);
        assert_eq!((report.completed, report.completed_bytes, report.profile), (0, 0, Profile::Direct));
        let failure = report.failure.expect("cut");
        let came = cut.saturating_sub(wire::REPLY);
        assert_eq!((failure.effect, failure.local_changed), (RemoteEffect::None, came > 0), "{cut}: {failure}");
        let mut expected = vec![7; 64];
        expected[..came].fill(0xee);
        assert_eq!(bytes_of(&trial.local), expected, "cut to {cut}");
        assert_eq!(usize::try_from(trial.source.requests.load(SeqCst)), Ok(cut + 1), "never sent twice");
    }
    assert!(trial.run(Direction::Read, LONG).is_complete(), "all of it is a success");
    assert_idle(&trial.requester, 1);
}

#[test]
fn every_refusal_and_every_wrong_reply_leaves_the_target_alone() {
    let turn = Arc::<AtomicU32>::default();
    let at = Arc::clone(&turn);
    let trial = Trial::new(64, move |stream, request| {
        let turn = u8::try_from(at.fetch_add(1, SeqCst)).expect("few");
        let epoch = epoch_of(request);
        let reply = match turn {
            0..=13 => wire::reply(turn.max(1), epoch, 0),
            14 => wire::reply(wire::SUCCESS, epoch, 15),
            15 => wire::reply(wire::SUCCESS, epoch, 17),
            _ => wire::reply(wire::SUCCESS, Epoch::from_bytes([1; 16]), 16),
        };
        let _ = stream.write_all(&[&reply[..], &[0xee; 17]].concat());
    });
    for _ in 0..17 {
        let failure = trial.run(Direction::Read, LONG).failure.expect("it must fail");
        assert_eq!((failure.effect, failure.local_changed), (RemoteEffect::None, false), "{failure}");
        assert_eq!(bytes_of(&trial.local), [7; 64], "{failure}");
    }
    assert_idle(&trial.requester, 1);
}

/// E-61 at the requester: the target is nobody else's until the deadline; its neighbours are free.
#[test]
fn a_read_that_trickles_keeps_its_target_busy_until_its_deadline_and_nothing_else() {
    let trial = Trial::new(64, |stream, request| {
        let reply = match request[10] {
            wire::READ => [wire::reply(wire::SUCCESS, epoch_of(request), 16), vec![0xee; 4]].concat(),
            _ => wire::reply(wire::READY, epoch_of(request), 0),
        };
        let _ = stream.write_all(&reply);
        // And no more of them.
        let _ = stream.read(&mut [0]);
    });
    let batch = trial.requester.allocate_batch(2).expect("room");
    let (timeout, request) = (Duration::from_millis(700), trial.request(16));
    let start = Instant::now();
    batch.submit(&trial.peer, Direction::Read.direct(), &[request, request], timeout, None).expect("sound");
    eventually("it has begun", || trial.requester.stats().direct_ranges == 1);
    let mut bytes = [0; 64];
    if start.elapsed() < timeout / 2 {
        // On a host that is not too busy to see it.
        assert!(is_busy(&trial.local.try_read(15, &mut bytes[..1])));
        assert!(is_busy(&trial.local.try_update(0, 64, |_| ())));
    }
    trial.local.try_update(16, 48, |bytes| bytes.fill(8)).expect("not what it is at");
    trial.local.try_read(16, &mut bytes[16..]).expect("nor this");
    // Another operation waits for the same bytes, and has a deadline of its own.
    let short = Duration::from_millis(100);
    for mode in [Direction::Write.into(), Direction::Write.direct()] {
        let Err(late) =
            trial.requester.submit_and_wait(&trial.peer, mode, &[request], short).expect("sound").into_result()
        else {
            panic!("nobody acknowledges it")
        };
        assert!(late.error.is_timeout(), "{late}");
        assert_eq!(late.effect, RemoteEffect::None, "nothing of the body has left: {late}");
    }
    // The owner waits as long as the operation does.
    trial.local.read(0, &mut bytes[..16]).expect("in range");
    assert!(batch.wait(LONG) && start.elapsed() >= timeout);
    let task = batch.task(0).expect("the first");
    assert_eq!((task.state, task.effect, task.local_changed), (TaskState::TimedOut, RemoteEffect::None, true));
    assert_eq!(bytes[..17], [&[0xee; 4][..], &[7; 12], &[8]].concat());
    let second = batch.task(1).expect("the second");
    assert_eq!((second.state, second.local_changed), (TaskState::NotAttempted, false));
    drop(batch);
    assert_idle(&trial.requester, 1);
    trial.local.try_update(0, 64, |_| ()).expect("free again");
}

/// The bytes of a WRITE may be looked at, and not be changed, while they go out.
#[test]
fn a_write_that_nobody_takes_lets_its_bytes_be_read_and_nothing_more() {
    // Less than that fits into the sockets' buffers, and the source reads nothing.
    let source = RawSource::start(|stream, request| {
        let _ = stream.write_all(&wire::reply(wire::READY, epoch_of(request), 0));
        std::thread::sleep(LONG);
    });
    let requester = tcp_engine(Config { socket_buffer_bytes: Some(4096), ..Config::default() });
    let local = memory(&requester, 128 << 10, Permission::LocalOnly);
    let peer = requester.open_segment(source.endpoint, source.epoch, LONG).expect("it answers that");
    let request = TransferRequest { local_address: local.address(), remote_address: RawSource::BASE, length: 65_536 };
    let batch = requester.allocate_batch(1).expect("room");
    let (timeout, start) = (Duration::from_millis(700), Instant::now());
    batch.submit(&peer, Direction::Write.direct(), &[request], timeout, None).expect("sound");
    eventually("it has begun, or all of it has left", || {
        requester.stats().direct_ranges == 1 || start.elapsed() >= timeout
    });
    let mut bytes = [0; 64];
    local.try_read(0, &mut bytes).expect("to look is allowed");
    local.try_update(65_536, 64, |_| ()).expect("behind it");
    assert!(batch.wait(LONG));
    let task = batch.task(0).expect("one");
    assert_eq!((task.state, task.effect, task.local_changed), (TaskState::TimedOut, RemoteEffect::Unknown, false));
    local.try_update(0, 65_536, |_| ()).expect("free");
    drop(batch);
    assert_eq!(requester.stats().effects_unknown, 1);
    assert_idle(&requester, 1);
}

#[test]
fn a_write_without_its_acknowledgement_is_unknown() {
    let turn = Arc::<AtomicU32>::default();
    let at = Arc::clone(&turn);
    let trial = Trial::new(64, move |stream, request| {
        assert_eq!(request[10..12], [wire::WRITE, wire::DIRECT]);
        let turn = at.fetch_add(1, SeqCst) as usize;
        if turn == 0 {
            let _ = stream.write_all(&wire::reply(wire::DIRECT_REFUSED, epoch_of(request), 0));
            return;
        }
        let _ = stream.write_all(&wire::reply(wire::READY, epoch_of(request), 0));
        let mut body = vec![0; [0, 0, 15, 16][turn.min(3)]];
        if stream.read_exact(&mut body).is_ok() && turn > 3 {
            assert_eq!(body, [7; 16]);
            let _ = stream.write_all(&wire::reply(wire::SUCCESS, epoch_of(request), 0));
        }
    });
    for attempt in 0..4 {
        let failure = trial.run(Direction::Write, LONG).failure.expect("no acknowledgement");
        let effect = if attempt == 0 { RemoteEffect::None } else { RemoteEffect::Unknown };
        assert_eq!((failure.effect, failure.local_changed), (effect, false), "{attempt}: {failure}");
    }
    assert!(trial.run(Direction::Write, LONG).is_complete());
    assert_eq!((trial.requester.stats().effects_unknown, bytes_of(&trial.local)), (3, vec![7; 64]));
    assert_idle(&trial.requester, 1);
}

/// A source that serves the direct profile, and by hand whoever asks.
struct Victim {
    pair: Pair,
}

impl Victim {
    fn new(bytes: usize, timeout: Duration) -> Self {
        let pair = Pair::with(bytes, Config { source_timeout: timeout, ..serving_direct() }, Config::default());
        pair.served.write(0, &pattern(bytes, 5)).expect("in range");
        Self { pair }
    }

    fn ask(&self, kind: u8, flags: u8, offset: u64, length: u64) -> RawRequester {
        let mut raw = RawRequester::connect(self.pair.source.endpoint());
        let mut request = wire::request(kind, self.pair.source.epoch(), self.pair.served.id(), offset, length);
        request[11] = flags;
        raw.send(&request);
        raw
    }

    fn left(&self) {
        eventually("every handler has left", || {
            let stats = self.pair.source.stats();
            (stats.source_operations, stats.direct_ranges) == (0, 0)
        });
    }
}

#[test]
fn a_write_that_is_cut_off_leaves_what_had_come() {
    let victim = Victim::new(4096, LONG);
    for cut in 0..16 {
        victim.pair.served.write(0, &pattern(4096, 5)).expect("in range");
        let mut raw = victim.ask(wire::WRITE, wire::DIRECT, 100, 16);
        assert_eq!(raw.reply(), Some((wire::READY, 0)));
        raw.send(&[0xee; 16][..cut]);
        raw.half_close();
        assert_eq!(raw.reply(), None, "no acknowledgement");
        victim.left();
        let mut expected = pattern(4096, 5);
        expected[100..100 + cut].fill(0xee);
        assert!(bytes_of(&victim.pair.served) == expected, "cut to {cut}");
    }
    let mut raw = victim.ask(wire::WRITE, wire::DIRECT, 100, 16);
    assert_eq!(raw.reply(), Some((wire::READY, 0)));
    raw.send(&[0xdd; 16]);
    assert_eq!(raw.reply(), Some((wire::SUCCESS, 0)));
    assert_eq!(bytes_of(&victim.pair.served)[99..117], [&[104][..], &[0xdd; 16], &[121]].concat());
    victim.left();
    assert_idle(&victim.pair.source, 1);
}

/// E-61 at the source: one that trickles keeps its bytes busy for as long as the source is patient, and no others.
#[test]
fn a_write_that_trickles_keeps_its_bytes_busy_and_no_others() {
    let timeout = Duration::from_millis(900);
    let victim = Victim::new(4096, timeout);
    let (served, start) = (&victim.pair.served, Instant::now());
    let mut raw = victim.ask(wire::WRITE, wire::DIRECT, 100, 16);
    assert_eq!(raw.reply(), Some((wire::READY, 0)));
    raw.send(&[0xee; 3]);
    let mut byte = [0];
    let seen = [
        is_busy(&served.try_read(100, &mut byte)),
        is_busy(&served.try_read(115, &mut byte)),
        is_busy(&served.try_update(0, 101, |_| ())),
    ];
    served.try_update(0, 100, |_| ()).expect("before it");
    served.try_update(116, 100, |_| ()).expect("behind it");
    // Peers get what does not conflict at once, and wait for what does: until it is free, or no time is left.
    let run = |mode, offset, length, timeout| {
        let request = [victim.pair.request(offset, length)];
        victim.pair.requester.submit_and_wait(&victim.pair.peer, mode, &request, timeout).expect("sound")
    };
    assert!(run(Direction::Read.into(), 116, 1000, LONG).is_complete());
    assert!(run(Direction::Write.direct(), 0, 100, LONG).is_complete());
    let short = run(Direction::Read.into(), 100, 1, Duration::from_millis(50));
    let (early, short) = (start.elapsed() < timeout, short.failure);
    // None of this is to be seen on a host that takes so long for it.
    if early {
        assert_eq!(seen, [true; 3]);
        assert!(short.is_some_and(|failure| failure.error.is_timeout() && failure.effect == RemoteEffect::None));
    }
    assert!(run(Direction::Read.direct(), 90, 30, LONG).is_complete(), "it waits until the other is given up");
    assert!(start.elapsed() >= timeout);
    assert_eq!(raw.reply(), None);
    victim.left();
    served.try_update(0, 4096, |bytes| assert_eq!(bytes[100..104], [0xee, 0xee, 0xee, 108])).expect("free again");
    assert_idle(&victim.pair.source, 1);
}

/// A READ that nobody takes: the owner may look, and may change what is not read; it waits with the rest.
#[test]
fn a_read_that_nobody_takes_lets_the_owner_look() {
    const LENGTH: usize = 8 << 20;
    let timeout = Duration::from_millis(900);
    let victim = Victim::new(LENGTH + 64, timeout);
    let (served, start) = (&victim.pair.served, Instant::now());
    // More than any socket buffer holds.
    let raw = victim.ask(wire::READ, wire::DIRECT, 0, LENGTH as u64);
    eventually("it has begun", || victim.pair.source.stats().direct_ranges == 1);
    let mut bytes = [0; 64];
    served.try_read(0, &mut bytes).expect("to look is allowed");
    assert_eq!(bytes[..], pattern(64, 5));
    served.try_update(LENGTH as u64, 64, |bytes| bytes.fill(1)).expect("behind it");
    let busy = is_busy(&served.try_update(LENGTH as u64 - 1, 2, |_| ()));
    // So may others, over the same bytes.
    let request = [victim.pair.request(10, 4096)];
    let run = |mode| victim.pair.requester.submit_and_wait(&victim.pair.peer, mode, &request, LONG).expect("sound");
    assert!(run(Direction::Read.into()).is_complete() && run(Direction::Read.direct()).is_complete());
    if start.elapsed() < timeout {
        assert!(busy);
    }
    // And a staged WRITE is committed when that one is given up.
    assert!(run(Direction::Write.into()).is_complete() && start.elapsed() >= timeout);
    served.write(0, &[9; 64]).expect("in range");
    victim.left();
    drop(raw);
    assert_idle(&victim.pair.source, 1);
}

#[test]
fn every_flag_that_is_none_is_refused() {
    let victim = Victim::new(4096, LONG);
    for flags in 0..=255 {
        for kind in [wire::READ, wire::WRITE] {
            let mut raw = victim.ask(kind, flags, 0, 0);
            let done = if kind == wire::READ { wire::SUCCESS } else { wire::READY };
            let expected = if flags < 2 { done } else { wire::PROTOCOL };
            assert_eq!(raw.reply(), Some((expected, 0)), "{kind} {flags}");
        }
    }
    for kind in [wire::DESCRIBE, wire::NOTIFY] {
        let mut raw = RawRequester::connect(victim.pair.source.endpoint());
        let mut request = wire::request(kind, victim.pair.source.epoch(), 0, 0, 0);
        request[11] = wire::DIRECT;
        raw.send(&request);
        assert_eq!(raw.reply(), Some((wire::PROTOCOL, 0)), "these have no profile");
    }
    victim.left();
    assert!(bytes_of(&victim.pair.served) == pattern(4096, 5));
}

/// Peers who read the same bytes again and again do not keep their owner from changing them.
#[test]
fn readers_that_follow_each_other_do_not_keep_a_writer_out() {
    let pair = Pair::direct(1 << 20);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let requester = engine(Config::default());
                let local = memory(&requester, 1 << 20, Permission::LocalOnly);
                let peer = requester.open_segment(pair.source.endpoint(), pair.source.epoch(), LONG).expect("served");
                let (local_address, remote_address) = (local.address(), pair.served.address());
                let request = TransferRequest { local_address, remote_address, length: 1 << 20 };
                while !stop.load(SeqCst) {
                    let report = requester.submit_and_wait(&peer, Direction::Read.direct(), &[request], LONG);
                    assert!(report.expect("sound").is_complete());
                    local
                        .update(0, 1 << 20, |bytes| assert!(bytes.iter().all(|byte| *byte == bytes[0])))
                        .expect("in range");
                }
            });
        }
        for value in 1..=50 {
            pair.served.update(0, 1 << 20, |bytes| bytes.fill(value)).expect("in range");
        }
        stop.store(true, SeqCst);
    });
    assert_idle(&pair.source, 1);
}
