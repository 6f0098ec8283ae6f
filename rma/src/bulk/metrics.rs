//! Publishes counters and gauges of bulk memory through the `metrics` facade, as snapshots. What each means is in
//! `docs/rma.md`.

use metrics::{Unit, counter, describe_counter, describe_gauge, gauge};
use verbs_transport::fabric::bulk::BulkFabric;

use super::{Bulk, stats::BulkStats};

type Read = fn(&BulkStats) -> u64;
type Labels = &'static [(&'static str, &'static str)];

/// What only grows: name, labels, unit, meaning, value.
const COUNTS: &[(&str, Labels, Unit, &str, Read)] = &[
    ("bulk_transfers_total", &[("kind", "get")], Unit::Count, "Transfers begun by kind", |s| s.gets),
    ("bulk_transfers_total", &[("kind", "put")], Unit::Count, "Transfers begun by kind", |s| s.puts),
    ("bulk_transfers_total", &[("kind", "notify")], Unit::Count, "Transfers begun by kind", |s| s.notifies),
    ("bulk_ended_total", &[("end", "done")], Unit::Count, "Transfers ended by outcome", |s| s.done),
    ("bulk_ended_total", &[("end", "failed")], Unit::Count, "Transfers ended by outcome", |s| s.failed),
    ("bulk_ended_total", &[("end", "reset")], Unit::Count, "Transfers ended by outcome", |s| s.reset),
    ("bulk_ended_total", &[("end", "cancelled")], Unit::Count, "Transfers ended by outcome", |s| s.cancelled),
    ("bulk_ended_total", &[("end", "expired")], Unit::Count, "Transfers ended by outcome", |s| s.expired),
    ("bulk_ended_total", &[("end", "refused")], Unit::Count, "Transfers ended by outcome", |s| s.refused),
    ("bulk_ended_total", &[("end", "teardown")], Unit::Count, "Transfers ended by outcome", |s| {
        s.abandoned_at_teardown
    }),
    ("bulk_bytes_total", &[("direction", "read")], Unit::Bytes, "Bytes moved by direction", |s| s.bytes_read),
    ("bulk_bytes_total", &[("direction", "written")], Unit::Bytes, "Bytes moved by direction", |s| s.bytes_written),
    ("bulk_chunks_total", &[], Unit::Count, "READs and WRITEs posted", |s| s.chunks),
    ("bulk_notifications_total", &[], Unit::Count, "Notifications of peers received", |s| s.notified),
    ("bulk_notifications_dropped_total", &[], Unit::Count, "Notifications nobody took", |s| s.notifications_dropped),
    ("bulk_dials_total", &[], Unit::Count, "Dials of the bulk plane", |s| s.dials),
    ("bulk_dial_failures_total", &[], Unit::Count, "Dials of the bulk plane that failed", |s| s.dial_failures),
    ("bulk_epochs_begun_total", &[], Unit::Count, "Bulk QPs made", |s| s.epochs_begun),
    ("bulk_late_completions_total", &[], Unit::Count, "Completions of ended connections", |s| s.late_completions),
    ("bulk_flushes_abandoned_total", &[], Unit::Count, "Flushes that did not end in time", |s| s.flushes_abandoned),
    ("bulk_maps_rolled_back_total", &[], Unit::Count, "Maps that nobody waited for", |s| s.rolled_back),
    ("bulk_windows_total", &[("event", "bound")], Unit::Count, "Memory windows by event", |s| s.windows_bound),
    ("bulk_windows_total", &[("event", "invalidated")], Unit::Count, "Memory windows by event", |s| {
        s.windows_invalidated
    }),
    ("bulk_windows_total", &[("event", "freed")], Unit::Count, "Memory windows by event", |s| s.windows_freed),
    ("bulk_windows_total", &[("event", "failed")], Unit::Count, "Memory windows by event", |s| s.windows_failed),
    ("bulk_regions_leaked_total", &[], Unit::Count, "Regions under QPs that would not go", |s| s.leaked),
];

/// What is so now.
const NOW: &[(&str, Unit, &str, Read)] = &[
    ("bulk_in_flight", Unit::Count, "Transfers that have not ended", |s| s.in_flight),
    ("bulk_qps", Unit::Count, "Bulk QPs that exist", |s| s.qps),
    ("bulk_regions", Unit::Count, "Regions that exist", |s| s.regions as u64),
    ("bulk_windows", Unit::Count, "Memory windows that give a peer a right", |s| s.windows),
    ("bulk_regions_parked", Unit::Count, "Regions whose unmap waits for transfers", |s| s.regions_parked as u64),
];

/// Ended connections, by cause: the causes are known as they occur.
const ENDED: (&str, &str) = ("bulk_epochs_ended_total", "Bulk connections ended, and attempts failed, by cause");

impl<F: BulkFabric> Bulk<F> {
    /// Publishes what [`Bulk::stats`] tells through the `metrics` facade, with this worker's name as the label `worker`.
    pub fn publish_metrics(&self) {
        let stats = self.stats();
        let me = self.shared().me.instance.to_string();
        for (name, labels, unit, text, read) in COUNTS {
            describe_counter!(*name, *unit, *text);
            let mut all = vec![("worker", me.clone())];
            all.extend(labels.iter().map(|(key, value)| (*key, (*value).to_owned())));
            counter!(*name, &all).absolute(read(&stats));
        }
        describe_counter!(ENDED.0, Unit::Count, ENDED.1);
        for (cause, count) in &stats.ended {
            counter!(ENDED.0, "worker" => me.clone(), "cause" => *cause).absolute(*count);
        }
        for (name, unit, text, read) in NOW {
            describe_gauge!(*name, *unit, *text);
            #[expect(clippy::cast_precision_loss, reason = "a gauge is a float, and these are small")]
            gauge!(*name, "worker" => me.clone()).set(read(&stats) as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_series_is_in_the_book_and_none_beside_them() {
        let doc = include_str!("../../../docs/rma.md");
        let first_cell = |line: &str| Some(format!("bulk_{}", line.strip_prefix("| `bulk_")?.split_once('`')?.0));
        let documented: BTreeSet<String> = doc.lines().filter_map(first_cell).collect();
        let counts = COUNTS.iter().map(|count| count.0).chain([ENDED.0]);
        let published: BTreeSet<String> = counts.chain(NOW.iter().map(|now| now.0)).map(str::to_owned).collect();
        assert_eq!(documented, published);
    }
}
