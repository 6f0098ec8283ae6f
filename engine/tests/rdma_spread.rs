//! ET-12: one request over several simulated devices at once. Its bytes, its step in time, its shares; a rail that dies in
//! each phase; every frame cut, lost, repeated, or about something else; and that nothing is left.

mod common;

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use common::{
    LONG, assert_idle, bytes_of, eventually, memory, pattern,
    proxy::{self, By, Fate, REQUEST, Rule, is},
    request_between,
};
use verbs_engine::{
    BatchReport, Config, Direction, Engine, Permission, RailChoice, RdmaConfig, RegisteredMemory, RemoteEffect,
    RemoteSegment, TransferError, TransportPolicy,
};
use verbs_transport::{
    fabric::bulk::WindowPolicy,
    sim::{HostConfig, SimConfig, SimWorld},
};

const BYTES: usize = 3 << 20;

/// Two patterns that differ in every byte.
const OLD: u8 = 1;
const NEW: u8 = 77;

#[derive(Clone, Copy)]
struct Port {
    rate: u64,
    qps: u32,
    windows: WindowPolicy,
}

const QUICK: Port = Port { rate: 0, qps: 4096, windows: WindowPolicy::Auto };

fn slow(rate: u64) -> Port {
    Port { rate, ..QUICK }
}

fn rdma(rail_choice: RailChoice) -> RdmaConfig {
    RdmaConfig { ack_timeout_code: 10, retry_cnt: 1, rail_choice, ..RdmaConfig::default() }
}

/// A source with the device 10.0.n.2 for each of its settings, and a requester with 10.0.n.1.
struct Rig {
    world: SimWorld,
    source: Engine,
    served: RegisteredMemory,
    requester: Engine,
    local: RegisteredMemory,
    peer: RemoteSegment,
}

impl Rig {
    fn new(sources: &[Port], requesters: &[Port], config: &RdmaConfig) -> Self {
        Self::with(sources, requesters, [config, config], Config::default())
    }

    fn with(sources: &[Port], requesters: &[Port], [served_by, asked_by]: [&RdmaConfig; 2], config: Config) -> Self {
        let world = SimWorld::new(SimConfig::default());
        let engine = |ends: &[Port], host: u8, rdma: &RdmaConfig, config: Config| {
            let fabrics = ends.iter().zip(0..).map(|(end, rail)| {
                let config = HostConfig {
                    bulk_bytes_per_second: end.rate,
                    max_qps: end.qps,
                    windows: end.windows,
                    ..HostConfig::default()
                };
                Arc::new(world.host([10, 0, rail, host], config))
            });
            let config = Config { transport: TransportPolicy::RdmaOnly, ..config };
            Engine::with_rdma_devices(config, rdma, fabrics.collect()).expect("an engine")
        };
        let source = engine(sources, 2, served_by, config);
        let requester = engine(requesters, 1, asked_by, Config::default());
        let served = memory(&source, BYTES, Permission::RemoteReadWrite);
        let local = memory(&requester, BYTES, Permission::LocalOnly);
        let peer = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
        Self { world, source, served, requester, local, peer }
    }

    fn run(&self, direction: Direction) -> BatchReport {
        self.run_at(&self.peer, direction, 0, BYTES as u64, LONG)
    }

    fn run_at(
        &self,
        peer: &RemoteSegment,
        direction: Direction,
        offset: u64,
        length: u64,
        timeout: Duration,
    ) -> BatchReport {
        let request = request_between(&self.local, &self.served, offset, length);
        self.requester.submit_and_wait(peer, direction, &[request], timeout).expect("sound")
    }

    fn reset(&self) {
        self.local.write(0, &pattern(BYTES, OLD)).expect("in range");
        self.served.write(0, &pattern(BYTES, NEW)).expect("in range");
    }

