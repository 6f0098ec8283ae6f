//! The engine: what applications hold.

mod batches;
mod inbox;

pub use inbox::NotifyError;

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

#[cfg(test)]
use crate::batch::DataPath;
use crate::{
    BatchReport, Config, ConfigError, Epoch, Exhausted, HostMemory, Mode, Notification, Permission, RegisterError,
    RegisteredMemory, RemoteSegment, ResolveError, ResolvedAddress, Stats, SubmitError, TransferError, TransferRequest,
    TransportPolicy, UnregisterError,
    batch::{Transfer, promise},
    deadline::Deadline,
    shared::{Means, Parts, Shared},
    tcp::{Server, ServerParts, Stop},
};

/// One engine: a source that peers read from and write to, and a requester that does so with its peers.
///
/// Calls that take a timeout block for that long at most, on the caller's thread, and need no runtime. Those that return
/// a future need no thread of the caller's, and run on any runtime.
///
/// Dropping it stops the source, ends every wait, and joins all threads. Registered memory and handles of batches
/// survive it.
pub struct Engine {
    shared: Arc<Shared>,
    server: Server,
    config: Config,
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A number of the configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The RDMA device does not serve.
    #[cfg(feature = "rdma")]
    #[error(transparent)]
    Rdma(#[from] crate::StartRdmaError),
    /// The system gives no random numbers, so there can be no epoch.
    #[error("no entropy for the epoch: {0}")]
    Entropy(getrandom::Error),
    /// The address is in use, not of this host, or not allowed; or there are no descriptors or threads.
    #[error("cannot serve at {bind}")]
    Serve {
        /// The address of the configuration.
        bind: SocketAddr,
        /// What the system says.
        #[source]
        source: io::Error,
    },
}

/// Why a segment was not opened, or not refreshed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Too much is in flight already.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// The peer could not be asked, or refused.
    #[error("cannot describe the source at {endpoint}")]
    Describe {
        /// Whom.
        endpoint: SocketAddr,
        /// Why.
        #[source]
        source: TransferError,
    },
}

/// Operations of peers had not left when the time was up. The source stays closed; wait again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{inside} operations of peers are still inside the closed source")]
pub struct CloseTimeout {
    /// How many.
    pub inside: u64,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Engine({}, epoch {})", self.endpoint(), self.epoch())
    }
}

impl Engine {
    /// Starts an engine in a new epoch.
    ///
    /// # Errors
    ///
    /// [`StartError`].
    pub fn new(config: Config) -> Result<Self, StartError> {
        config.validate()?;
        if config.transport == TransportPolicy::RdmaOnly {
            return Err(ConfigError::NoDevice.into());
        }
        let epoch = Epoch::draw().map_err(StartError::Entropy)?;
        Self::start(config, epoch, Means::Tcp)
    }

    /// Starts an engine in a new epoch, with an RDMA device, or a simulated one. Its source serves over it; what its own
    /// payloads go over, [`Config::transport`] says. Descriptions and notifications always go over TCP.
    ///
    /// The device needs no slabs, and a CQ of its own is made: open it with few of both. It stays open until the
    /// engine, and whatever handles of batches are left, are gone.
    ///
    /// # Errors
    ///
    /// [`StartError`].
    #[cfg(feature = "rdma")]
    pub fn with_rdma<F: verbs_transport::fabric::bulk::BulkFabric>(
        config: Config,
        rdma: &crate::RdmaConfig,
        fabric: Arc<F>,
    ) -> Result<Self, StartError> {
        Self::with_rdma_devices(config, rdma, vec![fabric])
    }

    /// As [`with_rdma`](Self::with_rdma), with 1 to 16 devices. Peers are offered all that are up, and each request goes
    /// over one pair, of one here and one of the peer's: by what is in flight over each, by the bandwidth that each was
    /// seen to have, and first to the one that has the same place in the peer's list. So list those first on both hosts
    /// that are on the same side of the network. A request that fails on one pair goes on to the next, 8 in all, as long
    /// as it cannot have had an effect; a pair with three errors in 10 s rests for 30 s, and twice as long each time, up
    /// to 300 s, unless all others rest, too.
    ///
    /// # Errors
    ///
    /// [`StartError`]; the devices that had started are stopped.
    #[cfg(feature = "rdma")]
    pub fn with_rdma_devices<F: verbs_transport::fabric::bulk::BulkFabric>(
        config: Config,
        rdma: &crate::RdmaConfig,
        fabrics: Vec<Arc<F>>,
    ) -> Result<Self, StartError> {
        config.validate()?;
        rdma.validate()?;
        let epoch = Epoch::draw().map_err(StartError::Entropy)?;
        let device = crate::rdma::Rdma::start(fabrics, rdma, epoch)?;
        let backend = Arc::clone(&device) as Arc<dyn crate::shared::Backend>;
        Self::start(config, epoch, Means::Device(device)).inspect_err(|_| backend.stop())
    }

