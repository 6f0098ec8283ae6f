//! The agent inside a guest: process 1, which reaps, and the worker, which runs commands for the host.

use std::fs::File;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::mount::{MountFlags, mount};
use rustix::process::{Resource, Rlimit, WaitOptions, setrlimit};
use serde::{Deserialize, Serialize};

use crate::commands::Commands;
use crate::guest_device;
use crate::initramfs::RUN;
use crate::klog::KernelLog;
use crate::peer;
use crate::wire::{Frame, Hello, Kind, PEER};

/// Name of the port that joins the worker and the host.
pub(crate) const PORT: &str = "softroce.ctl";
/// How often a guest shows that it lives.
const BEAT: Duration = Duration::from_secs(2);
const OPEN_FILES: u64 = 65_536;

/// A folder of the host, mounted at its own place.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Mount {
    pub(crate) tag: String,
    pub(crate) at: String,
    pub(crate) writable: bool,
}

/// What the host tells a guest, in `guest-N.json` of the shared folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GuestConfig {
    /// 1 or 2.
    pub(crate) host: u8,
    /// How many there are.
    pub(crate) hosts: u8,
    /// Host name.
    pub(crate) name: String,
    /// Further folders of the host.
    pub(crate) mounts: Vec<Mount>,
}

/// Process 1: mounts what a system needs, starts the worker, reaps orphans, and ends the guest with the worker.
pub(crate) fn process_one() -> std::process::ExitCode {
    if let Err(error) = mounts() {
        say(&format!("{} {error}", crate::initramfs::FATAL));
    }
    match Command::new("/proc/self/exe").args(["softroce", "guest-worker"]).spawn() {
        Ok(worker) => loop {
            match rustix::process::wait(WaitOptions::empty()) {
                Ok(Some((pid, _))) if pid.as_raw_nonzero().get().unsigned_abs() == worker.id() => {
                    break;
                }
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => break,
            }
        },
        Err(error) => say(&format!("{} cannot start the worker: {error}", crate::initramfs::FATAL)),
    }
    rustix::fs::sync();
    let _off = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    std::process::ExitCode::FAILURE
}

fn say(line: &str) {
    drop(std::fs::write("/dev/console", format!("{line}\n")));
}

fn mounts() -> io::Result<()> {
    let none = MountFlags::empty();
    for (what, at, options) in [
        ("devpts", "/dev/pts", c"mode=620,ptmxmode=666"),
        ("tmpfs", "/dev/shm", c"mode=1777"),
        ("debugfs", "/sys/kernel/debug", c""),
    ] {
        if !at.starts_with("/sys") {
            std::fs::create_dir_all(at)?;
        }
        mount(what, at, what, none, options)?;
    }
    let links = [("/proc/self/fd", "fd"), ("fd/0", "stdin"), ("fd/1", "stdout"), ("fd/2", "stderr")];
    for (target, name) in links {
        let _there = symlink(target, Path::new("/dev").join(name));
    }
    std::fs::create_dir_all("/run/lock")?;
    setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None })?;
    setrlimit(Resource::Nofile, Rlimit { current: Some(OPEN_FILES), maximum: Some(OPEN_FILES) })?;
    Ok(())
}

/// Reads the configuration that the host wrote for this guest.
fn config() -> io::Result<GuestConfig> {
    let line = std::fs::read_to_string("/proc/cmdline")?;
    let number = line.split_whitespace().find_map(|word| word.strip_prefix("softroce.host=")).unwrap_or("1");
    let json = std::fs::read(format!("{RUN}/guest-{number}.json"))?;
    serde_json::from_slice(&json).map_err(io::Error::from)
}

fn mount_folders(mounts: &[Mount]) -> io::Result<()> {
    for Mount { tag, at, writable } in mounts {
        std::fs::create_dir_all(at)?;
        let flags = if *writable { MountFlags::empty() } else { MountFlags::RDONLY };
        let options = std::ffi::CString::new("trans=virtio,version=9p2000.L,msize=512000")?;
        mount(tag.as_str(), at.as_str(), "9p", flags, options.as_c_str())
            .map_err(|error| io::Error::other(format!("mount {at}: {error}")))?;
    }
    Ok(())
}

fn open_port() -> io::Result<File> {
    for entry in std::fs::read_dir("/sys/class/virtio-ports")? {
        let entry = entry?;
        let name = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == PORT {
            return File::options().read(true).write(true).open(Path::new("/dev").join(entry.file_name()));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("no virtio port {PORT}")))
}

/// The worker: makes the device and obeys frames until the host is gone.
pub(crate) fn worker() -> std::process::ExitCode {
    match open_port().and_then(|port| serve(&port)) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{} {error}", crate::initramfs::FATAL));
            std::process::ExitCode::FAILURE
        }
    }
}

fn serve(port: &File) -> io::Result<()> {
    let writer = Arc::new(Mutex::new(port.try_clone()?));
    let out = Arc::new(move |frame: Frame| {
        if let Ok(mut writer) = writer.lock() {
            let _host_gone = frame.write_to(&mut *writer);
        }
    });
    let prepared = config().and_then(|config| {
        rustix::system::sethostname(config.name.as_bytes())?;
        mount_folders(&config.mounts)?;
        guest_device::make(&config)
    });
    let device = match prepared {
        Ok(device) => device,
        Err(error) => {
            out(Frame::new(Kind::Fatal, 0, error.to_string()));
            std::thread::sleep(Duration::from_secs(5)); // the host reads it and ends us
            return Err(error);
        }
    };
    let peers = peer::listen(out.clone())?;
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    out(Frame::new(Kind::Hello, 0, serde_json::to_vec(&Hello { kernel, device })?));
    let log = KernelLog::open()?;
    let log = Arc::new(Mutex::new(log));
    {
        let (out, log) = (out.clone(), log.clone());
        std::thread::spawn(move || {
            loop {
                out(Frame::new(Kind::Beat, 0, Vec::new()));
                drain(&log, &*out);
                std::thread::sleep(BEAT);
            }
        });
    }
    let mut commands = Commands::new(out.clone());
    let mut input = port;
    while let Some(frame) = Frame::read_from(&mut input)? {
        match frame.kind {
            Kind::Sync => {
                drain(&log, &*out);
                out(frame);
            }
            // News of a command that this guest started on the other one.
            Kind::Stdout | Kind::Stderr | Kind::Exit if frame.channel & PEER != 0 => {
                peers.deliver(frame);
            }
            _ => commands.handle(frame),
        }
    }
    Ok(())
}

fn drain(log: &Mutex<KernelLog>, out: &dyn Fn(Frame)) {
    if let Ok(mut log) = log.lock() {
        while let Some(line) = log.next() {
            out(Frame::new(Kind::Kmsg, 0, line));
        }
    }
}
