//! What the `probe` example measures beyond the fabric. Not part of the library's surface: no promise is kept here.

use std::{
    ffi::{c_int, c_void},
    io,
    ptr::{self, NonNull},
    sync::Arc,
    time::{Duration, Instant},
};

use ibverbs_sys as ffi;
use verbs_bootstrap::{Gid, GidType, Net, Psn, QpEndpoint, RdAtomic};

use super::{
    DeviceFabric, check,
    context::Context,
    fabric::Shared,
    log_failed_destroy,
    mr::SlabMr,
    qp::{Init, Qp, Route, Rts},
    wc,
};
use crate::fabric::{QpCaps, QpPath, QpTimers, RecvSlab, Wc, bulk::WindowSupport};

/// Looks at the device under a fabric.
pub struct Probe<'a> {
    shared: &'a Arc<Shared>,
}

impl<N: Net> DeviceFabric<N> {
    /// Looks at the device under this fabric.
    #[doc(hidden)]
    pub fn probe(&self) -> Probe<'_> {
        Probe { shared: &self.shared }
    }
}

/// What came of an RDMA WRITE with immediate between two QPs of the fabric.
#[derive(Debug)]
pub struct WriteWithImm {
    /// Immediate data and length as the receiver saw them.
    pub receive: Option<(u32, usize)>,
    /// The receive that it used up.
    pub slab: Option<RecvSlab>,
    /// A completion other than success.
    pub failed: Option<Wc>,
}