    /// `path` replaces TCP for payloads.
    #[cfg(test)]
    pub(crate) fn with_path(config: Config, path: Arc<dyn DataPath>) -> Result<Self, StartError> {
        Self::start(config, Epoch::draw().map_err(StartError::Entropy)?, Means::Replaced(path))
    }

    fn start(config: Config, epoch: Epoch, means: Means) -> Result<Self, StartError> {
        let backend = if let Means::Device(backend) = &means { Some(backend) } else { None };
        let device = backend.map(|backend| Arc::clone(backend).source());
        let devices = backend.map(|backend| backend.devices());
        let serve = |source| StartError::Serve { bind: config.bind, source };
        let parts = Parts::new(&config, epoch, Stop::new().map_err(serve)?, devices);
        let for_server = ServerParts {
            source: Arc::clone(&parts.source),
            staging: Arc::clone(&parts.staging),
            stop: Arc::clone(&parts.stop),
            device,
        };
        let server = Server::start(&config, for_server).map_err(serve)?;
        let shared = Arc::new(Shared::new(&config, parts, server.endpoint(), means));
        Ok(Self { shared, server, config })
    }

    /// Where peers reach it.
    pub fn endpoint(&self) -> SocketAddr {
        self.shared.endpoint
    }

    /// Its life. Peers need it, and get it from you, not from whoever listens at the endpoint.
    pub fn epoch(&self) -> Epoch {
        self.shared.source.epoch
    }

    /// What it was started with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes over memory and registers all of it.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; the memory is freed.
    pub fn register_memory(&self, bytes: Box<[u8]>, permission: Permission) -> Result<RegisteredMemory, RegisterError> {
        let length = bytes.len() as u64;
        self.register_host_memory(&Arc::new(HostMemory::new(bytes)), 0, length, permission)
    }

