//! Golden bytes, every bit flipped, every truncation, every length at its extremes.

use super::{super::path::tests::end, *};

fn identity() -> Identity {
    Identity {
        source_epoch: [0xe1; 16],
        requester_epoch: [0xe2; 16],
        source_pd: Incarnation([0xd1; 16]),
        requester_pd: Incarnation([0xd2; 16]),
        source_link: Incarnation([0xc1; 16]),
        requester_link: Incarnation([0xc2; 16]),
        request: 0x0102_0304_0506_0708,
        digest: Digest([0xab; 16]),
        generation: 0x0a0b,
    }
}

fn qp() -> QpEndpoint {
    QpEndpoint { qpn: Qpn::new(0x00_012f).expect("24 bits"), psn: Psn::new(0x8d_31f0).expect("24 bits") }
}

fn grant() -> GrantTerms {
    GrantTerms {
        form: Form::Registration,
        key: 0x1122_3344,
        address: 0x7f00_0000_1000,
        length: 8 << 20,
        valid_ms: 4999,
    }
}

fn frames() -> Vec<Frame> {
    [
        Body::Select { path: 3, end: end(9) },
        Body::Admit,
        Body::RequesterQp(qp()),
        Body::SourceQp(qp()),
        Body::Connected,
        Body::Grant(grant()),
        Body::Grant(GrantTerms { form: Form::Window, ..grant() }),
        Body::Done,
        Body::Ack,
        Body::Ready,
    ]
    .map(|body| Frame { identity: identity(), body })
    .to_vec()
}

fn asks() -> [Ask; 2] {
    let fresh = Ask { requester_epoch: [0xe2; 16], request: 5, requester_link: Incarnation([0xc2; 16]), kept: None };
    let kept = KeptNames {
        requester_pd: Incarnation([0xd2; 16]),
        source_pd: Incarnation([0xd1; 16]),
        source_link: Incarnation([0xc1; 16]),
    };
    [fresh, Ask { kept: Some(kept), ..fresh }]
}

fn offer(paths: u8) -> Offer {
    Offer { source_link: Incarnation([0xc1; 16]), generation: 0x0a0b, paths: (0..paths).map(|n| end(n + 1)).collect() }
}

fn hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hex")).collect()
}

const HEAD: &str = "56 52 42 53 45 4e 47 4e 00 01";

fn names() -> String {
    let sixteen = |byte: &str| byte.repeat(16);
    let names: String = ["e1", "e2", "d1", "d2", "c1", "c2"].map(sixteen).concat();
    format!("{names} 0102030405060708 {} 0000000000000a0b", sixteen("ab"))
}

const PATH: &str = "09090909090909090909090909090909 0102030405060708 00000000000000000000ffff0a000009 \
                    0000 ffff 01 02 03 05 10 08 00 00000000000000000000000000";

#[test]
fn golden_bytes() {
    let [fresh, kept] = asks();
    let start = format!("{HEAD} 10 00 {} 0000000000000005 {}", "e2".repeat(16), "c2".repeat(16));
    assert_eq!(fresh.encode().to_vec(), hex(&format!("{start} {}", "00".repeat(48))));
    let rest = format!("{}{}{}", "d2".repeat(16), "d1".repeat(16), "c1".repeat(16));
    assert_eq!(kept.encode().to_vec(), hex(&format!("{start} {rest}")));

    let mut one = offer(1);
    one.paths[0] = end(9);
    assert_eq!(one.encode(), hex(&format!("{} 0000000000000a0b 0001 000000000000 {PATH}", "c1".repeat(16))));

    let bodies = [
        ("11", format!("0003 000000000000 {PATH}")),
        ("12", String::new()),
        ("13", "0000012f 008d31f0".into()),
        ("14", "0000012f 008d31f0".into()),
        ("15", String::new()),
        ("16", "01 000000 11223344 00007f0000001000 0000000000800000 00001387 00000000".into()),
        ("16", "02 000000 11223344 00007f0000001000 0000000000800000 00001387 00000000".into()),
        ("17", String::new()),
        ("18", String::new()),
        ("19", String::new()),
    ];
    for (frame, (kind, body)) in frames().iter().zip(bodies) {
        assert_eq!(frame.encode(), hex(&format!("{HEAD} {kind} 00 {} {body}", names())), "{frame:?}");
    }
}

#[test]
fn what_is_written_is_read() {
    for ask in asks() {
        assert_eq!(Ask::decode(&ask.encode()), Ok(ask));
    }
    for paths in [1, 2, 16] {
        assert_eq!(Offer::decode(&offer(paths).encode()), Ok(offer(paths)));
        assert!(offer(paths).encode().len() as u64 <= Offer::bytes_max());
    }
    for frame in frames() {
        let bytes = frame.encode();
        assert_eq!(bytes.len(), frame.body.kind().bytes());
        assert_eq!(Frame::decode(&bytes), Ok(frame));
        let head: &[u8; HEAD_BYTES] = bytes.first_chunk().expect("12 bytes");
        assert_eq!(Frame::kind_of(head), Ok(frame.body.kind()));
    }
}

