//! ET-10 on simulated devices: every frame of an operation cut, lost, silenced, repeated, or about something else. What
//! holds in each case: the call ends in time, its effect is right, no byte changes that may not, both sides let
//! everything go by themselves, and the next operation goes well.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use common::{
    LONG, bytes_of, eventually, memory, pattern,
    proxy::{self, By, FRAMES, Fate, REQUEST, Rule, is},
};
use verbs_engine::{
    BatchReport, Config, Direction, Engine, Permission, Profile, RdmaConfig, RegisteredMemory, RemoteEffect,
    RemoteSegment, TransferRequest, TransportPolicy,
};
use verbs_transport::{
    fabric::bulk::WindowPolicy,
    sim::{HostConfig, SimConfig, SimWorld},
};

const LENGTH: usize = 100_000;
const SOURCE_TIMEOUT: Duration = Duration::from_millis(700);
const TIMEOUT: Duration = Duration::from_millis(600);

/// Only what is lost or silent has to wait for a deadline; everything else ends by itself, however slow the host.
fn timeout_for(fate: &Fate) -> Duration {
    if matches!(fate, Fate::Lost | Fate::Silence) { TIMEOUT } else { LONG }
}

struct Rig {
    world: SimWorld,
    source: Engine,
    served: RegisteredMemory,
    requester: Engine,
    local: RegisteredMemory,
    /// Without a proxy.
    straight: RemoteSegment,
    profile: Profile,
}

impl Rig {
    /// With grants of that form, for operations of that profile.
    fn new(windows: WindowPolicy, profile: Profile) -> Self {
        let world = SimWorld::new(SimConfig::default());
        let on = |host: u8, config| {
            let fabric = Arc::new(world.host([10, 0, 0, host], HostConfig { windows, ..HostConfig::default() }));
            Engine::with_rdma(config, &RdmaConfig::default(), fabric).expect("an engine")
        };
        let only = Config { transport: TransportPolicy::RdmaOnly, ..Config::default() };
        let source = on(2, Config { source_timeout: SOURCE_TIMEOUT, ..common::serving_direct() });
        let requester = on(1, only);
        let served = memory(&source, LENGTH, Permission::RemoteReadWrite);
        let local = memory(&requester, LENGTH, Permission::LocalOnly);
        let straight = requester.open_segment(source.endpoint(), source.epoch(), LONG).expect("it listens");
        Self { world, source, served, requester, local, straight, profile }
    }

    /// The source by way of a proxy.
    fn through(&self, rule: Rule) -> RemoteSegment {
        let armed = Arc::new(AtomicBool::new(false));
        let rule: Rule = {
            let armed = Arc::clone(&armed);
            Arc::new(move |by, kind, bytes| if armed.load(SeqCst) { rule(by, kind, bytes) } else { Fate::Pass })
        };
        let endpoint = proxy::start(self.source.endpoint(), rule);
        let peer = self.requester.open_segment(endpoint, self.source.epoch(), LONG).expect("it listens");
        // Its description has passed; from here on it is about operations.
        armed.store(true, SeqCst);
        peer
    }

    fn run(&self, peer: &RemoteSegment, direction: Direction, timeout: Duration) -> BatchReport {
        let request = TransferRequest {
            local_address: self.local.address(),
            remote_address: self.served.address(),
            length: LENGTH as u64,
        };
        let began = Instant::now();
        let mode = if self.profile == Profile::Direct { direction.direct() } else { direction.into() };
        let report = self.requester.submit_and_wait(peer, mode, &[request], timeout).expect("sound");
        assert!(began.elapsed() < timeout + Duration::from_secs(5), "it ended after {:?}", began.elapsed());
        report
    }

    /// Old bytes at both ends. Who was let in for a direct operation may still be at them.
    fn reset(&self) -> (Vec<u8>, Vec<u8>) {
        let (local, served) = (pattern(LENGTH, 1), pattern(LENGTH, 77));
        self.local.write(0, &local).expect("in range");
        self.served.write(0, &served).expect("in range");
        (local, served)
    }

