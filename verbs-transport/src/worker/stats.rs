//! Counters of a worker.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::proto::{frame::MessageType, link::LinkCounts};

/// A count that only grows. Relaxed: each is true by itself, no two are read at one instant.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Frames and bytes of one direction, by type.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    frames: [Counter; 5],
    bytes: Counter,
}

impl Flow {
    pub(crate) fn add(&self, kind: MessageType, bytes: usize) {
        self.frames[kind as usize].add(1);
        self.bytes.add(bytes as u64);
    }

    fn snapshot(&self) -> FlowStats {
        FlowStats { frames: std::array::from_fn(|kind| self.frames[kind].get()), bytes: self.bytes.get() }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The live counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            pub(crate) sent: Flow,
            pub(crate) received: Flow,
            $(pub(crate) $name: Counter,)*
        }

        /// What a worker has done since its start. All counts only grow, but for those called "now".
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            /// Frames accepted from the application.
            pub sent: FlowStats,
            /// Frames handed to the application.
            pub received: FlowStats,
            /// Sums over all connections, past and present.
            pub links: LinkCounts,
            /// Peers registered, now.
            pub peers: usize,
            /// Peers known, now: registered, or connected by themselves.
            pub peers_known: usize,
            /// Connections proven, now.
            pub connections: usize,
            /// QPs that exist, now: connected, connecting and ending.
            pub qps: usize,
            /// Receives promised to connections, now.
            pub receives_promised: u32,
            /// Send slabs in the pool, now.
            pub send_slabs_free: usize,
            /// Bytes received that the application has not taken, now.
            pub inbound_backlog_bytes: usize,
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats {
                    sent: self.sent.snapshot(),
                    received: self.received.snapshot(),
                    $($name: self.$name.get(),)*
                    ..Stats::default()
                }
            }
        }
    };
}

/// Frames and bytes of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowStats {
    /// Frames by type, in the order of [`MessageType::ALL`].
    pub frames: [u64; 5],
    /// Header and payload bytes.
    pub bytes: u64,
}

impl FlowStats {
    /// Frames of all types.
    pub fn total(&self) -> u64 {
        self.frames.iter().sum()
    }
}

counters! {
    /// Sends that had to queue in a gate.
    pended,
    /// Sends refused before the wire: not started, not registered, too large.
    rejected,
    /// Frames reported through their error handler after they had been accepted.
    failed,
    /// Queued frames whose admission ended in an error.
    admissions_failed,
    /// Epochs begun: QPs made for a connection.
    epochs_begun,
    /// Connections that were proven.
    connections_made,
    /// Epochs ended for any cause.
    epochs_ended,
    /// Dials made.
    dials,
    /// Dials that failed.
    dial_failures,
    /// Hellos from peers that were refused.
    hellos_refused,
    /// Completions of QPs that are gone.
    stale_completions,
    /// Malformed frames from peers.
    malformed,
    /// Receives that came back with an error or flushed.
    receives_failed,
    /// Flushes that did not finish within `flush_deadline`.
    flushes_abandoned,
    /// PINGs sent to cover a tail of unsignaled WRs.
    tail_probes,
    /// PINGs sent because a connection had stood still.
    stall_probes,
    /// Admissions that ended by `admission_deadline`.
    admissions_expired,
    /// Requests turned away while draining.
    drain_rejected,
    /// Of these, echoes that found the peer's channel full and were dropped.
    echoes_dropped,
    /// Times that the SRQ fell below its low watermark.
    srq_low,
    /// Frames that arrived for a stream that the application had dropped.
    undelivered,
    /// Times that credits were held back because the application did not take its frames.
    withheld,
    /// Wake-ups of the driver by the completion channel.
    wakes,
    /// Async events of the device.
    async_events,
}

impl LinkCounts {
    /// Adds another connection's counts.
    pub(crate) fn add(&mut self, other: &Self) {
        self.sends_inline += other.sends_inline;
        self.sends_copied += other.sends_copied;
        self.fragments += other.fragments;
        self.pure_grants += other.pure_grants;
        self.pure_grants_received += other.pure_grants_received;
        self.received += other.received;
        self.pings += other.pings;
        self.pongs += other.pongs;
        self.credits_received += other.credits_received;
        self.credit_stalls += other.credit_stalls;
        self.malformed += other.malformed;
    }
}
