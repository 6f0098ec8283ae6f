//! What a fence prevents: a SEND that reaches the peer while a READ ahead of it is still answered.

use super::{BulkKey, qp::Op};
use crate::{
    fabric::{
        WcStatus,
        bulk::{BulkWc, Rkey},
    },
    sim::hca::Hca,
};

/// The peer has no receive posted.
#[derive(Debug)]
pub(super) struct NoReceive;

impl Hca {
    /// Behind a READ that takes its time, SENDs without a fence arrive: always, so that a forgotten one shows.
    pub(super) fn overtake(&mut self, key: BulkKey, peer: BulkKey) {
        let now = self.now;
        while let Some(op) = self.bulk.qp_mut(key).and_then(|qp| qp.overtaker(now)).map(|wqe| wqe.op) {
            if self.deliver(peer, op, 0).is_err() {
                return; // its turn comes
            }
            if let Some(wqe) = self.bulk.qp_mut(key).and_then(|qp| qp.overtaker(now)) {
                wqe.early = true;
            }
        }
    }

    /// The last packet of a WR is at the peer, which gets a completion if it is one for it.
    pub(super) fn deliver(&mut self, peer: BulkKey, op: Op, bytes: u32) -> Result<(), NoReceive> {
        if !matches!(op, Op::WriteImm(_) | Op::SendImm(_) | Op::SendInvalidate(_)) {
            return Ok(());
        }
        let Some(to) = self.bulk.qp_mut(peer) else { return Ok(()) };
        to.receives = to.receives.checked_sub(1).ok_or(NoReceive)?;
        let (host, qpn) = (to.host, to.number);
        let wc = match op {
            Op::SendInvalidate(rkey) if self.bulk.end_window(host, peer, rkey) => {
                BulkWc::Notified { qpn, imm: 0, bytes, invalidated: Some(Rkey(rkey)) }
            }
            // As on Soft-RoCE: the sender hears of it by the next thing that it does.
            Op::SendInvalidate(_) => BulkWc::NotifyFailed { qpn, status: WcStatus::RemoteInvalidRequest },
            Op::WriteImm(imm) | Op::SendImm(imm) => BulkWc::Notified { qpn, imm, bytes, invalidated: None },
            Op::Read | Op::Write | Op::Bind(_) | Op::LocalInvalidate(_) => return Ok(()),
        };
        self.complete_bulk(peer, wc, None);
        if matches!(wc, BulkWc::NotifyFailed { .. }) {
            self.bulk_error(peer, None);
        }
        Ok(())
    }
}
