//! One pair of QPs, seen from one side: what an operation runs over, and what is kept for the next.

use std::{sync::Arc, time::Duration};

use verbs_bootstrap::{Psn, QpEndpoint};
use verbs_transport::fabric::{
    CreateQpError, PostError, QpPath, QpTimers,
    bulk::{
        Access, AllocWindowError, BulkCaps, BulkFabric, BulkOp, BulkPort as _, BulkQp as _, BulkWindow as _, BulkWr,
        Rkey,
    },
};

use super::{
    RdmaConfig,
    burial::Condemned,
    device::{ConnectError, Connecting, Device, QpOf, RECV_WRS, RegionOf, SEND_WRS, WindowOf},
    grant::{Form, Grant},
    identity::{Identity, Incarnation},
    mailbox::{Mailbox, WaitError},
    path::{Agreed, PathEnd},
};
use crate::{budget::Charge, deadline::Deadline};

/// What a pair is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkNames {
    pub(crate) source_pd: Incarnation,
    pub(crate) requester_pd: Incarnation,
    pub(crate) source_link: Incarnation,
    pub(crate) requester_link: Incarnation,
}

impl LinkNames {
    pub(crate) fn of(id: &Identity) -> Self {
        Self {
            source_pd: id.source_pd,
            requester_pd: id.requester_pd,
            source_link: id.source_link,
            requester_link: id.requester_link,
        }
    }

    /// Those of an operation with this pair's in it.
    pub(crate) fn identity(self, parent: Identity, generation: u64) -> Identity {
        let Self { source_pd, requester_pd, source_link, requester_link } = self;
        Identity { source_pd, requester_pd, source_link, requester_link, generation, ..parent }
    }
}

/// What stats count it as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Connecting,
    Busy,
    Idle,
}

/// A window, and how often it was bound. Each bind changes the low 8 bits of its key.
struct CountedWindow<F: BulkFabric> {
    window: WindowOf<F>,
    binds: u8,
}

/// One side's QP of a pair. Dropped, it is buried.
pub(crate) struct Link<F: BulkFabric> {
    pub(crate) device: Arc<Device<F>>,
    pub(crate) names: LinkNames,
    pub(crate) agreed: Agreed,
    pub(crate) mail: Arc<Mailbox>,
    /// Of the last grant over it.
    pub(crate) last_generation: u64,
    /// How the source's half gives rights over it.
    pub(crate) form: Form,
    window: Option<CountedWindow<F>>,
    psn: Psn,
    stage: Stage,
    /// Always there until it is given up.
    qp: Option<Arc<QpOf<F>>>,
    permit: Option<Charge>,
}

impl<F: BulkFabric> Link<F> {
    /// Makes the QP, with its first receive posted.
    pub(crate) fn new(
        device: &Arc<Device<F>>,
        permit: Charge,
        names: LinkNames,
        agreed: Agreed,
    ) -> Result<Self, CreateQpError> {
        let caps = BulkCaps { send_wrs: SEND_WRS, recv_wrs: RECV_WRS };
        let qp = Arc::new(device.port.create_qp(caps)?);
        let mail = device.open_mailbox(qp.qpn().get());
        let mut bits = [0; 4];
        // A guess is as good where the system gives no random bytes; engines do not start there.
        let _ = getrandom::fill(&mut bits);
        let psn = Psn::from_random(u32::from_ne_bytes(bits));
        device.gauges.connecting.add();
        let link = Self {
            device: Arc::clone(device),
            names,
            agreed,
            mail,
            last_generation: 0,
            form: Form::Registration,
            window: None,
            psn,
            stage: Stage::Connecting,
            qp: Some(qp),
            permit: Some(permit),
        };
        link.post_receive().map_err(|error| CreateQpError::Device { source: error.source })?;
        Ok(link)
    }

    /// For the peer.
    pub(crate) fn endpoint(&self) -> QpEndpoint {
        QpEndpoint { qpn: self.qp().qpn(), psn: self.psn }
    }

    pub(crate) fn qpn(&self) -> u32 {
        self.qp().qpn().get()
    }

    /// To RTS, towards the peer's QP at `end`.
    pub(crate) fn connect(
        &mut self,
        remote: QpEndpoint,
        end: &PathEnd,
        config: &RdmaConfig,
        deadline: Deadline,
    ) -> Result<(), ConnectError> {
        let connecting = self.begin_connect(remote, end, config);
        self.end_connect(connecting, deadline)
    }

    /// Begins it, so that several go on side by side.
    pub(crate) fn begin_connect(&self, remote: QpEndpoint, end: &PathEnd, config: &RdmaConfig) -> Connecting {
        let timers = QpTimers {
            ack_timeout_code: config.ack_timeout_code,
            retry_cnt: config.retry_cnt,
            rnr_retry: RNR_RETRY,
            min_rnr_timer_code: MIN_RNR_TIMER_CODE,
        };
        let path = QpPath {
            remote,
            remote_port: end.port,
            local_psn: self.psn,
            mtu: self.agreed.mtu,
            rd_atomic: self.agreed.rd_atomic,
            timers,
        };
        self.device.connect(self.qp(), path)
    }

    pub(crate) fn end_connect(&mut self, connecting: Connecting, deadline: Deadline) -> Result<(), ConnectError> {
        self.device.await_connect(connecting, deadline)?;
        self.move_to(Stage::Busy);
        Ok(())
    }

