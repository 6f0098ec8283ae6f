//! INIT to RTR to RTS, and what stands in the way.

use std::{
    future::poll_fn,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::timeout;
use verbs_bootstrap::{Gid, RdAtomic};
use verbs_transport::{
    fabric::{AsyncEvent, ConnectQpError, Fabric, FabricQp},
    verbs::{DeviceConfig, DeviceQp},
};

use crate::rig::{Rig, Undo, command, config, connect, inline, leaving_nothing, netdev, open, path_to};

#[test]
fn a_qp_sends_only_once_connected() {
    leaving_nothing(async {
        let mut rig = Rig::new(&config());
        let (a, b) = (rig.qp(), rig.qp());
        assert!(!a.is_rts().expect("a state"));
        let error = a.post(&[inline(0, b"early")]).expect_err("not connected");
        assert_eq!((error.posted, error.source.kind()), (0, std::io::ErrorKind::NotConnected));
        connect(&a, &rig.device, &b, &rig.device).await;
        assert!(a.is_rts().expect("a state"));
        a.post(&[inline(0, b"now")]).expect("a post");
        assert_eq!(rig.receive_one(), b"now");
    });
}

#[test]
fn connecting_again_to_the_same_peer_is_nothing_and_to_another_an_error() {
    leaving_nothing(async {
        let mut rig = Rig::new(&config());
        let (a, b) = rig.pair().await;
        let mtu = rig.device.port().mtu;
        DeviceQp::connect(Arc::clone(&a), path_to(&b, &rig.device, mtu)).await.expect("the same path");
        let other = rig.qp();
        let error = DeviceQp::connect(Arc::clone(&a), path_to(&other, &rig.device, mtu)).await.expect_err("another");
        assert!(matches!(error, ConnectQpError::Device { .. }), "{error}");
        a.post(&[inline(0, b"unharmed")]).expect("a post");
        assert_eq!(rig.receive_one(), b"unharmed");
    });
}

/// B18: more READs at once than the device takes are cut down to its limit; asking for too many is no failure.
#[test]
fn rd_atomic_above_the_device_is_cut_down() {
    leaving_nothing(async {
        let mut rig = Rig::new(&config());
        let (a, b) = (rig.qp(), rig.qp());
        let mtu = rig.device.port().mtu;
        for (qp, peer, initiator) in [(&a, &b, 255), (&b, &a, 1)] {
            let mut path = path_to(peer, &rig.device, mtu);
            path.rd_atomic = RdAtomic { initiator, responder: 255 };
            DeviceQp::connect(Arc::clone(qp), path).await.expect("within the device's limits");
        }
        a.post(&[inline(0, b"through")]).expect("a post");
        assert_eq!(rig.receive_one(), b"through");
    });
}

/// B03 (b): an IPv6 GID here and an IPv4 one there never pass traffic; the refusal names both.
#[test]
fn gids_of_two_families_are_refused_by_name() {
    leaving_nothing(async {
        let rig = Rig::new(&config());
        let (a, b) = (rig.qp(), rig.qp());
        let mut path = path_to(&b, &rig.device, rig.device.port().mtu);
        path.remote_port.gid = Gid([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);
        let error = DeviceQp::connect(a, path).await.expect_err("two families");
        assert!(matches!(error, ConnectQpError::NoRoute { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("::ffff:") && text.contains("fd00::7"), "{text}");
    });
}

/// An address that goes takes its GID along; when it comes back at another index, it is found again by value.
#[test]
fn a_gid_is_found_again_by_value() {
    leaving_nothing(async {
        let netdev = netdev();
        let add = |address: &str| command(&format!("ip addr add {address}/32 dev {netdev}"));
        let remove = |address: &str| command(&format!("ip addr del {address}/32 dev {netdev}"));
        let _restore = Undo(format!("ip addr flush dev {netdev} to 10.98.0.0/24"));
        add("10.98.0.7");
        let gid = Gid(std::net::Ipv4Addr::new(10, 98, 0, 7).to_ipv6_mapped().octets());
        let mut rig = Rig::new(&DeviceConfig { gid: Some(gid), ..config() });
        let before = rig.device.port().gid_index;
        let (a, b) = (rig.qp(), rig.qp());

        remove("10.98.0.7");
        let told = async {
            while poll_fn(|cx| rig.device.poll_async_event(cx)).await.expect("an event") != AsyncEvent::GidChange {}
        };
        timeout(Duration::from_secs(5), told).await.expect("the change of the table is told");
        let mtu = rig.device.port().mtu;
        let error = DeviceQp::connect(Arc::clone(&a), path_to(&b, &rig.device, mtu)).await.expect_err("gone");
        assert!(matches!(&error, ConnectQpError::GidGone { local_gid, .. } if *local_gid == gid), "{error}");

        add("10.98.0.8"); // takes the free slot
        add("10.98.0.7");
        connect(&a, &rig.device, &b, &rig.device).await;
        let now = rig.device.port().gid_index;
        assert_ne!(now, before, "else this test shows nothing");
        assert!(rig.device.path_reason().ends_with(&format!("now at gid_index {now}")), "{:?}", rig.device);
        a.post(&[inline(0, b"found")]).expect("a post");
        assert_eq!(rig.receive_one(), b"found");
    });
}

/// A second device, on a link whose other end answers nothing. RTR to an absent host blocks in the kernel for a
/// second; the runtime's only thread goes on meanwhile, and the refusal names both addresses. The peer hint picks
/// this device, since the peer is in its subnet.
#[test]
fn an_absent_host_is_no_route_and_blocks_nobody() {
    leaving_nothing(async {
        let _gone = Undo("rdma link delete rxetest; ip link delete rxetest0".to_owned());
        command("ip link add rxetest0 type veth peer name rxetest1");
        command("ip link set rxetest0 up && ip link set rxetest1 up && ip addr add 10.97.0.1/24 dev rxetest0");
        command("rdma link add rxetest type rxe netdev rxetest0");
        let peer = Gid(std::net::Ipv4Addr::new(10, 97, 0, 9).to_ipv6_mapped().octets());
        let with_hint = DeviceConfig { peer: Some(peer), ..config() };
        let deadline = Instant::now() + Duration::from_secs(10);
        while !open(&with_hint).is_ok_and(|device| device.path_reason().starts_with("rxetest ")) {
            assert!(Instant::now() < deadline, "{:?}", open(&with_hint));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let here = tokio::task::LocalSet::new();
        here.run_until(async {
            let rig = Rig::new(&with_hint);
            assert!(open(&config()).expect("the first device").path_reason().starts_with("rxe0 "));
            let a = rig.qp();
            let mut path = path_to(&rig.qp(), &rig.device, rig.device.port().mtu);
            path.remote_port.gid = peer;
            let ticks = tokio::task::spawn_local(async {
                let mut longest = Duration::ZERO;
                loop {
                    let start = Instant::now();
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    longest = longest.max(start.elapsed());
                    if longest > Duration::from_millis(500) {
                        return longest;
                    }
                }
            });
            let start = Instant::now();
            let error = DeviceQp::connect(Arc::clone(&a), path).await.expect_err("nobody there");
            assert!(matches!(error, ConnectQpError::NoRoute { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("::ffff:10.97.0.1") && text.contains("::ffff:10.97.0.9"), "{text}");
            assert!(start.elapsed() > Duration::from_millis(500), "else nothing blocked: {:?}", start.elapsed());
            assert!(!ticks.is_finished(), "the thread was held up");
            ticks.abort();
            assert!(ticks.await.is_err());
        })
        .await;
    });
}
