//! Every state that an executor and the outside world can bring a batch into, and the transitions one by one.

use std::collections::{HashMap, HashSet, VecDeque, hash_map::Entry};

use super::*;
use crate::Phase;

const READ: Mode = Mode { direction: Direction::Read, profile: Profile::Staged };
const WRITE: Mode = Mode { direction: Direction::Write, profile: Profile::Staged };

fn error() -> TransferError {
    TransferError::Disconnected { phase: Phase::Reply }
}

fn timeout() -> TransferError {
    TransferError::TimedOut { phase: Phase::Reply }
}

fn failure(error: TransferError, effect: RemoteEffect) -> Result<u64, Failure> {
    Err(Failure::with(error, effect))
}

fn states(core: &BatchCore) -> Vec<TaskState> {
    core.tasks.iter().map(|task| task.state).collect()
}

use TaskState::{Cancelled, Completed, Failed, NotAttempted, Pending, TimedOut};

#[test]
fn an_empty_batch_is_complete_and_an_empty_group_notifies_nobody() {
    let mut core = BatchCore::new(0);
    assert_eq!(core.status().state, BatchState::Completed);
    let (group, tasks) = core.submit(0, WRITE, true);
    assert_eq!((group, tasks), (0, 0..0));
    assert!(matches!(core.status().notifications[..], [NotificationStatus::Skipped]));
    assert!(!core.is_complete(0) && !core.may_be_freed(), "it is held until released");
    core.release();
    assert!(core.may_be_freed());
}

#[test]
fn capacity_is_all_or_nothing() {
    let mut core = BatchCore::new(3);
    assert_eq!(core.check_room(4), Err(Full { capacity: 3, taken: 0 }));
    core.submit(2, READ, false);
    assert_eq!(core.check_room(2), Err(Full { capacity: 3, taken: 2 }));
    assert_eq!(core.check_room(1), Ok(()));
    assert_eq!(core.submit(1, READ, false), (1, 2..3), "numbered on");
    assert_eq!(core.check_room(0), Ok(()));
}

#[test]
fn a_failure_leaves_what_is_behind_unattempted_in_its_group_only() {
    let mut core = BatchCore::new(8);
    core.submit(3, WRITE, true);
    core.submit(1, WRITE, false);
    for task in 0..2 {
        assert!(core.start(task, 1) && core.post(task));
        core.resolve(task, if task == 0 { Ok(5) } else { failure(error(), RemoteEffect::Unknown) });
    }
    assert_eq!(states(&core), [Completed, Failed, NotAttempted, Pending]);
    let status = core.status();
    assert_eq!((status.state, status.completed, status.bytes), (BatchState::Pending, 1, 5));
    assert!(matches!(status.notifications[..], [NotificationStatus::Skipped, NotificationStatus::NotRequested]));
    let effects: Vec<_> = (0..3).map(|task| core.task(task).expect("there").effect).collect();
    assert_eq!(effects, [RemoteEffect::Committed, RemoteEffect::Unknown, RemoteEffect::None]);
    assert!(!core.start(2, 1), "final is final");
    assert!(core.start(3, 1));
}

#[test]
fn two_slices_one_cancelled_end_when_the_posted_one_does() {
    let mut core = BatchCore::new(1);
    core.submit(1, WRITE, false);
    assert!(core.start(0, 2) && core.post(0));
    core.cancel();
    core.cancel();
    assert!(!core.post(0), "the second is suppressed");
    assert_eq!(states(&core), [Pending], "the first is under way");
    core.resolve(0, Ok(7));
    assert_eq!(states(&core), [Cancelled]);
    let task = core.task(0).expect("there");
    assert_eq!((task.bytes, task.effect), (7, RemoteEffect::Unknown), "some of the peer's bytes changed");
}

#[test]
fn a_task_that_is_all_posted_may_complete_in_spite_of_a_cancel() {
    let mut core = BatchCore::new(2);
    core.submit(2, READ, false);
    assert!(core.start(0, 1) && core.post(0));
    core.cancel();
    assert_eq!(states(&core), [Pending, Cancelled], "what has not begun is cancelled at once");
    core.resolve(0, Ok(3));
    assert_eq!(states(&core), [Completed, Cancelled]);
    assert_eq!(core.status().state, BatchState::Cancelled);
}

#[test]
fn one_task_cancelled_before_it_begins_stops_those_behind_it() {
    let mut core = BatchCore::new(4);
    core.submit(4, READ, false);
    assert!(core.start(0, 1) && core.post(0));
    core.cancel_task(2);
    assert_eq!(states(&core), [Pending, Pending, Cancelled, NotAttempted]);
    core.resolve(0, Ok(1));
    assert!(core.start(1, 1), "what is ahead goes on");
}

