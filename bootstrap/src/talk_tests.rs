//! Dialer against listener in paused time, and each against a hand-made other side.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, sleep},
};

use crate::{
    auth::{Role, Secret, nonce},
    config::Config,
    dial::{DialError, dial},
    life::LifeEnd,
    listen::{AcceptError, Listener},
    mem_net::{MemNet, MemStream},
    net::{Net, NetListener},
    status::{Refusal, Stage, Status},
    testing::{Heard, Recorder, offer},
    types::Offer,
    wire::{
        Challenge, Frame, Hello, MAX_FRAME_BYTES, Nonce, Proof, READY, Reply, Tag, WireError, read_frame, write_frame,
    },
};

const DIALER: (u128, u64) = (1, 11);
const ACCEPTOR: (u128, u64) = (2, 21);

fn hello_offer() -> Offer {
    offer(DIALER, ACCEPTOR, 1, 0, 0x100)
}

fn reply_offer() -> Offer {
    offer(ACCEPTOR, DIALER, 1, 1, 0x200)
}

fn addr() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn config(secret: Option<&str>) -> Config {
    let secret = secret.map(|secret| Secret::new(secret.as_bytes()).expect("16 bytes"));
    Config { secret, ..Config::default() }
}

const RIGHT: Option<&str> = Some("the right secret");
const WRONG: Option<&str> = Some("the wrong secret");

struct Scene {
    net: MemNet,
    acceptor: Arc<Recorder<MemStream>>,
    listener: Listener,
}

impl Scene {
    async fn new(config: &Config, acceptor: Recorder<MemStream>) -> Self {
        let (net, acceptor) = (MemNet::new(), Arc::new(acceptor));
        let listener = Listener::bind(&net, addr(), config, Arc::clone(&acceptor)).await.expect("a fresh net");
        Self { net, acceptor, listener }
    }

    async fn accepting(config: &Config) -> Self {
        Self::new(config, Recorder::new(Ok(reply_offer()))).await
    }

    async fn connect(&self) -> MemStream {
        self.net.dial(self.listener.local_addr()).await.expect("it listens")
    }

    async fn dial(&self, config: &Config) -> Result<(), DialError> {
        let dialed = dial(&self.net, self.listener.local_addr(), &hello_offer(), config).await?;
        assert_eq!(dialed.reply, reply_offer());
        let mut life = dialed.ready().await?;
        settle().await;
        let heard = self.acceptor.take();
        let [Heard::Hello(hello), Heard::Ready(again, _)] = &heard[..] else { panic!("{heard:?}") };
        assert_eq!((hello, again), (&hello_offer(), &hello_offer()));
        drop(heard);
        assert!(matches!(life.closed().await, LifeEnd::Closed), "the acceptor dropped its end");
        Ok(())
    }

    /// Nobody reached the acceptor, and each connection is counted once.
    async fn nothing_came_of_it(&self) {
        settle().await;
        assert!(self.acceptor.take().is_empty());
        let stats = self.listener.stats();
        assert_eq!((stats.completed, stats.pending, stats.in_progress), (0, 0, 0), "{stats:?}");
        assert_eq!(sum(&self.listener), stats.accepted, "{stats:?}");
    }
}

fn sum(listener: &Listener) -> u64 {
    let s = listener.stats();
    let refused: u64 = s.refused.iter().map(|(_, count)| count).sum();
    let ended = s.completed + s.timed_out + s.garbage + s.oversize + s.closed_early + s.over_limit + s.stopped;
    refused + ended + s.pending + s.in_progress
}

/// Lets every task run until all wait: paused time moves only then.
async fn settle() {
    sleep(Duration::from_millis(1)).await;
}

async fn read(stream: &mut MemStream) -> Frame {
    Frame::decode(&read_frame(stream).await.expect("a frame")).expect("of this version")
}

async fn say(stream: &mut MemStream, frame: Frame) {
    write_frame(stream, &frame).await.expect("the other side reads");
}

fn hello(secret: bool) -> Hello {
    Hello { offer: hello_offer(), nonce: nonce(), has_secret: secret }
}

#[tokio::test(start_paused = true)]
async fn an_exchange_without_secret_and_without_challenge_is_hello_reply_ready() {
    let scene =
        Scene::new(&config(None), Recorder { must_prove_alive: false, ..Recorder::new(Ok(reply_offer())) }).await;
    let mut stream = scene.connect().await;
    say(&mut stream, Frame::Hello(hello(false))).await;
    assert_eq!(read(&mut stream).await, Frame::Reply(Reply { offer: reply_offer(), tag: None }));
    stream.write_all(&[READY]).await.expect("it reads");
    settle().await;
    assert!(matches!(scene.acceptor.take()[..], [Heard::Hello(_), Heard::Ready(..)]));
    assert_eq!(scene.listener.stats().completed, 1);
}

