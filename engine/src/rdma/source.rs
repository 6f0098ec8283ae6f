//! The source's side of an operation: on one of its workers, from the request to READY.
//!
//! Only here is anything granted, after the checks of this very request, for its very bytes, once.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use verbs_transport::fabric::bulk::{Access as Rights, Arena, BulkFabric, BulkPort as _, MemoryOwner as _};

use super::{
    RdmaConfig,
    device::{ConnectError, Device, Gauge, RegionOf},
    exchange::{Exchange, Side},
    flight::{Flight, Owners, Staging},
    grant::Form,
    guard::Guard,
    identity::{Digest, Identity, Incarnation},
    link::{Link, LinkNames},
    path::PathEnd,
    rails::parent::{Event, Step},
    spread_source::SetCall,
    staging::{Pool, StageError},
    wire::{Ask, Body, Frame, HEAD_BYTES, KeptNames, Offer},
};
use crate::{
    Direction, Profile, Status, WireError,
    budget::Budget,
    control::{DeviceCall, DeviceSource, Reply},
    tcp::{Line, LineError},
};

/// A NIC of the source's, with memory that is registered there.
pub(crate) struct SourceNic<F: BulkFabric> {
    pub(crate) device: Arc<Device<F>>,
    pub(crate) windowed: Arc<Pool<RegionOf<F>>>,
}

/// What a source grants from.
pub(crate) struct RdmaSource<F: BulkFabric> {
    /// At least one.
    pub(crate) nics: Vec<SourceNic<F>>,
    pub(crate) config: RdmaConfig,
    pub(crate) epoch: [u8; 16],
    pub(crate) grants: Arc<Budget>,
    pub(crate) plain: Arc<Pool<Arc<Arena>>>,
    /// Requests over several pairs.
    pub(crate) parents: Arc<Gauge>,
    /// Of grants, over the engine's life. The first is 1.
    generations: AtomicU64,
}

/// Devices, and their ends of the paths that a peer was told of.
pub(super) type Offered<'a, F> = (Vec<&'a Arc<Device<F>>>, Vec<PathEnd>);

/// Why an operation ends early.
pub(super) enum Stop {
    /// The peer is told, and the connection closed.
    Refuse(Status),
    /// There is nobody to tell.
    Line(LineError),
}

impl From<LineError> for Stop {
    fn from(error: LineError) -> Self {
        Self::Line(error)
    }
}

impl From<WireError> for Stop {
    fn from(error: WireError) -> Self {
        tracing::debug!(%error, "a peer breaks the protocol of RDMA operations; its connection is closed");
        Self::Refuse(Status::ProtocolError)
    }
}

impl<F: BulkFabric> DeviceSource for RdmaSource<F> {
    fn serve(&self, call: DeviceCall<'_>) -> Result<Result<(), Status>, LineError> {
        match self.operate(call) {
            Ok(()) => Ok(Ok(())),
            Err(Stop::Refuse(status)) => Ok(Err(status)),
            Err(Stop::Line(error)) => Err(error),
        }
    }
}

impl<F: BulkFabric> RdmaSource<F> {
    pub(crate) fn new(devices: &[Arc<Device<F>>], config: &RdmaConfig, epoch: [u8; 16]) -> Self {
        let budget =
            Budget::new(("max_grants", u64::from(config.max_grants)), ("max_grant_bytes", config.max_grant_bytes));
        // What is kept is divided: each NIC's regions are its own.
        let keep = config.kept_staging_bytes / devices.len().max(1) as u64;
        let nic = |device: &Arc<Device<F>>| SourceNic { device: Arc::clone(device), windowed: Pool::new(keep) };
        Self {
            nics: devices.iter().map(nic).collect(),
            config: config.clone(),
            epoch,
            grants: budget,
            plain: Pool::new(config.kept_staging_bytes),
            parents: Arc::default(),
            generations: AtomicU64::new(1),
        }
    }

