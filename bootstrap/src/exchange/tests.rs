//! Every state meets every event; then what single rules promise.

use std::{
    fmt::Write,
    time::{Duration, Instant},
};

use super::*;
use crate::testing::offer;

const ME: (u128, u64) = (1, 11);
const PEER: (u128, u64) = (2, 21);
/// A run that a later one replaced, in every state but the first two.
const OLD: (u128, u64) = (2, 20);
const NEW: (u128, u64) = (2, 22);

fn exchange() -> Exchange {
    let me = Identity { instance: InstanceId(ME.0), incarnation: Incarnation(ME.1) };
    Exchange::new(me, InstanceId(PEER.0), Plane::Messaging, Backoff::default(), 7)
}

/// What run `run` of the peer would send with epoch `generation` and QP `qpn`.
fn from_peer(run: (u128, u64), generation: u64, echoed: u64, qpn: u32) -> Offer {
    offer(run, ME, generation, echoed, qpn)
}

/// An exchange with the peer's run before proven, superseded by `PEER`, its generation 4 used; now idle.
fn seasoned(now: Instant) -> Exchange {
    let mut exchange = exchange();
    for (run, generation) in [(OLD, 9), (PEER, 4)] {
        let HelloVerdict::Join { generation, fresh: true } = exchange.on_hello(&from_peer(run, generation, 0, 100))
        else {
            panic!("an idle epoch joins")
        };
        assert!(exchange.on_connected(generation) && exchange.on_proven(generation));
        assert!(exchange.on_epoch_end(generation, now));
    }
    exchange
}

const STATES: [&str; 8] = ["new", "registered", "idle", "handshaking", "dialing", "bound", "connected", "proven"];

/// The named state. Own generation: 0 if new or registered, 2 if idle, else 3; bound to the peer's 5 with QP 50.
fn in_state(name: &str, now: Instant) -> Exchange {
    let mut exchange = if matches!(name, "new" | "registered") { exchange() } else { seasoned(now) };
    if name == "registered" {
        exchange.on_registered(Incarnation(PEER.1));
    }
    if !matches!(name, "new" | "registered" | "idle") {
        exchange.begin_epoch();
    }
    if name == "dialing" {
        assert!(matches!(exchange.start_dial(now), DialStart::Go { .. }));
    }
    let depth = ["bound", "connected", "proven"].iter().position(|state| *state == name);
    if let Some(depth) = depth {
        exchange.start_dial(now);
        exchange.on_hello(&from_peer(PEER, 5, 3, 50));
        assert!(depth < 1 || exchange.on_connected(Generation(3)));
        assert!(depth < 2 || exchange.on_proven(Generation(3)));
    }
    exchange
}

const EVENTS: [&str; 27] = [
    "begin_epoch",
    "start_dial",
    "dial_failed",
    "connected 3",
    "connected 2",
    "proven 3",
    "end 3",
    "end 2",
    "register same",
    "register new",
    "register old",
    "hello 5",
    "hello 5 other qp",
    "hello 6",
    "hello 4",
    "hello new run",
    "hello old run",
    "hello other instance meant",
    "hello other run meant",
    "hello from another",
    "hello generation 0",
    "reply 5",
    "reply 6",
    "reply 4",
    "reply echo 2",
    "reply new run",
    "reply to another run",
];

