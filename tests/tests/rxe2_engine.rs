//! Engines on two hosts over their RDMA devices: bytes are whole in both profiles, also over a network that loses frames, and
//! an operation ends by its deadline when the path is cut.

#![allow(clippy::duplicate_mod, reason = "each suite has what they share as its own")]

#[path = "../../engine/tests/common/mod.rs"]
mod common;

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use common::{LONG, bytes_of, engine, eventually, memory, pattern, serving_direct};
use verbs_engine::{
    Config, Direction, Engine, Mode, Notification, Permission, RegisteredMemory, RemoteEffect, RemoteSegment,
    TransferRequest, Transport,
};
use verbs_tests::{leaks::device_turn, network::Weather, process::on_second_host};

const LENGTH: usize = 4 << 20;
const ROLE: &str = "RXE2_ENGINE_SOURCE";

/// Not a test of its own: the first host starts this very program with the environment that makes it the source.
#[test]
fn other_side() {
    let Ok(ip) = std::env::var(ROLE) else { return };
    let source = engine(Config { bind: format!("{ip}:0").parse().expect("an address"), ..serving_direct() });
    let served = memory(&source, LENGTH, Permission::RemoteReadWrite);
    println!("\nUP {} {} {}", source.endpoint(), source.epoch(), served.address());
    loop {
        for notification in source.wait_for_notifications(LONG) {
            println!("\nNOTED {}", notification.name);
        }
    }
}

/// A source on the second host, and a requester on this one.
struct Hosts {
    source: Child,
    said: std::io::Lines<BufReader<ChildStdout>>,
    requester: Engine,
    local: RegisteredMemory,
    peer: RemoteSegment,
    remote: u64,
}

