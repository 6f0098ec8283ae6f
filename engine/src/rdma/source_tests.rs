//! A real source, and a requester by hand that does what it may not: outside the grant, twice, late, over another QP,
//! with a wrong marker or none. The device refuses, or the source does; no byte changes, nothing is acknowledged.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

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
    device::Device,
    exchange::{Exchange, Side},
    grant::{Form, marker_of},
    identity::{Digest, Identity, Incarnation},
    link::{Link, LinkNames},
    mailbox::{Broken, WaitError},
    wire::{Ask, Body, Frame, GrantTerms, HEAD_BYTES, Offer},
};
use crate::{
    AccessError, Config, Engine, Permission, Profile, RegisteredMemory, ServeDirect,
    control::{Opcode, REPLY_BYTES, Reply, Request},
    deadline::Deadline,
};

const BYTES: u64 = 4096;
const PATIENCE: Duration = Duration::from_millis(300);

struct Rig {
    world: SimWorld,
    source: Engine,
    served: RegisteredMemory,
    device: Arc<Device<SimFabric>>,
    windows: WindowPolicy,
    /// Of what is asked for.
    profile: Profile,
}

/// One connection of the requester by hand.
struct Hand {
    stream: TcpStream,
    exchange: Exchange,
    link: Link<SimFabric>,
    staging: SimRegion,
}

impl Rig {
    fn new(windows: WindowPolicy) -> Self {
        let world = SimWorld::new(SimConfig::default());
        let host = |n: u8| Arc::new(world.host([10, 0, 0, n], HostConfig { windows, ..HostConfig::default() }));
        let config = Config { source_timeout: PATIENCE, serve_direct: ServeDirect::All, ..Config::default() };
        let source = Engine::with_rdma(config, &RdmaConfig::default(), host(2)).expect("an engine");
        let bytes = vec![7; usize::try_from(3 * BYTES).expect("small")];
        let served = source.register_memory(bytes.into(), Permission::RemoteReadWrite).expect("room");
        let device =
            Device::start(host(1), &RdmaConfig { max_connections: 8, ..RdmaConfig::default() }, 0).expect("a device");
        Self { world, source, served, device, windows, profile: Profile::Staged }
    }

    /// Up to the offer and the choice, by the book; up to the grant with [`Hand::grant`].
    fn connect(&self, opcode: Opcode) -> Hand {
        let mut stream = TcpStream::connect(self.source.endpoint()).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("an option");
        let (epoch, region) = (self.source.epoch(), self.served.id());
        let profile = self.profile;
        let request = Request { opcode, epoch, region, offset: BYTES, length: BYTES, profile }.encode();
        let requester_link = Incarnation::draw().expect("entropy");
        let ask = Ask { requester_epoch: [9; 16], request: 1, requester_link, kept: None }.encode();
        stream.write_all(&[&request[..], &ask].concat()).expect("it reads");
        let mut reply = [0; REPLY_BYTES];
        stream.read_exact(&mut reply).expect("an offer");
        let mut offer = vec![0; usize::try_from(Reply::decode(&reply).expect("sound").length).expect("small")];
        stream.read_exact(&mut offer).expect("all of it");
        let offer = Offer::decode(&offer).expect("sound");
        let (own, peer) = (self.device.end(), offer.paths[0]);
        let identity = Identity {
            source_epoch: epoch.to_bytes(),
            requester_epoch: [9; 16],
            source_pd: peer.pd,
            requester_pd: own.pd,
            source_link: offer.source_link,
            requester_link,
            request: 1,
            digest: Digest::of(&request, &ask),
            generation: offer.generation,
        };
        let agreed = own.agree(&peer).expect("compatible");
        let names =
            LinkNames { source_pd: peer.pd, requester_pd: own.pd, source_link: offer.source_link, requester_link };
        let permit = self.device.connections.take(1, 0).expect("room");
        let link = Link::new(&self.device, permit, names, agreed).expect("a QP");
        let arena = Arena::new(usize::try_from(2 * BYTES).expect("small")).expect("memory");
        let whole = 0..usize::try_from(2 * BYTES).expect("small");
        let staging = self.device.port.register(arena, whole, Rights::DESTINATION).expect("room");
        staging.write(0, &[0xee; 8192]).expect("within");
        let mut hand = Hand { stream, exchange: Exchange::new(Side::Requester, identity), link, staging };
        hand.say(Body::Select { path: 0, end: own });
        assert_eq!(hand.hear(), Some(Body::Admit));
        hand.say(Body::RequesterQp(hand.link.endpoint()));
        let Some(Body::SourceQp(remote)) = hand.hear() else { panic!("a QP is due") };
        let deadline = Deadline::after(Duration::from_secs(10));
        assert!(hand.link.connect(remote, &peer, &RdmaConfig::default(), deadline).is_ok());
        hand
    }

