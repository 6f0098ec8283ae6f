//! The rendezvous on simulated hosts, in fake time.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use verbs_rma::{PullError, RendezvousConfig, rendezvous::StageOptions};
use verbs_tests::{
    lab::{Lab, SimLab, on_sim, on_sim_lab, on_sim_threads},
    node::Node,
    party::{Party, slot_pattern},
    scenarios::{rendezvous_reads, windows},
};
use verbs_transport::{Config, MessageType, SendError, fabric::bulk::WindowPolicy, sim::Faults};

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<SimLab>) -> R) {
    on_sim(1, Faults::none(), scenario);
}

verbs_tests::rendezvous_suite!(run);

/// The suite where each lease registers its slice, as on devices without usable windows.
mod by_registration {
    use super::{Arc, Faults, Future, SimLab, WindowPolicy, on_sim_lab};

    fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<SimLab>) -> R) {
        on_sim_lab(SimLab::new(1, Faults::none()).with_windows(WindowPolicy::Never), scenario);
    }

    verbs_tests::rendezvous_suite!(run);
}

#[test]
fn leases_are_windows_and_end_with_them() {
    run(windows::leases_are_windows_and_end_with_them);
    slowly(1, windows::leases_are_windows_and_end_with_them);
}

#[test]
fn a_peer_that_invalidates_a_window_loses_its_connection() {
    run(windows::a_peer_that_invalidates_a_window_loses_its_connection);
}

#[test]
fn an_invalidation_during_a_read_costs_a_second_try() {
    slowly(1, windows::an_invalidation_during_a_read_costs_a_second_try);
}

/// what cannot be bound goes by registration, and costs its connection; after three in a row nobody tries any
/// more.
#[test]
fn a_device_that_binds_nothing_gets_registrations() {
    let faults = Faults { bind_fails: 1.0, ..Faults::none() };
    on_sim_lab(SimLab::new(1, faults), windows::windows_that_fail_are_replaced_by_registrations);
}

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

fn times() -> RendezvousConfig {
    RendezvousConfig {
        arena_bytes: 16 << 20,
        source_max_bytes: 16 << 20,
        lease: Duration::from_secs(4),
        lease_grace: Duration::from_secs(2),
        lease_margin: Duration::from_secs(1),
        ..RendezvousConfig::default()
    }
}

/// Where a megabyte takes 10 ms. Of four seeds, two have leases by windows and two by registrations.
fn slowly<R: Future<Output = ()>>(seed: u64, scenario: impl FnOnce(Arc<SimLab>) -> R) {
    on_sim_lab(SimLab::new_bulk(seed, Faults::none()).with_windows(policy(seed)), scenario);
}

fn policy(seed: u64) -> WindowPolicy {
    if seed & 2 == 0 { WindowPolicy::Auto } else { WindowPolicy::Never }
}

/// RT-18, RT-22 and RT-24 where bytes take their time, so that there is a middle of a GET.
mod slow {
    use super::{rendezvous_reads, slowly};

    #[test]
    fn rt_18_dropped_pulls_leave_nothing() {
        slowly(1, rendezvous_reads::rt_18_dropped_pulls_leave_nothing);
    }

    #[test]
    fn rt_24_the_owner_shuts_down_during_a_get() {
        slowly(1, rendezvous_reads::rt_24_the_owner_shuts_down_during_a_get);
    }

    #[test]
    fn rt_26_soak() {
        slowly(1, rendezvous_reads::rt_26_soak);
    }
}

/// RT-22 on four threads, in real time: the order of things is whatever it is.
#[test]
fn rt_22_on_threads() {
    on_sim_threads(4, rendezvous_reads::rt_22_release_races_with_acquire);
}

