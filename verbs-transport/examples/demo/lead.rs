//! The first process: asks, measures, checks.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::timeout;
use verbs_transport::{Config, Inbound, InstanceId, MessageType, PeerDescription, Received, Worker};

use crate::{
    Fabric,
    args::Args,
    problem::{PATIENCE, Problem, Trouble},
    report::{Connection, Counts, Latency, Printer, Report, SideCounts, SizeRow, StreamResult},
    second::Second,
    serve::{SMALL_BYTES, flood, rnr_count},
    talk::{Checker, HEADER_BYTES, Header, Line, Op, inverted, next, pattern},
};

/// Bytes that the library puts in front of the first SEND of a message.
const FRAME_BYTES: usize = verbs_transport::proto::frame::HEADER_BYTES;

/// Longer than any wait here.
const HOUR_NANOS: u64 = 3_600_000_000_000;

/// Round trips before those that count.
const WARM_UP: u32 = 50;

/// A connected first process.
pub(crate) struct Lead {
    worker: Worker<Fabric>,
    inbound: Inbound,
    peer: InstanceId,
    requests: Line,
    answers: Checker,
    trouble: Arc<Trouble>,
    rnr_before: Option<u64>,
    address_bytes: usize,
    connected_in: Duration,
}

impl Lead {
    /// Starts a worker, learns the other's address, connects.
    pub(crate) async fn begin(
        args: &Args,
        config: Config,
        fabric: Fabric,
        second: &mut Second,
    ) -> Result<Self, Problem> {
        let trouble = Arc::new(Trouble::default());
        let (death, teller) = (second.death(), trouble.clone());
        tokio::spawn(async move { teller.report(death.await) });

        let worker = Worker::new(config, fabric)?;
        let inbound = worker.start().await?;
        let rnr_before = rnr_count(&worker);
        let bar = bar(args, 0, "waiting for the second process");
        let address = second.address().await?;
        bar.finish_and_clear();
        let peer = worker.register(&address)?;
        let begun = Instant::now();
        let silence = |_| Problem::Silence { after: PATIENCE, waiting_for: "the connection".to_owned() };
        timeout(PATIENCE, worker.ensure_connected(peer)).await.map_err(silence)??;
        let connected_in = begun.elapsed();
        let requests = Line::new(&worker, peer, MessageType::Message, &trouble);
        let address_bytes = address.as_bytes().len();
        let answers = Checker::default();
        Ok(Self { worker, inbound, peer, requests, answers, trouble, rnr_before, address_bytes, connected_in })
    }

    /// All parts of the demo, each printed when it is done.
    pub(crate) async fn run(&mut self, args: &Args, printer: &Printer, report: &mut Report) -> Result<(), Problem> {
        // From here on the other can answer.
        self.ask(Op::Introduce, 0, self.worker.address().as_bytes().clone()).await?;
        let description = self.describe()?;
        printer.connection(report.connection.insert(self.connection(&description)));

        printer.sizes_begin();
        for (bytes, note) in sizes(&description) {
            let row = self.one_size(bytes, note).await?;
            printer.size(&row);
            report.sizes.push(row);
        }

        printer.latency_begin(args.round_trips, SMALL_BYTES);
        let bar = self::bar(args, args.round_trips.into(), "round trips");
        let latency = self.round_trips(args.round_trips, &bar).await?;
        bar.finish_and_clear();
        printer.latency(report.latency.insert(latency));

        printer.stream_begin(args.messages, SMALL_BYTES);
        let bar = self::bar(args, args.messages.into(), "messages");
        let (stream, items) = self.both_ways(args.messages.into(), &bar).await?;
        bar.finish_and_clear();
        printer.stream(report.stream.insert(stream));

        let (_, answer) = self.ask(Op::Counts, 0, Bytes::new()).await?;
        let unreadable = |error: serde_json::Error| Problem::Protocol(error.to_string());
        let second: SideCounts = serde_json::from_slice(&answer.payload).map_err(unreadable)?;
        let first = SideCounts::of(&self.worker, self.rnr_before);
        printer.counts(report.counts.insert(Counts { first, second }));
        report.messages_checked = self.requests.sent() + self.answers.taken() + items;
        self.bye().await?;
        report.find_faults().map_or(Ok(()), |fault| Err(Problem::Finding(fault)))
    }

    fn describe(&self) -> Result<PeerDescription, Problem> {
        self.worker.describe(self.peer).ok_or_else(|| Problem::Protocol("the peer is not known any more".to_owned()))
    }

    fn connection(&self, description: &PeerDescription) -> Connection {
        Connection::new(self.worker.fabric().device_name(), description, self.address_bytes, self.connected_in)
    }

    /// Sends a request and takes its answer.
    async fn ask(&mut self, op: Op, arg: u64, payload: Bytes) -> Result<(Header, Received), Problem> {
        self.requests.send(op, arg, payload).await?;
        self.answer(op).await
    }

