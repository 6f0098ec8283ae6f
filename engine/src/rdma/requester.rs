//! The requester's side of an operation: on the caller's thread, from the request to READY.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use verbs_transport::fabric::bulk::{
    Access as Rights, BulkFabric, BulkOp, BulkPort as _, BulkRegion as _, BulkWr, Local, Remote, Rkey,
};

use super::{
    RdmaConfig,
    cache::{Cache, Kept, Peer},
    device::{ConnectError, Device, RegionOf},
    exchange::{Exchange, Side},
    grant::{Form, marker_of},
    identity::{Digest, Identity, Incarnation},
    link::{Link, LinkNames},
    mailbox::WaitError,
    path::PathEnd,
    routes::{Pair, Rail, Route, Routes, TRIES, pairs},
    staging::{Lent, Pool, StageError},
    talk::{Said, Talk},
    wire::{Ask, Body, Frame, GrantTerms, KeptNames},
};
use crate::{
    Direction, Phase, Status, TransferError, WireError,
    batch::Slice,
    budget::Charge,
    control::{Opcode, Reply, Request},
    deadline::Deadline,
    error::Failure,
    stats::Counters,
    tcp::{Buffers, Stop, broken, dial},
};

/// A NIC of the requester's, with memory that is registered there.
pub(crate) struct RequesterNic<F: BulkFabric> {
    pub(crate) device: Arc<Device<F>>,
    pub(crate) staging: Arc<Pool<RegionOf<F>>>,
}

/// What operations of this engine's own go over.
pub(crate) struct RdmaRequester<F: BulkFabric> {
    /// At least one.
    pub(crate) nics: Vec<RequesterNic<F>>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) config: RdmaConfig,
    pub(crate) epoch: [u8; 16],
    pub(crate) cache: Cache<F>,
    pub(crate) stop: Arc<Stop>,
    pub(crate) buffers: Buffers,
    pub(crate) counters: Arc<Counters>,
    pub(crate) requests: AtomicU64,
}

/// Why an operation did not go over RDMA.
pub(crate) enum NotDone {
    /// It cannot, and nothing has happened: another transport may.
    Unavailable(Unavailable),
    /// It has failed.
    Failed(Failure),
}

/// Why it cannot.
pub(crate) struct Unavailable {
    pub(crate) error: TransferError,
    /// For how long it is of no use to ask again; `None`: for the peer's life.
    pub(crate) again_after: Option<Duration>,
}

/// After the network between both devices has failed, or nothing fits.
const PAUSE: Duration = Duration::from_secs(30);

/// An idle QP has nothing to drain.
const BURIAL: Duration = Duration::from_millis(500);

impl NotDone {
    fn unavailable(error: TransferError, again_after: Option<Duration>) -> Self {
        Self::Unavailable(Unavailable { error, again_after })
    }

    /// Before anything could have had an effect.
    fn harmless(error: TransferError) -> Self {
        Self::Failed(Failure::harmless(error))
    }
}

impl From<TransferError> for NotDone {
    fn from(error: TransferError) -> Self {
        Self::harmless(error)
    }
}

impl From<WireError> for NotDone {
    fn from(error: WireError) -> Self {
        Self::harmless(error.into())
    }
}

/// An operation that is ready to move its data.
pub(crate) struct Prepared<'a, F: BulkFabric> {
    granted: Granted<'a, F>,
    staging: Lent<RegionOf<F>>,
    route: Route,
}

/// An operation that has failed.
pub(crate) struct Lost {
    pub(crate) failure: Failure,
    /// The source was not told that all is done: what has no effect may be tried again.
    pub(crate) before_done: bool,
}

/// An operation that has its grant.
struct Granted<'a, F: BulkFabric> {
    talk: Talk<'a>,
    link: Link<F>,
    exchange: Exchange,
    terms: GrantTerms,
    expires: Instant,
}

