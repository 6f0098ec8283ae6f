//! Regions under fire: RT-17, RT-18, B24.

use std::sync::Arc;

use verbs_rma::{BulkConfig, RegionAccessError, TransferError, bulk::UnmapError, proto::region::UseError};
use verbs_transport::fabric::bulk::{Access, BulkFabric, OwnedBytes};

use crate::{
    bulk::{BulkNode, asked_rounds, bulk_pair, bulk_pair_with, numbered, until, within},
    lab::Lab,
};

async fn stop<F: BulkFabric>(a: BulkNode<F>, b: BulkNode<F>) {
    a.stop().await;
    b.stop().await;
}

/// RT-17: 0, length, length + 1, overflow; and the bytes beside a region in its own page cannot be reached.
pub async fn rt_17_bounds_at_every_border<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair(&*lab).await;
    let memory = OwnedBytes::new(vec![0x11; 3000]);
    let inner = within(b.bulk.map(memory.clone(), 1000..2000, Access::SOURCE)).await.expect("it is mapped");
    let outer = within(b.bulk.map(memory.clone(), 0..3000, Access::LOCAL_READ)).await.expect("twice is fine");
    b.bulk.write_region(inner.id, 0, &[0x22; 1000]).expect("all of it");
    assert_eq!((inner.addr - outer.addr, inner.len), (1000, 1000));
    let into = a.map_filled(3000, 0, Access::DESTINATION).await;
    for (offset, bytes, good) in
        [(0, 1000, true), (1000, 0, true), (999, 1, true), (0, 1001, false), (1000, 1, false), (usize::MAX, 2, false)]
    {
        let read = b.bulk.read_region(inner.id, offset, &mut vec![0; bytes]);
        assert_eq!(read.is_ok(), good, "{bytes} at {offset}: {read:?}");
        assert!(good || matches!(read, Err(RegionAccessError::OutOfBounds(_))));
    }
    let whole = inner.whole().expect("remote");
    within(a.bulk.get(b.id(), whole, into.id, 0)).await.expect("the whole");
    assert_eq!(a.bytes(into.id, 1001), [vec![0x22; 1000], vec![0]].concat());
    for (addr, len) in [(whole.addr - 1, 1), (whole.addr + 1000, 1), (whole.addr, 1001)] {
        let beside = verbs_rma::RemoteRange { addr, len, ..whole };
        let end = within(a.bulk.get(b.id(), beside, into.id, 1000)).await;
        assert!(matches!(end, Err(TransferError::Failed { .. })), "{len} at {addr:#x}: {end:?}");
        assert_eq!(a.bytes(into.id, 3000)[1000..], [0; 2000], "nothing of the rest of the page");
    }
    b.unmap(inner).await;
    b.unmap(outer).await;
    assert_eq!(OwnedBytes::into_vec(memory).expect("it is given back")[999..1001], [0x11, 0x22]);
    stop(a, b).await;
}

/// RT-17, R-16: dropped at once, or later, polled or not.
pub async fn rt_17_a_cancelled_map_leaves_nothing<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair(&*lab).await;
    let rounds = asked_rounds().unwrap_or_else(|| lab.rounds(10_000, 300));
    for round in 0..rounds {
        let memory = OwnedBytes::new(vec![0; 8192]);
        let map = a.bulk.map_all(memory.clone(), Access::SOURCE);
        match round % 3 {
            0 => drop(map),
            1 => {
                tokio::task::yield_now().await;
                drop(map);
            }
            _ => {
                let mapping = tokio::spawn(map);
                tokio::task::yield_now().await;
                mapping.abort();
                // Mapped after all: then it is the caller's.
                if let Ok(Ok(region)) = mapping.await {
                    a.unmap(region).await;
                }
            }
        }
        if round % 100 == 0 {
            until("the memory is given back", || Arc::strong_count(&memory) == 1).await;
        }
    }
    until("no region is left", || a.bulk.stats().regions == 0).await;
    assert!(a.bulk.stats().rolled_back > 0);
    stop(a, b).await;
}

/// RT-17, R-17, R-18.
pub async fn rt_17_unmap_parks_under_gets_and_joins<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let config = BulkConfig { chunk_bytes: 64 << 10, rd_atomic_max: 2, ..BulkConfig::default() };
    let (a, b) = bulk_pair_with(&*lab, &config).await;
    let len = 4 << 20;
    let source = b.map(numbered(len), Access::SOURCE).await;
    let from = source.whole().expect("remote");
    let memory = OwnedBytes::new(vec![0; len]);
    let into = within(a.bulk.map_all(memory.clone(), Access::DESTINATION)).await.expect("it is mapped");
    let get = a.bulk.get(b.id(), from, into.id, 0);
    let watch = get.handle();
    let get = tokio::spawn(get);
    until("it is under way", || watch.moved() > 0).await;
    let first = a.bulk.unmap(into.id);
    drop(a.bulk.unmap(into.id)); // undoes nothing
    let second = a.bulk.unmap(into.id);
    assert_eq!(a.bulk.stats().regions_parked, 1);
    let refused = within(a.bulk.get(b.id(), from, into.id, 0)).await;
    assert!(matches!(refused, Err(TransferError::Region(UseError::Unmapping { .. }))), "{refused:?}");
    let (done, first, second) = within(async { tokio::join!(get, first, second) }).await;
    done.expect("no panic").expect("the GET was whole");
    assert!(first.is_ok() && second.is_ok());
    assert!(OwnedBytes::into_vec(memory).expect("it is given back") == numbered(len));
    let third = within(a.bulk.unmap(into.id)).await;
    assert!(matches!(third, Err(UnmapError::Unknown { .. })), "{third:?}");
    stop(a, b).await;
}

