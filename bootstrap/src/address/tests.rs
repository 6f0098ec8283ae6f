//! Golden bytes, other transports' entries, and every way to be unreadable.

use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::*;

fn endpoint() -> Endpoint {
    let gid = Gid(Ipv4Addr::new(10, 99, 1, 1).to_ipv6_mapped().octets());
    Endpoint {
        instance: InstanceId(0xa1),
        incarnation: Incarnation(0xb1),
        bootstrap: vec![SocketAddr::from(([10, 99, 1, 1], 4711)), SocketAddr::from((Ipv6Addr::LOCALHOST, 80))],
        devices: vec![DeviceHint { gid, gid_index: 3, gid_type: GidType::RoceV2, mtu: Mtu::B1024, numa_node: Some(1) }],
    }
}

/// What the entry of [`endpoint`] is, behind its version.
const ENTRY: &[u8] = b"\
    \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\xa1\0\0\0\0\0\0\0\xb1\
    \0\0\0\0\0\0\0\x02\
    \0\0\0\0\x0a\x63\x01\x01\x12\x67\
    \0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\x50\
    \0\0\0\0\0\0\0\x01\
    \0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x63\x01\x01\x03\0\0\0\x02\0\0\0\x02\x01\0\x01";

/// A map with these raw entries.
fn map(entries: &[(&[u8], &[u8])]) -> WorkerAddress {
    let mut bytes = vec![0x80 | u8::try_from(entries.len()).expect("few")];
    for (key, value) in entries {
        bytes.extend_from_slice(key);
        bytes.extend_from_slice(value);
    }
    WorkerAddress::from_bytes(bytes)
}

/// `ENTRY` with a version, as a msgpack bin.
fn bin(version: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xc4, u8::try_from(body.len() + 1).expect("short"), version];
    bytes.extend_from_slice(body);
    bytes
}

const KEY: &[u8] = b"\xa7ibverbs";

#[test]
fn golden_address() {
    let address = WorkerAddress::encode(&endpoint()).expect("a valid endpoint");
    assert_eq!(address, map(&[(KEY, &bin(1, ENTRY))]));
    assert_eq!(address.endpoint(), Ok(endpoint()));
}

#[test]
fn entries_of_other_transports_of_any_type_are_skipped() {
    let ours = bin(1, ENTRY);
    let others: [&[u8]; 22] = [
        b"\xc0",
        b"\xc2",
        b"\x05",
        b"\xff",
        b"\xcc\x01",
        b"\xcd\0\x01",
        b"\xce\0\0\0\x01",
        b"\xcf\0\0\0\0\0\0\0\x01",
        b"\xca\0\0\0\0",
        b"\xcb\0\0\0\0\0\0\0\0",
        b"\xa2hi",
        b"\xd9\x02hi",
        b"\xda\0\x02hi",
        b"\xc5\0\x02hi",
        b"\xc6\0\0\0\x02hi",
        b"\x92\x01\x91\x81\x01\xc0",
        b"\xdc\0\x01\x01",
        b"\xdf\0\0\0\x01\x01\x01",
        b"\xd4\x01\x01",
        b"\xd8\x010123456789abcdef",
        b"\xc7\x02\x01hi",
        b"\xc9\0\0\0\x02\x01hi",
    ];
    for other in others {
        for entries in [
            [(&b"\xa3tcp"[..], other), (KEY, &ours[..])],
            [(KEY, &ours[..]), (&b"\xa3tcp"[..], other)],
            [(other, &b"\x01"[..]), (KEY, &ours[..])],
        ] {
            assert_eq!(map(&entries).endpoint(), Ok(endpoint()), "beside {other:02x?}");
        }
    }
}

