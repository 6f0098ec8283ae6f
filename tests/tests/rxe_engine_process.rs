//! Engines in processes of their own over this machine's RDMA device: replaced, and killed in each phase.

#![allow(clippy::duplicate_mod, reason = "each suite has what they share as its own")]

#[path = "../../engine/tests/common/mod.rs"]
mod common;
#[path = "../../engine/tests/restart.rs"]
mod restart;

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use common::{
    LONG, bytes_of, engine, eventually, memory, pattern,
    proxy::{self, By, FRAMES, Fate, Rule, is},
};
use verbs_engine::{Config, Direction, Engine, Epoch, Permission, RemoteEffect, TransferRequest};

const LENGTH: usize = 200_000;
const ROLE: &str = "RXE_ENGINE_ROLE";

/// Not a test of its own: the parent starts this very program with the environment that makes it one side or the other.
#[test]
fn other_side() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["source"] => {
            let source = engine(Config::default());
            let served = memory(&source, LENGTH, Permission::RemoteReadWrite);
            served.write(0, &pattern(LENGTH, 11)).expect("in range");
            println!("\nUP {} {} {}", source.endpoint(), source.epoch(), served.address());
            // Until the parent is gone.
            let _ = std::io::stdin().lines().next();
        }
        ["requester", direction, endpoint, epoch, address] => {
            let direction = if direction == "read" { Direction::Read } else { Direction::Write };
            let requester = engine(Config::default());
            let local = memory(&requester, LENGTH, Permission::LocalOnly);
            local.write(0, &pattern(LENGTH, 99)).expect("in range");
            let (endpoint, epoch) = (endpoint.parse().expect("an address"), epoch.parse().expect("an epoch"));
            let peer = requester.open_segment(endpoint, epoch, LONG).expect("it listens");
            println!("\nUP");
            let remote_address = address.parse().expect("a number");
            let request = TransferRequest { local_address: local.address(), remote_address, length: LENGTH as u64 };
            let _ = requester.submit_and_wait(&peer, direction, &[request], LONG);
            // It does not end by itself.
            let _ = std::io::stdin().lines().next();
        }
        _ => panic!("what is {role}?"),
    }
}

/// Starts the other side; what it said when it was up.
fn start(role: &str) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().expect("a program knows where it is"))
        .args(["other_side", "--exact", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this very program");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let mut lines = output.lines().map_while(Result::ok);
    let up = lines.find_map(|line| line.strip_prefix("UP").map(|rest| rest.trim().to_owned())).expect("it comes up");
    // It must not find its output closed.
    std::thread::spawn(move || lines.for_each(drop));
    (child, up)
}

/// Kills whatever is in `victim` at the first such frame, which is lost; the rest passes.
fn kill_at(frame: (By, u8), armed: &Arc<AtomicBool>, victim: &Arc<Mutex<Option<Child>>>) -> Rule {
    let (armed, victim) = (Arc::clone(armed), Arc::clone(victim));
    Arc::new(move |by, kind, _| {
        if !is(frame, by, kind) || !armed.load(SeqCst) {
            return Fate::Pass;
        }
        if let Some(mut child) = victim.lock().expect("no panic").take() {
            child.kill().expect("a child of ours");
            child.wait().expect("a child of ours");
        }
        Fate::Lost
    })
}

fn settled(engine: &Engine, what: &str) {
    eventually(what, || {
        let s = engine.stats();
        (s.submissions, s.source_operations, s.grants) == (0, 0, 0)
            && (s.rdma_connecting, s.rdma_busy, s.rdma_closing) == (0, 0, 0)
    });
}

/// ET-11: the source dies. The requester is told in time, with the right effect, and lets everything go.
#[test]
fn a_source_killed_in_each_phase() {
    let requester = engine(Config::default());
    let local = memory(&requester, LENGTH, Permission::LocalOnly);
    for (place, frame) in FRAMES.into_iter().enumerate() {
        let direction = if place % 2 == 0 { Direction::Read } else { Direction::Write };
        let what = format!("{direction:?}, {frame:?}");
        let (child, up) = start("source");
        let fields: Vec<&str> = up.split(' ').collect();
        let epoch: Epoch = fields[1].parse().expect("an epoch");
        let (armed, victim) = (Arc::<AtomicBool>::default(), Arc::new(Mutex::new(Some(child))));
        let endpoint = proxy::start(fields[0].parse().expect("an address"), kill_at(frame, &armed, &victim));
        let peer = requester.open_segment(endpoint, epoch, LONG).expect("it listens");
        armed.store(true, SeqCst);
        local.write(0, &pattern(LENGTH, 50)).expect("in range");
        let remote_address = fields[2].parse().expect("a number");
        let request = TransferRequest { local_address: local.address(), remote_address, length: LENGTH as u64 };
        let began = Instant::now();
        let report = requester.submit_and_wait(&peer, direction, &[request], LONG).expect("sound");
        assert!(began.elapsed() < Duration::from_secs(15), "{what}: after {:?}", began.elapsed());
        // READY is the last word: by then it is done.
        assert_eq!(report.is_complete(), place == 10, "{what}: {report:?}");
        if let Some(failure) = report.failure {
            let unknown = direction == Direction::Write && place > 7;
            let effect = if unknown { RemoteEffect::Unknown } else { RemoteEffect::None };
            assert_eq!(failure.effect, effect, "{what}: {failure}");
            assert!(direction == Direction::Write || bytes_of(&local) == pattern(LENGTH, 50), "{what}");
        }
        settled(&requester, &what);
    }
}

/// ET-11: the requester dies. The source lets its range go by itself, and has all of a WRITE or nothing.
#[test]
fn a_requester_killed_in_each_phase() {
    let source = engine(Config::default());
    let served = memory(&source, LENGTH, Permission::RemoteReadWrite);
    for (place, frame) in FRAMES.into_iter().enumerate() {
        let direction = if place % 2 == 0 { "write" } else { "read" };
        let what = format!("{direction}, {frame:?}");
        served.write(0, &pattern(LENGTH, 11)).expect("in range");
        let (armed, victim) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(None)));
        // The reply to its description is of the same kind as the offer: that one passes.
        let descriptions = AtomicBool::new(true);
        let rule = kill_at(frame, &armed, &victim);
        let rule: Rule = Arc::new(move |by, kind, bytes| {
            if (by, kind) == (By::Source, 0) && descriptions.swap(false, SeqCst) {
                return Fate::Pass;
            }
            rule(by, kind, bytes)
        });
        // The child may not run into the frame before it can be found.
        let gate = Arc::clone(&victim);
        let held: Rule = Arc::new(move |by, kind, bytes| {
            while matches!(kind, 204 | 205) && gate.lock().expect("no panic").is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            rule(by, kind, bytes)
        });
        let endpoint = proxy::start(source.endpoint(), held);
        let (child, _) = start(&format!("requester {direction} {endpoint} {} {}", source.epoch(), served.address()));
        *victim.lock().expect("no panic") = Some(child);
        eventually(&what, || victim.lock().expect("no panic").is_none());
        settled(&source, &what);
        let now = bytes_of(&served);
        let (old, new) = (pattern(LENGTH, 11), pattern(LENGTH, 99));
        // With DONE it is committed.
        let committed = direction == "write" && place > 8;
        assert!(now == if committed { new } else { old }, "{what}");
    }
    source.close_source(LONG).expect("nobody is inside");
}
