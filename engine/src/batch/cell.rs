//! One batch as the engine's threads and the caller's share it: the state machine under a lock, its queue, and whoever
//! waits for it.

use std::{
    collections::VecDeque,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker},
};

use super::{
    core::{BatchCore, BatchStatus, Full, TaskStatus},
    execute::{Moved, Observer, run_requests, settle_notification},
    plan::{Plan, SubmitError},
    report::BatchReport,
    slice::{DataPath, Mode, Profile, Slice},
    table::{BatchError, BatchId},
    timer::{Timekeeper, Timer},
};
use crate::{
    Notification, NotificationFailure, Phase, TaskState, TransferError, TransferFailure, budget::Charge,
    deadline::Deadline, error::Failure, segment::RemoteSegment, wake::Wakers,
};

/// A batch.
pub(crate) struct BatchCell {
    pub(crate) id: BatchId,
    inner: Mutex<Inner>,
    news: Condvar,
}

struct Inner {
    core: BatchCore,
    queue: VecDeque<Work>,
    /// A thread is at work on the queue.
    running: bool,
    wakers: Wakers,
    /// Its share of the budgets for batches and slots, until it is freed.
    charge: Option<Charge>,
    /// It is to free itself.
    detached: bool,
}

/// A group that waits for its turn.
struct Work {
    group: usize,
    first_task: usize,
    slices: Vec<Slice>,
    deadline: Deadline,
    notification: Option<Notification>,
    peer: RemoteSegment,
    /// Times the group out, whatever its slices do; dropped when it has run.
    timer: Timer,
    /// Keeps the batch from being drained while a notification is on its way.
    hold: Arc<Hold>,
}

/// Local memory of one group, and its share of the budgets in flight. The batch is told when the last slice and the
/// thread have let go.
pub(crate) struct Hold {
    cell: Arc<BatchCell>,
    charge: Mutex<Option<Charge>>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // First the budget, so that whoever sees the batch drained finds it whole.
        drop(self.charge.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        self.cell.change(BatchCore::release);
    }
}

/// What [`Batch::submit`](crate::Batch::submit) added.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    pub(super) index: usize,
    pub(super) tasks: Range<usize>,
    pub(super) profile: Profile,
}

impl Group {
    /// Which submission of the batch, counted from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The numbers of its tasks, in the order of its requests.
    pub fn tasks(&self) -> Range<usize> {
        self.tasks.clone()
    }
}

/// What running a batch takes.
pub(crate) struct Runner<'a> {
    pub(crate) path: &'a dyn DataPath,
    pub(crate) is_stopped: &'a dyn Fn() -> bool,
    pub(crate) notify: &'a dyn Fn(&RemoteSegment, &Notification, Deadline) -> Result<(), NotificationFailure>,
}

impl BatchCell {
    pub(crate) fn new(id: BatchId, capacity: usize, charge: Charge) -> Self {
        let inner = Inner {
            core: BatchCore::new(capacity),
            queue: VecDeque::new(),
            running: false,
            wakers: Wakers::default(),
            charge: Some(charge),
            detached: false,
        };
        Self { id, inner: Mutex::new(inner), news: Condvar::new() }
    }

