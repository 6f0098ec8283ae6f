//! The `cargo softroce` command.

fn main() -> std::process::ExitCode {
    softroce_ci::main(std::env::args_os())
}
