//! Where pulled bytes go.

use std::io;

use tokio::io::{AsyncWrite, AsyncWriteExt};

use crate::error::PullError;

/// A destination, and how far it is filled.
pub(super) enum Sink<'a> {
    /// Grows to the payload's length.
    Vec(&'a mut Vec<u8>),
    /// Takes no more than it is long.
    Slice { bytes: &'a mut [u8], filled: usize },
    /// Takes all, in order.
    Writer { writer: &'a mut (dyn AsyncWrite + Send + Unpin), written: u64 },
}

impl Sink<'_> {
    /// Says why a payload does not fit, before any byte of it is transferred.
    pub(super) fn prepare(&mut self, total_bytes: u64, max: u64) -> Result<(), PullError> {
        if total_bytes > max {
            return Err(PullError::TooLarge { total_bytes, max });
        }
        match self {
            Self::Vec(bytes) => {
                bytes.clear();
                Ok(())
            }
            Self::Slice { bytes, .. } if (bytes.len() as u64) < total_bytes => {
                Err(PullError::Capacity { total_bytes, capacity: bytes.len() as u64 })
            }
            Self::Slice { .. } | Self::Writer { .. } => Ok(()),
        }
    }

    /// Makes room for a payload that comes in pieces.
    pub(super) fn reserve(&mut self, total_bytes: u64) -> Result<(), PullError> {
        let Self::Vec(bytes) = self else { return Ok(()) };
        let more = usize::try_from(total_bytes).unwrap_or(usize::MAX).saturating_sub(bytes.len());
        bytes.try_reserve_exact(more).map_err(|_| PullError::NoMemory { bytes: total_bytes })
    }

    /// Bytes taken so far.
    pub(super) fn filled(&self) -> u64 {
        match self {
            Self::Vec(bytes) => bytes.len() as u64,
            Self::Slice { filled, .. } => *filled as u64,
            Self::Writer { written, .. } => *written,
        }
    }

    /// Whether one piece may be the whole payload: nothing is gained by less.
    pub(super) const fn takes_whole(&self) -> bool {
        matches!(self, Self::Vec(_))
    }

    /// Takes the next bytes.
    pub(super) async fn put(&mut self, piece: &[u8]) -> Result<(), PullError> {
        match self {
            Self::Vec(bytes) => bytes.extend_from_slice(piece),
            Self::Slice { bytes, filled } => {
                let place = bytes.get_mut(*filled..*filled + piece.len());
                let place = place.ok_or(PullError::Destination(io::ErrorKind::WriteZero.into()))?;
                place.copy_from_slice(piece);
                *filled += piece.len();
            }
            Self::Writer { writer, written } => {
                writer.write_all(piece).await.map_err(PullError::Destination)?;
                *written += piece.len() as u64;
            }
        }
        Ok(())
    }

    /// Takes the next bytes, without a copy where all of them are in one vector.
    pub(super) async fn put_vec(&mut self, piece: Vec<u8>) -> Result<(), PullError> {
        match self {
            Self::Vec(bytes) if bytes.is_empty() => {
                **bytes = piece;
                Ok(())
            }
            _ => self.put(&piece).await,
        }
    }

    /// All is there.
    pub(super) async fn finish(&mut self) -> Result<(), PullError> {
        match self {
            Self::Writer { writer, .. } => writer.flush().await.map_err(PullError::Destination),
            Self::Vec(_) | Self::Slice { .. } => Ok(()),
        }
    }
}
