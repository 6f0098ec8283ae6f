//! What an engine holds and has done.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A sample of an engine's counters. Each is read on its own: together they are no snapshot of one moment. They count
/// what the engine retains, not what an owner of outside memory has allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Registered ranges, and unregistered ones that something still holds.
    pub registrations: u64,
    /// Their bytes.
    pub registered_bytes: u64,
    /// Operations of peers that the source has admitted and not left.
    pub source_operations: u64,
    /// Connections of peers, idle ones included.
    pub source_connections: u64,
    /// Submissions, descriptions and notifications of this engine's own that are in flight.
    pub submissions: u64,
    /// Their bytes.
    pub submission_bytes: u64,
    /// Asynchronous batches that are allocated, or detached and not done.
    pub batches: u64,
    /// Their capacities together.
    pub batch_slots: u64,
    /// Threads for asynchronous work.
    pub batch_threads: u64,
    /// Connections kept for the next request.
    pub kept_connections: u64,
    /// Bytes of staging buffers kept for the next payload.
    pub kept_staging_bytes: u64,
    /// Notifications that wait to be read.
    pub queued_notifications: u64,
    /// Those, and room reserved for such as are on their way.
    pub notifications: u64,
    /// Their bytes.
    pub notification_bytes: u64,
    /// Requests that completed, since the start.
    pub requests_completed: u64,
    /// Requests that failed, since the start.
    pub requests_failed: u64,
    /// Of those and of notifications: how many may have had an effect at the peer that nobody here knows.
    pub effects_unknown: u64,
    /// Bytes that completed READs brought in, since the start.
    pub bytes_read: u64,
    /// Bytes that completed WRITEs took out, since the start.
    pub bytes_written: u64,
    /// Connections dialled, since the start.
    pub connections_dialled: u64,
    /// Requests that went over a kept connection, since the start.
    pub connections_reused: u64,
    /// Requests that completed over RDMA, since the start.
    pub rdma_completed: u64,
    /// Of these, requests that went over several pairs of devices at once.
    pub rdma_sliced: u64,
    /// Requests that were to go over RDMA and went over TCP, since the start.
    pub rdma_fallbacks: u64,
    /// Times that a request went on to another pair of devices, since the start.
    pub rdma_retries: u64,
    /// Pairs of devices, one here and one of a peer's, that are left out for a while after errors.
    pub rdma_resting: u64,
    /// Ranges that [direct](crate::Profile::Direct) operations are at, as source and as requester: whoever wants them
    /// waits.
    pub direct_ranges: u64,
    /// Requests that completed with the direct profile, since the start.
    pub direct_completed: u64,
    /// Requests of peers over several pairs of devices at once that the source serves: until the receipt of each pair is
    /// in, or its QP is destroyed.
    pub rdma_parents: u64,
    /// Grants of the source that a device may use, or that are being taken back.
    pub grants: u64,
    /// Their bytes.
    pub grant_bytes: u64,
    /// Pairs of QPs that are being set up, as source and as requester.
    pub rdma_connecting: u64,
    /// Pairs that carry an operation.
    pub rdma_busy: u64,
    /// Pairs that wait for the next one.
    pub rdma_idle: u64,
    /// Pairs whose QP is being destroyed. What they could touch is held until it is.
    pub rdma_closing: u64,
    /// Of these, what a device did not let go until the engine ended: leaked.
    pub rdma_stuck: u64,
}

/// A sample of what goes over one of an engine's RDMA devices, as requester. What peers take of it is not counted: they
/// choose, and post.
#[cfg(feature = "rdma")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NicStats {
    /// The device's GUID.
    pub device_guid: u64,
    /// The port on it.
    pub port: u8,
    /// The GID that is used, as its 16 bytes.
    pub gid: [u8; 16],
    /// It is there, and has not said that its port is down.
    pub is_up: bool,
    /// Bytes of requests that are under way over it.
    pub in_flight_bytes: u64,
    /// What it was seen to do, in bytes a second: a tenth of the latest request and nine of what was known before. `None`
    /// before one of 64 KiB or more.
    pub estimated_bytes_per_second: Option<u64>,
    /// Requests that completed over it, or in part over it, since the start.
    pub requests_completed: u64,
    /// Their bytes, as far as they went over it.
    pub bytes_completed: u64,
    /// Of these, bytes of requests that went over several pairs of devices at once.
    pub sliced_bytes_completed: u64,
}

/// Counts since the start.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) completed: Counter,
    pub(crate) failed: Counter,
    pub(crate) unknown: Counter,
    pub(crate) read: Counter,
    pub(crate) written: Counter,
    pub(crate) dialled: Counter,
    pub(crate) reused: Counter,
    pub(crate) rdma_completed: Counter,
    pub(crate) rdma_sliced: Counter,
    pub(crate) rdma_fallbacks: Counter,
    pub(crate) rdma_retries: Counter,
    pub(crate) direct_completed: Counter,
}

#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}
