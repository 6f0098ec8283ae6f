//! The data of an operation over several rails, side by side: each rail goes on whenever it has news. Then the markers,
//! DONE for each rail, and ACK and READY for all of them.

use std::{sync::Arc, time::Instant};

use verbs_transport::fabric::bulk::{BulkFabric, BulkRegion as _};

use super::{
    cache::{Kept, SetNames},
    carry::{chunk, marker, on_device, post_chunk},
    identity::Identity,
    mailbox::{Bell, WaitError},
    rails::parent::Progress,
    requester::{NotDone, RdmaRequester, device_error},
    routes::Rail,
    spread::{Fell, Lane, Running, Set},
    talk::Said,
    wire::Body,
};
use crate::{
    Direction, Phase, TransferError, batch::Slice, deadline::Deadline, error::Failure, memory::Patience, tcp::broken,
};

impl<F: BulkFabric> RdmaRequester<F> {
    pub(super) fn carry_set(&self, slice: &Slice, mut set: Set<'_, F>) -> Result<(), Fell> {
        let mut progress = Progress::new(slice.direction);
        let mut blamed = Vec::new();
        let moved = self.move_set(&mut set, slice, &mut progress, &mut blamed);
        let Set { talk, rails, parent, .. } = set;
        let deadline = talk.deadline;
        if let Err(error) = moved {
            // The source learns of it by this, and takes its own way out.
            drop(talk);
            for Running { lane: Lane { staging, .. }, link, .. } in rails {
                link.condemn(None, None, Box::new((staging, slice.clone())));
            }
            let failure = Failure { error, effect: progress.effect(), local_changed: false };
            let may_go_again = progress.may_go_again();
            return Err(Fell { not_done: NotDone::Failed(failure), rails: blamed, may_go_again });
        }
        let (mut lanes, mut links) = (Vec::new(), Vec::new());
        for Running { lane, link, .. } in rails {
            lane.route.succeeded();
            lanes.push(lane);
            links.push(link);
        }
        self.counters.rdma_sliced.add(1);
        if parent.is_over() {
            let Identity { source_link, requester_link, generation, .. } = *parent.identity();
            let names = SetNames { source_link, requester_link, last_generation: generation };
            self.cache.put(slice.peer, Kept { stream: talk.stream, links, set: Some(names) });
        }
        if slice.direction == Direction::Read {
            let patience = Patience::Until(deadline, &self.stop);
            let copied = slice.local.registration().write(slice.local_place(), patience, |local| {
                lanes.iter().try_for_each(|lane| lane.staging.read(0, local.get_mut(lane.within()?)?).ok())
            });
            let error = match copied {
                Ok(Some(())) => return Ok(()),
                Ok(None) => TransferError::Internal,
                Err(denied) => broken(denied.into(), Phase::LocalMemory),
            };
            let not_done = NotDone::Failed(Failure::harmless(error));
            return Err(Fell { not_done, rails: Vec::new(), may_go_again: false });
        }
        Ok(())
    }

    /// The data of all rails, their markers, DONE for each; ACK and READY for all of them.
    fn move_set(
        &self,
        set: &mut Set<'_, F>,
        slice: &Slice,
        progress: &mut Progress,
        blamed: &mut Vec<Rail>,
    ) -> Result<(), TransferError> {
        let bell = Arc::<Bell>::default();
        set.rails.iter().for_each(|rail| rail.link.mail.tie(Some(Arc::clone(&bell))));
        let moved = self.post_set(set, slice, (progress, &bell), blamed);
        set.rails.iter().for_each(|rail| rail.link.mail.tie(None));
        moved?;
        let Set { talk, rails, parent, .. } = set;
        progress.telling();
        let mut frames = Vec::new();
        for rail in rails.iter_mut() {
            frames.extend(rail.exchange.say(Body::Done)?.encode());
        }
        talk.send(&frames, Phase::Request)?;
        match talk.read(Phase::Acknowledgement)? {
            Said::Frame(frame) => parent.hear(&frame)?,
            Said::Reply(reply) => return Err(self.refused(&reply, slice.peer)),
        };
        progress.acknowledged();
        // The operation is done. If the pairs cannot be used again, that is not its concern.
        if let Err(error) = talk.say(parent, Body::Ready) {
            tracing::debug!(%error, "pairs of QPs are not kept");
        }
        Ok(())
    }

