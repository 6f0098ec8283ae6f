//! ET-12: engines with several simulated devices each: who carries what, what happens when a pair of devices fails, and
//! that nothing is left.

mod common;

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use common::{LONG, assert_idle, bytes_of, eventually, memory, pattern, request_between};
use verbs_engine::{
    BatchReport, Config, DeviceLink, Direction, Engine, Permission, RailChoice, RdmaConfig, RegisteredMemory,
    RemoteEffect, RemoteSegment, StartError, StartRdmaError, Status, TransferError, TransferRequest, TransportPolicy,
};
use verbs_transport::sim::{Faults, HostConfig, SimConfig, SimWorld};

/// A source with a device 10.0.n.2 for each of its settings, and a requester with 10.0.n.1.
struct Rig {
    world: SimWorld,
    source: Engine,
    served: RegisteredMemory,
    requester: Engine,
    local: RegisteredMemory,
    peer: RemoteSegment,
}

const BYTES: usize = 1 << 20;

/// Any number of bytes at once.
const QUICK: Port = Port { rate: 0, qps: 4096 };

/// What a test sets of a device.
#[derive(Clone, Copy)]
struct Port {
    rate: u64,
    qps: u32,
}

fn slow(rate: u64) -> Port {
    Port { rate, ..QUICK }
}

/// Peers that do not answer are noticed at once. Each request goes over one pair: `rdma_spread` is about several.
fn rdma(rail_choice: RailChoice) -> RdmaConfig {
    RdmaConfig { ack_timeout_code: 10, retry_cnt: 1, rail_choice, spread: false, ..RdmaConfig::default() }
}

impl Rig {
    fn new(sources: &[Port], requesters: &[Port], rdma: &RdmaConfig) -> Self {
        Self::within(SimConfig::default(), sources, requesters, rdma)
    }

    fn within(world: SimConfig, sources: &[Port], requesters: &[Port], rdma: &RdmaConfig) -> Self {
        let world = SimWorld::new(world);
        let engine = |ends: &[Port], host: u8| {
            let fabrics = ends.iter().zip(0..).map(|(end, rail)| {
                let config = HostConfig { bulk_bytes_per_second: end.rate, max_qps: end.qps, ..HostConfig::default() };
                Arc::new(world.host([10, 0, rail, host], config))
            });
            let config = Config { transport: TransportPolicy::RdmaOnly, ..common::serving_direct() };
            Engine::with_rdma_devices(config, rdma, fabrics.collect()).expect("an engine")
        };
        let (source, requester) = (engine(sources, 2), engine(requesters, 1));
        let served = memory(&source, BYTES, Permission::RemoteReadWrite);
        let local = memory(&requester, BYTES, Permission::LocalOnly);
        let peer = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
        Self { world, source, served, requester, local, peer }
    }

    fn request(&self, offset: u64, length: u64) -> TransferRequest {
        request_between(&self.local, &self.served, offset, length)
    }

    fn run(&self, direction: Direction, length: u64) -> BatchReport {
        self.requester.submit_and_wait(&self.peer, direction, &[self.request(0, length)], LONG).expect("sound")
    }

    /// Moves bytes of its own, and looks at them.
    fn moves(&self, direction: Direction, seed: u8) {
        let (from, to) = match direction {
            Direction::Read => (&self.served, &self.local),
            Direction::Write => (&self.local, &self.served),
        };
        let bytes = pattern(BYTES, seed);
        from.write(0, &bytes).expect("in range");
        let report = self.run(direction, BYTES as u64);
        assert!(report.is_complete(), "{report:?}");
        assert_eq!(bytes_of(to), bytes);
    }

    fn requests_by_nic(&self) -> Vec<u64> {
        self.requester.nics().iter().map(|nic| nic.requests_completed).collect()
    }

    /// Which of the requester's devices has posted data that is under way.
    fn busy(&self) -> usize {
        let posted = |nic: usize| {
            let address = [10, 0, u8::try_from(nic).expect("small"), 1];
            let hosts = self.world.report().hosts;
            hosts.iter().any(|host| host.addr == IpAddr::from(address) && host.outstanding_bulk_wrs > 0)
        };
        let nics = self.requester.nics();
        eventually("one has posted", || (0..nics.len()).any(posted));
        let busy: Vec<_> = (0..nics.len()).filter(|nic| posted(*nic)).collect();
        assert_eq!(busy.len(), 1, "one only");
        assert!(self.requester.nics()[busy[0]].in_flight_bytes > 0);
        busy[0]
    }

    /// Drops all QPs of one of the requester's devices to ERR.
    fn break_nic(&self, nic: usize) {
        let address = [10, 0, u8::try_from(nic).expect("small"), 1];
        let broken = (0..4000).filter(|qpn| self.world.force_bulk_error(address, *qpn)).count();
        assert!(broken > 0);
    }

