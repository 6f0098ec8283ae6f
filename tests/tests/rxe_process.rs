//! Death, restart and stand-still of real processes on this machine's RDMA device.

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use verbs_bootstrap::InstanceId;
use verbs_tests::{
    lab::{DeviceLab, Lab, SMALL_SLABS, on_device},
    leaks::{held_bytes, open_descriptors},
    node::Node,
    process::PeerProcess,
    traffic::{Run, Tally},
};

const PEER: &str = env!("CARGO_BIN_EXE_peer");

/// The contract's bound for the end of every frame after a peer's death.
const END_WITHIN: Duration = Duration::from_secs(6);

type Lead = Node<<DeviceLab as Lab>::F>;

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<DeviceLab>) -> R) {
    on_device(DeviceLab::new(), scenario);
}

async fn lead(lab: &DeviceLab) -> Lead {
    Node::start(lab, 1).await
}

/// Blocks the test's thread, not the worker's.
fn soon(what: &str, patience: Duration, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: not within {patience:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// No connection is left, and no slab is out.
fn all_home(node: &Lead) -> bool {
    let stats = node.worker.stats();
    (stats.qps, stats.send_slabs_free, stats.receives_promised) == (0, SMALL_SLABS.send_slabs as usize, 0)
}

/// Frames of this run that have arrived at the peer.
fn arrived(peer: &mut PeerProcess, run: &Run, frames: u64, patience: Duration) {
    let name = run.name();
    peer.wait_for("frames", patience, |stats| stats["received"][&name]["frames"].as_u64().unwrap_or(0) >= frames);
}

/// The failures are the last frames sent, without a hole: everything before them was acknowledged.
fn assert_suffix(run: &Run) {
    let failures = run.failures();
    let numbers: Vec<u64> = failures.keys().copied().collect();
    let expected: Vec<u64> = (run.sent() - numbers.len() as u64..run.sent()).collect();
    assert_eq!(numbers, expected, "{:?}", run.reasons());
}

/// Takes the node's messages until this run's `frames` are there.
async fn take(node: &mut Lead, tally: &mut Tally, run: &str, frames: u64) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while tally.json()[run]["frames"].as_u64().unwrap_or(0) < frames {
        let frame = tokio::time::timeout_at(deadline, node.inbound.message.recv()).await;
        tally.take(&frame.expect("frames come in time").expect("the stream is open"));
    }
}

/// B25 and MT-30: the receiver is killed in the middle of a burst of which one part is in flight, one in the channel and
/// one in the gate.
#[test]
fn killed_receiver_ends_every_frame_once_within_six_seconds() {
    run(|lab| async move {
        let node = lead(&lab).await;
        let mut peer = PeerProcess::start(PEER, &[]);
        let id = node.worker.register(peer.address()).expect("good");
        let burst = Run::new(4096);
        burst.burst(&node.worker, id, 200);
        arrived(&mut peer, &burst, 200, Duration::from_secs(10));
        // Held for the moment that the burst takes, or a fast run would have delivered it before the kill.
        peer.signal("STOP");
        burst.burst(&node.worker, id, 3800);
        let killed = Instant::now();
        peer.kill();
        soon("all frames end", END_WITHIN, || all_home(&node));
        let failures = burst.failures();
        eprintln!(
            "{} of {} failed, {:?} after the kill: {:?}",
            failures.len(),
            4000,
            killed.elapsed(),
            burst.reasons()
        );
        assert!(failures.len() > 1000, "it was killed in the middle");
        assert!(failures.values().any(|failure| failure.by_admission), "some were in the gate");
        assert!(failures.values().any(|failure| !failure.by_admission), "some were in the channel or in flight");
        assert_suffix(&burst);
        node.stop().await;
    });
}

/// B05: the receiver is killed and comes back on its port under its name; what is sent within 10 ms arrives.
#[test]
fn restarted_receiver_is_reached_by_the_first_send() {
    run(|lab| async move {
        let node = lead(&lab).await;
        let mut peer = PeerProcess::start(PEER, &["instance=7"]);
        let id = node.worker.register(peer.address()).expect("good");
        for round in 0..3 {
            let old = Run::new(512);
            old.burst(&node.worker, id, 2000);
            arrived(&mut peer, &old, 100, Duration::from_secs(10));
            let bind = format!("bind=127.0.0.1:{}", peer.port());
            peer.kill();
            peer = PeerProcess::start(PEER, &["instance=7", &bind]);
            assert_eq!(node.worker.register(peer.address()).expect("good"), id);
            let new = Run::new(512);
            new.burst(&node.worker, id, 100);
            let sent = Instant::now();
            arrived(&mut peer, &new, 100, Duration::from_secs(5));
            eprintln!("round {round}: 100 frames within {:?}; the old run's: {:?}", sent.elapsed(), old.reasons());
            new.assert_accounted(&peer.received());
            assert_eq!(new.failures().len(), 0, "{:?}", new.reasons());
            assert_suffix(&old);
            for why in old.reasons().keys() {
                let told = ["the peer closed the connection", "the peer restarted"].iter().any(|end| why.contains(end));
                // Frames that were queued while nobody listened.
                assert!(told || why.contains("refused"), "{why}");
            }
            assert_eq!(node.worker.stats().connections, 1);
        }
        peer.finish();
        node.stop().await;
    });
}

/// B05: the sender is killed in its burst and comes back under its name: it is accepted at once, and answered without a
/// new registration.
#[test]
fn restarted_sender_is_accepted_and_answered() {
    run(|lab| async move {
        let mut node = lead(&lab).await;
        let mut tally = Tally::default();
        let me = node.id();
        let mut peer = PeerProcess::start(PEER, &["instance=8"]);
        let id = node.worker.register(peer.address()).expect("good");
        for round in 0..3 {
            peer.register(&node.worker.address());
            let old = peer.ask(&format!("send {me} 3000 1024"));
            take(&mut node, &mut tally, &old, 100).await;
            let bind = format!("bind=127.0.0.1:{}", peer.port());
            peer.kill();
            peer = PeerProcess::start(PEER, &["instance=8", &bind]);
            peer.register(&node.worker.address());
            let new = peer.ask(&format!("send {me} 200 1024"));
            let sent = Instant::now();
            take(&mut node, &mut tally, &new, 200).await;
            eprintln!("round {round}: 200 frames of the restarted sender within {:?}", sent.elapsed());
            let told = tally.json();
            for run in [&old, &new] {
                let line = &told[run];
                assert_eq!((&line["repeated"], &line["corrupt"]), (&0.into(), &0.into()), "{line}");
                assert_eq!(line["missing"].as_array().map(Vec::len), Some(0), "{line}");
            }
            let back = Run::new(64);
            back.burst(&node.worker, id, 50);
            arrived(&mut peer, &back, 50, Duration::from_secs(5));
            assert_eq!(back.failures().len(), 0, "{:?}", back.reasons());
            soon("the old QP goes", Duration::from_secs(3), || node.worker.stats().qps == 1);
        }
        peer.finish();
        node.stop().await;
    });
}

/// A peer that stands still for longer than `health_deadline` ends typed and in time; when it goes on, the next send opens
/// a clean epoch.
#[test]
fn stopped_peer_ends_in_time_and_comes_back() {
    run(|lab| async move {
        let node = lead(&lab).await;
        let mut peer = PeerProcess::start(PEER, &[]);
        let id = node.worker.register(peer.address()).expect("good");
        let first = Run::new(256);
        first.burst(&node.worker, id, 10);
        arrived(&mut peer, &first, 10, Duration::from_secs(5));
        peer.signal("STOP");
        let stopped = Instant::now();
        let stalled = Run::new(256);
        stalled.burst(&node.worker, id, 1000);
        soon("all frames end", END_WITHIN, || all_home(&node));
        eprintln!("stopped: ended after {:?}: {:?}", stopped.elapsed(), stalled.reasons());
        assert!(stalled.reasons().keys().all(|why| why.contains("stood still")), "{:?}", stalled.reasons());
        // Its kernel still takes TCP connections; the exchange has a deadline.
        let during = Run::new(256);
        during.burst(&node.worker, id, 10);
        soon("a send meanwhile ends", Duration::from_secs(8), || during.failures().len() == 10);
        eprintln!("meanwhile: {:?}", during.reasons());
        peer.signal("CONT");
        std::thread::sleep(Duration::from_millis(500));
        let deadline = Instant::now() + Duration::from_secs(10);
        let resumed = loop {
            // Registered anew, so that no back-off is waited for.
            node.worker.register(peer.address()).expect("good");
            let resumed = Run::new(256);
            resumed.burst(&node.worker, id, 100);
            soon("the send ends", Duration::from_secs(8), || {
                resumed.failures().len() == 100 || node.worker.stats().connections == 1
            });
            if resumed.failures().is_empty() {
                break resumed;
            }
            assert!(Instant::now() < deadline, "no way back: {:?}", resumed.reasons());
        };
        arrived(&mut peer, &resumed, 100, Duration::from_secs(5));
        let received = peer.received();
        for run in [&first, &stalled, &during, &resumed] {
            run.assert_accounted(&received);
        }
        let stats = peer.wait_for("single QP", Duration::from_secs(3), |stats| stats["qps"] == 1);
        assert_eq!(stats["malformed"], 0);
        peer.finish();
        node.stop().await;
    });
}

/// B05: a run of the peer stands still, with frames in flight, in the channel and in the gate, and a new run comes under
/// its name (as when a container moves). Told by discovery or by its own hello, the first exchange with it succeeds, and
/// every frame of the old run's connection ends as `PeerRestarted`.
#[test]
fn frames_of_a_replaced_run_end_as_restarted() {
    run(|lab| async move {
        let node = lead(&lab).await;
        for round in 0..4u64 {
            let old = PeerProcess::start(PEER, &["instance=7"]);
            let id = node.worker.register(old.address()).expect("good");
            node.worker.ensure_connected(id).await.expect("connected");
            let restarts = || node.worker.stats().ended.get("peer_restarted").copied().unwrap_or(0);
            let before = restarts();
            old.signal("STOP");
            let lost = Run::new(2000);
            lost.burst(&node.worker, id, 2000);
            let mut new = PeerProcess::start(PEER, &["instance=7"]);
            new.register(&node.worker.address());
            if round % 2 == 0 {
                node.worker.register(new.address()).expect("good");
            } else {
                new.ask(&format!("connect {}", node.id()));
            }
            let (sent, first) = (Instant::now(), Run::new(100));
            first.burst(&node.worker, id, 100);
            arrived(&mut new, &first, 100, Duration::from_secs(5));
            assert_eq!(first.failures().len(), 0, "{:?}", first.reasons());
            soon("the old run's frames end", END_WITHIN, || node.worker.stats().qps == 1);
            eprintln!("round {round}: all within {:?}: {:?}", sent.elapsed(), lost.reasons());
            // Its device had acknowledged what its receives took.
            assert!(lost.failures().len() > 1900, "{:?}", lost.reasons());
            assert!(lost.reasons().keys().all(|why| why.contains("the peer restarted")), "{:?}", lost.reasons());
            assert_suffix(&lost);
            assert_eq!(restarts(), before + 1);
            old.kill();
            new.kill();
            soon("the peer's death is noticed", END_WITHIN, || all_home(&node));
        }
        node.stop().await;
    });
}

/// What buffers may have grown by, over all rounds. One connection's QPs alone would be more.
const GROWTH_MAX_BYTES: u64 = 32 << 10;

/// kill -9 of a peer that is connecting, at ever later moments: nothing of it stays. So many times as `VERBS_KILLS` says,
/// 30 unless said.
#[test]
fn peers_killed_while_connecting_leave_nothing() {
    let kills = std::env::var("VERBS_KILLS").map_or(30, |text| text.parse().expect("VERBS_KILLS is a number"));
    run(|lab| async move {
        let node = lead(&lab).await;
        let me = node.id();
        let mut first = None;
        for round in 0..kills {
            let mut peer = PeerProcess::start(PEER, &["instance=9"]);
            peer.register(&node.worker.address());
            // Both dial, every other time.
            if round % 2 == 1 {
                let id = node.worker.register(peer.address()).expect("good");
                node.send_numbered(id, verbs_transport::MessageType::Message, 1);
            }
            peer.tell(&format!("connect {me}"));
            std::thread::sleep(Duration::from_millis(7 * (round % 12)));
            peer.kill();
            // The first rounds warm up: threads and what the allocator keeps.
            let (descriptors, held) = first.unwrap_or((usize::MAX, u64::MAX - GROWTH_MAX_BYTES));
            soon("its QP and sockets go", END_WITHIN, || all_home(&node) && open_descriptors() <= descriptors);
            let now = held_bytes();
            assert!(now <= held + GROWTH_MAX_BYTES, "round {round}: {held} bytes held, now {now}");
            if round == 9 {
                first = Some((open_descriptors(), now));
            }
        }
        let stats = node.worker.stats();
        eprintln!(
            "{kills} killed while connecting: {} epochs begun, {} proven",
            stats.epochs_begun, stats.connections_made
        );
        node.stop().await;
    });
}

/// B16 and B15 in part: the address that the GID comes from is taken away, and comes back at another index.
#[test]
fn lost_gid_ends_typed_and_comes_back_at_another_index() {
    use verbs_tests::process::sh;
    use verbs_transport::{Gid, verbs::DeviceConfig};
    let gid = Gid(std::net::Ipv4Addr::new(10, 99, 0, 2).to_ipv6_mapped().octets());
    let device = DeviceConfig { gid: Some(gid), ..DeviceConfig::default() };
    on_device(DeviceLab { device }, |lab| async move {
        let node = lead(&lab).await;
        let mut peer = PeerProcess::start(PEER, &[]);
        let id = node.worker.register(peer.address()).expect("good");
        let before = Run::new(1024);
        before.burst(&node.worker, id, 100);
        arrived(&mut peer, &before, 100, Duration::from_secs(5));
        let index = node.worker.describe(id).expect("known").local.gid_index;

        sh("ip addr del 10.99.0.2/24 dev dummy0");
        let removed = Instant::now();
        let lost = Run::new(1024);
        lost.burst(&node.worker, id, 500);
        soon("all frames end", END_WITHIN, || lost.failures().len() == 500);
        eprintln!("without its GID: ended after {:?}: {:?}", removed.elapsed(), lost.reasons());
        let error = node.worker.ensure_connected(id).await.expect_err("no GID, no connection");
        eprintln!("connecting: {error}");
        assert!(error.to_string().contains("10.99.0.2"), "{error}");

        sh("ip addr add 10.99.0.2/24 dev dummy0");
        let back = Instant::now();
        node.worker.register(peer.address()).expect("good");
        node.worker.ensure_connected(id).await.expect("connected again");
        eprintln!("connected {:?} after the address came back", back.elapsed());
        let after = Run::new(1024);
        after.burst(&node.worker, id, 100);
        arrived(&mut peer, &after, 100, Duration::from_secs(5));
        assert_eq!(after.failures().len(), 0, "{:?}", after.reasons());
        let now = node.worker.describe(id).expect("known");
        eprintln!("gid_index was {index}, is {}: {}", now.local.gid_index, now.path);
        let received = peer.received();
        for run in [&before, &lost, &after] {
            run.assert_accounted(&received);
        }
        peer.finish();
        node.stop().await;
    });
}

/// How long a thousand frames take.
fn rate(node: &Lead, peer: &mut PeerProcess, id: InstanceId) -> Duration {
    let (run, began) = (Run::new(1000), Instant::now());
    run.burst(&node.worker, id, 1000);
    arrived(peer, &run, 1000, Duration::from_secs(20));
    began.elapsed()
}

/// B16: the link goes down for 10 s under traffic, far beyond any retry, and comes up again: connected within seconds, old
/// QPs gone, and as fast as before.
#[test]
fn link_flap_ends_in_time_and_reconnects_within_seconds() {
    use verbs_tests::process::sh;
    run(|lab| async move {
        let node = lead(&lab).await;
        let mut peer = PeerProcess::start(PEER, &[]);
        let id = node.worker.register(peer.address()).expect("good");
        let flowing = Run::new(4096);
        let flow = flowing.flow(&node.worker, id);
        arrived(&mut peer, &flowing, 100, Duration::from_secs(10));
        flow.abort();
        let fast = rate(&node, &mut peer, id);
        let flow = flowing.flow(&node.worker, id);
        sh("ip link set dummy0 down");
        let down = Instant::now();
        soon("all frames end", END_WITHIN, || {
            let queued = node.worker.describe(id).expect("known");
            queued.queued_frames == 0 && node.worker.stats().send_slabs_free == SMALL_SLABS.send_slabs as usize
        });
        eprintln!("link down: ended after {:?}: {:?}", down.elapsed(), flowing.reasons());
        let meanwhile = Run::new(64);
        meanwhile.burst(&node.worker, id, 10);
        std::thread::sleep(Duration::from_secs(10).saturating_sub(down.elapsed()));
        sh("ip link set dummy0 up");
        let up = Instant::now();
        let recovered = loop {
            let try_again = Run::new(64);
            try_again.burst(&node.worker, id, 20);
            soon("the send ends", END_WITHIN, || {
                try_again.failures().len() == 20
                    || (try_again.failures().is_empty() && node.worker.stats().connections == 1)
            });
            if try_again.failures().is_empty() {
                break try_again;
            }
            assert!(up.elapsed() < Duration::from_secs(8), "no way back: {:?}", try_again.reasons());
        };
        arrived(&mut peer, &recovered, 20, Duration::from_secs(5));
        eprintln!("link up: 20 frames after {:?}", up.elapsed());
        assert!(up.elapsed() < Duration::from_secs(10));
        flow.abort();
        arrived(&mut peer, &flowing, flowing.due(), Duration::from_secs(5));
        let received = peer.received();
        for run in [&flowing, &meanwhile, &recovered] {
            run.assert_accounted(&received);
        }
        soon("old QPs go", Duration::from_secs(3), || node.worker.stats().qps == 1);
        let again = rate(&node, &mut peer, id);
        eprintln!("1000 frames took {fast:?} before and {again:?} after");
        assert!(again < 3 * fast + Duration::from_millis(500), "{fast:?} before, {again:?} after");
        peer.wait_for("single QP", Duration::from_secs(3), |stats| stats["qps"] == 1);
        peer.finish();
        node.stop().await;
    });
}

/// The peer program itself: commands, echo and books.
#[test]
fn peer_program_answers() {
    run(|lab| async move {
        let mut node = lead(&lab).await;
        let mut peer = PeerProcess::start(PEER, &["echo=1", "window=16"]);
        let id = node.worker.register(peer.address()).expect("good");
        peer.register(&node.worker.address());
        let run = Run::new(100_000);
        run.burst(&node.worker, id, 20);
        for _ in 0..20 {
            let back = verbs_tests::node::next(&mut node.inbound.response).await;
            assert_eq!((back.peer, back.payload.len()), (InstanceId(id.0), 100_000));
        }
        run.assert_accounted(&peer.received());
        let told = peer.ask_json(&format!("describe {}", node.id()));
        assert_eq!(told["proven"], true, "{told}");
        peer.ask("mute 300");
        let muted = Run::new(10);
        muted.burst(&node.worker, id, 10);
        arrived(&mut peer, &muted, 10, Duration::from_secs(5));
        peer.finish();
        node.stop().await;
    });
}
