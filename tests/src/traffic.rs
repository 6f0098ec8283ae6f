//! Numbered frames, and the books about them on both sides: what was sent and how each frame ended, what came and in which
//! order.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{sync::watch, task::JoinHandle};
use verbs_bootstrap::InstanceId;
use verbs_transport::{
    MessageType, Received, SendError, SendErrorHandler, SendOutcome, Stream, Worker, fabric::Fabric,
};

/// Bytes of every frame's header: the run of numbers that it belongs to, and its number in it.
const HEADER_BYTES: usize = 16;

/// The header of frame `seq` of run `run`.
pub fn header(run: u64, seq: u64) -> Bytes {
    [run.to_be_bytes(), seq.to_be_bytes()].concat().into()
}

/// Its payload: no two neighbours are alike, and no byte is like the one before it.
pub fn payload(run: u64, seq: u64, bytes: usize) -> Bytes {
    let first = usize::try_from((run ^ seq.wrapping_mul(31)) % 251).unwrap_or_default();
    (0..bytes).map(|at| u8::try_from((first + at) % 251).unwrap_or_default()).collect()
}

/// Reads a header; `None` if it is none of ours.
pub fn parse(header: &[u8]) -> Option<(u64, u64)> {
    let bytes: [u8; HEADER_BYTES] = header.try_into().ok()?;
    let (run, seq) = bytes.split_at(8);
    Some((u64::from_be_bytes(run.try_into().ok()?), u64::from_be_bytes(seq.try_into().ok()?)))
}

/// The mark of a run of [`Run::mixed`] in its number, so that the receiver knows which sizes to expect.
const MIXED: u64 = 1 << 63;

/// Payload bytes of frame `seq` of a mixed run: on both sides of what goes inline (220 bytes with both headers), of one slab
/// (8,192) and of one packet, and some of several slabs.
fn mixed_bytes(run: u64, seq: u64) -> usize {
    const SMALL: [usize; 8] = [0, 1, 64, 195, 196, 197, 500, 1000];
    const LARGE: [usize; 8] = [2000, 4000, 4096, 8167, 8168, 8169, 20_000, 60_000];
    let mut hash = (run ^ seq).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^= hash >> 29;
    let sizes = if hash % 4 == 0 { LARGE } else { SMALL };
    sizes[usize::try_from(hash >> 32).unwrap_or_default() % sizes.len()]
}

/// How one accepted frame ended without being known to be delivered.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its number.
    pub seq: u64,
    /// Why.
    pub why: String,
    /// When, after the first send of the run.
    pub after: Duration,
    /// By its admission; else by its error handler.
    pub by_admission: bool,
}

