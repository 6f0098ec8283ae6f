//! One NIC of an engine: its bulk port, the thread that takes its completions, and the burial of QPs that are given up.
//!
//! The thread runs a current-thread runtime: callers of the blocking API need none, and wait on a [`Mailbox`].

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    task::Poll,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::{runtime::Handle, sync::Notify};
use verbs_bootstrap::LinkLayer;
use verbs_transport::fabric::{
    AsyncEvent, ConnectQpError, FabricError, Nic, QpPath,
    bulk::{BulkFabric, BulkPort, BulkQp, BulkRegion, BulkWc},
};

use super::{RdmaConfig, StartRdmaError, grant::Marker, identity::Incarnation, mailbox::Mailbox, path::PathEnd};
use crate::{
    budget::Budget,
    control::{DeviceLink, RemoteDevice},
    threads,
};

pub(crate) type QpOf<F> = <<F as BulkFabric>::Bulk as BulkPort>::Qp;
pub(crate) type RegionOf<F> = <<F as BulkFabric>::Bulk as BulkPort>::Region;
pub(crate) type WindowOf<F> = <RegionOf<F> as BulkRegion>::Window;

/// Send WRs of each QP: the window of data, and the marker. Devices round up to 2^n - 1.
pub(crate) const SEND_WRS: u32 = 31;
/// Receives of each QP. One at a time is posted.
pub(crate) const RECV_WRS: u32 = 3;
/// Between looks at burials when the engine ends.
const LOOK: Duration = Duration::from_millis(2);
/// How long the end of an engine waits for burials.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// How many there are of something.
#[derive(Default)]
pub(crate) struct Gauge(AtomicU64);

