//! SIGINT, SIGTERM and SIGHUP: nothing stays behind.
//!
//! The thread here only sets a flag, which every wait of this crate looks at. Should the main thread not get out in
//! time (blocked on a pipe that nobody reads), the thread itself ends what is registered and exits.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::error::{Context as _, Error};

static CAUGHT: AtomicI32 = AtomicI32::new(0);
static LEFT_BEHIND: Mutex<Vec<Left>> = Mutex::new(Vec::new());
/// What the main thread has to come out of any wait.
const GRACE: Duration = Duration::from_secs(4);

#[derive(PartialEq, Eq)]
enum Left {
    Group(u32),
    Dir(PathBuf),
}

/// Something that must not outlive us; dropping it takes it off the list and is no clean-up by itself.
pub(crate) struct Registered(Left);

/// Registers a process group that we lead.
pub(crate) fn register_group(pid: u32) -> Registered {
    add(Left::Group(pid), Left::Group(pid))
}

/// Registers a temporary directory.
pub(crate) fn register_dir(path: PathBuf) -> Registered {
    add(Left::Dir(path.clone()), Left::Dir(path))
}

fn add(listed: Left, held: Left) -> Registered {
    if let Ok(mut list) = LEFT_BEHIND.lock() {
        list.push(listed);
    }
    Registered(held)
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Ok(mut list) = LEFT_BEHIND.lock() {
            list.retain(|left| *left != self.0);
        }
    }
}

/// Starts to watch for signals; once, at the start.
pub(crate) fn watch() -> Result<(), Error> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals =
        signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).context(|| "watch for signals".to_owned())?;
    let body = move || {
        for signal in signals.forever() {
            if CAUGHT.swap(signal, Ordering::SeqCst) == 0 {
                spawn_last_resort(signal);
            }
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(body).context(|| "start a thread".to_owned())?;
    Ok(())
}

fn spawn_last_resort(signal: i32) {
    std::thread::spawn(move || {
        std::thread::sleep(GRACE);
        if let Ok(list) = LEFT_BEHIND.lock() {
            for left in list.iter() {
                match left {
                    Left::Group(pid) => kill_group(*pid, Signal::KILL),
                    Left::Dir(path) => drop(std::fs::remove_dir_all(path)),
                }
            }
        }
        std::process::exit(128 + signal);
    });
}

/// Behaves as if this signal had come: SIGPIPE when the reader of our output is gone.
pub(crate) fn pretend(signal: i32) {
    let _one_was_there = CAUGHT.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
}

/// The error to return once a signal has come.
pub(crate) fn check() -> Result<(), Error> {
    match CAUGHT.load(Ordering::SeqCst) {
        0 => Ok(()),
        signal => Err(Error::Interrupted(signal)),
    }
}

/// Signals a process group; one that is gone is fine.
pub(crate) fn kill_group(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _gone = rustix::process::kill_process_group(pid, signal);
    }
}

/// Waits for a child that leads its own process group, and ends the group when a signal comes.
pub(crate) fn wait(child: &mut std::process::Child) -> Result<std::process::ExitStatus, Error> {
    let mut pause = Duration::from_millis(1);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return check().map(|()| status),
            Ok(None) => {}
            Err(source) => {
                return Err(Error::Io { what: "wait for a process".to_owned(), source });
            }
        }
        if let Err(error) = check() {
            kill_group(child.id(), Signal::TERM);
            let _reaped = child.wait();
            return Err(error);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}
