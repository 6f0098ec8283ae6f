//! The owner's call, as an application writes it.

use std::{fs::File, io, io::Read as _, path::Path, sync::Arc};

use bytes::Bytes;
use verbs_transport::fabric::Fabric;

use super::{
    Rendezvous, StageOptions,
    inner::{Inner, SourceSlice},
};
use crate::{
    error::StageError,
    proto::{handle::Handle, wire::PathReason},
};

/// What is offered.
#[derive(Debug)]
pub enum Source {
    /// Bytes in memory.
    Bytes(Bytes),
    /// A file, read once, now: what is written to it later is not seen.
    File(File),
}

impl Source {
    /// Opens a file.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        File::open(path).map(Self::File)
    }
}

impl<T: Into<Bytes>> From<T> for Source {
    fn from(bytes: T) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl<F: Fabric> Rendezvous<F> {
    /// Offers bytes or a file to whoever is given the handle, until [`Rendezvous::withdraw`]: pinned where there is room.
    ///
    /// # Errors
    ///
    /// [`StageError`].
    pub async fn offer(&self, source: impl Into<Source>) -> Result<Handle, StageError> {
        let options = StageOptions { pinned: true, ..StageOptions::default() };
        let file = match source.into() {
            Source::Bytes(bytes) => return self.stage_with(bytes, options).await,
            Source::File(file) => file,
        };
        let inner = self.inner.clone();
        let read = tokio::task::spawn_blocking(move || inner.read_file(&file)).await;
        match read.map_err(|_| StageError::ShuttingDown)?? {
            FileBytes::Pinned(slice, len) => self.inner.stage_slice(slice, len, options),
            FileBytes::Memory(bytes, reason) => self.inner.stage_memory(bytes, reason, options),
        }
    }
}

enum FileBytes {
    Pinned(SourceSlice, u64),
    Memory(Bytes, PathReason),
}

/// A file is copied into its slice through so many bytes.
const PIECE_BYTES: usize = 1 << 20;

impl<F: Fabric> Inner<F> {
    fn read_file(&self, mut file: &File) -> Result<FileBytes, StageError> {
        let len = file.metadata()?.len();
        self.check_size(len)?;
        let slice = match self.slice_for(len) {
            Ok(slice) => slice,
            Err(reason) => {
                let mut bytes = Vec::new();
                let out_of_memory = |_| io::Error::from(io::ErrorKind::OutOfMemory);
                bytes.try_reserve_exact(usize::try_from(len).unwrap_or(usize::MAX)).map_err(out_of_memory)?;
                file.take(len).read_to_end(&mut bytes)?;
                return Ok(FileBytes::Memory(bytes.into(), reason));
            }
        };
        let mut piece = vec![0; PIECE_BYTES.min(usize::try_from(len).unwrap_or(PIECE_BYTES))];
        let mut at = 0;
        while at < len {
            let now = usize::try_from(len - at).unwrap_or(usize::MAX).min(piece.len());
            file.read_exact(&mut piece[..now])?;
            slice.write_at(usize::try_from(at).unwrap_or(usize::MAX), &piece[..now]).map_err(io::Error::other)?;
            at += now as u64;
        }
        Ok(FileBytes::Pinned(Arc::new(slice), len))
    }
}
