//! The requester's side of each operation.

use std::{
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use super::{
    buffers::Buffers,
    dial::{broken, dial},
    direct, landing,
    line::{Line, LineError, Stop},
    pool::Pool,
    staging::StagingPool,
};
use crate::{
    Epoch, Notification, Phase, Profile, RemoteEffect, Status, TransferError, Transport, WireError,
    batch::{DataPath, Direction, Slice},
    control::{COMMIT_BYTE, Description, Opcode, REPLY_BYTES, Reply, Request},
    deadline::Deadline,
    error::Failure,
    memory::Use,
    stats::Counters,
};

/// Requests over TCP, one after the other on a connection.
pub(crate) struct TcpPath {
    pub(crate) pool: Arc<Pool>,
    pub(crate) staging: Arc<StagingPool>,
    pub(crate) stop: Arc<Stop>,
    pub(crate) buffers: Buffers,
    pub(crate) counters: Arc<Counters>,
}

/// Which life of which engine.
type Peer = (SocketAddr, Epoch);

/// A request that is under way.
struct Call<'a> {
    path: &'a TcpPath,
    peer: Peer,
    stream: TcpStream,
    deadline: Deadline,
}

impl TcpPath {
    /// What the peer exports, and what it is.
    pub(crate) fn describe(&self, peer: Peer, deadline: Deadline) -> Result<Description, TransferError> {
        let call = self.call(peer, &Request::describe(peer.1), deadline)?;
        let reply = call.reply(Phase::Reply, Status::Success)?;
        if reply.length > Description::BYTES_MAX {
            return Err(WireError::Length { found: reply.length, expected: Description::BYTES_MAX }.into());
        }
        let mut payload = vec![0; usize::try_from(reply.length).expect("checked: small")];
        call.line().recv_exact(&mut payload).map_err(|error| broken(error, Phase::Payload))?;
        let description = Description::decode(&payload)?;
        call.keep();
        Ok(description)
    }

    /// Puts a notification into the peer's inbox.
    pub(crate) fn notify(&self, peer: Peer, notification: &Notification, deadline: Deadline) -> Result<(), Failure> {
        let Notification { name, message } = notification;
        let (offset, length) = (name.len() as u64, message.len() as u64);
        let (opcode, epoch, profile) = (Opcode::Notify, peer.1, Profile::Staged);
        let request = Request { opcode, epoch, region: 0, offset, length, profile };
        let call = self.call(peer, &request, deadline).map_err(Failure::harmless)?;
        call.reply(Phase::Reply, Status::Ready).map_err(Failure::harmless)?;
        let mut body = Vec::with_capacity(name.len() + message.len() + 1);
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(message.as_bytes());
        body.push(COMMIT_BYTE);
        let sent = call.line().send_all(&body, &mut 0).map_err(|error| broken(error, Phase::Body));
        call.acknowledged(sent).inspect_err(|_| self.counters.unknown.add(1))
    }

    fn read(&self, slice: &Slice, call: Call<'_>) -> Result<(), Failure> {
        let reply = call.reply(Phase::Reply, Status::Success).map_err(Failure::harmless)?;
        if reply.length != slice.length {
            let wrong = WireError::Length { found: reply.length, expected: slice.length };
            return Err(Failure::harmless(wrong.into()));
        }
        let (line, local) = (call.line(), slice.local.registration());
        let failed = |error| Failure::harmless(broken(error, Phase::Payload));
        match slice.profile {
            Profile::Staged => {
                landing::receive(line, &self.staging, (local, slice.local_place())).map_err(failed)?;
            }
            Profile::Direct => {
                let range = direct::lend(line, local, slice.local_place(), Use::Write);
                let mut range = range.map_err(|error| Failure::harmless(broken(error, Phase::LocalMemory)))?;
                let mut received = 0;
                let done = direct::receive(line, &mut range, &mut received);
                done.map_err(|error| Failure { local_changed: received > 0, ..failed(error) })?;
            }
        }
        call.keep();
        Ok(())
    }

    fn write(&self, slice: &Slice, call: Call<'_>) -> Result<(), Failure> {
        call.reply(Phase::Reply, Status::Ready).map_err(Failure::harmless)?;
        let (line, local) = (call.line(), slice.local.registration());
        let mut accepted = 0;
        let sent = match slice.profile {
            Profile::Staged => landing::send(line, &self.staging, &[], (local, slice.local_place()), &mut accepted),
            Profile::Direct => {
                let range = direct::lend(line, local, slice.local_place(), Use::Read);
                // Nothing of the body has left.
                let range = range.map_err(|error| Failure::harmless(broken(error, Phase::LocalMemory)))?;
                direct::send(line, &[], &range, &mut accepted)
            }
        };
        if accepted == 0 && matches!(sent, Err(LineError::TimedOut | LineError::Stopped)) {
            // Nothing of the body has left: as a rule it was the local bytes that did not become free.
            return sent.map_err(|error| Failure::harmless(broken(error, Phase::LocalMemory)));
        }
        call.acknowledged(sent.map_err(|error| broken(error, Phase::Body)))
    }

