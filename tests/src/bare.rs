//! One worker with bulk memory and a service made by hand: for peers that do what an honest one does not.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use tokio::sync::mpsc;
use verbs_bootstrap::InstanceId;
use verbs_rma::{
    Bulk, BulkConfig,
    proto::wire::{Answer, Call, Reply, Request},
};
use verbs_transport::{
    Borrowed, Inbound, Lane, MessageType, SendError, ServiceHandler, WeakWorker, Worker,
    fabric::{Fabric, bulk::BulkFabric},
};

use crate::lab::Lab;

/// What it answers: headers and payloads of replies.
pub type Answers = Vec<(Vec<u8>, Bytes)>;

/// See the module.
pub struct Bare<F: BulkFabric> {
    /// The worker.
    pub worker: Worker<F>,
    /// Its bulk memory.
    pub bulk: Bulk<F>,
    /// Replies that come to it.
    pub replies: mpsc::UnboundedReceiver<Vec<u8>>,
    _inbound: Inbound,
}

struct Service<F: Fabric, A> {
    worker: OnceLock<WeakWorker<F>>,
    answer: A,
    replies: mpsc::UnboundedSender<Vec<u8>>,
}

impl<F: Fabric, A: Fn(Request) -> Answers + Send + Sync + 'static> ServiceHandler for Service<F, A> {
    fn on_frame(&self, frame: Borrowed<'_>) {
        if frame.kind == MessageType::Response {
            let _ = self.replies.send(frame.header.to_vec());
            return;
        }
        let Some(worker) = self.worker.get().and_then(WeakWorker::upgrade) else { return };
        let request = Request::decode(frame.header).expect("honest consumers ask well");
        for (header, payload) in (self.answer)(request) {
            let lost = Arc::new(|_: Bytes, _: Bytes, _: SendError| {});
            let sent = worker.send_on(Lane::Service, frame.peer, header.into(), payload, MessageType::Response, lost);
            drop(sent);
        }
    }
}

impl<F: BulkFabric> Bare<F> {
    /// On host `n`, with these answers to requests.
    ///
    /// # Panics
    ///
    /// When it does not start.
    pub async fn start<L: Lab<F = F>>(
        lab: &L,
        n: u32,
        answer: impl Fn(Request) -> Answers + Send + Sync + 'static,
    ) -> Self {
        let worker = Worker::new(lab.config(n), lab.fabric(n)).expect("a valid configuration");
        let (sender, replies) = mpsc::unbounded_channel();
        let service = Arc::new(Service { worker: OnceLock::new(), answer, replies: sender });
        let _ = service.worker.set(worker.downgrade());
        worker.attach_service(service).expect("not started yet");
        let (bulk, _) = Bulk::attach(&worker, BulkConfig::default()).expect("the device has bulk memory");
        let inbound = worker.start().await.expect("it starts");
        Self { worker, bulk, replies, _inbound: inbound }
    }

    /// Sends a request by hand.
    pub fn ask(&self, peer: InstanceId, call: Call) {
        let header = Request { correlation: 1, call }.encode().into();
        let lost = Arc::new(|_: Bytes, _: Bytes, error: SendError| eprintln!("not asked: {error}"));
        drop(self.worker.send_on(Lane::Service, peer, header, Bytes::new(), MessageType::Message, lost));
    }

    /// The next reply that comes.
    ///
    /// # Panics
    ///
    /// When none comes in time.
    pub async fn reply(&mut self) -> Answer {
        let reply = tokio::time::timeout(std::time::Duration::from_secs(20), self.replies.recv()).await;
        Reply::decode(&reply.expect("in time").expect("the worker lives")).expect("a reply").answer
    }

    /// Ends it.
    pub async fn stop(self) {
        self.bulk.shutdown().await;
        self.worker.shutdown().await;
    }
}
