//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// A host with a Soft-RoCE device, made on any machine, and things run in it.
#[derive(Debug, Parser)]
#[command(name = "cargo softroce", bin_name = "cargo softroce", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) global: Global,
}

/// How the device is to be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ViaArg {
    /// A device that is there, else the kernel module, else a VM.
    #[default]
    Auto,
    /// A device of this host.
    Device,
    /// The kernel's `rdma_rxe` module, on a dummy link for the time of the command (needs root or sudo).
    Module,
    /// A virtual machine.
    Vm,
}

#[derive(Clone, Debug, Args)]
#[allow(clippy::struct_excessive_bools)] // flags of a command line
pub(crate) struct Global {
    /// How the device is to be had.
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WAY")]
    pub(crate) via: ViaArg,
    /// Memory of a guest, in MiB; outputs that tests write count, too. Default: 4096, or half of the host's.
    #[arg(long, global = true, value_name = "MIB", value_parser = clap::value_parser!(u64).range(512..))]
    pub(crate) memory: Option<u64>,
    /// Virtual processors of a guest.
    #[arg(long, global = true, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) cpus: u32,
    /// Never use KVM, even where it works.
    #[arg(long, global = true)]
    pub(crate) no_kvm: bool,
    /// A directory that commands see as `$SOFTROCE_SHARED` and may write; default: a temporary one.
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) share: Option<PathBuf>,
    /// A directory that commands in a guest may really write, at its own path; else writes end with the guest. Repeatable.
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) writable: Vec<PathBuf>,
    /// A variable for the commands' environment; a NAME alone passes ours on. Repeatable.
    #[arg(long, global = true, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Seconds that a command may take, or under `test` each test binary; default: 3600, and 900 for a test binary; 0: no
    /// limit.
    #[arg(long, global = true, value_name = "SECONDS")]
    pub(crate) timeout: Option<u64>,
    /// Result as JSON on standard output (`test`, `probe`, `setup`).
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Nothing but the commands' own output and errors.
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Shows the guests' consoles.
    #[arg(long, short, global = true)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Only the set-up: says each package before installing it.
    Setup,
    /// Builds the workspace's demo and runs it on the device.
    Demo {
        /// Arguments for the demo.
        #[arg(last = true)]
        args: Vec<OsString>,
    },
    /// Runs every test: host-side ones on this host, device ones on Soft-RoCE.
    Test(TestArgs),
    /// Runs one command there; its output and exit status come back.
    Run(RunArgs),
    /// An interactive shell there.
    Shell {
        /// The shell; default: $SHELL, else /bin/sh.
        #[arg(last = true)]
        command: Vec<OsString>,
    },
    /// Builds the workspace's probe and runs it: what the device grants.
    Probe {
        /// Arguments for the probe.
        #[arg(last = true)]
        args: Vec<OsString>,
    },
    /// Builds the workspace's benchmark with optimisation and runs it; its report is kept.
    Bench {
        /// Arguments for the benchmark.
        #[arg(last = true)]
        args: Vec<OsString>,
    },
    #[command(hide = true)]
    GuestAgent,
    #[command(hide = true)]
    GuestWorker,
    #[command(hide = true)]
    GuestPeerExec {
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Only tests whose name contains this.
    pub(crate) filter: Option<String>,
    /// Only the tests of the host.
    #[arg(long, conflicts_with = "device_only")]
    pub(crate) host_only: bool,
    /// Only the tests that need the device.
    #[arg(long)]
    pub(crate) device_only: bool,
    /// Builds with optimisation.
    #[arg(long)]
    pub(crate) release: bool,
    /// Arguments for each test binary.
    #[arg(last = true)]
    pub(crate) args: Vec<OsString>,
}

/// Which of two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum On {
    /// The first.
    #[value(name = "1")]
    First,
    /// The second.
    #[value(name = "2")]
    Second,
    /// Both, side by side.
    Both,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Number of hosts; two are joined by a virtual cable.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) hosts: u8,
    /// With two hosts: where the command runs.
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) on: On,
    /// With two hosts: another command, for the second host, as a line for `sh -c`.
    #[arg(long, value_name = "LINE", conflicts_with = "on")]
    pub(crate) peer: Option<String>,
    /// The command with its arguments, exactly as given.
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from([&["cargo softroce"], line].concat())
    }

    #[test]
    fn the_definition_is_sound() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_command_s_own_flags_are_left_alone() {
        let cli = parse(&["run", "--hosts", "2", "--", "ls", "--json", "-v", "a b"]).unwrap();
        let Command::Run(run) = cli.command else { panic!() };
        assert_eq!(run.command, ["ls", "--json", "-v", "a b"]);
        assert!(!cli.global.json && !cli.global.verbose);
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(parse(&["run"]).is_err());
        assert!(parse(&["run", "--hosts", "3", "--", "true"]).is_err());
        assert!(parse(&["test", "--host-only", "--device-only"]).is_err());
        assert!(parse(&["setup", "--memory", "12"]).is_err());
    }
}