#[tokio::test(start_paused = true)]
async fn every_pair_of_secrets_ends_as_it_should() {
    for (dialer, acceptor, expected) in [
        (None, None, "ok"),
        (RIGHT, RIGHT, "ok"),
        (WRONG, RIGHT, "a secret refused: authentication failed"),
        (None, RIGHT, "a secret refused: a secret is required"),
        (RIGHT, None, "a secret refused: no secret to authenticate with"),
    ] {
        let scene = Scene::accepting(&config(acceptor)).await;
        let end = match scene.dial(&config(dialer)).await {
            Ok(()) => "ok".to_owned(),
            Err(DialError::Refused { status, .. }) => format!("a secret refused: {status}"),
            Err(other) => other.to_string(),
        };
        assert_eq!(end, expected, "{dialer:?} dials {acceptor:?}");
        if expected != "ok" {
            scene.nothing_came_of_it().await;
        }
    }
}

/// Plays a dialer with these changes up to its proof; gives the acceptor's answer to it.
async fn answer_to_proof(scene: &Scene, change: impl FnOnce(&mut Hello, &mut Proof)) -> Frame {
    let secret = config(RIGHT).secret.expect("there is one");
    let mut stream = scene.connect().await;
    let mut hello = hello(true);
    say(&mut stream, Frame::Hello(hello.clone())).await;
    let Frame::Challenge(challenge) = read(&mut stream).await else { panic!("no challenge") };
    assert!(challenge.needs_tag);
    let mut proof = Proof { nonce: challenge.nonce, tag: None };
    change(&mut hello, &mut proof);
    if proof.tag.is_none() {
        proof.tag = Some(secret.tag(Role::Dialer, &hello, &challenge.nonce, None));
    }
    say(&mut stream, Frame::Proof(proof)).await;
    read(&mut stream).await
}

fn is_auth_failed(frame: &Frame) -> bool {
    matches!(frame, Frame::Refuse(Refusal { status: Status::AuthFailed, .. }))
}

#[tokio::test(start_paused = true)]
async fn only_the_right_proof_reaches_the_acceptor() {
    let scene = Scene::accepting(&config(RIGHT)).await;
    assert!(matches!(answer_to_proof(&scene, |_, _| {}).await, Frame::Reply(Reply { tag: Some(_), .. })));
    settle().await;
    scene.acceptor.take();
    let zeros = Some(Tag([0; 32]));
    assert!(is_auth_failed(&answer_to_proof(&scene, |_, proof| proof.tag = zeros).await), "a made-up tag");
    assert!(is_auth_failed(&answer_to_proof(&scene, |_, proof| proof.nonce = nonce()).await), "another nonce");
    let tampered = answer_to_proof(&scene, |hello, _| hello.offer.messaging.psn = crate::Psn::from_random(1)).await;
    assert!(is_auth_failed(&tampered), "the offer that was proven is not the one that came");
    let flag = answer_to_proof(&scene, |hello, _| hello.has_secret = false).await;
    assert!(is_auth_failed(&flag), "the flag is proven too");
    scene.nothing_came_of_it().await;
}

#[tokio::test(start_paused = true)]
async fn a_replayed_proof_proves_nothing() {
    let scene = Scene::accepting(&config(RIGHT)).await;
    let secret = config(RIGHT).secret.expect("there is one");
    let hello = hello(true);
    let mut recorded: Option<Proof> = None;
    for round in 0..2 {
        let mut stream = scene.connect().await;
        say(&mut stream, Frame::Hello(hello.clone())).await;
        let Frame::Challenge(challenge) = read(&mut stream).await else { panic!("no challenge") };
        let fresh =
            Proof { nonce: challenge.nonce, tag: Some(secret.tag(Role::Dialer, &hello, &challenge.nonce, None)) };
        // The second time with the recorded tag, under the recorded nonce or the new one.
        let proof = recorded.clone().map_or(fresh.clone(), |old| Proof { nonce: challenge.nonce, tag: old.tag });
        say(&mut stream, Frame::Proof(proof)).await;
        let answer = read(&mut stream).await;
        assert_eq!(is_auth_failed(&answer), round == 1, "{answer:?}");
        recorded = Some(fresh);
    }
}

#[tokio::test(start_paused = true)]
async fn a_reflected_frame_proves_nothing() {
    // The acceptor's own tag, sent back to it as a dialer's.
    let scene = Scene::accepting(&config(RIGHT)).await;
    let secret = config(RIGHT).secret.expect("there is one");
    let mut stream = scene.connect().await;
    let hello = hello(true);
    say(&mut stream, Frame::Hello(hello.clone())).await;
    let Frame::Challenge(challenge) = read(&mut stream).await else { panic!("no challenge") };
    for tag in [
        secret.tag(Role::Acceptor, &hello, &challenge.nonce, None),
        secret.tag(Role::Acceptor, &hello, &challenge.nonce, Some(&hello.offer)),
    ] {
        assert!(!secret.verify(tag, Role::Dialer, &hello, &challenge.nonce, None));
    }
    // Its challenge, sent back to it.
    say(&mut stream, Frame::Challenge(challenge)).await;
    let answer = read(&mut stream).await;
    assert!(matches!(answer, Frame::Refuse(Refusal { status: Status::BadOffer, .. })), "{answer:?}");
    scene.nothing_came_of_it().await;
}

