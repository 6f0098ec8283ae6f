//! `read-lat`, `read-bw`, `write-lat`, `write-bw`: memory of the server by GET and PUT, on the bulk QP.
//!
//! The measuring task runs where the bulk driver runs, as a program that awaits its transfers does. Times are from the call to
//! the completed future: of a GET, all bytes are here then; of a PUT, the server's device has acknowledged them. `write-lat` is
//! perftest's: half of a PUT that tells the peer and the same PUT back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use tokio::task::JoinSet;
use verbs_rma::{Bulk, Region, RemoteRange, TransferError};
use verbs_transport::{InstanceId, fabric::bulk::Access};

use super::{
    args::{Extent, Rma, Test},
    bandwidth::mib_per_second,
    client::{Client, most, row},
    control::{Expose, Run, Serving},
    failure::Failure,
    latency::{cells, histogram, nanos},
    node::{Fabric, PATIENCE, Told},
    progress::Progress,
    report::{Cell, Report},
    serve::Counted,
    signal::{Signal, lock},
};

/// Both sides hold so much memory, and pin it.
pub(crate) const MAX_BYTES: usize = 1 << 30;
/// Transfers before those that count.
const WARM_UP: u64 = 5;
/// The peak is that of the fastest stretch of so many.
const SLICE: u64 = 100;

pub(crate) fn run(client: &Client, test: Test, args: &Rma, report: &mut Report) -> Result<(), Failure> {
    let what = match test {
        Test::WriteLat => "half of a PUT with notification and the same back",
        Test::WriteBw => "a PUT ends when the server's device has acknowledged it",
        _ => "a GET ends when all its bytes are here",
    };
    for bytes in args.messages.sizes(test.default_bytes()) {
        let (node, extent) = (&client.node, args.messages.extent());
        let local = node.map(bytes, Access::DESTINATION.and(Access::PUT_TARGET))?;
        let own = local.whole().map(Into::into);
        let expose = match test {
            Test::WriteLat => own.map(|into| Expose::PingPong { into }),
            Test::WriteBw => Some(Expose::Target),
            _ => Some(Expose::Source),
        };
        let spec = Run { what: Serving::Nothing, bytes, expose, ..Run::default() };
        let (cells, tally, cpu, count) = {
            let measure = |remote: Option<RemoteRange>| {
                let remote = remote.ok_or_else(|| Failure::Protocol("no memory to read or write".to_owned()))?;
                let plan = Plan::new(client, local, remote, extent, args.at_once)?;
                let _progress = Progress::start(client.quiet, &format!("{bytes} bytes"), extent, &node.signal);
                match test {
                    Test::ReadLat => {
                        latency(client, plan, Way::Get).map(|times| (cells(bytes, &times, 1.0), times.len()))
                    }
                    Test::WriteLat => {
                        latency(client, plan, Way::PingPong).map(|times| (cells(bytes, &times, 2.0), times.len()))
                    }
                    Test::WriteBw => bandwidth(client, plan, bytes, Way::Put),
                    _ => bandwidth(client, plan, bytes, Way::Get),
                }
            };
            let ((cells, count), tally, cpu) = client.run(spec, measure)?;
            (cells, tally, cpu, count)
        };
        node.unmap(local)?;
        report.rows.push(row(cells, cpu, tally.cpu, count));
    }
    report.notes.push(what.to_owned());
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Get,
    Put,
    /// A PUT that tells, and the server's answer.
    PingPong,
}

/// What all tasks of a run know.
struct Plan {
    bulk: Bulk<Fabric>,
    told: Told,
    peer: InstanceId,
    local: Region,
    remote: RemoteRange,
    extent: Extent,
    at_once: u32,
    signal: Arc<Signal>,
    begun: AtomicU64,
}

impl Plan {
    fn new(
        client: &Client,
        local: Region,
        remote: RemoteRange,
        extent: Extent,
        at_once: u32,
    ) -> Result<Arc<Self>, Failure> {
        let (bulk, told) = client.node.bulk()?;
        let (peer, signal) = (client.server, client.node.signal.clone());
        Ok(Arc::new(Self { bulk, told, peer, local, remote, extent, at_once, signal, begun: AtomicU64::new(0) }))
    }

