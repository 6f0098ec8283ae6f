//! Sockets, made the way they must be before they carry bytes.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
};

use rustix::event::PollFlags;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    buffers::Buffers,
    line::{Line, LineError, Stop},
};
use crate::{Phase, TransferError, deadline::Deadline};

/// Connections that the kernel holds until they are accepted; the system may cut it.
const BACKLOG: i32 = 1024;

/// A listener whose connections inherit the buffer sizes: set on an accepted socket, with data in flight, they would
/// shrink a window that was announced already.
pub(super) fn listen(bind: SocketAddr, buffers: Buffers) -> io::Result<TcpListener> {
    let socket = socket(bind, buffers)?;
    // A restarted engine takes its port back while connections of its predecessor still time out.
    socket.set_reuse_address(true)?;
    socket.bind(&bind.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// A connection to `peer`.
pub(crate) fn dial(
    peer: SocketAddr,
    buffers: Buffers,
    deadline: Deadline,
    stop: &Stop,
) -> Result<TcpStream, TransferError> {
    let failed = |error: io::Error| TransferError::Connect { peer, source: Arc::new(error) };
    let socket = socket(peer, buffers).map_err(failed)?;
    match socket.connect(&peer.into()) {
        Err(error) if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {
            return Err(failed(error));
        }
        _ => {}
    }
    let stream: TcpStream = socket.into();
    Line { stream: &stream, deadline, stop }.wait(PollFlags::OUT).map_err(|error| match error {
        LineError::Io(error) => failed(error),
        other => broken(other, Phase::Connect),
    })?;
    if let Some(error) = stream.take_error().map_err(failed)? {
        return Err(failed(error));
    }
    // A port of the ephemeral range that nobody listens on may be drawn for this end, too: TCP then connects the socket
    // with itself.
    if stream.local_addr().map_err(failed)? == peer {
        return Err(failed(io::ErrorKind::ConnectionRefused.into()));
    }
    stream.set_nodelay(true).map_err(failed)?;
    Ok(stream)
}

/// What went wrong on a line, as the caller is told.
pub(crate) fn broken(error: LineError, phase: Phase) -> TransferError {
    match error {
        LineError::TimedOut => TransferError::TimedOut { phase },
        LineError::Stopped => TransferError::Stopped,
        LineError::Closed => TransferError::Disconnected { phase },
        LineError::Io(source) => TransferError::Io { phase, source: Arc::new(source) },
    }
}

fn socket(address: SocketAddr, buffers: Buffers) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    // Otherwise an urgent byte would be counted as available, and then not be read.
    socket.set_out_of_band_inline(true)?;
    buffers.apply(&socket)?;
    Ok(socket)
}
