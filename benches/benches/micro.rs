//! The pieces by themselves, in time: frame headers, credits, the gate, arenas. For what they cost together, see
//! `instructions` and `verbs-perf ladder`.

use std::{hint::black_box, sync::Arc, time::Duration, time::Instant};

use bytes::Bytes;
use criterion::Criterion;
use tokio::runtime::{Builder, Runtime};
use verbs_rma::proto::slice::{ArenaLimits, Arenas, NoSlice, Slice};
use verbs_transport::{
    Borrowed, Config, InstanceId, Lane, MessageType, Progress, SendErrorHandler, SendOutcome, Worker,
    proto::{
        credit::{RxCredits, TxCredits},
        frame::{FrameHeader, FrameKind, GrantWish},
    },
    sim::{HostConfig, SimConfig, SimFabric, SimWorld},
};

fn header() -> FrameHeader {
    FrameHeader {
        kind: FrameKind::Data(MessageType::Message),
        wish: GrantWish::Soft,
        first: true,
        last: true,
        lane: Lane::Application,
        credits: 3,
        word: 0,
    }
}

fn frame(c: &mut Criterion) {
    let encoded = header().encode();
    c.bench_function("frame header: encode", |b| b.iter(|| black_box(black_box(header()).encode())));
    c.bench_function("frame header: decode", |b| b.iter(|| black_box(FrameHeader::decode(black_box(encoded)))));
    let mut unknown = encoded;
    unknown[0] = 0xff;
    c.bench_function("frame header: refuse", |b| b.iter(|| black_box(FrameHeader::decode(black_box(unknown)))));
}

fn credit(c: &mut Criterion) {
    let (mut tx, mut rx) = (TxCredits::new(64), RxCredits::new(64));
    c.bench_function("credit: one message's round", |b| {
        b.iter(|| {
            assert!(tx.take(), "a round gives back what it takes");
            rx.on_receive().expect("a credit was taken");
            rx.on_reposted();
            let grant = rx.take_grant();
            tx.on_grant(grant.into()).expect("it was outstanding");
            black_box(grant)
        });
    });
}

/// Two workers that nobody polls any more.
struct Connected {
    a: Worker<SimFabric>,
    b: Worker<SimFabric>,
    to: InstanceId,
}

fn connected(runtime: &Runtime) -> Result<Connected, Box<dyn std::error::Error>> {
    let world = runtime.block_on(async { SimWorld::new(SimConfig::default()) });
    let start = |host: u8| {
        let config = Config { bind: ([10, 0, 0, host], 0).into(), progress: Progress::Manual, ..Config::default() };
        Worker::new(config, world.host([10, 0, 0, host], HostConfig::default()))
    };
    let (a, b) = (start(1)?, start(2)?);
    runtime.block_on(async {
        a.start_with_handler(|_: Borrowed<'_>| ()).await?;
        b.start_with_handler(|_: Borrowed<'_>| ()).await?;
        let to = a.register(&b.address())?;
        let connecting = tokio::spawn({
            let a = a.clone();
            async move { a.ensure_connected(to).await }
        });
        while !connecting.is_finished() {
            a.progress()?;
            b.progress()?;
            tokio::task::yield_now().await;
        }
        connecting.await??;
        Ok(Connected { a, b, to })
    })
}

fn gate(c: &mut Criterion) {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let Connected { a, b, to } = connected(&runtime).expect("two simulated workers connect");
    let lost: Arc<dyn SendErrorHandler> = Arc::new(|_, _, _| ());
    let payload = Bytes::from_static(&[7; 64]);
    let send = || a.send(to, Bytes::new(), payload.clone(), MessageType::Message, lost.clone());
    while matches!(send(), SendOutcome::Admitted) {}
    c.bench_function("gate: a frame that waits, and is withdrawn", |b| {
        b.iter(|| match send() {
            SendOutcome::Pending(admission) => assert!(admission.cancel(), "nobody takes anything"),
            SendOutcome::Admitted => panic!("the channel is full"),
        });
    });
    runtime.block_on(async {
        a.shutdown().await;
        b.shutdown().await;
    });
}

fn take(arenas: &mut Arenas, now: Instant, bytes: u64) -> Slice {
    loop {
        match arenas.allocate(bytes) {
            Ok(slice) => return slice,
            Err(NoSlice::Grow { arena_bytes }) => _ = arenas.add(now, arena_bytes),
            Err(NoSlice::Ceiling) => panic!("{bytes} bytes are below the ceiling"),
        }
    }
}

fn arena(c: &mut Criterion) {
    let now = Instant::now();
    let limits =
        ArenaLimits { arena_bytes: 64 << 20, bytes_max: 1 << 30, arenas_max: 64, idle: Duration::from_secs(60) };
    let mut arenas = Arenas::new(limits);
    c.bench_function("arena: a slice of 64 KiB taken and freed", |b| {
        b.iter(|| {
            let slice = take(&mut arenas, now, 64 << 10);
            arenas.free(now, black_box(slice));
        });
    });
    // Every other slice is somebody's: the tree is as cut up as it gets.
    let held: Vec<Slice> = (0..256).map(|_| take(&mut arenas, now, 64 << 10)).collect();
    let mut kept = Vec::new();
    for (index, slice) in held.into_iter().enumerate() {
        if index % 2 == 0 {
            arenas.free(now, slice);
        } else {
            kept.push(slice);
        }
    }
    c.bench_function("arena: the same in a fragmented arena", |b| {
        b.iter(|| {
            let slice = take(&mut arenas, now, 64 << 10);
            arenas.free(now, black_box(slice));
        });
    });
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for piece in [frame, credit, gate, arena] {
        piece(&mut criterion);
    }
    criterion.final_summary();
}
