//! Offers and an acceptor for tests.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::{
    life::LifeSocket,
    listen::{AcceptError, Acceptor},
    status::Refusal,
    types::{
        Generation, Gid, GidType, Incarnation, InstanceId, LinkLayer, Mtu, Offer, Plane, PortIdentity, Psn, QpEndpoint,
        Qpn, RdAtomic,
    },
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
        plane: Plane::Messaging,
        qp: endpoint(qpn),
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

/// An acceptor that answers every hello and writes down what it hears.
pub(crate) struct Recorder<S> {
    /// What `on_hello` does after `pause`.
    pub(crate) answer: Result<Offer, Refusal>,
    pub(crate) pause: Duration,
    pub(crate) must_prove_alive: AtomicBool,
    pub(crate) heard: Mutex<Vec<Heard<S>>>,
}

#[derive(Debug)]
pub(crate) enum Heard<S> {
    Hello(Offer),
    Ready(Offer, LifeSocket<S>),
    Abandoned(AcceptError),
}

impl<S> Recorder<S> {
    pub(crate) fn new(answer: Result<Offer, Refusal>) -> Self {
        Self { answer, pause: Duration::ZERO, must_prove_alive: AtomicBool::new(true), heard: Mutex::new(Vec::new()) }
    }

    pub(crate) fn take(&self) -> Vec<Heard<S>> {
        std::mem::take(&mut self.heard.lock().expect("no test panics holding it"))
    }

    fn note(&self, heard: Heard<S>) {
        self.heard.lock().expect("no test panics holding it").push(heard);
    }
}

impl<S: Send + 'static> Acceptor for Recorder<S> {
    type Stream = S;

    fn must_prove_alive(&self, _hello: &Offer) -> bool {
        self.must_prove_alive.load(Relaxed)
    }

    async fn on_hello(&self, hello: Offer) -> Result<Offer, Refusal> {
        self.note(Heard::Hello(hello));
        tokio::time::sleep(self.pause).await;
        self.answer.clone()
    }

    fn on_ready(&self, hello: Offer, _reply: Offer, life: LifeSocket<S>) {
        self.note(Heard::Ready(hello, life));
    }

    fn on_abandoned(&self, _hello: Offer, _reply: Offer, why: AcceptError) {
        self.note(Heard::Abandoned(why));
    }
}