    fn granted(&self, opcode: Opcode) -> (Hand, GrantTerms) {
        let mut hand = self.connect(opcode);
        let terms = hand.grant();
        let form = if self.windows == WindowPolicy::Never { Form::Registration } else { Form::Window };
        assert_eq!((terms.form, terms.length), (form, BYTES));
        (hand, terms)
    }

    /// Nothing was changed, everything is let go, and nothing is left in the devices.
    fn end(self, hands: Vec<Hand>) {
        self.served.update(0, 3 * BYTES, |bytes| assert!(bytes.iter().all(|byte| *byte == 7))).expect("in range");
        drop(hands);
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let s = self.source.stats();
            if (s.grants, s.source_operations, s.rdma_busy, s.rdma_closing, s.rdma_connecting) == (0, 0, 0, 0, 0) {
                break;
            }
            assert!(Instant::now() < until, "{s:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.device.stop();
        let Self { world, source, served, device, .. } = self;
        drop((served, source, device));
        world.assert_quiet();
    }
}

impl Hand {
    fn say(&mut self, body: Body) {
        let frame = self.exchange.say(body).expect("its turn").encode();
        self.stream.write_all(&frame).expect("it reads");
    }

    /// `None` if the source refuses or closes.
    fn hear(&mut self) -> Option<Body> {
        let mut head = [0; HEAD_BYTES];
        self.stream.read_exact(&mut head).ok()?;
        let mut bytes = vec![0; Frame::kind_of(&head).ok()?.bytes()];
        bytes[..HEAD_BYTES].copy_from_slice(&head);
        self.stream.read_exact(&mut bytes[HEAD_BYTES..]).ok()?;
        Some(self.exchange.hear(&Frame::decode(&bytes).expect("sound")).expect("its turn"))
    }

    fn grant(&mut self) -> GrantTerms {
        self.say(Body::Connected);
        let Some(Body::Grant(terms)) = self.hear() else { panic!("a grant is due") };
        terms
    }

    fn post(&self, op: BulkOp<'_, SimRegion>) -> Result<(), WaitError> {
        self.link.post(BulkWr { id: 0, signaled: true, fence: true, op }).expect("room in the queue");
        self.link.mail.wait_sends(0, Deadline::after(Duration::from_secs(30)))
    }

    fn local(&self, len: u64) -> Local<'_, SimRegion> {
        Local { region: &self.staging, offset: 0, len: u32::try_from(len).expect("small") }
    }

    fn read(&self, terms: &GrantTerms, offset: u64, len: u64) -> Result<(), WaitError> {
        let remote = Remote { addr: terms.address + offset, rkey: Rkey(terms.key) };
        self.post(BulkOp::Read { local: self.local(len), remote })
    }

    fn write(&self, terms: &GrantTerms, offset: u64, len: u64) -> Result<(), WaitError> {
        let remote = Remote { addr: terms.address + offset, rkey: Rkey(terms.key) };
        self.post(BulkOp::Write { local: self.local(len), remote })
    }

    fn mark(&self, terms: &GrantTerms) -> Result<(), WaitError> {
        self.post(match terms.form {
            Form::Registration => BulkOp::SendImm { imm: marker_of(self.exchange.identity().generation) },
            Form::Window => BulkOp::SendInvalidate { rkey: Rkey(terms.key) },
        })
    }

    fn staged(&self) -> Vec<u8> {
        let mut bytes = vec![0; 8192];
        self.staging.read(0, &mut bytes).expect("within");
        bytes
    }
}

