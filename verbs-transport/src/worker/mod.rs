//! The worker: the asynchronous shell around the protocol. It owns no protocol decision.

mod accept;
mod admission;
mod alarm;
mod backlog;
mod config;
mod connect;
mod describe;
mod dial;
mod drain;
mod driver;
mod error;
mod evict;
mod health;
mod inbound;
mod layer;
mod lending;
#[cfg(test)]
mod lock_free_loom;
mod metrics;
mod news;
mod outbox;
mod peer;
mod poll;
mod shared;
mod stats;
mod sync;
mod unsettled;

use std::{
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use tokio::{runtime::Handle, sync::oneshot, task::JoinHandle};
use tracing::Instrument;
use verbs_bootstrap::{
    AddressError, DeviceHint, Endpoint, InstanceId, Listener, ListenerStats, PortIdentity, RegisterVerdict,
    WorkerAddress,
};

pub use admission::{Admission, AdmissionError, AdmissionState, SendOutcome};
pub use alarm::Alarm;
pub use config::{Config, ConfigError, Progress};
pub use describe::PeerDescription;
pub use drain::{DrainFlag, DrainPolicy, InFlightGuard};
pub use error::{ConnectError, EpochEnd, HealthError, RegisterError, SendError, StartError};
pub use inbound::{Borrowed, Handler, Inbound, Received, Stream};
pub use layer::{
    AttachError, BulkAcceptor, FEATURE_PACK, FEATURE_RMA, PeerFacts, PeerObserver, PeerRun, ServiceHandler, WeakWorker,
};
pub use metrics::describe_metrics;
pub use stats::{FlowStats, Stats};

use self::{
    driver::Driver,
    error::cannot_meet,
    inbound::Sink,
    peer::Effects,
    shared::{Life, Shared, lock},
};
use crate::{
    fabric::{Fabric, FabricError, RecvSlab},
    proto::{
        frame::{Lane, MessageType},
        link::{Frame, SendErrorHandler},
    },
};

/// One running transport: a port of a device, a listener, and the connections to its peers.
///
/// Dropping the last clone shuts it down, without waiting; [`Worker::shutdown`] waits.
pub struct Worker<F: Fabric> {
    owner: Arc<Owner<F>>,
}

impl<F: Fabric> Clone for Worker<F> {
    fn clone(&self) -> Self {
        Self { owner: self.owner.clone() }
    }
}

impl<F: Fabric> fmt::Debug for Worker<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("me", &self.shared().me).field("life", &self.shared().life()).finish()
    }
}

/// What ends with the last clone of a worker.
struct Owner<F: Fabric> {
    shared: Arc<Shared<F>>,
    running: Mutex<Running>,
    /// Kept until start: the SRQ is filled then.
    receives: Mutex<Vec<RecvSlab>>,
}

/// What runs between start and shutdown.
#[derive(Default)]
struct Running {
    address: Option<(Endpoint, WorkerAddress)>,
    listener: Option<Listener>,
    driver: Option<Polling>,
}

enum Polling {
    Task(JoinHandle<()>),
    Thread(std::thread::JoinHandle<()>),
}

impl<F: Fabric> Worker<F> {
    /// A worker on an opened fabric. It does nothing before [`Worker::start`].
    ///
    /// # Errors
    ///
    /// A number of the configuration is out of its range, or the fabric has too few receive slabs for one peer.
    pub fn new(config: Config, fabric: F) -> Result<Self, ConfigError> {
        config.validate()?;
        config.validate_slabs(fabric.slabs().receive_slabs)?;
        let (receives, sends) = fabric.take_slabs();
        let shared = Arc::new(Shared::new(config, fabric, sends));
        Ok(Self { owner: Arc::new(Owner { shared, running: Mutex::default(), receives: Mutex::new(receives) }) })
    }