    /// What an operation did is what its report says: all of it, or nothing.
    fn check(&self, direction: Direction, report: &BatchReport, what: &str) {
        let (old, new) = (pattern(BYTES, OLD), pattern(BYTES, NEW));
        let (local, served) = (bytes_of(&self.local), bytes_of(&self.served));
        match (direction, &report.failure) {
            (Direction::Read, None) => assert!(local == new, "{what}: a READ brings the source's bytes"),
            (Direction::Read, Some(failure)) => {
                assert_eq!(failure.effect, RemoteEffect::None, "{what}");
                assert!(local == old, "{what}: a READ that failed has changed nothing");
            }
            (Direction::Write, None) => assert!(served == old, "{what}: a WRITE that was acknowledged is there"),
            (Direction::Write, Some(failure)) => {
                assert_ne!(failure.effect, RemoteEffect::Committed, "{what}");
                let untouched = served == new;
                assert!(untouched || failure.effect == RemoteEffect::Unknown, "{what}: {failure}");
                assert!(untouched || served == old, "{what}: all rails, or none");
            }
        }
        assert!(direction == Direction::Write || served == new, "{what}: a READ changes nothing at the source");
    }

    fn moves(&self, direction: Direction) {
        self.reset();
        let report = self.run(direction);
        assert!(report.is_complete(), "{report:?}");
        self.check(direction, &report, "it is complete");
    }

    fn sliced(&self) -> Vec<u64> {
        self.requester.nics().iter().map(|nic| nic.sliced_bytes_completed).collect()
    }

    /// Devices of the requester's that have posted data.
    fn busy(&self) -> usize {
        let hosts = self.world.report().hosts;
        let own = |addr: IpAddr| matches!(addr, IpAddr::V4(addr) if addr.octets()[3] == 1);
        hosts.iter().filter(|host| own(host.addr) && host.outstanding_bulk_wrs > 0).count()
    }

    /// Drops all QPs of a device to ERR; whether there were any.
    fn break_nic(world: &SimWorld, rail: u8, host: u8) -> bool {
        (0..4000).filter(|qpn| world.force_bulk_error([10, 0, rail, host], *qpn)).count() > 0
    }

    /// Both sides have let go of everything but kept pairs, without each other's help.
    fn settle(&self, what: &str) {
        for engine in [&self.requester, &self.source] {
            eventually(what, || {
                let s = engine.stats();
                let held = (s.submissions, s.source_operations, s.grants, s.grant_bytes, s.rdma_parents);
                held == (0, 0, 0, 0, 0) && (s.rdma_connecting, s.rdma_busy, s.rdma_closing) == (0, 0, 0)
            });
        }
    }

    /// The source by way of a proxy.
    fn through(&self, rule: Rule) -> RemoteSegment {
        let armed = Arc::new(AtomicBool::new(false));
        let rule: Rule = {
            let armed = Arc::clone(&armed);
            Arc::new(move |by, kind, bytes| if armed.load(SeqCst) { rule(by, kind, bytes) } else { Fate::Pass })
        };
        let endpoint = proxy::start(self.source.endpoint(), rule);
        let peer = self.requester.open_segment(endpoint, self.source.epoch(), LONG).expect("it listens");
        armed.store(true, SeqCst);
        peer
    }

    fn end(self) {
        self.settle("all is let go");
        let Self { world, source, served, requester, local, peer } = self;
        assert_idle(&requester, 1);
        assert_idle(&source, 1);
        assert!(requester.nics().iter().all(|nic| nic.in_flight_bytes == 0), "{:?}", requester.nics());
        drop((peer, served, local));
        drop(requester);
        drop(source);
        world.assert_quiet();
    }
}

#[test]
fn a_large_request_goes_over_all_devices_at_once() {
    for windows in [WindowPolicy::Auto, WindowPolicy::Never] {
        for count in [2, 4] {
            let ports = vec![Port { windows, ..QUICK }; count];
            let rig = Rig::new(&ports, &ports, &rdma(RailChoice::RoundRobin));
            for round in 0..10 {
                rig.moves(if round % 2 == 0 { Direction::Read } else { Direction::Write });
            }
            let stats = rig.requester.stats();
            assert_eq!((stats.rdma_completed, stats.rdma_sliced, stats.rdma_retries), (10, 10, 0), "{stats:?}");
            assert_eq!((stats.connections_reused, stats.rdma_idle), (9, count as u64), "one set of pairs, {stats:?}");
            let sliced = rig.sliced();
            assert_eq!(sliced.iter().sum::<u64>(), 10 * BYTES as u64);
            assert!(sliced.iter().all(|bytes| bytes.abs_diff(sliced[0]) <= 10 * (128 << 10)), "{sliced:?}");
            rig.end();
        }
    }
}

