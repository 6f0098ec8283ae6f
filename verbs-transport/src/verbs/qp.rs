//! RC queue pairs and the states that we drove them to.

use std::{
    ffi::{c_int, c_uint},
    io,
    marker::PhantomData,
    ptr::{self, NonNull},
    sync::Arc,
};

use ibverbs_sys as ffi;
use verbs_bootstrap::{Gid, LinkLayer, Mtu, Psn, Qpn, RdAtomic};

use super::{check, cq::Cq, log_failed_destroy, missing_call, mr::SlabMr, pd::Pd, srq::Srq, srq::posted_before, wc};
use crate::fabric::{POST_BATCH, PostError, QpCaps, QpPath, QpTimers, SendData, SendWr};

/// Initialised: receives flow once the peer is known.
pub(crate) struct Init;
/// Ready to receive.
pub(crate) struct Rtr;
/// Ready to send.
pub(crate) struct Rts;

/// A QP that we drove to state `S`. The device may still drop it to ERR: that news is a WC or an async event.
pub(crate) struct Qp<S> {
    handle: Arc<QpHandle>,
    state: PhantomData<S>,
}

/// The QP itself, for what is allowed in any state: ERR and queries.
pub(crate) struct QpHandle {
    pub(super) raw: NonNull<ffi::ibv_qp>,
    qpn: Qpn,
    caps: QpCaps,
    /// Receives of its own, not an SRQ's.
    pub(super) recv_wrs: u32,
    port: u8,
    pub(super) post: PostFn,
    /// A QP for messages sends out of them.
    send_slabs: Option<Arc<SlabMr>>,
    destroyed: bool,
    _srq: Option<Arc<Srq>>,
    _cq: Arc<Cq>,
    pub(super) pd: Arc<Pd>,
}

// SAFETY: every verb on a QP is thread-safe (the provider locks its queues, the kernel its state), and a QP is not
// bound to the thread that made it.
unsafe impl Send for QpHandle {}
// SAFETY: as above.
unsafe impl Sync for QpHandle {}

/// What a QP is made from.
pub(super) struct QpParts<'a> {
    pub(super) pd: &'a Arc<Pd>,
    pub(super) cq: &'a Arc<Cq>,
    pub(super) receives: Receives<'a>,
    pub(super) port: u8,
    /// What peers may do: for messages local write alone, the least.
    pub(super) access: ffi::ibv_access_flags,
}

/// Where a QP's receives come from.
pub(super) enum Receives<'a> {
    /// From an SRQ: a QP for messages, which go out of these slabs.
    Shared { srq: &'a Arc<Srq>, send_slabs: &'a Arc<SlabMr> },
    /// From a queue of its own, without memory: a QP for bulk.
    Own { recv_wrs: u32 },
}

/// Where a QP's packets go.
pub(super) struct Route {
    pub(super) link_layer: LinkLayer,
    pub(super) gid_index: u8,
    pub(super) remote_gid: Gid,
    pub(super) remote_lid: u16,
}

impl<S> Qp<S> {
    /// What may be done in any state.
    pub(super) fn handle(&self) -> &Arc<QpHandle> {
        &self.handle
    }
}

