//! The engine against a plain model: one trace of registrations, bytes, reports and notifications, 100,000 operations
//! long and longer, in which both must agree at each step.
//!
//! The model is what the API promises, in the plainest data there are: a byte array for each allocation, a
//! list of ranges, a list of messages. It knows nothing of wires, threads or budgets in flight.

mod common;

use std::{collections::VecDeque, sync::Arc};

use common::{LONG, engine, eventually};
use verbs_engine::{
    Config, Direction, Engine, HostMemory, Notification, NotificationStatus, Permission, Profile, RegisteredMemory,
    RemoteEffect, RemoteSegment, ServeDirect, Status, SubmitError, TransferError, TransferRequest,
};

/// Operations of one run. Several seeds together are well beyond 100,000.
/// On a device under emulation each takes its time.
fn operations() -> usize {
    common::times(30_000, 2000)
}
const SEEDS: [u64; 4] = [1, 2, 3, 0x0dd_ba11];
const ALLOCATIONS: usize = 3;
const ALLOCATION: u64 = 300;
const MAX_RANGES: usize = 12;
const MAX_BYTES: u64 = 1200;
const MAX_PAYLOAD: u64 = 200;
const MAX_NOTES: usize = 6;
const MAX_NOTE_BYTES: u64 = 40;
const PERMISSIONS: [Permission; 4] =
    [Permission::LocalOnly, Permission::RemoteRead, Permission::RemoteWrite, Permission::RemoteReadWrite];

/// One engine of the model.
#[derive(Default)]
struct Side {
    bytes: Vec<Vec<u8>>,
    /// Every range ever registered, at its number less one.
    ranges: Vec<Range>,
    notes: VecDeque<Notification>,
}

#[derive(Clone, Debug)]
struct Range {
    allocation: usize,
    at: u64,
    length: u64,
    permission: Permission,
    references: u32,
    /// Handles that are held.
    handles: u32,
}

impl Side {
    fn retained(&self) -> impl Iterator<Item = &Range> {
        self.ranges.iter().filter(|range| range.references > 0 || range.handles > 0)
    }

    /// The first of the ranges that contains it all, in the order of addresses, the longer first.
    fn resolve(&self, bases: &[u64], known: impl Fn(usize) -> bool, address: u64, length: u64) -> Option<(usize, u64)> {
        let mut found: Vec<(u64, std::cmp::Reverse<u64>, usize)> = Vec::new();
        for (index, range) in self.ranges.iter().enumerate().filter(|(index, _)| known(*index)) {
            let start = bases[range.allocation] + range.at;
            if start <= address && address + length <= start + range.length {
                found.push((start, std::cmp::Reverse(range.length), index));
            }
        }
        found.into_iter().min().map(|(start, _, index)| (index, address - start))
    }
}

/// The real engines beside the model.
struct World {
    random: fastrand::Rng,
    engines: [Engine; 2],
    memories: [Vec<Arc<HostMemory>>; 2],
    bases: [Vec<u64>; 2],
    handles: [Vec<RegisteredMemory>; 2],
    /// `segments[a]` is what `a` knows of the other.
    segments: [RemoteSegment; 2],
    /// The ranges that `segments[a]` has: their indices in the model of the other.
    known: [Vec<usize>; 2],
    model: [Side; 2],
    /// How often each kind of thing was seen, so that a trace that shows nothing is noticed.
    seen: std::collections::BTreeMap<&'static str, u32>,
}

impl World {
    fn new(seed: u64) -> Self {
        let config = Config {
            max_registrations: MAX_RANGES,
            max_registered_bytes: MAX_BYTES,
            max_payload_bytes: MAX_PAYLOAD,
            max_notifications: MAX_NOTES,
            max_inbox_bytes: MAX_NOTE_BYTES,
            max_notification_bytes: 20,
            max_batch_requests: 6,
            serve_direct: ServeDirect::All,
            ..Config::default()
        };
        let engines = [engine(config.clone()), engine(config)];
        let memories = [(); 2].map(|()| {
            let allocation = || Arc::new(HostMemory::new(vec![0; usize::try_from(ALLOCATION).expect("small")].into()));
            std::iter::repeat_with(allocation).take(ALLOCATIONS).collect::<Vec<_>>()
        });
        let bases = [0, 1].map(|side: usize| memories[side].iter().map(|memory| memory.address()).collect());
        let open = |from: usize, to: usize| {
            let segment = engines[from].open_segment(engines[to].endpoint(), engines[to].epoch(), LONG);
            segment.expect("it listens")
        };
        let segments = [open(0, 1), open(1, 0)];
        let side = || Side {
            bytes: vec![vec![0; usize::try_from(ALLOCATION).expect("small")]; ALLOCATIONS],
            ..Side::default()
        };
        Self {
            random: fastrand::Rng::with_seed(seed),
            engines,
            memories,
            bases,
            handles: [Vec::new(), Vec::new()],
            segments,
            known: [Vec::new(), Vec::new()],
            model: [side(), side()],
            seen: std::collections::BTreeMap::new(),
        }
    }

