//! The frames of operations over RDMA, for `engine/fuzz`.

use super::{
    rails::plan::{Plan, Planned},
    wire::{Ask, Frame, Offer},
};

/// Any bytes, as each of the frames of an operation over RDMA.
///
/// # Panics
///
/// When something that was read is written in other bytes.
pub fn rdma(bytes: &[u8]) {
    if let Some(ask) = bytes.try_into().ok().and_then(|bytes| Ask::decode(bytes).ok()) {
        assert_eq!(ask.encode(), bytes, "one encoding of {ask:?}");
    }
    if let Ok(offer) = Offer::decode(bytes) {
        assert_eq!(offer.encode(), bytes, "one encoding of {offer:?}");
    }
    if let Ok(frame) = Frame::decode(bytes) {
        assert_eq!(frame.encode(), bytes, "one encoding of {frame:?}");
    }
    if let Ok((identity, plan)) = Plan::decode(bytes) {
        assert_eq!(plan.encode(&identity), bytes, "one encoding of {plan:?}");
    }
    if let Ok((identity, planned)) = Planned::decode(bytes) {
        assert_eq!(planned.encode(&identity), bytes, "one encoding of {planned:?}");
    }
}
