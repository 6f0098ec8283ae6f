//! Async events: news about the device that no completion carries.

use std::{io, mem::MaybeUninit};

use ibverbs_sys as ffi;

use super::context::Context;
use crate::fabric::AsyncEvent;

impl Context {
    /// Takes the next async event, acknowledged; `None` when none waits.
    ///
    /// Every event is acknowledged at once, whatever it is, so destroying its CQ, QP or SRQ never waits for it.
    ///
    /// # Errors
    ///
    /// The fd is broken.
    pub(super) fn next_async_event(&self) -> io::Result<Option<AsyncEvent>> {
        let mut raw = MaybeUninit::<ffi::ibv_async_event>::zeroed();
        loop {
            // SAFETY: the context is live, its fd does not block, and `raw` is a whole event, written during the call.
            let rc = unsafe { ffi::ibv_get_async_event(self.as_ptr(), raw.as_mut_ptr()) };
            if rc == 0 {
                break;
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(None),
                io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            }
        }
        // SAFETY: zeroed above, which is a valid value of all its integers and pointers, then filled by the call.
        let mut raw = unsafe { raw.assume_init() };
        let event = read(&raw);
        // SAFETY: `raw` is as ibv_get_async_event gave it and is acknowledged once. The object that it names cannot
        // be gone: destroying it waits for this acknowledgement (ibv_get_async_event(3)).
        unsafe { ffi::ibv_ack_async_event(&raw mut raw) };
        Ok(Some(event))
    }
}

/// Reads an event that is not acknowledged yet.
fn read(raw: &ffi::ibv_async_event) -> AsyncEvent {
    match raw.event_type {
        ffi::IBV_EVENT_SRQ_LIMIT_REACHED => AsyncEvent::SrqLimitReached,
        ffi::IBV_EVENT_SRQ_ERR => AsyncEvent::SrqError,
        ffi::IBV_EVENT_CQ_ERR => AsyncEvent::CqError,
        ffi::IBV_EVENT_QP_FATAL | ffi::IBV_EVENT_QP_REQ_ERR | ffi::IBV_EVENT_QP_ACCESS_ERR => {
            AsyncEvent::QpFatal { qpn: qp_number(raw) }
        }
        ffi::IBV_EVENT_QP_LAST_WQE_REACHED => AsyncEvent::QpLastWqe { qpn: qp_number(raw) },
        ffi::IBV_EVENT_PORT_ERR => AsyncEvent::PortDown,
        ffi::IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortUp,
        ffi::IBV_EVENT_GID_CHANGE => AsyncEvent::GidChange,
        ffi::IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        other => AsyncEvent::Other(other),
    }
}

fn qp_number(raw: &ffi::ibv_async_event) -> u32 {
    // SAFETY: the callers matched an event type of a QP, for which `qp` is the union's variant (verbs.h).
    let qp = unsafe { raw.element.qp };
    // SAFETY: the QP is one of this process that is live until the event is acknowledged, which is after this; its
    // number is constant.
    unsafe { (*qp).qp_num }
}
