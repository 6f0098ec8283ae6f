//! Every state of a link meets every event, and every frame kind comes expected, stale, twice and too early.

use std::{collections::VecDeque, time::Instant};

use proptest::prelude::*;

use super::{frame, head, limits, pair::Pair};
use crate::{
    fabric::{SendSlab, WrSeq},
    proto::{
        assembly::Incoming,
        credit::CreditError,
        frame::{FrameHeader, FrameKind, GrantWish, HEADER_BYTES, HEADER_BYTES_U32, Lane, Malformed, MessageType},
        link::{Filled, Frame, InFlight, Link, LinkError, LinkLimits, Outbox},
        send_queue::Ended,
    },
};

const DATA: FrameKind = FrameKind::Data(MessageType::Message);

/// Takes everything, and remembers the fixed headers.
#[derive(Default)]
struct Tray {
    heads: Vec<FrameHeader>,
    signaled: Vec<bool>,
    slab: Vec<u8>,
    scarce: bool,
    bodies: Vec<Vec<u8>>,
}

impl Tray {
    fn take(&mut self, signaled: bool, bytes: &[u8]) {
        self.heads.push(FrameHeader::decode(*bytes.first_chunk().unwrap()).unwrap());
        self.bodies.push(bytes[HEADER_BYTES..].to_vec());
        self.signaled.push(signaled);
    }
}

impl Outbox for Tray {
    fn has_room(&self) -> bool {
        true
    }
    fn take_slab(&mut self) -> Option<SendSlab> {
        Some(SendSlab::mint(0))
    }
    fn slabs_scarce(&self) -> bool {
        self.scarce
    }
    fn reserve_inline(&mut self, _bytes: usize) -> bool {
        true
    }
    fn push_inline(&mut self, _seq: WrSeq, signaled: bool, parts: [&[u8]; 3]) {
        self.take(signaled, &parts.concat());
    }
    fn write_slab(&mut self, _slab: &mut SendSlab, at: usize, bytes: &[u8]) {
        self.slab.resize(self.slab.len().max(at + bytes.len()), 0);
        self.slab[at..at + bytes.len()].copy_from_slice(bytes);
    }
    fn push_slab(&mut self, _seq: WrSeq, signaled: bool, bytes: usize) {
        let slab = std::mem::take(&mut self.slab);
        assert_eq!(slab.len(), bytes);
        self.take(signaled, &slab);
    }
}

fn fill(link: &mut Link, queue: &mut VecDeque<Frame>) -> (Filled, Vec<FrameKind>) {
    let mut tray = Tray::default();
    let filled = link.fill(Instant::now, queue, &mut tray);
    (filled, tray.heads.iter().map(|head| head.kind).collect())
}

fn receive(link: &mut Link, header: FrameHeader, body: u32) -> Result<Incoming, LinkError> {
    link.on_receive(header.encode(), HEADER_BYTES_U32 + body)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Accepted; the dialer may not be in RTR yet.
    Held,
    /// Dialed; the PING is under way.
    Proving,
    /// A frame has come back.
    Proven,
    /// Over.
    Ended,
}

const STATES: [State; 4] = [State::Held, State::Proving, State::Proven, State::Ended];

/// A link in this state, with nothing queued; the proven and the ended one have three data SENDs in flight.
fn link_in(state: State) -> Link {
    if state == State::Held {
        return Link::new(limits(), false);
    }
    let mut link = Link::new(limits(), true);
    assert_eq!(fill(&mut link, &mut VecDeque::new()), (Filled::Idle, vec![FrameKind::Ping]));
    if state == State::Proving {
        return link;
    }
    receive(&mut link, head(FrameKind::Pong, 0, 1), 0).unwrap();
    link.on_send_done(WrSeq(0), |_, _| {});
    let mut queue = (0..3).map(|id| frame(id, MessageType::Message, 10)).collect();
    assert_eq!(fill(&mut link, &mut queue), (Filled::Idle, vec![DATA; 3]));
    if state == State::Ended {
        link.end();
    }
    link
}

