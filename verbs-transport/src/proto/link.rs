//! One connection's protocol: credits, fragments, control frames, what is in flight. No I/O, no clock, no lock.
//!
//! [`Link::fill`] gives work requests out, [`Link::on_receive`] and [`Link::on_send_done`] take news in. The frames
//! that wait are the caller's queue, so that they outlive a connection that never came up.

use std::{
    collections::VecDeque,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{
    assembly::{Assembled, Assembly, Incoming},
    credit::{CreditError, RxCredits, TxCredits},
    frame::{FrameHeader, FrameKind, HEADER_BYTES, HEADER_BYTES_U32, Lane, Malformed, MessageType},
    send_queue::{Ended, Posting, SendQueue},
};
use crate::fabric::{SendSlab, WrSeq};

mod packing;

/// Work requests kept free of data: one PONG, one PING, four pure grants.
pub const CONTROL_WRS: u32 = 6;

/// The work request kept free for [`Link::drain_marker`].
pub const MARKER_WRS: u32 = 1;

/// Malformed frames that end a connection.
const MALFORMED_MAX: u8 = 2;

/// Hears of a frame that is not known to have been delivered. Called once, outside all locks, never concurrently with
/// itself for the same frame.
pub trait SendErrorHandler: Send + Sync {
    /// The frame as it was given, and why it failed. It may have arrived all the same if only its ACK was lost.
    fn on_error(&self, header: Bytes, payload: Bytes, error: crate::SendError);
}

impl<F: Fn(Bytes, Bytes, crate::SendError) + Send + Sync> SendErrorHandler for F {
    fn on_error(&self, header: Bytes, payload: Bytes, error: crate::SendError) {
        self(header, payload, error);
    }
}

/// A frame on its way out.
pub struct Frame {
    /// Where it shall arrive.
    pub kind: MessageType,
    /// Whom it is for there.
    pub lane: Lane,
    /// The user's header.
    pub header: Bytes,
    /// The user's payload.
    pub payload: Bytes,
    /// Who hears of a failure.
    pub on_error: Arc<dyn SendErrorHandler>,
}

impl Frame {
    /// Header and payload, in bytes.
    pub fn body_bytes(&self) -> usize {
        self.header.len() + self.payload.len()
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} frame of {} + {} bytes", self.kind, self.header.len(), self.payload.len())
    }
}

/// What a posted WR held until it was covered. Of a packed SEND there is one of these for each frame, the first with the
/// slab.
#[derive(Debug)]
pub struct InFlight {
    /// The slab that the device reads.
    pub slab: Option<SendSlab>,
    /// The frame that this WR was the last SEND of.
    pub frame: Option<Frame>,
}

/// A posted WR in the table.
#[derive(Debug)]
struct Posted {
    op: InFlight,
    /// Frames beyond the first: the next so many of [`Link::packed`].
    more: u32,
}

/// Numbers that both sides have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkLimits {
    /// Credits that the peer gives us.
    pub tx_window: u16,
    /// Credits that we give the peer.
    pub rx_window: u16,
    /// Bytes of the longest SEND to the peer: the smaller of its receive slab and our send slab.
    pub send_bytes: u32,
    /// Bytes of the longest SEND that goes inline.
    pub inline_bytes: u32,
    /// Largest frame (header + payload) that we take from the peer.
    pub receive_max_bytes: u32,
    /// WRs of the QP's send queue.
    pub send_wrs: u32,
    /// A signal at least every so many WRs.
    pub signal_every: u32,
    /// Whether frames that wait go several to a SEND.
    pub packs: bool,
}

/// Where [`Link::fill`] puts work requests.
pub trait Outbox {
    /// Whether one more fits into this batch.
    fn has_room(&self) -> bool;

    /// A slab for a SEND that is too long to go inline; `None` when the pool is empty.
    fn take_slab(&mut self) -> Option<SendSlab>;

    /// Whether slabs are scarce, so that each must come home soon. Always so when the last one has been taken.
    fn slabs_scarce(&self) -> bool;

