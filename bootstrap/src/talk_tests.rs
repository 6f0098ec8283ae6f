//! Dialer against listener in paused time, and each against a hand-made other side.

mod auth;
mod limits;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, sleep},
};

use crate::{
    auth::{Role, Secret, nonce},
    config::Config,
    dial::{DialError, dial},
    life::LifeEnd,
    listen::{AcceptError, Listener},
    mem_net::{MemNet, MemStream},
    net::{Net, NetListener},
    status::{Refusal, Stage, Status},
    testing::{Heard, Recorder, offer},
    types::Offer,
    wire::{
        Challenge, Frame, Hello, MAX_FRAME_BYTES, Nonce, Proof, READY, Reply, Tag, WireError, read_frame, write_frame,
    },
};

const DIALER: (u128, u64) = (1, 11);
const ACCEPTOR: (u128, u64) = (2, 21);

fn hello_offer() -> Offer {
    offer(DIALER, ACCEPTOR, 1, 0, 0x100)
}

fn reply_offer() -> Offer {
    offer(ACCEPTOR, DIALER, 1, 1, 0x200)
}

fn addr() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn config(secret: Option<&str>) -> Config {
    let secret = secret.map(|secret| Secret::new(secret.as_bytes()).expect("16 bytes"));
    Config { secret, ..Config::default() }
}

const RIGHT: Option<&str> = Some("the right secret");
const WRONG: Option<&str> = Some("the wrong secret");

struct Scene {
    net: MemNet,
    acceptor: Arc<Recorder<MemStream>>,
    listener: Listener,
}

impl Scene {
    async fn new(config: &Config, acceptor: Recorder<MemStream>) -> Self {
        let (net, acceptor) = (MemNet::new(), Arc::new(acceptor));
        let listener = Listener::bind(&net, addr(), config, Arc::clone(&acceptor)).await.expect("a fresh net");
        Self { net, acceptor, listener }
    }

    async fn accepting(config: &Config) -> Self {
        Self::new(config, Recorder::new(Ok(reply_offer()))).await
    }

    async fn connect(&self) -> MemStream {
        self.net.dial(self.listener.local_addr()).await.expect("it listens")
    }

    async fn dial(&self, config: &Config) -> Result<(), DialError> {
        let dialed = dial(&self.net, self.listener.local_addr(), &hello_offer(), config).await?;
        assert_eq!(dialed.reply, reply_offer());
        let mut life = dialed.ready().await?;
        settle().await;
        let heard = self.acceptor.take();
        let [Heard::Hello(hello), Heard::Ready(again, _)] = &heard[..] else { panic!("{heard:?}") };
        assert_eq!((hello, again), (&hello_offer(), &hello_offer()));
        drop(heard);
        assert!(matches!(life.closed().await, LifeEnd::Closed), "the acceptor dropped its end");
        Ok(())
    }

    /// Nobody reached the acceptor, and each connection is counted once.
    async fn nothing_came_of_it(&self) {
        settle().await;
        assert!(self.acceptor.take().is_empty());
        let stats = self.listener.stats();
        assert_eq!((stats.completed, stats.pending, stats.in_progress), (0, 0, 0), "{stats:?}");
        assert_eq!(sum(&self.listener), stats.accepted, "{stats:?}");
    }
}

fn sum(listener: &Listener) -> u64 {
    let s = listener.stats();
    let refused: u64 = s.refused.iter().map(|(_, count)| count).sum();
    let ended = s.completed + s.timed_out + s.garbage + s.oversize + s.closed_early + s.over_limit + s.stopped;
    refused + ended + s.pending + s.in_progress
}

/// Lets every task run until all wait: paused time moves only then.
async fn settle() {
    sleep(Duration::from_millis(1)).await;
}

async fn read(stream: &mut MemStream) -> Frame {
    Frame::decode(&read_frame(stream).await.expect("a frame")).expect("of this version")
}

async fn say(stream: &mut MemStream, frame: Frame) {
    write_frame(stream, &frame).await.expect("the other side reads");
}

fn hello(secret: bool) -> Hello {
    Hello { offer: hello_offer(), nonce: nonce(), has_secret: secret }
}

/// Dials a hand-made acceptor.
async fn dial_against<F>(secret: Option<&str>, acceptor: impl FnOnce(MemStream) -> F + Send + 'static) -> DialError
where
    F: Future<Output = ()> + Send,
{
    let net = MemNet::new();
    let mut listener = net.listen(addr()).await.expect("a fresh net");
    let at = listener.local_addr().expect("it listens");
    let serving = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a dialer");
        acceptor(stream).await;
    });
    let end = dial(&net, at, &hello_offer(), &config(secret)).await;
    serving.await.expect("the acceptor's script holds");
    end.expect_err("this acceptor is not to be trusted")
}

async fn read_hello(stream: &mut MemStream) -> Hello {
    match read(stream).await {
        Frame::Hello(hello) => hello,
        other => panic!("{other:?}"),
    }
}