/// What an event leaves behind: whether the link is proven, what it then sends of a waiting frame and its own
/// accord, and what `fill` says.
fn after(link: &mut Link) -> (bool, Filled, Vec<FrameKind>) {
    let mut queue = VecDeque::from([frame(99, MessageType::Event, 5)]);
    let (filled, sent) = fill(link, &mut queue);
    (link.is_proven(), filled, sent)
}

const EVENT: FrameKind = FrameKind::Data(MessageType::Event);

/// Receives: state by state.
#[test]
fn every_state_meets_every_frame() {
    use FrameKind::{Ping, Pong, PureGrant};
    use State::{Ended, Held, Proven, Proving};

    type Event = (&'static str, FrameHeader, u32);
    let fragment = FrameHeader { last: false, ..head(DATA, 0, 0) };
    let data: Event = ("data", head(DATA, 0, 2), 5);
    let first: Event = ("first fragment", fragment, 5);
    let pack: Event = ("pack of two", head(FrameKind::Pack, 0, 2), 30);
    let ping: Event = ("PING", head(Ping, 0, 7), 0);
    let pong: Event = ("PONG due", head(Pong, 0, 1), 0);
    let grant: Event = ("grant of 16", head(PureGrant, 16, 0), 0);

    for state in STATES {
        // Data and fragments are taken in every state; what they prove differs.
        for (name, header, body) in [data, first, pack] {
            let mut link = link_in(state);
            assert!(receive(&mut link, header, body).is_ok(), "{state:?} × {name}");
            let expected = match state {
                // The first receive of the accepting side proves that the dialer is in RTS.
                Held | Proven => (true, Filled::Idle, vec![EVENT]),
                // The dialing side waits for its PONG.
                Proving => (false, Filled::Held, vec![]),
                Ended => (true, Filled::Held, vec![]),
            };
            assert_eq!(after(&mut link), expected, "{state:?} × {name}");
        }
        // A PING is answered before anything else.
        let mut link = link_in(state);
        assert_eq!(receive(&mut link, ping.1, 0), Ok(Incoming::Control), "{state:?} × PING");
        let expected = match state {
            Held | Proven => (true, Filled::Idle, vec![Pong, EVENT]),
            Proving => (false, Filled::Held, vec![Pong]),
            Ended => (true, Filled::Held, vec![]),
        };
        assert_eq!(after(&mut link), expected, "{state:?} × PING");
        // A PONG proves the side that asked; nobody else waits for one.
        let mut link = link_in(state);
        let got = receive(&mut link, pong.1, 0);
        if state == Proving {
            assert!(matches!(got, Ok(Incoming::Pong { .. })));
            assert_eq!(after(&mut link), (true, Filled::Idle, vec![EVENT]));
        } else {
            let stale = LinkError::Malformed(Malformed::Unexpected { kind: "PONG" });
            assert_eq!(got, Err(stale), "{state:?} × PONG");
        }
        // A grant is right where credits were spent, and an error where none were.
        let mut link = link_in(state);
        let got = receive(&mut link, grant.1, 0);
        let spent = if matches!(state, Proven | Ended) { 3 } else { 0 };
        let excess = CreditError::ExcessGrant { granted: 16, outstanding: spent, window: 64 };
        assert_eq!(got, Err(excess.into()), "{state:?} × grant");
        assert!(got.unwrap_err().is_fatal());
        assert_eq!(link.credits_left(), 64 - spent, "an excess grant changes nothing");
        let mut link = link_in(state);
        let got = receive(&mut link, head(DATA, 3, 0), 0);
        assert_eq!(got.is_ok(), spent == 3, "{state:?} × data with a grant of three");
        assert_eq!(link.credits_left(), 64);
        // Malformed: counted, its credit goes back, the second one ends.
        for bad in [(0xB2_u8, 8_u32), (0xB1, 3)] {
            let mut link = link_in(state);
            let bytes = [bad.0, 0, 0b1100, 0, 0, 0, 0, 0];
            assert!(!link.on_receive(bytes, bad.1).unwrap_err().is_fatal(), "{state:?} × malformed");
            link.on_reposted();
            assert_eq!(link.credits_owed(), 1, "{state:?}: the credit of a malformed frame goes back");
            assert!(link.on_receive(bytes, bad.1).unwrap_err().is_fatal(), "{state:?} × malformed twice");
            assert_eq!(link.counts().malformed, 2);
        }
        // Beyond the window.
        let mut link = link_in(state);
        for _ in 0..64 {
            receive(&mut link, head(DATA, 0, 0), 0).unwrap();
        }
        let over = receive(&mut link, head(DATA, 0, 0), 0);
        assert_eq!(over, Err(CreditError::Overspent { window: 64 }.into()), "{state:?} × overspent");
        assert!(over.unwrap_err().is_fatal());
    }
}

/// Everything that is no receive.
#[test]
fn every_state_meets_every_local_event() {
    use FrameKind::Ping;
    use State::{Ended, Held, Proven, Proving};

    for state in STATES {
        // Nothing at all: a frame waits, what goes out?
        let plain = match state {
            Held | Proving => (false, Filled::Held, vec![]),
            Proven => (true, Filled::Idle, vec![EVENT]),
            Ended => (true, Filled::Held, vec![]),
        };
        assert_eq!(after(&mut link_in(state)), plain, "{state:?}");
        // The peer is in RTS: the held side asks for proof of its own, the proving one has asked already.
        let mut link = link_in(state);
        link.on_peer_ready();
        let expected = match state {
            Held => (false, Filled::Held, vec![Ping]),
            _ => plain.clone(),
        };
        assert_eq!(after(&mut link), expected, "{state:?} × ready");
        // A PING is asked for: at most one is under way.
        let mut link = link_in(state);
        link.request_ping();
        let expected = match state {
            Proven => (true, Filled::Idle, vec![Ping, EVENT]),
            _ => plain.clone(),
        };
        assert_eq!(after(&mut link), expected, "{state:?} × ping wanted");
        link.request_ping();
        assert!(!fill(&mut link, &mut VecDeque::new()).1.contains(&Ping), "{state:?} × ping wanted twice");
        // A good completion gives up what it covers; the same or an unknown one nothing.
        let mut link = link_in(state);
        let in_flight = link.wrs_in_flight();
        let last = WrSeq(link.next_seq().0.wrapping_sub(1));
        let mut ended = Vec::new();
        for seq in [WrSeq(link.next_seq().0), last, last, WrSeq(u64::MAX)] {
            link.on_send_done(seq, |op, end| ended.push((op.frame.is_some(), end)));
        }
        let frames = matches!(state, Proven | Ended);
        let expected = vec![(frames, self::Ended::Done); in_flight as usize];
        assert_eq!(ended, expected, "{state:?} × send done");
        assert_eq!(link.wrs_in_flight(), 0);
        // A failed one ends the link.
        let mut link = link_in(state);
        let mut ended = Vec::new();
        link.on_send_failed(last, |op, end| ended.push((op.frame.is_some(), end)));
        assert_eq!(ended.len(), in_flight as usize);
        assert_eq!(ended.last().map(|(_, end)| *end), (in_flight > 0).then_some(self::Ended::Failed));
        assert!(ended.iter().rev().skip(1).all(|(_, end)| *end == self::Ended::Done), "the device reports in order");
        assert_eq!(after(&mut link).1, Filled::Held, "{state:?} × send failed");
        // The marker goes behind everything, and its flush proves what had no flush of its own.
        let mut link = link_in(state);
        link.end();
        let marker = link.drain_marker().unwrap();
        assert_eq!((marker.0, link.wrs_in_flight()), (last.0.wrapping_add(1), in_flight + 1));
        let mut ended = Vec::new();
        link.on_send_failed(marker, |op, end| ended.push((op.frame.is_some(), end)));
        let done = ended.iter().filter(|(_, end)| *end == self::Ended::Done).count();
        assert_eq!((done, ended.len()), (in_flight as usize, in_flight as usize + 1), "{state:?} × marker");
        // No completion comes any more: all fails, once.
        let mut link = link_in(state);
        assert_eq!(link.abandon().count(), in_flight as usize);
        assert_eq!(link.abandon().count(), 0);
        // The device refuses the last WR: those before it end by themselves, and a marker still fits.
        let mut link = link_in(state);
        assert_eq!(link.take_back(last).count(), usize::from(in_flight > 0), "{state:?} × refused");
        let marker = link.drain_marker().unwrap();
        let mut ended = Vec::new();
        link.on_send_done(WrSeq(marker.0.wrapping_sub(1)), |_, end| ended.push(end));
        assert!(ended.iter().all(|end| *end == self::Ended::Done), "{state:?}: what was posted before is live");
        assert_eq!(after(&mut link).1, Filled::Held);
        // The end, twice.
        let mut link = link_in(state);
        link.end();
        link.end();
        assert_eq!(after(&mut link).1, Filled::Held);
    }
}

/// PING and PONG: expected, stale, twice, too early.
#[test]
fn pings_are_answered_once_and_pongs_taken_once() {
    let mut link = link_in(State::Proven);
    link.request_ping();
    assert_eq!(fill(&mut link, &mut VecDeque::new()).1, [FrameKind::Ping]);
    // Stale: the token of the PING before it.
    let stale = LinkError::Malformed(Malformed::Unexpected { kind: "PONG" });
    assert_eq!(receive(&mut link, head(FrameKind::Pong, 0, 1), 0), Err(stale));
    assert!(link.is_pinging());
    assert!(matches!(receive(&mut link, head(FrameKind::Pong, 0, 2), 0), Ok(Incoming::Pong { .. })));
    assert!(!link.is_pinging());
    // Twice.
    assert!(receive(&mut link, head(FrameKind::Pong, 0, 2), 0).unwrap_err().is_fatal());
}

/// M-39: a control frame came on the reserve, so a malformed one gives no credit back.
#[test]
fn a_malformed_control_frame_costs_no_credit() {
    for kind in [FrameKind::Ping, FrameKind::Pong, FrameKind::PureGrant] {
        let mut link = link_in(State::Proven);
        let mut bytes = head(kind, 0, 0).encode();
        bytes[2] = 0b100;
        assert!(matches!(link.on_receive(bytes, 8), Err(LinkError::Malformed(Malformed::Flags { .. }))));
        let long = receive(&mut link, head(kind, 0, 0), 1);
        assert!(matches!(long, Err(LinkError::TooManyMalformed(Malformed::Body { body: 1, .. }))));
        link.on_reposted();
        assert_eq!(link.credits_owed(), 0);
    }
}

/// A bad fragment's credit goes back too, and the frame under way is forgotten.
#[test]
fn a_malformed_fragment_gives_its_credit_back() {
    let mut link = link_in(State::Proven);
    let first = FrameHeader { last: false, ..head(DATA, 0, 0) };
    receive(&mut link, first, 4).unwrap();
    link.partial_mut().extend_from_slice(b"abcd");
    let stray = FrameHeader { first: false, ..head(DATA, 0, 9) };
    let sequence = Malformed::Sequence { found: 9, expected: 4 };
    assert_eq!(receive(&mut link, stray, 1), Err(LinkError::Malformed(sequence)));
    link.on_reposted();
    assert_eq!((link.credits_owed(), link.finish_fragment()), (2, None));
    assert!(receive(&mut link, head(DATA, 0, 0), 0).is_ok());
}

/// Grants: on data, on control frames, pure at half unasked, pure at a quarter when asked hard, none while withheld.
#[test]
fn grants_go_when_they_are_due_and_not_before() {
    type Case<'a> = (u16, GrantWish, &'a [(FrameKind, u8)]);

    let arrive = |link: &mut Link, count, wish| {
        for _ in 0..count {
            receive(link, FrameHeader { wish, ..head(DATA, 0, 0) }, 0).unwrap();
        }
        link.on_reposted();
    };
    let pure = |link: &mut Link| {
        let mut tray = Tray::default();
        link.fill(Instant::now, &mut VecDeque::new(), &mut tray);
        tray.heads.iter().map(|head| (head.kind, head.credits)).collect::<Vec<_>>()
    };
    let cases: [Case<'_>; 6] = [
        (31, GrantWish::None, &[]),
        (31, GrantWish::Soft, &[]),
        (32, GrantWish::None, &[(FrameKind::PureGrant, 32)]),
        (15, GrantWish::Hard, &[]),
        (16, GrantWish::Hard, &[(FrameKind::PureGrant, 16)]),
        (64, GrantWish::Hard, &[(FrameKind::PureGrant, 64)]),
    ];
    for (count, wish, expected) in cases {
        let mut link = link_in(State::Proven);
        arrive(&mut link, count, wish);
        link.set_withhold(true);
        assert_eq!(pure(&mut link), [], "withheld");
        link.set_withhold(false);
        assert_eq!(pure(&mut link), expected, "{count} owed, {wish:?}");
        assert_eq!(pure(&mut link), [], "once");
    }
    // A smaller wish later does not undo a hard one; a grant does.
    let mut link = link_in(State::Proven);
    arrive(&mut link, 1, GrantWish::Hard);
    arrive(&mut link, 15, GrantWish::None);
    assert_eq!(pure(&mut link), [(FrameKind::PureGrant, 16)]);
    arrive(&mut link, 16, GrantWish::Soft);
    assert_eq!(pure(&mut link), []);
    // Not before proof: nothing may go out that needs the peer to be there.
    let mut link = link_in(State::Proving);
    arrive(&mut link, 40, GrantWish::Hard);
    assert_eq!(pure(&mut link), []);
    receive(&mut link, head(FrameKind::Pong, 0, 1), 0).unwrap();
    assert_eq!(pure(&mut link), [(FrameKind::PureGrant, 40)]);
}

