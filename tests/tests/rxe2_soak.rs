//! Two hosts under random faults: see [`verbs_tests::soak`]. One minute, or as long as `VERBS_SOAK_SECONDS` says.

use verbs_tests::soak::{self, Soak};

#[test]
fn soak_under_random_faults() {
    soak::run(Soak::from_env(), env!("CARGO_BIN_EXE_peer"));
}
