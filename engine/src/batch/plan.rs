//! Checking a submission: everything before anything.

use std::sync::Arc;

use super::{
    cell::Hold,
    slice::{Direction, LocalGuard, Mode, Slice},
    table::BatchError,
};
use crate::{
    Exhausted, Notification, Permission, TransferError,
    budget::{Budget, Charge},
    memory::{Registration, Registry},
    segment::{RemoteSegment, Snapshot},
};

/// One contiguous copy, by absolute addresses: a local one, and one of the peer's own address space. They carry neither
/// ownership nor rights: a single registered range must contain each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferRequest {
    /// The first byte here.
    pub local_address: u64,
    /// The first byte there.
    pub remote_address: u64,
    /// How many bytes. 0 moves nothing, but is checked like any other.
    pub length: u64,
}

/// Why a submission was refused. None of its requests was attempted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Split it.
    #[error("{requests} requests, but max_batch_requests is {limit}")]
    TooManyRequests {
        /// How many there were.
        requests: usize,
        /// How many one submission takes.
        limit: usize,
    },
    /// Split the request, or raise the limit at both ends.
    #[error("request {index} moves {length} bytes, but max_payload_bytes is {limit}")]
    PayloadTooLong {
        /// Which.
        index: usize,
        /// Its length.
        length: u64,
        /// The limit.
        limit: u64,
    },
    /// The notification is longer than either end takes.
    #[error("a notification of {bytes} bytes, but max_notification_bytes is {limit}")]
    NotificationTooLong {
        /// Name and message.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// No single range that is registered here contains the local bytes.
    #[error("request {index}: no single range registered here contains {length} bytes at {address:#x}")]
    Local {
        /// Which.
        index: usize,
        /// Its local address.
        address: u64,
        /// Its length.
        length: u64,
    },
    /// No single range that the peer exports contains the remote bytes, as far as the segment knows. Synchronous calls
    /// have refreshed it once; asynchronous ones do not: see [`RemoteSegment`].
    #[error("request {index}: no single range that the peer exports contains {length} bytes at {address:#x}")]
    Remote {
        /// Which.
        index: usize,
        /// Its remote address.
        address: u64,
        /// Its length.
        length: u64,
    },
    /// The peer's range is not open for this.
    #[error("request {index}: region {region} of the peer has {permission:?}, which does not allow it")]
    Permission {
        /// Which.
        index: usize,
        /// The number of the range at the peer.
        region: u64,
        /// What it allows.
        permission: Permission,
    },
    /// A budget is spent: wait for submissions to end, or raise it.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// A remote address was not known, and the refresh that should have found it failed.
    #[error("the peer's ranges could not be refreshed")]
    Refresh(#[source] TransferError),
    /// The batch does not take it.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The system gives no thread to work on it.
    #[error("no thread for the submission")]
    Thread(#[source] Arc<std::io::Error>),
    /// The engine ends.
    #[error("the engine ends")]
    Stopped,
}

/// What checking needs to know.
pub(crate) struct Planner {
    pub(crate) max_requests: usize,
    pub(crate) max_payload_bytes: u64,
    pub(crate) max_notification_bytes: u64,
    pub(crate) budget: Arc<Budget>,
}

/// A checked submission. Local memory and budget are held from here on.
pub(crate) struct Plan {
    pub(crate) mode: Mode,
    pub(crate) notification: Option<Notification>,
    /// One submission, with all bytes.
    pub(crate) charge: Charge,
    peer: RemoteSegment,
    requests: Vec<TransferRequest>,
    local: Vec<(Arc<Registration>, u64)>,
    remote: Vec<(u64, u64)>,
}

/// How a request for remote bytes misses.
pub(crate) enum Miss {
    /// The peer exports no such range, as far as the snapshot knows.
    Unknown(SubmitError),
    /// It does, and does not allow it: no refresh changes that.
    Final(SubmitError),
}

impl Planner {
    /// All checks but those of remote addresses.
    pub(crate) fn plan(
        &self,
        registry: &Registry,
        peer: &RemoteSegment,
        mode: Mode,
        requests: &[TransferRequest],
        notification: Option<&Notification>,
    ) -> Result<Plan, SubmitError> {
        if requests.len() > self.max_requests {
            return Err(SubmitError::TooManyRequests { requests: requests.len(), limit: self.max_requests });
        }
        let notification_bytes = notification.map_or(0, Notification::bytes);
        if notification_bytes > self.max_notification_bytes {
            let (bytes, limit) = (notification_bytes, self.max_notification_bytes);
            return Err(SubmitError::NotificationTooLong { bytes, limit });
        }
        let mut bytes = notification_bytes;
        let mut local = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            let (address, length) = (request.local_address, request.length);
            if length > self.max_payload_bytes {
                return Err(SubmitError::PayloadTooLong { index, length, limit: self.max_payload_bytes });
            }
            let resolved = registry.resolve(address, length);
            local.push(resolved.map_err(|_| SubmitError::Local { index, address, length })?);
            bytes = bytes.saturating_add(length); // 65,536 requests of 64 MiB stay far below
        }
        let charge = self.budget.take(1, bytes)?;
        Ok(Plan {
            mode,
            notification: notification.cloned(),
            charge,
            peer: peer.clone(),
            requests: requests.to_vec(),
            local,
            remote: Vec::new(),
        })
    }
}

impl Plan {
    /// Finds the remote bytes of all requests in one snapshot.
    pub(crate) fn resolve(&mut self, snapshot: &Snapshot) -> Result<(), Miss> {
        self.remote.clear();
        for (index, request) in self.requests.iter().enumerate() {
            let (address, length) = (request.remote_address, request.length);
            let (descriptor, offset) = snapshot.resolve(address, length).ok_or(Miss::Unknown(SubmitError::Remote {
                index,
                address,
                length,
            }))?;
            let permission = descriptor.permission;
            let allowed = match self.mode.direction {
                Direction::Read => permission.allows_read(),
                Direction::Write => permission.allows_write(),
            };
            if !allowed {
                return Err(Miss::Final(SubmitError::Permission { index, region: descriptor.id, permission }));
            }
            self.remote.push((descriptor.id, offset));
        }
        Ok(())
    }

    pub(crate) fn peer(&self) -> &RemoteSegment {
        &self.peer
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    /// What the transport gets. Each slice holds `hold`, too.
    pub(crate) fn take_slices(&mut self, hold: Option<&Arc<Hold>>) -> Vec<Slice> {
        let local = std::mem::take(&mut self.local).into_iter();
        let (peer, Mode { direction, profile }) = ((self.peer.endpoint(), self.peer.epoch()), self.mode);
        let parts = local.zip(&self.remote).zip(&self.requests);
        let slice = |(((registration, local_offset), remote), request): (_, &TransferRequest)| {
            let ((remote_region, remote_offset), length): (&(u64, u64), _) = (remote, request.length);
            let local = LocalGuard::new(registration, hold.cloned());
            let (remote_region, remote_offset) = (*remote_region, *remote_offset);
            Slice { peer, direction, profile, local, local_offset, remote_region, remote_offset, length }
        };
        parts.map(slice).collect()
    }
}

impl Miss {
    pub(crate) fn into_error(self) -> SubmitError {
        match self {
            Self::Unknown(error) | Self::Final(error) => error,
        }
    }
}
