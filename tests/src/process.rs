//! Workers in processes of their own, here or on a second host: see `bin/peer.rs` for what they understand.

use std::{
    fmt::Write as FmtWrite,
    fs::{File, OpenOptions},
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use serde_json::Value;
use verbs_bootstrap::InstanceId;
use verbs_transport::WorkerAddress;

/// Opening a device and pinning memory takes seconds where both are emulated.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// For the answer to one command.
const ANSWER_PATIENCE: Duration = Duration::from_secs(20);

/// A peer program that runs.
pub struct PeerProcess {
    child: Child,
    lines: Receiver<String>,
    input: Option<Input>,
    address: WorkerAddress,
    id: InstanceId,
    /// Its process, which is not the child's where another host runs it.
    pid: u32,
}

enum Input {
    Pipe(ChildStdin),
    /// Standard input does not reach another host; a file that both see does.
    Shared(File, PathBuf),
}

impl PeerProcess {
    /// Starts `program` on this host.
    ///
    /// # Panics
    ///
    /// When it does not come up.
    pub fn start(program: &str, args: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped());
        Self::run(command, None)
    }

    /// Starts `program` on the other host of two.
    ///
    /// # Panics
    ///
    /// When there is none, or it does not come up.
    pub fn start_on_second_host(program: &str, args: &[&str]) -> Self {
        let shared = std::env::var("SOFTROCE_SHARED").expect("SOFTROCE_SHARED is set by `cargo softroce`");
        let path = Path::new(&shared).join(format!("peer-{:016x}", fastrand::u64(..)));
        let file = OpenOptions::new().create_new(true).append(true).open(&path).expect("the shared folder is writable");
        let mut command = on_second_host(program);
        command.args(args).arg(format!("control={}", path.display())).stdin(Stdio::null());
        Self::run(command, Some((file, path)))
    }

    fn run(mut command: Command, shared: Option<(File, PathBuf)>) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the peer program was built");
        let input = match shared {
            Some((file, path)) => Some(Input::Shared(file, path)),
            None => child.stdin.take().map(Input::Pipe),
        };
        let stdout = child.stdout.take().expect("it is piped");
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        let (address, id, pid) = (WorkerAddress::empty(), InstanceId(0), child.id());
        let mut peer = Self { child, lines, input, address, id, pid };
        let up = peer.line(START_PATIENCE);
        let words: Vec<&str> = up.split(' ').collect();
        let ["up", id, pid, address] = words[..] else { panic!("the peer said {up:?}") };
        peer.id = InstanceId(u128::from_str_radix(id, 16).expect("hexadecimal"));
        peer.pid = pid.parse().expect("a number");
        peer.address = WorkerAddress::from_bytes(from_hex(address).expect("hexadecimal"));
        peer
    }

    /// Its name.
    pub fn id(&self) -> InstanceId {
        self.id
    }

    /// Its address.
    pub fn address(&self) -> &WorkerAddress {
        &self.address
    }

    /// Its process number, on its host.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The port that it listens on.
    ///
    /// # Panics
    ///
    /// When the address has none.
    pub fn port(&self) -> u16 {
        self.address.endpoint().expect("it came up").bootstrap[0].port()
    }

    /// Gives it a command and waits for its one line of answer.
    ///
    /// # Panics
    ///
    /// When none comes, or it is an error.
    pub fn ask(&mut self, command: &str) -> String {
        self.try_ask(command).unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// The same, for a command that it may refuse.
    ///
    /// # Errors
    ///
    /// What it says.
    ///
    /// # Panics
    ///
    /// When no answer comes.
    pub fn try_ask(&mut self, command: &str) -> Result<String, String> {
        self.tell(command);
        let answer = self.line(ANSWER_PATIENCE);
        if answer.starts_with("error") { Err(answer) } else { Ok(answer) }
    }

    /// The same, for an answer in JSON.
    ///
    /// # Panics
    ///
    /// As [`Self::ask`].
    pub fn ask_json(&mut self, command: &str) -> Value {
        let answer = self.ask(command);
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{command:?}: {error}: {answer}"))
    }

    /// Makes a worker's address known to it.
    ///
    /// # Panics
    ///
    /// As [`Self::ask`].
    pub fn register(&mut self, address: &WorkerAddress) {
        self.ask(&format!("register {}", to_hex(address.as_bytes())));
    }

    /// What it has received, by run.
    ///
    /// # Panics
    ///
    /// As [`Self::ask`].
    pub fn received(&mut self) -> Value {
        self.ask_json("stats")["received"].take()
    }

    /// Waits until `done` is true of its statistics.
    ///
    /// # Panics
    ///
    /// When it is not within `patience`.
    pub fn wait_for(&mut self, what: &str, patience: Duration, done: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + patience;
        loop {
            let stats = self.ask_json("stats");
            if done(&stats) {
                return stats;
            }
            assert!(Instant::now() < deadline, "no {what} within {patience:?}: {stats}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Sends it a signal: KILL, STOP, CONT. Only on this host.
    ///
    /// # Panics
    ///
    /// When it is gone.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.pid.to_string()]).status();
        assert!(sent.expect("kill is there").success(), "the peer is gone");
        if name == "STOP" {
            self.await_stopped();
        }
    }

    /// A stop takes hold of each thread at its next return to user space, which a busy machine delays.
    fn await_stopped(&self) {
        let stopped = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            // The state stands behind the name, which is in brackets.
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        };
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        let tasks = || std::fs::read_dir(format!("/proc/{}/task", self.pid)).expect("the peer is there").flatten();
        while !tasks().all(stopped) {
            assert!(std::time::Instant::now() < deadline, "the peer does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// kill -9; returns when it is gone.
    ///
    /// # Panics
    ///
    /// When it is no child of ours.
    pub fn kill(mut self) {
        self.child.kill().expect("a child of ours");
        self.child.wait().expect("a child of ours");
    }

    /// Lets it shut down and end.
    ///
    /// # Panics
    ///
    /// When it does not end well.
    pub fn finish(mut self) {
        match &mut self.input {
            Some(Input::Shared(..)) => self.tell("exit"),
            pipe => drop(pipe.take()),
        }
        self.await_end(true);
    }

    /// Waits until it has ended, as it was told to or by a signal.
    ///
    /// # Panics
    ///
    /// When it does not, or does not end well although it should.
    pub fn await_end(&mut self, well: bool) {
        let deadline = Instant::now() + ANSWER_PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                assert!(!well || status.success(), "the peer ended with {status}");
                return;
            }
            assert!(Instant::now() < deadline, "the peer does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Gives it a command and does not wait for the answer, which is then the next one's.
    ///
    /// # Panics
    ///
    /// When it is gone.
    pub fn tell(&mut self, command: &str) {
        match self.input.as_mut().expect("it was not told to end") {
            Input::Pipe(pipe) => writeln!(pipe, "{command}").expect("the peer lives"),
            Input::Shared(file, _) => writeln!(file, "{command}").expect("the shared folder is writable"),
        }
    }

    fn line(&mut self, patience: Duration) -> String {
        match self.lines.recv_timeout(patience) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("no word from the peer within {patience:?}"),
            Err(RecvTimeoutError::Disconnected) => panic!("the peer ended: {:?}", self.child.wait()),
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // It may have ended, or never have come up.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(Input::Shared(_, path)) = &self.input {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A command for the other host of two.
///
/// # Panics
///
/// When there is none.
pub fn on_second_host(program: &str) -> Command {
    let exec = std::env::var("SOFTROCE_PEER_EXEC").expect("two hosts are needed: `cargo softroce test`");
    let mut command = Command::new(exec);
    command.arg(program);
    command
}

/// Runs a command line on this host; it must succeed.
///
/// # Panics
///
/// When it does not.
pub fn sh(line: &str) {
    check(line, Command::new("sh").args(["-c", line]));
}

/// Runs a command line on the other host; it must succeed.
///
/// # Panics
///
/// When it does not.
pub fn sh_on_second_host(line: &str) {
    check(line, on_second_host("sh").args(["-c", line]));
}

/// What a command line prints on the other host; it must succeed.
///
/// # Panics
///
/// When it does not.
pub fn output_on_second_host(line: &str) -> String {
    check(line, on_second_host("sh").args(["-c", line]))
}

fn check(line: &str, command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("a shell");
    assert!(output.status.success(), "`{line}`: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Two digits a byte.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        FmtWrite::write_fmt(&mut text, format_args!("{byte:02x}")).expect("a String takes all");
        text
    })
}

/// The bytes again; `None` if the text is no such thing.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|digit| digit.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
    Some(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}
