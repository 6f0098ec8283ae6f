//! Shared receive queues.

use std::{
    ffi::c_int,
    io,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ibverbs_sys as ffi;

use super::{check, log_failed_destroy, missing_call, mr::SlabMr, pd::Pd, wc};
use crate::fabric::{POST_BATCH, PostError, RecvSlab};

/// A shared receive queue together with the memory that its receives point into.
pub(crate) struct Srq {
    raw: NonNull<ffi::ibv_srq>,
    post: PostFn,
    slabs: Arc<SlabMr>,
    /// For each slab, whether the device has it. A provider that completes a receive twice must not make two tokens.
    posted: Box<[AtomicBool]>,
    _pd: Arc<Pd>,
}

// SAFETY: ibv_post_srq_recv and ibv_modify_srq are thread-safe (the provider locks the SRQ), and an SRQ is not bound
// to the thread that made it.
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl Srq {
    /// Makes an SRQ with room for every slab of `slabs`, one SGE each.
    ///
    /// # Errors
    ///
    /// The device's: `EINVAL` above its limit, `ENOMEM`.
    pub(super) fn new(pd: &Arc<Pd>, slabs: Arc<SlabMr>) -> io::Result<Self> {
        let post = pd.context().ops().post_srq_recv.ok_or_else(|| missing_call("post_srq_recv"))?;
        let mut init = ffi::ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ffi::ibv_srq_attr { max_wr: slabs.slabs(), max_sge: 1, srq_limit: 0 },
        };
        // SAFETY: the PD is live, and the `Arc` kept below keeps it so until the SRQ is gone; `init` is read and
        // written during the call only.
        let raw = unsafe { ffi::ibv_create_srq(pd.as_ptr(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        let posted = (0..slabs.slabs()).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { raw, post, slabs, posted, _pd: Arc::clone(pd) })
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::ibv_srq {
        self.raw.as_ptr()
    }

    /// Posts `slabs` in chains of [`POST_BATCH`], front first; what was posted leaves the vector. It can never hold
    /// more than there are slots in the SRQ, for each slab exists once.
    ///
    /// # Errors
    ///
    /// The device refused one; that one and those behind it stay in `slabs`.
    pub(super) fn post(&self, slabs: &mut Vec<RecvSlab>) -> Result<(), PostError> {
        let asked = slabs.len();
        let mut posted = 0;
        let mut result = Ok(());
        for chain in slabs.chunks(POST_BATCH) {
            let (live, outcome) = self.post_chain(chain);
            posted += live;
            if let Err(source) = outcome {
                result = Err(PostError { posted, asked, source });
                break;
            }
        }
        // These tokens end here and are minted again when their completions are polled.
        slabs.drain(..posted);
        result
    }

    /// Posts up to [`POST_BATCH`] receives; says how many are live, and what went wrong.
    fn post_chain(&self, chain: &[RecvSlab]) -> (usize, io::Result<()>) {
        let mut sges = [ffi::ibv_sge { addr: 0, length: 0, lkey: 0 }; POST_BATCH];
        let mut wrs = [EMPTY_WR; POST_BATCH];
        let count = chain.len().min(POST_BATCH);
        let sge_base = sges.as_mut_ptr();
        let wr_base = wrs.as_mut_ptr();
        if !chain.iter().all(|slab| self.slabs.owns(slab.into())) {
            return (0, Err(io::Error::new(io::ErrorKind::InvalidInput, "a slab of another fabric")));
        }
        for (position, slab) in chain.iter().take(count).enumerate() {
            let next = if position + 1 < count { wr_base.wrapping_add(position + 1) } else { ptr::null_mut() };
            let sge = sge_base.wrapping_add(position);
            // SAFETY: position < count <= POST_BATCH, so this is an element of `sges`, which nothing borrows.
            unsafe { sge.write(self.slabs.sge(slab.into(), self.slabs.slab_bytes())) };
            let wr = ffi::ibv_recv_wr { wr_id: wc::receive_id(slab.index()), next, sg_list: sge, num_sge: 1 };
            // SAFETY: as above, an element of `wrs`.
            unsafe { wr_base.wrapping_add(position).write(wr) };
        }
        if count == 0 {
            return (0, Ok(()));
        }
        // Before the post: a completion may be polled by another thread while it runs. The barrier before the
        // provider's doorbell, and the one after its CQE, order these stores before that thread's swap.
        self.mark(chain, true);
        let mut bad = ptr::null_mut();
        // SAFETY: the SRQ is live until `Drop`, `post` is its provider's ibv_post_srq_recv. The chain of `count` WRs
        // is null-terminated; WRs and SGEs are read during the call only. Each SGE is one whole slab of an MR that
        // `self` keeps registered until the SRQ is destroyed, and `chain` holds that slab's only token: after the
        // call `post` drops it, so no one reads the slab until a completion mints it again.
        let rc = unsafe { (self.post)(self.raw.as_ptr(), wr_base, &raw mut bad) };
        match check(rc) {
            Ok(()) => (count, Ok(())),
            Err(error) => {
                let live = posted_before(bad.addr(), wr_base.addr(), size_of::<ffi::ibv_recv_wr>(), count);
                self.mark(&chain[live..], false);
                (live, Err(error))
            }
        }
    }

    fn mark(&self, slabs: &[RecvSlab], posted: bool) {
        for flag in slabs.iter().filter_map(|slab| self.posted.get(slab.index() as usize)) {
            flag.store(posted, Ordering::Relaxed);
        }
    }

    /// The token of a slab that the device has completed; `None` when it was not posted.
    pub(super) fn complete(&self, index: u32) -> Option<RecvSlab> {
        let was_posted = self.posted.get(index as usize)?.swap(false, Ordering::Relaxed);
        was_posted.then(|| RecvSlab::mint_in(self.slabs.pool(), index))
    }

    /// Arms the limit event: it fires once, when fewer than `receives` are posted.
    ///
    /// # Errors
    ///
    /// The device's.
    pub(super) fn arm_limit(&self, receives: u32) -> io::Result<()> {
        let mut attr = ffi::ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: receives };
        let mask = c_int::try_from(ffi::IBV_SRQ_LIMIT).unwrap_or(c_int::MAX);
        // SAFETY: the SRQ is live until `Drop`; `attr` is read during the call only, and only the field in `mask`.
        check(unsafe { ffi::ibv_modify_srq(self.raw.as_ptr(), &raw mut attr, mask) })
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: `raw` came from ibv_create_srq and is destroyed here once. The QPs on it hold an `Arc` of `self`
        // and are gone; the receives' memory goes after this, since `slabs` is a field.
        log_failed_destroy("ibv_destroy_srq", unsafe { ffi::ibv_destroy_srq(self.raw.as_ptr()) });
    }
}

/// How many WRs of a chain in one array are live, when a post failed with `bad_wr` at address `bad`. Without one the
/// device took them all and failed after that (Soft-RoCE does, at the doorbell): they stay in its ring.
pub(super) fn posted_before(bad: usize, base: usize, wr_bytes: usize, count: usize) -> usize {
    match bad {
        0 => count,
        bad => (bad.wrapping_sub(base) / wr_bytes).min(count),
    }
}

const EMPTY_WR: ffi::ibv_recv_wr =
    ffi::ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };

type PostFn = unsafe extern "C" fn(*mut ffi::ibv_srq, *mut ffi::ibv_recv_wr, *mut *mut ffi::ibv_recv_wr) -> c_int;

#[cfg(test)]
mod tests {
    use super::posted_before;

    #[test]
    fn the_bad_wr_tells_how_many_are_live() {
        assert_eq!(posted_before(1000, 1000, 32, 16), 0);
        assert_eq!(posted_before(1000 + 5 * 32, 1000, 32, 16), 5);
        assert_eq!(posted_before(0, 1000, 32, 16), 16, "no bad WR: the doorbell failed, the ring has them all");
        assert_eq!(posted_before(8, 1000, 32, 16), 16, "a pointer from nowhere: assume the worst");
    }
}
