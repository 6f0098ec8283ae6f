//! The owner's book: slots and leases together, so that "nobody needs it any more" and "it is freed" are one step.
//!
//! News goes in through the methods; what follows for the world outside comes out of [`Book::poll_effect`]: a right to be
//! taken back, a body to be freed. Nothing here waits, locks or reads a clock.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    ops::Range,
    time::{Duration, Instant},
};

use verbs_transport::InstanceId;

use super::{
    handle::{LeaseId, Mint, SlotId},
    lease::{Event, Lease, LeaseTimes, State, Step},
    slot::{Body, Fate, Slot, Standing},
    wire::{Chunks, Metadata, PathReason, RefusalCode, Refused},
};

#[cfg(test)]
mod tests;

/// Ceilings and times of a book.
#[derive(Clone, Copy, Debug)]
pub struct BookLimits {
    /// How long leases last.
    pub times: LeaseTimes,
    /// Rights to READ at once, those being taken back included.
    pub rights_max: usize,
    /// Leases at once of one peer.
    pub leases_per_peer: u32,
    /// Largest chunk in bytes.
    pub chunk_bytes: u32,
}

/// What the book asks of its shell.
#[derive(Debug)]
pub enum Effect<S> {
    /// Take the right of this lease back, then say [`Book::on_revoked`].
    Revoke(LeaseId),
    /// Nobody can reach these bytes any more.
    Free {
        /// Whose they were.
        slot: SlotId,
        /// Where they lie.
        body: Body<S>,
        /// What ended it.
        fate: Fate,
    },
}

/// A lease was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// The right to READ is to be made: register the slot's slice, then say [`Book::on_granted`] or
    /// [`Book::on_grant_failed`].
    MakeRight(LeaseId),
    /// By chunks.
    Chunks(LeaseId, Chunks),
}

/// What has become of a lease whose right is there now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granted {
    /// Tell the consumer.
    Tell,
    /// It ended meanwhile: nothing to tell, and the right is on its way back.
    Ended,
}

/// How a lease ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The reference stays.
    Detach,
    /// A reference goes with it.
    Release,
}

/// What there is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BookGauges {
    /// Slots that a handle can name.
    pub slots: usize,
    /// Their bytes.
    pub slot_bytes: u64,
    /// Leases.
    pub leases: usize,
    /// Rights to READ, those being taken back included.
    pub rights: usize,
    /// Slots that have ended and wait for a right to be taken back.
    pub quarantined_slots: usize,
    /// Their bytes.
    pub quarantined_bytes: u64,
}

/// What falls due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Lease(LeaseId),
    Slot(SlotId),
}

/// What ended by its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Leases.
    pub leases: u64,
    /// Slots.
    pub slots: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Book<S> {
    limits: BookLimits,
    slots: BTreeMap<SlotId, Slot<S>>,
    leases: BTreeMap<LeaseId, Lease>,
    per_peer: HashMap<InstanceId, u32>,
    due: BTreeSet<(Instant, Due)>,
    effects: VecDeque<Effect<S>>,
    slot_ids: Mint,
    lease_ids: Mint,
    gauges: BookGauges,
    closed: bool,
}

impl<S> Book<S> {
    /// An empty book.
    pub fn new(limits: BookLimits) -> Self {
        Self {
            limits,
            slots: BTreeMap::new(),
            leases: BTreeMap::new(),
            per_peer: HashMap::new(),
            due: BTreeSet::new(),
            effects: VecDeque::new(),
            slot_ids: Mint::default(),
            lease_ids: Mint::default(),
            gauges: BookGauges::default(),
            closed: false,
        }
    }

    /// What is to be done outside.
    pub fn poll_effect(&mut self) -> Option<Effect<S>> {
        self.effects.pop_front()
    }

    /// When [`Book::on_time`] has something to do next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// What there is now.
    pub const fn gauges(&self) -> BookGauges {
        self.gauges
    }

    /// Takes a payload in, with `refs` references, for `bound_to` alone if that is given.
    ///
    /// # Errors
    ///
    /// The body comes back after [`Book::close`], and when `refs` is 0, which would free it at once.
    pub fn stage(
        &mut self,
        now: Instant,
        body: Body<S>,
        refs: u32,
        ttl: Option<Duration>,
        bound_to: Option<InstanceId>,
    ) -> Result<SlotId, Body<S>> {
        if self.closed || refs == 0 {
            return Err(body);
        }
        let id = self.slot_ids.slot();
        // A time that cannot be told is never over.
        let expires = ttl.and_then(|ttl| now.checked_add(ttl));
        if let Some(at) = expires {
            self.due.insert((at, Due::Slot(id)));
        }
        self.gauges.slots += 1;
        self.gauges.slot_bytes += body.len();
        self.slots.insert(id, Slot::new(body, refs, expires, bound_to));
        Ok(id)
    }

