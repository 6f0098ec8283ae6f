//! The pair: both sides, the wire, the slab pools, and the sums that must hold after every step.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use super::{body_of, frame};
use crate::{
    fabric::{POST_BATCH, SendSlab, WrSeq},
    proto::{
        assembly::Incoming,
        credit::CONTROL_RESERVE,
        frame::{FrameHeader, FrameKind, HEADER_BYTES, MessageType},
        link::{Filled, Frame, InFlight, Link, LinkLimits, Outbox},
        send_queue::{Ended, Posting},
    },
};

/// One SEND on its way.
pub(super) struct Packet {
    pub(super) seq: WrSeq,
    pub(super) signaled: bool,
    pub(super) bytes: Vec<u8>,
}

impl Packet {
    pub(super) fn head(&self) -> FrameHeader {
        FrameHeader::decode(self.bytes[..HEADER_BYTES].try_into().unwrap()).unwrap()
    }

    fn is_data(&self) -> bool {
        matches!(self.head().kind, FrameKind::Data(_) | FrameKind::Pack)
    }
}

/// A batch as the worker's is: so many WRs, so many inline bytes.
struct Batch<'a> {
    pool: &'a mut Vec<SendSlab>,
    slabs: usize,
    packets: Vec<Packet>,
    inline_used: usize,
    /// What is written and not pushed yet.
    slab: Vec<u8>,
}

const INLINE_ARENA: usize = 1024;

impl Outbox for Batch<'_> {
    fn has_room(&self) -> bool {
        self.packets.len() < POST_BATCH
    }

    fn take_slab(&mut self) -> Option<SendSlab> {
        self.pool.pop()
    }

    fn slabs_scarce(&self) -> bool {
        self.pool.len() <= self.slabs / 2
    }

    fn reserve_inline(&mut self, bytes: usize) -> bool {
        self.inline_used + bytes <= INLINE_ARENA
    }

    fn push_inline(&mut self, seq: WrSeq, signaled: bool, parts: [&[u8]; 3]) {
        let bytes = parts.concat();
        self.inline_used += bytes.len();
        assert!(self.inline_used <= INLINE_ARENA, "room was reserved");
        self.packets.push(Packet { seq, signaled, bytes });
    }

    fn write_slab(&mut self, _slab: &mut SendSlab, at: usize, bytes: &[u8]) {
        self.slab.resize(self.slab.len().max(at + bytes.len()), 0);
        self.slab[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn push_slab(&mut self, seq: WrSeq, signaled: bool, bytes: usize) {
        let slab = std::mem::take(&mut self.slab);
        assert_eq!(slab.len(), bytes);
        self.packets.push(Packet { seq, signaled, bytes: slab });
    }
}

/// How one frame stands with its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Waiting,
    Ended(Ended),
}

/// One host.
pub(super) struct Side {
    pub(super) link: Link,
    pub(super) queue: VecDeque<Frame>,
    pub(super) pool: Vec<SendSlab>,
    slabs: usize,
    /// Posted here, not polled at the peer.
    pub(super) wire: VecDeque<Packet>,
    /// Good completions that the peer's acknowledgement has brought.
    pub(super) completions: VecDeque<WrSeq>,
    /// Data SENDs of the peer, polled here, whose slab is not posted again.
    pub(super) handling: u16,
    pub(super) fates: BTreeMap<u64, Fate>,
    /// Frames received: id and body length beyond it.
    pub(super) received: Vec<u64>,
    unsignaled: u32,
    mid_frame: bool,
    next_id: u64,
    lengths: BTreeMap<u64, usize>,
}

impl Side {
    fn new(limits: LinkLimits, dialed: bool, slabs: usize) -> Self {
        let pool = (0..u32::try_from(slabs).unwrap()).map(SendSlab::mint).collect();
        Self {
            link: Link::new(limits, dialed),
            queue: VecDeque::new(),
            pool,
            slabs,
            wire: VecDeque::new(),
            completions: VecDeque::new(),
            handling: 0,
            fates: BTreeMap::new(),
            received: Vec::new(),
            unsignaled: 0,
            mid_frame: false,
            next_id: 0,
            lengths: BTreeMap::new(),
        }
    }

