//! Boots one guest, or two that a virtual cable joins.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use crate::arch::Arch;
use crate::error::{Context as _, Error};
use crate::guest::{GuestConfig, Mount};
use crate::initramfs::{self, RUN};
use crate::kernel::Kernel;
use crate::machine::{Event, Machine};
use crate::progress::Progress;
use crate::qemu::{self, Accel, Cable, Spec};
use crate::signals;
use crate::wire::{Hello, Kind};

/// What to boot.
pub(crate) struct Plan<'a> {
    pub(crate) arch: Arch,
    pub(crate) accel: Accel,
    pub(crate) kernel: &'a Kernel,
    pub(crate) busybox: &'a Path,
    pub(crate) hosts: u8,
    pub(crate) memory_mib: u64,
    pub(crate) cpus: u32,
    /// The console goes to our standard error.
    pub(crate) verbose: bool,
    /// The shared folder; a temporary one when there is none.
    pub(crate) share: Option<&'a Path>,
    /// Directories that the guest may write, at their own paths.
    pub(crate) writable: &'a [PathBuf],
    /// Directories that a guest's own file systems would hide.
    pub(crate) visible: &'a [PathBuf],
    pub(crate) progress: &'a Progress,
}

/// A guest is up in 7 s under TCG, a pair in 8 s; a busy CI machine may need many times that.
fn patience(accel: Accel) -> Duration {
    match accel {
        Accel::Kvm => Duration::from_secs(60),
        Accel::Tcg => Duration::from_secs(240),
    }
}

/// Boots, and returns when all guests have their device. `dir` is temporary and outlives the machines.
pub(crate) fn boot(
    plan: &Plan,
    dir: &Path,
    tell: &SyncSender<Event>,
    events: &Receiver<Event>,
) -> Result<(Vec<Machine>, String), Error> {
    let how = match plan.accel {
        Accel::Kvm => "KVM",
        Accel::Tcg => "TCG, no KVM",
    };
    let what = if plan.hosts == 1 { "the guest".to_owned() } else { format!("{} guests", plan.hosts) };
    plan.progress.step(&format!("booting {what} (Linux {}, {how})", plan.kernel.release));
    let initramfs = dir.join("initramfs");
    let firewall =
        ["/usr/sbin/nft", "/usr/sbin/iptables", "/sbin/iptables"].iter().any(|tool| Path::new(tool).exists());
    initramfs::write(&initramfs, plan.busybox, &plan.kernel.modules(firewall)?)?;
    let folders = folders(plan, dir)?;
    let mut machines = Vec::new();
    for host in 1..=plan.hosts {
        let control = dir.join(format!("control-{host}"));
        let cable = (plan.hosts == 2).then(|| cable(plan.arch, dir, host)).transpose()?;
        let command = qemu::command(&Spec {
            arch: plan.arch,
            accel: plan.accel,
            memory_mib: plan.memory_mib,
            cpus: plan.cpus,
            image: &plan.kernel.image,
            initramfs: &initramfs,
            cmdline: "",
            verbose: plan.verbose,
            control: Some(&control),
            folders: &folders,
            cable: cable.clone(),
            host,
        });
        let index = usize::from(host) - 1;
        let mut machine = Machine::start(command, index, tell)?;
        machine.connect(&control, index, tell)?;
        if let Some(Cable::Stream { socket, listen: true }) = &cable {
            machine.wait_for(|| socket.exists().then_some(()))?;
        }
        machines.push(machine);
    }
    let device = wait_for_hellos(plan, &mut machines, events)?;
    plan.progress.clear();
    Ok((machines, device))
}