    /// What is known of a slot. Takes no lease.
    ///
    /// # Errors
    ///
    /// The slot is unknown, or has ended.
    pub fn metadata(&self, slot: SlotId, peer: InstanceId) -> Result<Metadata, RefusalCode> {
        self.slots.get(&slot).ok_or(RefusalCode::UnknownHandle)?.metadata(peer)
    }

    /// The body of a slot that is not freed yet.
    pub fn body(&self, slot: SlotId) -> Option<&Body<S>> {
        self.slots.get(&slot).map(|slot| &slot.body)
    }

    /// Whose slot a lease reads.
    pub fn slot_of(&self, lease: LeaseId) -> Option<SlotId> {
        self.leases.get(&lease).map(|lease| lease.slot)
    }

    /// Gives `peer` a lease. `read`: whether it may READ, or why not. The owner decides, here.
    ///
    /// # Errors
    ///
    /// The slot is unknown or has ended, or the peer has too many leases.
    pub fn acquire(
        &mut self,
        now: Instant,
        slot_id: SlotId,
        peer: InstanceId,
        chunk_bytes: u32,
        read: Result<(), PathReason>,
    ) -> Result<Acquired, Refused> {
        let refuse = |code| Refused { code, detail: 0 };
        let slot = self.slots.get_mut(&slot_id).ok_or(refuse(RefusalCode::UnknownHandle))?;
        let count = self.per_peer.get(&peer).copied().unwrap_or(0);
        let max = self.limits.leases_per_peer;
        if count >= max {
            return Err(Refused { code: RefusalCode::TooMany, detail: max.into() });
        }
        let path = match &slot.body {
            // Nothing to read: a right would be of no use.
            Body::Pinned { len: 0, .. } => Err(PathReason::NotPinned),
            Body::Pinned { .. } if self.gauges.rights >= self.limits.rights_max => {
                read.and(Err(PathReason::LeaseBudget))
            }
            Body::Pinned { .. } => read,
            Body::Memory { why, .. } => Err(*why),
        };
        let chunk_bytes = chunk_bytes.min(self.limits.chunk_bytes).max(1);
        slot.lock(peer, path.is_ok()).map_err(refuse)?;
        let total_bytes = slot.body.len();
        let id = self.lease_ids.lease();
        let (state, acquired) = match path {
            Ok(()) => {
                self.gauges.rights += 1;
                (State::Making { chunk_bytes }, Acquired::MakeRight(id))
            }
            Err(reason) => {
                let chunks = Chunks { transfer: id.get(), total_bytes, chunk_bytes, reason };
                (State::Chunks { chunk_bytes, reason }, Acquired::Chunks(id, chunks))
            }
        };
        let lease = Lease::new(slot_id, peer, state, now, self.limits.times);
        self.due.insert((lease.reap_at, Due::Lease(id)));
        self.leases.insert(id, lease);
        self.per_peer.insert(peer, count + 1);
        self.gauges.leases += 1;
        Ok(acquired)
    }

    /// The slice of this lease is registered.
    pub fn on_granted(&mut self, id: LeaseId) -> Granted {
        match self.step(id, Event::Granted) {
            Step::Now(_) => Granted::Tell,
            _ => Granted::Ended,
        }
    }

    /// The slice of this lease could not be registered: its bytes go by chunks, unless it has ended meanwhile.
    pub fn on_grant_failed(&mut self, id: LeaseId) -> Option<Chunks> {
        match self.step(id, Event::GrantFailed) {
            Step::Now(State::Chunks { chunk_bytes, reason }) => {
                let slot = self.slots.get(&self.leases.get(&id)?.slot)?;
                Some(Chunks { transfer: id.get(), total_bytes: slot.body.len(), chunk_bytes, reason })
            }
            _ => None,
        }
    }

    /// The right of this lease is gone.
    pub fn on_revoked(&mut self, id: LeaseId) {
        self.step(id, Event::Revoked);
    }