    fn operate(&self, call: DeviceCall<'_>) -> Result<(), Stop> {
        let DeviceCall { line, request, ask: ask_bytes, plan, direction, sliced, access, inside, kept } = call;
        let ask = Ask::decode(ask_bytes)?;
        let charge = self.grants.take(1, access.length).map_err(|_| Stop::Refuse(Status::Exhausted))?;
        let identity = Identity {
            source_epoch: self.epoch,
            requester_epoch: ask.requester_epoch,
            requester_link: ask.requester_link,
            request: ask.request,
            digest: Digest::of(request, ask_bytes),
            generation: self.next_generation(),
            ..Identity::default()
        };
        // Taken out: unless all ends well it does not come back.
        let kept_pair = kept.take();
        if sliced {
            let call = SetCall { line, asked: [request, ask_bytes], plan, direction, names: ask.kept, identity };
            let set =
                self.operate_set(call, access, charge, inside, kept_pair.and_then(|kept| kept.downcast().ok()))?;
            *kept = Some(Box::new(set) as Box<dyn Any + Send>);
            return Ok(());
        }
        let link = kept_pair.and_then(|kept| kept.downcast::<Link<F>>().ok()).map(|link| *link);
        let (bytes, profile) = (0..access.length, access.profile);
        let guard = Arc::new(Guard::new(1, access, vec![charge], inside));
        let (mut link, mut exchange, owners) = if let Some(names) = ask.kept {
            let (link, exchange) = resume(link, names, identity)?;
            let staging = self.stage(&link, bytes.end, profile)?;
            let (guard, step) = guard.room(0);
            due(step, Step::Admit)?;
            (link, exchange, Owners { staging, bytes, _guard: guard })
        } else {
            drop(link);
            self.set_up(line, identity, (bytes.end, profile), &guard)?
        };
        link.last_generation = identity.generation;
        let mut flight = Flight::new(link, identity.generation, owners);
        match (profile, direction, flight.part()) {
            (Profile::Staged, Direction::Read, Some(part)) => guard.fill(&[part], line.patience())?,
            (Profile::Staged, ..) => flight.clean()?,
            (Profile::Direct, ..) => flight.take_range(guard.lend(direction, line.patience())?)?,
        }
        let terms = flight.bind(line.deadline, direction)?;
        due(guard.on(Event::Bound(0)), Step::Publish)?;
        say(line, &mut exchange, Body::Grant(terms))?;
        hear(line, &mut exchange)?;
        let (mut link, owners) = flight.settle(line.deadline)?;
        due(guard.on(Event::Receipt(0)), Step::Commit)?;
        if (profile, direction) == (Profile::Staged, Direction::Write) {
            guard.commit(&[owners.part()], line.patience())?;
        }
        due(guard.on(Event::Committed), Step::Acknowledge)?;
        drop(owners);
        say(line, &mut exchange, Body::Ack)?;
        hear(line, &mut exchange)?;
        debug_assert!(exchange.is_over());
        link.park();
        *kept = Some(Box::new(link) as Box<dyn Any + Send>);
        Ok(())
    }

    pub(super) fn next_generation(&self) -> u64 {
        self.generations.fetch_add(1, Ordering::Relaxed)
    }

    /// Those that are up; if none is, all: the failure tells what is wrong.
    pub(super) fn offered(&self) -> Vec<&Arc<Device<F>>> {
        let all = || self.nics.iter().map(|nic| &nic.device);
        let up: Vec<_> = all().filter(|device| device.is_up()).collect();
        if up.is_empty() { all().collect() } else { up }
    }

    /// Memory for so many bytes, behind that pair; none for a direct operation.
    pub(super) fn stage(&self, link: &Link<F>, length: u64, profile: Profile) -> Result<Staging<F>, Stop> {
        if profile == Profile::Direct {
            return Ok(Staging::Direct(None));
        }
        let bytes = usize::try_from(length).map_err(|_| Stop::Refuse(Status::Exhausted))?;
        // Whoever is at the other end of a pair may see what that pair has moved before.
        let user = link.names.source_link;
        let staged = match link.form {
            Form::Registration => self.plain.take(bytes, user, Ok).map(Staging::Plain),
            Form::Window => {
                let make = |arena: Arc<Arena>| {
                    let bytes = arena.len();
                    let rights = Rights::WINDOWS.and(Rights::DESTINATION);
                    link.device.port.register(arena, 0..bytes, rights).map_err(StageError::Register)
                };
                let nic = self.nics.iter().find(|nic| Arc::ptr_eq(&nic.device, &link.device));
                let nic = nic.ok_or(Stop::Refuse(Status::InternalError))?;
                nic.windowed.take(bytes, user, make).map(Staging::Windowed)
            }
        };
        staged.map_err(|error| {
            tracing::warn!(%error, bytes, "no memory to stage an operation");
            Stop::Refuse(Status::Exhausted)
        })
    }

