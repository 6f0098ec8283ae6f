//! The fault model: whole workers on simulated devices in fake time, with seeded faults.
//!
//! A seed decides the workers' configurations, the frames, the faults and when they strike. While faults run, every
//! frame is watched: delivered at most once and in order, reported at most once and with its own bytes. Then faults
//! stop: all pairs talk again, all workers shut down, and every frame has its end and every credit, slab, WR, QP,
//! stream and listener its home.
//!
//! What is excused, and why:
//!
//! - A frame to a process that was killed after the frame had been sent: the device had acknowledged it, the process
//!   died before it took it. No transport with acknowledgements of the device can tell.
//! - A frame of a run that a later one of the same instance has replaced, if the receiver counted a stale completion
//!   for it: it had arrived, but the receiver learnt of the new run before it polled, and drops what is old (M-35).

pub mod ledger;
pub mod life;
pub mod plan;

use std::{
    cell::RefCell,
    sync::{Arc, Once, atomic::AtomicU32},
    time::Duration,
};

use fastrand::Rng;
use tokio::time::sleep;
use verbs_bootstrap::InstanceId;
use verbs_transport::sim::FaultCounts;

pub use self::plan::Mood;
use self::{
    ledger::{Ledger, Run},
    life::{Life, World},
    plan::Plan,
};
use crate::lab::SimLab;

/// How a run of the model went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Everything that the devices did, as one number.
    pub trace: u64,
    /// Frames sent, delivered, reported, refused.
    pub totals: [u64; 4],
    /// How often each fault struck.
    pub faults: FaultCounts,
}

thread_local! {
    /// Panics of this thread's tasks, which tokio keeps to itself.
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

fn listen_for_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let former = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.with_borrow_mut(|panics| panics.push(info.to_string()));
            former(info);
        }));
    });
}

/// Runs one seed.
///
/// # Errors
///
/// A rule was broken: which one, in words.
///
/// # Panics
///
/// Without a runtime.
pub fn run(seed: u64, mood: Mood) -> Result<Outcome, String> {
    listen_for_panics();
    PANICS.take();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    let outcome = runtime.block_on(async {
        let long = Duration::from_secs(3600);
        tokio::time::timeout(long, play(seed, mood)).await.unwrap_or_else(|_| Err("not over in an hour".to_owned()))
    });
    drop(runtime);
    match PANICS.take().first() {
        Some(panic) => Err(panic.clone()),
        None => outcome,
    }
}

async fn play(seed: u64, mood: Mood) -> Result<Outcome, String> {
    let mut rng = Rng::with_seed(seed);
    let plan = Plan::new(&mut rng, mood);
    let world = World {
        lab: Arc::new(SimLab::new(seed, mood.faults())),
        ledger: Ledger::new(seed),
        left: Arc::new(AtomicU32::new(plan.frames)),
        plan,
        mood,
    };
    let mut stage = Stage { world, rng, lives: Vec::new(), dead: Vec::new(), runs: 0, stale: 0 };
    let result = stage.play().await;
    match stage.world.ledger.broken() {
        Some(broken) => Err(broken),
        None => result.map_err(|what| {
            let told: Vec<_> = stage.lives.iter().chain(&stage.dead).map(Life::tell).collect();
            format!("{what}; {told:#?}; {:?}", stage.world.lab.world.fault_counts())
        }),
    }
}

/// The workers of a world.
struct Stage {
    world: World,
    rng: Rng,
    lives: Vec<Life>,
    /// Runs whose process was killed, to be shut down at the end.
    dead: Vec<Life>,
    runs: Run,
    /// Stale completions that runs counted which have been shut down since.
    stale: u64,
}

impl Stage {
    async fn play(&mut self) -> Result<Outcome, String> {
        for me in 1..=self.world.plan.workers {
            let life = self.start(me).await?;
            self.lives.push(life);
        }
        self.register_all();
        for life in &mut self.lives {
            life.send(&self.world, &mut self.rng);
        }
        for _ in 0..self.world.plan.blows {
            sleep(Duration::from_millis(self.rng.u64(1..300))).await;
            self.blow().await?;
        }
        for life in &mut self.lives {
            life.sent().await;
        }
        self.peace();
        if self.world.mood == Mood::Unpunctual {
            self.all_arrive().await?;
        }
        self.talk().await?;
        self.come_to_an_end().await
    }

    async fn start(&mut self, me: u32) -> Result<Life, String> {
        let run = self.runs;
        self.runs += 1;
        Life::start(&self.world, &mut self.rng, run, me).await
    }

    fn register_all(&self) {
        for a in &self.lives {
            for b in &self.lives {
                if a.me != b.me {
                    a.register(b);
                }
            }
        }
    }

