//! The suites of TCP once more, over simulated devices and nothing but them.

#![allow(clippy::duplicate_mod, reason = "each suite has what they share as its own")]

#[path = "asynchronous.rs"]
mod asynchronous;
#[path = "budgets.rs"]
mod budgets;
#[path = "differential.rs"]
mod differential;
#[path = "direct.rs"]
mod direct;
#[path = "notifications.rs"]
mod notifications;
#[path = "tcp.rs"]
mod tcp;
