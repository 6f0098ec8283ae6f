//! Rights by memory windows: each over a part of a region, for one peer, on the connection that there is with it.
//!
//! A right is bound by a work request before anybody hears of its key. It ends by a local invalidation whose completion was
//! polled, or with its connection: its window is freed before that QP is destroyed. Either way it is gone for certain, and
//! what it had of its region is given back after that. All of it is in the driver's hands; callers hold numbers.

use std::{
    collections::{HashMap, VecDeque},
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::Ordering::{self, Relaxed},
    },
};

use tokio::sync::oneshot;
use verbs_bootstrap::InstanceId;
use verbs_transport::fabric::bulk::{
    Access, AllocWindowError, BulkFabric, BulkOp, BulkPort, BulkQp, BulkRegion, BulkWindow, BulkWr, Rkey,
};

use super::{
    Bulk, QpOf, RegionOf, Shared,
    driver::{CONTROL, News},
    error::BulkEnd,
    lock,
    op::Use,
    stats::bump,
};
use crate::proto::region::{RegionId, UseError};

pub(crate) type WindowOf<F> = <RegionOf<F> as BulkRegion>::Window;

/// Names a right, on this host. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WindowRight(u64);

/// Why a window is not bound, or not known to be gone.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum WindowError {
    #[error(transparent)]
    Region(#[from] UseError),
    #[error(transparent)]
    Alloc(Arc<AllocWindowError>),
    #[error("no bulk connection to bind a window on")]
    NotConnected,
    #[error("the bulk connection ended: {0}")]
    Ended(Arc<BulkEnd>),
    #[error("the device would not free a window: {0}")]
    Stuck(Arc<io::Error>),
    #[error("shutting down")]
    ShuttingDown,
}

type Reply<T> = oneshot::Sender<Result<T, WindowError>>;

/// What the driver is asked for.
pub(crate) enum WindowNews<F: BulkFabric> {
    Bind {
        id: WindowRight,
        peer: InstanceId,
        window: WindowOf<F>,
        region: Use<RegionOf<F>>,
        range: Range<usize>,
        reply: Reply<Rkey>,
    },
    Unbind {
        id: WindowRight,
        reply: Reply<()>,
    },
}

enum State {
    /// The bind waits to be posted, or is.
    Binding(Reply<Rkey>),
    Bound,
    /// The invalidation waits to be posted, or is.
    Ending(Vec<Reply<()>>),
    /// The device would not free it.
    Stuck(Arc<io::Error>),
}

struct Entry<F: BulkFabric> {
    tag: u32,
    // The window first: it ends before what it holds of the region.
    window: WindowOf<F>,
    region: Use<RegionOf<F>>,
    range: Range<usize>,
    state: State,
}

/// All rights of one port.
pub(crate) struct WindowRights<F: BulkFabric> {
    rights: HashMap<WindowRight, Entry<F>>,
    /// Posted work requests.
    wrs: HashMap<u64, WindowRight>,
    /// To be posted, by connection.
    queues: HashMap<u32, VecDeque<WindowRight>>,
    serial: u32,
    shared: Arc<Shared<F>>,
}

impl<F: BulkFabric> WindowRights<F> {
    pub(super) fn new(shared: Arc<Shared<F>>) -> Self {
        Self { rights: HashMap::new(), wrs: HashMap::new(), queues: HashMap::new(), serial: 0, shared }
    }

    /// Takes a request in; `live`: the connection that is up.
    pub(super) fn take(&mut self, news: WindowNews<F>, live: impl FnOnce(InstanceId) -> Option<u32>) {
        match news {
            WindowNews::Bind { id, peer, window, region, range, reply } => {
                let Some(tag) = live(peer) else {
                    self.shared.put_window_back(window);
                    let _ = reply.send(Err(WindowError::NotConnected));
                    return;
                };
                let entry = Entry { tag, window, region, range, state: State::Binding(reply) };
                self.rights.insert(id, entry);
                self.shared.counters.windows.fetch_add(1, Relaxed);
                self.queues.entry(tag).or_default().push_back(id);
            }
            WindowNews::Unbind { id, reply } => self.unbind(id, Some(reply)),
        }
    }

