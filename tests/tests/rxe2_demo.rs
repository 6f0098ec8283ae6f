//! The demo over two hosts: one listens, the other connects with the blob that the first one prints.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    path::Path,
    process::{Child, ChildStdout, Stdio},
    time::Duration,
};

use verbs_tests::{
    examples::{End, Example, command, finish, program},
    leaks::device_turn,
    process::on_second_host,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// The demo that listens on the second host.
struct Listening {
    child: Child,
    stdout: BufReader<ChildStdout>,
    said: String,
}

impl Listening {
    /// Starts it, and gives the blob that it prints.
    fn start(arguments: &[&str]) -> (Self, String) {
        let there = std::env::var("SOFTROCE_PEER").expect("two hosts are needed: `cargo softroce test`");
        let program = program(Example::Demo);
        let mut command = on_second_host(program.to_str().expect("a path in UTF-8"));
        command.args(["--listen", &format!("{there}:0")]).args(arguments);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it was built");
        let stdout = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut listening = Self { child, stdout, said: String::new() };
        let blob = listening.blob();
        (listening, blob)
    }

    fn blob(&mut self) -> String {
        loop {
            let from = self.said.len();
            let read = self.stdout.read_line(&mut self.said).expect("a pipe can be read");
            assert!(read > 0, "it ended without a blob: {}", self.said);
            if let Some(blob) = self.said[from..].trim().strip_prefix("--connect ") {
                return blob.to_owned();
            }
        }
    }

    /// Waits for its end.
    fn end(mut self) -> (i32, String) {
        self.stdout.read_to_string(&mut self.said).expect("a pipe can be read");
        let status = self.child.wait().expect("a child of ours");
        (status.code().unwrap_or(-1), self.said.clone())
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(blob: &str, arguments: &[&str]) -> End {
    let mut command = command(Example::Demo);
    command.args(["--connect", blob, "--messages", "2000", "--round-trips", "200"]).args(arguments);
    finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it was built"), PATIENCE)
}

fn secret(name: &str, text: &str) -> String {
    let shared = std::env::var("SOFTROCE_SHARED").expect("two hosts are needed: `cargo softroce test`");
    let path = Path::new(&shared).join(name);
    std::fs::write(&path, text).expect("the shared folder is writable");
    path.display().to_string()
}

#[test]
fn the_demo_passes_on_two_hosts() {
    let _turn = device_turn();
    let file = secret("demo-secret", "a secret of both hosts\n");
    let (listening, blob) = Listening::start(&["--secret-file", &file]);
    let end = connect(&blob, &["--json", "--secret-file", &file]);
    assert!(end.status.success(), "{end}");
    let report = end.json();
    assert_eq!(report["verdict"], "passed");
    for side in ["first", "second"] {
        let counts = &report["counts"][side];
        assert_eq!((&counts["rnr"], &counts["epochs"], &counts["failed"]), (&0.into(), &1.into(), &0.into()), "{end}");
    }
    let (status, said) = listening.end();
    assert!(status == 0 && said.contains("demo: PASSED here: "), "{status}: {said}");
}

#[test]
fn the_demo_with_two_secrets_fails_on_both_hosts() {
    let _turn = device_turn();
    let (here, there) =
        (secret("demo-here", "a secret of the first host"), secret("demo-there", "one of the second host"));
    let (listening, blob) = Listening::start(&["--secret-file", &there]);
    let end = connect(&blob, &["--secret-file", &here]);
    assert_eq!(end.status.code(), Some(1), "{end}");
    assert!(end.stdout.contains("demo: FAILED because "), "{end}");
    assert!(end.stdout.contains("secret"), "{end}");
    // It waits for one that knows its secret.
    drop(listening);
}
