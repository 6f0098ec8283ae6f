//! Which window of a port is bound where, as far as posted work requests and polled completions tell; and what must
//! stay alive for it. Pure bookkeeping, the same for `verbs` and `sim`.
//!
//! Invariant: an entry that is not [`State::Free`] owns its `H`, the QP and the region that it is bound to.

use std::{
    collections::HashMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::bulk::BulkWc;

/// Names a window in its port's book. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WindowId(u64);

/// A work request by QP number and id.
type WrKey = (u32, u64);

/// Most binds of one device window: the low eight bits of its key say which, and none may come twice.
pub(crate) const BINDS_MAX: u8 = 255;

#[derive(Debug)]
enum State<H> {
    /// Not bound.
    Free,
    /// A bind is posted.
    Binding { wr: WrKey, key: u32, hold: H },
    /// The bind is done.
    Bound { qpn: u32, hold: H },
    /// A local invalidation is posted.
    Invalidating { wr: WrKey, hold: H },
}

#[derive(Debug)]
struct Entry<H> {
    /// As the device has it, binds under way aside.
    key: u32,
    binds: u8,
    state: State<H>,
}

impl<H> Entry<H> {
    fn qpn(&self) -> Option<u32> {
        match &self.state {
            State::Free => None,
            State::Bound { qpn, .. } => Some(*qpn),
            State::Binding { wr, .. } | State::Invalidating { wr, .. } => Some(wr.0),
        }
    }
}

#[derive(Debug)]
struct Table<H> {
    next: u64,
    windows: HashMap<WindowId, Entry<H>>,
    /// Posted binds and invalidations.
    wrs: HashMap<WrKey, WindowId>,
    /// Keys of windows that are bound, invalidations under way included.
    keys: HashMap<u32, WindowId>,
}

/// The book of one port.
#[derive(Debug)]
pub(crate) struct WindowBook<H> {
    table: Mutex<Table<H>>,
    /// Entries that are not free: completions need no look at the table while there are none.
    held: AtomicUsize,
}

/// The keys of a bind: the device's window as it is, and as it will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BindKeys {
    pub(crate) now: u32,
    pub(crate) next: u32,
}

impl<H> WindowBook<H> {
    pub(crate) fn new() -> Self {
        let table = Table { next: 0, windows: HashMap::new(), wrs: HashMap::new(), keys: HashMap::new() };
        Self { table: Mutex::new(table), held: AtomicUsize::new(0) }
    }

    /// A new window with the key that the device gave.
    pub(crate) fn add(&self, key: u32) -> WindowId {
        let mut table = self.table();
        let id = WindowId(table.next);
        table.next += 1;
        table.windows.insert(id, Entry { key, binds: 0, state: State::Free });
        id
    }

    /// The window is freed: gives what it held.
    pub(crate) fn remove(&self, id: WindowId) -> Option<H> {
        let mut table = self.table();
        let entry = table.windows.remove(&id)?;
        table.keys.retain(|_, of| *of != id);
        table.wrs.retain(|_, of| *of != id);
        self.release(entry.state)
    }

    /// Whether its next bind needs a new window of the device.
    pub(crate) fn is_spent(&self, id: WindowId) -> bool {
        let table = self.table();
        table.windows.get(&id).is_some_and(|entry| entry.binds == BINDS_MAX && matches!(entry.state, State::Free))
    }

    /// The device's window was replaced.
    pub(crate) fn renew(&self, id: WindowId, key: u32) {
        if let Some(entry) = self.table().windows.get_mut(&id) {
            (entry.key, entry.binds) = (key, 0);
        }
    }

    /// A bind is about to be posted. `None`: the window is not free, or the id in use, and `hold` is dropped.
    pub(crate) fn bind(&self, id: WindowId, wr: WrKey, hold: H) -> Option<BindKeys> {
        let mut table = self.table();
        if table.wrs.contains_key(&wr) {
            return None;
        }
        let entry = table.windows.get_mut(&id)?;
        if !matches!(entry.state, State::Free) || entry.binds == BINDS_MAX {
            return None;
        }
        let keys = BindKeys { now: entry.key, next: (entry.key & !0xff) | (entry.key.wrapping_add(1) & 0xff) };
        entry.state = State::Binding { wr, key: keys.next, hold };
        self.held.fetch_add(1, Ordering::Release);
        table.wrs.insert(wr, id);
        Some(keys)
    }