    async fn once(&self, way: Way) -> Result<(), TransferError> {
        let (peer, id, remote) = (self.peer, self.local.id, self.remote);
        match way {
            Way::Get => self.bulk.get(peer, remote, id, 0).await?,
            Way::Put => self.bulk.put(peer, id, 0, remote).await?,
            Way::PingPong => {
                let mut told = self.told.lock().await;
                self.bulk.put_and_notify(peer, id, 0, remote, 1).await?;
                // `None` is the end of bulk memory here, which the next transfer reports.
                let _ = told.recv().await;
            }
        }
        self.signal.count_frame();
        Ok(())
    }

    /// Whether another one is to begin.
    fn goes_on(&self, began: Instant) -> bool {
        let before = self.begun.fetch_add(1, Ordering::Relaxed);
        match self.extent {
            Extent::Messages(count) => before < count,
            Extent::For(time) => began.elapsed() < time,
        }
    }
}

/// Runs a task to its end, or to the first trouble of anybody.
fn drive<T: Send + 'static>(
    client: &Client,
    task: impl Future<Output = Result<T, TransferError>> + Send + 'static,
) -> Result<T, Failure> {
    let signal = client.node.signal.clone();
    let running = client.node.spawn(async move {
        let result = task.await;
        signal.tell();
        result
    });
    let waited = client.node.wait("transfers", Some(PATIENCE), || running.is_finished().then_some(()));
    if let Err(failure) = waited {
        running.abort();
        return Err(failure);
    }
    Ok(client.node.join(running)??)
}

fn latency(client: &Client, plan: Arc<Plan>, way: Way) -> Result<Histogram<u64>, Failure> {
    drive(client, async move {
        for _ in 0..WARM_UP.min(most(plan.extent)) {
            plan.once(way).await?;
        }
        let (mut times, began) = (histogram(), Instant::now());
        let mut then = began;
        while plan.goes_on(began) {
            plan.once(way).await?;
            let now = Instant::now();
            times.saturating_record(nanos(now - then));
            then = now;
        }
        Ok(times)
    })
}

fn bandwidth(client: &Client, plan: Arc<Plan>, bytes: usize, way: Way) -> Result<(Vec<Cell>, u64), Failure> {
    let (counted, took) = drive(client, async move {
        plan.once(way).await?; // connects
        let (counted, began) = (Arc::<std::sync::Mutex<Counted>>::default(), Instant::now());
        let mut lines: JoinSet<Result<(), TransferError>> = JoinSet::new();
        for _ in 0..plan.at_once {
            let (plan, counted) = (plan.clone(), counted.clone());
            lines.spawn(async move {
                while plan.goes_on(began) {
                    plan.once(way).await?;
                    lock(&counted).count(SLICE, Instant::now);
                }
                Ok(())
            });
        }
        while let Some(line) = lines.join_next().await {
            line.expect("nothing aborts a line, and none panics")?;
        }
        let took = began.elapsed();
        let counted = std::mem::take(&mut *lock(&counted));
        Ok((counted, took))
    })?;
    let average = mib_per_second(counted.frames * bytes as u64, took);
    let best = counted.best_slice_nanos.map(Duration::from_nanos);
    let peak = best.map_or(average, |best| mib_per_second(SLICE * bytes as u64, best));
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let rate = counted.frames as f64 / took.as_secs_f64();
    let cells = vec![
        Cell::count("bytes", "#bytes", bytes as u64),
        Cell::count("iterations", "#iterations", counted.frames),
        Cell::real("bw_peak_mib_s", "BW peak[MiB/sec]", peak.max(average), 2),
        Cell::real("bw_average_mib_s", "BW average[MiB/sec]", average, 2),
        Cell::real("msg_rate_mpps", "MsgRate[Mpps]", rate / 1e6, 6),
    ];
    Ok((cells, counted.frames))
}
