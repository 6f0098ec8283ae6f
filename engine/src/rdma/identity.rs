//! Who talks about what: the names that both sides put into every frame of an operation.

use std::fmt;

use sha2::{Digest as _, Sha256};

use crate::WireError;

/// Names one life of a protection domain or of a pair of QPs: 128 random bits. All zeros name none.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Incarnation(pub(crate) [u8; 16]);

impl Incarnation {
    pub(crate) const NONE: Self = Self([0; 16]);

    /// A new one.
    pub(crate) fn draw() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        // The one value of 2^128 that means something else.
        bytes[0] |= u8::from(bytes == [0; 16]);
        Ok(Self(bytes))
    }

    pub(crate) fn is_none(self) -> bool {
        self == Self::NONE
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// The exact request: the first half of the SHA-256 of its bytes, as they were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digest(pub(crate) [u8; 16]);

impl Digest {
    /// Of a request and what was asked along with it.
    pub(crate) fn of(request: &[u8], ask: &[u8]) -> Self {
        Self::over(&[request, ask])
    }

    /// Of those bytes, one after the other.
    pub(crate) fn over(parts: &[&[u8]]) -> Self {
        let whole = parts.iter().fold(Sha256::new(), Sha256::chain_update).finalize();
        let mut half = [0; 16];
        half.copy_from_slice(&whole[..16]);
        Self(half)
    }
}

/// What every frame from the choice of a path on must name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) source_epoch: [u8; 16],
    pub(crate) requester_epoch: [u8; 16],
    pub(crate) source_pd: Incarnation,
    pub(crate) requester_pd: Incarnation,
    pub(crate) source_link: Incarnation,
    pub(crate) requester_link: Incarnation,
    pub(crate) request: u64,
    pub(crate) digest: Digest,
    /// The grant's, counted by the source over its life.
    pub(crate) generation: u64,
}

impl Identity {
    /// Whether `self`, which came from the peer, is what we know.
    pub(crate) fn check(&self, known: &Self) -> Result<(), WireError> {
        let fields = [
            ("source epoch", self.source_epoch == known.source_epoch),
            ("requester epoch", self.requester_epoch == known.requester_epoch),
            ("source protection domain", self.source_pd == known.source_pd),
            ("requester protection domain", self.requester_pd == known.requester_pd),
            ("source connection", self.source_link == known.source_link),
            ("requester connection", self.requester_link == known.requester_link),
            ("request number", self.request == known.request),
            ("request digest", self.digest == known.digest),
            ("grant generation", self.generation == known.generation),
        ];
        match fields.into_iter().find(|(_, same)| !same) {
            Some((field, _)) => Err(WireError::Foreign { field }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_of_all_bytes_and_their_border_does_not_matter() {
        // SHA-256("abc"), from FIPS 180-2.
        let abc =
            Digest([0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d, 0xae, 0x22, 0x23]);
        assert_eq!(Digest::of(b"ab", b"c"), abc);
        assert_ne!(Digest::of(b"ab", b"d"), abc);
    }

    #[test]
    fn draws_differ_and_none_is_drawn() {
        let (a, b) = (Incarnation::draw().expect("entropy"), Incarnation::draw().expect("entropy"));
        assert!(a != b && !a.is_none() && Incarnation::default().is_none());
    }
}
