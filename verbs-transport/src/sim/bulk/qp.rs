//! One bulk QP: its send queue, its receives, and how far both are. Pure bookkeeping.
//!
//! Invariant: `freed <= acked <= moved <= posted`, all WR numbers. Those from `freed` on hold slots.

use std::{collections::VecDeque, time::Duration};

use super::{BulkKey, PortKey, window::Bind};
use crate::{
    fabric::{
        QpPath,
        bulk::{BulkCaps, Remote},
    },
    sim::hca::HostKey,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Init,
    Rts,
    Error,
}

/// What a WR does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Read,
    Write,
    WriteImm(u32),
    SendImm(u32),
    SendInvalidate(u32),
    Bind(Bind),
    LocalInvalidate(u32),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Wqe {
    pub(super) id: u64,
    pub(super) signaled: bool,
    pub(super) fence: bool,
    pub(super) op: Op,
    /// A SEND that reached the peer before a READ ahead of it was done.
    pub(super) early: bool,
    /// Key of the local region, offset in it, bytes.
    pub(super) local: (u32, usize, u32),
    pub(super) remote: Remote,
    /// Bytes moved so far.
    pub(super) moved: u32,
    /// Its first packet is at the peer then, its predecessors permitting.
    pub(super) starts: Duration,
    /// Its acknowledgement is back, once all is moved.
    pub(super) acks: Duration,
}

#[derive(Debug)]
pub(super) struct BulkQp {
    pub(super) port: PortKey,
    pub(super) host: HostKey,
    pub(super) number: u32,
    pub(super) caps: BulkCaps,
    pub(super) state: State,
    pub(super) path: Option<QpPath>,
    /// The peer's QP, once found.
    pub(super) peer: Option<BulkKey>,
    /// WQEs from `acked` on.
    queue: VecDeque<Wqe>,
    pub(super) posted: u64,
    pub(super) moved: u64,
    pub(super) acked: u64,
    freed: u64,
    pub(super) receives: u32,
    pub(super) silent_tries: u8,
    pub(super) rnr_tries: u8,
    /// No acknowledgement comes any more: the retries will end it.
    pub(super) deaf: bool,
    /// Nothing happens any more, and nobody says so.
    pub(super) hung: bool,
    pub(super) flush_stopped: bool,
    /// The valid timeline entry of each kind; others are stale.
    pub(super) step_timer: Option<u64>,
    pub(super) ack_timer: Option<u64>,
    pub(super) give_up_timer: Option<u64>,
}

impl BulkQp {
    pub(super) fn new(port: PortKey, host: HostKey, number: u32, caps: BulkCaps) -> Self {
        Self {
            port,
            host,
            number,
            caps,
            state: State::Init,
            path: None,
            peer: None,
            queue: VecDeque::new(),
            posted: 0,
            moved: 0,
            acked: 0,
            freed: 0,
            receives: 0,
            silent_tries: 0,
            rnr_tries: 0,
            deaf: false,
            hung: false,
            flush_stopped: false,
            step_timer: None,
            ack_timer: None,
            give_up_timer: None,
        }
    }

    /// Whether a further WR finds a slot. Slots come back when a WC that covers them is polled, and not before.
    pub(super) fn has_room(&self) -> bool {
        self.outstanding() < self.caps.send_wrs as usize
    }

    /// WRs that no polled WC has covered.
    pub(super) fn outstanding(&self) -> usize {
        usize::try_from(self.posted - self.freed).unwrap_or(usize::MAX)
    }

    /// READs posted and not acknowledged.
    pub(super) fn reads(&self) -> usize {
        self.queue.iter().filter(|wqe| wqe.op == Op::Read).count()
    }

    /// Of these, those whose bytes have moved.
    pub(super) fn reads_answered(&self) -> usize {
        let moved = usize::try_from(self.moved - self.acked).unwrap_or(usize::MAX);
        self.queue.iter().take(moved).filter(|wqe| wqe.op == Op::Read).count()
    }

    pub(super) fn push(&mut self, wqe: Wqe) {
        self.queue.push_back(wqe);
        self.posted += 1;
    }

    /// The oldest WR whose bytes have not all moved.
    pub(super) fn head(&mut self) -> Option<&mut Wqe> {
        let at = usize::try_from(self.moved - self.acked).ok()?;
        self.queue.get_mut(at)
    }

    /// The first SEND behind the head that may overtake it: no fence holds it, and all between the two have overtaken.
    pub(super) fn overtaker(&mut self, now: Duration) -> Option<&mut Wqe> {
        let behind = usize::try_from(self.moved - self.acked).ok()? + 1;
        let next = self.queue.iter_mut().skip(behind).find(|wqe| !wqe.early)?;
        let send = matches!(next.op, Op::SendImm(_) | Op::SendInvalidate(_));
        (send && !next.fence && next.starts <= now).then_some(next)
    }

    /// The oldest WR that is not acknowledged.
    pub(super) fn oldest(&self) -> Option<&Wqe> {
        self.queue.front()
    }

    /// Takes the oldest WR out, with its number.
    pub(super) fn pop(&mut self) -> Option<(u64, Wqe)> {
        let wqe = self.queue.pop_front()?;
        let seq = self.acked;
        self.acked += 1;
        self.moved = self.moved.max(self.acked);
        Some((seq, wqe))
    }

    /// A WC for `seq` was polled.
    pub(super) fn free_up_to(&mut self, seq: u64) {
        self.freed = self.freed.max(seq + 1);
    }
}
