//! A lease in the consumer's hands.

use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use verbs_transport::{InstanceId, fabric::Fabric};

use super::inner::{Inner, now};
use crate::{
    error::AskError,
    proto::{
        book::Ending,
        handle::{Handle, SlotId},
        tenure::Tenure,
        wire::{Answer, Call},
    },
    read_path::Held,
};

/// The right to read one staged payload, for a while. Dropping it gives it back, like
/// [`Rendezvous::detach`](super::Rendezvous::detach); the owner ends it by itself when its time is over.
#[must_use = "a lease that is dropped is given back"]
pub struct Lease {
    pub(super) owner: InstanceId,
    pub(super) handle: Handle,
    pub(super) id: u64,
    pub(super) tenure: Tenure,
    /// Given back when the last holder lets go: READs that are under way hold it, too.
    hold: Arc<Hold>,
}

/// Gives the lease back when it is dropped.
struct Hold {
    owner: InstanceId,
    handle: Handle,
    id: u64,
    release: AtomicBool,
    ender: Box<dyn Ender>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let how = if *self.release.get_mut() { Ending::Release } else { Ending::Detach };
        self.ender.end(self.owner, self.handle, self.id, how);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease {} on {}", self.id, self.handle)
    }
}

impl Lease {
    pub(super) fn new<F: Fabric>(
        inner: &Arc<Inner<F>>,
        owner: InstanceId,
        handle: Handle,
        id: u64,
        asked: Instant,
        lasts: Duration,
    ) -> Self {
        let tenure = Tenure::new(asked, lasts, inner.config.lease_margin);
        let ender = Box::new(Arc::downgrade(inner));
        let hold = Arc::new(Hold { owner, handle, id, release: AtomicBool::new(false), ender });
        Self { owner, handle, id, tenure, hold }
    }

    /// Of what.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The owner's number for it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// How long it lasts yet, by this side's count, which ends before the owner's.
    pub fn left(&self) -> Duration {
        self.tenure.ends_at().saturating_duration_since(now())
    }

    pub(super) fn end(self, how: Ending) {
        self.hold.release.store(how == Ending::Release, Ordering::Relaxed);
    }

    /// As long as this is kept, the lease is not given back.
    pub(super) fn hold(&self) -> Held {
        self.hold.clone()
    }
}

/// Tells the owner, whatever fabric is between.
trait Ender: Send + Sync {
    fn end(&self, owner: InstanceId, handle: Handle, lease: u64, how: Ending);
}

impl<F: Fabric> Ender for Weak<Inner<F>> {
    fn end(&self, owner: InstanceId, handle: Handle, lease: u64, how: Ending) {
        let Some(inner) = self.upgrade() else { return };
        if owner == inner.worker.instance() {
            inner.end_locally(handle, lease, how);
        } else {
            inner.tell(
                owner,
                match how {
                    Ending::Detach => Call::Detach { handle, lease },
                    Ending::Release => Call::Release { handle, lease },
                },
            );
        }
    }
}

impl<F: Fabric> Inner<F> {
    fn end_locally(self: &Arc<Self>, handle: Handle, lease: u64, how: Ending) {
        let me = self.worker.instance();
        let Some(slot) = SlotId::new(handle.slot) else { return };
        match self.with_book(|book| book.end(slot, lease, me, how)) {
            Ok(()) => self.counters.leases_ended.add(1),
            Err(_) => self.counters.leases_mismatched.add(1),
        }
    }

    /// Asks for more time.
    pub(super) async fn renew(self: &Arc<Self>, lease: &mut Lease) -> Result<(), AskError> {
        let (owner, handle, id) = (lease.owner, lease.handle, lease.id);
        let asked = now();
        let lasts = if owner == self.worker.instance() {
            let slot = SlotId::new(handle.slot);
            let renewed = slot.map(|slot| self.with_book(|book| book.renew(asked, slot, id, owner)));
            if let Some(Err(code)) = renewed {
                return Err(AskError::Refused { peer: owner, code, detail: 0 });
            }
            self.config.lease
        } else {
            match self.ask_and_wait(owner, Call::Renew { handle, lease: id }).await?.0 {
                Answer::Renewed { lease_ms } => Duration::from_millis(lease_ms.into()),
                other => return Err(AskError::bad(owner, format_args!("{other:?} to renew"))),
            }
        };
        lease.tenure.renewed(asked, lasts);
        Ok(())
    }
}
