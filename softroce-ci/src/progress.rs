//! Says what is going on while the user waits: a spinner on a terminal, plain lines elsewhere.

use std::cell::RefCell;
use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Where progress goes: always standard error, so that standard output is the command's own.
pub(crate) struct Progress {
    quiet: bool,
    terminal: bool,
    spinner: RefCell<Option<ProgressBar>>,
}

impl Progress {
    /// `quiet` says nothing at all.
    pub(crate) fn new(quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self { quiet, terminal, spinner: RefCell::new(None) }
    }

    /// A new step begins; it is shown until the next one or [`Progress::clear`].
    pub(crate) fn step(&self, text: &str) {
        if self.quiet || !self.terminal {
            return self.note(text);
        }
        self.clear();
        let spinner = ProgressBar::new_spinner().with_message(text.to_owned());
        if let Ok(style) = ProgressStyle::with_template("{spinner} softroce: {msg} ({elapsed})") {
            spinner.set_style(style);
        }
        spinner.enable_steady_tick(Duration::from_millis(120));
        *self.spinner.borrow_mut() = Some(spinner);
    }

    /// A line that stays.
    pub(crate) fn note(&self, text: &str) {
        if self.quiet {
            return;
        }
        match &*self.spinner.borrow() {
            Some(spinner) => spinner.suspend(|| eprintln!("softroce: {text}")),
            None => eprintln!("softroce: {text}"),
        }
    }

    /// Makes way for the output of something else.
    pub(crate) fn clear(&self) {
        if let Some(spinner) = self.spinner.borrow_mut().take() {
            spinner.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear(); // an error's text follows
    }
}
