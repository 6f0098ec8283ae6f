//! Instructions of each operation in user space, counted by callgrind on the simulated fabric, whose own are left out.
//!
//! ```console
//! $ cargo bench -p verbs-benches --bench instructions              # counts, and compares with budgets.json
//! $ cargo bench -p verbs-benches --bench instructions -- --renew   # counts, and writes budgets.json anew
//! ```
//!
//! Counts are the same on any machine, busy or not, as long as the compiler is the same: unlike times they can be held to a
//! limit, which `tests/instructions.rs` does. What a device does is not in them.
//!
//! | module | holds |
//! |---|---|
//! | `operations` | what is counted |
//! | `callgrind` | runs this program under valgrind, and reads what it wrote |
//! | `budgets` | the file of budgets, and the verdict |

mod budgets;
mod callgrind;
mod operations;

use std::{error::Error, path::PathBuf, process::ExitCode};

use clap::Parser;

use self::{budgets::Budgets, operations::Operation};

#[derive(Parser)]
struct Args {
    /// Writes the counts as the new budgets
    #[arg(long)]
    renew: bool,
    /// Runs one operation and counts nothing: for valgrind
    #[arg(long, value_name = "OPERATION")]
    run: Option<Operation>,
    /// As `cargo bench` calls it
    #[arg(long, hide = true)]
    bench: bool,
}

/// The program.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match args.run {
        Some(operation) => operation.run().map(|()| true),
        None => count(args.renew),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("instructions: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Counts all operations; whether all are within their budgets.
fn count(renew: bool) -> Result<bool, Box<dyn Error>> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/instructions/budgets.json");
    let here = budgets::Circumstances::here()?;
    let mut counts = Vec::new();
    for operation in Operation::ALL {
        let units = operation.units();
        counts.push((operation, callgrind::count(operation)?.div_ceil(units)));
    }
    if renew {
        Budgets::new(here, &counts).write(&path)?;
        println!("{} holds the counts of {} operations", path.display(), counts.len());
        return Ok(true);
    }
    let budgets = Budgets::read(&path)?;
    let verdict = budgets.judge(&here, &counts);
    print!("{}", verdict.table);
    Ok(verdict.within)
}