const REFUSED: Result<(), WaitError> = Err(WaitError::Broken(Broken::Send(WcStatus::RemoteAccess)));

fn in_both_forms(scenario: impl Fn(Rig)) {
    for windows in [WindowPolicy::Never, WindowPolicy::Auto] {
        scenario(Rig::new(windows));
    }
}

#[test]
fn outside_the_granted_bytes_the_device_refuses() {
    in_both_forms(|rig| {
        let mut hands = Vec::new();
        for (offset, len) in [(BYTES, 1), (0, BYTES + 1), (BYTES - 1, 2), (u64::MAX, 1)] {
            let (mut hand, mut terms) = rig.granted(Opcode::RdmaRead);
            terms.address = terms.address.wrapping_add(offset);
            assert_eq!(hand.read(&terms, 0, len), REFUSED, "{len} bytes at {offset}");
            assert!(hand.staged().iter().all(|byte| *byte == 0xee), "not a byte came");
            assert_eq!(hand.hear(), None, "and the operation is at its end");
            hands.push(hand);
            let (hand, mut terms) = rig.granted(Opcode::RdmaWrite);
            terms.address = terms.address.wrapping_add(offset);
            assert_eq!(hand.write(&terms, 0, len), REFUSED, "{len} bytes at {offset}");
            hands.push(hand);
            std::thread::sleep(PATIENCE);
        }
        rig.end(hands);
    });
}

#[test]
fn a_grant_is_for_one_direction() {
    in_both_forms(|rig| {
        let (reader, terms) = rig.granted(Opcode::RdmaRead);
        assert_eq!(reader.write(&terms, 0, BYTES), REFUSED);
        let (writer, terms) = rig.granted(Opcode::RdmaWrite);
        assert_eq!(writer.read(&terms, 0, BYTES), REFUSED);
        assert!(writer.staged().iter().all(|byte| *byte == 0xee), "what was staged before is nobody's business");
        rig.end(vec![reader, writer]);
    });
}

#[test]
fn a_grant_is_for_one_use() {
    in_both_forms(|rig| {
        for opcode in [Opcode::RdmaRead, Opcode::RdmaWrite] {
            let (mut hand, terms) = rig.granted(opcode);
            let seven = [7; 8192];
            hand.staging.write(0, &seven).expect("within");
            let once = if opcode == Opcode::RdmaRead { Hand::read } else { Hand::write };
            assert_eq!(once(&hand, &terms, 0, BYTES), Ok(()));
            assert_eq!(hand.mark(&terms), Ok(()));
            hand.say(Body::Done);
            assert_eq!(hand.hear(), Some(Body::Ack));
            hand.staging.write(0, &[0xee; 8192]).expect("within");
            assert_eq!(once(&hand, &terms, 0, BYTES), REFUSED, "a second use");
            assert!(hand.staged().iter().all(|byte| *byte == 0xee));
            drop(hand);
        }
        rig.end(Vec::new());
    });
}

#[test]
fn a_grant_ends_by_its_time() {
    in_both_forms(|rig| {
        for opcode in [Opcode::RdmaRead, Opcode::RdmaWrite] {
            let (mut hand, terms) = rig.granted(opcode);
            assert!(u128::from(terms.valid_ms) <= PATIENCE.as_millis());
            assert_eq!(hand.hear(), None, "the source's patience ends");
            let late = if opcode == Opcode::RdmaRead { Hand::read } else { Hand::write };
            assert!(late(&hand, &terms, 0, BYTES).is_err(), "after its expiry");
            assert!(hand.staged().iter().all(|byte| *byte == 0xee));
            drop(hand);
        }
        rig.end(Vec::new());
    });
}

#[test]
fn markers_that_are_not_the_grants_own_end_it_without_acknowledgement() {
    in_both_forms(|rig| {
        let wrong: [fn(u32, u32) -> BulkOp<'static, SimRegion>; 3] = [
            |generation, _| BulkOp::SendImm { imm: generation + 1 },
            |_, key| BulkOp::SendImm { imm: key },
            |_, key| BulkOp::SendInvalidate { rkey: Rkey(key ^ 0x100) },
        ];
        for op in wrong {
            let (mut hand, terms) = rig.granted(Opcode::RdmaWrite);
            hand.write(&terms, 0, BYTES).expect("within the grant");
            // An invalidation of a key that is not bound there takes the source's QP down.
            let _ = hand.post(op(marker_of(hand.exchange.identity().generation), terms.key));
            hand.say(Body::Done);
            assert_eq!(hand.hear(), None, "no acknowledgement");
            drop(hand);
        }
        rig.end(Vec::new());
    });
}

