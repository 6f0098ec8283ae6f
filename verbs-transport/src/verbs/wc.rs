//! What a raw completion says. No `unsafe`, and no panic whatever the device wrote.
#![deny(unsafe_code)]

use ibverbs_sys as ffi;

use crate::fabric::{
    RecvSlab, Wc, WcStatus, WrSeq,
    bulk::{BulkWc, Rkey},
};

/// Marks a receive in `wr_id`; the rest is the slab's index. Without it the rest is a [`WrSeq`].
const RECEIVE: u64 = 1 << 63;

/// `wr_id` of the receive into a slab.
pub(super) const fn receive_id(slab: u32) -> u64 {
    RECEIVE | slab as u64
}

/// `wr_id` of a send. The count of WRs on one QP does not reach 2^63.
pub(super) const fn send_id(seq: WrSeq) -> u64 {
    seq.0 & !RECEIVE
}

/// Reads a completion. `slab` gives the token of a receive that was posted; `Err` gives back a `wr_id` that is none of
/// ours, or came before: the CQ cannot be trusted any more.
pub(super) fn read(raw: &ffi::ibv_wc, slab: impl FnOnce(u32) -> Option<RecvSlab>) -> Result<Wc, u64> {
    // On failure only wr_id, status, qp_num and vendor_err are defined (ibv_poll_cq(3)).
    let wr_id = raw.wr_id();
    let qpn = raw.qp_num;
    if wr_id & RECEIVE == 0 {
        let seq = WrSeq(wr_id);
        return Ok(match raw.error() {
            None => Wc::Send { qpn, seq },
            Some((status, vendor_err)) => Wc::SendFailed { qpn, seq, status: status_from_raw(status), vendor_err },
        });
    }
    let slab = u32::try_from(wr_id & !RECEIVE).ok().and_then(slab).ok_or(wr_id)?;
    Ok(match raw.error() {
        None => Wc::Receive { qpn, slab, bytes: u32::try_from(raw.len()).unwrap_or(u32::MAX) },
        Some((status, _)) => Wc::ReceiveFailed { qpn, slab, status: status_from_raw(status) },
    })
}

/// `wr_id` of each receive of a bulk QP: they are all alike.
pub(super) const fn bulk_receive_id() -> u64 {
    RECEIVE
}

/// Reads a completion of a bulk CQ; `kernel_flags`: of a device that numbers `wc_flags` as the kernel does.
pub(super) fn read_bulk(raw: &ffi::ibv_wc, kernel_flags: bool) -> BulkWc {
    let (id, qpn) = (raw.wr_id(), raw.qp_num);
    let failed = raw.error().map(|(status, vendor_err)| (status_from_raw(status), vendor_err));
    if id & RECEIVE == 0 {
        return match failed {
            None => BulkWc::Done { qpn, id },
            Some((status, vendor_err)) => BulkWc::Failed { qpn, id, status, vendor_err },
        };
    }
    // The two share a field, which holds an immediate in network order and a key in the host's. Soft-RoCE marks the key
    // with the kernel's flag, which in user space is that of a good checksum and never set for RC.
    let mark = if kernel_flags { ffi::ibv_wc_flags::IBV_WC_IP_CSUM_OK } else { ffi::ibv_wc_flags::IBV_WC_WITH_INV };
    let invalidated = (raw.wc_flags & mark).0 != 0;
    match (failed, raw.imm_data()) {
        (Some((status, _)), _) => BulkWc::NotifyFailed { qpn, status },
        (None, _) if invalidated => BulkWc::Notified { qpn, imm: 0, bytes: 0, invalidated: Some(Rkey(raw.imm_data)) },
        (None, Some(imm)) => {
            let bytes = u32::try_from(raw.len()).unwrap_or(u32::MAX);
            BulkWc::Notified { qpn, imm: u32::from_be(imm), bytes, invalidated: None }
        }
        // A plain SEND, which no peer of ours makes here.
        (None, None) => BulkWc::NotifyFailed { qpn, status: WcStatus::Other(ffi::ibv_wc_status::IBV_WC_SUCCESS) },
    }
}

const fn status_from_raw(raw: u32) -> WcStatus {
    use ffi::ibv_wc_status as s;
    match raw {
        s::IBV_WC_LOC_LEN_ERR => WcStatus::LocalLength,
        s::IBV_WC_LOC_QP_OP_ERR => WcStatus::LocalQpOperation,
        s::IBV_WC_LOC_PROT_ERR => WcStatus::LocalProtection,
        s::IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
        s::IBV_WC_MW_BIND_ERR => WcStatus::WindowBind,
        s::IBV_WC_REM_INV_REQ_ERR => WcStatus::RemoteInvalidRequest,
        s::IBV_WC_REM_ACCESS_ERR => WcStatus::RemoteAccess,
        s::IBV_WC_REM_OP_ERR => WcStatus::RemoteOperation,
        s::IBV_WC_RETRY_EXC_ERR => WcStatus::RetryExceeded,
        s::IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::RnrRetryExceeded,
        other => WcStatus::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_sends_and_receives_never_meet() {
        assert_eq!(receive_id(0), 1 << 63);
        assert_eq!(receive_id(u32::MAX) & send_id(WrSeq(u64::MAX)), u64::from(u32::MAX));
        assert_eq!(send_id(WrSeq(7)), 7);
    }

    #[test]
    fn a_status_from_the_future_is_a_number_not_a_panic() {
        assert_eq!(status_from_raw(4_000_000_000), WcStatus::Other(4_000_000_000));
        assert_eq!(status_from_raw(5), WcStatus::Flushed);
        assert_eq!(status_from_raw(12), WcStatus::RetryExceeded);
    }
}
