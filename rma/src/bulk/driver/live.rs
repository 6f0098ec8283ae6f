//! A connection that is up, and what is posted on it.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use tokio::time::Instant;
use verbs_bootstrap::InstanceId;
use verbs_transport::fabric::bulk::{BulkFabric, BulkOp, BulkQp, BulkWr, Local, Remote};

use super::{Driver, Failure, idle::Idle};
use crate::{
    bulk::{
        QpOf, RegionOf, Shared,
        config::CONTROL_WRS,
        error::BulkEnd,
        op::{Op, VALUE_MAX},
        stats::bump,
        windows::WINDOW_WRS,
    },
    proto::transfer::{Chunk, Kind, TransferId, Transfers, Window},
};

/// A connection that is up.
pub(super) struct Live<F: BulkFabric> {
    pub(super) tag: u32,
    pub(super) qp: Arc<QpOf<F>>,
    pub(super) transfers: Transfers<Failure>,
    pub(super) ops: HashMap<TransferId, Op<RegionOf<F>>>,
    /// The peer may not be in RTR yet.
    pub(super) held: bool,
    /// Something has come back.
    pub(super) proven: bool,
    /// The peer's receives for notifications.
    pub(super) notify_window: u16,
    /// Receives posted again that the peer does not know of.
    pub(super) owed: u32,
    pub(super) probe_due: bool,
    pub(super) control_posted: u32,
    pub(super) windows_posted: u32,
    pub(super) idle: Idle<F>,
    pub(super) last_progress: Instant,
    pub(super) since: Instant,
}

impl<F: BulkFabric> Driver<F> {
    pub(super) fn on_up(
        &mut self,
        peer: InstanceId,
        tag: u32,
        qp: Arc<QpOf<F>>,
        reads: u32,
        credits: u16,
        dialed: bool,
    ) {
        let config = &self.shared.config;
        let longest = u32::try_from(self.shared.limits.message_bytes).unwrap_or(u32::MAX).max(1);
        let kept = if self.shared.limits.windows.usable() { CONTROL_WRS + WINDOW_WRS } else { CONTROL_WRS };
        let window = Window {
            reads,
            wrs: qp.caps().send_wrs.min(config.send_wrs).saturating_sub(kept).max(1),
            bytes: config.in_flight_max_bytes,
            chunk_bytes: config.chunk_bytes.min(longest),
        };
        self.routes.insert(qp.qpn().get(), (peer, tag));
        let mut live = Live {
            tag,
            qp,
            transfers: Transfers::new(tag, window, credits.into()),
            ops: HashMap::new(),
            held: !dialed,
            proven: false,
            notify_window: credits,
            owed: 0,
            // Over a path that drops RDMA packets it fails within the QP's retries, and says so.
            probe_due: dialed,
            control_posted: 0,
            windows_posted: 0,
            idle: Idle::new(Instant::now()),
            last_progress: Instant::now(),
            since: Instant::now(),
        };
        for op in self.shared.conn(peer).take_all_waiting() {
            live.begin(op);
        }
        // One that was there has ended; its news is behind this one only if the peer was faster than our own task.
        if let Some(old) = self.live.insert(peer, live) {
            let qp = old.qp.clone();
            self.retire(old, qp, Arc::new(BulkEnd::Replaced));
        }
    }

    /// Posts what may be posted, a few to each peer. Whether there was anything.
    pub(super) fn pump_all(&mut self) -> bool {
        let Self { live, windows, shared, .. } = self;
        let mut posted = false;
        for (peer, live) in live {
            let tag = live.tag;
            let windows = windows.pump(tag, &live.qp, live.windows_posted);
            let pumped = windows.and_then(|new| {
                if new > 0 && live.in_flight() == 0 {
                    live.last_progress = Instant::now();
                }
                live.windows_posted += new;
                Ok(live.pump(shared)? || new > 0)
            });
            match pumped {
                Ok(some) => posted |= some,
                Err(cause) => {
                    shared.end_epoch(&shared.conn(*peer), tag, cause);
                    posted = true;
                }
            }
        }
        posted
    }

    pub(super) fn live_of(&mut self, peer: InstanceId, tag: u32) -> Option<&mut Live<F>> {
        self.live.get_mut(&peer).filter(|live| live.tag == tag)
    }
}