    /// The bytes of one chunk: a body and the range in it.
    ///
    /// # Errors
    ///
    /// No such transfer of this peer, or no such chunk.
    pub fn pull(&self, transfer: u64, peer: InstanceId, index: u64) -> Result<(&Body<S>, Range<u64>), Refused> {
        let unknown = Refused { code: RefusalCode::UnknownTransfer, detail: 0 };
        let lease = LeaseId::new(transfer).and_then(|id| self.leases.get(&id)).ok_or(unknown)?;
        let State::Chunks { chunk_bytes, reason } = lease.state else { return Err(unknown) };
        if lease.peer != peer {
            return Err(unknown);
        }
        let body = &self.slots.get(&lease.slot).ok_or(unknown)?.body;
        let chunks = Chunks { transfer, total_bytes: body.len(), chunk_bytes, reason };
        let beyond = || Refused { code: RefusalCode::IndexBeyondEnd, detail: chunks.count() };
        let len = chunks.len_of(index).ok_or_else(beyond)?;
        let start = index * u64::from(chunk_bytes);
        Ok((body, start..start + u64::from(len)))
    }

    /// One reference more.
    ///
    /// # Errors
    ///
    /// The slot is unknown or has ended, or has as many references as can be counted.
    pub fn add_ref(&mut self, slot: SlotId, peer: InstanceId) -> Result<u32, RefusalCode> {
        self.slots.get_mut(&slot).ok_or(RefusalCode::UnknownHandle)?.add_ref(peer)
    }

    /// Lets a lease begin anew.
    ///
    /// # Errors
    ///
    /// No such lease of this peer and slot, or it is over.
    pub fn renew(&mut self, now: Instant, slot: SlotId, id: u64, peer: InstanceId) -> Result<(), RefusalCode> {
        let id = self.find(slot, id, peer)?;
        let lease = self.leases.get_mut(&id).ok_or(RefusalCode::UnknownLease)?;
        let before = lease.reap_at;
        lease.renew(now, self.limits.times)?;
        let after = lease.reap_at;
        self.due.remove(&(before, Due::Lease(id)));
        self.due.insert((after, Due::Lease(id)));
        Ok(())
    }

    /// Ends a lease. Whose it is and of what is checked before anything changes.
    ///
    /// # Errors
    ///
    /// No such lease of this peer and slot: nothing has changed.
    pub fn end(&mut self, slot: SlotId, id: u64, peer: InstanceId, how: Ending) -> Result<(), RefusalCode> {
        let id = self.find(slot, id, peer)?;
        if how == Ending::Release {
            // The lease still holds the slot: it is freed by the next step at the earliest.
            self.change(slot, |slot| slot.drop_ref(Fate::Released));
        }
        self.step(id, Event::End);
        Ok(())
    }

    /// Drops one reference of a slot without a lease: the receiver of a message gives up, or the owner itself.
    ///
    /// # Errors
    ///
    /// The slot is unknown to this peer.
    pub fn drop_ref(&mut self, slot: SlotId, peer: InstanceId, fate: Fate) -> Result<(), RefusalCode> {
        self.metadata(slot, peer)?;
        self.change(slot, |slot| slot.drop_ref(fate));
        Ok(())
    }

    /// Ends a slot, whatever references it has; leases read on until their end.
    pub fn withdraw(&mut self, slot: SlotId, fate: Fate) {
        self.change(slot, |slot| slot.close(fate));
    }

