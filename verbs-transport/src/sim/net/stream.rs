//! One connection: two pipes, each with its delay and its fate.

use std::{
    collections::VecDeque,
    io,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

use super::{NetState, Shared};

/// One end of a simulated TCP connection.
#[derive(Debug)]
pub struct SimStream {
    world: Arc<Shared>,
    conn: u64,
    side: usize,
    /// Sleeps until bytes under way are there.
    sleep: Option<Pin<Box<Sleep>>>,
}

/// Both directions; `pipes[side]` holds what `side` wrote.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) hosts: [usize; 2],
    pub(super) addrs: [IpAddr; 2],
    pub(super) open: [bool; 2],
    pub(super) pipes: [Pipe; 2],
    pub(super) delay: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Pipe {
    /// Bytes under way or unread, and when they are there.
    chunks: VecDeque<(Instant, VecDeque<u8>)>,
    bytes: usize,
    /// Bytes ever written.
    passed: u64,
    end: Option<End>,
    /// The writer has shut this direction down.
    shut: bool,
    /// Further bytes, and the end, vanish.
    black: bool,
    pub(super) fate: Option<(u64, Fate)>,
    pub(super) dribble: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// How a direction ends, after its bytes.
#[derive(Clone, Copy, Debug)]
enum End {
    Closed(Instant),
    Reset(Instant),
}

/// What strikes a direction once some bytes have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Reset,
    BlackHole,
    HalfClose,
}

/// Bytes that a direction holds before its writer has to wait.
const PIPE_BYTES: usize = 64 << 10;

impl Conn {
    pub(super) fn all_wakers(&mut self) -> Vec<Waker> {
        self.pipes.iter_mut().flat_map(|pipe| [pipe.reader.take(), pipe.writer.take()]).flatten().collect()
    }

    /// One end is closed. As in TCP the other sees the end, or a reset if something was left unread here.
    pub(super) fn close(&mut self, side: usize) -> Vec<Waker> {
        if !std::mem::replace(&mut self.open[side], false) {
            return Vec::new();
        }
        let at = Instant::now() + self.delay;
        let unread = !self.pipes[1 - side].chunks.is_empty();
        self.pipes[1 - side].chunks.clear();
        let pipe = &mut self.pipes[side];
        if !pipe.black && pipe.end.is_none() {
            pipe.end = Some(if unread { End::Reset(at) } else { End::Closed(at) });
        }
        self.all_wakers()
    }

    fn reset(&mut self) {
        let now = Instant::now();
        self.pipes.iter_mut().for_each(|pipe| pipe.end = Some(End::Reset(now)));
    }

    /// Takes what it can of `bytes` from `side`; `None` when the pipe is full.
    fn write(&mut self, side: usize, bytes: &[u8], faults_on: bool) -> io::Result<(Option<usize>, Option<Fate>)> {
        let at = Instant::now() + self.delay;
        let pipe = &mut self.pipes[side];
        if matches!(pipe.end, Some(End::Reset(_))) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if pipe.black {
            return Ok((Some(bytes.len()), None));
        }
        if pipe.shut || !self.open[1 - side] {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let mut taken = bytes.len().min(PIPE_BYTES - pipe.bytes);
        let fate = pipe.fate.filter(|_| faults_on);
        let mut struck = None;
        if let Some((after, fate)) = fate {
            let left = usize::try_from(after.saturating_sub(pipe.passed)).unwrap_or(usize::MAX);
            if bytes.len() > left {
                taken = taken.min(left);
                struck = Some(fate);
            }
        }
        pipe.bytes += taken;
        pipe.passed += taken as u64;
        if taken > 0 {
            pipe.chunks.push_back((at, bytes[..taken].iter().copied().collect()));
        }
        match struck {
            None => return Ok(((taken > 0 || bytes.is_empty()).then_some(taken), None)),
            Some(Fate::Reset) => self.reset(),
            Some(Fate::BlackHole) => pipe.black = true,
            Some(Fate::HalfClose) => {
                pipe.black = true;
                pipe.end = Some(End::Closed(at));
            }
        }
        self.pipes[side].fate = None;
        // The writer learns nothing of a hole, and of a reset at its next call.
        Ok((Some(bytes.len()), struck))
    }
}

impl Pipe {
    /// Bytes that are there, the end, or when to look again.
    fn read(&mut self, into: &mut ReadBuf<'_>) -> Read {
        let now = Instant::now();
        let Some((at, chunk)) = self.chunks.front_mut() else {
            return match self.end {
                Some(End::Closed(at) | End::Reset(at)) if at > now => Read::Later(at),
                Some(End::Closed(_)) => Read::Done,
                Some(End::Reset(_)) => Read::Reset,
                None => Read::Nothing,
            };
        };
        if *at > now {
            return Read::Later(*at);
        }
        let most = if self.dribble { 1 } else { chunk.len() };
        let mut taken = 0;
        while taken < most && into.remaining() > 0 {
            let Some(byte) = chunk.pop_front() else { break };
            into.put_slice(&[byte]);
            taken += 1;
        }
        if chunk.is_empty() {
            self.chunks.pop_front();
        }
        self.bytes -= taken;
        Read::Done
    }
}

enum Read {
    /// What was read is in the buffer; nothing read is the end.
    Done,
    Reset,
    Later(Instant),
    Nothing,
}

impl SimStream {
    pub(super) fn new(world: Arc<Shared>, conn: u64, side: usize) -> Self {
        Self { world, conn, side, sleep: None }
    }

    /// Waits until `at`; when that is past, the caller looks again.
    fn poll_until(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if sleep.deadline() != at {
            sleep.as_mut().reset(at);
        }
        sleep.as_mut().poll(cx)
    }
}

impl NetState {
    /// The connection, if its `side` lives on a host that does.
    fn conn(&mut self, conn: u64, side: usize) -> io::Result<&mut Conn> {
        let killed: &[super::NetHost] = &self.hosts;
        let conn = self.conns.get_mut(&conn).ok_or(io::ErrorKind::NotConnected)?;
        if killed[conn.hosts[side]].killed { Err(io::ErrorKind::NetworkDown.into()) } else { Ok(conn) }
    }
}

impl AsyncRead for SimStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            let at = {
                let mut net = this.world.net();
                let [a, b] = net.conn(this.conn, this.side)?.addrs;
                let cut = net.is_cut(a, b);
                let pipe = &mut net.conn(this.conn, this.side)?.pipes[1 - this.side];
                match if cut { Read::Nothing } else { pipe.read(buf) } {
                    Read::Done => {
                        let writer = pipe.writer.take();
                        drop(net);
                        writer.into_iter().for_each(Waker::wake);
                        return Poll::Ready(Ok(()));
                    }
                    Read::Reset => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                    Read::Nothing => {
                        pipe.reader = Some(cx.waker().clone());
                        return Poll::Pending;
                    }
                    Read::Later(at) => {
                        // A cut or a reset may come before the bytes do.
                        pipe.reader = Some(cx.waker().clone());
                        at
                    }
                }
            };
            ready!(this.poll_until(at, cx));
        }
    }
}

