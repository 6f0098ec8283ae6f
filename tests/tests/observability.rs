//! What a worker publishes, on the simulated fabric: as `docs/observability.md` says.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};
use verbs_tests::{
    examples::{Example, run},
    lab::{Lab, SimLab, on_sim},
    node::{Node, next, pattern},
};
use verbs_transport::{
    Config, EpochEnd, MessageType, Worker,
    sim::{Faults, SimFabric},
};

/// The value of the series with this name and all of these labels.
fn series(text: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let line = text.lines().find(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
            && labels.iter().all(|(key, value)| line.contains(&format!("{key}=\"{value}\"")))
    })?;
    line.rsplit(' ').next()?.parse().ok()
}

fn publish(recorder: &PrometheusRecorder, workers: &[&Worker<SimFabric>]) -> String {
    metrics::with_local_recorder(recorder, || workers.iter().for_each(|worker| worker.publish_metrics()));
    recorder.handle().render()
}

#[test]
fn the_example_prints_what_prometheus_scrapes() {
    let end = run(Example::Prometheus, &[]);
    assert!(end.status.success(), "{end}");
    let get =
        |name, labels: &[(&str, &str)]| series(&end.stdout, name, labels).unwrap_or_else(|| panic!("{name}: {end}"));
    assert!(end.stdout.contains("# HELP verbs_frames_total "), "{end}");
    let sent = [("direction", "sent"), ("type", "message")];
    let both: f64 = end
        .stdout
        .lines()
        .filter(|line| line.starts_with("verbs_frames_total{") && sent.iter().all(|(_, value)| line.contains(value)))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum();
    assert!((both - 1000.0).abs() < 0.5, "{both} messages: {end}");
    assert!((get("verbs_connections", &[]) - 1.0).abs() < 0.5);
    assert!((get("verbs_peer_path", &[("path", "rdma"), ("mtu_bytes", "4096")]) - 1.0).abs() < 0.5);
    assert!(get("verbs_rnr_naks_total", &[("direction", "sent")]).abs() < 0.5);
    assert!(get("verbs_epochs_ended_total", &[("cause", "unresponsive")]).abs() < 0.5);
    assert_eq!(end.stderr, "", "no noise");
}

#[test]
fn counters_and_gauges_follow_a_connection_from_start_to_shutdown() {
    on_sim(1, Faults::default(), |lab: Arc<SimLab>| async move {
        let recorder = PrometheusBuilder::new().build_recorder();
        let small_window = Config { window_slabs: 8, ..lab.config(2) };
        let (a, mut b) = (Node::start(&*lab, 1).await, Node::start_with(lab.fabric(2), small_window).await);
        let id = a.id().to_string();
        let mine = ("worker", id.as_str());
        let text = publish(&recorder, &[&a.worker]);
        assert_eq!(series(&text, "verbs_peers", &[mine]), Some(0.0));
        a.register(&b);
        for n in 0..40 {
            let _ = a.send(b.id(), MessageType::Message, format!("{n}"), pattern(20_000));
        }
        for _ in 0..40 {
            next(&mut b.inbound.message).await;
        }
        let _ = a.send(verbs_transport::InstanceId(77), MessageType::Event, "to", "nobody");
        let text = publish(&recorder, &[&a.worker, &b.worker]);
        let get = |name, labels: &[(&str, &str)]| {
            let all: Vec<_> = labels.iter().copied().chain([mine]).collect();
            series(&text, name, &all).unwrap_or_else(|| panic!("{name} {labels:?} in\n{text}"))
        };
        let is = |name, labels: &[(&str, &str)], expected: f64| {
            let found = get(name, labels);
            assert!((found - expected).abs() < 0.5, "{name} {labels:?} is {found}, not {expected}, in\n{text}");
        };
        is("verbs_frames_total", &[("direction", "sent"), ("type", "message")], 40.0);
        is("verbs_bytes_total", &[("direction", "sent"), ("type", "message")], 40.0 * 20_000.0 + 70.0);
        is("verbs_rejections_total", &[("reason", "not_registered")], 1.0);
        is("verbs_rejections_total", &[("reason", "send_error")], 0.0);
        is("verbs_sends_total", &[("class", "copied")], 120.0);
        is("verbs_fragments_total", &[], 120.0);
        is("verbs_peers", &[], 1.0);
        is("verbs_connections", &[], 1.0);
        is("verbs_dials_total", &[], 1.0);
        is("verbs_connections_made_total", &[], 1.0);
        is("verbs_peer_path", &[("peer", &b.id().to_string())], 1.0);
        assert!(get("verbs_credit_stalls_total", &[]) > 1.0, "a window of 8 stalls 120 SENDs");
        assert!(get("verbs_credit_stall_microseconds_total", &[]) > 1.0, "a stall lasts a round trip");
        let naks = series(&text, "verbs_rnr_naks_total", &[("worker", &b.id().to_string()), ("direction", "sent")]);
        assert_eq!(naks, Some(0.0));
        assert_eq!(a.worker.stats().ended, BTreeMap::new());
        let (worker, other) = (a.worker.clone(), b.worker.clone());
        a.stop().await;
        b.stop().await;
        let text = publish(&recorder, &[&worker, &other]);
        assert_eq!(series(&text, "verbs_peers", &[mine]), Some(0.0));
        assert_eq!(series(&text, "verbs_connections", &[mine]), Some(0.0));
        assert_eq!(series(&text, "verbs_qps", &[mine]), Some(0.0));
        assert_eq!(series(&text, "verbs_peer_path", &[mine]), Some(0.0), "the path is no longer so");
        assert_eq!(series(&text, "verbs_epochs_ended_total", &[mine, ("cause", "shutting_down")]), Some(1.0));
        assert_eq!(series(&text, "verbs_sends_total", &[mine, ("class", "copied")]), Some(120.0), "counts stay");
        assert_eq!(worker.stats().ended, BTreeMap::from([("shutting_down", 1)]));
        let gone = other.stats().ended;
        assert_eq!(gone.values().sum::<u64>(), 1, "{gone:?}");
        assert!(gone.keys().all(|cause| EpochEnd::CAUSES.contains(cause)));
    });
}

#[test]
fn an_interval_publishes_by_itself_and_once_more_at_the_end() {
    on_sim(2, Faults::default(), |lab: Arc<SimLab>| async move {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        // The runtime has one thread, so what its tasks publish arrives here.
        let guard = metrics::set_default_local_recorder(&recorder);
        let config = Config { metrics_interval: Some(Duration::from_secs(1)), ..lab.config(1) };
        let a = Node::start_with(lab.fabric(1), config).await;
        let b = Node::start(&*lab, 2).await;
        a.register(&b);
        tokio::time::sleep(Duration::from_millis(1100)).await;
        assert_eq!(series(&handle.render(), "verbs_peers", &[]), Some(1.0));
        a.worker.ensure_connected(b.id()).await.expect("connected");
        a.stop().await;
        let text = handle.render();
        assert_eq!(series(&text, "verbs_peers", &[]), Some(0.0));
        assert_eq!(series(&text, "verbs_connections_made_total", &[]), Some(1.0));
        b.stop().await;
        drop(guard);
    });
}