/// The folders of the guests; writes what they find in the first one.
fn folders(plan: &Plan, dir: &Path) -> Result<Vec<(String, PathBuf, bool)>, Error> {
    let run = dir.join("run");
    let shared = plan.share.map_or_else(|| dir.join("shared"), Path::to_path_buf);
    for made in [&run, &run.join("shared"), &shared] {
        std::fs::create_dir_all(made).context(|| format!("create {}", made.display()))?;
    }
    // The program that runs, also when a build has put another one in its place meanwhile.
    let program = Path::new("/proc/self/exe");
    let agent = run.join("agent");
    std::fs::copy(program, &agent).context(|| format!("copy {} to {}", program.display(), agent.display()))?;
    write_script(&run.join("peer-exec"))?;
    let mut folders = vec![("root".to_owned(), PathBuf::from("/"), false), ("run".to_owned(), run.clone(), false)];
    let mut mounts = Vec::new();
    let mut add = |tag: String, from: &Path, at: &str, writable: bool| {
        folders.push((tag.clone(), from.to_path_buf(), writable));
        mounts.push(Mount { tag, at: at.to_owned(), writable });
    };
    add("shared".to_owned(), &shared, &format!("{RUN}/shared"), true);
    for (number, path) in plan.visible.iter().enumerate() {
        add(format!("visible{number}"), path, &path.to_string_lossy(), false);
    }
    for (number, path) in plan.writable.iter().enumerate() {
        add(format!("writable{number}"), path, &path.to_string_lossy(), true);
    }
    for host in 1..=plan.hosts {
        let name = if plan.hosts == 1 { "softroce".to_owned() } else { format!("softroce{host}") };
        let config = GuestConfig { host, hosts: plan.hosts, name, mounts: mounts.clone() };
        let path = run.join(format!("guest-{host}.json"));
        let json = serde_json::to_vec(&config).map_err(std::io::Error::from);
        json.and_then(|json| std::fs::write(&path, json)).context(|| format!("write {}", path.display()))?;
    }
    Ok(folders)
}

fn write_script(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::PermissionsExt as _;
    let written = std::fs::write(path, crate::peer::SCRIPT)
        .and_then(|()| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)));
    written.context(|| format!("write {}", path.display()))
}

/// QEMU has UNIX sockets as cables since 7.2; before, a TCP port of the loopback device serves.
fn cable(arch: Arch, dir: &Path, host: u8) -> Result<Cable, Error> {
    let listen = host == 1;
    if qemu::version(arch).is_some_and(|version| version >= (7, 2)) {
        return Ok(Cable::Stream { socket: dir.join("cable"), listen });
    }
    let note = dir.join("cable-port");
    if listen {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").context(|| "find a free port".to_owned())?;
        let port = listener.local_addr().context(|| "find a free port".to_owned())?.port();
        std::fs::write(&note, port.to_string()).context(|| format!("write {}", note.display()))?;
        return Ok(Cable::Tcp { port, listen });
    }
    let port = std::fs::read_to_string(&note).context(|| format!("read {}", note.display()))?;
    let port = port.parse().map_err(|_| Error::Config(format!("{} holds no port", note.display())))?;
    Ok(Cable::Tcp { port, listen })
}

fn wait_for_hellos(plan: &Plan, machines: &mut [Machine], events: &Receiver<Event>) -> Result<String, Error> {
    let start = Instant::now();
    let patience = patience(plan.accel);
    let mut hellos = vec![None; machines.len()];
    while hellos.iter().any(Option::is_none) {
        signals::check()?;
        let event = match events.recv_timeout(Duration::from_millis(100)) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                if start.elapsed() > patience {
                    let late = hellos.iter().position(Option::is_none).unwrap_or(0);
                    let console = machines[late].console.tail();
                    return Err(Error::BootTimeout { seconds: patience.as_secs(), console });
                }
                continue;
            }
        };
        match event {
            Event::Frame(index, frame) if frame.kind == Kind::Hello => {
                let hello: Hello = serde_json::from_slice(&frame.body).unwrap_or_default();
                hellos[index] = Some(hello);
            }
            Event::Frame(index, frame) if frame.kind == Kind::Fatal => {
                return Err(Error::GuestSetup { why: frame.text(), console: machines[index].console.tail() });
            }
            Event::Console(index, line) => {
                if plan.verbose {
                    eprintln!("console {}: {line}", index + 1);
                }
                if let Some((_, why)) = line.split_once(initramfs::FATAL) {
                    let why = why.trim().to_owned();
                    return Err(Error::GuestSetup { why, console: machines[index].console.tail() });
                }
            }
            Event::Closed(index) => return Err(machines[index].last_words(events)),
            Event::Frame(..) | Event::Input(_) => {}
        }
    }
    Ok(hellos.into_iter().flatten().map(|hello| hello.device).next().unwrap_or_default())
}
