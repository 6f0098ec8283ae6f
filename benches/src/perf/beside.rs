//! What moves beside the messages of `send-lat`, to see how much they mind it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use tokio::task::JoinHandle;
use verbs_rma::{Region, RemoteRange};
use verbs_transport::fabric::bulk::Access;

use super::{args::Beside, bandwidth::mib_per_second, client::Client, failure::Failure};

/// Bulk memory of the server on its way to the client, until it is stopped.
pub(crate) struct Mover {
    /// Messages that came; `None`: it is not messages that move. The handler asks for the next one.
    pub(crate) moved: Option<Arc<AtomicU64>>,
    gets: Option<(JoinHandle<()>, Arc<AtomicU64>, Region)>,
    bytes: usize,
    began: Instant,
}

impl Mover {
    /// Moves bulk memory in that way, if any.
    pub(crate) fn start(
        client: &Client,
        way: Option<Beside>,
        bytes: usize,
        from: Option<RemoteRange>,
    ) -> Result<Self, Failure> {
        let mut mover = Self { moved: None, gets: None, bytes, began: Instant::now() };
        match way {
            None => {}
            Some(Beside::Messages) => mover.moved = Some(Arc::default()),
            Some(Beside::Get) => {
                let from = from.ok_or_else(|| Failure::Protocol("no memory to read".to_owned()))?;
                let into = client.node.map(bytes, Access::DESTINATION)?;
                let ((bulk, _), server) = (client.node.bulk()?, client.server);
                client.node.join(client.node.spawn(bulk.get(server, from, into.id, 0)))??; // connects
                let (count, signal) = (Arc::<AtomicU64>::default(), client.node.signal.clone());
                let done = count.clone();
                let gets = client.node.spawn(async move {
                    loop {
                        match bulk.get(server, from, into.id, 0).await {
                            Ok(()) => done.fetch_add(1, Ordering::Relaxed),
                            Err(error) => return signal.trouble(error.into()),
                        };
                    }
                });
                mover.began = Instant::now();
                mover.gets = Some((gets, count, into));
            }
        }
        Ok(mover)
    }

    /// Ends it; what there is to say about it.
    pub(crate) fn stop(self, client: &Client) -> Result<Option<String>, Failure> {
        let took = self.began.elapsed();
        let rate = |count: u64| mib_per_second(count * self.bytes as u64, took);
        if let Some((gets, count, into)) = self.gets {
            let count = count.load(Ordering::Relaxed);
            gets.abort();
            // An unmap ends with the transfer that is still under way.
            client.node.unmap(into)?;
            return Ok(Some(format!("meanwhile: {count} GETs of {} bytes, {:.2} MiB/s", self.bytes, rate(count))));
        }
        let messages = self.moved.map(|moved| moved.load(Ordering::Relaxed));
        Ok(messages.map(|count| {
            format!(
                "meanwhile: {count} messages of {} bytes on the same queue pair, {:.2} MiB/s",
                self.bytes,
                rate(count)
            )
        }))
    }
}
