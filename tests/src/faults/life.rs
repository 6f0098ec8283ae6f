//! One run of one worker in the fault model, with the tasks that use it.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use fastrand::Rng;
use tokio::{task::JoinHandle, time::sleep};
use verbs_bootstrap::InstanceId;
use verbs_transport::{Borrowed, Inbound, Progress, SendOutcome, Stream, Worker, sim::SimFabric};

use super::{
    ledger::{Ledger, Run},
    plan::{self, Mood, Plan, Taking},
};
use crate::lab::SimLab;

/// What all runs of one world share.
#[derive(Clone)]
pub struct World {
    /// The devices and the network.
    pub lab: Arc<SimLab>,
    /// What became of every frame.
    pub ledger: Ledger,
    /// The world's numbers.
    pub plan: Plan,
    /// How much goes wrong.
    pub mood: Mood,
    /// Frames left to be sent.
    pub left: Arc<AtomicU32>,
}

/// One run.
pub struct Life {
    /// Its number.
    pub run: Run,
    /// Whose.
    pub me: u32,
    /// The worker.
    pub worker: Worker<SimFabric>,
    /// Send slabs of its fabric.
    pub send_slabs: u32,
    /// Nobody polls but the tasks here.
    pub manual: bool,
    sender: Option<JoinHandle<()>>,
    pump: Option<JoinHandle<()>>,
    readers: Vec<JoinHandle<()>>,
}

impl Life {
    /// Starts a run of worker `me`. Nobody is registered yet.
    ///
    /// # Errors
    ///
    /// It did not start.
    pub async fn start(world: &World, rng: &mut Rng, run: Run, me: u32) -> Result<Self, String> {
        let (config, host, taking) = plan::worker(rng, &world.plan, world.mood, me);
        let manual = config.progress == Progress::Manual;
        let fabric = world.lab.world.host(SimLab::addr(me), host);
        let worker = Worker::new(config, fabric).map_err(|error| format!("run {run}: {error}"))?;
        let (ledger, max) = (world.ledger.clone(), world.plan.payload_max);
        let mut readers = Vec::new();
        let started = match taking {
            Taking::Handler => {
                let take = move |frame: Borrowed<'_>| {
                    ledger.delivered(me, run, 0, frame.kind, [frame.header, frame.payload], max);
                };
                worker.start_with_handler(take).await
            }
            Taking::Streams => match worker.start().await {
                Ok(Inbound { message, response, event, shutdown, .. }) => {
                    for (number, stream) in (1..).zip([message, response, event, shutdown]) {
                        let rng = rng.fork();
                        readers.push(tokio::spawn(read(ledger.clone(), rng, me, run, number, stream, max)));
                    }
                    Ok(())
                }
                Err(error) => Err(error),
            },
        };
        started.map_err(|error| format!("run {run} of {me} did not start: {error}"))?;
        let pump = manual.then(|| tokio::spawn(poll(worker.clone(), rng.fork())));
        let send_slabs = host.slabs.send_slabs;
        Ok(Self { run, me, worker, send_slabs, manual, sender: None, pump, readers })
    }

    /// Begins to send.
    pub fn send(&mut self, world: &World, rng: &mut Rng) {
        let (world, worker, run, me) = (world.clone(), self.worker.clone(), self.run, self.me);
        self.sender = Some(tokio::spawn(send_some(world, worker, rng.fork(), run, me)));
    }

    /// Learns another's address, as discovery would tell it. An address of a run that is over may be refused.
    pub fn register(&self, other: &Self) {
        let _ = self.worker.register(&other.worker.address());
    }

    /// How it stands with its peers, in words.
    pub fn tell(&self) -> String {
        let peer = |id| {
            let told = self.worker.describe(InstanceId(id))?;
            let (left, owed, flight) = (told.credits_left?, told.credits_owed?, told.wrs_in_flight?);
            let (proven, queued) = (told.proven, told.queued_frames);
            Some(format!("to {id}: proven {proven}, {left} credits, {owed} owed, {flight} WRs, {queued} queued"))
        };
        let peers: Vec<_> = (1..=4).filter_map(peer).collect();
        format!("run {} of {}, manual {}: {peers:?}", self.run, self.me, self.manual)
    }

    /// Sends no more.
    pub fn silence(&mut self) {
        if let Some(sender) = self.sender.take() {
            sender.abort();
        }
    }

    /// Waits until everything is sent.
    pub async fn sent(&mut self) {
        if let Some(sender) = self.sender.take() {
            let _ = sender.await;
        }
    }

    /// Ends the worker without a shutdown: everything that used it lets go.
    pub fn drop_worker(mut self) {
        self.silence();
        if let Some(pump) = self.pump.take() {
            pump.abort();
        }
    }

    /// Shuts it down, and says what it kept.
    ///
    /// # Errors
    ///
    /// Something has not come home.
    pub async fn shut_down(&mut self) -> Result<(), String> {
        self.silence();
        self.worker.shutdown().await;
        if let Some(pump) = self.pump.take() {
            pump.abort();
        }
        for reader in self.readers.drain(..) {
            let _ = tokio::time::timeout(Duration::from_secs(10), reader)
                .await
                .map_err(|_| format!("a stream of run {} did not end with its worker", self.run))?;
        }
        let stats = self.worker.stats();
        let slabs = self.send_slabs as usize;
        let kept = (stats.qps, stats.connections, stats.receives_promised, stats.inbound_backlog_bytes);
        if kept != (0, 0, 0, 0) || stats.send_slabs_free != slabs {
            return Err(format!("run {} of {} kept something after shutdown: {stats:?}", self.run, self.me));
        }
        Ok(())
    }
}

