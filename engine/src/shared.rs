//! What an engine's handles and threads share.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    BatchError, BatchId, BatchReport, CloseTimeout, Config, Epoch, Exhausted, Mode, Notification, NotificationFailure,
    NotifyError, OpenError, RemoteSegment, Stats, Status, SubmitError, TransferError, TransferRequest, TransportPolicy,
    batch::{
        BatchCell, BatchTable, DataPath, Executor, Group, Miss, Plan, Planner, Runner, Timekeeper, run_and_report,
        settle_notification,
    },
    budget::Budget,
    control::{About, Admission, CloseTimedOut, Description, DeviceSource, RemoteDevice, Source},
    deadline::Deadline,
    error::Failure,
    memory::Registry,
    notification::Inbox,
    stats::Counters,
    tcp::{Buffers, Pool, StagingPool, Stop, TcpPath},
};

pub(crate) struct Shared {
    pub(crate) endpoint: SocketAddr,
    pub(crate) source: Arc<Source>,
    pub(crate) ranges: Arc<Budget>,
    pub(crate) submissions: Arc<Budget>,
    pub(crate) batches: Arc<Budget>,
    pub(crate) table: BatchTable<BatchCell>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) timekeeper: Arc<Timekeeper>,
    pub(crate) stop: Arc<Stop>,
    pub(crate) staging: Arc<StagingPool>,
    pub(crate) pool: Arc<Pool>,
    planner: Planner,
    /// Descriptions and notifications.
    tcp: Arc<TcpPath>,
    /// Payloads.
    path: Arc<dyn DataPath>,
    pub(crate) device: Option<Arc<dyn Backend>>,
    counters: Arc<Counters>,
}

/// What payloads can go over beside the socket that there always is.
pub(crate) enum Means {
    /// Nothing.
    Tcp,
    /// Something instead of it.
    #[cfg(test)]
    Replaced(Arc<dyn DataPath>),
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "there is no device"))]
    Device(Arc<dyn Backend>),
}

/// A device with all that it takes to serve and to ask.
pub(crate) trait Backend: Send + Sync {
    /// The source's half.
    fn source(self: Arc<Self>) -> Arc<dyn DeviceSource>;
    /// The requester's half. Called once.
    fn path(self: Arc<Self>, config: &Config, tcp: &Arc<TcpPath>) -> Arc<dyn DataPath>;
    /// As peers are told of them.
    fn devices(&self) -> Vec<RemoteDevice>;
    /// Ends every wait, for good.
    fn interrupt(&self);
    /// When nothing uses it any more: gives up what is kept, waits for what is being destroyed, ends its thread.
    fn stop(&self);
    fn add_stats(&self, stats: &mut Stats);
    /// One for each device, in the order in which they were given.
    #[cfg(feature = "rdma")]
    fn nics(&self) -> Vec<crate::NicStats>;
}

/// What a source needs before it has an endpoint.
pub(crate) struct Parts {
    pub(crate) source: Arc<Source>,
    pub(crate) stop: Arc<Stop>,
    pub(crate) staging: Arc<StagingPool>,
    ranges: Arc<Budget>,
}

impl Parts {
    /// `devices` as peers are told of them; `None` where there are none.
    pub(crate) fn new(config: &Config, epoch: Epoch, stop: Stop, devices: Option<Vec<RemoteDevice>>) -> Self {
        // Tells the handles of one engine from another's.
        static NEXT_SERIAL: AtomicU64 = AtomicU64::new(1);
        let serial = NEXT_SERIAL.fetch_add(1, Ordering::Relaxed);
        let ranges = Budget::new(
            ("max_registrations", config.max_registrations as u64),
            ("max_registered_bytes", config.max_registered_bytes),
        );
        let inbox = Budget::new(
            ("max_notifications", config.max_notifications as u64),
            ("max_inbox_bytes", config.max_inbox_bytes),
        );
        let source = Source {
            epoch,
            registry: Registry::new(serial, config.max_batch_requests, Arc::clone(&ranges)),
            admission: Arc::new(Admission::default()),
            inbox: Inbox::new(inbox),
            max_payload_bytes: config.max_payload_bytes,
            max_notification_bytes: config.max_notification_bytes,
            serve_direct: config.serve_direct,
            has_device: devices.is_some(),
            about: About { name: config.name.clone(), devices: devices.unwrap_or_default() },
        };
        Self {
            source: Arc::new(source),
            stop: Arc::new(stop),
            staging: StagingPool::new(config.kept_staging_bytes),
            ranges,
        }
    }
}

