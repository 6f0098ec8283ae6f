//! The results: printed as they come, or as JSON at the end.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use verbs_transport::{GidType, PeerDescription, Worker};

use crate::{Fabric, lead::micros, problem::Problem, serve::rnr_count};

/// Everything that the demo found.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// `passed` or `failed`.
    pub(crate) verdict: &'static str,
    /// Why it failed.
    pub(crate) because: Option<String>,
    pub(crate) connection: Option<Connection>,
    pub(crate) sizes: Vec<SizeRow>,
    pub(crate) latency: Option<Latency>,
    pub(crate) stream: Option<StreamResult>,
    pub(crate) counts: Option<Counts>,
    /// Messages whose number and checksum were checked at the other end.
    pub(crate) messages_checked: u64,
    pub(crate) seconds: f64,
}

/// What connects the two processes.
#[derive(Debug, Serialize)]
pub(crate) struct Connection {
    pub(crate) device: String,
    pub(crate) port: u8,
    pub(crate) gid: String,
    pub(crate) gid_index: u8,
    pub(crate) gid_type: &'static str,
    /// Device, port and GID, and why they were chosen.
    pub(crate) chosen: String,
    pub(crate) remote_gid: Option<String>,
    pub(crate) address_bytes: usize,
    pub(crate) connected_in_ms: f64,
    pub(crate) path_mtu_bytes: Option<u32>,
    pub(crate) inline_granted_bytes: Option<u32>,
    pub(crate) inline_used_bytes: Option<u32>,
    pub(crate) send_bytes: Option<u32>,
    pub(crate) window_credits: Option<u16>,
    pub(crate) peer_window_credits: Option<u16>,
    pub(crate) eager_ceiling_bytes: Option<usize>,
}

/// One message there and back.
#[derive(Debug, Serialize)]
pub(crate) struct SizeRow {
    pub(crate) bytes: usize,
    pub(crate) note: &'static str,
    pub(crate) sends_inline: u64,
    pub(crate) sends_copied: u64,
    pub(crate) round_trip_us: f64,
}

/// Round trips, in microseconds.
#[derive(Debug, Serialize)]
pub(crate) struct Latency {
    pub(crate) round_trips: u64,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p99_9_us: f64,
    pub(crate) max_us: f64,
}

/// Many messages both ways at once.
#[derive(Debug, Serialize)]
pub(crate) struct StreamResult {
    pub(crate) messages_each_way: u64,
    pub(crate) payload_bytes: usize,
    pub(crate) seconds: f64,
    pub(crate) messages_per_second_each_way: f64,
}

/// What both sides counted.
#[derive(Debug, Serialize)]
pub(crate) struct Counts {
    pub(crate) first: SideCounts,
    pub(crate) second: SideCounts,
}

/// What one side counted from start to end.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SideCounts {
    pub(crate) frames_sent: u64,
    pub(crate) sends_inline: u64,
    pub(crate) sends_copied: u64,
    pub(crate) sends_packed: u64,
    pub(crate) credits_received: u64,
    pub(crate) pure_grants_sent: u64,
    pub(crate) pure_grants_received: u64,
    pub(crate) credit_stalls: u64,
    pub(crate) pings: u64,
    pub(crate) epochs: u64,
    pub(crate) malformed: u64,
    pub(crate) failed: u64,
    /// RNR errors of the device's port meanwhile; `None`: it does not count them.
    pub(crate) rnr: Option<u64>,
}

impl Connection {
    pub(crate) fn new(
        device: &str,
        description: &PeerDescription,
        address_bytes: usize,
        connected_in: Duration,
    ) -> Self {
        let (local, limits) = (description.local, description.limits);
        Self {
            device: device.to_owned(),
            port: local.port,
            gid: local.gid.to_string(),
            gid_index: local.gid_index,
            gid_type: match local.gid_type {
                GidType::Ib => "InfiniBand",
                GidType::RoceV1 => "RoCE v1",
                GidType::RoceV2 => "RoCE v2",
            },
            chosen: description.path.clone(),
            remote_gid: description.remote.map(|remote| remote.gid.to_string()),
            address_bytes,
            connected_in_ms: micros(connected_in) / 1e3,
            path_mtu_bytes: description.mtu_bytes,
            inline_granted_bytes: description.inline_granted_bytes,
            inline_used_bytes: limits.map(|limits| limits.inline_bytes),
            send_bytes: limits.map(|limits| limits.send_bytes),
            window_credits: limits.map(|limits| limits.tx_window),
            peer_window_credits: limits.map(|limits| limits.rx_window),
            eager_ceiling_bytes: description.max_message_bytes,
        }
    }
}

