//! What a worker logs, on the simulated fabric: as `docs/observability.md` says.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use tracing::{Event, Level, Subscriber, field::Field, span};
use tracing_subscriber::{Layer, layer::Context, prelude::*, registry::LookupSpan};
use verbs_tests::{
    lab::{Lab, SimLab, on_sim},
    node::Node,
};
use verbs_transport::{DrainPolicy, EpochEnd, sim::Faults};

/// The log of one test. One subscriber serves the whole process and tests take turns: of a callsite that another thread
/// without a subscriber meets first, a thread's own subscriber may never hear.
fn record() -> (Recording, MutexGuard<'static, ()>) {
    static TURN: Mutex<()> = Mutex::new(());
    static RECORDING: OnceLock<Recording> = OnceLock::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let recording = RECORDING.get_or_init(|| {
        let recording = Recording::default();
        tracing_subscriber::registry().with(recording.clone()).init();
        recording
    });
    recording.0.lock().expect("no panic").clear();
    (recording.clone(), turn)
}

/// What was logged: level, message or span name, and all fields in words.
#[derive(Clone, Default)]
struct Recording(Arc<Mutex<Vec<Line>>>);

#[derive(Clone, Debug)]
struct Line {
    level: Level,
    message: String,
    fields: BTreeMap<String, String>,
    span: Option<&'static str>,
}

#[derive(Default)]
struct Words(BTreeMap<String, String>);

impl tracing::field::Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recording {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, _id: &span::Id, _context: Context<'_, S>) {
        let mut words = Words::default();
        attributes.record(&mut words);
        let message = format!("span {}", attributes.metadata().name());
        self.push(*attributes.metadata().level(), message, words, None);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut words = Words::default();
        event.record(&mut words);
        let message = words.0.remove("message").unwrap_or_default();
        self.push(*event.metadata().level(), message, words, context.event_span(event).map(|span| span.name()));
    }
}

impl Recording {
    fn push(&self, level: Level, message: String, words: Words, span: Option<&'static str>) {
        self.0.lock().expect("no panic").push(Line { level, message, fields: words.0, span });
    }

    fn all(&self, message: &str) -> Vec<Line> {
        self.0.lock().expect("no panic").iter().filter(|line| line.message == message).cloned().collect()
    }

    /// The only line with this message.
    fn one(&self, message: &str) -> Line {
        let all = self.all(message);
        assert_eq!(all.len(), 1, "{message:?} in {:#?}", self.0.lock().expect("no panic"));
        all[0].clone()
    }
}

fn is_hex_24(word: &str) -> bool {
    word.len() == 8 && word.starts_with("0x") && u32::from_str_radix(&word[2..], 16).is_ok()
}

#[test]
fn one_connection_and_its_end_are_told_as_documented() {
    let (log, _turn) = record();
    on_sim(3, Faults::default(), |lab: Arc<SimLab>| async move {
        let (a, b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
        a.register(&b);
        let (a_id, b_id) = (a.id().to_string(), b.id().to_string());
        a.worker.ensure_connected(b.id()).await.expect("connected");
        tokio::time::sleep(Duration::from_millis(100)).await;

        let of = |message: &str, key: &str, value: &str| {
            let mut all = log.all(message);
            all.retain(|line| line.fields.get(key).is_some_and(|found| found == value));
            assert_eq!(all.len(), 1, "{message:?} with {key}={value} in {:#?}", log.all(message));
            all.remove(0)
        };
        let dial = of("span connect", "role", "dial");
        assert_eq!(
            (dial.level, &dial.fields["peer"], &dial.fields["generation"]),
            (Level::INFO, &b_id, &"1".to_owned())
        );
        let accept = of("span connect", "role", "accept");
        assert_eq!((accept.level, &accept.fields["peer"]), (Level::INFO, &a_id));
        let dialing = log.one("dialing");
        assert_eq!((dialing.level, dialing.span), (Level::DEBUG, Some("connect")));
        for rts in log.all("QP in RTS") {
            assert_eq!((rts.level, rts.span), (Level::DEBUG, Some("connect")));
            assert!(["qp", "psn", "remote_qp", "remote_psn"].iter().all(|key| is_hex_24(&rts.fields[*key])), "{rts:?}");
        }
        assert_eq!(log.all("QP in RTS").len(), 2);
        let connected = of("connected", "peer", &b_id);
        assert_eq!(connected.level, Level::INFO);
        for key in ["qp", "psn", "remote_qp"] {
            assert!(is_hex_24(&connected.fields[key]), "{connected:?}");
        }
        for key in ["generation", "gid", "gid_index", "remote_gid", "mtu_bytes", "inline_bytes", "window"] {
            assert!(connected.fields.contains_key(key), "{key} of {connected:?}");
        }
        assert_eq!(of("connected", "peer", &a_id).fields["remote_qp"], connected.fields["qp"]);
        assert!(log.all("connection ended").is_empty());

        b.stop().await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let told = of("connection ended", "cause", "shutting_down");
        assert_eq!((told.level, &told.fields["peer"]), (Level::INFO, &a_id));
        let heard = of("connection ended", "peer", &b_id);
        assert_eq!((heard.level, &heard.fields["qp"]), (Level::INFO, &connected.fields["qp"]));
        assert!(EpochEnd::CAUSES.contains(&heard.fields["cause"].as_str()) && heard.fields.contains_key("reason"));
        let down = log.one("shut down");
        assert_eq!((down.level, down.span), (Level::INFO, Some("shutdown")));

        a.worker.drain_and_shutdown(DrainPolicy::WaitForEver).await;
        assert_eq!(log.one("span drain").level, Level::INFO);
        assert_eq!(log.one("drained").span, Some("drain"));
        let warnings: Vec<_> = [Level::WARN, Level::ERROR].iter().flat_map(|level| log.at(*level)).collect();
        assert!(warnings.iter().all(|line| line.message.starts_with("no shared secret")), "{warnings:#?}");
    });
}

impl Recording {
    fn at(&self, level: Level) -> Vec<Line> {
        self.0.lock().expect("no panic").iter().filter(|line| line.level == level).cloned().collect()
    }
}

#[test]
fn an_attempt_that_fails_is_told_as_one() {
    let (log, _turn) = record();
    on_sim(4, Faults::default(), |lab: Arc<SimLab>| async move {
        let (a, b) = (Node::start(&*lab, 1).await, Node::start(&*lab, 2).await);
        a.register(&b);
        b.stop().await;
        a.worker.ensure_connected(lab.config(2).instance).await.expect_err("nobody listens");
        let failed = log.one("connection failed");
        assert_eq!((failed.level, failed.fields["cause"].as_str()), (Level::INFO, "dial"));
        assert_eq!(log.one("the dial failed").span, Some("connect"));
        assert_eq!(a.worker.stats().ended, BTreeMap::from([("dial", 1)]));
        a.stop().await;
    });
}
