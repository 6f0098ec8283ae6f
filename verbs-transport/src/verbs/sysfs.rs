//! What the kernel tells in text files about devices, their network devices and this process. Whatever cannot be
//! read is unknown, never an error.
#![deny(unsafe_code)]

use std::{fs, net::Ipv4Addr, net::Ipv6Addr, path::Path};

use verbs_bootstrap::Gid;

use crate::{fabric::HwCounters, select::Netdev};

/// Devices that the kernel has, whether or not libibverbs can use them.
pub(super) fn device_names() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/class/infiniband") else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// The network device under a GID, and its name when it is in this network namespace.
pub(super) fn netdev(device: &str, port: u8, gid_index: u8) -> (Netdev, Option<String>) {
    let base = Path::new("/sys/class/infiniband").join(device).join(format!("ports/{port}/gid_attrs/ndevs"));
    if !base.exists() {
        return (Netdev::Unknown, None);
    }
    // Unreadable for an empty slot, and where the network device is in another namespace.
    let Ok(name) = fs::read_to_string(base.join(gid_index.to_string())) else { return (Netdev::Elsewhere, None) };
    let name = name.trim().to_owned();
    match fs::read_to_string(Path::new("/sys/class/net").join(&name).join("operstate")) {
        Err(_) => (Netdev::Elsewhere, None),
        // Drivers without carrier detection (dummy, tun) stay at "unknown" while up.
        Ok(state) if matches!(state.trim(), "up" | "unknown") => (Netdev::Up(name.clone()), Some(name)),
        Ok(_) => (Netdev::Down(name.clone()), Some(name)),
    }
}

/// The NUMA node that the device hangs off.
pub(super) fn numa_node(device: &str) -> Option<u16> {
    let node = fs::read_to_string(Path::new("/sys/class/infiniband").join(device).join("device/numa_node")).ok()?;
    node.trim().parse().ok() // -1 is "none"
}

/// Whether the device hangs off the NUMA node that this thread runs on.
pub(super) fn same_numa_node(device: &str) -> Option<bool> {
    let of_device = numa_node(device)?;
    let cpu = rustix::thread::sched_getcpu();
    Some(Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}/node{of_device}")).exists())
}

/// Whether the device is `rdma_rxe`, whose devices alone have the network device that they run over as `parent`.
pub(super) fn is_soft_roce(device: &str) -> bool {
    Path::new("/sys/class/infiniband").join(device).join("parent").exists()
}

/// RNR NAKs of a port, under the names that drivers give them: Soft-RoCE's, then mlx5's. mlx5 counts a NAK that it sends
/// as a SEND that found no receive.
pub(super) fn hw_counters(device: &str, port: u8) -> HwCounters {
    let dir = Path::new("/sys/class/infiniband").join(device).join(format!("ports/{port}/hw_counters"));
    let first = |names: [&str; 2]| {
        let mut texts = names.iter().filter_map(|name| fs::read_to_string(dir.join(name)).ok());
        texts.find_map(|text| text.trim().parse().ok())
    };
    HwCounters {
        rnr_naks_sent: first(["send_rnr_err", "out_of_buffer"]),
        rnr_naks_received: first(["rcvd_rnr_err", "rnr_nak_retry_err"]),
    }
}

/// Bytes that this process has pinned so far (`VmPin`).
pub(super) fn pinned_bytes() -> u64 {
    fs::read_to_string("/proc/self/status").ok().and_then(|status| pinned_in(&status)).unwrap_or(0)
}

fn pinned_in(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Prefix lengths of this namespace's networks.
pub(super) struct Prefixes {
    routes: String,
    inet6: String,
}

impl Prefixes {
    pub(super) fn read() -> Self {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        Self { routes: text("/proc/net/route"), inet6: text("/proc/net/if_inet6") }
    }

    /// Bits of the network part of the address in `gid` on that network device.
    pub(super) fn bits(&self, gid: Gid, netdev: &str) -> Option<u8> {
        match gid.ipv4() {
            Some(address) => ipv4_prefix(&self.routes, address, netdev),
            None => ipv6_prefix(&self.inet6, gid.ipv6(), netdev),
        }
    }
}

/// From `/proc/net/route`: the longest directly connected network on `netdev` that holds `address`.
fn ipv4_prefix(routes: &str, address: Ipv4Addr, netdev: &str) -> Option<u8> {
    let networks = routes.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let hex = |position: usize| u32::from_str_radix(fields.get(position)?, 16).ok().map(u32::from_be);
        let (destination, gateway, mask) = (hex(1)?, hex(2)?, hex(7)?);
        let holds = fields.first() == Some(&netdev) && gateway == 0 && u32::from(address) & mask == destination;
        holds.then(|| u8::try_from(mask.leading_ones()).ok()).flatten()
    });
    networks.max()
}

/// From `/proc/net/if_inet6`: the prefix of that very address.
fn ipv6_prefix(inet6: &str, address: Ipv6Addr, netdev: &str) -> Option<u8> {
    inet6.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let here = u128::from_str_radix(fields.first()?, 16).ok()? == u128::from(address);
        let bits = u8::from_str_radix(fields.get(2)?, 16).ok()?;
        (here && fields.last() == Some(&netdev)).then_some(bits)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_found_in_the_kernels_tables() {
        let routes = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                      eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                      eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
                      dummy0\t0000630A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n";
        if cfg!(target_endian = "little") {
            assert_eq!(ipv4_prefix(routes, Ipv4Addr::new(10, 0, 0, 7), "eth0"), Some(24));
            assert_eq!(ipv4_prefix(routes, Ipv4Addr::new(10, 99, 0, 1), "dummy0"), Some(16));
            assert_eq!(ipv4_prefix(routes, Ipv4Addr::new(10, 99, 0, 1), "eth0"), None, "only by its gateway");
        }
        let inet6 = "fd000000000000000000000000000007 02 40 00 80   dummy0\n";
        assert_eq!(ipv6_prefix(inet6, "fd00::7".parse().expect("an address"), "dummy0"), Some(64));
        assert_eq!(ipv6_prefix(inet6, "fd00::8".parse().expect("an address"), "dummy0"), None);
        assert_eq!(ipv4_prefix("", Ipv4Addr::LOCALHOST, "lo"), None);
    }

    #[test]
    fn pinned_memory_is_read_in_bytes() {
        assert_eq!(pinned_in("Name:\tx\nVmLck:\t       0 kB\nVmPin:\t    2048 kB\n"), Some(2 << 20));
        assert_eq!(pinned_in("nothing of the kind"), None);
    }
}