#[test]
fn a_marker_over_another_qp_is_no_receipt() {
    in_both_forms(|rig| {
        let (mut first, terms) = rig.granted(Opcode::RdmaWrite);
        let (mut second, _) = rig.granted(Opcode::RdmaWrite);
        first.write(&terms, 0, BYTES).expect("within the grant");
        let marker = match terms.form {
            Form::Registration => BulkOp::SendImm { imm: marker_of(first.exchange.identity().generation) },
            Form::Window => BulkOp::SendInvalidate { rkey: Rkey(terms.key) },
        };
        let _ = second.post(marker);
        first.say(Body::Done);
        second.say(Body::Done);
        assert_eq!((first.hear(), second.hear()), (None, None), "neither is acknowledged");
        rig.end(vec![first, second]);
    });
}

/// A window belongs to its QP. (A registration belongs to the protection domain: there the key is a secret of the
/// control connection.)
#[test]
fn the_key_of_a_window_opens_nothing_over_another_qp() {
    let rig = Rig::new(WindowPolicy::Auto);
    let (first, terms) = rig.granted(Opcode::RdmaWrite);
    let (second, _) = rig.granted(Opcode::RdmaWrite);
    assert_eq!(second.write(&terms, 0, BYTES), REFUSED);
    rig.end(vec![first, second]);
}

#[test]
fn half_an_end_is_none() {
    in_both_forms(|rig| {
        // DONE without a marker.
        let (mut hand, terms) = rig.granted(Opcode::RdmaWrite);
        hand.write(&terms, 0, BYTES).expect("within the grant");
        hand.say(Body::Done);
        assert_eq!(hand.hear(), None, "no receipt, no acknowledgement");
        drop(hand);
        // A marker without DONE.
        let (mut hand, terms) = rig.granted(Opcode::RdmaWrite);
        hand.write(&terms, 0, BYTES).expect("within the grant");
        hand.mark(&terms).expect("it arrives");
        assert_eq!(hand.hear(), None, "not without DONE");
        drop(hand);
        // A marker before the grant.
        let mut hand = rig.connect(Opcode::RdmaWrite);
        hand.post(BulkOp::SendImm { imm: marker_of(hand.exchange.identity().generation) + 1 }).expect("it arrives");
        let terms = hand.grant();
        hand.write(&terms, 0, BYTES).expect("within the grant");
        hand.say(Body::Done);
        assert_eq!(hand.hear(), None, "the early one is no receipt of this grant");
        drop(hand);
        rig.end(Vec::new());
    });
}

/// A peer that writes less than it was granted gets nobody else's bytes committed.
#[test]
fn what_a_peer_leaves_unwritten_is_nobody_elses() {
    in_both_forms(|rig| {
        let end_well = |opcode, writes: u64| {
            let (mut hand, terms) = rig.granted(opcode);
            if opcode == Opcode::RdmaRead {
                hand.read(&terms, 0, BYTES).expect("within the grant");
            } else {
                hand.write(&terms, 0, writes).expect("within the grant");
            }
            hand.mark(&terms).expect("it arrives");
            hand.say(Body::Done);
            assert_eq!(hand.hear(), Some(Body::Ack));
        };
        let fill = |value: u8| rig.served.update(0, 3 * BYTES, |bytes| bytes.fill(value)).expect("in range");
        // Staging has the sevens of one peer, then a second one of another pair writes a single byte.
        end_well(Opcode::RdmaRead, 0);
        fill(9);
        end_well(Opcode::RdmaWrite, 1);
        rig.served
            .update(BYTES, BYTES, |bytes| {
                assert_eq!(bytes[0], 0xee, "what it wrote");
                assert!(bytes[1..].iter().all(|byte| *byte == 0), "and no sevens");
            })
            .expect("in range");
        fill(7);
        rig.end(Vec::new());
    });
}

