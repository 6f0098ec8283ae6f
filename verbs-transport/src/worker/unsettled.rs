//! A note for the driver: some peer owes something, or frames wait for it. Whoever leaves it has just changed a peer under
//! that peer's lock; the driver takes it away before it looks at the peers, under the same locks. So either the driver sees
//! the change, or the note is there again. `lock_free_loom` runs it in every order.

use super::{
    backlog::Wake,
    sync::{AtomicBool, Ordering},
};

/// See the module's text. Many writers, one driver at a time.
#[derive(Debug)]
pub(crate) struct Unsettled<W> {
    noted: AtomicBool,
    driver: W,
}

impl<W: Wake> Unsettled<W> {
    pub(crate) fn new(driver: W) -> Self {
        Self { noted: AtomicBool::new(false), driver }
    }

    /// Leaves the note, and wakes the driver if it was not there: a driver that has a note comes back by itself. Under the
    /// peer's lock. The first look spares each message a write to a shared cache line.
    pub(crate) fn note(&self) {
        if !self.is_noted() && !self.noted.swap(true, Ordering::AcqRel) {
            self.driver.wake();
        }
    }

    /// The same, by the driver itself.
    pub(crate) fn note_quietly(&self) {
        self.noted.store(true, Ordering::Release);
    }

    /// Before a look at the peers, by the driver.
    pub(crate) fn take(&self) {
        self.noted.store(false, Ordering::Release);
    }

    pub(crate) fn is_noted(&self) -> bool {
        self.noted.load(Ordering::Acquire)
    }
}
