//! Asynchronous transfers on tokio, on one thread that is never blocked: several at once, one that is cancelled, and the
//! same by polling, as a program without futures would.

use std::time::Duration;

use verbs_engine::{BatchState, Config, Direction, Engine, Permission, TransferRequest};

const LAYER: u64 = 1 << 20;
const LAYERS: u64 = 8;
const PATIENCE: Duration = Duration::from_secs(10);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // More workers than the four of the default: eight layers are fetched at once.
    let source = Engine::new(Config { source_workers: 8, ..Config::default() })?;
    let bytes: Vec<u8> = (0..=250).cycle().take(usize::try_from(LAYER * LAYERS)?).collect();
    let weights = source.register_memory(bytes.clone().into(), Permission::RemoteRead)?;

    let engine = Engine::new(Config::default())?;
    let local = engine.register_memory(vec![0; bytes.len()].into(), Permission::LocalOnly)?;
    let peer = engine.open_segment_async(source.endpoint(), source.epoch(), PATIENCE).await?;
    let request = |layer: u64| TransferRequest {
        local_address: local.address() + layer * LAYER,
        remote_address: weights.address() + layer * LAYER,
        length: LAYER,
    };

    // Checked and holding their memory when this line is through; moving while we do something else.
    let transfers: Vec<_> = (0..LAYERS)
        .map(|layer| engine.submit_async(&peer, Direction::Read, &[request(layer)], None, PATIENCE))
        .collect::<Result<_, _>>()?;
    for (layer, transfer) in transfers.into_iter().enumerate() {
        let report = transfer.await.into_result()?;
        println!("layer {layer}: {} bytes", report.completed_bytes);
    }
    if local.update(0, LAYER * LAYERS, |received| received != bytes)? {
        return Err("what came is not what was served".into());
    }

    let all: Vec<_> = (0..LAYERS).map(request).collect();
    let cancelled = engine.submit_async(&peer, Direction::Read, &all, None, PATIENCE)?;
    cancelled.cancel();
    let report = cancelled.await;
    println!("cancelled: {} of {} layers had moved", report.completed, report.requests);

    // The same without futures.
    let batch = engine.allocate_batch(all.len())?.into_id();
    engine.submit_to_batch(batch, &peer, Direction::Read, &all, PATIENCE, None)?;
    let status = loop {
        let status = engine.poll_batch(batch)?;
        // Finished is about the tasks, drained about our memory: only both together give it back to us.
        if status.is_finished() && status.locally_drained {
            break status;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    engine.free_batch(batch)?;
    if status.state != BatchState::Completed {
        return Err(format!("{status:?}").into());
    }
    println!("async_batch: PASSED ({} bytes polled for)", status.bytes);
    Ok(())
}
