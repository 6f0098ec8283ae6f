//! The simulated network: what TCP promises, and the faults that break it.

use std::{io::ErrorKind, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, sleep, timeout},
};
use verbs_bootstrap::{Net, NetListener};

use super::pair::{A, B, small};
use crate::{
    fabric::Fabric,
    sim::{Faults, NetFaults, SimConfig, SimFabric, SimListener, SimStream, SimWorld},
};

struct Two {
    world: SimWorld,
    a: SimFabric,
    b: SimFabric,
    listener: SimListener,
}

async fn two(net: NetFaults) -> Two {
    two_with(SimConfig { faults: Faults { net, ..Faults::none() }, ..SimConfig::seeded(3) }).await
}

async fn two_with(config: SimConfig) -> Two {
    let world = SimWorld::new(config);
    let (a, b) = (world.host(A, small()), world.host(B, small()));
    let listener = b.net().listen(SocketAddr::from((B, 0))).await.unwrap();
    Two { world, a, b, listener }
}

impl Two {
    async fn connected(&mut self) -> (SimStream, SimStream) {
        let addr = self.listener.local_addr().unwrap();
        let (dialed, taken) = tokio::join!(self.a.net().dial(addr), self.listener.accept());
        (dialed.unwrap(), taken.unwrap().0)
    }
}

