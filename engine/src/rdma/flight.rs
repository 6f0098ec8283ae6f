//! One grant of a source at work, with all that it covers: filled, bound, settled, committed.

use std::{ops::Range, sync::Arc};

use verbs_transport::fabric::bulk::{
    Access as Rights, Arena, BulkFabric, BulkPort as _, BulkRegion as _, MemoryOwner, Span,
};

use super::{
    device::{Device, RegionOf},
    grant::{Ending, Event, Form, Grant, Step},
    guard::{Part, RailGuard},
    link::Link,
    mailbox::WaitError,
    source::Stop,
    staging::Lent,
    wire::GrantTerms,
};
use crate::{Direction, Status, deadline::Deadline, memory::DirectRange, tcp::LineError};

/// What a grant covers, in the order in which it goes.
pub(super) struct Owners<F: BulkFabric> {
    pub(super) staging: Staging<F>,
    /// Which of the request's bytes are staged.
    pub(super) bytes: Range<u64>,
    pub(super) _guard: RailGuard,
}

/// Where the bytes of a grant lie.
pub(super) enum Staging<F: BulkFabric> {
    /// To be registered for the grant alone.
    Plain(Lent<Arc<Arena>>),
    /// Registered, with no right of anybody's, for a window over part of it.
    Windowed(Lent<RegionOf<F>>),
    /// Nowhere else: the range itself is granted. It is here once it is lent, until a device has it.
    Direct(Option<DirectRange>),
}

impl<F: BulkFabric> Staging<F> {
    pub(super) fn span(&self, bytes: usize) -> Option<Span> {
        match self {
            Self::Plain(arena) => Span::new(Arc::clone(arena) as Arc<_>, &(0..bytes)),
            Self::Windowed(region) => Some(region.span().clone()),
            Self::Direct(_) => None,
        }
    }

    /// Whether bytes of other peers' may lie there.
    pub(super) fn is_foreign(&self) -> bool {
        match self {
            Self::Plain(arena) => arena.is_foreign(),
            Self::Windowed(region) => region.is_foreign(),
            Self::Direct(_) => false,
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
    /// Of the bytes that are granted, for this grant alone.
    pub(super) region: Option<RegionOf<F>>,
    pub(super) link: Option<Link<F>>,
    pub(super) owners: Option<Owners<F>>,
}

impl<F: BulkFabric> Owners<F> {
    /// For [`Guard`](super::guard::Guard).
    pub(super) fn part(&self) -> Part<'_, F> {
        (&self.staging, &self.bytes)
    }

    fn len(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }
}

impl<F: BulkFabric> Flight<F> {
    pub(super) fn new(link: Link<F>, generation: u64, owners: Owners<F>) -> Self {
        let grant = Grant::new(link.form, generation, link.qpn());
        link.device.gauges.grants.add();
        Self {
            device: Arc::clone(&link.device),
            grant: Some(grant),
            region: None,
            link: Some(link),
            owners: Some(owners),
        }
    }

    pub(super) fn part(&self) -> Option<Part<'_, F>> {
        self.owners.as_ref().map(Owners::part)
    }

    /// The bytes of a direct operation, which are busy until the device has let go of them.
    pub(super) fn take_range(&mut self, range: DirectRange) -> Result<(), Stop> {
        self.owners.as_mut().ok_or_else(internal)?.staging = Staging::Direct(Some(range));
        Ok(())
    }

    /// Before the bytes of a WRITE come: none of anybody else's may lie there, as what the peer leaves unwritten, against
    /// the rules, is committed with the rest.
    pub(super) fn clean(&self) -> Result<(), Stop> {
        let owners = self.owners.as_ref().ok_or_else(internal)?;
        if owners.staging.is_foreign() {
            let bytes = usize::try_from(owners.len()).map_err(|_| internal())?;
            owners.staging.clear(bytes).ok_or_else(internal)?;
        }
        Ok(())
    }

