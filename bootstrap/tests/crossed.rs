//! Two whole workers, made of nothing but this crate and pretended QPs, that dial each other at the same instant: one
//! pair of QPs comes of it, on both sides the same. Also the shape in which a worker uses the crate.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    sync::{Barrier, watch},
    time::{Instant, sleep},
};
use verbs_bootstrap::{
    AcceptError, Acceptor, Backoff, Config, DialFailed, DialStart, Exchange, Generation, Gid, GidType, HelloVerdict,
    Identity, Incarnation, InstanceId, LifeSocket, LinkLayer, Listener, MemNet, Mtu, Net, Offer, Plane, PortIdentity,
    Psn, QpEndpoint, Qpn, RdAtomic, Refusal, ReplyVerdict, Secret, Status, TcpNet, dial,
};

/// QPs of one "fabric" by number: the remote end they were brought up to.
#[derive(Default)]
struct Fabric {
    next: AtomicU32,
    bound: Mutex<HashMap<u32, u32>>,
}

impl Fabric {
    fn create(&self) -> u32 {
        self.next.fetch_add(1, Relaxed) + 1
    }

    /// Takes a moment, as a modify to RTR does.
    async fn bring_up(&self, qpn: u32, remote: u32) {
        sleep(Duration::from_millis(u64::from(qpn * 7919 % 3))).await;
        let before = self.bound.lock().expect("no panic").insert(qpn, remote);
        assert_eq!(before, None, "QP {qpn} was brought up twice");
    }
}

struct Peer {
    exchange: Exchange,
    /// The QP of the present epoch.
    qpn: u32,
}

struct Worker<N: Net> {
    net: Arc<N>,
    fabric: Arc<Fabric>,
    me: Identity,
    other: Identity,
    config: Config,
    peer: Mutex<Peer>,
    /// The generation that is in RTS.
    up: watch::Sender<u64>,
    lives: Mutex<Vec<LifeSocket<N::Stream>>>,
}

impl<N: Net> Worker<N> {
    fn new(net: &Arc<N>, fabric: &Arc<Fabric>, me: u128, other: u128, config: &Config) -> Arc<Self> {
        let identity = |instance: u128| Identity {
            instance: InstanceId(instance),
            incarnation: Incarnation(u64::try_from(instance).expect("small") + 100),
        };
        let (me, other) = (identity(me), identity(other));
        let mut exchange = Exchange::new(me, other.instance, Plane::Messaging, Backoff::default(), 1);
        exchange.on_registered(other.incarnation);
        Arc::new(Self {
            net: Arc::clone(net),
            fabric: Arc::clone(fabric),
            me,
            other,
            config: config.clone(),
            peer: Mutex::new(Peer { exchange, qpn: 0 }),
            up: watch::Sender::new(0),
            lives: Mutex::new(Vec::new()),
        })
    }

    fn offer(&self, generation: Generation, echoed: Generation, qpn: u32) -> Offer {
        Offer {
            from: self.me.instance,
            from_incarnation: self.me.incarnation,
            to: self.other.instance,
            to_incarnation: self.other.incarnation,
            generation,
            echoed_generation: echoed,
            port: PortIdentity {
                device_guid: 1,
                port: 1,
                link_layer: LinkLayer::Ethernet,
                lid: 0,
                gid: Gid([0; 16]),
                gid_type: GidType::RoceV2,
                gid_index: 0,
                pkey: 0xffff,
                mtu: Mtu::B1024,
            },
            plane: Plane::Messaging,
            qp: QpEndpoint { qpn: Qpn::new(qpn).expect("24 bits"), psn: Psn::from_random(qpn) },
            rd_atomic: RdAtomic { initiator: 1, responder: 1 },
            slab_bytes: 8192,
            window_slabs: 64,
            eager_max_bytes: 1 << 20,
            features: 0,
        }
    }

    /// Connected, and to what: own and remote QP number.
    fn pair(&self) -> Option<(u32, u32)> {
        let peer = self.peer.lock().expect("no panic");
        let bound = self.fabric.bound.lock().expect("no panic");
        peer.exchange.is_connected().then(|| (peer.qpn, bound[&peer.qpn]))
    }

