//! The bootstrap's network in memory: listeners, dials and what goes wrong with them. [`stream`] holds the bytes.

mod stream;

use std::{
    collections::{BTreeMap, VecDeque},
    future::poll_fn,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    task::{Poll, Waker},
    time::Duration,
};

use tokio::{sync::Notify, time::sleep};
use verbs_bootstrap::{Net, NetListener};

pub use self::stream::SimStream;
use self::stream::{Conn, Fate, Pipe};
use super::{
    config::SimConfig,
    fault::{Dice, NetFaults},
    hca::{EHOSTUNREACH, ETIMEDOUT, errno},
    stats::FaultCounts,
    world::Shared,
};

/// One host's view of the simulated network. Each host has its own loopback; there is no name service.
#[derive(Clone, Debug)]
pub struct SimNet {
    world: Arc<Shared>,
    host: usize,
    addr: IpAddr,
}

/// Takes connections on a [`SimNet`].
#[derive(Debug)]
pub struct SimListener {
    world: Arc<Shared>,
    id: u64,
    addr: SocketAddr,
}

/// Everything of the network, under one lock.
#[derive(Debug)]
pub(super) struct NetState {
    dice: Dice,
    faults: NetFaults,
    pub(super) faults_on: bool,
    latency: std::ops::RangeInclusive<Duration>,
    hosts: Vec<NetHost>,
    listeners: BTreeMap<u64, Listener>,
    conns: BTreeMap<u64, Conn>,
    cuts: Vec<(IpAddr, IpAddr)>,
    healed: Arc<Notify>,
    next_id: u64,
    next_port: BTreeMap<IpAddr, u16>,
    counts: FaultCounts,
}

#[derive(Debug)]
struct NetHost {
    addr: IpAddr,
    killed: bool,
}

#[derive(Debug)]
struct Listener {
    host: usize,
    /// The host's address, whatever the listener is bound to.
    host_addr: IpAddr,
    bound: SocketAddr,
    backlog: VecDeque<(u64, SocketAddr)>,
    acceptor: Option<Waker>,
}

/// What a dial finds.
enum Dialed {
    /// A listener, after this time.
    Soon(Duration),
    /// An error, after this time.
    Fails(Duration, io::Error),
    /// Nothing until the path is healed.
    Cut(Arc<Notify>),
}

/// A path that is cut for so long makes a dial fail.
const DIAL_GIVES_UP: Duration = Duration::from_secs(127);
/// Nobody answers for the address.
const NO_SUCH_HOST: Duration = Duration::from_secs(3);
const FIRST_PORT: u16 = 40_000;

impl SimNet {
    pub(super) fn new(world: Arc<Shared>, addr: IpAddr) -> Self {
        let host = {
            let mut net = world.net();
            net.hosts.push(NetHost { addr, killed: false });
            net.hosts.len() - 1
        };
        Self { world, host, addr }
    }

    /// Where a dial or a bind to `ip` leads: loopback stays at home.
    fn target(&self, ip: IpAddr) -> IpAddr {
        if ip.is_loopback() { self.addr } else { ip }
    }

    fn stream(&self, conn: u64) -> SimStream {
        SimStream::new(Arc::clone(&self.world), conn, 0)
    }
}

impl Net for SimNet {
    type Stream = SimStream;
    type Listener = SimListener;

    async fn listen(&self, addr: SocketAddr) -> io::Result<SimListener> {
        let home = self.target(addr.ip()) == self.addr || addr.ip().is_unspecified();
        let mut net = self.world.net();
        net.alive(self.host)?;
        if !home {
            return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, format!("sim: {addr} is not {}", self.addr)));
        }
        let port = if addr.port() == 0 { net.free_port(self.addr) } else { addr.port() };
        if net.listeners.values().any(|other| other.host_addr == self.addr && other.bound.port() == port) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let bound = SocketAddr::new(addr.ip(), port);
        let id = net.new_id();
        let (host, host_addr) = (self.host, self.addr);
        net.listeners.insert(id, Listener { host, host_addr, bound, backlog: VecDeque::new(), acceptor: None });
        Ok(SimListener { world: Arc::clone(&self.world), id, addr: bound })
    }

    async fn dial(&self, addr: SocketAddr) -> io::Result<SimStream> {
        let target = self.target(addr.ip());
        loop {
            let found = self.world.net().look_up(self, target, addr)?;
            match found {
                Dialed::Soon(delay) => {
                    if !delay.is_zero() {
                        sleep(delay).await;
                    }
                    // The listener may have gone meanwhile.
                    let (conn, woken) = self.world.net().establish(self, target, addr, delay)?;
                    woken.into_iter().for_each(Waker::wake);
                    return Ok(self.stream(conn));
                }
                Dialed::Fails(delay, error) => {
                    if !delay.is_zero() {
                        sleep(delay).await;
                    }
                    return Err(error);
                }
                Dialed::Cut(healed) => tokio::select! {
                    biased;
                    () = healed.notified() => {}
                    () = sleep(DIAL_GIVES_UP) => return Err(errno(ETIMEDOUT)),
                },
            }
        }
    }
}