    /// Gives the right to exactly the granted bytes, and says how to use it.
    pub(super) fn bind(&mut self, deadline: Deadline, direction: Direction) -> Result<GrantTerms, Stop> {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "a peer cannot be given its right");
            Stop::Refuse(Status::BackendError)
        };
        let Self { grant: Some(grant), owners: Some(owners), link: Some(link), region, .. } = self else {
            return Err(internal());
        };
        let length = owners.len();
        let bytes = usize::try_from(length).map_err(|_| internal())?;
        let rights = match direction {
            Direction::Read => Rights::SOURCE,
            Direction::Write => Rights::PUT_TARGET,
        };
        let plain: Option<Arc<dyn MemoryOwner>> = match &mut owners.staging {
            Staging::Plain(arena) => Some(Arc::clone(arena) as Arc<_>),
            Staging::Windowed(_) => None,
            Staging::Direct(range) => Some(range.take().ok_or_else(internal)?.in_place()),
        };
        let plain = match (link.form, plain) {
            (Form::Window, Some(memory)) => {
                // For the window alone: it gives nobody a right.
                let local = if direction == Direction::Read { Rights::LOCAL_READ } else { Rights::DESTINATION };
                let made = link.device.port.register(memory, 0..bytes, Rights::WINDOWS.and(local));
                *region = Some(made.map_err(|error| failed(&error))?);
                None
            }
            (_, plain) => plain,
        };
        let step = grant.on(Event::Bind);
        debug_assert_eq!(step, Step::Bind);
        let windowed = match &owners.staging {
            Staging::Windowed(staged) => Some(&**staged),
            _ => region.as_ref(),
        };
        let (key, address) = match (plain, windowed) {
            (Some(memory), _) => {
                let made = link.device.port.register(memory, 0..bytes, rights);
                let made = region.insert(made.map_err(|error| {
                    grant.on(Event::BindFailed);
                    failed(&error)
                })?);
                (made.rkey().ok_or_else(internal)?.0, made.addr())
            }
            (None, Some(registered)) => {
                let bound = link.bind(registered, bytes, rights, deadline);
                let key = bound.map_err(|error| {
                    grant.on(Event::BindFailed);
                    failed(&error)
                })?;
                (key, registered.addr())
            }
            (None, None) => return Err(internal()),
        };
        // Not before its completion: what is told from here on holds.
        let step = grant.on(Event::Bound { key });
        debug_assert_eq!(step, Step::Publish);
        let left = deadline.remaining().ok_or(LineError::TimedOut)?;
        let valid_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
        Ok(GrantTerms { form: link.form, key, address, length, valid_ms })
    }

    /// Waits for the receipt, and takes the right away. What the grant has covered is to be committed, or let go.
    pub(super) fn settle(mut self, deadline: Deadline) -> Result<(Link<F>, Owners<F>), Stop> {
        let (Some(grant), Some(link)) = (&mut self.grant, &self.link) else { return Err(internal()) };
        let (marker, bytes) = link.mail.wait_receipt(deadline).map_err(|error| match error {
            WaitError::TimedOut => Stop::Line(LineError::TimedOut),
            WaitError::Stopped => Stop::Line(LineError::Stopped),
            WaitError::Broken(error) => {
                tracing::debug!(%error, "the QP of a grant broke before its receipt");
                Stop::Refuse(Status::BackendError)
            }
        })?;
        // The mailbox is the QP's own.
        let step = grant.on(Event::Receipt { qpn: link.qpn(), marker });
        let due = match link.form {
            Form::Registration => Step::Unbind,
            // The peer's own invalidation was the end of it.
            Form::Window => Step::Release(Ending::Used),
        };
        if step != due || bytes != 0 {
            tracing::warn!(?marker, bytes, "a peer's marker is not that of its grant; its connection is closed");
            return Err(Stop::Refuse(Status::ProtocolError));
        }
        if let Err(error) = link.post_receive() {
            tracing::warn!(%error, "no receive for the next operation");
            return Err(Stop::Refuse(Status::BackendError));
        }
        if let Some(Err((region, error))) = self.region.take().map(RegionOf::<F>::deregister) {
            tracing::error!(%error, "a grant is not deregistered; its QP goes first");
            self.region = Some(region);
            grant.on(Event::RevokeFailed);
            return Err(Stop::Refuse(Status::BackendError));
        }
        grant.on(Event::Revoked);
        if !grant.is_dead() {
            return Err(internal());
        }
        self.grant = None;
        self.device.gauges.grants.sub();
        let (owners, link) = (self.owners.take(), self.link.take());
        link.zip(owners).ok_or_else(internal)
    }
}

fn internal() -> Stop {
    Stop::Refuse(Status::InternalError)
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
