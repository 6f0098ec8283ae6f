//! `connect`: from the call that connects to the proof that the connection carries messages: the TCP exchange, the queue
//! pairs of both sides, and a PING that came back over them.

use std::time::Duration;

use super::{
    args::{Connect, Extent},
    client::{Client, row},
    control::{Run, Serving},
    failure::Failure,
    latency::histogram,
    node::PATIENCE,
    progress::Progress,
    report::{Cell, Report},
};

pub(crate) fn run(client: &Client, args: &Connect, report: &mut Report) -> Result<(), Failure> {
    let spec = Run { what: Serving::Count, peers: 1, ..Run::default() };
    let (times, tally, cpu) = client.run(spec, |_| {
        let mut times = histogram();
        let _progress = Progress::start(client.quiet, "connections", Extent::Messages(args.iters), &client.node.signal);
        for _ in 0..args.iters {
            times.saturating_record(u64::try_from(once(client)?.as_nanos()).unwrap_or(u64::MAX));
            client.node.signal.count_frame();
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
    Ok(())
}

/// Ends the connection that there is, and makes another once nothing is left of it here.
fn once(client: &Client) -> Result<Duration, Failure> {
    let worker = &client.node.members[0].worker;
    worker.unregister(client.server);
    client.node.wait("the old connection's end", Some(PATIENCE), || (worker.stats().qps == 0).then_some(()))?;
    worker.register(&client.server_address)?;
    client.node.connect(0, client.server)
}
