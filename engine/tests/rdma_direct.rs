//! The direct profile over simulated devices: reuse, busy bytes for as long as a device may be at them and not longer,
//! failures of devices, and that nothing is left.

mod common;

use std::{sync::Arc, time::Duration};

use common::{LONG, assert_idle, bytes_of, eventually, memory, pattern, request_between};
use verbs_engine::{
    AccessError, BatchReport, Config, Direction, Engine, Permission, Profile, RdmaConfig, RegisteredMemory,
    RemoteEffect, RemoteSegment, ServeDirect, TaskState, TransferRequest, Transport, TransportPolicy,
};
use verbs_transport::{
    fabric::bulk::WindowPolicy,
    sim::{Faults, HostConfig, SimConfig, SimWorld},
};

const US: Duration = Duration::from_micros(1);

/// A source on host 10.0.0.2 and a requester on 10.0.0.1.
struct Rig {
    world: SimWorld,
    source: Engine,
    served: RegisteredMemory,
    requester: Engine,
    local: RegisteredMemory,
    peer: RemoteSegment,
}

impl Rig {
    fn new(bytes: usize, windows: WindowPolicy) -> Self {
        Self::with(bytes, windows, SimConfig::default(), &Config::default(), &RdmaConfig::default())
    }

    fn with(bytes: usize, windows: WindowPolicy, sim: SimConfig, config: &Config, rdma: &RdmaConfig) -> Self {
        let world = SimWorld::new(sim);
        let host = |n: u8| {
            let fabric = world.host([10, 0, 0, n], HostConfig { windows, ..HostConfig::default() });
            let config =
                Config { transport: TransportPolicy::RdmaOnly, serve_direct: ServeDirect::All, ..config.clone() };
            Engine::with_rdma(config, rdma, Arc::new(fabric)).expect("an engine")
        };
        let (source, requester) = (host(2), host(1));
        let served = memory(&source, bytes, Permission::RemoteReadWrite);
        let local = memory(&requester, bytes, Permission::LocalOnly);
        let peer = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
        Self { world, source, served, requester, local, peer }
    }

    fn request(&self, offset: u64, length: u64) -> TransferRequest {
        request_between(&self.local, &self.served, offset, length)
    }

    fn run(&self, direction: Direction, length: u64) -> BatchReport {
        let request = [self.request(0, length)];
        self.requester.submit_and_wait(&self.peer, direction.direct(), &request, LONG).expect("sound")
    }

    fn end(self) {
        let Self { world, source, served, requester, local, peer } = self;
        assert_idle(&requester, 1);
        assert_idle(&source, 1);
        for memory in [&served, &local] {
            memory.try_update(0, memory.len(), |_| ()).expect("nobody is at it any more");
        }
        drop((peer, served, local));
        drop(requester);
        drop(source);
        // Regions, windows, QPs, work requests, completions.
        world.assert_quiet();
    }
}

fn is_busy<T>(result: &Result<T, AccessError>) -> bool {
    matches!(result, Err(AccessError::Busy { .. }))
}

#[test]
fn one_pair_of_qps_carries_a_thousand_operations_and_nothing_is_staged() {
    for windows in [WindowPolicy::Auto, WindowPolicy::Never] {
        let rig = Rig::new(4096, windows);
        for round in 0..1000_u32 {
            let value = u8::try_from(round % 251).expect("small");
            let (direction, from, to) = match round % 2 {
                0 => (Direction::Read, &rig.served, &rig.local),
                _ => (Direction::Write, &rig.local, &rig.served),
            };
            from.try_update(0, 4096, |bytes| bytes.fill(value)).expect("the one before has left it");
            let report = rig.run(direction, 4096);
            assert_eq!((report.is_complete(), report.transport), (true, Some(Transport::Rdma)), "{report:?}");
            // The source lets go before it acknowledges, and the requester before it reports.
            to.try_update(0, 4096, |bytes| assert!(bytes.iter().all(|byte| *byte == value))).expect("free");
        }
        let (here, there) = (rig.requester.stats(), rig.source.stats());
        assert_eq!((here.rdma_completed, here.direct_completed, here.connections_dialled), (1000, 1000, 2));
        assert_eq!((here.kept_staging_bytes, there.kept_staging_bytes), (0, 0));
        rig.end();
    }
}

