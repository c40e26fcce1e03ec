"""What holds from step to step: arrays that stay in place, batches while memory is measured, and CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batches import Made, Setup, built, make
from sdpa_reference import expected

RANGES: dict[int, list[tuple[int, int]]] = {0: [(2, 9)], 1: [(0, 30)]}


def test_metadata_refers_to_the_arrays_of_the_engine(device: torch.device) -> None:
    setup = Setup([1, 5], [20, 33], ranges=RANGES)
    made = make(setup, device)
    builder, _ = built(setup, device)
    metadata, next_one = builder.build(0, made.common), builder.build(0, made.common)
    assert metadata.seq_lens is made.common.seq_lens and metadata.query_start_loc is made.common.query_start_loc
    assert metadata.block_table is made.common.block_table_tensor
    for array, again in zip(metadata.ranges, next_one.ranges, strict=True):
        assert array.data_ptr() == again.data_ptr(), "a captured graph reads the array of its first step"
    other = torch.zeros_like(metadata.block_table)
    assert not builder.supports_draft_decode_metadata_update, "it would keep the ranges of the step before"
    assert built(replace(setup, ranges=None), device)[0].supports_draft_decode_metadata_update
    changed = builder.update_block_table(metadata, other, metadata.slot_mapping)
    assert changed == replace(metadata, block_table=other) and metadata.block_table is not other


def test_a_step_of_single_tokens_clears_the_ranges_of_the_step_before(device: torch.device) -> None:
    """It may replay a graph that was captured with ranges."""
    prompt, decode = Setup([9, 5], [20, 33], ranges=RANGES), Setup([1, 1], [21, 34], ranges={})
    builder, _ = built(prompt, device)
    captured = builder.build(0, make(prompt, device).common)
    assert (captured.ranges[1] >= 0).any(), "the prompt has ranges"
    assert builder.build(0, make(decode, device).common).ranges is None
    assert (captured.ranges[1][:2] < 0).all(), "no token of the step has a range"


def test_steps_without_metadata_give_zeros(device: torch.device) -> None:
    setup = Setup([3], [3])
    made = make(setup, device)
    out = torch.full_like(made.q, torch.nan)
    built(setup, device)[1].forward(made.layer, made.q, made.k_new, made.v_new, made.cache, None, out)
    assert not out.any()


def test_batches_that_mix_causal_and_other_requests_are_refused(device: torch.device) -> None:
    setup = Setup([3, 3], [3, 3])
    common = make(setup, device).common.replace(causal=torch.tensor([True, False]))
    with pytest.raises(NotImplementedError, match="mix causal and other requests"):
        built(setup, device)[0].build(0, common)


def test_quantized_outputs_are_refused(device: torch.device) -> None:
    setup = Setup([3], [3])
    made = make(setup, device)
    builder, impl = built(setup, device)
    given = (made.layer, made.q, made.k_new, made.v_new, made.cache, builder.build(0, made.common), made.q)
    with pytest.raises(NotImplementedError, match="does not quantize outputs"):
        impl.forward(*given, output_scale=torch.ones(1))


GRAPHS: dict[str, tuple[dict[str, Any], list[int], list[int], list[int], list[int]]] = {
    "decode": ({}, [1, 1, 1], [20, 1, 70], [1, 1, 1], [5, 60, 33]),
    "mixed": ({}, [1, 1, 20, 70], [16, 16, 32, 112], [21, 69, 1, 1], [40, 96, 10, 5]),
    "speculative": ({"speculative": 3}, [4, 4], [40, 16], [3, 5], [9, 48]),
    "window over float8": (
        {"cache_dtype": "fp8", "scales": (0.5, 2.0), "layer": {"sliding_window": 10}},
        [1, 1, 20, 10], [16, 16, 64, 32], [12, 18, 1, 1], [40, 33, 10, 5],
    ),
    "ranges": ({"ranges": RANGES}, [1, 1, 20, 10], [16, 16, 64, 32], [12, 18, 1, 1], [40, 33, 10, 5]),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHS)
def test_a_captured_graph_replays_other_batches(name: str) -> None:
    """The host reads nothing of the device, and graphs read lengths, tables and ranges when they run."""
    options, queries, keys, later_queries, later_keys = GRAPHS[name]
    device = torch.device("cuda")
    first = Setup(queries, keys, **options)
    later = replace(first, queries=later_queries, keys=later_keys)
    made, wanted = make(first, device), make(later, device)
    builder, impl = built(first, device)
    out = torch.empty_like(made.q)
    metadata = builder.build_for_cudagraph_capture(made.common)

    def step() -> None:
        impl.do_kv_cache_update(made.layer, made.k_new, made.v_new, made.cache, metadata.slot_mapping)
        impl.forward(made.layer, made.q, made.k_new, made.v_new, made.cache, metadata, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    _copy(wanted, made)
    torch.cuda.set_sync_debug_mode("error")
    try:
        builder.build(0, made.common.replace(query_start_loc_cpu=wanted.common.query_start_loc_cpu))
        step()  # eagerly
        eager = out.clone()
        out.fill_(torch.nan)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference = expected(later, wanted)
    for result in (eager, out):
        torch.testing.assert_close(result.double(), reference, atol=4e-3, rtol=4e-3)


def _copy(source: Made, to: Made) -> None:
    """Replaces the batch in the arrays that the graph reads, as vLLM does from step to step."""
    for name in ("q", "k_new", "v_new", "cache"):
        getattr(to, name).copy_(getattr(source, name))
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        getattr(to.common, name).copy_(getattr(source.common, name))
    table = source.common.block_table_tensor
    to.common.block_table_tensor[:, : table.shape[1]].copy_(table)
