//! How large the buffers of a socket are to be.

use std::{fs, io};

use socket2::Socket;

/// Sizes that are set before a socket listens or connects; `None` leaves one to the kernel's own tuning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Buffers {
    send: Option<usize>,
    receive: Option<usize>,
}

impl Buffers {
    /// What the configuration says, or else the larger of what the kernel would come to and what it lets us ask for: a
    /// payload that fits in the send buffer leaves straight from registered memory. The receive buffer is not bounded by
    /// what may be asked for when the kernel tunes it, so it is left alone.
    pub(crate) fn choose(configured: Option<usize>, max_payload_bytes: u64) -> Self {
        if configured.is_some() {
            return Self { send: configured, receive: configured };
        }
        let number = |path: &str| {
            let text = fs::read_to_string(path).ok()?;
            text.split_whitespace().last()?.parse().ok()
        };
        // Of the second file the last of three numbers: where tuning ends.
        let (asked_most, tuned_most) = (number("/proc/sys/net/core/wmem_max"), number("/proc/sys/net/ipv4/tcp_wmem"));
        let send = asked_most.zip(tuned_most).and_then(|(asked, tuned)| send_bytes(max_payload_bytes, asked, tuned));
        Self { send: send.and_then(|bytes| usize::try_from(bytes).ok()), receive: None }
    }

    pub(super) fn apply(self, socket: &Socket) -> io::Result<()> {
        if let Some(bytes) = self.send {
            socket.set_send_buffer_size(bytes)?;
        }
        if let Some(bytes) = self.receive {
            socket.set_recv_buffer_size(bytes)?;
        }
        Ok(())
    }
}

/// What to ask for so that a payload fits, if that gets us more than tuning would. The kernel doubles what is asked for,
/// and counts its own overhead, about a sixteenth.
fn send_bytes(payload: u64, asked_most: u64, tuned_most: u64) -> Option<u64> {
    let ask = u64::midpoint(payload, payload / 16).min(asked_most);
    (2 * ask > tuned_most).then_some(ask)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_fixed_send_buffer_is_never_smaller_than_what_tuning_comes_to() {
        // The usual limits, as most systems have them: asking would get us 416 KiB instead of 4 MiB.
        assert_eq!(send_bytes(8 * MIB, 212_992, 4 * MIB), None);
        // Raised ones: nearly all of a payload, or all of it.
        assert_eq!(send_bytes(8 * MIB, 4 * MIB, 4 * MIB), Some(4 * MIB));
        assert_eq!(send_bytes(8 * MIB, 64 * MIB, 4 * MIB), Some(4 * MIB + MIB / 4));
        // Small payloads need no more than the kernel gives.
        assert_eq!(send_bytes(MIB, 64 * MIB, 4 * MIB), None);
    }

    #[test]
    fn what_is_configured_is_taken_for_both() {
        let both = Buffers { send: Some(65_536), receive: Some(65_536) };
        assert_eq!(Buffers::choose(Some(65_536), 8 * MIB), both);
        assert_eq!(Buffers::choose(None, 8 * MIB).receive, None);
    }
}
