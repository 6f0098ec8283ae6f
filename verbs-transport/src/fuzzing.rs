//! What the fuzz targets in `verbs-transport/fuzz` run, and what the tests run over their corpora. Not part of the API.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;

use crate::{
    SendError,
    fabric::{POST_BATCH, SendSlab, WrSeq},
    proto::{
        assembly::Incoming,
        credit::WINDOW_MIN,
        frame::{FrameHeader, FrameKind, HEADER_BYTES, Lane, MessageType},
        link::{CONTROL_WRS, Filled, Frame, InFlight, Link, LinkError, LinkLimits, Outbox},
        pack,
    },
};

/// Eight bytes as the fixed header of a SEND.
///
/// # Panics
///
/// When a header that was read is written in other bytes.
pub fn header(bytes: &[u8]) {
    let Some((head, _)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return };
    if let Ok(header) = FrameHeader::decode(*head) {
        assert_eq!(header.encode(), *head, "each header has one encoding: {header:?}");
    }
}

/// Bytes as what stands behind the fixed header of a packed SEND: the first says how many frames.
///
/// # Panics
///
/// When a frame that was taken lies outside, or something is left over.
pub fn pack(bytes: &[u8]) {
    let Some((&says, body)) = bytes.split_first() else { return };
    if pack::check(body, says.into(), 16 << 20).is_err() {
        return;
    }
    let (mut at, mut found) = (0, 0);
    for frame in pack::frames(body) {
        assert!(frame.body.start == at + pack::ENTRY_BYTES && frame.header_len <= frame.body.len());
        assert!(body.get(frame.body.clone()).is_some(), "a frame beyond the body");
        (at, found) = (frame.body.end, found + 1);
    }
    assert!(at == body.len() && found == says, "{found} frames, {at} of {} bytes", body.len());
}

/// One side of a connection: the bytes say what the peer sends, what the application queues and how the device answers.
///
/// # Panics
///
/// When the link panics, loses or gains a credit, a slab or a frame, posts what it may not, takes more memory than the
/// peer may make it take, or posts anything after the peer broke the protocol for good.
pub fn link(bytes: &[u8]) {
    let mut bytes = Reader(bytes);
    let Some(mut run) = Run::new(&mut bytes) else { return };
    while run.step(&mut bytes).is_some() {
        run.check();
    }
    run.finish();
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*array)
    }

    fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn short(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }
}

/// A posted WR, as the device has it.
struct Posted {
    seq: WrSeq,
    signaled: bool,
}

/// The batch, and the pool behind it.
struct Batch {
    pool: Vec<SendSlab>,
    slabs: usize,
    inline_left: usize,
    entries: Vec<(Posted, [u8; HEADER_BYTES], bool)>,
    /// What is written and not pushed yet.
    slab: Vec<u8>,
    limits: LinkLimits,
}

const INLINE_BYTES: usize = 1024;

impl Batch {
    fn push(&mut self, seq: WrSeq, signaled: bool, bytes: &[u8], in_slab: bool) {
        assert!(self.entries.len() < POST_BATCH, "a WR beyond the batch");
        let len = bytes.len();
        assert!(len <= self.limits.send_bytes as usize, "a SEND of {len} bytes");
        assert!(in_slab || len <= self.limits.inline_bytes as usize, "{len} bytes inline");
        let head = *bytes.first_chunk().expect("a SEND has its fixed header");
        if let Ok(FrameHeader { kind: FrameKind::Pack, word, .. }) = FrameHeader::decode(head) {
            let frames = pack::check(&bytes[HEADER_BYTES..], word, u32::MAX);
            assert_eq!((frames, word > 1), (Ok(()), true), "what is packed can be unpacked, and is more than one");
        }
        self.entries.push((Posted { seq, signaled }, head, in_slab));
    }
}

impl Outbox for Batch {
    fn has_room(&self) -> bool {
        self.entries.len() < POST_BATCH
    }

    fn take_slab(&mut self) -> Option<SendSlab> {
        self.pool.pop()
    }

    fn slabs_scarce(&self) -> bool {
        self.pool.len() <= self.slabs / 2
    }

