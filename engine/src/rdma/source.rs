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
    device::{ConnectError, Device, RegionOf},
    exchange::{Exchange, Side},
    flight::{Flight, Owners, Staging},
    grant::{Form, Grant},
    identity::{Digest, Identity, Incarnation},
    link::{Link, LinkNames},
    path::PathEnd,
    staging::{Pool, StageError},
    wire::{Ask, Body, Frame, HEAD_BYTES, KeptNames, Offer},
};
use crate::{
    Direction, Profile, Status, WireError,
    budget::Budget,
    control::{Access, DeviceCall, DeviceSource, Reply},
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
    /// Of grants, over the engine's life. The first is 1.
    generations: AtomicU64,
}

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
            generations: AtomicU64::new(1),
        }
    }

    fn operate(&self, call: DeviceCall<'_>) -> Result<(), Stop> {
        let DeviceCall { line, request, ask: ask_bytes, direction, access, inside, kept } = call;
        let ask = Ask::decode(ask_bytes)?;
        let charge = self.grants.take(1, access.length).map_err(|_| Stop::Refuse(Status::Exhausted))?;
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let identity = Identity {
            source_epoch: self.epoch,
            requester_epoch: ask.requester_epoch,
            requester_link: ask.requester_link,
            request: ask.request,
            digest: Digest::of(request, ask_bytes),
            generation,
            ..Identity::default()
        };
        // Taken out: unless all ends well it does not come back.
        let link = kept.take().and_then(|kept| kept.downcast::<Link<F>>().ok()).map(|link| *link);
        let (mut link, mut exchange, staging) = if let Some(names) = ask.kept {
            let (link, exchange) = resume(link, names, identity)?;
            let staging = self.stage(&link, &access)?;
            (link, exchange, staging)
        } else {
            drop(link);
            self.set_up(line, identity, &access)?
        };
        link.last_generation = generation;
        let grant = Grant::new(link.form, generation, link.qpn());
        link.device.gauges.grants.add();
        let owners = Owners { staging, access, _charge: charge, _inside: inside };
        let mut flight = Flight {
            device: Arc::clone(&link.device),
            grant: Some(grant),
            region: None,
            link: Some(link),
            owners: Some(owners),
        };
        flight.fill(direction, line.patience())?;
        let terms = flight.bind(line.deadline, direction)?;
        say(line, &mut exchange, Body::Grant(terms))?;
        hear(line, &mut exchange)?;
        let (mut link, owners) = flight.settle(line.deadline)?;
        if direction == Direction::Write {
            owners.commit(line.patience())?;
        }
        drop(owners);
        say(line, &mut exchange, Body::Ack)?;
        hear(line, &mut exchange)?;
        debug_assert!(exchange.is_over());
        link.park();
        *kept = Some(Box::new(link) as Box<dyn Any + Send>);
        Ok(())
    }

    /// Those that are up; if none is, all: the failure tells what is wrong.
    fn offered(&self) -> Vec<&Arc<Device<F>>> {
        let all = || self.nics.iter().map(|nic| &nic.device);
        let up: Vec<_> = all().filter(|device| device.is_up()).collect();
        if up.is_empty() { all().collect() } else { up }
    }

    fn stage(&self, link: &Link<F>, access: &Access) -> Result<Staging<F>, Stop> {
        if access.profile == Profile::Direct {
            return Ok(Staging::Direct(None));
        }
        let bytes = usize::try_from(access.length).map_err(|_| Stop::Refuse(Status::Exhausted))?;
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

    /// Paths, choice, reservation, QPs on both sides.
    fn set_up(
        &self,
        line: Line<'_>,
        identity: Identity,
        access: &Access,
    ) -> Result<(Link<F>, Exchange, Staging<F>), Stop> {
        let failed = |error: &dyn std::fmt::Display, what: &str| {
            tracing::warn!(%error, "{what}");
            Stop::Refuse(Status::BackendError)
        };
        let source_link = Incarnation::draw().map_err(|error| failed(&error, "no entropy for a connection"))?;
        let identity = Identity { source_link, ..identity };
        let devices = self.offered();
        let paths: Vec<PathEnd> = devices.iter().map(|device| device.end()).collect();
        let offer = Offer { source_link, generation: identity.generation, paths: paths.clone() };
        let payload = offer.encode();
        let epoch = crate::Epoch::from_bytes(self.epoch);
        let mut frame = Reply { status: Status::Success, epoch, length: payload.len() as u64 }.encode().to_vec();
        frame.extend_from_slice(&payload);
        line.send_all(&frame, &mut 0)?;

        let mut exchange = Exchange::new(Side::Source, identity);
        let (at, peer) = exchange.hear_choice(&receive(line)?, &paths)?;
        let device = devices[at];
        let agreed = paths[at].agree(&peer).map_err(|reason| {
            tracing::debug!(reason, "a requester chose a path that cannot be");
            Stop::Refuse(Status::BackendUnavailable)
        })?;
        // The whole receive plan, before the requester makes anything: a QP, with it its receives, and memory.
        let permit = device.connections.take(1, 0).map_err(|_| Stop::Refuse(Status::Exhausted))?;
        let id = *exchange.identity();
        let names = LinkNames {
            source_pd: id.source_pd,
            requester_pd: id.requester_pd,
            source_link,
            requester_link: id.requester_link,
        };
        let mut link = Link::new(device, permit, names, agreed)
            .map_err(|error| failed(&error, "no QP for an operation of a peer"))?;
        if device.has_windows() && peer.invalidates {
            link.form = Form::Window;
        }
        let staging = self.stage(&link, access)?;
        say(line, &mut exchange, Body::Admit)?;

        let Body::RequesterQp(remote) = hear(line, &mut exchange)? else { return Err(out_of_place()) };
        connect(&mut link, remote, &peer, &self.config, line)?;
        let own = link.endpoint();
        say(line, &mut exchange, Body::SourceQp(own))?;
        hear(line, &mut exchange)?;
        Ok((link, exchange, staging))
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
    link.connect(remote, peer, config, line.deadline).map_err(|error| match error {
        ConnectError::Failed(error) => {
            tracing::warn!(%error, "a QP for an operation of a peer is not connected");
            Stop::Refuse(Status::BackendError)
        }
        ConnectError::TimedOut => Stop::Line(LineError::TimedOut),
        ConnectError::Stopped => Stop::Line(LineError::Stopped),
    })
}

fn out_of_place() -> Stop {
    Stop::Refuse(Status::ProtocolError)
}

fn say(line: Line<'_>, exchange: &mut Exchange, body: Body) -> Result<(), Stop> {
    let frame = exchange.say(body)?;
    Ok(line.send_all(&frame.encode(), &mut 0)?)
}

fn hear(line: Line<'_>, exchange: &mut Exchange) -> Result<Body, Stop> {
    Ok(exchange.hear(&receive(line)?)?)
}

fn receive(line: Line<'_>) -> Result<Frame, Stop> {
    let mut head = [0; HEAD_BYTES];
    line.recv_exact(&mut head)?;
    let mut bytes = vec![0; Frame::kind_of(&head)?.bytes()];
    bytes[..HEAD_BYTES].copy_from_slice(&head);
    line.recv_exact(&mut bytes[HEAD_BYTES..])?;
    Ok(Frame::decode(&bytes)?)
}
