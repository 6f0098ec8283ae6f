//! The frames of operations 4 to 7 behind the request, those of a plan in [`rails::plan`](super::rails::plan): part of the control wire, version 1. See `docs/engine-wire.md`.
//!
//! Every frame has a fixed length, and everything is checked here that can be checked without knowing the other frames.

use verbs_bootstrap::{Gid, GidType, LinkLayer, Mtu, PortIdentity, Psn, QpEndpoint, Qpn, RdAtomic};

use super::{
    grant::Form,
    identity::{Digest, Identity, Incarnation},
    path::{PATHS_MAX, PathEnd},
};
use crate::{
    WireError,
    control::{array, check_head, number, put_head},
};

/// Behind the request, requester to source.
pub(crate) const ASK_BYTES: usize = 100;
/// Magic, version, kind, reserved.
pub(crate) const HEAD_BYTES: usize = 12;
const IDENTITY_BYTES: usize = 128;
/// Behind the names.
pub(super) const BODY_AT: usize = HEAD_BYTES + IDENTITY_BYTES;
pub(super) const PATH_BYTES: usize = 64;
const OFFER_HEAD_BYTES: usize = 32;
const ASK_KIND: u8 = 16;

/// The frames after the offer, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Kind {
    Select = 17,
    Admit = 18,
    RequesterQp = 19,
    SourceQp = 20,
    Connected = 21,
    Grant = 22,
    Done = 23,
    Ack = 24,
    Ready = 25,
}

impl Kind {
    pub(crate) const ALL: [Self; 9] = [
        Self::Select,
        Self::Admit,
        Self::RequesterQp,
        Self::SourceQp,
        Self::Connected,
        Self::Grant,
        Self::Done,
        Self::Ack,
        Self::Ready,
    ];

    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }

    /// Of the whole frame.
    pub(crate) const fn bytes(self) -> usize {
        BODY_AT
            + match self {
                Self::Select => 8 + PATH_BYTES,
                Self::RequesterQp | Self::SourceQp => 8,
                Self::Grant => 32,
                Self::Admit | Self::Connected | Self::Done | Self::Ack | Self::Ready => 0,
            }
    }
}

/// What goes with a request for an operation over RDMA. It names the pair of QPs that is to carry it, if one is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) requester_epoch: [u8; 16],
    pub(crate) request: u64,
    pub(crate) requester_link: Incarnation,
    pub(crate) kept: Option<KeptNames>,
}

/// The rest of the names of a pair of QPs that is to be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeptNames {
    pub(crate) requester_pd: Incarnation,
    pub(crate) source_pd: Incarnation,
    pub(crate) source_link: Incarnation,
}

/// What a source can do for a request: the payload of its first reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) source_link: Incarnation,
    pub(crate) generation: u64,
    pub(crate) paths: Vec<PathEnd>,
}

/// What a grant says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GrantTerms {
    pub(crate) form: Form,
    pub(crate) key: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
    /// How long it holds, in milliseconds from when the requester sent the frame that it answers.
    pub(crate) valid_ms: u32,
}

/// What a frame after the offer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// The path of the table that is chosen, and the requester's end of it.
    Select { path: u16, end: PathEnd },
    /// All that the operation needs is reserved.
    Admit,
    /// The requester's QP.
    RequesterQp(QpEndpoint),
    /// The source's QP: connected, with its receives posted.
    SourceQp(QpEndpoint),
    /// The requester's QP is connected, too.
    Connected,
    /// Go on.
    Grant(GrantTerms),
    /// All data has moved; the marker is sent and acknowledged.
    Done,
    /// The receipt is here, the grant is dead, a WRITE is committed.
    Ack,
    /// Nothing of the requester's is outstanding: the pair may carry the next operation.
    Ready,
}

/// A frame after the offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) identity: Identity,
    pub(crate) body: Body,
}

impl Body {
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Select { .. } => Kind::Select,
            Self::Admit => Kind::Admit,
            Self::RequesterQp(_) => Kind::RequesterQp,
            Self::SourceQp(_) => Kind::SourceQp,
            Self::Connected => Kind::Connected,
            Self::Grant(_) => Kind::Grant,
            Self::Done => Kind::Done,
            Self::Ack => Kind::Ack,
            Self::Ready => Kind::Ready,
        }
    }
}

