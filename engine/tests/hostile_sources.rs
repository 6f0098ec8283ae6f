//! Sources that answer with garbage, too little, too late, or not at all: local memory stays intact, nothing is sent
//! twice, deadlines hold, and the effect that is reported is the one that may have been.

mod common;

use std::{
    io::Write as _,
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use common::{LONG, MASKS, Pair, RawSource, assert_idle, bytes_of, engine, eventually, memory, wire};
use verbs_engine::{
    BatchReport, Config, Direction, Engine, Epoch, Notification, NotifyError, Permission, RegisteredMemory,
    RemoteEffect, RemoteSegment, TransferRequest,
};

/// A requester with 64 bytes of its own, and a source that is not to be trusted.
struct Trial {
    requester: Engine,
    local: RegisteredMemory,
    peer: RemoteSegment,
    source: RawSource,
}

impl Trial {
    fn new(answer: impl Fn(&mut TcpStream, &[u8]) + Send + Sync + 'static) -> Self {
        let source = RawSource::start(answer);
        let requester = engine(Config::default());
        let local = memory(&requester, 64, Permission::LocalOnly);
        local.write(0, &[7; 64]).expect("in range");
        let peer = requester.open_segment(source.endpoint, source.epoch, LONG).expect("it answers that");
        Self { requester, local, peer, source }
    }

    fn run(&self, direction: Direction, timeout: Duration) -> BatchReport {
        let request =
            TransferRequest { local_address: self.local.address(), remote_address: RawSource::BASE, length: 16 };
        self.requester.submit_and_wait(&self.peer, direction, &[request], timeout).expect("sound")
    }

    /// One attempt that failed with this effect, and local memory as it was.
    fn assert_failed(&self, report: &BatchReport, effect: RemoteEffect, attempts: u32) {
        let failure = report.failure.as_ref().expect("it must fail");
        assert_eq!(failure.effect, effect, "{failure}");
        assert_eq!((report.completed, report.completed_bytes), (0, 0));
        assert_eq!(self.source.requests.load(SeqCst), attempts, "never sent twice: {failure}");
        assert_eq!(bytes_of(&self.local), [7; 64], "{failure}");
        assert_idle(&self.requester, 1);
    }
}

fn epoch_of(request: &[u8]) -> Epoch {
    Epoch::from_bytes(request[12..28].try_into().expect("16 bytes"))
}

fn read_body(stream: &mut TcpStream, length: usize) -> bool {
    use std::io::Read as _;
    stream.read_exact(&mut vec![0; length]).is_ok()
}

#[test]
fn every_bit_of_a_reply_flipped_fails_the_read_and_leaves_its_target_alone() {
    let turn = Arc::<AtomicU32>::default();
    let at = Arc::clone(&turn);
    let trial = Trial::new(move |stream, request| {
        let turn = at.fetch_add(1, SeqCst) as usize;
        let mut reply = wire::reply(wire::SUCCESS, epoch_of(request), 16);
        reply[turn / MASKS.len()] ^= MASKS[turn % MASKS.len()];
        reply.extend([0xee; 16]);
        let _ = stream.write_all(&reply);
    });
    let flips = u32::try_from(wire::REPLY * MASKS.len()).expect("small");
    for attempt in 1..=flips {
        let report = trial.run(Direction::Read, LONG);
        trial.assert_failed(&report, RemoteEffect::None, attempt);
    }
    assert_eq!(turn.load(SeqCst), flips);
}

#[test]
fn every_truncation_of_a_reply_fails_the_read_and_leaves_its_target_alone() {
    let turn = Arc::<AtomicU32>::default();
    let at = Arc::clone(&turn);
    let trial = Trial::new(move |stream, request| {
        let mut reply = wire::reply(wire::SUCCESS, epoch_of(request), 16);
        reply.extend([0xee; 16]);
        let _ = stream.write_all(&reply[..at.fetch_add(1, SeqCst) as usize]);
    });
    for attempt in 1..=u32::try_from(wire::REPLY + 16).expect("small") {
        let report = trial.run(Direction::Read, LONG);
        trial.assert_failed(&report, RemoteEffect::None, attempt);
    }
    let report = trial.run(Direction::Read, LONG);
    assert!(report.is_complete(), "all of it is a success");
    assert_eq!(bytes_of(&trial.local)[..17], [&[0xee; 16][..], &[7]].concat());
}

#[test]
fn a_source_that_trickles_is_given_up_at_the_deadline() {
    let trial = Trial::new(|stream, request| {
        let mut reply = wire::reply(wire::SUCCESS, epoch_of(request), 16);
        reply.extend([0xee; 16]);
        for byte in reply {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(40));
        }
    });
    let start = Instant::now();
    let report = trial.run(Direction::Read, Duration::from_millis(400));
    assert!(report.failure.as_ref().is_some_and(|failure| failure.error.is_timeout()));
    assert!(start.elapsed() >= Duration::from_millis(400));
    trial.assert_failed(&report, RemoteEffect::None, 1);
}

