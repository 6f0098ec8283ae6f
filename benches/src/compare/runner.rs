//! One server, one client: started, awaited, read, and their CPU time counted.

use std::{
    fs, io,
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::tools::{Contender, Figures, Ready};
use crate::usage::CpuTime;

/// Longest that a server may take until it is ready, and a client until it is done.
const READY_PATIENCE: Duration = Duration::from_secs(60);
const RUN_PATIENCE: Duration = Duration::from_secs(300);
/// From the client's end to the server's.
const END_PATIENCE: Duration = Duration::from_secs(20);
const TICK: Duration = Duration::from_millis(10);

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) figures: Figures,
    /// Of both processes, from their start to their end.
    pub(crate) cpu: CpuTime,
    pub(crate) seconds: f64,
}

/// Why a measurement has no figure.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error("{program} cannot be started: {source}")]
    Start { program: String, source: io::Error },
    #[error("the server of {name} was not ready after {} s", READY_PATIENCE.as_secs())]
    NotReady { name: &'static str },
    #[error("{name} was not done after {} s", RUN_PATIENCE.as_secs())]
    TooLong { name: &'static str },
    #[error("{name} ended with {status}: {said}")]
    Ended { name: &'static str, status: String, said: String },
    #[error("{name} printed no figure that can be read: {said}")]
    Unreadable { name: &'static str, said: String },
    #[error("waiting for {name} failed: {source}")]
    Wait { name: &'static str, source: io::Error },
}

/// A child that does not outlive this value.
struct Process {
    name: &'static str,
    child: Child,
    stdout: Option<JoinHandle<String>>,
    stderr: Option<JoinHandle<String>>,
}

impl Process {
    fn start(name: &'static str, words: &[String]) -> Result<Self, RunError> {
        let program = words.first().cloned().unwrap_or_default();
        let mut command = Command::new(&program);
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|source| RunError::Start { program, source })?;
        let stdout = child.stdout.take().map(read_all);
        let stderr = child.stderr.take().map(read_all);
        Ok(Self { name, child, stdout, stderr })
    }

    fn has_ended(&mut self) -> Result<Option<std::process::ExitStatus>, RunError> {
        self.child.try_wait().map_err(|source| RunError::Wait { name: self.name, source })
    }

    /// Waits; `None` when it takes too long.
    fn end(&mut self, patience: Duration) -> Result<Option<std::process::ExitStatus>, RunError> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.has_ended()? {
                return Ok(Some(status));
            }
            if began.elapsed() > patience {
                return Ok(None);
            }
            thread::sleep(TICK);
        }
    }

    fn output(&mut self) -> (String, String) {
        let text =
            |reader: Option<JoinHandle<String>>| reader.and_then(|reader| reader.join().ok()).unwrap_or_default();
        (text(self.stdout.take()), text(self.stderr.take()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error: it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_all(mut from: impl io::Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Runs a contender once.
pub(crate) fn run(contender: &Contender) -> Result<Sample, RunError> {
    let name = contender.name;
    let (began, before) = (Instant::now(), CpuTime::of_children());
    let mut server = Process::start(name, &contender.server)?;
    await_ready(&mut server, contender.ready)?;
    let mut client = Process::start(name, &contender.client)?;
    let status = client.end(RUN_PATIENCE)?.ok_or(RunError::TooLong { name })?;
    if contender.server_ends {
        // One that does not is ended below; its figure is none the worse.
        let _ = server.end(END_PATIENCE)?;
    }
    drop(server);
    let (stdout, stderr) = client.output();
    drop(client);
    let said = || last_words(&format!("{stdout}\n{stderr}"));
    if !status.success() {
        return Err(RunError::Ended { name, status: status.to_string(), said: said() });
    }
    let figures = contender.read.figures(&stdout).ok_or_else(|| RunError::Unreadable { name, said: said() })?;
    Ok(Sample { figures, cpu: CpuTime::of_children() - before, seconds: began.elapsed().as_secs_f64() })
}

fn await_ready(server: &mut Process, ready: Ready) -> Result<(), RunError> {
    let (began, name) = (Instant::now(), server.name);
    loop {
        if let Some(status) = server.has_ended()? {
            let (stdout, stderr) = server.output();
            let said = last_words(&format!("{stdout}\n{stderr}"));
            return Err(RunError::Ended { name, status: status.to_string(), said });
        }
        let there = match ready {
            Ready::Tcp(port) => is_listening(port),
            Ready::After(time) => began.elapsed() > time,
        };
        if there {
            return Ok(());
        }
        if began.elapsed() > READY_PATIENCE {
            return Err(RunError::NotReady { name });
        }
        thread::sleep(TICK);
    }
}

/// Looked up in the kernel's tables, as a connection to try it would be the server's only one.
fn is_listening(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|path| {
        let table = fs::read_to_string(path).unwrap_or_default();
        table.lines().any(|line| listens(line, port))
    })
}

/// `sl local_address rem_address st …`, where the state 0A is LISTEN and ports are hexadecimal.
fn listens(line: &str, port: u16) -> bool {
    let mut fields = line.split_whitespace().skip(1);
    let (local, state) = (fields.next(), fields.nth(1));
    let local = local.and_then(|local| local.rsplit_once(':')).map(|(_, port)| port.to_owned());
    state == Some("0A") && local == Some(format!("{port:04X}"))
}

/// The end of what a tool said, in one line.
fn last_words(said: &str) -> String {
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(3)..].join(" | ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::compare::tools::Read;

    fn contender(server: &[&str], client: &[&str]) -> Contender {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        Contender {
            name: "tool",
            server: words(server),
            client: words(client),
            ready: Ready::After(Duration::ZERO),
            server_ends: false,
            read: Read::UcxLatency,
            messages: 1,
        }
    }

    #[test]
    fn a_figure_is_read_and_a_server_that_stays_is_ended() {
        let began = Instant::now();
        let sample = run(&contender(&["sleep", "1000"], &["echo", "1,2,3,4,5,6,7,8"])).unwrap();
        assert!((sample.figures.value - 2.0).abs() < 1e-9);
        assert!(began.elapsed() < Duration::from_secs(60) && sample.seconds < 60.0);
        assert_eq!(sample.figures.details.keys().collect::<Vec<_>>().len(), BTreeMap::len(&sample.figures.details));
    }

    #[test]
    fn each_failure_says_whose_it_is_and_what_was_said() {
        let error = run(&contender(&["no-such-tool-here"], &["true"])).unwrap_err();
        assert!(matches!(error, RunError::Start { .. }) && error.to_string().contains("no-such-tool-here"));
        let error = run(&contender(&["sleep", "1000"], &["sh", "-c", "echo oops >&2; exit 3"])).unwrap_err();
        assert!(error.to_string().contains("exit status: 3") && error.to_string().contains("oops"), "{error}");
        let error = run(&contender(&["sleep", "1000"], &["echo", "hello"])).unwrap_err();
        assert!(matches!(&error, RunError::Unreadable { said, .. } if said == "hello"), "{error}");
        let mut early = contender(&["sh", "-c", "echo no device; exit 1"], &["true"]);
        early.ready = Ready::After(Duration::from_secs(5));
        let error = run(&early).unwrap_err();
        assert!(error.to_string().contains("no device"), "{error}");
    }

    #[test]
    fn a_listening_port_is_seen() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(is_listening(port));
        drop(listener);
        let line = "   1: 00000000:4853 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1";
        assert!(listens(line, 18_515) && !listens(line, 18_516));
        assert!(!listens(&line.replace(" 0A ", " 01 "), 18_515));
    }
}