impl Probe<'_> {
    /// Device name and firmware version.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn device(&self) -> io::Result<(String, String)> {
        Ok((self.shared.context.name().to_owned(), self.shared.context.attributes()?.firmware))
    }

    /// Limits under the names that the verbs manual has for them.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn limits(&self) -> io::Result<Vec<(&'static str, u64)>> {
        let attributes = self.shared.context.attributes()?;
        let port = self.shared.context.port(self.shared.port().port)?;
        Ok(vec![
            ("max_qp", attributes.qps.into()),
            ("max_qp_wr", attributes.qp_wrs.into()),
            ("max_sge", attributes.sges.into()),
            ("max_srq", attributes.srqs.into()),
            ("max_srq_wr", attributes.srq_wrs.into()),
            ("max_srq_sge", attributes.srq_sges.into()),
            ("max_cq", attributes.cqs.into()),
            ("max_cqe", attributes.cqes.into()),
            ("max_mr", attributes.mrs.into()),
            ("max_mr_size", attributes.mr_bytes),
            ("max_qp_init_rd_atom", attributes.rd_atomic_initiator.into()),
            ("max_qp_rd_atom", attributes.rd_atomic_responder.into()),
            ("max_mw", attributes.memory_windows.into()),
            ("num_comp_vectors", self.shared.context.completion_vectors().into()),
            ("max_msg_sz", port.message_bytes.into()),
            ("active_mtu", port.active_mtu.map_or(0, |mtu| mtu.bytes().into())),
            ("max_mtu", port.max_mtu.map_or(0, |mtu| mtu.bytes().into())),
            ("pkey_tbl_len", port.pkeys.into()),
            ("gid_tbl_len", port.gids as u64),
        ])
    }

    /// Filled slots of the port's GID table.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn gids(&self) -> io::Result<Vec<(u8, Gid, GidType)>> {
        let slots = self.shared.context.gids(self.shared.port().port)?;
        Ok(slots.into_iter().map(|slot| (slot.index, slot.gid, slot.gid_type)).collect())
    }

    /// The kinds of memory windows that the device advertises. None is bound: destroying a QP with a bound type 2
    /// window blocks for 50 s on Soft-RoCE.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn memory_windows(&self) -> io::Result<Vec<&'static str>> {
        let flags = self.shared.context.attributes()?.capabilities;
        let kinds = [
            (ffi::IBV_DEVICE_MEM_WINDOW, "1"),
            (ffi::IBV_DEVICE_MEM_WINDOW_TYPE_2A, "2A"),
            (ffi::IBV_DEVICE_MEM_WINDOW_TYPE_2B, "2B"),
        ];
        Ok(kinds.into_iter().filter(|(flag, _)| flags & flag != 0).map(|(_, kind)| kind).collect())
    }

    /// Whether bulk ports use them, or why not.
    pub fn window_support(&self) -> WindowSupport {
        self.shared.windows
    }

    /// Whether registrations may fault pages in on demand.
    ///
    /// # Errors
    ///
    /// The provider has no extended device query.
    pub fn on_demand_paging(&self) -> io::Result<bool> {
        let query = tail(&self.shared.context).and_then(|tail| tail.query_device_ex).ok_or_else(unsupported)?;
        let mut attributes = ffi::ibv_device_attr_ex::default();
        // SAFETY: the context is live and `query` is its own. A null input is allowed (ibv_query_device_ex(3)); the
        // provider writes at most the stated size.
        check(unsafe {
            query(self.shared.context.as_ptr(), ptr::null(), &raw mut attributes, size_of_val(&attributes))
        })?;
        Ok(attributes.odp_caps.general_caps & 1 != 0)
    }

    /// Whether an RC QP for the extended posting calls can be made. It is made and destroyed; nothing is posted.
    ///
    /// # Errors
    ///
    /// The provider's refusal.
    pub fn extended_qp(&self) -> io::Result<()> {
        let create = tail(&self.shared.context).and_then(|tail| tail.create_qp_ex).ok_or_else(unsupported)?;
        let mut init = ffi::ibv_qp_init_attr_ex {
            send_cq: self.shared.cq.as_ptr(),
            recv_cq: self.shared.cq.as_ptr(),
            srq: self.shared.srq.as_ptr(),
            cap: ffi::ibv_qp_cap {
                max_send_wr: 4,
                max_recv_wr: 0,
                max_send_sge: 1,
                max_recv_sge: 0,
                max_inline_data: 0,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            pd: self.shared.pd.as_ptr(),
            comp_mask: ffi::IBV_QP_INIT_ATTR_PD | ffi::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags: u64::from(ffi::IBV_QP_EX_WITH_SEND | ffi::IBV_QP_EX_WITH_RDMA_READ),
            ..Default::default()
        };
        // SAFETY: context, PD, CQ and SRQ are live and of one context, and `create` is that context's own; `init` is
        // read and written during the call only.
        let qp = unsafe { create(self.shared.context.as_ptr(), &raw mut init) };
        let qp = NonNull::new(qp).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: made just above, and known to nobody else.
        log_failed_destroy("ibv_destroy_qp", unsafe { ffi::ibv_destroy_qp(qp.as_ptr()) });
        Ok(())
    }

    /// Writes 8 bytes with an immediate from one QP of this fabric to another, and polls for up to `wait`.
    ///
    /// # Errors
    ///
    /// Any step's.
    pub fn write_with_imm(&self, imm: u32, wait: Duration) -> io::Result<WriteWithImm> {
        use ffi::ibv_access_flags as f;
        let access = f::IBV_ACCESS_LOCAL_WRITE | f::IBV_ACCESS_REMOTE_WRITE;
        let target = Arc::new(SlabMr::new(&self.shared.pd, 1, 4096, access)?);
        let caps = QpCaps { send_wrs: 4, inline_bytes: 16 };
        let a = Qp::new(&self.shared.parts(f::IBV_ACCESS_LOCAL_WRITE), caps)?;
        let b = Qp::new(&self.shared.parts(access), caps)?;
        let (to_a, to_b) = (a.handle().qpn(), b.handle().qpn());
        let a = self.to_rts(a, QpEndpoint { qpn: to_b, psn: PSN })?;
        let _b = self.to_rts(b, QpEndpoint { qpn: to_a, psn: PSN })?;
        a.post_write_with_imm(b"8 bytes.", target.remote(), imm)?;

        let mut outcome = WriteWithImm { receive: None, slab: None, failed: None };
        let deadline = Instant::now() + wait;
        while outcome.receive.is_none() && outcome.failed.is_none() && Instant::now() < deadline {
            self.shared.cq.poll(|raw| match wc::read(raw, |index| self.shared.srq.complete(index)) {
                Ok(Wc::Receive { slab, .. }) => {
                    outcome.receive = raw.imm_data().map(|imm| (u32::from_be(imm), raw.len()));
                    outcome.slab = Some(slab);
                }
                Ok(Wc::Send { .. }) | Err(_) => {}
                Ok(failed) => outcome.failed = Some(failed),
            })?;
        }
        Ok(outcome)
    }

    fn to_rts(&self, qp: Qp<Init>, remote: QpEndpoint) -> io::Result<Qp<Rts>> {
        let port = self.shared.port();
        let timers = QpTimers { ack_timeout_code: 14, retry_cnt: 6, rnr_retry: 6, min_rnr_timer_code: 3 };
        let rd_atomic = RdAtomic { initiator: 1, responder: 1 };
        let path = QpPath { remote, remote_port: port, local_psn: PSN, mtu: port.mtu, rd_atomic, timers };
        let route = Route {
            link_layer: port.link_layer,
            gid_index: port.gid_index,
            remote_gid: port.gid,
            remote_lid: port.lid,
        };
        let qp = qp.into_rtr(&path, &route).map_err(|(_, error)| error)?;
        qp.into_rts(PSN, timers, rd_atomic).map_err(|(_, error)| error)
    }
}

