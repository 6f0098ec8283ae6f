//! `verbs-perf ladder`: the same round trip with one layer more on each rung, so that each layer's cost is a difference.
//!
//! Two threads of this process send one message to and fro: over loopback TCP with blocking sockets, the same with tokio, the
//! same with frame headers written and read; then over this library's transport, on the simulated fabric, where a message
//! takes no time of its own, and on the RDMA device, if there is one.
//!
//! | module | holds |
//! |---|---|
//! | `sockets` | the rungs of TCP |
//! | `transport` | the rungs of the library |

mod sockets;
mod transport;

use std::{error::Error, time::Duration};

use clap::Args;
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use verbs_transport::{
    TcpNet,
    sim::{HostConfig, SimConfig, SimWorld},
    verbs::{DeviceConfig, DeviceFabric},
};

use crate::environment::Environment;

/// What to measure.
#[derive(Clone, Debug, Args)]
pub(crate) struct LadderArgs {
    /// Bytes of a message
    #[arg(short = 's', long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=8176))]
    size: u32,
    /// Round trips of each rung in each turn
    #[arg(short = 'n', long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(10..))]
    iters: u32,
    /// Turns: each climbs the whole ladder
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    turns: u32,
    /// RDMA device [default: the best there is; without one its rungs are left out]
    #[arg(short = 'd', long, value_name = "NAME")]
    device: Option<String>,
    /// The result as JSON
    #[arg(long)]
    json: bool,
}

/// One layer more than the rung that it is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rung {
    Sockets,
    Tokio,
    Codec,
    SimEvents,
    DeviceEvents,
    SimPolled,
    DevicePolled,
}

/// Times of one way, in nanoseconds.
type Times = Histogram<u64>;
type Outcome<T> = Result<T, Box<dyn Error>>;

impl Rung {
    const ALL: [Self; 7] = [
        Self::Sockets,
        Self::Tokio,
        Self::Codec,
        Self::SimEvents,
        Self::DeviceEvents,
        Self::SimPolled,
        Self::DevicePolled,
    ];

    fn words(self) -> &'static str {
        match self {
            Self::Sockets => "blocking sockets, TCP loopback",
            Self::Tokio => "... with tokio",
            Self::Codec => "... and frame headers",
            Self::SimEvents => "transport, simulated fabric, events",
            Self::DeviceEvents => "transport, device, events",
            Self::SimPolled => "transport, simulated fabric, polled",
            Self::DevicePolled => "transport, device, polled",
        }
    }

    /// What it is compared with.
    fn below(self) -> Option<Self> {
        match self {
            Self::Sockets => None,
            Self::Tokio => Some(Self::Sockets),
            Self::Codec => Some(Self::Tokio),
            Self::SimEvents => Some(Self::Codec),
            Self::DeviceEvents | Self::SimPolled => Some(Self::SimEvents),
            Self::DevicePolled => Some(Self::SimPolled),
        }
    }

    fn is_device(self) -> bool {
        matches!(self, Self::DeviceEvents | Self::DevicePolled)
    }

    fn climb(self, args: &LadderArgs) -> Outcome<Times> {
        let (bytes, iters) = (args.size as usize, args.iters);
        let polled = matches!(self, Self::SimPolled | Self::DevicePolled);
        match self {
            Self::Sockets => sockets::blocking(bytes, iters),
            Self::Tokio => sockets::asynchronous(bytes, iters, false),
            Self::Codec => sockets::asynchronous(bytes, iters, true),
            Self::SimEvents | Self::SimPolled => {
                let world = SimWorld::new(SimConfig::default());
                let host = |n: u8| {
                    let ip = [10, 0, 0, n];
                    Ok((world.host(ip, HostConfig::default()), ip.into()))
                };
                transport::round_trips(host, polled, bytes, iters)
            }
            Self::DeviceEvents | Self::DevicePolled => {
                let config = DeviceConfig { device: args.device.clone(), ..DeviceConfig::default() };
                let host = |_| Ok((DeviceFabric::open(&config, TcpNet::default())?, [127, 0, 0, 1].into()));
                transport::round_trips(host, polled, bytes, iters)
            }
        }
    }
}

/// The medians of all turns of a rung.
struct Measured {
    rung: Rung,
    least_us: f64,
    typical_us: f64,
    p99_us: f64,
}

