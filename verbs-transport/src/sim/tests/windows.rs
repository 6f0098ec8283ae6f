//! Memory windows of type 2B by the rules of the specification, and fences.

use std::{io, sync::Arc, time::Duration};

use super::bulk::{End, FOUR, all, at, bytes, pair, slow};
use crate::{
    fabric::{
        WcStatus,
        bulk::{
            Access, AllocWindowError, BulkFabric, BulkOp, BulkPort, BulkQp, BulkRegion, BulkWc, BulkWindow, BulkWr,
            DestroyQpError, Local, Remote, Rkey, WindowPolicy, WindowSupport,
        },
    },
    sim::{Faults, HostConfig, SimBulkQp, SimConfig, SimRegion, SimWindow, SimWorld},
};

/// B's window over a part of a region, for A.
fn bind(b: &End, window: &SimWindow, region: &SimRegion, range: std::ops::Range<usize>, access: Access) -> Rkey {
    b.post(900, BulkOp::Bind { window, region, range, access });
    assert_eq!((b.poll(), window.is_bound()), (vec![b.done(900)], true));
    window.rkey().expect("bound")
}

fn receipt(of: &End, key: Rkey) -> BulkWc {
    BulkWc::Notified { qpn: of.qp.qpn().get(), imm: 0, bytes: 0, invalidated: Some(key) }
}

fn by(region: &SimRegion, offset: u64, rkey: Rkey) -> Remote {
    Remote { rkey, ..at(region, offset) }
}

#[tokio::test(start_paused = true)]
async fn a_window_lets_in_one_peer_to_its_bytes_until_that_peer_ends_it() {
    let (world, a, b) = pair(SimConfig::default(), FOUR).await;
    let mine = a.map(vec![0; 8], Access::DESTINATION);
    let arena = b.map((0..32).collect(), Access::WINDOWS.and(Access::DESTINATION));
    assert_eq!(arena.rkey(), None, "a region for windows has no key of its own");
    let window = b.port.alloc_window().unwrap();
    assert!(!window.is_bound() && window.rkey().is_none());
    let key = bind(&b, &window, &arena, 8..16, Access::SOURCE.and(Access::PUT_TARGET));
    a.post(1, BulkOp::Read { local: all(&mine), remote: by(&arena, 8, key) });
    assert_eq!((a.poll(), bytes(&mine)), (vec![a.done(1)], (8..16).collect()));
    a.post(2, BulkOp::Write { local: Local { len: 4, ..all(&mine) }, remote: by(&arena, 12, key) });
    assert_eq!((a.poll(), &bytes(&arena)[8..17]), (vec![a.done(2)], &[8, 9, 10, 11, 8, 9, 10, 11, 16][..]));

    b.qp.post_receives(1).unwrap();
    let fenced = BulkWr { id: 3, signaled: true, fence: true, op: BulkOp::SendInvalidate { rkey: key } };
    a.qp.post(&[fenced]).unwrap();
    assert_eq!(a.poll(), [a.done(3)]);
    assert!(window.is_bound(), "the receipt was not polled");
    assert_eq!((b.poll(), window.is_bound(), window.rkey()), (vec![receipt(&b, key)], false, None));
    a.post(4, BulkOp::Read { local: all(&mine), remote: by(&arena, 8, key) });
    assert_eq!(a.poll(), [a.failed(4, WcStatus::RemoteAccess)]);
    arena.deregister().unwrap();
    drop((mine, window, a, b));
    world.assert_quiet();
}

