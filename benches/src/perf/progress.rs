//! Progress of a run that takes longer than a moment, on standard error.

use std::{
    io::IsTerminal as _,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use super::{args::Extent, signal::Signal};

/// Runs that are over by then show nothing, and are not disturbed.
const SILENT: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(250);
/// Without a terminal a line comes so often.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Shown until it is dropped. A thread of its own draws it, from the count of frames: nothing is added to their path.
pub(crate) struct Progress {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    pub(crate) fn start(quiet: bool, what: &str, extent: Extent, signal: &Arc<Signal>) -> Self {
        if quiet {
            return Self { stop: None, thread: None };
        }
        let (stop, stopped) = channel();
        let (what, signal) = (what.to_owned(), signal.clone());
        let before = signal.frames.load(Ordering::Relaxed);
        let draw = move || {
            if stopped.recv_timeout(SILENT) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let began = Instant::now();
            let done = || signal.frames.load(Ordering::Relaxed).saturating_sub(before);
            let bar = std::io::stderr().is_terminal().then(|| bar(&what, extent));
            let tick = if bar.is_some() { TICK } else { LINE_EVERY };
            while stopped.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
                let position = match extent {
                    Extent::Messages(_) => done(),
                    Extent::For(_) => (SILENT + began.elapsed()).as_secs(),
                };
                match &bar {
                    Some(bar) => bar.set_position(position),
                    None => eprintln!("verbs-perf: {}", line(&what, extent, position, done())),
                }
            }
            if let Some(bar) = bar {
                bar.finish_and_clear();
            }
        };
        let thread = thread::Builder::new().name("progress".to_owned()).spawn(draw).ok();
        Self { stop: Some(stop), thread }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn line(what: &str, extent: Extent, position: u64, done: u64) -> String {
    match extent {
        Extent::Messages(count) => format!("{what}: {position} of {count} messages"),
        Extent::For(time) => format!("{what}: {position} of {} s, {done} messages", time.as_secs()),
    }
}

fn bar(what: &str, extent: Extent) -> ProgressBar {
    let (length, unit) = match extent {
        Extent::Messages(count) => (count, "messages"),
        Extent::For(time) => (time.as_secs(), "s"),
    };
    let bar = ProgressBar::new(length).with_message(what.to_owned());
    if let Ok(style) =
        ProgressStyle::with_template(&format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {unit} ({{eta}} left)"))
    {
        bar.set_style(style);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_far_it_is() {
        assert_eq!(line("64 bytes", Extent::Messages(10), 3, 3), "64 bytes: 3 of 10 messages");
        assert_eq!(line("64 bytes", Extent::For(Duration::from_secs(9)), 4, 77), "64 bytes: 4 of 9 s, 77 messages");
    }

    #[test]
    fn its_end_does_not_wait_for_its_next_line() {
        let began = Instant::now();
        drop(Progress::start(false, "x", Extent::Messages(1), &Arc::default()));
        assert!(began.elapsed() < SILENT);
    }
}
