//! GET: a peer's bytes into a region of ours, by RDMA READ. The peer's CPU has no part in it.

use verbs_transport::{InstanceId, fabric::bulk::BulkFabric};

use crate::{
    bulk::{Bulk, Request, Transfer},
    proto::{region::RegionId, transfer::Kind},
    region::RemoteRange,
};

impl<F: BulkFabric> Bulk<F> {
    /// Reads `from` into region `into`, from `offset` on. The region must have been mapped with
    /// [`Access::DESTINATION`](verbs_transport::fabric::bulk::Access::DESTINATION).
    ///
    /// Nothing happens before the future is first polled. From then on the GET runs by itself, whether the future is
    /// polled, forgotten or dropped; the region stays in use until it has ended. When it succeeds, all bytes are there,
    /// and nothing remains to be done on either side. When it does not, the destination holds anything. No order holds
    /// among GETs, nor between a GET and any frame. A range of no bytes succeeds at once.
    ///
    /// # Errors
    ///
    /// [`TransferError`](crate::bulk::TransferError).
    pub fn get(&self, peer: InstanceId, from: RemoteRange, into: RegionId, offset: u64) -> Transfer<F> {
        self.transfer(Request { peer, kind: Kind::Get, local: Some((into, offset)), remote: from, value: 0 })
    }
}
