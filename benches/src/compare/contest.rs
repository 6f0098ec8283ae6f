//! What is compared with what, and the targets.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use super::tools::{Contender, Read, Ready};

/// Which way a figure should go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    Lower,
    Higher,
}

/// Contenders that do the same; ours is the first.
#[derive(Clone, Debug)]
pub(crate) struct Contest {
    pub(crate) key: String,
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    /// Of the ratio ours / the best of the rivals. `None`: one point of a sweep.
    pub(crate) target: Option<f64>,
    /// How many of those behind ours count for the ratio; the others are shown.
    pub(crate) rivals: usize,
    /// Where a sweep's point lies: the name of the sweep and the place on its axis.
    pub(crate) sweep: Option<(&'static str, u32)>,
    pub(crate) contenders: Vec<Contender>,
}

impl Contest {
    /// Pairs of it: a sweep is there for its shape, so one of each will do.
    pub(crate) fn rounds(&self, pairs: u32) -> u32 {
        if self.sweep.is_some() { 1 } else { pairs }
    }
}

/// Rates by size of message, and by depth of the send queue.
pub(crate) const BY_SIZE: &str = "size";
pub(crate) const BY_DEPTH: &str = "depth";
const SWEEP_SIZES: [u32; 6] = [64, 512, 4096, 8176, 32_768, 131_072];
const SWEEP_DEPTHS: [u32; 4] = [16, 31, 63, 127];
/// A rate run has so many times the messages of a latency run.
const RATE_ITERS: u64 = 4;
/// Larger messages are sent less often, so that no run moves more than this.
const RUN_MAX_BYTES: u64 = 32 << 20;
/// cmtime makes all at once, and a software device rejects many.
const CONNECTIONS: u64 = 8;

/// The longest active message of UCT over `rc_verbs`, and the longest that is sent with a copy here.
const UCT_MAX_BYTES: u32 = 8192;
const UCT_COPY_MAX_BYTES: u32 = 4096;

const PERF_PORT: u16 = 18_515;
const PERFTEST_PORT: u16 = 18_516;
const UCX_PORT: u16 = 18_517;
const CM_PORT: u16 = 18_518;
const HOST: &str = "127.0.0.1";

/// What all command lines have in common.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) perf: PathBuf,
    pub(crate) device: String,
    pub(crate) ib_port: u8,
    pub(crate) gid_index: u8,
    pub(crate) iters: u64,
    /// Two of the device's, for cmtime.
    pub(crate) addresses: Option<[IpAddr; 2]>,
}

impl Plan {
    /// One for each target.
    pub(crate) fn contests(&self) -> Vec<Contest> {
        let latency = |key: &str, title: &str, target, contenders| Contest {
            key: key.to_owned(),
            title: title.to_owned(),
            unit: "us",
            better: Better::Lower,
            target: Some(target),
            // ucx_perftest's median is of single calls, not of round trips: beside its average it means little.
            rivals: 1,
            sweep: None,
            contenders,
        };
        let rate = |key: &str, title: &str, bytes| Contest {
            key: key.to_owned(),
            title: title.to_owned(),
            unit: "messages/s",
            better: Better::Higher,
            target: Some(1.0),
            rivals: 2,
            sweep: None,
            contenders: self.rate(bytes, None).into_iter().chain([self.perf_rate_unpacked(bytes)]).collect(),
        };
        let connect = |addresses: [IpAddr; 2]| {
            let contenders = vec![
                self.perf_connect(CONNECTIONS),
                Self::cmtime(addresses),
                self.perf_connect(1).called("one after the other"),
            ];
            latency("connect", "connection set-up, all at once", 1.0, contenders)
        };
        let always = [
            latency(
                "latency-64",
                "64 B one way, busy poll",
                1.0,
                vec![self.perf_latency(&[]), self.ib_send_lat(&[]), self.ucx_latency()],
            ),
            latency(
                "latency-64-events",
                "64 B one way, events",
                1.05,
                vec![self.perf_latency(&["-e"]), self.ib_send_lat(&["-e"])],
            ),
            rate("rate-64", "64 B message rate", 64),
            rate("rate-8k", "8 KiB message rate", 8192),
        ];
        always.into_iter().chain(self.addresses.map(connect)).chain(self.bulk_contests()).collect()
    }

