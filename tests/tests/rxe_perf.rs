//! `verbs-perf` on a device: every test end to end as two processes, and every way in which one of them can be let down.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, ChildStderr, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use verbs_tests::{
    examples::{End, finish},
    leaks::device_turn,
};

/// For a whole run, on a machine that emulates its processor and does other things as well.
/// Of the protocol between the two sides: `VERSION` of `benches/src/perf/control.rs`.
const VERSION: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(180);

/// Built beside the tests of the workspace: this program is target/debug/deps/NAME-HASH.
fn program() -> PathBuf {
    let test = std::env::current_exe().expect("a program knows where it is");
    let program: PathBuf = test.ancestors().nth(2).expect("a folder above deps").join("verbs-perf");
    let why = "was not built: test the whole workspace, or first `cargo build -p verbs-benches`";
    assert!(program.exists(), "{} {why}", program.display());
    program
}

/// verbs-perf with these words.
fn with(words: &[&str]) -> Child {
    let mut command = Command::new(program());
    command
        .arg(words[0])
        .arg("-F")
        .args(&words[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().expect("it was built")
}

/// A server that waits for its client.
struct Server {
    child: Child,
    port: String,
    /// What comes after its first line.
    stderr: BufReader<ChildStderr>,
}

impl Server {
    fn start(words: &[&str]) -> Self {
        // Free a moment ago; tests of the device run one at a time.
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
        let port = port.to_string();
        let mut child = with(&[words, &["-p", &port]].concat());
        let mut stderr = BufReader::new(child.stderr.take().expect("it is piped"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("a line");
        assert!(line.contains("waiting for a client"), "{line}");
        Self { child, port, stderr }
    }

    fn end(mut self) -> End {
        let mut end = finish(self.child, PATIENCE);
        self.stderr.read_to_string(&mut end.stderr).expect("it was a pipe");
        end
    }
}

/// A whole run: the client's end and the server's.
fn run(test: &str, words: &[&str]) -> (End, End) {
    let server = Server::start(&[test]);
    let client = with(&[&[test, "-p", &server.port], words, &["127.0.0.1"]].concat());
    let client = finish(client, PATIENCE);
    (client, server.end())
}

/// As [`run`]; all is well on both sides, and the client's JSON comes back with the server's table.
fn measured(test: &str, words: &[&str]) -> (Value, String) {
    let (client, server) = run(test, &[words, &["--json"]].concat());
    assert!(client.status.success(), "client: {client}\nserver: {server}");
    assert!(server.status.success(), "server: {server}");
    (client.json(), server.stdout)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn latency_is_sound(report: &Value, bytes: u64, iterations: u64) {
    let row = &report["rows"][0];
    assert_eq!((row["bytes"].as_u64(), row["iterations"].as_u64()), (Some(bytes), Some(iterations)), "{report}");
    let rising = ["t_min_us", "t_typical_us", "p99_us", "p99_9_us", "t_max_us"].map(|key| number(&row[key]));
    assert!(rising[0] > 0.0 && rising.is_sorted(), "{rising:?}");
    let cpu = ["client_user_s", "client_system_s", "server_user_s", "server_system_s"].map(|key| number(&row[key]));
    assert!(cpu[0] + cpu[1] > 0.0 && cpu[2] + cpu[3] > 0.0, "both processes did something: {cpu:?}");
}

#[test]
fn send_lat_measures_by_polling_and_says_what_was_granted() {
    let _turn = device_turn();
    let (report, table) = measured("send-lat", &["-s", "64", "-n", "200", "-I", "948", "-t", "100"]);
    latency_is_sound(&report, 64, 200);
    let header = &report["header"];
    // More than a software device grants: the header has what it gave.
    let inline: u32 = header["inline_granted_bytes"].as_str().unwrap().parse().unwrap();
    assert!(inline > 0 && inline < 956, "{header}");
    for key in ["device", "gid", "mtu_bytes", "tx_depth", "rx_depth", "cq_moderation", "progress"] {
        assert!(header[key].as_str().is_some_and(|value| !value.is_empty() && value != "unknown"), "{key}: {header}");
    }
    assert!(header["progress"].as_str().unwrap().contains("manual"), "{header}");
    for side in ["client", "server"] {
        assert!(report[side]["kernel"].as_str().is_some_and(|kernel| kernel.starts_with(char::is_numeric)), "{report}");
    }
    // The server prints the client's figures: its table's row is the JSON's.
    let mut lines = table.lines().skip_while(|line| !line.starts_with(" #bytes"));
    let row = lines.nth(1).unwrap_or_else(|| panic!("no row: {table}"));
    let shown: Vec<f64> = row.split_whitespace().map(|word| word.parse().expect("a number")).collect();
    let keys = ["bytes", "iterations", "t_min_us", "t_max_us", "t_typical_us", "t_avg_us", "t_stdev_us", "p99_us"];
    assert_eq!(shown[..8], keys.map(|key| number(&report["rows"][0][key])), "{table}");
}

#[test]
fn send_lat_measures_by_events_and_by_a_thread() {
    let _turn = device_turn();
    for (way, says) in
        [(&["-e"][..], "event"), (&["--progress", "busy-poll"], "busy-poll"), (&["--progress", "spin"], "spin")]
    {
        let (report, _) = measured("send-lat", &[&["-s", "64", "-n", "100"], way].concat());
        latency_is_sound(&report, 64, 100);
        assert!(report["header"]["progress"].as_str().unwrap().contains(says), "{report}");
    }
}

#[test]
fn an_open_loop_sends_all_and_measures_each_from_its_due_time() {
    let _turn = device_turn();
    for way in [&["-e"][..], &[]] {
        let (report, _) = measured("send-lat", &[&["-s", "64", "-n", "100", "--rate", "200"], way].concat());
        latency_is_sound(&report, 64, 100);
        let notes = report["notes"].to_string();
        assert!(notes.contains("round trips"), "{notes}");
    }
}

#[test]
fn send_bw_counts_what_came_and_csv_holds_what_json_holds() {
    let _turn = device_turn();
    let json = std::env::temp_dir().join(format!("rxe_perf-{}.json", std::process::id()));
    let path = json.display().to_string();
    let words = ["-s", "8192", "-n", "300", "-q", "2", "--csv", "--out-json", &path];
    let (client, server) = run("send-bw", &words);
    assert!(client.status.success() && server.status.success(), "client: {client}\nserver: {server}");
    let report: Value = serde_json::from_slice(&std::fs::read(&json).expect("it was written")).expect("JSON");
    std::fs::remove_file(&json).expect("it was written");
    let lines: Vec<Vec<&str>> = client.stdout.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines.len(), 2, "{client}");
    for (name, figure) in lines[0].iter().zip(&lines[1]) {
        assert_eq!(figure.parse::<f64>().ok(), report["rows"][0][name].as_f64(), "{name}: {client}");
    }
    let row = &report["rows"][0];
    assert_eq!((row["bytes"].as_u64(), row["iterations"].as_u64()), (Some(8192), Some(600)));
    let (peak, average) = (number(&row["bw_peak_mib_s"]), number(&row["bw_average_mib_s"]));
    assert!(average > 0.0 && peak >= average, "{row}");
    assert!((number(&row["msg_rate_mpps"]) * 1e6 * 8192.0 / 1_048_576.0 / average - 1.0).abs() < 0.05, "{row}");
    assert!(client.stderr.is_empty(), "no noise: {client}");
}

#[test]
fn reads_and_writes_are_timed_one_by_one() {
    let _turn = device_turn();
    for test in ["read-lat", "write-lat"] {
        for bytes in [64, 1 << 20] {
            let (report, table) = measured(test, &["-s", &bytes.to_string(), "-n", "20"]);
            latency_is_sound(&report, bytes, 20);
            assert!(report["header"]["progress"].as_str().unwrap().contains("event"), "{report}");
            assert!(table.contains("RDMA "), "{table}");
        }
    }
}

#[test]
fn reads_and_writes_have_a_bandwidth() {
    let _turn = device_turn();
    for test in ["read-bw", "write-bw"] {
        let (report, _) = measured(test, &["-s", "262144", "-n", "40", "--chunk", "65536", "-o", "4"]);
        let row = &report["rows"][0];
        assert_eq!((row["bytes"].as_u64(), row["iterations"].as_u64()), (Some(262_144), Some(40)));
        let (peak, average) = (number(&row["bw_peak_mib_s"]), number(&row["bw_average_mib_s"]));
        assert!(average > 0.0 && peak >= average, "{row}");
        assert!((number(&row["msg_rate_mpps"]) * 1e6 / 4.0 / average - 1.0).abs() < 0.05, "{row}");
    }
}

#[test]
fn reads_by_time_and_of_all_sizes_end() {
    let _turn = device_turn();
    let (report, _) = measured("read-bw", &["-s", "4096", "-D", "1"]);
    assert!(report["rows"][0]["iterations"].as_u64().unwrap() > 0, "{report}");
    let (report, _) = measured("read-lat", &["-a", "-n", "1"]);
    assert_eq!(report["rows"].as_array().unwrap().len(), 23);
}

#[test]
fn messages_are_timed_beside_what_moves_bulk_memory() {
    let _turn = device_turn();
    for (way, says) in [("get", "GETs of 65536 bytes"), ("messages", "messages of 65536 bytes on the same queue pair")]
    {
        let words = ["-s", "64", "-n", "50", "-e", "--beside", way, "--beside-size", "65536"];
        let (report, _) = measured("send-lat", &words);
        latency_is_sound(&report, 64, 50);
        let notes = report["notes"].to_string();
        assert!(notes.contains(says) && !notes.contains("meanwhile: 0 "), "{notes}");
    }
}

#[test]
fn the_ladder_has_the_devices_rungs() {
    let _turn = device_turn();
    let report = alone(&["ladder", "-n", "20", "--turns", "1", "--json"]);
    let rungs = report["rungs"].as_array().expect("rungs");
    assert_eq!(rungs.len(), 7, "{report}");
    for rung in rungs {
        assert!(number(&rung["t_min_us"]) > 0.0 && number(&rung["p99_us"]) >= number(&rung["t_typical_us"]), "{rung}");
    }
}

#[test]
fn a_sweep_measures_every_value() {
    let _turn = device_turn();
    let report = alone(&["sweep", "signal", "-n", "100", "--turns", "1", "--json"]);
    let points = report["points"].as_array().expect("points");
    assert_eq!(points.len(), 5, "{report}");
    assert!(points.iter().all(|point| number(&point["median"]) > 0.0 && number(&point["ratio"]) > 0.0), "{report}");
}

/// One process that does it all; its JSON.
fn alone(words: &[&str]) -> Value {
    let mut command = Command::new(program());
    let child = command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let end = finish(child.expect("it was built"), PATIENCE);
    assert!(end.status.success(), "{end}");
    end.json()
}

#[test]
fn a_run_by_time_takes_that_time() {
    let _turn = device_turn();
    let began = Instant::now();
    let (report, _) = measured("send-bw", &["-s", "64", "-D", "1", "-e"]);
    assert!(began.elapsed() > Duration::from_secs(1));
    assert!(report["rows"][0]["iterations"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn messages_of_many_sends_go_as_well() {
    let _turn = device_turn();
    let (report, _) = measured("send-lat", &["-s", "1048576", "-n", "5"]);
    latency_is_sound(&report, 1 << 20, 5);
}

#[test]
fn connect_makes_each_connection_anew() {
    let _turn = device_turn();
    let (report, _) = measured("connect", &["-n", "10"]);
    let row = &report["rows"][0];
    assert_eq!(row["connections"].as_u64(), Some(10));
    assert!(number(&row["t_min_us"]) > 0.0 && number(&row["t_max_us"]) >= number(&row["t_typical_us"]), "{row}");
}

#[test]
fn connections_at_once_go_to_as_many_workers_and_share_the_time() {
    let _turn = device_turn();
    let (report, _) = measured("connect", &["-n", "7", "--at-once", "4", "-e"]);
    let row = &report["rows"][0];
    assert_eq!(row["connections"].as_u64(), Some(8), "whole rounds");
    assert!(number(&row["t_min_us"]) > 0.0 && number(&row["t_max_us"]) >= number(&row["t_typical_us"]), "{row}");
}

#[test]
fn scale_has_a_row_for_each_step() {
    let _turn = device_turn();
    let (report, _) = measured("scale", &["-q", "3", "-n", "50"]);
    let peers: Vec<Option<u64>> = report["rows"].as_array().unwrap().iter().map(|row| row["peers"].as_u64()).collect();
    assert_eq!(peers, [Some(1), Some(2), Some(3)]);
    assert!(number(&report["rows"][2]["connect_ms"]) > 0.0, "{report}");
    assert_eq!(report["rows"][2]["iterations"], 150);
}

#[test]
fn a_size_above_the_limit_is_status_2_and_the_server_is_told() {
    let _turn = device_turn();
    let (client, server) = run("send-lat", &["-s", "16777217"]);
    assert_eq!(client.status.code(), Some(2), "{client}");
    assert!(client.stderr.contains("16777217") && client.stderr.contains("above the limit of 16777216"), "{client}");
    assert_eq!(server.status.code(), Some(6), "{server}");
    assert!(server.stderr.contains("the client gave up") && server.stderr.contains("16777217"), "{server}");
    assert!(server.stdout.is_empty(), "{server}");
}

#[test]
fn a_transfer_above_the_limit_is_status_2_and_the_server_is_told() {
    let _turn = device_turn();
    for test in ["read-bw", "read-lat", "write-bw", "write-lat"] {
        let (client, server) = run(test, &["-s", "1073741825"]);
        assert_eq!(client.status.code(), Some(2), "{client}");
        assert!(client.stderr.contains("1073741825") && client.stderr.contains("limit of 1073741824"), "{client}");
        assert_eq!(server.status.code(), Some(6), "{server}");
        assert!(server.stderr.contains("the client gave up") && server.stderr.contains("1073741825"), "{server}");
    }
}

#[test]
fn without_a_server_it_is_status_4_with_the_remedy() {
    let _turn = device_turn();
    let client = finish(with(&["send-bw", "-p", "1", "127.0.0.1"]), PATIENCE);
    assert_eq!(client.status.code(), Some(4), "{client}");
    assert!(
        client.stderr.contains("127.0.0.1:1") && client.stderr.contains("start `verbs-perf send-bw` there"),
        "{client}"
    );
}

#[test]
fn a_server_for_another_test_is_status_5_on_both_sides() {
    let _turn = device_turn();
    let server = Server::start(&["send-bw"]);
    let client = finish(with(&["send-lat", "-p", &server.port, "127.0.0.1"]), PATIENCE);
    let server = server.end();
    for end in [client, server] {
        assert_eq!(end.status.code(), Some(5), "{end}");
        assert!(end.stderr.contains("send-bw") && end.stderr.contains("send-lat"), "{end}");
    }
}

#[test]
fn a_server_of_another_version_is_status_5_with_both_numbers() {
    let _turn = device_turn();
    for test in ["send-lat", "read-lat", "write-bw"] {
        another_version(test);
    }
}

fn another_version(test: &str) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port().to_string();
    let other = thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a client");
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).expect("its wish");
        (&stream).write_all(b"{\"verbs_perf\":99,\"welcome\":{\"news\":1}}\n").expect("it listens");
        let _ = (&stream).read_to_end(&mut Vec::new());
        line
    });
    let client = finish(with(&[test, "-p", &port, "127.0.0.1"]), PATIENCE);
    assert_eq!(client.status.code(), Some(5), "{client}");
    assert!(
        client.stderr.contains("version 99") && client.stderr.contains(&format!("is version {VERSION}")),
        "{client}"
    );
    assert!(other.join().expect("no panic").starts_with(&format!("{{\"verbs_perf\":{VERSION},")));
}

#[test]
fn a_client_of_another_version_is_refused_and_told() {
    let _turn = device_turn();
    let server = Server::start(&["send-lat"]);
    let stream = TcpStream::connect(format!("127.0.0.1:{}", server.port)).expect("it listens");
    (&stream).write_all(b"{\"verbs_perf\":99,\"greetings\":[]}\n").expect("it listens");
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer).expect("an answer");
    assert!(answer.starts_with(&format!("{{\"verbs_perf\":{VERSION},")) && answer.contains("version 99"), "{answer}");
    let server = server.end();
    assert_eq!(server.status.code(), Some(5), "{server}");
}

#[test]
fn who_speaks_another_protocol_does_not_end_the_server() {
    let _turn = device_turn();
    let server = Server::start(&["send-lat"]);
    let address = format!("127.0.0.1:{}", server.port);
    drop(TcpStream::connect(&address).expect("it listens"));
    let mut scanner = TcpStream::connect(&address).expect("it listens");
    scanner.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it listens");
    let client = finish(with(&["send-lat", "-n", "50", "-p", &server.port, "127.0.0.1"]), PATIENCE);
    assert!(client.status.success(), "{client}");
    let server = server.end();
    assert!(server.status.success() && server.stderr.contains("is no verbs-perf"), "{server}");
}

#[test]
fn a_server_that_is_killed_ends_the_client_with_status_6() {
    let _turn = device_turn();
    let reads_and_writes = [&["read-lat"][..], &["read-bw"], &["write-lat"], &["write-bw"]];
    let beside = &["send-lat", "--beside", "get"];
    for words in [&["send-lat"][..], &["send-lat", "-e"], &["send-bw"], beside].into_iter().chain(reads_and_writes) {
        let server = Server::start(&words[..1]);
        let client = endless(words, &server.port);
        kill("-KILL", server.child.id());
        let client = finish(client, PATIENCE);
        assert_eq!(client.status.code(), Some(6), "{words:?}: {client}");
        assert!(!client.stderr.is_empty() && !client.stdout.contains("#bytes"), "{words:?}: {client}");
        assert_eq!(server.end().status.code(), None);
    }
}

#[test]
fn a_client_that_is_killed_ends_the_server_with_status_6() {
    let _turn = device_turn();
    for test in ["send-lat", "read-bw", "write-lat"] {
        let server = Server::start(&[test]);
        let client = endless(&[test], &server.port);
        kill("-KILL", client.id());
        assert_eq!(finish(client, PATIENCE).status.code(), None);
        let server = server.end();
        assert_eq!(server.status.code(), Some(6), "{test}: {server}");
        assert!(server.stderr.contains("verbs-perf: "), "{server}");
    }
}

#[test]
fn a_server_that_stands_still_does_not_hang_the_client() {
    let _turn = device_turn();
    let server = Server::start(&["send-lat"]);
    let client = endless(&["send-lat"], &server.port);
    kill("-STOP", server.child.id());
    let client = finish(client, PATIENCE);
    assert_eq!(client.status.code(), Some(6), "{client}");
    kill("-KILL", server.child.id());
    assert_eq!(server.end().status.code(), None);
}

/// A client in the middle of a test that would go on for an hour.
fn endless(words: &[&str], port: &str) -> Child {
    let mut client = with(&[words, &["-s", "64", "-D", "3600", "--quiet", "-p", port, "127.0.0.1"]].concat());
    // The header comes when the connection is there and the run begins.
    let mut stdout = BufReader::new(client.stdout.take().expect("it is piped"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("its header");
    assert!(line.starts_with("---"), "{line}");
    thread::spawn(move || stdout.read_to_end(&mut Vec::new()));
    thread::sleep(Duration::from_millis(500));
    client
}

fn kill(signal: &str, process: u32) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().expect("kill is there");
    assert!(sent.success(), "the process had ended by itself");
}
