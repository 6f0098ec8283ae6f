//! Whether the source still takes operations, and how many it has taken.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::deadline::Deadline;

/// The door of the source.
#[derive(Default)]
pub(crate) struct Admission {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    inside: u64,
}

/// One admitted operation; it has left when this is dropped.
#[must_use]
pub(crate) struct Admitted(Arc<Admission>);

/// Operations were still inside when the time was up. The door stays closed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CloseTimedOut {
    pub(crate) inside: u64,
}

impl Admission {
    /// `None` once closed.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Admitted> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        state.inside += 1;
        Some(Admitted(Arc::clone(self)))
    }

    pub(crate) fn inside(&self) -> u64 {
        self.lock().inside
    }

    /// Closes for good and waits until nobody is inside; looks once at least.
    pub(crate) fn close(&self, deadline: Deadline) -> Result<(), CloseTimedOut> {
        let mut state = self.lock();
        state.closed = true;
        while state.inside > 0 {
            let Some(left) = deadline.remaining() else {
                return Err(CloseTimedOut { inside: state.inside });
            };
            state = self.left.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.lock().inside -= 1;
        self.0.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn closing_waits_for_those_inside_and_lets_nobody_in() {
        let door = Arc::new(Admission::default());
        let inside = door.enter().expect("open");
        let late = door.close(Deadline::after(Duration::ZERO));
        assert_eq!(late, Err(CloseTimedOut { inside: 1 }), "zero looks once");
        assert!(door.enter().is_none(), "closed for good, although the wait failed");
        let closer = std::thread::spawn({
            let door = Arc::clone(&door);
            move || door.close(Deadline::after(Duration::from_secs(60)))
        });
        drop(inside);
        assert_eq!(closer.join().expect("no panic"), Ok(()));
        assert_eq!(door.close(Deadline::after(Duration::ZERO)), Ok(()), "again");
    }
}
