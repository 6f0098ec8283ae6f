//! A producer writes blocks into a consumer's memory and tells it which: the message follows the data, and is never
//! there before it.

use std::time::Duration;

use verbs_engine::{Config, Direction, Engine, Notification, NotificationStatus, Permission, TransferRequest};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 32;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let consumer = Engine::new(Config::default())?;
    let ring = consumer.register_memory(vec![0; usize::try_from(BLOCK * BLOCKS)?].into(), Permission::RemoteWrite)?;
    let (endpoint, epoch, address) = (consumer.endpoint(), consumer.epoch(), ring.address());

    let producer = std::thread::spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let engine = Engine::new(Config::default())?;
        let block = engine.register_memory(vec![0; usize::try_from(BLOCK)?].into(), Permission::LocalOnly)?;
        let peer = engine.open_segment(endpoint, epoch, PATIENCE)?;
        for number in 0..BLOCKS {
            block.update(0, BLOCK, |bytes| bytes.fill(u8::try_from(number + 1).unwrap_or(0)))?;
            let request = TransferRequest {
                local_address: block.address(),
                remote_address: address + number * BLOCK,
                length: BLOCK,
            };
            let message = Notification::new("block", number.to_string());
            let report = engine.submit_and_notify(&peer, Direction::Write, &[request], &message, PATIENCE)?;
            // Two results: the data, and whether the message is in the inbox.
            let report = report.into_result()?;
            match report.notification {
                NotificationStatus::Delivered => {}
                other => return Err(format!("block {number} is there, but nobody was told: {other:?}").into()),
            }
        }
        // In one's own words, and with no data.
        engine.send_notification(&peer, &Notification::new("end", "ガンバレ"), PATIENCE)?;
        Ok(())
    });

    let mut seen = 0;
    'receive: loop {
        let batch = consumer.wait_for_notifications(PATIENCE);
        if batch.is_empty() {
            return Err(format!("no message for {PATIENCE:?}; the producer's end: {:?}", producer.join()).into());
        }
        for Notification { name, message } in batch {
            if name == "end" {
                break 'receive;
            }
            let number: u64 = message.parse()?;
            let expected = u8::try_from(number + 1)?;
            let sound = ring.update(number * BLOCK, BLOCK, |bytes| bytes.iter().all(|byte| *byte == expected))?;
            if !sound {
                return Err(format!("block {number} was announced before it was there").into());
            }
            seen += 1;
        }
    }
    producer.join().map_err(|_| "the producer panicked")?.map_err(|error| error.to_string())?;
    if seen != BLOCKS {
        return Err(format!("{seen} of {BLOCKS} blocks were announced").into());
    }
    println!("notifications: PASSED ({seen} blocks, each there before its message)");
    Ok(())
}
