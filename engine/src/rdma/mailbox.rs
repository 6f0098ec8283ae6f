//! Where one QP's completions wait for the thread that works with it.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use verbs_transport::fabric::WcStatus;

use super::grant::Marker;
use crate::deadline::Deadline;

/// The completions of one QP.
pub(crate) struct Mailbox {
    state: Mutex<State>,
    news: Condvar,
    /// A QP with sends outstanding of which none has completed for so long is given up: some devices hang without a word.
    stall: Duration,
}

/// Between looks at QPs that may hang.
const LOOK: Duration = Duration::from_millis(100);

/// Wakes whoever waits for several QPs.
#[derive(Default)]
pub(crate) struct Bell {
    rung: Mutex<u64>,
    news: Condvar,
}

impl Bell {
    /// How often it was rung.
    pub(crate) fn count(&self) -> u64 {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it was rung more often than that, or the deadline passes; not for long, as a QP that hangs rings nothing.
    pub(crate) fn wait(&self, seen: u64, deadline: Deadline) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.remaining().unwrap_or_default().min(LOOK);
        drop(self.news.wait_timeout_while(rung, left, |rung| *rung == seen).unwrap_or_else(PoisonError::into_inner));
    }

    fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.news.notify_all();
    }
}

#[derive(Default)]
struct State {
    /// Posted sends without a completion. All are signaled.
    outstanding: u32,
    /// When one last completed, or the first of them was posted.
    moved: Option<Instant>,
    /// Why the QP is of no use any more.
    broken: Option<Broken>,
    /// Markers, with the bytes that came with them.
    receipts: VecDeque<(Marker, u32)>,
    stopped: bool,
    /// Rung with each piece of news.
    bell: Option<Arc<Bell>>,
}

/// A QP of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("a work request failed: {0}")]
    Send(WcStatus),
    #[error("a receive failed: {0}")]
    Receive(WcStatus),
    #[error("the device is lost: {0}")]
    Device(String),
    #[error("{outstanding} work requests are posted, and none has completed for {after:?}")]
    Stalled { outstanding: u32, after: Duration },
}

/// Why a wait ended without what was waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WaitError {
    Broken(Broken),
    TimedOut,
    /// The engine ends.
    Stopped,
}

impl State {
    /// How long the QP may still stand still; `None` if nothing is outstanding. One that has stood still for too long is
    /// broken from then on.
    fn may_stall(&mut self, stall: Duration) -> Option<Duration> {
        let since = self.moved.filter(|_| self.outstanding > 0)?;
        let left = stall.saturating_sub(since.elapsed());
        if left.is_zero() {
            self.broken.get_or_insert(Broken::Stalled { outstanding: self.outstanding, after: stall });
        }
        Some(left)
    }
}

impl Mailbox {
    pub(crate) fn new(stall: Duration) -> Self {
        Self { state: Mutex::default(), news: Condvar::new(), stall }
    }

    /// Before the post: completions may be faster than its return.
    pub(crate) fn posting(&self, count: u32) {
        let mut state = self.lock();
        if state.outstanding == 0 {
            state.moved = Some(Instant::now());
        }
        state.outstanding += count;
    }

    /// The device did not take these.
    pub(crate) fn refused(&self, count: u32) {
        self.change(|state| state.outstanding = state.outstanding.saturating_sub(count));
    }

    pub(super) fn sent(&self, failed: Option<WcStatus>) {
        self.change(|state| {
            state.outstanding = state.outstanding.saturating_sub(1);
            state.moved = Some(Instant::now());
            if let Some(status) = failed {
                // The first is the cause, the rest is flushed.
                state.broken.get_or_insert(Broken::Send(status));
            }
        });
    }

    pub(super) fn receipt(&self, marker: Marker, bytes: u32) {
        self.change(|state| state.receipts.push_back((marker, bytes)));
    }

    pub(super) fn receive_failed(&self, status: WcStatus) {
        self.change(|state| {
            state.broken.get_or_insert(Broken::Receive(status));
        });
    }

    pub(super) fn lose(&self, why: &str) {
        self.change(|state| {
            state.broken.get_or_insert(Broken::Device(why.to_owned()));
            // No completion will come.
            state.outstanding = 0;
        });
    }

    pub(super) fn interrupt(&self) {
        self.change(|state| state.stopped = true);
    }

    pub(crate) fn outstanding(&self) -> u32 {
        self.lock().outstanding
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.lock().broken.is_some()
    }

    /// Whether the QP is as between two operations: nothing outstanding, nothing that was not asked for.
    pub(crate) fn is_quiet(&self) -> bool {
        let state = self.lock();
        state.outstanding == 0 && state.broken.is_none() && state.receipts.is_empty()
    }

    /// Waits until at most so many sends are outstanding.
    pub(crate) fn wait_sends(&self, at_most: u32, deadline: Deadline) -> Result<(), WaitError> {
        self.wait(deadline, |state| (state.outstanding <= at_most).then_some(()))
    }

