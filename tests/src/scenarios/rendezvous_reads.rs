//! RT-10 to RT-12, RT-18, RT-21, RT-22, RT-24 and RT-26: the two ways of a payload's bytes, and what may go wrong on them.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use verbs_rma::{
    AskError, Handle, PathReason, PullError, RefusalCode, RemoteRange, RendezvousConfig, TransferError,
    proto::wire::{
        Answer, BACKEND_VERBS, Call, Capability, Chunks, Descriptor, Grant, Indirect, Key, Refused, Reply, Request,
    },
    rendezvous::StageOptions,
};
use verbs_transport::{
    FEATURE_RMA, Lane, MessageType,
    fabric::bulk::{Access, BulkFabric, OwnedBytes, Rkey},
};

use crate::{
    bare::{Answers, Bare},
    lab::Lab,
    node::pattern,
    party::{Party, next_message, slot_pattern},
};

/// For one transfer, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;

fn config() -> RendezvousConfig {
    // Arenas that are quick to touch under emulation.
    RendezvousConfig { arena_bytes: 4 << 20, ..RendezvousConfig::default() }
}

const PINNED: StageOptions = StageOptions { refcount: 1, ttl: None, pinned: true, only_for: None };

async fn pair<L: Lab<F: BulkFabric>>(lab: &L, config: RendezvousConfig) -> (Party<L::F>, Party<L::F>) {
    let (owner, consumer) = (Party::start(lab, 1, config.clone()).await, Party::start(lab, 2, config).await);
    consumer.register(&owner);
    (owner, consumer)
}

async fn stop<F: BulkFabric>(owner: Party<F>, consumer: Party<F>) {
    owner.assert_empty(PATIENCE).await;
    consumer.assert_empty(PATIENCE).await;
    owner.errors.assert_none();
    consumer.errors.assert_none();
    consumer.stop().await;
    owner.stop().await;
}

/// RT-11.
pub async fn rt_11_one_slot_two_ways<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, reader) = pair(&*lab, config()).await;
    let without = Party::start(&*lab, 3, RendezvousConfig { reads: false, ..config() }).await;
    without.register(&owner);
    let handle = owner.rendezvous.stage_pinned(slot_pattern(1, 3 * MIB + 5)).await.expect("there is room");
    for consumer in [&reader, &without] {
        let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("it is there");
        assert!(bytes == slot_pattern(1, 3 * MIB + 5), "other bytes");
        consumer.rendezvous.detach(lease);
    }
    let granted = owner.rendezvous.stats().granted;
    assert_eq!((granted.rdma, granted.by(PathReason::NoCapability), granted.chunked_total()), (1, 1, 1));
    assert_eq!(reader.rendezvous.stats().pulled.rdma, 1);
    assert_eq!(without.rendezvous.stats().pulled.by(PathReason::NoCapability), 1);
    owner.rendezvous.withdraw(handle);
    let stats = owner.until("rights taken back", PATIENCE, |stats| stats.book.rights == 0).await;
    assert_eq!((stats.rights_made, stats.rights_revoked), (1, 1));
    without.stop().await;
    stop(owner, reader).await;
}

/// RT-12.
pub async fn rt_12_a_full_pool_goes_by_chunks_until_there_is_room<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab, RendezvousConfig { source_max_bytes: 4 << 20, ..config() }).await;
    let mut staged = Vec::new();
    for n in 0..6 {
        staged.push(owner.rendezvous.stage_pinned(slot_pattern(n, MIB)).await.expect("a full pool is no error"));
    }
    assert_eq!((owner.rendezvous.stats().staged_pinned, owner.rendezvous.stats().staged_memory), (4, 2));
    for (n, handle) in staged.iter().enumerate() {
        let (bytes, lease) = consumer.rendezvous.get(*handle).await.expect("it is there");
        assert!(bytes == slot_pattern(n as u64, MIB), "other bytes in {n}");
        consumer.rendezvous.release(lease);
    }
    let paths = consumer.rendezvous.stats().pulled;
    assert_eq!((paths.rdma, paths.by(PathReason::PoolFull)), (4, 2));
    owner.assert_empty(PATIENCE).await;
    let handle = owner.rendezvous.stage_pinned(slot_pattern(9, 4 * MIB)).await.expect("there is room again");
    let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("it is there");
    assert!(bytes == slot_pattern(9, 4 * MIB), "other bytes");
    consumer.rendezvous.release(lease);
    assert_eq!(consumer.rendezvous.stats().pulled.rdma, 5);
    stop(owner, consumer).await;
}

