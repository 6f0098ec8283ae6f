//! `verbs-engine`: serves blocks of memory and files, and reads, writes and watches them from other hosts.
//!
//! It uses the library as any program would; see `docs/engine.md`.

mod args;
mod index;
mod output;
mod over;
mod remote;
mod serve;
mod ticket;
mod transfer;

use std::process::ExitCode;

use clap::Parser as _;

use args::{Args, Command};
use output::Output;

/// What went wrong, in words for whoever typed the command.
pub(crate) type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let args = Args::parse();
    let output = Output { json: args.json };
    let result = match &args.command {
        Command::Serve(serve) => serve::serve(serve, output),
        Command::List(peer) => remote::list(peer, output),
        Command::Stats(peer) => remote::stats(peer, output),
        Command::Notify(notify) => remote::notify(notify, output),
        Command::Read(read) => transfer::read(read, output),
        Command::Write(write) => transfer::write(write, output),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output.error(&*error);
            ExitCode::FAILURE
        }
    }
}
