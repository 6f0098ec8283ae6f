//! The world: one lock around all devices, the clock, and the task that lets time do its work.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::Waker,
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::{
    config::{HostConfig, SimConfig},
    fabric::SimFabric,
    hca::{Hca, HostKey, QpKey},
    net::NetState,
    stats::{FaultCounts, HostLife, Report, Stats},
    trouble::Cause,
};

/// A number of hosts that reach each other, and the hand that lets things go wrong between them.
///
/// Cheap to clone; all clones are one world. It lives as long as the last clone, fabric, QP or stream.
#[derive(Clone, Debug)]
pub struct SimWorld {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) seed: u64,
    began: Instant,
    locked: Mutex<Locked>,
    pub(super) net: Mutex<NetState>,
    /// Tells the pump that something happens earlier than it thinks, or that the world is gone.
    news: Arc<Notify>,
}

#[derive(Debug)]
struct Locked {
    hca: Hca,
    pump: Pump,
}

/// The task that sleeps until the next thing happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pump {
    /// Not running: nothing was ever delayed, or its runtime is gone.
    Off,
    /// Sleeps until then, or for ever.
    Sleeps(Option<Duration>),
}

impl SimWorld {
    /// An empty world.
    pub fn new(config: SimConfig) -> Self {
        let shared = Arc::new(Shared {
            seed: config.seed,
            began: Instant::now(),
            locked: Mutex::new(Locked { hca: Hca::new(&config), pump: Pump::Off }),
            net: Mutex::new(NetState::new(config)),
            news: Arc::new(Notify::new()),
        });
        Self { shared }
    }

    /// Adds a host with one device. Several may have the same address: they are processes on one machine, share its
    /// QP numbers and ports, and die together in [`kill_host`](Self::kill_host).
    pub fn host(&self, addr: impl Into<IpAddr>, config: HostConfig) -> SimFabric {
        let addr = addr.into();
        let key = self.shared.with(|hca| hca.add_host(addr, config));
        SimFabric::new(Arc::clone(&self.shared), key, addr, &config)
    }

    /// Everything random comes from this.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// No further fault strikes. What has struck plays out: lost acknowledgements end in `RETRY_EXC_ERR`, a black
    /// hole stays one.
    pub fn stop_faults(&self) {
        self.shared.with(|hca| hca.faults_on = false);
        self.shared.net().stop_faults();
    }

    /// Drops a QP of a host to ERR without a word, as a device may. False when there is no such QP.
    pub fn force_qp_error(&self, addr: impl Into<IpAddr>, qpn: u32) -> bool {
        let addr = addr.into();
        self.shared.with(|hca| {
            let hosts = &hca.hosts;
            let found = hca
                .qps
                .iter()
                .position(|qp| qp.as_ref().is_some_and(|qp| qp.number == qpn && hosts[qp.host.0].addr == addr));
            found.inspect(|key| hca.enter_error(QpKey(*key), Cause::Fell)).is_some()
        })
    }

    /// The same for a bulk QP.
    pub fn force_bulk_error(&self, addr: impl Into<IpAddr>, qpn: u32) -> bool {
        let addr = addr.into();
        self.shared.with(|hca| hca.force_bulk_error(addr, qpn))
    }

    /// Breaks the rule that only its owner ends a memory window: posts on a host's bulk QP, beside whatever its process
    /// does, a SEND with invalidate of a window that the peer has bound on that connection. The window's key, or `None`
    /// when there is no such QP, no window, or no room.
    pub fn invalidate_at_peer(&self, addr: impl Into<IpAddr>, qpn: u32) -> Option<u32> {
        let addr = addr.into();
        self.shared.with(|hca| hca.invalidate_at_peer(addr, qpn))
    }

    /// Makes deregistrations of a host fail, as under a bound memory window, or work again.
    pub fn refuse_deregister(&self, addr: impl Into<IpAddr>, refuse: bool) {
        self.each_fabric(addr.into(), |hca, key| hca.host_mut(key).refuse_deregister = refuse);
    }

    /// Makes a host's device keep bulk QPs that are to be destroyed, or let them go again.
    pub fn refuse_destroy(&self, addr: impl Into<IpAddr>, refuse: bool) {
        self.each_fabric(addr.into(), |hca, key| hca.host_mut(key).refuse_destroy = refuse);
    }

