//! Every frame at every point, by either side, once and twice, and with each name wrong.

use verbs_bootstrap::{Psn, QpEndpoint, Qpn};

use super::{
    super::{
        grant::Form,
        identity::{Digest, Incarnation},
        path::tests::end,
        wire::GrantTerms,
    },
    *,
};

fn identity() -> Identity {
    Identity {
        source_epoch: [1; 16],
        requester_epoch: [2; 16],
        source_pd: Incarnation([3; 16]),
        requester_pd: Incarnation([4; 16]),
        source_link: Incarnation([5; 16]),
        requester_link: Incarnation([6; 16]),
        request: 7,
        digest: Digest([8; 16]),
        generation: 9,
    }
}

fn body(kind: Kind) -> Body {
    let qp = QpEndpoint { qpn: Qpn::new(17).expect("24 bits"), psn: Psn::new(5).expect("24 bits") };
    let mut requester = end(1);
    requester.pd = Incarnation([4; 16]);
    match kind {
        Kind::Select => Body::Select { path: 0, end: requester },
        Kind::Admit => Body::Admit,
        Kind::RequesterQp => Body::RequesterQp(qp),
        Kind::SourceQp => Body::SourceQp(qp),
        Kind::Connected => Body::Connected,
        Kind::Grant => {
            let terms = GrantTerms { form: Form::Registration, key: 1, address: 4096, length: 64, valid_ms: 5000 };
            Body::Grant(terms)
        }
        Kind::Done => Body::Done,
        Kind::Ack => Body::Ack,
        Kind::Ready => Body::Ready,
    }
}

fn frame(kind: Kind) -> Frame {
    Frame { identity: identity(), body: body(kind) }
}

/// `side` after the first `done` frames.
fn at(side: Side, done: usize) -> Exchange {
    let mut exchange = Exchange::new(side, identity());
    for kind in Kind::ALL.into_iter().take(done) {
        if speaker(kind) == side {
            exchange.say(body(kind)).expect("its turn");
        } else {
            exchange.hear(&frame(kind)).expect("its turn");
        }
    }
    exchange
}

#[test]
fn each_point_takes_one_frame_from_one_side() {
    for side in [Side::Source, Side::Requester] {
        for done in 0..=Kind::ALL.len() {
            for (place, kind) in Kind::ALL.into_iter().enumerate() {
                let due = place == done;
                let by_us = speaker(kind) == side;
                let (mut says, mut hears) = (at(side, done), at(side, done));
                assert_eq!(says.say(body(kind)).is_ok(), due && by_us, "{side:?} says {kind:?} after {done}");
                let heard = hears.hear(&frame(kind));
                assert_eq!(heard.is_ok(), due && !by_us, "{side:?} hears {kind:?} after {done}");
                if let Err(error) = heard {
                    let due = Kind::ALL.get(done).map_or(0, |kind| *kind as u8);
                    assert_eq!(error, WireError::OutOfTurn { found: kind as u8, due }, "a repeat, or too early");
                } else {
                    assert!(hears.hear(&frame(kind)).is_err(), "twice");
                }
            }
        }
        assert!(at(side, 9).is_over() && !at(side, 8).is_over());
    }
}

#[test]
fn each_name_is_checked_in_each_frame() {
    type Change = fn(&mut Identity);
    let wrong: [(&str, Change); 9] = [
        ("source epoch", |id| id.source_epoch[15] ^= 1),
        ("requester epoch", |id| id.requester_epoch[0] ^= 1),
        ("source protection domain", |id| id.source_pd.0[3] ^= 1),
        ("requester protection domain", |id| id.requester_pd.0[3] ^= 1),
        ("source connection", |id| id.source_link.0[3] ^= 1),
        ("requester connection", |id| id.requester_link.0[3] ^= 1),
        ("request number", |id| id.request += 1),
        ("request digest", |id| id.digest.0[15] ^= 0x80),
        ("grant generation", |id| id.generation += 1),
    ];
    for (done, kind) in Kind::ALL.into_iter().enumerate() {
        let listener = if speaker(kind) == Side::Source { Side::Requester } else { Side::Source };
        for (field, change) in wrong {
            let mut foreign = frame(kind);
            change(&mut foreign.identity);
            let mut exchange = at(listener, done);
            assert_eq!(exchange.hear(&foreign), Err(WireError::Foreign { field }), "{kind:?}");
            exchange.hear(&frame(kind)).expect("the wrong one changed nothing");
        }
    }
}

