//! What is told of connections, in one place so that its fields stay the same: `docs/observability.md` lists them.
//! Gathered under the peer's lock, told after it is gone, since a subscriber is the application's code.

use std::sync::Arc;

use verbs_bootstrap::{Generation, Gid, InstanceId, Offer, PortIdentity, Psn, Qpn};

use super::{error::EpochEnd, peer::Epoch};
use crate::{
    fabric::{Fabric, FabricQp},
    proto::link::Link,
};

/// One thing to tell.
pub(crate) enum News {
    /// A PING has come back over the QP.
    Connected { peer: InstanceId, generation: Generation, qpn: Qpn, psn: Psn, path: Option<Path> },
    /// The connection, or the attempt at one, is over.
    Ended { peer: InstanceId, generation: Option<Generation>, qpn: Option<Qpn>, was_proven: bool, cause: Arc<EpochEnd> },
}

/// Between which ports.
pub(crate) struct Path {
    gid: Gid,
    gid_index: u8,
    remote_gid: Gid,
    remote_qpn: Qpn,
    mtu_bytes: u32,
    inline_bytes: u32,
    window: u16,
}

impl Path {
    fn new(qp: &impl FabricQp, local: PortIdentity, remote: &Offer) -> Self {
        Self {
            gid: local.gid,
            gid_index: local.gid_index,
            remote_gid: remote.port.gid,
            remote_qpn: remote.qp.qpn,
            mtu_bytes: local.mtu.min(remote.port.mtu).bytes(),
            inline_bytes: qp.caps().inline_bytes,
            window: remote.window_slabs,
        }
    }
}

impl News {
    /// The parts of an epoch whose link is in use.
    pub(crate) fn connected(
        peer: InstanceId,
        generation: Generation,
        qp: &impl FabricQp,
        psn: Psn,
        local: Option<PortIdentity>,
        remote: Option<&Offer>,
    ) -> Self {
        let path = local.zip(remote).map(|(local, remote)| Path::new(qp, local, remote));
        Self::Connected { peer, generation, qpn: qp.qpn(), psn, path }
    }

    pub(crate) fn ended<F: Fabric>(peer: InstanceId, epoch: Option<&Epoch<F>>, cause: Arc<EpochEnd>) -> Self {
        Self::Ended {
            peer,
            generation: epoch.map(|epoch| epoch.generation),
            qpn: epoch.map(|epoch| epoch.qp.qpn()),
            was_proven: epoch.is_some_and(|epoch| epoch.link.as_ref().is_some_and(Link::is_proven)),
            cause,
        }
    }

    pub(crate) fn tell(self) {
        match self {
            Self::Connected { peer, generation, qpn, psn, path } => {
                let path = path.as_ref();
                tracing::info!(
                    %peer,
                    generation = generation.0,
                    qp = hex(qpn),
                    psn = format_args!("{:#08x}", psn.get()),
                    remote_qp = path.map(|path| hex(path.remote_qpn)),
                    gid = path.map(|path| tracing::field::display(path.gid)),
                    gid_index = path.map(|path| path.gid_index),
                    remote_gid = path.map(|path| tracing::field::display(path.remote_gid)),
                    mtu_bytes = path.map(|path| path.mtu_bytes),
                    inline_bytes = path.map(|path| path.inline_bytes),
                    window = path.map(|path| path.window),
                    "connected"
                );
            }
            Self::Ended { peer, generation, qpn, was_proven, cause } => {
                let (generation, qp) = (generation.map(|generation| generation.0), qpn.map(hex));
                let (reason, cause) = (&*cause, cause.cause());
                if was_proven {
                    tracing::info!(%peer, generation, qp, cause, %reason, "connection ended");
                } else {
                    tracing::info!(%peer, generation, qp, cause, %reason, "connection failed");
                }
            }
        }
    }
}

/// A QP's number as logs print it.
pub(crate) fn hex(qpn: Qpn) -> String {
    format!("{:#08x}", qpn.get())
}
