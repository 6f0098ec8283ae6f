//! Two workers over a network that loses, doubles, delays and reorders, with restarts: checked at every step, and
//! once the faults stop they must agree on one pair of QPs.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    time::{Duration, Instant},
};

use super::*;
use crate::testing::offer;

#[test]
fn two_workers_converge_after_faults() {
    for seed in 0..SEEDS {
        World::new(seed).run();
    }
}

/// One run takes about 0.1 ms. On a failure the text names the seed.
const SEEDS: u64 = 20_000;
const FAULTS_MS: u64 = 60_000;
/// The longest late message (20 s), a dial and a proof (5 s each) and a back-off (2 s), with room.
const CALM_MS: u64 = 60_000;
const DIAL_MS: u64 = 5000;
const PROOF_MS: u64 = 5000;

/// A conversation is one dial's TCP connection.
#[derive(Clone, Debug)]
enum Event {
    Hello { dial: Dial },
    Challenge { dial: Dial },
    Proof { dial: Dial },
    Reply { dial: Dial, reply: Offer },
    Refused { dial: Dial, status: Status },
    DialTimeout { dial: Dial },
    BroughtUp { node: usize, incarnation: u64, generation: u64, fails: bool },
    Poll { node: usize, incarnation: u64 },
    Watch { node: usize },
    Registered { node: usize, run: u64 },
    Fault,
}

#[derive(Clone, Debug)]
struct Dial {
    id: u64,
    from: usize,
    hello: Offer,
}

/// A QP as its owner has it.
#[derive(Debug)]
struct Qp {
    qpn: u32,
    /// The QP number that it was moved to RTR for.
    bound: Option<u32>,
    up: bool,
}

struct Node {
    incarnation: u64,
    exchange: Exchange,
    /// By generation; the QP of a retired epoch is gone.
    qps: BTreeMap<u64, Qp>,
    /// Hellos that wait for the QP of a generation.
    waiting: Vec<(u64, Dial)>,
    dialing: Option<u64>,
    last_good_ms: u64,
    proven: bool,
}

