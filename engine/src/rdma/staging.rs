//! Memory between the device and registered ranges: arenas that are kept for the next payload.
//!
//! The requester's are registered once, for its own device alone. The source's are not: each grant registers exactly the
//! bytes that it gives a right to, and that registration ends with it.
//!
//! What lies in an arena is left over from its last user. A source must not commit that when a peer leaves bytes of its
//! WRITE unwritten, so arenas remember whose they were, and whoever gets one of somebody else's is told.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use verbs_transport::fabric::bulk::{Arena, RegisterRegionError};

use super::identity::Incarnation;

/// The smallest arena, in bytes. Sizes are powers of two, so that few sizes serve all.
const LEAST_BYTES: usize = 64 << 10;

/// What is kept, up to a number of bytes.
pub(crate) struct Pool<T> {
    keep_bytes: u64,
    kept: Mutex<Kept<T>>,
}

struct Kept<T> {
    bytes: u64,
    items: Vec<Idle<T>>,
}

struct Idle<T> {
    bytes: usize,
    /// Who had it last.
    user: Incarnation,
    item: T,
}

/// No staging memory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StageError {
    #[error("no memory to stage the payload: {0}")]
    Memory(#[from] io::Error),
    #[error(transparent)]
    Register(RegisterRegionError),
}

/// One arena, or region, of at least as many bytes as were asked for. What is in it is left over from others and never
/// leaves unwritten.
pub(crate) struct Lent<T> {
    pool: Arc<Pool<T>>,
    bytes: usize,
    user: Incarnation,
    foreign: bool,
    /// Always there until `Drop` takes it.
    item: Option<T>,
}

impl<T> Pool<T> {
    pub(crate) fn new(keep_bytes: u64) -> Arc<Self> {
        Arc::new(Self { keep_bytes, kept: Mutex::new(Kept { bytes: 0, items: Vec::new() }) })
    }

    /// A kept one, or a new one that `make` makes of an arena.
    pub(crate) fn take(
        self: &Arc<Self>,
        bytes: usize,
        user: Incarnation,
        make: impl FnOnce(Arc<Arena>) -> Result<T, StageError>,
    ) -> Result<Lent<T>, StageError> {
        let bytes = bytes.max(LEAST_BYTES).checked_next_power_of_two().ok_or(io::ErrorKind::OutOfMemory);
        let bytes = bytes.map_err(io::Error::from)?;
        let found = {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let fitting = kept.items.iter().enumerate().filter(|(_, item)| item.bytes >= bytes);
            // One's own before the smallest.
            let at = fitting.min_by_key(|(_, item)| (item.user != user, item.bytes)).map(|(at, _)| at);
            let found = at.map(|at| kept.items.swap_remove(at));
            kept.bytes -= found.as_ref().map_or(0, |item| item.bytes as u64);
            found
        };
        let pool = Arc::clone(self);
        Ok(match found {
            Some(Idle { bytes, user: before, item }) => {
                Lent { pool, bytes, user, foreign: before != user, item: Some(item) }
            }
            // New ones are zeroed.
            None => Lent { pool, bytes, user, foreign: false, item: Some(make(Arena::new(bytes)?)?) },
        })
    }

    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }

    /// Lets everything go that is kept.
    pub(crate) fn clear(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let items = std::mem::take(&mut kept.items);
        kept.bytes = 0;
        drop(kept);
        drop(items);
    }
}

impl<T> Lent<T> {
    /// Whether somebody else's bytes may lie in it.
    pub(crate) fn is_foreign(&self) -> bool {
        self.foreign
    }
}

impl<T> std::ops::Deref for Lent<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.item.as_ref().expect("only drop takes it")
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        let Some(item) = self.item.take() else { return };
        let mut kept = self.pool.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = kept.bytes + self.bytes as u64;
        if bytes <= self.pool.keep_bytes {
            kept.bytes = bytes;
            kept.items.push(Idle { bytes: self.bytes, user: self.user, item });
            return;
        }
        // Unmapping and deregistering take their time.
        drop(kept);
        drop(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Incarnation = Incarnation([1; 16]);

    fn take(pool: &Arc<Pool<Arc<Arena>>>, bytes: usize) -> Lent<Arc<Arena>> {
        pool.take(bytes, A, Ok).expect("memory")
    }

    #[test]
    fn arenas_come_back_up_to_the_limit() {
        use verbs_transport::fabric::bulk::MemoryOwner as _;
        let pool = Pool::new(192 << 10);
        let (a, b, c) = (take(&pool, 1), take(&pool, 65_537), take(&pool, 65_536));
        assert_eq!((a.len(), b.len(), c.len(), pool.kept_bytes()), (65_536, 131_072, 65_536, 0));
        drop((a, b, c));
        assert_eq!(pool.kept_bytes(), 196_608, "the third would have been too much");
        let small = take(&pool, 5);
        assert_eq!((small.len(), pool.kept_bytes()), (65_536, 131_072), "the smallest that does");
        drop(small);
        pool.clear();
        assert_eq!(pool.kept_bytes(), 0);
    }

    #[test]
    fn whose_bytes_lie_in_it_is_known() {
        let pool: Arc<Pool<Arc<Arena>>> = Pool::new(1 << 20);
        let other = |bytes| pool.take(bytes, Incarnation([2; 16]), Ok).expect("memory");
        let (small, large) = (take(&pool, 1), other(100_000));
        assert!(!small.is_foreign() && !large.is_foreign(), "new ones are zeroed");
        drop((small, large));
        let own = other(1);
        assert!(!own.is_foreign() && own.bytes == 131_072, "one's own, although another is smaller");
        let foreign = other(1);
        assert!(foreign.is_foreign());
        drop((own, foreign));
        assert!(!other(1).is_foreign(), "told once: by now it is one's own");
    }
}
