//! One allocation and its lock.

use std::fmt;

use parking_lot::Mutex;

use super::raw::RawBytes;

/// One host allocation with the lock that puts all accesses to its bytes in some order: local ones through
/// [`RegisteredMemory`](crate::RegisteredMemory), and the copies that peers ask for.
///
/// Ranges of it are registered with [`Engine::register_host_memory`](crate::Engine::register_host_memory), in several
/// engines if need be; they all share this lock.
pub struct HostMemory {
    address: u64,
    length: u64,
    /// Fair in the end: who accesses the bytes again and again, without a pause, must not keep peers out. The standard
    /// library's lock gives no such promise: its waiters wake too late every time.
    bytes: Mutex<Bytes>,
}

enum Bytes {
    Owned(Box<[u8]>),
    Raw(RawBytes),
}

/// Numbers that are no memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The address is null.
    #[error("host memory of {length} bytes at the null address")]
    Null {
        /// The length given.
        length: usize,
    },
    /// The last byte lies beyond what an address can name.
    #[error("host memory of {length} bytes at {address:#x} ends beyond the address space")]
    Wraps {
        /// The address given.
        address: u64,
        /// The length given.
        length: usize,
    },
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({:#x}, {} bytes)", self.address, self.length)
    }
}

impl HostMemory {
    /// Memory that the engine frees once nobody holds it.
    pub fn new(bytes: Box<[u8]>) -> Self {
        Self {
            address: bytes.as_ptr().addr() as u64,
            length: bytes.len() as u64,
            bytes: Mutex::new(Bytes::Owned(bytes)),
        }
    }

    /// Bytes that somebody else owns.
    pub(super) fn of_raw(address: u64, length: usize, bytes: RawBytes) -> Self {
        Self { address, length: length as u64, bytes: Mutex::new(Bytes::Raw(bytes)) }
    }

    /// Where it starts.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether it has no bytes. Such memory can be held but not registered.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Runs `access` on all bytes under the lock. A panic in it leaves the bytes as they are then, and the lock usable.
    pub(crate) fn with<T>(&self, access: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut bytes = self.bytes.lock();
        access(match &mut *bytes {
            Bytes::Owned(bytes) => bytes,
            Bytes::Raw(bytes) => bytes.bytes(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU32, Ordering::Relaxed},
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn a_panic_under_the_lock_leaves_it_usable() {
        let memory = HostMemory::new(vec![0; 4].into());
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            memory.with(|bytes| {
                bytes[0] = 1;
                panic!("as a caller's closure might");
            });
        }));
        assert!(caught.is_err());
        assert_eq!(memory.with(|bytes| bytes[0]), 1);
    }
    #[test]
    fn a_thread_that_never_pauses_keeps_nobody_out() {
        const TURNS: u32 = 50;
        // Rounds, not seconds. Both cores free: about 2 a turn with this lock, 300 with the standard library's.
        const ROUNDS_MAX: u32 = 100 * TURNS;
        let memory = HostMemory::new(vec![0; 4].into());
        let rounds = AtomicU32::new(0);
        let taken = std::thread::scope(|scope| {
            let hog = || {
                while rounds.fetch_add(1, Relaxed) < ROUNDS_MAX {
                    let done = memory.with(|bytes| {
                        let start = Instant::now();
                        while start.elapsed() < Duration::from_millis(1) {
                            std::hint::spin_loop();
                        }
                        bytes[0]
                    });
                    if u32::from(done) == TURNS {
                        return;
                    }
                }
            };
            let hog = scope.spawn(hog);
            for _ in 0..TURNS {
                let seen = rounds.load(Relaxed);
                while rounds.load(Relaxed) == seen && !hog.is_finished() {
                    std::thread::yield_now();
                }
                memory.with(|bytes| bytes[0] += 1);
            }
            rounds.load(Relaxed)
        });
        assert!(taken < ROUNDS_MAX, "the other thread had {taken} turns meanwhile");
        assert_eq!(u32::from(memory.with(|bytes| bytes[0])), TURNS);
    }
}
