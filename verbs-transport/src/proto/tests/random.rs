//! Random interleavings: sums at every step, and freedom from deadlock at the end.

use proptest::prelude::*;

use super::pair::{Fate, Pair};
use crate::proto::{
    frame::MessageType,
    link::{Filled, LinkLimits},
    send_queue::Ended,
};

#[derive(Clone, Copy, Debug)]
enum Op {
    Send { at: usize, kind: usize, bytes: usize },
    Pump(usize),
    Deliver { at: usize, count: usize },
    Repost(usize),
    Complete { at: usize, count: usize },
    Withhold(usize, bool),
    Ping(usize),
    ProbeTail(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let at = || 0usize..2;
    prop_oneof![
        6 => (at(), 0usize..5, prop_oneof![4 => 0usize..80, 1 => 80usize..700])
            .prop_map(|(at, kind, bytes)| Op::Send { at, kind, bytes }),
        4 => at().prop_map(Op::Pump),
        4 => (at(), 1usize..20).prop_map(|(at, count)| Op::Deliver { at, count }),
        2 => at().prop_map(Op::Repost),
        2 => (at(), 1usize..4).prop_map(|(at, count)| Op::Complete { at, count }),
        1 => (at(), any::<bool>()).prop_map(|(at, withhold)| Op::Withhold(at, withhold)),
        1 => at().prop_map(Op::Ping),
        1 => at().prop_map(Op::ProbeTail),
    ]
}

/// Both sides' numbers, and their slabs: windows of 8 to 64, inline from none to all, pools from one slab.
fn world() -> impl Strategy<Value = ([LinkLimits; 2], [usize; 2])> {
    let window = || prop_oneof![Just(8u16), 8u16..64, Just(64)];
    let own = || {
        (
            prop_oneof![Just(0u32), Just(8), Just(64), Just(220)],
            prop_oneof![Just(16u32), Just(17), Just(63)],
            (prop_oneof![Just(1u32), Just(4), Just(16), Just(256)], any::<bool>()),
            prop_oneof![Just(1usize), Just(2), Just(3), Just(8), Just(64)],
        )
    };
    (window(), window(), own(), own()).prop_map(|(to_b, to_a, a, b)| {
        let limits =
            |tx_window,
             rx_window,
             (inline_bytes, send_wrs, (signal_every, packs), _): (u32, u32, (u32, bool), usize)| {
                LinkLimits {
                    tx_window,
                    rx_window,
                    send_bytes: 64,
                    inline_bytes,
                    receive_max_bytes: 4096,
                    send_wrs,
                    signal_every,
                    packs,
                }
            };
        ([limits(to_b, to_a, a), limits(to_a, to_b, b)], [a.3, b.3])
    })
}

impl Pair {
    fn step(&mut self, op: Op) {
        match op {
            Op::Send { at, kind, bytes } => self.sides[at].send(MessageType::ALL[kind], bytes),
            Op::Pump(at) => {
                self.pump(at);
            }
            Op::Deliver { at, count } => {
                for _ in 0..count {
                    self.deliver(at);
                    // The worker pumps a peer with news at the end of a batch, before or after the slabs go back.
                }
                self.pump(at);
            }
            Op::Repost(at) => {
                self.sides[at].repost();
                self.pump(at);
            }
            Op::Complete { at, count } => {
                for _ in 0..count {
                    self.sides[at].complete();
                }
                self.pump(at);
            }
            Op::Withhold(at, withhold) => {
                self.sides[at].link.set_withhold(withhold);
                self.pump(at);
            }
            Op::Ping(at) => {
                self.sides[at].link.request_ping();
                self.pump(at);
            }
            Op::ProbeTail(at) => {
                let now = self.now;
                self.sides[at].probe_tail(now);
            }
        }
        self.check();
    }

