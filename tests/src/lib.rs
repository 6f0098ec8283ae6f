//! Scenario suites. Each scenario is written once, against a [`Lab`](lab::Lab), and runs on the simulated fabric in fake time
//! and on Soft-RoCE in real time.
//!
//! | module | holds |
//! |---|---|
//! | [`lab`] | what a scenario needs of a fabric, and how it is run: simulated or on a device |
//! | [`node`] | one worker with its streams and a record of its errors |
//! | [`party`] | one worker with a rendezvous |
//! | [`bare`] | one whose rendezvous is made by hand, and dishonest |
//! | [`bulk`] | one worker with bulk memory, and regions with known bytes |
//! | [`scenarios`] | the scenarios themselves, named after the contract (MT-n) and the field reports (B-n) |
//! | [`examples`] | the examples of `verbs-transport`, run as processes |
//! | [`faults`] | the fault model: seeded whole-world runs with an oracle |
//! | [`traffic`] | numbered frames, and the books about them on both sides |
//! | [`process`] | workers in processes of their own, here or on a second host |
//! | [`network`] | the network between two hosts, and what can be done to it |
//! | [`soak`] | two hosts, random faults and numbered traffic for as long as you like |
//! | [`steady`] | traffic whose allocations are counted |
//! | [`leaks`] | what a process must not have more of after a test than before |

#![allow(clippy::missing_panics_doc, reason = "scenarios fail by panicking: that is what they are for")]
#![allow(clippy::match_wild_err_arm, reason = "a timeout has nothing to tell")]

pub mod bare;
pub mod bulk;
pub mod examples;
pub mod faults;
pub mod lab;
pub mod leaks;
pub mod network;
pub mod node;
pub mod party;
pub mod process;
pub mod scenarios;
pub mod soak;
pub mod steady;
pub mod traffic;
