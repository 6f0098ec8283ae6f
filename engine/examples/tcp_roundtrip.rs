//! Two engines in one process: one serves memory, the other writes to it, reads it back and checks.

use std::time::Duration;

use verbs_engine::{Config, Direction, Engine, Permission, TransferRequest};

const LENGTH: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let source = Engine::new(Config::default())?;
    let served = source.register_memory(vec![0; LENGTH].into(), Permission::RemoteReadWrite)?;

    let requester = Engine::new(Config::default())?;
    let sent: Vec<u8> = (0..=250).cycle().take(LENGTH).collect();
    let outgoing = requester.register_memory(sent.clone().into(), Permission::LocalOnly)?;
    let incoming = requester.register_memory(vec![0; LENGTH].into(), Permission::LocalOnly)?;

    // Endpoint and epoch come from the source's owner, out of band; here that is this very function.
    let peer = requester.open_segment(source.endpoint(), source.epoch(), PATIENCE)?;
    let request =
        |local_address| TransferRequest { local_address, remote_address: served.address(), length: LENGTH as u64 };

    let write = [request(outgoing.address())];
    let report = requester.submit_and_wait(&peer, Direction::Write, &write, PATIENCE)?.into_result()?;
    println!("wrote {} bytes over {}", report.completed_bytes, report.transport.expect("bytes have moved"));

    let read = [request(incoming.address())];
    let report = requester.submit_and_wait(&peer, Direction::Read, &read, PATIENCE)?.into_result()?;
    println!("read {} bytes over {}", report.completed_bytes, report.transport.expect("bytes have moved"));

    let mut received = vec![0; LENGTH];
    incoming.read(0, &mut received)?;
    if received != sent {
        return Err("what came back is not what was sent".into());
    }
    println!("tcp_roundtrip: PASSED ({LENGTH} bytes, compared)");
    Ok(())
}