struct World {
    seed: u64,
    random: u64,
    start: Instant,
    now_ms: u64,
    sequence: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    nodes: [Node; 2],
    next_qpn: u32,
    next_dial: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            seed,
            random: seed,
            start: Instant::now(),
            now_ms: 0,
            sequence: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            nodes: [node(0, 1, seed), node(1, 2, seed)],
            next_qpn: 0,
            next_dial: 0,
        };
        for node in 0..2 {
            // Half the worlds begin with one side that never registered the other.
            if node == 0 || world.chance(50) {
                let run = world.nodes[1 - node].incarnation;
                world.at(world.now_ms, Event::Registered { node, run });
            }
            world.at(1000, Event::Watch { node });
        }
        for _ in 0..world.below(12) {
            let when = world.below(FAULTS_MS);
            world.at(when, Event::Fault);
        }
        world
    }

    fn run(mut self) {
        let mut registered_at_the_end = false;
        while self.now_ms < FAULTS_MS + CALM_MS {
            let Some(Reverse((when, id))) = self.queue.pop() else { break };
            self.now_ms = when;
            if self.calm() && !registered_at_the_end {
                registered_at_the_end = true;
                for node in 0..2 {
                    let run = self.nodes[1 - node].incarnation;
                    self.registered(node, run);
                    self.poll(node);
                }
            }
            let event = self.events.remove(&id).expect("queued events exist");
            self.step(event);
            self.check();
        }
        for node in 0..2 {
            assert!(self.agreed(node), "seed {}: {} has not converged: {}", self.seed, node, self.describe());
            assert!(self.nodes[node].proven, "seed {}: {} is not proven", self.seed, node);
            assert!(self.nodes[node].qps.len() == 1, "seed {}: QPs leak", self.seed);
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Hello { dial } => {
                let acceptor = 1 - dial.from;
                if self.nodes[acceptor].exchange.would_replace(&dial.hello) {
                    self.send(&Event::Challenge { dial });
                } else {
                    self.hello(dial, false);
                }
            }
            Event::Challenge { dial } if self.waits(&dial) => self.send(&Event::Proof { dial }),
            // Between proof and decision the acceptor sees a dead dialer's closed socket.
            Event::Proof { dial } if self.lives(&dial) => self.hello(dial, true),
            Event::Reply { dial, reply } if self.waits(&dial) => self.reply(&dial, &reply),
            Event::Refused { dial, status } if self.waits(&dial) => self.dial_failed(dial.from, Some(status)),
            Event::DialTimeout { dial } if self.waits(&dial) => self.dial_failed(dial.from, None),
            // Whoever it was for is gone.
            Event::Challenge { .. }
            | Event::Proof { .. }
            | Event::Reply { .. }
            | Event::Refused { .. }
            | Event::DialTimeout { .. } => {}
            Event::BroughtUp { node, incarnation, generation, fails } => {
                if self.nodes[node].incarnation == incarnation {
                    self.brought_up(node, generation, fails);
                }
            }
            Event::Poll { node, incarnation } => {
                if self.nodes[node].incarnation == incarnation {
                    self.poll(node);
                }
            }
            Event::Watch { node } => self.watch(node),
            Event::Registered { node, run } => self.registered(node, run),
            Event::Fault => self.fault(),
        }
    }

    /// The worker wants to be connected.
    fn poll(&mut self, node: usize) {
        let now = self.now();
        let generation = self.nodes[node].exchange.begin_epoch().0;
        if !self.nodes[node].qps.contains_key(&generation) {
            self.make_qp(node, generation);
        }
        match self.nodes[node].exchange.start_dial(now) {
            DialStart::Go { generation, echoed, target } => {
                let mut hello = self.offer(node, generation.0, echoed.0);
                hello.to_incarnation = target;
                self.next_dial += 1;
                let dial = Dial { id: self.next_dial, from: node, hello };
                assert!(self.nodes[node].dialing.replace(dial.id).is_none(), "one dial at most");
                self.at(self.now_ms + DIAL_MS, Event::DialTimeout { dial: dial.clone() });
                self.send(&Event::Hello { dial });
            }
            DialStart::Wait { until } => {
                let wait = u64::try_from((until - now).as_millis()).expect("short") + 1;
                assert!(wait <= 5001, "seed {}: waits {wait} ms", self.seed);
                let incarnation = self.nodes[node].incarnation;
                self.at(self.now_ms + wait, Event::Poll { node, incarnation });
            }
            DialStart::InFlight | DialStart::Up | DialStart::Unknown => {}
            DialStart::Idle => panic!("an epoch was begun"),
        }
    }

    fn hello(&mut self, dial: Dial, shown_alive: bool) {
        let node = 1 - dial.from;
        let agreed = self.agreed(node);
        match self.nodes[node].exchange.on_hello(&dial.hello) {
            HelloVerdict::Join { generation, fresh } => {
                if fresh {
                    self.make_qp(node, generation.0);
                }
                self.bind(node, generation.0, &dial.hello);
                self.nodes[node].waiting.push((generation.0, dial));
            }
            HelloVerdict::Replace { generation, retired } => {
                // What changed between challenge and proof makes the listener refuse nothing: the exchange decides.
                assert!(shown_alive || !agreed, "seed {}: a hello nobody stands behind displaces", self.seed);
                assert!(!agreed, "seed {}: a stale hello displaces a live connection", self.seed);
                self.retire(node, retired.0);
                self.make_qp(node, generation.0);
                self.bind(node, generation.0, &dial.hello);
                self.nodes[node].waiting.push((generation.0, dial));
            }
            HelloVerdict::Repeat { generation } => {
                if self.nodes[node].qps[&generation.0].up {
                    self.answer(node, dial);
                } else {
                    self.nodes[node].waiting.push((generation.0, dial));
                }
            }
            HelloVerdict::Refuse(refusal) => self.send(&Event::Refused { dial, status: refusal.status }),
        }
    }

    fn reply(&mut self, dial: &Dial, reply: &Offer) {
        let node = dial.from;
        self.nodes[node].dialing = None;
        let agreed = self.agreed(node);
        match self.nodes[node].exchange.on_reply(reply) {
            ReplyVerdict::Connect { generation } => self.bind(node, generation.0, reply),
            ReplyVerdict::AlreadyUp { .. } => {}
            ReplyVerdict::Retire { retired } => {
                assert!(!agreed, "seed {}: a reply displaces a live connection", self.seed);
                self.retire(node, retired.0);
                self.poll(node);
            }
            ReplyVerdict::Ignore => self.poll(node),
        }
    }

    fn dial_failed(&mut self, node: usize, refused: Option<Status>) {
        self.nodes[node].dialing = None;
        let (now, exchange) = (self.now(), &mut self.nodes[node].exchange);
        let failed = refused.map(|status| exchange.on_refused(status, now));
        match failed.unwrap_or_else(|| exchange.on_dial_failed(now)) {
            DialFailed::CountsAsSuccess { generation } => {
                assert!(self.nodes[node].qps[&generation.0].bound.is_some(), "seed {}: not bound", self.seed);
            }
            DialFailed::EpochOver { retired, .. } => {
                self.retire(node, retired.0);
                self.poll(node);
            }
            DialFailed::Stale => self.poll(node),
        }
    }

    fn brought_up(&mut self, node: usize, generation: u64, fails: bool) {
        if fails {
            if self.nodes[node].exchange.on_epoch_end(Generation(generation), self.now()) {
                self.retire(node, generation);
                self.poll(node);
            }
            return;
        }
        if !self.nodes[node].exchange.on_connected(Generation(generation)) {
            return;
        }
        self.nodes[node].qps.get_mut(&generation).expect("a live epoch has a QP").up = true;
        self.nodes[node].last_good_ms = self.now_ms;
        let waiting = std::mem::take(&mut self.nodes[node].waiting);
        for (wanted, dial) in waiting {
            if wanted == generation {
                self.answer(node, dial);
            } else {
                self.nodes[node].waiting.push((wanted, dial));
            }
        }
    }

    /// Pings once a second; without an answer for long the epoch ends.
    fn watch(&mut self, node: usize) {
        self.at(self.now_ms + 1000, Event::Watch { node });
        let Some(generation) = self.nodes[node].exchange.generation() else { return self.poll(node) };
        if self.agreed(node) && self.agreed(1 - node) {
            self.nodes[node].last_good_ms = self.now_ms;
            assert!(self.nodes[node].exchange.on_proven(generation));
            self.nodes[node].proven = true;
        } else if self.nodes[node].exchange.is_connected() && self.now_ms > self.nodes[node].last_good_ms + PROOF_MS {
            assert!(self.nodes[node].exchange.on_epoch_end(generation, self.now()));
            self.retire(node, generation.0);
            self.poll(node);
        }
    }

    fn registered(&mut self, node: usize, run: u64) {
        if self.calm() && run != self.nodes[1 - node].incarnation {
            return;
        }
        match self.nodes[node].exchange.on_registered(Incarnation(run)) {
            RegisterVerdict::Retire { retired: Some(retired) } => self.retire(node, retired.0),
            RegisterVerdict::Superseded => {
                assert_ne!(run, self.nodes[1 - node].incarnation, "seed {}: the living run is superseded", self.seed);
            }
            RegisterVerdict::Keep | RegisterVerdict::Retire { retired: None } => {}
        }
        self.poll(node);
    }

    fn fault(&mut self) {
        let node = usize::from(self.chance(50));
        match self.below(3) {
            // Restart: QPs die with the process. Sometimes discovery tells the other side.
            0 => {
                let before = self.nodes[node].incarnation;
                let run = before + 2;
                self.nodes[node] = self::node(node, run, self.seed);
                let (delay, other) = (self.below(10_000), self.nodes[1 - node].incarnation);
                self.at(self.now_ms + delay / 10, Event::Registered { node, run: other });
                if self.chance(60) {
                    self.at(self.now_ms + delay, Event::Registered { node: 1 - node, run });
                }
                // An old blob, read late.
                if self.chance(30) {
                    self.at(self.now_ms + 2 * delay, Event::Registered { node: 1 - node, run: before });
                }
            }
            // The QP breaks.
            1 => {
                if let Some(generation) = self.nodes[node].exchange.generation() {
                    assert!(self.nodes[node].exchange.on_epoch_end(generation, self.now()));
                    self.retire(node, generation.0);
                    self.poll(node);
                }
            }
            _ => self.poll(node),
        }
    }

    fn check(&self) {
        for node in &self.nodes {
            let live = node.exchange.generation().map(|generation| generation.0);
            assert!(node.qps.keys().copied().eq(live), "seed {}: {:?} beside {live:?}", self.seed, node.qps);
        }
    }

    /// This side's QP is up and its remote end is a live QP of the other side's that is up and bound to it.
    fn agreed(&self, node: usize) -> bool {
        let [mine, theirs] = [&self.nodes[node], &self.nodes[1 - node]].map(|node| node.qps.values().next());
        match (mine, theirs) {
            (Some(mine), Some(theirs)) => {
                mine.up && theirs.up && mine.bound == Some(theirs.qpn) && theirs.bound == Some(mine.qpn)
            }
            _ => false,
        }
    }

    fn make_qp(&mut self, node: usize, generation: u64) {
        self.next_qpn += 1;
        let qp = Qp { qpn: self.next_qpn, bound: None, up: false };
        assert!(self.nodes[node].qps.insert(generation, qp).is_none(), "seed {}: a second QP", self.seed);
        self.nodes[node].proven = false;
    }

    fn retire(&mut self, node: usize, generation: u64) {
        assert!(self.nodes[node].qps.remove(&generation).is_some(), "seed {}: no QP to retire", self.seed);
        // Their hellos end with a refusal.
        let waiting = std::mem::take(&mut self.nodes[node].waiting);
        for (_, dial) in waiting {
            self.send(&Event::Refused { dial, status: Status::Internal });
        }
    }

    fn bind(&mut self, node: usize, generation: u64, remote: &Offer) {
        let qp = self.nodes[node].qps.get_mut(&generation).expect("the epoch has a QP");
        assert!(qp.bound.replace(remote.qp.qpn.get()).is_none(), "seed {}: a QP is bound twice", self.seed);
        let (delay, incarnation) = (self.below(1000), self.nodes[node].incarnation);
        let fails = !self.calm() && self.chance(5);
        self.at(self.now_ms + delay, Event::BroughtUp { node, incarnation, generation, fails });
    }

    fn answer(&mut self, node: usize, dial: Dial) {
        let generation = self.nodes[node].exchange.generation().expect("an epoch answers").0;
        let mut reply = self.offer(node, generation, dial.hello.generation.0);
        reply.to_incarnation = dial.hello.from_incarnation;
        self.send(&Event::Reply { dial, reply });
    }

    fn offer(&self, node: usize, generation: u64, echoed: u64) -> Offer {
        let name = |node: usize| (node as u128 + 1, self.nodes[node].incarnation);
        offer(name(node), name(1 - node), generation, echoed, self.nodes[node].qps[&generation].qpn)
    }

    /// Sends over the network of the hour.
    fn send(&mut self, event: &Event) {
        let (lost, doubled, longest) = if self.calm() { (0, 0, 500) } else { (20, 15, 20_000) };
        if self.chance(lost) {
            return;
        }
        let copies = if self.chance(doubled) { 2 } else { 1 };
        for _ in 0..copies {
            // Most are quick, some very late.
            let longest = if self.chance(70) { 50 } else { longest };
            let delay = self.below(longest);
            self.at(self.now_ms + delay, event.clone());
        }
    }

    fn waits(&self, dial: &Dial) -> bool {
        self.lives(dial) && self.nodes[dial.from].dialing == Some(dial.id)
    }

    fn lives(&self, dial: &Dial) -> bool {
        self.nodes[dial.from].incarnation == dial.hello.from_incarnation.0
    }

    fn calm(&self) -> bool {
        self.now_ms >= FAULTS_MS
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_millis(self.now_ms)
    }

    fn at(&mut self, when: u64, event: Event) {
        self.sequence += 1;
        self.queue.push(Reverse((when, self.sequence)));
        self.events.insert(self.sequence, event);
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = (self.random ^ (self.random >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (bits >> 32) % limit.max(1)
    }

    fn describe(&self) -> String {
        let [a, b] = &self.nodes;
        format!("{:?} {:?} | {:?} {:?}", a.exchange, a.qps, b.exchange, b.qps)
    }
}

fn node(index: usize, incarnation: u64, seed: u64) -> Node {
    let name = |index: usize| InstanceId(index as u128 + 1);
    let me = Identity { instance: name(index), incarnation: Incarnation(incarnation) };
    Node {
        incarnation,
        exchange: Exchange::new(me, name(1 - index), Plane::Messaging, Backoff::default(), seed ^ incarnation),
        qps: BTreeMap::new(),
        waiting: Vec::new(),
        dialing: None,
        last_good_ms: 0,
        proven: false,
    }
}
