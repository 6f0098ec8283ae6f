//! What is compared of bulk memory: GET and PUT with perftest's READ and WRITE, and messages beside them.

use super::{
    contest::{Better, Contest, Plan},
    tools::{Contender, Read},
};

const MIB: u64 = 1 << 20;
/// No run moves more, but perftest does nothing less than five times.
const RUN_MAX_BYTES: u64 = 32 * MIB;
const LEAST_ITERS: u64 = 5;
/// A GET of a mebibyte takes as long as hundreds of messages.
const BESIDE_ITERS: u64 = 200;

impl Plan {
    /// One for each target of bulk memory.
    pub(crate) fn bulk_contests(&self) -> Vec<Contest> {
        let bandwidth = |key: &str, title: &str, ours: &str, theirs: &'static str, bytes: u64| Contest {
            key: key.to_owned(),
            title: title.to_owned(),
            unit: "MiB/s",
            better: Better::Higher,
            target: Some(0.98),
            rivals: 1,
            sweep: None,
            contenders: self.bandwidth(ours, theirs, bytes),
        };
        let latency = |key: &str, title: &str, target, contenders| Contest {
            key: key.to_owned(),
            title: title.to_owned(),
            unit: "us",
            better: Better::Lower,
            target: Some(target),
            rivals: 1,
            sweep: None,
            contenders,
        };
        vec![
            bandwidth("get-1m", "GET of 1 MiB", "read-bw", "ib_read_bw", MIB),
            bandwidth("get-64m", "GET of 64 MiB", "read-bw", "ib_read_bw", 64 * MIB),
            bandwidth("put-1m", "PUT of 1 MiB", "write-bw", "ib_write_bw", MIB),
            latency("get-latency", "GET of 64 B, events", 1.05, self.read_latency()),
            latency("beside-get", "64 B one way, events, p99 while GETs of 1 MiB run", 1.0, self.beside()),
        ]
    }

    fn bandwidth(&self, ours: &str, theirs: &'static str, bytes: u64) -> Vec<Contender> {
        let iters = (RUN_MAX_BYTES / bytes).min(self.iters).max(LEAST_ITERS);
        let words = || ["-s", &bytes.to_string(), "-n", &iters.to_string()].map(str::to_owned).to_vec();
        vec![
            self.perf(ours, words(), "bw_average_mib_s", iters),
            self.perftest(theirs, words(), Read::PerftestBandwidth, iters),
        ]
    }

    /// The bulk driver sleeps until an event, so that is what counts.
    fn read_latency(&self) -> Vec<Contender> {
        let count = self.iters.to_string();
        let words =
            |more: &[&str]| ["-s", "64", "-n", &count].iter().chain(more).map(|word| (*word).to_owned()).collect();
        let theirs = |more: &[&str]| self.perftest("ib_read_lat", words(more), Read::PerftestLatency, self.iters);
        vec![
            self.perf("read-lat", words(&[]), "t_typical_us", self.iters),
            theirs(&["-e"]),
            theirs(&[]).called("ib_read_lat (polled)"),
        ]
    }

    /// On a queue pair of their own, on the messages' own, and nothing beside.
    fn beside(&self) -> Vec<Contender> {
        let iters = self.iters.min(BESIDE_ITERS);
        let count = iters.to_string();
        let ours = |more: &[&str]| {
            let words = ["-e", "-s", "64", "-n", &count].iter().chain(more).map(|word| (*word).to_owned()).collect();
            self.perf("send-lat", words, "p99_us", iters)
        };
        vec![
            ours(&["--beside", "get"]),
            ours(&["--beside", "messages"]).called("one queue pair for both"),
            ours(&[]).called("idle"),
        ]
    }
}