impl Hosts {
    fn start() -> Self {
        let address = |name: &str| std::env::var(name).expect("two hosts are needed: `cargo softroce test`");
        let program = std::env::current_exe().expect("a program knows where it is");
        let mut source = on_second_host("env")
            .arg(format!("{ROLE}={}", address("SOFTROCE_PEER")))
            .arg(program)
            .args(["other_side", "--exact", "--nocapture"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this very program");
        let mut said = BufReader::new(source.stdout.take().expect("piped")).lines();
        let up = next(&mut said, "UP ");
        let [endpoint, epoch, remote] = up.split(' ').collect::<Vec<_>>().try_into().expect("three words");
        let bind = format!("{}:0", address("SOFTROCE_ADDRESS")).parse().expect("an address");
        let requester = engine(Config { bind, ..Config::default() });
        let local = memory(&requester, LENGTH, Permission::LocalOnly);
        let (endpoint, epoch) = (endpoint.parse().expect("an address"), epoch.parse().expect("an epoch"));
        let peer = requester.open_segment(endpoint, epoch, LONG).expect("it listens");
        Self { source, said, local, peer, remote: remote.parse().expect("a number"), requester }
    }

    fn request(&self, length: usize) -> [TransferRequest; 1] {
        let (local_address, remote_address) = (self.local.address(), self.remote);
        [TransferRequest { local_address, remote_address, length: length as u64 }]
    }

    /// Bytes there and back again, over the device.
    fn round_trip(&self, write: impl Into<Mode>, read: impl Into<Mode>, length: usize, seed: u8) {
        let sent = pattern(LENGTH, seed);
        self.local.write(0, &sent).expect("in range");
        for mode in [write.into(), read.into()] {
            let report = self.requester.submit_and_wait(&self.peer, mode, &self.request(length), LONG).expect("sound");
            let report = report.into_result().unwrap_or_else(|failure| panic!("{mode:?}, {length} bytes: {failure:?}"));
            assert_eq!(report.transport, Some(Transport::Rdma));
            if mode.direction == Direction::Write {
                self.local.update(0, LENGTH as u64, |bytes| bytes.fill(0)).expect("in range");
            }
        }
        let came = bytes_of(&self.local);
        assert!(came[..length] == sent[..length], "{length} bytes came back as others");
        assert!(came[length..].iter().all(|byte| *byte == 0), "and nothing but those");
    }

    fn settle(&self) {
        eventually("nothing is under way here", || {
            let stats = self.requester.stats();
            (stats.submissions, stats.rdma_connecting, stats.rdma_busy, stats.rdma_closing) == (0, 0, 0, 0)
        });
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // It does not end by itself.
        let _ = self.source.kill();
        let _ = self.source.wait();
    }
}

fn next(said: &mut impl Iterator<Item = std::io::Result<String>>, word: &str) -> String {
    let mut lines = said.map_while(Result::ok);
    lines
        .find_map(|line| line.strip_prefix(word).map(str::to_owned))
        .unwrap_or_else(|| panic!("it ended before {word}"))
}

#[test]
fn bytes_are_whole_in_both_profiles_and_notifications_arrive() {
    let _turn = device_turn();
    let mut hosts = Hosts::start();
    for (seed, length) in [(1, 1), (2, 4097), (3, LENGTH)] {
        hosts.round_trip(Direction::Write, Direction::Read, length, seed);
        hosts.round_trip(Direction::Write.direct(), Direction::Read.direct(), length, seed + 100);
    }
    let notification = Notification::new("from the first host", "");
    hosts.requester.send_notification(&hosts.peer, &notification, LONG).expect("there is room");
    assert_eq!(next(&mut hosts.said, "NOTED "), "from the first host");
    hosts.settle();
}

#[test]
fn bytes_are_whole_over_a_network_that_loses_delays_and_repeats() {
    let _turn = device_turn();
    let hosts = Hosts::start();
    // Not reordered: Soft-RoCE goes back to the first missing packet each time, and 7 retries are soon used up.
    for (seed, weather) in [(11, "loss 1% delay 1ms"), (12, "delay 2ms duplicate 2%")] {
        let _weather = Weather::set(weather);
        hosts.round_trip(Direction::Write, Direction::Read, 512 << 10, seed);
        hosts.round_trip(Direction::Write.direct(), Direction::Read.direct(), 512 << 10, seed + 100);
    }
    hosts.settle();
}

#[test]
fn a_cut_path_ends_operations_by_their_deadline_and_the_next_ones_go_again() {
    const DEADLINE: Duration = Duration::from_secs(2);
    /// The deadline bounds waits; the two hosts are emulated, and copies and wake-ups are not free there.
    const SLACK: Duration = Duration::from_secs(8);
    let _turn = device_turn();
    let hosts = Hosts::start();
    hosts.round_trip(Direction::Write, Direction::Read, 4097, 21);
    for mode in [Direction::Read.into(), Direction::Write.into(), Direction::Read.direct(), Direction::Write.direct()] {
        let mode: Mode = mode;
        let cut = Weather::cut();
        let began = Instant::now();
        let report = hosts.requester.submit_and_wait(&hosts.peer, mode, &hosts.request(LENGTH), DEADLINE);
        let took = began.elapsed();
        let failure = report.expect("sound").failure.expect("nothing arrives");
        assert!(took < DEADLINE + SLACK, "{mode:?} took {took:?}");
        assert!(mode.direction == Direction::Write || failure.effect == RemoteEffect::None, "{mode:?}: {failure:?}");
        drop(cut);
        // What the source has of it ends by the source's own timeout; until then it may be busy.
        let healed = Instant::now();
        loop {
            let again = hosts.requester.submit_and_wait(&hosts.peer, mode, &hosts.request(4097), DEADLINE * 5);
            match again.expect("sound").failure {
                None => break,
                Some(failure) => assert!(healed.elapsed() < LONG, "{mode:?} does not go again: {failure:?}"),
            }
        }
        eprintln!("  {mode:?}: {took:?} to the end, {:?} until it went again", healed.elapsed());
    }
    hosts.round_trip(Direction::Write, Direction::Read, LENGTH, 22);
    hosts.settle();
}
