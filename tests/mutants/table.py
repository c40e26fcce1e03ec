"""Mutants of flashgen: one small mistake each, and the tests that must fail with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A mistake: `before`, which occurs once in `file`, becomes `after`.

    name: the effect of the mistake. tests: pytest paths, `path` or `path::test`, of which at least one must fail.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTANTS = (
    # language, analysis
    Mutant(
        "causal without the diagonal",
        "flashgen/language/masks.py",
        "lambda b, h, q, k: k <= _aligned(q, align)",
        "lambda b, h, q, k: k < _aligned(q, align)",
        ("tests/language/test_masks_and_scores.py",),
    ),
    Mutant(
        "scalars taken for non-negative in the inequalities",
        "flashgen/analysis/closed_forms/inequalities.py",
        "(node in _NEVER_NEGATIVE or isinstance(node, ops.Abs))",
        "(node in _NEVER_NEGATIVE or isinstance(node, (ops.Abs, ops.Capture)))",
        ("tests/analysis/test_bounds.py::test_a_scalar_may_be_negative",),
    ),
    Mutant(
        "float intervals not widened",
        "flashgen/analysis/intervals/interval.py",
        "_RELATIVE = 2.0**-20",
        "_RELATIVE = 0.0",
        ("tests/analysis/test_intervals.py::test_bounds_of_one_element_include_float32_rounding",),
    ),
    Mutant(
        "// and % by negative constants in device ranges",
        "flashgen/codegen/expressions/interval_text.py",
        "isinstance(node.args[1], sympy.Integer) and int(node.args[1]) > 0:",
        "isinstance(node.args[1], sympy.Integer):",
        ("tests/lists/test_listed_tiles.py::test_lists_equal_the_classes",),
    ),
    Mutant(
        "tiles of every sequence use the length of the first",
        "flashgen/codegen/assembly.py",
        '_SEQUENCE = "const int b = work.batch;"',
        '_SEQUENCE = "const int b = 0;"',
        ("tests/attention/test_bound_arrays.py::test_padding_by_closed_forms",),
    ),
    Mutant(
        "distinct arrays of one name merged",
        "flashgen/language/bound.py",
        "if name in bound_left and bound_left[name].original is bound_right[name].original:",
        "if name in bound_left:",
        ("tests/language/test_closures.py::test_distinct_arrays_of_one_name_get_distinct_names",),
    ),
    Mutant(
        "a GPU copy of changed values is kept",
        "flashgen/language/bound.py",
        "copied is None or not _same_bytes(copied, values)",
        "copied is None",
        ("tests/language/test_closures.py::test_copies_have_current_values",),
    ),
    Mutant(
        "// by a range that starts at 0 taken for one without 0",
        "flashgen/analysis/intervals/evaluation.py",
        "    crosses = (b.low <= 0) & (b.high >= 0)\n    largest",
        "    crosses = (b.low < 0) & (b.high >= 0)\n    largest",
        ("tests/analysis/test_intervals.py::test_all_small_intervals_of_integers",),
    ),
    Mutant(
        "shifts clamped at 30",
        "flashgen/analysis/intervals/evaluation.py",
        "return np.clip(b.low, 0, 31), np.clip(b.high, 0, 31)",
        "return np.clip(b.low, 0, 30), np.clip(b.high, 0, 30)",
        ("tests/analysis/test_intervals.py::test_all_small_intervals_of_integers",),
    ),
    Mutant(
        "bounds of integer conversion ignore NaN",
        "flashgen/analysis/intervals/evaluation.py",
        "return Interval(np.where(a.nan, np.minimum(low, 0), low), np.where(a.nan, np.maximum(high, 0), high))",
        "return Interval(low, high)",
        ("tests/analysis/test_intervals.py::test_nan_converts_to_0",),
    ),
    Mutant(
        "minimum and maximum with NaN bounded as with numbers",
        "flashgen/analysis/intervals/evaluation.py",
        "either = hull(a, b)",
        "either = picked",
        ("tests/analysis/test_intervals.py::test_nan_inputs_and_results",),
    ),
    Mutant(
        "0 x infinity taken for a number",
        "flashgen/analysis/intervals/evaluation.py",
        "a.nan | b.nan | (infinite & zero))",
        "a.nan | b.nan)",
        ("tests/analysis/test_intervals.py::test_nan_inputs_and_results",),
    ),
    Mutant(
        "infinity - infinity in one order only",
        "flashgen/analysis/intervals/evaluation.py",
        "(np.isposinf(a.high) & np.isneginf(b.low)) | (np.isneginf(a.low) & np.isposinf(b.high))",
        "np.isposinf(a.high) & np.isneginf(b.low)",
        ("tests/analysis/test_intervals.py::test_nan_inputs_and_results",),
    ),
    Mutant(
        "infinity - infinity in the other order only",
        "flashgen/analysis/intervals/evaluation.py",
        "(np.isposinf(a.high) & np.isneginf(b.low)) | (np.isneginf(a.low) & np.isposinf(b.high))",
        "np.isneginf(a.low) & np.isposinf(b.high)",
        ("tests/analysis/test_intervals.py::test_nan_inputs_and_results",),
    ),
    Mutant(
        "sine and cosine with period 4 pi",
        "flashgen/analysis/intervals/evaluation.py",
        "np.floor((a.high - phase) / (2 * np.pi)) > np.floor((a.low - phase) / (2 * np.pi))",
        "np.floor((a.high - phase) / (4 * np.pi)) > np.floor((a.low - phase) / (4 * np.pi))",
        ("tests/analysis/test_intervals.py::test_sine_and_cosine_reach_their_extremes",),
    ),
    Mutant(
        "minimum and maximum of zeros return the first operand",
        "flashgen/language/evaluate.py",
        "np.where((a == 0) & (b == 0), a + b, larger)",
        "np.where((a == 0) & (b == 0), a, larger)",
        ("tests/language/test_evaluate.py::test_minimum_and_maximum_of_zeros_and_nan",),
    ),
    Mutant(
        "the larger of two equal operands has the whole gradient",
        "flashgen/analysis/derivatives.py",
        "algebra.product(constant(0.5), algebra.total(da, db))",
        "da",
        ("tests/reference/test_tangents.py::test_symbolic_derivatives_keep_the_conventions",),
    ),
    # reference
    Mutant(
        "dropout's threshold rounded down",
        "flashgen/reference/dropout.py",
        "(rounded := round(kept))",
        "(rounded := int(kept))",
        ("tests/reference/test_dropout.py",),
    ),
    # kernels
    Mutant(
        "LSE of -inf not cleared in the backward's preprocess",
        "templates/backward/preprocess.cu.jinja",
        "      lse = kNoLse;\n",
        "",
        ("tests/attention/test_backward_calls.py::test_rows_with_scores_of_minus_infinity_have_zero_gradients",),
    ),
    Mutant(
        "the output overlays Q without a barrier",
        "templates/hopper/mainloop.cuh.jinja",
        '    named_barrier_sync({{ "1" if split_columns else "1 + kConsumers + warpgroup" }}, 128);\n',
        "",
        (
            "tests/faults/test_planted_faults.py::test_a_planted_fault_is_caught"
            "[forward, hopper, no room: no barrier before the output, data race]",
        ),
    ),
    Mutant(
        "sum of reads of element 0 before another element is lost",
        "templates/backward/capture_gradients.cuh.jinja",
        "  add_to_gradient(sums, run.offset, run.sum);\n  run =",
        "  if (run.offset > 0) add_to_gradient(sums, run.offset, run.sum);\n  run =",
        ("tests/attention/test_backward_captures.py::test_sequences_of_reads_of_element_0",),
    ),
    Mutant(
        "last sum of reads of element 0 of a lane is lost",
        "templates/backward/capture_gradients.cuh.jinja",
        "  } else {\n    add_to_gradient(sums, run.offset, run.sum);",
        "  } else if (run.offset > 0) {\n    add_to_gradient(sums, run.offset, run.sum);",
        ("tests/attention/test_backward_captures.py::test_sequences_of_reads_of_element_0",),
    ),
    Mutant(
        "last sums of reads of element 0 of a warp are lost",
        "templates/backward/capture_gradients.cuh.jinja",
        "if (threadIdx.x % 32 == 0) add_to_gradient(sums, first, sum);",
        "if (threadIdx.x % 32 == 0 && first > 0) add_to_gradient(sums, first, sum);",
        ("tests/attention/test_backward_captures.py::test_sequences_of_reads_of_element_0",),
    ),
    # build, release
    Mutant(
        "the architecture is not in a kernel's key",
        "flashgen/build/keys.py",
        '            "architecture": architecture,\n',
        "",
        ("tests/build/test_keys.py",),
    ),
    Mutant(
        "the kernel's options are not in a host kernel's key",
        "flashgen/build/host.py",
        '            "options": json.dumps(arguments),\n',
        "",
        ("tests/emulator/test_host_compiler.py::test_options_are_part_of_the_key",),
    ),
    Mutant(
        "the user's flags are not in a host library's key",
        "flashgen/build/host.py",
        '            "flags": json.dumps(compiler.command[1:]),\n',
        "",
        ("tests/emulator/test_host_compiler.py::test_cxx_and_the_environment_are_part_of_the_key",),
    ),
    Mutant(
        "the owner of an entry's files is not checked",
        "flashgen/build/entries.py",
        "                _check_trusted(os.fstat(file.fileno()), self.cache_status, name)\n",
        "",
        ("tests/build/test_trust.py::test_planted_entries_are_rebuilt",),
    ),
    Mutant(
        "files are not flushed to the disk",
        "flashgen/files.py",
        "    os.fsync(file.fileno())\n",
        "",
        (
            "tests/test_files.py::test_data_is_flushed_before_the_rename_and_the_rename_before_the_end",
            "tests/build/test_cache.py::test_an_entry_is_flushed_to_disk_before_it_is_renamed",
        ),
    ),
    Mutant(
        "folders are not flushed to the disk",
        "flashgen/files.py",
        "        os.fsync(descriptor)\n",
        "        pass\n",
        (
            "tests/test_files.py::test_data_is_flushed_before_the_rename_and_the_rename_before_the_end",
            "tests/build/test_cache.py::test_an_entry_is_flushed_to_disk_before_it_is_renamed",
        ),
    ),
    Mutant(
        "a release's manifest names files anywhere",
        "flashgen/build/prebuilt.py",
        'if not is_plain_name(file.get("path")) or file["path"] == MANIFEST:',
        'if file.get("path") == MANIFEST:',
        ("tests/release/test_release_writing.py::test_a_manifest_only_names_files_of_its_folder",),
    ),
    # attention
    Mutant(
        "num_splits of a call is ignored",
        "flashgen/attention/forward_dispatch.py",
        "return splits or dispatch.num_splits(",
        "return dispatch.num_splits(",
        ("tests/attention/test_decode.py::test_counters_are_reset",),
    ),
    Mutant(
        "a schedule of other sizes is accepted",
        "flashgen/attention/decode_schedule.py",
        "            if size != wanted:",
        "            if size < wanted:",
        ("tests/attention/test_decode_schedule.py::test_a_schedule_of_other_sizes_is_refused",),
    ),
    Mutant(
        "a schedule update keeps the old captures",
        "flashgen/attention/decode_schedule.py",
        "{**self._captures, **captures}",
        "{**captures, **self._captures}",
        ("tests/attention/test_decode_schedule.py::test_windows_with_captured_sizes",),
    ),
    Mutant(
        "undecided parts keep their sign under a negation",
        "flashgen/analysis/closed_forms/open_parts.py",
        "is_open, not value))",
        "is_open, value))",
        ("tests/analysis/test_ranges.py::test_ranges_of_a_tree_hold_for_any_bits",),
    ),
    Mutant(
        "a stream keeps too few counters",
        "flashgen/runtime/counters.py",
        " and found[1].size >= count:\n            return found[1]\n        return",
        ":\n            return found[1]\n        return",
        ("tests/runtime/test_counters.py::test_launches_that_need_more_counters_get_more",),
    ),
    Mutant(
        "the backward ignores a seed in memory",
        "templates/dropout.cuh.jinja",
        "return arguments.seed ? __ldg(arguments.seed) : make_uint2(",
        "return make_uint2(",
        ("tests/attention/test_calls.py::test_a_seed_in_memory",),
    ),
    Mutant(
        "cached lists ignore len_k",
        "flashgen/attention/tile_lists.py",
        "key = (problem.len_q, problem.len_k, shape.batch,",
        "key = (problem.len_q, shape.batch,",
        (
            "tests/attention/test_launch_cache.py::test_tile_lists_of_other_sizes",
            "tests/attention/test_launch_cache.py::test_calls_of_other_lengths",
        ),
    ),
    Mutant(
        "slots without room for a tile of each sequence",
        "flashgen/codegen/varlen.py",
        "EXTRA_SEQUENCES = 2",
        "EXTRA_SEQUENCES = 0",
        ("tests/codegen/test_varlen_text.py::test_workspace_slots_suffice_and_are_disjoint_for_any_lengths",),
    ),
    Mutant(
        "tensor maps of varlen batches begin at the array",
        "flashgen/launch/tensor_map_writer.py",
        "shape = replace(shape, rows_before=axes.rows_before)",
        "pass",
        ("tests/attention/test_varlen.py::test_sequences_of_one_token",),
    ),
    Mutant(
        "cached launches ignore bounds",
        "flashgen/attention/call_pass.py",
        "key: list[Any] = [bounds, splits]",
        "key: list[Any] = [splits]",
        ("tests/attention/test_varlen.py::test_captures_are_per_sequence_and_checked_against_the_bounds",),
    ),
    Mutant(
        "a sink counted for rows of no sequence",
        "templates/batch/varlen.cuh.jinja",
        "static_cast<unsigned>({{ index }}) < static_cast<unsigned>(arguments.batch) ?",
        "true ?",
        ("tests/attention/test_sinks.py::test_every_family_on_the_emulator",),
    ),
    Mutant(
        "overlaps of an append are not checked in each call",
        "flashgen/attention/appending.py",
        "prepared.alias_check.check(addresses)",
        "prepared.alias_check",
        ("tests/attention/test_append_kv.py::test_every_call_of_the_same_sizes_is_checked",),
    ),
    Mutant(
        "a cache converted under autocast",
        "flashgen/torch/autocast.py",
        "if entry.cache:",
        "if False:",
        ("tests/in_torch/test_caches.py::test_autocast_only_converts_queries",),
    ),
    Mutant(
        "torch told that an append writes nothing",
        "flashgen/torch/caches.py",
        '"append_kv", written=("k", "v")',
        '"append_kv"',
        ("tests/in_torch/test_caches.py::test_opcheck",),
    ),
    Mutant(
        "random cases with equal sequence lengths only",
        "tests/random_variants/serving.py",
        "min(max(int(random.choice(borders)), 0), shape.len_k)",
        "shape.len_k",
        ("tests/random_variants/test_planted.py::test_lengths_are_around_page_borders",),
    ),
    Mutant(
        "kinks judged as if the accurate tanh had no error",
        "tests/random_variants/meaning.py",
        "_TANH = 1e-6",
        "_TANH = 0.0",
        ("tests/random_variants/test_planted.py::test_kinks_within_the_error_of_tanh",),
    ),
    # several ranks
    Mutant(
        "a rectangle without empty rows counts as full",
        "flashgen/ranks/classes.py",
        "return PARTIAL if found.kind == FULL and found.rectangle != rectangle else found.kind",
        "return found.kind",
        (
            "tests/ranks/test_plans.py::test_classes_of_rectangles_equal_those_of_their_elements",
            "tests/ranks/test_plans.py::test_a_full_rectangle_that_continues_is_partial",
        ),
    ),
    Mutant(
        "dropout of a shard uses local key positions",
        "templates/shards.cuh.jinja",
        "{{ position }} + arguments.shard_k",
        "{{ position }}",
        ("tests/attention/test_shards.py::test_kernels_equal_the_reference",),
    ),
    Mutant(
        "shards beyond the sequence are accepted",
        "flashgen/attention/captures.py",
        "if first < 0 or not first + length <= whole <= LONGEST:",
        "if first < 0:",
        ("tests/attention/test_shards.py::test_offsets_outside_the_sequence_are_refused",),
    ),
    Mutant(
        "chunks of a rank always joined",
        "flashgen/ranks/plan.py",
        "if kind == PARTIAL or kind != moved_kind:",
        "if kind == PARTIAL:",
        ("tests/ranks/test_plans.py::test_each_score_is_counted_once",),
    ),
    Mutant(
        "full blocks joined although positions matter",
        "flashgen/ranks/plan.py",
        "_join_full_blocks(blocks) if self._can_join_blocks else blocks",
        "_join_full_blocks(blocks)",
        ("tests/ranks/test_plans.py::test_full_blocks_join_positions_only_where_nothing_depends_on_them",),
    ),
    Mutant(
        "gradients of a ring's keys are not sent back",
        "flashgen/torch/context_parallel/ring.py",
        "            self._sums.add(begin, end - begin, dk, dv)",
        "            pass",
        ("tests/in_torch/context_parallel/test_emulated.py::test_two_ranks_equal_one",),
    ),
    Mutant(
        "boundary rows from the wrong end of a chunk",
        "flashgen/ranks/halo.py",
        "Rows(stretch_k.row_of(own_first), own_end - own_first)",
        "Rows(stretch_k.row, own_end - own_first)",
        ("tests/ranks/test_plans.py::test_joined_boundary_keys_are_contiguous",),
    ),
    Mutant(
        "received halo rows always come first",
        "flashgen/torch/context_parallel/halos.py",
        "rows.rows_at(boundary.theirs_at, boundary.theirs.length).buffer",
        "rows.rows_at(0, boundary.theirs.length).buffer",
        ("tests/in_torch/context_parallel/test_emulated.py::test_boundaries_of_windows",),
    ),
    Mutant(
        "gradients of a halo are not sent back",
        "flashgen/torch/context_parallel/halos.py",
        "        dkv_sums.add(*lent.rows, *rows.pair())",
        "        pass",
        ("tests/in_torch/context_parallel/test_emulated.py::test_boundaries_of_windows",),
    ),
    Mutant(
        "the launch cache ignores strides",
        "flashgen/runtime/arrays.py",
        "((tensor.shape, tensor.stride(), tensor.dtype, tensor.device), tensor.data_ptr())",
        "((tensor.shape, tensor.dtype, tensor.device), tensor.data_ptr())",
        ("tests/in_torch/test_direct.py::test_only_calls_with_the_same_key_are_replayed",),
    ),
    Mutant(
        "a cached launch does not check its shard",
        "flashgen/attention/call_pass.py",
        "if prepared is not None and self.spec.sharded:",
        "if False:",
        ("tests/in_torch/test_direct.py::test_launches_into_given_memory_with_numbers",),
    ),
    Mutant(
        "torch's call key ignores strides",
        "flashgen/runtime/arrays.py",
        "strides = [list(tensor.stride()) for",
        "strides = [[None] * tensor.ndim for",
        ("tests/in_torch/test_direct.py::test_only_calls_with_the_same_key_are_replayed",),
    ),
    Mutant(
        "calls with misaligned tensors replay other launches",
        "flashgen/torch/direct.py",
        "if reduce(or_, addresses) % _ALIGNMENT:",
        "if False:",
        (
            "tests/in_torch/test_direct.py::test_replayed_launches_of_packed_sequences",
            "tests/in_torch/test_direct.py::test_misaligned_tensors_are_not_launched_as_others_that_may_be",
        ),
    ),
    Mutant(
        "repeated calls of torch's flash operators ignore arguments",
        "flashgen/torch/direct.py",
        "if each.options == options and each.fits(*tensors):",
        "if each.fits(*tensors):",
        ("tests/in_torch/test_flash_repeats.py::test_other_arguments_are_other_calls",),
    ),
    Mutant(
        "repeated calls of torch's flash operators outlive the launch cache",
        "flashgen/torch/direct.py",
        "is_stale = each.pass_.generation != each.generation",
        "is_stale = False",
        ("tests/in_torch/test_flash_repeats.py::test_a_cleared_launch_cache_forgets_repeated_calls",),
    ),
    Mutant(
        "torch's flash operator ignores is_causal",
        "flashgen/torch/flash_operators.py",
        "0 if is_causal else -1 if right is None",
        "-1 if right is None",
        ("tests/in_torch/test_sdpa_registry.py::test_windows_of_the_dense_operator",),
    ),
    Mutant(
        "torch's own kernel calls flashgen's operators",
        "flashgen/torch/sdpa_registry.py",
        "before, _THREAD.in_own_kernel = _THREAD.in_own_kernel, True",
        "before, _THREAD.in_own_kernel = _THREAD.in_own_kernel, False",
        ("tests/in_torch/test_sdpa_registry.py::test_torchs_own_kernel_may_call_another_operator",),
    ),
    Mutant(
        "a window of jax.nn is aligned to the last key",
        "flashgen/jax/dot_product.py",
        'sliding_window(*window, align="top_left")',
        "sliding_window(*window)",
        ("tests/in_jax/test_dot_product.py::test_results_and_gradients_are_those_of_jax",),
    ),
    Mutant(
        "backward winners ignore the GQA group",
        "flashgen/attention/backward_dispatch.py",
        "is not None, grouped=True)",
        "is not None)",
        ("tests/attention/test_backward_tuning.py::test_the_disk_is_read_once_per_class_of_lengths",),
    ),
    Mutant(
        "backward winners may have other tiles than kept lists",
        "flashgen/codegen/backward_candidates.py",
        "(same_tiles or not default.reads)",
        "True",
        ("tests/attention/test_backward_tuning.py::test_candidates_with_tile_lists_share_tile_sizes",),
    ),
    Mutant(
        "a mixed batch has too few blocks for its prompts",
        "flashgen/codegen/mma_sync/mixed.py",
        "sizes.total_q // plan.prefill_queries * sizes.heads_q",
        "sizes.total_q // plan.tile_q * sizes.heads_q",
        ("tests/attention/test_mixed_batches.py::test_mixtures_and_thread_orders",),
    ),
    Mutant(
        "work units of a mixed batch have no counters",
        "flashgen/codegen/mma_sync/mixed.py",
        "counts=partial(arrival_counters, spec),",
        "counts=None,",
        ("tests/codegen/test_mixed_kernel.py::test_a_launch_depends_on_tokens_and_sequences",),
    ),
)