    fn reserve_inline(&mut self, bytes: usize) -> bool {
        let fits = bytes <= self.inline_left;
        self.inline_left -= if fits { bytes } else { 0 };
        fits
    }

    fn push_inline(&mut self, seq: WrSeq, signaled: bool, parts: [&[u8]; 3]) {
        self.push(seq, signaled, &parts.concat(), false);
    }

    fn write_slab(&mut self, _slab: &mut SendSlab, at: usize, bytes: &[u8]) {
        self.slab.resize(self.slab.len().max(at + bytes.len()), 0);
        self.slab[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn push_slab(&mut self, seq: WrSeq, signaled: bool, bytes: usize) {
        let slab = std::mem::take(&mut self.slab);
        assert_eq!(slab.len(), bytes, "what was written is what is sent");
        self.push(seq, signaled, &slab, true);
    }
}

/// The link, and plain counts beside it.
struct Run {
    link: Link,
    limits: LinkLimits,
    batch: Batch,
    queue: VecDeque<Frame>,
    /// In order, as the device has them.
    device: VecDeque<Posted>,
    now: Instant,
    /// Frames that the application queued; that a completion, a failure or the end gave back.
    queued: usize,
    ended: usize,
    /// SENDs that spent one of the peer's credits; of these, those whose slab is posted again; credits given back.
    charged: u32,
    reposted: u32,
    granted: u32,
    /// SENDs that spent one of ours; credits that came back.
    spent: u32,
    returned: u32,
    fatal: Option<LinkError>,
    failed: bool,
    refuse_next: Option<u8>,
}

impl Run {
    fn new(bytes: &mut Reader<'_>) -> Option<Self> {
        let [tx, rx, send, inline, receive, wrs, signal, slabs] = bytes.array()?;
        let limits = LinkLimits {
            tx_window: WINDOW_MIN + u16::from(tx % 64),
            rx_window: WINDOW_MIN + u16::from(rx % 64),
            send_bytes: 64 + u32::from(send),
            inline_bytes: u32::from(inline),
            receive_max_bytes: 1024 << (receive % 8),
            send_wrs: CONTROL_WRS + 10 + u32::from(wrs % 64),
            signal_every: 1 + u32::from(signal % 32),
            packs: slabs & 0x20 == 0,
        };
        let slabs = 1 + usize::from(slabs % 32);
        let pool = (0..slabs).map(|index| SendSlab::mint(u32::try_from(index).unwrap_or(u32::MAX))).collect();
        Some(Self {
            link: Link::new(limits, signal & 0x80 != 0),
            limits,
            batch: Batch { pool, slabs, inline_left: INLINE_BYTES, entries: Vec::new(), slab: Vec::new(), limits },
            queue: VecDeque::new(),
            device: VecDeque::new(),
            now: Instant::now(),
            queued: 0,
            ended: 0,
            charged: 0,
            reposted: 0,
            granted: 0,
            spent: 0,
            returned: 0,
            fatal: None,
            failed: false,
            refuse_next: None,
        })
    }

    fn is_over(&self) -> bool {
        self.failed || self.fatal.is_some()
    }

    /// One thing happens; `None` when the bytes are used up.
    fn step(&mut self, bytes: &mut Reader<'_>) -> Option<()> {
        self.now += Duration::from_micros(1);
        match bytes.byte()? % 14 {
            0 => {
                let (head, len) = (bytes.array()?, bytes.short()?);
                self.receive(head, u32::from(len % 8193));
            }
            // What a peer of ours would send, in whatever order.
            1 | 2 => {
                let [kind, flags, credits, len] = bytes.array()?;
                let word = bytes.short()?.to_be_bytes();
                let body = u32::from(len) * 4;
                let head = [0xb1, kind % 5, flags & 0x0f, credits % 8, 0, 0, word[0], word[1]];
                self.receive(head, 8 + body);
            }
            3 => {
                let [kind, flags, credits, token] = bytes.array()?;
                self.receive([0xb1, 5 + kind % 3, flags & 3, credits % 64, 0, 0, 0, token], 8);
            }
            4 => {
                self.link.on_reposted();
                if self.fatal.is_none() {
                    self.reposted = self.charged;
                }
            }
            5 | 6 => {
                let ([kind, header], payload) = (bytes.array()?, bytes.short()?);
                let kind = MessageType::ALL[usize::from(kind % 5)];
                let (header, payload) = (vec![1; header.into()].into(), vec![2; usize::from(payload % 4096)].into());
                let on_error = Arc::new(|_: Bytes, _: Bytes, _: SendError| {});
                self.queue.push_back(Frame { kind, lane: Lane::Application, header, payload, on_error });
                self.queued += 1;
            }
            7 | 8 => self.fill(),
            9 | 10 => {
                let which = bytes.byte()?;
                self.complete(which);
            }
            11 => match bytes.byte()? % 4 {
                0 => self.link.on_peer_ready(),
                1 => self.link.request_ping(),
                2 => self.link.set_withhold(true),
                _ => self.link.set_withhold(false),
            },
            12 => {
                let which = bytes.byte()?;
                // Rarely, or every run would end early.
                if which < 8 && !self.device.is_empty() {
                    self.fail(which);
                }
            }
            _ => {
                let which = bytes.byte()?;
                self.refuse_next = (which < 16).then_some(which);
            }
        }
        Some(())
    }

    fn receive(&mut self, head: [u8; HEADER_BYTES], len: u32) {
        // A device gives zeros beyond the SEND's end.
        let mut seen = [0; HEADER_BYTES];
        let there = HEADER_BYTES.min(len as usize);
        seen[..there].copy_from_slice(&head[..there]);
        let header = if there == HEADER_BYTES { FrameHeader::decode(seen).ok() } else { None };
        let got = self.link.on_receive(seen, len);
        if self.fatal.is_some() {
            // The driver asks no more; it must not panic all the same.
            return;
        }
        // A control frame spends no credit, also a malformed one: it came out of the reserve.
        let control = there == HEADER_BYTES && seen[0] == 0xb1 && (5..=7).contains(&seen[1]);
        match &got {
            Err(error @ LinkError::Credit(_)) => self.fatal = Some(*error),
            other => {
                self.charged += u32::from(!control);
                self.returned += header.map_or(0, |header| header.credits.into());
                if let Err(error @ LinkError::TooManyMalformed(_)) = other {
                    self.fatal = Some(*error);
                }
            }
        }
        match got {
            Ok(Incoming::Whole { header_len, body_len, .. }) => {
                assert!(header_len <= body_len && body_len + HEADER_BYTES == len as usize);
                assert!(body_len <= self.limits.receive_max_bytes as usize);
            }
            Ok(Incoming::Fragment { body_len, last }) => {
                let partial = self.link.partial_mut();
                partial.resize(partial.len() + body_len, 3);
                assert!(partial.len() <= self.limits.receive_max_bytes as usize, "a peer makes us hold too much");
                if last {
                    let whole = self.link.finish_fragment().expect("the last fragment makes it whole");
                    assert!(whole.header_len <= whole.body.len());
                }
            }
            // What it holds is for the target of its own.
            Ok(Incoming::Pack { body_len, .. }) => assert_eq!(body_len + HEADER_BYTES, len as usize),
            Ok(Incoming::Control) => {}
            Ok(Incoming::Pong { sent_at }) => assert!(sent_at <= self.now && self.link.is_proven()),
            Err(error) => assert_eq!(error.is_fatal(), self.fatal.is_some()),
        }
        if self.fatal.is_some() {
            self.link.end();
        }
    }

    fn fill(&mut self) {
        for _ in 0..1000 {
            let now = self.now;
            let filled = self.link.fill(|| now, &mut self.queue, &mut self.batch);
            let over = self.is_over();
            assert!(!over || (filled == Filled::Held && self.batch.entries.is_empty()), "posted after the end");
            let empty = self.batch.entries.is_empty();
            self.post();
            if filled != Filled::BatchFull {
                return;
            }
            assert!(!empty || self.failed, "a full batch that is empty");
        }
        panic!("filling does not end");
    }

    fn post(&mut self) {
        let entries = std::mem::take(&mut self.batch.entries);
        self.batch.inline_left = INLINE_BYTES;
        let refused = self.refuse_next.take_if(|_| !entries.is_empty());
        let refused = refused.map(|which| usize::from(which) % entries.len());
        for (index, (posted, head, in_slab)) in entries.iter().enumerate() {
            assert_eq!(self.link.slab(posted.seq).is_some(), *in_slab);
            let header = FrameHeader::decode(*head).expect("what is sent can be read");
            self.granted += u32::from(header.credits);
            self.spent += u32::from(matches!(header.kind, FrameKind::Data(_) | FrameKind::Pack));
            if Some(index) == refused {
                self.failed = true;
            }
        }
        let first_refused = refused.map(|index| entries[index].0.seq);
        let taken = refused.unwrap_or(entries.len());
        self.device.extend(entries.into_iter().take(taken).map(|(posted, ..)| posted));
        assert!(self.device.len() <= self.limits.send_wrs as usize, "the device's queue overflows");
        if let Some(seq) = first_refused {
            let back: Vec<InFlight> = self.link.take_back(seq).collect();
            self.take_home(back);
        }
    }

    /// A good completion of one of the signaled WRs.
    fn complete(&mut self, which: u8) {
        let signaled: Vec<usize> = (0..self.device.len()).filter(|&index| self.device[index].signaled).collect();
        let Some(&index) = signaled.get(usize::from(which) % signaled.len().max(1)) else { return };
        let seq = self.device[index].seq;
        self.device.drain(..=index);
        let mut home = Vec::new();
        self.link.on_send_done(seq, |op, _| home.push(op));
        self.take_home(home);
    }

    /// A failed one of any.
    fn fail(&mut self, which: u8) {
        let index = usize::from(which) % self.device.len();
        let seq = self.device[index].seq;
        self.device.drain(..=index);
        self.failed = true;
        let mut home = Vec::new();
        self.link.on_send_failed(seq, |op, _| home.push(op));
        self.take_home(home);
    }

    fn take_home(&mut self, ops: Vec<InFlight>) {
        for op in ops {
            self.batch.pool.extend(op.slab);
            self.ended += usize::from(op.frame.is_some());
        }
    }

    fn check(&self) {
        assert!(self.batch.pool.len() <= self.batch.slabs, "a slab twice");
        assert_eq!(self.link.wrs_in_flight() as usize, self.device.len(), "WRs in flight");
        if self.is_over() {
            return;
        }
        let outstanding = self.limits.tx_window - self.link.credits_left();
        assert_eq!(u32::from(outstanding), self.spent - self.returned, "send credits");
        assert_eq!(u32::from(self.link.credits_owed()), self.reposted - self.granted, "credits owed");
        assert!(self.charged - self.granted <= u32::from(self.limits.rx_window), "receive credits");
    }

    /// The connection ends: everything comes home.
    fn finish(mut self) {
        self.link.end();
        assert!(self.link.drain_marker().is_some(), "a WR is kept free for the marker");
        let rest: Vec<InFlight> = self.link.abandon().collect();
        self.take_home(rest);
        assert_eq!(self.batch.pool.len(), self.batch.slabs, "slabs");
        assert_eq!(self.ended + self.queue.len(), self.queued, "frames");
    }
}

#[cfg(test)]
mod tests {
    use verbs_bootstrap::fuzzing::over_corpus;

    const CRATE: &str = env!("CARGO_MANIFEST_DIR");

    #[test]
    fn corpus_of_headers() {
        over_corpus(CRATE, "header", 5, super::header);
    }

    #[test]
    fn corpus_of_packs() {
        over_corpus(CRATE, "pack", 4, super::pack);
    }

    #[test]
    fn corpus_of_links() {
        over_corpus(CRATE, "link", 5, super::link);
    }

    /// Where no fuzzer runs, chance does.
    #[test]
    fn random_links() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let len = rng.usize(8..600);
            let bytes: Vec<u8> = (0..len).map(|_| rng.u8(..)).collect();
            super::link(&bytes);
        }
    }
}
