//! The client: meets the server, runs the test, has the result.

use std::{sync::Arc, time::Duration};

use verbs_rma::RemoteRange;
use verbs_transport::{GidType, InstanceId, PeerDescription, WorkerAddress};

use super::{
    args::{Common, Extent, Messages, Test, TestArgs},
    bandwidth, connect,
    control::{BulkSetup, Control, Hello, Run, Setup, Tally, Welcome, Word},
    failure::Failure,
    latency,
    node::{Node, PATIENCE, from_hex},
    report::{Cell, Fact, Report, Row},
    rma, scale,
    signal::Signal,
};
use crate::{environment::Environment, usage::CpuTime};

/// Epochs of one peer that `connect` has at once at worst: one lives, the others are flushing. Of many peers fewer, since
/// the next round begins only when nothing is left of the last.
const EPOCHS_OF_ONE: u32 = 8;
const EPOCHS_OF_MANY: u32 = 3;

/// A client that has met its server.
pub(crate) struct Client {
    pub(crate) node: Node,
    control: Control,
    /// The first of `servers`.
    pub(crate) server: InstanceId,
    pub(crate) servers: Vec<(InstanceId, WorkerAddress)>,
    pub(crate) quiet: bool,
    header: Vec<Fact>,
    here: Environment,
    there: Environment,
}

/// Runs the test; `began` is called with the report so far once the header is known.
pub(crate) fn run(args: &TestArgs, server: &str, mut began: impl FnMut(&Report)) -> Result<Report, Failure> {
    let mut client = Client::meet(args, server)?;
    let outcome = client.test(args, &mut began);
    let end = match &outcome {
        Ok(report) => Word::Bye(Box::new(report.clone())),
        Err(failure) => Word::GaveUp { why: failure.to_string() },
    };
    // The result stands whether or not the server hears of it.
    let _ = client.control.say(&end);
    client.node.shutdown();
    outcome
}

impl Client {
    fn meet(args: &TestArgs, server: &str) -> Result<Self, Failure> {
        let (common, test) = (args.common(), args.test());
        let here = Environment::read();
        let signal = Arc::new(Signal::default());
        let setup = setup(args);
        let mut node = Node::new(setup.polling, &signal)?;
        // A wrong device is said before anything else.
        drop(super::node::open(common, &setup, 1)?);
        let control = Control::dial(server, common.port, test, &signal)?;
        for _ in 0..args.workers() {
            node.add(common, &setup, args.servers() * epochs(args), control.local_ip)?;
        }
        let addresses = node.addresses();
        control.say(&Word::Hello(Box::new(Hello { test, setup, addresses })))?;
        let welcome = hear(&node, "the server's answer")?;
        let Welcome { addresses, environment: there } = match welcome {
            Word::Welcome(welcome) => *welcome,
            Word::Refused { why } => return Err(Failure::Refused(why)),
            other => return Err(out_of_place(&other)),
        };
        let mut servers = Vec::new();
        for address in &addresses {
            let address = from_hex(address)?;
            let ids =
                node.members.iter().map(|member| member.worker.register(&address)).collect::<Result<Vec<_>, _>>()?;
            servers.extend(ids.first().map(|id| (*id, address)));
        }
        let (server, _) = *servers.first().ok_or_else(|| Failure::Protocol("no worker".to_owned()))?;
        Ok(Self { node, control, server, servers, quiet: common.quiet, header: Vec::new(), here, there })
    }

    fn test(&mut self, args: &TestArgs, began: &mut dyn FnMut(&Report)) -> Result<Report, Failure> {
        // The first connection shows what is granted; `scale` and `connect` make the others themselves.
        for member in 0..if args.test() == Test::Scale { 1 } else { self.node.members.len() } {
            self.node.connect(member, self.server)?;
        }
        let description = self.describe()?;
        self.header = self.facts(args, &description);
        if let Some(messages) = messages(args) {
            check_sizes(&messages.sizes(args.test().default_bytes()), &description, args.test())?;
        }
        let mut report = self.report(args.test());
        began(&report);
        match args {
            TestArgs::SendLat(lat) => latency::run(self, lat, &mut report)?,
            TestArgs::SendBw(bw) => bandwidth::run(self, bw, &mut report)?,
            TestArgs::ReadLat(rma) | TestArgs::ReadBw(rma) | TestArgs::WriteLat(rma) | TestArgs::WriteBw(rma) => {
                rma::run(self, args.test(), rma, &mut report)?;
            }
            TestArgs::Connect(args) => connect::run(self, args, &mut report)?,
            TestArgs::Scale(args) => scale::run(self, args, &mut report)?,
        }
        Ok(report)
    }

