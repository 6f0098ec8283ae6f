//! Arenas with memory behind them: exclusive slices, given back when their last user drops them.
//!
//! What a pool of destinations adds to an arena (its registration) is `R`; a pool of sources adds nothing, for nothing
//! of it is registered but the slice of each lease.

use std::{
    collections::HashMap,
    fmt, io,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use verbs_transport::fabric::bulk::{Arena, MemoryOwner, OutOfBounds, Span};

use crate::proto::slice::{ArenaGauges, ArenaKey, ArenaLimits, Arenas, NoSlice, Slice};

/// Why a pool has no slice.
#[derive(Debug)]
pub(crate) enum PoolError {
    /// The ceilings are reached: go another way, now.
    Full,
    /// An arena could not be mapped or registered.
    Arena(io::Error),
}

/// Makes an arena useful: registers it, say.
type Prepare<R> = Box<dyn Fn(&Arc<Arena>) -> io::Result<R> + Send + Sync>;

/// A set of arenas. Cheap to share; slices hold it.
pub(crate) struct Pool<R> {
    state: Mutex<State<R>>,
    prepare: Prepare<R>,
}

struct State<R> {
    arenas: Arenas,
    memory: HashMap<ArenaKey, Arc<Backing<R>>>,
}

struct Backing<R> {
    /// Before the memory: an arena is deregistered, then unmapped.
    extra: R,
    arena: Arc<Arena>,
}

impl<R: Send + Sync + 'static> Pool<R> {
    pub(crate) fn new(
        limits: ArenaLimits,
        prepare: impl Fn(&Arc<Arena>) -> io::Result<R> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let state = State { arenas: Arenas::new(limits), memory: HashMap::new() };
        Arc::new(Self { state: Mutex::new(state), prepare: Box::new(prepare) })
    }

    fn lock(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slice of at least `bytes`. Blocks while an arena is mapped and touched.
    ///
    /// # Errors
    ///
    /// [`PoolError`].
    pub(crate) fn allocate(self: &Arc<Self>, now: Instant, bytes: u64) -> Result<PooledSlice<R>, PoolError> {
        loop {
            let arena_bytes = {
                let mut state = self.lock();
                match state.arenas.allocate(bytes) {
                    Ok(slice) => {
                        let backing = state.memory[&slice.arena()].clone();
                        return Ok(PooledSlice { slice: Some(slice), backing, pool: self.clone() });
                    }
                    Err(NoSlice::Ceiling) => return Err(PoolError::Full),
                    Err(NoSlice::Grow { arena_bytes }) => arena_bytes,
                }
            };
            // Without the lock: slices of other arenas come and go meanwhile.
            let made = self.make(arena_bytes);
            let mut state = self.lock();
            match made {
                Ok(backing) => {
                    let key = state.arenas.add(now, arena_bytes);
                    state.memory.insert(key, Arc::new(backing));
                }
                Err(error) => {
                    state.arenas.grow_failed(arena_bytes);
                    return Err(PoolError::Arena(error));
                }
            }
        }
    }

    /// The same without blocking: `None` where an arena would have to be made first.
    pub(crate) fn allocate_now(self: &Arc<Self>, bytes: u64) -> Option<PooledSlice<R>> {
        let mut state = self.lock();
        match state.arenas.allocate(bytes) {
            Ok(slice) => {
                let backing = state.memory[&slice.arena()].clone();
                Some(PooledSlice { slice: Some(slice), backing, pool: self.clone() })
            }
            Err(NoSlice::Ceiling) => None,
            Err(NoSlice::Grow { arena_bytes }) => {
                state.arenas.grow_failed(arena_bytes);
                None
            }
        }
    }

    fn make(&self, bytes: u64) -> io::Result<Backing<R>> {
        let len = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let arena = Arena::new(len)?;
        tracing::debug!(bytes, pages = %arena.page_kind(), "a new arena");
        let extra = (self.prepare)(&arena)?;
        Ok(Backing { extra, arena })
    }

    /// Gives back arenas that have been empty for long; how many.
    pub(crate) fn release_idle(&self, now: Instant) -> usize {
        let gone: Vec<Arc<Backing<R>>> = {
            let mut state = self.lock();
            let keys = state.arenas.release_idle(now);
            keys.iter().filter_map(|key| state.memory.remove(key)).collect()
        };
        // Unmapped here, without the lock.
        gone.len()
    }

    /// Whether [`Pool::release_idle`] will have something to do some day.
    pub(crate) fn has_idle(&self) -> bool {
        self.lock().arenas.next_idle().is_some()
    }

    pub(crate) fn gauges(&self) -> ArenaGauges {
        self.lock().arenas.gauges()
    }

    fn give_back(&self, slice: Slice) {
        let now = tokio::time::Instant::now().into_std();
        self.lock().arenas.free(now, slice);
    }
}

/// Exclusive bytes of an arena, at an address that no one else has while this lives. They are not zeroed: write before
/// you let read.
pub(crate) struct PooledSlice<R: Send + Sync + 'static> {
    /// Gone only in `drop`.
    slice: Option<Slice>,
    backing: Arc<Backing<R>>,
    pool: Arc<Pool<R>>,
}

