//! A result: what was granted, where it ran, and the rows. Text, JSON and CSV are three writings of one thing.

use std::fmt::{self, Write as _};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::args::Test;
use crate::environment::Environment;

/// One finished test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) test: Test,
    /// Granted values, in order.
    pub(crate) header: Vec<Fact>,
    pub(crate) client: Environment,
    pub(crate) server: Environment,
    pub(crate) rows: Vec<Row>,
    /// What a reader should know about these figures.
    pub(crate) notes: Vec<String>,
}

/// One line of the header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fact {
    pub(crate) key: String,
    pub(crate) label: String,
    pub(crate) value: String,
}

/// One run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// As perftest has them.
    pub(crate) cells: Vec<Cell>,
    /// The processes' CPU time.
    pub(crate) cpu: Vec<Cell>,
}

/// One figure, rounded once, so that every writing of it agrees.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cell {
    /// In JSON and CSV: unit at the end.
    pub(crate) key: String,
    /// In the table.
    pub(crate) title: String,
    /// The figure.
    pub(crate) text: String,
}

impl Cell {
    /// A whole number.
    pub(crate) fn count(key: &str, title: &str, value: u64) -> Self {
        Self { key: key.to_owned(), title: title.to_owned(), text: value.to_string() }
    }

    /// A figure with so many decimals; one that does not exist (nothing was measured) is 0.
    pub(crate) fn real(key: &str, title: &str, value: f64, decimals: usize) -> Self {
        let value = if value.is_finite() { value } else { 0.0 };
        Self { key: key.to_owned(), title: title.to_owned(), text: format!("{value:.decimals$}") }
    }

    fn json(&self) -> Value {
        self.text
            .parse::<u64>()
            .map(Value::from)
            .or_else(|_| self.text.parse::<f64>().map(Value::from))
            .unwrap_or_default()
    }
}

impl Fact {
    pub(crate) fn new(key: &str, label: &str, value: impl fmt::Display) -> Self {
        Self { key: key.to_owned(), label: label.to_owned(), value: format!("{value}") }
    }
}

const RULE_WIDTH: usize = 100;

impl Report {
    /// What comes before the rows.
    pub(crate) fn header_text(&self) -> String {
        let rule = "-".repeat(RULE_WIDTH);
        let title = match self.test {
            Test::SendLat => "Send Latency Test",
            Test::SendBw => "Send BW Test",
            Test::ReadLat => "RDMA Read Latency Test",
            Test::ReadBw => "RDMA Read BW Test",
            Test::WriteLat => "RDMA Write Latency Test",
            Test::WriteBw => "RDMA Write BW Test",
            Test::Connect => "Connection Set-up Test",
            Test::Scale => "Scale Test",
        };
        let mut text = format!("{rule}\n{title:^RULE_WIDTH$}\n");
        let mut line = |label: &str, value: &str| writeln!(text, " {label:<17}: {value}").expect("a String takes all");
        for fact in &self.header {
            line(&fact.label, &fact.value);
        }
        for (label, side) in [("Client", &self.client), ("Server", &self.server)] {
            let load = f64::from(side.load_percent) / 100.0;
            line(label, &format!("{}, Linux {}, load {load:.2}", side.host, side.kernel));
            line("", &format!("{} x {}, {}", side.cpus, side.cpu, side.accelerator.words()));
        }
        writeln!(text, "{rule}").expect("a String takes all");
        text
    }

    /// The rows as perftest prints them, and below them the CPU time.
    pub(crate) fn rows_text(&self) -> String {
        let mut text = table(self.rows.iter().map(|row| row.cells.iter()));
        text.push_str(&"-".repeat(RULE_WIDTH));
        text.push('\n');
        text.push_str(&table(self.rows.iter().map(|row| row.cells.iter().take(1).chain(&row.cpu))));
        for note in &self.notes {
            writeln!(text, " note: {note}").expect("a String takes all");
        }
        text.push_str(&"-".repeat(RULE_WIDTH));
        text.push('\n');
        text
    }

