//! What a submission comes to.

use std::fmt;

use super::execute::Moved;
use crate::{NotificationStatus, RemoteEffect, TransferError, error::Failure};

/// Which transport moved the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// Plain TCP.
    Tcp,
    /// An RDMA device, by way of staging memory at both ends: a slice changes in one step, as over TCP.
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
}

/// The request that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("request {index} failed: {error} (remote effect: {effect})")]
pub struct TransferFailure {
    /// Which.
    pub index: usize,
    /// Why.
    pub error: TransferError,
    /// What it may have done at the peer. The local slice of a READ is as it was.
    pub effect: RemoteEffect,
}

impl BatchReport {
    pub(super) fn new(requests: usize) -> Self {
        Self {
            requests,
            completed: 0,
            completed_bytes: 0,
            failure: None,
            notification: NotificationStatus::NotRequested,
            transport: None,
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
            Err(Failure { error, effect }) => self.failure = Some(TransferFailure { index, error, effect }),
        }
    }
}
