//! The workspace: its packages, and `[workspace.metadata.softroce]` of its root `Cargo.toml`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::error::{Context as _, Error};
use crate::glob;

/// `[workspace.metadata.softroce]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Patterns of test targets that run on a device.
    pub(crate) device_tests: Vec<String>,
    /// Patterns of test targets that run on the first of two joined hosts.
    pub(crate) two_host_tests: Vec<String>,
    /// Features for building the tests.
    pub(crate) features: Vec<String>,
    /// What `demo` runs.
    pub(crate) demo: Option<Program>,
    /// What `probe` runs.
    pub(crate) probe: Option<Program>,
    /// What `bench` runs.
    pub(crate) bench: Option<Program>,
    /// Further Debian packages that the workspace needs.
    pub(crate) packages: Vec<String>,
    /// Debian packages that its tests need besides, on this host.
    pub(crate) test_packages: Vec<String>,
    /// Patterns of variables of ours that commands get, besides the usual ones.
    pub(crate) pass_env: Vec<String>,
}

impl Config {
    /// Further packages of programs and of tests.
    pub(crate) fn all_packages(&self) -> Vec<String> {
        [&self.packages[..], &self.test_packages].concat()
    }
}

/// A program of the workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Program {
    /// Its package.
    pub(crate) package: String,
    /// It is an example of this name...
    pub(crate) example: Option<String>,
    /// ...or a binary of this name.
    pub(crate) bin: Option<String>,
    /// Features to build it with.
    pub(crate) features: Vec<String>,
    /// Built with optimisation.
    pub(crate) release: bool,
    /// Arguments that come before the user's.
    pub(crate) args: Vec<String>,
    /// Debian packages that it alone needs.
    pub(crate) packages: Vec<String>,
}

/// Where a test binary runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Where {
    /// On this host.
    Host,
    /// On a device.
    Device,
    /// On the first of two joined hosts.
    TwoHosts,
}

impl Where {
    /// As in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
            Self::TwoHosts => "two hosts",
        }
    }
}

impl Config {
    /// Where the test target `name` of `package` runs. A pattern with `/` is matched against `package/name`.
    pub(crate) fn place(&self, package: &str, name: &str) -> Where {
        let full = format!("{package}/{name}");
        let hit = |patterns: &[String]| {
            patterns.iter().any(|pattern| glob::matches(pattern, if pattern.contains('/') { &full } else { name }))
        };
        if hit(&self.two_host_tests) {
            Where::TwoHosts
        } else if hit(&self.device_tests) {
            Where::Device
        } else {
            Where::Host
        }
    }
}

/// What `cargo metadata` says, as far as it matters here.
#[derive(Debug, Deserialize)]
pub(crate) struct Workspace {
    #[serde(rename = "workspace_root")]
    pub(crate) root: PathBuf,
    #[serde(rename = "target_directory")]
    pub(crate) target_dir: PathBuf,
    pub(crate) packages: Vec<Package>,
    #[serde(default)]
    metadata: serde_json::Value,
    #[serde(skip)]
    pub(crate) config: Config,
}

/// A package of the workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) manifest_path: PathBuf,
    targets: Vec<Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    #[serde(default)]
    doctest: bool,
}

impl Package {
    /// Its directory.
    pub(crate) fn dir(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new("/"))
    }

    /// Whether it has doc tests.
    pub(crate) fn doctests(&self) -> bool {
        self.targets.iter().any(|target| target.doctest)
    }
}

impl Workspace {
    /// Of the current directory.
    pub(crate) fn find() -> Result<Self, Error> {
        let mut command = cargo();
        command.args(["metadata", "--format-version", "1", "--no-deps"]).stderr(std::process::Stdio::inherit());
        let output = command.output().context(|| "run cargo metadata".to_owned())?;
        if !output.status.success() {
            return Err(Error::Cargo("cargo metadata".to_owned()));
        }
        Self::parse(&output.stdout)
    }

    /// Of the current directory; `None` when it is in no workspace, or there is no cargo.
    pub(crate) fn find_if_any() -> Result<Option<Self>, Error> {
        let output = cargo().args(["metadata", "--format-version", "1", "--no-deps"]).output();
        match output {
            Ok(output) if output.status.success() => Self::parse(&output.stdout).map(Some),
            _ => Ok(None),
        }
    }

    fn parse(json: &[u8]) -> Result<Self, Error> {
        let unclear = |error| Error::Config(format!("cannot understand what `cargo metadata` says: {error}"));
        let mut workspace: Self = serde_json::from_slice(json).map_err(unclear)?;
        if let Some(config) = workspace.metadata.get("softroce") {
            let wrong = |error| {
                let file = workspace.root.join("Cargo.toml");
                Error::Config(format!("[workspace.metadata.softroce] in {}: {error}", file.display()))
            };
            workspace.config = serde_json::from_value(config.clone()).map_err(wrong)?;
        }
        Ok(workspace)
    }

    /// The package with this id.
    pub(crate) fn package(&self, id: &str) -> Option<&Package> {
        self.packages.iter().find(|package| package.id == id)
    }
}

/// Cargo, without what the cargo that may have started us set for this program alone.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(crate::place::is_ours) {
            command.env_remove(name);
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(softroce: &str) -> Result<Workspace, Error> {
        let json = format!(
            r#"{{"workspace_root":"/w","target_directory":"/w/target","packages":[{{"id":"p 1","name":"p","version":"1.0.0",
               "manifest_path":"/w/p/Cargo.toml","targets":[{{"name":"p","kind":["lib"],"doctest":true}}]}}],
               "metadata":{softroce}}}"#
        );
        Workspace::parse(json.as_bytes())
    }

    #[test]
    fn the_table_is_read() {
        let workspace = parse(
            r#"{"softroce":{"device-tests":["rxe_*"],"two-host-tests":["rxe2_*","q/*pair"],"features":["t/device"],
                "demo":{"package":"p","example":"demo"},"bench":{"package":"p","bin":"b","packages":["perftest"]},"test-packages":["valgrind"],"pass-env":["MY_*"]},"other":{"x":1}}"#,
        )
        .unwrap();
        let config = &workspace.config;
        assert_eq!(config.demo.as_ref().unwrap().example.as_deref(), Some("demo"));
        assert_eq!(config.bench.as_ref().unwrap().packages, ["perftest"]);
        assert_eq!(config.test_packages, ["valgrind"]);
        assert_eq!(config.pass_env, ["MY_*"]);
        assert_eq!(config.place("p", "rxe_a"), Where::Device);
        assert_eq!(config.place("p", "rxe2_a"), Where::TwoHosts);
        assert_eq!(config.place("q", "my_pair"), Where::TwoHosts);
        assert_eq!(config.place("p", "my_pair"), Where::Host);
        assert_eq!(workspace.package("p 1").unwrap().dir(), Path::new("/w/p"));
        assert!(workspace.packages[0].doctests());
    }

    #[test]
    fn no_table_means_no_device_tests() {
        for none in ["null", "{}", r#"{"other":1}"#] {
            assert_eq!(parse(none).unwrap().config, Config::default(), "{none}");
        }
    }

    #[test]
    fn a_misspelt_key_is_named() {
        let error = parse(r#"{"softroce":{"device-test":["x"]}}"#).unwrap_err().to_string();
        assert!(error.contains("device-test") && error.contains("/w/Cargo.toml"), "{error}");
    }
}
