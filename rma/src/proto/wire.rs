//! What owner and consumer say to each other: requests and replies, and the two descriptors.
//!
//! All numbers are big endian. `docs/rendezvous.md` has the tables.
//!
//! ```text
//! request, reply   version 1 | opcode | correlation u64 | fields of the opcode
//! descriptor       version 1 | backend | total length u64 | n = length of the key, at most 64 | n bytes of key
//! indirect         version 1 | handle 16 bytes | total length u64
//! ```
//!
//! Decoding is total: any bytes give a value or a typed error, and a value that was read is written in the same bytes.

use super::handle::{HANDLE_BYTES, Handle};

mod cursor;
#[cfg(test)]
mod tests;

use cursor::{Reader, Writer};

/// The version that this side speaks.
pub const WIRE_VERSION: u8 = 1;

/// Longest key of a descriptor in bytes.
pub const KEY_MAX_BYTES: usize = 64;

/// READs on an RC QP of plain verbs: the key is a remote address (u64) and an rkey (u32).
pub const BACKEND_VERBS: u8 = 1;

/// Bytes of that key.
pub const VERBS_KEY_BYTES: usize = 12;

/// Bytes that are no request, reply or descriptor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// They end too early.
    #[error("{what}: {have} bytes are left where {need} are needed")]
    Truncated {
        /// The field.
        what: &'static str,
        /// Bytes that it takes.
        need: usize,
        /// Bytes that there are.
        have: usize,
    },
    /// Another version: the peer runs a release that this one cannot talk to.
    #[error("version {found}, but this side speaks version {WIRE_VERSION}")]
    Version {
        /// What came.
        found: u8,
    },
    /// No such request or reply.
    #[error("unknown opcode {found:#04x}")]
    Opcode {
        /// What came.
        found: u8,
    },
    /// More bytes than the fields take.
    #[error("{bytes} bytes behind the last field")]
    Trailing {
        /// How many.
        bytes: usize,
    },
    /// A key longer than any backend's.
    #[error("key of {bytes} bytes, at most {KEY_MAX_BYTES} are allowed")]
    KeyTooLong {
        /// What came.
        bytes: usize,
    },
    /// A key that is not as long as its backend's keys are.
    #[error("key of {bytes} bytes for backend {backend}, whose keys have {expected}")]
    KeyLength {
        /// The backend.
        backend: u8,
        /// What came.
        bytes: usize,
        /// What it should be.
        expected: usize,
    },
    /// A field whose value cannot be.
    #[error("{what} is {value}")]
    Field {
        /// The field, and what is wrong with it.
        what: &'static str,
        /// What came.
        value: u64,
    },
}

/// What a consumer asks of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Comes back in the reply; chosen by the consumer.
    pub correlation: u64,
    /// What is asked.
    pub call: Call,
}

/// The calls. The last three are not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Length and so on, without a lease.
    Metadata {
        /// Of what.
        handle: Handle,
    },
    /// A lease, and a way to the bytes.
    Acquire {
        /// To what.
        handle: Handle,
        /// Largest chunk that the consumer wants, in bytes, where chunks are the way.
        chunk_bytes: u32,
        /// What the consumer can do; `None`, as from a peer without this field: chunks only.
        capability: Option<Capability>,
    },
    /// One chunk.
    Pull {
        /// From the reply to acquire.
        transfer: u64,
        /// From 0.
        index: u64,
    },
    /// One reference more.
    Ref {
        /// To what.
        handle: Handle,
    },
    /// The lease begins anew.
    Renew {
        /// Of what.
        handle: Handle,
        /// Which.
        lease: u64,
    },
    /// Ends the lease; the reference stays.
    Detach {
        /// Of what.
        handle: Handle,
        /// Which.
        lease: u64,
    },
    /// Ends the lease, and a reference with it.
    Release {
        /// Of what.
        handle: Handle,
        /// Which.
        lease: u64,
    },
    /// The receiver of a message gives up on its payload: a reference goes, and the sender hears that it did not arrive.
    Refuse {
        /// Of what.
        handle: Handle,
    },
}

