//! Peers that break the protocol, and strangers at the bootstrap's port.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use verbs_bootstrap::{
    Endpoint, Generation, Incarnation, InstanceId, LifeSocket, Net, NetListener, Offer, Plane, Psn, QpEndpoint,
    RdAtomic, WorkerAddress, dial,
};
use verbs_transport::{
    MessageType, SendError,
    fabric::{Fabric, FabricQp, QpCaps, QpPath, RecvSlab, SendData, SendSlab, SendWr, SlabSizes, WrSeq},
};

use crate::{
    lab::Lab,
    node::{Node, next},
};

type StreamOf<F> = <<F as Fabric>::Net as Net>::Stream;

/// A peer made of bare hands: one QP, connected to a worker by the bootstrap.
struct Bare<F: Fabric> {
    fabric: F,
    qp: Arc<F::Qp>,
    sent: u64,
    slabs: Vec<SendSlab>,
    _life: LifeSocket<StreamOf<F>>,
    _receives: Vec<RecvSlab>,
}

impl<F: Fabric> Bare<F> {
    async fn connect(fabric: F, to: &Endpoint, instance: u128, timers: verbs_transport::fabric::QpTimers) -> Self {
        let (mut receives, slabs) = fabric.take_slabs();
        fabric.post_receives(&mut receives).expect("receives are posted");
        let qp = Arc::new(fabric.create_qp(QpCaps { send_wrs: 31, inline_bytes: 60 }).expect("a QP"));
        let psn = Psn::from_random(0x12_3456);
        let (limits, port) = (fabric.limits(), fabric.port());
        let hello = Offer {
            from: InstanceId(instance),
            from_incarnation: Incarnation(77),
            to: to.instance,
            to_incarnation: to.incarnation,
            generation: Generation(1),
            echoed_generation: Generation(0),
            port,
            plane: Plane::Messaging,
            qp: QpEndpoint { qpn: qp.qpn(), psn },
            rd_atomic: limits.rd_atomic,
            slab_bytes: fabric.slabs().receive_bytes,
            window_slabs: 64,
            eager_max_bytes: 1 << 20,
            features: 0,
        };
        let config = verbs_bootstrap::Config::default();
        let dialed = dial(fabric.net(), to.bootstrap[0], &hello, &config).await.expect("the worker answers");
        let reply = dialed.reply.clone();
        let path = QpPath {
            remote: reply.qp,
            remote_port: reply.port,
            local_psn: psn,
            mtu: port.mtu.min(reply.port.mtu),
            rd_atomic: RdAtomic { initiator: 1, responder: 1 },
            timers,
        };
        F::Qp::connect(qp.clone(), path).await.expect("RTS");
        let life = dialed.ready().await.expect("READY goes out");
        Self { fabric, qp, sent: 0, slabs, _life: life, _receives: receives }
    }

    fn post(&mut self, bytes: &[u8]) {
        self.post_data(SendData::Inline(bytes));
        let _ = self.fabric.poll(&mut Vec::new());
    }

    fn post_data(&mut self, data: SendData<'_>) {
        let wr = SendWr { seq: WrSeq(self.sent), signaled: true, data };
        self.qp.post(&[wr]).expect("room for a few");
        self.sent += 1;
    }
}

/// A frame header: magic, type, flags, credits, word.
fn header(kind: u8, flags: u8, credits: u8, word: u32) -> [u8; 8] {
    let [a, b, c, d] = word.to_be_bytes();
    [0xb1, kind, flags, credits, a, b, c, d]
}

const WHOLE: u8 = 0b1100;

