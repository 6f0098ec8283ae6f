//! Field reports whose hosts no single machine has: GIDs of two families, devices with other READ limits.

use std::sync::Arc;

use verbs_bootstrap::{Endpoint, Gid, RdAtomic, WorkerAddress};
use verbs_tests::{
    lab::{Lab, SimLab, on_sim},
    node::{Node, assert_numbered, next},
};
use verbs_transport::{
    ConnectError, MessageType, RegisterError,
    sim::{Faults, HostConfig, SimFabric},
};

fn host(lab: &SimLab, n: u32, change: impl FnOnce(&mut HostConfig)) -> SimFabric {
    let mut config = HostConfig::default();
    change(&mut config);
    lab.world.host(SimLab::addr(n), config)
}

/// B03 (b): an IPv6 GID on one side, an IPv4 one on the other. Registering refuses and names both; where the address
/// does not tell the GIDs, the bootstrap refuses and names both.
#[test]
fn gids_of_two_families_are_refused_by_name() {
    on_sim(1, Faults::none(), |lab: Arc<SimLab>| async move {
        let v6 = Gid([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
        let a = Node::start(&*lab, 1).await;
        let b = Node::start_with(host(&lab, 2, |config| config.gid = Some(v6)), lab.config(2)).await;
        let names_both = |text: &str| {
            assert!(text.contains("fd00::9") && text.contains("::ffff:10.0.0.1"), "{text}");
        };
        let refused = a.worker.register(&b.worker.address()).expect_err("they cannot meet");
        assert!(matches!(refused, RegisterError::NoEndpoint { .. }), "{refused}");
        names_both(&refused.to_string());
        let told = b.worker.address().endpoint().expect("started");
        let silent = WorkerAddress::encode(&Endpoint { devices: Vec::new(), ..told }).expect("valid");
        a.worker.register(&silent).expect("nothing speaks against it yet");
        let refused = a.worker.ensure_connected(b.id()).await.expect_err("they cannot meet");
        assert!(matches!(refused, ConnectError::Failed(_)), "{refused}");
        names_both(&refused.to_string());
        assert_eq!(b.worker.stats().hellos_refused, 1);
        a.stop().await;
        b.stop().await;
    });
}

/// B18: READ limits of 1, 16 and 255 meet; each side asks for no more than the other answers, and says so.
#[test]
fn the_smaller_read_limit_is_used_and_told() {
    on_sim(1, Faults::none(), |lab: Arc<SimLab>| async move {
        for ours in [1, 16, 255] {
            for theirs in [1, 16, 255] {
                let start = |n, limit| {
                    let both = RdAtomic { initiator: limit, responder: limit.min(200) };
                    Node::start_with(host(&lab, n, |config| config.rd_atomic = both), lab.config(n))
                };
                let (a, mut b) = (start(1, ours).await, start(2, theirs).await);
                a.register(&b);
                a.send_numbered(b.id(), MessageType::Message, 1);
                assert_numbered(&next(&mut b.inbound.message).await, 1);
                let told = |node: &Node<SimFabric>, peer: &Node<SimFabric>| {
                    node.worker.describe(peer.id()).and_then(|told| told.rd_atomic).expect("connected")
                };
                let (mine, yours) = (told(&a, &b), told(&b, &a));
                assert_eq!(
                    mine,
                    RdAtomic { initiator: ours.min(theirs.min(200)), responder: ours.min(200).min(theirs) }
                );
                assert_eq!((mine.initiator, mine.responder), (yours.responder, yours.initiator));
                a.errors.assert_none();
                a.stop().await;
                b.stop().await;
            }
        }
    });
}