/// The sender's book of one run of numbers.
pub struct Run {
    number: u64,
    /// `None`: of mixed sizes.
    payload_bytes: Option<usize>,
    began: Instant,
    failures: Mutex<Vec<Failure>>,
    sent: Mutex<u64>,
    /// When each was sent, after `began`.
    times: Mutex<Vec<Duration>>,
    broken: Mutex<Vec<String>>,
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("run", &self.number).field("sent", &self.sent()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Run {
    /// A new run, of frames with so many payload bytes.
    pub fn new(payload_bytes: usize) -> Arc<Self> {
        Self::with(fastrand::u64(..) & !MIXED, Some(payload_bytes))
    }

    /// A new run, of frames of all sizes from nothing to several slabs.
    pub fn mixed() -> Arc<Self> {
        Self::with(fastrand::u64(..) | MIXED, None)
    }

    fn with(number: u64, payload_bytes: Option<usize>) -> Arc<Self> {
        Arc::new(Self {
            number,
            payload_bytes,
            began: Instant::now(),
            failures: Mutex::default(),
            sent: Mutex::default(),
            times: Mutex::default(),
            broken: Mutex::default(),
        })
    }

    fn payload(&self, seq: u64) -> Bytes {
        payload(self.number, seq, self.payload_bytes.unwrap_or_else(|| mixed_bytes(self.number, seq)))
    }

    /// Its name, as the receiver's book has it.
    pub fn name(&self) -> String {
        format!("{:016x}", self.number)
    }

    /// Frames sent so far.
    pub fn sent(&self) -> u64 {
        *lock(&self.sent)
    }

    /// Sends the next frame.
    pub fn send<F: Fabric>(self: &Arc<Self>, worker: &Worker<F>, to: InstanceId) -> SendOutcome {
        // One sender at a time, so that numbers and calls have one order.
        let mut sent = lock(&self.sent);
        let seq = *sent;
        *sent += 1;
        lock(&self.times).push(self.began.elapsed());
        let body = self.payload(seq);
        let outcome = worker.send(to, header(self.number, seq), body, MessageType::Message, self.clone());
        drop(sent);
        if let SendOutcome::Pending(admission) = &outcome {
            let run = self.clone();
            admission.on_resolved(move |result| {
                if let Err(error) = result {
                    run.note(seq, error.to_string(), true);
                }
            });
        }
        outcome
    }

    /// Sends so many at once.
    pub fn burst<F: Fabric>(self: &Arc<Self>, worker: &Worker<F>, to: InstanceId, frames: u64) {
        for _ in 0..frames {
            drop(self.send(worker, to));
        }
    }

    /// Sends so many, each after the one before has left the gate.
    pub async fn stream<F: Fabric>(self: &Arc<Self>, worker: &Worker<F>, to: InstanceId, frames: u64) {
        for _ in 0..frames {
            if let SendOutcome::Pending(admission) = self.send(worker, to) {
                // Its end is in the book.
                let _ = admission.await;
            }
        }
    }

    /// Sends without pause until a frame fails or the task is aborted, so that there is always something in flight.
    pub fn flow<F: Fabric>(self: &Arc<Self>, worker: &Worker<F>, to: InstanceId) -> tokio::task::AbortHandle {
        let (run, worker) = (self.clone(), worker.clone());
        let sending = tokio::spawn(async move {
            while lock(&run.failures).is_empty() {
                match run.send(&worker, to) {
                    // Its end is in the book.
                    SendOutcome::Pending(admission) => drop(admission.await),
                    SendOutcome::Admitted => tokio::task::yield_now().await,
                }
            }
        });
        sending.abort_handle()
    }

    /// Sends without pause for breath until told to stop, whatever fails meanwhile.
    pub fn pour<F: Fabric>(self: &Arc<Self>, worker: &Worker<F>, to: InstanceId) -> Pour {
        let (stop, mut stopped) = watch::channel(false);
        let (run, worker) = (self.clone(), worker.clone());
        let task = tokio::spawn(async move {
            loop {
                for _ in 0..8 {
                    let SendOutcome::Pending(admission) = run.send(&worker, to) else { continue };
                    tokio::select! {
                        biased;
                        // Its end goes into the book, whoever awaits it.
                        _ = stopped.wait_for(|stop| *stop) => return,
                        _ = admission => {}
                    }
                }
                let pause = tokio::time::timeout(Duration::from_millis(4), stopped.wait_for(|stop| *stop));
                if pause.await.is_ok() {
                    return;
                }
            }
        });
        Pour { stop, task }
    }

    /// Frames that must have arrived: sent and not failed.
    pub fn due(&self) -> u64 {
        self.sent() - self.failures().len() as u64
    }

    fn note(&self, seq: u64, why: String, by_admission: bool) {
        lock(&self.failures).push(Failure { seq, why, after: self.began.elapsed(), by_admission });
    }

    /// Frames that failed, by number.
    ///
    /// # Panics
    ///
    /// When one ended twice, or came back with other bytes than it was given.
    pub fn failures(&self) -> BTreeMap<u64, Failure> {
        let broken = lock(&self.broken);
        assert!(broken.is_empty(), "frames came back changed: {broken:?}");
        let mut by_number = BTreeMap::new();
        for failure in lock(&self.failures).iter() {
            let twice = by_number.insert(failure.seq, failure.clone());
            assert!(twice.is_none(), "frame {} ended twice: {twice:?} and {failure:?}", failure.seq);
        }
        by_number
    }

    /// The longest that a frame which failed took to fail.
    pub fn longest_failure(&self) -> Duration {
        let times = lock(&self.times);
        let age = |failure: &Failure| {
            let sent = usize::try_from(failure.seq).ok().and_then(|seq| times.get(seq));
            sent.map_or(Duration::ZERO, |sent| failure.after.saturating_sub(*sent))
        };
        lock(&self.failures).iter().map(age).max().unwrap_or_default()
    }

    /// Reasons of failures, each with its count: for messages.
    pub fn reasons(&self) -> BTreeMap<String, usize> {
        self.failures().into_values().fold(BTreeMap::new(), |mut counts, failure| {
            *counts.entry(failure.why).or_default() += 1;
            counts
        })
    }

    /// Frames that have neither arrived nor failed so far.
    pub fn open(&self, received: &Value) -> Vec<u64> {
        let failures = self.failures();
        open(self.sent(), &failures.into_keys().collect(), &received[self.name()])
    }

    /// Checks against the receiver's book: each frame is there or failed, those that came are in order, once and whole.
    ///
    /// # Panics
    ///
    /// When not.
    pub fn assert_accounted(&self, received: &Value) {
        let (sent, line) = (self.sent(), &received[self.name()]);
        assert_in_order(line);
        let lost = self.open(received);
        assert!(lost.is_empty(), "lost without a report: {lost:?} of {sent}; {line}; {:?}", self.reasons());
    }
}

/// Checks one line of a receiver's book: nothing came twice, late or damaged.
///
/// # Panics
///
/// When something did.
pub fn assert_in_order(line: &Value) {
    // Of a run of which nothing came there is no line.
    assert!(line.is_null() || (line["repeated"] == 0 && line["corrupt"] == 0), "{line}");
}

/// Frames of a run that have neither arrived, by the receiver's line, nor failed.
pub fn open(sent: u64, failed: &BTreeSet<u64>, line: &Value) -> Vec<u64> {
    let missing: Vec<(u64, u64)> = serde_json::from_value(line["missing"].clone()).unwrap_or_default();
    let next = line["next"].as_u64().unwrap_or(0);
    let gaps = missing.into_iter().chain([(next, sent)]).flat_map(|(from, to)| from..to);
    gaps.filter(|seq| !failed.contains(seq)).collect()
}

/// A run that is being sent without end.
#[derive(Debug)]
pub struct Pour {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Pour {
    /// No further frame is sent once this returns.
    ///
    /// # Panics
    ///
    /// When sending did.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        self.task.await.expect("sending does not panic");
    }
}

impl SendErrorHandler for Run {
    fn on_error(&self, head: Bytes, body: Bytes, error: SendError) {
        match parse(&head) {
            Some((run, seq)) if run == self.number && body == self.payload(seq) => {
                self.note(seq, error.to_string(), false);
            }
            other => lock(&self.broken).push(format!("{other:?} with {} payload bytes: {error}", body.len())),
        }
    }
}

/// What came of one run.
#[derive(Clone, Debug, Default)]
struct Arrived {
    frames: u64,
    next: u64,
    /// Numbers that were skipped, from and to.
    missing: Vec<(u64, u64)>,
    /// Frames with a number that was due before.
    repeated: u64,
    corrupt: u64,
}

/// The last frames that came, kept for a moment as an application would that works on them: lent frames hold their slabs.
#[derive(Debug, Default)]
pub struct Keep(VecDeque<Received>);

impl Keep {
    /// More than a peer may have lent at once, so that some are copied.
    const FRAMES: usize = 24;

    /// The next frame; `None` when the stream has ended. When none comes for a tenth of a second, those that were kept go.
    pub async fn next(&mut self, stream: &mut Stream) -> Option<Received> {
        let soon = tokio::time::timeout(Duration::from_millis(100), stream.recv()).await;
        let frame = if let Ok(frame) = soon {
            frame?
        } else {
            self.0.clear();
            stream.recv().await?
        };
        if self.0.len() == Self::FRAMES {
            self.0.pop_front();
        }
        self.0.push_back(frame.clone());
        Some(frame)
    }
}

/// The receiver's book of all runs.
#[derive(Clone, Debug, Default)]
pub struct Tally(BTreeMap<u64, Arrived>);

impl Tally {
    /// Enters one frame.
    pub fn take(&mut self, frame: &Received) {
        let Some((run, seq)) = parse(&frame.header) else {
            self.0.entry(0).or_default().corrupt += 1;
            return;
        };
        let line = self.0.entry(run).or_default();
        line.frames += 1;
        let bytes = if run & MIXED == 0 { frame.payload.len() } else { mixed_bytes(run, seq) };
        line.corrupt += u64::from(frame.payload != payload(run, seq, bytes));
        if seq < line.next {
            line.repeated += 1;
            return;
        }
        if seq > line.next {
            line.missing.push((line.next, seq));
        }
        line.next = seq + 1;
    }

    /// Frames in all.
    pub fn frames(&self) -> u64 {
        self.0.values().map(|line| line.frames).sum()
    }

    /// As JSON, by the run's name.
    pub fn json(&self) -> Value {
        let lines = self.0.iter().map(|(run, line)| {
            let Arrived { frames, next, missing, repeated, corrupt } = line;
            let told = json!({
                "frames": frames, "next": next, "missing": missing, "repeated": repeated, "corrupt": corrupt
            });
            (format!("{run:016x}"), told)
        });
        Value::Object(lines.collect())
    }
}

#[cfg(test)]
mod tests {
    use verbs_transport::Lane;

    use super::*;

    fn frame(run: u64, seq: u64) -> Received {
        let kind = MessageType::Message;
        Received {
            peer: InstanceId(1),
            kind,
            lane: Lane::Application,
            header: header(run, seq),
            payload: payload(run, seq, 40),
        }
    }

    #[test]
    fn gaps_repeats_and_damage_are_told_apart() {
        let mut tally = Tally::default();
        for seq in [0, 1, 4, 5, 1] {
            tally.take(&frame(7, seq));
        }
        tally.take(&Received { payload: payload(7, 7, 40), ..frame(7, 6) });
        let line = &tally.json()["0000000000000007"];
        assert_eq!(line, &json!({"frames": 6, "next": 7, "missing": [[2, 4]], "repeated": 1, "corrupt": 1}));
    }

    #[test]
    fn a_mixed_run_has_all_sizes_and_one_of_a_wrong_size_is_corrupt() {
        let run = Run::mixed();
        let sizes: BTreeSet<usize> = (0..1000).map(|seq| run.payload(seq).len()).collect();
        assert_eq!((sizes.len(), sizes.first(), sizes.last()), (16, Some(&0), Some(&60_000)));
        let mut tally = Tally::default();
        for seq in 0..100 {
            let body = run.payload(seq);
            let bytes = if seq == 50 { body.len() + 1 } else { body.len() };
            tally.take(&Received { payload: payload(run.number, seq, bytes), ..frame(run.number, seq) });
        }
        let line = &tally.json()[run.name()];
        assert_eq!((&line["corrupt"], &line["repeated"], &line["next"]), (&1.into(), &0.into(), &100.into()));
    }

    #[test]
    #[should_panic(expected = "lost without a report: [2]")]
    fn a_frame_that_is_neither_there_nor_reported_is_found() {
        let run = Run::new(40);
        *lock(&run.sent) = 4;
        run.note(3, "gone".to_owned(), false);
        let mut tally = Tally::default();
        tally.take(&frame(run.number, 0));
        tally.take(&frame(run.number, 1));
        run.assert_accounted(&tally.json());
    }
}
