//! The file of budgets, and the verdict.

use std::{collections::BTreeMap, error::Error, fmt::Write as _, fs, path::Path, process::Command};

use comfy_table::{Table, presets::ASCII_MARKDOWN};
use serde::{Deserialize, Serialize};

use super::operations::Operation;

/// More than this above its budget, an operation has become slower.
const ALLOWED_PERCENT: u64 = 5;
/// With another compiler than the budgets were taken with: it inlines otherwise. Most of a change for the worse still shows.
const ALLOWED_PERCENT_ELSEWHERE: u64 = 20;
/// The design's own limit, which no renewal moves.
const DESIGN: (Operation, u64) = (Operation::Message, 600);

/// What counts depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Circumstances {
    /// `rustc --version`.
    pub(crate) rustc: String,
    pub(crate) arch: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Budgets {
    #[serde(flatten)]
    taken: Circumstances,
    /// Instructions of each operation.
    instructions: BTreeMap<String, u64>,
}

pub(crate) struct Verdict {
    pub(crate) table: String,
    /// No budget is exceeded.
    pub(crate) within: bool,
}

impl Circumstances {
    /// Of this build.
    pub(crate) fn here() -> Result<Self, Box<dyn Error>> {
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let output = Command::new(rustc).arg("--version").output()?;
        let rustc = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Ok(Self { rustc, arch: std::env::consts::ARCH.to_owned() })
    }
}

impl Budgets {
    pub(crate) fn new(taken: Circumstances, counts: &[(Operation, u64)]) -> Self {
        let instructions = counts.iter().map(|(operation, count)| (operation.name(), *count)).collect();
        Self { taken, instructions }
    }

    pub(crate) fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let text =
            fs::read_to_string(path).map_err(|error| format!("{}: {error}; make it with --renew", path.display()))?;
        Ok(serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?)
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        Ok(fs::write(path, format!("{}\n", serde_json::to_string_pretty(self)?))?)
    }

    /// Each count against its budget.
    pub(crate) fn judge(&self, here: &Circumstances, counts: &[(Operation, u64)]) -> Verdict {
        let allowed = if *here == self.taken { ALLOWED_PERCENT } else { ALLOWED_PERCENT_ELSEWHERE };
        // Another processor's instructions are other instructions: shown, and not judged.
        let comparable = here.arch == self.taken.arch;
        let mut table = Table::new();
        table.load_preset(ASCII_MARKDOWN);
        table.set_header(["operation", "instructions", "budget", "change", ""]);
        let mut within = true;
        for (operation, count) in counts {
            let budget = self.instructions.get(&operation.name()).copied();
            let fits = budget.is_some_and(|budget| !comparable || *count * 100 <= budget * (100 + allowed));
            within &= fits;
            table.add_row([
                operation.name(),
                count.to_string(),
                budget.map_or_else(String::new, |budget| budget.to_string()),
                budget.map_or_else(String::new, |budget| change(*count, budget)),
                match (budget, fits) {
                    (None, _) => "has no budget".to_owned(),
                    (_, true) => String::new(),
                    (_, false) => format!("more than {allowed}% above"),
                },
            ]);
        }
        let mut text = format!("{table}\n");
        if *here != self.taken {
            let (then, now) = (&self.taken, here);
            let so = if comparable { format!("{allowed}% are allowed") } else { "nothing is judged".to_owned() };
            let _ = writeln!(
                text,
                "the budgets were taken with {} on {}, this is {} on {}: {so}",
                then.rustc, then.arch, now.rustc, now.arch
            );
        }
        if let Some((_, count)) = counts.iter().find(|(operation, _)| *operation == DESIGN.0) {
            let verdict = if *count <= DESIGN.1 { "met" } else { "missed" };
            let _ = writeln!(text, "design: a message takes at most {} instructions: {verdict}", DESIGN.1);
        }
        if !within {
            text += "if the change is worth it: cargo bench -p verbs-benches --bench instructions -- --renew, and say why\n";
        }
        Verdict { table: text, within }
    }
}

#[expect(clippy::cast_precision_loss, reason = "percent for people")]
fn change(count: u64, budget: u64) -> String {
    format!("{:+.1}%", (count as f64 / budget as f64 - 1.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rustc(version: &str) -> Circumstances {
        Circumstances { rustc: version.to_owned(), arch: "x86_64".to_owned() }
    }

    #[test]
    fn five_percent_more_is_allowed_and_not_six() {
        let budgets = Budgets::new(rustc("1"), &[(Operation::SendInline, 100), (Operation::Repost, 1000)]);
        let judge = |inline, repost| {
            budgets.judge(&rustc("1"), &[(Operation::SendInline, inline), (Operation::Repost, repost)]).within
        };
        assert!(judge(105, 1050) && judge(50, 1000));
        assert!(!judge(106, 1000) && !judge(100, 1051));
    }

    #[test]
    fn with_another_compiler_more_is_allowed_and_it_is_said() {
        let budgets = Budgets::new(rustc("1"), &[(Operation::SendInline, 100)]);
        let verdict = budgets.judge(&rustc("2"), &[(Operation::SendInline, 120)]);
        assert!(verdict.within && verdict.table.contains("taken with 1") && verdict.table.contains("this is 2"));
        let verdict = budgets.judge(&rustc("2"), &[(Operation::SendInline, 121)]);
        assert!(!verdict.within && verdict.table.contains("--renew"), "{}", verdict.table);
    }

    #[test]
    fn on_another_processor_nothing_is_judged_and_it_is_said() {
        let budgets = Budgets::new(rustc("1"), &[(Operation::SendInline, 100)]);
        let here = Circumstances { arch: "aarch64".to_owned(), ..rustc("1") };
        let verdict = budgets.judge(&here, &[(Operation::SendInline, 500)]);
        assert!(verdict.within && verdict.table.contains("nothing is judged"), "{}", verdict.table);
    }

    #[test]
    fn what_has_no_budget_is_not_within_it() {
        let budgets = Budgets::new(rustc("1"), &[]);
        assert!(!budgets.judge(&rustc("1"), &[(Operation::SendInline, 1)]).within);
    }

    #[test]
    fn the_file_has_a_budget_for_each_operation_and_survives_writing() {
        let text = include_str!("budgets.json");
        let budgets: Budgets = serde_json::from_str(text).unwrap();
        let names: Vec<&String> = budgets.instructions.keys().collect();
        assert_eq!(names.len(), Operation::ALL.len());
        assert!(
            Operation::ALL.iter().all(|operation| budgets.instructions.contains_key(&operation.name())),
            "{names:?}"
        );
        assert_eq!(format!("{}\n", serde_json::to_string_pretty(&budgets).unwrap()), text);
    }
}
