//! The driver: one task that takes transfers in, posts their chunks, polls completions, and sees connections off.
//!
//! Whatever a transfer holds of memory is in here, in the live or the retired half, until the device has given it back:
//! futures hold nothing. News come by an unbounded queue, so that whoever brings them never waits for this task.
//!
//! | file | has |
//! |---|---|
//! | here | the task: its turns, its sleep, its news |
//! | `transfers` | a transfer from its start to its one end |
//! | `live` | a connection that is up, and what is posted on it |
//! | `completions` | what completions say |
//! | `retired` | connections that have ended |
//! | `idle` | connections that nobody needs any more |
//! | `notifications` | what peers tell, for the application |

mod completions;
mod idle;
mod live;
mod notifications;
mod retired;
mod transfers;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    future::poll_fn,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use tokio::{sync::mpsc, time::Instant};
use verbs_bootstrap::InstanceId;
use verbs_transport::{
    Alarm,
    fabric::{
        POLL_BATCH,
        bulk::{BulkFabric, BulkPort, BulkWc},
    },
};

pub(super) use self::live::CONTROL;
pub use self::notifications::{Notification, Notifications};
use self::{
    completions::Failure,
    live::Live,
    retired::{Retired, SWEEP_EVERY},
};
use super::{
    QpOf, RegionOf, Shared,
    error::{BulkEnd, TransferError},
    op::{Op, Stop},
    windows::{WindowNews, WindowRights},
};
use crate::proto::transfer::TransferId;

/// What the driver is told.
pub(crate) enum News<F: BulkFabric> {
    /// A transfer begins.
    Start(Op<RegionOf<F>>),
    /// One is to post nothing more.
    Stop { peer: InstanceId, id: TransferId },
    /// One is to end now, at the price of its connection.
    Abort { peer: InstanceId, id: TransferId },
    /// A QP is in RTS.
    Up { peer: InstanceId, tag: u32, qp: Arc<QpOf<F>>, reads: u32, credits: u16, dialed: bool },
    /// The peer's QP is in RTS, too.
    PeerReady { peer: InstanceId, tag: u32 },
    /// A connection has ended; its QP is in ERR.
    Ended { peer: InstanceId, tag: u32, qp: Arc<QpOf<F>>, cause: Arc<BulkEnd> },
    /// These will find no connection.
    Refused { ops: Vec<Op<RegionOf<F>>>, why: NoConnection },
    /// The application has taken a notification.
    Taken { peer: InstanceId, tag: u32 },
    /// A right by a memory window.
    Window(WindowNews<F>),
    /// Take everything down.
    Shutdown,
}

/// How long this task keeps its thread while there is something to do, but for the turn it is in: a turn may post, which
/// takes a software device as long as the transfer does.
const YIELD_AFTER: Duration = Duration::from_micros(200);

/// Why there is no connection for a transfer.
pub(crate) enum NoConnection {
    Ended(Arc<BulkEnd>),
    NotRegistered,
    NoCapability,
    ShuttingDown,
}

pub(crate) struct Driver<F: BulkFabric> {
    live: BTreeMap<InstanceId, Live<F>>,
    retired: Vec<Retired<F>>,
    /// By QP number.
    routes: HashMap<u32, (InstanceId, u32)>,
    /// Of every transfer that has not ended.
    deadlines: BTreeSet<(Instant, TransferId)>,
    peers: HashMap<TransferId, InstanceId>,
    windows: WindowRights<F>,
    inbox: mpsc::UnboundedReceiver<News<F>>,
    notifications: mpsc::UnboundedSender<(Notification, u32)>,
    wcs: Vec<BulkWc>,
    /// A wake-up was asked for and has not come: completions that are not seen yet will bring it.
    armed: bool,
    alarm: Alarm,
    /// The device is lost: nothing is polled any more.
    lost: bool,
    closing: bool,
    shared: Arc<Shared<F>>,
}

impl<F: BulkFabric> Driver<F> {
    pub(crate) fn new(shared: Arc<Shared<F>>, inbox: mpsc::UnboundedReceiver<News<F>>) -> (Self, Notifications<F>) {
        let (notifications, queue) = mpsc::unbounded_channel();
        let driver = Self {
            live: BTreeMap::new(),
            retired: Vec::new(),
            routes: HashMap::new(),
            deadlines: BTreeSet::new(),
            peers: HashMap::new(),
            windows: WindowRights::new(shared.clone()),
            inbox,
            notifications,
            wcs: Vec::new(),
            armed: false,
            alarm: Alarm::new(),
            lost: false,
            closing: false,
            shared: shared.clone(),
        };
        (driver, Notifications { queue, shared })
    }

    /// Runs until all is taken down.
    pub(crate) async fn run(mut self) {
        let mut since = Instant::now();
        loop {
            let polled = self.turn();
            let mut busy = self.pump_all() || polled == POLL_BATCH;
            let now = Instant::now();
            // Also between sleeps that are none: while completions come faster than they are dealt with, each wait for one ends
            // at once, and the thread's other tasks (that of the messages, say) would have none of it.
            let yields = now.saturating_duration_since(since) >= YIELD_AFTER;
            if !busy || yields {
                self.see_to_the_clock(now);
                busy |= self.pump_all();
            }
            if self.closing && self.live.is_empty() && self.retired.is_empty() && self.peers.is_empty() {
                break;
            }
            if yields {
                tokio::task::yield_now().await;
                since = Instant::now();
            }
            if busy {
                continue;
            }
            // A completion that came before the arming wakes nobody: one more turn. One that came after the last poll does.
            if self.arm() {
                continue;
            }
            if self.sleep().await {
                since = Instant::now();
            }
        }
        // No QP is left, so no operation is, nor a window: whoever still maps rolls back.
        super::lock(&self.shared.spare_windows).clear();
        self.shared.regions.close();
        let shared = self.shared.clone();
        drop(self);
        shared.over.send_replace(true);
    }

