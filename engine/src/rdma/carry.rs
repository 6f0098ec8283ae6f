//! What a requester does behind a grant: the data, the marker, DONE, ACK and READY.

use std::time::Instant;

use verbs_transport::fabric::{
    PostError,
    bulk::{BulkFabric, BulkOp, BulkRegion, BulkWr, Local, Remote, Rkey},
};

use super::{
    RdmaConfig,
    device::RegionOf,
    grant::{Form, marker_of},
    link::Link,
    mailbox::WaitError,
    requester::{Granted, RdmaRequester, device_error},
    routes::Route,
    talk::Said,
    wire::{Body, GrantTerms, Kind},
};
use crate::{Direction, Phase, TransferError, WireError, batch::Slice};

impl<F: BulkFabric> RdmaRequester<F> {
    /// The data, the marker, DONE, ACK and READY. The effect of a failure is the exchange's to tell.
    pub(super) fn move_data(
        &self,
        granted: &mut Granted<'_, F>,
        slice: &Slice,
        memory: &RegionOf<F>,
        route: &Route,
    ) -> Result<(), TransferError> {
        let Granted { talk, link, exchange, terms, expires } = granted;
        let window = self.config.window.min(link.agreed.rd_atomic.initiator.into());
        let length = usize::try_from(slice.length).map_err(|_| TransferError::Internal)?;
        let phase = match slice.direction {
            Direction::Read => Phase::Payload,
            Direction::Write => Phase::Body,
        };
        let began = Instant::now();
        let mut offset = 0;
        while offset < length {
            link.mail.wait_sends(window - 1, talk.deadline).map_err(|error| on_device(error, phase))?;
            if Instant::now() >= *expires || talk.deadline.remaining().is_none() {
                return Err(TransferError::TimedOut { phase });
            }
            let len = chunk(&self.config, length - offset);
            exchange.posting();
            post_chunk(link, terms, memory, slice.direction, (offset, len))
                .map_err(|error| device_error(phase, error))?;
            offset += len as usize;
        }
        link.mail.wait_sends(0, talk.deadline).map_err(|error| on_device(error, phase))?;
        route.observe(began.elapsed());
        if Instant::now() >= *expires {
            return Err(TransferError::TimedOut { phase });
        }
        // Everything before it is complete; the fence holds it back should that ever change.
        let marker = marker(terms, exchange.identity().generation);
        link.post(marker).map_err(|error| device_error(phase, error))?;
        link.mail.wait_sends(0, talk.deadline).map_err(|error| on_device(error, phase))?;
        talk.say(exchange, Body::Done)?;
        match talk.read(Phase::Acknowledgement)? {
            Said::Frame(frame) => exchange.hear(&frame)?,
            Said::Reply(reply) => return Err(self.refused(&reply, slice.peer)),
        };
        // The operation is done. If the pair cannot be used again, that is not its concern.
        if let Err(error) = talk.say(exchange, Body::Ready) {
            tracing::debug!(%error, "a pair of QPs is not kept");
        }
        Ok(())
    }
}

/// The next READ or WRITE of what is `left` to move, in bytes.
pub(super) fn chunk(config: &RdmaConfig, left: usize) -> u32 {
    u32::try_from(left).unwrap_or(u32::MAX).min(config.chunk_bytes)
}

/// Posts one READ or WRITE of the granted bytes, from an offset on.
pub(super) fn post_chunk<F: BulkFabric>(
    link: &Link<F>,
    terms: &GrantTerms,
    staging: &RegionOf<F>,
    direction: Direction,
    (offset, len): (usize, u32),
) -> Result<(), PostError> {
    let local = Local { region: staging, offset, len };
    let remote = Remote { addr: terms.address + offset as u64, rkey: Rkey(terms.key) };
    let op = match direction {
        Direction::Read => BulkOp::Read { local, remote },
        Direction::Write => BulkOp::Write { local, remote },
    };
    link.post(BulkWr { id: offset as u64, signaled: true, fence: false, op })
}

/// What tells the source that its grant is used, out of its receive queue.
pub(super) fn marker<'a, R: BulkRegion>(terms: &GrantTerms, generation: u64) -> BulkWr<'a, R> {
    let op = match terms.form {
        Form::Registration => BulkOp::SendImm { imm: marker_of(generation) },
        Form::Window => BulkOp::SendInvalidate { rkey: Rkey(terms.key) },
    };
    BulkWr { id: MARKER_ID, signaled: true, fence: true, op }
}

pub(super) fn on_device(error: WaitError, phase: Phase) -> TransferError {
    match error {
        WaitError::TimedOut => TransferError::TimedOut { phase },
        WaitError::Stopped => TransferError::Stopped,
        WaitError::Broken(broken) => device_error(phase, broken),
    }
}

/// The terms of a grant, which must be those of the request.
pub(super) fn terms(body: Body, length: u64, windows: bool) -> Result<GrantTerms, WireError> {
    match body {
        Body::Grant(terms) if terms.length != length => {
            Err(WireError::Length { found: terms.length, expected: length })
        }
        // Of a kind that we have not said that we take.
        Body::Grant(terms) if terms.form == Form::Window && !windows => {
            Err(WireError::Unknown { field: "form of a grant", found: 2 })
        }
        Body::Grant(terms) => Ok(terms),
        other => Err(WireError::OutOfTurn { found: other.kind() as u8, due: Kind::Grant as u8 }),
    }
}

/// Of the marker; others are offsets of data.
const MARKER_ID: u64 = 1 << 62;
