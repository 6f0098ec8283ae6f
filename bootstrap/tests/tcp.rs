//! The listener over real TCP on loopback: scanners, idle crowds, garbage, black holes, and what is left after them.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::sleep,
};
use verbs_bootstrap::{
    AcceptError, Acceptor, Config, DialError, Generation, Gid, GidType, Incarnation, InstanceId, LifeEnd, LifeSocket,
    LinkLayer, ListenError, Listener, Mtu, Offer, Plane, PortIdentity, Psn, QpEndpoint, Qpn, RdAtomic, Refusal, TcpNet,
    dial,
};

/// Sockets are counted process-wide, so these tests take turns.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
/// Sockets before the first test.
static AT_START: OnceLock<usize> = OnceLock::new();

/// Waits for the test before, and for its runtime to let go of its sockets.
async fn turn() -> tokio::sync::MutexGuard<'static, ()> {
    let turn = TURN.lock().await;
    let at_start = *AT_START.get_or_init(sockets);
    until("the test before lets go", || sockets() == at_start).await;
    turn
}

/// Open TCP sockets of this process. Others do not count: a runtime that listens for signals holds one of its own, and
/// runtimes of other tests come and go.
fn sockets() -> usize {
    let tables =
        ["/proc/self/net/tcp", "/proc/self/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    let inodes: Vec<&str> = tables
        .iter()
        .flat_map(|table| table.lines().skip(1))
        .filter_map(|line| line.split_whitespace().nth(9))
        .collect();
    let links = std::fs::read_dir("/proc/self/fd").expect("Linux").flatten();
    let targets = links.filter_map(|fd| std::fs::read_link(fd.path()).ok()?.into_os_string().into_string().ok());
    targets
        .filter(|to| to.strip_prefix("socket:[").is_some_and(|to| inodes.contains(&to.trim_end_matches(']'))))
        .count()
}

fn offer(from: u128, to: u128, qpn: u32) -> Offer {
    Offer {
        from: InstanceId(from),
        from_incarnation: Incarnation(1),
        to: InstanceId(to),
        to_incarnation: Incarnation(1),
        generation: Generation(1),
        echoed_generation: Generation(0),
        port: PortIdentity {
            device_guid: 1,
            port: 1,
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            gid: Gid([0; 16]),
            gid_type: GidType::RoceV2,
            gid_index: 0,
            pkey: 0xffff,
            mtu: Mtu::B1024,
        },
        plane: Plane::Messaging,
        qp: QpEndpoint { qpn: Qpn::new(qpn).expect("24 bits"), psn: Psn::from_random(qpn) },
        rd_atomic: RdAtomic { initiator: 1, responder: 1 },
        slab_bytes: 8192,
        window_slabs: 64,
        eager_max_bytes: 1 << 20,
        features: 0,
    }
}

/// Answers every hello after a pause and keeps the life sockets.
#[derive(Default)]
struct Worker {
    pause: Duration,
    lives: Mutex<Vec<LifeSocket<TcpStream>>>,
}

impl Acceptor for Worker {
    type Stream = TcpStream;

    async fn on_hello(&self, hello: Offer) -> Result<Offer, Refusal> {
        sleep(self.pause).await;
        Ok(offer(2, hello.from.0, 0x200))
    }

    fn on_ready(&self, _hello: Offer, _reply: Offer, life: LifeSocket<TcpStream>) {
        self.lives.lock().expect("no panic").push(life);
    }

    fn on_abandoned(&self, _hello: Offer, _reply: Offer, _why: AcceptError) {}
}

fn loopback() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

async fn listen(config: &Config) -> (Arc<Worker>, Listener) {
    let worker = Arc::new(Worker::default());
    let listener = Listener::bind(&TcpNet::new(&config.tcp), loopback(), config, Arc::clone(&worker)).await;
    (worker, listener.expect("loopback has free ports"))
}

async fn connect(at: SocketAddr, config: &Config) -> Result<LifeSocket<TcpStream>, DialError> {
    dial(&TcpNet::new(&config.tcp), at, &offer(1, 2, 0x100), config).await?.ready().await
}

/// Waits for what other tasks bring about.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        sleep(Duration::from_millis(2)).await;
    }
}

/// A deadline that tests can wait for.
fn hasty() -> Config {
    Config { deadline: Duration::from_millis(700), ..Config::default() }
}

