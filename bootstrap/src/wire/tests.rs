//! Golden bytes, round trips, and everything that a peer can do wrong.

use proptest::prelude::*;

use super::*;
use crate::{testing::offer, types::*};

/// Spaces are for the reader.
fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("ascii"), 16).expect("hex"))
        .collect()
}

fn golden_offer() -> Offer {
    let mut offer = offer((0xa1, 0xb1), (0xa2, 0xb2), 3, 2, 0x12f);
    offer.qp.psn = Psn::from_random(0x8d_31f0);
    offer
}

/// Of the bulk plane.
fn golden_bulk_offer() -> Offer {
    let qp = QpEndpoint { qpn: Qpn::new(0x130).expect("24 bits"), psn: Psn::from_random(1) };
    Offer { plane: Plane::Bulk, qp, slab_bytes: 0, window_slabs: 32, eager_max_bytes: 0, ..golden_offer() }
}

/// Up to the QPs.
const OFFER_HEAD: &str = "
    000000000000000000000000000000a1 00000000000000b1
    000000000000000000000000000000a2 00000000000000b2
    0000000000000003 0000000000000002
    0102030405060708 01 00000001 0000 00000000000000000000ffff0a630101 00000002 03 ffff 00000002";
const OFFER: &str = "0000012f 008d31f0 00  10 08  00002000 0040 01000000 8000000000000001";
const BULK_OFFER: &str = "00000000 00000000 01 00000130 00000001  10 08  00000000 0020 00000000 8000000000000001";

fn check_golden(frame: &Frame, hex: &str) {
    let golden = bytes(hex);
    assert_eq!(frame.encode(), golden, "{} changed on the wire", frame.name());
    assert_eq!(Frame::decode(&golden[PREFIX_BYTES..]).as_ref(), Ok(frame));
}

#[test]
fn golden_hello() {
    let hello = Hello { offer: golden_offer(), nonce: Nonce([0x5a; 32]), has_secret: true };
    check_golden(
        &Frame::Hello(hello),
        &format!("000000af 76624253 01 01 00 {OFFER_HEAD} {OFFER} {} 01", "5a".repeat(32)),
    );
    let hello = Hello { offer: golden_bulk_offer(), nonce: Nonce([0x5a; 32]), has_secret: true };
    let golden = format!("000000b7 76624253 01 01 00 {OFFER_HEAD} {BULK_OFFER} {} 01", "5a".repeat(32));
    check_golden(&Frame::Hello(hello), &golden);
}

#[test]
fn golden_challenge_and_proof() {
    let nonce = Nonce([0x11; 32]);
    let nonce_hex = "11".repeat(32);
    let challenge = Frame::Challenge(Challenge { nonce, needs_tag: true });
    check_golden(&challenge, &format!("00000028 76624253 01 02 00 {nonce_hex} 01"));
    let proof = Frame::Proof(Proof { nonce, tag: Some(Tag([0x22; 32])) });
    check_golden(&proof, &format!("00000048 76624253 01 03 00 {nonce_hex} 01 {}", "22".repeat(32)));
    let plain = Frame::Proof(Proof { nonce, tag: None });
    check_golden(&plain, &format!("00000028 76624253 01 03 00 {nonce_hex} 00"));
}

#[test]
fn golden_reply() {
    let reply = Frame::Reply(Reply { offer: golden_offer(), tag: None });
    check_golden(&reply, &format!("0000008f 76624253 01 04 00 {OFFER_HEAD} {OFFER} 00"));
    let reply = Frame::Reply(Reply { offer: golden_bulk_offer(), tag: None });
    check_golden(&reply, &format!("00000097 76624253 01 04 00 {OFFER_HEAD} {BULK_OFFER} 00"));
}

#[test]
fn golden_refusal() {
    let refusal = Frame::Refuse(Refusal::new(Status::StaleIncarnation, "run 3"));
    check_golden(&refusal, "00000014 76624253 01 05 02 0000000000000005 72756e2033");
}

#[test]
fn an_offer_fits_many_times_into_a_frame() {
    assert!(encode_body(&golden_offer()).len() < MAX_FRAME_BYTES / 8);
}

/// A hello with its body's bytes changed.
fn hello_with(change: impl FnOnce(&mut Vec<u8>)) -> Result<Frame, WireError> {
    offer_with(golden_offer(), change)
}

fn offer_with(offer: Offer, change: impl FnOnce(&mut Vec<u8>)) -> Result<Frame, WireError> {
    let hello = Hello { offer, nonce: Nonce([0; 32]), has_secret: false };
    let mut frame = Frame::Hello(hello).encode().split_off(PREFIX_BYTES);
    change(&mut frame);
    Frame::decode(&frame)
}

/// Where the body's fields lie in a frame without prefix.
const QPN_AT: usize = FIXED_BYTES + 106;