/// Crossed dials after which both sides hold: either READY frees both.
#[test]
fn two_accepting_halves_prove_each_other() {
    let mut pair = Pair::new([limits(), limits()], [4, 4]);
    pair.sides[0].link = Link::new(limits(), false);
    pair.sides[0].send(MessageType::Message, 5);
    pair.sides[1].send(MessageType::Message, 5);
    pair.settle();
    assert!(pair.sides.iter().all(|side| side.wire.is_empty() && !side.link.is_proven()));
    pair.sides[1].link.on_peer_ready();
    pair.settle();
    pair.assert_home();
}

/// The send queue at its minimum of 16 WRs: data leaves room for control frames and the marker.
#[test]
fn data_leaves_the_control_frames_their_work_requests() {
    let small = LinkLimits { send_wrs: 16, ..limits() };
    let mut link = Link::new(small, false);
    receive(&mut link, head(FrameKind::Ping, 0, 1), 0).unwrap();
    let mut queue: VecDeque<Frame> = (0..20).map(|id| frame(id, MessageType::Message, 5)).collect();
    let (filled, sent) = fill(&mut link, &mut queue);
    assert_eq!((filled, sent.len(), link.wrs_in_flight()), (Filled::NoWr, 9, 9));
    for _ in 0..64 {
        receive(&mut link, head(DATA, 0, 0), 0).unwrap();
    }
    link.on_reposted();
    link.request_ping();
    receive(&mut link, head(FrameKind::Ping, 0, 2), 0).unwrap();
    let (filled, sent) = fill(&mut link, &mut queue);
    // The PONG carries the whole debt.
    assert_eq!((filled, sent), (Filled::NoWr, vec![FrameKind::Pong, FrameKind::Ping]));
    assert!(link.drain_marker().is_some());
}

