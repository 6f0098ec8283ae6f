//! Failure and the end: everything comes home, and nothing hangs.

use std::{
    collections::BTreeSet,
    future::poll_fn,
    time::{Duration, Instant},
};

use verbs_transport::fabric::{Fabric, FabricQp, SendData, SendWr, Wc, WcStatus, WrSeq};

use crate::rig::{Rig, config, inline, leaving_nothing};

/// B11: a QP with sends to a peer that is gone is put to ERR; each signaled send comes back flushed, in bounded time,
/// and so does its end.
#[test]
fn to_error_flushes_what_is_outstanding() {
    leaving_nothing(async {
        let rig = Rig::new(&config());
        let (a, b) = rig.pair().await;
        drop(b);
        let texts: Vec<[u8; 8]> = (0..16_u64).map(u64::to_be_bytes).collect();
        let chain: Vec<SendWr<'_>> = texts
            .iter()
            .zip(0..)
            .map(|(text, seq)| SendWr { seq: WrSeq(seq), signaled: true, data: SendData::Inline(text) })
            .collect();
        a.post(&chain).expect("a post");
        a.to_error().expect("ERR");
        let start = Instant::now();
        let wcs = rig.poll_until(|wcs| wcs.len() >= 16);
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        let mut ended = BTreeSet::new();
        for wc in wcs {
            match wc {
                Wc::SendFailed { qpn, seq, status, .. } => {
                    assert_eq!((qpn, status), (a.qpn().get(), WcStatus::Flushed));
                    assert!(ended.insert(seq), "{seq:?} twice");
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(ended.len(), 16);
        assert!(!a.is_rts().expect("a state"));
        // In ERR a post is flushed, not refused.
        a.post(&[inline(16, b"late")]).expect("a post");
        let wcs = rig.poll_until(|wcs| !wcs.is_empty());
        assert!(matches!(wcs[..], [Wc::SendFailed { status: WcStatus::Flushed, .. }]), "{wcs:?}");
        let start = Instant::now();
        drop(a);
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    });
}

/// A dead peer ends in `RETRY_EXC` within the retry budget (timeout 14, 6 retries: 7 × 67 ms), then flushes.
#[test]
fn a_dead_peer_is_told_within_the_retry_budget() {
    leaving_nothing(async {
        let rig = Rig::new(&config());
        let (a, b) = rig.pair().await;
        drop(b);
        let start = Instant::now();
        a.post(&[inline(0, b"anyone?"), inline(1, b"behind")]).expect("a post");
        let wcs = rig.poll_until(|wcs| wcs.len() >= 2);
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        let statuses: Vec<_> = wcs
            .iter()
            .map(|wc| match wc {
                Wc::SendFailed { seq, status, .. } => (seq.0, *status),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(statuses, [(0, WcStatus::RetryExceeded), (1, WcStatus::Flushed)]);
    });
}

/// B10: closed 200 times in the middle of traffic, with events taken and not acknowledged, with events not taken, and
/// with sends in flight; no close hangs.
#[test]
fn closing_under_traffic_never_hangs() {
    leaving_nothing(async {
        for round in 0..200_u64 {
            let rig = Rig::new(&config());
            let (a, b) = rig.pair().await;
            for seq in 0..round % 5 {
                rig.device.arm().expect("armed");
                a.post(&[inline(seq, b"wake")]).expect("a post");
                poll_fn(|cx| rig.device.poll_wake(cx)).await.expect("a wake-up");
            }
            rig.device.arm().expect("armed");
            a.post(&[inline(98, b"never polled"), inline(99, b"nor this")]).expect("a post");
            b.post(&[inline(0, b"the other way")]).expect("a post");
            let start = Instant::now();
            if round % 2 == 0 {
                drop((a, b));
                drop(rig);
            } else {
                drop(rig); // the QPs hold on to all they need
                drop((a, b));
            }
            assert!(start.elapsed() < Duration::from_secs(5), "round {round}: {:?}", start.elapsed());
        }
    });
}
