//! What comes between a message and its peer: RNR, silence, faults; and how a QP falls to ERR.

use std::time::Duration;

use super::{
    cq::CqeWhat,
    hca::{Happening, Hca, QpKey},
    qp::{Bytes, State, Wait, rnr_wait},
};
use crate::fabric::{AsyncEvent, WcStatus, ack_timeout};

/// Why a QP goes to ERR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// Its owner asked.
    Asked,
    /// Its oldest unacknowledged WR failed.
    Failed(WcStatus),
    /// Something else; without affiliated events nobody says what.
    Fell,
}

impl Hca {
    /// Rolls the faults that strike a message on its way; true when a QP fell.
    pub(super) fn strikes(&mut self, key: QpKey, peer: QpKey) -> bool {
        let Some((from, to)) = self.qp(key).zip(self.qp(peer)).map(|(qp, peer)| (qp.host, peer.host)) else {
            return false;
        };
        if self.dice.chance(self.faults.event_noise) {
            self.fault_counts.event_noise += 1;
            let noise = [AsyncEvent::GidChange, AsyncEvent::PortUp, AsyncEvent::Other(19), AsyncEvent::Other(4)];
            let which = self.dice.number(&(0..=3));
            self.raise(from, noise[usize::try_from(which).unwrap_or(0)]);
        }
        if self.dice.chance(self.faults.rnr_storm) {
            self.fault_counts.rnr_storms += 1;
            self.hosts[to.0].storm_until = self.now + self.dice.duration(&self.faults.rnr_storm_for);
        }
        if self.dice.chance(self.faults.qp_error) {
            self.fault_counts.qp_errors += 1;
            let victim = if self.dice.chance(0.5) { key } else { peer };
            self.enter_error(victim, Cause::Fell);
            return true;
        }
        false
    }

    pub(super) fn stops_half_way(&mut self, key: QpKey, len: u32) -> bool {
        let mtu = self.qp(key).and_then(|qp| qp.path.as_ref()).map_or(u32::MAX, |path| path.mtu.bytes());
        let half = self.faults_on && len > mtu && self.dice.chance(self.faults.half_received);
        self.fault_counts.half_received += u64::from(half);
        half
    }

    /// No receive at the peer: again after its timer, or never.
    pub(super) fn rnr(&mut self, key: QpKey, peer: QpKey) {
        let Some((to, code)) =
            self.qp(peer).and_then(|peer| Some((peer.host, peer.path.as_ref()?.timers.min_rnr_timer_code)))
        else {
            return;
        };
        self.hosts[to.0].stats.rnr_naks += 1;
        self.note(10, key.0 as u64, 0);
        let Some(qp) = self.qps[key.0].as_deref_mut() else { return };
        let retries = qp.path.as_ref().map_or(0, |path| path.timers.rnr_retry);
        if retries < FOR_EVER && qp.rnr_tries >= retries {
            return self.refused(key, WcStatus::RnrRetryExceeded);
        }
        qp.rnr_tries = qp.rnr_tries.saturating_add(1);
        let at = self.now + rnr_wait(code);
        self.wait(key, Wait::Rnr, Some(at));
    }

    /// Nobody answers: again after the ack timeout; a timeout code of 0 waits for ever.
    pub(super) fn silence(&mut self, key: QpKey) {
        let Some(code) = self.qp(key).and_then(|qp| qp.path.as_ref()).map(|path| path.timers.ack_timeout_code) else {
            return;
        };
        let at = ack_timeout(code).map(|timeout| self.now + timeout);
        self.wait(key, Wait::Silence, at);
    }

    pub(super) fn wait(&mut self, key: QpKey, why: Wait, until: Option<Duration>) {
        let id = until.map(|at| self.schedule(at, Happening::WaitEnds(key)));
        self.with_qp(key, |qp| {
            qp.wait = Some(why);
            qp.wait_timer = id;
        });
    }

