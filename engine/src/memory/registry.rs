//! The ranges of one engine: which are active, how often each was registered, what peers are told.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::{
    address::{AddressIndex, Span},
    alias::{self, Claimed},
    host::HostMemory,
    permission::Permission,
    registration::{RegisteredMemory, Registration},
};
use crate::{
    budget::{Budget, Exhausted},
    control::Descriptor,
};

/// Why ranges were not registered. References, ids, budgets and what peers see are as before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// An entry lies outside its allocation, or is empty.
    #[error("entry {index}: {length} bytes from offset {offset} are no part of an allocation of {allocation} bytes")]
    Range {
        /// Which entry.
        index: usize,
        /// Its offset.
        offset: u64,
        /// Its length; 0 is no range.
        length: u64,
        /// What the allocation has.
        allocation: u64,
    },
    /// More entries than one call takes: split the call.
    #[error("{entries} entries, but max_batch_requests is {limit}")]
    TooMany {
        /// How many there were.
        entries: usize,
        /// How many one call takes.
        limit: usize,
    },
    /// The budget for retained ranges is spent. Unregister, and drop handles.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// Another allocation object covers some of these addresses and is registered, or still held. Register ranges of
    /// that one, so that both use one lock.
    #[error(
        "entry {index}: {start:#x} + {length} bytes overlap {other_length} bytes at {other_start:#x} that are \
         registered through another HostMemory"
    )]
    Alias {
        /// Which entry.
        index: usize,
        /// Its first address.
        start: u64,
        /// Its length.
        length: u64,
        /// The other's first address.
        other_start: u64,
        /// The other's length.
        other_length: u64,
    },
    /// Ids or references of a range do not count any further.
    #[error("entry {index}: no more {what} can be given out")]
    Spent {
        /// Which entry.
        index: usize,
        /// "ids" or "references".
        what: &'static str,
    },
    /// [`close_source`](crate::Engine::close_source) was called, or the engine ends.
    #[error("the source is closed")]
    SourceClosed,
}

/// Why a range was not unregistered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnregisterError {
    /// The handle comes from another engine.
    #[error("region {id} belongs to another engine")]
    Foreign {
        /// Its number there.
        id: u64,
    },
    /// Each registration of it was given up already.
    #[error("region {id} is not registered any more")]
    NotRegistered {
        /// Its number.
        id: u64,
    },
}

/// No single range contains the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no single registered range contains {length} bytes at {address:#x}")]
pub struct ResolveError {
    /// The first address.
    pub address: u64,
    /// How many bytes.
    pub length: u64,
}

/// Where an address lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolvedAddress {
    /// The number of the range.
    pub registration: u64,
    /// Bytes from its start.
    pub offset: u64,
}

/// One call's entry: allocation, offset, length.
pub(crate) type Entry = (Arc<HostMemory>, u64, u64);

/// The ranges of one engine.
pub(crate) struct Registry {
    engine: u64,
    max_entries: usize,
    budget: Arc<Budget>,
    /// Ranges that direct operations are at.
    direct: Arc<AtomicU64>,
    state: Mutex<State>,
}

struct State {
    open: bool,
    next_id: u64,
    active: BTreeMap<u64, Active>,
    by_span: HashMap<Span, u64>,
    /// Rebuilt on each change.
    index: AddressIndex,
}

struct Active {
    registration: Arc<Registration>,
    references: u32,
}

impl Registry {
    pub(crate) fn new(engine: u64, max_entries: usize, budget: Arc<Budget>) -> Self {
        let state = State {
            open: true,
            next_id: 1,
            active: BTreeMap::new(),
            by_span: HashMap::new(),
            index: AddressIndex::default(),
        };
        Self { engine, max_entries, budget, direct: Arc::default(), state: Mutex::new(state) }
    }

