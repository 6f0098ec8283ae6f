//! Runs one command with its streams kept apart; the agent uses it in the guest, and `--via device` on the host.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::time::Duration;

use rustix::process::Signal;

use crate::signals::kill_group;
use crate::wire::ExecSpec;

/// How much of a stream is handed on at once, in bytes.
const CHUNK_BYTES: usize = 64 << 10;
/// After the command's end, streams that its orphans hold open are read this long without news.
const ORPHAN_PATIENCE: Duration = Duration::from_millis(500);

/// Where the command's news go; called from several threads, and blocking it holds the command back.
pub(crate) trait Sink: Send + Sync + 'static {
    /// Bytes of standard output.
    fn stdout(&self, bytes: &[u8]);
    /// Bytes of standard error.
    fn stderr(&self, bytes: &[u8]);
    /// The last chunk of input was taken.
    fn stdin_taken(&self) {}
    /// The command ended, and nothing follows.
    fn exit(&self, status: i32);
}

/// A command that runs. Dropping it does not end it.
pub(crate) struct Running {
    pid: u32,
    input: Option<SyncSender<Vec<u8>>>,
    terminal: Option<Arc<OwnedFd>>,
}

impl Running {
    /// Hands on input; the next call only after [`Sink::stdin_taken`], or it may block.
    pub(crate) fn input(&self, bytes: Vec<u8>) {
        if let Some(input) = &self.input {
            let _ended = input.send(bytes);
        }
    }

    /// Ends the input.
    pub(crate) fn end_input(&mut self) {
        self.input = None;
    }

    /// Signals the command's whole process group.
    pub(crate) fn signal(&self, number: i32) {
        if let Some(signal) = Signal::from_named_raw(number) {
            kill_group(self.pid, signal);
        }
    }

    /// Sets the size of its terminal.
    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        if let Some(terminal) = &self.terminal {
            let _not_ours = rustix::termios::tcsetwinsize(terminal, window(rows, columns));
        }
    }
}

