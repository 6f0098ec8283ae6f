//! What arrives, on its way to the application: four streams, or a handler on the driver.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use tokio::sync::{Notify, mpsc};
use verbs_bootstrap::InstanceId;

use crate::proto::frame::MessageType;

/// One frame from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Who sent it.
    pub peer: InstanceId,
    /// As what it was sent.
    pub kind: MessageType,
    /// The header as it was given to send.
    pub header: Bytes,
    /// The payload as it was given to send.
    pub payload: Bytes,
}

/// One frame from a peer, borrowed for the length of a [`Handler`] call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Borrowed<'a> {
    /// Who sent it.
    pub peer: InstanceId,
    /// As what it was sent.
    pub kind: MessageType,
    /// The header as it was given to send.
    pub header: &'a [u8],
    /// The payload as it was given to send.
    pub payload: &'a [u8],
}

/// Takes frames on the driver, without a hop or an allocation. Its receive slab is posted again before the call, but
/// while it runs nothing else moves on this worker: hand long work on. A panic is logged and goes no further.
pub trait Handler: Send + Sync + 'static {
    /// One frame of one peer; frames of a peer come in the order in which it sent them.
    fn on_frame(&self, frame: Borrowed<'_>);
}

impl<F: Fn(Borrowed<'_>) + Send + Sync + 'static> Handler for F {
    fn on_frame(&self, frame: Borrowed<'_>) {
        self(frame);
    }
}

/// The four streams of a worker. A frame goes to exactly one.
#[derive(Debug)]
pub struct Inbound {
    /// [`MessageType::Message`].
    pub message: Stream,
    /// [`MessageType::Response`].
    pub response: Stream,
    /// [`MessageType::Ack`] and [`MessageType::Event`].
    pub event: Stream,
    /// [`MessageType::ShuttingDown`]: our own requests that a draining peer turned away.
    pub shutdown: Stream,
}

/// One stream of frames.
#[derive(Debug)]
pub struct Stream {
    frames: mpsc::UnboundedReceiver<Received>,
    backlog: Arc<Backlog>,
}

impl Stream {
    /// The next frame; `None` after the worker's shutdown, when all is taken. Cancel safe.
    pub async fn recv(&mut self) -> Option<Received> {
        let frame = self.frames.recv().await?;
        self.backlog.took(&frame);
        Some(frame)
    }

    /// The next frame if one is there.
    pub fn try_recv(&mut self) -> Option<Received> {
        let frame = self.frames.try_recv().ok()?;
        self.backlog.took(&frame);
        Some(frame)
    }

    /// The poll form of [`Stream::recv`].
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Received>> {
        let polled = self.frames.poll_recv(cx);
        if let Poll::Ready(Some(frame)) = &polled {
            self.backlog.took(frame);
        }
        polled
    }
}

/// A stream that nobody reads any more must not hold credits back for what lies in it.
impl Drop for Stream {
    fn drop(&mut self) {
        self.frames.close();
        while let Ok(frame) = self.frames.try_recv() {
            self.backlog.took(&frame);
        }
    }
}

/// Bytes received and not taken yet. Above the limit the driver holds credits back.
#[derive(Debug)]
pub(crate) struct Backlog {
    bytes: AtomicUsize,
    limit: usize,
    withheld: AtomicBool,
    driver: Arc<Notify>,
}

/// Counted for each frame beside its bytes, so that empty frames cannot pile up for free.
const FRAME_OVERHEAD_BYTES: usize = 128;

impl Backlog {
    pub(crate) fn new(limit: usize, driver: Arc<Notify>) -> Self {
        Self { bytes: AtomicUsize::new(0), limit, withheld: AtomicBool::new(false), driver }
    }

    fn cost(frame: &Received) -> usize {
        frame.header.len() + frame.payload.len() + FRAME_OVERHEAD_BYTES
    }

    fn took(&self, frame: &Received) {
        // In one total order with the driver's store and second look: either it sees these bytes gone, or this call
        // sees the flag. With less, each could miss the other, and credits would be withheld for ever.
        let before = self.bytes.fetch_sub(Self::cost(frame), Ordering::SeqCst);
        if before - Self::cost(frame) <= self.limit / 2 && self.withheld.load(Ordering::SeqCst) {
            self.driver.notify_one();
        }
    }

    /// Whether credits are to be held back, with some hysteresis; and whether that has just changed.
    pub(crate) fn update(&self) -> (bool, bool) {
        let bytes = self.bytes.load(Ordering::Acquire);
        let was = self.withheld.load(Ordering::Acquire);
        let now = if was { bytes > self.limit / 2 } else { bytes > self.limit };
        if was != now {
            self.withheld.store(now, Ordering::SeqCst);
            // A reader that took its frames between the load and the store saw the old flag: look once more.
            let raced = now && self.bytes.load(Ordering::SeqCst) <= self.limit / 2;
            if raced {
                self.driver.notify_one();
            }
        }
        (now, was != now)
    }

    /// Whether credits are held back.
    pub(crate) fn is_withholding(&self) -> bool {
        self.withheld.load(Ordering::Relaxed)
    }

    /// Bytes waiting.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// The driver's end.
pub(crate) enum Sink {
    Streams { senders: [mpsc::UnboundedSender<Received>; 4], backlog: Arc<Backlog> },
    Handler(Arc<dyn Handler>),
}

impl Sink {
    /// The streams and the driver's end of them.
    pub(crate) fn streams(backlog: &Arc<Backlog>) -> (Self, Inbound) {
        let mut receivers = Vec::with_capacity(4);
        let senders = std::array::from_fn(|_| {
            let (sender, frames) = mpsc::unbounded_channel();
            receivers.push(Stream { frames, backlog: backlog.clone() });
            sender
        });
        let mut receivers = receivers.into_iter();
        let mut next = || receivers.next().expect("four streams were made");
        let inbound = Inbound { message: next(), response: next(), event: next(), shutdown: next() };
        (Self::Streams { senders, backlog: backlog.clone() }, inbound)
    }

    /// Hands a frame on; says no when its stream is gone.
    pub(crate) fn push(senders: &[mpsc::UnboundedSender<Received>; 4], backlog: &Backlog, frame: Received) -> bool {
        let lane = match frame.kind {
            MessageType::Message => 0,
            MessageType::Response => 1,
            MessageType::Ack | MessageType::Event => 2,
            MessageType::ShuttingDown => 3,
        };
        let cost = Backlog::cost(&frame);
        backlog.bytes.fetch_add(cost, Ordering::AcqRel);
        let taken = senders[lane].send(frame).is_ok();
        if !taken {
            backlog.bytes.fetch_sub(cost, Ordering::AcqRel);
        }
        taken
    }
}
