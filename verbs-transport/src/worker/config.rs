//! Every number of a worker in one place.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use verbs_bootstrap::{Backoff, InstanceId};

use super::{drain::DrainFlag, outbox::INLINE_ARENA_BYTES};
use crate::{
    fabric::QpTimers,
    proto::{
        credit::{WINDOW_MAX, WINDOW_MIN},
        link::CONTROL_WRS,
        receive_share::{SLABS_IN_HAND, full_windows},
    },
};

/// Who polls the completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Progress {
    /// A task that sleeps on the completion channel: arm, drain, wait. One wake-up a burst, no CPU when idle.
    #[default]
    Event,
    /// The same task, but it polls for `spin` after the last completion before it sleeps. Cuts the tail at low rates for
    /// some percent of a core.
    SpinThenPark {
        /// How long to poll: 20 µs is a good start. Blocks its runtime thread meanwhile, so keep it below 1 ms.
        spin: Duration,
    },
    /// A thread of its own that polls without pause: the lowest latency for a whole core.
    BusyPoll,
    /// Nobody: the application calls [`Worker::progress`](crate::Worker::progress), and does so several times within
    /// its peers' `health_deadline`: nothing is received, granted or answered in between, so peers that wait for an
    /// answer take a worker that is not polled for dead.
    Manual,
}

/// How a worker behaves. [`Config::default`] suits one site with a few dozen peers.
#[derive(Clone, Debug)]
pub struct Config {
    /// The worker's name over restarts. Default: random, so a restarted worker is a new one to its peers.
    pub instance: InstanceId,
    /// Where the bootstrap listens. Default 127.0.0.1 with a free port; whoever reaches this port can connect, so name
    /// another address only on a trusted network or with `bootstrap.secret`.
    pub bind: SocketAddr,
    /// What peers are told to dial, best first, at most 8. Default empty: where the bootstrap listens, which must then
    /// be a definite address.
    pub advertise: Vec<SocketAddr>,
    /// Limits of the bootstrap, and the shared secret.
    pub bootstrap: verbs_bootstrap::Config,
    /// Pause between dials to a peer that does not answer.
    pub backoff: Backoff,
    /// Credits for each peer: 8 to 1,020 receive slabs, default 64. Fewer throttle a peer at a high bandwidth-delay
    /// product; more take their share of the SRQ: the fabric's receive slabs ÷ (window + 6) peers get a full one.
    pub window_slabs: u16,
    /// Send WRs of each QP: 16 to 16,384, default 63 (devices round up to a power of two less one, and 64 cost twice
    /// the memory on Soft-RoCE). Six of them are kept for control frames.
    pub send_wrs: u32,
    /// A signal at least every so many WRs: 1 to 256, default 16. 1 costs up to a quarter of the message rate.
    pub signal_every: u32,
    /// Inline bytes asked of the device: 0 to 956, default 828 (the most that `ConnectX`-7 grants an RC QP). What is
    /// granted is used; a refusal is stepped down, never an error.
    pub inline_request_bytes: u32,
    /// SENDs (8-byte header included) up to this size go inline if the device granted as much: 0 to 956, default 220.
    /// Inline saves the device a read of host memory: 35% of latency at 64 B, nothing at 512 B on `ConnectX`-7.
    pub inline_threshold_bytes: u32,
    /// Largest frame (header + payload) in bytes that is sent and taken: 1 KiB to 1 GiB, default 16 MiB. The smaller
    /// of both sides' counts. A peer can make this side hold so much while its frame arrives.
    pub eager_max_bytes: u32,
    /// Frames that wait for credits in a peer's channel before sends are told to wait: 1 to 65,536, default 256.
    pub channel_frames: usize,
    /// Whether frames that have to wait (for a credit, a send WR or the connection) go several to a SEND once they may, as
    /// many as a slab takes; default true. What does not wait is sent at once and alone either way. Without it each small
    /// frame of a burst costs a credit, a WR and a slab of the peer's: several times the work. Measured:
    /// `docs/performance.md`.
    pub pack_waiting: bool,
    /// Bytes received but not yet taken by the application, over all peers: 64 KiB and more, default 64 MiB. Above it
    /// credits are held back, so that senders feel it: what they may still send, up to two windows of slabs a peer, comes on
    /// top.
    pub inbound_max_bytes: usize,
    /// Zero-copy receive on the streams: slabs that may be with the application at a time, in frames that it has not
    /// dropped, over all peers and a quarter of its window for each peer; beyond that frames are copied. 0 to a quarter
    /// of the fabric's receive slabs, default 0: every frame is copied. The SRQ carries fewer windows by so many slabs.
    /// Frames of several SENDs, and frames for a handler, are never lent. Measured: `docs/tuning.md`.
    pub zero_copy_slabs: u32,
    /// Frames (header + payload) below so many bytes are copied all the same: 0 to 16 MiB, default 2,048. Lending costs
    /// an allocation and the slab's way home; for short frames the copy is cheaper.
    pub zero_copy_min_bytes: u32,
    /// Who polls.
    pub progress: Progress,
    /// From RTS to the answer of the first PING: 10 ms to 60 s, default 5 s.
    pub proof_deadline: Duration,
    /// How long the flush of an ended connection may take before its QP is destroyed regardless: 10 ms to 10 s,
    /// default 1 s.
    pub flush_deadline: Duration,
    /// WRs that no signaled one follows are covered by a PING after this time without a post: 1 ms to 1 s, default
    /// 10 ms. Shorter costs a PING at each pause, longer keeps sent frames in memory.
    pub tail_probe_after: Duration,
    /// How long a connection on which something is owed may stand still before it ends: 100 ms to 60 s, default 2 s.
    /// At half of it a PING is sent; a peer that answers it is alive, however slow it takes frames. Too short ends
    /// connections to peers that are merely busy; too long lets their frames wait for a dead one.
    pub health_deadline: Duration,
    /// How long a frame may wait in the gate, i.e. behind a full channel, before its admission fails: 1 ms to 1 h,
    /// default 30 s. Too short turns back-pressure into errors.
    pub admission_deadline: Duration,
    /// Connections on which nothing was sent or received for so long are closed: 1 s and more, default `None`, never.
    /// The next send connects again, which takes some milliseconds; a frame of the peer's that crosses the end comes
    /// back to it. For workers with more peers than the SRQ has windows for.
    pub idle_evict_after: Option<Duration>,
    /// The flag that turns requests away while a process drains; give all transports of a process the same one.
    /// Default: one of its own, that nobody raises.
    pub drain: DrainFlag,
    /// How often the counters and gauges are published through the `metrics` facade: 10 ms to 1 h, default `None`: never
    /// by itself, and nothing wakes up for it; [`Worker::publish_metrics`](crate::Worker::publish_metrics) publishes when
    /// it is called. 1 s suits a scrape every few seconds; each time costs a look at every peer.
    pub metrics_interval: Option<Duration>,
    /// Retry policy of the QPs.
    pub timers: QpTimers,
    /// For reproducible simulation: seeds PSNs, incarnation and back-off. Default `None`: the system's randomness.
    pub seed: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            instance: InstanceId(rand::random()),
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            advertise: Vec::new(),
            bootstrap: verbs_bootstrap::Config::default(),
            backoff: Backoff::default(),
            window_slabs: 64,
            send_wrs: 63,
            signal_every: 16,
            inline_request_bytes: 828,
            inline_threshold_bytes: 220,
            eager_max_bytes: 16 << 20,
            channel_frames: 256,
            pack_waiting: true,
            inbound_max_bytes: 64 << 20,
            zero_copy_slabs: 0,
            zero_copy_min_bytes: 2048,
            progress: Progress::Event,
            proof_deadline: Duration::from_secs(5),
            flush_deadline: Duration::from_secs(1),
            tail_probe_after: Duration::from_millis(10),
            health_deadline: Duration::from_secs(2),
            admission_deadline: Duration::from_secs(30),
            idle_evict_after: None,
            drain: DrainFlag::default(),
            metrics_interval: None,
            timers: QpTimers { ack_timeout_code: 16, retry_cnt: 6, rnr_retry: 7, min_rnr_timer_code: 3 },
            seed: None,
        }
    }
}

