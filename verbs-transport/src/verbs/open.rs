//! Opening a device: what is asked for, what is found, and every way in which it fails.
#![deny(unsafe_code)]

use std::{
    fs, io,
    sync::{Arc, RwLock},
};

use ibverbs_sys::{self as ffi, ibv_access_flags};
use rustix::process::{Resource, getrlimit};
use verbs_bootstrap::{Gid, GidType, Mtu, PortIdentity, RdAtomic};

use super::{
    context::{Context, DeviceAttributes, DeviceList},
    cq::{Channel, Cq},
    fabric::{Shared, capped},
    mr::{SlabMr, pool_bytes},
    pd::Pd,
    srq::Srq,
    sysfs,
};
use crate::{
    fabric::{
        DeviceLimits, SLAB_BYTES, SlabSizes,
        bulk::{WindowPolicy, WindowSupport},
    },
    select::{self, Choice, ChooseError, GidInfo, PortInfo, Wanted},
};

/// Which device to open, and what to make on it.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Device name as `rdma link` prints it. Default: chosen, see [`crate::select`].
    pub device: Option<String>,
    /// Port, from 1. Default: chosen.
    pub port: Option<u8>,
    /// Our GID by value. Default: chosen.
    pub gid: Option<Gid>,
    /// Our GID by index. Indices move when addresses come and go, so prefer `gid`. Default: chosen.
    pub gid_index: Option<u8>,
    /// How packets must travel. Default: `RoCE` v2 where there is a choice.
    pub gid_type: Option<GidType>,
    /// A peer's GID: a GID of ours in its subnet is preferred. Default: none.
    pub peer: Option<Gid>,
    /// Receive and send slabs. Memory is their product, pinned: the default, 4,032 to receive and 252 to send of
    /// [`SLAB_BYTES`] each, takes 34 MiB. Too few receive slabs refuse peers (70 each at the default window).
    pub slabs: SlabSizes,
    /// Completions that the CQ holds, at least 1. Must cover all that can complete at once, flushes included: an
    /// overrun ends every QP. Default 16,383: devices round up to a power of two less one, and one more would take twice
    /// the memory (4 MiB on Soft-RoCE).
    pub cq_depth: u32,
    /// Uses a smaller path MTU than the port's. Default: none.
    pub mtu_cap: Option<Mtu>,
    /// Completion vector for the CQ's interrupts, taken modulo the device's number of them. Default 0.
    pub completion_vector: u32,
    /// Whether bulk ports use memory windows. Default: where the device has usable ones.
    pub windows: WindowPolicy,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            device: None,
            port: None,
            gid: None,
            gid_index: None,
            gid_type: None,
            peer: None,
            slabs: SlabSizes {
                receive_slabs: 4032,
                receive_bytes: SLAB_BYTES,
                send_slabs: 252,
                send_bytes: SLAB_BYTES,
            },
            cq_depth: 16_383,
            mtu_cap: None,
            completion_vector: 0,
            windows: WindowPolicy::Auto,
        }
    }
}

/// A device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// libibverbs sees no device. Load the NIC's RDMA driver, or make a Soft-RoCE device.
    #[error(
        "no RDMA device{}: load the NIC's RDMA driver (`rdma link` lists what the kernel has), \
         or add a software device: `modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0`",
        kernel_only(kernel_has)
    )]
    NoDevices {
        /// Devices that the kernel has and that libibverbs could not use: their `/dev/infiniband` node or their
        /// user-space provider is missing.
        kernel_has: Vec<String>,
        /// The list itself could not be read.
        source: Option<io::Error>,
    },
    /// Nothing fits the configuration: no such device, port or GID, or the port is down.
    #[error(transparent)]
    Choice(#[from] ChooseError),
    /// The device's node may not be opened. Without read access to it the kernel says ENOENT as well as EACCES.
    #[error(
        "may not open {device}: {source}; as user {uid}, check that /dev/infiniband/uverbs* exists and is readable \
         and writable (a udev rule of rdma-core gives it mode 0666)"
    )]
    Permission {
        /// The device.
        device: String,
        /// Our effective user id.
        uid: u32,
        /// The system's errno.
        source: io::Error,
    },
    /// The slabs cannot be pinned: raise the locked-memory limit or configure fewer or smaller slabs.
    #[error(
        "the slabs need {need_bytes} bytes of locked memory, but RLIMIT_MEMLOCK is {have_bytes} bytes and \
         {pinned_bytes} are pinned already ({source}); raise it (`ulimit -l`, LimitMEMLOCK= of systemd, memlock in \
         /etc/security/limits.conf) or configure fewer or smaller slabs"
    )]
    MemlockTooSmall {
        /// Bytes in all slabs.
        need_bytes: u64,
        /// The limit.
        have_bytes: u64,
        /// What this process has pinned before.
        pinned_bytes: u64,
        /// The system's errno.
        source: io::Error,
    },
    /// More receive slabs than the device's SRQ takes.
    #[error("{asked} receive slabs, but an SRQ of {device} holds at most {limit}: configure fewer")]
    SrqTooLarge {
        /// The device.
        device: String,
        /// As configured.
        asked: u32,
        /// `max_srq_wr`.
        limit: u32,
    },
    /// A deeper CQ than the device has.
    #[error("cq_depth is {asked}, but a CQ of {device} holds 1 to {limit}: configure less, with fewer peers")]
    CqTooLarge {
        /// The device.
        device: String,
        /// As configured.
        asked: u32,
        /// `max_cqe`.
        limit: u32,
    },
    /// No slabs, empty slabs, or more bytes than an address space has.
    #[error("slabs must have a size and a number, within the address space: {slabs:?}")]
    SlabSizes {
        /// As configured.
        slabs: SlabSizes,
    },
    /// A call failed for another reason.
    #[error("{what} on {device} failed: {source}")]
    Device {
        /// The device.
        device: String,
        /// Which call.
        what: &'static str,
        /// The device's errno.
        source: io::Error,
    },
}