/// A flipped bit is refused, or says something else: nothing is read as what was meant.
#[test]
fn every_bit_counts() {
    for frame in frames() {
        let bytes = frame.encode();
        for at in 0..bytes.len() {
            for mask in (0..8).map(|bit| 1 << bit).chain([0xff]) {
                let mut bad = bytes.clone();
                bad[at] ^= mask;
                assert_ne!(Frame::decode(&bad), Ok(frame), "byte {at} ^ {mask:#04x}");
                if at < 10 || at == 11 {
                    assert!(Frame::decode(&bad).is_err(), "byte {at} of the head");
                }
            }
        }
    }
    for ask in asks() {
        for at in 0..ASK_BYTES {
            for mask in (0..8).map(|bit| 1 << bit).chain([0xff]) {
                let mut bad = ask.encode();
                bad[at] ^= mask;
                assert_ne!(Ask::decode(&bad), Ok(ask), "byte {at} ^ {mask:#04x}");
            }
        }
    }
    let bytes = offer(2).encode();
    for at in 0..bytes.len() {
        for mask in (0..8).map(|bit| 1 << bit).chain([0xff]) {
            let mut bad = bytes.clone();
            bad[at] ^= mask;
            assert_ne!(Offer::decode(&bad), Ok(offer(2)), "byte {at} ^ {mask:#04x}");
        }
    }
}

#[test]
fn every_truncation_and_every_tail_is_refused() {
    for frame in frames() {
        let mut bytes = frame.encode();
        for length in 0..bytes.len() {
            assert!(Frame::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
        bytes.push(0);
        assert!(matches!(Frame::decode(&bytes), Err(WireError::Length { .. })));
    }
    let mut bytes = offer(3).encode();
    for length in 0..bytes.len() {
        assert!(Offer::decode(&bytes[..length]).is_err(), "{length} bytes");
    }
    bytes.push(0);
    assert!(matches!(Offer::decode(&bytes), Err(WireError::Length { .. })));
}

#[test]
fn numbers_at_their_extremes() {
    for count in [0_u16, 17, 255, 256, u16::MAX] {
        let mut bytes = offer(1).encode();
        bytes[24..26].copy_from_slice(&count.to_be_bytes());
        assert!(Offer::decode(&bytes).is_err(), "{count} paths");
    }
    let with = |change: fn(&mut GrantTerms)| {
        let mut terms = grant();
        change(&mut terms);
        Frame::decode(&Frame { identity: identity(), body: Body::Grant(terms) }.encode()).is_ok()
    };
    assert!(!with(|terms| terms.length = 0), "nothing is no grant");
    assert!(!with(|terms| terms.length = u64::MAX), "beyond 64 bits");
    assert!(!with(|terms| terms.address = u64::MAX));
    assert!(with(|terms| (terms.address, terms.length) = (u64::MAX - 1, 1)));
    for (qpn, psn) in [(0, 0), (1 << 24, 0), (u32::MAX, 0), (1, 1 << 24)] {
        let mut bytes = Frame { identity: identity(), body: Body::SourceQp(qp()) }.encode();
        bytes[140..144].copy_from_slice(&u32::to_be_bytes(qpn));
        bytes[144..148].copy_from_slice(&u32::to_be_bytes(psn));
        assert!(Frame::decode(&bytes).is_err(), "QP {qpn:#x}, PSN {psn:#x}");
    }
    let [_, kept] = asks();
    for at in [36, 52, 68, 84] {
        let mut bytes = kept.encode();
        bytes[at..at + 16].fill(0);
        assert!(Ask::decode(&bytes).is_err(), "one name of the four is missing");
    }
    // A kind of the other half of the wire, and all that there are not.
    let known: Vec<u8> = Kind::ALL.iter().map(|kind| *kind as u8).collect();
    for kind in 0..=255_u8 {
        let mut head: [u8; HEAD_BYTES] = hex(&format!("{HEAD} 00 00")).try_into().expect("12 bytes");
        head[10] = kind;
        assert_eq!(Frame::kind_of(&head).is_ok(), known.contains(&kind));
    }
}

/// Byte 51 of a path.
#[test]
fn a_path_tells_its_rail_and_none_beyond_the_table() {
    let path = |rail| Offer { paths: vec![PathEnd { rail, ..end(4) }], ..offer(1) };
    for rail in [0, 1, 15] {
        let bytes = path(rail).encode();
        assert_eq!(bytes[OFFER_HEAD_BYTES + 51], rail);
        assert_eq!(Offer::decode(&bytes), Ok(path(rail)));
    }
    for rail in [16, 255] {
        assert_eq!(
            Offer::decode(&path(rail).encode()),
            Err(WireError::Unknown { field: "rail of a path", found: rail })
        );
    }
}
