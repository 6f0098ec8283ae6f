//! The seam between a source's connections and devices that carry out operations 4 to 7.

use std::any::Any;

use super::{
    admission::Admitted,
    source::Access,
    wire::{ASK_BYTES, REQUEST_BYTES, Status},
};
use crate::{
    Direction,
    tcp::{Line, LineError},
};

/// An operation that the source has admitted.
#[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "there is no device"))]
pub(crate) struct DeviceCall<'a> {
    pub(crate) line: Line<'a>,
    /// As they came.
    pub(crate) request: &'a [u8; REQUEST_BYTES],
    /// As they came.
    pub(crate) ask: &'a [u8; ASK_BYTES],
    /// As it came; empty if it is to come.
    pub(crate) plan: &'a [u8],
    pub(crate) direction: Direction,
    /// Over several pairs of devices at once.
    pub(crate) sliced: bool,
    pub(crate) access: Access,
    /// To be held until no device can touch anything for this operation any more.
    pub(crate) inside: Admitted,
    /// What the connection keeps from one operation to the next.
    pub(crate) kept: &'a mut Option<Box<dyn Any + Send>>,
}

/// Carries operations out, on the source's own threads.
pub(crate) trait DeviceSource: Send + Sync {
    /// The whole conversation. `Ok(Err)` is a refusal, which is told to the peer; the connection ends with it.
    fn serve(&self, call: DeviceCall<'_>) -> Result<Result<(), Status>, LineError>;
}
