//! The real [`Net`]: TCP, with the options set before listen and connect.

use std::{io, net::SocketAddr};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::{
    config::TcpConfig,
    net::{Net, NetListener},
};

/// TCP sockets with the options of a [`TcpConfig`].
#[derive(Clone, Debug, Default)]
pub struct TcpNet {
    config: TcpConfig,
}

/// What [`TcpNet`] listens with.
#[derive(Debug)]
pub struct TcpNetListener {
    listener: TcpListener,
    config: TcpConfig,
}

impl TcpNet {
    /// Sockets with these options.
    pub fn new(config: &TcpConfig) -> Self {
        Self { config: config.clone() }
    }

    /// A socket with its buffers set: the window scale is fixed when the handshake begins, so later is too late.
    fn socket(&self, addr: SocketAddr) -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        if let Some(bytes) = self.config.receive_buffer_bytes {
            socket.set_recv_buffer_size(bytes)?;
        }
        if let Some(bytes) = self.config.send_buffer_bytes {
            socket.set_send_buffer_size(bytes)?;
        }
        Ok(socket)
    }
}

impl Net for TcpNet {
    type Stream = TcpStream;
    type Listener = TcpNetListener;

    async fn listen(&self, addr: SocketAddr) -> io::Result<TcpNetListener> {
        let socket = self.socket(addr)?;
        // A restarted worker takes its port again while old connections linger in TIME_WAIT.
        socket.set_reuse_address(true)?;
        socket.bind(&addr.into())?;
        socket.listen(i32::try_from(self.config.backlog).unwrap_or(i32::MAX))?;
        let listener = TcpListener::from_std(socket.into())?;
        Ok(TcpNetListener { listener, config: self.config.clone() })
    }

    async fn dial(&self, addr: SocketAddr) -> io::Result<TcpStream> {
        let socket = self.socket(addr)?;
        let stream = TcpSocket::from_std_stream(socket.into()).connect(addr).await?;
        tune(&stream, &self.config)?;
        Ok(stream)
    }
}

impl NetListener for TcpNetListener {
    type Stream = TcpStream;

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    async fn accept(&mut self) -> io::Result<(TcpStream, SocketAddr)> {
        let (stream, from) = self.listener.accept().await?;
        // The peer may be gone already; reading will say so.
        let _ = tune(&stream, &self.config);
        Ok((stream, from))
    }
}

/// What is set on each connection.
fn tune(stream: &TcpStream, config: &TcpConfig) -> io::Result<()> {
    stream.set_nodelay(true)?;
    if let Some(keepalive) = config.keepalive {
        let keepalive = TcpKeepalive::new()
            .with_time(keepalive.idle)
            .with_interval(keepalive.interval)
            .with_retries(keepalive.retries);
        SockRef::from(stream).set_tcp_keepalive(&keepalive)?;
    }
    Ok(())
}
