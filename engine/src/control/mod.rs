//! The control protocol: what is said on a connection, and how the source answers.

mod about;
mod admission;
mod device;
mod source;
mod wire;

pub(crate) use about::{About, NAME_BYTES_MAX};
pub use about::{DeviceLink, RemoteDevice};
#[cfg(feature = "rdma")]
pub(crate) use admission::Admitted;
pub(crate) use admission::{Admission, CloseTimedOut};
pub(crate) use device::{DeviceCall, DeviceSource};
#[cfg(feature = "rdma")]
pub(crate) use source::Access;
pub(crate) use source::{Kind, Operation, Source};
pub(crate) use wire::{
    ASK_BYTES, COMMIT_BYTE, Description, Descriptor, Opcode, PLAN_BYTES, REPLY_BYTES, REQUEST_BYTES, Reply, Request,
};
pub use wire::{Status, WireError};
#[cfg(feature = "rdma")]
pub(crate) use wire::{array, check_head, number, put_head};
