//! Devices and opened devices: names, limits, ports, GID tables.

use std::{
    ffi::{CStr, c_int},
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    ptr::NonNull,
};

use ibverbs_sys as ffi;
use verbs_bootstrap::{Gid, GidType, LinkLayer, Mtu};

use super::{check, log_failed_destroy};

/// The devices that libibverbs sees. Owns the list, and with it each device that is not opened.
pub(super) struct DeviceList {
    raw: NonNull<*mut ffi::ibv_device>,
    len: usize,
}

impl DeviceList {
    /// Reads the list.
    ///
    /// # Errors
    ///
    /// `ENOSYS` without kernel support, `EPERM`, `ENOMEM`.
    pub(super) fn get() -> io::Result<Self> {
        let mut count: c_int = 0;
        // SAFETY: the argument is null or points to an int to be written (ibv_get_device_list(3)); `count` is one
        // and outlives the call.
        let raw = unsafe { ffi::ibv_get_device_list(&raw mut count) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { raw, len: usize::try_from(count).unwrap_or(0) })
    }

    /// The devices' names, in libibverbs' order.
    pub(super) fn names(&self) -> Vec<String> {
        self.devices().map(device_name).collect()
    }

    /// Opens the device of that name; `None` when there is none.
    pub(super) fn open(&self, name: &str) -> Option<io::Result<Context>> {
        let device = self.devices().find(|device| device_name(*device) == name)?;
        // SAFETY: `device` is an entry of the list, which `self` keeps alive during the call; an opened context
        // holds its own reference to the device from then on (ibv_free_device_list(3)).
        let raw = unsafe { ffi::ibv_open_device(device.as_ptr()) };
        Some(match NonNull::new(raw) {
            None => Err(io::Error::last_os_error()),
            Some(raw) => Context { raw, name: name.to_owned() }.with_nonblocking_events(),
        })
    }

    fn devices(&self) -> impl Iterator<Item = NonNull<ffi::ibv_device>> + '_ {
        (0..self.len).filter_map(|index| {
            // SAFETY: the call that gave `raw` said that `len` entries follow it (and one null), and the array lives
            // until `Drop`.
            let entry = unsafe { self.raw.add(index) };
            // SAFETY: as above; the entries are pointers that were set before the call returned.
            let device = unsafe { entry.read() };
            NonNull::new(device)
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: `raw` came from ibv_get_device_list and is freed here once; nothing borrows it, since `devices`
        // borrows `self`.
        unsafe { ffi::ibv_free_device_list(self.raw.as_ptr()) };
    }
}

fn device_name(device: NonNull<ffi::ibv_device>) -> String {
    // SAFETY: callers pass an entry of a live list or the device of an open context; the call returns a pointer into
    // that device.
    let name = unsafe { ffi::ibv_get_device_name(device.as_ptr()) };
    if name.is_null() {
        return String::new();
    }
    // SAFETY: not null, and libibverbs keeps the name NUL-terminated inside the device, which is live (see above).
    let name = unsafe { CStr::from_ptr(name) };
    name.to_string_lossy().into_owned()
}

/// An opened device.
pub(crate) struct Context {
    raw: NonNull<ffi::ibv_context>,
    name: String,
}

// SAFETY: libibverbs may be called from any thread on one context (its thread-safety is part of the API: each
// provider locks what it shares), and nothing in a context is bound to the thread that opened it.
unsafe impl Send for Context {}
// SAFETY: as above; every method here only makes such calls or reads fields that are constant after the open.
unsafe impl Sync for Context {}

impl Context {
    fn with_nonblocking_events(self) -> io::Result<Self> {
        rustix::fs::fcntl_setfl(self.async_fd(), rustix::fs::OFlags::NONBLOCK)?;
        Ok(self)
    }

    /// The device's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::ibv_context {
        self.raw.as_ptr()
    }

    /// The function table of the provider.
    pub(super) fn ops(&self) -> ffi::ibv_context_ops {
        // SAFETY: `raw` is live until `Drop`, and the provider fills `ops` once, during the open.
        unsafe { (*self.raw.as_ptr()).ops }
    }

    /// The fd that async events come by; non-blocking.
    pub(super) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `raw` is live until `Drop`; the field is constant after the open.
        let fd = unsafe { (*self.raw.as_ptr()).async_fd };
        // SAFETY: the context owns the fd and closes it in `ibv_close_device`, which `Drop` calls, so it stays open
        // for the borrow of `self`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Completion vectors, at least 1.
    pub(super) fn completion_vectors(&self) -> u32 {
        // SAFETY: `raw` is live until `Drop`; the field is constant after the open.
        let vectors = unsafe { (*self.raw.as_ptr()).num_comp_vectors };
        u32::try_from(vectors).unwrap_or(1).max(1)
    }