impl Ask {
    pub(crate) fn encode(&self) -> [u8; ASK_BYTES] {
        let mut bytes = [0; ASK_BYTES];
        put_head(&mut bytes, ASK_KIND);
        bytes[12..28].copy_from_slice(&self.requester_epoch);
        bytes[28..36].copy_from_slice(&self.request.to_be_bytes());
        bytes[36..52].copy_from_slice(&self.requester_link.0);
        if let Some(kept) = self.kept {
            bytes[52..68].copy_from_slice(&kept.requester_pd.0);
            bytes[68..84].copy_from_slice(&kept.source_pd.0);
            bytes[84..100].copy_from_slice(&kept.source_link.0);
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; ASK_BYTES]) -> Result<Self, WireError> {
        match check_head(bytes)? {
            ASK_KIND => {}
            found => return Err(WireError::Unknown { field: "phase", found }),
        }
        let names = [36, 52, 68, 84].map(|at| Incarnation(array(bytes, at)));
        let [requester_link, requester_pd, source_pd, source_link] = names;
        let absent = names[1..].iter().filter(|name| name.is_none()).count();
        // All names of a kept pair, or none.
        let kept = match absent {
            0 => Some(KeptNames { requester_pd, source_pd, source_link }),
            3 => None,
            _ => return Err(WireError::Foreign { field: "kept connection" }),
        };
        if requester_link.is_none() {
            return Err(WireError::Foreign { field: "requester connection" });
        }
        Ok(Self { requester_epoch: array(bytes, 12), request: number(bytes, 28), requester_link, kept })
    }
}

impl Offer {
    /// # Panics
    ///
    /// With more paths than a table takes: a fault of ours.
    pub(crate) fn encode(&self) -> Vec<u8> {
        assert!((1..=PATHS_MAX).contains(&self.paths.len()), "1 to 16 paths");
        let mut bytes = vec![0; OFFER_HEAD_BYTES + self.paths.len() * PATH_BYTES];
        bytes[..16].copy_from_slice(&self.source_link.0);
        bytes[16..24].copy_from_slice(&self.generation.to_be_bytes());
        let count = u16::try_from(self.paths.len()).unwrap_or(u16::MAX);
        bytes[24..26].copy_from_slice(&count.to_be_bytes());
        for (end, into) in self.paths.iter().zip(bytes[OFFER_HEAD_BYTES..].chunks_exact_mut(PATH_BYTES)) {
            put_path(into, end);
        }
        bytes
    }

    /// The largest payload.
    pub(crate) const fn bytes_max() -> u64 {
        (OFFER_HEAD_BYTES + PATHS_MAX * PATH_BYTES) as u64
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let length = |expected: usize| WireError::Length { found: bytes.len() as u64, expected: expected as u64 };
        if bytes.len() < OFFER_HEAD_BYTES {
            return Err(length(OFFER_HEAD_BYTES));
        }
        let count = usize::from(u16::from_be_bytes(array(bytes, 24)));
        if bytes[26..32] != [0; 6] {
            return Err(WireError::Reserved { field: "an offer" });
        }
        if !(1..=PATHS_MAX).contains(&count) {
            return Err(WireError::Unknown { field: "number of paths", found: bytes[25] });
        }
        if bytes.len() != OFFER_HEAD_BYTES + count * PATH_BYTES {
            return Err(length(OFFER_HEAD_BYTES + count * PATH_BYTES));
        }
        let (source_link, generation) = (Incarnation(array(bytes, 0)), number(bytes, 16));
        if source_link.is_none() {
            return Err(WireError::Foreign { field: "source connection" });
        }
        if generation == 0 {
            return Err(WireError::Foreign { field: "grant generation" });
        }
        let paths = bytes[OFFER_HEAD_BYTES..].chunks_exact(PATH_BYTES).map(path).collect::<Result<_, _>>()?;
        Ok(Self { source_link, generation, paths })
    }
}

