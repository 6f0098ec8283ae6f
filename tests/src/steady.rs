//! Traffic as it is for hours: whoever counts allocations counts them here.

use std::{
    fmt::Debug,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use verbs_bootstrap::InstanceId;
use verbs_transport::{Borrowed, Config, MessageType, Progress, SendErrorHandler, SendOutcome, Worker, fabric::Fabric};

use crate::{lab::Lab, leaks::blocks_allocated, node::Errors};

/// What one step sends.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Bytes of a message.
    pub bytes: usize,
    /// Messages in a burst.
    pub burst: u64,
    /// Whether each is answered by one of the same size: else credits come home by pure grants alone.
    pub answered: bool,
}

/// Every way a message takes on the handler path: inline, copied, of two SENDs; and more at once than the window has credits.
pub const STEPS: [Step; 6] = [
    Step { bytes: 64, burst: 16, answered: true },
    Step { bytes: 64, burst: 16, answered: false },
    Step { bytes: 4096, burst: 16, answered: true },
    Step { bytes: 4096, burst: 16, answered: false },
    Step { bytes: 64, burst: 150, answered: true },
    Step { bytes: 4096, burst: 150, answered: false },
];

/// Two connected workers whose frames go to handlers.
pub struct Steady<F: Fabric> {
    a: Worker<F>,
    b: Worker<F>,
    to_b: InstanceId,
    manual: bool,
    at_a: Arc<AtomicU64>,
    at_b: Arc<AtomicU64>,
    errors: Arc<Errors>,
    lost: Arc<dyn SendErrorHandler>,
    inline: Bytes,
    copied: Bytes,
}

const PATIENCE: Duration = Duration::from_secs(60);
const TRIES: usize = 4;

impl<F: Fabric> Steady<F> {
    /// Hosts 1 and 2, polled in that way.
    ///
    /// # Panics
    ///
    /// When they do not connect.
    pub async fn start<L: Lab<F = F>>(lab: &L, progress: Progress) -> Self {
        let errors = Arc::<Errors>::default();
        let lost: Arc<dyn SendErrorHandler> = errors.clone();
        let worker = |n| {
            let config = Config { progress, ..lab.config(n) };
            Worker::new(config, lab.fabric(n)).expect("a valid configuration")
        };
        let (a, b) = (worker(1), worker(2));
        let (at_a, at_b) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let count = at_a.clone();
        a.start_with_handler(move |_: Borrowed<'_>| {
            count.fetch_add(1, Ordering::AcqRel);
        })
        .await
        .expect("the worker starts");
        let (count, answering, returned) = (at_b.clone(), Arc::new(OnceLock::<Worker<F>>::new()), lost.clone());
        let (inline, copied) = (Bytes::from(vec![7; 64]), Bytes::from(vec![7; 4096]));
        let (answer, short, long) = (answering.clone(), inline.clone(), copied.clone());
        b.start_with_handler(move |frame: Borrowed<'_>| {
            count.fetch_add(1, Ordering::AcqRel);
            if let (MessageType::Message, Some(b)) = (frame.kind, answer.get()) {
                let payload = if frame.payload.len() == short.len() { short.clone() } else { long.clone() };
                let _ = b.send(frame.peer, Bytes::new(), payload, MessageType::Response, returned.clone());
            }
        })
        .await
        .expect("the worker starts");
        // A worker in its own handler is a circle, which its shutdown opens.
        let _ = answering.set(b.clone());
        let to_b = a.register(&b.address()).expect("the address is good");
        b.register(&a.address()).expect("the address is good");
        let this = Self { a, b, to_b, manual: progress == Progress::Manual, at_a, at_b, errors, lost, inline, copied };
        let connecting = {
            let a = this.a.clone();
            tokio::spawn(async move { a.ensure_connected(to_b).await })
        };
        this.until("the connection", || connecting.is_finished()).await;
        connecting.await.expect("no panic").expect("it connects");
        this
    }

    async fn until(&self, what: impl Debug, mut so: impl FnMut() -> bool) {
        let began = Instant::now();
        while !so() {
            self.errors.assert_none();
            assert!(began.elapsed() < PATIENCE, "never: {what:?}");
            if self.manual {
                self.a.progress().expect("the device is there");
                self.b.progress().expect("the device is there");
            }
            tokio::task::yield_now().await;
        }
    }

    /// One burst, until all of it has come, and been answered if that is asked for.
    ///
    /// # Panics
    ///
    /// When a message is lost.
    pub async fn step(&self, step: Step) {
        let (a, b) = (self.at_a.load(Ordering::Acquire), self.at_b.load(Ordering::Acquire));
        let payload = if step.bytes == self.inline.len() { &self.inline } else { &self.copied };
        assert_eq!(payload.len(), step.bytes);
        let kind = if step.answered { MessageType::Message } else { MessageType::Event };
        for _ in 0..step.burst {
            let sent = self.a.send(self.to_b, Bytes::new(), payload.clone(), kind, self.lost.clone());
            assert!(matches!(sent, SendOutcome::Admitted), "the channel takes a burst");
        }
        let answers = if step.answered { step.burst } else { 0 };
        self.until(step, || {
            self.at_b.load(Ordering::Acquire) - b == step.burst && self.at_a.load(Ordering::Acquire) - a == answers
        })
        .await;
    }

    /// Runs each step so many times, after as many for warming up, and counts the blocks that this process allocates
    /// meanwhile.
    ///
    /// A step that allocates is repeated: buffers have the size of the largest batch so far, and on a busy machine a still
    /// larger one may come late; and a second after a larger burst its memory is given back.
    ///
    /// # Panics
    ///
    /// When a step allocates each time.
    pub async fn assert_allocates_nothing(&self, rounds: u32) {
        let (a_before, b_before) = (self.a.stats(), self.b.stats());
        for step in STEPS {
            self.repeat(step, rounds).await;
            let mut allocated = [0; TRIES];
            for allocated in &mut allocated {
                let before = blocks_allocated();
                self.repeat(step, rounds).await;
                *allocated = blocks_allocated() - before;
                if *allocated == 0 {
                    break;
                }
            }
            let messages = u64::from(rounds) * step.burst;
            assert!(allocated.contains(&0), "{allocated:?} blocks for {messages} messages in each try of {step:?}");
        }
        // That it was the traffic which this is about.
        let (a, b) = (self.a.stats(), self.b.stats());
        for (what, after, before) in [
            ("inline", a.links.sends_inline, a_before.links.sends_inline),
            ("copied", a.links.sends_copied, a_before.links.sends_copied),
            ("packed", a.links.sends_packed, a_before.links.sends_packed),
            ("pure grants", b.links.pure_grants, b_before.links.pure_grants),
            ("credits given back", a.links.credits_received, a_before.links.credits_received),
            ("waits for credits", a.links.credit_stalls, a_before.links.credit_stalls),
        ] {
            assert!(after > before, "there was none of: {what}");
        }
    }

    async fn repeat(&self, step: Step, rounds: u32) {
        for _ in 0..rounds {
            self.step(step).await;
        }
    }

    /// Ends both.
    pub async fn stop(self) {
        self.a.shutdown().await;
        self.b.shutdown().await;
    }
}