    pub(crate) fn post_receive(&self) -> Result<(), PostError> {
        let _runtime = self.device.runtime.enter();
        self.qp().post_receives(1)
    }

    /// Posts one signaled work request.
    pub(crate) fn post(&self, wr: BulkWr<'_, RegionOf<F>>) -> Result<(), PostError> {
        debug_assert!(wr.signaled, "the mailbox counts completions");
        self.mail.posting(1);
        // Simulated devices let time pass on the runtime of whoever calls.
        let _runtime = self.device.runtime.enter();
        self.qp().post(&[wr]).inspect_err(|error| self.mail.refused(u32::from(error.posted == 0)))
    }

    /// Whether it can carry another operation, as far as this side can tell.
    pub(crate) fn is_usable(&self) -> bool {
        self.mail.is_quiet() && self.qp().is_rts().unwrap_or(false)
    }

    /// Binds a window over the first bytes of `region`, for this pair alone, and waits for it; its key.
    pub(crate) fn bind(
        &mut self,
        region: &RegionOf<F>,
        bytes: usize,
        access: Access,
        deadline: Deadline,
    ) -> Result<u32, BindError> {
        // Before a key could come again: free is enough, as the next window has another index.
        if self.window.as_ref().is_some_and(|counted| counted.binds == u8::MAX) {
            if let Some(Err((window, error))) = self.window.take().map(|counted| counted.window.free()) {
                self.window = Some(CountedWindow { window, binds: u8::MAX });
                return Err(BindError::Window(AllocWindowError::Device(error)));
            }
        }
        if self.window.is_none() {
            let window = self.device.port.alloc_window().map_err(BindError::Window)?;
            self.window = Some(CountedWindow { window, binds: 0 });
        }
        if let Some(counted) = &mut self.window {
            counted.binds += 1;
        }
        let window = self.window.as_ref().map(|counted| &counted.window).ok_or(BindError::NoKey)?;
        let op = BulkOp::Bind { window, region, range: 0..bytes, access };
        self.post(BulkWr { id: WINDOW_ID, signaled: true, fence: false, op }).map_err(BindError::Post)?;
        self.mail.wait_sends(0, deadline).map_err(BindError::Wait)?;
        window.rkey().map(|key| key.0).ok_or(BindError::NoKey)
    }

    /// Invalidates the window by ourselves, and waits for it, however the engine ends meanwhile; whether it worked.
    pub(crate) fn invalidate(&self, key: u32) -> bool {
        let op = BulkOp::LocalInvalidate { rkey: Rkey(key) };
        if self.post(BulkWr { id: WINDOW_ID, signaled: true, fence: false, op }).is_err() {
            return false;
        }
        let until = Deadline::after(INVALIDATE);
        while self.mail.outstanding() > 0 && until.remaining().is_some() {
            std::thread::sleep(Duration::from_micros(200));
        }
        self.mail.outstanding() == 0 && !self.mail.is_broken()
    }

    /// Whether work requests still flow.
    pub(crate) fn is_rts(&self) -> bool {
        !self.mail.is_broken() && self.qp().is_rts().unwrap_or(false)
    }

    pub(crate) fn park(&mut self) {
        self.move_to(Stage::Idle);
    }

    pub(crate) fn resume(&mut self) {
        self.move_to(Stage::Busy);
    }

    /// Gives it up: QP to ERROR at once, and destroyed before anything of the rest goes.
    pub(crate) fn condemn(mut self, grant: Option<Grant>, region: Option<RegionOf<F>>, owners: Box<dyn Send>) {
        self.end(grant, region, Some(owners));
    }

    fn end(&mut self, grant: Option<Grant>, region: Option<RegionOf<F>>, owners: Option<Box<dyn Send>>) {
        let Some(qp) = self.qp.take() else { return };
        self.gauge(self.stage).sub();
        let condemned = Condemned {
            device: Arc::clone(&self.device),
            qp: Some(qp),
            mail: Arc::clone(&self.mail),
            grant,
            window: self.window.take().map(|counted| counted.window),
            region,
            owners,
            permit: self.permit.take(),
        };
        condemned.bury();
    }

    fn qp(&self) -> &Arc<QpOf<F>> {
        self.qp.as_ref().expect("only its end takes it")
    }

    fn move_to(&mut self, stage: Stage) {
        self.gauge(self.stage).sub();
        self.gauge(stage).add();
        self.stage = stage;
    }

    fn gauge(&self, stage: Stage) -> &super::device::Gauge {
        let gauges = &self.device.gauges;
        match stage {
            Stage::Connecting => &gauges.connecting,
            Stage::Busy => &gauges.busy,
            Stage::Idle => &gauges.idle,
        }
    }
}

impl<F: BulkFabric> Drop for Link<F> {
    fn drop(&mut self) {
        self.end(None, None, None);
    }
}

/// Why a window is not bound.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    #[error(transparent)]
    Window(AllocWindowError),
    #[error(transparent)]
    Post(PostError),
    #[error("the bind did not complete: {0:?}")]
    Wait(WaitError),
    #[error("a bound window has no key")]
    NoKey,
}

/// Of binds and invalidations: one at a time.
const WINDOW_ID: u64 = (1 << 62) + 1;

/// Nothing stands before an invalidation in the source's send queue.
const INVALIDATE: Duration = Duration::from_millis(500);

/// A receive is posted before each grant is told, so that only a peer that breaks the protocol sees none.
const RNR_RETRY: u8 = 6;

/// 30 µs.
const MIN_RNR_TIMER_CODE: u8 = 3;
