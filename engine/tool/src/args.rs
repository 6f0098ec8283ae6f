//! The command line.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};

use crate::{over::Over, ticket::Ticket};

/// Serves blocks of memory and files, and reads, writes and watches them from other hosts.
#[derive(Debug, Parser)]
#[command(name = "verbs-engine", version, max_term_width = 100)]
pub(crate) struct Args {
    /// Results as JSON on standard output, one object a line
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a block of memory, or the files of a directory, until Ctrl-C; prints the ticket that peers need, and every
    /// notification that arrives
    Serve(Serve),
    /// Show what a source serves
    List(Peer),
    /// Read a range of what a source serves
    Read(Read),
    /// Write into a range of what a source serves
    Write(Write),
    /// Put a notification into a source's inbox
    Notify(Notify),
    /// Show a source's counters, as of a second ago
    Stats(Peer),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Serve {
    /// Address and port to listen at; one that the peers can reach, on a network that you trust
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    pub(crate) bind: SocketAddr,
    /// Serve zeroed memory of this size under the name "block": 4096, 64K, 16M, 1G
    #[arg(long, value_name = "SIZE", value_parser = size, required_unless_present = "dir")]
    pub(crate) block: Option<u64>,
    /// Serve the files of this directory, under their names; they are read into memory. Empty ones and folders are left
    /// out
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
    /// Let peers write, too. Files that they changed are stored when the command ends by Ctrl-C, SIGTERM or --for
    #[arg(long)]
    pub(crate) writable: bool,
    /// What peers are told that this source is called
    #[arg(long, default_value = "")]
    pub(crate) name: String,
    /// End after so many seconds
    #[arg(long = "for", value_name = "SECONDS", value_parser = seconds)]
    pub(crate) lasting: Option<Duration>,
    /// Let peers ask for `--direct`: a read keeps its bytes from being changed for as long as it takes, 5 seconds at most; a
    /// write that fails may leave its bytes half changed
    #[arg(long)]
    pub(crate) direct: bool,
    /// Threads that serve requests; as many again may wait
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) workers: u16,
    #[command(flatten)]
    pub(crate) over: Over,
}

/// Whom to talk to.
#[derive(Debug, clap::Args)]
pub(crate) struct Peer {
    /// What `serve` has printed: address, port and epoch
    pub(crate) ticket: Ticket,
    /// Seconds for everything together
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Read {
    #[command(flatten)]
    pub(crate) peer: Peer,
    /// The name, as `list` shows it
    pub(crate) name: String,
    /// First byte
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = size)]
    pub(crate) offset: u64,
    /// How many bytes; default: to the end
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub(crate) length: Option<u64>,
    /// Straight between memory and the network, without a copy at either end; the source must allow it
    #[arg(long)]
    pub(crate) direct: bool,
    /// Where to put them; default: standard output
    #[arg(long, short, value_name = "FILE", required_if_eq("json", "true"))]
    pub(crate) output: Option<PathBuf>,
    /// Bytes of one request, at most what the source takes (8M)
    #[arg(long, value_name = "BYTES", default_value = "4M", value_parser = chunk)]
    pub(crate) chunk: u64,
    #[command(flatten)]
    pub(crate) over: Over,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Write {
    #[command(flatten)]
    pub(crate) peer: Peer,
    /// The name, as `list` shows it
    pub(crate) name: String,
    /// What to write; it must fit behind the offset
    pub(crate) input: PathBuf,
    /// First byte
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = size)]
    pub(crate) offset: u64,
    /// Straight between memory and the network, without a copy at either end; the source must allow it. What fails on its
    /// way may leave bytes half changed there
    #[arg(long)]
    pub(crate) direct: bool,
    /// A message for the source once all of it is there; its name is that of the range
    #[arg(long, value_name = "MESSAGE")]
    pub(crate) notify: Option<String>,
    /// Bytes of one request, at most what the source takes (8M)
    #[arg(long, value_name = "BYTES", default_value = "4M", value_parser = chunk)]
    pub(crate) chunk: u64,
    #[command(flatten)]
    pub(crate) over: Over,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Notify {
    #[command(flatten)]
    pub(crate) peer: Peer,
    /// What it is about
    pub(crate) name: String,
    /// What it says
    #[arg(default_value = "")]
    pub(crate) message: String,
}

fn size(text: &str) -> Result<u64, String> {
    let refused = || format!("{text:?} is no size; write bytes, or a number with K, M or G (of 1024)");
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) => (digits, [10, 20, 30]["KMG".find(&text[digits.len()..]).ok_or_else(refused)?]),
        None => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| refused())?;
    number.checked_mul(1 << shift).filter(|size| i64::try_from(*size).is_ok()).ok_or_else(refused)
}

fn chunk(text: &str) -> Result<u64, String> {
    size(text).and_then(|size| match size {
        1..=0x400_0000 => Ok(size),
        _ => Err(format!("a request moves 1 to 67108864 bytes, not {size}")),
    })
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    Duration::try_from_secs_f64(number).map_err(|error| format!("{text}: {error}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn sizes_have_units_and_limits() {
        let sizes = [("0", 0), ("4096", 4096), ("64K", 65_536), ("16M", 16 << 20), ("2G", 2 << 30)];
        for (text, bytes) in sizes {
            assert_eq!(size(text), Ok(bytes));
        }
        for text in ["", "K", "-1", "1.5M", "1T", "9000000000G", "18446744073709551616", "1 K"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert!(chunk("0").is_err() && chunk("65M").is_err() && chunk("64M").is_ok() && chunk("1").is_ok());
        assert!(seconds("-1").is_err() && seconds("x").is_err() && seconds("0.5").is_ok());
    }
}
