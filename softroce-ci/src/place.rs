//! From the options to a place with a device: which way, what is missing, and then the testbed.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::arch::Arch;
use crate::boot::Plan;
use crate::cli::{Global, ViaArg};
use crate::error::{Context as _, Error};
use crate::glob;
use crate::kernel::Kernel;
use crate::kvm;
use crate::progress::Progress;
use crate::qemu::Accel;
use crate::setup::{self, Privilege};
use crate::testbed::Testbed;
use crate::via::{self, Local, Via};
use crate::wire::ExecSpec;

const DEFAULT_MEMORY_MIB: u64 = 4096;

/// Everything is there; a testbed can start.
pub(crate) struct Ready {
    /// The way that was chosen.
    pub(crate) via: Via,
    vm: Option<Vm>,
}

struct Vm {
    arch: Arch,
    kernel: Kernel,
    accel: Accel,
    busybox: PathBuf,
}

/// Chooses the way and sets up what it needs. With everything there it does nothing, quickly and offline.
pub(crate) fn prepare(global: &Global, hosts: u8, extra: &[String], progress: &Progress) -> Result<Ready, Error> {
    for dir in global.share.iter().chain(&global.writable) {
        directory(dir)?; // a wrong one is better said now than after a boot
    }
    let via = choose(global.via, hosts, || {
        let privilege = Privilege::find();
        if via::module_loads(privilege).is_err() {
            return Ok(false);
        }
        setup::packages(None, extra, progress)?; // `rdma` may have been missing so far
        Ok(Local::make(privilege).is_ok())
    })?;
    if via != Via::Vm {
        setup::packages(None, extra, progress)?;
        return Ok(Ready { via, vm: None });
    }
    let arch = Arch::host()?;
    setup::packages(Some(arch), extra, progress)?;
    let cache = setup::cache_dir()?;
    let kernel = Kernel::obtain(&cache, arch, progress)?;
    let accel = if global.no_kvm { Accel::Tcg } else { kvm::choose(arch, &kernel, &cache, progress)? };
    Ok(Ready { via, vm: Some(Vm { arch, kernel, accel, busybox: setup::busybox()? }) })
}

/// `module_works` makes a device for real, and takes it away again: in a container the module may load and yet be of no
/// use, as rxe works only in the first network namespace.
fn choose(asked: ViaArg, hosts: u8, module_works: impl FnOnce() -> Result<bool, Error>) -> Result<Via, Error> {
    let single = |way| Error::Via { way, why: "two hosts need two virtual machines: use --via vm".to_owned() };
    match asked {
        ViaArg::Device if hosts > 1 => Err(single("device")),
        ViaArg::Module if hosts > 1 => Err(single("module")),
        ViaArg::Device if Local::find().is_none() => Err(Error::Via {
            way: "device",
            why: "/sys/class/infiniband has no device with an active port and a node that can be opened".to_owned(),
        }),
        ViaArg::Device => Ok(Via::Device),
        ViaArg::Module => match via::module_loads(Privilege::find()) {
            Ok(()) => Ok(Via::Module),
            Err(why) => Err(Error::Via { way: "module", why }),
        },
        ViaArg::Vm => Ok(Via::Vm),
        ViaArg::Auto if hosts > 1 => Ok(Via::Vm),
        ViaArg::Auto if Local::find().is_some() => Ok(Via::Device),
        ViaArg::Auto => Ok(if module_works()? { Via::Module } else { Via::Vm }),
    }
}

impl Ready {
    /// One line about what will be used.
    pub(crate) fn describe(&self) -> String {
        match (&self.vm, self.via) {
            (Some(vm), _) => {
                let how = if vm.accel == Accel::Kvm { "KVM" } else { "TCG" };
                format!("a virtual machine with Linux {} under {how}", vm.kernel.release)
            }
            (None, Via::Module) => "the kernel's rdma_rxe on a dummy link".to_owned(),
            (None, _) => {
                format!("the device {}", Local::find().map_or(String::new(), |local| local.device().to_owned()))
            }
        }
    }

    /// Makes the place. `visible` are directories that commands need.
    pub(crate) fn start(
        &self,
        global: &Global,
        hosts: u8,
        visible: &[PathBuf],
        progress: &Progress,
    ) -> Result<Testbed, Error> {
        let share = global.share.as_deref().map(directory).transpose()?;
        let Some(vm) = &self.vm else {
            let privilege = Privilege::find();
            via::lift_memlock(privilege);
            let local = if self.via == Via::Module { Some(Local::make(privilege)?) } else { Local::find() };
            let gone = || Error::Via { way: "device", why: "the device has just gone".to_owned() };
            progress.clear();
            return Testbed::here(local.ok_or_else(gone)?, share.as_deref());
        };
        let writable = global.writable.iter().map(|dir| directory(dir)).collect::<Result<Vec<_>, _>>()?;
        let mut visible: Vec<PathBuf> = visible.iter().filter(|dir| hidden(dir)).cloned().collect();
        visible.sort();
        visible.dedup();
        Testbed::guests(&Plan {
            arch: vm.arch,
            accel: vm.accel,
            kernel: &vm.kernel,
            busybox: &vm.busybox,
            hosts,
            memory_mib: global.memory.unwrap_or_else(|| default_memory(hosts)),
            cpus: global.cpus,
            verbose: global.verbose,
            share: share.as_deref(),
            writable: &writable,
            visible: &visible,
            progress,
        })
    }
}