    /// Adds a checked submission, all of it or nothing. If no thread is at work on the batch, `find_thread` must bring
    /// one to [`BatchCell::run`].
    pub(crate) fn submit(
        self: &Arc<Self>,
        mut plan: Plan,
        deadline: Deadline,
        timekeeper: &Arc<Timekeeper>,
        find_thread: impl FnOnce() -> Result<(), SubmitError>,
    ) -> Result<Group, SubmitError> {
        let asked = plan.len();
        let mut inner = self.lock();
        inner.core.check_room(asked).map_err(|Full { capacity, taken }| {
            SubmitError::Batch(BatchError::Full { id: self.id, capacity, taken, asked })
        })?;
        if !inner.running {
            // Under the lock, so that the thread finds the work that it was called for. Nothing fails behind this.
            find_thread()?;
            inner.running = true;
        }
        let Mode { profile, .. } = plan.mode;
        let (group, tasks) = inner.core.submit(asked, plan.mode, plan.notification.is_some());
        let peer = plan.peer().clone();
        let notification = plan.notification.take();
        let hold = Arc::new(Hold { cell: Arc::clone(self), charge: Mutex::new(None) });
        let slices = plan.take_slices(Some(&hold));
        *hold.charge.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan.charge);
        let timer = timekeeper.add(deadline, Arc::downgrade(self), group);
        let first_task = tasks.start;
        inner.queue.push_back(Work { group, first_task, slices, deadline, notification, peer, timer, hold });
        Ok(Group { index: group, tasks, profile })
    }

    /// Runs queued groups, in order, until there are none.
    pub(crate) fn run(&self, runner: &Runner<'_>) {
        loop {
            if (runner.is_stopped)() {
                return self.stop();
            }
            let mut inner = self.lock();
            let Some(work) = inner.queue.pop_front() else {
                inner.running = false;
                return;
            };
            drop(inner);
            let group = work.group;
            if catch_unwind(AssertUnwindSafe(|| self.run_group(work, runner))).is_err() {
                tracing::error!(batch = %self.id, group, "running a submission panicked");
                self.change(|core| core.abandon(group, &TransferError::Internal));
            }
        }
    }

    fn run_group(&self, work: Work, runner: &Runner<'_>) {
        let Work { group, first_task, slices, deadline, notification, peer, timer, hold } = work;
        let progress = Progress { cell: self, first_task };
        run_requests(runner.path, slices, deadline, &progress);
        if notification.is_some() {
            let complete = self.lock().core.is_complete(group);
            let status = settle_notification(notification.as_ref(), complete, |notification| {
                (runner.notify)(&peer, notification, deadline)
            });
            self.change(|core| core.notified(group, status));
        }
        drop((timer, hold));
    }

    /// The engine ends: what has not begun never will.
    pub(crate) fn stop(&self) {
        self.change(BatchCore::stop);
        let mut inner = self.lock();
        inner.running = false;
        let dropped = std::mem::take(&mut inner.queue);
        drop(inner);
        drop(dropped);
    }

    pub(crate) fn cancel(&self) {
        self.change(BatchCore::cancel);
    }

    pub(crate) fn cancel_task(&self, task: usize) -> Result<(), BatchError> {
        self.task(task)?;
        self.change(|core| core.cancel_task(task));
        Ok(())
    }

    pub(super) fn expire(&self, group: usize) {
        self.change(|core| core.expire(group, &TransferError::TimedOut { phase: Phase::Connect }));
    }

    pub(crate) fn status(&self) -> BatchStatus {
        self.lock().core.status()
    }

    pub(crate) fn task(&self, task: usize) -> Result<TaskStatus, BatchError> {
        self.lock().core.task(task).ok_or(BatchError::NoSuchTask { id: self.id, task })
    }

    /// The tasks of one submission in the form of the synchronous calls, once they are final and its notification is
    /// settled.
    pub(crate) fn report(&self, Group { index, tasks, profile }: &Group) -> Option<BatchReport> {
        let inner = self.lock();
        let mut report = BatchReport::new(tasks.len(), *profile);
        report.notification = inner.core.status().notifications.get(*index)?.clone();
        if matches!(report.notification, crate::NotificationStatus::Pending) {
            return None;
        }
        for (index, task) in tasks.clone().enumerate() {
            let task = inner.core.task(task)?;
            let error = match task.state {
                TaskState::Pending => return None,
                TaskState::Completed => {
                    report.record(index, Ok(Moved { bytes: task.bytes, by: task.transport }));
                    continue;
                }
                _ => task.error.unwrap_or(TransferError::Cancelled),
            };
            let (effect, local_changed) = (task.effect, task.local_changed);
            report.failure = Some(TransferFailure { index, error, effect, local_changed });
            break;
        }
        // A task that timed out may be waited for by others; final is what counts here.
        let pending = tasks.clone().any(|task| inner.core.task(task).is_none_or(|t| t.state == TaskState::Pending));
        (!pending).then_some(report)
    }

    /// Gives the charges back, if nothing is pending and nothing held.
    pub(crate) fn free(&self) -> Result<(), BatchError> {
        let mut inner = self.lock();
        if !inner.core.may_be_freed() {
            let status = inner.core.status();
            let tasks = (0..status.tasks).filter_map(|task| inner.core.task(task));
            let pending = tasks.filter(|task| task.state == TaskState::Pending).count();
            return Err(BatchError::Busy { id: self.id, pending, drained: status.locally_drained });
        }
        inner.charge = None;
        Ok(())
    }

    /// Gives the charges back as soon as nothing is pending and nothing held.
    pub(crate) fn detach(&self) {
        let mut inner = self.lock();
        inner.detached = true;
        inner.free_if_detached();
    }

    /// Waits until `done` holds or the deadline passes; says which.
    pub(crate) fn wait(&self, deadline: Deadline, done: impl Fn(&BatchStatus) -> bool) -> bool {
        let mut inner = self.lock();
        while !done(&inner.core.status()) {
            let Some(left) = deadline.remaining() else { return false };
            inner = self.news.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Ready once `done` gives something; else the waker is told of each change.
    pub(crate) fn poll<T>(&self, waker: &Waker, done: impl FnOnce(&BatchStatus) -> Option<T>) -> Poll<T> {
        let mut inner = self.lock();
        if let Some(result) = done(&inner.core.status()) {
            return Poll::Ready(result);
        }
        inner.wakers.add(waker);
        Poll::Pending
    }

    /// The one way in which the state changes: under the lock, and then everybody is told.
    fn change<T>(&self, change: impl FnOnce(&mut BatchCore) -> T) -> T {
        let mut inner = self.lock();
        let result = change(&mut inner.core);
        inner.free_if_detached();
        let wakers = std::mem::take(&mut inner.wakers);
        drop(inner);
        self.news.notify_all();
        wakers.wake();
        result
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn free_if_detached(&mut self) {
        if self.detached && self.core.may_be_freed() {
            self.charge = None;
        }
    }
}

/// What the executor is told about a group's tasks.
struct Progress<'a> {
    cell: &'a BatchCell,
    first_task: usize,
}

impl Observer for Progress<'_> {
    fn start(&self, index: usize) -> bool {
        // One slice a request: TCP moves a payload over one connection.
        self.cell.change(|core| core.start(self.first_task + index, 1))
    }

    fn post(&self, index: usize) -> bool {
        self.cell.change(|core| core.post(self.first_task + index))
    }

    fn ended(&self, index: usize, outcome: Result<Moved, Failure>) {
        let task = self.first_task + index;
        self.cell.change(|core| {
            let by = outcome.as_ref().map_or(None, |moved| moved.by);
            core.resolve(task, outcome.map(|moved| moved.bytes));
            core.moved_by(task, by);
        });
    }
}
