//! Asynchronous batches over a transport that does what the test says, when it says so.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
        mpsc::{Receiver, Sender, channel},
    },
    task::{Context, Poll, Wake, Waker},
    time::{Duration, Instant},
};

use super::{DataPath, Slice};
use crate::{
    Batch, BatchError, BatchState, Config, Direction, Engine, Notification, NotificationStatus, Permission, Phase,
    RegisteredMemory, RemoteEffect, RemoteSegment, Stats, SubmitError, TaskState, TransferError, TransferRequest,
    Transport, deadline::Deadline, error::Failure, memory::testing::external,
};

const LONG: Duration = Duration::from_secs(20);
/// Long enough for what must not happen to have happened.
const MOMENT: Duration = Duration::from_millis(30);

/// What the transport is to do with a slice.
enum Verdict {
    Complete,
    Fail(RemoteEffect),
    /// Give up at the deadline, while a device still has the memory.
    HoldBack,
    Panic,
}

/// A slice that has arrived at the transport.
struct Arrival {
    length: u64,
    verdict: Sender<Verdict>,
}

#[derive(Default)]
struct Held {
    before_post: AtomicBool,
    arrivals: Mutex<Option<Sender<Arrival>>>,
    kept_by_device: Mutex<Vec<Slice>>,
    posted: AtomicU32,
}

impl DataPath for Held {
    fn transfer(&self, slice: Slice, _deadline: Deadline, post: &dyn Fn() -> bool) -> Result<Transport, Failure> {
        let arrive = || {
            let (verdict, ask) = channel();
            let arrivals = self.arrivals.lock().expect("no panic").clone().expect("a test listens");
            // The test may have ended its part; then there is no verdict.
            let _ = arrivals.send(Arrival { length: slice.length, verdict });
            ask.recv()
        };
        if self.before_post.load(SeqCst) {
            arrive().expect("a verdict");
        }
        if !post() {
            return Err(Failure::harmless(TransferError::Cancelled));
        }
        self.posted.fetch_add(1, SeqCst);
        match arrive() {
            Ok(Verdict::Complete) => Ok(Transport::Tcp),
            Ok(Verdict::Fail(effect)) => {
                Err(Failure::with(TransferError::Disconnected { phase: Phase::Reply }, effect))
            }
            Ok(Verdict::HoldBack) => {
                self.kept_by_device.lock().expect("no panic").push(slice);
                Err(Failure::with(TransferError::TimedOut { phase: Phase::Reply }, RemoteEffect::Unknown))
            }
            Ok(Verdict::Panic) => panic!("as a fault of ours would"),
            Err(_) => Err(Failure::harmless(TransferError::Stopped)),
        }
    }
}

struct Rig {
    engine: Engine,
    path: Arc<Held>,
    arrivals: Receiver<Arrival>,
    memory: RegisteredMemory,
    peer: RemoteSegment,
    idle: Stats,
}

impl Rig {
    fn new(config: Config) -> Self {
        let path = Arc::new(Held::default());
        let (tell, arrivals) = channel();
        *path.arrivals.lock().expect("no panic") = Some(tell);
        let engine = Engine::with_path(config, Arc::clone(&path) as Arc<dyn DataPath>).expect("an engine");
        let memory = engine.register_memory(vec![0; 1000].into(), Permission::RemoteReadWrite).expect("room");
        let peer = engine.open_segment(engine.endpoint(), engine.epoch(), LONG).expect("itself");
        let idle = engine.stats();
        Self { engine, path, arrivals, memory, peer, idle }
    }

    fn request(&self, length: u64) -> TransferRequest {
        TransferRequest { local_address: self.memory.address(), remote_address: self.memory.address(), length }
    }

    fn batch(&self, lengths: &[u64]) -> Batch {
        let batch = self.engine.allocate_batch(lengths.len()).expect("room");
        self.submit(&batch, lengths, LONG, None);
        batch
    }

    fn submit(&self, batch: &Batch, lengths: &[u64], timeout: Duration, notification: Option<&Notification>) {
        let requests: Vec<_> = lengths.iter().map(|length| self.request(*length)).collect();
        batch.submit(&self.peer, Direction::Write, &requests, timeout, notification).expect("sound");
    }

    fn arrival(&self) -> Arrival {
        self.arrivals.recv_timeout(LONG).expect("a slice arrives")
    }