/// A lease is renewed as often as a long transfer needs it, and the rest of it is as ever.
#[test]
fn a_transfer_longer_than_its_lease_renews_it() {
    slowly(1, |lab| async move {
        let short = RendezvousConfig {
            arena_bytes: 256 << 20,
            source_max_bytes: 256 << 20,
            lease: Duration::from_millis(500),
            lease_margin: Duration::from_millis(100),
            ..times()
        };
        let (owner, consumer) = (Party::start(&*lab, 1, short.clone()).await, Party::start(&*lab, 2, short).await);
        consumer.register(&owner);
        let handle = owner.rendezvous.stage_pinned(slot_pattern(1, 200 * MIB)).await.expect("there is room");
        let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("it is renewed");
        assert!(bytes == slot_pattern(1, 200 * MIB));
        consumer.rendezvous.release(lease);
        let stats = owner.until("release", PATIENCE, |stats| stats.book.slots == 0).await;
        assert!(stats.leases_renewed >= 4, "2 s of transfer, half a second of lease: {}", stats.leases_renewed);
        assert_eq!((stats.leases_reaped, consumer.rendezvous.stats().pulled.rdma), (0, 1));
        owner.assert_empty(PATIENCE).await;
        consumer.stop().await;
        owner.stop().await;
    });
}

/// cut off from the owner's answers, the consumer stops posting at its margin, ends within its lease, and says why.
/// The bulk path is cut with the rest, so its QP goes down for want of anything else.
#[test]
fn a_consumer_that_cannot_renew_stops_by_itself() {
    slowly(1, |lab| async move {
        let (owner, consumer) = (Party::start(&*lab, 1, times()).await, Party::start(&*lab, 2, times()).await);
        consumer.register(&owner);
        let handle = owner.rendezvous.stage_pinned(slot_pattern(1, 16 * MIB)).await.expect("there is room");
        let rendezvous = consumer.rendezvous.clone();
        let began = tokio::time::Instant::now();
        let pulling = tokio::spawn(async move { rendezvous.pull(handle).into(&mut Vec::new()).await });
        owner.until("right", PATIENCE, |stats| stats.book.rights == 1).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        lab.world.cut(SimLab::addr(1), SimLab::addr(2));
        let error = pulling.await.expect("no panic").expect_err("it is cut off");
        eprintln!("after {:?}: {error}", began.elapsed());
        assert!(matches!(error, PullError::LeaseOver { .. } | PullError::Ask(_)), "{error:?}");
        owner.until("end of the lease", PATIENCE, |stats| stats.book.leases == 0 && stats.book.rights == 0).await;
        lab.world.heal(SimLab::addr(1), SimLab::addr(2));
        let mut bytes = Vec::new();
        // Back-off of both planes passes.
        tokio::time::sleep(Duration::from_secs(20)).await;
        consumer.rendezvous.pull(handle).and_release().into(&mut bytes).await.expect("it is still there");
        assert!(bytes == slot_pattern(1, 16 * MIB));
        owner.assert_empty(PATIENCE).await;
        consumer.stop().await;
        owner.stop().await;
    });
}

