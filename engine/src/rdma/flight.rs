//! One operation at its source, with all that its grant covers.

use std::sync::Arc;

use verbs_transport::fabric::bulk::{Arena, BulkFabric, BulkRegion as _, Span};

use super::{
    device::{Device, RegionOf},
    grant::{Event, Grant, Step},
    link::Link,
    staging::Lent,
};
use crate::{
    budget::Charge,
    control::{Access, Admitted},
};

/// What a grant covers, in the order in which it goes.
pub(super) struct Owners<F: BulkFabric> {
    pub(super) staging: Staging<F>,
    pub(super) access: Access,
    pub(super) _charge: Charge,
    /// Last: who waits for the source to be quiet finds everything gone.
    pub(super) _inside: Admitted,
}

/// Where the bytes of a grant lie.
pub(super) enum Staging<F: BulkFabric> {
    /// To be registered for the grant alone.
    Plain(Lent<Arc<Arena>>),
    /// Registered, with no right of anybody's, for a window over part of it.
    Windowed(Lent<RegionOf<F>>),
}

impl<F: BulkFabric> Staging<F> {
    pub(super) fn span(&self, bytes: usize) -> Option<Span> {
        match self {
            Self::Plain(arena) => Span::new(Arc::clone(arena) as Arc<_>, &(0..bytes)),
            Self::Windowed(region) => Some(region.span().clone()),
        }
    }

    /// Whether bytes of other peers' may lie there.
    pub(super) fn is_foreign(&self) -> bool {
        match self {
            Self::Plain(arena) => arena.is_foreign(),
            Self::Windowed(region) => region.is_foreign(),
        }
    }

    /// Zeroes the first `bytes`.
    pub(super) fn clear(&self, bytes: usize) -> Option<()> {
        const ZEROS: &[u8] = &[0; 64 << 10];
        let span = self.span(bytes)?;
        for at in (0..bytes).step_by(ZEROS.len()) {
            span.write(at, &ZEROS[..ZEROS.len().min(bytes - at)]).ok()?;
        }
        Some(())
    }
}

/// One operation. Dropped before its end it is abandoned: the QP goes first, then everything else.
pub(super) struct Flight<F: BulkFabric> {
    pub(super) device: Arc<Device<F>>,
    pub(super) grant: Option<Grant>,
    pub(super) region: Option<RegionOf<F>>,
    pub(super) link: Option<Link<F>>,
    pub(super) owners: Option<Owners<F>>,
}

impl<F: BulkFabric> Drop for Flight<F> {
    fn drop(&mut self) {
        let Some(mut grant) = self.grant.take() else { return };
        self.device.gauges.grants.sub();
        let Some(link) = self.link.take() else { return };
        let mut step = grant.on(Event::Abandon { usable: link.is_rts() });
        if let (Step::Invalidate, Some(key)) = (step, grant.key()) {
            let done = link.invalidate(key);
            step = grant.on(if done { Event::Revoked } else { Event::RevokeFailed });
        }
        tracing::debug!(?step, "a grant ends without its receipt");
        // Also where the grant is dead by now: its bytes wait for the QP to go, as everything does that it has touched.
        let grant = (!grant.is_dead()).then_some(grant);
        link.condemn(grant, self.region.take(), Box::new(self.owners.take()));
    }
}
