//! The control protocol: what is said on a connection, and how the source answers.

mod admission;
mod device;
mod source;
mod wire;

#[cfg(feature = "rdma")]
pub(crate) use admission::Admitted;
pub(crate) use admission::{Admission, CloseTimedOut};
pub(crate) use device::{DeviceCall, DeviceSource};
#[cfg(feature = "rdma")]
pub(crate) use source::Access;
pub(crate) use source::{Kind, Operation, Source};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use wire::encode_descriptors;
pub(crate) use wire::{
    ASK_BYTES, COMMIT_BYTE, Descriptor, Opcode, PLAN_BYTES, REPLY_BYTES, REQUEST_BYTES, Reply, Request,
    decode_descriptors, describe_bytes_max,
};
pub use wire::{Status, WireError};
#[cfg(feature = "rdma")]
pub(crate) use wire::{array, check_head, number, put_head};
