//! Bounds-checked reading and writing of big-endian fields.

use super::{WIRE_VERSION, WireError};
use crate::proto::handle::{HANDLE_BYTES, Handle};

/// What is left of the bytes.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Behind version, opcode and correlation.
    pub(super) fn opened(bytes: &'a [u8]) -> Result<(Self, u8, u64), WireError> {
        let mut from = Self(bytes);
        from.version()?;
        let (opcode, correlation) = (from.u8("opcode")?, from.u64("correlation")?);
        Ok((from, opcode, correlation))
    }

    pub(super) fn version(&mut self) -> Result<(), WireError> {
        match self.u8("version")? {
            WIRE_VERSION => Ok(()),
            found => Err(WireError::Version { found }),
        }
    }

    pub(super) fn bytes(&mut self, what: &'static str, need: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) =
            self.0.split_at_checked(need).ok_or(WireError::Truncated { what, need, have: self.0.len() })?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], WireError> {
        let (taken, rest) =
            self.0.split_first_chunk::<N>().ok_or(WireError::Truncated { what, need: N, have: self.0.len() })?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, WireError> {
        self.array(what).map(|[byte]| byte)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, WireError> {
        self.array(what).map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, WireError> {
        self.array(what).map(u64::from_be_bytes)
    }

    pub(super) fn handle(&mut self) -> Result<Handle, WireError> {
        self.array::<HANDLE_BYTES>("handle").map(Handle::from_bytes)
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) const fn done(self) -> Result<(), WireError> {
        match self.0.len() {
            0 => Ok(()),
            bytes => Err(WireError::Trailing { bytes }),
        }
    }
}

pub(super) struct Writer(Vec<u8>);

impl Writer {
    /// With version, opcode and correlation.
    pub(super) fn new(opcode: u8, correlation: u64) -> Self {
        let mut out = Self::bare();
        out.u8(WIRE_VERSION);
        out.u8(opcode);
        out.u64(correlation);
        out
    }

    pub(super) fn bare() -> Self {
        // The longest request is an acquire with 40 bytes.
        Self(Vec::with_capacity(48))
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_be_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_be_bytes());
    }

    pub(super) fn handle(&mut self, handle: Handle) {
        self.bytes(&handle.to_bytes());
    }

    pub(super) fn done(self) -> Vec<u8> {
        self.0
    }
}
