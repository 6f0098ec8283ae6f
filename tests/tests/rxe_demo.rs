//! The examples on a real device, as processes of their own.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use verbs_tests::{
    examples::{End, Example, command, finish, run},
    leaks::device_turn,
};

#[test]
fn hello_exchanges_a_message_and_a_reply() {
    let _turn = device_turn();
    let end = run(Example::Hello, &[]);
    assert!(end.status.success(), "{end}");
    let lines: Vec<&str> = end.stdout.lines().collect();
    assert!(lines[0].starts_with("server got b\"hello\" from "), "{end}");
    assert!(lines[1].starts_with("client got b\"hello to you\" from "), "{end}");
    assert!(lines[2].contains("gid_index"), "{end}");
    assert_eq!(end.stderr, "", "no noise");
}

#[test]
fn the_demo_passes_and_prints_what_it_promises() {
    let _turn = device_turn();
    let end = run(Example::Demo, &[]);
    assert!(end.status.success(), "{end}");
    let last = end.stdout.lines().last().unwrap_or_default();
    assert!(last.starts_with("demo: PASSED (24,"), "{end}");
    for name in ["device", "GID", "connected", "path MTU", "inline", "window", "eager ceiling", "p99.9", "rate"] {
        let there = end.stdout.lines().any(|line| line.starts_with(&format!("  {name} ")));
        assert!(there, "{name} is missing: {end}");
    }
    assert_eq!(end.stderr, "", "no noise");
}

#[test]
fn the_demos_json_holds_what_was_measured() {
    let _turn = device_turn();
    let end = run(Example::Demo, &["--json", "--messages", "2000", "--round-trips", "200", "--busy-poll"]);
    assert!(end.status.success(), "{end}");
    let report = end.json();
    assert_eq!(report["verdict"], "passed");
    assert!(report["because"].is_null());

    let connection = &report["connection"];
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or(-1.0);
    assert!(connection["chosen"].as_str().is_some_and(|chosen| chosen.contains("gid_index")), "{end}");
    for field in ["path_mtu_bytes", "inline_granted_bytes", "inline_used_bytes", "eager_ceiling_bytes"] {
        assert!(number(&connection[field]) > 0.0, "{field}: {end}");
    }
    assert_eq!(connection["window_credits"], 64);

    let sizes = report["sizes"].as_array().expect("a list");
    let sends = |index: usize| (sizes[index]["sends_inline"].as_u64(), sizes[index]["sends_copied"].as_u64());
    assert_eq!(sizes.len(), 7, "{end}");
    assert_eq!((sends(0), sends(2), sends(3)), ((Some(1), Some(0)), (Some(1), Some(0)), (Some(0), Some(1))), "inline");
    assert_eq!(sends(4), (Some(0), Some(1)), "one slab");
    // The second SEND carries one byte: inline where the device grants any.
    assert!(matches!(sends(5), (Some(1), Some(1)) | (Some(0), Some(2))), "one byte more: {end}");
    assert_eq!((sizes[0]["bytes"].as_u64(), sizes[6]["bytes"].as_u64()), (Some(0), Some(1 << 20)));

    let latency = &report["latency"];
    assert_eq!(latency["round_trips"], 200);
    let ladder = ["p50_us", "p90_us", "p99_us", "p99_9_us", "max_us"].map(|name| number(&latency[name]));
    assert!(ladder[0] > 0.0 && ladder.is_sorted(), "{ladder:?}");

    assert_eq!(report["stream"]["messages_each_way"], 2000);
    for side in ["first", "second"] {
        let counts = &report["counts"][side];
        assert_eq!((&counts["rnr"], &counts["epochs"], &counts["failed"]), (&0.into(), &1.into(), &0.into()), "{end}");
        // Each SEND took a credit, which came back but for the last window; messages that had to wait shared them.
        let sends: f64 = ["sends_inline", "sends_copied", "sends_packed"].iter().map(|way| number(&counts[*way])).sum();
        assert!(sends > 64.0 && number(&counts["credits_received"]) >= sends - 64.0, "{end}");
    }
    // 2000 each way, 250 round trips, 7 sizes, and the few that hold it together.
    assert!(number(&report["messages_checked"]) > 4_500.0, "{end}");
}

#[test]
fn a_second_process_that_is_killed_ends_the_demo_with_its_signal() {
    let end = with_second_process("-KILL");
    assert!(end.stdout.contains("demo: FAILED because the second process was killed by signal 9"), "{end}");
}

#[test]
fn a_second_process_that_hangs_ends_the_demo_and_is_taken_down() {
    let end = with_second_process("-STOP");
    let verdict = end.stdout.lines().last().unwrap_or_default();
    assert!(verdict.starts_with("demo: FAILED because "), "{end}");
}

/// Lets a demo run until it is in its long part, sends its second process a signal, and gives the demo's end; the second
/// process must be gone, too.
fn with_second_process(signal: &str) -> End {
    let _turn = device_turn();
    let mut demo = command(Example::Demo);
    demo.args(["--messages", "4000000000", "--round-trips", "1"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let demo = demo.spawn().expect("it was built");
    let deadline = Instant::now() + Duration::from_secs(30);
    let second = loop {
        if let Some(second) = child_of(demo.id()) {
            break second;
        }
        assert!(Instant::now() < deadline, "the second process did not start");
        std::thread::sleep(Duration::from_millis(10));
    };
    // Long enough to connect, and for messages to flow.
    std::thread::sleep(Duration::from_secs(4));
    let sent = Command::new("kill").args([signal, &second.to_string()]).status().expect("kill is there");
    assert!(sent.success(), "the second process had ended by itself");
    let end = finish(demo, Duration::from_secs(60));
    assert_eq!(end.status.code(), Some(1), "{end}");
    let gone = Instant::now() + Duration::from_secs(5);
    while fs::exists(format!("/proc/{second}")).unwrap_or(false) {
        assert!(Instant::now() < gone, "the second process outlives the first");
        std::thread::sleep(Duration::from_millis(20));
    }
    end
}

/// The first process whose parent is this one.
fn child_of(parent: u32) -> Option<u32> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).find(|process| {
        // pid (name) state ppid: the name may hold anything, so read behind its end.
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let behind = stat.rsplit(')').next().unwrap_or_default();
        behind.split_ascii_whitespace().nth(1) == Some(&parent.to_string())
    })
}
