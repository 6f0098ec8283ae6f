//! An operation over several pairs of NICs at its requester: the plan, the data of all rails side by side, one
//! acknowledgement. A rail that fails ends the whole; whether it may go again is [`Progress`](super::rails::parent::Progress)'s to say.

use std::{
    ops::Range,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use verbs_transport::fabric::bulk::{BulkFabric, BulkRegion as _};

use super::{
    cache::{Kept, SetNames},
    carry::terms,
    device::RegionOf,
    exchange::{Exchange, Side},
    identity::{Digest, Identity, Incarnation},
    link::{Link, LinkNames},
    local::staging,
    rails::{
        plan::{Plan, Planned, PlannedRail, RAILS_MIN},
        slicing::Slicing,
    },
    requester::{Begun, NotDone, PAUSE, RdmaRequester, device_error, draw, not_connected},
    routes::{Rail, Route, TRIES, pairs},
    staging::Lent,
    talk::{Answer, Talk},
    wire::{Ask, Body, GrantTerms, KeptNames},
};
use crate::{
    Direction, Phase, Profile, Status, TransferError, WireError,
    batch::Slice,
    control::{Opcode, Reply, Request},
    deadline::Deadline,
    memory::Patience,
    tcp::broken,
};

/// An operation over several rails that has failed.
pub(crate) struct Fell {
    pub(crate) not_done: NotDone,
    /// Whose fault it was, as far as that is known here.
    pub(crate) rails: Vec<Rail>,
    /// Nothing has happened, and nothing will of it.
    pub(crate) may_go_again: bool,
}

/// Part of a request: a pair of NICs that was chosen for it, with memory on ours.
pub(super) struct Lane<F: BulkFabric> {
    pub(super) route: Route,
    pub(super) bytes: Range<u64>,
    pub(super) staging: Lent<RegionOf<F>>,
}

/// A lane with its pair of QPs and its grant.
pub(super) struct Running<F: BulkFabric> {
    pub(super) lane: Lane<F>,
    pub(super) link: Link<F>,
    pub(super) exchange: Exchange,
    pub(super) terms: GrantTerms,
    /// Of its bytes, what is posted.
    pub(super) posted: usize,
    pub(super) over: bool,
}

/// An operation that has all its grants.
pub(super) struct Set<'a, F: BulkFabric> {
    pub(super) talk: Talk<'a>,
    pub(super) rails: Vec<Running<F>>,
    pub(super) parent: Exchange,
    pub(super) expires: Instant,
}

/// What was sent, and what the answer will be about.
struct Asked<'a> {
    talk: Talk<'a>,
    request: &'a [u8],
    ask: Vec<u8>,
    identity: Identity,
    sent: Instant,
}

impl<E: Into<NotDone>> From<E> for Fell {
    fn from(error: E) -> Self {
        Self { not_done: error.into(), rails: Vec::new(), may_go_again: true }
    }
}

impl<F: BulkFabric> Lane<F> {
    /// Where its bytes lie within the request's.
    pub(super) fn within(&self) -> Option<Range<usize>> {
        Some(usize::try_from(self.bytes.start).ok()?..usize::try_from(self.bytes.end).ok()?)
    }
}

impl Fell {
    fn by(rail: Rail, not_done: NotDone) -> Self {
        Self { not_done, rails: vec![rail], may_go_again: true }
    }
}

impl<F: BulkFabric> RdmaRequester<F> {
    /// Whether a request is to go over several rails, as far as is known before it is asked.
    pub(crate) fn is_spread(&self, slice: &Slice, tried: &[Rail]) -> bool {
        self.config.spread
            && slice.profile == Profile::Staged
            && self.nics.len() >= RAILS_MIN
            && tried.len() < TRIES
            && Slicing::new(slice.length, slice.direction).is_spread()
            && self.routes.is_wide(slice.peer)
    }

    /// Carries a request out over several rails, none of them among those `tried`. `false`: there are no two, or the peer
    /// does not do that; nothing has happened. What devices may still touch when it fails is held until they cannot.
    pub(crate) fn transfer_spread(&self, slice: &Slice, deadline: Deadline, tried: &[Rail]) -> Result<bool, Fell> {
        let opcode = match slice.direction {
            Direction::Read => Opcode::SlicedRdmaRead,
            Direction::Write => Opcode::SlicedRdmaWrite,
        };
        let (region, offset) = (slice.remote_region, slice.remote_offset);
        let request =
            Request { opcode, epoch: slice.peer.1, region, offset, length: slice.length, profile: slice.profile }
                .encode();
        match self.prepare_set(slice, &request, deadline, tried)? {
            Some(set) => self.carry_set(slice, set).map(|()| true),
            None => Ok(false),
        }
    }

