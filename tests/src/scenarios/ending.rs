//! How workers end: dropped, closed while traffic runs, and what they had sent before.

use std::{sync::Arc, time::Duration};

use verbs_transport::{Config, MessageType, Progress, SendOutcome, fabric::SlabSizes};

use crate::{
    lab::Lab,
    node::{Node, next},
};

/// M-71: what the receiver's device had acknowledged arrives, though its sender shut down before the receiver polled.
pub async fn last_words_before_a_shutdown_arrive<L: Lab>(lab: Arc<L>) {
    let config = Config { progress: Progress::Manual, ..lab.config(2) };
    let (a, mut b) = (Node::start(&*lab, 1).await, Node::start_with(lab.fabric(2), config).await);
    a.register(&b);
    let poller = b.worker.clone();
    let polling = tokio::spawn(async move {
        loop {
            while poller.progress().is_ok_and(|polled| polled > 0) {}
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    a.worker.ensure_connected(b.id()).await.expect("connected");
    polling.abort();
    let _ = polling.await;
    for n in 0..20u32 {
        let _ = a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), "last words");
    }
    // The PING that covers them is unanswered, their completions are good.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(a.worker.describe(b.id()).and_then(|told| told.wrs_in_flight), Some(0));
    a.worker.shutdown().await;
    a.errors.assert_none();
    // By now B's bootstrap socket has closed, and B has ended the connection.
    tokio::time::sleep(Duration::from_millis(200)).await;
    while b.worker.progress().is_ok_and(|polled| polled > 0) {}
    for n in 0..20u32 {
        let frame = b.inbound.message.try_recv().unwrap_or_else(|| panic!("frame {n} is lost without a report"));
        assert_eq!(frame.header[..], n.to_be_bytes());
    }
    a.stop().await;
    b.stop().await;
}

/// M-81: a worker that is dropped without a shutdown, in the middle of a burst, reports every frame that did not
/// arrive and leaves nothing behind; `on_error` and the admissions tell of each frame at most once.
pub async fn a_dropped_worker_reports_every_frame<L: Lab>(lab: Arc<L>) {
    for progress in [Progress::Event, Progress::Manual] {
        let config = Config { progress, ..lab.config(1) };
        let (a, mut b) = (Node::start_with(lab.fabric(1), config).await, Node::start(&*lab, 2).await);
        a.register(&b);
        let count = 1000u32;
        let mut pending = Vec::new();
        for n in 0..count {
            let outcome = a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), "burst");
            if let SendOutcome::Pending(admission) = outcome {
                pending.push(admission);
            }
            if n == 500 && progress == Progress::Event {
                let _ = next(&mut b.inbound.message).await;
            }
        }
        let Node { worker, inbound, errors } = a;
        drop((worker, inbound));
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let refused =
            pending.iter().filter(|admission| matches!(admission.state(), verbs_transport::AdmissionState::Failed(_)));
        let (refused, reported) = (refused.count(), errors.count());
        let mut arrived = usize::from(progress == Progress::Event);
        while b.inbound.message.try_recv().is_some() {
            arrived += 1;
        }
        assert!(arrived + refused + reported >= count as usize, "{arrived} + {refused} + {reported} of {count}");
        let mut numbers: Vec<_> = errors.all().into_iter().map(|(header, _, _)| header).collect();
        let all = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), all, "reported once each");
        b.stop().await;
    }
}

/// B10: both sides close while traffic runs, 200 times; none hangs, and each frame ends.
pub async fn closing_while_traffic_runs<L: Lab>(lab: Arc<L>) {
    let slabs = SlabSizes { receive_slabs: 160, receive_bytes: 1024, send_slabs: 32, send_bytes: 1024 };
    for round in 0..lab.rounds(200, 200) {
        let start = |n| Node::start_with(lab.fabric_with(n, slabs), lab.config(n));
        let (a, b) = (start(1).await, start(2).await);
        a.register(&b);
        b.register(&a);
        a.worker.ensure_connected(b.id()).await.expect("connected");
        for n in 0..200u32 {
            let _ = a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), "closing");
            let _ = b.send(a.id(), MessageType::Message, n.to_be_bytes().to_vec(), "closing");
        }
        let (first, second) = if round % 2 == 0 { (a, b) } else { (b, a) };
        let alarm = Duration::from_secs(5);
        tokio::time::timeout(alarm, first.worker.shutdown()).await.expect("closing returns");
        tokio::time::timeout(alarm, second.worker.shutdown()).await.expect("closing returns");
        for node in [&first, &second] {
            let stats = node.worker.stats();
            assert_eq!((stats.qps, stats.receives_promised), (0, 0), "{stats:?}");
            assert_eq!(stats.send_slabs_free, slabs.send_slabs as usize, "{stats:?}");
        }
    }
}
