//! Memory that peers may name: allocations, registered ranges, and how an address finds its range.

mod address;
mod alias;
mod host;
mod permission;
mod raw;
mod registration;
mod registry;

pub(crate) use address::{AddressIndex, Span};
pub use host::{HostMemory, MemoryError};
pub use permission::Permission;
#[cfg(test)]
pub(crate) use raw::testing;
pub(crate) use registration::Registration;
pub use registration::{OutOfRange, RegisteredMemory};
pub(crate) use registry::Registry;
pub use registry::{RegisterError, ResolveError, ResolvedAddress, UnregisterError};
