//! Which device, port and GID a worker uses, and why.
//!
//! Pure: what the machine has goes in as plain data, a [`Choice`] with its reason in words comes out, so every rule
//! is tested without a device. The rules, each deciding only where those before it leave a tie:
//!
//! 1. What the configuration names is taken, or the choice fails.
//! 2. A port that is ACTIVE; then one with a GID in the peer hint's subnet; then one on the NUMA node that we run on;
//!    then the first by name, `mlx5_2` before `mlx5_10`. (libibverbs' own order changes as devices come and go.)
//! 3. A GID whose network device is up and in this network namespace.
//! 4. RoCE v2 before v1.
//! 5. In the same subnet as the peer hint; then of the same address family as it.
//! 6. IPv4-mapped, then global or unique local IPv6, then link-local.
//! 7. The smaller index.
//!
//! Empty slots of the table are never considered, and an index is only where a GID was found: later it is found
//! again by value.

use std::{cmp::Reverse, fmt};

use verbs_bootstrap::{Gid, GidFamily, GidType};

/// What the configuration insists on. `None` leaves it to the rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Device name, as `rdma link` and `ibv_devices` print it.
    pub device: Option<String>,
    /// Port, from 1.
    pub port: Option<u8>,
    /// The GID by value.
    pub gid: Option<Gid>,
    /// The GID by its index. Indices move when addresses come and go: prefer the value.
    pub gid_index: Option<u8>,
    /// How packets must travel.
    pub gid_type: Option<GidType>,
    /// A peer's GID, for affinity: a GID in its subnet is preferred.
    pub peer: Option<Gid>,
}

/// One port of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// The device's name.
    pub device: String,
    /// Port number, from 1.
    pub port: u8,
    /// Whether it is ACTIVE.
    pub active: bool,
    /// Its state in words.
    pub state: String,
    /// Whether the device is on the NUMA node that this thread runs on; `None` when unknown.
    pub same_numa_node: Option<bool>,
    /// Its GIDs. Zero ones are skipped.
    pub gids: Vec<GidInfo>,
}

/// One slot of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidInfo {
    /// Its index.
    pub index: u8,
    /// The GID.
    pub gid: Gid,
    /// How its packets travel.
    pub gid_type: GidType,
    /// The network device that the address is on.
    pub netdev: Netdev,
    /// Length in bits of the network part of the address in the GID (of 32 for IPv4, of 128 for IPv6), if known.
    pub prefix_bits: Option<u8>,
}

/// The network device under a GID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Netdev {
    /// Up, in this network namespace.
    Up(String),
    /// In this namespace, but down.
    Down(String),
    /// In another namespace: sending from its GID fails.
    Elsewhere,
    /// There is none, as on InfiniBand, or nothing is known of it.
    Unknown,
}

/// What was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The device's name.
    pub device: String,
    /// Port number, from 1.
    pub port: u8,
    /// The GID's slot.
    pub gid: GidInfo,
    /// Why, in one sentence.
    pub reason: String,
}

/// Nothing fits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChooseError {
    /// There is no device at all.
    #[error("no RDMA device")]
    NoDevices,
    /// The device that was named is not there.
    #[error("no RDMA device {name:?}; there is: {}", have.join(", "))]
    UnknownDevice {
        /// As configured.
        name: String,
        /// The devices' names.
        have: Vec<String>,
    },
    /// The port that was named is not there.
    #[error("{device} has no port {port}; it has: {}", List(have))]
    UnknownPort {
        /// The device, or the devices that were looked at.
        device: String,
        /// As configured.
        port: u8,
        /// Its ports.
        have: Vec<u8>,
    },
    /// No port is ACTIVE. Bring the link up, or check the cable.
    #[error("{device} port {port} is {state}, not ACTIVE: is the link up? see `rdma link`")]
    PortDown {
        /// The device.
        device: String,
        /// The port, or the first of several.
        port: u8,
        /// Its state.
        state: String,
    },
    /// The GID index that was named is empty or beyond the table.
    #[error("{device} port {port} has no GID at gid_index {gid_index}; it has: {table}")]
    UnknownGidIndex {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// As configured.
        gid_index: u8,
        /// The table in words.
        table: String,
    },
    /// The GID that was named is on no port.
    #[error("no GID {gid} on {device} port {port}; it has: {table}")]
    GidNotFound {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// As configured.
        gid: Gid,
        /// The table in words.
        table: String,
    },
    /// The table is empty, or nothing in it is of the type that was named.
    #[error("{device} port {port} has no usable GID ({wanted}); it has: {table}. Give its network device an address")]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// What was looked for.
        wanted: String,
        /// The table in words.
        table: String,
    },
}

