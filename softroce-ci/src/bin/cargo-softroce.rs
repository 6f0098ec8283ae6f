//! The `cargo softroce` command.
fn main() {}
