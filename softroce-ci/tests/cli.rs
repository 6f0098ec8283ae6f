//! The command line, as far as it goes without a device.

use std::path::Path;
use std::process::{Command, Output};

fn softroce(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cargo-softroce"));
    command.arg("softroce").args(args).current_dir(dir);
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8(both).unwrap()
}

#[test]
fn help_names_every_subcommand_and_no_inner_one() {
    let output = softroce(Path::new("/"), &["--help"]);
    assert!(output.status.success());
    let said = said(&output);
    for name in ["setup", "demo", "test", "run", "shell", "probe", "bench"] {
        assert!(said.contains(&format!("\n  {name} ")), "{said}");
    }
    assert!(!said.contains("guest-agent"), "{said}");
}

#[test]
fn errors_of_our_own_end_with_125_and_say_what_to_do() {
    for (args, words) in [
        (&["run"][..], "<COMMAND>"),
        (&["run", "--hosts", "3", "--", "true"], "1..=2"),
        (&["run", "--hosts", "2", "--via", "device", "--", "true"], "--via vm"),
        (&["run", "--peer", "true", "--", "true"], "--hosts 2"),
        (&["run", "--share", "/no/such/dir", "--", "true"], "/no/such/dir"),
        (&["frobnicate"], "frobnicate"),
    ] {
        let output = softroce(Path::new("/"), args);
        assert_eq!(output.status.code(), Some(125), "{args:?}");
        assert!(said(&output).contains(words), "{args:?}: {}", said(&output));
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn a_workspace_without_a_program_is_told_how_to_name_one() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("src")).unwrap();
    std::fs::write(dir.path().join("src/lib.rs"), "").unwrap();
    let manifest = "[package]\nname = \"x\"\nedition = \"2021\"\n[workspace]\n";
    std::fs::write(dir.path().join("Cargo.toml"), manifest).unwrap();
    for name in ["demo", "probe", "bench"] {
        let output = softroce(dir.path(), &[name]);
        assert_eq!(output.status.code(), Some(125));
        let said = said(&output);
        assert!(said.contains("[workspace.metadata.softroce]") && said.contains(&format!("{name} = ")), "{said}");
    }
}

#[test]
fn a_misspelt_setting_is_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("src")).unwrap();
    std::fs::write(dir.path().join("src/lib.rs"), "").unwrap();
    let manifest = "[package]\nname = \"x\"\nedition = \"2021\"\n[workspace.metadata.softroce]\nprobes = 1\n";
    std::fs::write(dir.path().join("Cargo.toml"), manifest).unwrap();
    let output = softroce(dir.path(), &["probe"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(said(&output).contains("probes"), "{}", said(&output));
}
