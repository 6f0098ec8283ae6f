//! `demo`, `probe` and `bench`: programs of the workspace, built and run on the device.

use std::ffi::OsString;
use std::process::ExitCode;

use crate::artifacts;
use crate::cli::Global;
use crate::error::{Context as _, Error};
use crate::metadata::{Program, Workspace};
use crate::output::Plain;
use crate::place;
use crate::progress::Progress;
use crate::run;
use crate::testbed::Job;

/// `cargo softroce demo`.
pub(crate) fn demo(global: &Global, args: Vec<OsString>) -> Result<ExitCode, Error> {
    let workspace = Workspace::find()?;
    let program = workspace.config.demo.clone();
    run("demo", global, &workspace, program, args)
}

/// `cargo softroce probe`; `--json` goes on to the program.
pub(crate) fn probe(global: &Global, mut args: Vec<OsString>) -> Result<ExitCode, Error> {
    let workspace = Workspace::find()?;
    let program = workspace.config.probe.clone();
    if global.json {
        args.insert(0, "--json".into());
    }
    run("probe", global, &workspace, program, args)
}

/// `cargo softroce bench`. What the benchmark writes into `$SOFTROCE_SHARED` stays: in `--share`, else in the target
/// directory. It is told this machine's load, which a guest cannot see.
pub(crate) fn bench(global: &Global, args: Vec<OsString>) -> Result<ExitCode, Error> {
    let workspace = Workspace::find()?;
    let program = workspace.config.bench.clone().map(|program| Program { release: true, ..program });
    let reports = global.share.clone().unwrap_or_else(|| workspace.target_dir.join("softroce-bench"));
    if program.is_some() {
        std::fs::create_dir_all(&reports).context(|| format!("create {}", reports.display()))?;
    }
    let mut global = Global { share: Some(reports.clone()), ..global.clone() };
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    global.env.extend(load.split(' ').next().map(|load| format!("SOFTROCE_HOST_LOAD={}", load.trim())));
    let code = run("bench", &global, &workspace, program, args)?;
    Progress::new(global.quiet).note(&format!("what it wrote is in {}", reports.display()));
    Ok(code)
}

fn run(
    what: &str,
    global: &Global,
    workspace: &Workspace,
    program: Option<Program>,
    args: Vec<OsString>,
) -> Result<ExitCode, Error> {
    let program = program.ok_or_else(|| {
        let file = workspace.root.join("Cargo.toml");
        let example = format!("[workspace.metadata.softroce]\n{what} = {{ package = \"...\", example = \"{what}\" }}");
        Error::Config(format!("{} names no {what}; add, with your package's name:\n\n{example}\n", file.display()))
    })?;
    let progress = Progress::new(global.quiet);
    let packages = [&workspace.config.packages[..], &program.packages].concat();
    let ready = place::prepare(global, 1, &packages, &progress)?;
    progress.clear();
    progress.note(&format!("building the {what}"));
    let executable = artifacts::program(what, &program, global.quiet)?;
    let mut visible = vec![workspace.root.clone(), workspace.target_dir.clone()];
    visible.extend(std::env::current_dir());
    let mut testbed = ready.start(global, 1, &visible, &progress)?;
    let argv = std::iter::once(executable.into_os_string());
    let argv = argv.chain(program.args.iter().map(OsString::from)).chain(args).collect();
    let spec = place::command(&testbed, 0, argv, global, &workspace.config.pass_env);
    let outcomes = testbed.run(vec![Job { host: 0, spec }], run::timeout(global), false, &mut Plain)?;
    run::conclude(&outcomes, global)
}
