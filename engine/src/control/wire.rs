//! The control wire, version 1, byte by byte. See `docs/engine-wire.md`.
//!
//! Everything is checked here that can be checked without knowing the other frames of the connection.

use super::about::{ABOUT_BYTES_MAX, About};
use crate::{
    Epoch, Profile,
    memory::{Permission, Registration, Span},
};

/// The first bytes of every frame.
const MAGIC: [u8; 8] = *b"VRBSENGN";
/// The one version that is spoken. A change of the wire takes the next one; there is no legacy mode.
const VERSION: u16 = 1;
const HEAD_BYTES: usize = 12;
const KIND_AT: usize = 8 + 2;
/// Flags in a request; 0 in every other frame.
const FLAGS_AT: usize = HEAD_BYTES - 1;
const _: () = assert!(FLAGS_AT == KIND_AT + 1, "magic, version, kind, flags");
/// The flag of a request for the direct profile.
const DIRECT: u8 = 1;
pub(crate) const REQUEST_BYTES: usize = 52;
pub(crate) const REPLY_BYTES: usize = 36;
/// Behind a request for operations 4 to 7.
pub(crate) const ASK_BYTES: usize = 100;
/// Behind the ask for operations 6 and 7, if it names a pair of QPs that is kept.
pub(crate) const PLAN_BYTES: usize = 1940;
/// Where the names of a kept pair stand in an ask: zeros if there is none.
const KEPT_NAMES_AT: usize = 52;
const DESCRIPTOR_BYTES: usize = 32;
const COUNT_BYTES: usize = 4;
/// A short name and a device or two.
const ABOUT_ROOM: usize = 128;
/// More regions than this are in no description.
const REGIONS_MAX: u32 = 4096;
/// Ends the body of a notification: a body without it was cut off.
pub(crate) const COMMIT_BYTE: u8 = 0;

/// What a requester asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Opcode {
    Describe = 0,
    Read = 1,
    Write = 2,
    Notify = 3,
    /// The next four are known and answered with [`Status::BackendUnavailable`] where there is no device.
    RdmaRead = 4,
    RdmaWrite = 5,
    SlicedRdmaRead = 6,
    SlicedRdmaWrite = 7,
}

/// How a source answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Status {
    /// Done.
    Success = 0,
    /// The source lives in another epoch: it was restarted, or never was the one meant.
    EpochMismatch = 1,
    /// No active range has this number: it was unregistered. Refresh the segment.
    UnknownRegion = 2,
    /// The range is not open for this operation.
    PermissionDenied = 3,
    /// The bytes are not all within the range.
    InvalidRange = 4,
    /// The source takes no more operations.
    SourceClosed = 5,
    /// A budget of the source is spent, or the payload is larger than it takes.
    Exhausted = 6,
    /// The source could not make sense of the frame.
    ProtocolError = 7,
    /// The source failed inside.
    InternalError = 8,
    /// Go on: send the body.
    Ready = 9,
    /// The source has no such transport.
    BackendUnavailable = 10,
    /// The source's device failed.
    BackendError = 11,
    /// The source does not have the connection that was named.
    CacheMiss = 12,
    /// The source does not serve the direct profile, or not for this operation. The staged one it may.
    DirectRefused = 13,
}

