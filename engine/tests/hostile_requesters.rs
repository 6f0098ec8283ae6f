//! Requesters that send garbage, too little, too late, or nothing: the source's memory stays intact, handlers leave, and
//! real peers are served as before.

mod common;

use std::{
    net::TcpStream,
    time::{Duration, Instant},
};

use common::{LONG, MASKS, Pair, RawRequester, bytes_of, engine, eventually, memory, pattern, wire};
use verbs_engine::{Config, Direction, Notification, Permission, Status, TransferError};

/// A source whose memory must not change, and proof that it still serves.
struct Victim {
    pair: Pair,
    before: Vec<u8>,
}

impl Victim {
    fn new(config: Config) -> Self {
        let pair = Pair::with(4096, config, Config::default());
        pair.served.write(0, &pattern(4096, 5)).expect("in range");
        let before = bytes_of(&pair.served);
        Self { pair, before }
    }

    fn connect(&self) -> RawRequester {
        RawRequester::connect(self.pair.source.endpoint())
    }

    fn request(&self, kind: u8, offset: u64, length: u64) -> Vec<u8> {
        let region = if matches!(kind, wire::DESCRIBE | wire::NOTIFY) { 0 } else { self.pair.served.id() };
        wire::request(kind, self.pair.source.epoch(), region, offset, length)
    }

    /// Nothing was changed, nobody is inside, and an honest peer is served.
    fn assert_unharmed(&self) {
        eventually("every handler has left", || self.pair.source.stats().source_operations == 0);
        assert_eq!(bytes_of(&self.pair.served), self.before);
        let stats = self.pair.source.stats();
        assert_eq!((stats.notifications, stats.notification_bytes, stats.queued_notifications), (0, 0, 0));
        let request = [self.pair.request(0, 4096)];
        let report = self.pair.requester.submit_and_wait(&self.pair.peer, Direction::Read, &request, LONG);
        assert!(report.expect("sound").into_result().is_ok());
        assert_eq!(bytes_of(&self.pair.local), self.before);
    }
}

#[test]
fn every_bit_of_every_request_flipped_changes_nothing() {
    let victim = Victim::new(Config::default());
    for (kind, offset, length) in
        [(wire::DESCRIBE, 0, 0), (wire::READ, 8, 16), (wire::WRITE, 8, 16), (wire::NOTIFY, 3, 4)]
    {
        let sound = victim.request(kind, offset, length);
        for at in 0..wire::REQUEST {
            for mask in MASKS {
                let mut request = sound.clone();
                request[at] ^= mask;
                let mut raw = victim.connect();
                raw.send(&request);
                if matches!(request[10], 4..=7) {
                    // These are whole only with what is asked along with them.
                    raw.send(&[0; 100]);
                }
                // No body follows. Some flips make another sound request; then the answer fits that one.
                raw.half_close();
                match raw.reply() {
                    Some((wire::SUCCESS, length)) => {
                        let body = raw.body(usize::try_from(length).expect("small"));
                        assert!(matches!(request[10], wire::READ | wire::DESCRIBE) && body.is_some(), "{at} {mask}");
                    }
                    // A WRITE of nothing has its whole body.
                    Some((wire::READY, 0)) if request[10] == wire::WRITE && request[44..] == [0; 8] => {
                        assert_eq!(raw.reply(), Some((wire::SUCCESS, 0)));
                    }
                    Some((wire::READY, 0)) => assert!(matches!(request[10], wire::WRITE | wire::NOTIFY)),
                    Some((status, length)) => assert!(matches!(status, 1..=10 | 13) && length == 0, "{status}"),
                    None => panic!("a whole request is answered: {at} {mask}"),
                }
                assert!(raw.is_closed(), "{at} {mask}");
            }
        }
    }
    victim.assert_unharmed();
}

#[test]
fn every_truncation_of_a_request_is_forgotten() {
    let victim = Victim::new(Config::default());
    let sound = victim.request(wire::WRITE, 0, 16);
    for cut in 0..sound.len() {
        let mut raw = victim.connect();
        raw.send(&sound[..cut]);
        raw.half_close();
        assert_eq!(raw.reply(), None, "cut to {cut}");
    }
    victim.assert_unharmed();
}

