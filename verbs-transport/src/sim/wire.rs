//! How messages move from one QP's send queue into another's SRQ, and everything that can come between.

use std::time::Duration;

use super::{
    cq::{Cqe, CqeWhat},
    hca::{EINVAL, ENODEV, ENOMEM, Happening, Hca, HostKey, QpKey, errno},
    qp::{Bytes, Qp, State, Wait, Wqe, packets, psn_after},
    trouble::{Cause, FOR_EVER},
};
use crate::fabric::{AsyncEvent, POST_BATCH, PostError, SendData, SendWr, WcStatus, ack_timeout};

impl Hca {
    /// Posts a chain.
    pub(super) fn post(&mut self, key: QpKey, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        assert!(wrs.len() <= POST_BATCH, "sim: {} WRs in one post, at most {POST_BATCH}", wrs.len());
        for (posted, wr) in wrs.iter().enumerate() {
            self.post_one(key, wr).map_err(|code| PostError { posted, asked: wrs.len(), source: errno(code) })?;
        }
        Ok(())
    }

    fn post_one(&mut self, key: QpKey, wr: &SendWr<'_>) -> Result<(), i32> {
        let qp = self.qps[key.0].as_deref_mut().ok_or(ENODEV)?;
        if qp.state == State::Init {
            return Err(EINVAL);
        }
        let seq = qp.posted();
        assert!(wr.seq.0 == seq, "sim: WR {} posted to qp {:#08x} as its number {seq}", wr.seq.0, qp.number);
        if matches!(wr.data, SendData::Inline(bytes) if bytes.len() > qp.caps.inline_bytes as usize) {
            return Err(EINVAL);
        }
        if !qp.has_room() {
            return Err(ENOMEM);
        }
        if self.faults_on && self.dice.chance(self.faults.post_refused) {
            self.fault_counts.refused_posts += 1;
            return Err(ENOMEM);
        }
        let (host, dead) = (qp.host, qp.state == State::Error);
        let arrives = if dead { self.now } else { self.arrival_time() };
        let host = &mut self.hosts[host.0];
        let qp = self.qps[key.0].as_deref_mut().ok_or(ENODEV)?;
        host.stats.posted += 1;
        let at_once = !dead && !qp.hung && qp.wait.is_none() && qp.arrived == seq && arrives <= self.now;
        let (len, bytes) = match &wr.data {
            SendData::Inline(bytes) if at_once || dead => (bytes.len(), Bytes::Gone),
            SendData::Inline(bytes) => {
                let mut buffer = self.buffers.pop().unwrap_or_default();
                buffer.clear();
                buffer.extend_from_slice(bytes);
                (bytes.len(), Bytes::Kept(buffer))
            }
            SendData::Slab { slab, len } => {
                let slab = slab.index();
                assert!(*len <= host.config.slabs.send_bytes, "sim: {len} bytes to send from slab {slab}");
                let busy = &mut host.send_busy[slab as usize];
                assert!(!*busy, "sim: send slab {slab} posted again before a WC covered its WR");
                *busy = true;
                (*len as usize, Bytes::Slab(slab))
            }
        };
        let len = u32::try_from(len).map_err(|_| EINVAL)?;
        qp.push(Wqe { signaled: wr.signaled, len, bytes, arrives, acks: Duration::ZERO });
        if dead {
            self.flush(key, WcStatus::Flushed);
        } else if at_once {
            self.arrive(key, if let SendData::Inline(bytes) = wr.data { Some(bytes) } else { None });
        } else {
            self.run(key);
        }
        Ok(())
    }

    /// When a message posted now is at the peer, if its predecessors are.
    pub(super) fn arrival_time(&mut self) -> Duration {
        let mut at = self.now + self.dice.duration(&self.latency);
        if self.faults_on && self.dice.chance(self.faults.delay) {
            self.fault_counts.delays += 1;
            at += self.dice.duration(&self.faults.delay_by);
        }
        at
    }

    /// A timeline entry is due.
    pub(super) fn happen(&mut self, id: u64, what: Happening) {
        if let Happening::Bulk(key, what) = what {
            return self.bulk_happens(id, key, what);
        }
        let (Happening::Arrive(key) | Happening::Ack(key) | Happening::WaitEnds(key) | Happening::GiveUp(key)) = what
        else {
            if let Happening::SpuriousWake(host) = what {
                let host = &mut self.hosts[host.0];
                host.cq.spurious();
                host.stats.wakes += 1;
                self.wakes.append(host.cq.wakers());
            }
            return;
        };
        let Some(qp) = self.qps[key.0].as_deref_mut() else { return };
        match what {
            Happening::Arrive(_) => {
                if qp.arrive_timer.take_if(|valid| *valid == id).is_some() {
                    self.run(key);
                }
            }
            Happening::Ack(_) => {
                if qp.ack_timer.take_if(|valid| *valid == id).is_some() {
                    self.take_acks(key);
                }
            }
            Happening::WaitEnds(_) => {
                if qp.wait_timer.take_if(|valid| *valid == id).is_some() {
                    self.wait_ends(key);
                }
            }
            Happening::GiveUp(_) => {
                if qp.state == State::Rts {
                    self.enter_error(key, Cause::Failed(WcStatus::RetryExceeded));
                }
            }
            Happening::SpuriousWake(_) | Happening::Bulk(..) => {}
        }
    }

