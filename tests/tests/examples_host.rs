//! The examples where they cannot work: on any machine they must end with the remedy and status 1.

use verbs_tests::examples::{Example, run};

/// No machine has a device of this name, so this needs none and never skips: with devices the error lists them, without
/// any it says how to get one.
const NO_SUCH_DEVICE: [&str; 2] = ["--device", "nonexistent0"];

#[test]
fn the_demo_without_its_device_names_the_remedy_and_fails() {
    let end = run(Example::Demo, &NO_SUCH_DEVICE);
    assert_eq!(end.status.code(), Some(1), "{end}");
    let verdict = end.stdout.lines().last().unwrap_or_default();
    let named = verdict.contains("no RDMA device \"nonexistent0\"; there is: ");
    let none =
        verdict.contains("no RDMA device") && verdict.contains("rdma link") && verdict.contains("cargo softroce demo");
    assert!(verdict.starts_with("demo: FAILED because ") && (named || none), "{end}");
    assert_eq!(end.stderr, "", "no noise");
}

#[test]
fn the_demo_says_in_json_why_it_failed() {
    let end = run(Example::Demo, &["--json", "--device", "nonexistent0"]);
    assert_eq!(end.status.code(), Some(1), "{end}");
    let report = end.json();
    assert_eq!(report["verdict"], "failed");
    assert!(report["because"].as_str().is_some_and(|because| because.contains("no RDMA device")), "{end}");
    assert!(report["connection"].is_null() && report["latency"].is_null(), "{end}");
    assert!(end.stderr.starts_with("demo: FAILED because "), "{end}");
}

#[test]
fn a_blob_that_is_no_address_is_refused_before_anything_starts() {
    for (blob, says) in [("zz", "hexadecimal"), ("80", "none for"), ("81a769627665726273c44d01", "")] {
        let end = run(Example::Demo, &["--connect", blob]);
        assert_eq!(end.status.code(), Some(2), "{end}");
        assert!(end.stderr.contains("--connect") && end.stderr.contains(says), "{blob}: {end}");
    }
}

#[test]
fn an_address_that_stands_for_any_is_refused() {
    let end = run(Example::Demo, &["--listen", "0.0.0.0:7471"]);
    assert_eq!(end.status.code(), Some(2), "{end}");
    assert!(end.stderr.contains("name the one that the other machine can reach"), "{end}");
}
