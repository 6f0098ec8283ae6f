//! What a process must not have more of after a test than before.

use std::{
    fs,
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

static TURN: Mutex<()> = Mutex::new(());

/// What the first runtime of a process makes for good (sockets for signals) is no leak of a test: count after this.
///
/// # Panics
///
/// When no runtime can be made.
pub fn first_runtime() {
    static FIRST: std::sync::Once = std::sync::Once::new();
    FIRST.call_once(|| {
        drop(tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"));
    });
}

/// Device tests run one at a time.
pub fn device_turn() -> MutexGuard<'static, ()> {
    first_runtime();
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Descriptors and threads of this process; objects of all RDMA devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// Open descriptors.
    pub fds: usize,
    /// Threads.
    pub threads: usize,
    /// What `rdma resource show` says: pd, cq, qp, mr and so on of each device.
    pub rdma: Vec<String>,
}

impl Census {
    /// Counts when they have come to rest: what a test before left to the background has gone by then.
    ///
    /// # Panics
    ///
    /// Without /proc or the `rdma` command.
    pub fn take() -> Self {
        first_runtime();
        let deadline = Instant::now() + Duration::from_secs(3);
        let mut last = Self::now();
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let now = Self::now();
            if now == last || Instant::now() > deadline {
                return now;
            }
            last = now;
        }
    }

    fn now() -> Self {
        let count = |dir: &str| fs::read_dir(dir).expect("/proc is mounted").count();
        let output = Command::new("rdma").args(["resource", "show"]).output().expect("the rdma command of iproute2");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Self {
            // Reading the directory takes one itself, each time.
            fds: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            // Without the number before the name: a device that is made anew gets the next one.
            rdma: text.lines().map(|line| line.split_once(": ").map_or(line, |(_, rest)| rest).to_owned()).collect(),
        }
    }

    /// Checks that nothing is more than before; threads and kernel objects may take a moment to go.
    ///
    /// # Panics
    ///
    /// When something is after 5 s.
    pub fn assert_same(&self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let now = Self::now();
            if now.fds <= self.fds && now.threads <= self.threads && now.rdma == self.rdma {
                return;
            }
            assert!(Instant::now() < deadline, "left behind:\nbefore {self:#?}\nafter  {now:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// One counter of `hw_counters`, summed over all devices and ports; 0 where the device has none of that name.
pub fn hw_counter(name: &str) -> u64 {
    let devices = fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let ports = devices.flat_map(|device| fs::read_dir(device.path().join("ports")).into_iter().flatten().flatten());
    ports
        .filter_map(|port| fs::read_to_string(port.path().join("hw_counters").join(name)).ok())
        .filter_map(|text| text.trim().parse::<u64>().ok())
        .sum()
}