/// A proven link that packs, with nothing in flight.
fn packing() -> Link {
    let mut link = Link::new(LinkLimits { packs: true, ..limits() }, true);
    fill(&mut link, &mut VecDeque::new());
    receive(&mut link, head(FrameKind::Pong, 0, 1), 0).unwrap();
    link.on_send_done(WrSeq(0), |_, _| {});
    link
}

/// Frames that wait share SENDs, each as full as it gets; what cannot share goes alone, in its turn.
#[test]
fn frames_that_wait_go_several_to_a_send() {
    const PACK: FrameKind = FrameKind::Pack;
    let sent = |lengths: &[usize], scarce: bool| {
        let mut tray = Tray { scarce, ..Tray::default() };
        let mut queue = (0..).zip(lengths).map(|(id, &bytes)| frame(id, MessageType::Message, bytes)).collect();
        assert_eq!(packing().fill(Instant::now, &mut queue, &mut tray), Filled::Idle);
        tray.heads.iter().map(|head| (head.kind, if head.kind == PACK { head.word } else { 1 })).collect::<Vec<_>>()
    };
    // Each takes 8 bytes for its id and 8 for its entry; a SEND has 8,192 and a fixed header.
    assert_eq!(sent(&[1], false), [(DATA, 1)]);
    assert_eq!(sent(&[1, 2, 0], false), [(PACK, 3)]);
    assert_eq!(sent(&[4076, 4076, 5], false), [(PACK, 2), (DATA, 1)]);
    assert_eq!(sent(&[4076, 4077, 5], false), [(DATA, 1), (PACK, 2)]);
    assert_eq!(sent(&[10_000, 1, 2], false), [(DATA, 1), (DATA, 1), (PACK, 2)]);
    assert_eq!(sent(&[100; 200], false), [(PACK, 70), (PACK, 70), (PACK, 60)]);
    assert_eq!(sent(&[1, 2, 3], true), [(DATA, 1); 3], "slabs that are scarce are not for frames that go inline");
}