    /// Adds an inline SEND of these parts; says no when its bytes do not fit into this batch any more.
    fn reserve_inline(&mut self, bytes: usize) -> bool;

    /// The inline SEND for which room was reserved.
    fn push_inline(&mut self, seq: WrSeq, signaled: bool, parts: [&[u8]; 3]);

    /// Copies `bytes` into the slab, `at` bytes from its start.
    fn write_slab(&mut self, slab: &mut SendSlab, at: usize, bytes: &[u8]);

    /// A SEND of the first `bytes` bytes of the slab that was written last.
    fn push_slab(&mut self, seq: WrSeq, signaled: bool, bytes: usize);

    /// A SEND out of a slab: the parts are copied into it.
    fn push_copied(&mut self, seq: WrSeq, signaled: bool, slab: &mut SendSlab, parts: [&[u8]; 3]) {
        let mut at = 0;
        for part in parts {
            if !part.is_empty() {
                self.write_slab(slab, at, part);
                at += part.len();
            }
        }
        self.push_slab(seq, signaled, at);
    }
}

/// Why [`Link::fill`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// Nothing is waiting.
    Idle,
    /// The batch is full: post it and call again.
    BatchFull,
    /// The window is spent.
    NoCredit,
    /// The send queue is full.
    NoWr,
    /// The slab pool is empty.
    NoSlab,
    /// The connection is not proven yet, or has ended.
    Held,
}

/// The peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// This frame was malformed. The connection goes on.
    #[error("malformed frame: {0}")]
    Malformed(Malformed),
    /// This frame was malformed, and it was one too many: end the connection.
    #[error("malformed frame, number {MALFORMED_MAX} of this connection: {0}")]
    TooManyMalformed(Malformed),
    /// Credits do not add up: end the connection.
    #[error(transparent)]
    Credit(#[from] CreditError),
}

impl LinkError {
    /// Whether the connection must end.
    pub const fn is_fatal(&self) -> bool {
        !matches!(self, Self::Malformed(_))
    }
}

#[derive(Debug, Clone, Copy)]
struct Ping {
    token: u32,
    sent_at: Instant,
}

/// Counts of one connection, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkCounts {
    /// SENDs of data, inline.
    pub sends_inline: u64,
    /// SENDs of data, copied into a slab.
    pub sends_copied: u64,
    /// SENDs of data, with several frames each.
    pub sends_packed: u64,
    /// The frames in them.
    pub frames_packed: u64,
    /// Of those copied, SENDs that were one of several of their frame.
    pub fragments: u64,
    /// Pure grants sent.
    pub pure_grants: u64,
    /// Pure grants received.
    pub pure_grants_received: u64,
    /// SENDs of any kind received.
    pub received: u64,
    /// PINGs sent.
    pub pings: u64,
    /// PINGs answered.
    pub pongs: u64,
    /// Credits received from the peer.
    pub credits_received: u64,
    /// Times that a frame had to wait because the window was spent.
    pub credit_stalls: u64,
    /// How long frames waited for that, the present wait included.
    pub credit_stalled: Duration,
    /// Malformed frames from the peer.
    pub malformed: u64,
}

/// How far a connection has come; see [`Link::mark`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkMark {
    next: WrSeq,
    in_flight: u32,
    credits: u64,
    pongs: u64,
}

/// One connection. See the module's text.
#[derive(Debug)]
pub struct Link {
    limits: LinkLimits,
    tx: TxCredits,
    rx: RxCredits,
    sends: SendQueue<Posted>,
    /// Frames of packed SENDs in flight, without the first of each, in order.
    packed: VecDeque<Frame>,
    /// Bytes of the waiting queue's first frame that are posted already.
    cursor: usize,
    assembly: Assembly,
    pong_due: Option<u32>,
    ping_due: bool,
    ping: Option<Ping>,
    next_token: u32,
    malformed: u8,
    /// Nothing may go out yet: the peer may not be in RTR.
    held: bool,
    /// Any receive proves the connection: for the side that accepted, whose peer sends only when it is in RTS.
    proof_by_receive: bool,
    proven: bool,
    withhold: bool,
    /// Since when a frame waits because the window is spent.
    stalled: Option<Instant>,
    ended: bool,
    counts: LinkCounts,
}

