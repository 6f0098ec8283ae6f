//! Offers for tests.

use crate::types::{
    Generation, Gid, GidType, Incarnation, InstanceId, LinkLayer, Mtu, Offer, PortIdentity, Psn, QpEndpoint, Qpn,
    RdAtomic,
};

/// An offer from run `from.1` of `from.0` to run `to.1` of `to.0`; QP number and PSN follow from `qpn`.
pub(crate) fn offer(from: (u128, u64), to: (u128, u64), generation: u64, echoed: u64, qpn: u32) -> Offer {
    Offer {
        from: InstanceId(from.0),
        from_incarnation: Incarnation(from.1),
        to: InstanceId(to.0),
        to_incarnation: Incarnation(to.1),
        generation: Generation(generation),
        echoed_generation: Generation(echoed),
        port: PortIdentity {
            device_guid: 0x0102_0304_0506_0708,
            port: 1,
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 99, 1, 1]),
            gid_type: GidType::RoceV2,
            gid_index: 3,
            pkey: 0xffff,
            mtu: Mtu::B1024,
        },
        messaging: endpoint(qpn),
        bulk: None,
        rd_atomic: RdAtomic { initiator: 16, responder: 8 },
        slab_bytes: 8192,
        window_slabs: 64,
        eager_max_bytes: 16 << 20,
        features: 0x8000_0000_0000_0001,
    }
}

pub(crate) fn endpoint(qpn: u32) -> QpEndpoint {
    QpEndpoint { qpn: Qpn::new(qpn).expect("a test's QP number"), psn: Psn::from_random(qpn.wrapping_mul(0x9e37)) }
}
