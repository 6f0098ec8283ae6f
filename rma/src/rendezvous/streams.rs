//! What arrives: streams on which staged messages come whole, in their place.

use std::{
    collections::VecDeque,
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::task::JoinHandle;
use verbs_transport::{InstanceId, Lane, Received, fabric::Fabric};

use super::{
    inner::{Inner, now},
    puller,
    sink::Sink,
};
use crate::{
    error::PullError,
    proto::{
        book::Ending,
        wire::{Call, Indirect},
    },
};

/// The four streams of a worker, as [`verbs_transport::Inbound`], with staged messages pulled.
#[derive(Debug)]
pub struct Inbound<F: Fabric> {
    /// [`MessageType::Message`](verbs_transport::MessageType::Message).
    pub message: Stream<F>,
    /// [`MessageType::Response`](verbs_transport::MessageType::Response).
    pub response: Stream<F>,
    /// [`MessageType::Ack`](verbs_transport::MessageType::Ack) and
    /// [`MessageType::Event`](verbs_transport::MessageType::Event).
    pub event: Stream<F>,
    /// [`MessageType::ShuttingDown`](verbs_transport::MessageType::ShuttingDown).
    pub shutdown: Stream<F>,
}

impl<F: Fabric> Inbound<F> {
    pub(super) fn new(inbound: verbs_transport::Inbound, inner: &Arc<Inner<F>>) -> Self {
        let stream = |frames| Stream { frames: Some(frames), inner: inner.clone(), waiting: VecDeque::new(), pulls: 0 };
        Self {
            message: stream(inbound.message),
            response: stream(inbound.response),
            event: stream(inbound.event),
            shutdown: stream(inbound.shutdown),
        }
    }
}

/// One stream of messages. Those of one peer come in the order in which it sent them; while one of them is pulled, those
/// behind it wait, and those of other peers do not.
///
/// Pulls start when the stream is read, a few of them ahead (`pulls_ahead`): who does not read takes no memory.
pub struct Stream<F: Fabric> {
    /// Gone when the worker has ended it.
    frames: Option<verbs_transport::Stream>,
    inner: Arc<Inner<F>>,
    /// Empty as long as nothing is pulled.
    waiting: VecDeque<Entry>,
    pulls: usize,
}

enum Entry {
    Whole(Received),
    Pulling(InstanceId, JoinHandle<Option<Received>>),
}

/// Frames that may wait behind a pull before no more are taken from the transport, which then feels it.
const WAITING_MAX: usize = 1024;

impl<F: Fabric> fmt::Debug for Stream<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Stream");
        out.field("waiting", &self.waiting.len()).field("pulls", &self.pulls).finish_non_exhaustive()
    }
}

impl<F: Fabric> Stream<F> {
    /// The next message; `None` after the worker's shutdown, when all is taken. Cancel safe.
    pub async fn recv(&mut self) -> Option<Received> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// The next message if one is there whole.
    pub fn try_recv(&mut self) -> Option<Received> {
        match self.poll_recv(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(message) => message,
            Poll::Pending => None,
        }
    }

    /// The poll form of [`Stream::recv`].
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Received>> {
        loop {
            if let Some(message) = self.next_waiting(cx) {
                return Poll::Ready(Some(message));
            }
            let Some(frames) = &mut self.frames else {
                return if self.waiting.is_empty() { Poll::Ready(None) } else { Poll::Pending };
            };
            if self.pulls >= self.inner.config.pulls_ahead || self.waiting.len() >= WAITING_MAX {
                return Poll::Pending;
            }
            match frames.poll_recv(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => self.frames = None,
                Poll::Ready(Some(frame)) if frame.lane == Lane::Indirect => self.begin_pull(frame),
                Poll::Ready(Some(frame)) if self.is_blocked(frame.peer) => self.waiting.push_back(Entry::Whole(frame)),
                Poll::Ready(Some(frame)) => return Poll::Ready(Some(frame)),
            }
        }
    }

