//! Every number of this crate in one place.

use std::time::Duration;

use crate::auth::Secret;

/// Limits of the exchange. The defaults suit a cluster on one site.
#[derive(Clone, Debug)]
pub struct Config {
    /// One absolute limit for one exchange, TCP connect included: 10 ms to 60 s, default 5 s. Too short fails peers
    /// whose neighbour resolution takes its second; too long keeps senders waiting on a dead host.
    pub deadline: Duration,
    /// Exchanges that bring a QP up at once on the accepting side: 1 to 4,096, default 64. Each costs a QP in the
    /// making; too few make a mass restart slow.
    pub parallel_exchanges: usize,
    /// Connections that have not said a whole hello yet or wait for their turn: 1 to 65,536, default 640 (500 idle
    /// scanners and some room, below the usual 1,024 descriptors). Beyond it new ones are closed at once. Each costs
    /// a descriptor and about 4 KiB.
    pub max_pending: usize,
    /// What both sides must prove to know before any QP goes to RTR. `None`, the default: whoever reaches the port
    /// can connect.
    pub secret: Option<Secret>,
    /// The sockets.
    pub tcp: TcpConfig,
}

/// Socket options, given to [`TcpNet::new`](crate::TcpNet::new).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// `SO_RCVBUF` in bytes, set before listen and connect: 2,048 to 1 GiB, default 16 KiB. A frame is at most 4 KiB;
    /// more is wasted for each peer. `None` leaves it to the system.
    pub receive_buffer_bytes: Option<usize>,
    /// `SO_SNDBUF` in bytes, as above: default 16 KiB.
    pub send_buffer_bytes: Option<usize>,
    /// TCP keepalive on the sockets that stay open for a connection's life. `None` turns it off: a peer host that
    /// loses power is then noticed by other means only.
    pub keepalive: Option<Keepalive>,
    /// Connections the kernel holds until they are accepted: 1 to 65,535, default 1,024 (the system may cut it).
    pub backlog: u32,
}

/// When an idle TCP connection is probed: a dead host shows after `idle + interval * retries`, 30 s by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first probe: 1 s to 32,767 s in whole seconds, default 15 s.
    pub idle: Duration,
    /// Between probes: 1 s to 32,767 s in whole seconds, default 5 s.
    pub interval: Duration,
    /// Unanswered probes that end the connection: 1 to 127, default 3.
    pub retries: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(5),
            parallel_exchanges: 64,
            max_pending: 640,
            secret: None,
            tcp: TcpConfig::default(),
        }
    }
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            receive_buffer_bytes: Some(16 << 10),
            send_buffer_bytes: Some(16 << 10),
            keepalive: Some(Keepalive::default()),
            backlog: 1024,
        }
    }
}

impl Default for Keepalive {
    fn default() -> Self {
        Self { idle: Duration::from_secs(15), interval: Duration::from_secs(5), retries: 3 }
    }
}

/// A number out of its range: name, value and range are in the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}, but must be within {min} and {max}")]
pub struct ConfigError {
    /// The field, as it is written in [`Config`].
    pub field: &'static str,
    /// What stands there.
    pub value: u64,
    /// The smallest allowed, in the field's unit (times in milliseconds).
    pub min: u64,
    /// The largest allowed.
    pub max: u64,
}

impl Config {
    /// Checks every range.
    ///
    /// # Errors
    ///
    /// The first field that is out of its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        millis("deadline in ms", self.deadline, 10, 60_000)?;
        count("parallel_exchanges", self.parallel_exchanges, 1, 4096)?;
        count("max_pending", self.max_pending, 1, 65_536)?;
        self.tcp.validate()
    }
}

impl TcpConfig {
    /// Checks every range.
    ///
    /// # Errors
    ///
    /// The first field that is out of its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Some(bytes) = self.receive_buffer_bytes {
            count("tcp.receive_buffer_bytes", bytes, 2048, 1 << 30)?;
        }
        if let Some(bytes) = self.send_buffer_bytes {
            count("tcp.send_buffer_bytes", bytes, 2048, 1 << 30)?;
        }
        if let Some(keepalive) = self.keepalive {
            millis("tcp.keepalive.idle in ms", keepalive.idle, 1000, 32_767_000)?;
            millis("tcp.keepalive.interval in ms", keepalive.interval, 1000, 32_767_000)?;
            range("tcp.keepalive.retries", keepalive.retries.into(), 1, 127)?;
        }
        range("tcp.backlog", self.backlog.into(), 1, 65_535)
    }
}

fn millis(field: &'static str, value: Duration, min: u64, max: u64) -> Result<(), ConfigError> {
    range(field, u64::try_from(value.as_millis()).unwrap_or(u64::MAX), min, max)
}

fn count(field: &'static str, value: usize, min: u64, max: u64) -> Result<(), ConfigError> {
    range(field, u64::try_from(value).unwrap_or(u64::MAX), min, max)
}

fn range(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(ConfigError { field, value, min, max }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        assert_eq!(Config::default().validate(), Ok(()));
    }

    #[test]
    fn each_number_out_of_range_is_named() {
        type Spoil = fn(&mut Config);
        let cases: [(&str, Spoil); 9] = [
            ("deadline in ms", |c| c.deadline = Duration::from_millis(9)),
            ("parallel_exchanges", |c| c.parallel_exchanges = 0),
            ("max_pending", |c| c.max_pending = 65_537),
            ("tcp.receive_buffer_bytes", |c| c.tcp.receive_buffer_bytes = Some(1)),
            ("tcp.send_buffer_bytes", |c| c.tcp.send_buffer_bytes = Some(0)),
            ("tcp.keepalive.idle in ms", |c| {
                c.tcp.keepalive = Some(Keepalive { idle: Duration::ZERO, ..Keepalive::default() });
            }),
            ("tcp.keepalive.interval in ms", |c| {
                c.tcp.keepalive = Some(Keepalive { interval: Duration::MAX, ..Keepalive::default() });
            }),
            ("tcp.keepalive.retries", |c| c.tcp.keepalive = Some(Keepalive { retries: 128, ..Keepalive::default() })),
            ("tcp.backlog", |c| c.tcp.backlog = 0),
        ];
        for (field, spoil) in cases {
            let mut config = Config::default();
            spoil(&mut config);
            let error = config.validate().expect_err(field);
            assert_eq!(error.field, field);
            assert!(error.to_string().contains(&error.max.to_string()), "{error}");
        }
    }
}
