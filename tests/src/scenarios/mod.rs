//! The scenarios, and the macros that make a suite of them for one kind of lab.

pub mod basic;
pub mod bulk_errors;
pub mod bulk_idle;
pub mod bulk_life;
pub mod bulk_moves;
pub mod bulk_regions;
pub mod credits;
pub mod ending;
pub mod field;
pub mod hostile;
pub mod layers;
pub mod life;
pub mod limits;
pub mod paths;
pub mod progress;
pub mod rendezvous;
pub mod rendezvous_reads;
pub mod soak;
pub mod windows;
pub mod zero_copy;

/// Makes one `#[test]` of each scenario of [`rendezvous`] and [`rendezvous_reads`].
#[macro_export]
macro_rules! rendezvous_suite {
    ($run:path) => {
        $crate::suite!(
            $run,
            $crate::scenarios::rendezvous_reads,
            [
                rt_11_one_slot_two_ways,
                rt_12_a_full_pool_goes_by_chunks_until_there_is_room,
                beyond_the_budget_of_read_leases_there_are_chunks,
                messages_go_by_read_once_there_is_an_arena,
                rt_18_dropped_pulls_leave_nothing,
                rt_21_a_late_read_gets_an_error_and_no_foreign_byte,
                progress_is_told_in_pieces,
                rt_22_release_races_with_acquire,
                rt_24_the_owner_shuts_down_during_a_get,
                damaged_answers_are_errors_and_nothing_is_posted,
                lying_owners_do_no_harm,
                indirect_messages_that_lead_nowhere,
                rt_26_soak,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::rendezvous,
            [
                rt_01_one_kibibyte,
                rt_02_one_mebibyte,
                an_empty_payload,
                rt_03_metadata,
                rt_04_get_into,
                rt_05_detach_and_get_again,
                rt_06_references,
                rt_07_same_worker,
                rt_08_chunks,
                a_file_is_offered_and_pulled,
                rt_10_messages_of_any_size,
                messages_keep_their_order,
                a_message_that_is_not_pulled_comes_back,
                a_peer_without_a_rendezvous,
                rt_22_what_does_not_fit_changes_nothing,
                a_slot_has_its_time_and_its_peer,
                a_lease_that_is_not_given_back_is_reaped,
                the_owner_shuts_down_while_it_is_pulled_from,
            ]
        );
    };
}

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
                small_frames_that_wait_share_sends,
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
                frames_above_a_limit_just_learnt_are_reported,
                a_reader_that_does_not_read_holds_its_sender_up,
                peers_beyond_the_srq_get_less_and_then_a_refusal,
                a_cq_without_room_refuses_a_second_qp,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::field,
            [
                b06_a_receiver_that_pauses_costs_no_more_than_its_pause,
                b07_slow_consumers_hold_frames_and_a_newcomer_is_served,
                b13_sixteen_peers_fill_the_cq_while_nobody_polls,
                b20_frames_around_the_longest_message_and_far_above,
                the_srq_limit_is_told_and_refilled,
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
            [
                two_malformed_frames_end_a_connection,
                b11_a_qp_that_falls_to_err_ends_every_frame_once,
                scanners_hurt_nobody,
                a_silent_peer_slows_no_other,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::zero_copy,
            [lent_frames_stay_whole_and_come_home, beyond_the_cap_frames_are_copied, a_lent_frame_outlives_everything,]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::layers,
            [
                each_lane_goes_its_way,
                lanes_of_no_layer_never_reach_the_application,
                a_service_frame_answers_a_stranger,
                service_frames_pass_while_draining,
                observers_hear_of_connections_and_their_ends,
                a_bulk_hello_without_an_acceptor_is_refused,
            ]
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

/// Makes one `#[test]` of each scenario of bulk memory.
#[macro_export]
macro_rules! bulk_suite {
    ($run:path) => {
        $crate::suite!(
            $run,
            $crate::scenarios::bulk_moves,
            [
                a_get_brings_every_byte_whatever_its_size,
                b20_sizes_around_the_longest_message,
                rt_13_the_window_is_used_and_never_exceeded,
                b18_the_smaller_rd_atomic_is_used,
                gets_share_the_window_fairly,
                rt_27_put_then_tell_by_each_way,
                notifications_wait_for_a_slow_taker,
                progress_is_told_and_a_cancel_stops_it,
                rt_14_frames_flow_during_a_get,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::bulk_idle,
            [
                an_idle_connection_is_closed_and_made_again,
                a_connection_that_one_side_uses_stays,
                transfers_meet_the_close_and_none_fails,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::bulk_errors,
            [
                what_is_wrong_beforehand_posts_nothing,
                rt_15_a_stale_key_costs_one_connection,
                b25_wrong_rights_are_typed_errors,
                rt_16_neighbours_are_reset_and_succeed_again,
                a_peer_without_bulk_memory_is_told_apart,
                a_deadline_ends_a_transfer_that_cannot_go_on,
                an_abort_takes_the_connection_down_and_nothing_else,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::bulk_regions,
            [
                rt_17_bounds_at_every_border,
                rt_17_a_cancelled_map_leaves_nothing,
                rt_17_unmap_parks_under_gets_and_joins,
                rt_18_dropped_gets_leave_nothing,
                b24_unmap_from_another_thread_during_gets,
                an_owner_that_unmaps_during_a_get_is_an_error_at_the_reader,
            ]
        );
        $crate::suite!(
            $run,
            $crate::scenarios::bulk_life,
            [
                rt_23_teardown_answers_everybody_once,
                rt_24_the_owner_shuts_down_while_a_peer_reads,
                rt_25_first_gets_from_both_sides_at_once,
                rt_25_messages_reconnect_while_bulk_goes_on,
                rt_25_either_side_restarts,
                a_dropped_bulk_takes_itself_down,
                a_worker_goes_on_without_its_bulk,
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
