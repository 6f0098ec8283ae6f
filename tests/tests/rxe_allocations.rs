//! Nothing is allocated for a message on the handler path, on a device: by the library, or by the device's own.
//!
//! One test a process: every block counts, whoever allocates it.

use verbs_tests::{
    lab::DeviceLab,
    leaks::{Census, device_turn},
    steady::Steady,
};
use verbs_transport::Progress;

#[test]
fn messages_to_a_handler_allocate_nothing_in_steady_state() {
    let _turn = device_turn();
    let before = Census::take();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    for progress in [Progress::Manual, Progress::Event, Progress::BusyPoll] {
        runtime.block_on(async {
            let steady = Steady::start(&DeviceLab::new(), progress).await;
            steady.assert_allocates_nothing(20).await;
            steady.stop().await;
        });
    }
    drop(runtime);
    before.assert_same();
}