#[tokio::test]
async fn a_real_exchange_leaves_one_socket_on_each_side() {
    let _turn = turn().await;
    let before = sockets();
    let config = Config::default();
    let (worker, listener) = listen(&config).await;
    let life = connect(listener.local_addr(), &config).await.expect("an exchange");
    until("on_ready", || worker.lives.lock().expect("no panic").len() == 1).await;
    assert_eq!(sockets(), before + 3, "the listener and both ends");
    let stream = socket2::SockRef::from(life.get_ref());
    assert!(stream.tcp_nodelay().expect("an option") && stream.keepalive().expect("an option"));
    assert_eq!(stream.tcp_keepalive_time().expect("an option"), Duration::from_secs(15));
    {
        let lives = worker.lives.lock().expect("no panic");
        let accepted = socket2::SockRef::from(lives[0].get_ref());
        // The kernel doubles what is asked for, and an accepted socket inherits it.
        for side in [&stream, &accepted] {
            assert_eq!(side.recv_buffer_size().expect("an option"), 32 << 10);
            assert_eq!(side.send_buffer_size().expect("an option"), 32 << 10);
        }
        assert!(accepted.tcp_nodelay().expect("an option") && accepted.keepalive().expect("an option"));
    }
    drop(life);
    let mut accepted = worker.lives.lock().expect("no panic").pop().expect("one life");
    assert!(matches!(accepted.closed().await, LifeEnd::Closed));
    drop(accepted);
    listener.stop().await;
    assert_eq!(sockets(), before);
}

#[tokio::test]
async fn the_life_socket_tells_of_bytes_and_of_resets() {
    let _turn = turn().await;
    let config = Config::default();
    let (worker, listener) = listen(&config).await;
    for reset in [true, false] {
        let life = connect(listener.local_addr(), &config).await.expect("an exchange");
        until("on_ready", || worker.lives.lock().expect("no panic").len() == 1).await;
        let mut accepted = worker.lives.lock().expect("no panic").pop().expect("one life");
        if reset {
            socket2::SockRef::from(life.get_ref()).set_linger(Some(Duration::ZERO)).expect("an option");
            drop(life);
            assert!(matches!(accepted.closed().await, LifeEnd::Broken(_)));
        } else {
            life.get_ref().try_write(b"x").expect("room");
            assert!(matches!(accepted.closed().await, LifeEnd::Unexpected { byte: b'x' }));
        }
    }
}

#[tokio::test]
async fn scanners_and_garbage_hurt_nobody() {
    let _turn = turn().await;
    let before = sockets();
    let config = hasty();
    let (worker, listener) = listen(&config).await;
    let at = listener.local_addr();
    for _ in 0..50 {
        drop(TcpStream::connect(at).await.expect("it listens"));
    }
    let mut http = TcpStream::connect(at).await.expect("it listens");
    http.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("it reads");
    let mut seven = TcpStream::connect(at).await.expect("it listens");
    seven.write_all(b"\0\0\0\xb7vbB").await.expect("it reads");
    let mut random = TcpStream::connect(at).await.expect("it listens");
    let mut noise = vec![0_u8; 1 << 20];
    let mut state = 1_u64;
    for byte in &mut noise {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = state.to_be_bytes()[0];
    }
    noise[0] = 0xff;
    // It is cut off early: writing may fail, and must not hang.
    let _ = tokio::time::timeout(Duration::from_secs(2), random.write_all(&noise)).await.expect("cut off, not stalled");
    let life = connect(at, &config).await.expect("a real peer beside them");
    until("all ended", || {
        let stats = listener.stats();
        stats.pending + stats.in_progress == 0
    })
    .await;
    let stats = listener.stats();
    assert_eq!((stats.accepted, stats.completed, stats.closed_early), (54, 1, 50), "{stats:?}");
    assert_eq!((stats.oversize, stats.timed_out), (2, 1), "{stats:?}");
    let mut rest = Vec::new();
    assert!(matches!(http.read_to_end(&mut rest).await, Ok(0) | Err(_)), "no answer to another protocol");
    drop((http, seven, random, life));
    worker.lives.lock().expect("no panic").clear();
    listener.stop().await;
    assert_eq!(sockets(), before);
}

#[tokio::test]
async fn five_hundred_idle_connections_do_not_delay_a_peer() {
    let _turn = turn().await;
    let before = sockets();
    let config = Config::default();
    let (worker, listener) = listen(&config).await;
    let at = listener.local_addr();
    let mut idle = Vec::new();
    // Both ends live here: stay below the usual limit of 1,024 descriptors.
    let crowd = 450;
    for _ in 0..crowd {
        idle.push(TcpStream::connect(at).await.expect("it listens"));
    }
    until("all are taken", || listener.stats().pending == crowd).await;
    let start = Instant::now();
    for _ in 0..10 {
        let _life = connect(at, &config).await.expect("a real peer among them");
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?} for ten exchanges", start.elapsed());
    until("ten are ready", || listener.stats().completed == 10).await;
    drop(idle);
    until("the crowd is gone", || listener.stats().pending == 0).await;
    worker.lives.lock().expect("no panic").clear();
    listener.stop().await;
    assert_eq!(sockets(), before);
}

