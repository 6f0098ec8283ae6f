//! The command line.

use std::{fmt::Write as _, net::SocketAddr, path::PathBuf};

use clap::Parser;
use verbs_transport::WorkerAddress;

/// Two processes exchange checksummed messages over real RC queue pairs.
///
/// Without --listen or --connect both run on this host: the second is this program once more.
#[derive(Clone, Debug, Parser)]
#[command(name = "demo", version, max_term_width = 100)]
pub(crate) struct Args {
    /// RDMA device, as `rdma link` prints it; default: the best there is
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Port of the device, from 1; default: the first that is ACTIVE
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) port: Option<u8>,
    /// Index in the port's GID table; default: chosen, and the reason is printed
    #[arg(long, value_name = "N")]
    pub(crate) gid_index: Option<u8>,
    /// Small messages each way
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) messages: u32,
    /// Round trips of which latency is told
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) round_trips: u32,
    /// A thread polls without pause: lower latency for a core in each process
    #[arg(long)]
    pub(crate) busy_poll: bool,
    /// The results as JSON on standard output
    #[arg(long)]
    pub(crate) json: bool,
    /// Plays the second process on this machine: an address and port that the other machine can reach
    #[arg(long, value_name = "ADDR:PORT", conflicts_with_all = ["connect", "json"], value_parser = definite)]
    listen: Option<SocketAddr>,
    /// Plays the first process, against the one that printed this blob on another machine
    #[arg(long, value_name = "BLOB", value_parser = blob)]
    connect: Option<WorkerAddress>,
    /// A file with at least 16 secret bytes that both machines must have
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
    /// Started by the first process
    #[arg(long, hide = true, conflicts_with_all = ["listen", "connect"])]
    second_process: bool,
}

/// Which part this process plays.
pub(crate) enum Role {
    /// The first process, which starts the second.
    Both,
    /// The second process on this host.
    SecondProcess,
    /// The second process, for another machine.
    Listen(SocketAddr),
    /// The first process, with the second on another machine.
    Connect(WorkerAddress),
}

impl Args {
    pub(crate) fn role(&self) -> Role {
        match (&self.listen, &self.connect) {
            (Some(bind), _) => Role::Listen(*bind),
            (None, Some(address)) => Role::Connect(address.clone()),
            (None, None) if self.second_process => Role::SecondProcess,
            (None, None) => Role::Both,
        }
    }

    /// What the second process is started with.
    pub(crate) fn for_second_process(&self) -> Vec<String> {
        let mut words = vec!["--second-process".to_owned()];
        let mut option = |name: &str, value: Option<String>| {
            words.extend(value.into_iter().flat_map(|value| [name.to_owned(), value]));
        };
        option("--device", self.device.clone());
        option("--port", self.port.map(|port| port.to_string()));
        option("--gid-index", self.gid_index.map(|index| index.to_string()));
        option("--secret-file", self.secret_file.as_ref().map(|path| path.display().to_string()));
        words.extend(self.busy_poll.then(|| "--busy-poll".to_owned()));
        words
    }
}

fn definite(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text.parse().map_err(|error| format!("{error}; as in 192.0.2.1:7471"))?;
    if address.ip().is_unspecified() {
        return Err(format!("{} stands for \"any\": name the one that the other machine can reach", address.ip()));
    }
    Ok(address)
}

fn blob(text: &str) -> Result<WorkerAddress, String> {
    let bytes = from_hex(text.trim()).ok_or("it is not hexadecimal; copy the whole line that --listen printed")?;
    let address = WorkerAddress::from_bytes(bytes);
    address.endpoint().map_err(|error| error.to_string())?;
    Ok(address)
}

/// Two digits a byte: safe on any command line.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes all");
        text
    })
}

pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|digit| digit.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
    Some(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}
