//! How bytes move between a bulk QP and its peer's memory, and everything that can come between.

use std::{ops::Range, time::Duration};

use super::{
    BulkHappening, BulkKey,
    qp::{Op, State, Wqe},
    window::Bind,
};
use crate::{
    fabric::{
        POST_BATCH, PostError, WcStatus, ack_timeout,
        bulk::{Access, BULK_ID_END, BulkOp, BulkRegion, BulkWc, BulkWr, Local, Remote, Rkey},
        window_book::BindKeys,
    },
    sim::{
        bulk::fabric::SimRegion,
        hca::{EINVAL, ENODEV, ENOMEM, Happening, Hca, HostKey, errno},
        qp::rnr_wait,
        trouble::FOR_EVER,
    },
};

/// What the next piece of a WR meets.
enum Meets {
    /// The bytes moved; the whole of it, or so many are left.
    Moved { left: u32 },
    /// The peer's NAK, or a fault of this side.
    Refused { status: WcStatus, peer_too: bool },
    /// The responder fell to ERR without a word.
    Silence,
    /// The peer has no receive posted.
    Rnr,
}

impl Hca {
    /// `binds` has the keys of the binds among `wrs`, in their order.
    pub(super) fn post_bulk(
        &mut self,
        key: BulkKey,
        wrs: &[BulkWr<'_, SimRegion>],
        binds: &[BindKeys],
    ) -> Result<(), PostError> {
        let asked = wrs.len();
        let refused = |posted, code| PostError { posted, asked, source: errno(code) };
        let Some(host) = self.bulk.qp(key).map(|qp| qp.host) else { return Err(refused(0, ENODEV)) };
        if asked > POST_BATCH || !wrs.iter().all(|wr| accepts(wr, host)) {
            return Err(refused(0, EINVAL));
        }
        let mut binds = binds.iter();
        for (posted, wr) in wrs.iter().enumerate() {
            let keys = if matches!(wr.op, BulkOp::Bind { .. }) { binds.next() } else { None };
            self.post_one_bulk(key, wr, keys).map_err(|code| refused(posted, code))?;
        }
        Ok(())
    }

    fn post_one_bulk(&mut self, key: BulkKey, wr: &BulkWr<'_, SimRegion>, keys: Option<&BindKeys>) -> Result<(), i32> {
        let (state, room) = self.bulk.qp(key).map(|qp| (qp.state, qp.has_room())).ok_or(ENODEV)?;
        if state == State::Init {
            return Err(EINVAL);
        }
        if !room {
            return Err(ENOMEM);
        }
        if self.faults_on && self.dice.chance(self.faults.post_refused) {
            self.fault_counts.refused_posts += 1;
            return Err(ENOMEM);
        }
        let starts = self.arrival_time();
        let nowhere = Remote { addr: 0, rkey: Rkey(0) };
        let part = |local: &Local<'_, SimRegion>| (local.region.key(), local.offset, local.len);
        let (op, local, remote) = match &wr.op {
            BulkOp::Read { local, remote } => (Op::Read, part(local), *remote),
            BulkOp::Write { local, remote } => (Op::Write, part(local), *remote),
            BulkOp::WriteImm { local, remote, imm } => (Op::WriteImm(*imm), part(local), *remote),
            BulkOp::SendImm { imm } => (Op::SendImm(*imm), (0, 0, 0), nowhere),
            BulkOp::SendInvalidate { rkey } => (Op::SendInvalidate(rkey.0), (0, 0, 0), nowhere),
            BulkOp::Bind { region, range, access, .. } => {
                let BindKeys { now, next } = *keys.ok_or(EINVAL)?;
                let (region, offset, len) = (region.key(), range.start, range.len());
                let bind = Bind { keys: (now, next), region, offset, len, access: *access };
                (Op::Bind(bind), (0, 0, 0), nowhere)
            }
            BulkOp::LocalInvalidate { rkey } => (Op::LocalInvalidate(rkey.0), (0, 0, 0), nowhere),
        };
        // What concerns this device alone goes no way.
        let starts = if wr.op.is_local() { self.now } else { starts };
        let BulkWr { id, signaled, fence, .. } = *wr;
        let (moved, early, acks) = (0, false, Duration::ZERO);
        let wqe = Wqe { id, signaled, fence, op, early, local, remote, moved, starts, acks };
        let Some(qp) = self.bulk.qp_mut(key) else { return Err(ENODEV) };
        let host = qp.host;
        qp.push(wqe);
        let reads = qp.reads() as u64;
        let stats = &mut self.host_mut(host).stats;
        stats.bulk_posted += 1;
        stats.bulk_reads_at_once = stats.bulk_reads_at_once.max(reads);
        if state == State::Error {
            self.flush_bulk(key, WcStatus::Flushed);
        } else {
            self.step(key);
        }
        Ok(())
    }

    pub(super) fn post_bulk_receives(&mut self, key: BulkKey, receives: u32) -> Result<(), PostError> {
        let refused =
            |posted: u32, code| PostError { posted: posted as usize, asked: receives as usize, source: errno(code) };
        let Some(qp) = self.bulk.qp_mut(key) else { return Err(refused(0, ENODEV)) };
        if qp.state == State::Error {
            return Ok(()); // swallowed, as on Soft-RoCE
        }
        let room = qp.caps.recv_wrs - qp.receives;
        qp.receives += receives.min(room);
        if receives > room { Err(refused(room, ENOMEM)) } else { Ok(()) }
    }

    /// A timeline entry of a bulk QP is due.
    pub(in crate::sim) fn bulk_happens(&mut self, id: u64, key: BulkKey, what: BulkHappening) {
        let Some(qp) = self.bulk.qp_mut(key) else { return };
        let timer = match what {
            BulkHappening::Step => &mut qp.step_timer,
            BulkHappening::Ack => &mut qp.ack_timer,
            BulkHappening::GiveUp => &mut qp.give_up_timer,
        };
        if timer.take_if(|valid| *valid == id).is_none() {
            return;
        }
        match what {
            BulkHappening::Step => self.step(key),
            BulkHappening::Ack => {
                self.take_bulk_acks(key);
                self.step(key);
            }
            BulkHappening::GiveUp => self.bulk_error(key, Some(WcStatus::RetryExceeded)),
        }
    }

    /// Moves on as far as it goes now.
    fn step(&mut self, key: BulkKey) {
        loop {
            let now = self.now;
            let Some(qp) = self.bulk.qp_mut(key) else { return };
            if qp.state != State::Rts || qp.hung || qp.deaf || qp.step_timer.is_some() {
                return;
            }
            let (host, answered) = (qp.host, qp.reads_answered());
            let initiator = qp.path.map_or(0, |path| usize::from(path.rd_atomic.initiator));
            let Some(wqe) = qp.head() else { return };
            if wqe.op == Op::Read && wqe.moved == 0 && answered >= initiator {
                return; // goes on with an acknowledgement
            }
            if wqe.fence && wqe.moved == 0 && answered > 0 {
                return; // the same
            }
            if wqe.starts > now {
                let at = wqe.starts;
                return self.step_at(key, at);
            }
            let (wqe, first) = (*wqe, wqe.moved == 0);
            if wqe.early {
                self.moved_all(key);
                continue;
            }
            match self.local_op(key, host, wqe.op) {
                None => {}
                Some(Ok(())) => {
                    self.moved_at(key, now);
                    continue;
                }
                Some(Err(status)) => {
                    self.ack_moved(key);
                    return self.bulk_error(key, Some(status));
                }
            }
            if !self.host(host).port_up {
                return self.bulk_sent_while_down(key);
            }
            let Some(peer) = self.reach_bulk(key) else { return self.bulk_silence(key) };
            if first && self.faults_on && self.bulk_strikes(key, peer) {
                continue;
            }
            match self.move_piece(key, peer, host, &wqe, answered) {
                Meets::Moved { left: 0 } => self.moved_all(key),
                Meets::Moved { .. } => {
                    if wqe.op == Op::Read {
                        self.overtake(key, peer);
                    }
                    let at = now + self.bulk_pace(host, u64::from(PIECE_BYTES));
                    return self.step_at(key, at);
                }
                Meets::Silence => {
                    self.bulk_error(peer, None);
                    return self.bulk_silence(key);
                }
                Meets::Rnr => return self.bulk_rnr(key, peer),
                Meets::Refused { status, peer_too } => {
                    if peer_too {
                        self.bulk_error(peer, None);
                    }
                    // Those before it are done: an answer to a later WR acknowledges them.
                    self.ack_moved(key);
                    return self.bulk_error(key, Some(status));
                }
            }
        }
    }

    fn step_at(&mut self, key: BulkKey, at: Duration) {
        let id = self.schedule(at, Happening::Bulk(key, BulkHappening::Step));
        if let Some(qp) = self.bulk.qp_mut(key) {
            qp.step_timer = Some(id);
        }
    }

    /// What one bulk QP of that host moves in a second; 0: any number at once.
    fn bulk_rate(&self, host: HostKey) -> u64 {
        match self.host(host).config.bulk_bytes_per_second {
            0 => self.bulk_bytes_per_second,
            rate => rate,
        }
    }

    /// How long so many bytes take there.
    fn bulk_pace(&self, host: HostKey, bytes: u64) -> Duration {
        match self.bulk_rate(host) {
            0 => Duration::ZERO,
            rate => {
                Duration::from_nanos(u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(rate)).unwrap_or(0))
            }
        }
    }