    /// Sends the request: on a kept connection if there is one, else on a new one. If the kept one takes not one byte,
    /// nothing of the request exists anywhere but here, and a new one gets it.
    fn call(&self, peer: Peer, request: &Request, deadline: Deadline) -> Result<Call<'_>, TransferError> {
        let bytes = request.encode();
        if let Some(stream) = self.pool.take(peer.0, peer.1) {
            let call = Call { path: self, peer, stream, deadline };
            let mut accepted = 0;
            match call.line().send_all(&bytes, &mut accepted) {
                Ok(()) => {
                    self.counters.reused.add(1);
                    return Ok(call);
                }
                Err(error) if accepted > 0 => return Err(broken(error, Phase::Request)),
                Err(_) => {}
            }
        }
        self.counters.dialled.add(1);
        let stream = dial(peer.0, self.buffers, deadline, &self.stop)?;
        let call = Call { path: self, peer, stream, deadline };
        call.line().send_all(&bytes, &mut 0).map_err(|error| broken(error, Phase::Request))?;
        Ok(call)
    }
}

impl DataPath for TcpPath {
    fn transfer(&self, slice: Slice, deadline: Deadline, post: &dyn Fn() -> bool) -> Result<Transport, Failure> {
        let opcode = match slice.direction {
            Direction::Read => Opcode::Read,
            Direction::Write => Opcode::Write,
        };
        let (region, offset) = (slice.remote_region, slice.remote_offset);
        let (epoch, length, profile) = (slice.peer.1, slice.length, slice.profile);
        let request = Request { opcode, epoch, region, offset, length, profile };
        if !post() {
            return Err(Failure::harmless(TransferError::Cancelled));
        }
        let call = self.call(slice.peer, &request, deadline).map_err(Failure::harmless);
        let (outcome, moved) = match slice.direction {
            Direction::Read => (call.and_then(|call| self.read(&slice, call)), &self.counters.read),
            Direction::Write => (call.and_then(|call| self.write(&slice, call)), &self.counters.written),
        };
        match &outcome {
            Ok(()) => {
                self.counters.completed.add(1);
                self.counters.direct_completed.add(u64::from(slice.profile == Profile::Direct));
                moved.add(slice.length);
            }
            Err(failure) => {
                self.counters.failed.add(1);
                self.counters.unknown.add(u64::from(failure.effect == RemoteEffect::Unknown));
            }
        }
        outcome.map(|()| Transport::Tcp)
    }
}

impl Call<'_> {
    fn line(&self) -> Line<'_> {
        Line { stream: &self.stream, deadline: self.deadline, stop: &self.path.stop }
    }

    /// A reply with the status that is due at this point.
    fn reply(&self, phase: Phase, due: Status) -> Result<Reply, TransferError> {
        let mut bytes = [0; REPLY_BYTES];
        self.line().recv_exact(&mut bytes).map_err(|error| broken(error, phase))?;
        let reply = Reply::decode(&bytes)?;
        let expected = self.peer.1;
        match reply.status {
            status if status == due => {}
            Status::Success | Status::Ready => return Err(WireError::OutOfPlace { status: reply.status }.into()),
            Status::EpochMismatch => return Err(TransferError::EpochMismatch { expected, actual: reply.epoch }),
            status => return Err(TransferError::Refused { status }),
        }
        if reply.epoch != expected {
            return Err(WireError::ForeignEpoch { actual: reply.epoch }.into());
        }
        Ok(reply)
    }

    /// The end of an operation with a body: from the first attempt to send it, only a final success tells what happened.
    fn acknowledged(self, sent: Result<(), TransferError>) -> Result<(), Failure> {
        let unknown = |error| Failure::with(error, RemoteEffect::Unknown);
        sent.map_err(unknown)?;
        let reply = self.reply(Phase::Acknowledgement, Status::Success).map_err(unknown)?;
        if reply.length != 0 {
            return Err(unknown(WireError::NotZero { field: "length", found: reply.length }.into()));
        }
        self.keep();
        Ok(())
    }

    /// Nothing is owed on the connection.
    fn keep(self) {
        self.path.pool.put(self.peer.0, self.peer.1, self.stream);
    }
}
