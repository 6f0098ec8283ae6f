//! Zero-copy receive: slabs lent to the application with the frames in them, and their way home.
//!
//! A lent slab is out of the SRQ until the last clone of its bytes is dropped; only then is its credit owed. What is out
//! is bounded twice: over all peers by `zero_copy_slabs`, which the SRQ keeps free of promises, and for each peer by a
//! quarter of its window. So no SEND finds the SRQ empty and no peer stops for good, however long an application keeps
//! its frames: beyond either bound they are copied.

use std::sync::{Arc, Weak};

use crossbeam_queue::SegQueue;
use tokio::sync::Notify;
use verbs_bootstrap::Generation;

use super::peer::Peer;
use crate::fabric::{Fabric, POST_BATCH, RecvSlab};

/// A slab that the application has given back, and whose frame had been in it.
pub(crate) struct Returned<F: Fabric> {
    pub(crate) slab: RecvSlab,
    pub(crate) peer: Weak<Peer<F>>,
    pub(crate) generation: Generation,
}

/// The way from the application, on any thread, to the driver.
pub(crate) struct Returns<F: Fabric> {
    slabs: SegQueue<Returned<F>>,
    driver: Arc<Notify>,
}

impl<F: Fabric> Returns<F> {
    pub(crate) fn new(driver: Arc<Notify>) -> Self {
        Self { slabs: SegQueue::new(), driver }
    }

    /// The application drops the last clone of what lay in a slab. It wakes the driver for whole batches only: nothing
    /// waits for a single slab, and the driver looks by itself while any is out.
    pub(crate) fn put(&self, returned: Returned<F>) {
        self.slabs.push(returned);
        if self.slabs.len() >= POST_BATCH {
            self.driver.notify_one();
        }
    }

    pub(crate) fn pop(&self) -> Option<Returned<F>> {
        self.slabs.pop()
    }
}

/// What may be lent, and what is. The driver's own.
#[derive(Debug)]
pub(crate) struct Lending {
    slabs: u32,
    min_bytes: usize,
    out: u32,
}

impl Lending {
    pub(crate) const fn new(slabs: u32, min_bytes: u32) -> Self {
        Self { slabs, min_bytes: min_bytes as usize, out: 0 }
    }

    /// Whether a frame of so many bytes should be lent.
    pub(crate) const fn is_worth(&self, bytes: usize) -> bool {
        self.slabs > 0 && bytes >= self.min_bytes
    }

    /// Whether there is one more slab to lend.
    pub(crate) const fn has_room(&self) -> bool {
        self.out < self.slabs
    }

    pub(crate) const fn lent(&mut self) {
        self.out += 1;
    }

    pub(crate) fn returned(&mut self) {
        debug_assert!(self.out > 0, "a slab is lent once and returned once");
        self.out = self.out.saturating_sub(1);
    }

    /// Slabs with the application now.
    pub(crate) const fn out(&self) -> u32 {
        self.out
    }
}
