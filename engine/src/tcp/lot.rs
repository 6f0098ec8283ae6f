//! Where connections of peers wait: new ones for their first byte, kept ones for their next request.
//!
//! One thread watches them all, so that a silent peer costs a descriptor and no worker.

use std::{
    any::Any,
    collections::{BTreeSet, HashMap},
    io,
    net::{TcpListener, TcpStream},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, Timespec, epoll, eventfd},
    io::Errno,
};

use super::line::Stop;
use crate::deadline::Deadline;

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const WAKE: u64 = 2;
const FIRST_CONNECTION: u64 = 3;
/// After accept failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// A peer's connection; counted as open until dropped.
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    /// What a device keeps for it: a pair of QPs. It goes with the connection.
    pub(super) kept: Option<Box<dyn Any + Send>>,
    open: Arc<AtomicUsize>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The waiting connections.
pub(super) struct Lot {
    epoll: OwnedFd,
    wake: OwnedFd,
    open: Arc<AtomicUsize>,
    limits: Limits,
    state: Mutex<State>,
}

pub(super) struct Limits {
    pub(super) max_open: usize,
    /// From accept to the end of the first request.
    pub(super) first: Duration,
    /// Between requests.
    pub(super) idle: Duration,
    /// From its first byte to the end of a later request.
    pub(super) request: Duration,
}

struct State {
    next_token: u64,
    waiting: HashMap<u64, Waiting>,
    by_end: BTreeSet<(Instant, u64)>,
    /// When the watching thread wakes by itself.
    wakes_at: Option<Instant>,
}

struct Waiting {
    connection: Connection,
    until: Instant,
    /// It has not said anything since it was accepted.
    fresh: bool,
}

impl Lot {
    pub(super) fn new(listener: &TcpListener, stop: &Stop, limits: Limits) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, stop.fd(), epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let state =
            State { next_token: FIRST_CONNECTION, waiting: HashMap::new(), by_end: BTreeSet::new(), wakes_at: None };
        Ok(Self { epoll, wake, open: Arc::default(), limits, state: Mutex::new(state) })
    }

    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Closes all that wait, when nobody watches them any more.
    pub(super) fn clear(&self) {
        let mut state = self.lock();
        let waiting = std::mem::take(&mut state.waiting);
        state.by_end.clear();
        drop(state);
        drop(waiting);
    }

    /// Lets a connection wait for its next request.
    pub(super) fn park(&self, connection: Connection) {
        self.wait_for(connection, Instant::now() + self.limits.idle, false);
    }

    /// Watches until the engine ends; hands each connection with something to read to `dispatch`, with the deadline of
    /// what it has to say.
    pub(super) fn watch(&self, listener: &TcpListener, stop: &Stop, mut dispatch: impl FnMut(Connection, Deadline)) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
        while !stop.is_signalled() {
            let timeout = self.next_wake();
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    tracing::error!(%errno, "the source cannot wait for its peers any more");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept_all(listener, stop),
                    STOP => return,
                    WAKE => {
                        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
                    }
                    token => self.on_readable(token, &mut dispatch),
                }
            }
            self.expire();
        }
    }

    fn accept_all(&self, listener: &TcpListener, stop: &Stop) {
        loop {
            match listener.accept() {
                Ok((stream, peer)) => {
                    let connection = Connection { stream, kept: None, open: Arc::clone(&self.open) };
                    self.open.fetch_add(1, Ordering::Relaxed);
                    // Accepted sockets inherit buffer sizes from the listener, but not this.
                    let ready = connection.stream.set_nonblocking(true);
                    if let Err(error) = ready.and_then(|()| connection.stream.set_nodelay(true)) {
                        tracing::debug!(%peer, %error, "a connection broke before its first byte");
                        continue;
                    }
                    if self.open() > self.limits.max_open && !self.evict() {
                        tracing::warn!(%peer, open = self.open(), "all connections are busy; a new one was closed");
                        continue;
                    }
                    self.wait_for(connection, Instant::now() + self.limits.first, true);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, open = self.open(), "cannot accept connections for now");
                    // One fewer descriptor; and not again at once, as the listener stays readable.
                    self.evict();
                    if !stop.is_signalled() {
                        std::thread::sleep(ACCEPT_PAUSE);
                    }
                    return;
                }
            }
        }
    }

    fn on_readable(&self, token: u64, dispatch: &mut impl FnMut(Connection, Deadline)) {
        let Some(Waiting { connection, until, fresh }) = self.remove(token) else { return };
        match connection.stream.peek(&mut [0]) {
            Ok(count) if count > 0 => {
                let end = if fresh { until } else { Instant::now() + self.limits.request };
                dispatch(connection, Deadline::at(end));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for(connection, until, fresh),
            // Closed by the peer, or broken.
            _ => {}
        }
    }

    fn wait_for(&self, connection: Connection, until: Instant, fresh: bool) {
        let mut state = self.lock();
        let token = state.next_token;
        state.next_token += 1;
        let data = epoll::EventData::new_u64(token);
        // Under the lock: its event finds it in the table.
        if let Err(errno) = epoll::add(&self.epoll, &connection.stream, data, epoll::EventFlags::IN) {
            tracing::warn!(%errno, "a connection cannot be watched, and was closed");
            return;
        }
        state.waiting.insert(token, Waiting { connection, until, fresh });
        state.by_end.insert((until, token));
        let sooner = state.wakes_at.is_none_or(|at| until < at);
        drop(state);
        if sooner {
            // If the counter is full, the thread is about to wake anyway.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    fn remove(&self, token: u64) -> Option<Waiting> {
        let mut state = self.lock();
        let waiting = state.waiting.remove(&token)?;
        state.by_end.remove(&(waiting.until, token));
        if let Err(errno) = epoll::delete(&self.epoll, &waiting.connection.stream) {
            tracing::debug!(%errno, "a connection was not watched any more");
        }
        Some(waiting)
    }

    /// Closes the connection that has been idle longest, or else the one that has been silent longest.
    fn evict(&self) -> bool {
        let state = self.lock();
        let idle = state.by_end.iter().find(|(_, token)| !state.waiting[token].fresh);
        let victim = idle.or_else(|| state.by_end.first()).map(|(_, token)| *token);
        drop(state);
        victim.and_then(|token| self.remove(token)).is_some()
    }

    fn expire(&self) {
        let now = Instant::now();
        loop {
            let first = self.lock().by_end.first().copied();
            match first {
                Some((until, token)) if until <= now => drop(self.remove(token)),
                _ => return,
            }
        }
    }

    /// How long the watching thread may sleep.
    fn next_wake(&self) -> Option<Timespec> {
        let mut state = self.lock();
        state.wakes_at = state.by_end.first().map(|(until, _)| *until);
        let left = state.wakes_at?.saturating_duration_since(Instant::now());
        Some(Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
