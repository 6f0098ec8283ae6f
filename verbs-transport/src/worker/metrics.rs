//! Publishes counters and gauges through the `metrics` facade.
//!
//! As snapshots: the path of a message counts into `stats`, and nothing of the facade is called there. Each series, its
//! meaning and what to alert on: `docs/observability.md`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use metrics::{Label, Unit, counter, describe_counter, describe_gauge, gauge};
use tokio::time::sleep;
use verbs_bootstrap::{InstanceId, ListenerStats, Status};

use super::{
    Owner, Worker,
    error::EpochEnd,
    shared::lock,
    stats::{FlowStats, Stats},
};
use crate::{fabric::Fabric, proto::frame::MessageType};

/// What has been published and must be taken back when it is no longer so.
#[derive(Debug, Default)]
pub(crate) struct Published {
    described: bool,
    /// The labels of each connected peer's path.
    paths: BTreeMap<InstanceId, Vec<Label>>,
}

/// One counter without labels of its own, or with fixed ones.
type Count = (&'static str, &'static [(&'static str, &'static str)], fn(&Stats) -> u64);
/// One gauge.
type Now = (&'static str, fn(&Stats) -> u64);

const COUNTS: &[Count] = &[
    ("verbs_rejections_total", &[("reason", "not_started")], |s| s.rejected_not_started),
    ("verbs_rejections_total", &[("reason", "not_registered")], |s| s.rejected_not_registered),
    ("verbs_rejections_total", &[("reason", "too_large")], |s| s.rejected_too_large),
    ("verbs_rejections_total", &[("reason", "shutting_down")], |s| s.rejected_shutting_down),
    ("verbs_rejections_total", &[("reason", "send_error")], |s| s.failed),
    ("verbs_rejections_total", &[("reason", "admission_failed")], |s| s.admissions_failed),
    ("verbs_rejections_total", &[("reason", "drain_rejected")], |s| s.drain_rejected),
    ("verbs_rejections_total", &[("reason", "decode_error")], |s| s.malformed.saturating_sub(s.truncated)),
    ("verbs_rejections_total", &[("reason", "truncated_frame")], |s| s.truncated),
    ("verbs_rejections_total", &[("reason", "route_failed")], |s| s.undelivered),
    ("verbs_sends_queued_total", &[], |s| s.pended),
    ("verbs_admissions_expired_total", &[], |s| s.admissions_expired),
    ("verbs_sends_total", &[("class", "inline")], |s| s.links.sends_inline),
    ("verbs_sends_total", &[("class", "copied")], |s| s.links.sends_copied),
    ("verbs_sends_total", &[("class", "packed")], |s| s.links.sends_packed),
    ("verbs_packed_frames_total", &[], |s| s.links.frames_packed),
    ("verbs_fragments_total", &[], |s| s.links.fragments),
    ("verbs_pure_grants_total", &[("direction", "sent")], |s| s.links.pure_grants),
    ("verbs_pure_grants_total", &[("direction", "received")], |s| s.links.pure_grants_received),
    ("verbs_credits_received_total", &[], |s| s.links.credits_received),
    ("verbs_credit_stalls_total", &[], |s| s.links.credit_stalls),
    ("verbs_credit_stall_microseconds_total", &[], |s| {
        u64::try_from(s.links.credit_stalled.as_micros()).unwrap_or(u64::MAX)
    }),
    ("verbs_zero_copy_frames_total", &[("result", "lent")], |s| s.frames_lent),
    ("verbs_zero_copy_frames_total", &[("result", "copied")], |s| s.lend_refused),
    ("verbs_inbound_withheld_total", &[], |s| s.withheld),
    ("verbs_undelivered_bytes_total", &[], |s| s.undelivered_bytes),
    ("verbs_service_frames_total", &[("direction", "sent")], |s| s.service_sent),
    ("verbs_service_frames_total", &[("direction", "received")], |s| s.service_received),
    ("verbs_lane_dropped_total", &[], |s| s.lane_dropped),
    ("verbs_echoes_dropped_total", &[], |s| s.echoes_dropped),
    ("verbs_srq_low_total", &[], |s| s.srq_low),
    ("verbs_pings_total", &[("result", "sent")], |s| s.links.pings),
    ("verbs_pings_total", &[("result", "answered")], |s| s.links.pongs),
    ("verbs_probes_total", &[("kind", "tail")], |s| s.tail_probes),
    ("verbs_probes_total", &[("kind", "stall")], |s| s.stall_probes),
    ("verbs_epochs_begun_total", &[], |s| s.epochs_begun),
    ("verbs_connections_made_total", &[], |s| s.connections_made),
    ("verbs_dials_total", &[], |s| s.dials),
    ("verbs_dial_failures_total", &[], |s| s.dial_failures),
    ("verbs_hellos_refused_total", &[], |s| s.hellos_refused),
    ("verbs_stale_completions_total", &[], |s| s.stale_completions),
    ("verbs_receives_failed_total", &[], |s| s.receives_failed),
    ("verbs_flushes_abandoned_total", &[], |s| s.flushes_abandoned),
    ("verbs_wakes_total", &[], |s| s.wakes),
    ("verbs_async_events_total", &[], |s| s.async_events),
];

const NOW: &[Now] = &[
    ("verbs_peers", |s| s.peers as u64),
    ("verbs_connections", |s| s.connections as u64),
    ("verbs_qps", |s| s.qps as u64),
    ("verbs_receives_promised", |s| s.receives_promised.into()),
    ("verbs_send_slabs_free", |s| s.send_slabs_free as u64),
    ("verbs_receive_slabs_lent", |s| s.receive_slabs_lent.into()),
    ("verbs_inbound_backlog_bytes", |s| s.inbound_backlog_bytes as u64),
];

/// Kind, name, unit and meaning of every series; the table in `docs/observability.md` has the same names.
const SERIES: &[(Kind, &str, Unit, &str)] = &[
    (Kind::Counter, "verbs_frames_total", Unit::Count, "Frames by direction and type"),
    (Kind::Counter, "verbs_bytes_total", Unit::Bytes, "Header and payload bytes of frames by direction and type"),
    (Kind::Counter, "verbs_rejections_total", Unit::Count, "Frames that were not delivered, by reason"),
    (Kind::Counter, "verbs_sends_queued_total", Unit::Count, "Sends that had to queue in a gate"),
    (Kind::Counter, "verbs_admissions_expired_total", Unit::Count, "Sends that queued beyond admission_deadline"),
    (Kind::Counter, "verbs_sends_total", Unit::Count, "SENDs of data by class"),
    (Kind::Counter, "verbs_packed_frames_total", Unit::Count, "Frames that shared a SEND with others"),
    (Kind::Counter, "verbs_fragments_total", Unit::Count, "SENDs that were one of several of their frame"),
    (Kind::Counter, "verbs_pure_grants_total", Unit::Count, "SENDs that gave credits and nothing else"),
    (Kind::Counter, "verbs_credits_received_total", Unit::Count, "Credits that peers gave back"),
    (Kind::Counter, "verbs_credit_stalls_total", Unit::Count, "Times that a frame waited for a credit"),
    (Kind::Counter, "verbs_credit_stall_microseconds_total", Unit::Microseconds, "How long frames waited for a credit"),
    (Kind::Counter, "verbs_zero_copy_frames_total", Unit::Count, "Frames lent in their slab, or copied at the cap"),
    (Kind::Counter, "verbs_inbound_withheld_total", Unit::Count, "Times that credits were held back from senders"),
    (Kind::Counter, "verbs_undelivered_bytes_total", Unit::Bytes, "Bytes that arrived for a dropped stream"),
    (Kind::Counter, "verbs_service_frames_total", Unit::Count, "Frames of the layer above by direction"),
    (Kind::Counter, "verbs_lane_dropped_total", Unit::Count, "Frames that arrived for a layer that is not attached"),
    (Kind::Counter, "verbs_echoes_dropped_total", Unit::Count, "Drain rejections whose echo found no room"),
    (Kind::Counter, "verbs_srq_low_total", Unit::Count, "Times that the SRQ fell below its low watermark"),
    (Kind::Counter, "verbs_rnr_naks_total", Unit::Count, "RNR NAKs of the whole port by direction"),
    (Kind::Counter, "verbs_pings_total", Unit::Count, "PINGs sent and answered"),
    (Kind::Counter, "verbs_probes_total", Unit::Count, "PINGs that covered a tail or probed a stall"),
    (Kind::Counter, "verbs_epochs_begun_total", Unit::Count, "QPs made for a connection"),
    (Kind::Counter, "verbs_connections_made_total", Unit::Count, "Connections proven by a PING"),
    (Kind::Counter, "verbs_epochs_ended_total", Unit::Count, "Connections ended, and attempts failed, by cause"),
    (Kind::Counter, "verbs_dials_total", Unit::Count, "Dials made"),
    (Kind::Counter, "verbs_dial_failures_total", Unit::Count, "Dials that failed"),
    (Kind::Counter, "verbs_hellos_refused_total", Unit::Count, "Hellos of peers that were refused"),
    (Kind::Counter, "verbs_bootstrap_accepted_total", Unit::Count, "TCP connections that the listener took"),
    (Kind::Counter, "verbs_bootstrap_ended_total", Unit::Count, "What became of them"),
    (Kind::Counter, "verbs_bootstrap_refused_total", Unit::Count, "Exchanges refused by status"),
    (Kind::Counter, "verbs_bootstrap_accept_errors_total", Unit::Count, "Failed accept calls"),
    (Kind::Counter, "verbs_stale_completions_total", Unit::Count, "Completions of QPs that are gone"),
    (Kind::Counter, "verbs_receives_failed_total", Unit::Count, "Receives that failed or were flushed"),
    (Kind::Counter, "verbs_flushes_abandoned_total", Unit::Count, "Flushes that did not end within flush_deadline"),
    (Kind::Counter, "verbs_wakes_total", Unit::Count, "Wake-ups by the completion channel"),
    (Kind::Counter, "verbs_async_events_total", Unit::Count, "Async events of the device"),
    (Kind::Gauge, "verbs_peers", Unit::Count, "Peers registered"),
    (Kind::Gauge, "verbs_connections", Unit::Count, "Connections proven"),
    (Kind::Gauge, "verbs_qps", Unit::Count, "QPs that exist"),
    (Kind::Gauge, "verbs_receives_promised", Unit::Count, "Receives promised to connections"),
    (Kind::Gauge, "verbs_send_slabs_free", Unit::Count, "Send slabs in the pool"),
    (Kind::Gauge, "verbs_receive_slabs_lent", Unit::Count, "Receive slabs that the application holds"),
    (Kind::Gauge, "verbs_inbound_backlog_bytes", Unit::Bytes, "Bytes received that the application has not taken"),
    (Kind::Gauge, "verbs_bootstrap_pending", Unit::Count, "TCP connections without a whole hello, or waiting"),
    (Kind::Gauge, "verbs_bootstrap_in_progress", Unit::Count, "Exchanges between hello and READY"),
    (Kind::Gauge, "verbs_peer_path", Unit::Count, "1 for the path that a connected peer is reached by"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
}

/// Tells the installed recorder the unit and the meaning of every series. A worker does so at its first publishing.
pub fn describe_metrics() {
    for &(kind, name, unit, text) in SERIES {
        match kind {
            Kind::Counter => describe_counter!(name, unit, text),
            Kind::Gauge => describe_gauge!(name, unit, text),
        }
    }
}

impl<F: Fabric> Worker<F> {
    /// Publishes all counters and gauges, as they are now, to the installed recorder of the `metrics` facade; to none
    /// if there is none. [`Config::metrics_interval`](crate::Config::metrics_interval) does so at intervals, and once
    /// at the end of [`Worker::shutdown`]. Every series carries the label `worker`, this worker's instance id.
    pub fn publish_metrics(&self) {
        let shared = self.shared();
        let mut published = lock(&shared.published);
        if !std::mem::replace(&mut published.described, true) {
            describe_metrics();
        }
        let to = Labels { worker: Label::new("worker", shared.me.instance.to_string()) };
        let stats = self.stats();
        publish_stats(&to, &stats);
        if let Some(listener) = self.listener_stats() {
            publish_listener(&to, &listener);
        }
        self.publish_paths(&to, &mut published);
    }

    /// An info gauge a connected peer. The one of a path that is no longer so goes to 0.
    fn publish_paths(&self, to: &Labels, published: &mut Published) {
        let shared = self.shared();
        let mut paths = BTreeMap::new();
        for peer in shared.all_peers() {
            let state = peer.lock();
            let Some(epoch) = state.epoch.as_ref().filter(|epoch| epoch.proof_told) else { continue };
            let (Some(local), Some(remote)) = (epoch.local, epoch.remote.as_ref()) else { continue };
            let remote = remote.port;
            paths.insert(
                peer.id,
                to.with([
                    Label::new("peer", peer.id.to_string()),
                    Label::new("path", "rdma"),
                    Label::new("gid", local.gid.to_string()),
                    Label::new("gid_index", local.gid_index.to_string()),
                    Label::new("gid_type", format!("{:?}", local.gid_type)),
                    Label::new("remote_gid", remote.gid.to_string()),
                    Label::new("mtu_bytes", local.mtu.min(remote.mtu).bytes().to_string()),
                ]),
            );
        }
        for (peer, labels) in &published.paths {
            if paths.get(peer) != Some(labels) {
                gauge!("verbs_peer_path", labels.clone()).set(0.0);
            }
        }
        for labels in paths.values() {
            gauge!("verbs_peer_path", labels.clone()).set(1.0);
        }
        published.paths = paths;
    }
}

/// The labels of one worker's series.
struct Labels {
    worker: Label,
}

impl Labels {
    fn with(&self, others: impl IntoIterator<Item = Label>) -> Vec<Label> {
        std::iter::once(self.worker.clone()).chain(others).collect()
    }

    fn count(&self, name: &'static str, labels: &[(&'static str, &'static str)], value: u64) {
        let labels = self.with(labels.iter().map(|&(key, value)| Label::from_static_parts(key, value)));
        counter!(name, labels).absolute(value);
    }

    fn now(&self, name: &'static str, value: u64) {
        #[expect(clippy::cast_precision_loss, reason = "a gauge is an f64, exact up to 2^53")]
        gauge!(name, self.with([])).set(value as f64);
    }
}

fn publish_stats(to: &Labels, stats: &Stats) {
    for (direction, flow) in [("sent", &stats.sent), ("received", &stats.received)] {
        publish_flow(to, direction, flow);
    }
    for &(name, labels, read) in COUNTS {
        to.count(name, labels, read(stats));
    }
    // All causes from the start, so that the first end of a kind is an increase.
    for cause in EpochEnd::CAUSES {
        to.count("verbs_epochs_ended_total", &[("cause", cause)], stats.ended.get(cause).copied().unwrap_or(0));
    }
    for (direction, naks) in [("sent", stats.hw.rnr_naks_sent), ("received", stats.hw.rnr_naks_received)] {
        if let Some(naks) = naks {
            to.count("verbs_rnr_naks_total", &[("direction", direction)], naks);
        }
    }
    for &(name, read) in NOW {
        to.now(name, read(stats));
    }
}

fn publish_flow(to: &Labels, direction: &'static str, flow: &FlowStats) {
    for kind in MessageType::ALL {
        let labels = [("direction", direction), ("type", kind.name())];
        to.count("verbs_frames_total", &labels, flow.frames[kind as usize]);
        to.count("verbs_bytes_total", &labels, flow.bytes[kind as usize]);
    }
}

fn publish_listener(to: &Labels, stats: &ListenerStats) {
    to.count("verbs_bootstrap_accepted_total", &[], stats.accepted);
    let refused: u64 = stats.refused.iter().map(|(_, count)| count).sum();
    for (end, count) in [
        ("completed", stats.completed),
        ("refused", refused),
        ("timed_out", stats.timed_out),
        ("garbage", stats.garbage),
        ("oversize", stats.oversize),
        ("closed_early", stats.closed_early),
        ("over_limit", stats.over_limit),
        ("stopped", stats.stopped),
    ] {
        to.count("verbs_bootstrap_ended_total", &[("end", end)], count);
    }
    // From the start for those that tell of an attack or of a wrong set-up.
    let named = [Status::AuthRequired, Status::AuthFailed, Status::AuthUnavailable, Status::UnsupportedVersion];
    let mut refused: BTreeMap<&str, u64> = named.iter().map(|status| (status.name(), 0)).collect();
    for (status, count) in &stats.refused {
        *refused.entry(status.name()).or_default() += count;
    }
    for (status, count) in refused {
        to.count("verbs_bootstrap_refused_total", &[("status", status)], count);
    }
    to.count("verbs_bootstrap_accept_errors_total", &[], stats.accept_errors);
    to.now("verbs_bootstrap_pending", stats.pending);
    to.now("verbs_bootstrap_in_progress", stats.in_progress);
}

/// Publishes at once and then at intervals, until shutdown or the last clone's end.
pub(super) fn spawn_publisher<F: Fabric>(owner: &Arc<Owner<F>>, every: Duration) {
    let mut stop = owner.shared.stop_signal();
    let weak = Arc::downgrade(owner);
    owner.shared.spawn(async move {
        loop {
            match weak.upgrade() {
                Some(owner) => Worker { owner }.publish_metrics(),
                None => return,
            }
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return,
                () = sleep(every) => {}
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_series_is_described_and_documented() {
        let doc = include_str!("../../../docs/observability.md");
        let first_cell = |line: &str| Some(line.strip_prefix("| `verbs_")?.split_once('`')?.0.to_owned());
        // In the table of alerts stand expressions.
        let names = doc.lines().filter_map(first_cell).filter(|name| !name.contains(' '));
        let documented: BTreeSet<String> = names.map(|name| format!("verbs_{name}")).collect();
        let described: BTreeSet<String> = SERIES.iter().map(|series| series.1.to_owned()).collect();
        assert_eq!(described.len(), SERIES.len(), "a series is described twice");
        assert_eq!(documented, described, "docs/observability.md and the described series differ");
        let names = COUNTS.iter().map(|count| count.0).chain(NOW.iter().map(|now| now.0));
        for name in names {
            assert!(described.contains(name), "{name} is not described");
        }
    }

    #[test]
    fn every_cause_of_an_end_is_documented() {
        let doc = include_str!("../../../docs/observability.md");
        for cause in EpochEnd::CAUSES {
            assert!(doc.contains(&format!("`{cause}`")), "{cause} is not in docs/observability.md");
        }
    }
}