    /// Tells the paths that there are, under a name for the connection.
    pub(super) fn offer(&self, line: Line<'_>, identity: &mut Identity) -> Result<Offered<'_, F>, Stop> {
        identity.source_link = draw()?;
        let devices = self.offered();
        let paths: Vec<PathEnd> = devices.iter().map(|device| device.end()).collect();
        let offer = Offer { source_link: identity.source_link, generation: identity.generation, paths: paths.clone() };
        let payload = offer.encode();
        let epoch = crate::Epoch::from_bytes(self.epoch);
        let mut frame = Reply { status: Status::Success, epoch, length: payload.len() as u64 }.encode().to_vec();
        frame.extend_from_slice(&payload);
        line.send_all(&frame, &mut 0)?;
        Ok((devices, paths))
    }

    /// The whole receive plan of one pair, before the requester makes anything: a QP, with it its receives, and memory.
    pub(super) fn reserve(
        &self,
        device: &Arc<Device<F>>,
        (own, peer): (&PathEnd, &PathEnd),
        names: LinkNames,
        (length, profile): (u64, Profile),
    ) -> Result<(Link<F>, Staging<F>), Stop> {
        let agreed = own.agree(peer).map_err(|reason| {
            tracing::debug!(reason, "a requester chose a path that cannot be");
            Stop::Refuse(Status::BackendUnavailable)
        })?;
        let permit = device.connections.take(1, 0).map_err(|_| Stop::Refuse(Status::Exhausted))?;
        let mut link = Link::new(device, permit, names, agreed)
            .map_err(|error| failed(&error, "no QP for an operation of a peer"))?;
        if device.has_windows() && peer.invalidates {
            link.form = Form::Window;
        }
        let staging = self.stage(&link, length, profile)?;
        Ok((link, staging))
    }

    /// Paths, choice, reservation, QPs on both sides.
    fn set_up(
        &self,
        line: Line<'_>,
        mut identity: Identity,
        (length, profile): (u64, Profile),
        guard: &Arc<Guard>,
    ) -> Result<(Link<F>, Exchange, Owners<F>), Stop> {
        let (devices, paths) = self.offer(line, &mut identity)?;
        let mut exchange = Exchange::new(Side::Source, identity);
        let (at, peer) = exchange.hear_choice(&receive(line)?, &paths)?;
        let names = LinkNames::of(exchange.identity());
        let (mut link, staging) = self.reserve(devices[at], (&paths[at], &peer), names, (length, profile))?;
        let (guard, step) = guard.room(0);
        due(step, Step::Admit)?;
        say(line, &mut exchange, Body::Admit)?;

        let Body::RequesterQp(remote) = hear(line, &mut exchange)? else { return Err(out_of_place()) };
        connect(&mut link, remote, &peer, &self.config, line)?;
        let own = link.endpoint();
        say(line, &mut exchange, Body::SourceQp(own))?;
        hear(line, &mut exchange)?;
        Ok((link, exchange, Owners { staging, bytes: 0..length, _guard: guard }))
    }
}

/// The pair that the requester named, if it is still here and as it was left.
fn resume<F: BulkFabric>(
    link: Option<Link<F>>,
    names: KeptNames,
    identity: Identity,
) -> Result<(Link<F>, Exchange), Stop> {
    let KeptNames { requester_pd, source_pd, source_link } = names;
    let named = LinkNames { source_pd, requester_pd, source_link, requester_link: identity.requester_link };
    let mut link =
        link.filter(|link| link.names == named && link.is_usable()).ok_or(Stop::Refuse(Status::CacheMiss))?;
    link.resume();
    let identity = Identity { source_pd, requester_pd, source_link, ..identity };
    let last = link.last_generation;
    Ok((link, Exchange::again(Side::Source, identity, last)))
}

fn connect<F: BulkFabric>(
    link: &mut Link<F>,
    remote: verbs_bootstrap::QpEndpoint,
    peer: &PathEnd,
    config: &RdmaConfig,
    line: Line<'_>,
) -> Result<(), Stop> {
    link.connect(remote, peer, config, line.deadline).map_err(not_connected)
}

pub(super) fn not_connected(error: ConnectError) -> Stop {
    match error {
        ConnectError::Failed(error) => failed(&error, "a QP for an operation of a peer is not connected"),
        ConnectError::TimedOut => Stop::Line(LineError::TimedOut),
        ConnectError::Stopped => Stop::Line(LineError::Stopped),
    }
}

/// What the parent says must be what is about to be done.
pub(super) fn due(step: Step, expected: Step) -> Result<(), Stop> {
    if step == expected {
        return Ok(());
    }
    tracing::error!(?step, ?expected, "a request is not where it should be; it is given up");
    Err(Stop::Refuse(Status::InternalError))
}

pub(super) fn draw() -> Result<Incarnation, Stop> {
    Incarnation::draw().map_err(|error| failed(&error, "no entropy for a connection"))
}

fn failed(error: &dyn std::fmt::Display, what: &str) -> Stop {
    tracing::warn!(%error, "{what}");
    Stop::Refuse(Status::BackendError)
}

pub(super) fn out_of_place() -> Stop {
    Stop::Refuse(Status::ProtocolError)
}

pub(super) fn say(line: Line<'_>, exchange: &mut Exchange, body: Body) -> Result<(), Stop> {
    let frame = exchange.say(body)?;
    Ok(line.send_all(&frame.encode(), &mut 0)?)
}

pub(super) fn hear(line: Line<'_>, exchange: &mut Exchange) -> Result<Body, Stop> {
    Ok(exchange.hear(&receive(line)?)?)
}

pub(super) fn receive(line: Line<'_>) -> Result<Frame, Stop> {
    let mut head = [0; HEAD_BYTES];
    line.recv_exact(&mut head)?;
    let mut bytes = vec![0; Frame::kind_of(&head)?.bytes()];
    bytes[..HEAD_BYTES].copy_from_slice(&head);
    line.recv_exact(&mut bytes[HEAD_BYTES..])?;
    Ok(Frame::decode(&bytes)?)
}
