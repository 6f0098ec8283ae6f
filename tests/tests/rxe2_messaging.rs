//! Two hosts and the network between them: loss, delay, duplicates, reordering, a path that is cut, a host that is gone.
//!
//! Runs on the first host; the peer program runs on the second one.

use std::time::{Duration, Instant};

use verbs_bootstrap::TcpNet;
use verbs_tests::{
    lab::{DeviceLab, Lab, SMALL_SLABS},
    leaks::{Census, device_turn, hw_counter, open_descriptors},
    network::{LinkDown, Side, Weather},
    node::{Node, next_within},
    process::{PeerProcess, sh_on_second_host},
    traffic::{Run, Tally},
};
use verbs_transport::{Config, InstanceId, verbs::DeviceFabric};

const PEER: &str = env!("CARGO_BIN_EXE_peer");
const LONG: Duration = Duration::from_secs(40);
/// The contract's bound for the end of every frame after a peer's death.
const END_WITHIN: Duration = Duration::from_secs(6);

/// The peer's, over its restarts.
const NAME: &str = "instance=7";

type Lead = Node<DeviceFabric<TcpNet>>;

/// Two hosts, a worker on each.
struct Hosts {
    node: Lead,
    peer: PeerProcess,
    id: InstanceId,
}

impl Hosts {
    async fn start() -> Self {
        let lab = DeviceLab::new();
        let address = |name: &str| std::env::var(name).expect("two hosts are needed: `cargo softroce test`");
        let (here, there) = (address("SOFTROCE_ADDRESS"), address("SOFTROCE_PEER"));
        let peer = PeerProcess::start_on_second_host(PEER, &[NAME, &format!("bind={there}:0")]);
        let bind = format!("{here}:0").parse().expect("an address");
        let node = Node::start_with(lab.fabric(1), Config { bind, ..lab.config(1) }).await;
        let mut hosts = Self { id: node.worker.register(peer.address()).expect("good"), node, peer };
        hosts.peer.register(&hosts.node.worker.address());
        hosts
    }

    /// So many frames each way at once; all must arrive in order, once and whole, and none may fail.
    async fn exchange(&mut self, frames: u64, bytes: usize) {
        let began = Instant::now();
        let there = Run::new(bytes);
        there.burst(&self.node.worker, self.id, frames);
        let back = self.peer.ask(&format!("send {} {frames} {bytes}", self.node.id()));
        let mut tally = Tally::default();
        while tally.json()[&back]["frames"].as_u64().unwrap_or(0) < frames {
            tally.take(&next_within(&mut self.node.inbound.message, LONG).await);
        }
        let stats = self.arrived(&there, frames, LONG);
        eprintln!("  {frames} frames of {bytes} bytes each way in {:?}", began.elapsed());
        assert_eq!(there.failures().len(), 0, "{:?}", there.reasons());
        there.assert_accounted(&stats["received"]);
        assert_eq!(stats["sent"][&back]["failed"], 0, "{stats}");
        let line = &tally.json()[&back];
        assert_eq!((&line["next"], &line["repeated"], &line["corrupt"]), (&frames.into(), &0.into(), &0.into()));
        assert_eq!(line["missing"].as_array().map(Vec::len), Some(0), "{line}");
    }

    fn arrived(&mut self, run: &Run, frames: u64, patience: Duration) -> serde_json::Value {
        let name = run.name();
        let enough = |stats: &serde_json::Value| stats["received"][&name]["frames"].as_u64().unwrap_or(0) >= frames;
        self.peer.wait_for("frames", patience, enough)
    }

    /// Sends until a frame arrives, each try anew.
    fn recover(&mut self, patience: Duration) -> Duration {
        let began = Instant::now();
        loop {
            let run = Run::new(100);
            run.burst(&self.node.worker, self.id, 20);
            while run.failures().len() < 20 && self.node.worker.stats().connections == 0 {
                assert!(began.elapsed() < patience + END_WITHIN, "a send neither ends nor connects");
                std::thread::sleep(Duration::from_millis(5));
            }
            if run.failures().is_empty() {
                let stats = self.arrived(&run, 20, Duration::from_secs(10));
                run.assert_accounted(&stats["received"]);
                return began.elapsed();
            }
            assert!(began.elapsed() < patience, "no way back: {:?}", run.reasons());
        }
    }