impl Link {
    /// A connection whose QP is in RTS. The side that dialed sends a PING at once; the side that accepted holds
    /// everything back until [`Link::on_peer_ready`] or the first receive proves that the peer is in RTR.
    pub fn new(limits: LinkLimits, dialed: bool) -> Self {
        Self {
            limits,
            tx: TxCredits::new(limits.tx_window),
            rx: RxCredits::new(limits.rx_window),
            sends: SendQueue::new(limits.send_wrs, limits.signal_every),
            packed: VecDeque::new(),
            cursor: 0,
            assembly: Assembly::default(),
            pong_due: None,
            ping_due: dialed,
            ping: None,
            next_token: 1,
            malformed: 0,
            held: !dialed,
            proof_by_receive: !dialed,
            proven: false,
            withhold: false,
            stalled: None,
            ended: false,
            counts: LinkCounts::default(),
        }
    }

    /// Numbers agreed on.
    pub const fn limits(&self) -> LinkLimits {
        self.limits
    }

    /// Counts since the start, without a wait for credits that still lasts.
    pub const fn counts(&self) -> LinkCounts {
        self.counts
    }

    /// Counts since the start, at `now`.
    pub fn counts_at(&self, now: Instant) -> LinkCounts {
        let stalled = self.stalled.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        LinkCounts { credit_stalled: self.counts.credit_stalled + stalled, ..self.counts }
    }

    /// Gives the counts up: they begin at zero again. For a connection that has ended.
    pub fn take_counts(&mut self, now: Instant) -> LinkCounts {
        let counts = self.counts_at(now);
        (self.counts, self.stalled) = (LinkCounts::default(), None);
        counts
    }

    /// Whether a frame has come back from the peer over this QP.
    pub const fn is_proven(&self) -> bool {
        self.proven
    }

    /// Send credits left.
    pub const fn credits_left(&self) -> u16 {
        self.tx.available()
    }

    /// Credits owed to the peer.
    pub const fn credits_owed(&self) -> u16 {
        self.rx.owed()
    }

    /// WRs in flight.
    pub fn wrs_in_flight(&self) -> u32 {
        self.sends.len()
    }

    /// Position of the next WR: unchanged means nothing was posted.
    pub fn next_seq(&self) -> WrSeq {
        self.sends.next_seq()
    }

    /// The peer says that its QP is in RTS: what was held back may go, a PING first. After crossed dials both sides
    /// may have accepted, so neither may leave the proof to the other.
    pub fn on_peer_ready(&mut self) {
        self.held = false;
        if !self.proven {
            self.request_ping();
        }
    }

    /// Asks for a PING, unless one is under way: its answer serves all who wait.
    pub fn request_ping(&mut self) {
        self.ping_due |= self.ping.is_none();
    }

    /// Whether a PING is wanted or under way.
    pub const fn is_pinging(&self) -> bool {
        self.ping_due || self.ping.is_some()
    }

    /// How far this connection has come: the same value twice means that nothing was posted, covered or granted, and
    /// no PING answered, in between.
    pub fn mark(&self) -> LinkMark {
        LinkMark {
            next: self.sends.next_seq(),
            in_flight: self.sends.len(),
            credits: self.counts.credits_received,
            pongs: self.counts.pongs,
        }
    }

    /// Whether the peer owes anything: a completion, or the answer to a PING.
    pub fn is_settled(&self) -> bool {
        self.sends.is_empty() && !self.is_pinging()
    }

    /// Holds grants back (`true`) while the receiver cannot keep up, or gives them again.
    pub fn set_withhold(&mut self, withhold: bool) {
        self.withhold = withhold;
    }

    /// Whether a WR is in flight whose completion must come without anything more from us.
    pub fn awaits_completion(&self) -> bool {
        self.sends.awaits_completion()
    }

    /// WRs in flight that nothing will cover unless something signaled is posted behind them.
    pub fn has_bare_tail(&self) -> bool {
        self.sends.has_bare_tail()
    }

