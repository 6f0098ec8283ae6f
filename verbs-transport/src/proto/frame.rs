//! The 8-byte header at the front of every SEND.
//!
//! ```text
//! byte 0     0xB1: magic in the high nibble, version in the low one
//! byte 1     type
//! byte 2     flags
//! byte 3     credits granted
//! bytes 4-7  big endian: length of the user header (first SEND of a frame), offset of this SEND's body in the frame
//!            (later SENDs), token (PING, PONG), 0 (PURE_GRANT), number of frames (PACK)
//! ```

use std::fmt;

/// Bytes of the fixed header.
pub const HEADER_BYTES: usize = 8;

/// The same, as the wire counts.
pub const HEADER_BYTES_U32: u32 = 8;

const _: () = assert!(HEADER_BYTES_U32 as usize == HEADER_BYTES);

/// Magic and version 1.
const MAGIC_V1: u8 = 0xB1;

/// What an application sends, and where it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MessageType {
    /// A request; arrives on the *message* stream.
    Message = 0,
    /// An answer; arrives on the *response* stream.
    Response = 1,
    /// An acknowledgement; arrives on the *event* stream.
    Ack = 2,
    /// An event; arrives on the *event* stream.
    Event = 3,
    /// A request that a draining peer turned away: its own header, no payload; arrives on the *shutdown* stream.
    ShuttingDown = 4,
}

impl MessageType {
    /// All of them, in wire order.
    pub const ALL: [Self; 5] = [Self::Message, Self::Response, Self::Ack, Self::Event, Self::ShuttingDown];

    /// Name for counters and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Message => "message",
            Self::Response => "response",
            Self::Ack => "ack",
            Self::Event => "event",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

/// Who of the receiving side a data frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Lane {
    /// The application.
    #[default]
    Application = 0,
    /// The layer above the transport: its requests and replies. Never reaches the application.
    Service = 1,
    /// The application, by way of the layer above: the header is the application's, the payload tells where to fetch
    /// the real one.
    Indirect = 2,
}

impl Lane {
    /// All of them, in wire order.
    pub const ALL: [Self; 3] = [Self::Application, Self::Service, Self::Indirect];

    /// Name for counters and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Application => "application",
            Self::Service => "service",
            Self::Indirect => "indirect",
        }
    }

    /// The two bits in place.
    pub(super) const fn to_flags(self) -> u8 {
        (self as u8) << LANE_SHIFT
    }

    /// The two bits in place; 3 is no lane.
    pub(super) const fn from_flags(flags: u8) -> Option<Self> {
        match (flags & LANE_MASK) >> LANE_SHIFT {
            0 => Some(Self::Application),
            1 => Some(Self::Service),
            2 => Some(Self::Indirect),
            _ => None,
        }
    }
}

/// What a SEND is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// Part of an application's frame: spends a credit.
    Data(MessageType),
    /// Asks for a PONG with the same token: uses the control reserve.
    Ping,
    /// Answers a PING.
    Pong,
    /// Gives credits back and nothing else.
    PureGrant,
    /// Several whole frames of an application: spends one credit. See [`pack`](super::pack).
    Pack,
}

impl FrameKind {
    const fn to_wire(self) -> u8 {
        match self {
            Self::Data(message) => message as u8,
            Self::Ping => 5,
            Self::Pong => 6,
            Self::PureGrant => 7,
            Self::Pack => 8,
        }
    }

    fn from_wire(raw: u8) -> Option<Self> {
        Some(match raw {
            0..=4 => Self::Data(MessageType::ALL[usize::from(raw)]),
            5 => Self::Ping,
            6 => Self::Pong,
            7 => Self::PureGrant,
            8 => Self::Pack,
            _ => return None,
        })
    }
}

/// How much a sender wants its credits back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
#[repr(u8)]
pub enum GrantWish {
    /// Enough left.
    #[default]
    None = 0,
    /// At most half left: with the next frame, please.
    Soft = FLAG_SOFT,
    /// At most a quarter left: now, by a pure grant if need be.
    Hard = FLAG_HARD,
}

