//! The machine that a figure was measured on: without it a figure means nothing.

use std::{fs, path::Path, thread};

use serde::{Deserialize, Serialize};

/// One host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Environment {
    pub(crate) host: String,
    /// Kernel release.
    pub(crate) kernel: String,
    /// CPU model.
    pub(crate) cpu: String,
    /// CPUs that this process may use.
    pub(crate) cpus: usize,
    /// How fast a virtual machine's instructions run.
    pub(crate) accelerator: Accelerator,
    /// `scaling_governor` of the first CPU; `None`: the machine does not scale its clock, or does not say so.
    pub(crate) governor: Option<String>,
    /// The machine's load over the last minute when the run began, in 1/100: a figure from a busy machine is no figure.
    pub(crate) load_percent: u32,
}

/// What executes this machine's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Accelerator {
    /// A CPU, without a hypervisor in between.
    None,
    /// QEMU's translator: times are many times those of a CPU.
    Tcg,
    /// Linux's hypervisor.
    Kvm,
    /// Some other hypervisor.
    Other,
}

impl Accelerator {
    /// In words.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::None => "no virtual machine",
            Self::Tcg => "virtual machine, TCG (emulated: times are many times those of a CPU)",
            Self::Kvm => "virtual machine, KVM",
            Self::Other => "virtual machine",
        }
    }
}

impl Environment {
    /// Of this host, now.
    pub(crate) fn read() -> Self {
        Self::read_below(Path::new("/"))
    }

    fn read_below(root: &Path) -> Self {
        let line = |path: &str| {
            let text = fs::read_to_string(root.join(path)).ok()?;
            Some(text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        let unknown = || "unknown".to_owned();
        let info = line("proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = info.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
            line.split_once(':').map(|(_, value)| value.trim().to_owned())
        };
        let cpu = field("model name").unwrap_or_else(unknown);
        let clocks = line("sys/devices/system/clocksource/clocksource0/available_clocksource").unwrap_or_default();
        let guest = field("flags").is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"));
        let load = line("proc/loadavg").and_then(|loads| loads.split_whitespace().next().map(str::to_owned));
        Self {
            host: line("proc/sys/kernel/hostname").unwrap_or_else(unknown),
            kernel: line("proc/sys/kernel/osrelease").unwrap_or_else(unknown),
            accelerator: accelerator(&cpu, &clocks, guest),
            cpu,
            cpus: thread::available_parallelism().map_or(1, usize::from),
            governor: line("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            load_percent: load.and_then(|load| load.replace('.', "").parse().ok()).unwrap_or_default(),
        }
    }

    /// What perftest warns of as well, unless -F: a clock that has to speed up first.
    pub(crate) fn slow_clock(&self) -> Option<String> {
        let governor = self.governor.as_ref().filter(|governor| *governor != "performance")?;
        Some(format!(
            "the CPU's clock is scaled (governor `{governor}`), which makes figures uneven: \
             `cpupower frequency-set -g performance`, or -F to be told no more"
        ))
    }
}

fn accelerator(cpu: &str, clocks: &str, guest: bool) -> Accelerator {
    if cpu.contains("TCG") {
        Accelerator::Tcg
    } else if clocks.contains("kvm-clock") {
        Accelerator::Kvm
    } else if guest {
        Accelerator::Other
    } else {
        Accelerator::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_machine_is_told() {
        assert_eq!(accelerator("QEMU TCG CPU version 2.5+", "tsc hpet acpi_pm", true), Accelerator::Tcg);
        assert_eq!(accelerator("Intel(R) Xeon(R)", "kvm-clock tsc", true), Accelerator::Kvm);
        assert_eq!(accelerator("Intel(R) Xeon(R)", "hyperv_clocksource_tsc_page", true), Accelerator::Other);
        assert_eq!(accelerator("Intel(R) Xeon(R)", "tsc hpet", false), Accelerator::None);
    }

    #[test]
    fn a_machine_that_tells_nothing_is_unknown_and_gives_no_warning() {
        let environment = Environment::read_below(Path::new("/nonexistent"));
        assert_eq!((&*environment.kernel, environment.load_percent), ("unknown", 0));
        assert_eq!(environment.slow_clock(), None);
    }

    #[test]
    fn a_scaled_clock_is_warned_of() {
        let mut environment = Environment::read_below(Path::new("/nonexistent"));
        environment.governor = Some("performance".to_owned());
        assert_eq!(environment.slow_clock(), None);
        environment.governor = Some("ondemand".to_owned());
        assert!(environment.slow_clock().is_some_and(|warning| warning.contains("`ondemand`")));
    }

    #[test]
    fn this_machine_has_a_kernel_and_a_load() {
        let environment = Environment::read();
        assert_ne!(environment.kernel, "unknown");
        assert!(environment.cpus >= 1);
    }
}
