//! The numbers that cross the wire, each as a type of its own.

use std::{fmt, net::Ipv4Addr, net::Ipv6Addr};

use serde::{Deserialize, Serialize};

/// Largest 24-bit number: QP numbers and PSNs end here.
const MAX_24: u32 = (1 << 24) - 1;

/// A QP number or PSN from the wire that no device can have made: the peer is broken, refuse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {raw:#010x} is not a 24-bit number of that kind")]
pub struct Not24Bits {
    /// Which number.
    pub what: &'static str,
    /// What stood there.
    pub raw: u32,
}

/// Queue pair number: 24 bits, never 0 here (0 stands for "no QP" on the wire).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Qpn(u32);

impl Qpn {
    /// A QP number as a device or a peer states it; `None` for 0 and for more than 24 bits.
    pub const fn new(raw: u32) -> Option<Self> {
        if raw == 0 || raw > MAX_24 { None } else { Some(Self(raw)) }
    }

    /// The 24-bit number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for Qpn {
    type Error = Not24Bits;

    fn try_from(raw: u32) -> Result<Self, Not24Bits> {
        Self::new(raw).ok_or(Not24Bits { what: "QP number", raw })
    }
}

impl From<Qpn> for u32 {
    fn from(value: Qpn) -> Self {
        value.0
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qp {:#08x}", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Packet sequence number: 24 bits, wrapping. No `Ord`: numbers that wrap have no total order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Psn(u32);

impl Psn {
    /// A PSN as a peer states it; `None` above 24 bits.
    pub const fn new(raw: u32) -> Option<Self> {
        if raw > MAX_24 { None } else { Some(Self(raw)) }
    }

    /// The low 24 bits of a random number.
    pub const fn from_random(bits: u32) -> Self {
        Self(bits & MAX_24)
    }

    /// The 24-bit number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for Psn {
    type Error = Not24Bits;

    fn try_from(raw: u32) -> Result<Self, Not24Bits> {
        Self::new(raw).ok_or(Not24Bits { what: "PSN", raw })
    }
}

impl From<Psn> for u32 {
    fn from(value: Psn) -> Self {
        value.0
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "psn {:#08x}", self.0)
    }
}

/// A port's global identifier: 16 bytes, an IPv6 address in form (IPv4 as `::ffff:a.b.c.d`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The GID read as an IPv6 address.
    pub fn ipv6(self) -> Ipv6Addr {
        Ipv6Addr::from(self.0)
    }

    /// The IPv4 address inside, if the GID is `::ffff:a.b.c.d`.
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        self.ipv6().to_ipv4_mapped()
    }

    /// An empty slot of a GID table.
    pub fn is_zero(self) -> bool {
        self.0 == [0; 16]
    }

