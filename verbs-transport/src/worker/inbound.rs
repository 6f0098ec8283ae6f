//! What arrives, on its way to the application: four streams, or a handler on the driver.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use tokio::sync::{Notify, mpsc};
use verbs_bootstrap::InstanceId;

use super::backlog::{self, Wake};
use crate::proto::frame::{Lane, MessageType};

/// One frame from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Who sent it.
    pub peer: InstanceId,
    /// As what it was sent.
    pub kind: MessageType,
    /// [`Lane::Application`], or [`Lane::Indirect`] where a layer is attached that understands it.
    pub lane: Lane,
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
    /// [`Lane::Application`], or [`Lane::Indirect`] where a layer is attached that understands it.
    pub lane: Lane,
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
        self.backlog.took(cost(&frame));
        Some(frame)
    }

    /// The next frame if one is there.
    pub fn try_recv(&mut self) -> Option<Received> {
        let frame = self.frames.try_recv().ok()?;
        self.backlog.took(cost(&frame));
        Some(frame)
    }

    /// The poll form of [`Stream::recv`].
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Received>> {
        let polled = self.frames.poll_recv(cx);
        if let Poll::Ready(Some(frame)) = &polled {
            self.backlog.took(cost(frame));
        }
        polled
    }
}

/// A stream that nobody reads any more must not hold credits back for what lies in it.
impl Drop for Stream {
    fn drop(&mut self) {
        self.frames.close();
        while let Ok(frame) = self.frames.try_recv() {
            self.backlog.took(cost(&frame));
        }
    }
}

/// Bytes received and not taken yet.
pub(crate) type Backlog = backlog::Backlog<Arc<Notify>>;

impl Wake for Arc<Notify> {
    fn wake(&self) {
        self.notify_one();
    }
}

/// Counted for each frame beside its bytes, so that empty frames cannot pile up for free.
const FRAME_OVERHEAD_BYTES: usize = 128;

fn cost(frame: &Received) -> usize {
    frame.header.len() + frame.payload.len() + FRAME_OVERHEAD_BYTES
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
        let cost = cost(&frame);
        backlog.came(cost);
        let taken = senders[lane].send(frame).is_ok();
        if !taken {
            backlog.took(cost);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credits_are_held_back_above_the_limit_until_half_of_it() {
        let backlog = Backlog::new(100, Arc::default());
        backlog.came(100);
        assert_eq!(backlog.update(), (false, false));
        backlog.came(1);
        assert_eq!((backlog.update(), backlog.update()), ((true, true), (true, false)));
        backlog.took(50);
        assert_eq!((backlog.update(), backlog.is_withholding()), ((true, false), true));
        backlog.took(1);
        assert_eq!((backlog.update(), backlog.bytes()), ((false, true), 50));
    }
}