    fn unbind(&mut self, id: WindowRight, reply: Option<Reply<()>>) {
        let Some(entry) = self.rights.get_mut(&id) else {
            // It ended with its connection.
            reply.map(|reply| reply.send(Ok(())));
            return;
        };
        match &mut entry.state {
            State::Bound => {
                entry.state = State::Ending(reply.into_iter().collect());
                self.queues.entry(entry.tag).or_default().push_back(id);
            }
            State::Ending(replies) => replies.extend(reply),
            State::Stuck(error) => {
                let error = WindowError::Stuck(error.clone());
                reply.map(|reply| reply.send(Err(error)));
            }
            // Nobody knows of it before it is bound.
            State::Binding(_) => debug_assert!(false, "{id:?} is not bound yet"),
        }
    }

    /// Posts what waits on a connection, while it has fewer than [`WINDOW_WRS`] posted; how many.
    pub(super) fn pump(&mut self, tag: u32, qp: &QpOf<F>, posted: u32) -> Result<u32, BulkEnd> {
        let mut new = 0;
        while posted + new < WINDOW_WRS {
            let Some(id) = self.queues.get_mut(&tag).and_then(VecDeque::pop_front) else { break };
            let wr_id = self.next_wr(tag);
            let Some(entry) = self.rights.get(&id) else { continue };
            let op = match (&entry.state, entry.region.region(), entry.window.rkey()) {
                (State::Binding(_), Some(region), _) => {
                    let (window, range) = (&entry.window, entry.range.clone());
                    BulkOp::Bind { window, region, range, access: Access::SOURCE }
                }
                (State::Ending(_), _, Some(rkey)) => BulkOp::LocalInvalidate { rkey },
                _ => continue,
            };
            self.wrs.insert(wr_id, id);
            qp.post(&[BulkWr { id: wr_id, signaled: true, fence: false, op }]).map_err(BulkEnd::Post)?;
            new += 1;
        }
        Ok(new)
    }

    fn next_wr(&mut self, tag: u32) -> u64 {
        // 0 is the control messages'.
        self.serial = self.serial.checked_add(1).unwrap_or(1);
        CONTROL | u64::from(tag & 0x3fff_ffff) << 32 | u64::from(self.serial)
    }

    /// A work request on a connection that is up is done.
    pub(super) fn on_done(&mut self, wr_id: u64) {
        let counters = self.shared.counters.clone();
        let Some(id) = self.wrs.remove(&wr_id) else { return bump(&counters.late_completions) };
        let Some(entry) = self.rights.get_mut(&id) else { return bump(&counters.late_completions) };
        match std::mem::replace(&mut entry.state, State::Bound) {
            State::Binding(reply) => {
                bump(&counters.windows_bound);
                self.shared.bind_failures.store(0, Relaxed);
                let told = entry.window.rkey().is_some_and(|rkey| reply.send(Ok(rkey)).is_ok());
                if !told {
                    // Nobody waits for it any more.
                    self.unbind(id, None);
                }
            }
            State::Ending(replies) => {
                bump(&counters.windows_invalidated);
                if let Some(Entry { window, region, .. }) = self.forget(id) {
                    self.shared.put_window_back(window);
                    drop(region);
                }
                for reply in replies {
                    let _ = reply.send(Ok(()));
                }
            }
            other => entry.state = other,
        }
    }

    /// A work request failed by itself; the end of its connection follows.
    pub(super) fn on_failed(&mut self, wr_id: u64) {
        let id = self.wrs.get(&wr_id);
        if id.and_then(|id| self.rights.get(id)).is_some_and(|entry| matches!(entry.state, State::Binding(_))) {
            bump(&self.shared.counters.windows_failed);
            if self.shared.bind_failures.fetch_add(1, Relaxed) + 1 == BIND_FAILURES_MAX {
                tracing::warn!(
                    "memory windows cannot be bound: each right takes a registration from now on (said once)"
                );
            }
        }
    }

