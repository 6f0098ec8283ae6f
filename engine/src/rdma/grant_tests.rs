//! Every state and event, every sequence of events, and every interleaving of two grants.

use std::collections::{HashMap, HashSet};

use super::*;

const KEYS: [u32; 2] = [0x111, 0x222];
const QPS: [u32; 2] = [7, 8];
const GENERATIONS: [u64; 2] = [(1 << 32) + 5, 6];

/// What the world can do to a grant, grants of others included.
fn events() -> Vec<Event> {
    let mut events = vec![
        Event::Bind,
        Event::BindFailed,
        Event::Abandon { usable: true },
        Event::Abandon { usable: false },
        Event::Revoked,
        Event::RevokeFailed,
        Event::QpGone,
    ];
    events.extend(KEYS.map(|key| Event::Bound { key }));
    for qpn in QPS {
        events.extend(KEYS.map(|key| Event::Receipt { qpn, marker: Marker::Invalidated(key) }));
        events.extend(GENERATIONS.map(|generation| {
            let marker = Marker::Immediate(u32::try_from(generation & 0xffff_ffff).expect("32 bits"));
            Event::Receipt { qpn, marker }
        }));
    }
    events
}

/// What is true of a device and a peer, told by the steps alone: the model that the machine is held against.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct World {
    bind_asked: bool,
    bound: Option<u32>,
    published: bool,
    right_receipt: bool,
    invalidated_by_us: bool,
    unbound: bool,
    qp_doomed: bool,
    qp_gone: bool,
    released: Option<bool>,
}

impl World {
    fn before(&mut self, grant: &Grant, event: Event) {
        match event {
            Event::Bound { key } if grant.state() == State::Binding => self.bound = Some(key),
            Event::Receipt { qpn, marker } => {
                let right = match grant.form {
                    Form::Registration => Marker::Immediate(5),
                    Form::Window => Marker::Invalidated(self.bound.unwrap_or(0)),
                };
                let alive = grant.state() == State::Published;
                self.right_receipt |= alive && qpn == QPS[0] && marker == right;
            }
            Event::Revoked => match grant.state() {
                State::Revoking(Revoking::Invalidating) => self.invalidated_by_us = true,
                State::Revoking(Revoking::Unbinding { .. }) => self.unbound = true,
                _ => {}
            },
            Event::QpGone => self.qp_gone = true,
            _ => {}
        }
    }

    fn after(&mut self, form: Form, step: Step) {
        assert!(self.released.is_none() || step == Step::Wait, "a dead grant does nothing: {step:?}");
        match step {
            Step::Wait => {}
            Step::Bind => {
                assert!(!self.bind_asked, "bound once");
                self.bind_asked = true;
            }
            Step::Publish => {
                assert!(self.bound.is_some(), "published before its bind completed");
                assert!(!self.published && !self.qp_doomed, "published twice, or on a QP that is going");
                self.published = true;
            }
            Step::Invalidate => {
                assert_eq!(form, Form::Window);
                assert!(!self.right_receipt, "the peer has invalidated it");
            }
            Step::Unbind => assert!(self.qp_gone || self.right_receipt, "taken away under a peer that may use it"),
            Step::DestroyQp => self.qp_doomed = true,
            Step::Release(ending) => {
                let used = ending == Ending::Used;
                assert_eq!(used, self.right_receipt, "commit if and only if the right receipt came");
                let barrier = match form {
                    Form::Registration => self.unbound || self.bound.is_none(),
                    Form::Window => self.right_receipt || self.invalidated_by_us || self.unbound || !self.bind_asked,
                };
                assert!(barrier, "released while the device may reach it: {self:?}");
                self.released = Some(used);
            }
        }
    }
}

type Node = (State, Option<u32>, World);

/// Visits whatever any sequence of events leads to. The state space is finite, so this is every sequence.
fn explore(form: Form) -> HashSet<Node> {
    let start = Grant::new(form, GENERATIONS[0], QPS[0]);
    let mut seen = HashSet::from([(start.state, start.key, World::default())]);
    let mut work = vec![(start, World::default())];
    while let Some((grant, world)) = work.pop() {
        for event in events() {
            // A QP that is gone gives no receipts, and its bind completes no more.
            let from_qp = matches!(event, Event::Receipt { qpn, .. } if qpn == QPS[0]);
            if world.qp_gone && (from_qp || matches!(event, Event::Bound { .. } | Event::BindFailed)) {
                continue;
            }
            let (mut next, mut after) = (grant, world);
            after.before(&grant, event);
            let step = next.on(event);
            after.after(form, step);
            assert_eq!(matches!(step, Step::Release(_)), next.state == State::Dead && grant.state != State::Dead);
            if seen.insert((next.state, next.key, after)) {
                work.push((next, after));
            }
        }
    }
    seen
}

#[test]
fn no_sequence_of_events_breaks_an_invariant() {
    for form in [Form::Registration, Form::Window] {
        let seen = explore(form);
        let states: HashSet<State> = seen.iter().map(|(state, ..)| *state).collect();
        assert!(states.contains(&State::Dead) && states.contains(&State::Published));
        for (_, _, world) in seen.iter().filter(|(state, ..)| *state == State::Dead) {
            assert!(world.released.is_some());
        }
        assert!(seen.iter().any(|(.., world)| world.released == Some(true)), "it can end well");
        assert!(seen.iter().any(|(.., world)| world.released == Some(false)), "and badly");
    }
}

