//! One QP: its send queue and both its halves. Pure bookkeeping; [`hca`](super::hca) moves the messages.
//!
//! Invariant: `freed <= acked <= arrived <= posted`, all WR numbers. Those from `freed` on hold slots.

use std::{collections::VecDeque, time::Duration};

use super::hca::{HostKey, QpKey};
use crate::fabric::{QpCaps, QpPath};

/// The states that matter here; INIT to RTS is one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Init,
    Rts,
    Error,
}

/// Where a WR's bytes are.
#[derive(Debug)]
pub(super) enum Bytes {
    /// In the WQE: inline, and not yet at the peer.
    Kept(Vec<u8>),
    /// In a send slab, read at delivery: whoever rewrites the slab too early spoils the message.
    Slab(u32),
    /// Inline, and at the peer.
    Gone,
}

#[derive(Debug)]
pub(super) struct Wqe {
    pub(super) signaled: bool,
    pub(super) len: u32,
    pub(super) bytes: Bytes,
    /// When it reaches the peer, its predecessors permitting.
    pub(super) arrives: Duration,
    /// When its acknowledgement is back, once it has arrived and its predecessors' are.
    pub(super) acks: Duration,
}

/// Why nothing more arrives for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// RNR NAK: until its timer ends.
    Rnr,
    /// No answer: until the ack timeout.
    Silence,
    /// The first packets of this message are at the peer, in a slab.
    Half,
}

#[derive(Debug)]
pub(super) struct Qp {
    pub(super) host: HostKey,
    pub(super) number: u32,
    pub(super) caps: QpCaps,
    pub(super) state: State,
    pub(super) path: Option<QpPath>,
    /// The peer's QP, once found.
    pub(super) peer: Option<QpKey>,

    /// WQEs whose slots are taken: `freed..posted`.
    queue: VecDeque<Wqe>,
    pub(super) freed: u64,
    pub(super) acked: u64,
    pub(super) arrived: u64,
    pub(super) psn: u32,
    pub(super) wait: Option<Wait>,
    pub(super) silent_tries: u8,
    pub(super) rnr_tries: u8,
    /// Acknowledgements are lost from this WR on.
    pub(super) deaf_from: Option<u64>,
    /// Nothing happens any more, and nobody says so.
    pub(super) hung: bool,
    /// No flush completion comes any more.
    pub(super) flush_stopped: bool,

    pub(super) expected_psn: u32,
    /// A receive that a half-received message holds.
    pub(super) half: Option<u32>,

    /// The valid timeline entry of each kind; others are stale.
    pub(super) arrive_timer: Option<u64>,
    pub(super) ack_timer: Option<u64>,
    pub(super) wait_timer: Option<u64>,
}

impl Qp {
    pub(super) fn new(host: HostKey, number: u32, caps: QpCaps) -> Self {
        Self {
            host,
            number,
            caps,
            state: State::Init,
            path: None,
            peer: None,
            queue: VecDeque::with_capacity(caps.send_wrs as usize),
            freed: 0,
            acked: 0,
            arrived: 0,
            psn: 0,
            wait: None,
            silent_tries: 0,
            rnr_tries: 0,
            deaf_from: None,
            hung: false,
            flush_stopped: false,
            expected_psn: 0,
            half: None,
            arrive_timer: None,
            ack_timer: None,
            wait_timer: None,
        }
    }

    /// WRs ever posted: the next one's number.
    pub(super) fn posted(&self) -> u64 {
        self.freed + self.queue.len() as u64
    }

    /// Whether a further WR finds a slot. Slots come back when a WC that covers them is polled, and not before.
    pub(super) fn has_room(&self) -> bool {
        self.queue.len() < self.caps.send_wrs as usize
    }

    /// WRs that no polled WC has covered.
    pub(super) fn outstanding(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn push(&mut self, wqe: Wqe) {
        self.queue.push_back(wqe);
    }

    pub(super) fn wqe(&self, seq: u64) -> &Wqe {
        &self.queue[self.slot(seq)]
    }

    pub(super) fn wqe_mut(&mut self, seq: u64) -> &mut Wqe {
        let slot = self.slot(seq);
        &mut self.queue[slot]
    }

    /// Takes the oldest WQE out if a polled WC for `seq` covers it.
    pub(super) fn free_one(&mut self, seq: u64) -> Option<Wqe> {
        (self.freed <= seq).then(|| self.queue.pop_front()).flatten().inspect(|_| self.freed += 1)
    }

    /// Takes the oldest WQE out of a QP that is being destroyed.
    pub(super) fn drop_one(&mut self) -> Option<Wqe> {
        self.queue.pop_front()
    }

    fn slot(&self, seq: u64) -> usize {
        usize::try_from(seq - self.freed).expect("a queue's length fits")
    }
}

/// `psn` after `packets` more.
pub(super) const fn psn_after(psn: u32, packets: u32) -> u32 {
    psn.wrapping_add(packets) & 0x00ff_ffff
}

/// Packets of a message: one at least.
pub(super) const fn packets(bytes: u32, mtu_bytes: u32) -> u32 {
    if bytes == 0 { 1 } else { bytes.div_ceil(mtu_bytes) }
}

/// The wait that an RNR NAK asks for, by timer code.
pub(super) fn rnr_wait(code: u8) -> Duration {
    const MICROS_10: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10 * MICROS_10[usize::from(code & 31)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_timer_code_zero_is_the_longest() {
        assert_eq!(rnr_wait(0), Duration::from_micros(655_360));
        assert_eq!(rnr_wait(1), Duration::from_micros(10));
        assert_eq!(rnr_wait(12), Duration::from_micros(640));
        assert_eq!(rnr_wait(31), Duration::from_micros(491_520));
        assert!((1..31).all(|code| rnr_wait(code) < rnr_wait(code + 1)));
    }

    #[test]
    fn psn_wraps_at_24_bits_and_counts_packets() {
        assert_eq!(psn_after(0x00ff_ffff, packets(0, 1024)), 0);
        assert_eq!(psn_after(0x00ff_fffe, packets(4097, 4096)), 0);
    }

    #[test]
    fn slots_come_back_up_to_the_polled_number_only() {
        let mut qp = Qp::new(HostKey(0), 17, QpCaps { send_wrs: 3, inline_bytes: 0 });
        for _ in 0..3 {
            qp.push(Wqe { signaled: false, len: 0, bytes: Bytes::Gone, arrives: Duration::ZERO, acks: Duration::ZERO });
        }
        assert!(!qp.has_room());
        assert!(qp.free_one(1).is_some() && qp.free_one(1).is_some() && qp.free_one(1).is_none());
        assert!(qp.has_room());
        assert_eq!((qp.posted(), qp.outstanding()), (3, 1));
    }
}