    pub(super) fn send(&mut self, kind: MessageType, bytes: usize) {
        let id = self.next_id;
        self.next_id += 1;
        self.fates.insert(id, Fate::Waiting);
        self.lengths.insert(id, bytes);
        let frame = frame(id, kind, bytes);
        // Every other one takes the short way if it may, as the worker's frames do.
        if id % 2 == 0 && self.queue.is_empty() && self.link.may_send_now(frame.body_bytes()) {
            let head = self.link.head_now(&frame);
            let bytes = [&head[..], &frame.header, &frame.payload].concat();
            let Posting { seq, signaled } = self.link.sent_now(frame);
            return self.post(Packet { seq, signaled, bytes });
        }
        self.queue.push_back(frame);
    }

    /// As the worker pumps.
    pub(super) fn pump(&mut self, now: Instant) -> Filled {
        loop {
            let mut batch = Batch {
                pool: &mut self.pool,
                slabs: self.slabs,
                packets: Vec::new(),
                inline_used: 0,
                slab: Vec::new(),
            };
            let filled = self.link.fill(|| now, &mut self.queue, &mut batch);
            let packets = batch.packets;
            let none = packets.is_empty();
            for packet in packets {
                self.post(packet);
            }
            if filled != Filled::BatchFull {
                return filled;
            }
            assert!(!none, "an empty batch is never full");
        }
    }

    fn post(&mut self, packet: Packet) {
        let limits = self.link.limits();
        assert!(packet.bytes.len() <= limits.send_bytes as usize, "no SEND is longer than the peer's slab");
        // M-44.
        self.unsignaled = if packet.signaled { 0 } else { self.unsignaled + 1 };
        assert!(self.unsignaled < limits.signal_every.min(limits.send_wrs / 2), "a signal comes at least so often");
        // M-40.
        if packet.is_data() {
            let head = packet.head();
            let (first, last) = if head.kind == FrameKind::Pack { (true, true) } else { (head.first, head.last) };
            assert_eq!(first, !self.mid_frame, "no other data SEND comes between those of one frame");
            self.mid_frame = !last;
        }
        self.wire.push_back(packet);
    }

    fn end_op(&mut self, op: InFlight, ended: Ended) {
        self.pool.extend(op.slab);
        if let Some(frame) = op.frame {
            let id = u64::from_be_bytes(frame.header[..8].try_into().unwrap());
            assert_eq!(frame.body_bytes(), 8 + self.lengths[&id], "the original bytes");
            let before = self.fates.insert(id, Fate::Ended(ended));
            assert_eq!(before, Some(Fate::Waiting), "frame {id} ends once");
        }
    }

    /// One good completion, if one is there.
    pub(super) fn complete(&mut self) -> bool {
        let Some(seq) = self.completions.pop_front() else { return false };
        let mut ops = Vec::new();
        self.link.on_send_done(seq, |op, ended| ops.push((op, ended)));
        for (op, ended) in ops {
            assert_eq!(ended, Ended::Done);
            self.end_op(op, ended);
        }
        true
    }

    /// What this side has polled is posted again.
    pub(super) fn repost(&mut self) {
        self.handling = 0;
        self.link.on_reposted();
    }

    /// Ten milliseconds without a post.
    pub(super) fn probe_tail(&mut self, now: Instant) -> bool {
        let bare = self.link.has_bare_tail();
        if bare {
            self.link.request_ping();
            self.pump(now);
        }
        bare
    }

