//! One staged payload: how many references, leases and rights stand between it and being freed.
//!
//! ```text
//! open      references left and time left: leases are given
//! closed    no reference or no time left, but a lease lives: no new leases, the old ones read on
//! held      no lease lives, but a peer could still READ: the bytes stay, and name nothing any more
//! free      nothing of this
//! ```

use std::time::Instant;

use bytes::Bytes;
use verbs_transport::InstanceId;

use super::wire::{Metadata, PathReason, RefusalCode};

/// Where the bytes of a slot lie. The kind says how they can go: there is no second field for it.
#[derive(Debug)]
pub enum Body<S> {
    /// In ordinary memory: by chunks.
    Memory {
        /// The bytes.
        bytes: Bytes,
        /// Why not in an arena.
        why: PathReason,
    },
    /// In an arena: by READ or by chunks.
    Pinned {
        /// The slice.
        slice: S,
        /// Bytes of the payload within it.
        len: u64,
    },
}

impl<S> Body<S> {
    /// Bytes of the payload.
    pub fn len(&self) -> u64 {
        match self {
            Self::Memory { bytes, .. } => bytes.len() as u64,
            Self::Pinned { len, .. } => *len,
        }
    }

    /// Whether the payload has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a peer can READ it.
    pub const fn is_pinned(&self) -> bool {
        matches!(self, Self::Pinned { .. })
    }
}

/// What ended a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Fate {
    /// The last reference was released.
    Released,
    /// Its time was over before that.
    Expired,
    /// The receiver of a message gave up on it.
    Refused,
    /// The owner took it back.
    Withdrawn,
    /// The peer that it was for is gone.
    PeerGone,
    /// The owner shut down.
    ShutDown,
}

impl Fate {
    /// The name in counters and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Refused => "refused",
            Self::Withdrawn => "withdrawn",
            Self::PeerGone => "peer_gone",
            Self::ShutDown => "shut_down",
        }
    }
}

/// Where a slot stands; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Leases are given.
    Open,
    /// The old leases read on.
    Closed,
    /// Only rights are left.
    Held,
    /// Nothing is.
    Free,
}

/// One staged payload.
#[derive(Debug)]
pub(super) struct Slot<S> {
    pub(super) body: Body<S>,
    /// Only this peer may have it; `None`: whoever knows the handle.
    pub(super) bound_to: Option<InstanceId>,
    pub(super) expires: Option<Instant>,
    refs: u32,
    leases: u32,
    /// Registrations of its slice that exist, or are being made.
    rights: u32,
    fate: Option<Fate>,
}

impl<S> Slot<S> {
    pub(super) const fn new(body: Body<S>, refs: u32, expires: Option<Instant>, bound_to: Option<InstanceId>) -> Self {
        Self { body, bound_to, expires, refs, leases: 0, rights: 0, fate: None }
    }

    pub(super) const fn standing(&self) -> Standing {
        match (self.fate, self.leases, self.rights) {
            (None, ..) => Standing::Open,
            (Some(_), 1.., _) => Standing::Closed,
            (Some(_), 0, 1..) => Standing::Held,
            (Some(_), 0, 0) => Standing::Free,
        }
    }

    /// What ended it, once it has ended.
    pub(super) const fn fate(&self) -> Option<Fate> {
        self.fate
    }

    fn open_for(&self, peer: InstanceId) -> Result<(), RefusalCode> {
        if self.bound_to.is_some_and(|only| only != peer) {
            return Err(RefusalCode::UnknownHandle);
        }
        match self.standing() {
            Standing::Open => Ok(()),
            Standing::Closed => Err(RefusalCode::Expired),
            Standing::Held | Standing::Free => Err(RefusalCode::UnknownHandle),
        }
    }

    pub(super) fn metadata(&self, peer: InstanceId) -> Result<Metadata, RefusalCode> {
        self.open_for(peer)?;
        Ok(Metadata { total_bytes: self.body.len(), refcount: self.refs, pinned: self.body.is_pinned() })
    }

