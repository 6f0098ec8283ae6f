//! What is asked for, what is chosen, and every refusal.

use std::{
    env,
    process::Command,
    time::{Duration, Instant},
};

use verbs_bootstrap::{Gid, GidFamily, Mtu};
use verbs_transport::{
    fabric::{AsyncEvent, CreateQpError, Fabric, FabricQp, QpCaps, SlabSizes},
    select::ChooseError,
    verbs::{DeviceConfig, OpenError, PageKind},
};

use crate::rig::{Rig, Undo, command, config, inline, leaving_nothing, netdev, open, until_it_opens};

fn refusal(config: &DeviceConfig) -> OpenError {
    open(config).expect_err("a refusal")
}

/// B02 on a device: index 0 is link-local there, and the IPv4-mapped GID behind it is chosen; the reason says why.
#[test]
fn the_ipv4_address_is_chosen_and_the_reason_kept() {
    leaving_nothing(async {
        let rig = Rig::new(&config());
        let port = rig.device.port();
        assert_eq!(port.gid.family(), GidFamily::Ipv4Mapped, "{}", rig.device.path_reason());
        assert!(rig.device.path_reason().contains("IPv4-mapped preferred over"), "{}", rig.device.path_reason());
        assert_ne!(port.device_guid, 0);
        assert_eq!(port.pkey, 0xffff);
        let limits = rig.device.limits();
        assert!(limits.cq_depth >= 1024 && limits.cq_depth <= limits.cqes, "{limits:?}");
        assert!(limits.rd_atomic.initiator >= 1 && limits.rd_atomic.responder >= 1, "{limits:?}");
    });
}