    /// Everything that was sent has ended: within `END_WITHIN` of `began`, or the test fails.
    fn all_ended(&self, what: &str, began: Instant) {
        loop {
            let stats = self.node.worker.stats();
            if (stats.connections, stats.qps, stats.send_slabs_free) == (0, 0, SMALL_SLABS.send_slabs as usize) {
                eprintln!("  {what}: all ended after {:?}", began.elapsed());
                return;
            }
            assert!(began.elapsed() < END_WITHIN, "{what}: {stats:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    async fn stop(mut self) {
        let stats = self.peer.wait_for("single QP", Duration::from_secs(5), |stats| {
            stats["qps"] == 1 && stats["send_slabs_free"] == SMALL_SLABS.send_slabs
        });
        assert_eq!(stats["malformed"], 0, "{stats}");
        assert_eq!(self.node.worker.stats().malformed, 0);
        self.node.errors.assert_none();
        self.node.stop().await;
        self.peer.wait_for("end of the last QP", Duration::from_secs(5), |stats| stats["qps"] == 0);
        self.peer.finish();
    }
}

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Hosts) -> R) {
    let _turn = device_turn();
    let before = Census::take();
    let rnr = || hw_counter("send_rnr_err") + hw_counter("rcvd_rnr_err");
    let naks = rnr();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async { scenario(Hosts::start().await).await });
    runtime.shutdown_timeout(Duration::from_secs(5));
    before.assert_same();
    assert_eq!(rnr(), naks, "RNR NAKs");
}

/// `frames` of half a kilobyte, and some of many packets, under this weather.
fn under(netem: &'static str, frames: u64) {
    run(|mut hosts| async move {
        hosts.node.worker.ensure_connected(hosts.id).await.expect("connected");
        let weather = Weather::set(netem);
        hosts.exchange(frames, 500).await;
        hosts.exchange(10, 50_000).await;
        drop(weather);
        assert_eq!(hosts.node.worker.stats().epochs_begun, 1, "one connection throughout");
        hosts.stop().await;
    });
}

#[test]
fn plain_exchange_up_to_a_mebibyte() {
    run(|mut hosts| async move {
        for (frames, bytes) in [(500, 0), (500, 64), (100, 8000), (20, 100_000), (4, 1 << 20)] {
            hosts.exchange(frames, bytes).await;
        }
        let told = hosts.peer.ask_json(&format!("describe {}", hosts.node.id()));
        assert_eq!(told["mtu_bytes"], 4096, "{told}");
        hosts.stop().await;
    });
}

#[test]
fn one_percent_loss() {
    under("loss 1%", 1000);
}

#[test]
fn five_percent_loss() {
    under("loss 5%", 500);
}

#[test]
fn one_millisecond_of_delay() {
    under("delay 1ms", 1000);
}

#[test]
fn twenty_milliseconds_of_delay() {
    under("delay 20ms", 500);
}

#[test]
fn duplicates() {
    under("duplicate 10%", 1000);
}

#[test]
fn reordering() {
    under("delay 2ms reorder 75% 50%", 500);
}

/// Connecting itself in bad weather: dial, RTR and proof.
#[test]
fn connects_under_loss_and_delay() {
    run(|mut hosts| async move {
        let weather = Weather::set("delay 20ms loss 5%");
        let took = hosts.recover(Duration::from_secs(20));
        eprintln!("  first frames after {took:?}");
        drop(weather);
        hosts.stop().await;
    });
}

/// Shorter than the retries: it heals; nothing is lost without a report.
#[test]
fn path_cut_for_a_second_heals() {
    cut_for(Duration::from_secs(1));
}

/// Longer than any retry: everything ends typed, and the next send after it opens a clean epoch.
#[test]
fn path_cut_for_ten_seconds_ends_typed_and_recovers() {
    cut_for(Duration::from_secs(10));
}

