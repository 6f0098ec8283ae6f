use proptest::prelude::*;

use super::*;

fn handles() -> impl Strategy<Value = Handle> {
    (any::<u64>(), any::<u64>()).prop_map(|(worker, slot)| Handle { worker, slot })
}

fn calls() -> impl Strategy<Value = Call> {
    let capability = proptest::option::of(
        (any::<u8>(), any::<u64>()).prop_map(|(backends, room_bytes)| Capability { backends, room_bytes }),
    );
    prop_oneof![
        handles().prop_map(|handle| Call::Metadata { handle }),
        (handles(), 1..=u32::MAX, capability).prop_map(|(handle, chunk_bytes, capability)| Call::Acquire {
            handle,
            chunk_bytes,
            capability
        }),
        (any::<u64>(), any::<u64>()).prop_map(|(transfer, index)| Call::Pull { transfer, index }),
        handles().prop_map(|handle| Call::Ref { handle }),
        (handles(), any::<u64>()).prop_map(|(handle, lease)| Call::Renew { handle, lease }),
        (handles(), any::<u64>()).prop_map(|(handle, lease)| Call::Detach { handle, lease }),
        (handles(), any::<u64>()).prop_map(|(handle, lease)| Call::Release { handle, lease }),
        handles().prop_map(|handle| Call::Refuse { handle }),
    ]
}

fn descriptors() -> impl Strategy<Value = Descriptor> {
    let verbs = (any::<u64>(), any::<u64>(), any::<u32>())
        .prop_filter("no wrap", |(addr, total, _)| addr.checked_add(*total).is_some())
        .prop_map(|(addr, total_bytes, rkey)| Descriptor { total_bytes, key: Key::Verbs { addr, rkey } });
    let unknown = (any::<u64>(), any::<u8>(), proptest::collection::vec(any::<u8>(), 0..=KEY_MAX_BYTES))
        .prop_filter("another backend", |(_, backend, _)| *backend != BACKEND_VERBS)
        .prop_map(|(total_bytes, backend, bytes)| Descriptor { total_bytes, key: Key::Unknown { backend, bytes } });
    prop_oneof![verbs, unknown]
}

fn answers() -> impl Strategy<Value = Answer> {
    let chunks = (any::<u64>(), any::<u64>(), 1..=u32::MAX, any::<u8>()).prop_map(
        |(transfer, total_bytes, chunk_bytes, reason)| {
            Grant::Chunks(Chunks { transfer, total_bytes, chunk_bytes, reason: PathReason::from_wire(reason) })
        },
    );
    let grants = prop_oneof![descriptors().prop_map(Grant::Read), chunks];
    prop_oneof![
        (any::<u64>(), any::<u32>(), any::<bool>())
            .prop_map(|(total_bytes, refcount, pinned)| Answer::Metadata(Metadata { total_bytes, refcount, pinned })),
        (any::<u64>(), any::<u32>(), grants).prop_map(|(lease, lease_ms, grant)| Answer::Acquired {
            lease,
            lease_ms,
            grant
        }),
        any::<u64>().prop_map(|index| Answer::Chunk { index }),
        any::<u32>().prop_map(|refcount| Answer::Referenced { refcount }),
        any::<u32>().prop_map(|lease_ms| Answer::Renewed { lease_ms }),
        (any::<u8>(), any::<u64>())
            .prop_map(|(code, detail)| Answer::Refused(Refused { code: RefusalCode::from_wire(code), detail })),
    ]
}