impl Shared {
    pub(super) fn open(config: &DeviceConfig) -> Result<Self, OpenError> {
        let sizes = config.slabs;
        let need_bytes = pool_bytes(sizes.receive_slabs, sizes.receive_bytes)
            .zip(pool_bytes(sizes.send_slabs, sizes.send_bytes))
            .and_then(|((receive, _), (send, _))| receive.checked_add(send))
            .ok_or(OpenError::SlabSizes { slabs: sizes })? as u64;

        let (context, choice) = open_chosen(config)?;
        let context = Arc::new(context);
        let device = context.name().to_owned();
        let failed = |what| {
            let device = device.clone();
            move |source| OpenError::Device { device, what, source }
        };

        let attributes = context.attributes().map_err(failed("ibv_query_device"))?;
        let port = context.port(choice.port).map_err(failed("ibv_query_port"))?;
        let pkey = context.default_pkey(choice.port).map_err(failed("ibv_query_pkey"))?;
        if sizes.receive_slabs > attributes.srq_wrs {
            return Err(OpenError::SrqTooLarge { device, asked: sizes.receive_slabs, limit: attributes.srq_wrs });
        }
        if config.cq_depth == 0 || config.cq_depth > attributes.cqes {
            return Err(OpenError::CqTooLarge { device, asked: config.cq_depth, limit: attributes.cqes });
        }

        let pd = Arc::new(Pd::new(&context).map_err(failed("ibv_alloc_pd"))?);
        let channel = Arc::new(Channel::new(&context).map_err(failed("ibv_create_comp_channel"))?);
        let vector = config.completion_vector % context.completion_vectors();
        let cq = Cq::new(Arc::clone(&channel), config.cq_depth, vector).map_err(failed("ibv_create_cq"))?;
        let cq = Arc::new(cq);
        let pinned_bytes = sysfs::pinned_bytes();
        let register = |slabs, bytes| {
            let made = SlabMr::new(&pd, slabs, bytes, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE);
            made.map(Arc::new).map_err(|source| registration_error(&device, need_bytes, pinned_bytes, source))
        };
        let receive = register(sizes.receive_slabs, sizes.receive_bytes)?;
        let send = register(sizes.send_slabs, sizes.send_bytes)?;
        let srq = Arc::new(Srq::new(&pd, Arc::clone(&receive)).map_err(failed("ibv_create_srq"))?);

        // A port that states no known MTU gets the least that all have.
        let mtu = capped(port.active_mtu.unwrap_or(Mtu::B256), config.mtu_cap);
        let identity = PortIdentity {
            device_guid: attributes.node_guid,
            port: choice.port,
            link_layer: port.link_layer,
            lid: port.lid,
            gid: choice.gid.gid,
            gid_type: choice.gid.gid_type,
            gid_index: choice.gid.index,
            pkey,
            mtu,
        };
        let limits = DeviceLimits {
            qp_wrs: attributes.qp_wrs,
            srq_wrs: attributes.srq_wrs,
            cqes: attributes.cqes,
            cq_depth: cq.depth(),
            qps: attributes.qps,
            message_bytes: u64::from(port.message_bytes),
            rd_atomic: RdAtomic {
                initiator: attributes.rd_atomic_initiator,
                responder: attributes.rd_atomic_responder,
            },
        };
        let windows = window_support(config.windows, &device, &attributes);
        Ok(Self {
            srq,
            cq,
            channel,
            receive,
            send,
            pd,
            context,
            limits,
            port: RwLock::new(identity),
            mtu_cap: config.mtu_cap,
            windows,
            reason: choice.reason,
            chosen_index: choice.gid.index,
        })
    }
}