impl<F: BulkFabric> RdmaRequester<F> {
    /// Everything up to the grant: a rail that is not among those `tried` and becomes one of them, staging, with the bytes
    /// of a WRITE, and a pair of QPs. Nothing of it can have had an effect at the source.
    pub(crate) fn prepare(
        &self,
        slice: &Slice,
        deadline: Deadline,
        tried: &mut Vec<Rail>,
    ) -> Result<Prepared<'_, F>, NotDone> {
        let opcode = match slice.direction {
            Direction::Read => Opcode::RdmaRead,
            Direction::Write => Opcode::RdmaWrite,
        };
        let (region, offset) = (slice.remote_region, slice.remote_offset);
        let request = Request { opcode, epoch: slice.peer.1, region, offset, length: slice.length }.encode();
        let known = self.known_pairs(slice.peer);
        let mut route = self.routes.pick(&known, tried, slice.length);
        if let Some(taken) = route.take() {
            tried.push(taken.pair.rail);
            let nic = &self.nics[taken.pair.rail.nic];
            if let Some(kept) = self.cache.take(slice.peer, (nic.device.pd, taken.pair.rail.source_pd)) {
                let staging = stage(nic, slice)?;
                if let Some(granted) = self.reuse(kept, &request, slice, deadline)? {
                    return Ok(Prepared { granted, staging, route: taken });
                }
            }
            route = Some(taken);
        }
        self.set_up(&request, slice, deadline, route, tried)
    }

    /// Whether there is a rail to that peer that was not tried.
    pub(crate) fn has_more(&self, peer: Peer, tried: &[Rail]) -> bool {
        tried.len() < TRIES && self.known_pairs(peer).iter().any(|pair| !tried.contains(&pair.rail))
    }

    /// Our ends, for a path: those that are up; if none is, all: the failure tells what is wrong.
    fn ends(&self) -> Vec<(usize, PathEnd)> {
        let all = || self.nics.iter().enumerate().map(|(at, nic)| (at, &nic.device));
        let mut ends: Vec<_> = all().filter(|(_, device)| device.is_up()).collect();
        if ends.is_empty() {
            ends = all().collect();
        }
        ends.into_iter().map(|(at, device)| (at, device.end())).collect()
    }

    /// By what the peer has offered last.
    fn known_pairs(&self, peer: Peer) -> Vec<Pair> {
        let table = self.routes.table(peer);
        table.and_then(|table| pairs(&self.ends(), &table).ok()).unwrap_or_default()
    }

    /// Carries it out. What a device may still touch when it fails, the local memory included, is held until it cannot.
    pub(crate) fn carry(&self, slice: Slice, prepared: Prepared<'_, F>) -> Result<(), Lost> {
        let Prepared { mut granted, staging, route } = prepared;
        let moved = self.move_data(&mut granted, &slice, &staging, &route);
        let Granted { talk, mut link, exchange, .. } = granted;
        if let Err(error) = moved {
            let (effect, before_done) = (exchange.effect(slice.direction), exchange.is_before_done());
            // The source learns of it by this, and takes its own way out.
            drop(talk);
            link.condemn(None, None, Box::new((staging, slice)));
            return Err(Lost { failure: Failure { error, effect }, before_done });
        }
        route.succeeded();
        link.last_generation = exchange.identity().generation;
        if exchange.is_over() {
            self.cache.put(slice.peer, Kept { stream: talk.stream, link });
        }
        if slice.direction == Direction::Read {
            let local = slice.local.registration();
            let copied = local.with(slice.local_offset, slice.length, |into| staging.read(0, into).is_ok());
            let failure = Failure::harmless(TransferError::Internal);
            copied.filter(|done| *done).ok_or(Lost { failure, before_done: false })?;
        }
        Ok(())
    }

    /// Over a kept pair. `None` if there is none after all, and a new one may be made: the source no longer has it, or
    /// its connection took not one byte of the request.
    fn reuse(
        &self,
        kept: Kept<F>,
        request: &[u8],
        slice: &Slice,
        deadline: Deadline,
    ) -> Result<Option<Granted<'_, F>>, NotDone> {
        let Kept { stream, mut link } = kept;
        let names = link.names;
        let LinkNames { source_pd, requester_pd, source_link, requester_link } = names;
        let ask = Ask {
            requester_epoch: self.epoch,
            request: self.requests.fetch_add(1, Ordering::Relaxed),
            requester_link,
            kept: Some(KeptNames { requester_pd, source_pd, source_link }),
        };
        let talk = Talk { stream, deadline, stop: &self.stop };
        link.resume();
        let (sent, bytes) = (Instant::now(), ask.encode());
        let mut accepted = 0;
        match talk.line().send_all(&[request, &bytes].concat(), &mut accepted) {
            Ok(()) => self.counters.reused.add(1),
            Err(_) if accepted == 0 => return Ok(None),
            Err(error) => return Err(broken(error, Phase::Request).into()),
        }
        let identity = Identity {
            source_epoch: slice.peer.1.to_bytes(),
            requester_epoch: self.epoch,
            source_pd,
            requester_pd,
            source_link,
            requester_link,
            request: ask.request,
            digest: Digest::of(request, &bytes),
            generation: 0,
        };
        let frame = match talk.read(Phase::Reply)? {
            Said::Frame(frame) => frame,
            Said::Reply(Reply { status: Status::CacheMiss, .. }) => return Ok(None),
            Said::Reply(reply) => return Err(self.refused(&reply, slice.peer).into()),
        };
        let mut exchange = Exchange::again(Side::Requester, identity, link.last_generation);
        let terms = terms(exchange.hear(&frame)?, slice, link.device.has_windows())?;
        let expires = sent + Duration::from_millis(terms.valid_ms.into());
        Ok(Some(Granted { talk, link, exchange, terms, expires }))
    }

    /// A new control connection, a new pair of QPs: on the rail that was chosen by what was known, if it is still offered.
    fn set_up(
        &self,
        request: &[u8],
        slice: &Slice,
        deadline: Deadline,
        route: Option<Route>,
        tried: &mut Vec<Rail>,
    ) -> Result<Prepared<'_, F>, NotDone> {
        let requester_link = Incarnation::draw().map_err(|error| device_error(Phase::Connect, error))?;
        let ask = Ask {
            requester_epoch: self.epoch,
            request: self.requests.fetch_add(1, Ordering::Relaxed),
            requester_link,
            kept: None,
        };
        self.counters.dialled.add(1);
        let stream = dial(slice.peer.0, self.buffers, deadline, &self.stop)?;
        let talk = Talk { stream, deadline, stop: &self.stop };
        let bytes = ask.encode();
        talk.send(&[request, &bytes].concat(), Phase::Request)?;

        let reply = match talk.read(Phase::Reply)? {
            Said::Reply(reply) => reply,
            Said::Frame(frame) => return Err(out_of_turn(&frame).into()),
        };
        match reply.status {
            Status::Success if reply.epoch == slice.peer.1 => {}
            Status::Success => return Err(WireError::ForeignEpoch { actual: reply.epoch }.into()),
            // No device there, for as long as it lives.
            Status::BackendUnavailable => return Err(NotDone::unavailable(self.refused(&reply, slice.peer), None)),
            _ => return Err(self.refused(&reply, slice.peer).into()),
        }
        let offer = talk.offer(reply.length)?;
        self.routes.learn(slice.peer, &offer.paths);
        let no_path = |reason: &str| TransferError::NoPath { reason: reason.to_owned() };
        let offered =
            pairs(&self.ends(), &offer.paths).map_err(|reason| NotDone::unavailable(no_path(reason), Some(PAUSE)))?;
        let kept = route.and_then(|mut route| {
            route.pair = *offered.iter().find(|pair| pair.rail == route.pair.rail)?;
            Some(route)
        });
        let route = if let Some(route) = kept {
            route
        } else {
            let route = self.routes.pick(&offered, tried, slice.length);
            let route = route.ok_or_else(|| {
                NotDone::unavailable(no_path("all that the peer offers have failed"), Some(Duration::ZERO))
            })?;
            tried.push(route.pair.rail);
            route
        };
        let Pair { rail, at, peer, agreed, .. } = route.pair;
        let nic = &self.nics[rail.nic];
        let own = nic.device.end();
        // Before anything is reserved at the source.
        let permit = self.permit(&nic.device)?;
        let staging = stage(nic, slice)?;
        let identity = Identity {
            source_epoch: slice.peer.1.to_bytes(),
            requester_epoch: self.epoch,
            source_pd: peer.pd,
            requester_pd: own.pd,
            source_link: offer.source_link,
            requester_link,
            request: ask.request,
            digest: Digest::of(request, &bytes),
            generation: offer.generation,
        };
        let mut exchange = Exchange::new(Side::Requester, identity);
        let path = u16::try_from(at).map_err(|_| TransferError::Internal)?;
        talk.say(&mut exchange, Body::Select { path, end: own })?;
        self.admitted(&talk, &mut exchange, slice.peer)?;

        let (source_pd, requester_pd, source_link) = (peer.pd, own.pd, offer.source_link);
        let names = LinkNames { source_pd, requester_pd, source_link, requester_link };
        let mut link = Link::new(&nic.device, permit, names, agreed)
            .map_err(|error| NotDone::unavailable(device_error(Phase::Connect, error), Some(PAUSE)))?;
        talk.say(&mut exchange, Body::RequesterQp(link.endpoint()))?;
        let Body::SourceQp(remote) = self.admitted(&talk, &mut exchange, slice.peer)? else {
            return Err(TransferError::Internal.into());
        };
        link.connect(remote, &peer, &self.config, deadline).map_err(|error| match error {
            ConnectError::Failed(error) => NotDone::unavailable(device_error(Phase::Connect, error), Some(PAUSE)),
            ConnectError::TimedOut => TransferError::TimedOut { phase: Phase::Connect }.into(),
            ConnectError::Stopped => TransferError::Stopped.into(),
        })?;
        let sent = Instant::now();
        talk.say(&mut exchange, Body::Connected)?;
        let terms = terms(self.admitted(&talk, &mut exchange, slice.peer)?, slice, nic.device.has_windows())?;
        let expires = sent + Duration::from_millis(terms.valid_ms.into());
        Ok(Prepared { granted: Granted { talk, link, exchange, terms, expires }, staging, route })
    }

    /// Room for one more pair; the one that has been idle longest makes way if need be.
    fn permit(&self, device: &Device<F>) -> Result<Charge, NotDone> {
        let take = || device.connections.take(1, 0);
        let mut taken = take();
        if taken.is_err() && self.cache.evict(device.pd) {
            // It gives its room back when its QP is destroyed.
            let until = Deadline::after(BURIAL);
            while taken.is_err() && until.remaining().is_some() {
                std::thread::sleep(Duration::from_millis(1));
                taken = take();
            }
        }
        taken.map_err(|error| NotDone::unavailable(device_error(Phase::Connect, error), Some(Duration::ZERO)))
    }

    /// The next frame of the set-up. A refusal of the source's means that it has not got what it takes, for now.
    fn admitted(&self, talk: &Talk<'_>, exchange: &mut Exchange, peer: Peer) -> Result<Body, NotDone> {
        match talk.read(Phase::Reply)? {
            Said::Frame(frame) => Ok(exchange.hear(&frame)?),
            Said::Reply(reply) => {
                let pause = match reply.status {
                    Status::Exhausted => Duration::ZERO,
                    Status::BackendUnavailable | Status::BackendError => PAUSE,
                    _ => return Err(self.refused(&reply, peer).into()),
                };
                Err(NotDone::unavailable(self.refused(&reply, peer), Some(pause)))
            }
        }
    }

    /// The data, the marker, DONE, ACK and READY. The effect of a failure is the exchange's to tell.
    fn move_data(
        &self,
        granted: &mut Granted<'_, F>,
        slice: &Slice,
        staging: &RegionOf<F>,
        route: &Route,
    ) -> Result<(), TransferError> {
        let Granted { talk, link, exchange, terms, expires } = granted;
        let window = self.config.window.min(link.agreed.rd_atomic.initiator.into());
        let length = usize::try_from(slice.length).map_err(|_| TransferError::Internal)?;
        let chunk = usize::try_from(self.config.chunk_bytes).map_err(|_| TransferError::Internal)?;
        let on_device = |error: WaitError, phase| match error {
            WaitError::TimedOut => TransferError::TimedOut { phase },
            WaitError::Stopped => TransferError::Stopped,
            WaitError::Broken(broken) => device_error(phase, broken),
        };
        let phase = match slice.direction {
            Direction::Read => Phase::Payload,
            Direction::Write => Phase::Body,
        };
        let began = Instant::now();
        for (id, offset) in (0_u64..).zip((0..length).step_by(chunk)) {
            link.mail.wait_sends(window - 1, talk.deadline).map_err(|error| on_device(error, phase))?;
            if Instant::now() >= *expires || talk.deadline.remaining().is_none() {
                return Err(TransferError::TimedOut { phase });
            }
            let len = u32::try_from(chunk.min(length - offset)).map_err(|_| TransferError::Internal)?;
            let local = Local { region: staging, offset, len };
            let remote = Remote { addr: terms.address + offset as u64, rkey: Rkey(terms.key) };
            let op = match slice.direction {
                Direction::Read => BulkOp::Read { local, remote },
                Direction::Write => BulkOp::Write { local, remote },
            };
            exchange.posting();
            link.post(BulkWr { id, signaled: true, fence: false, op }).map_err(|error| device_error(phase, error))?;
        }
        link.mail.wait_sends(0, talk.deadline).map_err(|error| on_device(error, phase))?;
        route.observe(began.elapsed());
        if Instant::now() >= *expires {
            return Err(TransferError::TimedOut { phase });
        }
        let op = match terms.form {
            Form::Registration => BulkOp::SendImm { imm: marker_of(exchange.identity().generation) },
            Form::Window => BulkOp::SendInvalidate { rkey: Rkey(terms.key) },
        };
        // Everything before it is complete; the fence holds it back should that ever change.
        let marker = BulkWr { id: MARKER_ID, signaled: true, fence: true, op };
        link.post(marker).map_err(|error| device_error(phase, error))?;
        link.mail.wait_sends(0, talk.deadline).map_err(|error| on_device(error, phase))?;
        talk.say(exchange, Body::Done)?;
        match talk.read(Phase::Acknowledgement)? {
            Said::Frame(frame) => exchange.hear(&frame)?,
            Said::Reply(reply) => return Err(self.refused(&reply, slice.peer)),
        };
        // The operation is done. If the pair cannot be used again, that is not its concern.
        if let Err(error) = talk.say(exchange, Body::Ready) {
            tracing::debug!(%error, "a pair of QPs is not kept");
        }
        Ok(())
    }

    fn refused(&self, reply: &Reply, peer: Peer) -> TransferError {
        match reply.status {
            Status::EpochMismatch => {
                self.cache.forget_peer(peer.0);
                self.routes.forget(peer);
                TransferError::EpochMismatch { expected: peer.1, actual: reply.epoch }
            }
            Status::Success | Status::Ready => WireError::OutOfPlace { status: reply.status }.into(),
            status => TransferError::Refused { status },
        }
    }
}