    /// A local invalidation of `key` is about to be posted. One of a key that is not bound there is the device's to
    /// refuse.
    pub(crate) fn invalidate(&self, key: u32, wr: WrKey) {
        let mut table = self.table();
        let Some(&id) = table.keys.get(&key) else { return };
        let Some(entry) = table.windows.get_mut(&id) else { return };
        match std::mem::replace(&mut entry.state, State::Free) {
            State::Bound { qpn, hold } if qpn == wr.0 => {
                entry.state = State::Invalidating { wr, hold };
                table.wrs.insert(wr, id);
            }
            other => entry.state = other,
        }
    }

    /// That work request was not posted after all, or failed: as before it.
    pub(crate) fn undo(&self, wr: WrKey) {
        let released = self.undo_in(&mut self.table(), wr);
        drop(released);
    }

    fn undo_in(&self, table: &mut Table<H>, wr: WrKey) -> Option<H> {
        let id = table.wrs.remove(&wr)?;
        let entry = table.windows.get_mut(&id)?;
        match std::mem::replace(&mut entry.state, State::Free) {
            // The device never had it, or refused it.
            state @ State::Binding { .. } => return self.release(state),
            // Perhaps still bound, and the QP in ERR.
            State::Invalidating { hold, .. } => entry.state = State::Bound { qpn: wr.0, hold },
            other => entry.state = other,
        }
        None
    }

    /// What a polled completion says of windows.
    pub(crate) fn on_wc(&self, wc: &BulkWc) {
        if self.held.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut table = self.table();
        let released = match *wc {
            BulkWc::Done { qpn, id } => self.done(&mut table, (qpn, id)),
            BulkWc::Failed { qpn, id, .. } => self.undo_in(&mut table, (qpn, id)),
            BulkWc::Notified { qpn, invalidated: Some(key), .. } => self.dead(&mut table, qpn, key.0),
            BulkWc::Notified { .. } | BulkWc::NotifyFailed { .. } => None,
        };
        drop(table); // what is released may take locks of its own
        drop(released);
    }

    fn done(&self, table: &mut Table<H>, wr: WrKey) -> Option<H> {
        let id = table.wrs.remove(&wr)?;
        let entry = table.windows.get_mut(&id)?;
        match std::mem::replace(&mut entry.state, State::Free) {
            State::Binding { key, hold, .. } => {
                (entry.key, entry.binds, entry.state) = (key, entry.binds + 1, State::Bound { qpn: wr.0, hold });
                table.keys.insert(key, id);
                None
            }
            state @ State::Invalidating { .. } => {
                let key = entry.key;
                table.keys.remove(&key);
                self.release(state)
            }
            other => {
                entry.state = other;
                None
            }
        }
    }

    /// The peer on that QP has invalidated the key.
    fn dead(&self, table: &mut Table<H>, qpn: u32, key: u32) -> Option<H> {
        let id = *table.keys.get(&key)?;
        let entry = table.windows.get_mut(&id).filter(|entry| entry.qpn() == Some(qpn))?;
        let state = std::mem::replace(&mut entry.state, State::Free);
        table.keys.remove(&key);
        // An invalidation of ours may be under way: it finds nothing to do, and fails.
        table.wrs.retain(|_, of| *of != id);
        self.release(state)
    }

    fn release(&self, state: State<H>) -> Option<H> {
        match state {
            State::Free => None,
            State::Binding { hold, .. } | State::Bound { hold, .. } | State::Invalidating { hold, .. } => {
                self.held.fetch_sub(1, Ordering::Release);
                Some(hold)
            }
        }
    }

    /// The key, while the window is bound for certain.
    pub(crate) fn key(&self, id: WindowId) -> Option<u32> {
        let table = self.table();
        table.windows.get(&id).filter(|entry| matches!(entry.state, State::Bound { .. })).map(|entry| entry.key)
    }

    /// Whether it may be bound.
    pub(crate) fn is_held(&self, id: WindowId) -> bool {
        self.table().windows.get(&id).is_some_and(|entry| entry.qpn().is_some())
    }

    /// Windows that may be bound on a QP.
    pub(crate) fn bound_on(&self, qpn: u32) -> usize {
        if self.held.load(Ordering::Acquire) == 0 {
            return 0;
        }
        self.table().windows.values().filter(|entry| entry.qpn() == Some(qpn)).count()
    }

    fn table(&self) -> MutexGuard<'_, Table<H>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::fabric::{WcStatus, bulk::Rkey};

