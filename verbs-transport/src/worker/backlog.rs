//! Bytes received and not taken yet: above a limit the driver holds credits back, and a reader that brings them below
//! half of it wakes the driver. `lock_free_loom` runs it in every order.

use super::sync::{AtomicBool, AtomicUsize, Ordering};

/// Wakes the driver; a wake-up that comes before the sleep is kept.
pub(super) trait Wake {
    /// Once.
    fn wake(&self);
}

/// See the module's text. Many readers, one driver at a time.
#[derive(Debug)]
pub(crate) struct Backlog<W> {
    bytes: AtomicUsize,
    limit: usize,
    withheld: AtomicBool,
    driver: W,
}

impl<W: Wake> Backlog<W> {
    pub(crate) fn new(limit: usize, driver: W) -> Self {
        Self { bytes: AtomicUsize::new(0), limit, withheld: AtomicBool::new(false), driver }
    }

    /// The driver hands on so many bytes.
    pub(super) fn came(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
    }

    /// A reader has taken so many.
    pub(super) fn took(&self, bytes: usize) {
        let before = self.bytes.fetch_sub(bytes, Ordering::AcqRel);
        if before - bytes <= self.limit / 2 && self.withheld.load(Ordering::Acquire) {
            self.driver.wake();
        }
    }

    /// Whether credits are to be held back, with some hysteresis; and whether that has just changed. By the driver.
    pub(crate) fn update(&self) -> (bool, bool) {
        let bytes = self.bytes.load(Ordering::Acquire);
        let was = self.withheld.load(Ordering::Relaxed);
        let now = self.should_withhold(bytes, was);
        if was != now {
            self.withheld.store(now, Ordering::Release);
            // A reader that saw the old flag wakes nobody, so look once more: by a read-modify-write, which falls
            // before or after the reader's. Before: the reader sees the flag. After: its bytes are seen here. With a
            // plain load both could miss the other, on x86 too.
            if now && self.bytes.fetch_add(0, Ordering::AcqRel) <= self.limit / 2 {
                self.driver.wake();
            }
        }
        (now, was != now)
    }

    /// Whether [`Backlog::update`] would change nothing.
    #[inline]
    pub(crate) fn is_unchanged(&self) -> bool {
        let (bytes, was) = (self.bytes.load(Ordering::Acquire), self.withheld.load(Ordering::Relaxed));
        was == self.should_withhold(bytes, was)
    }

    fn should_withhold(&self, bytes: usize, already: bool) -> bool {
        bytes > if already { self.limit / 2 } else { self.limit }
    }

    /// Whether credits are held back.
    pub(crate) fn is_withholding(&self) -> bool {
        self.withheld.load(Ordering::Relaxed)
    }

    /// Bytes waiting.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}
