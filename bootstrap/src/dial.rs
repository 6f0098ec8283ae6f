//! The dialing side of the exchange.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::AsyncWriteExt,
    time::{Instant, timeout_at},
};

use crate::{
    auth::{self, Role},
    config::Config,
    life::LifeSocket,
    net::Net,
    status::{Stage, Status},
    types::Offer,
    wire::{self, Frame, Hello, Nonce, Proof, READY, ReadError, Reply, WireError},
};

/// Why a dial came to nothing. Each ends the epoch; what else to do differs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// The acceptor said no: act on the status.
    #[error("{addr} refused: {status}: {detail}")]
    Refused {
        /// Who.
        addr: SocketAddr,
        /// Why; see [`Status`] for what to do.
        status: Status,
        /// Why, with numbers.
        detail: String,
    },
    /// No answer in time: host down, packets dropped by a firewall, or a peer that hangs.
    #[error(
        "{addr} was silent: {stage} took longer than {after:?}; check that the host is up and that no firewall drops TCP to this port"
    )]
    Timeout {
        /// Who.
        addr: SocketAddr,
        /// The whole exchange's limit.
        after: Duration,
        /// How far it came.
        stage: Stage,
    },
    /// No TCP connection: nobody listens there, or there is no route. The peer may have moved: look it up again.
    #[error("no TCP connection to {addr}: does the peer run, and is its address current?")]
    Connect {
        /// Who.
        addr: SocketAddr,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The peer closed the connection without a word: it died, was stopped, or has too many dialers. Try later.
    #[error("{addr} closed the connection during {stage}: it died, is stopping, or has too many dialers at once")]
    Closed {
        /// Who.
        addr: SocketAddr,
        /// How far it came.
        stage: Stage,
    },
    /// The connection broke.
    #[error("the connection to {addr} broke during {stage}")]
    Io {
        /// Who.
        addr: SocketAddr,
        /// How far it came.
        stage: Stage,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// What answered does not speak this protocol: wrong port, or another version.
    #[error("{addr} does not speak this bootstrap")]
    Protocol {
        /// Who.
        addr: SocketAddr,
        /// What it said.
        #[source]
        source: WireError,
    },
    /// This side has a secret, and the acceptor asked for no proof of it: it has none, or somebody stands between.
    /// Give the acceptor the secret; never go on without.
    #[error("{addr} did not ask for the shared secret, so it is not trusted: configure the same secret on both sides")]
    NotChallenged {
        /// Who.
        addr: SocketAddr,
    },
    /// The acceptor asks for a secret, and this side has none: configure it.
    #[error("{addr} asks for a shared secret and none is configured here")]
    SecretRequired {
        /// Who.
        addr: SocketAddr,
    },
    /// The acceptor's reply is not proven: the secrets differ, or somebody changed the reply.
    #[error("the reply of {addr} does not carry the right proof: do both sides have the same secret?")]
    BadProof {
        /// Who.
        addr: SocketAddr,
    },
}

/// A reply is there and authentic; the acceptor's QP is in RTS. Bring the own QP to RTS, then call
/// [`Dialed::ready`]. Dropping it instead abandons the exchange.
#[derive(Debug)]
#[must_use = "dropping it closes the socket, which abandons the exchange"]
pub struct Dialed<S> {
    /// What the acceptor offers.
    pub reply: Offer,
    stream: S,
    addr: SocketAddr,
    deadline: Instant,
    after: Duration,
}

/// Asks the worker at `addr` for a connection: everything up to its reply, TCP connect included, within
/// [`Config::deadline`].
///
/// # Errors
///
/// [`DialError`]; each means that the epoch is over, unless the accepting half has connected it meanwhile.
pub async fn dial<N: Net>(
    net: &N,
    addr: SocketAddr,
    hello: &Offer,
    config: &Config,
) -> Result<Dialed<N::Stream>, DialError> {
    let after = config.deadline;
    let deadline = Instant::now() + after;
    let mut talk = Talk { addr, stage: Stage::Connect };
    let end = timeout_at(deadline, talk.run(net, hello, config)).await;
    match end {
        Ok(Ok((reply, stream))) => Ok(Dialed { reply, stream, addr, deadline, after }),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(DialError::Timeout { addr, after, stage: talk.stage }),
    }
}

impl<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin> Dialed<S> {
    /// The own QP is in RTS: tells the acceptor, which from now on may send. Within the same deadline as the dial.
    ///
    /// # Errors
    ///
    /// [`DialError`]: the acceptor will abandon its half.
    pub async fn ready(mut self) -> Result<LifeSocket<S>, DialError> {
        let (addr, after, stage) = (self.addr, self.after, Stage::Ready);
        match timeout_at(self.deadline, self.stream.write_all(&[READY])).await {
            Ok(Ok(())) => Ok(LifeSocket::new(self.stream)),
            Ok(Err(source)) => Err(broken(addr, stage, source)),
            Err(_) => Err(DialError::Timeout { addr, after, stage }),
        }
    }
}

/// One dial as it goes.
struct Talk {
    addr: SocketAddr,
    stage: Stage,
}

impl Talk {
    async fn run<N: Net>(&mut self, net: &N, offer: &Offer, config: &Config) -> Result<(Offer, N::Stream), DialError> {
        let addr = self.addr;
        let mut stream = net.dial(addr).await.map_err(|source| DialError::Connect { addr, source })?;
        self.stage = Stage::Hello;
        let secret = config.secret.as_ref();
        let hello = Hello { offer: offer.clone(), nonce: auth::nonce(), has_secret: secret.is_some() };
        self.write(&mut stream, &Frame::Hello(hello.clone())).await?;
        self.stage = Stage::Reply;
        let mut challenged: Option<Nonce> = None;
        loop {
            match self.read(&mut stream).await? {
                Frame::Refuse(refusal) => {
                    return Err(DialError::Refused { addr, status: refusal.status, detail: refusal.detail });
                }
                Frame::Challenge(challenge) if challenged.is_none() => {
                    self.stage = Stage::Proof;
                    let tag = match (secret, challenge.needs_tag) {
                        (None, true) => return Err(DialError::SecretRequired { addr }),
                        (Some(_), false) => return Err(DialError::NotChallenged { addr }),
                        (None, false) => None,
                        (Some(secret), true) => Some(secret.tag(Role::Dialer, &hello, &challenge.nonce, None)),
                    };
                    self.write(&mut stream, &Frame::Proof(Proof { nonce: challenge.nonce, tag })).await?;
                    challenged = Some(challenge.nonce);
                    self.stage = Stage::Reply;
                }
                Frame::Reply(Reply { offer: reply, tag }) => {
                    if let Some(secret) = secret {
                        let Some(nonce) = challenged else { return Err(DialError::NotChallenged { addr }) };
                        let proven =
                            tag.is_some_and(|tag| secret.verify(tag, Role::Acceptor, &hello, &nonce, Some(&reply)));
                        if !proven {
                            return Err(DialError::BadProof { addr });
                        }
                    }
                    return Ok((reply, stream));
                }
                other => {
                    let source = WireError::OutOfTurn { expected: "a reply", found: other.name() };
                    return Err(DialError::Protocol { addr, source });
                }
            }
        }
    }

    async fn write<S: tokio::io::AsyncWrite + Unpin>(&self, stream: &mut S, frame: &Frame) -> Result<(), DialError> {
        wire::write_frame(stream, frame).await.map_err(|source| broken(self.addr, self.stage, source))
    }

    async fn read<S: tokio::io::AsyncRead + Unpin>(&self, stream: &mut S) -> Result<Frame, DialError> {
        let (addr, stage) = (self.addr, self.stage);
        let bytes = wire::read_frame(stream).await.map_err(|error| match error {
            ReadError::Closed => DialError::Closed { addr, stage },
            ReadError::Io(source) => DialError::Io { addr, stage, source },
            ReadError::Wire(source) => DialError::Protocol { addr, source },
        })?;
        Frame::decode(&bytes).map_err(|source| DialError::Protocol { addr, source })
    }
}

/// A failed write: most often the peer has closed.
fn broken(addr: SocketAddr, stage: Stage, source: io::Error) -> DialError {
    match source.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => DialError::Closed { addr, stage },
        _ => DialError::Io { addr, stage, source },
    }
}