/// M-39: a malformed frame is counted, its slab and credit go back, it reaches no stream; the second ends the
/// connection, and other peers notice nothing. So does a grant of what was never spent, at once.
pub async fn two_malformed_frames_end_a_connection<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
    a.register(&b);
    a.send_numbered(b.id(), MessageType::Message, 0);
    let _ = next(&mut b.inbound.message).await;
    let endpoint = b.worker.address().endpoint().expect("b is started");
    let timers = lab.config(1).timers;
    let whole = header(0, WHOLE, 0, 0);
    // Two empty frames in one SEND, and what can be wrong with that.
    let pack = |frames: u32, body: &[u8]| [&header(8, 0, 0, frames)[..], body].concat();
    let (empty, long) = ([0; 8], [0, 0, 0, 0, 0, 0, 0, 1]);
    let bad: [Vec<u8>; 12] = [
        vec![0xb1, 0, WHOLE],                                 // short
        header(0, WHOLE, 0, 1).to_vec(),                      // a header longer than the frame
        vec![0x00; 20],                                       // magic
        header(9, WHOLE, 0, 0).to_vec(),                      // type
        header(0, WHOLE | 0x80, 0, 0).to_vec(),               // flags
        [header(5, 0, 0, 1).to_vec(), vec![1]].concat(),      // a PING with a body
        header(0, 0b1000, 0, 4).to_vec(),                     // a last fragment of nothing
        header(0, 0b0100, 0, 0).to_vec(),                     // a first fragment without a body
        pack(0, &[]),                                         // no frame
        pack(3, &[empty, empty].concat()),                    // fewer than it says
        pack(2, &[empty, long].concat()),                     // its last one is cut off
        pack(2, &[empty, [5, 0, 0, 0, 0, 0, 0, 0]].concat()), // a PING where only data can be
    ];
    for (case, bytes) in bad.iter().enumerate() {
        let malformed = b.worker.stats().malformed;
        let mut peer = Bare::connect(lab.fabric(3), &endpoint, 100 + case as u128, timers).await;
        peer.post(&whole);
        let frame = next(&mut b.inbound.message).await;
        assert_eq!((frame.peer, frame.header.len(), frame.payload.len()), (InstanceId(100 + case as u128), 0, 0));
        peer.post(bytes);
        peer.post(&whole);
        let _ = next(&mut b.inbound.message).await;
        assert_eq!(b.worker.stats().malformed - malformed, 1, "case {case}");
        let ended = b.worker.stats().epochs_ended;
        peer.post(bytes);
        wait_for(|| b.worker.stats().epochs_ended == ended + 1, "the second malformed frame ends it").await;
        assert_eq!(b.worker.stats().malformed - malformed, 2, "case {case}");
        assert!(b.inbound.message.try_recv().is_none(), "case {case}");
    }
    let ended = b.worker.stats().epochs_ended;
    let mut peer = Bare::connect(lab.fabric(3), &endpoint, 200, timers).await;
    peer.post(&header(7, 0, 5, 0));
    wait_for(|| b.worker.stats().epochs_ended == ended + 1, "a grant of what was never spent ends it").await;
    drop(peer);
    a.send_numbered(b.id(), MessageType::Message, 1);
    let _ = next(&mut b.inbound.message).await;
    assert_eq!(a.worker.stats().epochs_ended, 0, "the other peer's connection has lived");
    wait_for(|| b.worker.stats().qps == 1, "the broken connections are gone").await;
    a.stop().await;
    b.stop().await;
}

/// B11, MT-30: a message that is longer than any receive drops the worker's QP to ERR, with frames in flight and queued.
/// Each has one end, in bounded time; QP, slabs and receives are free again, and the next connection works.
pub async fn b11_a_qp_that_falls_to_err_ends_every_frame_once<L: Lab>(lab: Arc<L>) {
    let mut b = Node::start(&*lab, 2).await;
    let endpoint = b.worker.address().endpoint().expect("b is started");
    let timers = lab.config(1).timers;
    let slabs = b.worker.fabric().slabs();
    let longer = SlabSizes { send_slabs: 1, send_bytes: 2 * slabs.receive_bytes, ..slabs };
    let mut peer = Bare::connect(lab.fabric_with(3, longer), &endpoint, 300, timers).await;
    let me = InstanceId(300);
    let address = Endpoint { instance: me, incarnation: Incarnation(77), devices: Vec::new(), ..endpoint.clone() };
    b.worker.register(&WorkerAddress::encode(&address).expect("valid")).expect("registered");
    peer.post(&header(0, WHOLE, 0, 0));
    let _ = next(&mut b.inbound.message).await;
    let count = 300u32;
    for n in 0..count {
        let _ = b.send(me, MessageType::Message, n.to_be_bytes().to_vec(), "in flight or queued");
    }
    let slab = peer.slabs.pop().expect("one");
    let began = tokio::time::Instant::now();
    peer.post_data(SendData::Slab { slab: &slab, len: 2 * slabs.receive_bytes });
    let home = || {
        let stats = b.worker.stats();
        (stats.qps, stats.receives_promised, stats.send_slabs_free) == (0, 0, slabs.send_slabs as usize)
    };
    wait_for(home, "QP, receives and slabs come home").await;
    let stats = b.worker.stats();
    eprintln!("ended by {:?} after {:?}: {} of {count} reported", stats.ended, began.elapsed(), b.errors.count());
    assert_eq!(stats.epochs_ended, 1, "{stats:?}");
    // The window was delivered, for the peer's device had acknowledged it; what waited for credits was not.
    let reported: Vec<u32> =
        b.errors.all().iter().map(|(header, _, _)| u32::from_be_bytes(header[..].try_into().expect("four"))).collect();
    assert!(reported.len() >= count as usize - 64, "{}", reported.len());
    let suffix: Vec<u32> = (count - u32::try_from(reported.len()).expect("few")..count).collect();
    let mut sorted = reported;
    sorted.sort_unstable();
    assert_eq!(sorted, suffix, "each once, and none before one that arrived");
    drop((peer, slab));
    let a = Node::start(&*lab, 1).await;
    a.register(&b);
    a.send_numbered(b.id(), MessageType::Message, 1);
    crate::node::assert_numbered(&next(&mut b.inbound.message).await, 1);
    a.stop().await;
    b.stop().await;
}

async fn wait_for(holds: impl Fn() -> bool, what: &str) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within five seconds: {what}");
}

