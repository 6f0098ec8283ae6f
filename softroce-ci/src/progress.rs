//! Says what is going on while the user waits: a spinner on a terminal, plain lines elsewhere.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Where progress goes: always standard error, so that standard output is the command's own.
pub(crate) struct Progress {
    quiet: bool,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// `quiet` says nothing at all.
    pub(crate) fn new(quiet: bool) -> Self {
        let terminal = !quiet && std::io::stderr().is_terminal();
        Self {
            quiet,
            bar: terminal.then(bar),
        }
    }

    /// A new step begins.
    pub(crate) fn step(&self, text: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(text.to_owned());
                bar.enable_steady_tick(Duration::from_millis(120));
            }
            None if self.quiet => {}
            None => eprintln!("softroce: {text}"),
        }
    }

    /// A line that stays.
    pub(crate) fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("softroce: {text}")),
            None if self.quiet => {}
            None => eprintln!("softroce: {text}"),
        }
    }

    /// Makes way for the output of something else.
    pub(crate) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.disable_steady_tick();
            bar.set_message("");
            bar.finish_and_clear();
            bar.reset();
        }
    }
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} softroce: {msg} ({elapsed})") {
        bar.set_style(style);
    }
    bar
}
