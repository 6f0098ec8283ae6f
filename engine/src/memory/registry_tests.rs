//! Duplicates, rollback, aliases, and a plain model over random operations.

use proptest::prelude::*;

use super::{super::raw::testing::wrapped_twice, *};
use crate::budget::Used;

const LIMIT: usize = 64;

fn registry_of(engine: u64, ranges: u64, bytes: u64) -> Registry {
    let budget = Budget::new(("max_registrations", ranges), ("max_registered_bytes", bytes));
    Registry::new(engine, LIMIT, budget)
}

fn registry_with(ranges: u64, bytes: u64) -> Registry {
    registry_of(1, ranges, bytes)
}

fn registry() -> Registry {
    registry_with(1024, 1 << 30)
}

fn memory(length: usize) -> Arc<HostMemory> {
    Arc::new(HostMemory::new(vec![0; length].into()))
}

fn one(registry: &Registry, memory: &Arc<HostMemory>, offset: u64, length: u64) -> RegisteredMemory {
    let entry = [(Arc::clone(memory), offset, length)];
    registry.register(&entry, Permission::RemoteRead).expect("registers").remove(0)
}

/// All that a failure must leave as it was.
fn picture(registry: &Registry) -> (Vec<Descriptor>, Used, u64, Vec<(u64, u32)>) {
    let exports = registry.describe();
    let state = registry.lock();
    let references = state.active.iter().map(|(id, active)| (*id, active.references)).collect();
    (exports, registry.budget.used(), state.next_id, references)
}

#[test]
fn a_duplicate_shares_number_charge_and_first_permission() {
    let registry = registry();
    let memory = memory(100);
    let first = one(&registry, &memory, 10, 20);
    let again = registry.register(&[(Arc::clone(&memory), 10, 20)], Permission::RemoteReadWrite).expect("again");
    assert_eq!((again[0].id(), again[0].permission()), (first.id(), Permission::RemoteRead), "never upgraded");
    assert_eq!(registry.budget.used(), Used { count: 1, bytes: 20 });
    let clone = first.clone();
    assert_eq!(registry.unregister(&clone), Ok(false), "a clone is no registration of its own; two are left of two");
    assert!(registry.find(first.id()).is_some());
    assert_eq!(registry.unregister(&first), Ok(true));
    assert!(registry.find(first.id()).is_none());
    assert_eq!(registry.unregister(&first), Err(UnregisterError::NotRegistered { id: first.id() }));
    assert_eq!(registry.budget.used(), Used { count: 1, bytes: 20 }, "handles hold it");
    drop((first, again, clone));
    assert_eq!(registry.budget.used(), Used::default());
}

#[test]
fn numbers_grow_and_never_come_back() {
    let registry = registry();
    let memory = memory(8);
    let mut last = 0;
    for _ in 0..10 {
        let handle = one(&registry, &memory, 0, 8);
        assert!(handle.id() > last);
        last = handle.id();
        assert_eq!(registry.unregister(&handle), Ok(true));
    }
}

#[test]
fn duplicates_within_one_batch_are_one_number_with_references() {
    let registry = registry();
    let memory = memory(100);
    let entries = [(Arc::clone(&memory), 0, 10), (Arc::clone(&memory), 5, 10), (Arc::clone(&memory), 0, 10)];
    let handles = registry.register(&entries, Permission::RemoteWrite).expect("registers");
    let ids: Vec<u64> = handles.iter().map(RegisteredMemory::id).collect();
    assert_eq!(ids, [1, 2, 1]);
    assert_eq!(registry.budget.used(), Used { count: 2, bytes: 20 }, "overlapping ranges count each, duplicates once");
    assert_eq!(registry.unregister(&handles[0]), Ok(false));
    assert_eq!(registry.unregister(&handles[2]), Ok(true));
}