/// RT-19: the consumer's host dies at any moment of a pull, by READ and by chunks. Its lease ends within deadline and grace,
/// the slice is the next payload's, and that one arrives whole.
#[test]
fn rt_19_consumers_die_at_any_moment() {
    for seed in 0..60 {
        slowly(seed, |lab| async move {
            let reads = seed % 2 == 0;
            let owner = Party::start(&*lab, 1, times()).await;
            let consumer = Party::start(&*lab, 2, RendezvousConfig { reads, ..times() }).await;
            consumer.register(&owner);
            let handle = owner.rendezvous.stage_pinned(slot_pattern(1, 16 * MIB)).await.expect("there is room");
            let rendezvous = consumer.rendezvous.clone();
            let pulling = tokio::spawn(async move {
                let pulled = rendezvous.get(handle).await;
                // It dies with its lease, if it comes so far.
                std::future::pending::<()>().await;
                drop(pulled);
            });
            tokio::time::sleep(Duration::from_millis(7 * seed)).await;
            lab.world.kill_host(SimLab::addr(2));
            let bound = times().lease + times().lease_grace + times().reaper_tick * 2;
            let ended = |stats: &verbs_rma::RendezvousStats| stats.book.leases == 0 && stats.book.rights == 0;
            owner.until("end of the lease", bound, ended).await;
            pulling.abort();
            drop(consumer);
            owner.rendezvous.withdraw(handle);
            owner.assert_empty(bound).await;

            let next = owner.rendezvous.stage_pinned(slot_pattern(2, 16 * MIB)).await.expect("the slice is free");
            assert_eq!(owner.rendezvous.stats().pool_full, 0);
            let third = Party::start(&*lab, 3, times()).await;
            third.register(&owner);
            let mut bytes = Vec::new();
            third.rendezvous.pull(next).and_release().into(&mut bytes).await.expect("nothing is wrong");
            assert!(bytes == slot_pattern(2, 16 * MIB), "foreign bytes");
            owner.assert_empty(PATIENCE).await;
            third.stop().await;
            owner.stop().await;
        });
    }
}

/// RT-20: the owner's host dies at any moment of a pull: an error within the bound, or the right bytes; nothing is left.
#[test]
fn rt_20_owners_die_at_any_moment() {
    for seed in 0..60 {
        slowly(seed, |lab| async move {
            let owner = Party::start(&*lab, 1, times()).await;
            let consumer = Party::start(&*lab, 2, RendezvousConfig { reads: seed % 2 == 0, ..times() }).await;
            consumer.register(&owner);
            let options = StageOptions { pinned: true, ..StageOptions::default() };
            let handle = owner.rendezvous.stage_with(slot_pattern(1, 16 * MIB), options).await.expect("there is room");
            consumer.rendezvous.metadata(handle).await.expect("it is there");
            let rendezvous = consumer.rendezvous.clone();
            let pulling = tokio::spawn(async move {
                let mut bytes = Vec::new();
                rendezvous.pull(handle).into(&mut bytes).await.map(|_| bytes)
            });
            tokio::time::sleep(Duration::from_millis(5 * seed)).await;
            lab.world.kill_host(SimLab::addr(1));
            match tokio::time::timeout(PATIENCE, pulling).await.expect("within the bound").expect("no panic") {
                Ok(bytes) => assert!(bytes == slot_pattern(1, 16 * MIB), "other bytes"),
                Err(PullError::Ask(_)) => {}
                Err(other) => panic!("{other:?}"),
            }
            drop(owner);
            consumer.assert_empty(PATIENCE).await;
            consumer.stop().await;
        });
    }
}

/// A message that came back is counted when its sender has it, so that one may be waited for by the other.
#[test]
fn a_failed_message_is_reported_before_it_is_counted() {
    run(|lab| async move {
        let party = Party::start(&*lab, 1, times()).await;
        // It has no rendezvous, and sends back what it cannot pull.
        let plain = Node::start(&*lab, 2).await;
        let id = party.rendezvous.register(&plain.worker.address()).expect("good");
        let (at_report, rendezvous) = (Arc::new(AtomicU64::new(u64::MAX)), party.rendezvous.clone());
        let on_error = {
            let at_report = at_report.clone();
            move |_: Bytes, _: Bytes, _: SendError| {
                at_report.store(rendezvous.stats().messages_failed, Ordering::Relaxed);
            }
        };
        let message = (Bytes::from_static(b"h"), slot_pattern(1, MIB));
        drop(party.rendezvous.send(id, message.0, message.1, MessageType::Message, Arc::new(on_error)));
        party.until("message back", PATIENCE, |stats| stats.messages_failed == 1).await;
        assert_eq!(at_report.load(Ordering::Relaxed), 0);
        party.stop().await;
        plain.stop().await;
    });
}

