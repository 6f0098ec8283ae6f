//! Golden bytes, and everything that can be wrong with a frame.

use proptest::prelude::*;

use super::*;

/// Spaces are for the reader.
fn bytes<const N: usize>(hex: &str) -> [u8; N] {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("ascii"), 16).expect("hex");
    digits.chunks(2).map(pair).collect::<Vec<_>>().try_into().expect("as many as the frame has")
}

const EPOCH: Epoch =
    Epoch::from_bytes([0xe0, 0xe1, 0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xeb, 0xec, 0xed, 0xee, 0xef]);
const EPOCH_HEX: &str = "e0e1e2e3e4e5e6e7e8e9eaebecedeeef";

fn request(opcode: Opcode, region: u64, offset: u64, length: u64) -> Request {
    Request { opcode, epoch: EPOCH, region, offset, length, profile: Profile::Staged }
}

fn direct(opcode: Opcode, region: u64, offset: u64, length: u64) -> Request {
    Request { profile: Profile::Direct, ..request(opcode, region, offset, length) }
}

fn span(start: u64, length: u64) -> Span {
    Span::new(start, length).expect("sound")
}

#[test]
fn golden_requests() {
    let golden = [
        (request(Opcode::Describe, 0, 0, 0), "00 00", "0000000000000000 0000000000000000 0000000000000000"),
        (request(Opcode::Read, 7, 0x1000, 0x80_0000), "01 00", "0000000000000007 0000000000001000 0000000000800000"),
        (request(Opcode::Write, 8, 1, 2), "02 00", "0000000000000008 0000000000000001 0000000000000002"),
        (request(Opcode::Notify, 0, 5, 11), "03 00", "0000000000000000 0000000000000005 000000000000000b"),
        (request(Opcode::RdmaRead, 1, 2, 3), "04 00", "0000000000000001 0000000000000002 0000000000000003"),
        (request(Opcode::RdmaWrite, 1, 2, 3), "05 00", "0000000000000001 0000000000000002 0000000000000003"),
        (request(Opcode::SlicedRdmaRead, 1, 2, 3), "06 00", "0000000000000001 0000000000000002 0000000000000003"),
        (request(Opcode::SlicedRdmaWrite, 1, 2, 3), "07 00", "0000000000000001 0000000000000002 0000000000000003"),
        (direct(Opcode::Read, 7, 0x1000, 0x80_0000), "01 01", "0000000000000007 0000000000001000 0000000000800000"),
        (direct(Opcode::Write, 8, 1, 2), "02 01", "0000000000000008 0000000000000001 0000000000000002"),
        (direct(Opcode::RdmaRead, 1, 2, 3), "04 01", "0000000000000001 0000000000000002 0000000000000003"),
        (direct(Opcode::RdmaWrite, 1, 2, 3), "05 01", "0000000000000001 0000000000000002 0000000000000003"),
        (direct(Opcode::SlicedRdmaRead, 1, 2, 3), "06 01", "0000000000000001 0000000000000002 0000000000000003"),
        (direct(Opcode::SlicedRdmaWrite, 1, 2, 3), "07 01", "0000000000000001 0000000000000002 0000000000000003"),
    ];
    for (request, kind, fields) in golden {
        let frame = bytes(&format!("5652425345 4e474e 0001 {kind} {EPOCH_HEX} {fields}"));
        assert_eq!(request.encode(), frame, "{request:?} changed on the wire");
        assert_eq!(Request::decode(&frame), Ok(request));
    }
}

#[test]
fn golden_replies() {
    let statuses = [
        Status::Success,
        Status::EpochMismatch,
        Status::UnknownRegion,
        Status::PermissionDenied,
        Status::InvalidRange,
        Status::SourceClosed,
        Status::Exhausted,
        Status::ProtocolError,
        Status::InternalError,
        Status::Ready,
        Status::BackendUnavailable,
        Status::BackendError,
        Status::CacheMiss,
        Status::DirectRefused,
    ];
    for (number, status) in statuses.into_iter().enumerate() {
        let length = if status == Status::Success { 0x0102_0304_0506_0708 } else { 0 };
        let reply = Reply { status, epoch: EPOCH, length };
        let frame = bytes(&format!("5652425345 4e474e 0001 {number:02x} 00 {EPOCH_HEX} {length:016x}"));
        assert_eq!(reply.encode(), frame, "{reply:?} changed on the wire");
        assert_eq!(Reply::decode(&frame), Ok(reply));
    }
}

