use bytes::Bytes;
use proptest::prelude::*;

use super::*;

const TIMES: LeaseTimes = LeaseTimes { lasts: Duration::from_secs(30), grace: Duration::from_secs(5) };
const LIMITS: BookLimits = BookLimits { times: TIMES, rights_max: 3, leases_per_peer: 4, chunk_bytes: 1024 };
const A: InstanceId = InstanceId(1);
const B: InstanceId = InstanceId(2);

fn pinned(slice: u32) -> Body<u32> {
    Body::Pinned { slice, len: 2000 }
}

fn memory(len: usize) -> Body<u32> {
    Body::Memory { bytes: Bytes::from(vec![0; len]), why: PathReason::NotPinned }
}

struct Rig {
    book: Book<u32>,
    now: Instant,
}

impl Rig {
    fn new() -> Self {
        Self { book: Book::new(LIMITS), now: Instant::now() }
    }

    fn stage(&mut self, body: Body<u32>) -> SlotId {
        self.book.stage(self.now, body, 1, None, None).expect("open")
    }

    fn right(&mut self, slot: SlotId) -> LeaseId {
        match self.book.acquire(self.now, slot, A, 1024, Ok(())) {
            Ok(Acquired::MakeRight(lease)) => lease,
            other => panic!("{other:?}"),
        }
    }

    fn chunks(&mut self, slot: SlotId) -> (LeaseId, Chunks) {
        match self.book.acquire(self.now, slot, A, 1024, Err(PathReason::NoCapability)) {
            Ok(Acquired::Chunks(lease, chunks)) => (lease, chunks),
            other => panic!("{other:?}"),
        }
    }

    fn effects(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.book.poll_effect())
            .map(|effect| match effect {
                Effect::Revoke(lease) => format!("revoke {lease}"),
                Effect::Free { slot, fate, .. } => format!("free {slot} {}", fate.name()),
            })
            .collect()
    }
}

/// RT-3 and RT-6.
#[test]
fn metadata_takes_no_lease_and_the_last_release_ends_it() {
    let mut rig = Rig::new();
    let slot = rig.stage(memory(4096));
    let told = rig.book.metadata(slot, A).unwrap();
    assert_eq!(told, Metadata { total_bytes: 4096, refcount: 1, pinned: false });
    assert_eq!(rig.book.gauges().leases, 0);
    assert_eq!(rig.book.add_ref(slot, A), Ok(2));
    let (first, _) = rig.chunks(slot);
    rig.book.end(slot, first.get(), A, Ending::Release).unwrap();
    assert_eq!(rig.book.metadata(slot, A).unwrap().refcount, 1);
    let (second, _) = rig.chunks(slot);
    rig.book.end(slot, second.get(), A, Ending::Release).unwrap();
    assert_eq!(rig.book.metadata(slot, A), Err(RefusalCode::UnknownHandle));
    assert_eq!(rig.effects(), ["free 1 released"]);
    assert_eq!(rig.book.gauges(), BookGauges::default());
}

/// RT-22: what does not fit changes nothing.
#[test]
fn mismatched_repeated_and_foreign_leases_are_without_effect() {
    let mut rig = Rig::new();
    let (one, two) = (rig.stage(memory(10)), rig.stage(memory(10)));
    let (lease, _) = rig.chunks(one);
    let before = rig.book.gauges();
    for how in [Ending::Detach, Ending::Release] {
        assert_eq!(rig.book.end(two, lease.get(), A, how), Err(RefusalCode::UnknownLease), "of another slot");
        assert_eq!(rig.book.end(one, lease.get(), B, how), Err(RefusalCode::UnknownLease), "of another peer");
        for id in [0, 2, u64::MAX] {
            assert_eq!(rig.book.end(one, id, A, how), Err(RefusalCode::UnknownLease), "that never was");
        }
    }
    assert_eq!((rig.book.gauges(), rig.book.metadata(one, A).unwrap().refcount), (before, 1));
    assert_eq!(rig.book.end(one, lease.get(), A, Ending::Detach), Ok(()));
    assert_eq!(rig.book.end(one, lease.get(), A, Ending::Release), Err(RefusalCode::UnknownLease), "a second time");
    assert_eq!(rig.book.metadata(one, A).unwrap().refcount, 1);
    assert_eq!(rig.book.renew(rig.now, one, lease.get(), A), Err(RefusalCode::UnknownLease));
}

