//! Deadlines, limits, garbage, and how things end.

use super::*;

#[tokio::test(start_paused = true)]
async fn an_exchange_without_secret_and_without_challenge_is_hello_reply_ready() {
    let scene =
        Scene::new(&config(None), Recorder { must_prove_alive: false.into(), ..Recorder::new(Ok(reply_offer())) })
            .await;
    let mut stream = scene.connect().await;
    say(&mut stream, Frame::Hello(hello(false))).await;
    assert_eq!(read(&mut stream).await, Frame::Reply(Reply { offer: reply_offer(), tag: None }));
    stream.write_all(&[READY]).await.expect("it reads");
    settle().await;
    assert!(matches!(scene.acceptor.take()[..], [Heard::Hello(_), Heard::Ready(..)]));
    assert_eq!(scene.listener.stats().completed, 1);
}

#[tokio::test(start_paused = true)]
async fn a_dialer_names_what_the_other_side_does_wrong() {
    let end = dial_against(None, async |mut stream| {
        read_hello(&mut stream).await;
        drop(stream);
    })
    .await;
    assert!(matches!(end, DialError::Closed { stage: Stage::Reply, .. }), "{end}");
    let end = dial_against(None, async |mut stream| {
        read_hello(&mut stream).await;
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.expect("it reads");
    })
    .await;
    assert!(matches!(end, DialError::Protocol { source: WireError::Oversize { .. }, .. }), "{end}");
    let end = dial_against(None, async |mut stream| {
        let hello = read_hello(&mut stream).await;
        say(&mut stream, Frame::Hello(hello)).await;
    })
    .await;
    assert!(matches!(end, DialError::Protocol { source: WireError::OutOfTurn { .. }, .. }), "{end}");
    let end = dial_against(None, async |mut stream| {
        read_hello(&mut stream).await;
        let refusal = Refusal::new(Status::UnsupportedVersion, "of the future");
        let mut bytes = Frame::Refuse(refusal).encode();
        bytes[8] = 2;
        stream.write_all(&bytes).await.expect("it reads");
    })
    .await;
    assert!(matches!(end, DialError::Refused { status: Status::UnsupportedVersion, .. }), "{end}");
    let end = dial_against(None, async |mut stream| {
        for _ in 0..2 {
            // A second challenge could go on for ever.
            say(&mut stream, Frame::Challenge(Challenge { nonce: nonce(), needs_tag: false })).await;
        }
        read_hello(&mut stream).await;
        read(&mut stream).await;
    })
    .await;
    assert!(matches!(end, DialError::Protocol { source: WireError::OutOfTurn { .. }, .. }), "{end}");
}

#[tokio::test(start_paused = true)]
async fn a_dial_ends_at_its_deadline_wherever_it_hangs() {
    let net = MemNet::new();
    let hole: SocketAddr = ([10, 0, 0, 1], 1).into();
    net.black_hole(hole);
    let start = Instant::now();
    let end = dial(&net, hole, &hello_offer(), &config(None)).await.expect_err("nobody there");
    assert!(matches!(end, DialError::Timeout { stage: Stage::Connect, .. }), "{end}");
    assert_eq!(start.elapsed().as_millis(), 5000);

    let start = Instant::now();
    let end = dial_against(None, async |stream| {
        sleep(Duration::from_secs(6)).await;
        drop(stream);
    })
    .await;
    assert!(matches!(end, DialError::Timeout { stage: Stage::Reply, after, .. } if after.as_secs() == 5), "{end}");
    assert_eq!(start.elapsed().as_millis(), 6000, "the script's six seconds, the dial's five within");

    let end = dial(&net, ([10, 0, 0, 2], 1).into(), &hello_offer(), &config(None)).await.expect_err("refused");
    assert!(matches!(end, DialError::Connect { .. }), "{end}");
}

#[tokio::test(start_paused = true)]
async fn what_refuses_is_told_with_its_numbers() {
    let refusal = Refusal::new(Status::Exhausted, "512 of 512 QPs are in use");
    let scene = Scene::new(&config(None), Recorder::new(Err(refusal))).await;
    let end = scene.dial(&config(None)).await.expect_err("refused");
    assert!(matches!(&end, DialError::Refused { status: Status::Exhausted, detail, .. } if detail.contains("512")));
    settle().await;
    assert_eq!(scene.listener.stats().refused, [(Status::Exhausted, 1)]);
    assert!(matches!(scene.acceptor.take()[..], [Heard::Hello(_)]), "no on_abandoned after a refusal");
}

