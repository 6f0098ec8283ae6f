//! The command as an operator uses it: a process that serves, others that read, write and watch.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Output, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(30);

fn tool(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_verbs-engine"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    tool(arguments).output().expect("it was built")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// A serving process, with its events.
struct Server {
    child: Child,
    events: Receiver<Value>,
    ticket: String,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let mut child =
            tool(&[&["serve", "--json"], arguments].concat()).stdout(Stdio::piped()).spawn().expect("it was built");
        let (tell, events) = channel();
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        std::thread::spawn(move || {
            lines.map_while(Result::ok).try_for_each(|line| tell.send(serde_json::from_str(&line).expect("JSON")))
        });
        let mut server = Self { child, events, ticket: String::new() };
        let serving = server.event("serving");
        serving["ticket"].as_str().expect("a ticket").clone_into(&mut server.ticket);
        server
    }

    fn event(&self, kind: &str) -> Value {
        let event = self.events.recv_timeout(PATIENCE).expect("an event");
        assert_eq!(event["event"], kind, "{event}");
        event
    }

    /// As Ctrl-C does.
    fn end(&mut self) -> Value {
        let signal = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().expect("kill");
        assert!(signal.success());
        let stopped = self.event("stopped");
        assert!(self.child.wait().expect("a child of ours").success());
        stopped
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn files_are_listed_read_in_whole_and_in_part_and_stored_when_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let served = path("served");
    fs::create_dir(&served).expect("a directory");
    let large: Vec<u8> = (0..=250).cycle().take(20_000_001).collect();
    fs::write(path("served/large"), &large).expect("a file");
    fs::write(path("served/small näme"), "0123456789").expect("a file");
    fs::write(path("served/empty"), "").expect("a file");
    let mut server = Server::start(&["--dir", &served, "--writable", "--name", "näher"]);
    let ticket = server.ticket.clone();

    let list = json(&run(&["list", "--json", &ticket]));
    assert_eq!((&list["name"], list["devices"].is_array()), (&Value::from("näher"), true));
    let names: Vec<_> = list["entries"].as_array().expect("a list").iter().map(|entry| &entry["name"]).collect();
    assert_eq!(names, ["large", "small näme"]);
    let people = run(&["list", &ticket]);
    let people = text(&people.stdout);
    let lines: Vec<&str> = people.lines().filter(|line| !line.starts_with("device ")).collect();
    assert_eq!(lines, ["source näher", "rw 20000001 large", "rw       10 small näme"]);

    let copy = path("copy");
    let read = json(&run(&["read", "--json", &ticket, "large", "-o", &copy, "--transport", "tcp"]));
    assert_eq!((&read["read"], &read["transport"]), (&Value::from(20_000_001), &Value::from("TCP")));
    assert!(fs::read(&copy).expect("written") == large, "every byte");
    let part = run(&["read", &ticket, "small näme", "--offset", "3", "--length", "4", "--chunk", "3"]);
    assert_eq!(text(&part.stdout), "3456");
    assert!(text(&part.stderr).contains("read 4 bytes"), "{}", text(&part.stderr));

    let patch = path("patch");
    fs::write(&patch, "abc").expect("a file");
    let write = run(&["write", &ticket, "small näme", &patch, "--offset", "7", "--notify", "patched"]);
    assert!(write.status.success(), "{}", text(&write.stderr));
    let note = server.event("notification");
    assert_eq!((&note["name"], &note["message"]), (&Value::from("small näme"), &Value::from("patched")));
    assert_eq!(fs::read_to_string(path("served/small näme")).expect("there"), "0123456789", "not before the end");
    let stopped = server.end();
    assert_eq!(stopped["stored"], serde_json::json!(["small näme"]));
    assert_eq!(stopped["stats"]["source_operations"], 0);
    assert_eq!(fs::read_to_string(path("served/small näme")).expect("there"), "0123456abc");
    assert!(fs::read(path("served/large")).expect("there") == large);
}

#[test]
fn a_block_is_written_read_back_and_watched() {
    let mut server = Server::start(&["--block", "64K", "--writable"]);
    let ticket = server.ticket.clone();
    let dir = tempfile::tempdir().expect("a directory");
    let input = dir.path().join("input");
    fs::write(&input, vec![7; 65_536]).expect("a file");
    let write = json(&run(&["write", "--json", &ticket, "block", input.to_str().expect("UTF-8")]));
    assert_eq!(write["wrote"], 65_536);
    let back = run(&["read", &ticket, "block"]);
    assert!(back.stdout == vec![7; 65_536]);
    assert_eq!(text(&run(&["notify", &ticket, "a", "🦀"]).stdout), "delivered\n");
    assert_eq!(server.event("notification")["message"], "🦀");
    let stats = json(&run(&["stats", "--json", &ticket]));
    assert_eq!((&stats["registrations"], &stats["queued_notifications"]), (&Value::from(3), &Value::from(0)));
    assert!(text(&run(&["stats", &ticket]).stdout).contains("registered_bytes"));
    server.end();
    let gone = run(&["list", &ticket]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(text(&gone.stderr).contains("cannot connect to 127.0.0.1:"), "{}", text(&gone.stderr));
}

#[test]
fn direct_is_asked_for_and_allowed_or_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let input = dir.path().join("input");
    let sent: Vec<u8> = (0..=250).cycle().take(10_000_000).collect();
    fs::write(&input, &sent).expect("a file");
    let input = input.to_str().expect("UTF-8");
    let mut server = Server::start(&["--block", "10M", "--writable", "--direct"]);
    let ticket = server.ticket.clone();
    let write = json(&run(&["write", "--json", "--direct", &ticket, "block", input]));
    assert_eq!((&write["wrote"], &write["profile"]), (&Value::from(10_000_000), &Value::from("direct")));
    let back = run(&["read", "--direct", &ticket, "block", "--length", "10000000"]);
    assert!(back.stdout == sent && text(&back.stderr).contains(", direct, "), "{}", text(&back.stderr));
    let staged = run(&["read", &ticket, "block", "--length", "10000000"]);
    assert!(staged.stdout == sent && text(&staged.stderr).contains(", staged, "), "{}", text(&staged.stderr));
    server.end();

    let server = Server::start(&["--block", "4096", "--writable"]);
    for arguments in [["read", "--direct", &server.ticket, "block"], ["read", &server.ticket, "block", "--direct"]] {
        let refused = run(&arguments);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains("the source refused: DirectRefused"), "{}", text(&refused.stderr));
    }
}

