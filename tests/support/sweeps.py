"""Which cases of wide sweeps `make test` runs: a part drawn by their names. `make test-long` runs all of them.

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
    "generation/test_long_prompts.py::test_long_prompts": 1,
    "generation/test_long_prompts.py::test_preempted_while_the_angles_change": 2,
    "generation/test_long_prompts.py::test_a_conversation_across_the_change_and_back": 1,
    "generation/test_lookahead.py::test_all_families_get_their_tokens_in_fewer_passes": 8,
    "generation/test_mtp.py::test_heads_of_compressed_folders_have_8_bits": 6,
    "generation/test_batch.py::test_several_requests": 12,
    "generation/test_preemption.py::test_exact_has_the_bits_without_preemption": 6,
    "generation/test_preemption.py::test_preempted_requests_get_their_tokens_alone": 12,
    "generation/test_packed_batch.py::test_packed_together_with_an_unpacked_sequence": 4,
    "generation/test_swapped_to_file.py::test_tokens_are_those_alone_and_more_sequences_share_a_pass": 6,
    "test_kills.py::test_killed_at_some_steps": 4,
    "test_bench.py::test_only_the_last_turn_is_profiled": 6,
    "generation/test_kv_cache.py::test_a_cache_goes_back_to_what_it_was": 6,
    "generation/test_session.py::test_an_answer_stopped_at_any_unit": 6,
    "checkpoints/test_bodies.py::test_silent_server_is_retried": 4,
    "checkpoints/test_index.py::test_folder_attack": 1,
    "cli/test_convert.py::test_interrupted_conversion_is_resumed": 6,
    "cli/test_plan.py::test_choice_is_the_best_route_that_fits": 4,
    "cli/test_plan.py::test_peak_of_a_folder": 8,
    "cli/test_plan.py::test_peak_of_a_repository": 16,
    "cli/test_plan.py::test_unfinished_split_is_planned_to_its_end": 8,
    "cli/test_plan.py::test_plan_and_split_refuse_the_same_sizes": 16,
    "ecosystem/test_adapters.py::test_an_adapter_gives_the_logits_of_the_plain_model": 4,
    "ecosystem/test_adapters.py::test_every_way_of_loading_one": 4,
    "ecosystem/test_adapters.py::test_merging_is_refused_where_it_would_be_lost": 8,
    "ecosystem/test_copies_and_training.py::test_what_keeps_the_weights_where_they_are_works": 8,
    "engine/test_around_the_weights.py::test_caches": 12,
    "engine/test_first_use.py::test_split_of_an_earlier_version": 6,
    "engine/test_first_use.py::test_flipped_bit_is_an_error_or_unused": 32,
    "engine/test_double.py::test_streamed_experts": 4,
    "engine/test_every_architecture.py::test_every_type_has_the_bits_of_transformers": 8,
    "engine/test_experts.py::test_bits_do_not_depend_on_where_experts_are": 12,
    "engine/test_experts.py::test_every_kernel_of_transformers_gets_its_experts": 4,
    "engine/test_fake_gpu.py::test_buffers_stay_within_the_limit": 8,
    "engine/test_fake_gpu.py::test_compressed_models_have_the_bits_of_the_cpu": 12,
    "engine/test_fake_gpu.py::test_every_family_has_the_bits_of_transformers": 8,
    "engine/test_fake_gpu.py::test_page_locked_memory_changes_no_bit": 8,
    "engine/test_families.py::test_another_dtype_than_the_stored_one": 6,
    "engine/test_families.py::test_compressed_results_equal_transformers_with_dequantized_weights": 16,
    "engine/test_families.py::test_uncompressed_results_equal_transformers": 12,
    "engine/test_hybrid_caches.py::test_long_generations_of_a_padded_batch": 4,
    "engine/test_meta_logits.py::test_logits": 6,
    "engine/test_mixtures.py::test_a_token_of_all_layers_by_one_call": 8,
    "engine/test_named_classes.py::test_outputs_equal_those_of_the_named_class": 8,
    "engine/test_weight_tensors.py::test_every_family_is_close_to_its_dequantized_model": 18,
    "engine/test_published.py::test_plan_of_quantized_weights": 4,
    "engine/test_published.py::test_results_equal_transformers": 4,
    "engine/test_published.py::test_results_equal_transformers_with_compressed_tensors": 4,
    "engine/test_reading.py::test_streamed_results_equal_resident_ones": 8,
    "engine/test_recurrences.py::test_a_layer_of_the_delta_rule_has_the_bits_of_its_class": 1,
    "engine/test_saving.py::test_saved_uncompressed_model_has_equal_bits": 6,
    "engine/test_skeleton.py::test_buffers_equal_transformers_bit_for_bit": 6,
    "engine/test_skeleton.py::test_dtypes_and_class_equal_transformers": 6,
    "formats/test_tensor_spec.py::test_any_range_of_any_tensor": 4,
    "models/test_inspection.py::test_attacks_are_refused": 8,
    "quant/test_compression.py::test_dequantized_values_are_those_of_bitsandbytes": 6,
    "quant/test_fitting.py::test_numba_and_numpy_agree": 6,
    "quant/test_nested_scales.py::test_dequantized_values_are_those_of_bitsandbytes": 6,
    "quant/test_products.py::test_any_number_of_inputs_rows_and_columns_by_bytes": 6,
    "server/test_slow_tokenizers.py::test_streams_and_bytes_of_tokens_are_the_whole_text": 4,
    "store/test_checkpoint_folder.py::test_chunks_make_the_whole_tensor": 6,
    "pipeline/test_spread.py::test_generated_tokens_equal_transformers": 4,
    "estimate/test_outline.py::test_an_outline_has_the_estimate_of_its_model": 8,
    "prepare/test_acceptance.py::test_faults_are_refused_before_the_first_change": 4,
    "prepare/test_finding.py::test_interrupted_legacy_folder_is_split_again": 5,
    "prepare/test_make.py::test_two_processes_race_on_a_checkpoint_of_one_file": 4,
    "prepare/test_make.py::test_two_processes_race_on_one_checkpoint": 4,
    "prepare/test_make.py::test_waiting_process_resumes_the_split_of_a_killed_one": 12,
    "prepare/test_mixed.py::test_logits_are_those_of_the_dequantized_weights": 4,
    "prepare/test_two_at_once.py::test_load_waits_for_a_repair": 4,
    "splitter/test_announced_need.py::test_max_disk_of_the_announced_need_is_enough_for_a_folder": 6,
    "splitter/test_announced_need.py::test_max_disk_of_the_announced_need_is_enough_for_a_repository": 8,
    "splitter/test_announced_need.py::test_free_disk_of_the_announced_need_is_enough_for_a_folder": 6,
    "splitter/test_announced_need.py::test_free_disk_of_the_announced_need_is_enough_for_a_repository": 4,
    "splitter/test_shard_fetcher.py::test_layers_are_written_before_a_shard_is_complete": 4,
    "splitter/test_shard_fetcher.py::test_damaged_staged_bytes_restart_the_shard": 8,
    "splitter/test_edited_source.py::test_recorded_checksum_is_that_of_the_used_data": 8,
    "splitter/test_failing_disk.py::test_failure_at_some_steps": 12,
    "splitter/test_full_disk.py::test_disk_fills_up_in_the_middle": 6,
    "splitter/test_full_disk.py::test_disk_fills_up_during_a_large_write": 6,
    "splitter/test_full_disk.py::test_less_than_the_predicted_peak_is_refused": 6,
    "splitter/test_hub_faults.py::test_branch_that_moves_between_two_shards": 6,
    "splitter/test_hub_faults.py::test_fault": 8,
    "splitter/test_interrupted.py::test_interrupt_while_a_shard_is_fetched": 4,
    "splitter/test_kill.py::test_kill_at_some_steps": 8,
    "splitter/test_meta_checkpoints.py::test_any_number_of_ranks_makes_the_bytes_of_safetensors": 6,
    "splitter/test_meta_checkpoints.py::test_disk_peak_equals_the_plan": 6,
    "splitter/test_meta_checkpoints.py::test_power_cut": 4,
    "splitter/test_plan.py::test_planned_placement_on_gpus_equals_that_of_the_split": 4,
    "splitter/test_plan.py::test_planned_tensors_and_placement_equal_those_of_the_split": 12,
    "splitter/test_power_cut.py::test_power_cut": 16,
    "splitter/test_power_cut.py::test_power_cut_where_one_file_is_open_at_a_time": 4,
    "splitter/test_split.py::test_peak_of_the_disk": 6,
    "splitter/test_torch_checkpoints.py::test_every_route_makes_the_bytes_of_safetensors": 6,
    "splitter/test_torch_checkpoints.py::test_disk_peak_equals_the_plan": 6,
    "splitter/test_torch_checkpoints.py::test_plain_tensors_are_streamed": 6,
    "support/test_rounding.py::test_sums_in_any_order_are_right": 4,
    "test_auto_model.py::test_routes": 6,
    "test_auto_model.py::test_ways_to_generate": 4,
    "test_rabbitllm_1_names.py::test_constructing_any_class_gives_the_model": 6,
    "test_supported_models.py::test_generating_class": 150,
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
"""Tests that make a model or a split for each case: of those that `PARTS` does not name, one case in four."""


def leave_the_rest_to_the_long_run(items: Sequence[pytest.Item]) -> None:
    """Mark what is not drawn as `long`; of each sweep at least one case is left.

    Cases are drawn by a digest of their names, so that those of every kind are among them, and the same ones each time.
    """
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if (name in PARTS or name.startswith(ROOMS)) and item.get_closest_marker("long") is None:
            sweeps[name].append(item)
    for name, cases in sweeps.items():
        drawn = sorted(cases, key=lambda case: (crc32(case.nodeid.encode()), case.nodeid))
        parts = PARTS.get(name, 4)
        for case in drawn[-(-len(cases) // parts) :]:
            case.add_marker(pytest.mark.long)
