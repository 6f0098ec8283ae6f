//! A real source with two devices, and a requester by hand that plans what may not be planned, or goes by one rail where
//! the other is due. No byte changes, nothing is acknowledged, nothing is left.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::Arc,
    time::Duration,
};

use verbs_bootstrap::GidType;
use verbs_transport::{
    fabric::{
        WcStatus,
        bulk::{
            Access as Rights, Arena, BulkOp, BulkPort as _, BulkRegion as _, BulkWr, Local, Remote, Rkey, WindowPolicy,
        },
    },
    sim::{HostConfig, SimConfig, SimFabric, SimRegion, SimWorld},
};

use super::{
    RdmaConfig,
    carry::marker,
    device::Device,
    exchange::{Exchange, Side},
    grant::Form,
    identity::{Digest, Identity, Incarnation},
    link::{Link, LinkNames},
    mailbox::{Broken, WaitError},
    rails::plan::{PLANNED_BYTES, Plan, Planned, PlannedRail},
    wire::{Ask, Body, Frame, GrantTerms, HEAD_BYTES, KeptNames, Offer},
};
use crate::{
    Config, Engine, Permission, Profile, RegisteredMemory, Status,
    control::{Opcode, PLAN_BYTES, REPLY_BYTES, Reply, Request},
    deadline::Deadline,
};

const PART: u64 = 4096;
const WHOLE: u64 = 2 * PART;
const PATIENCE: Duration = Duration::from_millis(400);

struct Rig {
    world: SimWorld,
    source: Engine,
    served: RegisteredMemory,
    devices: Vec<Arc<Device<SimFabric>>>,
}

/// A connection up to the offer.
struct Start {
    stream: TcpStream,
    request: Vec<u8>,
    ask: Vec<u8>,
    identity: Identity,
    offer: Offer,
}

/// One rail of the requester by hand.
struct Rail {
    link: Link<SimFabric>,
    exchange: Exchange,
    staging: SimRegion,
    terms: GrantTerms,
}

/// Up to all grants.
struct Hand {
    stream: TcpStream,
    parent: Exchange,
    rails: Vec<Rail>,
}

impl Rig {
    fn new(windows: WindowPolicy) -> Self {
        let world = SimWorld::new(SimConfig::default());
        let host = |rail: u8, host: u8| {
            Arc::new(world.host([10, 0, rail, host], HostConfig { windows, ..HostConfig::default() }))
        };
        let config = Config { source_timeout: PATIENCE, ..Config::default() };
        let fabrics = vec![host(0, 2), host(1, 2)];
        let source = Engine::with_rdma_devices(config, &RdmaConfig::default(), fabrics).expect("an engine");
        let bytes = vec![7; usize::try_from(WHOLE).expect("small")];
        let served = source.register_memory(bytes.into(), Permission::RemoteReadWrite).expect("room");
        let few = RdmaConfig { max_connections: 8, ..RdmaConfig::default() };
        let devices = (0..2).map(|rail| Device::start(host(rail, 1), &few, rail).expect("a device")).collect();
        Self { world, source, served, devices }
    }

    fn ask(&self, opcode: Opcode, kept: Option<KeptNames>, behind: &[u8]) -> (TcpStream, Vec<u8>, Ask) {
        let mut stream = TcpStream::connect(self.source.endpoint()).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("an option");
        let (epoch, region) = (self.source.epoch(), self.served.id());
        let request =
            Request { opcode, epoch, region, offset: 0, length: WHOLE, profile: Profile::Staged }.encode().to_vec();
        let requester_link = Incarnation::draw().expect("entropy");
        let ask = Ask { requester_epoch: [9; 16], request: 1, requester_link, kept };
        stream.write_all(&[&request[..], &ask.encode(), behind].concat()).expect("it reads");
        (stream, request, ask)
    }