#[test]
fn what_cannot_work_says_why() {
    let server = Server::start(&["--block", "4096"]);
    let ticket = &server.ticket;
    let dir = tempfile::tempdir().expect("a directory");
    let input = dir.path().join("input");
    fs::write(&input, "x").expect("a file");
    let input = input.to_str().expect("UTF-8");
    let other = format!("{}{}", &ticket[..ticket.len() - 32], "0".repeat(32));
    let cases: [(&[&str], i32, &str); 13] = [
        (&["read", ticket, "nothing"], 1, "nothing is served under \"nothing\"; there is: block"),
        (&["read", ticket, "block", "--offset", "4090", "--length", "7"], 1, "has 4096 bytes; 7 from 4090"),
        (&["read", ticket, "block", "--offset", "4097"], 1, "has 4096 bytes; 0 from 4097"),
        (&["write", ticket, "block", input], 1, "does not allow it"),
        (&["write", ticket, "block", "/nonexistent"], 1, "cannot read /nonexistent"),
        (&["list", &other], 1, "the source is of epoch"),
        (&["list", "127.0.0.1:1"], 2, "ADDR:PORT/EPOCH"),
        (&["read", ticket, "block", "--transport", "rdma", "--device", "none0"], 1, "device"),
        (&["read", ticket, "block", "--transport", "tcp", "--device", "none0"], 1, "--transport tcp uses none"),
        (&["serve"], 2, "--block"),
        (&["serve", "--block", "0"], 1, "a block of 0 bytes"),
        (&["serve", "--block", "1", "--bind", "0.0.0.0:0"], 1, "no peer can dial"),
        (&["serve", "--dir", "/nonexistent"], 1, "cannot read /nonexistent"),
    ];
    for (arguments, code, says) in cases {
        let output = run(arguments);
        let stderr = text(&output.stderr);
        assert!(output.status.code() == Some(code) && stderr.contains(says), "{arguments:?}: {output:?}");
        assert!(output.stdout.is_empty());
    }
    let error = run(&["list", "--json", &other]);
    assert!(json(&error)["error"].as_str().is_some_and(|text| text.contains("epoch")));
}

#[test]
fn serving_ends_by_itself_when_told_to() {
    let mut server = Server::start(&["--block", "1", "--for", "0.2"]);
    let stopped = server.event("stopped");
    assert_eq!(stopped["stored"], serde_json::json!([]));
    assert!(server.child.wait().expect("a child of ours").success());
}