#[test]
fn a_choice_is_one_of_the_paths_that_were_offered() {
    let mut offered = end(9);
    offered.pd = Incarnation([3; 16]);
    let fresh = Identity { source_pd: Incarnation::NONE, requester_pd: Incarnation::NONE, ..identity() };
    let source = || Exchange::new(Side::Source, fresh);
    let (place, other) = source().hear_choice(&frame(Kind::Select), &[offered]).expect("the first");
    assert_eq!((place, other.pd), (0, Incarnation([4; 16])));
    assert_eq!(source().hear_choice(&frame(Kind::Select), &[]), Err(WireError::Foreign { field: "path" }));
    let pinned = source().hear_choice(&frame(Kind::Select), &[end(9)]);
    assert_eq!(pinned, Err(WireError::Foreign { field: "source protection domain" }), "another one than was offered");
    assert!(source().hear_choice(&frame(Kind::Done), &[offered]).is_err());
    let mut requester = Exchange::new(Side::Requester, fresh);
    requester.choose(Incarnation([3; 16]), Incarnation([4; 16]));
    assert_eq!(requester.say(body(Kind::Select)).map(|frame| frame.identity), Ok(identity()));
}

#[test]
fn a_kept_pair_begins_with_a_newer_grant() {
    for (found, fine) in [(0, false), (8, false), (9, true), (u64::MAX, true)] {
        let unknown = Identity { generation: 0, ..identity() };
        let mut requester = Exchange::again(Side::Requester, unknown, 8);
        let told = Frame { identity: Identity { generation: found, ..identity() }, body: body(Kind::Grant) };
        assert_eq!(requester.hear(&told).is_ok(), fine, "{found} after 8");
        if fine {
            assert_eq!(requester.identity().generation, found);
            let again = Frame { body: body(Kind::Ack), ..told };
            requester.say(Body::Done).expect("its turn");
            requester.hear(&again).expect("the same generation");
        }
    }
    let mut early = Exchange::again(Side::Source, identity(), 8);
    assert!(early.hear(&frame(Kind::Done)).is_err(), "before the grant");
    early.say(body(Kind::Grant)).expect("its turn");
}

#[test]
fn effects_follow_what_was_posted_and_acknowledged() {
    for done in 0..=Kind::ALL.len() {
        let mut exchange = at(Side::Requester, done);
        assert_eq!(exchange.effect(Direction::Read), RemoteEffect::None);
        let acknowledged = done >= 8;
        let before = if acknowledged { RemoteEffect::Committed } else { RemoteEffect::None };
        assert_eq!(exchange.effect(Direction::Write), before, "nothing posted, {done} frames");
        exchange.posting();
        assert_eq!(exchange.effect(Direction::Read), RemoteEffect::None);
        let after = if acknowledged { RemoteEffect::Committed } else { RemoteEffect::Unknown };
        assert_eq!(exchange.effect(Direction::Write), after, "posted, {done} frames");
    }
}

/// Over several rails each goes from the requester's QP to DONE, or from its grant if it is kept; the rest is said once.
#[test]
fn rails_and_their_parent_have_their_frames_and_no_others() {
    type Start = fn(Side) -> Exchange;
    let cases: [(Start, std::ops::Range<usize>); 3] = [
        (|side| Exchange::rail(side, identity(), false), 2..7),
        (|side| Exchange::rail(side, identity(), true), 5..7),
        (|side| Exchange::parent(side, identity()), 7..9),
    ];
    for (start, course) in cases {
        for side in [Side::Source, Side::Requester] {
            let mut exchange = start(side);
            for done in course.clone() {
                for (place, kind) in Kind::ALL.into_iter().enumerate() {
                    let (mut says, mut hears) = (exchange, exchange);
                    let by_us = speaker(kind) == side;
                    assert_eq!(says.say(body(kind)).is_ok(), place == done && by_us, "{kind:?} after {done}");
                    assert_eq!(hears.hear(&frame(kind)).is_ok(), place == done && !by_us, "{kind:?} after {done}");
                }
                assert!(!exchange.is_over());
                let kind = Kind::ALL[done];
                let said = if speaker(kind) == side {
                    exchange.say(body(kind)).map(drop)
                } else {
                    exchange.hear(&frame(kind)).map(drop)
                };
                said.expect("its turn");
            }
            assert!(exchange.is_over());
            assert!(
                Kind::ALL
                    .into_iter()
                    .all(|kind| exchange.say(body(kind)).is_err() && exchange.hear(&frame(kind)).is_err())
            );
        }
    }
}
