//! The suites of the engine, over this machine's RDMA device and nothing but it.

#![allow(clippy::duplicate_mod, reason = "each suite has what they share as its own")]

#[path = "../../engine/tests/asynchronous.rs"]
mod asynchronous;
#[path = "../../engine/tests/budgets.rs"]
mod budgets;
#[path = "../../engine/tests/differential.rs"]
mod differential;
#[path = "../../engine/tests/direct.rs"]
mod direct;
#[path = "../../engine/tests/notifications.rs"]
mod notifications;
#[path = "../../engine/examples/rdma_roundtrip.rs"]
#[allow(dead_code, reason = "its main")]
mod rdma_roundtrip;
#[path = "../../engine/tests/tcp.rs"]
mod tcp;

/// The example, on the device.
#[test]
fn an_example_goes_over_the_device() {
    let told = rdma_roundtrip::run().expect("there is a device");
    assert!(told.starts_with("over the device"), "{told}");
}