/// B21: strangers at the bootstrap's port (connect and close, seven bytes and silence, HTTP, a MiB of noise, 500 idle
/// connections) while real peers connect and talk.
pub async fn scanners_hurt_nobody<L: Lab>(lab: Arc<L>) {
    let mut config = lab.config(2);
    config.bootstrap.deadline = Duration::from_secs(2);
    let mut b = Node::start_with(lab.fabric(2), config).await;
    let at = b.worker.listening_at().expect("started");
    let stranger = lab.fabric(9);
    let net = stranger.net();
    let mut idle = Vec::new();
    for _ in 0..500 {
        idle.push(net.dial(at).await.expect("the listener takes connections"));
    }
    let mut seven = net.dial(at).await.expect("a connection");
    // The length of a frame, and three bytes of it.
    seven.write_all(&[0, 0, 0, 100, 1, 2, 3]).await.expect("written");
    let mut last_words = Vec::new();
    let a = Node::start(&*lab, 1).await;
    a.register(&b);
    for n in 0..50u32 {
        drop(net.dial(at).await);
        if n % 10 == 0 {
            let mut http = net.dial(at).await.expect("a connection");
            http.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.expect("written");
            last_words.push(http);
            let mut noise = net.dial(at).await.expect("a connection");
            let bytes: Vec<u8> = (0..1u32 << 18).flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
            // It is cut off in the middle.
            let _ = tokio::time::timeout(Duration::from_secs(3), noise.write_all(&bytes)).await;
        }
        a.send_numbered(b.id(), MessageType::Message, n);
        let frame = next(&mut b.inbound.message).await;
        crate::node::assert_numbered(&frame, n);
    }
    a.errors.assert_none();
    // Another peer comes in beside the idle ones.
    let c = Node::start(&*lab, 3).await;
    c.register(&b);
    c.worker.ensure_connected(b.id()).await.expect("connected");
    // The deadline closes what said nothing.
    let mut byte = [0];
    for stream in idle.iter_mut().chain([&mut seven]).chain(&mut last_words) {
        let closed = tokio::time::timeout(Duration::from_secs(8), stream.read(&mut byte)).await.expect("it is closed");
        assert!(!matches!(closed, Ok(1..)), "a stranger is told nothing");
    }
    let told = b.worker.listener_stats().expect("it runs");
    assert_eq!((told.pending, told.completed), (0, 2), "{told:?}");
    assert!(told.timed_out >= 501 && told.garbage + told.oversize >= 10, "{told:?}");
    drop((idle, seven, last_words, stranger));
    for node in [a, b, c] {
        node.stop().await;
    }
}

/// B22: a peer that takes the connection and says nothing more ends at the dial's deadline; meanwhile a live peer is
/// answered as fast as before.
pub async fn a_silent_peer_slows_no_other<L: Lab>(lab: Arc<L>) {
    let mut config = lab.config(1);
    config.bootstrap.deadline = Duration::from_secs(1);
    let (mut a, mut b) = (Node::start_with(lab.fabric(1), config).await, Node::start(&*lab, 2).await);
    a.register(&b);
    b.register(&a);
    let hole = lab.fabric(3);
    let bind = SocketAddr::new(b.worker.listening_at().expect("started").ip(), 0);
    let bind = if bind.ip().is_loopback() { bind } else { SocketAddr::new(lab.config(3).bind.ip(), 0) };
    let listener = hole.net().listen(bind).await.expect("it listens");
    let silent = Endpoint {
        instance: InstanceId(3),
        incarnation: Incarnation(1),
        bootstrap: vec![listener.local_addr().expect("an address")],
        ..b.worker.address().endpoint().expect("started")
    };
    a.worker.register(&WorkerAddress::encode(&silent).expect("valid")).expect("registered");
    let before = ping_pong(&mut a, &mut b).await;
    let began = tokio::time::Instant::now();
    for n in 0..300 {
        a.send_numbered(InstanceId(3), MessageType::Message, n);
    }
    let during = ping_pong(&mut a, &mut b).await;
    assert!(during <= before * 3 + Duration::from_millis(10), "{during:?} during, {before:?} before");
    while a.errors.count() < 256 {
        assert!(began.elapsed() < Duration::from_secs(5), "the dial did not end: {:?}", a.errors);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(began.elapsed() >= Duration::from_millis(900), "{:?}", began.elapsed());
    let errors = a.errors.all();
    assert!(matches!(&errors[0].2, SendError::ConnectionLost { peer: InstanceId(3), .. }), "{:?}", errors[0].2);
    drop((listener, hole));
    a.stop().await;
    b.stop().await;
}

/// The 99th percentile of 200 round trips.
async fn ping_pong<F: Fabric>(a: &mut Node<F>, b: &mut Node<F>) -> Duration {
    let mut times = Vec::new();
    for n in 0..200 {
        let began = Instant::now();
        a.send_numbered(b.id(), MessageType::Message, n);
        let _ = next(&mut b.inbound.message).await;
        b.send_numbered(a.id(), MessageType::Message, n);
        let _ = next(&mut a.inbound.message).await;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    times[197]
}
