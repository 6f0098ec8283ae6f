//! The ways to poll and to receive, and callbacks that misbehave.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::mpsc;
use verbs_transport::{
    Borrowed, Config, Inbound, MessageType, Progress, SendError, SendOutcome, Worker, fabric::Fabric,
};

use crate::{
    lab::Lab,
    node::{Node, PATIENCE, next, next_within},
};

/// How frames are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taking {
    Recv,
    Handler,
    TryRecv,
}

/// A worker whose frames come out of one channel, however it takes them, and who polls if nobody else does.
struct Echo<F: Fabric> {
    worker: Worker<F>,
    frames: mpsc::UnboundedReceiver<Bytes>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl<F: Fabric> Echo<F> {
    async fn start(fabric: F, config: Config, taking: Taking) -> Self {
        let manual = config.progress == Progress::Manual;
        let worker = Worker::new(config, fabric).expect("valid");
        let (sender, frames) = mpsc::unbounded_channel();
        let mut tasks = Vec::new();
        if taking == Taking::Handler {
            let take = move |frame: Borrowed<'_>| drop(sender.send(Bytes::copy_from_slice(frame.header)));
            worker.start_with_handler(take).await.expect("started");
        } else {
            let Inbound { mut message, .. } = worker.start().await.expect("started");
            let poller = worker.clone();
            tasks.push(tokio::spawn(async move {
                loop {
                    let frame = if taking == Taking::Recv {
                        message.recv().await
                    } else {
                        let _ = poller.progress();
                        let frame = message.try_recv();
                        if frame.is_none() {
                            tokio::time::sleep(Duration::from_millis(1)).await;
                            continue;
                        }
                        frame
                    };
                    let Some(frame) = frame else { return };
                    if sender.send(frame.header).is_err() {
                        return;
                    }
                }
            }));
        }
        if manual && taking != Taking::TryRecv {
            let poller = worker.clone();
            tasks.push(tokio::spawn(async move {
                loop {
                    while poller.progress().is_ok_and(|polled| polled > 0) {}
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }));
        }
        Self { worker, frames, tasks }
    }

    fn send(&self, to: &Self, n: u32) -> SendOutcome {
        let fail = |_: Bytes, _: Bytes, error: SendError| panic!("nothing fails here: {error}");
        let header = Bytes::copy_from_slice(&n.to_be_bytes());
        self.worker.send(to.worker.instance(), header, "echo".into(), MessageType::Message, Arc::new(fail))
    }

    async fn expect(&mut self, n: u32) {
        let frame = tokio::time::timeout(PATIENCE, self.frames.recv()).await.expect("in time").expect("not ended");
        assert_eq!(frame[..], n.to_be_bytes());
    }

    async fn stop(self) {
        self.worker.shutdown().await;
        for task in self.tasks {
            task.abort();
            let _ = task.await;
        }
    }
}

/// A ping-pong, then a flood both ways, with every way to receive.
async fn all_ways<L: Lab>(lab: &L, progress: Progress) {
    for taking in [Taking::Recv, Taking::Handler, Taking::TryRecv] {
        let start = |n| {
            let config = Config { progress, ..lab.config(n) };
            Echo::start(lab.fabric(n), config, taking)
        };
        let (mut a, mut b) = (start(1).await, start(2).await);
        a.worker.register(&b.worker.address()).expect("registered");
        b.worker.register(&a.worker.address()).expect("registered");
        for n in 0..20 {
            let _ = a.send(&b, n);
            b.expect(n).await;
            let _ = b.send(&a, n);
            a.expect(n).await;
        }
        for n in 0..2000 {
            let _ = (a.send(&b, n), b.send(&a, n));
        }
        for n in 0..2000 {
            a.expect(n).await;
            b.expect(n).await;
        }
        a.stop().await;
        b.stop().await;
    }
}

/// DESIGN section 3: a task that sleeps on the completion channel.
pub async fn event_mode_with_every_way_to_receive<L: Lab>(lab: Arc<L>) {
    all_ways(&*lab, Progress::Event).await;
}

/// DESIGN section 3: the same task, spinning for a while before it sleeps.
pub async fn spin_then_park_with_every_way_to_receive<L: Lab>(lab: Arc<L>) {
    all_ways(&*lab, Progress::SpinThenPark { spin: Duration::from_micros(20) }).await;
}

/// DESIGN section 3: nobody polls but the application.
pub async fn manual_mode_with_every_way_to_receive<L: Lab>(lab: Arc<L>) {
    all_ways(&*lab, Progress::Manual).await;
}

/// DESIGN section 3: a thread of the application's that knows nothing of a runtime. Needs real time.
pub async fn polling_by_hand_needs_no_runtime<L: Lab>(lab: Arc<L>) {
    let mut a = Node::start(&*lab, 1).await;
    let b = Worker::new(Config { progress: Progress::Manual, ..lab.config(2) }, lab.fabric(2)).expect("valid");
    let mut inbound = b.start().await.expect("started");
    a.worker.register(&b.address()).expect("registered");
    let to_a = b.register(&a.worker.address()).expect("registered");
    let _ = a.send(b.instance(), MessageType::Message, "to b", "x");
    let (done, errors, polled) = (Arc::new(AtomicBool::new(false)), a.errors.clone(), b.clone());
    let until = done.clone();
    let polling = std::thread::spawn(move || {
        while !until.load(Ordering::Acquire) {
            polled.progress().expect("the device is there");
            if let Some(frame) = inbound.message.try_recv() {
                let _ = polled.send(to_a, frame.header, frame.payload, MessageType::Response, errors.clone());
            }
            std::thread::yield_now();
        }
    });
    let answer = tokio::time::timeout(4 * PATIENCE, a.inbound.response.recv()).await;
    done.store(true, Ordering::Release);
    tokio::task::spawn_blocking(|| polling.join()).await.expect("no panic").expect("no panic");
    assert_eq!(answer.expect("in time").expect("the stream is open").header, "to b");
    a.errors.assert_none();
    a.stop().await;
    b.shutdown().await;
}

/// DESIGN section 3: a thread of its own. Needs real time.
pub async fn busy_poll_with_every_way_to_receive<L: Lab>(lab: Arc<L>) {
    all_ways(&*lab, Progress::BusyPoll).await;
}

/// Unwinds as a panic does, but prints no backtrace: that takes longer than the test under emulation.
fn panic_quietly() {
    std::panic::resume_unwind(Box::new("as it is meant to"));
}

/// M-66: a handler that panics at every third frame loses that call and nothing else.
pub async fn a_handler_that_panics_stops_nothing<L: Lab>(lab: Arc<L>) {
    let a = Node::start(&*lab, 1).await;
    let b = Worker::new(lab.config(2), lab.fabric(2)).expect("valid");
    let seen = Arc::new(AtomicU32::new(0));
    let count = seen.clone();
    b.start_with_handler(move |frame: Borrowed<'_>| {
        let n = count.fetch_add(1, Ordering::Relaxed);
        assert_eq!(frame.header, n.to_be_bytes());
        if n % 3 == 0 {
            panic_quietly();
        }
    })
    .await
    .expect("started");
    a.worker.register(&b.address()).expect("registered");
    for n in 0..300u32 {
        let _ = a.send(b.instance(), MessageType::Message, n.to_be_bytes().to_vec(), "x");
    }
    for _ in 0..500 {
        if seen.load(Ordering::Relaxed) == 300 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(seen.load(Ordering::Relaxed), 300);
    a.errors.assert_none();
    a.stop().await;
    b.shutdown().await;
}

/// M-66: an `on_error` that panics, or that sends again and polls, hurts neither the other frames nor the worker.
pub async fn an_error_handler_that_panics_stops_nothing<L: Lab>(lab: Arc<L>) {
    let (a, b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
    a.register(&b);
    a.worker.ensure_connected(b.id()).await.expect("connected");
    b.worker.shutdown().await;
    let told = Arc::new(Mutex::new(Vec::new()));
    for n in 0..400u32 {
        let (told, worker, to) = (told.clone(), a.worker.clone(), b.id());
        let on_error = move |header: Bytes, _: Bytes, _: SendError| {
            told.lock().expect("never poisoned").push(header);
            let _ = (worker.progress(), worker.stats(), worker.describe(to));
            if n % 2 == 1 {
                panic_quietly();
            }
        };
        let header = Bytes::copy_from_slice(&n.to_be_bytes());
        let outcome = a.worker.send(b.id(), header, "x".into(), MessageType::Message, Arc::new(on_error));
        if let SendOutcome::Pending(admission) = outcome {
            admission.on_resolved(|_| panic_quietly());
        }
    }
    // Every frame ends: reported, refused, or (before B's end is known) taken for delivered.
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while a.worker.describe(b.id()).is_some_and(|told| told.queued_frames > 0) {
        assert!(tokio::time::Instant::now() < deadline, "frames are still queued");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!told.lock().expect("never poisoned").is_empty());
    // The worker lives.
    let mut c = Node::start(&*lab, 3).await;
    a.register(&c);
    a.send_numbered(c.id(), MessageType::Message, 1);
    let _ = next(&mut c.inbound.message).await;
    a.stop().await;
    b.stop().await;
    c.stop().await;
}

/// B09, B19: a flood of 64 B frames both ways in event mode. No stall of two seconds; every frame once, in order; no
/// completion of a WR that was not posted.
pub async fn flood_both_ways_without_a_stall<L: Lab>(lab: Arc<L>) {
    let (mut a, mut b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
    a.register(&b);
    b.register(&a);
    let each = lab.rounds(1_000_000, 50_000);
    let flood = |worker: Worker<L::F>, to, errors: Arc<crate::node::Errors>| async move {
        let payload = Bytes::from_static(&[7; 60]);
        for n in 0..each {
            let header = Bytes::copy_from_slice(&n.to_be_bytes());
            let outcome = worker.send(to, header, payload.clone(), MessageType::Message, errors.clone());
            if let SendOutcome::Pending(admission) = outcome {
                admission.await.expect("admitted");
            } else if n % 64 == 0 {
                tokio::task::yield_now().await;
            }
        }
    };
    let senders = [
        tokio::spawn(flood(a.worker.clone(), b.id(), a.errors.clone())),
        tokio::spawn(flood(b.worker.clone(), a.id(), b.errors.clone())),
    ];
    let watchdog = Duration::from_secs(2);
    for n in 0..each {
        for stream in [&mut a.inbound.message, &mut b.inbound.message] {
            let frame = match stream.try_recv() {
                Some(frame) => frame,
                None => next_within(stream, watchdog).await,
            };
            assert_eq!(frame.header[..], n.to_be_bytes());
        }
    }
    for sender in senders {
        sender.await.expect("the sender does not panic");
    }
    for node in [&a, &b] {
        let stats = node.worker.stats();
        assert_eq!(stats.received.total(), u64::from(each), "{stats:?}");
        assert_eq!((stats.stale_completions, stats.malformed, stats.epochs_ended), (0, 0, 0), "{stats:?}");
        node.errors.assert_none();
    }
    a.stop().await;
    b.stop().await;
}
