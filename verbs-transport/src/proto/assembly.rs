//! Puts frames together that came as several SENDs. One frame at a time: no other frame's SEND comes between.

use std::time::Instant;

use super::frame::{FrameHeader, Lane, Malformed, MessageType};

/// What a received SEND asks of the caller.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A whole frame: the body starts behind the fixed header.
    Whole {
        /// Where it goes.
        kind: MessageType,
        /// Whom it is for.
        lane: Lane,
        /// Bytes of the user header, at the body's front.
        header_len: usize,
        /// Bytes of header + payload.
        body_len: usize,
    },
    /// Append the body to [`Link::partial_mut`](super::link::Link::partial_mut), then call
    /// [`Link::finish_fragment`](super::link::Link::finish_fragment) if it was the last.
    Fragment {
        /// Bytes to append.
        body_len: usize,
        /// The frame is complete with it.
        last: bool,
    },
    /// Several whole frames: give the body to [`Link::unpack`](super::link::Link::unpack).
    Pack {
        /// How many, as the header says.
        frames: u32,
        /// Bytes behind the fixed header.
        body_len: usize,
    },
    /// A control frame, dealt with.
    Control,
    /// The PING is answered; it was posted at the given time.
    Pong {
        /// When the PING went out.
        sent_at: Instant,
    },
}

/// A frame put together from fragments.
#[derive(Debug, PartialEq, Eq)]
pub struct Assembled {
    /// Where it goes.
    pub kind: MessageType,
    /// Whom it is for.
    pub lane: Lane,
    /// Bytes of the user header, at the front.
    pub header_len: usize,
    /// Header and payload.
    pub body: Vec<u8>,
}

/// The frame under way, if any.
#[derive(Debug, Default)]
pub struct Assembly {
    /// Its type, its lane and the length of its user header.
    head: Option<(MessageType, Lane, u32)>,
    body: Vec<u8>,
}

impl Assembly {
    /// Judges a data SEND with `body` bytes behind its fixed header, for a receiver that takes frames up to `limit`.
    /// A fragment that does not fit drops the frame under way.
    ///
    /// # Errors
    ///
    /// [`Malformed`].
    #[inline]
    pub fn accept(
        &mut self,
        kind: MessageType,
        header: FrameHeader,
        body: u32,
        limit: u32,
    ) -> Result<Incoming, Malformed> {
        // One SEND, nothing under way.
        if header.first && header.last && self.takes_whole(header.word, body, limit) {
            let (header_len, body_len) = (header.word as usize, body as usize);
            return Ok(Incoming::Whole { kind, lane: header.lane, header_len, body_len });
        }
        let judged = self.judge(kind, header, body, limit);
        if judged.is_err() {
            self.clear();
        }
        judged
    }

    #[inline]
    fn judge(&mut self, kind: MessageType, header: FrameHeader, body: u32, limit: u32) -> Result<Incoming, Malformed> {
        let so_far = u32::try_from(self.body.len()).unwrap_or(u32::MAX);
        if header.first {
            if self.head.is_some() {
                return Err(Malformed::Sequence { found: 0, expected: so_far });
            }
            // Of a frame that goes on, the header may reach into later fragments.
            let longest = if header.last { body } else { limit };
            if header.word > longest {
                return Err(Malformed::HeaderLength { header: header.word, body: longest });
            }
        } else {
            let expected = if self.head.is_some_and(|(of, lane, _)| (of, lane) == (kind, header.lane)) {
                so_far
            } else {
                u32::MAX
            };
            if header.word != expected || expected == u32::MAX {
                return Err(Malformed::Sequence { found: header.word, expected });
            }
        }
        let total = so_far.saturating_add(body);
        if total > limit {
            return Err(Malformed::TooLarge { limit });
        }
        debug_assert!(!(header.first && header.last), "a whole frame was dealt with, or refused above");
        if body == 0 {
            return Err(Malformed::Body { kind: "fragment", body });
        }
        let (_, _, header_len) = *self.head.get_or_insert((kind, header.lane, header.word));
        if header.last && header_len > total {
            return Err(Malformed::HeaderLength { header: header_len, body: total });
        }
        Ok(Incoming::Fragment { body_len: body as usize, last: header.last })
    }

    /// Whether a whole frame with such a user header and body may come now: none is under way, its header lies within it, and
    /// it is no longer than `limit`.
    #[inline]
    pub const fn takes_whole(&self, header_len: u32, body: u32, limit: u32) -> bool {
        self.head.is_none() && header_len <= body && body <= limit
    }

    /// Judges a packed SEND. A frame under way is dropped: it can not go on.
    ///
    /// # Errors
    ///
    /// [`Malformed::PackWithin`].
    pub fn accept_pack(&mut self, frames: u32, body: u32) -> Result<Incoming, Malformed> {
        if self.head.is_some() {
            let at = u32::try_from(self.body.len()).unwrap_or(u32::MAX);
            self.clear();
            return Err(Malformed::PackWithin { at });
        }
        Ok(Incoming::Pack { frames, body_len: body as usize })
    }

