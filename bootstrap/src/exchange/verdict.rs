//! What the exchange decides: each variant says what its caller does next.

use std::time::Instant;

use crate::{
    status::Refusal,
    types::{Generation, Incarnation},
};

/// What [`Exchange::start_dial`](crate::Exchange::start_dial) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialStart {
    /// Dial now, with these numbers in the hello. Report the end with exactly one call of
    /// [`Exchange::on_reply`](crate::Exchange::on_reply) or [`Exchange::on_dial_failed`](crate::Exchange::on_dial_failed).
    Go {
        /// The epoch that dials.
        generation: Generation,
        /// For [`Offer::echoed_generation`](crate::Offer::echoed_generation).
        echoed: Generation,
        /// For [`Offer::to_incarnation`](crate::Offer::to_incarnation).
        target: Incarnation,
    },
    /// Back-off: ask again then. An inbound hello may connect the epoch meanwhile.
    Wait {
        /// When.
        until: Instant,
    },
    /// A dial to this peer is still in flight; its end will tell.
    InFlight,
    /// The epoch is connected, or being connected by the accepting half.
    Up,
    /// No epoch: call [`Exchange::begin_epoch`](crate::Exchange::begin_epoch) first.
    Idle,
    /// Nobody registered this peer and it never proved itself: no incarnation to ask for.
    Unknown,
}

/// What to do with a hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HelloVerdict {
    /// Bring the QP of this epoch up to the hello, then answer with it. Make the QP first if the epoch is `fresh`.
    Join {
        /// The epoch.
        generation: Generation,
        /// The epoch was begun by this hello.
        fresh: bool,
    },
    /// The peer threw its end away. Retire the epoch `retired` (frames fail, QP to ERROR), make a QP for `generation`,
    /// bring it up to the hello, answer with it.
    Replace {
        /// The fresh epoch, begun by this hello.
        generation: Generation,
        /// The epoch that ended.
        retired: Generation,
    },
    /// This epoch is connected, or being connected, to exactly that QP: once it is up, answer with the same reply.
    Repeat {
        /// The epoch.
        generation: Generation,
    },
    /// Answer no. Nothing has changed.
    Refuse(Refusal),
}

/// What to do with a reply to this side's dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyVerdict {
    /// Bring the QP of this epoch up to the reply, then send READY.
    Connect {
        /// The epoch.
        generation: Generation,
    },
    /// The accepting half has this epoch connected, or is connecting it: the dial has succeeded. Send READY once the
    /// QP is up, or drop the socket: it is redundant.
    AlreadyUp {
        /// The epoch.
        generation: Generation,
    },
    /// The peer threw away the QP that this epoch is bound to and answered with a newer one, which a bound QP cannot
    /// meet. The epoch is over: retire it, begin another and dial.
    Retire {
        /// The epoch that ended.
        retired: Generation,
    },
    /// Not for the epoch at hand, or not from the peer that was meant: drop the socket. If the epoch at hand is still
    /// unconnected, ask [`Exchange::start_dial`](crate::Exchange::start_dial) again.
    Ignore,
}

/// What a failed dial means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialFailed {
    /// The accepting half connected this very epoch meanwhile: nothing failed.
    CountsAsSuccess {
        /// The epoch.
        generation: Generation,
    },
    /// The epoch is over: retire it. Another may begin at once; its dial waits until `retry_at`.
    EpochOver {
        /// The epoch that ended.
        retired: Generation,
        /// When the next dial may start.
        retry_at: Instant,
    },
    /// The dial's epoch was over before. If the epoch at hand is still unconnected, ask [`Exchange::start_dial`](crate::Exchange::start_dial).
    Stale,
}

/// What a registration means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterVerdict {
    /// The same run as before, or the first that is known: the epoch stays, the back-off is cleared.
    Keep,
    /// A run that a later one has replaced: keep the address that is known, nothing changes.
    Superseded,
    /// Another run: retire this epoch, if there is one. The back-off is cleared.
    Retire {
        /// The epoch that ended.
        retired: Option<Generation>,
    },
}