impl Frame {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let kind = self.body.kind();
        let mut bytes = vec![0; kind.bytes()];
        put_names(&mut bytes, kind as u8, &self.identity);
        let body = &mut bytes[BODY_AT..];
        match &self.body {
            Body::Select { path, end } => {
                body[..2].copy_from_slice(&path.to_be_bytes());
                put_path(&mut body[8..], end);
            }
            Body::RequesterQp(qp) | Body::SourceQp(qp) => {
                body[..4].copy_from_slice(&qp.qpn.get().to_be_bytes());
                body[4..].copy_from_slice(&qp.psn.get().to_be_bytes());
            }
            Body::Grant(terms) => {
                body[0] = match terms.form {
                    Form::Registration => 1,
                    Form::Window => 2,
                };
                body[4..8].copy_from_slice(&terms.key.to_be_bytes());
                body[8..16].copy_from_slice(&terms.address.to_be_bytes());
                body[16..24].copy_from_slice(&terms.length.to_be_bytes());
                body[24..28].copy_from_slice(&terms.valid_ms.to_be_bytes());
            }
            Body::Admit | Body::Connected | Body::Done | Body::Ack | Body::Ready => {}
        }
        bytes
    }

    /// How long the frame is whose first bytes these are.
    pub(crate) fn kind_of(head: &[u8; HEAD_BYTES]) -> Result<Kind, WireError> {
        let found = check_head(head)?;
        Kind::from_byte(found).ok_or(WireError::Unknown { field: "phase", found })
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let head = bytes.first_chunk::<HEAD_BYTES>();
        let short = |expected: usize| WireError::Length { found: bytes.len() as u64, expected: expected as u64 };
        let kind = Self::kind_of(head.ok_or(short(HEAD_BYTES))?)?;
        if bytes.len() != kind.bytes() {
            return Err(short(kind.bytes()));
        }
        let identity = names(bytes);
        let body = &bytes[BODY_AT..];
        let body = match kind {
            Kind::Select => {
                if body[2..8] != [0; 6] {
                    return Err(WireError::Reserved { field: "a choice of path" });
                }
                Body::Select { path: u16::from_be_bytes(array(body, 0)), end: path(&body[8..])? }
            }
            Kind::RequesterQp => Body::RequesterQp(endpoint(body)?),
            Kind::SourceQp => Body::SourceQp(endpoint(body)?),
            Kind::Grant => Body::Grant(terms(body)?),
            Kind::Admit => Body::Admit,
            Kind::Connected => Body::Connected,
            Kind::Done => Body::Done,
            Kind::Ack => Body::Ack,
            Kind::Ready => Body::Ready,
        };
        Ok(Self { identity, body })
    }
}

/// The head of a frame, and the names behind it.
pub(super) fn put_names(bytes: &mut [u8], kind: u8, id: &Identity) {
    put_head(bytes, kind);
    let names =
        [id.source_epoch, id.requester_epoch, id.source_pd.0, id.requester_pd.0, id.source_link.0, id.requester_link.0];
    for (name, into) in names.iter().zip(bytes[HEAD_BYTES..108].chunks_exact_mut(16)) {
        into.copy_from_slice(name);
    }
    bytes[108..116].copy_from_slice(&id.request.to_be_bytes());
    bytes[116..132].copy_from_slice(&id.digest.0);
    bytes[132..140].copy_from_slice(&id.generation.to_be_bytes());
}

