//! What a world counts, and what a test asks at the end.

use std::{fmt, net::IpAddr};

pub use super::srq::ReceiveSlabCount;

/// Counters since the start, of one host or summed over all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// WRs accepted by post.
    pub posted: u64,
    /// Messages of this host that reached the peer's slab.
    pub delivered: u64,
    /// Messages that reached a slab of this host.
    pub received: u64,
    /// RNR NAKs that this host gave: its SRQ was empty.
    pub rnr_naks: u64,
    /// Ack timeouts of this host's QPs.
    pub ack_timeouts: u64,
    /// WRs of this host that failed or were flushed.
    pub failed_wrs: u64,
    /// Completions lost because the CQ was full.
    pub cq_overruns: u64,
    /// Calls of `arm`.
    pub arms: u64,
    /// Channel events raised.
    pub wakes: u64,
    /// Async events raised.
    pub async_events: u64,
    /// Bulk WRs accepted by post.
    pub bulk_posted: u64,
    /// The most READs that one QP had posted and not completed at one time.
    pub bulk_reads_at_once: u64,
    /// QPs made.
    pub qps_created: u64,
    /// QPs destroyed.
    pub qps_destroyed: u64,
}

impl Stats {
    pub(super) fn absorb(&mut self, other: &Self) {
        self.posted += other.posted;
        self.delivered += other.delivered;
        self.received += other.received;
        self.rnr_naks += other.rnr_naks;
        self.ack_timeouts += other.ack_timeouts;
        self.failed_wrs += other.failed_wrs;
        self.cq_overruns += other.cq_overruns;
        self.arms += other.arms;
        self.wakes += other.wakes;
        self.async_events += other.async_events;
        self.bulk_posted += other.bulk_posted;
        self.bulk_reads_at_once = self.bulk_reads_at_once.max(other.bulk_reads_at_once);
        self.qps_created += other.qps_created;
        self.qps_destroyed += other.qps_destroyed;
    }
}

/// How often each fault struck: shows that a seeded run tested what it was meant to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the knobs of `Faults` and `NetFaults`")]
pub struct FaultCounts {
    pub delays: u64,
    pub late_completions: u64,
    pub spurious_wakes: u64,
    pub lost_acks: u64,
    pub qp_errors: u64,
    pub rnr_storms: u64,
    pub half_received: u64,
    pub lost_flushes: u64,
    pub create_qp_exhausted: u64,
    pub register_refused: u64,
    pub failed_binds: u64,
    pub connects_without_route: u64,
    pub slow_connects: u64,
    pub refused_posts: u64,
    pub event_noise: u64,
    pub port_down_hangs: u64,
    pub dials_refused: u64,
    pub slow_streams: u64,
    pub resets: u64,
    pub black_holes: u64,
    pub half_closes: u64,
    pub dribbles: u64,
}

/// Whether a host's process still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostLife {
    /// It does.
    Open,
    /// Its fabric and QPs were dropped.
    Closed,
    /// The world killed it.
    Killed,
}

/// One host at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostReport {
    /// Its address.
    pub addr: IpAddr,
    /// Whether its process still runs.
    pub life: HostLife,
    /// QPs not yet destroyed.
    pub live_qps: u32,
    /// WRs that no polled WC has covered, over live QPs.
    pub outstanding_wrs: usize,
    /// Completions in the CQ.
    pub unpolled_cqes: usize,
    /// Bulk QPs not yet destroyed.
    pub live_bulk_qps: u32,
    /// Regions not yet deregistered.
    pub live_regions: u32,
    /// Memory windows not yet freed.
    pub live_windows: u32,
    /// WRs of live bulk QPs that no polled WC has covered.
    pub outstanding_bulk_wrs: usize,
    /// Completions in the CQs of open bulk ports.
    pub unpolled_bulk_cqes: usize,
    /// Receive slabs by place.
    pub receive_slabs: ReceiveSlabCount,
    /// Send slabs that a WR still names.
    pub send_slabs_in_flight: usize,
    /// Its counters.
    pub stats: Stats,
}

impl HostReport {
    /// No QP, no region, no window, no WR, no send slab in the device, no receive slab half-filled or lost, and while it is open no
    /// completion. Posted receives are no leak: the SRQ keeps them. Of a killed process nothing is asked.
    pub fn is_quiet(&self) -> bool {
        let slabs = self.receive_slabs;
        self.life == HostLife::Killed
            || self.live_qps == 0
                && self.live_bulk_qps == 0
                && self.live_regions == 0
                && self.live_windows == 0
                && self.unpolled_bulk_cqes == 0
                && self.outstanding_wrs == 0
                && (self.unpolled_cqes == 0 || self.life == HostLife::Closed)
                && self.send_slabs_in_flight == 0
                && slabs.filling == 0
                && slabs.lost == 0
    }
}

/// A whole world at one moment: [`SimWorld::report`](super::SimWorld::report).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The seed of the world.
    pub seed: u64,
    /// Its hosts, in order of creation.
    pub hosts: Vec<HostReport>,
    /// Ends of bootstrap connections not yet dropped.
    pub open_streams: usize,
    /// Listeners not yet dropped.
    pub listeners: usize,
}

impl Report {
    /// Everything has come home.
    pub fn is_quiet(&self) -> bool {
        self.open_streams == 0 && self.listeners == 0 && self.hosts.iter().all(HostReport::is_quiet)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {} stream ends, {} listeners", self.seed, self.open_streams, self.listeners)?;
        for host in &self.hosts {
            writeln!(
                f,
                "  {} ({:?}): {} QPs, {} WRs outstanding, {} CQEs unpolled, {} send slabs in flight, {:?}; bulk: {} QPs, {} \
                 regions, {} windows, {} WRs, {} CQEs",
                host.addr,
                host.life,
                host.live_qps,
                host.outstanding_wrs,
                host.unpolled_cqes,
                host.send_slabs_in_flight,
                host.receive_slabs,
                host.live_bulk_qps,
                host.live_regions,
                host.live_windows,
                host.outstanding_bulk_wrs,
                host.unpolled_bulk_cqes
            )?;
        }
        Ok(())
    }
}
