//! `send-lat`: messages that come back.
//!
//! Closed loop, as perftest does it: the next message goes when the last one is back, and half of the round trip is the
//! latency. One clock reading a round serves as the end of one and the start of the next.
//!
//! Open loop: messages go at a fixed rate, whether or not the earlier ones are back, and each time runs from the moment
//! at which its message *should* have been sent. A stall then shows in every message that it held up, and not in one
//! alone, as it would if the sender waited with it.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hdrhistogram::Histogram;
use verbs_transport::{MessageType, SendOutcome};

use super::{
    args::{Beside, Extent, Polling, SendLat, Test},
    beside::Mover,
    client::{Client, most, row},
    control::{Expose, Run, Serving},
    failure::Failure,
    node::{Member, PATIENCE},
    progress::Progress,
    report::{Cell, Report},
    signal::{Signal, lock},
};

/// Rounds before those that count.
const WARM_UP: u64 = 50;
/// Longer than any time here.
const DAY_NANOS: u64 = 86_400_000_000_000;
/// Closer than this to the next message, an open loop no longer sleeps.
const TOO_SHORT_TO_SLEEP: Duration = Duration::from_micros(200);

pub(crate) fn run(client: &Client, args: &SendLat, report: &mut Report) -> Result<(), Failure> {
    for bytes in args.messages.sizes(Test::SendLat.default_bytes()) {
        let beside_bytes = if args.beside.is_some() { args.beside_size as usize } else { 0 };
        let expose = (args.beside == Some(Beside::Get)).then_some(Expose::Source);
        let spec = Run { what: Serving::Echo, bytes, peers: 1, expose, beside_bytes, ..Run::default() };
        let extent = args.messages.extent();
        let (sample, tally, cpu) = client.run(spec, |exposed| match args.rate {
            None => {
                let beside = Mover::start(client, args.beside, beside_bytes, exposed)?;
                let sample = closed_loop(client, bytes, extent, beside.moved.as_ref());
                report.notes.extend(beside.stop(client)?);
                sample
            }
            Some(rate) => open_loop(client, bytes, extent, rate),
        })?;
        let times = &sample.times;
        if let Some(rate) = args.rate {
            report.notes.extend(sample.note(bytes, rate));
        }
        // perftest's latency is half of the round trip; an open loop's is the whole.
        let halves = if args.rate.is_some() { 1.0 } else { 2.0 };
        report.rows.push(row(cells(bytes, times, halves), cpu, tally.cpu, times.len()));
    }
    if args.rate.is_some() {
        report
            .notes
            .push("times are round trips, each from the moment at which its message should have gone".to_owned());
    }
    Ok(())
}

/// perftest's columns.
pub(crate) fn cells(bytes: usize, times: &Histogram<u64>, divide: f64) -> Vec<Cell> {
    #[expect(clippy::cast_precision_loss, reason = "microseconds for people")]
    let us = |nanos: u64| nanos as f64 / 1e3 / divide;
    let time = |key: &str, title: &str, value: f64| Cell::real(key, title, value, 2);
    vec![
        Cell::count("bytes", "#bytes", bytes as u64),
        Cell::count("iterations", "#iterations", times.len()),
        time("t_min_us", "t_min[usec]", us(times.min())),
        time("t_max_us", "t_max[usec]", us(times.max())),
        time("t_typical_us", "t_typical[usec]", us(times.value_at_quantile(0.5))),
        time("t_avg_us", "t_avg[usec]", times.mean() / 1e3 / divide),
        time("t_stdev_us", "t_stdev[usec]", times.stdev() / 1e3 / divide),
        time("p99_us", "99% percentile[usec]", us(times.value_at_quantile(0.99))),
        time("p99_9_us", "99.9% percentile[usec]", us(times.value_at_quantile(0.999))),
    ]
}

pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, DAY_NANOS, 3).expect("1 to a day in 3 digits is within bounds")
}

pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What was measured.
struct Sample {
    times: Histogram<u64>,
    took: Duration,
    /// How much later than due a message went at worst: the sender's own fault.
    latest: Duration,
}

