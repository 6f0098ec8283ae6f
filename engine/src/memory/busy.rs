//! Which bytes of an allocation direct operations are at. Pure: no lock, no clock.
//!
//! An allocation's lock puts copies in some order, and is never held while a peer is waited for. A direct operation takes
//! as long as its peer, so it does not hold the lock: its range is *lent* to it, and accesses that conflict wait, while
//! those of other bytes go on.
//!
//! Invariants: what is lent for writing overlaps nothing else that is lent; who waits is passed over by nobody whose range
//! conflicts, so that readers who follow each other do not keep a writer out; each waits for earlier ones alone, so that
//! no two wait for each other.

use std::ops::Range;

/// What an access does with bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Others may read them meanwhile.
    Read,
    /// Nobody may.
    Write,
}

/// A loan, or a wait for one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    ticket: u64,
    range: Range<usize>,
    by: Use,
}

impl Entry {
    fn conflicts(&self, range: &Range<usize>, by: Use) -> bool {
        let apart = self.range.end <= range.start || range.end <= self.range.start;
        let empty = self.range.is_empty() || range.is_empty();
        !apart && !empty && (self.by == Use::Write || by == Use::Write)
    }
}

/// What is lent of one allocation, and who waits.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    last_ticket: u64,
    lent: Vec<Entry>,
    /// By ascending ticket.
    waiting: Vec<Entry>,
}

impl Ledger {
    pub(super) const fn new() -> Self {
        Self { last_ticket: 0, lent: Vec::new(), waiting: Vec::new() }
    }

    /// Whether bytes may be accessed under the lock now. Such an access is short, and passes those who wait.
    pub(super) fn allows(&self, range: &Range<usize>, by: Use) -> bool {
        !self.lent.iter().any(|entry| entry.conflicts(range, by))
    }

    /// Lends a range, for the ticket with which it is given back; `None` if it conflicts with a loan, or with a wait that
    /// began before that of `waiter`.
    pub(super) fn lend(&mut self, range: Range<usize>, by: Use, waiter: Option<u64>) -> Option<u64> {
        let earlier = |entry: &&Entry| waiter.is_none_or(|ticket| entry.ticket < ticket);
        let passed = self.waiting.iter().filter(earlier).any(|entry| entry.conflicts(&range, by));
        if passed || !self.allows(&range, by) {
            return None;
        }
        let ticket = self.ticket();
        self.lent.push(Entry { ticket, range, by });
        Some(ticket)
    }

    pub(super) fn give_back(&mut self, ticket: u64) {
        self.lent.retain(|entry| entry.ticket != ticket);
    }

    /// Begins a wait.
    pub(super) fn wait(&mut self, range: Range<usize>, by: Use) -> u64 {
        let ticket = self.ticket();
        self.waiting.push(Entry { ticket, range, by });
        ticket
    }

    /// Ends one, with or without success.
    pub(super) fn leave(&mut self, ticket: u64) {
        self.waiting.retain(|entry| entry.ticket != ticket);
    }

    fn ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn readers_share_and_writers_do_not() {
        let mut ledger = Ledger::new();
        let first = ledger.lend(10..20, Use::Read, None).expect("free");
        let second = ledger.lend(15..25, Use::Read, None).expect("both read");
        assert_eq!(ledger.lend(19..20, Use::Write, None), None);
        assert!(ledger.allows(&(10..25), Use::Read) && !ledger.allows(&(24..30), Use::Write));
        assert!(ledger.allows(&(0..10), Use::Write) && ledger.allows(&(25..30), Use::Write), "beside it");
        ledger.give_back(first);
        ledger.give_back(second);
        let writer = ledger.lend(10..20, Use::Write, None).expect("free again");
        assert!(!ledger.allows(&(19..20), Use::Read) && ledger.allows(&(15..15), Use::Write), "no bytes, no conflict");
        assert_eq!(ledger.lend(15..15, Use::Write, None).map(|ticket| ledger.give_back(ticket)), Some(()));
        ledger.give_back(writer);
        assert!(ledger.lent.is_empty());
    }

