//! What the fuzz targets in `bootstrap/fuzz` run, and what the tests run over their corpora. Not part of the API.

use std::{
    fs,
    path::Path,
    pin::pin,
    task::{Context, Poll, Waker},
};

use crate::{
    address::WorkerAddress,
    wire::{Frame, MAX_FRAME_BYTES, READY, ReadError, VERSION, WireError, read_frame},
};

/// Bytes as they come from a socket: frames with their length prefixes until one is bad or the bytes are used up.
///
/// # Panics
///
/// When a frame that was read is written in other bytes than it came in, or is above the limit.
pub fn frames(bytes: &[u8]) {
    let mut rest = bytes;
    loop {
        let before = rest;
        let read = {
            let mut reading = pin!(read_frame(&mut rest));
            match reading.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(read) => read,
                Poll::Pending => panic!("a slice is always ready"),
            }
        };
        let body = match read {
            Ok(body) => body,
            Err(ReadError::Closed | ReadError::Wire(WireError::Oversize { .. } | WireError::Undersize { .. })) => {
                return;
            }
            Err(other) => panic!("a slice fails in no other way: {other:?}"),
        };
        let whole = &before[..before.len() - rest.len()];
        assert!(whole.len() <= MAX_FRAME_BYTES, "a frame of {} bytes", whole.len());
        let Ok(frame) = Frame::decode(&body) else { return };
        // Another version's refusal is understood, not repeated.
        if body[4] == VERSION {
            assert_eq!(frame.encode(), whole, "each value has one encoding: {frame:?}");
        }
        if rest.first() == Some(&READY) {
            rest = &rest[1..];
        }
    }
}

/// An address that discovery gave: read, written again, read again.
///
/// # Panics
///
/// When a good address is not the same after it was written again.
pub fn address(bytes: &[u8]) {
    let Ok(endpoint) = WorkerAddress::from_bytes(bytes.to_vec()).endpoint() else { return };
    let again = WorkerAddress::encode(&endpoint).expect("what was read can be written");
    assert_eq!(again.endpoint().expect("what was written can be read"), endpoint);
}

/// Runs a fuzz target over its corpus, in `fuzz/corpus` of the crate at `crate_dir`.
///
/// # Panics
///
/// When the target does, or the corpus has fewer than `at_least` files.
pub fn over_corpus(crate_dir: &str, target: &str, at_least: usize, mut run: impl FnMut(&[u8])) {
    let dir = Path::new(crate_dir).join("fuzz/corpus").join(target);
    let mut files = 0;
    for entry in fs::read_dir(&dir).expect("the corpus is there").flatten() {
        println!("{}", entry.path().display());
        run(&fs::read(entry.path()).expect("readable"));
        files += 1;
    }
    assert!(files >= at_least, "only {files} files in {}", dir.display());
}

#[cfg(test)]
mod tests {
    use super::over_corpus;

    const CRATE: &str = env!("CARGO_MANIFEST_DIR");

    #[test]
    fn corpus_of_frames() {
        over_corpus(CRATE, "frames", 5, super::frames);
    }

    #[test]
    fn corpus_of_addresses() {
        over_corpus(CRATE, "address", 5, super::address);
    }
}
