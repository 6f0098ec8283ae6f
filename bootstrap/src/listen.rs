//! The accepting side of the exchange.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use crate::{
    config::{Config, ConfigError},
    life::LifeSocket,
    net::Net,
    status::{Refusal, Stage, Status},
    types::Offer,
    wire::WireError,
};

/// What a worker does with those who dial it. Called from many tasks at once.
pub trait Acceptor: Send + Sync + 'static {
    /// The streams that the [`Net`] makes.
    type Stream: Send + 'static;

    /// Would this hello retire something? Then its sender must first answer a challenge, one round trip more, so
    /// that bytes which a dead process left in a socket cannot displace a live connection. Give
    /// [`Exchange::would_replace`](crate::Exchange::would_replace); `true` is always safe.
    fn must_prove_alive(&self, hello: &Offer) -> bool {
        let _ = hello;
        true
    }

    /// A complete, authenticated hello. Bring the QP to RTS and answer, or refuse.
    ///
    /// Runs to its end even past the deadline, so that a QP is never left half made; only dropping the [`Listener`]
    /// cuts it short. An `Ok` is followed by exactly one call of `on_ready` or `on_abandoned`, but for that case.
    fn on_hello(&self, hello: Offer) -> impl Future<Output = Result<Offer, Refusal>> + Send;

    /// READY came: the dialer's QP is in RTS. The socket stays open for the connection's life.
    fn on_ready(&self, hello: Offer, reply: Offer, life: LifeSocket<Self::Stream>);

    /// `on_hello` said yes, but READY never came. The dialer may have connected all the same.
    fn on_abandoned(&self, hello: Offer, reply: Offer, why: AcceptError);
}

/// Why an inbound exchange came to nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptError {
    /// Not within the deadline: a slow or dead dialer.
    #[error("{stage} took longer than {after:?}")]
    Timeout {
        /// The whole exchange's limit.
        after: Duration,
        /// How far it came.
        stage: Stage,
    },
    /// The dialer closed the connection: it gave up, died, or needs no second connection.
    #[error("the dialer closed the connection during {stage}")]
    Closed {
        /// How far it came.
        stage: Stage,
    },
    /// The connection broke.
    #[error("the connection broke during {stage}")]
    Io {
        /// How far it came.
        stage: Stage,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// Not this protocol.
    #[error("the dialer does not speak this bootstrap")]
    Protocol(#[source] WireError),
    /// It was refused.
    #[error("refused: {0}")]
    Refused(#[source] Refusal),
    /// The listener is being stopped.
    #[error("the listener is being stopped")]
    Stopped,
}

/// Why no listener came to be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// A number of the configuration is out of its range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address cannot be listened at: in use, or not of this host. Port 0 asks for a free one.
    #[error("cannot listen at {addr}: is the address one of this host's, and the port free?")]
    Bind {
        /// Where.
        addr: SocketAddr,
        /// The system's word.
        #[source]
        source: io::Error,
    },
}

/// What became of inbound connections. `accepted` is the sum of all the others but `accept_errors`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerStats {
    /// Connections taken.
    pub accepted: u64,
    /// Exchanges that ended with READY.
    pub completed: u64,
    /// Refused, by status.
    pub refused: Vec<(Status, u64)>,
    /// Ended by the deadline.
    pub timed_out: u64,
    /// Bytes that are no frame of this protocol.
    pub garbage: u64,
    /// A length above the limit.
    pub oversize: u64,
    /// Closed or broken by the other side before READY.
    pub closed_early: u64,
    /// Closed at once: too many were pending.
    pub over_limit: u64,
    /// Cut by [`Listener::stop`].
    pub stopped: u64,
    /// Now: no whole hello yet, or waiting for a turn.
    pub pending: u64,
    /// Now: from the hello's acceptance to READY.
    pub in_progress: u64,
    /// Failed accept calls (most often: out of descriptors). The listener pauses and goes on.
    pub accept_errors: u64,
}

/// Takes hellos until it is stopped or dropped. No error of a dialer's or of accept ends it.
#[derive(Debug)]
pub struct Listener {
    local_addr: SocketAddr,
}

impl Listener {
    /// Listens at `addr` (loopback unless others must reach it; port 0 for a free one) and takes connections on the
    /// current runtime.
    ///
    /// # Errors
    ///
    /// [`ListenError`].
    pub async fn bind<N, A>(net: &N, addr: SocketAddr, config: &Config, acceptor: Arc<A>) -> Result<Self, ListenError>
    where
        N: Net,
        A: Acceptor<Stream = N::Stream>,
    {
        config.validate()?;
        let _ = (net, acceptor);
        Err(ListenError::Bind { addr, source: io::ErrorKind::Unsupported.into() })
    }

    /// Where it listens, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// What became of inbound connections so far.
    pub fn stats(&self) -> ListenerStats {
        ListenerStats::default()
    }

    /// Takes no more connections, ends exchanges in progress at their next wait for the dialer (those that
    /// `on_hello` said yes to through `on_abandoned`), and returns when all tasks and sockets are gone.
    #[expect(clippy::unused_async, reason = "the body follows")]
    pub async fn stop(self) {}
}