    /// A connection has ended: what is bound on it is freed, for its QP is not destroyed before.
    pub(super) fn end_connection(&mut self, tag: u32, cause: &Arc<BulkEnd>) {
        self.queues.remove(&tag);
        let ids: Vec<WindowRight> =
            self.rights.iter().filter(|(_, entry)| entry.tag == tag).map(|(id, _)| *id).collect();
        self.wrs.retain(|_, id| !ids.contains(id));
        for id in ids {
            let Some(Entry { tag, window, region, range, state }) = self.forget(id) else { continue };
            let stuck = match window.free() {
                Ok(()) => {
                    bump(&self.shared.counters.windows_freed);
                    None
                }
                Err((window, error)) => {
                    tracing::error!(%error, "a memory window would not be freed: its memory stays out of use");
                    let error = Arc::new(error);
                    self.shared.counters.windows.fetch_add(1, Relaxed);
                    let state = State::Stuck(error.clone());
                    self.rights.insert(id, Entry { tag, window, region, range, state });
                    Some(error)
                }
            };
            match state {
                State::Binding(reply) => drop(reply.send(Err(WindowError::Ended(cause.clone())))),
                State::Ending(replies) => {
                    let gone = || stuck.clone().map_or(Ok(()), |error| Err(WindowError::Stuck(error)));
                    for reply in replies {
                        let _ = reply.send(gone());
                    }
                }
                State::Bound | State::Stuck(_) => {}
            }
        }
    }

    /// Whether anything is bound on a connection, or may be.
    pub(super) fn any_on(&self, tag: u32) -> bool {
        self.rights.values().any(|entry| entry.tag == tag)
    }

    fn forget(&mut self, id: WindowRight) -> Option<Entry<F>> {
        let entry = self.rights.remove(&id)?;
        self.shared.counters.windows.fetch_sub(1, Relaxed);
        Some(entry)
    }
}

impl<F: BulkFabric> Shared<F> {
    /// An unbound window, for the next right.
    fn put_window_back(&self, window: WindowOf<F>) {
        let mut spare = lock(&self.spare_windows);
        if spare.len() < SPARE_WINDOWS && !self.is_closing() && !window.is_bound() {
            spare.push(window);
        }
    }
}

impl<F: BulkFabric> Bulk<F> {
    /// Whether rights are windows on this device.
    pub(crate) fn uses_windows(&self) -> bool {
        let shared = self.shared();
        shared.limits.windows.usable() && shared.bind_failures.load(Relaxed) < BIND_FAILURES_MAX
    }

    /// Lets `peer` READ a part of a region, over the bulk connection that there is with it; gives the address and the key,
    /// which open nothing else, and to nobody else.
    pub(crate) async fn bind_window(
        &self,
        peer: InstanceId,
        region: RegionId,
        range: Range<usize>,
    ) -> Result<(WindowRight, u64, Rkey), WindowError> {
        let shared = self.shared();
        let region = Use::begin(&shared.regions, region)?;
        let addr = region.region().map_or(0, BulkRegion::addr) + range.start as u64;
        let spare = lock(&shared.spare_windows).pop();
        let window = if let Some(window) = spare {
            window
        } else {
            let port = shared.port.clone();
            let made = shared.runtime.spawn_blocking(move || port.alloc_window()).await;
            let made = made.map_err(|_| WindowError::ShuttingDown)?;
            made.map_err(|error| WindowError::Alloc(Arc::new(error)))?
        };
        let id = WindowRight(shared.next_right.fetch_add(1, Ordering::Relaxed));
        let (reply, answer) = oneshot::channel();
        shared.tell(News::Window(WindowNews::Bind { id, peer, window, region, range, reply }));
        let rkey = answer.await.unwrap_or(Err(WindowError::ShuttingDown))?;
        Ok((id, addr, rkey))
    }

    /// Takes a right back. When this has ended well its key opens nothing.
    pub(crate) fn unbind_window(&self, id: WindowRight) -> impl Future<Output = Result<(), WindowError>> + use<F> {
        let (reply, answer) = oneshot::channel();
        self.shared().tell(News::Window(WindowNews::Unbind { id, reply }));
        // Without an answer the driver is gone: every QP is destroyed, and what was bound on it is over.
        async move { answer.await.unwrap_or(Ok(())) }
    }
}

/// Work requests for windows posted at once on one connection, kept beside those of transfers.
pub(super) const WINDOW_WRS: u32 = 8;

/// Windows kept for the next right.
const SPARE_WINDOWS: usize = 64;

/// So many binds in a row that fail, each at the price of its connection, and registrations take the place of windows.
const BIND_FAILURES_MAX: u32 = 3;