proptest! {
    #[test]
    fn every_request_survives_the_wire(correlation in any::<u64>(), call in calls()) {
        let request = Request { correlation, call };
        let bytes = request.encode();
        prop_assert_eq!(Request::decode(&bytes), Ok(request));
        prop_assert_eq!(Request::correlation_of(&bytes), Some(correlation));
    }

    #[test]
    fn every_reply_survives_the_wire(correlation in any::<u64>(), answer in answers()) {
        let reply = Reply { correlation, answer };
        prop_assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    }

    #[test]
    fn every_descriptor_survives_the_wire(descriptor in descriptors()) {
        prop_assert_eq!(Descriptor::decode(&descriptor.encode()), Ok(descriptor));
    }

    #[test]
    fn every_indirect_survives_the_wire(handle in handles(), total_bytes in any::<u64>()) {
        let indirect = Indirect { handle, total_bytes };
        let bytes = indirect.encode();
        prop_assert_eq!(bytes.len(), INDIRECT_BYTES);
        prop_assert_eq!(Indirect::decode(&bytes), Ok(indirect));
    }

    /// Every prefix of a good message is an error, and so is one byte more.
    #[test]
    fn what_is_cut_or_longer_is_refused(call in calls(), answer in answers(), descriptor in descriptors()) {
        let request = Request { correlation: 1, call }.encode();
        for len in 0..request.len() {
            let cut = Request::decode(&request[..len]);
            // As from a peer that has no such field.
            let ends_before_capability = matches!(call, Call::Acquire { .. }) && len == 10 + 16 + 4;
            prop_assert!(ends_before_capability || is_cut(&cut), "{} bytes", len);
        }
        let reply = Reply { correlation: 1, answer }.encode();
        let descriptor = descriptor.encode();
        for len in 0..reply.len() {
            prop_assert!(is_cut(&Reply::decode(&reply[..len])));
        }
        for len in 0..descriptor.len() {
            prop_assert!(is_cut(&Descriptor::decode(&descriptor[..len])));
        }
        for (longer, refused) in [
            (&request, Request::decode(&with_one_more(&request)).map(drop)),
            (&reply, Reply::decode(&with_one_more(&reply)).map(drop)),
            (&descriptor, Descriptor::decode(&with_one_more(&descriptor)).map(drop)),
        ] {
            prop_assert_eq!(refused, Err(WireError::Trailing { bytes: 1 }), "{:?}", longer);
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        crate::fuzzing::wire(&bytes);
    }

    /// The chunks cover the payload, each byte once.
    #[test]
    fn chunks_add_up(total_bytes in 0u64..1 << 24, chunk_bytes in 1u32..1 << 20) {
        let chunks = Chunks { transfer: 1, total_bytes, chunk_bytes, reason: PathReason::NotPinned };
        let count = chunks.count();
        let lens: Vec<u64> = (0..count.min(4096)).map(|index| u64::from(chunks.len_of(index).unwrap())).collect();
        if count <= 4096 {
            prop_assert_eq!(lens.iter().sum::<u64>(), total_bytes);
        }
        prop_assert!(lens.iter().all(|&len| len > 0 && len <= u64::from(chunk_bytes)));
        prop_assert_eq!(chunks.len_of(count), None);
        prop_assert_eq!(chunks.len_of(u64::MAX), None);
    }
}

fn is_cut<T>(read: &Result<T, WireError>) -> bool {
    matches!(read, Err(WireError::Truncated { .. }))
}

fn with_one_more(bytes: &[u8]) -> Vec<u8> {
    [bytes, &[0]].concat()
}

/// A change here breaks the wire.
#[test]
fn golden_vectors() {
    let handle = Handle { worker: 0x0102_0304_0506_0708, slot: 9 };
    let acquire = Request {
        correlation: 7,
        call: Call::Acquire {
            handle,
            chunk_bytes: 0x8_0000,
            capability: Some(Capability { backends: 1 << BACKEND_VERBS, room_bytes: 0x10_0000 }),
        },
    };
    assert_eq!(
        hex(&acquire.encode()),
        "01020000000000000007010203040506070800000000000000090008000009020000000000100000"
    );
    let descriptor = Descriptor { total_bytes: 0x1000, key: Key::Verbs { addr: 0x7f00_0000_1000, rkey: 0x1234_5678 } };
    assert_eq!(hex(&descriptor.encode()), "010100000000000010000c00007f000000100012345678");
    let reply = Reply {
        correlation: 7,
        answer: Answer::Acquired { lease: 3, lease_ms: 30_000, grant: Grant::Read(descriptor) },
    };
    assert_eq!(
        hex(&reply.encode()),
        "0182000000000000000700000000000000030000753001010100000000000010000c00007f000000100012345678"
    );
    let chunks = Chunks { transfer: 3, total_bytes: 2000, chunk_bytes: 1024, reason: PathReason::PoolFull };
    let reply =
        Reply { correlation: 8, answer: Answer::Acquired { lease: 3, lease_ms: 30_000, grant: Grant::Chunks(chunks) } };
    assert_eq!(
        hex(&reply.encode()),
        "0182000000000000000800000000000000030000753002000000000000000300000000000007d00000040004"
    );
    let refused = Refused { code: RefusalCode::UnknownHandle, detail: 0 };
    let reply = Reply { correlation: 9, answer: Answer::Refused(refused) };
    assert_eq!(hex(&reply.encode()), "01ff0000000000000009010000000000000000");
    let indirect = Indirect { handle, total_bytes: 0x8_0000 };
    assert_eq!(hex(&indirect.encode()), "01010203040506070800000000000000090000000000080000");
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// RT-8.
#[test]
fn two_thousand_bytes_at_1024_are_two_chunks() {
    let chunks = Chunks { transfer: 1, total_bytes: 2000, chunk_bytes: 1024, reason: PathReason::NotPinned };
    assert_eq!(
        (chunks.count(), chunks.len_of(0), chunks.len_of(1), chunks.len_of(2)),
        (2, Some(1024), Some(976), None)
    );
}

#[test]
fn each_defect_is_named() {
    let good = Descriptor { total_bytes: 4096, key: Key::Verbs { addr: 4096, rkey: 1 } }.encode();
    let spoiled = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        Descriptor::decode(&bytes)
    };
    assert_eq!(spoiled(0, 2), Err(WireError::Version { found: 2 }));
    assert_eq!(spoiled(10, 65), Err(WireError::KeyTooLong { bytes: 65 }));
    assert_eq!(spoiled(10, 11), Err(WireError::KeyLength { backend: 1, bytes: 11, expected: 12 }));
    assert_eq!(spoiled(10, 13), Err(WireError::Truncated { what: "key", need: 13, have: 12 }));
    assert!(matches!(spoiled(1, 9), Ok(Descriptor { key: Key::Unknown { backend: 9, .. }, .. })));
    let wraps = Descriptor { total_bytes: 2, key: Key::Verbs { addr: u64::MAX, rkey: 1 } }.encode();
    assert!(matches!(Descriptor::decode(&wraps), Err(WireError::Field { value: u64::MAX, .. })));
    assert_eq!(Request::decode(&[1, 9, 0, 0, 0, 0, 0, 0, 0, 0]), Err(WireError::Opcode { found: 9 }));
    assert_eq!(Reply::decode(&[1, 1, 0, 0, 0, 0, 0, 0, 0, 0]), Err(WireError::Opcode { found: 1 }));
    // A peer of a later version says more of itself: what is known is taken.
    let mut later = Request {
        correlation: 1,
        call: Call::Acquire {
            handle: Handle { worker: 1, slot: 1 },
            chunk_bytes: 1,
            capability: Some(Capability { backends: 2, room_bytes: 5 }),
        },
    }
    .encode();
    let at = later.len() - CAPABILITY_BYTES - 1;
    later[at] += 2;
    later.extend([7, 7]);
    assert!(matches!(
        Request::decode(&later),
        Ok(Request { call: Call::Acquire { capability: Some(Capability { backends: 2, room_bytes: 5 }), .. }, .. })
    ));
}
