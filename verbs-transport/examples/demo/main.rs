//! Two processes exchange checksummed messages over real RC queue pairs, and say what they saw.
//!
//! ```text
//! cargo run --release --example demo                          # two processes on this host
//! cargo run --release --example demo -- --listen 192.0.2.1:7471   # on one machine: prints a blob
//! cargo run --release --example demo -- --connect BLOB            # on another
//! ```
//!
//! The second process is this program once more; all that the first learns of it is the address that it prints. Exit
//! status 0 and `demo: PASSED`, or 1 and `demo: FAILED because …`; every wait has a limit.
//!
//! | module | holds |
//! |---|---|
//! | `args` | the command line |
//! | `talk` | what the processes say: a header in front of each payload, numbers, checksums |
//! | `lead` | the first process: asks, measures, checks |
//! | `serve` | the second: checks and answers |
//! | `second` | starting it, its address, its end |
//! | `problem` | everything that can go wrong, and the place where it is first noticed |
//! | `report` | the results, as text and as JSON |
//! | `rnr` | the device's own count of receivers that were not ready |

mod args;
mod lead;
mod problem;
mod report;
mod rnr;
mod second;
mod serve;
mod talk;

use std::{
    net::{SocketAddr, UdpSocket},
    process::ExitCode,
    time::Instant,
};

use clap::Parser as _;
use verbs_transport::{
    Config, Progress, Secret, TcpNet, Worker, WorkerAddress,
    fabric::SlabSizes,
    verbs::{DeviceConfig, DeviceFabric},
};

use crate::{
    args::{Args, Role},
    lead::Lead,
    problem::Problem,
    report::{Printer, Report},
    second::Second,
};

/// The demo runs on a device.
type Fabric = DeviceFabric<TcpNet>;

/// 4.5 MiB in all: fits into the 8 MiB of locked memory that most systems allow anyone.
const SLABS: SlabSizes = SlabSizes { receive_slabs: 512, receive_bytes: 8192, send_slabs: 64, send_bytes: 8192 };

fn main() -> ExitCode {
    let args = Args::parse();
    if std::env::var_os("RUST_LOG").is_some() {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("the system has threads");
    match args.role() {
        Role::SecondProcess => runtime.block_on(second::main(&args)),
        Role::Listen(bind) => runtime.block_on(listen(&args, bind)),
        Role::Both => runtime.block_on(first(&args, None)),
        Role::Connect(address) => runtime.block_on(first(&args, Some(address))),
    }
}

/// The first process, from start to verdict.
async fn first(args: &Args, remote: Option<WorkerAddress>) -> ExitCode {
    let printer = Printer::new(args.json);
    let mut report = Report::default();
    let begun = Instant::now();
    let result = lead(args, remote, &printer, &mut report).await;
    report.seconds = begun.elapsed().as_secs_f64();
    printer.verdict(&mut report, result.as_ref().err());
    ExitCode::from(u8::from(result.is_err()))
}

async fn lead(
    args: &Args,
    remote: Option<WorkerAddress>,
    printer: &Printer,
    report: &mut Report,
) -> Result<(), Problem> {
    printer.begin(remote.is_some());
    let bind = match &remote {
        None => Config::default().bind,
        Some(address) => facing(address)?,
    };
    let fabric = open(args)?;
    let mut second = match remote {
        None => Second::start(args)?,
        Some(address) => Second::elsewhere(address),
    };
    let result = async {
        let mut lead = Lead::begin(args, config(args, bind)?, fabric, &mut second).await?;
        lead.run(args, printer, report).await
    };
    match result.await {
        Ok(()) => second.ended().await,
        // When the second process is gone, its own last words say more than our view of it.
        Err(problem) => Err(second.explain(problem).await),
    }
}

/// The second process's part, on another machine.
async fn listen(args: &Args, bind: SocketAddr) -> ExitCode {
    let answer = async {
        let fabric = open(args)?;
        println!("listening for one demo on {}", fabric.device_name());
        let worker = Worker::new(config(args, bind)?, fabric)?;
        let mut inbound = worker.start().await?;
        println!("  {}", worker.path_reason());
        println!("\non the other machine, run this program with\n");
        println!("  --connect {}\n", args::to_hex(worker.address().as_bytes()));
        let result = serve::serve(&worker, &mut inbound, None).await;
        worker.shutdown().await;
        result
    };
    match answer.await {
        Ok(messages) => {
            println!("demo: PASSED here: {messages} messages came, all in order and with good checksums");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            println!("demo: FAILED because {problem}");
            ExitCode::FAILURE
        }
    }
}

/// Opens the device that the command line asks for, or the best there is.
fn open(args: &Args) -> Result<Fabric, Problem> {
    let config = DeviceConfig {
        device: args.device.clone(),
        port: args.port,
        gid_index: args.gid_index,
        slabs: SLABS,
        cq_depth: 4095,
        ..DeviceConfig::default()
    };
    Ok(DeviceFabric::open(&config, TcpNet::default())?)
}

fn config(args: &Args, bind: SocketAddr) -> Result<Config, Problem> {
    let mut config = Config { bind, ..Config::default() };
    if args.busy_poll {
        config.progress = Progress::BusyPoll;
    }
    if let Some(path) = &args.secret_file {
        let unreadable = |error: &dyn std::fmt::Display| Problem::Secret(format!("{}: {error}", path.display()));
        let bytes = std::fs::read(path).map_err(|error| unreadable(&error))?;
        config.bootstrap.secret = Some(Secret::new(bytes.trim_ascii()).map_err(|error| unreadable(&error))?);
    }
    Ok(config)
}

/// Our own address on the way to the peer, found without sending anything: what it would dial if it had to.
fn facing(address: &WorkerAddress) -> Result<SocketAddr, Problem> {
    let endpoint = address.endpoint().map_err(|error| Problem::Address(error.to_string()))?;
    let to = endpoint.bootstrap.first().copied().ok_or_else(|| Problem::Address("it names no socket".to_owned()))?;
    let any: SocketAddr = if to.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0_u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).and_then(|socket| socket.connect(to).and_then(|()| socket.local_addr()));
    let local = socket.map_err(|error| Problem::Address(format!("no route to {to}: {error}")))?;
    Ok((local.ip(), 0).into())
}
