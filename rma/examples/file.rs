//! One process offers a file, another pulls it and checks its hash.
//!
//! ```console
//! host-a$ cargo run --release -p verbs-rma --example file -- offer 192.0.2.1:7471 big.iso
//! host-b$ cargo run --release -p verbs-rma --example file -- pull TICKET copy.iso       # host-a prints the line
//! ```

use std::{error::Error, io::Read as _, net::SocketAddr, path::PathBuf, process::ExitCode, time::Instant};

use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};
use tokio::{fs::File, io::AsyncReadExt as _};
use verbs_rma::{
    Handle, Rendezvous, RendezvousConfig,
    rendezvous::{Destination, Source},
};
use verbs_transport::{
    Config, TcpNet, Worker, WorkerAddress,
    verbs::{DeviceConfig, DeviceFabric},
};

/// Moves a file from one process to another by RDMA READ.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Offers a file until Ctrl-C.
    Offer {
        /// Address that the other side dials; it must be this host's.
        listen: SocketAddr,
        /// The file.
        file: PathBuf,
    },
    /// Pulls what a ticket names.
    Pull {
        /// As `offer` printed it.
        ticket: String,
        /// Where to write it.
        file: PathBuf,
    },
}

type Failed = Box<dyn Error>;

#[tokio::main]
async fn main() -> ExitCode {
    let done = match Args::parse().command {
        Command::Offer { listen, file } => offer(listen, file).await,
        Command::Pull { ticket, file } => pull(&ticket, file).await,
    };
    if let Err(error) = done {
        eprintln!("file: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn rendezvous(config: Config) -> Result<Rendezvous<DeviceFabric<TcpNet>>, Failed> {
    let fabric = DeviceFabric::open(&DeviceConfig::default(), TcpNet::default())?;
    Ok(Rendezvous::attach(Worker::new(config, fabric)?, RendezvousConfig::default())?)
}

async fn offer(listen: SocketAddr, file: PathBuf) -> Result<(), Failed> {
    let rendezvous = rendezvous(Config { bind: listen, ..Config::default() })?;
    let _inbound = rendezvous.start().await?;
    let hash = tokio::task::spawn_blocking({
        let file = file.clone();
        move || hash_of(&file)
    });
    let handle = rendezvous.offer(Source::open(&file)?).await?;
    let ticket = Ticket { handle, hash: hash.await??, address: rendezvous.worker().address() };
    println!("offered {}; on the other host:\n", file.display());
    println!("  cargo run --release -p verbs-rma --example file -- pull {} FILE\n", ticket.encode());
    tokio::signal::ctrl_c().await?;
    let pulled = rendezvous.stats().granted;
    println!("pulled {} times by READ, {} times in chunks", pulled.rdma, pulled.chunked_total());
    rendezvous.shutdown().await;
    Ok(())
}

async fn pull(ticket: &str, file: PathBuf) -> Result<(), Failed> {
    let ticket = Ticket::decode(ticket).ok_or("this is no ticket of `offer`")?;
    let rendezvous = rendezvous(Config::default())?;
    let _inbound = rendezvous.start().await?;
    rendezvous.register(&ticket.address)?;

    let bar = ProgressBar::new(rendezvous.metadata(ticket.handle).await?.total_bytes);
    bar.set_style(ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")?);
    let mut written = File::create(&file).await?;
    let began = Instant::now();
    let pulled = rendezvous
        .pull(ticket.handle)
        .on_progress(|done, _| bar.set_position(done))
        .into(Destination::writer(&mut written))
        .await?;
    bar.finish();
    let how = match pulled.path {
        Ok(()) => "by RDMA READ".to_owned(),
        Err(reason) => format!("in chunks ({reason})"),
    };
    println!("{} bytes {how} in {:.2?}", pulled.bytes, began.elapsed());
    rendezvous.shutdown().await;

    let mut copy = File::open(&file).await?;
    let (mut hash, mut piece) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        let bytes = copy.read(&mut piece).await?;
        if bytes == 0 {
            break;
        }
        hash.update(&piece[..bytes]);
    }
    if hash.finalize()[..] != ticket.hash {
        return Err("the file differs from what was offered".into());
    }
    println!("{}: SHA-256 as offered", file.display());
    Ok(())
}

fn hash_of(file: &PathBuf) -> std::io::Result<[u8; 32]> {
    let (mut file, mut hash, mut piece) = (std::fs::File::open(file)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hash.finalize().into()),
            bytes => hash.update(&piece[..bytes]),
        }
    }
}

/// All that the other side needs, as one word: handle, hash and the owner's address.
struct Ticket {
    handle: Handle,
    hash: [u8; 32],
    address: WorkerAddress,
}

impl Ticket {
    fn encode(&self) -> String {
        let bytes = [&self.handle.to_bytes()[..], &self.hash, self.address.as_bytes()].concat();
        bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
    }

    fn decode(text: &str) -> Option<Self> {
        let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok())).collect();
        let bytes: Vec<u8> =
            digits?.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
        let (handle, rest) = bytes.split_first_chunk()?;
        let (hash, address) = rest.split_first_chunk()?;
        let address = WorkerAddress::from_bytes(address.to_vec());
        Some(Self { handle: Handle::from_bytes(*handle), hash: *hash, address })
    }
}
