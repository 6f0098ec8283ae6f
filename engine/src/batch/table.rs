//! Numbers for batches that are never mistaken for each other.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Which batch. A number that was given up is refused from then on, and never names another batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BatchId {
    slot: u32,
    generation: u32,
}

/// Why a batch does not do what is asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// It was freed or detached, or never was.
    #[error("batch {id} was freed or detached")]
    Stale {
        /// What was given.
        id: BatchId,
    },
    /// Tasks are pending, or local memory is still held. Nothing was changed; ask again later.
    #[error("batch {id} is busy: {pending} tasks pending, locally drained: {drained}")]
    Busy {
        /// Which.
        id: BatchId,
        /// Tasks that are not final.
        pending: usize,
        /// Whether its local memory was let go.
        drained: bool,
    },
    /// The batch has no room for so many tasks. None was added.
    #[error("batch {id} has room for {capacity} tasks and holds {taken}; {asked} more do not fit")]
    Full {
        /// Which.
        id: BatchId,
        /// Its capacity.
        capacity: usize,
        /// Tasks it has.
        taken: usize,
        /// How many were to be added.
        asked: usize,
    },
    /// There is no task of this number.
    #[error("batch {id} has no task {task}")]
    NoSuchTask {
        /// Which batch.
        id: BatchId,
        /// Which task.
        task: usize,
    },
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

impl fmt::Debug for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BatchId({self})")
    }
}

/// Slots, used again under a new generation.
pub(crate) struct BatchTable<T> {
    slots: Mutex<Slots<T>>,
}

struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

struct Slot<T> {
    generation: u32,
    batch: Option<Arc<T>>,
}

impl<T> BatchTable<T> {
    pub(crate) fn new() -> Self {
        Self { slots: Mutex::new(Slots { slots: Vec::new(), free: Vec::new() }) }
    }

    /// Puts in what `make` makes of its number.
    pub(crate) fn insert(&self, make: impl FnOnce(BatchId) -> T) -> Arc<T> {
        let mut slots = self.lock();
        let slot = slots.free.pop().unwrap_or_else(|| {
            slots.slots.push(Slot { generation: 1, batch: None });
            u32::try_from(slots.slots.len() - 1).expect("the budget of batches is far below")
        });
        let place = &mut slots.slots[slot as usize];
        let batch = Arc::new(make(BatchId { slot, generation: place.generation }));
        place.batch = Some(Arc::clone(&batch));
        batch
    }

    pub(crate) fn find(&self, id: BatchId) -> Result<Arc<T>, BatchError> {
        let slots = self.lock();
        let slot = slots.slots.get(id.slot as usize).filter(|slot| slot.generation == id.generation);
        slot.and_then(|slot| slot.batch.clone()).ok_or(BatchError::Stale { id })
    }

    /// Gives up the number, if `may` allows it.
    pub(crate) fn remove(
        &self,
        id: BatchId,
        may: impl FnOnce(&T) -> Result<(), BatchError>,
    ) -> Result<Arc<T>, BatchError> {
        let mut slots = self.lock();
        let place = slots.slots.get_mut(id.slot as usize).filter(|slot| slot.generation == id.generation);
        let (place, batch) =
            place.and_then(|slot| slot.batch.clone().map(|batch| (slot, batch))).ok_or(BatchError::Stale { id })?;
        may(&batch)?;
        place.batch = None;
        // A slot whose generations are used up is not used again.
        if let Some(next) = place.generation.checked_add(1) {
            place.generation = next;
            slots.free.push(id.slot);
        }
        Ok(batch)
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.lock().slots.iter().filter_map(|slot| slot.batch.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Slots<T>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_given_up_never_names_another() {
        let table = BatchTable::new();
        let first = table.insert(|id| id);
        assert_eq!(table.find(*first).as_deref(), Ok(&*first));
        let busy = BatchError::Busy { id: *first, pending: 1, drained: true };
        assert_eq!(table.remove(*first, |_| Err(busy.clone())), Err(busy));
        table.remove(*first, |_| Ok(())).expect("now");
        let second = table.insert(|id| id);
        assert_eq!((second.slot, second.generation), (first.slot, first.generation + 1));
        let stale = Err(BatchError::Stale { id: *first });
        assert_eq!((table.find(*first), table.remove(*first, |_| Ok(()))), (stale.clone(), stale));
        assert_eq!(table.all(), [second]);
    }

    #[test]
    fn a_slot_whose_generations_are_used_up_retires() {
        let table = BatchTable::new();
        drop(table.insert(|id| id));
        let last = BatchId { slot: 0, generation: u32::MAX };
        table.lock().slots[0].generation = u32::MAX;
        table.remove(last, |_| Ok(())).expect("it is there");
        assert_eq!(table.insert(|id| id).slot, 1);
        assert_eq!(table.find(last), Err(BatchError::Stale { id: last }));
    }
}