    /// Checks what a device checks, then copies one piece.
    fn move_piece(&mut self, key: BulkKey, peer: BulkKey, host: HostKey, wqe: &Wqe, answered: usize) -> Meets {
        let nak = |status| Meets::Refused { status, peer_too: true };
        let (peer_host, peer_path) = match self.bulk.qp(peer) {
            Some(qp) => (qp.host, qp.path),
            None => return Meets::Silence,
        };
        let (local_key, local_offset, len) = wqe.local;
        let takes = peer_path.map_or(0, |path| usize::from(path.rd_atomic.responder));
        if wqe.op == Op::Read && wqe.moved == 0 && answered >= takes {
            return nak(WcStatus::RemoteInvalidRequest);
        }
        let left = len - wqe.moved;
        let piece = if self.bulk_rate(host) == 0 { left } else { left.min(PIECE_BYTES) };
        if piece > 0 {
            let Some(local) = self.bulk.regions.get(&(host.0, local_key)) else {
                return Meets::Refused { status: WcStatus::LocalProtection, peer_too: false };
            };
            if wqe.op == Op::Read && !local.access.local_write() {
                return Meets::Refused { status: WcStatus::LocalProtection, peer_too: false };
            }
            let local = local.span.clone();
            let granted = self.bulk.granted(peer_host, peer, wqe.remote.rkey, wqe.op != Op::Read);
            let range = granted.and_then(|(span, addr, bytes)| {
                let (from, to) = (wqe.remote.addr, wqe.remote.addr.checked_add(u64::from(len))?);
                let within = from >= addr && to <= addr + bytes;
                let offset = usize::try_from(from.checked_sub(span.addr())?).ok()?;
                within.then_some((span, offset))
            });
            let Some((remote, remote_offset)) = range else {
                // Taken away in the middle of a READ: the responder falls, and nobody is told (as Soft-RoCE does it).
                let torn = wqe.op == Op::Read && wqe.moved > 0;
                return if torn { Meets::Silence } else { nak(WcStatus::RemoteAccess) };
            };
            let moved = wqe.moved as usize;
            let (from, from_at, to, to_at) = match wqe.op {
                Op::Read => (&remote, remote_offset + moved, &local, local_offset + moved),
                _ => (&local, local_offset + moved, &remote, remote_offset + moved),
            };
            let mut bounce = std::mem::take(&mut self.bulk.bounce);
            bounce.resize(PIECE_BYTES as usize, 0);
            let mut done = 0;
            while done < piece as usize {
                let part = &mut bounce[..(piece as usize - done).min(PIECE_BYTES as usize)];
                let copied = from.read(from_at + done, part).and_then(|()| to.write(to_at + done, part));
                assert!(copied.is_ok(), "sim: the range of a WR was checked: {copied:?}");
                done += part.len();
            }
            self.bulk.bounce = bounce;
            if let Some(head) = self.bulk.qp_mut(key).and_then(|qp| qp.head()) {
                head.moved += piece;
            }
        }
        if piece < left {
            return Meets::Moved { left: left - piece };
        }
        if self.deliver(peer, wqe.op, len).is_err() {
            return Meets::Rnr;
        }
        Meets::Moved { left: 0 }
    }

