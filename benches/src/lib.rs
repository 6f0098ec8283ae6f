//! Measurements of the library.
//!
//! | program | does |
//! |---|---|
//! | `verbs-perf` | what perftest does, with its flags and its table, over this library: [`perf`]; `verbs-perf compare` runs it beside perftest and UCX |
//! | `receive-copy` | zero-copy receive against copying |
//! | `cargo bench --bench micro` | the pieces by themselves: frame headers, credits, the gate, arenas |
//! | `cargo bench --bench instructions` | counts the instructions of each operation on the simulated fabric, against budgets: [`instructions`] |

mod compare;
mod environment;
pub mod instructions;
mod ladder;
pub mod perf;
pub mod usage;