    /// What the device can do.
    ///
    /// # Errors
    ///
    /// The device's.
    pub(super) fn attributes(&self) -> io::Result<DeviceAttributes> {
        let mut raw = ffi::ibv_device_attr::default();
        // SAFETY: the context is live; `raw` is a whole `ibv_device_attr`, a struct frozen since version 1.1 of the
        // library, to be written during the call.
        check(unsafe { ffi::ibv_query_device(self.as_ptr(), &raw mut raw) })?;
        let count = |value: c_int| u32::try_from(value).unwrap_or(0);
        let small = |value: c_int| u8::try_from(value.clamp(0, 255)).unwrap_or(u8::MAX);
        Ok(DeviceAttributes {
            node_guid: u64::from_be(raw.node_guid),
            vendor_id: raw.vendor_id,
            firmware: fixed_text(&raw.fw_ver),
            ports: raw.phys_port_cnt,
            qps: count(raw.max_qp),
            qp_wrs: count(raw.max_qp_wr),
            srqs: count(raw.max_srq),
            srq_wrs: count(raw.max_srq_wr),
            srq_sges: count(raw.max_srq_sge),
            cqs: count(raw.max_cq),
            cqes: count(raw.max_cqe),
            sges: count(raw.max_sge),
            mrs: count(raw.max_mr),
            mr_bytes: raw.max_mr_size,
            rd_atomic_initiator: small(raw.max_qp_init_rd_atom),
            rd_atomic_responder: small(raw.max_qp_rd_atom),
            memory_windows: count(raw.max_mw),
            capabilities: raw.device_cap_flags,
        })
    }

    /// One port, from 1.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have.
    pub(super) fn port(&self, port: u8) -> io::Result<PortAttributes> {
        let mut raw = ffi::ibv_port_attr::default();
        // SAFETY: the context is live. The exported symbol takes the struct as it was before `port_cap_flags2` and
        // writes at most that prefix; `raw` is the longer one, zeroed.
        check(unsafe { ffi::ibv_query_port(self.as_ptr(), port, (&raw mut raw).cast()) })?;
        Ok(PortAttributes {
            state: PortState(raw.state),
            active_mtu: mtu_from_raw(raw.active_mtu),
            max_mtu: mtu_from_raw(raw.max_mtu),
            message_bytes: raw.max_msg_sz,
            lid: raw.lid,
            gids: usize::try_from(raw.gid_tbl_len).unwrap_or(0),
            pkeys: raw.pkey_tbl_len,
            link_layer: if u32::from(raw.link_layer) == ffi::IBV_LINK_LAYER_ETHERNET {
                LinkLayer::Ethernet
            } else {
                LinkLayer::InfiniBand // "unspecified" means InfiniBand: verbs before RoCE had no such field
            },
        })
    }

    /// All GIDs of a port that are set; empty slots are left out.
    ///
    /// # Errors
    ///
    /// The device's.
    pub(super) fn gids(&self, port: u8) -> io::Result<Vec<GidSlot>> {
        let ports = self.attributes()?.ports;
        let mut slots = 0;
        for number in 1..=ports {
            slots += self.port(number)?.gids;
        }
        let mut table = vec![ffi::ibv_gid_entry::default(); slots];
        // SAFETY: the context is live; `table` has room for `slots` entries of the stated size and is written to
        // during the call only (ibv_query_gid_table(3)).
        let found = unsafe {
            ffi::_ibv_query_gid_table(self.as_ptr(), table.as_mut_ptr(), slots, 0, size_of::<ffi::ibv_gid_entry>())
        };
        let found =
            usize::try_from(found).map_err(|_| io::Error::from_raw_os_error(i32::try_from(-found).unwrap_or(0)))?;
        table.truncate(found);
        let of_port = table.iter().filter(|entry| entry.port_num == u32::from(port));
        Ok(of_port.filter_map(GidSlot::from_raw).filter(|slot| !slot.gid.is_zero()).collect())
    }

    /// The GID at one index, `None` when that slot is empty or out of range.
    pub(super) fn gid_at(&self, port: u8, index: u8) -> Option<GidSlot> {
        let mut raw = ffi::ibv_gid_entry::default();
        // SAFETY: the context is live and `raw` is one entry of the stated size, written during the call.
        let rc = unsafe {
            ffi::_ibv_query_gid_ex(
                self.as_ptr(),
                u32::from(port),
                u32::from(index),
                &raw mut raw,
                0,
                size_of::<ffi::ibv_gid_entry>(),
            )
        };
        check(rc).ok()?;
        GidSlot::from_raw(&raw).filter(|slot| !slot.gid.is_zero())
    }

