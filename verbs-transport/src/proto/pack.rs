//! Several frames in one SEND: what has to wait for a credit or a WR travels together once one is there.
//!
//! ```text
//! fixed header: type 8, no flags but the wish, word = number of frames
//! then for each frame, one behind the other:
//!   byte 0     type, 0 to 4
//!   byte 1     lane, in the place that it has in the flags; everything else 0
//!   bytes 2-3  big endian: bytes of the user header
//!   bytes 4-7  big endian: bytes of user header + payload
//!   the user header, the payload
//! ```
//!
//! One SEND, one credit, one slab and one completion for all of them; each ends on its own all the same. Only a peer that
//! has [said so](crate::FEATURE_PACK) gets them.

use std::ops::Range;

use super::{
    frame::{Lane, Malformed, MessageType},
    link::Frame,
};

/// Bytes before each frame.
pub const ENTRY_BYTES: usize = 8;

/// A frame of a packed SEND.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Where it goes.
    pub kind: MessageType,
    /// Whom it is for.
    pub lane: Lane,
    /// Bytes of the user header, at the front of `body`.
    pub header_len: usize,
    /// Where user header and payload are in the SEND's body.
    pub body: Range<usize>,
}

/// Bytes that a frame takes in a packed SEND; `None` when it cannot be in one.
#[inline]
pub fn packed_bytes(frame: &Frame) -> Option<usize> {
    u16::try_from(frame.header.len()).ok().map(|_| ENTRY_BYTES + frame.body_bytes())
}

/// What stands before a frame. Of one for which [`packed_bytes`] is `None` it would be wrong.
#[inline]
pub fn encode_entry(frame: &Frame) -> [u8; ENTRY_BYTES] {
    let mut entry = [frame.kind as u8, frame.lane.to_flags(), 0, 0, 0, 0, 0, 0];
    entry[2..4].copy_from_slice(&u16::try_from(frame.header.len()).unwrap_or(u16::MAX).to_be_bytes());
    entry[4..].copy_from_slice(&u32::try_from(frame.body_bytes()).unwrap_or(u32::MAX).to_be_bytes());
    entry
}

/// Reads the next frame's entry of `body` from `at` on, for a receiver that takes frames up to `limit`.
#[inline]
fn next(body: &[u8], at: usize, limit: u32) -> Result<Packed, Malformed> {
    let left = &body[at..];
    let cut = || Malformed::PackCut { at: to_u32(at), left: to_u32(left.len()) };
    let (&[kind, flags], rest) = left.split_first_chunk().ok_or_else(cut)?;
    let (&header, rest) = rest.split_first_chunk().ok_or_else(cut)?;
    let &bytes = rest.first_chunk().ok_or_else(cut)?;
    let kind = *MessageType::ALL.get(usize::from(kind)).ok_or(Malformed::Type { found: kind })?;
    let lane = Lane::from_flags(flags).filter(|lane| lane.to_flags() == flags);
    let lane = lane.ok_or(Malformed::Flags { found: flags, kind: kind as u8 })?;
    let header = u32::from(u16::from_be_bytes(header));
    let bytes = u32::from_be_bytes(bytes);
    if header > bytes {
        return Err(Malformed::HeaderLength { header, body: bytes });
    }
    if bytes > limit {
        return Err(Malformed::TooLarge { limit });
    }
    let from = at + ENTRY_BYTES;
    let to = from.checked_add(bytes as usize).filter(|to| *to <= body.len()).ok_or_else(cut)?;
    Ok(Packed { kind, lane, header_len: header as usize, body: from..to })
}

/// Whether `body` is `frames` whole frames and nothing else.
///
/// # Errors
///
/// [`Malformed`].
pub fn check(body: &[u8], frames: u32, limit: u32) -> Result<(), Malformed> {
    let (mut at, mut found) = (0, 0);
    while at < body.len() {
        at = next(body, at, limit)?.body.end;
        found += 1;
    }
    if found == frames && frames > 0 { Ok(()) } else { Err(Malformed::PackCount { says: frames, holds: found }) }
}

/// The frames of a body that [`check`] has found good; of any other those up to the first bad one.
pub fn frames(body: &[u8]) -> impl Iterator<Item = Packed> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let packed = next(body, at, u32::MAX).ok()?;
        at = packed.body.end;
        Some(packed)
    })
}

