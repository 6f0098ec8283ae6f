//! The backlog in every order that two threads can run in, under loom.
//!
//! The same file compiled against loom's atomics: tokio, beneath the rest of this crate, does not build as a dependency
//! under `--cfg loom`, and so nobody needs another build to run these.

/// Loom's.
mod sync {
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
}

#[path = "backlog.rs"]
#[expect(clippy::duplicate_mod, reason = "against other atomics")]
#[expect(dead_code, reason = "the other module uses all of it")]
mod backlog;

use loom::{sync::Arc, sync::Notify, thread};

use self::backlog::{Backlog, Wake};

impl Wake for Arc<Notify> {
    fn wake(&self) {
        self.notify();
    }
}

/// The driver decides to withhold and goes to sleep while the readers take everything. Lost wake-ups are deadlocks,
/// which loom reports.
fn driver_ends_withholding(frames: &'static [usize], readers: usize) {
    let mut model = loom::model::Builder::new();
    // What is wrong shows within three; without a bound two readers take minutes.
    model.preemption_bound = Some(3);
    model.check(move || {
        let wake = Arc::new(Notify::new());
        let backlog = Arc::new(Backlog::new(10, wake.clone()));
        let total: usize = frames.iter().sum();
        backlog.came(total);
        let readers: Vec<_> = frames
            .chunks(frames.len().div_ceil(readers))
            .map(|taken| {
                let backlog = backlog.clone();
                thread::spawn(move || taken.iter().for_each(|&bytes| backlog.took(bytes)))
            })
            .collect();
        let (mut withheld, _) = backlog.update();
        while withheld {
            wake.wait();
            (withheld, _) = backlog.update();
        }
        for reader in readers {
            reader.join().unwrap();
        }
        assert_eq!(backlog.bytes(), 0);
    });
}

#[test]
fn loom_no_wake_up_is_lost_to_one_reader() {
    driver_ends_withholding(&[12], 1);
    driver_ends_withholding(&[4, 4, 4], 1);
}

#[test]
fn loom_no_wake_up_is_lost_between_two_readers() {
    driver_ends_withholding(&[6, 6], 2);
    driver_ends_withholding(&[4, 4, 4], 2);
}