    fn withhold(&mut self, withhold: bool) {
        for side in &mut self.sides {
            side.link.set_withhold(withhold);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Whatever happened before: once nobody withholds, everything that is queued goes out, arrives once and in order,
    /// and every slab, credit and operation comes home. From the first PING on.
    #[test]
    fn everything_arrives_and_comes_home_whatever_the_interleaving(
        world in world(),
        ops in prop::collection::vec(op(), 0..120),
    ) {
        let mut pair = Pair::new(world.0, world.1);
        for op in ops {
            pair.step(op);
        }
        pair.withhold(false);
        let probes = pair.settle();
        prop_assert!(probes <= 40, "{} looks at bare tails", probes);
        pair.assert_home();
    }

    /// While a side withholds, its peer stops for want of credits and of nothing else; when it releases, all goes on.
    #[test]
    fn a_withheld_side_stops_its_peer_at_zero_and_no_other_thing(
        world in world(),
        who in 0usize..3,
        frames in prop::collection::vec((0usize..2, 0usize..300), 1..150),
    ) {
        let mut pair = Pair::proven(world.0, world.1);
        for at in 0..2 {
            pair.sides[at].link.set_withhold(who == at || who == 2);
        }
        for &(at, bytes) in &frames {
            pair.sides[at].send(MessageType::Message, bytes);
        }
        pair.settle();
        for at in 0..2 {
            let stuck = !pair.sides[at].queue.is_empty();
            let withheld = who == 1 - at || who == 2;
            prop_assert!(!stuck || (withheld && pair.sides[at].link.credits_left() == 0));
            // Held back, yet alive: the reserve carries a PING either way.
            pair.sides[at].link.request_ping();
        }
        pair.settle();
        prop_assert!(pair.sides.iter().all(|side| side.link.counts().pongs >= 1 && !side.link.is_pinging()));
        pair.withhold(false);
        pair.settle();
        pair.assert_home();
    }

    /// The QP of one side dies at any moment: every frame ends once, none is called done that did not arrive, every
    /// slab comes home, with or without the device's flushes.
    #[test]
    fn a_breakdown_ends_every_operation_once(
        world in world(),
        ops in prop::collection::vec(op(), 0..100),
        acked in prop::array::uniform2(0usize..30),
        lost in any::<bool>(),
    ) {
        let mut pair = Pair::new(world.0, world.1);
        for op in ops {
            pair.step(op);
        }
        for (at, acked) in acked.into_iter().enumerate() {
            pair.sides[at].break_down(acked, lost);
            prop_assert_eq!(pair.sides[at].pool.len(), world.1[at]);
            prop_assert_eq!(pair.pump(at), Filled::Held, "nothing goes out after the end");
        }
        // What was acknowledged has arrived, and may be taken after the end.
        for at in 0..2 {
            while pair.deliver(at) {}
        }
        for at in 0..2 {
            for (id, fate) in &pair.sides[at].fates {
                prop_assert_ne!(*fate, Fate::Waiting, "frame {} has no end", id);
                if *fate == Fate::Ended(Ended::Done) {
                    prop_assert!(pair.sides[1 - at].received.contains(id), "frame {} was never there", id);
                }
            }
        }
    }
}

/// Both windows spent at once, nothing under way but what fills them: each frees the other.
#[test]
fn both_sides_at_zero_free_each_other() {
    for (to_b, to_a) in [(8, 8), (8, 64), (64, 8), (64, 64), (9, 11)] {
        let base = LinkLimits { send_wrs: 255, ..super::limits() };
        let a = LinkLimits { tx_window: to_b, rx_window: to_a, ..base };
        let b = LinkLimits { tx_window: to_a, rx_window: to_b, ..base };
        let mut pair = Pair::proven([a, b], [8, 8]);
        for at in 0..2 {
            for _ in 0..200 {
                pair.sides[at].send(MessageType::Message, 10);
            }
            assert_eq!(pair.pump(at), Filled::NoCredit);
            assert_eq!(pair.sides[at].link.credits_left(), 0);
        }
        pair.settle();
        pair.assert_home();
        // B pumps only after A's frames are in its slabs, so its data carries the grants: piggybacked, not pure.
        assert!(pair.sides.iter().all(|side| side.link.counts().credit_stalls > 0));
    }
}

/// A stall counts once, however often the queue is looked at meanwhile.
#[test]
fn a_stall_is_counted_once() {
    let mut pair = Pair::proven([LinkLimits { send_wrs: 255, ..super::limits() }; 2], [8, 8]);
    for _ in 0..70 {
        pair.sides[0].send(MessageType::Message, 1);
    }
    for _ in 0..5 {
        assert_eq!(pair.pump(0), Filled::NoCredit);
    }
    assert_eq!(pair.sides[0].link.counts().credit_stalls, 1);
    pair.drain();
    assert_eq!(pair.sides[0].link.counts().credit_stalls, 1);
}

/// An idle connection is silent: its tails come to rest after one PING a side.
#[test]
fn tails_come_to_rest() {
    for inline_bytes in [0, 220] {
        let mut pair = Pair::proven([LinkLimits { inline_bytes, ..super::limits() }; 2], [4, 4]);
        pair.sides[0].send(MessageType::Message, 1);
        pair.sides[1].send(MessageType::Response, 1);
        assert!(pair.settle() <= 2);
        let pings: u64 = pair.sides.iter().map(|side| side.link.counts().pings).sum();
        assert!(pings <= 3, "the proof and at most one a side: {pings}");
        pair.assert_home();
    }
}