/// Takes the frames of one stream, now and then slowly, until the worker ends it. Keeps some, in whose slabs nothing may
/// be received meanwhile: the simulation looks when they are dropped.
async fn read(ledger: Ledger, mut rng: Rng, me: u32, run: Run, number: u8, mut stream: Stream, max: usize) {
    let mut kept = VecDeque::new();
    let keep = rng.usize(..30);
    while let Some(frame) = stream.recv().await {
        ledger.delivered(me, run, number, frame.kind, [&frame.header, &frame.payload], max);
        if rng.u8(..16) == 0 {
            sleep(Duration::from_millis(rng.u64(1..40))).await;
        }
        kept.push_back(frame);
        if kept.len() > keep {
            kept.remove(rng.usize(..kept.len()));
        }
    }
}

/// The application's loop in manual mode.
async fn poll(worker: Worker<SimFabric>, mut rng: Rng) {
    loop {
        while worker.progress().is_ok_and(|polled| polled > 0) {}
        sleep(Duration::from_millis(rng.u64(1..8))).await;
    }
}

/// Sends bursts to random peers until the world's frames are spent.
async fn send_some(world: World, worker: Worker<SimFabric>, mut rng: Rng, run: Run, me: u32) {
    let others: Vec<u32> = (1..=world.plan.workers).filter(|other| *other != me).collect();
    loop {
        let target = others[rng.usize(..others.len())];
        for _ in 0..rng.u32(1..=16) {
            let spent = world.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            if spent.is_err() {
                return;
            }
            send_one(&world, &worker, &mut rng, run, target).await;
        }
        sleep(Duration::from_millis(rng.u64(..25))).await;
    }
}

/// Sends one frame, and does with its admission what applications do.
async fn send_one(world: &World, worker: &Worker<SimFabric>, rng: &mut Rng, run: Run, target: u32) -> u32 {
    let max = world.plan.payload_max;
    let (number, sent) = world.ledger.next(run, target, max);
    let to = InstanceId(u128::from(target));
    let outcome = worker.send(to, sent.header, sent.payload, sent.kind, world.ledger.reporter(max));
    let SendOutcome::Pending(admission) = outcome else { return number };
    let ledger = world.ledger.clone();
    admission.on_resolved(move |result| {
        if result.is_err() {
            ledger.refused(run, target, number);
        }
    });
    match rng.u8(..8) {
        0 => drop(admission.cancel()),
        1 => drop(tokio::time::timeout(Duration::from_millis(rng.u64(1..50)), admission).await),
        _ => {}
    }
    number
}

/// Sends frames to `target` until one arrives: faults are over, so one must.
///
/// # Errors
///
/// None arrived, or one has no end.
pub async fn talk(world: World, worker: Worker<SimFabric>, mut rng: Rng, run: Run, target: u32) -> Result<(), String> {
    let mut last = None;
    for _ in 0..40 {
        let number = send_one(&world, &worker, &mut rng, run, target).await;
        let mut waits = 0;
        loop {
            let (delivered, failed) = world.ledger.outcome(run, target, number);
            if delivered {
                return Ok(());
            }
            if failed {
                last = world.ledger.reason(run, target, number);
                break;
            }
            waits += 1;
            if waits > 2000 {
                let told = worker.describe(InstanceId(u128::from(target)));
                return Err(format!("frame {number} of run {run} to {target} has no end: {told:?}"));
            }
            sleep(Duration::from_millis(10)).await;
        }
        sleep(Duration::from_millis(100)).await;
    }
    Err(format!("run {run} cannot talk to {target} any more: {last:?}, {:?}", worker.stats()))
}