/// Looks at every device, or only at the one that is named, and opens the chosen one.
fn open_chosen(config: &DeviceConfig) -> Result<(Context, Choice), OpenError> {
    let list = match DeviceList::get() {
        Ok(list) => list,
        Err(error) => return Err(OpenError::NoDevices { kernel_has: sysfs::device_names(), source: Some(error) }),
    };
    let names = list.names();
    if names.is_empty() {
        return Err(OpenError::NoDevices { kernel_has: sysfs::device_names(), source: None });
    }
    let wanted = Wanted {
        device: config.device.clone(),
        port: config.port,
        gid: config.gid,
        gid_index: config.gid_index,
        gid_type: config.gid_type,
        peer: config.peer,
    };
    if let Some(name) = wanted.device.clone().filter(|name| !names.contains(name)) {
        return Err(ChooseError::UnknownDevice { name, have: names }.into());
    }
    let mut opened = Vec::new();
    let mut ports = Vec::new();
    let mut refused = None;
    for name in names.iter().filter(|name| wanted.device.as_ref().is_none_or(|wanted| wanted == *name)) {
        let Some(result) = list.open(name) else { continue };
        match result {
            Ok(context) => {
                match port_infos(&context) {
                    Ok(infos) => ports.extend(infos),
                    Err(error) => {
                        refused =
                            Some(OpenError::Device { device: name.clone(), what: "reading its ports", source: error });
                        continue;
                    }
                }
                opened.push(context);
            }
            Err(source) => {
                tracing::warn!(device = %name, error = %source, "device cannot be opened");
                refused = Some(open_error(name, source));
            }
        }
    }
    match (opened.is_empty(), refused) {
        (true, Some(error)) => return Err(error),
        (true, None) => return Err(OpenError::NoDevices { kernel_has: sysfs::device_names(), source: None }),
        (false, _) => {}
    }
    let choice = select::choose(&ports, &wanted)?;
    match opened.into_iter().find(|context| context.name() == choice.device) {
        Some(context) => Ok((context, choice)),
        None => Err(ChooseError::NoDevices.into()), // `choose` names one of `ports`, which come from `opened`
    }
}

fn port_infos(context: &Context) -> io::Result<Vec<PortInfo>> {
    let ports = context.attributes()?.ports;
    let same_numa_node = sysfs::same_numa_node(context.name());
    let prefixes = sysfs::Prefixes::read();
    (1..=ports)
        .map(|port| {
            let attributes = context.port(port)?;
            let gids = context.gids(port)?.into_iter().map(|slot| {
                let (netdev, name) = sysfs::netdev(context.name(), port, slot.index);
                let prefix_bits = name.and_then(|name| prefixes.bits(slot.gid, &name));
                GidInfo { index: slot.index, gid: slot.gid, gid_type: slot.gid_type, netdev, prefix_bits }
            });
            Ok(PortInfo {
                device: context.name().to_owned(),
                port,
                active: attributes.state.is_active(),
                state: attributes.state.name().to_owned(),
                same_numa_node,
                gids: gids.collect(),
            })
        })
        .collect()
}

/// Soft-RoCE does not enforce the bounds of windows. The kernel tells it by its network device, which only it has as a
/// parent, and by a vendor id that is nobody's.
fn window_support(policy: WindowPolicy, device: &str, attributes: &DeviceAttributes) -> WindowSupport {
    const NOBODY: u32 = 0x00ff_ffff;
    let type_2b = attributes.capabilities & ffi::IBV_DEVICE_MEM_WINDOW_TYPE_2B != 0;
    let enforced = attributes.vendor_id != NOBODY && !sysfs::is_soft_roce(device);
    WindowSupport::judge(policy, type_2b, attributes.memory_windows, enforced)
}

fn open_error(device: &str, source: io::Error) -> OpenError {
    let device = device.to_owned();
    match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound => {
            OpenError::Permission { device, uid: rustix::process::geteuid().as_raw(), source }
        }
        _ => OpenError::Device { device, what: "ibv_open_device", source },
    }
}

/// ENOMEM has two meanings here: the limit, or memory. The numbers tell which.
fn registration_error(device: &str, need_bytes: u64, pinned_bytes: u64, source: io::Error) -> OpenError {
    let limit = getrlimit(Resource::Memlock).current;
    let refused = matches!(source.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::PermissionDenied);
    match limit {
        Some(have_bytes) if refused && have_bytes < need_bytes.saturating_add(pinned_bytes) => {
            OpenError::MemlockTooSmall { need_bytes, have_bytes, pinned_bytes, source }
        }
        _ => OpenError::Device { device: device.to_owned(), what: "ibv_reg_mr", source },
    }
}

fn kernel_only(names: &[String]) -> String {
    if names.is_empty() {
        return String::new();
    }
    let nodes = fs::read_dir("/dev/infiniband").map_or(0, Iterator::count);
    format!(
        " that libibverbs can use (the kernel has {}; /dev/infiniband holds {nodes} nodes: is ib_uverbs loaded, and \
         is the provider package ibverbs-providers installed?)",
        names.join(", ")
    )
}
