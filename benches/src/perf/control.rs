//! The control connection: one TCP connection on which the two sides meet, agree on a run, and notice each other's end.
//!
//! One JSON object a line, each with the protocol's version, so that a build with another one is told apart whatever it
//! says. Messages under test never travel here.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, TcpStream, ToSocketAddrs as _},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use verbs_rma::RemoteRange;
use verbs_transport::fabric::bulk::Rkey;

use super::{
    args::{Polling, Test},
    failure::Failure,
    report::Report,
    signal::{Signal, lock},
};
use crate::{environment::Environment, usage::CpuTime};

/// Changes with every change of the words below.
pub(crate) const VERSION: u32 = 4;

/// No word and no beat for so long: the other side hangs, or its host is gone.
const SILENCE: Duration = Duration::from_secs(30);
const BEAT_EVERY: Duration = Duration::from_secs(2);
const LINE_MAX_BYTES: usize = 4 << 20;

/// What one side says to the other.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Word {
    /// Client: what it wants.
    Hello(Box<Hello>),
    /// Server: its addresses.
    Welcome(Box<Welcome>),
    /// Server: it will not.
    Refused { why: String },
    /// Client: get ready.
    Run(Run),
    /// Server: it is; with the memory that it exposes.
    Ready(Option<Exposed>),
    /// Client: the run is over.
    Done,
    /// Server: what it saw of it.
    Tally(Tally),
    /// Client: the end, with the result.
    Bye(Box<Report>),
    /// Either: the end, without one.
    GaveUp { why: String },
    /// Either, now and then.
    Beat,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) test: Test,
    /// How the server's workers are to be set up.
    pub(crate) setup: Setup,
    /// Addresses of the client's workers, in hexadecimal.
    pub(crate) addresses: Vec<String>,
}

/// What both sides' workers have in common.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) polling: Polling,
    pub(crate) spin_us: u64,
    pub(crate) inline_bytes: Option<u32>,
    pub(crate) send_wrs: Option<u32>,
    pub(crate) signal_every: Option<u32>,
    pub(crate) slab_bytes: Option<u32>,
    /// Whether messages that wait go several to a SEND.
    pub(crate) pack: bool,
    /// Whether workers have bulk memory, and its numbers.
    pub(crate) bulk: Option<BulkSetup>,
    /// The server's workers.
    pub(crate) servers: u32,
    /// Peers of each of them.
    pub(crate) peers: u32,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct BulkSetup {
    pub(crate) outs: Option<u8>,
    pub(crate) chunk_bytes: Option<u32>,
    pub(crate) send_wrs: Option<u32>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// Addresses of the server's workers, in hexadecimal.
    pub(crate) addresses: Vec<String>,
    pub(crate) environment: Environment,
}

/// One run as the server has to know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) what: Serving,
    pub(crate) bytes: usize,
    /// Senders whose end is awaited.
    pub(crate) peers: u32,
    /// Frames in each of the stretches of which the fastest gives the peak.
    pub(crate) slice_frames: u64,
    /// Memory of `bytes`, or of `beside_bytes`, for the client.
    pub(crate) expose: Option<Expose>,
    /// Bytes of each message, or of the memory, that moves beside what is measured.
    pub(crate) beside_bytes: usize,
}

/// What the client does with the server's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Expose {
    /// Reads it.
    Source,
    /// Writes it.
    Target,
    /// Writes it and tells, and the server does the same with this memory of the client's.
    PingPong { into: Exposed },
}

/// Memory of one side that the other may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Exposed {
    addr: u64,
    rkey: u32,
    len: u64,
}

impl From<RemoteRange> for Exposed {
    fn from(range: RemoteRange) -> Self {
        Self { addr: range.addr, rkey: range.rkey.0, len: range.len }
    }
}

impl From<Exposed> for RemoteRange {
    fn from(exposed: Exposed) -> Self {
        Self { addr: exposed.addr, rkey: Rkey(exposed.rkey), len: exposed.len }
    }
}

/// The server's part of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Serving {
    /// Its device has all the work.
    #[default]
    Nothing,
    /// Sends each message back; answers an event by an acknowledgement of `beside_bytes`.
    Echo,
    /// Counts them.
    Count,
}

/// What the server saw of a run.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Tally {
    pub(crate) frames: u64,
    /// Nanoseconds of the fastest full stretch.
    pub(crate) best_slice_nanos: Option<u64>,
    pub(crate) cpu: CpuTime,
    pub(crate) resident_kib: u64,
}

#[derive(Serialize, Deserialize)]
struct Line<W> {
    verbs_perf: u32,
    #[serde(flatten)]
    word: W,
}

/// All that a line of another version is read for.
#[derive(Deserialize)]
struct Stamp {
    verbs_perf: u32,
}

/// Our end.
pub(crate) struct Control {
    stream: Arc<Mutex<TcpStream>>,
    /// Our address as the other side reaches it.
    pub(crate) local_ip: IpAddr,
}

impl Control {
    /// Dials the server.
    pub(crate) fn dial(server: &str, port: u16, test: Test, signal: &Arc<Signal>) -> Result<Self, Failure> {
        const DIAL: Duration = Duration::from_secs(5);
        let failed =
            |why: String| Failure::NoServer { server: format!("{server}:{port}"), why, test: test.to_string() };
        let addresses = (server, port).to_socket_addrs().map_err(|error| failed(error.to_string()))?;
        let mut why = "the name has no address".to_owned();
        for address in addresses {
            match TcpStream::connect_timeout(&address, DIAL) {
                Ok(stream) => return Self::new(stream, "server", &format!("{server}:{port}"), signal),
                Err(error) => why = error.to_string(),
            }
        }
        Err(failed(why))
    }

