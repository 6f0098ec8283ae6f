//! Type-2 memory windows: rights to a part of a region that come and go by work requests on one QP.
//!
//! A [`BulkWindow`] is bound by [`BulkOp::Bind`](super::bulk::BulkOp::Bind) over exactly the bytes that one peer may
//! reach, on the very QP that this peer uses, and gets a new key each time. It dies by
//! [`BulkOp::LocalInvalidate`](super::bulk::BulkOp::LocalInvalidate) of its owner, by
//! [`BulkOp::SendInvalidate`](super::bulk::BulkOp::SendInvalidate) of that peer, or by being freed.
//!
//! What a window is bound to cannot go before it: while a bind may be in force its region is not deregistered and its QP
//! not destroyed. Both calls refuse, with the reason; a dropped region or QP goes when its last window does.

use std::{fmt, io, sync::Arc};

use verbs_bootstrap::Qpn;

use super::bulk::Rkey;

/// Whether windows are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WindowPolicy {
    /// Where the device has usable ones.
    #[default]
    Auto,
    /// Nowhere.
    Never,
    /// Also where the device is known not to enforce their bounds: for tests of Soft-RoCE alone, where a key lets a peer
    /// into all of the region that the window lies in.
    Always,
}

/// Whether a device's windows are usable, and why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowSupport {
    /// They are.
    Usable,
    /// They are used against better knowledge, see [`WindowPolicy::Always`].
    Forced,
    /// Switched off by [`WindowPolicy::Never`].
    SwitchedOff,
    /// The device has none of type 2B.
    NotType2B,
    /// The device says that it can make none (`max_mw` is 0).
    NoneAtAll,
    /// Soft-RoCE: a window's key opens the whole region, and a QP with a bound window takes 50 s to destroy.
    NotEnforced,
}

impl WindowSupport {
    /// Windows may be allocated.
    pub const fn usable(self) -> bool {
        matches!(self, Self::Usable | Self::Forced)
    }

    /// From what a device says of itself.
    pub(crate) const fn judge(policy: WindowPolicy, type_2b: bool, most: u32, enforced: bool) -> Self {
        match (policy, type_2b, most, enforced) {
            (WindowPolicy::Never, ..) => Self::SwitchedOff,
            (_, false, ..) => Self::NotType2B,
            (_, _, 0, _) => Self::NoneAtAll,
            (_, _, _, true) => Self::Usable,
            (WindowPolicy::Always, ..) => Self::Forced,
            (WindowPolicy::Auto, ..) => Self::NotEnforced,
        }
    }
}

impl fmt::Display for WindowSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Usable => "usable",
            Self::Forced => "used by configuration, although the device does not enforce their bounds",
            Self::SwitchedOff => "switched off by configuration",
            Self::NotType2B => "the device has none of type 2B",
            Self::NoneAtAll => "the device can make none (max_mw is 0)",
            Self::NotEnforced => "the device (Soft-RoCE) does not enforce their bounds",
        })
    }
}

/// A memory window. Dropping it frees it: whatever it gave a right to, nobody has it any more.
pub trait BulkWindow: Send + Sync + fmt::Debug + Sized + 'static {
    /// The key for the peer: from the polled completion of the bind until an invalidation is posted or noticed.
    fn rkey(&self) -> Option<Rkey>;

    /// Whether it is bound, or may be: a bind or an invalidation whose completion was not polled counts.
    fn is_bound(&self) -> bool;

    /// Frees it, bound or not: from then on its key opens nothing.
    ///
    /// # Errors
    ///
    /// The window as it was, and the device's errno. What it is bound to must stay.
    fn free(self) -> Result<(), (Self, io::Error)>;
}

/// No window could be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocWindowError {
    /// See [`BulkLimits::windows`](super::bulk::BulkLimits::windows): use a registration for each right instead.
    #[error("no memory windows: {0}")]
    NotUsable(WindowSupport),
    /// The device refused: it has no more, say.
    #[error("ibv_alloc_mw failed: {0}")]
    Device(#[source] io::Error),
}

/// A bulk QP was not destroyed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DestroyQpError {
    /// Somebody holds it, a connect under way for example: try again when that has ended.
    #[error("the QP is still in use")]
    InUse,
    /// Windows are bound on it, or may be: invalidate them and poll that completion, or free them, and try again.
    #[error("{windows} memory windows are bound on qp {qpn}: invalidate or free them first")]
    WindowsBound {
        /// The QP.
        qpn: Qpn,
        /// How many.
        windows: usize,
    },
    /// The device would not. Every region that the QP's work requests name must live as long as the process.
    #[error("ibv_destroy_qp failed: {0}")]
    Device(#[source] io::Error),
}

/// Deregisters a region unless windows are bound to it, each of which holds a reference.
pub(crate) fn give_up_unless_bound<M>(
    mr: &mut Arc<M>,
    give_up: impl FnOnce(&mut M) -> io::Result<()>,
) -> io::Result<()> {
    if let Some(mr) = Arc::get_mut(mr) {
        return give_up(mr);
    }
    let windows = Arc::strong_count(mr) - 1;
    let why = format!("{windows} memory windows are bound to the region: invalidate or free them first");
    Err(io::Error::new(io::ErrorKind::ResourceBusy, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_used_where_they_keep_peers_out() {
        use {WindowPolicy as P, WindowSupport as S};
        let cases = [
            (P::Auto, true, 8, true, S::Usable),
            (P::Auto, true, 8, false, S::NotEnforced),
            (P::Always, true, 8, false, S::Forced),
            (P::Always, true, 8, true, S::Usable),
            (P::Always, false, 8, true, S::NotType2B),
            (P::Auto, true, 0, true, S::NoneAtAll),
            (P::Never, true, 8, true, S::SwitchedOff),
        ];
        for (policy, type_2b, most, enforced, want) in cases {
            let got = S::judge(policy, type_2b, most, enforced);
            assert_eq!((got, got.usable()), (want, matches!(want, S::Usable | S::Forced)), "{policy:?}");
        }
    }
}