impl Latency {
    pub(crate) fn of(nanos: &Histogram<u64>) -> Self {
        let us = |quantile| micros(Duration::from_nanos(nanos.value_at_quantile(quantile)));
        Self {
            round_trips: nanos.len(),
            p50_us: us(0.5),
            p90_us: us(0.9),
            p99_us: us(0.99),
            p99_9_us: us(0.999),
            max_us: micros(Duration::from_nanos(nanos.max())),
        }
    }
}

impl StreamResult {
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    pub(crate) fn new(messages_each_way: u64, payload_bytes: usize, took: Duration) -> Self {
        let seconds = took.as_secs_f64();
        let messages_per_second_each_way = messages_each_way as f64 / seconds;
        Self { messages_each_way, payload_bytes, seconds, messages_per_second_each_way }
    }
}

impl SideCounts {
    pub(crate) fn of(worker: &Worker<Fabric>, rnr_before: Option<u64>) -> Self {
        let stats = worker.stats();
        Self {
            frames_sent: stats.sent.total(),
            sends_inline: stats.links.sends_inline,
            sends_copied: stats.links.sends_copied,
            sends_packed: stats.links.sends_packed,
            credits_received: stats.links.credits_received,
            pure_grants_sent: stats.links.pure_grants,
            pure_grants_received: stats.links.pure_grants_received,
            credit_stalls: stats.links.credit_stalls,
            pings: stats.links.pings,
            epochs: stats.epochs_begun,
            malformed: stats.links.malformed,
            failed: stats.failed + stats.rejected + stats.admissions_failed,
            rnr: rnr_count(worker).zip(rnr_before).map(|(after, before)| after.saturating_sub(before)),
        }
    }
}

impl Report {
    /// What is wrong although everything arrived.
    pub(crate) fn find_faults(&self) -> Option<String> {
        let counts = self.counts.as_ref()?;
        for (who, side) in [("first", &counts.first), ("second", &counts.second)] {
            let unwanted = [
                (side.epochs.saturating_sub(1), "connections more than one were begun"),
                (side.malformed, "malformed frames came"),
                (side.failed, "messages failed"),
                (side.rnr.unwrap_or(0), "RNR errors were counted at the port: a message found no receive posted"),
            ];
            if let Some((count, what)) = unwanted.into_iter().find(|(count, _)| *count > 0) {
                return Some(format!("at the {who} process {count} {what}"));
            }
        }
        None
    }
}

/// Prints for people, or, for machines, nothing before the end.
pub(crate) struct Printer {
    json: bool,
}

impl Printer {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    fn heading(&self, text: &str) {
        if !self.json {
            println!("\n{text}");
        }
    }

    fn line(&self, name: &str, value: impl std::fmt::Display) {
        if !self.json {
            println!("  {name:<15} {value}");
        }
    }

    pub(crate) fn begin(&self, remote: bool) {
        let where_ = if remote { "two machines" } else { "this host" };
        if !self.json {
            println!("Two processes on {where_}, messages over RC queue pairs");
        }
    }

    pub(crate) fn connection(&self, it: &Connection) {
        self.heading("Connection");
        // "rxe0 port 1 (why), gid_index 1 ... (why)": the name and the two reasons.
        let (port, gid) = it.chosen.split_once(", gid_index ").unwrap_or((&it.chosen, ""));
        self.line("device", port);
        let (gid, why) = gid.split_once(" (").unwrap_or((gid, ""));
        self.line("GID", format!("index {gid}"));
        self.line("", why.trim_end_matches(')'));
        let remote = it.remote_gid.as_deref().unwrap_or("unknown");
        self.line("peer", format!("{remote}, found by an address of {} bytes", it.address_bytes));
        self.line("connected", format!("in {:.1} ms, proven by a PING over the QP", it.connected_in_ms));
        self.line("path MTU", known(it.path_mtu_bytes, "B"));
        let granted = known(it.inline_granted_bytes, "B");
        self.line("inline", format!("{granted} granted, used up to {}", known(it.inline_used_bytes, "B")));
        self.line("longest SEND", known(it.send_bytes, "B"));
        let (to_send, to_receive) = (known(it.window_credits, "credits"), known(it.peer_window_credits, "credits"));
        self.line("window", format!("{to_send} to send, {to_receive} to receive"));
        self.line("eager ceiling", it.eager_ceiling_bytes.map_or("unknown".to_owned(), size));
    }

