//! M-58: the reserve of six receives, kept by our own links and enforced against others.

use super::{head, limits, pair::Pair};
use crate::proto::{
    credit::{CONTROL_RESERVE, RxCredits, WINDOW_MAX, WINDOW_MIN},
    frame::{FrameKind, HEADER_BYTES_U32, Malformed, MessageType},
    link::{Link, LinkError, LinkLimits},
};

/// For every window: the whole of it arrives at once, is owed at once, and goes back in at most four pure grants.
#[test]
fn a_whole_window_goes_back_in_at_most_four_pure_grants() {
    for window in WINDOW_MIN..=WINDOW_MAX {
        let mut rx = RxCredits::new(window);
        for _ in 0..window {
            rx.on_receive().unwrap();
        }
        rx.on_reposted();
        let mut grants = Vec::new();
        while rx.pure_grant_due() {
            grants.push(u16::from(rx.take_grant()));
        }
        assert!(grants.len() + 2 <= usize::from(CONTROL_RESERVE), "window {window}: {grants:?}");
        assert!(grants.iter().all(|&grant| grant >= RxCredits::pure_grant_min(window)), "window {window}: {grants:?}");
        assert!(rx.owed() < window.div_ceil(2), "window {window}");
    }
}

/// The worst that our own links do: all grants, a PING and a PONG under way one behind the other.
#[test]
fn window_and_reserve_cover_the_worst_case() {
    let wide = LinkLimits { tx_window: 1020, rx_window: 1020, send_wrs: 2047, ..limits() };
    let mut pair = Pair::proven([wide, wide], [8, 8]);
    for at in 0..2 {
        for _ in 0..3000 {
            pair.sides[at].send(MessageType::Message, 1);
        }
    }
    for _ in 0..30 {
        for at in 0..2 {
            pair.sides[at].link.request_ping();
            pair.pump(at);
            pair.check();
        }
        for at in 0..2 {
            while pair.deliver(at) {}
            pair.sides[at].repost();
            while pair.sides[at].complete() {}
            pair.pump(at);
            pair.check();
        }
    }
    pair.settle();
    pair.assert_home();
}

fn link() -> Link {
    Link::new(limits(), false)
}

fn take(link: &mut Link, kind: FrameKind, credits: u8, word: u32) -> Result<(), LinkError> {
    link.on_receive(head(kind, credits, word).encode(), HEADER_BYTES_U32).map(drop)
}

/// A peer that keeps sending PINGs without waiting for the answer would use up other peers' receives.
#[test]
fn a_flood_of_pings_ends_the_connection() {
    let mut link = link();
    take(&mut link, FrameKind::Ping, 0, 1).unwrap();
    let unexpected = Malformed::Unexpected { kind: "PING" };
    assert_eq!(take(&mut link, FrameKind::Ping, 0, 2), Err(LinkError::Malformed(unexpected)));
    assert_eq!(take(&mut link, FrameKind::Ping, 0, 3), Err(LinkError::TooManyMalformed(unexpected)));
}

#[test]
fn a_flood_of_pongs_ends_the_connection() {
    let mut link = link();
    let unexpected = Malformed::Unexpected { kind: "PONG" };
    assert_eq!(take(&mut link, FrameKind::Pong, 0, 1), Err(LinkError::Malformed(unexpected)));
    assert_eq!(take(&mut link, FrameKind::Pong, 0, 1), Err(LinkError::TooManyMalformed(unexpected)));
}

/// Each pure grant gives back a quarter of the window, so a flood of them runs out of credits to give.
#[test]
fn a_flood_of_pure_grants_ends_the_connection() {
    let mut link = link();
    let small = Malformed::SmallGrant { credits: 0, least: 16 };
    assert_eq!(take(&mut link, FrameKind::PureGrant, 0, 0), Err(LinkError::Malformed(small)));
    let error = take(&mut link, FrameKind::PureGrant, 16, 0).unwrap_err();
    assert!(matches!(error, LinkError::Credit(_)), "nothing was spent: {error}");
}
