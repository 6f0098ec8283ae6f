//! One side's workers: opened, started, polled until something has happened.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, OnceLock, atomic::Ordering},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{
    runtime::{Builder, Runtime},
    task::{JoinHandle, JoinSet},
};
use verbs_rma::{Bulk, BulkConfig, Region, bulk::Notifications};
use verbs_transport::{
    Borrowed, Config, Handler, InstanceId, MessageType, Progress, SendOutcome, TcpNet, Worker, WorkerAddress,
    fabric::{
        SLAB_BYTES, SlabSizes,
        bulk::{Access, OwnedBytes},
    },
    verbs::{DeviceConfig, DeviceFabric},
};

use super::{
    args::{Common, Polling},
    control::{BulkSetup, Setup},
    failure::Failure,
    signal::{Signal, lock},
};

/// Measurements run on a device.
pub(crate) type Fabric = DeviceFabric<TcpNet>;

/// Nothing moves for so long: a message is lost, or the other side stands.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Receives that the library keeps beside the peers' windows, and those for each peer, at its default window.
const SLABS_BESIDE: u32 = 80;
const SLABS_A_PEER: u32 = 70;
const SEND_WRS: u32 = 63;
/// Empty polls between two looks at what else may have happened.
const POLLS_A_LOOK: u32 = 256;

