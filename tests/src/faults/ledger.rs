//! What became of every frame: the oracle of the fault model.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use fastrand::Rng;
use verbs_transport::{MessageType, SendError, SendErrorHandler};

/// One run of one worker: a restarted worker is another one. Numbered in the order of their starts.
pub type Run = u16;

/// One direction: frames of a run to an instance, whichever of its runs takes them.
type Lane = (Run, u32);

/// What has become of one frame so far.
#[derive(Clone, Copy, Debug, Default)]
struct Fate {
    delivered: u8,
    reported: u8,
    refused: u8,
    /// The receiving process was killed after the frame had been sent: an acknowledged frame may have died with it.
    excused: bool,
}

/// Every frame of one world.
#[derive(Debug, Default)]
struct Books {
    lanes: BTreeMap<Lane, Vec<Fate>>,
    /// The last frame that a run took from a lane, by stream.
    last: BTreeMap<(Lane, Run, u8), u32>,
    /// Why frames were reported, for whoever looks at a failure.
    reasons: BTreeMap<(Lane, u32), String>,
    /// The first rule that was broken.
    broken: Option<String>,
}

/// The books of one world, shared by its workers' tasks and callbacks.
#[derive(Clone, Debug)]
pub struct Ledger {
    seed: u64,
    books: Arc<Mutex<Books>>,
}

/// A frame as it is sent: everything follows from the seed and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// As what.
    pub kind: MessageType,
    /// Names run, target and number.
    pub header: Bytes,
    /// Random bytes.
    pub payload: Bytes,
}

/// Bytes of a header that names its frame.
const NAME_BYTES: usize = 10;

