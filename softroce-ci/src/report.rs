//! What test binaries said, counted: libtest's result lines, and the table at the end.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::metadata::Where;
use crate::output::{Output, Stream};

/// What libtest printed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
    pub(crate) filtered: u64,
    /// Names of the failed tests.
    pub(crate) failures: Vec<String>,
    /// Tests that passed in a run without a result line yet.
    pub(crate) passed_so_far: u64,
    /// Names of the tests that had begun and not ended when the binary was stopped, as far as it said so.
    pub(crate) running: Vec<String>,
}

impl Counts {
    /// Takes a line of libtest's output.
    fn line(&mut self, line: &str) {
        if let Some((_, rest)) = line.split_once("test result: ") {
            self.passed_so_far = 0;
            for part in rest.split([';', '.']) {
                let mut words = part.split_whitespace();
                let (Some(number), Some(what)) = (words.next().and_then(|n| n.parse::<u64>().ok()), words.next())
                else {
                    continue;
                };
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.ignored += number,
                    "filtered" => self.filtered += number,
                    _ => {}
                }
            }
        } else if let Some((name, end)) = line.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... ")) {
            self.running.retain(|running| running != name);
            match end {
                "FAILED" => self.failures.push(name.to_owned()),
                "ok" => self.passed_so_far += 1,
                _ => {}
            }
        } else if let Some((name, _)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" has been running for over "))
        {
            self.running.push(name.to_owned());
        }
    }

    /// Takes what stood in the last line, without an end. Where one test runs at a time, libtest names it before.
    fn last_line(&mut self, line: &str) {
        match line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... ")) {
            Some(name) => self.running.push(name.to_owned()),
            None => self.line(line),
        }
    }

    /// A binary that died has no result line; what it said until then counts.
    fn finish(&mut self) {
        self.passed += std::mem::take(&mut self.passed_so_far);
        self.failed = self.failed.max(self.failures.len() as u64);
    }
}

/// Passes output on and counts.
pub(crate) struct Counting<'a> {
    inner: &'a mut dyn Output,
    counts: Counts,
    partial: Vec<u8>,
}

impl<'a> Counting<'a> {
    pub(crate) fn new(inner: &'a mut dyn Output) -> Self {
        Self { inner, counts: Counts::default(), partial: Vec::new() }
    }

    pub(crate) fn into_counts(mut self) -> Counts {
        self.counts.last_line(&String::from_utf8_lossy(&self.partial));
        self.counts.finish();
        self.counts
    }
}

impl Output for Counting<'_> {
    fn bytes(&mut self, host: usize, stream: Stream, bytes: &[u8]) {
        /// A longer line is none of libtest's.
        const LINE_MAX_BYTES: usize = 4096;
        self.inner.bytes(host, stream, bytes);
        if stream == Stream::Out {
            for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
                if self.partial.len() < LINE_MAX_BYTES {
                    self.partial.extend_from_slice(piece);
                }
                if piece.ends_with(b"\n") {
                    self.counts.line(String::from_utf8_lossy(&self.partial).trim_end());
                    self.partial.clear();
                }
            }
        }
    }

    fn flush(&mut self) {
        self.inner.flush();
    }
}

/// How one test binary went.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) place: Where,
    /// Empty when all is well; else the reason, in a few words.
    pub(crate) problem: String,
    pub(crate) counts: Counts,
    pub(crate) time: Duration,
    /// Warnings of the kernel.
    pub(crate) kernel: Vec<String>,
}

impl Row {
    fn ok(&self) -> bool {
        self.problem.is_empty()
    }
}

/// All rows.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) rows: Vec<Row>,
    /// Such as `vm: rxe0`; empty when no device was used.
    pub(crate) device: String,
}

impl Report {
    /// Whether everything passed.
    pub(crate) fn ok(&self) -> bool {
        self.rows.iter().all(Row::ok)
    }

    /// Whether any test ran.
    pub(crate) fn ran_any(&self) -> bool {
        self.sum(|counts| counts.passed + counts.failed) > 0 || !self.ok()
    }

    fn sum(&self, of: fn(&Counts) -> u64) -> u64 {
        self.rows.iter().map(|row| of(&row.counts)).sum()
    }