/// What a consumer can do, as it tells the owner at acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Bit n: understands backend n.
    pub backends: u8,
    /// Bytes that it has set aside for the payload.
    pub room_bytes: u64,
}

impl Capability {
    /// Whether it understands READs on an RC QP.
    pub const fn has_verbs(self) -> bool {
        self.backends & (1 << BACKEND_VERBS) != 0
    }
}

/// Bytes of a [`Capability`]; a later version may append to it.
const CAPABILITY_BYTES: usize = 9;

/// What an owner answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The request's.
    pub correlation: u64,
    /// The answer.
    pub answer: Answer,
}

/// The answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To metadata.
    Metadata(Metadata),
    /// To acquire.
    Acquired {
        /// Names the lease.
        lease: u64,
        /// How long it lasts, from the moment at which the owner read the request.
        lease_ms: u32,
        /// The way to the bytes.
        grant: Grant,
    },
    /// To pull; the frame's payload is the chunk.
    Chunk {
        /// Which.
        index: u64,
    },
    /// To ref.
    Referenced {
        /// References now.
        refcount: u32,
    },
    /// To renew.
    Renewed {
        /// How long the lease lasts, from the moment at which the owner read the request.
        lease_ms: u32,
    },
    /// To any of them.
    Refused(Refused),
}

/// What is known of a staged payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Its bytes.
    pub total_bytes: u64,
    /// References to it.
    pub refcount: u32,
    /// Whether it lies in an arena, from where a peer can READ it.
    pub pinned: bool,
}

/// The way to the bytes, as the owner decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grant {
    /// By READ.
    Read(Descriptor),
    /// By asking for chunks.
    Chunks(Chunks),
}

/// A payload cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// Names the transfer in pulls.
    pub transfer: u64,
    /// Bytes of the payload.
    pub total_bytes: u64,
    /// Bytes of each chunk but the last; never 0.
    pub chunk_bytes: u32,
    /// Why not by READ.
    pub reason: PathReason,
}

impl Chunks {
    /// ⌈total ÷ chunk⌉; 0 for an empty payload.
    pub const fn count(self) -> u64 {
        self.total_bytes.div_ceil(self.chunk_bytes as u64)
    }

    /// Bytes of a chunk; `None` beyond the last.
    pub fn len_of(self, index: u64) -> Option<u32> {
        let start = index.checked_mul(self.chunk_bytes.into()).filter(|&start| start < self.total_bytes)?;
        let left = self.total_bytes - start;
        Some(u32::try_from(left).unwrap_or(u32::MAX).min(self.chunk_bytes))
    }
}

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $code:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$vdoc])* $variant,)*
            /// One that this version does not know.
            Other(u8),
        }

        impl $name {
            const fn to_wire(self) -> u8 {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Other(code) => code,
                }
            }

            const fn from_wire(code: u8) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    code => Self::Other(code),
                }
            }

            /// The name in counters and logs.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                    Self::Other(_) => "other",
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    Self::Other(code) => write!(f, "code {code}"),
                    known => f.write_str(&known.name().replace('_', " ")),
                }
            }
        }
    };
}

codes! {
    /// Why a payload goes by chunks and not by READ.
    PathReason {
        /// The payload does not lie in an arena.
        NotPinned = 1 "not_pinned",
        /// The consumer does not understand READs, or the owner has no RDMA path.
        NoCapability = 2 "no_capability",
        /// There is no bulk QP, and none can be made now.
        NoBulkQp = 3 "no_bulk_qp",
        /// The arenas were full when the payload was staged.
        PoolFull = 4 "pool_full",
        /// The owner has as many READ leases as it allows, or the slice could not be registered.
        LeaseBudget = 5 "lease_budget",
        /// A READ failed, and this is the second try.
        GetFailed = 6 "get_failed",
        /// READs are switched off.
        Disabled = 7 "disabled",
    }
}

