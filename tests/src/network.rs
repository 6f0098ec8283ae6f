//! The network between two hosts and what can be done to it. All is as before when a value of this module is dropped, also
//! by a test that fails.

use crate::process::{sh, sh_on_second_host};

/// One of two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first, where the test runs.
    Here,
    /// The second.
    There,
}

impl Side {
    /// Both.
    pub const BOTH: &'static [Self] = &[Self::Here, Self::There];

    /// Runs a command line there; it must succeed.
    ///
    /// # Panics
    ///
    /// When it does not.
    pub fn sh(self, line: &str) {
        match self {
            Self::Here => sh(line),
            Self::There => sh_on_second_host(line),
        }
    }
}

/// What `tc netem` does to all that leaves some hosts.
#[derive(Debug)]
#[must_use = "the weather ends when it is dropped"]
pub struct Weather(&'static [Side]);

impl Weather {
    /// On both hosts.
    pub fn set(netem: &str) -> Self {
        Self::over(Side::BOTH, netem)
    }

    /// On these hosts.
    pub fn over(sides: &'static [Side], netem: &str) -> Self {
        eprintln!("netem {netem} on {sides:?}");
        for side in sides {
            side.sh(&format!("tc qdisc replace dev eth0 root netem {netem}"));
        }
        Self(sides)
    }

    /// Nothing arrives any more, either way, and nobody is told.
    pub fn cut() -> Self {
        Self::set("loss 100%")
    }

    /// A host hears everything, and nothing comes from it, not even a reset.
    pub fn silence(side: Side) -> Self {
        let sides: &[Side] = match side {
            Side::Here => &[Side::Here],
            Side::There => &[Side::There],
        };
        Self::over(sides, "loss 100%")
    }
}

impl Drop for Weather {
    fn drop(&mut self) {
        for side in self.0 {
            side.sh("tc qdisc del dev eth0 root");
        }
    }
}

/// A host's link is down, and what is sent to it vanishes.
///
/// On a cable it does so by itself. The virtual one holds packets back when nobody takes them, and an rxe whose packets are
/// held back spins until its host stops for good: so the other host's packets are dropped before the cable.
#[derive(Debug)]
#[must_use = "the link comes up when it is dropped"]
pub struct LinkDown {
    side: Side,
    _vanish: Weather,
}

impl LinkDown {
    /// From now on.
    pub fn begin(side: Side) -> Self {
        let other = if side == Side::Here { Side::There } else { Side::Here };
        let down = Self { side, _vanish: Weather::silence(other) };
        side.sh("ip link set eth0 down");
        down
    }
}

impl Drop for LinkDown {
    fn drop(&mut self) {
        self.side.sh("ip link set eth0 up");
    }
}
