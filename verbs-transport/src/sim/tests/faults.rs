//! Two hosts exchange numbered messages while faults strike. Whatever happens, order and count hold, nothing is lost
//! from the pools, and the same seed gives the same run.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout};

use super::pair::*;
use crate::{
    fabric::{Fabric, FabricQp, SendData, SendWr, SlabSizes, Wc, WrSeq},
    sim::{FaultCounts, Faults, HostConfig, SimConfig, SimQp, SimWorld},
};

const MESSAGES: u32 = 60;
const QUIET: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct Outcome {
    received: u32,
    covered: u64,
    failed: bool,
}

/// Sends `MESSAGES` and takes as many, as a worker does: arm, drain, wait.
async fn exchange(side: &mut Side, qp: &SimQp) -> Outcome {
    let mut out = Outcome::default();
    let mut wcs = Vec::new();
    let mut sent = 0;
    loop {
        side.fabric.arm().unwrap();
        while side.fabric.poll(&mut wcs).unwrap() > 0 {
            for wc in wcs.drain(..) {
                take(side, wc, &mut out);
            }
        }
        side.fabric.post_receives(&mut side.receives).unwrap();
        while !out.failed && sent < u64::from(MESSAGES) && sent < out.covered + 16 {
            out.failed = post(side, qp, sent).is_err();
            sent += u64::from(!out.failed);
        }
        let done = out.received == MESSAGES && out.covered == u64::from(MESSAGES);
        if done || out.failed || timeout(QUIET, side.wake()).await.is_err() {
            return out;
        }
    }
}

/// Message `seq`: short ones inline, long ones (two packets) from a slab.
fn post(side: &mut Side, qp: &SimQp, seq: u64) -> Result<(), crate::fabric::PostError> {
    let number = seq.to_be_bytes();
    let signaled = seq % 4 == 3 || seq + 1 == u64::from(MESSAGES);
    let at = usize::try_from(seq % 16).unwrap();
    let data = if seq % 3 == 0 {
        side.fabric.write_slab(&mut side.sends[at], 0, &number);
        SendData::Slab { slab: &side.sends[at], len: 1500 }
    } else {
        SendData::Inline(&number)
    };
    qp.post(&[SendWr { seq: WrSeq(seq), signaled, data }])
}

fn take(side: &mut Side, wc: Wc, out: &mut Outcome) {
    match wc {
        Wc::Receive { slab, .. } => {
            let mut number = [0; 8];
            side.fabric.read_slab(&slab, 0, &mut number);
            assert_eq!(u64::from_be_bytes(number), u64::from(out.received), "in order, none twice");
            out.received += 1;
            side.receives.push(slab);
        }
        Wc::ReceiveFailed { slab, .. } => side.receives.push(slab),
        Wc::Send { seq, .. } => out.covered = seq.0 + 1,
        Wc::SendFailed { .. } => out.failed = true,
    }
}

/// To ERR, poll until quiet, destroy.
async fn settle(side: &mut Side, qp: Arc<SimQp>, out: &mut Outcome) {
    qp.to_error().unwrap();
    for _ in 0..20 {
        side.poll().into_iter().for_each(|wc| take(side, wc, out));
        sleep(Duration::from_millis(5)).await;
    }
    drop(qp);
}

async fn run(seed: u64, faults: Faults) -> (u64, [Outcome; 2], FaultCounts) {
    let latency = Duration::ZERO..=Duration::from_millis(2);
    let world = SimWorld::new(SimConfig { faults, latency, ..SimConfig::seeded(seed) });
    let slabs = SlabSizes { receive_slabs: 32, receive_bytes: 2048, send_slabs: 16, send_bytes: 2048 };
    let host = HostConfig { slabs, ..HostConfig::default() };
    let (mut a, mut b) = (Side::new(&world, A, host), Side::new(&world, B, host));
    let (qp_a, qp_b) = loop {
        let Ok(qp_a) = a.fabric.create_qp(CAPS).map(Arc::new) else { continue };
        let Ok(qp_b) = b.fabric.create_qp(CAPS).map(Arc::new) else { continue };
        if connect((&a, &qp_a), (&b, &qp_b), |_| {}).await.is_ok() {
            break (qp_a, qp_b);
        }
    };
    a.fabric.post_receives(&mut a.receives).unwrap();
    b.fabric.post_receives(&mut b.receives).unwrap();
    let (mut out_a, mut out_b) = tokio::join!(exchange(&mut a, &qp_a), exchange(&mut b, &qp_b));
    world.stop_faults();
    tokio::join!(settle(&mut a, qp_a, &mut out_a), settle(&mut b, qp_b, &mut out_b));
    let report = world.report();
    assert!(report.is_quiet(), "{report}");
    for side in [&report.hosts[0], &report.hosts[1]] {
        assert_eq!(side.receive_slabs.posted + side.receive_slabs.with_caller, 32, "{report}");
    }
    assert!(u64::from(out_b.received) >= out_a.covered, "a WC covers only what has arrived");
    assert!(u64::from(out_a.received) >= out_b.covered, "a WC covers only what has arrived");
    (world.trace(), [out_a, out_b], world.fault_counts())
}