impl Shared {
    pub(crate) fn new(config: &Config, parts: Parts, endpoint: SocketAddr, means: Means) -> Self {
        let submissions = Budget::new(
            ("max_submissions", config.max_submissions as u64),
            ("max_submission_bytes", config.max_submission_bytes),
        );
        let batches = Budget::new(
            ("max_async_batches", config.max_async_batches as u64),
            ("max_async_slots", config.max_async_slots as u64),
        );
        let counters = Arc::<Counters>::default();
        let pool = Arc::new(Pool::new(config.max_kept_connections, config.connection_idle));
        let tcp = Arc::new(TcpPath {
            pool: Arc::clone(&pool),
            staging: Arc::clone(&parts.staging),
            stop: Arc::clone(&parts.stop),
            buffers: Buffers::choose(config.socket_buffer_bytes, config.max_payload_bytes),
            counters: Arc::clone(&counters),
        });
        let tcp_path = || Arc::clone(&tcp) as Arc<dyn DataPath>;
        let (path, device) = match means {
            Means::Tcp => (tcp_path(), None),
            #[cfg(test)]
            Means::Replaced(path) => (path, None),
            Means::Device(device) if config.transport == TransportPolicy::TcpOnly => (tcp_path(), Some(device)),
            Means::Device(device) => (Arc::clone(&device).path(config, &tcp), Some(device)),
        };
        Self {
            endpoint,
            source: parts.source,
            ranges: parts.ranges,
            planner: Planner {
                max_requests: config.max_batch_requests,
                max_payload_bytes: config.max_payload_bytes,
                max_notification_bytes: config.max_notification_bytes,
                budget: Arc::clone(&submissions),
            },
            submissions,
            batches,
            table: BatchTable::new(),
            executor: Arc::default(),
            timekeeper: Arc::default(),
            stop: parts.stop,
            staging: parts.staging,
            pool,
            path,
            device,
            tcp,
            counters,
        }
    }

    /// What the engine at `peer` exports: from here if it is this one, else over the wire.
    pub(crate) fn describe(&self, peer: (SocketAddr, Epoch), deadline: Deadline) -> Result<Description, TransferError> {
        if self.stop.is_signalled() {
            return Err(TransferError::Stopped);
        }
        if !self.is_self(peer) {
            return self.tcp.describe(peer, deadline);
        }
        let _inside = self.source.admission.enter().ok_or(TransferError::Refused { status: Status::SourceClosed })?;
        Ok(self.source.describe())
    }

    pub(crate) fn open(
        &self,
        endpoint: SocketAddr,
        epoch: Epoch,
        deadline: Deadline,
    ) -> Result<RemoteSegment, OpenError> {
        let _charge = self.submissions.take(1, 0)?;
        let description = self.describe((endpoint, epoch), deadline);
        let description = description.map_err(|source| OpenError::Describe { endpoint, source })?;
        Ok(RemoteSegment::new(endpoint, epoch, description))
    }

    pub(crate) fn refresh(&self, segment: &RemoteSegment, deadline: Deadline) -> Result<(), OpenError> {
        let endpoint = segment.endpoint();
        let _charge = self.submissions.take(1, 0)?;
        let description = self.describe((endpoint, segment.epoch()), deadline);
        segment.publish(description.map_err(|source| OpenError::Describe { endpoint, source })?);
        Ok(())
    }

