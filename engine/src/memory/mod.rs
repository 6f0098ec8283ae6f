//! Memory that peers may name: allocations, registered ranges, and how an address finds its range.

mod address;
mod alias;
mod busy;
mod host;
mod permission;
mod raw;
mod registration;
mod registry;

pub(crate) use address::{AddressIndex, Span};
pub(crate) use busy::Use;
pub(crate) use host::{Blocked, Patience};
pub use host::{HostMemory, MemoryError};
pub use permission::Permission;
#[cfg(test)]
pub(crate) use raw::testing;
pub use registration::{AccessError, OutOfRange, RegisteredMemory};
pub(crate) use registration::{Denied, DirectRange, Registration};
pub(crate) use registry::Registry;
pub use registry::{RegisterError, ResolveError, ResolvedAddress, UnregisterError};