/// RT-18, R-11: the future is only a receiver. The bytes arrive, the region stays in use until then, nothing is left.
pub async fn rt_18_dropped_gets_leave_nothing<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair(&*lab).await;
    let len = 8 << 10;
    let source = b.map(numbered(len), Access::SOURCE).await;
    let from = source.whole().expect("remote");
    let rounds = asked_rounds().unwrap_or_else(|| lab.rounds(10_000, 500));
    let mut memories = Vec::new();
    for round in 0..rounds {
        let memory = OwnedBytes::new(vec![0; len]);
        let into = within(a.bulk.map_all(memory.clone(), Access::DESTINATION)).await.expect("it is mapped");
        let mut get = Box::pin(a.bulk.get(b.id(), from, into.id, 0));
        // Unpolled, polled once, or polled for a while.
        let polled = match round % 4 {
            0 => false,
            1 | 2 => tokio::time::timeout(std::time::Duration::ZERO, &mut get).await.is_ok(),
            _ => tokio::time::timeout(std::time::Duration::from_micros(100), &mut get).await.is_ok(),
        };
        drop((get, polled));
        let begun = round % 4 != 0;
        memories.push((begun, memory, a.bulk.unmap(into.id)));
        if memories.len() == 50 {
            for (begun, memory, unmap) in memories.drain(..) {
                within(unmap).await.expect("it is unmapped when the device is done");
                let bytes = OwnedBytes::into_vec(memory).expect("it is given back");
                let expected = if begun { numbered(len) } else { vec![0; len] };
                assert!(bytes == expected, "whole when begun, untouched when not");
            }
        }
    }
    drop(memories);
    until("nothing is left", || a.bulk.stats().regions == 0 && a.bulk.stats().in_flight == 0).await;
    let stats = a.bulk.stats();
    assert_eq!((stats.done, stats.epochs_begun), (u64::from(rounds) * 3 / 4, 1), "{stats:?}");
    stop(a, b).await;
}

/// B24: a region is unmapped by another thread while READs go into it.
pub async fn b24_unmap_from_another_thread_during_gets<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let config = BulkConfig { chunk_bytes: 4096, ..BulkConfig::default() };
    let (a, b) = bulk_pair_with(&*lab, &config).await;
    let len = 32 << 10;
    let source = b.map(numbered(len), Access::SOURCE).await;
    let from = source.whole().expect("remote");
    for round in 0..asked_rounds().unwrap_or_else(|| lab.rounds(10_000, 200)) {
        let memory = OwnedBytes::new(vec![0; len]);
        let into = within(a.bulk.map_all(memory.clone(), Access::DESTINATION)).await.expect("it is mapped");
        let get = tokio::spawn(a.bulk.get(b.id(), from, into.id, 0));
        if round % 2 == 0 {
            tokio::task::yield_now().await;
        }
        let bulk = a.bulk.clone();
        let unmapping = std::thread::spawn(move || bulk.unmap(into.id)).join().expect("no panic");
        within(unmapping).await.expect("it waits for the READs");
        let back = OwnedBytes::into_vec(memory).expect("nobody writes to it any more");
        match within(get).await.expect("no panic") {
            Ok(()) => assert!(back == numbered(len)),
            Err(TransferError::Region(UseError::Unmapping { .. } | UseError::Unknown { .. })) => {
                assert!(back == vec![0; len], "refused, and nothing was posted");
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(a.bulk.stats().epochs_begun, 1);
    stop(a, b).await;
}

/// the owner may always take its memory back. The reader gets an error and no other bytes.
pub async fn an_owner_that_unmaps_during_a_get_is_an_error_at_the_reader<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair(&*lab).await;
    let len = 8 << 20;
    let source = b.map_filled(len, 0x11, Access::SOURCE).await;
    let into = a.map_filled(len, 0, Access::DESTINATION).await;
    let get = a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0);
    let watch = get.handle();
    let get = tokio::spawn(get);
    until("it is under way", || watch.moved() > 0).await;
    b.unmap(source).await;
    let foreign = b.map_filled(len, 0x99, Access::SOURCE).await;
    let end = within(get).await.expect("no panic");
    // Whichever comes first: the retries run out, or the owner's half, which fell, has closed its socket.
    assert!(matches!(end, Err(TransferError::Failed { .. } | TransferError::ConnectionReset { .. })), "{end:?}");
    assert!(!a.bytes(into.id, len).contains(&0x99), "never a foreign byte");
    within(a.bulk.get(b.id(), foreign.whole().expect("remote"), into.id, 0)).await.expect("with a new right");
    stop(a, b).await;
}
