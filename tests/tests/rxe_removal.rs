//! B15: the device's link is deleted under a running worker. A binary of its own, for it destroys the device, and makes
//! it again as it was.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use verbs_bootstrap::TcpNet;
use verbs_tests::{
    lab::{DeviceLab, SMALL_SLABS},
    leaks::Census,
    node::{Node, next},
    process::sh,
    traffic::Run,
};
use verbs_transport::{
    MessageType,
    verbs::{DeviceConfig, DeviceFabric},
};

/// As `cargo softroce` makes it on one host.
const MAKE: &str = "ip link add dummy0 type dummy && ip link set dummy0 mtu 4200 up \
                    && ip addr add 10.99.0.1/24 dev dummy0 && ip addr add 10.99.0.2/24 dev dummy0 \
                    && rdma link add rxe0 type rxe netdev dummy0";

/// Makes the device again when the test fails before it does: the binaries after this one need it.
struct Remake;

impl Drop for Remake {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Nobody is left to hear of a failure.
            let _ = Command::new("sh").args(["-c", &format!("ip link del dummy0; {MAKE}")]).status();
        }
    }
}

/// Every operation fails typed within 2 s, whatever is tried later does, too, the worker ends, and a new device opens.
#[test]
fn deleted_link_ends_everything_typed_and_a_new_device_opens() {
    let _remake = Remake;
    let before = Census::take();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let mut deleting = runtime.block_on(async {
        let lab = DeviceLab::new();
        let (a, mut b) = (Node::start(&lab, 1).await, Node::start(&lab, 2).await);
        a.register(&b);
        b.register(&a);
        let first = Run::new(1024);
        first.burst(&a.worker, b.id(), 10);
        for _ in 0..10 {
            next(&mut b.inbound.message).await;
        }
        let traffic = Run::new(4096);
        traffic.flow(&a.worker, b.id());
        let other_way = Run::new(4096);
        other_way.flow(&b.worker, a.id());
        std::thread::sleep(Duration::from_millis(100));
        // It returns when nobody holds the device any more.
        let deleting = Command::new("ip").args(["link", "del", "dummy0"]).spawn().expect("the ip command");
        let deleted = Instant::now();
        let ended = |node: &Node<_>| {
            let stats = node.worker.stats();
            stats.connections == 0 && stats.send_slabs_free == SMALL_SLABS.send_slabs as usize
        };
        while !(ended(&a) && ended(&b)) {
            assert!(deleted.elapsed() < Duration::from_secs(2), "{:?}\n{:?}", a.worker.stats(), b.worker.stats());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        eprintln!("ended after {:?}: {:?} and {:?}", deleted.elapsed(), traffic.reasons(), other_way.reasons());
        // One of them may have had nothing under way at that moment.
        assert!(traffic.failures().len() + other_way.failures().len() > 0);

        let late = Run::new(64);
        late.burst(&a.worker, b.id(), 10);
        let tried = Instant::now();
        while late.failures().len() < 10 {
            assert!(tried.elapsed() < Duration::from_secs(2), "{:?}", late.reasons());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        eprintln!("a send without a device: {:?} after {:?}", late.reasons(), tried.elapsed());
        let error = a.worker.ensure_connected(b.id()).await.expect_err("there is no device");
        eprintln!("connecting without a device: {error}");
        match DeviceFabric::open(&DeviceConfig::default(), TcpNet::default()) {
            Ok(_) => panic!("there is no device to open"),
            Err(error) => eprintln!("opening without a device: {error}"),
        }

        let stopping = Instant::now();
        drop(a);
        b.stop().await;
        assert!(stopping.elapsed() < Duration::from_secs(3), "shutdown took {:?}", stopping.elapsed());
        deleting
    });
    runtime.shutdown_timeout(Duration::from_secs(5));
    // The old device goes with its last context, and the command that deletes its link ends.
    let gone = Instant::now();
    while std::path::Path::new("/sys/class/infiniband/rxe0").exists()
        || deleting.try_wait().expect("a child of ours").is_none()
    {
        assert!(gone.elapsed() < Duration::from_secs(15), "the deleted device is still held");
        std::thread::sleep(Duration::from_millis(10));
    }
    sh(MAKE);
    before.assert_same();

    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let lab = DeviceLab::new();
        let (a, mut b) = (Node::start(&lab, 1).await, Node::start(&lab, 2).await);
        a.register(&b);
        a.send_numbered(b.id(), MessageType::Message, 1);
        verbs_tests::node::assert_numbered(&next(&mut b.inbound.message).await, 1);
        a.errors.assert_none();
        a.stop().await;
        b.stop().await;
    });
}
