//! The examples of `verbs-transport` and `verbs-rma`, run as processes of their own.

use std::{
    fmt,
    io::Read,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Longest that an example may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Example {
    /// Two processes and a verdict.
    Demo,
    /// The smallest program.
    Hello,
    /// What Prometheus would scrape.
    Prometheus,
    /// A file, offered and pulled; of `verbs-rma`.
    File,
}

/// How a process ended.
#[derive(Debug)]
pub struct End {
    /// Its status.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n--- stdout\n{}\n--- stderr\n{}", self.status, self.stdout, self.stderr)
    }
}

impl End {
    /// Its standard output as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("no JSON: {error}: {self}"))
    }
}

/// Where the example is. Cargo builds it beside the tests of the workspace.
pub fn program(example: Example) -> PathBuf {
    let name = match example {
        Example::Demo => "demo",
        Example::Hello => "hello",
        Example::Prometheus => "prometheus",
        Example::File => "file",
    };
    // This program is target/debug/deps/NAME-HASH.
    let test = std::env::current_exe().expect("a program knows where it is");
    let program: PathBuf = test.ancestors().nth(2).expect("a folder above deps").join("examples").join(name);
    assert!(
        program.exists(),
        "{} was not built: test the whole workspace, or first `cargo build -p verbs-transport -p verbs-rma --examples`",
        program.display()
    );
    program
}

/// The example, ready for arguments.
pub fn command(example: Example) -> Command {
    let mut command = Command::new(program(example));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs it to its end.
pub fn run(example: Example, arguments: &[&str]) -> End {
    let mut command = command(example);
    let child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it was built");
    finish(child, PATIENCE)
}

/// Waits for its end; one that takes longer is killed, and the test fails.
pub fn finish(mut child: Child, patience: Duration) -> End {
    let stdout = read_all(child.stdout.take());
    let stderr = read_all(child.stderr.take());
    let deadline = Instant::now() + patience;
    let mut late = false;
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            break status;
        }
        if !late && Instant::now() > deadline {
            late = true;
            child.kill().expect("a child of ours");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let text = |reader: JoinHandle<String>| reader.join().expect("reading does not panic");
    let end = End { status, stdout: text(stdout), stderr: text(stderr) };
    assert!(!late, "it took longer than {patience:?}: {end}");
    end
}

fn read_all(from: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            from.read_to_end(&mut bytes).expect("a pipe can be read");
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
