//! One transfer: what the caller asked for, its future, and what the device needs of it until it has ended.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    sync::{AcquireError, OwnedSemaphorePermit, TryAcquireError, oneshot},
    time::Instant,
};
use verbs_bootstrap::InstanceId;
use verbs_transport::fabric::bulk::{BulkFabric, BulkRegion};

use super::{RegionOf, Shared, driver::News, error::TransferError, stats::bump};
use crate::{
    proto::{
        region::{RegionId, UseError},
        transfer::{Kind, TransferId},
    },
    region::{RemoteRange, Table},
};

/// What a transfer is to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) peer: InstanceId,
    pub(crate) kind: Kind,
    /// Region and offset.
    pub(crate) local: Option<(RegionId, u64)>,
    pub(crate) remote: RemoteRange,
    /// Of the notification.
    pub(crate) value: u32,
}

/// A region in use by a transfer: it stays registered, and its memory where it is, until this is dropped.
pub(crate) struct Use<R: BulkRegion> {
    id: RegionId,
    region: Option<Arc<R>>,
    table: Arc<Table<R>>,
}

impl<R: BulkRegion> Use<R> {
    /// Begins to use a region.
    pub(crate) fn begin(table: &Arc<Table<R>>, id: RegionId) -> Result<Self, UseError> {
        let region = Some(table.begin_use(id)?);
        Ok(Self { id, region, table: table.clone() })
    }

    pub(crate) fn region(&self) -> Option<&R> {
        self.region.as_deref()
    }

    /// A device that would not destroy a QP may still touch it: never again to be given back.
    pub(crate) fn leak(mut self) {
        if let Some(region) = self.region.take() {
            self.table.leak(self.id, region);
        }
    }
}

impl<R: BulkRegion> Drop for Use<R> {
    fn drop(&mut self) {
        if self.region.take().is_some() {
            self.table.end_use(self.id);
        }
    }
}

/// Why a transfer was stopped before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Cancelled,
    Deadline,
}

/// A transfer in the driver's hands. Dropping it gives its region back and answers "shutting down".
pub(crate) struct Op<R: BulkRegion> {
    pub(crate) id: TransferId,
    pub(crate) request: Request,
    pub(crate) local: Option<Use<R>>,
    pub(crate) after: Duration,
    pub(crate) deadline: Instant,
    pub(crate) stopped: Option<Stop>,
    pub(crate) handle: Arc<Handle>,
    pub(crate) reply: Option<oneshot::Sender<Result<(), TransferError>>>,
    pub(crate) _permit: OwnedSemaphorePermit,
}

/// What the future, its handles and the driver share.
#[derive(Debug, Default)]
pub(crate) struct Handle {
    pub(crate) moved: AtomicU64,
    cancelled: AtomicBool,
}

/// A GET, a PUT or a notification under way; see [`Bulk::get`](super::Bulk::get).
#[must_use = "a transfer does nothing until it is polled"]
pub struct Transfer<F: BulkFabric> {
    shared: Arc<Shared<F>>,
    id: TransferId,
    request: Request,
    after: Duration,
    handle: Arc<Handle>,
    stage: Stage,
}

enum Stage {
    New,
    /// Too many transfers are under way.
    Waits(Pin<Box<dyn Future<Output = Result<OwnedSemaphorePermit, AcquireError>> + Send>>),
    Runs(oneshot::Receiver<Result<(), TransferError>>),
    Over,
}

/// Watches and stops a transfer from elsewhere. Cheap to clone.
pub struct TransferHandle<F: BulkFabric> {
    shared: Arc<Shared<F>>,
    id: TransferId,
    peer: InstanceId,
    bytes: u64,
    handle: Arc<Handle>,
}

impl<F: BulkFabric> Clone for TransferHandle<F> {
    fn clone(&self) -> Self {
        let Self { shared, id, peer, bytes, handle } = self;
        Self { shared: shared.clone(), id: *id, peer: *peer, bytes: *bytes, handle: handle.clone() }
    }
}

impl<F: BulkFabric> TransferHandle<F> {
    /// Bytes that have moved so far; whole chunks.
    pub fn moved(&self) -> u64 {
        self.handle.moved.load(Relaxed)
    }

    /// Bytes in all.
    pub fn total(&self) -> u64 {
        self.bytes
    }

    /// Posts nothing more of it. It ends when what is posted has come home, with
    /// [`TransferError::Cancelled`] unless that was all of it.
    pub fn cancel(&self) {
        self.handle.cancelled.store(true, Relaxed);
        self.shared.tell(News::Stop { peer: self.peer, id: self.id });
    }

    /// Ends it now: should anything of it be posted, the connection to the peer goes down with it, since nothing else
    /// takes a work request back. Other transfers with that peer end with [`TransferError::ConnectionReset`].
    pub fn abort(&self) {
        self.handle.cancelled.store(true, Relaxed);
        self.shared.tell(News::Abort { peer: self.peer, id: self.id });
    }
}

impl<F: BulkFabric> Transfer<F> {
    pub(crate) fn new(shared: Arc<Shared<F>>, request: Request) -> Self {
        let id = TransferId(shared.next_transfer.fetch_add(1, Relaxed));
        let after = shared.config.deadline;
        Self { shared, id, request, after, handle: Arc::default(), stage: Stage::New }
    }

