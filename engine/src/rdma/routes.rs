//! The way of each operation: which NIC of ours, to which of the peer's.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{
    cache::Peer,
    config::RailChoice,
    identity::Incarnation,
    path::{Agreed, PathEnd},
    rails::{
        choice::{Candidate, Charged, Chooser, Distance},
        health::Health,
        plan::RAILS_MAX,
        slicing::Slicing,
    },
};

/// One NIC of ours and one of a peer's. A protection domain's name is that of one life of the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rail {
    pub(crate) nic: usize,
    pub(crate) source_pd: Incarnation,
}

/// Both ends of a rail, which fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) rail: Rail,
    /// The place of the peer's end in its table.
    pub(crate) at: usize,
    pub(crate) peer: PathEnd,
    pub(crate) agreed: Agreed,
    distance: Distance,
    /// Both NICs have the same place among those of their engines.
    partners: bool,
}

/// What is known of NICs and peers, over all operations.
pub(crate) struct Routes {
    state: Mutex<State>,
}

struct State {
    chooser: Chooser,
    health: Health<Rail>,
    /// What peers have offered last.
    tables: HashMap<Peer, Arc<[PathEnd]>>,
    /// Peers whose requests go over one rail each, until when; `None` for their life.
    narrow: HashMap<Peer, Option<Instant>>,
    moved: Vec<Moved>,
    /// Decides ties.
    chance: Chance,
}

/// What has gone over a NIC.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
    /// Of these, as parts of requests.
    pub(crate) sliced_bytes: u64,
    pub(crate) in_flight: u64,
    pub(crate) estimate: Option<u64>,
}

/// A rail that an operation has taken: its bytes are in flight there until it is dropped.
pub(crate) struct Route {
    pub(crate) pair: Pair,
    bytes: u64,
    /// They are part of a request.
    sliced: bool,
    routes: Arc<Routes>,
    charged: Option<Charged>,
}

/// Tables that are remembered at once. Beyond, all are forgotten: to ask again costs nothing but the chance to take a
/// kept pair.
const TABLES_MAX: usize = 1024;

/// Rails that one operation tries.
pub(crate) const TRIES: usize = 8;