    /// All bytes of the head have moved: its acknowledgement goes back.
    fn moved_all(&mut self, key: BulkKey) {
        let mut acks = self.now + self.dice.duration(&self.latency);
        let mut deaf = false;
        if self.faults_on {
            if self.dice.chance(self.faults.late_completion) {
                self.fault_counts.late_completions += 1;
                acks += self.dice.duration(&self.faults.late_completion_by);
            }
            deaf = self.dice.chance(self.faults.lost_ack);
            self.fault_counts.lost_acks += u64::from(deaf);
        }
        if let Some(qp) = self.bulk.qp_mut(key) {
            (qp.silent_tries, qp.rnr_tries) = (0, 0);
            qp.deaf |= deaf;
        }
        self.moved_at(key, acks);
        if deaf {
            self.bulk_silence(key);
        }
    }

    /// The head is done, and known to be at `acks`.
    fn moved_at(&mut self, key: BulkKey, acks: Duration) {
        let Some(qp) = self.bulk.qp_mut(key) else { return };
        if let Some(head) = qp.head() {
            head.acks = acks;
        }
        qp.moved += 1;
        self.take_bulk_acks(key);
    }

    /// Takes the acknowledgements that are back, in order, and waits for the next.
    fn take_bulk_acks(&mut self, key: BulkKey) {
        loop {
            let now = self.now;
            let Some(qp) = self.bulk.qp_mut(key) else { return };
            if qp.state != State::Rts || qp.acked == qp.moved || qp.deaf {
                return;
            }
            let Some(at) = qp.oldest().map(|wqe| wqe.acks) else { return };
            if at > now {
                if qp.ack_timer.is_none() {
                    let id = self.schedule(at, Happening::Bulk(key, BulkHappening::Ack));
                    if let Some(qp) = self.bulk.qp_mut(key) {
                        qp.ack_timer = Some(id);
                    }
                }
                return;
            }
            self.ack_bulk(key);
        }
    }

