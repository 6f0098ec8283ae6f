//! A place with a Soft-RoCE device, and commands that run there: one or two guests, or this very host.

mod jobs;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::boot;
use crate::commands::Commands;
use crate::error::{Context as _, Error};
use crate::klog::KernelLog;
use crate::machine::{Event, Machine, is_crash};
use crate::signals::{self, Registered};
use crate::via::{Local, Via};
use crate::wire::{Frame, Kind, PEER};

pub(crate) use jobs::{Job, Outcome};

/// A guest that sends nothing for this long hangs: it shows life every two seconds, however busy its commands are.
const SILENCE: Duration = Duration::from_secs(90);
/// How often the loop looks at clocks and signals.
const TICK: Duration = Duration::from_millis(100);
const EVENTS_IN_FLIGHT: usize = 64;

enum Place {
    Guests(Vec<Machine>),
    Here {
        commands: Commands,
        log: Option<KernelLog>,
        /// Held for its drop.
        _device: Local,
    },
}

/// The place. Dropping it ends the guests, or removes the device that was made, and what was temporary.
pub(crate) struct Testbed {
    place: Place,
    events: Receiver<Event>,
    tell: SyncSender<Event>,
    heard: Vec<Instant>,
    next_channel: u32,
    kernel_log: Vec<String>,
    verbose: bool,
    /// How the device came about.
    pub(crate) via: Via,
    /// Its name.
    pub(crate) device: String,
    /// The folder that all hosts see, as they see it.
    pub(crate) shared: PathBuf,
    _dir: (TempDir, Registered),
}

impl Testbed {
    /// Boots the guests.
    pub(crate) fn guests(plan: &boot::Plan) -> Result<Self, Error> {
        let (dir, registered) = registered_temporary()?;
        let (tell, events) = sync_channel(EVENTS_IN_FLIGHT);
        let (machines, device) = boot::boot(plan, dir.path(), &tell, &events)?;
        Ok(Self {
            heard: vec![Instant::now(); machines.len()],
            place: Place::Guests(machines),
            events,
            tell,
            next_channel: 1,
            kernel_log: Vec::new(),
            verbose: plan.verbose,
            via: Via::Vm,
            device,
            shared: Path::new(crate::initramfs::RUN).join("shared"),
            _dir: (dir, registered),
        })
    }

    /// Takes a device of this host.
    pub(crate) fn here(local: Local, share: Option<&Path>) -> Result<Self, Error> {
        let (dir, registered) = registered_temporary()?;
        let (tell, events) = sync_channel(EVENTS_IN_FLIGHT);
        let frames = tell.clone();
        let out = Arc::new(move |frame| drop(frames.send(Event::Frame(0, frame))));
        let shared = share.map_or_else(|| dir.path().join("shared"), Path::to_path_buf);
        std::fs::create_dir_all(&shared).context(|| format!("create {}", shared.display()))?;
        Ok(Self {
            heard: vec![Instant::now()],
            via: local.via(),
            device: local.device().to_owned(),
            place: Place::Here { commands: Commands::new(out), log: KernelLog::open_at_end().ok(), _device: local },
            events,
            tell,
            next_channel: 1,
            kernel_log: Vec::new(),
            verbose: false,
            shared,
            _dir: (dir, registered),
        })
    }

    /// This host, without a device.
    pub(crate) fn bare() -> Result<Self, Error> {
        Self::here(Local::none(), None)
    }

    /// How many hosts there are.
    pub(crate) fn hosts(&self) -> usize {
        self.heard.len()
    }

    /// What this program adds to a command's environment.
    pub(crate) fn environment(&self, host: usize) -> Vec<(OsString, OsString)> {
        let mut env: Vec<(OsString, OsString)> = vec![
            ("SOFTROCE".into(), "1".into()),
            ("SOFTROCE_DEVICE".into(), self.device.clone().into()),
            ("SOFTROCE_VIA".into(), self.via.name().into()),
            ("SOFTROCE_HOSTS".into(), self.hosts().to_string().into()),
            ("SOFTROCE_HOST".into(), (host + 1).to_string().into()),
            ("SOFTROCE_SHARED".into(), self.shared.clone().into()),
        ];
        if self.hosts() == 2 {
            let address = crate::guest_device::pair_address;
            env.push(("SOFTROCE_ADDRESS".into(), address(if host == 0 { 1 } else { 2 }).into()));
            env.push(("SOFTROCE_PEER".into(), address(if host == 0 { 2 } else { 1 }).into()));
            env.push(("SOFTROCE_PEER_EXEC".into(), format!("{}/peer-exec", crate::initramfs::RUN).into()));
        }
        env
    }

