//! The command line: perftest's letters where perftest has them.

use std::{fmt, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use verbs_transport::Mtu;

use crate::{
    compare::{CompareArgs, SweepArgs},
    ladder::LadderArgs,
};

/// Latency, bandwidth and set-up time over RC queue pairs, in the manner of perftest.
///
/// Start it without SERVER on one side and with the server's name on the other. The client's numbers hold for both
/// sides; the server needs no more than -d, -i, -x and -p. Exit status: 0 done, 2 a number that cannot be, 3 the device,
/// 4 no server, 5 a server of another version or for another test, 6 the other side or the connection ended, or fell
/// silent, 1 else.
#[derive(Clone, Debug, Parser)]
#[command(name = "verbs-perf", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    #[command(flatten)]
    Test(TestArgs),
    /// This library beside perftest and UCX on this host, in pairs, with a report
    Compare(CompareArgs),
    /// One setting of the library at several values, in turn, against its default
    Sweep(SweepArgs),
    /// The same round trip with one layer more on each rung, from blocking sockets to this library on a device
    Ladder(LadderArgs),
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum TestArgs {
    /// Half of the round trip of a message and its echo
    SendLat(SendLat),
    /// Messages one way, as many as go
    SendBw(SendBw),
    /// Memory of the server into ours, one GET after the other
    ReadLat(Rma),
    /// The same, several at once
    ReadBw(Rma),
    /// Ours into the server's: half of a PUT with notification and the same back
    WriteLat(Rma),
    /// PUTs, several at once
    WriteBw(Rma),
    /// From the first send to a peer to the proof that the connection carries messages
    Connect(Connect),
    /// Many peers of one worker: set-up, message rate and memory by their number
    Scale(Scale),
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Test {
    SendLat,
    SendBw,
    ReadLat,
    ReadBw,
    WriteLat,
    WriteBw,
    Connect,
    Scale,
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SendLat => "send-lat",
            Self::SendBw => "send-bw",
            Self::ReadLat => "read-lat",
            Self::ReadBw => "read-bw",
            Self::WriteLat => "write-lat",
            Self::WriteBw => "write-bw",
            Self::Connect => "connect",
            Self::Scale => "scale",
        })
    }
}

impl Test {
    /// Bytes of a message without -s and -a: perftest's, and for `scale`, where peers are many, few.
    pub(crate) fn default_bytes(self) -> usize {
        match self {
            Self::SendLat | Self::ReadLat | Self::WriteLat | Self::Connect => 2,
            Self::SendBw | Self::ReadBw | Self::WriteBw => 65_536,
            Self::Scale => 64,
        }
    }

    /// Whether it is about GETs and PUTs, and not messages.
    pub(crate) fn is_rma(self) -> bool {
        matches!(self, Self::ReadLat | Self::ReadBw | Self::WriteLat | Self::WriteBw)
    }
}