    /// The slab of a WR in flight, for posting it.
    pub fn slab(&self, seq: WrSeq) -> Option<&SendSlab> {
        self.sends.get(seq)?.op.slab.as_ref()
    }

    /// Moves what may go now into `out`: control frames first, then the frames of `queue` in order.
    pub fn fill(&mut self, now: impl Fn() -> Instant, queue: &mut VecDeque<Frame>, out: &mut impl Outbox) -> Filled {
        if self.ended || self.held {
            return Filled::Held;
        }
        if let Err(stop) = self.fill_control(&now, out) {
            return stop;
        }
        loop {
            let Some(frame) = queue.front() else { return Filled::Idle };
            if !self.proven {
                return Filled::Held;
            }
            if self.sends.free() <= CONTROL_WRS + MARKER_WRS {
                return Filled::NoWr;
            }
            if self.tx.available() == 0 {
                if self.stalled.is_none() {
                    self.counts.credit_stalls += 1;
                    self.stalled = Some(now());
                }
                return Filled::NoCredit;
            }
            if let Some(slab) = self.place_pack(queue, out) {
                self.end_stall(&now);
                self.fill_pack(queue, slab, out);
                continue;
            }
            let left = frame.body_bytes() - self.cursor;
            let body = left.min(self.limits.send_bytes as usize - HEADER_BYTES);
            match self.place(HEADER_BYTES + body, out) {
                Ok(slab) => {
                    self.end_stall(&now);
                    self.fill_data(queue, body, slab, out);
                }
                Err(stop) => return stop,
            }
        }
    }

    /// The clock is read where a stall begins and ends, not for each message.
    #[inline]
    fn end_stall(&mut self, now: impl Fn() -> Instant) {
        if let Some(since) = self.stalled.take() {
            self.counts.credit_stalled += now().saturating_duration_since(since);
        }
    }

    /// Whether a frame of `body` bytes that finds nothing waiting may go as one inline SEND this moment: what
    /// [`Link::fill`] would do with it, without the detour.
    #[inline]
    pub fn may_send_now(&self, body: usize) -> bool {
        self.proven
            && !self.ended
            && HEADER_BYTES + body <= self.limits.inline_bytes.min(self.limits.send_bytes) as usize
            && self.sends.free() > CONTROL_WRS + MARKER_WRS
            && self.tx.available() > 0
            && self.stalled.is_none()
            && self.next_control().is_none()
    }

    /// The fixed header of a frame of which [`Link::may_send_now`] was true, with header and payload behind it to be posted
    /// as [`Link::sent_now`] says.
    #[inline]
    pub fn head_now(&mut self, frame: &Frame) -> [u8; HEADER_BYTES] {
        debug_assert!(self.cursor == 0 && !self.held, "nothing is under way");
        let spent = self.tx.take();
        debug_assert!(spent, "a credit was there");
        self.counts.sends_inline += 1;
        let word = u32::try_from(frame.header.len()).unwrap_or(u32::MAX);
        self.header(FrameKind::Data(frame.kind), (true, true, frame.lane), word)
    }

    /// The frame is in flight: post it now.
    #[inline]
    pub fn sent_now(&mut self, frame: Frame) -> Posting {
        self.push(None, Some(frame), 0, false)
    }

    /// Room for one SEND of `bytes`: inline (`None`) or in a slab.
    #[inline]
    fn place(&self, bytes: usize, out: &mut impl Outbox) -> Result<Option<SendSlab>, Filled> {
        if !out.has_room() {
            return Err(Filled::BatchFull);
        }
        if bytes <= self.limits.inline_bytes as usize {
            return if out.reserve_inline(bytes) { Ok(None) } else { Err(Filled::BatchFull) };
        }
        out.take_slab().map(Some).ok_or(Filled::NoSlab)
    }

