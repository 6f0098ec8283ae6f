//! One guest, seen from the host: the QEMU process, its console and its control port.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error::{Context as _, Error};
use crate::signals::{self, Registered};
use crate::wire::Frame;

/// Lines of the console that an error shows.
const CONSOLE_LINES: usize = 50;
/// QEMU makes its sockets within this, or not at all.
const SOCKET_PATIENCE: Duration = Duration::from_secs(20);

/// From a kernel's panic to QEMU's end.
const ENDING_PATIENCE: Duration = Duration::from_secs(10);

/// News from anywhere, for the one loop that acts.
#[derive(Debug)]
pub(crate) enum Event {
    /// A frame of the guest with this index.
    Frame(usize, Frame),
    /// A line on its console.
    Console(usize, String),
    /// Its control port or its console closed: QEMU is ending.
    Closed(usize),
    /// Bytes of our standard input; none at its end.
    Input(Vec<u8>),
}

/// The console's last lines, with QEMU's own messages.
#[derive(Clone, Default)]
pub(crate) struct Console(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    last: VecDeque<String>,
    crash: bool,
}

impl Console {
    fn push(&self, line: &str) {
        if let Ok(mut lines) = self.0.lock() {
            if lines.last.len() == CONSOLE_LINES {
                lines.last.pop_front();
            }
            lines.last.push_back(line.to_owned());
            lines.crash |= is_crash(line);
        }
    }

    /// As shown in errors.
    pub(crate) fn tail(&self) -> String {
        let lines = self.0.lock().map(|lines| Vec::from(lines.last.clone())).unwrap_or_default();
        if lines.is_empty() { "    (nothing)".to_owned() } else { format!("    {}", lines.join("\n    ")) }
    }

    /// Whether a kernel's last words are among them.
    pub(crate) fn shows_crash(&self) -> bool {
        self.0.lock().is_ok_and(|lines| lines.crash)
    }
}

/// `oops=panic` makes a panic of everything that is fatal, so one phrase tells.
pub(crate) fn is_crash(line: &str) -> bool {
    line.contains("Kernel panic - not syncing")
}

/// A running QEMU. Dropping it kills and reaps it.
pub(crate) struct Machine {
    child: Child,
    control: Option<UnixStream>,
    pub(crate) console: Console,
    _registered: Registered,
}

impl Machine {
    /// Starts QEMU; its console's lines become events of guest `index`.
    pub(crate) fn start(mut command: Command, index: usize, events: &SyncSender<Event>) -> Result<Self, Error> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let name = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().context(|| format!("start {name}"))?;
        let registered = signals::register_group(child.id());
        let console = Console::default();
        if let Some(pipe) = child.stdout.take() {
            spawn_lines(pipe, console.clone(), Some((index, events.clone())));
        }
        if let Some(pipe) = child.stderr.take() {
            spawn_lines(pipe, console.clone(), None);
        }
        Ok(Self { child, control: None, console, _registered: registered })
    }

    /// Connects to the control port's socket and turns what comes into events.
    pub(crate) fn connect(&mut self, socket: &Path, index: usize, events: &SyncSender<Event>) -> Result<(), Error> {
        let stream = self.wait_for(|| UnixStream::connect(socket).ok())?;
        let mut reader = stream.try_clone().context(|| format!("duplicate {}", socket.display()))?;
        self.control = Some(stream);
        let events = events.clone();
        std::thread::spawn(move || {
            while let Ok(Some(frame)) = Frame::read_from(&mut reader) {
                if events.send(Event::Frame(index, frame)).is_err() {
                    return;
                }
            }
            let _nobody_listens = events.send(Event::Closed(index));
        });
        Ok(())
    }

    /// Waits for something that QEMU makes at its start.
    pub(crate) fn wait_for<T>(&mut self, mut ready: impl FnMut() -> Option<T>) -> Result<T, Error> {
        let start = Instant::now();
        loop {
            if let Some(value) = ready() {
                return Ok(value);
            }
            signals::check()?;
            if let Ok(Some(_)) = self.child.try_wait() {
                std::thread::sleep(Duration::from_millis(200)); // for its messages
                return Err(Error::Qemu { status: "at its start".to_owned(), said: self.console.tail() });
            }
            if start.elapsed() > SOCKET_PATIENCE {
                let seconds = SOCKET_PATIENCE.as_secs();
                return Err(Error::BootTimeout { seconds, console: self.console.tail() });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends a frame. A guest that is gone shows by its [`Event::Closed`], not here.
    pub(crate) fn send(&mut self, frame: &Frame) {
        if let Some(control) = &mut self.control {
            let _closing = frame.write_to(control);
        }
    }

    /// Waits for the end of a QEMU that is ending by itself, and makes the error of it. Events are dropped meanwhile, as
    /// the console would block otherwise.
    pub(crate) fn last_words(&mut self, events: &Receiver<Event>) -> Error {
        let start = Instant::now();
        let mut status = "still running".to_owned();
        while start.elapsed() < ENDING_PATIENCE {
            let _dropped = events.recv_timeout(Duration::from_millis(20));
            if let Ok(Some(ended)) = self.child.try_wait() {
                status = ended.to_string();
                break;
            }
        }
        let rest = Instant::now() + Duration::from_millis(200); // what is left in its pipes
        while Instant::now() < rest {
            let _dropped = events.recv_timeout(Duration::from_millis(20));
        }
        Error::Qemu { status, said: self.console.tail() }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        signals::kill_group(self.child.id(), rustix::process::Signal::KILL);
        let _reaped = self.child.wait();
    }
}

/// Reads lines into the console; those of the guest become events as well.
fn spawn_lines(pipe: impl Read + Send + 'static, console: Console, events: Option<(usize, SyncSender<Event>)>) {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(pipe);
        let mut bytes = Vec::new();
        while matches!(reader.read_until(b'\n', &mut bytes), Ok(n) if n > 0) {
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            bytes.clear();
            if line.is_empty() {
                continue;
            }
            console.push(&line);
            if let Some((index, events)) = &events {
                let _nobody_listens = events.send(Event::Console(*index, line));
            }
        }
        if let Some((index, events)) = events {
            let _nobody_listens = events.send(Event::Closed(index));
        }
    });
}