#[test]
fn whoever_is_small_or_has_one_way_or_does_not_want_to_goes_over_one() {
    let off = RdmaConfig { spread: false, ..rdma(RailChoice::Score) };
    let on = rdma(RailChoice::Score);
    for (sources, requesters, config, length) in [
        (2, 2, &off, BYTES as u64),
        (1, 2, &on, BYTES as u64),
        (2, 1, &on, BYTES as u64),
        (2, 2, &on, 2_047_999),
        (2, 2, &on, 1),
    ] {
        let rig = Rig::new(&vec![QUICK; sources], &vec![QUICK; requesters], config);
        for _ in 0..3 {
            assert!(rig.run_at(&rig.peer, Direction::Read, 0, length, LONG).is_complete());
        }
        let stats = rig.requester.stats();
        assert_eq!((stats.rdma_completed, stats.rdma_sliced, stats.rdma_retries), (3, 0, 0), "{stats:?}");
        rig.end();
    }
    let rig = Rig::new(&[QUICK; 2], &[QUICK; 2], &on);
    for (direction, length) in [(Direction::Read, 2_048_000), (Direction::Write, 999_424)] {
        assert!(rig.run_at(&rig.peer, direction, 0, length, LONG).is_complete());
    }
    assert_eq!(rig.requester.stats().rdma_sliced, 2, "the least that are spread");
    rig.end();
}

#[test]
fn uneven_ends_use_as_many_pairs_as_there_are() {
    for (sources, requesters) in [(2, 4), (4, 2), (3, 4)] {
        let rig = Rig::new(&vec![QUICK; sources], &vec![QUICK; requesters], &rdma(RailChoice::RoundRobin));
        for direction in [Direction::Read, Direction::Write, Direction::Read] {
            rig.moves(direction);
        }
        assert_eq!(rig.requester.stats().rdma_sliced, 3);
        let used = rig.sliced().iter().filter(|bytes| **bytes > 0).count();
        assert_eq!(used, sources.min(requesters));
        rig.end();
    }
}

#[test]
fn shares_follow_speed() {
    let speeds = [slow(64 << 20), slow(16 << 20), slow(64 << 20)];
    let rig = Rig::new(&speeds, &speeds, &rdma(RailChoice::Score));
    rig.moves(Direction::Read);
    let first = rig.sliced();
    for _ in 0..8 {
        rig.moves(Direction::Read);
    }
    let now: Vec<u64> = rig.sliced().iter().zip(first).map(|(now, first)| now - first).collect();
    assert!(now[0] >= 2 * now[1] && now[2] >= 2 * now[1] && now[1] > 0, "{now:?}");
    let nics = rig.requester.nics();
    assert!(nics[0].estimated_bytes_per_second > nics[1].estimated_bytes_per_second, "{nics:?}");
    rig.end();
}

/// 200 requests of any size at any place, byte for byte against a plain copy.
#[test]
fn random_requests_are_what_a_copy_would_be() {
    for (count, seed) in [(2, 11), (4, 12)] {
        let rig = Rig::new(&vec![QUICK; count], &vec![QUICK; count], &rdma(RailChoice::Score));
        let mut random = fastrand::Rng::with_seed(seed);
        let mut noise = || {
            let mut bytes = vec![0; BYTES];
            random.fill(&mut bytes);
            bytes
        };
        let (mut local, mut served) = (noise(), noise());
        rig.local.write(0, &local).expect("in range");
        rig.served.write(0, &served).expect("in range");
        for round in 0..100 {
            let length = random.usize(1..=BYTES);
            let offset = random.usize(0..=BYTES - length);
            let direction = if random.bool() { Direction::Read } else { Direction::Write };
            let report = rig.run_at(&rig.peer, direction, offset as u64, length as u64, LONG);
            assert!(report.is_complete(), "seed {seed}, round {round}: {report:?}");
            let moved = offset..offset + length;
            match direction {
                Direction::Read => local[moved.clone()].copy_from_slice(&served[moved.clone()]),
                Direction::Write => served[moved.clone()].copy_from_slice(&local[moved.clone()]),
            }
            assert!(bytes_of(&rig.local) == local && bytes_of(&rig.served) == served, "seed {seed}, round {round}");
            // Something to see the next time.
            let at = random.usize(0..BYTES);
            (local[at], served[BYTES - 1 - at]) = (random.u8(..), random.u8(..));
            rig.local.write(at as u64, &local[at..=at]).expect("in range");
            let end = BYTES - 1 - at;
            rig.served.write(end as u64, &served[end..=end]).expect("in range");
        }
        let sliced = rig.requester.stats().rdma_sliced;
        assert!((20..100).contains(&sliced), "seed {seed}: {sliced} were spread");
        rig.end();
    }
}

