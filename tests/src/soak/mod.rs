//! Two hosts, random faults, and numbered traffic of mixed sizes both ways.
//!
//! A [`Plan`] deals blows; in between, and at the end, the hosts come to rest, and the books are compared: nothing is lost
//! without a report, nothing comes twice, late or damaged, and every credit, slab, QP and descriptor is where it belongs.
//! There is never an RNR NAK.
//!
//! What is excused: frames to or from a process that was ended after its device had acknowledged, or taken, them. Of those,
//! only order, integrity and uniqueness are judged, and that what the process had noticed as missing was reported.

pub mod plan;

use std::{
    fmt,
    io::Write as _,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde_json::Value;
use verbs_bootstrap::{InstanceId, TcpNet};
use verbs_transport::{Config, Stats, Worker, verbs::DeviceFabric};

use self::plan::{Blow, Plan, Step};
use crate::{
    lab::{DeviceLab, Lab, SMALL_SLABS},
    leaks::{Census, device_turn, held_bytes, hw_counter, open_descriptors},
    network::{LinkDown, Side, Weather},
    node::Node,
    process::{PeerProcess, output_on_second_host, sh_on_second_host},
    traffic::{Keep, Pour, Run, Tally, assert_in_order, open},
};

/// The peer's name over its restarts.
const PEER: &str = "instance=7";
/// Receive slabs that are lent at once.
const LENT_SLABS: u32 = 64;
/// From peace to the last frame's end: a dial under way, a back-off, and one more dial.
const PEACE: Duration = Duration::from_secs(25);
/// From the last frame's end until all is where it belongs.
const REST: Duration = Duration::from_secs(10);
/// Growth of a process's memory after the first rest that is no leak: books, and what the allocator keeps.
const GROWTH_MAX_BYTES: u64 = 24 << 20;

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    /// The plan's seed.
    pub seed: u64,
    /// For how long.
    pub length: Duration,
}

impl Soak {
    /// `VERBS_SOAK_SECONDS` (60 unless said) and `VERBS_SOAK_SEED` (random unless said).
    ///
    /// # Panics
    ///
    /// When one of them is no number.
    pub fn from_env() -> Self {
        let number = |name: &str| {
            let text = std::env::var(name).ok()?;
            Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
        };
        let seed = number("VERBS_SOAK_SEED").unwrap_or_else(|| fastrand::u64(..1_000_000));
        Self { seed, length: Duration::from_secs(number("VERBS_SOAK_SECONDS").unwrap_or(60)) }
    }

    /// The short form has no time for long outages; other tests have them one by one.
    fn longest_blow(self) -> Duration {
        Duration::from_secs(if self.length < Duration::from_secs(300) { 3 } else { 12 })
    }
}

/// Runs it; `program` is the peer program.
///
/// # Panics
///
/// When a rule is broken, and without two hosts.
pub fn run(soak: Soak, program: &str) {
    let _turn = device_turn();
    let before = Census::take();
    let there = output_on_second_host("rdma resource show");
    let rnr = hw_counter("send_rnr_err") + hw_counter("rcvd_rnr_err");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let blame = Blame(soak);
    runtime.block_on(async {
        let mut hosts = Hosts::start(program).await;
        hosts.say(format_args!("VERBS_SOAK_SEED={} for {:?}", soak.seed, soak.length));
        let mut plan = Plan::new(soak.seed, soak.longest_blow());
        while hosts.began.elapsed() < soak.length {
            for step in plan.by_ref().take(Plan::KINDS) {
                hosts.say(format_args!("{step}"));
                hosts.suffer(&step).await;
                if hosts.began.elapsed() >= soak.length {
                    break;
                }
            }
            hosts.rest().await;
        }
        hosts.stop().await;
    });
    runtime.shutdown_timeout(Duration::from_secs(5));
    before.assert_same();
    assert_eq!(hw_counter("send_rnr_err") + hw_counter("rcvd_rnr_err"), rnr, "RNR NAKs");
    assert_eq!(output_on_second_host("rdma resource show"), there, "left on the second host");
    std::mem::forget(blame);
}

/// Says how to see it again when a rule is broken.
struct Blame(Soak);

impl Drop for Blame {
    fn drop(&mut self) {
        eprintln!("this was VERBS_SOAK_SEED={} VERBS_SOAK_SECONDS={}", self.0.seed, self.0.length.as_secs());
    }
}