#[test]
fn every_truncation_of_a_body_is_forgotten() {
    let victim = Victim::new(Config::default());
    for cut in 0..16 {
        let mut raw = victim.connect();
        raw.send(&victim.request(wire::WRITE, 100, 16));
        assert_eq!(raw.reply(), Some((wire::READY, 0)));
        raw.send(&[0xee; 16][..cut]);
        raw.half_close();
        assert_eq!(raw.reply(), None);
    }
    // Name, message and commit byte: all but the last byte is not enough.
    for cut in 0..8 {
        let mut raw = victim.connect();
        raw.send(&victim.request(wire::NOTIFY, 3, 4));
        assert_eq!(raw.reply(), Some((wire::READY, 0)));
        raw.send(&b"abcdefg\0"[..cut]);
        raw.half_close();
        assert_eq!(raw.reply(), None);
    }
    let mut raw = victim.connect();
    raw.send(&victim.request(wire::NOTIFY, 0, 0));
    assert_eq!(raw.reply(), Some((wire::READY, 0)));
    raw.half_close();
    assert_eq!(raw.reply(), None, "an empty one needs its commit byte");
    victim.assert_unharmed();
}

#[test]
fn lengths_at_their_extremes_are_refused_or_served() {
    let victim = Victim::new(Config::default());
    let ask = |kind, region, offset, length| {
        let mut raw = victim.connect();
        raw.send(&wire::request(kind, victim.pair.source.epoch(), region, offset, length));
        if matches!(kind, 4..=7) {
            raw.send(&[0; 100]);
        }
        raw.half_close();
        raw.reply().map(|(status, _)| status)
    };
    let id = victim.pair.served.id();
    for kind in [wire::READ, wire::WRITE] {
        let done = if kind == wire::READ { wire::SUCCESS } else { wire::READY };
        for (offset, length, status) in [
            (0, 4096, done),
            (4096, 0, done),
            (4095, 1, done),
            (0, 4097, wire::INVALID_RANGE),
            (4096, 1, wire::INVALID_RANGE),
            (u64::MAX, 0, wire::INVALID_RANGE),
            (0, u64::MAX, wire::INVALID_RANGE),
            (1, u64::MAX, wire::PROTOCOL),
            (u64::MAX, u64::MAX, wire::PROTOCOL),
        ] {
            assert_eq!(ask(kind, id, offset, length), Some(status), "{kind} {offset} {length}");
        }
        assert_eq!(ask(kind, 0, 0, 1), Some(wire::UNKNOWN_REGION));
        assert_eq!(ask(kind, u64::MAX, 0, 1), Some(wire::UNKNOWN_REGION));
    }
    for (name, message, status) in [
        (65_536, 0, wire::READY),
        (0, 65_536, wire::READY),
        (65_536, 1, wire::EXHAUSTED),
        (u64::MAX, 0, wire::EXHAUSTED),
        (0, u64::MAX, wire::EXHAUSTED),
        (u64::MAX, 1, wire::PROTOCOL),
    ] {
        assert_eq!(ask(wire::NOTIFY, 0, name, message), Some(status), "{name} {message}");
    }
    for kind in 4..8 {
        assert_eq!(ask(kind, id, 0, 16), Some(wire::UNAVAILABLE), "known, and not here");
    }
    victim.assert_unharmed();
}

#[test]
fn notifications_that_are_not_text_or_not_committed_never_enter() {
    let victim = Victim::new(Config::default());
    let send = |name: &[u8], message: &[u8], last: u8| {
        let mut raw = victim.connect();
        raw.send(&victim.request(wire::NOTIFY, name.len() as u64, message.len() as u64));
        assert_eq!(raw.reply(), Some((wire::READY, 0)));
        raw.send(&[name, message, &[last]].concat());
        raw.reply()
    };
    assert_eq!(send(b"a\xff", b"b", 0), Some((wire::PROTOCOL, 0)));
    assert_eq!(send(b"a", b"\xc3", 0), Some((wire::PROTOCOL, 0)));
    // Together they would be text; each alone is not.
    assert_eq!(send(b"\xc3", b"\xa4", 0), Some((wire::PROTOCOL, 0)));
    for last in 1..=255 {
        assert_eq!(send(b"a", b"b", last), Some((wire::PROTOCOL, 0)));
    }
    victim.assert_unharmed();
    assert_eq!(send("ä".as_bytes(), "日本".as_bytes(), 0), Some((wire::SUCCESS, 0)));
    assert_eq!(victim.pair.source.receive_notifications(), [Notification::new("ä", "日本")]);
}

