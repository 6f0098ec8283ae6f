//! Wake-ups and async events.

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use tokio::time::timeout;
use verbs_transport::{
    fabric::{AsyncEvent, Fabric, FabricQp, Wc},
    verbs::DeviceConfig,
};

use crate::rig::{Rig, config, inline, leaving_nothing};

/// B09: arm, drain, wait over 20,000 messages from another thread; every one comes, none twice, and no wake-up is
/// lost: a stall of 5 s fails.
#[test]
fn no_wake_up_is_lost() {
    const MESSAGES: u64 = 20_000;
    leaving_nothing(async {
        let mut rig = Rig::new(&config());
        let (a, _b) = rig.pair().await;
        let received = Arc::new(AtomicU64::new(0));
        let sender = thread::spawn({
            let (a, received) = (Arc::clone(&a), Arc::clone(&received));
            move || {
                for seq in 0..MESSAGES {
                    while seq - received.load(Ordering::Acquire) >= 24 {
                        thread::yield_now();
                    }
                    a.post(&[inline(seq, &seq.to_be_bytes())]).expect("a post");
                }
            }
        });
        let (mut sends, mut wakes) = (0, 0_u64);
        while received.load(Ordering::Acquire) < MESSAGES || sends < MESSAGES {
            rig.device.arm().expect("armed");
            // Arm, then drain, then wait: what lands before the arming raises no event.
            let mut wcs = Vec::new();
            while rig.device.poll(&mut wcs).expect("a CQ") > 0 && wcs.len() < 256 {}
            let idle = wcs.is_empty();
            for wc in wcs {
                match wc {
                    Wc::Receive { slab, bytes, .. } => {
                        let next = received.load(Ordering::Acquire);
                        assert_eq!(rig.read(&slab, bytes), next.to_be_bytes());
                        rig.spare.push(slab);
                        rig.device.post_receives(&mut rig.spare).expect("room");
                        received.store(next + 1, Ordering::Release);
                    }
                    Wc::Send { seq, .. } => {
                        assert_eq!(seq.0, sends);
                        sends += 1;
                    }
                    failed => panic!("{failed:?}"),
                }
            }
            if idle && (received.load(Ordering::Acquire) < MESSAGES || sends < MESSAGES) {
                let wake = timeout(Duration::from_secs(5), poll_fn(|cx| rig.device.poll_wake(cx))).await;
                wake.unwrap_or_else(|_| panic!("stalled at {received:?} received, {sends} sent")).expect("a wake-up");
                wakes += 1;
            }
        }
        sender.join().expect("the sender");
        assert!(wakes > 0, "else nothing was shown");
    });
}

#[test]
fn nothing_wakes_without_a_completion() {
    leaving_nothing(async {
        let rig = Rig::new(&config());
        let (_a, _b) = rig.pair().await;
        rig.device.arm().expect("armed");
        let wake = timeout(Duration::from_millis(200), poll_fn(|cx| rig.device.poll_wake(cx))).await;
        assert!(wake.is_err(), "{wake:?}");
    });
}

/// The limit event comes once for each arming, when the count falls below the limit.
#[test]
fn the_srq_limit_fires_once_for_each_arming() {
    leaving_nothing(async {
        let mut rig = Rig::new(&config());
        let (a, _b) = rig.pair().await;
        let event = |within: u64| {
            let next = poll_fn(|cx| rig.device.poll_async_event(cx));
            async move { timeout(Duration::from_millis(within), next).await.map(|event| event.expect("an event")) }
        };
        for round in 0..3 {
            rig.device.arm_srq_limit(48).expect("armed");
            let mut slabs = Vec::new();
            for seq in 0..20 {
                a.post(&[inline(seq, b"one less")]).expect("a post");
                let wcs = rig.poll_until(|wcs| wcs.len() >= 2);
                slabs.extend(wcs.into_iter().filter_map(|wc| match wc {
                    Wc::Receive { slab, .. } => Some(slab),
                    _ => None,
                }));
                if seq == 15 {
                    assert!(event(50).await.is_err(), "48 are not below 48 (round {round})");
                }
            }
            assert_eq!(event(2_000).await, Ok(AsyncEvent::SrqLimitReached), "round {round}");
            assert!(event(50).await.is_err(), "only once (round {round})");
            assert_eq!(slabs.len(), 20);
            rig.device.post_receives(&mut slabs).expect("room");
        }
        rig.spare.clear();
    });
}

/// B13: more completions than the CQ holds are told as a device error, not a hang.
#[test]
fn a_cq_overrun_is_told() {
    leaving_nothing(async {
        let rig = Rig::new(&DeviceConfig { cq_depth: 3, ..config() });
        assert_eq!(rig.device.limits().cq_depth, 3);
        let (a, _b) = rig.pair().await;
        for seq in 0..8 {
            a.post(&[inline(seq, b"unpolled")]).expect("a post");
        }
        let event = timeout(Duration::from_secs(5), poll_fn(|cx| rig.device.poll_async_event(cx))).await;
        assert_eq!(event.expect("an event").expect("the device"), AsyncEvent::CqError);
    });
}