    /// What kind of address this is; two ports can only meet when the kinds agree.
    pub fn family(self) -> GidFamily {
        if self.ipv4().is_some() {
            GidFamily::Ipv4Mapped
        } else if self.ipv6().is_unicast_link_local() {
            GidFamily::LinkLocal
        } else {
            GidFamily::Ipv6
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ipv6())
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The address family of a [`Gid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GidFamily {
    /// `::ffff:a.b.c.d`: the port has an IPv4 address.
    Ipv4Mapped,
    /// A global or unique local IPv6 address.
    Ipv6,
    /// `fe80::/10`: reaches one link only.
    LinkLocal,
}

/// How a GID's packets travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GidType {
    /// InfiniBand, or a GID whose type is unknown.
    Ib,
    /// RoCE v1: an Ethernet frame, not routable.
    RoceV1,
    /// RoCE v2: UDP port 4791 over IP.
    RoceV2,
}

/// The link under a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LinkLayer {
    /// InfiniBand: addressed by LID.
    InfiniBand,
    /// Ethernet (RoCE): addressed by GID.
    Ethernet,
}

/// Path MTU: bytes of payload in one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1,024 bytes.
    B1024,
    /// 2,048 bytes.
    B2048,
    /// 4,096 bytes.
    B4096,
}

impl Mtu {
    /// Payload bytes in one packet.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B256 => 256,
            Self::B512 => 512,
            Self::B1024 => 1024,
            Self::B2048 => 2048,
            Self::B4096 => 4096,
        }
    }
}

/// Names one worker for as long as its owner likes, over restarts: 16 bytes, chosen by the application or at random.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InstanceId(pub u128);

impl fmt::Debug for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A random number drawn at each start: tells a restarted peer from the one before. No order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub u64);

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Counts one worker's epochs toward one peer, from 1; 0 on the wire means "none known".
/// Each epoch has one QP, so a generation names that QP within its incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Generation(pub u64);

/// What an exchange makes a connection for. Each plane of a pair of peers has its own exchanges, epochs and QPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Plane {
    /// Messages.
    Messaging,
    /// RDMA READs and WRITEs of bulk memory.
    Bulk,
}

impl fmt::Display for Plane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Messaging => "messaging",
            Self::Bulk => "bulk",
        })
    }
}

/// One QP as its peer needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QpEndpoint {
    /// The QP's number.
    pub qpn: Qpn,
    /// The first PSN that the QP's owner will send with.
    pub psn: Psn,
}

/// Where a QP lives: one port of one device, and the address it sends from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortIdentity {
    /// The device's node GUID.
    pub device_guid: u64,
    /// Port number, from 1.
    pub port: u8,
    /// What the port is plugged into.
    pub link_layer: LinkLayer,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The address that packets come from.
    pub gid: Gid,
    /// How they travel.
    pub gid_type: GidType,
    /// The owner's own index of that GID. Only for messages to people: it means nothing to the peer.
    pub gid_index: u8,
    /// Partition key.
    pub pkey: u16,
    /// The port's active MTU. Both sides use the smaller of the two.
    pub mtu: Mtu,
}

/// How many READs and atomics a device takes at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdAtomic {
    /// As the one who asks (`max_qp_init_rd_atom`).
    pub initiator: u8,
    /// As the one who answers (`max_qp_rd_atom`).
    pub responder: u8,
}

/// What one side tells the other: the same in both directions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "WireOffer", try_from = "WireOffer")]
pub struct Offer {
    /// Who sends this.
    pub from: InstanceId,
    /// The sender's run.
    pub from_incarnation: Incarnation,
    /// Who is meant.
    pub to: InstanceId,
    /// The run that is meant; another run of the same instance refuses.
    pub to_incarnation: Incarnation,
    /// The sender's epoch toward this peer.
    pub generation: Generation,
    /// The receiver's epoch that this answers, or the last one known; 0 for none.
    pub echoed_generation: Generation,
    /// The sender's port.
    pub port: PortIdentity,
    /// What the QP is for.
    pub plane: Plane,
    /// The QP.
    pub qp: QpEndpoint,
    /// The sender's READ limits.
    pub rd_atomic: RdAtomic,
    /// Bytes in each receive slab of the sender's: no SEND to it may be longer. 0 in the bulk plane.
    pub slab_bytes: u32,
    /// Receives that the sender keeps for this peer: the peer's credits at the start, for SENDs in the messaging plane,
    /// for notifications in the bulk plane.
    pub window_slabs: u16,
    /// Largest header + payload that the sender takes in one frame, in bytes. 0 in the bulk plane.
    pub eager_max_bytes: u32,
    /// Feature bits; unknown ones are ignored.
    pub features: u64,
}

/// An [`Offer`] as it lies on the wire: a slot for each plane's QP, of which exactly one is filled.
#[derive(Serialize, Deserialize)]
pub(crate) struct WireOffer {
    from: InstanceId,
    from_incarnation: Incarnation,
    to: InstanceId,
    to_incarnation: Incarnation,
    generation: Generation,
    echoed_generation: Generation,
    port: PortIdentity,
    /// QP number 0, which no QP has, and PSN 0: an empty slot.
    messaging_qpn: u32,
    messaging_psn: u32,
    bulk: Option<QpEndpoint>,
    rd_atomic: RdAtomic,
    slab_bytes: u32,
    window_slabs: u16,
    eager_max_bytes: u32,
    features: u64,
}

/// The QP slots of an offer that is none.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadSlots {
    #[error("an offer names a messaging QP ({messaging}) and a bulk QP ({bulk}), but each plane has offers of its own")]
    Both { messaging: Qpn, bulk: Qpn },
    #[error("an offer names no QP, neither for messaging nor for bulk")]
    None,
    #[error("an offer without a messaging QP has a messaging PSN of {psn:#08x}")]
    StrayPsn { psn: u32 },
    #[error(transparent)]
    Number(#[from] Not24Bits),
}

impl From<Offer> for WireOffer {
    fn from(offer: Offer) -> Self {
        let (messaging_qpn, messaging_psn, bulk) = match offer.plane {
            Plane::Messaging => (offer.qp.qpn.get(), offer.qp.psn.get(), None),
            Plane::Bulk => (0, 0, Some(offer.qp)),
        };
        Self {
            from: offer.from,
            from_incarnation: offer.from_incarnation,
            to: offer.to,
            to_incarnation: offer.to_incarnation,
            generation: offer.generation,
            echoed_generation: offer.echoed_generation,
            port: offer.port,
            messaging_qpn,
            messaging_psn,
            bulk,
            rd_atomic: offer.rd_atomic,
            slab_bytes: offer.slab_bytes,
            window_slabs: offer.window_slabs,
            eager_max_bytes: offer.eager_max_bytes,
            features: offer.features,
        }
    }
}

impl TryFrom<WireOffer> for Offer {
    type Error = BadSlots;

    fn try_from(wire: WireOffer) -> Result<Self, BadSlots> {
        let messaging = match (wire.messaging_qpn, wire.messaging_psn) {
            (0, 0) => None,
            (0, psn) => return Err(BadSlots::StrayPsn { psn }),
            (qpn, psn) => Some(QpEndpoint { qpn: qpn.try_into()?, psn: psn.try_into()? }),
        };
        let (plane, qp) = match (messaging, wire.bulk) {
            (Some(messaging), Some(bulk)) => {
                return Err(BadSlots::Both { messaging: messaging.qpn, bulk: bulk.qpn });
            }
            (Some(qp), None) => (Plane::Messaging, qp),
            (None, Some(qp)) => (Plane::Bulk, qp),
            (None, None) => return Err(BadSlots::None),
        };
        Ok(Self {
            from: wire.from,
            from_incarnation: wire.from_incarnation,
            to: wire.to,
            to_incarnation: wire.to_incarnation,
            generation: wire.generation,
            echoed_generation: wire.echoed_generation,
            port: wire.port,
            plane,
            qp,
            rd_atomic: wire.rd_atomic,
            slab_bytes: wire.slab_bytes,
            window_slabs: wire.window_slabs,
            eager_max_bytes: wire.eager_max_bytes,
            features: wire.features,
        })
    }
}