#[test]
fn a_peer_that_trickles_loses_its_connection_at_the_deadline() {
    let timeout = Duration::from_millis(400);
    let victim = Victim::new(Config { source_timeout: timeout, ..Config::default() });
    let trickle = |mut raw: RawRequester, bytes: Vec<u8>, since: Instant| {
        for byte in bytes {
            raw.send(&[byte]);
            std::thread::sleep(timeout / 8);
        }
        assert_eq!(raw.reply(), None);
        assert!(since.elapsed() >= timeout);
    };
    let (trickle, victim) = (&trickle, &victim);
    std::thread::scope(|scope| {
        let start = Instant::now();
        // A request, a body, and a notification, none of which would be done in time.
        scope.spawn(move || trickle(victim.connect(), victim.request(wire::WRITE, 0, 16), start));
        for (kind, offset, length) in [(wire::WRITE, 0, 16), (wire::NOTIFY, 10, 5)] {
            let mut raw = victim.connect();
            raw.send(&victim.request(kind, offset, length));
            assert_eq!(raw.reply(), Some((wire::READY, 0)));
            scope.spawn(move || trickle(raw, vec![b'x'; 16], start));
        }
        // Each holds a worker; one is left, and serves.
        let request = [victim.pair.request(0, 64)];
        let report = victim.pair.requester.submit_and_wait(&victim.pair.peer, Direction::Read, &request, LONG);
        assert!(report.expect("sound").into_result().is_ok());
    });
    eventually("every handler has left", || victim.pair.source.stats().source_operations == 0);
    victim.assert_unharmed();
}

#[test]
fn a_peer_that_does_not_read_loses_its_connection_at_the_deadline() {
    let config = Config { source_timeout: Duration::from_millis(300), ..Config::default() };
    let source = engine(config);
    let large = memory(&source, 8 << 20, Permission::RemoteRead);
    let mut raw = RawRequester::connect(source.endpoint());
    // More than any socket buffer holds, and nobody takes it.
    for _ in 0..8 {
        raw.send(&wire::request(wire::READ, source.epoch(), large.id(), 0, 8 << 20));
    }
    eventually("it is inside", || source.stats().source_operations == 1);
    // Meanwhile the owner is not kept from its memory.
    let start = Instant::now();
    large.write(0, &[1]).expect("in range");
    assert!(start.elapsed() < Duration::from_millis(250), "the lock is not held for a peer");
    eventually("it has left", || source.stats().source_operations == 0);
}

#[test]
fn idle_scanners_do_not_keep_real_peers_out() {
    let config = Config { max_source_connections: 16, ..Config::default() };
    let victim = Victim::new(config);
    let mut scanners: Vec<TcpStream> = Vec::new();
    for round in 0..5 {
        for _ in 0..20 {
            scanners.push(TcpStream::connect(victim.pair.source.endpoint()).expect("it listens"));
        }
        let mut http = victim.connect();
        http.send(b"GET / HTTP/1.1\r\nHost: engine\r\nUser-Agent: a scanner of some kind\r\n\r\n");
        assert!(matches!(http.reply(), Some((wire::PROTOCOL, 0)) | None));
        let mut noise = victim.connect();
        noise.send(&pattern(1 << 20, round));
        drop(noise);
        let fresh = engine(Config::default());
        fresh.open_segment(victim.pair.source.endpoint(), victim.pair.source.epoch(), LONG).expect("served");
        assert!(victim.pair.source.stats().source_connections <= 17);
    }
    drop(scanners);
    victim.assert_unharmed();
}

#[test]
fn a_full_queue_refuses_at_once() {
    let config = Config { source_workers: 1, source_queue: 1, ..Config::default() };
    let victim = Victim::new(config);
    let mut first = victim.connect();
    first.send(&victim.request(wire::WRITE, 0, 16));
    assert_eq!(first.reply(), Some((wire::READY, 0)), "it has the one worker");
    let mut second = victim.connect();
    second.send(&victim.request(wire::READ, 0, 4));
    std::thread::sleep(Duration::from_millis(50));
    let fresh = engine(Config::default());
    let refused = fresh.open_segment(victim.pair.source.endpoint(), victim.pair.source.epoch(), LONG);
    let error = refused.expect_err("there is no room");
    let verbs_engine::OpenError::Describe { source: TransferError::Refused { status }, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(*status, Status::Exhausted);
    drop(first);
    assert_eq!(second.reply(), Some((wire::SUCCESS, 4)), "who waited is served");
    victim.assert_unharmed();
}

#[test]
fn a_worker_that_waits_for_one_peer_comes_when_another_needs_it() {
    let config = Config { source_workers: 1, source_queue: 2, ..Config::default() };
    let victim = Victim::new(config);
    let mut faithful = victim.connect();
    for _ in 0..50 {
        faithful.send(&victim.request(wire::READ, 0, 4));
        assert_eq!(faithful.reply(), Some((wire::SUCCESS, 4)));
        faithful.body(4).expect("it follows");
        // The one worker has just served the other, whose connection stays open.
        let mut second = victim.connect();
        let mut third = victim.connect();
        second.send(&victim.request(wire::READ, 0, 4));
        third.send(&victim.request(wire::READ, 0, 4));
        assert_eq!((second.reply(), third.reply()), (Some((wire::SUCCESS, 4)), Some((wire::SUCCESS, 4))));
    }
    drop(faithful);
    victim.assert_unharmed();
}
