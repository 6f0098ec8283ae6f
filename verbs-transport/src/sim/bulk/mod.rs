//! Bulk ports, their regions and QPs: RDMA READ and WRITE in memory, in fake time. [`qp`] is one QP's bookkeeping,
//! [`wire`] how bytes move and what hinders them, [`window`] memory windows, [`fabric`] the traits over it.

mod fabric;
mod fences;
mod qp;
mod window;
mod wire;

use std::{collections::BTreeMap, io, net::IpAddr};

use verbs_bootstrap::Qpn;

pub use self::fabric::{SimBulkPort, SimBulkQp, SimRegion, SimWindow};
use self::{
    qp::BulkQp,
    window::{Window, WindowKey},
};
use super::{
    cq::{Cq, Pushed},
    hca::{EINVAL, EIO, ENODEV, ENOMEM, GidBytes, Hca, HostKey, errno},
    stats::HostLife,
};
use crate::fabric::{
    AsyncEvent, CreateQpError, FabricError, POLL_BATCH, QpCaps,
    bulk::{Access, BulkCaps, BulkWc, RegisterRegionError, Span},
};

/// A bulk port, by order of creation in its world. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortKey(usize);

/// A bulk QP, by order of creation in its world. Never reused, unlike QP numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BulkKey(usize);

/// What happens to a bulk QP by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BulkHappening {
    /// Its oldest unfinished WR moves on.
    Step,
    /// The next acknowledgement is back.
    Ack,
    /// Its retries are spent.
    GiveUp,
}

/// A CQE and the send-queue slots that polling it frees.
#[derive(Debug)]
struct Cqe {
    wc: BulkWc,
    qp: BulkKey,
    frees: Option<u64>,
}

#[derive(Debug)]
struct Port {
    host: HostKey,
    cq: Cq<Cqe>,
    closed: bool,
}

/// Registered memory: what a key gives a right to.
#[derive(Debug)]
struct Region {
    span: Span,
    access: Access,
}

/// The bulk half of all devices.
#[derive(Debug, Default)]
pub(super) struct Bulk {
    ports: Vec<Port>,
    qps: Vec<Option<Box<BulkQp>>>,
    by_number: BTreeMap<(GidBytes, u32), BulkKey>,
    /// By device and key. Protection domains are devices here: a key of another one is not found.
    regions: BTreeMap<(usize, u32), Region>,
    windows: BTreeMap<WindowKey, Window>,
    keys: u32,
    bounce: Vec<u8>,
}

impl Bulk {
    pub(super) fn has_number(&self, gid: GidBytes, number: u32) -> bool {
        self.by_number.contains_key(&(gid, number))
    }

    /// For a region or a window. As on Soft-RoCE: an index that is not used again soon, and eight bits that make a stale
    /// key miss.
    fn new_key(&mut self) -> u32 {
        self.keys += 1;
        (self.keys << 8) | (self.keys.wrapping_mul(0x9d) & 0xff)
    }

    fn qp(&self, key: BulkKey) -> Option<&BulkQp> {
        self.qps[key.0].as_deref()
    }

    fn qp_mut(&mut self, key: BulkKey) -> Option<&mut BulkQp> {
        self.qps[key.0].as_deref_mut()
    }

    /// QPs, regions, WRs without a polled WC and unpolled CQEs of one device.
    pub(super) fn count(&self, host: HostKey) -> (u32, u32, usize, usize) {
        let qps = || self.qps.iter().flatten().filter(|qp| qp.host == host);
        let regions = self.regions.keys().filter(|(of, _)| *of == host.0).count();
        let wrs = qps().map(|qp| qp.outstanding()).sum();
        let cqes = self.ports.iter().filter(|port| port.host == host && !port.closed).map(|port| port.cq.len()).sum();
        (u32::try_from(qps().count()).unwrap_or(u32::MAX), u32::try_from(regions).unwrap_or(u32::MAX), wrs, cqes)
    }
}

impl Hca {
    pub(super) fn open_port(&mut self, host: HostKey, cq_depth: u32) -> Result<PortKey, FabricError> {
        self.alive(host, "opening a bulk port")?;
        self.bulk.ports.push(Port { host, cq: Cq::new(cq_depth), closed: false });
        Ok(PortKey(self.bulk.ports.len() - 1))
    }

    fn close_port(&mut self, port: PortKey) {
        self.bulk.ports[port.0].closed = true;
    }

    fn port_alive(&self, port: PortKey, what: &'static str) -> Result<HostKey, FabricError> {
        let host = self.bulk.ports[port.0].host;
        self.alive(host, what).map(|()| host)
    }

    /// Gives the region's key.
    fn register(&mut self, host: HostKey, span: Span, access: Access) -> Result<u32, RegisterRegionError> {
        let bytes = span.len();
        let refused = |code| RegisterRegionError::Device { bytes, access, source: errno(code) };
        self.alive(host, "registering memory").map_err(|_| refused(ENODEV))?;
        let out_of_luck = self.faults_on && self.dice.chance(self.faults.register_refused);
        self.fault_counts.register_refused += u64::from(out_of_luck);
        let (_, regions, ..) = self.bulk.count(host);
        if out_of_luck || regions >= self.host(host).config.max_regions {
            return Err(refused(ENOMEM));
        }
        let key = self.bulk.new_key();
        self.bulk.regions.insert((host.0, key), Region { span, access });
        self.note(12, u64::from(key), bytes as u64);
        Ok(key)
    }

