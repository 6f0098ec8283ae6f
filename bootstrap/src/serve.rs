//! One inbound exchange, from the first byte to READY.

use std::{future::poll_fn, net::SocketAddr, pin::Pin, sync::Arc, task::Poll, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, timeout_at},
};

use crate::{
    auth::{self, Role, Secret},
    config::Config,
    counters::Slot,
    life::LifeSocket,
    listen::{AcceptError, Acceptor},
    status::{Refusal, Stage, Status},
    types::Offer,
    wire::{self, Challenge, Frame, Hello, Nonce, READY, ReadError, Reply, WireError},
};

/// What all inbound exchanges of one listener share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    /// One permit for each exchange that brings a QP up.
    pub(crate) turns: Arc<Semaphore>,
}

/// Runs a step under the exchange's deadline and the listener's stop.
macro_rules! bounded {
    ($inbound:ident, $step:expr) => {{
        let (deadline, after, mut stop) = ($inbound.deadline, $inbound.after, $inbound.stop.clone());
        let end = tokio::select! {
            biased;
            _ = stop.wait_for(|stopped| *stopped) => Some(Err(AcceptError::Stopped)),
            end = timeout_at(deadline, $step) => end.ok(),
        };
        end.unwrap_or(Err(AcceptError::Timeout { after, stage: $inbound.stage }))
    }};
}
/// Runs one exchange and tells the acceptor and the counters how it ended.
pub(crate) async fn serve<S, A>(
    shared: Arc<Shared>,
    acceptor: Arc<A>,
    stream: S,
    from: SocketAddr,
    mut slot: Slot,
    stop: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    A: Acceptor<Stream = S>,
{
    let after = shared.config.deadline;
    let mut inbound = Inbound { stream, stage: Stage::Hello, after, deadline: Instant::now() + after, stop };
    let admitted = bounded!(inbound, inbound.admit(&shared, &*acceptor));
    let (hello, nonce, turn) = match admitted {
        Ok(admitted) => admitted,
        Err(error) => return finish(slot, from, Err(&error)),
    };
    slot.turn();
    inbound.stage = Stage::Reply;
    match acceptor.on_hello(hello.offer.clone()).await {
        Err(refusal) => {
            let sent = bounded!(inbound, inbound.refuse(&refusal));
            finish(slot, from, Err(&sent.err().unwrap_or(AcceptError::Refused(refusal))));
        }
        Ok(reply) => match bounded!(inbound, inbound.answer(&shared, &hello, nonce, &reply)) {
            Ok(()) => {
                // Free for the next before the acceptor's own work.
                drop(turn);
                finish(slot, from, Ok(()));
                acceptor.on_ready(hello.offer, reply, LifeSocket::new(inbound.stream));
            }
            Err(error) => {
                drop(turn);
                finish(slot, from, Err(&error));
                acceptor.on_abandoned(hello.offer, reply, error);
            }
        },
    }
}

fn finish(slot: Slot, from: SocketAddr, end: Result<(), &AcceptError>) {
    if let Err(error) = end {
        tracing::debug!(%from, error = error as &dyn std::error::Error, "inbound exchange ended");
    }
    slot.end(end);
}

struct Inbound<S> {
    stream: S,
    stage: Stage,
    after: Duration,
    deadline: Instant,
    stop: watch::Receiver<bool>,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Inbound<S> {
    /// Everything before the acceptor hears of it: a whole hello, proof if it is due, a turn, and still alive.
    async fn admit<A: Acceptor>(
        &mut self,
        shared: &Shared,
        acceptor: &A,
    ) -> Result<(Hello, Option<Nonce>, OwnedSemaphorePermit), AcceptError> {
        let hello = match self.read().await? {
            Frame::Hello(hello) => hello,
            other => return Err(self.out_of_turn("a hello", &other).await),
        };
        let secret = shared.config.secret.as_ref();
        let unequal = match (secret.is_some(), hello.has_secret) {
            (true, false) => Some(Refusal::new(Status::AuthRequired, "configure the shared secret of this worker")),
            (false, true) => Some(Refusal::new(Status::AuthUnavailable, "this worker has no shared secret configured")),
            _ => None,
        };
        if let Some(refusal) = unequal {
            return Err(self.refused(refusal).await);
        }
        let mut nonce = None;
        if secret.is_some() || acceptor.must_prove_alive(&hello.offer) {
            nonce = Some(self.challenge(secret, &hello).await?);
        }
        self.stage = Stage::Turn;
        let turn = Arc::clone(&shared.turns).acquire_owned().await.map_err(|_| AcceptError::Stopped)?;
        // While it waited, another may have connected what this hello would now displace.
        if nonce.is_none() && acceptor.must_prove_alive(&hello.offer) {
            nonce = Some(self.challenge(secret, &hello).await?);
        }
        self.still_there().await?;
        Ok((hello, nonce, turn))
    }

    /// Lets the dialer show that it lives, and with a secret that it knows it.
    async fn challenge(&mut self, secret: Option<&Secret>, hello: &Hello) -> Result<Nonce, AcceptError> {
        self.stage = Stage::Proof;
        let nonce = auth::nonce();
        self.write(&Frame::Challenge(Challenge { nonce, needs_tag: secret.is_some() })).await?;
        let proof = match self.read().await? {
            Frame::Proof(proof) => proof,
            other => return Err(self.out_of_turn("a proof", &other).await),
        };
        let knows = match (secret, proof.tag) {
            (None, _) => true,
            (Some(secret), Some(tag)) => secret.verify(tag, Role::Dialer, hello, &nonce, None),
            (Some(_), None) => false,
        };
        if proof.nonce != nonce || !knows {
            let refusal = Refusal::new(Status::AuthFailed, "the proof does not fit: are both secrets the same?");
            return Err(self.refused(refusal).await);
        }
        Ok(nonce)
    }

    /// The reply, then READY.
    async fn answer(
        &mut self,
        shared: &Shared,
        hello: &Hello,
        nonce: Option<Nonce>,
        reply: &Offer,
    ) -> Result<(), AcceptError> {
        // With a secret there was a challenge.
        let proven = shared.config.secret.as_ref().zip(nonce);
        let tag = proven.map(|(secret, nonce)| secret.tag(Role::Acceptor, hello, &nonce, Some(reply)));
        self.write(&Frame::Reply(Reply { offer: reply.clone(), tag })).await?;
        self.stage = Stage::Ready;
        let mut byte = [0];
        wire::read_exact(&mut self.stream, &mut byte).await.map_err(|error| self.read_failed(error))?;
        match byte {
            [READY] => Ok(()),
            _ => Err(AcceptError::Protocol(WireError::OutOfTurn { expected: "READY", found: "other byte" })),
        }
    }

    async fn refuse(&mut self, refusal: &Refusal) -> Result<(), AcceptError> {
        self.write(&Frame::Refuse(refusal.clone())).await
    }

    /// Refuses; gives what the exchange ends with.
    async fn refused(&mut self, refusal: Refusal) -> AcceptError {
        match self.refuse(&refusal).await {
            Ok(()) => AcceptError::Refused(refusal),
            Err(error) => error,
        }
    }

    /// The other side speaks this protocol, but not now: tells it, so that its error names the fault.
    async fn out_of_turn(&mut self, expected: &'static str, found: &Frame) -> AcceptError {
        let error = WireError::OutOfTurn { expected, found: found.name() };
        // The frame was ours: telling helps. A failure to tell changes nothing.
        let _ = self.refuse(&Refusal::new(Status::BadOffer, error.to_string())).await;
        AcceptError::Protocol(error)
    }

    async fn read(&mut self) -> Result<Frame, AcceptError> {
        let bytes = wire::read_frame(&mut self.stream).await.map_err(|error| self.read_failed(error))?;
        let error = match Frame::decode(&bytes) {
            Ok(frame) => return Ok(frame),
            Err(error) => error,
        };
        match &error {
            WireError::Version { .. } => {
                Err(self.refused(Refusal::new(Status::UnsupportedVersion, error.to_string())).await)
            }
            // Another protocol: no answer, lest two servers talk to each other for ever.
            WireError::Magic { .. } => Err(AcceptError::Protocol(error)),
            _ => {
                let _ = self.refuse(&Refusal::new(Status::BadOffer, error.to_string())).await;
                Err(AcceptError::Protocol(error))
            }
        }
    }

    async fn write(&mut self, frame: &Frame) -> Result<(), AcceptError> {
        let stage = self.stage;
        wire::write_frame(&mut self.stream, frame).await.map_err(|source| match source.kind() {
            std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset => AcceptError::Closed { stage },
            _ => AcceptError::Io { stage, source },
        })
    }

    /// A dialer that closed its end has given up: its hello must move nothing any more.
    async fn still_there(&mut self) -> Result<(), AcceptError> {
        let stage = self.stage;
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        poll_fn(|cx| {
            Poll::Ready(match Pin::new(&mut self.stream).poll_read(cx, &mut buffer) {
                Poll::Pending => Ok(()),
                Poll::Ready(Ok(())) if buffer.filled().is_empty() => Err(AcceptError::Closed { stage }),
                Poll::Ready(Ok(())) => Err(AcceptError::Protocol(WireError::OutOfTurn {
                    expected: "nothing",
                    found: "byte before the reply",
                })),
                Poll::Ready(Err(source)) => Err(AcceptError::Io { stage, source }),
            })
        })
        .await
    }

    fn read_failed(&self, error: ReadError) -> AcceptError {
        let stage = self.stage;
        match error {
            ReadError::Closed => AcceptError::Closed { stage },
            ReadError::Io(source) => AcceptError::Io { stage, source },
            ReadError::Wire(error) => AcceptError::Protocol(error),
        }
    }
}