    /// One lease more, with or without the right to READ.
    pub(super) fn lock(&mut self, peer: InstanceId, right: bool) -> Result<(), RefusalCode> {
        self.open_for(peer)?;
        self.leases = self.leases.checked_add(1).ok_or(RefusalCode::TooMany)?;
        self.rights += u32::from(right);
        Ok(())
    }

    /// One lease less; its right, if it had one, stays until [`Slot::drop_right`].
    pub(super) fn unlock(&mut self) {
        assert!(self.leases > 0, "each lease was counted");
        self.leases -= 1;
    }

    pub(super) fn drop_right(&mut self) {
        assert!(self.rights > 0, "each right was counted");
        self.rights -= 1;
    }

    pub(super) fn add_ref(&mut self, peer: InstanceId) -> Result<u32, RefusalCode> {
        self.open_for(peer)?;
        self.refs = self.refs.checked_add(1).ok_or(RefusalCode::TooMany)?;
        Ok(self.refs)
    }

    /// One reference less; at the last one the slot ends. Without effect on one that has ended.
    pub(super) fn drop_ref(&mut self, fate: Fate) {
        self.refs = self.refs.saturating_sub(1);
        if self.refs == 0 {
            self.close(fate);
        }
    }

    /// Ends the slot, whatever references there are.
    pub(super) fn close(&mut self, fate: Fate) {
        self.refs = 0;
        self.fate.get_or_insert(fate);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: InstanceId = InstanceId(1);

    fn slot(refs: u32) -> Slot<()> {
        Slot::new(Body::Pinned { slice: (), len: 10 }, refs, None, None)
    }

    /// R-57.
    #[test]
    fn freed_exactly_when_no_reference_lease_and_right_is_left() {
        let mut slot = slot(1);
        slot.lock(A, true).unwrap();
        slot.lock(A, false).unwrap();
        slot.drop_ref(Fate::Released);
        assert_eq!(slot.standing(), Standing::Closed);
        slot.unlock();
        assert_eq!(slot.standing(), Standing::Closed);
        slot.unlock();
        assert_eq!(slot.standing(), Standing::Held);
        slot.drop_right();
        assert_eq!((slot.standing(), slot.fate()), (Standing::Free, Some(Fate::Released)));
    }

    /// Every call in every standing.
    #[test]
    fn only_an_open_slot_gives_leases_references_and_metadata() {
        let all = |slot: &mut Slot<()>| {
            [slot.metadata(A).map(drop), slot.add_ref(A).map(drop), slot.lock(A, false)].map(Result::err)
        };
        assert_eq!(all(&mut slot(1)), [None; 3]);
        let mut closed = slot(1);
        closed.lock(A, true).unwrap();
        closed.close(Fate::Expired);
        assert_eq!(all(&mut closed), [Some(RefusalCode::Expired); 3]);
        closed.unlock();
        assert_eq!((closed.standing(), all(&mut closed)), (Standing::Held, [Some(RefusalCode::UnknownHandle); 3]));
        closed.drop_right();
        assert_eq!((closed.standing(), all(&mut closed)), (Standing::Free, [Some(RefusalCode::UnknownHandle); 3]));
    }

    #[test]
    fn the_first_cause_is_its_fate() {
        let mut slot = slot(2);
        slot.drop_ref(Fate::Released);
        assert_eq!(slot.fate(), None);
        slot.close(Fate::Expired);
        slot.drop_ref(Fate::Released);
        assert_eq!(slot.fate(), Some(Fate::Expired));
    }

    #[test]
    fn a_bound_slot_is_unknown_to_others() {
        let mut slot =
            Slot::<()>::new(Body::Memory { bytes: Bytes::new(), why: PathReason::NotPinned }, 1, None, Some(A));
        assert_eq!(slot.metadata(InstanceId(2)), Err(RefusalCode::UnknownHandle));
        assert_eq!(slot.lock(InstanceId(2), false), Err(RefusalCode::UnknownHandle));
        assert!(slot.metadata(A).is_ok());
    }

    #[test]
    fn references_do_not_overflow() {
        assert_eq!(slot(u32::MAX).add_ref(A), Err(RefusalCode::TooMany));
    }
}
