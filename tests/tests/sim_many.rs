//! Many cycles and many peers on simulated hosts.

use verbs_tests::{lab::on_sim, scenarios::soak};
use verbs_transport::sim::Faults;

#[test]
fn b23_five_thousand_cycles_leave_nothing() {
    on_sim(23, Faults::none(), soak::connect_and_close_cycles);
}

#[test]
fn two_thousand_peers_in_one_worker() {
    on_sim(2000, Faults::none(), soak::many_peers);
}
