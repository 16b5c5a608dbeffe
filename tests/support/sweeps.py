"""Which cases of wide sweeps `make test` runs: a part drawn by their names; and which whole tests.

`make test-long` runs all of them.

How small a part depends on how many cases a sweep has and how long one takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from zlib import crc32

import pytest

PARTS: Mapping[str, int] = {
    "generation/test_model_runner.py::test_sequences_on_gpus": 4,
    "generation/test_rewind.py::test_greedy_answers_are_the_models_own": 8,
    "generation/test_rewind.py::test_a_chat_keeps_its_cache": 8,
    "generation/test_long_prompts.py::test_long_prompts": 3,
    "generation/test_long_prompts.py::test_preempted_while_the_angles_change": 4,
    "generation/test_long_prompts.py::test_a_conversation_across_the_change_and_back": 2,
    "generation/test_lookahead.py::test_all_families_get_their_tokens_in_fewer_passes": 100,
    "generation/test_batch.py::test_several_requests": 24,
    "generation/test_preemption.py::test_exact_has_the_bits_without_preemption": 6,
    "generation/test_preemption.py::test_preempted_requests_get_their_tokens_alone": 12,
    "generation/test_packed_batch.py::test_packed_together_with_an_unpacked_sequence": 8,
    "generation/test_swapped_to_file.py::test_tokens_are_those_alone_and_more_sequences_share_a_pass": 6,
    "test_kills.py::test_killed_at_some_steps": 14,
    "test_bench.py::test_only_the_last_turn_is_profiled": 6,
    "generation/test_kv_cache.py::test_a_cache_goes_back_to_what_it_was": 6,
    "generation/test_session.py::test_an_answer_stopped_at_any_unit": 6,
    "generation/test_self_draft.py::test_greedy_answers_are_the_models_own": 16,
    "generation/test_recommended.py::test_each_option": 12,
    "generation/test_recommended.py::test_options_hold_after_a_preemption": 8,
    "generation/test_prompt_cache.py::test_a_death_at_any_step_leaves_right_answers": 12,
    "generation/test_draft.py::test_any_draft_gives_the_models_answer": 8,
    "checkpoints/test_bodies.py::test_silent_server_is_retried": 4,
    "checkpoints/test_index.py::test_folder_attack": 1,
    "checkpoints/test_meta_checkpoint.py::test_vocabulary_that_encodes_differently": 8,
    "cli/test_convert.py::test_interrupted_conversion_is_resumed": 6,
    "cli/test_convert.py::test_a_gguf_file_at_a_chosen_dtype": 8,
    "cli/test_plan.py::test_choice_is_the_best_route_that_fits": 4,
    "cli/test_plan.py::test_peak_of_a_folder": 8,
    "cli/test_plan.py::test_unfinished_split_is_planned_to_its_end": 8,
    "cli/test_plan.py::test_plan_and_split_refuse_the_same_sizes": 32,
    "ecosystem/test_adapters.py::test_an_adapter_gives_the_logits_of_the_plain_model": 4,
    "ecosystem/test_adapters.py::test_every_way_of_loading_one": 4,
    "ecosystem/test_adapters.py::test_merging_is_refused_where_it_would_be_lost": 8,
    "ecosystem/test_copies_and_training.py::test_what_keeps_the_weights_where_they_are_works": 8,
    "engine/test_around_the_weights.py::test_caches": 12,
    "engine/test_first_use.py::test_split_of_an_earlier_version": 6,
    "engine/test_first_use.py::test_flipped_bit_is_an_error_or_unused": 64,
    "engine/test_first_use.py::test_every_reader_of_a_whole_split": 8,
    "engine/test_double.py::test_streamed_experts": 4,
    "engine/test_every_architecture.py::test_every_type_has_the_bits_of_transformers": 8,
    "engine/test_experts.py::test_bits_do_not_depend_on_where_experts_are": 12,
    "engine/test_experts.py::test_every_kernel_of_transformers_gets_its_experts": 8,
    "engine/test_fake_gpu.py::test_buffers_stay_within_the_limit": 16,
    "engine/test_fake_gpu.py::test_every_family_has_the_bits_of_transformers": 16,
    "engine/test_fake_gpu.py::test_gguf_file_without_a_split": 12,
    "engine/test_families.py::test_another_dtype_than_the_stored_one": 6,
    "engine/test_families.py::test_compressed_results_equal_transformers_with_dequantized_weights": 32,
    "engine/test_families.py::test_uncompressed_results_equal_transformers": 12,
    "engine/test_meta_logits.py::test_logits": 6,
    "engine/test_mixtures.py::test_a_token_of_all_layers_by_one_call": 16,
    "engine/test_mixtures.py::test_a_model_has_the_same_logits": 12,
    "engine/test_named_classes.py::test_outputs_equal_those_of_the_named_class": 16,
    "engine/test_weight_tensors.py::test_every_family_is_close_to_its_dequantized_model": 18,
    "engine/test_published.py::test_plan_of_quantized_weights": 8,
    "engine/test_published.py::test_results_equal_transformers": 8,
    "engine/test_published.py::test_results_equal_transformers_with_compressed_tensors": 8,
    "engine/test_published.py::test_device_with_its_own_memory": 8,
    "engine/test_reading.py::test_streamed_results_equal_resident_ones": 8,
    "engine/test_recurrences.py::test_a_layer_of_the_delta_rule_has_the_bits_of_its_class": 3,
    "engine/test_saving.py::test_saved_uncompressed_model_has_equal_bits": 6,
    "engine/test_skeleton.py::test_buffers_equal_transformers_bit_for_bit": 6,
    "engine/test_skeleton.py::test_dtypes_and_class_equal_transformers": 6,
    "engine/test_published_codes.py::test_every_tier_is_as_close_as_transformers": 12,
    "engine/test_attention.py::test_a_model_has_the_class_s_cache_and_nearly_its_logits": 10,
    "engine/test_attention.py::test_a_layer_has_the_bits_of_its_parts": 12,
    "engine/test_routed.py::test_a_model_has_the_same_logits": 12,
    "engine/test_published_conversions.py::test_mxfp4": 8,
    "engine/test_dtype_without_config.py::test_dtype_equals_transformers": 10,
    "engine/test_dtype_without_config.py::test_written_checkpoints_keep_the_dtype": 12,
    "engine/test_streamer.py::test_weights_that_only_refer_to_a_buffer_are_made_once": 8,
    "engine/test_gguf.py::test_bits_without_a_split_equal_those_of_a_split": 12,
    "engine/test_embedding_rows.py::test_large_table_is_read_by_rows": 8,
    "formats/test_tensor_spec.py::test_any_range_of_any_tensor": 4,
    "lazy/test_load.py::test_hostile_files_are_refused_when_opened": 4,
    "models/test_inspection.py::test_attacks_are_refused": 8,
    "models/test_pull.py::test_routes_of_a_repository": 2,
    "models/test_pull.py::test_gguf_file_is_called_by_its_type_and_may_stay_unsplit": 2,
    "quant/test_compression.py::test_dequantized_values_are_those_of_bitsandbytes": 6,
    "quant/test_fitting.py::test_numba_and_numpy_agree": 6,
    "quant/test_nested_scales.py::test_dequantized_values_are_those_of_bitsandbytes": 6,
    "quant/test_coded.py::test_inputs_of_every_dtype_and_a_bias": 3,
    "quant/test_products.py::test_any_number_of_inputs_rows_and_columns_by_bytes": 6,
    "quant/test_products.py::test_a_compiler_with_fewer_instructions": 2,
    "quant/test_prompt_attention.py::test_the_error_is_one_rounding": 3,
    "quant/test_joint.py::test_bits_of_separate_products": 3,
    "quant/test_block_encoders.py::test_the_error_is_at_most_that_of_llama_cpp": 3,
    "quant/test_block_products.py::test_methods_by_the_number_of_inputs": 3,
    "server/test_slow_tokenizers.py::test_streams_and_bytes_of_tokens_are_the_whole_text": 16,
    "server/test_structured.py::test_forced_calls": 4,
    "server/test_tools.py::test_thousands_of_begun_calls_are_read_in_one_go": 3,
    "server/test_tool_calls.py::test_marks_of_calls_that_are_special_tokens": 3,
    "server/test_tool_calls.py::test_call_inside_reasoning_is_ignored": 3,
    "server/test_sampling.py::test_distribution_is_that_of_transformers_processors": 3,
    "server/test_models.py::test_an_idle_model_is_unloaded": 2,
    "server/test_reranking.py::test_a_classifier_reads_a_pair": 2,
    "store/test_checkpoint_folder.py::test_chunks_make_the_whole_tensor": 6,
    "pipeline/test_spread.py::test_generated_tokens_equal_transformers": 8,
    "estimate/test_outline.py::test_an_outline_has_the_estimate_of_its_model": 8,
    "estimate/test_outline.py::test_published_figures_are_those_of_the_model_class": 8,
    "prepare/test_acceptance.py::test_faults_are_refused_before_the_first_change": 4,
    "prepare/test_finding.py::test_interrupted_legacy_folder_is_split_again": 10,
    "prepare/test_make.py::test_two_processes_race_on_one_checkpoint": 4,
    "prepare/test_make.py::test_waiting_process_resumes_the_split_of_a_killed_one": 12,
    "prepare/test_mixed.py::test_logits_are_those_of_the_dequantized_weights": 8,
    "prepare/test_two_at_once.py::test_load_waits_for_a_repair": 4,
    "splitter/test_announced_need.py::test_max_disk_of_the_announced_need_is_enough_for_a_folder": 12,
    "splitter/test_announced_need.py::test_max_disk_of_the_announced_need_is_enough_for_a_repository": 16,
    "splitter/test_announced_need.py::test_free_disk_of_the_announced_need_is_enough_for_a_folder": 12,
    "splitter/test_announced_need.py::test_free_disk_of_the_announced_need_is_enough_for_a_repository": 4,
    "splitter/test_shard_fetcher.py::test_layers_are_written_before_a_shard_is_complete": 4,
    "splitter/test_shard_fetcher.py::test_damaged_staged_bytes_restart_the_shard": 8,
    "splitter/test_edited_source.py::test_recorded_checksum_is_that_of_the_used_data": 16,
    "splitter/test_failing_disk.py::test_failure_at_some_steps": 12,
    "splitter/test_failing_disk.py::test_full_disk_cuts_a_write_short": 3,
    "splitter/test_failing_disk.py::test_short_writes": 3,
    "splitter/test_full_disk.py::test_disk_fills_up_in_the_middle": 12,
    "splitter/test_full_disk.py::test_disk_fills_up_during_a_large_write": 6,
    "splitter/test_full_disk.py::test_less_than_the_predicted_peak_is_refused": 6,
    "splitter/test_hub_faults.py::test_branch_that_moves_between_two_shards": 6,
    "splitter/test_hub_faults.py::test_fault": 12,
    "splitter/test_interrupted.py::test_interrupt_while_a_shard_is_fetched": 4,
    "splitter/test_kill.py::test_kill_at_some_steps": 16,
    "splitter/test_meta_checkpoints.py::test_any_number_of_ranks_makes_the_bytes_of_safetensors": 12,
    "splitter/test_plan.py::test_planned_placement_on_gpus_equals_that_of_the_split": 8,
    "splitter/test_plan.py::test_planned_tensors_and_placement_equal_those_of_the_split": 24,
    "splitter/test_power_cut.py::test_power_cut": 32,
    "splitter/test_power_cut.py::test_power_cut_where_one_file_is_open_at_a_time": 4,
    "splitter/test_real_syncs.py::test_dependencies_of_each_step_are_synced": 1,
    "splitter/test_split.py::test_peak_of_the_disk": 12,
    "splitter/test_torch_checkpoints.py::test_every_route_makes_the_bytes_of_safetensors": 12,
    "splitter/test_torch_checkpoints.py::test_plain_tensors_are_streamed": 6,
    "support/test_rounding.py::test_sums_in_any_order_are_right": 4,
    "support/test_builders.py::test_family_loads_and_generates": 4,
    "test_auto_model.py::test_routes": 6,
    "test_auto_model.py::test_ways_to_generate": 4,
    "test_rabbitllm_1_names.py::test_constructing_any_class_gives_the_model": 6,
    "test_supported_models.py::test_generating_class": 150,
    "display/test_tier_picture.py::test_experts_on_gpus_and_in_host_memory": 3,
    "display/test_tier_picture.py::test_every_byte_is_drawn_at_its_tier": 3,
    "base/test_openmp.py::test_threads_wait_actively_for_a_short_time": 3,
    "base/test_logs.py::test_levels": 3,
    "run/test_prompt.py::test_piped_or_redirected_text_is_read": 3,
    "benchmarks/test_gpu_work.py::test_this_project_is_measured_on_the_device": 3,
}
"""Test -> one case in so many is part of `make test`."""

ROOMS = (
    "checkpoints",
    "cli",
    "ecosystem",
    "engine",
    "estimate/doctor/test_examine",
    "estimate/test_outline",
    "estimate/test_predict",
    "estimate/test_scan",
    "estimate/test_split_estimate",
    "evaluation",
    "generation",
    "pipeline",
    "prepare",
    "ray",
    "splitter",
    "test_auto_model",
)
"""Tests that make a model or a split for each case: of those that `PARTS` does not name, one case in twelve."""

COVERED: Mapping[str, tuple[str, ...]] = {
    "benchmarks/test_drafts.py::test_it_runs": (
        "benchmarks/test_drafts.py::test_a_split_folder_is_streamed_from_files_of_its_own",
        "benchmarks/test_drafts.py::test_rates_are_those_of_the_same_turn",
    ),
    "benchmarks/test_quality.py::test_weights_of_others_are_measured_as_ours_are": (
        "benchmarks/test_quality.py::test_only_inputs_of_the_head_are_kept_and_only_wished_rows_computed",
    ),
    "cli/test_plan.py::test_other_commit_with_the_same_weights": (
        "cli/test_plan.py::test_finished_split_is_reported",
        "prepare/test_make.py::test_commit_with_the_same_weights_uses_the_existing_split",
    ),
    "cli/test_plan.py::test_peak_of_a_repository": ("cli/test_plan.py::test_peak_of_a_folder",),
    "cli/test_run.py::test_thoughts_leave_their_time_on_a_terminal": (
        "cli/test_run.py::test_thoughts_are_not_on_stdout",
        "display/test_answer_printer.py::test_thoughts_are_one_line_that_only_their_time_is_left_of",
    ),
    "engine/test_default_dtype.py::test_passes_have_the_same_bits": (
        "engine/test_default_dtype.py::test_products_have_the_same_bits",
    ),
    "engine/test_fake_gpu.py::test_compressed_models_have_the_bits_of_the_cpu": (
        "engine/test_fake_gpu.py::test_4bit_layers_are_multiplied_from_codes_by_a_right_kernel",
        "engine/test_fake_gpu.py::test_8bit_layers_are_dequantized",
    ),
    "engine/test_fake_gpu.py::test_driver_limit_leaves_some_experts_in_ordinary_memory": (
        "engine/test_fake_gpu.py::test_refused_page_locking_keeps_layers_in_ordinary_memory",
    ),
    "engine/test_fake_gpu.py::test_page_locked_memory_changes_no_bit": (
        "engine/test_fake_gpu.py::test_pinned_layers_alternate_between_both_links",
        "engine/test_fake_gpu.py::test_pinned_units_are_copied_once_a_pass_and_never_read",
    ),
    "engine/test_hybrid_caches.py::test_long_generations_of_a_padded_batch": (
        "engine/test_hybrid_caches.py::test_generations_are_independent",
        "engine/test_around_the_weights.py::test_caches",
    ),
    "engine/test_mixtures.py::test_a_change_of_a_shared_expert_is_noticed": (
        "engine/test_mixtures.py::test_a_change_between_two_steps_is_noticed",
    ),
    "engine/test_routed.py::test_gpt_oss_as_published_has_the_same_logits": (
        "engine/test_routed.py::test_a_model_has_the_same_logits",
        "engine/test_published.py::test_results_equal_transformers",
    ),
    "engine/test_thinkers.py::test_published_quantized": (
        "engine/test_thinkers.py::test_text_equals_transformers",
        "engine/test_published.py::test_results_equal_transformers",
    ),
    "generation/test_batch_drafts.py::test_a_second_question_continues_a_drafts_cache": (
        "generation/test_batch_drafts.py::test_a_preempted_request_continues_a_drafts_cache",
    ),
    "generation/test_batch_drafts.py::test_the_beginning_of_a_drafts_cache_takes_its_share_of_memory": (
        "generation/test_batch_drafts.py::test_memory_of_a_draft_is_counted",
    ),
    "generation/test_draft.py::test_a_chat_reuses_its_cache_with_any_draft": (
        "generation/test_rewind.py::test_a_chat_keeps_its_cache",
        "generation/test_draft.py::test_a_chat_with_a_draft",
    ),
    "generation/test_mtp.py::test_a_chat_keeps_its_cache": (
        "generation/test_rewind.py::test_a_chat_keeps_its_cache",
        "generation/test_mtp.py::test_the_heads_cache_goes_back_after_wrong_tokens",
    ),
    "generation/test_mtp.py::test_a_seed_gives_the_same_answer_with_any_draft": (
        "generation/test_rewind.py::test_sampled_answers_with_a_seed_are_the_same_with_ngrams",
        "generation/test_rewind.py::test_sampled_answers_with_a_seed_are_the_same_with_trees",
    ),
    "generation/test_mtp.py::test_auto_uses_a_head_where_layers_are_streamed": (
        "generation/test_draft.py::test_auto_is_for_models_that_move_weights_and_can_go_back",
        "generation/test_mtp.py::test_commands_name_and_use_the_head",
    ),
    "generation/test_mtp.py::test_heads_of_compressed_folders_have_8_bits": (
        "splitter/test_further_heads.py::test_heads_have_8_bits",
        "generation/test_mtp.py::test_greedy_answers_are_the_models_own",
    ),
    "generation/test_mtp.py::test_heads_on_gpus": (
        "generation/test_mtp.py::test_greedy_answers_are_the_models_own",
        "engine/test_fake_gpu.py::test_every_family_has_the_bits_of_transformers",
    ),
    "generation/test_mtp.py::test_sampled_answers_have_the_models_distribution": (
        "generation/test_self_draft.py::test_sampled_answers_have_the_models_distribution",
        "generation/test_mtp.py::test_greedy_answers_are_the_models_own",
    ),
    "generation/test_mtp.py::test_the_head_of_a_model_for_pictures": (
        "generation/test_mtp.py::test_greedy_answers_are_the_models_own",
        "generation/test_batch_drafts.py::test_the_heads_of_a_checkpoint",
    ),
    "generation/test_rewind.py::test_a_draft_model_goes_on_in_a_chat": (
        "generation/test_rewind.py::test_a_chat_keeps_its_cache",
    ),
    "generation/test_rewind.py::test_sampled_answers_have_the_models_distribution": (
        "generation/test_self_draft.py::test_sampled_answers_have_the_models_distribution",
        "generation/test_rewind.py::test_greedy_answers_are_the_models_own",
    ),
    "generation/test_self_draft.py::test_a_chat_keeps_its_cache": (
        "generation/test_rewind.py::test_a_chat_keeps_its_cache",
        "generation/test_self_draft.py::test_greedy_answers_are_the_models_own",
    ),
    "generation/test_self_draft.py::test_a_compressed_model_is_its_own_draft": (
        "generation/test_self_draft.py::test_greedy_answers_are_the_models_own",
        "generation/test_self_draft.py::test_drafts_compute_with_the_encoded_matrices",
    ),
    "generation/test_swapped_to_file.py::test_a_full_disk_has_them_computed_again": (
        "generation/test_preemption.py::test_a_full_disk_has_them_computed_again",
        "generation/test_swapped_to_file.py::test_an_unreadable_sequence_is_recomputed_alone",
    ),
    "generation/test_swapped_to_file.py::test_cancelled_requests_leave_no_buffers": (
        "generation/test_preemption.py::test_cancelled_requests_leave_no_swapped_cache",
    ),
    "prepare/test_make.py::test_two_processes_race_on_a_checkpoint_of_one_file": (
        "prepare/test_make.py::test_two_processes_race_on_one_checkpoint",
    ),
    "server/test_drafts.py::test_a_draft_model": (
        "server/test_drafts.py::test_the_same_answers_in_fewer_passes",
        "generation/test_batch_drafts.py::test_a_draft_model_proposes_for_all_requests_in_one_pass",
    ),
    "server/test_drafts.py::test_heads_of_a_model_with_states": (
        "server/test_drafts.py::test_the_same_answers_in_fewer_passes",
        "generation/test_batch_drafts.py::test_the_heads_of_a_checkpoint",
        "generation/test_batch_drafts.py::test_states_are_preempted_with_what_they_lack",
    ),
    "server/test_page_in_chromium.py::test_a_browser_that_blocks_storage": (
        "server/test_page_in_chromium.py::test_full_storage_is_told_until_there_is_room",
    ),
    "server/test_page_in_chromium.py::test_an_answer_stays_where_no_other_comes": (
        "server/test_page_in_chromium.py::test_messages_have_versions",
    ),
    "server/test_page_in_chromium.py::test_an_edited_question_waits_for_the_end_of_an_answer": (
        "server/test_page_in_chromium.py::test_messages_have_versions",
        "server/test_page_in_chromium.py::test_a_refused_question_is_edited",
    ),
    "server/test_page_in_chromium.py::test_code_is_copied_without_its_colours": (
        "server/test_page_in_chromium.py::test_questions_are_copied",
    ),
    "server/test_page_in_chromium.py::test_conversations_stay_in_order_when_the_status_comes_late": (
        "server/test_page_in_chromium.py::test_conversations_are_renamed_deleted_and_restored",
        "server/test_page_in_chromium.py::test_answer_continues_while_another_conversation_is_open",
    ),
    "server/test_page_in_chromium.py::test_number_fields_of_a_row_are_level": (
        "server/test_page_in_chromium.py::test_every_state_fits_and_is_legible",
    ),
    "server/test_page_in_chromium.py::test_shown_elements_are_kept_while_an_answer_streams": (
        "server/test_page_in_chromium.py::test_streamed_answer_survives_a_reload",
    ),
    "splitter/test_meta_checkpoints.py::test_disk_peak_equals_the_plan": (
        "splitter/test_meta_checkpoints.py::test_planned_need_fits_and_less_is_refused",
        "splitter/test_split.py::test_peak_of_the_disk",
    ),
    "splitter/test_meta_checkpoints.py::test_power_cut": (
        "splitter/test_power_cut.py::test_power_cut",
        "splitter/test_meta_checkpoints.py::test_any_number_of_ranks_makes_the_bytes_of_safetensors",
    ),
    "splitter/test_power_cut.py::test_power_cut_after_a_crash_before_each_sync": (
        "splitter/test_power_cut.py::test_power_cut_after_a_crash",
        "splitter/test_power_cut.py::test_power_cut",
    ),
    "splitter/test_torch_checkpoints.py::test_disk_peak_equals_the_plan": (
        "splitter/test_torch_checkpoints.py::test_every_route_makes_the_bytes_of_safetensors",
        "splitter/test_split.py::test_peak_of_the_disk",
    ),
    "test_matrix.py::test_kernels_for_pairs_of_bfloat16_run_here": (
        "quant/test_coded.py::test_every_kernel_that_this_processor_can_run",
    ),
}
"""Test that takes long -> tests of `make test` that show the same mechanism, for fewer models, routes or faults."""


def leave_the_rest_to_the_long_run(items: Sequence[pytest.Item]) -> None:
    """Mark what is not drawn, and what others cover, as `long`; of each sweep at least one case is left.

    Cases are drawn by a digest of their names, so that those of every kind are among them, and the same ones each time.
    """
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in COVERED:
            item.add_marker(pytest.mark.long)
        elif (name in PARTS or name.startswith(ROOMS)) and item.get_closest_marker("long") is None:
            sweeps[name].append(item)
    for name, cases in sweeps.items():
        drawn = sorted(cases, key=lambda case: (crc32(case.nodeid.encode()), case.nodeid))
        parts = PARTS.get(name, 12)
        for case in drawn[-(-len(cases) // parts) :]:
            case.add_marker(pytest.mark.long)