fn fake_time<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(future)
}

#[test]
fn unpunctual_worlds_lose_nothing() {
    let mut struck = [0; 6];
    for seed in 0..60 {
        let (_, outcomes, counts) = fake_time(run(seed, Faults::unpunctual()));
        for outcome in &outcomes {
            assert!(!outcome.failed && outcome.received == MESSAGES, "seed {seed}: {outcomes:?}");
        }
        let seen = [
            counts.delays,
            counts.late_completions,
            counts.spurious_wakes,
            counts.rnr_storms,
            counts.half_received,
            counts.slow_connects,
        ];
        struck.iter_mut().zip(seen).for_each(|(sum, count)| *sum += count);
    }
    assert!(struck.iter().all(|count| *count > 0), "{struck:?}");
}

#[test]
fn harsh_worlds_break_connections_and_keep_order_and_slabs() {
    let mut broken = 0;
    for seed in 0..150 {
        let (_, outcomes, _) = fake_time(run(seed, Faults::harsh()));
        broken += u32::from(outcomes.iter().any(|outcome| outcome.received < MESSAGES || outcome.failed));
    }
    assert!((10..150).contains(&broken), "{broken} of 150 runs broke");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let trace = |seed| fake_time(run(seed, Faults::harsh())).0;
    let traces: Vec<_> = (0..20).map(trace).collect();
    assert_eq!(traces, (0..20).map(trace).collect::<Vec<_>>());
    let different: std::collections::BTreeSet<_> = traces.iter().collect();
    assert_eq!(different.len(), 20);
}

/// A pair whose world has just this fault.
async fn pair_with(faults: Faults) -> Pair {
    let mut host = small();
    host.slabs.receive_bytes = 2048;
    Pair::with(SimConfig { faults, ..SimConfig::seeded(1) }, host, |_| {}).await
}

