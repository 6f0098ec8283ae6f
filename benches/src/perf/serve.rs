//! The server: waits for one client, does its part of each run, prints the client's result, ends.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    time::Instant,
};

use bytes::Bytes;
use tokio::task::JoinHandle;
use verbs_rma::Region;
use verbs_transport::{InstanceId, MessageType, fabric::bulk::Access};

use super::{
    args::{AT_ONCE_MAX, Common, Test, TestArgs},
    control::{Control, Expose, Exposed, Hello, Run, Serving, Setup, Tally, Welcome, Word},
    failure::Failure,
    node::{self, Node, OnFrame, PATIENCE, from_hex},
    report::Report,
    signal::{Signal, lock},
};
use crate::{
    environment::Environment,
    usage::{CpuTime, resident_kib},
};

/// Serves one client, for as long as it takes one to come.
pub(crate) fn serve(args: &TestArgs) -> Result<Report, Failure> {
    let (common, test) = (args.common(), args.test());
    // A wrong device is said at the start, not when somebody comes.
    let setup = Setup {
        polling: args.polling(),
        spin_us: common.spin,
        inline_bytes: None,
        send_wrs: None,
        signal_every: None,
        slab_bytes: None,
        pack: true,
        bulk: None,
        servers: 1,
        peers: 1,
    };
    drop(node::open(common, &setup, 1)?);
    let failed = |error| Failure::Listen { port: common.port, source: Arc::new(error) };
    // Both families, where there are both.
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, common.port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, common.port)))
        .map_err(failed)?;
    let port = listener.local_addr().map_err(failed)?.port();
    eprintln!("verbs-perf: waiting for a client of {test} on port {port}");
    loop {
        let (stream, from) = listener.accept().map_err(failed)?;
        let name = from.ip().to_string();
        match meet(stream, &name, test)? {
            Some(met) => return session(common, met),
            None => eprintln!("verbs-perf: {name} connected, but is no verbs-perf; waiting on"),
        }
    }
}

/// A client that said what it wants.
struct Met {
    control: Control,
    hello: Hello,
    signal: Arc<Signal>,
}

/// Hears a client's wish. `None`: this was none, but a port scanner or the like.
fn meet(stream: TcpStream, name: &str, test: Test) -> Result<Option<Met>, Failure> {
    let signal = Arc::new(Signal::default());
    let control = Control::new(stream, "client", name, &signal)?;
    let node = Node::new(super::args::Polling::Event, &signal)?;
    let hello = match node.wait("the client's wish", Some(PATIENCE), || signal.take_word()) {
        Ok(Word::Hello(hello)) => *hello,
        Err(failure @ Failure::Version { .. }) => {
            // In our words, which it will find to be of another version.
            let _ = control.say(&Word::Refused { why: failure.to_string() });
            return Err(failure);
        }
        _ => return Ok(None),
    };
    if hello.test != test {
        let why = format!("this server was started for {test}, and the client runs {}", hello.test);
        control.say(&Word::Refused { why: why.clone() })?;
        return Err(Failure::Refused(why));
    }
    Ok(Some(Met { control, hello, signal }))
}

fn session(common: &Common, met: Met) -> Result<Report, Failure> {
    let Met { control, hello, signal } = met;
    let mut node = Node::new(hello.setup.polling, &signal)?;
    let outcome = serve_runs(common, &control, &hello, &mut node);
    if let Err(failure) = &outcome {
        let _ = control.say(&Word::GaveUp { why: failure.to_string() });
    }
    node.shutdown();
    outcome
}

fn serve_runs(common: &Common, control: &Control, hello: &Hello, node: &mut Node) -> Result<Report, Failure> {
    let mut clients = BTreeSet::new();
    for _ in 0..hello.setup.servers.clamp(1, AT_ONCE_MAX) {
        node.add(common, &hello.setup, hello.setup.peers, control.local_ip)?;
    }
    for (member, address) in node.members.iter().flat_map(|member| hello.addresses.iter().map(move |at| (member, at))) {
        clients.insert(member.worker.register(&from_hex(address)?)?);
    }
    let environment = Environment::read();
    control.say(&Word::Welcome(Box::new(Welcome { addresses: node.addresses(), environment })))?;
    let mut seen = Seen::default();
    let mut before = CpuTime::of_this_process();
    let mut exposed = None;
    loop {
        // Without patience: the control connection tells when the client is gone.
        match node.wait("the client's next word", None, || node.signal.take_word())? {
            Word::Run(run) => {
                seen = Seen::default();
                node.members[0].set(on_frame(run, &clients, &seen, &node.signal));
                let (memory, range) = Memory::expose(node, &run, clients.first().copied())?;
                exposed = memory;
                before = CpuTime::of_this_process();
                control.say(&Word::Ready(range))?;
            }
            Word::Done => {
                let cpu = CpuTime::of_this_process() - before;
                node.members[0].clear();
                if let Some(memory) = exposed.take() {
                    Memory::hide(memory, node)?;
                }
                let counted = lock(&seen.0);
                let (frames, best_slice_nanos) = (counted.frames, counted.best_slice_nanos);
                control.say(&Word::Tally(Tally { frames, best_slice_nanos, cpu, resident_kib: resident_kib() }))?;
            }
            Word::Bye(report) => return Ok(*report),
            other => return Err(super::client::out_of_place(&other)),
        }
    }
}