    fn ack_moved(&mut self, key: BulkKey) {
        while self.bulk.qp(key).is_some_and(|qp| qp.acked < qp.moved && !qp.deaf) {
            self.ack_bulk(key);
        }
    }

    fn ack_bulk(&mut self, key: BulkKey) {
        let Some(qp) = self.bulk.qp_mut(key) else { return };
        let qpn = qp.number;
        if let Some((seq, wqe)) = qp.pop() {
            if wqe.signaled {
                self.complete_bulk(key, BulkWc::Done { qpn, id: wqe.id }, Some(seq));
            }
        }
    }

    /// The peer's QP, if a packet sent now would be taken there.
    pub(super) fn reach_bulk(&mut self, key: BulkKey) -> Option<BulkKey> {
        let qp = self.bulk.qp(key)?;
        let path = qp.path?;
        let found = self.bulk.by_number.get(&(path.remote_port.gid.0, path.remote.qpn.get())).copied();
        let peer_key = qp.peer.or(found)?;
        let host = qp.host;
        if let Some(qp) = self.bulk.qp_mut(key) {
            qp.peer = Some(peer_key);
        }
        let peer = self.bulk.qp(peer_key)?;
        let (ours, theirs) = (self.host(host), self.host(peer.host));
        let back = peer.path?;
        let takes = peer.state == State::Rts
            && !peer.hung
            && back.remote.psn == path.local_psn
            && back.remote_port.gid == ours.port.gid
            && ours.port.gid_type == theirs.port.gid_type
            && theirs.port_up
            && !self.is_cut(ours.addr, theirs.addr);
        takes.then_some(peer_key)
    }

    /// Rolls the faults that strike a WR as it starts; true when a QP fell.
    fn bulk_strikes(&mut self, key: BulkKey, peer: BulkKey) -> bool {
        if self.dice.chance(self.faults.qp_error) {
            self.fault_counts.qp_errors += 1;
            let victim = if self.dice.chance(0.5) { key } else { peer };
            self.bulk_error(victim, None);
            return true;
        }
        false
    }

    fn bulk_sent_while_down(&mut self, key: BulkKey) {
        if self.faults_on && self.dice.chance(self.faults.port_down_hangs) {
            self.fault_counts.port_down_hangs += 1;
            if let Some(qp) = self.bulk.qp_mut(key) {
                qp.hung = true;
            }
        } else {
            self.ack_moved(key);
            self.bulk_error(key, Some(WcStatus::LocalQpOperation));
        }
    }

