//! The source's threads: one that watches connections, and some that serve requests.

use std::{
    any::Any,
    collections::VecDeque,
    io,
    net::{SocketAddr, TcpListener},
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use rustix::event::{EventfdFlags, PollFlags, eventfd};

use super::{
    buffers::Buffers,
    dial, direct, landing,
    line::{Line, LineError, Stop, Woken},
    lot::{Connection, Limits, Lot},
    staging::StagingPool,
};
use crate::{
    Config, Notification, Profile, Status, WireError,
    control::{
        ASK_BYTES, COMMIT_BYTE, DeviceCall, DeviceSource, Kind, Operation, PLAN_BYTES, REQUEST_BYTES, Reply, Request,
        Source,
    },
    deadline::Deadline,
    memory::Use,
    threads,
};

/// A worker that has just served a request waits this long for the next one on the same connection, unless others need
/// it: a peer that works through a batch then finds it at once, and not by way of the thread that watches.
const LINGER: Duration = Duration::from_millis(20);

/// What a server works with.
pub(crate) struct ServerParts {
    pub(crate) source: Arc<Source>,
    pub(crate) staging: Arc<StagingPool>,
    pub(crate) stop: Arc<Stop>,
    /// Carries out operations over RDMA.
    pub(crate) device: Option<Arc<dyn DeviceSource>>,
}

/// The running source. It ends when the engine's [`Stop`] is signalled and [`Server::join`] is called.
pub(crate) struct Server {
    shared: Arc<Shared>,
    endpoint: SocketAddr,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    parts: ServerParts,
    lot: Lot,
    queue: Queue,
    request_timeout: Duration,
}

/// Connections with a request that wait for a worker.
struct Queue {
    limit: usize,
    state: Mutex<QueueState>,
    news: Condvar,
    /// Readable when lingering workers are needed.
    call: OwnedFd,
}

#[derive(Default)]
struct QueueState {
    closed: bool,
    /// Workers that wait for a job: each will take one at once, so that it does not really wait.
    idle: usize,
    /// Workers that wait on a connection, and would come if called.
    lingering: usize,
    jobs: VecDeque<Job>,
}

/// A worker that waits on a connection.
struct Lingering<'a>(&'a Queue);

impl Drop for Lingering<'_> {
    fn drop(&mut self) {
        self.0.lock().lingering -= 1;
    }
}

struct Job {
    connection: Connection,
    deadline: Deadline,
}

/// What a connection is good for after a request.
#[derive(Debug, PartialEq, Eq)]
enum After {
    Keep,
    Close,
}

impl Server {
    pub(crate) fn start(config: &Config, parts: ServerParts) -> io::Result<Self> {
        let listener =
            dial::listen(config.bind, Buffers::choose(config.socket_buffer_bytes, config.max_payload_bytes))?;
        let endpoint = listener.local_addr()?;
        let limits = Limits {
            max_open: config.max_source_connections,
            first: config.source_timeout,
            idle: config.source_idle,
            request: config.source_timeout,
        };
        let lot = Lot::new(&listener, &parts.stop, limits)?;
        let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let queue = Queue { limit: config.source_queue, state: Mutex::default(), news: Condvar::new(), call };
        let shared = Arc::new(Shared { parts, lot, queue, request_timeout: config.source_timeout });
        let mut server = Self { shared, endpoint, threads: Vec::new() };
        if let Err(error) = server.start_threads(listener, config.source_workers) {
            server.shared.parts.stop.signal();
            server.join();
            return Err(error);
        }
        Ok(server)
    }

    fn start_threads(&mut self, listener: TcpListener, workers: usize) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        self.threads.push(threads::spawn("engine-accept", move || {
            shared
                .lot
                .watch(&listener, &shared.parts.stop, |connection, deadline| shared.dispatch(connection, deadline));
        })?);
        for _ in 0..workers {
            let shared = Arc::clone(&self.shared);
            self.threads.push(threads::spawn("engine-source", move || shared.work())?);
        }
        Ok(())
    }

    pub(crate) fn endpoint(&self) -> SocketAddr {
        self.endpoint
    }

    pub(crate) fn open_connections(&self) -> usize {
        self.shared.lot.open()
    }

    /// Waits for all threads, after the stop was signalled.
    pub(crate) fn join(&mut self) {
        self.shared.queue.close();
        threads::join_all(&mut self.threads);
        self.shared.lot.clear();
    }
}

