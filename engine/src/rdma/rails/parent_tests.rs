//! Every sequence of events, over one, two and three rails, against what is true of the world by the steps alone.

use std::collections::HashSet;

use super::*;

/// What devices and the peer have, told by events and steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct World {
    room: Set,
    bound: Set,
    receipts: Set,
    gone: Set,
    lost: bool,
    refused: bool,
    admitted: bool,
    published: bool,
    commit_due: bool,
    committed: bool,
    acknowledged: bool,
    released: bool,
}

fn events(rails: u8) -> Vec<Event> {
    let mut events = vec![Event::NoRoom, Event::Committed, Event::Lost];
    // One beyond the last, too.
    for rail in 0..=rails {
        events.extend([Event::Room(rail), Event::Bound(rail), Event::Receipt(rail), Event::Gone(rail)]);
    }
    events
}

impl World {
    /// What an event makes true, if the parent was where it belongs. Rails that are beyond the last are nobody's.
    fn before(&mut self, event: Event, all: Set) {
        let bit = |rail: u8| (1 << rail) & all;
        let ended = self.lost || self.refused || self.acknowledged;
        match event {
            Event::Room(rail) if !ended && !self.admitted => self.room |= bit(rail),
            Event::Bound(rail) if !ended && self.admitted && !self.published => self.bound |= bit(rail) & !self.gone,
            Event::Receipt(rail) if !ended && self.published && !self.commit_due => {
                self.receipts |= bit(rail) & !self.gone;
            }
            Event::NoRoom => self.refused |= !ended && !self.admitted,
            Event::Committed => self.committed |= !ended && self.commit_due,
            Event::Lost => self.lost |= !self.acknowledged,
            Event::Gone(rail) => {
                self.gone |= bit(rail) & self.room;
                self.lost |= self.gone != 0 && !self.acknowledged;
            }
            _ => {}
        }
    }

    fn after(&mut self, step: Step, all: Set) {
        let well = !self.lost && !self.refused;
        match step {
            Step::Wait => {}
            Step::Refuse => assert!(self.refused && !self.admitted, "refused before it was admitted, or not at all"),
            Step::Admit => {
                assert!(well && self.room == all && !self.admitted, "all rails have room, or none: {self:?}");
                self.admitted = true;
            }
            Step::Publish => {
                assert!(well && self.bound == all && !self.published, "no right before all are bound: {self:?}");
                self.published = true;
            }
            Step::Commit => {
                assert!(well && self.receipts == all && !self.commit_due, "a receipt of each rail first: {self:?}");
                self.commit_due = true;
            }
            Step::Acknowledge => {
                assert!(well && self.committed && !self.acknowledged, "once, and after the commit: {self:?}");
                self.acknowledged = true;
            }
            Step::Release => {
                assert!(!self.released, "once");
                assert!(self.acknowledged || self.lost || self.refused, "not before its end: {self:?}");
                assert_eq!(self.gone, self.room, "guarded until the last receipt or burial");
                self.released = true;
            }
        }
    }
}

/// The state space is finite: whatever any sequence leads to is visited.
fn explore(rails: u8) -> HashSet<(Parent, World)> {
    let start = (Parent::new(rails.into()), World::default());
    let all = start.0.all;
    let (mut seen, mut work) = (HashSet::from([start]), vec![start]);
    while let Some((parent, world)) = work.pop() {
        for event in events(rails) {
            let (mut next, mut after) = (parent, world);
            after.before(event, all);
            let step = next.on(event);
            after.after(step, all);
            if seen.insert((next, after)) {
                work.push((next, after));
            }
        }
    }
    seen
}

#[test]
fn no_sequence_of_events_breaks_an_invariant() {
    for rails in 1..=3 {
        let seen = explore(rails);
        for (parent, world) in &seen {
            assert_eq!(parent.released, world.released);
            let over = world.acknowledged || world.lost || world.refused;
            // Of one that was refused without any room, the refusal is the last that happens.
            let must = over && world.gone == world.room && world.room != 0;
            assert!(!must || world.released, "nothing holds it any more: {parent:?} {world:?}");
        }
        assert!(seen.iter().any(|(_, world)| world.acknowledged && world.released && !world.lost), "it can end well");
        assert!(seen.iter().any(|(_, world)| world.published && world.lost && world.released), "and badly");
        assert!(seen.iter().any(|(_, world)| world.lost && world.gone != world.room && !world.released), "and waits");
    }
}

/// Whatever has happened: when it is given up, and each rail that had room is gone, it lets go.
#[test]
fn every_parent_ends_without_the_peer() {
    for rails in 1..=3 {
        for (mut parent, _) in explore(rails) {
            parent.on(Event::Lost);
            (0..rails).for_each(|rail| {
                parent.on(Event::Gone(rail));
            });
            assert!(parent.released, "{parent:?}");
        }
    }
}

#[test]
fn a_good_life_over_three_rails_whose_receipts_come_in_any_order() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let mut parent = Parent::new(3);
        let mut each = |event: fn(u8) -> Event, last: Step| {
            let steps = order.map(|rail| parent.on(event(rail)));
            assert_eq!(steps, [Step::Wait, Step::Wait, last]);
        };
        each(Event::Room, Step::Admit);
        each(Event::Bound, Step::Publish);
        each(Event::Receipt, Step::Commit);
        assert_eq!(parent.on(Event::Committed), Step::Acknowledge);
        assert_eq!(parent.on(Event::Committed), Step::Wait, "once");
        assert_eq!(order.map(|rail| parent.on(Event::Gone(rail))), [Step::Wait, Step::Wait, Step::Release]);
        assert_eq!(parent.on(Event::Lost), Step::Wait, "it has ended well");
    }
}

#[test]
fn one_missing_receipt_keeps_the_whole_range() {
    let mut parent = Parent::new(2);
    for rail in [0, 1] {
        parent.on(Event::Room(rail));
    }
    for rail in [0, 1] {
        parent.on(Event::Bound(rail));
    }
    assert_eq!(parent.on(Event::Receipt(0)), Step::Wait);
    assert_eq!(parent.on(Event::Lost), Step::Wait, "the other rail's QP lives");
    assert_eq!(parent.on(Event::Gone(0)), Step::Wait);
    assert_eq!(parent.on(Event::Receipt(1)), Step::Wait, "too late");
    assert_eq!(parent.on(Event::Gone(1)), Step::Release);
}

/// Every sequence of what a requester does, up to six steps: what it may have done, and whether it may go again.
#[test]
fn a_read_goes_again_before_done_and_a_write_before_its_first_post() {
    type Do = fn(&mut Progress);
    let steps: [(u8, Do); 3] = [(1, Progress::posting), (2, Progress::telling), (4, Progress::acknowledged)];
    for direction in [Direction::Read, Direction::Write] {
        let mut work = vec![(Progress::new(direction), 0_u8, 0)];
        while let Some((progress, happened, depth)) = work.pop() {
            let (posted, told, acknowledged) = (happened & 1 != 0, happened & 2 != 0, happened & 4 != 0);
            let effect = match direction {
                Direction::Write if acknowledged => RemoteEffect::Committed,
                Direction::Write if posted => RemoteEffect::Unknown,
                _ => RemoteEffect::None,
            };
            assert_eq!(progress.effect(), effect);
            let writes = direction == Direction::Write && posted;
            assert_eq!(progress.may_go_again(), !told && !acknowledged && !writes, "{progress:?}");
            if depth < 6 {
                for (what, step) in steps {
                    let mut next = progress;
                    step(&mut next);
                    work.push((next, happened | what, depth + 1));
                }
            }
        }
    }
}
