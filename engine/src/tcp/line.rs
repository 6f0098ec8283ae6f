//! One TCP connection under one deadline: everything that waits, waits here.

use std::{
    io::{self, IoSlice, Read as _, Write as _},
    net::TcpStream,
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
};

use crate::{
    deadline::Deadline,
    memory::{Blocked, Denied, Patience},
};

/// Ends every wait of an engine, for good.
pub(crate) struct Stop {
    fd: OwnedFd,
    signalled: AtomicBool,
}

/// A connection, the time it has, and what else may end a wait.
#[derive(Clone, Copy)]
pub(crate) struct Line<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) deadline: Deadline,
    pub(crate) stop: &'a Stop,
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    /// The connection.
    Ready,
    /// The other thing that was waited for.
    Called,
}

/// Why bytes did not get through.
#[derive(Debug)]
pub(crate) enum LineError {
    TimedOut,
    /// The engine ends.
    Stopped,
    /// The peer closed in good order.
    Closed,
    Io(io::Error),
}

impl Stop {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, signalled: AtomicBool::new(false) })
    }

    /// The descriptor stays readable from now on, so that waits that begin later end, too.
    pub(crate) fn signal(&self) {
        self.signalled.store(true, Ordering::Release);
        if let Err(error) = rustix::io::write(&self.fd, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "cannot signal the end to waiting threads; they end by their deadlines");
        }
    }

    pub(crate) fn is_signalled(&self) -> bool {
        self.signalled.load(Ordering::Acquire)
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

impl From<Denied> for LineError {
    fn from(denied: Denied) -> Self {
        match denied {
            // The source, or the plan, has checked the range: a fault of ours.
            Denied::OutOfRange => Self::Io(io::ErrorKind::InvalidInput.into()),
            Denied::Blocked(Blocked::Busy) => Self::TimedOut,
            Denied::Blocked(Blocked::Stopped) => Self::Stopped,
        }
    }
}

impl Line<'_> {
    /// For memory that a direct operation is at.
    pub(crate) fn patience(&self) -> Patience<'_> {
        Patience::Until(self.deadline, self.stop)
    }

    /// Fills `buffer`.
    pub(crate) fn recv_exact(&self, buffer: &mut [u8]) -> Result<(), LineError> {
        let mut filled = 0;
        while filled < buffer.len() {
            filled += self.recv_some(&mut buffer[filled..])?;
        }
        Ok(())
    }

    /// Waits for bytes, then takes what there is.
    pub(crate) fn recv_some(&self, buffer: &mut [u8]) -> Result<usize, LineError> {
        loop {
            if let Some(count) = self.try_recv(buffer)? {
                return Ok(count);
            }
            self.wait(PollFlags::IN)?;
        }
    }

    /// What there is now; `None` if there is nothing.
    pub(crate) fn try_recv(&self, buffer: &mut [u8]) -> Result<Option<usize>, LineError> {
        let mut stream = self.stream;
        match retry(|| stream.read(buffer))? {
            Some(0) if !buffer.is_empty() => Err(LineError::Closed),
            other => Ok(other),
        }
    }

    /// Sends all of `bytes`, waiting for room; `accepted` counts what the kernel took, whatever happens then.
    pub(crate) fn send_all(&self, bytes: &[u8], accepted: &mut usize) -> Result<(), LineError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let count = self.try_send(&[], rest)?;
            if count == 0 {
                self.wait(PollFlags::OUT)?;
            }
            *accepted += count;
            rest = &rest[count..];
        }
        Ok(())
    }

    /// Sends what there is room for now, in one write: of `head`, then of `body`.
    pub(crate) fn try_send(&self, head: &[u8], body: &[u8]) -> Result<usize, LineError> {
        let mut stream = self.stream;
        let count = if head.is_empty() {
            retry(|| stream.write(body))?
        } else {
            retry(|| stream.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]))?
        };
        Ok(count.unwrap_or(0))
    }

    /// Bytes that a read would find now.
    pub(crate) fn available(&self) -> Result<usize, LineError> {
        let count = rustix::io::ioctl_fionread(self.stream).map_err(|errno| LineError::Io(errno.into()))?;
        Ok(usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// Waits until the connection is ready, or has failed: the next read or write tells which.
    pub(crate) fn wait(&self, readiness: PollFlags) -> Result<(), LineError> {
        self.wait_for(readiness, None).map(drop)
    }

    /// As [`Line::wait`], but ends also when `call` can be read.
    pub(super) fn wait_or(&self, readiness: PollFlags, call: &OwnedFd) -> Result<Woken, LineError> {
        self.wait_for(readiness, Some(call))
    }

    fn wait_for(&self, readiness: PollFlags, call: Option<&OwnedFd>) -> Result<Woken, LineError> {
        loop {
            if self.stop.is_signalled() {
                return Err(LineError::Stopped);
            }
            let left = self.deadline.remaining().ok_or(LineError::TimedOut)?;
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let stop = self.stop.fd();
            let mut fds = [
                PollFd::new(self.stream, readiness),
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(call.unwrap_or(stop), PollFlags::IN),
            ];
            let watched = if call.is_some() { &mut fds[..] } else { &mut fds[..2] };
            match poll(watched, Some(&timeout)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) if !fds[0].revents().is_empty() => return Ok(Woken::Ready),
                Ok(_) if !fds[2].revents().is_empty() => return Ok(Woken::Called),
                Ok(_) => {}
                Err(errno) => return Err(LineError::Io(errno.into())),
            }
        }
    }
}

/// `None` if it would block.
fn retry(mut call: impl FnMut() -> io::Result<usize>) -> Result<Option<usize>, LineError> {
    loop {
        match call() {
            Ok(count) => return Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(LineError::Io(error)),
        }
    }
}
