//! The burial of a QP that is given up: ERROR, drain, destroy; and only then whatever it could touch is let go.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use verbs_transport::fabric::bulk::{BulkFabric, BulkQp, BulkRegion, BulkWindow as _, DestroyQpError};

use super::{
    device::{Device, QpOf, RegionOf, WindowOf},
    grant::{Ending, Event, Grant, Step},
    mailbox::Mailbox,
};
use crate::budget::Charge;

/// How long the flush of a QP in ERROR is waited for before it is destroyed all the same.
const DRAIN: Duration = Duration::from_secs(1);
/// Between looks at a QP that drains, or that a connect under way still holds.
const LOOK: Duration = Duration::from_millis(2);
/// Between attempts to destroy or deregister what the device would not let go.
const RETRY: Duration = Duration::from_secs(1);

/// What is left when a QP is given up. The memory that the QP may touch goes only when it is destroyed.
pub(crate) struct Condemned<F: BulkFabric> {
    pub(crate) device: Arc<Device<F>>,
    pub(crate) qp: Option<Arc<QpOf<F>>>,
    pub(crate) mail: Arc<Mailbox>,
    pub(crate) grant: Option<Grant>,
    /// Bound on the QP, or not.
    pub(crate) window: Option<WindowOf<F>>,
    /// Of the grant.
    pub(crate) region: Option<RegionOf<F>>,
    /// Range, staging and budget, in the order in which they are to go.
    pub(crate) owners: Option<Box<dyn Send>>,
    pub(crate) permit: Option<Charge>,
}

impl<F: BulkFabric> Condemned<F> {
    /// Takes the QP down at once, and has it buried: destroyed when it has drained, and only then whatever it could
    /// touch is let go. Neither waits for the peer.
    pub(crate) fn bury(self) {
        self.device.gauges.closing.add();
        if let Some(Err(error)) = self.qp.as_ref().map(|qp| qp.to_error()) {
            tracing::debug!(%error, "a QP that is given up does not go to ERROR; it is destroyed as it is");
        }
        let runtime = self.device.runtime.clone();
        // If the runtime has ended, it is dropped on the spot, which buries it as well.
        runtime.spawn(self.rest());
    }

    async fn rest(mut self) {
        let began = Instant::now();
        while self.mail.outstanding() > 0 && began.elapsed() < DRAIN {
            tokio::time::sleep(LOOK).await;
        }
        loop {
            let step = tokio::task::spawn_blocking(move || {
                let wait = self.destroy();
                (self, wait)
            });
            // Dropped, or panicked: then it was dropped, too.
            let Ok((back, wait)) = step.await else { return };
            self = back;
            match wait {
                None => return,
                Some(wait) => tokio::time::sleep(wait).await,
            }
        }
    }

    /// Destroys the QP, then gives up the grant; `None` when nothing is left, else when to try again.
    fn destroy(&mut self) -> Option<Duration> {
        // The QP is in ERROR and has drained, so that nobody reaches a window any more; a QP with a bound one is not
        // destroyed.
        if let Some(Err((window, error))) = self.window.take().map(WindowOf::<F>::free) {
            tracing::error!(%error, "a window is not freed; whatever it is bound to is kept");
            self.window = Some(window);
            return Some(RETRY);
        }
        if let Some(qp) = self.qp.take() {
            let qpn = qp.qpn().get();
            if let Err((qp, error)) = QpOf::<F>::destroy(qp) {
                self.qp = Some(qp);
                if matches!(error, DestroyQpError::InUse) {
                    return Some(LOOK);
                }
                tracing::error!(%error, qpn, "a QP is not destroyed; whatever it may touch is kept");
                return Some(RETRY);
            }
            self.device.routes().remove(&qpn);
        }
        let mut step = self.grant.as_mut().map(|grant| grant.on(Event::QpGone));
        if let Some(Err((region, error))) = self.region.take().map(RegionOf::<F>::deregister) {
            tracing::error!(%error, "a grant is not deregistered; its memory is kept");
            self.region = Some(region);
            self.grant.as_mut().map(|grant| grant.on(Event::RevokeFailed));
            return Some(RETRY);
        }
        if step != Some(Step::Release(Ending::Abandoned)) {
            step = self.grant.as_mut().map(|grant| grant.on(Event::Revoked));
        }
        debug_assert!(self.grant.is_none_or(Grant::is_dead), "{step:?}");
        self.end();
        None
    }

    fn end(&mut self) {
        self.owners = None;
        self.permit = None;
        self.device.gauges.closing.sub();
    }
}

impl<F: BulkFabric> Drop for Condemned<F> {
    fn drop(&mut self) {
        if self.qp.is_none() && self.region.is_none() && self.window.is_none() {
            return;
        }
        if self.destroy().is_none() {
            return;
        }
        // The device will not: then all of it stays as long as the process.
        self.device.gauges.stuck.add();
        tracing::error!("a QP or a grant outlives its engine; its memory is leaked");
        let rest = (self.window.take(), self.qp.take(), self.region.take(), self.owners.take(), self.permit.take());
        std::mem::forget(rest);
    }
}
