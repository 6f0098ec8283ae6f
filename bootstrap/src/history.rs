//! What is remembered of a peer's runs: how far each had come, and which are over.

use std::collections::VecDeque;

use crate::types::{Generation, Incarnation};

/// One run of the peer.
#[derive(Clone, Copy, Debug)]
struct Run {
    incarnation: Incarnation,
    /// The highest generation that an epoch of ours was bound to.
    highest: Generation,
    superseded: bool,
}

/// At most [`MOST_RUNS`] runs, the oldest unproven ones forgotten first.
#[derive(Debug, Default)]
pub(crate) struct History {
    runs: VecDeque<Run>,
    proven: Option<Incarnation>,
}

impl History {
    /// The run that proved itself last.
    pub(crate) fn proven(&self) -> Option<Incarnation> {
        self.proven
    }

    /// A later run has proven itself: this one never comes back.
    pub(crate) fn is_superseded(&self, incarnation: Incarnation) -> bool {
        self.run(incarnation).is_some_and(|run| run.superseded)
    }

    /// The highest generation seen of a run; 0 for none.
    pub(crate) fn highest(&self, incarnation: Incarnation) -> Generation {
        self.run(incarnation).map_or(Generation(0), |run| run.highest)
    }

    /// An epoch was bound to this generation.
    pub(crate) fn saw(&mut self, incarnation: Incarnation, generation: Generation) {
        let run = self.run_mut(incarnation);
        run.highest = run.highest.max(generation);
    }

    /// A ping came back from this run: the one proven before is over.
    pub(crate) fn prove(&mut self, incarnation: Incarnation) {
        let former = self.proven.replace(incarnation).filter(|former| *former != incarnation);
        if let Some(former) = former {
            self.run_mut(former).superseded = true;
        }
    }

    fn run(&self, incarnation: Incarnation) -> Option<&Run> {
        self.runs.iter().find(|run| run.incarnation == incarnation)
    }

    fn run_mut(&mut self, incarnation: Incarnation) -> &mut Run {
        let place = self.runs.iter().position(|run| run.incarnation == incarnation).unwrap_or_else(|| {
            self.make_room();
            self.runs.push_back(Run { incarnation, highest: Generation(0), superseded: false });
            self.runs.len() - 1
        });
        &mut self.runs[place]
    }

    fn make_room(&mut self) {
        if self.runs.len() < MOST_RUNS {
            return;
        }
        let proven = self.proven;
        let unproven = self.runs.iter().position(|run| !run.superseded && Some(run.incarnation) != proven);
        let oldest = unproven.or_else(|| self.runs.iter().position(|run| Some(run.incarnation) != proven));
        self.runs.remove(oldest.unwrap_or(0));
    }
}

/// Restarts of one peer that are told apart; 24 bytes each.
const MOST_RUNS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proof_supersedes_the_run_before() {
        let mut history = History::default();
        history.saw(Incarnation(1), Generation(3));
        history.prove(Incarnation(1));
        history.prove(Incarnation(1));
        assert!(!history.is_superseded(Incarnation(1)));
        history.prove(Incarnation(2));
        assert!(history.is_superseded(Incarnation(1)) && !history.is_superseded(Incarnation(2)));
        assert_eq!(history.highest(Incarnation(1)), Generation(3));
    }

    #[test]
    fn a_flood_of_unproven_runs_displaces_no_verdict() {
        let mut history = History::default();
        history.prove(Incarnation(1));
        history.saw(Incarnation(2), Generation(7));
        history.prove(Incarnation(2));
        for flood in 100..1000 {
            history.saw(Incarnation(flood), Generation(1));
        }
        assert_eq!(history.runs.len(), MOST_RUNS);
        assert!(history.is_superseded(Incarnation(1)));
        assert_eq!(history.highest(Incarnation(2)), Generation(7));
    }
}
