//! Who runs the driver: a task that sleeps on the completion channel, or a thread that never sleeps.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use tokio::time::sleep_until;

use super::{
    alarm::Alarm,
    config::Progress,
    driver::{Driver, QUIET_BEFORE_DESTROY},
    shared::Shared,
};
use crate::fabric::{Fabric, FabricError};

/// Full poll batches in a row before the driver's task lets others run.
const BATCHES_BEFORE_YIELD: u32 = 8;

/// The driver's task: arm, drain, wait. Ends after shutdown, when the last connection is gone.
pub(crate) async fn run_task<F: Fabric>(shared: Arc<Shared<F>>, spin: Duration) {
    if let Err(error) = drive(&shared, spin).await {
        shared.on_device_lost(&error);
        // The device is gone, its flushes will not come; what is in flight ends by the clock.
        while !shared.driver_may_stop() {
            let due = shared.driver().timers(&shared);
            let due = due.unwrap_or_else(|| shared.now() + QUIET_BEFORE_DESTROY);
            tokio::select! {
                biased;
                () = sleep_until(due.into()) => {}
                () = shared.driver_wake.notified() => {}
            }
        }
    }
}

async fn drive<F: Fabric>(shared: &Arc<Shared<F>>, spin: Duration) -> Result<(), FabricError> {
    let (mut armed, mut alarm) = (false, Alarm::new());
    loop {
        if !spin.is_zero() {
            spin_while_busy(shared, spin).await?;
        }
        // Once for each wake-up: it is a system call, and one that is not used up holds.
        if !std::mem::replace(&mut armed, true) {
            shared.fabric.arm()?;
        }
        drain(shared).await?;
        if let Some(due) = shared.driver().timers(shared) {
            alarm.by(due.into());
        }
        if shared.driver_may_stop() {
            return Ok(());
        }
        tokio::select! {
            biased;
            woken = poll_fn(|cx| shared.fabric.poll_wake(cx)) => {
                woken?;
                armed = false;
                shared.counters.wakes.add(1);
            }
            event = poll_fn(|cx| shared.fabric.poll_async_event(cx)) => {
                shared.driver().on_async_event(shared, event?)?;
            }
            () = shared.driver_wake.notified() => {}
            () = alarm.rings(), if alarm.is_set() => {}
        }
    }
}

/// Polls until nothing is there: what comes after a poll that was not full brings the wake-up that was asked for.
async fn drain<F: Fabric>(shared: &Arc<Shared<F>>) -> Result<(), FabricError> {
    loop {
        for _ in 0..BATCHES_BEFORE_YIELD {
            if shared.driver().progress_to_the_end(shared)? {
                return Ok(());
            }
        }
        tokio::task::yield_now().await;
    }
}

/// Polls until nothing has come for `spin`.
async fn spin_while_busy<F: Fabric>(shared: &Arc<Shared<F>>, spin: Duration) -> Result<(), FabricError> {
    let mut last = Instant::now();
    loop {
        for _ in 0..BATCHES_BEFORE_YIELD {
            if shared.driver().progress(shared)? > 0 {
                last = Instant::now();
            } else if last.elapsed() >= spin {
                return Ok(());
            }
        }
        tokio::task::yield_now().await;
    }
}

/// The async events that are there, for drivers that are never woken.
pub(crate) fn take_async_events<F: Fabric>(shared: &Arc<Shared<F>>, driver: &mut Driver<F>) -> Result<(), FabricError> {
    let mut cx = Context::from_waker(Waker::noop());
    while let Poll::Ready(event) = shared.fabric.poll_async_event(&mut cx) {
        driver.on_async_event(shared, event?)?;
    }
    Ok(())
}

/// The driver's thread in [`Progress::BusyPoll`].
pub(crate) fn run_thread<F: Fabric>(shared: &Arc<Shared<F>>) {
    loop {
        let mut driver = shared.driver();
        let step = driver.progress(shared).and_then(|polled| {
            if driver.chores_are_due(polled) || shared.is_stopping() {
                driver.timers(shared);
                take_async_events(shared, &mut driver)?;
            }
            Ok(())
        });
        drop(driver);
        if let Err(error) = step {
            shared.on_device_lost(&error);
            while !shared.driver_may_stop() {
                shared.driver().timers(shared);
                std::thread::sleep(QUIET_BEFORE_DESTROY / 4);
            }
        }
        // Without a pause: a poll that finds nothing takes long enough for a sibling thread of the core, and a pause takes
        // as long as the poll, or an exit to the emulator in a virtual machine that is emulated.
        if shared.driver_may_stop() {
            return;
        }
    }
}

/// How the driver's task spins.
pub(crate) fn spin_of(progress: Progress) -> Duration {
    match progress {
        Progress::SpinThenPark { spin } => spin,
        _ => Duration::ZERO,
    }
}