    /// Every charge is back.
    fn assert_idle(&self) {
        let charges = |stats: &Stats| {
            (stats.submissions, stats.submission_bytes, stats.batches, stats.batch_slots, stats.registrations)
        };
        eventually("every charge is back", || charges(&self.engine.stats()) == charges(&self.idle));
    }
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "not in {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn states(batch: &Batch) -> Vec<TaskState> {
    (0..batch.status().tasks).map(|task| batch.task(task).expect("there").state).collect()
}

use TaskState::{Cancelled, Completed, Failed, NotAttempted, Pending, TimedOut};

#[test]
fn tasks_run_in_order_and_batches_beside_each_other() {
    let rig = Rig::new(Config::default());
    let (a, b) = (rig.batch(&[1, 2]), rig.batch(&[10]));
    let (first, second) = (rig.arrival(), rig.arrival());
    let (of_a, of_b) = if first.length == 1 { (first, second) } else { (second, first) };
    assert_eq!((of_a.length, of_b.length), (1, 10), "the second task of a waits for its first");
    assert!(!a.locally_drained() && !b.locally_drained());
    of_a.verdict.send(Verdict::Complete).expect("waits");
    let next = rig.arrival();
    assert_eq!(next.length, 2);
    assert_eq!(states(&a), [Completed, Pending]);
    next.verdict.send(Verdict::Fail(RemoteEffect::Unknown)).expect("waits");
    of_b.verdict.send(Verdict::Complete).expect("waits");
    assert!(a.wait(LONG) && b.wait(LONG));
    assert_eq!((states(&a), states(&b)), (vec![Completed, Failed], vec![Completed]));
    assert_eq!(a.task(1).expect("there").effect, RemoteEffect::Unknown);
    assert_eq!((a.status().state, a.status().bytes), (BatchState::Failed, 1));
    a.free().expect("done");
    b.free().expect("done");
    rig.assert_idle();
}

#[test]
fn a_cancel_before_during_and_after_the_post() {
    let rig = Rig::new(Config::default());
    rig.path.before_post.store(true, SeqCst);
    let batch = rig.batch(&[1, 2]);
    let before = rig.arrival();
    batch.cancel();
    assert_eq!(states(&batch), [Cancelled, Cancelled], "nothing was posted: at once");
    assert!(!batch.locally_drained(), "the transport still has the slice");
    before.verdict.send(Verdict::Complete).expect("waits");
    assert!(batch.wait(LONG));
    assert_eq!((rig.path.posted.load(SeqCst), batch.task(0).expect("there").effect), (0, RemoteEffect::None));
    drop(batch);

    rig.path.before_post.store(false, SeqCst);
    let batch = rig.batch(&[1, 2, 3]);
    let posted = rig.arrival();
    batch.cancel();
    assert_eq!(states(&batch), [Pending, Cancelled, Cancelled], "accepted is not done");
    posted.verdict.send(Verdict::Complete).expect("waits");
    assert!(batch.wait(LONG));
    assert_eq!(states(&batch), [Completed, Cancelled, Cancelled]);
    batch.cancel();
    assert_eq!(batch.status().state, BatchState::Cancelled, "idempotent");
    drop(batch);

    let batch = rig.batch(&[1]);
    let posted = rig.arrival();
    batch.cancel();
    posted.verdict.send(Verdict::Fail(RemoteEffect::Unknown)).expect("waits");
    assert!(batch.wait(LONG));
    assert_eq!((states(&batch), batch.task(0).expect("there").effect), (vec![Failed], RemoteEffect::Unknown));
    drop(batch);
    rig.assert_idle();
}

