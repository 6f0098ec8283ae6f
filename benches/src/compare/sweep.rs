//! `verbs-perf sweep`: one setting of the library at several values, each in turn, against its default.

use clap::{Args, ValueEnum};
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use serde_json::{Value, json};

use super::{
    CompareError, attempt,
    contest::Plan,
    device,
    outcome::{digits, median},
    runner::run,
    tools::Contender,
};
use crate::environment::Environment;

#[derive(Clone, Debug, Args)]
pub(crate) struct SweepArgs {
    /// What to vary
    #[arg(value_enum)]
    setting: Setting,
    /// Turns: each runs every value once
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    turns: u32,
    /// Messages of each run; runs of bulk memory have a hundredth
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(100..))]
    iters: u64,
    /// RDMA device [default: that of `cargo softroce`, else the first]
    #[arg(short = 'd', long, value_name = "NAME")]
    device: Option<String>,
    /// Port of the device
    #[arg(short = 'i', long, value_name = "N", default_value_t = 1)]
    ib_port: u8,
    /// GID index
    #[arg(short = 'x', long, value_name = "N", default_value_t = 1)]
    gid_index: u8,
    /// The result as JSON
    #[arg(long)]
    json: bool,
}

/// One number of the library's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Setting {
    /// `inline_threshold_bytes`: latency of messages that go inline, and that are copied
    Inline,
    /// `signal_every`: rate of 64 B messages
    Signal,
    /// `Progress::SpinThenPark`: latency of 64 B messages
    Spin,
    /// Bytes of a slab: rate of messages of 8 KiB
    Slab,
    /// `send_wrs`: rate of 64 B messages
    Depth,
    /// `BulkConfig::chunk_bytes`: bandwidth of GETs of 8 MiB
    Chunk,
    /// `BulkConfig::rd_atomic_max`: the same
    Reads,
}

/// One value, and what it is compared with.
struct Point {
    label: String,
    words: Vec<String>,
    /// Index of the point that stands for the default.
    against: usize,
}

/// What is measured at each point.
struct Sweep {
    test: &'static str,
    figure: &'static str,
    unit: &'static str,
    messages: u64,
    points: Vec<Point>,
}

impl Setting {
    fn sweep(self, iters: u64) -> Sweep {
        let latency = |points| Sweep { test: "send-lat", figure: "t_typical_us", unit: "us", messages: iters, points };
        let rate = |points| Sweep {
            test: "send-bw",
            figure: "msg_rate_mpps",
            unit: "messages/s",
            messages: 4 * iters,
            points,
        };
        let gets = |points| Sweep {
            test: "read-bw",
            figure: "bw_average_mib_s",
            unit: "MiB/s",
            messages: (iters / 100).max(4),
            points,
        };
        match self {
            Self::Inline => {
                let sizes = ["64", "128", "212", "400"];
                let pair = |(index, size): (usize, &str)| {
                    let point = |label: &str, inline: &str| Point {
                        label: format!("{size} B, {label}"),
                        words: words(&["-s", size, "-I", inline]),
                        against: 2 * index,
                    };
                    [point("inline", "504"), point("copied", "0")]
                };
                latency(sizes.into_iter().enumerate().flat_map(pair).collect())
            }
            Self::Signal => rate(values("-Q", &["1", "4", "8", "16", "31"], 3, &["-s", "64"])),
            Self::Spin => {
                let mut points = values("--spin", &["5", "20", "50", "200"], 1, &["-s", "64", "--progress", "spin"]);
                let without = Point { label: "none (event)".to_owned(), words: words(&["-s", "64", "-e"]), against: 1 };
                points.push(without);
                latency(points)
            }
            Self::Slab => rate(values("--slab", &["2048", "4096", "8192", "8320", "16384"], 2, &["-s", "8192"])),
            Self::Depth => rate(values("-t", &["16", "31", "63", "127", "255"], 2, &["-s", "64"])),
            Self::Chunk => {
                let fixed = &["-s", "8388608"];
                gets(values("--chunk", &["65536", "131072", "262144", "524288", "1048576", "4194304"], 3, fixed))
            }
            Self::Reads => gets(values("-o", &["1", "2", "4", "16", "64"], 3, &["-s", "8388608"])),
        }
    }
}

fn words(list: &[&str]) -> Vec<String> {
    list.iter().map(|word| (*word).to_owned()).collect()
}

/// A flag at each of these, of which one is the library's default.
fn values(flag: &str, list: &[&str], default: usize, fixed: &[&str]) -> Vec<Point> {
    let point = |(index, value): (usize, &&str)| Point {
        label: format!("{value}{}", if index == default { " (default)" } else { "" }),
        words: words(&[fixed, &[flag, value]].concat()),
        against: default,
    };
    list.iter().enumerate().map(point).collect()
}

