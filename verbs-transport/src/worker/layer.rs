//! What a layer above the messages plugs into: frames of its own, the second plane of the bootstrap, and news of peers.
//!
//! Attached before start. The worker holds what is attached for its whole life, so it should hold a
//! [`WeakWorker`] in return.

use std::{
    fmt,
    sync::{Arc, OnceLock, PoisonError, RwLock, Weak},
};

use bytes::Bytes;
use verbs_bootstrap::{
    AcceptError, Endpoint, Generation, Identity, Incarnation, InstanceId, LifeSocket, Net, Offer, PortIdentity,
    RdAtomic, Refusal,
};

use super::{
    Config, EpochEnd, Owner, Worker,
    admission::{SendOutcome, contain},
    connect::agreed_rd_atomic,
    inbound::Borrowed,
    shared::Life,
};
use crate::{
    BoxFuture,
    fabric::Fabric,
    proto::{
        frame::{Lane, MessageType},
        link::SendErrorHandler,
    },
};

/// Bit 0 of [`Offer::features`]: its sender serves rendezvous requests and bulk exchanges. Set while a layer is
/// attached.
pub const FEATURE_RMA: u64 = 1;

/// Bit 1 of [`Offer::features`]: its sender takes several frames in one SEND. Always set by this version.
pub const FEATURE_PACK: u64 = 1 << 1;

/// Takes the frames of [`Lane::Service`], on the driver: what takes longer must be handed on, or nothing else moves on
/// this worker. A panic is logged and goes no further.
pub trait ServiceHandler: Send + Sync + 'static {
    /// One frame; those of a peer come in the order in which it sent them.
    fn on_frame(&self, frame: Borrowed<'_>);
}

/// The accepting half of the bulk plane: what [`verbs_bootstrap::Acceptor`] is to the listener. The worker's listener
/// serves both planes.
pub trait BulkAcceptor<S>: Send + Sync + 'static {
    /// See [`verbs_bootstrap::Acceptor::must_prove_alive`].
    fn must_prove_alive(&self, hello: &Offer) -> bool;

    /// See [`verbs_bootstrap::Acceptor::on_hello`]. `hello` is for this instance and names a bulk QP on a port that ours
    /// can meet; its runs and generations are not checked.
    fn on_hello(&self, hello: Offer) -> BoxFuture<'static, Result<Offer, Refusal>>;

    /// See [`verbs_bootstrap::Acceptor::on_ready`].
    fn on_ready(&self, hello: Offer, reply: Offer, life: LifeSocket<S>);

    /// See [`verbs_bootstrap::Acceptor::on_abandoned`].
    fn on_abandoned(&self, hello: Offer, reply: Offer, why: AcceptError);
}

/// Hears of the message connections of a worker. Called on any thread, under no lock; must not block.
pub trait PeerObserver: Send + Sync + 'static {
    /// A connection is proven.
    fn on_connected(&self, peer: InstanceId, run: &PeerRun) {
        let _ = (peer, run);
    }

    /// A connection, or the attempt at one, has ended. [`EpochEnd::PeerRestarted`], [`EpochEnd::Unregistered`],
    /// [`EpochEnd::ShuttingDown`] and [`EpochEnd::DeviceLost`] are for good; after any other the same run of the peer
    /// may come back. `run` is the peer's, as far as it was known.
    fn on_ended(&self, peer: InstanceId, run: Option<Incarnation>, cause: &Arc<EpochEnd>);

    /// The device says that a QP which is none of the worker's own went to ERR: a bulk QP, most likely. NICs say so,
    /// Soft-RoCE never does.
    fn on_qp_fatal(&self, qpn: u32) {
        let _ = qpn;
    }

    /// The worker begins to shut down. Its connections end after this.
    fn on_shutdown(&self) {}
}

/// One run of a peer, as its offer tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerRun {
    /// Its run.
    pub incarnation: Incarnation,
    /// Its epoch toward us.
    pub generation: Generation,
    /// Its feature bits.
    pub features: u64,
    /// Its port.
    pub port: PortIdentity,
    /// READs at once between the two: as initiator what we may ask, as responder what we answer.
    pub rd_atomic: RdAtomic,
}

/// What is known of a peer, for a layer that is to reach it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PeerFacts {
    /// Who.
    pub peer: InstanceId,
    /// Its address as it was registered here; `None` for a peer that only came by itself.
    pub address: Option<Endpoint>,
    /// The run that a dial would ask for.
    pub target: Option<Incarnation>,
    /// The run that is connected now.
    pub run: Option<PeerRun>,
}

/// Something could not be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// Peers that are connected already would not know of it.
    #[error("layers are attached before the worker is started")]
    Started,
    /// There can be only one.
    #[error("the worker has a {what} already")]
    Occupied {
        /// Of what.
        what: &'static str,
    },
}

/// What is attached to a worker.
pub(crate) struct Layers<S> {
    service: OnceLock<Arc<dyn ServiceHandler>>,
    bulk: OnceLock<Arc<dyn BulkAcceptor<S>>>,
    observers: RwLock<Vec<Arc<dyn PeerObserver>>>,
}

impl<S> Default for Layers<S> {
    fn default() -> Self {
        Self { service: OnceLock::new(), bulk: OnceLock::new(), observers: RwLock::default() }
    }
}