    async fn answer(&mut self, op: Op) -> Result<(Header, Received), Problem> {
        let waiting_for = match op {
            Op::Tally => "the count of the messages",
            _ => "an answer of the second process",
        };
        let frame = next(&mut self.inbound.response, &self.trouble, waiting_for).await?;
        let header = self.answers.check(&frame)?;
        if header.op != op {
            return Err(Problem::Protocol(format!("{:?} in answer to {op:?}", header.op)));
        }
        Ok((header, frame))
    }

    async fn echo(&mut self, payload: Bytes) -> Result<Duration, Problem> {
        let begun = Instant::now();
        let (_, answer) = self.ask(Op::Echo, 0, payload.clone()).await?;
        let took = begun.elapsed();
        if answer.payload != inverted(&payload) {
            return Err(Problem::Protocol(format!("the answer to {} bytes holds other bytes", payload.len())));
        }
        Ok(took)
    }

    /// One message there and back, and which way it went.
    async fn one_size(&mut self, bytes: usize, note: &'static str) -> Result<SizeRow, Problem> {
        let before = self.worker.stats().links;
        let took = self.echo(pattern(bytes, bytes as u64)).await?;
        let after = self.worker.stats().links;
        Ok(SizeRow {
            bytes,
            note,
            sends_inline: after.sends_inline - before.sends_inline,
            sends_copied: after.sends_copied - before.sends_copied,
            round_trip_us: micros(took),
        })
    }

    async fn round_trips(&mut self, count: u32, bar: &ProgressBar) -> Result<Latency, Problem> {
        let mut times: Histogram<u64> = Histogram::new_with_bounds(1, HOUR_NANOS, 3).expect("good bounds");
        for round in 0..WARM_UP + count {
            let took = self.echo(pattern(SMALL_BYTES, round.into())).await?;
            if round >= WARM_UP {
                times.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
                bar.inc(1);
            }
        }
        Ok(Latency::of(&times))
    }

    /// `count` messages each way at once.
    async fn both_ways(&mut self, count: u64, bar: &ProgressBar) -> Result<(StreamResult, u64), Problem> {
        let begun = Instant::now();
        self.requests.send(Op::Flood, count, Bytes::new()).await?;
        let mut items = Checker::default();
        let receiving = async {
            for item in 1..=count {
                let frame = next(&mut self.inbound.message, &self.trouble, "the second process's messages").await?;
                let header = items.check(&frame)?;
                if (header.op, header.arg) != (Op::Item, item) || frame.peer != self.peer {
                    return Err(Problem::Protocol(format!("{:?} {} in place of item {item}", header.op, header.arg)));
                }
                bar.inc(1);
            }
            Ok(())
        };
        let ((), received) = tokio::join!(flood(&mut self.requests, count, &self.trouble), receiving);
        received?;
        let (tally, _) = self.answer(Op::Tally).await?;
        let took = begun.elapsed();
        if tally.arg != count {
            return Err(Problem::Protocol(format!("{} of {count} messages were counted", tally.arg)));
        }
        Ok((StreamResult::new(count, SMALL_BYTES, took), items.taken()))
    }

    /// Says good-bye and waits until it was heard: the other then closes the connection.
    async fn bye(&mut self) -> Result<(), Problem> {
        self.requests.send(Op::Bye, 0, Bytes::new()).await?;
        let heard = async {
            while self.worker.stats().connections > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let silence = |_| Problem::Silence { after: PATIENCE, waiting_for: "the end of the connection".to_owned() };
        timeout(PATIENCE, heard).await.map_err(silence)?;
        self.worker.shutdown().await;
        Ok(())
    }
}

/// The payload sizes that are worth a look, smallest first.
fn sizes(description: &PeerDescription) -> Vec<(usize, &'static str)> {
    let overhead = FRAME_BYTES + HEADER_BYTES;
    let mut sizes = vec![(0, "nothing but a header"), (1, "")];
    if let Some(limits) = description.limits {
        if let Some(inline) = (limits.inline_bytes as usize).checked_sub(overhead).filter(|inline| *inline > 1) {
            sizes.extend([(inline, "the most that goes inline"), (inline + 1, "one more")]);
        }
        if let Some(slab) = (limits.send_bytes as usize).checked_sub(overhead) {
            sizes.extend([(slab, "the most that one slab holds"), (slab + 1, "one more")]);
        }
    }
    sizes.push((1 << 20, ""));
    let max = description.max_message_bytes.unwrap_or(usize::MAX).saturating_sub(HEADER_BYTES);
    sizes.retain(|(bytes, _)| *bytes <= max);
    sizes
}

/// Progress of one part, on a terminal only.
fn bar(args: &Args, length: u64, what: &'static str) -> ProgressBar {
    if args.json {
        return ProgressBar::hidden();
    }
    let bar = if length == 0 { ProgressBar::new_spinner() } else { ProgressBar::new(length) };
    let style = if length == 0 { "  {spinner} {msg}" } else { "  {bar:40} {human_pos}/{human_len} {msg}, {eta} left" };
    bar.set_style(ProgressStyle::with_template(style).expect("a good template"));
    bar.set_message(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Microseconds with a fraction.
pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
