//! MT-1 to MT-16, MT-21, MT-26, MT-28 of the messaging contract, and what belongs to them.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use verbs_transport::{MessageType, RegisterError, SendError, SendOutcome, Transport, Worker};

use crate::{
    lab::Lab,
    node::{Node, assert_numbered, next, next_within, pattern},
};

/// A and B, started; A has registered B.
async fn pair<L: Lab>(lab: &L) -> (Node<L::F>, Node<L::F>) {
    let (a, b) = (Node::start(lab, 1).await, Node::start(lab, 2).await);
    a.register(&b);
    (a, b)
}

async fn stop<L: Lab>(a: Node<L::F>, b: Node<L::F>) {
    a.stop().await;
    b.stop().await;
}

/// MT-1.
pub async fn mt_01_single_round_trip<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    a.send_numbered(b.id(), MessageType::Message, 1);
    let frame = next(&mut b.inbound.message).await;
    assert_numbered(&frame, 1);
    assert_eq!((frame.peer, frame.kind), (a.id(), MessageType::Message));
    a.errors.assert_none();
    stop::<L>(a, b).await;
}

/// MT-2.
pub async fn mt_02_bidirectional<L: Lab>(lab: Arc<L>) {
    let (mut a, mut b) = pair(&*lab).await;
    b.register(&a);
    a.send_numbered(b.id(), MessageType::Message, 1);
    b.send_numbered(a.id(), MessageType::Message, 2);
    assert_numbered(&next(&mut b.inbound.message).await, 1);
    assert_numbered(&next(&mut a.inbound.message).await, 2);
    a.errors.assert_none();
    b.errors.assert_none();
    stop::<L>(a, b).await;
}

/// MT-3.
pub async fn mt_03_ten_on_one_connection<L: Lab>(lab: Arc<L>) {
    in_order(&*lab, 10).await;
}

/// MT-15.
pub async fn mt_15_hundred_messages<L: Lab>(lab: Arc<L>) {
    in_order(&*lab, 100).await;
}

async fn in_order<L: Lab>(lab: &L, count: u32) {
    let (a, mut b) = pair(lab).await;
    for n in 0..count {
        a.send_numbered(b.id(), MessageType::Message, n);
    }
    for n in 0..count {
        assert_numbered(&next(&mut b.inbound.message).await, n);
    }
    assert_eq!(a.worker.stats().epochs_begun, 1);
    a.errors.assert_none();
    stop::<L>(a, b).await;
}

/// MT-4.
pub async fn mt_04_response_stream<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    a.send_numbered(b.id(), MessageType::Response, 4);
    assert_numbered(&next(&mut b.inbound.response).await, 4);
    stop::<L>(a, b).await;
}

/// MT-5.
pub async fn mt_05_event_stream<L: Lab>(lab: Arc<L>) {
    event(&*lab, MessageType::Event).await;
}

/// MT-6.
pub async fn mt_06_ack_goes_to_the_event_stream<L: Lab>(lab: Arc<L>) {
    event(&*lab, MessageType::Ack).await;
}

async fn event<L: Lab>(lab: &L, kind: MessageType) {
    let (a, mut b) = pair(lab).await;
    a.send_numbered(b.id(), kind, 5);
    let frame = next(&mut b.inbound.event).await;
    assert_numbered(&frame, 5);
    assert_eq!(frame.kind, kind);
    stop::<L>(a, b).await;
}

/// MT-7. Also `ShuttingDown`, which goes to the shutdown stream (M-12).
pub async fn mt_07_mixed_types<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    a.send_numbered(b.id(), MessageType::Message, 1);
    a.send_numbered(b.id(), MessageType::Response, 2);
    a.send_numbered(b.id(), MessageType::Event, 3);
    a.send_numbered(b.id(), MessageType::ShuttingDown, 4);
    assert_numbered(&next(&mut b.inbound.message).await, 1);
    assert_numbered(&next(&mut b.inbound.response).await, 2);
    assert_numbered(&next(&mut b.inbound.event).await, 3);
    assert_numbered(&next(&mut b.inbound.shutdown).await, 4);
    for stream in [&mut b.inbound.message, &mut b.inbound.response, &mut b.inbound.event, &mut b.inbound.shutdown] {
        assert!(stream.try_recv().is_none(), "each frame goes to one stream only");
    }
    stop::<L>(a, b).await;
}

