//! What the fuzz targets in `engine/fuzz` run, and what the tests run over their corpora. Not part of the API.

#[cfg(feature = "rdma")]
pub use crate::rdma::fuzzing::rdma;

use crate::control::{Description, Reply, Request};

/// Any bytes, as each of the frames that both transports have, and as a list of ranges.
///
/// # Panics
///
/// When something that was read is written in other bytes.
pub fn control(bytes: &[u8]) {
    if let Some(request) = bytes.try_into().ok().and_then(|bytes| Request::decode(bytes).ok()) {
        assert_eq!(request.encode(), bytes, "one encoding of {request:?}");
    }
    if let Some(reply) = bytes.try_into().ok().and_then(|bytes| Reply::decode(bytes).ok()) {
        assert_eq!(reply.encode(), bytes, "one encoding of {reply:?}");
    }
    if let Ok(description) = Description::decode(bytes) {
        assert_eq!(description.encode(), bytes, "one encoding of {description:?}");
    }
}

#[cfg(test)]
mod tests {
    use verbs_bootstrap::fuzzing::over_corpus;

    const CRATE: &str = env!("CARGO_MANIFEST_DIR");
    /// Good files of a corpus, each spoiled so often.
    const SPOILED: u32 = 5_000;

    #[test]
    fn corpus_of_the_control_wire() {
        over_corpus(CRATE, "control", 14, super::control);
        over_corpus(CRATE, "control", 14, |good| spoil(good, super::control));
    }

    #[cfg(feature = "rdma")]
    #[test]
    fn corpus_of_the_rdma_wire() {
        over_corpus(CRATE, "rdma", 14, super::rdma);
        over_corpus(CRATE, "rdma", 14, |good| spoil(good, super::rdma));
    }

    /// Where no fuzzer runs, chance does: good frames with some bytes changed, which come far into the decoders.
    fn spoil(good: &[u8], run: fn(&[u8])) {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..SPOILED {
            let mut bytes = good.to_vec();
            for _ in 0..rng.usize(1..4) {
                match (rng.u8(..4), bytes.len()) {
                    (0, len) => bytes.truncate(rng.usize(..=len)),
                    (1, _) => bytes.push(rng.u8(..)),
                    (_, 0) => {}
                    (_, len) => bytes[rng.usize(..len)] = rng.u8(..),
                }
            }
            run(&bytes);
        }
    }
}
