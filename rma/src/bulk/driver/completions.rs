//! What completions say: of transfers, of windows, of what peers tell.

use std::{collections::HashMap, sync::atomic::Ordering::Relaxed};

use tokio::time::Instant;
use verbs_bootstrap::InstanceId;
use verbs_transport::fabric::{
    FabricError, WcStatus,
    bulk::{BulkFabric, BulkPort, BulkQp, BulkWc},
};

use super::{
    Driver, Notification,
    live::{ASK_IDLE, BUSY, CONTROL, CONTROL_IMM, is_window},
};
use crate::{
    bulk::{
        RegionOf, Shared,
        error::BulkEnd,
        op::{Op, VALUE_MAX},
        stats::bump,
    },
    proto::transfer::{Completed, End, Kind, TransferId, Transfers},
};

/// How a work request failed by itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) status: WcStatus,
    pub(super) vendor_err: u32,
}

impl<F: BulkFabric> Driver<F> {
    pub(super) fn poll(&mut self) -> Result<usize, FabricError> {
        let mut wcs = std::mem::take(&mut self.wcs);
        let polled = self.shared.port.poll(&mut wcs);
        for wc in wcs.drain(..) {
            self.on_wc(wc);
        }
        self.wcs = wcs;
        polled
    }

    fn on_wc(&mut self, wc: BulkWc) {
        let (BulkWc::Done { qpn, .. }
        | BulkWc::Failed { qpn, .. }
        | BulkWc::Notified { qpn, .. }
        | BulkWc::NotifyFailed { qpn, .. }) = wc;
        if !self.routes.contains_key(&qpn) {
            // The QP may have come up, and its peer have been fast, since the news were read.
            self.take_news();
        }
        let Some((peer, tag)) = self.routes.get(&qpn).copied() else {
            return bump(&self.shared.counters.late_completions);
        };
        match wc {
            BulkWc::Done { id, .. } => self.on_done(peer, tag, id),
            BulkWc::Failed { id, status, vendor_err, .. } => self.on_failed(peer, tag, id, status, vendor_err),
            BulkWc::Notified { invalidated: Some(rkey), .. } => {
                self.shared.end_epoch(&self.shared.conn(peer), tag, BulkEnd::Invalidated { rkey });
            }
            BulkWc::Notified { imm, bytes, .. } => self.on_notified(peer, tag, imm, bytes),
            BulkWc::NotifyFailed { status, .. } => {
                if self.live_of(peer, tag).is_some() {
                    self.shared.end_epoch(&self.shared.conn(peer), tag, BulkEnd::Receive { status });
                }
            }
        }
    }

    fn on_done(&mut self, peer: InstanceId, tag: u32, id: u64) {
        self.prove(peer, tag);
        let Some(live) = self.live.get_mut(&peer).filter(|live| live.tag == tag) else {
            return self.settle_retired(tag, id, |transfers| transfers.on_done(id));
        };
        live.last_progress = Instant::now();
        if id & CONTROL == 0 || is_window(id) {
            live.idle.since = live.last_progress;
        }
        if is_window(id) {
            live.windows_posted = live.windows_posted.saturating_sub(1);
            return self.windows.on_done(id);
        }
        if id & CONTROL != 0 {
            live.control_posted = live.control_posted.saturating_sub(1);
            return;
        }
        let completed = live.transfers.on_done(id);
        let ended = apply(&self.shared, &mut live.ops, &completed);
        if let Some((op, end)) = ended {
            self.end(op, end, None);
        }
    }

    fn on_failed(&mut self, peer: InstanceId, tag: u32, id: u64, status: WcStatus, vendor_err: u32) {
        if self.live_of(peer, tag).is_some() {
            if is_window(id) && status != WcStatus::Flushed {
                self.windows.on_failed(id);
            }
            self.shared.end_epoch(&self.shared.conn(peer), tag, BulkEnd::WorkRequest { status, vendor_err });
            // Its own news: the connection is retired before its completions are counted.
            self.take_news();
        }
        let own = (status != WcStatus::Flushed).then_some(Failure { status, vendor_err });
        self.settle_retired(tag, id, |transfers| transfers.on_failed(id, own));
    }

    fn settle_retired(
        &mut self,
        tag: u32,
        id: u64,
        settle: impl FnOnce(&mut Transfers<Failure>) -> Completed<Failure>,
    ) {
        if id & CONTROL != 0 {
            return;
        }
        let Some(retired) = self.retired.iter_mut().find(|retired| retired.tag == tag) else {
            return bump(&self.shared.counters.late_completions);
        };
        let completed = settle(&mut retired.transfers);
        let ended = apply(&self.shared, &mut retired.ops, &completed);
        let cause = retired.cause.clone();
        if let Some((op, end)) = ended {
            self.end(op, end, Some(&cause));
        }
    }

    fn on_notified(&mut self, peer: InstanceId, tag: u32, imm: u32, bytes: u32) {
        self.prove(peer, tag);
        let Some(live) = self.live.get_mut(&peer).filter(|live| live.tag == tag) else {
            return bump(&self.shared.counters.late_completions);
        };
        live.held = false;
        live.last_progress = Instant::now();
        if let Err(error) = live.qp.post_receives(1) {
            return self.shared.end_epoch(&self.shared.conn(peer), tag, BulkEnd::Post(error));
        }
        if imm > VALUE_MAX {
            let (credits, window) = (imm & !(CONTROL_IMM | ASK_IDLE | BUSY), live.notify_window);
            if !live.transfers.add_credits(credits, window.into()) {
                return self.shared.end_epoch(&self.shared.conn(peer), tag, BulkEnd::ExcessGrant { window });
            }
            if imm & BUSY != 0 {
                live.stays_open();
            }
            if imm & ASK_IDLE != 0 {
                self.on_asked_idle(peer, tag);
            }
            return;
        }
        bump(&self.shared.counters.notified);
        live.idle.since = Instant::now();
        live.idle.untaken += 1;
        if self.notifications.send((Notification { peer, value: imm, bytes }, tag)).is_err() {
            bump(&self.shared.counters.notifications_dropped);
            live.idle.untaken = live.idle.untaken.saturating_sub(1);
            live.owed += 1;
        }
    }

    /// Something has come back over that QP.
    fn prove(&mut self, peer: InstanceId, tag: u32) {
        let Some(live) = self.live.get_mut(&peer).filter(|live| live.tag == tag && !live.proven) else { return };
        live.proven = true;
        live.probe_due = false;
        if self.shared.conn(peer).proven(tag) {
            bump(&self.shared.counters.epochs_proven);
        }
    }
}

/// Counts what a completion moved; gives the transfer that has ended with it.
fn apply<F: BulkFabric>(
    shared: &Shared<F>,
    ops: &mut HashMap<TransferId, Op<RegionOf<F>>>,
    completed: &Completed<Failure>,
) -> Option<(Op<RegionOf<F>>, End<Failure>)> {
    let (transfer, bytes) = match completed {
        Completed::Stale => {
            bump(&shared.counters.late_completions);
            return None;
        }
        Completed::Underway { transfer, bytes } | Completed::Ended { transfer, bytes, .. } => (transfer, *bytes),
    };
    if let Some(op) = ops.get(transfer) {
        op.handle.moved.fetch_add(bytes.into(), Relaxed);
        let counters = &shared.counters;
        let counter = if op.request.kind == Kind::Get { &counters.bytes_read } else { &counters.bytes_written };
        counter.fetch_add(bytes.into(), Relaxed);
    }
    match completed {
        Completed::Ended { transfer, end, .. } => ops.remove(transfer).map(|op| (op, *end)),
        _ => None,
    }
}
