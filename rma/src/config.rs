//! Every number of the rendezvous in one place.

use std::time::Duration;

use crate::proto::{book::BookLimits, lease::LeaseTimes, slice::ArenaLimits};

/// How payloads are staged, leased and pulled. [`RendezvousConfig::default`] suits hosts with some GiB to spare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RendezvousConfig {
    /// How long a lease lasts: 100 ms to 1 h, default 30 s. Transfers renew theirs; too short costs renewals, too long
    /// keeps the memory of a dead consumer.
    pub lease: Duration,
    /// How much later the owner ends what its consumer did not end: 10 ms to 10 min, default 5 s. It covers clocks that
    /// run apart by up to grace ÷ (lease + grace), and must be above the 3 to 4 s in which a dead peer is noticed, or
    /// the reaper does that work twice.
    pub lease_grace: Duration,
    /// In this last part of its lease a consumer posts nothing more: 0 to half of `lease`, default 5 s (at most a quarter
    /// of what the owner gave). It must be longer than what is posted takes to end, or a bulk QP is torn down for it.
    pub lease_margin: Duration,
    /// How often overdue leases and slots are looked for: 10 ms to 1 min, default 1 s; nothing runs while there are none.
    pub reaper_tick: Duration,
    /// Leases at once of one peer: 1 to 1,000,000, default 1,024. Bounds what a peer can make this side remember.
    pub leases_per_peer: u32,
    /// READ leases at once, of all peers: 0 to 1,000,000, default 1,024. Each takes one of the device's registrations.
    pub read_leases: usize,
    /// Largest chunk in bytes: 512 B to 16 MiB, default 512 KiB; less where either side's largest frame is less.
    pub chunk_bytes: u32,
    /// Chunks asked for at once of one peer: 1 to 64, default 8. Fewer idle the wire, more hold memory at both sides.
    pub pull_window: usize,
    /// Chunks that one peer may ask for at once before it is refused: 1 to 1,024, default 64.
    pub pulls_per_peer: usize,
    /// For the answer to one request: 10 ms to 10 min, default 5 s. A connection that ends fails it at once.
    pub request_deadline: Duration,
    /// Largest payload in bytes that is staged by `send`, or taken from a peer: 1 KiB to 2^40, default 1 GiB.
    pub payload_max_bytes: u64,
    /// `send` stages payloads above this and lets the receiver pull them: 1 KiB to 1 GiB, default 256 KiB.
    pub eager_max_bytes: usize,
    /// How long a payload that `send` staged waits for its receiver: 1 s to 1 day, default 5 min.
    pub staged_ttl: Duration,
    /// How long it waits after the connection to its receiver ended, for the receiver to come back: 0 to 1 h, default
    /// 30 s.
    pub staged_ttl_after_end: Duration,
    /// Payloads of one stream that are pulled at once: 1 to 64, default 4. What follows an unfinished one waits for it.
    pub pulls_ahead: usize,
    /// Bytes of a new arena: 64 KiB to 16 GiB, a power of two, default 64 MiB. Mapped and touched at first use.
    pub arena_bytes: u64,
    /// Bytes of all arenas of payloads to be read: 0 (everything goes by chunks) to 2^44, default 1 GiB.
    pub source_max_bytes: u64,
    /// Bytes of all arenas that READs land in: 0 to 2^44, default 256 MiB.
    pub destination_max_bytes: u64,
    /// READs of so many bytes or more land in memory of their own that is registered for them, smaller ones in an arena,
    /// from where they are copied: 4 KiB and more, default 2 MiB. Below, a registration costs more than the copy.
    pub in_place_from_bytes: usize,
    /// Arenas of each kind: 1 to 4,096, default 64.
    pub arenas_max: usize,
    /// How long an empty arena is kept, but for the last one: 1 s and more, default 60 s.
    pub arena_idle: Duration,
    /// Whether payloads may go by RDMA READ: default yes. No: everything goes by chunks, counted as `disabled`.
    pub reads: bool,
}

impl Default for RendezvousConfig {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            lease_grace: Duration::from_secs(5),
            lease_margin: Duration::from_secs(5),
            reaper_tick: Duration::from_secs(1),
            leases_per_peer: 1024,
            read_leases: 1024,
            chunk_bytes: 512 << 10,
            pull_window: 8,
            pulls_per_peer: 64,
            request_deadline: Duration::from_secs(5),
            payload_max_bytes: 1 << 30,
            eager_max_bytes: 256 << 10,
            staged_ttl: Duration::from_secs(300),
            staged_ttl_after_end: Duration::from_secs(30),
            pulls_ahead: 4,
            arena_bytes: 64 << 20,
            source_max_bytes: 1 << 30,
            destination_max_bytes: 256 << 20,
            in_place_from_bytes: 2 << 20,
            arenas_max: 64,
            arena_idle: Duration::from_secs(60),
            reads: true,
        }
    }
}

