//! What is counted: each operation by itself, between two workers that are polled by hand.
//!
//! Bursts are of 15 messages. The driver posts slabs again when it has 16 of them or nothing else to do: so the first poll of
//! a burst is the receiving of 15 messages and nothing else, and the next one the reposting of 15 slabs, with a grant when one
//! is due. Windows are chosen so that it is due at each of these times, or hardly ever.

use std::{error::Error, hint::black_box, sync::Arc};

use bytes::Bytes;
use clap::ValueEnum;
use tokio::runtime::{Builder, Runtime};
use verbs_rma::{Bulk, BulkConfig};
use verbs_transport::{
    Borrowed, Config, Inbound, InstanceId, MessageType, Progress, SendErrorHandler, Worker,
    fabric::{
        FabricError, SlabSizes,
        bulk::{Access, OwnedBytes},
    },
    sim::{HostConfig, SimConfig, SimFabric, SimWorld},
};

/// One operation of the public interface, or one thing that the driver does for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Operation {
    /// `Worker::send` of 64 bytes, which go inline.
    SendInline,
    /// The same while the window is spent: it waits in the channel. (What it costs to leave it is not in this.)
    SendWaiting,
    /// `Worker::send` of 4 KiB, which are copied into a slab. (The copy itself is the fabric's.)
    SendCopied,
    /// A message of 64 bytes from the completion to the end of the handler.
    ReceiveHandler,
    /// A message of 64 bytes from the completion to the program that took it from its stream.
    ReceiveStream,
    /// Giving a receive slab back to the device, its part of a chain of 15.
    Repost,
    /// Sending a pure grant of 15 credits, the reposting of their slabs included.
    GrantSent,
    /// Taking a pure grant: its completion and those of the sends, its own slab's way home.
    GrantTaken,
    /// 512 KiB of a GET by RDMA READ, in chunks of 4 KiB: one chunk.
    GetChunk,
    /// One message of 64 bytes and all that belongs to it: sent, received by a handler, its share of credits, signals and
    /// reposts. The design's own measure.
    Message,
}

const ROUNDS: u64 = 500;
const BURST: u64 = 15;
/// A grant is due when half of the window is owed.
const GRANT_EACH_BURST: u16 = 16;
/// Hardly ever.
const NO_GRANT: u16 = 1020;
/// GETs, and chunks of each.
const GETS: u64 = 50;
const CHUNKS: u64 = 128;
const CHUNK_BYTES: u32 = 4096;
/// Bursts that spend a default window.
const SPENDING: u64 = 5;

impl Operation {
    pub(crate) const ALL: [Self; 10] = [
        Self::SendInline,
        Self::SendWaiting,
        Self::SendCopied,
        Self::ReceiveHandler,
        Self::ReceiveStream,
        Self::Repost,
        Self::GrantSent,
        Self::GrantTaken,
        Self::GetChunk,
        Self::Message,
    ];

    /// As on the command line, and in the file of budgets.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Whether it comes to the fabric at all.
    pub(crate) fn posts(self) -> bool {
        self != Self::SendWaiting
    }

    /// How often a run does it.
    pub(crate) fn units(self) -> u64 {
        match self {
            Self::GetChunk => GETS * CHUNKS,
            Self::GrantSent | Self::GrantTaken => ROUNDS,
            _ => ROUNDS * BURST,
        }
    }

    /// Does it so often, within [`within_count`].
    pub(crate) fn run(self) -> Result<(), Box<dyn Error>> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        match self {
            Self::GetChunk => get(&runtime),
            Self::ReceiveStream => Pair::new(&runtime, NO_GRANT, true)?.rounds(self),
            // Credits of the default window, so that nothing but this is different from a program's.
            Self::Message | Self::SendWaiting => {
                Pair::new(&runtime, Config::default().window_slabs, false)?.rounds(self)
            }
            Self::GrantSent | Self::GrantTaken => Pair::new(&runtime, GRANT_EACH_BURST, false)?.rounds(self),
            _ => Pair::new(&runtime, NO_GRANT, false)?.rounds(self),
        }
    }
}

/// Everything within is counted, but what the simulated fabric does. `callgrind` knows it by its name.
#[inline(never)]
fn within_count<T>(does: impl FnOnce() -> T) -> T {
    black_box(does())
}

fn count_if<T>(yes: bool, does: impl FnOnce() -> T) -> T {
    if yes { within_count(does) } else { does() }
}

/// Two connected workers: `a` sends, `b` receives.
struct Pair<'a> {
    runtime: &'a Runtime,
    a: Worker<SimFabric>,
    b: Worker<SimFabric>,
    streams: Option<Inbound>,
    to: InstanceId,
    lost: Arc<dyn SendErrorHandler>,
}

fn worker(world: &SimWorld, host: u8, window: u16) -> Result<Worker<SimFabric>, Box<dyn Error>> {
    let slabs = SlabSizes { receive_slabs: 2048, receive_bytes: 8192, send_slabs: 128, send_bytes: 8192 };
    let config = Config {
        bind: ([10, 0, 0, host], 0).into(),
        progress: Progress::Manual,
        window_slabs: window,
        ..Config::default()
    };
    Ok(Worker::new(config, world.host([10, 0, 0, host], HostConfig { slabs, ..HostConfig::default() }))?)
}