    fn post_set(
        &self,
        set: &mut Set<'_, F>,
        slice: &Slice,
        (progress, bell): (&mut Progress, &Bell),
        blamed: &mut Vec<Rail>,
    ) -> Result<(), TransferError> {
        let phase = match slice.direction {
            Direction::Read => Phase::Payload,
            Direction::Write => Phase::Body,
        };
        let until = Deadline::at(set.expires).min(set.talk.deadline);
        let began = Instant::now();
        let data = |rail: &mut Running<F>, outstanding: u32, may_post: bool| {
            let window = self.config.window.min(rail.link.agreed.rd_atomic.initiator.into());
            let length = usize::try_from(rail.lane.bytes.end - rail.lane.bytes.start).unwrap_or(0);
            let mut outstanding = outstanding;
            while may_post && outstanding < window && rail.posted < length {
                progress.posting();
                let len = chunk(&self.config, length - rail.posted);
                let at = (rail.posted, len);
                let posted = post_chunk(&rail.link, &rail.terms, &rail.lane.staging, slice.direction, at);
                posted.map_err(|error| device_error(phase, error))?;
                rail.posted += len as usize;
                outstanding += 1;
            }
            let over = outstanding == 0;
            if over && rail.posted == length {
                rail.lane.route.observe(began.elapsed());
            }
            Ok(over)
        };
        run_all(&mut set.rails, until, bell, phase, blamed, data)?;
        if until.remaining().is_none() {
            return Err(TransferError::TimedOut { phase });
        }
        for rail in &mut set.rails {
            // Everything before it is complete; the fence holds it back should that ever change.
            let marker = marker(&rail.terms, rail.exchange.identity().generation);
            rail.link.post(marker).map_err(|error| {
                blamed.push(rail.lane.route.pair.rail);
                device_error(phase, error)
            })?;
        }
        run_all(&mut set.rails, set.talk.deadline, bell, phase, blamed, |_, outstanding, _| Ok(outstanding == 0))
    }
}

/// Has all rails go on until each is over, each whenever it has news. After the first error nothing new is begun, and the
/// others are waited for; those that fail are to blame.
fn run_all<F: BulkFabric>(
    rails: &mut [Running<F>],
    until: Deadline,
    bell: &Bell,
    phase: Phase,
    blamed: &mut Vec<Rail>,
    mut go_on: impl FnMut(&mut Running<F>, u32, bool) -> Result<bool, TransferError>,
) -> Result<(), TransferError> {
    let mut first = None;
    for rail in rails.iter_mut() {
        rail.over = false;
    }
    loop {
        let seen = bell.count();
        for rail in rails.iter_mut().filter(|rail| !rail.over) {
            let outcome = match rail.link.mail.sends() {
                Err(WaitError::Stopped) => return Err(TransferError::Stopped),
                Err(error) => Err(on_device(error, phase)),
                Ok(outstanding) => go_on(rail, outstanding, first.is_none() && until.remaining().is_some()),
            };
            rail.over = outcome.as_ref().copied().unwrap_or(true);
            if let Err(error) = outcome {
                blamed.push(rail.lane.route.pair.rail);
                first.get_or_insert(error);
            }
        }
        if rails.iter().all(|rail| rail.over) {
            return first.map_or(Ok(()), Err);
        }
        if until.remaining().is_none() {
            return Err(first.unwrap_or(TransferError::TimedOut { phase }));
        }
        bell.wait(seen, until);
    }
}