#[test]
fn no_entry_and_no_map_are_told_apart() {
    let no_entry = |entries| Err(AddressError::NoEndpoint(NoEndpoint::NoEntry { entries }));
    assert_eq!(WorkerAddress::empty().endpoint(), no_entry(0));
    assert_eq!(map(&[(b"\xa3tcp", b"\xc4\x01x"), (b"\xa7IBVERBS", b"\x01")]).endpoint(), no_entry(2));
    let whole = map(&[(KEY, &bin(1, ENTRY))]);
    let mut not_maps: Vec<Vec<u8>> =
        vec![vec![], b"\x93\x01\x02\x03".to_vec(), b"10.0.0.1:4711".to_vec(), vec![0xc1; 9]];
    not_maps.extend((1..whole.as_bytes().len()).map(|end| whole.as_bytes()[..end].to_vec()));
    not_maps.push([whole.as_bytes(), &b"\0"[..]].concat());
    for bytes in not_maps {
        let read = WorkerAddress::from_bytes(bytes.clone()).endpoint();
        assert!(matches!(read, Err(AddressError::NoEndpoint(NoEndpoint::NotAMap { .. }))), "{bytes:02x?}: {read:?}");
    }
    let long = WorkerAddress::from_bytes(vec![0x80; MAX_ADDRESS_BYTES + 1]).endpoint();
    assert!(matches!(long, Err(AddressError::NoEndpoint(NoEndpoint::TooLong { bytes: 65_537, max: 65_536 }))));
}

#[test]
fn entries_that_cannot_be_used_say_why() {
    let invalid = |value: &[u8]| match map(&[(KEY, value)]).endpoint() {
        Err(AddressError::InvalidEndpoint(why)) => why,
        other => panic!("{value:02x?} gave {other:?}"),
    };
    assert_eq!(invalid(&bin(2, ENTRY)), InvalidEndpoint::Version { theirs: 2, ours: 1 });
    assert_eq!(invalid(b"\xc4\0"), InvalidEndpoint::Truncated { bytes: 0 });
    assert_eq!(invalid(b"\xa2hi"), InvalidEndpoint::NotBytes { marker: 0xa2 });
    for end in 0..ENTRY.len() {
        assert_eq!(invalid(&bin(1, &ENTRY[..end])), InvalidEndpoint::Truncated { bytes: end + 1 });
    }
    let trailing = invalid(&bin(1, &[ENTRY, &b"\0"[..]].concat()));
    assert!(matches!(trailing, InvalidEndpoint::Unreadable { .. }), "{trailing}");
    let mut no_address = ENTRY[..24].to_vec();
    no_address.extend_from_slice(&[0; 16]);
    let why = invalid(&bin(1, &no_address)).to_string();
    assert!(why.contains("0 bootstrap addresses"), "{why}");
    let mut countless = ENTRY[..24].to_vec();
    countless.extend_from_slice(&[0xff; 8]);
    let why = invalid(&bin(1, &countless));
    assert!(matches!(why, InvalidEndpoint::Truncated { .. } | InvalidEndpoint::Unreadable { .. }), "{why}");
}

#[test]
fn texts_hold_numbers_and_a_remedy() {
    let version = AddressError::InvalidEndpoint(InvalidEndpoint::Version { theirs: 7, ours: 1 }).to_string();
    assert!(version.contains("version 7") && version.contains("update"), "{version}");
    let none = AddressError::NoEndpoint(NoEndpoint::NoEntry { entries: 2 }).to_string();
    assert!(none.contains("2 entries") && none.contains("started"), "{none}");
}

#[test]
fn deep_nesting_costs_no_stack() {
    let mut bytes = vec![0x81];
    bytes.extend(std::iter::repeat_n(0x91, 60_000));
    bytes.extend_from_slice(b"\xc0\xc0");
    let read = WorkerAddress::from_bytes(bytes).endpoint();
    assert_eq!(read, Err(AddressError::NoEndpoint(NoEndpoint::NoEntry { entries: 1 })));
}

#[test]
fn an_endpoint_without_address_or_with_too_many_is_refused() {
    let mut none = endpoint();
    none.bootstrap.clear();
    let error = WorkerAddress::encode(&none).expect_err("no address");
    assert_eq!((error.found, error.min, error.max), (0, 1, 8));
    let mut many = endpoint();
    many.devices = vec![many.devices[0]; 33];
    assert_eq!(WorkerAddress::encode(&many).expect_err("33 hints").what, "device hints");
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), at in 0_usize..120, byte in any::<u8>()) {
        let _ = WorkerAddress::from_bytes(bytes).endpoint();
        let mut changed = map(&[(KEY, &bin(1, ENTRY))]).as_bytes().to_vec();
        let at = at % changed.len();
        changed[at] = byte;
        let _ = WorkerAddress::from_bytes(changed).endpoint();
    }
}
