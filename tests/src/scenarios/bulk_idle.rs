//! connections that neither side uses are closed, and nobody loses anything by that.

use std::{sync::Arc, time::Duration};

use verbs_rma::BulkConfig;
use verbs_transport::fabric::bulk::{Access, BulkFabric};

use crate::{
    bulk::{BulkNode, bulk_pair_with, numbered, until, within},
    lab::Lab,
};

const IDLE: Duration = Duration::from_millis(500);

fn config() -> BulkConfig {
    BulkConfig { idle_close: IDLE, ..BulkConfig::default() }
}

/// Unused it is closed at both sides; the next transfer, of either side, makes a new one.
pub async fn an_idle_connection_is_closed_and_made_again<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair_with(&*lab, &config()).await;
    let len = 64 << 10;
    let ours = a.map(numbered(len), Access::SOURCE.and(Access::DESTINATION)).await;
    let theirs = b.map(numbered(len), Access::SOURCE.and(Access::DESTINATION)).await;
    for round in 1..=3 {
        let (reader, owner, into, from) = if round % 2 == 0 { (&a, &b, ours, theirs) } else { (&b, &a, theirs, ours) };
        within(reader.bulk.get(owner.id(), from.whole().expect("remote"), into.id, 0)).await.expect("a GET");
        until("both halves are gone", || a.bulk.stats().qps == 0 && b.bulk.stats().qps == 0).await;
        assert_eq!((a.bulk.stats().epochs_begun, b.bulk.stats().epochs_begun), (round, round));
    }
    let by_idle = |node: &BulkNode<L::F>| node.bulk.stats().ended.get("idle").copied().unwrap_or(0);
    assert!(by_idle(&a) + by_idle(&b) >= 3, "{:?} {:?}", a.bulk.stats().ended, b.bulk.stats().ended);
    assert_eq!((a.bulk.stats().reset, b.bulk.stats().reset), (0, 0));
    a.stop().await;
    b.stop().await;
}

/// A responder sees nothing of the READs that it answers: its peer tells it that they go on.
pub async fn a_connection_that_one_side_uses_stays<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair_with(&*lab, &config()).await;
    let len = 256 << 10;
    let source = b.map(numbered(len), Access::SOURCE).await;
    let into = a.map_filled(len, 0, Access::DESTINATION).await;
    let began = tokio::time::Instant::now();
    while began.elapsed() < IDLE * 6 {
        within(a.bulk.get(b.id(), source.whole().expect("remote"), into.id, 0)).await.expect("a GET");
        tokio::time::sleep(IDLE / 10).await;
    }
    assert_eq!((a.bulk.stats().epochs_begun, a.bulk.stats().epochs_ended), (1, 0));
    // One that could not be dialed again stays, too.
    until("it is closed", || a.bulk.stats().qps == 0).await;
    let c = BulkNode::start_bulk(&*lab, 3, config()).await;
    c.register(&b);
    let there = c.map_filled(len, 0, Access::DESTINATION).await;
    within(c.bulk.get(b.id(), source.whole().expect("remote"), there.id, 0)).await.expect("a GET");
    tokio::time::sleep(IDLE * 6).await;
    assert!(c.bulk.is_connected(b.id()), "b knows no address of c: {:?}", c.bulk.stats().ended);
    c.stop().await;
    a.stop().await;
    b.stop().await;
}

/// Transfers that begin as the connection is being closed wait for the next one: none fails.
pub async fn transfers_meet_the_close_and_none_fails<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (a, b) = bulk_pair_with(&*lab, &BulkConfig { idle_close: Duration::from_millis(100), ..config() }).await;
    let len = 4 << 10;
    let ours = a.map(numbered(len), Access::SOURCE.and(Access::DESTINATION)).await;
    let theirs = b.map(numbered(len), Access::SOURCE.and(Access::DESTINATION)).await;
    for round in 0..u64::from(lab.rounds(2_000, 60)) {
        // Around the moment, by either side or both.
        tokio::time::sleep(Duration::from_micros(98_000 + round * 317 % 5_000)).await;
        let get = |reader: &BulkNode<L::F>, owner: &BulkNode<L::F>, into: u64| {
            let (into, from) = if into == 0 { (ours, theirs) } else { (theirs, ours) };
            within(reader.bulk.get(owner.id(), from.whole().expect("remote"), into.id, 0))
        };
        match round % 3 {
            0 => get(&a, &b, 0).await.expect("a GET"),
            1 => get(&b, &a, 1).await.expect("a GET"),
            _ => {
                let (one, two) = tokio::join!(get(&a, &b, 0), get(&b, &a, 1));
                one.expect("a GET");
                two.expect("a GET");
            }
        }
    }
    let (a_stats, b_stats) = (a.bulk.stats(), b.bulk.stats());
    assert_eq!((a_stats.reset + a_stats.failed, b_stats.reset + b_stats.failed), (0, 0));
    assert!(a_stats.epochs_begun > 1, "some met the close: {a_stats:?}");
    a.stop().await;
    b.stop().await;
}