/// MT-8.
pub async fn mt_08_large_payload<L: Lab>(lab: Arc<L>) {
    one_of(&*lab, "large-payload", 900 << 10).await;
}

/// MT-16.
pub async fn mt_16_half_a_megabyte<L: Lab>(lab: Arc<L>) {
    one_of(&*lab, "zero-copy", 512 << 10).await;
}

async fn one_of<L: Lab>(lab: &L, header: &'static str, len: usize) {
    let (a, mut b) = pair(lab).await;
    let _ = a.send(b.id(), MessageType::Message, header, pattern(len));
    let frame = next_within(&mut b.inbound.message, Duration::from_secs(20)).await;
    assert_eq!(frame.header, header);
    assert!(frame.payload == pattern(len), "the payload's bytes differ");
    a.errors.assert_none();
    stop::<L>(a, b).await;
}

/// MT-9.
pub async fn mt_09_empty_header_and_payload<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    let _ = a.send(b.id(), MessageType::Message, "", "");
    let frame = next(&mut b.inbound.message).await;
    assert_eq!((frame.header, frame.payload), (Bytes::new(), Bytes::new()));
    stop::<L>(a, b).await;
}

/// MT-10.
pub async fn mt_10_mesh_of_three<L: Lab>(lab: Arc<L>) {
    let mut nodes = Vec::new();
    for n in 1..=3 {
        nodes.push(Node::start(&*lab, n).await);
    }
    for a in &nodes {
        for b in &nodes {
            if a.id() != b.id() {
                a.register(b);
                let _ = a.send(b.id(), MessageType::Message, format!("from-{}", a.id()), "mesh");
            }
        }
    }
    let ids: Vec<_> = nodes.iter().map(Node::id).collect();
    for node in &mut nodes {
        let mut from = [next(&mut node.inbound.message).await, next(&mut node.inbound.message).await];
        from.sort_by_key(|frame| frame.peer);
        let others: Vec<_> = ids.iter().filter(|id| **id != node.worker.instance()).collect();
        assert_eq!(from.iter().map(|frame| &frame.peer).collect::<Vec<_>>(), others);
        assert!(from.iter().all(|frame| frame.header == format!("from-{}", frame.peer).as_bytes()));
    }
    for node in &mut nodes {
        assert!(node.inbound.message.try_recv().is_none());
        node.errors.assert_none();
    }
    for node in nodes {
        node.stop().await;
    }
}

/// MT-11.
pub async fn mt_11_concurrent_senders<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    let mut senders = Vec::new();
    for n in 0..10 {
        let (worker, to, errors) = (a.worker.clone(), b.id(), a.errors.clone());
        senders.push(tokio::spawn(async move {
            let (header, payload) = (format!("header-{n}"), format!("payload-{n}"));
            let _ = worker.send(to, header.into(), payload.into(), MessageType::Message, errors);
        }));
    }
    let mut seen = Vec::new();
    for _ in 0..10 {
        seen.push(next(&mut b.inbound.message).await.header);
    }
    seen.sort();
    let mut all: Vec<Bytes> = (0..10).map(|n| format!("header-{n}").into()).collect();
    all.sort();
    assert_eq!(seen, all);
    for sender in senders {
        sender.await.expect("senders do not panic");
    }
    a.errors.assert_none();
    stop::<L>(a, b).await;
}

