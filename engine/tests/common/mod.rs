//! What the suites share: pairs of engines, and peers that speak the wire byte by byte.

#![allow(dead_code, unreachable_pub, reason = "each suite uses its part")]

pub mod proxy;

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use verbs_engine::{
    Config, Engine, Epoch, HostMemory, Permission, RegisteredMemory, RemoteSegment, ServeDirect, Stats,
    TransferRequest, Transport,
};

/// Every mask that one wrong bit, or all of them, make.
pub const MASKS: [u8; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 255];

/// For what must happen.
pub const LONG: Duration = Duration::from_secs(30);

/// A source with memory, and a requester with some of its own.
pub struct Pair {
    pub source: Engine,
    pub served: RegisteredMemory,
    pub requester: Engine,
    pub local: RegisteredMemory,
    pub peer: RemoteSegment,
}

impl Pair {
    pub fn new(bytes: usize) -> Self {
        Self::with(bytes, Config::default(), Config::default())
    }

    pub fn with(bytes: usize, source: Config, requester: Config) -> Self {
        let (source, requester) = (engine(source), engine(requester));
        let served = memory(&source, bytes, Permission::RemoteReadWrite);
        let local = memory(&requester, bytes, Permission::LocalOnly);
        let peer = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
        Self { source, served, requester, local, peer }
    }

    /// Both serve the direct profile.
    pub fn direct(bytes: usize) -> Self {
        Self::with(bytes, serving_direct(), serving_direct())
    }

    /// `length` bytes between equal offsets.
    pub fn request(&self, offset: u64, length: u64) -> TransferRequest {
        request_between(&self.local, &self.served, offset, length)
    }
}

/// A source that serves all of the direct profile.
pub fn serving_direct() -> Config {
    Config { serve_direct: ServeDirect::All, ..Config::default() }
}

/// `length` bytes between equal offsets of two ranges.
pub fn request_between(
    local: &RegisteredMemory,
    remote: &RegisteredMemory,
    offset: u64,
    length: u64,
) -> TransferRequest {
    TransferRequest { local_address: local.address() + offset, remote_address: remote.address() + offset, length }
}

/// Where the engines of a suite run: the suites are part of `rdma_suites`, on simulated devices, and of `rxe_engine` in
/// the crate `tests`, on the machine's own, as well as programs of their own.
pub fn over() -> Transport {
    match module_path!().split("::").next() {
        Some("rdma_suites" | "rxe_engine" | "rxe_engine_process") => Transport::Rdma,
        _ => Transport::Tcp,
    }
}

/// How often something is done: less on a device, which may be an emulated one.
pub fn times<T>(host: T, device: T) -> T {
    if module_path!().starts_with("rxe_") { device } else { host }
}

pub fn engine(config: Config) -> Engine {
    #[cfg(feature = "rdma")]
    match module_path!().split("::").next() {
        Some("rdma_suites") => return rdma::on_sim(&config),
        Some("rxe_engine" | "rxe_engine_process" | "rxe2_engine") => return rdma::on_device(&config),
        _ => {}
    }
    Engine::new(config).expect("loopback is there")
}

/// For a peer that speaks the wire by hand.
pub fn tcp_engine(config: Config) -> Engine {
    Engine::new(config).expect("loopback is there")
}

/// Engines that have a device and use nothing else for payloads.
#[cfg(feature = "rdma")]
pub mod rdma {
    use std::sync::{
        Arc, LazyLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    };

    use verbs_bootstrap::TcpNet;
    use verbs_engine::{Config, Engine, RdmaConfig, TransportPolicy};
    use verbs_transport::{
        fabric::{SlabSizes, bulk::WindowPolicy},
        sim::{HostConfig, SimConfig, SimWorld},
        verbs::{DeviceConfig, DeviceFabric},
    };

    /// An engine needs none.
    pub const SLABS: SlabSizes = SlabSizes { receive_slabs: 1, receive_bytes: 64, send_slabs: 1, send_bytes: 64 };

