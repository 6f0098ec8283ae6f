//! `test`: host-side tests on this host, the others on Soft-RoCE, as many as possible in one boot.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::artifacts::{self, Binary};
use crate::cli::{Global, TestArgs, ViaArg};
use crate::error::Error;
use crate::klog::{Severity, severity};
use crate::metadata::{Package, Where, Workspace, cargo};
use crate::output::{AllToStderr, Output, Plain};
use crate::place::{self, Ready};
use crate::progress::Progress;
use crate::report::{Counting, Counts, Report, Row};
use crate::run;
use crate::setup;
use crate::testbed::{Job, Outcome, Testbed};
use crate::wire::ExecSpec;

/// After this many guests that crashed or hung, the rest is given up.
const LOST_MAX: u32 = 5;
/// What one binary may take, unless `--timeout` says otherwise: several may stand still before CI gives up on the whole.
const BINARY_TIMEOUT_SECONDS: u64 = 900;

/// What all parts of a test run need.
struct Run<'a> {
    global: &'a Global,
    args: &'a TestArgs,
    workspace: &'a Workspace,
    progress: &'a Progress,
    output: Box<dyn Output>,
    report: Report,
}

/// `cargo softroce test`.
pub(crate) fn test(global: &Global, args: &TestArgs) -> Result<ExitCode, Error> {
    let progress = Progress::new(global.quiet);
    let workspace = Workspace::find()?;
    let packages = &workspace.config.all_packages();
    let ready = if args.host_only {
        setup::packages(None, packages, &progress)?; // building needs them, too
        None
    } else {
        Some(place::prepare(global, 1, packages, &progress)?)
    };
    progress.clear();
    progress.note("building the tests");
    let binaries = artifacts::tests(&workspace, args.release, global.quiet)?;
    let output: Box<dyn Output> = if global.json { Box::new(AllToStderr) } else { Box::new(Plain) };
    let report = Report::default();
    let mut run = Run { global, args, workspace: &workspace, progress: &progress, output, report };
    // What ran is reported even when the rest cannot.
    let result = run.all(&binaries, ready.as_ref());
    if let Some(filter) = args.filter.as_ref().filter(|_| !run.report.ran_any()) {
        progress.note(&format!("no test ran: none has `{filter}` in its name"));
    }
    if global.json {
        println!("{}", run.report.json());
        eprint!("\n{}", run.report.table());
    } else {
        print!("\n{}", run.report.table());
    }
    result?;
    Ok(if run.report.ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn no_device_tests(workspace: &Workspace) -> String {
    let config = &workspace.config;
    if config.device_tests.is_empty() && config.two_host_tests.is_empty() {
        return "no device tests: [workspace.metadata.softroce] has no device-tests or two-host-tests".to_owned();
    }
    let patterns = [&config.device_tests[..], &config.two_host_tests].concat().join(", ");
    format!("no device tests: no test target matches {patterns}")
}

impl Run<'_> {
    fn all(&mut self, binaries: &[Binary], ready: Option<&Ready>) -> Result<(), Error> {
        let of = |place: Where| -> Vec<&Binary> {
            let those = binaries.iter().filter(|binary| binary.place == place);
            those.collect()
        };
        if !self.args.device_only {
            self.host(&of(Where::Host))?;
        }
        let Some(ready) = ready else { return Ok(()) };
        let (one, two) = (of(Where::Device), of(Where::TwoHosts));
        if one.is_empty() && two.is_empty() {
            self.progress.note(&no_device_tests(self.workspace));
        }
        self.device(ready, 1, &one)?;
        if matches!(self.global.via, ViaArg::Device | ViaArg::Module) {
            for binary in two {
                self.cannot_run(binary, "two hosts need --via vm");
            }
        } else if !two.is_empty() {
            let ready = place::prepare(self.global, 2, &[], self.progress)?;
            self.device(&ready, 2, &two)?;
        }
        Ok(())
    }

    /// A test that cannot run has failed: nothing is skipped.
    fn cannot_run(&mut self, binary: &Binary, why: &str) {
        self.report.rows.push(Row {
            name: binary.name.clone(),
            place: binary.place,
            problem: why.to_owned(),
            counts: Counts::default(),
            time: Duration::ZERO,
            kernel: Vec::new(),
        });
    }

    fn host(&mut self, binaries: &[&Binary]) -> Result<(), Error> {
        let mut testbed = Testbed::bare()?;
        for binary in binaries {
            let mut env = environment();
            env.extend(test_env(binary));
            let argv = self.argv(binary.executable.clone().into());
            let spec = ExecSpec { argv, env, cwd: binary.dir.clone().into(), sweep: true, ..ExecSpec::default() };
            self.one(&mut testbed, &binary.name, Where::Host, spec)?;
        }
        if !self.workspace.packages.iter().any(Package::doctests) {
            return Ok(());
        }
        let cargo = cargo().get_program().to_owned();
        let mut argv: Vec<OsString> = vec![cargo, "test".into(), "--workspace".into(), "--doc".into()];
        if !self.workspace.config.features.is_empty() {
            argv.push("--features".into());
            argv.push(self.workspace.config.features.join(",").into());
        }
        if self.args.release {
            argv.push("--release".into());
        }
        let rest = self.argv("--".into());
        argv.extend(rest);
        let mut env = environment();
        env.push(("RUST_BACKTRACE".into(), "1".into()));
        let cwd = self.workspace.root.clone().into();
        let spec = ExecSpec { argv, env, cwd, sweep: true, ..ExecSpec::default() };
        self.one(&mut testbed, "documentation", Where::Host, spec)
    }

    fn device(&mut self, ready: &Ready, hosts: u8, binaries: &[&Binary]) -> Result<(), Error> {
        let mut testbed = None;
        let mut lost = 0;
        for (index, binary) in binaries.iter().enumerate() {
            let there = testbed.take().map_or_else(|| self.start(ready, hosts), Ok);
            let mut there = match there {
                Ok(testbed) => testbed,
                Err(error) => {
                    for binary in &binaries[index..] {
                        self.cannot_run(binary, "no device");
                    }
                    return Err(error);
                }
            };
            let argv = self.argv(binary.executable.clone().into());
            let mut spec = place::command(&there, 0, argv, self.global, &self.workspace.config.pass_env);
            spec.env.extend(test_env(binary));
            spec.cwd = binary.dir.clone().into();
            spec.sweep = true;
            match self.one(&mut there, &binary.name, binary.place, spec) {
                Ok(()) => testbed = Some(there),
                Err(error @ (Error::Crashed { .. } | Error::Hung { .. } | Error::Qemu { .. })) if lost < LOST_MAX => {
                    eprintln!("cargo softroce: {error}");
                    lost += 1; // its row is there; the others get a new guest
                }
                Err(error) => {
                    for binary in &binaries[index + 1..] {
                        self.cannot_run(binary, "not run: too many guests were lost, or stopped");
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn start(&mut self, ready: &Ready, hosts: u8) -> Result<Testbed, Error> {
        let mut visible: Vec<PathBuf> = vec![self.workspace.root.clone(), self.workspace.target_dir.clone()];
        visible.extend(std::env::current_dir());
        let testbed = ready.start(self.global, hosts, &visible, self.progress)?;
        self.report.device = format!("{} ({})", testbed.device, ready.describe());
        Ok(testbed)
    }

    fn argv(&self, first: OsString) -> Vec<OsString> {
        let filter = self.args.filter.iter().map(OsString::from);
        std::iter::once(first).chain(filter).chain(self.args.args.iter().cloned()).collect()
    }

    /// Runs one binary and adds its row, whatever happens to it.
    fn one(&mut self, testbed: &mut Testbed, name: &str, place: Where, spec: ExecSpec) -> Result<(), Error> {
        self.progress.clear();
        self.progress.note(&format!("running {name} ({})", place.name()));
        let start = Instant::now();
        let mut counting = Counting::new(&mut *self.output);
        let seconds = self.global.timeout.unwrap_or(BINARY_TIMEOUT_SECONDS);
        let result = testbed.run(vec![Job { host: 0, spec }], run::limit(seconds), false, &mut counting);
        let counts = counting.into_counts();
        let log = if result.is_ok() { testbed.take_kernel_log() } else { Ok(Vec::new()) };
        let (log, error) = match (log, result) {
            (Ok(log), Ok(outcomes)) => (log, Ok(outcomes)),
            (Err(error), _) | (Ok(_), Err(error)) => (Vec::new(), Err(error)),
        };
        let problem = problem(&error, &counts, &log, seconds);
        let worth = if self.global.verbose { Severity::Noise } else { Severity::Warning };
        let kernel = log.into_iter().filter(|line| severity(line) >= worth).collect();
        let row = Row { name: name.to_owned(), place, problem, counts, time: start.elapsed(), kernel };
        self.report.rows.push(row);
        error.map(|_| ())
    }
}

fn problem(result: &Result<Vec<Outcome>, Error>, counts: &Counts, log: &[String], timeout: u64) -> String {
    let bug = log.iter().find(|line| severity(line) == Severity::Bug);
    match (result, bug) {
        (Err(Error::Crashed { .. }), _) => "the kernel crashed".to_owned(),
        (Err(Error::Hung { .. }), _) => "the guest hung".to_owned(),
        (Err(_), _) => "the guest was lost".to_owned(),
        (Ok(outcomes), bug) => match (outcomes.first(), bug) {
            (Some(Outcome::TimedOut), _) if counts.running.is_empty() => format!("killed after {timeout} s"),
            (Some(Outcome::TimedOut), _) => format!("killed after {timeout} s, in {}", counts.running.join(", ")),
            (Some(Outcome::Exited(0)), None) => String::new(),
            (Some(Outcome::Exited(0)), Some(_)) => "a bug in the kernel".to_owned(),
            (Some(Outcome::Exited(101)), _) if counts.failed > 0 => "tests failed".to_owned(),
            (Some(Outcome::Exited(status)), _) if *status > 128 => {
                format!("died of signal {}", status - 128)
            }
            (Some(Outcome::Exited(status)), _) => format!("status {status}"),
            _ => "did not run".to_owned(),
        },
    }
}

/// Ours, without what is for this program alone.
fn environment() -> Vec<(OsString, OsString)> {
    let env = std::env::vars_os();
    env.filter(|(name, _)| !name.to_str().is_some_and(place::is_ours)).collect()
}

fn test_env(binary: &Binary) -> Vec<(OsString, OsString)> {
    let mut env = binary.env.clone();
    env.push(("RUST_BACKTRACE".into(), std::env::var_os("RUST_BACKTRACE").unwrap_or_else(|| "1".into())));
    env
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_its_words() {
        let ok = |outcome| Ok(vec![outcome]);
        let counts = Counts::default();
        assert_eq!(problem(&ok(Outcome::Exited(0)), &counts, &[], 9), "");
        assert_eq!(problem(&ok(Outcome::Exited(139)), &counts, &[], 9), "died of signal 11");
        assert_eq!(problem(&ok(Outcome::TimedOut), &counts, &[], 9), "killed after 9 s");
        let in_one = Counts { running: vec!["a::b".to_owned()], ..Counts::default() };
        assert_eq!(problem(&ok(Outcome::TimedOut), &in_one, &[], 9), "killed after 9 s, in a::b");
        let bug = ["BUG: KASAN: use-after-free".to_owned()];
        assert_eq!(problem(&ok(Outcome::Exited(0)), &counts, &bug, 9), "a bug in the kernel");
        let failed = Counts { failed: 1, ..Counts::default() };
        assert_eq!(problem(&ok(Outcome::Exited(101)), &failed, &[], 9), "tests failed");
        let crashed = Err(Error::Crashed { host: String::new(), console: String::new() });
        assert_eq!(problem(&crashed, &counts, &[], 9), "the kernel crashed");
    }
}