    /// Waits for the next marker, and its bytes. One that has come counts, whatever happened to the QP since.
    pub(crate) fn wait_receipt(&self, deadline: Deadline) -> Result<(Marker, u32), WaitError> {
        if let Some(receipt) = self.lock().receipts.pop_front() {
            return Ok(receipt);
        }
        self.wait(deadline, |state| state.receipts.pop_front())
    }

    fn wait<T>(&self, deadline: Deadline, mut ready: impl FnMut(&mut State) -> Option<T>) -> Result<T, WaitError> {
        let mut state = self.lock();
        loop {
            if let Some(broken) = &state.broken {
                return Err(WaitError::Broken(broken.clone()));
            }
            if let Some(result) = ready(&mut state) {
                return Ok(result);
            }
            if state.stopped {
                return Err(WaitError::Stopped);
            }
            let mut left = deadline.remaining().ok_or(WaitError::TimedOut)?;
            if let Some(stall) = state.may_stall(self.stall) {
                if stall.is_zero() {
                    continue;
                }
                left = left.min(stall);
            }
            state = self.news.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// How many sends are outstanding, or why no more will complete well.
    pub(crate) fn sends(&self) -> Result<u32, WaitError> {
        let mut state = self.lock();
        state.may_stall(self.stall);
        match &state.broken {
            Some(broken) => Err(WaitError::Broken(broken.clone())),
            None if state.stopped => Err(WaitError::Stopped),
            None => Ok(state.outstanding),
        }
    }

    /// That bell is rung with each piece of news from now on; `None`: no bell.
    pub(crate) fn tie(&self, bell: Option<Arc<Bell>>) {
        self.lock().bell = bell;
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let bell = state.bell.clone();
        drop(state);
        self.news.notify_all();
        if let Some(bell) = bell {
            bell.ring();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const FAR: Duration = Duration::from_secs(3600);

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    fn now() -> Deadline {
        Deadline::after(Duration::ZERO)
    }

    #[test]
    fn completions_before_the_post_returns_count() {
        let mail = Mailbox::new(FAR);
        mail.posting(2);
        mail.sent(None);
        assert_eq!(mail.wait_sends(0, now()), Err(WaitError::TimedOut));
        assert_eq!((mail.wait_sends(1, now()), mail.outstanding()), (Ok(()), 1));
        mail.refused(1);
        assert!(mail.is_quiet() && mail.wait_sends(0, now()).is_ok());
    }

    /// E-83: a device that hangs without a word is noticed, whatever the caller's deadline; one that moves is not.
    #[test]
    fn a_qp_that_stands_still_is_given_up() {
        let stall = Duration::from_millis(40);
        let mail = Mailbox::new(stall);
        assert_eq!(mail.wait_receipt(Deadline::after(stall * 3)), Err(WaitError::TimedOut), "nothing is outstanding");
        let began = Instant::now();
        mail.posting(3);
        std::thread::sleep(stall / 2);
        mail.sent(None);
        let hangs = Err(WaitError::Broken(Broken::Stalled { outstanding: 2, after: stall }));
        assert_eq!(mail.wait_sends(0, soon()), hangs);
        assert!(began.elapsed() >= stall * 3 / 2, "counted from the last completion");
        assert_eq!(mail.sends().map(drop), hangs);
        assert!(mail.is_broken() && !mail.is_quiet());
    }

    #[test]
    fn the_first_failure_is_the_cause() {
        let mail = Mailbox::new(FAR);
        mail.posting(2);
        mail.sent(Some(WcStatus::RemoteAccess));
        mail.sent(Some(WcStatus::Flushed));
        mail.receive_failed(WcStatus::Flushed);
        let cause = WaitError::Broken(Broken::Send(WcStatus::RemoteAccess));
        assert_eq!(mail.wait_sends(0, soon()), Err(cause));
        assert_eq!(mail.outstanding(), 0);
    }

    #[test]
    fn a_receipt_that_came_counts_although_the_qp_broke_behind_it() {
        let mail = Mailbox::new(FAR);
        mail.receipt(Marker::Immediate(3), 0);
        assert!(!mail.is_quiet());
        mail.receive_failed(WcStatus::Flushed);
        assert_eq!(mail.wait_receipt(soon()), Ok((Marker::Immediate(3), 0)));
        assert_eq!(mail.wait_receipt(soon()), Err(WaitError::Broken(Broken::Receive(WcStatus::Flushed))));
    }

    #[test]
    fn whoever_waits_is_woken() {
        for news in [
            |mail: &Mailbox| mail.receipt(Marker::Immediate(1), 0),
            Mailbox::interrupt,
            |mail: &Mailbox| {
                mail.lose("unplugged");
            },
        ] {
            let mail = Arc::new(Mailbox::new(FAR));
            let waiting = std::thread::spawn({
                let mail = Arc::clone(&mail);
                move || mail.wait_receipt(soon())
            });
            news(&mail);
            assert_ne!(waiting.join().expect("no panic"), Err(WaitError::TimedOut));
        }
    }
}
