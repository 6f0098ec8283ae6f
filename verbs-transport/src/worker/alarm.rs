//! The one timer of a driver. It may ring early, never late: most deadlines move on with each completion, and a timer that is
//! set anew each time costs more than one that rings for nothing now and then.

use std::pin::Pin;

use tokio::time::{Instant, Sleep, sleep_until};

/// See the module's text. For drivers of layers, too.
#[derive(Debug)]
pub struct Alarm {
    timer: Pin<Box<Sleep>>,
    set: bool,
}

impl Default for Alarm {
    fn default() -> Self {
        Self::new()
    }
}

impl Alarm {
    /// Not set. Needs a runtime with its timers.
    pub fn new() -> Self {
        Self { timer: Box::pin(sleep_until(Instant::now())), set: false }
    }

    /// To ring at that moment, or before.
    pub fn by(&mut self, due: Instant) {
        if !self.set || due < self.timer.deadline() {
            self.timer.as_mut().reset(due);
            self.set = true;
        }
    }

    /// Whether it will ring.
    pub fn is_set(&self) -> bool {
        self.set
    }

    /// Waits until it rings, once. Cancel safe.
    pub async fn rings(&mut self) {
        self.timer.as_mut().await;
        self.set = false;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_rings_at_the_earliest_time_that_it_was_given_and_once() {
        let (began, mut alarm) = (Instant::now(), Alarm::new());
        assert!(!alarm.is_set());
        for seconds in [5, 3, 9] {
            alarm.by(began + Duration::from_secs(seconds));
        }
        alarm.rings().await;
        assert_eq!((began.elapsed(), alarm.is_set()), (Duration::from_secs(3), false));
        alarm.by(began + Duration::from_secs(9));
        alarm.rings().await;
        assert_eq!(began.elapsed(), Duration::from_secs(9));
    }
}