impl Qp<Init> {
    /// Makes an RC QP with one send SGE, receives as `parts` says and no automatic signaling, and initialises it with
    /// `P_Key` index 0.
    ///
    /// # Errors
    ///
    /// The device's: `EINVAL` when it does not grant these caps.
    pub(super) fn new(parts: &QpParts<'_>, caps: QpCaps) -> io::Result<Self> {
        let post = parts.pd.context().ops().post_send.ok_or_else(|| missing_call("post_send"))?;
        let (srq, send_slabs, recv_wrs) = match parts.receives {
            Receives::Shared { srq, send_slabs } => (Some(Arc::clone(srq)), Some(Arc::clone(send_slabs)), 0),
            Receives::Own { recv_wrs } => (None, None, recv_wrs),
        };
        let mut init = ffi::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: parts.cq.as_ptr(),
            recv_cq: parts.cq.as_ptr(),
            srq: srq.as_ref().map_or(ptr::null_mut(), |srq| srq.as_ptr()),
            cap: ffi::ibv_qp_cap {
                max_send_wr: caps.send_wrs,
                max_recv_wr: recv_wrs,
                max_send_sge: 1,
                max_recv_sge: u32::from(recv_wrs > 0),
                max_inline_data: caps.inline_bytes,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: PD, CQ and SRQ, where there is one, are live, and the `Arc`s kept below keep them so until the QP is gone; `init` is
        // read and written during the call only.
        let raw = unsafe { ffi::ibv_create_qp(parts.pd.as_ptr(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: `raw` is the live QP just made; its number is constant.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let Some(qpn) = Qpn::new(number) else {
            // SAFETY: `raw` was made above, nothing else knows it, and it is not used after this.
            log_failed_destroy("ibv_destroy_qp", unsafe { ffi::ibv_destroy_qp(raw.as_ptr()) });
            return Err(io::Error::other(format!("the device gave out QP number {number:#x}")));
        };
        let handle = Arc::new(QpHandle {
            raw,
            qpn,
            caps: QpCaps { send_wrs: init.cap.max_send_wr, inline_bytes: init.cap.max_inline_data },
            recv_wrs: if recv_wrs > 0 { init.cap.max_recv_wr } else { 0 },
            port: parts.port,
            post,
            send_slabs,
            destroyed: false,
            _srq: srq,
            _cq: Arc::clone(parts.cq),
            pd: Arc::clone(parts.pd),
        });
        handle.init(parts.access)?;
        Ok(Self { handle, state: PhantomData })
    }

    /// To RTR, with everything that the receiving half needs. Resolves the peer's address and may block for a second.
    ///
    /// # Errors
    ///
    /// The QP, still in INIT, and the device's errno.
    pub(super) fn into_rtr(self, path: &QpPath, route: &Route) -> Result<Qp<Rtr>, (Self, io::Error)> {
        match self.handle.ready_to_receive(path, route) {
            Ok(()) => Ok(Qp { handle: self.handle, state: PhantomData }),
            Err(error) => Err((self, error)),
        }
    }
}

impl Qp<Rtr> {
    /// To RTS.
    ///
    /// # Errors
    ///
    /// The QP, still in RTR, and the device's errno.
    pub(super) fn into_rts(
        self,
        psn: Psn,
        timers: QpTimers,
        rd_atomic: RdAtomic,
    ) -> Result<Qp<Rts>, (Self, io::Error)> {
        match self.handle.ready_to_send(psn, timers, rd_atomic.initiator) {
            Ok(()) => Ok(Qp { handle: self.handle, state: PhantomData }),
            Err(error) => Err((self, error)),
        }
    }
}

impl Qp<Rts> {
    /// Posts up to [`POST_BATCH`] SENDs as one chain.
    ///
    /// # Errors
    ///
    /// `InvalidInput` and nothing posted for more WRs, more inline bytes or more slab bytes than there may be, or
    /// another fabric's slab; else the device's, with the WRs ahead of the refused one live.
    pub(super) fn post(&self, sends: &[SendWr<'_>]) -> Result<(), PostError> {
        self.handle.post(sends)
    }
}

impl QpHandle {
    /// Its number.
    pub(super) fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// What the device granted.
    pub(super) fn caps(&self) -> QpCaps {
        self.caps
    }

    /// To ERR: all that is outstanding is flushed. Allowed from any state.
    ///
    /// # Errors
    ///
    /// The device's.
    pub(super) fn to_error(&self) -> io::Result<()> {
        let mut attr = ffi::ibv_qp_attr { qp_state: ffi::ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
        self.modify(&mut attr, ffi::ibv_qp_attr_mask::IBV_QP_STATE)
    }

    /// Destroys the QP. Only who holds the last reference can: no post or query can be under way.
    ///
    /// # Errors
    ///
    /// The handle and the device's errno: the QP is as it was.
    pub(super) fn destroy(mut self) -> Result<(), (Self, io::Error)> {
        // SAFETY: `raw` came from ibv_create_qp, is live, and `self` is its only handle. When the call succeeds `Drop`
        // leaves it alone, so it is destroyed once; when it fails the QP lives on.
        match check(unsafe { ffi::ibv_destroy_qp(self.raw.as_ptr()) }) {
            Ok(()) => {
                self.destroyed = true;
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// The state that the device has the QP in, as `ibv_qp_state` numbers it.
    ///
    /// # Errors
    ///
    /// The device's.
    pub(super) fn state(&self) -> io::Result<u32> {
        let mut attr = ffi::ibv_qp_attr::default();
        let mut init = EMPTY_INIT;
        let mask = mask_int(ffi::ibv_qp_attr_mask::IBV_QP_STATE);
        // SAFETY: the QP is live until `Drop`; both structs are whole and written during the call only.
        check(unsafe { ffi::ibv_query_qp(self.raw.as_ptr(), &raw mut attr, mask, &raw mut init) })?;
        Ok(attr.qp_state)
    }

    fn init(&self, access: ffi::ibv_access_flags) -> io::Result<()> {
        use ffi::ibv_qp_attr_mask as m;
        let mut attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
            pkey_index: 0,
            port_num: self.port,
            qp_access_flags: access.0,
            ..Default::default()
        };
        self.modify(&mut attr, m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | m::IBV_QP_ACCESS_FLAGS)
    }

    fn ready_to_receive(&self, path: &QpPath, route: &Route) -> io::Result<()> {
        use ffi::ibv_qp_attr_mask as m;
        let global = route.link_layer == LinkLayer::Ethernet;
        let mut attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: mtu_to_raw(path.mtu),
            dest_qp_num: path.remote.qpn.get(),
            rq_psn: path.remote.psn.get(),
            max_dest_rd_atomic: path.rd_atomic.responder,
            min_rnr_timer: path.timers.min_rnr_timer_code,
            ah_attr: ffi::ibv_ah_attr {
                grh: ffi::ibv_global_route {
                    dgid: ffi::ibv_gid { raw: route.remote_gid.0 },
                    flow_label: 0,
                    sgid_index: route.gid_index,
                    hop_limit: HOP_LIMIT,
                    traffic_class: 0,
                },
                dlid: route.remote_lid,
                sl: 0,
                src_path_bits: 0,
                static_rate: 0,
                is_global: u8::from(global),
                port_num: self.port,
            },
            ..Default::default()
        };
        let mask = m::IBV_QP_STATE
            | m::IBV_QP_AV
            | m::IBV_QP_PATH_MTU
            | m::IBV_QP_DEST_QPN
            | m::IBV_QP_RQ_PSN
            | m::IBV_QP_MAX_DEST_RD_ATOMIC
            | m::IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask)
    }

    fn ready_to_send(&self, psn: Psn, timers: QpTimers, rd_atomic: u8) -> io::Result<()> {
        use ffi::ibv_qp_attr_mask as m;
        let mut attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTS,
            sq_psn: psn.get(),
            timeout: timers.ack_timeout_code,
            retry_cnt: timers.retry_cnt,
            rnr_retry: timers.rnr_retry,
            max_rd_atomic: rd_atomic,
            ..Default::default()
        };
        let mask = m::IBV_QP_STATE
            | m::IBV_QP_SQ_PSN
            | m::IBV_QP_TIMEOUT
            | m::IBV_QP_RETRY_CNT
            | m::IBV_QP_RNR_RETRY
            | m::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask)
    }

    fn modify(&self, attr: &mut ffi::ibv_qp_attr, mask: ffi::ibv_qp_attr_mask) -> io::Result<()> {
        // SAFETY: the QP is live until `Drop`; `attr` is read during the call only, and only the fields in `mask`.
        check(unsafe { ffi::ibv_modify_qp(self.raw.as_ptr(), attr, mask_int(mask)) })
    }

    fn post(&self, sends: &[SendWr<'_>]) -> Result<(), PostError> {
        let asked = sends.len();
        if asked == 0 {
            return Ok(());
        }
        if asked > POST_BATCH || !sends.iter().all(|send| self.accepts(&send.data)) {
            let source = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(PostError { posted: 0, asked, source });
        }
        let mut sges = [ffi::ibv_sge { addr: 0, length: 0, lkey: 0 }; POST_BATCH];
        let mut wrs = [const { std::mem::MaybeUninit::<ffi::ibv_send_wr>::uninit() }; POST_BATCH];
        let sge_base = sges.as_mut_ptr();
        let wr_base: *mut ffi::ibv_send_wr = wrs.as_mut_ptr().cast();
        for (position, send) in sends.iter().enumerate() {
            let next = if position + 1 < asked { wr_base.wrapping_add(position + 1) } else { ptr::null_mut() };
            let sge = sge_base.wrapping_add(position);
            let (data, inline) = self.sge(&send.data);
            // SAFETY: position < asked <= POST_BATCH, so this is an element of `sges`, which nothing borrows.
            unsafe { sge.write(data) };
            let signaled = if send.signaled { ffi::ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
            let wr = ffi::ibv_send_wr {
                wr_id: wc::send_id(send.seq),
                next,
                sg_list: sge,
                // A length of 0 stands for 2 GiB on some devices: no SGE at all is the empty message.
                num_sge: c_int::from(data.length != 0),
                opcode: ffi::ibv_wr_opcode::IBV_WR_SEND,
                send_flags: signaled | inline,
                ..Default::default()
            };
            // SAFETY: as above, an element of `wrs`.
            unsafe { wr_base.wrapping_add(position).write(wr) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the QP is live until `Drop`, and `post` is its provider's ibv_post_send. The provider reads the
        // null-terminated chain of `asked` initialised WRs and their SGEs only during the call (ibv_post_send(3)).
        // An inline SGE covers a slice that the caller lends for the call, and the bytes are copied in it. Any other
        // SGE lies in a slot of `send_slabs`, which this QP keeps registered and mapped until it is destroyed.
        let rc = unsafe { (self.post)(self.raw.as_ptr(), wr_base, &raw mut bad) };
        check(rc).map_err(|source| PostError {
            posted: posted_before(bad.addr(), wr_base.addr(), size_of::<ffi::ibv_send_wr>(), asked),
            asked,
            source,
        })
    }

    fn accepts(&self, data: &SendData<'_>) -> bool {
        match data {
            SendData::Inline(bytes) => bytes.len() <= self.caps.inline_bytes as usize,
            SendData::Slab { slab, len } => {
                let owner = self.send_slabs.as_ref().filter(|slabs| slabs.owns((*slab).into()));
                owner.is_some_and(|slabs| *len <= slabs.slab_bytes())
            }
        }
    }

    /// The SGE for `data`, which `accepts` has passed, and the flag that goes with it.
    fn sge(&self, data: &SendData<'_>) -> (ffi::ibv_sge, c_uint) {
        match (data, &self.send_slabs) {
            (SendData::Inline(bytes), _) => {
                let addr = bytes.as_ptr().expose_provenance() as u64;
                let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX); // `accepts` bounds it by a u32
                (ffi::ibv_sge { addr, length, lkey: 0 }, ffi::ibv_send_flags::IBV_SEND_INLINE.0)
            }
            (SendData::Slab { slab, len }, Some(slabs)) => (slabs.sge((*slab).into(), *len), 0),
            // `accepts` has refused it: an empty message stands for what cannot be.
            (SendData::Slab { .. }, None) => (ffi::ibv_sge { addr: 0, length: 0, lkey: 0 }, 0),
        }
    }
}

impl Drop for QpHandle {
    fn drop(&mut self) {
        if self.destroyed {
            return;
        }
        // SAFETY: `raw` came from ibv_create_qp and is destroyed here once: each `Qp<S>` holds an `Arc` of this
        // handle. Async events of it are acknowledged as they are taken, so the call does not wait for ours.
        log_failed_destroy("ibv_destroy_qp", unsafe { ffi::ibv_destroy_qp(self.raw.as_ptr()) });
    }
}

/// Routers that a packet may pass.
const HOP_LIMIT: u8 = 64;

const EMPTY_INIT: ffi::ibv_qp_init_attr = ffi::ibv_qp_init_attr {
    qp_context: ptr::null_mut(),
    send_cq: ptr::null_mut(),
    recv_cq: ptr::null_mut(),
    srq: ptr::null_mut(),
    cap: ffi::ibv_qp_cap { max_send_wr: 0, max_recv_wr: 0, max_send_sge: 0, max_recv_sge: 0, max_inline_data: 0 },
    qp_type: 0,
    sq_sig_all: 0,
};

const fn mtu_to_raw(mtu: Mtu) -> ffi::ibv_mtu {
    match mtu {
        Mtu::B256 => ffi::IBV_MTU_256,
        Mtu::B512 => ffi::IBV_MTU_512,
        Mtu::B1024 => ffi::IBV_MTU_1024,
        Mtu::B2048 => ffi::IBV_MTU_2048,
        Mtu::B4096 => ffi::IBV_MTU_4096,
    }
}

fn mask_int(mask: ffi::ibv_qp_attr_mask) -> c_int {
    c_int::try_from(mask.0).unwrap_or(c_int::MAX)
}

type PostFn = unsafe extern "C" fn(*mut ffi::ibv_qp, *mut ffi::ibv_send_wr, *mut *mut ffi::ibv_send_wr) -> c_int;
