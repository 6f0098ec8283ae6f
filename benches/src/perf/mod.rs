//! `verbs-perf`: perftest's habits over this library.
//!
//! Two processes, one without and one with the other's host name; perftest's flags and its table; granted values in the
//! header, not requested ones. What is measured goes through the library's public interface alone: a worker on each side,
//! whose handler answers, counts and times on the thread that polls.
//!
//! | module | holds |
//! |---|---|
//! | `args` | the command line |
//! | `control` | the TCP connection on which both sides meet, agree, and notice each other's end |
//! | `signal` | what all threads tell the one that waits |
//! | `node` | workers: opened, polled until something has happened |
//! | `client`, `serve` | the two sides |
//! | `latency`, `bandwidth`, `rma`, `connect`, `scale` | the tests |
//! | `beside` | what moves beside a measurement |
//! | `report` | the result as text, JSON and CSV |
//! | `progress` | what a long run shows meanwhile |
//! | `failure` | every way in which it ends early, and the exit statuses |

mod args;
mod bandwidth;
mod beside;
mod client;
mod connect;
mod control;
mod failure;
mod latency;
mod node;
mod progress;
mod report;
mod rma;
mod scale;
mod serve;
mod signal;

use std::{
    fmt, fs,
    io::{self, Write as _},
    process::ExitCode,
    sync::Arc,
};

use clap::Parser as _;

pub(crate) use self::{args::Cli, latency::histogram};
use self::{
    args::{Command, Common, TestArgs},
    failure::Failure,
    report::Report,
};
use crate::{
    compare::{compare, sweep},
    environment::Environment,
    ladder::ladder,
};

/// The program.
pub fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Test(args) => test(&args),
        Command::Compare(args) => end(compare(&args)),
        Command::Sweep(args) => end(sweep(&args)),
        Command::Ladder(args) => end(ladder(&args)),
    }
}

fn end<E: fmt::Display>(outcome: Result<(), E>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("verbs-perf: {error}");
            ExitCode::FAILURE
        }
    }
}

fn test(args: &TestArgs) -> ExitCode {
    let common = args.common();
    if let Some(warning) = Environment::read().slow_clock().filter(|_| !common.no_clock_warning) {
        eprintln!("verbs-perf: {warning}");
    }
    let outcome = match &common.server {
        // The header comes before the wait, so that one sees what is being measured.
        Some(server) => client::run(args, server, |report| {
            if !common.json && !common.csv {
                print!("{}", report.header_text());
                let _ = io::stdout().flush();
            }
        })
        .map(|report| (report, false)),
        None => serve::serve(args).map(|report| (report, true)),
    };
    match outcome.and_then(|(report, with_header)| write(common, &report, with_header)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("verbs-perf: {failure}");
            failure.exit_code()
        }
    }
}

fn write(common: &Common, report: &Report, with_header: bool) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::Output(Arc::new(error));
    let json = || format!("{:#}\n", report.json());
    if let Some(path) = &common.out_json {
        fs::write(path, json()).map_err(failed)?;
    }
    let text = if common.json {
        json()
    } else if common.csv {
        report.csv()
    } else if with_header {
        report.header_text() + &report.rows_text()
    } else {
        report.rows_text()
    };
    io::stdout().write_all(text.as_bytes()).map_err(failed)
}
