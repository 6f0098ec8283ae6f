//! An operation over several pairs of QPs at its source: one plan, a grant and a receipt for each rail, one commit and
//! one acknowledgement for all.

use std::sync::Arc;

use verbs_transport::fabric::bulk::BulkFabric;

use super::{
    exchange::{Exchange, Side},
    flight::{Flight, Owners},
    guard::Guard,
    identity::{Digest, Identity, Incarnation},
    link::{Link, LinkNames},
    path::PathEnd,
    rails::{
        parent::{Event, Step},
        plan::{PLAN_KIND, Plan, Planned, PlannedRail, ReservedRail},
    },
    source::{RdmaSource, Stop, draw, due, hear, not_connected, out_of_place, say},
    wire::{Body, HEAD_BYTES, KeptNames},
};
use crate::{
    Direction, Profile, Status, WireError,
    budget::Charge,
    control::{Access, Admitted, PLAN_BYTES, check_head},
    tcp::Line,
};

/// What a peer wants.
pub(super) struct SetCall<'a> {
    pub(super) line: Line<'a>,
    /// Request and ask.
    pub(super) asked: [&'a [u8]; 2],
    /// Empty if it is to come.
    pub(super) plan: &'a [u8],
    pub(super) direction: Direction,
    pub(super) names: Option<KeptNames>,
    pub(super) identity: Identity,
}

/// Pairs of QPs that wait for the next operation over all of them.
pub(super) struct KeptSet<F: BulkFabric> {
    source_link: Incarnation,
    requester_link: Incarnation,
    links: Vec<Link<F>>,
}

/// One rail that has all it takes.
struct Rail<F: BulkFabric> {
    link: Link<F>,
    owners: Owners<F>,
    exchange: Exchange,
    /// The other end.
    end: PathEnd,
}

/// All rails of a plan, what is said for them together, and the answer to the plan.
struct Reserved<F: BulkFabric> {
    rails: Vec<Rail<F>>,
    parent: Exchange,
    planned: Vec<u8>,
    /// Their QPs are to be connected.
    fresh: bool,
}

/// A plan that was heard and is sound, as it came.
struct Heard {
    plan: Plan,
    bytes: Vec<u8>,
}

impl<F: BulkFabric> RdmaSource<F> {
    /// From the request to READY, when the pairs may carry the next one.
    pub(super) fn operate_set(
        &self,
        mut call: SetCall<'_>,
        access: Access,
        charge: Charge,
        inside: Admitted,
        kept: Option<Box<KeptSet<F>>>,
    ) -> Result<KeptSet<F>, Stop> {
        let (line, length) = (call.line, access.length);
        let (heard, places) = if let Some(names) = call.names {
            // The requester learns its generation by the answer.
            let unknown = Identity { source_link: names.source_link, generation: 0, ..call.identity };
            call.identity.source_link = names.source_link;
            let heard = Heard::of(call.plan.to_vec(), &unknown, length)?;
            let links = resume(kept, names, &call.identity, &heard.plan)?;
            (heard, Places::Kept(links))
        } else {
            drop(kept);
            let (devices, paths) = self.offer(line, &mut call.identity)?;
            let heard = Heard::of(receive_plan(line)?, &call.identity, length)?;
            let place = |rail: &PlannedRail| {
                let at = paths.iter().position(|path| path.pd == rail.source_pd);
                at.map(|at| (Arc::clone(devices[at]), paths[at]))
            };
            let places: Option<Vec<_>> = heard.plan.rails.iter().map(place).collect();
            (heard, Places::New(places.ok_or(WireError::Foreign { field: "source protection domain" })?))
        };
        // One was taken with the request.
        let more = self.grants.take(heard.plan.rails.len() as u64 - 1, 0);
        let charges = vec![charge, more.map_err(|_| Stop::Refuse(Status::Exhausted))?];
        let guard = Guard::new(heard.plan.rails.len(), access, charges, inside).counted(&self.parents);
        let guard = Arc::new(guard);
        let reserved = self.reserve_all(&call, &heard, places, &guard).inspect_err(|_| {
            // Those that had room are gone by now.
            guard.on(Event::NoRoom);
        })?;
        let ended = self.carry_out(&call, reserved, &guard);
        ended.inspect_err(|_| {
            guard.on(Event::Lost);
        })
    }