    /// Everything, for machines.
    pub(crate) fn json(&self) -> Value {
        let header: Map<String, Value> =
            self.header.iter().map(|fact| (fact.key.clone(), Value::from(fact.value.clone()))).collect();
        let rows: Vec<Map<String, Value>> = self
            .rows
            .iter()
            .map(|row| row.cells.iter().chain(&row.cpu).map(|cell| (cell.key.clone(), cell.json())).collect())
            .collect();
        json!({
            "verbs_perf": env!("CARGO_PKG_VERSION"),
            "test": self.test,
            "header": header,
            "client": self.client,
            "server": self.server,
            "rows": rows,
            "notes": self.notes,
        })
    }

    /// The rows, with the JSON's names in the first line.
    pub(crate) fn csv(&self) -> String {
        let line = |of: fn(&Cell) -> &str, row: &Row| {
            let fields: Vec<&str> = row.cells.iter().chain(&row.cpu).map(of).collect();
            fields.join(",") + "\n"
        };
        // No field holds a comma or a quote: names are ours, figures are digits.
        let names = self.rows.first().map(|row| line(|cell| &cell.key, row)).unwrap_or_default();
        names + &self.rows.iter().map(|row| line(|cell| &cell.text, row)).collect::<String>()
    }
}

/// Titles, and figures below them.
fn table<'a>(rows: impl Iterator<Item = impl Iterator<Item = &'a Cell>>) -> String {
    let rows: Vec<Vec<&Cell>> = rows.map(Iterator::collect).collect();
    let Some(first) = rows.first() else { return String::new() };
    let widths: Vec<usize> = (0..first.len())
        .map(|column| rows.iter().map(|row| row[column].text.len()).max().unwrap_or(0).max(first[column].title.len()))
        .collect();
    let line = |of: fn(&Cell) -> &str, row: &[&Cell]| {
        let fields: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{:<width$}", of(cell))).collect();
        format!(" {}", fields.join("  ")).trim_end().to_owned() + "\n"
    };
    line(|cell| &cell.title, first) + &rows.iter().map(|row| line(|cell| &cell.text, row)).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let row = |bytes, time| Row {
            cells: vec![Cell::count("bytes", "#bytes", bytes), Cell::real("t_min_us", "t_min[usec]", time, 2)],
            cpu: vec![Cell::real("client_user_s", "client user[s]", time / 3.0, 3)],
        };
        Report {
            test: Test::SendLat,
            header: vec![Fact::new("device", "Device", "rxe0"), Fact::new("mtu_bytes", "Mtu", 4096)],
            client: Environment::read(),
            server: Environment::read(),
            rows: vec![row(2, 45.678), row(8_388_608, 123_456.0)],
            notes: vec!["a busy machine".to_owned()],
        }
    }

    #[test]
    fn table_csv_and_json_hold_the_same_figures() {
        let report = report();
        let text = report.rows_text();
        let mut lines = text.lines().skip(1);
        let csv = report.csv();
        let mut records = csv.lines();
        assert_eq!(records.next(), Some("bytes,t_min_us,client_user_s"));
        let json = report.json();
        for row in json["rows"].as_array().unwrap() {
            let shown: Vec<f64> = lines.next().unwrap().split_whitespace().map(|word| word.parse().unwrap()).collect();
            let record: Vec<f64> = records.next().unwrap().split(',').map(|word| word.parse().unwrap()).collect();
            assert_eq!(shown, [row["bytes"].as_f64().unwrap(), row["t_min_us"].as_f64().unwrap()]);
            assert_eq!(record[..2], shown[..]);
            assert_eq!(Some(record[2]), row["client_user_s"].as_f64());
        }
        assert_eq!(json["rows"][0]["t_min_us"], 45.68);
        assert_eq!(json["rows"][0]["bytes"], 2);
        assert!(text.contains("note: a busy machine"));
        let header = report.header_text();
        assert!(header.contains(" Device           : rxe0\n") && header.contains(&report.client.kernel), "{header}");
    }

    #[test]
    fn a_report_survives_the_control_connection() {
        let report = report();
        let there: Report = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(there, report);
    }

    #[test]
    fn a_figure_that_does_not_exist_is_zero_and_no_word() {
        assert_eq!(Cell::real("x", "x", f64::NAN, 2).text, "0.00");
        assert_eq!(Cell::real("x", "x", f64::INFINITY, 1).text, "0.0");
    }
}