/// E-17, E-59: all rails of a request are one step in time, at both ends.
#[test]
fn a_request_is_one_moment_over_all_rails() {
    let rig = Rig::new(&[QUICK; 4], &[QUICK; 4], &rdma(RailChoice::RoundRobin));
    let is_even = |memory: &RegisteredMemory| {
        memory.update(0, BYTES as u64, |bytes| bytes.iter().all(|byte| *byte == bytes[0])).expect("in range")
    };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in (0..=250_u8).cycle() {
                rig.served.update(0, BYTES as u64, |bytes| bytes.fill(value)).expect("in range");
                if over.load(SeqCst) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for _ in 0..15 {
            let report = rig.run(Direction::Read);
            assert!(report.is_complete() && is_even(&rig.local), "{report:?}");
        }
        over.store(true, SeqCst);
    });
    over.store(false, SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(SeqCst) {
                assert!(is_even(&rig.served));
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for value in 0..15 {
            rig.local.update(0, BYTES as u64, |bytes| bytes.fill(value)).expect("in range");
            assert!(rig.run(Direction::Write).is_complete());
        }
        over.store(true, SeqCst);
    });
    assert_eq!(rig.requester.stats().rdma_sliced, 30);
    rig.end();
}

#[test]
fn many_at_once_share_the_devices_and_give_all_back() {
    let rig = Rig::new(&[QUICK; 4], &[QUICK; 4], &rdma(RailChoice::Score));
    rig.reset();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let rig = &rig;
            scope.spawn(move || {
                for round in 0..6 {
                    let direction = if (thread + round) % 2 == 0 { Direction::Read } else { Direction::Write };
                    let report = rig.run(direction);
                    assert!(report.is_complete(), "{report:?}");
                }
            });
        }
    });
    let stats = rig.requester.stats();
    assert_eq!(stats.rdma_completed, 24);
    assert!(stats.rdma_sliced > 12, "{stats:?}");
    rig.end();
}

/// A READ goes again over what is left, together if that are two or more. A WRITE does not: what it did, nobody knows; but
/// nothing of it is committed, not even of the rails that are through.
#[test]
fn a_rail_that_dies_under_its_data_hands_the_read_on_and_not_the_write() {
    for (count, host) in [(2, 1), (4, 1), (4, 2)] {
        // More than half a second for a rail of two.
        let ports = vec![slow((12 << 20) / count as u64); count];
        let rig = Rig::new(&ports, &ports, &rdma(RailChoice::Score));
        for direction in [Direction::Read, Direction::Write] {
            rig.reset();
            let before = rig.requester.stats();
            let batch = rig.requester.allocate_batch(1).expect("room");
            let request = request_between(&rig.local, &rig.served, 0, BYTES as u64);
            batch.submit(&rig.peer, direction, &[request], LONG, None).expect("sound");
            eventually("all rails have posted", || rig.busy() == count);
            assert_eq!(rig.source.stats().rdma_parents, 1);
            assert!(Rig::break_nic(&rig.world, 1, host));
            assert!(batch.wait(LONG));
            let task = batch.task(0).expect("one");
            let after = rig.requester.stats();
            let retries = after.rdma_retries - before.rdma_retries;
            if direction == Direction::Read {
                assert_eq!((task.bytes, retries), (BYTES as u64, 1), "{task:?}");
                assert_eq!(after.rdma_sliced - before.rdma_sliced, u64::from(count > 2), "together, or alone");
                assert!(bytes_of(&rig.local) == bytes_of(&rig.served));
            } else {
                assert_eq!((task.effect, retries), (RemoteEffect::Unknown, 0), "{task:?}");
                assert!(matches!(task.error, Some(TransferError::Device { .. })), "{task:?}");
                eventually("it is over at the source, too", || rig.source.stats().rdma_parents == 0);
                assert!(bytes_of(&rig.served) == pattern(BYTES, NEW), "nothing is committed");
            }
            eventually("its memory is let go", || batch.locally_drained());
            rig.settle("nothing is granted");
        }
        rig.end();
    }
}