    /// Ends the processes on a host, as `kill -9` does: QPs vanish without a word, the kernel closes the sockets.
    /// Their fabrics fail every call from now on; a new [`host`](Self::host) at the address is the restart.
    pub fn kill_host(&self, addr: impl Into<IpAddr>) {
        let addr = addr.into();
        self.each_fabric(addr, Hca::kill_host);
        let woken = self.shared.net().kill_host(addr);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Cuts the path between two hosts: nothing arrives, nothing is closed, bytes on sockets wait.
    pub fn cut(&self, a: impl Into<IpAddr>, b: impl Into<IpAddr>) {
        let (a, b) = (a.into(), b.into());
        self.shared.with(|hca| hca.cuts.push((a, b)));
        self.shared.net().cut(a, b);
    }

    /// Undoes [`cut`](Self::cut).
    pub fn heal(&self, a: impl Into<IpAddr>, b: impl Into<IpAddr>) {
        let (a, b) = (a.into(), b.into());
        self.shared.with(|hca| hca.cuts.retain(|cut| *cut != (a, b) && *cut != (b, a)));
        let woken = self.shared.net().heal(a, b);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Takes the RDMA port of a host down: `PortDown` there, its QPs fail or hang at their next send, its peers hear
    /// nothing. Sockets go on.
    pub fn port_down(&self, addr: impl Into<IpAddr>) {
        self.each_fabric(addr.into(), |hca, key| hca.set_port(key, false));
    }

    /// Brings it up again.
    pub fn port_up(&self, addr: impl Into<IpAddr>) {
        self.each_fabric(addr.into(), |hca, key| hca.set_port(key, true));
    }

    /// Makes the SRQ of a host look empty (RNR for everyone), or full again.
    pub fn hold_receives(&self, addr: impl Into<IpAddr>, held: bool) {
        self.each_fabric(addr.into(), |hca, key| hca.host_mut(key).srq.held = held);
    }

    /// Counters over all hosts.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        self.shared.with(|hca| hca.hosts.iter().for_each(|host| sum.absorb(&host.stats)));
        sum
    }

    /// How often each fault struck.
    pub fn fault_counts(&self) -> FaultCounts {
        let mut counts = self.shared.with(|hca| hca.fault_counts);
        self.shared.net().add_fault_counts(&mut counts);
        counts
    }

    /// What is where, host by host.
    pub fn report(&self) -> Report {
        let hosts = self.shared.with(|hca| hca.report());
        let (open_streams, listeners) = self.shared.net().open();
        Report { seed: self.shared.seed, hosts, open_streams, listeners }
    }

    /// For the end of a test, with every worker shut down.
    ///
    /// # Panics
    ///
    /// When a live host still has a QP, WR, completion, send slab, half-filled or lost receive slab in its device, or
    /// a stream or listener is still open. The text names the seed and the numbers.
    #[track_caller]
    pub fn assert_quiet(&self) {
        let report = self.report();
        assert!(report.is_quiet(), "the world is not quiet: {report}");
    }

    /// Everything that the devices did so far, with its times, as one number: equal runs give equal numbers.
    pub fn trace(&self) -> u64 {
        self.shared.with(|hca| hca.trace())
    }

    fn each_fabric(&self, addr: IpAddr, mut change: impl FnMut(&mut Hca, HostKey)) {
        self.shared.with(|hca| {
            for key in 0..hca.hosts.len() {
                if hca.hosts[key].addr == addr && hca.hosts[key].life == HostLife::Open {
                    change(hca, HostKey(key));
                }
            }
        });
    }
}

impl Shared {
    /// Runs `call` on the devices at this moment; then, without the lock, wakes whom it concerns.
    pub(super) fn with<R>(self: &Arc<Self>, call: impl FnOnce(&mut Hca) -> R) -> R {
        let mut locked = self.lock();
        locked.hca.advance(self.began.elapsed());
        let result = call(&mut locked.hca);
        let pump = locked.plan_pump();
        wake_all(locked, self);
        match pump {
            Plan::Sleeping => {}
            Plan::Tell => self.news.notify_one(),
            Plan::Start => self.start_pump(),
        }
        result
    }

    /// Looks at memory or counters: nothing happens by it, so the clock is not read.
    pub(super) fn touch<R>(&self, call: impl FnOnce(&mut Hca) -> R) -> R {
        call(&mut self.lock().hca)
    }

    pub(super) fn net(&self) -> MutexGuard<'_, NetState> {
        self.net.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A panic in a test must not turn the drops that follow into an abort: poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Locked> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Without a runtime nobody sleeps for us, and each call on a fabric lets happen what is due.
    fn start_pump(self: &Arc<Self>) {
        if let Ok(runtime) = Handle::try_current() {
            self.lock().pump = Pump::Sleeps(None);
            let alive = PumpAlive(Arc::downgrade(self));
            runtime.spawn(pump(alive, Arc::clone(&self.news), self.began));
            self.news.notify_one();
        }
    }
}

/// What the pump needs to hear.
enum Plan {
    Sleeping,
    Tell,
    Start,
}

impl Locked {
    fn plan_pump(&mut self) -> Plan {
        let next = self.hca.next_deadline();
        match (self.pump, next) {
            (_, None) => Plan::Sleeping,
            (Pump::Off, Some(_)) => Plan::Start,
            (Pump::Sleeps(Some(until)), Some(next)) if until <= next => Plan::Sleeping,
            (Pump::Sleeps(_), Some(_)) => {
                self.pump = Pump::Sleeps(next);
                Plan::Tell
            }
        }
    }
}

/// Wakes everyone, a few at a time so that nothing is allocated, and never under the lock.
fn wake_all<'a>(mut locked: MutexGuard<'a, Locked>, shared: &'a Shared) {
    while !locked.hca.wakes.is_empty() {
        let mut few: [Option<Waker>; 4] = [const { None }; 4];
        let count = few.len().min(locked.hca.wakes.len());
        few.iter_mut().zip(locked.hca.wakes.drain(..count)).for_each(|(slot, waker)| *slot = Some(waker));
        drop(locked);
        few.into_iter().flatten().for_each(Waker::wake);
        locked = shared.lock();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.news.notify_one();
    }
}

/// Marks the pump as gone when its runtime drops it, so that the next runtime gets one.
struct PumpAlive(Weak<Shared>);

impl Drop for PumpAlive {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            shared.lock().pump = Pump::Off;
        }
    }
}

/// Sleeps until the next thing happens, lets it happen, and ends with the world.
async fn pump(alive: PumpAlive, news: Arc<Notify>, began: Instant) {
    loop {
        let next = {
            let Some(shared) = alive.0.upgrade() else { return };
            let mut locked = shared.lock();
            locked.hca.advance(began.elapsed());
            let next = locked.hca.next_deadline();
            locked.pump = Pump::Sleeps(next);
            wake_all(locked, &shared);
            next
        };
        match next {
            Some(at) => tokio::select! {
                biased;
                () = news.notified() => {}
                () = sleep_until(began + at) => {}
            },
            None => news.notified().await,
        }
    }
}