impl AsyncWrite for SimStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut net = self.world.net();
        let faults_on = net.faults_on;
        let conn = net.conn(self.conn, self.side)?;
        let (taken, struck) = conn.write(self.side, bytes, faults_on)?;
        let Some(taken) = taken else {
            conn.pipes[self.side].writer = Some(cx.waker().clone());
            return Poll::Pending;
        };
        let woken = if struck.is_some() {
            conn.all_wakers()
        } else {
            conn.pipes[self.side].reader.take().into_iter().collect()
        };
        match struck {
            Some(Fate::Reset) => net.counts.resets += 1,
            Some(Fate::BlackHole) => net.counts.black_holes += 1,
            Some(Fate::HalfClose) => net.counts.half_closes += 1,
            None => {}
        }
        drop(net);
        woken.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut net = self.world.net();
        let conn = net.conn(self.conn, self.side)?;
        let at = Instant::now() + conn.delay;
        let pipe = &mut conn.pipes[self.side];
        pipe.shut = true;
        if !pipe.black && pipe.end.is_none() {
            pipe.end = Some(End::Closed(at));
        }
        let reader = pipe.reader.take();
        drop(net);
        reader.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        let woken = self.world.net().close(self.conn, self.side);
        woken.into_iter().for_each(Waker::wake);
    }
}
