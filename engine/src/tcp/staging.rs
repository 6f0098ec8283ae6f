//! Buffers that hold a payload until it is complete.

use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, PoisonError},
};

/// Buffers that are kept for the next payload: fresh pages cost about as much as a copy.
pub(crate) struct StagingPool {
    keep_bytes: u64,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    bytes: u64,
    buffers: Vec<Vec<u8>>,
}

/// As many bytes as were asked for. What is in them is left over from others and never leaves unwritten.
pub(crate) struct Staging {
    pool: Arc<StagingPool>,
    buffer: Vec<u8>,
    length: usize,
}

impl StagingPool {
    pub(crate) fn new(keep_bytes: u64) -> Arc<Self> {
        Arc::new(Self { keep_bytes, kept: Mutex::default() })
    }

    pub(crate) fn take(self: &Arc<Self>, length: usize) -> Staging {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // The smallest that is large enough, so that a small payload leaves the large buffers to others.
        let fitting = kept.buffers.iter().enumerate().filter(|(_, buffer)| buffer.len() >= length);
        let found = fitting.min_by_key(|(_, buffer)| buffer.len()).map(|(at, _)| at);
        let buffer = found.map(|at| kept.buffers.swap_remove(at));
        if let Some(buffer) = &buffer {
            kept.bytes -= buffer.len() as u64;
        }
        drop(kept);
        Staging { pool: Arc::clone(self), buffer: buffer.unwrap_or_else(|| vec![0; length]), length }
    }

    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }
}

impl Deref for Staging {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[..self.length]
    }
}

impl DerefMut for Staging {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.length]
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        let mut kept = self.pool.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = kept.bytes + buffer.len() as u64;
        if bytes <= self.pool.keep_bytes && !buffer.is_empty() {
            kept.bytes = bytes;
            kept.buffers.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_up_to_the_limit() {
        let pool = StagingPool::new(100);
        let (a, b, c) = (pool.take(60), pool.take(30), pool.take(20));
        assert_eq!((a.len(), b.len(), pool.kept_bytes()), (60, 30, 0));
        drop((a, b, c));
        assert_eq!(pool.kept_bytes(), 90, "the third would have been too much");
        let small = pool.take(25);
        assert_eq!((small.len(), pool.kept_bytes()), (25, 60), "it took the smaller one");
        drop(pool.take(0));
        assert_eq!(pool.kept_bytes(), 60);
    }
}
