//! Two links joined by an ordered wire in memory, stepped by hand; no device, no clock, no thread.

mod pair;
mod random;
mod reserve;
mod states;

use std::sync::Arc;

use bytes::Bytes;

use super::{
    frame::{FrameHeader, FrameKind, GrantWish, Lane, MessageType},
    link::{Frame, LinkLimits},
};

/// Numbers of a link as a worker has them by default.
fn limits() -> LinkLimits {
    LinkLimits {
        tx_window: 64,
        rx_window: 64,
        send_bytes: 8192,
        inline_bytes: 220,
        receive_max_bytes: 1 << 20,
        send_wrs: 63,
        signal_every: 16,
        packs: false,
    }
}

/// A frame whose header carries `id` in its first eight bytes, and whose body is `bytes` long beyond them.
fn frame(id: u64, kind: MessageType, bytes: usize) -> Frame {
    let split = bytes / 3;
    let mut header = id.to_be_bytes().to_vec();
    header.extend(pattern(id, 0, split));
    let payload = pattern(id, split, bytes);
    // The core keeps the handler for its caller and never calls it.
    let on_error = Arc::new(|_: Bytes, _: Bytes, _: crate::SendError| panic!("the core reports nothing by itself"));
    Frame { kind, lane: Lane::Application, header: header.into(), payload: payload.into(), on_error }
}

fn pattern(id: u64, from: usize, to: usize) -> Vec<u8> {
    (from..to).map(|at| (at as u64).wrapping_mul(31).wrapping_add(id).to_le_bytes()[0]).collect()
}

/// What a received body must be for its id, which is at its front.
fn body_of(id: u64, bytes: usize) -> Vec<u8> {
    let mut body = id.to_be_bytes().to_vec();
    body.extend(pattern(id, 0, bytes));
    body
}

fn head(kind: FrameKind, credits: u8, word: u32) -> FrameHeader {
    let data = matches!(kind, FrameKind::Data(_));
    FrameHeader { kind, wish: GrantWish::None, first: data, last: data, lane: Lane::Application, credits, word }
}
