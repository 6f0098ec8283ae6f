//! The consumer's calls, one by one: for applications that keep leases themselves. [`Rendezvous::pull`] is the short way.

use bytes::Bytes;
use verbs_transport::fabric::Fabric;

use super::{Destination, Lease, Rendezvous, puller, sink::Sink};
use crate::{
    error::{AskError, PullError},
    proto::{
        book::Ending,
        handle::{Handle, SlotId},
        wire::{Answer, Call, Metadata, RefusalCode},
    },
};

impl<F: Fabric> Rendezvous<F> {
    /// Length, references and kind of a staged payload. Takes no lease.
    ///
    /// # Errors
    ///
    /// [`AskError`].
    pub async fn metadata(&self, handle: Handle) -> Result<Metadata, AskError> {
        let owner = self.inner.reach(handle).await?;
        if owner == self.inner.worker.instance() {
            let told = SlotId::new(handle.slot).ok_or(RefusalCode::UnknownHandle);
            let told = told.and_then(|slot| self.inner.look(|book| book.metadata(slot, owner)));
            return told.map_err(|code| AskError::Refused { peer: owner, code, detail: 0 });
        }
        match self.inner.ask_and_wait(owner, Call::Metadata { handle }).await?.0 {
            Answer::Metadata(metadata) => Ok(metadata),
            other => Err(AskError::bad(owner, format_args!("{other:?} to metadata"))),
        }
    }

    /// The bytes, and the lease under which they were read.
    ///
    /// # Errors
    ///
    /// [`PullError`].
    pub async fn get(&self, handle: Handle) -> Result<(Bytes, Lease), PullError> {
        let mut bytes = Vec::new();
        let (lease, _) = puller::pull(&self.inner, handle, &mut Sink::Vec(&mut bytes), None).await?;
        Ok((bytes.into(), lease))
    }

    /// The bytes into memory of the caller's. A slice that is too small is refused before any transfer, a vector grows.
    ///
    /// # Errors
    ///
    /// [`PullError`].
    pub async fn get_into<'d>(
        &self,
        handle: Handle,
        destination: impl Into<Destination<'d>>,
    ) -> Result<Lease, PullError> {
        let mut sink = destination.into().into_sink();
        Ok(puller::pull(&self.inner, handle, &mut sink, None).await?.0)
    }

    /// One reference more; gives how many there are. When this returns, the owner has counted it.
    ///
    /// # Errors
    ///
    /// [`AskError`].
    pub async fn ref_handle(&self, handle: Handle) -> Result<u32, AskError> {
        let owner = self.inner.reach(handle).await?;
        if owner == self.inner.worker.instance() {
            let counted = SlotId::new(handle.slot).ok_or(RefusalCode::UnknownHandle);
            let counted = counted.and_then(|slot| self.inner.with_book(|book| book.add_ref(slot, owner)));
            return counted.map_err(|code| AskError::Refused { peer: owner, code, detail: 0 });
        }
        match self.inner.ask_and_wait(owner, Call::Ref { handle }).await?.0 {
            Answer::Referenced { refcount } => Ok(refcount),
            other => Err(AskError::bad(owner, format_args!("{other:?} to ref"))),
        }
    }

    /// More time for a lease: from now on it lasts as long as a new one.
    ///
    /// # Errors
    ///
    /// [`AskError`]; refused when it is over.
    pub async fn renew(&self, lease: &mut Lease) -> Result<(), AskError> {
        self.inner.renew(lease).await
    }

    /// Ends a lease; the references stay. Not answered: a lost one is healed by the owner's reaper.
    pub fn detach(&self, lease: Lease) {
        lease.end(Ending::Detach);
    }

    /// Ends a lease and drops one reference. Not answered; without effect when the lease is over already, so release
    /// within its time.
    pub fn release(&self, lease: Lease) {
        lease.end(Ending::Release);
    }
}