impl<R: Send + Sync + 'static> PooledSlice<R> {
    fn slice(&self) -> &Slice {
        self.slice.as_ref().expect("kept until the drop")
    }

    /// What was made of its arena, and where in it the slice lies.
    pub(crate) fn extra(&self) -> &R {
        &self.backing.extra
    }

    /// The arena.
    pub(crate) fn owner(&self) -> Arc<dyn MemoryOwner> {
        self.backing.arena.clone()
    }

    /// The first `len` of its bytes, from the arena's start.
    pub(crate) fn range(&self, len: usize) -> Range<usize> {
        let offset = usize::try_from(self.slice().offset()).expect("within the arena, which is in memory");
        offset..offset + len
    }

    /// Copies bytes in, from the slice's start on.
    ///
    /// # Errors
    ///
    /// They are more than it holds.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.write_at(0, bytes)
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    ///
    /// They reach beyond the slice.
    pub(crate) fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.span(offset, bytes.len())?.write(0, bytes)
    }

    /// Copies bytes out.
    ///
    /// # Errors
    ///
    /// They reach beyond the slice.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), OutOfBounds> {
        if out.is_empty() {
            return Ok(());
        }
        self.span(offset, out.len())?.read(0, out)
    }

    fn span(&self, offset: usize, bytes: usize) -> Result<Span, OutOfBounds> {
        let len = usize::try_from(self.slice().len()).unwrap_or(usize::MAX);
        let beyond = OutOfBounds { offset, bytes, len };
        if offset.checked_add(bytes).is_none_or(|end| end > len) {
            return Err(beyond);
        }
        let start = self.range(0).start + offset;
        Span::new(self.owner(), &(start..start + bytes)).ok_or(beyond)
    }
}

impl<R: Send + Sync + 'static> Drop for PooledSlice<R> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice.take() {
            self.pool.give_back(slice);
        }
    }
}

impl<R: Send + Sync + 'static> fmt::Debug for PooledSlice<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.slice, f)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, time::Duration};

    use super::*;

    const LIMITS: ArenaLimits =
        ArenaLimits { arena_bytes: 64 << 10, bytes_max: 128 << 10, arenas_max: 8, idle: Duration::from_secs(60) };

    #[test]
    fn a_full_pool_says_so_and_has_room_again_when_slices_come_back() {
        let pool = Pool::new(LIMITS, |_| Ok(()));
        let now = Instant::now();
        assert!(pool.allocate_now(1).is_none(), "no arena yet");
        let (one, two) = (pool.allocate(now, 64 << 10).unwrap(), pool.allocate(now, 64 << 10).unwrap());
        assert!(matches!(pool.allocate(now, 1), Err(PoolError::Full)));
        drop(one);
        let again = pool.allocate_now(40_000).unwrap();
        assert_eq!(pool.gauges(), ArenaGauges { arenas: 2, bytes: 128 << 10, used: 128 << 10 });
        drop((two, again));
        assert_eq!((pool.gauges().used, pool.has_idle()), (0, true));
        assert_eq!(pool.release_idle(Instant::now() + Duration::from_secs(61)), 1);
        assert_eq!(pool.gauges().arenas, 1);
    }

    #[test]
    fn bytes_beyond_a_slice_are_out_of_reach() {
        let pool = Pool::new(LIMITS, |_| Ok(()));
        let slice = pool.allocate(Instant::now(), 4096).unwrap();
        slice.write(&[7; 4096]).unwrap();
        assert!(slice.write(&[7; 4097]).is_err());
        let mut out = [0; 2];
        slice.read(4094, &mut out).unwrap();
        assert_eq!(out, [7, 7]);
        assert!(slice.read(4095, &mut out).is_err() && slice.read(usize::MAX, &mut out).is_err());
        assert!(slice.read(9999, &mut []).is_ok(), "no bytes");
    }

    #[test]
    fn an_arena_that_cannot_be_made_is_no_lasting_harm() {
        let broken = std::sync::atomic::AtomicBool::new(true);
        let pool = Pool::new(LIMITS, move |_| {
            let broken = broken.swap(false, std::sync::atomic::Ordering::Relaxed);
            if broken { Err(io::Error::from(io::ErrorKind::OutOfMemory)) } else { Ok(()) }
        });
        assert!(matches!(pool.allocate(Instant::now(), 1), Err(PoolError::Arena(_))));
        assert!(pool.allocate(Instant::now(), 1).is_ok());
    }

    /// R-76 under concurrency: each thread sees only its own bytes.
    #[test]
    fn threads_never_share_a_slice() {
        let pool = Pool::new(LIMITS, |_| Ok(()));
        let start = Barrier::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let (pool, start) = (pool.clone(), &start);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(thread.into());
                    start.wait();
                    for _ in 0..2_000 {
                        let len = rng.usize(1..20_000);
                        let Ok(slice) = pool.allocate(Instant::now(), len as u64) else { continue };
                        slice.write(&vec![thread; len]).unwrap();
                        let mut out = vec![0xff; len];
                        slice.read(0, &mut out).unwrap();
                        assert!(out.iter().all(|byte| *byte == thread), "foreign bytes");
                    }
                });
            }
        });
        assert_eq!(pool.gauges().used, 0);
    }
}