/// A number out of its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// One field by itself.
    #[error("{field} is {value}, but must be within {min} and {max}")]
    OutOfRange {
        /// The field, as it is written in [`Config`].
        field: &'static str,
        /// What stands there.
        value: u64,
        /// The smallest allowed, in the field's unit (times in microseconds).
        min: u64,
        /// The largest allowed.
        max: u64,
    },
    /// The bootstrap's part.
    #[error("bootstrap: {0}")]
    Bootstrap(#[from] verbs_bootstrap::ConfigError),
    /// The SRQ carries no peer.
    #[error(
        "the fabric's {receive_slabs} receive slabs carry no peer with a window of {window_slabs}: at least {need} are \
         needed"
    )]
    TooFewSlabs {
        /// What the fabric has.
        receive_slabs: u32,
        /// The window wanted.
        window_slabs: u16,
        /// The least.
        need: u32,
    },
    /// Peers cannot dial an address that stands for "any".
    #[error("bind is {bind}, which no peer can dial: name the addresses to dial in `advertise`")]
    NotDialable {
        /// What stands in `bind`.
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
        self.bootstrap.validate()?;
        range("window_slabs", self.window_slabs.into(), WINDOW_MIN.into(), WINDOW_MAX.into())?;
        range("send_wrs", self.send_wrs.into(), u64::from(CONTROL_WRS) + 10, 16_384)?;
        range("signal_every", self.signal_every.into(), 1, 256)?;
        range("inline_request_bytes", self.inline_request_bytes.into(), 0, 956)?;
        range("inline_threshold_bytes", self.inline_threshold_bytes.into(), 0, 956)?;
        range("eager_max_bytes", self.eager_max_bytes.into(), 1 << 10, 1 << 30)?;
        range("channel_frames", self.channel_frames as u64, 1, 65_536)?;
        range("inbound_max_bytes", self.inbound_max_bytes as u64, 64 << 10, u64::MAX)?;
        range("zero_copy_min_bytes", self.zero_copy_min_bytes.into(), 0, 16 << 20)?;
        micros("proof_deadline in µs", self.proof_deadline, 10_000, 60_000_000)?;
        micros("flush_deadline in µs", self.flush_deadline, 10_000, 10_000_000)?;
        micros("tail_probe_after in µs", self.tail_probe_after, 1_000, 1_000_000)?;
        micros("health_deadline in µs", self.health_deadline, 100_000, 60_000_000)?;
        micros("admission_deadline in µs", self.admission_deadline, 1_000, 3_600_000_000)?;
        if let Some(every) = self.metrics_interval {
            micros("metrics_interval in µs", every, 10_000, 3_600_000_000)?;
        }
        range("advertise (addresses)", self.advertise.len() as u64, 0, 8)?;
        range("timers.ack_timeout_code", self.timers.ack_timeout_code.into(), 1, 31)?;
        range("timers.retry_cnt", self.timers.retry_cnt.into(), 0, 6)?;
        range("timers.rnr_retry", self.timers.rnr_retry.into(), 0, 7)?;
        range("timers.min_rnr_timer_code", self.timers.min_rnr_timer_code.into(), 1, 31)?;
        if let Some(after) = self.idle_evict_after {
            micros("idle_evict_after in µs", after, 1_000_000, u64::MAX)?;
        }
        if let Progress::SpinThenPark { spin } = self.progress {
            micros("progress.spin in µs", spin, 1, 1_000)?;
        }
        if self.bind.ip().is_unspecified() && self.advertise.is_empty() {
            return Err(ConfigError::NotDialable { bind: self.bind });
        }
        Ok(())
    }

    /// Checks that an SRQ of `receive_slabs` carries at least one peer beside what may be lent.
    pub(crate) fn validate_slabs(&self, receive_slabs: u32) -> Result<(), ConfigError> {
        range("zero_copy_slabs", self.zero_copy_slabs.into(), 0, u64::from(receive_slabs / 4))?;
        if full_windows(receive_slabs - self.zero_copy_slabs, WINDOW_MIN) == 0 {
            let one_peer = u32::from(WINDOW_MIN + crate::proto::credit::CONTROL_RESERVE);
            let need = SLABS_IN_HAND + one_peer + self.zero_copy_slabs;
            return Err(ConfigError::TooFewSlabs { receive_slabs, window_slabs: self.window_slabs, need });
        }
        Ok(())
    }
}