    fn start(&self, opcode: Opcode) -> Start {
        let (mut stream, request, ask) = self.ask(opcode, None, &[]);
        let reply = reply(&mut stream).expect("an offer");
        let mut offer = vec![0; usize::try_from(reply.length).expect("small")];
        stream.read_exact(&mut offer).expect("all of it");
        let offer = Offer::decode(&offer).expect("sound");
        let ask_bytes = ask.encode().to_vec();
        let identity = Identity {
            source_epoch: self.source.epoch().to_bytes(),
            requester_epoch: [9; 16],
            source_link: offer.source_link,
            requester_link: ask.requester_link,
            request: 1,
            digest: Digest::of(&request, &ask_bytes),
            generation: offer.generation,
            ..Identity::default()
        };
        Start { stream, request, ask: ask_bytes, identity, offer }
    }

    /// A sound plan: half and half, each over partners.
    fn plan(&self, offer: &Offer) -> Plan {
        let rail = |at: usize| PlannedRail {
            source_pd: offer.paths[at].pd,
            requester_link: Incarnation::draw().expect("entropy"),
            bytes: at as u64 * PART..(at as u64 + 1) * PART,
            end: self.devices[at].end(),
        };
        Plan { rails: vec![rail(0), rail(1)] }
    }

    fn granted(&self, opcode: Opcode) -> Hand {
        let Start { mut stream, request, ask, identity, offer } = self.start(opcode);
        let plan = self.plan(&offer);
        let plan_bytes = plan.encode(&identity);
        stream.write_all(&plan_bytes).expect("it reads");
        let mut answer = vec![0; PLANNED_BYTES];
        stream.read_exact(&mut answer).expect("an answer");
        let (found, planned) = Planned::decode(&answer).expect("sound");
        assert_eq!(found, identity);
        let digest = Digest::over(&[&request, &ask, &plan_bytes, &answer]);
        let parent = Identity { digest, ..identity };
        let deadline = Deadline::after(Duration::from_secs(10));
        let mut rails = Vec::new();
        for (at, (rail, reserved)) in plan.rails.iter().zip(planned.rails).enumerate() {
            let device = &self.devices[at];
            let (source_pd, requester_link) = (rail.source_pd, rail.requester_link);
            let names =
                LinkNames { source_pd, requester_pd: device.pd, source_link: reserved.source_link, requester_link };
            let agreed = rail.end.agree(&offer.paths[at]).expect("compatible");
            let permit = device.connections.take(1, 0).expect("room");
            let link = Link::new(device, permit, names, agreed).expect("a QP");
            let arena = Arena::new(8192).expect("memory");
            let staging = device.port.register(arena, 0..8192, Rights::DESTINATION).expect("room");
            staging.write(0, &[0xee; 8192]).expect("within");
            let exchange = Exchange::rail(Side::Requester, names.identity(parent, reserved.generation), false);
            rails.push((link, exchange, staging));
        }
        for (link, exchange, _) in &mut rails {
            say(&mut stream, exchange, Body::RequesterQp(link.endpoint()));
        }
        for (at, (link, exchange, _)) in rails.iter_mut().enumerate() {
            let Some(Body::SourceQp(remote)) = hear(&mut stream, exchange) else { panic!("a QP is due") };
            assert!(link.connect(remote, &offer.paths[at], &RdmaConfig::default(), deadline).is_ok());
        }
        for (_, exchange, _) in &mut rails {
            say(&mut stream, exchange, Body::Connected);
        }
        let grant = |(link, mut exchange, staging): (Link<SimFabric>, Exchange, SimRegion)| {
            let Some(Body::Grant(terms)) = hear(&mut stream, &mut exchange) else { panic!("a grant is due") };
            assert_eq!(terms.length, PART);
            Rail { link, exchange, staging, terms }
        };
        let rails = rails.into_iter().map(grant).collect();
        Hand { stream, parent: Exchange::parent(Side::Requester, parent), rails }
    }

