//! Connections that wait for the next request to the same life of the same peer.
//!
//! One is kept only after a clean final reply, when not a byte is owed by either side. It is used again only if nothing
//! has come in on it since and it has not been idle for too long.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::Epoch;

pub(crate) struct Pool {
    max_kept: usize,
    idle: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    closed: bool,
    /// The longest idle one first.
    kept: Vec<Kept>,
}

struct Kept {
    peer: (SocketAddr, Epoch),
    since: Instant,
    stream: TcpStream,
}

impl Pool {
    pub(crate) fn new(max_kept: usize, idle: Duration) -> Self {
        Self { max_kept, idle, state: Mutex::default() }
    }

    /// The one used last, if it is still good.
    pub(super) fn take(&self, peer: SocketAddr, epoch: Epoch) -> Option<TcpStream> {
        let mut state = self.lock();
        state.expire(self.idle);
        while let Some(at) = state.kept.iter().rposition(|kept| kept.peer == (peer, epoch)) {
            let stream = state.kept.remove(at).stream;
            if is_quiet(&stream) {
                return Some(stream);
            }
        }
        None
    }

    /// Keeps a connection on which neither side owes a byte.
    pub(super) fn put(&self, peer: SocketAddr, epoch: Epoch, stream: TcpStream) {
        let mut state = self.lock();
        state.expire(self.idle);
        if self.max_kept == 0 || state.closed {
            return;
        }
        if state.kept.len() == self.max_kept {
            state.kept.remove(0);
        }
        state.kept.push(Kept { peer: (peer, epoch), since: Instant::now(), stream });
    }

    /// Closes all, and keeps none from now on.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.kept.clear();
    }

    pub(crate) fn kept(&self) -> usize {
        self.lock().kept.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn expire(&mut self, idle: Duration) {
        let now = Instant::now();
        let fresh = self.kept.partition_point(|kept| now.duration_since(kept.since) >= idle);
        self.kept.drain(..fresh);
    }
}

/// Neither closed by the peer nor with bytes on it that nobody asked for.
pub(crate) fn is_quiet(stream: &TcpStream) -> bool {
    stream.peek(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}