/// A decoded fixed header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the SEND is.
    pub kind: FrameKind,
    /// The sender's wish for credits.
    pub wish: GrantWish,
    /// First SEND of its frame.
    pub first: bool,
    /// Last SEND of its frame.
    pub last: bool,
    /// Whom a data frame is for; the same in each SEND of it.
    pub lane: Lane,
    /// Credits given back.
    pub credits: u8,
    /// Bytes 4-7; see the module's table.
    pub word: u32,
}

const FLAG_SOFT: u8 = 1;
const FLAG_HARD: u8 = 1 << 1;
const FLAG_FIRST: u8 = 1 << 2;
const FLAG_LAST: u8 = 1 << 3;
const LANE_SHIFT: u8 = 4;
const LANE_MASK: u8 = 0b11 << LANE_SHIFT;
const FLAGS_KNOWN: u8 = FLAG_SOFT | FLAG_HARD | FLAG_FIRST | FLAG_LAST | LANE_MASK;

/// Why a SEND from a peer is no frame. Counted; its slab and credit go back all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// Fewer than 8 bytes.
    #[error("{bytes} bytes are too few for the 8-byte header")]
    Short {
        /// What came.
        bytes: u32,
    },
    /// Wrong magic or version.
    #[error("first byte {found:#04x} instead of {MAGIC_V1:#04x}")]
    Magic {
        /// What came.
        found: u8,
    },
    /// No such type.
    #[error("unknown frame type {found}")]
    Type {
        /// What came.
        found: u8,
    },
    /// Reserved flag bits set, both or wrong ones, or a lane that does not exist.
    #[error("flags {found:#010b} are not allowed for frame type {kind}")]
    Flags {
        /// What came.
        found: u8,
        /// The type beside it.
        kind: u8,
    },
    /// The user header is said to be longer than the frame.
    #[error("user header of {header} bytes in a frame of {body} bytes")]
    HeaderLength {
        /// What the frame says.
        header: u32,
        /// What there is.
        body: u32,
    },
    /// A control frame with a body, or a later fragment without one.
    #[error("{kind} frame with a body of {body} bytes")]
    Body {
        /// Which kind.
        kind: &'static str,
        /// Its body.
        body: u32,
    },
    /// A PING while the answer to the one before it is due, or a PONG that answers no PING: both would eat into the
    /// reserve of receives that other control frames need.
    #[error("a {kind} that was not due")]
    Unexpected {
        /// Which kind.
        kind: &'static str,
    },
    /// A pure grant of less than a quarter of the window: so many small ones fit under way that the reserve would run
    /// out.
    #[error("pure grant of {credits} credits, at least {least} are needed")]
    SmallGrant {
        /// What it carries.
        credits: u8,
        /// A quarter of the window.
        least: u16,
    },
    /// A fragment that does not continue what came before.
    #[error("fragment at offset {found} where {expected} was next")]
    Sequence {
        /// What the frame says.
        found: u32,
        /// What it should be; `u32::MAX` when no frame was under way.
        expected: u32,
    },
    /// A packed SEND ends within one of its frames.
    #[error(
        "a packed SEND that is cut off: at offset {at} of its body {left} bytes are left, too few for the frame there"
    )]
    PackCut {
        /// Where.
        at: u32,
        /// What is left.
        left: u32,
    },
    /// A packed SEND holds another number of frames than it says, or none.
    #[error("a packed SEND of {says} frames that holds {holds}")]
    PackCount {
        /// What its header says.
        says: u32,
        /// What there is.
        holds: u32,
    },
    /// A packed SEND between the fragments of a frame.
    #[error("a packed SEND at offset {at} of a frame that is not complete")]
    PackWithin {
        /// Bytes of the frame so far.
        at: u32,
    },
    /// The fragments add up to more than this side takes.
    #[error("frame of more than {limit} bytes")]
    TooLarge {
        /// Our ceiling.
        limit: u32,
    },
}

impl FrameHeader {
    /// The 8 bytes.
    #[inline]
    pub const fn encode(self) -> [u8; HEADER_BYTES] {
        let mut flags = self.wish as u8;
        if self.first {
            flags |= FLAG_FIRST;
        }
        if self.last {
            flags |= FLAG_LAST;
        }
        flags |= self.lane.to_flags();
        let [a, b, c, d] = self.word.to_be_bytes();
        [MAGIC_V1, self.kind.to_wire(), flags, self.credits, a, b, c, d]
    }