impl Shared {
    /// Queues a connection that has something to say, or tells it that there is no room.
    fn dispatch(&self, connection: Connection, deadline: Deadline) {
        let Err(Job { connection, .. }) = self.queue.push(Job { connection, deadline }) else { return };
        if self.parts.stop.is_signalled() {
            return;
        }
        tracing::debug!(limit = self.queue.limit, "the source's queue is full; a request was refused");
        let line = Line { stream: &connection.stream, deadline, stop: &self.parts.stop };
        // What is left unread when a socket is closed makes TCP drop what was written, too.
        let _ = line.try_recv(&mut [0; REQUEST_BYTES + ASK_BYTES + PLAN_BYTES]);
        let _ = line.try_send(&[], &self.reply(Status::Exhausted, 0));
    }

    /// One worker's life.
    fn work(&self) {
        while let Some(job) = self.queue.pop() {
            // Nothing in there should panic. If it does, that is one connection's end and not the worker's.
            if catch_unwind(AssertUnwindSafe(|| self.serve(job))).is_err() {
                tracing::error!("serving a request panicked; its connection is closed");
            }
        }
    }

    /// Serves a connection for as long as it has requests and nobody else waits.
    fn serve(&self, Job { mut connection, mut deadline }: Job) {
        let stop = &*self.parts.stop;
        loop {
            let line = Line { stream: &connection.stream, deadline, stop };
            match self.serve_request(line, &mut connection.kept) {
                Ok(After::Keep) => {}
                Ok(After::Close) => return,
                Err(error) => {
                    tracing::debug!(?error, "a request was given up");
                    return;
                }
            }
            let lingering = self.queue.linger();
            let Some(lingering) = lingering else { return self.lot.park(connection) };
            let line = Line { deadline: Deadline::after(LINGER), ..line };
            let waited = line.wait_or(PollFlags::IN, &self.queue.call);
            drop(lingering);
            match waited {
                Ok(Woken::Ready) => deadline = Deadline::after(self.request_timeout),
                Ok(Woken::Called) | Err(LineError::TimedOut) => return self.lot.park(connection),
                Err(_) => return,
            }
        }
    }