/// Runs it and prints the table.
pub(crate) fn sweep(args: &SweepArgs) -> Result<(), CompareError> {
    let plan = Plan {
        perf: std::env::current_exe()
            .map_err(|source| CompareError::Io { what: "find this program".to_owned(), source })?,
        device: args.device.clone().or_else(device).ok_or(CompareError::NoDevice)?,
        ib_port: args.ib_port,
        gid_index: args.gid_index,
        iters: args.iters,
        addresses: None,
    };
    let sweep = args.setting.sweep(args.iters);
    let environment = Environment::read();
    let contenders: Vec<Contender> = sweep.points.iter().map(|point| sweep.contender(&plan, point)).collect();
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); contenders.len()];
    let (mut failed, mut first) = (0, String::new());
    for turn in 0..args.turns as usize {
        for step in 0..contenders.len() {
            // Each turn begins with another value.
            let index = (turn + step) % contenders.len();
            match attempt(|| run(&contenders[index])) {
                Ok(sample) => samples[index].push(sample.figures.value),
                Err(error) => {
                    failed += 1;
                    first = if first.is_empty() { error.to_string() } else { first };
                }
            }
        }
    }
    let medians: Vec<Option<f64>> = samples.iter().map(|samples| median(samples.clone())).collect();
    if args.json {
        println!("{:#}", sweep.json(&samples, &medians, &environment));
    } else {
        let load = f64::from(environment.load_percent) / 100.0;
        let host = std::env::var("SOFTROCE_HOST_LOAD").map_or_else(|_| String::new(), |load| format!(", below {load}"));
        println!(
            "{} turns of {} {}; Linux {}, {}, load {load:.2}{host}\n{}",
            args.turns,
            sweep.messages,
            sweep.test,
            environment.kernel,
            environment.accelerator.words(),
            sweep.table(&samples, &medians)
        );
    }
    let all = contenders.len() * args.turns as usize;
    if failed > 0 { Err(CompareError::Failed { failed, all, first }) } else { Ok(()) }
}

impl Sweep {
    fn contender(&self, plan: &Plan, point: &Point) -> Contender {
        let mut words = point.words.clone();
        words.extend(["-n".to_owned(), self.messages.to_string()]);
        plan.perf(self.test, words, self.figure, self.messages)
    }

    fn ratio(&self, medians: &[Option<f64>], index: usize) -> Option<f64> {
        Some(medians[index]? / medians[self.points[index].against]?)
    }

    fn table(&self, samples: &[Vec<f64>], medians: &[Option<f64>]) -> Table {
        let mut table = Table::new();
        table.load_preset(ASCII_MARKDOWN);
        table.set_header(["value", &format!("median [{}]", self.unit), "least to most", "to the default"]);
        for (index, point) in self.points.iter().enumerate() {
            let bounds = samples[index]
                .iter()
                .fold((f64::INFINITY, 0.0_f64), |(least, most), &value| (least.min(value), most.max(value)));
            table.add_row([
                point.label.clone(),
                medians[index].map_or_else(|| "failed".to_owned(), digits),
                format!("{} to {}", digits(bounds.0), digits(bounds.1)),
                self.ratio(medians, index).map_or_else(String::new, |ratio| format!("{ratio:.3}")),
            ]);
        }
        table
    }

    fn json(&self, samples: &[Vec<f64>], medians: &[Option<f64>], environment: &Environment) -> Value {
        let points: Vec<Value> = (0..self.points.len())
            .map(|index| {
                json!({
                    "value": self.points[index].label,
                    "words": self.points[index].words,
                    "median": medians[index],
                    "samples": samples[index],
                    "ratio": self.ratio(medians, index),
                })
            })
            .collect();
        json!({ "test": self.test, "unit": self.unit, "environment": environment, "points": points })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn every_point_is_understood_by_our_own_command_line_and_compared_with_one_of_its_sweep() {
        let plan = Plan {
            perf: "/x/verbs-perf".into(),
            device: "rxe0".to_owned(),
            ib_port: 1,
            gid_index: 1,
            iters: 1000,
            addresses: None,
        };
        for setting in Setting::value_variants() {
            let sweep = setting.sweep(1000);
            assert!(sweep.points.len() >= 4, "{setting:?}");
            for point in &sweep.points {
                let contender = sweep.contender(&plan, point);
                let parsed = crate::perf::Cli::try_parse_from(&contender.client);
                assert!(parsed.is_ok(), "{:?}: {}", contender.client, parsed.unwrap_err());
                assert!(point.against < sweep.points.len());
            }
        }
    }

    #[test]
    fn ratios_are_to_the_default() {
        let sweep = Setting::Signal.sweep(100);
        let medians = [Some(5.0), None, Some(8.0), Some(10.0), Some(11.0)];
        assert_eq!(sweep.ratio(&medians, 0), Some(0.5));
        assert_eq!(sweep.ratio(&medians, 1), None);
        assert_eq!(sweep.ratio(&medians, 3), Some(1.0));
    }
}
