//! Death on simulated hosts, in fake time: how soon everything ends, to the millisecond.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout};
use verbs_bootstrap::InstanceId;
use verbs_tests::{
    lab::{Lab, SimLab, on_sim},
    node::{Node, next},
    traffic::{Run, Tally},
};
use verbs_transport::{
    Config, MessageType, SendError, SendOutcome, Worker,
    sim::{Faults, HostConfig, SimFabric},
};

/// The contract's bound for the end of every operation after a peer's death.
const END_WITHIN: Duration = Duration::from_secs(6);
/// Shutdown in all (M-81).
const SHUTDOWN_WITHIN: Duration = Duration::from_millis(2500);

/// How long each frame took to fail.
#[derive(Clone, Default)]
struct Ends(Arc<Mutex<Vec<Duration>>>);

impl Ends {
    fn send(&self, worker: &Worker<SimFabric>, to: InstanceId) {
        let sent = Instant::now();
        let ends = self.0.clone();
        let note = move || ends.lock().expect("no panic").push(sent.elapsed());
        let failed = note.clone();
        let on_error = move |_, _, _: SendError| failed();
        let payload = vec![7; 3000].into();
        if let SendOutcome::Pending(admission) =
            worker.send(to, "late".into(), payload, MessageType::Message, Arc::new(on_error))
        {
            admission.on_resolved(move |result| {
                if result.is_err() {
                    note();
                }
            });
        }
    }

    fn longest(&self) -> Duration {
        self.0.lock().expect("no panic").iter().max().copied().unwrap_or_default()
    }

    fn count(&self) -> usize {
        self.0.lock().expect("no panic").len()
    }
}

