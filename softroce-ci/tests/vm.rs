//! The VM way, end to end. Each test boots guests, so they are built with the feature `vm-tests` only; CI does so.

use std::io::Write as _;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cargo-softroce"));
    command.args(["softroce", "--quiet", "--via", "vm"]).args(args);
    command
}

fn run(args: &[&str]) -> Output {
    command(args).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Process numbers of the QEMUs that `child` started.
fn qemus_of(child: &Child) -> Vec<String> {
    let parent = child.id().to_string();
    let list = Command::new("ps").args(["-o", "pid=,args=", "--ppid", &parent]).output().unwrap();
    let list = text(&list.stdout);
    let qemus = list.lines().filter(|line| line.contains("qemu-system"));
    qemus.filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
}

#[test]
fn output_status_words_and_input_come_through_and_the_device_is_there() {
    let script = r#"cat; printf '<%s>' "$@"; echo oops >&2
        grep -q ACTIVE /sys/class/infiniband/$SOFTROCE_DEVICE/ports/1/state || exit 99
        [ "$(ulimit -l)" = unlimited ] || exit 98
        [ "$(pwd)" = "$WANTED" ] || exit 97
        echo brought >"$SOFTROCE_SHARED/out"
        exit 3"#;
    let share = tempfile::tempdir().unwrap();
    let here = std::env::current_dir().unwrap();
    let mut child = command(&["--share", share.path().to_str().unwrap()])
        .args(["--env", &format!("WANTED={}", here.display())])
        .args(["run", "--", "sh", "-c", script, "sh", "a b", "\"q\" 'q'", "", "ä\n*"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"from the host: ").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(&output.stdout), "from the host: <a b><\"q\" 'q'><><ä\n*>");
    assert_eq!(text(&output.stderr), "oops\n");
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(std::fs::read_to_string(share.path().join("out")).unwrap(), "brought\n");
}

#[test]
fn much_output_comes_whole() {
    let output = run(&["run", "--", "head", "-c", "50000000", "/dev/zero"]);
    assert_eq!(output.stdout.len(), 50_000_000);
}

#[test]
fn a_kernel_crash_is_an_error_with_the_last_words() {
    let output = run(&["run", "--", "sh", "-c", "echo c >/proc/sysrq-trigger"]);
    assert_eq!(output.status.code(), Some(125));
    let said = text(&output.stderr);
    assert!(said.contains("the kernel of the guest crashed") && said.contains("sysrq"), "{said}");
}

#[test]
fn a_command_beyond_its_time_is_ended() {
    let output = run(&["--timeout", "2", "run", "--", "sleep", "1000"]);
    assert_eq!(output.status.code(), Some(124));
    assert!(text(&output.stderr).contains("--timeout 2 s"));
}

#[test]
fn an_interrupt_leaves_nothing_running() {
    let mut child = command(&["run", "--", "sh", "-c", "echo up; sleep 1000"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
    let qemus = qemus_of(&child);
    assert_eq!(qemus.len(), 1);
    let start = Instant::now();
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(!std::path::Path::new("/proc").join(&qemus[0]).exists(), "QEMU outlived us");
}

#[test]
fn two_hosts_reach_each_other_and_lines_name_their_host() {
    let script = r#"
        echo host $SOFTROCE_HOST at $SOFTROCE_ADDRESS
        touch "$SOFTROCE_SHARED/$SOFTROCE_HOST"
        until [ -e "$SOFTROCE_SHARED/1" ] && [ -e "$SOFTROCE_SHARED/2" ]; do sleep 0.1; done
        busybox ping -c 1 -w 20 $SOFTROCE_PEER >/dev/null || exit 9
        [ $SOFTROCE_HOST = 1 ] || exit 0
        $SOFTROCE_PEER_EXEC sh -c 'hostname; exit 5'
        echo peer said $?"#;
    let output = run(&["run", "--hosts", "2", "--", "sh", "-c", script]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    for line in ["[1] host 1 at 10.99.1.1", "[2] host 2 at 10.99.1.2", "[1] softroce2", "[1] peer said 5"] {
        assert!(said.lines().any(|said| said == line), "{line}\n{said}");
    }
}
