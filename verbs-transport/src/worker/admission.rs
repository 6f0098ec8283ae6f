//! The gate's tickets: what a send that had to queue can observe.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use crate::proto::frame::Lane;

/// What [`Worker::send`](crate::Worker::send) says.
#[derive(Debug)]
#[must_use = "`Pending` tells when the frame has left the gate; dropping it is allowed"]
pub enum SendOutcome {
    /// The frame is in the peer's channel, or was reported through its error handler already.
    Admitted,
    /// The channel is full: the frame waits in the gate, in order.
    Pending(Admission),
}

/// Why a queued frame never reached the channel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmissionError {
    /// [`Admission::cancel`] was called in time.
    #[error("cancelled")]
    Cancelled,
    /// The connection that it waited for ended.
    #[error("connection replaced: {0}")]
    ConnectionReplaced(String),
    /// The connection that came up takes no frame of this size.
    #[error("frame of {bytes} bytes is above the peer's limit of {max}")]
    TooLarge {
        /// Header + payload.
        bytes: usize,
        /// The smaller of both sides' limits.
        max: usize,
    },
    /// The connection that came up is to a peer without the layer that it was for.
    #[error("the peer has no layer for {} frames", .lane.name())]
    NoSuchLane {
        /// Of the frame.
        lane: Lane,
    },
    /// It waited for as long as `admission_deadline` allows: the peer takes frames slower than they are sent, or not
    /// at all.
    #[error("no room in the peer's channel within {after:?} (`admission_deadline`)")]
    Deadline {
        /// The limit.
        after: std::time::Duration,
    },
    /// The worker is shutting down.
    #[error("channel closed")]
    ChannelClosed,
}

/// How an admission stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmissionState {
    /// In the gate.
    Pending,
    /// In the channel: from here on a failure is reported through the frame's error handler.
    Admitted,
    /// Never in the channel.
    Failed(AdmissionError),
}

type Hook = Box<dyn FnOnce(&Result<(), AdmissionError>) + Send>;

#[derive(Default)]
struct Inner {
    result: Option<Result<(), AdmissionError>>,
    /// Whether somebody is running hooks; a hook registered meanwhile waits its turn in `hooks`.
    running: bool,
    hooks: std::collections::VecDeque<Hook>,
    wakers: Vec<Waker>,
}

/// One queued frame's state, shared by its gate entry and its observers.
#[derive(Default)]
pub(crate) struct Ticket(Mutex<Inner>);

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ticket").field(&self.lock().result).finish()
    }
}

impl Ticket {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Settles the ticket once; later calls change nothing. Runs the hooks on the caller, outside the lock.
    pub(crate) fn resolve(&self, result: Result<(), AdmissionError>) {
        let wakers = {
            let mut inner = self.lock();
            if inner.result.is_some() {
                return;
            }
            inner.result = Some(result);
            std::mem::take(&mut inner.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
        self.run_hooks();
    }

    fn run_hooks(&self) {
        loop {
            let (hook, result) = {
                let mut inner = self.lock();
                let Some(result) = inner.result.clone() else { return };
                if inner.running {
                    return;
                }
                let Some(hook) = inner.hooks.pop_front() else { return };
                inner.running = true;
                (hook, result)
            };
            contain("admission hook", || hook(&result));
            self.lock().running = false;
        }
    }
}

/// Observes one queued frame. Dropping it, or a timeout around it, cancels nothing.
#[derive(Debug)]
pub struct Admission {
    ticket: Arc<Ticket>,
    gate: Arc<dyn CancelGate>,
}

/// The gate that a ticket waits in.
pub(crate) trait CancelGate: Send + Sync + fmt::Debug {
    /// Takes the frame of `ticket` out of the gate, if it is still there.
    fn cancel(&self, ticket: &Arc<Ticket>) -> bool;
}

impl Admission {
    pub(crate) fn new(ticket: Arc<Ticket>, gate: Arc<dyn CancelGate>) -> Self {
        Self { ticket, gate }
    }

    /// How it stands.
    pub fn state(&self) -> AdmissionState {
        match &self.ticket.lock().result {
            None => AdmissionState::Pending,
            Some(Ok(())) => AdmissionState::Admitted,
            Some(Err(error)) => AdmissionState::Failed(error.clone()),
        }
    }

    /// Takes the frame out of the gate; those behind it keep their order. `false`: it had left the gate already. The
    /// frame's error handler is not called: the admission's error is its one end.
    pub fn cancel(&self) -> bool {
        self.gate.cancel(&self.ticket)
    }

    /// Runs `hook` once when the frame has left the gate, or now if it has. Hooks run in order of registration.
    pub fn on_resolved(&self, hook: impl FnOnce(&Result<(), AdmissionError>) + Send + 'static) {
        self.ticket.lock().hooks.push_back(Box::new(hook));
        self.ticket.run_hooks();
    }
}

impl Future for Admission {
    type Output = Result<(), AdmissionError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut inner = self.ticket.lock();
        if let Some(result) = &inner.result {
            return Poll::Ready(result.clone());
        }
        if !inner.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            inner.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// Runs a callback of the application; a panic in it is logged and goes no further.
pub(crate) fn contain(what: &'static str, callback: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(callback)).is_err() {
        tracing::error!(what, "a callback of the application panicked; the transport goes on");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Debug)]
    struct NoGate;

    impl CancelGate for NoGate {
        fn cancel(&self, ticket: &Arc<Ticket>) -> bool {
            ticket.resolve(Err(AdmissionError::Cancelled));
            true
        }
    }

    fn admission() -> Admission {
        Admission::new(Arc::default(), Arc::new(NoGate))
    }

    /// M-70: hooks run once each, in order, also those registered by a hook, and a panic stops none.
    #[test]
    fn hooks_run_once_in_order_whatever_they_do() {
        let admission = admission();
        let seen = Arc::new(Mutex::new(Vec::new()));
        for n in 0..3 {
            let seen = seen.clone();
            admission.on_resolved(move |_| {
                seen.lock().unwrap().push(n);
                assert!(n != 1, "a hook that panics");
            });
        }
        let inner = Admission::new(admission.ticket.clone(), Arc::new(NoGate));
        let also = seen.clone();
        admission.on_resolved(move |_| {
            also.lock().unwrap().push(3);
            let again = also.clone();
            inner.on_resolved(move |_| again.lock().unwrap().push(4));
        });
        admission.ticket.resolve(Ok(()));
        admission.ticket.resolve(Err(AdmissionError::ChannelClosed));
        assert_eq!(*seen.lock().unwrap(), [0, 1, 2, 3, 4]);
        assert_eq!(admission.state(), AdmissionState::Admitted);
        let late = Arc::new(AtomicUsize::new(0));
        let count = late.clone();
        admission.on_resolved(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(late.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn a_dropped_future_cancels_nothing() {
        let first = admission();
        let second = Admission::new(first.ticket.clone(), Arc::new(NoGate));
        drop(first);
        assert_eq!(second.state(), AdmissionState::Pending);
        second.ticket.resolve(Ok(()));
        assert_eq!(second.await, Ok(()));
    }
}
