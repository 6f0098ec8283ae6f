//! What has to be on this machine, and how it gets there.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::arch::Arch;
use crate::error::{Context as _, Error};
use crate::progress::Progress;
use crate::signals;

/// A package of Debian's, why it is needed, and how to see that it (or its like) is there.
struct Need {
    package: &'static str,
    why: &'static str,
    there: fn() -> bool,
}

/// For building programs that use verbs.
const BUILD: [Need; 4] = [
    Need {
        package: "cmake",
        why: "builds rdma-core's headers for the `ibverbs` crate",
        there: || which("cmake").is_some(),
    },
    Need { package: "libclang-dev", why: "bindgen reads the verbs headers with it", there: libclang },
    Need { package: "pkg-config", why: "finds libraries", there: || which("pkg-config").is_some() },
    Need {
        package: "libibverbs-dev",
        why: "the verbs library and its headers",
        there: || exists(&["/usr/include/infiniband/verbs.h", "/usr/local/include/infiniband/verbs.h"]),
    },
];
/// For running them on Soft-RoCE.
const RUN: [Need; 3] = [
    Need {
        package: "ibverbs-providers",
        why: "the user-space driver of Soft-RoCE",
        there: || library("libibverbs/librxe-"),
    },
    Need {
        package: "rdma-core",
        why: "device rules and services of the RDMA stack",
        there: || exists(&["/usr/sbin/rdma-ndd", "/usr/libexec/rdma-init-kernel"]),
    },
    Need { package: "iproute2", why: "`ip` and `rdma` make the device", there: || which("rdma").is_some() },
];
/// For the VM, besides QEMU.
const VM: [Need; 3] = [
    Need { package: "busybox-static", why: "the guest's first steps", there: || busybox().is_ok() },
    Need {
        package: "zstd",
        why: "unpacks Ubuntu's kernel modules",
        there: || which("zstd").is_some() || !Path::new("/etc/lsb-release").exists(),
    },
    Need {
        package: "util-linux",
        why: "`setpriv` and `setsid`",
        there: || which("setpriv").is_some() && which("setsid").is_some(),
    },
];

/// How we become root, if at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Privilege {
    /// We are root.
    Root,
    /// `sudo -n` works.
    Sudo,
    /// Not at all.
    None,
}

impl Privilege {
    /// Looks what we are.
    pub(crate) fn find() -> Self {
        if rustix::process::geteuid().is_root() {
            return Self::Root;
        }
        let mut sudo = Command::new("sudo");
        sudo.args(["-n", "true"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if sudo.status().is_ok_and(|status| status.success()) { Self::Sudo } else { Self::None }
    }

    /// A command that runs as root, as far as possible.
    pub(crate) fn command(self, program: &str) -> Command {
        let mut command = if self == Self::Sudo { Command::new("sudo") } else { Command::new(program) };
        if self == Self::Sudo {
            command.args(["-n", "env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", program]);
        } else {
            command.env("PATH", search_path());
        }
        command
    }
}

/// Our search path with the directories of system tools, which users often lack.
pub(crate) fn search_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut path = if path.is_empty() { "/usr/local/bin:/usr/bin:/bin".to_owned() } else { path };
    for dir in ["/usr/local/sbin", "/usr/sbin", "/sbin"] {
        if !path.split(':').any(|there| there == dir) {
            path = format!("{path}:{dir}");
        }
    }
    path
}

/// `$XDG_CACHE_HOME/softroce`, else `~/.cache/softroce`.
pub(crate) fn cache_dir() -> Result<PathBuf, Error> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").filter(|path| path.is_absolute()).or_else(|| Some(set("HOME")?.join(".cache")));
    let base = base.ok_or_else(|| Error::Config("set XDG_CACHE_HOME or HOME: the kernel is kept there".to_owned()))?;
    Ok(base.join("softroce"))
}

/// The static busybox.
pub(crate) fn busybox() -> Result<PathBuf, Error> {
    // Of Debian's two packages only busybox-static needs no libraries; the other one would not start in the guest.
    let path = which("busybox").filter(|path| std::fs::read(path).is_ok_and(|elf| is_static(&elf)));
    path.ok_or_else(|| Error::Config("no static busybox; install the package busybox-static".to_owned()))
}

/// An ELF program without an interpreter (`PT_INTERP`) needs no libraries.
fn is_static(elf: &[u8]) -> bool {
    const HEAD_BYTES: usize = 4096;
    let head = &elf[..elf.len().min(HEAD_BYTES)];
    head.starts_with(b"\x7fELF") && !head.windows(8).any(|window| window == b"/ld-linu" || window == b"/ld-musl")
}

/// Sets up what is missing: packages for building and running, and with `vm` for the VM.
pub(crate) fn packages(vm: Option<Arch>, extra: &[String], progress: &Progress) -> Result<(), Error> {
    let mut missing: Vec<(String, String)> = Vec::new();
    let needs = BUILD.iter().chain(&RUN).chain(if vm.is_some() { &VM[..] } else { &[] });
    for need in needs.filter(|need| !(need.there)()) {
        missing.push((need.package.to_owned(), need.why.to_owned()));
    }
    if let Some(arch) = vm.filter(|arch| which(arch.qemu).is_none()) {
        missing.push((arch.qemu_package.to_owned(), "boots the guest that has the device".to_owned()));
    }
    for package in extra.iter().filter(|package| !installed(package)) {
        missing.push((package.clone(), "the workspace asks for it".to_owned()));
    }
    if missing.is_empty() {
        return Ok(());
    }
    install(&missing, progress)
}

