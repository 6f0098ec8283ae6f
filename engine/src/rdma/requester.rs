//! The requester's side of an operation: on the caller's thread, from the request to READY.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use verbs_transport::fabric::bulk::{BulkFabric, BulkRegion as _};

use super::{
    RdmaConfig,
    cache::{Cache, Kept, Peer},
    carry::terms,
    device::{ConnectError, Device, RegionOf},
    exchange::{Exchange, Side},
    identity::{Digest, Identity, Incarnation},
    link::{Link, LinkNames},
    local::{LocalMemory, NoMemory},
    routes::{OwnEnd, Pair, Rail, Route, Routes, TRIES, pairs},
    staging::Pool,
    talk::{Said, Talk},
    wire::{ASK_BYTES, Ask, Body, Frame, GrantTerms, KeptNames},
};
use crate::{
    Direction, Phase, Status, TransferError, WireError,
    batch::Slice,
    budget::Charge,
    control::{Opcode, Reply, Request},
    deadline::Deadline,
    error::Failure,
    memory::Patience,
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
pub(super) const PAUSE: Duration = Duration::from_secs(30);

/// An idle QP has nothing to drain.
const BURIAL: Duration = Duration::from_millis(500);

impl NotDone {
    pub(super) fn unavailable(error: TransferError, again_after: Option<Duration>) -> Self {
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
    memory: LocalMemory<F>,
    route: Route,
}

/// An operation that has failed.
pub(crate) struct Lost {
    pub(crate) failure: Failure,
    /// The source was not told that all is done: what has no effect may be tried again.
    pub(crate) before_done: bool,
}

/// An operation on a new control connection that was answered: with an offer to come, or that there is no device.
pub(super) struct Begun<'a> {
    pub(super) talk: Talk<'a>,
    pub(super) ask: Ask,
    /// It, as it was sent.
    pub(super) bytes: [u8; ASK_BYTES],
    pub(super) reply: Reply,
}

/// An operation that has its grant.
pub(super) struct Granted<'a, F: BulkFabric> {
    pub(super) talk: Talk<'a>,
    pub(super) link: Link<F>,
    pub(super) exchange: Exchange,
    pub(super) terms: GrantTerms,
    pub(super) expires: Instant,
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
        let (epoch, length, profile) = (slice.peer.1, slice.length, slice.profile);
        let request = Request { opcode, epoch, region, offset, length, profile }.encode();
        let known = self.known_pairs(slice.peer);
        let mut route = self.routes.pick(&known, tried, slice.length);
        if let Some(taken) = route.take() {
            tried.push(taken.pair.rail);
            let nic = &self.nics[taken.pair.rail.nic];
            if let Some(kept) = self.cache.take(slice.peer, &[(nic.device.pd, taken.pair.rail.source_pd)]) {
                let memory = self.memory(nic, slice, deadline)?;
                if let Some(granted) = self.reuse(kept, &request, slice, deadline)? {
                    return Ok(Prepared { granted, memory, route: taken });
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
    pub(super) fn ends(&self) -> Vec<OwnEnd> {
        let all = || self.nics.iter().enumerate().map(|(at, nic)| (at, &nic.device));
        let mut ends: Vec<_> = all().filter(|(_, device)| device.is_up()).collect();
        if ends.is_empty() {
            ends = all().collect();
        }
        let own =
            |(nic, device): (usize, &Arc<Device<F>>)| OwnEnd { nic, end: device.end(), is_remote: device.is_remote };
        ends.into_iter().map(own).collect()
    }

    /// By what the peer has offered last.
    pub(super) fn known_pairs(&self, peer: Peer) -> Vec<Pair> {
        let table = self.routes.table(peer);
        table.and_then(|table| pairs(&self.ends(), &table).ok()).unwrap_or_default()
    }

    /// Carries it out. What a device may still touch when it fails, the local memory included, is held until it cannot.
    pub(crate) fn carry(&self, slice: Slice, prepared: Prepared<'_, F>) -> Result<(), Lost> {
        let Prepared { mut granted, memory, route } = prepared;
        let moved = self.move_data(&mut granted, &slice, memory.region(), &route);
        let Granted { talk, mut link, exchange, .. } = granted;
        let deadline = talk.deadline;
        if let Err(error) = moved {
            let (effect, before_done) = (exchange.effect(slice.direction), exchange.is_before_done());
            // The source learns of it by this, and takes its own way out.
            drop(talk);
            let local_changed = slice.may_change_local() && exchange.has_posted();
            let (region, staging) = memory.into_parts();
            link.condemn(None, region, Box::new((staging, slice)));
            return Err(Lost { failure: Failure { error, effect, local_changed }, before_done });
        }
        route.succeeded();
        link.last_generation = exchange.identity().generation;
        let staging = match memory.settle() {
            Ok(staging) => staging,
            // All of it is done, but for the device.
            Err(region) => {
                link.condemn(None, Some(region), Box::new(slice));
                return Ok(());
            }
        };
        if exchange.is_over() {
            self.cache.put(slice.peer, Kept { stream: talk.stream, links: vec![link], set: None });
        }
        if let (Direction::Read, Some(staging)) = (slice.direction, staging) {
            let (local, patience) = (slice.local.registration(), Patience::Until(deadline, &self.stop));
            let copied = local.write(slice.local_place(), patience, |into| staging.read(0, into).is_ok());
            let error = match copied {
                Ok(true) => return Ok(()),
                Ok(false) => TransferError::Internal,
                Err(denied) => broken(denied.into(), Phase::LocalMemory),
            };
            return Err(Lost { failure: Failure::harmless(error), before_done: false });
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
        let Kept { stream, mut links, .. } = kept;
        let Some(mut link) = links.pop() else { return Ok(None) };
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
        let terms = terms(exchange.hear(&frame)?, slice.length, link.device.has_windows())?;
        let expires = sent + Duration::from_millis(terms.valid_ms.into());
        Ok(Some(Granted { talk, link, exchange, terms, expires }))
    }

    /// A request and what is asked along, on a new control connection, up to the first reply.
    pub(super) fn begin(&self, request: &[u8], peer: Peer, deadline: Deadline) -> Result<Begun<'_>, TransferError> {
        let ask = Ask {
            requester_epoch: self.epoch,
            request: self.requests.fetch_add(1, Ordering::Relaxed),
            requester_link: draw()?,
            kept: None,
        };
        self.counters.dialled.add(1);
        let stream = dial(peer.0, self.buffers, deadline, &self.stop)?;
        let talk = Talk { stream, deadline, stop: &self.stop };
        let bytes = ask.encode();
        talk.send(&[request, &bytes].concat(), Phase::Request)?;
        let reply = match talk.read(Phase::Reply)? {
            Said::Reply(reply) => reply,
            Said::Frame(frame) => return Err(out_of_turn(&frame).into()),
        };
        match reply.status {
            Status::Success if reply.epoch == peer.1 => {}
            Status::Success => return Err(WireError::ForeignEpoch { actual: reply.epoch }.into()),
            Status::BackendUnavailable => {}
            _ => return Err(self.refused(&reply, peer)),
        }
        Ok(Begun { talk, ask, bytes, reply })
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
        let Begun { talk, ask, bytes, reply } = self.begin(request, slice.peer, deadline)?;
        let requester_link = ask.requester_link;
        if reply.status == Status::BackendUnavailable {
            // No device there, for as long as it lives.
            return Err(NotDone::unavailable(self.refused(&reply, slice.peer), None));
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
        let memory = self.memory(nic, slice, deadline)?;
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
        link.connect(remote, &peer, &self.config, deadline).map_err(not_connected)?;
        let sent = Instant::now();
        talk.say(&mut exchange, Body::Connected)?;
        let terms = terms(self.admitted(&talk, &mut exchange, slice.peer)?, slice.length, nic.device.has_windows())?;
        let expires = sent + Duration::from_millis(terms.valid_ms.into());
        Ok(Prepared { granted: Granted { talk, link, exchange, terms, expires }, memory, route })
    }

    /// Memory on that NIC, with the bytes of a WRITE.
    fn memory(&self, nic: &RequesterNic<F>, slice: &Slice, deadline: Deadline) -> Result<LocalMemory<F>, NotDone> {
        let patience = Patience::Until(deadline, &self.stop);
        LocalMemory::take(&nic.device, &nic.staging, slice, patience).map_err(|error| match error {
            NoMemory::Refused(error) => NotDone::unavailable(device_error(Phase::Connect, error), Some(Duration::ZERO)),
            NoMemory::Failed(error) => error.into(),
        })
    }

    /// Room for one more pair; the one that has been idle longest makes way if need be.
    pub(super) fn permit(&self, device: &Device<F>) -> Result<Charge, NotDone> {
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
    pub(super) fn admitted(&self, talk: &Talk<'_>, exchange: &mut Exchange, peer: Peer) -> Result<Body, NotDone> {
        match talk.read(Phase::Reply)? {
            Said::Frame(frame) => Ok(exchange.hear(&frame)?),
            Said::Reply(reply) => Err(self.not_admitted(&reply, peer)),
        }
    }

    /// A refusal of the source's during the set-up.
    pub(super) fn not_admitted(&self, reply: &Reply, peer: Peer) -> NotDone {
        let pause = match reply.status {
            Status::Exhausted => Duration::ZERO,
            Status::BackendUnavailable | Status::BackendError => PAUSE,
            _ => return self.refused(reply, peer).into(),
        };
        NotDone::unavailable(self.refused(reply, peer), Some(pause))
    }

    pub(super) fn refused(&self, reply: &Reply, peer: Peer) -> TransferError {
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

pub(super) fn out_of_turn(frame: &Frame) -> WireError {
    WireError::OutOfTurn { found: frame.body.kind() as u8, due: 0 }
}

pub(super) fn not_connected(error: ConnectError) -> NotDone {
    match error {
        ConnectError::Failed(error) => NotDone::unavailable(device_error(Phase::Connect, error), Some(PAUSE)),
        ConnectError::TimedOut => TransferError::TimedOut { phase: Phase::Connect }.into(),
        ConnectError::Stopped => TransferError::Stopped.into(),
    }
}

pub(super) fn draw() -> Result<Incarnation, TransferError> {
    Incarnation::draw().map_err(|error| device_error(Phase::Connect, error))
}

pub(super) fn device_error(phase: Phase, error: impl std::error::Error + Send + Sync + 'static) -> TransferError {
    TransferError::Device { phase, source: Arc::new(error) }
}
