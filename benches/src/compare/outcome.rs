//! Samples of a contest, and what they say: medians, the ratio, and how far the pairs differ.

use serde_json::{Value, json};

use super::{
    CompareError,
    contest::{Better, Contest},
    runner::{RunError, Sample},
};
use crate::environment::Environment;

/// One contest, measured.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) key: String,
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    pub(crate) target: Option<f64>,
    rivals: usize,
    pub(crate) sweep: Option<(&'static str, u32)>,
    /// Ours first.
    pub(crate) entries: Vec<Entry>,
}

/// One contender of it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    server: String,
    client: String,
    messages: u64,
    /// In the order of the pairs; `Err`: why there is none.
    pub(crate) samples: Vec<Result<Sample, String>>,
}

/// Ours against the best of the rivals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ratio {
    /// Of the medians.
    pub(crate) of_medians: f64,
    /// Of the pairs: the least and the most.
    pub(crate) least: f64,
    pub(crate) most: f64,
    /// Index of the other.
    pub(crate) rival: usize,
}

/// Everything.
#[derive(Clone, Debug)]
pub(crate) struct Results {
    pub(crate) environment: Environment,
    /// Load of the machine that carries this virtual one, as it was told.
    pub(crate) host_load: Option<String>,
    pub(crate) device: String,
    pub(crate) pairs: u32,
    pub(crate) iters: u64,
    pub(crate) outcomes: Vec<Outcome>,
}

impl Entry {
    /// The median; `None` without a sample.
    pub(crate) fn median(&self) -> Option<f64> {
        median(self.good().map(|sample| sample.figures.value).collect())
    }

    /// The median of another figure of the same runs.
    pub(crate) fn median_of(&self, key: &str) -> Option<f64> {
        median(self.good().filter_map(|sample| sample.figures.details.get(key).copied()).collect())
    }

    /// User and system time of both processes, in µs a message: the median.
    #[expect(clippy::cast_precision_loss, reason = "a quotient for people")]
    pub(crate) fn cpu_us(&self) -> Option<f64> {
        median(self.good().map(|sample| sample.cpu.total().as_secs_f64() * 1e6 / self.messages as f64).collect())
    }

    fn good(&self) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter_map(|sample| sample.as_ref().ok())
    }

    fn json(&self) -> Value {
        let samples: Vec<Value> = self
            .samples
            .iter()
            .map(|sample| match sample {
                Ok(sample) => json!({
                    "value": sample.figures.value,
                    "details": sample.figures.details,
                    "cpu_user_s": sample.cpu.user.as_secs_f64(),
                    "cpu_system_s": sample.cpu.system.as_secs_f64(),
                    "seconds": sample.seconds,
                }),
                Err(why) => json!({ "failed": why }),
            })
            .collect();
        json!({
            "name": self.name,
            "server": self.server,
            "client": self.client,
            "messages": self.messages,
            "median": self.median(),
            "cpu_us_per_message": self.cpu_us(),
            "samples": samples,
        })
    }
}

impl Outcome {
    pub(crate) fn new(contest: &Contest) -> Self {
        let entries = contest
            .contenders
            .iter()
            .map(|contender| Entry {
                name: contender.name,
                server: contender.server.join(" "),
                client: contender.client.join(" "),
                messages: contender.messages,
                samples: Vec::new(),
            })
            .collect();
        let (key, title) = (contest.key.clone(), contest.title.clone());
        let Contest { unit, better, target, rivals, sweep, .. } = *contest;
        Self { key, title, unit, better, target, rivals, sweep, entries }
    }

    /// One more measurement of a contender.
    pub(crate) fn add(&mut self, contender: usize, sample: Result<Sample, RunError>) {
        self.entries[contender].samples.push(sample.map_err(|error| error.to_string()));
    }