    const QPN: u32 = 7;

    fn done(id: u64) -> BulkWc {
        BulkWc::Done { qpn: QPN, id }
    }

    fn failed(id: u64) -> BulkWc {
        BulkWc::Failed { qpn: QPN, id, status: WcStatus::Flushed, vendor_err: 0 }
    }

    fn receipt(qpn: u32, key: u32) -> BulkWc {
        BulkWc::Notified { qpn, imm: 0, bytes: 0, invalidated: Some(Rkey(key)) }
    }

    #[test]
    fn a_window_holds_what_it_is_bound_to_until_it_is_dead_for_certain() {
        let (book, held) = (WindowBook::new(), Arc::new(()));
        let window = book.add(0x1ff);
        let holders = || Arc::strong_count(&held) - 1;
        // Bound, then dead by each way; whatever came before.
        for (round, end) in ["invalidated", "receipt", "freed"].into_iter().enumerate() {
            let round = u64::try_from(round).unwrap();
            let key = 0x100 + u32::try_from(round).unwrap();
            let keys = book.bind(window, (QPN, round), Arc::clone(&held)).unwrap();
            assert_eq!(keys.next, key, "{end}: the low byte wraps and moves on");
            assert!(book.bind(window, (QPN, 99), Arc::clone(&held)).is_none(), "not twice at once");
            assert_eq!((book.key(window), book.bound_on(QPN), holders()), (None, 1, 1), "{end}");
            book.on_wc(&done(round));
            assert_eq!((book.key(window), book.bound_on(QPN), book.bound_on(8)), (Some(key), 1, 0), "{end}");
            match end {
                "invalidated" => {
                    book.invalidate(key, (QPN, 50));
                    assert_eq!((book.key(window), book.is_held(window)), (None, true));
                    book.on_wc(&done(50));
                }
                "receipt" => {
                    book.on_wc(&receipt(8, key));
                    assert!(book.is_held(window), "of another QP");
                    book.on_wc(&receipt(QPN, key));
                }
                _ => drop(book.remove(window)),
            }
            assert_eq!((book.key(window), book.bound_on(QPN), holders()), (None, 0, 0), "{end}");
        }
        assert_eq!(book.held.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_failed_bind_is_no_bind_and_a_failed_invalidation_no_death() {
        let (book, held) = (WindowBook::new(), Arc::new(()));
        let window = book.add(0x100);
        let first = book.bind(window, (QPN, 1), Arc::clone(&held)).unwrap();
        book.on_wc(&failed(1));
        assert_eq!((book.is_held(window), Arc::strong_count(&held)), (false, 1));
        assert_eq!(book.bind(window, (QPN, 2), Arc::clone(&held)), Some(first), "the device's key did not move");
        book.undo((QPN, 2));
        assert!(!book.is_held(window), "not posted");
        let _ = book.bind(window, (QPN, 3), Arc::clone(&held)).unwrap();
        book.on_wc(&done(3));
        book.invalidate(first.next, (8, 4));
        assert_eq!(book.key(window), Some(first.next), "invalidated on another QP: the device refuses that");
        book.invalidate(first.next, (QPN, 5));
        book.on_wc(&failed(5));
        assert_eq!(book.bound_on(QPN), 1);
        // The peer's invalidation is polled while ours is under way, which then fails.
        book.invalidate(first.next, (QPN, 6));
        book.on_wc(&receipt(QPN, first.next));
        book.on_wc(&failed(6));
        assert_eq!((book.bound_on(QPN), Arc::strong_count(&held)), (0, 1));
    }

    #[test]
    fn no_key_comes_twice_before_the_window_is_replaced() {
        let book = WindowBook::new();
        let window = book.add(0x1_80);
        let mut keys = std::collections::HashSet::new();
        for id in 0..u64::from(BINDS_MAX) {
            assert!(!book.is_spent(window));
            let bound = book.bind(window, (QPN, id), ()).unwrap();
            book.on_wc(&done(id));
            assert!(keys.insert(bound.next) && bound.next >> 8 == 1);
            book.invalidate(bound.next, (QPN, 1000 + id));
            book.on_wc(&done(1000 + id));
        }
        assert!(book.is_spent(window) && book.bind(window, (QPN, 999), ()).is_none());
        book.renew(window, 0x2_00);
        assert_eq!(book.bind(window, (QPN, 999), ()), Some(BindKeys { now: 0x2_00, next: 0x2_01 }));
    }
}
