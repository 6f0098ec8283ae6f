//! Ends tasks at their deadlines, whatever their transport does.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread::JoinHandle,
    time::Instant,
};

use super::cell::BatchCell;
use crate::{deadline::Deadline, threads};

/// One thread, from the first asynchronous submission on.
#[derive(Default)]
pub(crate) struct Timekeeper {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    stopped: bool,
    next_serial: u64,
    /// A serial number tells equal deadlines apart.
    entries: BTreeMap<(Instant, u64), (Weak<BatchCell>, usize)>,
    thread: Option<JoinHandle<()>>,
}

/// One deadline; forgotten when dropped.
pub(super) struct Timer {
    keeper: Arc<Timekeeper>,
    key: (Instant, u64),
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.keeper.lock().entries.remove(&self.key);
    }
}

impl Timekeeper {
    /// Starts the thread if it is not there.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.lock();
        if state.thread.is_none() && !state.stopped {
            let keeper = Arc::clone(self);
            state.thread = Some(threads::spawn("engine-timer", move || keeper.run())?);
        }
        Ok(())
    }

    /// Times `group` out at `deadline`.
    pub(super) fn add(self: &Arc<Self>, deadline: Deadline, cell: Weak<BatchCell>, group: usize) -> Timer {
        let mut state = self.lock();
        let key = (deadline.instant(), state.next_serial);
        state.next_serial += 1;
        state.entries.insert(key, (cell, group));
        if state.entries.first_key_value().is_some_and(|(first, _)| *first == key) {
            self.news.notify_all();
        }
        Timer { keeper: Arc::clone(self), key }
    }

    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        let thread = state.thread.take();
        drop(state);
        self.news.notify_all();
        threads::join_all(&mut thread.into_iter().collect());
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.stopped {
            let now = Instant::now();
            match state.entries.first_key_value().map(|((at, _), _)| *at) {
                None => state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(at) if at > now => {
                    state = self.news.wait_timeout(state, at - now).unwrap_or_else(PoisonError::into_inner).0;
                }
                Some(_) => {
                    let due = state.entries.pop_first();
                    drop(state);
                    if let Some((_, (cell, group))) = due {
                        if let Some(cell) = cell.upgrade() {
                            cell.expire(group);
                        }
                    }
                    state = self.lock();
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