    /// Lets every message arrive whose time has come.
    pub(super) fn run(&mut self, key: QpKey) {
        while let Some(qp) = self.qp(key) {
            if qp.state != State::Rts || qp.hung || qp.wait.is_some() || qp.arrived == qp.posted() {
                return;
            }
            let at = qp.wqe(qp.arrived).arrives;
            if at <= self.now {
                self.arrive(key, None);
                continue;
            }
            if qp.arrive_timer.is_none() {
                let id = self.schedule(at, Happening::Arrive(key));
                self.with_qp(key, |qp| qp.arrive_timer = Some(id));
            }
            return;
        }
    }

    /// The oldest message that has not arrived does so, or meets what hinders it. `inline` holds its bytes if the WQE
    /// does not.
    fn arrive(&mut self, key: QpKey, inline: Option<&[u8]>) {
        let Some(qp) = self.qp(key) else { return };
        let (from, seq, len) = (qp.host, qp.arrived, qp.wqe(qp.arrived).len);
        if !self.host(from).port_up {
            self.keep(key, inline);
            return self.sent_while_down(key);
        }
        let Some(peer) = self.reach(key) else {
            self.keep(key, inline);
            return self.silence(key);
        };
        if self.faults_on && self.strikes(key, peer) {
            // Whatever struck has changed the QPs' states: look again.
            self.keep(key, inline);
            return self.run(key);
        }
        let Some(to) = self.qp(peer).map(|peer| peer.host) else { return };
        let resumed = self.with_qp(peer, |peer| peer.half.take()).flatten();
        let Some(slab) = resumed.or_else(|| self.take_receive(to)) else {
            self.keep(key, inline);
            return self.rnr(key, peer);
        };
        if len > self.host(to).config.slabs.receive_bytes {
            let status = WcStatus::LocalLength;
            self.complete_qp(peer, CqeWhat::ReceiveFailed { slab, status });
            self.enter_error(peer, Cause::Fell);
            return self.refused(key, WcStatus::RemoteInvalidRequest);
        }
        if resumed.is_none() && self.stops_half_way(key, len) {
            self.keep(key, inline);
            self.with_qp(peer, |peer| peer.half = Some(slab));
            let at = self.now + self.dice.duration(&self.faults.half_received_for);
            return self.wait(key, Wait::Half, Some(at));
        }
        self.copy(key, seq, inline, to, slab);
        self.complete_qp(peer, CqeWhat::Receive { slab, bytes: len });
        self.hosts[to.0].stats.received += 1;
        self.hosts[from.0].stats.delivered += 1;
        self.arrived(key, peer);
    }

    /// Both halves move on by one message, and its acknowledgement goes back.
    fn arrived(&mut self, key: QpKey, peer: QpKey) {
        let mut acks = self.now + self.dice.duration(&self.latency);
        let mut deaf = false;
        if self.faults_on {
            if self.dice.chance(self.faults.late_completion) {
                self.fault_counts.late_completions += 1;
                acks += self.dice.duration(&self.faults.late_completion_by);
            }
            acks = next_multiple(acks, self.faults.coalesce_completions);
            deaf = self.dice.chance(self.faults.lost_ack);
        }
        let now = self.now;
        let Some(qp) = self.qps[key.0].as_deref_mut() else { return };
        let Some(path) = &qp.path else { return };
        let timers = path.timers;
        let seq = qp.arrived;
        qp.silent_tries = 0;
        qp.rnr_tries = 0;
        let psn = psn_after(qp.psn, packets(qp.wqe(seq).len, path.mtu.bytes()));
        qp.psn = psn;
        qp.arrived += 1;
        let wqe = qp.wqe_mut(seq);
        wqe.acks = acks;
        if let Bytes::Kept(buffer) = &mut wqe.bytes {
            self.buffers.push(std::mem::take(buffer));
            wqe.bytes = Bytes::Gone;
        }
        let deaf = deaf && qp.deaf_from.is_none();
        if deaf {
            qp.deaf_from = Some(seq);
        }
        let first = qp.acked == seq && qp.deaf_from.is_none();
        self.with_qp(peer, |peer| peer.expected_psn = psn);
        if deaf {
            self.fault_counts.lost_acks += 1;
            if let Some(timeout) = ack_timeout(timers.ack_timeout_code).filter(|_| timers.retry_cnt < FOR_EVER) {
                self.schedule(now + timeout * (u32::from(timers.retry_cnt) + 1), Happening::GiveUp(key));
            }
        }
        if first && acks <= now {
            self.ack_one(key);
        } else {
            self.take_acks(key);
        }
    }