/// A number out of its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousConfigError {
    /// One field by itself.
    #[error("{field} is {value}, but must be within {min} and {max}")]
    OutOfRange {
        /// The field, as it is written in [`RendezvousConfig`].
        field: &'static str,
        /// What stands there.
        value: u64,
        /// The smallest allowed, in the field's unit (times in milliseconds).
        min: u64,
        /// The largest allowed.
        max: u64,
    },
    /// Arenas are cut in halves.
    #[error("arena_bytes is {bytes}, which is no power of two")]
    NotPowerOfTwo {
        /// What stands there.
        bytes: u64,
    },
    /// The margin leaves nothing of the lease.
    #[error("lease_margin is {margin:?}, more than half of the lease of {lease:?}")]
    Margin {
        /// What stands there.
        margin: Duration,
        /// The lease.
        lease: Duration,
    },
}

impl RendezvousConfig {
    /// Checks every range.
    ///
    /// # Errors
    ///
    /// The first field that is out of its range.
    pub fn validate(&self) -> Result<(), RendezvousConfigError> {
        millis("lease in ms", self.lease, 100, 3_600_000)?;
        millis("lease_grace in ms", self.lease_grace, 10, 600_000)?;
        millis("reaper_tick in ms", self.reaper_tick, 10, 60_000)?;
        range("leases_per_peer", self.leases_per_peer.into(), 1, 1_000_000)?;
        range("read_leases", self.read_leases as u64, 0, 1_000_000)?;
        range("chunk_bytes", self.chunk_bytes.into(), 512, 16 << 20)?;
        range("pull_window", self.pull_window as u64, 1, 64)?;
        range("pulls_per_peer", self.pulls_per_peer as u64, 1, 1024)?;
        millis("request_deadline in ms", self.request_deadline, 10, 600_000)?;
        range("payload_max_bytes", self.payload_max_bytes, 1 << 10, 1 << 40)?;
        range("eager_max_bytes", self.eager_max_bytes as u64, 1 << 10, 1 << 30)?;
        millis("staged_ttl in ms", self.staged_ttl, 1_000, 86_400_000)?;
        millis("staged_ttl_after_end in ms", self.staged_ttl_after_end, 0, 3_600_000)?;
        range("pulls_ahead", self.pulls_ahead as u64, 1, 64)?;
        range("arena_bytes", self.arena_bytes, 64 << 10, 16 << 30)?;
        range("source_max_bytes", self.source_max_bytes, 0, 1 << 44)?;
        range("destination_max_bytes", self.destination_max_bytes, 0, 1 << 44)?;
        range("in_place_from_bytes", self.in_place_from_bytes as u64, 4 << 10, u64::MAX)?;
        range("arenas_max", self.arenas_max as u64, 1, 4096)?;
        millis("arena_idle in ms", self.arena_idle, 1_000, u64::MAX)?;
        if !self.arena_bytes.is_power_of_two() {
            return Err(RendezvousConfigError::NotPowerOfTwo { bytes: self.arena_bytes });
        }
        if self.lease_margin > self.lease / 2 {
            return Err(RendezvousConfigError::Margin { margin: self.lease_margin, lease: self.lease });
        }
        Ok(())
    }

    pub(crate) const fn book_limits(&self) -> BookLimits {
        BookLimits {
            times: LeaseTimes { lasts: self.lease, grace: self.lease_grace },
            rights_max: self.read_leases,
            leases_per_peer: self.leases_per_peer,
            chunk_bytes: self.chunk_bytes,
        }
    }

    pub(crate) const fn arena_limits(&self, bytes_max: u64) -> ArenaLimits {
        ArenaLimits { arena_bytes: self.arena_bytes, bytes_max, arenas_max: self.arenas_max, idle: self.arena_idle }
    }
}

fn range(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), RendezvousConfigError> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(RendezvousConfigError::OutOfRange { field, value, min, max })
    }
}

fn millis(field: &'static str, value: Duration, min: u64, max: u64) -> Result<(), RendezvousConfigError> {
    range(field, u64::try_from(value.as_millis()).unwrap_or(u64::MAX), min, max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        assert_eq!(RendezvousConfig::default().validate(), Ok(()));
    }

    #[test]
    fn each_number_out_of_range_is_named() {
        type Case = (&'static str, fn(&mut RendezvousConfig));
        let cases: [Case; 8] = [
            ("lease in ms", |c| c.lease = Duration::from_millis(99)),
            ("lease_grace in ms", |c| c.lease_grace = Duration::ZERO),
            ("chunk_bytes", |c| c.chunk_bytes = 0),
            ("pull_window", |c| c.pull_window = 65),
            ("payload_max_bytes", |c| c.payload_max_bytes = 0),
            ("staged_ttl in ms", |c| c.staged_ttl = Duration::ZERO),
            ("arenas_max", |c| c.arenas_max = 0),
            ("read_leases", |c| c.read_leases = 1_000_001),
        ];
        for (name, spoil) in cases {
            let mut config = RendezvousConfig::default();
            spoil(&mut config);
            match config.validate() {
                Err(RendezvousConfigError::OutOfRange { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        let odd = RendezvousConfig { arena_bytes: 100_000, ..RendezvousConfig::default() };
        assert_eq!(odd.validate(), Err(RendezvousConfigError::NotPowerOfTwo { bytes: 100_000 }));
        let wide = RendezvousConfig { lease_margin: Duration::from_secs(16), ..RendezvousConfig::default() };
        assert!(matches!(wide.validate(), Err(RendezvousConfigError::Margin { .. })));
    }
}