    /// The QP goes to ERR: `acked` SENDs of those under way had arrived. Gives everything back.
    pub(super) fn break_down(&mut self, acked: usize, lost_flushes: bool) {
        while self.complete() {}
        self.link.end();
        let marker = self.link.drain_marker();
        let failed: Vec<WrSeq> = self.wire.iter().skip(acked).map(|packet| packet.seq).chain(marker).collect();
        let good: Vec<WrSeq> = self.wire.iter().take(acked).filter(|wr| wr.signaled).map(|wr| wr.seq).collect();
        self.wire.truncate(acked);
        let mut ops = Vec::new();
        for seq in good {
            self.link.on_send_done(seq, |op, ended| ops.push((op, ended)));
        }
        if lost_flushes {
            // A device that loses one loses all that follow.
            ops.extend(self.link.abandon().map(|op| (op, Ended::Failed)));
        } else {
            for seq in failed {
                self.link.on_send_failed(seq, |op, ended| ops.push((op, ended)));
            }
        }
        for (op, ended) in ops {
            self.end_op(op, ended);
        }
        assert_eq!(self.link.wrs_in_flight(), 0, "every operation has ended");
        for frame in std::mem::take(&mut self.queue) {
            self.end_op(InFlight { slab: None, frame: Some(frame) }, Ended::Failed);
        }
    }
}

/// Both hosts.
pub(super) struct Pair {
    pub(super) sides: [Side; 2],
    pub(super) now: Instant,
}

impl Pair {
    /// Side 0 dialed, side 1 accepted.
    pub(super) fn new(limits: [LinkLimits; 2], slabs: [usize; 2]) -> Self {
        let [a, b] = limits;
        Self { sides: [Side::new(a, true, slabs[0]), Side::new(b, false, slabs[1])], now: Instant::now() }
    }

    /// Connected, proven, and with nothing under way.
    pub(super) fn proven(limits: [LinkLimits; 2], slabs: [usize; 2]) -> Self {
        let mut pair = Self::new(limits, slabs);
        pair.settle();
        assert!(pair.sides.iter().all(|side| side.link.is_proven()), "a PING and its answer prove both");
        pair
    }

    pub(super) fn pump(&mut self, at: usize) -> Filled {
        self.sides[at].pump(self.now)
    }

    /// The next SEND under way to `at` arrives and is polled.
    pub(super) fn deliver(&mut self, at: usize) -> bool {
        let Some(packet) = self.sides[1 - at].wire.pop_front() else { return false };
        if packet.signaled {
            self.sides[1 - at].completions.push_back(packet.seq);
        }
        let lengths = std::mem::take(&mut self.sides[1 - at].lengths);
        let side = &mut self.sides[at];
        side.handling += u16::from(packet.is_data());
        let bytes = u32::try_from(packet.bytes.len()).unwrap();
        let body = &packet.bytes[HEADER_BYTES..];
        let whole: Vec<Vec<u8>> = match side.link.on_receive(packet.bytes[..HEADER_BYTES].try_into().unwrap(), bytes) {
            Ok(Incoming::Whole { body_len, .. }) => {
                assert_eq!(body_len, body.len());
                vec![body.to_vec()]
            }
            Ok(Incoming::Fragment { body_len, last }) => {
                assert_eq!(body_len, body.len());
                side.link.partial_mut().extend_from_slice(body);
                last.then(|| side.link.finish_fragment().unwrap().body).into_iter().collect()
            }
            Ok(Incoming::Pack { frames, body_len }) => {
                assert_eq!(body_len, body.len());
                let mut whole = Vec::new();
                side.link.unpack(frames, body, |packed| whole.push(body[packed.body].to_vec())).unwrap();
                assert!(whole.len() > 1, "a frame alone goes alone");
                whole
            }
            Ok(Incoming::Control | Incoming::Pong { .. }) => Vec::new(),
            Err(error) => panic!("a link of ours breaks no rule: {error}"),
        };
        for body in whole {
            let id = u64::from_be_bytes(body[..8].try_into().unwrap());
            assert_eq!(body, body_of(id, lengths[&id]), "frame {id} is intact");
            assert_eq!(side.received.last().copied(), id.checked_sub(1), "frames come in order, each once");
            side.received.push(id);
        }
        self.sides[1 - at].lengths = lengths;
        true
    }