/// the budget of READ leases; and memory that cannot be registered is the same to a consumer.
pub async fn beyond_the_budget_of_read_leases_there_are_chunks<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab, RendezvousConfig { read_leases: 1, ..config() }).await;
    let handle = owner.rendezvous.stage_pinned(pattern(MIB)).await.expect("there is room");
    let (_, first) = consumer.rendezvous.get(handle).await.expect("it is there");
    let (bytes, second) = consumer.rendezvous.get(handle).await.expect("it is there");
    assert!(bytes == pattern(MIB));
    let paths = consumer.rendezvous.stats().pulled;
    assert_eq!((paths.rdma, paths.by(PathReason::LeaseBudget)), (1, 1));
    consumer.rendezvous.detach(first);
    consumer.rendezvous.detach(second);
    owner.until("rights taken back", PATIENCE, |stats| stats.book.rights == 0).await;
    let (_, third) = consumer.rendezvous.get(handle).await.expect("it is there");
    assert_eq!(consumer.rendezvous.stats().pulled.rdma, 2);
    consumer.rendezvous.release(third);
    stop(owner, consumer).await;
}

/// RT-10 by READ: once there is an arena, messages go that way, too.
pub async fn messages_go_by_read_once_there_is_an_arena<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (mut receiver, sender) = pair(&*lab, config()).await;
    for n in 0..6_u64 {
        let _ = sender.send(receiver.id(), MessageType::Message, n.to_be_bytes().to_vec(), slot_pattern(n, MIB));
        let message = next_message(&mut receiver.inbound.message, PATIENCE).await;
        assert!(message.header == n.to_be_bytes()[..] && message.payload == slot_pattern(n, MIB), "message {n}");
        sender.until("arena", PATIENCE, |stats| stats.source_arenas.arenas > 0).await;
    }
    let paths = receiver.rendezvous.stats().pulled;
    assert_eq!((paths.rdma, paths.by(PathReason::PoolFull)), (5, 1));
    stop(receiver, sender).await;
}

/// R-14 and RT-18: a pull that is dropped in the middle gives its lease back after its READs, and leaves nothing.
pub async fn rt_18_dropped_pulls_leave_nothing<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab, config()).await;
    let handle = owner.rendezvous.stage_pinned(slot_pattern(1, 4 * MIB)).await.expect("there is room");
    let chunked = owner.rendezvous.stage(slot_pattern(2, 4 * MIB)).expect("there is room");
    for round in 0..u64::from(lab.rounds(200, 10)) {
        let which = if round % 2 == 0 { handle } else { chunked };
        let pull = consumer.rendezvous.get(which);
        let after = Duration::from_micros(500 * (round % 40));
        if let Ok(pulled) = tokio::time::timeout(after, pull).await {
            let (bytes, lease) = pulled.expect("nothing is wrong with it");
            assert!(bytes == slot_pattern(1 + round % 2, 4 * MIB), "other bytes in round {round}");
            consumer.rendezvous.detach(lease);
        }
    }
    let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("nothing is wrong with it");
    assert!(bytes == slot_pattern(1, 4 * MIB));
    consumer.rendezvous.release(lease);
    owner.rendezvous.withdraw(chunked);
    // Also when acquire was answered after its future was dropped: the lease is given back at once, not reaped.
    owner.assert_empty(PATIENCE).await;
    assert_eq!(owner.rendezvous.stats().leases_reaped, 0);
    stop(owner, consumer).await;
}