    fn serve_request(&self, line: Line<'_>, kept: &mut Option<Box<dyn Any + Send>>) -> Result<After, LineError> {
        let mut bytes = [0; REQUEST_BYTES];
        line.recv_exact(&mut bytes)?;
        let request = match Request::decode(&bytes) {
            Ok(request) => request,
            Err(error) => {
                tracing::debug!(%error, "a request makes no sense");
                return self.refuse(line, Status::ProtocolError);
            }
        };
        let mut ask = [0; ASK_BYTES];
        if request.opcode.has_ask() {
            // Also before a refusal: what is left unread would take the answer with it.
            line.recv_exact(&mut ask)?;
        }
        let mut plan = Vec::new();
        if request.opcode.has_plan(&ask) {
            plan.resize(PLAN_BYTES, 0);
            line.recv_exact(&mut plan)?;
        }
        // Inside until the last reply is out, or given up.
        let Operation { kind, inside } = match self.parts.source.admit(&request) {
            Ok(operation) => operation,
            Err(status) => return self.refuse(line, status),
        };
        match kind {
            Kind::Describe(payload) => {
                let mut frame = self.reply(Status::Success, payload.len() as u64).to_vec();
                frame.extend_from_slice(&payload);
                line.send_all(&frame, &mut 0)?;
            }
            Kind::Read(access) => {
                let head = self.reply(Status::Success, access.length);
                match access.profile {
                    Profile::Staged => {
                        let from = (&*access.registration, access.place());
                        landing::send(line, &self.parts.staging, &head, from, &mut 0)?;
                    }
                    Profile::Direct => {
                        let range = direct::lend(line, &access.registration, access.place(), Use::Read)?;
                        direct::send(line, &head, &range, &mut 0)?;
                    }
                }
            }
            Kind::Write(access) => {
                match access.profile {
                    Profile::Staged => {
                        self.send(line, Status::Ready)?;
                        let to = (&*access.registration, access.place());
                        landing::receive(line, &self.parts.staging, to)?;
                    }
                    Profile::Direct => {
                        // Before anything may come: until then nothing has an effect.
                        let mut range = direct::lend(line, &access.registration, access.place(), Use::Write)?;
                        self.send(line, Status::Ready)?;
                        direct::receive(line, &mut range, &mut 0)?;
                    }
                }
                self.send(line, Status::Success)?;
            }
            Kind::Notify { room, name_bytes, message_bytes } => {
                self.send(line, Status::Ready)?;
                let mut body = vec![0; name_bytes + message_bytes + 1];
                line.recv_exact(&mut body)?;
                match notification(&body, name_bytes) {
                    Ok(notification) => room.commit(notification),
                    Err(error) => {
                        tracing::debug!(%error, "a notification was refused");
                        return self.refuse(line, Status::ProtocolError);
                    }
                }
                self.send(line, Status::Success)?;
            }
            Kind::Rdma { direction, sliced, access } => {
                let Some(device) = &self.parts.device else { return self.refuse(line, Status::BackendUnavailable) };
                let (request, ask, plan) = (&bytes, &ask, &*plan);
                let call = DeviceCall { line, request, ask, plan, direction, sliced, access, inside, kept };
                match device.serve(call)? {
                    Ok(()) => return Ok(After::Keep),
                    Err(status) => return self.refuse(line, status),
                }
            }
        }
        drop(inside);
        Ok(After::Keep)
    }

    /// An error ends the connection.
    fn refuse(&self, line: Line<'_>, status: Status) -> Result<After, LineError> {
        self.send(line, status)?;
        Ok(After::Close)
    }

    fn send(&self, line: Line<'_>, status: Status) -> Result<(), LineError> {
        line.send_all(&self.reply(status, 0), &mut 0)
    }

    fn reply(&self, status: Status, length: u64) -> [u8; crate::control::REPLY_BYTES] {
        Reply { status, epoch: self.parts.source.epoch, length }.encode()
    }
}

/// A complete body: name, message, commit byte.
fn notification(body: &[u8], name_bytes: usize) -> Result<Notification, WireError> {
    let (found, texts) = body.split_last().expect("one byte at least");
    if *found != COMMIT_BYTE {
        return Err(WireError::Commit { found: *found });
    }
    let (name, message) = texts.split_at(name_bytes);
    let text = |bytes: &[u8], field| match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(WireError::NotUtf8 { field }),
    };
    Ok(Notification { name: text(name, "name")?, message: text(message, "message")? })
}

impl Queue {
    /// Gives the job back if there is no room.
    fn push(&self, job: Job) -> Result<(), Job> {
        let mut state = self.lock();
        if state.closed || state.jobs.len() >= self.limit + state.idle + state.lingering {
            return Err(job);
        }
        state.jobs.push_back(job);
        if state.jobs.len() > state.idle && state.lingering > 0 {
            // A full counter is readable, too.
            let _ = rustix::io::write(&self.call, &1_u64.to_ne_bytes());
        }
        drop(state);
        self.news.notify_one();
        Ok(())
    }

    /// Waits for a job; `None` once closed.
    fn pop(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                if state.jobs.is_empty() {
                    // Whoever was called and comes later finds nothing to do, and the next to linger must not be called
                    // by this.
                    let _ = rustix::io::read(&self.call, &mut [0_u8; 8]);
                }
                return Some(job);
            }
            state.idle += 1;
            state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }

    /// Leave to linger; `None` while somebody waits for a worker.
    fn linger(&self) -> Option<Lingering<'_>> {
        let mut state = self.lock();
        if state.closed || !state.jobs.is_empty() {
            return None;
        }
        state.lingering += 1;
        Some(Lingering(self))
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.jobs.clear();
        drop(state);
        self.news.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