    fn saw(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn step(&mut self) {
        // A handler holds its range for a moment after the peer has its reply.
        for engine in &self.engines {
            eventually("handlers have left", || engine.stats().source_operations == 0);
        }
        let side = self.random.usize(0..2);
        match self.random.u8(0..20) {
            0..=3 => self.register(side),
            4..=6 => self.unregister(side),
            7..=9 => self.drop_handle(side),
            10 => self.touch(side),
            11 if self.random.bool() => self.refresh(side),
            11..=12 => self.notify(side),
            13 => self.drain(side),
            _ => self.transfer(side),
        }
        eventually("handlers have left", || self.engines[side].stats().source_operations == 0);
        let stats = self.engines[side].stats();
        let (count, bytes) = self.model[side].retained().fold((0, 0), |(n, sum), range| (n + 1, sum + range.length));
        assert_eq!((stats.registrations, stats.registered_bytes), (count, bytes));
        assert_eq!(stats.direct_ranges, 0);
        assert_eq!(stats.queued_notifications, self.model[side].notes.len() as u64);
    }

    fn register(&mut self, side: usize) {
        let permission = PERMISSIONS[self.random.usize(0..4)];
        let count = self.random.usize(0..3);
        let entries: Vec<(usize, u64, u64)> = (0..count)
            .map(|_| {
                // Few places, so that duplicates and overlaps occur.
                let at = self.random.u64(0..6) * 50;
                (self.random.usize(0..ALLOCATIONS), at, self.random.u64(0..4) * 60)
            })
            .collect();
        let model = &self.model[side];
        let mut next = model.ranges.clone();
        let mut sound = true;
        let mut numbers = Vec::new();
        for (allocation, at, length) in &entries {
            sound &= *length > 0 && at + length <= ALLOCATION;
            let same = |range: &Range| {
                range.references > 0 && (range.allocation, range.at, range.length) == (*allocation, *at, *length)
            };
            let index = next.iter().position(same).unwrap_or_else(|| {
                let (allocation, at, length) = (*allocation, *at, *length);
                next.push(Range { allocation, at, length, permission, references: 0, handles: 0 });
                next.len() - 1
            });
            next[index].references += 1;
            next[index].handles += 1;
            numbers.push(index as u64 + 1);
        }
        let retained = || next.iter().filter(|range| range.references > 0 || range.handles > 0);
        sound &= retained().count() <= MAX_RANGES && retained().map(|range| range.length).sum::<u64>() <= MAX_BYTES;
        let real: Vec<_> = entries
            .iter()
            .map(|(allocation, at, length)| (Arc::clone(&self.memories[side][*allocation]), *at, *length))
            .collect();
        match self.engines[side].register_host_memory_batch(&real, permission) {
            Ok(handles) => {
                assert!(sound, "the model refuses {entries:?}");
                assert_eq!(handles.iter().map(RegisteredMemory::id).collect::<Vec<_>>(), numbers);
                for handle in &handles {
                    let range = &next[usize::try_from(handle.id()).expect("small") - 1];
                    assert_eq!(handle.permission(), range.permission, "the first one wins");
                }
                self.handles[side].extend(handles);
                self.model[side].ranges = next;
                self.saw("registered");
            }
            Err(error) => {
                assert!(!sound, "the model takes {entries:?}, but: {error}");
                self.saw("registration refused");
            }
        }
    }

    fn unregister(&mut self, side: usize) {
        if self.handles[side].is_empty() {
            return;
        }
        let handle = self.random.usize(0..self.handles[side].len());
        let handle = &self.handles[side][handle];
        let range = &mut self.model[side].ranges[usize::try_from(handle.id()).expect("small") - 1];
        let last = self.engines[side].unregister_memory(handle).ok();
        assert_eq!(last, (range.references > 0).then_some(range.references == 1));
        range.references = range.references.saturating_sub(1);
        self.saw(if last == Some(true) { "unregistered" } else { "reference given up" });
    }

    fn drop_handle(&mut self, side: usize) {
        if self.handles[side].is_empty() {
            return;
        }
        let at = self.random.usize(0..self.handles[side].len());
        let range = &mut self.model[side].ranges[usize::try_from(self.handles[side][at].id()).expect("small") - 1];
        // A range with a reference for each handle would stay for good if it lost one.
        if range.handles > range.references {
            range.handles -= 1;
            self.handles[side].swap_remove(at);
        }
    }

    /// Local reads and writes through a handle, whether or not its range is still registered.
    fn touch(&mut self, side: usize) {
        if self.handles[side].is_empty() {
            return;
        }
        let handle = self.handles[side][self.random.usize(0..self.handles[side].len())].clone();
        let range = self.model[side].ranges[usize::try_from(handle.id()).expect("small") - 1].clone();
        let (offset, length) = (self.random.u64(0..200), self.random.usize(0..100));
        let inside = offset + length as u64 <= range.length;
        let start = usize::try_from(range.at + offset).expect("small");
        let mut bytes: Vec<u8> = std::iter::repeat_with(|| self.random.u8(..)).take(length).collect();
        let ours = &mut self.model[side].bytes[range.allocation];
        if self.random.bool() {
            assert_eq!(handle.write(offset, &bytes).is_ok(), inside);
            if inside {
                ours[start..start + length].copy_from_slice(&bytes);
            }
        } else {
            assert_eq!(handle.read(offset, &mut bytes).is_ok(), inside);
            assert!(!inside || bytes == ours[start..start + length]);
        }
    }

    fn exported(&self, side: usize) -> Vec<usize> {
        let ranges = self.model[side].ranges.iter().enumerate();
        let shown = ranges.filter(|(_, range)| range.references > 0 && range.permission != Permission::LocalOnly);
        shown.map(|(index, _)| index).collect()
    }

    fn refresh(&mut self, side: usize) {
        self.engines[side].refresh(&self.segments[side], LONG).expect("it listens");
        self.known[side] = self.exported(1 - side);
        let real: Vec<u64> = self.segments[side].regions().iter().map(|region| region.id).collect();
        assert_eq!(real, self.known[side].iter().map(|index| *index as u64 + 1).collect::<Vec<_>>());
    }

    fn note(&mut self) -> Notification {
        let text = |random: &mut fastrand::Rng, most| -> String {
            (0..random.usize(0..most)).map(|_| random.char(..)).collect()
        };
        Notification::new(text(&mut self.random, 4), text(&mut self.random, 5))
    }

    /// Whether the inbox of `side` takes it; if so, it has it.
    fn enqueue(&mut self, side: usize, note: &Notification) -> bool {
        let bytes = |note: &Notification| (note.name.len() + note.message.len()) as u64;
        let notes = &mut self.model[side].notes;
        let fits = notes.len() < MAX_NOTES && notes.iter().map(bytes).sum::<u64>() + bytes(note) <= MAX_NOTE_BYTES;
        if fits {
            notes.push_back(note.clone());
        }
        fits
    }

    fn notify(&mut self, side: usize) {
        let note = self.note();
        if note.name.len() + note.message.len() > 20 {
            self.engines[side].send_local_notification(&note).expect_err("too long");
            self.saw("notification too long");
            return;
        }
        let (to, sent) = if self.random.bool() {
            (side, self.engines[side].send_local_notification(&note).is_ok())
        } else {
            (1 - side, self.engines[side].send_notification(&self.segments[side], &note, LONG).is_ok())
        };
        assert_eq!(self.enqueue(to, &note), sent);
        self.saw(if sent { "notified" } else { "inbox full" });
    }

    fn drain(&mut self, side: usize) {
        let drained: Vec<_> = self.model[side].notes.drain(..).collect();
        assert_eq!(self.engines[side].receive_notifications(), drained);
    }

    fn transfer(&mut self, side: usize) {
        let other = 1 - side;
        let direction = if self.random.bool() { Direction::Read } else { Direction::Write };
        let active: Vec<usize> =
            (0..self.model[side].ranges.len()).filter(|index| self.model[side].ranges[*index].references > 0).collect();
        let known = self.known[side].clone();
        let pick = |random: &mut fastrand::Rng, model: &Side, among: &[usize], bases: &[u64]| {
            // Mostly within some range that is known, now and then anywhere.
            match among.get(random.usize(0..=among.len())).map(|index| &model.ranges[*index]) {
                Some(range) => bases[range.allocation] + range.at + random.u64(0..30),
                None => bases[random.usize(0..ALLOCATIONS)] + random.u64(0..ALLOCATION),
            }
        };
        let requests: Vec<TransferRequest> = (0..self.random.usize(0..8))
            .map(|_| TransferRequest {
                local_address: pick(&mut self.random, &self.model[side], &active, &self.bases[side]),
                remote_address: pick(&mut self.random, &self.model[other], &known, &self.bases[other]),
                length: match self.random.u8(0..20) {
                    0 => 0,
                    1 => 201,
                    _ => self.random.u64(1..40),
                },
            })
            .collect();
        let note = self.random.bool().then(|| self.note());
        let engine = &self.engines[side];
        let peer = &self.segments[side];
        let asynchronous = self.random.u8(0..4) == 0;
        // What it promises of failures on the way makes no difference here: nothing fails on its way.
        let mode = if self.random.bool() { direction.direct() } else { direction.into() };
        let report = match (&note, asynchronous) {
            (note, true) => engine.submit_async(peer, mode, &requests, note.as_ref(), LONG).map(block_on),
            (Some(note), false) => engine.submit_and_notify(peer, mode, &requests, note, LONG),
            (None, false) => engine.submit_and_wait(peer, mode, &requests, LONG),
        };

        // All checks, in their order, before anything moves.
        let note_bytes = note.as_ref().map_or(0, |note| note.name.len() + note.message.len());
        let mut refused = (requests.len() > 6).then_some("too many requests");
        refused = refused.or((note_bytes > 20).then_some("notification too long for a batch"));
        let mut local = Vec::new();
        for request in &requests {
            if refused.is_some() {
                break;
            }
            let model = &self.model[side];
            let active = |index: usize| model.ranges[index].references > 0;
            match model.resolve(&self.bases[side], active, request.local_address, request.length) {
                _ if request.length > MAX_PAYLOAD => refused = Some("payload too long"),
                None => refused = Some("local address"),
                Some(found) => local.push(found),
            }
        }
        let mut remote = Vec::new();
        if refused.is_none() {
            for attempt in 0..2 {
                remote.clear();
                let mut miss = None;
                for request in &requests {
                    let model = &self.model[other];
                    let known = |index: usize| self.known[side].contains(&index);
                    match model.resolve(&self.bases[other], known, request.remote_address, request.length) {
                        None => miss = Some("remote address"),
                        Some((index, _)) if !allows(model.ranges[index].permission, direction) => {
                            miss = Some("permission");
                        }
                        Some(found) => remote.push(found),
                    }
                    if miss.is_some() {
                        break;
                    }
                }
                refused = miss;
                if miss != Some("remote address") || asynchronous || attempt == 1 {
                    break;
                }
                self.known[side] = self.exported(other);
            }
        }
        let report = match (report, refused) {
            (Err(error), Some(why)) => {
                let fits = match &error {
                    SubmitError::TooManyRequests { .. } => why == "too many requests",
                    SubmitError::NotificationTooLong { .. } => why == "notification too long for a batch",
                    SubmitError::PayloadTooLong { .. } => why == "payload too long",
                    SubmitError::Local { .. } => why == "local address",
                    SubmitError::Remote { .. } => why == "remote address",
                    SubmitError::Permission { .. } => why == "permission",
                    _ => false,
                };
                assert!(fits, "{why}, but {error}");
                return self.saw(why);
            }
            (Ok(report), None) => report,
            (report, refused) => panic!("{report:?} where the model says {refused:?}"),
        };

        // Then one after the other, until a range that the peer has given up since.
        let (mut completed, mut bytes, mut failed) = (0, 0, None);
        for (index, request) in requests.iter().enumerate() {
            let (remote_range, remote_offset) = remote[index];
            if request.length > 0 {
                if self.model[other].ranges[remote_range].references == 0 {
                    failed = Some(index);
                    break;
                }
                self.copy(side, local[index], (remote_range, remote_offset), request.length, direction);
            }
            completed += 1;
            bytes += request.length;
        }
        assert_eq!((report.completed, report.completed_bytes, report.requests), (completed, bytes, requests.len()));
        assert_eq!(report.profile, mode.profile);
        assert_eq!(report.failure.as_ref().map(|failure| failure.index), failed);
        if let Some(failure) = &report.failure {
            assert_eq!((failure.effect, failure.local_changed), (RemoteEffect::None, false));
            assert!(matches!(failure.error, TransferError::Refused { status: Status::UnknownRegion }));
        }
        let complete = failed.is_none() && !requests.is_empty();
        match (note, report.notification) {
            (None, NotificationStatus::NotRequested) => {}
            (Some(_), NotificationStatus::Skipped) => assert!(!complete),
            (Some(note), NotificationStatus::Delivered) => assert!(complete && self.enqueue(other, &note)),
            (Some(note), NotificationStatus::Failed(_)) => assert!(complete && !self.enqueue(other, &note)),
            (note, status) => panic!("{status:?} for {note:?}"),
        }
        if mode.profile == Profile::Direct && completed > 0 {
            self.saw("moved directly");
        }
        self.saw(match (failed, asynchronous) {
            (Some(_), _) => "prefix",
            (None, true) => "complete, asynchronous",
            (None, false) => "complete",
        });
    }

    fn copy(&mut self, side: usize, local: (usize, u64), remote: (usize, u64), length: u64, direction: Direction) {
        let place = |model: &Side, (range, offset): (usize, u64)| {
            let range = &model.ranges[range];
            let start = usize::try_from(range.at + offset).expect("small");
            (range.allocation, start..start + usize::try_from(length).expect("small"))
        };
        let (here, there) = (place(&self.model[side], local), place(&self.model[1 - side], remote));
        let (from, to) = match direction {
            Direction::Read => ((1 - side, there), (side, here)),
            Direction::Write => ((side, here), (1 - side, there)),
        };
        let bytes = self.model[from.0].bytes[from.1.0][from.1.1].to_vec();
        self.model[to.0].bytes[to.1.0][to.1.1].copy_from_slice(&bytes);
    }

    /// Every byte of every allocation.
    fn compare_bytes(&mut self) {
        for side in 0..2 {
            for (index, memory) in self.memories[side].iter().enumerate() {
                // Through a range of its own in a third engine, which shares the allocation's lock.
                let reader = engine(Config::default());
                let range = reader.register_host_memory(memory, 0, ALLOCATION, Permission::LocalOnly).expect("room");
                assert_eq!(common::bytes_of(&range), self.model[side].bytes[index]);
            }
        }
    }
}

fn allows(permission: Permission, direction: Direction) -> bool {
    match direction {
        Direction::Read => permission.allows_read(),
        Direction::Write => permission.allows_write(),
    }
}

/// The simplest executor there is.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

fn run(seed: u64) {
    println!("seed {seed}");
    let mut world = World::new(seed);
    let operations = operations();
    for step in 0..operations {
        world.step();
        if step % 5000 == 4999 {
            world.compare_bytes();
        }
    }
    world.compare_bytes();
    for what in [
        "registered",
        "registration refused",
        "unregistered",
        "reference given up",
        "notified",
        "inbox full",
        "notification too long",
        "too many requests",
        "payload too long",
        "local address",
        "remote address",
        "permission",
        "prefix",
        "complete",
        "complete, asynchronous",
        "moved directly",
    ] {
        let seen = world.seen.get(what).copied().unwrap_or_default();
        assert!(seen > common::times(10, 0), "{what}: only {seen} of {operations}; {:?}", world.seen);
    }
    let World { engines, handles, .. } = world;
    drop(handles);
    for engine in &engines {
        engine.close_source(LONG).expect("nobody is inside");
        let stats = engine.stats();
        assert_eq!((stats.submissions, stats.batches, stats.source_operations), (0, 0, 0));
    }
}

#[test]
fn seed_0() {
    run(SEEDS[0]);
}

#[test]
fn seed_1() {
    run(SEEDS[1]);
}

#[test]
fn seed_2() {
    run(SEEDS[2]);
}

#[test]
fn seed_3() {
    run(SEEDS[3]);
}
