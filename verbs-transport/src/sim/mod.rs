//! An in-memory HCA in fake time, with seeded faults.
//!
//! A [`SimWorld`] holds any number of hosts, each a device with one CQ, one SRQ and its slabs behind the traits of
//! [`fabric`](crate::fabric), and a network for their bootstrap. Workers run on it as they do on a device.
//!
//! ```
//! use verbs_transport::{fabric::Fabric, sim::{Faults, HostConfig, SimConfig, SimWorld}};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let world = SimWorld::new(SimConfig { faults: Faults::harsh(), ..SimConfig::seeded(42) });
//! let a = world.host([10, 0, 0, 1], HostConfig::default());
//! let b = world.host([10, 0, 0, 2], HostConfig::default());
//! // Hand `a` and `b` to workers, let them talk, then:
//! world.stop_faults();
//! // … the workers finish and shut down …
//! assert_eq!(a.slabs(), b.slabs());
//! drop((a, b));
//! world.assert_quiet();
//! # });
//! ```
//!
//! # Time and chance
//!
//! Under a paused `current_thread` runtime time is tokio's: it jumps to the next thing that happens, and equal seeds
//! give equal runs ([`SimWorld::trace`] compares them), as long as the code under test is deterministic itself
//! (`select!` needs `biased`) and the world is made inside the runtime. tokio's timers tick in milliseconds, so what
//! is due within one tick happens at its end, in the right order and each at its own time on the devices' clock.
//!
//! In real time, on any runtime, the defaults have no latency: a message is in the peer's slab when the post returns,
//! no timer runs and nothing is allocated. Delayed things are moved by one task per world, spawned on the runtime that
//! first needs it (with its timer enabled), and by every call on a fabric; it ends with the world.
//!
//! # Where it differs from a device
//!
//! Stricter than any device, so that our bugs show:
//!
//! - A send-queue slot is free again when a WC that covers it has been polled. Soft-RoCE frees it on the ACK, so a
//!   missing signaled WR never shows there. A queue has exactly the WRs that were asked for; Soft-RoCE rounds up.
//! - A slab used while it is not ours to use (a token posted twice, a send slab rewritten or posted again before a WC
//!   covers its WR, a receive slab read while posted) and a WR numbered out of turn panic at once.
//! - After a CQ overrun `poll` fails. Soft-RoCE only loses the CQE.
//! - Bytes in a send slab are read when the message is delivered, as late as a device may.
//!
//! As Soft-RoCE, where that differs from the specification or a NIC:
//!
//! - No affiliated async events, unless [`HostConfig::affiliated_events`] asks for them.
//! - `retry_cnt` 7 never ends; ack timeouts have no least value (`ConnectX`-5 and later: code 16).
//! - Inline above the limit makes `create_qp` fail instead of granting less.
//! - A path MTU above a port's hangs the QP. A half-received message loses its slab when the QP is destroyed
//!   before ERR. Destroyed QPs leave no flush completions, their old ones stay.
//! - The own port down: the next send fails with `LOC_QP_OP_ERR`; [`Faults::port_down_hangs`] makes it hang.
//!
//! As the specification, where Soft-RoCE differs: a receive that is too small gives `LOC_LEN_ERR` here and
//! `REM_INV_REQ_ERR` at the sender (Soft-RoCE: `LOC_QP_OP_ERR`, `REM_OP_ERR`); RNR timers are exact (Soft-RoCE:
//! jiffies); an RNR wait stops the ack timer.
//!
//! Bulk ports ([`BulkFabric`](crate::fabric::bulk::BulkFabric)) do READ, WRITE, both immediates, memory windows
//! of type 2B and no atomics. Bytes
//! move in order, in pieces of 64 KiB at [`SimConfig::bulk_bytes_per_second`]; keys, bounds, access, protection domains
//! (one a device) and READ limits are checked as on Soft-RoCE, for each piece. An owner that deregisters during a READ
//! makes its own QP fall silently and the reader see `RETRY_EXC_ERR`, also as on Soft-RoCE. A local region taken away
//! under a WR gives `LOC_PROT_ERR` at the next piece. Windows are as the specification has them, bounds and all. A SEND
//! without a fence overtakes each READ ahead of it that takes time (with [`SimConfig::bulk_bytes_per_second`]): a
//! device may do so, this one always does.
//!
//! Not there or simpler: SENDs only on the messaging QPs (no immediate); INIT to RTS is one step, so nobody
//! sees a peer in RTR; a message arrives whole or stops half-way, packets are only counted for PSNs; wrong PSNs,
//! QPNs and addresses all look like a dead peer (a device takes some stale PSNs for repeats); no congestion and no
//! bandwidth; `vendor_err` is 0; GID tables have one entry; async events of the port come to every fabric of a host.
//! QP numbers count up from a start of their own on each host and come around after 2^24.
//!
//! The network is TCP in what it promises (order, end, reset when bytes were left unread, 64 KiB in flight), without
//! names, retransmission time-outs or a limit on the backlog; a dead process's acceptor waits for ever.

mod bulk;
mod config;
mod cq;
mod fabric;
mod fault;
mod hca;
mod host;
mod net;
mod qp;
mod srq;
mod stats;
#[cfg(test)]
mod tests;
mod trouble;
mod wire;
mod world;

pub use bulk::{SimBulkPort, SimBulkQp, SimRegion, SimWindow};
pub use config::{HostConfig, SimConfig};
pub use fabric::{SimFabric, SimQp};
pub use fault::{Faults, NetFaults};
pub use net::{SimListener, SimNet, SimStream};
pub use stats::{FaultCounts, HostLife, HostReport, ReceiveSlabCount, Report, Stats};
pub use world::SimWorld;