/// What every test has.
#[derive(Clone, Debug, Args)]
pub(crate) struct Common {
    /// The server's host; without it this is the server
    pub(crate) server: Option<String>,
    /// RDMA device, as `rdma link` prints it [default: the best there is]
    #[arg(short = 'd', long = "ib-dev", value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Port of the device, from 1 [default: the first that is ACTIVE]
    #[arg(short = 'i', long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) ib_port: Option<u8>,
    /// Index in the port's GID table [default: chosen; the header says which]
    #[arg(short = 'x', long, value_name = "N")]
    pub(crate) gid_index: Option<u8>,
    /// TCP port on which the two sides meet
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = 18515)]
    pub(crate) port: u16,
    /// Path MTU at most, in bytes [default: the port's]
    #[arg(short = 'm', long, value_name = "BYTES", value_parser = mtu)]
    pub(crate) mtu: Option<Mtu>,
    /// Sleeps until an event tells of completions, in place of polling without pause
    #[arg(short = 'e', long)]
    pub(crate) events: bool,
    /// Who polls [default: manual; event with -e]
    #[arg(long, value_enum, value_name = "WAY", conflicts_with = "events")]
    pub(crate) progress: Option<Polling>,
    /// How long `--progress spin` polls before it sleeps, in microseconds
    #[arg(long, value_name = "US", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) spin: u64,
    /// Messages up to so many bytes go inline, if the device grants it [default: the library's]
    #[arg(short = 'I', long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(0..=948))]
    pub(crate) inline_size: Option<u32>,
    /// Work requests in the send queue [default: the library's]
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=16_384))]
    pub(crate) tx_depth: Option<u32>,
    /// One completion for so many work requests [default: the library's]
    #[arg(short = 'Q', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) cq_mod: Option<u32>,
    /// Bytes of each slab, that is, of the longest SEND, with 8 for the frame's header [default: the library's]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(256..=1 << 20))]
    pub(crate) slab: Option<u32>,
    /// Messages that have to wait go one to a SEND, as all others do, and not several [default: several]
    #[arg(long)]
    pub(crate) no_pack: bool,
    /// No warning of a CPU clock that is scaled
    #[arg(short = 'F', long = "CPU-freq")]
    pub(crate) no_clock_warning: bool,
    /// The result as JSON on standard output
    #[arg(long, conflicts_with = "csv")]
    pub(crate) json: bool,
    /// The result as CSV on standard output
    #[arg(long)]
    pub(crate) csv: bool,
    /// The JSON into this file as well
    #[arg(long, value_name = "FILE")]
    pub(crate) out_json: Option<PathBuf>,
    /// No progress on standard error
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// Of messages.
#[derive(Clone, Debug, Args)]
pub(crate) struct Messages {
    /// Bytes in a message
    #[arg(short = 's', long, value_name = "BYTES", conflicts_with = "all")]
    pub(crate) size: Option<usize>,
    /// Powers of two from 2 bytes to 8 MiB
    #[arg(short = 'a', long)]
    pub(crate) all: bool,
    /// Messages of each size [default: 1000]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "duration")]
    pub(crate) iters: Option<u64>,
    /// Seconds for each size, in place of a number of messages
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) duration: Option<u64>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct SendLat {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) messages: Messages,
    /// Open loop: so many messages a second, whether or not the earlier ones came back. Times are whole round trips, each
    /// from the moment at which its message should have been sent
    #[arg(long, value_name = "PER_SECOND", value_parser = rate)]
    pub(crate) rate: Option<f64>,
    /// Meanwhile the same connection moves bulk memory from the server: by GETs on a queue pair of their own, or in messages
    /// on the one that is measured
    #[arg(long, value_enum, value_name = "WAY", conflicts_with = "rate")]
    pub(crate) beside: Option<Beside>,
    /// Bytes of each of those
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20, requires = "beside", value_parser = clap::value_parser!(u32).range(1..=8 << 20))]
    pub(crate) beside_size: u32,
}

/// What moves beside the messages that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Beside {
    /// GETs, one after the other
    Get,
    /// Messages of the server's, one after the other
    Messages,
}

/// Of reads and writes.
#[derive(Clone, Debug, Args)]
pub(crate) struct Rma {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) messages: Messages,
    /// READs of the queue pair at once, at most [default: the library's]
    #[arg(short = 'o', long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) outs: Option<u8>,
    /// Bytes of one READ or WRITE, into which transfers are cut [default: the library's]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(4096..=1 << 30))]
    pub(crate) chunk: Option<u32>,
    /// Transfers at once, in the bandwidth tests
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) at_once: u32,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct SendBw {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) messages: Messages,
    /// Queue pairs, each of a worker of its own
    #[arg(short = 'q', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub(crate) qps: u32,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct Connect {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Connections
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) iters: u64,
    /// So many of them at once, each to another worker of the server: all are begun, then awaited. Times are each
    /// connection's share, as cmtime tells them. -n is rounded up to whole rounds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(AT_ONCE_MAX)))]
    pub(crate) at_once: u32,
}

/// Connections that `connect` makes at once at most: each takes a worker of the server.
pub(crate) const AT_ONCE_MAX: u32 = 64;

#[derive(Clone, Debug, Args)]
pub(crate) struct Scale {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) messages: Messages,
    /// Peers at most; measured at 1, 2, 4 and so on
    #[arg(short = 'q', long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub(crate) qps: u32,
}

