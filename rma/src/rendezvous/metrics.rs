//! Publishes counters and gauges through the `metrics` facade, as snapshots.

use metrics::{Unit, counter, describe_counter, describe_gauge, gauge};
use verbs_transport::fabric::Fabric;

use super::{Rendezvous, inner::lock};
use crate::stats::{FATES, PathStats, RendezvousStats};

type Labels = &'static [(&'static str, &'static str)];
type Count = (&'static str, Labels, fn(&RendezvousStats) -> u64);
type Now = (&'static str, Labels, fn(&RendezvousStats) -> u64);

const COUNTS: &[Count] = &[
    ("rendezvous_staged_total", &[("body", "memory")], |s| s.staged_memory),
    ("rendezvous_staged_total", &[("body", "pinned")], |s| s.staged_pinned),
    ("rendezvous_staged_bytes_total", &[], |s| s.staged_bytes),
    ("rendezvous_pool_full_total", &[], |s| s.pool_full),
    ("rendezvous_arenas_total", &[("event", "failed")], |s| s.arenas_failed),
    ("rendezvous_arenas_total", &[("event", "released")], |s| s.arenas_released),
    ("rendezvous_requests_total", &[("result", "served")], |s| s.requests.saturating_sub(s.requests_refused)),
    ("rendezvous_requests_total", &[("result", "refused")], |s| s.requests_refused),
    ("rendezvous_requests_total", &[("result", "malformed")], |s| s.requests_malformed),
    ("rendezvous_requests_total", &[("result", "dropped")], |s| s.requests_dropped),
    ("rendezvous_chunks_total", &[], |s| s.chunks_served),
    ("rendezvous_chunk_bytes_total", &[], |s| s.chunk_bytes_served),
    ("rendezvous_leases_total", &[("event", "renewed")], |s| s.leases_renewed),
    ("rendezvous_leases_total", &[("event", "ended")], |s| s.leases_ended),
    ("rendezvous_leases_total", &[("event", "reaped")], |s| s.leases_reaped),
    ("rendezvous_leases_total", &[("event", "peer_gone")], |s| s.leases_of_gone_peers),
    ("rendezvous_leases_total", &[("event", "mismatched")], |s| s.leases_mismatched),
    ("rendezvous_leases_total", &[("event", "lost")], |s| s.leases_lost),
    ("rendezvous_rights_total", &[("event", "made")], |s| s.rights_made),
    ("rendezvous_rights_total", &[("event", "revoked")], |s| s.rights_revoked),
    ("rendezvous_rights_total", &[("event", "not_made")], |s| s.rights_failed),
    ("rendezvous_rights_total", &[("event", "not_revoked")], |s| s.revocations_failed),
    ("rendezvous_asks_total", &[("result", "asked")], |s| s.asked),
    ("rendezvous_asks_total", &[("result", "expired")], |s| s.asks_expired),
    ("rendezvous_answers_total", &[("fault", "late")], |s| s.answers_late),
    ("rendezvous_answers_total", &[("fault", "bad")], |s| s.answers_bad),
    ("rendezvous_pulled_bytes_total", &[], |s| s.pulled_bytes),
    ("rendezvous_pulls_failed_total", &[], |s| s.pulls_failed),
    ("rendezvous_reads_failed_total", &[], |s| s.reads_failed),
    ("rendezvous_messages_total", &[("event", "staged")], |s| s.messages_staged),
    ("rendezvous_messages_total", &[("event", "failed")], |s| s.messages_failed),
    ("rendezvous_messages_total", &[("event", "pulled")], |s| s.messages_pulled),
    ("rendezvous_messages_total", &[("event", "lost")], |s| s.messages_lost),
];

const NOW: &[Now] = &[
    ("rendezvous_slots", &[], |s| s.book.slots as u64),
    ("rendezvous_slot_bytes", &[], |s| s.book.slot_bytes),
    ("rendezvous_leases", &[], |s| s.book.leases as u64),
    ("rendezvous_rights", &[], |s| s.book.rights as u64),
    ("rendezvous_quarantined_bytes", &[], |s| s.book.quarantined_bytes),
    ("rendezvous_arena_bytes", &[("pool", "source"), ("state", "all")], |s| s.source_arenas.bytes),
    ("rendezvous_arena_bytes", &[("pool", "source"), ("state", "used")], |s| s.source_arenas.used),
    ("rendezvous_arena_bytes", &[("pool", "destination"), ("state", "all")], |s| s.destination_arenas.bytes),
    ("rendezvous_arena_bytes", &[("pool", "destination"), ("state", "used")], |s| s.destination_arenas.used),
    ("rendezvous_asks_waiting", &[], |s| s.asks_waiting as u64),
];

/// Name, whether it is a counter, unit and meaning of every series; `docs/rendezvous.md` has the same names.
const SERIES: &[(&str, bool, Unit, &str)] = &[
    ("rendezvous_staged_total", true, Unit::Count, "Payloads staged, in memory or in an arena"),
    ("rendezvous_staged_bytes_total", true, Unit::Bytes, "Bytes staged"),
    ("rendezvous_pool_full_total", true, Unit::Count, "Payloads for which the arenas had no room"),
    ("rendezvous_arenas_total", true, Unit::Count, "Arenas of sources that could not be made, or were given back"),
    ("rendezvous_slots_ended_total", true, Unit::Count, "Slots ended, by cause"),
    ("rendezvous_requests_total", true, Unit::Count, "Requests of peers, by result"),
    ("rendezvous_chunks_total", true, Unit::Count, "Chunks handed out"),
    ("rendezvous_chunk_bytes_total", true, Unit::Bytes, "Bytes of chunks handed out"),
    ("rendezvous_leases_total", true, Unit::Count, "What happened to leases"),
    ("rendezvous_rights_total", true, Unit::Count, "Registrations made for leases, and taken back"),
    ("rendezvous_path_total", true, Unit::Count, "Payloads by the way they went, and why not by READ"),
    ("rendezvous_asks_total", true, Unit::Count, "Questions to owners"),
    ("rendezvous_answers_total", true, Unit::Count, "Answers that came late or could not be used"),
    ("rendezvous_pulled_bytes_total", true, Unit::Bytes, "Bytes pulled"),
    ("rendezvous_pulls_failed_total", true, Unit::Count, "Pulls that failed"),
    ("rendezvous_reads_failed_total", true, Unit::Count, "READs that failed, after which chunks were tried"),
    ("rendezvous_messages_total", true, Unit::Count, "What happened to messages above the eager ceiling"),
    ("rendezvous_slots", false, Unit::Count, "Slots that a handle names"),
    ("rendezvous_slot_bytes", false, Unit::Bytes, "Bytes of these slots"),
    ("rendezvous_leases", false, Unit::Count, "Leases that live"),
    ("rendezvous_rights", false, Unit::Count, "Registrations for leases"),
    ("rendezvous_quarantined_bytes", false, Unit::Bytes, "Bytes that wait for a right to be taken back"),
    ("rendezvous_arena_bytes", false, Unit::Bytes, "Bytes of arenas, and of slices in use"),
    ("rendezvous_asks_waiting", false, Unit::Count, "Questions without an answer yet"),
];

/// Tells the recorder unit and meaning of each series of a rendezvous. Done by the first publication, too.
pub fn describe_metrics() {
    for (name, is_counter, unit, text) in SERIES {
        if *is_counter {
            describe_counter!(*name, *unit, *text);
        } else {
            describe_gauge!(*name, *unit, *text);
        }
    }
}

impl<F: Fabric> Rendezvous<F> {
    /// Publishes counters and gauges through the `metrics` facade, labelled with the worker's name.
    pub fn publish_metrics(&self) {
        if !std::mem::replace(&mut *lock(&self.inner.published), true) {
            describe_metrics();
        }
        let stats = self.stats();
        let me = self.inner.worker.instance().to_string();
        for (name, labels, read) in COUNTS {
            counter!(*name, with_worker(labels, &me)).absolute(read(&stats));
        }
        for (name, labels, read) in NOW {
            #[expect(clippy::cast_precision_loss, reason = "gauges are f64")]
            gauge!(*name, with_worker(labels, &me)).set(read(&stats) as f64);
        }
        for (fate, count) in FATES.iter().zip(stats.slots_ended) {
            counter!("rendezvous_slots_ended_total", "worker" => me.clone(), "cause" => fate.name()).absolute(count);
        }
        for (side, paths) in [("owner", &stats.granted), ("consumer", &stats.pulled)] {
            let series = |path: &'static str, reason: &'static str, count| {
                let labels = [("side", side), ("path", path), ("reason", reason)];
                counter!("rendezvous_path_total", with_worker(&labels, &me)).absolute(count);
            };
            series("rdma", "none", paths.rdma);
            for reason in PathStats::REASONS {
                series("chunked", reason.name(), paths.by(reason));
            }
        }
    }
}

fn with_worker(labels: &[(&'static str, &'static str)], me: &str) -> Vec<metrics::Label> {
    let fixed = labels.iter().map(|(key, value)| metrics::Label::new(*key, *value));
    fixed.chain([metrics::Label::new("worker", me.to_owned())]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is published is described, and what is described is in the book.
    #[test]
    fn every_series_is_described_and_documented() {
        let book = include_str!("../../../docs/rendezvous.md");
        for (name, ..) in SERIES {
            assert!(book.contains(&format!("`{name}`")), "docs/rendezvous.md lacks {name}");
        }
        let published = COUNTS.iter().map(|(name, ..)| *name).chain(NOW.iter().map(|(name, ..)| *name));
        for name in published.chain(["rendezvous_slots_ended_total", "rendezvous_path_total"]) {
            assert!(SERIES.iter().any(|(known, ..)| *known == name), "{name} is not described");
        }
    }
}
