//! What a QP posts for bulk memory: READ, WRITE and immediates, and receives without memory.

use std::{ffi::c_int, io, mem::MaybeUninit, ptr};

use ibverbs_sys as ffi;

use super::{
    check, missing_call,
    qp::{Qp, QpHandle, Rts},
    region::DeviceRegion,
    srq::posted_before,
    wc,
    window::bind_info,
};
use crate::fabric::{
    POST_BATCH, PostError,
    bulk::{BULK_ID_END, BulkOp, BulkWr, Local, Remote, Rkey},
};

type Wr<'a> = BulkWr<'a, DeviceRegion>;

impl Qp<Rts> {
    /// Posts up to [`POST_BATCH`] work requests as one chain.
    ///
    /// # Errors
    ///
    /// `InvalidInput` and nothing posted for more WRs, a range outside its region, a region of another PD, or an id out
    /// of range; else the device's, with the WRs ahead of the refused one live.
    pub(super) fn post_bulk(&self, wrs: &[Wr<'_>]) -> Result<(), PostError> {
        let handle = self.handle();
        let asked = wrs.len();
        if asked == 0 {
            return Ok(());
        }
        let invalid = || PostError { posted: 0, asked, source: io::Error::from(io::ErrorKind::InvalidInput) };
        if asked > POST_BATCH {
            return Err(invalid());
        }
        let mut sges = [ffi::ibv_sge { addr: 0, length: 0, lkey: 0 }; POST_BATCH];
        let mut raw_wrs = [const { MaybeUninit::<ffi::ibv_send_wr>::uninit() }; POST_BATCH];
        let sge_base = sges.as_mut_ptr();
        let wr_base: *mut ffi::ibv_send_wr = raw_wrs.as_mut_ptr().cast();
        for (position, wr) in wrs.iter().enumerate() {
            let data = handle.bulk_sge(wr).ok_or_else(invalid)?;
            let sge = sge_base.wrapping_add(position);
            // SAFETY: position < asked <= POST_BATCH, so this is an element of `sges`, which nothing borrows.
            unsafe { sge.write(data) };
            let next = if position + 1 < asked { wr_base.wrapping_add(position + 1) } else { ptr::null_mut() };
            let mut raw = raw_wr(wr, sge, next, data.length);
            if let BulkOp::Bind { window, region, range, access } = &wr.op {
                let found = window.binding(&handle.pd).filter(|_| region.is_of(&handle.pd));
                let (mw, rkey) = found.ok_or_else(invalid)?;
                let bind_info = bind_info(region, range, *access).ok_or_else(invalid)?;
                let bind_mw = ffi::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 { mw, rkey, bind_info };
                raw.__bindgen_anon_2 = ffi::ibv_send_wr__bindgen_ty_4 { bind_mw };
            }
            // SAFETY: as above, an element of `raw_wrs`.
            unsafe { wr_base.wrapping_add(position).write(raw) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the QP is live until `Drop`, and `post` is its provider's ibv_post_send. The provider reads the
        // null-terminated chain of `asked` initialised WRs and their SGEs only during the call (ibv_post_send(3)). Each
        // SGE lies in a region of this QP's PD that is registered now, since the caller lends it. Should that region go
        // before the completion, its deregistration ends the device's access before the memory can go (see
        // `DeviceRegion`); no inline data is used. Where remote bytes are is the peer's memory, which its key guards. A bind's
        // window and MR are live, since the caller lends both; what they give a right to is within the MR, and the book
        // keeps both from going while the right may be in force.
        let rc = unsafe { (handle.post)(handle.raw.as_ptr(), wr_base, &raw mut bad) };
        check(rc).map_err(|source| PostError {
            posted: posted_before(bad.addr(), wr_base.addr(), size_of::<ffi::ibv_send_wr>(), asked),
            asked,
            source,
        })
    }
}

impl QpHandle {
    /// Posts `receives` receives without memory in chains of [`POST_BATCH`].
    ///
    /// # Errors
    ///
    /// The device refused one: those before it are live.
    pub(super) fn post_empty_receives(&self, receives: u32) -> Result<(), PostError> {
        let asked = receives as usize;
        let failed = |posted, source| PostError { posted, asked, source };
        let post = self.pd.context().ops().post_recv.ok_or_else(|| failed(0, missing_call("post_recv")))?;
        let mut posted = 0;
        while posted < asked {
            let count = (asked - posted).min(POST_BATCH);
            let empty = ffi::ibv_recv_wr {
                wr_id: wc::bulk_receive_id(),
                next: ptr::null_mut(),
                sg_list: ptr::null_mut(),
                num_sge: 0,
            };
            let mut wrs = [empty; POST_BATCH];
            let base = wrs.as_mut_ptr();
            for position in 0..count - 1 {
                let wr = ffi::ibv_recv_wr { next: base.wrapping_add(position + 1), ..empty };
                // SAFETY: position < count <= POST_BATCH, so this is an element of `wrs`, which nothing borrows.
                unsafe { base.wrapping_add(position).write(wr) };
            }
            let mut bad = ptr::null_mut();
            // SAFETY: the QP is live until `Drop`, was made with a receive queue of its own, and `post` is its
            // provider's ibv_post_recv. The chain of `count` WRs is null-terminated and read during the call only; they
            // name no memory.
            let rc = unsafe { post(self.raw.as_ptr(), base, &raw mut bad) };
            match check(rc) {
                Ok(()) => posted += count,
                Err(source) => {
                    let live = posted_before(bad.addr(), base.addr(), size_of::<ffi::ibv_recv_wr>(), count);
                    return Err(failed(posted + live, source));
                }
            }
        }
        Ok(())
    }

    /// The local part of a WR; `None` when it may not be posted.
    fn bulk_sge(&self, wr: &Wr<'_>) -> Option<ffi::ibv_sge> {
        if wr.id >= BULK_ID_END {
            return None;
        }
        match &wr.op {
            BulkOp::Read { local, .. } | BulkOp::Write { local, .. } | BulkOp::WriteImm { local, .. } => {
                let Local { region, offset, len } = *local;
                if region.is_of(&self.pd) { region.sge(offset, len) } else { None }
            }
            BulkOp::SendImm { .. }
            | BulkOp::SendInvalidate { .. }
            | BulkOp::Bind { .. }
            | BulkOp::LocalInvalidate { .. } => Some(ffi::ibv_sge { addr: 0, length: 0, lkey: 0 }),
        }
    }
}

fn raw_wr(wr: &Wr<'_>, sge: *mut ffi::ibv_sge, next: *mut ffi::ibv_send_wr, length: u32) -> ffi::ibv_send_wr {
    use ffi::ibv_wr_opcode as op;
    let nowhere = Remote { addr: 0, rkey: Rkey(0) };
    let imm_data = |imm: u32| ffi::ibv_send_wr__bindgen_ty_1 { imm_data: imm.to_be() };
    let invalidate_rkey = |rkey: Rkey| ffi::ibv_send_wr__bindgen_ty_1 { invalidate_rkey: rkey.0 };
    let (opcode, remote, extra) = match wr.op {
        BulkOp::Read { remote, .. } => (op::IBV_WR_RDMA_READ, remote, imm_data(0)),
        BulkOp::Write { remote, .. } => (op::IBV_WR_RDMA_WRITE, remote, imm_data(0)),
        BulkOp::WriteImm { remote, imm, .. } => (op::IBV_WR_RDMA_WRITE_WITH_IMM, remote, imm_data(imm)),
        BulkOp::SendImm { imm } => (op::IBV_WR_SEND_WITH_IMM, nowhere, imm_data(imm)),
        BulkOp::SendInvalidate { rkey } => (op::IBV_WR_SEND_WITH_INV, nowhere, invalidate_rkey(rkey)),
        BulkOp::Bind { .. } => (op::IBV_WR_BIND_MW, nowhere, imm_data(0)),
        BulkOp::LocalInvalidate { rkey } => (op::IBV_WR_LOCAL_INV, nowhere, invalidate_rkey(rkey)),
    };
    let mut send_flags = 0;
    if wr.signaled {
        send_flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    if wr.fence {
        send_flags |= ffi::ibv_send_flags::IBV_SEND_FENCE.0;
    }
    let rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: remote.addr, rkey: remote.rkey.0 };
    ffi::ibv_send_wr {
        wr_id: wr.id,
        next,
        sg_list: sge,
        // A length of 0 stands for 2 GiB on some devices: no SGE at all is "no bytes".
        num_sge: c_int::from(length != 0),
        opcode,
        send_flags,
        __bindgen_anon_1: extra,
        wr: ffi::ibv_send_wr__bindgen_ty_2 { rdma },
        ..Default::default()
    }
}