    /// What an operation did is what its report says.
    fn check(&self, direction: Direction, report: &BatchReport, what: &str) {
        let (local, served) = (pattern(LENGTH, 1), pattern(LENGTH, 77));
        let (local_now, served_now) = (bytes_of(&self.local), bytes_of(&self.served));
        let direct = self.profile == Profile::Direct;
        assert_eq!(report.profile, self.profile, "{what}");
        // What a direct operation leaves that ends on its way: of each byte the old one or the new.
        let mixed = |now: &[u8], old: &[u8], new: &[u8]| {
            now.iter().zip(old).zip(new).all(|((now, old), new)| now == old || now == new)
        };
        match (direction, &report.failure) {
            (Direction::Read, None) => assert!(local_now == served, "{what}: a READ brings the source's bytes"),
            (Direction::Read, Some(failure)) => {
                assert_eq!(failure.effect, RemoteEffect::None, "{what}");
                assert!(direct || !failure.local_changed, "{what}");
                if failure.local_changed {
                    assert!(mixed(&local_now, &local, &served), "{what}: neither old nor new");
                } else {
                    assert!(local_now == local, "{what}: a READ that failed has changed nothing");
                }
            }
            (Direction::Write, None) => assert!(served_now == local, "{what}: a WRITE that was acknowledged is there"),
            (Direction::Write, Some(failure)) => {
                assert_ne!(failure.effect, RemoteEffect::Committed, "{what}");
                if failure.effect == RemoteEffect::None {
                    assert!(served_now == served, "{what}: a WRITE without effect has changed nothing");
                }
                assert!(!failure.local_changed, "{what}");
                if direct {
                    assert!(mixed(&served_now, &served, &local), "{what}: neither old nor new");
                } else {
                    assert!(served_now == served || served_now == local, "{what}: all of it, or nothing");
                }
            }
        }
        if direction == Direction::Read {
            assert!(served_now == served, "{what}: a READ changes nothing at the source");
        }
    }

    /// Both sides have let go of everything but kept pairs, without each other's help.
    fn settle(&self, what: &str) {
        for engine in [&self.requester, &self.source] {
            eventually(what, || {
                let s = engine.stats();
                let held = (s.submissions, s.source_operations, s.grants, s.grant_bytes);
                let devices = (s.rdma_connecting, s.rdma_busy, s.rdma_closing);
                (held, devices, s.direct_ranges) == ((0, 0, 0, 0), (0, 0, 0), 0)
            });
        }
    }

    fn end(self) {
        self.settle("all is let go");
        let world = self.world.clone();
        let Self { source, served, requester, local, straight, .. } = self;
        drop((served, local, straight, requester, source));
        world.assert_quiet();
    }
}

/// Does that to the first such frame, and nothing else.
fn once(frame: (By, u8), fate: impl Fn(&[u8]) -> Fate + Send + Sync + 'static) -> Rule {
    let done = AtomicBool::new(false);
    Arc::new(
        move |by, kind, bytes| {
            if is(frame, by, kind) && !done.swap(true, SeqCst) { fate(bytes) } else { Fate::Pass }
        },
    )
}

fn every_frame_cut_lost_silenced_or_repeated(windows: WindowPolicy, profile: Profile) {
    let rig = Rig::new(windows, profile);
    for direction in [Direction::Read, Direction::Write] {
        for (place, frame) in FRAMES.into_iter().enumerate() {
            for fate in [Fate::Cut, Fate::Lost, Fate::Silence, Fate::Twice] {
                let what = format!("{direction:?}, {frame:?}, {fate:?}");
                rig.reset();
                let peer = rig.through(once(frame, {
                    let fate = fate.clone();
                    move |_| fate.clone()
                }));
                let report = rig.run(&peer, direction, timeout_for(&fate));
                rig.check(direction, &report, &what);
                rig.settle(&what);
                // READY is the last word; and of an ACK or a DONE that came twice the first was enough.
                let complete = place == 10 || fate == Fate::Twice && place >= 8;
                assert_eq!(report.is_complete(), complete, "{what}: {report:?}");
                if let (Some(failure), Direction::Write) = (&report.failure, direction) {
                    // Data is posted as soon as the grant is here; a repeat is noticed in the place of the next frame.
                    let granted = place > 7 || place >= 6 && fate == Fate::Twice;
                    let effect = if granted { RemoteEffect::Unknown } else { RemoteEffect::None };
                    // On a host that is busy enough the deadline may come before the first work request.
                    let late = failure.error.is_timeout() && failure.effect == RemoteEffect::None;
                    assert!(failure.effect == effect || late, "{what}: {failure}");
                }
                let again = rig.run(&rig.straight, direction, LONG);
                assert!(again.is_complete(), "{what}: the next one: {again:?}");
            }
        }
    }
    rig.end();
}

