//! Zero-copy receive: frames that keep their slab for as long as the application keeps them.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use verbs_transport::{Config, MessageType, Received, Stats};

use crate::{
    lab::Lab,
    node::{Node, next},
};

const CAP: u32 = 40;
const WINDOW: u16 = 64;
/// A quarter of the window.
const PER_PEER: u32 = 16;

/// Node 2 lends frames of 100 bytes and more.
async fn pair<L: Lab>(lab: &L) -> (Node<L::F>, Node<L::F>) {
    let lending = Config { zero_copy_slabs: CAP, zero_copy_min_bytes: 100, window_slabs: WINDOW, ..lab.config(2) };
    let (a, b) = (Node::start(lab, 1).await, Node::start_with(lab.fabric(2), lending).await);
    a.register(&b);
    b.register(&a);
    (a, b)
}

/// Bytes that no other frame has.
fn body(n: u32, len: usize) -> Bytes {
    let mut word = n.wrapping_mul(2_654_435_761) | 1;
    let mut byte = || {
        word ^= word << 13;
        word ^= word >> 17;
        word ^= word << 5;
        word.to_le_bytes()[0]
    };
    (0..len).map(|_| byte()).collect()
}

fn send<L: Lab>(from: &Node<L::F>, to: &Node<L::F>, n: u32, len: usize) {
    let _ = from.send(to.id(), MessageType::Message, n.to_be_bytes().to_vec(), body(n, len));
}

fn assert_is(frame: &Received, n: u32, len: usize) {
    assert_eq!(frame.header[..], n.to_be_bytes());
    assert_eq!(frame.payload, body(n, len), "frame {n}");
}

/// Every slab is back and posted.
async fn all_home<L: Lab>(node: &Node<L::F>) -> Stats {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let stats = node.worker.stats();
        if stats.receive_slabs_lent == 0 {
            return stats;
        }
        assert!(tokio::time::Instant::now() < deadline, "slabs did not come home: {stats:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whatever is kept, for however long, stays as it was sent while the slabs of others are used again and again.
pub async fn lent_frames_stay_whole_and_come_home<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    let frames = lab.rounds(5000, 1000);
    let naks = lab.rnr_naks();
    let len = |n: u32| [0, 95, 96, 1000, 8180, 20_000][n as usize % 6];
    let mut kept = std::collections::VecDeque::new();
    for n in 0..frames {
        send::<L>(&a, &b, n, len(n));
        if n % 7 == 6 {
            for _ in 0..7 {
                kept.push_back((n, next(&mut b.inbound.message).await));
            }
        }
        // In an order of its own: the middle one first.
        while kept.len() > 30 {
            if let Some((_, frame)) = kept.remove(kept.len() / 2) {
                let n = u32::from_be_bytes(frame.header[..].try_into().expect("four bytes"));
                assert_is(&frame, n, len(n));
            }
        }
    }
    for (_, frame) in kept {
        let n = u32::from_be_bytes(frame.header[..].try_into().expect("four bytes"));
        assert_is(&frame, n, len(n));
    }
    for _ in 0..frames % 7 {
        next(&mut b.inbound.message).await;
    }
    let stats = all_home::<L>(&b).await;
    // Header and payload together: 96 bytes of payload are 100, 95 are not; 20,000 are several SENDs.
    assert!(stats.frames_lent > u64::from(frames / 8), "{stats:?}");
    assert_eq!(lab.rnr_naks(), naks);
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// An application that keeps everything: what is beyond the caps is copied, its peer is not held up, nor is another one;
/// and the credits of what it kept come back when it lets go.
pub async fn beyond_the_cap_frames_are_copied<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    let naks = lab.rnr_naks();
    let mut kept = Vec::new();
    for n in 0..500 {
        send::<L>(&a, &b, n, 500);
        kept.push(next(&mut b.inbound.message).await);
    }
    let stats = b.worker.stats();
    assert_eq!(stats.receive_slabs_lent, PER_PEER, "{stats:?}");
    assert_eq!((stats.frames_lent, stats.lend_refused), (u64::from(PER_PEER), 500 - u64::from(PER_PEER)), "{stats:?}");

    // Two more peers: the third one finds 8 of the cap left.
    let mut others = Vec::new();
    for (host, lent) in [(3, 2 * PER_PEER), (4, CAP)] {
        let c = Node::start(&*lab, host).await;
        c.register(&b);
        for n in 0..200 {
            send::<L>(&c, &b, n, 500);
            kept.push(next(&mut b.inbound.message).await);
        }
        assert_eq!(b.worker.stats().receive_slabs_lent, lent);
        others.push(c);
    }
    for (at, frame) in kept.iter().enumerate() {
        let n = u32::try_from(at).expect("few");
        let n = if n < 500 { n } else { (n - 500) % 200 };
        assert_is(frame, n, 500);
    }
    drop(kept);
    all_home::<L>(&b).await;
    // The whole window is there again, and slabs are lent anew.
    for n in 0..u32::from(WINDOW) * 4 {
        send::<L>(&a, &b, n, 500);
    }
    for n in 0..u32::from(WINDOW) * 4 {
        assert_is(&next(&mut b.inbound.message).await, n, 500);
    }
    let stats = all_home::<L>(&b).await;
    assert!(stats.frames_lent > u64::from(CAP), "{stats:?}");
    assert_eq!(lab.rnr_naks(), naks);
    for node in others {
        node.errors.assert_none();
        node.stop().await;
    }
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// A frame outlives the connection that it came over, a second connection of the same peer, and the worker.
pub async fn a_lent_frame_outlives_everything<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    let mut kept = Vec::new();
    for round in 0..4 {
        for n in 0..20 {
            send::<L>(&a, &b, round * 20 + n, 3000);
            kept.push(next(&mut b.inbound.message).await);
        }
        // The connection ends, the slabs of its frames are still lent.
        a.worker.unregister(b.id());
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        while b.worker.stats().qps > 0 {
            assert!(tokio::time::Instant::now() < deadline, "{:?}", b.worker.stats());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        a.register(&b);
    }
    let stats = b.worker.stats();
    assert_eq!(stats.receive_slabs_lent, CAP, "16, 16, and 8 of the third round: {stats:?}");
    // Those of the first connection come home while there is none, or another one: no credit is counted twice.
    kept.drain(..40);
    for n in 80..400 {
        send::<L>(&a, &b, n, 3000);
        assert_is(&next(&mut b.inbound.message).await, n, 3000);
    }
    assert_eq!(b.worker.stats().malformed, 0);
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
    for (n, frame) in (40..).zip(&kept) {
        assert_is(frame, n, 3000);
    }
}