const DESCRIPTION: &str = "00000002
    0000000000000001 00007f0000001000 0000000000002000 01 00000000000000
    0000000000000009 00007f0000000000 0000000000000001 03 00000000000000
    00 00";

/// Two regions of a source without a name and devices.
fn description() -> [u8; 70] {
    bytes(DESCRIPTION)
}

fn with_regions(regions: &[Descriptor]) -> Description {
    Description { regions: regions.to_vec(), about: About::default() }
}

#[test]
fn golden_description() {
    let regions = [
        Descriptor { id: 1, span: span(0x7f00_0000_1000, 0x2000), permission: Permission::RemoteRead },
        Descriptor { id: 9, span: span(0x7f00_0000_0000, 1), permission: Permission::RemoteReadWrite },
    ];
    assert_eq!(with_regions(&regions).encode(), description());
    assert_eq!(Description::decode(&description()), Ok(with_regions(&regions)));
    assert_eq!(Description::decode(&with_regions(&[]).encode()), Ok(with_regions(&[])));
    let named =
        Description { about: About { name: "cache 7".to_owned(), devices: Vec::new() }, ..with_regions(&regions) };
    assert_eq!(named.encode()[..68], description()[..68]);
    assert_eq!(named.encode()[68..], *b"\x07cache 7\0");
    assert_eq!(Description::decode(&named.encode()), Ok(named));
    assert_eq!(Description::BYTES_MAX, 4 + 4096 * 32 + 1 + 255 + 1 + 16 * (1 + 63 + 20));
}

#[test]
fn every_other_version_is_refused() {
    // 2 to 14 are what wires of this kind called themselves before.
    for version in (0..=20).chain([u16::MAX]).filter(|version| *version != VERSION) {
        let mut frame = request(Opcode::Read, 1, 0, 1).encode();
        frame[8..10].copy_from_slice(&version.to_be_bytes());
        assert_eq!(Request::decode(&frame), Err(WireError::Version { found: version }));
        let mut frame = Reply { status: Status::Ready, epoch: EPOCH, length: 0 }.encode();
        frame[8..10].copy_from_slice(&version.to_be_bytes());
        assert_eq!(Reply::decode(&frame), Err(WireError::Version { found: version }));
    }
}

#[test]
fn every_value_of_every_header_byte_is_judged() {
    let sound = request(Opcode::Read, 1, 2, 3);
    for at in 0..HEAD_BYTES {
        for value in 0..=255 {
            let mut frame = sound.encode();
            frame[at] = value;
            let decoded = Request::decode(&frame);
            match at {
                _ if value == sound.encode()[at] => assert_eq!(decoded, Ok(sound)),
                0..8 => assert!(matches!(decoded, Err(WireError::Magic { .. })), "{at} {value}"),
                8..10 => assert!(matches!(decoded, Err(WireError::Version { .. })), "{at} {value}"),
                10 if value == 0 || value == 3 => {
                    assert_eq!(decoded, Err(WireError::NotZero { field: "region", found: 1 }));
                }
                10 if value < 8 => assert_eq!(decoded.map(|request| request.opcode as u8), Ok(value)),
                10 => assert_eq!(decoded, Err(WireError::Unknown { field: "operation", found: value })),
                _ if value == 1 => assert_eq!(decoded, Ok(direct(Opcode::Read, 1, 2, 3))),
                _ => assert_eq!(decoded, Err(WireError::Unknown { field: "flags", found: value })),
            }
            let mut frame = Reply { status: Status::Ready, epoch: EPOCH, length: 0 }.encode();
            frame[at] = value;
            let decoded = Reply::decode(&frame);
            match at {
                10 if value < 14 => assert_eq!(decoded.map(|reply| reply.status as u8), Ok(value)),
                10 => assert_eq!(decoded, Err(WireError::Unknown { field: "status", found: value })),
                11 if value > 0 => assert_eq!(decoded, Err(WireError::Reserved { field: "a header" })),
                _ => {}
            }
        }
    }
}

#[test]
fn every_value_of_the_flags_of_every_operation_is_judged() {
    for kind in 0..8 {
        let opcode = Opcode::from_byte(kind).expect("there are eight");
        let region = u64::from(!matches!(opcode, Opcode::Describe | Opcode::Notify));
        for flags in 0..=255 {
            let mut frame = request(opcode, region, 0, 0).encode();
            frame[11] = flags;
            let expected = match flags {
                0 => Ok(request(opcode, region, 0, 0)),
                1 if region == 1 => Ok(direct(opcode, region, 0, 0)),
                found => Err(WireError::Unknown { field: "flags", found }),
            };
            assert_eq!(Request::decode(&frame), expected, "{opcode:?} {flags}");
        }
    }
}

