//! The scenarios, and the macros that make a suite of them for one kind of lab.

pub mod basic;
pub mod credits;
pub mod ending;
pub mod hostile;
pub mod life;
pub mod limits;
pub mod paths;
pub mod progress;
pub mod soak;

/// Makes one `#[test]` of each scenario of [`basic`] and [`credits`]. `$run` takes a scenario and runs it.
#[macro_export]
macro_rules! messaging_suite {
    ($run:path) => {
        $crate::suite!(
            $run,
            $crate::scenarios::basic,
            [
                mt_01_single_round_trip,
                mt_02_bidirectional,
                mt_03_ten_on_one_connection,
                mt_04_response_stream,
                mt_05_event_stream,
                mt_06_ack_goes_to_the_event_stream,
                mt_07_mixed_types,
                mt_08_large_payload,
                mt_09_empty_header_and_payload,
                mt_10_mesh_of_three,
                mt_11_concurrent_senders,
                mt_12_unregistered_peer,
                mt_13_reuse_of_one_connection,
                mt_14_graceful_shutdown,
                mt_15_hundred_messages,
                mt_16_half_a_megabyte,
                mt_21_order_under_pressure,
                mt_26_oversize_by_one_byte,
                mt_28_two_hundred_kibibytes_in_order,
                sizes_around_every_border,
                send_before_start_is_reported,
                send_after_shutdown_is_reported,
                describe_tells_the_path,
                bad_addresses_are_typed_errors,
                shutdown_is_idempotent_and_may_precede_start,
                workers_behind_one_trait_object,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::credits,
            [
                window_drained_and_revived_by_pure_grants,
                both_sides_at_zero,
                many_messages_without_rnr,
                flooding_without_reading,
                crossed_first_sends,
                concurrent_small_sends_fit_any_send_queue,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::progress,
            [
                event_mode_with_every_way_to_receive,
                spin_then_park_with_every_way_to_receive,
                manual_mode_with_every_way_to_receive,
                a_handler_that_panics_stops_nothing,
                an_error_handler_that_panics_stops_nothing,
                flood_both_ways_without_a_stall,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::limits,
            [
                mt_29_cancel_keeps_the_order_of_successors,
                a_reader_that_does_not_read_holds_its_sender_up,
                peers_beyond_the_srq_get_less_and_then_a_refusal,
                a_cq_without_room_refuses_a_second_qp,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::ending,
            [last_words_before_a_shutdown_arrive, a_dropped_worker_reports_every_frame, closing_while_traffic_runs,]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::hostile,
            [two_malformed_frames_end_a_connection, scanners_hurt_nobody, a_silent_peer_slows_no_other,]
        );
        $crate::suite!($run, $crate::scenarios::paths, [the_smaller_mtu_is_used_and_told,]);
        $crate::suite!(
            $run,
            $crate::scenarios::life,
            [
                mt_17_and_23_drain_turns_requests_away,
                mt_18_and_19_drain_takes_everything_else,
                mt_20_health_during_drain,
                mt_22_death_of_an_epoch,
                mt_24_lifecycle_of_a_drain,
                mt_25_own_sends_during_drain,
                mt_27_health,
                an_admission_ends_at_its_deadline,
                strangers_are_forgotten,
                unregister_ends_and_forgets,
                idle_connections_are_evicted,
            ]
        );
    };
}

/// Makes one `#[test]` of each named scenario of a module.
#[macro_export]
macro_rules! suite {
    ($run:path, $module:path, [$($name:ident,)*]) => {
        $(
            #[test]
            fn $name() {
                use $module as scenarios;
                $run(scenarios::$name);
            }
        )*
    };
}
