//! Health, drain, death and restart: MT-17 to MT-20, MT-22 to MT-25, MT-27.

use std::{sync::Arc, time::Duration};

use verbs_transport::{
    AdmissionError, Config, DrainFlag, DrainPolicy, HealthError, MessageType, SendOutcome, fabric::Fabric,
};

use crate::{
    lab::Lab,
    node::{Node, PATIENCE, assert_numbered, next},
};

const SOON: Duration = Duration::from_millis(100);
const TWO_SECONDS: Duration = Duration::from_secs(2);

/// B with a drain flag of its own.
fn draining(config: Config) -> (Config, DrainFlag) {
    let flag = DrainFlag::default();
    (Config { drain: flag.clone(), ..config }, flag)
}

/// A has registered B; B drains when its flag is raised.
async fn pair<L: Lab>(lab: &L) -> (Node<L::F>, Node<L::F>, DrainFlag) {
    let (config, flag) = draining(lab.config(2));
    let (a, b) = (Node::start(lab, 1).await, Node::start_with(lab.fabric(2), config).await);
    a.register(&b);
    (a, b, flag)
}

fn drain<F: Fabric>(node: &Node<F>, flag: &DrainFlag) {
    node.worker.begin_drain();
    node.worker.begin_drain();
    flag.raise();
}

