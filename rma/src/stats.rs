//! Counters of a rendezvous. What they mean, and what to alert on, is in `docs/rendezvous.md`.

use std::{
    array,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::proto::{book::BookGauges, slice::ArenaGauges, slot::Fate, wire::PathReason};

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

/// Which way payloads went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathStats {
    /// By RDMA READ.
    pub rdma: u64,
    /// By chunks, by reason: those of [`PathStats::REASONS`], in their order.
    pub chunked: [u64; 8],
}

impl PathStats {
    /// The reasons for chunks.
    pub const REASONS: [PathReason; 8] = [
        PathReason::NotPinned,
        PathReason::NoCapability,
        PathReason::NoBulkQp,
        PathReason::PoolFull,
        PathReason::LeaseBudget,
        PathReason::GetFailed,
        PathReason::Disabled,
        PathReason::Other(0),
    ];

    /// Payloads that went by chunks for this reason.
    pub fn by(&self, reason: PathReason) -> u64 {
        self.chunked[index(reason)]
    }

    /// Payloads that went by chunks.
    pub fn chunked_total(&self) -> u64 {
        self.chunked.iter().sum()
    }
}

fn index(reason: PathReason) -> usize {
    PathStats::REASONS.iter().position(|known| *known == reason).unwrap_or(PathStats::REASONS.len() - 1)
}

#[derive(Debug, Default)]
pub(crate) struct Paths {
    rdma: Counter,
    chunked: [Counter; 8],
}

impl Paths {
    pub(crate) fn count(&self, path: Result<(), PathReason>) {
        match path {
            Ok(()) => self.rdma.add(1),
            Err(reason) => self.chunked[index(reason)].add(1),
        }
    }

    fn snapshot(&self) -> PathStats {
        PathStats { rdma: self.rdma.get(), chunked: array::from_fn(|at| self.chunked[at].get()) }
    }
}

/// What ended slots, in the order of [`FATES`].
pub(crate) const FATES: [Fate; 6] =
    [Fate::Released, Fate::Expired, Fate::Refused, Fate::Withdrawn, Fate::PeerGone, Fate::ShutDown];

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The live counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            pub(crate) granted: Paths,
            pub(crate) pulled: Paths,
            ended: [Counter; 6],
            $(pub(crate) $name: Counter,)*
        }

        /// What a rendezvous has done since its start. All counts only grow, but for those called "now".
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct RendezvousStats {
            /// Owner: leases given, by the way that it decided on.
            pub granted: PathStats,
            /// Consumer: payloads pulled, by the way that they came.
            pub pulled: PathStats,
            /// Owner: slots ended, by cause: released, expired, refused, withdrawn, peer gone, shut down.
            pub slots_ended: [u64; 6],
            /// Owner, now: slots, leases, rights.
            pub book: BookGauges,
            /// Owner, now: arenas that payloads lie in.
            pub source_arenas: ArenaGauges,
            /// Consumer, now: arenas that READs land in.
            pub destination_arenas: ArenaGauges,
            /// Consumer, now: questions without an answer yet.
            pub asks_waiting: usize,
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> RendezvousStats {
                RendezvousStats {
                    granted: self.granted.snapshot(),
                    pulled: self.pulled.snapshot(),
                    slots_ended: array::from_fn(|at| self.ended[at].get()),
                    $($name: self.$name.get(),)*
                    ..RendezvousStats::default()
                }
            }
        }
    };
}

counters! {
    /// Owner: payloads staged in ordinary memory.
    staged_memory,
    /// Owner: payloads staged in an arena.
    staged_pinned,
    /// Owner: bytes staged.
    staged_bytes,
    /// Owner: payloads that were to be pinned and found the arenas full.
    pool_full,
    /// Owner: arenas that could not be made.
    arenas_failed,
    /// Owner: requests served.
    requests,
    /// Owner: requests refused.
    requests_refused,
    /// Owner: requests that could not be read.
    requests_malformed,
    /// Owner: requests dropped because too many waited.
    requests_dropped,
    /// Owner: chunks handed out.
    chunks_served,
    /// Owner: their bytes.
    chunk_bytes_served,
    /// Owner: leases renewed.
    leases_renewed,
    /// Owner: leases ended by detach or release.
    leases_ended,
    /// Owner: leases ended because they were overdue.
    leases_reaped,
    /// Owner: leases ended because their peer was gone.
    leases_of_gone_peers,
    /// Owner: detaches and releases that named no lease of that peer and slot.
    leases_mismatched,
    /// Owner: slices registered for a lease.
    rights_made,
    /// Owner: of these, deregistered.
    rights_revoked,
    /// Owner: slices that could not be registered.
    rights_failed,
    /// Owner: deregistrations that failed and will be tried again; the slice stays in quarantine.
    revocations_failed,
    /// Owner: arenas given back after a while without use.
    arenas_released,
    /// Consumer: questions asked.
    asked,
    /// Consumer: of these, without an answer in time.
    asks_expired,
    /// Consumer: answers to questions that nobody waits for any more.
    answers_late,
    /// Consumer: answers that could not be read, or did not fit.
    answers_bad,
    /// Consumer: bytes pulled.
    pulled_bytes,
    /// Consumer: pulls that failed.
    pulls_failed,
    /// Consumer: pulls of this worker's own payloads.
    pulled_locally,
    /// Consumer: READs of payloads that failed, after which chunks were tried.
    reads_failed,
    /// Consumer: leases that ran out in the middle of a pull.
    leases_lost,
    /// Messages sent by staging.
    messages_staged,
    /// Of these, reported back to their sender.
    messages_failed,
    /// Messages whose payload was pulled.
    messages_pulled,
    /// Messages whose payload could not be pulled: they were not delivered here, and their sender hears of it.
    messages_lost,
}

impl Counters {
    pub(crate) fn slot_ended(&self, fate: Fate) {
        if let Some(at) = FATES.iter().position(|known| *known == fate) {
            self.ended[at].add(1);
        }
    }
}
