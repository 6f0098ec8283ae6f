//! One asynchronous batch as a state machine: what its tasks and groups have come to.
//!
//! No I/O, no clock, no lock. [`cell`](super::cell) feeds it.

use std::ops::Range;

use super::slice::{Direction, Mode, Profile};
use crate::{NotificationStatus, RemoteEffect, TransferError, Transport, error::Failure};

/// What a task has come to. All but `Pending` are final.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TaskState {
    /// It waits or runs.
    Pending,
    /// All its bytes moved.
    Completed,
    /// It failed.
    Failed,
    /// Its deadline passed.
    TimedOut,
    /// It was cancelled, and part of it or nothing moved.
    Cancelled,
    /// One before it in its group did not complete, so it was never begun.
    NotAttempted,
}

/// What a batch has come to: the worst of its tasks, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BatchState {
    /// All tasks completed, or there are none.
    Completed,
    /// Some were not attempted, although nothing worse shows.
    NotAttempted,
    /// Some were cancelled.
    Cancelled,
    /// Some ran out of time.
    TimedOut,
    /// Some failed.
    Failed,
    /// Some are not done.
    Pending,
}

/// One task, at the moment of asking.
#[derive(Clone, Debug)]
pub struct TaskStatus {
    /// What it has come to.
    pub state: TaskState,
    /// Bytes that moved: exact for a completed task, else those known to have moved.
    pub bytes: u64,
    /// What it may have done at the peer.
    pub effect: RemoteEffect,
    /// It ended as a [direct](Profile::Direct) READ that may have changed its local slice without completing.
    pub local_changed: bool,
    /// Why it failed or timed out.
    pub error: Option<TransferError>,
    /// What moved its bytes, once it completed.
    pub transport: Option<Transport>,
    /// What was promised about bytes on their way.
    pub profile: Profile,
}

/// A batch, at the moment of asking.
#[derive(Clone, Debug)]
pub struct BatchStatus {
    /// The worst of its tasks; `Pending` while one is.
    pub state: BatchState,
    /// Tasks submitted so far.
    pub tasks: usize,
    /// Those that completed.
    pub completed: usize,
    /// Bytes known to have moved.
    pub bytes: u64,
    /// Whether no local registration is held by it any more. A finished batch may still hold some.
    pub locally_drained: bool,
    /// One for each submission, in order.
    pub notifications: Vec<NotificationStatus>,
}

impl BatchStatus {
    /// Whether every task is final and every notification settled.
    pub fn is_finished(&self) -> bool {
        let pending = |status: &NotificationStatus| matches!(status, NotificationStatus::Pending);
        self.state != BatchState::Pending && !self.notifications.iter().any(pending)
    }
}

/// The tasks of one batch.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
pub(super) struct BatchCore {
    capacity: usize,
    tasks: Vec<Task>,
    groups: Vec<Group>,
    /// Groups that hold local memory.
    holds: usize,
}

#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
struct Group {
    tasks: Range<usize>,
    notification: NotificationStatus,
}

#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
struct Task {
    group: usize,
    mode: Mode,
    state: TaskState,
    /// How many slices it has, once it was started.
    slices: Option<u32>,
    posted: u32,
    resolved: u32,
    completed: u32,
    bytes: u64,
    /// No slice is posted any more.
    cancelled: bool,
    /// A slice ended with an effect, or nobody knows.
    touched: bool,
    /// A slice that did not complete may have changed local bytes.
    local_changed: bool,
    error: Option<TransferError>,
    transport: Option<Transport>,
    effect: RemoteEffect,
}

/// More tasks than the batch has room for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Full {
    pub(super) capacity: usize,
    pub(super) taken: usize,
}