impl<'a> Pair<'a> {
    fn new(runtime: &'a Runtime, window: u16, by_stream: bool) -> Result<Self, Box<dyn Error>> {
        let world = runtime.block_on(async { SimWorld::new(SimConfig::default()) });
        let (a, b) = (worker(&world, 1, window)?, worker(&world, 2, window)?);
        let streams = runtime.block_on(async {
            a.start_with_handler(|_: Borrowed<'_>| {}).await?;
            if by_stream {
                return b.start().await.map(Some);
            }
            b.start_with_handler(|frame: Borrowed<'_>| _ = black_box(frame)).await?;
            Ok(None)
        })?;
        let to = a.register(&b.address())?;
        let lost = Arc::new(|_, _, _| ()); // those on their way at the end; all others are counted
        let pair = Self { runtime, a, b, streams, to, lost };
        pair.connect()?;
        Ok(pair)
    }

    fn connect(&self) -> Result<(), Box<dyn Error>> {
        self.runtime.block_on(async {
            let (a, to) = (self.a.clone(), self.to);
            let connecting = tokio::spawn(async move { a.ensure_connected(to).await });
            while !connecting.is_finished() {
                self.a.progress()?;
                self.b.progress()?;
                tokio::task::yield_now().await;
            }
            Ok(connecting.await??)
        })
    }

    fn rounds(mut self, what: Operation) -> Result<(), Box<dyn Error>> {
        use Operation as Op;
        let _inside = self.runtime.enter();
        let payload = Bytes::from(vec![7; if what == Op::SendCopied { 4096 } else { 64 }]);
        let before = self.b.stats();
        for _ in 0..ROUNDS {
            if what == Op::Message {
                within_count(|| {
                    self.send(&payload);
                    self.settle()
                })?;
                continue;
            }
            if what == Op::SendWaiting {
                (0..SPENDING).for_each(|_| self.send(&payload));
            }
            count_if(matches!(what, Op::SendInline | Op::SendWaiting | Op::SendCopied), || self.send(&payload));
            count_if(matches!(what, Op::ReceiveHandler | Op::ReceiveStream), || self.receive())?;
            count_if(matches!(what, Op::Repost | Op::GrantSent), || self.b.progress())?;
            count_if(what == Op::GrantTaken, || self.a.progress())?;
            self.settle()?;
        }
        // That it was what it is called.
        let (a, b) = (self.a.stats(), self.b.stats());
        let bursts = if what == Op::SendWaiting { SPENDING + 1 } else { 1 };
        assert_eq!(b.received.total() - before.received.total(), ROUNDS * BURST * bursts);
        let (sent, copied) = (a.links.sends_inline, a.links.sends_copied);
        assert!(if what == Op::SendCopied { copied } else { sent } >= ROUNDS * BURST, "{sent} inline, {copied} copied");
        let grants = b.links.pure_grants - before.links.pure_grants;
        match what {
            Op::GrantSent | Op::GrantTaken => assert_eq!(grants, ROUNDS, "one each time"),
            Op::Message | Op::SendWaiting => assert!(grants >= ROUNDS / 4, "{grants} grants"),
            _ => assert!(grants < ROUNDS / 10, "{grants} grants"),
        }
        Ok(())
    }

    fn send(&self, payload: &Bytes) {
        for _ in 0..BURST {
            let _ = self.a.send(self.to, Bytes::new(), payload.clone(), MessageType::Message, self.lost.clone());
        }
    }

    /// The messages of a burst; by a handler they are done with when `progress` returns.
    fn receive(&mut self) -> Result<(), FabricError> {
        self.b.progress()?;
        if let Some(streams) = &mut self.streams {
            while let Some(frame) = streams.message.try_recv() {
                black_box(frame);
            }
        }
        Ok(())
    }

    /// Until nothing is left to be done on either side.
    fn settle(&self) -> Result<(), FabricError> {
        while self.b.progress()? > 0 {}
        while self.a.progress()? > 0 {}
        Ok(())
    }
}

/// GETs of one worker from another.
fn get(runtime: &Runtime) -> Result<(), Box<dyn Error>> {
    let world = runtime.block_on(async { SimWorld::new(SimConfig::default()) });
    let config = BulkConfig { chunk_bytes: CHUNK_BYTES, ..BulkConfig::default() };
    let side = |host| {
        let config = Config { bind: ([10, 0, 0, host], 0).into(), ..Config::default() };
        Worker::new(config, world.host([10, 0, 0, host], HostConfig::default()))
    };
    let bytes = usize::try_from(CHUNKS * u64::from(CHUNK_BYTES))?;
    let (a, b) = (side(1)?, side(2)?);
    let (reader, owner, into, from) = runtime.block_on(async {
        let (reader, _told) = Bulk::attach(&a, config.clone())?;
        let (owner, _told) = Bulk::attach(&b, config)?;
        let (_inbound, _also) = (a.start().await?, b.start().await?);
        a.register(&b.address())?;
        let into = reader.map_all(OwnedBytes::new(vec![0; bytes]), Access::DESTINATION).await?;
        let from = owner.map_all(OwnedBytes::new(vec![7; bytes]), Access::SOURCE).await?;
        Ok::<_, Box<dyn Error>>((reader, owner, into, from))
    })?;
    let from = from.whole().ok_or("the source has no key")?;
    let get = || runtime.block_on(reader.get(b.instance(), from, into.id, 0));
    get()?; // connects
    let before = reader.stats();
    for _ in 0..GETS {
        within_count(get)?;
    }
    let chunks = reader.stats().chunks - before.chunks;
    assert_eq!(chunks, GETS * CHUNKS);
    drop(owner);
    Ok(())
}