/// RT-8.
#[test]
fn chunks_are_served_to_their_consumer_and_no_further() {
    let mut rig = Rig::new();
    let slot = rig.stage(pinned(7));
    let (lease, chunks) = rig.chunks(slot);
    assert_eq!(chunks.count(), 2);
    let range = |rig: &Rig, peer, index| rig.book.pull(chunks.transfer, peer, index).map(|(_, range)| range);
    assert_eq!(range(&rig, A, 0), Ok(0..1024));
    assert_eq!(range(&rig, A, 1), Ok(1024..2000));
    assert_eq!(range(&rig, A, 0), Ok(0..1024), "again");
    assert_eq!(range(&rig, A, 2), Err(Refused { code: RefusalCode::IndexBeyondEnd, detail: 2 }));
    assert_eq!(range(&rig, A, u64::MAX), Err(Refused { code: RefusalCode::IndexBeyondEnd, detail: 2 }));
    assert_eq!(range(&rig, B, 0).unwrap_err().code, RefusalCode::UnknownTransfer);
    rig.book.end(slot, lease.get(), A, Ending::Detach).unwrap();
    assert_eq!(range(&rig, A, 0).unwrap_err().code, RefusalCode::UnknownTransfer);
}

/// revoke, then reuse.
#[test]
fn a_slice_is_free_only_after_its_right_is_gone() {
    let mut rig = Rig::new();
    let slot = rig.stage(pinned(7));
    let lease = rig.right(slot);
    assert_eq!(rig.book.on_granted(lease), Granted::Tell);
    rig.book.end(slot, lease.get(), A, Ending::Release).unwrap();
    assert_eq!(rig.effects(), ["revoke 1"]);
    let gauges = rig.book.gauges();
    assert_eq!((gauges.slots, gauges.quarantined_slots, gauges.quarantined_bytes, gauges.rights), (0, 1, 2000, 1));
    assert!(!rig.book.is_empty());
    rig.book.on_revoked(lease);
    rig.book.on_revoked(lease);
    assert_eq!(rig.effects(), ["free 1 released"]);
    assert_eq!(rig.book.gauges(), BookGauges::default());
    assert!(rig.book.is_empty());
}

/// what fails after the lock gives it back.
#[test]
fn a_right_that_is_not_made_turns_into_chunks_or_nothing() {
    let mut rig = Rig::new();
    let slot = rig.stage(pinned(7));
    let lease = rig.right(slot);
    let chunks = rig.book.on_grant_failed(lease).unwrap();
    assert_eq!((chunks.count(), chunks.reason, rig.book.gauges().rights), (2, PathReason::LeaseBudget, 0));
    assert!(rig.book.pull(chunks.transfer, A, 0).is_ok());
    // The consumer dies while the registration is made.
    let lease = rig.right(slot);
    assert_eq!(rig.book.end_leases_of(A), 2);
    assert_eq!(rig.book.on_grant_failed(lease), None);
    let late = rig.right(slot);
    rig.book.end_leases_of(A);
    assert_eq!(rig.book.on_granted(late), Granted::Ended);
    assert_eq!(rig.effects(), [format!("revoke {late}")]);
    rig.book.on_revoked(late);
    assert_eq!((rig.book.gauges().rights, rig.book.gauges().leases), (0, 0));
}