    /// Ends what is overdue.
    pub fn on_time(&mut self, now: Instant) -> Reaped {
        let mut reaped = Reaped::default();
        while let Some(&(at, due)) = self.due.first().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, due));
            match due {
                Due::Lease(id) => {
                    reaped.leases += 1;
                    self.step(id, Event::End);
                }
                Due::Slot(id) => {
                    reaped.slots += 1;
                    self.change(id, |slot| slot.close(Fate::Expired));
                }
            }
        }
        reaped
    }

    /// The peer is gone, and so is its bulk QP: its leases end at once. Gives how many.
    pub fn end_leases_of(&mut self, peer: InstanceId) -> u64 {
        let theirs = |(_, lease): &(&LeaseId, &Lease)| lease.peer == peer && lease.state.is_live();
        let ids: Vec<LeaseId> = self.leases.iter().filter(theirs).map(|(id, _)| *id).collect();
        for &id in &ids {
            self.step(id, Event::End);
        }
        ids.len() as u64
    }

    /// What was for this peer alone ends, now or at `at`.
    pub fn end_slots_for(&mut self, peer: InstanceId, at: Option<Instant>) {
        let theirs = |(_, slot): &(&SlotId, &Slot<S>)| slot.bound_to == Some(peer) && slot.standing() == Standing::Open;
        let ids: Vec<SlotId> = self.slots.iter().filter(theirs).map(|(id, _)| *id).collect();
        for id in ids {
            match at {
                None => self.withdraw(id, Fate::PeerGone),
                Some(at) => self.hasten(id, at),
            }
        }
    }

    fn hasten(&mut self, id: SlotId, at: Instant) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        if slot.expires.is_none_or(|expires| at < expires) {
            if let Some(before) = slot.expires.replace(at) {
                self.due.remove(&(before, Due::Slot(id)));
            }
            self.due.insert((at, Due::Slot(id)));
        }
    }

    /// Ends everything and takes nothing more. Rights must still be taken back.
    pub fn close(&mut self) {
        self.closed = true;
        let slots: Vec<SlotId> = self.slots.keys().copied().collect();
        for id in slots {
            self.withdraw(id, Fate::ShutDown);
        }
        let leases: Vec<LeaseId> = self.leases.keys().copied().collect();
        for id in leases {
            self.step(id, Event::End);
        }
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty() && self.leases.is_empty() && self.effects.is_empty()
    }

    /// The lease, if it is of this peer and slot and lives.
    fn find(&self, slot: SlotId, id: u64, peer: InstanceId) -> Result<LeaseId, RefusalCode> {
        LeaseId::new(id)
            .filter(|id| {
                let lease = self.leases.get(id);
                lease.is_some_and(|lease| lease.slot == slot && lease.peer == peer && lease.state.is_live())
            })
            .ok_or(RefusalCode::UnknownLease)
    }

    /// One event of one lease, and all that follows from it.
    fn step(&mut self, id: LeaseId, event: Event) -> Step {
        let Some(lease) = self.leases.get_mut(&id) else { return Step::Stray };
        let slot = lease.slot;
        let step = lease.state.on(event);
        match step {
            Step::Now(state) => {
                lease.state = state;
                // The right that was being made will not be.
                if matches!(state, State::Chunks { .. }) {
                    self.gauges.rights -= 1;
                    self.change(slot, Slot::drop_right);
                }
            }
            Step::EndedRevoke => {
                lease.state = State::Revoking;
                self.unlist(id);
                self.change(slot, Slot::unlock);
                self.effects.push_back(Effect::Revoke(id));
            }
            Step::EndedWait => {
                lease.state = State::EndedMaking;
                self.unlist(id);
                self.change(slot, Slot::unlock);
            }
            Step::Ended => {
                self.unlist(id);
                self.leases.remove(&id);
                self.change(slot, Slot::unlock);
            }
            Step::Revoke => {
                lease.state = State::Revoking;
                self.effects.push_back(Effect::Revoke(id));
            }
            Step::Gone => {
                self.leases.remove(&id);
                self.gauges.rights -= 1;
                self.change(slot, Slot::drop_right);
            }
            Step::Stray => {}
        }
        step
    }

    /// A lease lives no more.
    fn unlist(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(&id) else { return };
        self.due.remove(&(lease.reap_at, Due::Lease(id)));
        self.gauges.leases -= 1;
        if let Some(count) = self.per_peer.get_mut(&lease.peer) {
            *count -= 1;
            if *count == 0 {
                self.per_peer.remove(&lease.peer);
            }
        }
    }

    /// Changes a slot; the gauges follow, and it is freed if nobody needs it any more.
    fn change(&mut self, id: SlotId, change: impl FnOnce(&mut Slot<S>)) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        let named = |standing| matches!(standing, Standing::Open | Standing::Closed);
        let (before, bytes) = (slot.standing(), slot.body.len());
        change(slot);
        let (after, expires, fate) = (slot.standing(), slot.expires, slot.fate());
        if named(before) && !named(after) {
            self.gauges.slots -= 1;
            self.gauges.slot_bytes -= bytes;
        }
        if before != Standing::Held && after == Standing::Held {
            self.gauges.quarantined_slots += 1;
            self.gauges.quarantined_bytes += bytes;
        }
        if before == Standing::Held && after == Standing::Free {
            self.gauges.quarantined_slots -= 1;
            self.gauges.quarantined_bytes -= bytes;
        }
        if before == Standing::Open && after != Standing::Open {
            if let Some(at) = expires {
                self.due.remove(&(at, Due::Slot(id)));
            }
        }
        if let (Standing::Free, Some(fate)) = (after, fate) {
            if let Some(slot) = self.slots.remove(&id) {
                self.effects.push_back(Effect::Free { slot: id, body: slot.body, fate });
            }
        }
    }
}