    /// Takes the acknowledgements that are back, and waits for the next.
    fn take_acks(&mut self, key: QpKey) {
        while let Some(qp) = self.qp(key) {
            if qp.acked >= qp.deaf_from.unwrap_or(qp.arrived) || qp.state != State::Rts {
                return;
            }
            let at = qp.wqe(qp.acked).acks;
            if at <= self.now {
                self.ack_one(key);
                continue;
            }
            if qp.ack_timer.is_none() {
                let id = self.schedule(at, Happening::Ack(key));
                self.with_qp(key, |qp| qp.ack_timer = Some(id));
            }
            return;
        }
    }

    pub(super) fn ack_one(&mut self, key: QpKey) {
        let Some(qp) = self.qps[key.0].as_deref_mut() else { return };
        let seq = qp.acked;
        qp.acked += 1;
        if qp.wqe(seq).signaled {
            self.complete_qp(key, CqeWhat::Send { seq });
        }
    }

    /// The peer's QP, if a packet sent now would be taken there.
    fn reach(&mut self, key: QpKey) -> Option<QpKey> {
        let qp = self.qps[key.0].as_deref_mut()?;
        let path = qp.path.as_ref()?;
        if qp.peer.is_none() {
            qp.peer = self.by_number.get(&(path.remote_port.gid.0, path.remote.qpn.get())).copied();
        }
        let peer_key = qp.peer?;
        let (qp, peer) = (self.qp(key)?, self.qp(peer_key)?);
        let (ours, theirs) = (self.host(qp.host), self.host(peer.host));
        let takes = peer.state == State::Rts
            && !peer.hung
            && peer.expected_psn == qp.psn
            && peer.path.as_ref().is_some_and(|path| path.remote_port.gid == ours.port.gid)
            && ours.port.gid_type == theirs.port.gid_type
            && theirs.port_up
            && (self.cuts.is_empty() || !self.is_cut(ours.addr, theirs.addr));
        takes.then_some(peer_key)
    }

    /// The oldest receive of a host, and the limit event if that made too few.
    fn take_receive(&mut self, to: HostKey) -> Option<u32> {
        let now = self.now;
        let faults_on = self.faults_on;
        let host = &mut self.hosts[to.0];
        if host.srq.held || (faults_on && now < host.storm_until) {
            return None;
        }
        let slab = host.srq.take()?;
        if host.srq.limit_reached() {
            self.raise(to, AsyncEvent::SrqLimitReached);
        }
        Some(slab)
    }

    pub(super) fn complete_qp(&mut self, key: QpKey, what: CqeWhat) {
        if let Some((host, qpn)) = self.qp(key).map(|qp| (qp.host, qp.number)) {
            self.complete(host, Cqe { qpn, qp: key, what });
        }
    }

    /// Moves inline bytes into the WQE: its message could not be delivered during the post.
    fn keep(&mut self, key: QpKey, inline: Option<&[u8]>) {
        let Some(bytes) = inline else { return };
        let mut buffer = self.buffers.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(bytes);
        self.with_qp(key, |qp| {
            // A QP that has just fallen to ERR has nothing left to deliver.
            if qp.arrived < qp.posted() {
                qp.wqe_mut(qp.arrived).bytes = Bytes::Kept(buffer);
            }
        });
    }

    /// The message's bytes, as they are at this moment, into a receive slab.
    fn copy(&mut self, key: QpKey, seq: u64, inline: Option<&[u8]>, to: HostKey, slab: u32) {
        let Self { hosts, qps, .. } = self;
        let Some(qp) = qps[key.0].as_deref() else { return };
        let wqe = qp.wqe(seq);
        let len = wqe.len as usize;
        let start = slab as usize * hosts[to.0].config.slabs.receive_bytes as usize;
        let mut memory = std::mem::take(&mut hosts[to.0].receive_memory);
        let into = &mut memory[start..start + len];
        match (inline, &wqe.bytes) {
            (Some(bytes), _) => into.copy_from_slice(bytes),
            (None, Bytes::Kept(bytes)) => into.copy_from_slice(bytes),
            (None, Bytes::Slab(from)) => {
                let host = &hosts[qp.host.0];
                let start = *from as usize * host.config.slabs.send_bytes as usize;
                into.copy_from_slice(&host.send_memory[start..start + len]);
            }
            (None, Bytes::Gone) => unreachable!("sim: an undelivered WQE keeps its bytes"),
        }
        hosts[to.0].receive_memory = memory;
    }

    pub(super) fn with_qp<R>(&mut self, key: QpKey, change: impl FnOnce(&mut Qp) -> R) -> Option<R> {
        self.qps[key.0].as_deref_mut().map(change)
    }
}

/// The next multiple of `step` at or after `time`.
fn next_multiple(time: Duration, step: Duration) -> Duration {
    let (time_ns, step_ns) = (time.as_nanos(), step.as_nanos());
    if step_ns == 0 {
        return time;
    }
    u64::try_from(time_ns.div_ceil(step_ns) * step_ns).map_or(time, Duration::from_nanos)
}