    /// One data SEND of `body` bytes from the queue's first frame. Room, WR, credit and slab are there.
    #[inline]
    fn fill_data(&mut self, queue: &mut VecDeque<Frame>, body: usize, slab: Option<SendSlab>, out: &mut impl Outbox) {
        let Some(frame) = queue.front() else { return };
        let (from, to) = (self.cursor, self.cursor + body);
        let (first, last) = (from == 0, to == frame.body_bytes());
        let spent = self.tx.take();
        debug_assert!(spent, "a credit was there");
        let word = if first { frame.header.len() } else { from };
        let word = u32::try_from(word).unwrap_or(u32::MAX);
        let head = self.header(FrameKind::Data(frame.kind), (first, last, frame.lane), word);
        // The body is the window [from, to) over header ++ payload.
        let split = frame.header.len();
        let header = &frame.header[from.min(split)..to.min(split)];
        let payload = &frame.payload[from.saturating_sub(split)..to.saturating_sub(split)];
        let seq = self.sends.next_seq();
        self.counts.fragments += u64::from(!(first && last));
        let (force_signal, slab) = match slab {
            None => {
                self.counts.sends_inline += 1;
                out.push_inline(seq, self.sends.will_signal(false), [&head, header, payload]);
                (false, None)
            }
            Some(mut slab) => {
                self.counts.sends_copied += 1;
                let scarce = out.slabs_scarce();
                out.push_copied(seq, self.sends.will_signal(scarce), &mut slab, [&head, header, payload]);
                (scarce, Some(slab))
            }
        };
        self.cursor = if last { 0 } else { to };
        let frame = if last { queue.pop_front() } else { None };
        self.push(slab, frame, 0, force_signal);
    }

    #[inline]
    fn push(&mut self, slab: Option<SendSlab>, frame: Option<Frame>, more: u32, force_signal: bool) -> Posting {
        self.sends.push(Posted { op: InFlight { slab, frame }, more }, force_signal)
    }

    /// Whether [`Link::fill`] would post something without any frame.
    pub fn has_control_due(&self) -> bool {
        !self.ended && !self.held && self.next_control().is_some()
    }

    #[inline]
    fn next_control(&self) -> Option<FrameKind> {
        if self.pong_due.is_some() {
            Some(FrameKind::Pong)
        } else if self.ping_due {
            Some(FrameKind::Ping)
        } else if self.proven && !self.withhold && self.rx.pure_grant_due() {
            Some(FrameKind::PureGrant)
        } else {
            None
        }
    }

    fn fill_control(&mut self, now: &impl Fn() -> Instant, out: &mut impl Outbox) -> Result<(), Filled> {
        loop {
            let Some(kind) = self.next_control() else { return Ok(()) };
            if self.sends.free() <= MARKER_WRS {
                return Err(Filled::NoWr);
            }
            let slab = self.place(HEADER_BYTES, out)?;
            let word = match kind {
                FrameKind::Pong => self.pong_due.take().unwrap_or_default(),
                FrameKind::Ping => {
                    let token = self.next_token;
                    self.next_token = self.next_token.wrapping_add(1);
                    self.ping_due = false;
                    self.ping = Some(Ping { token, sent_at: now() });
                    self.counts.pings += 1;
                    token
                }
                _ => {
                    self.counts.pure_grants += 1;
                    0
                }
            };
            let head = self.header(kind, (false, false, Lane::Application), word);
            // A PING is signaled: it is also what covers a bare tail. So is a PONG, or it would be a bare tail itself,
            // which a PING covers, which a PONG answers, without end. So is whatever takes a scarce slab: were the last
            // ones held by unsignaled grants, no PING could go out to bring them home.
            let answers = matches!(kind, FrameKind::Ping | FrameKind::Pong);
            let force_signal = answers || (slab.is_some() && out.slabs_scarce());
            let (seq, signaled) = (self.sends.next_seq(), self.sends.will_signal(force_signal));
            let slab = match slab {
                None => {
                    out.push_inline(seq, signaled, [&head, &[], &[]]);
                    None
                }
                Some(mut slab) => {
                    out.push_copied(seq, signaled, &mut slab, [&head, &[], &[]]);
                    Some(slab)
                }
            };
            self.push(slab, None, 0, force_signal);
        }
    }

