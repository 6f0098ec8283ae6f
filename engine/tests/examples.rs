//! The examples, run as a user would run them.

use std::{
    path::PathBuf,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(60);

/// Cargo builds examples beside the tests: this program is target/debug/deps/NAME-HASH.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a program knows where it is");
    let program = test.ancestors().nth(2).expect("a folder above deps").join("examples").join(name);
    assert!(program.exists(), "{} was not built: cargo build -p verbs-engine --examples", program.display());
    program
}

fn run(name: &str) -> String {
    let mut child = Command::new(program(name))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it was built");
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().expect("a child of ours").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("a child of ours");
            panic!("{name} took longer than {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let Output { status, stdout, stderr } = child.wait_with_output().expect("it has ended");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{name}: {status}\n{stdout}\n{stderr}");
    assert_eq!(stderr, "", "no noise");
    let verdict = stdout.lines().last().unwrap_or_default().to_owned();
    assert!(verdict.starts_with(&format!("{name}: PASSED")), "{stdout}");
    stdout.into_owned()
}

#[test]
fn tcp_roundtrip() {
    assert!(run("tcp_roundtrip").contains("wrote 1048576 bytes over TCP"));
}

#[test]
fn external_host() {
    assert!(run("external_host").contains("read 8 blocks, 524288 bytes"));
}

#[test]
fn notifications() {
    assert!(run("notifications").contains("32 blocks"));
}

#[test]
fn async_batch() {
    let output = run("async_batch");
    assert_eq!(output.lines().filter(|line| line.starts_with("layer ")).count(), 8);
}

#[cfg(feature = "rdma")]
#[test]
fn rdma_roundtrip() {
    assert!(run("rdma_roundtrip").contains("wrote 1048576 bytes and read 1048576; 1 pair of QPs kept"));
}