/// MT-12.
pub async fn mt_12_unregistered_peer<L: Lab>(lab: Arc<L>) {
    let (a, b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
    assert!(matches!(a.send(b.id(), MessageType::Message, "h", "p"), SendOutcome::Admitted));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let errors = a.errors.all();
    let [(header, payload, error)] = &errors[..] else { panic!("one error, not {errors:?}") };
    assert_eq!((&header[..], &payload[..]), (&b"h"[..], &b"p"[..]));
    assert!(error.to_string().to_lowercase().contains("peer not registered"), "{error}");
    stop::<L>(a, b).await;
}

/// MT-13.
pub async fn mt_13_reuse_of_one_connection<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    for n in 0..2 {
        a.send_numbered(b.id(), MessageType::Message, n);
        assert_numbered(&next(&mut b.inbound.message).await, n);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    a.errors.assert_none();
    assert_eq!((a.worker.stats().epochs_begun, b.worker.stats().epochs_begun), (1, 1));
    stop::<L>(a, b).await;
}

/// MT-14.
pub async fn mt_14_graceful_shutdown<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    a.send_numbered(b.id(), MessageType::Message, 1);
    assert_numbered(&next(&mut b.inbound.message).await, 1);
    a.worker.shutdown().await;
    b.worker.shutdown().await;
    assert!(b.inbound.message.recv().await.is_none() || b.inbound.message.try_recv().is_none());
    for node in [&a, &b] {
        let stats = node.worker.stats();
        assert_eq!((stats.qps, stats.connections, stats.receives_promised), (0, 0, 0), "{stats:?}");
        assert_eq!(stats.send_slabs_free, crate::lab::SMALL_SLABS.send_slabs as usize, "{stats:?}");
    }
    a.errors.assert_none();
}

/// MT-21.
pub async fn mt_21_order_under_pressure<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    for n in 0..1100 {
        let _ = a.send(b.id(), MessageType::Message, format!("seq-{n:05}"), "p");
    }
    assert!(a.worker.stats().pended > 0, "the channel is smaller than the burst");
    for n in 0..1100 {
        let frame = next_within(&mut b.inbound.message, Duration::from_secs(30)).await;
        assert_eq!(frame.header, format!("seq-{n:05}").as_bytes());
    }
    a.errors.assert_none();
    stop::<L>(a, b).await;
}

/// MT-26: before the connection, when only our own limit is known, and after, when the peer's smaller one is.
pub async fn mt_26_oversize_by_one_byte<L: Lab>(lab: Arc<L>) {
    let max = 64 << 10;
    let mut config = lab.config(2);
    config.eager_max_bytes = max;
    let max = max as usize;
    let (a, mut b) = (Node::start(&*lab, 1).await, Node::start_with(lab.fabric(2), config).await);
    a.register(&b);
    assert_eq!(a.worker.max_message_size(b.id()), None);
    // Queued before the limit is known: reported when it is.
    let _ = a.send(b.id(), MessageType::Message, "early", pattern(max));
    let _ = a.send(b.id(), MessageType::Message, "head", pattern(max - 4));
    let frame = next_within(&mut b.inbound.message, Duration::from_secs(20)).await;
    assert_eq!((&frame.header[..], frame.payload.len()), (&b"head"[..], max - 4));
    assert_eq!(a.worker.max_message_size(b.id()), Some(max));
    let before = a.worker.stats();
    assert!(matches!(a.send(b.id(), MessageType::Message, "over!", pattern(max - 4)), SendOutcome::Admitted));
    let errors = a.errors.all();
    assert_eq!(errors.len(), 2, "reported before send returned: {errors:?}");
    for ((header, payload, error), name) in errors.iter().zip(["early", "over!"]) {
        assert_eq!(header, name);
        assert_eq!(payload.len() + header.len(), if name == "early" { max + 5 } else { max + 1 });
        assert!(matches!(error, SendError::TooLarge { max: limit, .. } if *limit == max), "{error}");
    }
    assert_eq!(a.worker.stats().links.sends_copied, before.links.sends_copied, "nothing was put on the wire");
    let _ = a.send(b.id(), MessageType::Message, "", pattern(max));
    assert_eq!(next_within(&mut b.inbound.message, Duration::from_secs(20)).await.payload.len(), max);
    stop::<L>(a, b).await;
}

