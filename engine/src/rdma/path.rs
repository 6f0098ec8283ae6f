//! Which pair of ports may carry an operation. Pure.

use verbs_bootstrap::{LinkLayer, Mtu, PortIdentity, RdAtomic};

use super::identity::Incarnation;

/// Paths of one table, at most.
pub(crate) const PATHS_MAX: usize = 16;

/// Of a partition key: the port may talk to all of its partition.
const FULL_MEMBER: u16 = 0x8000;

/// One end of a path: a port of a NIC, the protection domain on it, and what it can do. Only active ports are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PathEnd {
    pub(crate) pd: Incarnation,
    pub(crate) port: PortIdentity,
    pub(crate) rd_atomic: RdAtomic,
    /// It can take a grant that is a window: it sends with invalidate.
    pub(crate) invalidates: bool,
    /// Its NIC's place among those of its engine, below [`PATHS_MAX`]. NICs of the same place are partners: whoever lists
    /// them so has them on the same side of the network.
    pub(crate) rail: u8,
}

/// Both ends, and what was agreed on for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub(crate) mtu: Mtu,
    /// For our end.
    pub(crate) rd_atomic: RdAtomic,
}

impl PathEnd {
    /// What a QP between both ends uses; or why there can be none.
    pub(crate) fn agree(&self, peer: &Self) -> Result<Agreed, &'static str> {
        let (own, other) = (&self.port, &peer.port);
        if own.link_layer != other.link_layer {
            return Err("one port is InfiniBand, the other Ethernet");
        }
        if own.gid_type != other.gid_type {
            return Err("the GIDs are of different types");
        }
        match own.link_layer {
            LinkLayer::InfiniBand if own.gid.0[..8] != other.gid.0[..8] => return Err("the ports are in two subnets"),
            LinkLayer::Ethernet if own.gid.family() != other.gid.family() => {
                return Err("the GIDs are of different address families");
            }
            _ => {}
        }
        if (own.pkey ^ other.pkey) & !FULL_MEMBER != 0 {
            return Err("the ports are in different partitions");
        }
        if (own.pkey | other.pkey) & FULL_MEMBER == 0 {
            return Err("both ports are limited members of their partition");
        }
        let rd_atomic = RdAtomic {
            initiator: self.rd_atomic.initiator.min(peer.rd_atomic.responder),
            responder: self.rd_atomic.responder.min(peer.rd_atomic.initiator),
        };
        if rd_atomic.initiator == 0 || rd_atomic.responder == 0 {
            return Err("one of the ports answers or asks no READs");
        }
        Ok(Agreed { mtu: own.mtu.min(other.mtu), rd_atomic })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::Ipv4Addr;

    use verbs_bootstrap::{Gid, GidType};

    use super::*;

    pub(in crate::rdma) fn end(host: u8) -> PathEnd {
        PathEnd {
            pd: Incarnation([host; 16]),
            port: PortIdentity {
                device_guid: 0x0102_0304_0506_0708,
                port: 1,
                link_layer: LinkLayer::Ethernet,
                lid: 0,
                gid: Gid(Ipv4Addr::new(10, 0, 0, host).to_ipv6_mapped().octets()),
                gid_type: GidType::RoceV2,
                gid_index: 0,
                pkey: 0xffff,
                mtu: Mtu::B4096,
            },
            rd_atomic: RdAtomic { initiator: 16, responder: 8 },
            invalidates: false,
            rail: 0,
        }
    }

    #[test]
    fn the_smaller_of_both_is_used() {
        let (own, mut peer) = (end(1), end(2));
        peer.port.mtu = Mtu::B1024;
        peer.rd_atomic = RdAtomic { initiator: 4, responder: 128 };
        let agreed = own.agree(&peer).expect("compatible");
        assert_eq!(agreed, Agreed { mtu: Mtu::B1024, rd_atomic: RdAtomic { initiator: 16, responder: 4 } });
    }

    #[test]
    fn what_cannot_reach_each_other_is_told_apart() {
        type Change = fn(&mut PathEnd);
        let cases: [(&str, Change); 7] = [
            ("InfiniBand", |end| end.port.link_layer = LinkLayer::InfiniBand),
            ("types", |end| end.port.gid_type = GidType::RoceV1),
            ("families", |end| end.port.gid.0 = [0xfd; 16]),
            ("partitions", |end| end.port.pkey = 0x8001),
            ("READs", |end| end.rd_atomic.initiator = 0),
            ("READs", |end| end.rd_atomic.responder = 0),
            ("limited", |end| end.port.pkey = 0x7fff),
        ];
        for (word, change) in cases {
            let (mut own, mut peer) = (end(1), end(2));
            own.port.pkey = if word == "limited" { 0x7fff } else { own.port.pkey };
            change(&mut peer);
            let reason = own.agree(&peer).expect_err("incompatible");
            assert!(reason.contains(word), "{reason}");
        }
        let (mut a, mut b) = (end(1), end(2));
        for end in [&mut a, &mut b] {
            end.port.link_layer = LinkLayer::InfiniBand;
            end.port.gid_type = GidType::Ib;
        }
        b.port.gid.0[7] = 1;
        assert!(a.agree(&b).expect_err("two subnets").contains("subnets"));
    }
}