/// Dials a hand-made acceptor.
async fn dial_against<F>(secret: Option<&str>, acceptor: impl FnOnce(MemStream) -> F + Send + 'static) -> DialError
where
    F: Future<Output = ()> + Send,
{
    let net = MemNet::new();
    let mut listener = net.listen(addr()).await.expect("a fresh net");
    let at = listener.local_addr().expect("it listens");
    let serving = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a dialer");
        acceptor(stream).await;
    });
    let end = dial(&net, at, &hello_offer(), &config(secret)).await;
    serving.await.expect("the acceptor's script holds");
    end.expect_err("this acceptor is not to be trusted")
}

async fn read_hello(stream: &mut MemStream) -> Hello {
    match read(stream).await {
        Frame::Hello(hello) => hello,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_dialer_with_a_secret_takes_no_reply_without_challenge() {
    let end = dial_against(RIGHT, async |mut stream| {
        read_hello(&mut stream).await;
        say(&mut stream, Frame::Reply(Reply { offer: reply_offer(), tag: None })).await;
    })
    .await;
    assert!(matches!(end, DialError::NotChallenged { .. }), "{end}");
    let end = dial_against(RIGHT, async |mut stream| {
        read_hello(&mut stream).await;
        say(&mut stream, Frame::Challenge(Challenge { nonce: nonce(), needs_tag: false })).await;
    })
    .await;
    assert!(matches!(end, DialError::NotChallenged { .. }), "a challenge without need of a tag: {end}");
}

#[tokio::test(start_paused = true)]
async fn a_dialer_without_a_secret_says_that_one_is_needed() {
    let end = dial_against(None, async |mut stream| {
        read_hello(&mut stream).await;
        say(&mut stream, Frame::Challenge(Challenge { nonce: nonce(), needs_tag: true })).await;
    })
    .await;
    assert!(matches!(end, DialError::SecretRequired { .. }), "{end}");
}

#[tokio::test(start_paused = true)]
async fn a_reply_needs_the_acceptors_own_proof_over_what_it_says() {
    type Forge = fn(&Secret, &Hello, &Nonce, Tag) -> Option<Tag>;
    let forgeries: [(&str, Forge); 4] = [
        ("no tag", |_, _, _, _| None),
        ("the dialer's own tag", |_, _, _, reflected| Some(reflected)),
        ("a tag over another reply", |secret, hello, nonce, _| {
            let other = offer(ACCEPTOR, DIALER, 1, 1, 0x201);
            Some(secret.tag(Role::Acceptor, hello, nonce, Some(&other)))
        }),
        ("another secret's tag", |_, hello, nonce, _| {
            let other = config(WRONG).secret.expect("there is one");
            Some(other.tag(Role::Acceptor, hello, nonce, Some(&reply_offer())))
        }),
    ];
    for (what, forge) in forgeries {
        let end = dial_against(RIGHT, async move |mut stream| {
            let secret = config(RIGHT).secret.expect("there is one");
            let hello = read_hello(&mut stream).await;
            let nonce = nonce();
            say(&mut stream, Frame::Challenge(Challenge { nonce, needs_tag: true })).await;
            let Frame::Proof(Proof { tag: Some(reflected), .. }) = read(&mut stream).await else { panic!("no proof") };
            let tag = forge(&secret, &hello, &nonce, reflected);
            say(&mut stream, Frame::Reply(Reply { offer: reply_offer(), tag })).await;
        })
        .await;
        assert!(matches!(end, DialError::BadProof { .. }), "{what}: {end}");
    }
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

#[test]
fn a_secret_is_long_enough_and_never_printed() {
    assert_eq!(Secret::new(&[7; 15]).expect_err("short").bytes, 15);
    let secret = Secret::new(b"sixteen bytes ok").expect("long enough");
    assert_eq!(format!("{secret:?}"), "Secret(redacted)");
    let config = Config { secret: Some(secret), ..Config::default() };
    assert!(!format!("{config:?}").contains("sixteen"));
}

fn half(bytes: &[u8]) -> u128 {
    u128::from_be_bytes(bytes.try_into().expect("16 bytes"))
}

#[test]
fn golden_tags() {
    // HMAC-SHA256, worked out by a second implementation: see docs/bootstrap.md for the input.
    let secret = Secret::new(b"the right secret").expect("16 bytes");
    let hello = Hello { offer: hello_offer(), nonce: Nonce([1; 32]), has_secret: true };
    let hex = |tag: Tag| format!("{:032x}{:032x}", half(&tag.0[..16]), half(&tag.0[16..]));
    let dial = hex(secret.tag(Role::Dialer, &hello, &Nonce([2; 32]), None));
    let accept = hex(secret.tag(Role::Acceptor, &hello, &Nonce([2; 32]), Some(&reply_offer())));
    assert_eq!((dial.as_str(), accept.as_str()), (GOLDEN_DIAL, GOLDEN_ACCEPT));
}

const GOLDEN_DIAL: &str = "3a108eb0ad3e7202b0e7ee2bc636a8deecbd41adfb60842fb15c2a8729c43a2a";
const GOLDEN_ACCEPT: &str = "b252f1e1ef9e21c28f6d0a2e2d3366ff9349ba3062a0e97a90c2878bdce74e37";