/// The reason for windows: neighbours in the arena, other directions and other QPs stay out.
#[tokio::test(start_paused = true)]
async fn a_window_keeps_out_everything_else() {
    fn read(mine: &SimRegion, remote: Remote) -> BulkOp<'_, SimRegion> {
        BulkOp::Read { local: all(mine), remote }
    }
    for case in ["one byte before", "one byte behind", "wrong direction", "the key before", "another QP"] {
        let (_world, a, b) = pair(SimConfig::default(), FOUR).await;
        let mine = &a.map(vec![0; 8], Access::DESTINATION);
        let arena = b.map((0..32).collect(), Access::WINDOWS.and(Access::DESTINATION));
        let window = b.port.alloc_window().unwrap();
        let key = bind(&b, &window, &arena, 8..16, Access::SOURCE);
        let op = match case {
            "one byte before" => read(mine, by(&arena, 7, key)),
            "one byte behind" => read(mine, by(&arena, 9, key)),
            "wrong direction" => BulkOp::Write { local: all(mine), remote: by(&arena, 8, key) },
            "the key before" => read(mine, by(&arena, 8, Rkey(key.0 - 1))),
            _ => {
                // A second pair of QPs between the same ports.
                let second = |end: End| End { qp: Arc::new(end.port.create_qp(end.qp.caps()).unwrap()), ..end };
                let (c, d) = (second(a), second(b));
                SimBulkQp::connect(c.qp.clone(), c.path_to(&d, FOUR)).await.unwrap();
                SimBulkQp::connect(d.qp.clone(), d.path_to(&c, FOUR)).await.unwrap();
                c.post(1, read(mine, by(&arena, 8, key)));
                assert_eq!(c.poll(), [c.failed(1, WcStatus::RemoteAccess)], "{case}");
                continue;
            }
        };
        a.post(1, op);
        assert_eq!(a.poll(), [a.failed(1, WcStatus::RemoteAccess)], "{case}");
        assert_eq!((bytes(mine), &bytes(&arena)[..]), (vec![0; 8], &(0..32).collect::<Vec<u8>>()[..]), "{case}");
        assert!(!b.qp.is_rts().unwrap(), "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_window_is_bound_to_does_not_go_before_it() {
    let (world, a, b) = pair(SimConfig::default(), FOUR).await;
    let arena = b.map(vec![1; 32], Access::WINDOWS);
    let window = b.port.alloc_window().unwrap();
    let key = bind(&b, &window, &arena, 0..32, Access::SOURCE);
    let (arena, error) = arena.deregister().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
    let End { qp, port, fabric } = b;
    let (qp, error) = SimBulkQp::destroy(qp).unwrap_err();
    assert!(matches!(error, DestroyQpError::WindowsBound { windows: 1, .. }), "{error}");
    // It still works, and can end the window.
    let b = End { fabric, port, qp };
    b.post(1, BulkOp::LocalInvalidate { rkey: key });
    assert_eq!(window.rkey(), None, "under way");
    assert_eq!((b.poll(), window.is_bound()), (vec![b.done(1)], false));
    arena.deregister().unwrap();
    // Dropped in the wrong order: the QP and the region go with the window.
    let arena = b.map(vec![1; 32], Access::WINDOWS);
    bind(&b, &window, &arena, 0..1, Access::SOURCE);
    drop((arena, a));
    let End { qp, port, fabric } = b;
    drop((qp, port));
    let left = || (fabric.report().live_bulk_qps, fabric.report().live_regions, fabric.report().live_windows);
    assert_eq!(left(), (1, 1, 1));
    window.free().unwrap();
    assert_eq!(left(), (0, 0, 0));
    drop(fabric);
    world.assert_quiet();
}

/// E-63, and the peer's half when it names a key that is not its.
#[tokio::test(start_paused = true)]
async fn a_dead_key_cannot_be_invalidated_again() {
    let (_world, a, b) = pair(SimConfig::default(), FOUR).await;
    let arena = b.map(vec![1; 32], Access::WINDOWS);
    let window = b.port.alloc_window().unwrap();
    let key = bind(&b, &window, &arena, 0..32, Access::SOURCE);
    b.qp.post_receives(2).unwrap();
    a.post(1, BulkOp::SendInvalidate { rkey: key });
    assert_eq!(b.poll(), [receipt(&b, key)]);
    b.post(2, BulkOp::LocalInvalidate { rkey: key });
    let flushed = BulkWc::NotifyFailed { qpn: b.qp.qpn().get(), status: WcStatus::Flushed };
    assert_eq!(b.poll(), [b.failed(2, WcStatus::LocalQpOperation), flushed]);
    assert!(!b.qp.is_rts().unwrap());

    let (_world, a, b) = pair(SimConfig::default(), FOUR).await;
    b.qp.post_receives(1).unwrap();
    a.post(1, BulkOp::SendInvalidate { rkey: key });
    let refused = BulkWc::NotifyFailed { qpn: b.qp.qpn().get(), status: WcStatus::RemoteInvalidRequest };
    assert_eq!((a.poll(), b.poll(), b.qp.is_rts().unwrap()), (vec![a.done(1)], vec![refused], false));
}

#[tokio::test(start_paused = true)]
async fn a_destroyed_qp_ends_its_windows() {
    let (_world, a, b) = pair(SimConfig::default(), FOUR).await;
    let arena = b.map(vec![1; 32], Access::WINDOWS);
    let window = b.port.alloc_window().unwrap();
    let key = bind(&b, &window, &arena, 0..32, Access::SOURCE);
    b.qp.to_error().unwrap();
    assert!(window.is_bound(), "ERR alone frees nothing");
    let mine = a.map(vec![0; 8], Access::DESTINATION);
    a.post(1, BulkOp::Read { local: all(&mine), remote: by(&arena, 0, key) });
    assert_eq!((a.next().await, bytes(&mine)), (a.failed(1, WcStatus::RetryExceeded), vec![0; 8]));
    window.free().unwrap();
    SimBulkQp::destroy(b.qp).unwrap();
    arena.deregister().unwrap();
}

#[tokio::test(start_paused = true)]
async fn three_hundred_binds_take_two_windows_and_no_key_twice() {
    let (world, _a, b) = pair(SimConfig::default(), FOUR).await;
    let arena = b.map(vec![1; 32], Access::WINDOWS);
    let window = b.port.alloc_window().unwrap();
    let mut keys = std::collections::HashSet::new();
    for _ in 0..300 {
        let key = bind(&b, &window, &arena, 0..32, Access::SOURCE);
        assert!(keys.insert(key), "{key:?} came twice");
        b.post(1, BulkOp::LocalInvalidate { rkey: key });
        assert_eq!(b.poll(), [b.done(1)]);
    }
    let windows: std::collections::HashSet<u32> = keys.iter().map(|key| key.0 >> 8).collect();
    assert_eq!((windows.len(), world.report().hosts[1].live_windows), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_bind_that_may_not_be_is_refused_or_fails_and_gives_no_right() {
    let (_world, a, b) = pair(SimConfig::default(), FOUR).await;
    let (arena, plain) = (b.map(vec![1; 32], Access::WINDOWS), b.map(vec![1; 32], Access::SOURCE));
    let theirs = a.map(vec![1; 32], Access::WINDOWS);
    let (window, foreign) = (b.port.alloc_window().unwrap(), a.port.alloc_window().unwrap());
    let wr = |op| BulkWr { id: 1, signaled: true, fence: false, op };
    let bind = |window, region, range, access| BulkOp::Bind { window, region, range, access };
    let bad = [
        wr(bind(&window, &plain, 0..8, Access::SOURCE)),
        wr(bind(&window, &theirs, 0..8, Access::SOURCE)),
        wr(bind(&foreign, &arena, 0..8, Access::SOURCE)),
        wr(bind(&window, &arena, 8..33, Access::SOURCE)),
        wr(bind(&window, &arena, 8..8, Access::SOURCE)),
        wr(bind(&window, &arena, 0..8, Access::PUT_TARGET)),
        wr(bind(&window, &arena, 0..8, Access::LOCAL_READ)),
        BulkWr { signaled: false, ..wr(bind(&window, &arena, 0..8, Access::SOURCE)) },
        BulkWr { signaled: false, ..wr(BulkOp::LocalInvalidate { rkey: Rkey(1) }) },
    ];
    for wr in bad {
        let refused = b.qp.post(std::slice::from_ref(&wr)).unwrap_err();
        assert_eq!((refused.posted, refused.source.kind()), (0, io::ErrorKind::InvalidInput), "{wr:?}");
        assert!(!window.is_bound() && !foreign.is_bound(), "{wr:?}");
    }
    let twice = [
        wr(bind(&window, &arena, 0..8, Access::SOURCE)),
        BulkWr { id: 2, ..wr(bind(&window, &arena, 8..16, Access::SOURCE)) },
    ];
    assert_eq!(b.qp.post(&twice).unwrap_err().posted, 0);
    assert!(!window.is_bound());

    let faults = Faults { bind_fails: 1.0, ..Faults::none() };
    let (_world, _a, b) = pair(SimConfig { faults, ..SimConfig::default() }, FOUR).await;
    let (arena, window) = (b.map(vec![1; 32], Access::WINDOWS), b.port.alloc_window().unwrap());
    b.post(1, bind(&window, &arena, 0..8, Access::SOURCE));
    assert_eq!((b.poll(), window.is_bound()), (vec![b.failed(1, WcStatus::WindowBind)], false));
    SimBulkQp::destroy(b.qp).unwrap();
}

/// E-56: what the fence is for.
#[tokio::test(start_paused = true)]
async fn without_a_fence_the_receipt_overtakes_the_reads_that_it_should_follow() {
    for fence in [true, false] {
        let (_world, a, b) = pair(slow(), FOUR).await;
        let arena = b.map(vec![7; 1 << 20], Access::WINDOWS);
        let window = b.port.alloc_window().unwrap();
        let key = bind(&b, &window, &arena, 0..1 << 20, Access::SOURCE);
        let mine = a.map(vec![0; 1 << 20], Access::DESTINATION);
        b.qp.post_receives(1).unwrap();
        a.post(1, BulkOp::Read { local: all(&mine), remote: by(&arena, 0, key) });
        a.qp.post(&[BulkWr { id: 2, signaled: true, fence, op: BulkOp::SendInvalidate { rkey: key } }]).unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        if fence {
            assert_eq!(b.poll(), [], "held behind the READ");
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert_eq!((a.poll(), b.poll()), (vec![a.done(1), a.done(2)], vec![receipt(&b, key)]));
            assert!(bytes(&mine).iter().all(|byte| *byte == 7));
        } else {
            assert_eq!(b.poll(), [receipt(&b, key)], "the READ has a megabyte to go");
            tokio::time::sleep(Duration::from_secs(10)).await;
            assert!(matches!(a.poll()[..], [BulkWc::Failed { id: 1, .. }, BulkWc::Failed { id: 2, .. }]));
        }
    }
}

/// A fence holds behind READs, not behind WRITEs; and it holds until the READ's answer is here.
#[tokio::test(start_paused = true)]
async fn a_fence_waits_for_the_answers_of_reads() {
    let latency = Duration::from_millis(10);
    let (_world, a, b) = pair(SimConfig { latency: latency..=latency, ..SimConfig::default() }, FOUR).await;
    let (mine, theirs) = (a.map(vec![0; 8], Access::DESTINATION), b.map(vec![1; 8], Access::SOURCE));
    b.qp.post_receives(2).unwrap();
    a.post(1, BulkOp::Read { local: all(&mine), remote: at(&theirs, 0) });
    a.qp.post(&[BulkWr { id: 2, signaled: true, fence: true, op: BulkOp::SendImm { imm: 1 } }]).unwrap();
    tokio::time::sleep(Duration::from_millis(15)).await;
    assert_eq!((b.poll(), a.poll()), (vec![], vec![]), "the READ's answer is on its way");
    assert_eq!(a.next().await, a.done(1));
    assert!(matches!(b.poll()[..], [BulkWc::Notified { imm: 1, .. }]));
}

#[tokio::test(start_paused = true)]
async fn a_device_without_windows_says_why() {
    let world = SimWorld::new(SimConfig::default());
    let cases = [
        (HostConfig { windows: WindowPolicy::Never, ..HostConfig::default() }, WindowSupport::SwitchedOff),
        (HostConfig { max_windows: 0, ..HostConfig::default() }, WindowSupport::NoneAtAll),
    ];
    for (host, (config, want)) in cases.into_iter().enumerate() {
        let port = world.host([10, 0, 1, u8::try_from(host).unwrap()], config).open_bulk(16).unwrap();
        assert_eq!(port.limits().windows, want);
        let refused = port.alloc_window().map(drop);
        assert!(matches!(refused, Err(AllocWindowError::NotUsable(why)) if why == want), "{refused:?}");
    }
    let one = world.host([10, 0, 1, 9], HostConfig { max_windows: 1, ..HostConfig::default() });
    let port = one.open_bulk(16).unwrap();
    let first = port.alloc_window().unwrap();
    assert!(matches!(port.alloc_window().map(drop), Err(AllocWindowError::Device(_))));
    drop(first);
    drop(port.alloc_window().unwrap());
}