/// Who polls the completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Polling {
    /// The thread that measures, without pause, as perftest does
    Manual,
    /// A thread of the worker, without pause
    BusyPoll,
    /// A task that polls for some microseconds (`--spin`) before it sleeps
    Spin,
    /// A task that sleeps until an event comes
    Event,
}

impl Polling {
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Manual => "polled by the caller (manual)",
            Self::BusyPoll => "polled by a thread (busy-poll)",
            Self::Spin => "spins, then sleeps (spin)",
            Self::Event => "sleeps until an event (event)",
        }
    }
}

impl TestArgs {
    pub(crate) fn common(&self) -> &Common {
        match self {
            Self::SendLat(SendLat { common, .. })
            | Self::SendBw(SendBw { common, .. })
            | Self::ReadLat(Rma { common, .. })
            | Self::ReadBw(Rma { common, .. })
            | Self::WriteLat(Rma { common, .. })
            | Self::WriteBw(Rma { common, .. })
            | Self::Connect(Connect { common, .. })
            | Self::Scale(Scale { common, .. }) => common,
        }
    }

    pub(crate) fn test(&self) -> Test {
        match self {
            Self::SendLat(_) => Test::SendLat,
            Self::SendBw(_) => Test::SendBw,
            Self::ReadLat(_) => Test::ReadLat,
            Self::ReadBw(_) => Test::ReadBw,
            Self::WriteLat(_) => Test::WriteLat,
            Self::WriteBw(_) => Test::WriteBw,
            Self::Connect(_) => Test::Connect,
            Self::Scale(_) => Test::Scale,
        }
    }

    /// Workers of the server.
    pub(crate) fn servers(&self) -> u32 {
        match self {
            Self::Connect(Connect { at_once, .. }) => *at_once,
            _ => 1,
        }
    }

    /// Client workers, each with one queue pair.
    pub(crate) fn workers(&self) -> u32 {
        match self {
            Self::SendBw(SendBw { qps, .. }) | Self::Scale(Scale { qps, .. }) => *qps,
            _ => 1,
        }
    }

    /// How workers are polled. The bulk driver is a task that sleeps until an event; a thread that polls the messages, of
    /// which there are none in its tests, would only take its processor.
    pub(crate) fn polling(&self) -> Polling {
        let common = self.common();
        if self.test().is_rma() { common.progress.unwrap_or(Polling::Event) } else { common.polling() }
    }

    /// The READ or WRITE tests' own numbers.
    pub(crate) fn rma(&self) -> Option<&Rma> {
        match self {
            Self::ReadLat(args) | Self::ReadBw(args) | Self::WriteLat(args) | Self::WriteBw(args) => Some(args),
            _ => None,
        }
    }

    /// Whether workers have bulk memory.
    pub(crate) fn has_bulk(&self) -> bool {
        matches!(self, Self::SendLat(SendLat { beside: Some(Beside::Get), .. })) || self.test().is_rma()
    }
}

impl Common {
    pub(crate) fn polling(&self) -> Polling {
        self.progress.unwrap_or(if self.events { Polling::Event } else { Polling::Manual })
    }
}

/// When a run is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Messages(u64),
    For(Duration),
}

impl Messages {
    /// The sizes to be measured; `default` without -s and -a.
    pub(crate) fn sizes(&self, default: usize) -> Vec<usize> {
        if self.all {
            return (1..=23).map(|power| 1 << power).collect();
        }
        vec![self.size.unwrap_or(default)]
    }

    pub(crate) fn extent(&self) -> Extent {
        match self.duration {
            Some(seconds) => Extent::For(Duration::from_secs(seconds)),
            None => Extent::Messages(self.iters.unwrap_or(1000)),
        }
    }
}

