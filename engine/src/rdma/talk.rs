//! What a requester says and hears on a control connection.

use std::net::TcpStream;

use super::{
    exchange::Exchange,
    wire::{Body, Frame, HEAD_BYTES, Offer},
};
use crate::{
    Phase, TransferError, WireError,
    control::{REPLY_BYTES, Reply},
    deadline::Deadline,
    tcp::{Line, LineError, Stop, broken},
};

/// What a source may say where a frame is due.
pub(super) enum Said {
    Frame(Frame),
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
        let failed = |error: LineError| broken(error, phase);
        let mut head = [0; HEAD_BYTES];
        self.line().recv_exact(&mut head).map_err(failed)?;
        // Statuses are below all phases.
        if head[10] < FIRST_PHASE {
            let mut bytes = [0; REPLY_BYTES];
            bytes[..HEAD_BYTES].copy_from_slice(&head);
            self.line().recv_exact(&mut bytes[HEAD_BYTES..]).map_err(failed)?;
            return Ok(Said::Reply(Reply::decode(&bytes)?));
        }
        let mut bytes = vec![0; Frame::kind_of(&head)?.bytes()];
        bytes[..HEAD_BYTES].copy_from_slice(&head);
        self.line().recv_exact(&mut bytes[HEAD_BYTES..]).map_err(failed)?;
        Ok(Said::Frame(Frame::decode(&bytes)?))
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