    fn is_blocked(&self, peer: InstanceId) -> bool {
        self.waiting.iter().any(|entry| entry.peer() == peer)
    }

    fn begin_pull(&mut self, frame: Received) {
        let (inner, peer) = (self.inner.clone(), frame.peer);
        // Frames come after the start only.
        let Some(pulling) = self.inner.spawn_joined(async move { inner.pull_message(frame).await }) else { return };
        self.pulls += 1;
        self.waiting.push_back(Entry::Pulling(peer, pulling));
    }

    /// The first that is whole and has nothing of its peer before it.
    fn next_waiting(&mut self, cx: &mut Context<'_>) -> Option<Received> {
        let mut blocked: Vec<InstanceId> = Vec::new();
        let mut at = 0;
        while at < self.waiting.len() {
            let peer = self.waiting[at].peer();
            if blocked.contains(&peer) {
                at += 1;
                continue;
            }
            let ready = match &mut self.waiting[at] {
                Entry::Whole(_) => true,
                Entry::Pulling(_, pulling) => match Pin::new(pulling).poll(cx) {
                    Poll::Pending => false,
                    Poll::Ready(pulled) => {
                        self.pulls -= 1;
                        match pulled.ok().flatten() {
                            Some(message) => self.waiting[at] = Entry::Whole(message),
                            None => drop(self.waiting.remove(at)),
                        }
                        continue;
                    }
                },
            };
            if !ready {
                blocked.push(peer);
                at += 1;
            } else if let Some(Entry::Whole(message)) = self.waiting.remove(at) {
                return Some(message);
            }
        }
        None
    }
}

impl Entry {
    const fn peer(&self) -> InstanceId {
        match self {
            Self::Whole(received) => received.peer,
            Self::Pulling(peer, _) => *peer,
        }
    }
}

/// What nobody reads any more is not pulled: its sender hears of it.
impl<F: Fabric> Drop for Stream<F> {
    fn drop(&mut self) {
        for entry in &self.waiting {
            if let Entry::Pulling(_, pulling) = entry {
                pulling.abort();
            }
        }
    }
}

impl<F: Fabric> Inner<F> {
    /// Pulls a message's payload. Gives up when the sender says no, or cannot be asked for as long as it would wait.
    async fn pull_message(self: Arc<Self>, mut frame: Received) -> Option<Received> {
        let peer = frame.peer;
        let indirect = match Indirect::decode(&frame.payload) {
            Ok(indirect) => indirect,
            Err(error) => {
                self.counters.messages_lost.add(1);
                tracing::warn!(%peer, %error, "an indirect message that cannot be read");
                return None;
            }
        };
        let until = now() + self.config.staged_ttl_after_end;
        let mut pause = Duration::from_millis(20);
        loop {
            let mut bytes = Vec::new();
            match puller::pull_from(&self, peer, indirect.handle, &mut Sink::Vec(&mut bytes)).await {
                Ok(lease) if bytes.len() as u64 == indirect.total_bytes => {
                    lease.end(Ending::Release);
                    self.counters.messages_pulled.add(1);
                    frame.payload = bytes.into();
                    frame.lane = Lane::Application;
                    return Some(frame);
                }
                Ok(_) => {
                    let told = indirect.total_bytes;
                    tracing::warn!(%peer, told, came = bytes.len(), "a message of another length than it was said to be");
                    break;
                }
                Err(error) if is_retriable(&error) && now() < until => {
                    tracing::debug!(%peer, handle = %indirect.handle, %error, "a message is not pulled yet");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
                Err(error) => {
                    tracing::warn!(%peer, handle = %indirect.handle, %error, "a message could not be pulled");
                    break;
                }
            }
        }
        self.counters.messages_lost.add(1);
        self.tell(peer, Call::Refuse { handle: indirect.handle });
        None
    }
}

const fn is_retriable(error: &PullError) -> bool {
    match error {
        PullError::Ask(error) => error.is_retriable(),
        PullError::LeaseOver { .. } => true,
        _ => false,
    }
}
