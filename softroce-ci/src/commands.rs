//! The commands of one place, by channel: frames in, frames out. The agent drives it in a guest; without a VM the host
//! drives it itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::exec::{self, Running, Sink};
use crate::wire::{ExecSpec, Frame, Kind};

/// Takes the frames that commands give rise to.
pub(crate) type Out = Arc<dyn Fn(Frame) + Send + Sync>;

/// All commands that run.
pub(crate) struct Commands {
    running: HashMap<u32, (Running, Arc<AtomicBool>)>,
    out: Out,
}

impl Commands {
    pub(crate) fn new(out: Out) -> Self {
        Self { running: HashMap::new(), out }
    }

    /// Obeys one frame; those that are no business of a command are ignored.
    pub(crate) fn handle(&mut self, frame: Frame) {
        self.running.retain(|_, (_, ended)| !ended.load(Ordering::SeqCst));
        if frame.kind == Kind::Exec {
            self.start(&frame);
            return;
        }
        let Some((running, _)) = self.running.get_mut(&frame.channel) else {
            return;
        };
        match frame.kind {
            Kind::Stdin => running.input(frame.body),
            Kind::StdinEnd => running.end_input(),
            Kind::Signal => running.signal(frame.number()),
            Kind::Resize => {
                if let [r0, r1, c0, c1] = *frame.body {
                    running.resize(u16::from_le_bytes([r0, r1]), u16::from_le_bytes([c0, c1]));
                }
            }
            _ => {}
        }
    }

    /// Signals all that run; whether there were any.
    pub(crate) fn signal_all(&mut self, number: i32) -> bool {
        self.running.retain(|_, (_, ended)| !ended.load(Ordering::SeqCst));
        self.running.values().for_each(|(running, _)| running.signal(number));
        !self.running.is_empty()
    }

    fn start(&mut self, frame: &Frame) {
        let ended = Arc::new(AtomicBool::new(false));
        let sink: Arc<dyn Sink> =
            Arc::new(FrameSink { channel: frame.channel, out: self.out.clone(), ended: ended.clone() });
        match serde_json::from_slice::<ExecSpec>(&frame.body) {
            Ok(spec) => {
                if let Some(running) = exec::start(&spec, &sink) {
                    self.running.insert(frame.channel, (running, ended));
                }
            }
            Err(error) => {
                sink.stderr(format!("cargo softroce: a command that cannot be read: {error}\n").as_bytes());
                sink.exit(126);
            }
        }
    }
}

struct FrameSink {
    channel: u32,
    out: Out,
    ended: Arc<AtomicBool>,
}

impl FrameSink {
    fn send(&self, kind: Kind, body: &[u8]) {
        (self.out)(Frame::new(kind, self.channel, body));
    }
}

impl Sink for FrameSink {
    fn stdout(&self, bytes: &[u8]) {
        self.send(Kind::Stdout, bytes);
    }

    fn stderr(&self, bytes: &[u8]) {
        self.send(Kind::Stderr, bytes);
    }

    fn stdin_taken(&self) {
        self.send(Kind::StdinAck, &[]);
    }

    fn exit(&self, status: i32) {
        self.ended.store(true, Ordering::SeqCst);
        self.send(Kind::Exit, &status.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;

    fn commands() -> (Commands, Receiver<Frame>) {
        let (tell, frames) = channel();
        (Commands::new(Arc::new(move |frame| drop(tell.send(frame)))), frames)
    }

    fn spec(words: &[&str]) -> ExecSpec {
        ExecSpec {
            argv: words.iter().map(OsString::from).collect(),
            env: std::env::vars_os().collect(),
            cwd: "/".into(),
            ..ExecSpec::default()
        }
    }

    fn run(spec: &ExecSpec, input: &[&[u8]]) -> (String, String, i32) {
        let (mut commands, frames) = commands();
        commands.handle(Frame::new(Kind::Exec, 5, serde_json::to_vec(spec).unwrap()));
        for bytes in input {
            commands.handle(Frame::new(Kind::Stdin, 5, *bytes));
        }
        commands.handle(Frame::new(Kind::StdinEnd, 5, Vec::new()));
        let (mut out, mut err) = (Vec::new(), Vec::new());
        loop {
            let frame = frames.recv_timeout(Duration::from_secs(20)).unwrap();
            assert_eq!(frame.channel, 5);
            match frame.kind {
                Kind::Stdout => out.extend(frame.body),
                Kind::Stderr => err.extend(frame.body),
                Kind::Exit => {
                    return (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap(), frame.number());
                }
                _ => {}
            }
        }
    }

    #[test]
    fn words_arrive_as_given_and_streams_stay_apart() {
        let odd = ["sh", "-c", "printf '<%s>' \"$@\"; echo oops >&2; exit 3", "sh", "a b", "\"q\" 'q'", "", "ä\n*"];
        assert_eq!(run(&spec(&odd), &[]), ("<a b><\"q\" 'q'><><ä\n*>".to_owned(), "oops\n".to_owned(), 3));
    }

    #[test]
    fn input_goes_in_and_ends() {
        let spec = ExecSpec { stdin: true, ..spec(&["cat"]) };
        assert_eq!(run(&spec, &[b"one ", b"two"]).0, "one two");
    }

    #[test]
    fn a_signal_death_and_a_missing_command_have_a_shell_s_status() {
        assert_eq!(run(&spec(&["sh", "-c", "kill -9 $$"]), &[]).2, 137);
        let (_, err, status) = run(&spec(&["no-such-command-here"]), &[]);
        assert_eq!(status, 127);
        assert!(err.contains("no-such-command-here"), "{err}");
        assert_eq!(run(&spec(&["/etc"]), &[]).2, 126);
    }

    #[test]
    fn an_orphan_that_holds_the_streams_does_not_hold_the_exit() {
        let start = std::time::Instant::now();
        assert_eq!(run(&spec(&["sh", "-c", "sleep 30 & echo x"]), &[]).0, "x\n");
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_command_on_a_terminal_has_one_of_its_own() {
        let spec =
            ExecSpec { pty: Some((24, 80)), ..spec(&["sh", "-c", "stty size </dev/tty; tty >/dev/null; exit $?"]) };
        let (out, _, status) = run(&spec, &[]);
        assert_eq!((out.trim(), status), ("24 80", 0));
    }
}
