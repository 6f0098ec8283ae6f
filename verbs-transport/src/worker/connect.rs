//! How an epoch comes to be: its QP, its offer, RTS, proof, and the sockets that live as long as it does. The dialing
//! half is in `dial`, the accepting half in `accept`; both share what is here.

use std::sync::Arc;

use tokio::sync::watch;
use verbs_bootstrap::{Generation, LifeSocket, Net, Offer, Plane, PortIdentity, QpEndpoint, RdAtomic, Refusal, Status};

use super::{
    error::{EpochEnd, SendError},
    layer::{FEATURE_PACK, FEATURE_RMA},
    news::hex,
    peer::{Effects, Epoch, Peer, PeerState},
    shared::Shared,
};
use crate::{
    fabric::{CreateQpError, Fabric, FabricQp, QpCaps, QpPath},
    proto::{
        credit::{WINDOW_MAX, WINDOW_MIN},
        frame::Lane,
        link::{Link, LinkLimits},
    },
};

pub(super) type StreamOf<F> = <<F as Fabric>::Net as Net>::Stream;

/// Inline sizes asked for, one after the other, until the device grants one.
const INLINE_STEPS: [u32; 7] = [828, 512, 256, 220, 128, 60, 0];

/// Smallest receive slab that a peer may offer: a header and something to carry.
const SLAB_MIN_BYTES: u32 = 64;

/// READs at once: each side asks for no more than the other answers.
pub(super) fn agreed_rd_atomic(ours: RdAtomic, theirs: RdAtomic) -> RdAtomic {
    RdAtomic { initiator: ours.initiator.min(theirs.responder), responder: ours.responder.min(theirs.initiator) }
}

impl<F: Fabric> Shared<F> {
    /// The QP of epoch `generation`, made if it is not there.
    pub(super) fn ensure_qp(
        &self,
        peer: &Arc<Peer<F>>,
        state: &mut PeerState<F>,
        generation: Generation,
    ) -> Result<(), EpochEnd> {
        if state.epoch.as_ref().is_some_and(|epoch| epoch.generation == generation) {
            return Ok(());
        }
        self.check_cq_room()?;
        let rx_window = self.shares().grant(self.config.window_slabs).map_err(EpochEnd::Exhausted)?;
        let qp = match self.create_qp() {
            Ok(qp) => Arc::new(qp),
            Err(error) => {
                self.shares().release(rx_window);
                return Err(EpochEnd::CreateQp(error));
            }
        };
        self.counters.epochs_begun.add(1);
        self.add_route(qp.qpn().get(), peer);
        state.epoch = Some(Epoch {
            generation,
            psn: self.random_psn(),
            qp,
            rx_window,
            link: None,
            remote: None,
            local: None,
            up: watch::Sender::new(false),
            lives: Vec::new(),
            lives_open: 0,
            proof_told: false,
            tail_seen: None,
            moved: None,
            pongs: watch::Sender::new(0),
        });
        Ok(())
    }

    /// A CQ overrun ends every connection: refuse a QP whose completions, flushes included, might not fit.
    fn check_cq_room(&self) -> Result<(), EpochEnd> {
        let (cq_depth, receive_slabs) = (self.fabric.limits().cq_depth, self.fabric.slabs().receive_slabs);
        let (qps, send_wrs) = (self.qps(), self.config.send_wrs);
        let need = u64::from(receive_slabs) + (qps as u64 + 1) * u64::from(send_wrs);
        if need > u64::from(cq_depth) {
            return Err(EpochEnd::CqFull { cq_depth, receive_slabs, qps, send_wrs });
        }
        Ok(())
    }