/// RT-21, and R-66: a consumer that is late and READs all the same gets an error, never what lies there now; and the next
/// pull works, over the same message connection.
pub async fn rt_21_a_late_read_gets_an_error_and_no_foreign_byte<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let times = RendezvousConfig {
        lease: Duration::from_secs(1),
        lease_grace: Duration::from_millis(200),
        lease_margin: Duration::from_millis(100),
        source_max_bytes: 4 << 20,
        ..config()
    };
    let owner = Party::start(&*lab, 1, times).await;
    let mut late = Bare::start(&*lab, 2, |_| Vec::new()).await;
    let id = late.worker.register(&owner.rendezvous.worker().address()).expect("good");
    // The arena has room for one of this size.
    let handle = owner.rendezvous.stage_pinned(slot_pattern(1, 4 * MIB)).await.expect("there is room");
    let capability = Some(Capability { backends: 1 << BACKEND_VERBS, room_bytes: 1 << 30 });
    late.ask(id, Call::Acquire { handle, chunk_bytes: 512 << 10, capability });
    let Answer::Acquired { grant: Grant::Read(descriptor), .. } = late.reply().await else { panic!("no descriptor") };
    let Key::Verbs { addr, rkey } = descriptor.key else { panic!("{descriptor:?}") };
    let from = RemoteRange { addr, rkey: Rkey(rkey), len: 4 << 20 };
    let memory = late.bulk.map_all(OwnedBytes::new(vec![0; 4 * MIB]), Access::DESTINATION).await.expect("it is mapped");
    let read = |late: &Bare<L::F>| {
        let mut bytes = vec![0; 4 * MIB];
        late.bulk.read_region(memory.id, 0, &mut bytes).expect("within");
        bytes
    };
    // In time it reads.
    late.bulk.get(id, from, memory.id, 0).await.expect("the lease lives");
    assert!(read(&late) == slot_pattern(1, 4 * MIB));

    owner.until("reaped lease", PATIENCE, |stats| stats.leases_reaped == 1 && stats.book.rights == 0).await;
    owner.rendezvous.withdraw(handle);
    owner.assert_empty(PATIENCE).await;
    let next = owner.rendezvous.stage_pinned(slot_pattern(2, 4 * MIB)).await.expect("there is room again");
    late.bulk.write_region(memory.id, 0, &vec![0; 4 * MIB]).expect("within");
    let failed = late.bulk.get(id, from, memory.id, 0).await.expect_err("the right is gone");
    assert!(matches!(failed, TransferError::Failed { .. }), "{failed}");
    assert!(read(&late) == vec![0; 4 * MIB], "not a byte of the next payload");

    late.ask(id, Call::Acquire { handle: next, chunk_bytes: 512 << 10, capability });
    let Answer::Acquired { grant: Grant::Read(descriptor), .. } = late.reply().await else { panic!("no descriptor") };
    let Key::Verbs { addr, rkey } = descriptor.key else { panic!("{descriptor:?}") };
    let from = RemoteRange { addr, rkey: Rkey(rkey), len: 4 << 20 };
    late.bulk.get(id, from, memory.id, 0).await.expect("a new lease, and a new QP");
    assert!(read(&late) == slot_pattern(2, 4 * MIB));
    assert_eq!(late.worker.stats().epochs_begun, 1, "messages noticed nothing");
    owner.rendezvous.withdraw(next);
    late.bulk.unmap(memory.id).await.expect("it is mapped");
    late.stop().await;
    owner.assert_empty(PATIENCE).await;
    owner.stop().await;
}

/// Progress is told on the way, by READ too, and the pieces make the whole.
pub async fn progress_is_told_in_pieces<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab, RendezvousConfig { arena_bytes: 32 << 20, ..config() }).await;
    let len = 20 * MIB + 3;
    let handle = owner.rendezvous.stage_pinned(slot_pattern(1, len)).await.expect("there is room");
    let (mut bytes, mut steps) = (vec![1, 2, 3], Vec::new());
    let pull = consumer.rendezvous.pull(handle).and_release().on_progress(|done, total| steps.push((done, total)));
    let pulled = pull.into(&mut bytes).await.expect("it is there");
    assert!(pulled.path.is_ok() && bytes == slot_pattern(1, len), "other bytes");
    let total = len as u64;
    assert_eq!(steps, [8 << 20, 16 << 20, total].map(|done| (done, total)));
    stop(owner, consumer).await;
}

