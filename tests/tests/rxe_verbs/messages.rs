//! Bytes from one QP to another.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use verbs_bootstrap::Mtu;
use verbs_tests::leaks::hw_counter;
use verbs_transport::{
    Config,
    fabric::{Fabric, FabricQp, POST_BATCH, QpPath, SendData, SendWr, Wc, WrSeq},
    verbs::{DeviceConfig, DeviceQp},
};

use crate::rig::{Rig, config, connect, from_slab, inline, leaving_nothing, open, path_to, pattern};

/// B17: both sides of the inline limit, and of the slab's.
#[test]
fn every_size_at_a_limit_arrives_intact() {
    leaving_nothing(async {
        let mut rig = Rig::new(&config());
        let (a, _b) = rig.pair().await;
        let granted = a.caps().inline_bytes as usize;
        for (seq, len) in [0, 1, granted - 1, granted].into_iter().enumerate() {
            let message = pattern(seq, len);
            a.post(&[inline(seq as u64, &message)]).expect("a post");
            assert_eq!(rig.receive_one(), message, "{len} inline");
        }
        let mut slab = rig.send_slabs.pop().expect("a slab");
        for (seq, len) in [0, 1, granted, granted + 1, 4096, 8191, 8192].into_iter().enumerate() {
            let message = pattern(seq, len);
            rig.device.write_slab(&mut slab, 0, &message);
            a.post(&[from_slab(seq as u64, &slab, u32::try_from(len).expect("small"))]).expect("a post");
            assert_eq!(rig.receive_one(), message, "{len} copied");
        }
        let beyond = pattern(0, granted + 1);
        let error = a.post(&[inline(99, b"fits"), inline(100, &beyond)]).expect_err("more than granted");
        assert_eq!((error.posted, error.asked), (0, 2), "{error}");
        let error = a.post(&[from_slab(101, &slab, 8193)]).expect_err("more than a slab");
        assert_eq!(error.posted, 0, "{error}");
        a.post(&[inline(102, b"still alive")]).expect("a post");
        assert_eq!(rig.receive_one(), b"still alive");
    });
}

/// Receives go back in chains; no message is lost, doubled or out of order, and unsignaled sends cost nothing.
#[test]
fn slabs_go_round_in_chains() {
    const MESSAGES: u64 = 2_000;
    leaving_nothing(async {
        let mut rig = Rig::new(&config());
        let (a, b) = rig.pair().await;
        let (mut sent, mut received, mut covered) = (0_u64, 0_u64, 0_u64);
        while received < MESSAGES {
            // No more in flight than the SRQ has receives, nor than the SQ holds.
            while sent < MESSAGES && sent - received < 32 && sent - covered < 48 {
                let texts: Vec<[u8; 8]> = (sent..sent + POST_BATCH as u64).map(u64::to_be_bytes).collect();
                let chain: Vec<SendWr<'_>> = texts
                    .iter()
                    .zip(sent..)
                    .map(|(text, seq)| SendWr {
                        seq: WrSeq(seq),
                        signaled: seq % 16 == 15,
                        data: SendData::Inline(text),
                    })
                    .collect();
                a.post(&chain).expect("a post");
                sent += POST_BATCH as u64;
            }
            let mut wcs = Vec::new();
            rig.device.poll(&mut wcs).expect("a CQ");
            for wc in wcs {
                match wc {
                    Wc::Receive { qpn, slab, bytes } => {
                        assert_eq!((qpn, bytes), (b.qpn().get(), 8));
                        assert_eq!(rig.read(&slab, bytes), received.to_be_bytes());
                        received += 1;
                        rig.spare.push(slab);
                    }
                    Wc::Send { qpn, seq } => {
                        assert_eq!((qpn, seq.0 % 16), (a.qpn().get(), 15));
                        covered = seq.0 + 1;
                    }
                    failed => panic!("{failed:?}"),
                }
            }
            if rig.spare.len() >= POST_BATCH {
                rig.device.post_receives(&mut rig.spare).expect("room");
                assert!(rig.spare.is_empty());
            }
        }
    });
}

/// B01 on one host: one side's MTU is forced down; both use the smaller, and 8 KiB messages pass both ways.
#[test]
fn unequal_mtus_meet_at_the_smaller() {
    leaving_nothing(async {
        let mut large = Rig::new(&config());
        let mut small = Rig::new(&DeviceConfig { mtu_cap: Some(Mtu::B512), ..config() });
        assert_eq!(small.device.port().mtu, Mtu::B512);
        assert!(large.device.port().mtu > Mtu::B512, "{:?}", large.device.port());
        let (a, b) = (large.qp(), small.qp());
        connect(&a, &large.device, &b, &small.device).await;
        let message = pattern(1, 8192);
        let mut slab = large.send_slabs.pop().expect("a slab");
        large.device.write_slab(&mut slab, 0, &message);
        a.post(&[from_slab(0, &slab, 8192)]).expect("a post");
        assert_eq!(small.receive_one(), message);
        let mut slab = small.send_slabs.pop().expect("a slab");
        small.device.write_slab(&mut slab, 0, &message);
        b.post(&[from_slab(0, &slab, 8192)]).expect("a post");
        assert_eq!(large.receive_one(), message);
    });
}

