//! Ports that differ.

use std::{sync::Arc, time::Duration};

use verbs_bootstrap::Mtu;
use verbs_transport::MessageType;

use crate::{
    lab::Lab,
    node::{Node, next_within, pattern},
};

/// B01 on one host: active MTUs of 4,096 and 1,024; both QPs use the smaller, it is reported, and a MiB goes both ways.
pub async fn the_smaller_mtu_is_used_and_told<L: Lab>(lab: Arc<L>) {
    let mut a = Node::start_with(lab.fabric_mtu(1, Mtu::B4096), lab.config(1)).await;
    let mut b = Node::start_with(lab.fabric_mtu(2, Mtu::B1024), lab.config(2)).await;
    a.register(&b);
    b.register(&a);
    for n in 0..4 {
        let payload = pattern((1 << 20) - n);
        let _ = a.send(b.id(), MessageType::Message, "there", payload.clone());
        let _ = b.send(a.id(), MessageType::Message, "back", payload.clone());
        let long = Duration::from_secs(30);
        assert!(next_within(&mut b.inbound.message, long).await.payload == payload);
        assert!(next_within(&mut a.inbound.message, long).await.payload == payload);
    }
    for (node, peer) in [(&a, &b), (&b, &a)] {
        let told = node.worker.describe(peer.id()).expect("known");
        assert_eq!(told.mtu_bytes, Some(1024), "{told:?}");
        assert_eq!(node.worker.stats().epochs_begun, 1, "no reconnects");
        node.errors.assert_none();
    }
    a.stop().await;
    b.stop().await;
}
