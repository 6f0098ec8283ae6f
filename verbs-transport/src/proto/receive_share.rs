//! How the receives of one SRQ are shared between peers.
//!
//! Sum over connections of (window + control reserve), plus the slabs that are polled or waiting to be posted again,
//! never exceeds the SRQ's depth: so no SEND ever finds the SRQ empty.

use super::credit::{CONTROL_RESERVE, WINDOW_MIN};
use crate::fabric::{POLL_BATCH, POST_BATCH};

/// Slabs that may be out of the SRQ at any time without any peer's credits being spent on them: one poll batch, and
/// one batch waiting to be posted again.
pub const SLABS_IN_HAND: u32 = 80;

const _: () = assert!(SLABS_IN_HAND as usize == POLL_BATCH + POST_BATCH);

/// The SRQ's shares. Invariant: `promised <= depth - SLABS_IN_HAND`.
#[derive(Debug)]
pub struct ReceiveShares {
    depth: u32,
    promised: u32,
    connections: u32,
}

/// No window of at least [`WINDOW_MIN`] is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the SRQ's {depth} receives are promised to {connections} connections ({promised} receives, {SLABS_IN_HAND} in \
     hand): raise `receive_slabs` or lower `window_slabs`"
)]
pub struct SharesExhausted {
    /// The SRQ's depth.
    pub depth: u32,
    /// Receives promised.
    pub promised: u32,
    /// To so many connections.
    pub connections: u32,
}

impl ReceiveShares {
    /// For an SRQ of `depth` receives.
    pub const fn new(depth: u32) -> Self {
        Self { depth, promised: 0, connections: 0 }
    }

    /// A window for one more connection: `wanted` if that fits, else what is left, at least [`WINDOW_MIN`].
    ///
    /// # Errors
    ///
    /// [`SharesExhausted`].
    pub fn grant(&mut self, wanted: u16) -> Result<u16, SharesExhausted> {
        let free = self.depth.saturating_sub(SLABS_IN_HAND + self.promised);
        let left = free.saturating_sub(u32::from(CONTROL_RESERVE));
        let window = u16::try_from(left).unwrap_or(u16::MAX).min(wanted);
        if window < WINDOW_MIN {
            return Err(SharesExhausted { depth: self.depth, promised: self.promised, connections: self.connections });
        }
        self.promised += u32::from(window + CONTROL_RESERVE);
        self.connections += 1;
        Ok(window)
    }

    /// The connection with this window is gone: its QP can take no receive any more.
    pub fn release(&mut self, window: u16) {
        debug_assert!(self.connections > 0, "a share is released once");
        self.promised = self.promised.saturating_sub(u32::from(window + CONTROL_RESERVE));
        self.connections = self.connections.saturating_sub(1);
    }

    /// Receives promised now.
    pub const fn promised(&self) -> u32 {
        self.promised
    }

    /// Connections that hold a share.
    pub const fn connections(&self) -> u32 {
        self.connections
    }
}

/// Connections of a full window that an SRQ of `depth` receives carries.
pub const fn full_windows(depth: u32, window: u16) -> u32 {
    depth.saturating_sub(SLABS_IN_HAND) / (window as u32 + CONTROL_RESERVE as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_peer_gets_a_smaller_window_and_the_next_is_refused() {
        let mut shares = ReceiveShares::new(SLABS_IN_HAND + 70 + 20);
        assert_eq!(shares.grant(64), Ok(64));
        assert_eq!(shares.grant(64), Ok(14));
        let error = shares.grant(64).unwrap_err();
        assert_eq!(error, SharesExhausted { depth: 170, promised: 90, connections: 2 });
        shares.release(64);
        assert_eq!(shares.grant(64), Ok(64));
    }

    /// DESIGN's sum: 4,096 receives carry 57 full windows and the rest of one.
    #[test]
    fn the_default_srq_carries_57_full_windows() {
        assert_eq!(full_windows(4096, 64), 57);
        let mut shares = ReceiveShares::new(4096);
        let windows: Vec<u16> = std::iter::from_fn(|| shares.grant(64).ok()).collect();
        assert_eq!(windows.len(), 58);
        assert_eq!(windows[57], 20);
        assert!(shares.promised() + SLABS_IN_HAND <= 4096);
    }
}