fn apply(exchange: &mut Exchange, event: &str, now: Instant) -> String {
    let hello = |exchange: &mut Exchange, hello: Offer| match exchange.on_hello(&hello) {
        HelloVerdict::Join { generation, fresh } => {
            format!("join {}{}", generation.0, if fresh { " fresh" } else { "" })
        }
        HelloVerdict::Replace { generation, retired } => format!("replace {} by {}", retired.0, generation.0),
        HelloVerdict::Repeat { generation } => format!("repeat {}", generation.0),
        HelloVerdict::Refuse(refusal) => format!("refuse: {}", refusal.status),
    };
    let reply = |exchange: &mut Exchange, reply: Offer| match exchange.on_reply(&reply) {
        ReplyVerdict::Connect { generation } => format!("connect {}", generation.0),
        ReplyVerdict::AlreadyUp { generation } => format!("up {}", generation.0),
        ReplyVerdict::Retire { retired } => format!("retire {}", retired.0),
        ReplyVerdict::Ignore => "ignore".to_owned(),
    };
    match event {
        "begin_epoch" => format!("epoch {}", exchange.begin_epoch().0),
        "start_dial" => match exchange.start_dial(now) {
            DialStart::Go { generation, echoed, target } => {
                format!("go {} echo {} to {}", generation.0, echoed.0, target.0)
            }
            DialStart::Wait { .. } => "wait".to_owned(),
            other => format!("{other:?}").to_lowercase(),
        },
        "dial_failed" => match exchange.on_dial_failed(now) {
            DialFailed::CountsAsSuccess { generation } => format!("success {}", generation.0),
            DialFailed::EpochOver { retired, .. } => format!("over {}", retired.0),
            DialFailed::Stale => "stale".to_owned(),
        },
        "connected 3" => exchange.on_connected(Generation(3)).to_string(),
        "connected 2" => exchange.on_connected(Generation(2)).to_string(),
        "proven 3" => exchange.on_proven(Generation(3)).to_string(),
        "end 3" => exchange.on_epoch_end(Generation(3), now).to_string(),
        "end 2" => exchange.on_epoch_end(Generation(2), now).to_string(),
        "register same" | "register new" | "register old" => {
            let run = match event {
                "register same" => PEER,
                "register new" => NEW,
                _ => OLD,
            };
            match exchange.on_registered(Incarnation(run.1)) {
                RegisterVerdict::Keep => "keep".to_owned(),
                RegisterVerdict::Superseded => "superseded".to_owned(),
                RegisterVerdict::Retire { retired } => format!("retire {}", retired.map_or(0, |retired| retired.0)),
            }
        }
        "hello 5" => hello(exchange, from_peer(PEER, 5, 3, 50)),
        "hello 5 other qp" => hello(exchange, from_peer(PEER, 5, 3, 51)),
        "hello 6" => hello(exchange, from_peer(PEER, 6, 3, 60)),
        "hello 4" => hello(exchange, from_peer(PEER, 4, 3, 100)),
        "hello new run" => hello(exchange, from_peer(NEW, 1, 0, 10)),
        "hello old run" => hello(exchange, from_peer(OLD, 10, 0, 10)),
        "hello other instance meant" => hello(exchange, offer(PEER, (9, ME.1), 5, 3, 50)),
        "hello other run meant" => hello(exchange, offer(PEER, (ME.0, 10), 5, 3, 50)),
        "hello from another" => hello(exchange, offer((3, 21), ME, 5, 3, 50)),
        "hello generation 0" => hello(exchange, from_peer(PEER, 0, 3, 50)),
        "reply 5" => reply(exchange, from_peer(PEER, 5, 3, 50)),
        "reply 6" => reply(exchange, from_peer(PEER, 6, 3, 60)),
        "reply 4" => reply(exchange, from_peer(PEER, 4, 3, 100)),
        "reply echo 2" => reply(exchange, from_peer(PEER, 5, 2, 50)),
        "reply new run" => reply(exchange, from_peer(NEW, 1, 3, 10)),
        "reply to another run" => reply(exchange, offer(PEER, (ME.0, 10), 5, 3, 50)),
        other => panic!("no event {other}"),
    }
}

/// What the exchange shows of itself: `-`, or the epoch and what it is bound to.
fn shown(exchange: &Exchange) -> String {
    let Some(generation) = exchange.generation() else { return "-".to_owned() };
    let remote = exchange.remote().map_or(String::new(), |(run, remote)| format!("={run}.{}", remote.0));
    format!("{}{}{}", generation.0, remote, if exchange.is_connected() { "+" } else { "" })
        .replace("00000000000000", "r")
}

/// `table.txt`: event, state, verdict, and what the exchange then is: own generation, `=` run and generation that it is
/// bound to, `+` once connected.
#[test]
fn every_state_meets_every_event() {
    let now = Instant::now();
    let mut table = String::new();
    for event in EVENTS {
        for state in STATES {
            // One second later no back-off of a first failure is left.
            let mut exchange = in_state(state, now);
            let verdict = apply(&mut exchange, event, now + Duration::from_secs(1));
            writeln!(table, "{event} | {state} | {verdict} | {}", shown(&exchange)).expect("a String takes it");
        }
    }
    let expected = include_str!("table.txt");
    for (found, expected) in table.lines().zip(expected.lines()) {
        assert_eq!(found, expected);
    }
    assert_eq!(table.lines().count(), expected.lines().count());
}

#[test]
fn back_off_doubles_to_its_end_and_proof_resets_it() {
    let mut now = Instant::now();
    let mut exchange = exchange();
    exchange.on_registered(Incarnation(PEER.1));
    for failure in 0..12_u32 {
        exchange.begin_epoch();
        assert!(matches!(exchange.start_dial(now), DialStart::Go { .. }));
        let DialFailed::EpochOver { retry_at, .. } = exchange.on_dial_failed(now) else { panic!("nothing came up") };
        let most = Duration::from_millis(50 * 2_u64.pow(failure)).min(Backoff::default().max);
        assert!((most / 2..=most).contains(&(retry_at - now)), "{:?} after failure {failure}", retry_at - now);
        exchange.begin_epoch();
        assert_eq!(exchange.start_dial(now), DialStart::Wait { until: retry_at });
        now = retry_at;
    }
    let generation = exchange.begin_epoch();
    exchange.on_hello(&from_peer(PEER, 1, 0, 5));
    assert!(exchange.on_connected(generation) && exchange.on_proven(generation));
    assert!(exchange.on_epoch_end(generation, now));
    exchange.begin_epoch();
    assert!(matches!(exchange.start_dial(now), DialStart::Go { .. }), "proof resets the back-off");
}