/// Memory on that NIC, with the bytes of a WRITE.
fn stage<F: BulkFabric>(nic: &RequesterNic<F>, slice: &Slice) -> Result<Lent<RegionOf<F>>, NotDone> {
    let bytes = usize::try_from(slice.length).map_err(|_| TransferError::Internal)?;
    let made = nic.staging.take(bytes, Incarnation::NONE, |arena| {
        let bytes = verbs_transport::fabric::bulk::MemoryOwner::len(&*arena);
        nic.device.port.register(arena, 0..bytes, Rights::DESTINATION).map_err(StageError::Register)
    });
    let staging =
        made.map_err(|error| NotDone::unavailable(device_error(Phase::Connect, error), Some(Duration::ZERO)))?;
    if slice.direction == Direction::Write {
        let local = slice.local.registration();
        let copied = local.with(slice.local_offset, slice.length, |from| staging.write(0, from).is_ok());
        copied.filter(|done| *done).ok_or(TransferError::Internal)?;
    }
    Ok(staging)
}

/// The terms of a grant, which must be those of the request.
fn terms(body: Body, slice: &Slice, windows: bool) -> Result<GrantTerms, WireError> {
    match body {
        Body::Grant(terms) if terms.length != slice.length => {
            Err(WireError::Length { found: terms.length, expected: slice.length })
        }
        // Of a kind that we have not said that we take.
        Body::Grant(terms) if terms.form == Form::Window && !windows => {
            Err(WireError::Unknown { field: "form of a grant", found: 2 })
        }
        Body::Grant(terms) => Ok(terms),
        other => Err(WireError::OutOfTurn { found: other.kind() as u8, due: super::wire::Kind::Grant as u8 }),
    }
}

fn out_of_turn(frame: &Frame) -> WireError {
    WireError::OutOfTurn { found: frame.body.kind() as u8, due: 0 }
}

fn device_error(phase: Phase, error: impl std::error::Error + Send + Sync + 'static) -> TransferError {
    TransferError::Device { phase, source: Arc::new(error) }
}

/// Of the marker; chunks count from 0.
const MARKER_ID: u64 = 1 << 62;