#[test]
fn numbers_that_no_device_makes_are_refused() {
    for qpn in [1_u32 << 24, u32::MAX] {
        let read = hello_with(|frame| frame[QPN_AT..QPN_AT + 4].copy_from_slice(&qpn.to_be_bytes()));
        let Err(WireError::Body { reason, .. }) = read else { panic!("QP number {qpn:#x} was taken: {read:?}") };
        assert!(reason.contains(&format!("{qpn:#010x}")), "{reason}");
    }
    let psn_at = QPN_AT + 4;
    let read = hello_with(|frame| frame[psn_at] = 1);
    assert!(matches!(read, Err(WireError::Body { .. })), "a PSN of 25 bits: {read:?}");
    let read = hello_with(|frame| frame[QPN_AT + 3] = 1);
    assert!(read.is_ok(), "QP number 257 is fine, so the offsets above are right: {read:?}");
}

#[test]
fn an_offer_names_exactly_one_qp() {
    let reason = |read: Result<Frame, WireError>| match read {
        Err(WireError::Body { reason, .. }) => reason,
        other => panic!("taken: {other:?}"),
    };
    let none = hello_with(|frame| frame[QPN_AT..QPN_AT + 8].fill(0));
    assert!(reason(none).contains("no QP, neither for messaging nor for bulk"));
    let both = offer_with(golden_bulk_offer(), |frame| frame[QPN_AT + 3] = 0x2f);
    let both = reason(both);
    assert!(both.contains("(qp 0x00002f)") && both.contains("(qp 0x000130)"), "{both}");
    let stray = offer_with(golden_bulk_offer(), |frame| frame[QPN_AT + 7] = 5);
    assert!(reason(stray).contains("PSN of 0x000005"));
    let no_bulk = offer_with(golden_bulk_offer(), |frame| frame[QPN_AT + 9..QPN_AT + 13].fill(0));
    assert!(reason(no_bulk).contains("0x00000000"));
}

#[test]
fn variants_that_do_not_exist_are_refused() {
    let (link_layer, gid_type, mtu, bulk) = (QPN_AT - 33, QPN_AT - 11, QPN_AT - 4, QPN_AT + 8);
    for at in [link_layer + 3, gid_type + 3, mtu + 3, bulk] {
        let read = hello_with(|frame| frame[at] = 9);
        assert!(matches!(read, Err(WireError::Body { .. })), "9 at {at}: {read:?}");
    }
}

#[test]
fn each_wrong_frame_is_named() {
    assert_eq!(Frame::decode(b"vbBS\x01\x01"), Err(WireError::Undersize { bytes: 6, min: 7 }));
    assert_eq!(Frame::decode(b"GET / HTTP/1.1"), Err(WireError::Magic { found: *b"GET " }));
    assert_eq!(hello_with(|frame| frame[4] = 2), Err(WireError::Version { theirs: 2 }));
    assert_eq!(hello_with(|frame| frame[5] = 6), Err(WireError::Kind { raw: 6 }));
    assert_eq!(hello_with(|frame| frame[6] = 1), Err(WireError::Status { kind: "hello", status: 1 }));
    assert_eq!(hello_with(|frame| frame.push(0)), Err(WireError::Trailing { kind: "hello", bytes: 1 }));
    let cut = hello_with(|frame| frame.truncate(frame.len() - 1));
    assert_eq!(cut, Err(WireError::Cut { kind: "hello", bytes: 167 }));
    let refusal = Frame::decode(b"vbBS\x01\x05\x00\0\0\0\0\0\0\0\0");
    assert_eq!(refusal, Err(WireError::Status { kind: "refusal", status: 0 }));
    assert!(WireError::Version { theirs: 2 }.to_string().contains("version 2"));
}

#[test]
fn a_refusal_of_another_version_is_understood() {
    let mut frame = Frame::Refuse(Refusal::new(Status::UnsupportedVersion, "ours")).encode().split_off(PREFIX_BYTES);
    frame[4] = 9;
    frame.truncate(FIXED_BYTES);
    frame.extend_from_slice(b"a body of the future");
    let Ok(Frame::Refuse(refusal)) = Frame::decode(&frame) else { panic!("not understood") };
    assert_eq!(refusal.status, Status::UnsupportedVersion);
    assert!(refusal.detail.contains("version 9"), "{refusal}");
}

#[test]
fn a_long_text_is_cut_at_a_character() {
    let long = "ü".repeat(1000);
    let frame = Frame::Refuse(Refusal::new(Status::Other(200), format!("x{long}"))).encode();
    let Ok(Frame::Refuse(refusal)) = Frame::decode(&frame[PREFIX_BYTES..]) else { panic!("unreadable") };
    assert_eq!(refusal.detail.len(), 511);
    assert_eq!(refusal.status, Status::Other(200));
}

#[test]
fn a_text_above_its_limit_is_refused() {
    let mut frame = b"vbBS\x01\x05\x01".to_vec();
    frame.extend_from_slice(&encode_body("x".repeat(513).as_str()));
    assert!(matches!(Frame::decode(&frame), Err(WireError::Body { .. })));
}

#[test]
fn every_status_keeps_its_number() {
    for raw in 1..=u8::MAX {
        assert_eq!(Status::new(raw).map(Status::get), Some(raw));
    }
    assert_eq!(Status::new(0), None);
}

