//! A fabric with its slabs and two QPs that talk to each other, and the check that nothing is left behind.

use std::{
    collections::BTreeMap,
    fs,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use verbs_bootstrap::{Mtu, Psn, QpEndpoint, RdAtomic, TcpConfig, TcpNet};
use verbs_transport::{
    fabric::{Fabric, FabricQp, QpCaps, QpPath, QpTimers, RecvSlab, SendData, SendSlab, SendWr, SlabSizes, Wc, WrSeq},
    verbs::{DeviceConfig, DeviceFabric, DeviceQp, OpenError},
};

pub(crate) type Device = DeviceFabric<TcpNet>;

/// A small pool: pinning costs 41 µs a page in an emulated guest.
pub(crate) fn config() -> DeviceConfig {
    DeviceConfig {
        slabs: SlabSizes { receive_slabs: 64, receive_bytes: 8192, send_slabs: 16, send_bytes: 8192 },
        cq_depth: 1024,
        ..DeviceConfig::default()
    }
}

pub(crate) fn open(config: &DeviceConfig) -> Result<Device, OpenError> {
    DeviceFabric::open(config, TcpNet::new(&TcpConfig::default()))
}

pub(crate) const TIMERS: QpTimers =
    QpTimers { ack_timeout_code: 14, retry_cnt: 6, rnr_retry: 7, min_rnr_timer_code: 3 };

pub(crate) const CAPS: QpCaps = QpCaps { send_wrs: 63, inline_bytes: 256 };

pub(crate) struct Rig {
    pub(crate) device: Device,
    /// Receive slabs that are not posted.
    pub(crate) spare: Vec<RecvSlab>,
    pub(crate) send_slabs: Vec<SendSlab>,
}

impl Rig {
    /// Opens the device and posts every receive.
    pub(crate) fn new(config: &DeviceConfig) -> Self {
        let device = open(config).unwrap_or_else(|error| panic!("this test needs a device: {error}"));
        let (mut spare, send_slabs) = device.take_slabs();
        device.post_receives(&mut spare).expect("an SRQ takes all its slabs");
        assert!(spare.is_empty());
        Self { device, spare, send_slabs }
    }

    pub(crate) fn qp(&self) -> Arc<DeviceQp> {
        Arc::new(self.device.create_qp(CAPS).expect("a QP"))
    }

    /// Two QPs of this fabric, connected to each other.
    pub(crate) async fn pair(&self) -> (Arc<DeviceQp>, Arc<DeviceQp>) {
        let (a, b) = (self.qp(), self.qp());
        connect(&a, &self.device, &b, &self.device).await;
        (a, b)
    }

    /// Polls until `enough` says so; gives what came.
    pub(crate) fn poll_until(&self, enough: impl Fn(&[Wc]) -> bool) -> Vec<Wc> {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut wcs = Vec::new();
        while !enough(&wcs) {
            assert!(Instant::now() < deadline, "after 20 s only {wcs:?}");
            if self.device.poll(&mut wcs).expect("a CQ") == 0 {
                thread::yield_now();
            }
        }
        wcs
    }

    pub(crate) fn read(&self, slab: &RecvSlab, bytes: u32) -> Vec<u8> {
        let mut out = Vec::new();
        self.device.append_slab(slab, 0, bytes as usize, &mut out);
        out
    }

    /// Takes one message from the SRQ and gives its slab back to it.
    pub(crate) fn receive_one(&mut self) -> Vec<u8> {
        let wcs = self.poll_until(|wcs| wcs.iter().any(|wc| matches!(wc, Wc::Receive { .. })));
        let mut message = None;
        for wc in wcs {
            match wc {
                Wc::Receive { slab, bytes, .. } => {
                    message = Some(self.read(&slab, bytes));
                    self.spare.push(slab);
                }
                Wc::Send { .. } => {}
                failed => panic!("{failed:?}"),
            }
        }
        self.device.post_receives(&mut self.spare).expect("room in the SRQ");
        message.expect("a message")
    }
}

/// Drives both QPs to RTS, with the smaller MTU of the two.
pub(crate) async fn connect(a: &Arc<DeviceQp>, on_a: &Device, b: &Arc<DeviceQp>, on_b: &Device) {
    let mtu = on_a.port().mtu.min(on_b.port().mtu);
    DeviceQp::connect(Arc::clone(a), path_to(b, on_b, mtu)).await.expect("a path");
    DeviceQp::connect(Arc::clone(b), path_to(a, on_a, mtu)).await.expect("a path");
}

pub(crate) fn path_to(peer: &DeviceQp, on: &Device, mtu: Mtu) -> QpPath {
    let psn = Psn::from_random(0x00ff_fff0); // wraps within the first messages
    QpPath {
        remote: QpEndpoint { qpn: peer.qpn(), psn },
        remote_port: on.port(),
        local_psn: psn,
        mtu,
        rd_atomic: RdAtomic { initiator: 16, responder: 16 },
        timers: TIMERS,
    }
}

pub(crate) fn inline(seq: u64, bytes: &[u8]) -> SendWr<'_> {
    SendWr { seq: WrSeq(seq), signaled: true, data: SendData::Inline(bytes) }
}