/// MT-28.
pub async fn mt_28_two_hundred_kibibytes_in_order<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    for n in 0..200 {
        let _ = a.send(b.id(), MessageType::Message, format!("{n}"), pattern(1024));
    }
    for n in 0..200 {
        let frame = next(&mut b.inbound.message).await;
        assert_eq!(frame.header, format!("{n}").as_bytes());
        assert!(frame.payload == pattern(1024));
    }
    a.errors.assert_none();
    stop::<L>(a, b).await;
}

/// MT-30's sizes: 0, 1, inline and slab borders, both sides of each, with the header on either side of a border too.
/// B17: what is above the granted inline size takes the copy path.
pub async fn sizes_around_every_border<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    a.worker.ensure_connected(b.id()).await.expect("connected");
    let limits = a.worker.describe(b.id()).and_then(|told| told.limits).expect("limits are known");
    let inline = limits.inline_bytes as usize - 8;
    let slab = limits.send_bytes as usize - 8;
    let mut sizes = vec![0, 1];
    for border in [inline, slab, 2 * slab, 3 * slab] {
        sizes.extend([border - 1, border, border + 1]);
    }
    let mut cases = Vec::new();
    for size in sizes {
        cases.extend([(0, size), (size, 0), (size / 2, size - size / 2), (size.min(1), size - size.min(1))]);
    }
    for &(header, payload) in &cases {
        let _ = a.send(b.id(), MessageType::Message, pattern(header), pattern(payload));
    }
    for &(header, payload) in &cases {
        let frame = next(&mut b.inbound.message).await;
        assert!(frame.header == pattern(header) && frame.payload == pattern(payload), "{header} + {payload} bytes");
    }
    let links = a.worker.stats().links;
    assert!(links.sends_inline > 0 && links.sends_copied > 0 && links.fragments > 0, "{links:?}");
    a.errors.assert_none();
    stop::<L>(a, b).await;
}

/// M-13.
pub async fn send_before_start_is_reported<L: Lab>(lab: Arc<L>) {
    let b = Node::start(&*lab, 2).await;
    let a = Worker::new(lab.config(1), lab.fabric(1)).expect("valid");
    assert!(matches!(b.worker.register(&a.address()), Err(RegisterError::NoEndpoint { .. })), "no entry before start");
    a.register(&b.worker.address()).expect("registering needs no start");
    let errors: Arc<crate::node::Errors> = Arc::default();
    let outcome = a.send(b.id(), "h".into(), "p".into(), MessageType::Message, errors.clone());
    assert!(matches!(outcome, SendOutcome::Admitted));
    let all = errors.all();
    assert!(matches!(&all[..], [(_, _, error)] if error.to_string().contains("not started")), "{all:?}");
    a.shutdown().await;
    b.stop().await;
}

/// M-82.
pub async fn send_after_shutdown_is_reported<L: Lab>(lab: Arc<L>) {
    let (a, mut b) = pair(&*lab).await;
    a.send_numbered(b.id(), MessageType::Message, 1);
    assert_numbered(&next(&mut b.inbound.message).await, 1);
    a.worker.shutdown().await;
    a.send_numbered(b.id(), MessageType::Message, 2);
    let errors = a.errors.all();
    assert!(matches!(&errors[..], [(_, _, SendError::ShuttingDown)]), "{errors:?}");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(b.inbound.message.try_recv().is_none());
    stop::<L>(a, b).await;
}