    pub(crate) fn submit_and_wait(
        &self,
        peer: &RemoteSegment,
        mode: Mode,
        requests: &[TransferRequest],
        deadline: Deadline,
        notification: Option<&Notification>,
    ) -> Result<BatchReport, SubmitError> {
        let mut plan = self.plan(peer, mode, requests, notification)?;
        if let Err(miss) = plan.resolve(&peer.snapshot()) {
            let Miss::Unknown(_) = miss else { return Err(miss.into_error()) };
            // The peer may have registered it since.
            let description = self.describe((peer.endpoint(), peer.epoch()), deadline).map_err(SubmitError::Refresh)?;
            peer.publish(description);
            plan.resolve(&peer.snapshot()).map_err(Miss::into_error)?;
        }
        let mut report = run_and_report(&*self.path, &mut plan, deadline);
        let send = !requests.is_empty() && report.is_complete();
        report.notification =
            settle_notification(notification, send, |notification| self.deliver(peer, notification, deadline));
        Ok(report)
    }

    /// Adds to a batch; does no I/O.
    pub(crate) fn submit_to(
        self: &Arc<Self>,
        cell: &Arc<BatchCell>,
        peer: &RemoteSegment,
        mode: Mode,
        requests: &[TransferRequest],
        deadline: Deadline,
        notification: Option<&Notification>,
    ) -> Result<Group, SubmitError> {
        let mut plan = self.plan(peer, mode, requests, notification)?;
        plan.resolve(&peer.snapshot()).map_err(Miss::into_error)?;
        self.timekeeper.start().map_err(|error| SubmitError::Thread(Arc::new(error)))?;
        cell.submit(plan, deadline, &self.timekeeper, || {
            self.executor.run(|| {
                let run = BatchRun { shared: Arc::clone(self), cell: Arc::clone(cell), began: false };
                Box::new(move || run.run())
            })
        })
    }

    fn plan(
        &self,
        peer: &RemoteSegment,
        mode: Mode,
        requests: &[TransferRequest],
        notification: Option<&Notification>,
    ) -> Result<Plan, SubmitError> {
        if self.stop.is_signalled() {
            return Err(SubmitError::Stopped);
        }
        self.planner.plan(&self.source.registry, peer, mode, requests, notification)
    }

    /// Puts a notification into the inbox of `peer`, whose budget was taken: in process if it is this engine.
    pub(crate) fn deliver(
        &self,
        peer: &RemoteSegment,
        notification: &Notification,
        deadline: Deadline,
    ) -> Result<(), NotificationFailure> {
        let peer = (peer.endpoint(), peer.epoch());
        let sent = if self.is_self(peer) {
            let sent = self.deliver_here(notification);
            sent.map_err(|status| Failure::harmless(TransferError::Refused { status }))
        } else {
            self.tcp.notify(peer, notification, deadline)
        };
        sent.map_err(|Failure { error, effect, .. }| NotificationFailure { error, effect })
    }

    /// Puts a notification into this engine's inbox, with the answers that a peer would get.
    fn deliver_here(&self, notification: &Notification) -> Result<(), Status> {
        self.notify_here(notification).map_err(|error| match error {
            NotifyError::SourceClosed => Status::SourceClosed,
            _ => Status::Exhausted,
        })
    }

    pub(crate) fn notify_here(&self, notification: &Notification) -> Result<(), NotifyError> {
        let _inside = self.source.admission.enter().ok_or(NotifyError::SourceClosed)?;
        self.check_length(notification)?;
        self.source.inbox.reserve(notification.bytes())?.commit(notification.clone());
        Ok(())
    }

