//! Tasks that wait for news.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    task::Waker,
};

/// Each waiting task once. Waking is done without any lock of ours: a waker is the caller's code.
#[derive(Default)]
pub(crate) struct Wakers(Vec<Waker>);

impl Wakers {
    pub(crate) fn add(&mut self, waker: &Waker) {
        if !self.0.iter().any(|known| known.will_wake(waker)) {
            self.0.push(waker.clone());
        }
    }

    pub(crate) fn wake(self) {
        for waker in self.0 {
            if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
                tracing::error!("a waker panicked; its task may not notice that its operation has ended");
            }
        }
    }
}
