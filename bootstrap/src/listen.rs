//! The accepting side of the exchange.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Semaphore, watch},
    task::{JoinError, JoinHandle, JoinSet},
};

use crate::{
    config::{Config, ConfigError},
    counters::Counters,
    life::LifeSocket,
    net::{Net, NetListener},
    serve::{Shared, serve},
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
    /// [`Exchange::would_replace`](crate::Exchange::would_replace); `true` is always safe. Asked when the hello came and
    /// again when it is its turn.
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
///
/// Dropping it aborts everything at once, `on_hello` included.
#[derive(Debug)]
pub struct Listener {
    local_addr: SocketAddr,
    counters: Arc<Counters>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
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
        let bind_error = |source| ListenError::Bind { addr, source };
        let listener = net.listen(addr).await.map_err(bind_error)?;
        let local_addr = listener.local_addr().map_err(bind_error)?;
        if config.secret.is_none() && !local_addr.ip().is_loopback() {
            tracing::warn!(
                %local_addr,
                "no shared secret: whoever reaches this port can connect and be taken for any worker"
            );
        }
        let counters = Arc::new(Counters::default());
        let (stop, stopped) = watch::channel(false);
        let turns = Arc::new(Semaphore::new(config.parallel_exchanges));
        let shared = Arc::new(Shared { config: config.clone(), turns });
        let accepting = accept_loop(listener, shared, acceptor, Arc::clone(&counters), stopped);
        Ok(Self { local_addr, counters, stop, task: tokio::spawn(accepting) })
    }

    /// Where it listens, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// What became of inbound connections so far.
    pub fn stats(&self) -> ListenerStats {
        self.counters.snapshot()
    }

    /// Takes no more connections, ends exchanges in progress at their next wait for the dialer (those that
    /// `on_hello` said yes to through `on_abandoned`), and returns when all tasks and sockets are gone.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        if let Err(error) = (&mut self.task).await {
            tracing::error!(%error, local_addr = %self.local_addr, "the accept loop did not end well");
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept_loop<L, A>(
    mut listener: L,
    shared: Arc<Shared>,
    acceptor: Arc<A>,
    counters: Arc<Counters>,
    mut stop: watch::Receiver<bool>,
) where
    L: NetListener<Stream: AsyncRead + AsyncWrite + Unpin + Send>,
    A: Acceptor<Stream = L::Stream>,
{
    let stopped = stop.clone();
    let mut tasks = JoinSet::new();
    let mut pause = FIRST_PAUSE;
    loop {
        let accepted = tokio::select! {
            biased;
            _ = stop.wait_for(|stopped| *stopped) => break,
            Some(ended) = tasks.join_next() => {
                complain(ended);
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, from)) => {
                pause = FIRST_PAUSE;
                // Without a slot the stream is dropped here, which closes it.
                if let Some(slot) = counters.accept(shared.config.max_pending) {
                    let (shared, acceptor) = (Arc::clone(&shared), Arc::clone(&acceptor));
                    tasks.spawn(serve(shared, acceptor, stream, from, slot, stopped.clone()));
                }
            }
            // The dialer was gone before it was taken: says nothing about this host.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => counters.accept_failed(),
            Err(error) => {
                counters.accept_failed();
                tracing::warn!(%error, ?pause, "cannot take connections; is the limit of open files too low?");
                // Stopping waits for at most one pause.
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
    drop(listener);
    while let Some(ended) = tasks.join_next().await {
        complain(ended);
    }
}

fn complain(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "an inbound exchange did not end well");
    }
}

/// After a failed accept: descriptors come free when exchanges end, which takes milliseconds to seconds.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
