//! Who is let in, and by whom: every pair of secrets, and every forgery.

use super::*;

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
    let tampered = answer_to_proof(&scene, |hello, _| hello.offer.qp.psn = crate::Psn::from_random(1)).await;
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

/// Where a test's log goes.
#[derive(Clone, Default)]
struct Log(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What a listener at `addr` with this secret logs when it is bound.
fn log_of_bind(addr: &str, secret: Option<&str>) -> String {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    tracing::subscriber::with_default(subscriber, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            let acceptor = Arc::new(Recorder::new(Ok(reply_offer())));
            let at = addr.parse().expect("an address");
            Listener::bind(&MemNet::new(), at, &config(secret), acceptor).await.expect("a fresh net").stop().await;
        });
    });
    let log = log.0.lock().expect("no panic");
    String::from_utf8(log.clone()).expect("text")
}

#[test]
fn an_open_port_without_secret_is_warned_of_once() {
    let log = log_of_bind("10.99.1.1:4711", None);
    assert_eq!(log.matches("WARN").count(), 1, "{log}");
    assert!(log.contains("no shared secret") && log.contains("10.99.1.1:4711"), "{log}");
    assert_eq!(log_of_bind("127.0.0.1:4711", None), "");
    assert_eq!(log_of_bind("10.99.1.1:4711", RIGHT), "");
}