#[tokio::test(start_paused = true)]
async fn lost_acks_deliver_and_still_fail_at_the_sender() {
    let mut pair = pair_with(Faults { lost_ack: 1.0, ..Faults::none() }).await;
    pair.send(b"x", true).unwrap();
    pair.send(b"y", true).unwrap();
    assert_eq!(pair.b.messages(), [b"x", b"y"]);
    sleep(Duration::from_millis(1800)).await;
    assert!(pair.a.poll().is_empty());
    sleep(Duration::from_millis(200)).await;
    assert!(matches!(pair.a.poll()[..], [Wc::SendFailed { .. }, Wc::SendFailed { .. }]));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_after_a_lost_ack_is_lost_too() {
    let mut pair = pair_with(Faults { lost_ack: 1.0, ..Faults::none() }).await;
    pair.send(b"x", true).unwrap();
    let slab = pair.a.sends.remove(0);
    pair.send_slab(&slab, 2048, true).unwrap();
    pair.qp_b.to_error().unwrap();
    pair.send(b"y", true).unwrap();
    sleep(Duration::from_secs(5)).await;
    let statuses: Vec<_> = pair.a.poll().into_iter().map(|wc| format!("{wc:?}")).collect();
    assert!(statuses[0].contains("RetryExceeded") && statuses.len() == 3, "{statuses:?}");
    assert!(statuses[1..].iter().all(|status| status.contains("Flushed")), "{statuses:?}");
}

#[tokio::test(start_paused = true)]
async fn half_received_message_holds_its_slab_until_its_qp_is_in_err() {
    let hour = Duration::from_secs(3600);
    let faults = Faults { half_received: 1.0, half_received_for: hour..=hour, ..Faults::none() };
    let mut pair = pair_with(faults).await;
    let slab = pair.a.sends.remove(0);
    pair.send_slab(&slab, 1500, true).unwrap();
    assert_eq!(pair.b.fabric.report().receive_slabs.filling, 1);
    pair.world.kill_host(A);
    sleep(Duration::from_secs(60)).await;
    assert!(pair.b.poll().is_empty(), "the receiver hears nothing, ever");
    pair.qp_b.to_error().unwrap();
    assert!(matches!(pair.b.poll()[..], [Wc::ReceiveFailed { .. }]));
}

#[tokio::test(start_paused = true)]
async fn half_received_message_is_lost_if_its_qp_is_destroyed_without_err() {
    let hour = Duration::from_secs(3600);
    let faults = Faults { half_received: 1.0, half_received_for: hour..=hour, ..Faults::none() };
    let mut pair = pair_with(faults).await;
    let slab = pair.a.sends.remove(0);
    pair.send_slab(&slab, 1500, true).unwrap();
    pair.qp_b = pair.b.qp();
    assert_eq!(pair.b.fabric.report().receive_slabs.lost, 1);
}

#[tokio::test(start_paused = true)]
async fn lost_flushes_never_come() {
    let mut pair = pair_with(Faults { lost_flush: 1.0, ..Faults::none() }).await;
    pair.world.cut(A, B);
    pair.send(b"x", true).unwrap();
    pair.send(b"y", true).unwrap();
    sleep(Duration::from_secs(3)).await;
    assert!(matches!(pair.a.poll()[..], [Wc::SendFailed { seq: WrSeq(0), .. }]), "only the failure itself");
    assert_eq!(pair.a.fabric.report().outstanding_wrs, 1);
}

#[tokio::test(start_paused = true)]
async fn late_and_heaped_completions_come_late() {
    let late = Duration::from_millis(30);
    let faults = Faults {
        late_completion: 1.0,
        late_completion_by: late..=late,
        coalesce_completions: Duration::from_millis(100),
        ..Faults::none()
    };
    let mut pair = pair_with(faults).await;
    let start = Instant::now();
    for _ in 0..4 {
        pair.send(b"x", true).unwrap();
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(pair.b.messages().len(), 4);
    pair.a.fabric.arm().unwrap();
    pair.a.wake().await;
    assert!(start.elapsed() >= Duration::from_millis(99));
    assert_eq!(pair.a.poll().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn spurious_wakes_come_without_a_completion() {
    let pair = pair_with(Faults { spurious_wake: 1.0, ..Faults::none() }).await;
    pair.a.fabric.arm().unwrap();
    pair.a.wake().await;
    assert!(pair.a.poll().is_empty());
}

#[tokio::test(start_paused = true)]
async fn faults_that_are_stopped_strike_no_more() {
    let faults = Faults { qp_error: 1.0, post_refused: 1.0, rnr_storm: 1.0, ..Faults::none() };
    let mut pair = pair_with(faults).await;
    assert!(pair.send(b"x", true).is_err());
    pair.world.stop_faults();
    pair.send(b"x", true).unwrap();
    assert_eq!(pair.b.messages(), [b"x"]);
    assert_eq!(pair.world.fault_counts(), FaultCounts { refused_posts: 1, ..FaultCounts::default() });
}

#[tokio::test(start_paused = true)]
async fn a_port_that_is_down_may_hang_its_qps_for_ever() {
    let mut pair = pair_with(Faults { port_down_hangs: 1.0, ..Faults::none() }).await;
    pair.world.port_down(A);
    pair.send(b"x", true).unwrap();
    pair.world.port_up(A);
    sleep(Duration::from_secs(60)).await;
    assert!(pair.a.poll().is_empty() && pair.b.poll().is_empty() && pair.qp_a.is_rts().unwrap());
}

#[tokio::test(start_paused = true)]
async fn qps_fall_on_either_side_and_the_other_hears_nothing() {
    let mut fallen = [0; 2];
    for seed in 0..20 {
        let faults = Faults { qp_error: 1.0, ..Faults::none() };
        let mut pair = Pair::with(SimConfig { faults, ..SimConfig::seeded(seed) }, small(), |_| {}).await;
        pair.send(b"x", true).unwrap();
        let alive = (pair.qp_a.is_rts().unwrap(), pair.qp_b.is_rts().unwrap());
        assert!(alive == (true, false) || alive == (false, true), "{alive:?}");
        fallen[usize::from(alive.0)] += 1;
        assert_eq!(pair.b.event(), None);
    }
    assert!(fallen.iter().all(|count| *count > 2), "{fallen:?}");
}

#[tokio::test(start_paused = true)]
async fn making_and_connecting_qps_may_fail_or_be_slow() {
    let second = Duration::from_secs(1);
    let of = |faults| SimWorld::new(SimConfig { faults, ..SimConfig::default() });
    let exhausted = of(Faults { create_qp_exhausted: 1.0, ..Faults::none() }).host(A, small());
    assert!(exhausted.create_qp(CAPS).unwrap_err().to_string().contains("no QP to be had"));
    for (faults, fine) in [
        (Faults { connect_no_route: 1.0, ..Faults::none() }, false),
        (Faults { connect_slow: 1.0, connect_slow_by: second..=second, ..Faults::none() }, true),
    ] {
        let world = of(faults);
        let (a, b) = (Side::new(&world, A, small()), Side::new(&world, B, small()));
        let start = Instant::now();
        assert_eq!(connect((&a, &a.qp()), (&b, &b.qp()), |_| {}).await.is_ok(), fine);
        assert!(start.elapsed() >= second);
    }
}
