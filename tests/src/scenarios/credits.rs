//! Flow control: windows, grants, floods, crossed dials.

use std::{sync::Arc, time::Duration};

use verbs_transport::{Config, LinkCounts, MessageType};

use crate::{
    lab::Lab,
    node::{Node, next, next_within},
};

const LONG: Duration = Duration::from_secs(60);

async fn both_registered<L: Lab>(lab: &L) -> (Node<L::F>, Node<L::F>) {
    both_with(lab, |config| config).await
}

/// Each frame in a SEND of its own, or a burst of small ones would not spend a window.
async fn both_without_packing<L: Lab>(lab: &L) -> (Node<L::F>, Node<L::F>) {
    both_with(lab, |config| Config { pack_waiting: false, ..config }).await
}

async fn both_with<L: Lab>(lab: &L, change: impl Fn(Config) -> Config) -> (Node<L::F>, Node<L::F>) {
    let start = async |n| Node::start_with(lab.fabric(n), change(lab.config(n))).await;
    let (a, b) = (start(1).await, start(2).await);
    a.register(&b);
    b.register(&a);
    (a, b)
}

/// MT-30: one way only, so nothing comes back but pure grants.
pub async fn window_drained_and_revived_by_pure_grants<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = both_without_packing(&*lab).await;
    for n in 0..1000u32 {
        let _ = a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), "one way");
    }
    for n in 0..1000u32 {
        assert_eq!(next(&mut b.inbound.message).await.header[..], n.to_be_bytes());
    }
    let (sent, received) = (a.worker.stats(), b.worker.stats());
    assert!(sent.links.credit_stalls > 0, "the window was spent: {sent:?}");
    assert!(sent.links.pure_grants_received > 0 && received.links.pure_grants > 0, "{sent:?}");
    assert_eq!(received.received.total(), 1000);
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// MT-30: both windows are spent before either side has seen a frame.
pub async fn both_sides_at_zero<L: Lab>(lab: Arc<L>) {
    let (mut a, mut b) = both_without_packing(&*lab).await;
    a.worker.ensure_connected(b.id()).await.expect("connected");
    b.worker.ensure_connected(a.id()).await.expect("connected");
    for n in 0..500u32 {
        let _ = a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), "a");
        let _ = b.send(a.id(), MessageType::Message, n.to_be_bytes().to_vec(), "b");
    }
    for n in 0..500u32 {
        assert_eq!(next(&mut a.inbound.message).await.header[..], n.to_be_bytes());
        assert_eq!(next(&mut b.inbound.message).await.header[..], n.to_be_bytes());
    }
    a.errors.assert_none();
    b.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// Frames that have to wait share SENDs: a burst of small ones takes a few credits and not one each, in order and none
/// lost; frames that are too large for that go alone between them, in their turn.
pub async fn small_frames_that_wait_share_sends<L: Lab>(lab: Arc<L>) {
    const FRAMES: u32 = 3000;
    let (mut a, mut b) = both_registered(&*lab).await;
    let payload = |n: u32| crate::node::pattern(if n % 500 == 499 { 30_000 } else { (n % 70) as usize });
    for n in 0..FRAMES {
        let _ = a.send(b.id(), MessageType::ALL[(n % 4) as usize], n.to_be_bytes().to_vec(), payload(n));
        let _ = b.send(a.id(), MessageType::Message, n.to_be_bytes().to_vec(), payload(n));
    }
    let inbound = &mut b.inbound;
    for round in 0..FRAMES / 4 {
        let streams = [&mut inbound.message, &mut inbound.response];
        for (kind, stream) in streams.into_iter().enumerate() {
            let n = round * 4 + u32::try_from(kind).expect("a small number");
            let frame = next_within(stream, LONG).await;
            assert_eq!((&frame.header[..], &frame.payload[..]), (&n.to_be_bytes()[..], &payload(n)[..]));
        }
        for n in [round * 4 + 2, round * 4 + 3] {
            let frame = next_within(&mut inbound.event, LONG).await;
            assert_eq!((&frame.header[..], &frame.payload[..]), (&n.to_be_bytes()[..], &payload(n)[..]));
        }
    }
    for n in 0..FRAMES {
        let frame = next_within(&mut a.inbound.message, LONG).await;
        assert_eq!((&frame.header[..], &frame.payload[..]), (&n.to_be_bytes()[..], &payload(n)[..]));
    }
    for node in [&a, &b] {
        let LinkCounts { sends_inline, sends_copied, sends_packed, frames_packed, fragments, .. } =
            node.worker.stats().links;
        let (large, frames) = (u64::from(FRAMES / 500), u64::from(FRAMES));
        assert_eq!(sends_inline + sends_copied - fragments + large + frames_packed, frames, "each frame went once");
        // How many find others waiting is the scheduler's to say where there are threads.
        let least = lab.rounds(FRAMES / 2, 100).into();
        assert!(frames_packed >= least, "{frames_packed} frames in {sends_packed} SENDs, at least {least} expected");
        assert!(sends_packed * 10 < frames_packed, "{frames_packed} frames in {sends_packed} SENDs");
        node.errors.assert_none();
    }
    a.stop().await;
    b.stop().await;
}

