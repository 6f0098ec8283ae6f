//! A source that is a process of its own, and is replaced at the same port: the old epoch opens no door.

mod common;

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
};

use common::{LONG, RawRequester, bytes_of, engine, eventually, memory, pattern, wire};
use verbs_engine::{
    Config, Direction, Epoch, Notification, NotificationStatus, NotifyError, OpenError, Permission, RemoteEffect,
    TransferError, TransferRequest,
};

const LENGTH: usize = 64 << 10;
const BIND: &str = "ENGINE_RESTART_BIND";

/// Not a test of its own: the parent starts this very program with the environment that makes it the source.
#[test]
fn source_process() {
    let Ok(bind) = std::env::var(BIND) else { return };
    let source = engine(Config { bind: bind.parse().expect("an address"), ..Config::default() });
    let served = memory(&source, LENGTH, Permission::RemoteReadWrite);
    served.write(0, &pattern(LENGTH, 11)).expect("in range");
    println!("\nSOURCE {} {} {} {}", source.endpoint(), source.epoch(), served.address(), served.id());
    // Commands until the parent is gone.
    for line in std::io::stdin().lines().map_while(Result::ok) {
        match line.as_str() {
            "sum" => {
                let sum: u64 = bytes_of(&served).iter().map(|byte| u64::from(*byte)).sum();
                println!("\nSUM {sum}");
            }
            "notes" => {
                for Notification { name, message } in source.wait_for_notifications(LONG) {
                    println!("\nNOTE {name}={message}");
                }
            }
            _ => return,
        }
    }
}

struct Process {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    endpoint: SocketAddr,
    epoch: Epoch,
    address: u64,
    id: u64,
}

impl Process {
    fn start(bind: SocketAddr) -> Self {
        // Without the program's own name: as the suite of another program, there is a module before it.
        let path = concat!(module_path!(), "::source_process");
        let name = path.split_once("::").map_or(path, |(_, name)| name);
        let program = std::env::current_exe().expect("a program knows where it is");
        let mut child = Command::new(program)
            .args([name, "--exact", "--nocapture"])
            .env(BIND, bind.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this very program");
        let (tell, lines) = channel();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let input = child.stdin.take().expect("piped");
        let any = "127.0.0.1:0".parse().expect("an address");
        let epoch = Epoch::from_bytes([0; 16]);
        let mut process = Self { child, input, lines, endpoint: any, epoch, address: 0, id: 0 };
        let line = process.answer("SOURCE ");
        let fields: Vec<&str> = line.split(' ').collect();
        process.endpoint = fields[0].parse().expect("an address");
        process.epoch = fields[1].parse().expect("an epoch");
        process.address = fields[2].parse().expect("a number");
        process.id = fields[3].parse().expect("a number");
        process
    }

    fn answer(&self, prefix: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(LONG).expect("the source answers");
            if let Some(rest) = line.strip_prefix(prefix) {
                return rest.to_owned();
            }
        }
    }

