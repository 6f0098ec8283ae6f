//! Every number of this crate in one place.

use std::{net::SocketAddr, time::Duration};

/// Budgets and limits of one engine. They are fixed for its life.
///
/// The defaults suit one service on a host with some gigabytes to share; `docs/engine.md` has the sums.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the source listens: default `127.0.0.1:0`, a free port that only this host reaches. Others reach an engine
    /// only at an address that is named here; `0.0.0.0` and `[::]` are refused, as no peer could dial them.
    ///
    /// The wire is neither encrypted nor authenticated: give it an address of a network that you trust.
    pub bind: SocketAddr,
    /// What peers are told that this engine is called, for people and logs; nothing is looked up by it: 0 to 255 bytes,
    /// default empty.
    pub name: String,
    /// What payloads of this engine's own submissions go over: default [`TransportPolicy::Auto`]. It has no bearing on
    /// what the source serves.
    pub transport: TransportPolicy,
    /// Ranges that are registered or still held by a handle or an operation: 1 to 4,096, default 1,024. An exact
    /// duplicate counts once, overlapping ranges each. Too few refuse registrations; each costs about 200 bytes here
    /// and 32 bytes in each peer's description.
    pub max_registrations: usize,
    /// Bytes of those ranges: 1 to 2^63 - 1, default 1 GiB. The engine allocates none of them.
    pub max_registered_bytes: u64,
    /// Requests of one submission, and ranges of one batch registration: 1 to 65,536, default 1,024.
    pub max_batch_requests: usize,
    /// Asynchronous batches that are allocated, detached ones that still work included: 1 to 4,096, default 32. Each
    /// may have one thread while it has work.
    pub max_async_batches: usize,
    /// Their capacities together, in tasks: 1 to 2^24, default 32,768. A task costs about 200 bytes.
    pub max_async_slots: usize,
    /// Submissions in flight: synchronous calls, asynchronous groups that run or wait, descriptions, explicit
    /// notifications: 1 to 65,536, default 32.
    pub max_submissions: usize,
    /// Their payloads, in bytes: 1 to 2^63 - 1, default 64 MiB. It bounds what one engine asks of the network at once.
    pub max_submission_bytes: u64,
    /// One request's payload in bytes, as a requester and as a source: 1 to 64 MiB, default 8 MiB. The source holds one
    /// such buffer for each of its workers.
    pub max_payload_bytes: u64,
    /// Threads that serve peers: 1 to 256, default 4.
    pub source_workers: usize,
    /// Connections with a request that wait for such a thread: 1 to 4,096, default 4. One more is told that the source
    /// is exhausted, and closed.
    pub source_queue: usize,
    /// From accept (or, on a kept connection, from the request's first byte) to the end of its handler, the wait for a
    /// thread included: 1 ms to 300 s, default 5 s. Peers that are slower lose their connection.
    pub source_timeout: Duration,
    /// Connections of peers, idle ones included: 1 to 65,536, default 256. Each costs a descriptor. When all are taken,
    /// the one that has been idle longest goes.
    pub max_source_connections: usize,
    /// An idle connection of a peer is closed after: 1 ms to 1 h, default 60 s. Keep it well above the peers'
    /// [`connection_idle`](Config::connection_idle).
    pub source_idle: Duration,
    /// Connections to peers that are kept for the next request: 0 to 4,096, default 32. 0 dials for each request. As many
    /// again may carry pairs of QPs, where there is a device.
    pub max_kept_connections: usize,
    /// A kept connection is not used again after: 1 ms to 1 h, default 20 s.
    pub connection_idle: Duration,
    /// What of the [direct](crate::Profile::Direct) profile the source serves: default [`ServeDirect::Never`]. It has no
    /// bearing on what this engine may ask of others.
    pub serve_direct: ServeDirect,
    /// Staging buffers kept for the next payload, in bytes: 0 to 2^63 - 1, default 48 MiB. 0 asks the system for fresh
    /// pages each time, which costs about as much as a copy.
    pub kept_staging_bytes: u64,
    /// `SO_SNDBUF` and `SO_RCVBUF`, set before listen and connect: 4 KiB to 1 GiB, cut to `net.core.wmem_max` and
    /// `rmem_max`. `None`, the default, leaves receiving to the kernel's own tuning, and fixes the send buffer only where
    /// `wmem_max` allows more than that tuning would come to (`net.ipv4.tcp_wmem`). A fixed size that is too small for
    /// rate times round trip is the limit of every transfer.
    pub socket_buffer_bytes: Option<usize>,
    /// Notifications in the inbox or on their way into it: 1 to 2^20, default 1,024. An empty one counts.
    pub max_notifications: usize,
    /// Their bytes: 1 to 2^32, default 1 MiB.
    pub max_inbox_bytes: u64,
    /// Name and message of one notification, in bytes, sent or received: 0 to 1 MiB, default 64 KiB.
    pub max_notification_bytes: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from(([127, 0, 0, 1], 0)),
            name: String::new(),
            transport: TransportPolicy::Auto,
            max_registrations: 1024,
            max_registered_bytes: 1 << 30,
            max_batch_requests: 1024,
            max_async_batches: 32,
            max_async_slots: 32_768,
            max_submissions: 32,
            max_submission_bytes: 64 << 20,
            max_payload_bytes: 8 << 20,
            source_workers: 4,
            source_queue: 4,
            source_timeout: Duration::from_secs(5),
            max_source_connections: 256,
            source_idle: Duration::from_secs(60),
            max_kept_connections: 32,
            connection_idle: Duration::from_secs(20),
            serve_direct: ServeDirect::Never,
            kept_staging_bytes: 48 << 20,
            socket_buffer_bytes: None,
            max_notifications: 1024,
            max_inbox_bytes: 1 << 20,
            max_notification_bytes: 64 << 10,
        }
    }
}

