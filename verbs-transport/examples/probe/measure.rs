//! What is not read but tried.

use std::{
    error::Error,
    fs,
    future::poll_fn,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::timeout;
use verbs_bootstrap::{Psn, QpEndpoint, RdAtomic, TcpNet};
use verbs_transport::{
    fabric::{Fabric, FabricQp, QpCaps, QpPath, QpTimers, RecvSlab, SendData, SendWr, Wc, WrSeq},
    verbs::{DeviceFabric, DeviceQp, OpenError},
};

use crate::facts::Facts;

type Device = DeviceFabric<TcpNet>;
type Outcome = Result<(), Box<dyn Error>>;

const TIMERS: QpTimers = QpTimers { ack_timeout_code: 14, retry_cnt: 6, rnr_retry: 7, min_rnr_timer_code: 3 };

/// What is granted when asked for inline bytes, send WRs and completions.
pub(crate) fn queues(facts: &mut Facts, device: &Device) {
    for inline_bytes in [828, 512, 256, 64, 0] {
        let name = format!("inline_{inline_bytes}_grants");
        match device.create_qp(QpCaps { send_wrs: 16, inline_bytes }) {
            Ok(qp) => facts.add("granted", &name, qp.caps().inline_bytes),
            Err(error) => facts.add("granted", &name, format!("refused: {error}")),
        }
    }
    for send_wrs in [16, 63, 100] {
        let name = format!("send_wrs_{send_wrs}_grants");
        match device.create_qp(QpCaps { send_wrs, inline_bytes: 64 }) {
            Ok(qp) => facts.add("granted", &name, qp.caps().send_wrs),
            Err(error) => facts.add("granted", &name, format!("refused: {error}")),
        }
    }
    facts.add("granted", "cqes_1000_grants", device.limits().cq_depth);
}

/// Whether the SRQ's limit event comes when the count falls below the limit, and only then.
pub(crate) async fn srq_limit(facts: &mut Facts, device: &Device) -> Outcome {
    let mut slabs = receives(device, 8)?;
    device.post_receives(&mut slabs)?;
    let (a, _b) = pair(device, TIMERS).await?;
    device.arm_srq_limit(8)?;
    let at_limit = timeout(Duration::from_millis(100), poll_fn(|cx| device.poll_async_event(cx))).await.is_ok();
    let start = Instant::now();
    a.post(&[message(0)])?;
    let below = timeout(Duration::from_secs(2), poll_fn(|cx| device.poll_async_event(cx))).await;
    facts.add("srq", "limit_event_at_the_limit", at_limit);
    match below {
        Ok(event) => facts.add("srq", "event_below_the_limit", format!("{:?} after {}", event?, ms(start))),
        Err(_) => facts.add("srq", "event_below_the_limit", "none within 2 s"),
    }
    Ok(())
}

pub(crate) fn write_with_imm(facts: &mut Facts, device: &Device) -> Outcome {
    let mut slabs = receives(device, 4)?;
    device.post_receives(&mut slabs)?;
    let outcome = device.probe().write_with_imm(0x0102_0304, Duration::from_secs(3));
    let text = match outcome {
        Ok(outcome) => match (outcome.receive, outcome.failed) {
            (Some((0x0102_0304, bytes)), _) => format!("works: immediate right, byte_len {bytes}"),
            (Some((imm, bytes)), _) => format!("wrong immediate {imm:#x}, byte_len {bytes}"),
            (None, Some(failed)) => format!("{failed:?}"),
            (None, None) => "nothing within 3 s".to_owned(),
        },
        Err(error) => format!("no: {error}"),
    };
    facts.add("features", "write_with_imm", text);
    Ok(())
}

/// A SEND that meets no receive: how long it takes after one is posted, and what a bounded `rnr_retry` gives.
pub(crate) async fn no_receive(facts: &mut Facts, device: &Device) -> Outcome {
    let (a, _b) = pair(device, TIMERS).await?;
    a.post(&[message(0)])?;
    let early = first(device, Duration::from_millis(200))?;
    facts.add("rnr", "rnr_retry_7_without_receives", early.map_or("waits".to_owned(), |wc| format!("{wc:?}")));
    let mut slabs = receives(device, 8)?;
    let start = Instant::now();
    device.post_receives(&mut slabs)?;
    let delivered = first(device, Duration::from_secs(5))?;
    let text = delivered.map_or("nothing within 5 s".to_owned(), |_| format!("resumes after {}", ms(start)));
    facts.add("rnr", "min_rnr_timer_3_once_a_receive_is_posted", text);
    Ok(())
}

/// How long a peer that is gone goes unnoticed.
pub(crate) async fn dead_peer(facts: &mut Facts, open: impl Fn() -> Result<Device, OpenError>) -> Outcome {
    for (ack_timeout_code, retry_cnt, within) in [(10, 3, 2), (14, 0, 3), (14, 6, 5), (16, 6, 8), (14, 7, 3)] {
        let device = open()?;
        let (a, b) = pair(&device, QpTimers { ack_timeout_code, retry_cnt, ..TIMERS }).await?;
        drop(b);
        let start = Instant::now();
        a.post(&[message(0)])?;
        let name = format!("timeout_{ack_timeout_code}_retry_{retry_cnt}");
        let text = match first(&device, Duration::from_secs(within))? {
            Some(Wc::SendFailed { status, .. }) => format!("{status} after {}", ms(start)),
            Some(other) => format!("{other:?}"),
            None => format!("nothing within {within} s"),
        };
        facts.add("dead_peer", &name, text);
    }
    Ok(())
}

/// The events of a link that goes down and comes up.
pub(crate) async fn link_events(facts: &mut Facts, device: &Device) -> Outcome {
    let (name, _) = device.probe().device()?;
    let port = device.port();
    let ndev = format!("/sys/class/infiniband/{name}/ports/{}/gid_attrs/ndevs/{}", port.port, port.gid_index);
    let netdev = fs::read_to_string(ndev)?.trim().to_owned();
    for to in ["down", "up"] {
        let status = Command::new("ip").args(["link", "set", &netdev, to]).status()?;
        if !status.success() {
            return Err(format!("ip link set {netdev} {to}: {status}").into());
        }
        let mut events = Vec::new();
        while let Ok(event) = timeout(Duration::from_millis(500), poll_fn(|cx| device.poll_async_event(cx))).await {
            events.push(format!("{:?}", event?));
        }
        facts.add("async_events", &format!("link_{to}"), events.join(", "));
    }
    Ok(())
}

async fn pair(device: &Device, timers: QpTimers) -> Result<(Arc<DeviceQp>, Arc<DeviceQp>), Box<dyn Error>> {
    let caps = QpCaps { send_wrs: 15, inline_bytes: 64 };
    let (a, b) = (Arc::new(device.create_qp(caps)?), Arc::new(device.create_qp(caps)?));
    let psn = Psn::from_random(7);
    let path_to = |peer: &DeviceQp| QpPath {
        remote: QpEndpoint { qpn: peer.qpn(), psn },
        remote_port: device.port(),
        local_psn: psn,
        mtu: device.port().mtu,
        rd_atomic: RdAtomic { initiator: 1, responder: 1 },
        timers,
    };
    DeviceQp::connect(Arc::clone(&a), path_to(&b)).await?;
    DeviceQp::connect(Arc::clone(&b), path_to(&a)).await?;
    Ok((a, b))
}

fn receives(device: &Device, count: usize) -> Result<Vec<RecvSlab>, &'static str> {
    let (mut slabs, _) = device.take_slabs();
    slabs.truncate(count);
    if slabs.len() == count { Ok(slabs) } else { Err("too few receive slabs") }
}

fn message(seq: u64) -> SendWr<'static> {
    SendWr { seq: WrSeq(seq), signaled: true, data: SendData::Inline(b"probe") }
}

/// The first completion within that time.
fn first(device: &Device, within: Duration) -> Result<Option<Wc>, Box<dyn Error>> {
    let start = Instant::now();
    let mut wcs = Vec::new();
    while start.elapsed() < within {
        if device.poll(&mut wcs)? > 0 {
            return Ok(wcs.into_iter().next());
        }
    }
    Ok(None)
}

fn ms(start: Instant) -> String {
    format!("{:.1} ms", start.elapsed().as_secs_f64() * 1000.0)
}
