//! Owners of everything that a device gives out, and the [`Fabric`](crate::fabric::Fabric) over them.
//!
//! This is the only module of the workspace's lower crates that may say `unsafe`. Each owner is one small file and
//! holds an `Arc` of what it was made from:
//!
//! ```text
//! Context ← Pd ← SlabMr ← Srq ← Qp
//!    ↑                           │
//!    └── Channel ← Cq ←──────────┘
//! ```
//!
//! so the order in which the verbs demand destruction (QP, SRQ, CQ, channel, MR, PD, context) holds by construction.
//! A destroy that fails is logged and never a panic. The calls are the classic ones (`ibv_post_send`,
//! `ibv_post_srq_recv`, `ibv_poll_cq`): the extended ones misbehave on Soft-RoCE with rdma-core 44.
#![allow(unsafe_code)]

mod async_event;
mod bulk;
mod bulk_qp;
mod context;
mod cq;
mod device_qp;
mod fabric;
mod memory;
mod mr;
mod open;
mod owner;
mod pd;
#[doc(hidden)]
pub mod probe;
mod qp;
mod reactor;
mod region;
mod srq;
mod sysfs;
mod wc;
mod window;

use std::{ffi::c_int, io};

pub use self::{
    bulk::{DeviceBulkPort, DeviceBulkQp},
    device_qp::DeviceQp,
    fabric::DeviceFabric,
    memory::PageKind,
    open::{DeviceConfig, OpenError},
    owner::{Arena, MemoryOwner, OutOfBounds, OwnedBytes, Span},
    region::DeviceRegion,
    window::DeviceWindow,
};

/// The errno that a call returned as its value (`ibv_modify_qp` and most newer calls do).
fn check(rc: c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        // Some providers return -1 and set errno, some return a negated errno.
        -1 => Err(io::Error::last_os_error()),
        rc => Err(io::Error::from_raw_os_error(rc.saturating_abs())),
    }
}

/// Says that an object could not be destroyed; it stays with the kernel until the process ends.
fn log_failed_destroy(what: &'static str, rc: c_int) {
    if let Err(error) = check(rc) {
        tracing::error!(what, %error, "destroy failed; the object stays until the process ends");
    }
}

/// What a provider leaves out.
fn missing_call(name: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, format!("the provider has no {name}"))
}