#[test]
fn a_task_may_time_out_while_a_device_has_its_memory() {
    struct Owner(Arc<AtomicU32>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let rig = Rig::new(Config::default());
    let dropped = Arc::<AtomicU32>::default();
    let memory = Arc::new(external(vec![0; 64], Owner(Arc::clone(&dropped))));
    let local = rig.engine.register_host_memory(&memory, 0, 64, Permission::LocalOnly).expect("room");
    let request = TransferRequest { local_address: local.address(), ..rig.request(64) };

    let batch = rig.engine.allocate_batch(2).expect("room");
    batch.submit(&rig.peer, Direction::Write, &[request, request], Duration::from_millis(20), None).expect("sound");
    rig.engine.unregister_memory(&local).expect("registered");
    drop((local, memory));
    let posted = rig.arrival();
    eventually("the deadline ends it, whatever the transport does", || states(&batch) == [TimedOut, NotAttempted]);
    assert!(batch.status().is_finished() && !batch.locally_drained());
    posted.verdict.send(Verdict::HoldBack).expect("waits");
    std::thread::sleep(MOMENT);
    assert!(!batch.locally_drained() && dropped.load(SeqCst) == 0, "the device has it");
    let (batch, error) = batch.free().expect_err("not drained");
    assert_eq!(error, BatchError::Busy { id: batch.id(), pending: 0, drained: false });
    assert_eq!(rig.engine.stats().submissions, 1, "charges stay as long");
    rig.path.kept_by_device.lock().expect("no panic").clear();
    assert!(batch.wait(LONG) && batch.locally_drained());
    assert_eq!((dropped.load(SeqCst), batch.task(0).expect("there").effect), (1, RemoteEffect::Unknown));
    batch.free().expect("now");
    rig.assert_idle();
}

#[test]
fn a_group_that_waits_behind_another_times_out_on_its_own() {
    let rig = Rig::new(Config::default());
    let batch = rig.engine.allocate_batch(3).expect("room");
    rig.submit(&batch, &[1], LONG, None);
    rig.submit(&batch, &[2, 3], Duration::from_millis(20), Some(&Notification::default()));
    let first = rig.arrival();
    eventually("the second group is out of time", || states(&batch) == [Pending, TimedOut, NotAttempted]);
    assert!(matches!(batch.status().notifications[1], NotificationStatus::Skipped));
    assert_eq!(batch.task(1).expect("there").effect, RemoteEffect::None);
    first.verdict.send(Verdict::Complete).expect("waits");
    assert!(batch.wait(LONG));
    assert_eq!((states(&batch)[0], rig.path.posted.load(SeqCst)), (Completed, 1));
}

#[test]
fn numbers_that_were_given_up_are_refused() {
    let rig = Rig::new(Config::default());
    let engine = &rig.engine;
    let id = engine.allocate_batch(1).expect("room").into_id();
    assert_eq!(engine.poll_batch(id).map(|status| status.state), Ok(BatchState::Completed));
    let submit = || engine.submit_to_batch(id, &rig.peer, Direction::Read, &[rig.request(1)], LONG, None);
    submit().expect("room");
    let over = submit().expect_err("full");
    let full = BatchError::Full { id, capacity: 1, taken: 1, asked: 1 };
    assert!(matches!(&over, SubmitError::Batch(error) if *error == full), "{over}");
    let busy = engine.free_batch(id).expect_err("it runs");
    assert_eq!(busy, BatchError::Busy { id, pending: 1, drained: false });
    let arrival = rig.arrival();
    assert_eq!(engine.poll_task(id, 0).map(|task| task.state), Ok(Pending), "nothing has changed");
    arrival.verdict.send(Verdict::Complete).expect("waits");
    eventually("drained", || engine.locally_drained(id) == Ok(true));
    assert_eq!(engine.poll_task(id, 1).map(drop), Err(BatchError::NoSuchTask { id, task: 1 }));
    engine.free_batch(id).expect("done");
    let other = engine.allocate_batch(1).expect("room");
    assert_ne!(other.id(), id);
    let stale = BatchError::Stale { id };
    assert_eq!(engine.free_batch(id), Err(stale.clone()), "a second free");
    assert_eq!(engine.poll_batch(id).map(drop), Err(stale.clone()));
    assert_eq!(engine.cancel_batch(id), Err(stale.clone()));
    assert_eq!(engine.detach_batch(id), Err(stale.clone()));
    assert_eq!(engine.locally_drained(id), Err(stale.clone()));
    assert_eq!(engine.poll_task(id, 0).map(drop), Err(stale.clone()));
    assert!(matches!(submit(), Err(SubmitError::Batch(error)) if error == stale));
    engine.detach_batch(other.id()).expect("the handle does not mind");
    drop(other);
    rig.assert_idle();
}

#[test]
fn budgets_of_batches_slots_and_submissions_hold_below_at_and_above() {
    let config = Config {
        max_async_batches: 3,
        max_async_slots: 10,
        max_submissions: 2,
        max_submission_bytes: 100,
        ..Config::default()
    };
    let rig = Rig::new(config);
    let engine = &rig.engine;
    let kept = [engine.allocate_batch(4).expect("below"), engine.allocate_batch(4).expect("below")];
    assert_eq!(engine.allocate_batch(3).expect_err("one slot too many").budget, "max_async_slots");
    let third = engine.allocate_batch(2).expect("at both limits");
    assert_eq!(engine.allocate_batch(0).expect_err("one batch too many").budget, "max_async_batches");

    let submit =
        |batch: &Batch, length| batch.submit(&rig.peer, Direction::Read, &[rig.request(length)], LONG, None).map(drop);
    let exhausted = |result: Result<(), SubmitError>| match result {
        Err(SubmitError::Exhausted(exhausted)) => exhausted.budget,
        other => panic!("{other:?}"),
    };
    submit(&kept[0], 99).expect("below");
    assert_eq!(exhausted(submit(&kept[1], 2)), "max_submission_bytes");
    submit(&kept[1], 1).expect("at both");
    assert_eq!(exhausted(submit(&third, 0)), "max_submissions");
    let open = engine.refresh(&rig.peer, LONG).expect_err("it counts as one, too");
    assert!(matches!(open, crate::OpenError::Exhausted(_)), "{open}");
    let notify = engine.send_notification(&rig.peer, &Notification::default(), LONG).expect_err("so does this");
    assert!(matches!(notify, crate::NotifyError::Exhausted(_)), "{notify}");
    let sync = engine.submit_and_wait(&rig.peer, Direction::Read, &[], LONG).map(drop);
    assert_eq!(exhausted(sync), "max_submissions", "and this");
    for _ in 0..2 {
        rig.arrival().verdict.send(Verdict::Complete).expect("waits");
    }
    assert!(kept.iter().all(|batch| batch.wait(LONG)));
    submit(&third, 100).expect("all of it, once the others are done");
    rig.arrival().verdict.send(Verdict::Complete).expect("waits");
    drop((kept, third));
    rig.assert_idle();
}

#[test]
fn detached_batches_work_on_and_give_every_charge_back() {
    let rig = Rig::new(Config::default());
    for _ in 0..8 {
        rig.batch(&[1, 2]).detach();
    }
    assert_eq!(rig.engine.stats().batches, 8, "detached is not done");
    for _ in 0..16 {
        rig.arrival().verdict.send(Verdict::Complete).expect("waits");
    }
    rig.assert_idle();
    assert_eq!(rig.path.posted.load(SeqCst), 16, "all of it was done");
}

#[test]
fn a_panic_in_the_transport_fails_the_task_and_nothing_else() {
    let rig = Rig::new(Config::default());
    let batch = rig.engine.allocate_batch(3).expect("room");
    rig.submit(&batch, &[1, 2], LONG, Some(&Notification::default()));
    rig.submit(&batch, &[3], LONG, None);
    rig.arrival().verdict.send(Verdict::Panic).expect("waits");
    rig.arrival().verdict.send(Verdict::Complete).expect("the next group runs");
    assert!(batch.wait(LONG));
    assert_eq!(states(&batch), [Failed, NotAttempted, Completed]);
    let task = batch.task(0).expect("there");
    assert!(matches!(task.error, Some(TransferError::Internal)) && task.effect == RemoteEffect::Unknown);
    drop(batch);
    rig.assert_idle();
}

/// A waker that panics, as the caller's code may.
struct Bad(AtomicU32);

impl Wake for Bad {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
        panic!("a waker of the caller's");
    }
}