fn install(missing: &[(String, String)], progress: &Progress) -> Result<(), Error> {
    let width = missing.iter().map(|(package, _)| package.len()).max().unwrap_or(0);
    let lines: Vec<String> = missing.iter().map(|(package, why)| format!("  {package:width$}  {why}")).collect();
    if which("apt-get").is_none() {
        return Err(Error::NotDebian { missing: lines.join("\n") });
    }
    let packages: Vec<&str> = missing.iter().map(|(package, _)| package.as_str()).collect();
    let line = format!("apt-get install -y --no-install-recommends {}", packages.join(" "));
    let privilege = Privilege::find();
    if privilege == Privilege::None {
        return Err(Error::NeedsRoot { missing: lines.join("\n"), command: format!("sudo {line}") });
    }
    progress.note("installing:");
    for line in &lines {
        progress.note(line);
    }
    // The lists may be there and of today, or not there at all (a fresh container), or too old to fetch from.
    if !packages.iter().all(|package| known(package)) {
        apt(privilege, &["update"], progress)?;
    }
    let install: Vec<&str> = line.split(' ').skip(1).collect();
    let first = apt(privilege, &install, progress);
    match first {
        Err(Error::Install { .. }) => {
            apt(privilege, &["update"], progress)?;
            apt(privilege, &install, progress)
        }
        other => other,
    }
}

/// Whether apt knows a version of it that it could install.
pub(crate) fn known(package: &str) -> bool {
    let output = Command::new("apt-cache").args(["policy", package]).env("LC_ALL", "C").output();
    output.is_ok_and(|output| {
        let said = String::from_utf8_lossy(&output.stdout);
        said.lines().any(|line| line.trim().starts_with("Candidate:") && !line.contains("(none)"))
    })
}

/// Runs apt-get; its output shows only when it fails.
pub(crate) fn apt(privilege: Privilege, args: &[&str], progress: &Progress) -> Result<(), Error> {
    let name = format!("apt-get {}", args.join(" "));
    progress.step(&name);
    let mut command = privilege.command("env");
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "DPkg::Lock::Timeout=120"]).args(args);
    let output = command.stdin(Stdio::null()).output().context(|| format!("run {name}"))?;
    signals::check()?;
    if output.status.success() {
        return Ok(());
    }
    progress.clear();
    let mut err = std::io::stderr().lock();
    let _closed = err.write_all(&output.stdout).and_then(|()| err.write_all(&output.stderr));
    Err(Error::Install { command: name, status: output.status.to_string() })
}

fn installed(package: &str) -> bool {
    let output = Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package]).output();
    output.is_ok_and(|output| output.stdout == b"installed")
}

/// The program's path, looking also where system tools are.
pub(crate) fn which(program: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let executable = |path: &PathBuf| {
        std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    search_path().split(':').map(|dir| Path::new(dir).join(program)).find(executable)
}

fn exists(paths: &[&str]) -> bool {
    paths.iter().any(|path| Path::new(path).exists())
}

/// A file in a directory of libraries whose path there starts so.
fn library(start: &str) -> bool {
    let (dir, file) = start.rsplit_once('/').unwrap_or(("", start));
    library_like(dir, |name| name.starts_with(file))
}

/// A file of such a name in this directory of a directory of libraries.
fn library_like(dir: &str, is_it: impl Fn(&str) -> bool) -> bool {
    library_dirs().iter().any(|lib| {
        let entries = std::fs::read_dir(lib.join(dir));
        entries.is_ok_and(|entries| entries.flatten().any(|entry| is_it(&entry.file_name().to_string_lossy())))
    })
}

fn library_dirs() -> Vec<PathBuf> {
    let triplet = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let mut dirs: Vec<PathBuf> = [&*triplet, "/usr/lib64", "/usr/lib", "/usr/local/lib"].map(PathBuf::from).into();
    if let Ok(entries) = std::fs::read_dir("/usr/lib") {
        let llvm = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("llvm"));
        dirs.extend(llvm.map(|entry| entry.path().join("lib")));
    }
    dirs
}

fn libclang() -> bool {
    std::env::var_os("LIBCLANG_PATH").is_some() || library_like("", is_libclang)
}

/// `libclang.so`, `libclang.so.14`, `libclang-14.so`, `libclang-14.so.1`. LLVM's tools bring a `libclang-cpp.so.14`, which is
/// another library: it has Clang's C++ interface, bindgen loads the C one.
fn is_libclang(name: &str) -> bool {
    let version = name.strip_prefix("libclang").and_then(|rest| rest.split_once(".so")).map(|(version, _)| version);
    version.is_some_and(|version| {
        version.is_empty() || version.starts_with('-') && version[1..].starts_with(|c: char| c.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_where_system_tools_are() {
        assert!(which("sh").is_some());
        assert!(which("no-such-program-here").is_none());
        assert!(search_path().split(':').any(|dir| dir == "/usr/sbin"));
    }

    #[test]
    fn the_cpp_library_of_clang_is_not_libclang() {
        for name in ["libclang.so", "libclang.so.1", "libclang-14.so", "libclang-14.so.1", "libclang-14.so.14.0.6"] {
            assert!(is_libclang(name), "{name}");
        }
        for name in ["libclang-cpp.so.14", "libclang-cpp14.so", "libclang_rt.so", "libclang.a", "libclang-"] {
            assert!(!is_libclang(name), "{name}");
        }
    }

    #[test]
    fn a_program_with_an_interpreter_is_not_static() {
        assert!(!is_static(b"#!/bin/sh"));
        assert!(!is_static(b"\x7fELF....../lib64/ld-linux-x86-64.so.2\0"));
        assert!(is_static(b"\x7fELF nothing of the kind"));
    }
}
