//! How an absolute address finds the range that contains it.

/// An interval of addresses that neither is empty nor wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) length: u64,
}

impl Span {
    /// `None` if it is empty or its end does not fit in 64 bits.
    pub(crate) fn new(start: u64, length: u64) -> Option<Self> {
        (length > 0 && start.checked_add(length).is_some()).then_some(Self { start, length })
    }

    pub(crate) fn end(self) -> u64 {
        self.start + self.length
    }
}

/// Ranges in the order in which they are tried: ascending address, then descending length. Built once, never changed.
#[derive(Clone, Debug, Default)]
pub(crate) struct AddressIndex {
    entries: Vec<(Span, u64)>,
    /// The largest end of this and all entries before it.
    reach: Vec<u64>,
}

impl AddressIndex {
    /// From spans and their ids, in any order.
    pub(crate) fn new(mut entries: Vec<(Span, u64)>) -> Self {
        entries.sort_unstable_by_key(|(span, id)| (span.start, u64::MAX - span.length, *id));
        let reach = entries.iter().scan(0, |most, (span, _)| {
            *most = span.end().max(*most);
            Some(*most)
        });
        Self { reach: reach.collect(), entries }
    }

    /// The id of the first range, in trial order, that contains all of the request, and the offset in it. A request of
    /// no bytes needs a range that contains its address or ends there.
    pub(crate) fn resolve(&self, address: u64, length: u64) -> Option<(u64, u64)> {
        let end = address.checked_add(length)?;
        // `reach` first gets to `end` at an entry that itself ends there or later. All before it end too early; if it
        // starts after the address, so do all behind it.
        let first = self.reach.partition_point(|reach| *reach < end);
        let (span, id) = self.entries.get(first)?;
        Some((*id, address.checked_sub(span.start)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The rule, word for word.
    fn model(entries: &[(Span, u64)], address: u64, length: u64) -> Option<(u64, u64)> {
        let end = address.checked_add(length)?;
        let mut sorted = entries.to_vec();
        sorted.sort_by_key(|(span, id)| (span.start, std::cmp::Reverse(span.length), *id));
        let hit = sorted.into_iter().find(|(span, _)| span.start <= address && span.end() >= end)?;
        Some((hit.1, address - hit.0.start))
    }

    #[test]
    fn the_earlier_then_the_longer_range_wins() {
        let span = |start, length| Span::new(start, length).expect("sound");
        let index = AddressIndex::new(vec![(span(20, 10), 3), (span(10, 20), 1), (span(10, 30), 2), (span(40, 5), 4)]);
        assert_eq!(index.resolve(10, 20), Some((2, 0)));
        assert_eq!(index.resolve(25, 5), Some((2, 15)));
        assert_eq!(index.resolve(10, 31), None, "no joining of neighbours");
        assert_eq!(index.resolve(40, 5), Some((4, 0)));
        assert_eq!(index.resolve(9, 2), None);
        assert_eq!(index.resolve(44, 2), None);
        assert_eq!(index.resolve(u64::MAX, 2), None);
    }

    #[test]
    fn empty_and_wrapping_spans_do_not_exist() {
        assert_eq!(Span::new(5, 0), None);
        assert_eq!(Span::new(u64::MAX, 1), None);
        assert_eq!(Span::new(u64::MAX - 1, 1).map(Span::end), Some(u64::MAX));
    }

    proptest! {
        #[test]
        fn it_finds_what_the_rule_says(
            ranges in proptest::collection::vec((0_u64..40, 1_u64..20), 0..12),
            requests in proptest::collection::vec((0_u64..64, 0_u64..24), 1..40),
        ) {
            let entries: Vec<_> = ranges.iter().zip(1..).map(|((start, length), id)| {
                (Span::new(*start, *length).expect("sound"), id)
            }).collect();
            let index = AddressIndex::new(entries.clone());
            for (address, length) in requests {
                prop_assert_eq!(index.resolve(address, length), model(&entries, address, length));
            }
        }
    }
}