    #[inline]
    fn header(&mut self, kind: FrameKind, (first, last, lane): (bool, bool, Lane), word: u32) -> [u8; HEADER_BYTES] {
        let credits = if self.withhold { 0 } else { self.rx.take_grant() };
        FrameHeader { kind, wish: self.tx.wish(), first, last, lane, credits, word }.encode()
    }

    /// A SEND of `bytes` bytes has arrived that starts with `head` (zeros beyond its end).
    ///
    /// # Errors
    ///
    /// [`LinkError`]: the peer broke the protocol. The slab goes back in any case; a data frame's credit too.
    #[inline]
    pub fn on_receive(&mut self, head: [u8; HEADER_BYTES], bytes: u32) -> Result<Incoming, LinkError> {
        match self.on_whole(head, bytes) {
            Some(whole) => Ok(whole),
            None => self.on_any(head, bytes),
        }
    }

    /// What nearly every SEND is: a whole frame for the application, while none is under way, with credits that add up.
    /// Of any other nothing is changed and nothing said.
    #[inline]
    fn on_whole(&mut self, head: [u8; HEADER_BYTES], bytes: u32) -> Option<Incoming> {
        let body = bytes.checked_sub(HEADER_BYTES_U32)?;
        let (kind, FrameHeader { wish, lane, credits, word, .. }) = FrameHeader::decode_whole(head)?;
        let fits = self.assembly.takes_whole(word, body, self.limits.receive_max_bytes);
        if !fits || !self.rx.has_room() || !self.tx.may_be_granted(credits) {
            return None;
        }
        self.held = false;
        self.counts.received += 1;
        self.proven |= self.proof_by_receive;
        self.counts.credits_received += u64::from(credits);
        self.rx.on_wish(wish);
        let count = self.rx.on_receive().and(self.tx.on_grant(u16::from(credits)));
        debug_assert!(count.is_ok(), "checked above");
        Some(Incoming::Whole { kind, lane, header_len: word as usize, body_len: body as usize })
    }

    /// Any SEND.
    pub(super) fn on_any(&mut self, head: [u8; HEADER_BYTES], bytes: u32) -> Result<Incoming, LinkError> {
        self.held = false;
        self.counts.received += 1;
        self.proven |= self.proof_by_receive;
        if bytes < HEADER_BYTES_U32 {
            self.rx.on_receive()?;
            return Err(self.malformed(Malformed::Short { bytes }));
        }
        let header = match FrameHeader::decode(head) {
            Ok(header) => header,
            Err(malformed) => {
                if !FrameHeader::is_of_reserve(malformed) {
                    self.rx.on_receive()?;
                }
                return Err(self.malformed(malformed));
            }
        };
        let body = bytes - HEADER_BYTES_U32;
        if !matches!(header.kind, FrameKind::Data(_) | FrameKind::Pack) {
            return self.on_control(header, body);
        }
        self.rx.on_receive()?;
        self.on_credits(header)?;
        let limit = self.limits.receive_max_bytes;
        let incoming = match header.kind {
            FrameKind::Data(kind) => self.assembly.accept(kind, header, body, limit),
            _ => self.assembly.accept_pack(header.word, body),
        };
        incoming.map_err(|malformed| self.malformed(malformed))
    }

    fn on_control(&mut self, header: FrameHeader, body: u32) -> Result<Incoming, LinkError> {
        self.on_credits(header)?;
        let kind = match header.kind {
            FrameKind::Ping => "PING",
            FrameKind::Pong => "PONG",
            _ => "PURE_GRANT",
        };
        if body != 0 {
            return Err(self.malformed(Malformed::Body { kind, body }));
        }
        match header.kind {
            // A peer sends the next PING when it has our PONG. Frames of one QP come once and in order, so a second one
            // is no accident.
            FrameKind::Ping if self.pong_due.is_some() => return Err(self.malformed(Malformed::Unexpected { kind })),
            FrameKind::Ping => self.pong_due = Some(header.word),
            FrameKind::Pong => {
                let Some(ping) = self.ping.take_if(|ping| ping.token == header.word) else {
                    return Err(self.malformed(Malformed::Unexpected { kind }));
                };
                self.proven = true;
                self.counts.pongs += 1;
                return Ok(Incoming::Pong { sent_at: ping.sent_at });
            }
            _ => {
                let least = RxCredits::pure_grant_min(self.limits.tx_window);
                if u16::from(header.credits) < least {
                    return Err(self.malformed(Malformed::SmallGrant { credits: header.credits, least }));
                }
                self.counts.pure_grants_received += 1;
            }
        }
        Ok(Incoming::Control)
    }

