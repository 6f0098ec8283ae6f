//! Named messages, and the inbox that holds them until they are read.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker},
};

use crate::{
    Exhausted, RemoteEffect, TransferError,
    budget::{Budget, Charge, Used},
    deadline::Deadline,
    wake::Wakers,
};

/// A message with a name, both of the application's making. Either may be empty, and sending one twice delivers it
/// twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Notification {
    /// What it is about.
    pub name: String,
    /// What it says.
    pub message: String,
}

/// What became of the notification of a submission.
#[derive(Clone, Debug, Default)]
pub enum NotificationStatus {
    /// None was asked for.
    #[default]
    NotRequested,
    /// Its requests have not ended.
    Pending,
    /// Not sent: the submission was empty, or not all of its requests completed.
    Skipped,
    /// It is in the peer's inbox. Nobody need have read it.
    Delivered,
    /// One attempt failed. The data completed all the same, and must not be sent again for this.
    Failed(NotificationFailure),
}

/// Why a notification did not get through, as far as is known.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the notification failed: {error} (effect: {effect})")]
pub struct NotificationFailure {
    /// What happened.
    pub error: TransferError,
    /// [`RemoteEffect::None`]: it is certainly not in the inbox. [`RemoteEffect::Unknown`]: it may be; nothing here
    /// sends it again.
    pub effect: RemoteEffect,
}

impl Notification {
    /// Both texts.
    pub fn new(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self { name: name.into(), message: message.into() }
    }

    /// What counts towards the budgets.
    pub(crate) fn bytes(&self) -> u64 {
        self.name.len() as u64 + self.message.len() as u64
    }
}

/// The messages of one engine, local and remote, in the order in which they were enqueued.
pub(crate) struct Inbox {
    budget: Arc<Budget>,
    queue: Mutex<Queue>,
    arrived: Condvar,
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<(Notification, Charge)>,
    wakers: Wakers,
}

/// Room for one message. It is given back by [`Reservation::commit`]'s reader, or when dropped.
#[must_use]
pub(crate) struct Reservation {
    inbox: Arc<Inbox>,
    charge: Charge,
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.charge.fmt(f)
    }
}

impl Inbox {
    pub(crate) fn new(budget: Arc<Budget>) -> Arc<Self> {
        Arc::new(Self { budget, queue: Mutex::default(), arrived: Condvar::new() })
    }

