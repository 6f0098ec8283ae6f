//! The rules of posting, completing and receiving.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

use super::pair::*;
use crate::{
    fabric::{AsyncEvent, FabricQp, QpCaps, SendData, SendWr, Wc, WcStatus, WrSeq},
    fabric::{CreateQpError, Fabric},
    sim::{HostConfig, SimConfig, SimWorld},
};

fn failed(wc: &Wc) -> Option<(u64, WcStatus)> {
    if let Wc::SendFailed { seq, status, .. } = wc { Some((seq.0, *status)) } else { None }
}

fn failures(wcs: &[Wc]) -> Vec<(u64, WcStatus)> {
    wcs.iter().filter_map(failed).collect()
}

#[tokio::test(start_paused = true)]
async fn messages_arrive_in_order_and_a_signaled_wc_covers_those_before() {
    let mut pair = Pair::new().await;
    for byte in 0..4u8 {
        pair.send(&[byte; 5], byte == 3).unwrap();
    }
    assert_eq!(pair.b.messages(), (0..4u8).map(|byte| vec![byte; 5]).collect::<Vec<_>>());
    assert_eq!(pair.a.poll(), [Wc::Send { qpn: pair.qp_a.qpn().get(), seq: WrSeq(3) }]);
    assert_eq!(pair.world.report().hosts[0].outstanding_wrs, 0);
}

