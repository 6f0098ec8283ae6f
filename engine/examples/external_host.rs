//! Memory that exists already: an arena of the application's own, of which single blocks are registered, all at once,
//! and moved by absolute addresses. This is how a cache keeps its allocator and still serves its peers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use verbs_engine::{Config, Direction, Engine, HostMemory, Permission, TransferRequest};

const BLOCK: u64 = 64 << 10;
const BLOCKS: u64 = 16;
const PATIENCE: Duration = Duration::from_secs(10);

/// What an application might have: bytes at a fixed address, freed when the arena goes.
struct Arena {
    bytes: Vec<u8>,
    freed: Arc<AtomicBool>,
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.freed.store(true, Ordering::SeqCst);
    }
}

#[allow(unsafe_code)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let freed = Arc::new(AtomicBool::new(false));
    let mut arena = Arena { bytes: vec![0; usize::try_from(BLOCK * BLOCKS)?], freed: Arc::clone(&freed) };
    let (start, length) = (arena.bytes.as_mut_ptr(), arena.bytes.len());
    // SAFETY: `arena` owns `length` initialised bytes from `start`, a vector that never grows and so stays where it is
    // until it is dropped, and is handed over as their owner. Nobody accesses them from here on except through `memory`.
    let memory = Arc::new(unsafe { HostMemory::from_raw_parts(start, length, arena) }?);

    let source = Engine::new(Config::default())?;
    // Every second block, in one step: all of them or none.
    let entries: Vec<_> = (0..BLOCKS).step_by(2).map(|block| (Arc::clone(&memory), block * BLOCK, BLOCK)).collect();
    let blocks = source.register_host_memory_batch(&entries, Permission::RemoteReadWrite)?;
    for (number, block) in (0_u8..).zip(&blocks) {
        block.update(0, BLOCK, |bytes| bytes.fill(number))?;
    }

    let requester = Engine::new(Config::default())?;
    let local = requester.register_memory(vec![0xff; length].into(), Permission::LocalOnly)?;
    let peer = requester.open_segment(source.endpoint(), source.epoch(), PATIENCE)?;
    // Addresses of the source's, as its cache would publish them; the engine finds the registered range of each.
    let requests: Vec<_> = (0..)
        .zip(&blocks)
        .map(|(at, block)| TransferRequest {
            local_address: local.address() + at * BLOCK,
            remote_address: block.address(),
            length: BLOCK,
        })
        .collect();
    let report = requester.submit_and_wait(&peer, Direction::Read, &requests, PATIENCE)?.into_result()?;
    println!("read {} blocks, {} bytes", report.completed, report.completed_bytes);
    for (number, at) in (0_u8..).zip(0..blocks.len() as u64) {
        let sound = local.update(at * BLOCK, BLOCK, |bytes| bytes.iter().all(|byte| *byte == number))?;
        if !sound {
            return Err(format!("block {at} is not what the source has").into());
        }
    }

    for block in &blocks {
        source.unregister_memory(block)?;
    }
    // A handler may still be about to let go of the last block, although the peer has its bytes.
    source.close_source(PATIENCE)?;
    drop((memory, entries));
    if freed.load(Ordering::SeqCst) {
        return Err("the arena went although handles hold it".into());
    }
    drop(blocks);
    if !freed.load(Ordering::SeqCst) {
        return Err("the arena stayed although nobody holds it".into());
    }
    println!("external_host: PASSED (the arena was let go with its last handle)");
    Ok(())
}
