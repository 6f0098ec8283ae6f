//! What a world and its hosts are made of.

use std::{ops::RangeInclusive, time::Duration};

use verbs_bootstrap::{Gid, GidType, Mtu, RdAtomic};

use super::fault::Faults;
use crate::fabric::{SLAB_BYTES, SlabSizes, bulk::WindowPolicy};

/// Settings of a [`SimWorld`](super::SimWorld).
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Everything random comes from here: delays, faults, ports. Print it when a test fails.
    pub seed: u64,
    /// What goes wrong; default: nothing.
    pub faults: Faults,
    /// Time of one way between any two hosts, drawn for each message and each acknowledgement; order within a QP is
    /// kept. Default 0: a message is in the peer's slab when the post returns, and no timer is involved.
    /// tokio's timers tick in milliseconds, so in fake time news arrives at the next full millisecond.
    pub latency: RangeInclusive<Duration>,
    /// Bytes of READs and WRITEs that each bulk QP moves in a second. Default 0: any number at once.
    pub bulk_bytes_per_second: u64,
    /// Time of one way in the bootstrap's network, as `latency`. Default 0.
    pub net_latency: RangeInclusive<Duration>,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            faults: Faults::none(),
            latency: Duration::ZERO..=Duration::ZERO,
            bulk_bytes_per_second: 0,
            net_latency: Duration::ZERO..=Duration::ZERO,
        }
    }
}

impl SimConfig {
    /// Nothing random but what `seed` gives.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }
}

/// Settings of one simulated device and its fabric. The defaults are those of Soft-RoCE where it has any.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    /// The slabs. Default: 512 receives and 128 sends of [`SLAB_BYTES`] (5 MiB; a device's default is larger).
    pub slabs: SlabSizes,
    /// Completions that the CQ holds; one more breaks it. Default 8,191.
    pub cq_depth: u32,
    /// Largest inline size that is granted; a request above it is refused with EINVAL. Default 512, as Soft-RoCE.
    pub inline_max_bytes: u32,
    /// The port's active MTU. Default 4,096.
    pub mtu: Mtu,
    /// The port's GID. Default: the host's address, IPv4-mapped if it is IPv4.
    pub gid: Option<Gid>,
    /// How packets travel; must be the same on both sides. Default `RoCE` v2.
    pub gid_type: GidType,
    /// The NUMA node that the device hangs off. Default: none, as on Soft-RoCE.
    pub numa_node: Option<u16>,
    /// Most QPs. Default 4,096.
    pub max_qps: u32,
    /// Most regions. Default 65,536.
    pub max_regions: u32,
    /// Most memory windows; 0: a device without. Default 65,536.
    pub max_windows: u32,
    /// Whether bulk ports use memory windows. Default: they do, for their bounds are enforced here.
    pub windows: WindowPolicy,
    /// Most WRs in a send queue. Default 16,384.
    pub qp_wrs: u32,
    /// READs at once. Default 16 both ways.
    pub rd_atomic: RdAtomic,
    /// The port's longest message. Default 8 MiB, as Soft-RoCE says.
    pub message_bytes: u64,
    /// Bytes of READs and WRITEs that each bulk QP of this device moves in a second, if it is not to be
    /// [`SimConfig::bulk_bytes_per_second`]. Default 0: it is.
    pub bulk_bytes_per_second: u64,
    /// Whether a QP's fall to ERR raises `QpFatal` and `QpLastWqe`, as on a NIC. Default no, as on Soft-RoCE.
    pub affiliated_events: bool,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            slabs: SlabSizes { receive_slabs: 512, receive_bytes: SLAB_BYTES, send_slabs: 128, send_bytes: SLAB_BYTES },
            cq_depth: 8191,
            inline_max_bytes: 512,
            mtu: Mtu::B4096,
            gid: None,
            gid_type: GidType::RoceV2,
            numa_node: None,
            max_qps: 4096,
            max_regions: 65_536,
            max_windows: 65_536,
            windows: WindowPolicy::Auto,
            qp_wrs: 16_384,
            rd_atomic: RdAtomic { initiator: 16, responder: 16 },
            message_bytes: 8 << 20,
            bulk_bytes_per_second: 0,
            affiliated_events: false,
        }
    }
}
