//! Whether KVM really runs an ordinary kernel here. `/dev/kvm` alone proves nothing: inside some sandboxes it is there,
//! opens, and a guest never gets anywhere.

use std::fs::File;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use crate::arch::Arch;
use crate::error::Error;
use crate::initramfs::{self, PROBED};
use crate::kernel::Kernel;
use crate::machine::{Event, Machine};
use crate::progress::Progress;
use crate::qemu::{self, Accel, Spec};
use crate::signals;

/// A guest under KVM that works says so in about a second.
const PATIENCE: Duration = Duration::from_secs(8);

/// KVM where a guest boots with it, else TCG. The verdict is kept in the cache.
pub(crate) fn choose(arch: Arch, kernel: &Kernel, cache: &Path, progress: &Progress) -> Result<Accel, Error> {
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let file = cache.join("kvm-verdict");
    decide(opens, &key(arch, kernel), &file, || {
        progress.step("looking whether KVM boots a guest here");
        boots(arch, kernel)
    })
}

/// A verdict holds for this host's kernel, processor and QEMU.
fn key(arch: Arch, kernel: &Kernel) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpus.lines().find(|line| line.starts_with("model name")).unwrap_or_default();
    format!("{} | {cpu} | {:?} | {}", host.trim(), qemu::version(arch), kernel.release)
}

fn decide(opens: bool, key: &str, file: &Path, boots: impl FnOnce() -> Result<bool, Error>) -> Result<Accel, Error> {
    if !opens {
        return Ok(Accel::Tcg); // not cached: permission may be given at any time
    }
    let known = std::fs::read_to_string(file).ok();
    let known = known.as_deref().and_then(|text| text.split_once('\n')).filter(|(of, _)| *of == key);
    let good = if let Some((_, verdict)) = known {
        verdict.trim() == "boots"
    } else {
        let good = boots()?;
        let verdict = if good { "boots" } else { "does not boot" };
        let _asked_again_next_time = std::fs::write(file, format!("{key}\n{verdict}\n"));
        good
    };
    Ok(if good { Accel::Kvm } else { Accel::Tcg })
}

/// Boots the kernel to the point where the initramfs runs, and no further.
fn boots(arch: Arch, kernel: &Kernel) -> Result<bool, Error> {
    let dir = crate::testbed::temporary()?;
    let _registered = signals::register_dir(dir.path().to_path_buf());
    let image = dir.path().join("initramfs");
    initramfs::write(&image, &crate::setup::busybox()?, &[])?;
    let command = qemu::command(&Spec {
        arch,
        accel: Accel::Kvm,
        memory_mib: 256,
        cpus: 2,
        image: &kernel.image,
        initramfs: &image,
        cmdline: "softroce.alive",
        verbose: false,
        control: None,
        folders: &[],
        cable: None,
        host: 1,
    });
    let (tell, events) = sync_channel(64);
    let _machine = Machine::start(command, 0, &tell)?;
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        signals::check()?;
        match events.recv_timeout(Duration::from_millis(100)) {
            Ok(Event::Console(_, line)) if line.contains(PROBED) => return Ok(true),
            Ok(Event::Closed(_)) | Err(RecvTimeoutError::Disconnected) => return Ok(false),
            Ok(_) | Err(RecvTimeoutError::Timeout) => {}
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_asked_for_once_and_kept_for_the_same_host() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("verdict");
        let never = || -> Result<bool, Error> { panic!("asked again") };
        assert_eq!(decide(true, "host a", &file, || Ok(false)).unwrap(), Accel::Tcg);
        assert_eq!(decide(true, "host a", &file, never).unwrap(), Accel::Tcg);
        assert_eq!(decide(true, "host b", &file, || Ok(true)).unwrap(), Accel::Kvm);
        assert_eq!(decide(true, "host b", &file, never).unwrap(), Accel::Kvm);
    }

    #[test]
    fn without_the_device_nothing_is_probed_or_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("verdict");
        assert_eq!(decide(false, "host", &file, || panic!("probed")).unwrap(), Accel::Tcg);
        assert!(!file.exists());
    }
}