#[tokio::test]
async fn too_many_pending_are_closed_at_once() {
    let _turn = turn().await;
    let config = Config { max_pending: 3, ..hasty() };
    let (_worker, listener) = listen(&config).await;
    let mut crowd = Vec::new();
    for _ in 0..5 {
        crowd.push(TcpStream::connect(listener.local_addr()).await.expect("it listens"));
    }
    until("two are closed", || listener.stats().over_limit == 2).await;
    assert_eq!(crowd[4].read(&mut [0]).await.expect("an end"), 0);
    until("the others time out", || listener.stats().timed_out == 3).await;
    connect(listener.local_addr(), &config).await.expect("there is room again");
}

#[tokio::test]
async fn a_byte_at_a_time_ends_at_the_deadline() {
    let _turn = turn().await;
    let (_worker, listener) = listen(&hasty()).await;
    let mut slow = TcpStream::connect(listener.local_addr()).await.expect("it listens");
    let start = Instant::now();
    for byte in b"\0\0\0\xb7vbBS\x01\x01\0".iter().cycle() {
        if slow.write_all(&[*byte]).await.is_err() {
            break;
        }
        sleep(Duration::from_millis(20)).await;
    }
    assert!(start.elapsed() >= Duration::from_millis(600) && start.elapsed() < Duration::from_secs(4));
    until("it is counted", || listener.stats().timed_out == 1).await;
}

#[tokio::test]
async fn a_dial_into_a_black_hole_ends_at_its_deadline() {
    let _turn = turn().await;
    let before = sockets();
    let config = hasty();
    // Takes connections and never answers.
    let deaf = TcpListener::bind(loopback()).await.expect("a port");
    let start = Instant::now();
    let end = connect(deaf.local_addr().expect("bound"), &config).await.expect_err("deaf");
    assert!(matches!(end, DialError::Timeout { .. }), "{end}");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    // A full backlog drops SYNs.
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    full.bind(&loopback().into()).expect("a port");
    full.listen(0).expect("a backlog of one");
    let at = full.local_addr().expect("bound").as_socket().expect("IPv4");
    let mut filling = Vec::new();
    for _ in 0..3 {
        let connecting = TcpStream::connect(at);
        filling.push(tokio::time::timeout(Duration::from_millis(100), connecting).await);
    }
    let start = Instant::now();
    let end = connect(at, &config).await.expect_err("nothing answers");
    assert!(matches!(end, DialError::Timeout { stage: verbs_bootstrap::Stage::Connect, .. }), "{end}");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    drop((deaf, full, filling));
    let nobody = TcpListener::bind(loopback()).await.expect("a port").local_addr().expect("bound");
    assert!(matches!(connect(nobody, &config).await, Err(DialError::Connect { .. })));
    assert_eq!(sockets(), before);
}

#[tokio::test]
async fn a_port_in_use_is_named_and_a_freed_one_is_taken_again_at_once() {
    let _turn = turn().await;
    let config = Config::default();
    let (worker, first) = listen(&config).await;
    let at = first.local_addr();
    let net = TcpNet::new(&config.tcp);
    let error = Listener::bind(&net, at, &config, Arc::clone(&worker)).await.expect_err("in use");
    assert!(matches!(error, ListenError::Bind { .. }) && error.to_string().contains(&at.to_string()), "{error}");
    let life = connect(at, &config).await.expect("an exchange");
    until("on_ready", || worker.lives.lock().expect("no panic").len() == 1).await;
    // The accepting side closes first and lingers in TIME_WAIT.
    worker.lives.lock().expect("no panic").clear();
    first.stop().await;
    drop(life);
    let second = Listener::bind(&net, at, &config, worker).await.expect("a restarted worker takes its port");
    connect(second.local_addr(), &config).await.expect("an exchange");
}

#[tokio::test]
async fn a_wrong_configuration_is_refused() {
    let config = Config { parallel_exchanges: 0, ..Config::default() };
    let bound = Listener::bind(&TcpNet::default(), loopback(), &config, Arc::new(Worker::default())).await;
    assert!(matches!(bound, Err(ListenError::Config(error)) if error.field == "parallel_exchanges"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_dials_at_once_all_get_through() {
    let _turn = turn().await;
    let before = sockets();
    let config = Config { parallel_exchanges: 8, ..Config::default() };
    let worker = Arc::new(Worker { pause: Duration::from_millis(5), ..Worker::default() });
    let listener = Listener::bind(&TcpNet::new(&config.tcp), loopback(), &config, Arc::clone(&worker)).await;
    let listener = listener.expect("loopback has free ports");
    let at = listener.local_addr();
    let dials: Vec<_> = (0..200)
        .map(|_| {
            let config = config.clone();
            tokio::spawn(async move { connect(at, &config).await.map(drop) })
        })
        .collect();
    for dialing in dials {
        dialing.await.expect("no panic").expect("an exchange");
    }
    until("all are ready", || listener.stats().completed == 200).await;
    worker.lives.lock().expect("no panic").clear();
    listener.stop().await;
    until("every socket is gone", || sockets() == before).await;
}