/// The names of a frame that is as long as them at least.
pub(super) fn names(bytes: &[u8]) -> Identity {
    let name = |at: usize| Incarnation(array(bytes, at));
    Identity {
        source_epoch: array(bytes, 12),
        requester_epoch: array(bytes, 28),
        source_pd: name(44),
        requester_pd: name(60),
        source_link: name(76),
        requester_link: name(92),
        request: number(bytes, 108),
        digest: Digest(array(bytes, 116)),
        generation: number(bytes, 132),
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

fn endpoint(body: &[u8]) -> Result<QpEndpoint, WireError> {
    let (qpn, psn) = (Qpn::new(word(body, 0)), Psn::new(word(body, 4)));
    let wrong = WireError::Foreign { field: "QP number or PSN" };
    Ok(QpEndpoint { qpn: qpn.ok_or(wrong.clone())?, psn: psn.ok_or(wrong)? })
}

fn terms(body: &[u8]) -> Result<GrantTerms, WireError> {
    let form = match body[0] {
        1 => Form::Registration,
        2 => Form::Window,
        found => return Err(WireError::Unknown { field: "form of a grant", found }),
    };
    if body[1..4] != [0; 3] || body[28..32] != [0; 4] {
        return Err(WireError::Reserved { field: "a grant" });
    }
    let (address, length, valid_ms) = (number(body, 8), number(body, 16), word(body, 24));
    if length == 0 || address.checked_add(length).is_none() {
        return Err(WireError::Overflow { offset: address, length });
    }
    Ok(GrantTerms { form, key: word(body, 4), address, length, valid_ms })
}

const LINK_LAYERS: [LinkLayer; 2] = [LinkLayer::InfiniBand, LinkLayer::Ethernet];
const GID_TYPES: [GidType; 3] = [GidType::Ib, GidType::RoceV1, GidType::RoceV2];
const MTUS: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];

/// The place of `value` in its table, from 1.
fn code<T: PartialEq>(table: &[T], value: &T) -> u8 {
    table.iter().position(|known| known == value).map_or(0, |at| u8::try_from(at + 1).unwrap_or(0))
}

fn value<T: Copy>(table: &[T], field: &'static str, found: u8) -> Result<T, WireError> {
    let at = usize::from(found).checked_sub(1);
    at.and_then(|at| table.get(at)).copied().ok_or(WireError::Unknown { field, found })
}

pub(super) fn put_path(into: &mut [u8], end: &PathEnd) {
    let port = &end.port;
    into[..16].copy_from_slice(&end.pd.0);
    into[16..24].copy_from_slice(&port.device_guid.to_be_bytes());
    into[24..40].copy_from_slice(&port.gid.0);
    into[40..42].copy_from_slice(&port.lid.to_be_bytes());
    into[42..44].copy_from_slice(&port.pkey.to_be_bytes());
    into[44] = port.port;
    into[45] = code(&LINK_LAYERS, &port.link_layer);
    into[46] = code(&GID_TYPES, &port.gid_type);
    into[47] = code(&MTUS, &port.mtu);
    into[48] = end.rd_atomic.initiator;
    into[49] = end.rd_atomic.responder;
    into[50] = u8::from(end.invalidates);
    into[51] = end.rail;
}

pub(super) fn path(bytes: &[u8]) -> Result<PathEnd, WireError> {
    if bytes[52..64] != [0; 12] {
        return Err(WireError::Reserved { field: "a path" });
    }
    let pd = Incarnation(array(bytes, 0));
    if pd.is_none() {
        return Err(WireError::Foreign { field: "protection domain" });
    }
    let invalidates = match bytes[50] {
        0 => false,
        1 => true,
        found => return Err(WireError::Unknown { field: "features of a path", found }),
    };
    let port = PortIdentity {
        device_guid: number(bytes, 16),
        port: bytes[44],
        link_layer: value(&LINK_LAYERS, "link layer", bytes[45])?,
        lid: u16::from_be_bytes(array(bytes, 40)),
        gid: Gid(array(bytes, 24)),
        gid_type: value(&GID_TYPES, "GID type", bytes[46])?,
        // It means nothing to a peer, and is not told.
        gid_index: 0,
        pkey: u16::from_be_bytes(array(bytes, 42)),
        mtu: value(&MTUS, "MTU", bytes[47])?,
    };
    let rd_atomic = RdAtomic { initiator: bytes[48], responder: bytes[49] };
    let rail = bytes[51];
    if usize::from(rail) >= PATHS_MAX {
        return Err(WireError::Unknown { field: "rail of a path", found: rail });
    }
    Ok(PathEnd { pd, port, rd_atomic, invalidates, rail })
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