impl<F: BulkFabric> Live<F> {
    pub(super) fn begin(&mut self, op: Op<RegionOf<F>>) {
        if self.transfers.posted() == 0 {
            self.last_progress = Instant::now();
        }
        self.idle.since = Instant::now();
        self.transfers.start(op.id, op.request.kind, op.request.remote.len);
        self.ops.insert(op.id, op);
    }

    pub(super) fn in_flight(&self) -> usize {
        self.transfers.posted() + (self.control_posted + self.windows_posted) as usize
    }

    /// Posts control messages that are due, then a few chunks.
    fn pump(&mut self, shared: &Shared<F>) -> Result<bool, BulkEnd> {
        if self.held {
            return Ok(false);
        }
        if self.in_flight() == 0 {
            self.last_progress = Instant::now();
        }
        let mut posted = self.pump_control(shared)?;
        let mut bytes = 0;
        for _ in 0..POSTS_IN_TURN {
            if bytes >= TURN_BYTES {
                break;
            }
            let Some(chunk) = self.transfers.next_chunk() else { return Ok(posted) };
            bytes += u64::from(chunk.len);
            bump(&shared.counters.chunks);
            shared.counters.reads_at_once.fetch_max(self.transfers.reads_posted().into(), Relaxed);
            self.post(&chunk)?;
            posted = true;
        }
        Ok(posted)
    }

    /// Half a window at a time, so that at most a few grants are ever under way.
    fn pump_control(&mut self, shared: &Shared<F>) -> Result<bool, BulkEnd> {
        let half = (u32::from(shared.config.notify_window) / 2).max(1);
        let grant = self.owed >= half;
        let said = self.idle.to_say;
        if (!grant && !self.probe_due && said == 0) || self.control_posted >= CONTROL_WRS {
            return Ok(false);
        }
        let credits = if grant { std::mem::take(&mut self.owed) } else { 0 };
        self.probe_due = false;
        self.idle.to_say = 0;
        let id = CONTROL | u64::from(self.tag & 0x3fff_ffff) << 32;
        let wr = BulkWr { id, signaled: true, fence: false, op: BulkOp::SendImm { imm: CONTROL_IMM | said | credits } };
        self.control_posted += 1;
        self.qp.post(&[wr]).map_err(BulkEnd::Post)?;
        Ok(true)
    }

    fn post(&mut self, chunk: &Chunk) -> Result<(), BulkEnd> {
        let Some(op) = self.ops.get(&chunk.transfer) else { return Ok(()) };
        let request = &op.request;
        let remote = Remote { addr: request.remote.addr + chunk.offset, rkey: request.remote.rkey };
        let region = op.local.as_ref().and_then(|held| held.region());
        let offset = request.local.map_or(0, |(_, offset)| offset) + chunk.offset;
        let local = |region| Local { region, offset: usize::try_from(offset).unwrap_or(usize::MAX), len: chunk.len };
        let op = match (chunk.kind, region) {
            (Kind::Get, Some(region)) => BulkOp::Read { local: local(region), remote },
            (Kind::PutAndNotify, Some(region)) if chunk.last => {
                BulkOp::WriteImm { local: local(region), remote, imm: request.value }
            }
            (Kind::Put | Kind::PutAndNotify, Some(region)) => BulkOp::Write { local: local(region), remote },
            _ => BulkOp::SendImm { imm: request.value },
        };
        let posted = self.qp.post(&[BulkWr { id: chunk.wr_id, signaled: true, fence: false, op }]);
        posted.map_err(|error| {
            // Not live: no flush will come for it.
            if error.posted == 0 {
                self.transfers.on_refused(chunk.wr_id);
            }
            BulkEnd::Post(error)
        })
    }
}

/// Work requests posted to one peer before others get their turn, and completions theirs...
const POSTS_IN_TURN: u32 = 16;
/// ...or fewer, once they are so many bytes: a post may be a long call (Soft-RoCE moves the bytes in it).
const TURN_BYTES: u64 = 2 << 20;

/// Marks the immediates of control messages; the rest are flags and credits.
pub(super) const CONTROL_IMM: u32 = VALUE_MAX + 1;
/// Whether the connection may be closed.
pub(super) const ASK_IDLE: u32 = 1 << 30;
/// It may not.
pub(super) const BUSY: u32 = 1 << 29;

/// Marks the work requests of control messages and of windows, which alone have a number in the lower half.
pub(in crate::bulk) const CONTROL: u64 = 1 << 62;

pub(super) const fn is_window(id: u64) -> bool {
    id & CONTROL != 0 && id & 0xffff_ffff != 0
}
