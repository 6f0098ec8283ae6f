//! What the fuzz target in `rma/fuzz` runs, and what the tests run over its corpus. Not part of the API.

use crate::proto::wire::{Descriptor, Indirect, Reply, Request, WireError};

/// Any bytes, as each of the messages that a peer may send.
///
/// # Panics
///
/// When something that was read is written in other bytes.
pub fn wire(bytes: &[u8]) {
    if let Ok(request) = Request::decode(bytes) {
        // An acquire may end before its capability, or say more in it than this version knows; read again it is the same.
        assert_eq!(Request::decode(&request.encode()), Ok(request));
        assert_eq!(Request::correlation_of(bytes), Some(request.correlation));
    }
    same(bytes, Reply::decode(bytes), Reply::encode);
    same(bytes, Descriptor::decode(bytes), Descriptor::encode);
    same(bytes, Indirect::decode(bytes), |indirect| indirect.encode());
}

fn same<T: std::fmt::Debug>(bytes: &[u8], read: Result<T, WireError>, encode: impl Fn(&T) -> Vec<u8>) {
    if let Ok(value) = read {
        assert_eq!(encode(&value), bytes, "one encoding of {value:?}");
    }
}

#[cfg(test)]
mod tests {
    use verbs_bootstrap::fuzzing::over_corpus;

    const CRATE: &str = env!("CARGO_MANIFEST_DIR");

    #[test]
    fn corpus_of_messages() {
        over_corpus(CRATE, "wire", 12, super::wire);
    }

    /// Where no fuzzer runs, chance does: good messages with some bytes changed, which come far into the decoders.
    #[test]
    fn spoiled_corpus() {
        let mut rng = fastrand::Rng::with_seed(1);
        over_corpus(CRATE, "wire", 12, |good| {
            for _ in 0..20_000 {
                let mut bytes = good.to_vec();
                for _ in 0..rng.usize(1..4) {
                    match (rng.u8(..4), bytes.len()) {
                        (0, len) => bytes.truncate(rng.usize(..=len)),
                        (1, _) => bytes.push(rng.u8(..)),
                        (_, 0) => {}
                        (_, len) => bytes[rng.usize(..len)] = rng.u8(..),
                    }
                }
                super::wire(&bytes);
            }
        });
    }
}