/// A packed SEND costs one credit and ends with one completion; its frames end one by one, in order.
#[test]
fn the_frames_of_a_packed_send_end_one_by_one() {
    let batch = |link: &mut Link, ids: std::ops::Range<u64>| {
        let mut queue = ids.map(|id| frame(id, MessageType::Message, 1)).collect();
        link.fill(Instant::now, &mut queue, &mut Tray::default());
        WrSeq(link.next_seq().0 - 1)
    };
    let ids = |ops: &[(InFlight, Ended)]| {
        let id = |frame: &Frame| u64::from_be_bytes(frame.header[..8].try_into().unwrap());
        ops.iter().map(|(op, ended)| (op.frame.as_ref().map(id), op.slab.is_some(), *ended)).collect::<Vec<_>>()
    };
    let new = || {
        let mut link = packing();
        let packs = [batch(&mut link, 0..3), batch(&mut link, 3..5)];
        assert_eq!(link.credits_left(), 64 - 2);
        assert_eq!((link.counts().sends_packed, link.counts().frames_packed), (2, 5));
        (link, packs)
    };
    let all = |range: std::ops::Range<u64>, first: u64, ended| {
        range.map(|id| (Some(id), id == first, ended)).collect::<Vec<_>>()
    };

    let (mut link, [first, second]) = new();
    let mut ops = Vec::new();
    link.on_send_done(first, |op, ended| ops.push((op, ended)));
    link.on_send_failed(second, |op, ended| ops.push((op, ended)));
    assert_eq!(ids(&ops), [all(0..3, 0, Ended::Done), all(3..5, 3, Ended::Failed)].concat());

    // The device takes the first and refuses the second.
    let (mut link, [first, second]) = new();
    let refused: Vec<_> = link.take_back(second).map(|op| (op, Ended::Failed)).collect();
    assert_eq!(ids(&refused), all(3..5, 3, Ended::Failed));
    let mut ops = Vec::new();
    link.on_send_done(first, |op, ended| ops.push((op, ended)));
    assert_eq!(ids(&ops), all(0..3, 0, Ended::Done));

    // No completion comes.
    let (mut link, _) = new();
    let rest: Vec<_> = link.abandon().map(|op| (op, Ended::Failed)).collect();
    assert_eq!(ids(&rest), [all(0..3, 0, Ended::Failed), all(3..5, 3, Ended::Failed)].concat());
    assert!(link.packed_room() >= 3);
    link.trim(0);
    assert_eq!(link.packed_room(), 0);
}

