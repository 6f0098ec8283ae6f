//! What happens when something runs out: room in a channel, in the inbound streams, in the SRQ, in the CQ.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use verbs_bootstrap::Status;
use verbs_transport::{
    AdmissionError, AdmissionState, Config, ConnectError, EpochEnd, MessageType, SendOutcome,
    fabric::{Fabric, SlabSizes},
};

use crate::{
    lab::{Lab, SMALL_SLABS},
    node::{Node, next, next_within, pattern},
};

/// MT-29: with a channel of one frame and no connection yet: a cancelled frame frees its place, those behind it keep
/// their order, hooks run once and in order, dropped and timed-out admissions deliver.
pub async fn mt_29_cancel_keeps_the_order_of_successors<L: Lab>(lab: Arc<L>) {
    let config = Config { channel_frames: 1, ..lab.config(1) };
    let (a, mut b) = (Node::start_with(lab.fabric(1), config).await, Node::start(&*lab, 2).await);
    a.register(&b);
    // Before the first await nothing connects: the first frame fills the channel, the others wait in the gate.
    let mut pending = Vec::new();
    for n in 0..8u32 {
        match a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), "gate") {
            SendOutcome::Admitted => assert_eq!(n, 0),
            SendOutcome::Pending(admission) => pending.push((n, admission)),
        }
    }
    assert_eq!(a.worker.stats().pended, 7);
    let order = Arc::new(Mutex::new(Vec::new()));
    for (n, admission) in &pending {
        for hook in 0..2 {
            let (n, order) = (*n, order.clone());
            admission.on_resolved(move |result| order.lock().expect("whole").push((n, hook, result.clone())));
        }
    }
    let cancelled = [2u32, 5];
    for (n, admission) in &pending {
        if cancelled.contains(n) {
            assert_eq!(admission.state(), AdmissionState::Pending);
            assert!(admission.cancel() && !admission.cancel());
            assert_eq!(admission.state(), AdmissionState::Failed(AdmissionError::Cancelled));
        }
    }
    let (_, dropped) = pending.remove(0);
    drop(dropped);
    let (_, slow) = pending.remove(1);
    assert!(tokio::time::timeout(Duration::from_nanos(1), slow).await.is_err());
    for n in [0u32, 1, 3, 4, 6, 7] {
        assert_eq!(next(&mut b.inbound.message).await.header[..], n.to_be_bytes());
    }
    assert!(b.inbound.message.try_recv().is_none());
    // Hooks run after the frames have gone out, and the last of these may have arrived before its hook has run.
    let patience = tokio::time::Instant::now() + crate::node::PATIENCE;
    while order.lock().expect("whole").len() < 14 && tokio::time::Instant::now() < patience {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    {
        let order = order.lock().expect("whole").clone();
        let mut names: Vec<(u32, i32)> = order.iter().map(|(n, hook, _)| (*n, *hook)).collect();
        assert_eq!(names[..4], [(2, 0), (2, 1), (5, 0), (5, 1)], "those that were cancelled came first");
        names.sort_unstable();
        assert_eq!(names, (1..8).flat_map(|n| [(n, 0), (n, 1)]).collect::<Vec<_>>(), "each hook once");
        for (n, _, result) in &order {
            assert_eq!(result.is_err(), cancelled.contains(n));
        }
    }
    assert!(!pending[0].1.cancel(), "it has left the gate");
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// M-71, M-73: frames above the peer's limit that are sent while the connection that tells the limit comes up: each is
/// reported, none goes out.
pub async fn frames_above_a_limit_just_learnt_are_reported<L: Lab>(lab: Arc<L>) {
    for _ in 0..lab.rounds(100, 10) {
        let config = Config { eager_max_bytes: 1024, ..lab.config(2) };
        let (a, b) = (Node::start(&*lab, 1).await, Node::start_with(lab.fabric(2), config).await);
        a.register(&b);
        let (worker, to, errors) = (a.worker.clone(), b.id(), a.errors.clone());
        let sender = tokio::spawn(async move {
            let mut sent = 0;
            while worker.max_message_size(to).is_none() || sent % 64 != 0 {
                let _ = worker.send(to, pattern(4), pattern(1021), MessageType::Message, errors.clone());
                sent += 1;
                if sent % 64 == 0 {
                    tokio::time::sleep(Duration::from_micros(50)).await;
                }
            }
            sent
        });
        let connected = a.worker.ensure_connected(b.id()).await;
        let sent: u64 = sender.await.expect("the sender does not panic");
        connected.expect("connected");
        // Reported by whoever learnt the limit, which may be another thread.
        let reported = || (a.errors.count() as u64) + a.worker.stats().admissions_failed;
        crate::bulk::until("each is reported", || reported() >= sent).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let (mine, yours) = (a.worker.stats(), b.worker.stats());
        assert_eq!(reported(), sent, "{mine:?}");
        assert_eq!((yours.malformed, yours.received.total()), (0, 0), "{yours:?}");
        a.stop().await;
        b.stop().await;
    }
}

/// M-56, M-61: a reader that does not read holds its sender up at `inbound_max_bytes`; when it reads, nothing is lost.
pub async fn a_reader_that_does_not_read_holds_its_sender_up<L: Lab>(lab: Arc<L>) {
    let config = Config { inbound_max_bytes: 256 << 10, ..lab.config(2) };
    let (a, mut b) = (Node::start(&*lab, 1).await, Node::start_with(lab.fabric(2), config).await);
    a.register(&b);
    let count = 2000u32;
    let mut last = None;
    for n in 0..count {
        let outcome = a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), pattern(1000));
        if let SendOutcome::Pending(admission) = outcome {
            last = Some(admission);
        }
    }
    let last = last.expect("the channel is smaller than the burst");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(last.state(), AdmissionState::Pending, "the sender feels it");
    let backlog = b.worker.stats().inbound_backlog_bytes;
    // On top comes the window that was out when the limit was passed, and what was granted for it before it was handed on:
    // slabs of 8,192 bytes, eight frames in each.
    let window = 64 * 8 * (1004 + 128);
    assert!((256 << 10..(256 << 10) + 2 * window).contains(&backlog), "{backlog} bytes wait");
    assert!(b.worker.stats().withheld > 0);
    for n in 0..count {
        assert_eq!(next(&mut b.inbound.message).await.header[..], n.to_be_bytes());
    }
    last.await.expect("admitted in the end");
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// M-50: the second peer gets a smaller window, the third a refusal with the numbers; when one leaves, it fits.
pub async fn peers_beyond_the_srq_get_less_and_then_a_refusal<L: Lab>(lab: Arc<L>) {
    let slabs = SlabSizes { receive_slabs: 80 + 70 + 20, ..SMALL_SLABS };
    let b = Node::start_with(lab.fabric_with(9, slabs), lab.config(9)).await;
    let mut peers = Vec::new();
    for n in 1..=3 {
        let peer = Node::start(&*lab, n).await;
        peer.register(&b);
        peers.push(peer);
    }
    for (peer, window) in peers.iter().zip([64, 14]) {
        peer.worker.ensure_connected(b.id()).await.expect("there is room");
        let limits = peer.worker.describe(b.id()).and_then(|told| told.limits).expect("connected");
        assert_eq!(limits.tx_window, window);
    }
    let refused = peers[2].worker.ensure_connected(b.id()).await.expect_err("no room");
    let ConnectError::Failed(cause) = &refused else { panic!("{refused}") };
    assert!(
        matches!(&**cause, EpochEnd::Dial(verbs_bootstrap::DialError::Refused { status: Status::Exhausted, .. })),
        "{refused}"
    );
    assert!(refused.to_string().contains("170") && refused.to_string().contains("receive_slabs"), "{refused}");
    peers.remove(0).stop().await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while let Err(error) = peers[1].worker.ensure_connected(b.id()).await {
        assert!(tokio::time::Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for peer in peers {
        peer.stop().await;
    }
    b.stop().await;
}

/// M-45: a QP whose completions might not fit into the CQ is refused, with the numbers, by the side that runs out.
pub async fn a_cq_without_room_refuses_a_second_qp<L: Lab>(lab: Arc<L>) {
    let slabs = SlabSizes { receive_slabs: 256, ..SMALL_SLABS };
    let fabric = lab.fabric_cq(1, slabs, 256 + 100);
    let room = fabric.limits().cq_depth - 256;
    // One QP fits, two do not, whatever the device made of the depth that was asked for.
    let config = Config { send_wrs: room * 2 / 3, ..lab.config(1) };
    let a = Node::start_with(fabric, config).await;
    let (mut b, c) = (Node::start(&*lab, 2).await, Node::start(&*lab, 3).await);
    a.register(&b);
    a.register(&c);
    a.worker.ensure_connected(b.id()).await.expect("the first fits");
    let refused = a.worker.ensure_connected(c.id()).await.expect_err("the second does not");
    let ConnectError::Failed(cause) = &refused else { panic!("{refused}") };
    assert!(matches!(**cause, EpochEnd::CqFull { qps: 1, receive_slabs: 256, .. }), "{refused}");
    a.send_numbered(b.id(), MessageType::Message, 1);
    let _ = next_within(&mut b.inbound.message, Duration::from_secs(5)).await;
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
    c.stop().await;
}
