//! What a requester does behind a grant: the data, the marker, DONE, ACK and READY.

use std::time::Instant;

use verbs_transport::fabric::bulk::{BulkFabric, BulkOp, BulkWr, Local, Remote, Rkey};

use super::{
    device::RegionOf,
    grant::{Form, marker_of},
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
        let chunk = usize::try_from(self.config.chunk_bytes).map_err(|_| TransferError::Internal)?;
        let on_device = |error: WaitError, phase| match error {
            WaitError::TimedOut => TransferError::TimedOut { phase },
            WaitError::Stopped => TransferError::Stopped,
            WaitError::Broken(broken) => device_error(phase, broken),
        };
        let phase = match slice.direction {
            Direction::Read => Phase::Payload,
            Direction::Write => Phase::Body,
        };
        let began = Instant::now();
        for (id, offset) in (0_u64..).zip((0..length).step_by(chunk)) {
            link.mail.wait_sends(window - 1, talk.deadline).map_err(|error| on_device(error, phase))?;
            if Instant::now() >= *expires || talk.deadline.remaining().is_none() {
                return Err(TransferError::TimedOut { phase });
            }
            let len = u32::try_from(chunk.min(length - offset)).map_err(|_| TransferError::Internal)?;
            let local = Local { region: memory, offset, len };
            let remote = Remote { addr: terms.address + offset as u64, rkey: Rkey(terms.key) };
            let op = match slice.direction {
                Direction::Read => BulkOp::Read { local, remote },
                Direction::Write => BulkOp::Write { local, remote },
            };
            exchange.posting();
            link.post(BulkWr { id, signaled: true, fence: false, op }).map_err(|error| device_error(phase, error))?;
        }
        link.mail.wait_sends(0, talk.deadline).map_err(|error| on_device(error, phase))?;
        route.observe(began.elapsed());
        if Instant::now() >= *expires {
            return Err(TransferError::TimedOut { phase });
        }
        let op = match terms.form {
            Form::Registration => BulkOp::SendImm { imm: marker_of(exchange.identity().generation) },
            Form::Window => BulkOp::SendInvalidate { rkey: Rkey(terms.key) },
        };
        // Everything before it is complete; the fence holds it back should that ever change.
        let marker = BulkWr { id: MARKER_ID, signaled: true, fence: true, op };
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

/// The terms of a grant, which must be those of the request.
pub(super) fn terms(body: Body, slice: &Slice, windows: bool) -> Result<GrantTerms, WireError> {
    match body {
        Body::Grant(terms) if terms.length != slice.length => {
            Err(WireError::Length { found: terms.length, expected: slice.length })
        }
        // Of a kind that we have not said that we take.
        Body::Grant(terms) if terms.form == Form::Window && !windows => {
            Err(WireError::Unknown { field: "form of a grant", found: 2 })
        }
        Body::Grant(terms) => Ok(terms),
        other => Err(WireError::OutOfTurn { found: other.kind() as u8, due: Kind::Grant as u8 }),
    }
}

/// Of the marker; chunks count from 0.
const MARKER_ID: u64 = 1 << 62;
