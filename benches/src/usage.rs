//! CPU time and memory of this process.

use std::{fs, ops::Sub, time::Duration};

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeVal,
};
use serde::{Deserialize, Serialize};

/// CPU time, of all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTime {
    /// In user space.
    pub user: Duration,
    /// In the kernel.
    pub system: Duration,
}

impl CpuTime {
    /// Of this process so far. Linux measures the sum exactly and shares it out by ticks: short runs show a sum that is
    /// right and parts that are rough.
    pub fn of_this_process() -> Self {
        Self::of(UsageWho::RUSAGE_SELF)
    }

    /// Of the children that have ended and were waited for.
    pub(crate) fn of_children() -> Self {
        Self::of(UsageWho::RUSAGE_CHILDREN)
    }

    fn of(who: UsageWho) -> Self {
        // It fails for an unknown `who` alone.
        getrusage(who).map_or_else(
            |_| Self::default(),
            |usage| Self { user: duration(usage.user_time()), system: duration(usage.system_time()) },
        )
    }

    /// Both.
    pub fn total(self) -> Duration {
        self.user + self.system
    }
}

impl Sub for CpuTime {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self { user: self.user.saturating_sub(earlier.user), system: self.system.saturating_sub(earlier.system) }
    }
}

fn duration(time: TimeVal) -> Duration {
    let seconds = u64::try_from(time.tv_sec()).unwrap_or_default();
    Duration::from_secs(seconds) + Duration::from_micros(u64::try_from(time.tv_usec()).unwrap_or_default())
}

/// Memory of this process that is resident, in KiB.
pub(crate) fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn work_costs_cpu_time() {
        let (before, start) = (CpuTime::of_this_process(), Instant::now());
        while start.elapsed() < Duration::from_secs(5)
            && (CpuTime::of_this_process() - before).total() < Duration::from_millis(5)
        {
            std::hint::spin_loop();
        }
        assert!((CpuTime::of_this_process() - before).total() >= Duration::from_millis(5));
        assert!(resident_kib() > 0);
    }

    #[test]
    fn a_difference_is_never_negative() {
        let (less, more) = (CpuTime::default(), CpuTime { user: Duration::from_secs(1), ..CpuTime::default() });
        assert_eq!((less - more, (more - less).user), (CpuTime::default(), Duration::from_secs(1)));
    }
}