fn every_name_of_every_frame_changed(windows: WindowPolicy, profile: Profile) {
    let rig = Rig::new(windows, profile);
    // Where each name begins: epochs, protection domains, connections, request, digest, generation.
    let names = [12, 28, 44, 60, 76, 92, 108, 116, 132];
    for direction in [Direction::Read, Direction::Write] {
        for (place, frame) in FRAMES.into_iter().enumerate().skip(2) {
            for at in names {
                let what = format!("{direction:?}, {frame:?}, byte {at}");
                rig.reset();
                let peer = rig.through(once(frame, move |bytes| {
                    let mut bytes = bytes.to_vec();
                    bytes[at] ^= 0x40;
                    Fate::Changed(bytes)
                }));
                let report = rig.run(&peer, direction, LONG);
                rig.check(direction, &report, &what);
                rig.settle(&what);
                assert_eq!(report.is_complete(), place == 10, "{what}: {report:?}");
            }
        }
    }
    let again = rig.run(&rig.straight, Direction::Read, LONG);
    assert!(again.is_complete());
    rig.end();
}

/// A wrong byte anywhere in the request, what is asked along, the offer, and the bodies of frames: never a panic, never
/// wrong bytes.
fn every_byte_of_every_frame_flipped(windows: WindowPolicy, profile: Profile) {
    let rig = Rig::new(windows, profile);
    let lengths = [152, 36 + 96, 212, 140, 148, 148, 140, 172, 140, 140, 140];
    for (frame, length) in FRAMES.into_iter().zip(lengths) {
        // The names were changed one by one; of the rest each byte.
        for at in (0..length).filter(|at| frame.1 < 17 || frame.1 == REQUEST || *at < 12 || *at >= 140) {
            // A longer payload that never comes, or another operation, waits for its deadline: some of those suffice.
            let direction = if at % 2 == 0 { Direction::Read } else { Direction::Write };
            let what = format!("{direction:?}, {frame:?}, byte {at}");
            rig.reset();
            let peer = rig.through(once(frame, move |bytes| {
                assert_eq!(bytes.len(), length, "as it is documented");
                let mut bytes = bytes.to_vec();
                bytes[at] ^= 0x01;
                Fate::Changed(bytes)
            }));
            let report = rig.run(&peer, direction, TIMEOUT);
            // Of a changed request the source serves what it got: another place of the range, say. The digest then
            // differs, and nothing is granted.
            rig.check(direction, &report, &what);
        }
    }
    rig.settle("all is let go");
    assert!(rig.run(&rig.straight, Direction::Write, LONG).is_complete());
    rig.end();
}

/// The second operation over a kept pair: its frames lost, cut, and repeated.
fn every_frame_of_a_reuse(windows: WindowPolicy, profile: Profile) {
    let rig = Rig::new(windows, profile);
    let frames =
        [(By::Requester, REQUEST), (By::Source, 22), (By::Requester, 23), (By::Source, 24), (By::Requester, 25)];
    for direction in [Direction::Read, Direction::Write] {
        for (place, frame) in frames.into_iter().enumerate() {
            for fate in [Fate::Cut, Fate::Silence, Fate::Twice] {
                let what = format!("reuse, {direction:?}, {frame:?}, {fate:?}");
                let count = AtomicU32::new(0);
                let peer = rig.through({
                    let fate = fate.clone();
                    Arc::new(move |by, kind, _| {
                        let second = is(frame, by, kind) && count.fetch_add(1, SeqCst) == 1;
                        if second { fate.clone() } else { Fate::Pass }
                    })
                });
                assert!(rig.run(&peer, direction, LONG).is_complete(), "{what}: the first");
                eventually("the source has it back", || rig.source.stats().rdma_idle >= 1);
                let before = rig.requester.stats().connections_reused;
                rig.reset();
                let report = rig.run(&peer, direction, timeout_for(&fate));
                assert_eq!(rig.requester.stats().connections_reused, before + 1, "{what}");
                rig.check(direction, &report, &what);
                rig.settle(&what);
                let complete = place == 4 || fate == Fate::Twice && place >= 2;
                assert_eq!(report.is_complete(), complete, "{what}: {report:?}");
            }
        }
    }
    rig.end();
}