    /// Takes room before anything is promised.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, Exhausted> {
        Ok(Reservation { charge: self.budget.take(1, bytes)?, inbox: Arc::clone(self) })
    }

    /// Everything that is there, in order; a message goes to one caller only.
    pub(crate) fn drain(&self) -> Vec<Notification> {
        take(&mut self.lock())
    }

    /// As [`Inbox::drain`], but waits for the first until the deadline.
    pub(crate) fn drain_until(&self, deadline: Deadline) -> Vec<Notification> {
        let mut queue = self.lock();
        while queue.messages.is_empty() {
            let Some(left) = deadline.remaining() else { break };
            queue = self.arrived.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        take(&mut queue)
    }

    /// As [`Inbox::drain`], but pending while there is none.
    pub(crate) fn poll_drain(&self, waker: &Waker) -> Poll<Vec<Notification>> {
        let mut queue = self.lock();
        if queue.messages.is_empty() {
            queue.wakers.add(waker);
            return Poll::Pending;
        }
        Poll::Ready(take(&mut queue))
    }

    pub(crate) fn queued(&self) -> usize {
        self.lock().messages.len()
    }

    /// Queued and reserved.
    pub(crate) fn retained(&self) -> Used {
        self.budget.used()
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take(queue: &mut Queue) -> Vec<Notification> {
    queue.messages.drain(..).map(|(notification, _charge)| notification).collect()
}

impl Reservation {
    /// Puts the message, whose bytes were reserved, at the end.
    pub(crate) fn commit(self, notification: Notification) {
        let mut queue = self.inbox.lock();
        queue.messages.push_back((notification, self.charge));
        let wakers = std::mem::take(&mut queue.wakers);
        drop(queue);
        self.inbox.arrived.notify_all();
        wakers.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn inbox(count: u64, bytes: u64) -> Arc<Inbox> {
        Inbox::new(Budget::new(("max_notifications", count), ("max_inbox_bytes", bytes)))
    }

    fn send(inbox: &Arc<Inbox>, notification: &Notification) -> Result<(), Exhausted> {
        inbox.reserve(notification.bytes()).map(|room| room.commit(notification.clone()))
    }

    #[test]
    fn an_empty_one_costs_a_count_and_is_delivered() {
        let inbox = inbox(2, 1);
        let empty = Notification::default();
        send(&inbox, &empty).expect("room");
        send(&inbox, &empty).expect("room for the same again");
        assert_eq!(send(&inbox, &empty).expect_err("full").budget, "max_notifications");
        assert_eq!(inbox.drain(), [empty.clone(), empty]);
        assert_eq!(inbox.drain(), []);
        assert_eq!(inbox.retained(), Used::default());
    }

    #[test]
    fn draining_leaves_reservations_alone() {
        let inbox = inbox(2, 10);
        let room = inbox.reserve(6).expect("room");
        send(&inbox, &Notification::new("ab", "cd")).expect("the rest");
        assert_eq!(inbox.drain().len(), 1);
        assert_eq!(inbox.retained(), Used { count: 1, bytes: 6 });
        assert!(inbox.reserve(5).is_err());
        drop(room);
        assert_eq!(inbox.retained(), Used::default());
    }

    #[test]
    fn a_waiter_gets_what_arrives_and_gives_up_in_time() {
        let inbox = inbox(8, 100);
        assert_eq!(inbox.drain_until(Deadline::after(Duration::from_millis(1))), []);
        let waiter = std::thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || inbox.drain_until(Deadline::after(Duration::from_secs(60)))
        });
        send(&inbox, &Notification::new("a", "b")).expect("room");
        assert_eq!(waiter.join().expect("no panic"), [Notification::new("a", "b")]);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Reserve(u64),
        Commit(usize),
        Release(usize),
        Drain,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0_u64..8).prop_map(Op::Reserve),
            (0_usize..4).prop_map(Op::Commit),
            (0_usize..4).prop_map(Op::Release),
            Just(Op::Drain),
        ]
    }

    proptest! {
        /// The model: a list of reserved sizes and a list of queued messages.
        #[test]
        fn it_keeps_the_books_of_a_plain_model(ops in proptest::collection::vec(op(), 0..200)) {
            let inbox = inbox(4, 16);
            let mut rooms: Vec<(Reservation, u64)> = Vec::new();
            let mut queued: Vec<Notification> = Vec::new();
            for op in ops {
                let used_bytes: u64 = rooms.iter().map(|room| room.1).chain(queued.iter().map(Notification::bytes)).sum();
                let used_count = rooms.len() + queued.len();
                match op {
                    Op::Reserve(bytes) => {
                        let fits = used_count < 4 && used_bytes + bytes <= 16;
                        let room = inbox.reserve(bytes);
                        prop_assert_eq!(room.is_ok(), fits);
                        rooms.extend(room.ok().map(|room| (room, bytes)));
                    }
                    Op::Commit(at) if at < rooms.len() => {
                        let (room, bytes) = rooms.swap_remove(at);
                        let text = "x".repeat(usize::try_from(bytes).expect("small"));
                        let notification = Notification::new("", text);
                        room.commit(notification.clone());
                        queued.push(notification);
                    }
                    Op::Release(at) if at < rooms.len() => drop(rooms.swap_remove(at)),
                    Op::Commit(_) | Op::Release(_) => {}
                    Op::Drain => prop_assert_eq!(inbox.drain(), std::mem::take(&mut queued)),
                }
                let bytes: u64 = rooms.iter().map(|room| room.1).chain(queued.iter().map(Notification::bytes)).sum();
                let count = (rooms.len() + queued.len()) as u64;
                prop_assert_eq!(inbox.retained(), Used { count, bytes });
            }
        }
    }
}
