#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| verbs_transport::fuzzing::pack(bytes));
