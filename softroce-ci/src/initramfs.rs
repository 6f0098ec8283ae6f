//! The guest's first root: a static busybox, the modules, and a script that puts the host's root together.

use std::io::{self, Write as _};
use std::path::Path;

use crate::cpio::Archive;
use crate::error::{Context as _, Error};
use crate::modules::Module;

/// Where the guest finds the folder that it shares with the host.
pub(crate) const RUN: &str = "/run/softroce";
/// On the console when the script cannot go on.
pub(crate) const FATAL: &str = "softroce-init: fatal:";
/// On the console when a guest booted only to see whether it does.
pub(crate) const PROBED: &str = "softroce-init: alive";

/// Loads the modules and joins the host's root (9p, read-only) with a tmpfs above it; then the agent, which is this very
/// program, takes over as process 1.
const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /proc /sys /dev /host /above /joined
die() { echo "@FATAL@ $1" >/dev/console; sleep 1; poweroff -f; }
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
exec </dev/console >/dev/console 2>&1
case "$(cat /proc/cmdline)" in *softroce.alive*) echo "@PROBED@"; sleep 1; poweroff -f;; esac
while read -r name; do
    insmod "/modules/$name.ko" || die "cannot load the module $name"
done </modules/order
options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "ro,$options,cache=loose" root /host || die "cannot mount the shared root"
mount -t tmpfs -o size=90%,mode=755 tmpfs /above
mkdir /above/upper /above/work
mount -t overlay -o lowerdir=/host,upperdir=/above/upper,workdir=/above/work overlay /joined || die "cannot mount the overlay"
mkdir -p /joined/run /joined/proc /joined/sys /joined/dev
mount -t tmpfs -o mode=755 tmpfs /joined/run
mkdir -p /joined@RUN@
mount -t 9p -o "rw,$options" run /joined@RUN@ || die "cannot mount the shared folder"
mount --move /proc /joined/proc
mount --move /sys /joined/sys
mount --move /dev /joined/dev
exec switch_root /joined @RUN@/agent softroce guest-agent
"#;

/// Writes the initramfs to `path`.
pub(crate) fn write(path: &Path, busybox: &Path, modules: &[Module]) -> Result<(), Error> {
    let busybox = std::fs::read(busybox).context(|| format!("read {}", busybox.display()))?;
    fill(path, &busybox, modules).context(|| format!("write {}", path.display()))
}

fn fill(path: &Path, busybox: &[u8], modules: &[Module]) -> io::Result<()> {
    let mut archive = Archive::new(io::BufWriter::new(std::fs::File::create(path)?));
    archive.dir("bin")?;
    archive.dir("modules")?;
    archive.file("bin/busybox", 0o755, busybox)?;
    for applet in ["sh", "mkdir", "mount", "cat", "sleep", "insmod", "switch_root", "poweroff"] {
        archive.link(&format!("bin/{applet}"), "busybox")?;
    }
    archive.file("init", 0o755, script().as_bytes())?;
    for module in modules {
        archive.file(&format!("modules/{}.ko", module.name), 0o644, &module.content)?;
    }
    let order: Vec<&str> = modules.iter().map(|module| module.name.as_str()).collect();
    let order = order.join(
        "
",
    ) + "
";
    archive.file("modules/order", 0o644, order.as_bytes())?;
    archive.finish()?.flush()
}

fn script() -> String {
    INIT.replace("@FATAL@", FATAL).replace("@PROBED@", PROBED).replace("@RUN@", RUN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_is_valid_shell_with_nothing_left_to_fill_in() {
        let script = script();
        let words = ["@FATAL@", "@PROBED@", "@RUN@"];
        assert!(words.iter().all(|word| !script.contains(word)));
        let status = std::process::Command::new("sh").args(["-n", "-c", &script]).status().unwrap();
        assert!(status.success());
    }
}