/// deadlines of leases and slots.
#[test]
fn the_reaper_ends_what_is_overdue_and_only_that() {
    let mut rig = Rig::new();
    let slot = rig.book.stage(rig.now, pinned(7), 1, Some(Duration::from_secs(10)), None).unwrap();
    let lease = rig.right(slot);
    rig.book.on_granted(lease);
    assert_eq!(rig.book.next_deadline(), Some(rig.now + Duration::from_secs(10)));
    assert_eq!(rig.book.on_time(rig.now + Duration::from_secs(9)), Reaped::default());
    assert_eq!(rig.book.on_time(rig.now + Duration::from_secs(10)), Reaped { leases: 0, slots: 1 });
    // No new lease, but the old one lives.
    let refused = rig.book.acquire(rig.now, slot, A, 1, Ok(())).unwrap_err();
    assert_eq!((refused.code, rig.effects().len()), (RefusalCode::Expired, 0));
    rig.book.renew(rig.now + Duration::from_secs(29), slot, lease.get(), A).unwrap();
    assert_eq!(rig.book.on_time(rig.now + Duration::from_secs(63)), Reaped::default());
    assert_eq!(rig.book.on_time(rig.now + Duration::from_secs(64)), Reaped { leases: 1, slots: 0 });
    assert_eq!(rig.effects(), ["revoke 1"]);
    rig.book.on_revoked(lease);
    assert_eq!(rig.effects(), ["free 1 expired"]);
    assert_eq!(rig.book.next_deadline(), None);
}

#[test]
fn budgets_hold_and_come_back() {
    let mut rig = Rig::new();
    let slot = rig.stage(pinned(7));
    let leases: Vec<LeaseId> = (0..3).map(|_| rig.right(slot)).collect();
    let Ok(Acquired::Chunks(_, chunks)) = rig.book.acquire(rig.now, slot, A, 9, Ok(())) else { panic!("no budget") };
    assert_eq!((chunks.reason, chunks.chunk_bytes), (PathReason::LeaseBudget, 9));
    let refused = rig.book.acquire(rig.now, slot, A, 9, Ok(())).unwrap_err();
    assert_eq!(refused, Refused { code: RefusalCode::TooMany, detail: 4 });
    assert!(rig.book.acquire(rig.now, slot, B, 9, Ok(())).is_ok(), "each peer has its own");
    rig.book.on_granted(leases[0]);
    rig.book.end(slot, leases[0].get(), A, Ending::Detach).unwrap();
    let Ok(Acquired::Chunks(..)) = rig.book.acquire(rig.now, slot, A, 9, Ok(())) else {
        panic!("a right that is being taken back still counts")
    };
    rig.book.on_revoked(leases[0]);
    rig.book.end_leases_of(B);
    assert!(matches!(rig.book.acquire(rig.now, slot, B, 9, Ok(())), Ok(Acquired::MakeRight(_))));
}

#[test]
fn what_is_for_one_peer_ends_with_it() {
    let mut rig = Rig::new();
    let mut bound = |ttl| rig.book.stage(rig.now, memory(5), 1, ttl, Some(A)).unwrap();
    let (one, two) = (bound(None), bound(Some(Duration::from_secs(300))));
    assert_eq!(rig.book.metadata(one, B), Err(RefusalCode::UnknownHandle));
    rig.book.end_slots_for(A, Some(rig.now + Duration::from_secs(30)));
    assert_eq!(rig.book.on_time(rig.now + Duration::from_secs(30)).slots, 2);
    assert_eq!(rig.effects(), ["free 1 expired", "free 2 expired"]);
    let three = rig.book.stage(rig.now, memory(5), 1, None, Some(A)).unwrap();
    rig.book.end_slots_for(B, None);
    assert!(rig.book.metadata(three, A).is_ok());
    rig.book.end_slots_for(A, None);
    assert_eq!(rig.effects(), ["free 3 peer_gone"]);
    assert!(rig.book.metadata(two, A).is_err());
}

#[test]
fn nothing_is_left_after_close() {
    let mut rig = Rig::new();
    let (one, two) = (rig.stage(pinned(1)), rig.stage(memory(5)));
    let lease = rig.right(one);
    rig.book.on_granted(lease);
    rig.chunks(two);
    rig.book.close();
    assert_eq!(rig.effects(), ["revoke 1", "free 2 shut_down"]);
    rig.book.on_revoked(lease);
    assert_eq!(rig.effects(), ["free 1 shut_down"]);
    assert!(rig.book.is_empty() && rig.book.next_deadline().is_none());
    assert!(rig.book.stage(rig.now, memory(5), 1, None, None).is_err());
}

