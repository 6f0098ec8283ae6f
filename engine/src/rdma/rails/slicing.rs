//! The pieces of a request that goes over several paths.
//!
//! Invariant: the pieces are the request, in order, without a gap or an overlap; none is empty.

use std::ops::Range;

use crate::Direction;

/// What a piece is a multiple of, the last one excepted.
pub(crate) const BLOCK_BYTES: u64 = 64 << 10;

/// A last piece below this joins the one before it.
const LEAST_TAIL_BYTES: u64 = BLOCK_BYTES / 4;

/// Most pieces of a READ. Of a WRITE half as many: its bytes wait at the source for the last of them.
const MOST_PIECES: u64 = 64;

/// How a request is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slicing {
    length: u64,
    /// Of each piece, the last one excepted.
    size: u64,
    count: u64,
    most: u64,
}

impl Slicing {
    /// Of `length` bytes.
    pub(crate) fn new(length: u64, direction: Direction) -> Self {
        let most = match direction {
            Direction::Read => MOST_PIECES,
            Direction::Write => MOST_PIECES / 2,
        };
        let wanted = length.div_ceil(BLOCK_BYTES).clamp(1, most);
        // At the far end of the numbers no whole block fits, and one piece is as good.
        let size = length.div_ceil(wanted).max(1).checked_next_multiple_of(BLOCK_BYTES).unwrap_or(length);
        let (whole, tail) = (length / size, length % size);
        let joins = tail < LEAST_TAIL_BYTES && whole > 0;
        let count = whole + u64::from(tail > 0 && !joins);
        Self { length, size, count, most }
    }

    /// How many pieces there are; 0 of no bytes.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Whether it is worth more than one path: at half of the most pieces.
    pub(crate) fn is_spread(&self) -> bool {
        self.count >= self.most / 2
    }

    /// The pieces, by their place in the request.
    pub(crate) fn pieces(self) -> impl Iterator<Item = Range<u64>> {
        let Self { length, size, count, .. } = self;
        (0..count).map(move |at| {
            let start = at * size;
            start..if at + 1 == count { length } else { start + size }
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(length: u64, direction: Direction) {
        let slicing = Slicing::new(length, direction);
        let most = if direction == Direction::Read { 64 } else { 32 };
        assert!(slicing.count() <= most, "{slicing:?}");
        let pieces: Vec<_> = slicing.pieces().collect();
        assert_eq!(pieces.len() as u64, slicing.count());
        let mut end = 0;
        for (at, piece) in pieces.iter().enumerate() {
            assert_eq!(piece.start, end, "no gap, no overlap");
            assert!(piece.end > piece.start, "none is empty");
            end = piece.end;
            if at + 1 < pieces.len() {
                assert_eq!((piece.end - piece.start) % BLOCK_BYTES, 0, "whole blocks");
                assert_eq!(piece.end - piece.start, pieces[0].end - pieces[0].start, "of one size");
            } else if pieces.len() > 1 {
                assert!(piece.end - piece.start >= BLOCK_BYTES / 4, "no crumb at the end");
            }
        }
        assert_eq!(end, length);
    }

    /// Every length around every edge up to beyond the point where pieces begin to grow.
    #[test]
    fn pieces_are_the_request_at_every_edge() {
        for direction in [Direction::Read, Direction::Write] {
            for blocks in 0..=200_u64 {
                for off in [0, 1, 2, BLOCK_BYTES / 4 - 1, BLOCK_BYTES / 4, BLOCK_BYTES / 4 + 1, BLOCK_BYTES - 1] {
                    check(blocks * BLOCK_BYTES + off, direction);
                }
            }
            for length in [u64::MAX, u64::MAX - 1, u64::MAX / 2, 1 << 63, (1 << 63) + 1] {
                check(length, direction);
            }
        }
    }

    #[test]
    fn the_counts_are_those_of_the_rule() {
        let count = |length, direction| Slicing::new(length, direction).count();
        let blocks = |blocks| blocks * BLOCK_BYTES;
        for (length, read, write) in [
            (0, 0, 0),
            (1, 1, 1),
            (BLOCK_BYTES, 1, 1),
            (BLOCK_BYTES + BLOCK_BYTES / 4 - 1, 1, 1),
            (BLOCK_BYTES + BLOCK_BYTES / 4, 2, 2),
            (blocks(32), 32, 32),
            (blocks(64), 64, 32),
            // 65 blocks in 64 pieces: two blocks each.
            (blocks(65), 33, 22),
            (blocks(128), 64, 32),
        ] {
            assert_eq!((count(length, Direction::Read), count(length, Direction::Write)), (read, write), "{length}");
        }
    }

    #[test]
    fn small_requests_take_one_path() {
        let spread = |length, direction| Slicing::new(length, direction).is_spread();
        assert!(!spread(31 * BLOCK_BYTES, Direction::Read) && spread(32 * BLOCK_BYTES, Direction::Read));
        assert!(!spread(15 * BLOCK_BYTES, Direction::Write) && spread(16 * BLOCK_BYTES, Direction::Write));
        // As `RdmaConfig::spread` has it.
        assert!(!spread(2_047_999, Direction::Read) && spread(2_048_000, Direction::Read));
        assert!(!spread(999_423, Direction::Write) && spread(999_424, Direction::Write));
    }

    proptest! {
        #[test]
        fn pieces_are_the_request(length in any::<u64>(), shift in 0_u32..64, write in any::<bool>()) {
            check(length >> shift, if write { Direction::Write } else { Direction::Read });
        }
    }
}
