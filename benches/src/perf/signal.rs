//! What the threads of a measurement tell the one that waits: words of the other side, frames, trouble.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use tokio::sync::Notify;
use verbs_transport::{SendError, SendErrorHandler};

use super::{control::Word, failure::Failure};

/// Shared by the control connection, the handlers and the thread that measures.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    /// Frames that came, of all runs: who waits sees by it that things move.
    pub(crate) frames: AtomicU64,
    trouble: OnceLock<Failure>,
    words: Mutex<VecDeque<Word>>,
    told: Notify,
}

impl Signal {
    /// Something has changed: whoever waits looks again.
    pub(crate) fn tell(&self) {
        self.told.notify_one();
    }

    /// Resolves after [`Signal::tell`], also after one that came before this call.
    pub(crate) async fn told(&self) {
        self.told.notified().await;
    }

    /// Keeps the first: what follows is most often its consequence.
    pub(crate) fn trouble(&self, failure: Failure) {
        let _ = self.trouble.set(failure);
        self.tell();
    }

    /// The first trouble.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.trouble.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// The other side said something.
    pub(crate) fn hear(&self, word: Word) {
        lock(&self.words).push_back(word);
        self.tell();
    }

    /// The oldest word not taken yet.
    pub(crate) fn take_word(&self) -> Option<Word> {
        lock(&self.words).pop_front()
    }

    /// One more frame came.
    pub(crate) fn count_frame(&self) {
        self.frames.fetch_add(1, Ordering::Relaxed);
    }
}

impl SendErrorHandler for Signal {
    fn on_error(&self, _header: Bytes, _payload: Bytes, error: SendError) {
        self.trouble(error.into());
    }
}

/// Locks, also behind a thread that panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