/// MT-17 and MT-23: a request is not delivered but comes back on the sender's shutdown stream.
pub async fn mt_17_and_23_drain_turns_requests_away<L: Lab>(lab: Arc<L>) {
    let (mut a, mut b, flag) = pair(&*lab).await;
    b.worker.begin_drain();
    assert!(!flag.is_raised(), "begin_drain never flips the process's flag");
    flag.raise();
    tokio::time::sleep(SOON).await;
    a.send_numbered(b.id(), MessageType::Message, 1);
    let echo = tokio::time::timeout(TWO_SECONDS, a.inbound.shutdown.recv()).await.expect("in time").expect("an echo");
    assert_eq!((&echo.header[..], echo.payload.len(), echo.peer), (&b"header-1"[..], 0, b.id()));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(b.inbound.message.try_recv().is_none());
    assert_eq!(b.worker.stats().drain_rejected, 1);
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// MT-18 and MT-19, and Ack; also on a connection that is opened during drain.
pub async fn mt_18_and_19_drain_takes_everything_else<L: Lab>(lab: Arc<L>) {
    let (a, mut b, flag) = pair(&*lab).await;
    drain(&b, &flag);
    tokio::time::sleep(SOON).await;
    for (n, kind) in [(1, MessageType::Response), (2, MessageType::Event), (3, MessageType::Ack)] {
        a.send_numbered(b.id(), kind, n);
    }
    assert_numbered(&next(&mut b.inbound.response).await, 1);
    assert_numbered(&next(&mut b.inbound.event).await, 2);
    assert_numbered(&next(&mut b.inbound.event).await, 3);
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// MT-20.
pub async fn mt_20_health_during_drain<L: Lab>(lab: Arc<L>) {
    let (a, mut b, flag) = pair(&*lab).await;
    a.send_numbered(b.id(), MessageType::Message, 1);
    assert_numbered(&next(&mut b.inbound.message).await, 1);
    drain(&b, &flag);
    let credits = || a.worker.describe(b.id()).and_then(|told| told.credits_left);
    let before = credits();
    a.worker.check_health(b.id(), TWO_SECONDS).await.expect("healthy");
    // The PONG may bring some back.
    assert!(credits() >= before, "no credit was used");
    a.stop().await;
    b.stop().await;
}

/// MT-22.
pub async fn mt_22_death_of_an_epoch<L: Lab>(lab: Arc<L>) {
    // A channel so small that the burst overflows it in any case: a refused dial may empty it in the middle.
    let config = Config { channel_frames: 64, ..lab.config(1) };
    let (a, b) = (Node::start_with(lab.fabric(1), config).await, Node::start(&*lab, 2).await);
    a.register(&b);
    let to = b.id();
    b.stop().await;
    tokio::time::sleep(SOON).await;
    let mut pending = Vec::new();
    for n in 0..400u32 {
        if let SendOutcome::Pending(admission) = a.send(to, MessageType::Message, n.to_be_bytes().to_vec(), "burst") {
            pending.push(admission);
        }
    }
    assert!(!pending.is_empty());
    let (count, mut failed) = (pending.len(), 0);
    for admission in pending {
        let end = tokio::time::timeout(PATIENCE, admission).await.expect("every admission resolves");
        failed += usize::from(matches!(end, Err(AdmissionError::ConnectionReplaced(_))));
    }
    assert!(failed + 1 >= count, "{failed} of {count} failed");
    assert_eq!(a.errors.count() + failed, 400, "each frame has one end");
    assert!(matches!(a.send(to, MessageType::Message, "next", "epoch"), SendOutcome::Admitted));
    a.stop().await;
}

/// MT-24.
pub async fn mt_24_lifecycle_of_a_drain<L: Lab>(lab: Arc<L>) {
    let (mut a, mut b, flag) = pair(&*lab).await;
    a.send_numbered(b.id(), MessageType::Message, 1);
    assert_numbered(&next(&mut b.inbound.message).await, 1);
    let guard = flag.guard();
    drain(&b, &flag);
    a.send_numbered(b.id(), MessageType::Message, 2);
    a.send_numbered(b.id(), MessageType::Response, 3);
    assert_eq!(next(&mut a.inbound.shutdown).await.header, "header-2");
    assert_numbered(&next(&mut b.inbound.response).await, 3);
    let worker = b.worker.clone();
    let ending = tokio::spawn(async move { worker.drain_and_shutdown(DrainPolicy::WaitForEver).await });
    tokio::time::sleep(SOON).await;
    assert!(!ending.is_finished(), "the guard still lives");
    drop(guard);
    tokio::time::timeout(TWO_SECONDS, ending).await.expect("in time").expect("no panic");
    assert!(b.inbound.message.recv().await.is_none());
    a.stop().await;

    let (a, b, flag) = pair(&*lab).await;
    let _guard = flag.guard();
    drain(&b, &flag);
    tokio::time::timeout(TWO_SECONDS, b.worker.drain_and_shutdown(DrainPolicy::Timeout(SOON))).await.expect("in time");
    assert_eq!(flag.in_flight(), 1, "the count stays as it is");
    a.stop().await;
}

/// MT-25.
pub async fn mt_25_own_sends_during_drain<L: Lab>(lab: Arc<L>) {
    let (config, flag) = draining(lab.config(1));
    let (a, mut b) = (Node::start_with(lab.fabric(1), config).await, Node::start(&*lab, 2).await);
    a.register(&b);
    drain(&a, &flag);
    a.send_numbered(b.id(), MessageType::Response, 1);
    assert_numbered(&next(&mut b.inbound.response).await, 1);
    a.worker.shutdown().await;
    a.send_numbered(b.id(), MessageType::Response, 2);
    tokio::time::sleep(SOON).await;
    assert_eq!(a.errors.count(), 1);
    assert!(b.inbound.response.try_recv().is_none());
    b.stop().await;
}

/// MT-27, M-76.
pub async fn mt_27_health<L: Lab>(lab: Arc<L>) {
    let early = verbs_transport::Worker::new(lab.config(3), lab.fabric(3)).expect("valid");
    let (a, b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
    let check = |id| a.worker.check_health(id, TWO_SECONDS);
    let unstarted = early.check_health(b.id(), SOON).await;
    assert!(matches!(unstarted, Err(HealthError::TransportNotStarted)), "{unstarted:?}");
    early.shutdown().await;
    let unknown = check(b.id()).await;
    assert!(matches!(unknown, Err(HealthError::PeerNotRegistered { .. })), "{unknown:?}");
    a.register(&b);
    let never = check(b.id()).await;
    assert!(matches!(never, Err(HealthError::NeverConnected)), "{never:?}");
    assert_eq!(a.worker.stats().epochs_begun, 0, "a probe connects nothing");
    a.worker.ensure_connected(b.id()).await.expect("connected");
    check(b.id()).await.expect("healthy");
    // Probes that are given up leave nothing behind, and many share one PING.
    for _ in 0..100 {
        drop(tokio::time::timeout(Duration::ZERO, check(b.id())).await);
    }
    let (one, other) = tokio::join!(check(b.id()), check(b.id()));
    one.and(other).expect("healthy");
    let id = b.id();
    b.stop().await;
    tokio::time::sleep(SOON).await;
    let dead = check(id).await;
    assert!(matches!(dead, Err(HealthError::ConnectionFailed { .. })), "{dead:?}");
    a.stop().await;
}

/// M-69: a frame does not wait in the gate for ever. The peer is alive but takes nothing.
pub async fn an_admission_ends_at_its_deadline<L: Lab>(lab: Arc<L>) {
    let config = Config { admission_deadline: Duration::from_millis(300), channel_frames: 4, ..lab.config(1) };
    let slow = Config { inbound_max_bytes: 64 << 10, ..lab.config(2) };
    let (a, mut b) = (Node::start_with(lab.fabric(1), config).await, Node::start_with(lab.fabric(2), slow).await);
    a.register(&b);
    a.worker.ensure_connected(b.id()).await.expect("connected");
    let mut pending = Vec::new();
    for n in 0..1000u32 {
        if let SendOutcome::Pending(admission) =
            a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), vec![7; 1000])
        {
            pending.push(admission);
        }
        if n % 16 == 0 {
            tokio::task::yield_now().await;
        }
    }
    let mut expired = 0;
    for admission in pending {
        match tokio::time::timeout(PATIENCE, admission).await.expect("resolved") {
            Ok(()) => {}
            Err(AdmissionError::Deadline { .. }) => expired += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(expired > 0);
    assert_eq!(a.worker.stats().admissions_expired, expired);
    // The connection is alive all the time: what was admitted arrives when the reader reads, in order, once.
    let (mut seen, mut last) = (0, None);
    while seen + expired < 1000 {
        let header = next(&mut b.inbound.message).await.header;
        let n = u32::from_be_bytes(header[..].try_into().expect("four bytes"));
        assert!(last.is_none_or(|last| last < n), "{last:?} before {n}");
        (seen, last) = (seen + 1, Some(n));
    }
    a.errors.assert_none();
    assert_eq!(a.worker.stats().epochs_ended, 0);
    a.stop().await;
    b.stop().await;
}

/// B23: peers that come and go under fresh names leave nothing behind.
pub async fn strangers_are_forgotten<L: Lab>(lab: Arc<L>) {
    let mut b = Node::start(&*lab, 2).await;
    for n in 0..lab.rounds(50, 8) {
        let a = Node::start(&*lab, 100 + n).await;
        a.register(&b);
        a.send_numbered(b.id(), MessageType::Message, n);
        assert_numbered(&next(&mut b.inbound.message).await, n);
        a.stop().await;
    }
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while b.worker.stats().peers_known > 0 {
        assert!(tokio::time::Instant::now() < deadline, "{:?}", b.worker.stats());
        tokio::time::sleep(SOON).await;
    }
    let stats = b.worker.stats();
    assert_eq!((stats.qps, stats.receives_promised), (0, 0));
    b.stop().await;
}

/// A registered peer can be forgotten, with all that waits for it, and registered again.
pub async fn unregister_ends_and_forgets<L: Lab>(lab: Arc<L>) {
    let (a, mut b, _) = pair(&*lab).await;
    a.send_numbered(b.id(), MessageType::Message, 1);
    assert_numbered(&next(&mut b.inbound.message).await, 1);
    assert!(a.worker.unregister(b.id()));
    assert!(!a.worker.unregister(b.id()));
    a.send_numbered(b.id(), MessageType::Message, 2);
    assert!(a.errors.all()[0].2.to_string().contains("not registered"), "{:?}", a.errors);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((a.worker.stats().peers_known, a.worker.stats().qps), (0, 0));
    // Before its dial has begun, a frame is queued without an epoch.
    a.register(&b);
    a.send_numbered(b.id(), MessageType::Message, 4);
    assert!(a.worker.unregister(b.id()));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(a.errors.count(), 2, "{:?}", a.errors);
    assert_eq!((a.worker.stats().peers_known, a.worker.stats().qps), (0, 0));
    // The peer remembers the epochs of before, so a new count would be taken for an old one.
    for n in 3..6 {
        a.register(&b);
        a.send_numbered(b.id(), MessageType::Message, n);
        assert_numbered(&next(&mut b.inbound.message).await, n);
        assert!(a.worker.unregister(b.id()));
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!((a.worker.stats().peers_known, a.worker.stats().qps), (0, 0));
    }
    assert_eq!(a.errors.count(), 2, "{:?}", a.errors);
    a.stop().await;
    b.stop().await;
}

/// Idle connections end when the configuration says so; the next send connects again. Busy ones stay.
pub async fn idle_connections_are_evicted<L: Lab>(lab: Arc<L>) {
    let config = Config { idle_evict_after: Some(Duration::from_secs(1)), ..lab.config(1) };
    let (a, mut b) = (Node::start_with(lab.fabric(1), config).await, Node::start(&*lab, 2).await);
    let mut c = Node::start(&*lab, 3).await;
    a.register(&b);
    a.register(&c);
    for (n, node) in [(1, &mut b), (2, &mut c)] {
        a.send_numbered(node.id(), MessageType::Message, n);
        assert_numbered(&next(&mut node.inbound.message).await, n);
    }
    for n in 0..20 {
        a.send_numbered(c.id(), MessageType::Message, n);
        assert_numbered(&next(&mut c.inbound.message).await, n);
        tokio::time::sleep(SOON).await;
    }
    let stats = a.worker.stats();
    assert_eq!((stats.connections, stats.epochs_ended), (1, 1), "B's went, C's stayed: {stats:?}");
    a.send_numbered(b.id(), MessageType::Message, 9);
    assert_numbered(&next(&mut b.inbound.message).await, 9);
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
    c.stop().await;
}