impl<S> Layers<S> {
    /// For this side's offers.
    pub(crate) fn features(&self) -> u64 {
        FEATURE_PACK | if self.any() { FEATURE_RMA } else { 0 }
    }

    /// Whether anything is attached that knows what to do with frames of other lanes.
    pub(crate) fn any(&self) -> bool {
        self.service.get().is_some() || self.bulk.get().is_some()
    }

    pub(crate) fn service(&self) -> Option<&Arc<dyn ServiceHandler>> {
        self.service.get()
    }

    pub(crate) fn bulk(&self) -> Option<&Arc<dyn BulkAcceptor<S>>> {
        self.bulk.get()
    }

    /// Whether anybody is to be told of connections.
    pub(crate) fn is_watched(&self) -> bool {
        !self.observers.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub(crate) fn tell(&self, each: impl Fn(&dyn PeerObserver)) {
        let observers = self.observers.read().unwrap_or_else(PoisonError::into_inner).clone();
        for observer in observers {
            contain("observer", || each(&*observer));
        }
    }
}

/// A worker that is not kept alive by this.
pub struct WeakWorker<F: Fabric>(Weak<Owner<F>>);

impl<F: Fabric> WeakWorker<F> {
    /// The worker, unless its last clone is gone.
    pub fn upgrade(&self) -> Option<Worker<F>> {
        self.0.upgrade().map(|owner| Worker { owner })
    }
}

impl<F: Fabric> Clone for WeakWorker<F> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<F: Fabric> fmt::Debug for WeakWorker<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakWorker")
    }
}

impl<F: Fabric> Worker<F> {
    /// A handle that does not keep the worker alive.
    pub fn downgrade(&self) -> WeakWorker<F> {
        WeakWorker(Arc::downgrade(&self.owner))
    }

    /// Takes the frames of [`Lane::Service`] from now on; without a handler they are counted and dropped.
    ///
    /// # Errors
    ///
    /// [`AttachError`].
    pub fn attach_service(&self, handler: Arc<dyn ServiceHandler>) -> Result<(), AttachError> {
        self.not_started()?;
        let what = "service handler";
        self.shared().layers.service.set(handler).map_err(|_| AttachError::Occupied { what })
    }

    /// Answers the hellos of the bulk plane from now on; without an acceptor they are refused.
    ///
    /// # Errors
    ///
    /// [`AttachError`].
    pub fn attach_bulk(&self, acceptor: Arc<dyn BulkAcceptor<<F::Net as Net>::Stream>>) -> Result<(), AttachError> {
        self.not_started()?;
        let what = "bulk acceptor";
        self.shared().layers.bulk.set(acceptor).map_err(|_| AttachError::Occupied { what })
    }

    /// Tells `observer` of all connections from now on. There may be several.
    ///
    /// # Errors
    ///
    /// [`AttachError::Started`].
    pub fn attach_observer(&self, observer: Arc<dyn PeerObserver>) -> Result<(), AttachError> {
        self.not_started()?;
        self.shared().layers.observers.write().unwrap_or_else(PoisonError::into_inner).push(observer);
        Ok(())
    }

    fn not_started(&self) -> Result<(), AttachError> {
        if self.shared().life() == Life::New { Ok(()) } else { Err(AttachError::Started) }
    }

    /// As [`Worker::send`], in a lane: [`Lane::Service`] and [`Lane::Indirect`] are for peers whose
    /// [`PeerRun::features`] have [`FEATURE_RMA`]; to any other the frame comes back with
    /// [`SendError::NoSuchLane`](crate::SendError::NoSuchLane). A service frame may also go to a peer that nobody
    /// registered here, as long as it is connected.
    pub fn send_on(
        &self,
        lane: Lane,
        peer: InstanceId,
        header: Bytes,
        payload: Bytes,
        kind: MessageType,
        on_error: Arc<dyn SendErrorHandler>,
    ) -> SendOutcome {
        self.send_frame(peer, crate::proto::link::Frame { kind, lane, header, payload, on_error })
    }

    /// This worker's name and run.
    pub fn identity(&self) -> Identity {
        self.shared().me
    }

    /// The configuration that it runs with.
    pub fn config(&self) -> &Config {
        &self.shared().config
    }

    /// What is known of a peer; `None` for a stranger.
    pub fn peer_facts(&self, peer: InstanceId) -> Option<PeerFacts> {
        let shared = self.shared();
        let found = shared.find_peer(peer)?;
        let state = found.lock();
        let proven = state.epoch.as_ref().filter(|epoch| epoch.proof_told);
        let run = proven.and_then(|epoch| epoch.remote.as_ref()).map(|remote| shared.run_of(remote));
        Some(PeerFacts { peer, address: state.address.clone(), target: state.exchange.target(), run })
    }
}

impl<F: Fabric> super::shared::Shared<F> {
    pub(crate) fn run_of(&self, remote: &Offer) -> PeerRun {
        PeerRun {
            incarnation: remote.from_incarnation,
            generation: remote.generation,
            features: remote.features,
            port: remote.port,
            rd_atomic: agreed_rd_atomic(self.fabric.limits().rd_atomic, remote.rd_atomic),
        }
    }
}
