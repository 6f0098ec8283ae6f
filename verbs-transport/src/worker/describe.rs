//! What a worker tells about itself: paths, connections, counts.

use std::sync::atomic::Ordering;

use verbs_bootstrap::{InstanceId, PortIdentity, RdAtomic};

use super::{Worker, connect::agreed_rd_atomic, stats::Stats};
use crate::{
    fabric::{Fabric, FabricQp},
    proto::link::{Link, LinkLimits},
};

/// A connection as it is now.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PeerDescription {
    /// Who.
    pub peer: InstanceId,
    /// Registered here.
    pub registered: bool,
    /// A PING has come back over the QP.
    pub proven: bool,
    /// Device, port and GID in words, and why they were chosen.
    pub path: String,
    /// Our port.
    pub local: PortIdentity,
    /// The peer's, once its offer is known.
    pub remote: Option<PortIdentity>,
    /// Our QP's number.
    pub qpn: Option<u32>,
    /// The path MTU in bytes: the smaller of both ports'.
    pub mtu_bytes: Option<u32>,
    /// READs at once over this connection's QPs: as initiator the smaller of what we may ask and the peer answers, as
    /// responder the other way round.
    pub rd_atomic: Option<RdAtomic>,
    /// Inline bytes that the device granted.
    pub inline_granted_bytes: Option<u32>,
    /// What both sides agreed on.
    pub limits: Option<LinkLimits>,
    /// Largest frame to this peer in bytes, header and payload together.
    pub max_message_bytes: Option<usize>,
    /// Send credits left.
    pub credits_left: Option<u16>,
    /// Credits that we owe the peer.
    pub credits_owed: Option<u16>,
    /// WRs in flight.
    pub wrs_in_flight: Option<u32>,
    /// Frames that wait in the channel.
    pub queued_frames: usize,
}

impl<F: Fabric> Worker<F> {
    /// The connection to a peer as it is now; `None` for a peer that is not known.
    pub fn describe(&self, peer: InstanceId) -> Option<PeerDescription> {
        let shared = self.shared();
        let peer = shared.find_peer(peer)?;
        let local = shared.fabric.port();
        let state = peer.lock();
        let epoch = state.epoch.as_ref();
        let link = epoch.and_then(|epoch| epoch.link.as_ref());
        let remote = epoch.and_then(|epoch| epoch.remote.as_ref());
        let eager = shared.config.eager_max_bytes;
        Some(PeerDescription {
            peer: peer.id,
            registered: state.address.is_some(),
            proven: link.is_some_and(Link::is_proven),
            path: shared.fabric.path_reason(),
            local,
            remote: remote.map(|remote| remote.port),
            qpn: epoch.map(|epoch| epoch.qp.qpn().get()),
            mtu_bytes: remote.map(|remote| remote.port.mtu.min(local.mtu).bytes()),
            rd_atomic: remote.map(|remote| agreed_rd_atomic(shared.fabric.limits().rd_atomic, remote.rd_atomic)),
            inline_granted_bytes: epoch.map(|epoch| epoch.qp.caps().inline_bytes),
            limits: link.map(Link::limits),
            max_message_bytes: remote.map(|remote| remote.eager_max_bytes.min(eager) as usize),
            credits_left: link.map(Link::credits_left),
            credits_owed: link.map(Link::credits_owed),
            wrs_in_flight: link.map(Link::wrs_in_flight),
            queued_frames: state.queue.len(),
        })
    }

    /// The device, port and GID in words, and why they were chosen.
    pub fn path_reason(&self) -> String {
        self.shared().fabric.path_reason()
    }

    /// Counts since the start, and gauges as they are now. Takes each peer's lock for a moment, and reads the device's
    /// own counters from files: for once a second, not for each message.
    pub fn stats(&self) -> Stats {
        let shared = self.shared();
        let now = shared.now();
        let mut stats = shared.counters.snapshot();
        // Before the links that live: one that ends in between is missed this once, not counted twice.
        stats.links = *shared.past_links();
        let stopping = shared.is_stopping();
        for peer in shared.all_peers() {
            let state = peer.lock();
            stats.peers_known += 1;
            stats.peers += usize::from(state.address.is_some() && !stopping);
            if let Some(link) = state.epoch.as_ref().and_then(|epoch| epoch.link.as_ref()) {
                stats.links.add(&link.counts_at(now));
                stats.connections += usize::from(link.is_proven());
            }
        }
        stats.hw = shared.fabric.hw_counters();
        stats.qps = shared.qps();
        stats.receives_promised = shared.shares().promised();
        stats.send_slabs_free = shared.send_slabs.len();
        stats.receive_slabs_lent = shared.slabs_lent.load(Ordering::Relaxed);
        stats.inbound_backlog_bytes = shared.backlog.bytes();
        stats
    }
}