/// What the world does to a book.
#[derive(Clone, Debug)]
enum Op {
    Stage { pinned: bool, refs: u32, ttl_s: Option<u64>, bound: bool },
    Acquire { slot: u64, peer: bool, read: bool },
    Granted { lease: u64, ok: bool },
    End { slot: u64, lease: u64, peer: bool, release: bool },
    Ref { slot: u64, peer: bool },
    DropRef { slot: u64, peer: bool },
    Renew { slot: u64, lease: u64, peer: bool },
    Revoked { lease: u64 },
    Pass { seconds: u64 },
    Gone { peer: bool, bound_too: bool },
}

fn ops() -> impl Strategy<Value = Op> {
    let (slot, lease) = (|| 1u64..6, || 1u64..12);
    prop_oneof![
        2 => (any::<bool>(), 0u32..3, proptest::option::of(1u64..90), any::<bool>())
            .prop_map(|(pinned, refs, ttl_s, bound)| Op::Stage { pinned, refs, ttl_s, bound }),
        4 => (slot(), any::<bool>(), any::<bool>()).prop_map(|(slot, peer, read)| Op::Acquire { slot, peer, read }),
        3 => (lease(), any::<bool>()).prop_map(|(lease, ok)| Op::Granted { lease, ok }),
        4 => (slot(), lease(), any::<bool>(), any::<bool>())
            .prop_map(|(slot, lease, peer, release)| Op::End { slot, lease, peer, release }),
        1 => (slot(), any::<bool>()).prop_map(|(slot, peer)| Op::Ref { slot, peer }),
        1 => (slot(), any::<bool>()).prop_map(|(slot, peer)| Op::DropRef { slot, peer }),
        2 => (slot(), lease(), any::<bool>()).prop_map(|(slot, lease, peer)| Op::Renew { slot, lease, peer }),
        3 => lease().prop_map(|lease| Op::Revoked { lease }),
        2 => (1u64..40).prop_map(|seconds| Op::Pass { seconds }),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(peer, bound_too)| Op::Gone { peer, bound_too }),
    ]
}

/// The same in plain words: nothing is counted, all is looked up.
#[derive(Default)]
struct Model {
    slots: BTreeMap<u64, ModelSlot>,
    leases: BTreeMap<u64, ModelLease>,
    next_slot: u64,
    next_lease: u64,
}

struct ModelSlot {
    pinned: bool,
    refs: u32,
    expires: Option<Instant>,
    bound: bool,
    freed: bool,
}

struct ModelLease {
    slot: u64,
    peer: InstanceId,
    /// While it lives: until when.
    until: Option<Instant>,
    right: Option<Right>,
}

#[derive(Clone, Copy, PartialEq)]
enum Right {
    Making,
    Made,
    Revoking,
}

impl Model {
    fn open(&self, slot: u64, peer: InstanceId) -> bool {
        self.slots.get(&slot).is_some_and(|slot| slot.refs > 0 && !slot.freed && (!slot.bound || peer == A))
    }

    fn live_of(&self, slot: u64) -> usize {
        self.leases.values().filter(|lease| lease.slot == slot && lease.until.is_some()).count()
    }

    fn rights_of(&self, slot: u64) -> usize {
        self.leases.values().filter(|lease| lease.slot == slot && lease.right.is_some()).count()
    }

    fn end_lease(&mut self, id: u64) {
        let lease = self.leases.get_mut(&id).expect("it is there");
        lease.until = None;
        if lease.right == Some(Right::Made) {
            lease.right = Some(Right::Revoking);
        }
    }

    fn is(&self, id: u64, slot: u64, peer: InstanceId) -> bool {
        self.leases.get(&id).is_some_and(|lease| lease.slot == slot && lease.peer == peer && lease.until.is_some())
    }

    /// Slots that are to be freed now.
    fn sweep(&mut self) -> Vec<u64> {
        let due: Vec<u64> = self
            .slots
            .iter()
            .filter(|(id, slot)| !slot.freed && slot.refs == 0 && self.live_of(**id) == 0 && self.rights_of(**id) == 0)
            .map(|(id, _)| *id)
            .collect();
        for id in &due {
            self.slots.get_mut(id).expect("it is there").freed = true;
        }
        due
    }