impl Routes {
    pub(crate) fn new(nics: usize, mode: RailChoice) -> Arc<Self> {
        let state = State {
            chooser: Chooser::new(nics, mode),
            health: Health::default(),
            tables: HashMap::new(),
            narrow: HashMap::new(),
            moved: vec![Moved::default(); nics],
            chance: Chance::new(),
        };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// What this life of a peer has offered last.
    pub(crate) fn table(&self, peer: Peer) -> Option<Arc<[PathEnd]>> {
        self.lock().tables.get(&peer).cloned()
    }

    pub(crate) fn learn(&self, peer: Peer, table: &[PathEnd]) {
        let mut state = self.lock();
        if state.tables.len() >= TABLES_MAX && !state.tables.contains_key(&peer) {
            state.tables.clear();
        }
        state.tables.insert(peer, table.into());
    }

    /// All lives at that endpoint.
    pub(crate) fn forget(&self, peer: Peer) {
        let mut state = self.lock();
        state.tables.retain(|known, _| known.0 != peer.0);
        state.narrow.retain(|known, _| known.0 != peer.0);
    }

    /// Requests to that peer are not spread for so long, or for its life: it does not do that, or a rail of it fails and
    /// nobody knows which. Over one rail at a time it will be found.
    pub(crate) fn narrow(&self, peer: Peer, pause: Option<Duration>) {
        tracing::info!(endpoint = %peer.0, ?pause, "requests to this peer go over one pair of NICs each");
        let mut state = self.lock();
        if state.narrow.len() >= TABLES_MAX {
            state.narrow.clear();
        }
        state.narrow.insert(peer, pause.map(|pause| Instant::now() + pause));
    }

    /// Whether requests to that peer may be spread.
    pub(crate) fn is_wide(&self, peer: Peer) -> bool {
        let mut state = self.lock();
        match state.narrow.get(&peer) {
            None => true,
            Some(Some(until)) if *until <= Instant::now() => {
                state.narrow.remove(&peer);
                true
            }
            Some(_) => false,
        }
    }

    /// Several of `pairs` for one request, each with its bytes, in order; none if two do not do better than one. Each NIC,
    /// of either side, is there once: two rails over one share what it can do. Partners come first.
    pub(crate) fn spread(
        self: &Arc<Self>,
        pairs: &[Pair],
        tried: &[Rail],
        slicing: Slicing,
    ) -> Vec<(Route, Range<u64>)> {
        let now = Instant::now();
        let mut state = self.lock();
        let mut open: Vec<&Pair> = pairs
            .iter()
            .filter(|pair| !tried.contains(&pair.rail) && state.health.resting_until(pair.rail, now).is_none())
            .collect();
        // Partners before anybody who would take one of them away.
        open.sort_by_key(|pair| (pair.distance, !pair.partners, pair.rail.nic, pair.at));
        let mut rails: Vec<&Pair> = Vec::new();
        for pair in open {
            let shared = |other: &&Pair| other.rail.nic == pair.rail.nic || other.at == pair.at;
            if !rails.iter().any(shared) && rails.len() < RAILS_MAX {
                rails.push(pair);
            }
        }
        if rails.len() < 2 {
            return Vec::new();
        }
        let candidates: Vec<_> =
            rails.iter().map(|pair| Candidate { nic: pair.rail.nic, distance: pair.distance }).collect();
        let pieces: Vec<Range<u64>> = slicing.pieces().collect();
        let count = u32::try_from(slicing.count()).unwrap_or(u32::MAX);
        let each = pieces.last().map_or(0, |last| last.end) / rails.len() as u64;
        let shares = state.chooser.divide(&candidates, each, count);
        if shares.iter().filter(|share| **share > 0).count() < 2 {
            return Vec::new();
        }
        let mut pieces = pieces.into_iter();
        let mut route = |(pair, share): (&Pair, u32)| {
            let first = pieces.next()?;
            let end = pieces
                .by_ref()
                .take(usize::try_from(share).ok()?.checked_sub(1)?)
                .last()
                .map_or(first.end, |last| last.end);
            let bytes = end - first.start;
            let charged = Some(state.chooser.charge(pair.rail.nic, bytes));
            Some((Route { pair: *pair, bytes, sliced: true, routes: Arc::clone(self), charged }, first.start..end))
        };
        rails.into_iter().zip(shares).filter(|(_, share)| *share > 0).filter_map(&mut route).collect()
    }

    /// The best of `pairs` that was not tried yet; `None` if there is none. Pairs that rest are left out, unless all do:
    /// then the one whose rest ends first is better than none.
    pub(crate) fn pick(self: &Arc<Self>, pairs: &[Pair], tried: &[Rail], bytes: u64) -> Option<Route> {
        if tried.len() >= TRIES {
            return None;
        }
        let now = Instant::now();
        let mut state = self.lock();
        let fresh: Vec<&Pair> = pairs.iter().filter(|pair| !tried.contains(&pair.rail)).collect();
        let rest_of = |pair: &&Pair| state.health.resting_until(pair.rail, now);
        let mut open: Vec<&Pair> = fresh.iter().copied().filter(|pair| rest_of(pair).is_none()).collect();
        if open.is_empty() {
            open.extend(fresh.iter().copied().min_by_key(rest_of));
        }
        let candidates: Vec<Candidate> =
            open.iter().map(|pair| Candidate { nic: pair.rail.nic, distance: pair.distance }).collect();
        let chance = state.chance.draw();
        let (at, charged) = state.chooser.choose(&candidates, bytes, chance)?;
        drop(state);
        Some(Route { pair: *open[at], bytes, sliced: false, routes: Arc::clone(self), charged: Some(charged) })
    }

    /// An operation has failed on a rail, by the fault of one of both NICs or of the network between them.
    pub(crate) fn failed(&self, rail: Rail) {
        if let Some(rest) = self.lock().health.failed(rail, Instant::now()) {
            tracing::warn!(nic = rail.nic, peer = ?rail.source_pd, ?rest, "a pair of NICs fails, and is let rest");
        }
    }

    pub(crate) fn resting(&self) -> u64 {
        self.lock().health.resting(Instant::now()) as u64
    }

    pub(crate) fn moved(&self) -> Vec<Moved> {
        let state = self.lock();
        let known = |(nic, moved): (usize, &Moved)| Moved {
            in_flight: state.chooser.in_flight(nic),
            estimate: state.chooser.estimate(nic),
            ..*moved
        };
        state.moved.iter().enumerate().map(known).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Route {
    /// Its data has moved, and took so long.
    pub(crate) fn observe(&self, took: Duration) {
        self.routes.lock().chooser.observe(self.pair.rail.nic, self.bytes, took);
    }

    /// The operation is done.
    pub(crate) fn succeeded(&self) {
        let mut state = self.routes.lock();
        state.health.succeeded(self.pair.rail);
        let moved = &mut state.moved[self.pair.rail.nic];
        moved.operations += 1;
        moved.bytes += self.bytes;
        moved.sliced_bytes += if self.sliced { self.bytes } else { 0 };
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        if let Some(charged) = self.charged.take() {
            self.routes.lock().chooser.release(charged);
        }
    }
}

/// A NIC of ours, as it is now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnEnd {
    pub(crate) nic: usize,
    pub(crate) end: PathEnd,
    /// It hangs off another NUMA node than the engine's.
    pub(crate) is_remote: bool,
}

/// Every pair of ends that fit, or why the first does not. A NIC that has a partner at the other side is nearer to it
/// than to all others; one of the engine's own NUMA node is nearer than one of another.
pub(crate) fn pairs(own: &[OwnEnd], table: &[PathEnd]) -> Result<Vec<Pair>, &'static str> {
    let (mut found, mut first) = (Vec::new(), None);
    for OwnEnd { nic, end, is_remote } in own {
        let has_partner = table.iter().any(|peer| peer.rail == end.rail);
        for (at, peer) in table.iter().enumerate() {
            let wanted = own.iter().any(|own| own.end.rail == peer.rail);
            let across = end.rail != peer.rail && has_partner && wanted;
            let distance = Distance::of(*is_remote, across);
            match end.agree(peer) {
                Ok(agreed) => {
                    let rail = Rail { nic: *nic, source_pd: peer.pd };
                    let partners = end.rail == peer.rail;
                    found.push(Pair { rail, at, peer: *peer, agreed, distance, partners });
                }
                Err(reason) => {
                    first.get_or_insert(reason);
                }
            }
        }
    }
    if found.is_empty() { Err(first.unwrap_or("the peer offers no path")) } else { Ok(found) }
}

/// For ties alone: a linear congruence, as a system call for each operation would cost more than it is worth.
struct Chance(u64);

impl Chance {
    fn new() -> Self {
        let mut bytes = [0; 8];
        // Any start will do where the system gives none; engines do not begin there.
        let _ = getrandom::fill(&mut bytes);
        Self(u64::from_ne_bytes(bytes))
    }