/// Bytes that are no frame of this wire.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Not an engine that talks.
    #[error("a frame starts with {found:02x?}, not with the magic of this wire")]
    Magic {
        /// Its first 8 bytes.
        found: [u8; 8],
    },
    /// An engine of another version.
    #[error("wire version {found}, but only version {VERSION} is spoken here")]
    Version {
        /// The version it has.
        found: u16,
    },
    /// A number that nothing stands for.
    #[error("{field} {found} is not known")]
    Unknown {
        /// "operation", "status", "permission" or "flags", say.
        field: &'static str,
        /// What stands there.
        found: u8,
    },
    /// Bytes that must be zero are not.
    #[error("reserved bytes of {field} are not zero")]
    Reserved {
        /// Which.
        field: &'static str,
    },
    /// A field that this operation or status leaves at zero is not.
    #[error("{field} is {found}, but must be 0 in this frame")]
    NotZero {
        /// Which.
        field: &'static str,
        /// What stands there.
        found: u64,
    },
    /// Offset and length do not add up in 64 bits.
    #[error("offset {offset} and length {length} overflow")]
    Overflow {
        /// The offset, or a base address.
        offset: u64,
        /// The length.
        length: u64,
    },
    /// A length other than this reply must have.
    #[error("a length of {found} bytes, where {expected} were due")]
    Length {
        /// What stands there.
        found: u64,
        /// What the request, or the count of regions, asks for.
        expected: u64,
    },
    /// A description of more regions than there may be.
    #[error("{found} regions in a description, but at most {REGIONS_MAX} may be")]
    TooManyRegions {
        /// What stands there.
        found: u32,
    },
    /// Regions of a description whose ids do not ascend.
    #[error("region {id} stands behind region {before}")]
    Unsorted {
        /// The later one.
        id: u64,
        /// The one before it.
        before: u64,
    },
    /// A status that is no answer to this request at this point.
    #[error("{status:?} is no answer to this request at this point")]
    OutOfPlace {
        /// The status.
        status: Status,
    },
    /// Success from an engine of another epoch than the one that was asked.
    #[error("the reply comes from epoch {actual}")]
    ForeignEpoch {
        /// The epoch it came from.
        actual: Epoch,
    },
    /// A notification that is not UTF-8.
    #[error("{field} of a notification is not UTF-8")]
    NotUtf8 {
        /// "name" or "message".
        field: &'static str,
    },
    /// A frame of an operation over RDMA names something else than this operation is about.
    #[error("the frame is about another {field}")]
    Foreign {
        /// What it has wrong.
        field: &'static str,
    },
    /// A grant that is not newer than one that was used.
    #[error("grant {found} is not newer than {last}, which was used")]
    Generation {
        /// What stands there.
        found: u64,
        /// The last one.
        last: u64,
    },
    /// A frame of an operation over RDMA that is not due: it came before, or too early.
    #[error("phase {found} is out of its turn, {due} is due")]
    OutOfTurn {
        /// What stands there.
        found: u8,
        /// What must come; 0 if nothing.
        due: u8,
    },
    /// A plan of rails, for an operation over several pairs of devices, that does not cover the request once.
    #[error("rail {rail} of a plan {reason}")]
    Plan {
        /// Which, from 0.
        rail: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// What a source says of itself ends too early.
    #[error("a description is cut off behind its regions")]
    AboutCut,
    /// Bytes behind the end of a description.
    #[error("{left} bytes behind the end of a description")]
    AboutLong {
        /// How many.
        left: usize,
    },
    /// A description of more devices than an engine may have.
    #[error("{found} devices in a description, but at most 16 may be")]
    TooManyDevices {
        /// What stands there.
        found: u8,
    },
    /// A name in a description that is too long.
    #[error("{what} takes {found} bytes, which is too long")]
    LongName {
        /// Whose.
        what: &'static str,
        /// Its bytes.
        found: u8,
    },
    /// A name in a description that is not UTF-8.
    #[error("{what} is not UTF-8")]
    NameNotUtf8 {
        /// Whose.
        what: &'static str,
    },
    /// The last byte of a notification is wrong.
    #[error("a notification ends with {found:#04x} instead of the commit byte")]
    Commit {
        /// What stands there.
        found: u8,
    },
}

/// 52 bytes, requester to source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) opcode: Opcode,
    pub(crate) epoch: Epoch,
    pub(crate) region: u64,
    /// Bytes from the start of the region; the length of the name in a notification.
    pub(crate) offset: u64,
    /// Bytes to move; the length of the message in a notification.
    pub(crate) length: u64,
    /// The one flag that there is: READs and WRITEs may be direct.
    pub(crate) profile: Profile,
}

/// 36 bytes, source to requester.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: Status,
    /// Whose answer it is.
    pub(crate) epoch: Epoch,
    /// Of the payload that follows.
    pub(crate) length: u64,
}

/// The payload that answers [`Opcode::Describe`]: a source as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Description {
    /// By ascending id.
    pub(crate) regions: Vec<Descriptor>,
    pub(crate) about: About,
}

/// One region of a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) id: u64,
    pub(crate) span: Span,
    pub(crate) permission: Permission,
}