codes! {
    /// Why an owner refuses.
    RefusalCode {
        /// No such slot: it never was, or is freed.
        UnknownHandle = 1 "unknown_handle",
        /// The slot's time is over, or its last reference is gone; older leases still hold it.
        Expired = 2 "expired",
        /// No such lease of this peer, or the lease is of another slot.
        UnknownLease = 3 "unknown_lease",
        /// The lease's time is over.
        LeaseOver = 4 "lease_over",
        /// No such transfer of this peer: its lease has ended.
        UnknownTransfer = 5 "unknown_transfer",
        /// There are fewer chunks.
        IndexBeyondEnd = 6 "index_beyond_end",
        /// The handle is of another run of this worker, or of another worker.
        WrongWorker = 7 "wrong_worker",
        /// As many references or leases as are allowed.
        TooMany = 8 "too_many",
        /// The request could not be read.
        BadRequest = 9 "bad_request",
        /// The owner is shutting down.
        ShuttingDown = 10 "shutting_down",
    }
}

/// An owner's refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Why.
    pub code: RefusalCode,
    /// The number beside it: chunks that there are, leases allowed, the run that answers; else 0.
    pub detail: u64,
}

/// What a peer needs for a READ of one lease's bytes. Serves one transfer and is dropped with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Bytes of the payload.
    pub total_bytes: u64,
    /// Where, and by what right.
    pub key: Key,
}

/// The key of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// Plain verbs.
    Verbs {
        /// First byte.
        addr: u64,
        /// The right to read it.
        rkey: u32,
    },
    /// A backend that this version does not know: chunks are the way then.
    Unknown {
        /// Which.
        backend: u8,
        /// Its key.
        bytes: Vec<u8>,
    },
}

/// The payload of an indirect frame: what to pull in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indirect {
    /// The staged payload.
    pub handle: Handle,
    /// Its bytes.
    pub total_bytes: u64,
}

/// Bytes of an [`Indirect`].
pub const INDIRECT_BYTES: usize = 1 + HANDLE_BYTES + 8;

impl Request {
    /// For the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(self.call.opcode(), self.correlation);
        match self.call {
            Call::Metadata { handle } | Call::Ref { handle } | Call::Refuse { handle } => out.handle(handle),
            Call::Acquire { handle, chunk_bytes, capability } => {
                out.handle(handle);
                out.u32(chunk_bytes);
                match capability {
                    None => out.u8(0),
                    Some(Capability { backends, room_bytes }) => {
                        out.u8(CAPABILITY_LEN);
                        out.u8(backends);
                        out.u64(room_bytes);
                    }
                }
            }
            Call::Pull { transfer, index } => {
                out.u64(transfer);
                out.u64(index);
            }
            Call::Renew { handle, lease } | Call::Detach { handle, lease } | Call::Release { handle, lease } => {
                out.handle(handle);
                out.u64(lease);
            }
        }
        out.done()
    }

    /// Reads a request.
    ///
    /// # Errors
    ///
    /// [`WireError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (mut from, opcode, correlation) = Reader::opened(bytes)?;
        let call = match opcode {
            1 => Call::Metadata { handle: from.handle()? },
            2 => {
                let (handle, chunk_bytes) = (from.handle()?, from.u32("chunk size")?);
                if chunk_bytes == 0 {
                    return Err(WireError::Field { what: "chunk size must not be 0; it", value: 0 });
                }
                Call::Acquire { handle, chunk_bytes, capability: capability(&mut from)? }
            }
            3 => Call::Pull { transfer: from.u64("transfer")?, index: from.u64("index")? },
            4 => Call::Ref { handle: from.handle()? },
            5 => Call::Renew { handle: from.handle()?, lease: from.u64("lease")? },
            6 => Call::Detach { handle: from.handle()?, lease: from.u64("lease")? },
            7 => Call::Release { handle: from.handle()?, lease: from.u64("lease")? },
            8 => Call::Refuse { handle: from.handle()? },
            found => return Err(WireError::Opcode { found }),
        };
        from.done()?;
        Ok(Self { correlation, call })
    }

    /// The correlation of bytes that are no request otherwise: so that its sender gets an answer.
    pub fn correlation_of(bytes: &[u8]) -> Option<u64> {
        Reader::opened(bytes).ok().map(|(_, _, correlation)| correlation)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "9 fits")]