    #[test]
    fn who_waits_is_not_passed_by_those_who_come_later() {
        let mut ledger = Ledger::new();
        let reader = ledger.lend(0..10, Use::Read, None).expect("free");
        let writer = ledger.wait(5..15, Use::Write);
        assert_eq!(ledger.lend(5..15, Use::Write, Some(writer)), None);
        assert_eq!(ledger.lend(0..6, Use::Read, None), None, "a reader behind the writer");
        assert!(ledger.lend(0..5, Use::Read, None).is_some(), "one that does not conflict with it");
        let late = ledger.wait(0..6, Use::Read);
        ledger.give_back(reader);
        assert_eq!(ledger.lend(0..6, Use::Read, Some(late)), None, "still behind");
        assert!(ledger.lend(5..15, Use::Write, Some(writer)).is_some());
        ledger.leave(writer);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Lend(usize, usize, bool),
        Wait(usize, usize, bool),
        Retry(usize),
        GiveBack(usize),
        Leave(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0_usize..12, 0_usize..6, any::<bool>()).prop_map(|(at, len, write)| Op::Lend(at, len, write)),
            (0_usize..12, 0_usize..6, any::<bool>()).prop_map(|(at, len, write)| Op::Wait(at, len, write)),
            (0_usize..8).prop_map(Op::Retry),
            (0_usize..8).prop_map(Op::GiveBack),
            (0_usize..8).prop_map(Op::Leave),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]
        #[test]
        fn no_byte_has_a_writer_and_another_and_everybody_is_served(ops in proptest::collection::vec(op(), 0..80)) {
            let mut ledger = Ledger::new();
            let mut lent: Vec<u64> = Vec::new();
            let mut waiting: Vec<Entry> = Vec::new();
            for op in ops {
                match op {
                    Op::Lend(at, len, write) => {
                        lent.extend(ledger.lend(at..at + len, if write { Use::Write } else { Use::Read }, None));
                    }
                    Op::Wait(at, len, write) => {
                        let by = if write { Use::Write } else { Use::Read };
                        let ticket = ledger.wait(at..at + len, by);
                        waiting.push(Entry { ticket, range: at..at + len, by });
                    }
                    Op::Retry(at) if at < waiting.len() => {
                        let Entry { ticket, range, by } = waiting[at].clone();
                        if let Some(new) = ledger.lend(range, by, Some(ticket)) {
                            lent.push(new);
                            ledger.leave(ticket);
                            waiting.remove(at);
                        }
                    }
                    Op::GiveBack(at) if at < lent.len() => ledger.give_back(lent.swap_remove(at)),
                    Op::Leave(at) if at < waiting.len() => ledger.leave(waiting.remove(at).ticket),
                    _ => {}
                }
                // Byte by byte, without the rule that the ledger uses.
                for byte in 0..18_usize {
                    let on = ledger.lent.iter().filter(|entry| entry.range.contains(&byte));
                    let (writers, all) = on.fold((0, 0), |(writers, all), entry| {
                        (writers + u32::from(entry.by == Use::Write), all + 1)
                    });
                    prop_assert!(writers == 0 || all == 1, "byte {}: {} writers of {}", byte, writers, all);
                }
            }
            // When all is given back, whoever waits gets it in the order in which they came.
            for ticket in lent {
                ledger.give_back(ticket);
            }
            for Entry { ticket, range, by } in waiting {
                let new = ledger.lend(range, by, Some(ticket));
                prop_assert!(new.is_some(), "nobody before it is left");
                ledger.leave(ticket);
                ledger.give_back(new.unwrap_or_default());
            }
            prop_assert!(ledger.lent.is_empty() && ledger.waiting.is_empty());
        }
    }
}
