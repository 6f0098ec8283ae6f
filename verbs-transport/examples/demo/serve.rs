//! The second process: checks what comes and answers.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::timeout;
use verbs_transport::{Inbound, MessageType, Worker, WorkerAddress, fabric::Fabric as _};

use crate::{
    Fabric,
    problem::{Problem, Trouble},
    report::SideCounts,
    rnr,
    talk::{Checker, Line, Op, inverted, next, pattern},
};

/// Payload bytes of the small messages.
pub(crate) const SMALL_BYTES: usize = 64;

/// Answers one first process until it says good-bye; gives the number of messages that came. `first_within`: how long
/// to wait for it to begin, `None` is for ever.
pub(crate) async fn serve(
    worker: &Worker<Fabric>,
    inbound: &mut Inbound,
    first_within: Option<Duration>,
) -> Result<u64, Problem> {
    let trouble = Arc::new(Trouble::default());
    let rnr_before = rnr_count(worker);
    let begin = inbound.message.recv();
    let begun = match first_within {
        None => begin.await,
        Some(after) => {
            let silence = |_| Problem::Silence { after, waiting_for: "the first message".to_owned() };
            timeout(after, begin).await.map_err(silence)?
        }
    };
    let first = begun.ok_or_else(|| Problem::Protocol("the worker stopped".to_owned()))?;
    let mut checker = Checker::default();
    if checker.check(&first)?.op != Op::Introduce {
        return Err(Problem::Protocol("the first message was no introduction".to_owned()));
    }
    let peer = worker.register(&WorkerAddress::from_bytes(first.payload))?;
    let mut answers = Line::new(worker, peer, MessageType::Response, &trouble);
    answers.send(Op::Introduce, 0, Bytes::new()).await?;

    let mut items_due = 0;
    loop {
        let frame = next(&mut inbound.message, &trouble, "the first process's next message").await?;
        if frame.peer != peer {
            return Err(Problem::Protocol(format!("{} spoke while {peer} was served", frame.peer)));
        }
        let header = checker.check(&frame)?;
        match header.op {
            Op::Echo => answers.send(Op::Echo, header.seq, inverted(&frame.payload)).await?,
            Op::Flood => {
                items_due = header.arg;
                let mut items = Line::new(worker, peer, MessageType::Message, &trouble);
                let (count, trouble) = (header.arg, trouble.clone());
                tokio::spawn(async move { flood(&mut items, count, &trouble).await });
            }
            Op::Item => {
                if header.arg == items_due {
                    answers.send(Op::Tally, header.arg, Bytes::new()).await?;
                }
            }
            Op::Counts => {
                let counts = SideCounts::of(worker, rnr_before);
                let json = serde_json::to_vec(&counts).expect("plain numbers");
                answers.send(Op::Counts, 0, json.into()).await?;
            }
            Op::Bye => return Ok(checker.taken()),
            Op::Introduce | Op::Tally => return Err(Problem::Protocol(format!("{:?} out of place", header.op))),
        }
    }
}

/// Sends items 1 to `count`; the argument of each is its number.
pub(crate) async fn flood(line: &mut Line, count: u64, trouble: &Trouble) {
    for item in 1..=count {
        if let Err(problem) = line.send(Op::Item, item, pattern(SMALL_BYTES, item)).await {
            return trouble.report(problem);
        }
    }
}

/// RNR errors of the worker's port so far.
pub(crate) fn rnr_count(worker: &Worker<Fabric>) -> Option<u64> {
    let fabric = worker.fabric();
    rnr::count(fabric.device_name(), fabric.port().port)
}
