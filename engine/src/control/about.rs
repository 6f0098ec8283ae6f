//! What a source says of itself behind the list of its ranges: its name, and the devices that it serves over.
//!
//! ```text
//! length of the name (1), the name
//! number of devices (1), then for each:
//!   length of its name (1), the name
//!   port (1), link layer (1): 1 InfiniBand, 2 Ethernet
//!   GID (16)
//!   NUMA node + 1 (2), 0 if it is not known
//! ```

use std::net::Ipv6Addr;

use super::wire::{WireError, array};

/// Bytes of a source's name, at most: [`Config::name`](crate::Config::name).
pub(crate) const NAME_BYTES_MAX: usize = 255;
/// As many as an engine may have.
const DEVICES_MAX: u8 = 16;
/// Bytes of a device's name: the kernel's limit, less its end.
const DEVICE_NAME_BYTES_MAX: usize = 63;
/// Of a device, behind its name.
const DEVICE_BYTES: usize = 1 + 1 + 16 + 2;
/// The most that all of it takes.
pub(super) const ABOUT_BYTES_MAX: u64 =
    (1 + NAME_BYTES_MAX + 1 + DEVICES_MAX as usize * (1 + DEVICE_NAME_BYTES_MAX + DEVICE_BYTES)) as u64;

/// What links a port to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceLink {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: `RoCE`.
    Ethernet,
}

/// A device that a source serves over, as its host has it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteDevice {
    /// Its name there, as `rdma link` prints it. Names that are longer than 63 bytes are cut.
    pub name: String,
    /// The port, from 1.
    pub port: u8,
    /// What links it to others.
    pub link: DeviceLink,
    /// The port's GID; of `RoCE` over IPv4 the IPv4-mapped address.
    pub gid: Ipv6Addr,
    /// The NUMA node that it hangs off; `None` where its host does not say, as for Soft-RoCE.
    pub numa_node: Option<u16>,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) name: String,
    /// In the order in which the engine was given them; at most 16.
    pub(crate) devices: Vec<RemoteDevice>,
}

impl About {
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        put_text(bytes, &self.name, NAME_BYTES_MAX);
        let devices = &self.devices[..self.devices.len().min(DEVICES_MAX.into())];
        bytes.extend(u8::try_from(devices.len()));
        for RemoteDevice { name, port, link, gid, numa_node } in devices {
            put_text(bytes, name, DEVICE_NAME_BYTES_MAX);
            let link = match link {
                DeviceLink::InfiniBand => 1,
                DeviceLink::Ethernet => 2,
            };
            bytes.extend([*port, link]);
            bytes.extend(gid.octets());
            bytes.extend(numa_node.map_or(0, |node| node.saturating_add(1)).to_be_bytes());
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (name, rest) = take_text(bytes, NAME_BYTES_MAX, "the name of a source")?;
        let (&count, mut rest) = rest.split_first().ok_or(WireError::AboutCut)?;
        if count > DEVICES_MAX {
            return Err(WireError::TooManyDevices { found: count });
        }
        let mut devices = Vec::with_capacity(count.into());
        for _ in 0..count {
            let (name, behind) = take_text(rest, DEVICE_NAME_BYTES_MAX, "the name of a device")?;
            let (entry, behind) = behind.split_first_chunk::<DEVICE_BYTES>().ok_or(WireError::AboutCut)?;
            rest = behind;
            let link = match entry[1] {
                1 => DeviceLink::InfiniBand,
                2 => DeviceLink::Ethernet,
                found => return Err(WireError::Unknown { field: "link layer", found }),
            };
            let (gid, node) = (Ipv6Addr::from(array::<16>(entry, 2)), u16::from_be_bytes(array(entry, 18)));
            devices.push(RemoteDevice { name, port: entry[0], link, gid, numa_node: node.checked_sub(1) });
        }
        if !rest.is_empty() {
            return Err(WireError::AboutLong { left: rest.len() });
        }
        Ok(Self { name, devices })
    }
}

/// The text as far as it fits, and its length before it.
fn put_text(bytes: &mut Vec<u8>, text: &str, max: usize) {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    bytes.extend(u8::try_from(end));
    bytes.extend_from_slice(&text.as_bytes()[..end]);
}

fn take_text<'a>(bytes: &'a [u8], max: usize, what: &'static str) -> Result<(String, &'a [u8]), WireError> {
    let (&length, rest) = bytes.split_first().ok_or(WireError::AboutCut)?;
    if usize::from(length) > max {
        return Err(WireError::LongName { what, found: length });
    }
    let (text, rest) = rest.split_at_checked(length.into()).ok_or(WireError::AboutCut)?;
    let text = std::str::from_utf8(text).map_err(|_| WireError::NameNotUtf8 { what })?;
    Ok((text.to_owned(), rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn device(name: &str, numa_node: Option<u16>) -> RemoteDevice {
        let gid = Ipv6Addr::from([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
        RemoteDevice { name: name.to_owned(), port: 1, link: DeviceLink::Ethernet, gid, numa_node }
    }

    fn encoded(about: &About) -> Vec<u8> {
        let mut bytes = Vec::new();
        about.encode(&mut bytes);
        bytes
    }

    #[test]
    fn golden_about() {
        let about = About { name: "kv".to_owned(), devices: vec![device("rxe0", None), device("m", Some(1))] };
        let mut golden = b"\x02kv\x02\x04rxe0\x01\x02".to_vec();
        golden.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1, 0, 0]);
        golden.extend(b"\x01m\x01\x02");
        golden.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1, 0, 2]);
        assert_eq!(encoded(&about), golden);
        assert_eq!(About::decode(&golden), Ok(about));
        assert_eq!(encoded(&About::default()), [0, 0]);
        let longest = About { name: "x".repeat(255), devices: vec![device(&"n".repeat(63), Some(7)); 16] };
        assert_eq!(encoded(&longest).len() as u64, ABOUT_BYTES_MAX);
    }

    #[test]
    fn what_is_too_long_is_cut_between_characters() {
        let about = About { name: format!("{}é", "x".repeat(254)), devices: vec![device(&"é".repeat(40), None); 17] };
        let read = About::decode(&encoded(&about)).expect("sound");
        assert_eq!((read.name.len(), read.devices.len(), read.devices[0].name.len()), (254, 16, 62));
    }

    #[test]
    fn each_thing_that_can_be_wrong_is_named() {
        let good = encoded(&About { name: "kv".to_owned(), devices: vec![device("rxe0", None)] });
        for cut in 0..good.len() {
            assert!(About::decode(&good[..cut]).is_err(), "cut to {cut}");
        }
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            About::decode(&bytes).expect_err("spoilt")
        };
        assert_eq!(with(3, 17), WireError::TooManyDevices { found: 17 });
        assert_eq!(with(3, 0), WireError::AboutLong { left: good.len() - 4 });
        assert_eq!(with(1, 0xff), WireError::NameNotUtf8 { what: "the name of a source" });
        assert_eq!(with(4, 64), WireError::LongName { what: "the name of a device", found: 64 });
        assert_eq!(with(4, 63), WireError::AboutCut);
        assert_eq!(with(10, 3), WireError::Unknown { field: "link layer", found: 3 });
    }

    proptest! {
        #[test]
        fn what_can_be_read_is_written_the_same(bytes in any::<Vec<u8>>()) {
            if let Ok(about) = About::decode(&bytes) {
                prop_assert_eq!(encoded(&about), bytes);
            }
        }
    }
}