/// The guest has file systems of its own at these places, which would hide the host's.
fn hidden(dir: &Path) -> bool {
    ["/run", "/dev", "/proc", "/sys"].iter().any(|own| dir.starts_with(own))
}

/// An existing directory, as an absolute path without links.
fn directory(dir: &Path) -> Result<PathBuf, Error> {
    let path = dir.canonicalize().context(|| format!("look for the directory {}", dir.display()))?;
    if path.is_dir() { Ok(path) } else { Err(Error::Config(format!("{} is not a directory", dir.display()))) }
}

/// 4 GiB, or less where that is more than half of this host's memory.
fn default_memory(hosts: u8) -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    let half_mib = kib.map_or(DEFAULT_MEMORY_MIB, |kib| kib / 2 / 1024 / u64::from(hosts));
    DEFAULT_MEMORY_MIB.min(half_mib).max(512)
}

/// A command with the environment and directory of ours, as far as they mean something there. `pass_env` are patterns of
/// further variables that do.
pub(crate) fn command(
    testbed: &Testbed,
    host: usize,
    argv: Vec<OsString>,
    global: &Global,
    pass_env: &[String],
) -> ExecSpec {
    let mut env: Vec<(OsString, OsString)> = std::env::vars_os().filter(|(name, _)| passes(name, pass_env)).collect();
    env.retain(|(name, _)| name != "PATH");
    env.push(("PATH".into(), setup::search_path().into()));
    env.extend(testbed.environment(host));
    for setting in &global.env {
        match setting.split_once('=') {
            Some((name, value)) => env.push((name.into(), value.into())),
            None => env.extend(std::env::var_os(setting).map(|value| (setting.into(), value))),
        }
    }
    let cwd = std::env::current_dir().map_or_else(|_| "/".into(), OsString::from);
    ExecSpec { argv, env, cwd, ..ExecSpec::default() }
}

/// What `cargo run` sets for this program itself: nobody else's business.
pub(crate) fn is_ours(name: &str) -> bool {
    const OWN: [&str; 5] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];
    OWN.iter().any(|start| name.starts_with(start))
}

/// Whether a variable of ours goes to the commands.
fn passes(name: &std::ffi::OsStr, pass_env: &[String]) -> bool {
    const NAMES: [&str; 12] = [
        "HOME",
        "PATH",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "TERM",
        "COLORTERM",
        "NO_COLOR",
        "TZ",
        "CI",
        "LD_LIBRARY_PATH",
    ];
    const STARTS: [&str; 6] = ["CARGO", "RUST", "NEXTEST", "LC_", "PROPTEST_", "SOFTROCE_"];
    let Some(name) = name.to_str() else {
        return false;
    };
    let usual = || NAMES.contains(&name) || STARTS.iter().any(|start| name.starts_with(start));
    !is_ours(name) && (usual() || pass_env.iter().any(|pattern| glob::matches(pattern, name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cargo_run_sets_for_us_stays_with_us() {
        for name in ["HOME", "CARGO_TARGET_DIR", "RUST_LOG", "NEXTEST_RETRIES", "LC_ALL"] {
            assert!(passes(name.as_ref(), &[]), "{name}");
        }
        for name in ["CARGO_PKG_NAME", "CARGO_MANIFEST_DIR", "SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY"] {
            assert!(!passes(name.as_ref(), &[]), "{name}");
        }
    }

    #[test]
    fn what_the_workspace_names_is_passed_on() {
        let wanted = ["MY_*".to_owned(), "CARGO_PKG_*".to_owned()];
        assert!(passes("MY_SEED".as_ref(), &wanted));
        for name in ["ITS_SEED", "CARGO_PKG_NAME"] {
            assert!(!passes(name.as_ref(), &wanted), "{name}");
        }
    }

    #[test]
    fn two_hosts_only_in_virtual_machines() {
        let never = || panic!("tried the module");
        assert_eq!(choose(ViaArg::Auto, 2, never).unwrap(), Via::Vm);
        for way in [ViaArg::Device, ViaArg::Module] {
            assert!(choose(way, 2, || panic!("tried the module")).unwrap_err().to_string().contains("--via vm"));
        }
    }

    #[test]
    fn without_a_device_the_module_comes_before_the_virtual_machine() {
        if Local::find().is_none() {
            assert_eq!(choose(ViaArg::Auto, 1, || Ok(true)).unwrap(), Via::Module);
            assert_eq!(choose(ViaArg::Auto, 1, || Ok(false)).unwrap(), Via::Vm);
        }
    }

    #[test]
    fn paths_under_the_guest_s_own_file_systems_are_hidden() {
        assert!(hidden(Path::new("/dev/shm/project")));
        assert!(hidden(Path::new("/run/user/1000/x")));
        assert!(!hidden(Path::new("/tmp/project")));
        assert!(!hidden(Path::new("/runner/work")));
    }
}