    /// With another deadline than [`BulkConfig::deadline`](super::BulkConfig::deadline), counted from the first poll. A
    /// transfer that is still under way then posts nothing more, and ends when what is posted has come home.
    pub fn within(mut self, deadline: Duration) -> Self {
        self.after = deadline;
        self
    }

    /// To watch it or to stop it from elsewhere.
    pub fn handle(&self) -> TransferHandle<F> {
        TransferHandle {
            shared: self.shared.clone(),
            id: self.id,
            peer: self.request.peer,
            bytes: self.request.remote.len,
            handle: self.handle.clone(),
        }
    }

    /// Everything that can be refused before the driver hears of it. `None`: there is nothing to do.
    fn check(&mut self) -> Result<Option<Use<RegionOf<F>>>, TransferError> {
        let RemoteRange { addr, len, .. } = self.request.remote;
        if addr.checked_add(len).is_none() {
            return Err(TransferError::RemoteRange { addr, len });
        }
        if self.request.value > VALUE_MAX {
            return Err(TransferError::NotifyValue { value: self.request.value });
        }
        let Some((id, offset)) = self.request.local else { return Ok(None) };
        let table = self.shared.regions.clone();
        let held = Use::begin(&table, id)?;
        let Some(region) = held.region.clone() else { return Ok(None) };
        let region_len = region.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > region_len) {
            drop(region);
            return Err(TransferError::OutOfRange { id, offset, len, region_len });
        }
        if self.request.kind == Kind::Get && !region.access().local_write() {
            drop(region);
            return Err(TransferError::ReadOnly { id });
        }
        drop(region);
        if len == 0 && self.request.kind == Kind::PutAndNotify {
            self.request.kind = Kind::Notify;
            return Ok(None);
        }
        Ok(Some(held))
    }

    /// Hands it to the driver; its end, when that was all.
    fn begin(&mut self, permit: Result<OwnedSemaphorePermit, TransferError>) -> Option<Result<(), TransferError>> {
        match permit.and_then(|permit| self.submit(permit)) {
            Ok(Some(runs)) => {
                self.stage = runs;
                None
            }
            other => {
                self.stage = Stage::Over;
                let end = other.map(drop);
                self.shared.counters.end_transfer(&end);
                Some(end)
            }
        }
    }

    fn submit(&mut self, permit: OwnedSemaphorePermit) -> Result<Option<Stage>, TransferError> {
        if self.handle.cancelled.load(Relaxed) {
            return Err(TransferError::Cancelled);
        }
        if self.shared.is_closing() {
            return Err(TransferError::ShuttingDown);
        }
        let local = self.check()?;
        if self.request.remote.len == 0 && self.request.kind != Kind::Notify {
            return Ok(None);
        }
        let (reply, answer) = oneshot::channel();
        let counters = &self.shared.counters;
        bump(match self.request.kind {
            Kind::Get => &counters.gets,
            Kind::Put | Kind::PutAndNotify => &counters.puts,
            Kind::Notify => &counters.notifies,
        });
        let op = Op {
            id: self.id,
            request: self.request,
            local,
            after: self.after,
            deadline: Instant::now() + self.after,
            stopped: None,
            handle: self.handle.clone(),
            reply: Some(reply),
            _permit: permit,
        };
        self.shared.tell(News::Start(op));
        Ok(Some(Stage::Runs(answer)))
    }
}

impl<F: BulkFabric> Future for Transfer<F> {
    type Output = Result<(), TransferError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match &mut self.stage {
                Stage::New => {
                    let permits = self.shared.permits.clone();
                    let begun = match permits.clone().try_acquire_owned() {
                        Ok(permit) => self.begin(Ok(permit)),
                        Err(TryAcquireError::Closed) => self.begin(Err(TransferError::ShuttingDown)),
                        Err(TryAcquireError::NoPermits) => {
                            self.stage = Stage::Waits(Box::pin(permits.acquire_owned()));
                            continue;
                        }
                    };
                    if let Some(end) = begun {
                        return Poll::Ready(end);
                    }
                }
                Stage::Waits(permit) => {
                    let permit = ready!(permit.as_mut().poll(cx)).map_err(|_| TransferError::ShuttingDown);
                    if let Some(end) = self.begin(permit) {
                        return Poll::Ready(end);
                    }
                }
                Stage::Runs(answer) => {
                    let answer = ready!(Pin::new(answer).poll(cx));
                    self.stage = Stage::Over;
                    // Without an answer the driver is gone, with its runtime.
                    return Poll::Ready(answer.unwrap_or(Err(TransferError::ShuttingDown)));
                }
                Stage::Over => panic!("a transfer was polled after it had ended"),
            }
        }
    }
}

impl<F: BulkFabric> fmt::Debug for Transfer<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("id", &self.id).field("request", &self.request).finish_non_exhaustive()
    }
}

impl<F: BulkFabric> fmt::Debug for TransferHandle<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransferHandle({:?}, {} of {} bytes)", self.id, self.moved(), self.total())
    }
}

/// The highest bit of an immediate marks control messages.
pub(crate) const VALUE_MAX: u32 = (1 << 31) - 1;