fn cut_for(length: Duration) {
    run(|mut hosts| async move {
        let flowing = Run::new(2000);
        let flow = flowing.flow(&hosts.node.worker, hosts.id);
        let back = hosts.peer.ask(&format!("send {} 3000 2000", hosts.node.id()));
        hosts.arrived(&flowing, 100, LONG);
        let since = Instant::now();
        let cut = Weather::cut();
        if length > END_WITHIN {
            hosts.all_ended("path cut", since);
            let late = Run::new(10);
            late.burst(&hosts.node.worker, hosts.id, 10);
            let sent = Instant::now();
            while late.failures().len() < 10 && since.elapsed() < length {
                std::thread::sleep(Duration::from_millis(5));
            }
            eprintln!("  sent meanwhile: {:?} after {:?}", late.reasons(), sent.elapsed());
        }
        std::thread::sleep(length.saturating_sub(since.elapsed()));
        eprintln!("  cut for {:?}", since.elapsed());
        drop(cut);
        flow.abort();
        let took = hosts.recover(Duration::from_secs(12));
        eprintln!("  back {took:?} after the path healed: {:?}", flowing.reasons());
        // What came back before or after the cut is in order and whole, and the peer's book has the rest.
        let mut tally = Tally::default();
        let idle = Duration::from_secs(2);
        while let Ok(Some(frame)) = tokio::time::timeout(idle, hosts.node.inbound.message.recv()).await {
            tally.take(&frame);
        }
        let stats = hosts.arrived(&flowing, flowing.due(), LONG);
        flowing.assert_accounted(&stats["received"]);
        let (got, sent) = (&tally.json()[&back], &stats["sent"][&back]);
        assert_eq!((&got["repeated"], &got["corrupt"]), (&0.into(), &0.into()), "{got}");
        let count = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
        assert!(count(&got["frames"]) + count(&sent["failed"]) >= 3000, "lost without a report: {got} {sent}");
        hosts.stop().await;
    });
}

