//! Why a side refuses, and where in the exchange something happened.

use std::fmt;

/// The status byte of a refusal. The numbers are part of the wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Status {
    /// 1: another instance lives at this address. Look the peer up again.
    WrongInstance,
    /// 2: the run that is meant, or the run that asks, is over. Look the peer up again.
    StaleIncarnation,
    /// 3: the asking side's epoch is older than one already seen. Dial again with a new one.
    StaleGeneration,
    /// 4: the other side speaks another version of this exchange. One of the two must be updated.
    UnsupportedVersion,
    /// 5: no QP, memory or window left for one more peer. Try later or raise the limit.
    Exhausted,
    /// 6: the two ports cannot meet: GID type or family, link layer or partition differ.
    NoRoute,
    /// 7: the other side has a secret and this one has none.
    AuthRequired,
    /// 8: the proof does not fit: the secrets differ, or something between changed the frames.
    AuthFailed,
    /// 9: this side has a secret and the other one has none.
    AuthUnavailable,
    /// 10: the offer contradicts itself or an earlier one.
    BadOffer,
    /// 11: the other side is shutting down. Look the peer up again.
    ShuttingDown,
    /// 12: the other side failed for a reason of its own; its log says more.
    Internal,
    /// A number that this version does not know.
    Other(u8),
}

impl Status {
    /// The status of a byte; `None` for 0, which means "no refusal".
    pub const fn new(raw: u8) -> Option<Self> {
        Some(match raw {
            0 => return None,
            1 => Self::WrongInstance,
            2 => Self::StaleIncarnation,
            3 => Self::StaleGeneration,
            4 => Self::UnsupportedVersion,
            5 => Self::Exhausted,
            6 => Self::NoRoute,
            7 => Self::AuthRequired,
            8 => Self::AuthFailed,
            9 => Self::AuthUnavailable,
            10 => Self::BadOffer,
            11 => Self::ShuttingDown,
            12 => Self::Internal,
            other => Self::Other(other),
        })
    }

    /// A name for counters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WrongInstance => "wrong_instance",
            Self::StaleIncarnation => "stale_incarnation",
            Self::StaleGeneration => "stale_generation",
            Self::UnsupportedVersion => "unsupported_version",
            Self::Exhausted => "exhausted",
            Self::NoRoute => "no_route",
            Self::AuthRequired => "auth_required",
            Self::AuthFailed => "auth_failed",
            Self::AuthUnavailable => "auth_unavailable",
            Self::BadOffer => "bad_offer",
            Self::ShuttingDown => "shutting_down",
            Self::Internal => "internal",
            Self::Other(_) => "other",
        }
    }

    /// The byte on the wire.
    pub const fn get(self) -> u8 {
        match self {
            Self::WrongInstance => 1,
            Self::StaleIncarnation => 2,
            Self::StaleGeneration => 3,
            Self::UnsupportedVersion => 4,
            Self::Exhausted => 5,
            Self::NoRoute => 6,
            Self::AuthRequired => 7,
            Self::AuthFailed => 8,
            Self::AuthUnavailable => 9,
            Self::BadOffer => 10,
            Self::ShuttingDown => 11,
            Self::Internal => 12,
            Self::Other(raw) => raw,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WrongInstance => "wrong instance",
            Self::StaleIncarnation => "stale incarnation",
            Self::StaleGeneration => "stale generation",
            Self::UnsupportedVersion => "unsupported version",
            Self::Exhausted => "exhausted",
            Self::NoRoute => "no route",
            Self::AuthRequired => "a secret is required",
            Self::AuthFailed => "authentication failed",
            Self::AuthUnavailable => "no secret to authenticate with",
            Self::BadOffer => "bad offer",
            Self::ShuttingDown => "shutting down",
            Self::Internal => "internal error",
            Self::Other(raw) => return write!(f, "status {raw}"),
        })
    }
}

/// A "no" to a hello: what the other side's dial ends with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {detail}")]
pub struct Refusal {
    /// What the dialer can act on.
    pub status: Status,
    /// For people, with the numbers. At most 512 bytes go on the wire; the rest is cut.
    pub detail: String,
}

impl Refusal {
    /// A refusal with its numbers in words.
    pub fn new(status: Status, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into() }
    }
}

/// How far an exchange had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// The TCP connection is being made.
    Connect,
    /// The hello is being sent or awaited.
    Hello,
    /// The challenge or its proof is being sent or awaited.
    Proof,
    /// The acceptor waits for its turn: too many exchanges run at once.
    Turn,
    /// The acceptor brings its QP up, or its reply is being sent or awaited.
    Reply,
    /// The dialer brings its QP up, or READY is being sent or awaited.
    Ready,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "connecting",
            Self::Hello => "the hello",
            Self::Proof => "the proof",
            Self::Turn => "waiting for a turn",
            Self::Reply => "the reply",
            Self::Ready => "READY",
        })
    }
}
