//! The contenders: how each is started, and how its output is read.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

/// How one sees that a server is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// It listens on this TCP port.
    Tcp(u16),
    /// It cannot be seen; after this time it should be.
    After(Duration),
}

/// One tool with its words for one contest.
#[derive(Clone, Debug)]
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    pub(crate) server: Vec<String>,
    pub(crate) client: Vec<String>,
    pub(crate) ready: Ready,
    /// Whether the server ends by itself after its client.
    pub(crate) server_ends: bool,
    pub(crate) read: Read,
    /// Messages that the CPU time is divided by.
    pub(crate) messages: u64,
}

impl Contender {
    /// Another of the same name.
    pub(crate) fn called(self, name: &'static str) -> Self {
        Self { name, ..self }
    }
}

/// How the client's standard output is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// JSON of verbs-perf: this figure of the first row.
    Perf(&'static str),
    /// perftest's latency table: `t_typical`.
    PerftestLatency,
    /// perftest's bandwidth table: messages a second.
    PerftestRate,
    /// The same table: MiB a second, on average.
    PerftestBandwidth,
    /// `ucx_perftest -f -v`: the median latency.
    UcxLatency,
    /// The same: messages a second.
    UcxRate,
    /// cmtime: the sum of the steps up to `connect`.
    Cmtime,
}

/// What a run gave.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Figures {
    /// The one that is compared.
    pub(crate) value: f64,
    /// Others of the same run, by name.
    pub(crate) details: BTreeMap<String, f64>,
}

impl Read {
    /// Reads a client's output; `None`: it is not what this tool prints when all went well. A time or a rate of 0, which
    /// perftest prints beside `inf`, is no figure.
    pub(crate) fn figures(self, output: &str) -> Option<Figures> {
        self.parse(output).filter(|figures| figures.value > 0.0)
    }

    fn parse(self, output: &str) -> Option<Figures> {
        match self {
            Self::Perf(key) => perf(output, key),
            Self::PerftestLatency => {
                let names = ["t_min_us", "t_max_us", "t_typical_us", "t_avg_us", "t_stdev_us", "p99_us", "p99_9_us"];
                let details = perftest(output, &names)?;
                Some(Figures { value: details["t_typical_us"], details })
            }
            Self::PerftestRate | Self::PerftestBandwidth => {
                let details = perftest(output, &["bw_peak_mib_s", "bw_average_mib_s", "msg_rate_mpps"])?;
                let by_rate = self == Self::PerftestRate;
                let value = if by_rate { details["msg_rate_mpps"] * 1e6 } else { details["bw_average_mib_s"] };
                Some(Figures { value, details })
            }
            Self::UcxLatency | Self::UcxRate => {
                let names = [
                    "iterations",
                    "p50_us",
                    "avg_us",
                    "overall_us",
                    "avg_mb_s",
                    "overall_mb_s",
                    "avg_rate",
                    "overall_rate",
                ];
                let fields = output.lines().rev().find_map(|line| numbers(line.split(','), names.len()))?;
                let details = named(&names, &fields);
                let value = if self == Self::UcxLatency { details["p50_us"] } else { details["overall_rate"] };
                Some(Figures { value, details })
            }
            Self::Cmtime => cmtime(output),
        }
    }
}

fn perf(output: &str, key: &str) -> Option<Figures> {
    let json: serde_json::Value = serde_json::from_str(output).ok()?;
    let row = json["rows"].get(0)?.as_object()?;
    let details: BTreeMap<String, f64> =
        row.iter().filter_map(|(key, value)| Some((key.clone(), value.as_f64()?))).collect();
    let value = match key {
        "msg_rate_mpps" => details.get(key)? * 1e6,
        _ => *details.get(key)?,
    };
    Some(Figures { value, details })
}

/// The row below the last line of titles: size, iterations, and these.
fn perftest(output: &str, names: &[&str]) -> Option<BTreeMap<String, f64>> {
    let mut lines = output.lines().skip_while(|line| !line.trim_start().starts_with("#bytes")).skip(1);
    let fields = lines.find_map(|line| numbers(line.split_whitespace(), names.len() + 2))?;
    Some(named(names, &fields[2..]))
}