    /// Lines of level warning or worse that the guests' kernels logged since the last call.
    pub(crate) fn take_kernel_log(&mut self) -> Result<Vec<String>, Error> {
        let mut waiting = 0;
        match &mut self.place {
            Place::Here { log, .. } => {
                let lines = log.iter_mut().flat_map(|log| std::iter::from_fn(|| log.next()));
                self.kernel_log.extend(lines);
            }
            Place::Guests(machines) => {
                waiting = machines.len();
                let sync = Frame::new(Kind::Sync, 0, Vec::new());
                for machine in machines {
                    machine.send(&sync);
                }
            }
        }
        while waiting > 0 {
            if let Some(Event::Frame(_, frame)) = self.next_event()? {
                waiting -= usize::from(frame.kind == Kind::Sync);
            }
        }
        Ok(std::mem::take(&mut self.kernel_log))
    }

    fn send(&mut self, host: usize, frame: Frame) {
        match &mut self.place {
            Place::Guests(machines) => {
                if let Some(machine) = machines.get_mut(host) {
                    machine.send(&frame);
                }
            }
            Place::Here { commands, .. } => commands.handle(frame),
        }
    }

    /// Waits a tick for an event, and deals with those that are no business of the caller.
    fn next_event(&mut self) -> Result<Option<Event>, Error> {
        signals::check()?;
        let event = match self.events.recv_timeout(TICK) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return self.check_silence();
            }
        };
        match event {
            Event::Frame(host, frame) => {
                self.heard[host] = Instant::now();
                match frame.kind {
                    Kind::Beat => Ok(None),
                    Kind::Kmsg => {
                        self.kernel_log.push(frame.text());
                        Ok(None)
                    }
                    _ if frame.channel & PEER != 0 => {
                        self.pass_on(host, frame);
                        Ok(None)
                    }
                    _ => Ok(Some(Event::Frame(host, frame))),
                }
            }
            Event::Console(host, line) => {
                if self.verbose {
                    eprintln!("console {}: {line}", host + 1);
                }
                if is_crash(&line) { Err(self.lost(host)) } else { Ok(None) }
            }
            Event::Closed(host) => Err(self.lost(host)),
            input @ Event::Input(_) => Ok(Some(input)),
        }
    }

    /// Frames of a command that one guest started on the other.
    fn pass_on(&mut self, from: usize, frame: Frame) {
        if self.hosts() == 2 {
            self.send(1 - from, frame);
        } else if frame.kind == Kind::Exec {
            let why = "cargo softroce: there is no second host; use --hosts 2\n";
            self.send(from, Frame::new(Kind::Stderr, frame.channel, why));
            self.send(from, Frame::new(Kind::Exit, frame.channel, 125_i32.to_le_bytes()));
        }
    }

    fn check_silence(&mut self) -> Result<Option<Event>, Error> {
        if matches!(self.place, Place::Here { .. }) {
            return Ok(None);
        }
        match self.heard.iter().position(|heard| heard.elapsed() > SILENCE) {
            Some(host) => Err(self.hung(host, SILENCE)),
            None => Ok(None),
        }
    }

    fn host_name(&self, host: usize) -> String {
        if self.hosts() == 1 { "the guest".to_owned() } else { format!("host {}", host + 1) }
    }

    fn hung(&mut self, index: usize, silent: Duration) -> Error {
        let host = self.host_name(index);
        let console = match &self.place {
            Place::Guests(machines) => machines[index].console.tail(),
            Place::Here { .. } => "    (this host; see dmesg)".to_owned(),
        };
        Error::Hung { host, seconds: silent.as_secs(), console }
    }

    /// The error for a guest whose kernel has crashed or whose QEMU is ending.
    fn lost(&mut self, index: usize) -> Error {
        let host = self.host_name(index);
        let Place::Guests(machines) = &mut self.place else {
            return Error::Config("a guest where there is none".to_owned());
        };
        let ended = machines[index].last_words(&self.events);
        if machines[index].console.shows_crash() {
            return Error::Crashed { host, console: machines[index].console.tail() };
        }
        ended
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if let Place::Here { commands, .. } = &mut self.place {
            for (signal, wait) in [(Signal::TERM, 300), (Signal::KILL, 50)] {
                if commands.signal_all(signal.as_raw()) {
                    std::thread::sleep(Duration::from_millis(wait));
                }
            }
        }
    }
}

fn registered_temporary() -> Result<(TempDir, Registered), Error> {
    let dir = temporary()?;
    let registered = signals::register_dir(dir.path().to_path_buf());
    Ok((dir, registered))
}

/// A temporary directory whose path leaves room for a UNIX socket's name (108 bytes in all).
pub(crate) fn temporary() -> Result<TempDir, Error> {
    const PATH_MAX_BYTES: usize = 80;
    let base = std::env::temp_dir();
    let base = if base.as_os_str().as_bytes().len() < PATH_MAX_BYTES - 20 { base } else { "/tmp".into() };
    let dir = tempfile::Builder::new().prefix("softroce-").tempdir_in(&base);
    dir.context(|| format!("create a directory in {}", base.display()))
}