/// The QPs of one device, of either side, go when a frame comes by: whichever it is.
#[test]
fn a_rail_that_dies_in_any_phase_breaks_no_promise() {
    let rig = Rig::new(&[QUICK; 3], &[QUICK; 3], &rdma(RailChoice::Score));
    for direction in [Direction::Read, Direction::Write] {
        for (by, kind) in COURSE {
            for host in [1, 2] {
                let what = format!("{direction:?}, {by:?} {kind}, host {host}");
                rig.reset();
                let (world, done) = (rig.world.clone(), AtomicBool::new(false));
                let peer = rig.through(Arc::new(move |found, frame, _| {
                    if is((by, kind), found, frame) && !done.swap(true, SeqCst) {
                        Rig::break_nic(&world, 1, host);
                    }
                    Fate::Pass
                }));
                let report = rig.run_at(&peer, direction, 0, BYTES as u64, LONG);
                rig.check(direction, &report, &what);
                rig.settle(&what);
                if let Some(failure) = &report.failure {
                    // READs find another way until the source was told that they are done.
                    assert!(direction == Direction::Write || kind >= 23, "{what}: {failure}");
                    let harmless = failure.effect == RemoteEffect::None;
                    assert!(!harmless || direction == Direction::Read, "{what}: nothing was posted, and yet {failure}");
                }
                let again = rig.run_at(&peer, direction, 0, BYTES as u64, LONG);
                assert!(again.is_complete(), "{what}: the next one: {again:?}");
            }
        }
    }
    rig.end();
}

/// Of each kind of frame of an operation over several new pairs one, in order.
const COURSE: [(By, u8); 11] = [
    (By::Requester, REQUEST),
    (By::Source, 0),
    (By::Requester, 26),
    (By::Source, 27),
    (By::Requester, 19),
    (By::Source, 20),
    (By::Requester, 21),
    (By::Source, 22),
    (By::Requester, 23),
    (By::Source, 24),
    (By::Requester, 25),
];

/// How many there are of it, over two rails.
fn times(kind: u8) -> u32 {
    if (19..=23).contains(&kind) { 2 } else { 1 }
}

/// Does that to the frame of that kind that comes as the `nth`, from 0, and nothing else.
fn at(frame: (By, u8), nth: u32, fate: impl Fn(&[u8]) -> Fate + Send + Sync + 'static) -> Rule {
    let count = AtomicU32::new(0);
    Arc::new(move |by, kind, bytes| {
        let hit = is(frame, by, kind) && count.fetch_add(1, SeqCst) == nth;
        if hit { fate(bytes) } else { Fate::Pass }
    })
}

/// Short patience, so that what is lost is noticed soon.
fn short() -> (Rig, Duration) {
    let config = Config { source_timeout: Duration::from_millis(700), ..Config::default() };
    let rdma = rdma(RailChoice::RoundRobin);
    (Rig::with(&[QUICK; 2], &[QUICK; 2], [&rdma, &rdma], config), Duration::from_millis(600))
}

#[test]
fn every_frame_cut_lost_silenced_or_repeated() {
    let (rig, brief) = short();
    for direction in [Direction::Read, Direction::Write] {
        for frame in COURSE {
            for nth in 0..times(frame.1) {
                for fate in [Fate::Cut, Fate::Lost, Fate::Silence, Fate::Twice] {
                    let what = format!("{direction:?}, {frame:?} {nth}, {fate:?}");
                    rig.reset();
                    let peer = rig.through(at(frame, nth, {
                        let fate = fate.clone();
                        move |_| fate.clone()
                    }));
                    let timeout = if matches!(fate, Fate::Lost | Fate::Silence) { brief } else { LONG };
                    let report = rig.run_at(&peer, direction, 0, BYTES as u64, timeout);
                    rig.check(direction, &report, &what);
                    rig.settle(&what);
                    if fate != Fate::Twice {
                        assert_eq!(report.is_complete(), frame.1 == 25, "{what}: {report:?}");
                    }
                    // A repeat is noticed in the place of the next frame, which may be behind the grants.
                    let before_grants = frame.1 < 22 || frame.1 >= 26;
                    if before_grants && (fate, frame.1, nth) != (Fate::Twice, 21, 1) {
                        let effect = report.failure.map_or(RemoteEffect::None, |failure| failure.effect);
                        assert_eq!(effect, RemoteEffect::None, "{what}: before any grant");
                    }
                    let again = rig.run(direction);
                    assert!(again.is_complete(), "{what}: the next one: {again:?}");
                }
            }
        }
    }
    rig.end();
}

