//! `verbs-perf compare`: this library beside perftest and UCX, in one run on one host.
//!
//! Figures of a shared or emulated machine mean nothing by themselves, ratios within one run do: each contest runs its
//! contenders in turn, pair after pair, each pair starting with another one, and tells the medians, the ratio, and how
//! far the pairs differ.
//!
//! | module | holds |
//! |---|---|
//! | `tools` | the contenders: their command lines, and how their output is read |
//! | `contest`, `bulk` | what is compared, and the targets |
//! | `runner` | one server and one client: started, awaited, their CPU time counted |
//! | `outcome` | samples, medians, ratios, spread |
//! | `sweep` | one setting of the library at several values |
//! | `page`, `chart` | the report as one HTML page |

mod bulk;
mod chart;
mod contest;
mod outcome;
mod page;
mod runner;
mod sweep;
mod tools;

use std::{fs, io, path::PathBuf};

use clap::Args;
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use self::sweep::{SweepArgs, sweep};
use self::{
    contest::{Contest, Plan},
    outcome::{Outcome, Results},
    runner::{RunError, run},
};
use crate::environment::Environment;

/// Times that a failed measurement is tried again: tools that bind a port or race with their server may fail once.
const TRIES: u32 = 3;

/// What to compare, and how thoroughly.
#[derive(Clone, Debug, Args)]
pub(crate) struct CompareArgs {
    /// Pairs of runs of each contest; with fewer than 5, no verdict is to be trusted
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pairs: u32,
    /// Messages of each latency run; a rate run has four times as many
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(100..))]
    iters: u64,
    /// RDMA device [default: that of `cargo softroce`, else the first]
    #[arg(short = 'd', long, value_name = "NAME")]
    device: Option<String>,
    /// Port of the device
    #[arg(short = 'i', long, value_name = "N", default_value_t = 1)]
    ib_port: u8,
    /// GID index of all contenders
    #[arg(short = 'x', long, value_name = "N", default_value_t = 1)]
    gid_index: u8,
    /// Two IP addresses of the device, for cmtime; without them the set-up of connections is not compared [default: those
    /// of `cargo softroce`, there]
    #[arg(long, value_name = "ADDRESS", num_args = 2)]
    addresses: Option<Vec<std::net::IpAddr>>,
    /// Only contests whose name contains this
    #[arg(long, value_name = "WORD")]
    only: Option<String>,
    /// Without the sweeps over sizes and queue depths
    #[arg(long)]
    no_sweeps: bool,
    /// Where report.html and report.json go [default: where `cargo softroce` keeps it, else here]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Why there is no comparison.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompareError {
    #[error("this host has no RDMA device (nothing in /sys/class/infiniband); try `cargo softroce bench`")]
    NoDevice,
    #[error("no contest is called `{0}`")]
    NoContest(String),
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error("the page cannot be drawn: {0}")]
    Chart(String),
    /// The other contests have their results, which are written.
    #[error("{failed} of {all} measurements failed; the first: {first}")]
    Failed { failed: usize, all: usize, first: String },
}

/// Runs all contests, prints the table, writes the report.
pub(crate) fn compare(args: &CompareArgs) -> Result<(), CompareError> {
    let io = |what: String| move |source| CompareError::Io { what, source };
    let plan = Plan {
        perf: std::env::current_exe().map_err(io("find this program".to_owned()))?,
        device: args.device.clone().or_else(device).ok_or(CompareError::NoDevice)?,
        ib_port: args.ib_port,
        gid_index: args.gid_index,
        iters: args.iters,
        addresses: args.addresses.clone().or_else(softroce_addresses).and_then(|both| both.try_into().ok()),
    };
    let mut contests = plan.contests();
    if !args.no_sweeps {
        contests.extend(plan.sweeps());
    }
    if let Some(word) = &args.only {
        contests.retain(|contest| contest.key.contains(word.as_str()));
        if contests.is_empty() {
            return Err(CompareError::NoContest(word.clone()));
        }
    }
    let results = Results {
        environment: Environment::read(),
        host_load: std::env::var("SOFTROCE_HOST_LOAD").ok(),
        device: plan.device.clone(),
        pairs: args.pairs,
        iters: args.iters,
        outcomes: measure_all(&contests, args.pairs),
    };
    print!("{}", table(&results));
    let dir = args.out.clone().or_else(|| std::env::var_os("SOFTROCE_SHARED").map(PathBuf::from));
    let dir = dir.unwrap_or_else(|| ".".into());
    let json = format!("{:#}\n", results.json());
    let html = page::page(&results, &json)?;
    for (name, text) in [("report.json", &json), ("report.html", &html)] {
        let path = dir.join(name);
        fs::write(&path, text).map_err(io(format!("write {}", path.display())))?;
    }
    eprintln!("verbs-perf: the report is report.html, its figures report.json, in {}", dir.display());
    results.failures()
}