    /// The receive plans of all rails, or of none; and the answer that says so.
    fn reserve_all(
        &self,
        call: &SetCall<'_>,
        Heard { plan, bytes }: &Heard,
        places: Places<F>,
        guard: &Arc<Guard>,
    ) -> Result<Reserved<F>, Stop> {
        let size = |rail: &PlannedRail| (rail.bytes.end - rail.bytes.start, Profile::Staged);
        let (mut reserved, mut step) = (Vec::new(), Step::Wait);
        let mut room = |link: Link<F>, staging, rail: &PlannedRail, at: usize| -> Result<(), Stop> {
            let at = u8::try_from(at).map_err(|_| out_of_place())?;
            let (guard, next) = guard.room(at);
            step = next;
            reserved.push((
                link,
                Owners { staging, bytes: rail.bytes.clone(), _guard: guard },
                self.next_generation(),
                rail.end,
            ));
            Ok(())
        };
        let kept = matches!(places, Places::Kept(_));
        match places {
            Places::Kept(links) => {
                for (at, (link, rail)) in links.into_iter().zip(&plan.rails).enumerate() {
                    let staging = self.stage(&link, rail.bytes.end - rail.bytes.start, Profile::Staged)?;
                    room(link, staging, rail, at)?;
                }
            }
            Places::New(places) => {
                for (at, ((device, own), rail)) in places.iter().zip(&plan.rails).enumerate() {
                    let names = LinkNames {
                        source_pd: own.pd,
                        requester_pd: rail.end.pd,
                        source_link: draw()?,
                        requester_link: rail.requester_link,
                    };
                    let (link, staging) = self.reserve(device, (own, &rail.end), names, size(rail))?;
                    room(link, staging, rail, at)?;
                }
            }
        }
        due(step, Step::Admit)?;
        let answer = |(link, _, generation, _): &(Link<F>, _, u64, _)| ReservedRail {
            source_link: link.names.source_link,
            generation: *generation,
        };
        let planned = Planned { rails: reserved.iter().map(answer).collect() }.encode(&call.identity);
        let digest = Digest::over(&[call.asked[0], call.asked[1], bytes, &planned]);
        let parent = Identity { digest, ..call.identity };
        let rail = |(mut link, owners, generation, end): (Link<F>, Owners<F>, u64, PathEnd)| {
            link.last_generation = generation;
            let exchange = Exchange::rail(Side::Source, link.names.identity(parent, generation), kept);
            Rail { link, owners, exchange, end }
        };
        let rails = reserved.into_iter().map(rail).collect();
        Ok(Reserved { rails, parent: Exchange::parent(Side::Source, parent), planned, fresh: !kept })
    }

    fn carry_out(&self, call: &SetCall<'_>, reserved: Reserved<F>, guard: &Guard) -> Result<KeptSet<F>, Stop> {
        let (line, direction) = (call.line, call.direction);
        let Reserved { mut rails, mut parent, planned: mut grants, fresh } = reserved;
        if fresh {
            line.send_all(&std::mem::take(&mut grants), &mut 0)?;
            self.connect_all(line, &mut rails)?;
        }
        let (mut exchanges, mut flights) = (Vec::new(), Vec::new());
        for Rail { link, owners, exchange, .. } in rails {
            flights.push(Flight::new(link, exchange.identity().generation, owners));
            exchanges.push(exchange);
        }
        if direction == Direction::Read {
            let parts: Vec<_> = flights.iter().filter_map(Flight::part).collect();
            guard.fill(&parts, line.patience())?;
        } else {
            flights.iter().try_for_each(Flight::clean)?;
        }
        let mut step = Step::Wait;
        for ((flight, exchange), at) in flights.iter_mut().zip(&mut exchanges).zip(0..) {
            let terms = flight.bind(line.deadline, direction)?;
            step = guard.on(Event::Bound(at));
            grants.extend(exchange.say(Body::Grant(terms))?.encode());
        }
        due(step, Step::Publish)?;
        line.send_all(&grants, &mut 0)?;
        for exchange in &mut exchanges {
            hear(line, exchange)?;
        }
        let mut settled = Vec::new();
        for (flight, at) in flights.into_iter().zip(0..) {
            settled.push(flight.settle(line.deadline)?);
            step = guard.on(Event::Receipt(at));
        }
        due(step, Step::Commit)?;
        if direction == Direction::Write {
            let parts: Vec<_> = settled.iter().map(|(_, owners)| owners.part()).collect();
            guard.commit(&parts, line.patience())?;
        }
        due(guard.on(Event::Committed), Step::Acknowledge)?;
        let mut links: Vec<_> = settled.into_iter().map(|(link, _)| link).collect();
        say(line, &mut parent, Body::Ack)?;
        hear(line, &mut parent)?;
        debug_assert!(parent.is_over());
        links.iter_mut().for_each(Link::park);
        let Identity { source_link, requester_link, .. } = *parent.identity();
        Ok(KeptSet { source_link, requester_link, links })
    }