fn mtu(text: &str) -> Result<Mtu, String> {
    match text {
        "256" => Ok(Mtu::B256),
        "512" => Ok(Mtu::B512),
        "1024" => Ok(Mtu::B1024),
        "2048" => Ok(Mtu::B2048),
        "4096" => Ok(Mtu::B4096),
        _ => Err("a path MTU is 256, 512, 1024, 2048 or 4096".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.01..=10_000_000.0).contains(&rate) => Ok(rate),
        _ => Err("a rate is 0.01 to 10000000 messages a second".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<TestArgs, clap::Error> {
        let words = std::iter::once("verbs-perf").chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| match cli.command {
            Command::Test(test) => test,
            Command::Compare(_) | Command::Sweep(_) | Command::Ladder(_) => panic!("{line}"),
        })
    }

    #[test]
    fn the_definition_is_sound() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn perftests_letters_mean_what_they_mean_there() {
        let args =
            parse("send-lat -d rxe0 -i 1 -x 3 -s 64 -n 500 -p 18600 -t 127 -Q 8 -I 220 -m 1024 -e -F host").unwrap();
        let TestArgs::SendLat(lat) = args else { panic!() };
        let common = &lat.common;
        assert_eq!((common.device.as_deref(), common.ib_port, common.gid_index), (Some("rxe0"), Some(1), Some(3)));
        assert_eq!(
            (common.port, common.tx_depth, common.cq_mod, common.inline_size),
            (18600, Some(127), Some(8), Some(220))
        );
        assert_eq!((common.mtu, common.polling(), common.no_clock_warning), (Some(Mtu::B1024), Polling::Event, true));
        assert_eq!((common.server.as_deref(), lat.messages.sizes(2)), (Some("host"), vec![64]));
        assert_eq!(lat.messages.extent(), Extent::Messages(500));
    }

    #[test]
    fn defaults_are_perftests() {
        let TestArgs::SendBw(bw) = parse("send-bw").unwrap() else { panic!() };
        assert_eq!((bw.common.port, bw.qps, bw.common.server.as_deref()), (18515, 1, None));
        assert_eq!((bw.common.polling(), bw.messages.extent()), (Polling::Manual, Extent::Messages(1000)));
        let TestArgs::SendLat(lat) = parse("send-lat -a -D 2").unwrap() else { panic!() };
        assert_eq!(lat.messages.extent(), Extent::For(Duration::from_secs(2)));
        let sizes = lat.messages.sizes(2);
        assert_eq!((sizes.first(), sizes.last(), sizes.len()), (Some(&2), Some(&(8 << 20)), 23));
    }

    #[test]
    fn reads_and_writes_have_perftests_letters() {
        let args = parse("read-bw -d rxe0 -x 1 -s 1048576 -n 20 -o 4 host").unwrap();
        assert_eq!((args.test(), args.polling(), args.has_bulk()), (Test::ReadBw, Polling::Event, true));
        let rma = args.rma().unwrap();
        assert_eq!((rma.outs, rma.at_once, rma.messages.sizes(2)), (Some(4), 8, vec![1 << 20]));
        let args = parse("send-lat --beside get host").unwrap();
        assert_eq!((args.polling(), args.has_bulk()), (Polling::Manual, true));
        assert!(!parse("send-lat host").unwrap().has_bulk());
    }

    #[test]
    fn nonsense_is_refused_with_the_range() {
        for (line, says) in [
            ("send-lat -s 1 -a host", "--all"),
            ("send-lat -n 5 -D 2 host", "--duration"),
            ("send-lat -n 0 host", "0"),
            ("send-bw -q 201 host", "1..=200"),
            ("send-bw -m 1500 host", "256, 512, 1024, 2048 or 4096"),
            ("send-lat -i 0", "0"),
            ("send-lat --rate 0 host", "0.01"),
            ("send-lat --rate nan host", "0.01"),
            ("send-lat --json --csv host", "--csv"),
            ("send-lat -e --progress manual host", "--events"),
            ("read-lat -o 0 host", "0"),
            ("write-bw --chunk 100 host", "4096"),
            ("send-lat --beside get --rate 5 host", "--rate"),
            ("send-lat --beside-size 5 host", "--beside"),
        ] {
            let error = parse(line).err().unwrap_or_else(|| panic!("{line} was taken"));
            assert_eq!(error.exit_code(), 2, "{line}");
            assert!(error.to_string().contains(says), "{line}: {error}");
        }
    }
}