#[test]
fn a_panic_in_a_waker_costs_no_charge_and_no_thread() {
    let rig = Rig::new(Config::default());
    let bad = Arc::new(Bad(AtomicU32::new(0)));
    let batch = rig.batch(&[1]);
    let mut finished = pin!(batch.finished());
    let mut inbox = pin!(rig.engine.notifications());
    let waker = Waker::from(Arc::clone(&bad));
    assert!(finished.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    assert!(inbox.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    rig.arrival().verdict.send(Verdict::Complete).expect("waits");
    assert!(batch.wait(LONG));
    rig.engine.send_local_notification(&Notification::new("a", "b")).expect("room");
    assert!(bad.0.load(SeqCst) >= 2, "it was woken for both");
    assert!(finished.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    let read = inbox.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert_eq!(read, Poll::Ready(vec![Notification::new("a", "b")]));
    drop(batch);
    rig.assert_idle();
}

#[test]
fn a_group_notifies_once_when_all_of_it_completed() {
    let rig = Rig::new(Config::default());
    let batch = rig.engine.allocate_batch(8).expect("room");
    rig.submit(&batch, &[1, 2], LONG, Some(&Notification::new("first", "")));
    rig.submit(&batch, &[3], LONG, Some(&Notification::new("second", "")));
    rig.submit(&batch, &[], LONG, Some(&Notification::new("empty", "")));
    rig.submit(&batch, &[4], LONG, Some(&Notification::new("fourth", "")));
    rig.arrival().verdict.send(Verdict::Complete).expect("waits");
    let second = rig.arrival();
    assert!(rig.engine.receive_notifications().is_empty(), "not before the last");
    second.verdict.send(Verdict::Complete).expect("waits");
    rig.arrival().verdict.send(Verdict::Fail(RemoteEffect::None)).expect("waits");
    rig.arrival().verdict.send(Verdict::Complete).expect("waits");
    assert!(batch.wait(LONG));
    let names: Vec<_> = rig.engine.receive_notifications().into_iter().map(|one| one.name).collect();
    assert_eq!(names, ["first", "fourth"]);
    assert!(matches!(
        batch.status().notifications[..],
        [
            NotificationStatus::Delivered,
            NotificationStatus::Skipped,
            NotificationStatus::Skipped,
            NotificationStatus::Delivered,
        ]
    ));
    for _ in 0..100 {
        batch.status();
    }
    assert!(rig.engine.receive_notifications().is_empty(), "asking sends nothing");
}

#[test]
fn many_threads_may_ask_while_it_runs() {
    let rig = Rig::new(Config::default());
    let batch = rig.batch(&[1; 20]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut least = 0;
                while !done.load(SeqCst) {
                    let status = batch.status();
                    assert!(status.completed >= least && status.bytes == status.completed as u64);
                    least = status.completed;
                }
            });
        }
        for _ in 0..20 {
            rig.arrival().verdict.send(Verdict::Complete).expect("waits");
        }
        assert!(batch.wait(LONG));
        done.store(true, SeqCst);
    });
    assert_eq!(batch.status().completed, 20);
}

