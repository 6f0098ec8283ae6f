//! What a request of a peer covers at its source: held until no device can reach any of it, by way of any rail.

use std::{
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use verbs_transport::fabric::bulk::BulkFabric;

use super::{
    device::Gauge,
    flight::Staging,
    rails::parent::{Event, Parent, Step},
    source::Stop,
};
use crate::{
    Direction, Status,
    budget::Charge,
    control::{Access, Admitted},
    memory::{DirectRange, Patience, Registration, Use},
    tcp::LineError,
};

/// Range and budget, in the order in which they go.
struct Held {
    access: Access,
    _charges: Vec<Charge>,
    /// Last: who waits for the source to be quiet finds everything gone.
    _inside: Admitted,
}

/// One request. What it covers goes when [`Parent`] says so.
pub(super) struct Guard {
    parent: Mutex<Parent>,
    held: Mutex<Option<Held>>,
    /// Counts requests over several rails.
    live: Option<Arc<Gauge>>,
}

/// A rail's part in it: for as long as a device may reach something by way of that rail.
pub(super) struct RailGuard {
    guard: Arc<Guard>,
    rail: u8,
}

/// Staged bytes of one rail, and which of the request's they are.
pub(super) type Part<'a, F> = (&'a Staging<F>, &'a Range<u64>);

impl Guard {
    pub(super) fn new(rails: usize, access: Access, charges: Vec<Charge>, inside: Admitted) -> Self {
        let held = Some(Held { access, _charges: charges, _inside: inside });
        Self { parent: Mutex::new(Parent::new(rails)), held: Mutex::new(held), live: None }
    }

    /// Counted from now on, until it lets go.
    pub(super) fn counted(mut self, live: &Arc<Gauge>) -> Self {
        live.add();
        self.live = Some(Arc::clone(live));
        self
    }

    /// Everything that one rail takes is there.
    pub(super) fn room(self: &Arc<Self>, rail: u8) -> (RailGuard, Step) {
        let step = self.on(Event::Room(rail));
        (RailGuard { guard: Arc::clone(self), rail }, step)
    }

    pub(super) fn on(&self, event: Event) -> Step {
        let step = self.parent.lock().unwrap_or_else(PoisonError::into_inner).on(event);
        if step == Step::Release {
            let held = self.held().take();
            drop(held);
        }
        step
    }

    /// One moment's bytes of the range into all parts, under the allocation's lock.
    pub(super) fn fill<F: BulkFabric>(&self, parts: &[Part<'_, F>], patience: Patience<'_>) -> Result<(), Stop> {
        let (registration, place) = self.range()?;
        let filled = registration.read(place, patience, |range| {
            parts.iter().try_for_each(|(staging, bytes)| {
                let from = range.get(within(bytes)?)?;
                staging.span(from.len())?.write(0, from).ok()
            })
        });
        filled.map_err(LineError::from)?.ok_or_else(internal)
    }

    /// All parts into the range, in one step under the allocation's lock.
    pub(super) fn commit<F: BulkFabric>(&self, parts: &[Part<'_, F>], patience: Patience<'_>) -> Result<(), Stop> {
        let (registration, place) = self.range()?;
        let committed = registration.write(place, patience, |range| {
            parts.iter().try_for_each(|(staging, bytes)| {
                let into = range.get_mut(within(bytes)?)?;
                staging.span(into.len())?.read(0, into).ok()
            })
        });
        committed.map_err(LineError::from)?.ok_or_else(internal)
    }

    /// The range itself, for a direct operation: busy until a device has let go of it.
    pub(super) fn lend(&self, direction: Direction, patience: Patience<'_>) -> Result<DirectRange, Stop> {
        let (registration, place) = self.range()?;
        let by = if direction == Direction::Read { Use::Read } else { Use::Write };
        Ok(registration.lend(place, by, patience).map_err(LineError::from)?)
    }

    /// Whoever waits for its bytes does so without our locks.
    fn range(&self) -> Result<(Arc<Registration>, (u64, u64)), Stop> {
        let held = self.held();
        let access = &held.as_ref().ok_or_else(internal)?.access;
        Ok((Arc::clone(&access.registration), access.place()))
    }

    fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn within(bytes: &Range<u64>) -> Option<Range<usize>> {
    Some(usize::try_from(bytes.start).ok()?..usize::try_from(bytes.end).ok()?)
}

fn internal() -> Stop {
    Stop::Refuse(Status::InternalError)
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(live) = &self.live {
            live.sub();
        }
    }
}

impl Drop for RailGuard {
    fn drop(&mut self) {
        self.guard.on(Event::Gone(self.rail));
    }
}
