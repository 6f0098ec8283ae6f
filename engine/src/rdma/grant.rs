//! One grant: the source's permission for one operation of one peer over one QP. Pure: events in, one step out.
//!
//! ```text
//! unbound ─bind─► binding ─bound─► published ─receipt─► revoking ─revoked─► dead
//!    │               │                 │                  ▲    │
//!    │               └──── failure ────┴──── failure ─────┘    └─ failure: the QP goes first
//!    └──── failure: nothing was bound ───────────────────────────────────────────► dead
//! ```
//!
//! Invariants, which `grant_tests.rs` checks for every sequence of events: a grant is published once at most, and only
//! after its bind succeeded; what it covers is released once, last, when no device can reach it any more; only the right
//! receipt on the right QP makes it [`Ending::Used`]; a window that the peer's marker has invalidated is not invalidated
//! again; nothing happens to a dead grant.

/// How a grant gives its right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A registration of exactly the granted bytes; deregistering it is the revocation.
    Registration,
    /// A type-2 window over them on that very QP; the peer's marker invalidates it.
    Window,
}

/// What the peer's marker must look like when it comes out of the receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marker {
    /// A SEND with this immediate: the low half of the generation.
    Immediate(u32),
    /// A SEND with invalidate of this key.
    Invalidated(u32),
}

/// What happens to a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Its bind, or registration, is about to begin.
    Bind,
    /// It has succeeded, with this key.
    Bound {
        /// The key for the peer.
        key: u32,
    },
    /// It has not. Nothing is bound then; a failed bind on a QP has put that QP into ERROR.
    BindFailed,
    /// A marker came out of the receive queue of that QP.
    Receipt {
        /// Its QP.
        qpn: u32,
        /// What it was.
        marker: Marker,
    },
    /// It is to end without a receipt: deadline, broken connection, close, a breach of the protocol.
    Abandon {
        /// The QP still takes work requests, so that a window may be invalidated through it.
        usable: bool,
    },
    /// The window is invalidated by ourselves, or the registration is given up.
    Revoked,
    /// That failed.
    RevokeFailed,
    /// The QP is destroyed: the device has nothing of it any more.
    QpGone,
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing: wait.
    Wait,
    /// Post the bind, or register.
    Bind,
    /// Tell the peer.
    Publish,
    /// Give the registration up, or free the window.
    Unbind,
    /// Post `LOCAL_INV`, and wait for its completion.
    Invalidate,
    /// QP to ERROR, drain, destroy.
    DestroyQp,
    /// Let range, staging and budget go; on [`Ending::Used`] a WRITE is committed first.
    Release(Ending),
}

/// How a grant ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The receipt came: the peer has done what it wanted, and can do no more.
    Used,
    /// It did not. Whether the peer has used the grant, nobody knows here.
    Abandoned,
}

/// Where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Decided, and nothing is bound.
    Unbound,
    /// The device has been asked.
    Binding,
    /// The peer may use it.
    Published,
    /// Its end is certain, and not through.
    Revoking(Revoking),
    /// Nothing of it is left.
    Dead,
}

/// How far the end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Revoking {
    /// `LOCAL_INV` is under way.
    Invalidating,
    /// The QP is going.
    Destroying {
        /// The receipt had come before.
        used: bool,
    },
    /// The registration is being given up, or the window freed.
    Unbinding {
        /// The receipt had come before.
        used: bool,
        /// The QP is gone already, so that there is no further barrier to fall back on.
        qp_gone: bool,
    },
}

/// One grant's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    form: Form,
    generation: u64,
    qpn: u32,
    key: Option<u32>,
    state: State,
}

impl Grant {
    /// A grant for one use over `qpn`.
    pub(crate) fn new(form: Form, generation: u64, qpn: u32) -> Self {
        Self { form, generation, qpn, key: None, state: State::Unbound }
    }

    #[cfg(test)]
    pub(crate) fn state(&self) -> State {
        self.state
    }

    pub(crate) fn is_dead(self) -> bool {
        self.state == State::Dead
    }

    /// The key, once bound.
    pub(crate) fn key(&self) -> Option<u32> {
        self.key
    }

    /// The only marker that ends it well; `None` before it is bound.
    pub(crate) fn marker(&self) -> Option<Marker> {
        Some(match self.form {
            Form::Registration => Marker::Immediate(marker_of(self.generation)),
            Form::Window => Marker::Invalidated(self.key?),
        })
    }

