//! Golden bytes, every bit flipped, every truncation; plans that do not cover a request once.

use super::{
    super::super::{identity::Digest, path::tests::end},
    *,
};

fn identity() -> Identity {
    Identity {
        source_epoch: [0xe1; 16],
        requester_epoch: [0xe2; 16],
        source_link: Incarnation([0xc1; 16]),
        requester_link: Incarnation([0xc2; 16]),
        request: 0x0102_0304_0506_0708,
        digest: Digest([0xab; 16]),
        generation: 0x0a0b,
        ..Identity::default()
    }
}

/// So many rails of 64 KiB each.
fn plan(rails: u8) -> Plan {
    let rail = |at: u8| PlannedRail {
        source_pd: Incarnation([0xd0 + at; 16]),
        requester_link: Incarnation([0xa0 + at; 16]),
        bytes: u64::from(at) << 16..u64::from(at + 1) << 16,
        end: end(at + 1),
    };
    Plan { rails: (0..rails).map(rail).collect() }
}

fn planned(rails: u8) -> Planned {
    let rail = |at: u8| ReservedRail { source_link: Incarnation([0xb0 + at; 16]), generation: 0x0a0c + u64::from(at) };
    Planned { rails: (0..rails).map(rail).collect() }
}

fn decode(plan: &Plan) -> Result<(Identity, Plan), WireError> {
    Plan::decode(&plan.encode(&identity()))
}

fn hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hex")).collect()
}

fn names(kind: &str) -> String {
    let sixteen = |byte: &str| byte.repeat(16);
    let names: String = ["e1", "e2", "00", "00", "c1", "c2"].map(sixteen).concat();
    format!("56 52 42 53 45 4e 47 4e 00 01 {kind} 00 {names} 0102030405060708 {} 0000000000000a0b", sixteen("ab"))
}

#[test]
fn golden_bytes() {
    let path = |host: u8| {
        let (pd, gid) = (format!("{host:02x}").repeat(16), format!("00000000000000000000ffff0a0000{host:02x}"));
        format!("{pd} 0102030405060708 {gid} 0000 ffff 01 02 03 05 10 08 00 00000000000000000000000000")
    };
    let rail = |pd: &str, link: &str, start: &str, host| {
        format!("{} {} {start} 0000000000010000 {}", pd.repeat(16), link.repeat(16), path(host))
    };
    let rails = rail("d0", "a0", "0000000000000000", 1) + &rail("d1", "a1", "0000000000010000", 2);
    let unused = "00".repeat(14 * 112);
    let frame = hex(&format!("{} 0002 000000000000 {rails} {unused}", names("1a")));
    assert_eq!((frame.len(), plan(2).encode(&identity())), (PLAN_BYTES, frame));

    let rail = |link: &str, generation: &str| format!("{} 0000000000000{generation}", link.repeat(16));
    let rails = rail("b0", "a0c") + &rail("b1", "a0d");
    let frame = hex(&format!("{} 0002 000000000000 {rails} {}", names("1b"), "00".repeat(14 * 24)));
    assert_eq!((frame.len(), planned(2).encode(&identity())), (PLANNED_BYTES, frame));
}

#[test]
fn what_is_written_is_read() {
    for rails in 2..=16 {
        assert_eq!(decode(&plan(rails)), Ok((identity(), plan(rails))));
        assert_eq!(plan(rails).length(), u64::from(rails) << 16);
        assert_eq!(Planned::decode(&planned(rails).encode(&identity())), Ok((identity(), planned(rails))));
    }
}

/// A flipped bit is refused, or says something else: nothing is read as what was meant.
#[test]
fn every_bit_counts() {
    for rails in [2, 16] {
        let frames = [plan(rails).encode(&identity()), planned(rails).encode(&identity())];
        for (frame, bytes) in frames.iter().enumerate() {
            for at in 0..bytes.len() {
                for mask in (0..8).map(|bit| 1 << bit).chain([0xff]) {
                    let mut bad = bytes.clone();
                    bad[at] ^= mask;
                    let refused = if frame == 0 {
                        let read = Plan::decode(&bad);
                        assert_ne!(read, Ok((identity(), plan(rails))), "byte {at} ^ {mask:#04x}");
                        read.is_err()
                    } else {
                        let read = Planned::decode(&bad);
                        assert_ne!(read, Ok((identity(), planned(rails))), "byte {at} ^ {mask:#04x}");
                        read.is_err()
                    };
                    let entries = 148 + usize::from(rails) * if frame == 0 { 112 } else { 24 };
                    if at < 12 || (142..148).contains(&at) || at >= entries {
                        assert!(refused, "byte {at} of the head, or one that must be 0");
                    }
                }
            }
        }
    }
}