/// DESIGN section 4: `describe` tells device, port and GID and why, MTU, inline, window.
pub async fn describe_tells_the_path<L: Lab>(lab: Arc<L>) {
    let (a, b) = pair(&*lab).await;
    assert!(a.worker.describe(b.id()).is_some_and(|told| told.registered && !told.proven && told.qpn.is_none()));
    assert!(b.worker.describe(a.id()).is_none(), "nobody registered A");
    a.worker.ensure_connected(b.id()).await.expect("connected");
    let told = a.worker.describe(b.id()).expect("a known peer");
    assert!(told.proven && told.qpn.is_some() && !told.path.is_empty(), "{told:?}");
    assert_eq!(told.mtu_bytes, Some(4096));
    assert!(told.inline_granted_bytes.is_some_and(|bytes| bytes >= 60), "{told:?}");
    assert_eq!(told.limits.map(|limits| (limits.tx_window, limits.rx_window)), Some((64, 64)));
    assert_eq!(told.max_message_bytes, Some(16 << 20));
    assert!(b.worker.describe(a.id()).is_some_and(|told| !told.registered), "known by its hello");
    stop::<L>(a, b).await;
}

/// M-14: not a map, no entry, cut short, another version; and this worker's own address.
pub async fn bad_addresses_are_typed_errors<L: Lab>(lab: Arc<L>) {
    use verbs_bootstrap::WorkerAddress;
    let (a, b) = pair(&*lab).await;
    let good = b.worker.address().as_bytes().clone();
    let reject = |bytes: Bytes| a.worker.register(&WorkerAddress::from_bytes(bytes)).expect_err("a bad address");
    assert!(matches!(reject(Bytes::new()), RegisterError::NoEndpoint { .. }));
    assert!(matches!(reject(Bytes::from_static(b"not a map")), RegisterError::NoEndpoint { .. }));
    assert!(matches!(reject(Bytes::from_static(b"\x81\xa3tcp\xc4\x01x")), RegisterError::NoEndpoint { .. }));
    for cut in 0..good.len() {
        let error = reject(good.slice(..cut));
        assert!(!error.to_string().is_empty());
    }
    let mut other_version = good.to_vec();
    // fixmap(1), fixstr(7) "ibverbs", bin8 marker and length, then the entry's version.
    other_version[1 + 8 + 2] = 99;
    let error = reject(other_version.into());
    assert!(matches!(&error, RegisterError::InvalidEndpoint { .. }) && error.to_string().contains("99"), "{error}");
    let own = a.worker.register(&a.worker.address());
    assert!(matches!(own, Err(RegisterError::Myself { .. })), "{own:?}");
    stop::<L>(a, b).await;
}

/// M-81.
pub async fn shutdown_is_idempotent_and_may_precede_start<L: Lab>(lab: Arc<L>) {
    let early = Worker::new(lab.config(3), lab.fabric(3)).expect("valid");
    early.shutdown().await;
    assert!(early.start().await.is_err());
    let (a, b) = pair(&*lab).await;
    a.worker.ensure_connected(b.id()).await.expect("connected");
    tokio::join!(a.worker.shutdown(), a.worker.shutdown());
    a.worker.shutdown().await;
    assert!(a.worker.ensure_connected(b.id()).await.is_err());
    stop::<L>(a, b).await;
}

/// M-10: the calls are object-safe, so that an application can hold several transports side by side.
pub async fn workers_behind_one_trait_object<L: Lab>(lab: Arc<L>) {
    let worker = |n| -> Arc<dyn Transport> { Arc::new(Worker::new(lab.config(n), lab.fabric(n)).expect("valid")) };
    let transports = [worker(1), worker(2)];
    let mut inbound = Vec::new();
    for transport in &transports {
        assert_eq!(transport.key(), "ibverbs");
        inbound.push(transport.start().await.expect("started"));
    }
    let [a, b] = &transports;
    a.register(&b.address()).expect("a good address");
    a.ensure_connected(b.instance()).await.expect("connected");
    let errors: Arc<crate::node::Errors> = Arc::default();
    let _ = a.send(b.instance(), "h".into(), "p".into(), MessageType::Message, errors.clone());
    assert_eq!(next(&mut inbound[1].message).await.payload, "p");
    assert_eq!(a.max_message_size(b.instance()), Some(16 << 20));
    assert!(a.describe(b.instance()).is_some_and(|told| told.proven));
    for transport in &transports {
        transport.shutdown().await;
        assert_eq!(transport.stats().qps, 0);
    }
    errors.assert_none();
}
