//! Runs this program under valgrind's callgrind, and reads what it wrote.
//!
//! Counting starts and ends with `within_count`. The file has each function's own instructions, and behind each call those of
//! all that was called: from these the simulated fabric's are summed up and left out.

use std::{
    collections::HashMap,
    error::Error,
    fs, io,
    path::{Path, PathBuf},
    process::{Command, id},
};

use super::operations::Operation;

/// The simulated fabric's, as the transport calls them.
const FABRIC: [&str; 4] = ["SimFabric as", "SimQp as", "SimBulkPort as", "SimBulkQp as"];

/// Instructions of one run of this, the fabric's own left out.
pub(crate) fn count(operation: Operation) -> Result<u64, Box<dyn Error>> {
    let out = Out(std::env::temp_dir().join(format!("instructions-{}-{}", id(), operation.name())));
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*within_count*", "--quiet"]);
    valgrind.arg(format!("--callgrind-out-file={}", out.0.display()));
    // What is read at start must not change what is counted.
    valgrind.env_remove("RUST_LOG").env_remove("RUST_BACKTRACE");
    let output = valgrind.arg(std::env::current_exe()?).args(["--run", &operation.name()]).output();
    let output = output.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => "valgrind is not there: install it, or let `cargo softroce setup` do so".to_owned(),
        _ => format!("valgrind cannot be run: {error}"),
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{} under valgrind: {}: {said}", operation.name(), output.status).into());
    }
    let profile = Profile::read(&fs::read_to_string(&out.0)?)?;
    if (profile.fabric == 0) == operation.posts() || profile.fabric >= profile.all {
        return Err(format!(
            "{} of {} instructions are the fabric's: its functions were not found",
            profile.fabric, profile.all
        )
        .into());
    }
    Ok(profile.all - profile.fabric)
}

/// A file that goes away.
struct Out(PathBuf);

impl Drop for Out {
    fn drop(&mut self) {
        let _ = fs::remove_file(Path::new(&self.0));
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Profile {
    all: u64,
    /// Of calls into the fabric.
    fabric: u64,
}

impl Profile {
    /// `fn=` says whose lines follow; `cfn=` and `calls=` are a call, whose instructions stand in the next line. A name is
    /// `(number) text` at its first time and `(number)` from then on.
    fn read(text: &str) -> Result<Self, Box<dyn Error>> {
        let mut names: HashMap<&str, bool> = HashMap::new();
        let mut profile = Self::default();
        let (mut caller_is_fabric, mut callee_is_fabric, mut call) = (false, false, false);
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("fn=") {
                caller_is_fabric = lookup(&mut names, name);
            } else if let Some(name) = line.strip_prefix("cfn=") {
                callee_is_fabric = lookup(&mut names, name);
            } else if line.starts_with("calls=") {
                call = true;
            } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
                let Some(cost) = line.split_whitespace().nth(1) else { continue };
                let cost: u64 = cost.parse().map_err(|error| format!("{line:?}: {error}"))?;
                if std::mem::take(&mut call) {
                    // What the fabric calls of its own is in its caller's sum already.
                    profile.fabric += if callee_is_fabric && !caller_is_fabric { cost } else { 0 };
                } else {
                    profile.all += cost;
                }
            }
        }
        Ok(profile)
    }
}

/// Whether that name is a function of the fabric's.
fn lookup<'a>(names: &mut HashMap<&'a str, bool>, name: &'a str) -> bool {
    let (number, text) = name.split_once(' ').unwrap_or((name, ""));
    if text.is_empty() {
        return names.get(number).copied().unwrap_or_default();
    }
    let fabric = FABRIC.iter().any(|of| text.contains(of));
    names.insert(number, fabric);
    fabric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fabrics_calls_are_summed_up_once() {
        let text = "\
events: Ir
fn=(1) hot::send
10 100
cfn=(2) <verbs_transport::sim::fabric::SimQp as verbs_transport::fabric::FabricQp>::post
calls=3 20
12 500
cfn=(3) memcpy
calls=1 1
13 7
fn=(2)
20 440
cfn=(4) <verbs_transport::sim::fabric::SimFabric as verbs_transport::fabric::Fabric>::arm
calls=1 1
+2 60
fn=(4)
* 60
fn=(3)
1 7
fn=(5) hot::receive
+1 30
cfn=(4)
calls=1 1
+1 11
";
        let profile = Profile::read(text).unwrap();
        assert_eq!(profile, Profile { all: 100 + 440 + 60 + 7 + 30, fabric: 500 + 11 });
    }

    #[test]
    fn a_file_of_another_form_is_an_error() {
        assert!(Profile::read("10 ten\n").is_err());
        assert_eq!(Profile::read("").unwrap(), Profile::default());
    }
}
