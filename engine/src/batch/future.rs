//! Futures over batches, and over other calls that a thread of the engine makes. They need no particular runtime.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use super::{
    cell::{BatchCell, Group},
    core::BatchStatus,
    handle::Batch,
    report::BatchReport,
};
use crate::wake::Wakers;

/// Resolves when all tasks are final and all notifications settled. Dropping it changes nothing.
#[must_use = "a future does nothing unless it is awaited"]
pub struct BatchFinished {
    pub(super) cell: Arc<BatchCell>,
}

impl Future for BatchFinished {
    type Output = BatchStatus;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BatchStatus> {
        self.cell.poll(context.waker(), |status| status.is_finished().then(|| status.clone()))
    }
}

/// Resolves when the batch holds no local memory. Dropping it changes nothing.
#[must_use = "a future does nothing unless it is awaited"]
pub struct LocallyDrained {
    pub(super) cell: Arc<BatchCell>,
}

impl Future for LocallyDrained {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.cell.poll(context.waker(), |status| status.locally_drained.then_some(()))
    }
}

/// One submission on its way: resolves to its report once it is final *and* locally drained, so that the caller may use
/// the memory again.
///
/// Dropping it gives up interest, not the work: that goes on, and ends by its deadline. To end it early, call
/// [`Transfer::cancel`] first.
#[must_use = "a future does nothing unless it is awaited"]
pub struct Transfer {
    pub(crate) batch: Batch,
    pub(crate) group: Group,
}

impl Transfer {
    /// Asks for the end of what has not been sent yet; the report tells how far it got.
    pub fn cancel(&self) {
        self.batch.cell().cancel();
    }
}

impl Future for Transfer {
    type Output = BatchReport;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BatchReport> {
        let cell = self.batch.cell();
        let ended = cell.poll(context.waker(), |status| (status.is_finished() && status.locally_drained).then_some(()));
        ended.map(|()| cell.report(&self.group).expect("a finished batch has final tasks"))
    }
}

impl fmt::Debug for BatchFinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BatchFinished({})", self.cell.id)
    }
}

impl fmt::Debug for LocallyDrained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocallyDrained({})", self.cell.id)
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({})", self.batch.id())
    }
}

/// The result of a call that another thread makes.
pub(crate) struct Promise<T> {
    shared: Arc<Mutex<Promised<T>>>,
}

struct Promised<T> {
    result: Option<T>,
    /// The promise was dropped.
    broken: bool,
    wakers: Wakers,
}

/// Both ends of one. The future gives `None` if the promise is dropped without a result.
pub(crate) fn promise<T>() -> (Promise<T>, impl Future<Output = Option<T>> + use<T>) {
    let shared = Arc::new(Mutex::new(Promised { result: None, broken: false, wakers: Wakers::default() }));
    let result = Arc::clone(&shared);
    let future = std::future::poll_fn(move |context| {
        let mut promised = result.lock().unwrap_or_else(PoisonError::into_inner);
        match promised.result.take() {
            Some(value) => Poll::Ready(Some(value)),
            None if promised.broken => Poll::Ready(None),
            None => {
                promised.wakers.add(context.waker());
                Poll::Pending
            }
        }
    });
    (Promise { shared }, future)
}

impl<T> Promise<T> {
    pub(crate) fn keep(self, value: T) {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).result = Some(value);
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        let mut promised = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        promised.broken = true;
        let wakers = std::mem::take(&mut promised.wakers);
        drop(promised);
        wakers.wake();
    }
}
