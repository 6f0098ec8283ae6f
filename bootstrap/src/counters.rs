//! What becomes of inbound connections. Each is counted once when it is taken and once when it ends.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use crate::{
    listen::{AcceptError, ListenerStats},
    status::Status,
    wire::WireError,
};

#[derive(Debug, Default)]
pub(crate) struct Counters {
    accepted: AtomicU64,
    completed: AtomicU64,
    refused: Mutex<BTreeMap<Status, u64>>,
    timed_out: AtomicU64,
    garbage: AtomicU64,
    oversize: AtomicU64,
    closed_early: AtomicU64,
    over_limit: AtomicU64,
    stopped: AtomicU64,
    pending: AtomicU64,
    in_progress: AtomicU64,
    accept_errors: AtomicU64,
}

/// One inbound connection's place in the gauges. Dropping it without [`Slot::end`] (a panic, or the listener's own
/// drop) counts it as stopped.
#[derive(Debug)]
pub(crate) struct Slot {
    counters: Arc<Counters>,
    in_progress: bool,
    ended: bool,
}

impl Counters {
    /// Counts a connection; `None` when too many are pending: close it.
    pub(crate) fn accept(self: &Arc<Self>, max_pending: usize) -> Option<Slot> {
        self.accepted.fetch_add(1, Relaxed);
        // Only the accept loop adds, so the gauge cannot pass the limit between the two.
        if self.pending.load(Relaxed) >= max_pending as u64 {
            self.over_limit.fetch_add(1, Relaxed);
            return None;
        }
        self.pending.fetch_add(1, Relaxed);
        Some(Slot { counters: Arc::clone(self), in_progress: false, ended: false })
    }

    pub(crate) fn accept_failed(&self) {
        self.accept_errors.fetch_add(1, Relaxed);
    }

    pub(crate) fn snapshot(&self) -> ListenerStats {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        ListenerStats {
            accepted: self.accepted.load(Relaxed),
            completed: self.completed.load(Relaxed),
            refused: refused.iter().map(|(status, count)| (*status, *count)).collect(),
            timed_out: self.timed_out.load(Relaxed),
            garbage: self.garbage.load(Relaxed),
            oversize: self.oversize.load(Relaxed),
            closed_early: self.closed_early.load(Relaxed),
            over_limit: self.over_limit.load(Relaxed),
            stopped: self.stopped.load(Relaxed),
            pending: self.pending.load(Relaxed),
            in_progress: self.in_progress.load(Relaxed),
            accept_errors: self.accept_errors.load(Relaxed),
        }
    }
}

impl Slot {
    /// The hello is accepted and it is this exchange's turn.
    pub(crate) fn turn(&mut self) {
        self.in_progress = true;
        self.counters.in_progress.fetch_add(1, Relaxed);
        self.counters.pending.fetch_sub(1, Relaxed);
    }

    /// The exchange is over.
    pub(crate) fn end(mut self, end: Result<(), &AcceptError>) {
        self.ended = true;
        let counters = &self.counters;
        let counter = match end {
            Ok(()) => &counters.completed,
            Err(AcceptError::Timeout { .. }) => &counters.timed_out,
            Err(AcceptError::Closed { .. } | AcceptError::Io { .. }) => &counters.closed_early,
            Err(AcceptError::Protocol(WireError::Oversize { .. })) => &counters.oversize,
            Err(AcceptError::Protocol(_)) => &counters.garbage,
            Err(AcceptError::Stopped) => &counters.stopped,
            Err(AcceptError::Refused(refusal)) => {
                *counters.refused.lock().unwrap_or_else(PoisonError::into_inner).entry(refusal.status).or_default() +=
                    1;
                return;
            }
        };
        counter.fetch_add(1, Relaxed);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let gauge = if self.in_progress { &self.counters.in_progress } else { &self.counters.pending };
        gauge.fetch_sub(1, Relaxed);
        if !self.ended {
            self.counters.stopped.fetch_add(1, Relaxed);
        }
    }
}