    fn cut(&self, pairs: &[(u8, u8)]) {
        for (own, peer) in pairs {
            self.world.cut([10, 0, *own, 1], [10, 0, *peer, 2]);
        }
    }

    fn heal(&self, pairs: &[(u8, u8)]) {
        for (own, peer) in pairs {
            self.world.heal([10, 0, *own, 1], [10, 0, *peer, 2]);
        }
    }

    fn end(self) {
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

const ALL: [(u8, u8); 4] = [(0, 0), (0, 1), (1, 0), (1, 1)];

#[test]
fn partners_carry_requests_in_turn_and_each_pair_is_kept() {
    let rig = Rig::new(&[QUICK; 3], &[QUICK; 3], &rdma(RailChoice::RoundRobin));
    for seed in 0..30 {
        rig.moves(if seed % 2 == 0 { Direction::Read } else { Direction::Write }, seed);
    }
    assert_eq!(rig.requests_by_nic(), [10, 10, 10]);
    let stats = rig.requester.stats();
    assert_eq!((stats.rdma_idle, stats.connections_reused, stats.rdma_retries), (3, 27, 0), "three pairs, {stats:?}");
    let nics = rig.requester.nics();
    assert!(nics.iter().all(|nic| nic.is_up && nic.bytes_completed == 10 << 20), "{nics:?}");
    assert!(rig.source.nics().iter().all(|nic| nic.requests_completed == 0), "peers choose, not the source");
    rig.end();
}

/// E-15: the devices of a source, in its own order, with what its host says of them.
#[test]
fn a_segment_tells_the_devices_of_its_source() {
    let world = SimWorld::new(SimConfig::default());
    let host =
        |rail: u8, numa_node| Arc::new(world.host([10, 0, rail, 2], HostConfig { numa_node, ..HostConfig::default() }));
    let fabrics = vec![host(0, Some(3)), host(1, None)];
    let source = Engine::with_rdma_devices(Config::default(), &RdmaConfig::default(), fabrics).expect("an engine");
    let requester = Engine::new(Config::default()).expect("an engine");
    let segment = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
    let devices = segment.devices();
    let told: Vec<_> = devices.iter().map(|device| (device.port, device.link, device.gid, device.numa_node)).collect();
    let gid = |rail: u8| std::net::Ipv4Addr::new(10, 0, rail, 2).to_ipv6_mapped();
    let ethernet = DeviceLink::Ethernet;
    assert_eq!(told, [(1, ethernet, gid(0), Some(3)), (1, ethernet, gid(1), None)]);
    assert!(devices[0].name.starts_with("sim") && devices[0].name != devices[1].name, "{devices:?}");
    drop((segment, requester, source));
    world.assert_quiet();
}

#[test]
fn whoever_has_more_devices_uses_them_all() {
    for (sources, requesters) in [(1, 3), (3, 1)] {
        let sources = vec![QUICK; sources];
        let requesters = vec![QUICK; requesters];
        let rig = Rig::new(&sources, &requesters, &rdma(RailChoice::RoundRobin));
        for seed in 0..12 {
            rig.moves(Direction::Write, seed);
        }
        let each = 12 / requesters.len() as u64;
        assert_eq!(rig.requests_by_nic(), vec![each; requesters.len()]);
        rig.end();
    }
}

/// Four times as fast: most of the bytes, but never all.
#[test]
fn shares_follow_speed() {
    let speeds = [slow(32 << 20), slow(8 << 20)];
    let rig = Rig::new(&speeds, &speeds, &rdma(RailChoice::Score));
    std::thread::scope(|scope| {
        for _ in 0..5 {
            scope.spawn(|| (0..12).for_each(|_| assert!(rig.run(Direction::Read, BYTES as u64).is_complete())));
        }
    });
    let nics = rig.requester.nics();
    let [fast, slow] = &nics[..] else { panic!("two devices") };
    assert_eq!(fast.requests_completed + slow.requests_completed, 60);
    assert!(slow.requests_completed >= 1 && fast.requests_completed >= 2 * slow.requests_completed, "{nics:?}");
    assert!(fast.estimated_bytes_per_second > slow.estimated_bytes_per_second, "{nics:?}");
    rig.end();
}

/// A READ may be done again elsewhere. A WRITE that has begun may not: what it did, nobody knows.
#[test]
fn a_rail_that_dies_in_the_middle_hands_its_read_on_and_not_its_write() {
    // Almost a second each.
    let rig = Rig::new(&[slow(1 << 20); 2], &[slow(1 << 20); 2], &rdma(RailChoice::Score));
    let bytes = pattern(BYTES, 3);
    rig.served.write(0, &bytes).expect("in range");
    for (direction, complete) in [(Direction::Read, true), (Direction::Write, false)] {
        let before = rig.requester.stats();
        let batch = rig.requester.allocate_batch(1).expect("room");
        batch.submit(&rig.peer, direction, &[rig.request(0, BYTES as u64)], LONG, None).expect("sound");
        let nic = rig.busy();
        rig.break_nic(nic);
        assert!(batch.wait(LONG));
        let task = batch.task(0).expect("one");
        let stats = rig.requester.stats();
        assert_eq!(bytes_of(&rig.local), bytes, "what was read, and stays");
        if complete {
            assert_eq!((task.bytes, stats.rdma_retries - before.rdma_retries), (BYTES as u64, 1), "{task:?}");
            assert_eq!(rig.requester.nics()[1 - nic].requests_completed, 1, "over the other");
            rig.local.write(0, &bytes).expect("in range");
        } else {
            assert_eq!((task.effect, stats.rdma_retries - before.rdma_retries), (RemoteEffect::Unknown, 0), "{task:?}");
            assert!(matches!(task.error, Some(TransferError::Device { .. })), "{task:?}");
        }
        eventually("its memory is let go", || batch.locally_drained());
        eventually("nothing is granted", || rig.source.stats().grants == 0);
    }
    assert_eq!(bytes_of(&rig.served), bytes, "a WRITE without its receipt is not committed");
    rig.end();
}

/// A direct READ waits until the dead rail's device has let go of its target, and goes on over the other.
#[test]
fn a_direct_read_goes_on_over_the_next_rail() {
    let rig = Rig::new(&[slow(1 << 20); 2], &[slow(1 << 20); 2], &rdma(RailChoice::Score));
    let bytes = pattern(BYTES, 3);
    rig.served.write(0, &bytes).expect("in range");
    let batch = rig.requester.allocate_batch(1).expect("room");
    let request = [rig.request(0, BYTES as u64)];
    batch.submit(&rig.peer, Direction::Read.direct(), &request, LONG, None).expect("sound");
    let nic = rig.busy();
    rig.break_nic(nic);
    assert!(batch.wait(LONG));
    let task = batch.task(0).expect("one");
    assert_eq!((task.bytes, rig.requester.stats().rdma_retries), (BYTES as u64, 1), "{task:?}");
    assert!(!task.local_changed && task.error.is_none(), "{task:?}");
    assert_eq!(bytes_of(&rig.local), bytes);
    drop(batch);
    rig.end();
}

/// Nothing can have happened yet: then a WRITE goes on, too.
#[test]
fn a_device_that_makes_no_qps_is_passed_over() {
    let broken = Port { qps: 0, ..QUICK };
    for (sources, requesters) in [([QUICK; 2], [broken, QUICK]), ([broken, QUICK], [QUICK; 2])] {
        let rig = Rig::new(&sources, &requesters, &rdma(RailChoice::RoundRobin));
        for seed in 0..12 {
            rig.moves(Direction::Write, seed);
        }
        let stats = rig.requester.stats();
        assert_eq!((stats.rdma_completed, stats.requests_failed), (12, 0));
        assert!(stats.rdma_retries >= 3 && stats.rdma_resting >= 1, "{stats:?}");
        rig.end();
    }
}

/// Three errors in ten seconds.
#[test]
fn a_pair_that_fails_rests_and_the_others_carry_all() {
    let rig = Rig::new(&[QUICK; 2], &[QUICK; 2], &rdma(RailChoice::RoundRobin));
    rig.cut(&[(0, 0)]);
    let began = Instant::now();
    let mut seed = 0;
    while rig.requester.stats().rdma_resting == 0 {
        rig.moves(Direction::Read, seed);
        seed += 1;
        assert!(seed < 100, "every other request meets the pair: three of them, unless ten seconds pass meanwhile");
    }
    let retries = rig.requester.stats().rdma_retries;
    assert!(retries >= 3);
    rig.heal(&[(0, 0)]);
    let before = rig.requests_by_nic();
    for seed in 0..10 {
        rig.moves(Direction::Write, seed);
    }
    let after = rig.requests_by_nic();
    if began.elapsed() < Duration::from_secs(25) {
        assert_eq!((after[0] - before[0], after[1] - before[1]), (0, 10), "it rests although it would work");
        assert_eq!((rig.requester.stats().rdma_retries, rig.requester.stats().rdma_resting), (retries, 1));
    }
    rig.end();
}

/// When all rest, one is tried all the same; what succeeds rests no more.
#[test]
fn success_ends_a_rest() {
    let rig = Rig::new(&[QUICK; 2], &[QUICK; 2], &rdma(RailChoice::Score));
    rig.moves(Direction::Read, 1);
    rig.cut(&ALL);
    let began = Instant::now();
    for round in 1..=3 {
        let report = rig.run(Direction::Read, BYTES as u64);
        let failure = report.failure.expect("there is no way");
        let devices = matches!(
            failure.error,
            TransferError::Device { .. } | TransferError::Refused { status: Status::BackendError }
        );
        assert!(devices, "{failure:?}");
        assert_eq!(failure.effect, RemoteEffect::None);
        assert_eq!(rig.requester.stats().rdma_retries, 3 * round, "each pair once");
    }
    // On a host that is slow enough the errors are too far apart.
    let soon = |bound| began.elapsed() < Duration::from_secs(bound);
    if soon(9) {
        assert_eq!(rig.requester.stats().rdma_resting, 4);
    }
    rig.heal(&ALL);
    rig.moves(Direction::Write, 2);
    if soon(9) {
        assert_eq!(rig.requester.stats().rdma_resting, 3);
    }
    rig.end();
}

#[test]
fn a_port_that_is_down_is_neither_taken_nor_offered() {
    let rig = Rig::new(&[QUICK; 2], &[QUICK; 2], &rdma(RailChoice::RoundRobin));
    rig.world.port_down([10, 0, 0, 1]);
    eventually("it is told", || !rig.requester.nics()[0].is_up);
    for seed in 0..6 {
        rig.moves(Direction::Write, seed);
    }
    assert_eq!((rig.requests_by_nic(), rig.requester.stats().rdma_retries), (vec![0, 6], 0));
    rig.world.port_up([10, 0, 0, 1]);
    eventually("it is told", || rig.requester.nics()[0].is_up);
    for seed in 0..6 {
        rig.moves(Direction::Read, seed);
    }
    assert_eq!(rig.requests_by_nic(), [3, 9]);
    // One of the source's: pairs that are known still name it, and READs go on from it.
    rig.world.port_down([10, 0, 1, 2]);
    eventually("it is told", || !rig.source.nics()[1].is_up);
    for seed in 0..6 {
        rig.moves(Direction::Read, seed);
    }
    rig.end();
}

#[test]
fn an_engine_takes_one_to_sixteen_devices() {
    let world = SimWorld::new(SimConfig::default());
    let start = |count: u8| {
        let fabrics = (0..count).map(|rail| Arc::new(world.host([10, 1, rail, 1], HostConfig::default())));
        Engine::with_rdma_devices(Config::default(), &RdmaConfig::default(), fabrics.collect())
    };
    for count in [0, 17] {
        let error = start(count).expect_err("out of range");
        assert!(
            matches!(error, StartError::Rdma(StartRdmaError::Devices { found }) if found == usize::from(count)),
            "{error}"
        );
        assert!(error.to_string().contains("1 to 16"), "{error}");
    }
    for count in [1, 16] {
        assert_eq!(start(count).expect("an engine").nics().len(), usize::from(count));
    }
    // The last does not start; those before it end.
    let fabrics: Vec<_> = (0..4).map(|rail| Arc::new(world.host([10, 2, rail, 1], HostConfig::default()))).collect();
    world.kill_host([10, 2, 3, 1]);
    let error = Engine::with_rdma_devices(Config::default(), &RdmaConfig::default(), fabrics).expect_err("it is gone");
    assert!(matches!(error, StartError::Rdma(StartRdmaError::Open(_))), "{error}");
    world.assert_quiet();
}

/// E-83: a device that hangs without a word holds its request up for `stall_deadline`, not for the caller's; the next pair
/// carries it.
#[test]
fn a_pair_that_hangs_is_given_up_and_the_next_one_carries_the_request() {
    let world = SimConfig { faults: Faults { port_down_hangs: 1.0, ..Faults::none() }, ..SimConfig::default() };
    let stall_deadline = Duration::from_millis(300);
    let config = RdmaConfig { stall_deadline, ..rdma(RailChoice::Score) };
    let rig = Rig::within(world, &[slow(2 << 20); 2], &[slow(2 << 20); 2], &config);
    let bytes = pattern(BYTES, 7);
    rig.served.write(0, &bytes).expect("in range");
    let began = Instant::now();
    let hung = std::thread::scope(|scope| {
        let reader = scope.spawn(|| rig.run(Direction::Read, BYTES as u64));
        let hung = rig.busy();
        rig.world.port_down([10, 0, u8::try_from(hung).expect("small"), 1]);
        let report = reader.join().expect("no panic");
        assert!(report.is_complete(), "{report:?}");
        hung
    });
    assert!(began.elapsed() < LONG / 4, "{:?}", began.elapsed());
    assert_eq!(bytes_of(&rig.local), bytes);
    assert_eq!(rig.requester.stats().rdma_retries, 1);
    assert_eq!(rig.requests_by_nic()[hung], 0, "the other one carried it");
    rig.world.port_up([10, 0, u8::try_from(hung).expect("small"), 1]);
    rig.end();
}