impl BatchCore {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, tasks: Vec::new(), groups: Vec::new(), holds: 0 }
    }

    /// Whether so many more tasks fit.
    pub(super) fn check_room(&self, count: usize) -> Result<(), Full> {
        let (capacity, taken) = (self.capacity, self.tasks.len());
        if count <= capacity - taken { Ok(()) } else { Err(Full { capacity, taken }) }
    }

    /// Adds a group for which there is room; it holds local memory until [`BatchCore::release`]. The result is its
    /// number and its tasks.
    pub(super) fn submit(&mut self, count: usize, mode: Mode, notify: bool) -> (usize, Range<usize>) {
        let taken = self.tasks.len();
        let group = self.groups.len();
        let task = || Task {
            group,
            mode,
            state: TaskState::Pending,
            slices: None,
            posted: 0,
            resolved: 0,
            completed: 0,
            bytes: 0,
            cancelled: false,
            touched: false,
            local_changed: false,
            error: None,
            transport: None,
            effect: RemoteEffect::None,
        };
        self.tasks.extend(std::iter::repeat_with(task).take(count));
        let notification = match (notify, count) {
            (false, _) => NotificationStatus::NotRequested,
            (true, 0) => NotificationStatus::Skipped,
            (true, _) => NotificationStatus::Pending,
        };
        let tasks = taken..taken + count;
        self.groups.push(Group { tasks: tasks.clone(), notification });
        self.holds += 1;
        (group, tasks)
    }

    /// Begins a task of so many slices; `false` if it is final already.
    pub(super) fn start(&mut self, task: usize, slices: u32) -> bool {
        let task = &mut self.tasks[task];
        if task.state != TaskState::Pending {
            return false;
        }
        task.slices = Some(slices);
        true
    }

    /// Whether one more slice of a started task may leave this host. If so, it counts as posted.
    pub(super) fn post(&mut self, task: usize) -> bool {
        let task = &mut self.tasks[task];
        let more = task.slices.is_some_and(|slices| task.posted < slices);
        let allowed = task.state == TaskState::Pending && !task.cancelled && task.error.is_none() && more;
        task.posted += u32::from(allowed);
        allowed
    }

    /// A slice has ended, with its bytes if it completed. One that was never posted can only have failed.
    pub(super) fn resolve(&mut self, index: usize, outcome: Result<u64, Failure>) {
        let task = &mut self.tasks[index];
        task.resolved += u32::from(task.resolved < task.posted);
        if task.state != TaskState::Pending {
            return; // it timed out; final is final
        }
        match outcome {
            Ok(bytes) => {
                task.completed += 1;
                task.bytes += bytes;
                task.touched = true;
            }
            Err(failure) => {
                task.touched |= failure.effect != RemoteEffect::None;
                task.local_changed |= failure.local_changed;
                task.error.get_or_insert(failure.error);
            }
        }
        self.settle(index);
    }

    /// What has moved a task's bytes.
    pub(super) fn moved_by(&mut self, index: usize, transport: Option<Transport>) {
        let task = &mut self.tasks[index];
        if task.state == TaskState::Completed {
            task.transport = transport;
        }
    }

    /// Cancels what has not been posted. Idempotent.
    pub(super) fn cancel(&mut self) {
        // Those not begun first, or they would count as not attempted for the sake of those that run.
        for index in 0..self.tasks.len() {
            self.cancel_unstarted(index);
        }
        for index in 0..self.tasks.len() {
            self.cancel_task(index);
        }
    }

    /// Cancels what has not been posted of one task. Idempotent.
    pub(super) fn cancel_task(&mut self, index: usize) {
        self.cancel_unstarted(index);
        let task = &mut self.tasks[index];
        if task.state == TaskState::Pending {
            task.cancelled = true;
            self.settle(index);
        } else {
            self.skip_behind(index);
        }
    }

    fn cancel_unstarted(&mut self, index: usize) {
        let task = &mut self.tasks[index];
        if task.state == TaskState::Pending && task.slices.is_none() {
            task.state = TaskState::Cancelled;
            self.settle_group(self.tasks[index].group);
        }
    }

    /// The deadline of a group has passed, whatever its slices do.
    pub(super) fn expire(&mut self, group: usize, error: &TransferError) {
        let pending = self.groups[group].tasks.clone().find(|task| self.tasks[*task].state == TaskState::Pending);
        if let Some(index) = pending {
            let task = &mut self.tasks[index];
            task.error.get_or_insert_with(|| error.clone());
            task.leave_open();
            self.finish(index, TaskState::TimedOut);
        }
    }

    /// The engine ends: what has not begun is cancelled.
    pub(super) fn stop(&mut self) {
        for index in 0..self.tasks.len() {
            self.cancel_unstarted(index);
        }
    }

    /// A fault of ours ended the group's run: what it had not settled has failed.
    pub(super) fn abandon(&mut self, group: usize, error: &TransferError) {
        for index in self.groups[group].tasks.clone() {
            let task = &mut self.tasks[index];
            if task.state == TaskState::Pending {
                task.error.get_or_insert_with(|| error.clone());
                task.leave_open();
                self.finish(index, TaskState::Failed);
            }
        }
        if matches!(self.groups[group].notification, NotificationStatus::Pending) {
            self.groups[group].notification = NotificationStatus::Skipped;
        }
    }

    /// What became of the notification of a completed group.
    pub(super) fn notified(&mut self, group: usize, status: NotificationStatus) {
        self.groups[group].notification = status;
    }

    /// A group holds no local memory any more.
    pub(super) fn release(&mut self) {
        self.holds -= 1;
    }

    /// Whether a group is not empty and completed.
    pub(super) fn is_complete(&self, group: usize) -> bool {
        let tasks = &self.tasks[self.groups[group].tasks.clone()];
        !tasks.is_empty() && tasks.iter().all(|task| task.state == TaskState::Completed)
    }

    pub(super) fn locally_drained(&self) -> bool {
        self.holds == 0
    }

    /// Its tasks are final and hold no memory: it may be freed.
    pub(super) fn may_be_freed(&self) -> bool {
        self.locally_drained() && self.status().is_finished()
    }

    pub(super) fn status(&self) -> BatchStatus {
        let state = self.tasks.iter().map(|task| BatchState::of(task.state)).max().unwrap_or(BatchState::Completed);
        BatchStatus {
            state,
            tasks: self.tasks.len(),
            completed: self.tasks.iter().filter(|task| task.state == TaskState::Completed).count(),
            bytes: self.tasks.iter().map(|task| task.bytes).sum(),
            locally_drained: self.locally_drained(),
            notifications: self.groups.iter().map(|group| group.notification.clone()).collect(),
        }
    }

    /// One task, if there is such a one.
    pub(super) fn task(&self, index: usize) -> Option<TaskStatus> {
        self.tasks.get(index).map(|task| TaskStatus {
            state: task.state,
            bytes: task.bytes,
            effect: task.effect,
            error: task.error.clone(),
            local_changed: task.local_changed,
            transport: task.transport,
            profile: task.mode.profile,
        })
    }

    /// Finishes a started task once nothing of it is under way and nothing more will be.
    fn settle(&mut self, index: usize) {
        let task = &self.tasks[index];
        let Some(slices) = task.slices else { return };
        if task.state != TaskState::Pending || task.resolved < task.posted {
            return;
        }
        let state = if task.completed == slices {
            TaskState::Completed
        } else if let Some(error) = &task.error {
            match error {
                error if error.is_timeout() => TaskState::TimedOut,
                TransferError::Cancelled => TaskState::Cancelled,
                _ => TaskState::Failed,
            }
        } else if task.cancelled {
            TaskState::Cancelled
        } else {
            return; // more slices are to be posted
        };
        self.finish(index, state);
    }

    fn finish(&mut self, index: usize, state: TaskState) {
        let task = &mut self.tasks[index];
        task.state = state;
        task.effect = match (task.mode.direction == Direction::Write && task.touched, state) {
            (false, _) => RemoteEffect::None,
            (true, TaskState::Completed) => RemoteEffect::Committed,
            (true, _) => RemoteEffect::Unknown,
        };
        self.skip_behind(index);
        self.settle_group(self.tasks[index].group);
    }

    /// Behind a task that ended without completing nothing of its group is attempted.
    fn skip_behind(&mut self, index: usize) {
        let task = &self.tasks[index];
        if matches!(task.state, TaskState::Pending | TaskState::Completed) {
            return;
        }
        let group = task.group;
        for behind in index + 1..self.groups[group].tasks.end {
            let task = &mut self.tasks[behind];
            if task.state == TaskState::Pending && task.slices.is_none() {
                task.state = TaskState::NotAttempted;
            }
        }
        self.settle_group(group);
    }

    /// The notification of a group that ended without completing is not sent.
    fn settle_group(&mut self, group: usize) {
        let ended = self.tasks[self.groups[group].tasks.clone()].iter().all(|task| task.state != TaskState::Pending);
        let notification = &self.groups[group].notification;
        if ended && matches!(notification, NotificationStatus::Pending) && !self.is_complete(group) {
            self.groups[group].notification = NotificationStatus::Skipped;
        }
    }
}

impl Task {
    /// It ends while slices of it are on their way: nobody knows what becomes of them.
    fn leave_open(&mut self) {
        let open = self.posted > self.resolved;
        self.touched |= open;
        self.local_changed |= open && self.mode.may_change_local();
    }
}

impl BatchState {
    fn of(task: TaskState) -> Self {
        match task {
            TaskState::Pending => Self::Pending,
            TaskState::Completed => Self::Completed,
            TaskState::Failed => Self::Failed,
            TaskState::TimedOut => Self::TimedOut,
            TaskState::Cancelled => Self::Cancelled,
            TaskState::NotAttempted => Self::NotAttempted,
        }
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
