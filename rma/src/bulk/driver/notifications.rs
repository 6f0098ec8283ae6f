//! What peers tell, and who takes it.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use tokio::sync::mpsc;
use verbs_bootstrap::InstanceId;
use verbs_transport::fabric::bulk::BulkFabric;

use super::News;
use crate::bulk::Shared;

/// What a peer tells by [`Bulk::notify`](crate::Bulk::notify) or [`Bulk::put_and_notify`](crate::Bulk::put_and_notify).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notification {
    /// Who.
    pub peer: InstanceId,
    /// As the peer gave it.
    pub value: u32,
    /// Bytes of the WRITE that carried it, at most a chunk; 0 for a bare one.
    pub bytes: u32,
}

/// The notifications of all peers. Taking one lets its sender send another; those that come after this is dropped are
/// counted and dropped.
pub struct Notifications<F: BulkFabric> {
    pub(super) queue: mpsc::UnboundedReceiver<(Notification, u32)>,
    pub(super) shared: Arc<Shared<F>>,
}

impl<F: BulkFabric> Notifications<F> {
    /// The next one, in each peer's order; `None` when bulk memory was taken down and all are taken. Cancel safe.
    pub async fn recv(&mut self) -> Option<Notification> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// The poll form.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Notification>> {
        let next = std::task::ready!(self.queue.poll_recv(cx));
        Poll::Ready(next.map(|(notification, tag)| {
            self.shared.tell(News::Taken { peer: notification.peer, tag });
            notification
        }))
    }
}

impl<F: BulkFabric> std::fmt::Debug for Notifications<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Notifications")
    }
}
