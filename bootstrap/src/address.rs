//! What discovery publishes: a `MessagePack` map from transport key to opaque bytes, with one entry of this transport.
//!
//! The entry names a listener and hints at devices. It carries no rkey, no QP number and no PSN: RDMA has no
//! authentication, and whoever reads discovery could use them.

use std::net::SocketAddr;

use bytes::Bytes;
use rmp::Marker;
use serde::{Deserialize, Serialize};

use crate::{
    types::{Gid, GidType, Incarnation, InstanceId, Mtu},
    wire::{self, WireError},
};

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
    /// Where its bootstrap listens, best first: 1 to 8. An IPv6 scope does not travel: it means nothing elsewhere.
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
    /// The bytes are no `MessagePack` map, or are cut short: publish the whole of what `address()` gives.
    #[error(
        "the {bytes} bytes are no whole MessagePack map (reading stopped at byte {at}): publish the whole of what the peer calls its address"
    )]
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
    #[error("an address of {bytes} bytes is above the limit of {max}: is it an address?")]
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
    #[error("the entry is of version {theirs}, this build reads version {ours}: update the older side")]
    Version {
        /// The peer's.
        theirs: u8,
        /// This build's.
        ours: u8,
    },
    /// The entry ends too early: publish it whole.
    #[error("the entry is cut short after {bytes} bytes: publish it whole")]
    Truncated {
        /// How long it is.
        bytes: usize,
    },
    /// A field with a value that it cannot have.
    #[error("the entry of {bytes} bytes is unreadable: {reason}; was it changed on the way?")]
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
        within("bootstrap addresses", endpoint.bootstrap.len(), 1, MAX_SOCKET_ADDRESSES)?;
        within("device hints", endpoint.devices.len(), 0, MAX_DEVICE_HINTS)?;
        let mut entry = vec![ENTRY_VERSION];
        entry.extend_from_slice(&wire::encode_body(endpoint));
        Ok(Self(map_of_one(&entry).into()))
    }

    /// This transport's entry.
    ///
    /// # Errors
    ///
    /// [`AddressError::NoEndpoint`] when there is none, [`AddressError::InvalidEndpoint`] when it cannot be used.
    pub fn endpoint(&self) -> Result<Endpoint, AddressError> {
        let bytes = &self.0[..];
        if bytes.len() > MAX_ADDRESS_BYTES {
            let (bytes, max) = (bytes.len(), MAX_ADDRESS_BYTES);
            return Err(AddressError::NoEndpoint(NoEndpoint::TooLong { bytes, max }));
        }
        let mut rest = bytes;
        let found = find_entry(&mut rest).filter(|_| rest.is_empty());
        let Some((entries, value)) = found else {
            let (bytes, at) = (bytes.len(), bytes.len() - rest.len());
            return Err(AddressError::NoEndpoint(NoEndpoint::NotAMap { bytes, at }));
        };
        let value = value.ok_or(AddressError::NoEndpoint(NoEndpoint::NoEntry { entries }))?;
        read_value(value).map_err(AddressError::InvalidEndpoint)
    }
}

/// A map with our entry only.
fn map_of_one(entry: &[u8]) -> Vec<u8> {
    let mut map = Vec::with_capacity(entry.len() + 16);
    rmp::encode::write_map_len(&mut map, 1)
        .and_then(|_| rmp::encode::write_str(&mut map, TRANSPORT_KEY))
        .and_then(|()| rmp::encode::write_bin(&mut map, entry))
        .expect("a Vec takes every byte");
    map
}

/// Reads the whole map: how many entries it has, and the encoded value under our key. `None`: it is no whole map.
fn find_entry<'a>(rest: &mut &'a [u8]) -> Option<(usize, Option<&'a [u8]>)> {
    let entries = rmp::decode::read_map_len(rest).ok()?;
    let mut ours = None;
    for _ in 0..entries {
        let key = one_value(rest)?;
        let value = one_value(rest)?;
        if rmp::decode::read_str_from_slice(key).is_ok_and(|(key, _)| key == TRANSPORT_KEY) {
            ours = ours.or(Some(value));
        }
    }
    Some((usize::try_from(entries).ok()?, ours))
}

