//! The report: one HTML page that needs nothing from outside.

use std::fmt::Write as _;

use super::{
    CompareError,
    chart::{Chart, Line},
    contest::{BY_DEPTH, BY_SIZE},
    outcome::{Entry, Outcome, Results},
};

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:78em;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:1em 0}th,td{border:1px solid #ccc;padding:.3em .6em;text-align:left}\
th{background:#f3f3f3}.met{color:#060}.missed,.no{color:#a00;font-weight:bold}pre{background:#f6f6f6;padding:1em;overflow:auto}\
svg{max-width:100%;height:auto}figure{margin:1em 0}";

/// Places of the percentiles' plot, and the figures of perftest and verbs-perf there.
const PERCENTILES: [(&str, &str); 5] =
    [("min", "t_min_us"), ("50%", "t_typical_us"), ("99%", "p99_us"), ("99.9%", "p99_9_us"), ("max", "t_max_us")];

/// The whole page; `json` is shown in it as it is in the file beside it.
pub(crate) fn page(results: &Results, json: &str) -> Result<String, CompareError> {
    let mut html = String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    let _ = write!(
        html,
        "<title>verbs-perf compare</title><style>{STYLE}</style></head><body>\n<h1>verbs-perf compare</h1>\n"
    );
    html.push_str(&environment(results));
    html.push_str(&verdicts(results));
    for figure in figures(results)? {
        let _ = writeln!(html, "<figure>{figure}</figure>");
    }
    let _ = writeln!(
        html,
        "<details><summary>Raw figures and command lines (report.json)</summary><pre>{}</pre></details>",
        escape(json)
    );
    html.push_str("</body></html>\n");
    Ok(html)
}

fn environment(results: &Results) -> String {
    let here = &results.environment;
    let load =
        results.host_load.as_ref().map_or_else(String::new, |load| format!(", load of the machine below: {load}"));
    let line = format!(
        "{} pairs of {} messages on {}, host {}, Linux {}, {} × {}, {}, load {:.2}{load}.",
        results.pairs,
        results.iters,
        results.device,
        here.host,
        here.kernel,
        here.cpus,
        here.cpu,
        here.accelerator.words(),
        f64::from(here.load_percent) / 100.0,
    );
    format!(
        "<p>{}</p>\n<p>Both processes of each run were on this host; contenders took turns. Ratio: ours / the best of the \
         others, of the medians, and the least and the most of the pairs. CPU: user and system time of both processes from \
         their start to their end, each message.</p>\n",
        escape(&line)
    )
}

fn verdicts(results: &Results) -> String {
    let names = ["measure", "ours", "others", "ratio", "pairs", "target", "", "CPU µs, ours", "CPU µs, others"];
    let mut html = String::from("<table><tr>");
    html.extend(names.map(|name| format!("<th>{name}</th>")));
    html.push_str("</tr>\n");
    for outcome in results.outcomes.iter().filter(|outcome| outcome.target.is_some()) {
        html.push_str("<tr>");
        for column in outcome.columns() {
            let class = match &*column {
                "met" => " class=\"met\"",
                "missed" | "no figure" => " class=\"missed\"",
                _ => "",
            };
            let _ = write!(html, "<td{class}>{}</td>", escape(&column));
        }
        html.push_str("</tr>\n");
    }
    html + "</table>\n"
}

fn figures(results: &Results) -> Result<Vec<String>, CompareError> {
    let mut figures = Vec::new();
    for outcome in results.outcomes.iter().filter(|outcome| outcome.key.starts_with("latency")) {
        let lines = outcome.entries.iter().map(percentiles).collect();
        let title = format!("{}: percentiles, medians of the pairs", outcome.title);
        let places = PERCENTILES.map(|(name, _)| name);
        figures.extend(Chart { title: &title, x: "", y: outcome.unit, places: &places, lines }.svg()?);
    }
    let bandwidth = |at: f64, rate: f64| rate * at / f64::from(1 << 20);
    let lines = sweep(results, BY_SIZE, bandwidth);
    let chart = Chart { title: "Bandwidth by size of message", x: "bytes", y: "MiB/s", places: &[], lines };
    figures.extend(chart.svg()?);
    let lines = sweep(results, BY_DEPTH, |_, rate| rate);
    let title = "64 B message rate by depth of the send queue";
    figures.extend(Chart { title, x: "work requests", y: "messages/s", places: &[], lines }.svg()?);
    Ok(figures)
}

fn percentiles(entry: &Entry) -> Line {
    let at = |(index, (_, key)): (u32, &(&str, &str))| Some((f64::from(index), entry.median_of(key)?));
    let points = (1..).zip(&PERCENTILES).filter_map(at).collect();
    Line { name: entry.name.to_owned(), points }
}

/// One line for each contender of a sweep.
fn sweep(results: &Results, over: &str, y: impl Fn(f64, f64) -> f64) -> Vec<Line> {
    let points: Vec<(f64, &Outcome)> = results
        .outcomes
        .iter()
        .filter_map(|outcome| outcome.sweep.filter(|(name, _)| *name == over).map(|(_, at)| (f64::from(at), outcome)))
        .collect();
    let mut lines: Vec<Line> = Vec::new();
    for (at, outcome) in points {
        for entry in &outcome.entries {
            let Some(rate) = entry.median() else { continue };
            let point = (at, y(at, rate));
            match lines.iter_mut().find(|line| line.name == entry.name) {
                Some(line) => line.points.push(point),
                None => lines.push(Line { name: entry.name.to_owned(), points: vec![point] }),
            }
        }
    }
    lines
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::outcome::{digits, tests::results};

    #[test]
    fn the_page_stands_alone_and_holds_the_figures() {
        let results = results();
        let json = format!("{:#}", results.json());
        let page = page(&results, &json).unwrap();
        assert_eq!(page.matches("<svg").count(), 2, "percentiles and the sweep over sizes");
        for word in ["ib_send_lat", "rxe0", &*digits(11.0), "class=\"met\"", "c &lt;x&gt;"] {
            assert!(page.contains(word), "{word}");
        }
        for outside in ["<script", "src=", "href=", "@import", "c <x>"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn what_was_said_by_tools_is_no_markup() {
        assert_eq!(escape("<b> & \"x\""), "&lt;b&gt; &amp; &quot;x&quot;");
    }
}
