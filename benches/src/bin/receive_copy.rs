//! Zero-copy receive against copying: message rate and CPU time on the device of this host, alternating in one run.
//!
//! Both workers are in this process, so the CPU time is that of both ends.

use std::{
    error::Error,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use clap::Parser;
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use tokio::runtime::Runtime;
use verbs_benches::usage::CpuTime;
use verbs_transport::{
    Config, MessageType, SendError, SendOutcome, TcpNet, Worker,
    fabric::SlabSizes,
    verbs::{DeviceConfig, DeviceFabric},
};

#[derive(Parser)]
struct Args {
    /// Payload sizes in bytes, each in one SEND.
    #[arg(long, value_delimiter = ',', default_values_t = [256, 1024, 2048, 4096, 8180])]
    sizes: Vec<usize>,
    /// Messages in each measurement.
    #[arg(long, default_value_t = 5000)]
    frames: u32,
    /// Measurements of each kind and size.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// Reads every byte of a payload once, as a checksum would.
    #[arg(long)]
    touch: bool,
}

/// One measurement.
#[derive(Clone, Copy)]
struct Cost {
    elapsed: Duration,
    cpu: Duration,
    lent: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header(["bytes", "copied µs", "lent µs", "ratio", "copied CPU µs", "lent CPU µs", "ratio", "lent"]);
    for &bytes in &args.sizes {
        let (mut copied, mut lent) = (Vec::new(), Vec::new());
        for _ in 0..args.pairs {
            copied.push(measure(&runtime, &args, bytes, 0)?);
            lent.push(measure(&runtime, &args, bytes, 64)?);
        }
        let each = |costs: &[Cost], of: fn(&Cost) -> Duration| {
            let mut all: Vec<Duration> = costs.iter().map(of).collect();
            all.sort();
            all[all.len() / 2].as_secs_f64() * 1e6 / f64::from(args.frames)
        };
        let (wall, cpu) = (|cost: &Cost| cost.elapsed, |cost: &Cost| cost.cpu);
        let (a, b, c, d) = (each(&copied, wall), each(&lent, wall), each(&copied, cpu), each(&lent, cpu));
        let frames_lent = lent.iter().map(|cost| cost.lent).min().unwrap_or_default();
        table.add_row([
            bytes.to_string(),
            format!("{a:.2}"),
            format!("{b:.2}"),
            format!("{:.3}", b / a),
            format!("{c:.2}"),
            format!("{d:.2}"),
            format!("{:.3}", d / c),
            frames_lent.to_string(),
        ]);
        eprintln!("{bytes} bytes measured");
    }
    println!("a message, median of {}; ratio: lent / copied\n{table}", args.pairs);
    Ok(())
}

fn measure(runtime: &Runtime, args: &Args, bytes: usize, zero_copy_slabs: u32) -> Result<Cost, Box<dyn Error>> {
    let slabs = SlabSizes { receive_slabs: 512, receive_bytes: 8192, send_slabs: 64, send_bytes: 8192 };
    let open = || DeviceFabric::open(&DeviceConfig { slabs, ..DeviceConfig::default() }, TcpNet::default());
    runtime.block_on(async {
        let config = Config { zero_copy_slabs, zero_copy_min_bytes: 0, ..Config::default() };
        let (from, to) = (Worker::new(Config::default(), open()?)?, Worker::new(config, open()?)?);
        let _idle = from.start().await?;
        let mut inbound = to.start().await?;
        let id = from.register(&to.address())?;
        from.ensure_connected(id).await?;
        let payload = Bytes::from(vec![0x5a; bytes]);
        let lost = Arc::new(|_, _, error: SendError| eprintln!("lost: {error}"));
        let (frames, touch) = (args.frames, args.touch);
        let (began, cpu_before) = (Instant::now(), CpuTime::of_this_process());
        let sender = from.clone();
        let sending = tokio::spawn(async move {
            for _ in 0..frames {
                if let SendOutcome::Pending(room) =
                    sender.send(id, Bytes::new(), payload.clone(), MessageType::Message, lost.clone())
                {
                    room.await.map_err(|error| error.to_string())?;
                }
            }
            Ok::<_, String>(())
        });
        let mut sum = 0u64;
        for _ in 0..frames {
            let frame = inbound.message.recv().await.ok_or("the stream has ended")?;
            if touch {
                sum += frame.payload.iter().map(|&byte| u64::from(byte)).sum::<u64>();
            }
        }
        let cost = Cost {
            elapsed: began.elapsed(),
            cpu: (CpuTime::of_this_process() - cpu_before).total(),
            lent: to.stats().frames_lent,
        };
        std::hint::black_box(sum);
        sending.await??;
        from.shutdown().await;
        to.shutdown().await;
        Ok(cost)
    })
}