impl Ledger {
    /// Empty books.
    pub fn new(seed: u64) -> Self {
        Self { seed, books: Arc::default() }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frame `number` of `run` to `target`, of at most `max` bytes.
    fn frame(&self, run: Run, target: u32, number: u32, max: usize) -> Sent {
        let place = u64::from(run) << 48 ^ u64::from(target) << 32 ^ u64::from(number);
        let mut rng = Rng::with_seed(self.seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let kind = MessageType::ALL[rng.usize(..MessageType::ALL.len())];
        // Mostly small; some of several slabs.
        let scale = [0, 1, 40, 300, 1500, max][rng.usize(..6)].min(max);
        let mut payload = vec![0; rng.usize(..=scale)];
        rng.fill(&mut payload);
        let mut header = Vec::with_capacity(NAME_BYTES + 8);
        header.extend_from_slice(&run.to_be_bytes());
        header.extend_from_slice(&target.to_be_bytes());
        header.extend_from_slice(&number.to_be_bytes());
        header.extend(std::iter::repeat_n(0x5a, rng.usize(..8)));
        Sent { kind, header: header.into(), payload: payload.into() }
    }

    fn named(&self, header: &[u8], max: usize) -> Option<(Lane, u32, Sent)> {
        let (run, rest) = header.split_first_chunk()?;
        let (target, rest) = rest.split_first_chunk()?;
        let (number, _) = rest.split_first_chunk()?;
        let lane = (u16::from_be_bytes(*run), u32::from_be_bytes(*target));
        let number = u32::from_be_bytes(*number);
        Some((lane, number, self.frame(lane.0, lane.1, number, max)))
    }

    /// The next frame of a run to a target, entered as sent.
    pub fn next(&self, run: Run, target: u32, max: usize) -> (u32, Sent) {
        let mut books = self.books();
        let lane = books.lanes.entry((run, target)).or_default();
        let number = u32::try_from(lane.len()).expect("few frames");
        lane.push(Fate::default());
        drop(books);
        (number, self.frame(run, target, number, max))
    }

    fn break_rule(books: &mut Books, what: String) {
        books.broken.get_or_insert(what);
    }

    /// `run` of `me` took a frame from its stream `stream`.
    pub fn delivered(&self, me: u32, run: Run, stream: u8, kind: MessageType, body: [&[u8]; 2], max: usize) {
        let named = self.named(body[0], max);
        let mut books = self.books();
        let Some((lane, number, sent)) = named else {
            return Self::break_rule(&mut books, format!("run {run} took a frame that nobody sent"));
        };
        let what = format!("frame {number} of run {} to {}", lane.0, lane.1);
        if sent.header != body[0] || sent.payload != body[1] || sent.kind != kind || lane.1 != me {
            Self::break_rule(&mut books, format!("{what} arrived at {me} with other bytes or as another type"));
        }
        if let Some(last) = books.last.insert((lane, run, stream), number).filter(|last| *last >= number) {
            Self::break_rule(&mut books, format!("{what} arrived at run {run} after frame {last}"));
        }
        let Some(fate) = books.lanes.get_mut(&lane).and_then(|fates| fates.get_mut(number as usize)) else {
            return Self::break_rule(&mut books, format!("{what} was never sent"));
        };
        fate.delivered += 1;
        if fate.delivered > 1 || fate.refused > 0 {
            let fate = *fate;
            Self::break_rule(&mut books, format!("{what} arrived: {fate:?}"));
        }
    }

    /// An admission of a frame ended in an error.
    pub fn refused(&self, run: Run, target: u32, number: u32) {
        let mut books = self.books();
        let Some(fate) = books.lanes.get_mut(&(run, target)).and_then(|fates| fates.get_mut(number as usize)) else {
            return;
        };
        fate.refused += 1;
        if fate.delivered + fate.reported > 0 || fate.refused > 1 {
            let fate = *fate;
            Self::break_rule(&mut books, format!("frame {number} of run {run} to {target} was refused: {fate:?}"));
        }
    }

    /// Notes that the process behind an instance is being killed.
    pub fn killed(&self, target: u32) {
        for (lane, fates) in &mut self.books().lanes {
            if lane.1 == target {
                for fate in fates {
                    fate.excused = true;
                }
            }
        }
    }

    /// A handler for the frames of one run, none larger than `max`.
    pub fn reporter(&self, max: usize) -> Arc<dyn SendErrorHandler> {
        let ledger = self.clone();
        Arc::new(move |header: Bytes, payload: Bytes, error: SendError| ledger.reported(&header, &payload, &error, max))
    }

    fn reported(&self, header: &Bytes, payload: &Bytes, error: &SendError, max: usize) {
        let named = self.named(header, max);
        let mut books = self.books();
        let Some((lane, number, sent)) = named else {
            return Self::break_rule(&mut books, format!("a frame was reported that nobody sent: {error}"));
        };
        let what = format!("frame {number} of run {} to {}", lane.0, lane.1);
        if sent.header != header || sent.payload != payload {
            Self::break_rule(&mut books, format!("{what} was reported with other bytes"));
        }
        let Some(fate) = books.lanes.get_mut(&lane).and_then(|fates| fates.get_mut(number as usize)) else { return };
        fate.reported += 1;
        let fate = *fate;
        books.reasons.insert((lane, number), error.to_string());
        if fate.reported > 1 || fate.refused > 0 {
            Self::break_rule(&mut books, format!("{what} was reported ({error}): {fate:?}"));
        }
    }

    /// How often a frame was delivered, and whether it failed.
    pub fn outcome(&self, run: Run, target: u32, number: u32) -> (bool, bool) {
        let books = self.books();
        let fate = books.lanes.get(&(run, target)).and_then(|fates| fates.get(number as usize)).copied();
        fate.map_or((false, false), |fate| (fate.delivered > 0, fate.reported + fate.refused > 0))
    }

    /// Why a frame was reported.
    pub fn reason(&self, run: Run, target: u32, number: u32) -> Option<String> {
        self.books().reasons.get(&((run, target), number)).cloned()
    }

    /// The first rule that was broken so far.
    pub fn broken(&self) -> Option<String> {
        self.books().broken.clone()
    }

    /// Frames without an end: whose, and in words.
    pub fn open(&self) -> Vec<(Run, String)> {
        let books = self.books();
        let mut open = Vec::new();
        for (lane, fates) in &books.lanes {
            for (number, fate) in fates.iter().enumerate() {
                if fate.delivered + fate.reported + fate.refused == 0 && !fate.excused {
                    open.push((lane.0, format!("frame {number} of run {} to {}", lane.0, lane.1)));
                }
            }
        }
        open
    }

    /// Frames that failed though nothing may, in words: each must have arrived, or been cancelled.
    pub fn failed(&self) -> Vec<String> {
        let books = self.books();
        let mut failed = Vec::new();
        for (lane, fates) in &books.lanes {
            for (number, fate) in fates.iter().enumerate() {
                if fate.reported > 0 {
                    let why = u32::try_from(number).ok().and_then(|number| books.reasons.get(&(*lane, number)));
                    failed.push(format!("frame {number} of run {} to {}: {fate:?} {why:?}", lane.0, lane.1));
                }
            }
        }
        failed
    }

    /// Frames sent, delivered, reported, refused.
    pub fn totals(&self) -> [u64; 4] {
        let books = self.books();
        let mut totals = [0; 4];
        for fate in books.lanes.values().flatten() {
            totals[0] += 1;
            totals[1] += u64::from(fate.delivered);
            totals[2] += u64::from(fate.reported);
            totals[3] += u64::from(fate.refused);
        }
        totals
    }
}
