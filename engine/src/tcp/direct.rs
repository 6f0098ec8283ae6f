//! The direct profile: bytes go straight between registered memory and the socket, which takes as long as the peer does.
//! The allocation's lock is not held for it; the bytes are lent, and others who want them wait.

use std::sync::Arc;

use super::line::{Line, LineError};
use crate::memory::{DirectRange, Registration, Use};

/// Borrows bytes (offset and length) of a range, once nobody else is at them.
pub(super) fn lend(
    line: Line<'_>,
    registration: &Arc<Registration>,
    place: (u64, u64),
    by: Use,
) -> Result<DirectRange, LineError> {
    Ok(registration.lend(place, by, line.patience())?)
}

/// Sends `head` and then the bytes. `accepted` counts what the kernel took.
pub(super) fn send(line: Line<'_>, head: &[u8], range: &DirectRange, accepted: &mut usize) -> Result<(), LineError> {
    // Together, as long as there is room: a frame of its own would be a packet of its own.
    let first = line.try_send(head, range.bytes())?;
    *accepted += first;
    let of_head = first.min(head.len());
    line.send_all(&head[of_head..], accepted)?;
    line.send_all(&range.bytes()[first - of_head..], accepted)
}

/// Receives the bytes. `received` counts what is there, whatever happens then.
pub(super) fn receive(line: Line<'_>, range: &mut DirectRange, received: &mut usize) -> Result<(), LineError> {
    let bytes = range.bytes_mut().ok_or(LineError::Io(std::io::ErrorKind::PermissionDenied.into()))?;
    while *received < bytes.len() {
        *received += line.recv_some(&mut bytes[*received..])?;
    }
    Ok(())
}