    /// Everything that must hold at every instant.
    pub(super) fn check(&self) {
        for from in 0..2 {
            let (tx, rx) = (&self.sides[from], &self.sides[1 - from]);
            let limits = tx.link.limits();
            let window = limits.tx_window;
            // Credits: unspent + under way + being handled + owed + on their way back = window.
            let data = u16::try_from(tx.wire.iter().filter(|packet| packet.is_data()).count()).unwrap();
            let coming_back: u16 = rx.wire.iter().map(|packet| u16::from(packet.head().credits)).sum();
            let sum = tx.link.credits_left() + data + rx.handling + rx.link.credits_owed() + coming_back;
            assert_eq!(sum, window, "credits are conserved");
            // M-58: the receives that the peer must have ready.
            let count = |kind| tx.wire.iter().filter(|packet| packet.head().kind == kind).count();
            let (grants, pings, pongs) = (count(FrameKind::PureGrant), count(FrameKind::Ping), count(FrameKind::Pong));
            assert!(grants <= 4 && pings <= 1 && pongs <= 1, "{grants} grants, {pings} PINGs, {pongs} PONGs under way");
            assert!(tx.wire.len() <= usize::from(window + CONTROL_RESERVE), "window and reserve cover all under way");
            // Slabs: in the pool or held by a WR in flight.
            let in_flight = u64::from(tx.link.wrs_in_flight());
            let next = tx.link.next_seq().0;
            let held = (next - in_flight..next).filter(|&seq| tx.link.slab(WrSeq(seq)).is_some()).count();
            assert_eq!(tx.pool.len() + held, tx.slabs, "slabs are conserved");
            assert!(in_flight < u64::from(limits.send_wrs), "the marker's WR stays free");
            // Operations: a frame is queued, in flight or ended; and what is done has arrived.
            for (id, fate) in &tx.fates {
                if *fate == Fate::Ended(Ended::Done) {
                    assert!(rx.received.contains(id), "frame {id} is done, so it has arrived");
                }
            }
        }
    }

    /// Everything under way arrives, is posted again and completes, until nothing moves. No clock runs.
    pub(super) fn drain(&mut self) {
        loop {
            let mut moved = false;
            for at in 0..2 {
                let before = self.sides[at].link.next_seq();
                self.pump(at);
                moved |= self.sides[at].link.next_seq() != before;
                while self.deliver(at) {
                    moved = true;
                }
                // What is owed from then on may be due.
                moved |= self.sides[at].handling > 0;
                self.sides[at].repost();
                while self.sides[at].complete() {
                    moved = true;
                }
            }
            if !moved {
                return;
            }
        }
    }

    /// The same, with the looks at bare tails that the driver takes. Gives the number of PINGs that these took.
    pub(super) fn settle(&mut self) -> u32 {
        let mut probes = 0;
        loop {
            self.drain();
            self.check();
            let mut probed = false;
            for at in 0..2 {
                let now = self.now;
                probed |= self.sides[at].probe_tail(now);
                probes += u32::from(probed);
            }
            if !probed {
                return probes;
            }
            assert!(probes < 1000, "tails come to rest");
        }
    }

    /// Nothing is left anywhere: every frame arrived and is done, every slab and credit but the debts is home.
    pub(super) fn assert_home(&self) {
        for at in 0..2 {
            let (side, peer) = (&self.sides[at], &self.sides[1 - at]);
            assert!(side.queue.is_empty(), "{} frames of side {at} are stuck", side.queue.len());
            assert_eq!(peer.received.len(), side.fates.len());
            assert!(side.fates.values().all(|fate| *fate == Fate::Ended(Ended::Done)));
            assert_eq!((side.pool.len(), side.link.wrs_in_flight()), (side.slabs, 0));
            assert_eq!(side.link.credits_left() + peer.link.credits_owed(), side.link.limits().tx_window);
            assert_eq!(side.link.counts().malformed, 0);
        }
    }
}