    /// All QPs to RTS, side by side.
    fn connect_all(&self, line: Line<'_>, rails: &mut [Rail<F>]) -> Result<(), Stop> {
        let mut under_way = Vec::new();
        for Rail { link, exchange, end, .. } in &mut *rails {
            let Body::RequesterQp(remote) = hear(line, exchange)? else { return Err(out_of_place()) };
            under_way.push(link.begin_connect(remote, end, &self.config));
        }
        let mut own = Vec::new();
        for (Rail { link, exchange, .. }, connecting) in rails.iter_mut().zip(under_way) {
            link.end_connect(connecting, line.deadline).map_err(not_connected)?;
            own.extend(exchange.say(Body::SourceQp(link.endpoint()))?.encode());
        }
        line.send_all(&own, &mut 0)?;
        rails.iter_mut().try_for_each(|rail| hear(line, &mut rail.exchange).map(drop))
    }
}

/// Where rails come from.
enum Places<F: BulkFabric> {
    Kept(Vec<Link<F>>),
    New(Vec<(Arc<super::device::Device<F>>, PathEnd)>),
}

impl Heard {
    /// A plan for all bytes of that operation.
    fn of(bytes: Vec<u8>, about: &Identity, length: u64) -> Result<Self, Stop> {
        let (identity, plan) = Plan::decode(&bytes)?;
        identity.check(about)?;
        if plan.length() != length {
            return Err(WireError::Length { found: plan.length(), expected: length }.into());
        }
        Ok(Self { plan, bytes })
    }
}

/// The pairs that the requester named, if all are still here and as they were left.
fn resume<F: BulkFabric>(
    set: Option<Box<KeptSet<F>>>,
    names: KeptNames,
    identity: &Identity,
    plan: &Plan,
) -> Result<Vec<Link<F>>, Stop> {
    let is_named = |set: &KeptSet<F>| {
        let pds = set.links.first().map(|link| (link.names.requester_pd, link.names.source_pd));
        let usable = set.links.iter().all(Link::is_usable);
        let links = (set.source_link, set.requester_link) == (names.source_link, identity.requester_link);
        links && usable && pds == Some((names.requester_pd, names.source_pd))
    };
    let set = set.filter(|set| is_named(set)).ok_or(Stop::Refuse(Status::CacheMiss))?;
    let same = |link: &Link<F>, rail: &PlannedRail| {
        let LinkNames { source_pd, requester_pd, requester_link, .. } = link.names;
        (source_pd, requester_pd, requester_link) == (rail.source_pd, rail.end.pd, rail.requester_link)
    };
    let mut links = set.links;
    if links.len() != plan.rails.len() || !links.iter().zip(&plan.rails).all(|(link, rail)| same(link, rail)) {
        return Err(WireError::Foreign { field: "kept connection" }.into());
    }
    links.iter_mut().for_each(Link::resume);
    Ok(links)
}

fn receive_plan(line: Line<'_>) -> Result<Vec<u8>, Stop> {
    let mut bytes = vec![0; PLAN_BYTES];
    let (head, rest) = bytes.split_at_mut(HEAD_BYTES);
    line.recv_exact(head)?;
    // Another frame is shorter.
    let found = check_head(head)?;
    if found != PLAN_KIND {
        return Err(WireError::OutOfTurn { found, due: PLAN_KIND }.into());
    }
    line.recv_exact(rest)?;
    Ok(bytes)
}