    /// The lock is not held while the QP is brought up; the exchange says afterwards whether it still counts.
    async fn connect(&self, generation: Generation, qpn: u32, remote: &Offer) -> bool {
        self.fabric.bring_up(qpn, remote.qp.qpn.get()).await;
        let current = self.peer.lock().expect("no panic").exchange.on_connected(generation);
        if current {
            self.up.send_replace(generation.0);
        }
        current
    }

    /// Dials until connected, by either half.
    async fn ensure_connected(&self, at: SocketAddr) {
        loop {
            let (start, qpn) = {
                let mut peer = self.peer.lock().expect("no panic");
                if peer.exchange.generation().is_none() {
                    peer.exchange.begin_epoch();
                    peer.qpn = self.fabric.create();
                }
                (peer.exchange.start_dial(Instant::now().into_std()), peer.qpn)
            };
            match start {
                DialStart::Go { generation, echoed, .. } => {
                    let hello = self.offer(generation, echoed, qpn);
                    self.one_dial(at, &hello).await;
                }
                DialStart::Wait { until } => tokio::time::sleep_until(until.into()).await,
                DialStart::Up => {
                    let mut up = self.up.subscribe();
                    let generation = self.peer.lock().expect("no panic").exchange.generation();
                    if up.wait_for(|up| Some(Generation(*up)) == generation).await.is_ok() {
                        return;
                    }
                }
                DialStart::InFlight | DialStart::Idle | DialStart::Unknown => panic!("{start:?}"),
            }
        }
    }

    async fn one_dial(&self, at: SocketAddr, hello: &Offer) {
        let dialed = match dial(&*self.net, at, hello, &self.config).await {
            Ok(dialed) => dialed,
            Err(error) => {
                let failed = self.peer.lock().expect("no panic").exchange.on_dial_failed(Instant::now().into_std());
                assert!(!matches!(failed, DialFailed::Stale), "{error}");
                return;
            }
        };
        let reply = dialed.reply.clone();
        let (verdict, qpn) = {
            let mut peer = self.peer.lock().expect("no panic");
            (peer.exchange.on_reply(&reply), peer.qpn)
        };
        match verdict {
            ReplyVerdict::Connect { generation } => {
                if self.connect(generation, qpn, &reply).await {
                    // The other side may have what it needs already and close.
                    if let Ok(life) = dialed.ready().await {
                        self.lives.lock().expect("no panic").push(life);
                    }
                }
            }
            ReplyVerdict::AlreadyUp { .. } | ReplyVerdict::Retire { .. } | ReplyVerdict::Ignore => {}
        }
    }
}

impl<N: Net> Acceptor for Worker<N> {
    type Stream = N::Stream;

    fn must_prove_alive(&self, hello: &Offer) -> bool {
        self.peer.lock().expect("no panic").exchange.would_replace(hello)
    }

    async fn on_hello(&self, hello: Offer) -> Result<Offer, Refusal> {
        let (verdict, qpn) = {
            let mut peer = self.peer.lock().expect("no panic");
            let verdict = peer.exchange.on_hello(&hello);
            if matches!(verdict, HelloVerdict::Join { fresh: true, .. } | HelloVerdict::Replace { .. }) {
                peer.qpn = self.fabric.create();
            }
            (verdict, peer.qpn)
        };
        let generation = match verdict {
            HelloVerdict::Refuse(refusal) => return Err(refusal),
            HelloVerdict::Join { generation, .. } | HelloVerdict::Replace { generation, .. } => {
                if !self.connect(generation, qpn, &hello).await {
                    return Err(Refusal::new(Status::StaleGeneration, "the epoch ended meanwhile"));
                }
                generation
            }
            HelloVerdict::Repeat { generation } => {
                // The dialing half is bringing the same QP up: the reply waits for it.
                let mut up = self.up.subscribe();
                let waited = up.wait_for(|up| *up >= generation.0).await.map(|up| *up);
                if waited.ok() != Some(generation.0) {
                    return Err(Refusal::new(Status::StaleGeneration, "the epoch ended meanwhile"));
                }
                generation
            }
        };
        Ok(self.offer(generation, hello.generation, qpn))
    }

    fn on_ready(&self, _hello: Offer, _reply: Offer, life: LifeSocket<N::Stream>) {
        self.lives.lock().expect("no panic").push(life);
    }