/// What a packed SEND holds is judged whole before a frame of it is taken; its credit goes back all the same.
#[test]
fn a_bad_pack_gives_no_frame() {
    let mut link = link_in(State::Proven);
    let body = [0, 0, 0, 0, 0, 0, 0, 1, 7, 9, 0, 0, 0, 0, 0, 0, 0];
    let got = receive(&mut link, head(FrameKind::Pack, 0, 2), 17);
    assert_eq!(got, Ok(Incoming::Pack { frames: 2, body_len: 17 }));
    let got = link.unpack(2, &body, |packed| panic!("{packed:?}"));
    assert_eq!(got, Err(LinkError::Malformed(Malformed::Type { found: 9 })));
    link.on_reposted();
    assert_eq!(link.credits_owed(), 1);
    // Between the fragments of a frame.
    receive(&mut link, FrameHeader { last: false, ..head(DATA, 0, 0) }, 5).unwrap();
    let got = receive(&mut link, head(FrameKind::Pack, 0, 2), 17);
    assert_eq!(got, Err(LinkError::TooManyMalformed(Malformed::PackWithin { at: 0 })));
}

#[test]
fn short_frames_are_malformed_at_every_length() {
    for bytes in 0..HEADER_BYTES_U32 {
        let mut link = link_in(State::Proven);
        let got = link.on_receive([0; HEADER_BYTES], bytes);
        assert_eq!(got, Err(LinkError::Malformed(Malformed::Short { bytes })));
    }
}