    /// Ours against the best of the rivals; `None` when either has no figure.
    pub(crate) fn ratio(&self) -> Option<Ratio> {
        let (ours, others) = self.entries.split_first()?;
        let mine = ours.median()?;
        let medians =
            others.iter().take(self.rivals).enumerate().filter_map(|(index, entry)| Some((index + 1, entry.median()?)));
        let (rival, theirs) = match self.better {
            Better::Lower => medians.min_by(|a, b| a.1.total_cmp(&b.1)),
            Better::Higher => medians.max_by(|a, b| a.1.total_cmp(&b.1)),
        }?;
        let pairs = ours.samples.iter().zip(&self.entries[rival].samples);
        let ratios = pairs.filter_map(|pair| match pair {
            (Ok(mine), Ok(theirs)) => Some(mine.figures.value / theirs.figures.value),
            _ => None,
        });
        let (least, most) =
            ratios.fold((f64::INFINITY, 0.0_f64), |(least, most), ratio| (least.min(ratio), most.max(ratio)));
        Some(Ratio { of_medians: mine / theirs, least, most, rival })
    }

    /// Whether the target is met.
    pub(crate) fn met(&self) -> Option<bool> {
        let (target, ratio) = (self.target?, self.ratio()?.of_medians);
        Some(match self.better {
            Better::Lower => ratio <= target,
            Better::Higher => ratio >= target,
        })
    }

    /// A row for people.
    pub(crate) fn columns(&self) -> Vec<String> {
        let figure = |value: Option<f64>| value.map_or_else(|| "failed".to_owned(), digits);
        let (ours, others) = self.entries.split_at(1);
        let list = |of: fn(&Entry) -> Option<f64>| {
            let each = others.iter().map(|entry| format!("{} {}", entry.name, figure(of(entry))));
            each.collect::<Vec<_>>().join(", ")
        };
        let ratio = self.ratio();
        let sign = if self.better == Better::Lower { "<=" } else { ">=" };
        vec![
            format!("{} [{}]", self.title, self.unit),
            figure(ours.first().and_then(Entry::median)),
            list(Entry::median),
            ratio.map_or_else(String::new, |ratio| format!("{:.3}", ratio.of_medians)),
            ratio.map_or_else(String::new, |ratio| format!("{:.2} to {:.2}", ratio.least, ratio.most)),
            self.target.map_or_else(String::new, |target| format!("{sign} {target:.2}")),
            self.met().map_or("no figure", |met| if met { "met" } else { "missed" }).to_owned(),
            figure(ours.first().and_then(Entry::cpu_us)),
            list(Entry::cpu_us),
        ]
    }

    fn json(&self) -> Value {
        let ratio = self.ratio();
        json!({
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "better": if self.better == Better::Lower { "lower" } else { "higher" },
            "target": self.target,
            "sweep": self.sweep.map(|(name, at)| json!({ "over": name, "at": at })),
            "ratio": ratio.map(|ratio| json!({
                "of_medians": ratio.of_medians,
                "least": ratio.least,
                "most": ratio.most,
                "against": self.entries[ratio.rival].name,
            })),
            "met": self.met(),
            "contenders": self.entries.iter().map(Entry::json).collect::<Vec<_>>(),
        })
    }
}

impl Results {
    pub(crate) fn json(&self) -> Value {
        json!({
            "verbs_perf": env!("CARGO_PKG_VERSION"),
            "environment": self.environment,
            "host_load": self.host_load,
            "device": self.device,
            "pairs": self.pairs,
            "iterations": self.iters,
            "contests": self.outcomes.iter().map(Outcome::json).collect::<Vec<_>>(),
        })
    }

    /// An error if a measurement has failed for good.
    pub(crate) fn failures(&self) -> Result<(), CompareError> {
        let samples = || self.outcomes.iter().flat_map(|outcome| &outcome.entries).flat_map(|entry| &entry.samples);
        let mut failed = samples().filter_map(|sample| sample.as_ref().err());
        match failed.next() {
            None => Ok(()),
            Some(first) => {
                Err(CompareError::Failed { failed: failed.count() + 1, all: samples().count(), first: first.clone() })
            }
        }
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 { upper } else { f64::midpoint(values[middle - 1], upper) })
}