    /// Nobody answers: again after the ack timeout, until the retries are spent.
    fn bulk_silence(&mut self, key: BulkKey) {
        let now = self.now;
        let Some(qp) = self.bulk.qp_mut(key) else { return };
        let (host, Some(path)) = (qp.host, qp.path) else { return };
        let Some(timeout) = ack_timeout(path.timers.ack_timeout_code) else { return };
        if qp.deaf {
            if path.timers.retry_cnt < FOR_EVER && qp.give_up_timer.is_none() {
                let at = now + timeout * (u32::from(path.timers.retry_cnt) + 1);
                let id = self.schedule(at, Happening::Bulk(key, BulkHappening::GiveUp));
                if let Some(qp) = self.bulk.qp_mut(key) {
                    qp.give_up_timer = Some(id);
                }
            }
            return;
        }
        let spent = path.timers.retry_cnt < FOR_EVER && qp.silent_tries > path.timers.retry_cnt;
        qp.silent_tries = qp.silent_tries.saturating_add(1);
        self.host_mut(host).stats.ack_timeouts += 1;
        if spent {
            self.ack_moved(key);
            self.bulk_error(key, Some(WcStatus::RetryExceeded));
        } else {
            self.step_at(key, now + timeout);
        }
    }

    /// No receive at the peer: again after its timer, or never.
    fn bulk_rnr(&mut self, key: BulkKey, peer: BulkKey) {
        let theirs = self.bulk.qp(peer).and_then(|peer| Some((peer.host, peer.path?.timers.min_rnr_timer_code)));
        let Some((to, code)) = theirs else { return };
        self.host_mut(to).stats.rnr_naks += 1;
        let now = self.now;
        let Some(qp) = self.bulk.qp_mut(key) else { return };
        let retries = qp.path.map_or(0, |path| path.timers.rnr_retry);
        if retries < FOR_EVER && qp.rnr_tries >= retries {
            self.ack_moved(key);
            return self.bulk_error(key, Some(WcStatus::RnrRetryExceeded));
        }
        qp.rnr_tries = qp.rnr_tries.saturating_add(1);
        self.step_at(key, now + rnr_wait(code));
    }

    /// To ERR, from any state: everything outstanding is flushed, the oldest with `status` if it failed by itself.
    pub(super) fn bulk_error(&mut self, key: BulkKey, status: Option<WcStatus>) {
        let Some(qp) = self.bulk.qp_mut(key) else { return };
        if qp.state == State::Error {
            return;
        }
        qp.state = State::Error;
        (qp.step_timer, qp.ack_timer, qp.give_up_timer) = (None, None, None);
        let (number, receives) = (qp.number, std::mem::take(&mut qp.receives));
        self.note(20, u64::from(number), 0);
        self.flush_bulk(key, status.unwrap_or(WcStatus::Flushed));
        for _ in 0..receives {
            self.complete_bulk(key, BulkWc::NotifyFailed { qpn: number, status: WcStatus::Flushed }, None);
        }
    }

    fn flush_bulk(&mut self, key: BulkKey, mut status: WcStatus) {
        while let Some((qpn, (seq, wqe))) = self.bulk.qp_mut(key).and_then(|qp| Some((qp.number, qp.pop()?))) {
            let struck = self.faults_on && status == WcStatus::Flushed && self.dice.chance(self.faults.lost_flush);
            let Some(qp) = self.bulk.qp_mut(key) else { return };
            qp.flush_stopped |= struck;
            let (stopped, host) = (qp.flush_stopped, qp.host);
            self.host_mut(host).stats.failed_wrs += 1;
            if stopped {
                self.fault_counts.lost_flushes += 1;
            } else {
                self.complete_bulk(key, BulkWc::Failed { qpn, id: wqe.id, status, vendor_err: 0 }, Some(seq));
            }
            status = WcStatus::Flushed;
        }
    }
}

/// What a provider refuses before the queue: another port's region, a range outside it, a number of ours.
fn accepts(wr: &BulkWr<'_, SimRegion>, host: HostKey) -> bool {
    let within = |local: &Local<'_, SimRegion>| {
        let end = local.offset.checked_add(local.len as usize);
        local.region.host() == host && end.is_some_and(|end| end <= local.region.len())
    };
    let rights = |region: &SimRegion, range: &Range<usize>, access: Access| {
        region.host() == host
            && !range.is_empty()
            && range.end <= region.len()
            && region.access().windows()
            && access.is_remote()
            && (!access.remote_write() || region.access().local_write())
    };
    wr.id < BULK_ID_END
        && match &wr.op {
            BulkOp::Read { local, .. } | BulkOp::Write { local, .. } | BulkOp::WriteImm { local, .. } => within(local),
            BulkOp::Bind { region, range, access, .. } => rights(region, range, *access),
            BulkOp::SendImm { .. } | BulkOp::SendInvalidate { .. } | BulkOp::LocalInvalidate { .. } => true,
        }
}

/// Bytes that move in one step of fake time.
const PIECE_BYTES: u32 = 64 << 10;