#[test]
fn a_write_without_its_acknowledgement_is_unknown_and_never_sent_again() {
    let turn = Arc::<AtomicU32>::default();
    let at = Arc::clone(&turn);
    let trial = Trial::new(move |stream, request| {
        let turn = at.fetch_add(1, SeqCst) as usize;
        let epoch = epoch_of(request);
        let _ = stream.write_all(&wire::reply(wire::READY, epoch, 0));
        // Before the body has come, with the last byte missing, or when all is there.
        let body = [0, 15, 16][turn.min(2)];
        if !read_body(stream, body) || turn < 3 {
            return;
        }
        let mut reply = wire::reply(wire::SUCCESS, epoch, 0);
        if let Some(flip) = turn.checked_sub(3).filter(|flip| *flip < wire::REPLY * MASKS.len()) {
            reply[flip / MASKS.len()] ^= MASKS[flip % MASKS.len()];
        }
        let _ = stream.write_all(&reply);
    });
    let flips = u32::try_from(wire::REPLY * MASKS.len()).expect("small");
    for attempt in 1..=3 + flips {
        let report = trial.run(Direction::Write, LONG);
        trial.assert_failed(&report, RemoteEffect::Unknown, attempt);
    }
    assert_eq!(trial.requester.stats().effects_unknown, u64::from(3 + flips));
    assert!(trial.run(Direction::Write, LONG).is_complete());
}

#[test]
fn a_write_that_is_refused_before_its_body_has_no_effect() {
    let turn = Arc::<AtomicU32>::default();
    let at = Arc::clone(&turn);
    let trial = Trial::new(move |stream, request| {
        let turn = at.fetch_add(1, SeqCst) as usize;
        let mut reply = wire::reply(wire::READY, epoch_of(request), 0);
        if let Some(status) = (0..=13).filter(|status| *status != wire::READY).nth(turn) {
            reply[10] = status;
        } else {
            let flip = turn - 13;
            reply[flip / MASKS.len()] ^= MASKS[flip % MASKS.len()];
        }
        let _ = stream.write_all(&reply);
    });
    for attempt in 1..=13 + u32::try_from(wire::REPLY * MASKS.len()).expect("small") {
        let report = trial.run(Direction::Write, LONG);
        trial.assert_failed(&report, RemoteEffect::None, attempt);
    }
}

#[test]
fn a_notification_without_its_receipt_is_unknown_and_never_sent_again() {
    let turn = Arc::<AtomicU32>::default();
    let at = Arc::clone(&turn);
    let trial = Trial::new(move |stream, request| {
        let turn = at.fetch_add(1, SeqCst);
        let epoch = epoch_of(request);
        if turn == 0 {
            let _ = stream.write_all(&wire::reply(wire::EXHAUSTED, epoch, 0));
            return;
        }
        let _ = stream.write_all(&wire::reply(wire::READY, epoch, 0));
        if read_body(stream, 8) && turn > 1 {
            let _ = stream.write_all(&wire::reply(wire::SUCCESS, epoch, 0));
        }
    });
    let send = || trial.requester.send_notification(&trial.peer, &Notification::new("abc", "defg"), LONG);
    let Err(NotifyError::Failed(refused)) = send() else { panic!("refused") };
    assert_eq!(refused.effect, RemoteEffect::None);
    let Err(NotifyError::Failed(lost)) = send() else { panic!("lost") };
    assert_eq!((lost.effect, trial.source.requests.load(SeqCst)), (RemoteEffect::Unknown, 2));
    send().expect("received");
    assert_idle(&trial.requester, 1);
}

