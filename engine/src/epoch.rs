//! Which life of which engine is meant.

use std::{fmt, str::FromStr};

/// 128 random bits of one engine's life. A process that now listens where another did has a different one, so that an
/// operation meant for the first never touches the second.
///
/// It fences restarts; it authenticates nobody. Hand it to peers out of band, together with the endpoint: its text form
/// is 32 hexadecimal digits.
///
/// ```
/// use verbs_engine::Epoch;
///
/// let epoch: Epoch = "000102030405060708090a0b0c0d0e0f".parse()?;
/// assert_eq!(epoch.to_string(), "000102030405060708090a0b0c0d0e0f");
/// # Ok::<(), verbs_engine::NotAnEpoch>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch([u8; 16]);

/// Text that is not 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an epoch is 32 hexadecimal digits, not {found:?}")]
pub struct NotAnEpoch {
    /// The text, cut to 64 characters.
    pub found: String,
}

impl Epoch {
    /// Draws one from the system.
    pub(crate) fn draw() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// One that was published as bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes, to publish.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Epoch({self})")
    }
}

impl FromStr for Epoch {
    type Err = NotAnEpoch;

    fn from_str(text: &str) -> Result<Self, NotAnEpoch> {
        let refused = || NotAnEpoch { found: text.chars().take(64).collect() };
        let digits = text.as_bytes();
        // `from_str_radix` would take a sign.
        if digits.len() != 32 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(refused());
        }
        u128::from_str_radix(text, 16).map(|number| Self(number.to_be_bytes())).map_err(|_| refused())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_draws_differ_and_survive_their_text() {
        let (a, b) = (Epoch::draw().expect("entropy"), Epoch::draw().expect("entropy"));
        assert_ne!(a, b);
        assert_eq!(a.to_string().parse(), Ok(a));
        assert_eq!(Epoch::from_bytes(b.to_bytes()), b);
    }

    #[test]
    fn what_is_not_32_digits_is_refused() {
        let long = "0".repeat(33);
        let signed = format!("+{}", "0".repeat(31));
        let umlaut = "ä".repeat(16);
        for text in ["", "00", &long, &signed, &umlaut, "0g0102030405060708090a0b0c0d0e0f"] {
            assert_eq!(text.parse::<Epoch>(), Err(NotAnEpoch { found: text.to_owned() }));
        }
        let upper: Epoch = "ABCDEF00000000000000000000000000".parse().expect("either case");
        assert_eq!(upper.to_bytes()[0], 0xab);
    }
}
