//! Bulk memory under seeded faults, and what no device can be made to do.
//!
//! `VERBS_SEED=n` runs that seed alone, `VERBS_SEEDS=n` so many (300 unless said).

use std::{sync::Arc, time::Duration};

use verbs_rma::{
    Bulk, BulkConfig, Region, TransferError,
    bulk::{BulkEnd, UnmapError},
};
use verbs_tests::{
    bulk::{BulkNode, bulk_pair, bulk_pair_with, numbered, until, within},
    lab::{Lab, SimLab, on_sim_lab},
};
use verbs_transport::{
    fabric::bulk::{Access, OwnedBytes},
    sim::{Faults, SimFabric},
};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

/// Everything that can go wrong with bulk memory, and with the exchanges before it.
fn harsh() -> Faults {
    Faults { qp_error: 0.01, lost_ack: 0.003, post_refused: 0.003, register_refused: 0.05, ..Faults::harsh() }
}

/// While faults run: a GET that succeeds brings exactly the owner's bytes, each transfer and unmap ends. When they have
/// stopped: GETs work again, and everything comes home.
#[test]
fn whatever_goes_wrong_ends_typed_and_leaves_nothing() {
    let seeds = match number("VERBS_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("VERBS_SEEDS").unwrap_or(300),
    };
    let mut ends = Ends::default();
    for seed in seeds {
        let lab = SimLab::new_bulk(seed, harsh());
        on_sim_lab(lab, |lab| one_seed(lab, &mut ends));
    }
    println!("{ends:?}");
    let Ends { done, failed, reset, connect, .. } = ends;
    assert!(done > 0 && failed > 0 && reset > 0 && connect > 0, "the faults must strike, and not always: {ends:?}");
}

#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    done: u64,
    failed: u64,
    reset: u64,
    connect: u64,
    cancelled: u64,
    expired: u64,
    refused: u64,
}

impl Ends {
    fn count(&mut self, end: &Result<(), TransferError>) {
        *match end {
            Ok(()) => &mut self.done,
            Err(TransferError::Failed { .. }) => &mut self.failed,
            Err(TransferError::ConnectionReset { .. }) => &mut self.reset,
            Err(TransferError::Connect { .. }) => &mut self.connect,
            Err(TransferError::Cancelled) => &mut self.cancelled,
            Err(TransferError::Deadline { .. }) => &mut self.expired,
            Err(_) => &mut self.refused,
        } += 1;
    }
}

/// Maps, as often as the device refuses for want of memory.
async fn map(node: &BulkNode<SimFabric>, bytes: Vec<u8>, access: Access) -> Region {
    let memory = OwnedBytes::new(bytes);
    for _ in 0..100 {
        if let Ok(region) = within(node.bulk.map_all(memory.clone(), access)).await {
            return region;
        }
    }
    panic!("100 refusals in a row");
}

const LEN: usize = 300 << 10;

async fn one_seed(lab: Arc<SimLab>, ends: &mut Ends) {
    let mut rng = fastrand::Rng::with_seed(lab.world.seed());
    let config = BulkConfig {
        chunk_bytes: 32 << 10,
        rd_atomic_max: rng.u8(1..=8),
        deadline: Duration::from_secs(40),
        stall_deadline: Duration::from_secs(5),
        ..BulkConfig::default()
    };
    let (a, b) = bulk_pair_with(&*lab, &config).await;
    let mut nodes = [a, b];
    let mut sources =
        [map(&nodes[0], vec![1; LEN], Access::SOURCE).await, map(&nodes[1], vec![2; LEN], Access::SOURCE).await];
    let mut fills = [1_u8, 2];
    let mut running = Vec::new();
    for step in 0..40_u8 {
        let me = rng.usize(0..2);
        let peer = 1 - me;
        match rng.u8(0..10) {
            0..=6 => {
                let into = map(&nodes[me], vec![0; LEN], Access::DESTINATION).await;
                let len = rng.u64(1..=LEN as u64);
                let from = sources[peer].remote(0..len).expect("within");
                let get = nodes[me].bulk.get(nodes[peer].id(), from, into.id, 0);
                let handle = get.handle();
                if rng.u8(0..8) == 0 {
                    tokio::spawn({
                        let pause = Duration::from_micros(rng.u64(0..3000));
                        async move {
                            tokio::time::sleep(pause).await;
                            handle.cancel();
                        }
                    });
                }
                running.push((me, into, fills[peer], usize::try_from(len).expect("small"), tokio::spawn(get)));
            }
            7 => {
                // The owner takes its memory back and gives other memory out: old rights must bring no byte of it.
                let fill = step + 10;
                let fresh = map(&nodes[me], vec![fill; LEN], Access::SOURCE).await;
                let old = std::mem::replace(&mut sources[me], fresh);
                fills[me] = fill;
                within(nodes[me].bulk.unmap(old.id)).await.expect("it is unmapped");
            }
            8 => {
                if let Some(path) = nodes[me].bulk.describe(nodes[peer].id()) {
                    lab.world.force_bulk_error(SimLab::addr(u32::try_from(me + 1).expect("two")), path.qpn);
                }
            }
            _ => tokio::time::sleep(Duration::from_micros(rng.u64(0..20_000))).await,
        }
        if running.len() > 6 {
            settle(&mut nodes, &mut running, ends).await;
        }
    }
    settle(&mut nodes, &mut running, ends).await;
    lab.world.stop_faults();
    for me in 0..2 {
        let peer = nodes[1 - me].id();
        let into = map(&nodes[me], vec![0; LEN], Access::DESTINATION).await;
        let from = sources[1 - me].whole().expect("remote");
        // What had struck before may cost an attempt or two.
        let mut tries = 0;
        while let Err(error) = within(nodes[me].bulk.get(peer, from, into.id, 0)).await {
            tries += 1;
            let told = (nodes[me].bulk.describe(peer), nodes[me].bulk.stats(), nodes[1 - me].bulk.stats());
            assert!(tries < 10, "after the faults: {error}: {told:?}");
        }
        assert!(nodes[me].bytes(into.id, LEN) == vec![fills[1 - me]; LEN]);
    }
    for node in nodes {
        node.stop().await;
    }
}