impl Opcode {
    /// Whether more comes behind the request, at once.
    pub(crate) fn has_ask(self) -> bool {
        matches!(self, Self::RdmaRead | Self::RdmaWrite | Self::SlicedRdmaRead | Self::SlicedRdmaWrite)
    }

    /// Whether it goes over several pairs of devices.
    pub(crate) fn is_sliced(self) -> bool {
        matches!(self, Self::SlicedRdmaRead | Self::SlicedRdmaWrite)
    }

    /// Whether a plan follows the ask at once.
    pub(crate) fn has_plan(self, ask: &[u8; ASK_BYTES]) -> bool {
        self.is_sliced() && ask[KEPT_NAMES_AT..].iter().any(|byte| *byte != 0)
    }

    /// Whether it is about bytes of a range, and so has a profile.
    fn moves_ranges(self) -> bool {
        !matches!(self, Self::Describe | Self::Notify)
    }

    fn from_byte(byte: u8) -> Result<Self, WireError> {
        Ok(match byte {
            0 => Self::Describe,
            1 => Self::Read,
            2 => Self::Write,
            3 => Self::Notify,
            4 => Self::RdmaRead,
            5 => Self::RdmaWrite,
            6 => Self::SlicedRdmaRead,
            7 => Self::SlicedRdmaWrite,
            found => return Err(WireError::Unknown { field: "operation", found }),
        })
    }
}

impl Status {
    fn from_byte(byte: u8) -> Result<Self, WireError> {
        Ok(match byte {
            0 => Self::Success,
            1 => Self::EpochMismatch,
            2 => Self::UnknownRegion,
            3 => Self::PermissionDenied,
            4 => Self::InvalidRange,
            5 => Self::SourceClosed,
            6 => Self::Exhausted,
            7 => Self::ProtocolError,
            8 => Self::InternalError,
            9 => Self::Ready,
            10 => Self::BackendUnavailable,
            11 => Self::BackendError,
            12 => Self::CacheMiss,
            13 => Self::DirectRefused,
            found => return Err(WireError::Unknown { field: "status", found }),
        })
    }
}

impl Request {
    /// The one that asks for all regions.
    pub(crate) fn describe(epoch: Epoch) -> Self {
        Self { opcode: Opcode::Describe, epoch, region: 0, offset: 0, length: 0, profile: Profile::Staged }
    }

    pub(crate) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        put_head(&mut bytes, self.opcode as u8);
        bytes[FLAGS_AT] = match self.profile {
            Profile::Staged => 0,
            Profile::Direct => DIRECT,
        };
        bytes[12..28].copy_from_slice(&self.epoch.to_bytes());
        bytes[28..36].copy_from_slice(&self.region.to_be_bytes());
        bytes[36..44].copy_from_slice(&self.offset.to_be_bytes());
        bytes[44..52].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, WireError> {
        check_start(bytes)?;
        let opcode = Opcode::from_byte(bytes[KIND_AT])?;
        let profile = match bytes[FLAGS_AT] {
            0 => Profile::Staged,
            DIRECT if opcode.moves_ranges() => Profile::Direct,
            found => return Err(WireError::Unknown { field: "flags", found }),
        };
        let epoch = Epoch::from_bytes(array(bytes, 12));
        let (region, offset, length) = (number(bytes, 28), number(bytes, 36), number(bytes, 44));
        if matches!(opcode, Opcode::Describe | Opcode::Notify) {
            zero("region", region)?;
        }
        if opcode == Opcode::Describe {
            zero("offset", offset)?;
            zero("length", length)?;
        }
        if offset.checked_add(length).is_none() {
            return Err(WireError::Overflow { offset, length });
        }
        Ok(Self { opcode, epoch, region, offset, length, profile })
    }
}

impl Reply {
    pub(crate) fn encode(&self) -> [u8; REPLY_BYTES] {
        let mut bytes = [0; REPLY_BYTES];
        put_head(&mut bytes, self.status as u8);
        bytes[12..28].copy_from_slice(&self.epoch.to_bytes());
        bytes[28..36].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; REPLY_BYTES]) -> Result<Self, WireError> {
        let status = Status::from_byte(check_head(bytes)?)?;
        let (epoch, length) = (Epoch::from_bytes(array(bytes, 12)), number(bytes, 28));
        if status != Status::Success {
            zero("length", length)?;
        }
        Ok(Self { status, epoch, length })
    }
}

