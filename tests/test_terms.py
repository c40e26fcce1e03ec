"""Identifiers that were replaced by the field's terms stay out of the code and of emitted kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RETIRED = {
    # Emitted kernels and their templates.
    "may_attend": "mask_mod",
    "modify_score": "score_mod",
    "modify_scores": "apply_score",
    "mask_scores": "apply_mask",
    "finish_scores": "apply_mods",
    "reads_alike": "reads_uniform",
    "kAlike": "kUniform",
    "struct Work": "struct WorkTile",
    "work_of": "work_tile_at",
    "work_of_block": "work_tile_of_block",
    "work_full": "work_tile_full",
    "work_empty": "work_tile_empty",
    "take_turn": "ping_pong_wait",
    "pass_turn": "ping_pong_arrive",
    "pass_by": "skip_step",
    "raise_to": "update_row_max",
    "subtract_references": "subtract_row_max",
    "kMostReference": "kMaxFoldedRowMax",
    "kMaxLag": "kRescaleThreshold",
    "has_offset": "offset_is_usable",
    "Tests::kNone": "Masking::kNone",
    "kTests": "kMasking",
    "mbarrier_expect_bytes": "mbarrier_arrive_expect_bytes",
    "reads_tile": "can_copy_tile",
    "steps_of_warpgroup": "narrow_to_warpgroup",
    "struct Drawn": "struct DropoutBits",
    "kDrawnSteps": "kDropoutSteps",
    "drawn_at": "dropout_bits_at",
    "blocks_drawn": "philox_blocks",
    "draw_steps": "generate_steps",
    "head_chunks": "groups_per_head",
    "head_of_all": "batch_head",
    "in_parts": "keys_in_two_parts",
    "passes_tests": "passes_masking",
    "choose_tests": "choose_masking",
    "by_wgmma": "fragment",
    "each_row_tile": "each_element",
    "key_parity": "PipelineState::phase",
    "value_parity": "PipelineState::phase",
    "score_parity": "PipelineState::phase",
    "key_phase": "PipelineState::phase",
    "value_phase": "PipelineState::phase",
    "ds_phase": "PipelineState::phase",
    "dq_phase": "PipelineState::phase",
    "exchange_phase": "PipelineState::phase",
    "work_tile_phase": "PipelineState::phase",
    "struct Barriers": "struct SharedStorage",
    "keys_at": "SharedStorage::keys",
    "values_at": "SharedStorage::values",
    "queries_at": "SharedStorage::queries",
    "d_outputs_at": "SharedStorage::d_outputs",
    "ds_at": "SharedStorage::ds",
    "dq_turns": "dq_tile_state",
    "part_turns": "part_semaphore",
    "had_turn": "semaphore_test",
    "await_turn": "semaphore_wait",
    "end_turn": "semaphore_release",
    "count_added": "counter_add",
    "await_added": "counter_wait",
    "of_sequence": "sequence_arguments",
    "differentiate_scores": "recompute_p_and_ds",
    "multiply_by_probabilities": "compute_ds",
    "multiply_by_factors": "compute_ds_from_factors",
    "Gathered": "CaptureGradients",
    "add_gathered": "add_capture_gradients",
    "gather_distances": "add_diagonals",
    "sum_place": "accum_offset",
    "sum_index": "accum_index",
    "look_at_elements": "evaluate_elements",
    "mask_mod_within": "mask_mod_over_tile",
    "by_keys": "recompute_dkdv",
    "by_queries": "recompute_dq",
    "query_sums": "dq_accum",
    "struct Walk": "struct QueryIterator",
    "walk_queries": "mainloop",
    "load_works": "producer",
    "differentiate_works": "consumer",
    "differentiate_values": "consumer_dv",
    "differentiate_keys": "consumer_dk",
    "add_up_works": "dq_writer",
    "finish_rows": "convert_dq_rows",
    "start_probability_gradients": "issue_dp_wgmma",
    "start_query_gradients": "issue_dq_wgmma",
    "start_sum": "issue_wgmma_rs",
    "share_scores": "store_ds",
    "hand_over_gradients": "store_dq",
    "handed_over": "exchanged",
    "add_parts": "reduce_splits",
    "lay_down": "store_fragments",
    "pick_up": "add_fragments",
    "gradients_full": "dq_full",
    "gradients_empty": "dq_empty",
    "kAdders": "kDqWriters",
    "kFinishedRows": "kConvertedRows",
    "places_anew": "recomputes_addresses",
    "keys_early": "prefetches_keys",
    "BackwardPrepareArguments": "BackwardPreprocessArguments",
    "BackwardFinishArguments": "BackwardPostprocessArguments",
    "BackwardKeysArguments": "BackwardDkdvArguments",
    "BackwardQueriesArguments": "BackwardDqArguments",
    "cut_scores": "apply_seqlen_mask",
    "stage_output": "store_output_to_shared",
    "write_lse": "store_lse",
    "copy_keys_and_values": "load_keys_and_values",
    "copy_queries": "load_queries",
    "add_query_gradients": "accumulate_dq",
    "lay_share": "store_warp_partial",
    "load_share": "load_partial",
    "merge_shares": "combine_partials",
    "store_share": "store_split_partial",
    "place_of_share": "partial_slot",
    "outputs_of_split": "split_outputs",
    "states_of_split": "split_states",
    "kWarpsShares": "kFromWarps",
    "kSharesAtOnce": "kPartialsAtOnce",
    "kShareColumns": "kPartialColumns",
    "find_run": "find_work_unit",
    "run_of_block": "work_unit_of_block",
    "work_tile_of_run": "current_work_tile",
    "attend_to_run": "process_work_unit",
    "attend_to_keys": "compute_warp_partials",
    "attend_to_queries": "compute_work_tile",
    "attend_to_tile": "process_prefill_tile",
    "turn_of_block": "assignment_of_block",
    "kBeginning": "kTileOverhead",
    "kShortest": "kMinUnitTiles",
    "sums_of": "prefix_sum",
    "start_scores": "issue_qk_wgmma",
    "start_output": "issue_pv_wgmma",
    "start_dp": "issue_dp_wgmma",
    "start_dq": "issue_dq_wgmma",
    "start_product": "issue_wgmma_ss",
    "start_accumulate": "issue_wgmma_rs",
    "kDqWriterThreads": "kDqWriters",
    "dq_semaphore": "dq_tile_state",
    "kPromptQueries": "kPrefillQueries",
    "count_prompts": "count_prefill_tiles",
    "work_tile_of_prompts": "prefill_work_tile",
    "arguments.statistics": "arguments.lse_and_d",
    "statistics_of": "lse_and_d_of",
    "has_waited": "waits",
    "shrink[r]": "rescale_factor",
    "float shrink": "rescale_factor",
    "head_groups = arguments": "groups_per_head or groups_per_kv_head",
    "kDqPartBytes": "kDqWarpBytes",
    "kRowsBytes": "kWarpgroupBytes",
    "kRowsOffset": "kWarpgroupOffset",
    "varlen %}": "a macro of templates/batch or of a scheduler",
    "{% if varlen": "a macro of templates/batch or of a scheduler",
    # Dispatch and launch cache.
    "KernelChoice": "ForwardDispatch",
    "BackwardChoice": "BackwardDispatch",
    "BuiltForward": "ForwardKernels",
    "HeadDivision": "HeadSplit",
    "PlansBySizes": "SizeRules",
    "forward_stages": "render_forward_kernels",
    "backward_stages": "render_backward_kernels",
    "plan_by_sizes": "plan_with",
    "likenesses": "launch_cache",
    "Remembered": "Cache",
    "forgotten": "generation",
    "made_once": "locked_cached_property",
    "taken_apart": "split_varlen_arguments",
    "refuse_ragged": "refuse_varlen",
    "launched_too": "batch.launched_parameter",
    "slot_of_block": "batch.begin",
    "KeysPlan": "DkdvPlan",
    "Rim": "BoundaryBlock",
    "_put_right": "_copy_if_misaligned",
    "class Memory": "ArraySpec",
    "_said": "a name that says what it holds",
}
WORD = re.compile(r"(?<![\w/.-])(?:" + "|".join(map(re.escape, RETIRED)) + r")(?![\w-])")
FILES = [
    path
    for folder, pattern in (
        ("flashgen", "**/*.py"),
        ("benchmarks", "**/*.py"),
        ("templates", "**/*.jinja"),
        ("generated", "*.cu"),
    )
    for path in sorted((ROOT / folder).glob(pattern))
]


def retired_in(text: str) -> list[str]:
    """Returns the retired identifiers of a text, each with its line and the term to use."""
    return [
        f"line {number}: {word}, use {RETIRED[word]}"
        for number, line in enumerate(text.splitlines(), 1)
        for word in WORD.findall(line)
    ]


@pytest.mark.parametrize("folder", ["flashgen", "benchmarks", "templates", "generated"])
def test_retired_identifiers_are_gone(folder: str) -> None:
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] == folder]
    assert files
    found = [f"{path.relative_to(ROOT)}, {each}" for path in files for each in retired_in(path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_a_retired_identifier_is_noticed() -> None:
    assert retired_in("struct Work {};\nconst auto work = work_of(index, arguments);") == [
        "line 1: struct Work, use struct WorkTile",
        "line 2: work_of, use work_tile_at",
    ]
    assert not retired_in("const WorkTile work = work_tile_at(index, arguments);")
