//! What a submission comes to.

use std::fmt;

use super::{execute::Moved, slice::Profile};
use crate::{NotificationStatus, RemoteEffect, TransferError, error::Failure};

/// Which transport moved the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// Plain TCP.
    Tcp,
    /// An RDMA device.
    Rdma,
    /// Some requests went one way and some the other.
    Mixed,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Rdma => "RDMA",
            Self::Mixed => "TCP and RDMA",
        })
    }
}

/// How far a submission got. Its requests ran in order, and the first failure ended it: what lies behind was never
/// attempted. Nothing is rolled back.
#[derive(Clone, Debug)]
pub struct BatchReport {
    /// How many requests there were.
    pub requests: usize,
    /// How many completed: those before [`failure`](BatchReport::failure).
    pub completed: usize,
    /// Their bytes, exactly.
    pub completed_bytes: u64,
    /// What ended it early.
    pub failure: Option<TransferFailure>,
    /// What became of the notification, which has no bearing on the data.
    pub notification: NotificationStatus,
    /// What moved the bytes of those that completed; `None` if there were none.
    pub transport: Option<Transport>,
    /// What was promised about bytes on their way: as it was asked for.
    pub profile: Profile,
}

/// The request that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("request {index} failed: {error} (remote effect: {effect})")]
pub struct TransferFailure {
    /// Which.
    pub index: usize,
    /// Why.
    pub error: TransferError,
    /// What it may have done at the peer.
    pub effect: RemoteEffect,
    /// It was a [direct](Profile::Direct) READ that may have changed part of its local slice, or all. Else that is as it
    /// was.
    pub local_changed: bool,
}

impl BatchReport {
    pub(super) fn new(requests: usize, profile: Profile) -> Self {
        Self {
            requests,
            completed: 0,
            completed_bytes: 0,
            failure: None,
            notification: NotificationStatus::NotRequested,
            transport: None,
            profile,
        }
    }

    /// Whether all data moved. The notification is another matter.
    pub fn is_complete(&self) -> bool {
        self.completed == self.requests
    }

    /// `self`, or the failure as an error for `?`.
    ///
    /// # Errors
    ///
    /// The failure, if there is one.
    pub fn into_result(self) -> Result<Self, TransferFailure> {
        match self.failure {
            Some(failure) => Err(failure),
            None => Ok(self),
        }
    }

    pub(super) fn record(&mut self, index: usize, outcome: Result<Moved, Failure>) {
        match outcome {
            Ok(Moved { bytes, by }) => {
                self.completed += 1;
                self.completed_bytes += bytes;
                self.transport = match (self.transport, by) {
                    (known, None) => known,
                    (None, by) => by,
                    (Some(known), Some(by)) => Some(if known == by { known } else { Transport::Mixed }),
                };
            }
            Err(Failure { error, effect, local_changed }) => {
                self.failure = Some(TransferFailure { index, error, effect, local_changed });
            }
        }
    }
}
