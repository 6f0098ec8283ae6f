//! PUT: bytes of a region of ours into a peer's, by RDMA WRITE; and telling the peer.
//!
//! The end of a PUT frees the local bytes and says nothing about what the peer's software can see. To tell the peer:
//!
//! - [`Bulk::put_and_notify`]: the notification arrives when all bytes are placed;
//! - [`Bulk::put`], then [`Bulk::notify`]: it arrives behind every PUT to that peer that had ended before;
//! - [`Bulk::put`], then a [`Bulk::get`] of a byte of the written range (whose region is mapped as a source, too): when the
//!   GET has ended, the bytes are placed, and the peer may be told by any other way, a frame say.
//!
//! A frame alone is no such way: frames and bulk use different QPs, and no order holds between them.

use verbs_transport::{
    InstanceId,
    fabric::bulk::{BulkFabric, Rkey},
};

use crate::{
    bulk::{Bulk, Request, Transfer},
    proto::{region::RegionId, transfer::Kind},
    region::RemoteRange,
};

impl<F: BulkFabric> Bulk<F> {
    /// Writes bytes of region `from`, from `offset` on, into `to`, which the peer mapped with
    /// [`Access::PUT_TARGET`](verbs_transport::fabric::bulk::Access::PUT_TARGET). As [`Bulk::get`] otherwise.
    ///
    /// # Errors
    ///
    /// [`TransferError`](crate::bulk::TransferError).
    pub fn put(&self, peer: InstanceId, from: RegionId, offset: u64, to: RemoteRange) -> Transfer<F> {
        self.transfer(Request { peer, kind: Kind::Put, local: Some((from, offset)), remote: to, value: 0 })
    }

    /// The same, and the peer gets a [`Notification`](crate::bulk::Notification) with `value` (31 bits) when all bytes are
    /// placed. Waits while the peer's window for notifications is spent.
    ///
    /// # Errors
    ///
    /// [`TransferError`](crate::bulk::TransferError).
    pub fn put_and_notify(
        &self,
        peer: InstanceId,
        from: RegionId,
        offset: u64,
        to: RemoteRange,
        value: u32,
    ) -> Transfer<F> {
        self.transfer(Request { peer, kind: Kind::PutAndNotify, local: Some((from, offset)), remote: to, value })
    }

    /// Only the notification, behind every PUT to that peer that has ended.
    ///
    /// # Errors
    ///
    /// [`TransferError`](crate::bulk::TransferError).
    pub fn notify(&self, peer: InstanceId, value: u32) -> Transfer<F> {
        let remote = RemoteRange { addr: 0, rkey: Rkey(0), len: 0 };
        self.transfer(Request { peer, kind: Kind::Notify, local: None, remote, value })
    }
}