#[test]
fn every_kind_of_failure_leaves_everything_as_it_was() {
    let registry = registry_with(4, 100);
    let (held, other) = (memory(100), memory(100));
    let kept = one(&registry, &held, 0, 10);
    let before = picture(&registry);
    // Each begins with a duplicate and a new range, so that there is something to roll back.
    let with = |last: (Arc<HostMemory>, u64, u64)| [(Arc::clone(&held), 0, 10), (Arc::clone(&held), 20, 10), last];
    let refused = |entries: &[Entry]| {
        let error = registry.register(entries, Permission::RemoteReadWrite).expect_err("refused");
        assert_eq!(picture(&registry), before, "{error}");
        error
    };
    let range = |error| matches!(error, RegisterError::Range { index: 2, .. });
    assert!(range(refused(&with((Arc::clone(&held), 95, 6)))), "beyond the end");
    assert!(range(refused(&with((Arc::clone(&held), 100, 0)))), "empty");
    assert!(range(refused(&with((Arc::clone(&held), u64::MAX, 2)))), "wraps");
    let bytes = refused(&with((Arc::clone(&other), 0, 81)));
    assert!(matches!(bytes, RegisterError::Exhausted(Exhausted { budget: "max_registered_bytes", asked: 81, .. })));
    let many: Vec<Entry> = (0..4).map(|at| (Arc::clone(&held), 20 + at, 1)).collect();
    let count = refused(&many);
    assert!(matches!(count, RegisterError::Exhausted(Exhausted { budget: "max_registrations", used: 4, .. })));
    let long = vec![(Arc::clone(&held), 0, 10); LIMIT + 1];
    assert_eq!(refused(&long), RegisterError::TooMany { entries: LIMIT + 1, limit: LIMIT });

    registry.lock().next_id = u64::MAX;
    let before = picture(&registry);
    let ids = registry.register(&with((Arc::clone(&held), 40, 1)), Permission::RemoteRead);
    assert!(matches!(ids, Err(RegisterError::Spent { index: 1, what: "ids" })));
    registry.lock().active.get_mut(&kept.id()).expect("active").references = u32::MAX;
    let spent = registry.register(&[(Arc::clone(&held), 0, 10)], Permission::RemoteRead);
    assert!(matches!(spent, Err(RegisterError::Spent { index: 0, what: "references" })));
    registry.lock().active.get_mut(&kept.id()).expect("active").references = 1;
    assert_eq!(picture(&registry), before);
}

#[test]
fn two_wrappers_of_the_same_bytes_are_refused_while_one_is_held() {
    let [a, b] = wrapped_twice(vec![0; 64]);
    // Across engines as well: the index is the process's.
    let (first, second) = (registry(), registry());
    let held = one(&first, &a, 0, 32);
    let alias = second.register(&[(Arc::clone(&b), 31, 2)], Permission::RemoteRead).expect_err("one byte is shared");
    assert!(matches!(alias, RegisterError::Alias { index: 0, length: 2, other_length: 32, .. }), "{alias}");
    let beside = one(&second, &b, 32, 8);
    assert_eq!(first.unregister(&held), Ok(true));
    assert!(second.register(&[(Arc::clone(&b), 0, 1)], Permission::RemoteRead).is_err(), "retired, but still held");
    drop(held);
    drop(one(&second, &b, 0, 1));
    drop(beside);
    // Both at once, in one call.
    let both = first.register(&[(Arc::clone(&a), 40, 8), (Arc::clone(&b), 44, 8)], Permission::RemoteRead);
    assert!(matches!(both, Err(RegisterError::Alias { index: 1, .. })));
    let same = first.register(&[(Arc::clone(&a), 40, 8), (b, 40, 8)], Permission::RemoteRead);
    assert!(matches!(same, Err(RegisterError::Alias { index: 1, .. })));
    assert_eq!(first.budget.used(), Used::default());
}

#[test]
fn one_allocation_serves_two_engines_under_one_lock() {
    let memory = memory(16);
    let (first, second) = (registry(), registry());
    let (a, b) = (one(&first, &memory, 0, 16), one(&second, &memory, 4, 8));
    a.write(0, &[7; 16]).expect("in range");
    let mut seen = [0; 8];
    b.read(0, &mut seen).expect("in range");
    assert_eq!(seen, [7; 8]);
}

#[test]
fn a_handle_of_another_engine_is_refused() {
    let (first, second) = (registry_of(1, 10, 100), registry_of(2, 10, 100));
    let memory = memory(8);
    let (a, b) = (one(&first, &memory, 0, 8), one(&second, &memory, 0, 8));
    assert_eq!(a.id(), b.id(), "the same number in both");
    assert_eq!(first.unregister(&b), Err(UnregisterError::Foreign { id: b.id() }));
    assert_eq!(first.unregister(&a), Ok(true));
}

#[test]
fn a_closed_registry_takes_no_ranges_and_still_gives_up_old_ones() {
    let registry = registry();
    let memory = memory(8);
    assert_eq!(registry.register(&[], Permission::RemoteRead).map(|handles| handles.len()), Ok(0), "empty is fine");
    let handle = one(&registry, &memory, 0, 8);
    registry.close();
    assert_eq!(registry.register(&[], Permission::RemoteRead).map(drop), Err(RegisterError::SourceClosed));
    assert_eq!(registry.unregister(&handle), Ok(true));
}

#[test]
fn a_range_that_one_thread_registers_while_another_gives_it_up_is_never_lost() {
    let registry = registry();
    let memory = memory(8);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..2_000 {
                    let handle = one(&registry, &memory, 0, 8);
                    assert!(registry.find(handle.id()).is_some(), "registered means found");
                    registry.unregister(&handle).expect("this thread's own reference is there");
                }
            });
        }
    });
    assert_eq!(registry.describe(), []);
    assert_eq!(registry.budget.used(), Used::default());
}

#[derive(Clone, Debug)]
enum Op {
    Register(Vec<(usize, u64, u64)>, u8),
    Unregister(usize),
    Drop(usize),
    Resolve(usize, u64, u64),
}

