//! What a requester says and hears on a control connection.

use std::net::TcpStream;

use super::{
    exchange::Exchange,
    rails::plan::{PLANNED_BYTES, PLANNED_KIND},
    wire::{Body, Frame, HEAD_BYTES, Offer},
};
use crate::{
    Phase, TransferError, WireError,
    control::{REPLY_BYTES, Reply, check_head},
    deadline::Deadline,
    tcp::{Line, Stop, broken},
};

/// What a source may say where a frame is due.
pub(super) enum Said {
    Frame(Frame),
    Reply(Reply),
}

/// What a source may say to a plan.
pub(super) enum Answer {
    /// As it came.
    Planned(Vec<u8>),
    Reply(Reply),
}

/// A conversation that is under way.
pub(super) struct Talk<'a> {
    pub(super) stream: TcpStream,
    pub(super) deadline: Deadline,
    pub(super) stop: &'a Stop,
}

impl Talk<'_> {
    pub(super) fn line(&self) -> Line<'_> {
        Line { stream: &self.stream, deadline: self.deadline, stop: self.stop }
    }

    pub(super) fn send(&self, bytes: &[u8], phase: Phase) -> Result<(), TransferError> {
        self.line().send_all(bytes, &mut 0).map_err(|error| broken(error, phase))
    }

    pub(super) fn say(&self, exchange: &mut Exchange, body: Body) -> Result<(), TransferError> {
        let mut next = *exchange;
        let frame = next.say(body)?;
        self.send(&frame.encode(), Phase::Request)?;
        *exchange = next;
        Ok(())
    }

    /// A frame, or a reply in its place.
    pub(super) fn read(&self, phase: Phase) -> Result<Said, TransferError> {
        let head = self.head(phase)?;
        // Statuses are below all phases.
        if head[10] < FIRST_PHASE {
            return Ok(Said::Reply(self.reply(&head, phase)?));
        }
        let bytes = self.rest(&head, Frame::kind_of(&head)?.bytes(), phase)?;
        Ok(Said::Frame(Frame::decode(&bytes)?))
    }

    /// The answer to a plan, or a reply in its place.
    pub(super) fn planned(&self) -> Result<Answer, TransferError> {
        let head = self.head(Phase::Reply)?;
        if head[10] < FIRST_PHASE {
            return Ok(Answer::Reply(self.reply(&head, Phase::Reply)?));
        }
        // Another frame is shorter.
        let found = check_head(&head)?;
        if found != PLANNED_KIND {
            return Err(WireError::OutOfTurn { found, due: PLANNED_KIND }.into());
        }
        Ok(Answer::Planned(self.rest(&head, PLANNED_BYTES, Phase::Reply)?))
    }

    fn head(&self, phase: Phase) -> Result<[u8; HEAD_BYTES], TransferError> {
        let mut head = [0; HEAD_BYTES];
        self.line().recv_exact(&mut head).map_err(|error| broken(error, phase))?;
        Ok(head)
    }

    fn rest(&self, head: &[u8; HEAD_BYTES], length: usize, phase: Phase) -> Result<Vec<u8>, TransferError> {
        let mut bytes = vec![0; length];
        bytes[..HEAD_BYTES].copy_from_slice(head);
        self.line().recv_exact(&mut bytes[HEAD_BYTES..]).map_err(|error| broken(error, phase))?;
        Ok(bytes)
    }

    fn reply(&self, head: &[u8; HEAD_BYTES], phase: Phase) -> Result<Reply, TransferError> {
        let mut bytes = [0; REPLY_BYTES];
        bytes.copy_from_slice(&self.rest(head, REPLY_BYTES, phase)?);
        Ok(Reply::decode(&bytes)?)
    }

    pub(super) fn offer(&self, length: u64) -> Result<Offer, TransferError> {
        if length > Offer::bytes_max() {
            return Err(WireError::Length { found: length, expected: Offer::bytes_max() }.into());
        }
        let mut payload = vec![0; usize::try_from(length).map_err(|_| TransferError::Internal)?];
        self.line().recv_exact(&mut payload).map_err(|error| broken(error, Phase::Reply))?;
        Ok(Offer::decode(&payload)?)
    }
}

/// The first kind that is no status.
const FIRST_PHASE: u8 = 16;