    pub(crate) fn sizes_begin(&self) {
        self.heading("One message of each size, there and back, CRC-32 checked at both ends");
    }

    pub(crate) fn size(&self, row: &SizeRow) {
        let way = match (row.sends_inline, row.sends_copied) {
            (1, 0) => "inline".to_owned(),
            (0, 1) => "out of a slab".to_owned(),
            (inline, copied) => format!("{} SENDs", grouped(inline + copied)),
        };
        self.line(&size(row.bytes), format!("{way:<14} {:>9}   {}", time(row.round_trip_us), row.note).trim_end());
    }

    pub(crate) fn latency_begin(&self, count: u32, bytes: usize) {
        self.heading(&format!("{} round trips of {bytes} B, one at a time", grouped(count.into())));
    }

    pub(crate) fn latency(&self, it: &Latency) {
        let all =
            [("p50", it.p50_us), ("p90", it.p90_us), ("p99", it.p99_us), ("p99.9", it.p99_9_us), ("max", it.max_us)];
        for (name, us) in all {
            self.line(name, format!("{:>9}", time(us)));
        }
    }

    pub(crate) fn stream_begin(&self, count: u32, bytes: usize) {
        self.heading(&format!("{} messages of {bytes} B each way, both ways at once", grouped(count.into())));
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate for people")]
    pub(crate) fn stream(&self, it: &StreamResult) {
        self.line("checked", "all arrived once, in order, with a good CRC-32, at both ends");
        let rate = grouped(it.messages_per_second_each_way.round() as u64);
        self.line("rate", format!("{rate} messages a second each way ({:.2} s)", it.seconds));
    }

    pub(crate) fn counts(&self, counts: &Counts) {
        if self.json {
            return;
        }
        println!("\n{:<34}{:>12}{:>12}", "Counts", "first", "second");
        let row = |name: &str, pick: fn(&SideCounts) -> u64| {
            println!("  {name:<32}{:>12}{:>12}", grouped(pick(&counts.first)), grouped(pick(&counts.second)));
        };
        row("messages sent", |side| side.frames_sent);
        row("SENDs inline", |side| side.sends_inline);
        row("SENDs out of a slab", |side| side.sends_copied);
        row("SENDs of several messages", |side| side.sends_packed);
        row("credits given back by the peer", |side| side.credits_received);
        row("pure grants sent", |side| side.pure_grants_sent);
        row("pure grants received", |side| side.pure_grants_received);
        row("waits for a credit", |side| side.credit_stalls);
        row("PINGs", |side| side.pings);
        row("connections begun (epochs)", |side| side.epochs);
        let rnr = |side: &SideCounts| side.rnr.map_or("not counted".to_owned(), grouped);
        println!("  {:<32}{:>12}{:>12}", "RNR errors of the port", rnr(&counts.first), rnr(&counts.second));
    }

    /// The last line, and the JSON.
    pub(crate) fn verdict(&self, report: &mut Report, problem: Option<&Problem>) {
        report.verdict = if problem.is_some() { "failed" } else { "passed" };
        report.because = problem.map(|problem| match problem.hint() {
            None => problem.to_string(),
            Some(hint) => format!("{problem}; {hint}"),
        });
        let line = match &report.because {
            Some(because) => format!("demo: FAILED because {because}"),
            None => format!(
                "demo: PASSED ({} messages, each checked at the other end; {:.1} s)",
                grouped(report.messages_checked),
                report.seconds
            ),
        };
        if self.json {
            println!("{}", serde_json::to_string_pretty(report).expect("plain data"));
            eprintln!("{line}");
        } else {
            println!("\n{line}");
        }
    }
}

fn known(value: Option<impl Into<u64>>, unit: &str) -> String {
    value.map_or("unknown".to_owned(), |value| format!("{} {unit}", grouped(value.into())))
}

/// Bytes, in MiB where that is exact.
fn size(bytes: usize) -> String {
    const MIB: usize = 1 << 20;
    if bytes >= MIB && bytes % MIB == 0 {
        format!("{} MiB", bytes / MIB)
    } else {
        format!("{} B", grouped(bytes as u64))
    }
}

fn time(us: f64) -> String {
    if us < 1e3 { format!("{us:.1} µs") } else { format!("{:.2} ms", us / 1e3) }
}

/// 10,000.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