impl Gauge {
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What stats show.
#[derive(Default)]
pub(crate) struct Gauges {
    pub(crate) connecting: Gauge,
    pub(crate) busy: Gauge,
    pub(crate) idle: Gauge,
    pub(crate) closing: Gauge,
    pub(crate) grants: Gauge,
    pub(crate) stuck: Gauge,
}

/// A NIC.
pub(crate) struct Device<F: BulkFabric> {
    pub(crate) port: F::Bulk,
    pub(crate) pd: Incarnation,
    /// Its place among the engine's.
    pub(crate) rail: u8,
    /// It hangs off another NUMA node than the one that the engine is said to be on.
    pub(crate) is_remote: bool,
    /// How long a QP may stand still.
    stall: Duration,
    pub(crate) runtime: Handle,
    /// Pairs of QPs, those that are being buried included.
    pub(crate) connections: Arc<Budget>,
    pub(crate) gauges: Gauges,
    fabric: Arc<F>,
    routes: Mutex<HashMap<u32, Arc<Mailbox>>>,
    /// As far as the device has said.
    port_down: AtomicBool,
    lost: AtomicBool,
    /// Waits end: the engine does.
    stopping: AtomicBool,
    /// The thread is to end.
    ending: AtomicBool,
    news: Notify,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<F: BulkFabric> Device<F> {
    /// Opens a bulk port and starts the thread, which ends with [`Device::stop`] alone.
    pub(crate) fn start(fabric: Arc<F>, config: &RdmaConfig, rail: u8) -> Result<Arc<Self>, StartRdmaError> {
        let max_connections = config.max_connections;
        // All WRs of all QPs may complete at once, and what a destroyed QP left behind lies there until it is polled.
        let needed = max_connections.saturating_mul(2 * (SEND_WRS + RECV_WRS));
        let depth = needed.min(fabric.limits().cqes);
        let most = depth / (2 * (SEND_WRS + RECV_WRS));
        if most < max_connections {
            return Err(StartRdmaError::Connections { asked: max_connections, limit: most });
        }
        let port = fabric.open_bulk(depth)?;
        let pd = Incarnation::draw().map_err(StartRdmaError::Entropy)?;
        // The runtime lives and ends on its own thread: the caller may be on one of another, where none may be dropped.
        let (tell, told) = mpsc::sync_channel(1);
        let (hand_over, handed_over) = mpsc::sync_channel::<Arc<Self>>(1);
        let thread = threads::spawn("engine-rdma", move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = tell.send(Err(error));
                    return;
                }
            };
            let _ = tell.send(Ok(runtime.handle().clone()));
            if let Ok(device) = handed_over.recv() {
                runtime.block_on(drive(&device));
            }
            // Burials that did not end in time are dropped with it, and with them what can be dropped.
            runtime.shutdown_timeout(LAST_WAIT);
        });
        let thread = thread.map_err(StartRdmaError::Thread)?;
        let runtime = told.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()));
        let runtime = runtime.map_err(StartRdmaError::Thread)?;
        let connections = Budget::new(("max_connections", u64::from(max_connections)), ("bytes of connections", 0));
        let is_remote = config.numa_node.zip(fabric.nic().numa_node).is_some_and(|(own, nic)| own != nic);
        let device = Arc::new(Self {
            port,
            pd,
            rail,
            is_remote,
            stall: config.stall_deadline,
            runtime,
            connections,
            gauges: Gauges::default(),
            fabric,
            routes: Mutex::default(),
            port_down: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            news: Notify::new(),
            thread: Mutex::default(),
        });
        // It waits for this.
        let _ = hand_over.send(Arc::clone(&device));
        *device.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(device)
    }

    /// This end of a path.
    pub(crate) fn end(&self) -> PathEnd {
        let rd_atomic = self.port.limits().rd_atomic;
        let (port, invalidates) = (self.fabric.port(), self.has_windows());
        PathEnd { pd: self.pd, port, rd_atomic, invalidates, rail: self.rail }
    }

    /// As peers are told of it.
    pub(crate) fn told(&self) -> RemoteDevice {
        let (Nic { name, numa_node }, port) = (self.fabric.nic(), self.fabric.known_port());
        let link = match port.link_layer {
            LinkLayer::InfiniBand => DeviceLink::InfiniBand,
            LinkLayer::Ethernet => DeviceLink::Ethernet,
        };
        RemoteDevice { name, port: port.port, link, gid: port.gid.0.into(), numa_node }
    }

    /// Whether operations may begin over it: it is there, and its port has not gone down.
    pub(crate) fn is_up(&self) -> bool {
        !self.lost.load(Ordering::Acquire) && !self.port_down.load(Ordering::Acquire)
    }

    /// Grants may be windows.
    pub(crate) fn has_windows(&self) -> bool {
        self.port.limits().windows.usable()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Ends every wait, for good.
    pub(crate) fn interrupt(&self) {
        self.stopping.store(true, Ordering::Release);
        for mail in self.routes().values() {
            mail.interrupt();
        }
    }

    /// Waits for burials, then ends the thread.
    pub(crate) fn stop(&self) {
        self.interrupt();
        let deadline = Instant::now() + LAST_WAIT;
        while self.gauges.closing.get() > 0 && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
        if self.gauges.closing.get() > 0 {
            tracing::error!(connections = self.gauges.closing.get(), "a device does not let QPs go; the engine ends");
        }
        self.ending.store(true, Ordering::Release);
        self.news.notify_one();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        threads::join_all(&mut thread.into_iter().collect());
    }

    /// From here on completions of that QP go into a mailbox.
    pub(crate) fn open_mailbox(&self, qpn: u32) -> Arc<Mailbox> {
        let mail = Arc::new(Mailbox::new(self.stall));
        self.routes().insert(qpn, Arc::clone(&mail));
        // Whoever interrupts looks at the table after it has said so.
        if self.is_stopping() {
            mail.interrupt();
        }
        mail
    }

    /// Begins to bring a QP to RTS. It may go on whatever becomes of the wait for it, and holds the QP then.
    pub(crate) fn connect(&self, qp: &Arc<QpOf<F>>, path: QpPath) -> Connecting {
        let (tell, told) = mpsc::sync_channel(1);
        let qp = Arc::clone(qp);
        self.runtime.spawn(async move {
            let result = BulkQp::connect(qp, path).await;
            let _ = tell.send(result);
        });
        Connecting(told)
    }

    /// Blocks until the deadline at most.
    pub(crate) fn await_connect(
        &self,
        Connecting(told): Connecting,
        deadline: crate::deadline::Deadline,
    ) -> Result<(), ConnectError> {
        loop {
            if self.is_stopping() {
                return Err(ConnectError::Stopped);
            }
            let left = deadline.remaining().ok_or(ConnectError::TimedOut)?;
            match told.recv_timeout(left.min(Duration::from_millis(20))) {
                Ok(result) => return result.map_err(|error| ConnectError::Failed(Box::new(error))),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(ConnectError::Stopped),
            }
        }
    }

    pub(super) fn routes(&self) -> MutexGuard<'_, HashMap<u32, Arc<Mailbox>>> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing completes any more.
    fn lose(&self, error: &dyn std::fmt::Display) {
        tracing::error!(%error, "an RDMA device is lost; operations over it fail");
        self.lost.store(true, Ordering::Release);
        for mail in self.routes().values() {
            mail.lose(&error.to_string());
        }
    }

    fn deliver(&self, completions: &mut Vec<BulkWc>) {
        let routes = self.routes();
        for completion in completions.drain(..) {
            let (BulkWc::Done { qpn, .. }
            | BulkWc::Failed { qpn, .. }
            | BulkWc::Notified { qpn, .. }
            | BulkWc::NotifyFailed { qpn, .. }) = completion;
            // Completions of QPs that are gone may still come.
            let Some(mail) = routes.get(&qpn) else { continue };
            match completion {
                BulkWc::Done { .. } => mail.sent(None),
                BulkWc::Failed { status, .. } => mail.sent(Some(status)),
                BulkWc::Notified { bytes, invalidated: Some(key), .. } => {
                    mail.receipt(Marker::Invalidated(key.0), bytes);
                }
                BulkWc::Notified { imm, bytes, invalidated: None, .. } => mail.receipt(Marker::Immediate(imm), bytes),
                BulkWc::NotifyFailed { status, .. } => mail.receive_failed(status),
            }
        }
    }
}

