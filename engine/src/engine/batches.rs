//! Asynchronous batches of an engine, by handle and by number.

use std::{sync::Arc, time::Duration};

use super::Engine;
use crate::{
    Batch, BatchError, BatchId, BatchStatus, Exhausted, Group, Mode, Notification, RemoteSegment, SubmitError,
    TaskStatus, TransferRequest, deadline::Deadline,
};

impl Engine {
    /// Makes an empty asynchronous batch with room for so many tasks.
    ///
    /// # Errors
    ///
    /// [`Exhausted`].
    pub fn allocate_batch(&self, capacity: usize) -> Result<Batch, Exhausted> {
        Ok(Batch::new(Arc::clone(&self.shared), self.shared.allocate(capacity)?))
    }

    /// [`Batch::submit`], by number.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]: nothing was added.
    pub fn submit_to_batch(
        &self,
        batch: BatchId,
        peer: &RemoteSegment,
        mode: impl Into<Mode>,
        requests: &[TransferRequest],
        timeout: Duration,
        notification: Option<&Notification>,
    ) -> Result<Group, SubmitError> {
        let cell = self.shared.table.find(batch)?;
        self.shared.submit_to(&cell, peer, mode.into(), requests, Deadline::after(timeout), notification)
    }

    /// [`Batch::status`], by number: never blocks, and has no effect.
    ///
    /// # Errors
    ///
    /// [`BatchError::Stale`].
    pub fn poll_batch(&self, batch: BatchId) -> Result<BatchStatus, BatchError> {
        Ok(self.shared.table.find(batch)?.status())
    }

    /// [`Batch::task`], by number.
    ///
    /// # Errors
    ///
    /// [`BatchError::Stale`], [`BatchError::NoSuchTask`].
    pub fn poll_task(&self, batch: BatchId, task: usize) -> Result<TaskStatus, BatchError> {
        self.shared.table.find(batch)?.task(task)
    }

    /// [`Batch::cancel`], by number.
    ///
    /// # Errors
    ///
    /// [`BatchError::Stale`].
    pub fn cancel_batch(&self, batch: BatchId) -> Result<(), BatchError> {
        self.shared.table.find(batch)?.cancel();
        Ok(())
    }

    /// [`Batch::locally_drained`], by number.
    ///
    /// # Errors
    ///
    /// [`BatchError::Stale`].
    pub fn locally_drained(&self, batch: BatchId) -> Result<bool, BatchError> {
        Ok(self.shared.table.find(batch)?.status().locally_drained)
    }

    /// [`Batch::free`], by number.
    ///
    /// # Errors
    ///
    /// [`BatchError::Busy`] and nothing changed; [`BatchError::Stale`].
    pub fn free_batch(&self, batch: BatchId) -> Result<(), BatchError> {
        self.shared.free(batch)
    }

    /// [`Batch::detach`], by number.
    ///
    /// # Errors
    ///
    /// [`BatchError::Stale`].
    pub fn detach_batch(&self, batch: BatchId) -> Result<(), BatchError> {
        self.shared.detach(batch)
    }
}