    fn describe(&self) -> Result<PeerDescription, Failure> {
        let member = &self.node.members[0];
        let description = member.worker.describe(self.server);
        description.ok_or_else(|| Failure::Protocol("the server is not known any more".to_owned()))
    }

    fn report(&self, test: Test) -> Report {
        Report {
            test,
            header: self.header.clone(),
            client: self.here.clone(),
            server: self.there.clone(),
            rows: Vec::new(),
            notes: notes(&self.here, &self.there),
        }
    }

    /// Granted values, not requested ones.
    fn facts(&self, args: &TestArgs, it: &PeerDescription) -> Vec<Fact> {
        let local = it.local;
        let gid_type = match local.gid_type {
            GidType::Ib => "InfiniBand",
            GidType::RoceV1 => "RoCE v1",
            GidType::RoceV2 => "RoCE v2",
        };
        let known = |value: Option<u32>| value.map_or_else(|| "unknown".to_owned(), |value| value.to_string());
        let limits = it.limits;
        let device = self.node.members[0].worker.fabric().device_name();
        vec![
            Fact::new("device", "Device", device),
            Fact::new("ib_port", "Port", local.port),
            Fact::new("connection", "Connection type", format!("RC, SRQ, {gid_type}")),
            Fact::new("gid_index", "GID index", local.gid_index),
            Fact::new("gid", "GID", local.gid),
            Fact::new("remote_gid", "Remote GID", it.remote.map_or_else(String::new, |port| port.gid.to_string())),
            Fact::new("mtu_bytes", "Mtu[B]", known(it.mtu_bytes)),
            Fact::new("qps", "Number of qps", args.workers()),
            Fact::new("tx_depth", "TX depth", known(limits.map(|limits| limits.send_wrs))),
            Fact::new("rx_depth", "RX depth (window)", known(limits.map(|limits| limits.rx_window.into()))),
            Fact::new("cq_moderation", "CQ Moderation", known(limits.map(|limits| limits.signal_every))),
            Fact::new("inline_granted_bytes", "Inline granted[B]", known(it.inline_granted_bytes)),
            Fact::new("inline_bytes", "Max inline[B]", known(limits.map(|limits| limits.inline_bytes))),
            Fact::new("send_bytes", "Longest SEND[B]", known(limits.map(|limits| limits.send_bytes))),
            Fact::new("progress", "Progress", self.node.polling().words()),
        ]
    }

    /// One run: the server gets ready, `measure` does it, and both sides' CPU time is counted.
    pub(crate) fn run<T>(
        &self,
        run: Run,
        measure: impl FnOnce(Option<RemoteRange>) -> Result<T, Failure>,
    ) -> Result<(T, Tally, CpuTime), Failure> {
        self.control.say(&Word::Run(run))?;
        let exposed = match hear(&self.node, "the server to get ready")? {
            Word::Ready(exposed) => exposed.map(RemoteRange::from),
            other => return Err(out_of_place(&other)),
        };
        let before = CpuTime::of_this_process();
        let measured = measure(exposed)?;
        let cpu = CpuTime::of_this_process() - before;
        self.control.say(&Word::Done)?;
        match hear(&self.node, "the server's count")? {
            Word::Tally(tally) => Ok((measured, tally, cpu)),
            other => Err(out_of_place(&other)),
        }
    }
}

