//! Bulk memory on this machine's RDMA device, in real time.

use std::{future::Future, sync::Arc};

use verbs_tests::lab::{DeviceLab, on_device};

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<DeviceLab>) -> R) {
    on_device(DeviceLab::new(), scenario);
}

verbs_tests::bulk_suite!(run);

/// RT-14: messages keep flowing, in order, while 64 MiB are read.
#[test]
fn rt_14_frames_flow_during_a_get_of_64_mib() {
    run(|lab| async move { verbs_tests::scenarios::bulk_moves::frames_flow_during(&*lab, 64 << 20).await });
}

/// RT-14 in full. Pinning the memory alone takes 20 s under emulation, moving it a minute.
#[test]
#[ignore = "takes minutes under emulation and 2 GiB of memory: run it with --ignored"]
fn rt_14_frames_flow_during_a_get_of_a_gibibyte() {
    run(|lab| async move { verbs_tests::scenarios::bulk_moves::frames_flow_during(&*lab, 1 << 30).await });
}
