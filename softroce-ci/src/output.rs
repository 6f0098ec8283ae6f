//! Where commands' output goes.

use std::io::{self, Write};

/// Which stream of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// Takes output as it comes.
pub(crate) trait Output {
    /// Bytes of a host (0 or 1), not necessarily whole lines.
    fn bytes(&mut self, host: usize, stream: Stream, bytes: &[u8]);
    /// No more for now.
    fn flush(&mut self) {}
}

/// Straight to our own streams.
pub(crate) struct Plain;

impl Output for Plain {
    fn bytes(&mut self, _host: usize, stream: Stream, bytes: &[u8]) {
        match stream {
            Stream::Out => write_all(io::stdout().lock(), bytes),
            Stream::Err => write_all(io::stderr().lock(), bytes),
        }
    }
}

/// Both streams to our standard error, when standard output is for something else.
pub(crate) struct AllToStderr;

impl Output for AllToStderr {
    fn bytes(&mut self, _host: usize, _stream: Stream, bytes: &[u8]) {
        write_all(io::stderr().lock(), bytes);
    }
}

/// A reader that has gone away (`| head`) ends everything, as SIGPIPE would.
fn write_all(mut to: impl Write, bytes: &[u8]) {
    const SIGPIPE: i32 = 13;
    let written = to.write_all(bytes).and_then(|()| to.flush());
    if written.is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
        crate::signals::pretend(SIGPIPE);
    }
}

/// Whole lines, each behind its host's number.
pub(crate) struct Prefixed<O> {
    inner: O,
    partial: [[Vec<u8>; 2]; 2],
}

impl<O: Output> Prefixed<O> {
    /// Lines go to `inner`.
    pub(crate) fn new(inner: O) -> Self {
        Self { inner, partial: Default::default() }
    }

    fn line(&mut self, host: usize, stream: Stream, line: &[u8]) {
        let mut out = format!("[{}] ", host + 1).into_bytes();
        out.extend_from_slice(line);
        out.push(b'\n');
        self.inner.bytes(host, stream, &out);
    }
}

impl<O: Output> Output for Prefixed<O> {
    fn bytes(&mut self, host: usize, stream: Stream, bytes: &[u8]) {
        let mut rest = std::mem::take(&mut self.partial[host][stream as usize]);
        rest.extend_from_slice(bytes);
        let mut lines = rest.split(|byte| *byte == b'\n').peekable();
        while let Some(line) = lines.next() {
            if lines.peek().is_some() {
                self.line(host, stream, line);
            } else {
                self.partial[host][stream as usize] = line.to_vec();
            }
        }
    }

    fn flush(&mut self) {
        for host in 0..2 {
            for stream in [Stream::Out, Stream::Err] {
                let rest = std::mem::take(&mut self.partial[host][stream as usize]);
                if !rest.is_empty() {
                    self.line(host, stream, &rest);
                }
            }
        }
        self.inner.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Kept(Vec<u8>);

    impl Output for Kept {
        fn bytes(&mut self, _host: usize, _stream: Stream, bytes: &[u8]) {
            self.0.extend_from_slice(bytes);
        }
    }

    #[test]
    fn lines_of_two_hosts_never_mix() {
        let mut output = Prefixed::new(Kept::default());
        output.bytes(0, Stream::Out, b"he");
        output.bytes(1, Stream::Out, b"other\nhalf");
        output.bytes(0, Stream::Out, b"llo\n\n");
        output.bytes(0, Stream::Err, b"err");
        output.flush();
        output.flush();
        assert_eq!(String::from_utf8(output.inner.0).unwrap(), "[2] other\n[1] hello\n[1] \n[1] err\n[2] half\n");
    }
}