type Running = (usize, Region, u8, usize, tokio::task::JoinHandle<Result<(), TransferError>>);

async fn settle(nodes: &mut [BulkNode<SimFabric>; 2], running: &mut Vec<Running>, ends: &mut Ends) {
    for (me, into, fill, len, get) in running.drain(..) {
        let end = within(get).await.expect("no panic");
        ends.count(&end);
        let bytes = nodes[me].bytes(into.id, LEN);
        if end.is_ok() {
            assert!(bytes[..len] == vec![fill; len] && bytes[len..].iter().all(|byte| *byte == 0), "exactly its bytes");
        } else {
            assert!(bytes.iter().all(|byte| [0, fill].contains(byte)), "never a foreign byte");
        }
        within(nodes[me].bulk.unmap(into.id)).await.expect("nothing uses it any more");
    }
}

fn quiet(scenario: impl AsyncFnOnce(Arc<SimLab>)) {
    on_sim_lab(SimLab::new_bulk(1, Faults::none()), |lab| scenario(lab));
}

/// a QP that hangs and says nothing ends by the clock, and its late completions are nobody's.
#[test]
fn a_hanging_qp_is_given_up_by_the_clock() {
    let faults = Faults { port_down_hangs: 1.0, ..Faults::none() };
    on_sim_lab(SimLab::new_bulk(1, faults), |lab| async move {
        let config = BulkConfig { stall_deadline: Duration::from_millis(500), ..BulkConfig::default() };
        let (a, b) = bulk_pair_with(&*lab, &config).await;
        let source = b.map(numbered(1 << 20), Access::SOURCE).await;
        let into = a.map_filled(1 << 20, 0, Access::DESTINATION).await;
        let from = source.whole().expect("remote");
        within(a.bulk.get(b.id(), from, into.id, 0)).await.expect("a GET");
        lab.world.port_down(SimLab::addr(1));
        let end = within(a.bulk.get(b.id(), from, into.id, 0)).await;
        let stalled = matches!(&end, Err(TransferError::ConnectionReset { cause, .. }) if matches!(**cause, BulkEnd::Stalled { .. }));
        assert!(stalled, "{end:?}");
        lab.world.port_up(SimLab::addr(1));
        within(a.bulk.get(b.id(), from, into.id, 0)).await.expect("with another QP");
        a.stop().await;
        b.stop().await;
    });
}

/// a flush that never comes holds nobody up.
#[test]
fn a_flush_that_never_comes_is_not_waited_for() {
    let faults = Faults { lost_flush: 1.0, ..Faults::none() };
    on_sim_lab(SimLab::new_bulk(1, faults), |lab| async move {
        let (a, b) = bulk_pair(&*lab).await;
        let source = b.map(numbered(4 << 20), Access::SOURCE).await;
        let into = a.map_filled(4 << 20, 0, Access::DESTINATION).await;
        let get = a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0);
        let watch = get.handle();
        let get = tokio::spawn(get);
        until("it is under way", || watch.moved() > 0).await;
        let qpn = a.bulk.describe(b.id()).expect("connected").qpn;
        watch.abort();
        let end = within(get).await.expect("no panic");
        assert!(matches!(end, Err(TransferError::Cancelled)), "{end:?}");
        assert_eq!(a.bulk.stats().flushes_abandoned, 1, "qp {qpn:#x}");
        a.unmap(into).await;
        a.stop().await;
        b.stop().await;
    });
}