/// A lost acknowledgement of a WRITE that is committed: unknown to the requester, and never sent again.
fn a_lost_acknowledgement_is_unknown_and_not_replayed(windows: WindowPolicy, profile: Profile) {
    let rig = Rig::new(windows, profile);
    let requests = Arc::<AtomicU32>::default();
    let peer = rig.through({
        let requests = Arc::clone(&requests);
        Arc::new(move |by, kind, _| {
            requests.fetch_add(u32::from(is((By::Requester, REQUEST), by, kind)), SeqCst);
            if (by, kind) == (By::Source, 24) { Fate::Cut } else { Fate::Pass }
        })
    });
    let (local, _) = rig.reset();
    let report = rig.run(&peer, Direction::Write, LONG);
    assert_eq!(report.failure.map(|failure| failure.effect), Some(RemoteEffect::Unknown));
    assert!(bytes_of(&rig.served) == local, "it was committed all the same");
    assert_eq!(requests.load(SeqCst), 1);
    assert_eq!(rig.requester.stats().effects_unknown, 1);
    rig.end();
}

/// DONE proves nothing: without the marker out of the receive queue there is no ACK, and no commit.
fn done_without_a_receipt_gets_no_acknowledgement(windows: WindowPolicy, profile: Profile) {
    let rig = Rig::new(windows, profile);
    rig.reset();
    // The source's QP breaks when DONE comes, before the source looks for its receipt: by then the receipt is there, so
    // break it when the grant goes out, and let the requester's data and marker fail.
    let qpn = Arc::<AtomicU32>::default();
    let peer = rig.through({
        let (qpn, world) = (Arc::clone(&qpn), rig.world.clone());
        Arc::new(move |by, kind, bytes| {
            if kind == 20 {
                qpn.store(u32::from_be_bytes(bytes[140..144].try_into().expect("4 bytes")), SeqCst);
            }
            if (by, kind) == (By::Source, 22) {
                assert!(world.force_bulk_error([10, 0, 0, 2], qpn.load(SeqCst)));
            }
            Fate::Pass
        })
    });
    for direction in [Direction::Read, Direction::Write] {
        rig.reset();
        let report = rig.run(&peer, direction, Duration::from_secs(10));
        rig.check(direction, &report, "a QP that breaks under its grant");
        assert!(!report.is_complete());
        assert_eq!(bytes_of(&rig.served), pattern(LENGTH, 77), "nothing is committed without a receipt");
    }
    rig.end();
}

/// Each scenario with a registration for each grant, or with windows; staged, or direct.
macro_rules! each {
    ($name:ident: $windows:ident, $profile:ident; $($scenario:ident),* $(,)?) => {
        mod $name {
            $(#[test]
            fn $scenario() {
                super::$scenario(super::WindowPolicy::$windows, super::Profile::$profile);
            })*
        }
    };
}

each!(
    by_registration: Never, Staged;
    every_frame_cut_lost_silenced_or_repeated,
    every_name_of_every_frame_changed,
    every_byte_of_every_frame_flipped,
    every_frame_of_a_reuse,
    a_lost_acknowledgement_is_unknown_and_not_replayed,
    done_without_a_receipt_gets_no_acknowledgement,
);

each!(
    by_window: Auto, Staged;
    every_frame_cut_lost_silenced_or_repeated,
    every_name_of_every_frame_changed,
    every_byte_of_every_frame_flipped,
    every_frame_of_a_reuse,
    a_lost_acknowledgement_is_unknown_and_not_replayed,
    done_without_a_receipt_gets_no_acknowledgement,
);

each!(
    direct_by_registration: Never, Direct;
    every_frame_cut_lost_silenced_or_repeated,
    every_frame_of_a_reuse,
    a_lost_acknowledgement_is_unknown_and_not_replayed,
    done_without_a_receipt_gets_no_acknowledgement,
    every_byte_of_every_frame_flipped,
);

each!(
    direct_by_window: Auto, Direct;
    every_frame_cut_lost_silenced_or_repeated,
    every_frame_of_a_reuse,
    a_lost_acknowledgement_is_unknown_and_not_replayed,
    done_without_a_receipt_gets_no_acknowledgement,
);
