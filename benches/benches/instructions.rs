//! See [`verbs_benches::instructions`].

use std::process::ExitCode;

fn main() -> ExitCode {
    verbs_benches::instructions::main()
}
