//! One device: its port, CQ, SRQ, slabs and events, and the calls that concern no QP.

use std::{collections::VecDeque, net::IpAddr, task::Waker, time::Duration};

use verbs_bootstrap::{Gid, LinkLayer, PortIdentity};

use super::{
    config::HostConfig,
    cq::{Cq, Cqe, CqeWhat, Pushed},
    hca::{EIO, ENODEV, Happening, Hca, HostKey, QpKey, errno},
    qp::{Bytes, Qp},
    srq::Srq,
    stats::{HostLife, HostReport, Stats},
};
use crate::fabric::{AsyncEvent, FabricError, POLL_BATCH, RecvSlab, Wc, WrSeq};

/// One device with its port, CQ, SRQ and slabs.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) addr: IpAddr,
    pub(super) config: HostConfig,
    pub(super) port: PortIdentity,
    pub(super) port_up: bool,
    /// Unless it is open, every call fails with ENODEV.
    pub(super) life: HostLife,
    pub(super) cq: Cq,
    pub(super) srq: Srq,
    /// The SRQ looks empty until then.
    pub(super) storm_until: Duration,
    pub(super) receive_memory: Vec<u8>,
    pub(super) send_memory: Vec<u8>,
    /// Which send slabs a WR names that no polled WC has covered.
    pub(super) send_busy: Vec<bool>,
    pub(super) slabs_taken: bool,
    pub(super) live_qps: u32,
    /// Deregistrations fail.
    pub(super) refuse_deregister: bool,
    /// Bulk QPs cannot be destroyed.
    pub(super) refuse_destroy: bool,
    async_events: VecDeque<AsyncEvent>,
    async_wakers: Vec<Waker>,
    pub(super) stats: Stats,
}

impl Host {
    /// The process is no more, or has closed the device: the memory is not needed any longer, the counts are.
    pub(super) fn end(&mut self, life: HostLife) {
        if self.life == HostLife::Open {
            self.life = life;
            self.receive_memory = Vec::new();
            self.send_memory = Vec::new();
            self.srq.forget_queue();
        }
    }

    /// Who waits for news of the device. To be dropped without the world's lock: a task may go with its last waker.
    pub(super) fn take_wakers(&mut self) -> [Vec<Waker>; 2] {
        [std::mem::take(&mut self.async_wakers), std::mem::take(self.cq.wakers())]
    }
}

impl Hca {
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
            life: HostLife::Open,
            cq: Cq::new(config.cq_depth),
            srq: Srq::new(slabs.receive_slabs),
            storm_until: Duration::ZERO,
            receive_memory: memory(slabs.receive_slabs, slabs.receive_bytes),
            send_memory: memory(slabs.send_slabs, slabs.send_bytes),
            send_busy: vec![false; slabs.send_slabs as usize],
            slabs_taken: false,
            live_qps: 0,
            refuse_deregister: false,
            refuse_destroy: false,
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
        self.kill_bulk(key);
        let host = &mut self.hosts[key.0];
        host.end(HostLife::Killed);
        host.async_events.push_back(AsyncEvent::DeviceFatal);
        self.wakes.append(&mut host.async_wakers);
        self.wakes.append(host.cq.wakers());
        self.note(1, key.0 as u64, 0);
    }

    pub(super) fn alive(&self, key: HostKey, what: &'static str) -> Result<(), FabricError> {
        if self.host(key).life == HostLife::Open { Ok(()) } else { Err(FabricError { what, source: errno(ENODEV) }) }
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
                srq.return_to_caller(slab);
                RecvSlab::mint(slab)
            };
            into.push(match what {
                CqeWhat::Receive { slab, bytes } => Wc::Receive { qpn, slab: mint(&mut host.srq, slab), bytes },
                CqeWhat::ReceiveFailed { slab, status } => {
                    Wc::ReceiveFailed { qpn, slab: mint(&mut host.srq, slab), status }
                }
                CqeWhat::Send { seq } => {
                    free_slots(qps, qp, seq, &mut host.send_busy);
                    Wc::Send { qpn, seq: WrSeq(seq) }
                }
                CqeWhat::SendFailed { seq, status } => {
                    free_slots(qps, qp, seq, &mut host.send_busy);
                    Wc::SendFailed { qpn, seq: WrSeq(seq), status, vendor_err: 0 }
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
        let report = |(key, host): (usize, &Host)| {
            let (live_bulk_qps, live_regions, outstanding_bulk_wrs, unpolled_bulk_cqes) = self.bulk.count(HostKey(key));
            HostReport {
                live_bulk_qps,
                live_regions,
                live_windows: self.bulk.count_windows(HostKey(key)),
                outstanding_bulk_wrs,
                unpolled_bulk_cqes,
                addr: host.addr,
                life: host.life,
                live_qps: host.live_qps,
                outstanding_wrs: outstanding(key),
                unpolled_cqes: host.cq.len(),
                receive_slabs: host.srq.count(),
                send_slabs_in_flight: host.send_busy.iter().filter(|busy| **busy).count(),
                stats: host.stats,
            }
        };
        self.hosts.iter().enumerate().map(report).collect()
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
