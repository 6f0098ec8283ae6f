//! No operation takes more than 5% more instructions than its budget allows: `src/instructions/budgets.json`.
//!
//! What is counted is built as the benches are, with all optimisation, hence by a `cargo` of its own.

use std::process::Command;

#[test]
fn every_operation_is_within_its_budget() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut bench = Command::new(cargo);
    bench.args(["bench", "--quiet", "--locked", "--package", "verbs-benches", "--bench", "instructions"]);
    let output = bench.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo runs, since this was built");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    println!("{said}");
    assert!(said.contains("| message "), "nothing was counted: {said}");
}
