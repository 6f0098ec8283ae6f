//! The numbers of operations over RDMA.

use std::time::Duration;

use crate::ConfigError;

/// How an engine with several devices chooses among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RailChoice {
    /// By what is in flight over each, the bandwidth that each was seen to have, and the distance to the peer's.
    #[default]
    Score,
    /// In turn, among the nearest: what everything else is compared with.
    RoundRobin,
}

/// What operations over RDMA may take, beside the budgets of [`Config`](crate::Config). Fixed for the engine's life.
#[derive(Clone, Debug)]
pub struct RdmaConfig {
    /// Pairs of QPs of each device, as source and as requester together, kept ones and such as are being destroyed included: 1 to
    /// 1,024, default 64. Each takes a QP of 31 send WRs (8 to 40 KiB in most devices) and 68 completions of the CQ.
    /// One more is refused, or goes over TCP.
    pub max_connections: u32,
    /// Grants at once: operations of peers over RDMA that this source serves: 1 to 4,096, default 32.
    pub max_grants: u32,
    /// Their bytes: 1 to 2^63 - 1, default 64 MiB. The source stages that many, but for direct ones.
    pub max_grant_bytes: u64,
    /// Staging memory kept for the next payload, in bytes, by the source and by the requester each: 0 to 2^63 - 1,
    /// default 32 MiB. The requester's stays registered, and so pinned. 0 maps and registers anew each time.
    pub kept_staging_bytes: u64,
    /// One READ or WRITE, in bytes: 4 KiB to 8 MiB, default 512 KiB. Smaller ones cost more work requests; larger ones
    /// are torn down later when an operation ends early.
    pub chunk_bytes: u32,
    /// Of them in flight at once, at most, if both ports take as many: 1 to 16, default 16.
    pub window: u32,
    /// Wait for an acknowledgement: 4.096 µs × 2^code, 1 to 31, default 16 (268 ms, the least that ConnectX-5 and later
    /// honour).
    pub ack_timeout_code: u8,
    /// Retries without an answer: 0 to 6, default 6. With the timeout: a dead peer is noticed after 1.9 s.
    pub retry_cnt: u8,
    /// A pair of QPs with work requests posted of which none completes for so long is given up, and the request goes on to
    /// the next pair if it cannot have had an effect: 100 ms to 300 s, default 10 s. It is for devices that hang without a
    /// word, as Soft-RoCE does now and then when its port goes down; those that work fail within their retries.
    pub stall_deadline: Duration,
    /// The NUMA node that the engine's memory and threads are on: default `None`, unknown. Devices of another node are
    /// taken for farther away, where their hosts tell their node.
    pub numa_node: Option<u16>,
    /// Which of several devices an operation goes over. Default: by score.
    pub rail_choice: RailChoice,
    /// Whether a large request of this engine's own goes over several pairs of devices at once, where there are two or
    /// more: READs of 2,048,000 bytes and more, WRITEs of 999,424 bytes and more. Default: yes. It has no bearing on what
    /// the source serves. Beware that such a request takes a grant, and a connection, of each pair.
    pub spread: bool,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        Self {
            max_connections: 64,
            max_grants: 32,
            max_grant_bytes: 64 << 20,
            kept_staging_bytes: 32 << 20,
            chunk_bytes: 512 << 10,
            window: 16,
            ack_timeout_code: 16,
            retry_cnt: 6,
            stall_deadline: Duration::from_secs(10),
            numa_node: None,
            rail_choice: RailChoice::Score,
            spread: true,
        }
    }
}

impl RdmaConfig {
    /// Checks every range.
    ///
    /// # Errors
    ///
    /// The first field that is out of its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        const ANY: u64 = i64::MAX as u64;
        let fields = [
            ("max_connections", u64::from(self.max_connections), 1, 1024),
            ("max_grants", u64::from(self.max_grants), 1, 4096),
            ("max_grant_bytes", self.max_grant_bytes, 1, ANY),
            ("kept_staging_bytes", self.kept_staging_bytes, 0, ANY),
            ("chunk_bytes", u64::from(self.chunk_bytes), 4096, 8 << 20),
            ("window", u64::from(self.window), 1, 16),
            ("ack_timeout_code", u64::from(self.ack_timeout_code), 1, 31),
            ("retry_cnt", u64::from(self.retry_cnt), 0, 6),
            ("stall_deadline in ms", u64::try_from(self.stall_deadline.as_millis()).unwrap_or(u64::MAX), 100, 300_000),
        ];
        match fields.into_iter().find(|(_, value, min, max)| !(min..=max).contains(&value)) {
            Some((field, value, min, max)) => Err(ConfigError::Range { field, value, min, max }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_held_at_both_ends() {
        type Set = fn(&mut RdmaConfig, u64);
        let any = i64::MAX.unsigned_abs();
        let cases: [(&str, Set, u64, u64); 9] = [
            ("stall_deadline in ms", |c, v| c.stall_deadline = Duration::from_millis(v), 100, 300_000),
            ("max_connections", |c, v| c.max_connections = u32::try_from(v).expect("fits"), 1, 1024),
            ("max_grants", |c, v| c.max_grants = u32::try_from(v).expect("fits"), 1, 4096),
            ("max_grant_bytes", |c, v| c.max_grant_bytes = v, 1, any),
            ("kept_staging_bytes", |c, v| c.kept_staging_bytes = v, 0, any),
            ("chunk_bytes", |c, v| c.chunk_bytes = u32::try_from(v).expect("fits"), 4096, 8 << 20),
            ("window", |c, v| c.window = u32::try_from(v).expect("fits"), 1, 16),
            ("ack_timeout_code", |c, v| c.ack_timeout_code = u8::try_from(v).expect("fits"), 1, 31),
            ("retry_cnt", |c, v| c.retry_cnt = u8::try_from(v).expect("fits"), 0, 6),
        ];
        for (name, set, low, high) in cases {
            let check = |value| {
                let mut config = RdmaConfig::default();
                set(&mut config, value);
                config.validate()
            };
            assert_eq!((check(low), check(high)), (Ok(()), Ok(())), "{name}");
            let outside = [low.checked_sub(1), high.checked_add(1)].into_iter().flatten();
            for value in outside {
                assert!(
                    matches!(check(value), Err(ConfigError::Range { field, .. }) if field == name),
                    "{name} {value}"
                );
            }
        }
    }
}