/// What payloads go over. It is decided for each request before it can have any effect, and reported in
/// [`BatchReport::transport`](crate::BatchReport::transport).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportPolicy {
    /// RDMA where both ends have a device and a path between them, else TCP. A request whose RDMA set-up fails goes over
    /// TCP as long as nothing was granted to it; behind a grant it fails.
    #[default]
    Auto,
    /// TCP, whatever there is.
    TcpOnly,
    /// RDMA, or the request fails. The engine needs a device.
    RdmaOnly,
}

/// What a source serves of the [direct](crate::Profile::Direct) profile. The owner of the memory decides it: while a direct
/// operation of a peer runs, [`source_timeout`](Config::source_timeout) at most, the owner waits for those bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServeDirect {
    /// Nothing: such requests are refused with [`Status::DirectRefused`](crate::Status::DirectRefused).
    #[default]
    Never,
    /// READs. Meanwhile whoever wants to change the bytes waits; they are still read as they are at one moment.
    Reads,
    /// WRITEs, too. Meanwhile whoever wants to touch the bytes waits; a peer that fails in the middle leaves them half
    /// changed.
    All,
}

/// What [`Config::validate`] refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A number out of its range.
    #[error("{field} is {value}, but must be within {min} and {max}")]
    Range {
        /// The field, as it is written in [`Config`].
        field: &'static str,
        /// What stands there.
        value: u64,
        /// The smallest allowed, in the field's unit (times in milliseconds).
        min: u64,
        /// The largest allowed.
        max: u64,
    },
    /// [`TransportPolicy::RdmaOnly`] without a device.
    #[error("transport is RdmaOnly, but the engine has no device: start it with one, or allow TCP")]
    NoDevice,
    /// An address that stands for any.
    #[error("bind is {bind}, which no peer can dial; name the address that the peers reach, or 127.0.0.1:0")]
    AnyAddress {
        /// What stands there.
        bind: SocketAddr,
    },
}

impl Config {
    /// Checks every range.
    ///
    /// # Errors
    ///
    /// The first field that is out of its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        const ANY: u64 = i64::MAX as u64;
        if self.bind.ip().is_unspecified() {
            return Err(ConfigError::AnyAddress { bind: self.bind });
        }
        count("max_registrations", self.max_registrations, 1, 4096)?;
        range("max_registered_bytes", self.max_registered_bytes, 1, ANY)?;
        count("max_batch_requests", self.max_batch_requests, 1, 65_536)?;
        count("max_async_batches", self.max_async_batches, 1, 4096)?;
        count("max_async_slots", self.max_async_slots, 1, 1 << 24)?;
        count("max_submissions", self.max_submissions, 1, 65_536)?;
        range("max_submission_bytes", self.max_submission_bytes, 1, ANY)?;
        range("max_payload_bytes", self.max_payload_bytes, 1, 64 << 20)?;
        count("source_workers", self.source_workers, 1, 256)?;
        count("source_queue", self.source_queue, 1, 4096)?;
        millis("source_timeout in ms", self.source_timeout, 1, 300_000)?;
        count("max_source_connections", self.max_source_connections, 1, 65_536)?;
        millis("source_idle in ms", self.source_idle, 1, 3_600_000)?;
        count("max_kept_connections", self.max_kept_connections, 0, 4096)?;
        millis("connection_idle in ms", self.connection_idle, 1, 3_600_000)?;
        range("kept_staging_bytes", self.kept_staging_bytes, 0, ANY)?;
        count("bytes of name", self.name.len(), 0, crate::control::NAME_BYTES_MAX as u64)?;
        if let Some(bytes) = self.socket_buffer_bytes {
            count("socket_buffer_bytes", bytes, 4096, 1 << 30)?;
        }
        count("max_notifications", self.max_notifications, 1, 1 << 20)?;
        range("max_inbox_bytes", self.max_inbox_bytes, 1, 1 << 32)?;
        range("max_notification_bytes", self.max_notification_bytes, 0, 1 << 20)
    }
}

