//! Every state meets every event; then what single rules promise.

use std::time::{Duration, Instant};

use super::*;
use crate::testing::offer;

const ME: (u128, u64) = (1, 11);
const PEER: (u128, u64) = (2, 21);
/// A run that a later one replaced, in every state but the first two.
const OLD: (u128, u64) = (2, 20);
const NEW: (u128, u64) = (2, 22);

fn exchange() -> Exchange {
    let me = Identity { instance: InstanceId(ME.0), incarnation: Incarnation(ME.1) };
    Exchange::new(me, InstanceId(PEER.0), Backoff::default(), 7)
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

#[test]
fn every_state_meets_every_event() {
    let now = Instant::now();
    let mut table = String::new();
    for event in EVENTS {
        for state in STATES {
            // One second later no back-off of a first failure is left.
            let mut exchange = in_state(state, now);
            let verdict = apply(&mut exchange, event, now + Duration::from_secs(1));
            table += &format!("{event} | {state} | {verdict} | {}\n", shown(&exchange));
        }
    }
    if let Ok(p) = std::env::var("DUMP") {
        std::fs::write(p, &table).unwrap();
    }
    let expected = include_str!("table.txt");
    for (found, expected) in table.lines().zip(expected.lines()) {
        assert_eq!(found, expected);
    }
    assert_eq!(table.lines().count(), expected.lines().count());
}