#[test]
fn fields_that_an_operation_has_no_use_for_must_be_zero() {
    let refused = |request: Request, field, found| {
        assert_eq!(Request::decode(&request.encode()), Err(WireError::NotZero { field, found }));
    };
    refused(request(Opcode::Describe, 1, 0, 0), "region", 1);
    refused(request(Opcode::Describe, 0, 2, 0), "offset", 2);
    refused(request(Opcode::Describe, 0, 0, 3), "length", 3);
    refused(request(Opcode::Notify, 4, 0, 0), "region", 4);
    let reply = Reply { status: Status::UnknownRegion, epoch: EPOCH, length: 5 };
    assert_eq!(Reply::decode(&reply.encode()), Err(WireError::NotZero { field: "length", found: 5 }));
}

#[test]
fn lengths_at_their_extremes() {
    for opcode in [Opcode::Read, Opcode::Write] {
        for (offset, length) in [(u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX), (1 << 63, 1 << 63)] {
            let overflow = Err(WireError::Overflow { offset, length });
            assert_eq!(Request::decode(&request(opcode, 1, offset, length).encode()), overflow);
        }
        for (offset, length) in [(u64::MAX, 0), (0, u64::MAX), (u64::MAX - 1, 1), (0, 0)] {
            let sound = request(opcode, u64::MAX, offset, length);
            assert_eq!(Request::decode(&sound.encode()), Ok(sound), "the source judges the range");
        }
    }
}

#[test]
fn descriptions_with_one_thing_wrong_are_refused() {
    let spoil = |at: usize, with: &[u8]| {
        let mut bytes = description();
        bytes[at..at + with.len()].copy_from_slice(with);
        Description::decode(&bytes).expect_err("spoilt")
    };
    let second = 4 + 32;
    assert_eq!(spoil(0, &4097_u32.to_be_bytes()), WireError::TooManyRegions { found: 4097 });
    assert_eq!(spoil(0, &3_u32.to_be_bytes()), WireError::Length { found: 70, expected: 100 });
    // What follows is no name then.
    assert_eq!(spoil(0, &1_u32.to_be_bytes()), WireError::AboutLong { left: 32 });
    assert_eq!(spoil(second, &1_u64.to_be_bytes()), WireError::Unsorted { id: 1, before: 1 });
    assert_eq!(spoil(second, &0_u64.to_be_bytes()), WireError::Unsorted { id: 0, before: 1 });
    let overflow = WireError::Overflow { offset: u64::MAX, length: 1 };
    assert_eq!(spoil(second + 8, &u64::MAX.to_be_bytes()), overflow);
    assert!(matches!(spoil(second + 16, &0_u64.to_be_bytes()), WireError::Overflow { length: 0, .. }));
    for permission in [0, 4, 255] {
        assert_eq!(spoil(second + 24, &[permission]), WireError::Unknown { field: "permission", found: permission });
    }
    for at in 25..32 {
        assert_eq!(spoil(second + at, &[1]), WireError::Reserved { field: "a region" });
    }
    for cut in 0..description().len() {
        assert!(Description::decode(&description()[..cut]).is_err(), "cut to {cut}");
    }
    let mut long = description().to_vec();
    long.push(0);
    assert_eq!(Description::decode(&long), Err(WireError::AboutLong { left: 1 }), "trailing bytes");
}

proptest! {
    #[test]
    fn no_bytes_make_a_decoder_panic(frame in any::<[u8; REQUEST_BYTES]>(), long in any::<Vec<u8>>()) {
        let mut framed = frame;
        put_head(&mut framed, frame[10] % 9);
        framed[11] &= 1;
        for frame in [frame, framed] {
            if let Ok(request) = Request::decode(&frame) {
                prop_assert_eq!(request.encode(), frame);
            }
            let reply = frame.first_chunk::<REPLY_BYTES>().expect("shorter");
            if let Ok(decoded) = Reply::decode(reply) {
                prop_assert_eq!(&decoded.encode(), reply);
            }
        }
        if let Ok(description) = Description::decode(&long) {
            prop_assert_eq!(description.encode(), long);
        }
    }
}
