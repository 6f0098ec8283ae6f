//! Child processes while traffic runs: nothing is lost, and no descriptor of the device or of a socket gets into them.
//! What a caller who forks must know: `docs/fork.md`.

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use verbs_tests::{
    lab::{DeviceLab, on_device},
    node::{Node, assert_numbered, next_within},
};
use verbs_transport::{MessageType, SendOutcome};

const CHILDREN: usize = 100;
/// Between two children each side sends as many frames as it can; at least so many in all.
const FRAMES_MIN: u32 = 200;

/// A child that lists its own descriptors, and what they point to.
fn spawn_and_list() -> BTreeSet<String> {
    let output = Command::new("ls").args(["-l", "/proc/self/fd"]).stdin(Stdio::null()).output().expect("a child");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| Some(line.split_once(" -> ")?.1.to_owned())).collect()
}

/// Whether a descriptor's target belongs to the transport: the device, its event channels, a socket, or the reactor.
fn is_ours(target: &str) -> bool {
    ["infiniband", "uverbs", "infinibandevent", "socket:", "eventpoll", "eventfd"]
        .iter()
        .any(|ours| target.contains(ours))
}

#[test]
fn children_run_while_traffic_does_and_inherit_nothing() {
    on_device(DeviceLab::new(), |lab: Arc<DeviceLab>| async move {
        let (mut a, mut b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
        a.register(&b);
        b.register(&a);
        a.worker.ensure_connected(b.id()).await.expect("connected");
        let own: Vec<String> = fs::read_dir("/proc/self/fd")
            .expect("/proc is mounted")
            .flatten()
            .filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned()))
            .collect();
        assert!(own.iter().any(|target| target.contains("uverbs")), "the test knows what a device looks like: {own:?}");

        let children = tokio::task::spawn_blocking(|| (0..CHILDREN).map(|_| spawn_and_list()).collect::<Vec<_>>());
        let mut n = 0;
        while !children.is_finished() || n < FRAMES_MIN {
            for (from, to) in [(&a, &b), (&b, &a)] {
                let sent = from.send(to.id(), MessageType::Message, format!("header-{n}"), format!("payload-{n}"));
                if let SendOutcome::Pending(room) = sent {
                    room.await.expect("there will be room");
                }
            }
            for node in [&mut a, &mut b] {
                assert_numbered(&next_within(&mut node.inbound.message, Duration::from_secs(20)).await, n);
            }
            n += 1;
        }
        let children = children.await.expect("no child failed");
        assert_eq!(children.len(), CHILDREN);
        eprintln!("{n} frames each way while {CHILDREN} children ran");
        for targets in &children {
            assert!(targets.contains("/dev/null"), "a child has its standard input: {targets:?}");
            let inherited: Vec<_> = targets.iter().filter(|target| is_ours(target)).collect();
            assert!(inherited.is_empty(), "a child has {inherited:?}");
        }
        for node in [&a, &b] {
            node.errors.assert_none();
            let stats = node.worker.stats();
            assert_eq!((stats.epochs_begun, stats.epochs_ended, stats.malformed), (1, 0, 0));
        }
        a.stop().await;
        b.stop().await;
    });
}

/// Every descriptor of a running worker has `FD_CLOEXEC`, so that `exec` closes it whoever forks.
#[test]
fn every_descriptor_closes_on_exec() {
    on_device(DeviceLab::new(), |lab: Arc<DeviceLab>| async move {
        let (a, b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
        a.register(&b);
        a.worker.ensure_connected(b.id()).await.expect("connected");
        let mut seen = 0;
        for entry in fs::read_dir("/proc/self/fd").expect("/proc is mounted").flatten() {
            let target = fs::read_link(entry.path()).map(|to| to.to_string_lossy().into_owned()).unwrap_or_default();
            if !is_ours(&target) {
                continue;
            }
            let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", entry.file_name().to_string_lossy()));
            let Ok(info) = info else { continue };
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).map(str::trim).unwrap_or_default();
            let flags = u32::from_str_radix(flags, 8).expect("octal flags");
            assert!(flags & O_CLOEXEC != 0, "{target} stays open over exec");
            seen += 1;
        }
        // Two workers: a device, a completion channel, a listener and a bootstrap socket each.
        assert!(seen >= 8, "only {seen} descriptors of ours were found");
        a.stop().await;
        b.stop().await;
    });
}

/// As `/proc/PID/fdinfo` shows it on the architectures that the library runs on.
const O_CLOEXEC: u32 = 0o2_000_000;

/// `ibv_fork_init` would take each registered page away from children (`MADV_DONTFORK`, in smaps the flag `dc`): it is not
/// called, so a child that reads its parent's memory finds it.
#[test]
fn no_memory_of_ours_is_kept_from_children() {
    on_device(DeviceLab::new(), |lab: Arc<DeviceLab>| async move {
        let node = Node::start(&*lab, 1).await;
        let smaps = fs::read_to_string("/proc/self/smaps").expect("/proc is mounted");
        let (mut mapping, mut anonymous, mut kept) = ("", 0, Vec::new());
        for line in smaps.lines() {
            let first = line.split_whitespace().next().unwrap_or_default();
            if !first.ends_with(':') {
                mapping = line;
            } else if first == "VmFlags:" {
                // Address, permissions, offset, device, inode: with no sixth column, memory of nobody's file.
                let ours = mapping.split_whitespace().count() == 5 || mapping.ends_with("[heap]");
                anonymous += usize::from(ours);
                if ours && line.split_whitespace().any(|flag| flag == "dc") {
                    kept.push(mapping);
                }
            }
        }
        assert!(anonymous > 0, "no anonymous memory in {smaps}");
        assert!(kept.is_empty(), "not copied into children: {kept:?}");
        node.stop().await;
    });
}