#[test]
fn every_name_of_every_frame_changed() {
    let (rig, _) = short();
    // Where each name begins: epochs, protection domains, connections, request, digest, generation.
    let names = [12, 28, 44, 60, 76, 92, 108, 116, 132];
    for direction in [Direction::Read, Direction::Write] {
        for frame in &COURSE[2..] {
            for nth in 0..times(frame.1) {
                for byte in names {
                    let what = format!("{direction:?}, {frame:?} {nth}, byte {byte}");
                    rig.reset();
                    let peer = rig.through(at(*frame, nth, move |bytes| {
                        let mut bytes = bytes.to_vec();
                        bytes[byte] ^= 0x40;
                        Fate::Changed(bytes)
                    }));
                    let report = rig.run_at(&peer, direction, 0, BYTES as u64, LONG);
                    rig.check(direction, &report, &what);
                    assert_eq!(report.is_complete(), frame.1 == 25, "{what}: {report:?}");
                }
            }
        }
    }
    rig.settle("all is let go");
    assert!(rig.run(Direction::Read).is_complete());
    rig.end();
}

/// A wrong byte in the request, the plan or its answer: never a panic, never wrong bytes, never a grant for something
/// else than what was asked.
#[test]
fn every_byte_of_the_plan_and_its_answer_flipped() {
    let (rig, brief) = short();
    // The names were changed one by one; of the rest each byte that is used, and some of those that are not.
    let used = |kind: u8, at: &usize| match kind {
        26 => (*at < 12 || *at >= 140) && (*at < 148 + 2 * 112 || at % 97 == 0),
        27 => (*at < 12 || *at >= 140) && (*at < 148 + 2 * 24 || at % 97 == 0),
        _ => true,
    };
    for (frame, length) in [((By::Requester, REQUEST), 152), ((By::Requester, 26), 1940), ((By::Source, 27), 532)] {
        for at_byte in (0..length).filter(|at| used(frame.1, at)) {
            let direction = if at_byte % 2 == 0 { Direction::Read } else { Direction::Write };
            let what = format!("{direction:?}, {frame:?}, byte {at_byte}");
            rig.reset();
            let peer = rig.through(at(frame, 0, move |bytes| {
                assert_eq!(bytes.len(), length, "as it is documented");
                let mut bytes = bytes.to_vec();
                bytes[at_byte] ^= 0x01;
                Fate::Changed(bytes)
            }));
            let report = rig.run_at(&peer, direction, 0, BYTES as u64, brief);
            rig.check(direction, &report, &what);
            assert!(!report.is_complete(), "{what}: the digest, if nothing else, differs");
        }
    }
    rig.settle("all is let go");
    assert!(rig.run(Direction::Write).is_complete());
    rig.end();
}

/// The second operation over kept pairs: its frames lost, cut, and repeated.
#[test]
fn every_frame_of_a_reuse() {
    let (rig, brief) = short();
    for direction in [Direction::Read, Direction::Write] {
        for frame in [COURSE[0], COURSE[2], COURSE[3], COURSE[7], COURSE[8], COURSE[9], COURSE[10]] {
            for fate in [Fate::Cut, Fate::Silence, Fate::Twice] {
                let what = format!("reuse, {direction:?}, {frame:?}, {fate:?}");
                let peer = rig.through(at(frame, times(frame.1), {
                    let fate = fate.clone();
                    move |_| fate.clone()
                }));
                let first = rig.run_at(&peer, direction, 0, BYTES as u64, LONG);
                assert!(first.is_complete(), "{what}: the first: {first:?}");
                eventually("the source has them back", || rig.source.stats().rdma_idle >= 2);
                let before = rig.requester.stats().connections_reused;
                rig.reset();
                let timeout = if fate == Fate::Silence { brief } else { LONG };
                let report = rig.run_at(&peer, direction, 0, BYTES as u64, timeout);
                assert_eq!(rig.requester.stats().connections_reused, before + 1, "{what}");
                rig.check(direction, &report, &what);
                rig.settle(&what);
                assert!(fate == Fate::Twice || report.is_complete() == (frame.1 == 25), "{what}: {report:?}");
            }
        }
    }
    rig.end();
}

