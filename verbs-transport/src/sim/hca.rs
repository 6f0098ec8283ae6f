//! All devices of a world, as one machine without clock, lock or I/O: calls and the time go in, completions and wakers
//! come out. [`wire`](super::wire) adds how messages move.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BTreeMap, BinaryHeap, VecDeque},
    io,
    net::IpAddr,
    ops::RangeInclusive,
    task::Waker,
    time::Duration,
};

use verbs_bootstrap::{Gid, LinkLayer, Mtu, PortIdentity, Qpn};

use super::{
    config::{HostConfig, SimConfig},
    cq::{Cq, Cqe, CqeWhat, Pushed},
    fault::{Dice, Faults},
    qp::{Bytes, Qp, State},
    srq::Srq,
    stats::{FaultCounts, HostReport, Stats},
};
use crate::fabric::{AsyncEvent, ConnectQpError, CreateQpError, FabricError, POLL_BATCH, QpCaps, QpPath, RecvSlab, Wc};

/// A host, by order of creation. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostKey(pub(super) usize);

/// A QP, by order of creation in its world. Never reused, unlike QP numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QpKey(pub(super) usize);

/// One device with its port, CQ, SRQ and slabs.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) addr: IpAddr,
    pub(super) config: HostConfig,
    pub(super) port: PortIdentity,
    pub(super) port_up: bool,
    /// Killed or closed: every call fails with ENODEV.
    pub(super) gone: bool,
    pub(super) cq: Cq,
    pub(super) srq: Srq,
    /// The SRQ looks empty until then.
    pub(super) storm_until: Duration,
    pub(super) receive_memory: Vec<u8>,
    pub(super) send_memory: Vec<u8>,
    /// Which send slabs a WR names that no polled WC has covered.
    pub(super) send_busy: Vec<bool>,
    pub(super) slabs_taken: bool,
    live_qps: u32,
    async_events: VecDeque<AsyncEvent>,
    async_wakers: Vec<Waker>,
    pub(super) stats: Stats,
}

/// Something that will happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Happening {
    /// The next message of this QP reaches its peer.
    Arrive(QpKey),
    /// The next acknowledgement is back.
    Ack(QpKey),
    /// An RNR timer, an ack timeout or a half-received message ends.
    WaitEnds(QpKey),
    /// The retries of a QP whose acknowledgements are lost are spent.
    GiveUp(QpKey),
    /// The channel wakes for nothing.
    SpuriousWake(HostKey),
}

#[derive(Debug, PartialEq, Eq)]
struct Scheduled {
    at: Duration,
    id: u64,
    what: Happening,
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.id).cmp(&(other.at, other.id))
    }
}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Debug)]
pub(super) struct Hca {
    /// Time since the world began; never goes back.
    pub(super) now: Duration,
    pub(super) latency: RangeInclusive<Duration>,
    pub(super) faults: Faults,
    pub(super) faults_on: bool,
    pub(super) dice: Dice,
    pub(super) hosts: Vec<Host>,
    pub(super) qps: Vec<Option<Box<Qp>>>,
    pub(super) by_number: BTreeMap<(GidBytes, u32), QpKey>,
    next_qpn: BTreeMap<GidBytes, u32>,
    pub(super) cuts: Vec<(IpAddr, IpAddr)>,
    timeline: BinaryHeap<Reverse<Scheduled>>,
    scheduled: u64,
    /// To be woken once the caller has let go of the lock.
    pub(super) wakes: Vec<Waker>,
    /// Empty buffers for inline bytes that cannot be delivered at once.
    pub(super) buffers: Vec<Vec<u8>>,
    /// Everything that happened, as one number.
    trace: u64,
    pub(super) fault_counts: FaultCounts,
}

/// The bytes of a [`Gid`], which have an order.
pub(super) type GidBytes = [u8; 16];