    /// Whether a SEND that is no valid frame used the reserve and not a credit: its type byte says that it was meant as
    /// a control frame.
    pub const fn is_of_reserve(error: Malformed) -> bool {
        matches!(error, Malformed::Flags { kind: 5..=7, .. })
    }

    /// Reads the 8 bytes if they are of a whole frame for the application, as nearly all are; `None` says nothing.
    #[inline]
    pub fn decode_whole(bytes: [u8; HEADER_BYTES]) -> Option<(MessageType, Self)> {
        let [magic, raw_kind, flags, credits, word @ ..] = bytes;
        let kind = *MessageType::ALL.get(usize::from(raw_kind))?;
        let wish = *[GrantWish::None, GrantWish::Soft, GrantWish::Hard]
            .get(usize::from(flags.checked_sub(FLAG_FIRST | FLAG_LAST)?))?;
        let word = u32::from_be_bytes(word);
        let (first, last, lane) = (true, true, Lane::Application);
        let header = Self { kind: FrameKind::Data(kind), wish, first, last, lane, credits, word };
        (magic == MAGIC_V1).then_some((kind, header))
    }

    /// Reads the 8 bytes. What they say about the body is checked by the link.
    ///
    /// # Errors
    ///
    /// [`Malformed::Magic`], [`Malformed::Type`], [`Malformed::Flags`].
    #[inline]
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Result<Self, Malformed> {
        let [magic, raw_kind, flags, credits, word @ ..] = bytes;
        if magic != MAGIC_V1 {
            return Err(Malformed::Magic { found: magic });
        }
        let kind = FrameKind::from_wire(raw_kind).ok_or(Malformed::Type { found: raw_kind })?;
        let first = flags & FLAG_FIRST != 0;
        let last = flags & FLAG_LAST != 0;
        let wish = match flags & (FLAG_SOFT | FLAG_HARD) {
            0 => GrantWish::None,
            FLAG_SOFT => GrantWish::Soft,
            FLAG_HARD => GrantWish::Hard,
            _ => return Err(Malformed::Flags { found: flags, kind: raw_kind }),
        };
        let is_data = matches!(kind, FrameKind::Data(_));
        let lane = Lane::from_flags(flags).filter(|lane| is_data || *lane == Lane::Application);
        let (Some(lane), true) = (lane, flags & !FLAGS_KNOWN == 0 && (is_data || !(first || last))) else {
            return Err(Malformed::Flags { found: flags, kind: raw_kind });
        };
        Ok(Self { kind, wish, first, last, lane, credits, word: u32::from_be_bytes(word) })
    }
}