/// Memory that the client reads or writes during a run.
struct Memory {
    region: Region,
    answering: Option<JoinHandle<()>>,
}

impl Memory {
    fn expose(node: &Node, run: &Run, client: Option<InstanceId>) -> Result<(Option<Self>, Option<Exposed>), Failure> {
        let Some(expose) = run.expose else { return Ok((None, None)) };
        let access = if expose == Expose::Source { Access::SOURCE } else { Access::PUT_TARGET };
        let region = node.map(run.bytes.max(run.beside_bytes), access)?;
        let answering = match (expose, client) {
            (Expose::PingPong { into }, Some(client)) => {
                let ((bulk, told), signal) = (node.bulk()?, node.signal.clone());
                Some(node.spawn(async move {
                    let mut told = told.lock().await;
                    while told.recv().await.is_some() {
                        if let Err(error) = bulk.put_and_notify(client, region.id, 0, into.into(), 1).await {
                            return signal.trouble(error.into());
                        }
                    }
                }))
            }
            _ => None,
        };
        Ok((Some(Self { region, answering }), region.whole().map(Into::into)))
    }

    fn hide(self, node: &Node) -> Result<(), Failure> {
        if let Some(answering) = self.answering {
            answering.abort();
        }
        node.unmap(self.region)
    }
}

/// What came in a run.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Counted>>);

#[derive(Default)]
pub(crate) struct Counted {
    pub(crate) frames: u64,
    slice: Option<(u64, Instant)>,
    pub(crate) best_slice_nanos: Option<u64>,
}

impl Counted {
    /// One more message; the clock is read once a stretch.
    pub(crate) fn count(&mut self, slice_frames: u64, now: impl FnOnce() -> Instant) {
        self.frames += 1;
        match self.slice {
            None => self.slice = Some((self.frames, now())),
            Some((first, began)) if self.frames - first == slice_frames => {
                let now = now();
                let took = u64::try_from((now - began).as_nanos()).unwrap_or(u64::MAX);
                self.best_slice_nanos = Some(self.best_slice_nanos.map_or(took, |best| best.min(took)));
                self.slice = Some((self.frames, now));
            }
            Some(_) => {}
        }
    }
}

fn on_frame(run: Run, clients: &BTreeSet<InstanceId>, seen: &Seen, signal: &Arc<Signal>) -> OnFrame {
    let (clients, seen, signal) = (clients.clone(), seen.clone(), signal.clone());
    let (payload, beside) = (Bytes::from(vec![0xa5; run.bytes]), Bytes::from(vec![0xb5; run.beside_bytes]));
    Box::new(move |worker, frame| {
        if !clients.contains(&frame.peer) {
            return;
        }
        let send = |payload, kind| drop(worker.send(frame.peer, Bytes::new(), payload, kind, signal.clone()));
        match (run.what, frame.kind) {
            (Serving::Nothing, _) => {}
            (Serving::Echo, MessageType::Event) => send(beside.clone(), MessageType::Ack),
            (Serving::Echo, _) => send(payload.clone(), MessageType::Response),
            (Serving::Count, MessageType::Event) => send(Bytes::new(), MessageType::Ack),
            (Serving::Count, _) => lock(&seen.0).count(run.slice_frames, Instant::now),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_peak_is_that_of_the_fastest_full_stretch() {
        let (start, mut counted) = (Instant::now(), Counted::default());
        for at in [0, 10, 20, 23, 26, 90] {
            counted.count(2, || start + Duration::from_nanos(at));
        }
        // Stretches of two end at 20 and at 26; the last is not full.
        assert_eq!((counted.frames, counted.best_slice_nanos), (6, Some(6)));
    }
}
