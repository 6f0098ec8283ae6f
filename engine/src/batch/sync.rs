//! A submission on the caller's own thread.

use std::cell::RefCell;

use super::{
    execute::{Moved, Observer, run_requests},
    plan::Plan,
    report::BatchReport,
    slice::DataPath,
};
use crate::{deadline::Deadline, error::Failure};

struct Recorder(RefCell<BatchReport>);

impl Observer for Recorder {
    fn start(&self, _index: usize) -> bool {
        true
    }

    fn post(&self, _index: usize) -> bool {
        true
    }

    fn ended(&self, index: usize, outcome: Result<Moved, Failure>) {
        self.0.borrow_mut().record(index, outcome);
    }
}

/// Carries out a checked submission; the report says nothing yet about its notification.
pub(crate) fn run_and_report(path: &dyn DataPath, plan: &mut Plan, deadline: Deadline) -> BatchReport {
    let recorder = Recorder(RefCell::new(BatchReport::new(plan.len(), plan.mode.profile)));
    run_requests(path, plan.take_slices(None), deadline, &recorder);
    recorder.0.into_inner()
}