#[tokio::test(start_paused = true)]
async fn bytes_go_both_ways_and_a_close_is_the_end() {
    let mut two = two(NetFaults::none()).await;
    let (mut a, mut b) = two.connected().await;
    let long: Vec<u8> = (0..200_000u32).map(|n| n.to_le_bytes()[0]).collect();
    let send = async {
        a.write_all(&long).await.unwrap();
        a.shutdown().await.unwrap();
        let mut answer = String::new();
        a.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let take = async {
        let mut got = Vec::new();
        b.read_to_end(&mut got).await.unwrap();
        assert!(got == long);
        b.write_all(b"thanks").await.unwrap();
        drop(b);
    };
    assert_eq!(tokio::join!(send, take).0, "thanks");
    assert_eq!(a.write(b"x").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
    assert_eq!(two.world.report().open_streams, 1);
}

#[tokio::test(start_paused = true)]
async fn ports_are_chosen_and_taken_once() {
    let two = two(NetFaults::none()).await;
    let taken = two.listener.local_addr().unwrap();
    assert_ne!(taken.port(), 0);
    assert_eq!(two.b.net().listen(taken).await.unwrap_err().kind(), ErrorKind::AddrInUse);
    assert_eq!(two.a.net().listen(taken).await.unwrap_err().kind(), ErrorKind::AddrNotAvailable);
    assert!(two.a.net().listen(SocketAddr::from(([0, 0, 0, 0], taken.port()))).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn nobody_listening_refuses_and_nobody_there_times_out() {
    let two = two(NetFaults::none()).await;
    let refused = two.a.net().dial(SocketAddr::from((B, 1))).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    let start = Instant::now();
    let absent = two.a.net().dial(SocketAddr::from(([10, 9, 9, 9], 1))).await.unwrap_err();
    assert_eq!((absent.kind(), start.elapsed().as_secs()), (ErrorKind::HostUnreachable, 3));
}

#[tokio::test(start_paused = true)]
async fn loopback_stays_on_its_host() {
    let two = two(NetFaults::none()).await;
    let mut home = two.a.net().listen(SocketAddr::from(([127, 0, 0, 1], 700))).await.unwrap();
    let addr = home.local_addr().unwrap();
    assert!(two.b.net().dial(addr).await.is_err());
    let (dialed, taken) = tokio::join!(two.a.net().dial(addr), home.accept());
    assert!(dialed.is_ok() && taken.unwrap().1.ip().is_loopback());
    assert!(two.b.net().dial(SocketAddr::from((A, 700))).await.is_err(), "bound to loopback only");
}

#[tokio::test(start_paused = true)]
async fn killed_host_closes_its_streams_and_refuses_dials() {
    let mut two = two(NetFaults::none()).await;
    let (mut a, _b) = two.connected().await;
    let reader = async { a.read(&mut [0; 1]).await };
    let kill = async {
        sleep(Duration::from_millis(10)).await;
        two.world.kill_host(B);
    };
    assert_eq!(tokio::join!(reader, kill).0.unwrap(), 0, "the kernel closes what a dead process had open");
    let addr = two.listener.local_addr().unwrap();
    assert_eq!(two.a.net().dial(addr).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert!(two.b.net().dial(addr).await.is_err(), "the dead do not dial");
    let again = two.world.host(B, small());
    assert!(again.net().listen(addr).await.is_ok(), "the port is free for the next process");
}

#[tokio::test(start_paused = true)]
async fn close_with_unread_bytes_is_a_reset() {
    let mut two = two(NetFaults::none()).await;
    let (mut a, b) = two.connected().await;
    a.write_all(b"unread").await.unwrap();
    drop(b);
    assert_eq!(a.read(&mut [0; 1]).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test(start_paused = true)]
async fn dropped_listener_ends_what_nobody_took() {
    let two = two(NetFaults::none()).await;
    let addr = two.listener.local_addr().unwrap();
    let mut waiting = two.a.net().dial(addr).await.unwrap();
    drop(two.listener);
    assert_eq!(waiting.read(&mut [0; 1]).await.unwrap(), 0);
    drop(waiting);
    assert_eq!((two.world.report().open_streams, two.world.report().listeners), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn cut_path_holds_bytes_and_dials_until_it_is_healed() {
    let mut two = two(NetFaults::none()).await;
    let (mut a, mut b) = two.connected().await;
    two.world.cut(A, B);
    a.write_all(b"held").await.unwrap();
    let addr = two.listener.local_addr().unwrap();
    assert!(timeout(Duration::from_secs(9), b.read(&mut [0; 4])).await.is_err());
    assert!(timeout(Duration::from_secs(9), two.a.net().dial(addr)).await.is_err());
    let dial = async { two.a.net().dial(addr).await.is_ok() };
    let heal = async {
        sleep(Duration::from_secs(1)).await;
        two.world.heal(A, B);
    };
    assert!(tokio::join!(dial, heal).0);
    assert_eq!(b.read(&mut [0; 9]).await.unwrap(), 4);
}

#[tokio::test(start_paused = true)]
async fn latency_delays_bytes_and_the_end() {
    let way = Duration::from_millis(40);
    let mut two = two_with(SimConfig { net_latency: way..=way, ..SimConfig::default() }).await;
    let (mut a, mut b) = two.connected().await;
    let start = Instant::now();
    a.write_all(b"x").await.unwrap();
    assert_eq!(b.read(&mut [0; 4]).await.unwrap(), 1);
    assert!(start.elapsed() >= way);
    drop(a);
    assert_eq!(b.read(&mut [0; 4]).await.unwrap(), 0);
    assert!(start.elapsed() >= 2 * way);
}

#[tokio::test(start_paused = true)]
async fn dribbling_streams_give_a_byte_a_read() {
    let mut two = two(NetFaults { dribble: 1.0, ..NetFaults::none() }).await;
    let (mut a, mut b) = two.connected().await;
    a.write_all(b"abc").await.unwrap();
    assert_eq!(b.read(&mut [0; 9]).await.unwrap(), 1);
    let mut rest = [0; 2];
    b.read_exact(&mut rest).await.unwrap();
    assert_eq!(&rest, b"bc");
}

/// Writes both ways until a fault strikes; says what each reader saw, `None` for "nothing, ever".
async fn struck(net: NetFaults) -> (SimWorld, [Option<std::io::Result<usize>>; 2]) {
    let mut two = two(NetFaults { after_bytes: 10..=10, ..net }).await;
    let (mut a, mut b) = two.connected().await;
    let _ = a.write_all(&[1; 32]).await;
    let _ = b.write_all(&[2; 32]).await;
    let mut sink = Vec::new();
    let at_b = timeout(Duration::from_secs(60), b.read_to_end(&mut sink)).await.ok();
    let at_a = timeout(Duration::from_secs(60), a.read_to_end(&mut sink)).await.ok();
    (two.world, [at_a, at_b])
}

#[tokio::test(start_paused = true)]
async fn resets_black_holes_and_half_closes_strike_after_their_bytes() {
    let (world, seen) = struck(NetFaults { reset: 1.0, ..NetFaults::none() }).await;
    for side in seen {
        assert_eq!(side.unwrap().unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
    assert_eq!(world.fault_counts().resets, 1);

    let (world, seen) = struck(NetFaults { black_hole: 1.0, ..NetFaults::none() }).await;
    assert!(seen.iter().all(Option::is_none), "{seen:?}");
    assert_eq!(world.fault_counts().black_holes, 1);

    let (world, seen) = struck(NetFaults { half_close: 1.0, ..NetFaults::none() }).await;
    assert_eq!(seen.iter().filter(|side| matches!(side, Some(Ok(10)))).count(), 1, "{seen:?}");
    assert_eq!(world.fault_counts().half_closes, 1);
}

#[tokio::test(start_paused = true)]
async fn refused_dials_stop_with_the_faults() {
    let two = two(NetFaults { dial_refused: 1.0, ..NetFaults::none() }).await;
    let addr = two.listener.local_addr().unwrap();
    assert_eq!(two.a.net().dial(addr).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    two.world.stop_faults();
    assert!(two.a.net().dial(addr).await.is_ok());
}