#[test]
fn a_deadline_ends_a_task_whose_slices_are_still_out() {
    let mut core = BatchCore::new(3);
    core.submit(3, WRITE, true);
    assert!(core.start(0, 1) && core.post(0));
    core.expire(0, &timeout());
    assert_eq!(states(&core), [TimedOut, NotAttempted, NotAttempted]);
    assert_eq!(core.task(0).expect("there").effect, RemoteEffect::Unknown, "it was posted");
    assert!(core.status().is_finished() && !core.locally_drained() && !core.may_be_freed());
    core.resolve(0, Ok(9));
    let task = core.task(0).expect("there");
    assert_eq!((task.state, task.bytes, task.effect), (TimedOut, 0, RemoteEffect::Unknown), "never revived");
    core.release();
    assert!(core.may_be_freed());
    core.expire(0, &timeout());
    assert_eq!(states(&core), [TimedOut, NotAttempted, NotAttempted]);
}

#[test]
fn a_deadline_before_the_first_task_began_has_no_effect_at_the_peer() {
    let mut core = BatchCore::new(2);
    core.submit(2, WRITE, false);
    core.expire(0, &timeout());
    assert_eq!(states(&core), [TimedOut, NotAttempted]);
    assert_eq!(core.task(0).expect("there").effect, RemoteEffect::None);
}

#[test]
fn a_direct_read_that_ends_on_its_way_may_have_changed_its_target() {
    for (mode, changed) in [(Direction::Read.direct(), true), (READ, false), (Direction::Write.direct(), false)] {
        let mut core = BatchCore::new(2);
        core.submit(2, mode, false);
        assert!(core.start(0, 1) && core.post(0));
        core.expire(0, &timeout());
        let task = core.task(0).expect("there");
        assert_eq!((task.state, task.local_changed, task.profile), (TimedOut, changed, mode.profile));
        assert!(!core.task(1).expect("there").local_changed, "it never began");
    }
    // What the transport knows better is believed.
    for known in [false, true] {
        let mut core = BatchCore::new(1);
        core.submit(1, Direction::Read.direct(), false);
        assert!(core.start(0, 1) && core.post(0));
        core.resolve(0, Err(Failure { local_changed: known, ..Failure::harmless(error()) }));
        let task = core.task(0).expect("there");
        assert_eq!((task.state, task.effect, task.local_changed), (Failed, RemoteEffect::None, known));
    }
}

#[test]
fn a_fault_of_ours_fails_what_ran_and_settles_the_rest() {
    let mut core = BatchCore::new(4);
    core.submit(3, WRITE, true);
    assert!(core.start(0, 1) && core.post(0));
    core.resolve(0, Ok(1));
    assert!(core.start(1, 1) && core.post(1));
    core.abandon(0, &TransferError::Internal);
    assert_eq!(states(&core), [Completed, Failed, NotAttempted]);
    assert!(core.status().is_finished());
    // While the notification was on its way.
    core.submit(1, READ, true);
    assert!(core.start(3, 1) && core.post(3));
    core.resolve(3, Ok(1));
    assert!(!core.status().is_finished(), "the notification is not settled");
    core.abandon(1, &TransferError::Internal);
    assert!(core.status().is_finished());
}

#[test]
fn a_batch_is_as_bad_as_its_worst_task() {
    let order = [Completed, NotAttempted, Cancelled, TimedOut, Failed, Pending];
    for (worse, first) in order.into_iter().enumerate() {
        for second in &order[..=worse] {
            let mut core = BatchCore::new(2);
            core.submit(2, READ, false);
            core.tasks[0].state = first;
            core.tasks[1].state = *second;
            assert_eq!(core.status().state, BatchState::of(first), "{first:?} and {second:?}");
        }
    }
}

/// A batch, and the executor at work on it.
#[derive(Clone, Debug)]
struct World {
    core: BatchCore,
    /// The task that the executor is at.
    cursor: usize,
    /// Slices of it that are under way, once it was started.
    running: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Start,
    Post,
    Completes,
    Fails(RemoteEffect),
    RunsOut,
    /// The executor has no more to do for this task.
    Leave,
    Cancel,
    CancelTask(usize),
    Expire(usize),
    Stop,
    Abandon(usize),
}

const SLICES: u32 = 2;
const SLICE_BYTES: u64 = 10;

impl World {
    fn events(&self) -> Vec<Event> {
        let mut events = vec![Event::Cancel, Event::Stop];
        events.extend((0..self.core.tasks.len()).map(Event::CancelTask));
        events.extend((0..self.core.groups.len()).flat_map(|group| [Event::Expire(group), Event::Abandon(group)]));
        match self.running {
            None if self.cursor < self.core.tasks.len() => events.push(Event::Start),
            None => {}
            Some(0) => events.extend([Event::Post, Event::Leave]),
            Some(_) => events.extend([
                Event::Post,
                Event::Completes,
                Event::Fails(RemoteEffect::None),
                Event::Fails(RemoteEffect::Unknown),
                Event::RunsOut,
            ]),
        }
        events
    }

