//! A man in the middle of a control connection, who knows where frames begin and end: he lets a frame through, changes
//! it, repeats it, keeps it, or cuts the connection.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
};

/// Who says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Requester,
    Source,
}

/// What becomes of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    Pass,
    /// It goes on twice.
    Twice,
    /// It goes nowhere; what comes behind it does.
    Lost,
    /// Other bytes go on instead.
    Changed(Vec<u8>),
    /// Both ends are closed.
    Cut,
    /// Nothing goes on any more, either way, and nothing is closed.
    Silence,
}

/// What decides.
pub type Rule = Arc<dyn Fn(By, u8, &[u8]) -> Fate + Send + Sync>;

/// Kinds of frames as the rule gets them: requests by operation from 200 on, replies by status, phases by their numbers.
pub const REQUEST: u8 = 200;

/// All frames of an operation over a new pair, in order: who says it, and its kind.
pub const FRAMES: [(By, u8); 11] = [
    (By::Requester, REQUEST),
    (By::Source, 0),
    (By::Requester, 17),
    (By::Source, 18),
    (By::Requester, 19),
    (By::Source, 20),
    (By::Requester, 21),
    (By::Source, 22),
    (By::Requester, 23),
    (By::Source, 24),
    (By::Requester, 25),
];

/// Whether it is that frame, as [`FRAMES`] names them.
pub fn is(frame: (By, u8), by: By, kind: u8) -> bool {
    // Operations 4 to 7 alike.
    by == frame.0 && (kind == frame.1 || frame.1 == REQUEST && matches!(kind, 204..=207)) && kind != REQUEST
}

/// Dials `upstream` for each connection; where to dial instead of it.
pub fn start(upstream: SocketAddr, rule: Rule) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
    let endpoint = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for requester in listener.incoming() {
            let (requester, rule) = (requester.expect("a peer"), Arc::clone(&rule));
            let Ok(source) = TcpStream::connect(upstream) else { continue };
            for stream in [&requester, &source] {
                stream.set_nodelay(true).expect("an option");
            }
            let ends = Arc::new((requester, source));
            for by in [By::Requester, By::Source] {
                let (ends, rule) = (Arc::clone(&ends), Arc::clone(&rule));
                std::thread::spawn(move || pump(&ends, by, &rule));
            }
        }
    });
    endpoint
}

fn pump(ends: &(TcpStream, TcpStream), by: By, rule: &Rule) {
    let (mut from, mut to) = if by == By::Requester { (&ends.0, &ends.1) } else { (&ends.1, &ends.0) };
    while let Some((kind, frame)) = next(&mut from, by) {
        let bytes = match rule(by, kind, &frame) {
            Fate::Pass => frame,
            Fate::Twice => [frame.clone(), frame].concat(),
            Fate::Lost => continue,
            Fate::Changed(bytes) => bytes,
            Fate::Cut => break,
            Fate::Silence => {
                // Until the other end gives up.
                let _ = from.read_to_end(&mut Vec::new());
                break;
            }
        };
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    for stream in [&ends.0, &ends.1] {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// One frame; with a request what is asked along, with a reply its payload.
fn next(from: &mut &TcpStream, by: By) -> Option<(u8, Vec<u8>)> {
    let mut frame = vec![0; 12];
    from.read_exact(&mut frame).ok()?;
    let kind = frame[10];
    let (kind, rest) = match (by, kind) {
        (By::Requester, 4..=7) => (REQUEST + kind, 40 + 100),
        (By::Requester, 0..=7) => (REQUEST + kind, 40),
        (By::Source, 0..=13) => (kind, 24),
        (_, 17) => (kind, 200),
        (_, 19 | 20) => (kind, 136),
        (_, 22) => (kind, 160),
        (_, 26) => (kind, 1928),
        (_, 27) => (kind, 520),
        _ => (kind, 128),
    };
    let at = frame.len();
    frame.resize(at + rest, 0);
    from.read_exact(&mut frame[at..]).ok()?;
    if by == By::Source && kind == 0 {
        let length = u64::from_be_bytes(frame[28..36].try_into().expect("8 bytes"));
        let at = frame.len();
        frame.resize(at + usize::try_from(length).ok()?, 0);
        from.read_exact(&mut frame[at..]).ok()?;
    }
    Some((kind, frame))
}