/// The path never heals. Everything that is under way ends typed in time, and so does whatever is tried in the half minute
/// after; nothing grows, and shutdown is prompt.
#[test]
fn path_cut_for_good_ends_everything_in_time() {
    run(|mut hosts| async move {
        let flowing = Run::new(2000);
        let flow = flowing.flow(&hosts.node.worker, hosts.id);
        hosts.arrived(&flowing, 100, LONG);
        let descriptors = open_descriptors();
        let since = Instant::now();
        let cut = Weather::cut();
        hosts.all_ended("path cut for good", since);
        flow.abort();
        let (mut rounds, mut longest) = (0, Duration::ZERO);
        while since.elapsed() < Duration::from_secs(32) {
            let (late, sent) = (Run::new(10), Instant::now());
            late.burst(&hosts.node.worker, hosts.id, 300);
            while late.failures().len() < 300 {
                assert!(sent.elapsed() < END_WITHIN, "{:?}; {:?}", late.reasons(), hosts.node.worker.stats());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let asked = Instant::now();
            hosts.node.worker.ensure_connected(hosts.id).await.expect_err("nobody is there");
            (rounds, longest) = (rounds + 1, longest.max(asked.elapsed()).max(asked - sent));
            assert!(asked.elapsed() < END_WITHIN, "{:?}", asked.elapsed());
            let stats = hosts.node.worker.stats();
            assert!(stats.qps <= 1 && stats.receives_promised <= 70 && stats.peers_known == 1, "{stats:?}");
            assert!(open_descriptors() <= descriptors + 1, "one dial at a time: {}", open_descriptors());
        }
        eprintln!("  {rounds} rounds of later sends and connects; the longest took {longest:?}");
        let last = Run::new(10);
        last.burst(&hosts.node.worker, hosts.id, 10);
        let stopping = Instant::now();
        hosts.node.worker.shutdown().await;
        assert!(stopping.elapsed() < Duration::from_millis(2500), "shutdown took {:?}", stopping.elapsed());
        assert_eq!(last.failures().len(), 10, "{:?}", last.reasons());
        let stats = hosts.peer.wait_for("end of the peer's QP", END_WITHIN, |stats| stats["qps"] == 0);
        flowing.assert_accounted(&stats["received"]);
        drop(cut);
        hosts.node.errors.assert_none();
        hosts.peer.finish();
    });
}

/// B05 on two hosts: the peer is killed behind a cut path, so that nothing tells of its death, and comes back on its port
/// under its name. What is sent within 10 ms of learning that arrives, whether discovery tells of the new run or its own
/// hello does; every frame of the old connection ends as `PeerRestarted`.
#[test]
fn a_restart_that_nothing_told_of_ends_the_old_frames_as_restarted() {
    run(|mut hosts| async move {
        let there = std::env::var("SOFTROCE_PEER").expect("two hosts");
        for round in 0..2u64 {
            hosts.exchange(10, 100).await;
            let cut = Weather::cut();
            let bind = format!("bind={there}:{}", hosts.peer.port());
            // The kernel says a dead process's last word again and again: once and no more, within 0.6 s.
            sh_on_second_host("sysctl -qw net.ipv4.tcp_orphan_retries=1");
            sh_on_second_host(&format!("kill -KILL {}", hosts.peer.pid()));
            hosts.peer.await_end(false);
            hosts.peer = PeerProcess::start_on_second_host(PEER, &[NAME, &bind]);
            std::thread::sleep(Duration::from_secs(1));
            sh_on_second_host("sysctl -qw net.ipv4.tcp_orphan_retries=0");
            drop(cut);
            hosts.peer.register(&hosts.node.worker.address());
            assert_eq!(hosts.node.worker.stats().connections, 1, "nothing told of it");
            // Nobody takes them; before their retries are over, the new run is known.
            let old = Run::new(2000);
            old.burst(&hosts.node.worker, hosts.id, 1000);
            if round == 0 {
                hosts.node.worker.register(hosts.peer.address()).expect("good");
            } else {
                hosts.peer.ask(&format!("connect {}", hosts.node.id()));
            }
            let (new, sent) = (Run::new(100), Instant::now());
            new.burst(&hosts.node.worker, hosts.id, 100);
            let stats = hosts.arrived(&new, 100, Duration::from_secs(5));
            eprintln!("  100 frames {:?} after the restart became known; {:?}", sent.elapsed(), old.reasons());
            new.assert_accounted(&stats["received"]);
            assert_eq!(new.failures().len(), 0, "{:?}", new.reasons());
            while old.failures().len() < 1000 {
                assert!(sent.elapsed() < END_WITHIN, "{:?}", old.reasons());
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(old.reasons().keys().all(|why| why.contains("the peer restarted")), "{:?}", old.reasons());
            let ended = hosts.node.worker.stats().ended;
            assert_eq!(ended.get("peer_restarted"), Some(&(round + 1)), "{ended:?}");
        }
        hosts.stop().await;
    });
}

/// The host falls silent: it hears everything and nothing comes from it, not even a reset, over RDMA or TCP. All ends in
/// time, also what is tried later; what arrived although its ACK did not is not taken for lost, nor sent twice.
#[test]
fn silent_host_ends_typed_and_comes_back() {
    run(|mut hosts| async move {
        let flowing = Run::new(2000);
        let flow = flowing.flow(&hosts.node.worker, hosts.id);
        hosts.arrived(&flowing, 100, LONG);
        let since = Instant::now();
        let silence = Weather::silence(Side::There);
        hosts.all_ended("host silent", since);
        eprintln!("  {:?}", flowing.reasons());
        assert!(!flowing.failures().is_empty(), "it went in the middle");
        let sent = Instant::now();
        let error = hosts.node.worker.ensure_connected(hosts.id).await.expect_err("nobody is there");
        eprintln!("  connecting: {error} after {:?}", sent.elapsed());
        assert!(sent.elapsed() < END_WITHIN, "{:?}", sent.elapsed());
        drop(silence);
        let took = hosts.recover(Duration::from_secs(12));
        eprintln!("  back {took:?} after the host spoke again");
        flow.abort();
        let stats = hosts.arrived(&flowing, flowing.due(), LONG);
        flowing.assert_accounted(&stats["received"]);
        hosts.stop().await;
    });
}

/// Own link down: a QP may hang without a word (Soft-RoCE does); the health check ends it.
#[test]
fn own_link_down_ends_typed_and_comes_back() {
    run(|mut hosts| async move {
        let flowing = Run::new(2000);
        let flow = flowing.flow(&hosts.node.worker, hosts.id);
        hosts.arrived(&flowing, 100, LONG);
        let since = Instant::now();
        let down = LinkDown::begin(Side::Here);
        hosts.all_ended("own link down", since);
        eprintln!("  {:?}", flowing.reasons());
        drop(down);
        let took = hosts.recover(Duration::from_secs(12));
        eprintln!("  back {took:?} after the link came up");
        flow.abort();
        let stats = hosts.arrived(&flowing, flowing.due(), LONG);
        flowing.assert_accounted(&stats["received"]);
        hosts.stop().await;
    });
}

/// B01 on two hosts: 1500 bytes there and 4200 here give a path MTU of 1024 to both.
#[test]
fn b01_unequal_mtus_use_the_smaller() {
    struct Small;
    impl Drop for Small {
        fn drop(&mut self) {
            sh_on_second_host("ip link set eth0 mtu 4200");
        }
    }
    let _small = Small;
    sh_on_second_host("ip link set eth0 mtu 1500");
    run(|mut hosts| async move {
        for (frames, bytes) in [(100, 3000), (4, 1 << 20)] {
            hosts.exchange(frames, bytes).await;
        }
        let told = hosts.peer.ask_json(&format!("describe {}", hosts.node.id()));
        assert_eq!(told["mtu_bytes"], 1024, "{told}");
        assert_eq!(hosts.node.worker.describe(hosts.id).expect("known").mtu_bytes, Some(1024));
        hosts.stop().await;
    });
}
