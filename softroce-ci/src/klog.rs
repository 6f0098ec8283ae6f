//! The kernel log: read record by record, and what in it is bad.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};

/// The records of level warning or worse.
pub(crate) struct KernelLog(File);

impl KernelLog {
    /// From the oldest record on.
    pub(crate) fn open() -> io::Result<Self> {
        use rustix::fs::{Mode, OFlags, open};
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(Self(File::from(open("/dev/kmsg", flags, Mode::empty())?)))
    }

    /// From now on.
    pub(crate) fn open_at_end() -> io::Result<Self> {
        let mut log = Self::open()?;
        log.0.seek(SeekFrom::End(0))?;
        Ok(log)
    }

    /// The next record that there is, without waiting.
    pub(crate) fn next(&mut self) -> Option<String> {
        let mut record = [0; 8192];
        loop {
            match self.0.read(&mut record) {
                Ok(0) => return None,
                Ok(n) => {
                    if let Some(line) = warning(&String::from_utf8_lossy(&record[..n])) {
                        return Some(line);
                    }
                }
                // Records were overwritten before we read them: go on with the oldest one left.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PIPE.raw_os_error()) => {}
                Err(_) => return None,
            }
        }
    }
}

/// "4,120,5000,-;text": priority (facility times 8 plus level), number, time, flags; then the text.
fn warning(record: &str) -> Option<String> {
    const WARNING: u32 = 4;
    let (head, text) = record.split_once(';')?;
    let priority: u32 = head.split(',').next()?.parse().ok()?;
    let kernel_s_own = priority < 8;
    (kernel_s_own && priority <= WARNING).then(|| text.lines().next().unwrap_or_default().to_owned())
}

/// How bad a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Severity {
    /// Everyday noise, such as "speed is unknown".
    Noise,
    /// Worth a line in a report.
    Warning,
    /// A fault of the kernel or the driver: what ran meanwhile has failed.
    Bug,
}

/// Judges a line.
pub(crate) fn severity(line: &str) -> Severity {
    const BUGS: [&str; 6] =
        ["BUG: ", "Oops", "general protection fault", "Unable to handle kernel", "kernel BUG at", "KASAN"];
    const WARNINGS: [&str; 4] = ["WARNING: ", "INFO: task ", "rcu: INFO", "Out of memory"];
    // Under TCG on a busy machine a processor may stand still for long with nothing wrong in the guest.
    let stall = line.contains("soft lockup");
    if !stall && BUGS.iter().any(|mark| line.contains(mark)) {
        Severity::Bug
    } else if stall || WARNINGS.iter().any(|mark| line.contains(mark)) {
        Severity::Warning
    } else {
        Severity::Noise
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernel_s_warnings_and_worse_are_read() {
        assert_eq!(warning("4,1,2,-;WARNING: CPU: 0\n SUBSYSTEM=x").as_deref(), Some("WARNING: CPU: 0"));
        assert_eq!(warning("0,1,2,-;panic").as_deref(), Some("panic"));
        assert_eq!(warning("6,1,2,-;chatter"), None);
        assert_eq!(warning("12,1,2,-;user space"), None);
        assert_eq!(warning("garbage"), None);
    }

    #[test]
    fn bugs_are_told_from_warnings_and_noise() {
        assert_eq!(severity("BUG: kernel NULL pointer dereference, address: 0"), Severity::Bug);
        assert_eq!(severity("WARNING: CPU: 1 PID: 7 at drivers/infiniband/sw/rxe/rxe_pool.c:255"), Severity::Warning);
        assert_eq!(severity("watchdog: BUG: soft lockup - CPU#0 stuck for 22s!"), Severity::Warning);
        assert_eq!(severity("rxe0: speed is unknown"), Severity::Noise);
    }
}
