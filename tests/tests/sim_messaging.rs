//! The messaging scenarios on simulated hosts, in fake time.

use std::{future::Future, sync::Arc};

use verbs_tests::lab::{SimLab, on_sim};
use verbs_transport::sim::Faults;

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<SimLab>) -> R) {
    on_sim(1, Faults::none(), scenario);
}

verbs_tests::messaging_suite!(run);
