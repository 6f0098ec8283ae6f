//! Operations over simulated devices: bytes, reuse, what carries what, and that nothing is left.

mod common;

use std::{sync::Arc, time::Duration};

use common::{LONG, assert_idle, bytes_of, eventually, memory, pattern, request_between};
use verbs_bootstrap::{GidType, RdAtomic};
use verbs_engine::{
    BatchError, Config, Direction, Engine, Permission, RdmaConfig, RegisteredMemory, RemoteEffect, RemoteSegment,
    Status, TaskState, TransferError, TransferRequest, Transport, TransportPolicy,
};
use verbs_transport::{
    fabric::bulk::WindowPolicy,
    sim::{Faults, HostConfig, SimConfig, SimWorld},
};

/// A source on host 10.0.0.2 and a requester on 10.0.0.1.
struct Rig {
    world: SimWorld,
    source: Engine,
    served: RegisteredMemory,
    requester: Engine,
    local: RegisteredMemory,
    peer: RemoteSegment,
}

fn on(world: &SimWorld, host: u8, config: Config, rdma: &RdmaConfig) -> Engine {
    let fabric = world.host([10, 0, 0, host], HostConfig::default());
    Engine::with_rdma(config, rdma, Arc::new(fabric)).expect("an engine")
}

impl Rig {
    fn new(bytes: usize) -> Self {
        Self::with(bytes, SimConfig::default(), &Config::default(), &RdmaConfig::default())
    }

    fn on(bytes: usize, windows: WindowPolicy) -> Self {
        Self::made(bytes, SimConfig::default(), &Config::default(), &RdmaConfig::default(), windows)
    }

    fn with(bytes: usize, sim: SimConfig, config: &Config, rdma: &RdmaConfig) -> Self {
        Self::made(bytes, sim, config, rdma, WindowPolicy::Auto)
    }