/// RT-22: whoever releases last races with whoever acquires. Bytes are right or the handle is gone; nothing is freed under
/// a lease, and nothing is left.
pub async fn rt_22_release_races_with_acquire<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    // Two slices: each is used again at once.
    let (owner, first) =
        pair(&*lab, RendezvousConfig { source_max_bytes: 128 << 10, arena_bytes: 64 << 10, ..config() }).await;
    let second = Party::start(&*lab, 3, config()).await;
    second.register(&owner);
    let read = Arc::new(AtomicUsize::new(0));
    for n in 0..u64::from(lab.rounds(150, 15)) {
        let handle = owner.rendezvous.stage_pinned(slot_pattern(n, 60_000)).await.expect("there is room or not");
        let mut tasks = tokio::task::JoinSet::new();
        for consumer in [&first, &second] {
            for _ in 0..3 {
                let (rendezvous, read) = (consumer.rendezvous.clone(), read.clone());
                tasks.spawn(async move {
                    match rendezvous.get(handle).await {
                        Ok((bytes, lease)) => {
                            assert!(bytes == slot_pattern(n, 60_000), "foreign bytes in round {n}");
                            read.fetch_add(1, Ordering::Relaxed);
                            rendezvous.release(lease);
                        }
                        Err(PullError::Ask(AskError::Refused {
                            code: RefusalCode::UnknownHandle | RefusalCode::Expired,
                            ..
                        })) => {}
                        Err(error) => panic!("{error}"),
                    }
                });
            }
        }
        while let Some(done) = tasks.join_next().await {
            done.expect("no panic");
        }
    }
    assert!(read.load(Ordering::Relaxed) >= lab.rounds(150, 15) as usize, "each payload was read");
    second.assert_empty(PATIENCE).await;
    second.stop().await;
    stop(owner, first).await;
}

/// RT-24: the owner goes in the middle of a pull.
pub async fn rt_24_the_owner_shuts_down_during_a_get<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (owner, consumer) = pair(&*lab, RendezvousConfig { arena_bytes: 16 << 20, ..config() }).await;
    let handle = owner.rendezvous.stage_pinned(slot_pattern(1, 16 * MIB)).await.expect("there is room");
    let rendezvous = consumer.rendezvous.clone();
    let pulling = tokio::spawn(async move {
        let mut bytes = Vec::new();
        rendezvous.pull(handle).into(&mut bytes).await.map(|_| bytes)
    });
    owner.until("right", PATIENCE, |stats| stats.book.rights == 1).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    owner.stop().await;
    match tokio::time::timeout(PATIENCE, pulling).await.expect("it ends").expect("no panic") {
        // Where bytes take no time it was done before.
        Ok(bytes) => assert!(bytes == slot_pattern(1, 16 * MIB), "other bytes"),
        Err(PullError::Ask(error)) => eprintln!("the consumer hears: {error}"),
        Err(other) => panic!("{other}"),
    }
    consumer.assert_empty(PATIENCE).await;
    consumer.stop().await;
}

/// What the owner of the next scenario answers to acquire.
fn acquired(request: Request, grant: Grant) -> Answers {
    let answer = Answer::Acquired { lease: 7, lease_ms: 30_000, grant };
    vec![(Reply { correlation: request.correlation, answer }.encode(), Bytes::new())]
}

/// Spoils one byte of a good reply, or cuts it.
type Spoil = fn(&mut Vec<u8>);

/// Where the descriptor lies in a good reply: behind 10 bytes of head, lease 8, duration 4, kind 1.
const AT: usize = 23;