/// Climbs it, prints the table.
pub(crate) fn ladder(args: &LadderArgs) -> Outcome<()> {
    let device =
        DeviceFabric::open(&DeviceConfig { device: args.device.clone(), ..DeviceConfig::default() }, TcpNet::default());
    let left_out = match device {
        Ok(_) => None,
        Err(error) if args.device.is_some() => return Err(error.into()),
        Err(error) => Some(format!("without the device's rungs: {error}")),
    };
    let rungs: Vec<Rung> = Rung::ALL.into_iter().filter(|rung| left_out.is_none() || !rung.is_device()).collect();
    let mut turns: Vec<Vec<Times>> = rungs.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.turns {
        for (rung, times) in rungs.iter().zip(&mut turns) {
            times.push(rung.climb(args).map_err(|error| format!("{}: {error}", rung.words()))?);
        }
    }
    let measured: Vec<Measured> = rungs.iter().zip(&turns).map(|(rung, times)| Measured::of(*rung, times)).collect();
    let environment = Environment::read();
    if args.json {
        println!("{:#}", json(&measured, args, &environment));
    } else {
        let load = f64::from(environment.load_percent) / 100.0;
        println!(
            "{} bytes one way, medians of {} turns of {} round trips; Linux {}, {} x {}, {}, load {load:.2}",
            args.size,
            args.turns,
            args.iters,
            environment.kernel,
            environment.cpus,
            environment.cpu,
            environment.accelerator.words(),
        );
        println!("{}", table(&measured));
    }
    if let Some(why) = left_out {
        eprintln!("verbs-perf: {why}");
    }
    Ok(())
}

impl Measured {
    fn of(rung: Rung, turns: &[Times]) -> Self {
        let us = |of: fn(&Times) -> u64| {
            let mut all: Vec<u64> = turns.iter().map(of).collect();
            all.sort_unstable();
            Duration::from_nanos(all[all.len() / 2]).as_secs_f64() * 1e6
        };
        Self {
            rung,
            least_us: us(Times::min),
            typical_us: us(|times| times.value_at_quantile(0.5)),
            p99_us: us(|times| times.value_at_quantile(0.99)),
        }
    }

    /// Against the rung below, if that was measured: at best, and typically.
    fn more_us(&self, all: &[Self]) -> Option<(f64, f64)> {
        let below = self.rung.below()?;
        let other = all.iter().find(|other| other.rung == below)?;
        Some((self.least_us - other.least_us, self.typical_us - other.typical_us))
    }
}

fn table(all: &[Measured]) -> Table {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header([
        "rung",
        "t_min[usec]",
        "t_typical[usec]",
        "99%[usec]",
        "against",
        "t_min more",
        "t_typical more",
    ]);
    for measured in all {
        let (least, typical) = match measured.more_us(all) {
            Some((least, typical)) => (format!("{least:+.2}"), format!("{typical:+.2}")),
            None => Default::default(),
        };
        table.add_row([
            measured.rung.words().to_owned(),
            format!("{:.2}", measured.least_us),
            format!("{:.2}", measured.typical_us),
            format!("{:.2}", measured.p99_us),
            measured.rung.below().map_or("", Rung::words).to_owned(),
            least,
            typical,
        ]);
    }
    table
}

fn json(all: &[Measured], args: &LadderArgs, environment: &Environment) -> Value {
    let rungs: Vec<Value> = all
        .iter()
        .map(|measured| {
            json!({
                "rung": measured.rung.words(),
                "t_min_us": measured.least_us,
                "t_typical_us": measured.typical_us,
                "p99_us": measured.p99_us,
                "against": measured.rung.below().map(Rung::words),
                "more_us": measured.more_us(all).map(|(least, typical)| json!({ "t_min": least, "t_typical": typical })),
            })
        })
        .collect();
    json!({ "bytes": args.size, "turns": args.turns, "iterations": args.iters, "environment": environment, "rungs": rungs })
}

fn histogram() -> Times {
    crate::perf::histogram()
}

fn one_way(round_trip: Duration) -> u64 {
    u64::try_from(round_trip.as_nanos() / 2).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rung_without_a_device_is_climbed() {
        let args = LadderArgs { size: 64, iters: 20, turns: 1, device: None, json: false };
        for rung in Rung::ALL.into_iter().filter(|rung| !rung.is_device()) {
            let times = rung.climb(&args).unwrap_or_else(|error| panic!("{rung:?}: {error}"));
            assert_eq!(times.len(), 20, "{rung:?}");
            assert!(times.min() > 0, "{rung:?}");
        }
    }

    #[test]
    fn a_rung_costs_the_difference_to_the_one_below() {
        let measured = |rung, typical_us| Measured { rung, least_us: 1.0, typical_us, p99_us: 9.0 };
        let all = [measured(Rung::Sockets, 5.0), measured(Rung::Tokio, 7.5), measured(Rung::DevicePolled, 3.0)];
        assert_eq!(all[0].more_us(&all), None);
        let (least, typical) = all[1].more_us(&all).unwrap();
        assert!(least.abs() < 1e-9 && (typical - 2.5).abs() < 1e-9);
        assert_eq!(all[2].more_us(&all), None, "what is below it was not measured");
    }
}