impl Hca {
    pub(super) fn new(config: &SimConfig) -> Self {
        Self {
            now: Duration::ZERO,
            latency: config.latency.clone(),
            faults: config.faults.clone(),
            faults_on: true,
            dice: Dice::new(config.seed),
            hosts: Vec::new(),
            qps: Vec::new(),
            by_number: BTreeMap::new(),
            next_qpn: BTreeMap::new(),
            cuts: Vec::new(),
            timeline: BinaryHeap::new(),
            scheduled: 0,
            wakes: Vec::new(),
            buffers: Vec::new(),
            trace: 0,
            fault_counts: FaultCounts::default(),
        }
    }

    // Time

    /// Lets everything happen that is due.
    pub(super) fn advance(&mut self, now: Duration) {
        while self.timeline.peek().is_some_and(|Reverse(next)| next.at <= now) {
            let Some(Reverse(next)) = self.timeline.pop() else { break };
            self.now = self.now.max(next.at);
            self.happen(next.id, next.what);
        }
        self.now = self.now.max(now);
    }

    /// When the next thing happens. May name something that has been called off.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.timeline.peek().map(|Reverse(next)| next.at)
    }

    /// Puts `what` on the timeline; the id tells it from entries that were called off.
    pub(super) fn schedule(&mut self, at: Duration, what: Happening) -> u64 {
        self.scheduled += 1;
        self.timeline.push(Reverse(Scheduled { at, id: self.scheduled, what }));
        self.scheduled
    }

    // Hosts

    pub(super) fn add_host(&mut self, addr: IpAddr, config: HostConfig) -> HostKey {
        let key = HostKey(self.hosts.len());
        let gid = config.gid.unwrap_or_else(|| gid_of(addr));
        let slabs = config.slabs;
        let memory = |count: u32, bytes: u32| vec![0; count as usize * bytes as usize];
        self.hosts.push(Host {
            addr,
            port: PortIdentity {
                device_guid: 0x0250_5300_0000_0000 | key.0 as u64,
                port: 1,
                link_layer: LinkLayer::Ethernet,
                lid: 0,
                gid,
                gid_type: config.gid_type,
                gid_index: 1,
                pkey: 0xffff,
                mtu: config.mtu,
            },
            port_up: true,
            gone: false,
            cq: Cq::new(config.cq_depth),
            srq: Srq::new(slabs.receive_slabs),
            storm_until: Duration::ZERO,
            receive_memory: memory(slabs.receive_slabs, slabs.receive_bytes),
            send_memory: memory(slabs.send_slabs, slabs.send_bytes),
            send_busy: vec![false; slabs.send_slabs as usize],
            slabs_taken: false,
            live_qps: 0,
            async_events: VecDeque::new(),
            async_wakers: Vec::new(),
            stats: Stats::default(),
            config,
        });
        key
    }

    pub(super) fn host(&self, key: HostKey) -> &Host {
        &self.hosts[key.0]
    }

    pub(super) fn host_mut(&mut self, key: HostKey) -> &mut Host {
        &mut self.hosts[key.0]
    }

    /// The process on this host is no more: its QPs vanish without a word to anyone.
    pub(super) fn kill_host(&mut self, key: HostKey) {
        for qp in 0..self.qps.len() {
            if self.qps[qp].as_ref().is_some_and(|qp| qp.host == key) {
                self.destroy_qp(QpKey(qp));
            }
        }
        let host = &mut self.hosts[key.0];
        host.gone = true;
        host.receive_memory = Vec::new();
        host.send_memory = Vec::new();
        host.async_events.push_back(AsyncEvent::DeviceFatal);
        self.wakes.append(&mut host.async_wakers);
        self.wakes.append(host.cq.wakers());
        self.note(1, key.0 as u64, 0);
    }

    pub(super) fn alive(&self, key: HostKey, what: &'static str) -> Result<(), FabricError> {
        let host = self.host(key);
        if host.gone { Err(FabricError { what, source: errno(ENODEV) }) } else { Ok(()) }
    }

    pub(super) fn raise(&mut self, key: HostKey, event: AsyncEvent) {
        let host = &mut self.hosts[key.0];
        host.async_events.push_back(event);
        host.stats.async_events += 1;
        self.wakes.append(&mut host.async_wakers);
        self.note(2, key.0 as u64, 0);
    }

    pub(super) fn next_async_event(&mut self, key: HostKey, waker: &Waker) -> Option<AsyncEvent> {
        let host = self.host_mut(key);
        let event = host.async_events.pop_front();
        if event.is_none() {
            super::cq::register(&mut host.async_wakers, waker);
        }
        event
    }

    // Slabs and completions

    pub(super) fn arm(&mut self, key: HostKey) -> Result<(), FabricError> {
        self.alive(key, "arming the CQ")?;
        let host = self.host_mut(key);
        host.cq.arm();
        host.stats.arms += 1;
        if self.faults_on && self.dice.chance(self.faults.spurious_wake) {
            self.fault_counts.spurious_wakes += 1;
            let at = self.now + self.dice.duration(&(Duration::ZERO..=Duration::from_millis(1)));
            self.schedule(at, Happening::SpuriousWake(key));
        }
        Ok(())
    }

    pub(super) fn poll(&mut self, key: HostKey, into: &mut Vec<Wc>) -> Result<usize, FabricError> {
        self.alive(key, "polling the CQ")?;
        let Self { hosts, qps, .. } = self;
        let host = &mut hosts[key.0];
        if host.cq.broken {
            return Err(FabricError { what: "polling the CQ after an overrun", source: errno(EIO) });
        }
        for polled in 0..POLL_BATCH {
            let Some(Cqe { qpn, qp, what }) = host.cq.pop() else { return Ok(polled) };
            let mint = |srq: &mut Srq, slab| {
                srq.to_caller(slab);
                RecvSlab::mint(slab)
            };
            into.push(match what {
                CqeWhat::Receive { slab, bytes } => Wc::Receive { qpn, slab: mint(&mut host.srq, slab), bytes },
                CqeWhat::ReceiveFailed { slab, status } => {
                    Wc::ReceiveFailed { qpn, slab: mint(&mut host.srq, slab), status }
                }
                CqeWhat::Send { seq } => {
                    free_slots(qps, qp, seq, &mut host.send_busy);
                    Wc::Send { qpn, seq: crate::fabric::WrSeq(seq) }
                }
                CqeWhat::SendFailed { seq, status } => {
                    free_slots(qps, qp, seq, &mut host.send_busy);
                    Wc::SendFailed { qpn, seq: crate::fabric::WrSeq(seq), status, vendor_err: 0 }
                }
            });
        }
        Ok(POLL_BATCH)
    }

    /// Puts a CQE into a host's CQ and sees to what follows.
    pub(super) fn complete(&mut self, key: HostKey, cqe: Cqe) {
        let host = &mut self.hosts[key.0];
        let pushed = host.cq.push(cqe);
        if let CqeWhat::Receive { slab, .. } | CqeWhat::ReceiveFailed { slab, .. } = cqe.what {
            if pushed == Pushed::Overrun { host.srq.lose(slab) } else { host.srq.complete(slab) }
        }
        match pushed {
            Pushed::Quiet => {}
            Pushed::Woke => {
                host.stats.wakes += 1;
                self.wakes.append(host.cq.wakers());
            }
            Pushed::Overrun => {
                host.stats.cq_overruns += 1;
                self.raise(key, AsyncEvent::CqError);
            }
        }
        let (kind, number) = match cqe.what {
            CqeWhat::Receive { slab, .. } => (3, u64::from(slab)),
            CqeWhat::ReceiveFailed { slab, .. } => (4, u64::from(slab)),
            CqeWhat::Send { seq } => (5, seq),
            CqeWhat::SendFailed { seq, .. } => (6, seq),
        };
        self.note(kind, u64::from(cqe.qpn), number);
    }

    // QPs

    pub(super) fn create_qp(&mut self, key: HostKey, caps: QpCaps) -> Result<(QpKey, Qpn), CreateQpError> {
        self.alive(key, "create_qp").map_err(|lost| CreateQpError::Device { source: lost.source })?;
        let out_of_luck = self.faults_on && self.dice.chance(self.faults.create_qp_exhausted);
        self.fault_counts.create_qp_exhausted += u64::from(out_of_luck);
        let host = self.host_mut(key);
        let config = &host.config;
        if caps.inline_bytes > config.inline_max_bytes || caps.send_wrs > config.qp_wrs || caps.send_wrs == 0 {
            return Err(CreateQpError::Unsupported { caps, source: errno(EINVAL) });
        }
        if host.live_qps >= config.max_qps || out_of_luck {
            return Err(CreateQpError::Exhausted { device_qps: config.max_qps, source: errno(ENOMEM) });
        }
        host.live_qps += 1;
        host.stats.qps_created += 1;
        let gid = host.port.gid.0;
        let number = self.new_number(gid);
        let qp = QpKey(self.qps.len());
        self.qps.push(Some(Box::new(Qp::new(key, number.get(), caps))));
        self.by_number.insert((gid, number.get()), qp);
        self.note(7, u64::from(number.get()), 0);
        Ok((qp, number))
    }

    /// The next free number of that device: not used again before all others have been.
    fn new_number(&mut self, gid: GidBytes) -> Qpn {
        // Devices start apart, so that mixing up one's own and the peer's number shows.
        let first = 0x11 + 0x10 * u32::try_from(self.next_qpn.len()).unwrap_or(0);
        let next = self.next_qpn.entry(gid).or_insert(first);
        loop {
            let number = *next;
            *next = if number >= 0x00ff_ffff { 0x11 } else { number + 1 };
            if self.by_number.contains_key(&(gid, number)) {
                continue;
            }
            if let Some(number) = Qpn::new(number) {
                return number;
            }
        }
    }

    /// The QP is gone: nothing outstanding completes, what is in the CQ stays, a half-filled receive is lost.
    pub(super) fn destroy_qp(&mut self, key: QpKey) {
        let Some(mut qp) = self.qps[key.0].take() else { return };
        let host = &mut self.hosts[qp.host.0];
        host.live_qps -= 1;
        host.stats.qps_destroyed += 1;
        while let Some(wqe) = qp.drop_one() {
            match wqe.bytes {
                Bytes::Slab(slab) => host.send_busy[slab as usize] = false,
                Bytes::Kept(buffer) => self.buffers.push(buffer),
                Bytes::Gone => {}
            }
        }
        if let Some(slab) = qp.half {
            host.srq.lose(slab);
        }
        let gid = host.port.gid.0;
        self.by_number.remove(&(gid, qp.number));
        self.note(8, u64::from(qp.number), 0);
    }

    /// How long going to RTS takes, and how it ends.
    pub(super) fn route(&mut self, key: QpKey, path: &QpPath) -> (Duration, Result<(), ConnectQpError>) {
        const RESOLUTION: Duration = Duration::from_secs(1);
        let Some((host, number)) = self.qp(key).map(|qp| (qp.host, qp.number)) else {
            return (Duration::ZERO, self.connected(key, path));
        };
        let mut delay = Duration::ZERO;
        let mut lost = false;
        if self.faults_on {
            lost = self.dice.chance(self.faults.connect_no_route);
            self.fault_counts.connects_without_route += u64::from(lost);
            if self.dice.chance(self.faults.connect_slow) {
                self.fault_counts.slow_connects += 1;
                delay = self.dice.duration(&self.faults.connect_slow_by);
            }
        }
        let (ours, theirs) = (self.host(host), path.remote_port.gid);
        let no_route = |code| {
            Err(ConnectQpError::NoRoute {
                qpn: Qpn::new(number).expect("made from one"),
                local_gid: ours.port.gid,
                gid_index: ours.port.gid_index,
                remote_gid: theirs,
                source: errno(code),
            })
        };
        if !ours.port_up {
            return (Duration::ZERO, no_route(ENETUNREACH));
        }
        if ours.port.gid.family() != theirs.family() {
            return (Duration::ZERO, no_route(EINVAL));
        }
        // A host whose process was killed still answers for its address.
        let known = self.hosts.iter().find(|host| host.port.gid == theirs);
        if lost || known.is_none_or(|known| self.is_cut(ours.addr, known.addr) || !known.port_up) {
            return (RESOLUTION, no_route(ETIMEDOUT));
        }
        (delay, Ok(()))
    }

    /// INIT to RTS.
    pub(super) fn connected(&mut self, key: QpKey, path: &QpPath) -> Result<(), ConnectQpError> {
        let smallest = |hosts: &[Host], own: Mtu| {
            hosts
                .iter()
                .rev()
                .find(|host| host.port.gid == path.remote_port.gid)
                .map_or(own, |peer| own.min(peer.config.mtu))
        };
        let Some(qp) = self.qps[key.0].as_deref_mut() else {
            let qpn = path.remote.qpn; // ours is gone with the host
            return Err(ConnectQpError::Device { qpn, state: "RTR", source: errno(ENODEV) });
        };
        if qp.state != State::Init {
            let qpn = Qpn::new(qp.number).expect("made from one");
            return Err(ConnectQpError::Device { qpn, state: "RTR", source: errno(EINVAL) });
        }
        qp.state = State::Rts;
        qp.hung = path.mtu > smallest(&self.hosts, self.hosts[qp.host.0].config.mtu);
        qp.psn = path.local_psn.get();
        qp.expected_psn = path.remote.psn.get();
        qp.path = Some(*path);
        let number = qp.number;
        self.note(9, u64::from(number), u64::from(path.remote.qpn.get()));
        Ok(())
    }

    pub(super) fn qp(&self, key: QpKey) -> Option<&Qp> {
        self.qps[key.0].as_deref()
    }

    // The world's hand

    pub(super) fn set_port(&mut self, key: HostKey, up: bool) {
        self.host_mut(key).port_up = up;
        self.raise(key, if up { AsyncEvent::PortUp } else { AsyncEvent::PortDown });
    }

    pub(super) fn is_cut(&self, a: IpAddr, b: IpAddr) -> bool {
        self.cuts.iter().any(|cut| *cut == (a, b) || *cut == (b, a))
    }

    pub(super) fn report(&self) -> Vec<HostReport> {
        let outstanding = |key: usize| -> usize {
            self.qps.iter().flatten().filter(|qp| qp.host.0 == key).map(|qp| qp.outstanding()).sum()
        };
        let report = |(key, host): (usize, &Host)| HostReport {
            addr: host.addr,
            gone: host.gone,
            live_qps: host.live_qps,
            outstanding_wrs: outstanding(key),
            unpolled_cqes: host.cq.len(),
            receive_slabs: host.srq.count(),
            send_slabs_in_flight: host.send_busy.iter().filter(|busy| **busy).count(),
            stats: host.stats,
        };
        self.hosts.iter().enumerate().map(report).collect()
    }

    /// Everything so far as one number: equal for equal histories.
    pub(super) fn trace(&self) -> u64 {
        self.trace
    }

    pub(super) fn note(&mut self, kind: u64, a: u64, b: u64) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let time = self.now.as_secs() << 30 ^ u64::from(self.now.subsec_nanos());
        let event = (kind << 56) ^ (a << 28) ^ b ^ time.rotate_left(17);
        self.trace = (self.trace ^ event).wrapping_mul(ODD).rotate_left(29);
    }
}

/// Gives back the slots and send slabs of every WR that a polled WC for `seq` covers.
fn free_slots(qps: &mut [Option<Box<Qp>>], qp: QpKey, seq: u64, send_busy: &mut [bool]) {
    let Some(qp) = qps[qp.0].as_deref_mut() else { return };
    while let Some(wqe) = qp.free_one(seq) {
        if let Bytes::Slab(slab) = wqe.bytes {
            send_busy[slab as usize] = false;
        }
    }
}

/// The GID that a `RoCE` port with this address has.
pub(super) fn gid_of(addr: IpAddr) -> Gid {
    Gid(match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    })
}

pub(super) fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

// As Linux numbers them.
pub(super) const EIO: i32 = 5;
pub(super) const ENOMEM: i32 = 12;
pub(super) const ENODEV: i32 = 19;
pub(super) const EINVAL: i32 = 22;
pub(super) const ENETUNREACH: i32 = 101;
pub(super) const ETIMEDOUT: i32 = 110;
pub(super) const EHOSTUNREACH: i32 = 113;