    /// On a host of its own in the one world of this process.
    pub fn on_sim(config: &Config) -> Engine {
        static WORLD: LazyLock<SimWorld> = LazyLock::new(|| SimWorld::new(SimConfig::default()));
        static HOSTS: AtomicU32 = AtomicU32::new(0);
        let number = HOSTS.fetch_add(1, Relaxed);
        // Some have no windows: then, as with one of them at the other end, each grant is a registration.
        let windows = if number % 3 == 0 { WindowPolicy::Never } else { WindowPolicy::Auto };
        // Every other has two devices.
        let fabric = |device: u32| {
            let address = std::net::Ipv4Addr::from(0x0a00_0000 + 2 * number + device);
            Arc::new(WORLD.host(address, HostConfig { slabs: SLABS, windows, ..HostConfig::default() }))
        };
        let fabrics = (1..=1 + number % 2).map(fabric).collect();
        let only = Config { transport: TransportPolicy::RdmaOnly, ..config.clone() };
        Engine::with_rdma_devices(only, &RdmaConfig::default(), fabrics).expect("loopback is there")
    }

    /// On this machine's device.
    pub fn on_device(config: &Config) -> Engine {
        let device = DeviceConfig { slabs: SLABS, cq_depth: 64, ..DeviceConfig::default() };
        let fabric = DeviceFabric::open(&device, TcpNet::default())
            .expect("a device test needs an RDMA device: `cargo softroce test`");
        // Small pools: under emulation each page costs.
        let rdma = RdmaConfig { max_connections: 32, ..RdmaConfig::default() };
        let only = Config { transport: TransportPolicy::RdmaOnly, ..config.clone() };
        Engine::with_rdma(only, &rdma, Arc::new(fabric)).expect("loopback is there")
    }
}

/// Zeroed memory.
pub fn memory(engine: &Engine, bytes: usize, permission: Permission) -> RegisteredMemory {
    engine.register_memory(vec![0; bytes].into(), permission).expect("room")
}

/// All bytes of a range.
pub fn bytes_of(memory: &RegisteredMemory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.len()).expect("64 bits")];
    memory.read(0, &mut bytes).expect("its own length");
    bytes
}

/// Bytes that tell where they come from.
pub fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..=250_u8).cycle().skip(usize::from(seed)).take(length).collect()
}

pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "not in {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Every charge that ends with an operation is back; registrations are as many as `registrations`.
pub fn assert_idle(engine: &Engine, registrations: u64) {
    let charges = |s: &Stats| (s.submissions, s.submission_bytes, s.batches, s.batch_slots, s.source_operations);
    eventually("every charge is back", || charges(&engine.stats()) == (0, 0, 0, 0, 0));
    eventually("no direct operation is at anything", || engine.stats().direct_ranges == 0);
    eventually("every range is back", || engine.stats().registrations == registrations);
}

/// Outside memory whose owner says when it goes.
pub fn external(length: usize, dropped: &Arc<std::sync::atomic::AtomicU32>) -> Arc<HostMemory> {
    struct Owner(Vec<u8>, Arc<std::sync::atomic::AtomicU32>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fill(0xdd);
            self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    }
    let mut bytes = vec![0_u8; length];
    let start = bytes.as_mut_ptr();
    #[allow(unsafe_code)]
    // SAFETY: the vector moves into the owner, which touches it only when it is dropped.
    let memory = unsafe { HostMemory::from_raw_parts(start, length, Owner(bytes, Arc::clone(dropped))) };
    Arc::new(memory.expect("a vector is memory"))
}

/// The wire as `docs/engine-wire.md` describes it, written down a second time on purpose.
pub mod wire {
    use super::Epoch;

    pub const REQUEST: usize = 52;
    pub const REPLY: usize = 36;
    pub const DESCRIBE: u8 = 0;
    pub const READ: u8 = 1;
    pub const WRITE: u8 = 2;
    pub const NOTIFY: u8 = 3;
    pub const SUCCESS: u8 = 0;
    pub const EPOCH_MISMATCH: u8 = 1;
    pub const UNKNOWN_REGION: u8 = 2;
    pub const PERMISSION_DENIED: u8 = 3;
    pub const INVALID_RANGE: u8 = 4;
    pub const CLOSED: u8 = 5;
    pub const EXHAUSTED: u8 = 6;
    pub const PROTOCOL: u8 = 7;
    pub const READY: u8 = 9;
    pub const UNAVAILABLE: u8 = 10;
    pub const DIRECT_REFUSED: u8 = 13;
    /// In byte 11 of a request.
    pub const DIRECT: u8 = 1;