/// B19: no completion comes that was not asked for, nor one twice, when each wake-up finds a single one.
#[test]
fn one_completion_at_a_time_has_no_ghosts() {
    leaving_nothing(async {
        let mut rig = Rig::new(&config());
        let (a, _b) = rig.pair().await;
        for seq in 0..300 {
            rig.device.arm().expect("armed");
            a.post(&[inline(seq, &seq.to_be_bytes())]).expect("a post");
            std::future::poll_fn(|cx| rig.device.poll_wake(cx)).await.expect("a wake-up");
            let wcs = rig.poll_until(|wcs| wcs.len() >= 2);
            assert_eq!(wcs.len(), 2, "{wcs:?}");
            for wc in wcs {
                match wc {
                    Wc::Receive { slab, bytes: 8, .. } => {
                        assert_eq!(rig.read(&slab, 8), seq.to_be_bytes());
                        rig.spare.push(slab);
                    }
                    Wc::Send { seq: WrSeq(done), .. } => assert_eq!(done, seq),
                    other => panic!("{other:?}"),
                }
            }
            rig.device.post_receives(&mut rig.spare).expect("room");
            let mut ghosts = Vec::new();
            assert_eq!(rig.device.poll(&mut ghosts).expect("a CQ"), 0, "{ghosts:?}");
        }
    });
}

/// Slabs are good for their own fabric only.
#[test]
fn another_fabrics_slab_is_refused() {
    leaving_nothing(async {
        let (one, mut two) = (Rig::new(&config()), Rig::new(&config()));
        let (a, _b) = one.pair().await;
        let foreign = two.send_slabs.pop().expect("a slab");
        let error = a.post(&[from_slab(0, &foreign, 8)]).expect_err("not ours");
        assert_eq!((error.posted, error.source.kind()), (0, std::io::ErrorKind::InvalidInput), "{error}");

        let three = open(&config()).expect("a device");
        let (mut slabs, _) = three.take_slabs();
        let before = slabs.len();
        let error = one.device.post_receives(&mut slabs).expect_err("not ours");
        assert_eq!((error.posted, slabs.len()), (0, before), "{error}");
        assert!(three.take_slabs().0.is_empty(), "they are given out once");
    });
}

/// Four threads post on one QP at once; nothing is lost or mixed up.
#[test]
fn threads_may_share_a_qp() {
    const EACH: u64 = 300;
    leaving_nothing(async {
        let mut rig = Rig::new(&config());
        let (a, _b) = rig.pair().await;
        let credit = Arc::new(tokio::sync::Semaphore::new(24));
        let threads: Vec<_> = (0..4_u64)
            .map(|thread| {
                let (a, credit, runtime) = (Arc::clone(&a), Arc::clone(&credit), tokio::runtime::Handle::current());
                std::thread::spawn(move || {
                    for count in 0..EACH {
                        runtime.block_on(credit.acquire()).expect("open").forget();
                        let text = (thread << 32 | count).to_be_bytes();
                        a.post(&[inline(thread << 32 | count, &text)]).expect("a post");
                    }
                })
            })
            .collect();
        let (mut next, mut sends) = ([0_u64; 4], 0);
        while next != [EACH; 4] || sends < 4 * EACH {
            for wc in rig.poll_until(|wcs| !wcs.is_empty()) {
                match wc {
                    Wc::Receive { slab, bytes, .. } => {
                        let text = rig.read(&slab, bytes);
                        let number = u64::from_be_bytes(text.try_into().expect("8 bytes"));
                        let thread = usize::try_from(number >> 32).expect("small");
                        assert_eq!(number & 0xffff_ffff, next[thread], "of thread {thread}");
                        next[thread] += 1;
                        rig.spare.push(slab);
                        rig.device.post_receives(&mut rig.spare).expect("room");
                    }
                    Wc::Send { .. } => {
                        sends += 1;
                        credit.add_permits(1);
                    }
                    failed => panic!("{failed:?}"),
                }
            }
        }
        for thread in threads {
            thread.join().expect("a sender");
        }
    });
}

/// B06: no receive is posted for a second. The RNR counter moves, and the message arrives at once when one is: timer code 3
/// is 30 µs, not the 655 ms of code 0.
///
/// The timers are a worker's. Soft-RoCE's ACK timer runs on while the peer asks for patience, so after (6 + 1) × 268 ms it
/// is `RETRY_EXC` all the same, although `rnr_retry` says for ever: with a timeout code of 14, before this second is over.
#[test]
fn a_receive_posted_after_a_second_is_taken_at_once() {
    leaving_nothing(async {
        let device = open(&config()).expect("a device");
        let (mut receives, sends) = device.take_slabs();
        let mut rig = Rig { device, spare: Vec::new(), send_slabs: sends };
        let (a, b) = (rig.qp(), rig.qp());
        for (qp, peer) in [(&a, &b), (&b, &a)] {
            let path = QpPath { timers: Config::default().timers, ..path_to(peer, &rig.device, Mtu::B1024) };
            DeviceQp::connect(Arc::clone(qp), path).await.expect("a path");
        }
        let naks = || hw_counter("send_rnr_err") + hw_counter("rcvd_rnr_err");
        let before = naks();
        a.post(&[inline(0, b"patience")]).expect("a post");
        std::thread::sleep(Duration::from_secs(1));
        assert!(naks() > before, "the peer asks for patience");
        let posted = Instant::now();
        rig.device.post_receives(&mut receives).expect("an SRQ takes all its slabs");
        assert_eq!(rig.receive_one(), b"patience");
        let took = posted.elapsed();
        eprintln!("{took:?} from the receive to the message; {} RNR NAKs", naks() - before);
        assert!(took < Duration::from_millis(300), "{took:?}");
    });
}