/// RT-15's damaged descriptors, and every other answer that is none: a typed error, nothing posted, nobody dies.
pub async fn damaged_answers_are_errors_and_nothing_is_posted<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let good = Descriptor { total_bytes: 4096, key: Key::Verbs { addr: 0x7f00_0000_0000, rkey: 1 } };
    let spoils: [(&str, Spoil); 9] = [
        ("truncated", |bytes| bytes.truncate(AT + 9)),
        ("one byte short", |bytes| bytes.truncate(bytes.len() - 1)),
        ("one byte long", |bytes| bytes.push(0)),
        ("other version", |bytes| bytes[AT] = 9),
        ("long key", |bytes| bytes[AT + 10] = 200),
        ("short key", |bytes| bytes[AT + 10] = 4),
        ("wraps around", |bytes| bytes[AT + 11..AT + 19].fill(0xff)),
        ("above the limit", |bytes| bytes[AT + 2] = 1),
        ("no such grant", |bytes| bytes[AT - 1] = 3),
    ];
    let consumer =
        Party::start(&*lab, 1, RendezvousConfig { request_deadline: Duration::from_secs(2), ..config() }).await;
    let turn = Arc::new(AtomicUsize::new(0));
    let owner = Bare::start(&*lab, 2, {
        let turn = turn.clone();
        move |request| match request.call {
            Call::Acquire { .. } => {
                let mut answers = acquired(request, Grant::Read(good.clone()));
                spoils[turn.load(Ordering::Relaxed)].1(&mut answers[0].0);
                answers
            }
            _ => Vec::new(),
        }
    })
    .await;
    consumer.rendezvous.register(&owner.worker.address()).expect("good");
    let handle = Handle { worker: owner.worker.identity().incarnation.0, slot: 1 };
    for (n, (name, _)) in spoils.iter().enumerate() {
        turn.store(n, Ordering::Relaxed);
        let error = consumer.rendezvous.get(handle).await.expect_err(name);
        let typed = match *name {
            "above the limit" => matches!(error, PullError::TooLarge { max: 0x4000_0000, .. }),
            _ => matches!(error, PullError::Ask(AskError::BadAnswer { .. })),
        };
        assert!(typed, "{name}: {error:?}");
    }
    assert!(!owner.bulk.is_connected(consumer.id()), "no bulk connection was even made");
    consumer.assert_empty(PATIENCE).await;
    consumer.stop().await;
    owner.stop().await;
}

/// Good form, bad content: a stale key, a backend of the future, chunks that are too long, too short, or not those that
/// were asked for. The right bytes or an error; messages go on.
pub async fn lying_owners_do_no_harm<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    const LEN: usize = 2000;
    let consumer = Party::start(&*lab, 1, config()).await;
    let turn = Arc::new(AtomicUsize::new(0));
    let owner = Bare::start(&*lab, 2, {
        let turn = turn.clone();
        move |request| {
            let turn = turn.load(Ordering::Relaxed);
            let chunks =
                Chunks { transfer: 7, total_bytes: LEN as u64, chunk_bytes: 1024, reason: PathReason::NoCapability };
            match request.call {
                Call::Acquire { capability: Some(_), .. } if turn == 0 => {
                    let key = Key::Verbs { addr: 0x7f00_0000_0000, rkey: 0x1234_5678 };
                    acquired(request, Grant::Read(Descriptor { total_bytes: LEN as u64, key }))
                }
                Call::Acquire { capability: Some(_), .. } if turn == 1 => {
                    let key = Key::Unknown { backend: 9, bytes: vec![1, 2, 3] };
                    acquired(request, Grant::Read(Descriptor { total_bytes: LEN as u64, key }))
                }
                Call::Acquire { .. } if turn == 2 => {
                    acquired(request, Grant::Chunks(Chunks { chunk_bytes: u32::MAX, ..chunks }))
                }
                Call::Acquire { .. } => acquired(request, Grant::Chunks(chunks)),
                Call::Pull { index, .. } => {
                    let from = usize::try_from(index).expect("small") * 1024;
                    let mut payload = slot_pattern(1, LEN).slice(from..LEN.min(from + 1024));
                    let mut index = index;
                    match turn {
                        3 => payload = payload.slice(1..),
                        4 => payload = [&payload[..], b"x"].concat().into(),
                        5 => index += 1,
                        _ => {}
                    }
                    let reply = Reply { correlation: request.correlation, answer: Answer::Chunk { index } };
                    vec![(reply.encode(), payload)]
                }
                call if call.is_answered() => {
                    let refused = Refused { code: RefusalCode::UnknownHandle, detail: 0 };
                    let reply = Reply { correlation: request.correlation, answer: Answer::Refused(refused) };
                    vec![(reply.encode(), Bytes::new())]
                }
                _ => Vec::new(),
            }
        }
    })
    .await;
    let id = consumer.rendezvous.register(&owner.worker.address()).expect("good");
    let handle = Handle { worker: owner.worker.identity().incarnation.0, slot: 1 };
    for (n, reason) in [(0, PathReason::GetFailed), (1, PathReason::NoCapability)] {
        turn.store(n, Ordering::Relaxed);
        let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("by chunks, then");
        assert!(bytes == slot_pattern(1, LEN), "other bytes");
        consumer.rendezvous.detach(lease);
        assert_eq!(consumer.rendezvous.stats().pulled.by(reason), 1);
    }
    assert_eq!(consumer.rendezvous.stats().reads_failed, 1);
    for n in 2..6 {
        turn.store(n, Ordering::Relaxed);
        let error = consumer.rendezvous.get(handle).await.expect_err("it lies");
        assert!(matches!(error, PullError::Ask(AskError::BadAnswer { .. })), "{n}: {error:?}");
    }
    // Answers to what was never asked.
    for correlation in [0, 1, u64::MAX] {
        let reply = Reply { correlation, answer: Answer::Chunk { index: 0 } }.encode().into();
        let lost = consumer.errors.clone();
        drop(owner.worker.send_on(Lane::Service, consumer.id(), reply, pattern(9), MessageType::Response, lost));
    }
    consumer.until("late answers", PATIENCE, |stats| stats.answers_late >= 3).await;
    assert_eq!(consumer.rendezvous.worker().stats().epochs_begun, 1, "messages noticed nothing");
    assert_eq!(
        consumer.rendezvous.worker().peer_facts(id).and_then(|facts| facts.run).map(|run| run.features & FEATURE_RMA),
        Some(FEATURE_RMA)
    );
    consumer.assert_empty(PATIENCE).await;
    consumer.stop().await;
    owner.stop().await;
}