    #[inline]
    fn on_credits(&mut self, header: FrameHeader) -> Result<(), CreditError> {
        self.rx.on_wish(header.wish);
        self.counts.credits_received += u64::from(header.credits);
        self.tx.on_grant(u16::from(header.credits))
    }

    #[cold]
    fn malformed(&mut self, malformed: Malformed) -> LinkError {
        self.counts.malformed += 1;
        // Of a connection that has ended, what is still in the CQ is read on: there may be many.
        self.malformed = self.malformed.saturating_add(1);
        if self.malformed >= MALFORMED_MAX {
            LinkError::TooManyMalformed(malformed)
        } else {
            LinkError::Malformed(malformed)
        }
    }

    /// Where a fragment's body is appended.
    pub fn partial_mut(&mut self) -> &mut Vec<u8> {
        self.assembly.body_mut()
    }

    /// The last fragment is appended: the frame.
    pub fn finish_fragment(&mut self) -> Option<Assembled> {
        self.assembly.finish()
    }

    /// Whether the application may keep the slab of the SEND that has just arrived; if so, its credit is owed only after
    /// [`Link::on_returned`].
    #[must_use]
    pub fn lend(&mut self) -> bool {
        self.rx.lend()
    }

    /// A slab that was lent is back.
    pub fn on_returned(&mut self) {
        self.rx.on_returned();
    }

    /// Every receive that this peer's frames have taken so far is posted again, but for what is lent.
    pub fn on_reposted(&mut self) {
        self.rx.on_reposted();
    }

    /// A good send completion. `each` gets what the covered WRs held.
    pub fn on_send_done(&mut self, seq: WrSeq, mut each: impl FnMut(InFlight, Ended)) {
        let packed = &mut self.packed;
        self.sends.complete(seq, |posted, ended| posted.unpack(packed, |op| each(op, ended)));
    }

    /// A failed or flushed send completion.
    pub fn on_send_failed(&mut self, seq: WrSeq, mut each: impl FnMut(InFlight, Ended)) {
        self.ended = true;
        let packed = &mut self.packed;
        self.sends.fail(seq, |posted, ended| posted.unpack(packed, |op| each(op, ended)));
    }

    /// The device refused the WRs from `seq` on.
    pub fn take_back(&mut self, seq: WrSeq) -> impl Iterator<Item = InFlight> + use<> {
        self.ended = true;
        let refused: Vec<Posted> = self.sends.take_back(seq).collect();
        // Theirs are the last ones.
        let more: usize = refused.iter().map(|posted| posted.more as usize).sum();
        let mut packed = self.packed.split_off(self.packed.len() - more);
        Posted::unpack_all(refused, &mut packed)
    }

    /// The connection has ended: nothing more goes out. What had come in before may still be taken.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// The QP is in ERR. Unsignaled WRs that the peer has acknowledged give no completion any more, so one more WR is
    /// posted behind all others: its flush tells that everything before it has ended, and that every receive which
    /// completed before is polled. `None` when the queue is full, which the WR kept free for it prevents.
    pub fn drain_marker(&mut self) -> Option<WrSeq> {
        (self.sends.free() > 0).then(|| self.push(None, None, 0, true).seq)
    }

    /// No completion will come any more.
    pub fn abandon(&mut self) -> impl Iterator<Item = InFlight> + use<> {
        let rest = self.sends.abandon().collect();
        Posted::unpack_all(rest, &mut self.packed)
    }
}