impl NetListener for SimListener {
    type Stream = SimStream;

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.addr)
    }

    async fn accept(&mut self) -> io::Result<(SimStream, SocketAddr)> {
        poll_fn(|cx| {
            let mut net = self.world.net();
            // A killed host's listener is gone: its acceptor waits for ever, as a dead process does.
            let Some(listener) = net.listeners.get_mut(&self.id) else { return Poll::Pending };
            if let Some((conn, from)) = listener.backlog.pop_front() {
                drop(net);
                return Poll::Ready(Ok((SimStream::new(Arc::clone(&self.world), conn, 1), from)));
            }
            listener.acceptor = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        let woken = self.world.net().close_listener(self.id);
        woken.into_iter().for_each(Waker::wake);
    }
}

impl NetState {
    pub(super) fn new(config: SimConfig) -> Self {
        Self {
            dice: Dice::new(config.seed ^ 0x006e_6574_776f_726b),
            faults: config.faults.net,
            faults_on: true,
            latency: config.net_latency,
            hosts: Vec::new(),
            listeners: BTreeMap::new(),
            conns: BTreeMap::new(),
            cuts: Vec::new(),
            healed: Arc::new(Notify::new()),
            next_id: 0,
            next_port: BTreeMap::new(),
            counts: FaultCounts::default(),
        }
    }

    pub(super) fn stop_faults(&mut self) {
        self.faults_on = false;
    }

    pub(super) fn cut(&mut self, a: IpAddr, b: IpAddr) {
        self.cuts.push((a, b));
    }

    pub(super) fn heal(&mut self, a: IpAddr, b: IpAddr) -> Vec<Waker> {
        self.cuts.retain(|cut| *cut != (a, b) && *cut != (b, a));
        self.healed.notify_waiters();
        self.conns.values_mut().flat_map(Conn::all_wakers).collect()
    }

    /// The kernel closes what the processes at `addr` had open.
    pub(super) fn kill_host(&mut self, addr: IpAddr) -> Vec<Waker> {
        let mut woken = Vec::new();
        let mut killed = vec![false; self.hosts.len()];
        for (index, host) in self.hosts.iter_mut().enumerate() {
            killed[index] = host.addr == addr && !host.killed;
            host.killed |= killed[index];
        }
        let listeners = self.listeners.iter().filter(|(_, listener)| killed[listener.host]).map(|(id, _)| *id);
        for id in listeners.collect::<Vec<_>>() {
            woken.append(&mut self.close_listener(id));
        }
        for conn in self.conns.values_mut() {
            for side in 0..2 {
                if killed[conn.hosts[side]] {
                    woken.append(&mut conn.close(side));
                }
            }
        }
        self.conns.retain(|_, conn| conn.open != [false, false]);
        woken
    }

    pub(super) fn add_fault_counts(&self, counts: &mut FaultCounts) {
        counts.dials_refused += self.counts.dials_refused;
        counts.slow_streams += self.counts.slow_streams;
        counts.resets += self.counts.resets;
        counts.black_holes += self.counts.black_holes;
        counts.half_closes += self.counts.half_closes;
        counts.dribbles += self.counts.dribbles;
    }

    /// Stream ends and listeners that their owners still hold, on hosts that live.
    pub(super) fn open(&self) -> (usize, usize) {
        let ends = self
            .conns
            .values()
            .map(|conn| (0..2).filter(|side| conn.open[*side] && !self.hosts[conn.hosts[*side]].killed).count());
        (ends.sum(), self.listeners.len())
    }

    fn alive(&self, host: usize) -> io::Result<()> {
        if self.hosts[host].killed { Err(io::ErrorKind::NetworkDown.into()) } else { Ok(()) }
    }

    fn is_cut(&self, a: IpAddr, b: IpAddr) -> bool {
        self.cuts.iter().any(|cut| *cut == (a, b) || *cut == (b, a))
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn free_port(&mut self, addr: IpAddr) -> u16 {
        let next = self.next_port.entry(addr).or_insert(FIRST_PORT);
        loop {
            let port = *next;
            *next = next.checked_add(1).unwrap_or(FIRST_PORT);
            let taken = self.listeners.values().any(|other| other.host_addr == addr && other.bound.port() == port);
            if !taken {
                return port;
            }
        }
    }

    fn listener_for(&self, target: IpAddr, addr: SocketAddr) -> Option<u64> {
        let takes = |listener: &Listener| {
            listener.host_addr == target
                && listener.bound.port() == addr.port()
                && (listener.bound.ip() == addr.ip() || listener.bound.ip().is_unspecified())
        };
        self.listeners.iter().find(|(_, listener)| takes(listener)).map(|(id, _)| *id)
    }

    fn look_up(&mut self, from: &SimNet, target: IpAddr, addr: SocketAddr) -> io::Result<Dialed> {
        self.alive(from.host)?;
        if self.is_cut(from.addr, target) {
            return Ok(Dialed::Cut(Arc::clone(&self.healed)));
        }
        let mut delay = self.dice.duration(&self.latency);
        if !self.hosts.iter().any(|host| host.addr == target) {
            return Ok(Dialed::Fails(NO_SUCH_HOST, errno(EHOSTUNREACH)));
        }
        if self.faults_on && self.dice.chance(self.faults.slow) {
            self.counts.slow_streams += 1;
            delay += self.dice.duration(&self.faults.slow_by);
        }
        let refused = self.faults_on && self.dice.chance(self.faults.dial_refused);
        self.counts.dials_refused += u64::from(refused);
        if refused || self.listener_for(target, addr).is_none() {
            return Ok(Dialed::Fails(delay, io::ErrorKind::ConnectionRefused.into()));
        }
        Ok(Dialed::Soon(delay))
    }

    fn establish(
        &mut self,
        from: &SimNet,
        target: IpAddr,
        addr: SocketAddr,
        delay: Duration,
    ) -> io::Result<(u64, Option<Waker>)> {
        self.alive(from.host)?;
        let listener = self.listener_for(target, addr).ok_or(io::ErrorKind::ConnectionRefused)?;
        let port = self.free_port(from.addr);
        let source = SocketAddr::new(if addr.ip().is_loopback() { addr.ip() } else { from.addr }, port);
        let id = self.new_id();
        let mut pipes = [Pipe::default(), Pipe::default()];
        if self.faults_on {
            let dribble = self.dice.chance(self.faults.dribble);
            self.counts.dribbles += u64::from(dribble);
            for pipe in &mut pipes {
                pipe.dribble = dribble;
            }
            let fates = [
                (Fate::Reset, self.faults.reset),
                (Fate::BlackHole, self.faults.black_hole),
                (Fate::HalfClose, self.faults.half_close),
            ];
            for (fate, chance) in fates {
                if self.dice.chance(chance) {
                    let after = self.dice.number(&self.faults.after_bytes);
                    let side = usize::from(self.dice.chance(0.5));
                    pipes[side].fate = Some((after, fate));
                }
            }
        }
        let listener = self.listeners.get_mut(&listener).ok_or(io::ErrorKind::ConnectionRefused)?;
        let conn = Conn {
            hosts: [from.host, listener.host],
            addrs: [from.addr, listener.host_addr],
            open: [true, true],
            pipes,
            delay,
        };
        listener.backlog.push_back((id, source));
        let woken = listener.acceptor.take();
        self.conns.insert(id, conn);
        Ok((id, woken))
    }

    /// Its waiting connections are reset.
    fn close_listener(&mut self, id: u64) -> Vec<Waker> {
        let Some(listener) = self.listeners.remove(&id) else { return Vec::new() };
        let mut woken = Vec::new();
        for (conn, _) in listener.backlog {
            woken.append(&mut self.close(conn, 1));
        }
        woken
    }

    /// One end is dropped; with both gone the connection is forgotten.
    fn close(&mut self, id: u64, side: usize) -> Vec<Waker> {
        let Some(conn) = self.conns.get_mut(&id) else { return Vec::new() };
        let woken = conn.close(side);
        if conn.open == [false, false] {
            self.conns.remove(&id);
        }
        woken
    }
}
