//! Memory windows of the simulated devices: what a bind checks, whom a key lets in, and what ends it.

use std::net::IpAddr;

use super::{Bulk, BulkKey, qp::Op};
use crate::{
    fabric::{
        WcStatus,
        bulk::{Access, BULK_ID_END, BulkOp, BulkWr, Rkey, Span},
    },
    sim::hca::{ENODEV, ENOMEM, Hca, HostKey, errno},
};

/// A window by its device and the upper 24 bits of its key.
pub(super) type WindowKey = (usize, u32);

/// One window of a device.
#[derive(Debug)]
pub(super) struct Window {
    /// Changes with each bind.
    key: u32,
    bound: Option<Bound>,
}

#[derive(Clone, Copy, Debug)]
struct Bound {
    qp: BulkKey,
    region: u32,
    addr: u64,
    len: u64,
    access: Access,
}

/// What a bind asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bind {
    /// The window's key before and after.
    pub(super) keys: (u32, u32),
    pub(super) region: u32,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) access: Access,
}

impl Bulk {
    /// The memory that a key lets the peer of `qp` into, and its bytes by address.
    pub(super) fn granted(&self, host: HostKey, qp: BulkKey, rkey: Rkey, write: bool) -> Option<(Span, u64, u64)> {
        let allows = |access: Access| if write { access.remote_write() } else { access.remote_read() };
        if let Some(region) = self.regions.get(&(host.0, rkey.0)) {
            let span = region.span.clone();
            let (addr, len) = (span.addr(), span.len() as u64);
            return allows(region.access).then_some((span, addr, len));
        }
        let window = self.windows.get(&(host.0, rkey.0 >> 8)).filter(|window| window.key == rkey.0)?;
        let bound = window.bound.filter(|bound| bound.qp == qp && allows(bound.access))?;
        let region = self.regions.get(&(host.0, bound.region))?;
        Some((region.span.clone(), bound.addr, bound.len))
    }

    /// Ends the window of that key, if it is bound on `qp`; whether it was.
    pub(super) fn end_window(&mut self, host: HostKey, qp: BulkKey, rkey: u32) -> bool {
        let window = self.windows.get_mut(&(host.0, rkey >> 8)).filter(|window| window.key == rkey);
        window.is_some_and(|window| window.bound.take_if(|bound| bound.qp == qp).is_some())
    }

    /// A QP is gone, and with it what was bound on it.
    pub(super) fn end_windows_on(&mut self, qp: BulkKey) {
        for window in self.windows.values_mut() {
            window.bound = window.bound.filter(|bound| bound.qp != qp);
        }
    }

    /// The lowest key of those bound on a QP.
    fn window_on(&self, qp: BulkKey) -> Option<u32> {
        let bound = |window: &&Window| window.bound.is_some_and(|bound| bound.qp == qp);
        self.windows.values().find(bound).map(|window| window.key)
    }

    pub(in crate::sim) fn count_windows(&self, host: HostKey) -> u32 {
        u32::try_from(self.windows.keys().filter(|(of, _)| *of == host.0).count()).unwrap_or(u32::MAX)
    }
}

impl Hca {
    /// Posts, on the bulk QP of that number, the end of a window that the peer has bound there; gives its key.
    pub(in crate::sim) fn invalidate_at_peer(&mut self, addr: IpAddr, qpn: u32) -> Option<u32> {
        let key = self.bulk_numbered(addr, qpn)?;
        let peer = self.reach_bulk(key)?;
        let rkey = self.bulk.window_on(peer)?;
        // An id that no owner of the QP uses: of its end, if the QP falls first, nobody is told anything.
        let (id, op) = (BULK_ID_END - 1, BulkOp::SendInvalidate { rkey: Rkey(rkey) });
        self.post_bulk(key, &[BulkWr { id, signaled: false, fence: false, op }], &[]).ok().map(|()| rkey)
    }

    /// Gives the new window's first key.
    pub(super) fn alloc_window(&mut self, host: HostKey) -> std::io::Result<u32> {
        self.alive(host, "allocating a window").map_err(|_| errno(ENODEV))?;
        let out_of_luck = self.faults_on && self.dice.chance(self.faults.register_refused);
        self.fault_counts.register_refused += u64::from(out_of_luck);
        if out_of_luck || self.bulk.count_windows(host) >= self.host(host).config.max_windows {
            return Err(errno(ENOMEM));
        }
        let key = self.bulk.new_key();
        self.bulk.windows.insert((host.0, key >> 8), Window { key, bound: None });
        self.note(21, u64::from(key), 0);
        Ok(key)
    }

    /// Frees a window, bound or not. A dead process's are gone already.
    pub(super) fn free_window(&mut self, host: HostKey, key: u32) {
        self.bulk.windows.remove(&(host.0, key >> 8));
        self.note(22, u64::from(key), 0);
    }

    /// Carries out a WR that concerns this device alone; `None`: another one.
    pub(super) fn local_op(&mut self, key: BulkKey, host: HostKey, op: Op) -> Option<Result<(), WcStatus>> {
        match op {
            Op::Bind(bind) => Some(self.bind_window(key, host, &bind)),
            Op::LocalInvalidate(rkey) => {
                let ended = self.bulk.end_window(host, key, rkey);
                Some(if ended { Ok(()) } else { Err(WcStatus::LocalQpOperation) })
            }
            Op::Read | Op::Write | Op::WriteImm(_) | Op::SendImm(_) | Op::SendInvalidate(_) => None,
        }
    }

    fn bind_window(&mut self, key: BulkKey, host: HostKey, bind: &Bind) -> Result<(), WcStatus> {
        if self.faults_on && self.dice.chance(self.faults.bind_fails) {
            self.fault_counts.failed_binds += 1;
            return Err(WcStatus::WindowBind);
        }
        let (now, next) = bind.keys;
        let region = self.bulk.regions.get(&(host.0, bind.region)).filter(|region| region.access.windows());
        let addr = region.map(|region| region.span.addr() + bind.offset as u64);
        let window = self.bulk.windows.get_mut(&(host.0, now >> 8)).filter(|window| window.key == now);
        let (Some(addr), Some(window)) = (addr, window) else { return Err(WcStatus::WindowBind) };
        if window.bound.is_some() || next & 0xff == now & 0xff {
            return Err(WcStatus::WindowBind);
        }
        let bound = Bound { qp: key, region: bind.region, addr, len: bind.len as u64, access: bind.access };
        (window.key, window.bound) = (next, Some(bound));
        self.note(23, u64::from(next), bind.len as u64);
        Ok(())
    }
}
