//! Many cycles and many peers on this machine's RDMA device.

use verbs_tests::{
    lab::{DeviceLab, on_device},
    scenarios::soak,
};

#[test]
fn b23_five_hundred_cycles_leave_nothing() {
    on_device(DeviceLab::new(), soak::connect_and_close_cycles);
}

#[test]
fn two_hundred_peers_in_one_worker() {
    on_device(DeviceLab::new(), soak::many_peers);
}