    /// Takes a connection; its words and its end go to `signal`. `who` is the other side, `name` its address.
    pub(crate) fn new(stream: TcpStream, who: &'static str, name: &str, signal: &Arc<Signal>) -> Result<Self, Failure> {
        let broken = |error: io::Error| Failure::Control(Arc::new(error));
        let local_ip = stream.local_addr().map_err(broken)?.ip();
        stream.set_nodelay(true).map_err(broken)?;
        stream.set_read_timeout(Some(BEAT_EVERY / 2)).map_err(broken)?;
        stream.set_write_timeout(Some(SILENCE)).map_err(broken)?;
        let reader =
            Reader { stream: stream.try_clone().map_err(broken)?, who, name: name.to_owned(), line: Vec::new() };
        let stream = Arc::new(Mutex::new(stream));
        let (writer, signal) = (Arc::downgrade(&stream), signal.clone());
        let beat = move || writer.upgrade().map(|stream| say(&stream, &Word::Beat));
        let listen = move || {
            if let Err(failure) = reader.listen(&signal, beat) {
                signal.trouble(failure);
            }
        };
        thread::Builder::new().name("control".to_owned()).spawn(listen).map_err(broken)?;
        Ok(Self { stream, local_ip })
    }

    /// Says something.
    pub(crate) fn say(&self, word: &Word) -> Result<(), Failure> {
        say(&self.stream, word).map_err(|error| Failure::Control(Arc::new(error)))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Ends the reading thread, too.
        let _ = lock(&self.stream).shutdown(std::net::Shutdown::Both);
    }
}

fn say(stream: &Mutex<TcpStream>, word: &Word) -> io::Result<()> {
    let mut line = serde_json::to_vec(&Line { verbs_perf: VERSION, word })?;
    line.push(b'\n');
    lock(stream).write_all(&line)
}

struct Reader {
    stream: TcpStream,
    who: &'static str,
    name: String,
    line: Vec<u8>,
}

impl Reader {
    /// Reads to the end, and beats meanwhile. `beat` gives `None` once our own side is over.
    fn listen(mut self, signal: &Signal, beat: impl Fn() -> Option<io::Result<()>>) -> Result<(), Failure> {
        let (mut heard, mut beaten) = (Instant::now(), Instant::now());
        let mut bytes = [0; 16 << 10];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(Failure::PeerEnded { who: self.who }),
                Ok(count) => {
                    heard = Instant::now();
                    self.take(&bytes[..count], signal)?;
                }
                Err(error) if is_pause(&error) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(Failure::PeerEnded { who: self.who });
                }
                Err(error) => return Err(Failure::Control(Arc::new(error))),
            }
            if heard.elapsed() > SILENCE {
                return Err(Failure::Silence { who: self.who, after: SILENCE, waiting_for: "a sign of life" });
            }
            if beaten.elapsed() > BEAT_EVERY {
                beaten = Instant::now();
                // What could not be written shows at the reading end as well, and better.
                if beat().is_none() {
                    return Ok(());
                }
            }
        }
    }

    fn take(&mut self, bytes: &[u8], signal: &Signal) -> Result<(), Failure> {
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                if self.line.len() > LINE_MAX_BYTES {
                    return Err(Failure::Protocol(format!("a line of more than {LINE_MAX_BYTES} bytes")));
                }
                continue;
            }
            match parse(&self.line, &self.name)? {
                Word::Beat => {}
                Word::GaveUp { why } => return Err(Failure::PeerGaveUp { who: self.who, why }),
                word => signal.hear(word),
            }
            self.line.clear();
        }
        Ok(())
    }
}

fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// The version first, then the rest.
fn parse(line: &[u8], name: &str) -> Result<Word, Failure> {
    let unclear = |error: serde_json::Error| {
        let start: String = String::from_utf8_lossy(line).chars().take(40).collect();
        Failure::Protocol(format!("{start:?}: {error}"))
    };
    let stamp: Stamp = serde_json::from_slice(line).map_err(unclear)?;
    if stamp.verbs_perf != VERSION {
        return Err(Failure::Version { server: name.to_owned(), theirs: stamp.verbs_perf, ours: VERSION });
    }
    serde_json::from_slice::<Line<Word>>(line).map(|line| line.word).map_err(unclear)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_survives_the_wire() {
        let into = Exposed { addr: 1 << 40, rkey: 7, len: 64 };
        let run = Run { what: Serving::Count, expose: Some(Expose::PingPong { into }), bytes: 64, ..Run::default() };
        let line = serde_json::to_vec(&Line { verbs_perf: VERSION, word: Word::Run(run) }).unwrap();
        assert!(!line.contains(&b'\n'));
        assert!(matches!(parse(&line, "x"), Ok(Word::Run(came)) if came == run));
        let line = serde_json::to_vec(&Line { verbs_perf: VERSION, word: Word::Beat }).unwrap();
        assert!(matches!(parse(&line, "x"), Ok(Word::Beat)));
    }

    #[test]
    fn another_version_is_told_whatever_it_says() {
        let line = br#"{"verbs_perf": 7, "something_new": [1, 2]}"#;
        let Err(Failure::Version { theirs: 7, ours: VERSION, .. }) = parse(line, "host:1") else { panic!() };
    }

    #[test]
    fn what_is_no_word_of_ours_is_an_error_and_not_a_panic() {
        let (wordless, unknown) =
            (format!("{{\"verbs_perf\":{VERSION}}}"), format!("{{\"verbs_perf\":{VERSION},\"dance\":{{}}}}"));
        for line in [b"GET / HTTP/1.1", &b""[..], b"{}", wordless.as_bytes(), unknown.as_bytes(), b"\xff"] {
            assert!(matches!(parse(line, "x"), Err(Failure::Protocol(_))), "{line:?}");
        }
    }
}