    /// For the report's plots.
    pub(crate) fn sweeps(&self) -> Vec<Contest> {
        let point = |sweep: &'static str, at: u32, title: String, contenders| Contest {
            key: format!("sweep-{sweep}-{at}"),
            title,
            unit: "messages/s",
            better: Better::Higher,
            target: None,
            rivals: usize::MAX,
            sweep: Some((sweep, at)),
            contenders,
        };
        let sizes = SWEEP_SIZES
            .map(|bytes| point(BY_SIZE, bytes, format!("message rate at {bytes} B"), self.rate(bytes, None)));
        let depths = SWEEP_DEPTHS.map(|depth| {
            let mut contenders = self.rate(64, Some(depth));
            contenders.retain(|contender| contender.read != Read::UcxRate); // it has no such setting
            point(BY_DEPTH, depth, format!("64 B message rate with {depth} work requests"), contenders)
        });
        sizes.into_iter().chain(depths).collect()
    }

    fn rate_iters(&self, bytes: u32) -> u64 {
        (self.iters * RATE_ITERS).min(RUN_MAX_BYTES / u64::from(bytes)).max(100)
    }

    /// Ours as the others do it: each message in a SEND of its own.
    fn perf_rate_unpacked(&self, bytes: u32) -> Contender {
        let iters = self.rate_iters(bytes);
        let words = ["--no-pack", "-s", &bytes.to_string(), "-n", &iters.to_string()].map(str::to_owned).to_vec();
        self.perf("send-bw", words, "msg_rate_mpps", iters).called("each alone")
    }

    fn rate(&self, bytes: u32, depth: Option<u32>) -> Vec<Contender> {
        let iters = self.rate_iters(bytes);
        let depth: Vec<String> = depth.into_iter().flat_map(|depth| ["-t".to_owned(), depth.to_string()]).collect();
        let (size, count) = (bytes.to_string(), iters.to_string());
        let words = |fixed: &[&str]| fixed.iter().map(|word| (*word).to_owned()).chain(depth.clone()).collect();
        let mut contenders = vec![
            self.perf("send-bw", words(&["-s", &size, "-n", &count]), "msg_rate_mpps", iters),
            self.perftest("ib_send_bw", words(&["-s", &size, "-n", &count]), Read::PerftestRate, iters),
        ];
        if bytes <= UCT_MAX_BYTES {
            contenders.push(self.ucx("am_bw", bytes, &count, Read::UcxRate, iters));
        }
        contenders
    }

    fn perf_latency(&self, more: &[&str]) -> Contender {
        let count = self.iters.to_string();
        let words = ["-s", "64", "-n", &count].iter().chain(more).map(|word| (*word).to_owned()).collect();
        self.perf("send-lat", words, "t_typical_us", self.iters)
    }

    /// cmtime makes its connections all at once, step by step, and tells each one's share.
    fn perf_connect(&self, at_once: u64) -> Contender {
        let (count, at_once) = (CONNECTIONS.to_string(), at_once.to_string());
        let words = ["-e", "-n", &count, "--at-once", &at_once].map(str::to_owned).to_vec();
        self.perf("connect", words, "t_typical_us", CONNECTIONS)
    }

    pub(super) fn perf(&self, test: &str, words: Vec<String>, figure: &'static str, messages: u64) -> Contender {
        let mut server = vec![self.perf.display().to_string(), test.to_owned(), "-F".to_owned(), "--quiet".to_owned()];
        server.extend(["-d".to_owned(), self.device.clone(), "-i".to_owned(), self.ib_port.to_string()]);
        server.extend(["-x".to_owned(), self.gid_index.to_string(), "-p".to_owned(), PERF_PORT.to_string()]);
        let mut client = server.clone();
        client.extend(words);
        client.extend(["--json".to_owned(), HOST.to_owned()]);
        let (ready, read) = (Ready::Tcp(PERF_PORT), Read::Perf(figure));
        Contender { name: "verbs-perf", server, client, ready, server_ends: true, read, messages }
    }

    fn ib_send_lat(&self, more: &[&str]) -> Contender {
        let count = self.iters.to_string();
        let words = ["-s", "64", "-n", &count].iter().chain(more).map(|word| (*word).to_owned()).collect();
        self.perftest("ib_send_lat", words, Read::PerftestLatency, self.iters)
    }

    pub(super) fn perftest(&self, program: &'static str, words: Vec<String>, read: Read, messages: u64) -> Contender {
        let mut server = vec![program.to_owned(), "-F".to_owned(), "-d".to_owned(), self.device.clone()];
        server.extend(["-i".to_owned(), self.ib_port.to_string(), "-x".to_owned(), self.gid_index.to_string()]);
        server.extend(["-p".to_owned(), PERFTEST_PORT.to_string()]);
        server.extend(words);
        let mut client = server.clone();
        client.push(HOST.to_owned());
        let ready = Ready::Tcp(PERFTEST_PORT);
        Contender { name: program, server, client, ready, server_ends: true, read, messages }
    }

    fn ucx_latency(&self) -> Contender {
        self.ucx("am_lat", 64, &self.iters.to_string(), Read::UcxLatency, self.iters)
    }

    /// UCT over `rc_verbs`: UCX 1.13's UCP layer aborts on Soft-RoCE. Where a copy costs more than a gather entry, without.
    fn ucx(&self, test: &str, bytes: u32, count: &str, read: Read, messages: u64) -> Contender {
        let layout = if bytes > UCT_COPY_MAX_BYTES { "zcopy" } else { "bcopy" };
        let bytes = &bytes.to_string();
        let device = format!("{}:{}", self.device, self.ib_port);
        let common = ["ucx_perftest", "-d", &device, "-x", "rc_verbs", "-p", &UCX_PORT.to_string()].map(str::to_owned);
        let more =
            ["-t", test, "-s", bytes, "-n", count, "-w", "50", "-D", layout, "-f", "-v", HOST].map(str::to_owned);
        let client = common.iter().cloned().chain(more).collect();
        let ready = Ready::Tcp(UCX_PORT);
        Contender { name: "ucx_perftest", server: common.to_vec(), client, ready, server_ends: true, read, messages }
    }

    fn cmtime(addresses: [IpAddr; 2]) -> Contender {
        let port = CM_PORT.to_string();
        let [one, two] = addresses.map(|address| address.to_string());
        let server = ["cmtime", "-b", &one, "-p", &port].map(str::to_owned).to_vec();
        let count = CONNECTIONS.to_string();
        let client = ["cmtime", "-b", &two, "-s", &one, "-p", &port, "-c", &count].map(str::to_owned).to_vec();
        Contender {
            name: "cmtime",
            server,
            client,
            ready: Ready::After(Duration::from_secs(1)),
            server_ends: false,
            read: Read::Cmtime,
            messages: CONNECTIONS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            perf: "/x/verbs-perf".into(),
            device: "rxe0".to_owned(),
            ib_port: 1,
            gid_index: 1,
            iters: 1000,
            addresses: Some([[10, 0, 0, 1].into(), [10, 0, 0, 2].into()]),
        }
    }

    #[test]
    fn every_contest_has_ours_first_and_another() {
        let plan = plan();
        for contest in plan.contests().iter().chain(&plan.sweeps()) {
            assert_eq!(contest.contenders[0].name, "verbs-perf", "{}", contest.key);
            assert!(contest.contenders.len() >= 2, "{}", contest.key);
            assert_eq!(contest.target.is_none(), contest.sweep.is_some(), "{}", contest.key);
        }
    }

    #[test]
    fn without_addresses_no_connections_are_compared() {
        let keys = |plan: Plan| plan.contests().into_iter().map(|contest| contest.key).collect::<Vec<_>>();
        assert!(keys(plan()).contains(&"connect".to_owned()));
        assert!(!keys(Plan { addresses: None, ..plan() }).contains(&"connect".to_owned()));
    }

    #[test]
    fn our_own_words_are_understood_by_our_own_command_line() {
        use clap::Parser as _;
        let plan = plan();
        for contest in plan.contests().iter().chain(&plan.sweeps()) {
            for words in [&contest.contenders[0].server, &contest.contenders[0].client] {
                let parsed = crate::perf::Cli::try_parse_from(words);
                assert!(parsed.is_ok(), "{words:?}: {}", parsed.unwrap_err());
            }
        }
    }

    #[test]
    fn no_run_moves_too_much_and_all_contenders_move_the_same() {
        for contest in plan().sweeps() {
            let messages: Vec<u64> = contest.contenders.iter().map(|contender| contender.messages).collect();
            assert!(messages.iter().all(|&count| count == messages[0] && count >= 100), "{}", contest.key);
        }
    }
}