/// Chooses by the rules of the module's text.
///
/// # Errors
///
/// See [`ChooseError`]; each names what there is instead.
pub fn choose(ports: &[PortInfo], wanted: &Wanted) -> Result<Choice, ChooseError> {
    let (port, why_port) = choose_port(ports, wanted)?;
    let (gid, why_gid) = choose_gid(port, wanted)?;
    let on = match &gid.netdev {
        Netdev::Up(name) | Netdev::Down(name) => format!(" on {name}"),
        Netdev::Elsewhere | Netdev::Unknown => String::new(),
    };
    let reason = format!(
        "{} port {} ({why_port}), gid_index {} {} {}{on} ({why_gid})",
        port.device,
        port.port,
        gid.index,
        gid.gid,
        type_name(gid.gid_type)
    );
    Ok(Choice { device: port.device.clone(), port: port.port, gid: gid.clone(), reason })
}

fn choose_port<'a>(ports: &'a [PortInfo], wanted: &Wanted) -> Result<(&'a PortInfo, String), ChooseError> {
    if ports.is_empty() {
        return Err(ChooseError::NoDevices);
    }
    let mut names: Vec<&str> = ports.iter().map(|port| port.device.as_str()).collect();
    names.dedup();
    let named = |port: &&PortInfo| wanted.device.as_ref().is_none_or(|name| *name == port.device);
    let of_device: Vec<&PortInfo> = ports.iter().filter(named).collect();
    if of_device.is_empty() {
        let name = wanted.device.clone().unwrap_or_default();
        return Err(ChooseError::UnknownDevice { name, have: names.into_iter().map(str::to_owned).collect() });
    }
    let numbered = |port: &&PortInfo| wanted.port.is_none_or(|number| number == port.port);
    let candidates: Vec<&PortInfo> = of_device.iter().copied().filter(numbered).collect();
    let Some(first) = candidates.first() else {
        let mut devices: Vec<&str> = of_device.iter().map(|port| port.device.as_str()).collect();
        devices.dedup();
        let mut have: Vec<u8> = of_device.iter().map(|port| port.port).collect();
        have.sort_unstable();
        have.dedup();
        let port = wanted.port.unwrap_or_default();
        return Err(ChooseError::UnknownPort { device: devices.join(", "), port, have });
    };
    let active: Vec<&PortInfo> = candidates.iter().copied().filter(|port| port.active).collect();
    // A GID that was named decides between ports too.
    let holders: Vec<&PortInfo> = active.iter().copied().filter(|port| holds_named_gid(port, wanted)).collect();
    let pool = if holders.is_empty() { &active } else { &holders };
    let best = pool.iter().copied().max_by_key(|port| {
        let can_reach = best_gid(port, wanted).is_some();
        let nearer = wanted.peer.is_some_and(|peer| port.gids.iter().any(|gid| same_subnet(gid, peer)));
        (can_reach, nearer, port.same_numa_node, Reverse((natural_order(&port.device), port.port)))
    });
    let Some(best) = best else {
        return Err(ChooseError::PortDown {
            device: first.device.clone(),
            port: first.port,
            state: first.state.clone(),
        });
    };
    let why = match (&wanted.device, wanted.port, pool.len()) {
        (Some(_), Some(_), _) => "as configured".to_owned(),
        (_, _, 1) if holders.len() == 1 && active.len() > 1 => "it has the configured GID".to_owned(),
        (Some(_), None, 1) => "device as configured, its only ACTIVE port".to_owned(),
        (_, _, 1) => "the only ACTIVE port".to_owned(),
        (_, _, several) if wanted.peer.is_some_and(|peer| best.gids.iter().any(|gid| same_subnet(gid, peer))) => {
            format!("of {several} ACTIVE ports, in the peer's subnet")
        }
        (_, _, several) if best.same_numa_node == Some(true) => {
            format!("of {several} ACTIVE ports, on this thread's NUMA node")
        }
        (_, _, several) => format!("the first fit of {several} ACTIVE ports"),
    };
    Ok((best, why))
}

/// Sorts `mlx5_2` before `mlx5_10`.
fn natural_order(name: &str) -> (&str, u64) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem, name[stem.len()..].parse().unwrap_or(0))
}

fn holds_named_gid(port: &PortInfo, wanted: &Wanted) -> bool {
    wanted.gid.is_some_and(|gid| port.gids.iter().any(|slot| slot.gid == gid))
}

fn choose_gid<'a>(port: &'a PortInfo, wanted: &Wanted) -> Result<(&'a GidInfo, String), ChooseError> {
    let (device, number) = (port.device.clone(), port.port);
    let table = || table_text(port);
    if let Some(gid_index) = wanted.gid_index {
        let slot = usable(port).find(|slot| slot.index == gid_index);
        let slot = slot.ok_or_else(|| ChooseError::UnknownGidIndex {
            device: device.clone(),
            port: number,
            gid_index,
            table: table(),
        })?;
        return match wanted.gid {
            Some(gid) if gid != slot.gid => Err(ChooseError::GidNotFound { device, port: number, gid, table: table() }),
            _ => Ok((slot, "gid_index as configured".to_owned())),
        };
    }
    if let Some(gid) = wanted.gid.filter(|_| !holds_named_gid(port, wanted)) {
        return Err(ChooseError::GidNotFound { device, port: number, gid, table: table() });
    }
    let Some(best) = best_gid(port, wanted) else {
        let wanted = wanted.gid_type.map_or("any type".to_owned(), |gid_type| type_name(gid_type).to_owned());
        return Err(ChooseError::NoGid { device, port: number, wanted, table: table() });
    };
    Ok((best, why_gid(port, best, wanted)))
}