fn to_u32(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: MessageType, lane: Lane, header: &'static [u8], payload: &'static [u8]) -> Frame {
        let on_error = Arc::new(|_: Bytes, _: Bytes, _: crate::SendError| {});
        Frame { kind, lane, header: header.into(), payload: payload.into(), on_error }
    }

    fn body_of(frames: &[Frame]) -> Vec<u8> {
        frames.iter().flat_map(|frame| [&encode_entry(frame)[..], &frame.header, &frame.payload].concat()).collect()
    }

    /// The bytes of the wire, as `docs/wire-format.md` has them.
    #[test]
    fn golden_entries() {
        let frames = [
            frame(MessageType::Message, Lane::Application, b"ab", b"c"),
            frame(MessageType::Response, Lane::Indirect, b"", b""),
        ];
        let bytes = [0, 0, 0, 2, 0, 0, 0, 3, b'a', b'b', b'c', 1, 0x20, 0, 0, 0, 0, 0, 0];
        assert_eq!(body_of(&frames), bytes);
        assert_eq!(check(&bytes, 2, 3), Ok(()));
        let read: Vec<Packed> = super::frames(&bytes).collect();
        let (message, response) = (MessageType::Message, MessageType::Response);
        assert_eq!(
            read,
            [
                Packed { kind: message, lane: Lane::Application, header_len: 2, body: 8..11 },
                Packed { kind: response, lane: Lane::Indirect, header_len: 0, body: 19..19 },
            ]
        );
    }

    #[test]
    fn each_thing_that_can_be_wrong_is_named() {
        let good = body_of(&[frame(MessageType::Event, Lane::Service, b"ab", b"cd")]);
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            check(&bytes, 1, 4)
        };
        assert_eq!(with(0, 5), Err(Malformed::Type { found: 5 }));
        assert_eq!(with(1, 0x30), Err(Malformed::Flags { found: 0x30, kind: 3 }));
        assert_eq!(with(1, 0x11), Err(Malformed::Flags { found: 0x11, kind: 3 }));
        assert_eq!(with(3, 5), Err(Malformed::HeaderLength { header: 5, body: 4 }));
        assert_eq!(with(7, 5), Err(Malformed::TooLarge { limit: 4 }));
        assert_eq!(check(&good[..11], 1, 4), Err(Malformed::PackCut { at: 0, left: 11 }));
        assert_eq!(check(&good[..7], 1, 4), Err(Malformed::PackCut { at: 0, left: 7 }));
        assert_eq!(with(7, 3), Err(Malformed::PackCut { at: 11, left: 1 }));
        assert_eq!(check(&good, 2, 4), Err(Malformed::PackCount { says: 2, holds: 1 }));
        assert_eq!(check(&[], 0, 4), Err(Malformed::PackCount { says: 0, holds: 0 }));
    }

    proptest! {
        /// Whatever a peer sends, what is taken lies within the SEND, in order, and is all of it.
        #[test]
        fn what_is_taken_is_all_of_the_body(
            lengths in prop::collection::vec((0usize..4, 0usize..4), 0..5),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
            count in 0u32..6,
        ) {
            let frames: Vec<Frame> = lengths
                .into_iter()
                .map(|(header, payload)| frame(MessageType::Event, Lane::Service, &[1; 4][..header], &[2; 4][..payload]))
                .collect();
            let mut body = body_of(&frames);
            prop_assert_eq!(check(&body, to_u32(frames.len()), 64).is_ok(), !frames.is_empty());
            for (at, byte) in flips {
                if !body.is_empty() {
                    let at = at.index(body.len());
                    body[at] = byte;
                }
            }
            if check(&body, count, 64).is_ok() {
                let frames: Vec<Packed> = super::frames(&body).collect();
                prop_assert_eq!(frames.len(), count as usize);
                let mut at = 0;
                for frame in frames {
                    prop_assert_eq!(frame.body.start, at + ENTRY_BYTES);
                    prop_assert!(frame.header_len <= frame.body.len());
                    at = frame.body.end;
                }
                prop_assert_eq!(at, body.len());
            }
        }
    }
}
