//! Submissions: how they are checked, carried out and reported, synchronously and asynchronously.

mod cell;
mod core;
mod execute;
mod executor;
mod future;
mod handle;
mod plan;
mod report;
mod slice;
mod sync;
mod table;
mod timer;

pub use cell::Group;
pub(crate) use cell::{BatchCell, Runner};
pub use core::{BatchState, BatchStatus, TaskState, TaskStatus};
pub(crate) use execute::settle_notification;
pub(crate) use executor::Executor;
pub(crate) use future::promise;
pub use future::{BatchFinished, LocallyDrained, Transfer};
pub use handle::Batch;
pub(crate) use plan::{Miss, Plan, Planner};
pub use plan::{SubmitError, TransferRequest};
pub use report::{BatchReport, TransferFailure, Transport};
pub(crate) use slice::{DataPath, Slice};
pub use slice::{Direction, Mode, Profile};
pub(crate) use sync::run_and_report;
pub(crate) use table::BatchTable;
pub use table::{BatchError, BatchId};
pub(crate) use timer::Timekeeper;

#[cfg(test)]
mod async_tests;