fn window(rows: u16, columns: u16) -> rustix::termios::Winsize {
    rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// Starts a command. One that cannot be started says why on its standard error and ends with 127 (not found) or 126, as
/// under a shell.
pub(crate) fn start(spec: &ExecSpec, sink: &Arc<dyn Sink>) -> Option<Running> {
    let result = match spec.pty {
        None => start_piped(spec, sink),
        Some(size) => start_on_terminal(spec, size, sink),
    };
    match result {
        Ok(running) => Some(running),
        Err(error) => {
            let name = spec.argv.first().map_or(String::new(), |word| word.to_string_lossy().into_owned());
            let (status, why) = match error.kind() {
                io::ErrorKind::NotFound => (127, "command not found (a file outside the shared root?)".to_owned()),
                _ => (126, error.to_string()),
            };
            sink.stderr(format!("cargo softroce: {name}: {why}\n").as_bytes());
            sink.exit(status);
            None
        }
    }
}

fn command(program: &OsStr, spec: &ExecSpec) -> Command {
    let mut command = Command::new(program);
    command.env_clear().envs(spec.env.iter().map(|(key, value)| (key, value)));
    let cwd = Path::new(&spec.cwd);
    command.current_dir(if cwd.is_dir() { cwd } else { Path::new("/") });
    command
}

fn start_piped(spec: &ExecSpec, sink: &Arc<dyn Sink>) -> io::Result<Running> {
    let (program, args) = spec.argv.split_first().ok_or(io::ErrorKind::NotFound)?;
    let mut command = command(program, spec);
    command.args(args).process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.stdin(if spec.stdin { Stdio::piped() } else { Stdio::null() });
    let mut child = command.spawn()?;
    let pid = child.id();
    let input = child.stdin.take().map(|pipe| feed(pipe, sink.clone()));
    let mut watch = Streams::new();
    if let Some(pipe) = child.stdout.take() {
        watch.pump(pipe, sink.clone(), Sink::stdout);
    }
    if let Some(pipe) = child.stderr.take() {
        watch.pump(pipe, sink.clone(), Sink::stderr);
    }
    reap(child, watch, spec.sweep, sink.clone());
    Ok(Running { pid, input, terminal: None })
}

/// `setsid --ctty` makes the new terminal the command's own; doing that between fork and exec would need unsafe code.
fn start_on_terminal(spec: &ExecSpec, (rows, columns): (u16, u16), sink: &Arc<dyn Sink>) -> io::Result<Running> {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname(&master, Vec::new())?;
    let path = Path::new(OsStr::new(name.to_str().map_err(|_| io::ErrorKind::InvalidData)?));
    let slave = File::options().read(true).write(true).open(path)?;
    rustix::termios::tcsetwinsize(&slave, window(rows, columns))?;
    let mut command = command(OsStr::new("setsid"), spec);
    command.arg("--ctty").args(&spec.argv);
    command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
    let child = command.spawn()?;
    drop(command); // it holds the slave, and while anyone does the master sees no end
    let pid = child.id();
    let master = Arc::new(master);
    let mut watch = Streams::new();
    watch.pump(File::from(master.try_clone()?), sink.clone(), Sink::stdout);
    let input = Some(feed(File::from(master.try_clone()?), sink.clone()));
    reap(child, watch, true, sink.clone());
    Ok(Running { pid, input, terminal: Some(master) })
}

fn feed(mut pipe: impl Write + Send + 'static, sink: Arc<dyn Sink>) -> SyncSender<Vec<u8>> {
    let (sender, receiver) = sync_channel::<Vec<u8>>(4);
    std::thread::spawn(move || {
        let mut broken = false;
        for bytes in receiver {
            broken = broken || pipe.write_all(&bytes).is_err();
            sink.stdin_taken();
        }
    });
    sender
}

/// The threads that read the command's streams.
struct Streams {
    open: usize,
    done: Receiver<()>,
    tell: std::sync::mpsc::Sender<()>,
    news: Arc<AtomicBool>,
    inside: Arc<AtomicU32>,
}

impl Streams {
    fn new() -> Self {
        let (tell, done) = channel();
        Self { open: 0, done, tell, news: Arc::default(), inside: Arc::default() }
    }

    fn pump(&mut self, mut from: impl Read + Send + 'static, sink: Arc<dyn Sink>, hand: fn(&dyn Sink, &[u8])) {
        self.open += 1;
        let (tell, news, inside) = (self.tell.clone(), self.news.clone(), self.inside.clone());
        std::thread::spawn(move || {
            let mut chunk = vec![0; CHUNK_BYTES];
            loop {
                match from.read(&mut chunk) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => break, // EIO: the terminal's last holder is gone
                    Ok(n) => {
                        inside.fetch_add(1, Ordering::SeqCst);
                        hand(&*sink, &chunk[..n]);
                        news.store(true, Ordering::SeqCst);
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                }
            }
            let _reaper_gone = tell.send(());
        });
    }

    /// Waits until both streams end, or only orphans hold them and are silent.
    fn finish(mut self) {
        drop(self.tell);
        while self.open > 0 {
            match self.done.recv_timeout(ORPHAN_PATIENCE) {
                Ok(()) => self.open -= 1,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let busy = self.inside.load(Ordering::SeqCst) > 0;
                    if !busy && !self.news.swap(false, Ordering::SeqCst) {
                        return;
                    }
                }
            }
        }
    }
}

fn reap(mut child: Child, streams: Streams, sweep: bool, sink: Arc<dyn Sink>) {
    std::thread::spawn(move || {
        let pid = child.id();
        let status = child.wait().map_or(255, code);
        if sweep {
            kill_group(pid, Signal::KILL);
        }
        streams.finish();
        sink.exit(status);
    });
}

/// The status as a shell gives it: 128 + n for a signal.
pub(crate) fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}