/// One line a step: `create id    :        0.45       0.11       7.00      22.25`, the last being µs a connection.
fn cmtime(output: &str) -> Option<Figures> {
    const STEPS: [&str; 6] = ["create id", "bind addr", "resolve addr", "resolve route", "create qp", "connect"];
    if output.contains("error:") {
        return None; // some connections were rejected: the times are those of the others
    }
    let steps: BTreeMap<String, f64> = output
        .lines()
        .filter_map(|line| {
            let (step, figures) = line.split_once(':')?;
            let each = numbers(figures.split_whitespace(), 4)?[3];
            Some((step.trim().to_owned(), each))
        })
        .collect();
    let value = STEPS.iter().map(|step| steps.get(*step).copied()).sum::<Option<f64>>()?;
    let details = steps.into_iter().map(|(step, each)| (format!("{}_us", step.replace(' ', "_")), each)).collect();
    Some(Figures { value, details })
}

/// Exactly so many numbers. perftest's `inf`, which it prints when it could not tell its clock's rate on a busy machine, is
/// none.
fn numbers<'a>(words: impl Iterator<Item = &'a str>, count: usize) -> Option<Vec<f64>> {
    let number = |word: &str| word.trim().parse::<f64>().ok().filter(|number| number.is_finite());
    let numbers: Vec<f64> = words.map(number).collect::<Option<_>>()?;
    (numbers.len() == count).then_some(numbers)
}

fn named(names: &[&str], fields: &[f64]) -> BTreeMap<String, f64> {
    names.iter().zip(fields).map(|(name, field)| ((*name).to_owned(), *field)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9 * b.abs()
    }

    #[test]
    fn perftests_latency_table_is_read() {
        let output = "\
---------------------------------------------------------------------------------------
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:99:00:01
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 64      500          10.73          20055.58      3935.56  	       3636.46     	3699.84		14101.21 		20055.58
---------------------------------------------------------------------------------------
";
        let figures = Read::PerftestLatency.figures(output).unwrap();
        assert!(close(figures.value, 3935.56) && close(figures.details["p99_us"], 14101.21), "{figures:?}");
        assert_eq!(
            Read::PerftestLatency.figures(&output.replace("3935.56", "inf")),
            None,
            "its clock was not calibrated"
        );
        assert_eq!(Read::PerftestLatency.figures("Couldn't connect to localhost:18515"), None);
    }

    #[test]
    fn perftests_bandwidth_table_is_read_with_its_warning_in_between() {
        let output = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 WARNING: BW peak won't be measured in this run.
 64         2000             3.07               0.67   		   0.011004
";
        let figures = Read::PerftestRate.figures(output).unwrap();
        assert_eq!(Read::PerftestRate.figures(&output.replace("0.011004", "0.000000")), None);
        assert!(close(figures.value, 11_004.0) && close(figures.details["bw_average_mib_s"], 0.67), "{figures:?}");
        assert!(close(Read::PerftestBandwidth.figures(output).unwrap().value, 0.67));
    }

    #[test]
    fn ucx_csv_is_read() {
        let output = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n\
                      2000,24.000,173.411,173.411,0.35,0.35,5770,5771\n";
        assert!(close(Read::UcxRate.figures(output).unwrap().value, 5771.0));
        assert!(close(Read::UcxLatency.figures(output).unwrap().value, 24.0));
        assert_eq!(Read::UcxRate.figures("rc_verbs: no such transport"), None);
    }

    #[test]
    fn cmtime_is_the_sum_of_the_steps_to_the_connection() {
        let output = "\
creating id
step              total ms     max ms     min us  us / conn
create id    :        0.45       0.11       7.00      22.25
bind addr    :        8.49       8.08      12.00     424.30
resolve addr :       32.56      16.97    6232.00    1628.15
resolve route:       19.98       4.50    3184.00     999.00
create qp    :       15.30       8.44     139.00     765.25
connect      :      213.33     186.83  150342.00   10666.45
disconnect   :      270.63     252.93    6671.00   13531.50
destroy      :        0.88       0.24       9.00      43.90
";
        let figures = Read::Cmtime.figures(output).unwrap();
        assert!(close(figures.value, 22.25 + 424.30 + 1628.15 + 999.0 + 765.25 + 10_666.45), "{figures:?}");
        let rejected = format!("event: RDMA_CM_EVENT_REJECTED, error: 8\n{output}");
        assert_eq!(Read::Cmtime.figures(&rejected), None);
    }

    #[test]
    fn our_own_json_is_read() {
        let output = r#"{"rows":[{"bytes":64,"t_typical_us":45.5,"msg_rate_mpps":0.5}]}"#;
        assert!(close(Read::Perf("t_typical_us").figures(output).unwrap().value, 45.5));
        assert!(close(Read::Perf("msg_rate_mpps").figures(output).unwrap().value, 500_000.0));
        assert_eq!(Read::Perf("t_typical_us").figures(r#"{"rows":[]}"#), None);
    }
}
