//! Nothing is allocated for a message on the handler path, by the library or by the simulated fabric. The device's turn is in
//! `rxe_allocations`.
//!
//! One test a process: every block counts, whoever allocates it.

use verbs_tests::{lab::SimLab, steady::Steady};
use verbs_transport::{Progress, sim::SimConfig};

#[test]
fn messages_to_a_handler_allocate_nothing_in_steady_state() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    for progress in [Progress::Manual, Progress::Event] {
        runtime.block_on(async {
            let lab = SimLab::of(SimConfig::default());
            let steady = Steady::start(&lab, progress).await;
            steady.assert_allocates_nothing(200).await;
            steady.stop().await;
        });
    }
}
