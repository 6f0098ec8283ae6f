//! The shared secret: HMAC-SHA256 over both nonces and both frames, one label for each direction.

use std::{fmt, sync::Arc};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{
    types::Offer,
    wire::{self, Hello, Nonce, Tag},
};

/// What both sides must know: at least 16 bytes, never printed.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

/// A secret below [`Secret::MIN_BYTES`] bytes: take one from a random generator, not from a word list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a secret of {bytes} bytes is too short: at least 16 random bytes are needed")]
pub struct SecretTooShort {
    /// How many bytes there were.
    pub bytes: usize,
}

impl Secret {
    /// The shortest secret that is taken.
    pub const MIN_BYTES: usize = 16;

    /// Takes the secret's bytes.
    ///
    /// # Errors
    ///
    /// [`SecretTooShort`] below [`Self::MIN_BYTES`] bytes.
    pub fn new(bytes: &[u8]) -> Result<Self, SecretTooShort> {
        if bytes.len() < Self::MIN_BYTES {
            return Err(SecretTooShort { bytes: bytes.len() });
        }
        Ok(Self(bytes.into()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(redacted)")
    }
}

/// Who makes a tag. Each has a label of its own, so a tag sent back to its maker proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Dialer,
    Acceptor,
}

impl Role {
    const fn label(self) -> &'static [u8] {
        match self {
            Self::Dialer => b"verbs-bootstrap 1 dial\0",
            Self::Acceptor => b"verbs-bootstrap 1 accept\0",
        }
    }
}

impl Secret {
    /// Label, both nonces (one inside the hello), the hello and, from the acceptor, the reply. Every part but the
    /// label, which ends in its only zero, has a fixed length in this version, so no two inputs read the same.
    fn mac(&self, role: Role, hello: &Hello, challenge: &Nonce, reply: Option<&Offer>) -> HmacSha256 {
        let mut mac = HmacSha256::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        mac.update(role.label());
        mac.update(&hello.nonce.0);
        mac.update(&challenge.0);
        for part in [Some(wire::encode_body(hello)), reply.map(wire::encode_body)].into_iter().flatten() {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(&part);
        }
        mac
    }

    pub(crate) fn tag(&self, role: Role, hello: &Hello, challenge: &Nonce, reply: Option<&Offer>) -> Tag {
        Tag(self.mac(role, hello, challenge, reply).finalize().into_bytes().into())
    }

    /// In constant time.
    pub(crate) fn verify(&self, tag: Tag, role: Role, hello: &Hello, challenge: &Nonce, reply: Option<&Offer>) -> bool {
        self.mac(role, hello, challenge, reply).verify_slice(&tag.0).is_ok()
    }
}

/// 32 bytes from the operating system.
pub(crate) fn nonce() -> Nonce {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect("the operating system has random bytes");
    Nonce(bytes)
}

type HmacSha256 = Hmac<Sha256>;
