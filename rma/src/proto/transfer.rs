//! The transfers of one bulk epoch: cut into chunks, windowed, in turn; and how each of them ends.
//!
//! A GET is a number of READs, of which at most [`Window::reads`] are posted at a time, and a PUT a number of WRITEs.
//! All transfers take turns, a chunk each. The first failure or a cancel stops what is not posted; a transfer ends when
//! what is posted has come home, and not before.
//!
//! Work requests carry a number that names epoch and chunk. A completion whose number is of another epoch, or unknown,
//! is nobody's: it changes nothing.

use std::collections::{HashMap, VecDeque};

/// Names a transfer within one run of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// What a transfer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// READs.
    Get,
    /// WRITEs.
    Put,
    /// WRITEs, the last of which tells the peer.
    PutAndNotify,
    /// No bytes: only tells the peer.
    Notify,
}

impl Kind {
    /// Whether its last work request takes one of the peer's receives.
    pub const fn notifies(self) -> bool {
        matches!(self, Self::PutAndNotify | Self::Notify)
    }
}

/// What may be posted at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// READs: the agreed `max_rd_atomic`. More would wait in the device, where nothing can stop them.
    pub reads: u32,
    /// Work requests of all kinds: the send queue, less what is kept for control.
    pub wrs: u32,
    /// Bytes, but always one chunk.
    pub bytes: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u32,
}

/// One work request to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// For its completion.
    pub wr_id: u64,
    /// Whose it is.
    pub transfer: TransferId,
    /// From the transfer's start.
    pub offset: u64,
    /// Bytes; 0 for a notification without any.
    pub len: u32,
    /// The kind of its transfer.
    pub kind: Kind,
    /// The last of its transfer.
    pub last: bool,
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End<S> {
    /// All bytes have moved.
    Done,
    /// One of its own work requests failed so.
    Failed(S),
    /// The epoch ended for another one's sake. It may be tried again.
    Reset,
    /// It was stopped before all was posted, and what was posted has come home.
    Stopped,
}

/// What a completion means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completed<S> {
    /// Of another epoch, or seen before.
    Stale,
    /// So many bytes of it have moved, or one of its chunks was lost: the transfer goes on, or still comes home.
    Underway {
        /// Which.
        transfer: TransferId,
        /// Bytes of this chunk that moved.
        bytes: u32,
    },
    /// It was the transfer's last one.
    Ended {
        /// Which.
        transfer: TransferId,
        /// Bytes of this chunk that moved.
        bytes: u32,
        /// How.
        end: End<S>,
    },
}

#[derive(Debug)]
struct Transfer<S> {
    kind: Kind,
    len: u64,
    /// Bytes handed out as chunks.
    cut: u64,
    /// Chunks handed out.
    chunks: u64,
    /// Chunks that are posted.
    posted: u32,
    /// All chunks are handed out.
    all_cut: bool,
    /// Nothing more is to be handed out.
    stopped: bool,
    flushed: bool,
    failed: Option<S>,
}

/// The transfers of one epoch. `S` is a device's status.
#[derive(Debug)]
pub struct Transfers<S> {
    epoch: u32,
    window: Window,
    table: HashMap<TransferId, Transfer<S>>,
    /// Those with chunks to hand out, in turn.
    turns: VecDeque<TransferId>,
    posted: HashMap<u32, Chunk>,
    serial: u32,
    reads_posted: u32,
    bytes_posted: u64,
    /// Notifications that the peer has receives for.
    credits: u32,
}

impl<S: Copy> Transfers<S> {
    /// For the epoch of that number (30 bits of it), toward a peer with `credits` receives for notifications.
    pub fn new(epoch: u32, window: Window, credits: u32) -> Self {
        Self {
            epoch: epoch & EPOCH_MASK,
            window,
            table: HashMap::new(),
            turns: VecDeque::new(),
            posted: HashMap::new(),
            serial: 0,
            reads_posted: 0,
            bytes_posted: 0,
            credits,
        }
    }

    /// Takes a transfer of `len` bytes; 0 only for [`Kind::Notify`].
    pub fn start(&mut self, id: TransferId, kind: Kind, len: u64) {
        let transfer = Transfer {
            kind,
            len,
            cut: 0,
            chunks: 0,
            posted: 0,
            all_cut: false,
            stopped: false,
            flushed: false,
            failed: None,
        };
        self.table.insert(id, transfer);
        self.turns.push_back(id);
    }