    fn is_idle(&self) -> bool {
        let s = self.source.stats();
        let held = (s.grants, s.grant_bytes, s.source_operations, s.rdma_parents);
        held == (0, 0, 0, 0) && (s.rdma_busy, s.rdma_closing, s.rdma_connecting) == (0, 0, 0)
    }

    fn settle(&self) {
        let until = Deadline::after(Duration::from_secs(20));
        while !self.is_idle() {
            assert!(until.remaining().is_some(), "{:?}", self.source.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Nothing was changed, everything is let go, and nothing is left in the devices.
    fn end(self) {
        self.served.update(0, WHOLE, |bytes| assert!(bytes.iter().all(|byte| *byte == 7))).expect("in range");
        self.settle();
        self.devices.iter().for_each(|device| device.stop());
        let Self { world, source, served, devices } = self;
        drop((served, source, devices));
        world.assert_quiet();
    }
}

impl Rail {
    fn post(&self, wr: BulkWr<'_, SimRegion>) -> Result<(), WaitError> {
        self.link.post(wr).expect("room in the queue");
        self.link.mail.wait_sends(0, Deadline::after(Duration::from_secs(30)))
    }

    fn write(&self, terms: &GrantTerms, offset: u64, len: u32) -> Result<(), WaitError> {
        let local = Local { region: &self.staging, offset: 0, len };
        let remote = Remote { addr: terms.address.wrapping_add(offset), rkey: Rkey(terms.key) };
        self.post(BulkWr { id: 0, signaled: true, fence: false, op: BulkOp::Write { local, remote } })
    }

    fn mark(&self) -> Result<(), WaitError> {
        self.post(marker(&self.terms, self.exchange.identity().generation))
    }
}

impl Hand {
    fn write_all(&self) {
        for rail in &self.rails {
            rail.write(&rail.terms, 0, 4096).expect("within the grant");
        }
    }

    fn done(&mut self) {
        for rail in &mut self.rails {
            say(&mut self.stream, &mut rail.exchange, Body::Done);
        }
    }

    fn hear(&mut self) -> Option<Body> {
        hear(&mut self.stream, &mut self.parent)
    }
}

fn reply(stream: &mut TcpStream) -> Option<Reply> {
    let mut bytes = [0; REPLY_BYTES];
    stream.read_exact(&mut bytes).ok()?;
    Some(Reply::decode(&bytes).expect("sound"))
}

fn say(stream: &mut TcpStream, exchange: &mut Exchange, body: Body) {
    let frame = exchange.say(body).expect("its turn").encode();
    stream.write_all(&frame).expect("it reads");
}

/// `None` if the source refuses or closes.
fn hear(stream: &mut TcpStream, exchange: &mut Exchange) -> Option<Body> {
    let mut head = [0; HEAD_BYTES];
    stream.read_exact(&mut head).ok()?;
    let mut bytes = vec![0; Frame::kind_of(&head).ok()?.bytes()];
    bytes[..HEAD_BYTES].copy_from_slice(&head);
    stream.read_exact(&mut bytes[HEAD_BYTES..]).ok()?;
    Some(exchange.hear(&Frame::decode(&bytes).expect("sound")).expect("its turn"))
}

const REFUSED: Result<(), WaitError> = Err(WaitError::Broken(Broken::Send(WcStatus::RemoteAccess)));

fn in_both_forms(scenario: impl Fn(&Rig)) {
    for windows in [WindowPolicy::Never, WindowPolicy::Auto] {
        let rig = Rig::new(windows);
        scenario(&rig);
        rig.end();
    }
}

#[test]
fn plans_that_are_not_for_the_request_reserve_nothing() {
    type Change = fn(&mut Plan, &mut Identity);
    let rig = Rig::new(WindowPolicy::Auto);
    let cases: [(Status, Change); 16] = [
        (Status::ProtocolError, |plan, _| plan.rails.clear()),
        (Status::ProtocolError, |plan, _| plan.rails.truncate(1)),
        (Status::ProtocolError, |plan, _| plan.rails[1].bytes.end -= 1),
        (Status::ProtocolError, |plan, _| plan.rails[1].bytes.end += 1),
        (Status::ProtocolError, |plan, _| plan.rails[1].bytes.start -= 1),
        (Status::ProtocolError, |plan, _| plan.rails[1].bytes.start += 1),
        (Status::ProtocolError, |plan, _| plan.rails[0].bytes = 0..0),
        (Status::ProtocolError, |plan, _| plan.rails.swap(0, 1)),
        (Status::ProtocolError, |plan, _| plan.rails[1].bytes.end = u64::MAX),
        (Status::ProtocolError, |plan, _| {
            (plan.rails[1].source_pd, plan.rails[1].end) = (plan.rails[0].source_pd, plan.rails[0].end);
        }),
        (Status::ProtocolError, |plan, _| plan.rails[1].requester_link = plan.rails[0].requester_link),
        (Status::ProtocolError, |plan, _| plan.rails[1].source_pd.0[0] ^= 1),
        (Status::ProtocolError, |_, id| id.generation += 1),
        (Status::ProtocolError, |_, id| id.digest.0[3] ^= 1),
        (Status::ProtocolError, |_, id| id.source_pd.0[3] ^= 1),
        // The first has all it takes by then, and gives it back.
        (Status::BackendUnavailable, |plan, _| plan.rails[1].end.port.gid_type = GidType::RoceV1),
    ];
    for (at, (status, change)) in cases.into_iter().enumerate() {
        let Start { mut stream, mut identity, offer, .. } = rig.start(Opcode::SlicedRdmaWrite);
        let mut plan = rig.plan(&offer);
        change(&mut plan, &mut identity);
        stream.write_all(&plan.encode(&identity)).expect("it reads");
        assert_eq!(reply(&mut stream).map(|reply| reply.status), Some(status), "case {at}");
        assert_eq!(stream.read(&mut [0]).ok(), Some(0), "case {at}: and it closes");
        rig.settle();
    }
    // Another frame in its place, and one that is never whole.
    let Start { mut stream, identity, .. } = rig.start(Opcode::SlicedRdmaRead);
    stream.write_all(&Frame { identity, body: Body::Connected }.encode()).expect("it reads");
    assert_eq!(reply(&mut stream).map(|reply| reply.status), Some(Status::ProtocolError));
    let Start { mut stream, identity, offer, .. } = rig.start(Opcode::SlicedRdmaRead);
    stream.write_all(&rig.plan(&offer).encode(&identity)[..PLAN_BYTES - 1]).expect("it reads");
    assert_eq!(reply(&mut stream).map(|reply| reply.status), None, "its patience ends");
    rig.end();
}

#[test]
fn pairs_that_nobody_keeps_are_a_cache_miss_and_a_plan_for_them_is_read_first() {
    let rig = Rig::new(WindowPolicy::Auto);
    let offer = rig.start(Opcode::SlicedRdmaRead).offer;
    let plan = rig.plan(&offer);
    let names =
        KeptNames { requester_pd: rig.devices[0].pd, source_pd: offer.paths[0].pd, source_link: offer.source_link };
    for opcode in [Opcode::SlicedRdmaRead, Opcode::SlicedRdmaWrite] {
        // The plan must name what the ask names, and its digest: so it is made first, about the same connection.
        let (epoch, region) = (rig.source.epoch(), rig.served.id());
        let request = Request { opcode, epoch, region, offset: 0, length: WHOLE, profile: Profile::Staged }.encode();
        let requester_link = Incarnation([8; 16]);
        let ask = Ask { requester_epoch: [9; 16], request: 1, requester_link, kept: Some(names) }.encode();
        let identity = Identity {
            source_epoch: epoch.to_bytes(),
            requester_epoch: [9; 16],
            source_link: offer.source_link,
            requester_link,
            request: 1,
            digest: Digest::of(&request, &ask),
            ..Identity::default()
        };
        let mut stream = TcpStream::connect(rig.source.endpoint()).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("an option");
        let all = [&request[..], &ask, &plan.encode(&identity)].concat();
        stream.write_all(&all).expect("it reads");
        assert_eq!(reply(&mut stream).map(|reply| reply.status), Some(Status::CacheMiss));
        // A plan about something else is worse than a miss.
        let (mut stream, ..) = rig.ask(opcode, Some(names), &plan.encode(&identity));
        assert_eq!(reply(&mut stream).map(|reply| reply.status), Some(Status::ProtocolError));
        rig.settle();
    }
    rig.end();
}

#[test]
fn one_missing_receipt_and_nothing_is_committed() {
    in_both_forms(|rig| {
        for silent in [0, 1] {
            let mut hand = rig.granted(Opcode::SlicedRdmaWrite);
            hand.write_all();
            hand.rails[1 - silent].mark().expect("it arrives");
            hand.done();
            assert_eq!(rig.source.stats().rdma_parents, 1, "the whole range is guarded");
            assert_eq!(hand.hear(), None, "no acknowledgement");
            drop(hand);
            rig.settle();
        }
    });
}

#[test]
fn a_marker_of_another_rail_is_no_receipt() {
    in_both_forms(|rig| {
        let mut hand = rig.granted(Opcode::SlicedRdmaWrite);
        hand.write_all();
        let generations = [1, 0].map(|at: usize| hand.rails[at].exchange.identity().generation);
        for (at, generation) in generations.into_iter().enumerate() {
            let other = hand.rails[1 - at].terms;
            // An invalidation of a key that is not bound there takes the source's QP down.
            let _ = hand.rails[at].post(marker(&other, generation));
        }
        hand.done();
        assert_eq!(hand.hear(), None, "no acknowledgement");
    });
}

#[test]
fn a_rail_reaches_its_own_part_and_no_other() {
    in_both_forms(|rig| {
        let hand = rig.granted(Opcode::SlicedRdmaWrite);
        let [first, second] = &hand.rails[..] else { panic!("two rails") };
        assert_eq!(first.write(&first.terms, 1, 4096), REFUSED, "beyond its end");
        assert_eq!(second.write(&first.terms, 0, 1), REFUSED, "by the key of the other");
        drop(hand);
        rig.settle();
    });
}

#[test]
fn frames_of_rails_come_in_the_order_of_the_plan() {
    in_both_forms(|rig| {
        let mut hand = rig.granted(Opcode::SlicedRdmaWrite);
        hand.write_all();
        hand.rails.iter().for_each(|rail| rail.mark().expect("it arrives"));
        hand.rails.reverse();
        hand.done();
        assert_eq!(hand.hear(), None, "the second before the first");
    });
}

/// By the book, so that what is refused above is refused for its reason. What the peer leaves unwritten is nobody else's.
#[test]
fn by_the_book_all_parts_are_committed_at_once() {
    in_both_forms(|rig| {
        let mut hand = rig.granted(Opcode::SlicedRdmaWrite);
        let form = hand.rails[0].terms.form;
        assert!(hand.rails.iter().all(|rail| rail.terms.form == form), "{form:?} or {:?}", Form::Window);
        for rail in &hand.rails {
            rail.write(&rail.terms, 0, 4000).expect("within the grant");
            rail.mark().expect("it arrives");
        }
        hand.done();
        assert_eq!(hand.hear(), Some(Body::Ack));
        let part = [vec![0xee; 4000], vec![0; 96]].concat();
        rig.served.update(0, WHOLE, |bytes| assert_eq!(bytes, [part.clone(), part].concat())).expect("in range");
        assert_eq!(hand.rails[0].write(&hand.rails[0].terms, 0, 1), REFUSED, "a second use");
        rig.served.update(0, WHOLE, |bytes| bytes.fill(7)).expect("in range");
    });
}
