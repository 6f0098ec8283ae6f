//! Frames between the host and the agent in the guest: length, kind, channel, body.
//!
//! A channel is one command. Channels with [`PEER`] set belong to commands that one guest started on the other; the host
//! only passes their frames on.

use std::ffi::OsString;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// Set in the channel of a command that a guest, not the host, asked for.
pub(crate) const PEER: u32 = 1 << 31;
/// Set beside [`PEER`] when guest 2 asked.
pub(crate) const PEER_OF_SECOND: u32 = 1 << 30;
/// The largest body, in bytes: a longer one means that the stream is out of step.
const BODY_MAX_BYTES: u32 = 16 << 20;
const HEADER_BYTES: usize = 9;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Guest to host, once: the device is there. Body: [`Hello`].
    Hello = 1,
    /// Start a command. Body: [`ExecSpec`].
    Exec = 2,
    /// Bytes for the command's standard input; the next ones only after a [`Kind::StdinAck`].
    Stdin = 3,
    /// End of standard input.
    StdinEnd = 4,
    /// The bytes of the last [`Kind::Stdin`] were taken.
    StdinAck = 5,
    /// Bytes of standard output.
    Stdout = 6,
    /// Bytes of standard error.
    Stderr = 7,
    /// The command ended. Body: exit status, four bytes, little endian.
    Exit = 8,
    /// Send a signal to the command. Body: its number, four bytes, little endian.
    Signal = 9,
    /// The terminal's size: rows and columns, two bytes each.
    Resize = 10,
    /// A sign of life.
    Beat = 11,
    /// A line of the kernel log of level warning or worse.
    Kmsg = 12,
    /// The guest's set-up failed. Body: why.
    Fatal = 13,
    /// Asks for all kernel log lines so far; answered by the same kind once they are sent.
    Sync = 14,
}

impl Kind {
    fn from_u8(raw: u8) -> Option<Self> {
        const ALL: [Kind; 14] = [
            Kind::Hello,
            Kind::Exec,
            Kind::Stdin,
            Kind::StdinEnd,
            Kind::StdinAck,
            Kind::Stdout,
            Kind::Stderr,
            Kind::Exit,
            Kind::Signal,
            Kind::Resize,
            Kind::Beat,
            Kind::Kmsg,
            Kind::Fatal,
            Kind::Sync,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == raw)
    }
}

/// One frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) channel: u32,
    pub(crate) body: Vec<u8>,
}

impl Frame {
    pub(crate) fn new(kind: Kind, channel: u32, body: impl Into<Vec<u8>>) -> Self {
        Self { kind, channel, body: body.into() }
    }

    /// The exit status or signal number in the body; 255 when it is not one.
    pub(crate) fn number(&self) -> i32 {
        <[u8; 4]>::try_from(self.body.as_slice()).map_or(255, i32::from_le_bytes)
    }

    /// The body as text, for messages.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Writes the frame in one call, so that a byte stream shared under a lock stays whole.
    pub(crate) fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let len = u32::try_from(self.body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.body.len());
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.push(self.kind as u8);
        bytes.extend_from_slice(&self.channel.to_le_bytes());
        bytes.extend_from_slice(&self.body);
        out.write_all(&bytes)?;
        out.flush()
    }

    /// Reads one frame; `None` at the end of the stream.
    pub(crate) fn read_from(input: &mut impl Read) -> io::Result<Option<Self>> {
        let mut header = [0_u8; HEADER_BYTES];
        match input.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        let [l0, l1, l2, l3, kind, c0, c1, c2, c3] = header;
        let len = u32::from_le_bytes([l0, l1, l2, l3]);
        let kind = Kind::from_u8(kind).filter(|_| len <= BODY_MAX_BYTES);
        let kind = kind.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a frame that is none"))?;
        let mut body = vec![0; len as usize];
        input.read_exact(&mut body)?;
        Ok(Some(Self { kind, channel: u32::from_le_bytes([c0, c1, c2, c3]), body }))
    }
}

/// A command to run: the words exactly as given, never through a shell.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ExecSpec {
    /// Program and arguments.
    pub(crate) argv: Vec<OsString>,
    /// The whole environment.
    pub(crate) env: Vec<(OsString, OsString)>,
    /// Working directory; `/` when it does not exist there.
    pub(crate) cwd: OsString,
    /// Rows and columns, when the command gets a terminal.
    pub(crate) pty: Option<(u16, u16)>,
    /// Standard input is a pipe that frames fill; else it is `/dev/null`.
    pub(crate) stdin: bool,
    /// Ends what the command left running in its process group when it ends itself.
    pub(crate) sweep: bool,
}

/// What the guest says when it is ready.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Kernel release.
    pub(crate) kernel: String,
    /// Name of the RDMA device.
    pub(crate) device: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_went() {
        let mut bytes = Vec::new();
        let frames = [Frame::new(Kind::Stdout, 7, b"hello".to_vec()), Frame::new(Kind::Beat, 0, Vec::new())];
        for frame in &frames {
            frame.write_to(&mut bytes).unwrap();
        }
        let mut input = bytes.as_slice();
        for frame in &frames {
            assert_eq!(Frame::read_from(&mut input).unwrap().as_ref(), Some(frame));
        }
        assert_eq!(Frame::read_from(&mut input).unwrap(), None);
    }

    #[test]
    fn garbage_is_refused_without_allocating_for_it() {
        assert!(Frame::read_from(&mut [0xff_u8; 64].as_slice()).is_err());
        assert!(Frame::read_from(&mut [1, 0, 0, 0, 0xee, 0, 0, 0, 0, 0].as_slice()).is_err());
    }

    #[test]
    fn words_that_are_not_utf8_survive() {
        use std::os::unix::ffi::OsStringExt as _;
        let odd = OsString::from_vec(vec![b'a', 0xff, b'"', b' ', b'\'']);
        let spec = ExecSpec { argv: vec![odd.clone()], ..ExecSpec::default() };
        let back: ExecSpec = serde_json::from_slice(&serde_json::to_vec(&spec).unwrap()).unwrap();
        assert_eq!(back.argv, [odd]);
    }
}