/// B03 (a) on a device: without an IPv4 address the unique local IPv6 one is taken, not link-local at index 0; bytes
/// pass.
#[test]
fn without_ipv4_the_unique_local_address_is_chosen() {
    leaving_nothing(async {
        let netdev = netdev();
        let listed = Command::new("ip").args(["-4", "-o", "addr", "show", "dev", &netdev]).output().expect("ip");
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let addresses: Vec<&str> = listed
            .lines()
            .filter_map(|line| line.split_ascii_whitespace().skip_while(|word| *word != "inet").nth(1))
            .collect();
        assert!(!addresses.is_empty(), "{listed:?}");
        let restore = Undo(format!(
            "ip addr del fd00::7/64 dev {netdev}; for a in {}; do ip addr add $a dev {netdev}; done",
            addresses.join(" ")
        ));
        command(&format!("ip addr add fd00::7/64 dev {netdev} nodad"));
        for address in &addresses {
            // Secondary ones go with their first.
            command(&format!("ip addr del {address} dev {netdev} 2> /dev/null || true"));
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut rig = loop {
            let rig = Rig::new(&config());
            if rig.device.port().gid.family() == GidFamily::Ipv6 {
                break rig;
            }
            assert!(Instant::now() < deadline, "{}", rig.device.path_reason());
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        assert_eq!(rig.device.port().gid.to_string(), "fd00::7");
        assert!(rig.device.path_reason().contains("routable IPv6 preferred over fe80::"), "{:?}", rig.device);
        let (a, b) = rig.pair().await;
        a.post(&[inline(0, b"over IPv6")]).expect("a post");
        assert_eq!(rig.receive_one(), b"over IPv6");
        drop((a, b, rig, restore));
        until_it_opens().await;
    });
}

#[test]
fn what_does_not_exist_is_refused_with_what_does() {
    leaving_nothing(async {
        let named = |name: &str| DeviceConfig { device: Some(name.into()), ..config() };
        let error = refusal(&named("mlx5_77"));
        assert!(
            matches!(&error, OpenError::Choice(ChooseError::UnknownDevice { have, .. }) if !have.is_empty()),
            "{error}"
        );

        let error = refusal(&DeviceConfig { port: Some(9), ..config() });
        assert!(
            matches!(&error, OpenError::Choice(ChooseError::UnknownPort { port: 9, have, .. }) if *have == [1]),
            "{error}"
        );

        let error = refusal(&DeviceConfig { gid_index: Some(200), ..config() });
        assert!(matches!(&error, OpenError::Choice(ChooseError::UnknownGidIndex { gid_index: 200, .. })), "{error}");
        assert!(error.to_string().contains("fe80::"), "the table is listed: {error}");

        let stranger = Gid([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        let error = refusal(&DeviceConfig { gid: Some(stranger), ..config() });
        assert!(error.to_string().contains("2001:db8::1"), "{error}");
    });
}

#[test]
fn what_the_device_cannot_hold_is_refused_with_its_limit() {
    leaving_nothing(async {
        let slabs = SlabSizes { receive_slabs: 2_000_000, receive_bytes: 64, ..config().slabs };
        let error = refusal(&DeviceConfig { slabs, ..config() });
        assert!(matches!(error, OpenError::SrqTooLarge { asked: 2_000_000, limit, .. } if limit > 0), "{error}");

        for cq_depth in [0, 10_000_000] {
            let error = refusal(&DeviceConfig { cq_depth, ..config() });
            assert!(matches!(error, OpenError::CqTooLarge { limit, .. } if limit > 0), "{error}");
        }

        let slabs = SlabSizes { send_bytes: 0, ..config().slabs };
        let error = refusal(&DeviceConfig { slabs, ..config() });
        assert!(matches!(error, OpenError::SlabSizes { .. }), "{error}");
    });
}

/// A port that is down is refused; one that goes down under an open fabric is an event, and so is its return.
#[test]
fn a_port_that_is_down_is_refused_and_told_of() {
    leaving_nothing(async {
        let netdev = netdev();
        let rig = Rig::new(&config());
        let up = Undo(format!("ip link set {netdev} up"));
        command(&format!("ip link set {netdev} down"));
        wait_for(&rig, AsyncEvent::PortDown).await;

        let error = refusal(&config());
        assert!(
            matches!(&error, OpenError::Choice(ChooseError::PortDown { port: 1, state, .. }) if state == "DOWN"),
            "{error}"
        );
        drop(up);
        wait_for(&rig, AsyncEvent::PortUp).await;
        until_it_opens().await;
    });
}

async fn wait_for(rig: &Rig, wanted: AsyncEvent) {
    let next = || std::future::poll_fn(|cx| rig.device.poll_async_event(cx));
    let found = async { while next().await.expect("an event") != wanted {} };
    tokio::time::timeout(Duration::from_secs(10), found).await.unwrap_or_else(|_| panic!("no {wanted:?}"));
}

/// B17: an inline request above the device's is a refusal that says so, not a crash; a smaller one is granted.
#[test]
fn inline_is_granted_in_steps() {
    leaving_nothing(async {
        let rig = Rig::new(&config());
        let mut granted = None;
        for inline_bytes in [4096, 828, 512, 256, 64, 0] {
            let asked = QpCaps { send_wrs: 63, inline_bytes };
            match rig.device.create_qp(asked) {
                Ok(qp) => {
                    assert!(qp.caps().inline_bytes >= inline_bytes, "{asked:?} {:?}", qp.caps());
                    assert!(qp.caps().send_wrs >= 63, "{:?}", qp.caps());
                    granted = granted.or(Some(inline_bytes));
                }
                Err(CreateQpError::Unsupported { caps, .. }) => assert_eq!(caps, asked),
                Err(error) => panic!("{error}"),
            }
        }
        assert!(granted >= Some(256), "{granted:?}");
        let error = rig.device.create_qp(QpCaps { send_wrs: 1 << 30, inline_bytes: 0 }).expect_err("too deep");
        assert!(matches!(error, CreateQpError::Unsupported { .. } | CreateQpError::Exhausted { .. }), "{error}");
    });
}

/// Opening needs no runtime; waiting and connecting say so where there is none.
#[test]
fn opening_needs_no_runtime() {
    leaving_nothing(async {
        let outside = std::thread::spawn(|| {
            let rig = Rig::new(&config());
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            let wake = rig.device.poll_wake(&mut cx);
            assert!(
                matches!(&wake, std::task::Poll::Ready(Err(error)) if error.to_string().contains("tokio")),
                "{wake:?}"
            );
            assert_eq!(rig.device.poll(&mut Vec::new()).expect("a CQ"), 0);
        });
        outside.join().expect("no panic");
    });
}

/// Pools of 2 MiB and more lie in reserved huge pages when there are some.
#[test]
fn slabs_lie_in_huge_pages_where_they_can_be_had() {
    leaving_nothing(async {
        let none = Undo("echo 0 > /proc/sys/vm/nr_hugepages".to_owned());
        command("echo 8 > /proc/sys/vm/nr_hugepages");
        let slabs = SlabSizes { receive_slabs: 256, receive_bytes: 8192, ..config().slabs };
        let mut rig = Rig::new(&DeviceConfig { slabs, ..config() });
        assert_eq!(rig.device.page_kind(), PageKind::Huge);
        let (a, _b) = rig.pair().await;
        a.post(&[inline(0, b"through a huge page")]).expect("a post");
        assert_eq!(rig.receive_one(), b"through a huge page");
        drop((a, none));
        let again = Rig::new(&DeviceConfig { slabs, ..config() });
        assert_eq!(again.device.page_kind(), PageKind::TransparentHuge);
    });
}

/// A link's MTU may change, and Soft-RoCE raises no event for it; the port is read anew for each connection.
#[test]
fn a_changed_mtu_is_noticed() {
    leaving_nothing(async {
        let netdev = netdev();
        let rig = Rig::new(&config());
        let before = rig.device.port().mtu;
        let bytes = std::fs::read_to_string(format!("/sys/class/net/{netdev}/mtu")).expect("an MTU").trim().to_owned();
        let restore = Undo(format!("ip link set {netdev} mtu {bytes}"));
        command(&format!("ip link set {netdev} mtu 1500"));
        assert_eq!(rig.device.port().mtu, Mtu::B1024, "{before:?} before");
        drop(restore);
        assert_eq!(rig.device.port().mtu, before);
    });
}

/// The device's node is there and may not be opened: the refusal says whom to ask. (The kernel says ENOENT or EACCES.)
#[test]
fn a_closed_device_node_is_told_as_such() {
    if as_child() {
        return;
    }
    leaving_nothing(async {
        let node = "/dev/infiniband/uverbs0";
        let _open = Undo(format!("chmod 0666 {node}"));
        command(&format!("chmod 0600 {node}"));
        let text = as_ordinary_user("opening::a_closed_device_node_is_told_as_such", "8192", "unlimited");
        assert!(text.contains("/dev/infiniband"), "{text}");
        assert!(text.contains("may not open") || text.contains("no RDMA device that libibverbs can use"), "{text}");
    });
}

/// No device at all: the refusal says how to get one. The device comes back afterwards, under the same name.
#[test]
fn no_device_is_told_with_the_remedy() {
    leaving_nothing(async {
        let rig = Rig::new(&config());
        let device = rig.device.path_reason().split(' ').next().expect("its name").to_owned();
        drop(rig);
        let netdev = netdev();
        let back = Undo(format!("rdma link add {device} type rxe netdev {netdev}"));
        command(&format!("rdma link delete {device}"));
        let outcome = open(&config());
        drop(back);
        until_it_opens().await;
        let error = outcome.expect_err("no device");
        assert!(matches!(&error, OpenError::NoDevices { .. }), "{error}");
        assert!(error.to_string().contains("rdma link add rxe0 type rxe"), "{error}");
    });
}

/// B14: with too little lockable memory, an ordinary user gets need, have and remedy; with small slabs it works.
///
/// The test runs its own binary again as that user, and there it is the child.
#[test]
fn too_little_lockable_memory_is_told_with_numbers() {
    if as_child() {
        return;
    }
    leaving_nothing(async {
        let run = |slab_bytes, memlock| {
            as_ordinary_user("opening::too_little_lockable_memory_is_told_with_numbers", slab_bytes, memlock)
        };
        for (slab_bytes, need, memlock) in
            [("8192", 655_360, "65536"), ("8192", 655_360, "131072"), ("131072", 10_485_760, "8388608")]
        {
            let text = run(slab_bytes, memlock);
            let told = format!("need {need} bytes of locked memory, but RLIMIT_MEMLOCK is {memlock} bytes");
            assert!(text.contains(&told), "{told}: {text}");
            assert!(text.contains("ulimit -l"), "the remedy: {text}");
        }
        for (slab_bytes, memlock) in [("512", "65536"), ("512", "131072"), ("8192", "8388608")] {
            assert!(run(slab_bytes, memlock).contains("opened"), "80 slabs of {slab_bytes} bytes fit into {memlock}");
        }
    });
}

const CHILD: &str = "OPEN_WITH_SLAB_BYTES";

/// Runs one test of this binary as a user without rights; gives what it prints.
fn as_ordinary_user(test: &str, slab_bytes: &str, memlock: &str) -> String {
    let output = Command::new("prlimit")
        .arg(format!("--memlock={memlock}"))
        .args(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"])
        .args(["--inh-caps=-all", "--bounding-set=-all"])
        .arg(env::current_exe().expect("this test's path"))
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, slab_bytes)
        .output()
        .expect("prlimit and setpriv of util-linux");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// In the child: opens, prints what came of it, and says that this is the child.
fn as_child() -> bool {
    let Ok(slab_bytes) = env::var(CHILD) else { return false };
    let bytes: u32 = slab_bytes.parse().expect("a number of bytes");
    let slabs = SlabSizes { receive_bytes: bytes, send_bytes: bytes, ..config().slabs };
    match open(&DeviceConfig { slabs, ..config() }) {
        Ok(_) => println!("opened"),
        Err(error) => println!("{error}"),
    }
    true
}