    /// One thing happens to the world.
    async fn blow(&mut self) -> Result<(), String> {
        let at = self.rng.usize(..self.lives.len());
        let (me, addr) = (self.lives[at].me, SimLab::addr(self.lives[at].me));
        let other = SimLab::addr(self.rng.u32(1..=self.world.plan.workers));
        let sim = self.world.lab.world.clone();
        let pause = Duration::from_millis(self.rng.u64(1..3000));
        match self.rng.u8(..9) {
            0 | 1 => {
                self.world.ledger.killed(me);
                let mut life = self.lives.remove(at);
                life.silence();
                sim.kill_host(addr);
                self.dead.push(life);
                self.restart(me).await?;
            }
            2 => {
                let mut life = self.lives.remove(at);
                life.shut_down().await?;
                self.stale += life.worker.stats().stale_completions;
                drop(life);
                self.restart(me).await?;
            }
            3 => {
                let life = self.lives.remove(at);
                if life.manual {
                    // Nobody polls any more: what had arrived is lost, as with a process that ends.
                    self.world.ledger.killed(me);
                }
                self.stale += life.worker.stats().stale_completions;
                life.drop_worker();
                sleep(Duration::from_millis(2)).await;
                self.restart(me).await?;
            }
            4 if addr != other => {
                sim.cut(addr, other);
                tokio::spawn(async move {
                    sleep(pause).await;
                    sim.heal(addr, other);
                });
            }
            5 => {
                sim.port_down(addr);
                tokio::spawn(async move {
                    sleep(pause).await;
                    sim.port_up(addr);
                });
            }
            6 => {
                sim.hold_receives(addr, true);
                tokio::spawn(async move {
                    sleep(pause / 10).await;
                    sim.hold_receives(addr, false);
                });
            }
            _ => {
                let peer = InstanceId(u128::from(self.rng.u32(1..=self.world.plan.workers)));
                let qpn = self.lives[at].worker.describe(peer).and_then(|told| told.qpn);
                qpn.map(|qpn| sim.force_qp_error(addr, qpn));
            }
        }
        Ok(())
    }

    /// A new run of `me`, which all others learn of sooner or later.
    async fn restart(&mut self, me: u32) -> Result<(), String> {
        if self.rng.bool() {
            sleep(Duration::from_millis(self.rng.u64(1..300))).await;
        }
        let mut life = self.start(me).await?;
        for other in &self.lives {
            life.register(other);
        }
        life.send(&self.world, &mut self.rng);
        for other in &self.lives {
            if self.rng.u8(..4) > 0 {
                other.register(&life);
            }
        }
        self.lives.push(life);
        Ok(())
    }

    /// Faults stop, paths and ports are whole again, and discovery has told everyone of everyone.
    fn peace(&self) {
        let sim = &self.world.lab.world;
        sim.stop_faults();
        for a in 1..=self.world.plan.workers {
            let a = SimLab::addr(a);
            sim.hold_receives(a, false);
            sim.port_up(a);
            for b in 1..=self.world.plan.workers {
                sim.heal(a, SimLab::addr(b));
            }
        }
        self.register_all();
    }

    /// Without a fault that loses anything, every frame arrives without being asked for.
    async fn all_arrive(&self) -> Result<(), String> {
        for _ in 0..2000 {
            if self.world.ledger.open().is_empty() {
                break;
            }
            sleep(Duration::from_millis(10)).await;
        }
        let (open, failed) = (self.world.ledger.open(), self.world.ledger.failed());
        if open.is_empty() && failed.is_empty() {
            return Ok(());
        }
        let told: Vec<_> = self.lives.iter().map(|life| life.worker.stats()).collect();
        Err(format!(
            "nothing may fail, but {} are still under way, {:?}, and {} failed, {:?}; {told:?}",
            open.len(),
            &open[..open.len().min(3)],
            failed.len(),
            &failed[..failed.len().min(3)]
        ))
    }

    /// Every pair talks again, both ways.
    async fn talk(&mut self) -> Result<(), String> {
        let mut talks = Vec::new();
        for a in &self.lives {
            for b in &self.lives {
                if a.me != b.me {
                    let talk = life::talk(self.world.clone(), a.worker.clone(), self.rng.fork(), a.run, b.me);
                    talks.push(tokio::spawn(talk));
                }
            }
        }
        for talk in talks {
            talk.await.map_err(|error| error.to_string())??;
        }
        Ok(())
    }

    async fn come_to_an_end(&mut self) -> Result<Outcome, String> {
        for _ in 0..1000 {
            if self.world.ledger.open().is_empty() {
                break;
            }
            sleep(Duration::from_millis(10)).await;
        }
        let held: Vec<_> = self.world.ledger.open();
        for life in self.lives.iter_mut().chain(&mut self.dead) {
            life.shut_down().await?;
        }
        let mut open = self.world.ledger.open();
        let all = || self.lives.iter().chain(&self.dead);
        let stale = self.stale + all().map(|life| life.worker.stats().stale_completions).sum::<u64>();
        let replaced = |run| self.lives.iter().all(|life| life.run != run);
        if open.iter().filter(|(run, _)| replaced(*run)).count() as u64 <= stale {
            open.retain(|(run, _)| !replaced(*run));
        }
        if !open.is_empty() {
            return Err(format!("neither delivered nor reported, even after shutdown: {open:?}"));
        }
        if held.iter().any(|(run, _)| !replaced(*run)) {
            return Err(format!("no end before shutdown, though faults are over: {held:?}"));
        }
        self.lives.clear();
        self.dead.clear();
        sleep(Duration::from_secs(1)).await;
        let sim = &self.world.lab.world;
        let report = sim.report();
        if !report.is_quiet() {
            return Err(format!("something was left behind: {report}"));
        }
        Ok(Outcome { trace: sim.trace(), totals: self.world.ledger.totals(), faults: sim.fault_counts() })
    }
}