proptest! {
    /// Whatever comes, in whatever order: the short cut of whole frames leaves the link as the long way does.
    #[test]
    fn whole_frames_are_taken_alike(steps in prop::collection::vec((0..9u8, 0..3u8, 0..20u8, any::<bool>()), 1..120)) {
        let small = LinkLimits { tx_window: 16, rx_window: 16, receive_max_bytes: 90, ..limits() };
        let (mut links, now) = ([Link::new(small, false), Link::new(small, false)], Instant::now());
        for (what, wish, credits, repost) in steps {
            // What a peer may do, and what it may not: fragments, lanes, too much of something.
            let wish = [GrantWish::None, GrantWish::Soft, GrantWish::Hard][usize::from(wish)];
            let (first, last) = (what != 5, what != 6);
            let lane = if what == 7 { Lane::Service } else { Lane::Application };
            let word = if what == 8 { 60 } else { 1 };
            let kind = if what == 4 { FrameKind::Data(MessageType::Event) } else { DATA };
            let bytes = HEADER_BYTES_U32 + if what == 3 { 91 } else { 40 };
            let head = FrameHeader { kind, wish, first, last, lane, credits: credits % 5, word }.encode();
            // Some of the window is out, so that grants may be right.
            let [short, long] = &mut links;
            for link in [&mut *short, &mut *long] {
                let mut queue = (0..4).map(|id| frame(id, MessageType::Message, 5)).collect();
                link.fill(|| now, &mut queue, &mut Tray::default());
            }
            prop_assert_eq!(short.on_receive(head, bytes), long.on_any(head, bytes));
            for link in [&mut *short, &mut *long] {
                if repost {
                    link.on_reposted();
                }
                link.on_send_done(WrSeq(link.next_seq().0.wrapping_sub(1)), |_, _| {});
            }
            prop_assert_eq!(format!("{short:?}"), format!("{long:?}"));
        }
    }
}