    /// Takes in what there is. How many completions came.
    fn turn(&mut self) -> usize {
        self.take_news();
        if self.lost {
            return 0;
        }
        self.poll().unwrap_or_else(|error| {
            self.on_device_lost(&error);
            0
        })
    }

    /// What is due by the clock: before each sleep, and now and then while there is no time for one.
    fn see_to_the_clock(&mut self, now: Instant) {
        self.expire(now);
        self.find_stalls(now);
        self.find_idle(now);
        self.sweep(now);
    }

    /// Asks for a wake-up, unless one is due already. Whether it did.
    fn arm(&mut self) -> bool {
        if self.armed || self.lost {
            return false;
        }
        match self.shared.port.arm() {
            Ok(()) => self.armed = true,
            Err(error) => self.on_device_lost(&error),
        }
        true
    }

    /// Waits for anything to do. Whether it had to wait, so that other tasks have run.
    async fn sleep(&mut self) -> bool {
        let mut visits = 0_u32;
        if let Some(due) = self.next_due() {
            self.alarm.by(due);
        }
        let (shared, lost) = (&self.shared, self.lost);
        tokio::select! {
            biased;
            // Never done: it only counts.
            () = poll_fn(|_| { visits = visits.saturating_add(1); Poll::Pending }) => {}
            news = self.inbox.recv() => {
                if let Some(news) = news {
                    self.take(news);
                }
            }
            woken = poll_fn(|cx| shared.port.poll_wake(cx)), if !lost => {
                self.armed = false;
                if let Err(error) = woken {
                    self.on_device_lost(&error);
                }
            }
            () = self.alarm.rings(), if self.alarm.is_set() => {}
        }
        visits > 1
    }

    fn next_due(&self) -> Option<Instant> {
        let stall = self.shared.config.stall_deadline;
        let stalls = self.live.values().filter(|live| live.in_flight() > 0).map(|live| live.last_progress + stall);
        let proof = self.shared.proof_deadline;
        let proofs = self.live.values().filter(|live| !live.proven).map(|live| live.since + proof);
        let flush = self.shared.config.flush_deadline;
        let now = Instant::now();
        let sweeps = self.retired.iter().map(|retired| {
            let late = now.saturating_duration_since(retired.since) >= flush;
            // Its flush is there, or overdue: only somebody who holds the QP is in the way.
            if late || retired.transfers.posted() == 0 { now + SWEEP_EVERY } else { retired.since + flush }
        });
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let idle = self.live.values().filter_map(|live| live.idle.due(&self.shared.config));
        stalls.chain(proofs).chain(sweeps).chain(deadline).chain(idle).min()
    }

    /// Ends connections that hang, and those over which nothing ever came.
    fn find_stalls(&mut self, now: Instant) {
        let (after, proof) = (self.shared.config.stall_deadline, self.shared.proof_deadline);
        let judge = |live: &Live<F>| {
            let posted = live.in_flight();
            if posted > 0 && now.saturating_duration_since(live.last_progress) >= after {
                return Some(BulkEnd::Stalled { after, posted });
            }
            let silent = !live.proven && now.saturating_duration_since(live.since) >= proof;
            silent.then_some(BulkEnd::NotProven { after: proof })
        };
        let found: Vec<_> = self.live.iter().filter_map(|(peer, live)| Some((*peer, live.tag, judge(live)?))).collect();
        if found.is_empty() {
            return;
        }
        for (peer, tag, cause) in found {
            self.shared.end_epoch(&self.shared.conn(peer), tag, cause);
        }
        self.take_news();
    }

    fn take_news(&mut self) {
        while let Ok(news) = self.inbox.try_recv() {
            self.take(news);
        }
    }

    fn take(&mut self, news: News<F>) {
        match news {
            News::Start(op) => self.start(op),
            News::Stop { peer, id } => self.stop(peer, id, Stop::Cancelled),
            News::Abort { peer, id } => self.abort(peer, id),
            News::Up { peer, tag, qp, reads, credits, dialed } => self.on_up(peer, tag, qp, reads, credits, dialed),
            News::PeerReady { peer, tag } => {
                if let Some(live) = self.live_of(peer, tag) {
                    live.held = false;
                    live.probe_due |= !live.proven;
                }
            }
            News::Ended { peer, tag, qp, cause } => self.on_ended(peer, tag, qp, cause),
            News::Refused { ops, why } => {
                for op in ops {
                    let peer = op.request.peer;
                    let error = match &why {
                        NoConnection::Ended(cause) => TransferError::Connect { peer, cause: cause.clone() },
                        NoConnection::NotRegistered => TransferError::PeerNotRegistered { peer },
                        NoConnection::NoCapability => TransferError::NoCapability { peer },
                        NoConnection::ShuttingDown => TransferError::ShuttingDown,
                    };
                    self.finish(op, Err(error));
                }
            }
            News::Taken { peer, tag } => {
                if let Some(live) = self.live_of(peer, tag) {
                    live.idle.untaken = live.idle.untaken.saturating_sub(1);
                    live.owed += 1;
                }
            }
            News::Window(news) => {
                // One that is about to be closed takes no windows.
                let open = |peer| self.live.get(&peer).filter(|live| live.idle.asked.is_none()).map(|live| live.tag);
                self.windows.take(news, open);
            }
            News::Shutdown => self.shut_down(),
        }
    }
}
