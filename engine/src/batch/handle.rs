//! The handle of an asynchronous batch.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    cell::{BatchCell, Group},
    core::{BatchStatus, TaskStatus},
    future::{BatchFinished, LocallyDrained},
    plan::{SubmitError, TransferRequest},
    report::BatchReport,
    slice::Mode,
    table::{BatchError, BatchId},
};
use crate::{Notification, RemoteSegment, deadline::Deadline, shared::Shared};

/// An asynchronous batch: submissions that run in order on a thread of the engine, beside other batches.
///
/// Nothing here blocks, except [`Batch::wait`]. Dropping the handle detaches the batch: its work goes on, and its memory
/// and budget come back by themselves. A handle may outlive its engine; then every task is final.
pub struct Batch {
    shared: Arc<Shared>,
    cell: Arc<BatchCell>,
    /// Whether dropping the handle gives up the number.
    owns_id: bool,
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Batch({})", self.cell.id)
    }
}

impl Batch {
    pub(crate) fn new(shared: Arc<Shared>, cell: Arc<BatchCell>) -> Self {
        Self { shared, cell, owns_id: true }
    }

    /// Its number, for the calls of [`Engine`](crate::Engine) that take one.
    pub fn id(&self) -> BatchId {
        self.cell.id
    }

    /// Its number, without the handle: from here on only [`free_batch`](crate::Engine::free_batch) and
    /// [`detach_batch`](crate::Engine::detach_batch) give it up.
    pub fn into_id(mut self) -> BatchId {
        self.owns_id = false;
        self.cell.id
    }

    /// Adds requests, and a notification that is sent to the peer once all of them have completed. All of it is checked
    /// first, as for [`submit_and_wait`](crate::Engine::submit_and_wait); local registrations are held until the group
    /// is locally drained. Groups of one batch run in order; one deadline, from now, covers this one's wait and work.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]: nothing was added. This call never refreshes `peer`.
    pub fn submit(
        &self,
        peer: &RemoteSegment,
        mode: impl Into<Mode>,
        requests: &[TransferRequest],
        timeout: Duration,
        notification: Option<&Notification>,
    ) -> Result<Group, SubmitError> {
        self.shared.submit_to(&self.cell, peer, mode.into(), requests, Deadline::after(timeout), notification)
    }

    /// How it stands. Asking has no effect on it.
    pub fn status(&self) -> BatchStatus {
        self.cell.status()
    }

    /// How one task stands.
    ///
    /// # Errors
    ///
    /// [`BatchError::NoSuchTask`].
    pub fn task(&self, task: usize) -> Result<TaskStatus, BatchError> {
        self.cell.task(task)
    }

    /// The outcome of one submission in the form of the synchronous calls, once it is final.
    pub fn report(&self, group: &Group) -> Option<BatchReport> {
        self.cell.report(group)
    }

    /// Asks for the end of what has not been sent: tasks that have not begun are cancelled at once, what is on its way
    /// may still complete. Returning says that it was asked for, not that it is done. Idempotent.
    pub fn cancel(&self) {
        self.cell.cancel();
    }

    /// As [`Batch::cancel`], for one task. Those behind it in its group are not attempted, unless it completes.
    ///
    /// # Errors
    ///
    /// [`BatchError::NoSuchTask`].
    pub fn cancel_task(&self, task: usize) -> Result<(), BatchError> {
        self.cell.cancel_task(task)
    }

    /// Whether it holds no local memory any more. Only then may the memory of its requests be used for something else;
    /// a task may be final before. It says nothing about the peer.
    pub fn locally_drained(&self) -> bool {
        self.cell.status().locally_drained
    }

    /// Blocks until every task is final, every notification settled and all local memory let go; `false` if that takes
    /// longer.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.cell.wait(Deadline::after(timeout), |status| status.is_finished() && status.locally_drained)
    }

    /// A future of the moment when every task is final and every notification settled.
    pub fn finished(&self) -> BatchFinished {
        BatchFinished { cell: Arc::clone(&self.cell) }
    }

    /// A future of the moment when no local memory is held.
    pub fn drained(&self) -> LocallyDrained {
        LocallyDrained { cell: Arc::clone(&self.cell) }
    }

    /// Gives up a batch that is finished and drained, and its part of the budgets.
    ///
    /// # Errors
    ///
    /// [`BatchError::Busy`] and the handle, if it is not. Nothing was changed then. [`BatchError::Stale`] if its number
    /// was given up through the engine.
    pub fn free(mut self) -> Result<(), (Self, BatchError)> {
        match self.shared.free(self.cell.id) {
            Ok(()) => {
                self.owns_id = false;
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Gives up the batch as it is: work and notifications go on, memory is held while it must be, and the budgets come
    /// back with it.
    pub fn detach(self) {}

    pub(super) fn cell(&self) -> &Arc<BatchCell> {
        &self.cell
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.owns_id {
            // Stale if the number was given up through the engine.
            let _ = self.shared.detach(self.cell.id);
        }
    }
}
