//! The bootstrap socket after the exchange: open for as long as the connection lives.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// Stays open for the connection's life: the kernel closes the peer's end when its process dies, which tells of a
/// crash in microseconds. One death signal among others, never the proof of health. Drop it to close it.
#[derive(Debug)]
pub struct LifeSocket<S> {
    stream: S,
}

/// How a life ended. Each means the same for the connection: the peer is gone or broken.
#[derive(Debug)]
pub enum LifeEnd {
    /// The peer closed it, or its process ended.
    Closed,
    /// The connection broke: reset, or keepalive unanswered.
    Broken(io::Error),
    /// The peer sent something, which nothing here allows.
    Unexpected {
        /// The first byte.
        byte: u8,
    },
}

impl<S: AsyncRead + Unpin> LifeSocket<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream }
    }

    /// Resolves when the peer is gone. Cancel safe.
    pub async fn closed(&mut self) -> LifeEnd {
        let mut byte = [0];
        match self.stream.read(&mut byte).await {
            Ok(0) => LifeEnd::Closed,
            Ok(_) => LifeEnd::Unexpected { byte: byte[0] },
            Err(error) => LifeEnd::Broken(error),
        }
    }
}

impl<S> LifeSocket<S> {
    /// The stream itself.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }
}
