//! The messaging scenarios on this machine's RDMA device, in real time.

use std::{future::Future, sync::Arc};

use verbs_tests::lab::{DeviceLab, on_device};

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<DeviceLab>) -> R) {
    on_device(DeviceLab::new(), scenario);
}

verbs_tests::messaging_suite!(run);
// They need real time.
verbs_tests::suite!(
    run,
    verbs_tests::scenarios::progress,
    [busy_poll_with_every_way_to_receive, polling_by_hand_needs_no_runtime,]
);