#[test]
fn descriptions_with_any_bit_flipped_are_refused_or_sound() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
    let endpoint = listener.local_addr().expect("bound");
    let epoch = Epoch::from_bytes([0x55; 16]);
    let description = wire::description(1, RawSource::BASE, 4096, 3);
    let mut sound = wire::reply(wire::SUCCESS, epoch, description.len() as u64);
    sound.extend(description);
    let total = sound.len();
    let bytes = sound.clone();
    let server = std::thread::spawn(move || {
        for (turn, stream) in listener.incoming().take(total * MASKS.len() + total).enumerate() {
            let mut stream = stream.expect("a peer");
            let mut reply = bytes.clone();
            if turn < total * MASKS.len() {
                reply[turn / MASKS.len()] ^= MASKS[turn % MASKS.len()];
            } else {
                reply.truncate(turn - total * MASKS.len());
            }
            if read_body(&mut stream, wire::REQUEST) {
                let _ = stream.write_all(&reply);
                let _ = stream.shutdown(Shutdown::Write);
            }
        }
    });
    let requester = engine(Config { max_kept_connections: 0, ..Config::default() });
    let mut accepted = 0;
    for turn in 0..total * MASKS.len() + total {
        match requester.open_segment(endpoint, epoch, LONG) {
            Ok(segment) => {
                // Only what a sound source might have said: another id, base, length or permission.
                accepted += 1;
                assert!((40..65).contains(&(turn / MASKS.len())), "byte {}", turn / MASKS.len());
                assert!(segment.regions().iter().all(|region| region.length > 0));
            }
            Err(error) => assert!(error.to_string().contains("cannot describe"), "{error}"),
        }
    }
    assert!(accepted > 0, "some flips make another sound description");
    server.join().expect("no panic");
    assert_idle(&requester, 0);
}

#[test]
fn a_kept_connection_that_broke_is_replaced_only_if_nothing_was_sent_on_it() {
    let pair = Pair::new(4096);
    let request = [pair.request(0, 16)];
    let run = |direction| pair.requester.submit_and_wait(&pair.peer, direction, &request, LONG).expect("sound");
    assert!(run(Direction::Read).is_complete());
    assert_eq!(pair.requester.stats().connections_dialled, 1);
    // The source closes what is idle: the requester sees that before it sends.
    let short = Config { source_idle: Duration::from_millis(1), ..Config::default() };
    let other = Pair::with(4096, short, Config::default());
    eventually("the source has closed it", || other.source.stats().source_connections == 0);
    let request = [other.request(0, 16)];
    for _ in 0..3 {
        let report = other.requester.submit_and_wait(&other.peer, Direction::Write, &request, LONG).expect("sound");
        assert!(report.is_complete(), "{report:?}");
        eventually("the source has closed it", || other.source.stats().source_connections == 0);
    }
    let stats = other.requester.stats();
    assert_eq!((stats.connections_dialled, stats.connections_reused, stats.effects_unknown), (4, 0, 0));
    // One that takes the request and dies: bytes were accepted, so it is not sent again, although a READ could be.
    let mortal = RawSource::start(|_, _| {});
    let requester = engine(Config::default());
    let local = memory(&requester, 64, Permission::LocalOnly);
    let peer = requester.open_segment(mortal.endpoint, mortal.epoch, LONG).expect("it answers that");
    let request = TransferRequest { local_address: local.address(), remote_address: RawSource::BASE, length: 16 };
    let report = requester.submit_and_wait(&peer, Direction::Read, &[request], LONG).expect("sound");
    assert_eq!(report.failure.expect("it died").effect, RemoteEffect::None);
    assert_eq!((requester.stats().connections_reused, mortal.requests.load(SeqCst)), (1, 1));
}
