//! Connections that have ended: their flush is collected, then their QP destroyed.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, atomic::Ordering::Release},
    time::Duration,
};

use tokio::time::Instant;
use verbs_bootstrap::InstanceId;
use verbs_transport::fabric::{
    FabricError,
    bulk::{BulkFabric, BulkQp, DestroyQpError},
};

use super::{Driver, Failure, live::Live};
use crate::{
    bulk::{QpOf, RegionOf, error::BulkEnd, op::Op, stats::bump},
    proto::transfer::{End, TransferId, Transfers, Window},
};

/// A connection that has ended: its QP waits for its flush.
pub(super) struct Retired<F: BulkFabric> {
    pub(super) tag: u32,
    pub(super) qp: Option<Arc<QpOf<F>>>,
    pub(super) qpn: u32,
    pub(super) transfers: Transfers<Failure>,
    pub(super) ops: HashMap<TransferId, Op<RegionOf<F>>>,
    pub(super) cause: Arc<BulkEnd>,
    pub(super) since: Instant,
}

impl<F: BulkFabric> Driver<F> {
    pub(super) fn on_ended(&mut self, peer: InstanceId, tag: u32, qp: Arc<QpOf<F>>, cause: Arc<BulkEnd>) {
        if self.live.get(&peer).is_some_and(|live| live.tag == tag) {
            if let Some(live) = self.live.remove(&peer) {
                self.retire(live, qp, cause);
            }
            return;
        }
        if self.retired.iter().any(|retired| retired.tag == tag) {
            return;
        }
        // It never came up: there are only its receives to flush.
        let qpn = qp.qpn().get();
        self.routes.insert(qpn, (peer, tag));
        let nothing = Window { reads: 0, wrs: 0, bytes: 0, chunk_bytes: 1 };
        self.retired.push(Retired {
            tag,
            qp: Some(qp),
            qpn,
            transfers: Transfers::new(tag, nothing, 0),
            ops: HashMap::new(),
            cause,
            since: Instant::now(),
        });
    }

    pub(super) fn retire(&mut self, live: Live<F>, qp: Arc<QpOf<F>>, cause: Arc<BulkEnd>) {
        let Live { tag, qp: ours, mut transfers, mut ops, idle, .. } = live;
        drop(ours);
        for op in idle.parked {
            let peer = op.request.peer;
            if self.closing {
                self.end(op, End::Reset, Some(&cause));
            } else {
                self.shared.wait_for_connection(&self.shared.conn(peer), op);
            }
        }
        self.windows.end_connection(tag, &cause);
        for id in transfers.close() {
            if let Some(op) = ops.remove(&id) {
                self.end(op, End::Reset, Some(&cause));
            }
        }
        let qpn = qp.qpn().get();
        self.retired.push(Retired { tag, qp: Some(qp), qpn, transfers, ops, cause, since: Instant::now() });
    }

    pub(super) fn shut_down(&mut self) {
        if std::mem::replace(&mut self.closing, true) {
            return;
        }
        tracing::debug!(transfers = self.peers.len(), connections = self.live.len(), "bulk memory is taken down");
        self.shared.closing.store(true, Release);
        self.shared.regions.refuse();
        self.shared.permits.close();
        for conn in self.shared.all_conns() {
            self.shared.end_peer(&conn, BulkEnd::ShuttingDown);
        }
    }

    pub(super) fn on_device_lost(&mut self, error: &FabricError) {
        if std::mem::replace(&mut self.lost, true) {
            return;
        }
        tracing::error!(%error, "the bulk port is lost");
        let again = |error: &FabricError| FabricError {
            what: error.what,
            source: error.source.raw_os_error().map_or_else(
                || io::Error::new(error.source.kind(), error.source.to_string()),
                io::Error::from_raw_os_error,
            ),
        };
        for conn in self.shared.all_conns() {
            self.shared.end_peer(&conn, BulkEnd::DeviceLost(Arc::new(again(error))));
        }
    }

    /// Destroys the QPs whose flush is over, or whose time is.
    pub(super) fn sweep(&mut self, now: Instant) {
        let flush_deadline = self.shared.config.flush_deadline;
        let mut at = 0;
        while at < self.retired.len() {
            let retired = &mut self.retired[at];
            let age = now.saturating_duration_since(retired.since);
            let flushed = retired.transfers.posted() == 0;
            if !flushed && age < flush_deadline && !self.lost {
                at += 1;
                continue;
            }
            let Some(qp) = retired.qp.take() else {
                at += 1;
                continue;
            };
            match QpOf::<F>::destroy(qp) {
                Ok(()) => self.bury(at, flushed, false),
                // A task that brings the QP up holds it: its end is bounded by the kernel's address resolution.
                Err((qp, DestroyQpError::InUse)) if age < flush_deadline + HELD_FOR => {
                    self.retired[at].qp = Some(qp);
                    at += 1;
                }
                Err((qp, error)) => {
                    let qpn = qp.qpn();
                    tracing::error!(qp = %qpn, %error, "a bulk QP could not be destroyed; the memory that it may touch stays");
                    // Its drop would try once more, and could succeed after the memory was counted as lost: harmless.
                    drop(qp);
                    self.bury(at, flushed, true);
                }
            }
        }
    }

    /// A connection is gone from the device, or has to be left there: its transfers end.
    fn bury(&mut self, at: usize, flushed: bool, leak: bool) {
        let Retired { qpn, mut transfers, mut ops, cause, tag, .. } = self.retired.swap_remove(at);
        self.shared.forget_qp();
        if self.routes.get(&qpn).is_some_and(|(_, routed)| *routed == tag) {
            self.routes.remove(&qpn);
        }
        if !flushed {
            bump(&self.shared.counters.flushes_abandoned);
            tracing::warn!(
                qp = format_args!("{qpn:#08x}"),
                wrs = transfers.posted(),
                "no flush came; bulk QP destroyed regardless"
            );
        }
        for (id, end) in transfers.abandon() {
            if let Some(mut op) = ops.remove(&id) {
                if let (true, Some(held)) = (leak, op.local.take()) {
                    held.leak();
                }
                self.end(op, end, Some(&cause));
            }
        }
    }
}

/// How often a QP that somebody still holds is tried again.
pub(super) const SWEEP_EVERY: Duration = Duration::from_millis(5);

/// How long a connect under way may hold a QP that has ended.
const HELD_FOR: Duration = Duration::from_secs(5);
