//! Ends what is overdue, tries again what could not be taken back, gives idle arenas back.

use std::sync::{Arc, Weak};

use verbs_transport::fabric::Fabric;

use super::inner::{Inner, now};

/// Sleeps while there is nothing that could fall due. Ends with the rendezvous, which it does not keep.
pub(super) async fn run<F: Fabric>(inner: Weak<Inner<F>>) {
    loop {
        let Some(strong) = inner.upgrade() else { return };
        let (due, every, wake) = (strong.tick(), strong.config.reaper_tick, strong.reaper_wake.clone());
        drop(strong);
        if due {
            tokio::time::sleep(every).await;
        } else {
            wake.notified().await;
        }
    }
}

impl<F: Fabric> Inner<F> {
    /// One look; whether there will be something to look at later.
    fn tick(self: &Arc<Self>) -> bool {
        let now = now();
        let reaped = self.with_book(|book| book.on_time(now));
        if reaped.leases > 0 || reaped.slots > 0 {
            tracing::info!(leases = reaped.leases, slots = reaped.slots, "ended what was overdue");
        }
        self.counters.leases_reaped.add(reaped.leases);
        self.end_leases_of_the_gone();
        self.revoke_again();
        self.counters.arenas_released.add(self.sources.release_idle(now) as u64);
        let destinations_idle = self.reads.as_ref().is_some_and(|reads| reads.release_idle());
        let due = self.look(|book| book.next_deadline().is_some());
        due || !self.left().is_empty() || self.has_stubborn() || self.sources.has_idle() || destinations_idle
    }
}