    /// A QP with the most inline that the device grants; what worked once is asked for first the next time.
    fn create_qp(&self) -> Result<F::Qp, CreateQpError> {
        let mut inline_bytes = self.inline_request();
        loop {
            match self.fabric.create_qp(QpCaps { send_wrs: self.config.send_wrs, inline_bytes }) {
                Ok(qp) => {
                    self.set_inline_request(inline_bytes);
                    return Ok(qp);
                }
                Err(error @ CreateQpError::Unsupported { .. }) => {
                    let Some(step) = INLINE_STEPS.into_iter().find(|&step| step < inline_bytes) else {
                        return Err(error);
                    };
                    tracing::debug!(asked = inline_bytes, next = step, "the device refused so much inline");
                    inline_bytes = step;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What this side says to the peer about its epoch, and about its port as the attempt has found it.
    pub(super) fn offer(&self, epoch: &Epoch<F>, to: &Addressee, port: PortIdentity) -> Offer {
        Offer {
            from: self.me.instance,
            from_incarnation: self.me.incarnation,
            to: to.instance,
            to_incarnation: to.incarnation,
            generation: epoch.generation,
            echoed_generation: to.generation,
            port,
            plane: Plane::Messaging,
            qp: QpEndpoint { qpn: epoch.qp.qpn(), psn: epoch.psn },
            rd_atomic: self.fabric.limits().rd_atomic,
            slab_bytes: self.fabric.slabs().receive_bytes,
            window_slabs: epoch.rx_window,
            eager_max_bytes: self.config.eager_max_bytes,
            features: self.layers.features(),
        }
    }
}

/// Whom an offer is for: the run that is meant, and its epoch as far as it is known.
pub(super) struct Addressee {
    pub(super) instance: verbs_bootstrap::InstanceId,
    pub(super) incarnation: verbs_bootstrap::Incarnation,
    pub(super) generation: Generation,
}

/// An offer that no connection can be made of.
pub(super) fn check_offer(offer: &Offer) -> Result<(), Refusal> {
    let bad = |detail| Err(Refusal { status: Status::BadOffer, detail });
    if offer.slab_bytes < SLAB_MIN_BYTES {
        return bad(format!("receive slabs of {} bytes, at least {SLAB_MIN_BYTES} are needed", offer.slab_bytes));
    }
    if !(WINDOW_MIN..=WINDOW_MAX).contains(&offer.window_slabs) {
        let window = offer.window_slabs;
        return bad(format!("a window of {window} slabs, {WINDOW_MIN} to {WINDOW_MAX} are possible"));
    }
    Ok(())
}

/// INIT to RTS, then the link. Called by the one half that the exchange told to.
pub(super) async fn bring_up<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    generation: Generation,
    remote: &Offer,
    dialed: bool,
) -> Result<(), EpochEnd> {
    let port = shared.fabric.known_port();
    let (qp, path) = {
        let state = peer.lock();
        let epoch = of_generation(&state, generation).ok_or(EpochEnd::Replaced)?;
        (epoch.qp.clone(), shared.path(epoch, &port, remote))
    };
    let qpn = qp.qpn();
    F::Qp::connect(qp, path).await.map_err(EpochEnd::ConnectQp)?;
    tracing::debug!(
        qp = hex(qpn),
        psn = format_args!("{:#08x}", path.local_psn.get()),
        remote_qp = hex(path.remote.qpn),
        remote_psn = format_args!("{:#08x}", path.remote.psn.get()),
        gid = %port.gid,
        gid_index = port.gid_index,
        remote_gid = %remote.port.gid,
        mtu_bytes = path.mtu.bytes(),
        "QP in RTS"
    );
    let mut effects = Effects::default();
    {
        let mut state = peer.lock();
        if of_generation(&state, generation).is_none() || !state.exchange.on_connected(generation) {
            return Err(EpochEnd::Replaced);
        }
        drop_unfit(shared, &mut state, remote, &mut effects);
        if let Some(epoch) = &mut state.epoch {
            let limits = shared.link_limits(epoch, remote);
            epoch.link = Some(Link::new(limits, dialed));
            epoch.remote = Some(remote.clone());
            epoch.local = Some(port);
            epoch.up.send_replace(true);
            epoch.lives.push(spawn_proof_timer(shared, peer, generation, &path));
        }
        peer.pump(&mut state, shared, &mut effects);
    }
    peer.changed.notify_waiters();
    effects.run(shared);
    Ok(())
}

impl<F: Fabric> Shared<F> {
    fn path(&self, epoch: &Epoch<F>, port: &PortIdentity, remote: &Offer) -> QpPath {
        QpPath {
            remote: remote.qp,
            remote_port: remote.port,
            local_psn: epoch.psn,
            mtu: port.mtu.min(remote.port.mtu),
            rd_atomic: agreed_rd_atomic(self.fabric.limits().rd_atomic, remote.rd_atomic),
            timers: self.config.timers,
        }
    }

    fn link_limits(&self, epoch: &Epoch<F>, remote: &Offer) -> LinkLimits {
        let granted = epoch.qp.caps();
        LinkLimits {
            tx_window: remote.window_slabs,
            rx_window: epoch.rx_window,
            send_bytes: remote.slab_bytes.min(self.fabric.slabs().send_bytes),
            inline_bytes: granted.inline_bytes.min(self.config.inline_threshold_bytes),
            receive_max_bytes: self.config.eager_max_bytes,
            send_wrs: granted.send_wrs.min(self.config.send_wrs),
            signal_every: self.config.signal_every,
            packs: self.config.pack_waiting && remote.features & FEATURE_PACK != 0,
        }
    }
}

/// Frames that were queued before anything was known of the peer, and exceed its ceiling or are for a layer that it does
/// not have.
fn drop_unfit<F: Fabric>(shared: &Shared<F>, state: &mut PeerState<F>, remote: &Offer, effects: &mut Effects) {
    let max = shared.config.eager_max_bytes.min(remote.eager_max_bytes) as usize;
    let has_layer = remote.features & FEATURE_RMA != 0;
    let mut at = 0;
    while at < state.queue.len() {
        let (bytes, lane) = (state.queue[at].body_bytes(), state.queue[at].lane);
        let error = if bytes > max {
            SendError::TooLarge { bytes, max }
        } else if lane != Lane::Application && !has_layer {
            SendError::NoSuchLane { peer: remote.from, lane }
        } else {
            at += 1;
            continue;
        };
        if let Some(frame) = state.queue.remove(at) {
            effects.failed(frame, error);
        }
    }
    state.fail_unfit_in_gate(max, has_layer, effects);
}

/// Ends an epoch over whose QP no PING came back in time.
fn spawn_proof_timer<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    generation: Generation,
    path: &QpPath,
) -> tokio::task::AbortHandle {
    let after = shared.config.proof_deadline;
    let port = shared.fabric.known_port();
    let (remote, mtu_bytes) = (path.remote_port.gid, path.mtu.bytes());
    let (weak, peer) = (Arc::downgrade(shared), peer.clone());
    shared.spawn(async move {
        tokio::time::sleep(after).await;
        let Some(shared) = weak.upgrade() else { return };
        let proven = {
            let state = peer.lock();
            let epoch = of_generation(&state, generation);
            epoch.is_none_or(|epoch| epoch.link.as_ref().is_some_and(Link::is_proven))
        };
        if !proven {
            let cause = EpochEnd::NotProven { after, local: port.gid, gid_index: port.gid_index, remote, mtu_bytes };
            shared.end_epoch_of(&peer, generation, cause);
        }
    })
}

/// Waits until the other half has brought this epoch up; `false` when it ended.
pub(super) async fn wait_up<F: Fabric>(peer: &Arc<Peer<F>>, generation: Generation) -> bool {
    let up = of_generation(&peer.lock(), generation).map(|epoch| epoch.up.subscribe());
    match up {
        Some(mut up) => up.wait_for(|up| *up).await.is_ok(),
        None => false,
    }
}

pub(super) fn of_generation<F: Fabric>(state: &PeerState<F>, generation: Generation) -> Option<&Epoch<F>> {
    state.epoch.as_ref().filter(|epoch| epoch.generation == generation)
}

/// The peer's QP is in RTS: what was held back may go.
pub(super) fn peer_ready<F: Fabric>(shared: &Arc<Shared<F>>, peer: &Arc<Peer<F>>, generation: Generation) {
    let mut effects = Effects::default();
    {
        let mut state = peer.lock();
        let epoch = state.epoch.as_mut().filter(|epoch| epoch.generation == generation);
        if let Some(link) = epoch.and_then(|epoch| epoch.link.as_mut()) {
            link.on_peer_ready();
            peer.pump(&mut state, shared, &mut effects);
        }
    }
    effects.run(shared);
}

/// Keeps the bootstrap socket for the epoch's life. When its last one closes, the peer is gone.
pub(super) fn attach_life<F: Fabric>(
    shared: &Arc<Shared<F>>,
    peer: &Arc<Peer<F>>,
    generation: Generation,
    mut life: LifeSocket<StreamOf<F>>,
) {
    let mut state = peer.lock();
    let Some(epoch) = state.epoch.as_mut().filter(|epoch| epoch.generation == generation) else { return };
    epoch.lives_open += 1;
    let (weak, watched) = (Arc::downgrade(shared), peer.clone());
    let watch = shared.spawn(async move {
        let end = life.closed().await;
        tracing::debug!(peer = %watched.id, ?end, "bootstrap socket closed");
        let Some(shared) = weak.upgrade() else { return };
        let last = {
            let mut state = watched.lock();
            let epoch = state.epoch.as_mut().filter(|epoch| epoch.generation == generation);
            epoch.is_some_and(|epoch| {
                epoch.lives_open -= 1;
                epoch.lives_open == 0
            })
        };
        if last {
            shared.end_epoch_of(&watched, generation, EpochEnd::PeerClosed);
        }
    });
    epoch.lives.push(watch);
}