#[tokio::test]
async fn a_length_above_the_limit_is_refused_before_its_bytes_are_read() {
    let mut stream: &[u8] = &u32::try_from(MAX_FRAME_BYTES - PREFIX_BYTES + 1).expect("small").to_be_bytes();
    let read = read_frame(&mut stream).await;
    assert!(matches!(read, Err(ReadError::Wire(WireError::Oversize { bytes: 4097, max: 4096 }))), "{read:?}");
    let mut stream: &[u8] = b"\x00\x00\x00\x06vbBS\x01\x01";
    let read = read_frame(&mut stream).await;
    assert!(matches!(read, Err(ReadError::Wire(WireError::Undersize { bytes: 6, .. }))), "{read:?}");
    let mut stream: &[u8] = b"\x00\x00";
    assert!(matches!(read_frame(&mut stream).await, Err(ReadError::Closed)));
}

fn any_endpoint() -> impl Strategy<Value = QpEndpoint> {
    (1_u32..1 << 24, any::<u32>())
        .prop_map(|(qpn, psn)| QpEndpoint { qpn: Qpn::new(qpn).expect("24 bits"), psn: Psn::from_random(psn) })
}

fn any_port() -> impl Strategy<Value = PortIdentity> {
    let mtu = prop::sample::select(vec![Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096]);
    let link = prop::sample::select(vec![LinkLayer::InfiniBand, LinkLayer::Ethernet]);
    let gid_type = prop::sample::select(vec![GidType::Ib, GidType::RoceV1, GidType::RoceV2]);
    (any::<(u64, u8, u16, [u8; 16], u8, u16)>(), mtu, link, gid_type).prop_map(
        |((device_guid, port, lid, gid, gid_index, pkey), mtu, link_layer, gid_type)| PortIdentity {
            device_guid,
            port,
            link_layer,
            lid,
            gid: Gid(gid),
            gid_type,
            gid_index,
            pkey,
            mtu,
        },
    )
}

fn any_offer() -> impl Strategy<Value = Offer> {
    let names = any::<(u128, u64, u128, u64, u64, u64)>();
    let limits = any::<(u8, u8, u32, u16, u32, u64)>();
    let plane = prop::sample::select(vec![Plane::Messaging, Plane::Bulk]);
    (names, any_port(), plane, any_endpoint(), limits).prop_map(|(names, port, plane, qp, limits)| Offer {
        from: InstanceId(names.0),
        from_incarnation: Incarnation(names.1),
        to: InstanceId(names.2),
        to_incarnation: Incarnation(names.3),
        generation: Generation(names.4),
        echoed_generation: Generation(names.5),
        port,
        plane,
        qp,
        rd_atomic: RdAtomic { initiator: limits.0, responder: limits.1 },
        slab_bytes: limits.2,
        window_slabs: limits.3,
        eager_max_bytes: limits.4,
        features: limits.5,
    })
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let nonce = any::<[u8; 32]>().prop_map(Nonce).boxed();
    let tag = prop::option::of(any::<[u8; 32]>().prop_map(Tag)).boxed();
    prop_oneof![
        (any_offer(), nonce.clone(), any::<bool>()).prop_map(|(offer, nonce, has_secret)| Frame::Hello(Hello {
            offer,
            nonce,
            has_secret
        })),
        (nonce.clone(), any::<bool>()).prop_map(|(nonce, needs_tag)| Frame::Challenge(Challenge { nonce, needs_tag })),
        (nonce, tag.clone()).prop_map(|(nonce, tag)| Frame::Proof(Proof { nonce, tag })),
        (any_offer(), tag).prop_map(|(offer, tag)| Frame::Reply(Reply { offer, tag })),
        (1_u8.., "[a-zü]{0,100}").prop_map(|(status, detail)| {
            Frame::Refuse(Refusal { status: Status::new(status).expect("not 0"), detail })
        }),
    ]
}

proptest! {
    #[test]
    fn every_frame_comes_back(frame in any_frame()) {
        let bytes = frame.encode();
        prop_assert!(bytes.len() <= MAX_FRAME_BYTES);
        prop_assert_eq!(Frame::decode(&bytes[PREFIX_BYTES..]), Ok(frame));
    }

    #[test]
    fn what_is_read_has_one_encoding(frame in any_frame(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = frame.encode().split_off(PREFIX_BYTES);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let (Ok(read), true) = (Frame::decode(&bytes), bytes[4] == VERSION) {
            prop_assert_eq!(&read.encode()[PREFIX_BYTES..], &bytes[..], "tags cover the encoding, so it must be unique");
        }
    }

    #[test]
    fn no_prefix_of_a_frame_is_a_frame(frame in any_frame(), at in any::<prop::sample::Index>()) {
        let bytes = frame.encode().split_off(PREFIX_BYTES);
        prop_assert!(Frame::decode(&bytes[..at.index(bytes.len())]).is_err());
    }

    #[test]
    fn arbitrary_bytes_never_panic(kind in any::<u8>(), body in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = Frame::decode(&body);
        let mut framed = b"vbBS\x01".to_vec();
        framed.extend_from_slice(&[kind % 6, u8::from(kind % 6 == 5)]);
        framed.extend_from_slice(&body);
        let _ = Frame::decode(&framed);
    }
}
