//! `verbs-perf`: see [`verbs_benches::perf`].

use std::process::ExitCode;

fn main() -> ExitCode {
    verbs_benches::perf::main()
}
