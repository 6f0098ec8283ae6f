//! What the source decides about a request, before a byte of its memory is touched.

use std::sync::Arc;

use super::{
    about::About,
    admission::{Admission, Admitted},
    wire::{Description, Opcode, Request, Status},
};
use crate::{
    Direction, Epoch, Profile, ServeDirect,
    memory::{Registration, Registry},
    notification::{Inbox, Reservation},
};

/// One engine as its peers see it.
pub(crate) struct Source {
    pub(crate) epoch: Epoch,
    pub(crate) registry: Registry,
    pub(crate) admission: Arc<Admission>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) max_payload_bytes: u64,
    pub(crate) max_notification_bytes: u64,
    pub(crate) serve_direct: ServeDirect,
    /// Operations 4 to 7 can be carried out.
    pub(crate) has_device: bool,
    pub(crate) about: About,
}

/// An operation that was let in. It is counted as one inside until this is dropped.
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    pub(crate) inside: Admitted,
}

/// What to do. Whatever it needs is held from here on.
pub(crate) enum Kind {
    /// Answer with this payload.
    Describe(Vec<u8>),
    /// Answer with bytes of the range.
    Read(Access),
    /// Say ready, take the body, commit it.
    Write(Access),
    /// Grant the range to a device, once; or to several, each its part.
    Rdma { direction: Direction, sliced: bool, access: Access },
    /// Say ready, take the body, enqueue it.
    Notify { room: Reservation, name_bytes: usize, message_bytes: usize },
}

/// Bytes of a range, checked, and held whatever is unregistered meanwhile.
pub(crate) struct Access {
    pub(crate) registration: Arc<Registration>,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) profile: Profile,
}

impl Access {
    /// Offset and length in the range.
    pub(crate) fn place(&self) -> (u64, u64) {
        (self.offset, self.length)
    }
}

impl Source {
    /// Framing and version were checked by the decoder; then closed, epoch, region, permission, profile, range, budget. The
    /// first that fails is the answer.
    pub(crate) fn admit(&self, request: &Request) -> Result<Operation, Status> {
        let inside = self.admission.enter().ok_or(Status::SourceClosed)?;
        if request.epoch != self.epoch {
            return Err(Status::EpochMismatch);
        }
        let kind = match request.opcode {
            Opcode::Describe => Kind::Describe(self.describe().encode()),
            Opcode::Read => Kind::Read(self.access(request)?),
            Opcode::Write => Kind::Write(self.access(request)?),
            Opcode::Notify => self.notify(request)?,
            Opcode::RdmaRead | Opcode::RdmaWrite | Opcode::SlicedRdmaRead | Opcode::SlicedRdmaWrite => {
                if !self.has_device {
                    return Err(Status::BackendUnavailable);
                }
                let write = matches!(request.opcode, Opcode::RdmaWrite | Opcode::SlicedRdmaWrite);
                let direction = if write { Direction::Write } else { Direction::Read };
                Kind::Rdma { direction, sliced: request.opcode.is_sliced(), access: self.access(request)? }
            }
        };
        Ok(Operation { kind, inside })
    }

    /// What it exports now.
    pub(crate) fn describe(&self) -> Description {
        Description { regions: self.registry.describe(), about: self.about.clone() }
    }

    fn access(&self, request: &Request) -> Result<Access, Status> {
        let registration = self.registry.find(request.region).ok_or(Status::UnknownRegion)?;
        let permission = registration.permission;
        let (allowed, direct) = match request.opcode {
            Opcode::Write | Opcode::RdmaWrite => {
                (permission.allows_write(), matches!(self.serve_direct, ServeDirect::All))
            }
            // Over several pairs bytes always go by way of staging.
            Opcode::SlicedRdmaWrite => (permission.allows_write(), false),
            Opcode::SlicedRdmaRead => (permission.allows_read(), false),
            _ => (permission.allows_read(), matches!(self.serve_direct, ServeDirect::Reads | ServeDirect::All)),
        };
        if !allowed {
            return Err(Status::PermissionDenied);
        }
        if request.profile == Profile::Direct && !direct {
            return Err(Status::DirectRefused);
        }
        let end = request.offset.checked_add(request.length);
        end.filter(|end| *end <= registration.span.length).ok_or(Status::InvalidRange)?;
        // A device grants a byte at least; over TCP nothing is moved as well as something.
        if request.length == 0 && request.opcode.has_ask() {
            return Err(Status::InvalidRange);
        }
        if request.length > self.max_payload_bytes {
            return Err(Status::Exhausted);
        }
        let Request { offset, length, profile, .. } = *request;
        Ok(Access { registration, offset, length, profile })
    }

    fn notify(&self, request: &Request) -> Result<Kind, Status> {
        let (name, message) = (request.offset, request.length);
        let bytes = name.checked_add(message).filter(|bytes| *bytes <= self.max_notification_bytes);
        let bytes = bytes.ok_or(Status::Exhausted)?;
        let size = |bytes| usize::try_from(bytes).map_err(|_| Status::Exhausted);
        let (name_bytes, message_bytes) = (size(name)?, size(message)?);
        let room = self.inbox.reserve(bytes).map_err(|_| Status::Exhausted)?;
        Ok(Kind::Notify { room, name_bytes, message_bytes })
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