    pub(super) fn wait_ends(&mut self, key: QpKey) {
        let Some(qp) = self.qps[key.0].as_deref_mut() else { return };
        let waited = qp.wait.take();
        if waited == Some(Wait::Silence) {
            self.hosts[qp.host.0].stats.ack_timeouts += 1;
            qp.silent_tries = qp.silent_tries.saturating_add(1);
            let retries = qp.path.as_ref().map_or(0, |path| path.timers.retry_cnt);
            if retries < FOR_EVER && qp.silent_tries > retries {
                return self.refused(key, WcStatus::RetryExceeded);
            }
        }
        self.run(key);
    }

    /// The own port is down: the WR fails, or the QP hangs.
    pub(super) fn sent_while_down(&mut self, key: QpKey) {
        if self.faults_on && self.dice.chance(self.faults.port_down_hangs) {
            self.fault_counts.port_down_hangs += 1;
            self.with_qp(key, |qp| qp.hung = true);
        } else {
            self.refused(key, WcStatus::LocalQpOperation);
        }
    }

    /// The oldest WR that has not arrived fails; those before it are done.
    pub(super) fn refused(&mut self, key: QpKey, status: WcStatus) {
        let Some(qp) = self.qp(key) else { return };
        if qp.deaf_from.is_some() {
            // The refusal is lost like every other answer: the retries will end it.
            return self.wait(key, Wait::Silence, None);
        }
        for _ in qp.acked..qp.arrived {
            self.ack_one(key);
        }
        self.enter_error(key, Cause::Failed(status));
    }

    /// To ERR, from any state: everything outstanding is flushed, in order.
    pub(super) fn enter_error(&mut self, key: QpKey, cause: Cause) {
        let Some(qp) = self.qps[key.0].as_deref_mut() else { return };
        if qp.state == State::Error {
            return;
        }
        qp.state = State::Error;
        qp.wait = None;
        (qp.arrive_timer, qp.ack_timer, qp.wait_timer) = (None, None, None);
        let (host, half) = (qp.host, qp.half.take());
        let Some(number) = verbs_bootstrap::Qpn::new(qp.number) else { return };
        self.note(11, u64::from(number.get()), 0);
        self.flush(key, if let Cause::Failed(status) = cause { status } else { WcStatus::Flushed });
        if let Some(slab) = half {
            self.complete_qp(key, CqeWhat::ReceiveFailed { slab, status: WcStatus::Flushed });
        }
        if self.host(host).config.affiliated_events {
            if cause != Cause::Asked {
                self.raise(host, AsyncEvent::QpFatal { qpn: number.get() });
            }
            self.raise(host, AsyncEvent::QpLastWqe { qpn: number.get() });
        }
    }

    /// Completes every unacknowledged WR: the first with `status`, the others as flushed.
    pub(super) fn flush(&mut self, key: QpKey, mut status: WcStatus) {
        while let Some(qp) = self.qps[key.0].as_deref_mut() {
            let seq = qp.acked;
            if seq == qp.posted() {
                qp.arrived = seq;
                return;
            }
            qp.acked += 1;
            let host = qp.host;
            let wqe = qp.wqe_mut(seq);
            if let Bytes::Kept(buffer) = &mut wqe.bytes {
                self.buffers.push(std::mem::take(buffer));
                wqe.bytes = Bytes::Gone;
            }
            self.hosts[host.0].stats.failed_wrs += 1;
            // Once one is lost, all that would follow are: a device whose flush stops, not one with holes in it.
            let struck = self.faults_on && self.dice.chance(self.faults.lost_flush);
            let Some(qp) = self.qps[key.0].as_deref_mut() else { return };
            qp.flush_stopped |= struck && status == WcStatus::Flushed;
            if qp.flush_stopped {
                self.fault_counts.lost_flushes += 1;
            } else {
                self.complete_qp(key, CqeWhat::SendFailed { seq, status });
            }
            status = WcStatus::Flushed;
        }
    }
}

/// Retry counts of 7 never end.
pub(super) const FOR_EVER: u8 = 7;