/// The source has lost its half of the pairs: status 12, new ones, and nothing has happened.
#[test]
fn pairs_that_the_source_has_lost_are_made_anew() {
    let rig = Rig::new(&[QUICK; 2], &[QUICK; 2], &rdma(RailChoice::RoundRobin));
    rig.moves(Direction::Write);
    eventually("the source has them back", || rig.source.stats().rdma_idle == 2);
    assert!(Rig::break_nic(&rig.world, 1, 2));
    rig.moves(Direction::Read);
    let stats = rig.requester.stats();
    assert_eq!((stats.rdma_sliced, stats.rdma_retries, stats.requests_failed), (2, 0, 0), "{stats:?}");
    assert_eq!((stats.connections_reused, stats.connections_dialled), (1, 3), "the description, and twice all pairs");
    rig.end();
}

/// What does not go over several goes over one, before anything could have happened.
#[test]
fn a_plan_that_is_not_admitted_goes_over_one() {
    let broken = Port { qps: 0, ..QUICK };
    let (usual, few_grants) = (rdma(RailChoice::Score), RdmaConfig { max_grants: 2, ..rdma(RailChoice::Score) });
    for (sources, requesters, config, narrow) in [
        // All or none: three rails and two grants.
        (vec![QUICK; 3], vec![QUICK; 3], &few_grants, true),
        // A device of the source's that makes no QPs: it refuses, and does not say which.
        (vec![QUICK, broken, QUICK], vec![QUICK; 3], &usual, true),
        // One of the requester's: that is known, and the others carry it.
        (vec![QUICK; 3], vec![QUICK, broken, QUICK], &usual, false),
    ] {
        let rig = Rig::with(&sources, &requesters, [config, &usual], Config::default());
        for direction in [Direction::Write, Direction::Read, Direction::Write] {
            rig.moves(direction);
        }
        let stats = rig.requester.stats();
        assert_eq!((stats.rdma_completed, stats.requests_failed), (3, 0));
        assert!(stats.rdma_retries >= 1, "{stats:?}");
        assert_eq!(stats.rdma_sliced, if narrow { 0 } else { 3 }, "{stats:?}");
        rig.end();
    }
}

/// E-21, E-85: a request is inside, with its whole range, until its last rail is.
#[test]
fn the_source_is_quiet_only_when_every_rail_is() {
    let rig = Rig::new(&[QUICK, slow(1 << 20)], &[QUICK, slow(1 << 20)], &rdma(RailChoice::RoundRobin));
    rig.reset();
    let batch = rig.requester.allocate_batch(1).expect("room");
    let request = request_between(&rig.local, &rig.served, 0, BYTES as u64);
    batch.submit(&rig.peer, Direction::Read, &[request], LONG, None).expect("sound");
    eventually("one rail is through, the other is not", || rig.busy() == 1 && rig.source.stats().rdma_parents == 1);
    assert_eq!(rig.source.stats().grant_bytes, BYTES as u64, "charged as a whole");
    assert!(rig.source.close_source(Duration::ZERO).is_err(), "one is inside");
    assert_eq!(rig.source.unregister_memory(&rig.served), Ok(true));
    assert_eq!(rig.source.stats().registrations, 1, "it holds its range");
    assert!(batch.wait(LONG));
    assert_eq!(batch.task(0).expect("one").bytes, BYTES as u64);
    assert!(bytes_of(&rig.local) == pattern(BYTES, NEW));
    rig.source.close_source(LONG).expect("it has left");
    drop(batch);
    rig.end();
}