fn op() -> impl Strategy<Value = Op> {
    let entry = (0_usize..2, 0_u64..20, 0_u64..12);
    prop_oneof![
        (proptest::collection::vec(entry, 0..4), 0_u8..4).prop_map(|(entries, bits)| Op::Register(entries, bits)),
        (0_usize..8).prop_map(Op::Unregister),
        (0_usize..8).prop_map(Op::Drop),
        (0_usize..2, 0_u64..24, 0_u64..12).prop_map(|(memory, at, length)| Op::Resolve(memory, at, length)),
    ]
}

/// One registered range of the model.
#[derive(Clone, Debug)]
struct Model {
    id: u64,
    memory: usize,
    at: u64,
    length: u64,
    permission: Permission,
    references: u32,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]
    #[test]
    fn it_does_what_a_plain_list_does(ops in proptest::collection::vec(op(), 0..60)) {
        let registry = registry_with(6, 60);
        let memories = [memory(24), memory(24)];
        let mut handles: Vec<RegisteredMemory> = Vec::new();
        // Every range that was ever registered, with 0 references once it is given up.
        let mut model: Vec<Model> = Vec::new();
        for op in ops {
            match op {
                Op::Register(entries, bits) => {
                    let permission = Permission::from_bits(bits).expect("two bits");
                    let mut next = model.clone();
                    let retained = |model: &Model, handles: &[RegisteredMemory]| {
                        model.references > 0 || handles.iter().any(|handle| handle.id() == model.id)
                    };
                    let mut used: Vec<u64> =
                        model.iter().filter(|range| retained(range, &handles)).map(|range| range.length).collect();
                    let mut sound = true;
                    let mut ids = Vec::new();
                    for (memory, at, length) in &entries {
                        sound &= *length > 0 && at + length <= 24;
                        let same = |range: &&mut Model| {
                            range.references > 0 && (range.memory, range.at, range.length) == (*memory, *at, *length)
                        };
                        if let Some(range) = next.iter_mut().find(same) {
                            range.references += 1;
                            ids.push(range.id);
                        } else {
                            let id = next.len() as u64 + 1;
                            let (memory, at, length) = (*memory, *at, *length);
                            next.push(Model { id, memory, at, length, permission, references: 1 });
                            used.push(length);
                            ids.push(id);
                        }
                    }
                    sound &= used.len() <= 6 && used.iter().sum::<u64>() <= 60;
                    let entries: Vec<Entry> =
                        entries.iter().map(|(memory, at, length)| (Arc::clone(&memories[*memory]), *at, *length)).collect();
                    let result = registry.register(&entries, permission);
                    prop_assert_eq!(result.is_ok(), sound, "{:?}", result);
                    if let Ok(new) = result {
                        prop_assert_eq!(new.iter().map(RegisteredMemory::id).collect::<Vec<_>>(), ids);
                        handles.extend(new);
                        model = next;
                    }
                }
                Op::Unregister(at) if at < handles.len() => {
                    let range = &mut model[usize::try_from(handles[at].id()).expect("small") - 1];
                    let expected = match range.references {
                        0 => Err(UnregisterError::NotRegistered { id: range.id }),
                        references => Ok(references == 1),
                    };
                    range.references = range.references.saturating_sub(1);
                    prop_assert_eq!(registry.unregister(&handles[at]), expected);
                }
                Op::Drop(at) if at < handles.len() => drop(handles.swap_remove(at)),
                Op::Unregister(_) | Op::Drop(_) => {}
                Op::Resolve(memory, at, length) => {
                    let base = memories[memory].address();
                    let mut active: Vec<&Model> = model.iter().filter(|range| range.references > 0).collect();
                    active.sort_by_key(|range| {
                        (memories[range.memory].address() + range.at, std::cmp::Reverse(range.length))
                    });
                    let hit = active.into_iter().find(|range| {
                        let start = memories[range.memory].address() + range.at;
                        start <= base + at && base + at + length <= start + range.length
                    });
                    let expected = hit.map(|range| (range.id, base + at - memories[range.memory].address() - range.at));
                    let found = registry.resolve(base + at, length).ok().map(|(range, offset)| (range.id, offset));
                    prop_assert_eq!(found, expected);
                }
            }
            let exported: Vec<(u64, Permission)> =
                registry.describe().iter().map(|region| (region.id, region.permission)).collect();
            let remote = model.iter().filter(|range| range.references > 0 && range.permission != Permission::LocalOnly);
            prop_assert_eq!(exported, remote.map(|range| (range.id, range.permission)).collect::<Vec<_>>());
            let held = model.iter().filter(|range| {
                range.references > 0 || handles.iter().any(|handle| handle.id() == range.id)
            });
            let (count, bytes) = held.fold((0, 0), |(count, bytes), range| (count + 1, bytes + range.length));
            prop_assert_eq!(registry.budget.used(), Used { count, bytes });
        }
    }
}
