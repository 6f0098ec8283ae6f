//! What a seed means: how the workers of a run are made, and what they do.

use std::{net::SocketAddr, time::Duration};

use fastrand::Rng;
use verbs_bootstrap::{Backoff, InstanceId, Mtu};
use verbs_transport::{
    Config, Progress,
    fabric::{QpTimers, SlabSizes},
    sim::{Faults, HostConfig},
};

use crate::lab::SimLab;

/// How much goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Nothing is lost, but nothing comes when expected. No frame may fail.
    Unpunctual,
    /// Connections, processes, paths and ports die.
    Harsh,
}

impl Mood {
    /// The devices' faults.
    pub const fn faults(self) -> Faults {
        match self {
            Self::Unpunctual => Faults::unpunctual(),
            Self::Harsh => Faults::harsh(),
        }
    }
}

/// How a worker takes its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taking {
    /// `recv` on each stream, now and then slowly.
    Streams,
    /// A handler on the driver.
    Handler,
}

/// One world's numbers.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Workers.
    pub workers: u32,
    /// Frames that are sent before faults stop.
    pub frames: u32,
    /// Largest payload in bytes.
    pub payload_max: usize,
    /// Things done to the world.
    pub blows: u32,
}

impl Plan {
    /// The numbers of a seed.
    pub fn new(rng: &mut Rng, mood: Mood) -> Self {
        Self {
            workers: rng.u32(2..=4),
            frames: rng.u32(50..=300),
            payload_max: [200, 2_000, 6_000][rng.usize(..3)],
            blows: if mood == Mood::Harsh { rng.u32(0..=8) } else { 0 },
        }
    }
}

fn one_of<T: Copy, const N: usize>(rng: &mut Rng, from: [T; N]) -> T {
    from[rng.usize(..N)]
}

fn millis(rng: &mut Rng, range: std::ops::RangeInclusive<u64>) -> Duration {
    Duration::from_millis(rng.u64(range))
}

/// The configuration of one run of worker `n`, and its device.
pub fn worker(rng: &mut Rng, plan: &Plan, mood: Mood, n: u32) -> (Config, HostConfig, Taking) {
    let peers = plan.workers - 1;
    let window = rng.u16(8..=64);
    let send_wrs = rng.u32(16..=63);
    // Enough for every peer's window, as DESIGN's sum has it, and nothing to spare.
    let zero_copy_slabs = one_of(rng, [0, 0, 4, 20]);
    let receive_slabs = 80 + peers * (u32::from(window) + 6) + zero_copy_slabs;
    let harsh = mood == Mood::Harsh;
    // Ended connections linger, so a harsh run needs room for more than its peers.
    let cq_depth = if harsh { 8191 } else { receive_slabs + peers * send_wrs };
    let host = HostConfig {
        slabs: SlabSizes {
            receive_slabs: if harsh { receive_slabs + 200 } else { receive_slabs },
            receive_bytes: one_of(rng, [128, 512, 2048]),
            send_slabs: one_of(rng, [1, 2, 4, 16, 64]),
            send_bytes: one_of(rng, [128, 512, 2048]),
        },
        cq_depth,
        inline_max_bytes: one_of(rng, [0, 60, 220, 512]),
        mtu: one_of(rng, [Mtu::B256, Mtu::B1024, Mtu::B4096]),
        affiliated_events: rng.bool(),
        ..HostConfig::default()
    };
    let config = Config {
        instance: InstanceId(u128::from(n)),
        bind: SocketAddr::from((SimLab::addr(n), 4000)),
        seed: Some(rng.u64(..)),
        window_slabs: window,
        send_wrs,
        signal_every: rng.u32(1..=32),
        inline_request_bytes: one_of(rng, [0, 60, 220, 828]),
        inline_threshold_bytes: one_of(rng, [0, 60, 220]),
        eager_max_bytes: 64 << 10,
        channel_frames: one_of(rng, [1, 4, 32, 256]),
        pack_waiting: rng.bool(),
        inbound_max_bytes: 64 << 10,
        zero_copy_slabs,
        zero_copy_min_bytes: rng.u32(0..=200),
        progress: if rng.u8(..3) == 0 { Progress::Manual } else { Progress::Event },
        flush_deadline: millis(rng, 100..=1000),
        tail_probe_after: millis(rng, 1..=20),
        backoff: Backoff { first: millis(rng, 10..=50), max: millis(rng, 100..=1000) },
        timers: QpTimers {
            ack_timeout_code: rng.u8(12..=16),
            retry_cnt: rng.u8(3..=6),
            rnr_retry: 7,
            min_rnr_timer_code: rng.u8(1..=6),
        },
        ..Config::default()
    };
    (config, host, if rng.u8(..3) == 0 { Taking::Handler } else { Taking::Streams })
}
