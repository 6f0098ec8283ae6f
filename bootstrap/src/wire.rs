//! Frames of version 1, byte by byte in `docs/bootstrap.md`. The only user of bincode, so that replacing it is a
//! change to one file.
//!
//! The first eleven bytes (length, magic, version, kind, status) and the numbers of `Refuse` and of
//! `UnsupportedVersion` are the same in every version, so that two versions can tell each other apart.

use std::io;

use bincode::{
    config::{BigEndian, Configuration, Fixint, Limit},
    error::DecodeError,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::{
    status::{Refusal, Status},
    types::Offer,
};

/// The whole frame with its length prefix.
pub(crate) const MAX_FRAME_BYTES: usize = 4096;
/// What this build speaks.
pub(crate) const VERSION: u8 = 1;
/// The dialer's one byte after its QP is in RTS.
pub(crate) const READY: u8 = b'R';
/// First bytes after the length.
pub(crate) const MAGIC: [u8; 4] = *b"vbBS";

/// Bytes that do not make a frame of this protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The length prefix is above the limit: not a peer of ours, or one that speaks something else.
    #[error("a frame of {bytes} bytes was announced, but at most {max} are allowed: is this another service's port?")]
    Oversize {
        /// The announced length.
        bytes: u64,
        /// The limit.
        max: usize,
    },
    /// The frame ends before its fixed fields do.
    #[error("a frame of {bytes} bytes ends before its {min} fixed ones")]
    Undersize {
        /// The frame's length.
        bytes: usize,
        /// The least.
        min: usize,
    },
    /// Other first bytes: another service lives at this port.
    #[error("the frame begins with {found:02x?}, not with {MAGIC:02x?}: is this another service's port?")]
    Magic {
        /// What stood there.
        found: [u8; 4],
    },
    /// The other side speaks another version: update the older of the two.
    #[error("the other side speaks version {theirs} of the bootstrap, this one version {VERSION}")]
    Version {
        /// The other side's.
        theirs: u8,
    },
    /// A kind that this version does not have.
    #[error("frame kind {raw} is unknown")]
    Kind {
        /// What stood there.
        raw: u8,
    },
    /// A frame that does not belong here in the exchange.
    #[error("expected {expected}, but a {found} came")]
    OutOfTurn {
        /// What may come here.
        expected: &'static str,
        /// What came.
        found: &'static str,
    },
    /// A refusal without a status, or another frame with one.
    #[error("status {status} in a {kind} frame")]
    Status {
        /// The frame's kind.
        kind: &'static str,
        /// Its status.
        status: u8,
    },
    /// More bytes than the frame's fields.
    #[error("{bytes} bytes too many at the end of a {kind} frame")]
    Trailing {
        /// The frame's kind.
        kind: &'static str,
        /// How many.
        bytes: usize,
    },
    /// The body ends before its fields do.
    #[error("the body of a {kind} frame is cut short after {bytes} bytes")]
    Cut {
        /// The frame's kind.
        kind: &'static str,
        /// How long the body is.
        bytes: usize,
    },
    /// A field with a value that it cannot have.
    #[error("the body of a {kind} frame is unreadable: {reason}")]
    Body {
        /// The frame's kind.
        kind: &'static str,
        /// The decoder's word.
        reason: String,
    },
}

/// 32 random bytes that make an exchange unlike any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Nonce(pub(crate) [u8; 32]);

/// An HMAC-SHA256 tag. No `PartialEq`: it is compared in constant time only.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(PartialEq, Eq))]
pub(crate) struct Tag(pub(crate) [u8; 32]);

/// The dialer's first frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) offer: Offer,
    pub(crate) nonce: Nonce,
    /// The dialer has a secret and will take no reply without a tag.
    pub(crate) has_secret: bool,
}

/// Asks the dialer to show that it still lives, and with `needs_tag` that it knows the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Challenge {
    pub(crate) nonce: Nonce,
    pub(crate) needs_tag: bool,
}

/// The answer to a challenge.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(PartialEq, Eq))]
pub(crate) struct Proof {
    /// The challenge's nonce.
    pub(crate) nonce: Nonce,
    pub(crate) tag: Option<Tag>,
}

/// The acceptor's QP is in RTS.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(PartialEq, Eq))]
pub(crate) struct Reply {
    pub(crate) offer: Offer,
    pub(crate) tag: Option<Tag>,
}

/// Everything that travels, but for the READY byte.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq, Eq))]
pub(crate) enum Frame {
    Hello(Hello),
    Challenge(Challenge),
    Proof(Proof),
    Reply(Reply),
    Refuse(Refusal),
}