    fn prepare_set<'a>(
        &'a self,
        slice: &Slice,
        request: &'a [u8],
        deadline: Deadline,
        tried: &[Rail],
    ) -> Result<Option<Set<'a, F>>, Fell> {
        let slicing = Slicing::new(slice.length, slice.direction);
        let mut routes = self.routes.spread(&self.known_pairs(slice.peer), tried, slicing);
        if routes.is_empty() && self.routes.table(slice.peer).is_some() {
            return Ok(None);
        }
        let pds: Vec<_> = routes
            .iter()
            .map(|(route, _)| (self.nics[route.pair.rail.nic].device.pd, route.pair.rail.source_pd))
            .collect();
        if let Some(kept) = self.cache.take(slice.peer, &pds).filter(|_| !pds.is_empty()) {
            let mut lanes = self.stage_all(routes, slice, deadline)?;
            if let Some(set) = self.reuse_set(kept, &mut lanes, slice, request, deadline)? {
                return Ok(Some(set));
            }
            routes = lanes.into_iter().map(|lane| (lane.route, lane.bytes)).collect();
        }
        self.set_up_set(slice, request, deadline, routes, (tried, slicing))
    }

    /// Memory for all lanes, with the bytes of a WRITE: one moment's, under the allocation's lock.
    fn stage_all(
        &self,
        routes: Vec<(Route, Range<u64>)>,
        slice: &Slice,
        deadline: Deadline,
    ) -> Result<Vec<Lane<F>>, NotDone> {
        let mut lanes: Vec<Lane<F>> = Vec::new();
        for (route, bytes) in routes {
            let length = usize::try_from(bytes.end - bytes.start).map_err(|_| TransferError::Internal)?;
            let nic = &self.nics[route.pair.rail.nic];
            let staging = staging(&nic.device, &nic.staging, length);
            let staging = staging
                .map_err(|error| NotDone::unavailable(device_error(Phase::Connect, error), Some(Duration::ZERO)))?;
            lanes.push(Lane { route, bytes, staging });
        }
        if slice.direction == Direction::Write {
            let patience = Patience::Until(deadline, &self.stop);
            let copied = slice.local.registration().read(slice.local_place(), patience, |local| {
                lanes.iter().try_for_each(|lane| lane.staging.write(0, local.get(lane.within()?)?).ok())
            });
            let copied: Option<()> = copied.map_err(|denied| broken(denied.into(), Phase::LocalMemory))?;
            copied.ok_or(TransferError::Internal)?;
        }
        Ok(lanes)
    }

    /// Over pairs that are kept. `None` if they are not there after all, and the lanes are as they were.
    fn reuse_set<'a>(
        &'a self,
        kept: Kept<F>,
        lanes: &mut Vec<Lane<F>>,
        slice: &Slice,
        request: &'a [u8],
        deadline: Deadline,
    ) -> Result<Option<Set<'a, F>>, NotDone> {
        let Kept { stream, mut links, set: Some(names) } = kept else { return Ok(None) };
        let Some(first) = links.first().map(|link| link.names) else { return Ok(None) };
        let SetNames { source_link, requester_link, last_generation } = names;
        let ask = Ask {
            requester_epoch: self.epoch,
            request: self.requests.fetch_add(1, Ordering::Relaxed),
            requester_link,
            kept: Some(KeptNames { requester_pd: first.requester_pd, source_pd: first.source_pd, source_link }),
        };
        let talk = Talk { stream, deadline, stop: &self.stop };
        let ask_bytes = ask.encode().to_vec();
        let identity = self.parent_identity(slice, &ask, Digest::of(request, &ask_bytes), source_link);
        let ends = links.iter().map(|link| link.names.requester_link);
        let plan = self.plan(lanes, ends).encode(&identity);
        links.iter_mut().for_each(Link::resume);
        let sent = Instant::now();
        let mut accepted = 0;
        match talk.line().send_all(&[request, &ask_bytes, &plan].concat(), &mut accepted) {
            Ok(()) => self.counters.reused.add(1),
            Err(_) if accepted == 0 => return Ok(None),
            Err(error) => return Err(broken(error, Phase::Request).into()),
        }
        let (planned, answer) = match talk.planned()? {
            Answer::Planned(bytes) => (Planned::decode(&bytes)?, bytes),
            Answer::Reply(Reply { status: Status::CacheMiss, .. }) => return Ok(None),
            Answer::Reply(reply) => return Err(self.refused(&reply, slice.peer).into()),
        };
        let (found, planned) = planned;
        let asked = Asked { talk, request, ask: ask_bytes, identity, sent };
        let parent = asked.parent(found, last_generation, (&plan, &answer))?;
        if planned.rails.len() != links.len() {
            return Err(WireError::Length { found: planned.rails.len() as u64, expected: links.len() as u64 }.into());
        }
        let mut pairs = Vec::new();
        for (link, reserved) in links.into_iter().zip(planned.rails) {
            if link.names.source_link != reserved.source_link {
                return Err(WireError::Foreign { field: "source connection" }.into());
            }
            let last = link.last_generation;
            if reserved.generation <= last {
                return Err(WireError::Generation { found: reserved.generation, last }.into());
            }
            let id = link.names.identity(*parent.identity(), reserved.generation);
            pairs.push((link, Exchange::rail(Side::Requester, id, true)));
        }
        let (talk, sent) = (asked.talk, asked.sent);
        self.granted(talk, std::mem::take(lanes), pairs, (parent, sent), slice).map(Some)
    }

    /// A new control connection, and new pairs of QPs: on the rails that were chosen by what was known, if all of them are
    /// still offered.
    fn set_up_set<'a>(
        &'a self,
        slice: &Slice,
        request: &'a [u8],
        deadline: Deadline,
        routes: Vec<(Route, Range<u64>)>,
        (tried, slicing): (&[Rail], Slicing),
    ) -> Result<Option<Set<'a, F>>, Fell> {
        let Begun { talk, ask, bytes, reply } = self.begin(request, slice.peer, deadline)?;
        let ask_bytes = bytes.to_vec();
        if reply.status == Status::BackendUnavailable {
            // No device there, or no such operation: over one rail it will tell.
            self.routes.narrow(slice.peer, None);
            return Ok(None);
        }
        let offer = talk.offer(reply.length)?;
        self.routes.learn(slice.peer, &offer.paths);
        let Ok(offered) = pairs(&self.ends(), &offer.paths) else { return Ok(None) };
        let same = |(mut route, bytes): (Route, Range<u64>)| {
            route.pair = *offered.iter().find(|pair| pair.rail == route.pair.rail)?;
            Some((route, bytes))
        };
        let kept: Option<Vec<_>> = routes.into_iter().map(same).collect();
        let mut routes = kept.unwrap_or_default();
        if routes.is_empty() {
            routes = self.routes.spread(&offered, tried, slicing);
        }
        if routes.is_empty() {
            return Ok(None);
        }
        // Before anything is reserved at the source.
        let permits = routes.iter().map(|(route, _)| self.permit(&self.nics[route.pair.rail.nic].device));
        let permits: Vec<_> = permits.collect::<Result<_, _>>()?;
        let lanes = self.stage_all(routes, slice, deadline)?;
        let names: Vec<_> = lanes.iter().map(|_| draw()).collect::<Result<_, _>>()?;

        let known = self.parent_identity(slice, &ask, Digest::of(request, &ask_bytes), offer.source_link);
        let identity = Identity { generation: offer.generation, ..known };
        let plan = self.plan(&lanes, names.iter().copied()).encode(&identity);
        talk.send(&plan, Phase::Request)?;
        let answer = match talk.planned()? {
            Answer::Planned(bytes) => bytes,
            Answer::Reply(reply) => return Err(self.not_admitted(&reply, slice.peer).into()),
        };
        let (found, planned) = Planned::decode(&answer)?;
        let asked = Asked { talk, request, ask: ask_bytes, identity, sent: Instant::now() };
        let parent = asked.parent(found, 0, (&plan, &answer))?;
        if planned.rails.len() != lanes.len() {
            return Err(WireError::Length { found: planned.rails.len() as u64, expected: lanes.len() as u64 }.into());
        }
        let mut pairs = Vec::new();
        for (((lane, requester_link), permit), reserved) in lanes.iter().zip(names).zip(permits).zip(planned.rails) {
            let nic = &self.nics[lane.route.pair.rail.nic];
            let source_link = reserved.source_link;
            let names = LinkNames {
                source_pd: lane.route.pair.peer.pd,
                requester_pd: nic.device.pd,
                source_link,
                requester_link,
            };
            let link = Link::new(&nic.device, permit, names, lane.route.pair.agreed).map_err(|error| {
                Fell::by(lane.route.pair.rail, NotDone::unavailable(device_error(Phase::Connect, error), Some(PAUSE)))
            })?;
            let id = names.identity(*parent.identity(), reserved.generation);
            pairs.push((link, Exchange::rail(Side::Requester, id, false)));
        }
        let talk = asked.talk;
        self.connect_set(&talk, &lanes, &mut pairs, slice)?;
        let sent = Instant::now();
        say_all(&talk, &mut pairs, |_| Body::Connected)?;
        Ok(Some(self.granted(talk, lanes, pairs, (parent, sent), slice)?))
    }

    /// All QPs to RTS, side by side.
    fn connect_set(
        &self,
        talk: &Talk<'_>,
        lanes: &[Lane<F>],
        pairs: &mut [(Link<F>, Exchange)],
        slice: &Slice,
    ) -> Result<(), Fell> {
        say_all(talk, pairs, |link| Body::RequesterQp(link.endpoint()))?;
        let mut under_way = Vec::new();
        for ((link, exchange), lane) in pairs.iter_mut().zip(lanes) {
            let Body::SourceQp(remote) = self.admitted(talk, exchange, slice.peer)? else {
                return Err(TransferError::Internal.into());
            };
            under_way.push(link.begin_connect(remote, &lane.route.pair.peer, &self.config));
        }
        for (((link, _), lane), connecting) in pairs.iter_mut().zip(lanes).zip(under_way) {
            let connected = link.end_connect(connecting, talk.deadline);
            connected.map_err(|error| Fell::by(lane.route.pair.rail, not_connected(error)))?;
        }
        Ok(())
    }

    /// Hears all grants.
    fn granted<'a>(
        &'a self,
        talk: Talk<'a>,
        lanes: Vec<Lane<F>>,
        pairs: Vec<(Link<F>, Exchange)>,
        (parent, sent): (Exchange, Instant),
        slice: &Slice,
    ) -> Result<Set<'a, F>, NotDone> {
        let (mut rails, mut valid) = (Vec::new(), u32::MAX);
        for (lane, (mut link, mut exchange)) in lanes.into_iter().zip(pairs) {
            let body = self.admitted(&talk, &mut exchange, slice.peer)?;
            let terms = terms(body, lane.bytes.end - lane.bytes.start, link.device.has_windows())?;
            valid = valid.min(terms.valid_ms);
            link.last_generation = exchange.identity().generation;
            rails.push(Running { lane, link, exchange, terms, posted: 0, over: false });
        }
        Ok(Set { talk, rails, parent, expires: sent + Duration::from_millis(valid.into()) })
    }

    fn plan(&self, lanes: &[Lane<F>], names: impl Iterator<Item = Incarnation>) -> Plan {
        let rail = |(lane, requester_link): (&Lane<F>, Incarnation)| PlannedRail {
            source_pd: lane.route.pair.peer.pd,
            requester_link,
            bytes: lane.bytes.clone(),
            end: self.nics[lane.route.pair.rail.nic].device.end(),
        };
        Plan { rails: lanes.iter().zip(names).map(rail).collect() }
    }

    /// What the plan is about. Of protection domains it names none: there are several.
    fn parent_identity(&self, slice: &Slice, ask: &Ask, digest: Digest, source_link: Incarnation) -> Identity {
        Identity {
            source_epoch: slice.peer.1.to_bytes(),
            requester_epoch: self.epoch,
            source_link,
            requester_link: ask.requester_link,
            request: ask.request,
            digest,
            ..Identity::default()
        }
    }
}

impl Asked<'_> {
    /// The parent's names, if the answer is about what was asked.
    fn parent(&self, found: Identity, last: u64, (plan, planned): (&[u8], &[u8])) -> Result<Exchange, WireError> {
        let mut known = self.identity;
        if known.generation == 0 {
            if found.generation <= last {
                return Err(WireError::Generation { found: found.generation, last });
            }
            known.generation = found.generation;
        }
        found.check(&known)?;
        let digest = Digest::over(&[self.request, &self.ask, plan, planned]);
        Ok(Exchange::parent(Side::Requester, Identity { digest, ..known }))
    }
}

/// The same frame of all rails, in one write.
fn say_all<F: BulkFabric>(
    talk: &Talk<'_>,
    pairs: &mut [(Link<F>, Exchange)],
    body: impl Fn(&Link<F>) -> Body,
) -> Result<(), TransferError> {
    let mut frames = Vec::new();
    for (link, exchange) in pairs {
        frames.extend(exchange.say(body(link))?.encode());
    }
    talk.send(&frames, Phase::Request)
}