    pub(crate) fn notify(
        &self,
        peer: &RemoteSegment,
        notification: &Notification,
        deadline: Deadline,
    ) -> Result<(), NotifyError> {
        self.check_length(notification)?;
        let _charge = self.submissions.take(1, notification.bytes())?;
        Ok(self.deliver(peer, notification, deadline)?)
    }

    fn check_length(&self, notification: &Notification) -> Result<(), NotifyError> {
        let (bytes, limit) = (notification.bytes(), self.source.max_notification_bytes);
        if bytes > limit { Err(NotifyError::TooLong { bytes, limit }) } else { Ok(()) }
    }

    /// Closes the source, and waits for those inside.
    pub(crate) fn close(&self, deadline: Deadline) -> Result<(), CloseTimeout> {
        self.source.registry.close();
        self.source.admission.close(deadline).map_err(|CloseTimedOut { inside }| CloseTimeout { inside })
    }

    pub(crate) fn allocate(&self, capacity: usize) -> Result<Arc<BatchCell>, Exhausted> {
        let charge = self.batches.take(1, capacity as u64)?;
        Ok(self.table.insert(|id| BatchCell::new(id, capacity, charge)))
    }

    pub(crate) fn free(&self, id: BatchId) -> Result<(), BatchError> {
        self.table.remove(id, BatchCell::free).map(drop)
    }

    pub(crate) fn detach(&self, id: BatchId) -> Result<(), BatchError> {
        self.table.remove(id, |_| Ok(())).map(|cell| cell.detach())
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.stats_of_host();
        if let Some(device) = &self.device {
            device.add_stats(&mut stats);
        }
        stats
    }

    fn stats_of_host(&self) -> Stats {
        let (ranges, submissions, batches) = (self.ranges.used(), self.submissions.used(), self.batches.used());
        let inbox = self.source.inbox.retained();
        Stats {
            registrations: ranges.count,
            registered_bytes: ranges.bytes,
            source_operations: self.source.admission.inside(),
            source_connections: 0,
            submissions: submissions.count,
            submission_bytes: submissions.bytes,
            batches: batches.count,
            batch_slots: batches.bytes,
            batch_threads: self.executor.threads() as u64,
            kept_connections: self.pool.kept() as u64,
            kept_staging_bytes: self.staging.kept_bytes(),
            queued_notifications: self.source.inbox.queued() as u64,
            notifications: inbox.count,
            notification_bytes: inbox.bytes,
            requests_completed: self.counters.completed.get(),
            requests_failed: self.counters.failed.get(),
            effects_unknown: self.counters.unknown.get(),
            bytes_read: self.counters.read.get(),
            bytes_written: self.counters.written.get(),
            connections_dialled: self.counters.dialled.get(),
            connections_reused: self.counters.reused.get(),
            rdma_completed: self.counters.rdma_completed.get(),
            rdma_sliced: self.counters.rdma_sliced.get(),
            rdma_fallbacks: self.counters.rdma_fallbacks.get(),
            rdma_retries: self.counters.rdma_retries.get(),
            direct_ranges: self.source.registry.direct_ranges(),
            direct_completed: self.counters.direct_completed.get(),
            ..Stats::default()
        }
    }

    fn is_self(&self, peer: (SocketAddr, Epoch)) -> bool {
        peer == (self.endpoint, self.source.epoch)
    }
}

/// A batch's turn on a thread. If it never comes, because the engine ends first, the batch is told.
struct BatchRun {
    shared: Arc<Shared>,
    cell: Arc<BatchCell>,
    began: bool,
}

impl BatchRun {
    fn run(mut self) {
        self.began = true;
        let shared = &self.shared;
        self.cell.run(&Runner {
            path: &*shared.path,
            is_stopped: &|| shared.stop.is_signalled(),
            notify: &|peer, notification, deadline| shared.deliver(peer, notification, deadline),
        });
    }
}

impl Drop for BatchRun {
    fn drop(&mut self) {
        if !self.began {
            self.cell.stop();
        }
    }
}