fn direct_in_both_forms(scenario: impl Fn(Rig)) {
    in_both_forms(|rig| scenario(Rig { profile: Profile::Direct, ..rig }));
}

fn is_busy<T>(result: &Result<T, AccessError>) -> bool {
    matches!(result, Err(AccessError::Busy { .. }))
}

/// A grant of the range itself opens exactly the granted bytes, in one direction; its neighbours are the owner's.
#[test]
fn a_direct_grant_opens_exactly_its_bytes() {
    direct_in_both_forms(|rig| {
        let granted = |opcode| {
            let (hand, terms) = rig.granted(opcode);
            assert_eq!(terms.address, rig.served.address() + BYTES, "there and nowhere else");
            (hand, terms)
        };
        for (offset, len) in [(BYTES, 1), (0, BYTES + 1), (u64::MAX, 1)] {
            let (hand, mut terms) = granted(Opcode::RdmaRead);
            terms.address = terms.address.wrapping_add(offset);
            assert_eq!(hand.read(&terms, 0, len), REFUSED, "{len} bytes at {offset}");
            assert!(hand.staged().iter().all(|byte| *byte == 0xee), "not a byte came");
            drop(hand);
            // Its bytes are busy until the source has let go.
            let (hand, mut terms) = granted(Opcode::RdmaWrite);
            terms.address = terms.address.wrapping_add(offset);
            assert_eq!(hand.write(&terms, 0, len), REFUSED, "{len} bytes at {offset}");
        }
        let (hand, terms) = granted(Opcode::RdmaRead);
        assert_eq!(hand.write(&terms, 0, BYTES), REFUSED, "one direction");
        rig.end(vec![hand]);
    });
}

/// While a peer has the right, the bytes are busy, in the way of its direction, and no others; with its end they are free.
#[test]
fn the_bytes_of_a_direct_grant_are_busy_for_its_life() {
    direct_in_both_forms(|rig| {
        let served = rig.served.clone();
        for opcode in [Opcode::RdmaRead, Opcode::RdmaWrite] {
            // At its end it is free before that is acknowledged; given up, when the QP is gone.
            for ends_well in [true, false] {
                let (mut hand, terms) = rig.granted(opcode);
                let mut byte = [0];
                assert_eq!(is_busy(&served.try_read(BYTES, &mut byte)), opcode == Opcode::RdmaWrite);
                assert!(is_busy(&served.try_update(2 * BYTES - 1, 2, |_| ())));
                for free in [0, 2 * BYTES] {
                    served.try_update(free, BYTES, |_| ()).expect("its neighbours");
                }
                if ends_well {
                    hand.staging.write(0, &[7; 8192]).expect("within");
                    let once = if opcode == Opcode::RdmaRead { Hand::read } else { Hand::write };
                    once(&hand, &terms, 0, BYTES).expect("within the grant");
                    hand.mark(&terms).expect("it arrives");
                    hand.say(Body::Done);
                    assert_eq!(hand.hear(), Some(Body::Ack));
                    served.try_update(0, 3 * BYTES, |_| ()).expect("free");
                    assert_eq!(once(&hand, &terms, 0, BYTES), REFUSED, "a second use");
                }
                drop(hand);
                served.update(0, 3 * BYTES, |_| ()).expect("in range");
            }
        }
        drop(served);
        rig.end(Vec::new());
    });
}

/// A peer that writes less than it was granted changes no more than that, whatever it says.
#[test]
fn what_a_peer_leaves_unwritten_of_a_direct_grant_stays() {
    direct_in_both_forms(|rig| {
        for ends_well in [true, false] {
            let (mut hand, terms) = rig.granted(Opcode::RdmaWrite);
            hand.write(&terms, 10, 1).expect("within the grant");
            if ends_well {
                hand.mark(&terms).expect("it arrives");
                hand.say(Body::Done);
                assert_eq!(hand.hear(), Some(Body::Ack));
            }
            drop(hand);
            let changed = rig.served.update(BYTES, BYTES, |bytes| {
                assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if at == 10 { 0xee } else { 7 }));
                bytes[10] = 7;
            });
            changed.expect("in range");
        }
        rig.end(Vec::new());
    });
}