/// From every reachable state the device's own answers lead to the end, whatever the peer does.
#[test]
fn every_grant_ends_without_the_peer() {
    for form in [Form::Registration, Form::Window] {
        for (state, key, _) in explore(form) {
            let mut grant = Grant { form, generation: GENERATIONS[0], qpn: QPS[0], key, state };
            let mut step = grant.on(Event::Abandon { usable: false });
            for _ in 0..4 {
                step = match step {
                    Step::DestroyQp => grant.on(Event::QpGone),
                    Step::Unbind | Step::Invalidate => grant.on(Event::Revoked),
                    // Its step was taken before: the answer to that is what is due.
                    Step::Wait => match grant.state {
                        State::Revoking(Revoking::Destroying { .. }) => grant.on(Event::QpGone),
                        State::Revoking(_) => grant.on(Event::Revoked),
                        _ => step,
                    },
                    other => other,
                };
            }
            assert_eq!(grant.state, State::Dead, "{form:?} from {state:?}");
        }
    }
}

/// Two grants on two QPs; each event goes to the one it belongs to, and receipts, right and wrong, to both QPs in every
/// order. Neither ever ends by what is meant for the other.
#[test]
fn two_grants_in_every_order_do_not_touch_each_other() {
    #[derive(Clone, Copy, PartialEq, Eq)]
    struct Pair([Grant; 2]);
    let receipts = |form: Form, of: usize| match form {
        Form::Registration => Marker::Immediate(marker_of(GENERATIONS[of])),
        Form::Window => Marker::Invalidated(KEYS[of]),
    };
    for forms in [[Form::Registration; 2], [Form::Window; 2], [Form::Registration, Form::Window]] {
        let start = Pair([0, 1].map(|at| Grant::new(forms[at], GENERATIONS[at], QPS[at])));
        // What each grant saw: its own receipt on its own QP, while it was published.
        let mut seen: HashMap<(State, State, [bool; 2]), Pair> = HashMap::new();
        let mut work = vec![(start, [false; 2])];
        while let Some((pair, used)) = work.pop() {
            for at in [0, 1] {
                let own = [
                    Event::Bind,
                    Event::Bound { key: KEYS[at] },
                    Event::BindFailed,
                    Event::Abandon { usable: true },
                    Event::Abandon { usable: false },
                    Event::Revoked,
                    Event::RevokeFailed,
                    Event::QpGone,
                ];
                // On its QP come the markers of either grant.
                let arriving = [0, 1].map(|of| Event::Receipt { qpn: QPS[at], marker: receipts(forms[of], of) });
                for event in own.into_iter().chain(arriving) {
                    let (mut next, mut used) = (pair, used);
                    let right = event == arriving[at] && pair.0[at].state == State::Published;
                    used[at] |= right;
                    let step = next.0[at].on(event);
                    if step == Step::Release(Ending::Used) {
                        assert!(used[at], "it ended by a receipt that was not its own");
                    }
                    assert_eq!(next.0[1 - at], pair.0[1 - at], "the other is as it was");
                    let key = (next.0[0].state, next.0[1].state, used);
                    if seen.insert(key, next).is_none() {
                        work.push((next, used));
                    }
                }
            }
        }
        assert!(seen.contains_key(&(State::Dead, State::Dead, [true; 2])), "both can end well");
        assert!(seen.contains_key(&(State::Dead, State::Dead, [true, false])));
    }
}

#[test]
fn a_good_life() {
    let mut grant = Grant::new(Form::Registration, GENERATIONS[0], 7);
    assert_eq!(grant.on(Event::Bind), Step::Bind);
    assert_eq!(grant.on(Event::Bound { key: 3 }), Step::Publish);
    assert_eq!((grant.key(), grant.marker()), (Some(3), Some(Marker::Immediate(5))));
    assert_eq!(grant.on(Event::Receipt { qpn: 7, marker: Marker::Immediate(5) }), Step::Unbind);
    assert_eq!(grant.on(Event::Revoked), Step::Release(Ending::Used));
    let second_use = grant.on(Event::Receipt { qpn: 7, marker: Marker::Immediate(5) });
    assert_eq!((second_use, grant.state()), (Step::Wait, State::Dead));
}

#[test]
fn a_wrong_receipt_costs_the_qp() {
    for (qpn, marker) in
        [(8, Marker::Immediate(5)), (7, Marker::Immediate(6)), (7, Marker::Invalidated(3)), (7, Marker::Invalidated(5))]
    {
        let mut grant = Grant::new(Form::Registration, GENERATIONS[0], 7);
        grant.on(Event::Bind);
        grant.on(Event::Bound { key: 3 });
        assert_eq!(grant.on(Event::Receipt { qpn, marker }), Step::DestroyQp, "{qpn} {marker:?}");
        assert_eq!(grant.on(Event::QpGone), Step::Unbind);
        assert_eq!(grant.on(Event::RevokeFailed), Step::Unbind, "kept, and tried again");
        assert_eq!(grant.on(Event::Revoked), Step::Release(Ending::Abandoned));
    }
}