#[test]
fn every_truncation_and_every_tail_is_refused() {
    let (mut first, mut second) = (plan(3).encode(&identity()), planned(3).encode(&identity()));
    for length in 0..first.len() {
        assert!(Plan::decode(&first[..length]).is_err(), "{length} bytes");
    }
    for length in 0..second.len() {
        assert!(Planned::decode(&second[..length]).is_err(), "{length} bytes");
    }
    first.push(0);
    second.push(0);
    assert!(matches!(Plan::decode(&first), Err(WireError::Length { .. })));
    assert!(matches!(Planned::decode(&second), Err(WireError::Length { .. })));
    // Each in the place of the other.
    assert!(matches!(Plan::decode(&planned(2).encode(&identity())), Err(WireError::OutOfTurn { found: 27, due: 26 })));
    assert!(matches!(Planned::decode(&plan(2).encode(&identity())), Err(WireError::OutOfTurn { found: 26, due: 27 })));
}

#[test]
fn there_are_two_to_sixteen_rails() {
    for count in [0_u16, 1, 17, 255, 256, u16::MAX] {
        for mut bytes in [plan(16).encode(&identity()), planned(16).encode(&identity())] {
            bytes[140..142].copy_from_slice(&count.to_be_bytes());
            let found = u8::try_from(count).unwrap_or(255);
            let refused = Err(WireError::Unknown { field: "number of rails", found });
            let read = if bytes[10] == 26 { Plan::decode(&bytes).map(drop) } else { Planned::decode(&bytes).map(drop) };
            assert_eq!(read, refused, "{count}");
        }
    }
    // Fewer than there are: the rest must be 0 then.
    let mut bytes = plan(3).encode(&identity());
    bytes[141] = 2;
    assert_eq!(Plan::decode(&bytes), Err(WireError::Reserved { field: "a plan" }));
    // More than there are: an entry of zeros is none.
    bytes[141] = 4;
    assert!(Plan::decode(&bytes).is_err());
}

#[test]
fn plans_that_do_not_cover_the_request_once_are_refused() {
    type Change = fn(&mut Vec<PlannedRail>);
    let cases: [(usize, &str, Change); 10] = [
        (0, "begin where", |rails| rails[0].bytes.start = 1),
        (1, "begin where", |rails| rails[1].bytes.start -= 1),
        (1, "begin where", |rails| rails[1].bytes.start += 1),
        (0, "begin where", |rails| rails.swap(0, 1)),
        (2, "begin where", |rails| rails[2].bytes = 0..1 << 16),
        (1, "no bytes", |rails| rails[1].bytes.end = rails[1].bytes.start),
        (2, "pair of devices", |rails| (rails[2].source_pd, rails[2].end.pd) = (rails[0].source_pd, rails[0].end.pd)),
        (1, "connection", |rails| rails[1].requester_link = rails[0].requester_link),
        (1, "name", |rails| rails[1].requester_link = Incarnation::NONE),
        (0, "name", |rails| rails[0].source_pd = Incarnation::NONE),
    ];
    for (at, word, change) in cases {
        let mut wrong = plan(3);
        change(&mut wrong.rails);
        match decode(&wrong) {
            Err(WireError::Plan { rail, reason }) => {
                assert!(rail == at && reason.contains(word), "rail {rail} {reason}, not rail {at} {word}");
            }
            other => panic!("{word}: {other:?}"),
        }
    }
    // Beyond 64 bits.
    let mut bytes = plan(2).encode(&identity());
    bytes[148 + 112 + 40..148 + 112 + 48].fill(0xff);
    assert!(matches!(Plan::decode(&bytes), Err(WireError::Overflow { .. })));
    // One NIC of either side in two pairs is sound, if of no use.
    let mut shared = plan(2);
    shared.rails[1].source_pd = shared.rails[0].source_pd;
    assert!(decode(&shared).is_ok());
}

#[test]
fn answers_name_each_connection_once_and_grants_that_ascend() {
    let with = |change: fn(&mut Vec<ReservedRail>)| {
        let mut answer = planned(3);
        change(&mut answer.rails);
        Planned::decode(&answer.encode(&identity())).map(drop)
    };
    assert_eq!(with(|_| ()), Ok(()));
    assert!(matches!(with(|rails| rails[2].source_link = Incarnation::NONE), Err(WireError::Plan { rail: 2, .. })));
    let twice = with(|rails| rails[2].source_link = rails[0].source_link);
    assert!(matches!(twice, Err(WireError::Plan { rail: 2, .. })));
    assert!(matches!(with(|rails| rails[0].generation = 0), Err(WireError::Generation { found: 0, last: 0 })));
    let same = with(|rails| rails[1].generation = rails[0].generation);
    assert!(matches!(same, Err(WireError::Generation { .. })));
}