const CAPABILITY_LEN: u8 = CAPABILITY_BYTES as u8;

/// A length, then what this version knows of it; what a later version appends is skipped.
fn capability(from: &mut Reader<'_>) -> Result<Option<Capability>, WireError> {
    // Peers from before this field end here.
    if from.is_empty() {
        return Ok(None);
    }
    let len = usize::from(from.u8("length of the capability")?);
    let mut bytes = Reader::new(from.bytes("capability", len)?);
    if len == 0 {
        return Ok(None);
    }
    Ok(Some(Capability { backends: bytes.u8("backends")?, room_bytes: bytes.u64("room")? }))
}

impl Call {
    const fn opcode(self) -> u8 {
        match self {
            Self::Metadata { .. } => 1,
            Self::Acquire { .. } => 2,
            Self::Pull { .. } => 3,
            Self::Ref { .. } => 4,
            Self::Renew { .. } => 5,
            Self::Detach { .. } => 6,
            Self::Release { .. } => 7,
            Self::Refuse { .. } => 8,
        }
    }

    /// Whether the owner answers it.
    pub const fn is_answered(self) -> bool {
        !matches!(self, Self::Detach { .. } | Self::Release { .. } | Self::Refuse { .. })
    }

    /// The name in counters and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Metadata { .. } => "metadata",
            Self::Acquire { .. } => "acquire",
            Self::Pull { .. } => "pull",
            Self::Ref { .. } => "ref",
            Self::Renew { .. } => "renew",
            Self::Detach { .. } => "detach",
            Self::Release { .. } => "release",
            Self::Refuse { .. } => "refuse",
        }
    }
}

impl Reply {
    /// For the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(self.answer.opcode(), self.correlation);
        match &self.answer {
            Answer::Metadata(Metadata { total_bytes, refcount, pinned }) => {
                out.u64(*total_bytes);
                out.u32(*refcount);
                out.u8(u8::from(*pinned));
            }
            Answer::Acquired { lease, lease_ms, grant } => {
                out.u64(*lease);
                out.u32(*lease_ms);
                match grant {
                    Grant::Read(descriptor) => {
                        out.u8(1);
                        descriptor.write(&mut out);
                    }
                    Grant::Chunks(Chunks { transfer, total_bytes, chunk_bytes, reason }) => {
                        out.u8(2);
                        out.u64(*transfer);
                        out.u64(*total_bytes);
                        out.u32(*chunk_bytes);
                        out.u8(reason.to_wire());
                    }
                }
            }
            Answer::Chunk { index } => out.u64(*index),
            Answer::Referenced { refcount } => out.u32(*refcount),
            Answer::Renewed { lease_ms } => out.u32(*lease_ms),
            Answer::Refused(Refused { code, detail }) => {
                out.u8(code.to_wire());
                out.u64(*detail);
            }
        }
        out.done()
    }

    /// Reads a reply.
    ///
    /// # Errors
    ///
    /// [`WireError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (mut from, opcode, correlation) = Reader::opened(bytes)?;
        let answer = match opcode {
            0x81 => Answer::Metadata(Metadata {
                total_bytes: from.u64("total length")?,
                refcount: from.u32("refcount")?,
                pinned: match from.u8("pinned")? {
                    0 => false,
                    1 => true,
                    other => return Err(WireError::Field { what: "pinned must be 0 or 1; it", value: other.into() }),
                },
            }),
            0x82 => {
                let (lease, lease_ms) = (from.u64("lease")?, from.u32("lease duration")?);
                Answer::Acquired { lease, lease_ms, grant: grant(&mut from)? }
            }
            0x83 => Answer::Chunk { index: from.u64("index")? },
            0x84 => Answer::Referenced { refcount: from.u32("refcount")? },
            0x85 => Answer::Renewed { lease_ms: from.u32("lease duration")? },
            0xff => {
                Answer::Refused(Refused { code: RefusalCode::from_wire(from.u8("code")?), detail: from.u64("detail")? })
            }
            found => return Err(WireError::Opcode { found }),
        };
        from.done()?;
        Ok(Self { correlation, answer })
    }
}