    /// Registers all entries or none; one handle for each.
    pub(crate) fn register(
        &self,
        entries: &[Entry],
        permission: Permission,
    ) -> Result<Vec<RegisteredMemory>, RegisterError> {
        let mut state = self.lock();
        if !state.open {
            return Err(RegisterError::SourceClosed);
        }
        if entries.len() > self.max_entries {
            return Err(RegisterError::TooMany { entries: entries.len(), limit: self.max_entries });
        }
        // First all checks, on the side. Until they are through, nothing that others see has changed; what was built
        // goes with `planned`, and runs no destructor of the caller's, who holds each allocation himself.
        let mut planned: Vec<Arc<Registration>> = Vec::new();
        let mut planned_by_span: HashMap<Span, usize> = HashMap::new();
        let mut added: BTreeMap<u64, u32> = BTreeMap::new();
        let mut result = Vec::with_capacity(entries.len());
        for (index, (memory, offset, length)) in entries.iter().enumerate() {
            let span = check_range(index, memory, *offset, *length)?;
            let found = state.by_span.get(&span).map(|id| &state.active[id].registration);
            let found = found.or_else(|| planned_by_span.get(&span).map(|at| &planned[*at]));
            let registration = match found {
                Some(registration) if Arc::ptr_eq(&registration.memory, memory) => Arc::clone(registration),
                Some(_) => return Err(alias_error(index, span, span)),
                None => {
                    let id = state.next_id.checked_add(planned.len() as u64).filter(|id| *id < u64::MAX);
                    let id = id.ok_or(RegisterError::Spent { index, what: "ids" })?;
                    let charge = self.budget.take(1, *length)?;
                    let claim = alias::claim(span, Arc::as_ptr(memory).addr())
                        .map_err(|Claimed { by }| alias_error(index, span, by))?;
                    let start = usize::try_from(*offset).expect("checked: within an allocation");
                    let within = start..start + usize::try_from(*length).expect("checked: within an allocation");
                    let memory = Arc::clone(memory);
                    let direct = Arc::clone(&self.direct);
                    let new =
                        Registration { id, span, permission, within, _claim: claim, memory, _charge: charge, direct };
                    planned_by_span.insert(span, planned.len());
                    planned.push(Arc::new(new));
                    Arc::clone(&planned[planned.len() - 1])
                }
            };
            let before = state.active.get(&registration.id).map_or(0, |active| active.references);
            let more = added.entry(registration.id).or_insert(0);
            *more = more
                .checked_add(1)
                .filter(|more| before.checked_add(*more).is_some())
                .ok_or(RegisterError::Spent { index, what: "references" })?;
            result.push(RegisteredMemory { registration, engine: self.engine });
        }
        // From here on nothing can fail.
        state.next_id += planned.len() as u64;
        let changed = !planned.is_empty();
        for registration in planned {
            state.by_span.insert(registration.span, registration.id);
            state.active.insert(registration.id, Active { registration, references: 0 });
        }
        for (id, more) in added {
            state.active.get_mut(&id).expect("active, or just planned").references += more;
        }
        if changed {
            state.publish();
        }
        Ok(result)
    }

    /// Gives up one registration; `true` if it was the last, and peers do not see the range any more.
    pub(crate) fn unregister(&self, handle: &RegisteredMemory) -> Result<bool, UnregisterError> {
        let id = handle.id();
        if handle.engine != self.engine {
            return Err(UnregisterError::Foreign { id });
        }
        let mut state = self.lock();
        let active = state.active.get_mut(&id).ok_or(UnregisterError::NotRegistered { id })?;
        active.references -= 1;
        if active.references > 0 {
            return Ok(false);
        }
        state.by_span.remove(&handle.registration.span);
        let gone = state.active.remove(&id);
        state.publish();
        drop(state);
        // The handle keeps the memory, so no destructor of the caller's runs here either.
        drop(gone);
        Ok(true)
    }

    /// The active range with this number.
    pub(crate) fn find(&self, id: u64) -> Option<Arc<Registration>> {
        self.lock().active.get(&id).map(|active| Arc::clone(&active.registration))
    }

    /// The active range that contains all of the request, and the offset in it.
    pub(crate) fn resolve(&self, address: u64, length: u64) -> Result<(Arc<Registration>, u64), ResolveError> {
        let state = self.lock();
        let (id, offset) = state.index.resolve(address, length).ok_or(ResolveError { address, length })?;
        Ok((Arc::clone(&state.active[&id].registration), offset))
    }

    /// What peers are told: ascending ids, without ranges that are local only.
    pub(crate) fn describe(&self) -> Vec<Descriptor> {
        let state = self.lock();
        let remote = state.active.values().filter(|active| active.registration.permission != Permission::LocalOnly);
        remote.map(|Active { registration, .. }| Descriptor::of(registration)).collect()
    }

    /// Ranges that direct operations are at, as source and as requester.
    pub(crate) fn direct_ranges(&self) -> u64 {
        self.direct.load(Relaxed)
    }

    /// Refuses registrations from now on.
    pub(crate) fn close(&self) {
        self.lock().open = false;
    }

    /// The engine ends: whatever is registered is given up, however often it was.
    pub(crate) fn clear(&self) {
        let mut state = self.lock();
        state.open = false;
        state.by_span.clear();
        let gone = std::mem::take(&mut state.active);
        state.publish();
        drop(state);
        // Not under the lock: this may run destructors of the caller's.
        drop(gone);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn publish(&mut self) {
        let spans = self.active.values().map(|active| (active.registration.span, active.registration.id));
        self.index = AddressIndex::new(spans.collect());
    }
}

fn check_range(index: usize, memory: &HostMemory, offset: u64, length: u64) -> Result<Span, RegisterError> {
    let allocation = memory.len();
    let within = offset.checked_add(length).is_some_and(|end| end <= allocation);
    let span = memory.address().checked_add(offset).and_then(|start| Span::new(start, length));
    span.filter(|_| within).ok_or(RegisterError::Range { index, offset, length, allocation })
}

fn alias_error(index: usize, span: Span, by: Span) -> RegisterError {
    RegisterError::Alias {
        index,
        start: span.start,
        length: span.length,
        other_start: by.start,
        other_length: by.length,
    }
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
