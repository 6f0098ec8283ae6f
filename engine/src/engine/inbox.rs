//! Notifications of an engine: sending them, and reading its inbox.

use std::{future::Future, sync::Arc, time::Duration};

use super::Engine;
use crate::{
    Exhausted, Notification, NotificationFailure, RemoteEffect, RemoteSegment, TransferError, deadline::Deadline,
};

/// Why a notification was not sent, or may not have been.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotifyError {
    /// It is longer than either end takes. It was not sent.
    #[error("a notification of {bytes} bytes, but max_notification_bytes is {limit}")]
    TooLong {
        /// Name and message.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Too much is in flight, or the own inbox is full. It was not sent.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// The source of this engine is closed, and with it its inbox. It was not sent.
    #[error("the source is closed")]
    SourceClosed,
    /// The one attempt failed.
    #[error(transparent)]
    Failed(#[from] NotificationFailure),
}

impl Engine {
    /// Puts a notification into this engine's own inbox.
    ///
    /// # Errors
    ///
    /// [`NotifyError`], and it is not there.
    pub fn send_local_notification(&self, notification: &Notification) -> Result<(), NotifyError> {
        self.shared.notify_here(notification)
    }

    /// Puts a notification into the inbox of `peer`; success says that it is there, not that anybody has read it.
    ///
    /// # Errors
    ///
    /// [`NotifyError`]. Whether it may be there all the same, [`NotificationFailure::effect`] tells.
    pub fn send_notification(
        &self,
        peer: &RemoteSegment,
        notification: &Notification,
        timeout: Duration,
    ) -> Result<(), NotifyError> {
        self.shared.notify(peer, notification, Deadline::after(timeout))
    }

    /// As [`Engine::send_notification`], on a thread of the engine. Dropping the future gives up interest.
    ///
    /// # Errors
    ///
    /// [`NotifyError`].
    pub fn send_notification_async(
        &self,
        peer: &RemoteSegment,
        notification: &Notification,
        timeout: Duration,
    ) -> impl Future<Output = Result<(), NotifyError>> + use<> {
        let (deadline, peer, notification) = (Deadline::after(timeout), peer.clone(), notification.clone());
        let call = self.in_background(move |shared| shared.notify(&peer, &notification, deadline));
        async move {
            let stopped = NotificationFailure { error: TransferError::Stopped, effect: RemoteEffect::None };
            call.await.unwrap_or(Err(stopped.into()))
        }
    }

    /// Takes all notifications out of the inbox, in the order in which they were enqueued. Each goes to one caller only.
    pub fn receive_notifications(&self) -> Vec<Notification> {
        self.shared.source.inbox.drain()
    }

    /// As [`Engine::receive_notifications`], but waits for the first; empty if none comes in time.
    pub fn wait_for_notifications(&self, timeout: Duration) -> Vec<Notification> {
        self.shared.source.inbox.drain_until(Deadline::after(timeout))
    }

    /// As [`Engine::receive_notifications`], but waits for the first. Dropping the future loses none.
    pub fn notifications(&self) -> impl Future<Output = Vec<Notification>> + use<> {
        let inbox = Arc::clone(&self.shared.source.inbox);
        std::future::poll_fn(move |context| inbox.poll_drain(context.waker()))
    }
}