    /// The partition key at index 0 of a port's table, the default partition.
    ///
    /// # Errors
    ///
    /// The device's.
    pub(super) fn default_pkey(&self, port: u8) -> io::Result<u16> {
        let mut pkey: ffi::__be16 = 0;
        // SAFETY: the context is live and `pkey` is written during the call.
        check(unsafe { ffi::ibv_query_pkey(self.as_ptr(), port, 0, &raw mut pkey) })?;
        Ok(u16::from_be(pkey))
    }
}

impl AsRawFd for Context {
    fn as_raw_fd(&self) -> RawFd {
        self.async_fd().as_raw_fd()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: `raw` came from ibv_open_device and is closed here once. Whatever was made from it holds an `Arc`
        // of `self` and is gone.
        log_failed_destroy("ibv_close_device", unsafe { ffi::ibv_close_device(self.raw.as_ptr()) });
    }
}

/// What a device can do, from `ibv_query_device`.
#[derive(Clone, Debug)]
pub(crate) struct DeviceAttributes {
    pub(crate) node_guid: u64,
    /// The maker's OUI.
    pub(crate) vendor_id: u32,
    pub(crate) firmware: String,
    pub(crate) ports: u8,
    pub(crate) qps: u32,
    pub(crate) qp_wrs: u32,
    pub(crate) srqs: u32,
    pub(crate) srq_wrs: u32,
    pub(crate) srq_sges: u32,
    pub(crate) cqs: u32,
    pub(crate) cqes: u32,
    pub(crate) sges: u32,
    pub(crate) mrs: u32,
    pub(crate) mr_bytes: u64,
    pub(crate) rd_atomic_initiator: u8,
    pub(crate) rd_atomic_responder: u8,
    pub(crate) memory_windows: u32,
    /// `ibv_device_cap_flags`.
    pub(crate) capabilities: u32,
}

/// One port, from `ibv_query_port`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortAttributes {
    pub(crate) state: PortState,
    /// `None`: a number that is no MTU.
    pub(crate) active_mtu: Option<Mtu>,
    pub(crate) max_mtu: Option<Mtu>,
    pub(crate) message_bytes: u32,
    pub(crate) lid: u16,
    pub(crate) gids: usize,
    pub(crate) pkeys: u16,
    pub(crate) link_layer: LinkLayer,
}

/// `ibv_port_state`, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortState(pub(crate) u32);

impl PortState {
    pub(crate) const fn is_active(self) -> bool {
        self.0 == ffi::ibv_port_state::IBV_PORT_ACTIVE
    }

    pub(crate) const fn name(self) -> &'static str {
        match self.0 {
            ffi::ibv_port_state::IBV_PORT_NOP => "NOP",
            ffi::ibv_port_state::IBV_PORT_DOWN => "DOWN",
            ffi::ibv_port_state::IBV_PORT_INIT => "INIT",
            ffi::ibv_port_state::IBV_PORT_ARMED => "ARMED",
            ffi::ibv_port_state::IBV_PORT_ACTIVE => "ACTIVE",
            ffi::ibv_port_state::IBV_PORT_ACTIVE_DEFER => "ACTIVE_DEFER",
            _ => "unknown",
        }
    }
}

/// One filled slot of a port's GID table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GidSlot {
    pub(crate) index: u8,
    pub(crate) gid: Gid,
    pub(crate) gid_type: GidType,
}

impl GidSlot {
    /// `None` for an index above 255: an address handle has eight bits for it.
    fn from_raw(raw: &ffi::ibv_gid_entry) -> Option<Self> {
        // SAFETY: both variants of the union are 16 bytes without padding or invalid values.
        let gid = Gid(unsafe { raw.gid.raw });
        let gid_type = match raw.gid_type {
            ffi::IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
            ffi::IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
            _ => GidType::Ib,
        };
        Some(Self { index: u8::try_from(raw.gid_index).ok()?, gid, gid_type })
    }
}

const fn mtu_from_raw(raw: ffi::ibv_mtu) -> Option<Mtu> {
    Some(match raw {
        ffi::IBV_MTU_256 => Mtu::B256,
        ffi::IBV_MTU_512 => Mtu::B512,
        ffi::IBV_MTU_1024 => Mtu::B1024,
        ffi::IBV_MTU_2048 => Mtu::B2048,
        ffi::IBV_MTU_4096 => Mtu::B4096,
        _ => return None,
    })
}

/// A C array of characters, up to its first NUL.
fn fixed_text(text: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = text.iter().take_while(|c| **c != 0).map(|c| c.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
