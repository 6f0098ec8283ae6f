//! Owners and consumers that are killed or stopped in each phase of a pull, on this machine's RDMA device.

use std::{future::Future, sync::Arc, time::Duration};

use verbs_rma::{Handle, PullError, RendezvousConfig, rendezvous::StageOptions};
use verbs_tests::{
    lab::{DeviceLab, Lab, on_device},
    party::{Party, slot_pattern},
    process::{PeerProcess, to_hex},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_party");

/// The contract's bound for the end of everything after a peer's death, and some for a slow machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Some READs, and a second or more, under emulation.
const LARGE: usize = 24 << 20;

type Lead = Party<<DeviceLab as Lab>::F>;

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<DeviceLab>) -> R) {
    on_device(DeviceLab::new(), scenario);
}

fn times() -> RendezvousConfig {
    RendezvousConfig {
        arena_bytes: 32 << 20,
        source_max_bytes: 32 << 20,
        lease: Duration::from_secs(4),
        lease_grace: Duration::from_secs(2),
        lease_margin: Duration::from_secs(1),
        ..RendezvousConfig::default()
    }
}

const TIMES: [&str; 3] = ["lease=4000", "grace=2000", "margin=1000"];

/// An owner here, and a consumer in a process of its own that knows it.
async fn owner_and_process(lab: &DeviceLab, args: &[&str]) -> (Lead, PeerProcess) {
    let owner = Party::start(lab, 1, times()).await;
    let mut process = PeerProcess::start(PROGRAM, &[&TIMES[..], args].concat());
    process.register(&owner.rendezvous.worker().address());
    (owner, process)
}

async fn stage(owner: &Lead, n: u64, pinned: bool) -> Handle {
    let options = StageOptions { pinned, ..StageOptions::default() };
    owner.rendezvous.stage_with(slot_pattern(n, LARGE), options).await.expect("there is room")
}

/// The dead consumer's lease has ended; its slice is another payload's now, and that one is whole.
async fn assert_reused(owner: Lead, handle: Handle) {
    owner.until("end of the lease", PATIENCE, |stats| stats.book.leases == 0 && stats.book.rights == 0).await;
    owner.rendezvous.withdraw(handle);
    owner.assert_empty(PATIENCE).await;
    // The arenas hold one of this size: it is the same slice.
    let again = stage(&owner, 99, true).await;
    let mut consumer = PeerProcess::start(PROGRAM, &TIMES);
    consumer.register(&owner.rendezvous.worker().address());
    assert_eq!(consumer.ask(&format!("get {again} 99")), format!("good {LARGE}"));
    consumer.ask("release");
    owner.assert_empty(PATIENCE).await;
    consumer.finish();
    owner.stop().await;
}

/// RT-19, acquire: the consumer dies with its lease, after it has read.
#[test]
fn consumer_killed_with_a_lease() {
    run(|lab| async move {
        let (owner, mut consumer) = owner_and_process(&lab, &[]).await;
        let handle = stage(&owner, 1, true).await;
        assert_eq!(consumer.ask(&format!("get {handle} 1")), format!("good {LARGE}"));
        assert_eq!(owner.rendezvous.stats().book.leases, 1);
        consumer.kill();
        assert_reused(owner, handle).await;
    });
}

/// RT-19: the consumer dies while its READs are under way.
#[test]
fn consumer_killed_in_the_middle_of_a_get() {
    run(|lab| async move {
        let (owner, mut consumer) = owner_and_process(&lab, &[]).await;
        let handle = stage(&owner, 1, true).await;
        consumer.ask(&format!("pull {handle} 1"));
        owner.until("right", PATIENCE, |stats| stats.book.rights == 1).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        consumer.kill();
        assert_reused(owner, handle).await;
    });
}

/// RT-19 by chunks.
#[test]
fn consumer_killed_between_two_chunks() {
    run(|lab| async move {
        let (owner, mut consumer) = owner_and_process(&lab, &["reads=0"]).await;
        let handle = stage(&owner, 1, true).await;
        consumer.ask(&format!("pull {handle} 1"));
        owner.until("chunks", PATIENCE, |stats| stats.chunks_served >= 10).await;
        consumer.kill();
        assert!(owner.rendezvous.stats().chunks_served < LARGE as u64 / (512 << 10), "in the middle");
        assert_reused(owner, handle).await;
    });
}

/// RT-19: the consumer dies at its release, which comes through or does not.
#[test]
fn consumer_killed_at_its_release() {
    run(|lab| async move {
        let (owner, mut consumer) = owner_and_process(&lab, &[]).await;
        let handle = stage(&owner, 1, true).await;
        assert_eq!(consumer.ask(&format!("get {handle} 1")), format!("good {LARGE}"));
        consumer.ask("release");
        consumer.kill();
        owner.until("end of the lease", PATIENCE, |stats| stats.book.leases == 0 && stats.book.rights == 0).await;
        let slots = owner.rendezvous.stats().book.slots;
        eprintln!("{slots} slot left after a release that raced with a kill");
        assert!(slots <= 1);
        assert_reused(owner, handle).await;
    });
}

