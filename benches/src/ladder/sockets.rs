//! Round trips over loopback TCP, between two threads.

use std::{
    io::{self, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    thread,
    time::Instant,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    runtime::{Builder, Runtime},
};
use verbs_transport::{
    MessageType,
    proto::frame::{FrameHeader, FrameKind, GrantWish, HEADER_BYTES},
};

use super::{Outcome, Times, histogram, one_way};

/// Both ends of one connection.
fn connection() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    Ok((near, far))
}

fn panicked<T>(joined: thread::Result<T>) -> Outcome<T> {
    joined.map_err(|_| "the thread that answers panicked".into())
}

pub(super) fn blocking(bytes: usize, iters: u32) -> Outcome<Times> {
    let (mut near, mut far) = connection()?;
    let echo = thread::spawn(move || -> io::Result<()> {
        let mut message = vec![0; bytes];
        for _ in 0..iters {
            far.read_exact(&mut message)?;
            far.write_all(&message)?;
        }
        Ok(())
    });
    let (mut message, mut times) = (vec![7; bytes], histogram());
    for _ in 0..iters {
        let began = Instant::now();
        near.write_all(&message)?;
        near.read_exact(&mut message)?;
        times.saturating_record(one_way(began.elapsed()));
    }
    panicked(echo.join())??;
    Ok(times)
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// The same with tokio, a runtime on each of the two threads; with `framed` each message has the library's header.
pub(super) fn asynchronous(bytes: usize, iters: u32, framed: bool) -> Outcome<Times> {
    let (near, far) = connection()?;
    let echo = thread::spawn(move || -> io::Result<()> {
        runtime()?.block_on(async {
            let mut side = Side::new(far, bytes, framed)?;
            for _ in 0..iters {
                side.receive().await?;
                side.send().await?;
            }
            Ok(())
        })
    });
    let times = runtime()?.block_on(async {
        let (mut side, mut times) = (Side::new(near, bytes, framed)?, histogram());
        for _ in 0..iters {
            let began = Instant::now();
            side.send().await?;
            side.receive().await?;
            times.saturating_record(one_way(began.elapsed()));
        }
        Ok::<_, io::Error>(times)
    })?;
    panicked(echo.join())??;
    Ok(times)
}

struct Side {
    stream: tokio::net::TcpStream,
    /// The header first, if there is one.
    buffer: Vec<u8>,
    framed: bool,
}

impl Side {
    fn new(stream: TcpStream, bytes: usize, framed: bool) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let stream = tokio::net::TcpStream::from_std(stream)?;
        Ok(Self { stream, buffer: vec![7; bytes + if framed { HEADER_BYTES } else { 0 }], framed })
    }

    async fn send(&mut self) -> io::Result<()> {
        if self.framed {
            let header = FrameHeader {
                kind: FrameKind::Data(MessageType::Message),
                wish: GrantWish::None,
                first: true,
                last: true,
                lane: verbs_transport::Lane::Application,
                credits: 1,
                word: 0,
            };
            self.buffer[..HEADER_BYTES].copy_from_slice(&header.encode());
        }
        self.stream.write_all(&self.buffer).await
    }

    async fn receive(&mut self) -> io::Result<()> {
        self.stream.read_exact(&mut self.buffer).await?;
        if self.framed {
            let mut head = [0; HEADER_BYTES];
            head.copy_from_slice(&self.buffer[..HEADER_BYTES]);
            FrameHeader::decode(head).map_err(|error| io::Error::other(error.to_string()))?;
        }
        Ok(())
    }
}