/// The traffic of one life of the peer, or from one rest to the next.
struct Traffic {
    there: Arc<Run>,
    pouring: Pour,
    /// Its run back to us, by name.
    back: String,
}

/// Our frames to a peer that was ended, and what it had received a moment before.
struct Orphan {
    run: Arc<Run>,
    received: Value,
}

/// Sums for whoever watches.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    sent: u64,
    failed: u64,
    /// From a frame's send to its report.
    longest: Duration,
    peers_ended: u64,
}

struct Hosts {
    program: String,
    began: Instant,
    worker: Worker<DeviceFabric<TcpNet>>,
    tally: Arc<Mutex<Tally>>,
    peer: PeerProcess,
    id: InstanceId,
    traffic: Option<Traffic>,
    orphans: Vec<Orphan>,
    /// RNR NAKs of the second host before.
    rnr_there: Value,
    /// Descriptors and memory of both at the first rest.
    first_rest: Option<[u64; 4]>,
    totals: Totals,
}

fn lost_in(run: &Run, received: &Value) -> Vec<u64> {
    let (line, failures) = (&received[run.name()], run.failures());
    // Only below what came last: what is above was on its way.
    let next = line["next"].as_u64().unwrap_or(0);
    open(next, &failures.into_keys().collect(), line)
}

impl Hosts {
    async fn start(program: &str) -> Self {
        let lab = DeviceLab::new();
        let here = address("SOFTROCE_ADDRESS");
        let bind = format!("{here}:0").parse().expect("an address");
        let lending = Config { zero_copy_slabs: LENT_SLABS, zero_copy_min_bytes: 100, ..lab.config(1) };
        let node = Node::start_with(lab.fabric(1), Config { bind, ..lending }).await;
        let tally = Arc::<Mutex<Tally>>::default();
        let (worker, mut inbound, book) = (node.worker, node.inbound, tally.clone());
        tokio::spawn(async move {
            let mut keep = Keep::default();
            while let Some(frame) = keep.next(&mut inbound.message).await {
                book.lock().unwrap_or_else(PoisonError::into_inner).take(&frame);
            }
        });
        let mut peer = start_peer(program, None, false);
        let id = worker.register(peer.address()).expect("good");
        peer.register(&worker.address());
        let rnr_there = peer.ask_json("stats")["rnr"].take();
        let mut hosts = Self {
            program: program.to_owned(),
            began: Instant::now(),
            worker,
            tally,
            peer,
            id,
            traffic: None,
            orphans: Vec::new(),
            rnr_there,
            first_rest: None,
            totals: Totals::default(),
        };
        hosts.pour();
        hosts
    }

    /// Past the capture of the test harness: whoever waits for ten minutes wants to see something.
    fn say(&self, what: fmt::Arguments<'_>) {
        let line = format!("soak {:6.1} s: {what}\n", self.began.elapsed().as_secs_f64());
        // Nobody may be listening.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    /// Traffic both ways from now on.
    fn pour(&mut self) {
        let there = Run::mixed();
        let pouring = there.pour(&self.worker, self.id);
        let back = self.peer.ask(&format!("pour {}", self.worker.instance()));
        self.traffic = Some(Traffic { there, pouring, back });
    }

    async fn suffer(&mut self, step: &Step) {
        let weather = step.weather.as_ref().map(|(over, netem)| Weather::over(over, netem));
        match step.blow {
            Blow::Calm => tokio::time::sleep(step.lasts).await,
            Blow::Cut | Blow::SilentHere | Blow::SilentThere => {
                let cut = match step.blow {
                    Blow::Cut => Weather::cut(),
                    Blow::SilentHere => Weather::silence(Side::Here),
                    _ => Weather::silence(Side::There),
                };
                tokio::time::sleep(step.lasts).await;
                drop(cut);
            }
            Blow::LinkDownHere | Blow::LinkDownThere => {
                let side = if step.blow == Blow::LinkDownHere { Side::Here } else { Side::There };
                let down = LinkDown::begin(side);
                tokio::time::sleep(step.lasts).await;
                drop(down);
            }
            Blow::Stop => {
                let pid = self.peer.pid();
                sh_on_second_host(&format!("kill -STOP {pid}"));
                tokio::time::sleep(step.lasts).await;
                sh_on_second_host(&format!("kill -CONT {pid}"));
            }
            Blow::Kill | Blow::Restart => self.replace_peer(step).await,
        }
        drop(weather);
        tokio::time::sleep(step.pause).await;
    }

    /// The peer ends, with our traffic going on, and another run of it comes after a while.
    async fn replace_peer(&mut self, step: &Step) {
        let received = self.peer.received();
        let port = self.peer.port();
        match step.blow {
            Blow::Kill => sh_on_second_host(&format!("kill -KILL {}", self.peer.pid())),
            _ => self.peer.tell("exit"),
        }
        tokio::time::sleep(step.lasts).await;
        self.peer.await_end(step.blow == Blow::Restart);
        let Some(Traffic { there, pouring, .. }) = self.traffic.take() else { return };
        pouring.stop().await;
        self.count(&there);
        self.totals.peers_ended += 1;
        self.orphans.push(Orphan { run: there, received });
        self.peer = start_peer(&self.program, Some(port), self.totals.peers_ended % 2 == 1);
        assert_eq!(self.peer.id(), self.id);
        self.peer.register(&self.worker.address());
        if step.told {
            self.worker.register(self.peer.address()).expect("good");
        }
        self.pour();
    }

    fn count(&mut self, run: &Run) {
        self.totals.sent += run.sent();
        self.totals.failed += run.failures().len() as u64;
        self.totals.longest = self.totals.longest.max(run.longest_failure());
    }

    fn line_here(&self, run: &str) -> Value {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).json()[run].take()
    }

