//! The device's own count of messages that found no receive posted.

use std::{fs, path::Path};

/// RNR errors of a port since it came up, sent and received, over all of its users; `None`: the device does not count
/// them. Soft-RoCE has `send_rnr_err`, `rcvd_rnr_err` and `retry_rnr_exceeded_err`, mlx5 `rnr_nak_retry_err`.
pub(crate) fn count(device: &str, port: u8) -> Option<u64> {
    let folder = Path::new("/sys/class/infiniband").join(device).join(format!("ports/{port}/hw_counters"));
    let entries = fs::read_dir(folder).ok()?.flatten();
    let counts = entries.filter(|entry| entry.file_name().to_string_lossy().contains("rnr")).filter_map(|entry| {
        let text = fs::read_to_string(entry.path()).ok()?;
        text.trim().parse::<u64>().ok()
    });
    counts.reduce(|sum, count| sum + count)
}