    /// Fills the SRQ, listens, and starts to poll, on the current tokio runtime. Frames arrive on the four streams.
    ///
    /// # Errors
    ///
    /// [`StartError`]; the worker cannot be started again.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn start(&self) -> Result<Inbound, StartError> {
        let (sink, inbound) = Sink::streams(&self.shared().backlog);
        self.start_with(sink).await?;
        Ok(inbound)
    }

    /// As [`Worker::start`], but frames go to `handler`, on the driver.
    ///
    /// # Errors
    ///
    /// As [`Worker::start`].
    ///
    /// # Panics
    ///
    /// As [`Worker::start`].
    pub async fn start_with_handler(&self, handler: impl Handler) -> Result<(), StartError> {
        self.start_with(Sink::Handler(Arc::new(handler))).await
    }

    async fn start_with(&self, sink: Sink) -> Result<(), StartError> {
        let shared = self.shared();
        if !shared.advance(Life::New, Life::Running) {
            return Err(StartError::NotNew);
        }
        let started = self.start_parts(sink).await;
        if started.is_err() {
            // What did start ends like any other worker.
            drop(self.owner.begin_stop());
            shared.stop_driver();
        }
        started
    }

    async fn start_parts(&self, sink: Sink) -> Result<(), StartError> {
        let shared = self.shared();
        shared.set_runtime(Handle::current());
        shared.set_driver(Driver::new(sink, &shared.config));
        let mut receives = std::mem::take(&mut *lock(&self.owner.receives));
        shared
            .fabric
            .post_receives(&mut receives)
            .map_err(|error| StartError::Device { what: "filling the SRQ", source: error.source })?;
        shared.arm_srq_limit().map_err(|error| StartError::Device { what: error.what, source: error.source })?;
        let config = &shared.config;
        let acceptor = Arc::new(accept::Accept(Arc::downgrade(shared)));
        let listener = Listener::bind(shared.fabric.net(), config.bind, &config.bootstrap, acceptor).await?;
        let endpoint = self.endpoint(listener.local_addr());
        let address = WorkerAddress::encode(&endpoint)?;
        let driver = self.poll_with(config.progress)?;
        if let Some(every) = config.metrics_interval {
            metrics::spawn_publisher(&self.owner, every);
        }
        if let Some(after) = config.idle_evict_after {
            shared.spawn(evict::run(Arc::downgrade(shared), after));
        }
        *lock(&self.owner.running) = Running { address: Some((endpoint, address)), listener: Some(listener), driver };
        Ok(())
    }

    fn endpoint(&self, listening: SocketAddr) -> Endpoint {
        let shared = self.shared();
        let port = shared.fabric.port();
        let advertise = &shared.config.advertise;
        Endpoint {
            instance: shared.me.instance,
            incarnation: shared.me.incarnation,
            bootstrap: if advertise.is_empty() { vec![listening] } else { advertise.clone() },
            devices: vec![DeviceHint {
                gid: port.gid,
                gid_index: port.gid_index,
                gid_type: port.gid_type,
                mtu: port.mtu,
                numa_node: None,
            }],
        }
    }

    fn poll_with(&self, progress: Progress) -> Result<Option<Polling>, StartError> {
        let shared = self.shared().clone();
        let runtime = Handle::current();
        Ok(match progress {
            Progress::Manual => {
                // Ties the device's event fd to this runtime's reactor now: later calls come from any thread.
                poll::take_async_events(&shared, &mut shared.driver())
                    .map_err(|error| StartError::Device { what: error.what, source: error.source })?;
                None
            }
            Progress::Event | Progress::SpinThenPark { .. } => {
                Some(Polling::Task(runtime.spawn(poll::run_task(shared, poll::spin_of(progress)))))
            }
            Progress::BusyPoll => {
                let poll = move || {
                    let _inside = runtime.enter();
                    poll::run_thread(&shared);
                };
                let thread = std::thread::Builder::new().name("verbs-poll".to_owned()).spawn(poll);
                let failed = |source| StartError::Device { what: "starting the polling thread", source };
                Some(Polling::Thread(thread.map_err(failed)?))
            }
        })
    }

    fn shared(&self) -> &Arc<Shared<F>> {
        &self.owner.shared
    }

    /// This transport's key in a [`WorkerAddress`].
    pub fn key(&self) -> &'static str {
        verbs_bootstrap::TRANSPORT_KEY
    }

    /// The worker's name.
    pub fn instance(&self) -> InstanceId {
        self.shared().me.instance
    }

    /// What peers need to reach this worker; without an entry before [`Worker::start`].
    pub fn address(&self) -> WorkerAddress {
        let running = lock(&self.owner.running);
        running.address.as_ref().map_or_else(WorkerAddress::empty, |(_, address)| address.clone())
    }

    /// Where the bootstrap listens, once started.
    pub fn listening_at(&self) -> Option<SocketAddr> {
        lock(&self.owner.running).listener.as_ref().map(Listener::local_addr)
    }

    /// Learns a peer's address and connects nothing. A peer that is known by another run is retired: its queued
    /// frames fail, and the next send reaches the new run.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    pub fn register(&self, address: &WorkerAddress) -> Result<InstanceId, RegisterError> {
        let endpoint = address.endpoint().map_err(|error| match error {
            AddressError::NoEndpoint(inner) => RegisterError::NoEndpoint { reason: inner.to_string() },
            AddressError::InvalidEndpoint(inner) => RegisterError::InvalidEndpoint { reason: inner.to_string() },
        })?;
        let shared = self.shared();
        if endpoint.instance == shared.me.instance {
            return Err(RegisterError::Myself { instance: endpoint.instance });
        }
        self.eligible(&endpoint)?;
        let id = endpoint.instance;
        let mut effects = Effects::default();
        let peer = shared.with_peer(id, |peer, state| {
            match state.exchange.on_registered(endpoint.incarnation) {
                RegisterVerdict::Superseded => {
                    tracing::debug!(peer = %id, "the address is of a run that is over; the newer one is kept");
                    if state.address.is_some() {
                        return peer.clone();
                    }
                }
                RegisterVerdict::Keep => {}
                RegisterVerdict::Retire { retired } => {
                    if retired.is_some() {
                        peer.end_unbound(state, shared, &Arc::new(EpochEnd::PeerRestarted), &mut effects);
                    }
                }
            }
            state.address = Some(endpoint);
            state.last_end = None;
            peer.clone()
        });
        peer.changed.notify_waiters();
        effects.run(shared);
        Ok(id)
    }

    /// Forgets a peer: ends its connection, reports what is queued and in flight, and refuses sends to it from now on.
    /// `false`: nobody had registered it. The peer may still connect by itself (its frames are delivered).
    pub fn unregister(&self, peer: InstanceId) -> bool {
        let shared = self.shared();
        let Some(peer) = shared.find_peer(peer) else { return false };
        let mut effects = Effects::default();
        let known = {
            let mut state = peer.lock();
            let known = state.address.take().is_some();
            if known {
                // Also what is queued before an epoch has begun.
                if let Some(generation) = state.exchange.generation() {
                    state.exchange.on_epoch_end(generation, shared.now());
                }
                peer.end_unbound(&mut state, shared, &Arc::new(EpochEnd::Unregistered), &mut effects);
            }
            known
        };
        effects.run(shared);
        shared.forget_stranger(peer.id);
        known
    }

    /// Whether one of the peer's ports can meet ours.
    fn eligible(&self, endpoint: &Endpoint) -> Result<(), RegisterError> {
        let port = self.shared().fabric.known_port();
        let problem = |hint: &DeviceHint| {
            let theirs = PortIdentity { gid: hint.gid, gid_type: hint.gid_type, gid_index: hint.gid_index, ..port };
            cannot_meet(&port, &theirs)
        };
        let mut reasons = Vec::new();
        for hint in &endpoint.devices {
            match problem(hint) {
                None => return Ok(()),
                Some(reason) => reasons.push(reason),
            }
        }
        if reasons.is_empty() { Ok(()) } else { Err(RegisterError::NoEndpoint { reason: reasons.join("; ") }) }
    }

    /// Sends a frame. Never blocks and never gives the frame back: it is posted at once when there is room, else it
    /// waits its turn. Frames to one peer arrive in the order of these calls.
    ///
    /// Every frame has one end: delivered, reported once through `on_error` with its original bytes, or its admission
    /// resolved with an error. What fails before the wire is reported before this returns.
    pub fn send(
        &self,
        peer: InstanceId,
        header: Bytes,
        payload: Bytes,
        kind: MessageType,
        on_error: Arc<dyn SendErrorHandler>,
    ) -> SendOutcome {
        self.send_frame(peer, Frame { kind, lane: Lane::Application, header, payload, on_error })
    }

    fn send_frame(&self, peer: InstanceId, frame: Frame) -> SendOutcome {
        let shared = self.shared();
        if shared.life() == Life::New {
            return shared.reject(frame, SendError::NotStarted);
        }
        match shared.find_peer(peer) {
            Some(peer) => peer.send(shared, frame),
            None if shared.is_stopping() => shared.reject(frame, SendError::ShuttingDown),
            None => shared.reject(frame, SendError::PeerNotRegistered { peer }),
        }
    }

    /// Largest frame to this peer in bytes, header and payload together; `None` while its limit is unknown.
    pub fn max_message_size(&self, peer: InstanceId) -> Option<usize> {
        let peer = self.shared().find_peer(peer)?;
        let state = peer.lock();
        let remote = state.epoch.as_ref()?.remote.as_ref()?;
        Some(remote.eager_max_bytes.min(self.shared().config.eager_max_bytes) as usize)
    }

    /// Connects to a peer if need be, and returns when a PING has come back over the QP.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]: the attempt failed; the next one waits for the back-off.
    pub async fn ensure_connected(&self, peer: InstanceId) -> Result<(), ConnectError> {
        let shared = self.shared();
        if shared.life() == Life::New {
            return Err(ConnectError::NotStarted);
        }
        let not_registered = ConnectError::PeerNotRegistered { peer };
        let peer = shared.find_peer(peer).ok_or(not_registered.clone())?;
        let answer = {
            let mut state = peer.lock();
            if state.epoch.as_ref().is_some_and(|epoch| epoch.proof_told) {
                return Ok(());
            }
            if state.address.is_none() {
                return Err(not_registered);
            }
            if shared.is_stopping() {
                return Err(ConnectError::Failed(Arc::new(EpochEnd::ShuttingDown)));
            }
            let (waiter, answer) = oneshot::channel();
            state.connect_waiters.push(waiter);
            if !std::mem::replace(&mut state.dialer, true) {
                shared.spawn_dialer(&peer);
            }
            answer
        };
        answer.await.unwrap_or_else(|_| Err(ConnectError::Failed(Arc::new(EpochEnd::ShuttingDown))))
    }

    /// Polls one batch on the caller's thread: for [`Progress::Manual`], allowed in every mode. Gives the number of
    /// completions; 0 means that nothing is to be done now, or that another thread is polling, or that this is called
    /// from within a handler.
    ///
    /// The first call that finds nothing and every sixteenth from then on also see to deadlines and to the device's
    /// events: they take ten times as long as the others.
    ///
    /// # Errors
    ///
    /// The device is lost: all connections have ended.
    pub fn progress(&self) -> Result<usize, FabricError> {
        let shared = self.shared();
        let Some(mut driver) = shared.idle_driver() else { return Ok(0) };
        let mut polled = driver.progress(shared);
        // Of a device that is lost, what is in flight ends by the clock.
        if polled.as_ref().map_or(true, |polled| driver.chores_are_due(*polled)) {
            driver.timers(shared);
            // In the other modes the events are the driver's own, and it is woken for them.
            if shared.config.progress == Progress::Manual {
                polled = polled.and_then(|polled| poll::take_async_events(shared, &mut driver).map(|()| polled));
            }
        }
        drop(driver);
        polled.inspect_err(|error| shared.on_device_lost(error))
    }

    /// What the bootstrap's listener has seen, once started.
    pub fn listener_stats(&self) -> Option<ListenerStats> {
        lock(&self.owner.running).listener.as_ref().map(Listener::stats)
    }

    /// The fabric underneath.
    pub fn fabric(&self) -> &F {
        &self.shared().fabric
    }

    /// Stops listening, ends all connections, reports every frame that is queued or in flight, and returns when all
    /// QPs are gone: within `flush_deadline` and half a second. Idempotent; may come before start.
    pub async fn shutdown(&self) {
        let span = tracing::info_span!("shutdown", me = %self.instance());
        self.shutdown_in_span().instrument(span).await;
    }

    async fn shutdown_in_span(&self) {
        let shared = self.shared();
        let began = shared.now();
        let first = shared.life() <= Life::Running;
        if first {
            tracing::info!(qps = shared.qps(), "shutting down");
        }
        let listener = self.owner.begin_stop();
        if let Some(listener) = listener {
            listener.stop().await;
        }
        let bound = shared.config.flush_deadline + Duration::from_millis(500);
        let _ = tokio::time::timeout(bound, self.await_retired()).await;
        shared.stop_driver();
        let driver = lock(&self.owner.running).driver.take();
        match driver {
            Some(Polling::Task(task)) => join("the driver's task", bound, task).await,
            Some(Polling::Thread(thread)) => {
                join("the polling thread", bound, tokio::task::spawn_blocking(move || thread.join())).await;
            }
            None => {}
        }
        if let Some(mut driver) = shared.try_driver() {
            driver.close_sink();
        }
        if shared.advance(Life::Stopping, Life::Stopped) {
            tracing::info!(took = ?shared.now().saturating_duration_since(began), qps = shared.qps(), "shut down");
            if shared.config.metrics_interval.is_some() {
                self.publish_metrics();
            }
        }
    }

    /// Until no ended connection is left; polls itself where nobody else does.
    async fn await_retired(&self) {
        let shared = self.shared();
        loop {
            let told = shared.all_retired.notified();
            let quiet = shared.try_driver().is_none_or(|mut driver| {
                if shared.config.progress == Progress::Manual {
                    // The device is lost or not: what is in flight ends by the clock at the latest.
                    let _ = driver.progress(shared);
                    driver.timers(shared);
                }
                driver.is_quiet()
            });
            if quiet && shared.retired.is_empty() {
                return;
            }
            let _ = tokio::time::timeout(Duration::from_millis(5), told).await;
        }
    }
}

/// Waits for the end of what polls, but not for ever.
async fn join<T>(what: &'static str, bound: Duration, end: JoinHandle<T>) {
    if tokio::time::timeout(bound, end).await.is_err() {
        tracing::error!(what, ?bound, "did not end in time");
    }
}

impl<F: Fabric> Owner<F> {
    /// Raises the flag, takes the listener down, ends all connections.
    fn begin_stop(&self) -> Option<Listener> {
        let shared = &self.shared;
        if !shared.advance(Life::Running, Life::Stopping) && !shared.advance(Life::New, Life::Stopped) {
            return None;
        }
        let listener = lock(&self.running).listener.take();
        shared.layers.tell(PeerObserver::on_shutdown);
        shared.tell_stopping();
        shared.end_all(&Arc::new(EpochEnd::ShuttingDown));
        listener
    }
}

impl<F: Fabric> Drop for Owner<F> {
    fn drop(&mut self) {
        drop(self.begin_stop());
        self.shared.stop_driver();
    }
}