    /// One line a binary, and the totals.
    pub(crate) fn table(&self) -> String {
        let width = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
        let mut table = String::new();
        for Row { name, place, problem, counts, time, kernel } in &self.rows {
            let verdict = if problem.is_empty() { "ok" } else { "FAILED" };
            let _infallible = write!(
                table,
                "{verdict:<6}  {:<9}  {name:width$}  {:>5} passed {:>4} failed {:>4} ignored  {:>7.1} s",
                place.name(),
                counts.passed,
                counts.failed,
                counts.ignored,
                time.as_secs_f64()
            );
            if !problem.is_empty() {
                let _infallible = write!(table, "  ({problem})");
            }
            table.push('\n');
            for failure in &counts.failures {
                let _infallible = writeln!(table, "          failed: {failure}");
            }
            for line in kernel {
                let _infallible = writeln!(table, "          kernel: {line}");
            }
        }
        let failed_binaries = self.rows.iter().filter(|row| !row.ok()).count();
        let verdict = if self.ok() { "ok" } else { "FAILED" };
        let _infallible = write!(
            table,
            "{verdict}: {} tests passed, {} failed, {} ignored; {} of {} binaries ok",
            self.sum(|counts| counts.passed),
            self.sum(|counts| counts.failed),
            self.sum(|counts| counts.ignored),
            self.rows.len() - failed_binaries,
            self.rows.len()
        );
        if !self.device.is_empty() {
            let _infallible = write!(table, "; device: {}", self.device);
        }
        table.push('\n');
        table
    }

    /// For machines.
    pub(crate) fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "name": row.name,
                    "where": row.place.name(),
                    "ok": row.ok(),
                    "problem": row.problem,
                    "passed": row.counts.passed,
                    "failed": row.counts.failed,
                    "ignored": row.counts.ignored,
                    "filtered": row.counts.filtered,
                    "failures": row.counts.failures,
                    "seconds": row.time.as_secs_f64(),
                    "kernel": row.kernel,
                })
            })
            .collect();
        json!({
            "ok": self.ok(),
            "device": self.device,
            "passed": self.sum(|counts| counts.passed),
            "failed": self.sum(|counts| counts.failed),
            "ignored": self.sum(|counts| counts.ignored),
            "binaries": rows,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nowhere;

    impl Output for Nowhere {
        fn bytes(&mut self, _host: usize, _stream: Stream, _bytes: &[u8]) {}
    }

    const SAID: &str = "\nrunning 4 tests\ntest a ... ok\ntest b::c ... FAILED\ntest d ... ignored\n\n\
        test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.03s\n";

    #[test]
    fn counts_are_read_whatever_the_pieces() {
        let failures = vec!["b::c".to_owned()];
        let expected = Counts { passed: 2, failed: 1, ignored: 1, filtered: 7, failures, ..Counts::default() };
        for piece in [1, 7, 1000] {
            let mut nowhere = Nowhere;
            let mut counting = Counting::new(&mut nowhere);
            SAID.as_bytes().chunks(piece).for_each(|bytes| counting.bytes(0, Stream::Out, bytes));
            assert_eq!(counting.into_counts(), expected);
        }
    }

    #[test]
    fn a_binary_that_died_is_counted_as_far_as_it_came() {
        let mut nowhere = Nowhere;
        let mut counting = Counting::new(&mut nowhere);
        counting.bytes(0, Stream::Out, b"running 3 tests\ntest a ... ok\ntest b ... FAILED\ntest c ... ");
        let counts = counting.into_counts();
        assert_eq!((counts.passed, counts.failed), (1, 1));
        assert_eq!(counts.running, ["c"]);
    }

    #[test]
    fn of_tests_side_by_side_the_slow_ones_are_known() {
        let mut nowhere = Nowhere;
        let mut counting = Counting::new(&mut nowhere);
        for name in ["a", "b"] {
            counting.bytes(0, Stream::Out, format!("test {name} has been running for over 60 seconds\n").as_bytes());
        }
        counting.bytes(0, Stream::Out, b"test a ... ok\ntest c ... ok\n");
        assert_eq!(counting.into_counts().running, ["b"]);
    }

    #[test]
    fn one_failed_binary_fails_the_whole() {
        let row = |name: &str, problem: &str| Row {
            name: name.to_owned(),
            place: Where::Device,
            problem: problem.to_owned(),
            counts: Counts { passed: 3, ..Counts::default() },
            time: Duration::from_millis(1500),
            kernel: vec![],
        };
        let mut report = Report { rows: vec![row("a", "")], device: "vm: rxe0".to_owned() };
        assert!(report.ok());
        report.rows.push(row("b", "status 101"));
        assert!(!report.ok());
        let table = report.table();
        assert!(
            table.contains("(status 101)") && table.contains("6 tests passed") && table.contains("1 of 2"),
            "{table}"
        );
        assert_eq!(report.json()["binaries"][1]["problem"], "status 101");
    }
}