/// RT-21: the consumer stands still beyond its lease in the middle of a pull, its slice becomes another payload's, and
/// it goes on. It must fail, or start again and find the handle gone; never the other's bytes.
#[test]
fn late_consumer_sees_no_foreign_byte() {
    run(|lab| async move {
        for reads in ["reads=1", "reads=0"] {
            let (owner, mut consumer) = owner_and_process(&lab, &[reads]).await;
            let handle = stage(&owner, 1, true).await;
            consumer.ask(&format!("pull {handle} 1"));
            owner.until("lease", PATIENCE, |stats| stats.book.leases == 1).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
            consumer.signal("STOP");
            owner.rendezvous.withdraw(handle);
            owner.assert_empty(PATIENCE).await;
            let again = stage(&owner, 2, true).await;
            consumer.signal("CONT");
            let pulls = loop {
                let pulls = consumer.ask_json("pulls");
                if pulls.as_array().is_some_and(|pulls| !pulls.is_empty()) {
                    break pulls;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            };
            eprintln!("{reads}: {pulls}");
            let told = pulls[0].as_str().expect("words");
            assert!(told.starts_with("failed") || told == format!("good {LARGE}"), "{told}");
            owner.rendezvous.withdraw(again);
            owner.assert_empty(PATIENCE).await;
            consumer.kill();
            owner.stop().await;
        }
    });
}

/// A consumer here, and an owner in a process of its own with a payload.
async fn process_and_consumer(lab: &DeviceLab, args: &[&str], kind: &str) -> (PeerProcess, Lead, Handle) {
    let consumer = Party::start(lab, 1, times()).await;
    let mut process = PeerProcess::start(PROGRAM, &[&TIMES[..], args].concat());
    consumer.rendezvous.register(process.address()).expect("good");
    let handle = process.ask(&format!("stage 1 {LARGE} {kind}")).parse().expect("a handle");
    (process, consumer, handle)
}

async fn assert_fails_cleanly(consumer: Lead, pulling: impl Future<Output = Result<u64, PullError>>) {
    let failed = tokio::time::timeout(PATIENCE, pulling).await.expect("within the bound");
    let error = failed.expect_err("the owner is gone");
    eprintln!("the consumer hears: {error}");
    assert!(matches!(error, PullError::Ask(_)), "{error:?}");
    consumer.assert_empty(PATIENCE).await;
    consumer.stop().await;
}

/// RT-20.
#[test]
fn owner_killed_between_metadata_and_pull() {
    run(|lab| async move {
        let (owner, consumer, handle) = process_and_consumer(&lab, &[], "pinned").await;
        assert_eq!(consumer.rendezvous.metadata(handle).await.expect("it is there").total_bytes, LARGE as u64);
        owner.kill();
        let rendezvous = consumer.rendezvous.clone();
        assert_fails_cleanly(consumer, async move { Ok(rendezvous.pull(handle).into(&mut Vec::new()).await?.bytes) })
            .await;
    });
}

/// RT-20, while READs are under way; and by chunks.
#[test]
fn owner_killed_in_the_middle_of_a_pull() {
    run(|lab| async move {
        for kind in ["pinned", "memory"] {
            let (owner, consumer, handle) = process_and_consumer(&lab, &[], kind).await;
            let rendezvous = consumer.rendezvous.clone();
            let pulling = tokio::spawn(async move {
                let mut bytes = Vec::new();
                let pulled = rendezvous.pull(handle).into(&mut bytes).await?;
                Ok(pulled.bytes)
            });
            tokio::time::sleep(Duration::from_millis(400)).await;
            assert!(!pulling.is_finished(), "it was to be in the middle");
            owner.kill();
            assert_fails_cleanly(consumer, async move { pulling.await.expect("no panic") }).await;
        }
    });
}

/// RT-20: the owner dies before the release: the bytes are the consumer's, and nothing hangs.
#[test]
fn owner_killed_before_the_release() {
    run(|lab| async move {
        let (owner, consumer, handle) = process_and_consumer(&lab, &[], "pinned").await;
        let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("it is there");
        owner.kill();
        consumer.rendezvous.release(lease);
        assert!(bytes == slot_pattern(1, LARGE));
        consumer.assert_empty(PATIENCE).await;
        consumer.stop().await;
    });
}

/// A message that is staged for a process that dies comes back; one whose sender dies is not delivered, and nothing hangs.
#[test]
fn messages_of_and_for_the_dead() {
    run(|lab| async move {
        let mut lead = Party::start(&*lab, 1, times()).await;
        let mut process = PeerProcess::start(PROGRAM, &TIMES);
        let id = lead.rendezvous.register(process.address()).expect("good");
        process.register(&lead.rendezvous.worker().address());
        process.ask(&format!("connect {}", lead.id()));
        process.signal("STOP");
        let _ = lead.send(id, verbs_transport::MessageType::Message, "to the dead", slot_pattern(1, 1 << 20));
        process.kill();
        // The connection's end gives the receiver a while to come back; an unregister does not.
        tokio::time::sleep(Duration::from_secs(1)).await;
        lead.rendezvous.worker().unregister(id);
        lead.until("message back", PATIENCE, |stats| stats.messages_failed == 1).await;
        assert_eq!(lead.errors.count(), 1);
        assert!(lead.errors.all()[0].1 == slot_pattern(1, 1 << 20), "with its bytes");
        lead.assert_empty(PATIENCE).await;

        let mut process = PeerProcess::start(PROGRAM, &TIMES);
        process.ask(&format!("register {}", to_hex(lead.rendezvous.worker().address().as_bytes())));
        process.ask(&format!("send {} 5 {LARGE}", lead.id()));
        let stream = &mut lead.inbound.message;
        let received = tokio::time::timeout(Duration::from_millis(300), stream.recv()).await;
        process.kill();
        if let Ok(Some(message)) = received {
            assert!(message.payload == slot_pattern(5, LARGE));
        }
        lead.stop().await;
    });
}
