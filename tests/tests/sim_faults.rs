//! The fault model, seed by seed. See [`verbs_tests::faults`].
//!
//! `VERBS_SEED=n` runs that seed alone, `VERBS_SEEDS=n` so many of each mood (5,000 unless said).

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use verbs_tests::faults::{Mood, run};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

/// A seed that takes longer, by the clock on the wall, spins.
const STUCK: Duration = Duration::from_secs(60);

fn run_all(mood: Mood) {
    if let Some(seed) = number("VERBS_SEED") {
        match run(seed, mood) {
            Ok(outcome) => println!("{mood:?} seed {seed}: {outcome:?}"),
            Err(broken) => panic!("{mood:?} seed {seed}: {broken}"),
        }
        return;
    }
    let seeds = number("VERBS_SEEDS").unwrap_or(5_000);
    let next = AtomicU64::new(0);
    let began = Instant::now();
    let mut failures = std::thread::scope(|scope| {
        let work = || {
            let mut failures = Vec::new();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= seeds || failures.len() >= 3 {
                    return failures;
                }
                let watch = Watch::start(mood, seed);
                if let Err(broken) = run(seed, mood) {
                    eprintln!("{mood:?} seed {seed}: {broken}");
                    failures.push(seed);
                }
                drop(watch);
            }
        };
        let threads: Vec<_> =
            (0..std::thread::available_parallelism().map_or(2, usize::from)).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("the model does not panic")).collect::<Vec<_>>()
    });
    failures.sort_unstable();
    println!("{mood:?}: {seeds} seeds in {:?}", began.elapsed());
    assert!(failures.is_empty(), "{mood:?}: run these again with VERBS_SEED: {failures:?}");
}

/// Ends the process when a seed neither passes nor fails.
struct Watch {
    /// Dropped when the seed is done.
    _stop: std::sync::mpsc::Sender<()>,
}

impl Watch {
    fn start(mood: Mood, seed: u64) -> Self {
        let (stop, stopped) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            if stopped.recv_timeout(STUCK) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("{mood:?} seed {seed} does not come to an end");
                std::process::abort();
            }
        });
        Self { _stop: stop }
    }
}

#[test]
fn nothing_fails_when_nothing_is_lost() {
    run_all(Mood::Unpunctual);
}

#[test]
fn every_frame_ends_once_whatever_dies() {
    run_all(Mood::Harsh);
}

/// The same seed gives the same run, so that a failure can be looked at again.
#[test]
fn equal_seeds_give_equal_runs() {
    for mood in [Mood::Unpunctual, Mood::Harsh] {
        for seed in 0..20 {
            let (one, two) = (run(seed, mood), run(seed, mood));
            assert_eq!(one, two, "{mood:?} seed {seed}");
        }
        assert_ne!(run(1, mood).map(|run| run.trace), run(2, mood).map(|run| run.trace));
    }
}