    /// `false` if the executor would not do that here.
    fn apply(&mut self, event: Event) -> bool {
        let at = self.cursor;
        match event {
            Event::Start => {
                if self.core.start(at, SLICES) {
                    self.running = Some(0);
                } else {
                    self.cursor = self.group_end();
                }
            }
            Event::Post => {
                if !self.core.post(at) {
                    return false;
                }
                self.running = self.running.map(|out| out + 1);
            }
            Event::Completes => self.resolve(Ok(SLICE_BYTES)),
            Event::Fails(effect) => self.resolve(failure(error(), effect)),
            Event::RunsOut => self.resolve(failure(timeout(), RemoteEffect::Unknown)),
            Event::Leave => {
                if self.core.clone().post(at) {
                    return false;
                }
                assert_ne!(self.core.tasks[at].state, Pending, "nothing is out, nothing may go out: it must be final");
                let completed = self.core.tasks[at].state == Completed;
                self.cursor = if completed { at + 1 } else { self.group_end() };
                self.running = None;
            }
            Event::Cancel => self.core.cancel(),
            Event::CancelTask(task) => self.core.cancel_task(task),
            Event::Expire(group) => self.core.expire(group, &timeout()),
            Event::Stop => self.core.stop(),
            Event::Abandon(group) => self.core.abandon(group, &TransferError::Internal),
        }
        true
    }

    fn resolve(&mut self, outcome: Result<u64, Failure>) {
        self.core.resolve(self.cursor, outcome);
        self.running = self.running.map(|out| out - 1);
    }

    fn group_end(&self) -> usize {
        self.core.groups[self.core.tasks[self.cursor].group].tasks.end
    }

    /// What holds in every state.
    fn check(&self) {
        for (index, task) in self.core.tasks.iter().enumerate() {
            assert!(task.completed <= task.resolved && task.resolved <= task.posted && task.posted <= SLICES);
            assert_eq!(task.bytes, u64::from(task.completed) * SLICE_BYTES);
            assert_eq!(task.state == Completed, task.completed == SLICES, "complete means all of it: {task:?}");
            if task.state == NotAttempted {
                assert_eq!((task.slices, task.bytes, task.effect), (None, 0, RemoteEffect::None));
            }
            match task.effect {
                RemoteEffect::None if task.state == Completed => assert!(task.mode == READ),
                RemoteEffect::None => {}
                RemoteEffect::Unknown => assert!(task.mode == WRITE && task.posted > 0 && task.state != Completed),
                RemoteEffect::Committed => assert!(task.mode == WRITE && task.state == Completed),
            }
            let ended_badly = !matches!(task.state, Pending | Completed);
            if ended_badly {
                let end = self.core.groups[task.group].tasks.end;
                for behind in &self.core.tasks[index + 1..end] {
                    assert!(behind.slices.is_some() || behind.state != Pending, "nothing behind it is to begin");
                }
            }
        }
        for (index, group) in self.core.groups.iter().enumerate() {
            let tasks = &self.core.tasks[group.tasks.clone()];
            let complete = tasks.iter().all(|task| task.state == Completed);
            let pending = tasks.iter().any(|task| task.state == Pending);
            assert_eq!(self.core.is_complete(index), complete);
            if matches!(group.notification, NotificationStatus::Pending) {
                assert!(complete || pending, "a notification that will not be sent is settled at once");
            }
        }
        let worst = self.core.tasks.iter().map(|task| BatchState::of(task.state)).max();
        assert_eq!(Some(self.core.status().state), worst);
    }

    fn key(&self) -> String {
        format!("{self:?}")
    }
}

/// Explores everything that follows from a fresh batch of two groups.
fn explore(writes: bool) -> HashMap<String, World> {
    let mut core = BatchCore::new(3);
    let mode = if writes { WRITE } else { READ };
    core.submit(2, mode, true);
    core.submit(1, mode, false);
    let first = World { core, cursor: 0, running: None };
    let mut seen: HashMap<String, World> = HashMap::from([(first.key(), first.clone())]);
    let mut queue = VecDeque::from([first]);
    while let Some(world) = queue.pop_front() {
        for event in world.events() {
            let mut next = world.clone();
            if !next.apply(event) {
                continue;
            }
            next.check();
            for (before, after) in world.core.tasks.iter().zip(&next.core.tasks) {
                if before.state != Pending {
                    let picture = |task: &Task| (task.state, task.bytes, task.effect);
                    assert_eq!(picture(before), picture(after), "final is final: {event:?}");
                }
            }
            if let Entry::Vacant(place) = seen.entry(next.key()) {
                place.insert(next.clone());
                queue.push_back(next);
            }
        }
    }
    seen
}

#[test]
fn every_state_and_event_keeps_the_rules_and_every_batch_can_end() {
    let mut met = HashSet::new();
    for writes in [false, true] {
        let worlds = explore(writes);
        assert!(worlds.len() > 1_000, "only {} states", worlds.len());
        for world in worlds.values() {
            met.extend(world.core.tasks.iter().map(|task| task.state));
            // From anywhere the executor alone gets to the end, if what is under way resolves.
            let mut world = world.clone();
            for _ in 0..100 {
                let steps = [Event::Completes, Event::Post, Event::Leave, Event::Start];
                let possible = world.events();
                let Some(step) = steps.into_iter().find(|step| possible.contains(step) && world.clone().apply(*step))
                else {
                    break;
                };
                world.apply(step);
            }
            assert!(world.core.tasks.iter().all(|task| task.state != Pending), "stuck: {world:?}");
        }
    }
    assert_eq!(met.len(), 6, "every state was met: {met:?}");
}
