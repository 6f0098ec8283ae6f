//! `cargo softroce`: makes a host with a Soft-RoCE device, whatever the machine is, and runs things in it.
//!
//! 1. A device is present: it is used.
//! 2. The kernel can load `rdma_rxe`: a device is made on a dummy link, and removed at the end.
//! 3. Otherwise a VM boots: a distribution kernel, this machine's root shared read-only with a writable overlay, so
//!    that the same programs run at the same paths.
//!
//! The README says how to use it. Inside:
//!
//! | what | where |
//! |---|---|
//! | what the user says | `cli`, `metadata` |
//! | what has to be there | `setup`, `kernel`, `arch`, `kvm` |
//! | the guest's first root | `initramfs`, `cpio`, `modules`, `elf` |
//! | the guests from outside | `boot`, `qemu`, `machine`, `testbed` |
//! | the guests from inside (this same program is their agent) | `guest`, `guest_device`, `peer` |
//! | commands and their streams | `wire`, `commands`, `exec`, `output`, `term`, `signals` |
//! | the subcommands | `run`, `program`, `test`, `artifacts`, `report`, `klog`, `glob` |

mod arch;
mod artifacts;
mod boot;

mod cli;
mod commands;
mod cpio;
mod elf;
mod error;
mod exec;
mod glob;
mod guest;
mod guest_device;
mod initramfs;
mod kernel;
mod klog;
mod kvm;
mod machine;
mod metadata;
mod modules;
mod output;
mod peer;
mod place;
mod program;
mod progress;
mod qemu;
mod report;
mod run;
mod setup;
mod signals;
mod term;
mod test;
mod testbed;
mod via;
mod wire;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser as _;

pub use error::Error;

/// Runs the command line `args` (the program's name first) and returns the exit status.
///
/// Cargo calls a subcommand with the subcommand's name as the first argument; it may be left out.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(|word| word == "softroce") {
        args.remove(1);
    }
    let cli = match cli::Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            let _closed = error.print();
            return if error.use_stderr() { ExitCode::from(125) } else { ExitCode::SUCCESS };
        }
    };
    match dispatch(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cargo softroce: {error}");
            error.exit_code()
        }
    }
}

fn dispatch(cli: cli::Cli) -> Result<ExitCode, Error> {
    use cli::Command;
    if !matches!(cli.command, Command::GuestAgent | Command::GuestWorker | Command::GuestPeerExec { .. }) {
        signals::watch()?;
    }
    match cli.command {
        Command::GuestAgent => Ok(guest::process_one()),
        Command::GuestWorker => Ok(guest::worker()),
        Command::GuestPeerExec { command } => Ok(peer::client(command)),
        Command::Setup => run::setup(&cli.global),
        Command::Run(args) => run::run(&cli.global, args),
        Command::Shell { command } => run::shell(&cli.global, command),
        Command::Test(args) => test::test(&cli.global, &args),
        Command::Demo { args } => program::demo(&cli.global, args),
        Command::Probe { args } => program::probe(&cli.global, args),
        Command::Bench { args } => program::bench(&cli.global, args),
    }
}