    /// The next work request, which counts as posted from now on; `None` while the window is full or nothing waits.
    pub fn next_chunk(&mut self) -> Option<Chunk> {
        if self.posted.len() >= self.window.wrs as usize {
            return None;
        }
        let serial = self.free_serial();
        for _ in 0..self.turns.len() {
            let id = self.turns.pop_front()?;
            let Some(transfer) = self.table.get_mut(&id).filter(|transfer| !transfer.stopped && !transfer.all_cut)
            else {
                continue;
            };
            let left = transfer.len - transfer.cut;
            let len = u32::try_from(left.min(self.window.chunk_bytes.into())).unwrap_or(u32::MAX);
            let last = u64::from(len) == left;
            let over = self.bytes_posted > 0 && self.bytes_posted + u64::from(len) > self.window.bytes;
            let no_read = transfer.kind == Kind::Get && self.reads_posted >= self.window.reads;
            let no_credit = last && transfer.kind.notifies() && self.credits == 0;
            if over || no_read || no_credit {
                self.turns.push_back(id);
                continue;
            }
            let wr_id = u64::from(self.epoch) << 32 | u64::from(serial);
            let chunk = Chunk { wr_id, transfer: id, offset: transfer.cut, len, kind: transfer.kind, last };
            transfer.cut += u64::from(len);
            transfer.chunks += 1;
            transfer.posted += 1;
            transfer.all_cut = last;
            self.reads_posted += u32::from(chunk.kind == Kind::Get);
            self.bytes_posted += u64::from(len);
            self.credits -= u32::from(last && chunk.kind.notifies());
            self.posted.insert(serial, chunk);
            if !last {
                self.turns.push_back(id);
            }
            return Some(chunk);
        }
        None
    }

    /// A good completion.
    pub fn on_done(&mut self, wr_id: u64) -> Completed<S> {
        match self.take(wr_id) {
            Some(chunk) => self.settle(chunk, chunk.len),
            None => Completed::Stale,
        }
    }

    /// A failed one: `Some` of its own, `None` for a flush.
    pub fn on_failed(&mut self, wr_id: u64, own: Option<S>) -> Completed<S> {
        let Some(chunk) = self.take(wr_id) else { return Completed::Stale };
        if let Some(transfer) = self.table.get_mut(&chunk.transfer) {
            transfer.stopped = true;
            match own {
                Some(status) => transfer.failed = transfer.failed.or(Some(status)),
                None => transfer.flushed = true,
            }
        }
        self.settle(chunk, 0)
    }

    /// The device did not take it: it counts as flushed, and is not posted.
    pub fn on_refused(&mut self, wr_id: u64) {
        let Some(chunk) = self.take(wr_id) else { return };
        if let Some(transfer) = self.table.get_mut(&chunk.transfer) {
            transfer.posted -= 1;
            (transfer.stopped, transfer.flushed) = (true, true);
        }
    }

    /// Hands out no more of it. Gives its end if nothing of it is posted; else that comes with its last completion.
    pub fn stop(&mut self, id: TransferId) -> Option<End<S>> {
        let transfer = self.table.get_mut(&id)?;
        if transfer.all_cut {
            return None; // it comes home whole
        }
        transfer.stopped = true;
        if transfer.posted > 0 { None } else { self.table.remove(&id).map(Transfer::end) }
    }

    /// The epoch is over: nothing more is handed out. Gives the transfers of which nothing is posted.
    pub fn close(&mut self) -> Vec<TransferId> {
        self.turns.clear();
        for transfer in self.table.values_mut() {
            transfer.stopped = true;
            // Even when all that is posted comes home well: the rest never will.
            transfer.flushed |= !transfer.all_cut;
        }
        let idle = |(id, transfer): (&TransferId, &Transfer<S>)| (transfer.posted == 0).then_some(*id);
        let mut idle: Vec<_> = self.table.iter().filter_map(idle).collect();
        idle.sort_unstable();
        self.table.retain(|_, transfer| transfer.posted > 0);
        idle
    }

    /// No completion comes any more: the transfers that are left, with their ends.
    pub fn abandon(&mut self) -> Vec<(TransferId, End<S>)> {
        self.posted.clear();
        (self.reads_posted, self.bytes_posted) = (0, 0);
        let mut left: Vec<_> = self
            .table
            .drain()
            .map(|(id, mut transfer)| {
                transfer.flushed = true;
                (id, transfer.end())
            })
            .collect();
        left.sort_unstable_by_key(|(id, _)| *id);
        left
    }