/// A QP on its way to RTS.
pub(crate) struct Connecting(mpsc::Receiver<Result<(), ConnectQpError>>);

/// Why a QP is not connected.
pub(crate) enum ConnectError {
    Failed(Box<ConnectQpError>),
    TimedOut,
    Stopped,
}

/// Completions, until [`Device::stop`].
async fn drive<F: BulkFabric>(device: &Arc<Device<F>>) {
    let mut completions = Vec::new();
    while !device.ending.load(Ordering::Acquire) {
        if let Err(error) = turn(device, &mut completions).await {
            device.lose(&error);
            // What waits is told; burials go on, without completions.
            while !device.ending.load(Ordering::Acquire) {
                device.news.notified().await;
            }
        }
    }
}

/// Arms, drains, waits: a completion that comes before the arming raises no event.
async fn turn<F: BulkFabric>(device: &Arc<Device<F>>, completions: &mut Vec<BulkWc>) -> Result<(), FabricError> {
    device.port.arm()?;
    while device.port.poll(completions)? > 0 {
        device.deliver(completions);
        // Connects and burials run on this thread, too.
        tokio::task::yield_now().await;
    }
    let woken = std::future::poll_fn(|cx| {
        while let Poll::Ready(event) = device.fabric.poll_async_event(cx) {
            match event {
                Ok(event @ (AsyncEvent::DeviceFatal | AsyncEvent::CqError)) => {
                    let source = io::Error::other(format!("async event {event:?}"));
                    return Poll::Ready(Err(FabricError { what: "the device", source }));
                }
                Ok(event) => {
                    tracing::debug!(?event, "an async event of the device");
                    match event {
                        AsyncEvent::PortDown => device.port_down.store(true, Ordering::Release),
                        AsyncEvent::PortUp => device.port_down.store(false, Ordering::Release),
                        _ => {}
                    }
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        device.port.poll_wake(cx)
    });
    tokio::select! {
        woken = woken => woken,
        () = device.news.notified() => Ok(()),
    }
}
