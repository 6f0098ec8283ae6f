//! Bulk memory on simulated hosts, in fake time.

use std::{future::Future, sync::Arc};

use verbs_rma::BulkConfig;
use verbs_tests::{
    bulk::{bulk_pair_with, within},
    lab::{SimLab, on_sim_lab},
};
use verbs_transport::{
    fabric::bulk::{Access, OwnedBytes},
    sim::Faults,
};

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<SimLab>) -> R) {
    on_sim_lab(SimLab::new_bulk(1, Faults::none()), scenario);
}

verbs_tests::bulk_suite!(run);

/// B20 for real: 32 bits are not enough for any of these.
#[test]
#[ignore = "takes 4 GiB of memory and some seconds: run it with --ignored"]
fn b20_two_and_four_gibibytes() {
    const GIB: usize = 1 << 30;
    for len in [2 * GIB, 4 * GIB + 1] {
        for put in [false, true] {
            // Without a rate, or the fake hour takes a real one.
            on_sim_lab(SimLab::new(1, Faults::none()), |lab| async move { one_large_transfer(&lab, len, put).await });
        }
    }
}

/// What is read is zeros but for a mark every 64 MiB and at the end: its pages need no memory.
async fn one_large_transfer(lab: &SimLab, len: usize, put: bool) {
    let mut marks: Vec<usize> = (0..len).step_by(64 << 20).chain([len - 1]).collect();
    marks.dedup();
    let mut from = vec![0; len];
    for (n, at) in marks.iter().enumerate() {
        from[*at] = u8::try_from(n % 255 + 1).expect("below 256");
    }
    let config = BulkConfig { chunk_bytes: 8 << 20, ..BulkConfig::default() };
    let (a, b) = bulk_pair_with(lab, &config).await;
    let (reader, owner) = if put { (&b, &a) } else { (&a, &b) };
    let memory = OwnedBytes::new(vec![0; len]);
    let into = if put { Access::PUT_TARGET } else { Access::DESTINATION };
    let into = within(reader.bulk.map_all(memory.clone(), into)).await.expect("it is mapped");
    let from = owner.map(from, if put { Access::LOCAL_READ } else { Access::SOURCE }).await;
    if put {
        let there = into.whole().expect("remote");
        within(a.bulk.put_and_notify(b.id(), from.id, 0, there, 7)).await.expect("a PUT");
    } else {
        within(a.bulk.get(b.id(), from.whole().expect("remote"), into.id, 0)).await.expect("a GET");
    }
    let stats = a.bulk.stats();
    assert_eq!((stats.bytes_read + stats.bytes_written, stats.chunks), (len as u64, len.div_ceil(8 << 20) as u64));
    reader.unmap(into).await;
    owner.unmap(from).await;
    let got = OwnedBytes::into_vec(memory).expect("it is given back");
    let zeros = vec![0; 64 << 20];
    for (n, at) in marks.iter().enumerate() {
        assert_eq!(usize::from(got[*at]), n % 255 + 1, "at {at} of {len}");
        let end = marks.get(n + 1).copied().unwrap_or(len);
        assert!(got[at + 1..end.max(at + 1)] == zeros[..end.max(at + 1) - at - 1], "behind {at} of {len}");
    }
    a.stop().await;
    b.stop().await;
}
