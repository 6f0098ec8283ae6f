//! One point in time that bounds everything an operation waits for.

use std::time::{Duration, Instant};

/// Absolute, so that no number of waits extends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deadline(Instant);

/// Beyond any use, and far from what `Instant` cannot hold.
const FAR: Duration = Duration::from_secs(100 * 365 * 86_400);

impl Deadline {
    pub(crate) fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout.min(FAR))
    }

    pub(crate) fn at(instant: Instant) -> Self {
        Self(instant)
    }

    pub(crate) fn instant(self) -> Instant {
        self.0
    }

    /// What is left; `None` once it has passed.
    pub(crate) fn remaining(self) -> Option<Duration> {
        self.0.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_of_no_time_and_all_of_forever() {
        assert_eq!(Deadline::after(Duration::ZERO).remaining(), None);
        assert!(Deadline::after(Duration::MAX).remaining() > Some(Duration::from_secs(86_400)));
    }
}