impl fmt::Display for MessageType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_header() -> impl Strategy<Value = FrameHeader> {
        (0u8..9, 0u8..3, any::<bool>(), any::<bool>(), 0usize..3, any::<u8>(), any::<u32>()).prop_map(
            |(kind, wish, first, last, lane, credits, word)| {
                let kind = FrameKind::from_wire(kind).unwrap();
                let data = matches!(kind, FrameKind::Data(_));
                FrameHeader {
                    kind,
                    wish: [GrantWish::None, GrantWish::Soft, GrantWish::Hard][usize::from(wish)],
                    first: first && data,
                    last: last && data,
                    lane: if data { Lane::ALL[lane] } else { Lane::Application },
                    credits,
                    word,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn every_header_survives_the_wire(header in any_header()) {
            prop_assert_eq!(FrameHeader::decode(header.encode()), Ok(header));
        }

        /// The short cut agrees with the long way. Most random bytes are of no frame, so these are nearly of one.
        #[test]
        fn whole_frames_decode_alike(mut bytes in any::<[u8; 8]>(), magic in 0..4u8, kind in 0..7u8, flags in 0..64u8) {
            bytes[..3].copy_from_slice(&[MAGIC_V1 + u8::from(magic == 0), kind, flags]);
            let long = FrameHeader::decode(bytes).ok();
            let is_whole = |header: &FrameHeader| header.first && header.last && header.lane == Lane::Application;
            let short = FrameHeader::decode_whole(bytes);
            prop_assert_eq!(short.map(|(_, header)| header), long.filter(is_whole));
            prop_assert!(short.is_none_or(|(kind, header)| header.kind == FrameKind::Data(kind)));
        }

        /// Whatever decodes encodes to the same bytes: there is one form of each header.
        #[test]
        fn any_bytes_decode_to_one_form_or_an_error(bytes in any::<[u8; 8]>()) {
            if let Ok(header) = FrameHeader::decode(bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }

    /// Golden vectors: a change here breaks the wire (M-37, M-38).
    #[test]
    fn golden_vectors() {
        let header = FrameHeader {
            kind: FrameKind::Data(MessageType::Event),
            wish: GrantWish::Hard,
            first: true,
            last: true,
            lane: Lane::Application,
            credits: 17,
            word: 0x0102_0304,
        };
        assert_eq!(header.encode(), [0xB1, 3, 0b1110, 17, 1, 2, 3, 4]);
        let grant = FrameHeader {
            kind: FrameKind::PureGrant,
            wish: GrantWish::None,
            first: false,
            last: false,
            lane: Lane::Application,
            credits: 255,
            word: 0,
        };
        assert_eq!(grant.encode(), [0xB1, 7, 0, 255, 0, 0, 0, 0]);
    }

    /// The whole of docs/wire-format.md's list.
    #[test]
    fn golden_frames() {
        let data = |first, last, word| FrameHeader {
            kind: FrameKind::Data(MessageType::Message),
            wish: GrantWish::None,
            first,
            last,
            lane: Lane::Application,
            credits: 0,
            word,
        };
        let laned = |lane, word| FrameHeader { lane, ..data(true, true, word) };
        let control = |kind, credits| FrameHeader { kind, credits, ..data(false, false, 7) };
        let golden = [
            (data(true, true, 2), [0xB1, 0, 0x0C, 0, 0, 0, 0, 2]),
            (data(true, true, 0), [0xB1, 0, 0x0C, 0, 0, 0, 0, 0]),
            (control(FrameKind::Ping, 0), [0xB1, 5, 0, 0, 0, 0, 0, 7]),
            (control(FrameKind::Pong, 3), [0xB1, 6, 0, 3, 0, 0, 0, 7]),
            (data(true, false, 5), [0xB1, 0, 4, 0, 0, 0, 0, 5]),
            (data(false, false, 8184), [0xB1, 0, 0, 0, 0, 0, 0x1F, 0xF8]),
            (data(false, true, 16_368), [0xB1, 0, 8, 0, 0, 0, 0x3F, 0xF0]),
            (laned(Lane::Service, 0), [0xB1, 0, 0x1C, 0, 0, 0, 0, 0]),
            (laned(Lane::Indirect, 2), [0xB1, 0, 0x2C, 0, 0, 0, 0, 2]),
            (FrameHeader { word: 2, ..control(FrameKind::Pack, 3) }, [0xB1, 8, 0, 3, 0, 0, 0, 2]),
        ];
        for (header, bytes) in golden {
            assert_eq!(header.encode(), bytes);
            assert_eq!(FrameHeader::decode(bytes), Ok(header));
        }
    }

    /// M-11, M-38: values that are not in the table are errors.
    #[test]
    fn unknown_type_flags_and_version_are_refused() {
        assert_eq!(FrameHeader::decode([0xB2, 0, 12, 0, 0, 0, 0, 0]), Err(Malformed::Magic { found: 0xB2 }));
        for kind in 9..=255 {
            assert_eq!(FrameHeader::decode([0xB1, kind, 0, 0, 0, 0, 0, 0]), Err(Malformed::Type { found: kind }));
        }
        for flags in [0b11, 0b11_0000, 0b11_1100, 0b100_0000, 0b1000_0000] {
            assert_eq!(
                FrameHeader::decode([0xB1, 0, flags, 0, 0, 0, 0, 0]),
                Err(Malformed::Flags { found: flags, kind: 0 })
            );
        }
        for flags in [0b100, 0b1_0000, 0b10_0000] {
            let error = Err(Malformed::Flags { found: flags, kind: 5 });
            assert_eq!(FrameHeader::decode([0xB1, 5, flags, 0, 0, 0, 0, 0]), error, "a control frame has no lane");
            let error = Err(Malformed::Flags { found: flags, kind: 8 });
            assert_eq!(FrameHeader::decode([0xB1, 8, flags, 0, 0, 0, 0, 0]), error, "nor has a pack: its frames have");
        }
    }
}