/// MT-30: a million messages on sim, 100,000 on a device, half each way, and not one RNR NAK.
pub async fn many_messages_without_rnr<L: Lab>(lab: Arc<L>) {
    let (mut a, mut b) = both_registered(&*lab).await;
    let each = lab.rounds(500_000, 50_000);
    let before = lab.rnr_naks();
    let stream = |worker: verbs_transport::Worker<L::F>, to, errors: Arc<crate::node::Errors>| async move {
        for n in 0..each {
            let header = bytes::Bytes::copy_from_slice(&n.to_be_bytes());
            let outcome = worker.send(to, header, "x".into(), MessageType::Message, errors.clone());
            // Waits for room like a well-behaved sender.
            if let verbs_transport::SendOutcome::Pending(admission) = outcome {
                admission.await.expect("admitted");
            } else if n % 64 == 0 {
                tokio::task::yield_now().await;
            }
        }
    };
    let senders = [
        tokio::spawn(stream(a.worker.clone(), b.id(), a.errors.clone())),
        tokio::spawn(stream(b.worker.clone(), a.id(), b.errors.clone())),
    ];
    for n in 0..each {
        assert_eq!(next_within(&mut a.inbound.message, LONG).await.header[..], n.to_be_bytes());
        assert_eq!(next_within(&mut b.inbound.message, LONG).await.header[..], n.to_be_bytes());
    }
    for sender in senders {
        sender.await.expect("the sender does not panic");
    }
    assert_eq!(lab.rnr_naks() - before, 0, "credits keep RNR away");
    a.errors.assert_none();
    b.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// B08: both sides send ten windows without reading, then read; 1,000 rounds on sim.
pub async fn flooding_without_reading<L: Lab>(lab: Arc<L>) {
    let (mut a, mut b) = both_registered(&*lab).await;
    for round in 0..lab.rounds(1000, 50) {
        for n in 0..640u32 {
            let header = [round.to_be_bytes(), n.to_be_bytes()].concat();
            let _ = a.send(b.id(), MessageType::Message, header.clone(), "flood");
            let _ = b.send(a.id(), MessageType::Message, header, "flood");
        }
        for n in 0..640u32 {
            let header = [round.to_be_bytes(), n.to_be_bytes()].concat();
            assert_eq!(next_within(&mut a.inbound.message, LONG).await.header, header);
            assert_eq!(next_within(&mut b.inbound.message, LONG).await.header, header);
        }
    }
    a.errors.assert_none();
    b.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// B04, M-30: both sides dial at once; one connection comes of it, nothing is lost, doubled or reordered.
pub async fn crossed_first_sends<L: Lab>(lab: Arc<L>) {
    for round in 0..lab.rounds(1000, 100) {
        let (mut a, mut b) = both_registered(&*lab).await;
        let barrier = Arc::new(tokio::sync::Barrier::new(2));
        let burst = |node: &Node<L::F>, to| {
            let (worker, errors, barrier) = (node.worker.clone(), node.errors.clone(), barrier.clone());
            // MT-30: at random offsets, every other time.
            let offset = Duration::from_micros(if round % 2 == 0 { 0 } else { fastrand::u64(..3000) });
            tokio::spawn(async move {
                barrier.wait().await;
                tokio::time::sleep(offset).await;
                for n in 0..3 {
                    let header = format!("{n}").into();
                    let _ = worker.send(to, header, "crossed".into(), MessageType::Message, errors.clone());
                }
            })
        };
        let senders = [burst(&a, b.id()), burst(&b, a.id())];
        for n in 0..3 {
            assert_eq!(next(&mut a.inbound.message).await.header, format!("{n}").as_bytes(), "round {round}");
            assert_eq!(next(&mut b.inbound.message).await.header, format!("{n}").as_bytes(), "round {round}");
        }
        for sender in senders {
            sender.await.expect("the sender does not panic");
        }
        for node in [&mut a, &mut b] {
            let stats = node.worker.stats();
            assert_eq!((stats.epochs_begun, stats.qps, stats.epochs_ended), (1, 1, 0), "round {round}: {stats:?}");
            assert!(node.inbound.message.try_recv().is_none());
            node.errors.assert_none();
        }
        a.stop().await;
        b.stop().await;
    }
}

/// B12: ten thousand concurrent small sends over a send queue of 64 and of 16, unsignaled batching on.
pub async fn concurrent_small_sends_fit_any_send_queue<L: Lab>(lab: Arc<L>) {
    for send_wrs in [63, 16] {
        let mut config = lab.config(1);
        config.send_wrs = send_wrs;
        config.pack_waiting = false;
        let (a, mut b) = (Node::start_with(lab.fabric(1), config).await, Node::start(&*lab, 2).await);
        a.register(&b);
        let mut senders = Vec::new();
        for task in 0..10u32 {
            let (worker, to, errors) = (a.worker.clone(), b.id(), a.errors.clone());
            senders.push(tokio::spawn(async move {
                for n in 0..1000u32 {
                    let header = [task.to_be_bytes(), n.to_be_bytes()].concat().into();
                    let _ = worker.send(to, header, "small".into(), MessageType::Message, errors.clone());
                    if n % 100 == 0 {
                        tokio::task::yield_now().await;
                    }
                }
            }));
        }
        let mut next_of = [0u32; 10];
        for _ in 0..10_000 {
            let frame = next_within(&mut b.inbound.message, LONG).await;
            let word = |at: usize| u32::from_be_bytes(frame.header[at..at + 4].try_into().expect("four bytes"));
            let task = word(0) as usize;
            assert_eq!(word(4), next_of[task], "order of sender {task}");
            next_of[task] += 1;
        }
        for sender in senders {
            sender.await.expect("the sender does not panic");
        }
        a.errors.assert_none();
        a.stop().await;
        b.stop().await;
    }
}
