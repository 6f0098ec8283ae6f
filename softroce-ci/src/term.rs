//! The user's terminal: raw while a shell runs in the guest, and always put back.

use std::io::IsTerminal as _;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Standard input in raw mode until this is dropped.
pub(crate) struct Raw(Termios);

impl Raw {
    /// `None` when standard input is no terminal.
    pub(crate) fn enter() -> Option<Self> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return None;
        }
        let before = tcgetattr(&stdin).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Drain, &raw).ok()?;
        Some(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _hung_up = tcsetattr(std::io::stdin(), OptionalActions::Drain, &self.0);
    }
}

/// Rows and columns; 24 by 80 when there is no terminal.
pub(crate) fn size() -> (u16, u16) {
    match tcgetwinsize(std::io::stdin()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        _ => (24, 80),
    }
}
