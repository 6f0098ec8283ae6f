//! The owner's calls.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use verbs_transport::{InstanceId, fabric::Fabric};

use super::{
    Rendezvous,
    inner::{Inner, SourceSlice, now},
};
use crate::{
    arena::PoolError,
    error::StageError,
    proto::{
        handle::{Handle, SlotId},
        slot::{Body, Fate},
        wire::PathReason,
    },
    read_path::SourceArena,
};

/// How a payload is staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageOptions {
    /// References at the start, each of which one release drops. Default 1.
    pub refcount: u32,
    /// How long new leases are given; what is leased then is read to its end. Default `None`: until the last reference.
    pub ttl: Option<Duration>,
    /// Whether to copy it into an arena, from where peers can READ it. Default no.
    pub pinned: bool,
    /// The only peer that may have it. Default `None`: whoever knows the handle.
    pub only_for: Option<InstanceId>,
}

impl Default for StageOptions {
    fn default() -> Self {
        Self { refcount: 1, ttl: None, pinned: false, only_for: None }
    }
}

impl<F: Fabric> Rendezvous<F> {
    /// Keeps a payload for consumers, who get it by chunks, with one reference.
    ///
    /// # Errors
    ///
    /// [`StageError`].
    pub fn stage(&self, payload: impl Into<Bytes>) -> Result<Handle, StageError> {
        self.inner.stage_memory(payload.into(), PathReason::NotPinned, StageOptions::default())
    }

    /// Copies a payload into an arena, from where consumers can READ it, with one reference. Where the arenas are full it
    /// is staged all the same, and goes by chunks.
    ///
    /// # Errors
    ///
    /// [`StageError`].
    pub async fn stage_pinned(&self, payload: impl Into<Bytes>) -> Result<Handle, StageError> {
        self.stage_with(payload, StageOptions { pinned: true, ..StageOptions::default() }).await
    }

    /// Stages as the options say.
    ///
    /// # Errors
    ///
    /// [`StageError`].
    pub async fn stage_with(&self, payload: impl Into<Bytes>, options: StageOptions) -> Result<Handle, StageError> {
        let payload = payload.into();
        self.inner.check_size(payload.len() as u64)?;
        if !options.pinned {
            return self.inner.stage_memory(payload, PathReason::NotPinned, options);
        }
        let inner = self.inner.clone();
        // The copy, and perhaps a new arena, take their time.
        let copied = tokio::task::spawn_blocking(move || {
            let slice = inner.slice_for(payload.len() as u64);
            let written = slice.map(|slice| slice.write(&payload).map(|()| slice));
            (written, payload)
        });
        let Ok((slice, payload)) = copied.await else { return Err(StageError::ShuttingDown) };
        match slice {
            Ok(Ok(slice)) => self.inner.stage_slice(Arc::new(slice), payload.len() as u64, options),
            Ok(Err(_)) => self.inner.stage_memory(payload, PathReason::PoolFull, options),
            Err(reason) => self.inner.stage_memory(payload, reason, options),
        }
    }

    /// Ends what a handle of this worker names: no new leases. What is leased is read to its end.
    pub fn withdraw(&self, handle: Handle) {
        if let Some(slot) = SlotId::new(handle.slot).filter(|_| handle.worker == self.inner.me) {
            self.inner.with_book(|book| book.withdraw(slot, Fate::Withdrawn));
        }
    }
}

impl<F: Fabric> Inner<F> {
    pub(super) fn check_size(&self, bytes: u64) -> Result<(), StageError> {
        let max = self.config.payload_max_bytes;
        if bytes > max { Err(StageError::TooLarge { bytes, max }) } else { Ok(()) }
    }

    /// Room in an arena, made if need be, or why there is none.
    pub(super) fn slice_for(&self, bytes: u64) -> Result<crate::arena::PooledSlice<SourceArena>, PathReason> {
        self.may_pin()?;
        self.sources.allocate(now(), bytes).map_err(|error| {
            self.counters.pool_full.add(1);
            if let PoolError::Arena(error) = error {
                if self.counters.arenas_failed.get() == 0 {
                    tracing::warn!(%error, bytes, "arenas cannot be made: payloads go by chunks (said once)");
                }
                self.counters.arenas_failed.add(1);
            }
            PathReason::PoolFull
        })
    }

    /// Whether anybody could READ what is pinned.
    pub(super) fn may_pin(&self) -> Result<(), PathReason> {
        match &self.reads {
            Some(_) => Ok(()),
            None if self.config.reads => Err(PathReason::NoCapability),
            None => Err(PathReason::Disabled),
        }
    }

    pub(super) fn stage_memory(
        self: &Arc<Self>,
        bytes: Bytes,
        why: PathReason,
        options: StageOptions,
    ) -> Result<Handle, StageError> {
        self.check_size(bytes.len() as u64)?;
        let handle = self.stage_body(Body::Memory { bytes, why }, options)?;
        self.counters.staged_memory.add(1);
        Ok(handle)
    }

    pub(super) fn stage_slice(
        self: &Arc<Self>,
        slice: SourceSlice,
        len: u64,
        options: StageOptions,
    ) -> Result<Handle, StageError> {
        let handle = self.stage_body(Body::Pinned { slice, len }, options)?;
        self.counters.staged_pinned.add(1);
        Ok(handle)
    }

    fn stage_body(self: &Arc<Self>, body: Body<SourceSlice>, options: StageOptions) -> Result<Handle, StageError> {
        if options.refcount == 0 {
            return Err(StageError::NoReference);
        }
        let len = body.len();
        let staged = self.with_book(|book| book.stage(now(), body, options.refcount, options.ttl, options.only_for));
        let slot = staged.map_err(|_| StageError::ShuttingDown)?;
        self.counters.staged_bytes.add(len);
        Ok(self.handle(slot))
    }
}
