//! Commands that one guest runs on the other: `$SOFTROCE_PEER_EXEC CMD ARGS...`.
//!
//! The client talks to its own guest's agent over a UNIX socket, the agent passes frames to the host, and the host to
//! the other guest. The virtual cable is not used, so it works with the link down.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use crate::commands::Out;
use crate::wire::{ExecSpec, Frame, Kind, PEER, PEER_OF_SECOND};

const SOCKET: &str = "/run/softroce-peer.sock";
/// The client, as a script in the shared folder.
pub(crate) const SCRIPT: &str = "#!/bin/sh\nexec /run/softroce/agent softroce guest-peer-exec -- \"$@\"\n";

type Clients = Arc<Mutex<HashMap<u32, Sender<Frame>>>>;

/// The clients of this guest.
pub(crate) struct Peers(Clients);

impl Peers {
    /// Hands a frame from the other guest to its client, without ever blocking.
    pub(crate) fn deliver(&self, frame: Frame) {
        if let Ok(clients) = self.0.lock() {
            if let Some(client) = clients.get(&frame.channel) {
                let _client_gone = client.send(frame);
            }
        }
    }
}

/// Accepts clients for as long as the agent lives.
pub(crate) fn listen(out: Out) -> io::Result<Peers> {
    let second = std::fs::read_to_string("/proc/cmdline")?.contains("softroce.host=2");
    let base = if second { PEER | PEER_OF_SECOND } else { PEER };
    let listener = UnixListener::bind(SOCKET)?;
    let clients = Clients::default();
    let peers = Peers(clients.clone());
    std::thread::spawn(move || {
        for (number, client) in (1..PEER_OF_SECOND).zip(listener.incoming().flatten()) {
            let (out, clients, channel) = (out.clone(), clients.clone(), base | number);
            std::thread::spawn(move || serve(client, channel, &out, &clients));
        }
    });
    Ok(peers)
}

fn serve(client: UnixStream, channel_number: u32, out: &Out, clients: &Clients) {
    let (tell, frames) = channel::<Frame>();
    let Ok(mut writer) = client.try_clone() else {
        return;
    };
    std::thread::spawn(move || {
        for frame in frames {
            let last = frame.kind == Kind::Exit;
            if frame.write_to(&mut writer).is_err() || last {
                break;
            }
        }
    });
    if let Ok(mut clients) = clients.lock() {
        clients.insert(channel_number, tell);
    }
    let mut reader = client;
    while let Ok(Some(frame)) = Frame::read_from(&mut reader) {
        out(Frame { channel: channel_number, ..frame });
    }
    // The client is gone, killed or done: what it started goes with it.
    out(Frame::new(Kind::Signal, channel_number, 9_i32.to_le_bytes()));
    if let Ok(mut clients) = clients.lock() {
        clients.remove(&channel_number);
    }
}

/// The client: runs `argv` on the other guest with this directory and environment.
pub(crate) fn client(argv: Vec<OsString>) -> ExitCode {
    match run(argv) {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(255)),
        Err(error) => {
            eprintln!("cargo softroce: no way to the other host: {error}");
            ExitCode::from(125)
        }
    }
}

fn run(argv: Vec<OsString>) -> io::Result<i32> {
    let mut socket = UnixStream::connect(SOCKET)?;
    // The other host is the other way round.
    let swapped = |key: &str| match key {
        "SOFTROCE_HOST" => std::env::var_os("SOFTROCE_HOST").map(|host| if host == "1" { "2" } else { "1" }.into()),
        "SOFTROCE_PEER" => std::env::var_os("SOFTROCE_ADDRESS"),
        "SOFTROCE_ADDRESS" => std::env::var_os("SOFTROCE_PEER"),
        _ => None,
    };
    let env = std::env::vars_os().map(|(key, value)| {
        let value = key.to_str().and_then(swapped).unwrap_or(value);
        (key, value)
    });
    let cwd = std::env::current_dir().map_or_else(|_| "/".into(), OsString::from);
    let spec = ExecSpec { argv, env: env.collect(), cwd, sweep: true, ..ExecSpec::default() };
    Frame::new(Kind::Exec, 0, serde_json::to_vec(&spec)?).write_to(&mut socket)?;
    while let Some(frame) = Frame::read_from(&mut socket)? {
        match frame.kind {
            Kind::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(&frame.body)?;
                out.flush()?;
            }
            Kind::Stderr => io::stderr().write_all(&frame.body)?,
            Kind::Exit => return Ok(frame.number()),
            _ => {}
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the agent is gone"))
}