    fn on_abandoned(&self, _hello: Offer, _reply: Offer, _why: AcceptError) {}
}

/// Both dial at once, round after round; returns in how many rounds both dials reached the other side.
async fn crossed_rounds<N: Net>(net: N, rounds: u32, config: &Config) -> u32 {
    let (net, fabric) = (Arc::new(net), Arc::new(Fabric::default()));
    let loopback: SocketAddr = ([127, 0, 0, 1], 0).into();
    let mut crossed = 0;
    for round in 0..rounds {
        let a = Worker::new(&net, &fabric, 1, 2, config);
        let b = Worker::new(&net, &fabric, 2, 1, config);
        let at_a = Listener::bind(&*net, loopback, config, Arc::clone(&a)).await.expect("a port");
        let at_b = Listener::bind(&*net, loopback, config, Arc::clone(&b)).await.expect("a port");
        let qps_before = fabric.next.load(Relaxed);
        let (to_a, to_b) = (at_a.local_addr(), at_b.local_addr());
        let together = Arc::new(Barrier::new(2));
        let first = tokio::spawn({
            let (a, together) = (Arc::clone(&a), Arc::clone(&together));
            async move {
                together.wait().await;
                a.ensure_connected(to_b).await;
            }
        });
        let second = tokio::spawn({
            let b = Arc::clone(&b);
            async move {
                together.wait().await;
                // From together to well apart; a timer is too coarse.
                let start = std::time::Instant::now();
                while start.elapsed() < Duration::from_micros(u64::from(round % 8) * 5) {
                    tokio::task::yield_now().await;
                }
                b.ensure_connected(to_a).await;
            }
        });
        let both = async { (first.await.expect("no panic"), second.await.expect("no panic")) };
        let hangs = tokio::time::timeout(Duration::from_secs(10), both).await.is_err();
        assert!(!hangs, "round {round} hangs: {:?} {:?}", at_a.stats(), at_b.stats());
        let (Some((a_own, a_remote)), Some((b_own, b_remote))) = (a.pair(), b.pair()) else {
            panic!("round {round}: one side is not connected")
        };
        assert_eq!((a_own, a_remote), (b_remote, b_own), "round {round}: the sides disagree");
        assert_eq!(fabric.next.load(Relaxed) - qps_before, 2, "round {round}: an extra QP");
        crossed += u32::from(at_a.stats().accepted > 0 && at_b.stats().accepted > 0);
        at_a.stop().await;
        at_b.stop().await;
    }
    crossed
}

/// A net with a way of 0 to 3 ms, so that nearly all dials cross.
#[derive(Default)]
struct Far {
    net: MemNet,
    dials: AtomicU32,
}

impl Net for Far {
    type Stream = <MemNet as Net>::Stream;
    type Listener = <MemNet as Net>::Listener;

    async fn listen(&self, addr: SocketAddr) -> std::io::Result<Self::Listener> {
        self.net.listen(addr).await
    }

    async fn dial(&self, addr: SocketAddr) -> std::io::Result<Self::Stream> {
        let count = self.dials.fetch_add(1, Relaxed);
        sleep(Duration::from_millis(u64::from(count.wrapping_mul(0x9e37_79b9) >> 30))).await;
        self.net.dial(addr).await
    }
}

#[tokio::test(start_paused = true)]
async fn crossed_dials_over_a_far_net_make_one_connection_each() {
    let crossed = crossed_rounds(Far::default(), 2000, &Config::default()).await;
    assert!(crossed > 1000, "only {crossed} of 2,000 rounds crossed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_thousand_crossed_dials_in_memory_make_one_connection_each() {
    assert!(crossed_rounds(MemNet::new(), 1000, &Config::default()).await > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn crossed_dials_over_tcp_make_one_connection_each() {
    let config = Config::default();
    assert!(crossed_rounds(TcpNet::new(&config.tcp), 300, &config).await > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn crossed_dials_with_a_secret_make_one_connection_each() {
    let secret = Secret::new(b"sixteen bytes and more").expect("long enough");
    let config = Config { secret: Some(secret), ..Config::default() };
    assert!(crossed_rounds(MemNet::new(), 300, &config).await > 0);
}