#[tokio::test(start_paused = true)]
async fn unsignaled_sends_keep_their_slots_until_a_polled_wc_covers_them() {
    let mut pair = Pair::with(SimConfig::default(), HostConfig::default(), |_| {}).await;
    for _ in 0..15 {
        pair.send(b"x", false).unwrap();
    }
    assert!(pair.a.poll().is_empty());
    pair.send(b"x", true).unwrap();
    let refused = pair.send(b"x", false).unwrap_err();
    assert_eq!((refused.posted, refused.source.raw_os_error()), (0, Some(12)));
    assert_eq!(pair.a.poll().len(), 1);
    pair.send(b"x", false).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_chain_over_the_queue_is_taken_up_to_its_accepted_prefix() {
    let mut pair = Pair::with(SimConfig::default(), HostConfig::default(), |_| {}).await;
    for _ in 0..10 {
        pair.send(b"x", false).unwrap();
    }
    let wr = |seq| SendWr { seq: WrSeq(seq), signaled: false, data: SendData::Inline(b"y") };
    let chain: Vec<_> = (10..20).map(wr).collect();
    let refused = pair.qp_a.post(&chain).unwrap_err();
    assert_eq!((refused.posted, refused.asked), (6, 10));
    assert_eq!(pair.b.messages().len(), 16);
}

#[tokio::test(start_paused = true)]
async fn inline_above_the_grant_and_posts_before_connect_are_refused() {
    let mut pair = Pair::new().await;
    assert_eq!(pair.send(&[0; 257], true).unwrap_err().source.raw_os_error(), Some(22));
    let young = pair.a.qp();
    let wr = SendWr { seq: WrSeq(0), signaled: true, data: SendData::Inline(b"") };
    assert_eq!(young.post(&[wr]).unwrap_err().source.raw_os_error(), Some(22));
}

#[tokio::test(start_paused = true)]
async fn create_refuses_too_much_inline_and_too_many_qps() {
    let pair = Pair::with(SimConfig::default(), HostConfig { max_qps: 2, ..small() }, |_| {}).await;
    let ask = |inline_bytes| pair.a.fabric.create_qp(QpCaps { inline_bytes, ..CAPS });
    assert!(matches!(ask(513), Err(CreateQpError::Unsupported { .. })));
    let second = ask(512).unwrap();
    assert_eq!(second.caps().inline_bytes, 512);
    assert!(matches!(ask(0), Err(CreateQpError::Exhausted { device_qps: 2, .. })));
    drop(second);
    assert!(ask(0).is_ok());
}

#[tokio::test(start_paused = true)]
async fn one_srq_serves_all_qps_first_in_first_out() {
    let mut pair = Pair::new().await;
    let (other_a, other_b) = (pair.a.qp(), pair.b.qp());
    connect((&pair.a, &other_a), (&pair.b, &other_b), |_| {}).await.unwrap();
    pair.send(b"first", false).unwrap();
    let wr = SendWr { seq: WrSeq(0), signaled: false, data: SendData::Inline(b"second") };
    other_a.post(&[wr]).unwrap();
    let got: Vec<_> = pair
        .b
        .poll()
        .iter()
        .map(|wc| match wc {
            Wc::Receive { qpn, slab, bytes } => (*qpn, slab.index(), *bytes),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(got, [(pair.qp_b.qpn().get(), 0, 5), (other_b.qpn().get(), 1, 6)]);
}

#[tokio::test(start_paused = true)]
async fn empty_srq_is_an_rnr_nak_and_the_message_comes_after_a_refill() {
    let mut pair = Pair::new().await;
    for byte in 0..12u8 {
        pair.send(&[byte], byte == 11).unwrap();
    }
    assert_eq!(pair.b.messages().len(), 8);
    sleep(Duration::from_secs(5)).await;
    assert!(pair.a.poll().is_empty(), "rnr_retry 7 waits for ever");
    assert!(pair.world.stats().rnr_naks > 1000);
    pair.b.post_receives(8);
    sleep(Duration::from_millis(2)).await;
    assert_eq!(pair.b.messages(), (8..12u8).map(|byte| vec![byte]).collect::<Vec<_>>());
    assert_eq!(pair.a.poll().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn bounded_rnr_retries_end_in_an_error() {
    let mut pair = Pair::with(SimConfig::default(), small(), |path| path.timers.rnr_retry = 3).await;
    pair.world.hold_receives(B, true);
    pair.send(b"x", false).unwrap();
    pair.send(b"y", false).unwrap();
    sleep(Duration::from_millis(10)).await;
    assert_eq!(failures(&pair.a.poll()), [(0, WcStatus::RnrRetryExceeded), (1, WcStatus::Flushed)]);
    assert_eq!(pair.world.stats().rnr_naks, 4);
    assert!(pair.qp_b.is_rts().unwrap(), "the receiver hears nothing");
}

#[tokio::test(start_paused = true)]
async fn a_message_longer_than_the_slab_fails_on_both_sides() {
    let mut pair = Pair::new().await;
    let slab = pair.a.sends.remove(0);
    pair.send(b"ok", false).unwrap();
    pair.send_slab(&slab, 1025, false).unwrap();
    let wcs = pair.b.poll();
    assert!(matches!(wcs[1], Wc::ReceiveFailed { status: WcStatus::LocalLength, .. }), "{wcs:?}");
    assert_eq!(failures(&pair.a.poll()), [(1, WcStatus::RemoteInvalidRequest)]);
    assert!(!pair.qp_a.is_rts().unwrap() && !pair.qp_b.is_rts().unwrap());
}

#[tokio::test(start_paused = true)]
async fn to_error_flushes_everything_in_order_and_later_posts_too() {
    let mut pair = Pair::new().await;
    pair.world.hold_receives(B, true);
    for byte in 0..5u8 {
        pair.send(&[byte], false).unwrap();
    }
    pair.qp_a.to_error().unwrap();
    pair.send(b"late", false).unwrap();
    let want: Vec<_> = (0..6).map(|seq| (seq, WcStatus::Flushed)).collect();
    assert_eq!(failures(&pair.a.poll()), want);
    assert_eq!(pair.a.fabric.report().outstanding_wrs, 0);
    assert!(pair.b.poll().is_empty());
}

#[tokio::test(start_paused = true)]
async fn silent_peers_end_in_retry_exceeded_after_all_timeouts() {
    // 4.096 µs × 2^16 × 7 tries.
    let budget = Duration::from_nanos(7 * (4096 << 16));
    for case in ["destroyed", "in ERR", "killed", "wrong PSN", "wrong QPN", "cut", "port down", "other GID type"] {
        let mut config = small();
        config.slabs.receive_slabs = 4;
        let change = |path: &mut crate::fabric::QpPath| match case {
            "wrong PSN" => path.local_psn = verbs_bootstrap::Psn::new(4711).unwrap(),
            "wrong QPN" => path.remote.qpn = verbs_bootstrap::Qpn::new(0xabcd).unwrap(),
            _ => {}
        };
        let mut pair = Pair::with(SimConfig::default(), config, change).await;
        match case {
            "destroyed" => pair.qp_b = pair.b.qp(),
            "in ERR" => pair.qp_b.to_error().unwrap(),
            "killed" => pair.world.kill_host(B),
            "cut" => pair.world.cut(A, B),
            "port down" => pair.world.port_down(B),
            "other GID type" => {
                let other = HostConfig { gid_type: verbs_bootstrap::GidType::RoceV1, ..small() };
                let c = Side::new(&pair.world, [10, 0, 0, 3], other);
                let qp_c = c.qp();
                let qp_a = pair.a.qp();
                connect((&pair.a, &qp_a), (&c, &qp_c), |_| {}).await.unwrap();
                pair.qp_a = qp_a;
                pair.b = c;
                pair.qp_b = qp_c;
            }
            _ => {}
        }
        let start = Instant::now();
        pair.a.fabric.arm().unwrap();
        pair.send(b"x", false).unwrap();
        pair.send(b"y", false).unwrap();
        pair.a.wake().await;
        let took = start.elapsed();
        assert!(took >= budget && took < budget + Duration::from_millis(20), "{case}: {took:?}, not {budget:?}");
        assert_eq!(failures(&pair.a.poll()), [(0, WcStatus::RetryExceeded), (1, WcStatus::Flushed)], "{case}");
        assert!(!pair.qp_a.is_rts().unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn a_path_healed_in_time_loses_nothing() {
    let mut pair = Pair::new().await;
    pair.world.cut(A, B);
    pair.send(b"x", true).unwrap();
    sleep(Duration::from_secs(1)).await;
    pair.world.heal(A, B);
    sleep(Duration::from_millis(300)).await;
    assert_eq!(pair.b.messages(), [b"x"]);
    assert_eq!(pair.a.poll().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn every_delivery_starts_the_retries_anew() {
    let mut pair = Pair::with(SimConfig::default(), small(), |path| path.timers.rnr_retry = 3).await;
    for round in 0..6 {
        pair.world.cut(A, B);
        pair.send(b"x", true).unwrap();
        sleep(Duration::from_millis(1200)).await;
        pair.world.heal(A, B);
        sleep(Duration::from_millis(300)).await;
        pair.world.hold_receives(B, true);
        pair.send(b"y", true).unwrap();
        sleep(Duration::from_millis(1)).await;
        pair.world.hold_receives(B, false);
        sleep(Duration::from_millis(2)).await;
        assert_eq!(pair.a.poll().len(), 2);
        assert_eq!(pair.b.messages(), [b"x", b"y"], "round {round}");
        pair.b.post_receives(2);
    }
    assert!(pair.qp_a.is_rts().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_refusal_acknowledges_every_message_before_it() {
    let way = Duration::from_millis(10);
    let config = SimConfig { latency: way..=way, ..SimConfig::default() };
    let mut pair = Pair::with(config, small(), |path| path.timers.rnr_retry = 0).await;
    for _ in 0..9 {
        pair.send(b"x", true).unwrap();
    }
    pair.a.fabric.arm().unwrap();
    pair.a.wake().await;
    let wcs = pair.a.poll();
    assert!(wcs[..8].iter().all(|wc| matches!(wc, Wc::Send { .. })), "{wcs:?}");
    assert_eq!(failures(&wcs), [(8, WcStatus::RnrRetryExceeded)]);
}

#[tokio::test(start_paused = true)]
async fn retry_count_seven_never_ends() {
    let mut pair = Pair::with(SimConfig::default(), small(), |path| path.timers.retry_cnt = 7).await;
    pair.world.cut(A, B);
    pair.send(b"x", true).unwrap();
    sleep(Duration::from_secs(600)).await;
    assert!(pair.a.poll().is_empty() && pair.qp_a.is_rts().unwrap());
    pair.qp_a.to_error().unwrap();
    assert_eq!(failures(&pair.a.poll()), [(0, WcStatus::Flushed)]);
}

#[tokio::test(start_paused = true)]
async fn destroyed_qp_completes_nothing_more_but_its_old_wcs_stay() {
    let mut pair = Pair::new().await;
    let qpn = pair.qp_a.qpn().get();
    pair.send(b"x", true).unwrap();
    pair.world.hold_receives(B, true);
    pair.send(b"y", true).unwrap();
    pair.qp_a = pair.a.qp();
    assert_ne!(pair.qp_a.qpn().get(), qpn, "numbers are not used again soon");
    assert_eq!(pair.a.poll(), [Wc::Send { qpn, seq: WrSeq(0) }]);
    sleep(Duration::from_secs(10)).await;
    assert!(pair.a.poll().is_empty());
}

#[tokio::test(start_paused = true)]
async fn cq_overrun_loses_a_completion_and_breaks_the_cq() {
    let mut pair = Pair::with(SimConfig::default(), HostConfig { cq_depth: 4, ..small() }, |_| {}).await;
    for _ in 0..5 {
        pair.send(b"x", false).unwrap();
    }
    assert_eq!(pair.b.event(), Some(AsyncEvent::CqError));
    assert!(pair.b.fabric.poll(&mut Vec::new()).is_err());
    assert_eq!(pair.b.fabric.report().receive_slabs.lost, 1);
    assert_eq!(pair.world.stats().cq_overruns, 1);
}

#[tokio::test(start_paused = true)]
async fn channel_wakes_once_per_arming_and_not_for_what_is_there() {
    let mut pair = Pair::new().await;
    pair.send(b"x", false).unwrap();
    assert!(!pair.b.woken(), "not armed");
    pair.b.fabric.arm().unwrap();
    assert!(!pair.b.woken(), "was there before the arming");
    pair.send(b"y", false).unwrap();
    pair.send(b"z", false).unwrap();
    assert!(pair.b.woken());
    assert!(!pair.b.woken());
    pair.send(b"z", false).unwrap();
    assert!(!pair.b.woken(), "must be armed again");
}

#[tokio::test(start_paused = true)]
async fn srq_limit_is_one_async_event_per_arming() {
    let mut pair = Pair::new().await;
    pair.b.fabric.arm_srq_limit(7).unwrap();
    pair.send(b"x", false).unwrap();
    assert_eq!(pair.b.event(), None);
    pair.send(b"x", false).unwrap();
    assert_eq!(pair.b.event(), Some(AsyncEvent::SrqLimitReached));
    pair.send(b"x", false).unwrap();
    assert_eq!(pair.b.event(), None);
    pair.b.fabric.arm_srq_limit(7).unwrap();
    assert_eq!(pair.b.event(), None, "only at the next receive");
    pair.send(b"x", false).unwrap();
    assert_eq!(pair.b.event(), Some(AsyncEvent::SrqLimitReached));
}

#[tokio::test(start_paused = true)]
async fn path_mtu_above_a_port_hangs_without_a_word() {
    let config = HostConfig { mtu: verbs_bootstrap::Mtu::B512, ..small() };
    let mut pair = Pair::with(SimConfig::default(), config, |_| {}).await;
    pair.send(b"x", true).unwrap();
    sleep(Duration::from_secs(60)).await;
    assert!(pair.a.poll().is_empty() && pair.b.poll().is_empty() && pair.qp_a.is_rts().unwrap());
    pair.qp_a.to_error().unwrap();
    assert_eq!(pair.a.poll().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn connect_says_no_route_for_a_gid_of_another_family_or_of_nobody() {
    let pair = Pair::new().await;
    for (gid, at_least) in [([0xfe; 16], 0), (std::array::from_fn(|at| if at < 10 { 0 } else { 0xff }), 1)] {
        let (a, b) = (pair.a.qp(), pair.b.qp());
        let start = Instant::now();
        let change = |path: &mut crate::fabric::QpPath| path.remote_port.gid = verbs_bootstrap::Gid(gid);
        let error = connect((&pair.a, &a), (&pair.b, &b), change).await.unwrap_err();
        assert!(error.to_string().contains("no route"), "{error}");
        assert!(start.elapsed().as_secs() >= at_least);
    }
}

#[tokio::test(start_paused = true)]
async fn own_port_down_fails_the_next_send_and_says_so() {
    let mut pair = Pair::new().await;
    pair.world.port_down(A);
    assert_eq!(pair.a.event(), Some(AsyncEvent::PortDown));
    pair.send(b"x", false).unwrap();
    assert_eq!(failures(&pair.a.poll()), [(0, WcStatus::LocalQpOperation)]);
    pair.world.port_up(A);
    assert_eq!(pair.a.event(), Some(AsyncEvent::PortUp));
}

#[tokio::test(start_paused = true)]
async fn affiliated_events_come_on_a_nic_and_not_on_soft_roce() {
    for affiliated_events in [true, false] {
        let pair = Pair::with(SimConfig::default(), HostConfig { affiliated_events, ..small() }, |_| {}).await;
        let qpn = pair.qp_a.qpn().get();
        assert!(pair.world.force_qp_error(A, qpn));
        let events = [pair.a.event(), pair.a.event()];
        let want = [Some(AsyncEvent::QpFatal { qpn }), Some(AsyncEvent::QpLastWqe { qpn })];
        assert_eq!(events, if affiliated_events { want } else { [None, None] });
    }
}

#[tokio::test(start_paused = true)]
async fn bytes_of_a_send_slab_are_read_when_the_message_is_delivered() {
    let mut pair = Pair::new().await;
    let mut slab = pair.a.sends.remove(0);
    pair.a.fabric.write_slab(&mut slab, 0, b"slab");
    pair.send_slab(&slab, 4, true).unwrap();
    assert_eq!(pair.b.messages(), [b"slab"]);
    assert_eq!(pair.a.fabric.report().send_slabs_in_flight, 1);
    assert_eq!(pair.a.poll().len(), 1);
    pair.a.fabric.write_slab(&mut slab, 0, b"free again");
    pair.qp_a.to_error().unwrap();
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "send slab 0 rewritten before a WC covered its WR")]
async fn rewriting_a_send_slab_too_early_is_our_bug() {
    let mut pair = Pair::new().await;
    let mut slab = pair.a.sends.remove(0);
    pair.send_slab(&slab, 4, true).unwrap();
    pair.a.fabric.write_slab(&mut slab, 0, b"early");
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "send slab 0 posted again before a WC covered its WR")]
async fn posting_a_send_slab_twice_is_our_bug() {
    let mut pair = Pair::new().await;
    let slab = pair.a.sends.remove(0);
    pair.send_slab(&slab, 4, false).unwrap();
    pair.send_slab(&slab, 4, false).unwrap();
}

#[tokio::test(start_paused = true)]
async fn killed_host_fails_its_own_calls_and_a_restart_takes_its_address() {
    let pair = Pair::new().await;
    pair.world.kill_host(B);
    assert_eq!(pair.b.event(), Some(AsyncEvent::DeviceFatal));
    assert!(pair.b.fabric.poll(&mut Vec::new()).is_err() && pair.b.fabric.create_qp(CAPS).is_err());
    let mut again = Side::new(&pair.world, B, small());
    again.post_receives(4);
    let (qp_a, qp_b) = (pair.a.qp(), again.qp());
    connect((&pair.a, &qp_a), (&again, &qp_b), |_| {}).await.unwrap();
    qp_a.post(&[SendWr { seq: WrSeq(0), signaled: true, data: SendData::Inline(b"hello") }]).unwrap();
    assert_eq!(again.messages(), [b"hello"]);
}

#[tokio::test(start_paused = true)]
async fn latency_delays_messages_and_acknowledgements_and_keeps_their_order() {
    let latency = Duration::from_millis(10)..=Duration::from_millis(30);
    let mut pair = Pair::with(SimConfig { seed: 5, latency, ..SimConfig::default() }, small(), |_| {}).await;
    for byte in 0..8u8 {
        pair.send(&[byte], byte == 7).unwrap();
    }
    assert!(pair.b.poll().is_empty());
    pair.a.fabric.arm().unwrap();
    let start = Instant::now();
    pair.a.wake().await;
    assert!(start.elapsed() >= Duration::from_millis(20));
    assert_eq!(pair.b.messages(), (0..8u8).map(|byte| vec![byte]).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_world_that_is_dropped_takes_its_pump_with_it() {
    let mut pair = Pair::new().await;
    pair.world.hold_receives(B, true);
    pair.send(b"x", false).unwrap();
    tokio::task::yield_now().await;
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 1);
    drop(pair);
    sleep(Duration::from_millis(5)).await;
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_leak_check_names_what_is_left() {
    let mut pair = Pair::new().await;
    pair.send(b"x", true).unwrap();
    let report = pair.world.report();
    assert!(!report.is_quiet());
    assert!(report.to_string().contains("1 QPs, 1 WRs outstanding, 1 CQEs unpolled"), "{report}");
    pair.a.poll();
    assert_eq!(pair.b.messages().len(), 1);
    let (world, a, b) = (pair.world.clone(), Arc::downgrade(&pair.qp_a), Arc::downgrade(&pair.qp_b));
    (pair.qp_a, pair.qp_b) = (pair.a.qp(), pair.b.qp());
    assert!(a.upgrade().is_none() && b.upgrade().is_none());
    drop(pair);
    world.assert_quiet();
}

#[tokio::test(start_paused = true)]
async fn two_processes_on_one_machine_share_its_numbers_and_reach_each_other() {
    let world = SimWorld::new(SimConfig::default());
    let (one, mut two) = (Side::new(&world, A, small()), Side::new(&world, A, small()));
    two.post_receives(1);
    let (qp_one, qp_two) = (one.qp(), two.qp());
    assert_ne!(qp_one.qpn(), qp_two.qpn());
    connect((&one, &qp_one), (&two, &qp_two), |_| {}).await.unwrap();
    qp_one.post(&[SendWr { seq: WrSeq(0), signaled: false, data: SendData::Inline(b"hello") }]).unwrap();
    assert_eq!(two.messages(), [b"hello"]);
}

#[tokio::test(start_paused = true)]
async fn hosts_use_the_same_qp_numbers_for_different_qps() {
    let world = SimWorld::new(SimConfig::default());
    let (a, b) = (Side::new(&world, A, small()), Side::new(&world, B, small()));
    let numbers = |side: &Side| (0..40).map(|_| side.qp().qpn().get()).collect::<std::collections::BTreeSet<_>>();
    let (at_a, at_b) = (numbers(&a), numbers(&b));
    assert_ne!(at_a.first(), at_b.first());
    assert!(!at_a.is_disjoint(&at_b));
}