/// Messages whose payload is nowhere: not delivered, counted, and those behind them are.
pub async fn indirect_messages_that_lead_nowhere<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let mut receiver =
        Party::start(&*lab, 1, RendezvousConfig { staged_ttl_after_end: Duration::from_secs(1), ..config() }).await;
    let sender = Bare::start(&*lab, 2, |request| {
        let refused = Refused { code: RefusalCode::UnknownHandle, detail: 0 };
        let reply = Reply { correlation: request.correlation, answer: Answer::Refused(refused) };
        if request.call.is_answered() { vec![(reply.encode(), Bytes::new())] } else { Vec::new() }
    })
    .await;
    let id = sender.worker.register(&receiver.rendezvous.worker().address()).expect("good");
    let mine = Handle { worker: sender.worker.identity().incarnation.0, slot: 1 };
    let send = |lane, header: &'static str, payload: Bytes| {
        let lost = receiver.errors.clone();
        drop(sender.worker.send_on(lane, id, header.into(), payload, MessageType::Message, lost));
    };
    send(Lane::Application, "first", Bytes::new());
    send(Lane::Indirect, "cut", Bytes::from_static(&[1, 2, 3]));
    send(Lane::Indirect, "empty", Bytes::new());
    send(Lane::Indirect, "unknown", Indirect { handle: mine, total_bytes: 1 << 20 }.encode().into());
    send(
        Lane::Indirect,
        "stranger",
        Indirect { handle: Handle { worker: 99, slot: 1 }, total_bytes: 5 }.encode().into(),
    );
    send(Lane::Application, "last", Bytes::new());
    for header in ["first", "last"] {
        let message = next_message(&mut receiver.inbound.message, PATIENCE).await;
        assert_eq!(message.header, header);
    }
    assert_eq!(receiver.rendezvous.stats().messages_lost, 4);
    receiver.errors.assert_none();
    receiver.assert_empty(PATIENCE).await;
    receiver.stop().await;
    sender.stop().await;
}

/// What the soak knows of a payload.
struct Known {
    n: u64,
    len: usize,
    refs: u32,
}

