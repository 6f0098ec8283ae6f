//! Counters of bulk memory.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::error::{BulkEnd, TransferError};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The live counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            /// A lock: connections end rarely.
            ended: Mutex<BTreeMap<&'static str, u64>>,
            $(pub(crate) $name: AtomicU64,)*
        }

        /// What bulk memory has done since its start. All counts only grow, but for those called "now".
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct BulkStats {
            /// Bulk connections ended, and attempts that failed, by [`BulkEnd::cause`].
            pub ended: BTreeMap<&'static str, u64>,
            /// Regions that exist, now.
            pub regions: usize,
            /// Regions whose unmap waits for transfers, now.
            pub regions_parked: usize,
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> BulkStats {
                BulkStats {
                    ended: self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone(),
                    $($name: self.$name.load(Relaxed),)*
                    ..BulkStats::default()
                }
            }
        }
    };
}

counters! {
    /// GETs begun.
    gets,
    /// PUTs begun, with and without notification.
    puts,
    /// Notifications begun, without bytes.
    notifies,
    /// Transfers that succeeded.
    done,
    /// Transfers of which a work request failed.
    failed,
    /// Transfers that ended for another one's sake, or found no connection.
    reset,
    /// Transfers that were cancelled.
    cancelled,
    /// Transfers that ended by their deadline.
    expired,
    /// Transfers refused before anything was posted.
    refused,
    /// Transfers that have not ended, now.
    in_flight,
    /// Bytes read from peers.
    bytes_read,
    /// Bytes written to peers.
    bytes_written,
    /// READs and WRITEs posted.
    chunks,
    /// The most READs that one connection had posted and not completed.
    reads_at_once,
    /// Notifications received.
    notified,
    /// Notifications that came while nobody took them.
    notifications_dropped,
    /// Dials made.
    dials,
    /// Dials that failed.
    dial_failures,
    /// Hellos of the bulk plane that were refused.
    hellos_refused,
    /// Bulk connections begun: QPs made.
    epochs_begun,
    /// Bulk connections over which something came back.
    epochs_proven,
    /// Bulk connections and attempts ended for any cause.
    epochs_ended,
    /// QPs that exist, now.
    qps,
    /// Completions of connections that were over, or seen before.
    late_completions,
    /// Flushes that did not finish within `flush_deadline`.
    flushes_abandoned,
    /// Transfers that the teardown answered.
    abandoned_at_teardown,
    /// Memory windows bound for peers.
    windows_bound,
    /// Memory windows invalidated.
    windows_invalidated,
    /// Memory windows that ended with their connection.
    windows_freed,
    /// Memory windows that could not be bound, each at the price of its connection.
    windows_failed,
    /// Memory windows bound, or being bound or invalidated, now.
    windows,
    /// Regions whose memory stays for good, since the device would not let go of them.
    leaked,
    /// Maps that were rolled back because nobody waited for them.
    rolled_back,
}

impl Counters {
    pub(crate) fn end_epoch(&self, cause: &BulkEnd) {
        self.epochs_ended.fetch_add(1, Relaxed);
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner).entry(cause.cause()).or_default() += 1;
    }

    /// A transfer has ended.
    pub(crate) fn end_transfer(&self, end: &Result<(), TransferError>) {
        let counter = match end {
            Ok(()) => &self.done,
            Err(TransferError::Failed { .. }) => &self.failed,
            Err(TransferError::ConnectionReset { .. } | TransferError::Connect { .. }) => &self.reset,
            Err(TransferError::Cancelled) => &self.cancelled,
            Err(TransferError::Deadline { .. }) => &self.expired,
            Err(TransferError::ShuttingDown) => &self.abandoned_at_teardown,
            Err(_) => &self.refused,
        };
        counter.fetch_add(1, Relaxed);
    }
}

/// One more.
pub(crate) fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}