/// Staged and direct operations over one pair, in turn.
#[test]
fn profiles_share_a_pair() {
    for windows in [WindowPolicy::Auto, WindowPolicy::Never] {
        let rig = Rig::new(200_000, windows);
        for round in 0..40_usize {
            let sent = pattern([1, 4096, 65_537, 199_999][round % 4], u8::try_from(round).expect("small"));
            let direction = if round % 3 == 0 { Direction::Write } else { Direction::Read };
            let (from, to) = match direction {
                Direction::Read => (&rig.served, &rig.local),
                Direction::Write => (&rig.local, &rig.served),
            };
            from.write(0, &sent).expect("in range");
            to.write(0, &vec![0; 200_000]).expect("in range");
            let mode = if round % 2 == 0 { direction.direct() } else { direction.into() };
            let request = [rig.request(0, sent.len() as u64)];
            let report = rig.requester.submit_and_wait(&rig.peer, mode, &request, LONG).expect("sound");
            assert!(report.is_complete() && report.profile == mode.profile, "{report:?}");
            let now = bytes_of(to);
            assert!(now[..sent.len()] == sent && now[sent.len()..].iter().all(|byte| *byte == 0), "round {round}");
        }
        assert_eq!(rig.requester.stats().connections_dialled, 2);
        rig.end();
    }
}