impl Qp<Rts> {
    fn post_write_with_imm(&self, bytes: &[u8], (remote_addr, rkey): (u64, u32), imm: u32) -> io::Result<()> {
        let handle = self.handle();
        let length = u32::try_from(bytes.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let mut sge = ffi::ibv_sge { addr: bytes.as_ptr().expose_provenance() as u64, length, lkey: 0 };
        let mut wr = ffi::ibv_send_wr {
            sg_list: &raw mut sge,
            num_sge: 1,
            opcode: ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0 | ffi::ibv_send_flags::IBV_SEND_INLINE.0,
            __bindgen_anon_1: ffi::ibv_send_wr__bindgen_ty_1 { imm_data: imm.to_be() },
            wr: ffi::ibv_send_wr__bindgen_ty_2 {
                rdma: ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey },
            },
            ..Default::default()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the QP is live; the one WR and its SGE are read during the call only, in which the inline bytes are
        // copied. Where they land is the peer's memory, which its key guards.
        check(unsafe { (handle.post)(handle.raw.as_ptr(), &raw mut wr, &raw mut bad) })
    }
}

const PSN: Psn = Psn::from_random(0x1234);

/// The part of `struct verbs_context` that stands right before the `ibv_context` inside it (verbs.h). It grows at its
/// front, so these offsets from its end are ABI.
#[repr(C)]
#[derive(Clone, Copy)]
struct ExtendedTail {
    query_device_ex: Option<QueryDeviceEx>,
    destroy_flow: *mut c_void,
    placeholder_2: *mut c_void,
    create_flow: *mut c_void,
    placeholder_1: *mut c_void,
    open_qp: *mut c_void,
    create_qp_ex: Option<CreateQpEx>,
    get_srq_num: *mut c_void,
    create_srq_ex: *mut c_void,
    open_xrcd: *mut c_void,
    close_xrcd: *mut c_void,
    placeholder_3: u64,
    /// Size of the whole `verbs_context`.
    sz: usize,
}

type QueryDeviceEx = unsafe extern "C" fn(
    *mut ffi::ibv_context,
    *const ffi::ibv_query_device_ex_input,
    *mut ffi::ibv_device_attr_ex,
    usize,
) -> c_int;
type CreateQpEx = unsafe extern "C" fn(*mut ffi::ibv_context, *mut ffi::ibv_qp_init_attr_ex) -> *mut ffi::ibv_qp;

/// The provider's extended calls, if it has any.
fn tail(context: &Context) -> Option<ExtendedTail> {
    if size_of::<usize>() != 8 {
        return None; // the layout above has no padding only there
    }
    let raw = context.as_ptr();
    // SAFETY: the context is live; the field is constant after the open.
    let mark = unsafe { (*raw).abi_compat };
    if mark.addr() != usize::MAX {
        return None;
    }
    // The mark says that the context lies at the end of a `verbs_context`, whose last field but the context is `sz`.
    let tail = raw.cast::<ExtendedTail>().wrapping_sub(1);
    // SAFETY: by the mark, `sz` exists, at the end of the tail.
    let sz = unsafe { (*tail).sz };
    if sz < size_of::<ExtendedTail>() + size_of::<ffi::ibv_context>() {
        return None;
    }
    // SAFETY: `sz` says that at least the tail precedes the context, which the provider set up during the open.
    Some(unsafe { tail.read() })
}

fn unsupported() -> io::Error {
    io::Error::from(io::ErrorKind::Unsupported)
}
