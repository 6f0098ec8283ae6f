//! A peer's registered ranges, as a requester knows them.

use std::{
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{
    Epoch, Permission,
    control::{About, Description, Descriptor, RemoteDevice},
    memory::AddressIndex,
};

/// One life of one engine, and what it exported when last asked. Clones share it.
///
/// It is knowledge, not authority: the source checks each operation again. A range that the peer has registered since
/// is found by [`refresh`](crate::Engine::refresh), which
/// [`submit_and_wait`](crate::Engine::submit_and_wait) calls once by itself; asynchronous submissions do not, as they do
/// no I/O. One that was unregistered since is refused by the source.
#[derive(Clone)]
pub struct RemoteSegment {
    inner: Arc<Inner>,
}

/// What a segment is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SegmentKind {
    /// Memory, by address.
    Memory,
}

/// Where a range's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Location {
    /// In its host's memory.
    Host,
}

struct Inner {
    endpoint: SocketAddr,
    epoch: Epoch,
    snapshot: Mutex<Arc<Snapshot>>,
}

/// One range that a peer exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Its number at the peer.
    pub id: u64,
    /// Its first address there.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// What the peer allows.
    pub permission: Permission,
    /// Where its bytes are.
    pub location: Location,
}

impl RemoteRegion {
    fn of(Descriptor { id, span, permission }: &Descriptor) -> Self {
        let (address, length) = (span.start, span.length);
        Self { id: *id, address, length, permission: *permission, location: Location::Host }
    }
}

/// What a peer exports, at one moment. It never changes; a refresh makes a new one.
pub(crate) struct Snapshot {
    /// By ascending id.
    regions: Vec<Descriptor>,
    index: AddressIndex,
    about: About,
}

impl Snapshot {
    pub(crate) fn new(Description { regions, about }: Description) -> Self {
        let spans = regions.iter().map(|region| (region.span, region.id));
        Self { index: AddressIndex::new(spans.collect()), regions, about }
    }

    /// The range that contains all of the request, and the offset in it.
    pub(crate) fn resolve(&self, address: u64, length: u64) -> Option<(&Descriptor, u64)> {
        let (id, offset) = self.index.resolve(address, length)?;
        let at = self.regions.binary_search_by_key(&id, |region| region.id).ok()?;
        Some((&self.regions[at], offset))
    }
}

impl fmt::Debug for RemoteSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteSegment({}, epoch {})", self.inner.endpoint, self.inner.epoch)
    }
}

impl RemoteSegment {
    pub(crate) fn new(endpoint: SocketAddr, epoch: Epoch, description: Description) -> Self {
        let snapshot = Mutex::new(Arc::new(Snapshot::new(description)));
        Self { inner: Arc::new(Inner { endpoint, epoch, snapshot }) }
    }

    /// Where the peer listens.
    pub fn endpoint(&self) -> SocketAddr {
        self.inner.endpoint
    }

    /// The peer's life that is meant.
    pub fn epoch(&self) -> Epoch {
        self.inner.epoch
    }

    /// What the peer calls itself: its [`Config::name`](crate::Config::name).
    pub fn name(&self) -> String {
        self.snapshot().about.name.clone()
    }

    /// What it is made of.
    pub fn kind(&self) -> SegmentKind {
        SegmentKind::Memory
    }

    /// The devices that the peer serves over, beside TCP, in the order in which it was given them; empty where there are
    /// none. Whether one is up at this moment it does not tell.
    pub fn devices(&self) -> Vec<RemoteDevice> {
        self.snapshot().about.devices.clone()
    }

    /// What it exported when last asked, by ascending id. Ranges that are local only are never told.
    pub fn regions(&self) -> Vec<RemoteRegion> {
        self.snapshot().regions.iter().map(RemoteRegion::of).collect()
    }

    /// Where an address of the peer's lies: the one range that contains all of `length` bytes, and the offset in it.
    pub fn resolve_address(&self, address: u64, length: u64) -> Option<(RemoteRegion, u64)> {
        let snapshot = self.snapshot();
        let (descriptor, offset) = snapshot.resolve(address, length)?;
        Some((RemoteRegion::of(descriptor), offset))
    }

    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.inner.snapshot.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn publish(&self, description: Description) {
        let snapshot = Arc::new(Snapshot::new(description));
        *self.inner.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }
}