    /// Where a fragment's body is appended.
    pub fn body_mut(&mut self) -> &mut Vec<u8> {
        &mut self.body
    }

    /// The last fragment is appended: the frame.
    pub fn finish(&mut self) -> Option<Assembled> {
        let (kind, lane, header_len) = self.head.take()?;
        Some(Assembled { kind, lane, header_len: header_len as usize, body: std::mem::take(&mut self.body) })
    }

    /// Drops the frame under way and its memory.
    pub fn clear(&mut self) {
        self.head = None;
        self.body = Vec::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::frame::{FrameKind, GrantWish};

    const LIMIT: u32 = 100;

    type Step<'a> = (FrameHeader, &'a [u8]);

    fn head(first: bool, last: bool, word: u32) -> FrameHeader {
        let kind = FrameKind::Data(MessageType::Message);
        FrameHeader { kind, wish: GrantWish::None, first, last, lane: Lane::Application, credits: 0, word }
    }

    fn feed(assembly: &mut Assembly, header: FrameHeader, body: &[u8]) -> Result<Incoming, Malformed> {
        let judged = assembly.accept(MessageType::Message, header, u32::try_from(body.len()).unwrap(), LIMIT);
        if matches!(judged, Ok(Incoming::Fragment { .. })) {
            assembly.body_mut().extend_from_slice(body);
        }
        judged
    }

    #[test]
    fn fragments_make_one_frame_whose_header_may_span_them() {
        let mut assembly = Assembly::default();
        assert_eq!(
            feed(&mut assembly, head(true, false, 5), b"abc"),
            Ok(Incoming::Fragment { body_len: 3, last: false })
        );
        assert_eq!(
            feed(&mut assembly, head(false, false, 3), b"def"),
            Ok(Incoming::Fragment { body_len: 3, last: false })
        );
        assert_eq!(feed(&mut assembly, head(false, true, 6), b"g"), Ok(Incoming::Fragment { body_len: 1, last: true }));
        let whole =
            Assembled { kind: MessageType::Message, lane: Lane::Application, header_len: 5, body: b"abcdefg".to_vec() };
        assert_eq!(assembly.finish(), Some(whole));
        assert_eq!(assembly.finish(), None);
    }

    /// Each fragment too early, twice, of another type, too long, or empty; after each the next frame is good again.
    #[test]
    fn what_does_not_continue_the_frame_is_refused_and_forgotten() {
        let sequence = |found, expected| Err(Malformed::Sequence { found, expected });
        let cases: [(&[Step<'_>], Result<Incoming, Malformed>); 9] = [
            (&[(head(false, true, 3), b"x")], sequence(3, u32::MAX)),
            (&[(head(false, true, u32::MAX), b"x")], sequence(u32::MAX, u32::MAX)),
            (&[(head(true, false, 0), b"abc"), (head(true, true, 0), b"x")], sequence(0, 3)),
            (&[(head(true, false, 0), b"abc"), (head(false, true, 2), b"x")], sequence(2, 3)),
            (&[(head(true, true, 2), b"x")], Err(Malformed::HeaderLength { header: 2, body: 1 })),
            (&[(head(true, false, 101), b"x")], Err(Malformed::HeaderLength { header: 101, body: 100 })),
            (
                &[(head(true, false, 5), b"ab"), (head(false, true, 2), b"cd")],
                Err(Malformed::HeaderLength { header: 5, body: 4 }),
            ),
            (&[(head(true, false, 0), b"")], Err(Malformed::Body { kind: "fragment", body: 0 })),
            (
                &[(head(true, false, 0), &[0; 60]), (head(false, true, 60), &[0; 41])],
                Err(Malformed::TooLarge { limit: 100 }),
            ),
        ];
        for (steps, expected) in cases {
            let mut assembly = Assembly::default();
            let last = steps.iter().map(|(header, body)| feed(&mut assembly, *header, body)).last().unwrap();
            assert_eq!(last, expected);
            assert_eq!(assembly.finish(), None);
            assert!(feed(&mut assembly, head(true, true, 1), b"xy").is_ok());
        }
    }

    #[test]
    fn a_fragment_of_another_type_is_refused() {
        let mut assembly = Assembly::default();
        feed(&mut assembly, head(true, false, 0), b"abc").unwrap();
        let other = assembly.accept(MessageType::Event, head(false, true, 3), 1, LIMIT);
        assert_eq!(other, Err(Malformed::Sequence { found: 3, expected: u32::MAX }));
    }

    #[test]
    fn a_fragment_of_another_lane_is_refused() {
        let mut assembly = Assembly::default();
        feed(&mut assembly, head(true, false, 0), b"abc").unwrap();
        let other = feed(&mut assembly, FrameHeader { lane: Lane::Service, ..head(false, true, 3) }, b"x");
        assert_eq!(other, Err(Malformed::Sequence { found: 3, expected: u32::MAX }));
    }
}