    /// Peace: no frame is sent, all have their end, and everything is where it belongs. Then traffic goes on.
    async fn rest(&mut self) {
        let Some(Traffic { there, pouring, back }) = self.traffic.take() else { return };
        pouring.stop().await;
        self.peer.ask("hush");
        let peace = Instant::now();
        loop {
            let stats = self.peer.ask_json("stats");
            let lost_there = there.open(&stats["received"]);
            let sent = &stats["sent"][&back];
            let ranges: Vec<(u64, u64)> = serde_json::from_value(sent["failed_ranges"].clone()).expect("ranges");
            let failed = ranges.into_iter().flat_map(|(from, to)| from..to).collect();
            let lost_back = open(sent["sent"].as_u64().expect("a count"), &failed, &self.line_here(&back));
            if lost_there.is_empty() && lost_back.is_empty() {
                self.totals.sent += sent["sent"].as_u64().unwrap_or(0);
                self.totals.failed += failed.len() as u64;
                break;
            }
            assert!(
                peace.elapsed() < PEACE,
                "without an end: {lost_there:?} there and {lost_back:?} back; {:?}; {stats}; {:?}; {:?}",
                there.reasons(),
                self.worker.stats(),
                self.worker.describe(self.id)
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.count(&there);
        let ended = peace.elapsed();
        self.come_home().await;
        self.judge_books();
        let Totals { sent, failed, longest, peers_ended } = self.totals;
        self.say(format_args!(
            "rest: all ended within {ended:?}, home within {:?}; {sent} sent, {failed} reported, none of ours later than {longest:?}, {peers_ended} peers \
             replaced; {} lent here; {} KiB held; ended by {:?}",
            peace.elapsed(),
            self.worker.stats().frames_lent,
            held_bytes() >> 10,
            self.worker.stats().ended,
        ));
        self.pour();
    }

    /// One connection, nothing in flight or queued, every slab in its pool, and each window in full: what one side has not
    /// spent and what the other owes it.
    async fn come_home(&mut self) {
        let since = Instant::now();
        loop {
            // Whatever had ended it, the pair connects again.
            let connected = self.worker.ensure_connected(self.id).await;
            let stats = self.peer.ask_json("stats");
            let away = match self.describe_there() {
                Some(there) => self.away(&stats, &there),
                None => Some(format!("the peer does not know us: {connected:?}")),
            };
            let Some(away) = away else { return };
            assert!(since.elapsed() < REST, "not at rest: {away}; {stats}; {:?}", self.worker.stats());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn describe_there(&mut self) -> Option<Value> {
        let answer = self.peer.try_ask(&format!("describe {}", self.worker.instance())).ok()?;
        serde_json::from_str(&answer).ok()
    }

    /// What is not where it belongs, in words.
    fn away(&mut self, stats: &Value, there: &Value) -> Option<String> {
        let slabs = SMALL_SLABS.send_slabs;
        let promised = u32::from(Config::default().window_slabs) + 6;
        let mine = self.worker.stats();
        let Stats { qps, connections, send_slabs_free, receives_promised, .. } = mine;
        let held = (mine.inbound_backlog_bytes, mine.receive_slabs_lent);
        if (qps, connections, send_slabs_free, receives_promised) != (1, 1, slabs as usize, promised) || held != (0, 0)
        {
            return Some(format!("here: {mine:?}"));
        }
        let theirs = [
            "qps",
            "connections",
            "send_slabs_free",
            "receives_promised",
            "inbound_backlog_bytes",
            "receive_slabs_lent",
        ];
        let expected = [1, 1, slabs, promised, 0, 0];
        if theirs.iter().zip(expected).any(|(name, value)| stats[name] != value) {
            return Some(format!("there: not {expected:?}"));
        }
        let Some(here) = self.worker.describe(self.id) else { return Some("here: the peer is not known".to_owned()) };
        if (here.queued_frames, here.wrs_in_flight) != (0, Some(0)) {
            return Some(format!("here: {} queued, {:?} in flight", here.queued_frames, here.wrs_in_flight));
        }
        if (&there["queued_frames"], &there["wrs_in_flight"]) != (&0.into(), &0.into()) {
            return Some(format!("there: {there}"));
        }
        let (left, owed) = (here.credits_left.map(u64::from), here.credits_owed.map(u64::from));
        let window = u64::from(Config::default().window_slabs);
        let whole = |left: Option<u64>, owed: Option<u64>| left.zip(owed).map(|(left, owed)| left + owed);
        let sums = [whole(left, there["credits_owed"].as_u64()), whole(there["credits_left"].as_u64(), owed)];
        if sums != [Some(window); 2] {
            return Some(format!("credits: {left:?} left and {owed:?} owed here, {there} there"));
        }
        let number = |name: &str| stats[name].as_u64().unwrap_or(0);
        let now = [open_descriptors() as u64, number("fds"), held_bytes(), number("held_bytes")];
        let first = *self.first_rest.get_or_insert(now);
        // Crossed dials leave two sockets to a connection, others one.
        let descriptors = now[..2].iter().zip(&first[..2]).all(|(now, first)| *now <= first + 1);
        let memory = now[2..].iter().zip(&first[2..]).all(|(now, first)| *now <= first + GROWTH_MAX_BYTES);
        (!descriptors || !memory).then(|| format!("descriptors and memory, here and there: {first:?}, now {now:?}"))
    }

    /// What must be true of every frame of every life.
    fn judge_books(&mut self) {
        let stats = self.peer.ask_json("stats");
        assert_eq!((self.worker.stats().malformed, &stats["malformed"]), (0, &0.into()), "{stats}");
        assert_eq!(stats["rnr"], self.rnr_there, "RNR NAKs on the second host");
        let books = [self.tally.lock().unwrap_or_else(PoisonError::into_inner).json(), stats["received"].clone()];
        for line in books.iter().filter_map(Value::as_object).flat_map(|book| book.values()) {
            assert_in_order(line);
        }
        for Orphan { run, received } in self.orphans.drain(..) {
            let lost = lost_in(&run, &received);
            assert!(lost.is_empty(), "lost without a report before its end: {lost:?}; {:?}", run.reasons());
        }
    }

    async fn stop(mut self) {
        if let Some(Traffic { pouring, .. }) = self.traffic.take() {
            pouring.stop().await;
        }
        self.peer.ask("hush");
        self.worker.shutdown().await;
        let stats = self.worker.stats();
        let home = (stats.qps, stats.connections, stats.receives_promised, stats.send_slabs_free);
        assert_eq!(home, (0, 0, 0, SMALL_SLABS.send_slabs as usize), "{stats:?}");
        self.peer.wait_for("end of the last QP", Duration::from_secs(5), |stats| stats["qps"] == 0);
        self.say(format_args!("over; {:?}", self.totals));
        self.peer.finish();
    }
}

fn address(name: &str) -> String {
    std::env::var(name).expect("two hosts are needed: `cargo softroce test`")
}

/// Every other life of the peer lends its slabs, as we do.
fn start_peer(program: &str, port: Option<u16>, lends: bool) -> PeerProcess {
    let bind = format!("bind={}:{}", address("SOFTROCE_PEER"), port.unwrap_or(0));
    let lent = format!("zero_copy={}", if lends { LENT_SLABS } else { 0 });
    PeerProcess::start_on_second_host(program, &[PEER, &bind, &lent])
}