/// Three digits that count, or all before the point.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use super::*;
    use crate::{compare::tools::Figures, usage::CpuTime};

    fn entry(name: &'static str, values: &[f64]) -> Entry {
        let sample = |&value: &f64| {
            let details = BTreeMap::from([("t_min_us".to_owned(), value / 2.0), ("p99_us".to_owned(), value * 2.0)]);
            let cpu = CpuTime { user: Duration::from_millis(1), system: Duration::from_millis(3) };
            Ok(Sample { figures: Figures { value, details }, cpu, seconds: 1.0 })
        };
        let samples = values.iter().map(sample).collect();
        Entry { name, server: "s".to_owned(), client: "c <x>".to_owned(), messages: 1000, samples }
    }

    fn outcome(better: Better, target: f64, entries: Vec<Entry>) -> Outcome {
        let (key, title) = ("latency-64".to_owned(), "64 B".to_owned());
        Outcome { key, title, unit: "us", better, target: Some(target), rivals: usize::MAX, sweep: None, entries }
    }

    /// For the tests of the page.
    pub(crate) fn results() -> Results {
        let latency =
            outcome(Better::Lower, 1.0, vec![entry("verbs-perf", &[10.0, 12.0]), entry("ib_send_lat", &[11.0])]);
        let mut point = outcome(Better::Higher, 1.0, vec![entry("verbs-perf", &[10.0]), entry("ib_send_bw", &[9.0])]);
        (point.key, point.target, point.sweep) = ("sweep-size-64".to_owned(), None, Some(("size", 64)));
        let mut next = point.clone();
        next.sweep = Some(("size", 4096));
        Results {
            environment: Environment::read(),
            host_load: Some("0.10".to_owned()),
            device: "rxe0".to_owned(),
            pairs: 2,
            iters: 1000,
            outcomes: vec![latency, point, next],
        }
    }

    #[test]
    fn medians_are_of_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn ours_is_held_against_the_best_of_the_others() {
        let entries = vec![entry("ours", &[50.0, 60.0, 55.0]), entry("a", &[70.0; 3]), entry("b", &[40.0, 60.0, 50.0])];
        let lower = outcome(Better::Lower, 1.05, entries.clone());
        let ratio = lower.ratio().unwrap();
        assert!((ratio.of_medians - 1.1).abs() < 1e-9 && ratio.rival == 2, "{ratio:?}");
        assert!((ratio.least - 1.0).abs() < 1e-9 && (ratio.most - 1.25).abs() < 1e-9, "{ratio:?}");
        assert_eq!(lower.met(), Some(false));
        let first_alone = Outcome { rivals: 1, ..lower };
        assert_eq!((first_alone.ratio().unwrap().rival, first_alone.met()), (1, Some(true)));
        let higher = outcome(Better::Higher, 0.7, entries);
        assert_eq!((higher.ratio().unwrap().rival, higher.met()), (1, Some(true)));
    }

    #[test]
    fn without_a_figure_there_is_no_verdict_and_the_run_fails() {
        let mut failed = entry("b", &[]);
        failed.samples.push(Err("b printed no figure".to_owned()));
        let outcome = outcome(Better::Lower, 1.0, vec![entry("ours", &[1.0]), failed]);
        assert_eq!((outcome.ratio(), outcome.met()), (None, None));
        assert!(outcome.columns().iter().any(|column| column == "no figure"));
        let results = Results { outcomes: vec![outcome], ..results() };
        assert_eq!(
            results.failures().unwrap_err().to_string(),
            "1 of 2 measurements failed; the first: b printed no figure"
        );
    }

    #[test]
    fn the_json_holds_every_sample() {
        let json = results().json();
        let contest = &json["contests"][0];
        assert_eq!(contest["contenders"][0]["samples"][1]["value"], 12.0);
        assert_eq!(contest["contenders"][0]["median"], 11.0);
        assert_eq!(contest["contenders"][0]["cpu_us_per_message"], 4.0);
        assert_eq!(contest["ratio"]["against"], "ib_send_lat");
    }
}
