//! The executor of both kinds of submission: requests in order, the first failure ends it.

use super::{
    report::Transport,
    slice::{DataPath, Slice},
};
use crate::{
    Notification, NotificationFailure, NotificationStatus, Phase, TransferError, deadline::Deadline, error::Failure,
};

/// Whoever watches requests being carried out, and may stop them.
pub(crate) trait Observer {
    /// Asked before a request; no ends the submission.
    fn start(&self, index: usize) -> bool;
    /// Asked when the request is about to leave this host; no cancels it.
    fn post(&self, index: usize) -> bool;
    /// Told its outcome.
    fn ended(&self, index: usize, outcome: Result<Moved, Failure>);
}

/// What a request that completed has moved.
pub(crate) struct Moved {
    pub(crate) bytes: u64,
    /// By what; `None` for no bytes.
    pub(crate) by: Option<Transport>,
}

/// Carries out `slices` until one fails.
pub(crate) fn run_requests(path: &dyn DataPath, slices: Vec<Slice>, deadline: Deadline, observer: &dyn Observer) {
    for (index, slice) in slices.into_iter().enumerate() {
        if !observer.start(index) {
            return;
        }
        let length = slice.length;
        let outcome = if deadline.remaining().is_none() {
            Err(Failure::harmless(TransferError::TimedOut { phase: Phase::Connect }))
        } else if length == 0 {
            // Nothing to move, and so nothing to say.
            observer.post(index).then_some(None).ok_or(Failure::harmless(TransferError::Cancelled))
        } else {
            path.transfer(slice, deadline, &|| observer.post(index)).map(Some)
        };
        let failed = outcome.is_err();
        observer.ended(index, outcome.map(|by| Moved { bytes: length, by }));
        if failed {
            return;
        }
    }
}

/// Sends the notification of a submission, once, if all of its requests completed and there were any.
pub(crate) fn settle_notification(
    notification: Option<&Notification>,
    complete: bool,
    send: impl FnOnce(&Notification) -> Result<(), NotificationFailure>,
) -> NotificationStatus {
    match notification {
        None => NotificationStatus::NotRequested,
        Some(_) if !complete => NotificationStatus::Skipped,
        Some(notification) => match send(notification) {
            Ok(()) => NotificationStatus::Delivered,
            Err(failure) => NotificationStatus::Failed(failure),
        },
    }
}
