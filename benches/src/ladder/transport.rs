//! Round trips between two workers, each polled by a thread of its own.

use std::{
    net::IpAddr,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::runtime::{Builder, Runtime};
use verbs_transport::{
    Borrowed, Config, InstanceId, MessageType, Progress, SendErrorHandler, Worker,
    fabric::{Fabric, FabricError},
};

use super::{Outcome, Times, histogram, one_way};

/// For all round trips of a rung, on whatever machine.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOKS_A_CLOCK: u32 = 1024;

/// One worker, and who polls it.
struct Side<F: Fabric> {
    runtime: Runtime,
    worker: Worker<F>,
    polled: bool,
    /// In the handler, too, which is there before the worker can be.
    known: Arc<OnceLock<Worker<F>>>,
}

impl<F: Fabric> Side<F> {
    fn new(fabric: F, ip: IpAddr, polled: bool) -> Outcome<Self> {
        // One thread: that of the driver's task. A side that is polled leaves it to the bootstrap.
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let progress = if polled { Progress::Manual } else { Progress::Event };
        let worker = Worker::new(Config { bind: (ip, 0).into(), progress, ..Config::default() }, fabric)?;
        Ok(Self { runtime, worker, polled, known: Arc::default() })
    }

    fn start(&self, on_frame: impl Fn(&Worker<F>) + Send + Sync + 'static) -> Outcome<()> {
        let known = self.known.clone();
        let handler = move |_: Borrowed<'_>| {
            if let Some(worker) = known.get() {
                on_frame(worker);
            }
        };
        self.runtime.block_on(self.worker.start_with_handler(handler))?;
        let _ = self.known.set(self.worker.clone());
        Ok(())
    }

    /// Polls, or waits while the driver does.
    fn until(&self, mut so: impl FnMut() -> bool) -> Result<(), FabricError> {
        let _inside = self.runtime.enter();
        while !so() {
            if self.polled {
                self.worker.progress()?;
            } else {
                thread::park_timeout(Duration::from_millis(20));
            }
        }
        Ok(())
    }
}

/// The state of the side that measures.
struct Rounds {
    left: u32,
    sent: Instant,
    times: Times,
}

/// So many round trips; `open` gives the fabrics of both sides and their addresses.
pub(super) fn round_trips<F: Fabric>(
    open: impl Fn(u8) -> Outcome<(F, IpAddr)>,
    polled: bool,
    bytes: usize,
    iters: u32,
) -> Outcome<Times> {
    let side = |n| open(n).and_then(|(fabric, ip)| Side::new(fabric, ip, polled));
    let (near, far) = (side(1)?, side(2)?);
    let lost: Arc<dyn SendErrorHandler> = Arc::new(|_, _, _| ());
    let payload = Bytes::from(vec![7; bytes]);
    let (here, there) = (near.worker.instance(), far.worker.instance());
    let send = move |worker: &Worker<F>, to: InstanceId| {
        drop(worker.send(to, Bytes::new(), payload.clone(), MessageType::Message, lost.clone()));
    };
    let rounds = Arc::new(Mutex::new(Rounds { left: iters, sent: Instant::now(), times: histogram() }));
    let over = Arc::new(AtomicBool::new(false));
    {
        let (rounds, over, send, measuring) = (rounds.clone(), over.clone(), send.clone(), thread::current());
        near.start(move |worker| {
            let mut rounds = rounds.lock().expect("no handler panics");
            let now = Instant::now();
            let took = one_way(now - rounds.sent);
            rounds.times.saturating_record(took);
            rounds.sent = now;
            rounds.left -= 1;
            if rounds.left > 0 {
                drop(rounds);
                send(worker, there);
            } else {
                over.store(true, Ordering::Release);
                measuring.unpark();
            }
        })?;
    }
    let answer = send.clone();
    far.start(move |worker| answer(worker, here))?;
    near.worker.register(&far.worker.address())?;
    far.worker.register(&near.worker.address())?;
    let stop = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        let answering = scope.spawn({
            let (far, stop) = (&far, &stop);
            move || far.until(|| stop.load(Ordering::Acquire))
        });
        let measured = measure(&near, there, &rounds, &over, &send);
        stop.store(true, Ordering::Release);
        answering.join().expect("polling does not panic").map_err(Into::into).and(measured)
    });
    for side in [near, far] {
        side.runtime.block_on(side.worker.shutdown());
    }
    outcome
}

fn measure<F: Fabric>(
    near: &Side<F>,
    there: InstanceId,
    rounds: &Mutex<Rounds>,
    over: &AtomicBool,
    send: &impl Fn(&Worker<F>, InstanceId),
) -> Outcome<Times> {
    let worker = near.worker.clone();
    let connecting = near.runtime.spawn(async move { worker.ensure_connected(there).await });
    near.until(|| connecting.is_finished())?;
    near.runtime.block_on(connecting)??;
    let began = Instant::now();
    rounds.lock().expect("no handler panics").sent = began;
    send(&near.worker, there);
    let mut looks = 0u32;
    near.until(|| {
        // The clock only now and then: reading it takes its time.
        looks = looks.wrapping_add(1);
        over.load(Ordering::Acquire) || looks % LOOKS_A_CLOCK == 0 && began.elapsed() > PATIENCE
    })?;
    let rounds = rounds.lock().expect("no handler panics");
    if rounds.left > 0 {
        return Err(format!("{} round trips were not done within {} s", rounds.left, PATIENCE.as_secs()).into());
    }
    Ok(rounds.times.clone())
}
