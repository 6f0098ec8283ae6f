//! What a rendezvous needs of RDMA: rights to read a slice, and READs. Behind a trait, so that the rendezvous knows
//! neither QPs nor regions, and works without any.

use std::{any::Any, ops::Range, sync::Arc, time::Duration};

use tokio::sync::watch;
use verbs_transport::{
    BoxFuture, InstanceId,
    fabric::bulk::{Arena, MemoryOwner, Rkey},
};

use crate::{
    bulk::WindowRight,
    proto::{region::RegionId, slice::ArenaGauges, tenure::Tenure},
};

/// The RDMA half of a rendezvous.
pub(crate) trait ReadPath: Send + Sync + 'static {
    /// Owner: makes an arena ready for rights to parts of it, where that helps. Blocks; called on threads for that.
    fn prepare_source(&self, arena: &Arc<Arena>) -> SourceArena;

    /// Owner: lets that peer READ exactly this range, and nothing else; sees to the bulk QP first, within `connect_within`,
    /// if this side can: a consumer may know no address to dial. Errors are words for a log.
    fn grant(
        &self,
        peer: InstanceId,
        bytes: SourceBytes,
        connect_within: Duration,
    ) -> BoxFuture<'static, Result<Right, String>>;

    /// Owner: takes a right back. When this has ended well, nobody can read the slice any more; when not, the right is
    /// still there, and this may be called again.
    fn revoke(&self, right: Right) -> BoxFuture<'static, Result<(), String>>;

    /// Owner: whether a bulk QP to that peer is up, so that it may be reading.
    fn is_connected(&self, peer: InstanceId) -> bool;

    /// Consumer: READs bytes. Posts nothing once `tenure` does not allow it, or the future is dropped; when the tenure
    /// ends with READs under way, their QP goes down with them. `hold` is let go when the device touches nothing any more,
    /// and not before.
    fn read(
        &self,
        peer: InstanceId,
        from: RemoteBytes,
        tenure: watch::Receiver<Tenure>,
        hold: Held,
    ) -> BoxFuture<'static, Result<Vec<u8>, ReadError>>;

    /// Consumer, now: arenas that READs land in.
    fn destination_arenas(&self) -> ArenaGauges;

    /// Gives back idle arenas; whether there will be more of them.
    fn release_idle(&self) -> bool;

    /// Takes everything down.
    fn shutdown(&self) -> BoxFuture<'static, ()>;
}

/// Kept until the device has let go: the lease.
pub(crate) type Held = Arc<dyn Any + Send + Sync>;

/// What was made of a source arena. No peer has a key to it.
#[derive(Default)]
pub(crate) struct SourceArena {
    /// Registered for windows.
    pub(crate) region: Option<RegionId>,
    /// The registration goes with this.
    pub(crate) _keep: Option<Box<dyn Any + Send + Sync>>,
}

/// Bytes of a source arena.
pub(crate) struct SourceBytes {
    pub(crate) memory: Arc<dyn MemoryOwner>,
    /// From its start.
    pub(crate) range: Range<usize>,
    /// As [`SourceArena::region`].
    pub(crate) region: Option<RegionId>,
}

/// A peer's right to read a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Right {
    /// What ends it.
    pub(crate) by: RightBy,
    /// Address of the first byte.
    pub(crate) addr: u64,
    /// The key.
    pub(crate) rkey: Rkey,
}

/// What a right is, on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RightBy {
    /// A registration of the slice, gone when deregistered.
    Registration(RegionId),
    /// A memory window over the slice, gone when invalidated, or with its QP.
    Window(WindowRight),
}

/// Bytes at a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteBytes {
    pub(crate) addr: u64,
    pub(crate) rkey: Rkey,
    pub(crate) len: usize,
}

/// Why READs did not bring the bytes.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ReadError {
    /// There is no bulk QP, and none can be made now.
    #[error("no bulk QP: {0}")]
    NoQp(Arc<str>),
    /// They failed.
    #[error("{0}")]
    Failed(Arc<str>),
    /// The lease ended first.
    #[error("the lease ended")]
    LeaseOver,
}