/// Sub-millisecond rests count as a whole one: 300.0001 s is more than 300 s.
fn millis(field: &'static str, value: Duration, min: u64, max: u64) -> Result<(), ConfigError> {
    range(field, u64::try_from(value.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX), min, max)
}

fn count(field: &'static str, value: usize, min: u64, max: u64) -> Result<(), ConfigError> {
    range(field, value as u64, min, max)
}

fn range(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(ConfigError::Range { field, value, min, max }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_the_contract() {
        let config = Config::default();
        assert_eq!(config.validate(), Ok(()));
        // E-31 to E-40.
        assert_eq!((config.max_registrations, config.max_registered_bytes), (1024, 1 << 30));
        assert_eq!((config.max_batch_requests, config.max_async_batches, config.max_async_slots), (1024, 32, 32_768));
        assert_eq!((config.max_submissions, config.max_submission_bytes), (32, 64 << 20));
        assert_eq!((config.max_payload_bytes, config.source_workers, config.source_queue), (8 << 20, 4, 4));
        assert_eq!(config.source_timeout, Duration::from_secs(5));
        assert_eq!(
            (config.max_notifications, config.max_inbox_bytes, config.max_notification_bytes),
            (1024, 1 << 20, 64 << 10)
        );
        assert!(config.bind.ip().is_loopback());
    }

    #[test]
    fn each_number_is_held_at_both_ends() {
        type Set = fn(&mut Config, u64);
        fn size(value: u64) -> usize {
            usize::try_from(value).expect("64 bits")
        }
        let any = i64::MAX.unsigned_abs();
        let cases: [(&str, Set, u64, u64); 21] = [
            ("bytes of name", |c, v| c.name = "x".repeat(size(v)), 0, 255),
            ("max_registrations", |c, v| c.max_registrations = size(v), 1, 4096),
            ("max_registered_bytes", |c, v| c.max_registered_bytes = v, 1, any),
            ("max_batch_requests", |c, v| c.max_batch_requests = size(v), 1, 65_536),
            ("max_async_batches", |c, v| c.max_async_batches = size(v), 1, 4096),
            ("max_async_slots", |c, v| c.max_async_slots = size(v), 1, 1 << 24),
            ("max_submissions", |c, v| c.max_submissions = size(v), 1, 65_536),
            ("max_submission_bytes", |c, v| c.max_submission_bytes = v, 1, any),
            ("max_payload_bytes", |c, v| c.max_payload_bytes = v, 1, 64 << 20),
            ("source_workers", |c, v| c.source_workers = size(v), 1, 256),
            ("source_queue", |c, v| c.source_queue = size(v), 1, 4096),
            ("source_timeout in ms", |c, v| c.source_timeout = Duration::from_millis(v), 1, 300_000),
            ("max_source_connections", |c, v| c.max_source_connections = size(v), 1, 65_536),
            ("source_idle in ms", |c, v| c.source_idle = Duration::from_millis(v), 1, 3_600_000),
            ("max_kept_connections", |c, v| c.max_kept_connections = size(v), 0, 4096),
            ("connection_idle in ms", |c, v| c.connection_idle = Duration::from_millis(v), 1, 3_600_000),
            ("kept_staging_bytes", |c, v| c.kept_staging_bytes = v, 0, any),
            ("socket_buffer_bytes", |c, v| c.socket_buffer_bytes = Some(size(v)), 4096, 1 << 30),
            ("max_notifications", |c, v| c.max_notifications = size(v), 1, 1 << 20),
            ("max_inbox_bytes", |c, v| c.max_inbox_bytes = v, 1, 1 << 32),
            ("max_notification_bytes", |c, v| c.max_notification_bytes = v, 0, 1 << 20),
        ];
        for (name, set, low, high) in cases {
            let check = |value| {
                let mut config = Config::default();
                set(&mut config, value);
                config.validate()
            };
            assert_eq!((check(low), check(high)), (Ok(()), Ok(())), "{name}");
            let over = Err(ConfigError::Range { field: name, value: high + 1, min: low, max: high });
            assert_eq!(check(high + 1), over, "{name}");
            if low > 0 {
                assert!(check(low - 1).is_err(), "{name}");
            }
        }
        let odd = Config { source_timeout: Duration::from_nanos(300_000_000_001), ..Config::default() };
        assert!(odd.validate().is_err(), "a nanosecond above the limit");
    }

    #[test]
    fn an_address_that_stands_for_any_is_refused() {
        for text in ["0.0.0.0:7000", "[::]:0"] {
            let bind = text.parse().expect("an address");
            let error = Config { bind, ..Config::default() }.validate().expect_err(text);
            assert_eq!(error, ConfigError::AnyAddress { bind });
        }
    }
}