    fn deregister(&mut self, host: HostKey, key: u32) -> io::Result<()> {
        if self.host(host).life == HostLife::Open && self.host(host).refuse_deregister {
            return Err(errno(EINVAL));
        }
        self.bulk.regions.remove(&(host.0, key));
        self.note(13, u64::from(key), 0);
        Ok(())
    }

    fn create_bulk_qp(&mut self, port: PortKey, caps: BulkCaps) -> Result<(BulkKey, Qpn), CreateQpError> {
        let device = |lost: FabricError| CreateQpError::Device { source: lost.source };
        let host = self.port_alive(port, "create_qp").map_err(device)?;
        let out_of_luck = self.faults_on && self.dice.chance(self.faults.create_qp_exhausted);
        self.fault_counts.create_qp_exhausted += u64::from(out_of_luck);
        let config = &self.host(host).config;
        let most = config.qp_wrs;
        if caps.send_wrs == 0 || caps.send_wrs > most || caps.recv_wrs == 0 || caps.recv_wrs > most {
            let caps = QpCaps { send_wrs: caps.send_wrs, inline_bytes: 0 };
            return Err(CreateQpError::Unsupported { caps, source: errno(EINVAL) });
        }
        let device_qps = config.max_qps;
        if self.host(host).live_qps + self.bulk.count(host).0 >= device_qps || out_of_luck {
            return Err(CreateQpError::Exhausted { device_qps, source: errno(ENOMEM) });
        }
        let gid = self.host(host).port.gid.0;
        let number = self.new_number(gid);
        let key = BulkKey(self.bulk.qps.len());
        self.bulk.qps.push(Some(Box::new(BulkQp::new(port, host, number.get(), caps))));
        self.bulk.by_number.insert((gid, number.get()), key);
        self.note(14, u64::from(number.get()), 0);
        Ok((key, number))
    }

    /// The QP is gone: nothing outstanding completes, what is in the CQ stays.
    fn destroy_bulk_qp(&mut self, key: BulkKey) {
        let Some(qp) = self.bulk.qps[key.0].take() else { return };
        let gid = self.host(qp.host).port.gid.0;
        self.bulk.by_number.remove(&(gid, qp.number));
        self.bulk.end_windows_on(key);
        self.note(15, u64::from(qp.number), 0);
    }

    /// The process on this host is no more.
    pub(super) fn kill_bulk(&mut self, host: HostKey) {
        for qp in 0..self.bulk.qps.len() {
            if self.bulk.qps[qp].as_ref().is_some_and(|qp| qp.host == host) {
                self.destroy_bulk_qp(BulkKey(qp));
            }
        }
        self.bulk.regions.retain(|(of, _), _| *of != host.0);
        self.bulk.windows.retain(|(of, _), _| *of != host.0);
        let Self { bulk, wakes, .. } = self;
        bulk.ports.iter_mut().filter(|port| port.host == host).for_each(|port| wakes.append(port.cq.wakers()));
    }

    /// Drops the bulk QP of that number to ERR without a word; whether there is one.
    pub(super) fn force_bulk_error(&mut self, addr: IpAddr, qpn: u32) -> bool {
        self.bulk_numbered(addr, qpn).inspect(|key| self.bulk_error(*key, None)).is_some()
    }

    fn bulk_numbered(&self, addr: IpAddr, qpn: u32) -> Option<BulkKey> {
        let is_it = |qp: &BulkQp| qp.number == qpn && self.hosts[qp.host.0].addr == addr;
        self.bulk.qps.iter().position(|qp| qp.as_deref().is_some_and(is_it)).map(BulkKey)
    }

    fn poll_port(&mut self, port: PortKey, into: &mut Vec<BulkWc>) -> Result<usize, FabricError> {
        self.port_alive(port, "polling the bulk CQ")?;
        let Bulk { ports, qps, .. } = &mut self.bulk;
        let cq = &mut ports[port.0].cq;
        if cq.broken {
            return Err(FabricError { what: "polling the bulk CQ after an overrun", source: errno(EIO) });
        }
        for polled in 0..POLL_BATCH {
            let Some(Cqe { wc, qp, frees }) = cq.pop() else { return Ok(polled) };
            if let (Some(seq), Some(qp)) = (frees, qps[qp.0].as_deref_mut()) {
                qp.free_up_to(seq);
            }
            into.push(wc);
        }
        Ok(POLL_BATCH)
    }

    /// Puts a CQE into a port's CQ and wakes whoever waits.
    fn complete_bulk(&mut self, key: BulkKey, wc: BulkWc, frees: Option<u64>) {
        let Some(port) = self.bulk.qp(key).map(|qp| qp.port) else { return };
        let Port { host, cq, .. } = &mut self.bulk.ports[port.0];
        let host = *host;
        match cq.push(Cqe { wc, qp: key, frees }) {
            Pushed::Quiet => {}
            Pushed::Woke => {
                self.wakes.append(cq.wakers());
                self.host_mut(host).stats.wakes += 1;
            }
            Pushed::Overrun => {
                self.host_mut(host).stats.cq_overruns += 1;
                self.raise(host, AsyncEvent::CqError);
            }
        }
        let (kind, qpn, number) = match wc {
            BulkWc::Done { qpn, id } => (16, qpn, id),
            BulkWc::Failed { qpn, id, .. } => (17, qpn, id),
            BulkWc::Notified { qpn, imm, invalidated, .. } => {
                (18, qpn, u64::from(imm) ^ invalidated.map_or(0, |key| key.0.into()))
            }
            BulkWc::NotifyFailed { qpn, .. } => (19, qpn, 0),
        };
        self.note(kind, qpn.into(), number);
    }
}
