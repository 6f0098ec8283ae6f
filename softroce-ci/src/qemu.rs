//! QEMU's command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arch::Arch;
use crate::guest::PORT;

/// How the guest's processor is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accel {
    /// The kernel's virtual machine.
    Kvm,
    /// Translation: slow, and works everywhere.
    Tcg,
}

/// The end of a virtual cable.
#[derive(Clone, Debug)]
pub(crate) enum Cable {
    /// QEMU 7.2 and later: a UNIX socket. The first guest listens.
    Stream { socket: PathBuf, listen: bool },
    /// Before: TCP on the loopback device.
    Tcp { port: u16, listen: bool },
}

/// Everything that the command line says.
#[derive(Debug)]
pub(crate) struct Spec<'a> {
    pub(crate) arch: Arch,
    pub(crate) accel: Accel,
    pub(crate) memory_mib: u64,
    pub(crate) cpus: u32,
    pub(crate) image: &'a Path,
    pub(crate) initramfs: &'a Path,
    /// Added to the kernel's command line.
    pub(crate) cmdline: &'a str,
    /// Shows the kernel's chatter too.
    pub(crate) verbose: bool,
    /// UNIX socket that the control port appears as.
    pub(crate) control: Option<&'a Path>,
    /// Tag, directory, writable.
    pub(crate) folders: &'a [(String, PathBuf, bool)],
    pub(crate) cable: Option<Cable>,
    /// 1 or 2.
    pub(crate) host: u8,
}

/// The command, which dies with us: setpriv sets the parent-death signal, which we could not without unsafe code.
pub(crate) fn command(spec: &Spec) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", spec.arch.qemu]).args(args(spec));
    command
}

fn args(spec: &Spec) -> Vec<OsString> {
    let mut args: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
    add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", "softroce"]);
    add(&["-machine", spec.arch.machine]);
    match spec.accel {
        Accel::Kvm => add(&["-accel", "kvm", "-cpu", "host"]),
        Accel::Tcg => add(&["-accel", "tcg,thread=multi", "-cpu", "max"]),
    }
    add(&["-smp", &spec.cpus.to_string(), "-m", &format!("{}M", spec.memory_mib)]);
    add(&["-kernel", &spec.image.to_string_lossy(), "-initrd", &spec.initramfs.to_string_lossy()]);
    let level = if spec.verbose { "loglevel=7" } else { "quiet loglevel=4" };
    // panic=-1 with -no-reboot: a crashed guest ends QEMU at once. mitigations=off: it runs nobody else's code.
    let cmdline = format!(
        "console={} {level} panic=-1 oops=panic mitigations=off random.trust_cpu=on net.ifnames=0 \
         cryptomgr.notests no_timer_check audit=0 {} softroce.host={} {}",
        spec.arch.console, spec.arch.clock, spec.host, spec.cmdline
    );
    add(&["-append", cmdline.trim_end()]);
    add(&["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
    add(&["-device", "virtio-rng-pci"]);
    if let Some(socket) = spec.control {
        let chardev = format!("socket,id=control,server=on,wait=off,path={}", escaped(socket));
        add(&["-device", "virtio-serial-pci", "-chardev", &chardev]);
        add(&["-device", &format!("virtserialport,chardev=control,name={PORT}")]);
    }
    for (tag, path, writable) in spec.folders {
        // remap: directories below may be other file systems, whose inode numbers would clash.
        let readonly = if *writable { "off" } else { "on" };
        let path = escaped(path);
        let fs = format!("local,id={tag},path={path},security_model=none,multidevs=remap,readonly={readonly}");
        add(&["-fsdev", &fs, "-device", &format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")]);
    }
    if let Some(cable) = &spec.cable {
        let netdev = match cable {
            Cable::Stream { socket, listen } => {
                let server = if *listen { "on" } else { "off" };
                format!("stream,id=cable,server={server},addr.type=unix,addr.path={}", escaped(socket))
            }
            Cable::Tcp { port, listen } => {
                let way = if *listen { "listen" } else { "connect" };
                format!("socket,id=cable,{way}=127.0.0.1:{port}")
            }
        };
        let device = format!("virtio-net-pci,netdev=cable,host_mtu=4200,mac=52:54:00:50:f7:0{}", spec.host);
        add(&["-netdev", &netdev, "-device", &device]);
    }
    args
}

/// QEMU doubles a comma in a value.
fn escaped(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// QEMU's version, such as (7, 2); `None` when it does not run.
pub(crate) fn version(arch: Arch) -> Option<(u32, u32)> {
    let output = Command::new(arch.qemu).arg("--version").output().ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

fn parse_version(said: &str) -> Option<(u32, u32)> {
    let number = said.split_once("version ")?.1;
    let mut parts = number.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(parse_version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright"), Some((7, 2)));
        assert_eq!(parse_version("qemu: not found"), None);
    }

    #[test]
    fn odd_paths_and_the_cable_are_said_as_qemu_wants_them() {
        let folders = [("run".to_owned(), PathBuf::from("/tmp/a,b c"), true)];
        let spec = Spec {
            arch: Arch::host().unwrap(),
            accel: Accel::Tcg,
            memory_mib: 512,
            cpus: 2,
            image: Path::new("/k"),
            initramfs: Path::new("/i"),
            cmdline: "",
            verbose: false,
            control: None,
            folders: &folders,
            cable: Some(Cable::Stream { socket: "/tmp/wire".into(), listen: false }),
            host: 2,
        };
        let words: Vec<String> = args(&spec).into_iter().map(|word| word.into_string().unwrap()).collect();
        assert!(words.iter().any(|word| word.contains("path=/tmp/a,,b c,") && word.contains("readonly=off")));
        assert!(words.iter().any(|word| word == "stream,id=cable,server=off,addr.type=unix,addr.path=/tmp/wire"));
        assert!(words.iter().any(|word| word.contains("softroce.host=2") && word.ends_with("host=2")));
    }
}
