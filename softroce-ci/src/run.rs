//! `setup`, `run` and `shell`.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use crate::cli::{Global, On, RunArgs};
use crate::error::Error;
use crate::metadata::{Config, Workspace};
use crate::output::{Plain, Prefixed};
use crate::place::{self, Ready};
use crate::progress::Progress;
use crate::term;
use crate::testbed::{Job, Outcome, Testbed};

/// `cargo softroce setup`.
pub(crate) fn setup(global: &Global) -> Result<ExitCode, Error> {
    let progress = Progress::new(global.quiet);
    let ready = place::prepare(global, 1, &config()?.all_packages(), &progress)?;
    progress.clear();
    if global.json {
        println!("{}", serde_json::json!({ "via": ready.via.name(), "description": ready.describe() }));
    } else {
        progress.note(&format!("ready; the device will be had from {}", ready.describe()));
    }
    Ok(ExitCode::SUCCESS)
}

/// `cargo softroce run`.
pub(crate) fn run(global: &Global, args: RunArgs) -> Result<ExitCode, Error> {
    if args.peer.is_some() && args.hosts != 2 {
        return Err(Error::Config("--peer needs --hosts 2".to_owned()));
    }
    let config = config()?;
    let progress = Progress::new(global.quiet);
    let ready = place::prepare(global, args.hosts, &[], &progress)?;
    let mut testbed = start(&ready, global, args.hosts, &progress)?;
    let job = |host: usize, argv: Vec<OsString>| {
        let mut spec = place::command(&testbed, host, argv, global, &config.pass_env);
        spec.stdin = host == 0;
        Job { host, spec }
    };
    let jobs = match (args.hosts, args.peer, args.on) {
        (2, Some(line), _) => vec![job(0, args.command), job(1, ["sh", "-c", &line].map(OsString::from).into())],
        (2, None, On::Both) => vec![job(0, args.command.clone()), job(1, args.command)],
        (2, None, On::Second) => vec![job(1, args.command)],
        _ => vec![job(0, args.command)],
    };
    let input = jobs[0].spec.stdin;
    let timeout = timeout(global);
    let outcomes = if jobs.len() == 2 {
        testbed.run(jobs, timeout, input, &mut Prefixed::new(Plain))?
    } else {
        testbed.run(jobs, timeout, input, &mut Plain)?
    };
    conclude(&outcomes, global)
}

/// `cargo softroce shell`.
pub(crate) fn shell(global: &Global, command: Vec<OsString>) -> Result<ExitCode, Error> {
    let config = config()?;
    let progress = Progress::new(global.quiet);
    let ready = place::prepare(global, 1, &[], &progress)?;
    let mut testbed = start(&ready, global, 1, &progress)?;
    let shell = std::env::var_os("SHELL").filter(|shell| !shell.is_empty()).unwrap_or_else(|| "/bin/sh".into());
    let argv = if command.is_empty() { vec![shell] } else { command };
    let mut spec = place::command(&testbed, 0, argv, global, &config.pass_env);
    spec.pty = Some(term::size());
    progress.note(&format!("a shell with {}; its end ends everything", testbed.device));
    let raw = term::Raw::enter();
    let outcomes = testbed.run(vec![Job { host: 0, spec }], None, true, &mut Plain);
    drop(raw);
    conclude(&outcomes?, global)
}

/// What the workspace around us says, if there is one.
fn config() -> Result<Config, Error> {
    Ok(Workspace::find_if_any()?.map_or_else(Config::default, |workspace| workspace.config))
}

/// Starts a testbed in which the current directory is visible.
pub(crate) fn start(ready: &Ready, global: &Global, hosts: u8, progress: &Progress) -> Result<Testbed, Error> {
    let visible: Vec<_> = std::env::current_dir().into_iter().collect();
    ready.start(global, hosts, &visible, progress)
}

/// What a command may take, unless `--timeout` says otherwise.
const TIMEOUT_SECONDS: u64 = 3600;

/// `--timeout` as a duration.
pub(crate) fn timeout(global: &Global) -> Option<Duration> {
    limit(global.timeout.unwrap_or(TIMEOUT_SECONDS))
}

/// Seconds, of which 0 are no limit.
pub(crate) fn limit(seconds: u64) -> Option<Duration> {
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

/// The first status that is not zero; a command that we killed is an error of ours.
pub(crate) fn conclude(outcomes: &[Outcome], global: &Global) -> Result<ExitCode, Error> {
    if outcomes.contains(&Outcome::Abandoned) && !global.quiet {
        eprintln!("softroce: one host's command had failed, so the other one was ended 10 s later");
    }
    for outcome in outcomes {
        match outcome {
            Outcome::TimedOut => return Err(Error::Timeout(global.timeout.unwrap_or(TIMEOUT_SECONDS))),
            Outcome::Exited(0) | Outcome::Abandoned => {}
            Outcome::Exited(status) => {
                return Ok(ExitCode::from(u8::try_from(*status).unwrap_or(255)));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
