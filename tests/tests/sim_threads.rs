//! Scenarios on simulated hosts in real time, on four threads: what a single thread in fake time cannot show.

use std::{future::Future, sync::Arc};

use verbs_tests::lab::{SimLab, on_sim_threads};

fn run<R: Future<Output = ()>>(scenario: impl FnOnce(Arc<SimLab>) -> R) {
    on_sim_threads(4, scenario);
}

// B04: 1,000 rounds of crossed first sends, now with real threads.
verbs_tests::suite!(
    run,
    verbs_tests::scenarios::credits,
    [
        both_sides_at_zero,
        small_frames_that_wait_share_sends,
        flooding_without_reading,
        crossed_first_sends,
        concurrent_small_sends_fit_any_send_queue,
    ]
);
verbs_tests::suite!(
    run,
    verbs_tests::scenarios::progress,
    [
        event_mode_with_every_way_to_receive,
        spin_then_park_with_every_way_to_receive,
        manual_mode_with_every_way_to_receive,
        busy_poll_with_every_way_to_receive,
        polling_by_hand_needs_no_runtime,
        a_handler_that_panics_stops_nothing,
        an_error_handler_that_panics_stops_nothing,
        flood_both_ways_without_a_stall,
    ]
);
verbs_tests::suite!(
    run,
    verbs_tests::scenarios::limits,
    [
        a_reader_that_does_not_read_holds_its_sender_up,
        frames_above_a_limit_just_learnt_are_reported,
        peers_beyond_the_srq_get_less_and_then_a_refusal,
    ]
);
verbs_tests::suite!(
    run,
    verbs_tests::scenarios::ending,
    [last_words_before_a_shutdown_arrive, a_dropped_worker_reports_every_frame, closing_while_traffic_runs,]
);
verbs_tests::suite!(run, verbs_tests::scenarios::hostile, [scanners_hurt_nobody, a_silent_peer_slows_no_other,]);
