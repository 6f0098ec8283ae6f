//! `connect`: from the call that connects to the proof that the connection carries messages: the TCP exchange, the queue
//! pairs of both sides, and a PING that came back over them. One after the other, or `--at-once` so many, each to another
//! worker of the server, and then each one's share of the time, as cmtime tells it.

use std::time::Duration;

use super::{
    args::{Connect, Extent},
    client::{Client, row},
    control::{Run, Serving},
    failure::Failure,
    latency::{histogram, nanos},
    node::PATIENCE,
    progress::Progress,
    report::{Cell, Report},
};

pub(crate) fn run(client: &Client, args: &Connect, report: &mut Report) -> Result<(), Failure> {
    let spec = Run { what: Serving::Count, peers: 1, ..Run::default() };
    let (times, tally, cpu) = client.run(spec, |_| {
        let mut times = histogram();
        let (rounds, at_once) = (args.iters.div_ceil(args.at_once.into()), args.at_once);
        let all = Extent::Messages(rounds * u64::from(at_once));
        let _progress = Progress::start(client.quiet, "connections", all, &client.node.signal);
        for _ in 0..rounds {
            times.saturating_record_n(nanos(once(client)? / at_once), at_once.into());
            (0..at_once).for_each(|_| client.node.signal.count_frame());
        }
        Ok(times)
    })?;
    #[expect(clippy::cast_precision_loss, reason = "microseconds for people")]
    let us = |nanos: u64| nanos as f64 / 1e3;
    let time = |key: &str, title: &str, value: f64| Cell::real(key, title, value, 1);
    let cells = vec![
        Cell::count("connections", "#connections", times.len()),
        time("t_min_us", "t_min[usec]", us(times.min())),
        time("t_max_us", "t_max[usec]", us(times.max())),
        time("t_typical_us", "t_typical[usec]", us(times.value_at_quantile(0.5))),
        time("t_avg_us", "t_avg[usec]", times.mean() / 1e3),
        time("t_stdev_us", "t_stdev[usec]", times.stdev() / 1e3),
        time("p99_us", "99% percentile[usec]", us(times.value_at_quantile(0.99))),
    ];
    report.rows.push(row(cells, cpu, tally.cpu, times.len()));
    if args.at_once > 1 {
        report.notes.push(format!("{} connections at once: the time of all, divided by their number", args.at_once));
    }
    Ok(())
}

/// Ends the connections that there are, and makes others once nothing is left of them here.
fn once(client: &Client) -> Result<Duration, Failure> {
    let worker = &client.node.members[0].worker;
    for (server, _) in &client.servers {
        worker.unregister(*server);
    }
    client.node.wait("the old connection's end", Some(PATIENCE), || (worker.stats().qps == 0).then_some(()))?;
    let servers: Vec<_> =
        client.servers.iter().map(|(_, address)| worker.register(address)).collect::<Result<_, _>>()?;
    client.node.connect_all(0, &servers)
}
