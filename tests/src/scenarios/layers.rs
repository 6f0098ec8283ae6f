//! What a layer above the messages plugs into: lanes, the service handler, observers, feature bits.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use verbs_bootstrap::{Incarnation, InstanceId, Status};
use verbs_transport::{
    AttachError, Borrowed, EpochEnd, FEATURE_RMA, Lane, MessageType, PeerObserver, PeerRun, SendError, ServiceHandler,
    Worker, fabric::Fabric,
};

use crate::{
    bulk::{until, within},
    lab::Lab,
    node::{Node, next},
};

/// A service frame: who, as what, header, payload.
type Heard = (InstanceId, MessageType, Vec<u8>, Vec<u8>);

/// Writes down what a layer hears.
#[derive(Default)]
struct Layer {
    frames: Mutex<Vec<Heard>>,
    connected: Mutex<Vec<(InstanceId, PeerRun)>>,
    ended: Mutex<Vec<(InstanceId, Option<Incarnation>, &'static str)>>,
    shutdowns: Mutex<u32>,
}

impl ServiceHandler for Layer {
    fn on_frame(&self, frame: Borrowed<'_>) {
        assert_eq!(frame.lane, Lane::Service);
        self.frames.lock().unwrap().push((frame.peer, frame.kind, frame.header.to_vec(), frame.payload.to_vec()));
    }
}

impl PeerObserver for Layer {
    fn on_connected(&self, peer: InstanceId, run: &PeerRun) {
        self.connected.lock().unwrap().push((peer, *run));
    }

    fn on_ended(&self, peer: InstanceId, run: Option<Incarnation>, cause: &Arc<EpochEnd>) {
        self.ended.lock().unwrap().push((peer, run, cause.cause()));
    }

