//! The path without latency is fast, and works in real time on several threads.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::pair::*;
use crate::{
    fabric::{Fabric, FabricQp, SendData, SendWr, Wc, WrSeq},
    sim::{SimConfig, SimQp},
};

const ROUNDS: u64 = 100_000;

/// Takes the one message that is there, posts its slab again, and answers with the next number.
fn turn(side: &Side, qp: &SimQp, seq: u64, wcs: &mut Vec<Wc>, home: &mut Vec<crate::fabric::RecvSlab>) -> bool {
    side.fabric.poll(wcs).unwrap();
    let mut got = false;
    for wc in wcs.drain(..) {
        if let Wc::Receive { slab, .. } = wc {
            let mut number = [0; 8];
            side.fabric.read_slab(&slab, 0, &mut number);
            assert_eq!(u64::from_be_bytes(number), seq);
            home.push(slab);
            got = true;
        }
    }
    side.fabric.post_receives(home).unwrap();
    if got {
        post(qp, seq);
    }
    got
}

fn post(qp: &SimQp, seq: u64) {
    let number = seq.to_be_bytes();
    qp.post(&[SendWr { seq: WrSeq(seq), signaled: seq % 8 == 7, data: SendData::Inline(&number) }]).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_hundred_thousand_round_trips_are_a_matter_of_moments() {
    let mut pair = Pair::new().await;
    pair.a.post_receives(8);
    let (mut wcs, mut home) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for seq in 0..ROUNDS {
        // A's message `seq` goes out, B answers `seq`, A takes the answer with its next turn.
        if seq == 0 {
            post(&pair.qp_a, 0);
        }
        assert!(turn(&pair.b, &pair.qp_b, seq, &mut wcs, &mut home));
        take_answer(&pair, seq, &mut wcs, &mut home);
        if seq + 1 < ROUNDS {
            post(&pair.qp_a, seq + 1);
        }
    }
    let took = start.elapsed();
    println!("{:?} for a round trip", took / u32::try_from(ROUNDS).unwrap());
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(pair.world.stats().received, 2 * ROUNDS);
    assert_eq!(pair.world.stats().rnr_naks, 0);
}

fn take_answer(pair: &Pair, seq: u64, wcs: &mut Vec<Wc>, home: &mut Vec<crate::fabric::RecvSlab>) {
    pair.a.fabric.poll(wcs).unwrap();
    for wc in wcs.drain(..) {
        if let Wc::Receive { slab, .. } = wc {
            let mut number = [0; 8];
            pair.a.fabric.read_slab(&slab, 0, &mut number);
            assert_eq!(u64::from_be_bytes(number), seq);
            home.push(slab);
        }
    }
    pair.a.fabric.post_receives(home).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_wake_across_threads_in_real_time() {
    const MESSAGES: u64 = 20_000;
    let mut pair = Pair::with(SimConfig::default(), small(), |_| {}).await;
    let qp = Arc::clone(&pair.qp_a);
    let receiver = tokio::spawn(async move {
        let mut next = 0;
        while next < MESSAGES {
            pair.b.fabric.arm().unwrap();
            loop {
                let messages = pair.b.messages();
                for message in &messages {
                    assert_eq!(message[..], u64::to_be_bytes(next));
                    next += 1;
                }
                let count = pair.b.receives.len();
                pair.b.post_receives(count);
                if messages.is_empty() {
                    break;
                }
            }
            if next < MESSAGES {
                pair.b.wake().await;
            }
        }
        pair.b
    });
    let (mut sent, mut covered) = (0, 0);
    let mut wcs = Vec::new();
    while covered < MESSAGES {
        while sent < MESSAGES && sent < covered + 16 {
            post(&qp, sent);
            sent += 1;
        }
        pair.a.fabric.poll(&mut wcs).unwrap();
        for wc in wcs.drain(..) {
            let Wc::Send { seq, .. } = wc else { panic!("{wc:?}") };
            covered = seq.0 + 1;
        }
        tokio::task::yield_now().await;
    }
    receiver.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn latency_in_real_time_needs_nobody_to_poll() {
    let way = Duration::from_millis(20);
    let config = SimConfig { latency: way..=way, ..SimConfig::default() };
    let mut pair = Pair::with(config, small(), |_| {}).await;
    let start = Instant::now();
    pair.b.fabric.arm().unwrap();
    pair.send(b"x", false).unwrap();
    pair.b.wake().await;
    assert!(start.elapsed() >= way);
    assert_eq!(pair.b.messages(), [b"x"]);
}

#[test]
fn without_a_runtime_every_call_moves_time() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut pair = runtime.block_on(Pair::new());
    drop(runtime);
    pair.world.hold_receives(B, true);
    pair.send(b"x", true).unwrap();
    pair.world.hold_receives(B, false);
    let start = Instant::now();
    while pair.a.poll().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(5));
        std::thread::yield_now();
    }
    assert_eq!(pair.b.messages(), [b"x"]);
}

#[test]
fn a_world_outlives_its_runtime_and_moves_in_the_next() {
    let run = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let way = Duration::from_millis(5);
    let config = SimConfig { latency: way..=way, ..SimConfig::default() };
    let first = run();
    let mut pair = first.block_on(Pair::with(config, small(), |_| {}));
    first.block_on(async { pair.send(b"x", false).unwrap() });
    drop(first);
    run().block_on(async {
        pair.b.fabric.arm().unwrap();
        pair.send(b"y", false).unwrap();
        pair.b.wake().await;
    });
}