/// E-61, E-62, E-66: as long as a device does not let a QP go, the bytes that it may touch are busy, at either end, and
/// held; then all of it comes back by itself.
#[test]
fn bytes_are_busy_until_the_qp_is_gone() {
    for windows in [WindowPolicy::Auto, WindowPolicy::Never] {
        for direction in [Direction::Read, Direction::Write] {
            let sim = SimConfig { bulk_bytes_per_second: 100_000, ..SimConfig::default() };
            let config = Config { source_timeout: Duration::from_millis(300), ..Config::default() };
            let rig = Rig::with(2 << 20, windows, sim, &config, &RdmaConfig::default());
            let length = 1 << 20;
            rig.served.update(0, length, |bytes| bytes.fill(1)).expect("in range");
            for host in [1, 2] {
                rig.world.refuse_destroy([10, 0, 0, host], true);
            }
            // 1 MiB takes ten seconds there.
            let batch = rig.requester.allocate_batch(1).expect("room");
            let timeout = Duration::from_millis(300);
            batch.submit(&rig.peer, direction.direct(), &[rig.request(0, length)], timeout, None).expect("sound");
            eventually("it ends by its deadline although the device is slow", || batch.status().is_finished());
            let task = batch.task(0).expect("one");
            let effect = if direction == Direction::Read { RemoteEffect::None } else { RemoteEffect::Unknown };
            assert_eq!((task.state, task.effect), (TaskState::TimedOut, effect));
            assert_eq!((task.profile, task.local_changed), (Profile::Direct, direction == Direction::Read));
            eventually("both have begun to bury", || {
                rig.source.stats().rdma_closing == 1 && rig.requester.stats().rdma_closing == 1
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!batch.locally_drained(), "local memory is held while the QP lives");
            let (written, read) = match direction {
                Direction::Read => (&rig.local, &rig.served),
                Direction::Write => (&rig.served, &rig.local),
            };
            let mut byte = [0];
            assert!(is_busy(&written.try_read(length - 1, &mut byte)) && is_busy(&written.try_update(0, 1, |_| ())));
            read.try_read(length - 1, &mut byte).expect("to look is allowed");
            assert!(is_busy(&read.try_update(0, 1, |_| ())));
            for memory in [written, read] {
                memory.try_update(length, length, |_| ()).expect("the other half");
            }
            let (here, there) = (rig.requester.stats(), rig.source.stats());
            assert_eq!((here.direct_ranges, there.direct_ranges), (1, 1));
            assert_eq!((there.source_operations, there.grants, there.grant_bytes), (1, 1, length));
            assert_eq!(rig.source.close_source(Duration::ZERO).map_err(|late| late.inside), Err(1));
            for host in [1, 2] {
                rig.world.refuse_destroy([10, 0, 0, host], false);
            }
            // Whoever waits gets them now.
            for memory in [written, read] {
                memory.update(0, length, |_| ()).expect("in range");
            }
            rig.source.close_source(LONG).expect("it comes to rest by itself");
            assert!(batch.wait(LONG));
            drop(batch);
            rig.end();
        }
    }
}

/// A device that does not deregister: bytes stay busy until it does.
#[test]
fn bytes_are_busy_until_the_device_has_deregistered_them() {
    for (direction, host) in [(Direction::Read, 1), (Direction::Write, 1), (Direction::Read, 2), (Direction::Write, 2)]
    {
        let rig = Rig::new(4096, WindowPolicy::Never);
        rig.world.refuse_deregister([10, 0, 0, host], true);
        let report = rig.run(direction, 4096);
        // At the requester's all is done by then.
        assert_eq!(report.is_complete(), host == 1, "{direction:?} {host}: {report:?}");
        let memory = if host == 1 { &rig.local } else { &rig.served };
        let engine = if host == 1 { &rig.requester } else { &rig.source };
        std::thread::sleep(Duration::from_millis(50));
        assert!(is_busy(&memory.try_update(0, 4096, |_| ())), "{direction:?} {host}");
        assert_eq!((engine.stats().rdma_closing, engine.stats().direct_ranges), (1, 1));
        rig.world.refuse_deregister([10, 0, 0, host], false);
        eventually("and let go", || engine.stats().rdma_closing == 0);
        memory.try_update(0, 4096, |_| ()).expect("free");
        assert!(rig.run(direction, 4096).is_complete());
        rig.end();
    }
}

/// Bytes that one direct operation is at: the next waits for them, and has a deadline.
#[test]
fn operations_that_conflict_follow_each_other() {
    let sim = SimConfig { bulk_bytes_per_second: 4_000_000, ..SimConfig::default() };
    let rig = Rig::with(1 << 20, WindowPolicy::Auto, sim, &Config::default(), &RdmaConfig::default());
    // A quarter of a second each.
    let batches: Vec<_> = (0..4)
        .map(|round| {
            let direction = if round % 2 == 0 { Direction::Write } else { Direction::Read };
            let batch = rig.requester.allocate_batch(1).expect("room");
            let mode = if round == 3 { direction.into() } else { direction.direct() };
            batch.submit(&rig.peer, mode, &[rig.request(0, 1 << 20)], LONG, None).expect("sound");
            batch
        })
        .collect();
    for batch in &batches {
        assert!(batch.wait(LONG));
        let task = batch.task(0).expect("one");
        assert_eq!(task.state, TaskState::Completed, "{task:?}");
    }
    drop(batches);
    rig.end();
}

/// Without a way to the peer's device the same profile goes over TCP, where that is allowed.
#[test]
fn a_fallback_keeps_the_profile() {
    let world = SimWorld::new(SimConfig::default());
    let fabric = Arc::new(world.host([10, 0, 0, 1], HostConfig::default()));
    let requester = Engine::with_rdma(Config::default(), &RdmaConfig::default(), fabric).expect("an engine");
    for (serves, complete) in [(ServeDirect::All, true), (ServeDirect::Never, false)] {
        let source = Engine::new(Config { serve_direct: serves, ..Config::default() }).expect("an engine");
        let (served, local) =
            (memory(&source, 64, Permission::RemoteRead), memory(&requester, 64, Permission::LocalOnly));
        served.write(0, &[5; 64]).expect("in range");
        let peer = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
        let request = [request_between(&local, &served, 0, 64)];
        let mode = Direction::Read.direct();
        for _ in 0..2 {
            let report = requester.submit_and_wait(&peer, mode, &request, LONG).expect("sound");
            assert_eq!((report.is_complete(), report.profile), (complete, Profile::Direct), "{report:?}");
            assert_eq!(report.transport, complete.then_some(Transport::Tcp));
            let expected = if complete { [5; 64] } else { [0; 64] };
            assert_eq!(bytes_of(&local), expected);
            assert!(!report.failure.is_some_and(|failure| failure.local_changed));
        }
    }
    drop(requester);
    world.assert_quiet();
}

/// Seeded faults of devices. While they strike every report is true of the bytes; when they stop everything comes home.
#[test]
fn devices_that_fail_at_random_cost_operations_and_bytes_of_theirs_alone() {
    const LENGTH: usize = 60_000;
    let mut changed = 0;
    for seed in 0..4 {
        println!("seed {seed}");
        let faults = Faults {
            delay: 0.2,
            delay_by: US * 50..=US * 3000,
            late_completion: 0.2,
            late_completion_by: US * 50..=US * 3000,
            lost_ack: 0.02,
            qp_error: 0.03,
            create_qp_exhausted: 0.05,
            register_refused: 0.05,
            bind_fails: 0.05,
            post_refused: 0.03,
            lost_flush: 0.05,
            ..Faults::none()
        };
        let sim = SimConfig { faults, latency: US..=US * 20, ..SimConfig::seeded(seed) };
        let rdma = RdmaConfig { chunk_bytes: 4096, ack_timeout_code: 8, ..RdmaConfig::default() };
        let config = Config { source_timeout: Duration::from_millis(500), ..Config::default() };
        let windows = if seed % 2 == 0 { WindowPolicy::Auto } else { WindowPolicy::Never };
        let rig = Rig::with(LENGTH, windows, sim, &config, &rdma);
        let (mut complete, mut failed) = (0, 0);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut served = vec![0; LENGTH];
        for round in 0..70_u32 {
            let value = u8::try_from(round % 250 + 1).expect("small");
            let length = random.usize(1..=LENGTH);
            let request = [rig.request(0, length as u64)];
            let submit = |direction: Direction| {
                let timeout = Duration::from_millis(400);
                rig.requester.submit_and_wait(&rig.peer, direction.direct(), &request, timeout).expect("sound")
            };
            let what = format!("seed {seed}, round {round}");
            let report = if random.bool() {
                rig.local.write(0, &vec![value; LENGTH]).expect("in range");
                let report = submit(Direction::Write);
                // Waits for the source to let go.
                let now = bytes_of(&rig.served);
                match &report.failure {
                    None => assert!(now[..length].iter().all(|byte| *byte == value), "{what}: acknowledged, not there"),
                    Some(failure) if failure.effect == RemoteEffect::None => {
                        assert!(now == served, "{what}: {failure}");
                    }
                    Some(_) => {
                        let mut both = now.iter().zip(&served);
                        assert!(both.all(|(now, old)| now == old || *now == value), "{what}: neither old nor new");
                    }
                }
                assert!(now[length..] == served[length..], "{what}: and not one more");
                served = now;
                report
            } else {
                rig.local.write(0, &vec![0xff; LENGTH]).expect("in range");
                let report = submit(Direction::Read);
                let now = bytes_of(&rig.local);
                match &report.failure {
                    None => assert!(now[..length] == served[..length], "{what}"),
                    Some(failure) if failure.local_changed => {
                        let mut both = now.iter().zip(&served);
                        assert!(both.all(|(now, new)| *now == 0xff || now == new), "{what}: neither old nor new");
                        changed += 1;
                    }
                    Some(failure) => assert!(now == vec![0xff; LENGTH], "{what}: {failure}"),
                }
                assert!(report.failure.as_ref().is_none_or(|failure| failure.effect == RemoteEffect::None), "{what}");
                assert!(now[length..].iter().all(|byte| *byte == 0xff), "{what}: and not one more");
                report
            };
            failed += u32::from(report.failure.is_some());
            complete += u32::from(report.failure.is_none());
        }
        println!("seed {seed}: {complete} completed, {failed} failed; {:?}", rig.world.fault_counts());
        assert!(complete > 10 && failed > 3, "seed {seed}: {complete} completed, {failed} failed: it shows something");
        rig.world.stop_faults();
        assert_idle(&rig.requester, 1);
        assert_idle(&rig.source, 1);
        eventually("a pair works again", || rig.run(Direction::Write, 64).is_complete());
        rig.end();
    }
    assert!(changed > 0, "some READs failed with bytes changed");
}

/// The end of an engine in the middle of direct operations leaves nothing in the device, and the bytes free.
#[test]
fn engines_end_in_the_middle_of_direct_operations() {
    for (first, windows) in [(true, WindowPolicy::Auto), (false, WindowPolicy::Auto), (true, WindowPolicy::Never)] {
        let sim = SimConfig { bulk_bytes_per_second: 1_000_000, ..SimConfig::default() };
        let rig = Rig::with(3 << 20, windows, sim, &Config::default(), &RdmaConfig::default());
        let batches: Vec<_> = (0..3)
            .map(|at| {
                let batch = rig.requester.allocate_batch(1).expect("room");
                let direction = if at == 1 { Direction::Read } else { Direction::Write };
                let request = [rig.request(at << 20, 1 << 20)];
                batch.submit(&rig.peer, direction.direct(), &request, LONG, None).expect("sound");
                batch
            })
            .collect();
        eventually("they are under way", || rig.source.stats().direct_ranges == 3);
        let Rig { world, source, served, requester, local, peer } = rig;
        if first {
            drop(requester);
            served.update(0, 3 << 20, |_| ()).expect("the source lets go of a peer that has ended");
            drop(source);
        } else {
            drop(source);
            assert!(batches.iter().all(|batch| batch.wait(LONG)));
            drop(requester);
        }
        assert!(batches.iter().all(|batch| batch.status().is_finished() && batch.locally_drained()));
        for memory in [&served, &local] {
            memory.try_update(0, 3 << 20, |_| ()).expect("memory outlives both, and is free");
        }
        drop((batches, peer, served, local));
        world.assert_quiet();
    }
}