    fn gauges(&self) -> (usize, usize, usize, usize) {
        let named = |id: u64, slot: &ModelSlot| !slot.freed && (slot.refs > 0 || self.live_of(id) > 0);
        let slots = self.slots.iter().filter(|(id, slot)| named(**id, slot)).count();
        let held = self.slots.iter().filter(|(id, slot)| !slot.freed && !named(**id, slot)).count();
        let leases = self.leases.values().filter(|lease| lease.until.is_some()).count();
        let rights = self.leases.values().filter(|lease| lease.right.is_some()).count();
        (slots, held, leases, rights)
    }
}

fn id(slot: u64) -> SlotId {
    SlotId::new(slot).expect("from 1")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// RT-22, RT-26: the book agrees with the plain model after each step; a slice is freed exactly when the model says
    /// so, once, and never while a lease or a right is there.
    #[test]
    fn the_book_keeps_what_the_model_keeps(ops in proptest::collection::vec(ops(), 1..80)) {
        let mut book = Book::<u64>::new(LIMITS);
        let mut model = Model::default();
        let mut now = Instant::now();
        let who = |peer: bool| if peer { A } else { B };
        for op in ops {
            match op.clone() {
                Op::Stage { pinned, refs, ttl_s, bound } => {
                    let body = if pinned {
                        Body::Pinned { slice: model.next_slot + 1, len: 2000 }
                    } else {
                        Body::Memory { bytes: Bytes::from_static(b"abc"), why: PathReason::PoolFull }
                    };
                    let ttl = ttl_s.map(Duration::from_secs);
                    let staged = book.stage(now, body, refs, ttl, bound.then_some(A));
                    prop_assert_eq!(staged.is_ok(), refs > 0);
                    if refs > 0 {
                        model.next_slot += 1;
                        prop_assert_eq!(staged.ok().map(SlotId::get), Some(model.next_slot));
                        let slot = ModelSlot { pinned, refs, expires: ttl.map(|ttl| now + ttl), bound, freed: false };
                        model.slots.insert(model.next_slot, slot);
                    }
                }
                Op::Acquire { slot, peer, read } => {
                    let peer = who(peer);
                    let read = if read { Ok(()) } else { Err(PathReason::NoCapability) };
                    let acquired = book.acquire(now, id(slot), peer, 512, read);
                    let mine = model.leases.values().filter(|l| l.peer == peer && l.until.is_some()).count();
                    let may = model.open(slot, peer) && mine < LIMITS.leases_per_peer as usize;
                    prop_assert_eq!(acquired.is_ok(), may, "{:?}", acquired);
                    if may {
                        let rights = model.gauges().3;
                        let right = (model.slots[&slot].pinned && read.is_ok() && rights < LIMITS.rights_max).then_some(Right::Making);
                        prop_assert_eq!(matches!(acquired, Ok(Acquired::MakeRight(_))), right.is_some());
                        model.next_lease += 1;
                        let until = Some(now + TIMES.lasts + TIMES.grace);
                        model.leases.insert(model.next_lease, ModelLease { slot, peer, until, right });
                    }
                }
                Op::Granted { lease: raw, ok } => {
                    let lease = LeaseId::new(raw).expect("from 1");
                    let making = model.leases.get_mut(&raw).filter(|lease| lease.right == Some(Right::Making));
                    if ok {
                        let granted = book.on_granted(lease);
                        let tell = making.as_ref().is_some_and(|lease| lease.until.is_some());
                        prop_assert_eq!(granted == Granted::Tell, tell);
                        if let Some(lease) = making {
                            lease.right = Some(if tell { Right::Made } else { Right::Revoking });
                        }
                    } else {
                        let chunks = book.on_grant_failed(lease);
                        prop_assert_eq!(chunks.is_some(), making.as_ref().is_some_and(|lease| lease.until.is_some()));
                        if let Some(lease) = making {
                            lease.right = None;
                        }
                    }
                }
                Op::End { slot, lease, peer, release } => {
                    let how = if release { Ending::Release } else { Ending::Detach };
                    let ended = book.end(id(slot), lease, who(peer), how);
                    prop_assert_eq!(ended.is_ok(), model.is(lease, slot, who(peer)));
                    if ended.is_ok() {
                        let refs = &mut model.slots.get_mut(&slot).expect("leased").refs;
                        *refs = refs.saturating_sub(u32::from(release));
                        model.end_lease(lease);
                    }
                }
                Op::Ref { slot, peer } => {
                    let counted = book.add_ref(id(slot), who(peer));
                    prop_assert_eq!(counted.is_ok(), model.open(slot, who(peer)));
                    if let Ok(count) = counted {
                        model.slots.get_mut(&slot).expect("open").refs += 1;
                        prop_assert_eq!(count, model.slots[&slot].refs);
                    }
                }
                Op::DropRef { slot, peer } => {
                    let dropped = book.drop_ref(id(slot), who(peer), Fate::Refused);
                    prop_assert_eq!(dropped.is_ok(), model.open(slot, who(peer)));
                    if dropped.is_ok() {
                        model.slots.get_mut(&slot).expect("open").refs -= 1;
                    }
                }
                Op::Renew { slot, lease, peer } => {
                    let renewed = book.renew(now, id(slot), lease, who(peer));
                    let may = model.is(lease, slot, who(peer))
                        && model.leases[&lease].until.is_some_and(|until| now + TIMES.grace < until);
                    prop_assert_eq!(renewed.is_ok(), may);
                    if may {
                        model.leases.get_mut(&lease).expect("live").until = Some(now + TIMES.lasts + TIMES.grace);
                    }
                }
                Op::Revoked { lease } => {
                    book.on_revoked(LeaseId::new(lease).expect("from 1"));
                    if let Some(lease) = model.leases.get_mut(&lease).filter(|l| l.right == Some(Right::Revoking)) {
                        lease.right = None;
                    }
                }
                Op::Pass { seconds } => {
                    now += Duration::from_secs(seconds);
                    let reaped = book.on_time(now);
                    let over: Vec<u64> = model
                        .leases
                        .iter()
                        .filter(|(_, lease)| lease.until.is_some_and(|until| until <= now))
                        .map(|(id, _)| *id)
                        .collect();
                    prop_assert_eq!(reaped.leases, over.len() as u64);
                    for lease in over {
                        model.end_lease(lease);
                    }
                    for slot in model.slots.values_mut().filter(|slot| slot.expires.is_some_and(|at| at <= now)) {
                        slot.refs = 0;
                    }
                }
                Op::Gone { peer, bound_too } => {
                    let peer = who(peer);
                    let theirs: Vec<u64> = model
                        .leases
                        .iter()
                        .filter(|(_, lease)| lease.peer == peer && lease.until.is_some())
                        .map(|(id, _)| *id)
                        .collect();
                    prop_assert_eq!(book.end_leases_of(peer), theirs.len() as u64);
                    for lease in theirs {
                        model.end_lease(lease);
                    }
                    if bound_too {
                        book.end_slots_for(peer, None);
                        if peer == A {
                            model.slots.values_mut().filter(|slot| slot.bound).for_each(|slot| slot.refs = 0);
                        }
                    }
                }
            }
            let mut freed = Vec::new();
            while let Some(effect) = book.poll_effect() {
                match effect {
                    Effect::Free { slot, body, .. } => {
                        if let Body::Pinned { slice, .. } = body {
                            prop_assert_eq!(slice, slot.get(), "the slot's own slice");
                        }
                        freed.push(slot.get());
                    }
                    Effect::Revoke(lease) => {
                        prop_assert!(model.leases[&lease.get()].right == Some(Right::Revoking), "{lease} after {op:?}");
                    }
                }
            }
            freed.sort_unstable();
            prop_assert_eq!(freed, model.sweep(), "after {:?}", op);
            let gauges = book.gauges();
            let ours = (gauges.slots, gauges.quarantined_slots, gauges.leases, gauges.rights);
            prop_assert_eq!(ours, model.gauges(), "after {:?}", op);
            let next = model.leases.values().filter_map(|lease| lease.until).chain(
                model.slots.values().filter(|slot| slot.refs > 0 && !slot.freed).filter_map(|slot| slot.expires),
            ).min();
            prop_assert_eq!(book.next_deadline(), next);
        }
    }
}