    fn ask(&mut self, command: &str, prefix: &str) -> String {
        writeln!(self.input, "{command}").expect("it reads");
        self.answer(prefix)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_replaced_source_is_never_taken_for_its_predecessor() {
    let mut first = Process::start("127.0.0.1:0".parse().expect("an address"));
    let requester = engine(Config::default());
    let local = memory(&requester, LENGTH, Permission::LocalOnly);
    let peer = requester.open_segment(first.endpoint, first.epoch, LONG).expect("it listens");
    let request =
        |address| TransferRequest { local_address: local.address(), remote_address: address, length: LENGTH as u64 };
    let old = request(first.address);
    let read = requester.submit_and_wait(&peer, Direction::Read, &[old], LONG).expect("sound");
    assert!(read.is_complete());
    assert_eq!(bytes_of(&local), pattern(LENGTH, 11), "bytes of another process");
    local.write(0, &vec![1; LENGTH]).expect("in range");
    let done = Notification::new("ünï", "🦀");
    let write = requester.submit_and_notify(&peer, Direction::Write, &[old], &done, LONG).expect("sound");
    assert!(write.is_complete() && matches!(write.notification, NotificationStatus::Delivered));
    assert_eq!(first.ask("sum", "SUM "), LENGTH.to_string());
    assert_eq!(first.ask("notes", "NOTE "), "ünï=🦀");

    let endpoint = first.endpoint;
    drop(first); // kill -9
    let lost = requester.submit_and_wait(&peer, Direction::Write, &[old], LONG).expect("sound");
    assert_eq!(lost.failure.expect("it is gone").effect, RemoteEffect::None, "it never said ready");

    let mut second = Process::start(endpoint);
    assert_eq!(second.endpoint, endpoint, "the same port at once");
    assert_ne!(second.epoch, peer.epoch());
    let sum = second.ask("sum", "SUM ");
    // Describe, READ, WRITE, notify, and the operations of devices: the old epoch is refused by each.
    let mismatch = |error: &TransferError| {
        let fits = matches!(error, TransferError::EpochMismatch { expected, actual }
            if *expected == peer.epoch() && *actual == second.epoch);
        assert!(fits, "{error}");
    };
    match requester.open_segment(endpoint, peer.epoch(), LONG) {
        Err(OpenError::Describe { source, .. }) => mismatch(&source),
        other => panic!("{other:?}"),
    }
    for direction in [Direction::Read, Direction::Write] {
        let report = requester.submit_and_wait(&peer, direction, &[old], LONG).expect("resolved in the old segment");
        let failure = report.failure.expect("refused");
        mismatch(&failure.error);
        assert_eq!(failure.effect, RemoteEffect::None);
    }
    match requester.send_notification(&peer, &done, LONG) {
        Err(NotifyError::Failed(failure)) => mismatch(&failure.error),
        other => panic!("{other:?}"),
    }
    for kind in 4..8 {
        let mut raw = RawRequester::connect(endpoint);
        raw.send(&wire::request(kind, peer.epoch(), second.id, 0, 16));
        // What is asked along.
        raw.send(&[0; 100]);
        assert_eq!(raw.reply(), Some((wire::EPOCH_MISMATCH, 0)));
    }
    assert_eq!(second.ask("sum", "SUM "), sum, "nothing was touched");
    // With its own epoch it serves as any other.
    let fresh = requester.open_segment(endpoint, second.epoch, LONG).expect("it listens");
    let read = requester.submit_and_wait(&fresh, Direction::Read, &[request(second.address)], LONG).expect("sound");
    assert!(read.is_complete());
    assert_eq!(bytes_of(&local), pattern(LENGTH, 11));
    eventually("nothing is left in flight", || requester.stats().submissions == 0);
}

#[test]
fn a_source_that_is_killed_in_the_middle_costs_one_request_each_and_no_more() {
    let requester = engine(Config::default());
    let local = memory(&requester, 8 << 20, Permission::LocalOnly);
    for round in 0..6 {
        let source = Process::start("127.0.0.1:0".parse().expect("an address"));
        let peer = requester.open_segment(source.endpoint, source.epoch, LONG).expect("it listens");
        let requests = vec![
            TransferRequest {
                local_address: local.address(),
                remote_address: source.address,
                length: LENGTH as u64
            };
            1024
        ];
        let direction = if round % 2 == 0 { Direction::Read } else { Direction::Write };
        let transfer = requester.allocate_batch(1024).expect("room");
        let group = transfer.submit(&peer, direction, &requests, LONG, None).expect("64 MiB are the limit");
        eventually("it is under way", || transfer.status().completed > round * 3);
        drop(source);
        assert!(transfer.wait(LONG));
        let report = transfer.report(&group).expect("final");
        assert_eq!(report.completed_bytes, (report.completed * LENGTH) as u64);
        match report.failure {
            None => assert_eq!(report.completed, 1024, "it was faster than the kill"),
            Some(failure) => {
                assert_eq!(failure.index, report.completed);
                assert!(direction == Direction::Write || failure.effect == RemoteEffect::None);
            }
        }
        drop(transfer);
        common::assert_idle(&requester, 1);
    }
}