/// A worker that comes back under its name has nothing of what its former run had staged, and nobody is told another's
/// bytes for it.
#[test]
fn handles_of_a_former_run_name_nothing() {
    run(|lab| async move {
        let owner = Party::start(&*lab, 1, times()).await;
        let consumer = Party::start(&*lab, 2, times()).await;
        consumer.register(&owner);
        let old = owner.rendezvous.stage(slot_pattern(1, 1000)).expect("small");
        consumer.rendezvous.metadata(old).await.expect("it is there");
        lab.world.kill_host(SimLab::addr(1));
        drop(owner);
        // A run draws its number; the simulation's must not be drawn twice.
        let config = Config { seed: Some(77), ..lab.config(1) };
        let again = Party::start_with(lab.fabric(1), config, RendezvousConfig::default()).await;
        let new = again.rendezvous.stage(slot_pattern(2, 1000)).expect("small");
        assert_eq!(old.slot, new.slot);
        consumer.register(&again);
        let error = consumer.rendezvous.get(old).await.expect_err("it is gone");
        assert!(matches!(error, PullError::Ask(verbs_rma::AskError::UnknownOwner { .. })), "{error:?}");
        let mut bytes = Vec::new();
        consumer.rendezvous.pull(new).and_release().into(&mut bytes).await.expect("it is there");
        assert!(bytes == slot_pattern(2, 1000));
        again.assert_empty(PATIENCE).await;
        consumer.stop().await;
        again.stop().await;
    });
}

/// Messages of any size while devices and sockets fail: each is delivered whole and in order, or comes back; none is
/// delivered twice; and when the faults stop, everything comes home.
#[test]
fn messages_through_faults_are_delivered_or_come_back() {
    for seed in 0..80 {
        let faults =
            Faults { qp_error: 0.0005, lost_ack: 0.0005, register_refused: 0.1, bind_fails: 0.05, ..Faults::none() };
        on_sim_lab(SimLab::new_bulk(seed, faults).with_windows(policy(seed)), |lab| async move {
            let config = RendezvousConfig { staged_ttl: Duration::from_secs(60), ..times() };
            let (mut receiver, sender) =
                (Party::start(&*lab, 1, config.clone()).await, Party::start(&*lab, 2, config).await);
            sender.register(&receiver);
            let count = 40_u32;
            for n in 0..count {
                let len = if n % 2 == 0 { 400_000 } else { 100 };
                let outcome = sender.send(
                    receiver.id(),
                    MessageType::Message,
                    n.to_be_bytes().to_vec(),
                    slot_pattern(n.into(), len),
                );
                drop(outcome);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            lab.world.stop_faults();
            let mut came = Vec::new();
            let quiet = Duration::from_secs(90);
            while let Ok(Some(message)) = tokio::time::timeout(quiet, receiver.inbound.message.recv()).await {
                let n = u32::from_be_bytes(message.header[..].try_into().expect("four bytes"));
                let len = if n % 2 == 0 { 400_000 } else { 100 };
                assert!(message.payload == slot_pattern(n.into(), len), "foreign bytes in {n}");
                came.push(n);
            }
            let back: Vec<u32> = sender
                .errors
                .all()
                .iter()
                .map(|(header, payload, _)| {
                    let n = u32::from_be_bytes(header[..].try_into().expect("four bytes"));
                    assert!(*payload == slot_pattern(n.into(), payload.len()), "it comes back with its own bytes");
                    n
                })
                .collect();
            let mut each_once = back.clone();
            each_once.sort_unstable();
            each_once.dedup();
            assert_eq!(each_once.len(), back.len(), "each comes back once");
            assert!(came.is_sorted_by(|one, next| one < next), "in order, none twice: {came:?}");
            for n in 0..count {
                assert!(came.contains(&n) || back.contains(&n), "message {n} is neither here nor there");
            }
            sender.assert_empty(quiet).await;
            receiver.assert_empty(quiet).await;
            sender.stop().await;
            receiver.stop().await;
        });
    }
}