/// What a device that `cargo softroce` made has; one that was there before has others.
fn softroce_addresses() -> Option<Vec<std::net::IpAddr>> {
    let made = std::env::var("SOFTROCE_VIA").is_ok_and(|via| via == "vm" || via == "module");
    made.then(|| vec![[10, 99, 0, 1].into(), [10, 99, 0, 2].into()])
}

fn device() -> Option<String> {
    let named = std::env::var("SOFTROCE_DEVICE").ok().filter(|name| !name.is_empty());
    named.or_else(|| {
        let mut names: Vec<String> = fs::read_dir("/sys/class/infiniband")
            .ok()?
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names.into_iter().next()
    })
}

fn measure_all(contests: &[Contest], pairs: u32) -> Vec<Outcome> {
    let all: u64 =
        contests.iter().map(|contest| contest.contenders.len() as u64 * u64::from(contest.rounds(pairs))).sum();
    let bar = ProgressBar::new(all);
    let hidden = bar.is_hidden();
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} ({eta} left)") {
        bar.set_style(style);
    }
    let mut outcomes = Vec::new();
    for contest in contests {
        if hidden {
            eprintln!("verbs-perf: {} of {all} measurements done; next: {}", bar.position(), contest.title);
        }
        let mut outcome = Outcome::new(contest);
        for pair in 0..contest.rounds(pairs) as usize {
            for turn in 0..contest.contenders.len() {
                let index = (pair + turn) % contest.contenders.len();
                let contender = &contest.contenders[index];
                bar.set_message(format!("{}: {}", contest.title, contender.name));
                outcome.add(index, attempt(|| run(contender)));
                bar.inc(1);
            }
        }
        outcomes.push(outcome);
    }
    bar.finish_and_clear();
    outcomes
}

fn attempt<T>(mut measure: impl FnMut() -> Result<T, RunError>) -> Result<T, RunError> {
    let mut tries = 1;
    loop {
        match measure() {
            // A tool that is not installed will not be so the next time.
            Err(error) if tries < TRIES && !matches!(error, RunError::Start { .. }) => tries += 1,
            other => return other,
        }
    }
}

/// One line a contest with a target.
fn table(results: &Results) -> String {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header([
        "measure",
        "median: ours",
        "median: others",
        "ratio",
        "pairs' ratios",
        "target",
        "",
        "CPU us: ours",
        "CPU us: others",
    ]);
    for outcome in results.outcomes.iter().filter(|outcome| outcome.target.is_some()) {
        table.add_row(outcome.columns());
    }
    let load =
        results.host_load.as_ref().map_or_else(String::new, |load| format!("; load of the machine below: {load}"));
    let environment = &results.environment;
    format!(
        "{} pairs of {} messages on {}, Linux {}, {} x {}, {}{load}\nratio: ours / the best of the others; CPU: user and \
         system time of both processes, each message\n{table}\n",
        results.pairs,
        results.iters,
        results.device,
        environment.kernel,
        environment.cpus,
        environment.cpu,
        environment.accelerator.words(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_measurement_is_tried_again_but_not_for_ever() {
        let mut calls = 0;
        let failed: Result<(), _> = attempt(|| {
            calls += 1;
            Err(RunError::Unreadable { name: "x", said: String::new() })
        });
        assert_eq!((failed.is_err(), calls), (true, TRIES));
        let mut calls = 0;
        let _: Result<(), _> = attempt(|| {
            calls += 1;
            Err(RunError::Start { program: "x".to_owned(), source: io::Error::from(io::ErrorKind::NotFound) })
        });
        assert_eq!(calls, 1, "what is not installed stays so");
    }
}