#[test]
fn the_end_of_the_engine_ends_every_batch() {
    let Rig { engine, path, arrivals, memory, peer, .. } = Rig::new(Config::default());
    let outside = Arc::new(external(vec![0; 8], ()));
    let only_registered = Arc::downgrade(&outside);
    engine.register_host_memory(&outside, 0, 8, Permission::RemoteRead).expect("room");
    drop(outside);
    let request = TransferRequest { local_address: memory.address(), remote_address: memory.address(), length: 1 };
    let batch = engine.allocate_batch(4).expect("room");
    let submit = || batch.submit(&peer, Direction::Write, &[request, request], LONG, None).map(drop);
    submit().expect("sound");
    submit().expect("sound");
    let detached = engine.allocate_batch(1).expect("room");
    detached.submit(&peer, Direction::Read, &[request], LONG, None).expect("sound");
    detached.detach();
    let waiting = [arrivals.recv_timeout(LONG).expect("one"), arrivals.recv_timeout(LONG).expect("another")];
    let dropper = std::thread::spawn(move || drop(engine));
    eventually("what has not begun is cancelled at once", || states(&batch)[1..] == [Cancelled; 3]);
    assert_eq!(states(&batch)[0], Pending);
    drop(waiting);
    drop(arrivals);
    dropper.join().expect("no panic");
    assert_eq!(states(&batch), [Failed, Cancelled, Cancelled, Cancelled]);
    assert!(batch.status().is_finished() && batch.locally_drained());
    assert!(matches!(submit(), Err(SubmitError::Stopped)));
    assert!(only_registered.upgrade().is_none(), "no handle holds it, although one of a batch is left");
    assert_eq!(Arc::strong_count(&path), 2, "the test and the surviving handle");
    batch.free().expect("even now");
    memory.write(0, &[1]).expect("memory survives its engine");
}

#[test]
fn a_future_that_is_dropped_gives_up_interest_and_not_the_work() {
    let rig = Rig::new(Config::default());
    let requests = [rig.request(5), rig.request(6)];
    let transfer = rig.engine.submit_async(&rig.peer, Direction::Write, &requests, None, LONG).expect("sound");
    drop(transfer);
    for _ in 0..2 {
        rig.arrival().verdict.send(Verdict::Complete).expect("waits");
    }
    rig.assert_idle();
    let transfer = rig.engine.submit_async(&rig.peer, Direction::Write, &requests, None, LONG).expect("sound");
    let first = rig.arrival();
    transfer.cancel();
    first.verdict.send(Verdict::Complete).expect("waits");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let report = runtime.block_on(transfer);
    assert_eq!((report.requests, report.completed, report.completed_bytes), (2, 1, 5));
    let failure = report.failure.expect("the second");
    assert_eq!((failure.index, failure.effect), (1, RemoteEffect::None));
    assert!(matches!(failure.error, TransferError::Cancelled));
    rig.assert_idle();
}