    /// The peer has posted so many receives again. Says no when it gives back more than it was ever sent.
    #[must_use = "a peer that loses count must be left"]
    pub fn add_credits(&mut self, credits: u32, most: u32) -> bool {
        self.credits = self.credits.saturating_add(credits);
        self.credits <= most
    }

    /// Work requests posted.
    pub fn posted(&self) -> usize {
        self.posted.len()
    }

    /// READs posted.
    pub const fn reads_posted(&self) -> u32 {
        self.reads_posted
    }

    /// Transfers that have not ended.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// The chunk that a work request carries, while it is posted.
    pub fn chunk(&self, wr_id: u64) -> Option<&Chunk> {
        if wr_id >> 32 != u64::from(self.epoch) {
            return None;
        }
        self.posted.get(&u32::try_from(wr_id & 0xffff_ffff).ok()?)
    }

    fn free_serial(&mut self) -> u32 {
        loop {
            self.serial = self.serial.wrapping_add(1);
            if !self.posted.contains_key(&self.serial) {
                return self.serial;
            }
        }
    }

    fn take(&mut self, wr_id: u64) -> Option<Chunk> {
        let serial = u32::try_from(wr_id & 0xffff_ffff).ok()?;
        self.chunk(wr_id)?;
        let chunk = self.posted.remove(&serial)?;
        self.reads_posted -= u32::from(chunk.kind == Kind::Get);
        self.bytes_posted -= u64::from(chunk.len);
        Some(chunk)
    }

    /// A chunk has come home.
    fn settle(&mut self, chunk: Chunk, bytes: u32) -> Completed<S> {
        let id = chunk.transfer;
        let Some(transfer) = self.table.get_mut(&id) else { return Completed::Stale };
        transfer.posted -= 1;
        if transfer.posted > 0 || !(transfer.all_cut || transfer.stopped) {
            return Completed::Underway { transfer: id, bytes };
        }
        match self.table.remove(&id) {
            Some(transfer) => Completed::Ended { transfer: id, bytes, end: transfer.end() },
            None => Completed::Stale,
        }
    }
}

impl<S> Transfer<S> {
    fn end(self) -> End<S> {
        match self.failed {
            Some(status) => End::Failed(status),
            None if self.flushed => End::Reset,
            None if self.all_cut => End::Done,
            None => End::Stopped,
        }
    }
}

