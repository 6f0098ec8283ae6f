//! Every number of bulk memory in one place.

use std::time::Duration;

/// How bulk memory is moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BulkConfig {
    /// Bytes of one READ or WRITE: 4 KiB to 1 GiB, default 512 KiB; never more than the port's longest message. Smaller
    /// chunks cost completions, larger ones make a cancel, and another transfer's turn, wait longer.
    pub chunk_bytes: u32,
    /// READs that each side offers to do and to answer at once, per connection: 1 to 255, default 16; never more than the
    /// device does. The smaller of both sides' numbers is used, and is the window of a GET. 1 pays a round trip a chunk.
    pub rd_atomic_max: u8,
    /// Send WRs of a bulk QP: 16 to 16,384, default 63. What READs leave of them bounds the WRITEs posted at once.
    pub send_wrs: u32,
    /// Bytes posted at once on one connection: 4 KiB and more, default 16 MiB. One chunk is posted in any case.
    pub in_flight_max_bytes: u64,
    /// Notifications that a peer may have under way to this side: 1 to 1,024, default 32. Further ones wait at the peer
    /// until the application has taken some.
    pub notify_window: u16,
    /// Completions that the bulk CQ holds, default 8,191: each connection needs `send_wrs` + `notify_window` + 8 of them, and
    /// one that does not fit is refused.
    pub cq_depth: u32,
    /// Transfers that are under way or wait, to all peers: 1 to 1,000,000, default 1,024. Further ones wait in their
    /// futures.
    pub transfers_max: usize,
    /// Longest life of a transfer, unless it says otherwise: 10 ms to 1 day, default 5 min.
    pub deadline: Duration,
    /// A connection with work requests posted of which none completes for so long is given up: 100 ms to 1 h, default 10 s.
    /// Above the QP's own retries (about 2 s), which report a dead peer by themselves; this is for QPs that hang.
    pub stall_deadline: Duration,
    /// How long the flush of an ended connection may take before its QP is destroyed regardless: 10 ms to 10 s, default
    /// 1 s.
    pub flush_deadline: Duration,
    /// A connection over which neither side has moved anything for so long is closed, if both sides could dial it again:
    /// 100 ms to 1 day, default 60 s; 0: never. The next transfer makes a new one, and pays its set-up.
    pub idle_close: Duration,
}

impl Default for BulkConfig {
    fn default() -> Self {
        Self {
            chunk_bytes: 512 << 10,
            rd_atomic_max: 16,
            send_wrs: 63,
            in_flight_max_bytes: 16 << 20,
            notify_window: 32,
            cq_depth: 8191,
            transfers_max: 1024,
            deadline: Duration::from_secs(300),
            stall_deadline: Duration::from_secs(10),
            flush_deadline: Duration::from_secs(1),
            idle_close: Duration::from_secs(60),
        }
    }
}

/// A number out of its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}, but must be within {min} and {max}")]
pub struct BulkConfigError {
    /// The field, as it is written in [`BulkConfig`].
    pub field: &'static str,
    /// What stands there.
    pub value: u64,
    /// The smallest allowed, in the field's unit (times in milliseconds).
    pub min: u64,
    /// The largest allowed.
    pub max: u64,
}

impl BulkConfig {
    /// Checks every range.
    ///
    /// # Errors
    ///
    /// The first field that is out of its range.
    pub fn validate(&self) -> Result<(), BulkConfigError> {
        range("chunk_bytes", self.chunk_bytes.into(), 4 << 10, 1 << 30)?;
        range("rd_atomic_max", self.rd_atomic_max.into(), 1, 255)?;
        range("send_wrs", self.send_wrs.into(), 16, 16_384)?;
        range("in_flight_max_bytes", self.in_flight_max_bytes, 4 << 10, u64::MAX)?;
        range("notify_window", self.notify_window.into(), 1, NOTIFY_WINDOW_MAX.into())?;
        range("cq_depth", self.cq_depth.into(), 1, u32::MAX.into())?;
        range("transfers_max", self.transfers_max as u64, 1, 1_000_000)?;
        millis("deadline in ms", self.deadline, 10, 86_400_000)?;
        millis("stall_deadline in ms", self.stall_deadline, 100, 3_600_000)?;
        millis("flush_deadline in ms", self.flush_deadline, 10, 10_000)?;
        if self.idle_close.is_zero() { Ok(()) } else { millis("idle_close in ms", self.idle_close, 100, 86_400_000) }
    }

    /// Receives of a bulk QP: those for notifications, and those for control.
    pub(crate) fn recv_wrs(&self) -> u32 {
        u32::from(self.notify_window) + CONTROL_WRS
    }
}

fn range(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), BulkConfigError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(BulkConfigError { field, value, min, max }) }
}

fn millis(field: &'static str, value: Duration, min: u64, max: u64) -> Result<(), BulkConfigError> {
    range(field, u64::try_from(value.as_millis()).unwrap_or(u64::MAX), min, max)
}

/// The most notifications that one side may let the other have under way.
pub(crate) const NOTIFY_WINDOW_MAX: u16 = 1024;

/// Work requests and receives kept for control: a probe each way; grants, of which at most three are under way since each
/// carries half a window (or one credit of a window of 1); a question whether to close, and the answer.
pub(crate) const CONTROL_WRS: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_each_number_out_of_range_is_named() {
        type Spoil = fn(&mut BulkConfig);
        assert_eq!(BulkConfig::default().validate(), Ok(()));
        let cases: [(&str, Spoil); 11] = [
            ("chunk_bytes", |c| c.chunk_bytes = 4095),
            ("rd_atomic_max", |c| c.rd_atomic_max = 0),
            ("send_wrs", |c| c.send_wrs = 15),
            ("in_flight_max_bytes", |c| c.in_flight_max_bytes = 1),
            ("notify_window", |c| c.notify_window = 1025),
            ("cq_depth", |c| c.cq_depth = 0),
            ("transfers_max", |c| c.transfers_max = 0),
            ("deadline in ms", |c| c.deadline = Duration::ZERO),
            ("stall_deadline in ms", |c| c.stall_deadline = Duration::from_millis(99)),
            ("flush_deadline in ms", |c| c.flush_deadline = Duration::from_secs(11)),
            ("idle_close in ms", |c| c.idle_close = Duration::from_millis(99)),
        ];
        for (field, spoil) in cases {
            let mut config = BulkConfig::default();
            spoil(&mut config);
            assert_eq!(config.validate().expect_err(field).field, field);
        }
    }
}