pub(crate) fn from_slab(seq: u64, slab: &SendSlab, len: u32) -> SendWr<'_> {
    SendWr { seq: WrSeq(seq), signaled: true, data: SendData::Slab { slab, len } }
}

pub(crate) fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|position| u8::try_from((seed * 31 + position) % 251).expect("below 251")).collect()
}

/// What this process and the devices hold. One test at a time: the counts are the machine's.
pub(crate) struct Baseline {
    before: BTreeMap<String, u64>,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Baseline {
    fn take() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Self { before: counts(), _alone: alone }
    }

    fn check(self) {
        // The kernel may take a moment over the last of a QP.
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let after = counts();
            // Fewer is no leak: what a test before had left to the background was still counted then.
            if after.iter().all(|(what, count)| self.before.get(what).is_some_and(|before| count <= before)) {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {:?} before, {after:?} after", self.before);
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Runs a test in a runtime of its own, and checks that no fd, QP, MR, CQ, SRQ, PD or context is left after it.
pub(crate) fn leaving_nothing(test: impl Future<Output = ()>) {
    verbs_tests::leaks::first_runtime();
    let baseline = Baseline::take();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(test);
    drop(runtime);
    baseline.check();
}

fn counts() -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    counts.insert("fd".to_owned(), fs::read_dir("/proc/self/fd").map_or(0, |fds| fds.count() as u64));
    let output = Command::new("rdma").args(["res", "show"]).output().expect("iproute2's rdma");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // `0: rxe0: pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 0 srq 0`
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(device) = words.get(1) else { continue };
        for pair in words.get(2..).unwrap_or_default().chunks(2) {
            if let [what, count] = pair {
                counts.insert(format!("{device}{what}"), count.parse().expect("a count"));
            }
        }
    }
    assert!(counts.len() > 1, "`rdma res show` printed {text:?}");
    counts
}

/// Runs a command of the machine's, which must succeed.
pub(crate) fn command(line: &str) {
    let status = Command::new("sh").args(["-c", line]).status().expect("a shell");
    assert!(status.success(), "{line}: {status}");
}

/// Runs a command when dropped, whatever became of the test: later ones need the machine as it was.
#[must_use]
pub(crate) struct Undo(pub(crate) String);

impl Drop for Undo {
    fn drop(&mut self) {
        // A failure shows in the tests that follow; a panic here could hide the one that is under way.
        let _ = Command::new("sh").args(["-c", &self.0]).status();
    }
}

/// Waits until the default choice works: addresses and their GIDs come back a little after their link.
pub(crate) async fn until_it_opens() {
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(error) = open(&config()) {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The network device under the first device's port.
pub(crate) fn netdev() -> String {
    let name = fs::read_dir("/sys/class/infiniband").expect("devices").next().expect("a device").expect("a name");
    let ndevs = name.path().join("ports/1/gid_attrs/ndevs/0");
    fs::read_to_string(ndevs).expect("the network device of GID 0").trim().to_owned()
}
