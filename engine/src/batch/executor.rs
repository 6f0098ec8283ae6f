//! Threads for asynchronous work: as many as there is work at once, kept for a while when there is none.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use super::plan::SubmitError;
use crate::{deadline::Deadline, threads};

/// A thread without work ends after this.
const KEEP: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

/// The budgets for batches and submissions bound how many jobs, and so threads, there can be.
#[derive(Default)]
pub(crate) struct Executor {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    stopped: bool,
    /// Threads that wait for a job, less the jobs that wait for them.
    idle: usize,
    jobs: VecDeque<Job>,
    threads: Vec<JoinHandle<()>>,
}

impl Executor {
    /// Has a thread run what `make` makes: it is called only when nothing can refuse it any more. A job that still waits
    /// when the executor stops is dropped.
    pub(crate) fn run(self: &Arc<Self>, make: impl FnOnce() -> Job) -> Result<(), SubmitError> {
        let mut state = self.lock();
        if state.stopped {
            return Err(SubmitError::Stopped);
        }
        if state.idle > 0 {
            state.idle -= 1;
            self.news.notify_one();
        } else {
            // Those that have ended for want of work.
            state.threads.retain(|thread| !thread.is_finished());
            let executor = Arc::clone(self);
            let thread = threads::spawn("engine-batch", move || executor.work());
            state.threads.push(thread.map_err(|error| SubmitError::Thread(Arc::new(error)))?);
        }
        state.jobs.push_back(make());
        Ok(())
    }

    /// Drops what waits, and joins the threads.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        let jobs = std::mem::take(&mut state.jobs);
        let mut threads = std::mem::take(&mut state.threads);
        drop(state);
        self.news.notify_all();
        drop(jobs);
        threads::join_all(&mut threads);
    }

    pub(crate) fn threads(&self) -> usize {
        let mut state = self.lock();
        state.threads.retain(|thread| !thread.is_finished());
        state.threads.len()
    }

    fn work(&self) {
        // The job that it was started for is there, or another thread has taken it and left it its own.
        let mut state = self.lock();
        while let Some(job) = self.next(state) {
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!("asynchronous work panicked");
            }
            state = self.lock();
            state.idle += 1;
        }
    }

    fn next(&self, mut state: MutexGuard<'_, State>) -> Option<Job> {
        let until = Deadline::after(KEEP);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.stopped {
                return None;
            }
            let Some(left) = until.remaining() else {
                // A job that was meant for this thread would be in the queue.
                state.idle -= 1;
                return None;
            };
            state = self.news.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