/// The two highest bits of a work request's number are not the transfers': the port has one, control messages the other.
const EPOCH_MASK: u32 = 0x3fff_ffff;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WINDOW: Window = Window { reads: 4, wrs: 8, bytes: 1 << 30, chunk_bytes: 100 };

    fn transfers(window: Window) -> Transfers<u8> {
        Transfers::new(7, window, 2)
    }

    fn at(id: TransferId) -> usize {
        usize::try_from(id.0).unwrap()
    }

    fn post_all(transfers: &mut Transfers<u8>) -> Vec<Chunk> {
        std::iter::from_fn(|| transfers.next_chunk()).collect()
    }

    /// RT-13: exactly the window, never more, and also with a window of 1.
    #[test]
    fn reads_posted_at_once_reach_the_window_and_never_exceed_it() {
        for reads in [1, 4] {
            let mut transfers = transfers(Window { reads, ..WINDOW });
            transfers.start(TransferId(1), Kind::Get, 6_400);
            let mut flying: VecDeque<Chunk> = post_all(&mut transfers).into();
            let (mut most, mut seen) = (flying.len(), 0);
            while let Some(chunk) = flying.pop_front() {
                seen += 1;
                transfers.on_done(chunk.wr_id);
                flying.extend(post_all(&mut transfers));
                most = most.max(flying.len());
            }
            assert_eq!((most, seen, transfers.is_empty()), (reads as usize, 64, true));
        }
    }

    #[test]
    fn chunks_cover_the_range_once_and_the_last_may_be_short() {
        let mut transfers = transfers(WINDOW);
        transfers.start(TransferId(1), Kind::Put, 250);
        let cut: Vec<_> = post_all(&mut transfers).iter().map(|chunk| (chunk.offset, chunk.len, chunk.last)).collect();
        assert_eq!(cut, [(0, 100, false), (100, 100, false), (200, 50, true)]);
    }

    /// B20 by arithmetic: beyond 4 GiB nothing is truncated.
    #[test]
    fn four_gib_and_a_byte_is_8193_chunks_of_512_kib() {
        let mut transfers = transfers(Window { chunk_bytes: 512 << 10, ..WINDOW });
        let len = (4 << 30) + 1;
        transfers.start(TransferId(1), Kind::Get, len);
        let (mut chunks, mut next, mut ended) = (0, 0, false);
        while let Some(chunk) = transfers.next_chunk() {
            assert_eq!(chunk.offset, next);
            (chunks, next) = (chunks + 1, next + u64::from(chunk.len));
            ended = matches!(transfers.on_done(chunk.wr_id), Completed::Ended { end: End::Done, .. });
        }
        assert_eq!((chunks, next, ended), (8193, len, true));
    }

    ///
    #[test]
    fn transfers_take_turns_by_chunk() {
        let mut transfers = transfers(WINDOW);
        transfers.start(TransferId(1), Kind::Get, 1000);
        transfers.start(TransferId(2), Kind::Get, 1000);
        transfers.start(TransferId(3), Kind::Put, 150);
        let turns: Vec<u64> = post_all(&mut transfers).iter().map(|chunk| chunk.transfer.0).collect();
        assert_eq!(turns, [1, 2, 3, 1, 2, 3], "READs stop at their window, and do not hold up the WRITE");
    }

    ///
    #[test]
    fn the_first_failure_stops_the_rest_which_drain_before_the_end() {
        let mut transfers = transfers(WINDOW);
        transfers.start(TransferId(1), Kind::Get, 1000);
        transfers.start(TransferId(2), Kind::Get, 1000);
        let posted = post_all(&mut transfers);
        let of = |transfer| posted.iter().filter(move |chunk| chunk.transfer.0 == transfer).map(|chunk| chunk.wr_id);
        let (ones, twos): (Vec<_>, Vec<_>) = (of(1).collect(), of(2).collect());
        let underway = |transfer, bytes| Completed::Underway { transfer: TransferId(transfer), bytes };
        assert_eq!(transfers.on_failed(ones[0], Some(9)), underway(1, 0));
        assert_eq!(transfers.close(), []);
        assert_eq!(transfers.next_chunk(), None);
        assert_eq!(transfers.on_failed(twos[0], None), underway(2, 0));
        let ended = |transfer, end| Completed::Ended { transfer: TransferId(transfer), bytes: 0, end };
        assert_eq!(transfers.on_failed(ones[1], None), ended(1, End::Failed(9)));
        assert_eq!(transfers.on_failed(twos[1], None), ended(2, End::Reset));
        assert_eq!(transfers.on_failed(twos[1], None), Completed::Stale, "a second answer is impossible");
    }

    #[test]
    fn a_stop_drains_what_is_posted_and_a_whole_one_is_done_all_the_same() {
        let mut transfers = transfers(WINDOW);
        transfers.start(TransferId(1), Kind::Get, 1000);
        transfers.start(TransferId(2), Kind::Put, 100);
        assert_eq!(transfers.stop(TransferId(3)), None);
        let posted = post_all(&mut transfers);
        assert_eq!((transfers.stop(TransferId(1)), transfers.stop(TransferId(2))), (None, None));
        let ends: Vec<_> = posted.iter().map(|chunk| transfers.on_done(chunk.wr_id)).collect();
        assert!(
            ends.contains(&Completed::Ended { transfer: TransferId(1), bytes: 100, end: End::Stopped }),
            "{ends:?}"
        );
        assert!(ends.contains(&Completed::Ended { transfer: TransferId(2), bytes: 100, end: End::Done }), "{ends:?}");
        transfers.start(TransferId(4), Kind::Get, 10);
        assert_eq!(transfers.stop(TransferId(4)), Some(End::Stopped));
    }

    #[test]
    fn what_is_not_whole_when_its_epoch_closes_is_reset_however_its_chunks_end() {
        let mut transfers = transfers(WINDOW);
        transfers.start(TransferId(1), Kind::Get, 1000);
        transfers.start(TransferId(2), Kind::Put, 100);
        let posted = post_all(&mut transfers);
        assert_eq!(transfers.close(), []);
        let ends: Vec<_> = posted.iter().map(|chunk| transfers.on_done(chunk.wr_id)).collect();
        assert!(ends.contains(&Completed::Ended { transfer: TransferId(1), bytes: 100, end: End::Reset }), "{ends:?}");
        assert!(ends.contains(&Completed::Ended { transfer: TransferId(2), bytes: 100, end: End::Done }), "{ends:?}");
    }

    ///
    #[test]
    fn a_completion_of_another_epoch_is_nobodys() {
        let (mut old, mut new) = (transfers(WINDOW), Transfers::<u8>::new(8, WINDOW, 0));
        old.start(TransferId(1), Kind::Get, 100);
        new.start(TransferId(2), Kind::Get, 100);
        let (stale, fresh) = (old.next_chunk().unwrap(), new.next_chunk().unwrap());
        assert_ne!(stale.wr_id, fresh.wr_id);
        assert_eq!(new.on_done(stale.wr_id), Completed::Stale);
        assert_eq!(new.on_failed(u64::MAX, Some(1)), Completed::Stale);
        assert_eq!(old.abandon(), [(TransferId(1), End::Reset)]);
        assert!(matches!(new.on_done(fresh.wr_id), Completed::Ended { end: End::Done, .. }));
    }

    #[test]
    fn a_refused_post_ends_with_its_epoch() {
        let mut transfers = transfers(WINDOW);
        transfers.start(TransferId(1), Kind::Get, 100);
        let chunk = transfers.next_chunk().unwrap();
        transfers.on_refused(chunk.wr_id);
        assert_eq!((transfers.posted(), transfers.close()), (0, vec![TransferId(1)]));
        assert_eq!(transfers.on_done(chunk.wr_id), Completed::Stale);
    }

    #[test]
    fn notifications_wait_for_credits_and_hold_up_nobody() {
        let mut transfers = transfers(WINDOW);
        for id in 1..=3 {
            transfers.start(TransferId(id), Kind::Notify, 0);
        }
        transfers.start(TransferId(4), Kind::PutAndNotify, 150);
        transfers.start(TransferId(5), Kind::Put, 50);
        let posted: Vec<_> = post_all(&mut transfers).iter().map(|chunk| (chunk.transfer.0, chunk.len)).collect();
        assert_eq!(posted, [(1, 0), (2, 0), (4, 100), (5, 50)]);
        assert!(transfers.add_credits(2, 2));
        let posted: Vec<_> = post_all(&mut transfers).iter().map(|chunk| (chunk.transfer.0, chunk.len)).collect();
        assert_eq!(posted, [(3, 0), (4, 50)]);
        assert!(!transfers.add_credits(3, 2), "more than it was sent");
    }

    #[test]
    fn a_budget_of_bytes_holds_but_for_the_first_chunk() {
        let mut transfers = transfers(Window { bytes: 150, ..WINDOW });
        transfers.start(TransferId(1), Kind::Put, 1000);
        assert_eq!(post_all(&mut transfers).len(), 1);
        let mut tiny = self::transfers(Window { bytes: 1, ..WINDOW });
        tiny.start(TransferId(1), Kind::Put, 1000);
        assert_eq!(post_all(&mut tiny).len(), 1);
    }

    proptest! {
        /// Whatever completes, in whatever order, good or not: each transfer ends once, and the windows hold.
        #[test]
        fn each_transfer_ends_once_within_the_windows(
            lens in prop::collection::vec((0u64..1500, 0u8..3), 1..6),
            picks in prop::collection::vec((any::<prop::sample::Index>(), 0u8..10), 0..200),
        ) {
            let mut transfers = transfers(WINDOW);
            for (at, (len, kind)) in lens.iter().enumerate() {
                let kind = [Kind::Get, Kind::Put, Kind::PutAndNotify][usize::from(*kind)];
                transfers.start(TransferId(at as u64), kind, len + 1);
            }
            let (mut flying, mut ended) = (Vec::new(), vec![0; lens.len()]);
            for (pick, how) in picks {
                flying.extend(post_all(&mut transfers));
                prop_assert!(flying.iter().filter(|chunk: &&Chunk| chunk.kind == Kind::Get).count() <= 4);
                prop_assert!(flying.len() <= 8 && flying.len() == transfers.posted());
                if flying.is_empty() { break; }
                let chunk = flying.swap_remove(pick.index(flying.len()));
                let completed = match how {
                    0 => transfers.on_failed(chunk.wr_id, Some(1)),
                    1 => transfers.on_failed(chunk.wr_id, None),
                    2 => { if transfers.stop(chunk.transfer).is_some() { ended[at(chunk.transfer)] += 1; }
                           transfers.on_done(chunk.wr_id) }
                    _ => transfers.on_done(chunk.wr_id),
                };
                if let Completed::Ended { transfer, .. } = completed { ended[at(transfer)] += 1; }
            }
            for id in transfers.close() { ended[at(id)] += 1; }
            for (id, _) in transfers.abandon() { ended[at(id)] += 1; }
            prop_assert_eq!(ended, vec![1; lens.len()]);
            prop_assert!(transfers.is_empty());
        }
    }
}
