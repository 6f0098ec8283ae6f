//! What the two processes say to each other.
//!
//! ```text
//! header (24 bytes, big endian)   payload
//! 0      op
//! 4-7    CRC-32 of the payload
//! 8-15   number of the message in its stream, from 0
//! 16-23  an argument of the op
//! ```

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::time::timeout;
use verbs_transport::{InstanceId, MessageType, Received, SendOutcome, Stream, Worker};

use crate::{
    Fabric,
    problem::{PATIENCE, Problem, Trouble},
};

/// Bytes of the header.
pub(crate) const HEADER_BYTES: usize = 24;

/// What a message wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Op {
    /// The payload is the sender's address, so that it can be answered. Answered likewise, without payload.
    Introduce = 1,
    /// Answered with the same bytes, each inverted.
    Echo = 2,
    /// As many items as the argument says are about to come, and the same number is wanted in return.
    Flood = 3,
    /// One of these.
    Item = 4,
    /// All items have come: the argument is their number.
    Tally = 5,
    /// Answered with the counts of the side that is asked, as JSON.
    Counts = 6,
    /// The end.
    Bye = 7,
}

impl Op {
    const ALL: [Self; 7] = [Self::Introduce, Self::Echo, Self::Flood, Self::Item, Self::Tally, Self::Counts, Self::Bye];
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) op: Op,
    pub(crate) crc: u32,
    pub(crate) seq: u64,
    pub(crate) arg: u64,
}

impl Header {
    fn encode(self) -> Bytes {
        let mut bytes = BytesMut::zeroed(HEADER_BYTES);
        bytes[0] = self.op as u8;
        bytes[4..8].copy_from_slice(&self.crc.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.seq.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.arg.to_be_bytes());
        bytes.freeze()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER_BYTES] = bytes.try_into().ok()?;
        let op = Op::ALL.into_iter().find(|op| *op as u8 == bytes[0])?;
        let word = |at: usize| bytes[at..at + 8].try_into().map(u64::from_be_bytes).ok();
        let crc = bytes[4..8].try_into().map(u32::from_be_bytes).ok()?;
        Some(Self { op, crc, seq: word(8)?, arg: word(16)? })
    }
}

/// One direction of one stream: numbers what it sends.
pub(crate) struct Line {
    worker: Worker<Fabric>,
    peer: InstanceId,
    kind: MessageType,
    next: u64,
    trouble: Arc<Trouble>,
}

impl Line {
    pub(crate) fn new(worker: &Worker<Fabric>, peer: InstanceId, kind: MessageType, trouble: &Arc<Trouble>) -> Self {
        Self { worker: worker.clone(), peer, kind, next: 0, trouble: trouble.clone() }
    }

    /// Sends one message; waits while the peer's channel is full.
    pub(crate) async fn send(&mut self, op: Op, arg: u64, payload: Bytes) -> Result<(), Problem> {
        let header = Header { op, crc: crc32fast::hash(&payload), seq: self.next, arg };
        self.next += 1;
        let on_error = self.trouble.clone();
        match self.worker.send(self.peer, header.encode(), payload, self.kind, on_error) {
            SendOutcome::Admitted => Ok(()),
            SendOutcome::Pending(admission) => match timeout(PATIENCE, admission).await {
                Ok(admitted) => Ok(admitted?),
                Err(_) => Err(Problem::Silence {
                    after: PATIENCE,
                    waiting_for: format!("room to send message {}", header.seq),
                }),
            },
        }
    }

    /// How many it has sent.
    pub(crate) fn sent(&self) -> u64 {
        self.next
    }
}

/// The receiving end of a line: takes each number once, in order, with a good checksum.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    next: u64,
}

impl Checker {
    pub(crate) fn check(&mut self, frame: &Received) -> Result<Header, Problem> {
        let unreadable = || Problem::Protocol(format!("a header of {} bytes", frame.header.len()));
        let header = Header::decode(&frame.header).ok_or_else(unreadable)?;
        if header.seq != self.next {
            return Err(Problem::Order { expected: self.next, got: header.seq });
        }
        self.next += 1;
        let got = crc32fast::hash(&frame.payload);
        if got != header.crc {
            let bytes = frame.payload.len();
            return Err(Problem::Checksum { seq: header.seq, bytes, expected: header.crc, got });
        }
        Ok(header)
    }

    /// How many it has taken.
    pub(crate) fn taken(&self) -> u64 {
        self.next
    }
}

/// The next frame of a stream, or what went wrong meanwhile.
pub(crate) async fn next(stream: &mut Stream, trouble: &Trouble, waiting_for: &str) -> Result<Received, Problem> {
    tokio::select! {
        biased;
        frame = timeout(PATIENCE, stream.recv()) => match frame {
            Ok(Some(frame)) => Ok(frame),
            Ok(None) => Err(Problem::Protocol("the worker stopped".to_owned())),
            Err(_) => Err(Problem::Silence { after: PATIENCE, waiting_for: waiting_for.to_owned() }),
        },
        problem = trouble.first() => Err(problem),
    }
}

/// Bytes that differ from message to message, so that a mix-up shows.
pub(crate) fn pattern(bytes: usize, seed: u64) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = BytesMut::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out.freeze()
}

/// What an echo answers.
pub(crate) fn inverted(bytes: &[u8]) -> Bytes {
    bytes.iter().map(|byte| !byte).collect()
}