    fn made(bytes: usize, sim: SimConfig, config: &Config, rdma: &RdmaConfig, windows: WindowPolicy) -> Self {
        let world = SimWorld::new(sim);
        let host = |n: u8| {
            let fabric = world.host([10, 0, 0, n], HostConfig { windows, ..HostConfig::default() });
            Engine::with_rdma(config.clone(), rdma, Arc::new(fabric)).expect("an engine")
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

    fn end(self) {
        let Self { world, source, served, requester, local, peer } = self;
        assert_idle(&requester, 1);
        assert_idle(&source, 1);
        drop((peer, served, local));
        drop(requester);
        drop(source);
        // Regions, QPs, work requests, completions.
        world.assert_quiet();
    }
}

#[test]
fn bytes_arrive_whatever_their_number() {
    let rig = Rig::new(8 << 20);
    for length in [1_usize, 2, 4095, 65_536, 524_287, 524_288, 524_289, 1 << 20, 8 << 20] {
        let sent = pattern(length, u8::try_from(length % 199).expect("small"));
        rig.local.write(0, &sent).expect("in range");
        let request = [rig.request(0, length as u64)];
        let report = rig.requester.submit_and_wait(&rig.peer, Direction::Write, &request, LONG).expect("sound");
        assert!(report.is_complete() && report.transport == Some(Transport::Rdma), "{report:?}");
        assert_eq!(bytes_of(&rig.served)[..length], sent);
        rig.local.write(0, &vec![0; length]).expect("in range");
        let report = rig.requester.submit_and_wait(&rig.peer, Direction::Read, &request, LONG).expect("sound");
        assert!(report.is_complete() && report.transport == Some(Transport::Rdma), "{report:?}");
        assert_eq!(bytes_of(&rig.local)[..length], sent);
    }
    let stats = rig.requester.stats();
    assert_eq!((stats.rdma_completed, stats.connections_dialled, stats.connections_reused), (18, 2, 17));
    rig.end();
}

fn run(rig: &Rig, direction: Direction, length: u64) -> verbs_engine::BatchReport {
    rig.requester.submit_and_wait(&rig.peer, direction, &[rig.request(0, length)], LONG).expect("sound")
}

/// ET-11 in memory, and the keys of windows beyond their 255 binds.
#[test]
fn one_pair_of_qps_carries_a_thousand_operations() {
    for windows in [WindowPolicy::Auto, WindowPolicy::Never] {
        let rig = Rig::on(4096, windows);
        for round in 0..1000_u32 {
            let value = u8::try_from(round % 251).expect("small");
            let direction = if round % 2 == 0 { Direction::Read } else { Direction::Write };
            let (from, to) = match direction {
                Direction::Read => (&rig.served, &rig.local),
                Direction::Write => (&rig.local, &rig.served),
            };
            from.write(0, &[value; 4096]).expect("in range");
            assert!(run(&rig, direction, 4096).is_complete());
            assert_eq!(bytes_of(to), [value; 4096]);
        }
        let (here, there) = (rig.requester.stats(), rig.source.stats());
        assert_eq!((here.rdma_completed, here.connections_dialled, here.connections_reused), (1000, 2, 999));
        assert_eq!((here.rdma_idle, there.rdma_connecting + there.rdma_closing, there.rdma_stuck), (1, 0, 0));
        eventually("the source has it back", || rig.source.stats().rdma_idle == 1);
        rig.end();
    }
}

/// Status 12: the source's half of a kept pair is gone, its control connection is not. Nothing has happened, and a new
/// pair is made.
#[test]
fn a_pair_that_the_source_no_longer_has_is_set_up_afresh() {
    let rig = Rig::new(4096);
    for round in 1..=5 {
        assert!(run(&rig, Direction::Write, 4096).is_complete());
        eventually("it is kept", || rig.source.stats().rdma_idle == 1 && rig.requester.stats().rdma_idle == 1);
        // Whichever number it has.
        let broken = (0..4000).filter(|qpn| rig.world.force_bulk_error([10, 0, 0, 2], *qpn)).count();
        assert_eq!(broken, 1, "round {round}");
        let report = run(&rig, Direction::Read, 4096);
        assert!(report.is_complete() && report.transport == Some(Transport::Rdma), "{report:?}");
        eventually("the old halves are gone", || {
            let (here, there) = (rig.requester.stats(), rig.source.stats());
            (here.rdma_closing, there.rdma_closing) == (0, 0)
        });
    }
    rig.end();
}

/// What carries what, decided before any effect.
#[test]
fn a_policy_chooses_and_the_report_tells() {
    let world = SimWorld::new(SimConfig::default());
    let rdma = RdmaConfig::default();
    let with = |transport| Config { transport, ..Config::default() };
    let device_source = on(&world, 2, Config::default(), &rdma);
    let plain_source = Engine::new(Config::default()).expect("an engine");
    // Another kind of GID: no path to the others.
    let stranger = world.host([10, 0, 0, 3], HostConfig { gid_type: GidType::RoceV1, ..HostConfig::default() });
    let stranger = Engine::with_rdma(Config::default(), &rdma, Arc::new(stranger)).expect("an engine");
    let sources = [(&device_source, Some(Transport::Rdma)), (&plain_source, None), (&stranger, None)];
    let served: Vec<_> = sources.iter().map(|(source, _)| memory(source, 64, Permission::RemoteRead)).collect();
    for (host, policy) in
        [TransportPolicy::Auto, TransportPolicy::TcpOnly, TransportPolicy::RdmaOnly].into_iter().enumerate()
    {
        let requester = on(&world, 10 + u8::try_from(host).expect("small"), with(policy), &rdma);
        let local = memory(&requester, 64, Permission::LocalOnly);
        for ((source, possible), served) in sources.iter().zip(&served) {
            let peer = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
            let request =
                [TransferRequest { local_address: local.address(), remote_address: served.address(), length: 64 }];
            let before = requester.stats();
            for _ in 0..3 {
                let report = requester.submit_and_wait(&peer, Direction::Read, &request, LONG).expect("sound");
                match (policy, possible) {
                    (TransportPolicy::TcpOnly, _) => assert_eq!(report.transport, Some(Transport::Tcp)),
                    (TransportPolicy::Auto, None) => assert_eq!(report.transport, Some(Transport::Tcp), "{report:?}"),
                    (_, Some(over)) => assert_eq!(report.transport, Some(*over), "{report:?}"),
                    (_, None) => {
                        let failure = report.failure.expect("there is no way");
                        assert_eq!(failure.effect, RemoteEffect::None);
                        let fits = matches!(
                            failure.error,
                            TransferError::Refused { status: Status::BackendUnavailable }
                        ) || matches!(&failure.error, TransferError::NoPath { reason } if reason.contains("types"));
                        assert!(fits, "{}", failure.error);
                    }
                }
            }
            let after = requester.stats();
            let fallbacks = if policy == TransportPolicy::Auto && possible.is_none() { 3 } else { 0 };
            assert_eq!(after.rdma_fallbacks - before.rdma_fallbacks, fallbacks);
            if fallbacks > 0 {
                // It asked once, and remembers: one attempt, one connection for the description and the rest.
                assert_eq!(after.connections_dialled - before.connections_dialled, 1);
            }
        }
    }
    let without = Engine::new(with(TransportPolicy::RdmaOnly)).expect_err("there is no device");
    assert!(without.to_string().contains("RdmaOnly"), "{without}");
}

/// Each budget of the source at its limit: one more is refused, goes over TCP where that is allowed, and has no effect.
#[test]
fn budgets_hold_at_their_limits_and_come_back() {
    let (bytes, grants) = (4096, 1);
    let rdma = RdmaConfig { max_grant_bytes: bytes, max_grants: grants, ..RdmaConfig::default() };
    let only = Config { transport: TransportPolicy::RdmaOnly, ..Config::default() };
    let rig = Rig::with(8192, SimConfig::default(), &only, &rdma);
    assert!(run(&rig, Direction::Write, bytes).is_complete(), "at the limit");
    let above = run(&rig, Direction::Write, bytes + 1).failure.expect("one above");
    assert!(matches!(above.error, TransferError::Refused { status: Status::Exhausted }), "{}", above.error);
    assert_eq!(above.effect, RemoteEffect::None);
    assert!(run(&rig, Direction::Write, bytes - 1).is_complete(), "one below");
    rig.end();

    // One pair: a second peer's makes way for the first's, by the requester's own choice.
    let rdma = RdmaConfig { max_connections: 1, ..RdmaConfig::default() };
    let rig = Rig::with(8192, SimConfig::default(), &only, &rdma);
    let second = on(&rig.world, 3, only.clone(), &rdma);
    let served = memory(&second, 64, Permission::RemoteRead);
    let peer = rig.requester.open_segment(second.endpoint(), second.epoch(), LONG).expect("it listens");
    // A QP that is being destroyed still takes the one place.
    let gone = |engine: &Engine| {
        let stats = engine.stats();
        (stats.rdma_idle, stats.rdma_busy, stats.rdma_closing) == (0, 0, 0)
    };
    for _ in 0..3 {
        assert!(run(&rig, Direction::Write, 64).is_complete());
        eventually("the evicted half is gone over there", || gone(&second));
        let request = TransferRequest { remote_address: served.address(), ..rig.request(0, 64) };
        let other = rig.requester.submit_and_wait(&peer, Direction::Read, &[request], LONG).expect("sound");
        assert!(other.is_complete(), "{other:?}");
        eventually("the evicted half is gone over there", || gone(&rig.source));
    }
    // At the source the one place is taken: no effect, and no TCP here.
    assert!(run(&rig, Direction::Write, 64).is_complete());
    let third = on(&rig.world, 4, only.clone(), &RdmaConfig::default());
    let local = memory(&third, 64, Permission::LocalOnly);
    let peer = third.open_segment(rig.source.endpoint(), rig.source.epoch(), LONG).expect("it listens");
    let request = TransferRequest { local_address: local.address(), remote_address: rig.served.address(), length: 64 };
    let refused = third.submit_and_wait(&peer, Direction::Write, &[request], LONG).expect("sound");
    let failure = refused.failure.expect("no place");
    assert!(matches!(failure.error, TransferError::Refused { status: Status::Exhausted }), "{}", failure.error);
    drop((served, local, second, third));
    rig.end();
}

/// E-62, E-66: while a device does not let a QP go, nothing that it may touch is let go, on either side, and the source
/// is not quiet; then all of it comes back by itself.
#[test]
fn nothing_is_let_go_before_its_qp() {
    for windows in [WindowPolicy::Auto, WindowPolicy::Never] {
        for direction in [Direction::Read, Direction::Write] {
            let sim = SimConfig { bulk_bytes_per_second: 100_000, ..SimConfig::default() };
            let config = Config { source_timeout: Duration::from_millis(300), ..Config::default() };
            let rig = Rig::made(1 << 20, sim, &config, &RdmaConfig::default(), windows);
            for host in [1, 2] {
                rig.world.refuse_destroy([10, 0, 0, host], true);
            }
            // 1 MiB takes ten seconds there.
            let batch = rig.requester.allocate_batch(1).expect("room");
            let timeout = Duration::from_millis(300);
            batch.submit(&rig.peer, direction, &[rig.request(0, 1 << 20)], timeout, None).expect("sound");
            eventually("it ends by its deadline although the device is slow", || batch.status().is_finished());
            assert_eq!(batch.task(0).expect("one").state, TaskState::TimedOut);
            let effect = if direction == Direction::Read { RemoteEffect::None } else { RemoteEffect::Unknown };
            assert_eq!(batch.task(0).expect("one").effect, effect);
            eventually("both have begun to bury", || {
                rig.source.stats().rdma_closing == 1 && rig.requester.stats().rdma_closing == 1
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!batch.locally_drained(), "local memory is held while the QP lives");
            let (batch, error) = batch.free().expect_err("it is not drained");
            assert!(matches!(error, BatchError::Busy { .. }), "{error}");
            let there = rig.source.stats();
            assert_eq!((there.source_operations, there.grants, there.grant_bytes), (1, 1, 1 << 20));
            let closing = rig.source.close_source(Duration::ZERO).expect_err("a grant counts as an operation");
            assert_eq!(closing.inside, 1);
            for host in [1, 2] {
                rig.world.refuse_destroy([10, 0, 0, host], false);
            }
            rig.source.close_source(LONG).expect("it comes to rest by itself");
            eventually("the requester's as well", || {
                let here = rig.requester.stats();
                (here.rdma_closing, here.submissions, here.batches) == (0, 0, 1) || here.batches == 0
            });
            assert_eq!(bytes_of(&rig.served), vec![0; 1 << 20], "and nothing was committed");
            drop(batch);
            rig.end();
        }
    }
}

/// A device that does not deregister: the pair goes, the memory stays until it does.
#[test]
fn a_registration_that_cannot_be_given_up_is_kept() {
    let rig = Rig::on(4096, WindowPolicy::Never);
    rig.world.refuse_deregister([10, 0, 0, 2], true);
    let report = run(&rig, Direction::Write, 4096);
    let failure = report.failure.expect("no acknowledgement without a revocation");
    assert_eq!(failure.effect, RemoteEffect::Unknown);
    std::thread::sleep(Duration::from_millis(50));
    let there = rig.source.stats();
    assert_eq!((there.rdma_closing, there.source_operations, there.grants), (1, 1, 1), "kept");
    rig.world.refuse_deregister([10, 0, 0, 2], false);
    eventually("and let go", || rig.source.stats().rdma_closing == 0);
    assert!(run(&rig, Direction::Write, 4096).is_complete());
    rig.end();
}

/// The end of an engine interrupts what is under way on both sides and leaves nothing in the device.
#[test]
fn engines_end_in_the_middle_of_operations() {
    for first in [true, false] {
        let sim = SimConfig { bulk_bytes_per_second: 1_000_000, ..SimConfig::default() };
        let rig = Rig::with(1 << 20, sim, &Config::default(), &RdmaConfig::default());
        let batches: Vec<_> = (0..3)
            .map(|_| {
                let batch = rig.requester.allocate_batch(1).expect("room");
                batch.submit(&rig.peer, Direction::Read, &[rig.request(0, 1 << 20)], LONG, None).expect("sound");
                batch
            })
            .collect();
        eventually("they are under way", || rig.source.stats().grants == 3);
        let Rig { world, source, served, requester, local, peer } = rig;
        let began = std::time::Instant::now();
        if first {
            drop(requester);
            eventually("the source lets go of a peer that has ended", || {
                let s = source.stats();
                (s.grants, s.source_operations, s.rdma_closing, s.rdma_busy) == (0, 0, 0, 0)
            });
            drop(source);
        } else {
            drop(source);
            assert!(batches.iter().all(|batch| batch.wait(LONG)));
            drop(requester);
        }
        assert!(began.elapsed() < Duration::from_secs(8), "after {:?}", began.elapsed());
        assert!(batches.iter().all(|batch| batch.status().is_finished() && batch.locally_drained()));
        drop((batches, peer, served, local));
        world.assert_quiet();
    }
}

/// Ends of slices, sizes of chunks and windows that do not divide each other.
#[test]
fn chunks_and_windows_of_every_shape() {
    for (chunk_bytes, window, reads) in [(4096, 1, 1), (4096, 16, 1), (4097, 3, 16), (8 << 20, 16, 2)] {
        let world = SimWorld::new(SimConfig { latency: US..=US * 20, ..SimConfig::default() });
        let rd_atomic = RdAtomic { initiator: reads, responder: reads };
        let rdma = RdmaConfig { chunk_bytes, window, ..RdmaConfig::default() };
        let host = |n: u8| {
            let fabric = world.host([10, 0, 0, n], HostConfig { rd_atomic, ..HostConfig::default() });
            Engine::with_rdma(Config::default(), &rdma, Arc::new(fabric)).expect("an engine")
        };
        let (source, requester) = (host(2), host(1));
        let served = memory(&source, 200_000, Permission::RemoteReadWrite);
        let local = memory(&requester, 200_000, Permission::LocalOnly);
        let peer = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
        let rig = Rig { world, source, served, requester, local, peer };
        for length in [1, 4095, 4096, 4097, 65_536, 65_537, 199_999] {
            let sent = pattern(usize::try_from(length).expect("small"), 3);
            rig.served.write(0, &sent).expect("in range");
            rig.local.write(0, &vec![0; 200_000]).expect("in range");
            assert!(run(&rig, Direction::Read, length).is_complete());
            assert_eq!(bytes_of(&rig.local)[..sent.len()], sent);
            assert!(bytes_of(&rig.local)[sent.len()..].iter().all(|byte| *byte == 0), "and not one more");
            rig.served.write(0, &vec![0; 200_000]).expect("in range");
            assert!(run(&rig, Direction::Write, length).is_complete());
            assert_eq!(bytes_of(&rig.served)[..sent.len()], sent);
            assert!(bytes_of(&rig.served)[sent.len()..].iter().all(|byte| *byte == 0), "and not one more");
        }
        rig.end();
    }
}

const US: Duration = Duration::from_micros(1);

/// Seeded faults of devices: delays, failing QPs, lost acknowledgements, refused posts, registrations, QPs and routes.
/// While they strike every report is true of the bytes; when they stop everything comes home and works.
#[test]
fn devices_that_fail_at_random_cost_operations_and_nothing_else() {
    for seed in 0..6 {
        println!("seed {seed}");
        let faults = Faults {
            delay: 0.2,
            delay_by: US * 50..=US * 3000,
            late_completion: 0.2,
            late_completion_by: US * 50..=US * 3000,
            spurious_wake: 0.1,
            lost_ack: 0.02,
            qp_error: 0.03,
            create_qp_exhausted: 0.05,
            register_refused: 0.05,
            bind_fails: 0.05,
            post_refused: 0.03,
            connect_slow: 0.1,
            connect_slow_by: US * 500..=US * 5000,
            lost_flush: 0.05,
            event_noise: 0.05,
            ..Faults::none()
        };
        let sim = SimConfig { faults, latency: US..=US * 20, ..SimConfig::seeded(seed) };
        // Small chunks: many work requests, many chances. A lost acknowledgement shows after 7 ms.
        let rdma = RdmaConfig { chunk_bytes: 4096, ack_timeout_code: 8, ..RdmaConfig::default() };
        let config = Config {
            transport: TransportPolicy::RdmaOnly,
            source_timeout: Duration::from_millis(500),
            ..Config::default()
        };
        let windows = if seed % 2 == 0 { WindowPolicy::Auto } else { WindowPolicy::Never };
        let rig = Rig::made(LENGTH, sim, &config, &rdma, windows);
        let (mut complete, mut failed) = (0, 0);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut served = vec![0; LENGTH];
        for round in 0..150_u32 {
            let value = u8::try_from(round % 250 + 1).expect("small");
            let length = random.usize(1..=LENGTH);
            let request = [rig.request(0, length as u64)];
            let timeout = Duration::from_millis(400);
            let submit = |direction| rig.requester.submit_and_wait(&rig.peer, direction, &request, timeout);
            if random.bool() {
                rig.local.write(0, &vec![value; LENGTH]).expect("in range");
                let report = submit(Direction::Write).expect("sound");
                let now = bytes_of(&rig.served);
                let mut written = served.clone();
                written[..length].fill(value);
                match &report.failure {
                    None => assert!(now == written, "seed {seed}, round {round}: acknowledged, and not there"),
                    Some(failure) if failure.effect == RemoteEffect::None => {
                        assert!(now == served, "seed {seed}, round {round}: {failure}");
                    }
                    // The source may still be about to commit: wait for its end.
                    Some(_) => eventually("the source is through", || rig.source.stats().source_operations == 0),
                }
                served = bytes_of(&rig.served);
                assert!(served == now || served == written, "seed {seed}, round {round}: all of it, or nothing");
                failed += u32::from(report.failure.is_some());
                complete += u32::from(report.failure.is_none());
            } else {
                rig.local.write(0, &vec![0xee; LENGTH]).expect("in range");
                let report = submit(Direction::Read).expect("sound");
                let now = bytes_of(&rig.local);
                match &report.failure {
                    None => assert!(now[..length] == served[..length], "seed {seed}, round {round}"),
                    Some(failure) => {
                        assert!(now == vec![0xee; LENGTH], "seed {seed}, round {round}: {failure}");
                        assert_eq!(failure.effect, RemoteEffect::None);
                    }
                }
                assert!(now[length..].iter().all(|byte| *byte == 0xee));
                failed += u32::from(report.failure.is_some());
                complete += u32::from(report.failure.is_none());
            }
        }
        println!("seed {seed}: {complete} completed, {failed} failed; {:?}", rig.world.fault_counts());
        assert!(complete > 20 && failed > 5, "seed {seed}: {complete} completed, {failed} failed: it shows something");
        rig.world.stop_faults();
        assert_idle(&rig.requester, 1);
        assert_idle(&rig.source, 1);
        eventually("a pair works again", || run(&rig, Direction::Write, 64).is_complete());
        rig.end();
    }
}

const LENGTH: usize = 60_000;