    fn draw(&mut self) -> u64 {
        // Knuth's MMIX; its high bits are the random ones.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

#[cfg(test)]
mod tests {
    use super::{super::path::tests::end, *};

    /// An end on that rail.
    fn on(host: u8, rail: u8) -> PathEnd {
        PathEnd { rail, ..end(host) }
    }

    fn own(nic: usize, host: u8, rail: u8) -> OwnEnd {
        OwnEnd { nic, end: on(host, rail), is_remote: false }
    }

    fn near(own: &[OwnEnd], table: &[PathEnd]) -> Vec<(usize, usize)> {
        let pairs = pairs(own, table).expect("they fit");
        pairs.iter().filter(|pair| pair.distance == Distance::Near).map(|pair| (pair.rail.nic, pair.at)).collect()
    }

    #[test]
    fn partners_are_near_and_whoever_has_none_is_near_to_all() {
        let own = [own(0, 1, 0), own(1, 2, 1)];
        assert_eq!(near(&own, &[on(3, 0), on(4, 1)]), [(0, 0), (1, 1)]);
        assert_eq!(near(&own, &[on(3, 0)]), [(0, 0), (1, 0)], "the second has no partner there");
        assert_eq!(near(&own[..1], &[on(3, 0), on(4, 1)]), [(0, 0), (0, 1)]);
        assert_eq!(near(&own[1..], &[on(4, 1)]), [(1, 0)]);
    }

    /// E-82: 1 on the engine's node and between partners, 5 if one is not so, 10 if neither is.
    #[test]
    fn a_nic_of_another_numa_node_is_farther_away() {
        let own = [own(0, 1, 0), OwnEnd { is_remote: true, ..own(1, 2, 1) }];
        let table = [on(3, 0), on(4, 1)];
        let distances: Vec<_> = pairs(&own, &table).expect("they fit").iter().map(|pair| pair.distance).collect();
        assert_eq!(distances, [Distance::Near, Distance::Far, Distance::Farthest, Distance::Far]);
        let routes = Routes::new(2, RailChoice::Score);
        let pairs = pairs(&own, &table).expect("they fit");
        // Five to one: the fifth at once is as far as the first over the other, and chance decides.
        let held: Vec<_> = (0..4).map(|_| routes.pick(&pairs, &[], 1 << 20).expect("there is one")).collect();
        assert!(held.iter().all(|route| route.pair.rail.nic == 0));
        let more: Vec<_> = (0..4).map(|_| routes.pick(&pairs, &[], 1 << 20).expect("there is one")).collect();
        let far: Vec<_> = more.iter().filter(|route| route.pair.rail.nic == 1).collect();
        assert!(!far.is_empty() && far.iter().all(|route| route.pair.at == 1), "to its partner");
    }

    #[test]
    fn ends_that_do_not_fit_are_no_pair() {
        let mut bad = on(3, 0);
        bad.port.gid_type = verbs_bootstrap::GidType::RoceV1;
        let own = [own(0, 1, 0)];
        let fit = pairs(&own, &[bad, on(4, 1)]).expect("one does");
        assert_eq!(fit.iter().map(|pair| pair.at).collect::<Vec<_>>(), [1]);
        assert!(pairs(&own, &[bad]).expect_err("none").contains("types"));
        assert!(pairs(&own, &[]).expect_err("none").contains("no path"));
    }

    #[test]
    fn a_rail_is_tried_once_and_rests_are_kept_unless_all_rest() {
        let own = [own(0, 1, 0), own(1, 2, 1)];
        let pairs = pairs(&own, &[on(3, 0), on(4, 1)]).expect("they fit");
        let routes = Routes::new(2, RailChoice::Score);
        let mut tried = Vec::new();
        while let Some(route) = routes.pick(&pairs, &tried, 1 << 20) {
            tried.push(route.pair.rail);
        }
        assert_eq!(tried.len(), 4, "each of them once");
        assert!(tried[0].nic != tried[1].nic, "partners before the rest");
        for rail in &tried[..3] {
            (0..3).for_each(|_| routes.failed(*rail));
        }
        assert_eq!(routes.resting(), 3);
        for _ in 0..50 {
            assert_eq!(routes.pick(&pairs, &[], 1).map(|route| route.pair.rail), Some(tried[3]));
        }
        (0..3).for_each(|_| routes.failed(tried[3]));
        let route = routes.pick(&pairs, &[], 1).expect("better than none");
        assert_eq!(route.pair.rail, tried[0], "it has rested longest");
        route.succeeded();
        assert_eq!(routes.resting(), 3);
        drop(route);
        assert!(routes.moved().iter().all(|moved| moved.in_flight == 0));
    }

    #[test]
    fn tables_are_bounded_and_forgotten_with_their_endpoint() {
        let routes = Routes::new(1, RailChoice::Score);
        let peer = |port: u16, epoch: u8| (([127, 0, 0, 1], port).into(), crate::Epoch::from_bytes([epoch; 16]));
        for port in 0..3000 {
            routes.learn(peer(port, 1), &[end(1)]);
        }
        assert!(routes.lock().tables.len() <= TABLES_MAX);
        assert!(routes.table(peer(2999, 1)).is_some() && routes.table(peer(2999, 2)).is_none());
        routes.forget(peer(2999, 2));
        assert!(routes.table(peer(2999, 1)).is_none());
    }

    /// What a request of 8 MiB goes over: NIC, place at the peer's, and how many bytes.
    fn over(routes: &Arc<Routes>, pairs: &[Pair], tried: &[Rail]) -> Vec<(usize, usize, u64)> {
        let spread = routes.spread(pairs, tried, Slicing::new(8 << 20, crate::Direction::Read));
        let mut end = 0;
        for (route, bytes) in &spread {
            assert_eq!((bytes.start, bytes.end - bytes.start), (end, route.bytes), "no gap, no overlap");
            end = bytes.end;
        }
        assert!(spread.is_empty() || end == 8 << 20);
        let moved = routes.moved();
        for (route, bytes) in &spread {
            assert_eq!(moved[route.pair.rail.nic].in_flight, bytes.end - bytes.start);
        }
        spread.iter().map(|(route, bytes)| (route.pair.rail.nic, route.pair.at, bytes.end - bytes.start)).collect()
    }

    #[test]
    fn a_request_goes_over_partners_and_no_nic_twice() {
        const HALF: u64 = 4 << 20;
        let own = [own(0, 1, 0), own(1, 2, 1), own(2, 5, 7)];
        let routes = Routes::new(3, RailChoice::RoundRobin);
        let both = pairs(&own[..2], &[on(4, 1), on(3, 0)]).expect("they fit");
        assert_eq!(over(&routes, &both, &[]), [(0, 1, HALF), (1, 0, HALF)], "partners, wherever they stand");
        // One without a partner takes nobody else's.
        let three = pairs(&own, &[on(3, 0), on(4, 1)]).expect("they fit");
        assert_eq!(over(&routes, &three, &[]), [(0, 0, HALF), (1, 1, HALF)]);
        assert!(over(&routes, &pairs(&own[..1], &[on(3, 0), on(4, 1)]).expect("they fit"), &[]).is_empty(), "one NIC");
        assert!(over(&routes, &pairs(&own, &[on(3, 0)]).expect("they fit"), &[]).is_empty(), "one there");
        // What was tried, or rests, is left out: then one is left over, or both go across.
        let rail = |at: usize| {
            both.iter()
                .map(|pair| pair.rail)
                .find(|rail| rail.nic == at && rail.source_pd == both[1 - at].rail.source_pd)
                .expect("there")
        };
        assert_eq!(over(&routes, &both, &[rail(0)]).len(), 0, "the other partners, and nobody for the rest");
        assert_eq!(over(&routes, &both, &[rail(0), rail(1)]), [(0, 0, HALF), (1, 1, HALF)], "across");
        (0..3).for_each(|_| routes.failed(rail(1)));
        assert!(over(&routes, &both, &[]).is_empty(), "a rest is kept");
        assert!(routes.moved().iter().all(|moved| moved.in_flight == 0), "all is given back");
    }

    #[test]
    fn a_peer_is_narrow_for_a_while_or_for_its_life() {
        let peer = |port: u16| (std::net::SocketAddr::from(([127, 0, 0, 1], port)), crate::Epoch::from_bytes([1; 16]));
        let routes = Routes::new(1, RailChoice::Score);
        assert!(routes.is_wide(peer(1)));
        routes.narrow(peer(1), Some(Duration::ZERO));
        assert!(routes.is_wide(peer(1)), "it is over");
        routes.narrow(peer(1), Some(Duration::from_secs(600)));
        routes.narrow(peer(2), None);
        assert!(!routes.is_wide(peer(1)) && !routes.is_wide(peer(2)) && routes.is_wide(peer(3)));
        routes.forget(peer(2));
        assert!(routes.is_wide(peer(2)), "who lives there now is somebody else");
        (10..2010).for_each(|port| routes.narrow(peer(port), None));
        assert!(routes.lock().narrow.len() <= TABLES_MAX);
    }
}