fn range(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(ConfigError::OutOfRange { field, value, min, max }) }
}

fn micros(field: &'static str, value: Duration, min: u64, max: u64) -> Result<(), ConfigError> {
    range(field, u64::try_from(value.as_micros()).unwrap_or(u64::MAX), min, max)
}

const _: () = assert!(INLINE_ARENA_BYTES >= 956, "the longest inline SEND fits into one batch");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        assert_eq!(Config::default().validate(), Ok(()));
    }

    #[test]
    fn each_number_out_of_range_is_named() {
        type Case = (&'static str, fn(&mut Config));
        let cases: [Case; 11] = [
            ("window_slabs", |c| c.window_slabs = 7),
            ("window_slabs", |c| c.window_slabs = 1021),
            ("send_wrs", |c| c.send_wrs = 15),
            ("signal_every", |c| c.signal_every = 0),
            ("inline_request_bytes", |c| c.inline_request_bytes = 957),
            ("eager_max_bytes", |c| c.eager_max_bytes = 1023),
            ("channel_frames", |c| c.channel_frames = 0),
            ("metrics_interval in µs", |c| c.metrics_interval = Some(Duration::from_millis(9))),
            ("timers.retry_cnt", |c| c.timers.retry_cnt = 7),
            ("timers.min_rnr_timer_code", |c| c.timers.min_rnr_timer_code = 0),
            ("progress.spin in µs", |c| c.progress = Progress::SpinThenPark { spin: Duration::from_secs(1) }),
        ];
        for (name, spoil) in cases {
            let mut config = Config::default();
            spoil(&mut config);
            match config.validate() {
                Err(ConfigError::OutOfRange { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn an_unspecified_bind_needs_addresses_to_advertise() {
        let mut config = Config { bind: "0.0.0.0:0".parse().unwrap(), ..Config::default() };
        assert!(matches!(config.validate(), Err(ConfigError::NotDialable { .. })));
        config.advertise.push("192.0.2.1:1".parse().unwrap());
        assert_eq!(config.validate(), Ok(()));
    }
}
