//! `verbs-perf` where it cannot measure anything: on any machine it must say why, with the exit status of that class, and
//! never hang. What it does on a device is in `rxe_perf` of `verbs-tests`.

use std::{
    io::Read as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// No machine has a device of this name, so nothing here depends on the machine.
const NO_SUCH_DEVICE: &str = "nonexistent0";

struct End {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs it to its end, which must come soon.
fn run(words: &[&str]) -> End {
    let mut command = Command::new(env!("CARGO_BIN_EXE_verbs-perf"));
    let child = command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("it was built");
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let errors = thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).map(|_| text)
    });
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("{words:?} hangs");
        }
        thread::sleep(Duration::from_millis(10));
    };
    let mut text = String::new();
    stdout.read_to_string(&mut text).unwrap();
    End { status: status.code(), stdout: text, stderr: errors.join().unwrap().unwrap() }
}

#[test]
fn help_names_every_test_and_its_exit_statuses() {
    let end = run(&["--help"]);
    assert_eq!(end.status, Some(0));
    for word in
        ["send-lat", "send-bw", "read-lat", "read-bw", "write-lat", "write-bw", "connect", "scale", "Exit status"]
    {
        assert!(end.stdout.contains(word), "{word}: {}", end.stdout);
    }
}

#[test]
fn a_wrong_device_is_status_3_on_both_sides_before_anything_else() {
    for words in [
        &["send-lat", "-d", NO_SUCH_DEVICE][..],
        &["send-bw", "-d", NO_SUCH_DEVICE, "127.0.0.1", "-p", "1"],
        &["read-bw", "-d", NO_SUCH_DEVICE],
        &["write-lat", "-d", NO_SUCH_DEVICE, "127.0.0.1", "-p", "1"],
    ] {
        let end = run(words);
        assert_eq!(end.status, Some(3), "{words:?}: {}", end.stderr);
        assert!(end.stderr.contains("no RDMA device"), "{}", end.stderr);
        assert_eq!(end.stdout, "", "nothing that looks like a result");
    }
}

#[test]
fn numbers_that_cannot_be_are_status_2_with_the_range() {
    for (words, says) in [
        (&["send-lat", "-n", "0", "host"][..], "0"),
        (&["send-bw", "-q", "1000", "host"], "1..=200"),
        (&["send-lat", "-m", "1500", "host"], "256, 512, 1024, 2048 or 4096"),
        (&["send-lat", "--rate", "-1", "host"], "-1"),
        (&["scale", "-I", "2000", "host"], "0..=948"),
        (&["read-bw", "-o", "256", "host"], "256"),
        (&["write-bw", "--at-once", "0", "host"], "1..=1024"),
    ] {
        let end = run(words);
        assert_eq!(end.status, Some(2), "{words:?}: {}", end.stderr);
        assert!(end.stderr.contains(says), "{words:?}: {}", end.stderr);
    }
}
