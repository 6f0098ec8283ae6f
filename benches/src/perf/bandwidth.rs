//! `send-bw`: messages one way, as many as go; the clock stops when the receiver has told that all have come.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use verbs_transport::MessageType;

use super::{
    args::{Extent, SendBw, Test},
    client::{Client, row},
    control::{Run, Serving, Tally},
    failure::Failure,
    node::PATIENCE,
    progress::Progress,
    report::{Cell, Report},
};

/// The peak is that of the fastest stretch of so many messages, as the receiver saw it.
const SLICE_FRAMES: u64 = 100;
/// The clock is read after so many messages of a run that ends by time.
const SENDS_A_LOOK: u64 = 16;

pub(crate) fn run(client: &Client, args: &SendBw, report: &mut Report) -> Result<(), Failure> {
    for bytes in args.messages.sizes(Test::SendBw.default_bytes()) {
        let members: Vec<usize> = (0..client.node.members.len()).collect();
        let extent = args.messages.extent();
        let (flood, tally, cpu) = flood(client, &members, bytes, extent)?;
        let best = tally.best_slice_nanos.map(Duration::from_nanos);
        let peak = best.map_or(0.0, |best| mib_per_second(SLICE_FRAMES * bytes as u64, best));
        let average = flood.mib_per_second(bytes);
        let cells = vec![
            Cell::count("bytes", "#bytes", bytes as u64),
            Cell::count("iterations", "#iterations", flood.sent),
            Cell::real("bw_peak_mib_s", "BW peak[MiB/sec]", peak.max(average), 2),
            Cell::real("bw_average_mib_s", "BW average[MiB/sec]", average, 2),
            Cell::real("msg_rate_mpps", "MsgRate[Mpps]", flood.messages_per_second() / 1e6, 6),
        ];
        report.rows.push(row(cells, cpu, tally.cpu, flood.sent));
    }
    Ok(())
}

/// What went.
pub(crate) struct Flood {
    pub(crate) sent: u64,
    took: Duration,
}

impl Flood {
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    pub(crate) fn messages_per_second(&self) -> f64 {
        self.sent as f64 / self.took.as_secs_f64()
    }

    pub(crate) fn mib_per_second(&self, bytes: usize) -> f64 {
        mib_per_second(self.sent * bytes as u64, self.took)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
pub(crate) fn mib_per_second(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / f64::from(1 << 20) / took.as_secs_f64()
}

/// Sends from these workers in turn, `extent` messages of each, until the server has told that all have come.
pub(crate) fn flood(
    client: &Client,
    members: &[usize],
    bytes: usize,
    extent: Extent,
) -> Result<(Flood, Tally, crate::usage::CpuTime), Failure> {
    let peers = u32::try_from(members.len()).unwrap_or(u32::MAX);
    let spec = Run { what: Serving::Count, bytes, peers, slice_frames: SLICE_FRAMES, ..Run::default() };
    let (flood, tally, cpu) = client.run(spec, |_| send_all(client, members, bytes, extent))?;
    if tally.frames != flood.sent {
        return Err(Failure::Protocol(format!("{} of {} messages were counted", tally.frames, flood.sent)));
    }
    Ok((flood, tally, cpu))
}

fn send_all(client: &Client, members: &[usize], bytes: usize, extent: Extent) -> Result<Flood, Failure> {
    let node = &client.node;
    let payload = Bytes::from(vec![0x5a; bytes]);
    let ended = Arc::new(AtomicU64::new(0));
    for &member in members {
        let (ended, signal) = (ended.clone(), node.signal.clone());
        node.members[member].set(Box::new(move |_, frame| {
            if frame.kind == MessageType::Ack {
                ended.fetch_add(1, Ordering::AcqRel);
                signal.tell();
            }
        }));
    }
    let shown = match extent {
        Extent::Messages(count) => Extent::Messages(count * members.len() as u64),
        by_time @ Extent::For(_) => by_time,
    };
    let progress = Progress::start(client.quiet, &format!("{bytes} bytes"), shown, &node.signal);
    let (began, mut rounds) = (Instant::now(), 0);
    while match extent {
        Extent::Messages(count) => rounds < count,
        Extent::For(time) => rounds % SENDS_A_LOOK != 0 || began.elapsed() < time,
    } {
        for &member in members {
            node.send(member, client.server, &payload, MessageType::Message)?;
            node.signal.count_frame();
        }
        rounds += 1;
    }
    // Frames of one peer come in order, so this one comes last.
    for &member in members {
        node.send(member, client.server, &Bytes::new(), MessageType::Event)?;
    }
    let all = members.len() as u64;
    node.wait("the receiver's word that all has come", Some(PATIENCE), || {
        (ended.load(Ordering::Acquire) == all).then_some(())
    })?;
    let took = began.elapsed();
    drop(progress);
    for &member in members {
        node.members[member].clear();
    }
    Ok(Flood { sent: rounds * all, took })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_all_messages_and_mebibytes() {
        let flood = Flood { sent: 2048, took: Duration::from_secs(2) };
        assert!((flood.messages_per_second() - 1024.0).abs() < 1e-9);
        assert!((flood.mib_per_second(1024) - 1.0).abs() < 1e-9);
    }
}