/// What a frame does when it comes; it runs on whoever polls.
pub(crate) type OnFrame = Box<dyn FnMut(&Worker<Fabric>, Borrowed<'_>) + Send>;

/// The handler of one worker. What it does changes from run to run.
pub(crate) struct Role {
    worker: OnceLock<Worker<Fabric>>,
    on_frame: Mutex<Option<OnFrame>>,
    signal: Arc<Signal>,
}

/// For `Worker::start_with_handler`, which keeps it until shutdown.
struct Handing(Arc<Role>);

impl Handler for Handing {
    fn on_frame(&self, frame: Borrowed<'_>) {
        let role = &self.0;
        role.signal.count_frame();
        if let (Some(worker), Some(on_frame)) = (role.worker.get(), &mut *lock(&role.on_frame)) {
            on_frame(worker, frame);
        }
    }
}

/// A worker and what its frames do.
pub(crate) struct Member {
    pub(crate) worker: Worker<Fabric>,
    bulk: Option<BulkMember>,
    role: Arc<Role>,
}

/// What peers tell, for one task at a time.
pub(crate) type Told = Arc<tokio::sync::Mutex<Notifications<Fabric>>>;

/// Its bulk memory, and what peers tell by it.
#[derive(Clone)]
struct BulkMember {
    bulk: Bulk<Fabric>,
    told: Told,
}

impl Member {
    /// From now on frames do this.
    pub(crate) fn set(&self, on_frame: OnFrame) {
        *lock(&self.role.on_frame) = Some(on_frame);
    }

    /// Frames do nothing.
    pub(crate) fn clear(&self) {
        *lock(&self.role.on_frame) = None;
    }
}

/// All workers of one side.
pub(crate) struct Node {
    runtime: Runtime,
    pub(crate) signal: Arc<Signal>,
    polling: Polling,
    pub(crate) members: Vec<Member>,
}

impl Node {
    /// No worker yet.
    pub(crate) fn new(polling: Polling, signal: &Arc<Signal>) -> Result<Self, Failure> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|error| Failure::System(Arc::new(error)))?;
        Ok(Self { runtime, signal: signal.clone(), polling, members: Vec::new() })
    }

    /// How its workers are polled.
    pub(crate) fn polling(&self) -> Polling {
        self.polling
    }

    /// One more worker, for so many peers, which the others reach at `ip`.
    pub(crate) fn add(&mut self, common: &Common, setup: &Setup, peers: u32, ip: IpAddr) -> Result<(), Failure> {
        let role = Arc::new(Role { worker: OnceLock::new(), on_frame: Mutex::new(None), signal: self.signal.clone() });
        let worker = Worker::new(config(setup, ip), open(common, setup, peers)?)?;
        let _inside = self.runtime.enter();
        let bulk = setup.bulk.map(|bulk| Bulk::attach(&worker, bulk_config(bulk))).transpose();
        let bulk = bulk.map_err(|error| Failure::Bulk(Arc::new(error)))?;
        let bulk = bulk.map(|(bulk, told)| BulkMember { bulk, told: Arc::new(tokio::sync::Mutex::new(told)) });
        self.runtime.block_on(worker.start_with_handler(Handing(role.clone())))?;
        let _ = role.worker.set(worker.clone());
        self.members.push(Member { worker, bulk, role });
        Ok(())
    }

    /// The addresses of all workers, in hexadecimal.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.members.iter().map(|member| to_hex(member.worker.address().as_bytes())).collect()
    }

    /// Connects a worker to a peer; how long it took until the connection was proven.
    pub(crate) fn connect(&self, member: usize, peer: InstanceId) -> Result<Duration, Failure> {
        self.connect_all(member, &[peer])
    }

    /// Connects a worker to several peers at once; how long it took until the last connection was proven.
    pub(crate) fn connect_all(&self, member: usize, peers: &[InstanceId]) -> Result<Duration, Failure> {
        let worker = &self.members[member].worker;
        let began = Instant::now();
        let mut attempts = JoinSet::new();
        for &peer in peers {
            let (worker, signal) = (worker.clone(), self.signal.clone());
            let attempt = async move {
                let result = worker.ensure_connected(peer).await;
                let took = began.elapsed();
                signal.tell(); // else whoever waits looks at the end of its sleep
                result.map(|()| took)
            };
            attempts.spawn_on(attempt, self.runtime.handle());
        }
        // Where nobody else polls the connections are proven here.
        let mut last = Duration::ZERO;
        self.wait("the connection", Some(PATIENCE), || {
            loop {
                match attempts.try_join_next() {
                    Some(Ok(Ok(took))) => last = last.max(took),
                    Some(Ok(Err(error))) => return Some(Err(error.into())),
                    Some(Err(error)) => return Some(Err(Failure::System(Arc::new(error.into())))),
                    None => return attempts.is_empty().then_some(Ok(last)),
                }
            }
        })?
    }

    /// Polls, or sleeps, until `found` gives something. An error: the trouble that came first, or `patience` without a
    /// frame.
    pub(crate) fn wait<T>(
        &self,
        waiting_for: &'static str,
        patience: Option<Duration>,
        mut found: impl FnMut() -> Option<T>,
    ) -> Result<T, Failure> {
        let _inside = self.runtime.enter(); // polling registers the device's fds with the runtime
        let mut watch = Watch::new(self, waiting_for, patience);
        loop {
            if let Some(found) = found() {
                return Ok(found);
            }
            self.step(&mut watch)?;
        }
    }

    /// One poll, or one short sleep.
    fn step(&self, watch: &mut Watch) -> Result<(), Failure> {
        if self.polling == Polling::Manual {
            let mut polled = 0;
            for member in &self.members {
                polled += member.worker.progress()?;
            }
            watch.empty_polls = if polled == 0 { watch.empty_polls.wrapping_add(1) } else { 0 };
            if watch.empty_polls % POLLS_A_LOOK != POLLS_A_LOOK - 1 && !self.members.is_empty() {
                return Ok(());
            }
        }
        if self.polling != Polling::Manual || self.members.is_empty() {
            let moment = Duration::from_millis(20);
            let _elapsed = self.runtime.block_on(async { tokio::time::timeout(moment, self.signal.told()).await });
        }
        watch.look(&self.signal)
    }

    /// Polls once, if that is this side's way.
    pub(crate) fn poll(&self) -> Result<(), Failure> {
        if self.polling == Polling::Manual {
            let _inside = self.runtime.enter();
            for member in &self.members {
                member.worker.progress()?;
            }
        }
        Ok(())
    }

    /// Sends one message, and waits while the peer's channel is full.
    pub(crate) fn send(
        &self,
        member: usize,
        peer: InstanceId,
        payload: &Bytes,
        kind: MessageType,
    ) -> Result<(), Failure> {
        let outcome = self.members[member].worker.send(peer, Bytes::new(), payload.clone(), kind, self.signal.clone());
        let SendOutcome::Pending(admission) = outcome else { return Ok(()) };
        if self.polling == Polling::Manual {
            return self.wait("room to send", Some(PATIENCE), || {
                use verbs_transport::AdmissionState::{Admitted, Failed, Pending};
                match admission.state() {
                    Pending => None,
                    Admitted => Some(Ok(())),
                    Failed(error) => Some(Err(error.into())),
                }
            })?;
        }
        // The library bounds it by `admission_deadline`.
        self.runtime.block_on(admission)?;
        self.signal.check()
    }

    /// Bulk memory of the first worker, and what is told by it.
    pub(crate) fn bulk(&self) -> Result<(Bulk<Fabric>, Told), Failure> {
        let bulk = self.members.first().and_then(|member| member.bulk.clone());
        let BulkMember { bulk, told } = bulk.ok_or_else(|| Failure::Protocol("no bulk memory".to_owned()))?;
        Ok((bulk, told))
    }

    /// Registers so many bytes.
    pub(crate) fn map(&self, bytes: usize, access: Access) -> Result<Region, Failure> {
        let (bulk, _) = self.bulk()?;
        let map = bulk.map_all(OwnedBytes::new(vec![0x5a; bytes]), access);
        self.runtime.block_on(map).map_err(|error| Failure::Map { bytes, source: Arc::new(error) })
    }

    /// Takes them down again.
    pub(crate) fn unmap(&self, region: Region) -> Result<(), Failure> {
        let (bulk, _) = self.bulk()?;
        self.runtime.block_on(bulk.unmap(region.id))?;
        Ok(())
    }

    /// A task beside the workers' own.
    pub(crate) fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.runtime.spawn(task)
    }

    /// Its end.
    pub(crate) fn join<T>(&self, task: JoinHandle<T>) -> Result<T, Failure> {
        self.runtime.block_on(task).map_err(|error| Failure::System(Arc::new(error.into())))
    }

    /// Ends all workers.
    pub(crate) fn shutdown(&mut self) {
        for member in self.members.drain(..) {
            member.clear();
            if let Some(BulkMember { bulk, .. }) = &member.bulk {
                self.runtime.block_on(bulk.shutdown());
            }
            self.runtime.block_on(member.worker.shutdown());
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// Patience while waiting.
struct Watch {
    waiting_for: &'static str,
    patience: Option<Duration>,
    frames: u64,
    since: Instant,
    empty_polls: u32,
}

impl Watch {
    fn new(node: &Node, waiting_for: &'static str, patience: Option<Duration>) -> Self {
        let frames = node.signal.frames.load(Ordering::Relaxed);
        Self { waiting_for, patience, frames, since: Instant::now(), empty_polls: 0 }
    }

    fn look(&mut self, signal: &Signal) -> Result<(), Failure> {
        signal.check()?;
        let Some(patience) = self.patience else { return Ok(()) };
        let frames = signal.frames.load(Ordering::Relaxed);
        if frames != self.frames {
            (self.frames, self.since) = (frames, Instant::now());
        } else if self.since.elapsed() > patience {
            return Err(Failure::Silence { who: "other side", after: patience, waiting_for: self.waiting_for });
        }
        Ok(())
    }
}

/// Opens the device with as many slabs as so many peers need.
pub(crate) fn open(common: &Common, setup: &Setup, peers: u32) -> Result<Fabric, Failure> {
    let slab_bytes = setup.slab_bytes.unwrap_or(SLAB_BYTES);
    let receive_slabs = SLABS_BESIDE + peers * SLABS_A_PEER;
    let send_slabs = if peers > 1 { 256 } else { 128 };
    let send_wrs = setup.send_wrs.unwrap_or(SEND_WRS);
    let config = DeviceConfig {
        device: common.device.clone(),
        port: common.ib_port,
        gid_index: common.gid_index,
        mtu_cap: common.mtu,
        slabs: SlabSizes { receive_slabs, receive_bytes: slab_bytes, send_slabs, send_bytes: slab_bytes },
        // Twice, as the connection that ends and the one that follows it are both there for a moment.
        cq_depth: (receive_slabs + 2 * peers * (send_wrs + 1)).max(1024),
        ..DeviceConfig::default()
    };
    Ok(DeviceFabric::open(&config, TcpNet::default())?)
}

fn config(setup: &Setup, ip: IpAddr) -> Config {
    let defaults = Config::default();
    // A frame's header goes with its bytes.
    let inline = setup.inline_bytes.map(|bytes| if bytes == 0 { 0 } else { bytes + FRAME_BYTES });
    Config {
        bind: (ip, 0).into(),
        pack_waiting: setup.pack,
        progress: match setup.polling {
            Polling::Manual => Progress::Manual,
            Polling::BusyPoll => Progress::BusyPoll,
            Polling::Spin => Progress::SpinThenPark { spin: Duration::from_micros(setup.spin_us) },
            Polling::Event => Progress::Event,
        },
        inline_request_bytes: inline.unwrap_or(defaults.inline_request_bytes),
        inline_threshold_bytes: inline.unwrap_or(defaults.inline_threshold_bytes),
        send_wrs: setup.send_wrs.unwrap_or(defaults.send_wrs),
        signal_every: setup.signal_every.unwrap_or(defaults.signal_every),
        ..defaults
    }
}

fn bulk_config(setup: BulkSetup) -> BulkConfig {
    let defaults = BulkConfig::default();
    BulkConfig {
        chunk_bytes: setup.chunk_bytes.unwrap_or(defaults.chunk_bytes),
        rd_atomic_max: setup.outs.unwrap_or(defaults.rd_atomic_max),
        send_wrs: setup.send_wrs.unwrap_or(defaults.send_wrs),
        ..defaults
    }
}

/// What the library puts in front of each message.
const FRAME_BYTES: u32 = verbs_transport::proto::frame::HEADER_BYTES_U32;

fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes all");
        text
    })
}

/// An address as the other side wrote it.
pub(crate) fn from_hex(text: &str) -> Result<WorkerAddress, Failure> {
    let unclear = || Failure::Protocol("an address that is not hexadecimal".to_owned());
    let digits: Option<Vec<u8>> =
        text.chars().map(|digit| digit.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0).ok_or_else(unclear)?;
    Ok(WorkerAddress::from_bytes(digits.chunks_exact(2).map(|pair| (pair[0] << 4) | pair[1]).collect::<Vec<u8>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_hexadecimal() {
        let bytes = vec![0, 1, 0xab, 0xff];
        assert_eq!(to_hex(&bytes), "0001abff");
        assert_eq!(from_hex("0001abff").unwrap().as_bytes()[..], bytes);
        for wrong in ["0", "zz", "0g", "é"] {
            assert!(matches!(from_hex(wrong), Err(Failure::Protocol(_))), "{wrong}");
        }
    }
}