fn grant(from: &mut Reader<'_>) -> Result<Grant, WireError> {
    match from.u8("kind of grant")? {
        1 => Ok(Grant::Read(Descriptor::read(from)?)),
        2 => {
            let chunks = Chunks {
                transfer: from.u64("transfer")?,
                total_bytes: from.u64("total length")?,
                chunk_bytes: from.u32("chunk size")?,
                reason: PathReason::from_wire(from.u8("reason")?),
            };
            if chunks.chunk_bytes == 0 {
                return Err(WireError::Field { what: "chunk size must not be 0; it", value: 0 });
            }
            Ok(Grant::Chunks(chunks))
        }
        other => Err(WireError::Field { what: "kind of grant must be 1 or 2; it", value: other.into() }),
    }
}

impl Answer {
    const fn opcode(&self) -> u8 {
        match self {
            Self::Metadata(_) => 0x81,
            Self::Acquired { .. } => 0x82,
            Self::Chunk { .. } => 0x83,
            Self::Referenced { .. } => 0x84,
            Self::Renewed { .. } => 0x85,
            Self::Refused(_) => 0xff,
        }
    }
}

impl Descriptor {
    /// For the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::bare();
        self.write(&mut out);
        out.done()
    }

    fn write(&self, out: &mut Writer) {
        out.u8(WIRE_VERSION);
        match &self.key {
            Key::Verbs { addr, rkey } => {
                out.u8(BACKEND_VERBS);
                out.u64(self.total_bytes);
                #[expect(clippy::cast_possible_truncation, reason = "12 fits")]
                out.u8(VERBS_KEY_BYTES as u8);
                out.u64(*addr);
                out.u32(*rkey);
            }
            Key::Unknown { backend, bytes } => {
                let bytes = &bytes[..bytes.len().min(KEY_MAX_BYTES)];
                out.u8(*backend);
                out.u64(self.total_bytes);
                out.u8(u8::try_from(bytes.len()).unwrap_or_default());
                out.bytes(bytes);
            }
        }
    }

    /// Reads a descriptor.
    ///
    /// # Errors
    ///
    /// [`WireError`]. That the key is well formed does not mean that it still opens anything.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut from = Reader::new(bytes);
        let descriptor = Self::read(&mut from)?;
        from.done()?;
        Ok(descriptor)
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        from.version()?;
        let (backend, total_bytes) = (from.u8("backend")?, from.u64("total length")?);
        let len = usize::from(from.u8("length of the key")?);
        if len > KEY_MAX_BYTES {
            return Err(WireError::KeyTooLong { bytes: len });
        }
        let mut key = Reader::new(from.bytes("key", len)?);
        let key = match (backend, len) {
            (BACKEND_VERBS, VERBS_KEY_BYTES) => Key::Verbs { addr: key.u64("address")?, rkey: key.u32("rkey")? },
            (BACKEND_VERBS, bytes) => {
                return Err(WireError::KeyLength { backend, bytes, expected: VERBS_KEY_BYTES });
            }
            (backend, len) => Key::Unknown { backend, bytes: key.bytes("key", len)?.to_vec() },
        };
        if let Key::Verbs { addr, .. } = key {
            if addr.checked_add(total_bytes).is_none() {
                return Err(WireError::Field { what: "address and length wrap around; the address", value: addr });
            }
        }
        Ok(Self { total_bytes, key })
    }
}

impl Indirect {
    /// For the wire.
    pub fn encode(self) -> Vec<u8> {
        let mut out = Writer::bare();
        out.u8(WIRE_VERSION);
        out.handle(self.handle);
        out.u64(self.total_bytes);
        out.done()
    }

    /// Reads the payload of an indirect frame.
    ///
    /// # Errors
    ///
    /// [`WireError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut from = Reader::new(bytes);
        from.version()?;
        let indirect = Self { handle: from.handle()?, total_bytes: from.u64("total length")? };
        from.done()?;
        Ok(indirect)
    }
}
