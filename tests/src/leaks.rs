//! What a process must not have more of after a test than before.

use std::{
    alloc::System,
    fs,
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

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

/// Open descriptors of this process, the one that reads the directory included.
///
/// # Panics
///
/// Without /proc.
pub fn open_descriptors() -> usize {
    entries("/proc/self/fd")
}

fn entries(dir: &str) -> usize {
    fs::read_dir(dir).expect("/proc is mounted").count()
}

/// Bytes that Rust code of this process has allocated and not freed.
pub fn heap_bytes() -> u64 {
    let stats = HEAP.stats();
    (stats.bytes_allocated - stats.bytes_deallocated) as u64
}

/// Blocks that this process has allocated so far, new ones and those that got another size.
pub fn blocks_allocated() -> u64 {
    let stats = HEAP.stats();
    (stats.allocations + stats.reallocations) as u64
}

/// What must not grow: the heap, and the queues that a device's library has mapped, to the byte. Resident pages are
/// no measure of that: what the allocator keeps for a thread, a new thread's stack and the like come and go by megabytes.
///
/// # Panics
///
/// Without /proc.
pub fn held_bytes() -> u64 {
    heap_bytes() + mapped_queue_bytes()
}

/// Bytes mapped from the device nodes: the rings of CQs, QPs and SRQs.
fn mapped_queue_bytes() -> u64 {
    let maps = fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
    let queues = maps.lines().filter(|line| line.contains("/dev/infiniband/"));
    let length = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(u64::from_str_radix(end, 16).ok()? - u64::from_str_radix(start, 16).ok()?)
    };
    queues.map(|line| length(line).expect("start-end of a mapping")).sum()
}

/// Memory of this process's own, in bytes: resident anonymous pages, and the device's queues. Not what programs and
/// libraries have of their files; and not `VmRSS`, to which the kernel adds what a driver maps only after some page faults
/// more, megabytes late.
///
/// # Panics
///
/// Without /proc.
pub fn resident_bytes() -> u64 {
    let sums = fs::read_to_string("/proc/self/smaps_rollup").expect("/proc is mounted");
    let line = sums.lines().find(|line| line.starts_with("Anonymous:")).unwrap_or_default();
    let kib = line.split_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok());
    (kib.unwrap_or(0) << 10) + mapped_queue_bytes()
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
        let output = Command::new("rdma").args(["resource", "show"]).output().expect("the rdma command of iproute2");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Self {
            fds: open_descriptors(),
            threads: entries("/proc/self/task"),
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