/// In words: the first rule that set the best apart from the GID that a choice by index would have taken, or from the
/// next best when the best comes first.
fn why_gid(port: &PortInfo, best: &GidInfo, wanted: &Wanted) -> String {
    if wanted.gid.is_some() {
        return "GID as configured".to_owned();
    }
    let others = || usable(port).filter(|slot| fits(slot, wanted) && slot.index != best.index);
    let earlier = others().filter(|slot| slot.index < best.index).min_by_key(|slot| slot.index);
    let Some(next) = earlier.or_else(|| others().max_by_key(|slot| Score::of(slot, wanted))) else {
        return "the only GID that fits".to_owned();
    };
    let (won, lost) = (Score::of(best, wanted), Score::of(next, wanted));
    let over = format!("over {} at gid_index {}", next.gid, next.index);
    if won.netdev != lost.netdev {
        format!("its network device is up here, preferred {over}")
    } else if won.gid_type != lost.gid_type {
        format!("{} preferred {over}, {}", type_name(best.gid_type), type_name(next.gid_type))
    } else if won.peer_subnet != lost.peer_subnet {
        format!("in the peer's subnet, preferred {over}")
    } else if won.peer_family != lost.peer_family {
        format!("of the peer's address family, preferred {over}")
    } else if won.family != lost.family {
        format!("{} preferred {over}, {}", family_name(best.gid.family()), family_name(next.gid.family()))
    } else {
        format!("the first of its kind, {over}")
    }
}

fn usable(port: &PortInfo) -> impl Iterator<Item = &GidInfo> {
    port.gids.iter().filter(|slot| !slot.gid.is_zero())
}

fn fits(slot: &GidInfo, wanted: &Wanted) -> bool {
    wanted.gid_type.is_none_or(|gid_type| gid_type == slot.gid_type) && wanted.gid.is_none_or(|gid| gid == slot.gid)
}

fn best_gid<'a>(port: &'a PortInfo, wanted: &Wanted) -> Option<&'a GidInfo> {
    usable(port).filter(|slot| fits(slot, wanted)).max_by_key(|slot| Score::of(slot, wanted))
}

/// Larger is better, field by field.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    netdev: u8,
    gid_type: u8,
    peer_subnet: bool,
    peer_family: bool,
    family: u8,
    index: Reverse<u8>,
}

impl Score {
    fn of(slot: &GidInfo, wanted: &Wanted) -> Self {
        Self {
            netdev: match slot.netdev {
                Netdev::Up(_) => 2,
                Netdev::Unknown => 1,
                Netdev::Down(_) | Netdev::Elsewhere => 0,
            },
            gid_type: match slot.gid_type {
                GidType::RoceV2 | GidType::Ib => 1,
                GidType::RoceV1 => 0,
            },
            peer_subnet: wanted.peer.is_some_and(|peer| same_subnet(slot, peer)),
            peer_family: wanted.peer.is_some_and(|peer| slot.gid.family() == peer.family()),
            family: match slot.gid.family() {
                GidFamily::Ipv4Mapped => 2,
                GidFamily::Ipv6 => 1,
                GidFamily::LinkLocal => 0,
            },
            index: Reverse(slot.index),
        }
    }
}

/// Whether both are in the network of `slot`'s address. Link-local addresses share a prefix everywhere, so it says
/// nothing of them.
fn same_subnet(slot: &GidInfo, peer: Gid) -> bool {
    let family = slot.gid.family();
    if family != peer.family() || family == GidFamily::LinkLocal {
        return false;
    }
    let skipped = if family == GidFamily::Ipv4Mapped { 96 } else { 0 };
    let Some(bits) = slot.prefix_bits.map(|bits| (u32::from(bits) + skipped).min(128)) else {
        return false;
    };
    let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
    (u128::from_be_bytes(slot.gid.0) ^ u128::from_be_bytes(peer.0)) & mask == 0
}

/// The way packets travel, for people.
pub(crate) fn type_name(gid_type: GidType) -> &'static str {
    match gid_type {
        GidType::Ib => "IB",
        GidType::RoceV1 => "RoCE v1",
        GidType::RoceV2 => "RoCE v2",
    }
}

fn family_name(family: GidFamily) -> &'static str {
    match family {
        GidFamily::Ipv4Mapped => "IPv4-mapped",
        GidFamily::Ipv6 => "routable IPv6",
        GidFamily::LinkLocal => "link-local",
    }
}

fn table_text(port: &PortInfo) -> String {
    let rows: Vec<String> =
        usable(port).map(|slot| format!("{} {} {}", slot.index, slot.gid, type_name(slot.gid_type))).collect();
    if rows.is_empty() { "none".to_owned() } else { rows.join(", ") }
}

/// Numbers with commas.
struct List<'a>(&'a [u8]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, number) in self.0.iter().enumerate() {
            let comma = if position == 0 { "" } else { ", " };
            write!(f, "{comma}{number}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
