//! The seam to the network, so that the same exchange runs over TCP and over a simulated net in fake time.

use std::{future::Future, io, net::SocketAddr};

use tokio::io::{AsyncRead, AsyncWrite};

/// Makes and takes byte streams. [`TcpNet`](crate::TcpNet) is the real one.
pub trait Net: Send + Sync + 'static {
    /// One connection. Its peer's death closes it.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;
    /// What [`Net::listen`] gives.
    type Listener: NetListener<Stream = Self::Stream>;

    /// Takes connections at `addr`; port 0 asks for a free one.
    fn listen(&self, addr: SocketAddr) -> impl Future<Output = io::Result<Self::Listener>> + Send;

    /// Connects to `addr`. Dropping the future gives up.
    fn dial(&self, addr: SocketAddr) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// The taking side of a [`Net`].
pub trait NetListener: Send + 'static {
    /// One connection.
    type Stream;

    /// Where it listens, with the port that was chosen.
    ///
    /// # Errors
    ///
    /// The operating system's.
    fn local_addr(&self) -> io::Result<SocketAddr>;

    /// The next connection and where it came from. Cancel safe.
    fn accept(&mut self) -> impl Future<Output = io::Result<(Self::Stream, SocketAddr)>> + Send;
}
