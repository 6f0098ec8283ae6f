//! A transfer from its start to its one end.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use tokio::time::Instant;
use verbs_bootstrap::InstanceId;
use verbs_transport::fabric::bulk::BulkFabric;

use super::{Driver, Failure};
use crate::{
    bulk::{
        RegionOf,
        error::{BulkEnd, TransferError},
        op::{Op, Stop},
    },
    proto::transfer::{End, TransferId},
};

impl<F: BulkFabric> Driver<F> {
    pub(super) fn start(&mut self, op: Op<RegionOf<F>>) {
        let (id, peer) = (op.id, op.request.peer);
        self.shared.counters.in_flight.fetch_add(1, Relaxed);
        self.deadlines.insert((op.deadline, id));
        self.peers.insert(id, peer);
        if self.closing {
            return self.finish(op, Err(TransferError::ShuttingDown));
        }
        let conn = self.shared.conn(peer);
        match self.live.get_mut(&peer) {
            Some(live) if conn.up_tag() == Some(live.tag) => {
                if live.idle.asked.is_some() {
                    live.idle.parked.push(op);
                } else {
                    live.begin(op);
                }
            }
            _ => self.shared.wait_for_connection(&conn, op),
        }
    }

    /// Lets a transfer post nothing more.
    pub(super) fn stop(&mut self, peer: InstanceId, id: TransferId, why: Stop) {
        if let Some(mut op) = self.shared.conn(peer).take_waiting(id) {
            op.stopped = Some(why);
            return self.end(op, End::Stopped, None);
        }
        let Some(live) = self.live.get_mut(&peer) else { return };
        if let Some(mut op) = live.idle.take_parked(id) {
            op.stopped = Some(why);
            return self.end(op, End::Stopped, None);
        }
        let Some(op) = live.ops.get_mut(&id) else { return };
        op.stopped = op.stopped.or(Some(why));
        let ended = live.transfers.stop(id).and_then(|end| Some((live.ops.remove(&id)?, end)));
        if let Some((op, end)) = ended {
            self.end(op, end, None);
        }
    }

    pub(super) fn abort(&mut self, peer: InstanceId, id: TransferId) {
        self.stop(peer, id, Stop::Cancelled);
        let posted = self.live.get(&peer).filter(|live| live.ops.contains_key(&id)).map(|live| live.tag);
        if let Some(tag) = posted {
            self.shared.end_epoch(&self.shared.conn(peer), tag, BulkEnd::Aborted);
        }
    }

    pub(super) fn expire(&mut self, now: Instant) {
        while let Some((at, id)) = self.deadlines.first().copied() {
            if at > now {
                return;
            }
            self.deadlines.pop_first();
            if let Some(peer) = self.peers.get(&id).copied() {
                self.stop(peer, id, Stop::Deadline);
            }
        }
    }

    /// What the ends of chunks say, in the caller's words.
    pub(super) fn end(&mut self, op: Op<RegionOf<F>>, end: End<Failure>, cause: Option<&Arc<BulkEnd>>) {
        let peer = op.request.peer;
        let stopped = |op: &Op<RegionOf<F>>| match op.stopped {
            Some(Stop::Deadline) => TransferError::Deadline { after: op.after },
            Some(Stop::Cancelled) | None => TransferError::Cancelled,
        };
        let result = match end {
            End::Done => Ok(()),
            End::Failed(Failure { status, vendor_err }) => Err(TransferError::Failed { peer, status, vendor_err }),
            _ if op.stopped.is_some() => Err(stopped(&op)),
            End::Stopped => Err(stopped(&op)),
            End::Reset => Err(match cause {
                Some(cause) if !matches!(**cause, BulkEnd::ShuttingDown) => {
                    TransferError::ConnectionReset { peer, cause: cause.clone() }
                }
                _ => TransferError::ShuttingDown,
            }),
        };
        self.finish(op, result);
    }

    /// Gives the region back, then answers.
    pub(super) fn finish(&mut self, mut op: Op<RegionOf<F>>, result: Result<(), TransferError>) {
        self.deadlines.remove(&(op.deadline, op.id));
        self.peers.remove(&op.id);
        let counters = &self.shared.counters;
        counters.in_flight.fetch_sub(1, Relaxed);
        counters.end_transfer(&result);
        let reply = op.reply.take();
        drop(op);
        if let Some(reply) = reply {
            // A future that was dropped is no fault.
            let _ = reply.send(result);
        }
    }
}