    /// Registers part of an allocation.
    ///
    /// The same range again adds a reference to the registration that is there: its number, its permission and its
    /// charge stay as they are.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    pub fn register_host_memory(
        &self,
        memory: &Arc<HostMemory>,
        offset: u64,
        length: u64,
        permission: Permission,
    ) -> Result<RegisteredMemory, RegisterError> {
        let mut handles = self.register_host_memory_batch(&[(Arc::clone(memory), offset, length)], permission)?;
        Ok(handles.swap_remove(0))
    }

    /// Registers ranges `(allocation, offset, length)`: all of them, or none and nothing changes. One handle for each,
    /// in order; ranges that occur twice share a number and have a reference for each.
    ///
    /// # Errors
    ///
    /// [`RegisterError`], with the entry at fault.
    pub fn register_host_memory_batch(
        &self,
        entries: &[(Arc<HostMemory>, u64, u64)],
        permission: Permission,
    ) -> Result<Vec<RegisteredMemory>, RegisterError> {
        self.shared.source.registry.register(entries, permission)
    }

    /// Gives up one registration of a range; `true` if it was the last. Then no new operation finds it; running ones
    /// end, and handles keep the memory.
    ///
    /// # Errors
    ///
    /// [`UnregisterError`].
    pub fn unregister_memory(&self, memory: &RegisteredMemory) -> Result<bool, UnregisterError> {
        self.shared.source.registry.unregister(memory)
    }

    /// Which registered range contains all of `length` bytes at `address`: of those that do, the one that starts first,
    /// and of these the longest. It gives no claim on the memory.
    ///
    /// # Errors
    ///
    /// [`ResolveError`], also if only neighbours together contain them.
    pub fn resolve_local_address(&self, address: u64, length: u64) -> Result<ResolvedAddress, ResolveError> {
        let (registration, offset) = self.shared.source.registry.resolve(address, length)?;
        Ok(ResolvedAddress { registration: registration.id, offset })
    }

    /// Asks the engine at `endpoint`, in the life that its owner has told you, what it exports. The own endpoint and
    /// epoch give the own segment, without the wire.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open_segment(
        &self,
        endpoint: SocketAddr,
        epoch: Epoch,
        timeout: Duration,
    ) -> Result<RemoteSegment, OpenError> {
        self.shared.open(endpoint, epoch, Deadline::after(timeout))
    }

    /// As [`Engine::open_segment`], on a thread of the engine. Dropping the future gives up interest.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open_segment_async(
        &self,
        endpoint: SocketAddr,
        epoch: Epoch,
        timeout: Duration,
    ) -> impl Future<Output = Result<RemoteSegment, OpenError>> + use<> {
        let deadline = Deadline::after(timeout);
        let call = self.in_background(move |shared| shared.open(endpoint, epoch, deadline));
        async move { call.await.unwrap_or(Err(OpenError::Describe { endpoint, source: TransferError::Stopped })) }
    }

    /// Asks the peer again, in the same epoch, what it exports; all clones of `segment` know it then.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; the segment knows what it knew.
    pub fn refresh(&self, segment: &RemoteSegment, timeout: Duration) -> Result<(), OpenError> {
        self.shared.refresh(segment, Deadline::after(timeout))
    }

    /// As [`Engine::refresh`], on a thread of the engine. Dropping the future gives up interest.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn refresh_async(
        &self,
        segment: &RemoteSegment,
        timeout: Duration,
    ) -> impl Future<Output = Result<(), OpenError>> + use<> {
        let (deadline, segment, endpoint) = (Deadline::after(timeout), segment.clone(), segment.endpoint());
        let call = self.in_background(move |shared| shared.refresh(&segment, deadline));
        async move { call.await.unwrap_or(Err(OpenError::Describe { endpoint, source: TransferError::Stopped })) }
    }

    /// Moves all requests, in order, and waits for it. Everything is checked before anything is sent; then the first
    /// failure ends it, and the report tells how far it got.
    ///
    /// Local memory is resolved to registered ranges, and held, at the start: unregistering it meanwhile frees nothing.
    /// What moves is each slice as it was at one moment; slices follow each other in time. `mode` is a
    /// [`Direction`](crate::Direction), or one with the [direct](crate::Profile::Direct) profile, which promises less.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] if it was refused, and none of its requests attempted.
    pub fn submit_and_wait(
        &self,
        peer: &RemoteSegment,
        mode: impl Into<Mode>,
        requests: &[TransferRequest],
        timeout: Duration,
    ) -> Result<BatchReport, SubmitError> {
        self.shared.submit_and_wait(peer, mode.into(), requests, Deadline::after(timeout), None)
    }

    /// As [`Engine::submit_and_wait`], and then sends `notification` to the peer, once, if there were requests and all
    /// completed. The same deadline covers both. The notification's fate is in the report, and has no bearing on the
    /// data.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] if it was refused, and nothing attempted.
    pub fn submit_and_notify(
        &self,
        peer: &RemoteSegment,
        mode: impl Into<Mode>,
        requests: &[TransferRequest],
        notification: &Notification,
        timeout: Duration,
    ) -> Result<BatchReport, SubmitError> {
        self.shared.submit_and_wait(peer, mode.into(), requests, Deadline::after(timeout), Some(notification))
    }

    /// As [`Engine::submit_and_wait`], or with a notification [`Engine::submit_and_notify`], on a thread of the engine.
    /// The checks are done, and the memory held, when this returns; the future gives the report.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] if it was refused. It does not refresh `peer`.
    pub fn submit_async(
        &self,
        peer: &RemoteSegment,
        mode: impl Into<Mode>,
        requests: &[TransferRequest],
        notification: Option<&Notification>,
        timeout: Duration,
    ) -> Result<Transfer, SubmitError> {
        let batch = self.allocate_batch(requests.len())?;
        let group = batch.submit(peer, mode, requests, timeout, notification)?;
        Ok(Transfer { batch, group })
    }

    /// Closes the source for good: no operation of a peer, no registration and no notification is admitted from now on.
    /// Then waits until those that were have left. Queued notifications stay readable; requests of this engine go on.
    ///
    /// Success says that no handler touches registered memory any more, not that any peer got its answer.
    ///
    /// # Errors
    ///
    /// [`CloseTimeout`]. A timeout of zero looks once.
    pub fn close_source(&self, timeout: Duration) -> Result<(), CloseTimeout> {
        self.shared.close(Deadline::after(timeout))
    }

    /// Samples all counters.
    pub fn stats(&self) -> Stats {
        Stats { source_connections: self.server.open_connections() as u64, ..self.shared.stats() }
    }

    /// Samples what goes over each RDMA device, in the order in which they were given; none without.
    #[cfg(feature = "rdma")]
    pub fn nics(&self) -> Vec<crate::NicStats> {
        self.shared.device.as_ref().map(|device| device.nics()).unwrap_or_default()
    }

    /// Has a thread of the executor make a call; `None` if the engine ends, or has no thread.
    fn in_background<T, F>(&self, call: F) -> impl Future<Output = Option<T>> + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce(&Shared) -> T + Send + 'static,
    {
        let (promise, result) = promise();
        let shared = Arc::clone(&self.shared);
        // Refused, the promise is dropped, and that is the answer.
        let _ = self.shared.executor.run(move || Box::new(move || promise.keep(call(&shared))));
        result
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.stop.signal();
        if let Some(device) = &self.shared.device {
            device.interrupt();
        }
        // Both look at once, and wait for nothing: the threads are joined below.
        let _ = self.shared.close(Deadline::after(Duration::ZERO));
        self.shared.table.all().iter().for_each(|batch| batch.stop());
        self.shared.timekeeper.stop();
        self.shared.executor.stop();
        self.server.join();
        self.shared.pool.close();
        // Behind all who use it.
        if let Some(device) = &self.shared.device {
            device.stop();
        }
        // Handles of batches may keep the rest.
        self.shared.source.registry.clear();
    }
}