    fn on_shutdown(&self) {
        *self.shutdowns.lock().unwrap() += 1;
    }
}

async fn layered<L: Lab>(lab: &L, n: u32) -> (Node<L::F>, Arc<Layer>) {
    let worker = Worker::new(lab.config(n), lab.fabric(n)).expect("a valid configuration");
    let layer = Arc::<Layer>::default();
    worker.attach_service(layer.clone()).expect("before start");
    worker.attach_observer(layer.clone()).expect("before start");
    let twice = worker.attach_service(layer.clone());
    assert_eq!(twice, Err(AttachError::Occupied { what: "service handler" }));
    let inbound = worker.start().await.expect("it starts");
    assert_eq!(worker.attach_observer(layer.clone()), Err(AttachError::Started));
    (Node { worker, inbound, errors: Arc::default() }, layer)
}

fn send_on<F: Fabric>(from: &Node<F>, lane: Lane, to: InstanceId, text: &'static str, payload: impl Into<Bytes>) {
    let outcome = from.worker.send_on(lane, to, text.into(), payload.into(), MessageType::Message, from.errors.clone());
    drop(outcome);
}

/// Service frames go to the handler alone, of any size and in order; indirect ones reach the application with their mark,
/// in order among the others.
pub async fn each_lane_goes_its_way<L: Lab>(lab: Arc<L>) {
    let ((a, _), (mut b, of_b)) = (layered(&*lab, 1).await, layered(&*lab, 2).await);
    a.register(&b);
    let large = vec![7_u8; 50_000]; // seven SENDs
    send_on(&a, Lane::Application, b.id(), "one", "");
    send_on(&a, Lane::Service, b.id(), "asked", large.clone());
    send_on(&a, Lane::Indirect, b.id(), "two", "where to fetch it");
    send_on(&a, Lane::Indirect, b.id(), "three", large.clone());
    send_on(&a, Lane::Application, b.id(), "four", large.clone());
    send_on(&a, Lane::Service, b.id(), "again", "");
    let mut seen = Vec::new();
    for _ in 0..4 {
        let frame = next(&mut b.inbound.message).await;
        seen.push((frame.lane, String::from_utf8_lossy(&frame.header).into_owned(), frame.payload.len()));
    }
    let (app, indirect) = (Lane::Application, Lane::Indirect);
    let expected = [(app, "one", 0), (indirect, "two", 17), (indirect, "three", 50_000), (app, "four", 50_000)];
    assert_eq!(seen, expected.map(|(lane, header, len)| (lane, header.to_owned(), len)));
    until("both service frames", || of_b.frames.lock().unwrap().len() == 2).await;
    let frames = std::mem::take(&mut *of_b.frames.lock().unwrap());
    let kind = MessageType::Message;
    assert_eq!(frames[0], (a.id(), kind, b"asked".to_vec(), large));
    assert_eq!(frames[1], (a.id(), kind, b"again".to_vec(), Vec::new()));
    let (sent, received) = (a.worker.stats(), b.worker.stats());
    assert_eq!((sent.sent.total(), sent.service_sent), (4, 2));
    assert_eq!((received.received.total(), received.service_received, received.lane_dropped), (4, 2, 0));
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
}

/// Frames for a layer that the peer has not come back, each with its reason; the connection goes on.
pub async fn lanes_of_no_layer_never_reach_the_application<L: Lab>(lab: Arc<L>) {
    let ((a, of_a), mut b) = (layered(&*lab, 1).await, Node::start(&*lab, 2).await);
    a.register(&b);
    send_on(&a, Lane::Service, b.id(), "asked", "");
    send_on(&a, Lane::Indirect, b.id(), "indirect", "descriptor");
    send_on(&a, Lane::Application, b.id(), "plain", "");
    assert_eq!(&next(&mut b.inbound.message).await.header[..], b"plain");
    let told: Vec<_> = a.errors.all().iter().map(|(header, _, error)| (header.clone(), error.to_string())).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    for ((header, error), (sent, lane)) in told.iter().zip([("asked", "service"), ("indirect", "indirect")]) {
        assert!(header == sent && error.contains(&format!("no layer for {lane} frames")), "{told:?}");
    }
    assert_eq!((b.worker.stats().lane_dropped, b.worker.stats().received.total()), (0, 1));
    let features = |run: &PeerRun| run.features & FEATURE_RMA != 0;
    let of_b = a.worker.peer_facts(b.id()).expect("known").run.expect("connected");
    let of_a_there = b.worker.peer_facts(a.id()).expect("known").run.expect("connected");
    assert!(!features(&of_b) && features(&of_a_there), "it is known beforehand who has a layer");
    assert_eq!(of_a.connected.lock().unwrap().len(), 1);
    a.stop().await;
    b.stop().await;
}

/// A request may be answered to a peer that nobody registered, by the connection by which it came.
pub async fn a_service_frame_answers_a_stranger<L: Lab>(lab: Arc<L>) {
    let ((a, of_a), (b, of_b)) = (layered(&*lab, 1).await, layered(&*lab, 2).await);
    a.register(&b);
    send_on(&b, Lane::Service, a.id(), "too early", "");
    send_on(&a, Lane::Service, b.id(), "asked", "");
    until("the request", || of_b.frames.lock().unwrap().len() == 1).await;
    send_on(&b, Lane::Service, a.id(), "answered", "");
    until("the answer", || of_a.frames.lock().unwrap().len() == 1).await;
    // An application's frame still needs a registration.
    send_on(&b, Lane::Application, a.id(), "not so", "");
    let refused: Vec<_> = b.errors.all().into_iter().map(|(header, _, error)| (header, error)).collect();
    let headers: Vec<_> = refused.iter().map(|(header, _)| header.clone()).collect();
    assert_eq!(headers, ["too early", "not so"]);
    assert!(refused.iter().all(|(_, error)| matches!(error, SendError::PeerNotRegistered { .. })));
    a.stop().await;
    b.stop().await;
}

/// Requests of the layer are answered while the application drains: what is in hand may need them.
pub async fn service_frames_pass_while_draining<L: Lab>(lab: Arc<L>) {
    let ((mut a, _), (b, of_b)) = (layered(&*lab, 1).await, layered(&*lab, 2).await);
    a.register(&b);
    within(a.worker.ensure_connected(b.id())).await.expect("connected");
    b.worker.config().drain.raise();
    b.worker.begin_drain();
    send_on(&a, Lane::Service, b.id(), "asked", "");
    send_on(&a, Lane::Application, b.id(), "turned away", "");
    assert_eq!(&next(&mut a.inbound.shutdown).await.header[..], b"turned away");
    assert_eq!(of_b.frames.lock().unwrap().len(), 1);
    a.stop().await;
    b.stop().await;
}

/// Observers hear of each connection and of its end, with the run; then of the shutdown.
pub async fn observers_hear_of_connections_and_their_ends<L: Lab>(lab: Arc<L>) {
    let ((a, of_a), (b, of_b)) = (layered(&*lab, 1).await, layered(&*lab, 2).await);
    a.register(&b);
    within(a.worker.ensure_connected(b.id())).await.expect("connected");
    until("B has heard", || of_b.connected.lock().unwrap().len() == 1).await;
    let (peer, run) = of_a.connected.lock().unwrap()[0];
    assert_eq!((peer, run.incarnation), (b.id(), b.worker.identity().incarnation));
    assert_eq!(run.rd_atomic, a.worker.describe(b.id()).and_then(|path| path.rd_atomic).expect("connected"));
    assert!(a.worker.unregister(b.id()));
    let ended = of_a.ended.lock().unwrap().clone();
    assert_eq!(ended, [(b.id(), Some(run.incarnation), "unregistered")]);
    until("B has heard of the end", || !of_b.ended.lock().unwrap().is_empty()).await;
    a.stop().await;
    b.stop().await;
    assert_eq!((*of_a.shutdowns.lock().unwrap(), *of_b.shutdowns.lock().unwrap()), (1, 1));
}

/// A bulk hello to a worker without an acceptor is refused by its name, and touches no message connection.
pub async fn a_bulk_hello_without_an_acceptor_is_refused<L: Lab>(lab: Arc<L>) {
    use verbs_bootstrap::{DialError, Generation, Offer, Plane, Psn, QpEndpoint, Qpn, RdAtomic, dial};
    let (a, b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
    a.register(&b);
    within(a.worker.ensure_connected(b.id())).await.expect("connected");
    let there = b.worker.address().endpoint().expect("it listens");
    let hello = Offer {
        from: a.id(),
        from_incarnation: a.worker.identity().incarnation,
        to: there.instance,
        to_incarnation: there.incarnation,
        generation: Generation(1),
        echoed_generation: Generation(0),
        port: a.worker.fabric().port(),
        plane: Plane::Bulk,
        qp: QpEndpoint { qpn: Qpn::new(0x777).expect("24 bits"), psn: Psn::from_random(1) },
        rd_atomic: RdAtomic { initiator: 1, responder: 1 },
        slab_bytes: 0,
        window_slabs: 1,
        eager_max_bytes: 0,
        features: FEATURE_RMA,
    };
    let config = verbs_bootstrap::Config::default();
    let refused = within(dial(a.worker.fabric().net(), there.bootstrap[0], &hello, &config)).await.map(drop);
    assert!(matches!(refused, Err(DialError::Refused { status: Status::NoRoute, .. })), "{refused:?}");
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!((b.worker.stats().connections, b.worker.stats().epochs_ended), (1, 0));
    a.errors.assert_none();
    a.stop().await;
    b.stop().await;
}
