//! Commands that run side by side in a testbed: input, output, the time that is theirs, and their ends.

use std::io::Read as _;
use std::sync::mpsc::{SyncSender, channel};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::Testbed;
use crate::error::{Context as _, Error};
use crate::machine::Event;
use crate::output::{Output, Stream};
use crate::wire::{ExecSpec, Frame, Kind};

/// When one of two hosts has failed, the other one is given this long.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// How long a killed command may take to be gone.
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// A command for one host.
pub(crate) struct Job {
    /// 0 or 1.
    pub(crate) host: usize,
    pub(crate) spec: ExecSpec,
}

/// A job that runs.
struct Running {
    host: usize,
    has_terminal: bool,
    outcome: Option<Outcome>,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// By itself, with this status.
    Exited(i32),
    /// We killed it: its time was up.
    TimedOut,
    /// We killed it: the other host's command had failed.
    Abandoned,
}

impl Testbed {
    /// Runs the jobs side by side to their ends. With `input`, our standard input goes to the first one.
    ///
    /// A time-out kills the commands, and the place stays usable; a crash or a hang is an error and it is not.
    pub(crate) fn run(
        &mut self,
        jobs: Vec<Job>,
        timeout: Option<Duration>,
        input: bool,
        output: &mut dyn Output,
    ) -> Result<Vec<Outcome>, Error> {
        let result = self.run_jobs(jobs, timeout, input, output);
        output.flush();
        result
    }

    fn run_jobs(
        &mut self,
        jobs: Vec<Job>,
        timeout: Option<Duration>,
        input: bool,
        output: &mut dyn Output,
    ) -> Result<Vec<Outcome>, Error> {
        let first = self.next_channel;
        let mut runs = Vec::new();
        for Job { host, spec } in jobs {
            let body = serde_json::to_vec(&spec).map_err(std::io::Error::from);
            let body = body.context(|| "encode a command".to_owned())?;
            self.send(host, Frame::new(Kind::Exec, self.next_channel, body));
            self.next_channel += 1;
            runs.push(Running { host, has_terminal: spec.pty.is_some(), outcome: None });
        }
        let input_to = runs.first().map_or(0, |run| run.host);
        let feeder = input.then(|| feed_standard_input(self.tell.clone()));
        let mut size = crate::term::size();
        let mut end = timeout.map(|timeout| (Instant::now() + timeout, Outcome::TimedOut));
        let mut killed: Option<Instant> = None;
        while runs.iter().any(|run| run.outcome.is_none()) {
            let event = self.next_event()?;
            let now = Instant::now();
            if killed.is_none() && end.is_some_and(|(at, _)| now >= at) {
                killed = Some(now);
                self.kill(&runs, first);
            }
            if killed.is_some_and(|at| now > at + KILL_PATIENCE) {
                return Err(self.hung(input_to, KILL_PATIENCE));
            }
            if runs.first().is_some_and(|run| run.has_terminal) && crate::term::size() != size {
                size = crate::term::size();
                let body = [size.0.to_le_bytes(), size.1.to_le_bytes()].concat();
                self.send(input_to, Frame::new(Kind::Resize, first, body));
            }
            let (host, frame) = match event {
                Some(Event::Frame(host, frame)) => (host, frame),
                Some(Event::Input(bytes)) => {
                    let kind = if bytes.is_empty() { Kind::StdinEnd } else { Kind::Stdin };
                    self.send(input_to, Frame::new(kind, first, bytes));
                    continue;
                }
                _ => continue,
            };
            // Frames of earlier commands, killed and late, have smaller channels.
            let index = frame.channel.checked_sub(first).and_then(|index| usize::try_from(index).ok());
            let Some(run) = index.and_then(|index| runs.get_mut(index)) else {
                continue;
            };
            match frame.kind {
                Kind::Stdout => output.bytes(host, Stream::Out, &frame.body),
                Kind::Stderr => output.bytes(host, Stream::Err, &frame.body),
                Kind::StdinAck => drop(feeder.as_ref().map(|more| more.send(()))),
                Kind::Exit => {
                    let status = frame.number();
                    let why_killed = killed.and(end).map(|(_, why)| why);
                    run.outcome = Some(why_killed.unwrap_or(Outcome::Exited(status)));
                    let soon = now + AFTER_FAILURE;
                    if status != 0 && end.is_none_or(|(at, _)| at > soon) {
                        end = Some((soon, Outcome::Abandoned));
                    }
                }
                _ => {}
            }
        }
        Ok(runs.into_iter().filter_map(|run| run.outcome).collect())
    }

    fn kill(&mut self, runs: &[Running], first: u32) {
        for (run, channel) in runs.iter().zip(first..).filter(|(run, _)| run.outcome.is_none()) {
            self.send(run.host, Frame::new(Kind::Signal, channel, Signal::KILL.as_raw().to_le_bytes()));
        }
    }
}

/// Reads standard input chunk by chunk, each after the one before was taken. The thread stays blocked in its last read,
/// which ends with the process.
fn feed_standard_input(tell: SyncSender<Event>) -> std::sync::mpsc::Sender<()> {
    let (taken, more) = channel();
    std::thread::spawn(move || {
        let mut chunk = vec![0; 32 << 10];
        loop {
            let n = std::io::stdin().read(&mut chunk).unwrap_or(0);
            if tell.send(Event::Input(chunk[..n].to_vec())).is_err() || n == 0 || more.recv().is_err() {
                return;
            }
        }
    });
    taken
}
