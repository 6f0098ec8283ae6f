//! Grants by windows on this machine's device, Soft-RoCE included, which does not enforce their bounds: so this shows
//! that binding, invalidating and receipts work there, and that every window is dead before its QP goes.

#[path = "../../engine/tests/common/mod.rs"]
mod common;

use std::{sync::Arc, time::Instant};

use common::{LONG, bytes_of, eventually, memory, pattern, rdma::SLABS};
use verbs_bootstrap::TcpNet;
use verbs_engine::{Config, Direction, Engine, Permission, RdmaConfig, ServeDirect, TransferRequest, TransportPolicy};
use verbs_tests::leaks::Census;
use verbs_transport::{
    fabric::bulk::WindowPolicy,
    verbs::{DeviceConfig, DeviceFabric},
};

fn start(windows: WindowPolicy) -> Engine {
    let device = DeviceConfig { slabs: SLABS, cq_depth: 64, windows, ..DeviceConfig::default() };
    let fabric = DeviceFabric::open(&device, TcpNet::default())
        .expect("a device test needs an RDMA device: `cargo softroce test`");
    let config = Config { transport: TransportPolicy::RdmaOnly, serve_direct: ServeDirect::All, ..Config::default() };
    let rdma = RdmaConfig { max_connections: 8, ..RdmaConfig::default() };
    Engine::with_rdma(config, &rdma, Arc::new(fabric)).expect("loopback is there")
}

/// ET-11: one pair of QPs, 1,000 operations, by registrations and by windows, every third one direct; nothing is left in the
/// device.
#[test]
fn one_pair_carries_a_thousand_operations() {
    verbs_tests::leaks::first_runtime();
    for windows in [WindowPolicy::Never, WindowPolicy::Always] {
        let before = Census::take();
        let (source, requester) = (start(windows), start(windows));
        let served = memory(&source, 65_536, Permission::RemoteReadWrite);
        let local = memory(&requester, 65_536, Permission::LocalOnly);
        let peer = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
        let began = Instant::now();
        for round in 0..1000_usize {
            let length = [1, 4096, 8191, 20_000][round % 4];
            let sent = pattern(length, u8::try_from(round % 251).expect("small"));
            let (direction, from, to) =
                if round % 2 == 0 { (Direction::Read, &served, &local) } else { (Direction::Write, &local, &served) };
            from.write(0, &sent).expect("in range");
            let (local_address, remote_address) = (local.address(), served.address());
            let request = TransferRequest { local_address, remote_address, length: length as u64 };
            let mode = if round % 3 == 0 { direction.direct() } else { direction.into() };
            let report = requester.submit_and_wait(&peer, mode, &[request], LONG).expect("sound");
            assert!(report.is_complete(), "round {round}: {report:?}");
            assert!(bytes_of(to)[..length] == sent, "round {round}");
        }
        println!("{windows:?}: 1,000 operations in {:?}", began.elapsed());
        let stats = requester.stats();
        assert_eq!((stats.rdma_completed, stats.connections_dialled, stats.connections_reused), (1000, 2, 999));
        assert_eq!(stats.direct_completed, 334);
        eventually("the source has it back", || source.stats().rdma_idle == 1);
        drop((peer, served, local, requester, source));
        before.assert_same();
    }
}
