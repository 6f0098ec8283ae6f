//! The name of a staged payload.

use std::{fmt, num::NonZeroU64, str::FromStr};

/// Names one staged payload of one run of a worker. 128 bits: the worker in the upper 64, its slot in the lower 64.
///
/// The worker's half is the number that it draws at its start, so a handle of a run that is over names nothing in the
/// next one. It is a name, not a right: whoever has it can ask, and the owner decides.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    /// The owner's run.
    pub worker: u64,
    /// The slot there.
    pub slot: u64,
}

/// Bytes of a [`Handle`] on the wire.
pub const HANDLE_BYTES: usize = 16;

impl Handle {
    /// The two numbers, big endian, the worker's first.
    pub const fn to_bytes(self) -> [u8; HANDLE_BYTES] {
        (((self.worker as u128) << 64) | self.slot as u128).to_be_bytes()
    }

    /// Every 16 bytes are a handle; whether it names anything, its owner knows.
    pub const fn from_bytes(bytes: [u8; HANDLE_BYTES]) -> Self {
        let whole = u128::from_be_bytes(bytes);
        #[expect(clippy::cast_possible_truncation, reason = "each half is taken")]
        Self { worker: (whole >> 64) as u64, slot: whole as u64 }
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{:x}", self.worker, self.slot)
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is no handle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no handle: two hexadecimal numbers of 64 bits with a dash between them")]
pub struct ParseHandleError {
    /// What was given.
    pub text: String,
}

impl FromStr for Handle {
    type Err = ParseHandleError;

    fn from_str(text: &str) -> Result<Self, ParseHandleError> {
        let number = |part: &str| u64::from_str_radix(part, 16).ok().filter(|_| !part.starts_with('+'));
        text.split_once('-')
            .and_then(|(worker, slot)| Some(Self { worker: number(worker)?, slot: number(slot)? }))
            .ok_or_else(|| ParseHandleError { text: text.to_owned() })
    }
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(NonZeroU64);

        impl $name {
            /// The number as it stands on the wire; 0 names nothing.
            pub fn new(raw: u64) -> Option<Self> {
                NonZeroU64::new(raw).map(Self)
            }

            /// For the wire.
            pub const fn get(self) -> u64 {
                self.0.get()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} {}", stringify!($name), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    )*};
}

ids! {
    /// One staged payload within a worker. From 1, never used twice.
    SlotId
    /// One consumer's right to read one slot until a deadline. From 1, never used twice.
    LeaseId
}

/// Counts ids up from 1.
#[derive(Debug)]
pub(crate) struct Mint(NonZeroU64);

impl Default for Mint {
    fn default() -> Self {
        Self(NonZeroU64::MIN)
    }
}

impl Mint {
    /// The next number. 2^64 of them are not used up within the life of a process.
    pub(crate) fn next(&mut self) -> NonZeroU64 {
        let id = self.0;
        self.0 = id.saturating_add(1);
        id
    }

    pub(crate) fn slot(&mut self) -> SlotId {
        SlotId(self.next())
    }

    pub(crate) fn lease(&mut self) -> LeaseId {
        LeaseId(self.next())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// RT-9.
    #[test]
    fn handles_round_trip_all_ones_included() {
        let ones = Handle { worker: u64::MAX, slot: u64::MAX };
        assert_eq!(ones.to_bytes(), [0xff; 16]);
        for handle in [ones, Handle { worker: 0, slot: 0 }, Handle { worker: u64::MAX, slot: 1 }] {
            assert_eq!(Handle::from_bytes(handle.to_bytes()), handle);
            assert_eq!(handle.to_string().parse(), Ok(handle));
        }
        let golden = Handle { worker: 0x0102_0304_0506_0708, slot: 9 };
        assert_eq!(golden.to_bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9]);
        assert_eq!(golden.to_string(), "0102030405060708-9");
    }

    #[test]
    fn text_that_is_no_handle_is_refused() {
        for text in ["", "-", "1", "1-", "-1", "x-1", "1-2-3", "+1-1", "10000000000000000-1"] {
            assert!(text.parse::<Handle>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_handle_round_trips(worker in any::<u64>(), slot in any::<u64>()) {
            let handle = Handle { worker, slot };
            prop_assert_eq!(Handle::from_bytes(handle.to_bytes()), handle);
            prop_assert_eq!(handle.to_string().parse(), Ok(handle));
        }
    }
}
