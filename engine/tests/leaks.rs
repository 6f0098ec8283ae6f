//! What a process must not have more of after an engine than before: descriptors, threads, memory that is held.
//!
//! One test, so that nothing else runs in the process.

mod common;

use std::{
    fs,
    sync::{Arc, atomic::AtomicU32, atomic::Ordering::SeqCst},
    time::{Duration, Instant},
};

use common::{LONG, Pair, RawRequester, RawSource, engine, eventually, external, memory, wire};
use verbs_engine::{Config, Direction, Notification, Permission, TransferRequest};

fn census() -> (usize, usize) {
    let count = |path| fs::read_dir(path).expect("/proc is mounted").count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

fn assert_back(before: (usize, usize), what: &str) {
    let deadline = Instant::now() + LONG;
    loop {
        let now = census();
        if now.0 <= before.0 && now.1 <= before.1 {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {before:?} descriptors and threads before, {now:?} after");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn engines_leave_nothing_behind() {
    let silent = RawSource::start(|_, _| std::thread::sleep(Duration::from_secs(2)));
    let before = census();
    for round in 0..20 {
        let pair = Pair::new(1 << 20);
        let all = [pair.request(0, 1 << 20)];
        for direction in [Direction::Read, Direction::Write] {
            let note = Notification::new("a", "b");
            let report = pair.requester.submit_and_notify(&pair.peer, direction, &all, &note, LONG).expect("sound");
            assert!(report.is_complete());
        }
        let batches: Vec<_> = (0..4).map(|_| pair.requester.allocate_batch(2).expect("room")).collect();
        for batch in &batches {
            batch.submit(&pair.peer, Direction::Read, &all, LONG, None).expect("sound");
        }
        if round % 2 == 0 {
            assert!(batches.iter().all(|batch| batch.wait(LONG)));
        }
        // Dropped with work in flight, in every second round, and with batches that outlive the engine in each.
        drop(pair);
        assert!(batches.iter().all(|batch| batch.status().is_finished() && batch.locally_drained()));
    }
    assert_back(before, "plain use");

    for round in 1..=5 {
        let dropped = Arc::<AtomicU32>::default();
        let requester = engine(Config::default());
        let outside = external(4096, &dropped);
        let local = requester.register_host_memory(&outside, 0, 4096, Permission::LocalOnly).expect("room");
        let peer = requester.open_segment(silent.endpoint, silent.epoch, LONG).expect("it answers that");
        let request = TransferRequest { local_address: local.address(), remote_address: RawSource::BASE, length: 16 };
        let detached = requester.allocate_batch(1).expect("room");
        detached.submit(&peer, Direction::Write, &[request], LONG, None).expect("sound");
        detached.detach();
        eventually("it waits for its go-ahead", || silent.requests.load(SeqCst) == round);
        drop((local, outside));
        let start = Instant::now();
        drop(requester);
        assert!(start.elapsed() < Duration::from_secs(10), "a silent peer does not hold the end up");
        assert_eq!(dropped.load(SeqCst), 1, "and the memory is let go with it");
    }
    for _ in 0..5 {
        let source = engine(Config::default());
        let served = memory(&source, 64, Permission::RemoteReadWrite);
        let mut raws: Vec<_> = (0..8).map(|_| RawRequester::connect(source.endpoint())).collect();
        for raw in raws.iter_mut().take(4) {
            raw.send(&wire::request(wire::WRITE, source.epoch(), served.id(), 0, 16));
        }
        drop(source);
        // A request that was read while the source went away may be told that its region is gone, but not that it was
        // carried out.
        assert!(raws.iter_mut().all(|raw| raw.reply().is_none_or(|reply| reply.0 != wire::SUCCESS)));
    }
    // The silent source's own threads end by themselves.
    assert_back(before, "silent and stuck peers");

    // A connection after the other, one in ten broken off: the source keeps none of them.
    let source = engine(Config { source_timeout: Duration::from_millis(500), ..Config::default() });
    let idle = census();
    for round in 0..500 {
        let mut raw = RawRequester::connect(source.endpoint());
        let request = wire::request(wire::DESCRIBE, source.epoch(), 0, 0, 0);
        if round % 10 == 0 {
            raw.send(&request[..20]);
        } else {
            raw.send(&request);
            // No ranges, no name, no devices.
            assert_eq!(raw.reply(), Some((wire::SUCCESS, 4 + 2)));
        }
    }
    assert_back(idle, "500 connections");
    drop(source);
    assert_back(before, "all of it");
}
