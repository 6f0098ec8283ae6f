//! Bulk memory and the death of real processes, on this machine's RDMA device: B25, RT-19 and RT-20 as far as regions go.

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use verbs_bootstrap::InstanceId;
use verbs_rma::{RemoteRange, TransferError};
use verbs_tests::{
    bulk::{BulkNode, until, within},
    lab::{DeviceLab, Lab, on_device},
    process::PeerProcess,
};
use verbs_transport::fabric::bulk::{Access, OwnedBytes, Rkey};

const PEER: &str = env!("CARGO_BIN_EXE_peer");

/// Dead-peer detection takes 3 to 4 s, and an emulated device its time.
const END_WITHIN: Duration = Duration::from_secs(8);

type Lead = BulkNode<<DeviceLab as Lab>::F>;

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<DeviceLab>) -> R) {
    on_device(DeviceLab::new(), scenario);
}

/// This side, and a peer in its own process that knows it.
async fn lead_and_peer(lab: &DeviceLab) -> (Lead, PeerProcess, InstanceId) {
    let lead = BulkNode::start(lab, 1).await;
    let mut peer = PeerProcess::start(PEER, &[]);
    let id = lead.worker.register(peer.address()).expect("good");
    peer.register(&lead.worker.address());
    (lead, peer, id)
}

/// Memory of the peer's.
fn mapped_there(peer: &mut PeerProcess, bytes: usize, fill: u8) -> RemoteRange {
    let told = peer.ask(&format!("bulk-map {bytes} {fill}"));
    let words: Vec<u64> = told.split(' ').map(|word| word.parse().expect("a number")).collect();
    let [addr, rkey, len] = words[..] else { panic!("the peer said {told:?}") };
    RemoteRange { addr, rkey: Rkey(u32::try_from(rkey).expect("32 bits")), len }
}

/// It ended with an error of the peer's, in time, and the memory is free at once.
async fn ended(
    lead: &Lead,
    began: Instant,
    end: Result<(), TransferError>,
    memory: Arc<OwnedBytes>,
    into: verbs_rma::RegionId,
) {
    let took = began.elapsed();
    assert!(matches!(end, Err(TransferError::Failed { .. } | TransferError::ConnectionReset { .. })), "{end:?}");
    assert!(took < END_WITHIN, "only after {took:?}");
    within(lead.bulk.unmap(into)).await.expect("nothing reaches it any more");
    OwnedBytes::into_vec(memory).expect("it is given back");
    until("the QP is gone", || lead.bulk.stats().qps == 0).await;
}

/// B25, RT-20: the owner dies under a GET, then under a PUT. The next process at its place serves at once.
#[test]
fn an_owner_killed_in_a_get_or_a_put_is_an_error_and_nothing_more() {
    run(|lab| async move {
        let len = 32 << 20;
        for put in [false, true] {
            let (lead, mut peer, id) = lead_and_peer(&lab).await;
            let there = mapped_there(&mut peer, len, 0x77);
            let memory = OwnedBytes::new(vec![0; len]);
            let here = within(lead.bulk.map_all(memory.clone(), Access::DESTINATION)).await.expect("it is mapped");
            let transfer =
                if put { lead.bulk.put(id, here.id, 0, there) } else { lead.bulk.get(id, there, here.id, 0) };
            let watch = transfer.handle();
            let transfer = tokio::spawn(transfer);
            until("it is under way", || watch.moved() > 0).await;
            peer.kill();
            let began = Instant::now();
            let end = within(transfer).await.expect("no panic");
            ended(&lead, began, end, memory, here.id).await;

            let mut next = PeerProcess::start(PEER, &[]);
            let id = lead.worker.register(next.address()).expect("good");
            let there = mapped_there(&mut next, 100_000, 0x33);
            let into = lead.map_filled(100_000, 0, Access::DESTINATION).await;
            within(lead.bulk.get(id, there, into.id, 0)).await.expect("a new process, a new connection");
            assert_eq!(lead.bytes(into.id, 100_000), vec![0x33; 100_000]);
            next.finish();
            lead.stop().await;
        }
    });
}

/// RT-19 without leases: a reader that dies is noticed by its socket, its QP goes, and the memory it read may be given
/// back and out again.
#[test]
fn a_reader_killed_in_a_get_leaves_nothing_at_the_owner() {
    run(|lab| async move {
        let (lead, mut peer, _) = lead_and_peer(&lab).await;
        let len = 8 << 20;
        let memory = OwnedBytes::new(vec![0x55; len]);
        let source = within(lead.bulk.map_all(memory.clone(), Access::SOURCE)).await.expect("it is mapped");
        let RemoteRange { addr, rkey, .. } = source.whole().expect("remote");
        peer.ask(&format!("bulk-get {:x} {addr} {} {len}", lead.id().0, rkey.0));
        until("it reads", || peer.ask_json("bulk-stats")["chunks"].as_u64().unwrap_or(0) > 2).await;
        assert_eq!(lead.bulk.stats().qps, 1);
        peer.kill();
        let began = Instant::now();
        until("its QP is gone here", || lead.bulk.stats().qps == 0).await;
        assert!(began.elapsed() < END_WITHIN, "only after {:?}", began.elapsed());
        within(lead.bulk.unmap(source.id)).await.expect("nobody reads it");
        assert!(OwnedBytes::into_vec(memory).expect("it is given back") == vec![0x55; len]);
        lead.stop().await;
    });
}

/// The other way round: the owner takes its memory back under a reader in another process, which gets an error, keeps
/// running and reads on by a new right.
#[test]
fn a_reader_whose_right_is_taken_gets_an_error_and_lives() {
    run(|lab| async move {
        let (lead, mut peer, _) = lead_and_peer(&lab).await;
        for fill in [1_u8, 2] {
            let source = lead.map_filled(4 << 20, fill, Access::SOURCE).await;
            let RemoteRange { addr, rkey, len } = source.whole().expect("remote");
            peer.ask(&format!("bulk-get {:x} {addr} {} {len}", lead.id().0, rkey.0));
            let before = peer.ask_json("bulk-stats")["done"].as_u64().expect("a number");
            until("it reads", || peer.ask_json("bulk-stats")["done"].as_u64().unwrap_or(0) > before).await;
            lead.unmap(source).await;
            until("it has its error", || !peer.ask_json("bulk-stats")["ended"].is_null()).await;
        }
        peer.finish();
        lead.stop().await;
    });
}
