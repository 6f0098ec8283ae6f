//! What is printed: for people, or as one JSON object a line.

use std::{error::Error, time::Duration};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use verbs_engine::Profile;

#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub(crate) json: bool,
}

impl Output {
    /// One result.
    pub(crate) fn result(self, json: &Value, text: &str) {
        if self.json {
            println!("{json}");
        } else {
            println!("{text}");
        }
    }

    /// The end of a transfer. Its bytes may have gone to standard output, so that people are told on the other one.
    pub(crate) fn moved(self, verb: &str, bytes: u64, took: Duration, transport: &str, profile: Profile) {
        if self.json {
            let (seconds, profile) = (took.as_secs_f64(), profile.to_string());
            println!("{}", json!({ verb: bytes, "seconds": seconds, "transport": transport, "profile": profile }));
            return;
        }
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let rate = (bytes as f64 / took.as_secs_f64().max(1e-9)) as u64;
        let (seconds, rate) = (took.as_secs_f64(), HumanBytes(rate));
        eprintln!("{verb} {bytes} bytes in {seconds:.3} s over {transport}, {profile}, {rate}/s");
    }

    /// With everything that lies beneath it.
    pub(crate) fn error(self, error: &dyn Error) {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !text.ends_with(&cause_text) {
                text = format!("{text}: {cause_text}");
            }
            source = cause.source();
        }
        if self.json {
            println!("{}", json!({ "error": text }));
        } else {
            eprintln!("verbs-engine: {text}");
        }
    }

    /// A bar on standard error, where that is a terminal.
    pub(crate) fn bar(self, bytes: u64) -> ProgressBar {
        if self.json {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
        ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    }
}
