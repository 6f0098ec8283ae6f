//! Field reports about receivers that pause, consumers that are slow, queues that are small and frames that are large.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{task::JoinHandle, time::Instant};
use verbs_transport::{
    AdmissionState, Config, ConnectError, EpochEnd, MessageType, Progress, SendError, SendOutcome, Worker,
    fabric::{Fabric, SlabSizes},
};

use crate::{
    lab::{Lab, SMALL_SLABS},
    node::{Node, next, next_within, pattern},
};

const LONG: Duration = Duration::from_secs(60);

/// The application's loop in manual mode, which can be made to pause: then nobody polls, and no receive is posted again.
struct Poller {
    paused: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Poller {
    fn start<F: Fabric>(worker: &Worker<F>) -> Self {
        let (worker, paused) = (worker.clone(), Arc::new(AtomicBool::new(false)));
        let pause = paused.clone();
        let task = tokio::spawn(async move {
            loop {
                while !pause.load(Ordering::Acquire) && worker.progress().is_ok_and(|polled| polled > 0) {}
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        Self { paused, task }
    }

    /// Nobody polls for so long.
    async fn pause(&self, length: Duration) {
        self.paused.store(true, Ordering::Release);
        tokio::time::sleep(length).await;
        self.paused.store(false, Ordering::Release);
    }

    async fn stop(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// B06, M-2: the receiver posts nothing for a second. Credits run out before its receives do, so there is no RNR NAK, and
/// when it resumes, traffic resumes with it: no step of 655 ms, no lost connection.
pub async fn b06_a_receiver_that_pauses_costs_no_more_than_its_pause<L: Lab>(lab: Arc<L>) {
    let config = Config { progress: Progress::Manual, ..lab.config(2) };
    let (a, mut b) = (Node::start(&*lab, 1).await, Node::start_with(lab.fabric(2), config).await);
    let poller = Poller::start(&b.worker);
    a.register(&b);
    a.worker.ensure_connected(b.id()).await.expect("connected");
    let naks = lab.rnr_naks();
    let count = 2000u32;
    for n in 0..count {
        let _ = a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), pattern(1000));
    }
    let mut due = 0..count;
    let mut expect = |frame: verbs_transport::Received| {
        assert_eq!(frame.header[..], due.next().expect("no more were sent").to_be_bytes());
    };
    for _ in 0..200 {
        expect(next(&mut b.inbound.message).await);
    }
    poller.pause(Duration::from_secs(1)).await;
    let resumed = Instant::now();
    let mut last = resumed;
    let mut longest = Duration::ZERO;
    for _ in 200..count {
        expect(next(&mut b.inbound.message).await);
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    eprintln!("1800 frames {:?} after the pause; the longest wait was {longest:?}", resumed.elapsed());
    // Generous for an emulated host; a single RNR wait of timer code 0 would be longer.
    assert!(longest < Duration::from_millis(500), "{longest:?}");
    assert_eq!(lab.rnr_naks(), naks, "credits run out before receives do");
    assert_eq!((a.worker.stats().epochs_ended, b.worker.stats().epochs_ended), (0, 0));
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
    poller.stop().await;
}

/// B07: a consumer takes one frame and holds it, with all behind it, for longer than any deadline. Its sender feels it; the
/// connection lives; control goes through; and a newcomer connects, pings, and is heard on another stream.
pub async fn b07_slow_consumers_hold_frames_and_a_newcomer_is_served<L: Lab>(lab: Arc<L>) {
    let config = Config { inbound_max_bytes: 64 << 10, ..lab.config(2) };
    let (a, mut b) = (Node::start(&*lab, 1).await, Node::start_with(lab.fabric(2), config).await);
    a.register(&b);
    let count = 1000u32;
    let mut last = None;
    for n in 0..count {
        if let SendOutcome::Pending(admission) =
            a.send(b.id(), MessageType::Message, n.to_be_bytes().to_vec(), pattern(1000))
        {
            last = Some(admission);
        }
    }
    let last = last.expect("the channel is smaller than the burst");
    let held = next(&mut b.inbound.message).await;
    let began = Instant::now();
    let health = Duration::from_secs(2);
    while began.elapsed() < 2 * health {
        tokio::time::sleep(Duration::from_millis(500)).await;
        a.worker.check_health(b.id(), health).await.expect("control goes through");
    }
    assert_eq!(last.state(), AdmissionState::Pending, "the sender feels it");
    let c = Node::start(&*lab, 3).await;
    c.register(&b);
    c.worker.ensure_connected(b.id()).await.expect("a newcomer connects");
    c.worker.check_health(b.id(), health).await.expect("and pings");
    c.send_numbered(b.id(), MessageType::Event, 3);
    crate::node::assert_numbered(&next(&mut b.inbound.event).await, 3);
    assert_eq!(held.header[..], 0u32.to_be_bytes());
    drop(held);
    for n in 1..count {
        assert_eq!(next(&mut b.inbound.message).await.header[..], n.to_be_bytes());
    }
    last.await.expect("admitted in the end");
    for node in [&a, &b, &c] {
        assert_eq!(node.worker.stats().epochs_ended, 0, "nobody was given up");
        node.errors.assert_none();
    }
    for node in [a, b, c] {
        node.stop().await;
    }
}

/// B13, M-45: the CQ has room for sixteen peers. The seventeenth is refused with the numbers; and when nobody polls for a
/// second while all sixteen send their whole windows, both ways, it does not overrun.
pub async fn b13_sixteen_peers_fill_the_cq_while_nobody_polls<L: Lab>(lab: Arc<L>) {
    const PEERS: u32 = 16;
    const WINDOW: u16 = 8;
    let slabs = SlabSizes { receive_slabs: 80 + (PEERS + 1) * (u32::from(WINDOW) + 6), ..SMALL_SLABS };
    let fabric = lab.fabric_cq(1, slabs, slabs.receive_slabs + PEERS * 24);
    // A device may round the depth up: its send queues take all of it.
    let send_wrs = (fabric.limits().cq_depth - slabs.receive_slabs) / PEERS;
    let config = Config { window_slabs: WINDOW, send_wrs, progress: Progress::Manual, ..lab.config(1) };
    let mut a = Node::start_with(fabric, config).await;
    let poller = Poller::start(&a.worker);
    let few = SlabSizes { receive_slabs: 96, receive_bytes: 1024, send_slabs: 8, send_bytes: 1024 };
    let mut peers = Vec::new();
    for n in 0..=PEERS {
        let config = Config { window_slabs: WINDOW, ..lab.config(n + 2) };
        let peer = Node::start_with(lab.fabric_with(n + 2, few), config).await;
        peer.register(&a);
        a.register(&peer);
        peers.push(peer);
    }
    let late = peers.pop().expect("the seventeenth");
    for peer in &peers {
        a.worker.ensure_connected(peer.id()).await.expect("sixteen fit");
    }
    let refused = a.worker.ensure_connected(late.id()).await.expect_err("the seventeenth does not");
    let ConnectError::Failed(cause) = &refused else { panic!("{refused}") };
    assert!(matches!(**cause, EpochEnd::CqFull { qps: 16, .. }), "{refused}");
    let refused = late.worker.ensure_connected(a.id()).await.expect_err("nor from its side");
    assert!(refused.to_string().contains("cq_depth"), "{refused}");

    let each = 100u32;
    for peer in &peers {
        for n in 0..each {
            let _ = peer.send(a.id(), MessageType::Message, n.to_be_bytes().to_vec(), "to one");
            let _ = a.send(peer.id(), MessageType::Message, n.to_be_bytes().to_vec(), "to all");
        }
    }
    poller.pause(Duration::from_secs(1)).await;
    let mut due = std::collections::BTreeMap::new();
    for _ in 0..PEERS * each {
        let frame = next_within(&mut a.inbound.message, LONG).await;
        let n = due.entry(frame.peer).or_insert(0u32);
        assert_eq!(frame.header[..], n.to_be_bytes());
        *n += 1;
    }
    for peer in &mut peers {
        for n in 0..each {
            assert_eq!(next_within(&mut peer.inbound.message, LONG).await.header[..], n.to_be_bytes());
        }
        peer.errors.assert_none();
    }
    a.errors.assert_none();
    let stats = a.worker.stats();
    // The attempts of the seventeenth, and nothing else.
    assert!(stats.ended.keys().all(|cause| *cause == "cq_full") && stats.connections == 16, "{stats:?}");
    a.stop().await;
    poller.stop().await;
    for peer in peers.into_iter().chain([late]) {
        peer.stop().await;
    }
}

/// B20: frames around the port's longest message arrive, for they go in slabs; one byte above `eager_max_bytes`, 2 GiB and
/// 4 GiB + 1 (which 32 bits would take for 1) are too large before anything is posted, and the connection lives.
pub async fn b20_frames_around_the_longest_message_and_far_above<L: Lab>(lab: Arc<L>) {
    let fabric = lab.fabric(1);
    let longest = usize::try_from(fabric.limits().message_bytes).expect("it fits");
    let max = 2 * longest;
    let with = |n| Config { eager_max_bytes: u32::try_from(max).expect("8 MiB"), ..lab.config(n) };
    let (a, mut b) = (Node::start_with(fabric, with(1)).await, Node::start_with(lab.fabric(2), with(2)).await);
    a.register(&b);
    a.worker.ensure_connected(b.id()).await.expect("connected");
    assert_eq!(a.worker.max_message_size(b.id()), Some(max));
    for bytes in [longest - 1, longest, longest + 1] {
        let payload = pattern(bytes - 4);
        let _ = a.send(b.id(), MessageType::Message, "size", payload.clone());
        let frame = next_within(&mut b.inbound.message, LONG).await;
        assert!(frame.header == "size" && frame.payload == payload, "{bytes} bytes");
    }
    let sends = a.worker.stats().links;
    // Zero pages that nobody touches.
    let huge = Bytes::from(vec![0u8; (2 << 30) + 1]);
    let half = huge.slice(..2 << 30);
    for (header, payload) in [
        (huge.slice(..1), huge.slice(..max)),
        (Bytes::new(), half.clone()),
        (half.clone(), huge.clone()),
        (half.clone(), half),
    ] {
        let bytes = header.len() + payload.len();
        let reported = a.errors.count();
        let outcome = a.send(b.id(), MessageType::Message, header, payload);
        assert!(matches!(outcome, SendOutcome::Admitted));
        assert_eq!(a.errors.count(), reported + 1, "before the call returns");
        match &a.errors.all()[reported].2 {
            SendError::TooLarge { bytes: told, max: limit } => assert_eq!((*told, *limit), (bytes, max)),
            other => panic!("{other}"),
        }
    }
    let now = a.worker.stats().links;
    assert_eq!((now.sends_inline, now.sends_copied), (sends.sends_inline, sends.sends_copied), "nothing went out");
    let refused = a.errors.count();
    a.send_numbered(b.id(), MessageType::Message, 1);
    crate::node::assert_numbered(&next(&mut b.inbound.message).await, 1);
    assert_eq!((a.errors.count(), a.worker.stats().epochs_begun), (refused, 1), "the connection lives");
    a.stop().await;
    b.stop().await;
}

/// MT-30, M-51: thirty peers spend their windows while nobody polls, so that less than an eighth of the SRQ is posted. The
/// limit event is counted, the SRQ is refilled, the event armed anew, and nothing met an empty SRQ.
pub async fn the_srq_limit_is_told_and_refilled<L: Lab>(lab: Arc<L>) {
    // 80 + 6 receives a peer are left of 80 + 70 a peer: 260 of 2,180, below the limit of 272.
    const PEERS: u32 = 30;
    let slabs = SlabSizes { receive_slabs: 80 + PEERS * 70, receive_bytes: 512, send_slabs: 64, send_bytes: 512 };
    let config = Config { progress: Progress::Manual, ..lab.config(1) };
    let mut a = Node::start_with(lab.fabric_with(1, slabs), config).await;
    let poller = Poller::start(&a.worker);
    let few = SlabSizes { receive_slabs: 96, ..slabs };
    let naks = lab.rnr_naks();
    let each = 100u32;
    for round in 0..2u32 {
        // Only a new connection has its window in full.
        let mut peers = Vec::new();
        for n in 0..PEERS {
            let config = Config { window_slabs: 8, pack_waiting: false, ..lab.config(n + 2) };
            let peer = Node::start_with(lab.fabric_with(n + 2, few), config).await;
            peer.register(&a);
            peer.worker.ensure_connected(a.id()).await.expect("connected");
            peers.push(peer);
        }
        poller.paused.store(true, Ordering::Release);
        for peer in &peers {
            for n in 0..each {
                let _ = peer.send(a.id(), MessageType::Message, n.to_be_bytes().to_vec(), "a window and more");
            }
        }
        // Until all windows are spent; less than `health_deadline`, for nobody answers.
        let paused = Instant::now();
        let spent = |peer: &Node<L::F>| peer.worker.describe(a.id()).and_then(|told| told.credits_left) == Some(0);
        while !peers.iter().all(spent) && paused.elapsed() < Duration::from_millis(1500) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // What is posted has then arrived.
        tokio::time::sleep(Duration::from_millis(50)).await;
        poller.paused.store(false, Ordering::Release);
        let mut due = std::collections::BTreeMap::new();
        for _ in 0..PEERS * each {
            let frame = next_within(&mut a.inbound.message, LONG).await;
            let n = due.entry(frame.peer).or_insert(0u32);
            assert_eq!(frame.header[..], n.to_be_bytes());
            *n += 1;
        }
        let began = Instant::now();
        while a.worker.stats().srq_low <= u64::from(round) {
            assert!(began.elapsed() < Duration::from_secs(5), "round {round}: {:?}", a.worker.stats());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for peer in peers {
            peer.errors.assert_none();
            peer.stop().await;
        }
        // Their receives are promised to nobody before the next ones come.
        while a.worker.stats().receives_promised > 0 {
            assert!(began.elapsed() < Duration::from_secs(10), "round {round}: {:?}", a.worker.stats());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    assert_eq!(lab.rnr_naks(), naks);
    a.errors.assert_none();
    a.stop().await;
    poller.stop().await;
}