fn messages(args: &TestArgs) -> Option<&Messages> {
    match args {
        TestArgs::SendLat(args) => Some(&args.messages),
        TestArgs::SendBw(args) => Some(&args.messages),
        TestArgs::Scale(args) => Some(&args.messages),
        TestArgs::ReadLat(args) | TestArgs::ReadBw(args) | TestArgs::WriteLat(args) | TestArgs::WriteBw(args) => {
            Some(&args.messages)
        }
        TestArgs::Connect(_) => None,
    }
}

/// Before anything is sent, against what both sides agreed on.
fn check_sizes(sizes: &[usize], description: &PeerDescription, test: Test) -> Result<(), Failure> {
    if test.is_rma() {
        let max = rma::MAX_BYTES;
        return match sizes.iter().find(|&&bytes| bytes > max) {
            Some(&bytes) => Err(Failure::TransferTooLarge { bytes, max }),
            None => Ok(()),
        };
    }
    let max = description.max_message_bytes.unwrap_or(usize::MAX);
    match sizes.iter().find(|&&bytes| bytes > max) {
        Some(&bytes) => Err(Failure::TooLarge { bytes, max }),
        None => Ok(()),
    }
}

fn setup(args: &TestArgs) -> Setup {
    let common: &Common = args.common();
    Setup {
        polling: args.polling(),
        spin_us: common.spin,
        inline_bytes: common.inline_size,
        send_wrs: common.tx_depth,
        signal_every: common.cq_mod,
        slab_bytes: common.slab,
        pack: !common.no_pack,
        bulk: args.has_bulk().then(|| BulkSetup {
            outs: args.rma().and_then(|rma| rma.outs),
            chunk_bytes: args.rma().and_then(|rma| rma.chunk),
            send_wrs: common.tx_depth.filter(|_| args.test().is_rma()),
        }),
        servers: args.servers(),
        peers: args.workers() * epochs(args),
    }
}

/// Epochs that one peer may need at once.
fn epochs(args: &TestArgs) -> u32 {
    match (args.test(), args.servers()) {
        (Test::Connect, 1) => EPOCHS_OF_ONE,
        (Test::Connect, _) => EPOCHS_OF_MANY,
        _ => 1,
    }
}

/// The next word of the other side.
fn hear(node: &Node, waiting_for: &'static str) -> Result<Word, Failure> {
    let signal = node.signal.clone();
    node.wait(waiting_for, Some(PATIENCE), || signal.take_word())
}

pub(crate) fn out_of_place(word: &Word) -> Failure {
    let word: String = format!("{word:?}").chars().take(40).collect();
    Failure::Protocol(format!("{word} out of place"))
}

fn notes(here: &Environment, there: &Environment) -> Vec<String> {
    let mut notes = Vec::new();
    if here.host == there.host {
        let both = if here.cpus <= 2 { format!(" and share its {} CPUs", here.cpus) } else { String::new() };
        notes.push(format!("both processes run on one host{both}"));
    }
    notes
}

/// The processes' CPU time of a run of so many messages.
pub(crate) fn cpu_cells(client: CpuTime, server: CpuTime, messages: u64) -> Vec<Cell> {
    let seconds = |key: &str, title: &str, time: Duration| Cell::real(key, title, time.as_secs_f64(), 3);
    #[expect(clippy::cast_precision_loss, reason = "a quotient for people")]
    let each = (client.total() + server.total()).as_secs_f64() * 1e6 / messages as f64;
    vec![
        seconds("client_user_s", "client user[sec]", client.user),
        seconds("client_system_s", "system[sec]", client.system),
        seconds("server_user_s", "server user[sec]", server.user),
        seconds("server_system_s", "system[sec]", server.system),
        Cell::real("cpu_us_per_message", "both, each message[usec]", each, 2),
    ]
}

/// A row with its CPU time.
pub(crate) fn row(cells: Vec<Cell>, client: CpuTime, server: CpuTime, messages: u64) -> Row {
    Row { cells, cpu: cpu_cells(client, server, messages) }
}

/// How many messages a run has at most.
pub(crate) fn most(extent: Extent) -> u64 {
    match extent {
        Extent::Messages(count) => count,
        Extent::For(_) => u64::MAX,
    }
}
