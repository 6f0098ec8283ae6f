//! Builds with cargo, and reads from its messages what it built.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::error::{Context as _, Error};
use crate::metadata::{Package, Program, Where, Workspace, cargo};
use crate::signals;

/// A test binary.
#[derive(Debug)]
pub(crate) struct Binary {
    /// Such as `verbs-tests rxe_basic`, or `verbs-rma (lib)`.
    pub(crate) name: String,
    pub(crate) place: Where,
    pub(crate) executable: PathBuf,
    /// The package's directory, where cargo runs tests, too.
    pub(crate) dir: PathBuf,
    /// What cargo sets for tests.
    pub(crate) env: Vec<(OsString, OsString)>,
}

/// One line of cargo's messages.
#[derive(Debug, Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    package_id: String,
    target: Option<TargetOf>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct TargetOf {
    name: String,
    kind: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

/// Builds all tests of the workspace.
pub(crate) fn tests(workspace: &Workspace, release: bool, quiet: bool) -> Result<Vec<Binary>, Error> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--no-run"]);
    add_features(&mut command, &workspace.config.features);
    if release {
        command.arg("--release");
    }
    let messages = build(command, "cargo test --workspace --no-run", quiet)?;
    let libraries = libraries(workspace, release);
    let mut binaries: Vec<Binary> =
        messages.iter().filter_map(|message| binary(workspace, message, &messages, &libraries)).collect();
    binaries.sort_by(|a, b| (a.place, &a.name).cmp(&(b.place, &b.name)));
    Ok(binaries)
}

fn binary(workspace: &Workspace, message: &Message, all: &[Message], libraries: &OsString) -> Option<Binary> {
    let executable = message.executable.clone().filter(|_| message.profile.as_ref().is_some_and(|p| p.test))?;
    let package = workspace.package(&message.package_id)?;
    let target = message.target.as_ref()?;
    let is_test = target.kind.iter().any(|kind| kind == "test");
    let (place, name) = if is_test {
        (workspace.config.place(&package.name, &target.name), format!("{} {}", package.name, target.name))
    } else if target.kind.iter().any(|kind| kind.contains("lib") || kind == "proc-macro") {
        (Where::Host, format!("{} (lib)", package.name))
    } else {
        (Where::Host, format!("{} ({} {})", package.name, target.kind.join(" "), target.name))
    };
    let mut env = package_env(package);
    env.push(("LD_LIBRARY_PATH".into(), libraries.clone()));
    for other in all.iter().filter(|other| is_test && other.package_id == message.package_id) {
        let bin = other.target.as_ref().filter(|target| target.kind.iter().any(|kind| kind == "bin"));
        if let (Some(bin), Some(path), Some(Profile { test: false })) = (bin, &other.executable, &other.profile) {
            env.push((format!("CARGO_BIN_EXE_{}", bin.name).into(), path.clone().into()));
        }
    }
    Some(Binary { name, place, executable, dir: package.dir().to_path_buf(), env })
}

/// The few of cargo's variables that tests read at run time.
fn package_env(package: &Package) -> Vec<(OsString, OsString)> {
    vec![
        ("CARGO_MANIFEST_DIR".into(), package.dir().into()),
        ("CARGO_MANIFEST_PATH".into(), package.manifest_path.clone().into()),
        ("CARGO_PKG_NAME".into(), package.name.clone().into()),
        ("CARGO_PKG_VERSION".into(), package.version.clone().into()),
    ]
}

/// Where tests of procedural macros, and those that use a `dylib`, find their libraries.
fn libraries(workspace: &Workspace, release: bool) -> OsString {
    let mut path = workspace.target_dir.join(if release { "release/deps" } else { "debug/deps" }).into_os_string();
    let rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--print", "sysroot"])
        .stderr(Stdio::null())
        .output();
    if let Ok(output) = rustc {
        path.push(format!(":{}/lib", String::from_utf8_lossy(&output.stdout).trim()));
    }
    path
}

/// Builds one program and returns its path.
pub(crate) fn program(what: &str, program: &Program, quiet: bool) -> Result<PathBuf, Error> {
    let (kind, name) = match (&program.example, &program.bin) {
        (Some(name), None) => ("example", name),
        (None, Some(name)) => ("bin", name),
        _ => {
            let why = "has to name an `example` or a `bin`, and not both";
            return Err(Error::Config(format!("[workspace.metadata.softroce] {what} {why}")));
        }
    };
    let mut command = cargo();
    command.args(["build", "--package", &program.package, &format!("--{kind}"), name]);
    add_features(&mut command, &program.features);
    if program.release {
        command.arg("--release");
    }
    let messages = build(command, &format!("cargo build --package {} --{kind} {name}", program.package), quiet)?;
    let built = messages.into_iter().rev().find_map(|message| {
        let target = message.target?;
        (target.name == *name && target.kind.iter().any(|of| of == kind)).then_some(message.executable).flatten()
    });
    built.ok_or_else(|| Error::Config(format!("cargo built no {kind} `{name}` of {}", program.package)))
}

fn add_features(command: &mut Command, features: &[String]) {
    if !features.is_empty() {
        command.arg("--features").arg(features.join(","));
    }
}

/// Runs cargo; its progress and diagnostics go to our standard error.
fn build(mut command: Command, name: &str, quiet: bool) -> Result<Vec<Message>, Error> {
    command.arg("--message-format=json-render-diagnostics");
    if quiet {
        command.arg("--quiet");
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = command.spawn().context(|| format!("run {name}"))?;
    let _registered = signals::register_group(child.id());
    let pipe = child.stdout.take();
    let reader = std::thread::spawn(move || {
        let lines = pipe.map(|pipe| BufReader::new(pipe).lines());
        let lines = lines.into_iter().flatten().map_while(Result::ok);
        lines.filter_map(|line| parse(&line)).collect::<Vec<_>>()
    });
    let status = signals::wait(&mut child)?;
    if !status.success() {
        return Err(Error::Cargo(name.to_owned()));
    }
    Ok(reader.join().unwrap_or_default())
}

/// An artifact; other messages do not matter.
fn parse(line: &str) -> Option<Message> {
    serde_json::from_str::<Message>(line).ok().filter(|message| message.reason == "compiler-artifact")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_artifacts_are_read() {
        let artifact = r#"{"reason":"compiler-artifact","package_id":"p 1","target":{"kind":["test"],"name":"rxe_a"},
            "profile":{"opt_level":"0","test":true},"executable":"/t/rxe_a-1","fresh":false}"#;
        let message = parse(artifact).unwrap();
        assert_eq!(message.executable, Some("/t/rxe_a-1".into()));
        assert!(message.profile.unwrap().test);
        assert!(parse(r#"{"reason":"build-finished","success":true}"#).is_none());
        assert!(parse("warning: something a build script printed").is_none());
    }

    #[test]
    fn a_program_is_an_example_or_a_binary() {
        let both = Program { example: Some("a".into()), bin: Some("b".into()), ..Program::default() };
        for wrong in [both, Program::default()] {
            assert!(program("demo", &wrong, true).unwrap_err().to_string().contains("demo"));
        }
    }
}
