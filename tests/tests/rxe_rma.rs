//! The rendezvous on this machine's RDMA device, in real time.

use std::{
    fs,
    future::Future,
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use verbs_tests::{
    examples::{Example, command, finish, run as run_example},
    lab::{DeviceLab, on_device},
    leaks::device_turn,
    party::slot_pattern,
};

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<DeviceLab>) -> R) {
    on_device(DeviceLab::new(), scenario);
}

verbs_tests::rendezvous_suite!(run);

/// Leases by windows, which Soft-RoCE has only for those who insist: each is invalidated, or freed, before its QP goes, or
/// the run would take minutes.
mod by_windows {
    use super::{Arc, DeviceLab, Future, on_device};
    use verbs_transport::{fabric::bulk::WindowPolicy, verbs::DeviceConfig};

    fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<DeviceLab>) -> R) {
        let device = DeviceConfig { windows: WindowPolicy::Always, ..DeviceConfig::default() };
        on_device(DeviceLab { device }, scenario);
    }

    verbs_tests::suite!(run, verbs_tests::scenarios::windows, [leases_are_windows_and_end_with_them,]);
    verbs_tests::suite!(
        run,
        verbs_tests::scenarios::rendezvous_reads,
        [
            rt_11_one_slot_two_ways,
            rt_18_dropped_pulls_leave_nothing,
            rt_21_a_late_read_gets_an_error_and_no_foreign_byte,
            rt_24_the_owner_shuts_down_during_a_get,
        ]
    );
}

/// The example: one process offers a file, another pulls it, verifies its hash, and says how it came.
#[test]
fn the_file_example_moves_a_file_by_read() {
    let _turn = device_turn();
    let folder = std::env::temp_dir().join(format!("file-example-{:016x}", fastrand::u64(..)));
    fs::create_dir(&folder).expect("a temporary folder");
    let (original, copy) = (folder.join("original"), folder.join("copy"));
    fs::write(&original, slot_pattern(1, 9_000_001)).expect("there is room");
    let mut offer = command(Example::File);
    offer.arg("offer").arg("127.0.0.1:0").arg(&original);
    let mut owner = offer.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it was built");
    let mut lines = BufReader::new(owner.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let ticket = lines.find_map(|line| {
        let rest = line.split_once("-- pull ")?.1;
        rest.split_once(' ').map(|(ticket, _)| ticket.to_owned())
    });
    let ticket = ticket.expect("it prints the ticket");

    let end = run_example(Example::File, &["pull", &ticket, copy.to_str().expect("UTF-8")]);
    assert!(end.status.success(), "{end}");
    assert!(end.stdout.contains("9000001 bytes by RDMA READ") && end.stdout.contains("SHA-256 as offered"), "{end}");
    assert!(fs::read(&copy).expect("it was written") == slot_pattern(1, 9_000_001), "another file");
    // A ticket that names nothing.
    let mut wrong = ticket.clone().into_bytes();
    wrong[31] ^= 1;
    let end = run_example(Example::File, &["pull", std::str::from_utf8(&wrong).expect("text"), "/dev/null"]);
    assert!(!end.status.success() && end.stderr.contains("refuses: unknown handle"), "{end}");

    let interrupted = Command::new("kill").args(["-INT", &owner.id().to_string()]).status().expect("kill is there");
    assert!(interrupted.success());
    let told: Vec<String> = lines.collect();
    let end = finish(owner, Duration::from_secs(20));
    assert!(end.status.success() && told.iter().any(|line| line.contains("pulled 1 times by READ")), "{told:?} {end}");
    fs::remove_dir_all(&folder).expect("it is there");
}
