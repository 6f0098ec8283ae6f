//! The atomics of what is lock-free, in one place: its loom test puts loom's here.

pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