/// Takes one encoded value of any type off the front. A loop, not a recursion: nesting costs a peer's bytes, not our
/// stack.
fn one_value<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let whole = *rest;
    let mut values_left = 1_u64;
    while values_left > 0 {
        values_left -= 1;
        let marker = rmp::decode::read_marker(rest).ok()?;
        let (bytes, values) = match marker {
            Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => (0, 0),
            Marker::U8 | Marker::I8 => (1, 0),
            // An extension (`Ext`) has a type byte before its data.
            Marker::U16 | Marker::I16 | Marker::FixExt1 => (2, 0),
            Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
            Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
            Marker::FixStr(length) => (u64::from(length), 0),
            Marker::Str8 | Marker::Bin8 => (length(rest, 1)?, 0),
            Marker::Str16 | Marker::Bin16 => (length(rest, 2)?, 0),
            Marker::Str32 | Marker::Bin32 => (length(rest, 4)?, 0),
            Marker::FixExt2 => (3, 0),
            Marker::FixExt4 => (5, 0),
            Marker::FixExt8 => (9, 0),
            Marker::FixExt16 => (17, 0),
            Marker::Ext8 => (length(rest, 1)? + 1, 0),
            Marker::Ext16 => (length(rest, 2)? + 1, 0),
            Marker::Ext32 => (length(rest, 4)? + 1, 0),
            Marker::FixArray(values) => (0, u64::from(values)),
            Marker::Array16 => (0, length(rest, 2)?),
            Marker::Array32 => (0, length(rest, 4)?),
            Marker::FixMap(pairs) => (0, 2 * u64::from(pairs)),
            Marker::Map16 => (0, 2 * length(rest, 2)?),
            Marker::Map32 => (0, 2 * length(rest, 4)?),
            Marker::Reserved => return None,
        };
        *rest = rest.get(usize::try_from(bytes).ok()?..)?;
        // Each value takes a byte at least, so more than are left can only be a lie.
        values_left = values_left.checked_add(values).filter(|left| *left <= rest.len() as u64)?;
    }
    whole.get(..whole.len() - rest.len())
}

/// A big-endian length of `width` bytes.
fn length(rest: &mut &[u8], width: usize) -> Option<u64> {
    let (bytes, after) = rest.split_at_checked(width)?;
    *rest = after;
    Some(bytes.iter().fold(0, |length, byte| length << 8 | u64::from(*byte)))
}

/// The entry inside an encoded value that is known to be whole.
fn read_value(mut value: &[u8]) -> Result<Endpoint, InvalidEndpoint> {
    let marker = value.first().copied().unwrap_or_default();
    rmp::decode::read_bin_len(&mut value).map_err(|_| InvalidEndpoint::NotBytes { marker })?;
    let bytes = value.len();
    let Some((version, body)) = value.split_first() else { return Err(InvalidEndpoint::Truncated { bytes }) };
    if *version != ENTRY_VERSION {
        return Err(InvalidEndpoint::Version { theirs: *version, ours: ENTRY_VERSION });
    }
    let unreadable = |reason| InvalidEndpoint::Unreadable { bytes, reason };
    let endpoint: Endpoint = wire::decode_body("address", body).map_err(|error| match error {
        WireError::Cut { .. } => InvalidEndpoint::Truncated { bytes },
        other => unreadable(other.to_string()),
    })?;
    within("bootstrap addresses", endpoint.bootstrap.len(), 1, MAX_SOCKET_ADDRESSES)
        .and_then(|()| within("device hints", endpoint.devices.len(), 0, MAX_DEVICE_HINTS))
        .map_err(|error| unreadable(error.to_string()))?;
    Ok(endpoint)
}

fn within(what: &'static str, found: usize, min: usize, max: usize) -> Result<(), EncodeAddressError> {
    if (min..=max).contains(&found) { Ok(()) } else { Err(EncodeAddressError { what, found, min, max }) }
}

/// First byte of the entry.
const ENTRY_VERSION: u8 = 1;
const MAX_SOCKET_ADDRESSES: usize = 8;
const MAX_DEVICE_HINTS: usize = 32;
/// Of the whole map, other transports' entries included.
const MAX_ADDRESS_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