/// a QP that the device keeps may touch memory for ever, so that memory is never given back, and this is said.
#[test]
fn memory_under_a_qp_that_stays_is_leaked_and_reported() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let lab = Arc::new(SimLab::new_bulk(1, Faults { lost_flush: 1.0, ..Faults::none() }));
    runtime.block_on(async {
        let (a, b) = bulk_pair(&*lab).await;
        let source = b.map(numbered(4 << 20), Access::SOURCE).await;
        let memory = OwnedBytes::new(vec![0; 4 << 20]);
        let into = within(a.bulk.map_all(memory.clone(), Access::DESTINATION)).await.expect("it is mapped");
        let get = a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0);
        let watch = get.handle();
        let get = tokio::spawn(get);
        until("it is under way", || watch.moved() > 0).await;
        let unmap = a.bulk.unmap(into.id);
        lab.world.refuse_destroy(SimLab::addr(1), true);
        watch.abort();
        let end = within(get).await.expect("no panic");
        assert!(matches!(end, Err(TransferError::Cancelled)), "{end:?}");
        let unmapped = within(unmap).await;
        assert!(matches!(unmapped, Err(UnmapError::Deregister { .. })), "{unmapped:?}");
        assert_eq!(a.bulk.stats().leaked, 1);
        within(a.bulk.shutdown()).await;
        a.worker.shutdown().await;
        OwnedBytes::into_vec(memory).expect_err("never given back");
        b.stop().await;
    });
    let host = &lab.world.report().hosts[0];
    assert_eq!((host.live_bulk_qps, host.live_regions), (1, 1), "one of each, and no more");
}

/// what the device does not let go of stays, is reported, and may be tried again.
#[test]
fn a_refused_deregistration_is_reported_and_tried_again() {
    quiet(async |lab: Arc<SimLab>| {
        let (a, b) = bulk_pair(&*lab).await;
        let memory = OwnedBytes::new(vec![0; 4096]);
        let region = within(a.bulk.map_all(memory.clone(), Access::SOURCE)).await.expect("it is mapped");
        lab.world.refuse_deregister(SimLab::addr(1), true);
        let first = within(a.bulk.unmap(region.id)).await;
        assert!(matches!(first, Err(UnmapError::Deregister { .. })), "{first:?}");
        let memory = OwnedBytes::into_vec(memory).expect_err("it stays");
        lab.world.refuse_deregister(SimLab::addr(1), false);
        within(a.bulk.unmap(region.id)).await.expect("now");
        OwnedBytes::into_vec(memory).expect("it is given back");
        a.stop().await;
        b.stop().await;
    });
}

/// no bulk port, one clear error, and messages as ever.
#[test]
fn a_device_without_reads_leaves_the_messages_alone() {
    use verbs_bootstrap::RdAtomic;
    use verbs_transport::{Worker, sim::HostConfig};
    quiet(async |lab: Arc<SimLab>| {
        let rd_atomic = RdAtomic { initiator: 0, responder: 16 };
        let fabric = lab.world.host(SimLab::addr(1), HostConfig { rd_atomic, ..HostConfig::default() });
        let worker = Worker::new(lab.config(1), fabric).expect("a valid configuration");
        let refused = Bulk::attach(&worker, BulkConfig::default()).map(drop).expect_err("no READs");
        assert!(refused.to_string().contains("0 RDMA READs at once as initiator"), "{refused}");
        let _inbound = worker.start().await.expect("it starts all the same");
        let late = Bulk::attach(&worker, BulkConfig::default()).map(drop).expect_err("too late");
        assert!(!late.to_string().is_empty());
        let b = BulkNode::start(&*lab, 2).await;
        let peer = worker.register(&b.worker.address()).expect("the address is good");
        within(worker.ensure_connected(peer)).await.expect("messages flow");
        worker.shutdown().await;
        b.stop().await;
    });
}

/// The CQ is never overrun: a connection that does not fit is refused, with the numbers.
#[test]
fn a_connection_that_does_not_fit_the_cq_is_refused() {
    quiet(async |lab: Arc<SimLab>| {
        let config = BulkConfig { cq_depth: 103 + 102, send_wrs: 63, notify_window: 32, ..BulkConfig::default() };
        let a = BulkNode::start_bulk(&*lab, 1, config).await;
        let (b, c) = (BulkNode::start(&*lab, 2).await, BulkNode::start(&*lab, 3).await);
        let into = a.map_filled(10, 0, Access::DESTINATION).await;
        let mut ends = Vec::new();
        for peer in [&b, &c] {
            a.register(peer);
            let source = peer.map_filled(10, 1, Access::SOURCE).await;
            ends.push(within(a.bulk.get(peer.id(), source.whole().expect("remote"), into.id, 0)).await);
        }
        assert!(ends[0].is_ok(), "{ends:?}");
        let full = matches!(&ends[1], Err(TransferError::Connect { cause, .. })
            if matches!(**cause, BulkEnd::CqFull { cq_depth: 205, qps: 1, qp_wrs: 103 }));
        assert!(full, "{ends:?}");
        for node in [a, b, c] {
            node.stop().await;
        }
    });
}
