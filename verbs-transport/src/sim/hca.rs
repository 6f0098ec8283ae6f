//! All devices of a world, as one machine without clock, lock or I/O: calls and the time go in, completions and wakers
//! come out. [`host`](super::host) adds what concerns no QP, [`wire`](super::wire)
//! how messages move, [`trouble`](super::trouble) what hinders them.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BTreeMap, BinaryHeap},
    io,
    net::IpAddr,
    ops::RangeInclusive,
    task::Waker,
    time::Duration,
};

use verbs_bootstrap::{Mtu, Qpn};

use super::{
    bulk::{Bulk, BulkHappening, BulkKey},
    config::SimConfig,
    fault::{Dice, Faults},
    host::Host,
    qp::{Bytes, Qp, State},
    stats::FaultCounts,
};
use crate::fabric::{ConnectQpError, CreateQpError, QpCaps, QpPath};

/// A host, by order of creation. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostKey(pub(super) usize);

/// A QP, by order of creation in its world. Never reused, unlike QP numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QpKey(pub(super) usize);

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
    /// Something of a bulk QP.
    Bulk(BulkKey, BulkHappening),
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
    pub(super) bulk: Bulk,
    /// 0: bulk bytes take no time.
    pub(super) bulk_bytes_per_second: u64,
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
            bulk: Bulk::default(),
            bulk_bytes_per_second: config.bulk_bytes_per_second,
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
    pub(super) fn new_number(&mut self, gid: GidBytes) -> Qpn {
        // Devices start apart, so that mixing up one's own and the peer's number shows.
        let first = 0x11 + 0x10 * u32::try_from(self.next_qpn.len()).unwrap_or(0);
        let next = self.next_qpn.entry(gid).or_insert(first);
        loop {
            let number = *next;
            *next = if number >= 0x00ff_ffff { 0x11 } else { number + 1 };
            if self.by_number.contains_key(&(gid, number)) || self.bulk.has_number(gid, number) {
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
        let found = self.qp(key).and_then(|qp| Some((qp.host, Qpn::new(qp.number)?)));
        let Some((host, number)) = found else { return (Duration::ZERO, self.connected(key, path)) };
        self.route_from(host, number, path)
    }

    /// The same for any QP of a host.
    pub(super) fn route_from(
        &mut self,
        host: HostKey,
        qpn: Qpn,
        path: &QpPath,
    ) -> (Duration, Result<(), ConnectQpError>) {
        const RESOLUTION: Duration = Duration::from_secs(1);
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
                qpn,
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
        // A host whose process was killed still answers for its address, until another one runs there.
        let known = self.hosts.iter().rev().find(|host| host.port.gid == theirs);
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