impl Sample {
    /// A rate that was not kept is no measurement of that rate.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    fn note(&self, bytes: usize, asked: f64) -> Option<String> {
        let rate = self.times.len() as f64 / self.took.as_secs_f64();
        let late = self.latest.as_secs_f64() * 1e6;
        let behind = rate < 0.99 * asked;
        behind.then(|| format!("{bytes} bytes: {rate:.1} of {asked} messages a second went, up to {late:.0} us late"))
    }
}

/// The state of a closed loop, in the handler.
struct Rounds {
    warm_up: u64,
    left: u64,
    until: Option<Duration>,
    began: Option<Instant>,
    sent: Instant,
    times: Histogram<u64>,
    took: Duration,
}

impl Rounds {
    /// A message is back; whether another is to be sent.
    fn on_echo(&mut self, now: Instant) -> bool {
        if self.warm_up > 0 {
            self.warm_up -= 1;
            if self.warm_up == 0 {
                self.began = Some(now);
            }
        } else {
            self.times.saturating_record(nanos(now - self.sent));
            self.left -= 1;
            let began = *self.began.get_or_insert(self.sent);
            self.took = now - began;
        }
        self.sent = now;
        self.left > 0 && self.until.is_none_or(|until| self.took < until)
    }
}

fn closed_loop(
    client: &Client,
    bytes: usize,
    extent: Extent,
    by_messages: Option<&Arc<AtomicU64>>,
) -> Result<Sample, Failure> {
    let payload = Bytes::from(vec![0x5a; bytes]);
    let rounds = Arc::new(Mutex::new(Rounds {
        warm_up: WARM_UP.min(most(extent)),
        left: most(extent),
        until: if let Extent::For(time) = extent { Some(time) } else { None },
        began: None,
        sent: Instant::now(),
        times: histogram(),
        took: Duration::ZERO,
    }));
    let (signal, over) = (client.node.signal.clone(), Arc::new(AtomicBool::new(false)));
    let member: &Member = &client.node.members[0];
    let server = client.server;
    {
        let (rounds, payload, signal, over) = (rounds.clone(), payload.clone(), signal.clone(), over.clone());
        let moved = by_messages.cloned();
        member.set(Box::new(move |worker, frame| {
            if let (MessageType::Ack, Some(moved)) = (frame.kind, &moved) {
                // The next one, as soon as this one is here.
                moved.fetch_add(1, Ordering::Relaxed);
                drop(worker.send(server, Bytes::new(), Bytes::new(), MessageType::Event, signal.clone()));
                return;
            }
            if lock(&rounds).on_echo(Instant::now()) {
                let sent = worker.send(server, Bytes::new(), payload.clone(), MessageType::Message, signal.clone());
                debug_assert!(matches!(sent, SendOutcome::Admitted), "one message at a time always has room");
            } else {
                over.store(true, Ordering::Release);
                signal.tell();
            }
        }));
    }
    let _progress = Progress::start(client.quiet, &format!("{bytes} bytes"), extent, &signal);
    if by_messages.is_some() {
        client.node.send(0, server, &Bytes::new(), MessageType::Event)?;
    }
    lock(&rounds).sent = Instant::now();
    client.node.send(0, server, &payload, MessageType::Message)?;
    client.node.wait("a message to come back", Some(PATIENCE), || over.load(Ordering::Acquire).then_some(()))?;
    member.clear();
    let rounds = lock(&rounds);
    Ok(Sample { times: rounds.times.clone(), took: rounds.took, latest: Duration::ZERO })
}

/// The state of an open loop, in the handler.
struct Due {
    /// When the messages on the way should have gone, oldest first: they come back in order.
    due: VecDeque<Instant>,
    times: Histogram<u64>,
}