#[test]
fn registering_again_resets_the_back_off() {
    let now = Instant::now();
    let mut exchange = in_state("dialing", now);
    exchange.on_dial_failed(now);
    exchange.begin_epoch();
    assert!(matches!(exchange.start_dial(now), DialStart::Wait { .. }));
    exchange.on_registered(Incarnation(PEER.1));
    assert!(matches!(exchange.start_dial(now), DialStart::Go { .. }));
}

#[test]
fn two_seeds_spread_their_retries() {
    let now = Instant::now();
    let retries: Vec<Instant> = (0..20)
        .map(|seed| {
            let me = Identity { instance: InstanceId(1), incarnation: Incarnation(11) };
            Exchange::new(me, InstanceId(2), Plane::Messaging, Backoff::default(), seed).back_off(now)
        })
        .collect();
    let distinct: std::collections::HashSet<_> = retries.iter().collect();
    assert!(distinct.len() > 15, "{retries:?}");
}

#[test]
fn an_epoch_that_never_proved_itself_counts_as_a_failure() {
    let now = Instant::now();
    for (state, waits) in [("bound", true), ("connected", true), ("proven", false)] {
        let mut exchange = in_state(state, now);
        exchange.on_dial_failed(now);
        let later = now + Duration::from_secs(60);
        assert!(exchange.on_epoch_end(Generation(3), later));
        exchange.begin_epoch();
        assert_eq!(matches!(exchange.start_dial(later), DialStart::Wait { .. }), waits, "{state}");
    }
}

#[test]
fn a_reply_from_the_wrong_run_is_not_dialed_again_at_once() {
    let now = Instant::now();
    let mut exchange = in_state("dialing", now + Duration::from_secs(1));
    assert_eq!(exchange.on_reply(&from_peer(NEW, 1, 3, 10)), ReplyVerdict::Ignore);
    assert!(matches!(exchange.start_dial(now + Duration::from_secs(2)), DialStart::Wait { .. }));
}

#[test]
fn a_refused_stale_blob_falls_back_to_the_run_that_proved_itself() {
    let now = Instant::now();
    let mut exchange = in_state("proven", now);
    exchange.on_dial_failed(now);
    assert_eq!(exchange.on_registered(Incarnation(77)), RegisterVerdict::Retire { retired: Some(Generation(3)) });
    exchange.begin_epoch();
    assert!(matches!(exchange.start_dial(now), DialStart::Go { target: Incarnation(77), .. }));
    assert!(matches!(exchange.on_refused(Status::StaleIncarnation, now), DialFailed::EpochOver { .. }));
    assert_eq!(exchange.target(), Some(Incarnation(PEER.1)));
}

#[test]
fn the_same_blob_again_keeps_a_connection_with_the_run_after_it() {
    let now = Instant::now();
    let mut exchange = exchange();
    exchange.on_registered(Incarnation(PEER.1));
    exchange.on_hello(&from_peer(NEW, 1, 0, 10));
    assert!(exchange.on_connected(Generation(1)) && exchange.on_proven(Generation(1)));
    assert_eq!(exchange.on_registered(Incarnation(PEER.1)), RegisterVerdict::Keep);
    assert!(exchange.is_connected());
    assert!(exchange.on_epoch_end(Generation(1), now));
    assert_eq!(exchange.target(), Some(Incarnation(NEW.1)), "what proved itself last is dialed");
}

#[test]
fn only_what_would_retire_an_epoch_must_show_that_it_lives() {
    let now = Instant::now();
    for state in STATES {
        for hello in [from_peer(PEER, 5, 3, 50), from_peer(PEER, 6, 3, 60), from_peer(NEW, 1, 0, 10)] {
            let mut exchange = in_state(state, now);
            let would = exchange.would_replace(&hello);
            let does = matches!(exchange.on_hello(&hello), HelloVerdict::Replace { .. });
            assert_eq!(would, does, "{state}");
        }
    }
}

/// Planes know nothing of each other: an offer of the other one is refused, and as a reply it is nobody's.
#[test]
fn an_offer_of_the_other_plane_moves_nothing() {
    let now = Instant::now();
    let bulk = |generation, echoed| Offer { plane: Plane::Bulk, ..from_peer(PEER, generation, echoed, 50) };
    let mut exchange = in_state("dialing", now);
    let HelloVerdict::Refuse(refusal) = exchange.on_hello(&bulk(5, 0)) else { panic!("taken") };
    assert_eq!(refusal.status, Status::BadOffer);
    assert!(refusal.detail.contains("bulk plane in an exchange of the messaging plane"), "{refusal}");
    assert_eq!(exchange.on_reply(&bulk(5, 3)), ReplyVerdict::Ignore);
    assert!(!exchange.is_connected() && exchange.generation() == Some(Generation(3)));
}