#[tokio::test(start_paused = true)]
async fn silence_and_slowness_end_at_the_deadline() {
    let scene = Scene::accepting(&config(None)).await;
    let start = Instant::now();
    let mut silent = scene.connect().await;
    let mut seven = scene.connect().await;
    seven.write_all(b"\0\0\0\xb7vbB").await.expect("it reads");
    let mut slow = scene.connect().await;
    let dripping = tokio::spawn(async move {
        for byte in Frame::Hello(hello(false)).encode() {
            if slow.write_all(&[byte]).await.is_err() {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
    });
    assert_eq!(silent.read(&mut [0]).await.expect("an end"), 0);
    assert_eq!(seven.read(&mut [0]).await.expect("an end"), 0);
    assert_eq!(start.elapsed().as_millis(), 5000);
    dripping.await.expect("it ends");
    settle().await;
    assert_eq!(scene.listener.stats().timed_out, 3);
    scene.nothing_came_of_it().await;
}

#[tokio::test(start_paused = true)]
async fn a_dialer_that_never_gets_ready_is_abandoned() {
    let scene = Scene::accepting(&config(None)).await;
    let dialed = dial(&scene.net, scene.listener.local_addr(), &hello_offer(), &config(None)).await.expect("a reply");
    let start = Instant::now();
    sleep(Duration::from_secs(6)).await;
    let heard = scene.acceptor.take();
    assert!(matches!(heard[..], [Heard::Hello(_), Heard::Abandoned(AcceptError::Timeout { stage: Stage::Ready, .. })]));
    assert_eq!(start.elapsed().as_secs(), 6);
    let late = dialed.ready().await.expect_err("its deadline is over too");
    assert!(matches!(late, DialError::Timeout { .. } | DialError::Closed { .. }), "{late}");

    let dialed = dial(&scene.net, scene.listener.local_addr(), &hello_offer(), &config(None)).await.expect("a reply");
    drop(dialed);
    settle().await;
    let heard = scene.acceptor.take();
    assert!(matches!(heard[..], [Heard::Hello(_), Heard::Abandoned(AcceptError::Closed { stage: Stage::Ready })]));
}

#[tokio::test(start_paused = true)]
async fn on_hello_runs_to_its_end_past_the_deadline() {
    let recorder = Recorder { pause: Duration::from_secs(7), ..Recorder::new(Ok(reply_offer())) };
    let scene = Scene::new(&config(None), recorder).await;
    let end = scene.dial(&config(None)).await.expect_err("too slow");
    assert!(matches!(end, DialError::Timeout { stage: Stage::Reply, .. }), "{end}");
    sleep(Duration::from_secs(3)).await;
    let heard = scene.acceptor.take();
    assert!(matches!(heard[..], [Heard::Hello(_), Heard::Abandoned(_)]), "{heard:?}");
    assert_eq!(sum(&scene.listener), 1);
}

#[tokio::test(start_paused = true)]
async fn a_dialer_that_is_gone_moves_nothing() {
    // The one turn is taken; meanwhile a second dialer says hello and dies.
    let limits = Config { parallel_exchanges: 1, ..config(None) };
    let recorder = Recorder { pause: Duration::from_secs(2), ..Recorder::new(Ok(reply_offer())) };
    let scene = Scene::new(&limits, recorder).await;
    let first = {
        let (net, at) = (scene.net.clone(), scene.listener.local_addr());
        tokio::spawn(async move { dial(&net, at, &hello_offer(), &config(None)).await.map(|_| ()) })
    };
    settle().await;
    let mut second = scene.connect().await;
    say(&mut second, Frame::Hello(hello(false))).await;
    let Frame::Challenge(challenge) = read(&mut second).await else { panic!("no challenge") };
    say(&mut second, Frame::Proof(Proof { nonce: challenge.nonce, tag: None })).await;
    settle().await;
    let stats = scene.listener.stats();
    assert_eq!((stats.in_progress, stats.pending), (1, 1), "{stats:?}");
    drop(second);
    assert!(first.await.expect("no panic").is_ok());
    sleep(Duration::from_secs(1)).await;
    let hellos = scene.acceptor.take().into_iter().filter(|heard| matches!(heard, Heard::Hello(_))).count();
    assert_eq!(hellos, 1, "the dead dialer's hello reached nobody");
    assert_eq!(scene.listener.stats().closed_early, 2);
}

#[tokio::test(start_paused = true)]
async fn what_comes_to_displace_something_while_it_waits_is_challenged_then() {
    let limits = Config { parallel_exchanges: 1, ..config(None) };
    let pause = Duration::from_secs(1);
    let recorder = Recorder { must_prove_alive: false.into(), pause, ..Recorder::new(Ok(reply_offer())) };
    let scene = Scene::new(&limits, recorder).await;
    let (mut first, mut second) = (scene.connect().await, scene.connect().await);
    say(&mut first, Frame::Hello(hello(false))).await;
    settle().await;
    say(&mut second, Frame::Hello(hello(false))).await;
    settle().await;
    scene.acceptor.must_prove_alive.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(read(&mut first).await, Frame::Reply(_)));
    first.write_all(&[READY]).await.expect("it reads");
    let Frame::Challenge(challenge) = read(&mut second).await else { panic!("no challenge") };
    let hellos = scene.acceptor.take().into_iter().filter(|heard| matches!(heard, Heard::Hello(_))).count();
    assert_eq!(hellos, 1, "the acceptor has not heard of the second");
    say(&mut second, Frame::Proof(Proof { nonce: challenge.nonce, tag: None })).await;
    assert!(matches!(read(&mut second).await, Frame::Reply(_)));
}

#[tokio::test(start_paused = true)]
async fn five_hundred_idle_dialers_take_no_turn() {
    let scene = Scene::accepting(&config(None)).await;
    let mut idle = Vec::new();
    for _ in 0..500 {
        idle.push(scene.connect().await);
    }
    settle().await;
    assert_eq!(scene.listener.stats().pending, 500);
    let start = Instant::now();
    scene.dial(&config(None)).await.expect("a real peer among them");
    assert!(start.elapsed() < Duration::from_millis(10), "{:?}", start.elapsed());
    sleep(Duration::from_secs(5)).await;
    assert_eq!(scene.listener.stats().timed_out, 500);
}

#[tokio::test(start_paused = true)]
async fn at_most_so_many_exchanges_run_at_once() {
    let limits = Config { parallel_exchanges: 4, max_pending: 10, ..config(None) };
    let recorder = Recorder { pause: Duration::from_millis(100), ..Recorder::new(Ok(reply_offer())) };
    let scene = Scene::new(&limits, recorder).await;
    let dials: Vec<_> = (0..30)
        .map(|_| {
            let (net, at) = (scene.net.clone(), scene.listener.local_addr());
            tokio::spawn(async move { dial(&net, at, &hello_offer(), &config(None)).await?.ready().await })
        })
        .collect();
    let mut most = 0;
    for _ in 0..500 {
        settle().await;
        most = most.max(scene.listener.stats().in_progress);
    }
    assert_eq!(most, 4);
    let mut closed = 0;
    for dialing in dials {
        match dialing.await.expect("no panic") {
            Ok(_) => {}
            Err(DialError::Closed { .. }) => closed += 1,
            Err(other) => panic!("{other}"),
        }
    }
    let stats = scene.listener.stats();
    assert_eq!((stats.over_limit, stats.completed), (closed, 30 - closed), "{stats:?}");
    assert!(closed >= 10, "ten may wait: {stats:?}");
}

#[tokio::test(start_paused = true)]
async fn stop_ends_everything_and_tells_the_acceptor() {
    let scene = Scene::accepting(&config(None)).await;
    let silent = scene.connect().await;
    let dialed = dial(&scene.net, scene.listener.local_addr(), &hello_offer(), &config(None)).await.expect("a reply");
    let at = scene.listener.local_addr();
    let start = Instant::now();
    scene.listener.stop().await;
    assert_eq!(start.elapsed(), Duration::ZERO, "nothing is waited for");
    assert!(matches!(scene.acceptor.take()[..], [Heard::Hello(_), Heard::Abandoned(AcceptError::Stopped)]));
    let mut streams = [silent];
    assert_eq!(streams[0].read(&mut [0]).await.expect("an end"), 0);
    assert!(matches!(dialed.ready().await, Err(DialError::Closed { .. })));
    let end = dial(&scene.net, at, &hello_offer(), &config(None)).await.expect_err("gone");
    assert!(matches!(end, DialError::Connect { .. }), "{end}");
    assert_eq!(Arc::strong_count(&scene.acceptor), 1, "no task holds it");
}

#[tokio::test(start_paused = true)]
async fn dropping_the_listener_ends_everything() {
    let recorder = Recorder { pause: Duration::from_secs(600), ..Recorder::new(Ok(reply_offer())) };
    let scene = Scene::new(&config(None), recorder).await;
    let mut silent = scene.connect().await;
    let end = scene.dial(&config(None)).await.expect_err("on_hello hangs");
    assert!(matches!(end, DialError::Timeout { .. }), "{end}");
    drop(scene.listener);
    assert_eq!(silent.read(&mut [0]).await.expect("an end"), 0);
    settle().await;
    assert_eq!(Arc::strong_count(&scene.acceptor), 1, "no task holds it");
}

#[tokio::test(start_paused = true)]
async fn each_kind_of_garbage_is_counted_and_answered_if_it_may_be() {
    let scene = Scene::accepting(&config(None)).await;
    let hello_bytes = Frame::Hello(hello(false)).encode();
    let changed = |change: fn(&mut Vec<u8>)| {
        let mut bytes = hello_bytes.clone();
        change(&mut bytes);
        bytes
    };
    let longest = u32::try_from(MAX_FRAME_BYTES).expect("small").to_be_bytes();
    let cases: [(&str, Vec<u8>, Option<Status>); 6] = [
        ("another version", changed(|bytes| bytes[8] = 2), Some(Status::UnsupportedVersion)),
        (
            "trailing bytes",
            changed(|bytes| {
                bytes[3] += 1;
                bytes.push(0);
            }),
            Some(Status::BadOffer),
        ),
        ("another kind", changed(|bytes| bytes[9] = 77), Some(Status::BadOffer)),
        ("QP number 0", changed(|bytes| bytes[11 + 106..11 + 110].fill(0)), Some(Status::BadOffer)),
        ("another magic", changed(|bytes| bytes[4] = b'X'), None),
        ("oversize", longest.to_vec(), None),
    ];
    for (what, bytes, status) in cases {
        let mut stream = scene.connect().await;
        stream.write_all(&bytes).await.expect("it reads");
        match status {
            Some(status) => {
                let Frame::Refuse(refusal) = read(&mut stream).await else { panic!("{what} is not refused") };
                assert_eq!(refusal.status, status, "{what}: {refusal}");
            }
            None => assert_eq!(stream.read(&mut [0]).await.expect("an end"), 0, "{what}"),
        }
    }
    scene.nothing_came_of_it().await;
    let stats = scene.listener.stats();
    assert_eq!((stats.garbage, stats.oversize), (4, 1), "{stats:?}");
    assert_eq!(stats.refused, [(Status::UnsupportedVersion, 1)]);
}

/// A net whose listener fails to accept as often as it is told, then takes connections.
struct Failing {
    net: MemNet,
    failures: u32,
}

struct FailingListener {
    inner: <MemNet as Net>::Listener,
    failures: u32,
}

impl Net for Failing {
    type Stream = MemStream;
    type Listener = FailingListener;

    async fn listen(&self, addr: SocketAddr) -> std::io::Result<FailingListener> {
        Ok(FailingListener { inner: self.net.listen(addr).await?, failures: self.failures })
    }

    async fn dial(&self, addr: SocketAddr) -> std::io::Result<MemStream> {
        self.net.dial(addr).await
    }
}

impl NetListener for FailingListener {
    type Stream = MemStream;

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    async fn accept(&mut self) -> std::io::Result<(MemStream, SocketAddr)> {
        if let Some(left) = self.failures.checked_sub(1) {
            self.failures = left;
            // EMFILE: too many open files.
            return Err(std::io::Error::from_raw_os_error(24));
        }
        self.inner.accept().await
    }
}

#[tokio::test(start_paused = true)]
async fn running_out_of_descriptors_pauses_the_listener_and_no_more() {
    let net = Failing { net: MemNet::new(), failures: 12 };
    let acceptor = Arc::new(Recorder::new(Ok(reply_offer())));
    let listener = Listener::bind(&net, addr(), &config(None), Arc::clone(&acceptor)).await.expect("a fresh net");
    let start = Instant::now();
    // 10 ms doubled to a second: twelve pauses are 6.27 s.
    sleep(Duration::from_millis(6300)).await;
    drop(dial(&net, listener.local_addr(), &hello_offer(), &config(None)).await.expect("it goes on"));
    assert!(start.elapsed() < Duration::from_millis(6400), "{:?}", start.elapsed());
    assert_eq!(listener.stats().accept_errors, 12);
}

/// Panics on the first hello.
struct Panicking(std::sync::atomic::AtomicBool);

impl crate::listen::Acceptor for Panicking {
    type Stream = MemStream;

    async fn on_hello(&self, _hello: Offer) -> Result<Offer, Refusal> {
        let first = !self.0.swap(true, std::sync::atomic::Ordering::Relaxed);
        assert!(!first, "a bug of the acceptor's");
        Ok(reply_offer())
    }

    fn on_ready(&self, _hello: Offer, _reply: Offer, _life: crate::LifeSocket<MemStream>) {}

    fn on_abandoned(&self, _hello: Offer, _reply: Offer, _why: AcceptError) {}
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_one_exchange_ends_that_one() {
    let (net, acceptor) = (MemNet::new(), Arc::new(Panicking(false.into())));
    let limits = Config { parallel_exchanges: 1, ..config(None) };
    let listener = Listener::bind(&net, addr(), &limits, acceptor).await.expect("a fresh net");
    let end = dial(&net, listener.local_addr(), &hello_offer(), &config(None)).await.expect_err("it panicked");
    assert!(matches!(end, DialError::Closed { stage: Stage::Reply, .. }), "{end}");
    drop(dial(&net, listener.local_addr(), &hello_offer(), &config(None)).await.expect("the turn came back"));
    settle().await;
    assert_eq!((sum(&listener), listener.stats().stopped), (2, 1));
}
