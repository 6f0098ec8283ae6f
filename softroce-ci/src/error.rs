//! Everything that can go wrong, each with what to do about it.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

/// Why `cargo softroce` could not do what it was asked. A command that ran and failed is not here: its exit status is
/// returned as it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation of the operating system failed; `what` names it and its object.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with the path.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A signal asked us to stop. Everything that was started has been stopped.
    #[error("stopped by {}", signal_name(*.0))]
    Interrupted(i32),
    /// Packages are missing and we may not install them: run the line as root, then try again.
    #[error(
        "these packages are missing:\n{missing}\nInstall them as root, then run the command again:\n\n    {command}\n"
    )]
    NeedsRoot {
        /// One line a package, with the reason.
        missing: String,
        /// The exact command.
        command: String,
    },
    /// No apt here: install the equivalents by hand.
    #[error(
        "this is not a Debian or Ubuntu system (no apt-get), so these have to be installed by hand; \
         the names are Debian's:\n{missing}"
    )]
    NotDebian {
        /// One line a package, with the reason.
        missing: String,
    },
    /// apt-get or dpkg-deb ended with an error, which it printed itself.
    #[error("`{command}` failed ({status}); its own messages are above")]
    Install {
        /// The command as run.
        command: String,
        /// How it ended.
        status: String,
    },
    /// Nobody has taught the VM this processor yet.
    #[error(
        "no Soft-RoCE virtual machine for the architecture `{0}` (x86_64 and aarch64 are known); use --via module or --via device"
    )]
    Architecture(String),
    /// No kernel image that has `rdma_rxe` could be had.
    #[error("no kernel for the virtual machine: {0}")]
    Kernel(String),
    /// The file system is too full.
    #[error("{path} has {free_mib} MiB free and {needed_mib} MiB are needed; make room or set XDG_CACHE_HOME", path = .path.display())]
    DiskSpace {
        /// Where.
        path: PathBuf,
        /// Free, in MiB.
        free_mib: u64,
        /// Needed, in MiB.
        needed_mib: u64,
    },
    /// The forced way to a device is not possible here.
    #[error("--via {way}: {why}")]
    Via {
        /// `device`, `module` or `vm`.
        way: &'static str,
        /// What is missing.
        why: String,
    },
    /// QEMU ended before the guest was up.
    #[error("QEMU ended by itself ({status}):\n{said}")]
    Qemu {
        /// How it ended.
        status: String,
        /// Its messages and the console's last lines.
        said: String,
    },
    /// The guest did not come up.
    #[error("the guest was not up after {seconds} s; the console's last lines:\n{console}")]
    BootTimeout {
        /// How long we waited.
        seconds: u64,
        /// The console's last lines.
        console: String,
    },
    /// The guest's own start found a fault, such as a module that does not load.
    #[error("the guest could not be set up: {why}; the console's last lines:\n{console}")]
    GuestSetup {
        /// The guest's words.
        why: String,
        /// The console's last lines.
        console: String,
    },
    /// The guest's kernel gave up: a bug in the kernel or the driver, or a provoked one.
    #[error("the kernel of {host} crashed; the console's last lines:\n{console}")]
    Crashed {
        /// Which guest.
        host: String,
        /// The console's last lines.
        console: String,
    },
    /// No sign of life: the guest hangs, or this machine is far too busy.
    #[error("{host} hangs: no sign of life for {seconds} s; the console's last lines:\n{console}")]
    Hung {
        /// Which guest.
        host: String,
        /// How long it was silent.
        seconds: u64,
        /// The console's last lines.
        console: String,
    },
    /// The command took longer than `--timeout`.
    #[error("the command was stopped: it ran longer than --timeout {0} s")]
    Timeout(u64),
    /// A cargo that we ran failed, with its messages above.
    #[error("`{0}` failed; its own messages are above")]
    Cargo(String),
    /// `Cargo.toml` or the arguments ask for something that cannot be.
    #[error("{0}")]
    Config(String),
}

impl Error {
    /// The exit status for this error: 124 for a time-out, 128 + n for a signal, else 125, so that it cannot be taken
    /// for the status of a command that ran.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Timeout(_) => ExitCode::from(124),
            Self::Interrupted(signal) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(255)),
            _ => ExitCode::from(125),
        }
    }
}

/// Names the operation that an [`io::Error`] came from.
pub(crate) trait Context<T> {
    /// `what` reads "read /path" or the like.
    fn context(self, what: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Io { what: what(), source: source.into() })
    }
}

fn signal_name(signal: i32) -> String {
    match signal {
        1 => "SIGHUP".to_owned(),
        2 => "SIGINT".to_owned(),
        13 => "SIGPIPE: the reader of the output is gone".to_owned(),
        15 => "SIGTERM".to_owned(),
        other => format!("signal {other}"),
    }
}