fn open_loop(client: &Client, bytes: usize, extent: Extent, rate: f64) -> Result<Sample, Failure> {
    let payload = Bytes::from(vec![0x5a; bytes]);
    let due = Arc::new(Mutex::new(Due { due: VecDeque::new(), times: histogram() }));
    let signal: Arc<Signal> = client.node.signal.clone();
    let member = &client.node.members[0];
    {
        let (due, signal) = (due.clone(), signal.clone());
        member.set(Box::new(move |_, _| {
            let now = Instant::now();
            let mut state = lock(&due);
            if let Some(then) = state.due.pop_front() {
                state.times.saturating_record(nanos(now - then));
            }
            if state.due.is_empty() {
                signal.tell();
            }
        }));
    }
    let _progress = Progress::start(client.quiet, &format!("{bytes} bytes, open loop"), extent, &signal);
    let (began, mut latest, mut sent) = (Instant::now(), Duration::ZERO, 0u64);
    while sent < most(extent) {
        #[expect(clippy::cast_precision_loss, reason = "2^53 messages are not sent")]
        let offset = Duration::from_secs_f64(sent as f64 / rate);
        if matches!(extent, Extent::For(time) if offset >= time) {
            break;
        }
        let then = began + offset;
        wait_until(client, then)?;
        latest = latest.max(then.elapsed());
        lock(&due).due.push_back(then);
        // Not waiting for room: what waits in the library's queue waits on this message's clock.
        let worker = &member.worker;
        drop(worker.send(client.server, Bytes::new(), payload.clone(), MessageType::Message, signal.clone()));
        sent += 1;
    }
    client.node.wait("the last messages to come back", Some(PATIENCE), || lock(&due).due.is_empty().then_some(()))?;
    let took = began.elapsed();
    member.clear();
    let state = lock(&due);
    Ok(Sample { times: state.times.clone(), took, latest })
}

/// Polls, or sleeps, until a message is due.
fn wait_until(client: &Client, then: Instant) -> Result<(), Failure> {
    loop {
        let left = then.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return client.node.signal.check();
        }
        client.node.poll()?;
        if client.node.polling() != Polling::Manual && left > TOO_SHORT_TO_SLEEP {
            thread::sleep(left.saturating_sub(TOO_SHORT_TO_SLEEP).min(Duration::from_millis(100)));
            client.node.signal.check()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(warm_up: u64, left: u64, until: Option<Duration>, start: Instant) -> Rounds {
        Rounds { warm_up, left, until, began: None, sent: start, times: histogram(), took: Duration::ZERO }
    }

    #[test]
    fn rounds_of_the_warm_up_do_not_count() {
        let start = Instant::now();
        let mut rounds = rounds(2, 3, None, start);
        let echo = |rounds: &mut Rounds, at| rounds.on_echo(start + Duration::from_micros(at));
        assert!(echo(&mut rounds, 500) && echo(&mut rounds, 1000));
        assert_eq!(rounds.times.len(), 0);
        assert!(echo(&mut rounds, 1010) && echo(&mut rounds, 1030));
        assert!(!echo(&mut rounds, 1060), "three were asked for");
        assert_eq!((rounds.times.len(), rounds.took), (3, Duration::from_micros(60)));
        assert_eq!((rounds.times.min() / 1000, rounds.times.max() / 1000), (10, 30));
    }

    #[test]
    fn a_run_by_time_ends_after_it() {
        let start = Instant::now();
        let mut rounds = rounds(0, u64::MAX, Some(Duration::from_micros(100)), start);
        assert!(rounds.on_echo(start + Duration::from_micros(99)));
        assert!(!rounds.on_echo(start + Duration::from_micros(101)));
    }

    #[test]
    fn perftests_columns_hold_halves_of_round_trips() {
        let mut times = histogram();
        for micros in 1..=1000 {
            times.record(micros * 2000).unwrap();
        }
        let cells = cells(64, &times, 2.0);
        let figure = |key: &str| -> f64 { cells.iter().find(|cell| cell.key == key).unwrap().text.parse().unwrap() };
        let near = |key: &str, value: f64| assert!((figure(key) / value - 1.0).abs() < 0.01, "{key}: {}", figure(key));
        near("bytes", 64.0);
        near("iterations", 1000.0);
        near("t_min_us", 1.0);
        near("t_max_us", 1000.0);
        near("t_typical_us", 500.0);
        near("t_avg_us", 500.5);
        near("t_stdev_us", 288.7);
        near("p99_us", 990.0);
        near("p99_9_us", 999.0);
    }

    #[test]
    fn a_rate_that_was_not_kept_is_said() {
        let mut times = histogram();
        times.record_n(1, 50).unwrap();
        let sample = Sample { times, took: Duration::from_secs(1), latest: Duration::from_micros(7) };
        assert_eq!(sample.note(64, 50.0), None);
        assert_eq!(sample.note(64, 100.0).unwrap(), "64 bytes: 50.0 of 100 messages a second went, up to 7 us late");
    }
}