impl Frame {
    /// For errors.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Challenge(_) => "challenge",
            Self::Proof(_) => "proof",
            Self::Reply(_) => "reply",
            Self::Refuse(_) => "refusal",
        }
    }

    /// The frame with its length prefix.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (kind, status, body) = match self {
            Self::Hello(hello) => (1, 0, encode_body(hello)),
            Self::Challenge(challenge) => (2, 0, encode_body(challenge)),
            Self::Proof(proof) => (3, 0, encode_body(proof)),
            Self::Reply(reply) => (4, 0, encode_body(reply)),
            Self::Refuse(refusal) => (KIND_REFUSE, refusal.status.get(), encode_body(cut(&refusal.detail))),
        };
        let length = u32::try_from(FIXED_BYTES + body.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(PREFIX_BYTES + FIXED_BYTES + body.len());
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&[VERSION, kind, status]);
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Reads a frame that came without its length prefix.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let Some((fixed, body)) = bytes.split_first_chunk::<FIXED_BYTES>() else {
            return Err(WireError::Undersize { bytes: bytes.len(), min: FIXED_BYTES });
        };
        let [m0, m1, m2, m3, version, kind, status] = *fixed;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(WireError::Magic { found: [m0, m1, m2, m3] });
        }
        if version != VERSION {
            if let (KIND_REFUSE, Some(status)) = (kind, Status::new(status)) {
                let detail = format!("the other side speaks version {version} of the bootstrap, this one {VERSION}");
                return Ok(Self::Refuse(Refusal { status, detail }));
            }
            return Err(WireError::Version { theirs: version });
        }
        let no_status = |kind| if status == 0 { Ok(kind) } else { Err(WireError::Status { kind, status }) };
        Ok(match kind {
            1 => Self::Hello(decode_body(no_status("hello")?, body)?),
            2 => Self::Challenge(decode_body(no_status("challenge")?, body)?),
            3 => Self::Proof(decode_body(no_status("proof")?, body)?),
            4 => Self::Reply(decode_body(no_status("reply")?, body)?),
            KIND_REFUSE => {
                let kind = "refusal";
                let status = Status::new(status).ok_or(WireError::Status { kind, status })?;
                let detail: String = decode_body(kind, body)?;
                if detail.len() > MAX_DETAIL_BYTES {
                    let reason = format!("a text of {} bytes is above {MAX_DETAIL_BYTES}", detail.len());
                    return Err(WireError::Body { kind, reason });
                }
                Self::Refuse(Refusal { status, detail })
            }
            raw => return Err(WireError::Kind { raw }),
        })
    }
}

/// Why no frame could be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// The stream ended.
    Closed,
    Io(io::Error),
    Wire(WireError),
}

/// Reads one frame: its bytes after the length prefix. Allocates only once a believable length is there.
pub(crate) async fn read_frame<S: AsyncRead + Unpin>(stream: &mut S) -> Result<Vec<u8>, ReadError> {
    let mut prefix = [0; PREFIX_BYTES];
    read_exact(stream, &mut prefix).await?;
    let length = u32::from_be_bytes(prefix);
    let bytes = usize::try_from(length).unwrap_or(usize::MAX);
    if bytes > MAX_FRAME_BYTES - PREFIX_BYTES {
        return Err(ReadError::Wire(WireError::Oversize { bytes: u64::from(length) + 4, max: MAX_FRAME_BYTES }));
    }
    if bytes < FIXED_BYTES {
        return Err(ReadError::Wire(WireError::Undersize { bytes, min: FIXED_BYTES }));
    }
    let mut frame = vec![0; bytes];
    read_exact(stream, &mut frame).await?;
    Ok(frame)
}

/// Writes one frame.
pub(crate) async fn write_frame<S: AsyncWrite + Unpin>(stream: &mut S, frame: &Frame) -> io::Result<()> {
    stream.write_all(&frame.encode()).await?;
    stream.flush().await
}

/// Fills `bytes`, or says that the stream ended.
pub(crate) async fn read_exact<S: AsyncRead + Unpin>(stream: &mut S, bytes: &mut [u8]) -> Result<(), ReadError> {
    match stream.read_exact(bytes).await {
        Ok(_) => Ok(()),
        Err(error) => Err(match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                ReadError::Closed
            }
            _ => ReadError::Io(error),
        }),
    }
}

/// The body of any value that crosses the wire. Each value has exactly one encoding.
pub(crate) fn encode_body<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    bincode::serde::encode_to_vec(value, CONFIG).expect("plain numbers and short strings always encode")
}

/// Reads a body that must fill `bytes` exactly.
pub(crate) fn decode_body<T: DeserializeOwned>(kind: &'static str, bytes: &[u8]) -> Result<T, WireError> {
    let (value, used) = bincode::serde::decode_from_slice(bytes, CONFIG).map_err(|error| match error {
        DecodeError::UnexpectedEnd { .. } => WireError::Cut { kind, bytes: bytes.len() },
        other => WireError::Body { kind, reason: other.to_string() },
    })?;
    if used < bytes.len() {
        return Err(WireError::Trailing { kind, bytes: bytes.len() - used });
    }
    Ok(value)
}

/// The start of a text, at a character's border.
fn cut(detail: &str) -> &str {
    let mut end = detail.len().min(MAX_DETAIL_BYTES);
    while !detail.is_char_boundary(end) {
        end -= 1;
    }
    &detail[..end]
}

const PREFIX_BYTES: usize = 4;
/// Magic, version, kind, status.
const FIXED_BYTES: usize = 7;
const KIND_REFUSE: u8 = 5;
/// Of a refusal's text.
const MAX_DETAIL_BYTES: usize = 512;

/// Big endian, fixed-width integers (an enum's variant and a length are 4 and 8 bytes), at most one frame.
const CONFIG: Configuration<BigEndian, Fixint, Limit<MAX_FRAME_BYTES>> =
    bincode::config::standard().with_big_endian().with_fixed_int_encoding().with_limit::<MAX_FRAME_BYTES>();

#[cfg(test)]
mod tests;
