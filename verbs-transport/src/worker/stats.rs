//! Counters of a worker. What they mean, and what to alert on, is in `docs/observability.md`.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    error::{EpochEnd, SendError},
    shared::lock,
};
use crate::{
    fabric::HwCounters,
    proto::{
        frame::{Malformed, MessageType},
        link::{LinkCounts, LinkError},
    },
};

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
    bytes: [Counter; 5],
}

impl Flow {
    pub(crate) fn add(&self, kind: MessageType, bytes: usize) {
        self.frames[kind as usize].add(1);
        self.bytes[kind as usize].add(bytes as u64);
    }

    fn snapshot(&self) -> FlowStats {
        FlowStats {
            frames: std::array::from_fn(|kind| self.frames[kind].get()),
            bytes: std::array::from_fn(|kind| self.bytes[kind].get()),
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The live counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            pub(crate) sent: Flow,
            pub(crate) received: Flow,
            /// A lock: connections end rarely.
            pub(crate) ended: Mutex<BTreeMap<&'static str, u64>>,
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
            /// Connections ended, and attempts that failed, by [`EpochEnd::cause`].
            pub ended: BTreeMap<&'static str, u64>,
            /// What the device counts by itself: of the whole port, whoever uses it.
            pub hw: HwCounters,
            /// Peers registered, now; none after shutdown.
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
            /// Receive slabs that the application holds in frames it has not dropped, now.
            pub receive_slabs_lent: u32,
            /// Bytes received that the application has not taken, now.
            pub inbound_backlog_bytes: usize,
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats {
                    sent: self.sent.snapshot(),
                    received: self.received.snapshot(),
                    ended: lock(&self.ended).clone(),
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
    /// Header and payload bytes by type, in the same order.
    pub bytes: [u64; 5],
}

impl FlowStats {
    /// Frames of all types.
    pub fn total(&self) -> u64 {
        self.frames.iter().sum()
    }

    /// Bytes of all types.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

impl Counters {
    /// A frame was refused before the wire.
    pub(crate) fn reject(&self, error: &SendError) {
        self.rejected.add(1);
        let reason = match error {
            SendError::NotStarted => &self.rejected_not_started,
            SendError::PeerNotRegistered { .. } => &self.rejected_not_registered,
            SendError::TooLarge { .. } => &self.rejected_too_large,
            SendError::ShuttingDown
            | SendError::ConnectionLost { .. }
            | SendError::NoSuchLane { .. }
            | SendError::NotPulled { .. } => &self.rejected_shutting_down,
        };
        reason.add(1);
    }

    /// A peer broke the protocol.
    pub(crate) fn broken(&self, error: &LinkError) {
        self.malformed.add(1);
        if let LinkError::Malformed(Malformed::Short { .. }) | LinkError::TooManyMalformed(Malformed::Short { .. }) =
            error
        {
            self.truncated.add(1);
        }
    }

    /// A connection, or the attempt at one, has ended.
    pub(crate) fn end(&self, cause: &EpochEnd) {
        self.epochs_ended.add(1);
        *lock(&self.ended).entry(cause.cause()).or_default() += 1;
    }
}

counters! {
    /// Sends that had to queue in a gate.
    pended,
    /// Sends refused before the wire, for one of the reasons below.
    rejected,
    /// Of these, before the worker was started.
    rejected_not_started,
    /// ... to a peer that is not registered.
    rejected_not_registered,
    /// ... above the largest frame.
    rejected_too_large,
    /// ... after shutdown had begun.
    rejected_shutting_down,
    /// Frames reported through their error handler after they had been accepted.
    failed,
    /// Queued frames whose admission ended in an error.
    admissions_failed,
    /// Epochs begun: QPs made for a connection.
    epochs_begun,
    /// Connections that were proven.
    connections_made,
    /// Epochs ended for any cause, attempts that never had a QP included.
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
    /// Of these, SENDs that are too short for a header.
    truncated,
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
    /// Frames handed on in their slab, without a copy.
    frames_lent,
    /// Frames that were copied because as many slabs as allowed were lent.
    lend_refused,
    /// Times that the SRQ fell below its low watermark.
    srq_low,
    /// Frames of the layer above that were accepted for sending.
    service_sent,
    /// Frames of the layer above that arrived and were handed to it.
    service_received,
    /// Frames that arrived for a layer that is not attached.
    lane_dropped,
    /// Frames that arrived for a stream that the application had dropped.
    undelivered,
    /// Their bytes, header and payload.
    undelivered_bytes,
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
        self.sends_packed += other.sends_packed;
        self.frames_packed += other.frames_packed;
        self.fragments += other.fragments;
        self.pure_grants += other.pure_grants;
        self.pure_grants_received += other.pure_grants_received;
        self.received += other.received;
        self.pings += other.pings;
        self.pongs += other.pongs;
        self.credits_received += other.credits_received;
        self.credit_stalls += other.credit_stalls;
        self.credit_stalled += other.credit_stalled;
        self.malformed += other.malformed;
    }
}