/// RT-26: everything at once, with checksums, against a plain count.
pub async fn rt_26_soak<L: Lab<F: BulkFabric>>(lab: Arc<L>) {
    let (mut owner, first) = pair(&*lab, RendezvousConfig { source_max_bytes: 8 << 20, ..config() }).await;
    let second = Party::start(&*lab, 3, RendezvousConfig { reads: false, ..config() }).await;
    second.register(&owner);
    let mut rng = fastrand::Rng::with_seed(26);
    let mut known: HashMap<Handle, Known> = HashMap::new();
    let (mut sent, mut came) = (0_u64, 0_u64);
    for step in 0..u64::from(lab.rounds(1500, 120)) {
        let consumer = if rng.bool() { &first } else { &second };
        let some = if known.is_empty() { None } else { known.keys().nth(rng.usize(..known.len())).copied() };
        match (rng.u32(..10), some) {
            (0..3, _) | (_, None) if known.len() < 24 => {
                let len = [rng.usize(..100), rng.usize(..20_000), rng.usize(..1_500_000)][rng.usize(..3)];
                let options = StageOptions { refcount: rng.u32(1..4), pinned: rng.bool(), ..PINNED };
                let handle =
                    owner.rendezvous.stage_with(slot_pattern(step, len), options).await.expect("there is room");
                known.insert(handle, Known { n: step, len, refs: options.refcount });
            }
            (0..6, Some(handle)) => {
                let (bytes, lease) = consumer.rendezvous.get(handle).await.expect("it has a reference");
                let entry = known.get_mut(&handle).expect("known");
                assert!(bytes == slot_pattern(entry.n, entry.len), "foreign bytes at step {step}");
                if rng.bool() {
                    consumer.rendezvous.detach(lease);
                } else {
                    consumer.rendezvous.release(lease);
                    entry.refs -= 1;
                    if entry.refs == 0 {
                        known.remove(&handle);
                    }
                }
            }
            (6, Some(handle)) => {
                let refs = consumer.rendezvous.ref_handle(handle).await.expect("it has a reference");
                known.get_mut(&handle).expect("known").refs += 1;
                // Releases are not answered: those of others may still be under way.
                assert!(refs >= known[&handle].refs, "at step {step}");
            }
            (7, Some(handle)) => {
                let told = consumer.rendezvous.metadata(handle).await.expect("it has a reference");
                assert_eq!(told.total_bytes, known[&handle].len as u64);
            }
            (8, Some(handle)) => {
                owner.rendezvous.withdraw(handle);
                known.remove(&handle);
            }
            _ => {
                let len = rng.usize(..800_000);
                let _ =
                    first.send(owner.id(), MessageType::Message, sent.to_be_bytes().to_vec(), slot_pattern(sent, len));
                sent += 1;
            }
        }
        if step % 25 == 24 {
            while came < sent {
                let message = next_message(&mut owner.inbound.message, PATIENCE).await;
                assert_eq!(message.header, came.to_be_bytes()[..], "order");
                assert!(message.payload == slot_pattern(came, message.payload.len()), "bytes of message {came}");
                came += 1;
            }
            // A quiet point: the gauges are the model's.
            let stats = owner.until("quiet", PATIENCE, |stats| stats.book.leases == 0 && stats.book.rights == 0).await;
            assert_eq!((stats.book.slots, stats.book.quarantined_slots), (known.len(), 0), "at step {step}");
            assert_eq!(stats.book.slot_bytes, known.values().map(|known| known.len as u64).sum::<u64>());
            for (handle, entry) in &known {
                assert_eq!(first.rendezvous.metadata(*handle).await.expect("known").refcount, entry.refs);
            }
        }
    }
    while came < sent {
        assert_eq!(next_message(&mut owner.inbound.message, PATIENCE).await.header, came.to_be_bytes()[..]);
        came += 1;
    }
    for handle in known.keys() {
        owner.rendezvous.withdraw(*handle);
    }
    let paths = first.rendezvous.stats().pulled;
    assert!(paths.rdma > 0 && paths.by(PathReason::NotPinned) > 0, "both ways were gone: {paths:?}");
    second.stop().await;
    stop(owner, first).await;
}