    pub fn request(kind: u8, epoch: Epoch, region: u64, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = b"VRBSENGN\x00\x01".to_vec();
        bytes.extend([kind, 0]);
        bytes.extend(epoch.to_bytes());
        bytes.extend([region, offset, length].into_iter().flat_map(u64::to_be_bytes));
        bytes
    }

    pub fn reply(status: u8, epoch: Epoch, length: u64) -> Vec<u8> {
        let mut bytes = b"VRBSENGN\x00\x01".to_vec();
        bytes.extend([status, 0]);
        bytes.extend(epoch.to_bytes());
        bytes.extend(length.to_be_bytes());
        bytes
    }

    /// One region, of a source without a name and devices.
    pub fn description(id: u64, base: u64, length: u64, permission: u8) -> Vec<u8> {
        let mut bytes = 1_u32.to_be_bytes().to_vec();
        bytes.extend([id, base, length].into_iter().flat_map(u64::to_be_bytes));
        bytes.extend([permission, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([0, 0]);
        bytes
    }
}

/// A bare connection to a real source.
pub struct RawRequester {
    pub stream: TcpStream,
}

impl RawRequester {
    pub fn connect(to: SocketAddr) -> Self {
        let stream = TcpStream::connect(to).expect("it listens");
        stream.set_nodelay(true).expect("an option");
        stream.set_read_timeout(Some(LONG)).expect("an option");
        Self { stream }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        // The source may have closed already; what it says is what counts.
        let _ = self.stream.write_all(bytes);
    }

    /// Status and length of a reply; `None` if the source closed without one.
    pub fn reply(&mut self) -> Option<(u8, u64)> {
        let mut bytes = [0; wire::REPLY];
        self.stream.read_exact(&mut bytes).ok()?;
        assert_eq!(&bytes[..10], b"VRBSENGN\x00\x01", "a reply is sound, whatever the request was");
        Some((bytes[10], u64::from_be_bytes(bytes[28..].try_into().expect("8 bytes"))))
    }

    pub fn body(&mut self, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Whether the source closes the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0)) || self.stream.take_error().is_ok_and(|error| error.is_some())
    }

    pub fn half_close(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }
}

/// A bare source that a real requester talks to: it answers descriptions with one region of 64 KiB at
/// [`RawSource::BASE`], and everything else by `answer`.
pub struct RawSource {
    pub endpoint: SocketAddr,
    pub epoch: Epoch,
    /// Requests that are no descriptions.
    pub requests: Arc<std::sync::atomic::AtomicU32>,
}

impl RawSource {
    pub const BASE: u64 = 0x10_0000;
    pub const LENGTH: u64 = 64 << 10;

    /// `answer` gets each connection with the request that came on it.
    pub fn start(answer: impl Fn(&mut TcpStream, &[u8]) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
        let endpoint = listener.local_addr().expect("bound");
        let epoch = Epoch::from_bytes([0x77; 16]);
        let requests = Arc::<std::sync::atomic::AtomicU32>::default();
        let (counter, answer) = (Arc::clone(&requests), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, counter, answer) =
                    (stream.expect("a peer"), Arc::clone(&counter), Arc::clone(&answer));
                std::thread::spawn(move || {
                    let mut request = [0; wire::REQUEST];
                    while stream.read_exact(&mut request).is_ok() {
                        if request[10] == wire::DESCRIBE {
                            let description = wire::description(1, Self::BASE, Self::LENGTH, 3);
                            let mut bytes = wire::reply(wire::SUCCESS, epoch, description.len() as u64);
                            bytes.extend(description);
                            let _ = stream.write_all(&bytes);
                        } else {
                            counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                            answer(&mut stream, &request);
                            return;
                        }
                    }
                });
            }
        });
        Self { endpoint, epoch, requests }
    }
}
