//! How a payload leaves registered memory, and how it gets there.
//!
//! This is the staged profile; `direct` is the other. Memory is touched only under its allocation's lock, and nothing
//! waits for a peer while that is held. Both ways spare part of the copy that this would seem to need; what they spare
//! grows with the socket buffers.

use std::sync::Arc;

use super::{
    line::{Line, LineError},
    staging::{Staging, StagingPool},
};
use crate::memory::Registration;

/// Bytes of a range: offset and length.
type Place = (u64, u64);

/// Copied at a time while the front of a payload goes out.
const STEP_BYTES: usize = 256 << 10;

/// Sends `head` and then `length` bytes of the range as they are at one moment. `accepted` counts what the kernel took.
///
/// Under the lock the front goes straight from the range into the socket for as long as there is room; meanwhile the
/// rest is copied aside, from its end, until the two meet.
pub(super) fn send(
    line: Line<'_>,
    pool: &Arc<StagingPool>,
    head: &[u8],
    (registration, place): (&Registration, Place),
    accepted: &mut usize,
) -> Result<(), LineError> {
    let mut head_sent = 0;
    let rest = registration.read(place, line.patience(), |bytes| {
        let mut aside: Option<Staging> = None;
        // Bytes below `front` are sent, those from `back` on are copied.
        let (mut front, mut back) = (0, bytes.len());
        loop {
            let count = line.try_send(&head[head_sent..], &bytes[front..back])?;
            let of_head = count.min(head.len() - head_sent);
            head_sent += of_head;
            front += count - of_head;
            *accepted += count;
            if front == back {
                return Ok::<_, LineError>((front, aside));
            }
            let step = back.saturating_sub(STEP_BYTES).max(front);
            aside.get_or_insert_with(|| pool.take(bytes.len()))[step..back].copy_from_slice(&bytes[step..back]);
            back = step;
        }
    });
    let (front, aside) = rest??;
    line.send_all(&head[head_sent..], accepted)?;
    aside.map_or(Ok(()), |aside| line.send_all(&aside[front..], accepted))
}

/// Receives `length` bytes and puts them into the range once all are there; before that it is as it was.
///
/// "There" may be the socket's buffer: what has piled up in it when the last byte arrives is read straight into the
/// range.
pub(super) fn receive(
    line: Line<'_>,
    pool: &Arc<StagingPool>,
    (registration, place): (&Registration, Place),
) -> Result<(), LineError> {
    let total = usize::try_from(place.1).expect("the source or the plan has checked the length");
    // The announced length at once, so that nothing grows while bytes arrive.
    let mut staging = pool.take(total);
    let mut staged = 0;
    while line.available()? < total - staged {
        staged += line.recv_some(&mut staging[staged..])?;
    }
    let landed = registration.write(place, line.patience(), |bytes| {
        let (front, mut back) = bytes.split_at_mut(staged);
        front.copy_from_slice(&staging[..staged]);
        while !back.is_empty() {
            // The kernel has said that all of it is there, so this cannot block; were it to, waiting here would hold the
            // lock for a peer.
            let count = line.try_recv(back)?.ok_or(LineError::TimedOut)?;
            back = &mut back[count..];
        }
        Ok(())
    });
    landed?
}
