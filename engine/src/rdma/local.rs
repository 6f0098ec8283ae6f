//! Local memory of a request as a device of the requester's sees it: staging, or the registered bytes themselves.

use std::sync::Arc;

use verbs_transport::fabric::bulk::{Access as Rights, BulkFabric, BulkPort as _, BulkRegion as _, MemoryOwner as _};

use super::{
    device::{Device, RegionOf},
    identity::Incarnation,
    staging::{Lent, Pool, StageError},
};
use crate::{
    Direction, Phase, Profile, TransferError,
    batch::Slice,
    memory::{Patience, Use},
    tcp::{LineError, broken},
};

/// Dropped, it lets go at once: only when no work request can name it any more.
pub(super) enum LocalMemory<F: BulkFabric> {
    Staged(Lent<RegionOf<F>>),
    /// Registered for this request alone. The bytes are busy until the device has let go of them.
    Direct(RegionOf<F>),
}

/// Why there is none.
pub(super) enum NoMemory {
    /// The device, or the system, refuses.
    Refused(StageError),
    /// Nothing but the request's own end helps.
    Failed(TransferError),
}

impl<F: BulkFabric> LocalMemory<F> {
    /// Memory on that device, with the bytes of a WRITE in it.
    pub(super) fn take(
        device: &Device<F>,
        pool: &Arc<Pool<RegionOf<F>>>,
        slice: &Slice,
        patience: Patience<'_>,
    ) -> Result<Self, NoMemory> {
        let bytes = usize::try_from(slice.length).map_err(|_| NoMemory::Failed(TransferError::Internal))?;
        let local = slice.local.registration();
        let denied = |denied| NoMemory::Failed(broken(LineError::from(denied), Phase::LocalMemory));
        if slice.profile == Profile::Direct {
            let (by, rights) = match slice.direction {
                Direction::Read => (Use::Write, Rights::DESTINATION),
                Direction::Write => (Use::Read, Rights::LOCAL_READ),
            };
            let range = local.lend(slice.local_place(), by, patience).map_err(denied)?;
            let region = device.port.register(range.in_place(), 0..bytes, rights);
            return region.map(Self::Direct).map_err(|error| NoMemory::Refused(StageError::Register(error)));
        }
        let staging = staging(device, pool, bytes).map_err(NoMemory::Refused)?;
        if slice.direction == Direction::Write {
            let copied = local.read(slice.local_place(), patience, |from| staging.write(0, from).is_ok());
            if !copied.map_err(denied)? {
                return Err(NoMemory::Failed(TransferError::Internal));
            }
        }
        Ok(Self::Staged(staging))
    }

    pub(super) fn region(&self) -> &RegionOf<F> {
        match self {
            Self::Staged(staging) => staging,
            Self::Direct(region) => region,
        }
    }

    /// Its parts, for a burial: the registration that must be given up, and what is to be kept until then.
    pub(super) fn into_parts(self) -> (Option<RegionOf<F>>, Option<Lent<RegionOf<F>>>) {
        match self {
            Self::Staged(staging) => (None, Some(staging)),
            Self::Direct(region) => (Some(region), None),
        }
    }

    /// Lets go of registered bytes, when all work requests are complete. What is left is staging.
    ///
    /// # Errors
    ///
    /// The device does not deregister them.
    pub(super) fn settle(self) -> Result<Option<Lent<RegionOf<F>>>, RegionOf<F>> {
        match self {
            Self::Staged(staging) => Ok(Some(staging)),
            Self::Direct(region) => match region.deregister() {
                Ok(()) => Ok(None),
                Err((region, error)) => {
                    tracing::error!(%error, "local memory of a direct request is not deregistered; its QP goes first");
                    Err(region)
                }
            },
        }
    }
}

/// So many bytes of staging on that device.
pub(super) fn staging<F: BulkFabric>(
    device: &Device<F>,
    pool: &Arc<Pool<RegionOf<F>>>,
    bytes: usize,
) -> Result<Lent<RegionOf<F>>, StageError> {
    pool.take(bytes, Incarnation::NONE, |arena| {
        let bytes = arena.len();
        device.port.register(arena, 0..bytes, Rights::DESTINATION).map_err(StageError::Register)
    })
}
