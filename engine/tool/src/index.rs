//! How names find their way to peers: the first region that `serve` registers holds a list, the second the counters.
//! Both are JSON, followed by spaces up to the end of the region.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use verbs_engine::{RegisteredMemory, Stats};

use crate::Failure;

/// The region with the [`Index`].
pub(crate) const INDEX_REGION: u64 = 1;
/// The region with the counters.
pub(crate) const STATS_REGION: u64 = 2;
pub(crate) const STATS_BYTES: usize = 4096;

/// What is served.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Index {
    /// Tells a region of this kind from any other bytes.
    pub(crate) verbs_engine_index: u32,
    pub(crate) entries: Vec<Entry>,
}

/// One named range.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// In the source's address space.
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) writable: bool,
}

/// The form that is understood.
pub(crate) const VERSION: u32 = 1;

impl Index {
    /// Room for the list, whatever the addresses will be.
    pub(crate) fn room<'a>(names: impl Iterator<Item = &'a str>) -> Result<usize, Failure> {
        let entry = |name: &str| Entry { name: name.to_owned(), address: u64::MAX, length: u64::MAX, writable: false };
        let largest = Self { verbs_engine_index: VERSION, entries: names.map(entry).collect() };
        Ok(serde_json::to_vec(&largest)?.len())
    }

    pub(crate) fn find(&self, name: &str) -> Result<&Entry, Failure> {
        self.entries.iter().find(|entry| entry.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
            format!("nothing is served under {name:?}; there is: {}", names.join(", ")).into()
        })
    }
}

/// Fills a region with JSON.
pub(crate) fn publish(region: &RegisteredMemory, value: &impl Serialize) -> Result<(), Failure> {
    let mut bytes = serde_json::to_vec(value)?;
    let room = usize::try_from(region.len())?;
    if bytes.len() > room {
        return Err(format!("{} bytes do not fit in a region of {room}", bytes.len()).into());
    }
    bytes.resize(room, b' ');
    region.write(0, &bytes)?;
    Ok(())
}

/// Reads JSON out of what a region held.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T, Failure> {
    serde_json::from_slice(bytes)
        .map_err(|error| format!("the source has no {what} ({error}); is it `verbs-engine serve`?").into())
}

/// All counters by their names.
pub(crate) fn stats_json(stats: &Stats) -> Value {
    json!({
        "registrations": stats.registrations,
        "registered_bytes": stats.registered_bytes,
        "source_operations": stats.source_operations,
        "source_connections": stats.source_connections,
        "submissions": stats.submissions,
        "submission_bytes": stats.submission_bytes,
        "batches": stats.batches,
        "batch_slots": stats.batch_slots,
        "batch_threads": stats.batch_threads,
        "kept_connections": stats.kept_connections,
        "kept_staging_bytes": stats.kept_staging_bytes,
        "queued_notifications": stats.queued_notifications,
        "notifications": stats.notifications,
        "notification_bytes": stats.notification_bytes,
        "requests_completed": stats.requests_completed,
        "requests_failed": stats.requests_failed,
        "effects_unknown": stats.effects_unknown,
        "bytes_read": stats.bytes_read,
        "bytes_written": stats.bytes_written,
        "connections_dialled": stats.connections_dialled,
        "connections_reused": stats.connections_reused,
        "direct_ranges": stats.direct_ranges,
        "direct_completed": stats.direct_completed,
    })
}