/// A path that is cut for good: what was under way, what is sent at any later moment, and each attempt to connect end
/// typed within six seconds; nothing grows; shutdown is prompt.
#[test]
fn path_cut_for_good_ends_every_operation_in_time() {
    for seed in 0..20 {
        on_sim(seed, Faults::none(), move |lab| async move {
            let (a, mut b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
            a.register(&b);
            a.send_numbered(b.id(), MessageType::Message, 1);
            let _ = next(&mut b.inbound.message).await;
            lab.world.cut(SimLab::addr(1), SimLab::addr(2));
            let under_way = Ends::default();
            (0..400).for_each(|_| under_way.send(&a.worker, b.id()));
            sleep(END_WITHIN).await;
            assert_eq!(under_way.count(), 400, "each has its end in time: {:?}", a.worker.stats());
            dead_for_good(&a, b.id(), seed).await;
            b.stop().await;
        });
    }
}

/// The same for a peer that refuses for a while, so that the pauses between dials are at their longest when its host
/// falls silent.
#[test]
fn host_gone_after_its_process_ends_every_operation_in_time() {
    for seed in 0..20 {
        on_sim(seed, Faults::none(), move |lab| async move {
            let (a, mut b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
            a.register(&b);
            a.send_numbered(b.id(), MessageType::Message, 1);
            let _ = next(&mut b.inbound.message).await;
            let id = b.id();
            lab.world.kill_host(SimLab::addr(2));
            drop(b);
            let refused = Ends::default();
            for _ in 0..60 {
                refused.send(&a.worker, id);
                sleep(Duration::from_millis(500)).await;
            }
            assert!(refused.longest() < END_WITHIN, "{:?}", refused.longest());
            // A host that is there again, but silent.
            let silent = lab.world.host(SimLab::addr(2), HostConfig::default());
            lab.world.cut(SimLab::addr(1), SimLab::addr(2));
            dead_for_good(&a, id, seed).await;
            drop(silent);
        });
    }
}

async fn dead_for_good(a: &Node<SimFabric>, peer: InstanceId, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (ends, began) = (Ends::default(), Instant::now());
    let mut sent = 0;
    while began.elapsed() < Duration::from_secs(60) {
        let burst = if rng.u8(..4) == 0 { 400 } else { 1 };
        for _ in 0..burst {
            ends.send(&a.worker, peer);
            sent += 1;
        }
        if rng.bool() {
            let asked = Instant::now();
            let error = a.worker.ensure_connected(peer).await.expect_err("nobody is there");
            assert!(asked.elapsed() < END_WITHIN, "{error} after {:?}", asked.elapsed());
        }
        let stats = a.worker.stats();
        assert!(stats.qps <= 2 && stats.peers_known == 1, "{stats:?}");
        sleep(Duration::from_millis(rng.u64(1..3000))).await;
    }
    sleep(END_WITHIN).await;
    assert_eq!(ends.count(), sent, "each has one end");
    assert!(ends.longest() < END_WITHIN, "the longest took {:?}", ends.longest());
    let stopping = Instant::now();
    ends.send(&a.worker, peer);
    timeout(SHUTDOWN_WITHIN, a.worker.shutdown()).await.expect("shutdown is prompt");
    eprintln!("longest of {sent}: {:?}; shutdown: {:?}", ends.longest(), stopping.elapsed());
    assert_eq!((a.worker.stats().qps, a.worker.stats().receives_promised), (0, 0));
}

/// Waits until nothing is connected, in flight or queued.
async fn all_home(node: &Node<SimFabric>, slabs: u32) {
    let began = Instant::now();
    loop {
        let stats = node.worker.stats();
        if (stats.qps, stats.send_slabs_free, stats.receives_promised) == (0, slabs as usize, 0) {
            return;
        }
        assert!(began.elapsed() < END_WITHIN, "{stats:?}");
        sleep(Duration::from_millis(1)).await;
    }
}

/// MT-30, B25: the receiver is killed in the middle of a burst. Each frame that is not known to be delivered is reported
/// once, within six seconds, and those are the last ones.
#[test]
fn peer_killed_in_mid_burst_ends_every_frame_once() {
    for seed in 0..50 {
        on_sim(seed, Faults::none(), move |lab| async move {
            let (a, mut b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
            a.register(&b);
            a.worker.ensure_connected(b.id()).await.expect("connected");
            let run = Run::new(2000);
            run.burst(&a.worker, b.id(), 4000);
            let mut tally = Tally::default();
            for _ in 0..50 + seed * 7 {
                tally.take(&next(&mut b.inbound.message).await);
            }
            lab.world.kill_host(SimLab::addr(2));
            all_home(&a, verbs_tests::lab::SMALL_SLABS.send_slabs).await;
            let failed: Vec<u64> = run.failures().into_keys().collect();
            assert!(failed.len() > 1000, "it was killed in the middle: {:?}", run.reasons());
            assert_eq!(failed, (4000 - failed.len() as u64..4000).collect::<Vec<_>>(), "the last ones");
            a.stop().await;
        });
    }
}

/// B05: the receiver is killed behind a cut path, so that nothing tells of it, and comes back on its port under its name.
/// Once its address is registered, the first exchange succeeds, and every frame of the old connection, in flight, in the
/// channel and in the gate, ends as `PeerRestarted`.
#[test]
fn a_restart_that_nothing_told_of_ends_the_old_frames_as_restarted() {
    on_sim(5, Faults::none(), |lab: Arc<SimLab>| async move {
        let named = |seed| Config { bind: (SimLab::addr(2), 4000).into(), seed: Some(seed), ..lab.config(2) };
        let a = Node::start(&*lab, 1).await;
        let mut b = Node::start_with(lab.fabric(2), named(1)).await;
        a.register(&b);
        a.send_numbered(b.id(), MessageType::Message, 1);
        let _ = next(&mut b.inbound.message).await;
        lab.world.cut(SimLab::addr(1), SimLab::addr(2));
        lab.world.kill_host(SimLab::addr(2));
        drop(b);
        let mut b = Node::start_with(lab.fabric(2), named(2)).await;
        let old = Run::new(2000);
        old.burst(&a.worker, b.id(), 1000);
        lab.world.heal(SimLab::addr(1), SimLab::addr(2));
        a.register(&b);
        let new = Run::new(100);
        new.burst(&a.worker, b.id(), 100);
        let mut tally = Tally::default();
        for _ in 0..100 {
            tally.take(&next(&mut b.inbound.message).await);
        }
        new.assert_accounted(&tally.json());
        assert!(new.failures().is_empty(), "{:?}", new.reasons());
        for _ in 0..100 {
            if old.failures().len() == 1000 {
                break;
            }
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(old.failures().len(), 1000, "{:?}", old.reasons());
        assert!(old.reasons().keys().all(|why| why.contains("the peer restarted")), "{:?}", old.reasons());
        let stats = a.worker.stats();
        assert_eq!((stats.ended.get("peer_restarted"), stats.epochs_ended), (Some(&1), 1), "{stats:?}");
        a.stop().await;
        b.stop().await;
    });
}

/// MT-30: the device drops either side's QP to ERR without a word, in the middle of a burst.
#[test]
fn qp_forced_to_error_ends_every_frame_once_and_the_next_connects() {
    for seed in 0..50 {
        on_sim(seed, Faults::none(), move |lab| async move {
            let (a, mut b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
            a.register(&b);
            b.register(&a);
            a.worker.ensure_connected(b.id()).await.expect("connected");
            b.worker.ensure_connected(a.id()).await.expect("connected");
            let run = Run::new(2000);
            run.burst(&a.worker, b.id(), 1000);
            let mut tally = Tally::default();
            for _ in 0..10 + seed {
                tally.take(&next(&mut b.inbound.message).await);
            }
            let (victim, other, n) = if seed % 2 == 0 { (&a, &b, 1) } else { (&b, &a, 2) };
            let qpn = victim.worker.describe(other.id()).and_then(|told| told.qpn).expect("connected");
            assert!(lab.world.force_qp_error(SimLab::addr(n), qpn));
            let began = Instant::now();
            while !run.open(&tally.json()).is_empty() {
                assert!(began.elapsed() < END_WITHIN, "{:?}; {:?}", run.reasons(), a.worker.stats());
                if let Ok(frame) = timeout(Duration::from_millis(10), b.inbound.message.recv()).await {
                    tally.take(&frame.expect("the stream is open"));
                }
            }
            run.assert_accounted(&tally.json());
            a.send_numbered(b.id(), MessageType::Message, 2);
            verbs_tests::node::assert_numbered(&next(&mut b.inbound.message).await, 2);
            a.stop().await;
            b.stop().await;
        });
    }
}

/// B06 on the device's side: the SRQ gives nothing for a second, whatever is posted. The RNR NAKs show, and traffic goes on
/// when it gives again: timer code 3 is 30 µs, and no code is ever 0.
#[test]
fn an_srq_that_gives_nothing_for_a_second_costs_a_second() {
    on_sim(6, Faults::none(), |lab: Arc<SimLab>| async move {
        let (a, mut b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
        a.register(&b);
        a.worker.ensure_connected(b.id()).await.expect("connected");
        lab.world.hold_receives(SimLab::addr(2), true);
        let run = Run::new(1000);
        run.burst(&a.worker, b.id(), 500);
        sleep(Duration::from_secs(1)).await;
        assert!(lab.rnr_naks() > 0);
        lab.world.hold_receives(SimLab::addr(2), false);
        let resumed = Instant::now();
        let mut tally = Tally::default();
        for _ in 0..500 {
            tally.take(&next(&mut b.inbound.message).await);
        }
        assert!(resumed.elapsed() < Duration::from_millis(100), "{:?}", resumed.elapsed());
        run.assert_accounted(&tally.json());
        assert_eq!((run.failures().len(), a.worker.stats().epochs_ended), (0, 0));
        a.stop().await;
        b.stop().await;
    });
}
