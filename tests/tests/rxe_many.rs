//! Many cycles and many peers on this machine's RDMA device.

use verbs_tests::{
    lab::{DeviceLab, on_device},
    scenarios::soak,
};
use verbs_transport::verbs::DeviceConfig;

#[test]
fn b23_five_hundred_cycles_leave_nothing() {
    on_device(DeviceLab::new(), soak::connect_and_close_cycles);
}

#[test]
fn two_hundred_peers_in_one_worker() {
    // A CQ as deep as the default costs each of the small workers 4 MiB on Soft-RoCE.
    let device = DeviceConfig { cq_depth: 10_000, ..DeviceConfig::default() };
    on_device(DeviceLab { device }, soak::many_peers);
}
