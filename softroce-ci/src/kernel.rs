//! A distribution kernel with `rdma_rxe`, unpacked into the cache: nothing is installed, no boot loader is touched.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arch::Arch;
use crate::error::{Context as _, Error};
use crate::modules::{Module, Tree};
use crate::progress::Progress;
use crate::setup::{self, Privilege};
use crate::signals;

/// Raised when a cached kernel of before no longer serves.
const FORMAT: &str = "2";
const UNPACKED_MIB: u64 = 800;

/// A kernel that the VM can boot.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// As `uname -r` will say.
    pub(crate) release: String,
    /// The image.
    pub(crate) image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// The newest kernel in the cache.
    pub(crate) fn cached(cache: &Path) -> Option<Self> {
        let mut found: Vec<Self> = std::fs::read_dir(cache.join("kernels"))
            .ok()?
            .flatten()
            .filter_map(|entry| Self::at(&entry.path(), entry.file_name().to_str()?))
            .collect();
        found.sort_by_key(|kernel| version_key(&kernel.release));
        found.pop()
    }

    fn at(dir: &Path, release: &str) -> Option<Self> {
        let format = std::fs::read_to_string(dir.join("format")).ok()?;
        (format == FORMAT).then(|| Self {
            release: release.to_owned(),
            image: dir.join("vmlinuz"),
            modules: dir.join("modules"),
        })
    }

    /// From the cache, else downloaded with apt and unpacked there, else the installed one.
    pub(crate) fn obtain(cache: &Path, arch: Arch, progress: &Progress) -> Result<Self, Error> {
        if let Some(kernel) = Self::cached(cache) {
            return Ok(kernel);
        }
        let downloaded = match download(cache, arch, progress) {
            // The lists are not there, or too old to fetch from.
            Err(Error::Kernel(_)) if Privilege::find() != Privilege::None => {
                setup::apt(Privilege::find(), &["update"], progress)?;
                download(cache, arch, progress)
            }
            other => other,
        };
        match downloaded {
            Err(error @ Error::Kernel(_)) => installed(cache).ok_or(error),
            other => other,
        }
    }

    /// The modules to load, in order.
    pub(crate) fn modules(&self, firewall: bool) -> Result<Vec<Module>, Error> {
        let tree = Tree::scan(&self.modules)?;
        tree.resolve(&tree.wanted(firewall)?)
    }
}

/// Digits compare as numbers, so that 6.1.0-57 is newer than 6.1.0-9.
fn version_key(release: &str) -> Vec<u64> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

fn download(cache: &Path, arch: Arch, progress: &Progress) -> Result<Kernel, Error> {
    let packages = [arch.debian_kernel, "linux-image-generic"]
        .iter()
        .find_map(|meta| image_package(meta))
        .map(|image| with_modules(&image))
        .ok_or_else(|| {
            let why =
                format!("apt knows no {} and no linux-image-generic; run `apt-get update` as root", arch.debian_kernel);
            Error::Kernel(why)
        })?;
    let release = packages[0].trim_start_matches("linux-image-").trim_start_matches("unsigned-").to_owned();
    progress.step(&format!("downloading the kernel {release} (unpacked into the cache, not installed)"));
    std::fs::create_dir_all(cache).context(|| format!("create {}", cache.display()))?;
    room_for(cache, UNPACKED_MIB)?;
    let dir = tempfile::Builder::new().prefix("kernel-").tempdir_in(cache);
    let dir = dir.context(|| format!("create a directory in {}", cache.display()))?;
    let _registered = signals::register_dir(dir.path().to_path_buf());
    let mut command = Command::new("apt-get");
    command.args(["download", "-q", "-o", "APT::Sandbox::User=root"]).args(&packages).current_dir(dir.path());
    quiet(command, "apt-get download")?;
    let unpacked = dir.path().join("unpacked");
    progress.step(&format!("unpacking the kernel {release}"));
    let entries = std::fs::read_dir(dir.path()).context(|| format!("read {}", dir.path().display()))?;
    for deb in entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "deb")) {
        let mut command = Command::new("dpkg-deb");
        command.arg("-x").arg(&deb).arg(&unpacked);
        quiet(command, "dpkg-deb -x")?;
    }
    let modules = ["lib/modules", "usr/lib/modules"].map(|dir| unpacked.join(dir).join(&release));
    let modules = modules.iter().find(|dir| dir.is_dir());
    let modules = modules.ok_or_else(|| Error::Kernel(format!("the package {} has no modules", packages[0])))?;
    keep(cache, &release, &unpacked.join(format!("boot/vmlinuz-{release}")), modules)
}