    /// Takes an event; what is to be done.
    pub(crate) fn on(&mut self, event: Event) -> Step {
        let (state, step) = self.decide(event);
        if let (State::Binding, Event::Bound { key }) = (self.state, event) {
            self.key = Some(key);
        }
        self.state = state;
        step
    }

    /// One line a case, in the order of a life: merging those that do the same would hide it.
    #[allow(clippy::match_same_arms)]
    fn decide(&self, event: Event) -> (State, Step) {
        use Event as E;
        use State as S;
        let destroying = |used| (S::Revoking(Revoking::Destroying { used }), Step::DestroyQp);
        let unbinding = |used, qp_gone| (S::Revoking(Revoking::Unbinding { used, qp_gone }), Step::Unbind);
        let dead = |ending| (S::Dead, Step::Release(ending));
        let stay = (self.state, Step::Wait);
        match (self.state, event) {
            // A dead grant answers nothing: a second use, a late receipt, a late completion.
            (S::Dead, _) => stay,

            (S::Unbound, E::Bind) => (S::Binding, Step::Bind),
            (S::Unbound, E::Abandon { .. } | E::QpGone) => dead(Ending::Abandoned),
            // A marker before anything was granted: the peer breaks the protocol, and nothing is bound.
            (S::Unbound, E::Receipt { .. }) => dead(Ending::Abandoned),
            (S::Unbound, _) => stay,

            (S::Binding, E::Bound { .. }) => (S::Published, Step::Publish),
            // A registration that failed is none. A bind that failed has taken the QP with it.
            (S::Binding, E::BindFailed) => match self.form {
                Form::Registration => dead(Ending::Abandoned),
                Form::Window => destroying(false),
            },
            // The bind may still complete: only the end of the QP is certain.
            (S::Binding, E::Abandon { .. } | E::Receipt { .. }) => destroying(false),
            (S::Binding, E::QpGone) => unbinding(false, true),
            (S::Binding, _) => stay,

            (S::Published, E::Receipt { qpn, marker }) => {
                if qpn != self.qpn || Some(marker) != self.marker() {
                    return destroying(false);
                }
                match self.form {
                    Form::Registration => unbinding(true, false),
                    // The peer's own invalidation was the end of it.
                    Form::Window => dead(Ending::Used),
                }
            }
            (S::Published, E::Abandon { usable }) => match self.form {
                Form::Window if usable => (S::Revoking(Revoking::Invalidating), Step::Invalidate),
                _ => destroying(false),
            },
            (S::Published, E::QpGone) => unbinding(false, true),
            (S::Published, _) => stay,

            (S::Revoking(Revoking::Invalidating), E::Revoked) => dead(Ending::Abandoned),
            // The peer's marker may have been faster; then the QP is in ERROR now, or soon.
            (
                S::Revoking(Revoking::Invalidating),
                E::RevokeFailed | E::Receipt { .. } | E::Abandon { usable: false },
            ) => destroying(false),
            (S::Revoking(Revoking::Invalidating), E::QpGone) => unbinding(false, true),
            (S::Revoking(Revoking::Destroying { used }), E::QpGone) => unbinding(used, true),
            (S::Revoking(Revoking::Unbinding { used, .. }), E::Revoked) => {
                dead(if used { Ending::Used } else { Ending::Abandoned })
            }
            // It cannot be given up while the QP may use it? Then the QP goes, and it is tried again.
            (S::Revoking(Revoking::Unbinding { used, qp_gone: false }), E::RevokeFailed) => destroying(used),
            (S::Revoking(Revoking::Unbinding { used, qp_gone: false }), E::QpGone) => {
                (S::Revoking(Revoking::Unbinding { used, qp_gone: true }), Step::Wait)
            }
            // Without a QP no peer reaches it; it is kept, and tried again.
            (S::Revoking(Revoking::Unbinding { used, qp_gone: true }), E::RevokeFailed) => unbinding(used, true),
            (S::Revoking(_), _) => stay,
        }
    }
}

/// The immediate of a marker: what tells it from that of an earlier grant on the same QP.
pub(crate) fn marker_of(generation: u64) -> u32 {
    let [.., a, b, c, d] = generation.to_be_bytes();
    // The low half; 2^32 operations of one source lie between two that are equal.
    u32::from_be_bytes([a, b, c, d])
}

#[cfg(test)]
#[path = "grant_tests.rs"]
mod tests;