impl Descriptor {
    pub(crate) fn of(registration: &Registration) -> Self {
        Self { id: registration.id, span: registration.span, permission: registration.permission }
    }
}

impl Description {
    /// The longest one.
    pub(crate) const BYTES_MAX: u64 =
        COUNT_BYTES as u64 + REGIONS_MAX as u64 * DESCRIPTOR_BYTES as u64 + ABOUT_BYTES_MAX;

    /// # Panics
    ///
    /// With more regions than [`Config`](crate::Config) allows: a fault of ours.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let count = u32::try_from(self.regions.len()).ok().filter(|count| *count <= REGIONS_MAX);
        let mut bytes = Vec::with_capacity(COUNT_BYTES + self.regions.len() * DESCRIPTOR_BYTES + ABOUT_ROOM);
        bytes.extend_from_slice(&count.expect("the budget of ranges is at most 4,096").to_be_bytes());
        for Descriptor { id, span, permission } in &self.regions {
            bytes.extend_from_slice(&id.to_be_bytes());
            bytes.extend_from_slice(&span.start.to_be_bytes());
            bytes.extend_from_slice(&span.length.to_be_bytes());
            bytes.push(permission.bits());
            bytes.extend_from_slice(&[0; 7]);
        }
        self.about.encode(&mut bytes);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let length = |expected: usize| WireError::Length { found: bytes.len() as u64, expected: expected as u64 };
        let (count, rest) = bytes.split_first_chunk::<COUNT_BYTES>().ok_or(length(COUNT_BYTES))?;
        let count = u32::from_be_bytes(*count);
        if count > REGIONS_MAX {
            return Err(WireError::TooManyRegions { found: count });
        }
        let entries = count as usize * DESCRIPTOR_BYTES;
        let (entries, about) = rest.split_at_checked(entries).ok_or(length(COUNT_BYTES + entries))?;
        Ok(Self { regions: decode_regions(entries)?, about: About::decode(about)? })
    }
}

/// Whole entries.
fn decode_regions(entries: &[u8]) -> Result<Vec<Descriptor>, WireError> {
    let mut before = None;
    let mut descriptors = Vec::with_capacity(entries.len() / DESCRIPTOR_BYTES);
    for entry in entries.chunks_exact(DESCRIPTOR_BYTES) {
        let (id, offset, length) = (number(entry, 0), number(entry, 8), number(entry, 16));
        if let Some(before) = before.filter(|before| *before >= id) {
            return Err(WireError::Unsorted { id, before });
        }
        before = Some(id);
        let span = Span::new(offset, length).ok_or(WireError::Overflow { offset, length })?;
        let permission = Permission::from_bits(entry[24]).filter(|permission| *permission != Permission::LocalOnly);
        let permission = permission.ok_or(WireError::Unknown { field: "permission", found: entry[24] })?;
        if entry[25..] != [0; 7] {
            return Err(WireError::Reserved { field: "a region" });
        }
        descriptors.push(Descriptor { id, span, permission });
    }
    Ok(descriptors)
}

pub(crate) fn put_head(bytes: &mut [u8], kind: u8) {
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&VERSION.to_be_bytes());
    bytes[KIND_AT] = kind;
}

/// The operation or status byte of a frame whose first 12 bytes are sound, and which has no flags.
pub(crate) fn check_head(bytes: &[u8]) -> Result<u8, WireError> {
    check_start(bytes)?;
    if bytes[FLAGS_AT] != 0 {
        return Err(WireError::Reserved { field: "a header" });
    }
    Ok(bytes[KIND_AT])
}

fn check_start(bytes: &[u8]) -> Result<(), WireError> {
    let (found, version) = (array(bytes, 0), u16::from_be_bytes(array(bytes, 8)));
    if found != MAGIC {
        return Err(WireError::Magic { found });
    }
    if version != VERSION {
        return Err(WireError::Version { found: version });
    }
    Ok(())
}

fn zero(field: &'static str, found: u64) -> Result<(), WireError> {
    if found == 0 { Ok(()) } else { Err(WireError::NotZero { field, found }) }
}

pub(crate) fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// `N` bytes from `at`, which the caller knows to be there.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("a slice of N bytes")
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