/// Copies the image and what of the modules may ever be loaded, then marks the whole as good.
fn keep(cache: &Path, release: &str, image: &Path, modules: &Path) -> Result<Kernel, Error> {
    let tree = Tree::scan(modules)?;
    let names = tree.wanted(true)?;
    let kernels = cache.join("kernels");
    std::fs::create_dir_all(&kernels).context(|| format!("create {}", kernels.display()))?;
    let dir = tempfile::Builder::new().prefix(".new-").tempdir_in(&kernels);
    let dir = dir.context(|| format!("create a directory in {}", kernels.display()))?;
    let write = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).context(|| format!("write {}", path.display()))
    };
    let image = std::fs::read(image).context(|| format!("read {}", image.display()))?;
    write("vmlinuz", &image)?;
    std::fs::create_dir(dir.path().join("modules")).context(|| format!("create {}", dir.path().display()))?;
    for module in tree.resolve(&names)? {
        write(&format!("modules/{}.ko", module.name), &module.content)?;
    }
    let builtin = std::fs::read(modules.join("modules.builtin")).unwrap_or_default();
    write("modules/modules.builtin", &builtin)?;
    write("format", FORMAT.as_bytes())?;
    let place = kernels.join(release);
    let _older_format = std::fs::remove_dir_all(&place);
    let dir = dir.keep();
    let moved = std::fs::rename(&dir, &place);
    if moved.is_err() && Kernel::at(&place, release).is_some() {
        let _another_run_was_faster = std::fs::remove_dir_all(&dir);
    } else {
        moved.context(|| format!("rename {} to {}", dir.display(), place.display()))?;
    }
    Kernel::at(&place, release).ok_or_else(|| Error::Kernel(format!("{} is not readable", place.display())))
}

/// An installed kernel that has everything, readable by us (Ubuntu's images are not, except to root).
fn installed(cache: &Path) -> Option<Kernel> {
    let mut releases: Vec<String> = std::fs::read_dir("/lib/modules")
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    releases.sort_by_key(|release| version_key(release));
    releases.iter().rev().find_map(|release| {
        let image = PathBuf::from(format!("/boot/vmlinuz-{release}"));
        keep(cache, release, &image, &Path::new("/lib/modules").join(release)).ok()
    })
}

/// The image that a meta package depends on.
fn image_package(meta: &str) -> Option<String> {
    let output = Command::new("apt-cache").args(["depends", "--important", meta]).output().ok()?;
    first_image(&String::from_utf8_lossy(&output.stdout))
}

fn first_image(depends: &str) -> Option<String> {
    let names = depends.lines().filter_map(|line| line.trim().trim_start_matches('|').strip_prefix("Depends: "));
    let mut images = names.filter(|name| {
        name.strip_prefix("linux-image-").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    images.next().map(str::to_owned)
}

/// Ubuntu keeps a kernel's modules in packages of their own.
fn with_modules(image: &str) -> Vec<String> {
    let release = image.trim_start_matches("linux-image-");
    let known = |name: &String| {
        let output = Command::new("apt-cache").args(["show", "--no-all-versions", name]).output();
        output.is_ok_and(|output| output.status.success() && !output.stdout.is_empty())
    };
    let extra = ["linux-modules-", "linux-modules-extra-"].map(|prefix| format!("{prefix}{release}"));
    std::iter::once(image.to_owned()).chain(extra.into_iter().filter(known)).collect()
}

/// Runs a command whose output matters only when it fails.
fn quiet(mut command: Command, name: &str) -> Result<(), Error> {
    let output = command.output().context(|| format!("run {name}"))?;
    signals::check()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::Kernel(format!("`{name}` failed ({}): {}", output.status, said.trim())))
}

/// Fails when the file system of `dir` has less than this.
pub(crate) fn room_for(dir: &Path, needed_mib: u64) -> Result<(), Error> {
    let stat = rustix::fs::statvfs(dir).context(|| format!("look at the file system of {}", dir.display()))?;
    let free_mib = (stat.f_bavail * stat.f_frsize) >> 20;
    if free_mib < needed_mib {
        return Err(Error::DiskSpace { path: dir.to_path_buf(), free_mib, needed_mib });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_kernels_sort_last() {
        assert!(version_key("6.1.0-57-amd64") > version_key("6.1.0-9-amd64"));
        assert!(version_key("6.12.1") > version_key("6.9.9"));
    }

    #[test]
    fn the_image_is_found_among_the_dependencies() {
        let debian = "linux-image-amd64\n  Depends: linux-image-6.1.0-57-amd64\n";
        assert_eq!(first_image(debian).as_deref(), Some("linux-image-6.1.0-57-amd64"));
        let ubuntu = "linux-image-generic\n |Depends: linux-image-6.8.0-45-generic\n  Depends: linux-image-unsigned-6.8.0-45-generic\n  Depends: linux-firmware\n";
        assert_eq!(first_image(ubuntu).as_deref(), Some("linux-image-6.8.0-45-generic"));
        assert_eq!(first_image("N: Unable to locate package"), None);
    }

    #[test]
    fn too_little_room_is_said_in_numbers() {
        let error = room_for(Path::new("/"), u64::MAX).unwrap_err().to_string();
        assert!(error.contains("MiB are needed"), "{error}");
    }
}
