//! The lock-free pieces, the backlog and the driver's note, in every order that threads can run in, under loom.
//!
//! The same files compiled against loom's atomics: tokio, beneath the rest of this crate, does not build as a dependency
//! under `--cfg loom`, and so nobody needs another build to run these.

/// Loom's.
mod sync {
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
}

#[path = "backlog.rs"]
#[expect(clippy::duplicate_mod, reason = "against other atomics")]
#[expect(dead_code, reason = "the other module uses all of it")]
mod backlog;

#[path = "unsettled.rs"]
#[expect(clippy::duplicate_mod, reason = "against other atomics")]
#[expect(dead_code, reason = "the other module uses all of it")]
mod unsettled;

use loom::{
    sync::{Arc, Mutex, Notify},
    thread,
};

use self::{
    backlog::{Backlog, Wake},
    unsettled::Unsettled,
};

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

/// Senders make work for their peers while the driver looks after all of them, as often as there is a note. Work that it
/// never sees would leave it asleep for ever, which loom reports as a deadlock.
#[test]
fn loom_no_work_is_left_behind_without_a_note() {
    const SENDERS: usize = 2;
    loom::model(|| {
        let wake = Arc::new(Notify::new());
        let unsettled = Arc::new(Unsettled::new(wake.clone()));
        let peers: Arc<[Mutex<usize>; SENDERS]> = Arc::new([Mutex::new(0), Mutex::new(0)]);
        let senders: Vec<_> = (0..SENDERS)
            .map(|at| {
                let (unsettled, peers) = (unsettled.clone(), peers.clone());
                thread::spawn(move || {
                    let mut work = peers[at].lock().unwrap();
                    *work += 1;
                    unsettled.note();
                })
            })
            .collect();
        let mut seen = 0;
        while seen < SENDERS {
            if unsettled.is_noted() {
                unsettled.take();
                seen += peers.iter().map(|peer| std::mem::take(&mut *peer.lock().unwrap())).sum::<usize>();
            } else {
                wake.wait();
            }
        }
        for sender in senders {
            sender.join().unwrap();
        }
    });
}
